"""A kernel's UDP in memory, for the real engines on simulated time: sockets that block, overflow, and lose what they were given, as chance will have it.

`felix.transport.driver` and `felix.transport.udp` run over `SimulatedSocket` as over a real one, in a `WireLoop`. QUIC libraries draw their keys from the
machine's chance, so a seed gives the same faults and the same traffic again, but not the same bytes.
"""

from __future__ import annotations

import contextvars
import errno
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop
from random import Random
from typing import Any, Final

from felix.runtime.simulated import SimulatedLoop, _process
from felix.transport import driver, driver_connection, native
from felix.transport.driver import DriverEngine, DriverListener
from felix.transport.machine import Machinery
from felix.transport.memory import Path
from felix.transport.port import (
    ALPN,
    CONNECT_TIMEOUT_S,
    NO_OTHERS,
    ClientTls,
    Connection,
    Handler,
    Listener,
    ServerTls,
    TransportLimits,
)
from felix.transport.udp import Address, DatagramPath

START_S: Final = 1_000.0
"""When a loop begins: no engine meets a clock at 0."""


@dataclass
class Faults:
    """What may happen to datagrams of one direction, each by its chance, and while the fault lasts."""

    lose: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.0
    damage: float = 0.0
    block: float = 0.0
    """a send finds the socket's buffer full"""
    block_s: float = 0.0
    drop_run: float = 0.0
    """a send fails with ENOBUFS: all of it is lost"""
    buffer_bytes: int = 1 << 30
    """what the receiver's socket holds"""
    still_s: float = 0.0
    """the receiver reads nothing for so long at a time"""


CALM: Final = Faults()
CUT: Final = Faults(lose=1.0)


