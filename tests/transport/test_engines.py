"""What the port promises, for each engine as client of each engine."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from random import Random
from typing import get_args

import pytest
from msgspec.structs import replace
from qh3.tls import Epoch
from transport.certificates import Authority
from transport.path import Path
from transport.recorder import WAIT_S, Echo, Recorder, eventually

from felix.errors import Code, ProtocolError, RequestError, UnavailableError
from felix.transport.driver import DriverListener
from felix.transport.driver_connection import DriverConnection
from felix.transport.machine import Machine, Transmission
from felix.transport.port import (
    ENGINE_NAMES,
    ClientTls,
    Connection,
    Engine,
    EngineName,
    Handler,
    Listener,
    ServerTls,
    TransportLimits,
    engine_named,
)
from felix.transport.udp import Address

NAME = "b1.us-east.acme"
LIMITS = TransportLimits()
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Pair:
    """A client engine, a server engine, and the authority that both use."""

    client: Engine
    server: Engine
    authority: Authority

    @asynccontextmanager
    async def listening(
        self,
        make: Callable[[], Handler] = Recorder,
        *,
        tls: ServerTls | None = None,
        limits: TransportLimits = LIMITS,
        alpn: str = "felix/1",
    ) -> AsyncIterator[Listener]:
        listener = await self.server.listen(HOST, 0, tls or self.authority.server(NAME), make, limits, alpn)
        try:
            yield listener
        finally:
            await listener.close()

    async def dial(
        self,
        listener: Listener,
        handler: Handler | None = None,
        *,
        name: str = NAME,
        authorities_pem: bytes | None = None,
        limits: TransportLimits = LIMITS,
        alpn: str = "felix/1",
        timeout: float = 10.0,  # noqa: ASYNC109
    ) -> Connection:
        tls = ClientTls(authorities_pem or self.authority.pem, name)
        return await self.client.connect(
            HOST, listener.address[1], tls, handler or Recorder(), limits, alpn, timeout
        )

    @asynccontextmanager
    async def connected(
        self,
        *,
        make: Callable[[], Recorder] = Recorder,
        client_limits: TransportLimits = LIMITS,
        server_limits: TransportLimits = LIMITS,
    ) -> AsyncIterator[tuple[Recorder, Recorder, Listener]]:
        """One connection: the client's recorder, the server's, and the listener."""
        servers: list[Recorder] = []

        def made() -> Recorder:
            servers.append(make())
            return servers[-1]

        async with self.listening(made, limits=server_limits) as listener:
            client = Recorder()
            connection = await self.dial(listener, client, limits=client_limits)
            await eventually(lambda: bool(servers))
            try:
                yield client, servers[0], listener
            finally:
                connection.close()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make()


@pytest.fixture(
    params=[(c, s) for c in ENGINE_NAMES for s in ENGINE_NAMES], ids=lambda p: f"{p[0]}-to-{p[1]}"
)
def pair(request: pytest.FixtureRequest, authority: Authority) -> Pair:
    client, server = request.param
    return Pair(engine_named(client), engine_named(server), authority)


async def test_a_connection_says_who_is_at_its_ends(pair: Pair) -> None:
    async with pair.connected() as (client, server, listener):
        assert client.peer.is_client and not server.peer.is_client
        assert client.peer.server_name == NAME
        assert server.peer.server_name == ""
        assert client.peer.peer_address == listener.address
        assert server.peer.peer_address[0] == HOST
        assert client.peer.engine_name == pair.client.name
        assert server.peer.engine_name == pair.server.name
        assert listener.connection_count == 1
        assert listener.handshake_count == 0


async def test_a_connection_that_ends_together_with_its_handshake_reaches_no_handler(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    complete = DriverConnection._handshake_completed

    def end_and_complete(self: DriverConnection, alpn: str | None) -> None:
        if self.is_client:
            self._machine.close(7, None, "over")
        complete(self, alpn)

    monkeypatch.setattr(DriverConnection, "_handshake_completed", end_and_complete)
    client = Recorder()
    async with pair.listening() as listener:
        with pytest.raises(UnavailableError) as caught:
            await pair.dial(listener, client)
    assert "over" in str(caught.value) and client.calls == []
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("engine", ["qh3"])
async def test_no_stream_is_opened_on_a_connection_whose_engine_has_ended(
    engine: EngineName, authority: Authority
) -> None:
    pair = Pair(engine_named(engine), engine_named(engine), authority)
    async with pair.connected() as (client, _, _):
        client.peer._machine.close(7, None, "over")  # type: ignore[attr-defined]
        with pytest.raises(UnavailableError) as caught:
            client.peer.open_stream(bidirectional=True)
    assert caught.value.code is Code.DISCONNECTED


async def test_a_bidirectional_stream_carries_both_ways_and_ends(pair: Pair) -> None:
    async with pair.connected(make=Echo) as (client, server, _):
        stream = client.peer.open_stream(bidirectional=True)
        client.peer.send(stream, b"hello, ")
        client.peer.send(stream, b"region", end=True)
        await client.until(lambda c: stream in c.ended)
        assert bytes(client.received[stream]) == b"hello, region"
        assert bytes(server.received[stream]) == b"hello, region"
        assert stream in server.ended


async def test_unidirectional_streams_go_one_way_each(pair: Pair) -> None:
    async with pair.connected(make=Echo) as (client, _, _):
        stream = client.peer.open_stream(bidirectional=False)
        client.peer.send(stream, b"ping", end=True)
        await client.until(lambda c: len(c.ended) == 1)
        (answer,) = client.ended
        assert answer & 3 == 3, "a unidirectional stream that the server opened"
        assert bytes(client.received[answer]) == b"ping"
        with pytest.raises(ValueError, match="not open for sending"):
            client.peer.send(answer, b"against the direction")
        with pytest.raises(ValueError, match="not open for sending"):
            client.peer.send(stream, b"after the end")


async def test_ten_megabytes_arrive_whole_in_both_directions(pair: Pair) -> None:
    size = 10 * 1000 * 1000
    sent = os.urandom(1000 * 1000) * 10
    async with pair.connected() as (client, server, _):
        up = client.peer.open_stream(bidirectional=True)
        client.peer.send(up, sent, end=True)
        down = server.peer.open_stream(bidirectional=False)
        server.peer.send(down, sent, end=True)
        await server.until(lambda s: up in s.ended)
        await client.until(lambda c: down in c.ended)
        expected = hashlib.sha256(sent).digest()
        assert len(server.received[up]) == size
        assert hashlib.sha256(server.received[up]).digest() == expected
        assert hashlib.sha256(client.received[down]).digest() == expected


async def test_many_small_sends_in_one_turn_arrive_in_order(pair: Pair) -> None:
    async with pair.connected() as (client, server, _):
        streams = [client.peer.open_stream(bidirectional=False) for _ in range(5)]
        pieces = [b"%d;" % n for n in range(2000)]
        for piece in pieces:
            for stream in streams:
                client.peer.send(stream, piece)
        for stream in streams:
            client.peer.send(stream, b"", end=True)
        await server.until(lambda s: s.ended == set(streams))
        for stream in streams:
            assert bytes(server.received[stream]) == b"".join(pieces)


async def test_a_lone_send_is_transmitted_in_the_same_turn(pair: Pair) -> None:
    async with pair.connected() as (client, server, _):
        # The handshake's own packets are paced; let them leave.
        await asyncio.sleep(0.05)
        stream = client.peer.open_stream(bidirectional=False)
        client.peer.send(stream, b"x" * 100)
        assert client.peer.backlog_bytes() == 100
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert client.peer.backlog_bytes() == 0
        await server.until(lambda s: bytes(s.received.get(stream, b"")) == b"x" * 100)


async def test_an_announced_send_leaves_in_the_iteration_in_which_it_is_made(pair: Pair) -> None:
    async with pair.connected() as (client, server, _):
        await asyncio.sleep(0.05)
        stream = client.peer.open_stream(bidirectional=False)
        asyncio.get_running_loop().call_soon(client.peer.send, stream, b"x" * 100)
        client.peer.will_send()
        await asyncio.sleep(0)
        assert client.peer.backlog_bytes() == 0
        await server.until(lambda s: bytes(s.received.get(stream, b"")) == b"x" * 100)


async def test_what_waits_to_leave_waits_for_an_announced_send_and_for_no_second_one(pair: Pair) -> None:
    async with pair.connected() as (client, server, _):
        await asyncio.sleep(0.05)
        stream = client.peer.open_stream(bidirectional=False)
        client.peer.send(stream, b"x" * 100)
        asyncio.get_running_loop().call_soon(client.peer.send, stream, b"y" * 100)
        client.peer.will_send()
        await asyncio.sleep(0)
        assert client.peer.backlog_bytes() == 200
        client.peer.will_send()
        await asyncio.sleep(0)
        assert client.peer.backlog_bytes() == 0
        await server.until(lambda s: bytes(s.received.get(stream, b"")) == b"x" * 100 + b"y" * 100)


async def test_more_streams_than_may_be_open_at_once_one_after_another(pair: Pair) -> None:
    async with pair.connected() as (client, server, _):
        for number in range(300):
            stream = client.peer.open_stream(bidirectional=False)
            client.peer.send(stream, b"%d" % number, end=True)
            if number % 20 == 19:
                await server.until(lambda s, n=number: len(s.ended) == n + 1)
        assert sorted(int(bytes(v)) for v in server.received.values()) == list(range(300))


async def test_one_stream_too_many_is_refused_to_whoever_opens_it(pair: Pair) -> None:
    few = replace(LIMITS, streams_max=3)
    async with pair.connected(client_limits=few, server_limits=few) as (client, _, _):
        for _ in range(3):
            client.peer.send(client.peer.open_stream(bidirectional=True), b"x")
        with pytest.raises(UnavailableError) as caught:
            client.peer.open_stream(bidirectional=True)
        assert caught.value.code == Code.LIMIT_SUBSCRIPTIONS
        client.peer.open_stream(bidirectional=False)


async def test_a_peer_that_opens_far_too_many_streams_is_sent_away(pair: Pair) -> None:
    few = replace(LIMITS, streams_max=3)
    async with pair.connected(server_limits=few) as (client, server, _):
        for _ in range(20):
            client.peer.send(client.peer.open_stream(bidirectional=True), b"x")
        await client.until(lambda c: bool(c.closed_with))
        assert client.closed_with[0][0] == Code.LIMIT_SUBSCRIPTIONS
        assert len(server.received) <= 6


async def test_a_reset_reaches_the_peer_with_its_code(pair: Pair) -> None:
    async with pair.connected() as (client, server, _):
        stream = client.peer.open_stream(bidirectional=True)
        client.peer.send(stream, b"begun")
        await server.until(lambda s: bytes(s.received.get(stream, b"")) == b"begun")
        client.peer.reset_stream(stream, 406)
        await server.until(lambda s: s.resets == {stream: 406})
        server.peer.send(stream, b"the other direction stays", end=True)
        await client.until(lambda c: stream in c.ended)
        assert bytes(client.received[stream]) == b"the other direction stays"


async def test_a_close_reaches_the_peer_with_its_code_and_reason(pair: Pair) -> None:
    async with pair.connected() as (client, server, listener):
        client.peer.close(406, "the shard stopped")
        await asyncio.wait_for(client.peer.wait_closed(), WAIT_S)
        assert client.closed_with == [(406, "the shard stopped")]
        await server.until(lambda s: bool(s.closed_with))
        assert server.closed_with == [(406, "the shard stopped")]
        assert listener.connection_count == 0
        with pytest.raises(UnavailableError):
            client.peer.open_stream(bidirectional=True)
        client.peer.close(1, "again")
        assert client.peer.backlog_bytes() == 0


async def test_what_was_sent_before_a_close_in_the_same_turn_arrives(pair: Pair) -> None:
    async with pair.connected() as (client, server, _):
        stream = server.peer.open_stream(bidirectional=False)
        server.peer.send(stream, b"last words", end=True)
        server.peer.close(0, "done")
        await client.until(lambda c: bool(c.closed_with))
        assert bytes(client.received[stream]) == b"last words"
        assert client.closed_with == [(0, "done")]
        assert client.calls[0] == "connected" and client.calls[-1] == "closed"


async def test_a_very_long_reason_is_cut_and_still_arrives(pair: Pair) -> None:
    async with pair.connected() as (client, server, _):
        client.peer.close(300, "é" * 5000)
        await server.until(lambda s: bool(s.closed_with))
        code, reason = server.closed_with[0]
        assert code == 300
        assert reason and set(reason) == {"é"}


async def test_an_authority_we_do_not_trust_is_refused(pair: Pair) -> None:
    other = Authority.make("eu-west.acme root")
    handler = Recorder()
    async with pair.listening() as listener:
        with pytest.raises(RequestError) as caught:
            await pair.dial(listener, handler, authorities_pem=other.pem)
        assert caught.value.code == Code.IDENTITY_REFUSED
        assert "us-east.acme root" in str(caught.value) and "eu-west.acme root" in str(caught.value)
        assert handler.calls == []


async def test_a_certificate_for_another_name_is_refused(pair: Pair) -> None:
    async with pair.listening() as listener:
        with pytest.raises(RequestError) as caught:
            await pair.dial(listener, name="b2.us-east.acme")
        assert caught.value.code == Code.IDENTITY_REFUSED
        assert "'b1.us-east.acme'" in str(caught.value) and "'b2.us-east.acme'" in str(caught.value)


@pytest.mark.parametrize(
    ("starts", "ends", "words"),
    [
        (timedelta(days=-2), timedelta(days=-1), "expired at"),
        (timedelta(hours=1), timedelta(hours=2), "valid only from"),
    ],
)
async def test_a_certificate_out_of_its_time_is_refused(
    pair: Pair, starts: timedelta, ends: timedelta, words: str
) -> None:
    async with pair.listening(tls=pair.authority.server(NAME, starts=starts, ends=ends)) as listener:
        with pytest.raises(RequestError) as caught:
            await pair.dial(listener)
        assert caught.value.code == Code.IDENTITY_EXPIRED
        assert words in str(caught.value) and NAME in str(caught.value)


@pytest.mark.parametrize("kind", ["ec", "ed25519"])
async def test_a_chain_by_way_of_an_issuing_authority_is_accepted(pair: Pair, kind: str) -> None:
    root = Authority.make(kind=kind)  # type: ignore[arg-type]
    tls = root.issuing(kind=kind).server("us-east", kind=kind)  # type: ignore[arg-type]
    async with pair.listening(tls=tls) as listener:
        connection = await pair.dial(listener, name="us-east", authorities_pem=root.pem)
        assert connection.server_name == "us-east"
        connection.close()


async def test_a_listener_hands_each_protocol_to_its_own_handler(pair: Pair) -> None:
    made: dict[str, list[Recorder]] = {"felix/1": [], "other/1": []}

    def maker(protocol: str) -> Callable[[], Handler]:
        return lambda: made[protocol].append(Recorder()) or made[protocol][-1]

    listener = await pair.server.listen(
        HOST, 0, pair.authority.server(NAME), maker("felix/1"), others={"other/1": maker("other/1")}
    )
    try:
        other = await pair.dial(listener, alpn="other/1")
        await eventually(lambda: bool(made["other/1"]))
        assert not made["felix/1"]
        first = await pair.dial(listener)
        await eventually(lambda: bool(made["felix/1"]))
        assert len(made["other/1"]) == 1
        with pytest.raises(ProtocolError):
            await pair.dial(listener, alpn="third/1")
        other.close()
        first.close()
    finally:
        await listener.close()


async def test_another_application_protocol_is_refused(pair: Pair) -> None:
    made: list[Recorder] = []
    async with pair.listening(lambda: made.append(Recorder()) or made[-1], alpn="other/1") as listener:
        with pytest.raises(ProtocolError) as caught:
            await pair.dial(listener)
        assert caught.value.code == Code.VERSION_UNSUPPORTED
        assert "felix/1" in str(caught.value)
        assert made == []


async def test_an_idle_connection_ends_on_both_sides(pair: Pair) -> None:
    brief = replace(LIMITS, idle_timeout_ms=300, keepalive_ms=0)
    async with pair.connected(client_limits=brief, server_limits=brief) as (client, server, listener):
        await client.until(lambda c: bool(c.closed_with))
        await server.until(lambda s: bool(s.closed_with))
        assert client.closed_with[0][0] == server.closed_with[0][0] == Code.DISCONNECTED
        assert listener.connection_count == 0


@pytest.mark.parametrize("server", ENGINE_NAMES)
async def test_a_handshake_message_after_the_handshake_ends_the_connection(
    authority: Authority, server: str
) -> None:
    pair = Pair(engine_named("qh3"), engine_named(server), authority)
    async with pair.connected(make=Echo) as (client, there, _):
        stream = client.peer.open_stream(bidirectional=True)
        client.peer.send(stream, b"hello", end=True)
        await client.until(lambda c: bool(c.ended))
        quic = client.peer._machine._quic  # type: ignore[attr-defined]
        quic._core.send_crypto(int(Epoch.ONE_RTT), 0, b"\x14\0\0\0")
        stream = client.peer.open_stream(bidirectional=True)
        client.peer.send(stream, b"hello", end=True)
        await client.until(lambda c: bool(c.closed_with))
        await there.until(lambda s: bool(s.closed_with))
        assert client.closed_with[0][0] == Code.PROTOCOL, client.closed_with


async def test_keepalive_holds_an_idle_connection(pair: Pair) -> None:
    brief = replace(LIMITS, idle_timeout_ms=1500, keepalive_ms=500)
    async with pair.connected(client_limits=brief, server_limits=brief) as (client, server, _):
        await asyncio.sleep(2.2)
        assert not client.closed_with and not server.closed_with


async def test_the_backlog_is_counted_and_its_end_is_told_once(pair: Pair) -> None:
    limits = replace(LIMITS, backlog_high_bytes=2_000_000, backlog_low_bytes=200_000)
    async with pair.connected(client_limits=limits) as (client, server, _):
        stream = client.peer.open_stream(bidirectional=False)
        client.peer.send(stream, bytes(3_000_000))
        assert client.peer.backlog_bytes() == 3_000_000
        assert client.drained_count == 0
        await client.until(lambda c: c.drained_count == 1)
        assert client.peer.backlog_bytes() <= 200_000
        client.peer.send(stream, b"x", end=True)
        await server.until(lambda s: stream in s.ended)
        assert len(server.received[stream]) == 3_000_001
        assert client.drained_count == 1


async def test_a_handler_that_raises_ends_only_its_own_connection(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Echo):
        def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
            if data == b"bad":
                raise RuntimeError("a mistake in the application")
            super().stream_data(stream_id, data, end)

    async with pair.connected(make=Broken) as (client, _, listener):
        other = Recorder()
        await pair.dial(listener, other)
        client.peer.send(client.peer.open_stream(bidirectional=True), b"bad")
        await client.until(lambda c: bool(c.closed_with))
        assert client.closed_with[0][0] == Code.INTERNAL
        assert "a mistake" in caplog.text
        stream = other.peer.open_stream(bidirectional=True)
        other.peer.send(stream, b"good", end=True)
        await other.until(lambda o: stream in o.ended)
        other.peer.close()


async def test_a_full_listener_says_so(pair: Pair) -> None:
    one = replace(LIMITS, connections_max=1)
    async with pair.connected(server_limits=one) as (first, _, listener):
        late = Recorder()
        try:
            await pair.dial(listener, late)
            await late.until(lambda h: bool(h.closed_with))
            code, reason = late.closed_with[0]
        except UnavailableError as error:
            code, reason = error.code, str(error)
        assert code == Code.LIMIT_SESSIONS
        assert "limit" in reason
        assert listener.connection_count == 1
        first.peer.close()
        await eventually(lambda: listener.connection_count == 0)
        again = Recorder()
        await pair.dial(listener, again)
        assert not again.closed_with
        again.peer.close()


async def test_under_pressure_clients_prove_their_address_first(pair: Pair) -> None:
    """With one handshake allowed, half of it is none: every client goes through Retry, and gets in."""
    tight = replace(LIMITS, handshakes_pending_max=1)
    async with pair.connected(server_limits=tight) as (client, server, _):
        stream = client.peer.open_stream(bidirectional=False)
        client.peer.send(stream, b"in", end=True)
        await server.until(lambda s: stream in s.ended)


async def test_a_closing_listener_tells_everyone_and_frees_its_port(pair: Pair) -> None:
    async with pair.connected() as (client, server, listener):
        host, port = listener.address
        await listener.close("maintenance at noon")
        await client.until(lambda c: bool(c.closed_with))
        assert client.closed_with == [(Code.SHUTTING_DOWN, "maintenance at noon")]
        assert server.closed_with == [(Code.SHUTTING_DOWN, "maintenance at noon")]
        await listener.close()
        again = await pair.server.listen(host, port, pair.authority.server(NAME), Recorder)
        await again.close()


async def test_a_renewed_certificate_is_for_new_connections(pair: Pair) -> None:
    async with pair.connected() as (client, server, listener):
        listener.renew(pair.authority.server("b9.us-east.acme"))
        renewed = await pair.dial(listener, name="b9.us-east.acme")
        renewed.close()
        with pytest.raises(RequestError):
            await pair.dial(listener)
        with pytest.raises(RequestError):
            listener.renew(ServerTls(b"no certificate", b"no key"))
        still = await pair.dial(listener, name="b9.us-east.acme")
        still.close()
        stream = client.peer.open_stream(bidirectional=False)
        client.peer.send(stream, b"the old connection stays", end=True)
        await server.until(lambda s: stream in s.ended)


async def test_garbage_and_half_open_handshakes_leave_nothing_behind(pair: Pair) -> None:
    brief = replace(LIMITS, handshake_timeout_ms=700, handshakes_pending_max=8)
    async with pair.connected(make=Echo, server_limits=brief) as (client, _, listener):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.connect(listener.address)
            initial = b"\xc0\x00\x00\x00\x01\x08" + os.urandom(8) + b"\x08" + os.urandom(8) + b"\x00\x44\xb0"
            for piece in (
                b"\x00",
                b"\x40" + os.urandom(30),
                b"\x80",
                b"\xff" * 1500,
                os.urandom(1200),
                b"\xc0\x00\x00\x00\x01" + b"\xff" * 1300,
                initial.ljust(1250, b"\0"),
                b"\xc0\x00\x00\x00\x00" + bytes(1300),
            ):
                stranger.send(piece)
            for _ in range(50):
                header = (
                    b"\xc0\x00\x00\x00\x01\x08" + os.urandom(8) + b"\x08" + os.urandom(8) + b"\x00\x44\xb0"
                )
                stranger.send(header + os.urandom(1200))
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            assert listener.handshake_count <= 8
            # The listener still serves whom it served, and whoever comes now.
            stream = client.peer.open_stream(bidirectional=True)
            client.peer.send(stream, b"still here", end=True)
            await client.until(lambda c: stream in c.ended)
            newcomer = await pair.dial(listener)
            newcomer.close()
            await eventually(lambda: listener.handshake_count == 0)
        assert listener.connection_count >= 1


async def test_clients_share_a_listener_without_hearing_each_other(pair: Pair) -> None:
    async with pair.listening(Echo) as listener:
        clients = [Recorder() for _ in range(12)]
        await asyncio.gather(*(pair.dial(listener, client) for client in clients))
        # A client is connected before its listener has read so.
        await eventually(lambda: listener.connection_count == 12)
        streams = []
        for number, client in enumerate(clients):
            stream = client.peer.open_stream(bidirectional=True)
            streams.append(stream)
            client.peer.send(stream, b"%d " % number * 5000, end=True)
        for number, (client, stream) in enumerate(zip(clients, streams, strict=True)):
            await client.until(lambda c, s=stream: s in c.ended)
            assert bytes(client.received[stream]) == b"%d " % number * 5000
            client.peer.close()
        await eventually(lambda: listener.connection_count == 0)


async def test_random_and_damaged_datagrams_change_nothing(pair: Pair) -> None:
    """Thousands of them, handed straight to both ends: random ones, and real ones with a byte changed."""
    random = Random(7)
    real: list[bytes] = []

    async with pair.connected(make=Echo) as (client, _, listener):
        assert isinstance(listener, DriverListener)
        receive = listener.datagrams_received

        def listen_in(data: bytes, segment_bytes: int, address: Address) -> None:
            real.append(data[:segment_bytes])
            receive(data, segment_bytes, address)

        listener.datagrams_received = listen_in  # type: ignore[method-assign]
        stream = client.peer.open_stream(bidirectional=True)
        client.peer.send(stream, b"before" * 5000)
        await client.until(lambda c: len(c.received.get(stream, b"")) == 30_000)
        assert real
        address = client.peer.peer_address[0], 9
        for _ in range(1500):
            piece = bytearray(
                random.choice(real) if random.random() < 0.7 else random.randbytes(random.randint(1, 1500))
            )
            piece[random.randrange(len(piece))] ^= 1 << random.randrange(8)
            segment = random.choice((len(piece), 1 + len(piece) // 2, 1200))
            receive(bytes(piece), segment, address)
            if random.random() < 0.1:
                listener.pass_ended()
                await asyncio.sleep(0)
        listener.pass_ended()
        client.peer.send(stream, b"after", end=True)
        await client.until(lambda c: stream in c.ended)
        assert bytes(client.received[stream][30_000:]) == b"after"
        assert listener.handshake_count <= LIMITS.handshakes_pending_max


async def test_a_client_whose_address_changes_stays_connected(pair: Pair) -> None:
    """A box on the path forgets its mapping and gives the client another port (RFC 9000, section 9)."""
    async with pair.listening(Echo) as listener, Path(listener.address) as path:
        client = Recorder()
        await pair.client.connect(HOST, path.port, ClientTls(pair.authority.pem, NAME), client)
        stream = client.peer.open_stream(bidirectional=True)
        client.peer.send(stream, b"one ")
        await client.until(lambda c: bytes(c.received.get(stream, b"")) == b"one ")
        await asyncio.sleep(0.1)
        path.change_port()
        client.peer.send(stream, b"two", end=True)
        await client.until(lambda c: stream in c.ended)
        assert bytes(client.received[stream]) == b"one two"
        assert listener.connection_count == 1
        client.peer.close()


async def test_what_the_path_loses_is_sent_again(pair: Pair) -> None:
    random = Random(11)
    async with (
        pair.listening(Echo) as listener,
        Path(listener.address, lambda: random.random() < 0.05) as path,
    ):
        client = Recorder()
        await pair.client.connect(HOST, path.port, ClientTls(pair.authority.pem, NAME), client)
        sent = random.randbytes(300_000)
        stream = client.peer.open_stream(bidirectional=True)
        client.peer.send(stream, sent, end=True)
        await client.until(lambda c: stream in c.ended)
        assert bytes(client.received[stream]) == sent
        assert path.lost > 0
        client.peer.close()


async def test_a_client_that_repeats_its_first_flight_is_not_sent_away_for_its_size(pair: Pair) -> None:
    answers = count()
    async with (
        pair.listening() as listener,
        Path(listener.address, lose_answer=lambda: next(answers) < 3) as path,
    ):
        client = Recorder()
        tls = ClientTls(pair.authority.pem, NAME)
        await pair.client.connect(HOST, path.port, tls, client, timeout=WAIT_S)
        client.peer.close()


async def test_what_comes_ahead_of_a_late_handshake_leaves_room_for_its_end(pair: Pair) -> None:
    limits = replace(LIMITS, datagram_bytes_max=1472)
    sent = Random(12).randbytes(300_000)
    passed = count()
    async with (
        pair.listening(Echo, limits=limits) as listener,
        # The server hears the client's first datagram, and then for a while only what is behind the handshake.
        Path(listener.address, lambda: 0 < next(passed) < 3, lambda: False) as path,
    ):
        client = Recorder()
        tls = ClientTls(pair.authority.pem, NAME)
        await pair.client.connect(HOST, path.port, tls, client, limits, timeout=WAIT_S)
        stream = client.peer.open_stream(bidirectional=True)
        client.peer.send(stream, sent, end=True)
        await client.until(lambda c: stream in c.ended)
        assert bytes(client.received[stream]) == sent
        client.peer.close()


@pytest.mark.parametrize("name", ENGINE_NAMES)
async def test_an_unknown_version_is_answered_with_ours(name: str, authority: Authority) -> None:
    listener = await engine_named(name).listen(HOST, 0, authority.server(NAME), Recorder)
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        stranger.connect(listener.address)
        stranger.send((b"\xc0\x1a\x2a\x3a\x4a\x08AAAAAAAA\x08BBBBBBBB").ljust(1200, b"\0"))
        answer = await asyncio.wait_for(loop.sock_recv(stranger, 2000), WAIT_S)
    assert answer[0] & 0x80
    assert answer[1:] == b"\0\0\0\0\x08BBBBBBBB\x08AAAAAAAA\0\0\0\1"
    await listener.close()


@pytest.mark.parametrize("name", ENGINE_NAMES)
async def test_nobody_at_the_address_is_said_in_time(name: str, authority: Authority) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind((HOST, 0))
        handler = Recorder()
        with pytest.raises(UnavailableError) as caught:
            await engine_named(name).connect(
                HOST, deaf.getsockname()[1], ClientTls(authority.pem, NAME), handler, timeout=0.4
            )
        assert caught.value.code == Code.TIMEOUT
        port = deaf.getsockname()[1]
    assert f"{HOST}:{port}" in str(caught.value)
    assert handler.calls == []
    with pytest.raises(UnavailableError, match="Nobody listens"):
        await engine_named(name).connect(HOST, port, ClientTls(authority.pem, NAME), handler, timeout=WAIT_S)


@pytest.mark.parametrize("name", ENGINE_NAMES)
async def test_an_attempt_that_fails_leaves_no_socket_behind(name: str, authority: Authority) -> None:
    def sockets() -> set[str]:
        """Those of this process, by inode: what an earlier test still closes does not disturb."""
        return {link for fd in os.listdir("/proc/self/fd") if (link := target(fd)).startswith("socket:")}

    def target(fd: str) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return ""

    engine = engine_named(name)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind((HOST, 0))
        deaf.setblocking(False)
        port = deaf.getsockname()[1]
        before = sockets()
        attempt = asyncio.create_task(engine.connect(HOST, port, ClientTls(authority.pem, NAME), Recorder()))
        await asyncio.wait_for(asyncio.get_running_loop().sock_recv(deaf, 65_536), WAIT_S)
        assert len(sockets() - before) == 1
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        assert not sockets() - before
        with pytest.raises(UnavailableError):
            await engine.connect(HOST, port, ClientTls(authority.pem, NAME), Recorder(), timeout=0.1)
        assert not sockets() - before
    with pytest.raises(UnavailableError):
        await engine.connect(HOST, port, ClientTls(authority.pem, NAME), Recorder())
    assert not sockets() - before
    listener = await engine.listen(HOST, 0, authority.server(NAME), Recorder)
    with pytest.raises(RequestError):
        await engine.connect(HOST, listener.address[1], ClientTls(authority.pem, "b2"), Recorder())
    await listener.close()
    await eventually(lambda: not sockets() - before)


@pytest.mark.parametrize("name", ENGINE_NAMES)
async def test_what_a_caller_got_wrong_is_said(name: str, authority: Authority) -> None:
    engine = engine_named(name)
    listener = await engine.listen(HOST, 0, authority.server(NAME), Recorder)
    with pytest.raises(RequestError, match="Cannot listen on"):
        await engine.listen(HOST, listener.address[1], authority.server(NAME), Recorder)
    with pytest.raises(RequestError, match="certificate or key cannot be read"):
        await engine.listen(HOST, 0, ServerTls(b"", b""), Recorder)
    with pytest.raises(RequestError, match="authorities"):
        await engine.connect(HOST, listener.address[1], ClientTls(b"not PEM", NAME), Recorder())
    with pytest.raises(RequestError, match="authorities"):
        await engine.connect(HOST, listener.address[1], ClientTls(b"", NAME), Recorder())
    with pytest.raises(RequestError, match="it is empty"):
        ClientTls(authority.pem, "")
    with pytest.raises(UnavailableError, match="cannot be found"):
        await engine.connect(
            "no-such-host.invalid", 7443, ClientTls(authority.pem, NAME), Recorder(), timeout=5
        )
    await listener.close()


@pytest.mark.parametrize("fails", ["client", "server"])
async def test_an_engine_that_fails_tells_the_peer_so_at_once(
    pair: Pair, fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a client waits six seconds for the silence to tell, and a server as long as its idle timeout."""
    async with pair.connected() as (client, server, _):
        failing, told = (client, server) if fails == "client" else (server, client)
        connection = failing.peer
        assert isinstance(connection, DriverConnection)
        machine = connection._machine
        transmit = type(machine).transmit
        raised: list[float] = []

        def fail_once(self: Machine, now: float) -> Transmission:
            if self is machine and not raised:
                raised.append(now)
                raise ValueError("reserved stream is missing")
            return transmit(self, now)

        monkeypatch.setattr(type(machine), "transmit", fail_once)
        failing.peer.send(failing.peer.open_stream(bidirectional=False), b"something")
        async with asyncio.timeout(3.0):
            await told.until(lambda each: bool(each.closed_with))
            await failing.until(lambda each: bool(each.closed_with))
        for each in (told, failing):
            assert each.closed_with == [(Code.DISCONNECTED, "the QUIC engine failed")]
    assert "engine failed while sending" in caplog.text


