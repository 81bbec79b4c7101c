"""Queues, caches and durable subscriptions on streams with three copies, on real brokers in one process: whoever leads next goes on where the
last leader stopped."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from cluster.clustered_region import ClusteredRegion, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import until

import felix
from felix import settings
from felix.errors import Code, RequestError
from region.cluster.records import ShardId
from region.log.companions import RECORDS, JournalKind
from region.log.directory import folder_name, shard_folder
from region.log.disk import DiskLog
from region.log.segment_limits import SegmentLimits
from region.streams import settings as stream_settings

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd
STREAM = "acme/ops/orders"
QUEUE = "acme/ops/jobs"
CACHE = "acme/ops/prices"
NAMES = ("b1", "b2", "b3")
LEASE_MS = 2_000


def other_than(region: ClusteredRegion, name: str) -> str:
    """A broker that runs and does not lead this stream."""
    leader = region.leader(next(iter(region.nodes)), name)
    assert leader
    return next(broker for broker in region.nodes if broker != leader)


async def test_a_durable_subscription_goes_on_with_the_next_leader(tmp_path: Path, etcd: EtcdProcess) -> None:
    async with serving(tmp_path, etcd, lease_ms=LEASE_MS) as region:
        async with region.client("b1") as client:
            await client.create_stream(STREAM, replicas=3, shards=2)
            await client.stream(STREAM).create_subscription("crew")
            leader = region.leader("b1", STREAM)
        async with region.client(other_than(region, STREAM)) as client:
            stream = client.stream(STREAM)
            await stream.publish_many([b"%d" % number for number in range(10)])
            async with stream.consumer("crew") as consumer:
                seen: list[bytes] = []
                for _ in range(6):
                    record = await anext(consumer)
                    assert await consumer.ack(record)
                    seen.append(record.payload)
                await region.stop(leader)
                while len(set(seen)) < 10:
                    record = await anext(consumer)
                    assert record.payload not in seen, "what was acknowledged does not come again"
                    assert await consumer.ack(record)
                    seen.append(record.payload)
            state = await stream.describe_subscription("crew")
            assert [each.lag_records for each in state.shards] == [0, 0]


async def test_a_queues_leases_attempts_and_delays_go_on_with_the_next_leader(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, lease_ms=LEASE_MS) as region:
        async with region.client("b1") as client:
            await client.create_queue(QUEUE, replicas=3, shards=2, visibility=600)
        async with region.client(other_than(region, QUEUE)) as client:
            jobs = client.queue(QUEUE)
            await jobs.put_many([b"%d" % number for number in range(8)])
            await jobs.put(b"later", delay=600)
            held, back, *done = await jobs.lease(6)
            for job in done:
                await job.ack()
            await back.nack(delay=0)
            await region.stop(region.leader(next(iter(region.nodes)), QUEUE))
            # Leases outlast the leader: what is held here is acknowledged there.
            await held.ack()
            left = {job.payload: job.attempts for job in await jobs.lease(10, wait=30)}
            while len(left) < 3:
                left |= {job.payload: job.attempts for job in await jobs.lease(10, wait=30)}
            assert left.pop(back.payload) == 2
            assert set(left.values()) == {1}
            assert {*left, back.payload, held.payload, *(job.payload for job in done)} == {
                b"%d" % number for number in range(8)
            }
            state = await jobs.describe()
            assert (state.ready, state.leased, state.delayed) == (0, 3, 1)


async def test_dead_letters_have_as_many_copies_and_come_back_from_the_next_leader(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, lease_ms=LEASE_MS) as region:
        async with region.client("b1") as client:
            await client.create_queue(QUEUE, replicas=3, attempts=1)
            await client.create_stream("acme/ops/alone")
            with pytest.raises(RequestError, match="another number of copies, 1 and not 3") as refused:
                await client.queue(QUEUE).alter(dead_letter="acme/ops/alone")
            assert refused.value.code is Code.UNSUPPORTED
            with pytest.raises(RequestError, match="another number of copies, 1 and not 3"):
                await client.create_queue("acme/ops/more", replicas=3, dead_letter="acme/ops/alone")
        # Dead letters are placed where the queue was placed, which is not who leads it now: they get one leader all the same.
        placed = region.leader("b1", QUEUE)
        await region.stop(placed)
        at = next(iter(region.nodes))
        await until(lambda: region.leader(at, QUEUE) not in ("", placed))
        await region.start(placed)
        await region.in_sync(at, QUEUE)
        async with region.client(other_than(region, QUEUE)) as client:
            jobs = client.queue(QUEUE)
            await jobs.put_many([b"0", b"1"])
            for job in await jobs.lease(2, wait=30):
                await job.nack(reason="broken")
            at = next(iter(region.nodes))
            await until(lambda: region.leader(at, f"{QUEUE}.dead"))
            await until(lambda: region.leader(at, QUEUE) == region.leader(at, f"{QUEUE}.dead"))

            async def both_are_dead() -> bool:
                return (await jobs.describe()).dead >= 2

            await until(both_are_dead)
            assert (await client.describe_stream(f"{QUEUE}.dead")).replicas == 3
            await region.in_sync(at, QUEUE)
            await region.in_sync(at, f"{QUEUE}.dead")
            leader = region.leader(at, QUEUE)
            await region.stop(leader)
            at = next(iter(region.nodes))
            await until(lambda: region.leader(at, QUEUE) == region.leader(at, f"{QUEUE}.dead") != leader)
            assert await jobs.redrive() == 2
            for job in await jobs.lease(2, wait=30):
                await job.ack()


async def test_a_subscriptions_dead_letters_are_given_back_by_the_next_leader_each_once(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, lease_ms=LEASE_MS) as region:
        async with region.client("b1") as client:
            await client.create_stream(STREAM, replicas=3, shards=2)
            once = felix.SubscriptionSettings("earliest", retries=felix.Retries(attempts_max=1))
            await client.stream(STREAM).create_subscription("crew", once)
        async with region.client(other_than(region, STREAM)) as client:
            stream = client.stream(STREAM)
            published = {b"%d" % number for number in range(200)}
            await stream.publish_many(sorted(published))
            async with stream.consumer("crew") as consumer:
                for _ in published:
                    await consumer.nack(await anext(consumer), reason="broken")

            async def shared_out() -> bool:
                """Each record is a dead letter, or the subscription is to get it."""
                state = await stream.describe_subscription("crew")
                lag = sum(shard.lag_records for shard in state.shards)
                return lag + (await client.queue(f"{STREAM}.dead").describe()).ready == 200

            await until(shared_out)
            for _ in range(2):
                at = next(iter(region.nodes))
                for name in (STREAM, f"{STREAM}.dead"):
                    await region.in_sync(at, name)
                leader = region.leader(at, STREAM)
                redriving = asyncio.ensure_future(stream.redrive_subscription("crew", 60))
                await asyncio.sleep(0.01)
                await region.stop(leader)
                await asyncio.wait([redriving])
                at = next(iter(region.nodes))
                await until(
                    lambda at=at, last=leader: (
                        region.leader(at, STREAM) == region.leader(at, f"{STREAM}.dead") != last
                    )  # type: ignore[misc]
                )
                await region.start(leader)
                await until(shared_out)
            await until(shared_out)
            while (await client.queue(f"{STREAM}.dead").describe()).ready:
                await stream.redrive_subscription("crew")
            got: Counter[bytes] = Counter()
            async with stream.consumer("crew") as consumer:
                for _ in published:
                    record = await anext(consumer)
                    assert record.attempt == 1 and await consumer.ack(record)
                    got[record.payload] += 1
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await anext(consumer)
            assert set(got) == published and set(got.values()) == {1}


async def test_a_journal_that_is_gone_is_copied_anew_and_its_broker_may_lead(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, lease_ms=LEASE_MS) as region:
        async with region.client("b1") as client:
            await client.create_queue(QUEUE, replicas=3)
        leader = region.leader("b1", QUEUE)
        follower, client_at = (broker for broker in region.nodes if broker != leader)
        async with region.client(client_at) as client:
            jobs = client.queue(QUEUE)
            await jobs.put_many([b"%d" % number for number in range(10)])
            for job in await jobs.lease(4):
                await job.ack()
            stream = region.nodes[leader].broker.streams.get(felix.StreamName.parse(QUEUE))
            assert stream is not None
            incarnation = bytes.fromhex(stream.record.incarnation)
            await region.stop(follower)
            data = region.folder.root / region.config.of_broker(follower).data / "streams"
            assert shard_folder(data, stream.name, incarnation, JournalKind.QUEUE.number(0)).is_dir()
            shutil.rmtree(data / folder_name(stream.name, incarnation))
            for job in await jobs.lease(2):
                await job.ack()
            await region.start(follower)
            await region.in_sync(client_at, QUEUE)
            await region.stop(leader)
            # Whoever leads now has all of it.
            await until(lambda: region.leader(client_at, QUEUE) not in ("", leader))

            async def four_are_left() -> bool:
                state = await jobs.describe()
                return state.ready == 4 and not state.leased

            await until(four_are_left)


async def test_a_cache_is_compacted_on_every_copy_and_a_copy_that_is_gone_is_made_of_what_is_left(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_settings, "COMPACTED_SEGMENTS", SegmentLimits(segment_bytes_max=20_000))
    monkeypatch.setattr(settings, "CACHE_LAG_MS", 0)
    async with serving(tmp_path, etcd, lease_ms=LEASE_MS) as region:
        async with region.client("b1") as client:
            await client.create_cache(CACHE, replicas=3)
        leader = region.leader("b1", CACHE)
        follower, client_at = (broker for broker in region.nodes if broker != leader)
        model: dict[str, bytes] = {}
        async with region.client(client_at) as client:
            cache = client.cache(CACHE)

            async def put(rounds: int) -> None:
                for turn in range(rounds):
                    wanted = {f"k{key}": b"%d of %d" % (turn, key) + b"." * 300 for key in range(20)}
                    await cache.put_many(wanted)
                    model.update(wanted)

            await put(20)
            stream = region.nodes[leader].broker.streams.get(felix.StreamName.parse(CACHE))
            assert stream is not None
            for name in NAMES:
                await region.in_sync(client_at, CACHE)
                await compacted(region, name)
            await region.stop(follower)
            data = region.folder.root / region.config.of_broker(follower).data / "streams"
            shutil.rmtree(data / folder_name(stream.name, bytes.fromhex(stream.record.incarnation)))
            await put(10)
            await region.start(follower)
            await region.in_sync(client_at, CACHE)
            assert log_of(region, follower).compaction.clean_to > 0, "it came with the leader's segments"
            assert await cache.increment("count") == 1
            versions = {key.decode(): entry.version async for key, entry in cache.scan()}
            await region.stop(leader)
            await until(lambda: region.leader(client_at, CACHE) not in ("", leader))
            assert await cache.increment("count") == 2
            for key, value in model.items():
                entry = await cache.get(key)
                assert entry is not None and (entry.value, entry.version) == (value, versions[key])


def log_of(region: ClusteredRegion, name: str) -> DiskLog:
    """A broker's copy of the cache."""
    peers = region.nodes[name]._parts.peers
    assert peers is not None
    host = peers.replicas.host
    (hosted,) = (host._hosted[shard] for shard in host.shards if peers.replicas.name_of(shard) == CACHE)
    return hosted.workers[RECORDS].disk.log


