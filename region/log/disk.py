"""The log of one shard on disk: segments in a folder, one writer, any number of readers. Blocking: threads only.

The folder holds `<base offset>.seg` with `.idx` beside closed ones, `mark`, `epochs`, snapshots of producers and, once
something was compacted, `compaction`. A segment that compaction wrote is `<base offset>.<generation>.seg`.

Invariants:
- one caller writes at a time (region.log.shard holds a lock around each operation); readers need no lock
  (region.log.log_reader): the list of segments is replaced as a whole (region.log.segment_list), reads go by position, and a reader
  stays below the offset that it was given;
- `write` leaves either all of its frames in the file or none; `sync` returns only when everything written
  is on disk, and the mark says so before it returns;
- a segment exists whole or not at all, and the one before it was synced before it was created.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec

from felix.errors import Code, CorruptionError, RequestError
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.settings import Retention
from felix.storage.disk import DiskFiles
from felix.storage.port import Files, lacks_resources
from felix.storage.small_file import create_durably, read_file, save_checked
from region.log.beginning import beginning, encode_beginning
from region.log.compaction import COMPACTION_NAME, CompactionState, DirtySpan, encode_compaction
from region.log.durable_mark import MARK_NAME, Mark
from region.log.epochs import EpochHistory
from region.log.errors import StorageFailedError
from region.log.frame import Frame, Place, SealedBatch, misfit
from region.log.index import SparseIndex
from region.log.log_reader import LogReader
from region.log.offload import OFFLOADED_NAME, Offloaded, OffloadState, encode_offload
from region.log.open_logs import OpenLogs
from region.log.origin import Origin
from region.log.point import LogPoint
from region.log.producer_snapshots import ProducerSnapshots
from region.log.producers import ProducerTable
from region.log.recovery import EPOCHS_NAME, Recovered, encode_epochs, recover
from region.log.retention import segment_age_ms
from region.log.segment import (
    Head,
    SegmentHeader,
    ShardIdentity,
    encode_entry_header,
    no_commitment,
    segment_name,
)
from region.log.segment_limits import SegmentLimits
from region.log.segment_list import SegmentList, base_point
from region.log.segment_reader import SegmentReader
from region.log.segment_scan import annotate
from region.log.segment_state import SegmentState, in_store, told_from, write_index
from region.log.written_files import WrittenFiles


class DiskLog:
    """See the module. Construct with `open`."""

    def __init__(
        self,
        folder: Path,
        identity: ShardIdentity,
        recovered: Recovered,
        *,
        files: Files,
        limits: SegmentLimits,
        commitment: Callable[[], bytes],
        runtime: Runtime,
        open_logs: OpenLogs,
        shares_offload: bool,
    ) -> None:
        self.folder = folder
        self.identity = identity
        self.report = recovered.report
        self.annotations = recovered.annotations
        self._note_is_open = recovered.note_is_open
        """whether the last entry is a piece of a note"""
        self._files = files
        self.limits = limits
        """When a segment is closed."""
        self.commitment = commitment
        """Asked for each new segment's header."""
        self.runtime = runtime
        self.compaction = recovered.compaction
        self._snapshots = ProducerSnapshots(files, folder)
        self.offload = recovered.offload
        self.cuts = 0
        """How often the log was cut."""
        self._segments = SegmentList(recovered.segments)
        self._reader = SegmentReader(files, identity.shard)
        self._log_reader = LogReader(self._segments, self._reader)
        self.epochs = recovered.epochs
        self._epochs_saved = False
        self.before_frames: Callable[[], None] | None = None
        """makes durable what is to be so before the next frame is written; whoever sets it takes it away once it is. Raises OSError"""
        self.synced_offset = recovered.segments[-1].next_offset if recovered.segments else 0
        """Every offset below is on the disk: recovery syncs what it lets stand, and `sync` moves it."""
        self._written = WrittenFiles(files, folder)
        self._open_logs = open_logs
        self.writer: Final = Lock()
        """Held by whoever writes."""
        self.shares_offload = shares_offload
        """whether other copies have the same segments in the store: then their leader deletes them there, by the list of all"""

    @classmethod
    def open(
        cls,
        folder: Path,
        identity: ShardIdentity,
        *,
        now_ms: int,
        files: Files | None = None,
        limits: SegmentLimits | None = None,
        commitment: Callable[[], bytes] = no_commitment,
        full_verify: bool = False,
        origin: Origin | None = None,
        runtime: Runtime = REAL,
        open_logs: OpenLogs | None = None,
        synced: bool = False,
        shares_offload: bool = False,
    ) -> tuple[DiskLog, Recovered]:
        """Recover what `folder` holds, or begin a log in it at `origin`, else at offset 0. `commitment` is asked for each new
        segment's header. `open_logs`: who bounds how many logs have files open. `synced`: see `recover`. `shares_offload`: the folder was a
        copy's before.

        Raises CorruptionError (region.log.recovery, or of the origin's snapshot), OSError.
        """
        files = files or DiskFiles()
        if not synced:
            files.make_folder(folder)
        recovered = recover(
            folder, identity, files=files, full=full_verify, synced=synced, shares_offload=shares_offload
        )
        if not recovered.segments:
            recovered = beginning(origin or Origin())
        log = cls(
            folder,
            identity,
            recovered,
            files=files,
            limits=limits or SegmentLimits(),
            commitment=commitment,
            runtime=runtime,
            open_logs=OpenLogs() if open_logs is None else open_logs,
            shares_offload=shares_offload,
        )
        try:
            with log.writer:
                if recovered.segments:
                    log._written.synced_to = recovered.segments[-1].segment_bytes
                else:
                    log._begin((origin or Origin()).point, recovered.producers, now_ms)
                log._begin_mark()
                if recovered.report.epochs_rebuilt:
                    log.save_epochs(recovered.epochs)
                if recovered.offload.pending_deletion:
                    log._save_offload_unless_full(recovered.offload)
        except OSError:
            log.abandon()
            raise
        return log, recovered

    @property
    def start_offset(self) -> int:
        """The oldest offset held."""
        return self._segments.start_offset

    @property
    def end_offset(self) -> int:
        """The offset after the last batch written."""
        return self._segments.active.next_offset

    @property
    def start_point(self) -> LogPoint:
        """Where the log stands before the first entry held."""
        return self._segments.start_point

    @property
    def end_point(self) -> LogPoint:
        """Where the log stands behind the last entry written."""
        return self._segments.end_point

    @property
    def segment_count(self) -> int:
        """How many segment files there are."""
        return len(self._segments.now)

    @property
    def bytes_held(self) -> int:
        """Bytes of all segment files that are local."""
        return self._segments.local_bytes

    @property
    def store_only_bytes(self) -> int:
        """Bytes of all segments that are in a store and not local."""
        return self._segments.store_only_bytes

    @property
    def remote_bytes(self) -> int:
        """Bytes of all segments that are in a store, local as well or not."""
        return self._segments.remote_bytes

    @property
    def last_time_ms(self) -> int:
        """Append time of the newest batch; -1 where there is none."""
        return self._segments.last_time_ms

    # Writing.

    def _open_files(self) -> None:
        """The last segment and the mark are open for writing. Raises UnavailableError where the process has too many files open:
        nothing was written."""
        self._open_logs.used(self)
        self._written.open(self._segments.active.path)

    def release_files(self) -> bool:
        """region.log.open_logs.OpenLog: what is written is synced, and the files are closed until the next write."""
        if not self.writer.acquire(blocking=False):
            return False
        try:
            self.sync()
            self.sync_mark()
            self.abandon()
        except StorageFailedError:
            # Whoever writes next hears of it.
            return False
        finally:
            self.writer.release()
        return True

    def write(self, frames: Sequence[Frame], now_ms: int) -> None:
        """Write all of `frames` after each other, rolling the segment first where it is due: by this log's limits, or where the first says
        that it begins one of its leader's.

        Raises OSError for want of room or of descriptors: nothing of them is left, the log is as it was. Raises
        StorageFailedError where the caller must stop using the log.
        """
        self._written.require_sound()
        if self.before_frames is not None:
            self._prepare_frames(self.before_frames)
        self._open_files()
        active = self._segments.active
        if frames[0].place is Place.UNKNOWN:
            is_due = self._roll_due(active, now_ms)
        else:
            is_due = frames[0].place is Place.FIRST and self._may_roll(active)
        if is_due:
            self.roll(now_ms)
            active = self._segments.active
        buffers: list[bytes | memoryview] = []
        position = active.segment_bytes
        notes: list[tuple[int, int, int, int, int]] = []
        next_offset, note, epoch = active.next_offset, active.end_note, self.epochs.current
        for frame in frames:
            assert frame.base_offset == next_offset
            if frame.leader_epoch > epoch:
                self._epoch_begins(frame)
                epoch = frame.leader_epoch
            batch = frame.batch
            header = batch.header if batch else None
            length = header.total_length if header else 0
            head = encode_entry_header(
                frame.kind,
                base_offset=frame.base_offset,
                leader_epoch=frame.leader_epoch,
                synced_to=self._written.synced_to,
                batch_length=length,
                slot=frame.slot,
                annotation=frame.annotation,
                salt=active.header.salt,
            )
            buffers.append(head)
            end = position + len(head) + length
            if batch and header:
                assert (header.base_offset, header.leader_epoch) == (frame.base_offset, frame.leader_epoch)
                assert header.shard == self.identity.shard and header.body_length == len(batch.body)
                buffers += (header.encode(), batch.body)
                next_offset, note = header.next_offset, 0
                notes.append((frame.base_offset, next_offset, position, end, header.append_time_ms))
            else:
                note += 1
                notes.append((frame.base_offset, next_offset, position, end, -1))
            position = end
        written = self._written.append(active.path, buffers, active.segment_bytes)
        assert written == position
        index = active.index
        assert index is not None
        for base_offset, following, begin, end, time_ms in notes:
            if time_ms < 0:
                index.add_position(end)
            else:
                index.add(base_offset, following, begin, end, time_ms)
        active.last_time_ms = index.last_time_ms
        active.segment_bytes = position
        active.next_offset, active.end_note = next_offset, note
        for frame in frames:
            annotate(
                self.annotations,
                frame.slot,
                frame.annotation,
                alone=frame.batch is None,
                is_note=frame.is_note,
            )
        self._note_is_open = frames[-1].is_note

    def write_frames(self, point: LogPoint, frames: Sequence[Frame], now_ms: int) -> None:
        """Write what `read_frames` gave of another copy of this log, where this one ends: the batches' bytes are not changed, and entries
        get this folder's salt. Nothing is written of a group in which something is wrong.

        Raises RequestError(CONFLICT) where this log does not end at `point` or knows a newer leader, RequestError(BATCH_MALFORMED)
        where the frames are not such as follow each other in a log, and what `write` raises.
        """
        if point != self.end_point:
            raise RequestError(
                f"The log ends at offset {self.end_point.offset} and {self.end_point.note} positions, not at {point.offset} and "
                f"{point.note}.",
                code=Code.CONFLICT,
                hint="Ask the leader where the two logs part.",
            )
        epoch, offset = self.epochs.current, point.offset
        for frame in frames:
            if frame.leader_epoch < epoch:
                raise RequestError(
                    f"Epoch {frame.leader_epoch} follows where epoch {epoch} has begun already.",
                    code=Code.CONFLICT,
                    hint="A newer leader was elected; ask the metadata store which one.",
                )
            if wrong := misfit(frame, offset, self.identity.shard):
                raise RequestError(
                    f"A frame at offset {frame.base_offset} cannot follow offset {offset}: {wrong}.",
                    code=Code.BATCH_MALFORMED,
                )
            epoch = frame.leader_epoch
            offset = frame.batch.header.next_offset if frame.batch else offset
        if frames:
            self.write(frames, now_ms)

    def sync(self) -> None:
        """Bring everything written to the disk, then write the mark. Raises StorageFailedError."""
        active = self._segments.active
        if self._written.sync(active.path, active.segment_bytes):
            self.synced_offset = active.next_offset
            self._write_mark()

    def sync_mark(self) -> None:
        """Bring the mark itself to the disk. Raises StorageFailedError."""
        self._written.sync_mark()

    def _roll_due(self, active: SegmentState, now_ms: int) -> bool:
        return self._may_roll(active) and (
            active.segment_bytes >= self.limits.segment_bytes_max
            or self._aged(active, now_ms, self.limits.segment_age_ms)
        )

    def _may_roll(self, active: SegmentState) -> bool:
        # A segment without a batch stays: the next one would have its base offset, and so its name.
        # A note stays with what it is for: retention lets go of both or of none.
        return not self._note_is_open and active.next_offset > active.base_offset

    def begins_segment(self, point: LogPoint) -> bool:
        """Whether a segment begins at this point. From every thread."""
        segments = self._segments.now
        at = bisect_right(segments, point, key=base_point) - 1
        return at >= 0 and segments[at].base_point == point

    def _aged(self, active: SegmentState, now_ms: int, age_ms: int) -> bool:
        index = active.index
        # Without an index it is being closed at this moment.
        return index is not None and 0 <= index.first_time_ms <= now_ms - age_ms

    def is_outlived(self, now_ms: int) -> bool:
        """Whether the segment that is written to is past its age, and can be closed without another record. Does not block."""
        active = self._segments.active
        return self._may_roll(active) and self._aged(active, now_ms, self.limits.segment_age_ms)

    def roll(self, now_ms: int) -> None:
        """Close the active segment and begin the next. Raises as `write` does."""
        self._open_files()
        active = self._segments.active
        assert active.index is not None
        self.sync()
        write_index(self._files, active.index_path, active.index.encode())
        if not self._epochs_saved:
            self.save_epochs(self.epochs)
        try:
            self._create_segment(active.end_point, now_ms)
        except OSError as error:
            with self._written.fatal("Creating a segment", self.folder):
                if not lacks_resources(error):
                    raise
            raise
        self._write_mark()
        self.sync_mark()
        self._reader.keep_index(active)

    def new_salt(self) -> int:
        """For the header of a new segment."""
        return self.runtime.random.getrandbits(64)

    def _begin(self, point: LogPoint, producers: ProducerTable, now_ms: int) -> None:
        """Begin a log in a folder that holds none. What is known of its beginning is durable before the log is there."""
        # Of an attempt that a crash ended, which may have been meant to begin elsewhere.
        self._snapshots.cut(-1)
        if len(producers):
            self.save_producers(producers.encode(point.offset), point.offset)
        self.save_epochs(self.epochs)
        self._create_segment(point, now_ms)
        self.synced_offset = point.offset

    def _prepare_frames(self, make_durable: Callable[[], None]) -> None:
        try:
            make_durable()
        except OSError as error:
            if lacks_resources(error):
                raise
            with self._written.fatal("Writing down what frames rest on", self.folder):
                raise

    def _epoch_begins(self, frame: Frame) -> None:
        """A frame's epoch is newer than all known: its leader wrote it down before, elsewhere. Durable at the latest with the
        segment's end; until then the frames themselves tell."""
        history = EpochHistory(list(self.epochs.starts))
        history.begin(frame.leader_epoch, frame.base_offset)
        self.epochs, self._epochs_saved = history, False

    def _create_segment(self, point: LogPoint, now_ms: int) -> None:
        base_offset = point.offset
        header = SegmentHeader(
            self.identity,
            base_offset,
            now_ms,
            self.new_salt(),
            self.commitment(),
            head=Head(point.note, len(self.annotations)),
        )
        buffers = encode_beginning(header, self.annotations)
        start, position = len(buffers[0]), sum(map(len, buffers))
        path = self.folder / segment_name(base_offset)
        descriptor = create_durably(self._files, path, buffers)
        self._written.begin(descriptor, position)
        index = SparseIndex(base_offset, start)
        index.add_position(position)
        self._segments.now += (
            SegmentState(
                path,
                header,
                start,
                base_offset,
                position,
                -1,
                index,
                base_note=point.note,
                end_note=point.note,
            ),
        )

    def _begin_mark(self) -> None:
        """The mark says what the log holds; what recovery found, it has synced."""
        mark = self._current_mark()
        found = read_file(self._files, self.folder / MARK_NAME)
        if found is None:
            self._open_logs.used(self)
            self._written.create_mark(mark)
        elif found != mark.encode():
            self._open_files()
            self._write_mark()
            self.sync_mark()

    def _current_mark(self) -> Mark:
        return Mark(self._segments.active.base_offset, self._written.synced_to, self._segments.start_offset)

    def _write_mark(self) -> None:
        self._written.write_mark(self._current_mark())

    # Reading: region.log.log_reader, any thread.

    def read_around(self) -> None:
        """As `SegmentReader.read_around`."""
        self._reader.read_around()

    def read(
        self, offset: int, max_bytes: int, limit: int, *, around_damage: bool = False
    ) -> list[SealedBatch]:
        """See LogReader."""
        return self._log_reader.read(offset, max_bytes, limit, around_damage=around_damage)

    def read_frames(
        self, point: LogPoint, max_bytes: int, limit: LogPoint, *, beside: int = 0, is_guessed: bool = False
    ) -> list[Frame]:
        """See LogReader."""
        return self._log_reader.read_frames(point, max_bytes, limit, beside=beside, is_guessed=is_guessed)

    def read_notes(self, offset: int, wanted: Callable[[bytes], bool]) -> list[bytes]:
        """See LogReader."""
        return self._log_reader.read_notes(offset, self.end_point, wanted)

    def offset_for_time(self, time_ms: int, limit: int) -> int:
        """See LogReader."""
        return self._log_reader.offset_for_time(time_ms, limit)

    def origin(self, producers: bytes, *, is_last: bool = False) -> Origin:
        """What a copy of this log begins with, whose frames are then read from there on: behind what is in a store alone
        (`begin_in_store`), or with `is_last` where the segment begins that is written to, behind copies of all the others
        (region.log.adoption). `producers`: a snapshot of now.

        Raises as `read_frames` does.
        """
        point, annotations = self._log_reader.beginning(is_last=is_last)
        return Origin(point, annotations, producers, self.epochs.starts)

    # Deleting.

    def retention_due(
        self, retention: Retention, now_ms: int, *, below: int, hold: int | None = None
    ) -> bool:
        """Whether `delete_old` would do anything. Does not block: it may be asked on the loop."""
        return (
            self._outlived(retention, now_ms)
            or self._segments.deletable(retention, now_ms, below=below, hold=hold) > 0
        )

    def delete_old(self, retention: Retention, now_ms: int, *, below: int, hold: int | None = None) -> int:
        """Delete the segments that `retention` lets go, all of them wholly below offset `below`; how many. Raises as `write` does."""
        no_room = self._roll_unless_full(now_ms) if self._outlived(retention, now_ms) else None
        return self._delete_closed(
            self._segments.deletable(retention, now_ms, below=below, hold=hold), no_room
        )

    def _roll_unless_full(self, now_ms: int) -> OSError | None:
        """`roll`, before something is deleted. Why there was no room or no descriptor for it: what is closed already goes all the same, and makes room."""
        try:
            self.roll(now_ms)
        except OSError as error:
            if not lacks_resources(error):
                raise
            return error
        return None

    def _delete_closed(self, count: int, no_room: OSError | None) -> int:
        if count:
            self._delete_first(count)
        elif no_room is not None:
            raise no_room
        return count

    def _outlived(self, retention: Retention, now_ms: int) -> bool:
        """Whether the active segment is to be closed by its age, so that what is in it can go, or be compacted."""
        age_ms = self.limits.segment_age_ms
        by_age = segment_age_ms(retention)
        if by_age is not None:
            age_ms = min(age_ms, by_age)
        return self._aged(self._segments.active, now_ms, age_ms)

    def trim(self, offset: int, now_ms: int) -> int:
        """Delete the segments that end at or below `offset`, the active one rolled before where it begins below; how many. Raises as `write` does."""
        no_room = None
        if self._segments.active.base_offset < offset and not self._note_is_open:
            no_room = self._roll_unless_full(now_ms)
        return self._delete_closed(sum(one.next_offset <= offset for one in self._segments.now[:-1]), no_room)

    def _delete_first(self, count: int) -> None:
        self._open_files()
        gone, self._segments.now = self._segments.now[:count], self._segments.now[count:]
        # The new start is on disk before any file goes: what a crash leaves below it is known to be leftover.
        self._write_mark()
        self.sync_mark()
        copies = [segment.remote for segment in gone if segment.remote]
        if copies:
            doomed = () if self.shares_offload else tuple(one.url for one in copies)
            self._save_offload_unless_full(
                msgspec.structs.replace(
                    self.offload,
                    segments=tuple(one for one in self.offload.segments if one not in copies),
                    pending_deletion=(*self.offload.pending_deletion, *doomed),
                )
            )
        for segment in gone:
            for path in (segment.path, segment.index_path, segment.fetched_path):
                self._files.remove(path)
        self._snapshots.trim(told_from(self._segments.now))
        self._files.sync_folder(self.folder)

    # Compaction. What is to be written where is region.log.compactor's; here, as in all writing, by one at a time.

    @property
    def segments(self) -> tuple[SegmentState, ...]:
        """The segments as they are now, oldest first; the last one is written to, the others never change."""
        return self._segments.now

    @property
    def places(self) -> SegmentList:
        """What follows from where they are. From every thread."""
        return self._segments

    def dirty_spans(self, below: int) -> list[DirtySpan]:
        """The closed segments that lie wholly below offset `below`."""
        return self._segments.dirty_spans(below)

    def position_for_offset(self, segment: SegmentState, offset: int) -> int:
        """Where in a segment to scan from for the batch that holds `offset`, or the first one behind it."""
        return self._reader.index(segment).position_for_offset(offset)

    def save_compaction(self, state: CompactionState) -> None:
        """Make what is known of the compaction durable. Raises OSError."""
        save_checked(self._files, self.folder / COMPACTION_NAME, encode_compaction(state))
        self.compaction = state

    def replace_segments(self, old: Sequence[SegmentState], new: SegmentState, aside: Path) -> bool:
        """Let `new`, which is whole and synced under the name `aside`, take the place of consecutive segments.

        False, with nothing changed, where these are no longer all there, or copies of them are in a store since: what is read of a segment in a
        store is what was uploaded. `new` has its index in it.
        """
        at = self._segments.position_of(old)
        if at is None or any(one.remote is not None for one in old):
            return False
        segments = self._segments.now
        assert new.index is not None and new.base_offset == old[0].base_offset
        assert new.next_offset == old[-1].next_offset
        new.base_note, new.end_note = old[0].base_note, old[-1].end_note
        self._files.rename(aside, new.path)
        with self._written.fatal("A sync", self.folder):
            self._files.sync_folder(self.folder)
        write_index(self._files, new.index_path, new.index.encode())
        self._reader.keep_index(new)
        self._segments.now = (*segments[:at], new, *segments[at + len(old) :])
        with self._written.fatal("Deleting what was compacted", self.folder):
            for segment in old:
                self._files.remove(segment.path)
                self._files.remove(segment.index_path)
            self._snapshots.trim(told_from(self._segments.now))
            self._files.sync_folder(self.folder)
        return True

    # Repair. What is written aside, and that it is the same, is region.log.segment_repair's.

    def annotations_at(self, point: LogPoint) -> dict[int, bytes]:
        """The annotations in force at `point`, which the log holds. Raises as `read_frames` does."""
        return self._log_reader.annotations_at(point)

    def close_active(self, segment: SegmentState, now_ms: int) -> bool:
        """Begin the next segment, where `segment` is the one that is written to; whether it is not, on return. Raises as `write` does."""
        active = self._segments.active
        if active is segment and not self._note_is_open and active.next_offset > active.base_offset:
            self.roll(now_ms)
        return self._segments.active is not segment

    def restore_segment(self, segment: SegmentState, aside: Path) -> bool:
        """Let the file `aside`, which is whole and synced, and has what `segment` had where it had it, take the place of its damaged file.

        False, with nothing changed, where the log has the segment no more. Raises StorageFailedError, OSError.
        """
        if segment not in self._segments.now[:-1]:
            return False
        self._files.rename(aside, segment.path)
        with self._written.fatal("A sync", self.folder):
            self._files.sync_folder(self.folder)
        return True

    # Offload. What is moved where is region.log.offloader's.

    def save_offload(self, state: OffloadState) -> None:
        """Make what is known of offloaded segments durable; no place in a store is forgotten. Raises OSError."""
        state = self._with_places(state)
        save_checked(self._files, self.folder / OFFLOADED_NAME, encode_offload(state))
        self.offload = state

    def _save_offload_unless_full(self, state: OffloadState) -> None:
        """What follows from the log's start, which the mark has: recovery tells it again, so that files go though there is no room to say so. The
        next change writes it."""
        state = self._with_places(state)
        with _unless_full():
            self.save_offload(state)
        self.offload = state

    def _with_places(self, state: OffloadState) -> OffloadState:
        places = dict.fromkeys((*self.offload.all_places, *state.all_places))
        return msgspec.structs.replace(state, places=tuple(places))

    def note_place(self, url: str) -> None:
        """Something is about to be put beside `url`: it goes with the stream, whatever becomes of it. Raises OSError."""
        place = url.rpartition("/")[0]
        if place not in self.offload.all_places:
            self.save_offload(msgspec.structs.replace(self.offload, places=(*self.offload.places, place)))

    def begin_in_store(self, entries: Sequence[Offloaded]) -> None:
        """Have these, which follow each other, stand before a log that was just begun behind them: its local segments are to come. Raises
        CorruptionError where they are another log's, OSError."""
        point = self.start_point
        assert entries and entries[-1].next_offset == point.offset == self.end_offset
        for one in entries:
            if one.segment_header.identity != self.identity:
                raise CorruptionError(
                    f"{one.url} is of {one.segment_header.identity}, not of {self.identity}."
                )
        self._open_files()
        self.save_offload(OffloadState(tuple(entries)))
        there = [in_store(self.folder / segment_name(one.base_offset), one, one.base_note) for one in entries]
        self._segments.now = (*there, *self._segments.now)
        self._write_mark()
        self.sync_mark()

    def add_offloaded(self, segment: SegmentState, entry: Offloaded) -> None:
        """A verified copy of `segment` is in a store; where retention was faster, the copy is to be deleted."""
        state = msgspec.structs.replace(self.offload, begun="")
        if segment in self._segments.now:
            self.save_offload(msgspec.structs.replace(state, segments=(*state.segments, entry)))
            segment.remote = entry
        else:
            self.save_offload(
                msgspec.structs.replace(state, pending_deletion=(*state.pending_deletion, entry.url))
            )

    def follow_offloaded(self, entries: Iterable[Offloaded], below: int) -> int:
        """Copies of whole segments of this log are in a store, as whoever leads it has verified; how many of them are news here. Only those
        below offset `below`, which is committed, and that are the same segments here. An object that is named no more, since the store of the
        records was put back, gives way to the one that is. Raises OSError."""
        entries = list(entries)
        told = {(one.base_offset, one.next_offset): one for one in entries if one.next_offset <= below}
        named = {one.url for one in entries}
        news = {
            at: told[place]
            for at, one in enumerate(self._segments.now[:-1])
            if (one.remote is None or one.remote.url not in named)
            and one.header.span is None
            and (place := (one.base_offset, one.next_offset)) in told
            and one.base_note == told[place].base_note
        }
        if news:
            now = self._segments.now
            replaced = {one.url for at in news if (one := now[at].remote) is not None}
            elsewhere = {at: entry for at, entry in news.items() if not now[at].is_local}
            for at, entry in elsewhere.items():
                self._forget_beside(now[at], entry)
            if elsewhere:
                # What was of the other object is gone before the new one is what recovery finds.
                self._files.sync_folder(self.folder)
            kept = [one for one in self.offload.segments if one.url not in replaced]
            self.save_offload(msgspec.structs.replace(self.offload, segments=(*kept, *news.values())))
            for at, entry in news.items():
                now[at].remote = entry
            self._segments.now = tuple(
                in_store(one.path, elsewhere[at], one.base_note, one.end_note) if at in elsewhere else one
                for at, one in enumerate(now)
            )
        return len(news)

    def droppable(self, local_bytes: int) -> SegmentState | None:
        """The oldest local segment, where more than `local_bytes` are local and a copy of it is in a store."""
        return self._segments.droppable(local_bytes)

    def drop_local(self, segment: SegmentState) -> None:
        """Let the local file of an offloaded segment go; its index stays, where entries have the same places in both files."""
        entry, segments = segment.remote, self._segments.now
        if entry is None or segment not in segments[:-1]:
            return
        untold = self._untold_producers(segment.next_offset)
        if untold:
            with _unless_full():
                self.save_producers(untold, segment.next_offset)
                untold = b""
        if _same_places(segment, entry) and read_file(self._files, segment.index_path) is None:
            write_index(self._files, segment.index_path, self._reader.index(segment).encode())
        at = segments.index(segment)
        there = in_store(segment.path, entry, segment.base_note, segment.end_note)
        self._segments.now = (*segments[:at], there, *segments[at + 1 :])
        self._forget_beside(segment, entry)
        self._files.remove(segment.path)
        if untold:
            # On a full disk it is more urgent that something goes; then there may be room.
            with _unless_full():
                self.save_producers(untold, segment.next_offset)
        self._files.sync_folder(self.folder)

    def _untold_producers(self, end: int) -> bytes:
        """A snapshot of what stands below `end`, where none tells it: a start fetches nothing to know the producers. One is written after each roll, unless
        a crash or a full disk comes before it."""
        known = self._snapshots.newest()
        return b"" if known is not None and known[1] >= end else self.producers_at(end).encode(end)

    def _forget_beside(self, segment: SegmentState, entry: Offloaded) -> None:
        """The bytes of a segment are this object's from now on: what was made of others goes."""
        if not _same_places(segment, entry):
            self._reader.forget_indexes()
            self._files.remove(segment.index_path)
        self._files.remove(segment.fetched_path)

    def check_cut(self, cut: LogPoint) -> int:
        """Which segment the log would end with, cut there. Does not block.

        Raises OffsetOutOfRangeError outside the log, RequestError(UNSUPPORTED) where it was compacted, so that what the cut records
        superseded is gone, or offloaded.
        """
        return self._segments.check_cut(cut, self.compaction.fixed_to)

    @property
    def fixed_to(self) -> LogPoint:
        """The log cannot be cut before this point: what stands there was compacted, or is what records went for that did, or is in a store."""
        return max(self._segments.fixed_to, LogPoint(self.compaction.fixed_to))

    def truncate(self, cut: LogPoint) -> ProducerTable:
        """Cut every entry that reaches past `cut`; the producers of what stays.

        For a follower whose log parts from its leader's. Raises as `check_cut`, with nothing changed.
        """
        offset = cut.offset
        at = self.check_cut(cut)
        self.cuts += 1
        self._open_files()
        self.sync()
        if offset < self.compaction.clean_to:
            self.save_compaction(msgspec.structs.replace(self.compaction, clean_to=offset))
        segments = self._segments.now
        target, later = segments[at], segments[at + 1 :]
        index, annotations, note, epoch, is_note = self._reader.rescan(target, target.segment_bytes, cut)
        end = index.next_offset
        producers = self.producers_at(end)
        # What no longer holds goes first: snapshots, then the claim that these bytes are there.
        snapshot = producers.encode(end)
        self._snapshots.save(snapshot, end)
        self._snapshots.cut(end)
        if self.compaction.producers:
            self.save_compaction(msgspec.structs.replace(self.compaction, producers=snapshot))
        self._files.sync_folder(self.folder)
        target.index, target.next_offset, target.end_note = index, index.next_offset, note
        target.segment_bytes, target.last_time_ms = index.segment_bytes, index.last_time_ms
        self._segments.now = segments[: at + 1]
        self._written.synced_to, self.synced_offset = index.segment_bytes, index.next_offset
        self._reader.forget_indexes()
        self._write_mark()
        self.sync_mark()
        try:
            for segment in reversed(later):
                self._files.remove(segment.path)
                self._files.remove(segment.index_path)
            self._files.remove(target.index_path)
            self._files.sync_folder(self.folder)
            self._written.cut(target.path, index.segment_bytes)
        except OSError:
            # Halfway: what is written next would go to a file that is gone.
            with self._written.fatal("Cutting the log", self.folder):
                raise
        self.annotations, self._note_is_open = annotations, is_note
        history = EpochHistory(list(self.epochs.starts))
        history.truncate(end, epoch)
        self.save_epochs(history)
        return producers

    def producers_at(self, end: int) -> ProducerTable:
        """The producers of what stands below `end`. The table in memory cannot be cut back to it: of a producer's older batches some may
        have been forgotten in favour of those behind. As at a start nothing is fetched: what is in a store alone, and was restored from there, tells nobody."""
        copied = ProducerSnapshots(self._files, self.folder, self.compaction.producers)
        producers, begin = copied.at(end, told_from(self._segments.now))
        for segment in self._segments.now:
            if segment.next_offset <= begin or segment.base_offset >= end or not segment.is_local:
                continue
            self._reader.count_producers(segment, producers, begin, end)
        producers.settle(end)
        return producers

    # Small files, and the end.

    def begin_epoch(self, epoch: int, *, durably: bool = True) -> None:
        """What is written from now on is of `epoch`. A new one is made durable; else, where it stands elsewhere before its first frame does,
        with the segment's end: until then the frames themselves tell."""
        if epoch > self.epochs.current:
            history = EpochHistory(list(self.epochs.starts))
            history.begin(epoch, self.end_offset)
            if durably:
                self.save_epochs(history)
            else:
                self.epochs, self._epochs_saved = history, False

    def end_epochs(self, epoch: int) -> None:
        """Forget, durably, epochs above `epoch` that begin where the log ends: `epoch` is the newest of which something stands. A follower
        may then be given more of an older one."""
        history = EpochHistory(list(self.epochs.starts))
        history.truncate(self.end_offset, epoch)
        if history.starts != self.epochs.starts:
            self.save_epochs(history)

    def save_epochs(self, history: EpochHistory) -> None:
        """Make the leader-epoch history durable."""
        save_checked(self._files, self.folder / EPOCHS_NAME, encode_epochs(history))
        self.epochs, self._epochs_saved = history, True

    def save_producers(self, snapshot: bytes, offset: int | None = None) -> None:
        """Make a snapshot of the producers' table durable: of what stands below `offset`, where the log may be cut back to later;
        without it, the one of a clean stop."""
        if offset is None:
            self._snapshots.save_last(snapshot)
        else:
            self._snapshots.save(snapshot, offset)

    def close(self) -> None:
        """Sync everything, mark included, and close the files."""
        try:
            self.sync()
            self.sync_mark()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files, and promise nothing."""
        self._open_logs.closed(self)
        self._written.close()


def _same_places(segment: SegmentState, entry: Offloaded) -> bool:
    """Whether entries stand at the same bytes in both files, so that an index of one is the other's."""
    return (segment.start, segment.segment_bytes) == (len(entry.header), entry.segment_bytes)


@contextmanager
def _unless_full() -> Iterator[None]:
    """What is done here may be left undone for want of room."""
    try:
        yield
    except OSError as error:
        if not lacks_resources(error):
            raise
