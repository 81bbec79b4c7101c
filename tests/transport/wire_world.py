"""A broker-like server and its clients over the real engines, driver and socket code, on simulated time and a network that fails.

Everything of `felix.transport` runs as it is: the QUIC library, the driver, its timers, and `UdpSocket` with its batches. Only the kernel is a twin
(transport.wire), and the event loop's time (felix.runtime.simulated). A seed draws the engines, the windows, the traffic and the faults: loss, bursts of
loss, reordering, repeats, damage, receive buffers that overflow, sends that would block or are dropped by the kernel, ends that stand still.

The rule: while a connection is up, everything that was sent arrives within `ARRIVES_S` after the last fault. A connection may end for a silence as long as the
limits say; that is counted, and both ends must be told.

The traffic is that of a broker: publishers send framed messages, each of which is answered on the control stream and passed on to every subscriber of
the server; both sides keep to the backlog's high-water mark and wait for `drained`, publishers also to a window of their own.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import struct
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, Final

from transport.certificates import Authority
from transport.wire import CALM, START_S, Faults, SimulatedSocket, WireLoop, draw_faults, on_simulated_time

from felix.errors import FelixError
from felix.transport.driver import DriverEngine, DriverListener
from felix.transport.port import ENGINE_NAMES, ClientTls, Connection, ServerTls, TransportLimits, engine_named
from felix.transport.udp import Address

NAME: Final = "b1.us-east.acme"
ARRIVES_S: Final = 30.0
"""After the last fault. A sender whose last probes were lost waits for twice as long as it has waited before: 16 s after an outage of 8 s."""
CALM_S: Final = 0.3
"""Without faults at the beginning, in most runs: their handshake is no part of the question."""
HEAD: Final = struct.Struct(">IIH")
"""Of a message: its whole length, its number, its publisher."""
WELCOME: Final = 0xFFFF
"""Instead of a publisher: the server's first word."""


class StoodStillError(AssertionError):
    """Something that was sent did not arrive, though the connection is up and the network works."""


# -- the traffic -----------------------------------------------------------------------------------------


