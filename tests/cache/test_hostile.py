"""Hostile clients of a cache: calls that are none, calls out of bounds, watches that take no end, connections that vanish."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import msgspec
import pytest
from long_runs import count
from region_peer import RawPeer, client, encode_request, raw_peer, until

import felix
from felix.cache_messages import KEYS_MAX, CacheCall, Get, Increment, Put, PutMany, Scan
from felix.errors import Code, FelixError
from felix.frames import Credit, FrameType, encode_frame
from felix.messages import OpenCache, Subscribe, WatchCache, decode_answer, encode_message
from region.cache.watch import CREDIT_BYTES_MIN
from region.exchange import Exchange
from region.node import Node

NAME = "acme/web/sessions"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def cache(node: Node) -> AsyncIterator[felix.Cache]:
    async with client(node.folder) as region:
        made = await region.create_cache(NAME, shards=2)
        await made.put("mine", b"1")
        yield made
        assert await made.get("mine") is not None, "others are not affected"
        assert not node.broker.metrics.refusals["internal"]


async def opened(peer: RawPeer, request: OpenCache | WatchCache) -> int:
    stream = peer.peer.open_stream(bidirectional=True)
    peer.send(encode_request(request, 1), stream)
    await until(lambda: peer.of(FrameType.ANSWER, stream) or peer.of(FrameType.ERROR, stream))
    return stream


def call(message: CacheCall, correlation: int) -> bytes:
    return encode_message(FrameType.CALL, message, correlation)


WORDS: list[object] = [
    b"", b"k", b"k" * 5_000, "text", None, True, -1, 0, 1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 1.5, [], [b"k"], [[b"k", b"v"]],
    [b""] * 3, {}, {"k": 1}, bytes(16), [[]] * 4,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(count(1, 4)))
async def test_calls_of_any_shape_are_answered_or_end_the_session_with_a_code(
    node: Node, cache: felix.Cache, seed: int
) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        async with raw_peer(node.folder, node.address) as peer:
            stream = await opened(peer, OpenCache(NAME))
            for number in range(1, 30):
                fields = [chance.choice(WORDS) for _ in range(chance.randrange(6))]
                body = msgspec.msgpack.encode([chance.choice([*range(12), 32, 64, "put", -1]), *fields])
                if not chance.randrange(4):
                    body = body[: chance.randrange(len(body))] + chance.randbytes(chance.randrange(4))
                peer.send(encode_frame(FrameType.CALL, body, number), stream)
            peer.send(encode_request(Subscribe(NAME), 7))
            await until(
                lambda peer=peer: peer.closed_with or peer.errors(7) or peer.answers(7)  # type: ignore[misc]
            )
            if peer.closed_with:
                assert peer.closed_with[0] == Code.FRAME_MALFORMED, peer.closed_with
    assert node.broker.budgets.exchange.used_bytes == 0


async def test_calls_before_the_opening_or_of_a_reply_end_the_session(node: Node, cache: felix.Cache) -> None:
    async with raw_peer(node.folder, node.address) as peer:
        stream = peer.peer.open_stream(bidirectional=True)
        peer.send(call(Get(b"k"), 1), stream)
        assert (await peer.ending()).code is Code.FRAME_UNKNOWN
    async with raw_peer(node.folder, node.address) as peer:
        stream = await opened(peer, OpenCache(NAME))
        peer.send(Credit(0, 1 << 20).encode(), stream)
        assert (await peer.ending()).code is Code.STATE
    async with raw_peer(node.folder, node.address) as peer:
        peer.send(encode_request(OpenCache(NAME), 5))
        assert (await peer.ending()).code is Code.STATE


async def test_what_is_out_of_bounds_has_its_answer(node: Node, cache: felix.Cache) -> None:
    async with raw_peer(node.folder, node.address) as peer:
        stream = await opened(peer, OpenCache(NAME))
        peer.send(call(Scan(9), 1), stream)
        peer.send(call(Put(b"n", b"x"), 2), stream)
        peer.send(call(Increment(b"n", 1, bytes(16)), 3), stream)
        peer.send(call(PutMany([(b"%d" % n, b"") for n in range(KEYS_MAX)]), 4), stream)
        await until(lambda: len(peer.frames.get(stream, [])) == 5)
        refused = {number: peer.errors(number, stream)[0].code for number in (1, 3)}
        assert refused == {1: Code.INVALID, 3: Code.INVALID}
        for request in (
            WatchCache(NAME, credit_bytes=CREDIT_BYTES_MIN - 1),
            WatchCache(NAME, b"a", b"b", credit_bytes=CREDIT_BYTES_MIN),
            WatchCache("acme/web/nothing", credit_bytes=CREDIT_BYTES_MIN),
            OpenCache("acme/web/nothing"),
            OpenCache("no name"),
        ):
            other = await opened(peer, request)
            assert isinstance(peer.errors(1, other)[0], FelixError)
        watch = await opened(
            peer,
            WatchCache(
                NAME, incarnation=bytes(16), offsets={0: 1 << 62, 7: 3}, credit_bytes=CREDIT_BYTES_MIN
            ),
        )
        assert decode_answer(peer.of(FrameType.ANSWER, watch)[0].body)
        peer.send(call(Get(b"k"), 1), watch)
        assert (await peer.ending()).code is Code.FRAME_MALFORMED


async def test_a_watcher_that_takes_nothing_holds_its_credit_and_no_more(
    node: Node, cache: felix.Cache
) -> None:
    value = bytes(50_000)
    async with raw_peer(node.folder, node.address) as peer:
        stream = await opened(peer, WatchCache(NAME, credit_bytes=CREDIT_BYTES_MIN))
        for number in range(200):
            await cache.put(f"k{number % 4}", value)
        sent = sum(12 + len(frame.body) for frame in peer.frames[stream])
        assert sent <= CREDIT_BYTES_MIN + 200
        hosted = node.broker.streams.get(felix.StreamName.parse(NAME))
        assert hosted is not None
        states = node.caches._caches[hosted].serving
        assert sum(shard._decoded.weight for shard in states) <= 2 * (4 << 20) + 200_000
        peer.send(Credit(0, 1 << 30).encode(), stream)
        await until(lambda: sum(len(frame.body) for frame in peer.frames[stream]) > 150 * 50_000)


async def test_clients_that_vanish_leave_nothing_behind(node: Node, cache: felix.Cache) -> None:
    for round_ in range(8):
        async with raw_peer(node.folder, node.address) as peer:
            calls = await opened(peer, OpenCache(NAME))
            watch = peer.peer.open_stream(bidirectional=True)
            peer.send(encode_request(WatchCache(NAME, credit_bytes=CREDIT_BYTES_MIN), 1), watch)
            for number in range(2, 60):
                peer.send(call(Put(b"%d" % number, bytes(5_000)), number), calls)
            await asyncio.sleep(0.003 * (round_ % 4))
            if round_ % 2:
                peer.peer.reset_stream(watch, 0)
    budgets = node.broker.budgets
    await until(lambda: len(node.broker.sessions) == 1)
    await until(lambda: not budgets.exchange.used_bytes and not budgets.catch_up.used_bytes)
    hosted = node.broker.streams.get(felix.StreamName.parse(NAME))
    assert hosted is not None
    held = node.caches._caches[hosted]
    assert not held.watches and not any(shard.watchers for shard in held.serving)
    # What the clients put last may still be on its way to the disk, in the place of what stands.
    await until(lambda: budgets.cache.used_bytes == sum(shard.state.size_bytes for shard in held.serving))
    used = budgets.cache.used_bytes
    await cache.delete_many([f"{number}" for number in range(2, 60)])
    assert budgets.cache.used_bytes < used


async def test_who_asks_and_does_not_read_holds_no_more_than_a_backlog(
    node: Node, cache: felix.Cache
) -> None:
    """What is answered at once waits for its reader as calls, not as answers in the broker's memory."""
    await cache.put("large", bytes(200_000))
    others = set(node.broker.sessions)
    async with raw_peer(node.folder, node.address) as peer:
        stream = await opened(peer, OpenCache(NAME))
        (session,) = node.broker.sessions - others
        (exchange,) = (role for role in session._roles.values() if isinstance(role, Exchange))  # type: ignore[attr-defined]
        asked = 300
        answered: list[int] = []
        reply = exchange.reply
        exchange.reply = lambda correlation, answer: (
            answered.append(correlation),
            reply(correlation, answer),
        )  # type: ignore[method-assign]
        for correlation in range(2, 2 + asked):
            peer.send(call(Get(b"large"), correlation), stream)
        peer.go_deaf()
        await until(lambda: len(answered) + len(exchange._sizes) >= asked)
        high = node.broker.transport_limits.backlog_high_bytes
        assert session.connection.backlog_bytes() < high + (1 << 20)  # type: ignore[attr-defined]
        assert len(answered) < asked
    await until(lambda: not node.broker.budgets.exchange.used_bytes)


async def test_calls_that_waited_for_their_reader_are_answered_in_order(
    node: Node, cache: felix.Cache
) -> None:
    await cache.put("large", bytes(200_000))
    async with raw_peer(node.folder, node.address) as peer:
        stream = await opened(peer, OpenCache(NAME))
        for correlation in range(2, 302):
            peer.send(call(Get(b"large"), correlation), stream)
        await until(lambda: len(peer.of(FrameType.REPLY, stream)) == 300)
        assert [frame.correlation for frame in peer.of(FrameType.REPLY, stream)] == list(range(2, 302))
    await until(lambda: not node.broker.budgets.exchange.used_bytes)
