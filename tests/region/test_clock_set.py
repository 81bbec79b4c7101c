"""The clock of a lone broker is set while it serves: what lasts goes on, and what cannot be taken back waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from region_home import make_region
from region_peer import client, until
from runtimes import with_wall

import felix
from felix.runtime.real import now_ms
from felix.settings import Retention, SubscriptionSettings
from region.bootstrap import write_profile
from region.config import load_config
from region.folder import RegionFolder
from region.node import Node
from region.queue.shard import TOLD_MAX
from region.queue.state import READY_MAX, Phase, QueueState
from region.views import wall_clock

HOUR_MS = 3_600_000
ORDERS, JOBS = "acme/ops/orders", "acme/ops/jobs"


class Region:
    """A broker whose wall clock is `ahead_ms` ahead."""

    def __init__(self) -> None:
        self.ahead_ms = 0
        self.node: Node

    @asynccontextmanager
    async def served(self, home: Path) -> AsyncIterator[felix.RegionClient]:
        async with self.started(make_region(home, "us-east", at_ms=now_ms() - 3 * HOUR_MS)) as made:
            yield made

    @asynccontextmanager
    async def started(self, folder: RegionFolder) -> AsyncIterator[felix.RegionClient]:
        config = load_config(folder.config)
        config = replace(config, storage=replace(config.storage, sweep_every=20))
        self.node = await Node.start(folder, config, with_wall(lambda: now_ms() + self.ahead_ms))
        try:
            write_profile(folder, config.region, config.mesh, self.node.address)
            async with client(folder) as made:
                yield made
        finally:
            await self.node.stop()


async def swept_thrice(node: Node) -> None:
    """Retention was applied three times since."""
    table = node.broker.streams.maintenance
    sweep, swept = table.sweep, 0

    async def counted(at_ms: int) -> None:
        nonlocal swept
        await sweep(at_ms)
        swept += 1

    table.sweep = counted  # type: ignore[method-assign]
    await until(lambda: swept >= 3)
    table.sweep = sweep  # type: ignore[method-assign]


async def test_nothing_waits_as_long_as_a_clock_was_ahead_once_it_is_right(tmp_path: Path) -> None:
    region = Region()
    async with region.served(tmp_path) as made, asyncio.timeout(120):
        await made.create_stream(ORDERS)
        await made.create_queue(JOBS, visibility=30)
        jobs = made.queue(JOBS)
        async with made.stream(ORDERS).consumer("crew", start="earliest", ack_timeout=1.0) as hangs:
            region.ahead_ms = HOUR_MS
            await made.stream(ORDERS).publish(b"order")
            first = await anext(hangs)
            await jobs.put(b"delayed", delay=1)
            await jobs.put(b"given back")
            (job,) = await jobs.lease(1, wait=30)
            await job.nack(delay=1)
            region.ahead_ms = 0
            await jobs.put(b"later", delay=1)
            found = {
                bytes(each.payload)
                for _ in range(3)
                for each in await jobs.lease(1, wait=30, visibility=HOUR_MS / 1000)
            }
            assert found == {b"delayed", b"given back", b"later"}
            again = await anext(hangs)
            assert (first.attempt, again.attempt, again.offset) == (1, 2, 0)


@pytest.mark.parametrize("ahead_ms", [HOUR_MS, -HOUR_MS])
async def test_nothing_is_over_before_its_time_where_a_clock_is_set(tmp_path: Path, ahead_ms: int) -> None:
    """Not for a consumer that has a record, nor for a worker that has a job, nor for a subscription that nobody reads for a while, nor for a stream's records."""
    region = Region()
    async with region.served(tmp_path) as made, asyncio.timeout(120):
        await made.create_stream(ORDERS, retention=Retention(age_ms=HOUR_MS // 2))
        await made.create_queue(JOBS, visibility=600)
        orders, jobs = made.stream(ORDERS), made.queue(JOBS)
        await orders.create_subscription("idle", SubscriptionSettings(inactive_ttl_ms=HOUR_MS // 2))
        await orders.publish(b"order")
        await jobs.put(b"job")
        (job,) = await jobs.lease(1)
        await jobs.put(b"delayed", delay=600)
        async with orders.consumer("crew", start="earliest", ack_timeout=600.0) as consumer:
            record = await anext(consumer)
            region.ahead_ms = ahead_ms
            node = region.node
            for held in node.subscriptions._held.values():
                for each in held.by_name.values():
                    each._tick()
            for queue in node.queues._queues.values():
                for shard in queue.shards:
                    shard._tick()
            await node.subscriptions.sweep()
            assert await jobs.lease(1) == []
            await job.ack()
            await consumer.ack(record)
            await swept_thrice(node)
            states = {each.name for each in await orders.subscriptions()}
            assert states == {"idle", "crew"}
            state = await orders.describe_subscription("crew")
            assert (state.redelivered, state.shards[0].committed) == (0, 1)
        assert (await made.describe_stream(ORDERS)).state[0].log_start == 0


async def test_a_broker_that_starts_by_a_clock_that_is_ahead_deletes_nothing_for_an_hour(
    tmp_path: Path,
) -> None:
    """Neither records nor an idle subscription, also where it is started again meanwhile; set right by then, it has deleted nothing."""
    region = Region()
    folder = make_region(tmp_path, "us-east", at_ms=now_ms() - 3 * HOUR_MS)
    async with asyncio.timeout(120):
        async with region.started(folder) as made:
            await made.create_stream(ORDERS, retention=Retention(age_ms=HOUR_MS // 2))
            orders = made.stream(ORDERS)
            await orders.create_subscription("idle", SubscriptionSettings(inactive_ttl_ms=HOUR_MS // 2))
            await orders.publish(b"order")
            await swept_thrice(region.node)

        for region.ahead_ms in (HOUR_MS, HOUR_MS, 0, HOUR_MS):
            async with region.started(folder) as made:
                await region.node.subscriptions.sweep()
                await swept_thrice(region.node)
                assert (await made.describe_stream(ORDERS)).state[0].log_start == 0
                assert [each.name for each in await made.stream(ORDERS).subscriptions()] == ["idle"]


@pytest.mark.parametrize("ahead_ms", [HOUR_MS, -HOUR_MS])
async def test_a_delay_lasts_as_long_behind_more_jobs_than_are_read_ahead(
    tmp_path: Path, ahead_ms: int
) -> None:
    region = Region()
    async with region.served(tmp_path) as made, asyncio.timeout(120):
        await made.create_queue(JOBS, visibility=600)
        jobs = made.queue(JOBS)
        assert await jobs.lease(1) == [], "it is open"
        await jobs.put_many([b"%d" % number for number in range(READY_MAX + 100)])
        await jobs.put(b"delayed", delay=600)
        leased = await jobs.lease(TOLD_MAX + 100, wait=30)
        region.ahead_ms = ahead_ms
        await jobs.put(b"last", delay=600)
        while more := await jobs.lease(1_000):
            leased += more
        assert len(leased) == READY_MAX + 100
        (shard,) = (shard for queue in region.node.queues._queues.values() for shard in queue.shards)
        await until(lambda: not shard._moved)
        assert shard.state.counts[Phase.DELAYED] == 2
        # Whoever leads next knows it, too.
        read_again = QueueState(shard.settings)
        async for entry in shard.actor.journal.replay():
            if entry[:1] == b"\0":
                read_again.apply(entry[1:], shard.now_ms)
        now_ms = shard.now_ms
        assert all(400_000 < record.due_ms - now_ms <= 600_000 for record in read_again.tracked.values())
        await asyncio.gather(*(job.ack() for job in leased))


async def test_records_go_by_their_age_once_a_clock_that_was_set_ahead_stands_for_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wall_clock, "HELD_MS", 1)
    region = Region()
    async with region.served(tmp_path) as made, asyncio.timeout(120):
        await made.create_stream(ORDERS, retention=Retention(age_ms=HOUR_MS // 2))
        await made.stream(ORDERS).publish(b"order")
        region.ahead_ms = HOUR_MS
        while (await made.describe_stream(ORDERS)).state[0].log_start == 0:  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.05)