class SimulatedSocket(socket.socket):
    """A UDP socket of the simulated network, as far as `felix.transport.udp` uses one. Readiness is level-triggered, as epoll's."""

    def __init__(self, network: Network, address: Address, peer: Address | None = None) -> None:
        self.network = network
        self.address = address
        self.peer = peer
        self.number = len(network.sockets)
        self.queue: deque[tuple[bytes, int, Address]] = deque()
        self.queued_bytes = 0
        self.blocked_until = 0.0
        self.still_until = 0.0
        self.reader: Callable[[], None] | None = None
        self.writer: Callable[[], None] | None = None
        self.gone = False
        self.is_refused = False
        self._read_soon = self._write_soon = False
        self._context = contextvars.copy_context()
        """of whoever opened it: nothing is read for a process that has ended"""
        network.sockets.append(self)
        network.by_address[address] = self

    def __del__(self) -> None: ...

    def fileno(self) -> int:
        return self.number

    def getsockname(self) -> Address:
        return self.address

    def getsockopt(self, *_: object) -> Any:
        return 0

    def close(self) -> None:
        self.gone = True
        self.network.by_address.pop(self.address, None)

    # reading

    def arrive(self, data: bytes, sender: Address, buffer_bytes: int) -> None:
        if self.gone:
            return
        if self.queued_bytes + len(data) > buffer_bytes:
            self.network.counts["overflowed"] += 1
            return
        self.queued_bytes += len(data)
        if self.queue:
            # Receive offload: datagrams of one sender and one size are one buffer; a shorter one ends it.
            last, segment, of = self.queue[-1]
            if (
                of == sender
                and len(last) % segment == 0
                and len(data) <= segment
                and len(last) + len(data) < 60_000
            ):
                self.queue[-1] = (last + data, segment, of)
                self.look()
                return
        self.queue.append((data, len(data), sender))
        self.look()

    def refuse(self) -> None:
        """The other machine says that nobody listens there (ICMP)."""
        self.is_refused = True
        self.look()

    def stand_still(self, seconds: float) -> None:
        now = self.network.loop.time()
        if now + seconds > self.still_until:
            self.still_until = now + seconds
            self.network.loop.call_later(seconds, self.look)

    def look(self) -> None:
        if (
            (self.queue or self.is_refused)
            and self.reader is not None
            and not self._read_soon
            and self.network.loop.time() >= self.still_until
        ):
            self._read_soon = True
            self.network.loop.call_soon(self._read, context=self._context)

    def _read(self) -> None:
        self._read_soon = False
        if (
            self.reader is not None
            and (self.queue or self.is_refused)
            and self.network.loop.time() >= self.still_until
        ):
            self.reader()
        self.look()

    def recvmsg_into(self, buffers: Any, *_: object) -> Any:
        if self.is_refused:
            self.is_refused = False
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
        if not self.queue:
            raise BlockingIOError(errno.EAGAIN, "nothing there")
        data, segment, sender = self.queue.popleft()
        self.queued_bytes -= len(data)
        buffers[0][: len(data)] = data
        control = [(17, 104, struct.pack("=i", segment))] if segment < len(data) else []
        return len(data), control, 0, sender

    # writing

    def _send(self, datagrams: list[bytes], to: Address | None) -> int:
        network = self.network
        target = to or self.peer
        assert target is not None
        faults, now = network.faults(self, target), network.loop.time()
        if now < self.blocked_until:
            raise BlockingIOError(errno.EAGAIN, "full")
        if faults.block and network.random.random() < faults.block:
            network.counts["blocked"] += 1
            seconds = network.random.random() * faults.block_s
            self.blocked_until = now + seconds
            network.loop.call_later(seconds + 1e-6, self.look_writable)
            raise BlockingIOError(errno.EAGAIN, "full")
        if faults.drop_run and network.random.random() < faults.drop_run:
            network.counts["not taken"] += len(datagrams)
            raise OSError(errno.ENOBUFS, "no buffer space")
        for datagram in datagrams:
            network.carry(self, bytes(datagram), target, faults)
        return sum(map(len, datagrams))

    def look_writable(self) -> None:
        if (
            self.writer is not None
            and not self._write_soon
            and self.network.loop.time() >= self.blocked_until
        ):
            self._write_soon = True
            self.network.loop.call_soon(self._write, context=self._context)

    def _write(self) -> None:
        self._write_soon = False
        if self.writer is not None and self.network.loop.time() >= self.blocked_until:
            self.writer()
        self.look_writable()

    def send(self, data: Any, *_: object) -> int:
        return self._send([data], None)

    def sendto(self, data: Any, *more: Any) -> int:
        return self._send([data], more[-1])

    def sendmsg(self, datagrams: Any, control: Any = (), *more: Any) -> int:
        return self._send(list(datagrams), more[1] if len(more) > 1 else None)


