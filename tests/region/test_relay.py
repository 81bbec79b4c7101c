"""A relay by itself: what it carries, what it drops, and what it gives back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from region_peer import until

import felix
from felix.errors import Code, FelixError, ProtocolError, RequestError, UnavailableError
from felix.frames import Frame, FrameDecoder, FrameType, Train, decode_datagrams
from felix.messages import OpenRelay, RelayOpened, decode_answer, decode_error, encode_message
from felix.names import SpiffeId
from felix.relay import RelayPath
from felix.transport.port import TransportLimits
from region.limits.budget import Budget
from region.relay import CONNECTIONS_MAX, RelayService

ORDERS = SpiffeId("us-east", "acme", "client", "orders")


def packet(destination: bytes, size: int = 1200) -> bytes:
    """A datagram that begins with a long header."""
    head = b"\xc0\x00\x00\x00\x01" + bytes([len(destination)]) + destination + b"\x01s\x00"
    return head + bytes(size - len(head))


SHORT = b"\x40" + bytes(99)


class Session:
    """What a relay asks of its session; `sent` is what the client gets."""

    identity = ORDERS
    peer = None
    ended = False

    def __init__(self) -> None:
        self.takes = True
        self.is_over = False
        self.sent: list[Frame] = []
        self.refusal: Exception | None = None
        self._decoder = FrameDecoder()

    def may_send(self) -> bool:
        return self.takes

    def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        self.sent += [
            replace(frame, body=memoryview(bytes(frame.body))) for frame in self._decoder.feed(data)
        ]

    def end_role(self, role: object) -> None:
        self.is_over = True

    def meter_for(self, stream: str) -> Any:
        return SimpleNamespace(requested=lambda: self.refusal)

    def of(self, kind: FrameType) -> list[Frame]:
        return [frame for frame in self.sent if frame.type is kind]


class Far:
    """Another broker's socket, and the service of the one in between."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.changed: list[Callable[[object], None]] = []
        self.up = True
        self.has_right = True
        self.view = SimpleNamespace(
            nodes={"b2": object()}, alive={"b2": SimpleNamespace(client_address=self.address)}
        )
        mirror = SimpleNamespace(view=self.view, on_change=self.changed.append)
        self.budget = Budget("exchange", 1 << 20)
        broker = SimpleNamespace(
            broker_id="b1",
            region="us-east",
            budgets=SimpleNamespace(exchange=self.budget),
            metrics=SimpleNamespace(refused=lambda error: None),
            has_right=lambda identity: self.has_right,
            transport_limits=TransportLimits(),
        )
        clustered = SimpleNamespace(
            member=SimpleNamespace(mirror=mirror), requests=SimpleNamespace(is_up=lambda peer: self.up)
        )
        self.service = RelayService(
            cast("Any", broker),
            cast("Any", clustered),
            most=16,
        )

    async def opened(self) -> tuple[Any, Session]:
        session = Session()
        role = self.service.open(cast("Any", session), 4)
        role.data(encode_message(FrameType.REQUEST, OpenRelay(self.address), 1), False)
        await until(lambda: session.sent)
        assert decode_answer(session.sent[0].body) == RelayOpened("b2", 16 * 1024)
        return role, session

    async def received(self, count: int) -> list[bytes]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            return [await loop.sock_recv(self.socket, 1 << 16) for _ in range(count)]


@pytest.fixture
async def far() -> AsyncIterator[Far]:
    made = Far()
    yield made
    made.service.close()
    assert made.service.gauges()["relays"] == 0 and made.budget.used_bytes == 0
    made.socket.close()


async def test_datagrams_go_both_ways_as_they_are(far: Far) -> None:
    role, session = await far.opened()
    first, rest = packet(b"d" * 8), [bytes([0x40 + number]) * 1200 for number in range(3)] + [SHORT]
    frames = Train(1200, first).encode() + Train(1200, b"".join(rest)).encode()
    role.data(frames[:700], False)
    assert far.budget.used_bytes == 700, "a part of a frame counts"
    role.data(frames[700:], False)
    assert far.budget.used_bytes == 0
    assert await far.received(5) == [first, *rest]
    port = next(iter(far.service._relays))._udp.local_address  # type: ignore[union-attr]
    far.socket.sendto(b"back", port[:2])
    await until(lambda: session.of(FrameType.DATAGRAMS))
    (frame,) = session.of(FrameType.DATAGRAMS)
    assert decode_datagrams(frame.body).split() == [b"back"]
    gauges = far.service.gauges()
    assert gauges["relayed_bytes"] == 4 + 1200 * 4 + 100 and gauges["relay_dropped_bytes"] == 0
    role.data(b"", True)
    assert session.is_over


async def test_one_relay_reaches_no_more_connections_than_a_handshake_needs(far: Far) -> None:
    role, _ = await far.opened()
    sent = [packet(bytes([number]) * 8) for number in range(CONNECTIONS_MAX + 2)]
    for datagram in [*sent, sent[0], packet(b"cut off")[:9], SHORT]:
        role.data(Train(len(datagram), datagram).encode(), False)
    assert await far.received(CONNECTIONS_MAX + 2) == [*sent[:CONNECTIONS_MAX], sent[0], SHORT]
    assert far.service.dropped_bytes == 2 * 1200 + 9


