"""The word in the metadata store that a key of the region's own audit log has ended (region.trust.changed_log_key): told while no broker runs, and asked for by each broker before it
opens the log, and before it signs. On the event loop. Callers: cli.region, region.startup.
"""

from __future__ import annotations

import asyncio
from typing import Final

from felix.errors import Code, RequestError
from keys.bundle import RegionBundle
from keys.signing import SigningKey
from region.cluster.audit_home import AuditHome
from region.cluster.records import ClusterKeys
from region.metadata.catalog import Catalog
from region.metadata.port import MetadataStore
from region.trust.changed_log_key import STALE_HINT, ended_word, sign_word, with_word, word_of

TRIES_MAX: Final = 3
"""Somebody else wrote it in between."""
LOOK_S: Final = 0.25
"""How often is looked whether the lease of a broker that was killed is over."""
SLACK_S: Final = 3.0
"""How much later than its lease the record of a broker that was killed may go."""


async def require_stopped(store: MetadataStore, region: str, lease_ms: int) -> None:
    """Wait until no broker is alive, for as long as one that was killed may seem to be. Raises RequestError(CONFLICT) with those that are, or where no broker has a copy of the log, which is on
    the disk of one; CorruptionError where the store does not say which, UnavailableError."""
    home = await store.get(ClusterKeys(region).audit_home)
    if home is not None and AuditHome.of(home).stream is None:
        raise RequestError(
            f"The audit log of {region} is on the disk of broker {AuditHome.of(home).broker} alone.",
            code=Code.CONFLICT,
            hint="Run this on that broker's machine, while it is stopped.",
        )
    prefix, deadline = (
        ClusterKeys(region).brokers,
        asyncio.get_running_loop().time() + lease_ms / 1_000 + SLACK_S,
    )
    while alive := [entry.key.removeprefix(prefix) for entry in (await store.range(prefix)).entries]:
        if asyncio.get_running_loop().time() >= deadline:
            raise RequestError(
                f"Brokers of {region} are running: {', '.join(sorted(alive))}. What they sign meanwhile would stand behind the keys' end.",
                code=Code.CONFLICT,
                hint="Stop the region's brokers, on all machines (felix region down), and run this again.",
            )
        await asyncio.sleep(LOOK_S)


async def told_successor(catalog: Catalog, own: RegionBundle) -> bytes | None:
    """The Ed25519 key that the store says signs the log next, under the key of now in this bundle; None where it says nothing. Raises UnavailableError."""
    entry = await catalog.store.get(catalog.keys.log_keys())
    word = None if entry is None else word_of(entry.value, own)
    return None if word is None else word.successor


async def tell_ended(
    catalog: Catalog, own: RegionBundle, key: SigningKey, successor: bytes, now_ms: int, *, anew: bool = False
) -> None:
    """Say in the store that this key of the log ended, and which one signs next. Called again, it says so again. Raises RequestError(CONFLICT) where the store names another one, unless this
    begins `anew`, and where others write it all the time; UnavailableError."""
    for _ in range(TRIES_MAX):
        entry = await catalog.store.get(catalog.keys.log_keys())
        held = None if entry is None else entry.value
        word = word_of(held, own)
        if word is not None and word.successor == successor:
            return
        if word is not None and not anew:
            raise RequestError(
                f"The metadata store says that the key of the audit log of {own.region} in this folder has ended, and names another one than this would make: the keys were changed, or begun to be, elsewhere.",
                code=Code.CONFLICT,
                hint="Put bundle.json and secrets/ of that change into this folder; where it was cut off, run this again where it was begun. Where nobody has what it made, and no broker was started with "
                "it: --begin-anew.",
            )
        try:
            await catalog.put_log_keys(
                with_word(held, sign_word(own, key, successor, now_ms), own),
                revision=0 if entry is None else entry.mod_revision,
            )
        except RequestError as error:
            if error.code not in (Code.ALREADY_EXISTS, Code.CONFLICT):
                raise
        else:
            return
    raise RequestError(
        f"The word of the ended keys of the audit log of {own.region} was written by others, {TRIES_MAX} times.",
        code=Code.CONFLICT,
        hint="Stop the region's brokers, all of them.",
    )


async def require_log_key_of_now(catalog: Catalog, own: RegionBundle) -> None:
    """Raises RequestError(CONFIG_INVALID) where the store says, under the key that this bundle names for the region's own log, that other keys sign it now; UnavailableError where
    the store does not answer."""
    entry = await catalog.store.get(catalog.keys.log_keys())
    if entry is not None and (why := ended_word(entry.value, own)):
        raise RequestError(why, code=Code.CONFIG_INVALID, hint=STALE_HINT)
