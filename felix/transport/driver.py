"""The driver: one UDP socket, sans-IO QUIC machines behind it, and the port's objects in front.

Shared by both engines; each brings a `Machinery` that makes `Machine`s. Only the engine modules use this.

What happens in an event loop iteration, per socket: read a burst of datagrams, sort them by the connection that their
connection id names, let each connection process its part of them (felix.transport.intake), deliver its events, and transmit once
(felix.transport.driver_connection). What the application sends outside of that is gathered per stream and leaves in one transmit at the end of the iteration.

Invariant: what is kept is bounded: by the intake what came, connections and handshakes per listener by `TransportLimits`.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from felix.errors import (
    AddressInUseError,
    Code,
    FelixError,
    RequestError,
    UnavailableError,
)
from felix.runtime.real import REAL
from felix.transport import packet
from felix.transport.driver_connection import DriverConnection
from felix.transport.ending import shown
from felix.transport.intake import Arrival, Intake
from felix.transport.machine import Machinery, ServerIdentity
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
from felix.transport.udp import (
    Address,
    DatagramPath,
    Datagrams,
    UdpSocket,
    is_loopback,
    open_socket,
)

log = logging.getLogger("felix.transport")

UNPROVEN_S: Final = 1.0
"""A first packet that led to no answer (damaged, forged) holds its place no longer than a retransmission."""

OVER_LIMIT: Final = "too many connections, or too many bytes, came before their proof of identity; try again"
"""What a stranger is told that is sent away."""

REFUSALS_PENDING_MAX: Final = 32
"""Handshakes taken up only to say that the listener is full; further clients get no answer and time out."""

PATH_ADDRESS: Final[Address] = ("192.0.2.1", 9)
"""What engines are told that the peer of a path has, since they take numeric addresses alone: one for documentation (RFC 5737), to which
nothing is sent."""

# Both of this machine, since the sockets and the peers are.
_clock = REAL.clock.monotonic
_random_bytes = REAL.random.randbytes


class DriverListener:
    """`felix.transport.port.Listener`: routes datagrams to connections by connection id."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        machinery: Machinery,
        identity: ServerIdentity,
        handlers: Mapping[str, Callable[[], Handler]],
        limits: TransportLimits,
    ) -> None:
        """`handlers`: by the protocol that a connection speaks; the first is preferred where a client speaks several."""
        self._loop = loop
        self._machinery = machinery
        self._identity = identity
        self._handlers = handlers
        self._limits = limits
        self._protocols = tuple(handlers)
        self._routes: dict[bytes, DriverConnection] = {}
        self._cids: dict[DriverConnection, set[bytes]] = {}
        self._handshakes: set[DriverConnection] = set()
        self._strangers: dict[DriverConnection, str] = {}
        """With the address that each counts for, oldest first; also those that are closed and not yet forgotten."""
        self._stranger_counts: Counter[str] = Counter()
        self._stranger_bytes = 0
        self._evicted = 0
        self._refusals: set[DriverConnection] = set()
        self._established: set[DriverConnection] = set()
        self._intake: Intake[DriverConnection] = Intake()
        self._round_scheduled = False
        self._tokens = packet.TokenSeal(_random_bytes(16))
        self._closing = False
        self._udp = UdpSocket(sock, loop, self)

    # the port

    @property
    def address(self) -> tuple[str, int]:
        address = self._udp.local_address
        return address[0], address[1]

    @property
    def connection_count(self) -> int:
        return len(self._established)

    @property
    def handshake_count(self) -> int:
        return len(self._handshakes)

    @property
    def stranger_count(self) -> int:
        return len(self._strangers)

    @property
    def stranger_bytes(self) -> int:
        return self._stranger_bytes

    @property
    def strangers_evicted(self) -> int:
        return self._evicted

    @property
    def intake_bytes(self) -> int:
        return self._intake.held_bytes

    @property
    def intake_dropped_bytes(self) -> int:
        return self._intake.dropped_bytes

    def renew(self, tls: ServerTls) -> None:
        self._identity = _read_identity(self._machinery, tls)

    async def close(self, reason: str = "") -> None:
        if self._closing:
            return
        self._closing = True
        for connection in list(self._established):
            connection.close(Code.SHUTTING_DOWN, reason or "the server is shutting down")
        for connection in list(self._handshakes):
            connection.refuse(reason or "the server is shutting down")
        # One turn for the handlers' `closed`, and for a socket that was blocked.
        await asyncio.sleep(0)
        for connection in list(self._cids):
            connection.release()
        self._udp.close()
        await asyncio.sleep(0)

    # the socket's side

    def datagrams_received(self, data: bytes, segment_bytes: int, address: Address) -> None:
        size = len(data)
        if size <= segment_bytes:
            self._route(data, size, address)
            return
        cid = data[1 : 1 + packet.CID_BYTES]
        for at in range(0, size, segment_bytes):
            if data[at] & 0x80 or data[at + 1 : at + 1 + packet.CID_BYTES] != cid:
                break
        else:
            self._route(data, segment_bytes, address)
            return
        for at in range(0, size, segment_bytes):
            self._route(data[at : at + segment_bytes], segment_bytes, address)

    def pass_ended(self) -> None:
        now = _clock()
        for connection in self._intake.burst_ended():
            connection.process(now)
        self._schedule_round()

    def _schedule_round(self) -> None:
        if self._intake and not self._round_scheduled:
            self._round_scheduled = True
            self._loop.call_soon(self._serve_round)

    def _serve_round(self) -> None:
        """One round of the intake; the next follows in the next iteration of the event loop, after it has read the socket."""
        self._round_scheduled = False
        for connection, arrivals in self._intake.round():
            now = _clock()
            for data, segment_bytes, address in arrivals:
                connection.receive(data, segment_bytes, address, now)
            connection.process(now)
        self._schedule_round()

    def peer_refused(self) -> None:
        """Not a connected socket: the kernel does not say whom it means."""

    def _route(self, data: bytes, segment_bytes: int, address: Address) -> None:
        if data[0] & 0x80:
            header = packet.read_long_header(data)
            if header is None:
                return
            connection = self._routes.get(header.destination_cid)
            if connection is None:
                connection = self._accept(header, len(data), address)
        else:
            connection = self._routes.get(data[1 : 1 + packet.CID_BYTES])
        if connection is None:
            return
        now = _clock()
        # A stranger's bytes are few and counted as they come, so they are never kept.
        if self._intake.takes(connection, len(data), now) or connection.is_stranger:
            connection.receive(data, segment_bytes, address, now)
        else:
            self._intake.put(connection, Arrival(data, segment_bytes, address))

    def _accept(self, header: packet.LongHeader, size: int, address: Address) -> DriverConnection | None:
        """A connection for a first packet; None where it is none, or must not be taken up now."""
        if self._closing or size < packet.INITIAL_DATAGRAM_BYTES_MIN:
            return None
        if header.version != packet.VERSION_1:
            # Version 0 is itself a version negotiation; answering it would start a loop between two servers.
            if header.version and not self._udp.blocked:
                self._udp.send([packet.encode_version_negotiation(header, _random_bytes(1)[0])], address)
            return None
        if not header.is_initial or len(header.destination_cid) < packet.INITIAL_CID_BYTES_MIN:
            return None
        limits = self._limits
        origin = _origin(address)
        original_cid, retry_cid = header.destination_cid, None
        peer = (address[0], address[1])
        if header.token:
            claim = self._tokens.open(header.token, peer, int(_clock() * 1000))
            if claim is not None and claim.retry_source_cid == header.destination_cid:
                original_cid, retry_cid = claim
        # The same of one address: else whoever forges it could send its owner's handshakes away.
        if retry_cid is None and (
            2 * len(self._strangers) >= limits.handshakes_pending_max
            or 2 * self._stranger_counts[origin] >= limits.handshakes_per_address_max
        ):
            self._send_retry(header, address)
            return None
        full = len(self._established) >= limits.connections_max
        if full and len(self._refusals) >= REFUSALS_PENDING_MAX:
            return None
        try:
            machine = self._machinery.accept(
                self._identity.engine,
                limits,
                self._protocols,
                _datagram_bytes(address, limits),
                original_cid,
                retry_cid,
            )
        except Exception:
            log.exception("the %s engine could not make a connection", self._machinery.name)
            return None
        connection = DriverConnection(
            loop=self._loop,
            udp=self._udp,
            machine=machine,
            owner=self,
            engine_name=self._machinery.name,
            limits=limits,
            protocols=self._protocols,
            peer_address=address,
            tls=None,
            handshake_timeout=limits.handshake_timeout_ms / 1000,
            leaf_sha256=self._identity.leaf_sha256,
        )
        if self._stranger_counts[origin] >= limits.handshakes_per_address_max:
            self._evict(origin)
        elif len(self._strangers) >= limits.handshakes_pending_max:
            self._evict(max(self._stranger_counts, key=self._stranger_counts.__getitem__))
        self._strangers[connection] = origin
        self._stranger_counts[origin] += 1
        self._cids[connection] = set()
        self.cid_issued(connection, header.destination_cid)
        self.cid_issued(connection, machine.first_cid)
        self._handshakes.add(connection)
        if full:
            self._refusals.add(connection)
        self._loop.call_later(UNPROVEN_S, self._drop_unproven, connection)
        return connection

    def _evict(self, origin: str) -> None:
        """Make room: the oldest stranger of this address has had the most time."""
        oldest = next(connection for connection, held in self._strangers.items() if held == origin)
        self._evicted += 1
        oldest.evict(OVER_LIMIT)

    def stranger_sent(self, connection: DriverConnection, size: int) -> None:
        if connection not in self._strangers:
            return
        self._stranger_bytes += size
        while self._stranger_bytes > self._limits.strangers_bytes_max:
            self._evicted += 1
            max(self._strangers, key=lambda each: each.wire_bytes).evict(OVER_LIMIT)

    def admitted(self, connection: DriverConnection) -> None:
        origin = self._strangers.pop(connection, None)
        if origin is None:
            return
        self._stranger_bytes -= connection.wire_bytes
        self._stranger_counts[origin] -= 1
        if not self._stranger_counts[origin]:
            del self._stranger_counts[origin]

    def _drop_unproven(self, connection: DriverConnection) -> None:
        if not connection.answered:
            connection.release()

    def _send_retry(self, header: packet.LongHeader, address: Address) -> None:
        if self._udp.blocked:
            return
        retry_cid = _random_bytes(packet.CID_BYTES)
        token = self._tokens.seal(
            packet.RetryClaim(header.destination_cid, retry_cid),
            (address[0], address[1]),
            int(_clock() * 1000),
            _random_bytes(12),
        )
        self._udp.send([packet.encode_retry(header, retry_cid, token, _random_bytes(1)[0])], address)

    # the connections' side

    def cid_issued(self, connection: DriverConnection, cid: bytes) -> None:
        cids = self._cids.get(connection)
        if cids is not None and self._routes.setdefault(cid, connection) is connection:
            cids.add(cid)

    def cid_retired(self, connection: DriverConnection, cid: bytes) -> None:
        cids = self._cids.get(connection)
        if cids is not None and cid in cids:
            cids.discard(cid)
            self._routes.pop(cid, None)

    def established(self, connection: DriverConnection) -> Handler:
        self._handshakes.discard(connection)
        if connection in self._refusals or len(self._established) >= self._limits.connections_max:
            self._refusals.discard(connection)
            return _Refuser(
                f"the server has {self._limits.connections_max} connections, which is its limit; try again later"
            )
        self._established.add(connection)
        return self._handlers[connection.protocol]()

    def failed(self, connection: DriverConnection, error: FelixError) -> None:
        self._handshakes.discard(connection)
        self._refusals.discard(connection)
        log.debug("a handshake with %s failed: %s", shown(connection.peer_address), error)

    def ended(self, connection: DriverConnection) -> None:
        self._established.discard(connection)
        self._handshakes.discard(connection)
        self._refusals.discard(connection)

    def released(self, connection: DriverConnection) -> None:
        self.ended(connection)
        self.admitted(connection)
        self._intake.forget(connection)
        for cid in self._cids.pop(connection, ()):
            self._routes.pop(cid, None)


