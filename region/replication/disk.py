"""One log of a replica on its disk: the log itself, the elections of its epochs, the commit point and the producers. Blocking: commit
threads only, one at a time; `read` from any. While the log is led, its leader writes to `log` and keeps `producers` (region.log.copies).

The log's folder holds, beside what is the log's own, `elections` (epochs by points and election ids) and `commit` (the commit
point, written now and then: an old one is only lower).

Invariants:
- an epoch stands in `elections`, durably, before a frame of it is given to the log: of no frame is the election unknown;
- what recovery lets stand is rewritten and synced before any end is told (R4, R11): after a sync that failed, the page cache may have
  what the disk has not, and a later sync would not tell;
- `producers` are those of what the log has, so that who is elected knows at once what was published before;
- `commit` is lowered before anything below it is cut;
- a copy of a log is whole under another name before it takes the place of the old one, which is put back where that did not end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

import msgspec

from felix.errors import CorruptionError
from felix.lazy_event import LazyThreadEvent
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.settings import Compaction
from felix.storage.port import Files, is_full, write_all
from felix.storage.small_file import TEMPORARY_SUFFIX, load_checked, save_checked
from region.cluster.records import ShardId
from region.log.adoption import adopt_segments
from region.log.compaction import CompactionReport, CompactionState, is_due
from region.log.compactor import Compactor, PassSettings, Transform, WorkEndedError
from region.log.companions import shard_of
from region.log.disk import DiskLog
from region.log.durable_mark import MARK_NAME, decode_mark
from region.log.errors import NotLocalError, StorageFailedError
from region.log.frame import Frame as LogFrame
from region.log.frame import Place
from region.log.maintenance import COMPACTION_SHARE, CompactionPace
from region.log.offload import Offloaded
from region.log.open_logs import OpenLogs
from region.log.point import LogPoint
from region.log.producers import ProducerTable, shorten_snapshot
from region.log.recovery import EPOCHS_NAME
from region.log.segment import SEGMENT_SUFFIX, ShardIdentity, no_commitment, segment_name
from region.log.segment_limits import SegmentLimits
from region.log.segment_list import first_local
from region.log.segment_repair import SegmentRepair
from region.log.segment_scan import count_batch
from region.log.segment_state import SegmentState
from region.log.segment_survey import LostPart
from region.replication.history import BEGINNING, EpochStart, History
from region.replication.messages import Frame
from region.replication.origin import Beginning, Closed
from region.replication.replica import Log
from region.replication.wire import ORIGIN_PRODUCERS_BYTES_MAX, frames_from

ELECTIONS_NAME: Final = "elections"
COMMIT_NAME: Final = "commit"
COPY_SUFFIX: Final = ".copy"
OLD_SUFFIX: Final = ".old"
DAMAGED_SUFFIX: Final = ".damaged"
"""Of the folder of a log that could not be opened, beside the one that is built anew."""
UNKNOWN_ELECTION: Final = "0" * 16
"""Of epochs that a broker began before its log was replicated: nobody was elected, and nobody else has them."""
_REWRITE_BYTES: Final = 1 << 20
FETCHED_FOR_COPY_MAX: Final = 4
"""Segments that a leader fetches from a store for a copy that lacks no more: it keeps what it has, and is not begun anew again and again where
local files go quickly."""

_starts: Final = msgspec.json.Decoder(list[EpochStart])
_point: Final = msgspec.json.Decoder(LogPoint)


@dataclass(frozen=True, slots=True)
class LogPlan:
    """Where a log of a replica is, and how it is opened."""

    number: int
    folder: Path
    identity: ShardIdentity
    limits: SegmentLimits = SegmentLimits()  # noqa: RUF009 - immutable
    commitment: Callable[[], bytes] = no_commitment
    kept_in: Path | None = None
    """the folder where the commit points of copies are kept; None: beside the log's folder"""
    led: tuple[int, str] = (0, "")
    """the epoch, and its election, that this broker was last elected for: it may have led it before the log could have copies"""
    gone: CorruptionError | None = None
    """why there is nothing to open: the log was begun before it could have copies, and its folder is not there any more"""

    @property
    def kept_file(self) -> Path:
        """Outside of the log's folder: it tells of a folder that is gone, or was put back as it was earlier."""
        if self.kept_in is None:
            return self.folder.with_name(f"{self.folder.name}.{COMMIT_NAME}")
        shard = ShardId(self.identity.incarnation.hex(), shard_of(self.identity.shard))
        return self.kept_in / kept_name(shard, self.number)


