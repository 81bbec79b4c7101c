"""A stream table of one of several brokers: what it leads it serves, in the epoch of its election, and nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from long_runs import count
from region_peer import until

import felix
from felix import UnavailableError
from felix.batch import NewRecord, encode_batch
from felix.errors import Code, NotLeaderError
from region.log.shard import ShardLog
from region.metadata.records import Stream, StreamConfig
from region.node import Node
from region.streams.hosted import HostedStream
from region.streams.settings import SHARD_BYTES
from region.streams.table import StreamTable

CREW = felix.StreamName.parse("acme/ops/crew")
RECORD = Stream(name=str(CREW), incarnation="ab" * 16, created_ms=1, config=StreamConfig(shards=2))


class Elections:
    """A Leading of one stream: the epochs in which this broker leads its shards."""

    def __init__(self) -> None:
        self.epoch = 0

    def epochs(self, record: Stream) -> dict[int, int]:
        return dict.fromkeys(range(record.config.shards), self.epoch) if self.epoch else {}

    def leader_of(self, record: Stream, shard: int) -> str:
        return "b1" if self.epoch else "b2"

    def unclean(self, record: Stream, shard: int) -> int:
        return 0

    def not_leader(self, record: Stream, shard: int) -> NotLeaderError:
        if self.epoch:
            return NotLeaderError(
                f"Shard {shard} is about to be served.", retry_after_ms=5, stream=record.name
            )
        return NotLeaderError(
            f"Shard {shard} is at b2.", stream=record.name, leader="b2", address="127.0.0.1:1"
        )

    def members(self, record: Stream, shard: int) -> tuple[list[str], list[str]]:
        return [], []

    def copies(self, record: Stream, number: int) -> None:
        """One copy alone."""

    async def forget(self, incarnation: str) -> None:
        """There is nothing beside its folder."""


class Table:
    """A real table on a node's folder and keys, that asks `elections` what it leads."""

    def __init__(self, node: Node) -> None:
        self.elections = Elections()
        self.streams: StreamTable = node.broker.streams
        self.budget = node.broker.budgets.ring
        self.streams._leading = self.elections

    async def elect(self, epoch: int, name: felix.StreamName = CREW) -> HostedStream:
        """The broker leads in this epoch; 0: no longer."""
        self.elections.epoch = epoch
        await self.streams.reassign(name)
        found = self.streams.get(name)
        assert found is not None
        return found

    async def depose(self, name: felix.StreamName, epoch: int) -> None:
        """It leads no more, and then in this epoch, in one process."""
        before = await self.elect(0, name)
        assert before.views == [] and before.closing == [] and before.companions == []
        await self.elect(epoch, name)


@pytest.fixture
def table(node: Node) -> Table:
    return Table(node)


async def append(shard: ShardLog, payload: bytes) -> int:
    batch = encode_batch([NewRecord(payload)], shard=0, producer_id=0, producer_epoch=0, base_sequence=0)
    return (await shard.append(batch)).base_offset


async def test_a_stream_that_another_broker_leads_is_known_and_takes_no_memory(table: Table) -> None:
    before = table.budget.used_bytes
    stream = await table.streams.open(RECORD)
    assert stream.serving == [] and stream.shard_count == 2 and table.budget.used_bytes == before
    with pytest.raises(NotLeaderError) as told:
        stream.shard(1)
    assert (told.value.code, told.value.leader) == (Code.NOT_LEADER, "b2")
    assert [(each.leader, each.stopped) for each in stream.describe(detail=True).state] == [("b2", "")] * 2


async def test_records_stay_over_elections_and_each_is_of_the_epoch_that_it_was_taken_in(
    table: Table,
) -> None:
    await table.streams.open(RECORD)
    for epoch, offset in ((3, 0), (4, 1), (9, 2)):
        stream = await table.elect(epoch)
        assert await append(stream.shard(0), b"%d" % epoch) == offset
        assert table.budget.used_bytes >= 2 * SHARD_BYTES
        stream = await table.elect(0)
        assert stream.elsewhere is not None and table.budget.used_bytes == 0
    shard = (await table.elect(10)).shard(0)
    starts = [(each.epoch, each.start_offset) for each in shard.epochs.starts]
    assert starts[:3] == [(3, 0), (4, 1), (9, 2)] and shard.epochs.current == 10


async def test_who_leads_no_more_refuses_at_once_and_answers_what_was_under_way(table: Table) -> None:
    await table.streams.open(RECORD)
    shard = (await table.elect(1)).shard(0)
    seen: list[list[int]] = []
    table.streams.on_change(lambda stream: seen.append(sorted(stream.replicas)))
    assert await append(shard, b"kept") == 0
    await table.elect(0)
    assert seen[0] == [], "whoever has the stream open is told before its logs close"
    with pytest.raises(UnavailableError):
        await append(shard, b"late")
    assert await append((await table.elect(2)).shard(0), b"next") == 1


