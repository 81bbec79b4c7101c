"""Publishing: batches, credit, order and repetition, refusals, bounds."""

from __future__ import annotations

import asyncio
import random
import time
from itertools import pairwise
from typing import Any

import pytest
from client.conftest import ORDERS, connected, until
from client.scripted_broker import BrokerSession, ScriptedBroker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import felix
from felix import Code, NewRecord, RequestError, UnavailableError, connection, link
from felix import publisher as publisher_module
from felix.batch import FLAG_ZSTD, Batch, decode_records
from felix.frames import FrameType, encode_frame
from felix.messages import Limits, OpenPublisher, Request
from felix.names import shard_for_key
from felix.publisher_core import FLYING_BATCHES_FILL, IN_FLIGHT_MAX
from region.log.producers import BATCHES_REMEMBERED


async def test_publish_returns_the_offset(region: felix.RegionClient, broker: ScriptedBroker) -> None:
    orders = region.stream(ORDERS)
    assert await orders.publish(b"a") == 0
    assert await orders.publish(b"b", key=b"k", headers={"h": b"v"}) == 1
    (_, second) = broker.received
    (record,) = decode_records(second)
    assert (bytes(record.key), record.headers) == (b"k", {"h": b"v"})


async def test_a_burst_batches_itself_and_a_lone_record_does_not_wait(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    orders = region.stream(ORDERS)
    await orders.publish(b"alone")
    offsets = await asyncio.gather(*(orders.publish(b"%d" % i) for i in range(100)))
    assert offsets == list(range(1, 101))
    assert [batch.header.records for batch in broker.received] == [1, 100]


async def test_linger_gathers_what_comes_within_it(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    async with region.stream(ORDERS).publisher(linger_ms=500) as publisher:
        for i in range(5):
            await publisher.send(b"%d" % i)
            await asyncio.sleep(0)
        assert not broker.received
        await until(lambda: broker.received)
    assert [batch.header.records for batch in broker.received] == [5]


async def test_a_batch_closes_when_it_is_full(region: felix.RegionClient, broker: ScriptedBroker) -> None:
    async with region.stream(ORDERS).publisher(linger_ms=1000, batch_records=4) as publisher:
        for i in range(10):
            await publisher.send(b"%d" % i)
    assert [batch.header.records for batch in broker.received] == [4, 4, 2]
    broker.received.clear()
    async with region.stream(ORDERS).publisher(linger_ms=1000, batch_bytes=1024) as publisher:
        for _ in range(10):
            await publisher.send(b"x" * 300)
    assert [batch.header.records for batch in broker.received] == [3, 3, 3, 1]
    assert all(batch.header.total_length <= 1024 + 96 for batch in broker.received)


async def test_a_producer_that_never_waits_makes_full_batches(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    async with region.stream(ORDERS).publisher(batch_records=100) as publisher:
        for i in range(1_000):
            await publisher.send(b"%d" % i)
    assert [batch.header.records for batch in broker.received] == [100] * 10


async def test_keys_choose_the_shard_and_the_rest_goes_round_by_batch(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    log = broker.create("acme/ops/wide", shards=4)
    keys = [b"%d" % i for i in range(40)]
    async with region.stream("acme/ops/wide").publisher(batch_records=3) as publisher:
        await publisher.send_many(keys, keys)
    for shard in range(4):
        assert log.payloads(shard) == [key for key in keys if shard_for_key(key, 4) == shard]
    broker.received.clear()
    async with region.stream("acme/ops/wide").publisher(batch_records=3) as publisher:
        await publisher.send_many(keys[:24])
    assert [batch.header.shard for batch in broker.received] == [0, 1, 2, 3, 0, 1, 2, 3]


async def test_publish_many_gives_the_offsets_in_the_order_given(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    log = broker.create("acme/ops/wide", shards=3)
    payloads = [b"%d" % i for i in range(500)]
    offsets = await region.stream("acme/ops/wide").publish_many(payloads, payloads)
    for payload, offset in zip(payloads, offsets, strict=True):
        assert log.payloads(shard_for_key(payload, 3))[offset] == payload
    assert await region.stream("acme/ops/wide").publish_many([]) == []


async def test_publish_batch_is_one_batch_in_one_shard(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.create("acme/ops/wide", shards=3)
    stream = region.stream("acme/ops/wide")
    receipt = await stream.publish_batch([NewRecord(b"a"), NewRecord(b"b")], shard=2)
    assert (receipt.shard, receipt.base_offset, receipt.records) == (2, 0, 2)
    keyed = await stream.publish_batch([NewRecord(b"a", b"k"), NewRecord(b"b", b"k")])
    assert keyed.shard == shard_for_key(b"k", 3)
    with pytest.raises(RequestError, match="shards by their keys"):
        await stream.publish_batch([NewRecord(b"a", b"%d" % i) for i in range(9)])
    with pytest.raises(RequestError, match="no shard 3"):
        await stream.publish_batch([NewRecord(b"a")], shard=3)
    with pytest.raises(RequestError, match="without records"):
        await stream.publish_batch([])


@pytest.mark.parametrize(
    ("payload", "key", "headers", "code"),
    [
        (b"x" * (1 << 20), None, None, Code.BATCH_TOO_LARGE),
        ("text", None, None, Code.INVALID),
        (5, None, None, Code.INVALID),
        (b"x", b"k" * 5000, None, Code.BATCH_TOO_LARGE),
        (b"x", "key", None, Code.INVALID),
        (b"x", None, {"": b"v"}, Code.INVALID),
        (b"x", None, {str(i): b"" for i in range(65)}, Code.INVALID),
    ],
)
async def test_a_record_that_cannot_be_is_refused_alone(
    region: felix.RegionClient,
    broker: ScriptedBroker,
    payload: object,
    key: object,
    headers: object,
    code: Code,
) -> None:
    async with region.stream(ORDERS).publisher() as publisher:
        await publisher.send(b"before")
        with pytest.raises(RequestError) as caught:
            await publisher.send(payload, key, headers)
        assert caught.value.code is code
        await publisher.send(b"after")
    assert broker.streams[ORDERS].payloads() == [b"before", b"after"]


async def test_bytes_that_change_later_are_copied(region: felix.RegionClient, broker: ScriptedBroker) -> None:
    payload = bytearray(b"one")
    async with region.stream(ORDERS).publisher(linger_ms=1000) as publisher:
        await publisher.send(payload)
        payload[:] = b"two"
        await publisher.send(memoryview(payload))
    assert broker.streams[ORDERS].payloads() == [b"one", b"two"]


# -- credit and bounds -------------------------------------------------------------------------------------


async def test_nothing_is_sent_beyond_credit(broker: ScriptedBroker) -> None:
    broker.publish_credit_bytes = 5_000
    broker.hold_credit = True
    async with connected(broker) as region, region.stream(ORDERS).publisher(batch_bytes=1024) as publisher:
        for _ in range(10):
            await publisher.send(b"x" * 900)
        await until(lambda: len(broker.received) >= 4)
        await asyncio.sleep(0.02)
        assert len(broker.received) == 4
        assert broker.session.credit_used <= 5_000
        broker.hold_credit = False
        for batch in list(broker.received):
            broker.session.give_credit(batch.header.total_length + 12)
        await publisher.flush()
        assert len(broker.received) == 10
    broker.check()


async def test_a_batch_larger_than_all_credit_is_refused_at_once(broker: ScriptedBroker) -> None:
    broker.publish_credit_bytes = 10_000
    async with connected(broker) as region:
        with pytest.raises(RequestError, match="never be sent") as caught:
            await region.stream(ORDERS).publish(b"x" * 20_000)
        assert caught.value.code is Code.BATCH_TOO_LARGE
        assert await region.stream(ORDERS).publish(b"small") == 0


async def test_publishers_share_the_sessions_credit(broker: ScriptedBroker) -> None:
    broker.publish_credit_bytes = 4_000
    broker.create("acme/ops/other")
    async with connected(broker) as region:

        async def fill(name: str) -> None:
            async with region.stream(name).publisher(batch_bytes=1024) as publisher:
                for _ in range(40):
                    await publisher.send(b"x" * 700)

        await asyncio.gather(fill(ORDERS), fill("acme/ops/other"))
    assert len(broker.streams[ORDERS].payloads()) == len(broker.streams["acme/ops/other"].payloads()) == 40
    broker.check()


async def test_send_waits_when_the_buffer_is_full(region: felix.RegionClient, broker: ScriptedBroker) -> None:
    broker.hold_acks = True
    async with region.stream(ORDERS).publisher(buffer_bytes=1 << 20) as publisher:
        held = 0

        async def produce() -> None:
            nonlocal held
            for _ in range(400):
                await publisher.send(b"x" * 10_000)
                held = max(held, publisher.held_bytes)

        task = asyncio.create_task(produce())
        await until(lambda: publisher.held_bytes + 10_000 > 1 << 20)
        await asyncio.sleep(0.05)
        assert not task.done()
        assert held <= (1 << 20) + 10_012
        with pytest.raises(UnavailableError) as caught:
            publisher.publish_nowait(b"x")
        assert caught.value.code is Code.LIMIT_MEMORY
        broker.hold_acks = False
        broker.session.release()
        await task
        assert held <= (1 << 20) + 10_012
    assert len(broker.streams[ORDERS].payloads()) == 400


async def test_a_long_linger_does_not_make_a_full_buffer_wait_for_itself(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    async with region.stream(ORDERS).publisher(
        linger_ms=60_000, batch_bytes=1 << 20, buffer_bytes=1 << 20
    ) as publisher:
        async with asyncio.timeout(120):
            for _ in range(5):
                await publisher.send(b"x" * 600_000)
    assert len(broker.streams[ORDERS].payloads()) == 5


async def test_with_some_batches_on_the_way_the_next_one_fills(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.hold_acks = True
    async with region.stream(ORDERS).publisher() as publisher:
        for _ in range(30):
            await publisher.send(b"x")
            await asyncio.sleep(0.001)
        assert len(broker.received) == FLYING_BATCHES_FILL
        broker.hold_acks = False
        broker.session.release()
    assert [batch.header.records for batch in broker.received] == [1] * FLYING_BATCHES_FILL + [
        30 - FLYING_BATCHES_FILL
    ]


@pytest.mark.parametrize("in_flight", [31, 127, 1_000])
async def test_as_many_batches_are_in_flight_as_the_broker_allows_and_no_more_than_it_remembers(
    region: felix.RegionClient, broker: ScriptedBroker, in_flight: int
) -> None:
    assert IN_FLIGHT_MAX < BATCHES_REMEMBERED
    broker.hold_acks = True
    broker.in_flight = in_flight
    count = 2 * IN_FLIGHT_MAX
    async with region.stream(ORDERS).publisher(batch_records=2) as publisher:
        await publisher.send_many([b"%d" % i for i in range(2 * count)])
        await until(lambda: len(broker.received) >= min(in_flight, IN_FLIGHT_MAX))
        await asyncio.sleep(0.01)
        assert len(broker.received) == min(in_flight, IN_FLIGHT_MAX)
        broker.hold_acks = False
        broker.session.release()
    assert [batch.header.records for batch in broker.received] == [2] * count


async def test_a_high_backlog_holds_batches_until_it_has_drained(
    region: felix.RegionClient, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with region.stream(ORDERS).publisher() as publisher:
        client_end = broker.session.connection.peer
        held = 1 << 30
        monkeypatch.setattr(client_end, "backlog_bytes", lambda: held)
        await publisher.send(b"x")
        await asyncio.sleep(0.01)
        assert not broker.received
        held = 0
        client_end._handler.drained()
        await publisher.flush()
        assert len(broker.received) == 1


# -- at most once -------------------------------------------------------------------------------------------


async def test_without_acknowledgement_nothing_is_awaited(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    async with region.stream(ORDERS).publisher(acks="none", batch_records=2) as publisher:
        await publisher.send_many([b"%d" % i for i in range(10)])
        await publisher.flush()
        assert publisher.held_bytes == 0
        with pytest.raises(RequestError, match="no offsets"):
            await publisher.publish(b"x")
    await until(lambda: len(broker.received) == 5)
    assert {batch.header.producer_id for batch in broker.received} == {0}


# -- repetition and order -----------------------------------------------------------------------------------


async def test_unacknowledged_batches_are_sent_again_with_the_same_sequences(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.hold_acks = True
    async with region.stream(ORDERS).publisher(batch_records=2) as publisher:
        futures = [publisher.publish_nowait(b"%d" % i) for i in range(8)]
        await until(lambda: len(broker.received) == 4)
        broker.hold_acks = False
        broker.session.drop()
        assert await asyncio.gather(*futures) == list(range(8))
    first, again = broker.received[:4], broker.received[4:]
    assert [b.header.base_sequence for b in first] == [0, 2, 4, 6]
    assert [b.header for b in first] == [b.header for b in again]
    assert broker.streams[ORDERS].payloads() == [b"%d" % i for i in range(8)]
    assert publisher.batches_resent == 4


async def test_records_given_while_disconnected_wait(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    async with region.stream(ORDERS).publisher() as publisher:
        await publisher.publish(b"0")
        broker.down = True
        broker.session.drop()
        await asyncio.sleep(0)
        future = publisher.publish_nowait(b"1")
        await asyncio.sleep(0.02)
        assert not future.done()
        broker.down = False
        assert await future == 1


async def test_a_refusal_for_now_is_tried_again_and_order_is_kept(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    busy = 3

    def sometimes(session: BrokerSession, batch: Batch, correlation: int) -> bool:
        nonlocal busy
        if batch.header.base_sequence == 2 and busy:
            busy -= 1
            session.give_credit(batch.header.total_length + 12)
            session.refuse(correlation, UnavailableError("full", code=Code.LIMIT_MEMORY, retry_after_ms=2))
            return True
        return False

    broker.on_batch = sometimes
    async with region.stream(ORDERS).publisher(batch_records=2) as publisher:
        offsets = await publisher.publish_many([b"%d" % i for i in range(10)])
    assert offsets == list(range(10))
    assert broker.streams[ORDERS].payloads() == [b"%d" % i for i in range(10)]


async def test_a_refusal_for_now_that_lasts_is_raised_after_the_deadline(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    def never(session: BrokerSession, batch: Batch, correlation: int) -> bool:
        session.give_credit(batch.header.total_length + 12)
        session.refuse(
            correlation, UnavailableError("The disk is full.", code=Code.DISK_FULL, retry_after_ms=5)
        )
        return True

    broker.on_batch = never
    async with region.stream(ORDERS).publisher(deadline_ms=60) as publisher:
        with pytest.raises(UnavailableError) as caught:
            await publisher.publish(b"x")
    assert caught.value.code in (Code.DISK_FULL, Code.TIMEOUT)
    assert len(broker.received) >= 2


async def test_a_refused_batch_is_delivered_and_what_follows_is_not_lost(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    def refuse_third(session: BrokerSession, batch: Batch, correlation: int) -> bool:
        if next(bytes(r.payload) for r in decode_records(batch)) == b"4":
            session.give_credit(batch.header.total_length + 12)
            session.refuse(correlation, RequestError("No right.", code=Code.FORBIDDEN))
            return True
        return False

    broker.on_batch = refuse_third
    refused: list[felix.Refusal] = []
    async with region.stream(ORDERS).publisher(batch_records=2, on_refused=refused.append) as publisher:
        futures = [publisher.publish_nowait(b"%d" % i) for i in range(12)]
        done = await asyncio.gather(*futures, return_exceptions=True)
    assert [isinstance(d, RequestError) for d in done] == [i in (4, 5) for i in range(12)]
    assert broker.streams[ORDERS].payloads() == [b"%d" % i for i in range(12) if i not in (4, 5)]
    assert [d for d in done if isinstance(d, int)] == list(range(10))
    (only,) = refused
    assert only.error.code is Code.FORBIDDEN
    assert [bytes(record.payload) for record in only.records()] == [b"4", b"5"]


async def test_a_refusal_nobody_awaits_is_raised_by_flush_once(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    def refuse(session: BrokerSession, batch: Batch, correlation: int) -> bool:
        broker.on_batch = None
        session.refuse(correlation, RequestError("No right.", code=Code.FORBIDDEN))
        return True

    broker.on_batch = refuse
    async with region.stream(ORDERS).publisher() as publisher:
        await publisher.send(b"x")
        with pytest.raises(RequestError, match="No right"):
            await publisher.flush()
        await publisher.send(b"y")
        await publisher.flush()
    assert broker.streams[ORDERS].payloads() == [b"y"]


async def test_a_broker_that_forgot_the_producer_gets_a_new_epoch(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    async with region.stream(ORDERS).publisher() as publisher:
        await publisher.publish(b"0")
        broker.streams[ORDERS].shards[0].producers.clear()
        assert await publisher.publish(b"1") == 1
    assert broker.received[-1].header.producer_epoch == 1
    assert broker.received[-1].header.base_sequence == 0


async def test_a_batch_that_is_never_answered_is_given_up_and_the_next_is_not(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    def silent(session: BrokerSession, batch: Batch, correlation: int) -> bool:
        broker.on_batch = None
        return True

    broker.on_batch = silent
    async with region.stream(ORDERS).publisher(deadline_ms=50) as publisher:
        with pytest.raises(UnavailableError, match="not acknowledged") as caught:
            await publisher.publish(b"lost")
        assert caught.value.code is Code.TIMEOUT
        assert await publisher.publish(b"next") == 0
    assert broker.streams[ORDERS].payloads() == [b"next"]


async def test_a_batch_that_one_session_does_not_answer_is_sent_again_in_another(
    region: felix.RegionClient, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, seconds in (
        (link, "SILENT_S", 0.02), (link, "BATCH_UNANSWERED_S", 0.1), (connection, "GOODBYE_DRAIN_S", 0.02),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    silent: list[BrokerSession] = []

    def unanswered(session: BrokerSession, batch: Batch, correlation: int) -> bool:
        silent.append(session)
        return session is silent[0]

    async with region.stream(ORDERS).publisher() as publisher:
        assert await publisher.publish(b"first") == 0
        broker.on_batch = unanswered
        assert await asyncio.gather(publisher.publish(b"second"), publisher.publish(b"third")) == [1, 2]
    assert region.reconnects == 1
    assert broker.streams[ORDERS].payloads() == [b"first", b"second", b"third"]


async def test_a_batch_whose_time_ran_out_while_the_process_stood_still_is_sent_again(
    region: felix.RegionClient, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "STOOD_STILL_S", 0.1)

    def stand_still(session: BrokerSession, batch: Batch, correlation: int) -> bool:
        broker.on_batch = None
        session.drop()
        time.sleep(0.4)
        return True

    async with region.stream(ORDERS).publisher(deadline_ms=50) as publisher:
        broker.on_batch = stand_still
        assert await publisher.publish(b"late") == 0
    assert broker.streams[ORDERS].payloads() == [b"late"]


async def test_a_stream_made_anew_takes_nothing_that_was_meant_for_the_old_one(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.on_batch = lambda *_: True
    async with region.stream(ORDERS).publisher() as publisher:
        future = publisher.publish_nowait(b"old")
        await until(lambda: broker.received)
        broker.on_batch = None
        broker.create(ORDERS, shards=2)
        broker.session.drop()
        with pytest.raises(RequestError) as caught:
            await future
        assert caught.value.code is Code.CONFLICT
        assert publisher.shards == 2
        assert await publisher.publish(b"new") == 0


async def test_a_publisher_that_may_not_is_refused_when_opened(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    with pytest.raises(RequestError) as caught:
        async with region.stream("acme/ops/nothing").publisher():
            pass
    assert caught.value.code is Code.NOT_FOUND_OR_FORBIDDEN
    with pytest.raises(RequestError):
        await region.stream("acme/ops/nothing").publish(b"x")
    broker.create("acme/ops/nothing")
    assert await region.stream("acme/ops/nothing").publish(b"x") == 0


async def test_opening_is_tried_again_while_the_broker_says_not_now(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    tries = 0

    def busy(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
        nonlocal tries
        tries += 1
        if isinstance(request, OpenPublisher) and tries < 3:
            session.refuse(correlation, UnavailableError("busy", code=Code.LIMIT_RATE, retry_after_ms=1))
            return True
        return False

    broker.on_request = busy
    assert await region.stream(ORDERS).publish(b"x") == 0
    assert tries == 3


async def test_leaving_with_an_error_does_not_wait(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.hold_acks = True
    with pytest.raises(ZeroDivisionError):
        async with region.stream(ORDERS).publisher() as publisher:
            future = publisher.publish_nowait(b"x")
            raise ZeroDivisionError
    with pytest.raises(UnavailableError, match="closed"):
        await future
    with pytest.raises(UnavailableError):
        await publisher.send(b"y")


async def test_closing_the_client_tells_whoever_still_waits(broker: ScriptedBroker) -> None:
    broker.hold_acks = True
    region = connected(broker)
    await region.open()
    publisher = region.stream(ORDERS).publisher()
    await publisher.open()
    future = publisher.publish_nowait(b"x")
    await region.close()
    with pytest.raises(UnavailableError, match="closed by this client"):
        await future


@pytest.mark.parametrize(
    "options",
    [
        {"linger_ms": -1},
        {"batch_bytes": 10},
        {"batch_records": 0},
        {"buffer_bytes": 1},
        {"acks": "some"},
        {"deadline_ms": 0},
    ],
)
async def test_options_that_cannot_be_are_refused(
    region: felix.RegionClient, options: dict[str, object]
) -> None:
    with pytest.raises(RequestError) as caught:
        region.stream(ORDERS).publisher(**options)
    assert caught.value.code is Code.CONFIG_INVALID


async def test_a_session_with_small_batches_is_respected(broker: ScriptedBroker) -> None:
    broker.limits = Limits(4096, 8, 8, 8)
    async with connected(broker) as region:
        await region.stream(ORDERS).publish_many([b"x" * 1000] * 20)
        with pytest.raises(RequestError, match="4000 are allowed"):
            await region.stream(ORDERS).publish(b"x" * 5000)
    assert max(batch.header.total_length for batch in broker.received) <= 4096


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_happens_each_record_is_in_the_log_once_and_in_order(data: st.DataObject) -> None:
    """Crashes, refusals for now, lost acknowledgements, small credit, in any mixture."""
    shards = data.draw(st.integers(1, 3), label="shards")
    script = data.draw(
        st.lists(
            st.sampled_from(["take", "take", "take", "busy", "crash before", "crash after"]), max_size=40
        ),
        label="script",
    )
    credit = data.draw(st.sampled_from([2_000, 20_000, 1 << 22]), label="credit")
    count = data.draw(st.integers(1, 60), label="records")
    batch_records = data.draw(st.integers(1, 9), label="batch_records")

    async def run() -> None:
        broker = ScriptedBroker(publish_credit_bytes=credit)
        log = broker.create(ORDERS, shards=shards)
        steps = iter(script)

        def play(session: BrokerSession, batch: Batch, correlation: int) -> bool:
            amount = batch.header.total_length + 12
            match next(steps, "take"):
                case "busy":
                    session.give_credit(amount)
                    session.refuse(
                        correlation, UnavailableError("busy", code=Code.LIMIT_RATE, retry_after_ms=1)
                    )
                    return True
                case "crash before":
                    session.drop()
                    return True
                case "crash after":
                    session.append(batch, correlation, amount, OpenPublisher(ORDERS))
                    session.connection.close(410, "gone")
                    return True
            return session.connection.is_closed

        broker.on_batch = play
        payloads = [b"%d" % i for i in range(count)]
        async with (
            asyncio.timeout(120),
            connected(broker) as region,
            region.stream(ORDERS).publisher(batch_records=batch_records) as publisher,
        ):
            offsets = await publisher.publish_many(payloads, payloads)
        broker.check()
        for shard in range(shards):
            assert log.payloads(shard) == [p for p in payloads if shard_for_key(p, shards) == shard]
        for payload, offset in zip(payloads, offsets, strict=True):
            assert log.payloads(shard_for_key(payload, shards))[offset] == payload
        for one in log.shards:
            assert all(a.header.next_offset == b.header.base_offset for a, b in pairwise(one.batches))

    asyncio.run(run())


async def test_what_gets_smaller_is_compressed_and_the_rest_soon_not_tried(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    text = b'{"flight": "AA1", "carrier": "AA", "delay": 7}' * 50
    noise = [random.Random(n).randbytes(2_000) for n in range(40)]
    async with region.stream(ORDERS).publisher(compress=3, batch_records=1) as publisher:
        await publisher.send(text)
        await publisher.flush()
        assert broker.received[-1].header.flags & FLAG_ZSTD
        assert len(broker.received[-1].body) < len(text) // 10
        for payload in noise:
            await publisher.send(payload)
        await publisher.flush()
        assert not any(batch.header.flags & FLAG_ZSTD for batch in broker.received[1:])
        assert publisher._core.plain_next == 32, "tried after 1, 2, 4, 8, 16 batches"
        for _ in range(40):
            await publisher.send(text)
        await publisher.flush()
        assert broker.received[-1].header.flags & FLAG_ZSTD, "it has found out that it is worth it again"
        assert publisher._core.plain_next == 0
    payloads = [bytes(record.payload) for batch in broker.received for record in decode_records(batch)]
    assert payloads == [text, *noise, *[text] * 40]
    for wrong in (-1, 20):
        with pytest.raises(RequestError, match="compress is"):
            region.stream(ORDERS).publisher(compress=wrong)


async def test_linger_and_compression_of_a_streams_own_publish(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    orders = region.stream(ORDERS, linger_ms=500, compress=1)
    both = await asyncio.gather(orders.publish(b"x" * 500), orders.publish(b"x" * 500))
    assert sorted(both) == [0, 1]
    (batch,) = broker.received
    assert batch.header.records == 2 and batch.header.flags & FLAG_ZSTD


async def test_progress_says_which_records_are_acknowledged_without_a_gap(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    held: list[tuple[BrokerSession, int]] = []

    def refuse_second(session: BrokerSession, batch: Batch, correlation: int) -> bool:
        if [bytes(record.payload) for record in decode_records(batch)] == [b"2", b"3"]:
            held.append((session, correlation))
            session.refuse(correlation, RequestError("No right.", code=Code.FORBIDDEN))
            return True
        return False

    broker.on_batch = refuse_second
    publisher = region.stream(ORDERS).publisher(batch_records=2)
    async with publisher:
        assert publisher.progress == felix.PublishProgress(0, 0, 0, {})
        for i in range(5):
            await publisher.send(b"%d" % i)
        assert publisher.progress.given == 5
        with pytest.raises(RequestError, match="No right"):
            await publisher.flush()
        # Records 0, 1 and 4 are in the log; 2 is the first that is not.
        assert publisher.progress == felix.PublishProgress(5, 3, 2, {0: 2})
        await publisher.publish_batch([NewRecord(b"5")])
    assert held and publisher.progress == felix.PublishProgress(6, 4, 2, {0: 3})


async def test_who_waits_for_an_answer_asks_whether_the_broker_is_there(
    region: felix.RegionClient, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "SILENT_S", 0.01)
    broker.hold_acks = True
    async with region.stream(ORDERS).publisher() as publisher:
        waiting = asyncio.ensure_future(publisher.publish(b"one"))
        heard = 0
        control = broker.session._control

        def counting(data: bytes) -> None:
            nonlocal heard
            heard += bytes(encode_frame(FrameType.PING, b"")) in data
            control(data)

        monkeypatch.setattr(broker.session, "_control", counting)
        await until(lambda: heard >= 2)
        broker.hold_acks = False
        broker.session.release()
        assert await waiting == 0
    broker.check()


def open_streams(session: BrokerSession) -> int:
    """Publish streams that have begun, and were neither ended nor reset."""
    return len(session.publishers.keys() - session.ended_streams)


async def test_a_publisher_that_moves_leaves_nothing_on_a_link_that_lives_on(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    """A connection has 100 such streams, a session 96: whoever moves a publisher away and back costs none of them."""
    async with region.stream(ORDERS).publisher() as publisher:
        await publisher.publish(b"first")
        (session,) = broker.sessions
        for number in range(120):
            link = publisher._link
            assert link is not None
            publisher.link_down(UnavailableError("Another broker leads."))
            publisher.link_up(link)
            await publisher.publish(b"%d" % number)
        assert open_streams(session) == 1
    await until(lambda: open_streams(session) == 0)
    assert len(broker.streams[ORDERS].payloads()) == 121


async def test_a_publisher_that_moves_before_it_stands_leaves_nothing_either(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    async with region.stream(ORDERS).publisher() as publisher:
        await publisher.publish(b"first")
        (session,), link = broker.sessions, publisher._link
        assert link is not None
        answered = broker.on_request
        broker.on_request = lambda session, request, correlation: isinstance(request, OpenPublisher)
        for _ in range(120):
            publisher.link_down(UnavailableError("Another broker leads."))
            publisher.link_up(link)
            opened = len(session.publishers)
            await until(lambda opened=opened: open_streams(session) <= 1)  # type: ignore[misc]
            await asyncio.sleep(0)
        broker.on_request = answered
        publisher.link_down(UnavailableError("Another broker leads."))
        publisher.link_up(link)
        await publisher.publish(b"second")
        assert open_streams(session) == 1
