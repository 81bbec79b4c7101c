"""A durable subscription's settings are altered while consumers go on: positions stay, and a restart keeps what was altered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from region_home import running
from region_peer import client

import felix
import felix.sync
from felix import Code, RequestError, Retries, RetriesChange, SubscriptionSettings
from felix.consumer import Consumer, ConsumerRecord
from region.folder import RegionFolder
from region.node import Node

pytestmark = pytest.mark.timeout(120)
ORDERS = "acme/payments/orders"


async def publish(region: felix.RegionClient, *payloads: bytes, shard: int = 0) -> None:
    await region.stream(ORDERS).publish_batch([felix.NewRecord(each) for each in payloads], shard=shard)


async def take(consumer: Consumer, count: int) -> list[ConsumerRecord]:
    async with asyncio.timeout(120):
        return [await anext(consumer) for _ in range(count)]


async def asked_for(consumer: Consumer) -> ConsumerRecord:
    """The next record, for a consumer that asks again: one that acknowledges nothing has to show that it lives."""
    async with asyncio.timeout(120):
        while True:
            try:
                async with asyncio.timeout(0.2):
                    return await anext(consumer)
            except TimeoutError:
                continue


async def test_a_shorter_ack_timeout_counts_for_consumers_that_stand(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    async with orders.consumer("billing", start="earliest", ack_timeout=3600) as consumer:
        await publish(region, b"a", b"b")
        first, second = await take(consumer, 2)
        assert await consumer.ack(first)
        state = await orders.alter_subscription("billing", ack_timeout=0.3)
        assert state.settings == SubscriptionSettings("earliest", 300)
        assert (state.shards[0].committed, state.shards[0].unacked) == (1, 1)
        await publish(region, b"c")
        (third,) = await take(consumer, 1)
        again = await asked_for(consumer)
        assert (bytes(again.payload), again.attempt) == (b"c", 2), "what was out before keeps its hour"
        assert consumer._ack_timeout_s == 0.3
        assert await consumer.ack(second) and await consumer.ack(again)
        assert third.offset == again.offset
    assert (await orders.describe_subscription("billing")).shards[0].committed == 3


async def test_more_may_be_out_at_once(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    async with orders.consumer("billing", start="earliest", unacked_max=1) as consumer:
        await publish(region, b"a")
        await publish(region, b"b")
        (first,) = await take(consumer, 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await anext(consumer)
        await orders.alter_subscription("billing", unacked_max=10)
        (second,) = await take(consumer, 1)
        assert bytes(second.payload) == b"b"
        assert await consumer.ack_through(second) and first.offset == 0


async def test_attempts_and_dead_letters_count_for_what_fails_from_then_on(
    region: felix.RegionClient,
) -> None:
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    settings = SubscriptionSettings("earliest", retries=Retries(0, 1, 1))
    async with orders.consumer("billing", settings=settings) as consumer:
        await publish(region, b"a", b"b")
        for _ in range(2):
            for record in await take(consumer, 2):
                await consumer.nack(record)
        first, second = await take(consumer, 2)
        state = await orders.alter_subscription(
            "billing", retries=RetriesChange(attempts_max=3, dead_letter="acme/payments/morgue")
        )
        assert state.settings.retries == Retries(3, 1, 1, "acme/payments/morgue")
        await consumer.nack(first)
        async with asyncio.timeout(120):
            while (await orders.describe_subscription("billing")).dead != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await orders.alter_subscription("billing", retries=RetriesChange(dead_letter=""))
        await consumer.nack(second)
        async with asyncio.timeout(120):
            while True:
                state = await orders.describe_subscription("billing")
                # The position follows once it is durable that the dead letters landed.
                if (state.dead, state.shards[0].committed, state.shards[0].lag_records) == (2, 2, 0):
                    break
                await asyncio.sleep(0.005)
    for name, payload in (("acme/payments/morgue", first), (f"{ORDERS}.dead", second)):
        (dead,) = await region.queue(name).peek()
        assert dead.job.payload == bytes(payload.payload), name


async def test_a_restart_keeps_settings_and_positions_and_later_consumers_are_held_to_them(
    folder: RegionFolder, tmp_path: Path
) -> None:
    data = str(tmp_path / "data")
    made = SubscriptionSettings("earliest", 60_000)
    async with running(folder, data=data), client(folder) as region:
        await region.create_stream(ORDERS, shards=2)
        orders = region.stream(ORDERS)
        for shard in (0, 1):
            await publish(region, *(b"%d" % n for n in range(4)), shard=shard)
        async with orders.consumer("billing", settings=made) as consumer:
            for record in await take(consumer, 8):
                if record.offset < 2:
                    assert await consumer.ack(record)
            await orders.alter_subscription("billing", ack_timeout=20, unacked_max=50, inactive_ttl=3600)
    now = SubscriptionSettings("earliest", 20_000, unacked_max=50, inactive_ttl_ms=3_600_000)
    async with running(folder, data=data), client(folder) as region:
        orders = region.stream(ORDERS)
        state = await orders.describe_subscription("billing")
        assert state.settings == now and [shard.committed for shard in state.shards] == [2, 2]
        with pytest.raises(RequestError) as refused:
            async with orders.consumer("billing", settings=made):
                pass
        assert refused.value.code is Code.CONFLICT
        async with orders.consumer("billing", settings=now) as consumer:
            found = sorted((record.shard, record.offset) for record in await take(consumer, 4))
            assert found == [(0, 2), (0, 3), (1, 2), (1, 3)]


async def test_whoever_made_it_or_has_admin_may_and_what_cannot_be_is_refused(
    folder: RegionFolder, region: felix.RegionClient
) -> None:
    await region.create_stream(ORDERS)
    mine, other = (f"spiffe://us-east.acme/client/{name}-svc" for name in ("billing", "other"))
    await region.put_rights(mine, [f"subscribe {ORDERS}"])
    await region.put_rights(other, [f"subscribe {ORDERS}"])
    async with client(folder, "billing-svc") as maker, client(folder, "other-svc") as stranger:
        await maker.stream(ORDERS).create_subscription("billing")
        await maker.stream(ORDERS).alter_subscription("billing", ack_timeout=5)
        with pytest.raises(RequestError) as refused:
            await stranger.stream(ORDERS).alter_subscription("billing", ack_timeout=6)
        assert refused.value.code is Code.FORBIDDEN
        await region.put_rights(other, [f"subscribe {ORDERS}", f"admin {ORDERS}"])
        await stranger.stream(ORDERS).alter_subscription("billing", ack_timeout=6)
        for name, retries, code in (
            ("nothing", None, Code.NOT_FOUND),
            ("billing", RetriesChange(2, dead_letter="globex/secret/letters"), Code.NOT_FOUND_OR_FORBIDDEN),
            ("billing", RetriesChange(2, dead_letter=ORDERS), Code.CONFIG_INVALID),
            ("billing", RetriesChange(-1), Code.CONFIG_INVALID),
            ("billing", RetriesChange(interval_ms=900_000), Code.CONFIG_INVALID),
        ):
            with pytest.raises(RequestError) as refused:
                await stranger.stream(ORDERS).alter_subscription(name, retries=retries, unacked_max=7)
            assert refused.value.code is code, (name, retries)
    state = await region.stream(ORDERS).describe_subscription("billing")
    assert state.settings == SubscriptionSettings(ack_timeout_ms=6_000), "refused is refused whole"


async def test_from_plain_functions(node: Node, region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)

    def alter(profile: felix.Profile) -> SubscriptionSettings:
        with felix.sync.connect(profile=profile) as plain:
            orders = plain.stream(ORDERS)
            orders.create_subscription("billing")
            return orders.alter_subscription("billing", ack_timeout=9, inactive_ttl=60).settings

    profile = felix.load_profile(node.folder.root.name, home=node.folder.root.parent)
    found = await asyncio.to_thread(alter, profile)
    assert found == SubscriptionSettings(ack_timeout_ms=9_000, inactive_ttl_ms=60_000)
