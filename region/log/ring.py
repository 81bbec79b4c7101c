"""The ring: the newest batches of a shard in memory, as the plain bytes that subscribers get.

It is the whole log of an `ephemeral` shard and the hot tail of a durable one. Nothing here does I/O.

Invariants: entries are contiguous in offset and never decrease in time; their bytes are at most `bytes_max`
and their number at most `entries_max`, except that the newest entry is always held. A ring with a pool (region.log.ring_pool) takes
from it what it holds and gives way to other rings, so it may hold nothing at all. Appending is O(1)
amortised, seeking O(log n). Used by one thread, the event loop's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

import msgspec

from region.log.ring_pool import RingPool

RING_BYTES_MAX: Final = 8 << 20
"""Bytes per shard held for subscribers that keep up: about a second of one shard at full rate."""
RING_ENTRIES_MAX: Final = 16_384
"""Bounds the bookkeeping where batches hold a single small record."""
ENTRY_OVERHEAD_BYTES: Final = 224
"""Of memory for an entry beside its data: the struct, its numbers, the head of the bytes, a place in two lists."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A readable batch: offsets in records, time in ms, `data` as it is sent to a subscriber."""

    base_offset: int
    next_offset: int
    append_time_ms: int
    data: bytes | memoryview


class Ring:
    """A bounded tail of entries. `first_offset` is the first one held, `next_offset` the one to come."""

    __slots__ = (
        "_bytes",
        "_ends",
        "_entries",
        "_head",
        "_pool",
        "bytes_max",
        "entries_max",
        "first_offset",
        "next_offset",
    )

    def __init__(
        self,
        next_offset: int = 0,
        *,
        bytes_max: int = RING_BYTES_MAX,
        entries_max: int = RING_ENTRIES_MAX,
        pool: RingPool | None = None,
    ) -> None:
        assert bytes_max > 0 and entries_max > 0
        self._pool = pool
        self.bytes_max = bytes_max
        self.entries_max = entries_max
        self.first_offset = next_offset
        self.next_offset = next_offset
        # Evicted entries leave from the front of the lists in one slice, once they are half of them.
        self._entries: list[Entry | None] = []
        self._ends: list[int] = []
        self._head = 0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries) - self._head

    @property
    def bytes_held(self) -> int:
        """Bytes of all entries held."""
        return self._bytes

    def append(self, entry: Entry) -> None:
        """Hold `entry`, evicting the oldest as the bounds ask. It must begin where the ring ends."""
        assert entry.base_offset == self.next_offset < entry.next_offset
        if self._pool is not None and not self._pool.take(self, _bytes_of(entry)):
            self.clear()
            self.first_offset = self.next_offset = entry.next_offset
            return
        self._entries.append(entry)
        self._ends.append(entry.next_offset)
        self._bytes += len(entry.data)
        self.next_offset = entry.next_offset
        while len(self) > 1 and (self._bytes > self.bytes_max or len(self) > self.entries_max):
            self._evict()

    def _oldest(self) -> Entry:
        entry = self._entries[self._head]
        assert entry is not None
        return entry

    def _evict(self) -> None:
        entry = self._oldest()
        self._entries[self._head] = None
        self._head += 1
        self._bytes -= len(entry.data)
        if self._pool is not None:
            self._pool.give(self, _bytes_of(entry))
        self.first_offset = entry.next_offset
        if 2 * self._head > len(self._entries):
            del self._entries[: self._head], self._ends[: self._head]
            self._head = 0

    def give_way(self) -> None:
        """Let go of the oldest entry, for another ring or stream."""
        self._evict()

    def clear(self) -> None:
        """Let go of every entry; the ring goes on from where it ends."""
        while len(self):
            self._evict()

    def evict_before(self, time_ms: int, hold: int | None = None) -> None:
        """Let go of entries appended before `time_ms`; with `hold` of none that reaches past that offset."""
        while len(self) and self._oldest().append_time_ms < time_ms:
            if hold is not None and self._oldest().next_offset > hold:
                break
            self._evict()

    def read(self, offset: int, max_bytes: int) -> list[Entry] | None:
        """Entries from the one that holds `offset` on, at least one and then up to `max_bytes` of them.

        An empty list at the end of the log; None where `offset` is older than `first_offset` or not yet
        there.
        """
        if not self.first_offset <= offset <= self.next_offset:
            return None
        found: list[Entry] = []
        size = 0
        for at in range(bisect_right(self._ends, offset, self._head), len(self._entries)):
            entry = self._entries[at]
            assert entry is not None
            size += len(entry.data)
            if found and size > max_bytes:
                break
            found.append(entry)
        return found

    def offset_for_time(self, time_ms: int) -> int:
        """Base offset of the first entry held that was appended at or after `time_ms`, else `next_offset`."""
        at = bisect_left(self._entries, time_ms, self._head, key=_time)
        entry = self._entries[at] if at < len(self._entries) else None
        return entry.base_offset if entry else self.next_offset

    def truncate(self, offset: int) -> None:
        """Forget entries that reach past `offset`; where that empties the ring, it goes on from `offset`."""
        while len(self) and self._ends[-1] > offset:
            entry = self._entries.pop()
            self._ends.pop()
            assert entry is not None
            self._bytes -= len(entry.data)
            if self._pool is not None:
                self._pool.give(self, _bytes_of(entry))
            self.next_offset = entry.base_offset
        if not len(self):
            self.first_offset = self.next_offset = offset


def _bytes_of(entry: Entry) -> int:
    return len(entry.data) + ENTRY_OVERHEAD_BYTES


def _time(entry: Entry | None) -> int:
    assert entry is not None
    return entry.append_time_ms
