"""Hostile consumers: calls that are none, of shards that are not theirs, of records that were never delivered; and full disks."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from long_runs import count
from region_peer import RawPeer, client, encode_request, raw_peer, until

import felix
from felix import Code, RequestError
from felix.consumer_messages import Ack, Leave, Nack, Release, Renew, ShardAck, decode_reply
from felix.errors import UnavailableError
from felix.frames import Credit, FrameType, encode_frame
from felix.messages import Message, OpenConsumer, Subscribe, encode_message
from felix.settings import SubscriptionSettings
from felix.subscription import CREDIT_BYTES_MIN
from region.node import Node

ORDERS = "acme/payments/orders"
pytestmark = pytest.mark.timeout(120)

WORDS: list[object] = [
    b"", "ack", None, True, -1, 0, 1, 255, 256, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 1.5, [], [0, 1], [1, 0], [0, 1, 2],
    [[0, 1]], {}, {"shard": 0}, [{"shard": 0, "generation": 0, "ranges": [0, 1]}], [{"shard": 0, "generation": 1, "through": 9}],
]  # fmt: skip
FIELDS = ["acks", "shard", "generation", "ranges", "through", "delay_ms", "reason", "offset"]
CALLS = ["ack", "nack", "renew", "release", "leave", "assigned", "nothing"]


async def opened(peer: RawPeer, request: OpenConsumer) -> int:
    stream = peer.peer.open_stream(bidirectional=True)
    peer.send(encode_request(request, 1), stream)
    await until(lambda: peer.of(FrameType.ANSWER, stream) or peer.of(FrameType.ERROR, stream))
    return stream


def asking(name: str = "billing") -> OpenConsumer:
    return OpenConsumer(ORDERS, name, CREDIT_BYTES_MIN, SubscriptionSettings("earliest"))


def call(message: Message, correlation: int) -> bytes:
    return encode_message(FrameType.CALL, message, correlation)


async def unaffected(node: Node, region: felix.RegionClient) -> None:
    async with region.stream(ORDERS).consumer("other", start="earliest") as consumer:
        async with asyncio.timeout(120):
            record = await anext(consumer)
        assert await consumer.ack(record)
    assert not node.broker.metrics.refusals["internal"]
    await until(lambda: node.broker.budgets.exchange.used_bytes == 0)


async def test_calls_of_any_shape_are_answered_or_end_the_session_with_a_code(
    node: Node, region: felix.RegionClient
) -> None:
    await region.create_stream(ORDERS, shards=2)
    await region.stream(ORDERS).publish_many([b"%d" % n for n in range(20)])
    chance = random.Random(3)
    for _ in range(count(15, 40)):
        async with raw_peer(node.folder, node.address) as peer:
            stream = await opened(peer, asking())
            for number in range(1, 25):
                fields: dict[str, object] = {"is": chance.choice(CALLS)}
                for name in chance.sample(FIELDS, chance.randrange(len(FIELDS))):
                    fields[name] = chance.choice(WORDS)
                body = msgspec.msgpack.encode(fields)
                if not chance.randrange(5):
                    body = body[: chance.randrange(len(body))] + chance.randbytes(chance.randrange(4))
                peer.send(encode_frame(FrameType.CALL, body, number), stream)
            peer.send(encode_request(Subscribe(ORDERS), 7))
            await until(
                lambda peer=peer: peer.closed_with or peer.errors(7) or peer.answers(7)  # type: ignore[misc]
            )
            if peer.closed_with:
                assert peer.closed_with[0] in (Code.FRAME_MALFORMED, Code.STATE), peer.closed_with
    await unaffected(node, region)


async def test_what_is_not_the_consumers_is_refused(node: Node, region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    await region.stream(ORDERS).publish_many([b"%d" % n for n in range(5)])
    async with raw_peer(node.folder, node.address) as peer:
        stream = await opened(peer, asking())
        await until(lambda: peer.of(FrameType.BATCH, stream))
        event = decode_reply(peer.of(FrameType.REPLY, stream)[0].body)
        generation = event.generation  # type: ignore[union-attr]
        peer.send(call(Ack([ShardAck(0, generation, through=10_000)]), 1), stream)
        peer.send(
            call(Ack([ShardAck(0, generation - 1, [0, 1]), ShardAck(200, generation, [0, 1])]), 2), stream
        )
        peer.send(call(Nack(0, generation - 1, [0, 1]), 3), stream)
        peer.send(call(Renew(7, generation, 0), 4), stream)
        peer.send(call(Release(0, 1), 5), stream)
        peer.send(call(Nack(0, generation, [0, 1 << 40], 0), 6), stream)
        peer.send(call(Ack([]), 7), stream)
        await until(lambda: [f.correlation for f in peer.of(FrameType.REPLY, stream)].count(7))
        codes = {number: [error.code for error in peer.errors(number, stream)] for number in range(1, 8)}
        assert codes == {
            1: [Code.OFFSET_OUT_OF_RANGE], 2: [], 3: [Code.CONSUMER_FENCED], 4: [Code.INVALID],
            5: [Code.CONSUMER_FENCED], 6: [], 7: [],
        }  # fmt: skip
        (reply,) = (f for f in peer.of(FrameType.REPLY, stream) if f.correlation == 2)
        assert decode_reply(reply.body).fenced == [0, 200]  # type: ignore[union-attr]
        # What was under way when a consumer left comes after it: refused, without harm to the connection.
        peer.send(call(Leave(), 8), stream)
        peer.send(call(Ack([]), 9), stream)
        await until(lambda: peer.errors(9, stream))
        assert [error.code for error in peer.errors(9, stream)] == [Code.CONSUMER_FENCED]
    await unaffected(node, region)


async def test_openings_out_of_bounds_have_their_answer(node: Node, region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    await region.stream(ORDERS).publish(b"a")
    async with raw_peer(node.folder, node.address) as peer:
        for request, code in (
            (OpenConsumer(ORDERS, "billing", CREDIT_BYTES_MIN - 1, SubscriptionSettings()), Code.INVALID),
            (OpenConsumer(ORDERS, "Billing", CREDIT_BYTES_MIN), Code.NAME_INVALID),
            (OpenConsumer(ORDERS, "none", CREDIT_BYTES_MIN), Code.NOT_FOUND),
            (OpenConsumer("a/b/none", "billing", CREDIT_BYTES_MIN), Code.NOT_FOUND_OR_FORBIDDEN),
            (OpenConsumer(ORDERS, "b", CREDIT_BYTES_MIN, SubscriptionSettings("now")), Code.CONFIG_INVALID),
            (
                OpenConsumer(ORDERS, "b", CREDIT_BYTES_MIN, SubscriptionSettings(unacked_max=0)),
                Code.CONFIG_INVALID,
            ),
        ):
            stream = await opened(peer, request)
            assert [error.code for error in peer.errors(1, stream)] == [code]
        stream = peer.peer.open_stream(bidirectional=True)
        peer.send(encode_request(asking(), 1) + Credit(0, 1 << 62).encode(), stream)
        await until(lambda: peer.of(FrameType.BATCH, stream))
        peer.send(encode_request(asking(), 9))
        assert (await peer.ending()).code is Code.STATE
    await unaffected(node, region)


async def test_consumers_that_vanish_leave_their_shards(node: Node, region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    await region.stream(ORDERS).publish(b"a")
    for _ in range(10):
        async with raw_peer(node.folder, node.address) as peer:
            await opened(peer, asking())
    async with region.stream(ORDERS).consumer("billing") as consumer:
        async with asyncio.timeout(120):
            record = await anext(consumer)
        assert record.attempt >= 1 and await consumer.ack(record)
    await unaffected(node, region)


async def test_a_position_that_cannot_be_written_is_read_back_before_anything_else(
    node: Node, region: felix.RegionClient
) -> None:
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    await orders.publish_batch([felix.NewRecord(b"%d" % n) for n in range(4)], shard=0)
    async with orders.consumer("billing", start="earliest") as consumer:
        async with asyncio.timeout(120):
            records = [await anext(consumer) for _ in range(4)]
            assert await consumer.ack(records[0])
            held = next(iter(node.subscriptions._held.values()))
            actor = held.stores[0]._actor
            assert actor is not None and actor.journal._log is not None
            full = UnavailableError("The disk is full.", code=Code.DISK_FULL, retry_after_ms=50)
            log = actor.journal._log
            real, log.append_nowait = log.append_nowait, lambda batch, done: done(full)  # type: ignore[method-assign]
            assert not await consumer.ack(records[1]), "it was refused, and forgotten again"
            log.append_nowait = real  # type: ignore[method-assign]
            again = [await anext(consumer) for _ in range(3)]
            assert [record.offset for record in again] == [1, 2, 3], "it goes on by itself"
            assert await consumer.ack_through(again[-1])
    assert (await orders.describe_subscription("billing")).shards[0].committed == 4


async def test_an_acknowledgement_that_is_repeated_is_answered_once_the_first_one_is_durable(
    node: Node, region: felix.RegionClient
) -> None:
    """The copies, or the disk, take their time, and whoever waited gave up and asks again."""
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    await orders.publish(b"a")
    async with orders.consumer("billing", start="earliest") as consumer:
        async with asyncio.timeout(120):
            record = await anext(consumer)
        (held,) = node.subscriptions._held.values()
        actor = held.stores[0]._actor
        assert actor is not None and actor.journal._log is not None
        log, waiting = actor.journal._log, []
        real = log.append_nowait
        log.append_nowait = lambda batch, done: waiting.append((batch, done))  # type: ignore[method-assign]
        asked = [consumer.ack_nowait(record)]
        for _ in range(2):
            await asyncio.sleep(0.2)
            asked.append(consumer.ack_nowait(record))
        await asyncio.sleep(0.5)
        told = [each.done() for each in asked]
        log.append_nowait = real  # type: ignore[method-assign]
        for batch, done in waiting:
            real(batch, done)
        assert told == [False] * 3 and all(await asyncio.gather(*asked))
    assert (await orders.describe_subscription("billing")).shards[0].committed == 1


async def test_acknowledged_retention_waits_for_the_slowest_subscription(
    node: Node, region: felix.RegionClient
) -> None:
    await region.create_stream(ORDERS)
    orders = region.stream(ORDERS)
    await orders.publish_batch([felix.NewRecord(b"%d" % n) for n in range(4)], shard=0)
    await orders.create_subscription("slow", SubscriptionSettings("earliest"))
    async with orders.consumer("fast", start="earliest") as consumer:
        async with asyncio.timeout(120):
            records = [await anext(consumer) for _ in range(4)]
        assert await consumer.ack_through(records[2])
    stream = next(iter(node.broker.streams))
    service = node.subscriptions
    assert service.hold(stream, 0) == 0
    await orders.seek_subscription("slow", 2)
    assert service.hold(stream, 0) == 2
    await orders.delete_subscription("slow")
    assert service.hold(stream, 0) == 3
    await orders.delete_subscription("fast")
    assert service.hold(stream, 0) is None


async def test_a_seek_of_a_stranger_is_refused(node: Node, region: felix.RegionClient) -> None:
    await region.create_stream(ORDERS)
    await region.stream(ORDERS).create_subscription("billing")
    async with client(node.folder, "other-svc") as stranger:
        with pytest.raises(RequestError) as caught:
            await stranger.stream(ORDERS).seek_subscription("billing", "latest")
        assert caught.value.code is Code.NOT_FOUND_OR_FORBIDDEN
