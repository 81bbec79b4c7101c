"""Clients of a stream of one broker whose logs are closed and opened again: what each has open ends there, and goes on by itself with the new ones."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from region_peer import until

import felix
from felix import reopening
from felix.errors import Code
from felix.names import StreamName
from region.log.errors import StorageFailedError
from region.log.shard import ShardLog
from region.node import Node
from region.streams.hosted import HostedStream


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reopening, "REOPEN_MS_MIN", 100)


def stream_of(node: Node, name: str) -> HostedStream:
    found = node.broker.streams.get(StreamName.parse(name))
    assert found is not None
    return found


async def fail(node: Node, name: str, companion: int | None = None) -> None:
    """A log of the stream has met an error of its disk; returns once all is open again."""
    reopener, stream = node.broker.streams.reopener, stream_of(node, name)
    before, number = reopener.opened, 0 if companion is None else companion
    shard = node.broker.streams._directory.find(stream.name, stream.incarnation, number)
    assert isinstance(shard, ShardLog)
    shard.stop(StorageFailedError("A sync failed."))
    assert node.broker.streams.disks.problems()
    await until(lambda: reopener.opened > before)
    assert not node.broker.streams.disks.problems()


async def test_a_publisher_and_a_reader_go_on(node: Node, operator: felix.RegionClient) -> None:
    name = "acme/ops/crew"
    await operator.create_stream(name)
    async with (
        operator.stream(name).publisher() as publisher,
        operator.stream(name).subscribe("earliest") as reader,
    ):
        for number in range(4):
            assert await publisher.publish(b"%d" % number) == number
            assert (await anext(reader)).offset == number
            await fail(node, name)
        assert await publisher.publish(b"last") == 4
        assert bytes((await anext(reader)).payload) == b"last"


@pytest.mark.parametrize("what", ["shard", "journal"])
async def test_a_worker_goes_on_and_what_it_held_is_done_once(
    what: str, node: Node, operator: felix.RegionClient
) -> None:
    name = "acme/ops/jobs"
    await operator.create_queue(name, visibility=60)
    jobs = operator.queue(name)
    await jobs.put_many([b"%d" % number for number in range(6)])
    held = await jobs.lease(2)
    async with jobs.consume(prefetch=1) as worker:
        first = await anext(worker)
        journal = stream_of(node, name).companions[0]
        await fail(node, name, journal if what == "journal" else None)
        for job in (*held, first):
            await job.ack()
        done = [bytes(job.payload) for job in (*held, first)]
        while len(done) < 6:
            job = await anext(worker)
            await job.ack()
            done.append(bytes(job.payload))
    assert sorted(done) == [b"%d" % number for number in range(6)]
    assert (await jobs.describe()).ready == (await jobs.describe()).leased == 0


async def test_a_cache_is_read_anew_and_its_watch_goes_on_where_it_was(
    node: Node, operator: felix.RegionClient
) -> None:
    name = "acme/ops/gates"
    cache = await operator.create_cache(name)
    assert await cache.put("a", b"1") >= 0
    async with cache.watch() as watch:
        assert [(await anext(watch)).kind, (await anext(watch)).kind] == ["put", "ready"]
        asked = asyncio.ensure_future(fail(node, name))
        await asyncio.sleep(0)
        assert await cache.increment("n", 5) == 5, "whoever asks meanwhile waits"
        await asked
        entry = await cache.get("a")
        assert entry is not None and entry.value == b"1"
        following = await anext(watch)
        assert (following.kind, following.key) == ("put", b"n"), "no reset: it goes on where it was"


@pytest.mark.parametrize("what", ["shard", "journal"])
async def test_consumers_go_on_and_nothing_acknowledged_is_redelivered(
    what: str, node: Node, operator: felix.RegionClient
) -> None:
    name = "acme/ops/orders"
    await operator.create_stream(name)
    stream = operator.stream(name)
    async with stream.consumer("crew", start="earliest") as consumer:
        await stream.publish_many([b"%d" % number for number in range(4)])
        record = await anext(consumer)
        assert await consumer.ack(record)
        journal = stream_of(node, name).companions[0]
        await fail(node, name, journal if what == "journal" else None)
        seen = [record.offset]
        async with asyncio.timeout(60):
            while len(seen) < 4:
                record = await anext(consumer)
                if await consumer.ack(record):
                    seen.append(record.offset)
        assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["acme/ops/left", "acme/ops/right", "felix/system/transactions"])
async def test_a_transaction_that_is_open_is_committed_whole(
    name: str, node: Node, operator: felix.RegionClient
) -> None:
    for each in ("acme/ops/left", "acme/ops/right"):
        await operator.create_stream(each)
    async with operator.transaction() as transaction:
        await transaction.publish("acme/ops/left", b"first")
    transaction = operator.transaction()
    await transaction.begin()
    await transaction.publish("acme/ops/left", b"l")
    stream = stream_of(node, name)
    await fail(node, name, stream.companions[0] if stream.companions else None)
    await transaction.publish("acme/ops/right", b"r")
    async with asyncio.timeout(60):
        while True:
            with suppress(felix.UnavailableError):
                assert await transaction.commit() == [1, 0]
                break
            await asyncio.sleep(0.05)
    ends = [
        (await operator.stream(each).describe()).state[0].high_watermark
        for each in ("acme/ops/left", "acme/ops/right")
    ]
    assert ends == [2, 1] and not node.transactions.owed_count


async def test_a_stopped_shard_says_that_it_is_opened_again(node: Node, operator: felix.RegionClient) -> None:
    name = "acme/ops/crew"
    await operator.create_stream(name)
    stream_of(node, name).shard(0).stop(StorageFailedError("A sync failed."))
    state = await operator.stream(name).describe()
    assert "opened again by itself" in state.state[0].stopped
    assert any("acme/ops/crew" in each for each in (await operator.describe()).alarms)
    with pytest.raises(felix.UnavailableError) as refused:
        stream_of(node, name).shard(0).read_hot(0, 1)
    assert refused.value.code is Code.SHARD_STOPPED and refused.value.retry_after_ms


async def test_what_is_published_while_the_folder_of_streams_is_away_is_there_once_it_is_back(
    node: Node, operator: felix.RegionClient
) -> None:
    """A stream that is new meanwhile, and one that was there and needs a file: neither is begun in the folder that is at the path."""
    await operator.create_stream("acme/ops/crew")
    await operator.stream("acme/ops/crew").publish(b"before")
    directory = node.broker.streams._directory
    folder, away = directory._data, directory._data.with_name("away")
    folder.rename(away)
    folder.mkdir()
    stream_of(node, "acme/ops/crew").shard(0).stop(StorageFailedError("A sync failed."))
    await operator.create_stream("acme/ops/planes")
    names = ("acme/ops/crew", "acme/ops/planes")
    publishing = [asyncio.create_task(operator.stream(name).publish(b"meanwhile")) for name in names]
    await asyncio.sleep(1)
    assert not any(each.done() for each in publishing) and not list(folder.iterdir())
    folder.rmdir()
    away.rename(folder)
    assert await asyncio.gather(*publishing) == [1, 0]
    await until(lambda: not node.broker.streams.disks.problems())


async def test_a_job_of_a_commit_whose_write_failed_is_given_to_nobody_else(
    node: Node, operator: felix.RegionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision stands in the journal, which only the next opening tells: by then the job's lease has run out long ago."""
    monkeypatch.setattr(reopening, "REOPEN_MS_MIN", 3_000)
    await operator.create_stream("acme/ops/out")
    await operator.create_queue("acme/ops/jobs", visibility=0.5)
    jobs = operator.queue("acme/ops/jobs")
    async with operator.transaction() as transaction:
        await transaction.publish("acme/ops/out", b"first")
    await jobs.put(b"job")
    (job,) = await jobs.lease(1)
    transaction = operator.transaction()
    await transaction.begin()
    await transaction.publish("acme/ops/out", b"done")
    await transaction.acknowledge(job)
    stream = stream_of(node, "felix/system/transactions")
    journal = node.broker.streams._directory.find(stream.name, stream.incarnation, stream.companions[0])
    assert journal is not None and journal._files is not None

    def failing() -> None:
        raise StorageFailedError("A sync failed.")

    monkeypatch.setattr(journal._files.disk, "sync", failing)
    committed = asyncio.ensure_future(transaction.commit())
    await until(lambda: journal.failure)
    assert await jobs.lease(1, wait=1.5) == []
    assert await committed == [1]
    assert (await operator.stream("acme/ops/out").describe()).state[0].high_watermark == 2
    state = await jobs.describe()
    assert state.ready == state.leased == 0
