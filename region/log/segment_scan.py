"""The entries of a segment's file, one after another, and what each of them changes: annotations and producers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from felix.batch import BatchHeader
from region.log.errors import SegmentDamagedError
from region.log.producers import ProducerTable, Remembered
from region.log.segment import (
    ENTRY_BYTES_MAX,
    EntryIncompleteError,
    SegmentEntry,
    SegmentHeader,
    decode_entry,
)
from region.log.unread import Reads

WINDOW_BYTES: Final = 4 * ENTRY_BYTES_MAX
"""Read at once while scanning: a few of the largest entries, so memory stays bounded whatever a segment holds."""


def annotate(
    annotations: dict[int, bytes], slot: int, annotation: bytes, *, alone: bool, is_note: bool = False
) -> None:
    """Let an entry's annotation count. An entry that stands `alone`, without a batch, and has no bytes frees its slot. A note is no annotation."""
    if is_note:
        return
    if annotation:
        annotations[slot] = annotation
    elif alone:
        annotations.pop(slot, None)


def count_batch(producers: ProducerTable, header: BatchHeader) -> None:
    """Let a batch of the log count for its producer."""
    producers.settle(header.base_offset)
    producers.record(
        header.producer_id,
        Remembered(
            header.producer_epoch,
            header.base_sequence,
            header.base_sequence + header.records,
            header.base_offset,
            header.append_time_ms,
        ),
    )


def damaged(path: Path, position: int, offset: int, what: str) -> SegmentDamagedError:
    """The error that names file, position and offset."""
    return SegmentDamagedError(path, position, offset, what)


def scan_file(
    files: Reads, descriptor: int, segment: SegmentHeader, start: int, end: int, *, verify_bodies: bool
) -> Iterator[SegmentEntry]:
    """Every entry from `start` on, window by window. Raises EntryDamagedError where one is not whole before `end`."""
    for entry, _ in scan_bytes(files, descriptor, segment, start, end, verify_bodies=verify_bodies):
        yield entry


def scan_bytes(
    files: Reads,
    descriptor: int,
    segment: SegmentHeader,
    start: int,
    end: int,
    *,
    verify_bodies: bool,
    window_bytes: int = WINDOW_BYTES,
) -> Iterator[tuple[SegmentEntry, memoryview]]:
    """As `scan_file`, with each entry's bytes; of a body that was not verified perhaps only a part. `window_bytes` are read at a time, and what an entry
    needs that is longer. An entry is decoded when it is asked for: who stops early pays for what was taken."""
    position, wanted = start, window_bytes
    while position < end:
        window = memoryview(files.pread(descriptor, min(wanted, end - position), position))
        if not window:
            raise EntryIncompleteError("the file is shorter than it was", 1)
        asked, wanted = wanted, window_bytes
        begin, index = position, 0
        while index < len(window):
            try:
                entry = decode_entry(
                    window,
                    index,
                    at=begin,
                    salt=segment.salt,
                    shard=segment.identity.shard,
                    verify_body=verify_bodies,
                )
            except EntryIncompleteError as cut:
                # What only the window cuts off stands whole in the next one.
                if position + cut.needed > end or (index == 0 and cut.needed <= asked):
                    raise
                wanted = max(window_bytes, cut.needed)
                break
            if entry.end > end:
                raise EntryIncompleteError(
                    f"{end - entry.position} bytes of an entry's {entry.length}", entry.length
                )
            yield entry, window[index : index + entry.length]
            index += entry.length
            position = entry.end
