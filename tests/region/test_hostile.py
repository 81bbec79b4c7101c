"""Hostile peers over real QUIC connections: typed errors on the wire, no crash, no growth, nobody else affected."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long_runs import count
from region_home import running
from region_peer import RawPeer, batch_frame, client, encode_request, raw_peer, take, until

import felix
from felix import Code
from felix.frames import FrameType, encode_frame
from felix.identity_file import load_identity
from felix.messages import (
    ANSWERS,
    ClientHello,
    DescribeStream,
    OpenPublisher,
    Prove,
    Start,
    Subscribe,
    Unsubscribe,
    encode_message,
)
from region.config import LimitsConfig
from region.folder import RegionFolder
from region.node import Node

CREW = "acme/ops/crew"
REQUEST_CASES = int(os.environ.get("FELIX_HOSTILE_CASES", count(200, 500)))
FRAME_CASES = 3 * REQUEST_CASES
"""`make soak` asks for more."""

TYPES = st.sampled_from([*FrameType, 0x00, 0x06, 0x7F, 0xFF])
LENGTHS = st.one_of(st.integers(0, 64), st.sampled_from([1 << 14, 1 << 16, 1 << 18, 1 << 20, (1 << 32) - 1]))


@st.composite
def raw_frames(draw: st.DrawFn) -> bytes:
    """A frame whose header may lie about everything."""
    body = draw(st.binary(max_size=80))
    length = draw(st.one_of(st.just(len(body)), LENGTHS))
    return b"".join(
        (
            length.to_bytes(4, "big"),
            bytes([int(draw(TYPES)), draw(st.sampled_from([0, 0, 0, 1, 255]))]),
            draw(st.sampled_from([b"\0\0", b"\0\0", b"\0\1"])),
            draw(st.integers(0, (1 << 32) - 1)).to_bytes(4, "big"),
            body,
        )
    )


WORDS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.text(max_size=300),
    st.binary(max_size=40),
)
REQUESTS = [str(request.__struct_config__.tag) for request in ANSWERS]
FIELDS = sorted({field for request in ANSWERS for field in request.__struct_fields__})
NAMES = st.sampled_from(
    [CREW, "acme/ops/*", "a/b", "../../etc", "acme/ops/" + "x" * 80, "acme/ops/\U0001f600" * 30]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request of a known kind whose fields may be anything."""
    fields: dict[str, object] = {"is": draw(st.sampled_from([*REQUESTS, "nothing"])), "stream": draw(NAMES)}
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=6)):
        fields[name] = draw(
            st.one_of(
                WORDS,
                NAMES,
                st.lists(WORDS, max_size=4),
                st.dictionaries(
                    st.sampled_from(["kind", "value", "offsets", "age_ms", "interval_ms"]), WORDS, max_size=3
                ),
            )
        )
    body = msgspec.msgpack.encode(fields)
    return encode_frame(FrameType.REQUEST, body, draw(st.integers(0, 5)))


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.ERROR)
    return caplog


@pytest.fixture
async def live(node: Node, operator: felix.RegionClient) -> AsyncIterator[felix.Subscription]:
    """Another session on the same broker, reading; the test sees to it that it goes on."""
    await operator.create_stream(CREW)
    async with operator.stream(CREW).subscribe("earliest") as reader:
        await reader.open()
        yield reader


async def unaffected(operator: felix.RegionClient, reader: felix.Subscription) -> None:
    token = os.urandom(8)
    await operator.stream(CREW).publish(token)
    async with asyncio.timeout(120):
        while bytes((await anext(reader)).payload) != token:
            pass


