"""A closed segment whose file is damaged, written anew: with what it has that holds, and the frames of other copies of the log for what does not.
Blocking: threads only.

Invariants:
- the new file has the header, and so the salt, of the old one, and every entry stands where it stood: whoever reads meanwhile, and every
  index, goes on with it;
- what holds of the old file is taken from it, byte for byte. A lost part (region.log.segment_survey) is filled whole, or stays as it is: what comes
  has to begin and end where the part does, in log points and in bytes, and of what can still be read within the part nothing may differ: the salt
  tells an entry that was written from anything else, so one that decodes at a place has to be the new one's at that place, with every byte;
- the old file stays until the new one is verified and synced.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

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
from region.log.segment_scan import damaged
from region.log.segment_state import SegmentState
from region.log.segment_survey import LostPart, lost_parts
from region.log.unread import AroundUnread, is_unread

COPY_BYTES: Final = 1 << 20
"""Of the old file, in memory at once."""


class SegmentRepair:
    """Of one segment: `survey`, unless its lost parts are known; then `take` frames for each `part`, or `leave` it; `verify`, then `finish`; `abandon`
    in the end, whatever became of it."""

    def __init__(
        self, log: DiskLog, files: Files, segment: SegmentState, parts: Sequence[LostPart] = ()
    ) -> None:
        """`parts`: of the file as it is now, where they are known. Does not block."""
        assert segment.header.span is None
        self.left: list[LostPart] = []
        """parts that were not filled"""
        self.filled = 0
        """parts"""
        self.reached = LogPoint(0)
        """up to where frames of the part were taken"""
        self._log = log
        self._files = files
        self._reads = AroundUnread(files)
        self._segment = segment
        self._parts: deque[LostPart] = deque(parts)
        self._epoch = 0
        self._aside = segment.path.with_name(segment.path.name + TEMPORARY_SUFFIX)
        self._descriptor = -1
        """of the file aside; -1 before anything was taken"""
        self._old = -1
        """of the damaged file; -1 before it was looked at, and where it is gone"""
        self._position = 0
        """up to where the part is filled"""
        self._is_misshapen = False
        """whether the file's header or length is not what it was"""
        self._is_verified = False
        self._begin_part()

    def survey(self) -> None:
        """Find the parts that are lost. Raises OSError."""
        segment = self._segment
        self._open_old()
        encoded = segment.header.encode()
        self._is_misshapen = (
            self._old < 0
            or self._files.size(self._old) != segment.segment_bytes
            or self._reads.pread(self._old, len(encoded), 0) != encoded
        )
        self._parts = deque(lost_parts(self._reads, self._old, segment))
        self._begin_part()

    @property
    def part(self) -> LostPart | None:
        """Which is to be filled; None once there is none any more."""
        return self._parts[0] if self._parts else None

    @property
    def limit(self) -> LogPoint:
        """Up to where frames are of use: the end of the part, and of those that follow it at once."""
        limit = self._parts[0]
        for part in islice(self._parts, 1, None):
            if part.position != limit.end or part.begin != limit.limit:
                break
            limit = part
        return limit.limit

    @property
    def wants_annotations(self) -> bool:
        """Whether those in force at `reached` have to come with the next frames."""
        return bool(self._parts) and self._parts[0].has_copies and self._position == self._parts[0].position

    @property
    def unread(self) -> OSError | None:
        """Why the disk did not give some of it; None where it gave all that it has."""
        return self._reads.error

    def gives_parts(self) -> bool:
        """Whether the disk gives the bytes of all parts, which it did not before. Raises OSError."""
        self._open_old()
        for part in self._parts if self._old >= 0 else ():
            for position in range(part.position, part.end, COPY_BYTES):
                try:
                    self._files.pread(self._old, min(COPY_BYTES, part.end - position), position)
                except OSError as error:
                    if is_unread(error):
                        return False
                    raise
        return True

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to be put in the old file's place."""
        return self.filled > 0 or self._is_misshapen

    def take(self, frames: Sequence[Frame], annotations: Mapping[int, bytes]) -> None:
        """The next ones of the part, from `reached` on, and what they have of those that follow it at once; `annotations`: where they are wanted.
        Raises OSError; RequestError(CONFLICT) where they are not those that the segment had: `reset` the part then."""
        if self._descriptor < 0:
            self._begin()
        if self.wants_annotations:
            self._take_annotations(annotations)
        at = 0
        while self._parts:
            part = self._parts[0]
            at = self._take(part, frames, at)
            if self._position < part.end:
                return
            has_notes = part.limit.offset > part.next_offset
            if self.reached.offset != part.next_offset or (self.reached != part.limit and not has_notes):
                raise self._other(f"it goes on to {self.reached}, where {part.next_offset} is next")
            if self._epoch > part.next_epoch:
                raise self._other(f"epoch {part.next_epoch} follows epoch {self._epoch}")
            self._parts.popleft()
            self.filled += 1
            reached = self.reached
            self._begin_part()
            if at == len(frames) or not self._parts or self._parts[0].begin != reached:
                return

    def reset(self) -> None:
        """Begin the part once more. Raises OSError."""
        part = self._parts[0]
        if self._descriptor >= 0 and self._position > part.position:
            self._copy(part.position, part.end)
        self._begin_part()

    def leave(self) -> None:
        """Nobody has the part: it stays as it is in the old file. Raises OSError."""
        self.reset()
        self.left.append(self._parts.popleft())
        self._begin_part()

    def verify(self) -> None:
        """Bring all that was written to the disk, and look at it. Raises OSError; SegmentDamagedError where the disk damages this one, too, or what was
        known of the old one does not hold any more."""
        segment = self._segment
        assert not self._parts
        if self._descriptor < 0:
            self._begin()
        self._files.sync(self._descriptor)
        written = SegmentState(
            self._aside,
            segment.header,
            segment.start,
            segment.next_offset,
            segment.segment_bytes,
            segment.last_time_ms,
            None,
            base_note=segment.base_note,
            end_note=segment.end_note,
        )
        if self.left:
            for part in lost_parts(self._reads, self._descriptor, written):
                if not any(one.position <= part.position and part.end <= one.end for one in self.left):
                    raise damaged(self._aside, part.position, part.begin.offset, "it was damaged meanwhile")
        else:
            check = SegmentCheck(self._files, written)
            while not check.step():
                pass
        self._is_verified = True

    def finish(self) -> bool:
        """Put what was verified in the damaged file's place; False where the log has the segment no more, or has cut it. Whoever asks holds the
        log's writer. Raises OSError, StorageFailedError."""
        return self._is_verified and self._log.restore_segment(self._segment, self._aside)

    def abandon(self) -> None:
        """Let go of what is not in place. Raises OSError."""
        if self._old >= 0:
            self._files.close(self._old)
            self._old = -1
        if self._descriptor < 0:
            return
        self._files.close(self._descriptor)
        self._descriptor = -1
        if self._files.exists(self._aside):
            self._files.remove(self._aside)

    def _begin_part(self) -> None:
        if self._parts:
            part = self._parts[0]
            self.reached, self._position, self._epoch = part.begin, part.position, part.epoch

    def _open_old(self) -> None:
        if self._old < 0:
            with suppress(FileNotFoundError):
                self._old = self._files.open(self._segment.path, os.O_RDONLY)

    def _begin(self) -> None:
        """Write all that the old file has, also what does not hold."""
        self._open_old()
        self._descriptor = self._files.open(self._aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        encoded = self._segment.header.encode()
        write_all(self._files, self._descriptor, (encoded,), 0)
        self._copy(len(encoded), self._segment.segment_bytes)

    def _copy(self, position: int, end: int) -> None:
        while position < end:
            wanted = min(COPY_BYTES, end - position)
            had = b"" if self._old < 0 else self._reads.pread(self._old, wanted, position)
            position = write_all(
                self._files, self._descriptor, (had or bytes(wanted),), position
            )  # where the file is shorter than it was, zeros

    def _take_annotations(self, annotations: Mapping[int, bytes]) -> None:
        """Write what the segment begins with: of a copied annotation that can still be read the place is the order's, which is each copy's own."""
        segment, part = self._segment, self._parts[0]
        head = segment.header.head
        if head is not None and head.carried != len(annotations):
            raise self._other(f"{len(annotations)} annotations where it begins with {head.carried}")
        copies = encode_beginning(segment.header, annotations)[1:]
        ends = part.position + sum(map(len, copies))
        if ends > part.end:
            raise self._other(f"what it begins with ends at byte {ends}")
        for entry in self._readable(self._had(part.position, ends), part.position, ends):
            if annotations.get(entry.slot) != entry.annotation or entry.header or entry.is_note:
                raise self._other(f"what it begins with has another annotation {entry.slot}")
        self._position = write_all(self._files, self._descriptor, copies, part.position)

    def _take(self, part: LostPart, frames: Sequence[Frame], at: int) -> int:
        """Fill the part with frames from index `at` on; up to which they were taken."""
        segment, buffers = self._segment, list[bytes | memoryview]()
        point, position, placed = self.reached, self._position, dict[int, Frame]()
        while at < len(frames) and position < part.end:
            frame = frames[at]
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
            at += 1
        if point.offset > part.next_offset or position > part.end:
            raise self._other(f"it goes on to {point}, and {part.next_offset} is next")
        self._compare(placed, position)
        if buffers:
            self._position = write_all(self._files, self._descriptor, buffers, self._position)
        self.reached = point
        return at

    def _had(self, begin: int, end: int) -> memoryview:
        """What the old file has from `begin` on, and behind `end` as much as tells whether an entry begins before it."""
        behind = min(end + ENTRY_HEAD_BYTES_MAX, self._segment.segment_bytes)
        if self._old < 0 or behind <= begin:
            return memoryview(b"")
        return memoryview(self._reads.pread(self._old, behind - begin, begin))

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
            if old is not None and not frame.stands_as(old):
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
