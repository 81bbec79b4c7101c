"""What is done to the closed segments of a shard while it serves: compaction and offload, beside appends and reads.

Only region.log.shard calls this, on the loop; the work itself is in threads of the pools it is given.

Invariants:
- one piece of work at a time, and none while the shard refuses changes;
- the folder is the work's until its thread is done, also where the one who awaits it is cancelled: `ended` waits for it;
- what fails for want of room or of a store leaves all as it was and is due again after a while; damage stops the shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from felix.errors import CorruptionError, FelixError, UnavailableError
from felix.lazy_event import LazyThreadEvent
from felix.runtime.port import Clock
from felix.storage.port import Files
from region.log.compaction import CompactionReport, is_due
from region.log.compactor import Compactor, PassSettings, WorkEndedError
from region.log.copies import Copies
from region.log.counters import ShardCounters
from region.log.disk import DiskLog
from region.log.epochs import EpochHistory
from region.log.errors import SegmentDamagedError, StorageFailedError, storage_error
from region.log.offload import ListPointer, Offloaded, OffloadList, OffloadState, object_url
from region.log.offloader import Offloader, OffloadReport, Throttle, delete_object, drop_local
from region.log.shard_settings import ShardHooks, ShardSettings, ShardStore
from region.log.shared_offload import (
    UPLOADS_PER_LIST,
    ForgedListError,
    ReplacedListError,
    delete_orphans,
    delete_unlisted,
    gone_below,
    upload_segments,
    waiting,
)
from region.log.states import State
from region.log.store_calls import ended_by

log = logging.getLogger(__name__)

COMPACTION_SHARE: Final = 0.5
"""Of a thread's time that compaction takes at most: it sleeps as long as it worked, and appends come first."""
COMPACTION_TURN_NS: Final = 5_000_000
"""It works so long at a time: what else waits for the interpreter waits no longer."""
OFFLOAD_AGAIN_MS: Final = 1_000
OFFLOAD_AGAIN_MS_MAX: Final = 60_000
"""A store that does not answer is asked again after a second, then after twice as long each time up to this."""
ORPHANS_AGAIN_MS: Final = 86_400_000
"""How often a leader looks for objects that no list names: what leaders before it left behind costs a listing to find, and money by the day."""
COMPACTION_AGAIN_MS: Final = 60_000
"""After a pass that failed (no room, a key that is gone) the next one waits."""

_T = TypeVar("_T")


class _ListChange(NamedTuple):
    """A change of the list in force, from before the pointer is moved until it is known to be: that may be later than its answer was awaited."""

    before: OffloadList
    old: ListPointer | None
    new: OffloadList
    pointer: ListPointer


class Shard(Protocol):
    """What maintenance asks of a shard. Nothing above the high watermark is compacted or offloaded: it may still be cut."""

    @property
    def settings(self) -> ShardSettings: ...

    @property
    def counters(self) -> ShardCounters: ...

    @property
    def state(self) -> State: ...

    @property
    def high_watermark(self) -> int: ...

    @property
    def epochs(self) -> EpochHistory: ...

    def changes_refused(self) -> FelixError | None: ...

    def producers_snapshot(self) -> bytes: ...

    def segments_changed(self) -> None: ...

    @property
    def disk_bytes_changed(self) -> Callable[[], None]: ...

    async def trim(self, offset: int) -> int: ...

    def stop(self, error: FelixError) -> None: ...


