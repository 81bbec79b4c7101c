"""The driver: one UDP socket, sans-IO QUIC machines behind it, and the port's objects in front.

Shared by both engines; each brings a `Machinery` that makes `Machine`s. Only the engine modules use this.

What happens in an event loop iteration, per socket: read a burst of datagrams, sort them by the connection that their
connection id names, let each connection process its part of them (felix.transport.intake), deliver its events, and transmit once. What the
application sends outside of that is gathered per stream and leaves in one transmit at the end of the turn.

Invariants:
- the handler's calls come in the order `connected`, anything, `closed`, and `closed` once;
- bytes from the network never raise out of here: a machine that fails ends its own connection;
- what is kept is bounded: by the intake what came, one transmit per connection while the socket is blocked, connections and handshakes
  per listener by `TransportLimits`, streams per connection twice over by the peer and by us.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from felix.errors import (
    AddressInUseError,
    Code,
    FelixError,
    ProtocolError,
    RequestError,
    UnavailableError,
)
from felix.runtime.real import REAL
from felix.transport import packet
from felix.transport.intake import Arrival, Intake
from felix.transport.port import (
    ALPN,
    CONNECT_TIMEOUT_S,
    NO_OTHERS,
    ClientTls,
    Connection,
    Handler,
    Listener,
    NobodyListensError,
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

REASON_BYTES_MAX: Final = 256
"""Longest reason on the wire: a CONNECTION_CLOSE must fit the smallest datagram with room to spare."""

LIVENESS_TICK_S: Final = 1.0
"""How often a client looks whether its server still answers."""

UNANSWERED_S: Final = 5.0
"""A server that answers no PING for this long is gone; several retransmissions on a slow path."""

UNANSWERED_AFTER_REFUSAL_S: Final = 1.0
"""The same once its machine said that nobody listens there. The message could be forged, so it is verified."""

UNPROVEN_S: Final = 1.0
"""A first packet that led to no answer (damaged, forged) holds its place no longer than a retransmission."""

OVER_LIMIT: Final = "too many connections, or too many bytes, came before their proof of identity; try again"
"""What a stranger is told that is sent away."""

REFUSALS_PENDING_MAX: Final = 32
"""Handshakes taken up only to say that the listener is full; further clients get no answer and time out."""

STREAMS_SLACK: Final = 2
"""A peer may have this many times `streams_max` open as we see it: ends arrive later than they were sent."""

PACED_STEPS_MAX: Final = 4096
"""Steps of pacing that a close hurries through; more than a congestion window of small datagrams."""

PACED_STEP_S: Final = 0.002
"""A deadline further ahead than this is not the pacer's."""

SPIN_S: Final = 0.0002
"""A deadline this near is awaited by turning the loop: its sleep is a millisecond at least, and a paced sender
that slept that long for each burst would be slow."""

SPINS_MAX: Final = 256
"""Turns in a row that send nothing; after so many the loop sleeps, whatever the engine's timer says."""

PATH_ADDRESS: Final[Address] = ("192.0.2.1", 9)
"""What engines are told that the peer of a path has, since they take numeric addresses alone: one for documentation (RFC 5737), to which
nothing is sent."""

# RFC 9000, section 20.1, and RFC 9001, section 4.8
_QUIC_INTERNAL: Final = 0x01
_QUIC_CONNECTION_REFUSED: Final = 0x02
_QUIC_APPLICATION_ERROR: Final = 0x0C
_TLS_ALERTS: Final = 0x100
_ALERTS_CERTIFICATE: Final = frozenset((42, 43, 44, 45, 46, 48))
_ALERT_HANDSHAKE_FAILURE: Final = 40
_ALERT_NO_APPLICATION_PROTOCOL: Final = 120

_SENDING: Final = 1
_RECEIVING: Final = 2
_STOPPED: Final = 4

# Both of this machine, since the sockets and the peers are.
_clock = REAL.clock.monotonic
_random_bytes = REAL.random.randbytes


class EventTypes(NamedTuple):
    """The engine's event classes. Both engines name their fields alike."""

    stream_data: type[Any]
    stream_reset: type[Any]
    stop_sending: type[Any]
    handshake_completed: type[Any]
    cid_issued: type[Any]
    cid_retired: type[Any]
    terminated: type[Any]


