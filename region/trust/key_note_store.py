"""The note of which signing keys a region gave up (region.trust.signing_key_note), put into the metadata store while no broker runs: where the brokers write the KEY leaves of a change, none of which knows
of it yet. So one with the folder of before does not start. On the event loop. Caller: cli.region.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Final

from felix.errors import Code, FelixError, RequestError
from keys.bundle import RegionBundle
from keys.signing import SigningKey
from region.metadata.catalog import Catalog
from region.trust.signing_key_leaves import LoggedKey, Role, given_up, key_id_of, stale_key, take, unlogged
from region.trust.signing_key_note import SigningKeyNote, decode_note

TRIES_MAX: Final = 3
"""Somebody else wrote it in between: a broker that still runs."""


async def note_given_up(
    catalog: Catalog,
    own: RegionBundle,
    log_key: SigningKey,
    now_ms: int,
    instead: Collection[bytes] = (),
    *,
    may_skip: bool = False,
) -> bool:
    """Note which keys this bundle names as former ones, beside what the store's note says, where it holds. `instead`: as `region.trust.signing_key_leaves.stale_key`. `may_skip`: the
    bundle leaves out keys of earlier changes, and may leave out the one that the note names last.
    False where that says so already. Raises UnavailableError; RequestError(CONFLICT)
    where others write it all the time, or it names a change that the bundle is of before."""
    for _ in range(TRIES_MAX):
        entry = await catalog.store.get(catalog.keys.signing_keys())
        told: dict[Role, LoggedKey] = {}
        if entry is not None:
            # One that does not hold is anybody's who writes the store: brokers do not believe it either.
            with suppress(FelixError):
                told = dict(decode_note(entry.value, own).keys)
        if (stale_key(own, told, instead) and not may_skip) or given_up(own, told, is_note=True):
            raise RequestError(
                f"Its note of the signing keys of {own.region} names a change of which the bundle in this folder has nothing.",
                code=Code.CONFLICT,
                hint="Where there was one, these keys were made from a folder of before it, or by a bundle that leaves it out: put that change's bundle.json into the folder, and change the keys "
                "once more. Where there was none, somebody has the key of the audit log (docs/runbooks/leaked-log-key.md).",
            )
        now = [key_id_of(public) for public in (*own.policy_keys, *own.receipt_keys)]
        lacking = unlogged(own, told, {*instead, *now} if may_skip else instead)
        if not lacking:
            return False
        for said in lacking:
            take(told, said.action, said.key_id, now_ms)
        note = SigningKeyNote.sign(own, told, log_key)
        try:
            await catalog.put_signing_keys(note.encode(), revision=0 if entry is None else entry.mod_revision)
        except RequestError as error:
            if error.code not in (Code.ALREADY_EXISTS, Code.CONFLICT):
                raise
        else:
            return True
    raise RequestError(
        f"The note of the signing keys of {own.region} was written by others, {TRIES_MAX} times.",
        code=Code.CONFLICT,
        hint="Stop the region's brokers, all of them.",
    )
