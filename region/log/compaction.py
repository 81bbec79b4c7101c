"""Compaction: which records of closed segments go. Pure; region.log.compactor reads and writes the files.

Of every key the last record stays, in its place and under its offset; what is gone leaves a hole in the offsets. A
record without a key is nobody's successor and stays. The last record of a key that is a tombstone (it has a header
TOMBSTONE_HEADER) stays for `tombstone_ms` after its append, then it goes as well.

A pass learns the last offset of every key from the dirty end of the closed segments (`KeyMap`, bounded: a pass that
meets its bound ends there, the next one goes on), then copies the segments below that end, oldest first, without what
the map says is superseded. What was compacted before holds each key at most once, so it need not be in the map.

Invariants:
- offsets never change, and no record is invented: what is copied is in the log, byte for byte;
- a tombstone goes only in a pass that has removed every earlier record of its key before it;
- the newest record of the segments of a pass always stays: behind a hole there is always an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from felix.batch import TOMBSTONE_HEADER, Record
from region.log.epochs import EpochStart

COMPACTION_NAME: Final = "compaction"
KEYS_BYTES_MAX: Final = 64 << 20
"""Keys of one pass in memory, for the broker's one compaction at a time; about 400,000 short keys."""
KEY_OVERHEAD_BYTES: Final = 130
"""What a key costs besides its bytes: two objects and a place in a dict that is at times two thirds empty."""
DIRTY_RATIO: Final = 0.5
"""Half of the closed bytes new: each byte is copied about twice in its life."""
DIRTY_SEGMENTS_MAX: Final = 64
"""A slow stream's small segments are gathered before they are many."""
DIRTY_AGE_MS: Final = 24 * 3_600_000
"""However little is written: what was superseded or deleted is gone from the disk within a day of its segment's end."""


class CompactionState(msgspec.Struct, array_like=True, frozen=True):
    """What is known of a shard's compaction, in a checked file of its own.

    Below `clean_to` each key stands at most once. Below `tombstones_from` tombstones may be gone. `producers` (a
    snapshot) and `epochs` are those of the time before batches went: both can no longer be told from the batches alone.
    Below `learned_to` stands what records before it went for, in whatever segment; -1 of a version that did not say so.
    """

    clean_to: int = 0
    tombstones_from: int = 0
    producers: bytes = b""
    epochs: tuple[EpochStart, ...] = ()
    learned_to: int = -1

    @property
    def fixed_to(self) -> int:
        """The log cannot be cut below this offset: with what follows a record of the same key, that record would be gone as well."""
        return self.clean_to if self.learned_to < 0 else self.learned_to


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """One pass. Bytes of segment files; `clean_to` is how far the log is compacted now."""

    segments_read: int
    segments_written: int
    bytes_read: int
    bytes_written: int
    records_removed: int
    tombstones_removed: int
    clean_to: int
    elapsed_ns: int


def encode_compaction(state: CompactionState) -> bytes:
    """The payload of the compaction file."""
    return msgspec.msgpack.encode(state)


# Made here: shards and logs are opened on several threads, and msgspec learns a type at its first use, not safely on two.
_compaction: Final = msgspec.msgpack.Decoder(CompactionState)


def decode_compaction(payload: bytes) -> CompactionState | None:
    """The state, or None where the payload is not one."""
    try:
        return _compaction.decode(payload)
    except msgspec.MsgspecError:
        return None


class KeyMap:
    """Key → offset of its last record. `is_full` once the keys take `bytes_max`; the caller stops at a batch's end."""

    __slots__ = ("_bytes", "_offsets", "bytes_max")

    def __init__(self, bytes_max: int = KEYS_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._bytes = 0
        self._offsets: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def is_full(self) -> bool:
        """No further batch is to be added."""
        return self._bytes >= self.bytes_max

    def add(self, records: Iterable[Record]) -> None:
        """Take note of a batch. Offsets come in increasing."""
        offsets = self._offsets
        for record in records:
            if record.key is not None:
                key = bytes(record.key)
                if key not in offsets:
                    self._bytes += len(key) + KEY_OVERHEAD_BYTES
                offsets[key] = record.offset

    def last_offset(self, key: bytes) -> int:
        """-1 where the key is not in the map."""
        return self._offsets.get(key, -1)


class Verdicts(NamedTuple):
    """Of one batch: runs (first index, count) of consecutive records that stay; what went."""

    runs: list[tuple[int, int]]
    removed: int
    tombstones_removed: int
    last_tombstone: int
    """Offset of the last tombstone that went; -1 without one."""


def judge(records: Sequence[Record], keys: KeyMap, *, tombstones_before_ms: int, keep: int) -> Verdicts:
    """Which records of one batch stay. Tombstones appended before `tombstones_before_ms` go; offset `keep` stays."""
    runs: list[tuple[int, int]] = []
    tombstones, last_tombstone, begin = 0, -1, -1
    last_offset = keys.last_offset
    for at, record in enumerate(records):
        stays = True
        if record.key is not None and record.offset != keep:
            if record.offset < last_offset(bytes(record.key)):
                stays = False
            elif TOMBSTONE_HEADER in record.headers and record.timestamp_ms < tombstones_before_ms:
                stays = False
                tombstones += 1
                last_tombstone = record.offset
        if stays and begin < 0:
            begin = at
        elif not stays and begin >= 0:
            runs.append((begin, at - begin))
            begin = -1
    if begin >= 0:
        runs.append((begin, len(records) - begin))
    removed = len(records) - sum(count for _, count in runs)
    return Verdicts(runs, removed, tombstones, last_tombstone)


class DirtySpan(NamedTuple):
    """One closed segment as the trigger sees it. `last_time_ms` is -1 where it holds no batch."""

    next_offset: int
    segment_bytes: int
    last_time_ms: int


def is_due(closed: Sequence[DirtySpan], clean_to: int, *, now_ms: int, lag_ms: int) -> bool:
    """Whether a pass is worth its work: by ratio, by number or by age. Segments that still change little do not count."""
    dirty = [one for one in closed if one.next_offset > clean_to and one.last_time_ms <= now_ms - lag_ms]
    if not dirty:
        return False
    dirty_bytes = sum(one.segment_bytes for one in dirty)
    total = sum(one.segment_bytes for one in closed)
    return (
        dirty_bytes >= DIRTY_RATIO * total
        or len(dirty) >= DIRTY_SEGMENTS_MAX
        or dirty[0].last_time_ms + DIRTY_AGE_MS <= now_ms
    )


Pace = Callable[[], None]
"""Called between batches: sleeps where the work is to be of low priority, raises to end the pass."""
