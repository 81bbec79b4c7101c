"""Queues, caches and durable subscriptions of a region of several brokers: each is served by its stream's leader, and reached through
every broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cluster.clustered_region import ClusteredRegion, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import until

import felix
from felix.batch import decode_header
from felix.errors import RequestError

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd
LEASE_MS = 2_000


async def of_kind(
    region: ClusteredRegion, operator: felix.RegionClient, kind: str, broker: str, shards: int = 2
) -> str:
    """A new stream, queue or cache that this broker leads."""
    for number in range(16):
        name = f"acme/ops/{kind}-of-{broker}-{number}"
        if kind == "queue":
            await operator.create_queue(name, shards=shards, visibility=60)
        elif kind == "cache":
            await operator.create_cache(name, shards=shards)
        else:
            await operator.create_stream(name, shards=shards)
        if region.leader("b1", name) == broker:
            return name
    raise AssertionError(f"of 16 streams none was placed on {broker}")


async def test_a_queue_is_worked_on_through_brokers_that_do_not_lead_it_and_over_its_leaders_restart(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with (
        serving(tmp_path, etcd) as region,
        region.client("b1") as first,
        region.client("b3") as third,
    ):
        name = await of_kind(region, first, "queue", "b2")
        await first.queue(name).put_many([b"%d" % number for number in range(20)])
        done: list[bytes] = []
        async with third.queue(name).consume(prefetch=4) as worker:
            for _ in range(8):
                job = await anext(worker)
                await job.ack()
                done.append(job.payload)
            (held,) = await first.queue(name).lease(1)
            await region.stop("b2")
            await region.start("b2")
            # Leases outlast the broker: what is held here is acknowledged there.
            await held.ack()
            done.append(held.payload)
            while len(done) < 20:
                job = await anext(worker)
                await job.ack()
                done.append(job.payload)
        assert sorted(done) == sorted(b"%d" % number for number in range(20))
        state = await first.queue(name).describe()
        assert (state.ready, state.leased, state.delayed, state.dead) == (0, 0, 0, 0)


async def test_a_cache_and_its_watch_follow_the_leader(tmp_path: Path, etcd: EtcdProcess) -> None:
    async with (
        serving(tmp_path, etcd) as region,
        region.client("b1") as first,
        region.client("b3") as third,
    ):
        name = await of_kind(region, first, "cache", "b2")
        keys = [f"k{number}" for number in range(10)]
        await first.cache(name).put_many(dict.fromkeys(keys, b"before"))
        assert await third.cache(name).increment("count") == 1
        async with third.cache(name).mirror() as mirror:
            assert len(mirror) == 11
            await region.stop("b2")
            puts = [asyncio.ensure_future(first.cache(name).put(key, b"after")) for key in keys]
            await region.start("b2")
            versions = await asyncio.gather(*puts)
            assert await third.cache(name).increment("count") == 2
            for key, version in zip(keys, versions, strict=True):
                await mirror.reached(key, version)
            assert {bytes(mirror[key]) for key in keys} == {b"after"}
        entry = await third.cache(name).get("k3")
        assert entry is not None and entry.value == b"after"


async def test_a_durable_subscription_keeps_its_positions_over_its_leaders_restart(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with (
        serving(tmp_path, etcd) as region,
        region.client("b1") as first,
        region.client("b3") as third,
    ):
        name = await of_kind(region, first, "stream", "b2")
        stream = third.stream(name)
        await stream.create_subscription("crew")
        await first.stream(name).publish_many([b"%d" % number for number in range(10)])
        async with stream.consumer("crew") as consumer:
            seen = []
            for _ in range(6):
                record = await anext(consumer)
                assert await consumer.ack(record)
                seen.append(record.payload)
            await region.stop("b2")
            await region.start("b2")
            while len(set(seen)) < 10:
                record = await anext(consumer)
                assert record.payload not in seen, "what was acknowledged does not come again"
                assert await consumer.ack(record)
                seen.append(record.payload)
        state = await first.stream(name).alter_subscription("crew", ack_timeout=7)
        assert state.settings.ack_timeout_ms == 7_000
        assert [each.lag_records for each in state.shards] == [0, 0]
        async with stream.consumer("crew") as consumer:
            await first.stream(name).publish(b"again")
            assert await consumer.nack(await anext(consumer), delay=0)
            assert await consumer.ack(await anext(consumer))
        (listed,) = [each async for each in first.list_subscriptions()]
        assert (listed.redelivered, listed.leader, listed.shards) == (1, "", []), "its leader was asked"
        await first.stream(name).seek_subscription("crew", start="earliest")
        state = await third.stream(name).describe_subscription("crew")
        assert sum(each.lag_records for each in state.shards) == 11
        assert [each.name async for each in first.list_subscriptions()] == ["crew"]
        await region.stop("b2")
        (listed,) = [each async for each in first.list_subscriptions()]
        assert (listed.name, listed.leader) == ("crew", "b2"), "who has the rest is down"
        await region.start("b2")
        await third.stream(name).delete_subscription("crew")

        async def none_is_listed() -> bool:
            return not [each async for each in first.list_subscriptions()]

        await until(none_is_listed)  # b1 hears from the metadata store of what b2 deleted


async def test_dead_letters_are_placed_beside_their_queue_and_brought_back_through_any_broker(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with (
        serving(tmp_path, etcd) as region,
        region.client("b1") as first,
        region.client("b3") as third,
    ):
        for broker in ("b1", "b2", "b3"):
            name = f"acme/ops/jobs-{broker}"
            await first.create_queue(name, attempts=1)
            jobs = third.queue(name)
            await jobs.put_many([b"0", b"1"])
            for job in await jobs.lease(2, wait=30):
                await job.nack(reason="broken")
            leader = region.leader("b1", name)
            await until(lambda name=name, at=leader: region.leader(at, f"{name}.dead"))  # type: ignore[misc]
            assert region.leader(leader, f"{name}.dead") == leader
            await region.stop(leader)
            await region.start(leader)
            assert await jobs.redrive() == 2
            for job in await jobs.lease(2, wait=30):
                await job.ack()


async def test_a_subscriptions_dead_letters_are_given_back_through_any_broker(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with (
        serving(tmp_path, etcd) as region,
        region.client("b1") as first,
        region.client("b3") as third,
    ):
        once = felix.SubscriptionSettings("earliest", retries=felix.Retries(attempts_max=1))
        for broker in ("b1", "b2", "b3"):
            name = await of_kind(region, first, "stream", broker)
            stream = third.stream(name)
            await stream.create_subscription("crew", once)
            await stream.publish_many([b"0", b"1"])
            async with stream.consumer("crew") as consumer:
                for _ in range(2):
                    await consumer.nack(await anext(consumer), reason="broken")

                async def both_are_dead(stream: felix.Stream = stream) -> bool:
                    return (await stream.describe_subscription("crew")).dead == 2

                await until(both_are_dead)
                assert region.leader(broker, f"{name}.dead") == broker
                assert (await first.stream(name).redrive_subscription("crew")).redriven == 2
                again = [await anext(consumer) for _ in range(2)]
                assert [record.attempt for record in again] == [1, 1]
                for record in again:
                    assert await consumer.ack(record)


async def test_a_stream_that_another_broker_leads_is_not_named_for_dead_letters(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd) as region, region.client("b1") as client:
        name = await of_kind(region, client, "queue", "b2")
        other = await of_kind(region, client, "queue", "b3")
        # Who is asked hears of it from the store, as everybody does.
        await until(lambda: region.leader("b2", other) == "b3")
        with pytest.raises(RequestError, match=r"stay on the broker that leads it, b2, and .* is on b3"):
            await client.queue(name).alter(dead_letter=other)
        stream = await of_kind(region, client, "stream", "b2")
        with pytest.raises(RequestError, match="is on b3"):
            await client.stream(stream).create_subscription(
                "crew", felix.SubscriptionSettings(retries=felix.Retries(dead_letter=other))
            )
        # One that is made for it, is made beside it.
        await client.create_queue("acme/ops/more", dead_letter=other)
        assert region.leader("b1", "acme/ops/more") == "b3"
        # Two that named one before it was there: it can be with one of them alone.
        await client.queue(name).alter(dead_letter="acme/ops/common", attempts=1)
        await client.queue(other).alter(dead_letter="acme/ops/common", attempts=1)
        for each in (name, other):
            jobs = client.queue(each)
            await jobs.put(b"x")
            (job,) = await jobs.lease(1, wait=30)
            await job.nack()
        await until(lambda: region.leader("b1", "acme/ops/common"))
        keeper = region.leader("b1", "acme/ops/common")
        kept, turned = (name, other) if keeper == "b2" else (other, name)
        (letter,) = await client.queue("acme/ops/common").lease(1, wait=30)
        assert letter.headers["felix.dead.stream"].decode() == kept
        own = client.queue(f"{turned}.dead")
        (letter,) = await own.lease(1, wait=30)
        assert letter.payload == b"x"
        with pytest.raises(RequestError, match="stay on the broker"):
            await client.queue(turned).redrive()


async def test_without_its_lease_a_leader_answers_for_no_view_and_goes_on_once_the_store_is_back(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, lease_ms=LEASE_MS) as region, region.client("b1") as client:
        jobs = client.queue(await of_kind(region, client, "queue", "b2"))
        cache = client.cache(await of_kind(region, client, "cache", "b2"))
        stream = client.stream(await of_kind(region, client, "stream", "b2"))
        await jobs.put_many([b"held", b"free"])
        await cache.put("k", b"v")
        await stream.create_subscription("crew", felix.SubscriptionSettings("earliest"))
        await stream.publish(b"x")
        (held,) = await jobs.lease(1, wait=30)
        async with stream.consumer("crew") as consumer:
            record = await anext(consumer)
            etcd.freeze()
            try:
                refused = region.nodes["b2"].broker.metrics.refusals
                await until(lambda: region.clustered("b2").member.refusal())
                before = refused["not_leader"]
                asked = [
                    asyncio.ensure_future(each)
                    for each in (cache.get("k"), cache.increment("n"), jobs.describe())
                ]
                acknowledging = held.ack(), consumer.ack_nowait(record)
                await until(lambda: refused["not_leader"] >= before + 8)
                assert not any(each.done() for each in (*asked, *acknowledging))
            finally:
                etcd.thaw()
            entry, number, _ = await asyncio.gather(*asked)
            assert entry is not None and (entry.value, number) == (b"v", 1)
            _, is_settled = await asyncio.gather(*acknowledging)
            left = await jobs.describe()
            assert left.leased + left.ready == 1
            if not is_settled:  # there was an election: it comes again
                assert bytes((await anext(consumer)).payload) == b"x"


async def test_what_a_leader_writes_under_a_new_lease_is_sealed_under_a_key_of_its_own(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """R18: a machine that was stopped may have been resumed twice, from one image of its memory."""

    async def sealed() -> list[tuple[int, bytes]]:
        """Epoch and key of each batch."""
        hosted = region.nodes["b2"].broker.streams.get(stream.name)
        assert hosted is not None
        headers = [decode_header(each.data) for each in await hosted.shard(0).read_sealed(0, 1 << 20)]
        return [(each.leader_epoch, each.key_id) for each in headers]

    async with serving(tmp_path, etcd, lease_ms=LEASE_MS) as region, region.client("b1") as client:
        stream = client.stream(await of_kind(region, client, "stream", "b2", shards=1))
        await stream.publish(b"x")
        await stream.publish(b"y")
        assert len(set(await sealed())) == 1
        leases: list[str] = []
        region.clustered("b2").member.on_lease(lambda: leases.append("another"))
        etcd.freeze()
        try:
            await asyncio.sleep(2 * LEASE_MS / 1_000)
        finally:
            etcd.thaw()
        await until(lambda: leases)
        await stream.publish(b"z")
        assert region.leader("b1", str(stream.name)) == "b2"
        _, (epoch, before), (epoch_now, after) = await sealed()
        assert before != after and epoch_now == epoch
