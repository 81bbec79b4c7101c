"""What is done to the copies of this broker from time to time: what leaders have put into a store is followed, and logs are compacted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import msgspec

from felix.errors import CorruptionError, UnavailableError
from felix.settings import Compaction
from region.cluster.mirror import ClusterMirror
from region.cluster.records import ShardId, YieldReason
from region.cluster.transactions import Refusal, change
from region.log.compaction import CompactionReport
from region.log.compactor import Transform
from region.log.companions import RECORDS
from region.log.errors import SegmentDamagedError, StorageFailedError
from region.log.offload import ListPointer, OffloadList
from region.log.offloader import drop_local
from region.log.segment_state import SegmentState
from region.log.shared_offload import waiting
from region.replication.hosted import RETRY_MS, Hosted, not_leader
from region.replication.ready import DiskFailed
from region.replication.repairer import Repairer


class OffloadNews(NamedTuple):
    """For a copy that follows: the list in force, and the offset behind the last segment here that is closed, committed and not known to be in
    it; -1 without one."""

    pointer: ListPointer
    end: int


class CopyMaintenance:
    """Of the copies in `hosted` of broker `broker`. `disk_failed`: who is told that a log of one of them has failed under its work."""

    def __init__(
        self,
        broker: str,
        hosted: Mapping[ShardId, Hosted],
        mirror: ClusterMirror,
        repairs: Repairer,
        pool: Executor,
        disk_failed: Callable[[Hosted, DiskFailed], Awaitable[None]],
    ) -> None:
        self._broker, self._hosted, self._mirror = broker, hosted, mirror
        self._repairs, self._pool, self._disk_failed = repairs, pool, disk_failed

    def listed(self, shard: ShardId) -> ListPointer | None:
        """The list of what is in a store that is in force; None where nothing was offloaded."""
        record = self._mirror.view.shards.get(shard)
        return None if record is None else record.offloaded

    async def point_to(self, hosted: Hosted, pointer: ListPointer) -> None:
        """The leader's change of the list that is in force, compared with the record: of an epoch that is over it changes nothing.
        Raises UnavailableError where it does not lead any more, or the record was changed meanwhile; and what the store raises."""
        view, shard = self._mirror.view, hosted.shard
        record = view.shards.get(shard)
        if record is None or not hosted.serves or record.epoch != hosted.core.leader.epoch:
            raise not_leader(shard)
        after = msgspec.structs.replace(record, offloaded=pointer)
        made = change(view, shard, self._broker, record, view.revision_of(view.keys.shard(shard)), after)
        if isinstance(made, Refusal):
            raise UnavailableError(made.sentence, retry_after_ms=RETRY_MS)
        result = await self._mirror.commit(made)
        if result is None and self.listed(shard) == pointer:
            # The answer was lost, and what it wrote was read: nobody else writes this one.
            return
        if result is None or not result.succeeded:
            raise UnavailableError(
                f"The record of shard {shard.number} was changed meanwhile: what was offloaded is listed in another turn.",
                retry_after_ms=RETRY_MS,
            )

    def offload_news(self, shard: ShardId) -> OffloadNews | None:
        """What of the list in force a copy here may have to do with, where it follows the leader that wrote that; None where there is nothing."""
        hosted, record = self._hosted.get(shard), self._mirror.view.shards.get(shard)
        if (
            hosted is None
            or record is None
            or hosted.broken
            or hosted.core.leader.leads
            or not hosted.core.follower.placed
            or hosted.core.replica.stopped
            or hosted.core.replica.copying
            or record.offloaded is None
            or record.offloaded.epoch != hosted.core.follower.epoch
        ):
            return None
        below = hosted.core.replica.logs[RECORDS].commit.offset
        return OffloadNews(record.offloaded, _end_of(waiting(hosted.workers[RECORDS].disk.log, below)))

    async def follow_offload(self, shard: ShardId, listed: OffloadList, local_bytes: int) -> int:
        """What of a follower's own segments is in the store, by the list that `offload_news` pointed to, is known to be so, and its local file goes
        beyond `local_bytes`; `OffloadNews.end` afterwards. Raises OSError, UnavailableError where its disk has failed."""
        hosted = self._hosted[shard]
        worker, below = hosted.workers[RECORDS], hosted.core.replica.logs[RECORDS].commit.offset
        disk = worker.disk

        def work() -> int:
            # In its turn behind what was written before: the commit point stands on it.
            with disk.log.writer:
                disk.log.follow_offloaded(listed.segments, below)
            drop_local(disk.log, disk.log.writer, local_bytes)
            return _end_of(waiting(disk.log, below))

        return await asyncio.get_running_loop().run_in_executor(worker.executor, work)

    async def drop_offloaded(self, shard: ShardId, local_bytes: int) -> None:
        """Local files of what a follower knows to be in the store go beyond `local_bytes`. The caller has asked `offload_news` just now. Raises as
        `follow_offload`."""
        worker = self._hosted[shard].workers[RECORDS]
        disk = worker.disk.log
        if disk.droppable(local_bytes) is not None:
            await asyncio.get_running_loop().run_in_executor(
                worker.executor, drop_local, disk, disk.writer, local_bytes
            )

    def compaction_due(self, shard: ShardId, number: int, compaction: Compaction) -> bool:
        """Whether `compact` would be worth its work."""
        hosted = self._hosted.get(shard)
        if hosted is None or hosted.broken or hosted.is_settling or number in hosted.core.replica.copying:
            return False
        below = hosted.core.replica.logs[number].commit.offset
        return hosted.workers[number].disk.compaction_due(below, compaction.lag_ms)

    async def compact(
        self,
        shard: ShardId,
        number: int,
        compaction: Compaction,
        seal: Transform,
        open_batch: Transform,
        notes_from: Callable[[Mapping[int, bytes]], Awaitable[int | None]] | None = None,
    ) -> CompactionReport | None:
        """One pass over what is committed of this broker's copy of a log, whether it is led here or not: each copy is compacted by itself, and
        holds the newest record of each key. `notes_from`: from which offset on its notes are to stay, by the annotations that are in force at or
        behind all that the pass looks at. A segment that is damaged is repaired, and compacted later. Raises as `ReplicaDisk.compact` and
        `notes_from` do."""
        hosted = self._hosted[shard]
        worker, below = hosted.workers[number], hosted.core.replica.logs[number].commit.offset
        led = hosted.led.get(number)
        snapshot = None if led is None else led.snapshot()
        disk = worker.disk

        def known() -> tuple[bytes, dict[int, bytes]]:
            # In its turn: what is written changes both.
            producers = disk.producers.encode(disk.log.end_offset) if snapshot is None else snapshot
            return producers, dict(disk.log.annotations)

        producers, annotations = await asyncio.get_running_loop().run_in_executor(worker.executor, known)
        if notes_from is not None and (first := await notes_from(annotations)) is not None:
            # The note of a range without records may stand at the end of a segment that ends where the range is.
            below = min(below, first - 1)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, disk.compact, below, compaction, producers, seal, open_batch
            )
        except SegmentDamagedError as error:
            self._repairs.note(shard, number, error)
            raise
        except (CorruptionError, StorageFailedError) as error:
            worker.halt(error.sentence, is_disk_error=isinstance(error, StorageFailedError))
            why: YieldReason = "corrupt" if isinstance(error, CorruptionError) else "failed"
            await self._disk_failed(hosted, DiskFailed(number, why))
            raise


def _end_of(segments: Sequence[SegmentState]) -> int:
    """The offset behind the last of them; -1 where there is none."""
    return segments[-1].next_offset if segments else -1
