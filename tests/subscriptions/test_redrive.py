"""Dead letters of a durable subscription that are given back: each is delivered once more, to that subscription alone, and is gone from its queue."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from long_runs import count
from region_home import running
from region_peer import client

import felix
import felix.sync
from felix import Code, Durability, RequestError, Retries
from felix.batch import NewRecord
from felix.consumer import Consumer, ConsumerRecord
from felix.messages import Redriven, RedriveSubscription
from felix.names import StreamName
from region.folder import RegionFolder
from region.node import Node
from region.subscriptions import redrive as module
from region.subscriptions.letters import LetterQueues
from region.views.dead_letter import DeadLetters

pytestmark = pytest.mark.timeout(180)
ORDERS = "acme/payments/orders"
DEAD = f"{ORDERS}.dead"
ONCE = Retries(attempts_max=1, interval_ms=0)


async def publish(region: felix.RegionClient, *payloads: bytes, shard: int = 0) -> None:
    await region.stream(ORDERS).publish_batch([NewRecord(each) for each in payloads], shard=shard)


async def take(consumer: Consumer, records: int) -> list[ConsumerRecord]:
    async with asyncio.timeout(120):
        return [await anext(consumer) for _ in range(records)]


async def nothing(consumer: Consumer, wait_s: float = 0.3) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(wait_s):
            await anext(consumer)


async def dead(region: felix.RegionClient, name: str, letters: int) -> None:
    """So many records of the subscription have landed among the dead letters, and all others are acknowledged."""
    async with asyncio.timeout(120):
        while True:
            state = await region.stream(ORDERS).describe_subscription(name)
            if state.dead >= letters and not any(shard.lag_records for shard in state.shards):
                return
            await asyncio.sleep(0.01)


async def fail(region: felix.RegionClient, name: str, poison: set[bytes], records: int) -> None:
    """A consumer takes so many records, and fails at those that are `poison`."""
    async with region.stream(ORDERS).consumer(name) as consumer:
        for record in await take(consumer, records):
            if bytes(record.payload) in poison:
                assert await consumer.nack(record, reason="it does not parse")
            else:
                assert await consumer.ack(record)
        await dead(region, name, len(poison))


async def subscribed(
    region: felix.RegionClient, *names: str, retries: Retries = ONCE, **settings: int
) -> None:
    for name in names:
        wanted = felix.SubscriptionSettings("earliest", retries=retries, **settings)
        await region.stream(ORDERS).create_subscription(name, wanted)


async def left(region: felix.RegionClient, queue: str = DEAD) -> list[bytes]:
    return [bytes(job.job.payload) for job in await region.queue(queue).peek(100)]


async def test_dead_letters_come_again_to_their_subscription_alone(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    await subscribed(region, "billing", "audit")
    records = [b"%d" % number for number in range(10)]
    await publish(region, *records)
    await fail(region, "billing", {b"2", b"5", b"6"}, 10)
    await fail(region, "audit", set(), 10)
    assert await left(region) == [b"2", b"5", b"6"]

    orders = region.stream(ORDERS)
    assert await orders.redrive_subscription("billing", 1) == Redriven(1)
    assert await left(region) == [b"5", b"6"]
    assert await orders.redrive_subscription("billing") == Redriven(2)
    assert await left(region) == []
    assert await orders.redrive_subscription("billing") == Redriven(0)
    (shard,) = (await orders.describe_subscription("billing")).shards
    assert (shard.committed, shard.lag_records) == (2, 3)
    async with orders.consumer("billing") as consumer, orders.consumer("audit") as other:
        again = await take(consumer, 3)
        assert [(r.offset, bytes(r.payload), r.attempt) for r in again] == [
            (2, b"2", 1),
            (5, b"5", 1),
            (6, b"6", 1),
        ]
        assert all(await asyncio.gather(*(consumer.ack(record) for record in again)))
        await nothing(other)
        await nothing(consumer)
    (shard,) = (await orders.describe_subscription("billing")).shards
    assert (shard.committed, shard.lag_records) == (10, 0)


@pytest.mark.parametrize("begun", [True, False])
async def test_a_consumer_that_is_there_gets_them_beside_what_it_has_in_hand(
    region: felix.RegionClient, begun: bool
) -> None:
    """Also one that joined within a batch and was sent nothing yet: what stands before its place is no redelivery to it."""
    await region.create_stream(ORDERS)
    await subscribed(region, "billing")
    await publish(region, b"a", b"poison", b"c")
    await fail(region, "billing", {b"poison"}, 3)
    orders = region.stream(ORDERS)
    async with orders.consumer("billing") as consumer:
        in_hand = []
        if begun:
            await publish(region, b"d", b"e")
            in_hand = await take(consumer, 2)
            assert await consumer.ack(in_hand[0])
        assert (await orders.redrive_subscription("billing")).redriven == 1
        (again,) = await take(consumer, 1)
        assert (bytes(again.payload), again.attempt, again.offset) == (b"poison", 1, 1)
        for record in (*in_hand[1:], again):
            assert await consumer.ack(record)
        await nothing(consumer)
        assert consumer.lost_acks == 0
        # Once more it fails, once more it is given back.
        await publish(region, b"poison")
        (record,) = await take(consumer, 1)
        await consumer.nack(record, reason="no")
        await dead(region, "billing", 2)
        assert (await orders.redrive_subscription("billing")).redriven == 1
        (again,) = await take(consumer, 1)
        assert again.offset == record.offset and again.attempt == 1
        assert await consumer.ack(again)


async def test_a_consumer_within_a_batch_is_not_refused_what_it_acknowledges(
    region: felix.RegionClient,
) -> None:
    await region.create_stream(ORDERS)
    await subscribed(region, "billing")
    await publish(region, b"poison", b"b", b"c", b"d")
    orders = region.stream(ORDERS)
    async with orders.consumer("billing") as consumer:
        records = await take(consumer, 4)
        await consumer.nack(records[0], reason="no")
        assert await consumer.ack(records[1])
        async with asyncio.timeout(120):
            while (await orders.describe_subscription("billing")).shards[0].committed != 2:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0.01)
    # Its place is at c, in the middle of the batch that poison begins.
    async with orders.consumer("billing") as consumer:
        redriving = asyncio.ensure_future(orders.redrive_subscription("billing"))
        got: Counter[bytes] = Counter()
        while got.total() < 3 or not redriving.done():
            try:
                async with asyncio.timeout(2):
                    record = await anext(consumer)
            except TimeoutError:
                break
            got[bytes(record.payload)] += 1
            await consumer.ack(record)
        assert (await redriving).redriven == 1
        assert set(got) == {b"poison", b"c", b"d"} and got[b"poison"] == 1


async def test_what_is_leased_gone_or_anothers_stays(region: felix.RegionClient, node: Node) -> None:
    await region.create_stream(ORDERS, durability=Durability("ephemeral"), ring_bytes=1 << 20)
    await subscribed(region, "billing", "audit")
    await publish(region, b"old")
    await fail(region, "billing", {b"old"}, 1)
    await fail(region, "audit", {b"old"}, 1)
    for number in range(40):
        await publish(region, b"%d" % number + b"." * 60_000)
    await region.stream(ORDERS).seek_subscription("billing", "latest")
    await publish(region, b"new", b"newer")
    await fail(region, "billing", {b"new", b"newer"}, 2)
    queue = region.queue(DEAD)
    jobs = await queue.lease(3)
    assert [job.payload for job in jobs] == [b"old", b"old", b"new"]
    await jobs[0].release()
    await jobs[1].release()

    redriven = await region.stream(ORDERS).redrive_subscription("billing")
    assert redriven == Redriven(1, gone=1, held=1)
    assert sorted(await left(region)) == [b"new", b"old", b"old"]
    async with region.stream(ORDERS).consumer("billing") as consumer:
        assert [bytes(record.payload) for record in await take(consumer, 1)] == [b"newer"]
    assert await jobs[2].ack() is None
    assert (await region.stream(ORDERS).redrive_subscription("audit")) == Redriven(0, gone=1)


async def test_dead_letters_of_one_that_had_the_name_before_stay(
    region: felix.RegionClient, node: Node
) -> None:
    """Of another subscription, of another stream, and what only looks like a dead letter."""
    await region.create_stream(ORDERS)
    await subscribed(region, "billing")
    await publish(region, b"same")
    await fail(region, "billing", {b"same"}, 1)
    orders = region.stream(ORDERS)
    await orders.delete_subscription("billing")
    await subscribed(region, "billing")
    assert await orders.redrive_subscription("billing") == Redriven(0)

    await fail(region, "billing", {b"same"}, 1)
    await region.delete_stream(ORDERS)
    await region.create_stream(ORDERS)
    async with client(node.folder) as another:
        await publish(another, b"same")
    assert await orders.redrive_subscription("billing") == Redriven(0)
    await fail(region, "billing", set(), 1)
    (first, *_) = await region.queue(DEAD).peek(1)
    await region.queue(DEAD).put(first.job.payload, headers=dict(first.job.headers))
    assert await orders.redrive_subscription("billing") == Redriven(0)
    assert len(await left(region)) == 3


async def test_only_its_creator_and_who_administers_the_stream_may(
    folder: RegionFolder, region: felix.RegionClient
) -> None:
    await region.create_stream(ORDERS)
    mine, other = (f"spiffe://us-east.acme/client/{name}-svc" for name in ("billing", "other"))
    await region.put_rights(mine, [f"subscribe {ORDERS}"])
    await region.put_rights(other, [f"subscribe {ORDERS}"])
    async with client(folder, "billing-svc") as app, client(folder, "other-svc") as stranger:
        await subscribed(app, "billing")
        await publish(region, b"a")
        await fail(app, "billing", {b"a"}, 1)
        with pytest.raises(RequestError) as caught:
            await stranger.stream(ORDERS).redrive_subscription("billing")
        assert caught.value.code is Code.FORBIDDEN
        with pytest.raises(RequestError) as caught:
            await app.stream(ORDERS).redrive_subscription("nobody")
        assert caught.value.code is Code.NOT_FOUND
        await region.put_rights(other, [f"admin {ORDERS}"])
        assert (await stranger.stream(ORDERS).redrive_subscription("billing")).redriven == 1


async def test_hundreds_are_given_back_in_pages_over_all_shards(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS, shards=3)
    await subscribed(region, "billing", unacked_max=20)
    for shard in range(3):
        await publish(region, *(b"%d %d" % (shard, number) for number in range(120)), shard=shard)
    poison = {b"%d %d" % (shard, number) for shard in range(3) for number in range(120)}
    orders = region.stream(ORDERS)
    async with orders.consumer("billing") as consumer:
        for _ in range(360):
            (record,) = await take(consumer, 1)
            await consumer.nack(record, reason="no")
        await dead(region, "billing", 360)
        given = await orders.redrive_subscription("billing", 250)
        assert given == Redriven(250)
        assert len(await left(region)) == 100, "as many as a peek shows"
        assert (await orders.redrive_subscription("billing")).redriven == 110
        got: Counter[bytes] = Counter()
        for _ in range(360):
            (record,) = await take(consumer, 1)
            state = await orders.describe_subscription("billing")
            # As many as were asked for, and a batch more; a batch of these is a shard's.
            assert all(shard.unacked <= 20 for shard in state.shards)
            got[bytes(record.payload)] += 1
            assert record.attempt == 1 and await consumer.ack(record)
        await nothing(consumer)
    assert set(got) == poison and set(got.values()) == {1}


async def test_redrives_beside_consumers_that_work_and_fail_lose_nothing(
    folder: RegionFolder, region: felix.RegionClient
) -> None:
    """Every record is acknowledged in the end, and once."""
    chance = random.Random(9)
    await region.create_stream(ORDERS, shards=2)
    await subscribed(region, "billing", retries=Retries(attempts_max=2, interval_ms=1), unacked_max=30)
    wanted = [b"%d" % number for number in range(count(300, 3_000))]
    done: Counter[bytes] = Counter()
    redriven = 0
    over = asyncio.Event()

    async def work(wait_s: float) -> None:
        async with client(folder) as own:
            while not over.is_set():
                async with own.stream(ORDERS).consumer("billing", credit_bytes=2 << 20) as consumer:
                    for _ in range(chance.randrange(20, 80)):
                        try:
                            async with asyncio.timeout(wait_s):
                                record = await anext(consumer)
                        except TimeoutError:
                            break
                        if chance.random() < 0.4:
                            await consumer.nack(record, reason="no")
                        elif await consumer.ack(record):
                            done[bytes(record.payload)] += 1

    async def redrive() -> None:
        nonlocal redriven
        async with client(folder) as own:
            while not over.is_set():
                redriven += (
                    await own.stream(ORDERS).redrive_subscription("billing", chance.randrange(9))
                ).redriven
                await asyncio.sleep(chance.uniform(0, 0.05))

    tasks = [asyncio.ensure_future(each) for each in (work(0.3), work(0.5), redrive(), redrive())]
    try:
        for at in range(0, len(wanted), 20):
            await publish(region, *wanted[at : at + 20], shard=at // 20 % 2)
        async with asyncio.timeout(150):
            while len(done) < len(wanted):
                await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                assert not any(task.done() for task in tasks), tasks
    finally:
        over.set()
        await asyncio.wait(tasks)
    for task in tasks:
        task.result()
    assert set(done) == set(wanted) and set(done.values()) == {1}
    assert redriven > 10
    assert await left(region) == []


async def test_what_was_given_back_is_there_after_a_restart(folder: RegionFolder, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data), client(folder) as region:
        await region.create_stream(ORDERS)
        await subscribed(region, "billing")
        await publish(region, *(b"%d" % number for number in range(10)))
        await fail(region, "billing", {b"3", b"7"}, 10)
        assert (await region.stream(ORDERS).redrive_subscription("billing", 1)).redriven == 1
    async with running(folder, data=data), client(folder) as region:
        assert await left(region) == [b"7"]
        async with region.stream(ORDERS).consumer("billing") as consumer:
            (record,) = await take(consumer, 1)
            assert bytes(record.payload) == b"3" and await consumer.ack(record)
            await nothing(consumer)


async def test_what_a_seek_had_brought_back_comes_once(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    await subscribed(region, "billing")
    records = [b"%d" % number for number in range(6)]
    for each in records:
        await publish(region, each)
    await fail(region, "billing", {b"1", b"4"}, 6)
    orders = region.stream(ORDERS)
    await orders.alter_subscription("billing", unacked_max=1)
    async with orders.consumer("billing") as consumer:
        await orders.seek_subscription("billing", "earliest")
        (first,) = await take(consumer, 1)
        assert (await orders.redrive_subscription("billing")).redriven == 2
        assert await consumer.ack(first)
        got = [bytes(first.payload)]
        for _ in range(5):
            (record,) = await take(consumer, 1)
            got.append(bytes(record.payload))
            assert record.attempt == 1 and await consumer.ack(record)
        assert got == records
        await nothing(consumer)
    assert await left(region) == []


async def test_a_named_queue_and_the_streams_own_are_both_looked_through(region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    await region.create_queue("acme/payments/letters")
    await subscribed(region, "billing")
    await publish(region, b"a")
    await fail(region, "billing", {b"a"}, 1)
    orders = region.stream(ORDERS)
    change = felix.RetriesChange(dead_letter="acme/payments/letters")
    await orders.alter_subscription("billing", retries=change)
    await publish(region, b"b")
    async with orders.consumer("billing") as consumer:
        (record,) = await take(consumer, 1)
        await consumer.nack(record, reason="no")
        await dead(region, "billing", 2)
    assert await left(region, "acme/payments/letters") == [b"b"]
    assert (await orders.redrive_subscription("billing")).redriven == 2
    assert await left(region, "acme/payments/letters") == await left(region) == []


async def test_batches_of_which_everything_is_acknowledged_are_not_sent_again(
    region: felix.RegionClient, node: Node
) -> None:
    """A dead letter may stand far behind: whoever gets it does not get all that came since."""
    await region.create_stream(ORDERS)
    await subscribed(region, "billing")
    for number in range(50):
        await publish(region, b"%d" % number)
    await fail(region, "billing", {b"4"}, 50)
    assert (await region.stream(ORDERS).redrive_subscription("billing")).redriven == 1
    stream = node.broker.streams.get(StreamName.parse(ORDERS))
    assert stream is not None
    before = stream.delivered_records
    async with region.stream(ORDERS).consumer("billing") as consumer:
        (record,) = await take(consumer, 1)
        assert bytes(record.payload) == b"4" and await consumer.ack(record)
        await publish(region, b"new")
        (record,) = await take(consumer, 1)
        assert bytes(record.payload) == b"new" and await consumer.ack(record)
    assert stream.delivered_records - before == 2


async def test_the_synchronous_client_gives_them_back(
    folder: RegionFolder, region: felix.RegionClient
) -> None:
    await region.create_stream(ORDERS)
    await subscribed(region, "billing")
    await publish(region, b"a")
    await fail(region, "billing", {b"a"}, 1)

    def redrive() -> Redriven:
        profile = felix.load_profile("us-east", home=folder.root.parent)
        with felix.sync.connect(profile=profile) as connected:
            return connected.stream(ORDERS).redrive_subscription("billing")

    assert await asyncio.to_thread(redrive) == Redriven(1)


async def refused(*_: object) -> None:
    raise felix.UnavailableError("The queue's disk is full.")


async def written_anew(node: Node, name: str) -> None:
    """The journal of the subscription's first shard is its state."""
    held = node.subscriptions._held[StreamName.parse(ORDERS)].by_name[name]
    actor = held._stores[0]._actor
    assert actor is not None
    actor.journal._begin_snapshot()
    async with asyncio.timeout(20):
        while True:
            if actor.journal.snapshots:
                return
            await asyncio.sleep(0.01)


