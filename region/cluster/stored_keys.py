"""Data keys that brokers of a region stored for themselves, before they shared the keys of streams: brought into the metadata store, so that each of
them opens what another sealed then.

They stand there as they stood in the broker's key file, wrapped under their stream keys and bound to stream, shard, epoch and id: pages of
`stored_keys/<incarnation>/<broker>/<page>`. Nothing is added any more. They are read when a stream is opened, and go after its deletion; without
the stream's key they were worth nothing.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Final

import msgspec

from felix.errors import CorruptionError
from keys.hierarchy import DataEntry
from keys.shared import SharedKeyring
from region.metadata.port import MetadataStore
from region.metadata.records import Keys
from region.metadata.transaction import OPERATIONS_MAX, Delete, Put

PAGE_KEYS: Final = 1_000
"""Of one record: half a MiB of JSON."""


class StoredKeys:
    """One per broker of several, whose id is `broker`."""

    def __init__(self, store: MetadataStore, keyring: SharedKeyring, broker: str) -> None:
        self._store = store
        self._keyring = keyring
        self._keys = Keys(keyring.region)
        self._broker = broker
        self._fetched: set[bytes] = set()

    async def bring(self) -> int:
        """Put what this broker stored into the store, once; how many keys that was. Its stream keys are there already. Raises what the
        store raises."""
        own = self._keyring.own
        if own is None:
            return 0
        found = await asyncio.to_thread(own.data_entries)
        total = sum(map(len, found.values()))
        done = self._keys.stored_keys_of(self._broker)
        entry = await self._store.get(done)
        if entry is not None and entry.value == b"%d" % total:
            return 0
        for incarnation, entries in found.items():
            record = self._keyring.find(incarnation)
            # Another broker's key may have been first: then these open here alone, with the broker's own keyring.
            entries = [one for one in entries if record is not None and one.stream_key_id == record.key_id]
            for number, start in zip(count(), range(0, len(entries), PAGE_KEYS), strict=False):
                key = self._keys.stored_keys(incarnation.hex(), self._broker, number)
                await self._store.transact(
                    [], [Put(key, msgspec.json.encode(entries[start : start + PAGE_KEYS]))]
                )
        await self._store.transact([], [Put(done, b"%d" % total)])
        return total

    async def fetch(self, incarnation: bytes) -> None:
        """Have the stored keys of a stream that is about to be opened. Raises UnavailableError, CorruptionError."""
        if incarnation in self._fetched:
            return
        for entry in (await self._store.load(self._keys.stored_keys(incarnation.hex()))).entries:
            try:
                found = msgspec.json.decode(entry.value, type=list[DataEntry])
            except msgspec.MsgspecError as error:
                raise CorruptionError(
                    f"{entry.key} in the metadata store cannot be read: {error}."
                ) from error
            self._keyring.take_stored(incarnation, found)
        self._fetched.add(incarnation)

    async def drop(self, incarnation: bytes) -> None:
        """The stream was deleted. Raises what the store raises."""
        self._fetched.discard(incarnation)
        prefix = self._keys.stored_keys(incarnation.hex())
        while (page := await self._store.range(prefix, limit=OPERATIONS_MAX)).entries:
            await self._store.transact([], [Delete(entry.key) for entry in page.entries])
