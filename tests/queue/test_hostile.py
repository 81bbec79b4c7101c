"""Hostile clients of a queue: calls that are none or out of bounds, grants without end, workers that vanish or do not read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from region_peer import RawPeer, client, encode_request, raw_peer, until

import felix
from felix.batch import BRIDGED_EPOCH, decode_header
from felix.errors import Code, FelixError
from felix.frames import FRAME_HEADER_BYTES, FrameType, encode_frame
from felix.messages import OpenQueue, decode_answer, encode_message
from felix.names import StreamName
from felix.queue_messages import (
    Ack,
    Call,
    Grant,
    Held,
    Jobs,
    Lease,
    Nack,
    NewJob,
    Put,
    Settled,
    Stored,
    decode_reply,
)
from region.node import Node

JOBS = "acme/ops/jobs"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def jobs(node: Node) -> AsyncIterator[felix.Queue]:
    async with client(node.folder) as region:
        await region.create_queue(JOBS, shards=2)
        made = region.queue(JOBS)
        yield made
        await made.put(b"mine", priority=9)
        (job,) = await made.lease(wait=20)
        assert job.payload == b"mine", "others are not affected"
        assert not node.broker.metrics.refusals["internal"]


async def opened(peer: RawPeer) -> int:
    stream = peer.peer.open_stream(bidirectional=True)
    peer.send(encode_request(OpenQueue(JOBS), 1), stream)
    await until(lambda: peer.of(FrameType.ANSWER, stream) or peer.of(FrameType.ERROR, stream))
    return stream


def call(message: Call, correlation: int) -> bytes:
    return encode_message(FrameType.CALL, message, correlation)


def replies(peer: RawPeer, stream: int, correlation: int) -> list[object]:
    return [
        decode_reply(frame.body)
        for frame in peer.of(FrameType.REPLY, stream)
        if frame.correlation == correlation
    ]


async def refusal(peer: RawPeer, stream: int, message: Call, correlation: int) -> FelixError:
    peer.send(call(message, correlation), stream)
    await until(lambda: peer.errors(correlation, stream) or peer.closed_with)
    return peer.errors(correlation, stream)[0]


WORDS: list[object] = [
    b"", b"k", "text", None, True, -1, 0, 1, 5_000, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 1.5, [], [[0, 0, 1, 1]],
    [[0, 1 << 62, 60_000, 1]] * 3, [[1, 0, 0, 0]], [[255, 0, 1, 1]], [[b"x"]], [[b"x", b"k", {"felix.priority": b"\xff"}]], {}, {"k": 1},
]  # fmt: skip
TAGS = [
    "put", "lease", "grant", "ack", "nack", "release", "extend", "describe_queue", "peek", "redrive", "jobs", "nothing",
]  # fmt: skip
FIELDS = [
    "records", "bytes", "wait_ms", "visibility_ms", "jobs", "delay_ms", "reason", "shard", "producer", "epoch", "sequence",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
async def test_calls_of_any_shape_are_answered_or_end_the_session_with_a_code(
    node: Node, jobs: felix.Queue, seed: int
) -> None:
    chance = random.Random(seed)
    for _ in range(12):
        async with raw_peer(node.folder, node.address) as peer:
            stream = await opened(peer)
            for number in range(1, 25):
                fields = {name: chance.choice(WORDS) for name in chance.sample(FIELDS, chance.randrange(5))}
                fields["wait_ms"] = 0
                body = msgspec.msgpack.encode({"is": chance.choice(TAGS), **fields})
                if not chance.randrange(4):
                    body = body[: chance.randrange(len(body))] + chance.randbytes(chance.randrange(4))
                peer.send(encode_frame(FrameType.CALL, body, number), stream)
            await until(
                lambda peer=peer, stream=stream: (
                    peer.closed_with  # type: ignore[misc]
                    or len([f for f in peer.frames[stream] if f.correlation]) >= 25
                )
            )
            for error in (*peer.errors(), *peer.errors(stream_id=stream)):
                assert error.code is not Code.INTERNAL and error.sentence


async def test_what_is_out_of_bounds_is_refused_with_a_sentence(node: Node, jobs: felix.Queue) -> None:
    async with raw_peer(node.folder, node.address) as peer:
        stream = await opened(peer)
        assert isinstance(decode_answer(peer.of(FrameType.ANSWER, stream)[0].body), object)
        huge = [Held(0, n << 20, 60_000, 1) for n in range(3)]
        assert (await refusal(peer, stream, Ack(huge), 2)).code is Code.INVALID
        assert (await refusal(peer, stream, Ack([Held(7, 0, 1, 1)]), 3)).code is Code.INVALID
        assert (await refusal(peer, stream, Lease(visibility_ms=1), 4)).code is Code.INVALID
        assert (await refusal(peer, stream, Grant(1, 1, 1 << 60), 5)).code is Code.INVALID
        keys = [NewJob(b"x", b"k%d" % n) for n in range(20)]
        assert (await refusal(peer, stream, Put(keys), 6)).code is Code.INVALID
        assert (await refusal(peer, stream, Put([NewJob(b"x", b"k" * 5_000)]), 7)).code is Code.INVALID
        assert (await refusal(peer, stream, Put([NewJob(b"x")], shard=9), 8)).code is Code.INVALID


async def test_settling_what_one_does_not_hold_changes_nothing(node: Node, jobs: felix.Queue) -> None:
    await jobs.put_many([b"a"] * 4)
    held = await jobs.lease(4)
    others = [Held(job.shard, job.offset, 1, job.token + 1) for job in held]
    beyond = [Held(0, 1 << 40, 5, 1)]
    async with raw_peer(node.folder, node.address) as peer:
        stream = await opened(peer)
        for number, message in enumerate((Ack(others), Nack(others), Ack(beyond), Nack(beyond)), 2):
            peer.send(call(message, number), stream)
            await until(lambda number=number: replies(peer, stream, number))  # type: ignore[misc]
            (settled,) = replies(peer, stream, number)
            assert isinstance(settled, Settled) and len(settled.lost) in (len(others), 5)
    await asyncio.gather(*(job.ack() for job in held))


async def test_a_put_is_once_however_often_it_is_said(node: Node, jobs: felix.Queue) -> None:
    async with raw_peer(node.folder, node.address) as peer:
        stream = await opened(peer)
        for number in (2, 3, 4):
            peer.send(call(Put([NewJob(b"x"), NewJob(b"y")], producer=77), number), stream)
        await until(lambda: replies(peer, stream, 4))
        stored = [replies(peer, stream, number)[0] for number in (2, 3, 4)]
        assert all(each == stored[0] and isinstance(each, Stored) for each in stored)
    assert sorted(job.payload for job in await jobs.lease(10, wait=5)) == [b"x", b"y"]


async def test_no_job_is_put_as_if_a_bridge_had_brought_it(node: Node, jobs: felix.Queue) -> None:
    async with raw_peer(node.folder, node.address) as peer:
        stream = await opened(peer)
        peer.send(call(Put([NewJob(b"x")], epoch=BRIDGED_EPOCH), 2), stream)
        await until(lambda: replies(peer, stream, 2))
        (stored,) = replies(peer, stream, 2)
    assert isinstance(stored, Stored)
    held = node.broker.streams.get(StreamName.parse(JOBS))
    assert held is not None
    (entry,) = await held.shard(stored.shard).read(0, 1)
    assert not decode_header(entry.data, FRAME_HEADER_BYTES).is_bridged


async def test_nothing_goes_beyond_the_grant(node: Node, jobs: felix.Queue) -> None:
    await jobs.put_many([bytes(10_000)] * 50)
    async with raw_peer(node.folder, node.address) as peer:
        stream = await opened(peer)
        peer.send(call(Grant(30, 45_000), 2), stream)
        await until(lambda: sum(len(each.jobs) for each in pushed(peer, stream)) == 4)
        peer.send(call(Grant(6, 1 << 30), 3), stream)
        await until(lambda: sum(len(each.jobs) for each in pushed(peer, stream)) == 30)
        await asyncio.sleep(0.05)
        assert sum(len(each.jobs) for each in pushed(peer, stream)) == 30
        peer.send(call(Grant(0, 0), 4), stream)
        await until(lambda: replies(peer, stream, 4))
    assert len(await jobs.lease(100, wait=5)) >= 1


def pushed(peer: RawPeer, stream: int) -> list[Jobs]:
    return [each for each in replies(peer, stream, 0) if isinstance(each, Jobs)]


async def test_workers_that_vanish_leave_nothing_but_their_leases(node: Node, jobs: felix.Queue) -> None:
    await jobs.put_many([b"x"] * 200)
    for _ in range(10):
        async with raw_peer(node.folder, node.address) as peer:
            stream = await opened(peer)
            peer.send(call(Lease(3, wait_ms=60_000), 2), stream)
            peer.send(call(Grant(5, 1 << 20, 500), 3), stream)
            await until(lambda peer=peer, stream=stream: pushed(peer, stream))  # type: ignore[misc]
            peer.go_deaf()
    await until(lambda: len(node.broker.sessions) == 1, 120)
    queue = await node.queues.queue(next(iter(node.broker.streams)))
    assert len(queue.workers) <= 1
    assert not node.broker.budgets.exchange.used_bytes
    state = await jobs.describe()
    assert state.ready + state.leased == 200


async def test_an_exchange_of_another_kind_of_stream_is_refused(node: Node, jobs: felix.Queue) -> None:
    async with client(node.folder) as region:
        await region.create_stream("acme/ops/plain")
    async with raw_peer(node.folder, node.address) as peer:
        for number, name in enumerate(("acme/ops/plain", "acme/ops/none", "../x")):
            stream = peer.peer.open_stream(bidirectional=True)
            peer.send(encode_request(OpenQueue(name), 1), stream)
            await until(lambda stream=stream: peer.errors(1, stream))  # type: ignore[misc]
            expected = (Code.UNSUPPORTED, Code.NOT_FOUND_OR_FORBIDDEN, Code.NAME_INVALID)[number]
            assert peer.errors(1, stream)[0].code is expected


async def test_peeking_reads_no_more_than_it_answers(node: Node, jobs: felix.Queue) -> None:
    """Whoever asks for a thousand records of half a MiB gets one answer's worth, and only so much is read for it."""
    for number in range(12):
        await jobs.put(random.Random(number).randbytes(400_000), key=b"one shard")
    held = node.broker.streams.get(StreamName.parse(JOBS))
    assert held is not None
    read: list[int] = []
    for shard in (held.shard(0), held.shard(1)):

        async def reading(offset: int, size: int, really: Any = shard.read) -> Any:
            entries = await really(offset, size)
            read.append(sum(len(entry.data) for entry in entries))
            return entries

        shard.read = reading  # type: ignore[method-assign]
    assert [len(each.job.payload) for each in await jobs.peek(1_000)] == [400_000]
    assert sum(read) < 2 << 20
    assert await jobs.purge() == 12