async def test_what_has_to_be_committed_first_is_served_once_it_is(table: Table) -> None:
    await table.streams.open(RECORD)
    assert await append((await table.elect(3)).shard(0), b"x") == 0

    def is_not_committed(stream: HostedStream) -> None:
        if not stream.replicas:
            table.elections.epoch = 0

    table.streams.on_change(is_not_committed)
    assert (await table.elect(4)).serving == [] and table.budget.used_bytes == 0
    stream = await table.elect(4)
    assert stream.epochs == {0: 4, 1: 4} and await append(stream.shard(0), b"y") == 1


async def test_an_epoch_below_that_of_the_log_is_not_served(table: Table) -> None:
    await table.streams.open(RECORD)
    await append((await table.elect(7)).shard(0), b"x")
    await table.elect(0)
    stream = await table.elect(5)
    assert stream.serving == []
    with pytest.raises(UnavailableError, match="Epoch 5 cannot begin"):
        stream.shard(0)


async def test_what_does_not_fit_is_tried_again_and_leaves_nothing_open(table: Table) -> None:
    await table.streams.open(RECORD)
    limit = table.budget.limit_bytes
    table.budget.limit_bytes = table.budget.used_bytes + SHARD_BYTES
    with pytest.raises(UnavailableError) as full:
        await table.elect(1)
    assert full.value.code is Code.LIMIT_MEMORY
    stream = table.streams.get(CREW)
    assert stream is not None and stream.serving == []
    table.budget.limit_bytes = limit
    assert len((await table.elect(1)).serving) == 2


JOBS = felix.StreamName.parse("acme/ops/jobs")
ELECTIONS = count(8, 100)
EACH = 20
"""Jobs, and records, between two elections."""


async def test_a_queue_is_opened_anew_on_its_journal_by_who_is_elected_again(
    table: Table, node: Node, operator: felix.RegionClient
) -> None:
    table.elections.epoch = 1
    await operator.create_queue(JOBS, shards=2, visibility=60)
    jobs = operator.queue(JOBS)
    await jobs.put_many([b"%d" % number for number in range(6)])
    held = await jobs.lease(2)
    async with jobs.consume(prefetch=1) as worker:
        first = await anext(worker)
        former = await node.queues.queue(stream_of(table, JOBS))
        await table.depose(JOBS, 2)
        for job in (*held, first):
            await job.ack()
        done = [job.payload for job in (*held, first)]
        while len(done) < 6:
            job = await anext(worker)
            await job.ack()
            done.append(job.payload)
    assert sorted(done) == [b"%d" % number for number in range(6)]
    queue = await node.queues.queue(stream_of(table, JOBS))
    assert queue is not former and former.is_closed and not former.workers
    journals = [shard.actor.journal._log for shard in queue.shards]
    assert [journal.epochs.current for journal in journals if journal is not None] == [2, 2]
    assert (await jobs.describe()).ready == 0


async def test_a_cache_is_read_anew_and_its_watch_goes_on_where_it_was(
    table: Table, operator: felix.RegionClient
) -> None:
    table.elections.epoch = 1
    name = felix.StreamName.parse("acme/ops/sessions")
    cache = await operator.create_cache(name)
    assert await cache.put("a", b"1") >= 0
    async with cache.watch() as watch:
        changes = [await anext(watch), await anext(watch)]
        assert [change.kind for change in changes] == ["put", "ready"]
        await table.depose(name, 2)
        assert await cache.increment("n", 5) == 5
        entry = await cache.get("a")
        assert entry is not None and entry.value == b"1"
        following = await anext(watch)
        assert (following.kind, following.key) == ("put", b"n"), "no reset: it goes on where it was"


async def test_consumers_come_back_to_who_is_elected_again_and_nothing_acknowledged_is_redelivered(
    table: Table, operator: felix.RegionClient
) -> None:
    table.elections.epoch = 1
    name = felix.StreamName.parse("acme/ops/orders")
    await operator.create_stream(name, shards=2)
    stream = operator.stream(name)
    async with stream.consumer("crew", start="earliest") as one, stream.consumer("crew") as other:
        await until(lambda: len(one.shards) == len(other.shards) == 1)
        await stream.publish_many([b"%d" % number for number in range(8)], [b"%d" % n for n in range(8)])
        seen: list[bytes] = []
        for consumer in (one, other):
            record = await anext(consumer)
            assert await consumer.ack(record)
            seen.append(bytes(record.payload))
        await table.depose(name, 2)
        await until(lambda: len(one.shards) == len(other.shards) == 1)

        async def work(consumer: felix.Consumer) -> None:
            async for record in consumer:
                if await consumer.ack(record):
                    seen.extend([bytes(record.payload)])

        working = [asyncio.ensure_future(work(consumer)) for consumer in (one, other)]
        await until(lambda: len(seen) >= 8)
        for task in working:
            task.cancel()
    assert sorted(seen) == [b"%d" % number for number in range(8)]


