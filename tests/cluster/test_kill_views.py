"""The leader of a queue, a cache and a durable subscription is killed (SIGKILL) under load, and everybody who uses them was told of
another broker alone: no job is lost, none is recorded as done twice, what was acknowledged does not come again, and the cache holds
what it confirmed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from cluster.processes import kill, only_through, running, several
from cluster.view_load import consume, put, work
from e2e.command_mesh import felix_command
from etcd_process import etcd_binary
from long_runs import count
from region_peer import client, until

import felix
from felix.messages import ListStreams

pytestmark = [pytest.mark.etcd, pytest.mark.fault, pytest.mark.timeout(600)]

KILLS = count(2, 10)
JOBS_PER_KILL = 150
RECORDS_PER_KILL = 60


class Names:
    """A queue, a cache and a stream that one broker leads."""

    def __init__(self, jobs: str, cache: str, orders: str) -> None:
        self.jobs, self.cache, self.orders = jobs, cache, orders


async def made(region: felix.RegionClient) -> tuple[str, Names]:
    """The broker, and what it leads."""
    led: dict[str, dict[str, str]] = {}
    for number in range(12):
        for kind in ("jobs", "cache", "orders"):
            name = f"acme/ops/{kind}{number}"
            if kind == "jobs":
                await region.create_queue(name, shards=2, visibility=30, attempts=1_000, retry=0.01)
            elif kind == "cache":
                await region.create_cache(name, shards=2)
            else:
                await region.create_stream(name, shards=2)
            leader = await leader_of(region, name)
            found = led.setdefault(leader, {})
            found[kind] = name
            if leader != "b1" and len(found) == 3:
                return leader, Names(**found)
    raise AssertionError(f"no broker but b1 leads a queue, a cache and a stream: {led}")


async def leader_of(region: felix.RegionClient, name: str) -> str:
    """As b1 lists it: it names who leads what it does not lead itself."""
    (state,) = (await region.connection.request(ListStreams(name, "", 1))).streams
    return state.state[0].leader or "b1"


async def test_who_knows_another_broker_alone_goes_on_over_kills_of_the_leader(tmp_path: Path) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    folder = several(tmp_path, 3, lease="2s")
    only_through(folder, "b1")
    recorded: Counter[bytes] = Counter()
    faults: list[str] = []
    acknowledged: set[bytes] = set()
    again: list[bytes] = []
    unsure: list[str] = []
    confirmed: dict[str, int] = {}
    async with running(folder), client(folder) as region, client(folder) as other:
        leader, names = await made(region)
        jobs, orders, cache = region.queue(names.jobs), region.stream(names.orders), other.cache(names.cache)
        await orders.create_subscription("crew", felix.SubscriptionSettings("earliest"))
        async with region.cache(names.cache).mirror() as mirror:
            busy = [
                asyncio.ensure_future(each)
                for each in (
                    work(region, names.jobs, recorded, faults),
                    work(other, names.jobs, recorded, faults),
                    consume(other.stream(names.orders), acknowledged, again, unsure),
                    put(cache, confirmed),
                )
            ]
            for number in range(KILLS):
                done, read = len(recorded), len(acknowledged)
                putting = asyncio.ensure_future(
                    jobs.put_many([b"%d/%d" % (number, n) for n in range(JOBS_PER_KILL)])
                )
                publishing = asyncio.ensure_future(
                    orders.publish_many([b"%d/%d" % (number, n) for n in range(RECORDS_PER_KILL)])
                )
                await until(lambda done=done: len(recorded) > done)  # type: ignore[misc]
                await until(lambda read=read: len(acknowledged) > read)  # type: ignore[misc]
                puts = sum(confirmed.values())
                await kill(folder, leader)
                await asyncio.gather(putting, publishing)
                await until(lambda puts=puts: sum(confirmed.values()) > puts)  # type: ignore[misc]
            async with asyncio.timeout(120):
                while (state := await jobs.describe()).ready + state.leased + state.delayed:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                while any(each.lag_records for each in (await orders.describe_subscription("crew")).shards):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            busy[-1].cancel()
            await asyncio.wait(busy[-1:])
            # One put may have been under way.
            for key, number in confirmed.items():
                entry = await region.cache(names.cache).get(key)
                assert entry is not None and int(entry.value) in (number, number + 20)
                await mirror.reached(key, entry.version)
                assert mirror[key] == entry.value
            for task in busy[:-1]:
                assert not task.done(), task.exception()
                task.cancel()
            await asyncio.wait(busy)
        assert [payload for payload, times in recorded.items() if times > 1] == []
        assert KILLS * JOBS_PER_KILL - len(recorded) <= len(faults)
        assert again == []
        assert KILLS * RECORDS_PER_KILL - len(acknowledged) <= len(unsure)
        # So does the command, through the one address that it knows.
        for words, key, value in (
            (("queue", "describe", names.jobs), "ready", 0),
            (("subscription", "describe", names.orders, "crew"), "name", "crew"),
            (("cache", "get", names.cache, "count"), "key", "count"),
        ):
            shown = await asyncio.to_thread(felix_command, tmp_path, *words, "--json")
            assert json.loads(shown.out)[key] == value
