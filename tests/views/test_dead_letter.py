"""Dead letters arrive once and in order, whatever is interrupted; a redrive brings them back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from region_home import make_region, running
from region_peer import until

from felix.batch import NewRecord, Record, encode_batch
from felix.names import StreamName
from region.folder import RegionFolder
from region.log.companions import JournalKind
from region.metadata.records import StreamConfig
from region.node import Node
from region.streams.hosted import HostedStream
from region.views.dead_letter import (
    DEAD_ATTEMPTS,
    DEAD_GONE,
    DEAD_OFFSET,
    DEAD_REASON,
    DEAD_STREAM,
    DELAY,
    DeadLetters,
    Move,
    read_records,
)
from region.views.journal import Journal

pytestmark = pytest.mark.timeout(120)
JOBS = StreamName.parse("acme/ops/jobs")
DEAD = StreamName.parse("acme/ops/jobs.dead")


class View:
    """The least that a view does: it remembers which records have been moved."""

    def __init__(self, node: Node, stream: HostedStream, journal: Journal) -> None:
        self.moved: list[int] = []
        self.returned: list[int] = []
        self.journal = journal
        self.dead = DeadLetters(
            node.broker, stream, stream.shard(0), JournalKind.QUEUE, journal.append, self.landed, self.given_up
        )  # fmt: skip

    def landed(self, move: Move) -> None:
        self.moved += move.offsets

    def given_up(self, move: Move) -> None:
        self.returned += move.offsets

    async def replay(self) -> None:
        self.dead.reset()
        self.moved.clear()
        self.returned.clear()
        async for entry in self.journal.replay():
            move, landed = self.dead.apply(entry)
            if move is not None:
                (self.landed if landed else self.given_up)(move)
        self.dead.start()


@pytest.fixture
def folder(tmp_path: Path) -> RegionFolder:
    return make_region(tmp_path, "us-east")


@asynccontextmanager
async def viewing(node: Node) -> AsyncIterator[tuple[HostedStream, View]]:
    stream = await node.broker.ensure_stream(JOBS, StreamConfig())
    companion = await node.broker.streams.open_companion(stream, JournalKind.QUEUE.number(0))
    journal = Journal(companion, list)
    view = View(node, stream, journal)
    await view.replay()
    try:
        yield stream, view
    finally:
        view.dead.stop()
        await journal.close()


async def publish(stream: HostedStream, *records: NewRecord) -> None:
    await stream.shard(0).append(encode_batch(records))


async def held(node: Node, name: StreamName) -> list[Record]:
    stream = node.broker.streams.get(name)
    if stream is None:
        return []
    shard = stream.shard(0)
    found = await read_records(shard, range(shard.high_watermark))
    return [record for record in found if record is not None]


async def test_a_dead_letter_says_where_it_comes_from_and_why(folder: RegionFolder) -> None:
    async with running(folder) as node, viewing(node) as (stream, view):
        await publish(stream, NewRecord(b"a"), NewRecord(b"b", b"k", {"x": b"1", DELAY: b"5000"}))
        view.dead.send([1], [3], "out of paper")
        await until(lambda: view.moved == [1])
        (record,) = await held(node, DEAD)
        assert (bytes(record.payload), bytes(record.key or b"")) == (b"b", b"k")
        assert record.headers["x"] == b"1" and DELAY not in record.headers
        assert record.headers[DEAD_REASON] == b"out of paper"
        assert record.headers[DEAD_STREAM] == str(JOBS).encode()
        assert (record.headers[DEAD_OFFSET], record.headers[DEAD_ATTEMPTS]) == (b"1", b"3")
        dead = node.broker.streams.get(DEAD)
        assert dead is not None and dead.record.config.views.queue is not None


async def test_stopped_and_replayed_at_any_time_each_arrives_once_and_in_order(folder: RegionFolder) -> None:
    chance = Random(5)
    count = 400
    for start in range(4):
        async with running(folder) as node, viewing(node) as (stream, view):
            if not start:
                for at in range(0, count, 50):
                    await publish(stream, *(NewRecord(b"%d" % (at + n)) for n in range(50)))
            some = range(start * count // 4, (start + 1) * count // 4)
            view.dead.send(some, [1] * len(some), "never mind")
            for _ in range(6):
                # Between any two of its steps: before the move is journaled, among its records, before it is said to be over.
                for _ in range(chance.randrange(60)):
                    await asyncio.sleep(0)
                view.dead.stop()
                await view.replay()
    async with running(folder) as node, viewing(node) as (_, view):
        await until(lambda: len(view.moved) == count)
        assert view.moved == list(range(count))
        assert [bytes(record.payload) for record in await held(node, DEAD)] == [
            b"%d" % n for n in range(count)
        ]


async def test_a_target_made_anew_is_written_under_another_epoch(folder: RegionFolder) -> None:
    async with running(folder) as node, viewing(node) as (stream, view):
        await publish(stream, *(NewRecord(b"%d" % n) for n in range(60)))
        view.dead.send(range(5), [1] * 5, "")
        await until(lambda: len(view.moved) == 5)
        dead = node.broker.streams.get(DEAD)
        assert dead is not None
        await node.broker.catalog.delete_stream(DEAD, incarnation=dead.record.incarnation, deleted_ms=1)
        await node.broker.streams.remove(DEAD, dead.record.incarnation)
        view.dead.send(range(5, 60), [1] * 55, "")
        await until(lambda: len(view.moved) == 60)
        assert [bytes(record.payload) for record in await held(node, DEAD)] == [
            b"%d" % n for n in range(5, 60)
        ]
        view.dead.stop()
        await view.replay()
        assert view.moved == list(range(60))


async def test_a_move_asked_for_the_moment_the_last_one_landed_is_carried(folder: RegionFolder) -> None:
    async with running(folder) as node, viewing(node) as (stream, view):
        await publish(stream, *(NewRecord(b"%d" % n) for n in range(50)))
        landed = asyncio.Event()
        view.dead._landed = lambda move: (view.landed(move), landed.set())
        for n in range(50):
            landed.clear()
            view.dead.send([n], [1], "")
            async with asyncio.timeout(120):
                await landed.wait()
        assert view.moved == list(range(50))


async def test_a_record_that_is_gone_is_a_dead_letter_without_a_payload(folder: RegionFolder) -> None:
    async with running(folder) as node, viewing(node) as (stream, view):
        await publish(stream, NewRecord(b"a"))
        await stream.shard(0).trim(1)
        view.dead.send([0], [1], "late")
        await until(lambda: view.moved == [0])
        (record,) = await held(node, DEAD)
        assert not record.payload and record.headers[DEAD_GONE] == b"1"


async def test_records_that_cannot_go_back_stay(folder: RegionFolder) -> None:
    async with running(folder) as node, viewing(node) as (stream, view):
        await publish(stream, NewRecord(b"a"), NewRecord(b"b"))
        view.dead.give_back(StreamName.parse("acme/ops/nothing"), 0, [0, 1])
        await until(lambda: view.returned == [0, 1])
        assert not list(view.dead.pending)


async def test_redriven_records_are_as_they_were(folder: RegionFolder) -> None:
    async with running(folder) as node, viewing(node) as (stream, view):
        other = await node.broker.ensure_stream(StreamName.parse("acme/ops/other"), StreamConfig(shards=2))
        await publish(stream, NewRecord(b"a", b"k", {"x": b"1", DEAD_REASON: b"r", DEAD_OFFSET: b"9"}))
        view.dead.give_back(other.name, 1, [0])
        await until(lambda: view.moved == [0])
        (record,) = await read_records(other.shard(1), [0])
        assert record is not None and bytes(record.payload) == b"a" and record.headers == {"x": b"1"}