class _Refuser:
    """The handler of a connection over the listener's limit: says so and closes."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def connected(self, connection: Connection) -> None:
        connection.close(Code.LIMIT_SESSIONS, self._reason)

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None: ...
    def stream_reset(self, stream_id: int, code: int) -> None: ...
    def drained(self) -> None: ...
    def closed(self, code: int, reason: str) -> None: ...


class _Dialer:
    """The owner of a client's one connection, and of its socket or path."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, way: socket.socket | DatagramPath, handler: Handler
    ) -> None:
        self._handler = handler
        self.result: asyncio.Future[None] = loop.create_future()
        self.udp: Datagrams = UdpSocket(way, loop, self) if isinstance(way, socket.socket) else way
        self.connection: DriverConnection | None = None

    def datagrams_received(self, data: bytes, segment_bytes: int, address: Address) -> None:
        if self.connection is not None:
            self.connection.receive(data, segment_bytes, address, _clock())

    def pass_ended(self) -> None:
        if self.connection is not None:
            self.connection.process(_clock())

    def peer_refused(self) -> None:
        if self.connection is not None:
            self.connection.peer_refused()

    def path_ended(self) -> None:
        if self.connection is not None:
            self.connection.release("the way to the server ended")

    def cid_issued(self, connection: DriverConnection, cid: bytes) -> None:
        """One connection per socket: nothing to route."""

    def cid_retired(self, connection: DriverConnection, cid: bytes) -> None: ...

    def established(self, connection: DriverConnection) -> Handler:
        if not self.result.done():
            self.result.set_result(None)
        return self._handler

    def failed(self, connection: DriverConnection, error: FelixError) -> None:
        if not self.result.done():
            self.result.set_exception(error)

    def ended(self, connection: DriverConnection) -> None: ...

    def released(self, connection: DriverConnection) -> None:
        self.udp.close()

    def stranger_sent(self, connection: DriverConnection, size: int) -> None:
        """A client knows its server from the TLS handshake on."""

    def admitted(self, connection: DriverConnection) -> None: ...


