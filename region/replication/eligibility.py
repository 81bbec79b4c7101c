"""What a broker says in the metadata store of its copies that are to lead and cannot, and of those that had failed and can lead again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Mapping

from felix.errors import FelixError
from felix.tasks import TaskSet
from region.cluster.election import has_yielded
from region.cluster.membership import with_yield
from region.cluster.mirror import ClusterMirror
from region.cluster.records import ShardId, YieldReason
from region.cluster.transactions import Refusal, change, open_again
from region.replication.hosted import RETRY_MS, Hosted

log = logging.getLogger("felix.region.replication")


class Eligibility:
    """Of the copies in `hosted` and of those that are `unopened`. Each thing that it says is tried again until the record says so, or it is not so
    any more. Event loop only."""

    def __init__(
        self,
        broker: str,
        mirror: ClusterMirror,
        hosted: Mapping[ShardId, Hosted],
        unopened: Container[ShardId],
    ) -> None:
        self.registration = 0
        """this start of the broker"""
        self.yielding: set[ShardId] = set()
        """while the store is told that a copy that is broken, or cannot be opened, does not lead"""
        self._broker, self._mirror = broker, mirror
        self._hosted, self._unopened = hosted, unopened
        self._counting: set[ShardId] = set()
        """while the store is told that a copy is open again"""
        self._is_closed = False
        self._tasks = TaskSet()

    async def close(self) -> None:
        """Say nothing more."""
        self._is_closed = True
        await self._tasks.end()

    def look(self, hosted: Hosted) -> None:
        """A copy that cannot lead says so where it is elected: whoever led before had not heard of it. One that can, and counts as failed, says that
        while nobody leads: its logs are open again, or its disk answers again."""
        shard, record = hosted.shard, self._mirror.view.shards.get(hosted.shard)
        # Of each copy once a second, and nearly all are well.
        if record is None or not (record.failed or hosted.broken or hosted.core.replica.failed):
            return
        self.look_whether_elected_in_vain(shard)
        if not self._is_closed and shard not in self._counting and self._counts_again(hosted):
            self._counting.add(shard)
            self._tasks.begin(self._count_again(hosted), name="replication")

    def look_whether_elected_in_vain(self, shard: ShardId) -> None:
        """Have another copy lead where the one here is to, and cannot."""
        if not self._is_closed and shard not in self.yielding and self._why_elected_in_vain(shard):
            self.yielding.add(shard)
            self._tasks.begin(self._yield_until_heard(shard), name="replication")

    def _counts_again(self, hosted: Hosted) -> bool:
        record, replica = self._mirror.view.shards.get(hosted.shard), hosted.core.replica
        return (
            record is not None
            and record.failed.get(self._broker) == self.registration
            and (not record.leader or has_yielded(record))
            and not (hosted.broken or hosted.is_settling or hosted.core.leader.leads)
            and not (replica.stopped or replica.lost or replica.copying)
            and replica.synced
            and not hosted.is_hung
        )

    async def _count_again(self, hosted: Hosted) -> None:
        shard = hosted.shard
        try:
            while self._counts_again(hosted):
                made = open_again(self._mirror.view, shard, self._broker)
                try:
                    if not isinstance(made, Refusal):
                        await self._mirror.commit(made)
                except FelixError as error:
                    log.warning("shard %s: that it is open again is not written down yet: %s", shard, error)
                await asyncio.sleep(RETRY_MS / 1_000)
        finally:
            self._counting.discard(shard)

    def _why_elected_in_vain(self, shard: ShardId) -> YieldReason | None:
        """Why a copy here cannot lead that is to by the record; None where it can, or is not to."""
        hosted, record = self._hosted.get(shard), self._mirror.view.shards.get(shard)
        if (
            record is None
            or record.leader != self._broker
            or record.isr.get(self._broker) != self.registration
            or has_yielded(record)
        ):
            return None
        if hosted is None:
            return "corrupt" if shard in self._unopened else None
        if hosted.broken:
            return "failed"
        failed = hosted.core.replica.failed
        if failed in ("", "leaving") or hosted.core.leader.leads:
            return None
        if failed == "failed":
            return "failed"
        # One that was to cut what is committed, and did not, has that: a person is to look.
        return "corrupt" if hosted.has_failed else None

    async def _yield_until_heard(self, shard: ShardId) -> None:
        """Say in the store that this copy cannot serve, while its record says that it leads: its core cannot any more, or it has none."""
        try:
            while why := self._why_elected_in_vain(shard):
                view = self._mirror.view
                record = view.shards[shard]
                revision = view.revision_of(view.keys.shard(shard))
                made = change(view, shard, self._broker, record, revision, with_yield(record, why))
                if not isinstance(made, Refusal):
                    try:
                        await self._mirror.commit(made)
                    except FelixError as error:
                        log.warning(
                            "shard %s: that it cannot be served is not written down yet: %s", shard, error
                        )
                await asyncio.sleep(RETRY_MS / 1_000)
        finally:
            self.yielding.discard(shard)
