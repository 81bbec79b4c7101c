"""Leaves of the region's changed policy and receipt keys, and of the log's own, where the command could write none: in a log of which several brokers have copies. And who hears of them: a broker by
its copy of the log, and one that has none, or is behind, by the note in the metadata store (region.trust.signing_key_note), which the broker that writes the log keeps there. So
does one with the keys of now that does not write it, until a note says which keys were given up. On the event loop.

A broker with the folder of before a change of the log's own keys hears of it by that leaf, as soon as it reads it, and by a word in the store before it signs (region.trust.changed_log_key).

Invariant: who has no key of the log cannot stop a broker that has the region's keys of now: a note in the store that does not hold, or is of before, is passed over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

from audit.trail import Trail
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.names import SpiffeId
from felix.tasks import end_tasks
from keys.bundle import RegionBundle
from keys.signing import SigningKey
from region.broker import Broker
from region.evidence.document_log import DocumentLog
from region.governance.pin_leaves import AGAIN_S, until_taken
from region.metadata.catalog import Catalog
from region.metadata.mirror import CatalogMirror
from region.metadata.transaction import Entry
from region.trust.changed_log_key import STALE_HINT as STALE_LOG_KEY_HINT
from region.trust.changed_log_key import LogKeyLeaf, stale_log_key, unsaid_log_key
from region.trust.log_key_store import require_log_key_of_now
from region.trust.signing_key_leaves import (
    NEVER_CHANGED,
    NOTE_HINT,
    STALE_HINT,
    KeyLeaf,
    LoggedKey,
    LoggedKeys,
    Role,
    given_up,
    joined,
    stale_key,
    take,
    unlogged,
)
from region.trust.signing_key_note import SigningKeyNote, decode_note

log = logging.getLogger("felix.region.governance")


class ChangedKeys:
    """One per broker. `log_key`: signs the region's log. `writes_here`: whether that is this broker's to write. `instead`: as `region.trust.signing_key_leaves.stale_key`."""

    def __init__(
        self,
        broker: Broker,
        own: RegionBundle,
        log_key: SigningKey,
        catalog: Catalog,
        mirror: CatalogMirror,
        trail: Trail,
        logged: DocumentLog,
        writes_here: Callable[[], bool],
        instead: Collection[bytes] = (),
    ) -> None:
        self._broker = broker
        self._own = own
        self._identity = SpiffeId(own.region, own.mesh, "broker", broker.broker_id)
        self._log_key = log_key
        self._catalog = catalog
        self._mirror = mirror
        self._trail = trail
        self._logged = logged
        self._writes_here = writes_here
        self._instead = instead
        self._noted: LoggedKeys = {}
        """as the newest note said that held"""
        self._entry: Entry | None = None
        """what the store had when it was read last"""
        self._note: SigningKeyNote | None = None
        """the same, where it is a note that holds"""
        self.unread = ""
        """a sentence where it is none"""
        self._writing: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._why = self._hint = ""

    @property
    def problem(self) -> str:
        """What is wrong, and what to do, where the log has got the leaf of a later change, by this broker's copy or by the store, while this broker runs with the bundle of before."""
        if self._why:
            return f"{self._why} {self._hint}"
        if by_log := stale_key(self._own, self._logged.signing_keys, self._instead):
            return f"{by_log} {STALE_HINT}"
        by_note = stale_key(self._own, self._noted, self._instead, is_note=True)
        return f"{by_note} {NOTE_HINT}" if by_note else ""

    @property
    def refusal(self) -> UnavailableError | None:
        """Why this broker takes nothing any more, and never writes the log: the log has got the leaf of a later change since it started."""
        return UnavailableError(self._why, hint=self._hint) if self._over.is_set() else None

    @property
    def over(self) -> RequestError | None:
        """The same, as a start says it."""
        return (
            RequestError(self._why, code=Code.CONFIG_INVALID, hint=self._hint)
            if self._over.is_set()
            else None
        )

    def look(self) -> None:
        """After the log has got leaves: does this broker have the keys of now? Raises `refusal`, here and from now on, where it has not."""
        self._decide()
        if (refusal := self.refusal) is not None:
            raise refusal

    def see_log_key(self, key_id: bytes, index: int) -> None:
        """The leaf of the log at `index`, which may be behind what this broker has of it, says that this key signs the log. Raises `refusal`, here and from now on, where this broker's bundle does not
        name it."""
        if why := stale_log_key(self._own, key_id, index):
            self._end(why, STALE_LOG_KEY_HINT)
        if (refusal := self.refusal) is not None:
            raise refusal

    async def require_log_key(self) -> None:
        """Before this broker signs the log. Raises `refusal`, here and from now on, where the metadata store says under this broker's key of the log that others sign it now;
        UnavailableError where the store does not answer."""
        try:
            await require_log_key_of_now(self._catalog, self._own)
        except RequestError as error:
            self._end(error.sentence, error.hint)
        if (refusal := self.refusal) is not None:
            raise refusal

    def _end(self, why: str, hint: str) -> None:
        if not self._over.is_set():
            self._why, self._hint = why, hint
            self._over.set()
            log.error("this broker ends: %s", why)

    def _decide(self) -> None:
        # A bundle that skips a key is found by the log alone: an earlier note may name a key that was left out since (--drop-earliest).
        by_log = stale_key(self._own, self._logged.signing_keys, self._instead)
        why = by_log or given_up(self._own, self._noted, is_note=True)
        if why:
            self._end(why, STALE_HINT if by_log else NOTE_HINT)

    def read_note(self) -> None:
        """Take in what the store has. What a note says that holds was given up is remembered while this broker runs, whatever comes after it."""
        entry = self._mirror.signing_keys
        if entry == self._entry:
            return
        self._entry, self._note, self.unread = entry, None, ""
        if entry is None:
            return
        try:
            self._note = decode_note(entry.value, self._own)
        except FelixError as error:
            self.unread = (
                f"The metadata store has a note of the region's signing keys ({entry.key}) that is not believed here: {error.sentence} "
                "The broker with the audit log puts the right one in its place, or takes it out where no key was changed; where that one is not believed, the keys of the log were changed, and this broker's folder is of before."
            )
            log.error("%s", self.unread)
        else:
            self._noted = joined(self._note.keys, self._noted)
            self._decide()

    async def ended(self) -> FelixError:
        """Wait until this broker may go on no more; why, as its next start says."""
        await self._over.wait()
        assert self.over is not None
        return self.over

    def log_soon(self) -> None:
        """Write the leaves that the log lacks, and the note that the store lacks, where the log is written here. Elsewhere only that note, and only while it does not say that
        keys were given up which this broker's bundle names as former ones: the broker with the log may have the folder of before, and would write no leaf."""
        if self._writing is not None or self._over.is_set():
            return
        lacking = unlogged(self._own, self._logged.signing_keys, self._instead)
        if self._writes_here():
            of_log = unsaid_log_key(self._own, self._logged.has_log_key) if self._trail.copied else None
            leaves: list[KeyLeaf | LogKeyLeaf] = [*lacking] if of_log is None else [of_log, *lacking]
            if leaves or self._lacks_note():
                self._writing = asyncio.ensure_future(self._write(leaves))
        elif any(said.change == "ended" and not self._notes(said) for said in lacking):
            self._writing = asyncio.ensure_future(self._tell(lacking))

    def _notes(self, said: KeyLeaf) -> bool:
        """Whether the store has a note that says the same."""
        return self._note is not None and said.key_id in self._note.keys.get(said.role, NEVER_CHANGED).ended

    def _to_note(self) -> dict[Role, LoggedKey]:
        return joined(self._logged.signing_keys, self._noted)

    def _lacks_note(self) -> bool:
        told = self._to_note()
        if not told:
            return self._entry is not None  # no key was changed: nothing is to stand there
        return self._note is None or self._note.keys != told

    async def _write(self, lacking: Sequence[KeyLeaf | LogKeyLeaf]) -> None:
        try:
            for said in lacking:
                leaf = said.leaf(self._own.region, self._broker.clock_ms(), str(self._identity))
                await until_taken(
                    partial(self._logged.append_key, leaf),
                    f"the change of the region's {said.role} key", self._trail, self._writes_here,
                )  # fmt: skip
            while self._writes_here() and self._lacks_note():
                await self._put_note(self._to_note())
                # Whoever takes it out of the store each time makes no more work than this.
                await asyncio.sleep(AGAIN_S)
                self.read_note()
        finally:
            self._writing = None

    async def _tell(self, lacking: list[KeyLeaf]) -> None:
        """Note what the log will say once a broker with the keys of now writes it."""
        try:
            told = self._to_note()
            for said in lacking:
                take(told, said.action, said.key_id, self._broker.clock_ms())
            await self._put_note(told)
            await asyncio.sleep(AGAIN_S)
            self.read_note()
        finally:
            self._writing = None
        # Meanwhile the log may have become this broker's to write.
        self.log_soon()

    async def _put_note(self, told: LoggedKeys) -> None:
        if not told:
            await self._remove_note()
            return
        note = SigningKeyNote.sign(self._own, told, self._log_key)
        revision = 0 if self._entry is None else self._entry.mod_revision
        try:
            await self._catalog.put_signing_keys(note.encode(), revision=revision)
        except FelixError as error:
            if error.code not in (Code.ALREADY_EXISTS, Code.CONFLICT):
                log.error("the metadata store did not take the note of the region's signing keys: %s", error)

    async def _remove_note(self) -> None:
        """What is no note of this region, as one of a region of the same name that was founded before it."""
        if self._entry is None:
            return
        try:
            await self._catalog.delete_signing_keys(self._entry.mod_revision)
        except FelixError as error:
            log.error(
                "the metadata store did not let go of what is no note of the region's signing keys: %s", error
            )

    async def close(self) -> None:
        """Leaves that are being written are given up; the next start writes them."""
        if self._writing is not None:
            await end_tasks(self._writing)