class WireLoop(SimulatedLoop):
    """A simulated loop that watches simulated sockets. Each iteration takes a little time, as on a real machine; code that spins until a time comes gets there."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._now_s = START_S
        self.network = Network(self, random)
        self.iteration_s = 20e-6
        self._held: dict[str, list[Any]] = {}

    def pause(self, process: str, seconds: float) -> None:
        """A process stands still, as one that the machine has no processor for; what is due meanwhile it does when it goes on."""
        if process in self._held:
            return
        self._held[process] = []
        self.call_later(seconds, self._go_on, process, context=contextvars.Context())

    def _go_on(self, process: str) -> None:
        self._ready.extend(self._held.pop(process))

    def _run_once(self) -> None:
        if self._held and self._ready:
            self._hold_back()
        if self._timers and not self._ready:
            self._now_s = max(self._now_s, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now_s:
            self._ready.append(heappop(self._timers)[2])
        if self._held:
            self._hold_back()
        if self._ready or not self._timers:
            super()._run_once()
        self._now_s += self.iteration_s
        self._iterations = 0

    def _hold_back(self) -> None:
        ready = list(self._ready)
        self._ready.clear()
        for handle in ready:
            held = self._held.get(handle._context.get(_process, ""))
            (self._ready if held is None else held).append(handle)

    def _socket(self, fd: int) -> SimulatedSocket:
        found: SimulatedSocket = self.network.sockets[fd]
        return found

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        sock = self._socket(fd)
        sock.reader = lambda: callback(*args)
        sock.look()

    def remove_reader(self, fd: Any) -> bool:
        self._socket(fd).reader = None
        return True

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        sock = self._socket(fd)
        sock.writer = lambda: callback(*args)
        sock.look_writable()

    def remove_writer(self, fd: Any) -> bool:
        self._socket(fd).writer = None
        return True


class Network:
    """Carries datagrams between sockets. Faults are set per end and direction, and hold until they are replaced."""

    def __init__(self, loop: WireLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self.sockets: list[SimulatedSocket] = []
        self.by_address: dict[Address, SimulatedSocket] = {}
        self.to_server = CALM
        self.to_clients = CALM
        self.server: SimulatedSocket | None = None
        self.faults: Callable[[SimulatedSocket, Address], Faults] = self._faults
        """what happens to what is sent now"""
        self.latency_s = 30e-6
        self.counts: Counter[str] = Counter()

    def _faults(self, sock: SimulatedSocket, _to: Address) -> Faults:
        return self.to_clients if sock is self.server else self.to_server

    def carry(self, sock: SimulatedSocket, data: bytes, to: Address, faults: Faults) -> None:
        random, counts = self.random, self.counts
        counts["sent"] += 1
        if faults.lose and random.random() < faults.lose:
            counts["lost"] += 1
            return
        if faults.damage and random.random() < faults.damage:
            counts["damaged"] += 1
            at = random.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]
        times = 1
        if faults.repeat and random.random() < faults.repeat:
            counts["repeated"] += 1
            times = 2
        for _ in range(times):
            delay = self.latency_s
            if faults.delay and random.random() < faults.delay:
                counts["delayed"] += 1
                delay += random.random() * faults.delay_s
            self.loop.call_later(delay, self._arrive, sock.address, data, to, faults)

    def _arrive(self, sender: Address, data: bytes, to: Address, faults: Faults) -> None:
        target = self.by_address.get(to)
        if target is None:
            if (source := self.by_address.get(sender)) is not None and source.peer is not None:
                source.refuse()
            return
        if faults.still_s and self.loop.time() >= target.still_until and self.random.random() < 0.01:
            self.counts["stood still"] += 1
            target.stand_still(self.random.random() * faults.still_s)
        target.arrive(data, sender, faults.buffer_bytes)


@contextmanager
def on_simulated_time(loop: WireLoop) -> Iterator[None]:
    """The transport's clocks are the loop's."""
    held = driver._clock, driver_connection._clock, vars(native)["REAL"]

    class _Clock:
        monotonic = staticmethod(loop.time)

    class _Runtime:
        clock = _Clock

    driver._clock = driver_connection._clock = loop.time
    vars(native)["REAL"] = _Runtime
    try:
        yield
    finally:
        driver._clock, driver_connection._clock, vars(native)["REAL"] = held


def draw_faults(random: Random) -> Faults:
    """Of one direction, for a while: a few kinds at a time, so that others do not hide what they do."""
    faults = Faults()
    for kind in random.sample(
        ("lose", "burst", "repeat", "delay", "damage", "block", "drop", "overflow", "still"),
        random.choice((1, 1, 2, 3)),
    ):
        match kind:
            case "lose":
                faults.lose = random.choice((0.01, 0.1, 0.3, 0.6))
            case "burst":
                faults.lose = 1.0
            case "repeat":
                faults.repeat = random.choice((0.05, 0.5))
            case "delay":
                faults.delay, faults.delay_s = (
                    random.choice((0.05, 0.5, 1.0)),
                    random.choice((0.001, 0.02, 0.3)),
                )
            case "damage":
                faults.damage = 0.05
            case "block":
                faults.block, faults.block_s = (
                    random.choice((0.02, 0.3)),
                    random.choice((0.0, 0.001, 0.05, 0.5)),
                )
            case "drop":
                faults.drop_run = random.choice((0.05, 0.3))
            case "overflow":
                faults.buffer_bytes = random.choice((4_000, 20_000, 100_000))
            case "still":
                faults.still_s = random.choice((0.005, 0.1, 1.5))
    return faults


# -- an engine over it -----------------------------------------------------------------------------------


class WireEngine:
    """`felix.transport.port.Engine` of one host: a real QUIC library behind the driver, over simulated sockets."""

    def __init__(
        self, hosts: WireHosts, host: str, machinery: Machinery, tls: ServerTls, authority_pem: bytes
    ) -> None:
        """`tls`: what its listeners show, whatever they are given; its clients trust `authority_pem` alone."""
        self._hosts, self._host = hosts, host
        self._machinery, self._tls, self._authority_pem = machinery, tls, authority_pem

    @property
    def name(self) -> str:
        return self._machinery.name

    async def listen(
        self,
        host: str,
        port: int,
        tls: ServerTls,
        make_handler: Callable[[], Handler],
        limits: TransportLimits = TransportLimits(),  # noqa: B008 - frozen
        alpn: str = ALPN,
        others: Mapping[str, Callable[[], Handler]] = NO_OTHERS,
    ) -> Listener:
        network = self._hosts.network
        return DriverListener(
            loop=network.loop,
            sock=SimulatedSocket(network, self._hosts.address(host, port)),
            machinery=self._machinery,
            identity=self._machinery.read_identity(self._tls),
            handlers={alpn: make_handler, **others},
            limits=limits,
        )

    async def connect(
        self,
        host: str,
        port: int,
        tls: ClientTls,
        handler: Handler,
        limits: TransportLimits = TransportLimits(),  # noqa: B008 - frozen
        alpn: str = ALPN,
        timeout: float = CONNECT_TIMEOUT_S,  # noqa: ASYNC109
        path: DatagramPath | None = None,
    ) -> Connection:
        assert path is None, "no datagrams are relayed here"
        address = self._hosts.address(host, port)
        return await DriverEngine(self._machinery)._connect(
            self._hosts.network.loop,
            SimulatedSocket(self._hosts.network, self._hosts.own_address(self._host), address),
            address,
            address,
            ClientTls(self._authority_pem, tls.server_name),
            handler,
            limits,
            alpn,
            timeout,
        )


class WireHosts:
    """Names of hosts, their addresses, and what lies between them: as `felix.transport.memory.MemoryNetwork` for whoever plays faults."""

    def __init__(self, network: Network, *, is_local: bool) -> None:
        self.network = network
        network.faults = self._faults
        self.between = CALM
        """what happens to all that crosses"""
        self._prefix = "127.0.0" if is_local else "192.0.2"
        self._numbers: dict[str, int] = {}
        self._parted: set[tuple[str, str]] = set()
        self._port = 49_152

    @property
    def path(self) -> Path:
        return Path()

    @path.setter
    def path(self, path: Path) -> None:
        self.between = (
            Faults(lose=path.loss, delay=1.0 if path.jitter_s else 0.0, delay_s=path.jitter_s)
            if path != Path()
            else CALM
        )
        self.network.latency_s = max(30e-6, path.delay_s)

    def address(self, host: str, port: int) -> Address:
        number = self._numbers.setdefault(host, len(self._numbers) + 1)
        return f"{self._prefix}.{number}", port

    def own_address(self, host: str) -> Address:
        self._port += 1
        return self.address(host, self._port)

    def part(self, one: str, other: str, *, both: bool = True) -> None:
        self._parted.add((self.address(one, 0)[0], self.address(other, 0)[0]))
        if both:
            self._parted.add((self.address(other, 0)[0], self.address(one, 0)[0]))

    def heal(self) -> None:
        self._parted.clear()

    def crash(self, host: str) -> None:
        of = self.address(host, 0)[0]
        for sock in list(self.network.by_address.values()):
            if sock.address[0] == of:
                sock.close()

    def _faults(self, sock: SimulatedSocket, to: Address) -> Faults:
        return CUT if (sock.address[0], to[0]) in self._parted else self.between