class Frames:
    """Messages out of the bytes of one stream."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, int, int]]:
        self._held += data
        while len(self._held) >= HEAD.size:
            size, number, publisher = HEAD.unpack_from(self._held)
            if len(self._held) < size:
                return
            yield bytes(self._held[:size]), number, publisher
            del self._held[:size]


class ServerEnd:
    """One session of the server: answers what is published, and passes on what all have published."""

    def __init__(self, world: WireWorld) -> None:
        self.world = world
        self.connection: Connection | None = None
        self.frames: dict[int, Frames] = {}
        self.events = -1
        self.cursor = 0
        self.ended = False

    def connected(self, connection: Connection) -> None:
        self.connection = connection
        connection.admit()
        self.world.server_ends.append(self)

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        assert self.connection is not None
        if stream_id == 0:
            for _, number, _ in self.frames.setdefault(0, Frames()).feed(data):
                # The session's beginning; of a subscriber, its subscription, too.
                self.connection.send(0, HEAD.pack(HEAD.size, 0, WELCOME))
                if number:
                    self.events = self.connection.open_stream(bidirectional=False)
                    self.pump()
            return
        for message, number, publisher in self.frames.setdefault(stream_id, Frames()).feed(data):
            self.world.published.append(message)
            self.world.seen[publisher] += 1
            self.connection.send(0, HEAD.pack(HEAD.size, number, publisher))
            for end_ in self.world.server_ends:
                end_.pump()
        if end:
            self.frames.pop(stream_id, None)

    def pump(self) -> None:
        connection = self.connection
        if self.events < 0 or connection is None or connection.is_closed or self.ended:
            return
        published = self.world.published
        while self.cursor < len(published):
            if connection.backlog_bytes() >= self.world.limits.backlog_high_bytes:
                return  # `drained` comes
            connection.send(self.events, published[self.cursor])
            self.cursor += 1

    def stream_reset(self, stream_id: int, code: int) -> None:
        self.frames.pop(stream_id, None)

    def drained(self) -> None:
        self.pump()

    def closed(self, code: int, reason: str) -> None:
        self.ended = True
        self.world.counts["server told of an end"] += 1


class ClientEnd:
    """A client: publishes, if it has something to, and subscribes, if it does."""

    def __init__(self, world: WireWorld, number: int, messages: list[int], *, subscribes: bool) -> None:
        self.world, self.number = world, number
        self.connection: Connection | None = None
        self.messages = messages
        self.to_send: deque[tuple[int, int]] = deque()
        self._added = 0
        self.subscribes = subscribes
        self.window = world.random.choice([1, 2, 8, 64])
        self.per_stream = world.random.choice([1, 3, 20, 1_000_000])
        self.pause_s = world.random.choice([0.0, 0.0, 0.001, 0.02])
        self.unanswered: set[int] = set()
        self.answered = 0
        self.got = 0
        self.stream = -1
        self.on_stream = 0
        self.answers = Frames()
        self.events = Frames()
        self.over: tuple[int, str] | None = None
        self._paused = False
        self.is_welcome = False

    def connected(self, connection: Connection) -> None:
        self.connection = connection
        assert connection.open_stream(bidirectional=True) == 0
        connection.send(0, HEAD.pack(HEAD.size, int(self.subscribes), self.number))

    def add(self, count: int) -> None:
        """The next messages are there to be sent."""
        until = min(self._added + count, len(self.messages))
        self.to_send.extend((number, self.messages[number]) for number in range(self._added, until))
        self._added = until
        self.pump()

    def pump(self) -> None:
        connection, world = self.connection, self.world
        if connection is None or connection.is_closed or self._paused or not self.is_welcome:
            return
        while self.to_send and len(self.unanswered) < self.window:
            if connection.backlog_bytes() >= world.limits.backlog_high_bytes:
                return  # `drained` comes
            if self.stream < 0:
                try:
                    self.stream = connection.open_stream(bidirectional=False)
                except FelixError:
                    world.counts["no stream"] += 1
                    self._pause(0.05)
                    return
                self.on_stream = 0
            number, size = self.to_send.popleft()
            self.unanswered.add(number)
            self.on_stream += 1
            ends = self.on_stream >= self.per_stream
            connection.send(
                self.stream, HEAD.pack(size, number, self.number) + bytes(size - HEAD.size), end=ends
            )
            if ends:
                self.stream = -1
            if self.pause_s:
                self._pause(self.pause_s * world.random.random())
                return

    def _pause(self, seconds: float) -> None:
        self._paused = True
        self.world.loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._paused = False
        self.pump()

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        if stream_id == 0:
            for _, number, publisher in self.answers.feed(data):
                if publisher == WELCOME:
                    self.is_welcome = True
                else:
                    self.unanswered.discard(number)
                    self.answered += 1
            self.pump()
            return
        for message, _, _ in self.events.feed(data):
            assert message == self.world.published[self.got]
            self.got += 1

    def stream_reset(self, stream_id: int, code: int) -> None: ...

    def drained(self) -> None:
        self.pump()

    def closed(self, code: int, reason: str) -> None:
        self.over = code, reason

    @property
    def is_done(self) -> bool:
        return self.answered == len(self.messages) and (
            not self.subscribes or self.got == len(self.world.published)
        )

    def __str__(self) -> str:
        return (
            f"client {self.number}: {self.answered} of {len(self.messages)} answered, {len(self.unanswered)} on their way, "
            f"{self.got} of {len(self.world.published)} read"
        )


# -- the run ---------------------------------------------------------------------------------------------


@cache
def _authority() -> tuple[Authority, ServerTls]:
    authority = Authority.make(kind="ed25519")
    return authority, authority.server(NAME, kind="ed25519")


@dataclass
class Outcome:
    """What a run came to."""

    seed: int
    seconds: float
    counts: Counter[str] = field(default_factory=Counter)


class WireWorld:
    """One run. `engines`: of client and server, else drawn."""

    def __init__(self, seed: int, engines: tuple[str, str] | None = None) -> None:
        self.seed = seed
        self.random = random = Random(seed)
        drawn = random.choice(ENGINE_NAMES), random.choice(ENGINE_NAMES)
        self.client_engine, self.server_engine = engines or drawn
        self.loop = WireLoop(Random(seed + 1))
        self.loop.iteration_s = random.choice((5e-6, 20e-6, 200e-6))
        self.network = self.loop.network
        self.network.latency_s = random.choice((30e-6, 1e-3, 20e-3))
        high = random.choice((8, 64, 512)) * 1024
        window = random.choice((32, 64, 256, 8192)) * 1024
        self.is_local = random.random() < 0.6
        self.limits = TransportLimits(
            stream_window_bytes=window,
            connection_window_bytes=window * random.choice((1, 2, 4)),
            backlog_high_bytes=high,
            backlog_low_bytes=high // 4,
            datagram_loopback_bytes_max=random.choice((1200, 4096, 16384)),
        )
        self.counts: Counter[str] = Counter()
        self.published: list[bytes] = []
        self.seen: Counter[int] = Counter()
        self.server_ends: list[ServerEnd] = []
        self.clients: list[ClientEnd] = []
        self.is_lossless = random.random() < 0.4
        """a busy machine: the network loses nothing, and processes stand still now and then"""
        self.has_calm_start = random.random() < 0.8
        self.ends_at = 0.0

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.client_engine} to {self.server_engine}, windows {self.limits.stream_window_bytes} and "
            f"{self.limits.connection_window_bytes}, backlog {self.limits.backlog_high_bytes}, datagrams "
            f"{self.limits.datagram_loopback_bytes_max if self.is_local else self.limits.datagram_bytes_max}, latency {self.network.latency_s}"
        )

    def play(self) -> Outcome:
        """Raises StoodStillError."""
        loop = self.loop
        asyncio.set_event_loop(loop)
        try:
            with on_simulated_time(loop):
                loop.run_until_complete(self._run())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
        return Outcome(self.seed, loop.time() - START_S, self.counts + self.network.counts)

    def _make_clients(self) -> None:
        random = self.random
        budget = random.choice((5_000, 30_000, 30_000, 200_000))
        for number in range(random.choice((1, 1, 2, 3))):
            sizes: list[int] = []
            size = random.choice((40, 300, 5_000, 60_000))
            left = budget if number == 0 or random.random() < 0.5 else 0
            while left > 0 and len(sizes) < 300:
                sizes.append(max(HEAD.size, random.randrange(size // 2, size * 2)))
                left -= sizes[-1]
            self.clients.append(ClientEnd(self, number, sizes, subscribes=random.random() < 0.7))

    async def _run(self) -> None:
        random, loop, network = self.random, self.loop, self.network
        authority, server_tls = _authority()
        host = "127.0.0.1" if self.is_local else "192.0.2.1"
        address: Address = (host, 4433)
        server_sock = network.server = SimulatedSocket(network, address)
        machinery = _machinery(self.server_engine)
        with loop.process("server"):
            listener = DriverListener(
                loop=loop,
                sock=server_sock,
                machinery=machinery,
                identity=machinery.read_identity(server_tls),
                handlers={"felix/1": lambda: ServerEnd(self)},
                limits=self.limits,
            )
        engine = DriverEngine(_machinery(self.client_engine))
        self._make_clients()
        faults_for_s = random.choice((0.2, 1.0, 3.0))
        calm_s = CALM_S if self.has_calm_start else 0.0
        self._plan_traffic(calm_s + faults_for_s)
        self._plan_faults(calm_s, faults_for_s)
        self.ends_at = loop.time() + calm_s + faults_for_s
        tls = ClientTls(authority.pem, NAME)
        dials = []
        for each in self.clients:
            sock_address: Address = ("127.0.0.1" if self.is_local else "192.0.2.2", 5000 + each.number)
            with loop.process(f"client {each.number}"):
                sock = SimulatedSocket(network, sock_address, address)
                dials.append(
                    asyncio.ensure_future(
                        engine._connect(loop, sock, address, address, tls, each, self.limits, "felix/1", 10.0)
                    )
                )
        for dial, each in zip(dials, list(self.clients), strict=True):
            try:
                await dial
            except FelixError:
                self.counts["no connection"] += 1
                self.clients.remove(each)
        await self._watch()
        for each in self.clients:
            if each.connection is not None and not each.connection.is_closed:
                each.connection.close()
        await listener.close()

    def _plan_traffic(self, for_s: float) -> None:
        """Bursts of messages, some of them just before the faults end."""
        random = self.random
        for each in self.clients:
            bursts = random.choice((1, 5, 50))
            count = -(-len(each.messages) // bursts)
            for _ in range(bursts):
                with self.loop.process(f"client {each.number}"):
                    self.loop.call_later(random.random() * for_s, each.add, count)

    def _plan_faults(self, calm_s: float, for_s: float) -> None:
        """Phases of faults and of calm, the last one calm."""
        random, at = self.random, calm_s
        if self.is_lossless:
            processes = ["server", *(f"client {each.number}" for each in self.clients)]
            while at < calm_s + for_s:
                self.loop.call_later(
                    at,
                    self._pause,
                    random.choice(processes),
                    random.random() * random.choice((0.01, 0.1, 1.0, 4.0)),
                )
                at += random.choice((0.005, 0.05, 0.5))
            return
        while at < calm_s + for_s:
            length = random.choice((0.005, 0.05, 0.3, 1.0))
            self.loop.call_later(
                at,
                self._set_faults,
                *(draw_faults(random) if random.random() < 0.6 else CALM for _ in range(2)),
            )
            at += length
            if random.random() < 0.5:
                self.loop.call_later(min(at, calm_s + for_s), self._set_faults, CALM, CALM)
                at += random.choice((0.001, 0.02, 0.3))
        self.loop.call_later(calm_s + for_s, self._set_faults, CALM, CALM)

    def _pause(self, process: str, seconds: float) -> None:
        self.counts["paused"] += 1
        self.loop.pause(process, seconds)

    def _set_faults(self, to_server: Faults, to_clients: Faults) -> None:
        self.network.to_server, self.network.to_clients = to_server, to_clients

    async def _watch(self) -> None:
        """Until all has arrived, or nothing has for long enough."""
        loop = self.loop
        state: object = None
        changed_at = loop.time()
        while True:
            waiting = [each for each in self.clients if each.over is None and not each.is_done]
            if any(each.over is not None for each in self.clients):
                # What it published and was not passed on cannot be counted any more.
                self.counts["ended early"] += sum(each.over is not None for each in self.clients)
                for each in self.clients:
                    if each.over is not None:
                        self.counts[f"ended early: {each.over[1][:60]}"] += 1
                self.clients = [each for each in self.clients if each.over is None]
                continue
            if not waiting and loop.time() >= self.ends_at:
                return
            now_state = [(each.answered, each.got) for each in self.clients], len(self.published)
            if now_state != state or loop.time() < self.ends_at:
                state, changed_at = now_state, loop.time()
            longest = loop.time() - max(changed_at, self.ends_at)
            self.counts["still_ms"] = max(self.counts["still_ms"], int(longest * 1000))
            if longest > ARRIVES_S:
                raise StoodStillError(
                    "\n".join(
                        (f"{self}: nothing moved for {longest:.0f} s", *map(str, waiting), *self._explain())
                    )
                )
            await asyncio.sleep(0.05)

    def _explain(self) -> list[str]:
        said = []
        ends = [(f"client {each.number}", each.connection) for each in self.clients]
        ends += [("server", each.connection) for each in self.server_ends]
        for name, connection in ends:
            if connection is None or connection.is_closed:
                continue
            said.append(f"{name}: {explain_connection(connection, self.loop.time())}")
        return said


def explain_connection(connection: Any, now: float) -> str:
    """What a connection of the driver waits for."""
    machine = connection._machine
    said = (
        f"outbox {connection._outbox.held_bytes}, unsent {machine.unsent_bytes()}, above high {connection._above_high}, flush {connection._flush_scheduled}, "
        f"deadline {_from(machine.deadline(), now)}, timer {_from(connection._timer._deadline, now)}, timers set "
        f"{[round(at - now, 3) for at, _ in connection._timer._set]}, socket blocked {connection._udp.blocked}, heard {_from(connection._heard_at, now)}"
    )
    quic = machine._quic
    if hasattr(quic, "_loss"):
        loss = quic._loss
        said += (
            f"; window {loss.congestion_window}, in flight {loss.bytes_in_flight}, probes {loss._pto_count}, rtt {loss._rtt_smoothed:.4f}, pacing "
            f"{quic._pacing_at}, data {quic._remote_max_data_used} of {quic._remote_max_data}, local {quic._local_max_data.used} of "
            f"{quic._local_max_data.value} (told {quic._local_max_data.sent}, consumed {quic._consumed_bytes}); streams "
        ) + ", ".join(
            f"{stream.stream_id}: sent {stream.sender.highest_offset} of {stream.sender._buffer_stop} limit {stream.max_stream_data_remote} pending "
            f"{list(stream.sender._pending)[:3]} read {stream.receiver._buffer_start} of {stream.receiver.highest_offset} limit {stream.max_stream_data_local}"
            for stream in list(quic._streams.values())[:6]
        )
    return said


def _from(at: float | None, now: float) -> str:
    return "none" if at is None else f"{at - now:+.3f}"


def _machinery(name: str) -> Any:
    engine = engine_named(name)
    assert isinstance(engine, DriverEngine)
    return engine.machinery


def play(seed: int, engines: tuple[str, str] | None = None) -> Outcome:
    """One run. Raises StoodStillError."""
    # As `simulation.world.simulate`: lost connections are what is simulated, and only the run's own cycles are collected.
    collects = gc.isenabled()
    gc.disable()
    before, logging.root.manager.disable = logging.root.manager.disable, logging.CRITICAL
    try:
        return WireWorld(seed, engines).play()
    finally:
        logging.root.manager.disable = before
        if collects:
            gc.collect(0)
            gc.enable()