def kept_name(shard: ShardId, kind: int) -> str:
    """The file among what is known of copies that has a log's commit point."""
    return f"{shard.incarnation}-{shard.number}-{kind}"


def parse_kept_name(name: str) -> tuple[ShardId, int] | None:
    """The shard, and the kind of the log; None for another file."""
    incarnation, *numbers = name.split("-")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        return None
    return ShardId(incarnation, int(numbers[0])), int(numbers[1])


class Aside(NamedTuple):
    """A folder with what is left of a log that could not be opened. Nothing reads it."""

    path: Path
    size: int
    """bytes of its files, when the log was opened"""


class ReplicaDisk:
    """See the module. Construct with `open`."""

    def __init__(
        self,
        plan: LogPlan,
        log: DiskLog,
        starts: Sequence[EpochStart],
        kept: LogPoint,
        producers: ProducerTable,
        *,
        files: Files,
        runtime: Runtime,
        open_logs: OpenLogs,
        is_anew: bool = False,
        aside: Aside | None = None,
    ) -> None:
        self.plan = plan
        self.aside = aside
        """what could not be opened here once, and was set aside, until it is removed"""
        self.is_anew = is_anew
        """whether there was a log here, and its folder is gone: also where another was begun there that holds nothing yet"""
        self.is_short = kept > log.end_point
        """whether the log ends before what was known here to be committed"""
        self.log = log
        log.shares_offload = True
        log.read_around()
        self.producers = producers
        self._segments_seen = log.segment_count
        self.history = History(starts)
        self.kept = kept
        self._files = files
        self._runtime = runtime
        self._open_logs = open_logs
        self._compacting = Lock()
        """Held by a pass of compaction."""
        self._ending = LazyThreadEvent()
        """Ends one, and a repair: the log is closed."""

    @classmethod
    def open(
        cls, plan: LogPlan, *, files: Files, runtime: Runtime = REAL, open_logs: OpenLogs | None = None
    ) -> ReplicaDisk:
        """Recover the log, or begin one. All that it then holds is on the disk, where the folder that it lies in is.

        Raises CorruptionError where the log, or what is known of its elections, must not be used; OSError.
        """
        _finish_copy(files, plan.folder)
        return cls._open(plan, files, runtime, OpenLogs() if open_logs is None else open_logs)

    @classmethod
    def _open(cls, plan: LogPlan, files: Files, runtime: Runtime, open_logs: OpenLogs) -> ReplicaDisk:
        had_log = files.exists(plan.folder) and any(
            name.endswith(SEGMENT_SUFFIX) for name in files.names(plan.folder)
        )
        rewrite_unsynced(files, plan.folder)
        # Of a log that was no copy before, what retention let go of is its own to delete.
        was_copy = files.exists(plan.kept_file)
        log, recovered = DiskLog.open(
            plan.folder,
            plan.identity,
            now_ms=runtime.clock.now_ms(),
            files=files,
            limits=plan.limits,
            commitment=plan.commitment,
            runtime=runtime,
            open_logs=open_logs,
            shares_offload=was_copy,
        )
        try:
            # A log whose own name is not on the disk is gone with the power, however often it was synced.
            files.sync_folder(plan.folder.parent)
            payload = load_checked(files, plan.kept_file)
            is_known = payload is not None
            # Also where it was begun anew and ended before anything was written to it.
            is_anew = is_known and not (had_log and _was_used(files, plan.folder, log))
            starts = _load_elections(
                files, plan.folder, log, was_replicated=is_known and not is_anew, led=plan.led
            )
            if payload is None:
                # That there is a log is said only once there is one.
                save_checked(files, plan.folder / ELECTIONS_NAME, msgspec.json.encode(starts))
                payload = load_checked(files, plan.folder / COMMIT_NAME) or msgspec.json.encode(BEGINNING)
                save_checked(files, plan.kept_file, payload)
            kept = _point.decode(payload)
        except (CorruptionError, OSError, msgspec.DecodeError):
            log.abandon()
            raise
        return cls(
            plan, log, starts, kept, recovered.producers, files=files, runtime=runtime, open_logs=open_logs,
            is_anew=is_anew, aside=find_aside(files, plan.folder),
        )  # fmt: skip

    def beginning(self) -> Log:
        """What a replica knows of it after its start."""
        log = self.log
        end = log.end_point
        commit = max(log.start_point, min(self.kept, end))
        # Durable: recovery has synced all that it let stand.
        return Log(
            self.plan.number,
            History(self.history.starts),
            log.start_point,
            end,
            durable=end,
            commit=commit,
            kept=self.kept,
        )

    @property
    def frames_from(self) -> LogPoint:
        """From where on another copy is sent frames; what is before, one that lacks it is given as segments, or by the list of those in a
        store. From every thread."""
        places = self.log.places
        segments = places.now
        fetched_from = first_local(segments) - FETCHED_FOR_COPY_MAX
        return max(places.whole_from, segments[fetched_from].base_point if fetched_from > 0 else BEGINNING)

    # Writing

    def write(
        self, prev: LogPoint, entries: Sequence[LogFrame], starts: Sequence[EpochStart] = (), *, now_ms: int
    ) -> None:
        """Frames of this or another copy, where this one ends; `starts`: epochs that begin with them.

        Raises as `DiskLog.write_frames` does.
        """
        with self.log.writer:
            newer = [start for start in starts if start.epoch > self.history.last.epoch]
            if newer:
                for start in newer:
                    self.history.begin(start)
                self.log.before_frames = self._save_elections
            self.log.write_frames(prev, entries, now_ms)
            self._count_producers(entries)

    def _count_producers(self, entries: Sequence[LogFrame]) -> None:
        log, producers = self.log, self.producers
        for entry in entries:
            if entry.batch is not None and (header := entry.batch.header).producer_id:
                count_batch(producers, header)
        producers.settle(log.end_offset)
        if log.segment_count != self._segments_seen:
            # What is before a rolled segment need not be read again to know the producers.
            self._segments_seen = log.segment_count
            self._save_producers()

    def _save_producers(self) -> bool:
        """Whether there was room for it."""
        with suppress(OSError):
            self.log.save_producers(self.producers.encode(self.log.end_offset), self.log.end_offset)
            return True
        return False

    def begin(self, start: EpochStart) -> None:
        """N1: all that is held is synced, and the epoch begins here. It is durable before its first frame is written: of one without frames
        nobody else knows, and a broker that starts again never leads what it was elected for before. Raises StorageFailedError, OSError: of a full
        disk, it is called again."""
        with self.log.writer:
            assert start.start == self.log.end_point, (start, self.log.end_point)
            self.log.sync()
            if start.epoch > self.history.last.epoch:
                self.history.begin(start)
                self.log.before_frames = self._save_elections
            if self.is_anew and self.log.before_frames is not None:
                # From now on this is the log, also where nothing is ever written to it.
                self._save_elections()
            self.log.begin_epoch(start.epoch, durably=False)

    def cut(self, point: LogPoint) -> None:
        """What stands behind `point` goes, and epochs that began there; durable on return. Raises as `DiskLog.truncate` does; OSError of a full
        disk, where it is called again."""
        with self.log.writer:
            if self.kept > point:
                self._keep(point)
            if point < self.log.end_point:
                try:
                    self.producers = self.log.truncate(point)
                except OSError:
                    if self.log.end_point == point:
                        # Cut already, with no room for what is to be written after it: `end_epochs` writes it.
                        self.producers = self.log.producers_at(point.offset)
                        self._segments_seen = self.log.segment_count
                    raise
                self._segments_seen = self.log.segment_count
            self.history.truncate(point)
            self._save_elections()
            self.log.end_epochs(self.history.epoch_before(point))

    def sync(self) -> LogPoint:
        """Where the log ended when the sync began, which is on the disk now. Raises StorageFailedError."""
        with self.log.writer:
            point = self.log.end_point
            self.log.sync()
            return point

    def keep(self, point: LogPoint) -> None:
        """Keep the commit point, and the log's mark, durably. Raises OSError, StorageFailedError."""
        with self.log.writer:
            self._keep(point)

    def _keep(self, point: LogPoint) -> None:
        save_checked(self._files, self.plan.kept_file, msgspec.json.encode(point))
        self.kept = point
        self.log.sync_mark()

    def trim(self, point: LogPoint, *, now_ms: int) -> LogPoint:
        """Let go of segments that end at or before `point`; where the log begins then. Raises as `DiskLog.trim` does."""
        with self.log.writer:
            is_saved = self._save_producers()
            self.log.trim(point.offset, now_ms)
            if not is_saved:
                # On a full disk it is more urgent that something goes; then there may be room.
                self._save_producers()
            self._segments_seen = self.log.segment_count
            return self.log.start_point

    def _save_elections(self) -> None:
        save_checked(self._files, self.plan.folder / ELECTIONS_NAME, msgspec.json.encode(self.history.starts))
        self.log.before_frames = None

    # Reading

    def read(self, begin: LogPoint, size: int, end: LogPoint) -> tuple[Frame, ...]:
        """Frames from `begin` on and before `end`, of at most `size` bytes, one at least. Raises as `DiskLog.read_frames` does."""
        return frames_from(begin, self.log.read_frames(begin, size, end))

    def placed(self, begin: LogPoint, entries: Sequence[LogFrame]) -> Sequence[LogFrame]:
        """The same entries, which stand behind `begin`, with the word whether a segment begins with them: so that it does on other copies."""
        if not entries:
            return entries
        place = Place.FIRST if self.log.begins_segment(begin) else Place.LATER
        return (msgspec.structs.replace(entries[0], place=place), *entries[1:])

    def read_placed(self, begin: LogPoint, size: int, end: LogPoint, beside: int = 0) -> tuple[Frame, ...]:
        """As `read`, for another copy. Each frame counts `beside` bytes more than it has."""
        return frames_from(begin, self.placed(begin, self.log.read_frames(begin, size, end, beside=beside)))

    # Copies

    def told_beginning(self, producers: bytes = b"") -> Beginning:
        """Where a copy of this log begins, with as much of what is known of producers as fits a message. Raises as `DiskLog.origin` does."""
        # Clean is what was so before the segments are looked at; tombstones are gone that went until then.
        clean_to = self.log.compaction.clean_to
        is_whole = self.log.places.whole_from == BEGINNING
        start = self.log.start_point
        if not is_whole:
            # It begins where the segment does that is written to: at its end, so not below what whoever asks has committed.
            self.close_active(self.log.segments[-1])
        origin = self.log.origin(
            shorten_snapshot(producers, ORIGIN_PRODUCERS_BYTES_MAX), is_last=not is_whole
        )
        starts = tuple(start for start in self.history.starts if start.start < origin.point)
        if is_whole:
            return Beginning(origin, starts, start=start if start < origin.point else None)
        closed = tuple(
            Closed(one.base_offset, one.generation, one.segment_bytes)
            for one in self.log.segments
            if one.base_offset < origin.point.offset
        )
        compaction = CompactionState(clean_to, self.log.compaction.tombstones_from)
        return Beginning(origin, starts, closed, compaction)

    def read_piece(self, base_offset: int, generation: int, position: int, size: int) -> bytes:
        """Bytes of a closed segment's file; none where the segment is not there any more. Raises NotLocalError where it is to be fetched, OSError."""
        for segment in self.log.segments[:-1]:
            if (segment.base_offset, segment.generation) == (base_offset, generation):
                break
        else:
            return b""
        try:
            descriptor = self._files.open(
                segment.path if segment.is_local else segment.fetched_path, os.O_RDONLY
            )
        except FileNotFoundError:
            if not segment.is_local:
                raise NotLocalError(segment) from None
            return b""
        try:
            return self._files.pread(
                descriptor, max(0, min(size, segment.segment_bytes - position)), position
            )
        finally:
            self._files.close(descriptor)

    @property
    def _aside(self) -> Path:
        """Where a copy is made."""
        return self.plan.folder.with_name(self.plan.folder.name + COPY_SUFFIX)

    def collect(self) -> None:
        """Closed segments of the leader's are about to come (`take_piece`). Raises OSError."""
        self._files.remove_folder(self._aside)
        self._files.make_folder(self._aside)

    def take_piece(self, closed: Closed, position: int, data: bytes) -> None:
        """Bytes of one, behind those before. Raises OSError."""
        descriptor = self._files.open(_piece_path(self._aside, closed), os.O_RDWR | os.O_CREAT)
        try:
            write_all(self._files, descriptor, (data,), position)
        finally:
            self._files.close(descriptor)

    def begin_anew(self, beginning: Beginning, listed: Sequence[Offloaded] = ()) -> ReplicaDisk:
        """The log that takes this one's place, begun where the leader's begins, with the closed segments that have come, or behind those
        that are in a store alone (`listed`); frames follow. This one is closed.

        Raises CorruptionError (of the snapshot of producers, or of a segment), OSError, with the old log in its place; StorageFailedError where
        that is not known.
        """
        aside = self._aside
        if beginning.closed:
            adopt_segments(
                aside,
                self.plan.identity,
                [_piece_path(aside, closed) for closed in beginning.closed],
                beginning.origin,
                files=self._files,
                now_ms=self._runtime.clock.now_ms(),
                compaction=beginning.compaction,
                commitment=self.plan.commitment,
                runtime=self._runtime,
            )
        else:
            self._files.remove_folder(aside)
        log, _ = DiskLog.open(
            aside,
            self.plan.identity,
            now_ms=self._runtime.clock.now_ms(),
            files=self._files,
            commitment=self.plan.commitment,
            origin=beginning.origin,
            runtime=self._runtime,
        )
        try:
            if listed:
                log.begin_in_store(listed)
        except BaseException:
            log.abandon()
            raise
        log.close()
        save_checked(self._files, aside / ELECTIONS_NAME, msgspec.json.encode(beginning.starts))
        self.close()
        # What is committed here from now on, and what was: of the two the lower one, whichever log is found after a crash.
        kept = beginning.origin.point
        if self.kept > kept:
            self._keep(kept)
        begun = self._take_place(aside)
        # Retention, and a store, take what is committed alone; closed segments may end behind it.
        if not beginning.closed and kept > begun.kept:
            try:
                begun.keep(kept)
            except OSError as error:
                # An old one is only lower.
                if not is_full(error):
                    raise
        return begun

    def _take_place(self, aside: Path) -> ReplicaDisk:
        """Open the log in `aside`, under this one's name. Raises as `begin_anew`."""
        files, folder = self._files, self.plan.folder
        old = folder.with_name(folder.name + OLD_SUFFIX)
        # Of a copy that took this one's place, where that could not be removed.
        files.remove_folder(old)
        files.rename(folder, old)
        try:
            files.rename(aside, folder)
            files.sync_folder(folder.parent)
            begun = ReplicaDisk._open(self.plan, files, self._runtime, self._open_logs)
        except (CorruptionError, OSError):
            self._put_back(old, aside)
            raise
        with suppress(OSError):
            files.remove_folder(old)
        return begun

    def _put_back(self, old: Path, aside: Path) -> None:
        """What goes on writes to the old log, so it has its name again. Raises StorageFailedError."""
        files, folder = self._files, self.plan.folder
        try:
            if files.exists(folder):
                files.rename(folder, aside)
            files.rename(old, folder)
            files.sync_folder(folder.parent)
        except OSError as error:
            raise StorageFailedError(
                f"{folder} could not be put back where it was: {error}.",
                hint="Look after the disk, then restart the broker: it finds out which of both logs is whole.",
            ) from error
        self._ending = LazyThreadEvent()

    def limit_segments(self, limits: SegmentLimits) -> None:
        """Close segments by these limits from now on."""
        self.plan = replace(self.plan, limits=limits)
        self.log.limits = limits

    # Compaction

    def compaction_due(self, below: int, lag_ms: int) -> bool:
        """Whether `compact` would be worth its work. Does not block."""
        log, now_ms = self.log, self._runtime.clock.now_ms()
        return not log.offload.segments and (
            self._outlived(below, now_ms) is not None
            or is_due(log.dirty_spans(below), log.compaction.clean_to, now_ms=now_ms, lag_ms=lag_ms)
        )

    def _outlived(self, below: int, now_ms: int) -> SegmentState | None:
        """The segment that is written to, where it is past its age and committed. Its leader closes its own when nothing is written any more;
        here no further frame says so."""
        active = self.log.segments[-1]
        return active if active.next_offset <= below and self.log.is_outlived(now_ms) else None

    def compact(
        self, below: int, compaction: Compaction, producers: bytes, seal: Transform, open_batch: Transform
    ) -> CompactionReport | None:
        """One pass over the closed segments below offset `below`, which are committed, in a thread of its own: reads and writes go on. The one that is
        written to is closed first where it is past its age; None where that was all there was to do. `producers`: a snapshot of now. Whoever closes the log or replaces it ends the pass.

        Raises as `Compactor.run` does; WorkEndedError where it was ended.
        """
        with self._compacting:
            now_ms = self._runtime.clock.now_ms()
            if self._ending.is_set():
                raise WorkEndedError
            if (outlived := self._outlived(below, now_ms)) is not None:
                self.close_active(outlived)
                if not self.compaction_due(below, compaction.lag_ms):
                    return None
            compactor = Compactor(
                self.log,
                self._files,
                PassSettings(now_ms, compaction.lag_ms, compaction.tombstone_ms, below),
                seal=seal,
                open_batch=open_batch,
                writer=self.log.writer,
                pace=CompactionPace(COMPACTION_SHARE, self._ending, self._runtime.clock),
            )
            return compactor.run(producers, self.log.epochs.starts)

    def _end_compaction(self) -> None:
        self._ending.set()
        with self._compacting:
            pass

    # Repair

    def segment_at(self, base_offset: int, generation: int) -> SegmentState | None:
        """The log's segment that has this name. From every thread."""
        for segment in self.log.segments:
            if (segment.base_offset, segment.generation) == (base_offset, generation):
                return segment
        return None

    def close_active(self, segment: SegmentState) -> bool:
        """Whether `segment` is closed, on return: it is, where it can be. Raises as `DiskLog.write` does; WorkEndedError where the log was
        closed or begun anew: its folder may be another log's."""
        with self.log.writer:
            if self._ending.is_set():
                raise WorkEndedError
            return self.log.close_active(segment, self._runtime.clock.now_ms())

    def begin_repair(self, segment: SegmentState, parts: Sequence[LostPart] = ()) -> SegmentRepair:
        """Write a damaged segment anew, aside; `parts`: those of it that are lost, where they are known."""
        return SegmentRepair(self.log, self._files, segment, parts)

    def finish_repair(self, repair: SegmentRepair) -> bool:
        """Put what was written in its place, also beside a pass of compaction; False where the log has the segment no more. Raises as
        `SegmentRepair.finish` does; WorkEndedError where the log was closed or begun anew meanwhile."""
        try:
            repair.verify()
            with self.log.writer:
                if self._ending.is_set():
                    raise WorkEndedError
                return repair.finish()
        except FileNotFoundError:
            # Of a log that was begun anew the folder has another name.
            if self._ending.is_set():
                raise WorkEndedError from None
            raise

    def rewrite_small_files(self) -> list[Path]:
        """Write the elections and the commit point again where their files are damaged: both are known here. Which were. Raises OSError."""
        elections, kept = self.plan.folder / ELECTIONS_NAME, self.plan.kept_file
        with self.log.writer:
            if self._ending.is_set():
                return []
            found = [
                path
                for path in (elections, kept)
                if self._files.exists(path) and load_checked(self._files, path) is None
            ]
            if elections in found:
                self._save_elections()
            if kept in found:
                self._keep(self.kept)
            return found

    def forget_damaged(self) -> None:
        """What could not be opened is needed no more: this copy is in sync again. Raises OSError."""
        aside = damaged_folder(self.plan.folder)
        if self._files.exists(aside):
            self._files.remove_folder(aside)
        self.aside = None

    # The end

    def close(self) -> None:
        """Sync everything, and close the files. Raises StorageFailedError."""
        self._end_compaction()
        with self.log.writer:
            self.log.close()

    def abandon(self) -> None:
        """Close the files, and promise nothing."""
        self._end_compaction()
        with self.log.writer:
            self.log.abandon()


