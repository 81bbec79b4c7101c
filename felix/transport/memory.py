"""A network in memory: hosts, and connections between them that are slow, silent or gone as chance and a test will have it.

The twin of the QUIC engines at the level of streams, behind the same port: the bytes of a stream arrive once, whole and in order,
streams do not wait for each other, and what was sent before a close arrives before it. Everything happens by timers of the loop.

- A path (`Path`) delays what crosses; a lost datagram is sent again, so loss is more delay.
- While two hosts are parted (`part`), in one direction or both, what is on its way there waits; a connection on which nothing arrives
  for the idle timeout is over on that side, as with QUIC.
- A host that crashes is told nothing any more; its peers find out by the idle timeout. Whoever calls one where nobody listens is
  told at once.

There is no TLS: names and authorities are not verified. Both ends see the digest of the listener's certificate, so what Felix's
handshake binds to it is bound. Numbers of streams and strangers have no limits here.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from felix.errors import Code, ProtocolError, RequestError, UnavailableError
from felix.runtime.port import Random
from felix.transport.port import (
    ALPN,
    CONNECT_TIMEOUT_S,
    NO_OTHERS,
    ClientTls,
    Handler,
    NobodyListensError,
    ServerTls,
    TransportLimits,
)
from felix.transport.udp import DatagramPath

log = logging.getLogger("felix.transport.memory")

RETRANSMIT_S: Final = 0.05
"""What one loss costs: about the probe timeout of a path of some milliseconds (RFC 9002, section 6.2)."""
PORT_FIRST: Final = 49_152
"""What a listener is given that asks for any port (RFC 6335: the dynamic ones)."""


@dataclass(frozen=True, slots=True)
class Path:
    """What crosses takes `delay_s`, and up to `jitter_s` more; each loss, with probability `loss`, a retransmission more."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        assert self.delay_s >= 0 and self.jitter_s >= 0 and 0 <= self.loss < 1


