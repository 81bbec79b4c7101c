"""What is done to the closed segments of a shard while it serves: compaction and offload, beside appends and reads.

Only region.log.shard calls this, on the loop; the work itself is in threads of the pools it is given.

Invariants:
- one piece of work at a time, and none while the shard refuses changes;
- the folder is the work's until its thread is done, also where the one who awaits it is cancelled: `ended` waits for it;
- what fails for want of room or of a store leaves all as it was and is due again after a while; damage stops the shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from threading import Event as ThreadEvent
from threading import Lock
from typing import Final, Protocol, TypeVar

from felix.errors import CorruptionError, FelixError
from felix.runtime.port import Clock
from felix.storage.port import Files
from region.log.compaction import CompactionReport, is_due
from region.log.compactor import Compactor, PassSettings, WorkEndedError
from region.log.counters import ShardCounters
from region.log.disk import DiskLog
from region.log.epochs import EpochHistory
from region.log.errors import StorageFailedError, storage_error
from region.log.offloader import Offloader, OffloadReport, Throttle
from region.log.shard_settings import ShardHooks, ShardSettings, ShardStore
from region.log.states import State

COMPACTION_SHARE: Final = 0.5
"""Of a thread's time that compaction takes at most: it sleeps as long as it worked, and appends come first."""
COMPACTION_TURN_NS: Final = 5_000_000
"""It works so long at a time: what else waits for the interpreter waits no longer."""
OFFLOAD_AGAIN_MS: Final = 1_000
OFFLOAD_AGAIN_MS_MAX: Final = 60_000
"""A store that does not answer is asked again after a second, then after twice as long each time up to this."""
COMPACTION_AGAIN_MS: Final = 60_000
"""After a pass that failed (no room, a key that is gone) the next one waits."""

_T = TypeVar("_T")


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
        ending: ThreadEvent,
    ) -> None:
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
        self._compaction_end: ThreadEvent | None = None
        self._ending = ending
        self._compaction_again_ms = 0
        self._offload_again_ms = 0
        self._offload_failures = 0

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
        shard, disk, settings = self._shard, self._disk, self._shard.settings.compaction
        if settings is None or disk.offload.segments:
            return None
        async with self._one:
            if refused := shard.changes_refused():
                raise refused.with_traceback(None)
            end = self._compaction_end = ThreadEvent()
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
        if disk.offload.pending_deletion:
            return True
        return wanted is not None and (
            any(
                one.remote is None and one.header.span is None and one.next_offset <= shard.high_watermark
                for one in disk.segments[:-1]
            )
            or disk.droppable(wanted.local_bytes) is not None
        )

    async def offload(self, now_ms: int, base: str) -> OffloadReport:
        """See ShardLog."""
        shard, wanted = self._shard, self._shard.settings.offload
        async with self._one:
            if refused := shard.changes_refused():
                raise refused.with_traceback(None)
            offloader = Offloader(
                self._disk,
                self._files,
                base,
                wanted.local_bytes if wanted else 0,
                writer=self._writer,
                pace=Throttle(self._store.rate_bytes, self._ending, self._store.clock),
            )
            below, epochs = shard.high_watermark, shard.epochs.starts
            try:
                report = await self._perform(
                    self._store.pool,
                    lambda: offloader.run(below, epochs, upload=bool(wanted and base)),
                    self._ending,
                    lambda: self.offload_later(now_ms),
                )
            finally:
                shard.disk_bytes_changed()
        if base:
            self._offload_failures = 0
        shard.counters.offloaded_segments += report.uploaded
        shard.counters.offloaded_bytes += report.uploaded_bytes
        return report

    async def _perform(
        self, pool: Executor, work: Callable[[], _T], end: ThreadEvent, failed: Callable[[], None]
    ) -> _T:
        """Do `work` in a thread of `pool`; `end` ends it early. `failed` is told where it is worth another attempt."""
        try:
            under_way = self._loop.run_in_executor(pool, work)
            try:
                return await asyncio.shield(under_way)
            except asyncio.CancelledError:
                # The thread still has the folder: nobody may close it before it is done.
                end.set()
                await asyncio.wait([under_way])
                raise
        except WorkEndedError:
            raise
        except (CorruptionError, StorageFailedError) as error:
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


class CompactionPace:
    """Between two batches: sleep as its share asks, or end the work because the shard closes."""

    def __init__(self, share: float, end: ThreadEvent, clock: Clock) -> None:
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
