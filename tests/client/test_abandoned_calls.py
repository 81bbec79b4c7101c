"""Calls that are cancelled, time out or fail halfway, over a real broker: what they leave behind, and what the next call finds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from client.conftest import connected, until
from client.scripted_broker import BrokerSession, ScriptedBroker
from region_fixtures import founded, node, operator

import felix
from felix import Code, FelixError, RequestError, UnavailableError
from felix.link import Link
from felix.messages import Request, Subscribe, Welcome
from region.folder import RegionFolder
from region.node import Node

__all__ = ["node", "operator"]

pytestmark = pytest.mark.timeout(120)
ORDERS = "acme/payments/orders"
JOBS = "acme/ops/jobs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RegionFolder:
    return founded(tmp_path_factory, "app")


def attached(region: felix.RegionClient) -> int:
    """How much lives on the client's connection."""
    return len(region.connection._attachments)


async def cancelled_at(make: Callable[[], Coroutine[Any, Any, Any]], step: int) -> bool:
    """Run it, and cancel it in the `step`th event loop iteration from now; False where it ended before."""
    task = asyncio.ensure_future(make())
    for _ in range(step):
        if task.done():
            break
        await asyncio.sleep(0)
    if task.done():
        task.result()
        return False
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return True


# -- publishers -------------------------------------------------------------------------------------------


async def test_leaving_tells_of_records_that_a_failed_publisher_gave_up(
    operator: felix.RegionClient,
) -> None:
    """The publish stream is over, and nobody has been told: leaving the block is the last chance."""
    await operator.create_stream(ORDERS)
    publisher = operator.stream(ORDERS).publisher(linger_ms=200)
    with pytest.raises(RequestError) as told:
        async with publisher:
            await publisher.send(b"lost")
            await operator.delete_stream(ORDERS)
            await until(lambda: publisher.is_over)
    assert told.value.code in (Code.NOT_FOUND, Code.NOT_FOUND_OR_FORBIDDEN)
    await publisher.close()


async def test_leaving_does_not_tell_twice(operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS)
    async with operator.stream(ORDERS).publisher(linger_ms=200) as publisher:
        await publisher.send(b"lost")
        await operator.delete_stream(ORDERS)
        await until(lambda: publisher.is_over)
        with pytest.raises(RequestError):
            await publisher.flush()


async def test_a_flush_waits_for_what_was_given_before_it_alone(operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS)
    async with operator.stream(ORDERS).publisher() as publisher:
        over = False

        async def go_on() -> None:
            while not over:
                await publisher.send(b"x" * 100)
                await asyncio.sleep(0)

        beside = asyncio.ensure_future(go_on())
        await asyncio.sleep(0.05)
        given = publisher.progress.given
        async with asyncio.timeout(20):
            await publisher.flush()
        assert publisher.progress.contiguous >= given
        over = True
        await beside


async def test_closing_waits_for_what_other_tasks_have_sent_meanwhile(operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS)
    publisher = operator.stream(ORDERS).publisher()
    await publisher.open()
    await publisher.send(b"x")
    closing = asyncio.ensure_future(publisher.close())
    await asyncio.sleep(0)
    await publisher.send(b"y")
    await closing
    assert publisher.progress.contiguous == 2


async def test_what_is_called_for_refused_batches_may_raise(
    operator: felix.RegionClient, caplog: pytest.LogCaptureFixture
) -> None:
    await operator.create_stream(ORDERS)

    def raises(refusal: felix.Refusal) -> None:
        raise refusal.error

    session = operator.session.session
    async with operator.stream(ORDERS).publisher(on_refused=raises) as publisher:
        with pytest.raises(felix.OffsetMismatchError):
            await publisher.publish(b"x", expected_offset=7)
        assert await publisher.publish(b"y") == 0
    assert operator.session.session == session and operator.reconnects == 0
    assert "on_refused" in caplog.text


async def test_many_streams_are_published_into_at_once(operator: felix.RegionClient) -> None:
    streams = [f"acme/ops/s{n}" for n in range(80)]
    for name in streams:
        await operator.create_stream(name, durability=felix.Durability("ephemeral"), ring_bytes=2 << 20)
    assert await asyncio.gather(*(operator.stream(name).publish(b"x") for name in streams)) == [0] * 80


