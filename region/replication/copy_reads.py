"""Reading the logs of a broker's copies: for who follows them, for who repairs another copy, and for who reads what is committed.

What is damaged is repaired first, what a store alone has is fetched, and nobody waits for that but who reads it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from functools import partial

from felix.errors import CorruptionError, FelixError, RequestError, UnavailableError
from felix.storage.port import is_exhausted
from region.cluster.records import ShardId, YieldReason
from region.log.errors import NotLocalError, SegmentDamagedError, StorageFailedError, too_many_files
from region.log.point import LogPoint
from region.log.segment_state import SegmentState
from region.replication.copier import Links
from region.replication.copy_pace import CopyPace
from region.replication.hosted import RETRY_MS, Hosted
from region.replication.messages import Frame
from region.replication.ready import DiskFailed, FramesRead, Read
from region.replication.repairer import FETCH_BYTES, Fetched, Repairer, Wanted

log = logging.getLogger("felix.region.replication")


class CopyReads:
    """Of the copies in `hosted` of broker `broker`. `is_in_sync`: whether a shard's copy here is. `step`: who hears of an event of a copy;
    `disk_failed`: who is told that a log of one of them has failed under a read. Event loop only."""

    def __init__(
        self,
        broker: str,
        hosted: Mapping[ShardId, Hosted],
        links: Links,
        pace: CopyPace,
        repairs: Repairer,
        pool: Executor,
        *,
        is_in_sync: Callable[[ShardId], bool],
        step: Callable[[Hosted, object], None],
        disk_failed: Callable[[Hosted, DiskFailed], Awaitable[None]],
    ) -> None:
        self._broker, self._hosted = broker, hosted
        self._links, self._pace, self._repairs, self._pool = links, pace, repairs, pool
        self._is_in_sync, self._step, self._disk_failed = is_in_sync, step, disk_failed

    async def committed(self, shard: ShardId, number: int, begin: LogPoint, size: int) -> tuple[Frame, ...]:
        """Frames of a log of a copy here, led or not, from `begin` on, as far as they are known to be committed: of about `size` bytes, one
        at least; none where there is no more, or no copy. Raises what reading raises."""
        hosted = self._hosted.get(shard)
        if hosted is None:
            return ()
        log, disk = hosted.core.replica.logs[number], hosted.workers[number].disk
        end = log.commit
        begin = max(begin, log.start)
        if begin >= end:
            return ()
        return await self._repairs.reading(shard, number, partial(disk.read, begin, size, end), self._pool)

    async def for_repair(self, peer: str, wanted: Wanted) -> Fetched:
        """What `peer`, which has a damaged copy, asks of a log here: committed frames, and the annotations in force where they begin.

        Raises UnavailableError where this copy is not in sync, or has not that much committed; RequestError(UNSUPPORTED) where its own were
        compacted; CorruptionError where they are damaged here, too.
        """
        shard, number, begin, end, with_annotations = wanted
        hosted = self._hosted.get(shard)
        if (
            hosted is None
            or hosted.broken
            or hosted.core.replica.stopped
            or not hosted.core.hears(peer)
            or not self._is_in_sync(shard)
            or number not in hosted.workers
            or number in hosted.core.replica.copying
            or end > hosted.core.replica.logs[number].commit
        ):
            raise UnavailableError(
                f"Broker {self._broker} has no copy of that in sync.", retry_after_ms=RETRY_MS
            )
        disk, loop = hosted.workers[number].disk, asyncio.get_running_loop()

        def read() -> Fetched:
            if not with_annotations:
                return Fetched({}, disk.log.read_frames(begin, FETCH_BYTES, end, is_guessed=True))
            annotations = disk.log.annotations_at(begin)
            try:
                return Fetched(annotations, disk.log.read_frames(begin, FETCH_BYTES, end))
            except SegmentDamagedError as error:
                # They are of use without the frames, which another copy may have.
                loop.call_soon_threadsafe(self._repairs.note, shard, number, error)
                return Fetched(annotations, ())

        try:
            return await loop.run_in_executor(self._pool, read)
        except SegmentDamagedError as error:
            # Repaired beside; whoever asked asks another one, and this one again.
            self._repairs.note(shard, number, error)
            raise

    async def fetch(self, hosted: Hosted, number: int, segment: SegmentState) -> None:
        """Bring a segment of a log that is led here back from its store. Raises UnavailableError, CorruptionError (of the store's copy)."""
        led = hosted.led.get(number)
        if led is None:
            raise UnavailableError("The log is not led here yet.", retry_after_ms=RETRY_MS)
        await led.fetch(segment)

    async def for_follower(self, hosted: Hosted, read: Read, cuts: int) -> None:
        """Frames for a follower, once the link to it has room; the copy's core hears of them. `cuts`: of the log, when the core asked for it."""
        await self._links.room(read.peer)
        if read.paced:
            await self._pace.take(read.paced)
        disk = hosted.workers[read.log].disk
        try:
            frames = await self._read_repaired(hosted, read, cuts)
        except UnavailableError:
            # Whoever follows asks again, or has already.
            return
        except (RequestError, NotLocalError):
            frames = ()
        except (CorruptionError, OSError, FelixError) as error:
            frames = ()
            if hosted.core.replica.logs[read.log].cuts == cuts and hosted.leads:
                log.error("log %s cannot be read: %s", disk.plan.folder, error)
                hosted.workers[read.log].halt(
                    str(error), is_disk_error=isinstance(error, OSError | StorageFailedError)
                )
                why: YieldReason = "corrupt" if isinstance(error, CorruptionError) else "failed"
                await self._disk_failed(hosted, DiskFailed(read.log, why))
                return
        if read.paced:
            cost = sum(frame.size + read.beside for frame in frames)
            self._pace.give_back(min(read.paced, read.size - cost))
        self._step(hosted, FramesRead(read.peer, read.ask, read.log, read.begin, frames))

    async def _read_repaired(self, hosted: Hosted, read: Read, cuts: int) -> tuple[Frame, ...]:
        """As `ReplicaDisk.read_placed`. A copy that wants what is to be repaired or fetched waits as long as that takes.
        Raises UnavailableError where it does not want it any more."""
        disk, number = hosted.workers[read.log].disk, read.log
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(
                    self._pool, disk.read_placed, read.begin, read.size, read.end, read.beside
                )
            except (SegmentDamagedError, NotLocalError, OSError) as error:
                if isinstance(error, OSError) and not is_exhausted(error):
                    raise
                follower = hosted.core.leader.followers.get(read.peer)
                if hosted.core.replica.logs[number].cuts != cuts or not hosted.leads:
                    raise
                if follower is None or follower.ask != read.ask:
                    raise UnavailableError(f"Broker {read.peer} asks anew.") from None
                try:
                    if isinstance(error, OSError):
                        raise too_many_files(error, disk.plan.folder)
                    if isinstance(error, NotLocalError):
                        await self.fetch(hosted, number, error.segment)
                    else:
                        await self._repairs.repair(hosted.shard, number, error)
                except (CorruptionError, UnavailableError) as left:
                    log.warning(
                        "shard %s: broker %s waits for what cannot be read here: %s",
                        hosted.shard,
                        read.peer,
                        left,
                    )
                    await asyncio.sleep(RETRY_MS / 1_000)