class MachineClosed(NamedTuple):
    """Why a machine ended. `frame_type` None: the application of one side closed it."""

    code: int
    frame_type: int | None
    reason: str


class Machine(Protocol):
    """A sans-IO QUIC connection. Times are seconds of one monotonic clock."""

    events: EventTypes

    @property
    def first_cid(self) -> bytes:
        """The connection id that the peer uses first."""

    def receive(self, data: bytes, segment_bytes: int, address: Address, now: float) -> None: ...
    def transmit(self, now: float) -> list[tuple[bytes, Address]]: ...
    def next_event(self) -> Any: ...
    def deadline(self) -> float | None: ...
    def handle_deadline(self, now: float) -> None: ...
    def next_stream_id(self, bidirectional: bool) -> int:
        """Reserve the next stream id. Raises UnavailableError at the peer's limit."""

    def write(self, stream_id: int, data: bytes, end: bool) -> None: ...
    def unsent_bytes(self) -> int: ...
    def reset(self, stream_id: int, code: int) -> None: ...
    def ping(self) -> None: ...
    def close(self, code: int, frame_type: int | None, reason: str) -> None: ...
    def closing(self) -> MachineClosed | None:
        """Set as soon as either side closed, before the closing period is over."""

    def peer_chain_der(self) -> list[bytes]: ...
    def admit(self) -> None:
        """The peer has proved who it is: it may open streams, where the engine did not let it."""

    def widen(self) -> None:
        """The peer is no stranger any more: open the full windows, where the engine began with small ones."""


class ServerIdentity(NamedTuple):
    """A server's certificate and key in its engine's form, and SHA-256 of the leaf (DER)."""

    engine: Any
    leaf_sha256: bytes


class Machinery(Protocol):
    """Makes machines of one engine."""

    @property
    def name(self) -> str: ...

    def read_identity(self, tls: ServerTls) -> ServerIdentity:
        """The certificate and key in the engine's form. ValueError where they cannot be read."""

    def accept(
        self,
        identity: Any,
        limits: TransportLimits,
        protocols: tuple[str, ...],
        datagram_bytes: int,
        original_cid: bytes,
        retry_cid: bytes | None,
    ) -> Machine: ...

    def dial(
        self,
        tls: ClientTls,
        limits: TransportLimits,
        alpn: str,
        datagram_bytes: int,
        address: Address,
        now: float,
    ) -> Machine:
        """A client's machine that has its first flight ready. ValueError where the authorities cannot be read."""


class Owner(Protocol):
    """The socket's side of a connection: routing and release."""

    def cid_issued(self, connection: DriverConnection, cid: bytes) -> None: ...
    def cid_retired(self, connection: DriverConnection, cid: bytes) -> None: ...
    def established(self, connection: DriverConnection) -> Handler: ...
    def failed(self, connection: DriverConnection, error: FelixError) -> None:
        """The connection ended before it was established."""

    def ended(self, connection: DriverConnection) -> None:
        """It no longer counts: `closed` was or will be called."""

    def released(self, connection: DriverConnection) -> None:
        """The machine needs the socket no more."""

    def stranger_sent(self, connection: DriverConnection, size: int) -> None:
        """So many bytes came on a connection that is not admitted."""

    def admitted(self, connection: DriverConnection) -> None:
        """It is no stranger any more."""


