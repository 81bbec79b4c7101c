"""Brokers are killed (SIGKILL) while dead letters are given back: each comes again once, and none is lost."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from region_peer import client
from region_process import BrokerProcess, fixed_region

import felix
from felix import Retries
from felix.errors import FelixError

ORDERS = "acme/payments/orders"
KILLS = int(os.environ.get("FELIX_DURABLE_KILLS", "3"))
RECORDS = 40 * (KILLS + 2)
AT_A_TIME = 5

pytestmark = [pytest.mark.timeout(600), pytest.mark.fault]


async def shared_out(region: felix.RegionClient, count: int) -> tuple[int, int]:
    """How many are dead letters, and how many the subscription is to get, once each record is one of both."""
    async with asyncio.timeout(120):
        while True:
            with suppress(FelixError):
                state = await region.stream(ORDERS).describe_subscription("billing")
                lag = sum(shard.lag_records for shard in state.shards)
                dead = await region.queue(f"{ORDERS}.dead").describe()
                if lag + dead.ready == count:
                    return dead.ready, lag
            await asyncio.sleep(0.02)


async def test_a_redrive_under_kills_brings_each_dead_letter_back_once(tmp_path: Path) -> None:
    folder = fixed_region(tmp_path)
    chance = random.Random(11)
    broker = BrokerProcess(folder, tmp_path)
    published = {b"%d" % number for number in range(RECORDS)}
    try:
        await asyncio.to_thread(broker.wait)
        async with client(folder) as region:
            await region.create_stream(ORDERS, shards=2)
            orders = region.stream(ORDERS)
            wanted = felix.SubscriptionSettings("earliest", retries=Retries(attempts_max=1, interval_ms=0))
            for name in ("billing", "audit"):
                await orders.create_subscription(name, wanted)
            await orders.publish_many(sorted(published))
            async with orders.consumer("billing") as consumer, orders.consumer("audit") as other:
                for _ in range(RECORDS):
                    await consumer.nack(await anext(consumer), reason="no")
                    assert await other.ack(await anext(other))
                assert await shared_out(region, RECORDS) == (RECORDS, 0)

            killed = 0
            over = asyncio.Event()

            async def redrive() -> None:
                while not over.is_set():
                    with suppress(FelixError):
                        await orders.redrive_subscription("billing", AT_A_TIME)

            while killed < KILLS:
                over.clear()
                before, _ = await shared_out(region, RECORDS)
                assert before > 0
                redriving = asyncio.ensure_future(redrive())
                await asyncio.sleep(chance.uniform(0.005, 0.06))
                broker.kill()
                killed += 1
                over.set()
                broker = BrokerProcess(folder, tmp_path)
                await asyncio.to_thread(broker.wait)
                redriving.cancel()
                after, _ = await shared_out(region, RECORDS)
                assert after <= before
            while (await shared_out(region, RECORDS))[0]:
                with suppress(felix.UnavailableError):
                    await orders.redrive_subscription("billing")
            got: Counter[bytes] = Counter()
            async with orders.consumer("billing") as consumer, orders.consumer("audit") as other:
                async with asyncio.timeout(120):
                    for _ in range(RECORDS):
                        record = await anext(consumer)
                        assert record.attempt == 1
                        got[bytes(record.payload)] += 1
                        assert await consumer.ack(record)
                for each in (consumer, other):
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.5):
                            await anext(each)
            assert set(got) == published and set(got.values()) == {1}
    finally:
        broker.kill()
