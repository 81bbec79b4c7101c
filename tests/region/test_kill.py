"""A broker's process is killed (SIGKILL) under publishing load and started again, by the real command."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import psutil
import pytest
from long_runs import count
from region_peer import client, take, until
from region_process import BrokerProcess, fixed_region

import felix
from felix import Durability
from region.folder import RegionFolder

CREW = "acme/ops/crew"
KILLS = count(2, 4)
SOAK_KILLS = int(os.environ.get("FELIX_SOAK_KILLS", "100"))
PRODUCERS = 3


async def publish_forever(
    region: felix.RegionClient, who: int, acknowledged: dict[bytes, tuple[int, int]], over: asyncio.Event
) -> None:
    """One producer with a few records on the way at a time, whatever happens to the broker."""
    async with region.stream(CREW).publisher(deadline_ms=300_000) as publisher:
        at = 0
        while not over.is_set():
            payloads = [b"%d %d" % (who, at + n) for n in range(20)]
            receipt = await publisher.publish_batch(
                [felix.NewRecord(payload) for payload in payloads], shard=who % 2
            )
            for n, payload in enumerate(payloads):
                acknowledged[payload] = (receipt.shard, receipt.base_offset + n)
            at += 20


async def killed_under_load(home: Path, kills: int) -> int:
    """Kills the broker so often; returns how many records were acknowledged in all."""
    folder = fixed_region(home)
    chance = random.Random(11)
    broker = BrokerProcess(folder, home)
    try:
        await asyncio.to_thread(broker.wait)
        async with client(folder) as region:
            await region.create_stream(CREW, shards=2)
            acknowledged: dict[bytes, tuple[int, int]] = {}
            over = asyncio.Event()
            producers = [
                asyncio.ensure_future(publish_forever(region, who, acknowledged, over))
                for who in range(PRODUCERS)
            ]
            follower = region.stream(CREW).subscribe("earliest", on_gap="raise")
            followed: list[tuple[int, int, bytes]] = []

            async def follow() -> None:
                async for batch in follower.batches():
                    followed.extend((batch.shard, r.offset, bytes(r.payload)) for r in batch.records())

            following = asyncio.ensure_future(follow())
            for _ in range(kills):
                before = len(acknowledged)
                enough = before + 40 + chance.randrange(400)
                await until(lambda enough=enough: len(acknowledged) >= enough, 120)  # type: ignore[misc]
                broker.kill()
                broker = BrokerProcess(folder, home)
                await asyncio.to_thread(broker.wait)
            over.set()
            async with asyncio.timeout(120):
                await asyncio.gather(*producers)
            state = await region.describe_stream(CREW)
            total = sum(shard.high_watermark for shard in state.state)
            await until(lambda: len(followed) >= total, 120)
            following.cancel()
            async with region.stream(CREW).subscribe("earliest") as reader:
                batches: list[tuple[int, int, bytes]] = []
                async for batch in reader.batches():
                    batches.extend((batch.shard, r.offset, bytes(r.payload)) for r in batch.records())
                    if len(batches) == total:
                        break
        held = {(shard, offset): payload for shard, offset, payload in batches}
        assert len(held) == total == len(set(held.values())), "no duplicate"
        for payload, place in acknowledged.items():
            assert held[place] == payload, "nothing acknowledged is lost or has moved"
        for who in range(PRODUCERS):
            order = [int(p.split()[1]) for _, _, p in sorted(batches) if p.startswith(b"%d " % who)]
            assert order == list(range(len(order))), "each producer's records are in order, without a hole"
        assert sorted(followed) == sorted(batches), "a subscriber across all kills saw each once"
        return len(acknowledged)
    finally:
        broker.kill()


async def test_a_few_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    assert await killed_under_load(tmp_path, KILLS) > KILLS * 40


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif("FELIX_SOAK_KILLS" not in os.environ, reason="make soak runs this")
async def test_a_hundred_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    assert await killed_under_load(tmp_path, SOAK_KILLS) > SOAK_KILLS * 40


async def test_sigterm_says_goodbye_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    folder = fixed_region(tmp_path)
    broker = BrokerProcess(folder, tmp_path)
    try:
        await asyncio.to_thread(broker.wait)
        async with client(folder) as region:
            await region.create_stream(CREW, shards=2, durability=Durability("interval", 10_000))
            acknowledged: dict[bytes, tuple[int, int]] = {}
            over = asyncio.Event()
            producer = asyncio.ensure_future(publish_forever(region, 0, acknowledged, over))
            await until(lambda: len(acknowledged) >= 200)
            assert await asyncio.to_thread(broker.terminate) == 0
            assert "Traceback" not in broker.said()
            before = dict(acknowledged)
            broker = BrokerProcess(folder, tmp_path)
            await asyncio.to_thread(broker.wait)
            await until(lambda: len(acknowledged) >= len(before) + 200)
            over.set()
            await producer
            async with region.stream(CREW).subscribe("earliest") as reader:
                found = await take(reader, len(acknowledged))
        assert [bytes(record.payload) for record in found] == [b"0 %d" % n for n in range(len(found))]
    finally:
        broker.kill()


async def test_memory_of_a_broker_under_a_stalled_subscriber(tmp_path: Path) -> None:
    """A fast publisher, a subscriber that does not read, one that does: the process stays within its limits."""
    limits = "limits:\n  ring_budget: 64MiB\n  delivery_budget: 32MiB\n  catch_up_budget: 16MiB\n  publish_budget: 32MiB\n"
    folder: RegionFolder = fixed_region(tmp_path, extra=limits)
    broker = BrokerProcess(folder, tmp_path)
    try:
        await asyncio.to_thread(broker.wait)
        async with client(folder) as region, client(folder) as other:
            await region.create_stream(CREW)
            await region.stream(CREW).publish(b"warm")
            stalled = [other.stream(CREW).subscribe("earliest", credit_bytes=2 << 20) for _ in range(8)]
            for each in stalled:
                await each.open()
            start = broker.rss_bytes()
            most = start
            records = 12_000
            reading = asyncio.ensure_future(_count(region, records + 1))
            async with region.stream(CREW).publisher() as publisher:
                for at in range(records):
                    await publisher.send(os.urandom(8) * 1000)
                    if not at % 500:
                        most = max(most, broker.rss_bytes())
            async with asyncio.timeout(120):
                assert await reading == records + 1
            most = max(most, broker.rss_bytes())
            gauges = (await region.describe()).gauges
            for name in ("publish", "delivery", "catch_up", "ring"):
                assert gauges[f"{name}_bytes"] <= gauges[f"{name}_bytes_limit"]
            # 96 MB went through. Budgets, the shard's pending appends and the transport's own windows are the bound.
            assert most - start < (64 + 32 + 16 + 32 + 32 + 32) << 20
            async with asyncio.timeout(120):
                assert [r.offset for r in await take(stalled[0], records + 1)] == list(range(records + 1))
            for each in stalled:
                await each.close()
    finally:
        broker.kill()


async def _count(region: felix.RegionClient, records: int) -> int:
    seen = 0
    async with region.stream(CREW).subscribe("earliest", credit_bytes=8 << 20) as reader:
        async for batch in reader.batches():
            seen += len(batch)
            if seen >= records:
                return seen
    return seen


def test_a_second_process_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    folder = fixed_region(tmp_path)
    first = BrokerProcess(folder, tmp_path)
    try:
        first.wait()
        second = BrokerProcess(folder, tmp_path)
        assert second.process.wait(timeout=120) != 0
        assert "runs already, as process" in second.said()
        assert first.process.poll() is None
        assert psutil.Process(first.process.pid).is_running()
    finally:
        first.kill()
    # What the killed one left behind keeps nobody out.
    third = BrokerProcess(folder, tmp_path)
    try:
        begun = time.monotonic()
        third.wait()
        assert time.monotonic() - begun < 60
    finally:
        assert third.terminate() == 0