class Maintenance:
    """See the module."""

    def __init__(
        self,
        shard: Shard,
        disk: DiskLog,
        files: Files,
        hooks: ShardHooks,
        store: ShardStore,
        *,
        folder: Path,
        writer: Lock,
        ending: LazyThreadEvent,
        copies: Copies | None = None,
    ) -> None:
        """`copies`: of a log that has some; what is in a store is theirs together (region.log.shared_offload)."""
        self._shard = shard
        self._disk = disk
        self._files = files
        self._hooks = hooks
        self._store = store
        self._folder = folder
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._one = asyncio.Lock()
        # What a compaction waits for between two turns, and what ends all that moves to and from a store.
        self._compaction_end: LazyThreadEvent | None = None
        self._ending = ending
        self._compaction_again_ms = 0
        self._offload_again_ms = 0
        self._offload_failures = 0
        self._copies = copies
        # Of a log with copies: the list in force as this leader knows it, and the pointer to it.
        self._listed: OffloadList | None = None
        self._pointer: ListPointer | None = None
        self._change: _ListChange | None = None
        # What the record points to, where no broker of the region wrote that, or another list took its place.
        self._not_in_force: ListPointer | None = None
        # Where the log ended when it began to be led: nothing above is this leader's inheritance.
        self._led_from = disk.end_offset
        self._orphans_due_ms = 0

    def end(self) -> None:
        """The shard closes: a compaction ends at its next turn."""
        if self._compaction_end is not None:
            self._compaction_end.set()

    async def ended(self) -> None:
        """Nothing has the folder any more."""
        async with self._one:
            pass

    def compaction_due(self, now_ms: int) -> bool:
        """See ShardLog."""
        shard, disk, settings = self._shard, self._disk, self._shard.settings.compaction
        return (
            settings is not None
            and not disk.offload.segments
            and shard.state is State.SERVING
            and now_ms >= self._compaction_again_ms
            and not self._one.locked()
            and is_due(
                disk.dirty_spans(shard.high_watermark),
                disk.compaction.clean_to,
                now_ms=now_ms,
                lag_ms=settings.lag_ms,
            )
        )

    async def compact(
        self, now_ms: int, pool: Executor, share: float, keys_bytes_max: int
    ) -> CompactionReport | None:
        """See ShardLog."""
        shard, disk = self._shard, self._disk
        async with self._one:
            # Asked once nothing else has the closed segments: an upload that was under way may have moved some to a store.
            settings = shard.settings.compaction
            if settings is None or disk.offload.segments:
                return None
            if refused := shard.changes_refused():
                raise refused.with_traceback(None)
            end = self._compaction_end = LazyThreadEvent()
            compactor = Compactor(
                disk,
                self._files,
                PassSettings(
                    now_ms, settings.lag_ms, settings.tombstone_ms, shard.high_watermark, keys_bytes_max
                ),
                seal=self._hooks.seal,
                open_batch=self._hooks.open_batch,
                writer=self._writer,
                pace=CompactionPace(share, end, self._hooks.runtime.clock),
            )
            snapshot, epochs = shard.producers_snapshot(), shard.epochs.starts
            try:
                report = await self._perform(
                    pool,
                    lambda: compactor.run(snapshot, epochs),
                    end,
                    lambda: self._compaction_failed(now_ms),
                )
            finally:
                shard.segments_changed()
        if report:
            self._count_compaction(report)
        return report

    def offload_due(self, now_ms: int) -> bool:
        """See ShardLog."""
        shard, disk, wanted = self._shard, self._disk, self._shard.settings.offload
        if (
            shard.state not in (State.SERVING, State.FULL)
            or now_ms < self._offload_again_ms
            or self._one.locked()
        ):
            return False
        if disk.offload.pending_deletion or (wanted is None and disk.offload.begun and self._copies is None):
            return True
        if self._copies is not None:
            return self._list_due(self._in_record(self._copies), now_ms) or (
                wanted is not None
                and (
                    bool(waiting(disk, shard.high_watermark))
                    or disk.droppable(wanted.local_bytes) is not None
                )
            )
        return wanted is not None and (
            any(
                one.remote is None and one.header.span is None and one.next_offset <= shard.high_watermark
                for one in disk.segments[:-1]
            )
            or disk.droppable(wanted.local_bytes) is not None
        )

    def _list_due(self, pointer: ListPointer | None, now_ms: int) -> bool:
        """Whether the list of a log with copies is to be gone on from, or has what is to be deleted."""
        listed = self._listed
        if listed is None or pointer != self._pointer:
            return pointer is not None or bool(self._disk.offload.segments)
        first = listed.segments[0] if listed.segments else None
        return (first is not None and first.next_offset <= self._disk.start_offset) or (
            pointer is not None
            and self._change is None
            and self._shard.settings.offload is not None
            and now_ms >= self._orphans_due_ms
        )

    def _in_record(self, copies: Copies) -> ListPointer | None:
        """The list in force. One that no broker wrote, or that was replaced, is none: this leader goes by what its own copy knows, and puts that in its place."""
        pointer = copies.offloaded
        return None if pointer == self._not_in_force else pointer

    async def offload(self, now_ms: int, base: str) -> OffloadReport:
        """See ShardLog."""
        shard = self._shard
        async with self._one:
            if refused := shard.changes_refused():
                raise refused.with_traceback(None)
            wanted = shard.settings.offload
            if self._copies is not None:
                try:
                    report = await self._offload_for_all(now_ms, base, self._copies)
                finally:
                    shard.disk_bytes_changed()
                self._count_offload(report)
                return self._offload_worked(report, base)
            offloader = Offloader(
                self._disk,
                self._files,
                base,
                wanted.local_bytes if wanted else 0,
                writer=self._writer,
                pace=Throttle(self._store.rate_bytes, self._ending, self._store.clock),
                tag=self._hooks.tag,
            )
            below, epochs = shard.high_watermark, shard.epochs.starts

            def work() -> OffloadReport:
                if wanted is None:
                    offloader.give_up()
                return offloader.run(below, epochs, upload=bool(wanted and base))

            try:
                report = await self._perform(
                    self._store.pool,
                    work,
                    self._ending,
                    lambda: self._offload_broke_off(now_ms, offloader.report.uploaded),
                )
            finally:
                shard.disk_bytes_changed()
                self._count_offload(offloader.report)
        return self._offload_worked(report, base)

    def _count_offload(self, report: OffloadReport) -> None:
        self._shard.counters.offloaded_segments += report.uploaded
        self._shard.counters.offloaded_bytes += report.uploaded_bytes

    def _offload_worked(self, report: OffloadReport, base: str) -> OffloadReport:
        if base:
            self._offload_failures = 0
        return report

    async def _offload_for_all(self, now_ms: int, base: str, copies: Copies) -> OffloadReport:
        """One turn of the leader of a log with copies: see region.log.shared_offload, whose steps these are."""
        shard, disk, wanted = self._shard, self._disk, self._shard.settings.offload
        epoch = shard.epochs.current

        async def work(what: Callable[[], _T]) -> _T:
            return await self._perform_for_all(what, now_ms)

        pointer, deleted = self._in_record(copies), 0
        if (in_doubt := self._change) is not None and pointer in (in_doubt.old, in_doubt.pointer):
            # The record may lag behind: what it was asked for is settled before anything that it names may be written again.
            if pointer == in_doubt.old:
                await self._move_pointer(in_doubt, copies, now_ms)
            pointer, deleted = in_doubt.pointer, await self._in_force(in_doubt, now_ms)
        if self._listed is None or pointer != self._pointer:  # 1
            self._listed = None
            try:
                known, doomed = await work(lambda: copies.lists.read(pointer)), disk.offload
            except (ForgedListError, ReplacedListError) as error:
                log.error("%s %s", error.sentence, error.hint)
                self._not_in_force, pointer = pointer, None
                known, doomed = OffloadList(), disk.offload
            # What retention let go of under another leader. The list's word alone ends no record here.
            if known.start > disk.start_offset:
                await shard.trim(await work(lambda: gone_below(known.start, disk.offload.segments)))
            end = disk.end_offset if pointer is not None and pointer.epoch == epoch else self._led_from
            start = min(known.start, disk.start_offset)
            taken = msgspec.structs.replace(known, start=start).taken_over(disk.offload.segments, end)
            if doomed.pending_deletion or doomed.begun:
                # Of the time before the log had copies.
                await work(lambda: self._forget_begun(doomed))
            await work(lambda: self._mark(taken.segments, shard.high_watermark))
            if (taken, epoch) == (known, pointer.epoch if pointer else epoch):
                self._listed, self._pointer = taken, pointer
            else:
                await self._publish(known, pointer, taken, base, epoch, copies, now_ms)
        listed = self._listed
        assert listed is not None
        less = listed.less(disk.start_offset) if listed.segments else listed
        entries: list[Offloaded] = []
        refused: UnavailableError | None = None
        if wanted and base:  # 2
            below, throttle = shard.high_watermark, self._throttle()
            in_list = {(one.base_offset, one.next_offset) for one in listed.segments}
            if any((one.base_offset, one.next_offset) in in_list for one in waiting(disk, below)):
                # The turn that listed them ended before step 4. An object in force is not written over: if that broke off, no whole one would be left.
                await work(lambda: self._mark(listed.segments, below))
            segments = waiting(disk, below)[:UPLOADS_PER_LIST]
            epochs = shard.epochs.starts
            if segments:
                await work(lambda: self._note_place(base))
            entries, refused = await work(
                lambda: upload_segments(self._files, segments, base, epoch, epochs, throttle, self._hooks.tag)
            )
        new = less.more(entries)
        if new.segments != listed.segments:  # 3
            deleted += await self._publish(listed, self._pointer, new, base, epoch, copies, now_ms)
        dropped = 0
        if wanted and base:  # 4
            local_bytes, below = wanted.local_bytes, shard.high_watermark
            dropped = await work(lambda: self._mark_and_drop(entries, below, local_bytes))
        if refused is not None:
            # What it did take is in force, and is not uploaded again.
            self._count_offload(_uploaded(entries))
            self._offload_broke_off(now_ms, len(entries))
            raise refused
        in_force, led = self._pointer, self._listed
        if (
            in_force is not None
            and led is not None
            and base
            and self._change is None
            and now_ms >= self._orphans_due_ms
        ):  # 5
            places = dict.fromkeys((base.rstrip("/"), *disk.offload.all_places))
            # Where a store stays away, that is no reason to upload more slowly to another one.
            self._orphans_due_ms = now_ms + OFFLOAD_AGAIN_MS_MAX
            await work(lambda: delete_orphans(led, in_force, places))
            self._orphans_due_ms = now_ms + ORPHANS_AGAIN_MS
        return replace(_uploaded(entries), dropped=dropped, deleted=deleted)

    async def _publish(
        self,
        before: OffloadList,
        old: ListPointer | None,
        new: OffloadList,
        base: str,
        epoch: int,
        copies: Copies,
        now_ms: int,
    ) -> int:
        """Steps 3 and 5, where `old` points to `before`: how many segments were deleted in the store."""
        known = old.url if old else before.segments[0].url if before.segments else new.segments[0].url
        place = base or known.rpartition("/")[0]
        self._listed = None
        pointer = await self._perform_for_all(lambda: copies.lists.write(new, place, epoch), now_ms)
        change = self._change = _ListChange(before, old, new, pointer)
        await self._move_pointer(change, copies, now_ms)
        return await self._in_force(change, now_ms)

    async def _move_pointer(self, change: _ListChange, copies: Copies, now_ms: int) -> None:
        try:
            await copies.point_to(change.pointer)
        except FelixError:
            # The pointer may have been moved all the same, now or later. The next turn asks for the same again, which only one of the two can do.
            self._orphans_due_ms = now_ms
            self.offload_later(now_ms)
            raise

    async def _in_force(self, change: _ListChange, now_ms: int) -> int:
        """Step 5, once the pointer was moved: how many segments were deleted in the store. One that deletes nothing holds up no upload."""
        self._listed, self._pointer, self._change = change.new, change.pointer, None
        try:
            return await self._perform_for_all(
                lambda: delete_unlisted(change.before, change.old, change.new), now_ms
            )
        except FelixError:
            self._orphans_due_ms = now_ms
            raise

    async def _perform_for_all(self, work: Callable[[], _T], now_ms: int) -> _T:
        return await self._perform(
            self._store.pool, work, self._ending, lambda: self.offload_later(now_ms), is_shared=True
        )

    def _throttle(self) -> Throttle:
        return Throttle(self._store.rate_bytes, self._ending, self._store.clock)

    def _forget_begun(self, doomed: OffloadState) -> None:
        """In a thread: objects that the only copy was to delete."""
        listed = {one.url for one in doomed.segments}
        for url in filter(None, (doomed.begun, *doomed.pending_deletion)):
            if url not in listed:
                delete_object(url)
        with self._writer:
            state = self._disk.offload
            left = tuple(url for url in state.pending_deletion if url not in doomed.pending_deletion)
            self._disk.save_offload(msgspec.structs.replace(state, begun="", pending_deletion=left))

    def _note_place(self, base: str) -> None:
        with self._writer:
            self._disk.note_place(object_url(base, ""))

    def _mark(self, entries: Iterable[Offloaded], below: int) -> None:
        with self._writer:
            self._disk.follow_offloaded(entries, below)

    def _mark_and_drop(self, entries: Iterable[Offloaded], below: int, local_bytes: int) -> int:
        self._mark(entries, below)
        return drop_local(self._disk, self._writer, local_bytes)

    async def _perform(
        self,
        pool: Executor,
        work: Callable[[], _T],
        end: LazyThreadEvent,
        failed: Callable[[], None],
        *,
        is_shared: bool = False,
    ) -> _T:
        """Do `work` in a thread of `pool`; `end` ends it early. `failed` is told where it is worth another attempt. `is_shared`: damage that it
        finds stops nothing: it is the store's, or is repaired from another copy."""

        def within() -> _T:
            with ended_by(end):
                return work()

        try:
            under_way = self._loop.run_in_executor(pool, within)
            try:
                return await asyncio.shield(under_way)
            except asyncio.CancelledError:
                # The thread still has the folder: nobody may close it before it is done.
                end.set()
                await asyncio.wait([under_way])
                # That it ended early is nothing to tell.
                _ = under_way.cancelled() or under_way.exception()
                raise
        except WorkEndedError:
            raise
        except CorruptionError as error:
            if is_shared:
                failed()
                if isinstance(error, SegmentDamagedError) and self._copies is not None:
                    await self._copies.repair(error)
            else:
                self._shard.stop(error)
            raise
        except StorageFailedError as error:
            self._shard.stop(error)
            raise
        except OSError as error:
            failed()
            raise storage_error(error, self._folder) from error
        except FelixError:
            failed()
            raise

    def offload_later(self, now_ms: int) -> None:
        """See ShardLog."""
        self._offload_failures += 1
        self._shard.counters.offload_failed += 1
        wait_ms = min(OFFLOAD_AGAIN_MS << min(self._offload_failures - 1, 10), OFFLOAD_AGAIN_MS_MAX)
        self._offload_again_ms = now_ms + wait_ms

    def _offload_broke_off(self, now_ms: int, uploaded: int) -> None:
        """A store that takes something each time is soon asked again."""
        if uploaded:
            self._offload_failures = 0
        self.offload_later(now_ms)

    def _compaction_failed(self, now_ms: int) -> None:
        self._compaction_again_ms = now_ms + COMPACTION_AGAIN_MS
        self._shard.counters.compactions_failed += 1

    def _count_compaction(self, report: CompactionReport) -> None:
        counters = self._shard.counters
        counters.compactions += 1
        counters.compaction_read_bytes += report.bytes_read
        counters.compaction_written_bytes += report.bytes_written
        counters.compaction_removed_records += report.records_removed
        counters.compaction_ns += report.elapsed_ns


def _uploaded(entries: list[Offloaded]) -> OffloadReport:
    return OffloadReport(len(entries), sum(one.segment_bytes for one in entries))


class CompactionPace:
    """Between two batches: sleep as its share asks, or end the work because the shard closes."""

    def __init__(self, share: float, end: LazyThreadEvent, clock: Clock) -> None:
        self._rest = 1 / share - 1
        self._end = end
        self._clock_ns = clock.monotonic_ns
        self._begun = self._clock_ns()

    def __call__(self) -> None:
        worked = self._clock_ns() - self._begun
        if worked < COMPACTION_TURN_NS:
            return
        if self._end.wait(worked * self._rest / 1e9):
            raise WorkEndedError
        self._begun = self._clock_ns()
