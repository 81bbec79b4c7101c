"""The sparse index of one segment: (offset, position, append time) about every `INDEX_INTERVAL_BYTES`.

One table answers both questions, "where is offset o" and "where does time t begin", because append times
never decrease within a shard. File layout, big-endian: a header of 64 bytes, then three columns::

    0  magic "FELIXIDX"   8     32 next_offset      8    after the segment's last batch
    8  version            4     40 first_time_ms    8    -1 for a segment without a batch
    12 entries            4     48 last_time_ms     8
    16 base_offset        8     56 checksum         8    XXH3-64 of 0..56 and the columns
    24 segment bytes      8     64 offsets u64 × n, positions u64 × n, times i64 × n

Invariants: columns grow together and never decrease; an index whose checksum or columns do not hold decodes
to None and is made anew from its segment, which is the truth. The writer appends while readers search: the
offset column, which they search first, grows last.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from typing import Final

import xxhash

from felix.batch import Buffer

INDEX_SUFFIX: Final = ".idx"
INDEX_INTERVAL_BYTES: Final = 64 << 10
"""A reader scans at most this and one batch to find its place; 24 bytes of memory per interval."""

_MAGIC: Final = b"FELIXIDX"
_VERSION: Final = 1
_HEADER: Final = struct.Struct(">8sIIQQQqqQ")
assert _HEADER.size == 64


class SparseIndex:
    """Floor search over the entries of one segment. `base_offset` and `start` are the segment's own."""

    __slots__ = (
        "base_offset", "first_time_ms", "last_time_ms", "next_offset", "offsets", "positions", "segment_bytes",
        "start", "times",
    )  # fmt: skip

    def __init__(self, base_offset: int, start: int) -> None:
        self.base_offset = base_offset
        self.start = start
        self.offsets = array("Q")
        self.positions = array("Q")
        self.times = array("q")
        self.next_offset = base_offset
        self.segment_bytes = start
        self.first_time_ms = -1
        self.last_time_ms = -1

    def add(self, base_offset: int, next_offset: int, position: int, end: int, time_ms: int) -> None:
        """Take note of a batch entry at `position`..`end` of the file."""
        assert base_offset >= self.next_offset and position >= self.segment_bytes
        last = self.positions[-1] if self.positions else self.start - INDEX_INTERVAL_BYTES
        if position - last >= INDEX_INTERVAL_BYTES:
            self.positions.append(position)
            self.times.append(time_ms)
            self.offsets.append(base_offset)
        if self.first_time_ms < 0:
            self.first_time_ms = time_ms
        self.last_time_ms = max(self.last_time_ms, time_ms)
        self.segment_bytes = end
        self.next_offset = next_offset

    def end_at(self, next_offset: int) -> None:
        """The segment stands for offsets up to here: compaction may have left the last of them out."""
        assert next_offset >= self.next_offset
        self.next_offset = next_offset

    def add_position(self, end: int) -> None:
        """Take note of an entry without a batch, which ends at `end`."""
        self.segment_bytes = end

    def position_for_offset(self, offset: int) -> int:
        """Where to scan from to find the batch that holds `offset`."""
        at = bisect_right(self.offsets, offset)
        return self.positions[at - 1] if at else self.start

    def position_for_time(self, time_ms: int) -> int:
        """Where to scan from to find the first batch appended at or after `time_ms`."""
        at = bisect_left(self.times, time_ms)
        return self.positions[at - 1] if at else self.start

    def encode(self) -> bytes:
        """The index file's bytes."""
        columns = b"".join(_big_endian(column) for column in (self.offsets, self.positions, self.times))
        head = _HEADER.pack(
            _MAGIC, _VERSION, len(self.offsets), self.base_offset, self.segment_bytes, self.next_offset,
            self.first_time_ms, self.last_time_ms, 0,
        )[:56]  # fmt: skip
        return b"".join((head, xxhash.xxh3_64_digest(head + columns), columns))


def decode_index(data: Buffer, *, base_offset: int, segment_bytes: int, start: int) -> SparseIndex | None:
    """The index, or None where it is damaged or does not belong to a segment of this offset and length."""
    if len(data) < _HEADER.size:
        return None
    magic, version, count, base, length, next_offset, first_ms, last_ms, _ = _HEADER.unpack_from(data, 0)
    view = memoryview(data)
    columns = bytes(view[_HEADER.size :])
    if (magic, version, base, length) != (_MAGIC, _VERSION, base_offset, segment_bytes):
        return None
    if len(columns) != 24 * count or xxhash.xxh3_64_digest(bytes(view[:56]) + columns) != view[56:64]:
        return None
    index = SparseIndex(base_offset, start)
    for at, column in enumerate((index.offsets, index.positions, index.times)):
        column.frombytes(columns[8 * count * at : 8 * count * (at + 1)])
        if sys.byteorder == "little":
            column.byteswap()
    index.next_offset, index.segment_bytes = next_offset, length
    index.first_time_ms, index.last_time_ms = first_ms, last_ms
    return index


def _big_endian(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        return column.tobytes()
    swapped = array(column.typecode, column)
    swapped.byteswap()
    return swapped.tobytes()