async def test_datagrams_too_short_for_quic_are_not_sent(far: Far) -> None:
    role, _ = await far.opened()
    for train in (Train(1, b"\x40" * 60_000), Train(20, SHORT), Train(99, SHORT), Train(21, SHORT[:21])):
        role.data(train.encode(), False)
    assert await far.received(2) == [SHORT[:99], SHORT[:21]]
    assert far.service.dropped_bytes == 60_000 + 100 + 1


async def test_relays_that_begin_and_end_share_one_lookup_of_a_broker(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, may_answer = asyncio.get_running_loop(), asyncio.Event()
    look_up, asked = loop.getaddrinfo, list[object]()

    async def slowly(host: str, port: int, **how: Any) -> Any:
        asked.append(host)
        await may_answer.wait()
        return await look_up(host, port, **how)

    monkeypatch.setattr(loop, "getaddrinfo", slowly)
    sessions = [Session() for _ in range(6)]
    for number, session in enumerate(sessions):
        role = far.service.open(cast("Any", session), 4)
        role.data(encode_message(FrameType.REQUEST, OpenRelay(far.address), 1), False)
        await until(lambda: asked)
        if number % 2:
            role.data(b"", True)
    may_answer.set()
    await until(lambda: all(session.sent for session in sessions[::2]))
    assert len(asked) == 1 and far.service.gauges()["relays"] == 3
    assert all(session.is_over and not session.sent for session in sessions[1::2])
    # The next one looks anew: names come to mean other addresses.
    await far.opened()
    assert len(asked) == 2


async def test_what_a_client_does_not_take_is_dropped_and_not_held(far: Far) -> None:
    role, session = await far.opened()
    port = next(iter(far.service._relays))._udp.local_address[:2]  # type: ignore[union-attr]
    session.takes = False
    far.socket.sendto(bytes(900), port)
    await until(lambda: far.service.dropped_bytes == 900)
    session.takes = True
    far.socket.sendto(b"now", port)
    await until(lambda: session.of(FrameType.DATAGRAMS))
    assert [decode_datagrams(frame.body).split() for frame in session.of(FrameType.DATAGRAMS)] == [[b"now"]]
    # Nobody listens there any more: the client hears what a socket of its own would say.
    far.socket.close()
    role.data(Train(100, SHORT).encode(), False)
    await until(lambda: len(session.of(FrameType.DATAGRAMS)) == 2)
    assert not decode_datagrams(session.sent[-1].body).data and not session.is_over


@pytest.mark.parametrize("why", ["down", "moved", "gone", "right", "quota"])
async def test_a_relay_is_refused_or_ends_where_it_may_not_be(far: Far, why: str) -> None:
    _, session = await far.opened()
    role, other = await far.opened()
    refused = Session()
    if why == "down":
        far.up = False
    elif why == "moved":
        far.view.alive["b2"] = SimpleNamespace(client_address="127.0.0.1:9")
    elif why == "gone":
        del far.view.nodes["b2"], far.view.alive["b2"]
    elif why == "right":
        far.has_right = False
        role.rights_changed()
        assert other.is_over and decode_error(other.sent[-1].body).code is Code.NOT_FOUND_OR_FORBIDDEN
        return
    else:
        refused.refusal = UnavailableError("Too many requests.", code=Code.LIMIT_RATE)
    for listener in far.changed:
        listener(None)
    far.service.open(cast("Any", refused), 8).data(
        encode_message(FrameType.REQUEST, OpenRelay(far.address), 1), False
    )
    assert refused.is_over and refused.of(FrameType.ERROR)
    assert session.is_over == (why in ("moved", "gone")), "one that stands outlives a link between brokers"


async def test_the_protocol_of_a_relay_is_kept(far: Far) -> None:
    for broken in (
        Train(100, SHORT).encode(),
        encode_message(FrameType.REQUEST, OpenRelay(far.address), 2),
    ):
        session = Session()
        role = far.service.open(cast("Any", session), 4)
        role.data(encode_message(FrameType.REQUEST, OpenRelay(far.address), 1), False)
        with pytest.raises(ProtocolError):
            role.data(broken, False)
        role.closed()
    role, _ = await far.opened()
    with pytest.raises(ProtocolError, match="1 to 16384 are carried"):
        role.data(Train(16_385, bytes(16_385)).encode(), False)
    role.closed()


class Heedless:
    """A sink that leaves its stream as it is."""

    def __init__(self) -> None:
        self.is_ended = False

    def exchange_data(self, data: bytes, end: bool) -> None:
        self.is_ended = self.is_ended or end

    def exchange_end(self, error: FelixError | None) -> None: ...


async def test_streams_that_the_broker_ended_keep_no_place_in_the_session(
    operator: felix.RegionClient,
) -> None:
    link = operator.connection.link
    assert link is not None
    most = TransportLimits().streams_max
    for _ in range(most):
        with pytest.raises(RequestError, match="carries no connections"):
            await RelayPath(link).open("127.0.0.1:9")
    for _ in range(most):
        sink = Heedless()
        stream = link.open_exchange(sink)
        link.send_exchange(stream, encode_message(FrameType.REQUEST, OpenRelay("127.0.0.1:9"), 1))
        await until(lambda sink=sink: sink.is_ended)  # type: ignore[misc]
