"""Reading: where it starts, what comes, credit, gaps, resuming."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from client.conftest import ORDERS, connected, until
from client.scripted_broker import NOW_MS, BrokerSession, Cursor, ScriptedBroker, ScriptedEngine
from hypothesis import given, settings
from hypothesis import strategies as st

import felix
from felix import (
    Code,
    Durability,
    Gap,
    GapError,
    GapReason,
    ProtocolError,
    RequestError,
    StreamName,
    UnavailableError,
    link,
)
from felix.correlations import Correlations
from felix.errors import NotLeaderError
from felix.frames import FRAME_HEADER_BYTES, FrameType, GapBody, encode_frame
from felix.messages import (
    Answer,
    DescribeStream,
    Request,
    ShardState,
    StreamState,
    Subscribe,
    Subscribed,
    Unsubscribe,
    encode_error,
)
from felix.settings import Retention
from felix.subscription import CREDIT_BYTES_MIN

NAME = StreamName.parse(ORDERS)


async def read(subscription: felix.Subscription, count: int) -> list[bytes]:
    """The next `count` payloads."""
    found: list[bytes] = []
    async with asyncio.timeout(120):
        async for record in subscription:
            found.append(record.payload)
            if len(found) == count:
                break
    return found


def numbers(first: int, last: int) -> list[bytes]:
    return [b"%d" % i for i in range(first, last)]


async def test_from_the_earliest_record_and_on_into_new_ones(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 10))
    async with region.stream(ORDERS).subscribe("earliest") as subscription:
        assert await read(subscription, 10) == numbers(0, 10)
        broker.fill(ORDERS, numbers(10, 12))
        assert await read(subscription, 2) == numbers(10, 12)
        assert subscription.positions == {0: 12}


async def test_a_record_is_whole(region: felix.RegionClient, broker: ScriptedBroker) -> None:
    stream = region.stream(ORDERS)
    await stream.publish(b"p", key=b"k", headers={"a": b"1"})
    async with stream.subscribe("earliest") as subscription:
        record = await anext(subscription)
    assert record == (0, NOW_MS, b"k", {"a": b"1"}, b"p")
    assert type(record.payload) is bytes
    assert type(record.key) is bytes


async def test_from_the_latest_only_what_comes(region: felix.RegionClient, broker: ScriptedBroker) -> None:
    broker.fill(ORDERS, numbers(0, 10))
    async with region.stream(ORDERS).subscribe() as subscription:
        broker.fill(ORDERS, numbers(10, 11))
        assert await read(subscription, 1) == [b"10"]


@pytest.mark.parametrize("start", range(10))
async def test_from_an_offset_records_before_it_are_left_out(
    region: felix.RegionClient, broker: ScriptedBroker, start: int
) -> None:
    broker.fill(ORDERS, numbers(0, 10), per_batch=4)
    async with region.stream(ORDERS).subscribe(start) as subscription:
        assert await read(subscription, 10 - start) == numbers(start, 10)


async def test_from_a_time(region: felix.RegionClient, broker: ScriptedBroker) -> None:
    broker.fill(ORDERS, numbers(0, 9))
    when = datetime.fromtimestamp((NOW_MS + 1) / 1000, UTC)
    async with region.stream(ORDERS).subscribe(when) as subscription:
        assert await read(subscription, 6) == numbers(3, 9)


async def test_whole_batches_with_their_own_first_offset(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 9))
    async with region.stream(ORDERS).subscribe(4) as subscription:
        async for batch in subscription.batches():
            assert (batch.first_offset, batch.next_offset, len(batch), batch.shard) == (4, 6, 2, 0)
            assert [bytes(p) for p in batch.payloads()] == [b"4", b"5"]
            assert batch.header.base_offset == 3
            break


async def test_only_the_shards_asked_for(region: felix.RegionClient, broker: ScriptedBroker) -> None:
    broker.create("acme/ops/wide", shards=3)
    for shard in range(3):
        broker.fill("acme/ops/wide", [b"%d" % shard], shard=shard)
    async with region.stream("acme/ops/wide").subscribe("earliest", shards=[2, 0]) as subscription:
        assert sorted(await read(subscription, 2)) == [b"0", b"2"]
        assert set(subscription.positions) == {0, 2}


@pytest.mark.parametrize("start", ["first", -1, True, 1.5, None, datetime(2013, 1, 1)])
async def test_a_start_that_cannot_be_is_refused(region: felix.RegionClient, start: object) -> None:
    with pytest.raises(RequestError):
        region.stream(ORDERS).subscribe(start)


async def test_options_that_cannot_be_are_refused(region: felix.RegionClient) -> None:
    with pytest.raises(RequestError, match="largest batch"):
        region.stream(ORDERS).subscribe(credit_bytes=1000)
    with pytest.raises(RequestError, match="on_gap"):
        region.stream(ORDERS).subscribe(on_gap="shrug")


async def test_a_stream_that_is_not_there_is_told_at_once(region: felix.RegionClient) -> None:
    with pytest.raises(RequestError) as caught:
        await anext(region.stream("acme/ops/nothing").subscribe())
    assert caught.value.code is Code.NOT_FOUND_OR_FORBIDDEN


# -- credit ------------------------------------------------------------------------------------------------


async def test_a_consumer_that_stops_holds_no_more_than_its_credit(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, [b"x" * 100_000] * 60, per_batch=2)
    async with region.stream(ORDERS).subscribe("earliest", credit_bytes=CREDIT_BYTES_MIN) as subscription:
        await anext(subscription)
        await until(lambda: subscription.held_bytes)
        await asyncio.sleep(0.02)
        (cursor,) = broker.session.cursors.values()
        assert 0 < subscription.held_bytes <= CREDIT_BYTES_MIN
        assert cursor.used <= CREDIT_BYTES_MIN
        assert len(await read(subscription, 59)) == 59
        assert subscription._feed.held_bytes_max <= CREDIT_BYTES_MIN


async def test_credit_that_is_never_enough_for_two_batches_still_flows(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, [b"x" * 1_000_000] * 5, per_batch=1)
    async with region.stream(ORDERS).subscribe("earliest", credit_bytes=CREDIT_BYTES_MIN) as subscription:
        assert len(await read(subscription, 5)) == 5


async def test_a_broker_that_sends_beyond_credit_loses_the_session(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    async with region.stream(ORDERS).subscribe("earliest", credit_bytes=CREDIT_BYTES_MIN) as subscription:
        await asyncio.sleep(0.01)
        session = broker.session
        (cursor,) = session.cursors.values()
        cursor.limit = 1 << 40
        broker.fill(ORDERS, [b"x" * 900_000] * 3, per_batch=1)
        await until(lambda: session.closed_with)
        assert session.closed_with[0] == Code.CREDIT_EXCEEDED
        # It is asked again on the next session, within credit this time.
        assert len(await read(subscription, 3)) == 3


# -- gaps --------------------------------------------------------------------------------------------------


def forget(broker: ScriptedBroker, batches: int) -> None:
    """Retention takes the first batches."""
    shard = broker.streams[ORDERS].shards[0]
    shard.start = shard.batches[batches - 1].header.next_offset
    del shard.batches[:batches]


async def test_a_gap_is_counted_and_reading_goes_on(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 12))
    forget(broker, 2)
    async with region.stream(ORDERS).subscribe(2) as subscription:
        assert await read(subscription, 6) == numbers(6, 12)
        assert subscription.gap_count == 1
        assert list(subscription.gaps) == [Gap(NAME, 0, GapReason.RETENTION, 2, 6)]


async def test_a_gap_is_raised_in_its_place_where_asked_for(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 12))
    forget(broker, 2)
    async with region.stream(ORDERS).subscribe(2, on_gap="raise") as subscription:
        with pytest.raises(GapError, match="Offsets 2 to 5 of shard 0") as caught:
            await anext(subscription)
        assert caught.value.gap.next_offset == 6
        assert await read(subscription, 6) == numbers(6, 12)


async def test_a_gap_is_told_to_a_function(region: felix.RegionClient, broker: ScriptedBroker) -> None:
    broker.fill(ORDERS, numbers(0, 12))
    forget(broker, 1)
    told: list[Gap] = []
    async with region.stream(ORDERS).subscribe(0, on_gap=told.append) as subscription:
        assert await read(subscription, 1) == [b"3"]
    assert [gap.next_offset for gap in told] == [3]


async def test_offsets_that_jump_without_a_notice_are_a_gap_too(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 9))
    del broker.streams[ORDERS].shards[0].batches[1]
    async with region.stream(ORDERS).subscribe(0, on_gap="raise") as subscription:
        assert await read(subscription, 3) == numbers(0, 3)
        with pytest.raises(GapError) as caught:
            await anext(subscription)
        assert caught.value.gap[3:] == (3, 6)
        assert await read(subscription, 3) == numbers(6, 9)


async def test_a_gap_notice_that_cannot_be_ends_the_session(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 3))
    async with region.stream(ORDERS).subscribe("earliest") as subscription:
        assert await read(subscription, 3) == numbers(0, 3)
        session = broker.session
        (cursor,) = session.cursors.values()
        session.event(cursor, GapBody(0, 1, 9, 3).encode())
        await until(lambda: session.closed_with)
        broker.fill(ORDERS, numbers(3, 4))
        assert await read(subscription, 1) == [b"3"]


# -- resuming ----------------------------------------------------------------------------------------------


async def test_after_a_crash_reading_goes_on_where_it_stood(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 20), per_batch=4)
    async with region.stream(ORDERS).subscribe("earliest") as subscription:
        assert await read(subscription, 6) == numbers(0, 6)
        broker.session.drop()
        broker.fill(ORDERS, numbers(20, 24))
        assert await read(subscription, 18) == numbers(6, 24)
        assert subscription.resumes == 1
    again = [r for r in broker.requests if isinstance(r, Subscribe)][1]
    assert again.incarnation == subscription.incarnation
    assert again.start.offsets[0] % 4 == 0


class Moving:
    """A reader of a stream that the brokers `broker` and `other` have, and who is sent from one to the other. Both links stand."""

    def __init__(self, region: felix.RegionClient, broker: ScriptedBroker) -> None:
        self.broker, self.other = broker, ScriptedBroker()
        self.other.streams = broker.streams
        assert region._connection is not None and isinstance(region._connection._engine, ScriptedEngine)
        region._connection._engine.brokers["other"] = self.other
        self.routes = region._connection._routes
        self.epoch = 0
        self.asked: list[tuple[BrokerSession, Request, int]] = []
        self.held: list[tuple[Cursor, bytes]] = []

    def to(self, host: str) -> None:
        """A client of the stream is told that the broker there leads it."""
        self.epoch += 1
        said = NotLeaderError(
            "Another leads.", stream=ORDERS, leader=host, address=f"{host}:7443", epoch=self.epoch
        )
        self.routes.learned(said, "broker:7443")

    async def until_it_asks(self, at: ScriptedBroker) -> None:
        """The next subscription at a broker has to wait for `answer`."""
        at.on_request = lambda *asked: isinstance(asked[1], Subscribe) and not self.asked.append(asked)
        await until(lambda: self.asked)
        at.on_request = None

    def answer(self, *, hold_events: bool = False) -> None:
        session, request, correlation = self.asked.pop()
        if hold_events:
            began = set(session.cursors)
            send = session.event

            def event(cursor: Cursor, frame: bytes) -> None:
                if cursor.subscription in began:
                    send(cursor, frame)
                else:
                    self.held.append((cursor, frame))

            session.event = event  # type: ignore[method-assign]
        session._request(correlation, request)

    def release(self) -> None:
        """What the broker had sent of the new subscription arrives: streams of one connection overtake each other."""
        for cursor, frame in self.held:
            cursor_session = next(
                s for s in (*self.broker.sessions, *self.other.sessions) if cursor in s.cursors.values()
            )
            BrokerSession.event(cursor_session, cursor, frame)


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_reader_that_moves_takes_nothing_more_from_where_it_was(
    region: felix.RegionClient, broker: ScriptedBroker, comes_back: bool
) -> None:
    moving = Moving(region, broker)
    async with region.stream(ORDERS).subscribe("earliest") as subscription:
        broker.fill(ORDERS, numbers(0, 1))
        assert await read(subscription, 1) == numbers(0, 1)
        moving.to("other")
        await moving.until_it_asks(moving.other)
        if comes_back:
            moving.to("broker")
            moving.asked.clear()
            await moving.until_it_asks(broker)
        # While it is nowhere, one more is committed, which the broker that it left sends.
        broker.fill(ORDERS, numbers(1, 2))
        await asyncio.sleep(0.01)
        moving.answer(hold_events=True)
        await until(lambda: subscription.resumes == 1)
        broker.fill(ORDERS, numbers(2, 3))
        reading = asyncio.create_task(read(subscription, 2))
        await asyncio.sleep(0.01)
        moving.other.deliver()
        moving.release()
        await until(lambda: reading.done() or subscription.gaps)
        assert list(map(str, subscription.gaps)) == []
        assert await reading == numbers(1, 3)
        held = [cursor for each in (broker, moving.other) for s in each.sessions for cursor in s.cursors]
        assert len(held) == 1, "the broker that it left delivers nothing more"


async def test_what_ends_where_a_reader_was_does_not_end_it_where_it_is(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    moving = Moving(region, broker)
    async with region.stream(ORDERS).subscribe("earliest") as subscription:
        (cursor,) = broker.session.cursors.values()
        moving.to("other")
        await until(lambda: subscription.resumes == 1)
        # The leader that was deposed says so when the reader is gone.
        broker.session.event(cursor, encode_error(UnavailableError("Another leads.")))
        await asyncio.sleep(0.02)
        assert subscription.resumes == 1
        moving.other.fill(ORDERS, numbers(0, 1))
        assert await read(subscription, 1) == numbers(0, 1)
        moving.other.check()


async def test_positions_of_one_subscription_begin_another(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 9))
    stream = region.stream(ORDERS)
    async with stream.subscribe("earliest") as first:
        await read(first, 3)
        kept, incarnation = first.positions, first.incarnation
    async with stream.subscribe(offsets=kept, incarnation=incarnation) as second:
        assert await read(second, 6) == numbers(3, 9)


async def test_a_stream_made_anew_is_told_and_read_from_its_beginning(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 6))
    async with region.stream(ORDERS).subscribe("earliest") as subscription:
        await read(subscription, 6)
        old = subscription.incarnation
        broker.create(ORDERS)
        broker.fill(ORDERS, [b"new"])
        broker.session.drop()
        assert await read(subscription, 1) == [b"new"]
        assert list(subscription.gaps) == [Gap(NAME, 0, GapReason.RECREATED, 6, 0)]
        assert subscription.incarnation != old


async def test_positions_are_of_the_former_stream_until_the_new_one_is_told(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    """A program may store them at any moment, and end: its next process is to miss nothing, and to be told."""
    broker.fill(ORDERS, numbers(0, 6))
    stream = region.stream(ORDERS)
    async with stream.subscribe("earliest") as subscription:
        assert (await anext(subscription)).offset == 0
        former = subscription.incarnation
        broker.create(ORDERS)
        broker.fill(ORDERS, numbers(10, 20))
        broker.session.drop()
        await until(lambda: subscription.resumes == 1)
        kept, incarnation = subscription.positions, subscription.incarnation
        assert (kept, incarnation) == ({0: 1}, former)
        assert await read(subscription, 12) == numbers(1, 3) + numbers(10, 20)
        assert subscription.incarnation == broker.streams[ORDERS].incarnation
    async with stream.subscribe(offsets=kept, incarnation=incarnation) as following:
        assert await read(following, 10) == numbers(10, 20)
        assert [gap.reason for gap in following.gaps] == [GapReason.RECREATED]


async def test_positions_within_a_batch_are_never_beyond_what_the_log_has_lost(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    log = broker.streams[ORDERS]
    broker.fill(ORDERS, numbers(0, 9), per_batch=3)
    stream = region.stream(ORDERS)
    async with stream.subscribe("earliest") as subscription:
        for _ in range(8):
            await anext(subscription)
        assert subscription.positions == {0: 8}
        del log.shards[0].batches[2:]
        broker.session.drop()
        await until(lambda: subscription.resumes == 1)
        broker.fill(ORDERS, numbers(20, 26))
        kept, incarnation = subscription.positions, subscription.incarnation
    async with stream.subscribe(offsets=kept, incarnation=incarnation) as following:
        assert await read(following, 6) == numbers(20, 26)


async def test_a_gap_that_was_found_and_not_taken_outlives_the_next_link(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    log = broker.streams[ORDERS]
    broker.fill(ORDERS, numbers(0, 6))
    async with region.stream(ORDERS).subscribe("earliest") as subscription:
        assert await read(subscription, 6) == numbers(0, 6)
        del log.shards[0].batches[1]
        broker.session.drop()
        await until(lambda: subscription.resumes == 1)
        broker.fill(ORDERS, [b"other"])
        broker.session.drop()
        await until(lambda: subscription.resumes == 2)
        assert await read(subscription, 1) == [b"other"]
        assert list(subscription.gaps) == [Gap(NAME, 0, GapReason.TRUNCATED, 6, 3)]
        broker.create(ORDERS)
        broker.fill(ORDERS, numbers(10, 16))
        for resumes in (3, 4):
            broker.session.drop()
            await until(lambda resumes=resumes: subscription.resumes == resumes)
        assert await read(subscription, 6) == numbers(10, 16)
        assert list(subscription.gaps)[1:] == [Gap(NAME, 0, GapReason.RECREATED, 4, 0)]


@pytest.mark.parametrize(("durability", "goes_on"), [("interval", 4), ("ephemeral", 0)])
async def test_a_log_that_lost_its_end_is_told_and_read_on(
    region: felix.RegionClient, broker: ScriptedBroker, durability: str, goes_on: int
) -> None:
    log = broker.streams[ORDERS]
    log.durability = Durability(durability)
    broker.fill(ORDERS, numbers(0, 8), per_batch=4)
    async with region.stream(ORDERS).subscribe("earliest") as subscription:
        assert await read(subscription, 8) == numbers(0, 8)
        del log.shards[0].batches[1]
        broker.session.drop()
        reading = asyncio.ensure_future(read(subscription, 8))
        await until(lambda: subscription.gaps)
        reading.cancel()
        await asyncio.wait([reading])
        assert list(subscription.gaps) == [Gap(NAME, 0, GapReason.TRUNCATED, 8, goes_on)]
        broker.fill(ORDERS, [b"other"])
        async for record in subscription:
            if record.payload == b"other":
                assert record.offset == 4
                break


@pytest.mark.parametrize("untold", [(1,), (0, 1)])
async def test_a_shard_that_the_broker_does_not_serve_lost_no_end(
    region: felix.RegionClient, broker: ScriptedBroker, untold: tuple[int, ...]
) -> None:
    log = broker.create(ORDERS, 2)
    broker.fill(ORDERS, numbers(0, 8), per_batch=4)
    broker.fill(ORDERS, numbers(10, 18), shard=1)
    async with region.stream(ORDERS).subscribe("earliest") as subscription:
        await read(subscription, 16)
        del log.shards[0].batches[1]
        answered = 0

        def once(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
            nonlocal answered
            if not isinstance(request, DescribeStream) or answered:
                return False
            answered += 1
            shards = [
                ShardState(number, 0, 0, 0, 0, leader="b2")
                if number in untold
                else ShardState(number, each.start, each.end, each.end, 1)
                for number, each in enumerate(log.shards)
            ]
            session.answer(
                correlation,
                StreamState(ORDERS, log.incarnation, 2, log.durability, Retention(), 0, NOW_MS, shards),
            )
            return True

        broker.on_request = once
        broker.session.drop()
        await until(lambda: subscription.resumes == 1)
        broker.fill(ORDERS, [b"other"], shard=1)
        assert await read(subscription, 1) == [b"other"]
        assert list(subscription.gaps) == [Gap(NAME, 0, GapReason.TRUNCATED, 8, 4)] and answered


async def test_offsets_without_an_incarnation_count_in_the_present_one(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 9))
    async with region.stream(ORDERS).subscribe(offsets={0: 4}) as subscription:
        assert await read(subscription, 5) == numbers(4, 9)
    (request,) = (r for r in broker.requests if isinstance(r, Subscribe))
    assert request.incarnation == broker.streams[ORDERS].incarnation


async def test_an_offset_that_is_not_written_yet_is_refused(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    with pytest.raises(RequestError) as caught:
        await anext(region.stream(ORDERS).subscribe(5))
    assert caught.value.code is Code.OFFSET_OUT_OF_RANGE


async def test_a_right_taken_away_ends_the_subscription_after_what_came(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 3))
    async with region.stream(ORDERS).subscribe("earliest") as subscription:
        await asyncio.sleep(0.01)
        broker.session.end_subscription(RequestError("The right was revoked.", code=Code.FORBIDDEN))
        await asyncio.sleep(0.01)
        assert await read(subscription, 3) == numbers(0, 3)
        for _ in range(2):
            with pytest.raises(RequestError) as caught:
                await anext(subscription)
            assert caught.value.code is Code.FORBIDDEN


async def test_a_shard_that_stopped_for_now_is_asked_again(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 3))
    async with region.stream(ORDERS).subscribe("earliest") as subscription:
        await read(subscription, 3)
        broker.session.end_subscription(
            UnavailableError("Elsewhere.", code=Code.NOT_LEADER, retry_after_ms=1)
        )
        broker.fill(ORDERS, numbers(3, 6))
        assert await read(subscription, 3) == numbers(3, 6)
    assert region.reconnects == 0


async def test_a_subscription_refused_for_now_is_asked_again_without_a_gap(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 3))
    tries = 0

    def busy(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
        nonlocal tries
        tries += 1
        if tries == 1:
            session.refuse(correlation, UnavailableError("busy", code=Code.LIMIT_RATE, retry_after_ms=1))
        return tries == 1

    broker.on_request = busy
    async with region.stream(ORDERS).subscribe("earliest") as subscription:
        assert await read(subscription, 3) == numbers(0, 3)
        assert subscription.gap_count == 0


# -- ending ------------------------------------------------------------------------------------------------


async def test_closing_unsubscribes_and_stragglers_are_dropped(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.fill(ORDERS, numbers(0, 3))
    subscription = region.stream(ORDERS).subscribe("earliest")
    await read(subscription, 1)
    await subscription.close()
    await subscription.close()
    broker.fill(ORDERS, numbers(3, 6))
    await until(lambda: not broker.session.cursors)
    assert isinstance(broker.requests[-1], Unsubscribe)
    assert region.reconnects == 0
    assert [record async for record in subscription] == []


async def test_one_that_is_dropped_is_ended(region: felix.RegionClient, broker: ScriptedBroker) -> None:
    broker.fill(ORDERS, numbers(0, 3))
    async for _ in region.stream(ORDERS).subscribe("earliest"):
        break
    for _ in range(100):
        if any(isinstance(request, Unsubscribe) for request in broker.requests):
            break
        await asyncio.sleep(0.01)
    assert not broker.session.cursors


async def test_a_cancelled_subscribe_is_undone_when_its_answer_comes(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    held: list[tuple[BrokerSession, Request, int]] = []

    def hold(*asked: object) -> bool:
        held.append(asked)
        broker.on_request = None
        return True

    broker.on_request = hold
    subscription = region.stream(ORDERS).subscribe("earliest")
    task = asyncio.create_task(subscription.open())
    await until(lambda: held)
    await subscription.close()
    with pytest.raises(UnavailableError):
        await task
    session, request, correlation = held[0]
    session._request(correlation, request)
    await until(lambda: any(isinstance(request, Unsubscribe) for request in broker.requests))


async def test_a_subscribe_that_is_cancelled_as_its_answer_comes_is_undone(
    region: felix.RegionClient, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscription = region.stream(ORDERS).subscribe("earliest")
    answered = Correlations.answered

    def answered_and_closed(self: Correlations, correlation: int, answer: Answer) -> None:
        answered(self, correlation, answer)
        if isinstance(answer, Subscribed):
            # The answer is there, and whoever asked has not seen it.
            subscription._feed.close()

    monkeypatch.setattr(Correlations, "answered", answered_and_closed)
    with pytest.raises(UnavailableError):
        await subscription.open()
    await until(lambda: any(isinstance(request, Unsubscribe) for request in broker.requests))
    await until(lambda: not broker.session.cursors)


async def test_two_tasks_do_not_share_one_subscription(region: felix.RegionClient) -> None:
    async with region.stream(ORDERS).subscribe() as subscription:
        first = asyncio.create_task(anext(subscription))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="Two tasks"):
            await anext(subscription)
        first.cancel()


async def test_a_wait_that_is_cancelled_loses_nothing(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    async with region.stream(ORDERS).subscribe() as subscription:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.005):
                    await anext(subscription)
        broker.fill(ORDERS, [b"x"])
        assert await read(subscription, 1) == [b"x"]


async def test_what_is_no_batch_is_the_brokers_fault(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    async with region.stream(ORDERS).subscribe() as subscription:
        session = broker.session
        (cursor,) = session.cursors.values()
        session.event(cursor, encode_frame(FrameType.BATCH, b"x" * 200))
        with pytest.raises(ProtocolError) as caught:
            await anext(subscription)
        assert caught.value.code is Code.BATCH_MALFORMED
    assert FRAME_HEADER_BYTES == 12


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_happens_each_record_is_read_once_and_in_order(data: st.DataObject) -> None:
    """Crashes between any two records, any sizes of batches, any start."""
    total = data.draw(st.integers(1, 40), label="records")
    per_batch = data.draw(st.integers(1, 7), label="per_batch")
    start = data.draw(st.integers(0, total - 1), label="start")
    crashes = data.draw(st.sets(st.integers(0, total), max_size=6), label="crashes")
    whole_batches = data.draw(st.booleans(), label="batches")

    async def run() -> None:
        broker = ScriptedBroker()
        broker.create(ORDERS)
        broker.fill(ORDERS, numbers(0, total), per_batch=per_batch)
        found: list[bytes] = []
        async with (
            asyncio.timeout(120),
            connected(broker) as region,
            region.stream(ORDERS).subscribe(start) as subscription,
        ):
            while len(found) < total - start:
                if len(found) in crashes:
                    crashes.discard(len(found))
                    broker.session.drop()
                if whole_batches:
                    found += map(bytes, (await subscription.next_batch()).payloads())
                else:
                    found.append((await anext(subscription)).payload)
            assert subscription.gap_count == 0
        assert found == numbers(start, total)

    asyncio.run(run())


async def test_who_only_reads_asks_of_several_brokers_whether_its_own_is_there(
    region: felix.RegionClient, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "READER_SILENT_S", 0.01)
    heard = 0
    async with region.stream(ORDERS).subscribe():
        found = region.connection.link
        assert found is not None
        control = broker.session._control

        def counting(data: bytes) -> None:
            nonlocal heard
            heard += bytes(encode_frame(FrameType.PING, b"")) in data
            control(data)

        monkeypatch.setattr(broker.session, "_control", counting)
        assert found._reading is None, "a region of one broker has nobody else to ask"
        found._look_for_readers()
        await until(lambda: heard >= 2)
    broker.check()