def assert_quiet(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing failed inside: no handler raised, no answer was INTERNAL, nothing is left of the peers."""
    assert not [record.getMessage() for record in caplog.records]
    assert not node.broker.metrics.refusals["internal"]


def cases(strategy: st.SearchStrategy[bytes], count: int) -> list[bytes]:
    """That many examples, drawn once: the connections are what the time goes into."""
    found: list[bytes] = []

    @settings(
        max_examples=count, database=None, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def draw(case: bytes) -> None:
        found.append(case)

    draw()
    return found


async def test_thousands_of_malformed_requests_end_in_typed_errors(
    node: Node, operator: felix.RegionClient, live: felix.Subscription, watched: pytest.LogCaptureFixture
) -> None:
    """Well-framed requests with fields of any kind, from an operator: refused one by one, or the session ends."""
    pending = iter(cases(requests(), REQUEST_CASES))
    before = psutil.Process().memory_info().rss
    tried: list[felix.FelixError | None] = []

    async def ask() -> None:
        """One session after the other, until there are no more cases; each case is answered before the next."""
        while True:
            async with raw_peer(node.folder, node.address) as peer:
                while not peer.errors(0):
                    case = next(pending, None)
                    if case is None:
                        return
                    known = len(peer.frames[peer.control])
                    peer.send(case)
                    await until(lambda known=known: len(peer.frames[peer.control]) > known)  # type: ignore[misc]
                    tried.append(next(iter(peer.errors()[-1:]), None))
                    if len(peer.frames[peer.control]) > 50 and not peer.errors(0):
                        peer.frames[peer.control].clear()

    async with asyncio.timeout(60 + REQUEST_CASES / 2):
        await asyncio.gather(*(ask() for _ in range(8)))
    assert len(tried) == REQUEST_CASES
    for error in tried:
        assert error is None or (error.code is not Code.INTERNAL and error.sentence), error
    assert sum(error is not None for error in tried) > REQUEST_CASES // 4
    await unaffected_after(operator, live)
    assert_quiet(node, watched)
    await until(lambda: len(node.broker.sessions) == 1)
    assert psutil.Process().memory_info().rss - before < 256 << 20


async def unaffected_after(operator: felix.RegionClient, reader: felix.Subscription) -> None:
    """The stream may be one of those that a well-formed case deleted: then another one answers as well."""
    try:
        await operator.describe_stream(CREW)
    except felix.RequestError:
        await operator.create_stream(CREW)
    async with operator.stream(CREW).publisher() as publisher:
        await publisher.publish(b"after")


async def test_thousands_of_lying_frames_before_and_after_the_handshake(
    node: Node, operator: felix.RegionClient, live: felix.Subscription, watched: pytest.LogCaptureFixture
) -> None:
    pending = cases(raw_frames(), FRAME_CASES)
    chance = random.Random(7)
    ends: dict[int, int] = {}

    async def attack(case: bytes, rest: list[bytes]) -> None:
        proved = chance.random() < 0.3
        async with raw_peer(node.folder, node.address, proved=proved) as peer:
            if not proved:
                peer.open_control()
            stream = peer.control if chance.random() < 0.5 or not proved else peer.open_stream()
            for each in (case, *rest):
                peer.send(each, stream)
                await asyncio.sleep(0)
            end = chance.random() < 0.5
            if end and not peer.peer.is_closed:
                peer.send(b"", stream, end=True)
            if chance.random() < 0.9:
                try:
                    await until(lambda: peer.closed_with or peer.errors(), 0.5)
                except TimeoutError:
                    return  # an incomplete frame: the broker waits for the rest, or for its timeout
            for error in peer.errors():
                ends[error.code] = ends.get(error.code, 0) + 1
                assert error.code is not Code.INTERNAL

    for at in range(0, len(pending), 40):
        group = pending[at : at + 40]
        await asyncio.gather(*(attack(group[n], group[n + 1 : n + 4]) for n in range(0, len(group), 4)))
    assert {Code.FRAME_UNKNOWN, Code.FRAME_MALFORMED} <= set(ends)
    await unaffected(operator, live)
    assert_quiet(node, watched)
    await until(lambda: len(node.broker.sessions) == 1)


HELLO = encode_message(FrameType.HANDSHAKE, ClientHello([2], "us-east", bytes(32)))


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ([encode_request(DescribeStream(CREW))], Code.STATE),
        ([HELLO, encode_request(DescribeStream(CREW))], Code.STATE),
        ([HELLO, HELLO], Code.STATE),
        ([encode_message(FrameType.HANDSHAKE, Prove(b"", b""))], Code.STATE),
        (
            [HELLO, encode_message(FrameType.HANDSHAKE, Prove(b"no chain", b"no signature"))],
            Code.IDENTITY_REFUSED,
        ),
        ([encode_message(FrameType.HANDSHAKE, ClientHello([99], "us-east"))], Code.VERSION_UNSUPPORTED),
        ([encode_message(FrameType.HANDSHAKE, ClientHello([], "us-east"))], Code.VERSION_UNSUPPORTED),
        ([encode_message(FrameType.HANDSHAKE, ClientHello([1], "us-east"))], Code.VERSION_UNSUPPORTED),
        ([encode_message(FrameType.HANDSHAKE, ClientHello([2], "us-east", b"short"))], Code.PROTOCOL),
        ([encode_message(FrameType.HANDSHAKE, ClientHello([2], "eu-west", bytes(32)))], Code.WRONG_REGION),
        ([encode_frame(FrameType.PING, bytes(8))], Code.STATE),
        ([encode_frame(FrameType.CREDIT, bytes(12))], Code.STATE),
        ([batch_frame([b"x"])], Code.FRAME_UNKNOWN),
        ([b"\0\0\0\1\1\0\0\0\0\0\0\0\xc1"], Code.FRAME_MALFORMED),
        ([bytes(12)], Code.FRAME_UNKNOWN),
        ([b"\0\1\0\1\1\0\0\0" + bytes(4)], Code.FRAME_TOO_LARGE),
    ],
)
async def test_before_the_handshake_only_the_handshake_is_taken(
    node: Node, said: list[bytes], code: Code, engine: str
) -> None:
    async with raw_peer(node.folder, node.address, proved=False, engine=engine) as peer:
        peer.open_control()
        for data in said:
            peer.send(data)
        error = await peer.ending()
        assert error.code is code
        assert error.sentence
        assert peer.closed_with == (code, error.sentence[:200])
    await until(lambda: not node.broker.sessions)


async def test_streams_out_of_order_are_told_so(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(CREW)
    async with raw_peer(node.folder, node.address, proved=False) as peer:
        peer.send(b"x", peer.open_stream())
        await until(lambda: peer.closed_with)
        assert peer.closed_with == (Code.STATE, "The first stream of a session is the control stream.")
    async with raw_peer(node.folder, node.address, proved=False) as peer:
        peer.open_control()
        peer.send(HELLO)
        peer.send(b"x", peer.open_stream())
        assert (await peer.ending()).code is Code.STATE
    for wrong in (
        encode_request(OpenPublisher(CREW)),
        encode_frame(FrameType.APPENDED, bytes(24)),
        encode_frame(FrameType.REQUEST, b"\x80", 0),
    ):
        async with raw_peer(node.folder, node.address) as peer:
            peer.send(wrong)
            assert (await peer.ending()).code in (Code.STATE, Code.FRAME_UNKNOWN, Code.FRAME_MALFORMED)
    for wrong in (
        batch_frame([b"before it is opened"]),
        encode_request(DescribeStream(CREW)),
        encode_request(OpenPublisher(CREW)) * 2,
        encode_frame(FrameType.TRANSFER, b"x"),
    ):
        async with raw_peer(node.folder, node.address) as peer:
            peer.send(wrong, peer.open_stream())
            assert (await peer.ending()).code in (Code.STATE, Code.FRAME_UNKNOWN, Code.NOT_FOUND_OR_FORBIDDEN)


async def test_damaged_batches_are_refused_one_by_one(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(CREW)
    chance = random.Random(3)
    async with raw_peer(node.folder, node.address) as peer:
        stream = peer.open_stream()
        await peer.ask(OpenPublisher(CREW), 1, stream)
        whole = batch_frame([b"payload %d" % n for n in range(20)], 0)
        count = 600
        for at in range(count):
            frame = bytearray(whole)
            frame[8:12] = (1000 + at).to_bytes(4, "big")
            bit = chance.randrange(12 * 8, len(frame) * 8)
            frame[bit // 8] ^= 1 << bit % 8
            peer.send(bytes(frame), stream)
        peer.send(batch_frame([b"whole"], 5), stream)
        await until(lambda: [f for f in peer.of(FrameType.APPENDED) if f.correlation == 5])
        refused = [error for error in peer.errors() if error.code is not Code.INTERNAL]
        taken = len(peer.of(FrameType.APPENDED)) - 1
        assert len(refused) + taken == count, "each is answered"
        assert len(refused) > count // 2
        assert peer.closed_with is None
    # What was taken can be read by everybody: a flipped bit in a field that is the broker's, or the producer's number.
    state = await operator.describe_stream(CREW)
    async with operator.stream(CREW).subscribe("earliest") as reader:
        found = await take(reader, state.state[0].high_watermark)
    assert bytes(found[-1].payload) == b"whole"


async def test_streams_that_are_opened_and_reset_leave_nothing(
    node: Node, operator: felix.RegionClient
) -> None:
    await operator.create_stream(CREW)
    async with raw_peer(node.folder, node.address) as peer:
        for at in range(400):
            stream = peer.open_stream()
            if at % 3:
                peer.send(encode_request(OpenPublisher(CREW), at + 1), stream)
            if at % 3 == 2:
                peer.send(batch_frame([bytes(9000)])[:5000], stream)
            await asyncio.sleep(0)
            peer.peer.reset_stream(stream, 0)
            if not at % 50:
                await asyncio.sleep(0.05)
        assert await peer.ask(DescribeStream(CREW), 9999)
        await asyncio.sleep(0.1)
        for each in node.broker.sessions:
            assert not each._roles
            assert not each._publish_partial
        assert node.broker.budgets.publish.used_bytes == 0
        peer.peer.reset_stream(peer.control, 0)
        await until(lambda: peer.closed_with)
        assert peer.closed_with == (Code.STATE, "The client reset its control stream.")


async def test_subscriptions_come_and_go_without_growth(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(CREW)
    async with raw_peer(node.folder, node.address) as peer:
        for at in range(1, 150):
            await peer.ask(Subscribe(CREW, Start("earliest"), credit_bytes=1 << 21), at)
            await peer.ask(Unsubscribe(at), 10_000 + at)
            peer.frames.clear()
        stream = node.broker.streams.get(felix.StreamName.parse(CREW))
        assert stream is not None
        assert not stream.serving[0]._tail.followers
        assert node.broker.gauges()["subscriptions"] == 0


async def test_a_handshake_that_is_never_finished_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("region.session.client_session.HANDSHAKE_TIMEOUT_S", 0.3)
    async with raw_peer(node.folder, node.address, proved=False) as peer:
        peer.open_control()
        peer.send(HELLO)
        error = await peer.ending()
        assert error.code is Code.HANDSHAKE_TIMEOUT
    async with raw_peer(node.folder, node.address, proved=False) as silent:
        await until(lambda: silent.closed_with)
        assert silent.closed_with is not None
        assert silent.closed_with[0] == Code.HANDSHAKE_TIMEOUT
    await until(lambda: not node.broker.sessions)


async def test_the_limit_of_sessions_is_an_answer(folder: RegionFolder, tmp_path: Path, engine: str) -> None:
    async with running(
        folder, data=str(tmp_path / "data"), limits=LimitsConfig(sessions=2), engine=engine
    ) as node:
        async with client(folder, engine=engine), client(folder, engine=engine):
            with pytest.raises(felix.UnavailableError, match="has 2 sessions, the most") as caught:
                async with raw_peer(folder, node.address, engine=engine):
                    pass
            assert caught.value.code is Code.LIMIT_SESSIONS
            assert caught.value.retry_after_ms
        await until(lambda: not node.broker.sessions)
        async with client(folder, engine=engine):
            pass


async def test_a_peer_that_vanishes_in_the_middle_leaves_nothing(
    node: Node, operator: felix.RegionClient
) -> None:
    """Connections that end while reads, appends and requests are under way."""
    await operator.create_stream(CREW, shards=2)
    async with operator.stream(CREW).publisher() as publisher:
        for _ in range(4000):
            await publisher.send(bytes(8000))
    identity = load_identity(node.folder.identity("operator"))
    assert isinstance(identity, felix.Identity)
    for round_ in range(12):
        managers = [raw_peer(node.folder, node.address) for _ in range(4)]
        peers: list[RawPeer] = [await manager.__aenter__() for manager in managers]
        for peer in peers:
            stream = peer.open_stream()
            peer.send(encode_request(OpenPublisher(CREW), 1), stream)
            for n in range(2, 20):
                peer.send(batch_frame([bytes(50_000)], n), stream)
                peer.send(encode_request(Subscribe(CREW, Start("earliest"), credit_bytes=8 << 20), 100 + n))
                peer.send(encode_request(DescribeStream(CREW), 200 + n))
        await asyncio.sleep(0.01 * (round_ % 5))
        for manager in managers:
            await manager.__aexit__(None, None, None)
    await until(lambda: len(node.broker.sessions) == 1)
    budgets = node.broker.budgets
    await until(lambda: not budgets.catch_up.used_bytes and not budgets.delivery.used_bytes)
    stream_held = node.broker.streams.get(felix.StreamName.parse(CREW))
    assert stream_held is not None
    assert not any(shard._tail.followers for shard in stream_held.serving)
    waiting = [
        task for task in asyncio.all_tasks() if "Subscription" in repr(task) or "ClientSession" in repr(task)
    ]
    assert not waiting, "no task outlives its session"
