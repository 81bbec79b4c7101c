"""Reading a log across its segments, while they are replaced. Blocking: threads only, any number at once.

Invariant: a file that is gone is damage only where the segments were not replaced meanwhile; else the read is done again with those that
there are now.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Final

from region.log.errors import OffsetOutOfRangeError, compacted
from region.log.frame import Frame, SealedBatch
from region.log.point import LogPoint
from region.log.segment_list import SegmentList, base_offset, base_point, first_local
from region.log.segment_reader import SegmentReader
from region.log.segment_scan import damaged

NOTES_READ_BYTES: Final = 1 << 20
"""Read at a time where notes are looked for."""


class LogReader:
    """Of one log: its segments, each read by `reader`."""

    __slots__ = ("_reader", "_segments")

    def __init__(self, segments: SegmentList, reader: SegmentReader) -> None:
        self._segments = segments
        self._reader = reader

    def read(
        self, offset: int, max_bytes: int, limit: int, *, around_damage: bool = False
    ) -> list[SealedBatch]:
        """Whole batches from the one that holds `offset` on, below offset `limit`: at least one where there is one,
        then up to `max_bytes`, all of one segment and usually of one read.

        Raises OffsetOutOfRangeError, CorruptionError (the bytes read are not what was written).
        """
        while True:
            segments = self._segments.now
            start = segments[0].base_offset
            if not start <= offset <= limit:
                raise OffsetOutOfRangeError(offset, start, limit)
            if offset == limit:
                return []
            segment = segments[bisect_right(segments, offset, key=base_offset) - 1]
            try:
                found = self._reader.read(segment, offset, max_bytes, limit, around_damage=around_damage)
            except FileNotFoundError:
                # Retention or compaction was faster; the segments that there are now say so above.
                if self._segments.now is segments:
                    raise damaged(segment.path, 0, offset, "the file is gone") from None
                continue
            if found or segment.next_offset >= limit:
                return found
            # What is left of this segment was compacted away: the next entry is in the next one.
            offset = segment.next_offset

    def beginning(self, *, is_last: bool) -> tuple[LogPoint, dict[int, bytes]]:
        """Where the first segment begins behind those that are in a store alone, or with `is_last` the one that is written to, and the
        annotations that it repeats.

        Raises as `read_frames` does.
        """
        while True:
            segments = self._segments.now
            first = segments[-1 if is_last else first_local(segments)]
            if first.header.span:
                raise compacted(first, first.base_offset)
            try:
                return first.base_point, self._reader.copies(first)
            except FileNotFoundError:
                if self._segments.now is segments:
                    raise damaged(first.path, 0, first.base_offset, "the file is gone") from None

    def read_frames(
        self, point: LogPoint, max_bytes: int, limit: LogPoint, *, beside: int = 0, is_guessed: bool = False
    ) -> list[Frame]:
        """The frames from `point` on, none that ends behind `limit`: at least one where there is one, then up to `max_bytes`, of which each takes
        `beside` more than it has, all of one segment, up to what is damaged. Each as it stands: sealed, with its leader's epoch. `is_guessed`: as
        `SegmentReader.read_frames` has it.

        Raises OffsetOutOfRangeError where the log does not hold `point`, RequestError(UNSUPPORTED) where what follows was compacted
        (its closed segments are to be copied), NotLocalError, CorruptionError.
        """
        while True:
            segments = self._segments.now
            if not segments[0].base_point <= point <= limit:
                raise OffsetOutOfRangeError(point.offset, segments[0].base_offset, limit.offset)
            if point == limit:
                return []
            segment = segments[bisect_right(segments, point, key=base_point) - 1]
            if segment.header.span:
                raise compacted(segment, point.offset)
            try:
                return self._reader.read_frames(
                    segment, point, max_bytes, limit, beside=beside, is_guessed=is_guessed
                )
            except FileNotFoundError:
                if self._segments.now is segments:
                    raise damaged(segment.path, 0, point.offset, "the file is gone") from None

    def annotations_at(self, point: LogPoint) -> dict[int, bytes]:
        """The annotations in force at `point`, from the segment that goes on there. Raises as `read_frames` does."""
        while True:
            segments = self._segments.now
            if not segments[0].base_point <= point <= segments[-1].end_point:
                raise OffsetOutOfRangeError(point.offset, segments[0].base_offset, segments[-1].next_offset)
            segment = segments[bisect_right(segments, point, key=base_point) - 1]
            if segment.header.span:
                raise compacted(segment, point.offset)
            try:
                return self._reader.rescan(segment, segment.segment_bytes, point).annotations
            except FileNotFoundError:
                if self._segments.now is segments:
                    raise damaged(segment.path, 0, point.offset, "the file is gone") from None

    def read_notes(self, offset: int, limit: LogPoint, wanted: Callable[[bytes], bool]) -> list[bytes]:
        """The notes that stand in the log before what was appended at `offset`, in order, of those that are `wanted`. Raises as `read_frames` does."""
        first = self._segments.now[0].base_point
        if offset < first.offset:
            raise OffsetOutOfRangeError(offset, first.offset, limit.offset)
        point = max(LogPoint(offset), first)
        notes, pieces, epoch = list[bytes](), list[bytes](), -1
        while point < limit:
            for frame in self.read_frames(point, NOTES_READ_BYTES, limit):
                if frame.leader_epoch != epoch:
                    # Of a note whose leader was lost before what it is for was on this copy.
                    pieces.clear()
                    epoch = frame.leader_epoch
                if frame.is_note:
                    pieces.append(frame.annotation)
                elif pieces:
                    note = b"".join(pieces)
                    pieces.clear()
                    if wanted(note):
                        notes.append(note)
                if frame.batch is not None:
                    return notes
                point = LogPoint(point.offset, point.note + 1)
        return notes

    def offset_for_time(self, time_ms: int, limit: int) -> int:
        """Base offset of the first batch below `limit` appended at or after `time_ms`; `limit` where there is none."""
        while True:
            segments = self._segments.now
            try:
                for segment in segments:
                    if segment.last_time_ms >= time_ms:
                        found = self._reader.first_since(segment, time_ms)
                        if found is not None:
                            return min(found, limit)
                return limit
            except FileNotFoundError as error:
                if self._segments.now is segments:
                    raise damaged(
                        Path(error.filename), 0, segments[0].base_offset, "the file is gone"
                    ) from None
