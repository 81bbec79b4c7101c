"""Ctrl-C in blocking calls that read, over a real broker: what comes in that moment is what the next call gives."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from region_fixtures import founded, node, operator

import felix
import felix.sync
from felix.stream import Stream
from region.folder import RegionFolder
from region.node import Node

__all__ = ["node", "operator"]

pytestmark = pytest.mark.timeout(120)
ORDERS = "acme/payments/orders"
FLAGS = "acme/web/flags"
JOBS = "acme/ops/jobs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RegionFolder:
    return founded(tmp_path_factory, "app")


@contextmanager
def interrupted_once_it_has_come(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The result is there, and its caller hears of nothing but the interruption."""

    def interrupt(future: Any, timeout: float | None = None) -> Any:
        concurrent.futures.wait([future])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(concurrent.futures.Future, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield


async def filled(operator: felix.RegionClient) -> Stream:
    await operator.create_stream(ORDERS)
    stream = operator.stream(ORDERS)
    async with stream.publisher(batch_records=2) as publisher:
        for number in range(6):
            await publisher.send(b"%d" % number)
    return stream


@pytest.mark.parametrize("how", ["records", "batches", "next_batch", "take"])
async def test_a_subscription_leaves_out_no_batch(
    node: Node, operator: felix.RegionClient, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    await filled(operator)
    profile = operator.connection.profile

    def read() -> None:
        with felix.sync.connect(profile=profile) as region:
            subscription = region.stream(ORDERS).subscribe("earliest")
            with interrupted_once_it_has_come(monkeypatch):
                if how == "records":
                    next(subscription)
                elif how == "batches":
                    next(iter(subscription.batches()))
                elif how == "next_batch":
                    subscription.next_batch()
                else:
                    subscription.take(1)
            assert not any(subscription.positions.values())
            if how == "records":
                first = next(subscription).offset
            elif how == "batches":
                first = next(iter(subscription.batches())).first_offset
            elif how == "next_batch":
                first = subscription.next_batch().first_offset
            else:
                first = subscription.take(1)[0].offset
            assert first == 0
            rest = subscription.take(5 if how in ("records", "take") else 4)
            assert rest[-1].offset == 5 and len(rest) == (5 if how in ("records", "take") else 4)

    await asyncio.to_thread(read)


@pytest.mark.parametrize("how", ["records", "batches"])
async def test_a_consumer_acknowledges_nothing_that_nobody_got(
    node: Node, operator: felix.RegionClient, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """With `ack="auto"`, what comes next says that the one before is done."""
    await filled(operator)
    profile = operator.connection.profile

    def read() -> list[int]:
        got: list[int] = []
        with (
            felix.sync.connect(profile=profile) as region,
            region.stream(ORDERS).consumer(
                "billing", settings=felix.SubscriptionSettings("earliest")
            ) as consumer,
        ):
            with interrupted_once_it_has_come(monkeypatch):
                next(consumer) if how == "records" else next(iter(consumer.batches()))
            while len(got) < 6:
                if how == "records":
                    got.append(next(consumer).offset)
                else:
                    got += [record.offset for record in next(iter(consumer.batches())).records()]
        return got

    assert await asyncio.to_thread(read) == [0, 1, 2, 3, 4, 5]


async def test_a_worker_gives_a_job_back_that_nobody_got(
    node: Node, operator: felix.RegionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be leased for as long as the worker lives."""
    queue = operator.queue(JOBS)
    await operator.create_queue(JOBS)
    await queue.put(b"one")
    profile = operator.connection.profile

    def work() -> int:
        with felix.sync.connect(profile=profile) as region, region.queue(JOBS).consume() as worker:
            with interrupted_once_it_has_come(monkeypatch):
                next(worker)
            with next(worker) as job:
                return job.attempts

    assert await asyncio.to_thread(work) == 1


async def test_a_watch_stands_behind_the_change_that_was_given_out(
    node: Node, operator: felix.RegionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several come in one message."""
    await operator.create_cache(FLAGS)
    cache = operator.cache(FLAGS)
    profile = operator.connection.profile

    def watch() -> list[bytes]:
        with felix.sync.connect(profile=profile) as region, region.cache(FLAGS).watch() as watching:
            assert next(watching).kind == "ready"
            region.cache(FLAGS).put_many({f"k{n}": b"1" for n in range(20)})
            with interrupted_once_it_has_come(monkeypatch):
                next(watching)
            first = next(watching)
            assert watching.position == first.position
            resumed = region.cache(FLAGS).watch(resume=watching.position)
            return [first.key, *(next(resumed).key for _ in range(19))]

    assert await asyncio.to_thread(watch) == [b"k%d" % n for n in range(20)]
    async with cache.watch() as watching:
        async for change in watching:
            if change.kind == "ready":
                break
        await cache.put_many({f"k{n}": b"2" for n in range(20)})
        assert watching.position is not None
        found = [await anext(watching) for _ in range(3)]
        assert watching.position == found[-1].position
