"""The keys that a region destroyed, as its metadata store has them: `keys/destroyed/<key id>`, one record for each, for ever.

A record is written before its key is destroyed, or in the transaction that destroys it, so that no destruction is without its leaf for good
(region.streams.erasure). Invariants: what is held here is the newest that was seen of each key; it has no text but names, as it goes into the audit log.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import NamedTuple

from felix.errors import CorruptionError, RequestError
from region.metadata.port import MetadataStore, OutcomeUnknownError
from region.metadata.records import DestroyedKey, Keys, check_destroyed_key, decode, encode
from region.metadata.transaction import Absent, Compare, Delete, Entry, Event, ModRevision, Put

log = logging.getLogger("felix.region.erasure")


class Held(NamedTuple):
    """A record, the revision at which it was first written, and the one at which it was written last."""

    record: DestroyedKey
    created: int
    modified: int


async def remove_made_up(store: MetadataStore, key: str, is_held: Compare) -> None:
    """Remove the record at `key`, where there is one and `is_held` says that its key is in use still: no broker wrote it, and the brokers would go by
    its age and its leaf once that key is to be destroyed. Raises UnavailableError."""
    entry = await store.get(key)
    if entry is None:
        return
    result = await store.transact([ModRevision(key, entry.mod_revision), is_held], [Delete(key)])
    if result.succeeded:
        log.error(
            "%s stood for a key that is in use; it was written by something other than Felix, and is removed.",
            key,
        )


class DestroyedKeys:
    """One per broker. Whoever follows the store tells it what it `hear`s; a broker that is alone loads it once."""

    def __init__(self, store: MetadataStore, region: str) -> None:
        self._store, self._keys = store, Keys(region)
        self._held: dict[str, Held] = {}
        self.newest = 0
        """The revision at which the newest record was first written; 0 where there is none."""

    def __len__(self) -> int:
        return len(self._held)

    def all(self) -> list[Held]:
        """Every one, in no order."""
        return list(self._held.values())

    def find(self, key: str) -> Held | None:
        """That of a key, by its id in hex."""
        return self._held.get(key)

    def without_leaf(self) -> list[Held]:
        """Those whose leaf is not known to stand, oldest first."""
        found = [held for held in self._held.values() if held.record.leaf is None]
        return sorted(found, key=lambda held: (held.created, held.record.key))

    async def load(self) -> None:
        """All that the store has. Raises UnavailableError."""
        for entry in (await self._store.load(self._keys.destroyed_key(""))).entries:
            self.hear(Event(entry.key, entry))

    def hear(self, event: Event) -> bool:
        """Whether the change is of such a record."""
        start = self._keys.destroyed_key("")
        if not event.key.startswith(start):
            return False
        if event.entry is None:
            # No broker removes one; who did cannot have its leaf be forgotten here.
            log.error(
                "%s is gone from the metadata store: it was removed by something other than Felix.", event.key
            )
            return True
        try:
            self._take(event.entry)
        except CorruptionError as error:
            log.error("%s", error)
        return True

    def _take(self, entry: Entry) -> Held:
        record = decode(entry.value, DestroyedKey, entry.key)
        if self._keys.destroyed_key(record.key) != entry.key:
            raise CorruptionError(f"{entry.key} in the metadata store is of another key, {record.key}.")
        try:
            check_destroyed_key(record)
        except RequestError as error:
            raise CorruptionError(
                f"{entry.key} in the metadata store was written by something other than Felix: {error.sentence}"
            ) from error
        known = self._held.get(record.key)
        if known is not None and known.modified > entry.mod_revision:
            return known
        held = Held(record, entry.create_revision, entry.mod_revision)
        self._held[record.key] = held
        self.newest = max(self.newest, held.created)
        return held

    async def add(self, record: DestroyedKey) -> Held:
        """Write this one, unless the key has one. Raises UnavailableError, CorruptionError."""
        key = self._keys.destroyed_key(record.key)
        with suppress(OutcomeUnknownError):
            await self._store.transact([Absent(key)], [Put(key, encode(record))])
        return await self._read(record.key)

    async def swap(self, held: Held, record: DestroyedKey) -> Held:
        """Write this in place of the one that is held; what stands there afterwards, which may be another broker's. Raises UnavailableError,
        CorruptionError."""
        key = self._keys.destroyed_key(record.key)
        with suppress(OutcomeUnknownError):
            await self._store.transact([ModRevision(key, held.modified)], [Put(key, encode(record))])
        return await self._read(record.key)

    async def _read(self, number: str) -> Held:
        key = self._keys.destroyed_key(number)
        entry = await self._store.get(key)
        if entry is None:
            raise CorruptionError(
                f"{key} is gone from the metadata store: it was removed by something other than Felix.",
                hint="Put back the metadata store as it was.",
            )
        return self._take(entry)