async def compacted(region: ClusteredRegion, name: str) -> None:
    """Wait until a broker has compacted its copy."""
    peers = region.nodes[name]._parts.peers
    assert peers is not None
    async with asyncio.timeout(60):
        while not any(one.header.span for one in log_of(region, name).segments):
            await peers.replicas.compact()
            await asyncio.sleep(0.05)


async def test_whoever_writes_while_leaders_change_is_refused_nothing(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """A drain, a rebalance and a rolling restart have others lead: what was certainly not written is asked again by the SDK."""
    async with serving(tmp_path, etcd, lease_ms=LEASE_MS) as region, region.client("b1") as client:
        await client.create_cache(CACHE, replicas=3)
        await client.create_queue(QUEUE, replicas=3)
        await client.create_stream(STREAM, replicas=3)
        cache, jobs = client.cache(CACHE), client.queue(QUEUE)
        done, over = Counter[str](), asyncio.Event()

        async def compare_and_set(key: str) -> None:
            version = 0
            while not over.is_set():
                new = await cache.compare_and_set(key, b"%d" % done[key], version=version)
                assert new is not None, "it was carried out once"
                version, done[key] = new, done[key] + 1

        async def put_and_delete() -> None:
            while not over.is_set():
                await cache.put("k", b"v")
                assert await cache.get("k") is not None
                await cache.delete("k")
                done["put"] += 1

        async def put_jobs() -> None:
            while not over.is_set():
                await jobs.put(b"%d" % done["jobs"])
                done["jobs"] += 1

        async def commit() -> None:
            while not over.is_set():
                async with client.transaction() as transaction:
                    await transaction.publish(STREAM, b"%d" % done["committed"])
                done["committed"] += 1

        def goes_on(before: Counter[str]) -> bool:
            return all(done[each] > before[each] for each in done) or any(each.done() for each in writing)

        def another_leads(name: str, before: str) -> bool:
            leader = region.leader("b1", name)
            if leader and leader == before:
                peers = region.nodes[leader]._parts.peers
                hosted = region.nodes[leader].broker.streams.get(felix.StreamName.parse(name))
                assert peers is not None and hosted is not None
                peers.replicas.host.let_lead(ShardId(hosted.record.incarnation, 0), "drain")
            return leader not in ("", before)

        writing = [
            asyncio.ensure_future(each)
            for each in (
                compare_and_set("a"),
                compare_and_set("b"),
                put_and_delete(),
                put_jobs(),
                commit(),
            )
        ]
        try:
            for _ in range(12):
                for name in (CACHE, QUEUE, STREAM):
                    await until(partial(another_leads, name, region.leader("b1", name)), 30)
                await until(partial(goes_on, done.copy()), 30)
        finally:
            over.set()
            await asyncio.gather(*writing)
        assert len(done) == 5
        assert await client.stream(STREAM).publish(b"last") == done["committed"]
