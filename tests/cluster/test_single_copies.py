"""Streams of one copy in a region of several brokers: they move, get more copies and give them up again, and lose nothing on the way."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from cluster.clustered_region import ClusteredRegion, publishing, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import payloads, until

import felix
from cli import stream as stream_commands
from felix.settings import Durability
from region.cluster.records import ShardId, ShardRecord
from region.copies.replicas import is_kept_elsewhere
from region.folder import STREAMS
from region.log.directory import shard_folder

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd
STREAM = "acme/ops/orders"
NAMES = ("b1", "b2", "b3")


@pytest.fixture
async def region(tmp_path: Path, etcd: EtcdProcess) -> AsyncIterator[ClusteredRegion]:
    async with serving(tmp_path, etcd, len(NAMES)) as region:
        yield region


def records_of(region: ClusteredRegion, name: str = STREAM) -> list[ShardRecord]:
    broker = next(iter(region.nodes))
    stream = region.nodes[broker].broker.streams.get(felix.StreamName.parse(name))
    assert stream is not None
    shards = region.clustered(broker).member.mirror.view.shards
    return [shards[ShardId(stream.record.incarnation, number)] for number in range(stream.shard_count)]


async def until_all(
    region: ClusteredRegion, holds: Callable[[ShardRecord], bool], name: str = STREAM
) -> None:
    async with asyncio.timeout(60):
        member = region.clustered(next(iter(region.nodes))).member
        await member.until(lambda: all(holds(record) for record in records_of(region, name)))


async def test_the_only_copy_leaves_a_drained_broker_under_load(region: ClusteredRegion) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=1)
        async with publishing(client, STREAM) as published:
            await until(lambda: len(published) >= 20)
            (before,) = records_of(region)
            await client.drain_broker(before.leader)
            await until_all(region, lambda record: before.leader not in record.replicas and not record.target)
            there = len(published)
            await until(lambda: len(published) >= there + 20)
        (after,) = records_of(region)
        assert len(after.replicas) == len(after.isr) == 1 and after.leader in after.replicas
        assert await payloads(client, STREAM, len(published)) == published
        state = await client.describe()
        assert {each.alone for each in state.brokers} == {0}
        # It is there after its new broker was started again, too.
        await region.stop(after.leader)
        await region.start(after.leader)
        assert await client.stream(STREAM).publish(b"last") == len(published)
        assert await payloads(client, STREAM, len(published) + 1) == [*published, b"last"]


async def test_more_copies_and_one_again(region: ClusteredRegion) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, shards=2, replicas=1)
        for number in range(10):
            await client.stream(STREAM).publish(b"%d" % number, key=b"%d" % number)
        altered = await client.alter_stream(STREAM, replicas=3)
        assert (altered.replicas, altered.min_in_sync) == (3, 2)
        await until_all(region, lambda record: len(record.isr) == 3 and record.min == 2 and not record.target)
        leader = records_of(region)[0].leader
        gone = leader if leader != "b1" else "b2"
        await region.stop(gone)
        for number in range(10, 20):
            await client.stream(STREAM).publish(b"%d" % number, key=b"%d" % number)
        await region.start(gone)
        await until_all(region, lambda record: len(record.isr) == 3)
        await client.alter_stream(STREAM, replicas=1)
        await until_all(region, lambda record: len(record.replicas) == 1 and record.min == 1)
        for number in range(20, 30):
            await client.stream(STREAM).publish(b"%d" % number, key=b"%d" % number)
        found = await payloads(client, STREAM, 30)
        assert sorted(found) == sorted(b"%d" % number for number in range(30))


async def test_the_only_copy_whose_folder_went_is_told_of_and_no_empty_one_takes_its_place(
    region: ClusteredRegion, tmp_path: Path
) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=1)
        await client.stream(STREAM).publish_many([b"%d" % number for number in range(10)])
        leader = records_of(region)[0].leader
    other = next(name for name in NAMES if name != leader)
    stream = region.nodes[leader].broker.streams.get(felix.StreamName.parse(STREAM))
    assert stream is not None
    data = Path(region.config.of_broker(leader).data)
    folder = shard_folder(
        region.folder.root / data / STREAMS, stream.name, bytes.fromhex(stream.record.incarnation), 0
    )
    await region.stop(leader)
    shutil.move(folder, tmp_path / "lost+found")
    await region.start(leader)
    async with region.client(other) as client:

        async def told(*words: str) -> None:
            async with asyncio.timeout(60):
                while not any(  # noqa: ASYNC110 - each asks anew
                    all(word in problem for word in words) for problem in (await client.describe()).alarms
                ):
                    await asyncio.sleep(0.1)

        await told(f"Broker {leader}: 1 log does not serve", "is gone, or empty")
        await client.alter_stream(STREAM, replicas=3)
        await told(f"Nobody leads {STREAM} shard 0", f"{leader} cannot open its copy", "is gone, or empty")
        assert not folder.exists()
        await region.stop(leader)
        shutil.move(tmp_path / "lost+found", folder)
        await region.start(leader)
        await until_all(region, lambda record: len(record.isr) == 3)
        assert await payloads(client, STREAM, 10) == [b"%d" % number for number in range(10)]


async def test_views_go_along_with_the_only_copy_of_several_shards(region: ClusteredRegion) -> None:
    queue, cache = "acme/ops/jobs", "acme/ops/prices"
    async with region.client("b1") as client:
        await client.create_stream(STREAM, shards=4, replicas=1)
        stream = client.stream(STREAM)
        await stream.create_subscription("crew")
        await stream.publish_many([b"%d" % number for number in range(12)])
        await client.create_queue(queue, shards=2, replicas=1, visibility=600)
        jobs = client.queue(queue)
        await jobs.put_many([b"%d" % number for number in range(6)])
        # Up to as many, and without `wait` nothing where none is ready at once.
        leased = await jobs.lease(4, wait=30)
        while len(leased) < 4:
            leased += await jobs.lease(4 - len(leased), wait=30)
        held, *done = leased
        for job in done:
            await job.ack()
        await client.create_cache(cache, replicas=1)
        prices = client.cache(cache)
        await prices.put("a", b"1")
        await prices.put("b", b"2")
        before = {name: records_of(region, name)[0].leader for name in (STREAM, queue, cache)}
        async with stream.consumer("crew") as consumer:
            seen = [await anext(consumer) for _ in range(5)]
            for record in seen:
                assert await consumer.ack(record)
            for name, leader in before.items():
                await client.drain_broker(leader)
                await until_all(
                    region,
                    lambda record, leader=leader: leader not in record.replicas and not record.target,
                    name,
                )
                await client.drain_broker(leader, drain=False)
            payloads_seen = {record.payload for record in seen}
            while len(payloads_seen) < 12:
                record = await anext(consumer)
                assert record.payload not in {each.payload for each in seen}
                # One of before a move counts no longer, and comes once more.
                if await consumer.ack(record):
                    payloads_seen.add(record.payload)
        await held.ack()
        left = await jobs.lease(10, wait=30)
        while len(left) < 2:
            left += await jobs.lease(10, wait=30)
        assert {job.payload for job in (*left, held, *done)} == {b"%d" % number for number in range(6)}
        assert (await prices.get("a")).value == b"1"
        await prices.put("a", b"3")
        assert (await prices.get("a")).value == b"3" and (await prices.get("b")).value == b"2"
        for name in before:
            assert len({record.leader for record in records_of(region, name)}) == 1


async def test_what_is_in_memory_goes_on_with_another_broker_once_its_own_has_stopped(
    region: ClusteredRegion,
) -> None:
    async with region.client("b1") as client:
        made = await client.create_stream(STREAM, shards=2, durability=Durability("ephemeral"))
        assert await client.stream(STREAM).publish(b"0", key=b"k") == 0
        leader = records_of(region)[0].leader
        await client.drain_broker(leader)
        assert await client.stream(STREAM).publish(b"1", key=b"k") == 1, "it stays while its broker runs"
    await region.stop(leader)
    async with region.client(next(iter(region.nodes))) as client:
        assert await client.stream(STREAM).publish(b"2", key=b"k") == 0
        state = await client.describe_stream(STREAM)
        assert state.incarnation != made.incarnation
        assert len({record.leader for record in records_of(region)} - {leader}) == 1


async def test_a_copy_that_was_taken_away_while_its_broker_was_down_is_made_again(
    region: ClusteredRegion,
) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=3)
        for number in range(10):
            await client.stream(STREAM).publish(b"%d" % number)
        await until_all(region, lambda record: len(record.isr) == 3)
        await region.stop("b3")
        await client.drain_broker("b3")
        await until_all(region, lambda record: "b3" not in record.replicas and not record.target)
        for number in range(10, 20):
            await client.stream(STREAM).publish(b"%d" % number)
        data = region.folder.root / region.config.of_broker("b3").data / "streams"
        assert [*data.glob("*orders*/*/*.seg")]
        await region.start("b3")
        # What stayed on its disk goes once it is back.
        await until(lambda: not [*data.glob("*orders*/*")])
        await client.drain_broker("b3", drain=False)
        await until_all(region, lambda record: len(record.isr) == 3 and not record.target)
        assert await payloads(client, STREAM, 20) == [b"%d" % number for number in range(20)]


def test_what_a_broker_has_is_kept_while_others_may_lack_something() -> None:
    whole = ShardRecord(
        stream=STREAM,
        epoch=3,
        election="0" * 16,
        leader="b1",
        replicas=("b1", "b2"),
        isr={"b1": 1, "b2": 1},
        min=2,
    )
    changed = msgspec.structs.replace
    assert is_kept_elsewhere(whole)
    assert not is_kept_elsewhere(changed(whole, leader=""))
    assert not is_kept_elsewhere(changed(whole, isr={"b1": 1}))
    assert not is_kept_elsewhere(changed(whole, target=("b1", "b2", "b3")))
    assert not is_kept_elsewhere(changed(whole, unclean=2))


async def test_a_stream_that_nobody_leads_is_described_all_the_same(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why, and what goes on from there, is what its operator asks for."""
    async with serving(tmp_path, etcd, 2) as region:
        async with region.client("b1") as client:
            await client.create_stream(STREAM, replicas=1)
            (shard,) = (await client.describe_stream(STREAM)).state
        gone = shard.leader
        (other,) = {*region.nodes} - {gone}
        await region.stop(gone)
        monkeypatch.setattr(stream_commands, "connect", lambda *_: region.client(other))
        monkeypatch.setattr(stream_commands, "UNLED_S", 0.2)

        async with asyncio.timeout(60):
            while True:
                (shard,) = (await stream_commands._describe("", "", STREAM)).state
                if not shard.leader and f"{gone} is not alive" in shard.stopped:
                    break
                await asyncio.sleep(0.1)
        assert shard.replicas == [gone]
