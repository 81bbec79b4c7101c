"""The network twin: what a QUIC path promises, and what it may do to those who rely on more."""

from __future__ import annotations

import asyncio
from functools import cache
from random import Random

import pytest
from transport.certificates import Authority

from felix.errors import Code, RequestError, UnavailableError
from felix.transport.memory import MemoryConnection, MemoryEngine, MemoryListener, MemoryNetwork, Path
from felix.transport.port import ClientTls, Connection, NobodyListensError, ServerTls, TransportLimits

DIRECT, USUAL = Path(), TransportLimits()
QUICK = TransportLimits(idle_timeout_ms=200, keepalive_ms=0)


class Log:
    """A handler that writes down what it is told."""

    def __init__(self) -> None:
        self.connection: Connection
        self.data: dict[int, bytes] = {}
        self.ended: list[int] = []
        self.resets: list[tuple[int, int]] = []
        self.drains = 0
        self.closed_with: tuple[int, str] | None = None
        self.fails = False

    def connected(self, connection: Connection) -> None:
        self.connection = connection

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        assert self.closed_with is None and stream_id not in self.ended
        if self.fails:
            raise ValueError("as a broken application does")
        self.data[stream_id] = self.data.get(stream_id, b"") + data
        if end:
            self.ended.append(stream_id)

    def stream_reset(self, stream_id: int, code: int) -> None:
        self.resets.append((stream_id, code))

    def drained(self) -> None:
        self.drains += 1

    def closed(self, code: int, reason: str) -> None:
        assert self.closed_with is None, "closed comes once"
        self.closed_with = code, reason


@cache
def tls() -> ServerTls:
    return Authority.make().server()


async def served(
    path: Path = DIRECT, seed: int = 1, limits: TransportLimits = USUAL
) -> tuple[MemoryNetwork, MemoryListener, list[Log]]:
    """A network with a listener on the host "broker"; its handlers, as connections come."""
    network, handlers = MemoryNetwork(Random(seed), path), list[Log]()

    def make() -> Log:
        handlers.append(Log())
        return handlers[-1]

    listener = await MemoryEngine(network, "broker").listen("broker", 0, tls(), make, limits)
    return network, listener, handlers


async def joined(
    network: MemoryNetwork, listener: MemoryListener, limits: TransportLimits = USUAL
) -> tuple[MemoryConnection, Log]:
    handler = Log()
    connection = await MemoryEngine(network, "client").connect(
        *listener.address, ClientTls(b"any", "b1"), handler, limits
    )
    return connection, handler


async def test_streams_carry_their_bytes_in_order_and_those_before_a_close_arrive() -> None:
    for seed in range(20):
        network, listener, (*_,) = await served(Path(0.0001, 0.002, 0.05), seed)
        client, handler = await joined(network, listener)
        (end,) = listener._ends
        server = end._handler
        assert isinstance(server, Log)
        random, sent = Random(seed), dict[int, bytes]()
        streams = [client.open_stream(bidirectional=number % 2 == 0) for number in range(4)]
        assert streams == [0, 2, 4, 6]
        for number in range(60):
            stream, data = random.choice(streams), b"%d," % number
            sent[stream] = sent.get(stream, b"") + data
            client.send(stream, data)
        client.send(streams[0], b"", end=True)
        client.close(7, "done")
        await client.wait_closed()
        await end.wait_closed()
        assert server.data == sent and server.ended == [streams[0]]
        assert server.closed_with == handler.closed_with == (7, "done")
        assert client.server_leaf_sha256 == end.server_leaf_sha256 != b""
        with pytest.raises(UnavailableError):
            client.send(0, b"late")
        assert listener.connection_count == 0


async def test_streams_do_not_wait_for_each_other() -> None:
    network, listener, handlers = await served(Path(0.0, 0.003), seed=3)
    client, _ = await joined(network, listener)
    order: list[int] = []
    handlers[0].stream_data = lambda stream_id, data, end: order.append(stream_id)  # type: ignore[method-assign]
    streams = [client.open_stream(bidirectional=True) for _ in range(12)]
    for stream in streams:
        client.send(stream, b"x")
    async with asyncio.timeout(10):
        while len(order) < 12:  # noqa: ASYNC110 - arrivals are plain calls
            await asyncio.sleep(0.001)
    assert sorted(order) == streams and order != streams


async def test_one_seed_is_one_course_of_events() -> None:
    async def course(seed: int) -> list[float]:
        network = MemoryNetwork(Random(seed), Path(0.01, 0.02, 0.3))
        return [network.delay_s() for _ in range(50)]

    assert await course(5) == await course(5) != await course(6)
    assert min(await course(5)) >= 0.01 and max(await course(5)) > 0.05


