"""A closed segment whose file is damaged, written anew from the frames of another copy of the log. Blocking: threads only.

Invariants:
- the new file has the header, and so the salt, of the old one, and every entry stands where it stood: whoever reads meanwhile, and every
  index, goes on with it;
- of what can still be read of the old file nothing may differ; what comes ends where the segment ends, in log points and in bytes;
- the old file stays until the new one is whole, verified and synced.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence

from felix.errors import Code, RequestError
from felix.storage.port import Files, write_all
from felix.storage.small_file import TEMPORARY_SUFFIX
from region.log.beginning import encode_beginning
from region.log.disk import DiskLog
from region.log.frame import Frame, misfit
from region.log.point import LogPoint, PointCounter
from region.log.segment import EntryDamagedError, SegmentEntry, encode_entry_header
from region.log.segment_check import SegmentCheck
from region.log.segment_scan import scan_file
from region.log.segment_state import SegmentState


class SegmentRepair:
    """Of one segment: `take` all of its frames, `verify`, then `finish`; `abandon` in the end, whatever became of it."""

    def __init__(
        self, log: DiskLog, files: Files, segment: SegmentState, annotations: Mapping[int, bytes]
    ) -> None:
        """`annotations`: those in force where the segment begins. Raises RequestError(CONFLICT) as `take` does. Does not block."""
        assert segment.header.span is None
        self.reached = segment.base_point
        """up to where its frames were taken"""
        self._log = log
        self._files = files
        self._segment = segment
        self._epoch = 0
        self._old = self._readable()
        self._aside = segment.path.with_name(segment.path.name + TEMPORARY_SUFFIX)
        self._beginning = encode_beginning(segment.header, annotations)
        self._descriptor = -1
        """of the file aside; -1 before anything was taken"""
        self._position = 0
        head = segment.header.head
        if head is not None and head.carried != len(annotations):
            raise self._other(f"{len(annotations)} annotations where it begins with {head.carried}")

    def take(self, frames: Sequence[Frame]) -> None:
        """The next ones, from `reached` on. Raises OSError; RequestError(CONFLICT) where they are not those that the segment had."""
        if self._descriptor < 0:
            self._descriptor = self._files.open(self._aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            self._position = write_all(self._files, self._descriptor, self._beginning, 0)
        segment, buffers = self._segment, list[bytes | memoryview]()
        point = self.reached
        for frame in frames:
            if (
                wrong := misfit(frame, point.offset, segment.header.identity.shard)
            ) or frame.leader_epoch < self._epoch:
                raise self._other(wrong or f"epoch {frame.leader_epoch} follows epoch {self._epoch}")
            self._compare(frame)
            header = frame.batch.header if frame.batch else None
            buffers.append(
                encode_entry_header(
                    frame.kind,
                    base_offset=frame.base_offset,
                    leader_epoch=frame.leader_epoch,
                    synced_to=segment.start,
                    batch_length=header.total_length if header else 0,
                    slot=frame.slot,
                    annotation=frame.annotation,
                    salt=segment.header.salt,
                )
            )
            if frame.batch is not None and header is not None:
                buffers += (header.encode(), memoryview(frame.batch.body))
                point = LogPoint(header.next_offset)
            else:
                point = LogPoint(point.offset, point.note + 1)
            self._epoch = frame.leader_epoch
        size = sum(map(len, buffers))
        if point > segment.end_point or self._position + size > segment.segment_bytes:
            raise self._other(f"it goes on to {point}, and {segment.end_point} is its end")
        if buffers:
            self._position = write_all(self._files, self._descriptor, buffers, self._position)
        self.reached = point

    @property
    def is_whole(self) -> bool:
        """Whether all of its frames were taken."""
        return self.reached == self._segment.end_point

    @property
    def _is_all(self) -> bool:
        """Whether what was written ends where the segment does, in log points and in bytes."""
        return self.is_whole and self._position == self._segment.segment_bytes

    def verify(self) -> None:
        """Bring all that was written to the disk, and look at it. Raises OSError; RequestError(CONFLICT) as `take` does; SegmentDamagedError
        where the disk damages this one, too."""
        segment = self._segment
        if not self._is_all:
            raise self._other(
                f"{self._position} bytes up to {self.reached}, where it has {segment.segment_bytes} up to {segment.end_point}"
            )
        self._files.sync(self._descriptor)
        written = SegmentState(
            self._aside,
            segment.header,
            segment.start,
            segment.next_offset,
            segment.segment_bytes,
            segment.last_time_ms,
            None,
        )
        check = SegmentCheck(self._files, written)
        while not check.step():
            pass

    def finish(self) -> bool:
        """Put what was verified in the damaged file's place; False where the log has the segment no more, or has cut it. Whoever asks holds the
        log's writer. Raises OSError, StorageFailedError."""
        return self._is_all and self._log.restore_segment(self._segment, self._aside)

    def abandon(self) -> None:
        """Let go of what is not in place. Raises OSError."""
        self._old.close()
        if self._descriptor < 0:
            return
        self._files.close(self._descriptor)
        if self._files.exists(self._aside):
            self._files.remove(self._aside)

    def _readable(self) -> Generator[SegmentEntry]:
        """The old file's own entries, up to the first whose headers are damaged."""
        segment = self._segment
        try:
            descriptor = self._files.open(segment.path, os.O_RDONLY)
        except FileNotFoundError:
            return
        counter = PointCounter(segment.header, segment.base_note)
        try:
            for entry in scan_file(
                self._files,
                descriptor,
                segment.header,
                segment.start,
                segment.segment_bytes,
                verify_bodies=False,
            ):
                if counter.follow(entry):
                    yield entry
        except EntryDamagedError:
            return
        finally:
            self._files.close(descriptor)

    def _compare(self, frame: Frame) -> None:
        old = next(self._old, None)
        if old is None:
            return
        had = (old.base_offset, old.leader_epoch, old.slot, old.annotation, old.is_note, old.header)
        header = frame.batch.header if frame.batch else None
        if had != (
            frame.base_offset, frame.leader_epoch, frame.slot, frame.annotation, frame.is_note, header,
        ):  # fmt: skip
            raise self._other(f"what stands at offset {frame.base_offset} is not what was written here")

    def _other(self, what: str) -> RequestError:
        return RequestError(
            f"The other copy does not have what {self._segment.path} had: {what}.",
            code=Code.CONFLICT,
            hint="Another copy that is in sync is asked; where none has it, restore the file from a backup.",
        )
