"""A queue and a durable subscription whose journal outlived the end of their records: what is written in their place is new to them."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from ports import claim_port
from region_home import running, us_east
from region_peer import client

import felix
from felix.address import Address
from felix.consumer_messages import ShardAck, SubscriptionAcks
from felix.queue_messages import Held
from felix.transaction_messages import QueueAcks
from region.folder import RegionFolder
from region.log.epochs import EPOCH_TICK_MS
from region.transactions.participants import QueueParticipant, SubscriptionParticipant

JOBS, ORDERS, READER = "acme/ops/jobs", "acme/ops/orders", "billing"


@contextmanager
def records_end_earlier(folder: RegionFolder, stream: str, copy: Path) -> Iterator[None]:
    """What the stream's only shard gets within the block is lost at its end, and what the journals beside it got is not."""
    (of_stream,) = (folder.root / "data" / "streams").glob(f"{stream.replace('/', '~')}~*")
    shutil.copytree(of_stream / "00000", copy)
    yield
    # Processes take longer than this to stop and to start: epochs of one tick would be one (region.log.epochs).
    time.sleep(1.2 * EPOCH_TICK_MS / 1_000)
    shutil.rmtree(of_stream / "00000")
    shutil.copytree(copy, of_stream / "00000")


async def done(region: felix.RegionClient, count: int) -> list[bytes]:
    """Jobs, each acknowledged."""
    found: list[bytes] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            for job in await region.queue(JOBS).lease(count - len(found), wait=1):
                found.append(bytes(job.payload))
                await job.ack()
    return found


async def read(region: felix.RegionClient, count: int) -> list[bytes]:
    """Records of the durable subscription, each acknowledged."""
    found: list[bytes] = []
    async with asyncio.timeout(60), region.stream(ORDERS).consumer(READER, start="earliest") as consumer:
        while len(found) < count:
            record = await anext(consumer)
            found.append(bytes(record.payload))
            assert await consumer.ack(record)
    return found


@pytest.mark.parametrize("comes_late", [False, True])
async def test_jobs_in_the_place_of_lost_ones_are_done(tmp_path: Path, comes_late: bool) -> None:
    """`comes_late`: by the time that somebody asks, the log is longer than it ever was."""
    folder, listen = us_east(tmp_path / "home"), Address("127.0.0.1", claim_port())
    async with running(folder, listen=listen), client(folder) as region:
        await region.create_queue(JOBS)
        for number in range(5):
            await region.queue(JOBS).put(b"%d" % number)
        assert await done(region, 3) == [b"0", b"1", b"2"]
    with records_end_earlier(folder, JOBS, tmp_path / "copy"):
        async with running(folder, listen=listen), client(folder) as region:
            for number in range(5, 15):
                await region.queue(JOBS).put(b"%d" % number)
            assert await done(region, 10) == [b"%d" % number for number in range(3, 13)]
    for first in (100, 200):
        async with running(folder, listen=listen), client(folder) as region:
            if not comes_late:
                assert (await region.queue(JOBS).describe()).ready == 0
            for number in range(first, first + 12):
                await region.queue(JOBS).put(b"%d" % number)
            assert await done(region, 12) == [b"%d" % number for number in range(first, first + 12)]
            assert (await region.queue(JOBS).describe()).ready == 0


@pytest.mark.parametrize("comes_late", [False, True])
async def test_records_in_the_place_of_lost_ones_are_given_to_a_durable_subscription(
    tmp_path: Path, comes_late: bool
) -> None:
    folder, listen = us_east(tmp_path / "home"), Address("127.0.0.1", claim_port())

    async def publish(region: felix.RegionClient, *numbers: int) -> None:
        for number in numbers:
            await region.stream(ORDERS).publish(b"%d" % number)

    async with running(folder, listen=listen), client(folder) as region:
        await region.create_stream(ORDERS)
        await publish(region, *range(5))
        assert await read(region, 3) == [b"0", b"1", b"2"]
    with records_end_earlier(folder, ORDERS, tmp_path / "copy"):
        async with running(folder, listen=listen), client(folder) as region:
            await publish(region, *range(5, 15))
            assert await read(region, 10) == [b"%d" % number for number in range(3, 13)]
    for first in (100, 200):
        async with running(folder, listen=listen), client(folder) as region:
            if not comes_late:
                await region.stream(ORDERS).describe_subscription(READER)
            await publish(region, *range(first, first + 12))
            assert await read(region, 12) == [b"%d" % number for number in range(first, first + 12)]


@pytest.mark.parametrize("comes_late", [False, True])
async def test_what_a_transaction_acknowledged_of_lost_records_is_not_settled_in_their_place(
    tmp_path: Path, comes_late: bool
) -> None:
    """It is committed, and owed to the queue and to the subscription as the records are lost."""
    folder, listen = us_east(tmp_path / "home"), Address("127.0.0.1", claim_port())
    operator = felix.SpiffeId("us-east", "acme", "operator", "operator")

    async def put(region: felix.RegionClient, *numbers: int) -> None:
        for number in numbers:
            await region.queue(JOBS).put(b"%d" % number)
            await region.stream(ORDERS).publish(b"%d" % number)

    async with running(folder, listen=listen), client(folder) as region:
        await region.create_queue(JOBS)
        await region.create_stream(ORDERS)
        await put(region, *range(5))
        assert await done(region, 5) == await read(region, 5)
    with (
        records_end_earlier(folder, JOBS, tmp_path / "jobs"),
        records_end_earlier(folder, ORDERS, tmp_path / "orders"),
    ):
        async with running(folder, listen=listen) as node, client(folder) as region:
            await put(region, *range(5, 10))
            jobs = await region.queue(JOBS).lease(5, wait=5)
            queues = QueueParticipant(node.broker, node.queues)
            leased = QueueAcks(JOBS, [Held(job.shard, job.offset, 1, job.token) for job in jobs])
            owed = await queues.prepare(operator, msgspec.msgpack.encode(leased))
            async with region.stream(ORDERS).consumer(READER) as consumer:
                record = await anext(consumer)
                acks = SubscriptionAcks(ORDERS, READER, [ShardAck(0, record.generation, [], 5)])
                subscriptions = SubscriptionParticipant(node.broker, node.subscriptions)
                owed_too = await subscriptions.prepare(operator, msgspec.msgpack.encode(acks))
    async with running(folder, listen=listen) as node, client(folder) as region:
        if comes_late:
            await put(region, *range(100, 112))
        for _ in range(2):
            await QueueParticipant(node.broker, node.queues).apply(owed)
            await SubscriptionParticipant(node.broker, node.subscriptions).apply(owed_too)
        if not comes_late:
            await put(region, *range(100, 112))
        wanted = [b"%d" % number for number in range(100, 112)]
        assert await done(region, 12) == wanted
        assert await read(region, 12) == wanted