class DriverConnection:
    """`felix.transport.port.Connection` over one machine."""

    __slots__ = (
        "_above_high",
        "_allowed_bytes",
        "_busy",
        "_closing",
        "_flush_scheduled",
        "_handler",
        "_handshake_deadline",
        "_heard_at",
        "_is_over",
        "_keepalive_s",
        "_leaf_sha256",
        "_liveness",
        "_loop",
        "_machine",
        "_open_counts",
        "_owner",
        "_peer_address",
        "_pending",
        "_pending_bytes",
        "_pinged_at",
        "_protocols",
        "_refused",
        "_released",
        "_send_to",
        "_sent_at",
        "_server_name",
        "_spins",
        "_streams",
        "_timer",
        "_timer_at",
        "_tls",
        "_transmit_failed",
        "_udp",
        "answered",
        "engine_name",
        "is_client",
        "is_closed",
        "is_established",
        "is_stranger",
        "limits",
        "protocol",
        "wire_bytes",
    )

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        udp: Datagrams,
        machine: Machine,
        owner: Owner,
        engine_name: str,
        limits: TransportLimits,
        protocols: tuple[str, ...],
        peer_address: Address,
        tls: ClientTls | None,
        handshake_timeout: float,
        leaf_sha256: bytes = b"",
    ) -> None:
        """`leaf_sha256`: on a server, of its own certificate."""
        self._loop = loop
        self._udp = udp
        self._machine = machine
        self._owner = owner
        self._protocols = protocols
        self.protocol = ""
        """The one of them that both ends speak, once the handshake is complete."""
        self._peer_address = peer_address
        self._tls = tls
        self._server_name = "" if tls is None else tls.server_name
        self._send_to: Address | None = None if tls is not None else peer_address
        self.engine_name = engine_name
        self.limits = limits
        self.is_client = tls is not None
        self.is_established = False
        self.is_closed = False
        self.is_stranger = tls is None
        self.wire_bytes = 0
        """Bytes that came in datagrams; counted as long as there is a bound to them."""
        self._allowed_bytes = limits.stranger_bytes_max if tls is None else 0
        """How many of them may come; 0: without bound."""
        self._leaf_sha256 = leaf_sha256
        self.answered = False
        """At least one datagram was sent: the peer's first packet was authentic."""
        self._handler: Handler | None = None
        self._streams: dict[int, int] = {}
        self._open_counts = [0, 0, 0, 0]
        """Open streams by the two low bits of their ids: initiator and direction (RFC 9000, section 2.1)."""
        self._pending: dict[int, tuple[list[bytes], bool]] = {}
        self._pending_bytes = 0
        self._flush_scheduled = False
        self._busy = False
        self._above_high = False
        self._released = False
        self._transmit_failed = False
        self._is_over = False
        self._closing: asyncio.Event | None = None
        """For those who wait for the end; few do, and an event takes 0.8 KiB."""
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        self._spins = 0
        now = _clock()
        self._heard_at = now
        self._sent_at = now
        self._pinged_at: float | None = None
        self._refused = False
        self._keepalive_s = limits.keepalive_ms / 1000
        self._liveness: asyncio.TimerHandle | None = None
        self._handshake_deadline: asyncio.TimerHandle | None = loop.call_later(
            handshake_timeout, self._handshake_late, handshake_timeout
        )

    # the port

    @property
    def peer_address(self) -> tuple[str, int]:
        return self._peer_address[0], self._peer_address[1]

    @property
    def server_name(self) -> str:
        return self._server_name

    @property
    def heard_at(self) -> float:
        return self._heard_at

    @property
    def server_leaf_sha256(self) -> bytes:
        if self.is_client and not self._leaf_sha256:
            chain = self._machine.peer_chain_der()
            self._leaf_sha256 = hashlib.sha256(chain[0]).digest() if chain else b""
        return self._leaf_sha256

    def admit(self, bytes_max: int = 0) -> None:
        if self.is_client or self.is_closed:
            return
        if self.is_stranger:
            self.is_stranger = False
            self._owner.admitted(self)
            self._machine.admit()
        self._allowed_bytes = bytes_max
        if not bytes_max:
            self._machine.widen()
            self._schedule_flush()

    def open_stream(self, *, bidirectional: bool) -> int:
        self._require_open()
        ours = 0 if self.is_client else 1
        kind = ours | (0 if bidirectional else 2)
        if self._open_counts[kind] >= self.limits.streams_max:
            raise UnavailableError(
                f"The connection has {self.limits.streams_max} streams of this kind open, which is its limit.",
                code=Code.LIMIT_SUBSCRIPTIONS,
                hint="End a stream first.",
            )
        stream_id = self._machine.next_stream_id(bidirectional)
        self._streams[stream_id] = _SENDING | _RECEIVING if bidirectional else _SENDING
        self._open_counts[kind] += 1
        return stream_id

    def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        if self.is_closed:
            self._require_open()
        state = self._streams.get(stream_id, 0)
        if not state & _SENDING:
            raise ValueError(f"stream {stream_id} is not open for sending")
        if end:
            self._set_state(stream_id, state & ~(_SENDING | _STOPPED))
        if state & _STOPPED:
            return
        size = len(data)
        if not size and not end:
            return
        pending = self._pending.get(stream_id)
        if pending is None:
            self._pending[stream_id] = ([data], end)
        else:
            pending[0].append(data)
            if end:
                self._pending[stream_id] = (pending[0], True)
        self._pending_bytes += size
        if not self._flush_scheduled and not self._busy:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def backlog_bytes(self) -> int:
        if self.is_closed:
            return 0
        backlog: int = self._pending_bytes + self._machine.unsent_bytes()
        if backlog >= self.limits.backlog_high_bytes:
            # Whoever is told so stops and waits for `drained`, also if most of it leaves with this turn.
            self._above_high = True
        return backlog

    def reset_stream(self, stream_id: int, code: int) -> None:
        self._require_open()
        state = self._streams.get(stream_id, 0)
        if not state & _SENDING:
            raise ValueError(f"stream {stream_id} is not open for sending")
        dropped = self._pending.pop(stream_id, None)
        if dropped is not None:
            self._pending_bytes -= sum(map(len, dropped[0]))
            # The engine must know of a stream before it can reset it.
            self._machine.write(stream_id, b"", False)
        if not state & _STOPPED:
            self._machine.reset(stream_id, code)
        self._set_state(stream_id, state & ~(_SENDING | _STOPPED))
        self._schedule_flush()

    def close(self, code: int = 0, reason: str = "") -> None:
        if self.is_closed:
            return
        self._transmit_all()
        self._end(code, reason, None)

    async def wait_closed(self) -> None:
        if self._is_over:
            return
        if self._closing is None:
            self._closing = asyncio.Event()
        await self._closing.wait()

    # the socket's side

    def receive(self, data: bytes, segment_bytes: int, address: Address, now: float) -> None:
        """Datagrams for this connection; `process` follows in the same turn."""
        self._heard_at = now
        if self._allowed_bytes and not self._counted(len(data), is_long=bool(data[0] & 0x80)):
            return
        try:
            self._machine.receive(data, segment_bytes, address, now)
        except Exception:
            # The engines refuse some datagrams (an unusable path, say) by raising. Damage cannot be told from
            # malice here, so the datagram counts as lost; the idle timeout ends what never recovers.
            log.debug("a datagram from %s was refused by %s", address, self.engine_name, exc_info=True)

    def _counted(self, size: int, *, is_long: bool) -> bool:
        """Count what came before the engine sees it; False where it is too much, and the connection was ended."""
        if not self.is_established and not is_long and 2 * (self.wire_bytes + size) > self._allowed_bytes:
            # Ahead of a handshake whose last message is late or lost: dropped, and sent again once it is done. The other half is that
            # message's, however often it is repeated.
            return False
        self.wire_bytes += size
        if self.is_stranger:
            self._owner.stranger_sent(self, size)
        if self._released or self.is_closed:
            return not self._released
        if self.wire_bytes <= self._allowed_bytes:
            return True
        if self.is_stranger:
            self.evict(f"more than {self._allowed_bytes} bytes came before the proof of identity")
        else:
            self._end(
                Code.LIMIT_MEMORY,
                f"a session without rights or grants may send {self._allowed_bytes} bytes in all; connect again",
                None,
            )
        return False

    def evict(self, reason: str) -> None:
        """Send a stranger away; nothing is kept of it, not even until it has heard so."""
        if self.is_established:
            self._end(Code.LIMIT_SESSIONS, reason, None)
        elif not self.is_closed:
            self.refuse(reason)
        self._release()

    def process(self, now: float) -> None:
        """Deliver events, then transmit."""
        if self._released:
            return
        self._busy = True
        try:
            self._deliver()
        finally:
            self._busy = False
        self._transmit(now)

    def writable(self) -> None:
        self._transmit(_clock())

    def peer_refused(self) -> None:
        """The kernel was told that nobody listens at the peer's address."""
        if self.is_closed:
            # Nobody is left to hear the end of the closing period.
            self._release()
        elif not self.is_established:
            self._fail(
                NobodyListensError(
                    f"Nobody listens at {_shown(self._peer_address)} (UDP): the machine there refused.",
                    code=Code.UNAVAILABLE,
                    hint="Check the address, and that the broker runs.",
                    retry_after_ms=1000,
                )
            )
            self._release()
        elif not self._refused:
            self._refused = True
            self._ping(_clock())

    def abandon(self, error: FelixError) -> None:
        """Give up, before or just after the handshake: nobody will use this connection."""
        if self.is_established:
            self.close()
        elif not self.is_closed:
            self._end_on_wire(_QUIC_INTERNAL, 0, "the attempt was given up")
            self._fail(error)
            self._release()

    # events

    def _deliver(self) -> None:
        machine = self._machine
        types = machine.events
        next_event = machine.next_event
        stream_data = types.stream_data
        while (event := next_event()) is not None:
            kind = type(event)
            if kind is stream_data:
                if not self.is_closed:
                    self._stream_data(event.stream_id, event.data, event.end_stream)
            elif kind is types.cid_issued:
                self._owner.cid_issued(self, event.connection_id)
            elif kind is types.cid_retired:
                self._owner.cid_retired(self, event.connection_id)
            elif kind is types.terminated:
                self._machine_closed(MachineClosed(event.error_code, event.frame_type, event.reason_phrase))
                self._release()
                return
            elif self.is_closed:
                continue
            elif kind is types.handshake_completed:
                self._handshake_completed(event.alpn_protocol)
            elif kind is types.stream_reset:
                self._stream_reset(event.stream_id, event.error_code)
            elif kind is types.stop_sending:
                state = self._streams.get(event.stream_id, 0)
                if state & _SENDING:
                    self._streams[event.stream_id] = state | _STOPPED
                    dropped = self._pending.pop(event.stream_id, None)
                    if dropped is not None:
                        self._pending_bytes -= sum(map(len, dropped[0]))
        if not self.is_closed:
            closing = machine.closing()
            if closing is not None:
                self._machine_closed(closing)

    def _handshake_completed(self, alpn: str | None) -> None:
        if alpn not in self._protocols:
            self._end_on_wire(
                _TLS_ALERTS + _ALERT_NO_APPLICATION_PROTOCOL, 0, "no common application protocol"
            )
            self._fail(self._alpn_error())
            return
        if self._handshake_deadline is not None:
            self._handshake_deadline.cancel()
            self._handshake_deadline = None
        if (why := self._machine.closing()) is not None:
            # It ended in the same moment: nobody can use it. The engine's own event of the end releases it.
            self._machine_closed(why)
            return
        self.is_established = True
        self.protocol = alpn
        if self.is_client:
            self._liveness = self._loop.call_later(LIVENESS_TICK_S, self._check_liveness)
        try:
            self._handler = self._owner.established(self)
            self._handler.connected(self)
        except Exception:
            self._handler_failed()

    def _stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        state = self._streams.get(stream_id)
        if state is None:
            if not self._peer_opened(stream_id):
                return
            state = self._streams[stream_id]
        if not state & _RECEIVING:
            return
        if end:
            self._set_state(stream_id, state & ~_RECEIVING)
        elif not data:
            return
        assert self._handler is not None
        try:
            self._handler.stream_data(stream_id, data, end)
        except Exception:
            self._handler_failed()

    def _stream_reset(self, stream_id: int, code: int) -> None:
        state = self._streams.get(stream_id)
        if state is None:
            if not self._peer_opened(stream_id):
                return
            state = self._streams[stream_id]
        if not state & _RECEIVING:
            return
        self._set_state(stream_id, state & ~_RECEIVING)
        assert self._handler is not None
        try:
            self._handler.stream_reset(stream_id, code)
        except Exception:
            self._handler_failed()

    def _peer_opened(self, stream_id: int) -> bool:
        """Take up a stream of the peer's; False where it is one of ours that ended, or one too many."""
        if bool(stream_id & 1) == (not self.is_client):
            return False
        if self._open_counts[stream_id & 3] >= STREAMS_SLACK * self.limits.streams_max:
            self._end(
                Code.LIMIT_SUBSCRIPTIONS,
                f"more than {STREAMS_SLACK * self.limits.streams_max} streams of one kind are open; "
                "end some before opening others",
                None,
            )
            return False
        self._streams[stream_id] = _RECEIVING if stream_id & 2 else _RECEIVING | _SENDING
        self._open_counts[stream_id & 3] += 1
        return True

    def _set_state(self, stream_id: int, state: int) -> None:
        if state & (_SENDING | _RECEIVING):
            self._streams[stream_id] = state
        elif self._streams.pop(stream_id, None) is not None:
            self._open_counts[stream_id & 3] -= 1

    # transmitting

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled and not self._busy:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._transmit(_clock())

    def _transmit(self, now: float) -> None:
        if self._released or self._transmit_failed:
            return
        machine = self._machine
        try:
            if self._pending and not self.is_closed:
                pending = self._pending
                self._pending = {}
                self._pending_bytes = 0
                for stream_id, (chunks, end) in pending.items():
                    machine.write(stream_id, chunks[0] if len(chunks) == 1 else b"".join(chunks), end)
            if self._udp.blocked:
                self._udp.wait_writable(self)
            else:
                out = machine.transmit(now)
                if out:
                    self._sent_at = now
                    self._spins = 0
                    self.answered = True
                    self._send(out)
            deadline = machine.deadline()
        except Exception:
            log.exception(
                "the %s engine failed while sending to %s", self.engine_name, _shown(self._peer_address)
            )
            self._transmit_failed = True
            self._machine_closed(MachineClosed(_QUIC_INTERNAL, 0, "the QUIC engine failed"))
            self._release()
            return
        if deadline is not None:
            self._arm(deadline, now)
        if not self.is_closed:
            unsent = self._pending_bytes + machine.unsent_bytes()
            if self._above_high:
                if unsent <= self.limits.backlog_low_bytes:
                    self._above_high = False
                    self._drained()
            elif unsent >= self.limits.backlog_high_bytes:
                self._above_high = True

    def _transmit_all(self) -> None:
        """Before a close: what the congestion window allows leaves now, though the engine would pace it.

        The engine is told times that are a little ahead; what they spoil, its estimate of the round trip, ends here.
        """
        now = _clock()
        for _ in range(PACED_STEPS_MAX):
            self._transmit(now)
            if self._released or self._udp.blocked or not self._machine.unsent_bytes():
                return
            deadline = self._machine.deadline()
            if deadline is None or deadline > now + PACED_STEP_S:
                return
            now = max(now, deadline) + 1e-6

    def _send(self, out: list[tuple[bytes, Address]]) -> None:
        if self._send_to is None:
            self._udp.send([datagram for datagram, _ in out], None)
            return
        address = out[0][1]
        if len(out) == 1 or all(to == address for _, to in out):
            self._udp.send([datagram for datagram, _ in out], address)
            self._peer_address = address
            return
        for datagram, to in out:
            self._udp.send([datagram], to)

    def _drained(self) -> None:
        if self._handler is None:
            return
        try:
            self._handler.drained()
        except Exception:
            self._handler_failed()

    # time

    def _arm(self, deadline: float, now: float) -> None:
        """Wake at `deadline`. A timer that is set for earlier stays: it looks again when it fires, which costs
        less than a cancelled timer per transmit."""
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        delay = deadline - now
        if delay <= SPIN_S and self._spins < SPINS_MAX:
            self._spins += 1
            self._timer = self._loop.call_soon(self._timer_fired)
        else:
            self._spins = 0
            self._timer = self._loop.call_later(max(delay, 0.001), self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        if self._released:
            return
        now = _clock()
        try:
            deadline = self._machine.deadline()
            if deadline is None:
                return
            if deadline > now:
                self._arm(deadline, now)
                return
            self._machine.handle_deadline(now)
        except Exception:
            log.exception("the %s engine failed on its timer", self.engine_name)
            self._machine_closed(MachineClosed(_QUIC_INTERNAL, 0, "the QUIC engine failed"))
            self._release()
            return
        self.process(now)

    def _handshake_late(self, waited: float) -> None:
        self._handshake_deadline = None
        self._end_on_wire(_QUIC_INTERNAL, 0, "the handshake took too long")
        self._fail(
            UnavailableError(
                f"The server at {_shown(self._peer_address)} (UDP) did not complete a handshake within {waited:g} s.",
                code=Code.TIMEOUT,
                hint="Check the address, the firewall, and that the broker runs.",
                retry_after_ms=1000,
            )
        )
        self._release()

    def _check_liveness(self) -> None:
        """Client only: keep the connection up, and notice a server that is gone well before the idle timeout."""
        self._liveness = None
        if self.is_closed:
            return
        now = _clock()
        if self._pinged_at is not None and self._heard_at > self._pinged_at:
            self._pinged_at = None
            self._refused = False
        if self._pinged_at is not None:
            allowed = UNANSWERED_AFTER_REFUSAL_S if self._refused else UNANSWERED_S
            if now - self._pinged_at >= allowed:
                self._end(
                    Code.DISCONNECTED,
                    f"the server at {_shown(self._peer_address)} has not answered for {now - self._heard_at:.1f} s",
                    _QUIC_INTERNAL,
                )
                return
        elif (self._sent_at > self._heard_at and now - self._heard_at >= LIVENESS_TICK_S) or (
            self._keepalive_s and now - max(self._heard_at, self._sent_at) >= self._keepalive_s
        ):
            self._ping(now)
        self._liveness = self._loop.call_later(LIVENESS_TICK_S, self._check_liveness)

    def _ping(self, now: float) -> None:
        if self._pinged_at is None:
            self._pinged_at = now
        try:
            self._machine.ping()
        except Exception:
            log.debug("the engine could not ping", exc_info=True)
        self._schedule_flush()

    # ending

    def _require_open(self) -> None:
        if self.is_closed:
            raise UnavailableError(
                f"The connection to {_shown(self._peer_address)} is closed.",
                code=Code.DISCONNECTED,
                hint="Connect again.",
            )

    def _handler_failed(self) -> None:
        log.exception("the handler of the connection with %s failed", _shown(self._peer_address))
        self._end(Code.INTERNAL, "the other side failed while it handled this connection", None)

    def _end(self, code: int, reason: str, frame_type: int | None) -> None:
        """Our side ends the connection."""
        if self.is_closed:
            return
        if not self.is_established:
            self._end_on_wire(code, frame_type, reason)
            self._fail(
                UnavailableError("The connection was closed before it was up.", code=Code.DISCONNECTED)
            )
            return
        self._end_on_wire(
            int(code) if frame_type is None else frame_type, None if frame_type is None else 0, reason
        )
        self._closed(int(code), reason)

    def _end_on_wire(self, code: int, frame_type: int | None, reason: str) -> None:
        """Send CONNECTION_CLOSE with what the application gave (`frame_type` None), or a QUIC error."""
        shown = reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore")
        try:
            self._machine.close(code, frame_type, shown)
        except Exception:
            log.debug("the engine could not close", exc_info=True)
        was_busy, self._busy = self._busy, True
        self._pending.clear()
        self._pending_bytes = 0
        self.is_closed, before = True, self.is_closed
        self._transmit(_clock())
        self.is_closed = before
        self._busy = was_busy

    def _machine_closed(self, why: MachineClosed) -> None:
        if self.is_closed:
            return
        if not self.is_established:
            self._fail(self._handshake_error(why))
            return
        if why.frame_type is None:
            self._closed(why.code, why.reason)
        elif "idle timeout" in why.reason.lower():
            seconds = self.limits.idle_timeout_ms / 1000
            self._closed(
                Code.DISCONNECTED, f"nothing arrived for {seconds:g} s or the peer's shorter idle timeout"
            )
        elif why.code == _QUIC_INTERNAL and why.reason:
            self._closed(Code.DISCONNECTED, why.reason)
        else:
            self._closed(Code.PROTOCOL, f"QUIC error {int(why.code):#x}: {why.reason or 'no reason given'}")

    def _closed(self, code: int, reason: str) -> None:
        """Established, now over: tell the owner and, in the next turn, the handler."""
        self.is_closed = True
        self._pending.clear()
        self._pending_bytes = 0
        self._streams.clear()
        if self._liveness is not None:
            self._liveness.cancel()
            self._liveness = None
        self._owner.ended(self)
        self._loop.call_soon(self._tell_closed, int(code), reason)

    def _tell_closed(self, code: int, reason: str) -> None:
        self._tell_over()
        if self._handler is None:
            return
        try:
            self._handler.closed(code, reason)
        except Exception:
            log.exception(
                "the handler of the connection with %s failed in closed()", _shown(self._peer_address)
            )

    def _tell_over(self) -> None:
        self._is_over = True
        if self._closing is not None:
            self._closing.set()

    def _fail(self, error: FelixError) -> None:
        """Never established."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._handshake_deadline is not None:
            self._handshake_deadline.cancel()
            self._handshake_deadline = None
        self._tell_over()
        self._owner.failed(self, error)

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        self._udp.forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._handshake_deadline is not None:
            self._handshake_deadline.cancel()
            self._handshake_deadline = None
        self._owner.released(self)

    def release(self, reason: str = "the socket was closed") -> None:
        """The socket goes away, or what led here was never authentic."""
        if not self.is_closed:
            if self.is_established:
                self._closed(Code.DISCONNECTED, reason)
            else:
                self._fail(UnavailableError(f"{reason[0].upper()}{reason[1:]}.", code=Code.DISCONNECTED))
        self._release()

    def refuse(self, reason: str) -> None:
        """A server's answer to a handshake that it will not take up."""
        self._end_on_wire(_QUIC_CONNECTION_REFUSED, 0, reason)
        self._fail(UnavailableError(reason, code=Code.LIMIT_SESSIONS))

    def _handshake_error(self, why: MachineClosed) -> FelixError:
        peer = _shown(self._peer_address)
        alert = int(why.code) - _TLS_ALERTS
        if why.frame_type is not None and (
            alert == _ALERT_NO_APPLICATION_PROTOCOL
            # What the native engine's server says instead.
            or (alert == _ALERT_HANDSHAKE_FAILURE and "alpn" in why.reason.lower())
        ):
            return self._alpn_error()
        if why.frame_type is not None and alert in _ALERTS_CERTIFICATE and self._tls is not None:
            from felix.transport.certificate import explain_refusal  # here: it needs all of X.509

            return explain_refusal(
                self._machine.peer_chain_der(),
                self._tls.authorities_pem,
                self._tls.server_name,
                peer,
                datetime.fromtimestamp(REAL.clock.now_ms() / 1000, UTC),
                why.reason,
            )
        if why.frame_type is not None and why.code == _QUIC_CONNECTION_REFUSED:
            return UnavailableError(
                f"The server at {peer} refused the connection: {why.reason or 'no reason given'}.",
                code=Code.LIMIT_SESSIONS,
                retry_after_ms=1000,
            )
        if why.frame_type is None or why.code == _QUIC_APPLICATION_ERROR:
            return UnavailableError(
                f"The server at {peer} closed the connection during the handshake: {why.reason or 'no reason given'}.",
                code=Code.UNAVAILABLE,
                retry_after_ms=1000,
            )
        if why.code == _QUIC_INTERNAL:
            reason = why.reason.lower()
            if "version" in reason:
                return ProtocolError(
                    f"The server at {peer} speaks no QUIC version that we speak (1).",
                    code=Code.VERSION_UNSUPPORTED,
                )
            return UnavailableError(
                f"The handshake with {peer} did not complete: {why.reason or 'no reason given'}.",
                code=Code.TIMEOUT,
                retry_after_ms=1000,
            )
        return ProtocolError(
            f"The handshake with {peer} failed with QUIC error {int(why.code):#x}: {why.reason or 'no reason given'}."
        )

    def _alpn_error(self) -> FelixError:
        return ProtocolError(
            f"The peer at {_shown(self._peer_address)} does not speak {' or '.join(map(repr, self._protocols))} (TLS application protocol).",
            code=Code.VERSION_UNSUPPORTED,
            hint="Check that the address is a Felix broker's, and that both sides run compatible versions.",
        )


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
        log.debug("a handshake with %s failed: %s", _shown(connection.peer_address), error)

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
        try:
            family, address = (await _resolve(loop, host, port))[0]
            sock = open_socket(family, bind=address, buffer_bytes=limits.socket_buffer_bytes)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(_shown((host, port)), "UDP") from error
            raise RequestError(
                f"Cannot listen on {_shown((host, port))} (UDP): {error.strerror or error}.",
                code=Code.CONFIG_INVALID,
                hint="Choose another address or port, or stop the process that uses this one.",
            ) from error
        return DriverListener(
            loop=loop,
            sock=sock,
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


async def _resolve(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[tuple[int, Address]]:
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    return [(int(family), address) for family, _, _, _, address in found]  # type: ignore[misc]


def _socket_to(family: int, address: Address, limits: TransportLimits) -> socket.socket:
    try:
        return open_socket(family, connect=address, buffer_bytes=limits.socket_buffer_bytes)
    except OSError as error:
        raise UnavailableError(
            f"There is no way to {_shown(address)} (UDP): {error.strerror or error}.", retry_after_ms=1000
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


def _shown(address: Address | tuple[str, int]) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}"