async def test_what_a_seek_settled_on_its_way_back_stays_settled_in_a_journal_that_is_written_anew(
    folder: RegionFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data) as node, client(folder) as region:
        await region.create_stream(ORDERS)
        await subscribed(region, "billing")
        await publish(region, *(b"%d" % number for number in range(10)))
        await fail(region, "billing", {b"3", b"7"}, 10)
        orders = region.stream(ORDERS)
        monkeypatch.setattr(LetterQueues, "remove", refused)
        asked = asyncio.ensure_future(orders.redrive_subscription("billing"))
        async with asyncio.timeout(20):
            while True:
                if (await orders.describe_subscription("billing")).shards[0].committed == 3:
                    break
                await asyncio.sleep(0.01)
        await orders.seek_subscription("billing", "latest")
        await written_anew(node, "billing")
        asked.cancel()
        await asyncio.wait([asked])
    monkeypatch.undo()
    async with running(folder, data=data), client(folder) as region:
        (shard,) = (await region.stream(ORDERS).describe_subscription("billing")).shards
        assert (shard.committed, shard.lag_records) == (10, 0)
        async with region.stream(ORDERS).consumer("billing") as consumer:
            await nothing(consumer)


async def test_what_an_owner_was_told_to_leave_out_as_it_was_dying_comes_to_it_once_it_is_given_back(
    region: felix.RegionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record was on its way to the dead letters as the shard changed hands, and its new owner has not come to it yet."""
    await region.create_stream(ORDERS)
    await subscribed(region, "billing", ack_timeout_ms=2_000)
    records = [b"%d" % number for number in range(10)]
    for each in records:
        await publish(region, each)
    orders = region.stream(ORDERS)
    monkeypatch.setattr(DeadLetters, "_land", refused)
    async with orders.consumer("billing") as consumer:
        taken = await take(consumer, 10)
        assert await consumer.nack(taken[7])
    await orders.alter_subscription("billing", unacked_max=2)
    async with orders.consumer("billing") as consumer:
        (first,) = await take(consumer, 1)
        monkeypatch.undo()
        async with asyncio.timeout(20):
            while True:
                if (await orders.describe_subscription("billing")).dead:
                    break
                await asyncio.sleep(0.01)
        assert (await orders.redrive_subscription("billing")).redriven == 1
        got = [bytes(first.payload)]
        assert await consumer.ack(first)
        for _ in range(9):
            (record,) = await take(consumer, 1)
            got.append(bytes(record.payload))
            assert record.attempt == 1 and await consumer.ack(record)
        assert sorted(got) == records
        await nothing(consumer)
    assert await left(region) == []


async def test_others_are_served_while_a_page_looks_up_records_and_a_page_is_bounded_by_what_is_read(
    region: felix.RegionClient, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each dead letter's record lies in another batch, and all are in memory; a worker has the dead letters, so that none fills the page."""
    await region.create_stream(ORDERS)
    await subscribed(region, "billing")
    batches = 50
    for number in range(batches):
        await publish(region, b"good", b"poison %d" % number)
    poison = {b"poison %d" % number for number in range(batches)}
    await fail(region, "billing", poison, 2 * batches)
    held = node.subscriptions._held[StreamName.parse(ORDERS)].by_name["billing"]
    redrive = node.subscriptions._redrive
    turns = 0

    async def beside() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    assert len(await region.queue(DEAD).lease(batches)) == batches
    other = asyncio.ensure_future(beside())
    await asyncio.sleep(0)
    turns = 0
    page = await redrive.page(held, RedriveSubscription(ORDERS, "billing", 100))
    other.cancel()
    assert (page.held, page.next) == (batches, "") and turns >= batches
    monkeypatch.setattr(module, "PAGE_BYTES", 1)
    page = await redrive.page(held, RedriveSubscription(ORDERS, "billing", 100))
    assert page.held == 1 and page.next
    monkeypatch.setattr(module, "PAGE_BYTES", 2_000)
    assert (await region.stream(ORDERS).redrive_subscription("billing")).held == batches
