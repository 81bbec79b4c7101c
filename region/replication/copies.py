"""A log that is led here, between the `ShardLog` that serves it and the host of its copies: `region.log.copies.Copies`. Event loop only.

Invariant: once it is deposed, nothing more is committed or taken by it, whatever the replica's core does afterwards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import Final

from felix.errors import CorruptionError, FelixError, UnavailableError
from region.cluster.records import YieldReason
from region.log.copies import LedLog
from region.log.disk import DiskLog
from region.log.errors import SegmentDamagedError
from region.log.frame import Frame
from region.log.offload import ListPointer
from region.log.point import LogPoint
from region.log.producers import ProducerTable
from region.log.segment_state import SegmentState
from region.log.shared_offload import SharedLists
from region.replication.log_worker import LogWorker
from region.replication.ready import DiskFailed, Trimmed, Written
from region.replication.replica import Log
from region.replication.wire import frames_from

FETCH_RETRY_MS: Final = 250


class HostedCopies:
    """See the module."""

    def __init__(
        self,
        number: int,
        log: Log,
        worker: LogWorker,
        *,
        happened: Callable[[Written | Trimmed], None],
        failed: Callable[[DiskFailed, FelixError], None],
        full: Callable[[HostedCopies, FelixError], None],
        refusal: Callable[[], FelixError | None],
        released: Callable[[], None],
        may_answer: Callable[[], bool] | None,
        repair: Callable[[SegmentDamagedError], Awaitable[None]],
        offloaded: Callable[[], ListPointer | None],
        point_to: Callable[[ListPointer], Awaitable[None]],
        lists: Callable[[], SharedLists],
    ) -> None:
        """`happened` and `failed` tell the shard's core, `full` its host; `refusal`: why the shard takes no appends now. `may_answer`: of a stream with
        `acks: leader`, whether what is durable here may be answered before it is committed (L1); None: never."""
        self._number = number
        self._log = log
        self._worker = worker
        self._happened = happened
        self._failed = failed
        self._full = full
        self._refusal = refusal
        self._released = released
        self._may_answer = may_answer
        self._repair = repair
        self._offloaded = offloaded
        self._point_to = point_to
        self._lists = lists
        self._commit = log.commit
        self._durable = log.durable
        self._leader: LedLog | None = None
        self._deposed: FelixError | None = None

    @property
    def disk(self) -> DiskLog:
        return self._worker.disk.log

    @property
    def producers(self) -> ProducerTable:
        return self._worker.disk.producers

    @property
    def pool(self) -> Executor:
        return self._worker.executor

    def led(self, log: LedLog) -> None:
        self._leader = log

    def committed(self, durable: LogPoint) -> LogPoint:
        return min(self._commit, durable)

    def acknowledged(self, durable: LogPoint) -> LogPoint:
        committed = self.committed(durable)
        if self._may_answer is None or self._deposed is not None or not self._may_answer():
            return committed
        return max(committed, min(self._log.durable, durable))

    def may_cut(self, point: LogPoint) -> bool:
        """Never: it is the follower that cuts, once nobody leads here."""
        return False

    def refusal(self) -> FelixError | None:
        return self._deposed or self._refusal()

    def written(self, prev: LogPoint, frames: Sequence[Frame]) -> None:
        placed = self._worker.disk.placed(prev, frames)
        self._happened(Written(self._number, prev, frames_from(prev, placed)))

    def trimmed(self, start: LogPoint) -> None:
        self._happened(Trimmed(self._number, start))

    def failed(self, error: FelixError) -> None:
        if self._deposed is None:
            why: YieldReason = "corrupt" if isinstance(error, CorruptionError) else "failed"
            self._failed(DiskFailed(self._number, why), error)

    def full(self, error: FelixError) -> None:
        if self._deposed is None:
            self._full(self, error)

    @property
    def is_full(self) -> bool:
        """Whether whoever leads here finds no room."""
        return self._deposed is None and self._leader is not None and self._leader.is_full

    async def repair(self, damage: SegmentDamagedError) -> None:
        await self._repair(damage)

    @property
    def offloaded(self) -> ListPointer | None:
        return self._offloaded()

    @property
    def lists(self) -> SharedLists:
        return self._lists()

    async def point_to(self, pointer: ListPointer) -> None:
        if self._deposed is not None:
            raise self._deposed.with_traceback(None)
        await self._point_to(pointer)

    def released(self) -> None:
        self._released()

    # -- what the host tells ---------------------------------------------------------------------------

    def moved(self) -> None:
        """The commit point, what is durable here, or whether that may be answered, may be another one."""
        if self._deposed is not None:
            return
        answers_more = (
            self._may_answer is not None and self._log.durable > self._durable and self._may_answer()
        )
        if answers_more:
            self._durable = self._log.durable
        if self._log.commit > self._commit or answers_more:
            self._commit = self._log.commit
            if self._leader is not None:
                self._leader.commit_moved()

    def depose(self, why: FelixError) -> None:
        """It is led here no more."""
        if self._deposed is None:
            self._deposed = why
            if self._leader is not None:
                self._leader.stop(why)

    async def fetch(self, segment: SegmentState) -> None:
        """Bring a segment back that is in a store only. Raises UnavailableError, CorruptionError."""
        if self._leader is None:
            raise UnavailableError("The log is about to be led here.", retry_after_ms=FETCH_RETRY_MS)
        await self._leader.fetch(segment)

    def snapshot(self) -> bytes | None:
        """The producers up to the commit point; None before somebody leads."""
        return None if self._leader is None else self._leader.producers_snapshot()
