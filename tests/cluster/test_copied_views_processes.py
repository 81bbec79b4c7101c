"""A queue with its dead letters, a durable subscription and a cache, each on three brokers that are processes: their leader is killed and stays
away, or stands still for longer than its lease, under load. What somebody was told stands: a job that is recorded as done is done once,
what was acknowledged does not come again, what was given up is among the dead letters once, and the cache holds what it confirmed: each of its keys is
one linearizable register to whoever gets it and swaps what was found.

FELIX_FAULT_ROUNDS (`make faults ROUNDS=n`): how often each of these happens.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from cluster.cache_history import CacheHistory, contend, get
from cluster.members import Members, serving
from cluster.view_load import consume, put, work
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import client, payloads, until

import felix

__all__ = ["etcd_of_each_test"]  # the fixture

ROUNDS = int(os.environ.get("FELIX_FAULT_ROUNDS", "1"))
pytestmark = [
    pytest.mark.etcd,
    pytest.mark.fault,
    pytest.mark.timeout(600 + 300 * ROUNDS),
    pytest.mark.skipif(sys.platform != "linux", reason="signals of Linux"),
]
QUEUE, DEAD, STREAM, CACHE = "acme/ops/jobs", "acme/ops/jobs.dead", "acme/ops/orders", "acme/ops/prices"
LEASE_S = 2
JOBS = 120
"""Put in each round; as many records are published."""
KEYS = ("first", "second", "third")
"""That clients contend for."""
BROKEN_EACH = 12
"""Every so many jobs, one is given up."""


async def killed(members: Members, leader: str) -> None:
    """It is gone while others go on; then it comes back."""
    members.kill(leader)
    await until(lambda: members.is_led_by_another(QUEUE, leader))
    await until(lambda: members.is_led_by_another(STREAM, leader))


async def frozen(members: Members, leader: str) -> None:
    """It stands still until another one leads, and then goes on as if it led."""
    members.freeze(leader)
    await until(lambda: members.is_led_by_another(QUEUE, leader))
    members.thaw(leader)


async def test_what_a_view_has_told_outlives_every_leader(tmp_path: Path, etcd: EtcdProcess) -> None:
    recorded: Counter[bytes] = Counter()
    unsure: list[str] = []
    acknowledged: set[bytes] = set()
    again: list[bytes] = []
    lost: list[str] = []
    confirmed: dict[str, int] = {}
    history = CacheHistory()
    rounds = 2 * ROUNDS
    jobs = [[b"%d/%d" % (turn, number) for number in range(JOBS)] for turn in range(rounds + 1)]
    broken = frozenset(job for turn in jobs for job in turn[::BROKEN_EACH])
    async with (
        serving(tmp_path, etcd, lease_s=LEASE_S) as members,
        client(members.folder) as region,
        client(members.folder) as other,
    ):
        await region.create_queue(QUEUE, replicas=3, shards=2, visibility=60, attempts=5, retry=0.01)
        await region.create_stream(STREAM, replicas=3, shards=2)
        await region.create_cache(CACHE, replicas=3, shards=2)
        orders, queue = region.stream(STREAM), region.queue(QUEUE)
        await orders.create_subscription("crew", felix.SubscriptionSettings("earliest"))
        busy = [
            asyncio.ensure_future(each)
            for each in (
                work(region, QUEUE, recorded, unsure, broken),
                work(other, QUEUE, recorded, unsure, broken),
                consume(other.stream(STREAM), acknowledged, again, lost),
                *(
                    contend(each.cache(CACHE), name, KEYS, history)
                    for name, each in (("a", region), ("b", other), ("c", other))
                ),
                put(other.cache(CACHE), confirmed),
            )
        ]
        try:
            for turn, fault in enumerate((killed, frozen) * ROUNDS):
                done, read = len(recorded), len(acknowledged)
                putting = asyncio.ensure_future(queue.put_many(jobs[turn]))
                publishing = asyncio.ensure_future(orders.publish_many(jobs[turn]))
                await until(lambda done=done: len(recorded) > done)  # type: ignore[misc]
                await until(lambda read=read: len(acknowledged) > read)  # type: ignore[misc]
                # The one that dead letters are carried by.
                await until(lambda: members.is_well(QUEUE, DEAD, STREAM, CACHE))
                leader = await members.leader(QUEUE)
                await fault(members, leader)
                await asyncio.gather(putting, publishing)
                done, read, held = len(recorded), len(acknowledged), sum(confirmed.values())
                stored = history.stored
                await asyncio.gather(
                    queue.put_many([b"more %d" % turn]), orders.publish_many([b"more %d" % turn])
                )
                await until(lambda done=done: len(recorded) > done)  # type: ignore[misc]
                await until(lambda read=read: len(acknowledged) > read)  # type: ignore[misc]
                await until(lambda held=held: sum(confirmed.values()) > held)  # type: ignore[misc]
                await until(lambda stored=stored: history.stored > stored)  # type: ignore[misc]
                if leader not in members.running:
                    await members.start(leader)
                await until(lambda: members.is_well(QUEUE, DEAD, STREAM, CACHE))
            await asyncio.gather(queue.put_many(jobs[rounds]), orders.publish_many(jobs[rounds]))

            async def all_jobs_are_done() -> bool:
                state = await queue.describe()
                return not state.ready + state.leased + state.delayed

            async def all_is_read() -> bool:
                state = await orders.describe_subscription("crew")
                return not any(each.lag_records for each in state.shards)

            await until(all_jobs_are_done)
            await until(all_is_read)
            for task in busy:
                assert not task.done(), task.exception()
            busy[-1].cancel()
            await asyncio.wait(busy[-1:])
            for key, number in confirmed.items():
                entry = await region.cache(CACHE).get(key)
                # One put may have been under way.
                assert entry is not None and int(entry.value) in (number, number + 20)
        finally:
            for task in busy:
                task.cancel()
            await asyncio.wait(busy)
        for key in KEYS:
            await get(region.cache(CACHE), key, history)
        history.check()
        print(f"{history.stored} of {len(history.swaps)} swaps were stored, {len(history.got)} gets")
        dead = await letters(region, len(broken))
    assert [payload for payload, times in recorded.items() if times > 1] == []
    everything = (rounds + 1) * JOBS + rounds
    assert everything - len(broken) - len(recorded) <= len(unsure)
    assert again == []
    assert everything - len(acknowledged) <= len(lost)
    assert dead == Counter(dict.fromkeys(broken, 1))


async def letters(region: felix.RegionClient, least: int) -> Counter[bytes]:
    """All that stands among the dead letters, once so many do."""

    async def end() -> int:
        return (await region.describe_stream(DEAD)).state[0].high_watermark

    async def are_there() -> bool:
        return await end() >= least

    await until(are_there)
    return Counter(await payloads(region, DEAD, await end()))
