"""The reader of a log's segments, one segment at a time. Blocking: threads only.

Invariants: nothing here changes a segment's file, so any number of callers read at once; what is read is checked against its checksums,
and what does not hold is a CorruptionError that names file, position and offset. A file that is gone is a FileNotFoundError: the caller
knows whether its segments were replaced meanwhile.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

from felix.batch import HEADER_BYTES, Batch, body_checksum
from felix.bounded import BoundedMap
from felix.storage.port import Files
from felix.storage.small_file import read_file
from region.log.errors import NotLocalError, OffsetOutOfRangeError, SegmentDamagedError
from region.log.frame import Frame, SealedBatch
from region.log.index import INDEX_INTERVAL_BYTES, SparseIndex, decode_index
from region.log.point import LogPoint, PointCounter
from region.log.producers import ProducerTable
from region.log.segment import (
    EntryDamagedError,
    EntryIncompleteError,
    SegmentEntry,
    decode_entry,
)
from region.log.segment_scan import annotate, count_batch, damaged, scan_bytes, scan_file
from region.log.segment_state import SegmentState, write_index
from region.log.segment_survey import next_entry
from region.log.unread import AroundUnread, Reads, is_unread

_INDEXES_HELD_MAX: Final = 16
"""Indexes of closed segments in memory per shard, about 100 KiB each."""


class Rescanned(NamedTuple):
    """What is in a segment; `note`, `epoch` and `is_note` are those of its last entry."""

    places: SparseIndex
    annotations: dict[int, bytes]
    note: int
    epoch: int
    is_note: bool


class SegmentReader:
    """Of one shard. Holds the indexes of closed segments that were asked for last."""

    def __init__(self, files: Files, shard: int) -> None:
        self._files = files
        self._reads: Reads = files
        self._shard = shard
        self._indexes: BoundedMap[Path, SparseIndex] | None = None
        """made for the first of them: most logs have no closed segment that anybody reads"""
        self._lock = Lock()
        """readers come from several threads"""

    def read_around(self) -> None:
        """The log has copies: what its disk does not give counts as damage, which is repaired from them. Not where the log is cut, or its producers are
        counted: there it is the disk that fails."""
        self._reads = AroundUnread(self._files)

    def read(
        self, segment: SegmentState, offset: int, max_bytes: int, limit: int, *, around_damage: bool = False
    ) -> list[SealedBatch]:
        """Whole batches from the one that holds `offset` on, below offset `limit`: at least one where the segment has one there, then up
        to `max_bytes`, usually of one read. `around_damage`: what is before damage is given, and what is behind it is found, where a copy may give
        the rest; else a read that meets damage gives nothing. Raises CorruptionError, NotLocalError, FileNotFoundError.
        """
        descriptor = self._open(segment)
        try:
            return self._batches(descriptor, segment, offset, max_bytes, limit, around_damage=around_damage)
        finally:
            self._files.close(descriptor)

    def _batches(
        self,
        descriptor: int,
        segment: SegmentState,
        offset: int,
        max_bytes: int,
        limit: int,
        *,
        around_damage: bool,
    ) -> list[SealedBatch]:
        found: list[SealedBatch] = []
        size = 0
        position = self.index(segment).position_for_offset(offset)
        end_offset = min(limit, segment.next_offset)
        # With holes, only its length says where a segment ends; a compacted one is never written to again.
        compacted = segment.header.span is not None
        wanted = INDEX_INTERVAL_BYTES + max_bytes
        reached = -1
        skipped, lost = False, 0
        while True:
            window = memoryview(self._reads.pread(descriptor, wanted, position))
            index = 0
            try:
                while reached < end_offset and not (compacted and position + index >= segment.segment_bytes):
                    entry = decode_entry(
                        window,
                        index,
                        at=position,
                        salt=segment.header.salt,
                        shard=self._shard,
                        verify_body=False,
                    )
                    if skipped:
                        # Behind what cannot be read: as if it began there, where nothing of what is wanted is missing.
                        if entry.base_offset > max(offset, reached):
                            raise EntryDamagedError(
                                f"what stands before offset {entry.base_offset} cannot be read"
                            )
                        reached, skipped = entry.base_offset, False
                    if reached >= 0 and entry.base_offset != reached:
                        if not compacted or entry.base_offset < reached:
                            raise EntryDamagedError(f"offset {entry.base_offset} where {reached} is next")
                        if entry.base_offset >= end_offset:
                            return found
                    header = entry.header
                    if header and entry.next_offset > offset:
                        if found and size + header.total_length > max_bytes:
                            return found
                        if index + entry.length > len(window):
                            raise EntryIncompleteError("the window ends", entry.length)
                        data = window[index + entry.length - header.total_length : index + entry.length]
                        if body_checksum(data[HEADER_BYTES:]) != header.body_checksum:
                            raise EntryDamagedError("the body's checksum does not hold")
                        found.append(SealedBatch(header, data))
                        size += header.total_length
                    reached = entry.next_offset
                    index += entry.length
                return found
            except EntryIncompleteError as error:
                if found:
                    return found
                if index == 0 and len(window) < wanted:
                    raise damaged(segment.path, position, max(reached, 0), str(error)) from error
                position += index
                wanted = max(wanted, error.needed)
            except EntryDamagedError as error:
                if found and around_damage:
                    return found
                at = position + index
                behind = None
                if around_damage and not compacted and not skipped:
                    behind = next_entry(
                        self._reads, descriptor, segment.header, at + 1, segment.segment_bytes
                    )
                if behind is None:
                    raise damaged(
                        segment.path, lost if skipped else at, max(reached, 0), str(error)
                    ) from error
                lost, position, skipped = at, behind, True

    def read_frames(
        self,
        segment: SegmentState,
        point: LogPoint,
        max_bytes: int,
        limit: LogPoint,
        *,
        beside: int = 0,
        is_guessed: bool = False,
    ) -> list[Frame]:
        """The frames from `point` on, none that ends behind `limit`: at least one, then up to `max_bytes`, of which each takes `beside` more than
        it has, and up to what is damaged. Raises
        OffsetOutOfRangeError where the segment has no entry that begins there, CorruptionError, NotLocalError, FileNotFoundError.

        `is_guessed`: where all between the batch before the point and the next entry is damaged, the entry counts as the one that begins
        there; whoever asks looks at whether it fits.
        """
        descriptor = self._open(segment)
        try:
            # From the batch that ends at the point, so that the positions behind it are counted.
            within = point.offset > segment.base_offset
            position = self.index(segment).position_for_offset(point.offset - 1) if within else segment.start
            counter = PointCounter(segment.header, segment.base_note)
            is_exact = position == segment.start
            try:
                return self._frames(
                    descriptor, segment, point, max_bytes, limit, beside, position, counter, is_exact=is_exact
                )
            except SegmentDamagedError:
                at = self._behind_damage(descriptor, segment, point, position, is_guessed=is_guessed)
                if at is None:
                    raise
                counter.stand_at(point)
                return self._frames(
                    descriptor, segment, point, max_bytes, limit, beside, at, counter, is_exact=True
                )
        finally:
            self._files.close(descriptor)

    def _frames(
        self,
        descriptor: int,
        segment: SegmentState,
        point: LogPoint,
        max_bytes: int,
        limit: LogPoint,
        beside: int,
        position: int,
        counter: PointCounter,
        *,
        is_exact: bool,
    ) -> list[Frame]:
        """`is_exact`: whether the counter says where `position` is."""
        found: list[Frame] = []
        size = 0
        reached = counter.point if is_exact else None
        try:
            for entry, data in scan_bytes(
                self._reads,
                descriptor,
                segment.header,
                position,
                segment.segment_bytes,
                verify_bodies=True,
                window_bytes=INDEX_INTERVAL_BYTES + max_bytes,
            ):
                position = entry.end
                if not counter.follow(entry):
                    continue
                if counter.point > limit or (found and size + entry.length + beside > max_bytes):
                    break
                if counter.point > point:
                    if not found and reached != point:
                        break
                    header = entry.header
                    batch = Batch(header, data[entry.length - header.body_length :]) if header else None
                    found.append(
                        Frame(
                            batch,
                            entry.base_offset,
                            entry.leader_epoch,
                            entry.slot,
                            entry.annotation,
                            entry.is_note,
                        )
                    )
                    size += entry.length + beside
                reached = counter.point
        except EntryDamagedError as error:
            if not found:
                raise damaged(segment.path, position, counter.offset, str(error)) from error
        if not found:
            raise OffsetOutOfRangeError(point.offset, segment.base_offset, limit.offset)
        return found

    def _behind_damage(
        self, descriptor: int, segment: SegmentState, point: LogPoint, position: int, *, is_guessed: bool
    ) -> int | None:
        """Where the entry stands that begins at `point`, from `position` on and behind what is damaged before it; None where it is not known."""
        counter = PointCounter(segment.header, segment.base_note)
        is_exact, end = position == segment.start, segment.segment_bytes
        while position < end:
            try:
                for entry in scan_file(
                    self._reads, descriptor, segment.header, position, end, verify_bodies=False
                ):
                    before = counter.point
                    is_own = counter.follow(entry)
                    if is_own and is_exact and before == point:
                        return entry.position
                    if (
                        is_own
                        and is_guessed
                        and not is_exact
                        and point == LogPoint(entry.base_offset)
                        and entry.leader_epoch
                    ):
                        return entry.position
                    if entry.base_offset > point.offset:
                        return None
                    if entry.header is not None:
                        is_exact = True
                    position = entry.end
            except EntryDamagedError:
                behind = next_entry(self._reads, descriptor, segment.header, position + 1, end)
                if behind is None:
                    return None
                position, is_exact = behind, False
        return None

    def first_since(self, segment: SegmentState, time_ms: int) -> int | None:
        """Base offset of the segment's first batch that was appended at or after `time_ms`. Raises as `read` does."""
        position = self.index(segment).position_for_time(time_ms)
        descriptor = self._open(segment)
        try:
            for entry in self._entries(descriptor, segment, position):
                if entry.header and entry.header.append_time_ms >= time_ms:
                    return entry.base_offset
        finally:
            self._files.close(descriptor)
        return None

    def _entries(self, descriptor: int, segment: SegmentState, position: int) -> Iterator[SegmentEntry]:
        """The entries of one index interval and the batch after it: enough to find a place within."""
        index = self.index(segment)
        at = bisect_right(index.positions, position)
        end = index.positions[at + 1] if at + 1 < len(index.positions) else segment.segment_bytes
        try:
            for entry in scan_file(
                self._reads, descriptor, segment.header, position, end, verify_bodies=False
            ):
                position = entry.end
                yield entry
        except EntryDamagedError as error:
            raise damaged(segment.path, position, segment.base_offset, str(error)) from error

    def copies(self, segment: SegmentState) -> dict[int, bytes]:
        """The annotations that the segment carries over from the one before. Raises as `read` does."""
        annotations: dict[int, bytes] = {}
        counter = PointCounter(segment.header, segment.base_note)
        descriptor = self._open(segment)
        try:
            for entry in scan_file(
                self._reads,
                descriptor,
                segment.header,
                segment.start,
                segment.segment_bytes,
                verify_bodies=False,
            ):
                if counter.follow(entry):
                    break
                annotate(annotations, entry.slot, entry.annotation, alone=True)
        except EntryDamagedError as error:
            raise damaged(segment.path, segment.start, segment.base_offset, str(error)) from error
        finally:
            self._files.close(descriptor)
        return annotations

    def count_producers(self, segment: SegmentState, producers: ProducerTable, begin: int, end: int) -> None:
        """Let the segment's batches from offset `begin` on count, but none that ends behind `end`. Raises as `read` does."""
        descriptor = self._open(segment)
        position = self.index(segment).position_for_offset(begin)
        try:
            for entry in scan_file(
                self._files,
                descriptor,
                segment.header,
                position,
                segment.segment_bytes,
                verify_bodies=False,
            ):
                if entry.next_offset > end:
                    break
                header = entry.header
                if header and header.producer_id and header.base_offset >= begin:
                    count_batch(producers, header)
                position = entry.end
        except EntryDamagedError as error:
            raise damaged(segment.path, position, begin, str(error)) from error
        finally:
            self._files.close(descriptor)

    def rescan(self, segment: SegmentState, end: int, cut: LogPoint | None = None) -> Rescanned:
        """What is in a segment, from its bytes; with `cut`, of the entries up to that point."""
        index = SparseIndex(segment.base_offset, segment.start)
        annotations: dict[int, bytes] = {}
        counter = PointCounter(segment.header, segment.base_note)
        note, epoch, is_note = counter.note, 0, False
        descriptor = self._open(segment)
        try:
            for entry in scan_file(
                self._files, descriptor, segment.header, segment.start, end, verify_bodies=False
            ):
                if counter.follow(entry) and cut is not None and counter.point > cut:
                    break
                note, epoch, is_note = counter.note, entry.leader_epoch, entry.is_note
                if header := entry.header:
                    index.add(
                        header.base_offset,
                        header.next_offset,
                        entry.position,
                        entry.end,
                        header.append_time_ms,
                    )
                else:
                    index.add_position(entry.end)
                annotate(
                    annotations, entry.slot, entry.annotation, alone=header is None, is_note=entry.is_note
                )
        except EntryDamagedError as error:
            raise damaged(segment.path, index.segment_bytes, index.next_offset, str(error)) from error
        finally:
            self._files.close(descriptor)
        if segment.header.span:
            index.end_at(segment.header.span.end_offset)
        return Rescanned(index, annotations, note, epoch, is_note)

    def index(self, segment: SegmentState) -> SparseIndex:
        """A segment's index: the active one's own, a closed one's from a small cache, its file, or made anew."""
        if segment.index is not None:
            return segment.index
        with self._lock:
            held = None if self._indexes is None else self._indexes.use(segment.path)
        if held is not None:
            return held
        try:
            stored = read_file(self._files, segment.index_path)
        except OSError as error:
            if not is_unread(error):
                raise
            stored = None
        index = stored and decode_index(
            stored,
            base_offset=segment.base_offset,
            segment_bytes=segment.segment_bytes,
            start=segment.start,
        )
        if not index:
            index = self.rescan(segment, segment.segment_bytes).places
            write_index(self._files, segment.index_path, index.encode())
        self._hold(segment.path, index)
        return index

    def keep_index(self, segment: SegmentState) -> None:
        """A closed segment's index moves to the cache."""
        assert segment.index is not None
        self._hold(segment.path, segment.index)
        segment.index = None

    def forget_indexes(self) -> None:
        """The log was cut: what is known of its segments no longer holds."""
        with self._lock:
            self._indexes = None

    def _hold(self, path: Path, index: SparseIndex) -> None:
        with self._lock:
            if self._indexes is None:
                self._indexes = BoundedMap(_INDEXES_HELD_MAX)
            self._indexes.put(path, index)

    def _open(self, segment: SegmentState) -> int:
        """For reading: the local file, else a fetched copy. Raises NotLocalError where there is neither."""
        try:
            return self._files.open(segment.path, os.O_RDONLY)
        except FileNotFoundError:
            if segment.is_local:
                raise
        try:
            return self._files.open(segment.fetched_path, os.O_RDONLY)
        except FileNotFoundError:
            raise NotLocalError(segment) from None