async def test_a_send_that_was_cancelled_has_not_taken_its_record(operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS)
    async with operator.stream(ORDERS).publisher(batch_records=1) as publisher:
        done = 0
        for n in range(200):
            task = asyncio.ensure_future(publisher.send(b"%d" % n))
            await asyncio.sleep(0)
            if not task.done():
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                done += 1
        assert publisher.progress.given == done


async def test_a_publisher_whose_opening_is_cancelled_leaves_nothing(
    broker_of_silence: ScriptedBroker,
) -> None:
    async with connected(broker_of_silence) as region:
        before = attached(region)
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01), region.stream(ORDERS).publisher():
                    pass
        assert attached(region) == before


@pytest.fixture
def broker_of_silence(monkeypatch: pytest.MonkeyPatch) -> ScriptedBroker:
    """It answers nothing that opens a publisher, a subscription or an exchange."""
    broker = ScriptedBroker()
    broker.create(ORDERS)

    def silent(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
        return isinstance(request, Subscribe)

    broker.on_request = silent
    monkeypatch.setattr(BrokerSession, "_publish_frame", lambda session, stream_id, frame: None)
    return broker


# -- subscriptions ----------------------------------------------------------------------------------------


async def test_iterating_tells_that_no_subscription_could_be_had(broker_of_silence: ScriptedBroker) -> None:
    async with connected(broker_of_silence, request_timeout_s=0.05) as region:
        with pytest.raises(UnavailableError):
            async for _ in region.stream(ORDERS).subscribe("earliest"):
                pass
        with pytest.raises(UnavailableError):
            async for _ in region.stream(ORDERS).subscribe("earliest").batches():
                pass


async def test_positions_are_those_of_the_records_that_were_given_out(operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS)
    orders = operator.stream(ORDERS)
    await orders.publish_batch([felix.NewRecord(b"%d" % n) for n in range(10)])
    async with orders.subscribe("earliest") as subscription:
        async for record in subscription:
            if record.offset == 3:
                break
        assert subscription.positions == {0: 4}
        kept, epochs = subscription.positions, subscription.epochs
        assert (await anext(subscription)).offset == 4
    async with orders.subscribe(
        offsets=kept, epochs=epochs, incarnation=subscription.incarnation
    ) as following:
        assert (await anext(following)).offset == 4
        assert following.gap_count == 0


# -- consumers of durable subscriptions -------------------------------------------------------------------


async def test_a_consumer_whose_opening_is_cancelled_has_no_shard(operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS)
    orders = operator.stream(ORDERS)
    await orders.publish(b"x")
    await orders.create_subscription("billing", felix.SubscriptionSettings(start="earliest"))

    async def open_one() -> None:
        async with orders.consumer("billing"):
            raise AssertionError("opened")

    for step in (1, 2, 3):
        assert await cancelled_at(open_one, step)
    async with asyncio.timeout(10), orders.consumer("billing") as consumer:
        assert (await anext(consumer)).payload == b"x"
        assert len((await orders.describe_subscription("billing")).consumers) == 1


async def test_a_consumer_whose_close_is_cancelled_has_no_shard(operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS)
    orders = operator.stream(ORDERS)
    for step in range(1, 6):
        await orders.publish(b"x")
        consumer = orders.consumer("billing", start="earliest")
        await consumer.open()
        consumer.ack_nowait(await anext(consumer))
        await cancelled_at(consumer.close, step)
        await consumer.close()
        assert consumer._exchange.is_over
        async with asyncio.timeout(10):
            while (await orders.describe_subscription("billing")).consumers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_what_was_acknowledged_without_waiting_counts_after_leaving(
    operator: felix.RegionClient,
) -> None:
    await operator.create_stream(ORDERS)
    orders = operator.stream(ORDERS)
    await orders.publish(b"x")
    async with orders.consumer("billing", start="earliest") as consumer:
        told = consumer.ack_nowait(await anext(consumer))
    assert await told
    (shard,) = (await orders.describe_subscription("billing")).shards
    assert shard.committed == 1


# -- queues -----------------------------------------------------------------------------------------------


async def test_a_worker_whose_opening_is_cancelled_leases_nothing(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    await jobs.put(b"x")

    async def open_one() -> None:
        async with jobs.consume():
            raise AssertionError("opened")

    for step in (1, 2, 3):
        assert await cancelled_at(open_one, step)
    await asyncio.sleep(0.2)
    (job,) = await jobs.lease(wait=10)
    assert job.attempts == 1


async def test_a_worker_that_went_on_after_a_cancelled_call_extends_its_leases(
    operator: felix.RegionClient,
) -> None:
    await operator.create_queue(JOBS, visibility=1)
    jobs = operator.queue(JOBS)
    await jobs.put(b"x")
    consumer = jobs.consume()
    assert await cancelled_at(consumer.__anext__, 1)
    async with asyncio.timeout(10):
        job = await anext(consumer)
    await asyncio.sleep(2.5)
    assert not job.lost
    await job.ack()
    await consumer.close()
    assert consumer.lost == 0


async def test_a_cancelled_flush_takes_no_settlement_with_it(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    await jobs.put(b"x")
    async with jobs.consume() as consumer:
        settled = (await anext(consumer)).ack()
        assert await cancelled_at(consumer.flush, 1)
        async with asyncio.timeout(10):
            await settled
    assert (await jobs.describe()).leased == 0


async def test_a_cancelled_lease_leases_nothing(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    await jobs.describe()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await jobs.lease(wait=10)
    await jobs.put(b"x")
    async with asyncio.timeout(10):
        (job,) = await jobs.lease(wait=5)
    assert job.attempts == 1
    await job.release()
    for step in range(1, 8):
        await cancelled_at(jobs.lease, step)
    async with asyncio.timeout(10):
        (job,) = await jobs.lease(wait=5)
    assert job.attempts <= 2


async def test_a_call_that_is_cancelled_while_it_opens_ends_no_other(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    first = asyncio.ensure_future(jobs.describe())
    await asyncio.sleep(0)
    second = asyncio.ensure_future(jobs.describe())
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(10):
        assert (await second).ready == 0


async def test_a_reason_that_is_no_text_does_not_keep_a_job(operator: felix.RegionClient) -> None:
    """Names of files that are no UTF-8 have such characters, and errors name files."""
    await operator.create_queue(JOBS, retry=0.01)
    jobs = operator.queue(JOBS)
    await jobs.put(b"x")
    async with jobs.consume() as consumer:
        async with asyncio.timeout(10):
            for attempt in (1, 2):
                with pytest.raises(ValueError):
                    async with await anext(consumer) as job:
                        assert job.attempts == attempt
                        raise ValueError("no such file: \udcff")
        await consumer.flush()


async def test_many_jobs_with_headers_wait_for_room(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS, durability=felix.Durability("ephemeral"), ring_bytes=64 << 20)
    offsets = await operator.queue(JOBS).put_many([b"x" * 900_000] * 40, priority=2)
    assert sorted(offsets) == list(range(40))


async def test_several_tasks_share_a_worker(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    async with jobs.consume() as consumer:
        waiting = [asyncio.ensure_future(anext(consumer)) for _ in range(4)]
        await asyncio.sleep(0.1)
        await jobs.put_many([b"%d" % n for n in range(4)])
        async with asyncio.timeout(10):
            for job in await asyncio.gather(*waiting):
                await job.ack()


# -- caches -----------------------------------------------------------------------------------------------


async def test_what_cannot_be_sent_takes_no_room(operator: felix.RegionClient) -> None:
    cache = await operator.create_cache("acme/web/rates")
    await cache.put("a", b"1")
    for _ in range(300):
        with pytest.raises((FelixError, OverflowError)):
            await cache.increment("a", 1 << 70)
    async with asyncio.timeout(5):
        assert await cache.increment("a") == 2


async def test_calls_that_wait_for_one_another_end_in_time(broker_of_silence: ScriptedBroker) -> None:
    """One after the other, they would take 40 s."""
    async with connected(broker_of_silence, request_timeout_s=0.2) as region:
        cache = region.cache("acme/web/rates")
        async with asyncio.timeout(20):
            found = await asyncio.gather(*(cache.get(f"k{n}") for n in range(200)), return_exceptions=True)
        assert all(isinstance(each, UnavailableError) for each in found)


async def test_a_watch_that_is_closed_ends_and_a_mirror_cancels_nobody(operator: felix.RegionClient) -> None:
    cache = await operator.create_cache("acme/web/rates")

    async def follow(watch: felix.cache.Watch) -> int:
        return len([change async for change in watch])

    async with cache.watch() as watch, cache.mirror() as mirror:
        following = asyncio.ensure_future(follow(watch))
        reaching = asyncio.ensure_future(mirror.reached("a", 99))
        await asyncio.sleep(0.1)
        watch.close()
        await mirror.close()
        assert await following == 1  # that it is ready
        with pytest.raises(UnavailableError):
            await reaching


async def test_a_watch_and_a_mirror_whose_opening_is_cancelled_leave_nothing(
    broker_of_silence: ScriptedBroker,
) -> None:
    async with connected(broker_of_silence) as region:
        cache = region.cache("acme/web/rates")
        before = attached(region), len(asyncio.all_tasks())
        for make in (cache.watch, cache.mirror):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01), make():
                    pass
        await asyncio.sleep(0.01)
        assert (attached(region), len(asyncio.all_tasks())) == before


# -- what is no call --------------------------------------------------------------------------------------


async def test_a_number_that_no_broker_takes_is_refused_here_and_ends_no_session(
    operator: felix.RegionClient,
) -> None:
    """A broker ends the session for it, with all that others have under way there."""
    await operator.create_stream(ORDERS)
    await operator.create_queue(JOBS)
    jobs, orders = operator.queue(JOBS), operator.stream(ORDERS)
    cache = await operator.create_cache("acme/web/rates")
    await orders.publish(b"x")
    await jobs.put_many([b"x"] * 4)
    leased = await jobs.lease(4)
    session = operator.session.session
    beyond = 1 << 63
    async with orders.consumer("billing", start="earliest") as consumer:
        record = await anext(consumer)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: cache.increment("a", beyond),
            lambda: cache.compare_and_set("a", b"x", version=-1),
            lambda: cache.put("\ud800", b"x"),
            lambda: cache.watch(resume=felix.cache.Position(b"x" * 16, {0: beyond})).open(),
            lambda: jobs.lease(max_bytes=-1),
            lambda: jobs.lease(visibility=-1),
            lambda: jobs.peek(-1),
            lambda: jobs.redrive(beyond),
            lambda: leased[0].nack(delay=1e12),
            lambda: leased[1].extend(-1),
            lambda: leased[2].extend(float("nan")),
            lambda: jobs.put(b"x", delay=float("inf")),
            lambda: jobs.consume(visibility=-1).open(),
            lambda: jobs.consume(visibility=1e9).open(),
            lambda: jobs.consume(worker="\ud800").open(),
            lambda: consumer.nack(record, delay=1e12),
            lambda: orders.subscribe(offsets={0: beyond}).open(),
            lambda: orders.consumer("other", ack_timeout=-1).open(),
            lambda: orders.seek_subscription("billing", offsets={0: beyond}),
            lambda: jobs.alter(attempts=-1),
        ]
        for call in calls:
            with pytest.raises(RequestError):
                await call()
    assert operator.session.session == session and operator.reconnects == 0
    operator.connection.begin_anew("a test")
    await until(lambda: operator.reconnects == 1)
    assert (await jobs.describe()).leased == 4


# -- clients ----------------------------------------------------------------------------------------------


async def test_a_client_that_is_left_with_an_exception_does_not_wait_for_a_silent_broker(
    broker_of_silence: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("felix.client.LEAVE_S", 0.05)
    monkeypatch.setattr(BrokerSession, "append", lambda *args: None)
    async with asyncio.timeout(20):
        with pytest.raises(ZeroDivisionError):
            async with connected(broker_of_silence) as region:
                waiting = await region.stream(ORDERS).publish_nowait(b"x")
                raise ZeroDivisionError
        with pytest.raises(UnavailableError, match="closed before"):
            await waiting


async def test_a_client_whose_close_is_cancelled_is_closed(node: Node) -> None:
    from region_peer import client

    for step in range(8):
        region = client(node.folder)
        await region.open()
        if step == 0:
            await region.create_stream(ORDERS)
        await region.stream(ORDERS).publish(b"x")
        await cancelled_at(region.close, step + 1)
        link = region.connection._link
        assert link is not None
        await until(lambda link=link: link.is_over)  # type: ignore[misc]
        await region.close()
        assert not [each for each in asyncio.all_tasks() if each.get_name() == "felix-us-east"]


# -- connecting -------------------------------------------------------------------------------------------


async def test_a_welcome_that_comes_as_whoever_connects_is_cancelled_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    welcome = Link._welcome
    connecting: list[asyncio.Task[None]] = []

    def cancelled_meanwhile(link: Link, message: Welcome) -> None:
        connecting[0].cancel()
        welcome(link, message)

    monkeypatch.setattr(Link, "_welcome", cancelled_meanwhile)

    async def connect() -> None:
        async with connected(ScriptedBroker()):
            raise AssertionError("connected")

    connecting.append(asyncio.ensure_future(connect()))
    with pytest.raises(asyncio.CancelledError):
        await connecting[0]
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