def _piece_path(folder: Path, closed: Closed) -> Path:
    """Where a segment is collected."""
    return folder / f"{segment_name(closed.base_offset, closed.generation)}{TEMPORARY_SUFFIX}"


def find_aside(files: Files, folder: Path) -> Aside | None:
    """What was set aside of the log that is in `folder`; None where nothing was. Blocking."""
    aside = damaged_folder(folder)
    return Aside(aside, _size(files, aside)) if files.exists(aside) else None


def _size(files: Files, path: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 of what cannot be read, or goes meanwhile."""
    try:
        if files.is_folder(path):
            return sum(_size(files, path / name) for name in files.names(path))
        descriptor = files.open(path, os.O_RDONLY)
    except OSError:
        return 0
    try:
        return files.size(descriptor)
    except OSError:
        return 0
    finally:
        files.close(descriptor)


def damaged_folder(folder: Path) -> Path:
    """Where a log that could not be opened is kept, which was in `folder`."""
    return folder.with_name(folder.name + DAMAGED_SUFFIX)


def set_aside(files: Files, plan: LogPlan) -> Path:
    """Give the folder of a log that cannot be opened another name, which is returned: `ReplicaDisk.open` begins the log anew, and knows that it was
    there. Blocking. Raises OSError."""
    aside = damaged_folder(plan.folder)
    if files.exists(aside):
        files.remove_folder(aside)
    files.rename(plan.folder, aside)
    files.sync_folder(plan.folder.parent)
    return aside


def _finish_copy(files: Files, folder: Path) -> None:
    """What a copy that did not end has left: the old log is put back, or goes where the new one stands."""
    old, aside = folder.with_name(folder.name + OLD_SUFFIX), folder.with_name(folder.name + COPY_SUFFIX)
    if files.exists(old):
        if files.exists(folder):
            # The names must be on the disk before the old log goes.
            files.sync_folder(folder.parent)
            files.remove_folder(old)
        else:
            files.rename(old, folder)
            files.sync_folder(folder.parent)
    if files.exists(aside):
        files.remove_folder(aside)


def rewrite_unsynced(files: Files, folder: Path) -> None:
    """Write again what the mark does not say is on the disk: a sync of it may have failed in a process that is gone (R11).

    Blocking. Raises OSError. A log without a mark has nothing that was acknowledged.
    """
    if not files.exists(folder / MARK_NAME):
        return
    descriptor = files.open(folder / MARK_NAME, os.O_RDONLY)
    try:
        mark = decode_mark(files.pread(descriptor, files.size(descriptor), 0))
    finally:
        files.close(descriptor)
    for name in files.names(folder):
        base = name.removesuffix(SEGMENT_SUFFIX)
        if not name.endswith(SEGMENT_SUFFIX) or not base.isdigit() or mark is None:
            continue
        if int(base) >= mark.segment:
            _rewrite(files, folder / name, mark.synced_to if int(base) == mark.segment else 0)


def _rewrite(files: Files, path: Path, position: int) -> None:
    descriptor = files.open(path, os.O_RDWR)
    try:
        end = files.size(descriptor)
        if position >= end:
            return
        while position < end:
            data = files.pread(descriptor, min(_REWRITE_BYTES, end - position), position)
            if not data:
                break
            position = write_all(files, descriptor, (data,), position)
        files.sync(descriptor)
    finally:
        files.close(descriptor)


def _load_elections(
    files: Files, folder: Path, log: DiskLog, *, was_replicated: bool, led: tuple[int, str]
) -> list[EpochStart]:
    """The history as it stands on the disk, as far as the log has what it is about. `led`: as `LogPlan` has it."""
    path, end = folder / ELECTIONS_NAME, log.end_point
    payload = load_checked(files, path)
    if payload is None:
        if files.exists(path):
            raise _unreadable(path, "its checksum does not hold")
        if was_replicated:
            raise _unreadable(path, "it is gone")
        return [
            EpochStart(
                start.epoch,
                led[1] if start.epoch == led[0] else UNKNOWN_ELECTION,
                LogPoint(start.start_offset),
            )
            for start in log.epochs.starts
        ]
    try:
        starts = [start for start in _starts.decode(payload) if start.start <= end]
    except msgspec.DecodeError as error:
        raise _unreadable(path, str(error)) from error
    written = log.epochs.starts
    if (
        written
        and written[-1].start_offset < end.offset
        and written[-1].epoch > max((start.epoch for start in starts), default=0)
    ):
        raise _unreadable(path, f"epoch {written[-1].epoch} stands in {EPOCHS_NAME}, and is not in it")
    return starts


def _was_used(files: Files, folder: Path, log: DiskLog) -> bool:
    """Whether anything was written to a log since it was begun, or an epoch began in it: each puts an election before itself."""
    return log.end_point != BEGINNING or bool(log.epochs.starts) or files.exists(folder / ELECTIONS_NAME)


def _unreadable(path: Path, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path} does not say who led the epochs of the log: {why}.",
        hint="Replace this broker's copy: it is built anew from the shard's leader.",
    )