async def test_an_open_publisher_is_told_that_an_ephemeral_stream_began_anew(
    table: Table, operator: felix.RegionClient
) -> None:
    table.elections.epoch = 1
    name = felix.StreamName.parse("acme/ops/ticks")
    await operator.create_stream(name, durability=felix.Durability("ephemeral"))
    async with operator.stream(name).publisher() as publisher:
        assert await publisher.publish(b"before") == 0
        await table.depose(name, 2)
        with pytest.raises(felix.RequestError, match="created anew"):
            await publisher.publish(b"meant for what is gone")
        assert await publisher.publish(b"after") == 0


async def test_elections_under_load_lose_nothing_and_do_nothing_twice(
    table: Table, node: Node, operator: felix.RegionClient
) -> None:
    """Of a queue, a cache and a durable subscription at work, again and again, each time at another moment."""
    table.elections.epoch = 1
    orders = felix.StreamName.parse("acme/ops/orders")
    sessions = felix.StreamName.parse("acme/ops/sessions")
    names = (JOBS, sessions, orders)
    await operator.create_queue(JOBS, shards=2, visibility=60, attempts=1_000, retry=0.01)
    await operator.create_cache(sessions, shards=2)
    await operator.create_stream(orders, shards=2)
    await operator.stream(orders).create_subscription("crew", felix.SubscriptionSettings("earliest"))
    done: Counter[bytes] = Counter()
    acknowledged: set[bytes] = set()
    again: list[bytes] = []
    unsure: list[str] = []
    held: dict[str, int] = {}

    async def work() -> None:
        async with operator.queue(JOBS).consume(prefetch=4) as worker:
            async for job in worker:
                await job.ack()
                done[job.payload] += 1

    async def consume() -> None:
        async with operator.stream(orders).consumer("crew") as consumer:
            async for record in consumer:
                payload = bytes(record.payload)
                if payload in acknowledged:
                    again.append(payload)
                if await consumer.ack(record):
                    acknowledged.add(payload)
                else:
                    unsure.append("lost")

    async def fill() -> None:
        cache = operator.cache(sessions)
        for number in range(ELECTIONS * 40):
            await cache.put(f"k{number % 16}", b"%d" % number)
            held[f"k{number % 16}"] = number
            assert await cache.increment("count") == number + 1

    async with operator.cache(sessions).mirror() as mirror:
        putting = asyncio.ensure_future(fill())
        busy = [asyncio.ensure_future(each) for each in (work(), work(), consume(), consume())]
        for epoch in range(2, 2 + ELECTIONS):
            before = sum(done.values()) + len(acknowledged)
            given = [
                asyncio.ensure_future(operator.queue(JOBS).put_many([b"%d/%d" % (epoch, n) for n in range(EACH)])),
                asyncio.ensure_future(operator.stream(orders).publish_many([b"%d/%d" % (epoch, n) for n in range(EACH)])),
            ]  # fmt: skip
            moment = before + epoch % 7
            await until(lambda moment=moment: sum(done.values()) + len(acknowledged) >= moment)  # type: ignore[misc]
            for name in names:
                await table.depose(name, epoch)
            await asyncio.gather(*given)
        await putting
        await until(lambda: sum(done.values()) == ELECTIONS * EACH)
        await until(lambda: not lag_of(node))
        for key, number in held.items():
            entry = await operator.cache(sessions).get(key)
            assert entry is not None and entry.value == b"%d" % number
            await mirror.reached(key, entry.version)
            assert mirror[key] == entry.value
        for task in busy:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.wait(busy)
    assert max(done.values()) == 1 and again == []
    assert ELECTIONS * EACH - len(acknowledged) <= len(unsure)
    state = await operator.queue(JOBS).describe()
    assert (state.ready, state.leased, state.delayed, state.dead) == (0, 0, 0, 0)
    for name in names:
        assert [shard.epochs.current for shard in stream_of(table, name).serving] == [1 + ELECTIONS] * 2


def lag_of(node: Node) -> int:
    """Records that the subscriptions are behind; unknown while a stream is not served."""
    return int(node.subscriptions.gauges()["consumer_lag_records"]) if node.subscriptions._held else 1


def stream_of(table: Table, name: felix.StreamName) -> HostedStream:
    found = table.streams.get(name)
    assert found is not None
    return found
