"""Which parts of a damaged segment's file cannot be read, and what is known of each: between which points of the log it lies, and between which bytes.
Blocking: threads only.

Invariants:
- what lies in no part holds: its checksums do, and offsets and epochs follow each other;
- a part begins and ends where entries do, at points of the log that are known exactly: so what is put into it fits, or does not.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from felix.batch import body_checksum
from region.log.point import LogPoint, PointCounter
from region.log.segment import (
    ENTRY_HEAD_BYTES_MAX,
    ENTRY_HEADER_BYTES,
    EntryDamagedError,
    EntryIncompleteError,
    SegmentEntry,
    SegmentHeader,
    decode_entry,
    find_entry,
)
from region.log.segment_scan import WINDOW_BYTES
from region.log.segment_state import SegmentState
from region.log.unread import Reads

LOST_PARTS_MAX: Final = 4_096
"""Of a segment, half a megabyte in memory: the last one goes on to the segment's end, over what can still be read there, too."""


class LostPart(NamedTuple):
    """Of a segment's file: bytes from `position` to `end` that do not hold, or lie between such."""

    position: int
    end: int
    begin: LogPoint
    """of the log, where the part begins"""
    next_offset: int
    """of what stands behind it"""
    limit: LogPoint
    """a point at its end, or behind the batch that stands there: how many notes are before that batch nobody knows"""
    epoch: int
    """of what stands before it"""
    next_epoch: int
    has_copies: bool
    """whether it begins with the segment's copies of annotations"""

    def joined(self, later: LostPart) -> LostPart:
        """Both, and what is between them."""
        return self._replace(
            end=later.end, next_offset=later.next_offset, limit=later.limit, next_epoch=later.next_epoch
        )


_EPOCH_MAX: Final = (1 << 32) - 1


class _Survey:
    """Along the entries of one file."""

    def __init__(self, segment: SegmentState) -> None:
        self.parts = list[LostPart]()
        self._segment = segment
        self._counter = PointCounter(segment.header, segment.base_note)
        self._epoch = 0
        self._copies = 0
        self._has_own = False
        self._is_exact = True
        self._open: LostPart | None = None

    def fits(self, entry: SegmentEntry) -> bool:
        """Whether its head may stand where it does."""
        segment, offset = self._segment, self._counter.offset
        return (
            (entry.base_offset == offset or (not self._is_exact and entry.base_offset > offset))
            and (entry.leader_epoch >= self._epoch)
            and entry.end <= segment.segment_bytes
            and entry.next_offset <= segment.next_offset
        )

    def lost(self, position: int, entry: SegmentEntry | None) -> None:
        """From here on something cannot be read; of `entry` the head can."""
        head = self._segment.header.head
        if self._open is not None and self._is_exact:
            self._close(position, self._counter.offset, self._counter.point, self._epoch)
        if self._open is None:
            has_copies = not self._has_own and (head is None or self._copies < head.carried)
            at = self._segment.start if has_copies else position
            point = self._counter.point
            self._open = LostPart(at, at, point, point.offset, point, self._epoch, _EPOCH_MAX, has_copies)
            self._is_exact = not has_copies
        if entry is None or (not self._is_exact and entry.header is None):
            self._is_exact = False
        else:
            self._follow(entry)

    def holds(self, entry: SegmentEntry) -> None:
        """It can be read, and fits."""
        if self._open is not None and not self._is_exact and entry.header is None:
            return
        before = self._counter.point
        was_exact = self._is_exact
        self._follow(entry)
        if self._open is not None:
            limit = before if was_exact else self._counter.point
            self._close(entry.position, entry.base_offset, limit, entry.leader_epoch)

    def end(self, position: int) -> None:
        """The file ends here."""
        segment = self._segment
        if self._open is None and (
            position != segment.segment_bytes or self._counter.point != segment.end_point
        ):
            self.lost(position, None)
        if self._open is not None:
            self._close(segment.segment_bytes, segment.next_offset, segment.end_point, _EPOCH_MAX)

    def _follow(self, entry: SegmentEntry) -> None:
        if self._counter.follow(entry):
            self._has_own = True
        else:
            self._copies += 1
        self._epoch = entry.leader_epoch
        if entry.header is not None:
            self._is_exact = True

    def _close(self, position: int, next_offset: int, limit: LogPoint, epoch: int) -> None:
        assert self._open is not None
        part = self._open._replace(end=position, next_offset=next_offset, limit=limit, next_epoch=epoch)
        self._open = None
        if len(self.parts) < LOST_PARTS_MAX:
            self.parts.append(part)
        else:
            self.parts[-1] = self.parts[-1].joined(part)


def lost_parts(files: Reads, descriptor: int, segment: SegmentState) -> list[LostPart]:
    """In the order of the file, which has one at most where it is gone (`descriptor` is -1). Raises OSError."""
    survey, position, end = _Survey(segment), segment.start, segment.segment_bytes
    header = segment.header
    while descriptor >= 0 and position < end:
        window = memoryview(files.pread(descriptor, min(WINDOW_BYTES, end - position), position))
        if not window:
            break
        index = 0
        while index < len(window):
            entry = None
            try:
                entry = decode_entry(
                    window, index, at=position, salt=header.salt, shard=header.identity.shard, verify_body=False
                )  # fmt: skip
                needed = entry.length
            except EntryIncompleteError as stopped:
                needed = stopped.needed
            except EntryDamagedError:
                needed = 0
            if index and index + needed > len(window) and position + index + needed <= end:
                break  # it stands whole at the beginning of the next window
            if entry is None or not survey.fits(entry):
                survey.lost(position + index, None)
                index = (next_entry(files, descriptor, header, position + index + 1, end) or end) - position
                break
            if _body_holds(window, index, entry):
                survey.holds(entry)
            else:
                survey.lost(entry.position, entry)
            index += entry.length
        position += index
    survey.end(min(position, end))
    return survey.parts


def _body_holds(window: memoryview, index: int, entry: SegmentEntry) -> bool:
    header = entry.header
    if header is None:
        return True
    body = window[index + entry.length - header.body_length : index + entry.length]
    return len(body) == header.body_length and body_checksum(body) == header.body_checksum


def next_entry(files: Reads, descriptor: int, header: SegmentHeader, position: int, end: int) -> int | None:
    """Where the first entry begins, from `position` on and before `end`, whose head can be read."""
    while position < end:
        window = files.pread(descriptor, min(WINDOW_BYTES, end - position), position)
        at = find_entry(window, salt=header.salt, shard=header.identity.shard)
        if at is not None:
            return position + at
        if len(window) <= ENTRY_HEAD_BYTES_MAX or position + len(window) >= end:
            return None
        # One that only the window cuts off is found in the next one.
        position += len(window) - ENTRY_HEAD_BYTES_MAX + ENTRY_HEADER_BYTES
    return None