class DriverEngine(msgspec.Struct, frozen=True):
    """`felix.transport.port.Engine` over one machinery."""

    machinery: Machinery

    @property
    def name(self) -> str:
        return self.machinery.name

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
        loop = asyncio.get_running_loop()
        identity = _read_identity(self.machinery, tls)
        return DriverListener(
            loop=loop,
            sock=await _bound(loop, host, port, limits.socket_buffer_bytes),
            machinery=self.machinery,
            identity=identity,
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
        loop = asyncio.get_running_loop()
        if path is not None:
            return await self._connect(
                loop, path, PATH_ADDRESS, (host, port), tls, handler, limits, alpn, timeout
            )
        until = _clock() + timeout
        try:
            addresses = await asyncio.wait_for(_resolve(loop, host, port), timeout)
        except (OSError, TimeoutError) as error:
            raise UnavailableError(
                f"The address of {host!r} cannot be found: {getattr(error, 'strerror', None) or 'no answer'}.",
                code=Code.UNAVAILABLE,
                hint="Check the name, or use a numeric address.",
                retry_after_ms=1000,
            ) from error
        for position, (family, address) in enumerate(addresses):
            left = (until - _clock()) / (len(addresses) - position)
            try:
                sock = _socket_to(family, address, limits)
                return await self._connect(loop, sock, address, address, tls, handler, limits, alpn, left)
            except UnavailableError:
                if position + 1 == len(addresses):
                    raise
        raise AssertionError("a name resolves to at least one address")

    async def _connect(
        self,
        loop: asyncio.AbstractEventLoop,
        way: socket.socket | DatagramPath,
        address: Address,
        shown: Address,
        tls: ClientTls,
        handler: Handler,
        limits: TransportLimits,
        alpn: str,
        seconds: float,
    ) -> Connection:
        """`address`: as the engine takes it; `shown`: as people do. `way` is closed where no connection comes of it."""
        size = _datagram_bytes(address, limits) if isinstance(way, socket.socket) else way.datagram_bytes
        try:
            machine = self.machinery.dial(tls, limits, alpn, size, address, _clock())
        except ValueError as error:
            way.close()
            raise RequestError(
                f"The trusted authorities for {tls.server_name!r} cannot be used: {error}.",
                code=Code.CONFIG_INVALID,
                hint="They must be one or more certificates in PEM.",
            ) from error
        dialer = _Dialer(loop, way, handler)
        connection = DriverConnection(
            loop=loop,
            udp=dialer.udp,
            machine=machine,
            owner=dialer,
            engine_name=self.name,
            limits=limits,
            protocols=(alpn,),
            peer_address=shown,
            tls=tls,
            handshake_timeout=max(0.001, seconds),
        )
        dialer.connection = connection
        if not isinstance(way, socket.socket):
            way.receive_for(dialer, address)
        connection.process(_clock())
        try:
            await dialer.result
        except asyncio.CancelledError:
            connection.abandon(UnavailableError("The attempt was cancelled.", code=Code.DISCONNECTED))
            raise
        return connection


async def check_address(host: str, port: int) -> None:
    """Raise what `listen` would raise now, RequestError, where nobody can listen there."""
    (await _bound(asyncio.get_running_loop(), host, port, TransportLimits().socket_buffer_bytes)).close()


async def _bound(loop: asyncio.AbstractEventLoop, host: str, port: int, buffer_bytes: int) -> socket.socket:
    try:
        family, address = (await _resolve(loop, host, port))[0]
        return open_socket(family, bind=address, buffer_bytes=buffer_bytes)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(shown((host, port)), "UDP") from error
        raise RequestError(
            f"Cannot listen on {shown((host, port))} (UDP): {error.strerror or error}.",
            code=Code.CONFIG_INVALID,
            hint="Choose another address or port, or stop the process that uses this one.",
        ) from error


async def _resolve(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[tuple[int, Address]]:
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    return [(int(family), address) for family, _, _, _, address in found]  # type: ignore[misc]


def _socket_to(family: int, address: Address, limits: TransportLimits) -> socket.socket:
    try:
        return open_socket(family, connect=address, buffer_bytes=limits.socket_buffer_bytes)
    except OSError as error:
        raise UnavailableError(
            f"There is no way to {shown(address)} (UDP): {error.strerror or error}.", retry_after_ms=1000
        ) from error


def _read_identity(machinery: Machinery, tls: ServerTls) -> ServerIdentity:
    try:
        return machinery.read_identity(tls)
    except Exception as error:
        raise RequestError(
            f"The server's certificate or key cannot be read: {error}.",
            code=Code.CONFIG_INVALID,
            hint="Both must be PEM, the leaf first, the key unencrypted PKCS #8.",
        ) from error


def _origin(address: Address) -> str:
    """What an address counts for: itself, or its IPv6 /64, which one machine has all of."""
    with suppress(ValueError):
        ip = ipaddress.ip_address(address[0].partition("%")[0])
        if ip.version == 6 and ip.ipv4_mapped is None:
            return str(ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))
    return address[0]


def _datagram_bytes(address: Address, limits: TransportLimits) -> int:
    """The payload to send to `address`: large only where the path is this machine's own loopback."""
    return limits.datagram_loopback_bytes_max if is_loopback(address) else limits.datagram_bytes_max
