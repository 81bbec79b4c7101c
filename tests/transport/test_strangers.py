"""Strangers: what a listener holds of peers that its application has not admitted, and who goes where there are too many."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest
from quic_stranger import CONTROL, Stranger, fragments
from transport.certificates import Authority
from transport.recorder import Recorder, eventually

from felix.errors import Code
from felix.transport.port import (
    ENGINE_NAMES,
    ClientTls,
    Connection,
    Listener,
    TransportLimits,
    engine_named,
)

NAME = "b1.us-east.acme"
AUTHORITY = Authority.make()


class Reserved(Recorder):
    """A handler that admits nobody by itself."""

    def connected(self, connection: Connection) -> None:
        self._note("connected")
        self.connection = connection


@asynccontextmanager
async def listening(engine: str, **limits: int) -> AsyncIterator[tuple[Listener, list[Reserved]]]:
    servers: list[Reserved] = []

    def made() -> Reserved:
        servers.append(Reserved())
        return servers[-1]

    listener = await engine_named(engine).listen(
        "127.0.0.1", 0, AUTHORITY.server(NAME), made, TransportLimits(**limits)
    )
    try:
        yield listener, servers
    finally:
        await listener.close()


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_the_oldest_of_the_address_with_the_most_makes_room(engine: str) -> None:
    async with listening(engine, handshakes_pending_max=8, handshakes_per_address_max=6) as (
        listener,
        servers,
    ):
        with ExitStack() as stack:

            def come(where: str) -> Stranger:
                stranger = stack.enter_context(Stranger(listener.address, AUTHORITY.pem, NAME, where))
                assert stranger.handshake()
                return stranger

            quiet = await asyncio.to_thread(come, "127.0.0.1")
            flood = [await asyncio.to_thread(come, "127.0.0.2") for _ in range(15)]
            assert listener.stranger_count <= 8
            assert listener.strangers_evicted >= 9
            assert not servers[0].closed_with
            await asyncio.to_thread(quiet.pump)
            assert quiet.closed is None
            await asyncio.to_thread(flood[0].wait, lambda: False, "its end")
            assert servers[1].closed_with[0][0] == Code.LIMIT_SESSIONS
            # Once admitted it is no stranger, and no flood sends it away.
            servers[0].peer.admit()
            for _ in range(3):
                await asyncio.to_thread(come, "127.0.0.1")
            assert not servers[0].closed_with


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_the_one_that_sent_the_most_goes_first(engine: str) -> None:
    async with listening(engine, strangers_bytes_max=40_000) as (listener, servers):
        with ExitStack() as stack:
            few, many = (
                stack.enter_context(Stranger(listener.address, AUTHORITY.pem, NAME)) for _ in range(2)
            )
            for stranger in (few, many):
                assert await asyncio.to_thread(stranger.handshake)
            await asyncio.to_thread(few.say, fragments(100))
            await asyncio.to_thread(many.say, fragments(8_000))
            await eventually(lambda: bool(servers[1].closed_with))
            assert servers[1].closed_with[0][0] == Code.LIMIT_SESSIONS
            assert not servers[0].closed_with
            assert listener.stranger_bytes <= 40_000


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_what_was_sent_away_holds_no_memory_until_cycles_are_looked_for(engine: str) -> None:
    """Most of a connection lies outside of Python, so nothing that it holds makes Python look for cycles."""
    count = 12
    engines: list[weakref.ref[object]] = []
    gc.disable()
    try:
        async with listening(engine, handshakes_pending_max=4 * count, handshakes_per_address_max=count) as (
            listener,
            servers,
        ):
            with ExitStack() as stack:
                for number in range(count):
                    stranger = Stranger(listener.address, AUTHORITY.pem, NAME, f"127.0.0.{1 + number % 3}")
                    stack.enter_context(stranger)
                    if number % 2:
                        assert await asyncio.to_thread(stranger.handshake)
                await eventually(lambda: (listener.stranger_count, len(servers)) == (count, count // 2))
                engines += (weakref.ref(held._machine._quic) for held in listener._cids)  # type: ignore[attr-defined]
                servers.clear()
        await eventually(lambda: all(held() is None for held in engines))
    finally:
        gc.enable()
    assert len(engines) == count


@pytest.mark.parametrize("client_engine", ENGINE_NAMES)
@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_admitted_peers_have_the_full_windows(engine: str, client_engine: str) -> None:
    """Far more than a stranger's window, on several streams at once, after as before a stream existed."""
    size, count = 2_000_000, 3
    async with listening(engine) as (listener, servers):
        client = Recorder()
        tls = ClientTls(AUTHORITY.pem, NAME)
        await engine_named(client_engine).connect(*listener.address, tls, client)
        first = client.peer.open_stream(bidirectional=True)
        assert first == CONTROL
        client.peer.send(first, b"who I am")
        await eventually(lambda: bool(servers) and first in servers[0].received)
        servers[0].peer.admit()
        streams = [first, *(client.peer.open_stream(bidirectional=False) for _ in range(count))]
        for stream in streams:
            client.peer.send(stream, bytes(size), end=True)
        await servers[0].until(lambda s: s.ended >= set(streams))
        assert sum(map(len, servers[0].received.values())) == len(b"who I am") + size * (count + 1)
        client.peer.close()


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_an_admitted_peer_with_a_bound_ends_at_it(engine: str) -> None:
    async with listening(engine) as (listener, servers):
        client = Recorder()
        await engine_named(engine).connect(*listener.address, ClientTls(AUTHORITY.pem, NAME), client)
        stream = client.peer.open_stream(bidirectional=True)
        client.peer.send(stream, b"x")
        await eventually(lambda: bool(servers) and stream in servers[0].received)
        servers[0].peer.admit(200_000)
        assert listener.stranger_count == 0
        other = client.peer.open_stream(bidirectional=True)
        client.peer.send(other, bytes(100_000))
        await servers[0].until(lambda s: len(s.received.get(other, b"")) == 100_000)
        client.peer.send(other, bytes(200_000))
        await client.until(lambda c: bool(c.closed_with))
        assert client.closed_with[0][0] == Code.LIMIT_MEMORY