async def test_a_partition_holds_back_what_is_on_its_way_until_it_ends() -> None:
    network, listener, handlers = await served()
    client, _ = await joined(network, listener)
    stream = client.open_stream(bidirectional=True)
    network.part("client", "broker")
    client.send(stream, b"one ")
    client.send(stream, b"two")
    await asyncio.sleep(0.01)
    assert handlers[0].data == {} and client.backlog_bytes() == 7
    network.heal()
    client.send(stream, b" three")
    await asyncio.sleep(0.01)
    assert handlers[0].data == {stream: b"one two three"} and client.backlog_bytes() == 0


async def test_a_partition_that_outlasts_the_idle_timeout_ends_both_sides() -> None:
    network, listener, handlers = await served(limits=QUICK)
    client, handler = await joined(network, listener, QUICK)
    network.part("client", "broker")
    client.send(client.open_stream(bidirectional=True), b"lost")
    await client.wait_closed()
    (end,) = list(listener._ends) or [client.peer]
    await end.wait_closed()
    assert handler.closed_with and handler.closed_with[0] == Code.DISCONNECTED
    assert handlers[0].closed_with and handlers[0].closed_with[0] == Code.DISCONNECTED
    network.heal()
    await asyncio.sleep(0)
    assert handlers[0].data == {}
    with pytest.raises(UnavailableError, match="did not answer"):
        network.part("client", "broker")
        await MemoryEngine(network, "client").connect(
            *listener.address, ClientTls(b"any", "b1"), Log(), timeout=0.01
        )


async def test_a_host_that_hears_nothing_is_heard_until_it_gives_up() -> None:
    network, listener, handlers = await served(limits=QUICK)
    client, handler = await joined(network, listener, QUICK)
    network.part("broker", "client", both=False)
    stream = client.open_stream(bidirectional=True)
    client.send(stream, b"heard")
    await asyncio.sleep(0.01)
    assert handlers[0].data == {stream: b"heard"}
    await client.wait_closed()
    assert handler.closed_with and handler.closed_with[0] == Code.DISCONNECTED
    with pytest.raises(UnavailableError, match="did not answer"):
        await MemoryEngine(network, "client").connect(
            *listener.address, ClientTls(b"any", "b1"), Log(), timeout=0.01
        )


async def test_a_host_that_crashes_is_told_nothing_and_its_peers_find_out() -> None:
    network, listener, handlers = await served(limits=QUICK)
    client, handler = await joined(network, listener, QUICK)
    stream = client.open_stream(bidirectional=True)
    client.send(stream, b"before")
    await asyncio.sleep(0.01)
    network.crash("broker")
    client.send(stream, b"after")
    await client.wait_closed()
    assert handler.closed_with and handler.closed_with[0] == Code.DISCONNECTED
    assert handlers[0].data == {stream: b"before"} and handlers[0].closed_with is None
    with pytest.raises(NobodyListensError):
        await joined(network, listener)


async def test_an_idle_connection_lives_on_while_both_ends_do() -> None:
    network, listener, handlers = await served(limits=QUICK)
    client, handler = await joined(network, listener, QUICK)
    await asyncio.sleep(0.5)
    assert not client.is_closed and handler.closed_with is None and handlers[0].closed_with is None


async def test_a_backlog_drains_as_its_bytes_arrive() -> None:
    limits = TransportLimits(backlog_high_bytes=100, backlog_low_bytes=40)
    network, listener, _ = await served(Path(0.001))
    client, handler = await joined(network, listener, limits)
    stream = client.open_stream(bidirectional=False)
    client.send(stream, bytes(60))
    client.send(stream, bytes(60))
    assert client.backlog_bytes() == 120 and not handler.drains
    await asyncio.sleep(0.02)
    assert client.backlog_bytes() == 0 and handler.drains == 1


async def test_a_handler_that_fails_ends_its_own_connection() -> None:
    network, listener, handlers = await served()
    client, handler = await joined(network, listener)
    handlers[0].fails = True
    client.send(client.open_stream(bidirectional=True), b"x")
    await client.wait_closed()
    assert handler.closed_with and handler.closed_with[0] == Code.INTERNAL


async def test_an_address_is_taken_once_and_a_closed_listener_tells_its_peers() -> None:
    network, listener, _ = await served()
    with pytest.raises(RequestError) as refused:
        await MemoryEngine(network, "broker").listen("broker", listener.port, tls(), Log)
    assert refused.value.code is Code.CONFLICT
    client, handler = await joined(network, listener)
    await listener.close("maintenance")
    await client.wait_closed()
    assert handler.closed_with == (Code.SHUTTING_DOWN, "maintenance")
    with pytest.raises(NobodyListensError):
        await joined(network, listener)
