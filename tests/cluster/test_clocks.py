"""One of three brokers has a wrong clock: what it leads goes by the clocks of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
from cluster.clustered_region import ClusteredRegion
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import until
from slow_runs import only_slow

from felix.runtime.port import Clock
from felix.runtime.real import REAL
from felix.settings import CacheSettings, Deduplication, Retention, Views
from region.cluster.clocks import CLOCK_OFF_MS_MAX, RegionClock, middle
from region.node import Node

__all__ = ["etcd_of_each_test"]  # the fixture

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (DAY_MS, [], DAY_MS),
        (DAY_MS, [0], DAY_MS),  # nobody knows which of two is wrong
        (DAY_MS, [0, 40], 40),
        (-DAY_MS, [0, 40], 0),
        (DAY_MS, [-HOUR_MS, 0], 0),
        (0, [-HOUR_MS, HOUR_MS], 0),
        (0, [0, DAY_MS], 0),
        (CLOCK_OFF_MS_MAX, [0, 0], CLOCK_OFF_MS_MAX),
        (CLOCK_OFF_MS_MAX + 1, [0, 0], 0),
        (DAY_MS, [0, 10, DAY_MS], 10),
        (0, [0, DAY_MS, DAY_MS], DAY_MS),
        (DAY_MS, [0, 10, 20, DAY_MS], 20),
    ],
)
def test_a_clock_is_held_to_the_middle_one_where_most_are_further_than_a_little_from_it(
    own: int, others: list[int], expected: int
) -> None:
    assert middle(own, others) == expected


class Shifted:
    """A real clock whose wall time is ahead by so much."""

    def __init__(self, own: Clock) -> None:
        self.ahead_ms = 0
        self._own = own
        self.monotonic = own.monotonic
        self.monotonic_ns = own.monotonic_ns
        self.boot_ms = own.boot_ms

    def now_ms(self) -> int:
        return self._own.now_ms() + self.ahead_ms


def test_a_step_of_the_own_clock_and_what_others_say_count_at_once() -> None:
    own = Shifted(REAL.clock)
    clock = RegionClock(own)
    own.ahead_ms = DAY_MS
    assert clock.now_ms() - REAL.clock.now_ms() > DAY_MS - 1_000, "nobody else was heard"
    offset = REAL.clock.now_ms() - REAL.clock.boot_ms()
    clock.others = lambda: [offset - 20, offset]
    assert abs(clock.now_ms() - REAL.clock.now_ms()) < 1_000
    own.ahead_ms = 0
    clock.others = lambda: [offset - DAY_MS, offset + DAY_MS]
    assert abs(clock.now_ms() - REAL.clock.now_ms()) < 1_000


@asynccontextmanager
async def clocks_of_three(
    home: Path, etcd: EtcdProcess
) -> AsyncIterator[tuple[ClusteredRegion, dict[str, Shifted]]]:
    region = ClusteredRegion(home, etcd, 3)
    clocks = {name: Shifted(REAL.clock) for name in region.names}
    try:
        for name, clock in clocks.items():
            runtime = msgspec.structs.replace(REAL, clock=clock)
            region.nodes[name] = await Node.start(region.folder, region.config.of_broker(name), runtime)
        await until(lambda: all(knows_all(node) for node in region.nodes.values()))
        yield region, clocks
    finally:
        for clock in clocks.values():
            clock.ahead_ms = 0
        await region.stop()


def knows_all(node: Node) -> bool:
    peers = node._parts.peers
    return peers is not None and len(peers.links.clock_offsets) == 2


@pytest.mark.etcd
@pytest.mark.parametrize("ahead_ms", [HOUR_MS, pytest.param(-HOUR_MS, marks=only_slow)])
async def test_what_a_broker_with_a_wrong_clock_leads_keeps_its_times(
    tmp_path: Path, etcd: EtcdProcess, ahead_ms: int
) -> None:
    async with clocks_of_three(tmp_path, etcd) as (region, clocks), region.client("b1") as client:
        await client.create_stream(
            "acme/ops/orders",
            replicas=3,
            retention=Retention(age_ms=HOUR_MS // 2),
            views=Views(deduplication=Deduplication(window_ms=HOUR_MS // 2)),
        )
        leader = region.leader("b1", "acme/ops/orders")

        async def led(name: str, create: Callable[[str], Awaitable[object]]) -> str:
            """Create some, until one is led by the same broker."""
            for number in range(3 * len(region.names)):
                await create(f"{name}{number}")
                await until(partial(region.leader, "b1", f"{name}{number}"))
                if region.leader("b1", f"{name}{number}") == leader:
                    return f"{name}{number}"
            raise AssertionError(f"no {name} is led by {leader}")

        orders = client.stream("acme/ops/orders")
        jobs = client.queue(
            await led("acme/ops/jobs", partial(client.create_queue, replicas=3, visibility=30))
        )
        ttl = CacheSettings(ttl_ms=600_000)
        prices = client.cache(
            await led("acme/ops/prices", partial(client.create_cache, settings=ttl, replicas=3))
        )
        for number in range(10):
            await orders.publish(b"%d" % number)
        assert await orders.publish(b"once", message_id=b"one") == 10
        await prices.put("k", b"v")
        await jobs.put(b"later", delay=600)
        await jobs.put(b"now")
        (job,) = await jobs.lease(1)
        clocks[leader].ahead_ms = ahead_ms
        await retained(region)
        # Nothing went before its time, and nothing comes before it.
        assert (await client.describe_stream("acme/ops/orders")).state[0].log_start == 0
        assert (await prices.get("k")) is not None
        assert await jobs.lease(2) == []
        assert await orders.publish(b"once", message_id=b"one") == 10
        # And what is begun now ends in time, whoever leads then.
        await jobs.put(b"soon", delay=1)
        (soon,) = await jobs.lease(1, wait=30)
        assert soon.payload == b"soon"
        await soon.ack()
        await job.ack()
        assert await orders.publish(b"dated") == 11
        async with orders.subscribe(start=11) as records:
            dated = (await anext(records)).timestamp_ms
        assert abs(dated - REAL.clock.now_ms()) < 60_000


async def retained(region: ClusteredRegion) -> None:
    """Retention is done at every broker."""
    for node in region.nodes.values():
        await node.broker.streams.maintenance.sweep(node.broker.streams_ms())
    await asyncio.sleep(0)
