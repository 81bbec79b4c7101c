"""The log of one shard as the broker uses it, on the event loop: append, read, follow the tail.

This is the actor around region.log.core: it brings events to the core and carries out what comes back. A thread writes, group by
group, what it keeps there (region.log.shard_files); everything else here runs on the loop.

The core's docstring says what is decided. Invariants of the actor:
- an append is answered exactly once: with its offset after the durability that the stream asks for, or with
  an error;
- effects happen in the order of `Ready`: records can be read before their append is answered, and followers of the tail are told
  afterwards;
- a log that has other copies (region.log.copies) is written here, and answered and read once it is committed. Whoever keeps the copies opens
  and closes, syncs and cuts it on the disk;
- one writer has the folder at a time; after a failed sync or write the shard is FAILED for good, and no sync is tried again: whoever has
  it open closes it, and may open it anew;
- pending bytes, ring and annotations are bounded; more is refused with a code.

States and their transitions are in region.log.states, the disk in region.log.shard_files and what it holds, followers in region.log.tail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from felix.batch import FLAG_HEADERS, HEADER_BYTES, Batch
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.lazy_event import LazyEvent
from felix.storage.disk import DiskFiles
from felix.storage.port import Files
from region.log import core
from region.log.admission import Appended
from region.log.ahead import Note
from region.log.compaction import KEYS_BYTES_MAX, CompactionReport
from region.log.compactor import WorkEndedError
from region.log.copies import Copies
from region.log.core import CommitPort, Done, LogCore, Pending, Ready
from region.log.counters import ShardCounters
from region.log.epochs import EpochHistory, next_epoch
from region.log.errors import OffsetOutOfRangeError, storage_error
from region.log.frame import SealedBatch
from region.log.left import Left
from region.log.maintenance import COMPACTION_SHARE
from region.log.message_ids import Identified, MessageIds, identified
from region.log.offloader import OffloadReport
from region.log.point import LogPoint
from region.log.recovery import RecoveryReport
from region.log.ring import Entry, Ring
from region.log.ring_pool import RingPool
from region.log.segment import ShardIdentity
from region.log.segment_state import SegmentState
from region.log.shard_files import Found, ShardFiles, found_of, recover
from region.log.shard_settings import ShardHooks, ShardSettings, ShardStore
from region.log.states import TRANSITIONS, Event, State
from region.log.tail import Tail

__all__ = [
    "TRANSITIONS",
    "AppendObserver",
    "Appended",
    "Done",
    "Event",
    "ShardHooks",
    "ShardLog",
    "ShardSettings",
    "ShardStore",
    "State",
    "WorkEndedError",
]

IDS_READ_BYTES: Final = 4 << 20
"""Read at a time where the window of message ids is read from the log."""
IDS_CLOCK_AHEAD_MS: Final = 86_400_000
"""So far ahead a clock may be that a log is opened by, as one that shows another time zone or was not set yet, and no id is missed. What was not written to for
as long is not read for ids."""


class AppendObserver(Protocol):
    """Who has to know every batch from its append on, whoever appended it: a view that decides by what is on its way."""

    def appending(self) -> None:
        """Something is about to be appended: what the observer wants to stand before it is to be appended now."""

    def appended(self, batch: Batch) -> None:
        """A plain batch has its offset; it is not durable yet."""

    def rolled_back(self, offset: int, error: FelixError) -> None:
        """Batches from `offset` on were refused after all, or cut; the next one may get the same offsets."""


def _nobody() -> None:
    """Nobody asked to be told."""


class ShardLog:
    """See the module. Construct with `open`; all methods are called on the loop that opened it."""

    def __init__(
        self,
        identity: ShardIdentity,
        settings: ShardSettings,
        hooks: ShardHooks,
        commit_pool: Executor,
        read_pool: Executor,
        store: ShardStore | None = None,
        commit: CommitPort | None = None,
        found: Found | None = None,
        copies: Copies | None = None,
    ) -> None:
        """`found`: what is on the disk; None for an ephemeral log. `copies`: who keeps the others; they say what is committed."""
        self.identity = identity
        self.observer: AppendObserver | None = None
        self.disk_bytes_changed: Callable[[], None] = _nobody
        """Called on the loop once `disk_bytes` may be another: after each group that was written, and after what lets go of segments."""
        self.room_changed: Callable[[], None] = _nobody
        """Called on the loop once `is_full` is another."""
        self.has_failed: Callable[[], None] = _nobody
        """Called on the loop once `failure` says why it does not serve any more."""
        self._hooks = hooks
        self._copies = copies
        self._read_pool = read_pool
        self._loop = asyncio.get_running_loop()
        self._tail = Tail(self._loop, self._report)
        self._start_scheduled = False
        self._drained = LazyEvent(is_set=True)
        self._answered_s = 0.0
        """when the disk wrote a group last, or was asked for the first one (loop time)"""
        self._sync_timer: asyncio.TimerHandle | None = None
        self._mark_timer: asyncio.TimerHandle | None = None
        self._epoch_due = False
        # With `acked` retention nothing goes before the subscriptions have said what they need.
        self._held_from: int | None = 0
        self._closed = self._was_failed = False
        if found is None:
            self.report = RecoveryReport()
            self._core = LogCore.beginning(
                identity, settings, LogPoint(settings.first_offset), self.plain_entry, commit=commit
            )
            self._epochs = EpochHistory()
            self._log_start = settings.first_offset
            self._ring = self._new_ring(settings.first_offset, None)
            self._files: ShardFiles | None = None
        else:
            disk, recovered = found.disk, found.recovered
            self.report = recovered.report
            self._core = LogCore.beginning(
                identity,
                settings,
                disk.end_point,
                self.plain_entry,
                producers=recovered.producers,
                commit=commit,
                notes_in_log=copies is not None,
            )
            self._core.annotations = dict(disk.annotations)
            self._core.epoch = recovered.epochs.current
            self._core.last_time_ms = max(0, disk.last_time_ms)
            self._epochs = recovered.epochs
            self._log_start = disk.start_offset
            self._ring = self._new_ring(disk.end_offset, hooks.rings)
            self._files = ShardFiles(
                self, found, hooks, commit_pool, read_pool, store or ShardStore(read_pool), copies
            )

    @classmethod
    async def open(
        cls,
        folder: Path | None,
        identity: ShardIdentity,
        settings: ShardSettings,
        hooks: ShardHooks,
        *,
        commit_pool: Executor,
        read_pool: Executor,
        opening_pool: Executor | None = None,
        store: ShardStore | None = None,
        files: Files | None = None,
        commit: CommitPort | None = None,
        full_verify: bool = False,
        synced: bool = False,
    ) -> ShardLog:
        """Recover the shard in `folder` (None for an ephemeral one) and serve it. `commit`: how far it is committed; None where
        there is no other copy. `opening_pool`: whose thread recovers it, else one of `commit_pool`.
        `synced`: it was closed in order (region.log.clean_stop).

        Raises CorruptionError where it must not serve, UnavailableError where the disk does not let it.
        """
        if settings.durability.kind == "ephemeral":
            shard = cls(identity, settings, hooks, commit_pool, read_pool, store, commit)
            shard._core.turn(Event.OPENED)
            return shard
        assert folder is not None
        find = partial(
            recover,
            folder,
            files or DiskFiles(),
            identity,
            settings,
            hooks,
            full_verify=full_verify,
            synced=synced,
        )
        try:
            found = await asyncio.get_running_loop().run_in_executor(opening_pool or commit_pool, find)
        except OSError as error:
            raise storage_error(error, folder) from error
        shard = cls(identity, settings, hooks, commit_pool, read_pool, store, commit, found)
        shard._core.turn(Event.OPENED)
        try:
            if shard._core.admission.ids is not None:
                await shard._read_ids(shard._core.admission.ids)
        except BaseException:
            await shard.close()
            raise
        return shard

    @classmethod
    async def lead(
        cls,
        identity: ShardIdentity,
        settings: ShardSettings,
        hooks: ShardHooks,
        copies: Copies,
        *,
        read_pool: Executor,
        store: ShardStore | None = None,
        files: Files | None = None,
    ) -> ShardLog:
        """Serve a log that has other copies, and of which this broker was elected the leader: all that it has is committed, and its epoch
        has begun. Raises what reading its message ids raises; then it is not led."""
        disk = copies.disk
        disk.limits, disk.commitment = settings.segments, hooks.commitment
        found = found_of(copies, files or DiskFiles())
        shard = cls(identity, settings, hooks, copies.pool, read_pool, store, copies, found, copies)
        copies.led(shard)
        shard._core.turn(Event.OPENED)
        try:
            assert copies.committed(disk.end_point) == disk.end_point
            if shard._core.admission.ids is not None:
                await shard._read_ids(shard._core.admission.ids)
        except BaseException:
            await shard.close()
            raise
        return shard

    async def _read_ids(self, window: MessageIds) -> None:
        """Read the window of message ids from the records: they are the truth. What is too old is found by the clock of each append; here a clock that
        is ahead, and right by then, would lose ids for good."""
        now_ms = max(self._core.last_time_ms, self._hooks.clock_ms() - IDS_CLOCK_AHEAD_MS)
        offset = await self.offset_for_time(now_ms - window.window_ms)

        def collect(batches: Sequence[SealedBatch]) -> list[Identified]:
            found: list[Identified] = []
            for batch in batches:
                if batch.header.flags & FLAG_HEADERS:
                    try:
                        plain = self._hooks.open_batch(Batch(batch.header, batch.data[HEADER_BYTES:]))
                    except FelixError as error:
                        # Destroyed on purpose: nobody reads these records again, nor their ids.
                        if error.code is not Code.KEY_DESTROYED:
                            raise
                        continue
                    found += identified(plain)
            return found

        assert self._files is not None
        while offset < self.high_watermark:
            batches = await self._files.reader.read(offset, IDS_READ_BYTES, self.high_watermark)
            found = await self._loop.run_in_executor(self._read_pool, collect, batches)
            window.record(found)
            window.settle(now_ms)
            offset = batches[-1].header.next_offset

    def _new_ring(self, next_offset: int, pool: RingPool | None) -> Ring:
        return Ring(
            next_offset,
            bytes_max=self.settings.ring_bytes_max,
            entries_max=self.settings.ring_entries_max,
            pool=pool,
        )

    # What the log holds.

    @property
    def settings(self) -> ShardSettings:
        """What the stream asks of it now; change it with `alter`."""
        return self._core.settings

    @property
    def state(self) -> State:
        """Whether it serves."""
        return self._core.state

    @property
    def failure(self) -> FelixError | None:
        """Why it does not serve and never will, until it is opened again."""
        return self._core.failure

    @property
    def counters(self) -> ShardCounters:
        """What it counts."""
        return self._core.counters

    @property
    def annotations(self) -> dict[int, bytes]:
        """The last annotation of every slot, as far as it is committed."""
        return self._core.annotations

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait for the disk."""
        return self._core.pending_bytes

    @property
    def log_start_offset(self) -> int:
        """The oldest offset that can be read."""
        return self._ring.first_offset if self._files is None else self._log_start

    @property
    def high_watermark(self) -> int:
        """The offset after the last record that readers may see: the committed end, unless visibility is held or a note stands
        below it."""
        return self._core.readable_to

    @property
    def committed_offset(self) -> int:
        """The offset after the last record that is durable on every copy that counts: what is below is answered, and stays."""
        return self._core.committed.offset

    @property
    def committed_point(self) -> LogPoint:
        """`committed_offset`, with what was written there without records."""
        return self._core.committed

    def left(self) -> Left:
        """Of a log that is closed: what has to be there when it is opened again."""
        assert self.state is State.STOPPED
        epoch = 0 if self._epoch_due else self._core.epoch
        return Left(self._core.committed, epoch, self._was_failed)

    @property
    def durable_offset(self) -> int:
        """The offset after the last record that is as durable here as the stream asks."""
        return self._core.durable.offset

    @property
    def synced_offset(self) -> int:
        """The offset after the last record that readers may see and that is on the disk, so that no power cut takes it back.

        Below the high watermark on a stream that syncs in intervals; 0 on an ephemeral one.
        """
        return 0 if self._files is None else min(self.high_watermark, self._files.disk.synced_offset)

    @property
    def log_end_offset(self) -> int:
        """The offset that the next batch will get."""
        return self._core.log_end.offset

    @property
    def epochs(self) -> EpochHistory:
        """The leader-epoch history; change it with `begin_epoch` only."""
        return self._epochs

    @property
    def message_ids(self) -> int:
        """Message ids remembered; 0 where the stream does not ask for it."""
        ids = self._core.admission.ids
        return 0 if ids is None else len(ids)

    @property
    def ring_bytes(self) -> int:
        """Bytes in the ring."""
        return self._ring.bytes_held

    @property
    def disk_bytes(self) -> int:
        """Bytes in segment files."""
        return self._files.disk.bytes_held if self._files else 0

    @property
    def segment_count(self) -> int:
        """Segment files."""
        return self._files.disk.segment_count if self._files else 0

    @property
    def compacted_to(self) -> int:
        """Below this offset each key stands at most once, and offsets may be left out."""
        return self._files.disk.compaction.clean_to if self._files else 0

    @property
    def tombstones_from(self) -> int:
        """Below this offset tombstones may be gone: who knows the log's state only up to an offset below it, and goes on
        from there, may miss that a key was deleted, and must read the whole state anew."""
        return self._files.disk.compaction.tombstones_from if self._files else 0

    @property
    def store_only_bytes(self) -> int:
        """Bytes of the segments that are in a store and not on this disk."""
        return self._files.disk.store_only_bytes if self._files else 0

    @property
    def remote_bytes(self) -> int:
        """Bytes of segments that are in a store."""
        return self._files.disk.remote_bytes if self._files else 0

    @property
    def offload_waiting_bytes(self) -> int:
        """Bytes of closed segments that are to be offloaded and are not yet."""
        if self._files is None or self.settings.offload is None:
            return 0
        return self._files.offload_waiting_bytes

    @property
    def dirty_bytes(self) -> int:
        """Bytes of closed segments that hold what was not compacted yet."""
        return self._files.dirty_bytes(self.high_watermark) if self._files else 0

    # Appending.

    def append_nowait(
        self,
        batch: Batch | None,
        done: Done,
        *,
        annotation: bytes = b"",
        slot: int = 0,
        expected_offset: int | None = None,
        as_it_is: bool = False,
        note: Note | None = None,
    ) -> None:
        """Append a plain batch, an annotation for `slot`, or both in one; `done` is called once, on the loop.

        Header fields that are the broker's (shard, base offset, append time, leader epoch) are set here.
        The annotation of a repeated batch is not kept: the first copy's is. With `expected_offset` a batch that is
        not a repeated one is appended only where the log ends there, pending batches counted. `as_it_is`: no record is left
        out for its message id. `note`, of `take_note`, is on the disk before the batch is.
        `done` may be called before this returns (refusals, ephemeral shards). What it is called with:
        Appended, or RequestError (SEQUENCE_GAP, PRODUCER_FENCED, OFFSET_MISMATCH, BATCH_TOO_LARGE, INVALID), UnavailableError
        (LIMIT_MEMORY, DISK_FULL, SHARD_STOPPED …).
        """
        if self.observer is not None:
            self.observer.appending()
        if self._epoch_due:
            self._begin_due_epoch()
        hooks = self._hooks
        event = core.Append(
            batch,
            done,
            hooks.clock_ms(),
            annotation,
            slot,
            expected_offset,
            as_it_is,
            note,
            self._refusal(),
        )
        ready = self._core.step(event, self._loop.time())
        if ready.write is None:
            self._carry_out(ready, event)
            return
        if self.observer is not None and ready.appended is not None:
            self.observer.appended(ready.appended)
        self._hand_over(ready.write)

    async def append(
        self,
        batch: Batch | None,
        *,
        annotation: bytes = b"",
        slot: int = 0,
        expected_offset: int | None = None,
    ) -> Appended:
        """`append_nowait`, awaited. Raises what that is answered with."""
        future: asyncio.Future[Appended] = self._loop.create_future()

        def done(result: Appended | FelixError) -> None:
            if future.done():
                return
            if isinstance(result, FelixError):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.append_nowait(batch, done, annotation=annotation, slot=slot, expected_offset=expected_offset)
        return await future

    def take_note(self, data: bytes) -> Note:
        """A note for the next append. From now on nobody reads what is appended, until `release_note`: call it once what the
        note is for is done, or the append was refused. A crash before leaves the note to `take_notes_found`."""
        return self._core.take_note(data)

    def release_note(self, note: Note) -> None:
        """What the note stands for is done: its batch can be read, up to the next note that is not released."""
        self._happened(core.NoteReleased(note))
        files = self._files
        assert files is not None
        files.ahead.released = self._core.first_unreleased
        if not self._core.has_notes:
            files.submit(files.ahead.tidy, optional=True)

    def take_notes_found(self) -> list[Note]:
        """What a crash left of notes, in their order: the batch of each may be in the log, or not. Once, before the first append."""
        return [] if self._files is None else self._files.take_notes_found()

    async def read_notes(self, offset: int, wanted: Callable[[bytes], bool]) -> list[bytes]:
        """The notes in the log before what was appended at `offset`, in order, of those that are `wanted`, asked in another thread; of a log that
        has copies. None of what retention let go of. Raises CorruptionError, RequestError(UNSUPPORTED) where the place was compacted."""
        assert self._files is not None
        try:
            return await self._files.reader.read_notes(offset, wanted)
        except OffsetOutOfRangeError:
            return []

    async def clear_notes(self) -> None:
        """What `take_notes_found` gave is done."""
        if self._files is not None:
            await self._files.writer.change(self._files.ahead.clear)

    def free_slot_nowait(self, slot: int, done: Done) -> None:
        """Let go of a slot's annotation; `done` is called as for an append. Nothing is written where the slot is free."""
        if self._epoch_due:
            self._begin_due_epoch()
        self._happened(core.FreeSlot(slot, done, self._refusal()))

    def _refusal(self) -> FelixError | None:
        """Why nothing may be appended now, though the log serves."""
        refused = self._hooks.refusal()
        return refused if refused is not None or self._copies is None else self._copies.refusal()

    def hold_visibility(self) -> None:
        """From now on appends become durable and are answered, and nobody reads them, until `release_visibility`.

        Holds are counted. What is held counts as pending, so a hold that lasts is felt as LIMIT_MEMORY.
        """
        self._happened(core.VisibilityHeld())

    def release_visibility(self) -> None:
        """With the last hold, what became durable meanwhile can be read at once; followers of the tail hear of it with the
        loop's next turn, so that several shards released in one turn show together."""
        self._happened(core.VisibilityReleased())

    def commit_moved(self) -> None:
        """The commit port has perhaps another answer: what it releases is answered and can be read."""
        self._happened(core.CommitMoved())

    def stop(self, error: FelixError) -> None:
        """Stop serving for good, because something that was promised of this shard cannot be kept: as a failed write does."""
        waiting = self._files.groups.drop() if self._files is not None else 0
        had_failed = self.failure is not None
        self._happened(core.Dropped(error, waiting))
        self._told_of_failure(error, had_failed)

    def _told_of_failure(self, error: FelixError, had_failed: bool) -> None:
        if self._copies is not None:
            self._copies.failed(error)
        self._tail.wake()
        if not had_failed and self.failure is not None:
            self.has_failed()

    # What the core decided.

    def _happened(self, event: core.Event) -> None:
        """Bring an event to the core and carry out what it means."""
        ready = self._core.step(event, self._loop.time())
        if ready is not core.NOTHING:
            self._carry_out(ready, event)

    def _carry_out(self, ready: Ready, event: core.Event) -> None:
        """In the order of `Ready`."""
        # What is still released of a log that is closed is read where it is opened next.
        observer, readable = self.observer, () if self._closed else ready.readable
        if observer is not None and ready.appended is not None:
            observer.appended(ready.appended)
        if ready.write is not None:
            self._hand_over(ready.write)
        for entry in readable:
            self._ring.append(entry)
        if observer is not None and ready.rolled_back is not None:
            observer.rolled_back(*ready.rolled_back)
        for done, result in ready.answers:
            try:
                done(result)
            except Exception as error:
                # One caller's mistake must not keep the others of its group waiting.
                self._report("The receiver of an append's answer failed", error)
        if ready.sync_in_s is not None:
            self._sync_timer = self._loop.call_later(ready.sync_in_s, self._happened, core.SyncDue())
        if ready.mark_in_s is not None:
            self._mark_timer = self._loop.call_later(ready.mark_in_s, self._happened, core.MarkDue())
        if ready.sync:
            assert self._files is not None
            self._files.sync_soon()
        if ready.sync_mark and self._files is not None:
            self._files.submit(self._files.disk.sync_mark)
        if readable:
            if type(event) is core.Written:
                self._tail.wake()
            else:
                self._tail.wake_soon()
        if not self._core.writing:
            self._drained.set()

    def _hand_over(self, item: Pending) -> None:
        assert self._files is not None
        if self._drained.is_set():
            self._answered_s = self._loop.time()
        self._drained.clear()
        self._files.groups.put(item)
        if not self._start_scheduled:
            self._start_scheduled = True
            # At the end of this event loop iteration: what is appended together is committed together.
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        self._start_scheduled = False
        assert self._files is not None
        self._files.groups.start()

    def plain_entry(self, batch: Batch) -> Entry:
        """A batch as readers get it. In any thread."""
        header = batch.header
        data = b"".join((self._hooks.frame_prefix(header), header.encode(), batch.body))
        return Entry(header.base_offset, header.next_offset, header.append_time_ms, data)

    def group_ended(self, event: core.Written | core.WriteRefused) -> None:
        """What became of a group of appends (region.log.shard_files)."""
        files = self._files
        assert files is not None
        self._answered_s = self._loop.time()
        if isinstance(event, core.WriteRefused):
            files.groups.resume()
        was_full, had_failed = self.is_full, self.failure is not None
        self._happened(event)
        if self.is_full is not was_full:
            self.room_changed()
        if isinstance(event, core.Written):
            self._epochs = files.disk.epochs
            self.disk_bytes_changed()
            files.save_producers_of_a_rolled_segment()
        elif event.failed:
            self._told_of_failure(event.error, had_failed)
        elif event.no_room and not was_full and self._copies is not None:
            self._copies.full(event.error)

    def sync_ended(self, elapsed_ns: int) -> None:
        """A sync that was asked for between groups is done (region.log.shard_files)."""
        self.counters.syncs += 1
        self.counters.sync_ns += elapsed_ns
        # Who may read only what is synced has something to read now.
        self._tail.wake()

    def _report(self, what: str, error: Exception) -> None:
        self._loop.call_exception_handler({"message": f"{what} ({self.identity.stream})", "exception": error})

    # Reading.

    def subscribe_tail(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` on the loop, once per group, when the high watermark moved or the shard failed.

        Returns what ends it.
        """
        return self._tail.follow(callback)

    def _check_readable(self, offset: int) -> None:
        if self.state not in (State.SERVING, State.FULL):
            raise self._core.not_serving().with_traceback(None)
        if not self.log_start_offset <= offset <= self.high_watermark:
            raise OffsetOutOfRangeError(offset, self.log_start_offset, self.high_watermark)

    def read_hot(self, offset: int, max_bytes: int) -> list[Entry] | None:
        """Entries from the one that holds `offset` on, from memory: at least one, then up to `max_bytes`.

        An empty list at the high watermark; None where only the disk has them (`read`). Raises
        OffsetOutOfRangeError outside the log, which names the first offset there is; UnavailableError.
        """
        self._check_readable(offset)
        found = self._ring.read(offset, max_bytes)
        if found is not None:
            self.counters.hot_reads += 1
        return found

    async def read(self, offset: int, max_bytes: int) -> list[Entry]:
        """As `read_hot`, from memory or disk. Also raises what opening a sealed batch raises, and CorruptionError."""
        hot = self.read_hot(offset, max_bytes)
        if hot is not None:
            return hot
        assert self._files is not None
        batches = await self._files.reader.read(offset, max_bytes, self.high_watermark)
        return await self._loop.run_in_executor(self._read_pool, self._open_entries, batches)

    def _open_entries(self, batches: Sequence[SealedBatch]) -> list[Entry]:
        return [
            self.plain_entry(self._hooks.open_batch(Batch(batch.header, batch.data[HEADER_BYTES:])))
            for batch in batches
        ]

    async def read_sealed(self, offset: int, max_bytes: int) -> list[Entry]:
        """Batches as they stand on disk, below the synced offset: for bridges and followers. Raises as `read` does.

        What is not synced may be gone after a power cut, and its offsets given to other records: it stays here until then.

        Raises RequestError(UNSUPPORTED) on an ephemeral shard, which has nothing sealed.
        """
        if self._files is None:
            raise RequestError("An ephemeral shard keeps nothing sealed.", code=Code.UNSUPPORTED)
        self._check_readable(offset)
        synced = self.synced_offset
        if offset >= synced:
            return []
        batches = await self._files.reader.read(offset, max_bytes, synced)
        return [
            Entry(batch.header.base_offset, batch.header.next_offset, batch.header.append_time_ms, batch.data)
            for batch in batches
        ]

    async def offset_for_time(self, time_ms: int) -> int:
        """Base offset of the first readable batch appended at or after `time_ms`, else the high watermark."""
        self._check_readable(self.high_watermark)
        if self._files is None:
            return self._ring.offset_for_time(time_ms)
        return await self._files.reader.offset_for_time(time_ms, self.high_watermark)

    # Changing what is there.

    def begin_epoch_later(self) -> None:
        """The first append from now on begins an epoch of its own, which is durable before it is: a shard that nobody writes to needs no
        sync for it. `epochs` has it once that append is there, or `begin_due_epoch` was awaited."""
        self._epoch_due = True

    def _next_epoch(self) -> int:
        return next_epoch(self._epochs.current, self._hooks.clock_ms(), self._hooks.runtime.random)

    def _begin_due_epoch(self) -> None:
        self._epoch_due = False
        self._happened(core.EpochBegan(self._next_epoch()))

    def newest_epochs(self, count: int) -> list[tuple[int, int]]:
        """So many of its epochs, each with its first offset, oldest first. The last one is that of what is appended from now on; nothing is written for it."""
        if self._epoch_due:
            self._begin_due_epoch()
        found = [(start.epoch, start.start_offset) for start in self._epochs.starts]
        if self._core.epoch > self._epochs.current:
            found.append((self._core.epoch, self.log_end_offset))
        return found[-count:]

    async def begin_due_epoch(self) -> None:
        """Have it in `epochs`, where `begin_epoch_later` put it off: for whoever tells others of the epochs that are to come. Raises as
        `begin_epoch`."""
        if self._epoch_due:
            await self.begin_epoch(self._next_epoch())
        elif self._core.epoch > self._epochs.current:
            await self.begin_epoch(self._core.epoch)

    async def begin_epoch(self, epoch: int) -> None:
        """Become leader under `epoch`: durable before this returns; batches appended from now on carry it.

        Appends are refused meanwhile. Raises RequestError(CONFLICT) where a newer epoch has begun.
        """
        async with _Held(self, "its leader epoch changes"):
            history = EpochHistory(list(self._epochs.starts))
            if not history.begin(epoch, self.log_end_offset):
                return
            if self._files:
                await self._files.writer.change(self._files.disk.save_epochs, history)
            self._epochs = history
            self._epoch_due = False
            self._happened(core.EpochBegan(history.current))

    async def truncate(self, cut: LogPoint) -> None:
        """Cut every entry that reaches past `cut`; for a follower whose log parts from its leader's.

        Appends are refused meanwhile. Raises OffsetOutOfRangeError outside the log, RequestError(CONFLICT) below what was committed
        and others count on.
        """
        async with _Held(self, "its log is being truncated"):
            if cut == self._core.log_end:
                return
            if not self.log_start_offset <= cut.offset or cut > self._core.log_end:
                raise OffsetOutOfRangeError(cut.offset, self.log_start_offset, self.log_end_offset)
            if refused := self._core.cut_refusal(cut):
                raise refused
            files = self._files
            if files is not None:
                # Before anybody reads less because of it.
                files.disk.check_cut(cut)
            self._happened(core.Cutting(cut))
            if files is None:
                self._ring.truncate(cut.offset)
                self._happened(core.Truncated(LogPoint(self._ring.next_offset)))
                return
            self._ring.truncate(min(cut.offset, self._ring.next_offset))
            producers = await files.truncate(cut)
            self._happened(core.Truncated(files.disk.end_point, producers, dict(files.disk.annotations)))
            self.segments_changed()
            self._ring.truncate(min(self.high_watermark, self._ring.next_offset))
            self._epochs = files.disk.epochs
            self._happened(core.EpochBegan(self._epochs.current))

    def hold_from(self, offset: int | None) -> None:
        """Under `acked` retention keep everything from `offset` on: the lowest committed offset of the shard's durable
        subscriptions; None where it has none, so that time and size alone decide. Until it is called once, all is kept."""
        self._held_from = offset

    def alter(self, settings: ShardSettings) -> None:
        """Take over `settings` from now on, but for what the shard was opened with (`ShardSettings.altered`). A window of message
        ids that begins here does not know what was appended before."""
        self._core.alter(settings)
        if self._files is not None:
            self._files.disk.limits = settings.segments

    async def sweep(self, now_ms: int) -> int:
        """Apply retention; the segments deleted (for an ephemeral shard, 0: its batches go one by one)."""
        if self.state not in (State.SERVING, State.FULL):
            return 0
        self._core.admission.producers.expire(now_ms)
        retention = self.settings.retention
        files = self._files
        if files is None:
            if retention.age_ms:
                self._ring.evict_before(
                    now_ms - retention.age_ms, self._held_from if retention.acked else None
                )
            return 0
        disk, below, hold = files.disk, self.high_watermark, self._held_from
        if not disk.retention_due(retention, now_ms, below=below, hold=hold):
            return 0
        try:
            return await self._let_go(
                files, lambda: disk.delete_old(retention, now_ms, below=below, hold=hold)
            )
        except UnavailableError as error:
            if error.code is Code.DISK_FULL:
                # The roll before deletion found no room; the next sweep tries again.
                return 0
            raise

    async def trim(self, offset: int) -> int:
        """Let go of what is below `offset`, in whole segments: for a log whose owner no longer needs it (a journal below
        its snapshot). The segments deleted; for an ephemeral shard 0.

        Raises OffsetOutOfRangeError above the high watermark; UnavailableError as a sweep does, DISK_FULL included.
        """
        if offset > self.high_watermark:
            raise OffsetOutOfRangeError(offset, self.log_start_offset, self.high_watermark)
        files = self._files
        if files is None:
            return 0
        now_ms = self._hooks.clock_ms()
        return await self._let_go(files, lambda: files.disk.trim(offset, now_ms))

    async def _let_go(self, files: ShardFiles, delete: Callable[[], int]) -> int:
        """Delete old segments; how many. What they alone tell of producers is kept before."""
        snapshot = self.producers_snapshot() if len(self._core.admission.producers) else b""
        count = await files.let_go(delete, snapshot, self.high_watermark)
        self._log_start = files.disk.start_offset
        self.counters.segments_deleted += count
        self.segments_changed()
        if count and self._copies is not None:
            self._copies.trimmed(files.disk.start_point)
        return count

    # Maintenance: see region.log.maintenance.

    def compaction_due(self, now_ms: int) -> bool:
        """Whether `compact` would be worth its work; never where the stream is not compacted."""
        return self._files is not None and self._files.maintenance.compaction_due(now_ms)

    async def compact(
        self,
        now_ms: int,
        pool: Executor,
        *,
        share: float = COMPACTION_SHARE,
        keys_bytes_max: int = KEYS_BYTES_MAX,
    ) -> CompactionReport | None:
        """One pass over the closed segments, in a thread of `pool`; None where there is nothing to compact.

        Reads and appends go on. `share` of the thread's time is worked, the rest slept. Raises UnavailableError: DISK_FULL,
        with all as it was; SHUTTING_DOWN where the shard closes meanwhile. CorruptionError, which stops the shard, and what
        opening or sealing a batch raises.
        """
        if self._files is None:
            return None
        return await self._files.maintenance.compact(now_ms, pool, share, keys_bytes_max)

    def offload_due(self, now_ms: int) -> bool:
        """Whether `offload` would do anything."""
        return self._files is not None and self._files.maintenance.offload_due(now_ms)

    async def offload(self, now_ms: int, base: str) -> OffloadReport:
        """Copy closed segments to the store, to below the URL `base`, let local files go that are beyond what is kept here,
        and delete in the store what retention let go; with an empty `base` only the last. Appends and reads go on.

        Raises UnavailableError: the store does not do what it is asked, and is tried again after a while, longer each
        time; SHUTTING_DOWN where the shard closes. CorruptionError, which stops the shard.
        """
        if self._files is None:
            return OffloadReport()
        return await self._files.maintenance.offload(now_ms, base)

    async def fetch(self, segment: SegmentState) -> None:
        """Bring a segment back that is in a store only, to be read by another copy. Raises UnavailableError; CorruptionError of the store's copy,
        which stops nothing."""
        assert self._files is not None
        await self._files.reader.fetch(segment)

    def offload_later(self, now_ms: int) -> None:
        """A turn came to nothing: the next one is due after a while, longer each time."""
        if self._files is not None:
            self._files.maintenance.offload_later(now_ms)

    def changes_refused(self) -> FelixError | None:
        """Why closed segments may not be rewritten or moved now; None where they may."""
        if self.state not in (State.SERVING, State.FULL):
            return self._core.hold or self._core.not_serving()
        return self.held_back()

    def held_back(self) -> FelixError | None:
        """Why a log that serves takes no appends for now: it is being changed, or its broker may not write. None where it does."""
        return self._core.hold or self._refusal()

    @property
    def is_full(self) -> bool:
        """Whether the last append found no room on the disk."""
        return self.state is State.FULL

    @property
    def unanswered_s(self) -> float:
        """For how long what is to be written has waited for the disk; 0 where nothing does."""
        return self._loop.time() - self._answered_s if self._core.writing else 0.0

    def no_room(self) -> FelixError | None:
        """Why every append is refused at once: the disk was full a moment ago. None where one may find out whether it still is."""
        return self._core.no_room(self._loop.time())

    def producers_snapshot(self) -> bytes:
        """The producers and their sequences up to the high watermark, as they stand in a shard's folder."""
        return self._core.admission.producers.encode(self.high_watermark)

    def segments_changed(self) -> None:
        """Their number is another than before, and not because one was rolled."""
        assert self._files is not None
        self._files.segments_changed()
        self.disk_bytes_changed()

    @property
    def has_copies(self) -> bool:
        """Whether other brokers have copies of it, so that its disk is not this log's to close."""
        return self._copies is not None

    async def close(self) -> None:
        """Answer what is pending, sync, and close. A failed shard's files are only closed. Repeating it does nothing."""
        if self.state is State.STOPPED:
            return
        self._happened(core.Hold(UnavailableError("The shard is closing.", code=Code.SHUTTING_DOWN)))
        files = self._files
        if files is not None:
            files.end()
        await self._drained.wait()
        if files is not None:
            await files.ended()
        if self._closed:
            return
        self._closed = True
        self._ring.clear()
        for timer in (self._sync_timer, self._mark_timer):
            if timer:
                timer.cancel()
        failed = self._was_failed = self.state is State.FAILED
        self._happened(core.Closed())
        if self._copies is not None:
            self._copies.released()
            return
        if files is None:
            return
        if failed:
            await files.abandon()
            return
        try:
            # An empty log tells all there is to know of its producers.
            await files.close(self.producers_snapshot() if self.log_end_offset else b"")
        except BaseException:
            self._was_failed = True
            raise


class _Held:
    """No append while the folder changes under it; begins once everything pending is answered."""

    def __init__(self, shard: ShardLog, why: str) -> None:
        self._shard = shard
        self._refusal = UnavailableError(
            f"The shard takes no appends while {why}.", code=Code.UNAVAILABLE, retry_after_ms=50
        )

    async def __aenter__(self) -> None:
        shard = self._shard
        if shard._core.hold:
            raise shard._core.hold.with_traceback(None)
        shard._happened(core.Hold(self._refusal))
        try:
            await shard._drained.wait()
            if shard.state not in (State.SERVING, State.FULL):
                raise shard._core.not_serving().with_traceback(None)
        except BaseException:
            await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._shard._happened(core.Release(self._refusal))