class MemoryNetwork:
    """The hosts of one event loop, and what lies between them."""

    def __init__(self, random: Random, path: Path = Path()) -> None:
        self.path = path
        """Of whatever is sent from now on."""
        self._random = random
        self._listeners: dict[tuple[str, int], MemoryListener] = {}
        self._ends: dict[MemoryConnection, None] = {}
        self._parted: set[tuple[str, str]] = set()
        self._ports = PORT_FIRST

    def part(self, one: str, other: str, *, both: bool = True) -> None:
        """Nothing crosses from one host to the other from now on; with `both`, nor back."""
        self._parted.add((one, other))
        if both:
            self._parted.add((other, one))

    def heal(self) -> None:
        """All hosts reach each other again; what waited arrives."""
        self._parted.clear()
        for end in list(self._ends):
            end.arrive_late()

    def crash(self, host: str) -> None:
        """The host is gone at this moment, with all that listens and every connection."""
        for listener in [each for each in self._listeners.values() if each.host == host]:
            self.forget(listener)
        for end in [each for each in self._ends if each.host == host]:
            self.leave(end)
            end.vanish()

    def reach(self, one: str, other: str) -> bool:
        """Whether what `one` sends arrives at `other`."""
        return (one, other) not in self._parted

    def talk(self, one: str, other: str) -> bool:
        """Whether both hear each other."""
        return self.reach(one, other) and self.reach(other, one)

    def delay_s(self) -> float:
        """Of the next datagram; 0 is "at the next iteration of the loop"."""
        path = self.path
        found = path.delay_s + (self._random.random() * path.jitter_s if path.jitter_s else 0.0)
        while path.loss and self._random.random() < path.loss:
            found += RETRANSMIT_S
        return found

    def listener(self, host: str, port: int) -> MemoryListener | None:
        return self._listeners.get((host, port))

    def bind(self, listener: MemoryListener) -> None:
        """Raises RequestError(CONFLICT) where the address is in use."""
        if not listener.port:
            while (listener.host, self._ports) in self._listeners:
                self._ports += 1
            listener.port, self._ports = self._ports, self._ports + 1
        if self._listeners.setdefault(listener.address, listener) is not listener:
            raise RequestError(
                f"The address {listener.host}:{listener.port} is in use.",
                code=Code.CONFLICT,
                hint="Close who listens there, or take another port.",
            )

    def forget(self, listener: MemoryListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    def join(self, end: MemoryConnection) -> None:
        self._ends[end] = None

    def leave(self, end: MemoryConnection) -> None:
        self._ends.pop(end, None)


class MemoryConnection:
    """One end of a connection: `felix.transport.port.Connection`."""

    engine_name = "memory"

    def __init__(
        self,
        network: MemoryNetwork,
        host: str,
        listener: MemoryListener,
        handler: Handler,
        limits: TransportLimits,
        server_name: str,
        context: Context,
    ) -> None:
        """`context`: that of whoever made the handler, which its calls run in. `server_name`: whom a client asked for; empty on a server."""
        self.host = host
        self.is_client = bool(server_name)
        self.server_name = server_name
        self.is_closed = False
        self.server_leaf_sha256 = listener.leaf_sha256
        self.peer_address = listener.address if self.is_client else (host, 0)
        self.peer: MemoryConnection
        self._network = network
        self._listener = listener
        self._handler = handler
        self._context = context
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._opened: dict[bool, int] = defaultdict(int)
        self._closed = asyncio.Event()
        self._gone = False
        self._flights: dict[int | None, deque[Callable[[], None]]] = {}
        """On their way to the peer, by stream; the end of the connection under None."""
        self._waiting: list[int | None] = []
        """Arrivals that were due while the hosts were parted."""
        self._end_due = False
        self._backlog_bytes = 0
        self._above_high = False
        self.heard_at = self._loop.time()
        self._idle = self._loop.call_later(limits.idle_timeout_ms / 1000, self._check_idle, context=context)
        network.join(self)

    def begin(self) -> None:
        """The handshake is complete."""
        self._guarded(lambda: self._handler.connected(self))

    # -- the port

    def admit(self, bytes_max: int = 0) -> None:
        """Strangers have no bounds here."""

    def open_stream(self, *, bidirectional: bool) -> int:
        self._require_open()
        number = self._opened[bidirectional]
        self._opened[bidirectional] += 1
        return number * 4 + (0 if self.is_client else 1) + (0 if bidirectional else 2)

    def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        self._require_open()
        sent = bytes(data)
        self._backlog_bytes += len(sent)
        self._above_high = self._above_high or self._backlog_bytes >= self._limits.backlog_high_bytes
        self._cross(stream_id, lambda: self.peer.take(stream_id, sent, end))

    def will_send(self) -> None:
        """Each piece crosses by itself here."""

    def backlog_bytes(self) -> int:
        return self._backlog_bytes

    def reset_stream(self, stream_id: int, code: int) -> None:
        self._require_open()
        self._cross(stream_id, lambda: self.peer.take_reset(stream_id, code))

    def close(self, code: int = 0, reason: str = "") -> None:
        if not self.is_closed:
            self._cross(None, lambda: self.peer.over(code, reason))
            self.is_closed = True
            self._loop.call_soon(self._tell_closed, code, reason, context=self._context)

    async def wait_closed(self) -> None:
        await self._closed.wait()

    # -- the way to the peer

    def _require_open(self) -> None:
        if self.is_closed:
            raise UnavailableError("The connection is closed.", code=Code.DISCONNECTED)

    def _cross(self, stream_id: int | None, arrive: Callable[[], None]) -> None:
        """`arrive` at the peer, after what was sent on this stream before; without a stream, after all that was sent."""
        self._flights.setdefault(stream_id, deque()).append(arrive)
        delay_s = self._network.delay_s()
        if delay_s:
            self._loop.call_later(delay_s, self._land, stream_id)
        else:
            self._loop.call_soon(self._land, stream_id)

    def _land(self, stream_id: int | None) -> None:
        """One arrival is due: of its stream's the oldest, whichever timer comes first."""
        if stream_id not in self._flights:
            # The host crashed meanwhile, and what it had sent with it.
            return
        if not self._network.reach(self.host, self.peer.host):
            self._waiting.append(stream_id)
            return
        if stream_id is None:
            self._end_due = True
        else:
            flights = self._flights[stream_id]
            arrive = flights.popleft()
            if not flights:
                del self._flights[stream_id]
            arrive()
        if self._end_due and len(self._flights) == 1:
            self._end_due = False
            self._flights.pop(None).popleft()()

    def arrive_late(self) -> None:
        """The hosts reach each other again: what waited goes on."""
        waiting, self._waiting = self._waiting, []
        for stream_id in waiting:
            self._loop.call_soon(self._land, stream_id)

    def arrived_bytes(self, size: int) -> None:
        """The peer has so many of the bytes that were sent."""
        self._backlog_bytes -= size
        if self._above_high and self._backlog_bytes <= self._limits.backlog_low_bytes:
            self._above_high = False
            self._guarded(self._handler.drained)

    # -- what comes from the peer

    def take(self, stream_id: int, data: bytes, end: bool) -> None:
        self._heard()
        if not self._closed.is_set() and not self._gone:
            self.peer.arrived_bytes(len(data))
            self._guarded(lambda: self._handler.stream_data(stream_id, data, end))

    def take_reset(self, stream_id: int, code: int) -> None:
        self._heard()
        if not self._closed.is_set():
            self._guarded(lambda: self._handler.stream_reset(stream_id, code))

    def over(self, code: int, reason: str) -> None:
        """The peer closed, or fell silent."""
        if not self.is_closed and not self._gone:
            self.is_closed = True
            self._tell_closed(code, reason)

    def vanish(self) -> None:
        """The host crashed: nobody here is told anything any more."""
        self._gone = self.is_closed = True
        self._idle.cancel()
        self._waiting.clear()
        self._flights.clear()

    def _heard(self) -> None:
        self.heard_at = self._loop.time()

    def _check_idle(self) -> None:
        """Both ends ping each other, so that only a peer that is gone or parted is silent."""
        timeout_s = self._limits.idle_timeout_ms / 1000
        if not self.peer.is_closed and self._network.reach(self.peer.host, self.host):
            self._heard()
        left_s = self.heard_at + timeout_s - self._loop.time()
        if left_s > 0:
            self._idle = self._loop.call_later(left_s, self._check_idle)
        else:
            self.over(Code.DISCONNECTED, "the peer fell silent")

    def _tell_closed(self, code: int, reason: str) -> None:
        if self._gone or self._closed.is_set():
            return
        self._closed.set()
        self._idle.cancel()
        self._network.leave(self)
        self._listener.ended(self)
        self._guarded(lambda: self._handler.closed(code, reason))

    def _guarded(self, call: Callable[[], None]) -> None:
        if self._gone:
            return
        try:
            self._context.copy().run(call)
        except Exception:
            log.exception("a handler failed; its connection ends")
            self.close(Code.INTERNAL, "the handler failed")


class MemoryListener:
    """`felix.transport.port.Listener`."""

    handshake_count = stranger_count = stranger_bytes = strangers_evicted = 0
    intake_bytes = intake_dropped_bytes = 0

    def __init__(
        self,
        network: MemoryNetwork,
        host: str,
        port: int,
        tls: ServerTls,
        handlers: Mapping[str, Callable[[], Handler]],
        limits: TransportLimits,
    ) -> None:
        self.host, self.port = host, port
        self.leaf_sha256 = _leaf_sha256(tls)
        self._network = network
        self._handlers = handlers
        self._context = copy_context()
        self._limits = limits
        self._ends: dict[MemoryConnection, None] = {}

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def connection_count(self) -> int:
        return len(self._ends)

    def accept(
        self, client_host: str, name: str, handler: Handler, limits: TransportLimits, alpn: str
    ) -> MemoryConnection:
        """Both ends of a new connection; the client's. Raises ProtocolError where nobody here speaks `alpn`."""
        make_handler = self._handlers.get(alpn)
        if make_handler is None:
            raise ProtocolError(
                f"{self.host}:{self.port} does not speak {alpn!r}.", code=Code.VERSION_UNSUPPORTED
            )
        client = MemoryConnection(self._network, client_host, self, handler, limits, name, copy_context())
        server = MemoryConnection(
            self._network,
            self.host,
            self,
            self._context.copy().run(make_handler),
            self._limits,
            "",
            self._context,
        )
        client.peer, server.peer = server, client
        self._ends[server] = None
        server.begin()
        return client

    def ended(self, end: MemoryConnection) -> None:
        self._ends.pop(end, None)

    def renew(self, tls: ServerTls) -> None:
        self.leaf_sha256 = _leaf_sha256(tls)

    async def close(self, reason: str = "") -> None:
        self._network.forget(self)
        ends = list(self._ends)
        for end in ends:
            end.close(Code.SHUTTING_DOWN, reason)
        for end in ends:
            await end.wait_closed()


class MemoryEngine:
    """`felix.transport.port.Engine` of one host."""

    name = "memory"

    def __init__(self, network: MemoryNetwork, host: str) -> None:
        self._network = network
        self._host = host

    async def listen(
        self,
        host: str,
        port: int,
        tls: ServerTls,
        make_handler: Callable[[], Handler],
        limits: TransportLimits = TransportLimits(),  # noqa: B008 - immutable
        alpn: str = ALPN,
        others: Mapping[str, Callable[[], Handler]] = NO_OTHERS,
    ) -> MemoryListener:
        """`host` is what clients call; it lies on this engine's host."""
        listener = MemoryListener(self._network, host, port, tls, {alpn: make_handler, **others}, limits)
        self._network.bind(listener)
        return listener

    async def connect(
        self,
        host: str,
        port: int,
        tls: ClientTls,
        handler: Handler,
        limits: TransportLimits = TransportLimits(),  # noqa: B008 - immutable
        alpn: str = ALPN,
        timeout: float = CONNECT_TIMEOUT_S,  # noqa: ASYNC109 - the port says so
        path: DatagramPath | None = None,
    ) -> MemoryConnection:
        assert path is None, "no datagrams pass here"
        network = self._network
        if network.talk(self._host, host):
            # There and back.
            await asyncio.sleep(network.delay_s() + network.delay_s())
        if not network.talk(self._host, host):
            await asyncio.sleep(timeout)
            raise UnavailableError(
                f"{host}:{port} did not answer within {timeout:.1f} s.",
                code=Code.TIMEOUT,
                retry_after_ms=1_000,
            )
        listener = network.listener(host, port)
        if listener is None:
            raise NobodyListensError(f"Nobody listens at {host}:{port}.", code=Code.DISCONNECTED)
        client = listener.accept(self._host, tls.server_name, handler, limits, alpn)
        client.begin()
        return client


def _leaf_sha256(tls: ServerTls) -> bytes:
    try:
        leaf = x509.load_pem_x509_certificate(tls.chain_pem)
    except ValueError as error:
        raise RequestError(
            f"The server's certificate cannot be read: {error}.", code=Code.CONFIG_INVALID
        ) from error
    return hashlib.sha256(leaf.public_bytes(Encoding.DER)).digest()
