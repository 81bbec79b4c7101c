"""A closed segment whose file is damaged, written anew from the frames of another copy of the log. Blocking: threads only.

Invariants:
- the new file has the header, and so the salt, of the old one, and every entry stands where it stood: whoever reads meanwhile, and every
  index, goes on with it;
- of what can still be read of the old file nothing may differ, before and behind the damage: the salt tells an entry that was written from anything
  else, so one that decodes at a place has to be the new one's at that place, with every byte; what comes ends where the segment ends, in log points
  and in bytes;
- the old file stays until the new one is whole, verified and synced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from felix.batch import HEADER_BYTES, BatchHeader, body_checksum, decode_header
from felix.errors import Code, RequestError
from felix.storage.port import Files, write_all
from felix.storage.small_file import TEMPORARY_SUFFIX
from region.log.beginning import encode_beginning
from region.log.disk import DiskLog
from region.log.frame import Frame, misfit
from region.log.point import LogPoint
from region.log.segment import (
    ENTRY_HEAD_BYTES_MAX,
    ENTRY_HEADER_BYTES,
    SegmentEntry,
    encode_entry_header,
    find_entries,
)
from region.log.segment_check import SegmentCheck
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
        self._aside = segment.path.with_name(segment.path.name + TEMPORARY_SUFFIX)
        self._annotations = annotations
        self._descriptor = -1
        """of the file aside; -1 before anything was taken"""
        self._old = -1
        """of the damaged file; -1 before anything was taken, and where it is gone"""
        self._position = 0
        head = segment.header.head
        if head is not None and head.carried != len(annotations):
            raise self._other(f"{len(annotations)} annotations where it begins with {head.carried}")

    def take(self, frames: Sequence[Frame]) -> None:
        """The next ones, from `reached` on. Raises OSError; RequestError(CONFLICT) where they are not those that the segment had."""
        if self._descriptor < 0:
            self._begin()
        segment, buffers = self._segment, list[bytes | memoryview]()
        point, position, placed = self.reached, self._position, dict[int, Frame]()
        for frame in frames:
            if (
                wrong := misfit(frame, point.offset, segment.header.identity.shard)
            ) or frame.leader_epoch < self._epoch:
                raise self._other(wrong or f"epoch {frame.leader_epoch} follows epoch {self._epoch}")
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
            placed[position] = frame
            position += len(buffers[-1])
            if frame.batch is not None and header is not None:
                buffers += (header.encode(), memoryview(frame.batch.body))
                position += header.total_length
                point = LogPoint(header.next_offset)
            else:
                point = LogPoint(point.offset, point.note + 1)
            self._epoch = frame.leader_epoch
        if point > segment.end_point or position > segment.segment_bytes:
            raise self._other(f"it goes on to {point}, and {segment.end_point} is its end")
        self._compare(placed, position)
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
        if self._old >= 0:
            self._files.close(self._old)
            self._old = -1
        if self._descriptor < 0:
            return
        self._files.close(self._descriptor)
        if self._files.exists(self._aside):
            self._files.remove(self._aside)

    def _begin(self) -> None:
        """Write what the segment begins with: of a copied annotation that can still be read the place is the order's, which is each copy's own."""
        segment = self._segment
        beginning = encode_beginning(segment.header, self._annotations)
        with suppress(FileNotFoundError):
            self._old = self._files.open(segment.path, os.O_RDONLY)
        ends = segment.start + sum(map(len, beginning[1:]))
        for entry in self._readable(self._had(segment.start, ends), segment.start, ends):
            if self._annotations.get(entry.slot) != entry.annotation or entry.header or entry.is_note:
                raise self._other(f"what it begins with has another annotation {entry.slot}")
        self._descriptor = self._files.open(self._aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._position = write_all(self._files, self._descriptor, beginning, 0)

    def _had(self, begin: int, end: int) -> memoryview:
        """What the old file has from `begin` on, and behind `end` as much as tells whether an entry begins before it."""
        behind = min(end + ENTRY_HEAD_BYTES_MAX, self._segment.segment_bytes)
        if self._old < 0 or behind <= begin:
            return memoryview(b"")
        return memoryview(self._files.pread(self._old, behind - begin, begin))

    def _readable(self, had: memoryview, begin: int, end: int) -> list[SegmentEntry]:
        """The old file's own entries that begin between the two, wherever it is damaged; their bodies were not looked at."""
        header = self._segment.header
        found = find_entries(had, at=begin, salt=header.salt, shard=header.identity.shard, whole=False)
        return [entry for entry in found if entry.position < end]

    def _compare(self, placed: Mapping[int, Frame], end: int) -> None:
        """Frames by where they are about to stand, from the file's end on, against what stands there in the old one."""
        begin = self._position
        had = self._had(begin, end)
        readable = {entry.position: entry for entry in self._readable(had, begin, end)}
        if other := readable.keys() - placed.keys():
            raise self._other(f"at byte {min(other)} another entry begins")
        for position, frame in placed.items():
            old, batch = readable.get(position), frame.batch
            header = batch.header if batch else None
            if old is not None and frame[1:6] != (
                old.base_offset, old.leader_epoch, old.slot, old.annotation, old.is_note,
            ):  # fmt: skip
                raise self._other(f"what stands at offset {frame.base_offset} is not what was written here")
            if batch is None or header is None:
                if old is not None and old.header is not None:
                    raise self._other(f"the batch at offset {frame.base_offset} is missing")
                continue
            at = position - begin + ENTRY_HEADER_BYTES + len(frame.annotation)
            was = _whole_header(had, at) if old is None else old.header
            body = had[at + HEADER_BYTES : at + header.total_length]
            is_whole = was is not None and body_checksum(body) == was.body_checksum
            # A header whose entry is damaged counts with its body alone.
            if (old is not None or is_whole) and (was != header or (is_whole and body != batch.body)):
                raise self._other(
                    f"the batch at offset {frame.base_offset} is not the one that was written here"
                )

    def _other(self, what: str) -> RequestError:
        return RequestError(
            f"The other copy does not have what {self._segment.path} had: {what}.",
            code=Code.CONFLICT,
            hint="Another copy that is in sync is asked; where none has it, restore the file from a backup.",
        )


def _whole_header(had: memoryview, at: int) -> BatchHeader | None:
    """The header of a batch that stands at a place whose entry is damaged, where it is one."""
    try:
        return decode_header(had, at)
    except RequestError:
        return None
