"""Durable subscriptions over a real broker: what is acknowledged does not come again, what is not does."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from region_home import running
from region_peer import client, until
from region_process import BrokerProcess, fixed_region

import felix
import felix.sync
from felix import Code, Durability, RequestError, Retries
from felix.consumer import Consumer, ConsumerRecord
from felix.consumer_messages import ShardAck, SubscriptionAcks
from felix.errors import UnavailableError
from policy.quantity import Duration
from region.config import SubscriptionsConfig
from region.folder import RegionFolder
from region.node import Node
from region.transactions.coordinator import Coordinator

pytestmark = pytest.mark.timeout(120)
ORDERS = "acme/payments/orders"


async def publish(region: felix.RegionClient, *payloads: bytes, shard: int = 0) -> None:
    await region.stream(ORDERS).publish_batch([felix.NewRecord(each) for each in payloads], shard=shard)


async def take(consumer: Consumer, count: int) -> list[ConsumerRecord]:
    async with asyncio.timeout(120):
        return [await anext(consumer) for _ in range(count)]


def payloads(records: list[ConsumerRecord]) -> list[bytes]:
    return [bytes(record.payload) for record in records]


async def test_what_is_acknowledged_does_not_come_again(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    await publish(region, *(b"%d" % n for n in range(10)))
    async with orders.consumer("billing", start="earliest") as consumer:
        records = await take(consumer, 10)
        assert payloads(records) == [b"%d" % n for n in range(10)] and {r.attempt for r in records} == {1}
        assert all(await asyncio.gather(*(consumer.ack(records[n]) for n in (0, 1, 2, 5, 7))))
    state = await orders.describe_subscription("billing")
    (shard,) = state.shards
    assert (shard.committed, shard.acknowledged, shard.lag_records, shard.consumer) == (3, 2, 5, "")
    assert shard.lag_bytes > 0 and shard.lag_ms >= 0
    async with orders.consumer("billing") as consumer:
        records = await take(consumer, 5)
        assert payloads(records) == [b"3", b"4", b"6", b"8", b"9"]
        assert await consumer.ack_through(records[-1])
    assert (await orders.describe_subscription("billing")).shards[0].committed == 10
    async with orders.consumer("billing", ack="auto") as consumer:
        await publish(region, b"new")
        assert payloads(await take(consumer, 1)) == [b"new"]
    assert (await orders.describe_subscription("billing")).shards[0].committed == 11


async def test_positions_survive_a_restart_of_the_broker(folder: RegionFolder, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data), client(folder) as region:
        await region.create_stream(ORDERS, shards=2)
        for shard in (0, 1):
            await publish(region, *(b"%d %d" % (shard, n) for n in range(6)), shard=shard)
        async with region.stream(ORDERS).consumer("billing", start="earliest") as consumer:
            records = await take(consumer, 12)
            for record in records:
                if record.offset in (0, 1, 4):
                    assert await consumer.ack(record)
    async with running(folder, data=data), client(folder) as region:
        async with region.stream(ORDERS).consumer("billing") as consumer:
            found = sorted((r.shard, r.offset) for r in await take(consumer, 6))
            assert found == [(shard, offset) for shard in (0, 1) for offset in (2, 3, 5)]
        (state,) = await region.stream(ORDERS).subscriptions()
        assert (state.name, state.settings.start) == ("billing", "earliest")


async def test_what_fails_comes_again_later_and_with_its_attempt(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    await publish(region, b"a", b"b", b"c")
    retries = Retries(attempts_max=0, interval_ms=50)
    async with region.stream(ORDERS).consumer("billing", start="earliest", retries=retries) as consumer:
        a, b, c = await take(consumer, 3)
        assert await consumer.nack(b) and await consumer.ack(a) and await consumer.ack(c)
        (again,) = await take(consumer, 1)
        assert (again.offset, bytes(again.payload), again.attempt) == (1, b"b", 2)
        assert await consumer.nack(again, delay=0)
        (again,) = await take(consumer, 1)
        assert again.attempt == 3
        assert await consumer.ack(again)
        state = await region.stream(ORDERS).describe_subscription("billing")
        assert (state.shards[0].committed, state.redelivered) == (3, 2)


async def test_records_of_one_batch_come_again_each_with_its_own_attempt(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    await publish(region, b"a", b"b", b"c")
    async with region.stream(ORDERS).consumer("billing", start="earliest") as consumer:
        a, b, c = await take(consumer, 3)
        assert await consumer.ack(c) and await consumer.nack(a, delay=0)
        (a,) = await take(consumer, 1)
        assert all(await asyncio.gather(consumer.nack(b, delay=0.05), consumer.nack(a, delay=0.05)))
        again = await take(consumer, 2)
        assert sorted((bytes(r.payload), r.attempt) for r in again) == [(b"a", 3), (b"b", 2)]
        assert all(await asyncio.gather(*(consumer.ack(r) for r in again)))


async def test_what_is_not_acknowledged_in_time_comes_again(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    await publish(region, b"a", b"b")
    retries = Retries(attempts_max=0, interval_ms=0)
    async with region.stream(ORDERS).consumer(
        "billing", start="earliest", ack_timeout=1.0, retries=retries
    ) as consumer:
        a, _ = await take(consumer, 2)
        assert await consumer.ack(a)
        (again,) = await take(consumer, 1)
        assert (bytes(again.payload), again.attempt) == (b"b", 2)
        assert await consumer.ack(again)


@pytest.mark.parametrize("batches", [False, True])
async def test_what_is_acknowledged_after_its_time_and_counts_does_not_come_again(
    region: felix.RegionClient, batches: bool
) -> None:
    """The broker had sent it once more already."""
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    await publish(region, *(b"%d" % n for n in range(6)))
    retries = Retries(attempts_max=0, interval_ms=0)
    async with orders.consumer("billing", start="earliest", ack_timeout=1.0, retries=retries) as consumer:
        records = await take(consumer, 6)
        (share,) = consumer._shares.values()
        # The second time has no end in this test.
        await orders.alter_subscription("billing", ack_timeout=600)
        await until(lambda: share.again and consumer._queue)
        if batches:
            assert await consumer.ack_nowait(records[0]) and await consumer.ack(records[3])
            async with asyncio.timeout(120):
                batch = await anext(consumer.batches())
            assert batch.ranges == [(1, 3), (4, 6)] and batch.attempt == 2
            assert await consumer.ack(batch)
        else:
            # Some before the batch is handed out once more, and some while that is done.
            assert await consumer.ack(records[0])
            again = await take(consumer, 1)
            assert (
                await consumer.ack(records[1])
                and await consumer.ack(records[2])
                and await consumer.ack(records[4])
            )
            again += await take(consumer, 2)
            assert [(each.offset, each.attempt) for each in again] == [(1, 2), (3, 2), (5, 2)]
            assert await consumer.ack(again[1]) and await consumer.ack(again[2])
        assert not share.handed and not any(ranges for _, ranges in share.again)
        await publish(region, b"next")
        assert payloads(await take(consumer, 1)) == [b"next"]
    assert (await orders.describe_subscription("billing")).shards[0].committed == 6


async def test_who_works_record_by_record_loses_none_to_the_timeout(region: felix.RegionClient) -> None:
    """What waits in the client has its clock begun anew while records are handed out."""
    await region.create_stream(ORDERS)
    await publish(region, *(b"%d" % n for n in range(12)))
    async with region.stream(ORDERS).consumer("billing", start="earliest", ack_timeout=2.0) as consumer:
        seen = []
        for _ in range(12):
            (record,) = await take(consumer, 1)
            await asyncio.sleep(0.2)
            assert await consumer.ack(record)
            seen.append((record.offset, record.attempt))
        assert seen == [(n, 1) for n in range(12)]


async def test_dead_letters_have_their_reason_and_the_rest_goes_on(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    await publish(region, b"good", b"poison", b"fine")
    retries = Retries(attempts_max=2, interval_ms=0)
    async with region.stream(ORDERS).consumer("billing", start="earliest", retries=retries) as consumer:
        failed = 0
        done = []
        while len(done) < 2 or failed < 2:
            (record,) = await take(consumer, 1)
            if bytes(record.payload) == b"poison":
                failed += 1
                assert record.attempt == failed
                await consumer.nack(record, reason="it does not parse")
            else:
                done.append(bytes(record.payload))
                assert await consumer.ack(record)
        assert done == [b"good", b"fine"]

        async with asyncio.timeout(120):
            while True:
                state = await region.stream(ORDERS).describe_subscription("billing")
                # The position follows once it is durable that the dead letter landed.
                if state.dead == 1 and state.shards[0].committed == 3:
                    break
                await asyncio.sleep(0.01)
    async with region.stream(f"{ORDERS}.dead").subscribe("earliest") as reader:
        async with asyncio.timeout(120):
            letter = await anext(reader)
    assert bytes(letter.payload) == b"poison"
    assert letter.headers["felix.dead.reason"] == b"it does not parse"
    assert letter.headers["felix.dead.subscription"] == b"billing"
    assert (letter.headers["felix.dead.offset"], letter.headers["felix.dead.attempts"]) == (b"1", b"2")


async def test_shards_are_shared_and_change_hands_without_loss(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS, shards=4)
    orders = region.stream(ORDERS)
    seen: set[bytes] = set()
    done: Counter[bytes] = Counter()
    wanted = {b"%d-%d" % (n, shard) for n in range(60) for shard in range(4)}

    async def work(consumer: Consumer) -> None:
        async for record in consumer:
            await asyncio.sleep(0.001)
            assert not done[bytes(record.payload)], "what was acknowledged came again"
            seen.add(bytes(record.payload))
            if await consumer.ack(record):
                done[bytes(record.payload)] += 1

    first = orders.consumer("billing", start="earliest", consumer="first")
    await first.open()
    await until(lambda: first.shards == [0, 1, 2, 3])
    tasks = [asyncio.ensure_future(work(first))]
    second = orders.consumer("billing", consumer="second")
    for n in range(60):
        for shard in range(4):
            await publish(region, b"%d-%d" % (n, shard), shard=shard)
        if n == 20:
            await second.open()
            tasks.append(asyncio.ensure_future(work(second)))
        if n == 45:
            await until(lambda: len(first.shards) == 2 and len(second.shards) == 2)
            await first.close()
    await until(lambda: seen == wanted or any(task.done() for task in tasks[1:]))
    assert seen == wanted and second.shards == [0, 1, 2, 3]
    async with asyncio.timeout(100):
        while any(each.lag_records for each in (await orders.describe_subscription("billing")).shards):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    state = await orders.describe_subscription("billing")
    assert [c.name for c in state.consumers] == ["second"]
    await second.close()
    await asyncio.gather(*tasks)
    assert set(done.values()) == {1}


async def test_what_is_acknowledged_while_a_consumer_leaves_disturbs_nobody(
    region: felix.RegionClient,
) -> None:
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    async with orders.consumer("audit", start="earliest") as beside:
        leaving = orders.consumer("billing", start="earliest")
        await leaving.open()
        await publish(region, b"a")
        (record,) = await take(leaving, 1)
        closing = asyncio.ensure_future(leaving.close())
        await asyncio.sleep(0)
        assert not await leaving.ack(record) and not await leaving.nack(record)
        await closing
        async with orders.consumer("billing") as other:
            assert payloads(await take(other, 1)) == [b"a"]
        assert beside.resumes == 0, "the connection stood"


async def test_one_more_consumer_than_shards_stands_by_and_steps_in(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    async with (
        orders.consumer("billing", start="earliest") as first,
        orders.consumer("billing") as second,
    ):
        state = await orders.describe_subscription("billing")
        assert [each.state for each in state.consumers] == ["active", "standby"]
        await first.close()
        await publish(region, b"a")
        assert payloads(await take(second, 1)) == [b"a"]


async def test_a_stalled_consumer_is_found_by_its_timeout(
    folder: RegionFolder, region: felix.RegionClient
) -> None:
    await region.create_stream(ORDERS, shards=2)
    orders = region.stream(ORDERS)
    retries = Retries(attempts_max=0, interval_ms=0)
    async with (
        orders.consumer("billing", start="earliest", ack_timeout=1.0, retries=retries) as stalled,
        orders.consumer("billing") as other,
    ):
        await until(lambda: len(stalled.shards) == 1 and len(other.shards) == 1)
        (held,) = stalled.shards
        await publish(region, b"stuck", shard=held)
        (record,) = await take(stalled, 1)
        (again,) = await take(other, 1)
        assert (bytes(again.payload), again.shard) == (b"stuck", held)
        assert await other.ack(again)
        assert not await stalled.ack(record), "its acknowledgement comes too late"
        assert stalled.lost_acks == 1
        await until(lambda: len(stalled.shards) == 1)


async def test_exclusive_has_one_active_consumer(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS, shards=3)
    orders = region.stream(ORDERS)
    async with (
        orders.consumer("billing", start="earliest", exclusive=True) as first,
        orders.consumer("billing") as second,
    ):
        await until(lambda: first.shards == [0, 1, 2])
        assert second.shards == []
        await first.close()
        await until(lambda: second.shards == [0, 1, 2])


async def test_seek_goes_back_forward_and_to_a_time_and_fences_what_is_out(
    region: felix.RegionClient,
) -> None:
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    await publish(region, *(b"%d" % n for n in range(5)))
    await asyncio.sleep(0.005)
    middle_ms = time.time_ns() // 1_000_000
    await asyncio.sleep(0.005)
    await publish(region, *(b"%d" % n for n in range(5, 8)))
    async with orders.consumer("billing", start="earliest") as consumer:
        records = await take(consumer, 8)
        assert await consumer.ack_through(records[-1])
        await orders.seek_subscription("billing", 6)
        again = await take(consumer, 2)
        assert payloads(again) == [b"6", b"7"]
        await orders.seek_subscription("billing", "earliest")
        assert not await consumer.ack(again[0]), "it was out when the position moved"
        assert payloads(await take(consumer, 8)) == [b"%d" % n for n in range(8)]
        state = await orders.describe_subscription("billing")
        assert state.shards[0].committed == 0
        await orders.seek_subscription("billing", datetime.fromtimestamp(middle_ms / 1000, UTC))
        assert payloads(await take(consumer, 3)) == [b"5", b"6", b"7"]
        await orders.seek_subscription("billing", "latest")
        await publish(region, b"new")
        assert payloads(await take(consumer, 1)) == [b"new"]
        await orders.seek_subscription("billing", offsets={0: 2})
        assert payloads(await take(consumer, 1)) == [b"2"]
        with pytest.raises(RequestError) as caught:
            await orders.seek_subscription("billing", 100)
        assert caught.value.code is Code.OFFSET_OUT_OF_RANGE


async def test_unacked_records_are_bounded(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    for n in range(20):
        await publish(region, b"%d" % n)
    async with region.stream(ORDERS).consumer("billing", start="earliest", unacked_max=5) as consumer:
        records = await take(consumer, 5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await anext(consumer)
        assert await consumer.ack(records[3])
        assert payloads(await take(consumer, 1)) == [b"5"]


async def test_settings_are_compared_and_a_subscription_must_be_made_by_somebody(
    region: felix.RegionClient,
) -> None:
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    with pytest.raises(RequestError) as caught:
        await orders.consumer("billing").open()
    assert caught.value.code is Code.NOT_FOUND
    made = await orders.create_subscription("billing", felix.SubscriptionSettings("earliest"))
    assert made.shards[0].committed == 0
    with pytest.raises(RequestError) as caught:
        await orders.create_subscription("billing")
    assert caught.value.code is Code.ALREADY_EXISTS
    with pytest.raises(RequestError) as caught:
        await orders.consumer("billing", start="latest").open()
    assert caught.value.code is Code.CONFLICT
    async with orders.consumer("billing", start="earliest") as consumer:
        await publish(region, b"a")
        assert payloads(await take(consumer, 1)) == [b"a"]
        await orders.delete_subscription("billing")
        with pytest.raises(RequestError) as caught:
            await take(consumer, 1)
        assert caught.value.code is Code.NOT_FOUND
    assert await orders.subscriptions() == []
    async with orders.consumer("billing", start="earliest") as consumer:
        assert payloads(await take(consumer, 1)) == [b"a"], "the new one knows nothing of the old"


async def test_ten_consumers_that_come_first_make_one_subscription(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS, shards=2)
    orders = region.stream(ORDERS)
    consumers = [orders.consumer("billing", start="earliest") for _ in range(10)]
    await asyncio.gather(*(each.open() for each in consumers))
    assert len(await orders.subscriptions()) == 1
    await until(lambda: sorted(shard for each in consumers for shard in each.shards) == [0, 1])
    for each in consumers:
        await each.close()


async def test_rights_end_a_consumer_at_once_and_creators_may_seek(
    folder: RegionFolder, region: felix.RegionClient
) -> None:
    await region.create_stream(ORDERS)
    mine, other = (f"spiffe://us-east.acme/client/{name}-svc" for name in ("billing", "other"))
    await region.put_rights(mine, [f"subscribe {ORDERS}"])
    await region.put_rights(other, [f"subscribe {ORDERS}"])
    async with client(folder, "billing-svc") as app, client(folder, "other-svc") as stranger:
        async with app.stream(ORDERS).consumer("billing", start="earliest") as consumer:
            await publish(region, b"a")
            await take(consumer, 1)
            with pytest.raises(RequestError) as caught:
                await stranger.stream(ORDERS).seek_subscription("billing", "latest")
            assert caught.value.code is Code.FORBIDDEN
            with pytest.raises(RequestError):
                await stranger.stream(ORDERS).delete_subscription("billing")
            await app.stream(ORDERS).seek_subscription("billing", "earliest")
            with pytest.raises(RequestError) as caught:
                await app.stream(ORDERS).create_subscription(
                    "elsewhere",
                    felix.SubscriptionSettings(retries=Retries(dead_letter="globex/secret/letters")),
                )
            assert caught.value.code is Code.NOT_FOUND_OR_FORBIDDEN
            await region.put_rights(mine, [])
            with pytest.raises(RequestError) as caught:
                while True:
                    await take(consumer, 1)
            assert caught.value.code is Code.NOT_FOUND_OR_FORBIDDEN
        with pytest.raises(RequestError):
            await app.stream(ORDERS).consumer("billing").open()


async def test_who_administers_a_stream_moves_its_subscriptions_and_reads_no_record(
    folder: RegionFolder, region: felix.RegionClient
) -> None:
    await region.create_stream(ORDERS)
    await region.stream(ORDERS).create_subscription("billing", felix.SubscriptionSettings("earliest"))
    await publish(region, b"a", b"b", b"c")
    await region.put_rights("spiffe://us-east.acme/client/other-svc", [f"admin {ORDERS}"])
    async with client(folder, "other-svc") as admin:
        orders = admin.stream(ORDERS)
        assert [each.name for each in await orders.subscriptions()] == ["billing"]
        assert [each.name async for each in admin.list_subscriptions()] == ["billing"]
        await orders.seek_subscription("billing", 2)
        await orders.alter_subscription("billing", ack_timeout=7)
        state = await orders.describe_subscription("billing")
        assert (state.shards[0].committed, state.settings.ack_timeout_ms) == (2, 7_000)
        for reading in (
            orders.consumer("billing").open(),
            orders.create_subscription("another"),
            orders.subscribe("earliest").open(),
        ):
            with pytest.raises(RequestError) as caught:
                await reading
            assert caught.value.code is Code.NOT_FOUND_OR_FORBIDDEN
        await orders.delete_subscription("billing")
    assert await region.stream(ORDERS).subscriptions() == []


async def test_an_ephemeral_stream_has_them_too_while_the_broker_lives(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS, durability=Durability("ephemeral"), ring_bytes=1 << 20)
    orders = region.stream(ORDERS)
    async with orders.consumer("billing", start="earliest") as consumer:
        await publish(region, b"a", b"b")
        a, _ = await take(consumer, 2)
        assert await consumer.ack(a)
    async with orders.consumer("billing") as consumer:
        assert payloads(await take(consumer, 1)) == [b"b"]


async def test_retention_that_overtakes_a_position_is_told_and_counted(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS, durability=Durability("ephemeral"), ring_bytes=1 << 20)
    orders = region.stream(ORDERS)
    async with orders.consumer("billing", start="earliest"):
        pass
    for n in range(40):
        await publish(region, b"%d" % n + b"." * 60_000)
    gaps: list[felix.Gap] = []
    async with orders.consumer("billing", on_gap=gaps.append) as consumer:
        (record,) = await take(consumer, 1)
        (gap,) = gaps
        assert (gap.first_offset, gap.next_offset) == (0, record.offset)
        async with asyncio.timeout(120):
            while True:
                state = await orders.describe_subscription("billing")
                assert state.skipped == record.offset
                # The position follows once the step over the gap is durable.
                if state.shards[0].committed == record.offset:
                    break
                await asyncio.sleep(0.01)


async def test_what_is_counted_for_alerts_never_falls_with_a_subscription(
    node: Node, region: felix.RegionClient
) -> None:
    """Prometheus takes a fall for a restart, and what is left for an increase: an alert of lost records."""
    await region.create_stream(ORDERS, durability=Durability("ephemeral"), ring_bytes=1 << 20)
    orders = region.stream(ORDERS)
    for name in ("billing", "shipping"):
        async with orders.consumer(name, start="earliest"):
            pass
    for n in range(40):
        await publish(region, b"%d" % n + b"." * 60_000)
    skipped = 0
    for name in ("billing", "shipping"):
        async with orders.consumer(name) as consumer:
            skipped += (await take(consumer, 1))[0].offset
    assert node.gauges.values()["consumer_skipped_records"] == skipped > 0
    await orders.delete_subscription("billing")
    assert node.gauges.values()["consumer_skipped_records"] == skipped
    await region.delete_stream(ORDERS)
    assert node.gauges.values()["consumer_skipped_records"] == skipped


async def test_a_stream_that_is_created_again_is_read_from_its_start(
    node: Node, region: felix.RegionClient
) -> None:
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    await publish(region, b"old", b"older")
    async with orders.consumer("billing", start="earliest") as consumer:
        await take(consumer, 1)
        await region.delete_stream(ORDERS)
        with pytest.raises(RequestError) as caught:
            await take(consumer, 2)
        assert caught.value.code in (Code.NOT_FOUND, Code.NOT_FOUND_OR_FORBIDDEN)
    await region.create_stream(ORDERS)
    async with client(node.folder) as other:
        await publish(other, b"new")
    async with orders.consumer("billing") as consumer:
        assert payloads(await take(consumer, 1)) == [b"new"]


async def test_who_is_inactive_for_long_is_deleted(folder: RegionFolder, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    often = SubscriptionsConfig(sweep_every=Duration(20))
    async with running(folder, data=data, subscriptions=often), client(folder) as region:
        await region.create_stream(ORDERS)
        orders = region.stream(ORDERS)
        async with orders.consumer("billing", start="earliest", inactive_ttl=0.2):
            await asyncio.sleep(0.4)
            assert len(await orders.subscriptions()) == 1
        async with asyncio.timeout(120):
            while await orders.subscriptions():  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0.02)


async def test_batches_are_acknowledged_whole(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    await publish(region, b"a", b"b", b"c")
    await publish(region, b"d")
    async with orders.consumer("billing", start="earliest") as consumer:
        seen = []
        async for batch in consumer.batches():
            seen.append([bytes(record.payload) for record in batch.records()])
            assert await consumer.ack(batch)
            if len(seen) == 2:
                break
        assert seen == [[b"a", b"b", b"c"], [b"d"]]
    assert (await orders.describe_subscription("billing")).shards[0].committed == 4


def test_the_synchronous_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    broker = BrokerProcess(fixed_region(tmp_path), tmp_path)
    try:
        broker.wait()
        with felix.sync.connect("us-east") as region:
            orders = region.stream(ORDERS)
            orders.create()
            orders.publish_many([b"a", b"b", b"c"])
            orders.create_subscription("billing", felix.SubscriptionSettings("earliest"))
            with orders.consumer("billing") as consumer:
                a, b, c = (next(consumer) for _ in range(3))
                assert consumer.ack(a) and consumer.nack(b, delay=0) and consumer.ack(c)
                again = consumer.next(30)
                assert again is not None and (again.offset, again.attempt) == (1, 2)
                assert consumer.ack_through(again) and consumer.shards == [0]
                with pytest.raises(TimeoutError):
                    consumer.next(0.05)
            assert orders.describe_subscription("billing").shards[0].committed == 3
            assert orders.seek_subscription("billing", "earliest").startswith("billing goes on")
            with orders.consumer("billing", ack="auto") as consumer:
                assert [bytes(next(consumer).payload) for _ in range(2)] == [b"a", b"b"]
            assert orders.describe_subscription("billing").shards[0].committed == 2
            orders.delete_subscription("billing")
            assert orders.subscriptions() == []
    finally:
        broker.kill()


async def test_a_consumer_outlives_its_broker_and_is_told_where_the_stream_is_another(tmp_path: Path) -> None:
    """What an ephemeral stream held is gone with the broker; a durable one goes on where it was."""
    folder = fixed_region(tmp_path)
    gaps: list[felix.Gap] = []
    broker = BrokerProcess(folder, tmp_path)
    try:
        await asyncio.to_thread(broker.wait)
        async with client(folder) as region:
            await region.create_stream(ORDERS)
            passing = region.stream("acme/payments/passing")
            await passing.create(durability=Durability("ephemeral"), ring_bytes=1 << 20)
            await publish(region, b"0", b"1")
            await passing.publish(b"old")
            async with (
                region.stream(ORDERS).consumer("billing", start="earliest") as consumer,
                passing.consumer("billing", start="earliest", on_gap=gaps.append) as other,
            ):
                first, _ = await take(consumer, 2)
                assert await consumer.ack(first)
                assert payloads(await take(other, 1)) == [b"old"]
                broker.kill()
                broker = BrokerProcess(folder, tmp_path)
                await asyncio.to_thread(broker.wait)
                async with client(folder) as second:
                    await publish(second, b"2")
                    await second.stream("acme/payments/passing").publish(b"new")
                assert payloads(await take(consumer, 2)) == [b"1", b"2"] and consumer.resumes == 1
                assert not await consumer.ack(first), "of an assignment that is over"
                assert payloads(await take(other, 1)) == [b"new"]
                assert [gap.reason for gap in gaps] == [felix.GapReason.RECREATED]
    finally:
        broker.kill()


async def test_what_a_transaction_gave_up_while_the_disk_was_full_is_delivered_again(
    node: Node, region: felix.RegionClient
) -> None:
    await region.create_stream(ORDERS)
    await publish(region, b"a")
    async with region.stream(ORDERS).consumer("billing", start="earliest") as consumer:
        await take(consumer, 1)
        held = node.subscriptions._held[felix.StreamName.parse(ORDERS)].by_name["billing"]
        acks = [SubscriptionAcks(ORDERS, "billing", [ShardAck(0, held.progress(0).generation, [0, 1])])]
        assert node.subscriptions.check(acks) is None
        actor = held._stores[0]._actor
        assert actor is not None and actor.journal._log is not None
        journal = actor.journal._log._core
        journal.hold = UnavailableError("The disk is full.", code=Code.DISK_FULL)
        assert held.refusal() is not None
        node.subscriptions.abandon(acks)
        journal.hold = None
        assert payloads(await take(consumer, 1)) == [b"a"]


async def test_a_seek_is_refused_while_a_transaction_is_being_committed(
    region: felix.RegionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it acknowledged before the seek must not be settled after it."""
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    await publish(region, *(b"%d" % n for n in range(5)))
    held, write = list[Callable[[], None]](), Coordinator._write

    def late(coordinator: Coordinator, *what: Any) -> None:
        held.append(lambda: write(coordinator, *what))

    async with orders.consumer("billing", start="earliest") as consumer:
        records = await take(consumer, 5)
        transaction = region.transaction()
        await transaction.begin()
        for record in records:
            await transaction.acknowledge(record, consumer=consumer)
        monkeypatch.setattr(Coordinator, "_write", late)
        commit = asyncio.create_task(transaction.commit())
        await until(lambda: held)
        with pytest.raises(UnavailableError, match="is being committed"):
            await orders.seek_subscription("billing", "earliest")
        (decide,) = held
        decide()
        await commit
        await orders.seek_subscription("billing", "earliest")
        assert payloads(await take(consumer, 5)) == [b"%d" % n for n in range(5)]
