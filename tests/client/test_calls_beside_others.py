"""What a call that ends, is refused or comes late leaves to those beside it; and sessions that are full."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from client.conftest import connected, until
from client.scripted_broker import BrokerSession, ScriptedBroker
from client.test_abandoned_calls import broker_of_silence, folder
from region_fixtures import node, operator

import felix
from felix import Code, RequestError, UnavailableError
from felix.batch import Batch
from felix.messages import OpenPublisher, PublisherOpened, Request
from felix.queue_messages import Lease
from region.session.client_session import STREAMS_MAX

__all__ = ["broker_of_silence", "folder", "node", "operator"]

pytestmark = pytest.mark.timeout(120)
ORDERS = "acme/payments/orders"
JOBS = "acme/ops/jobs"


# -- publishers -------------------------------------------------------------------------------------------


async def test_closing_tells_of_a_refusal_and_gives_up_nothing_that_was_sent_after_it(
    broker: ScriptedBroker,
) -> None:
    def refuse_the_first(session: BrokerSession, batch: Batch, correlation: int) -> bool:
        broker.on_batch = None
        session.refuse(correlation, RequestError("It is no order.", code=Code.BATCH_TOO_LARGE))
        return True

    broker.on_batch = refuse_the_first
    async with connected(broker) as region:
        publisher = region.stream(ORDERS).publisher()
        await publisher.open()
        await publisher.send(b"a")
        closing = asyncio.ensure_future(publisher.close())
        await asyncio.sleep(0)
        await publisher.send(b"b")
        with pytest.raises(RequestError, match="no order"):
            await closing
        assert broker.streams[ORDERS].payloads() == [b"b"]
        assert publisher.progress.acknowledged == 1


async def test_what_is_given_to_a_publisher_that_was_closed_as_it_opened_is_not_taken(
    broker: ScriptedBroker,
) -> None:
    async with connected(broker) as region:
        publisher = region.stream(ORDERS).publisher()
        giving = [asyncio.ensure_future(each) for each in (publisher.publish(b"x"), publisher.send(b"y"))]
        while not publisher._opened.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        publisher.abort()
        async with asyncio.timeout(10):
            for each in giving:
                with pytest.raises(UnavailableError, match="closed before"):
                    await each


async def test_an_answer_that_comes_as_its_request_is_cancelled_makes_room_for_one_more_alone(
    broker_of_silence: ScriptedBroker,
) -> None:
    async with connected(broker_of_silence) as region:
        link = region.connection.link
        assert link is not None and link._asks is not None
        room = link._asks._value
        for come in (
            lambda number: link._waiting.answered(number, PublisherOpened(1, b"x" * 16, 7)),
            lambda number: link._waiting.refused(number, RequestError("No.")),
            lambda number: None,
        ):
            stream_id = link.connection.open_stream(bidirectional=False)
            asking = asyncio.ensure_future(link.ask(OpenPublisher(ORDERS), stream_id=stream_id))
            await asyncio.sleep(0)
            (number,) = link._waiting._pending
            asking.cancel()
            come(number)
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert link._asks._value == room
            link._waiting.forget(number)


async def test_leaving_does_not_wait_for_a_publisher_that_nobody_waits_for(
    broker_of_silence: ScriptedBroker,
) -> None:
    async with asyncio.timeout(10):
        async with connected(broker_of_silence) as region:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await region.stream(ORDERS).publish(b"x")


async def test_publishing_into_a_stream_that_was_created_anew_raises_once(
    operator: felix.RegionClient,
) -> None:
    await operator.create_stream(ORDERS)
    await operator.create_queue(JOBS)
    for publish, delete, create in (
        (operator.stream(ORDERS).publish, operator.delete_stream, operator.create_stream),
        (operator.queue(JOBS).put, operator.delete_stream, operator.create_queue),
    ):
        name = ORDERS if create == operator.create_stream else JOBS
        assert await publish(b"of the former one") == 0
        await delete(name)
        await create(name)
        with pytest.raises(RequestError) as told:
            await publish(b"lost")
        assert told.value.code is Code.NOT_FOUND_OR_FORBIDDEN
        assert await publish(b"of the new one") == 0


async def test_headers_and_message_ids_that_are_no_text_are_refused(operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS)
    text: Any = "text"
    number: Any = 3
    async with operator.stream(ORDERS).publisher() as publisher:
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: publisher.send(b"x", headers={"\ud800": b"x"}),
            lambda: publisher.send(b"x", headers={"a": text}),
            lambda: publisher.send(b"x", headers={number: b"x"}),
            lambda: publisher.send(b"x", message_id="\ud800"),
            lambda: publisher.publish_batch([felix.NewRecord(b"x", None, {"\ud800": b"x"})]),
        ]
        for call in calls:
            with pytest.raises(RequestError):
                await call()
        assert await publisher.publish(b"y") == 0


# -- queues and consumers ---------------------------------------------------------------------------------


async def test_a_call_that_is_cancelled_as_its_time_is_over_is_cancelled(
    operator: felix.RegionClient,
) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    await jobs.describe()
    exchange = jobs._calls
    assert exchange is not None
    leasing = asyncio.ensure_future(jobs.lease(wait=10))
    await until(lambda: exchange._calls)
    for timer in asyncio.get_running_loop()._scheduled:  # type: ignore[attr-defined]
        if timer._callback == exchange._time_out:
            timer._run()
    leasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leasing


async def test_jobs_of_a_lease_that_was_not_answered_in_time_are_given_back(
    operator: felix.RegionClient,
) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    await jobs.describe()
    asked = Lease(1, 1 << 20, 10_000)
    with pytest.raises(UnavailableError, match="not answered"):
        await jobs._call(asked, again=False, timeout_s=0.05, undo=jobs._give_back)
    await jobs.put(b"x")
    async with asyncio.timeout(20):
        (job,) = await jobs.lease(wait=15)
    assert job.attempts == 1


async def test_leaving_a_worker_waits_for_what_others_say_of_their_jobs_meanwhile(
    operator: felix.RegionClient,
) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    for step in range(12):
        await jobs.put_many([b"x", b"y"])
        consumer = jobs.consume()
        await consumer.open()
        one, two = await anext(consumer), await anext(consumer)
        one.ack()
        closing = asyncio.ensure_future(consumer.close())
        for _ in range(step):
            await asyncio.sleep(0)
        if closing.done():
            break
        said = two.ack()
        await closing
        async with asyncio.timeout(10):
            await said
        assert (await jobs.describe()).leased == 0


async def test_a_worker_whose_close_is_cancelled_ends_whatever_was_said_of_its_jobs(
    operator: felix.RegionClient,
) -> None:
    await operator.create_queue(JOBS)
    jobs = operator.queue(JOBS)
    await jobs.put(b"x")
    consumer = jobs.consume()
    await consumer.open()
    job = await anext(consumer)
    closing = asyncio.ensure_future(consumer.close())
    await asyncio.sleep(0)
    closing.cancel()
    said = job.nack(delay=1e12)
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert consumer._exchange.is_over
    with pytest.raises(RequestError, match="cannot be sent"):
        await said


async def test_many_jobs_are_not_put_for_ever_where_the_broker_has_no_room(broker: ScriptedBroker) -> None:
    def refuse(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
        if isinstance(request, OpenPublisher):
            session.refuse(correlation, UnavailableError("The budget is used up.", code=Code.LIMIT_MEMORY))
        return isinstance(request, OpenPublisher)

    broker.on_request = refuse
    async with connected(broker) as region, asyncio.timeout(10):
        with pytest.raises(UnavailableError, match="budget"):
            await region.queue(ORDERS).put_many([b"x"], priority=1)


async def test_whoever_iterates_a_consumer_that_could_not_be_opened_hears_of_it(
    broker_of_silence: ScriptedBroker,
) -> None:
    async with connected(broker_of_silence, request_timeout_s=0.1) as region:
        consumer = region.stream(ORDERS).consumer("billing", start="earliest")
        opening = asyncio.ensure_future(consumer.open())
        await asyncio.sleep(0)
        iterating = asyncio.ensure_future(anext(consumer))
        with pytest.raises(UnavailableError):
            await opening
        async with asyncio.timeout(10):
            with pytest.raises(UnavailableError):
                await iterating


async def test_a_worker_takes_the_visibility_that_a_broker_takes(operator: felix.RegionClient) -> None:
    await operator.create_queue(JOBS, visibility=7)
    jobs = operator.queue(JOBS)
    for visibility, has in ((None, 7.0), (0, 7.0), (0.1, 0.1), (12 * 3600, 12 * 3600)):
        await jobs.put(b"x")
        async with jobs.consume(visibility=visibility) as consumer:
            job = await anext(consumer)
            left_s = job.until - asyncio.get_running_loop().time()
            assert has - 0.1 <= left_s <= has
            await job.ack()
    for visibility in (0.099, 12 * 3600 + 0.001, -1, float("nan")):
        with pytest.raises(RequestError):
            jobs.consume(visibility=visibility)


# -- sessions that are full -------------------------------------------------------------------------------


async def test_one_stream_too_many_is_refused_and_ends_no_session(operator: felix.RegionClient) -> None:
    """Before, the broker ended the session, and the next one, which had the same streams, too."""
    cache = await operator.create_cache("acme/web/rates")
    await operator.create_stream(ORDERS)
    await operator.stream(ORDERS).publish(b"x")
    session = operator.session.session
    operator.connection.request_timeout_s, kept = 0.5, operator.connection.request_timeout_s
    watches = [cache.watch() for _ in range(STREAMS_MAX)]
    with pytest.raises(UnavailableError, match=f"{STREAMS_MAX} streams open") as told:
        for watch in watches:
            await watch.open()
    assert told.value.code is Code.TIMEOUT
    assert told.value.hint is not None and "watches" in told.value.hint
    waiting = asyncio.ensure_future(watches[0].changes())
    with pytest.raises(UnavailableError, match=f"{STREAMS_MAX} streams open"):
        await cache.get("a")
    assert await operator.stream(ORDERS).publish(b"y") == 1
    assert (await waiting)[0].kind == "ready"
    watches[0].close()
    operator.connection.request_timeout_s = kept
    assert await cache.get("a") is None
    assert operator.session.session == session and operator.reconnects == 0
    for watch in watches:
        watch.close()