@pytest.mark.parametrize("name", ENGINE_NAMES)
async def test_a_server_that_vanishes_is_noticed(name: str, authority: Authority) -> None:
    """The socket goes without a word, as with a killed process; the kernel then refuses on its behalf."""
    engine = engine_named(name)
    listener = await engine.listen(HOST, 0, authority.server(NAME), Recorder)
    assert isinstance(listener, DriverListener)
    client = Recorder()
    await engine.connect(HOST, listener.address[1], ClientTls(authority.pem, NAME), client)
    listener._udp.close()
    client.peer.send(client.peer.open_stream(bidirectional=False), b"anybody there?")
    await client.until(lambda c: bool(c.closed_with))
    assert client.closed_with[0][0] == Code.DISCONNECTED


def test_an_unknown_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FELIX_QUIC_ENGINE", raising=False)
    assert engine_named().name == "qh3"
    monkeypatch.setenv("FELIX_QUIC_ENGINE", "aioquic")
    assert engine_named().name == "aioquic"
    assert engine_named("qh3").name == "qh3"
    monkeypatch.setenv("FELIX_QUIC_ENGINE", "quiche")
    with pytest.raises(RequestError, match="'quiche', named by FELIX_QUIC_ENGINE") as caught:
        engine_named()
    assert "qh3, aioquic" in str(caught.value)
    assert get_args(EngineName) == ("", *ENGINE_NAMES)


@pytest.mark.parametrize(
    "change", [{"streams_max": 101}, {"backlog_low_bytes": 1 << 30}, {"idle_timeout_ms": 0}]
)
def test_limits_that_make_no_sense_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=next(iter(change))):
        replace(LIMITS, **change)
