"""One QUIC connection of the driver: a machine without I/O, run over a socket's datagrams, and the port's `Connection` in front of it.

What its parts know: which streams are open and what waits to leave on them (felix.transport.streams), when its machine is to be woken
(felix.transport.deadline), whether a server still answers (felix.transport.liveness), and how the end is put in words (felix.transport.ending).

Invariants:
- the handler's calls come in the order `connected`, anything, `closed`, and `closed` once;
- bytes from the network never raise out of here: a machine that fails ends its own connection;
- one transmit is kept while the socket is blocked, and streams are bounded, those of the peer twice over (felix.transport.streams).

Only felix.transport.driver makes one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from datetime import UTC, datetime
from typing import Final, Protocol

from felix.errors import Code, FelixError, UnavailableError
from felix.lazy_event import LazyEvent
from felix.runtime.real import REAL
from felix.transport.deadline import DeadlineTimer
from felix.transport.ending import (
    ALERT_NO_APPLICATION_PROTOCOL,
    QUIC_CONNECTION_REFUSED,
    QUIC_INTERNAL,
    TLS_ALERTS,
    Expected,
    MachineClosed,
    connection_closed,
    explain_close,
    explain_handshake,
    handshake_late,
    no_common_protocol,
    shown,
)
from felix.transport.liveness import LIVENESS_TICK_S, Liveness, Verdict
from felix.transport.machine import Machine
from felix.transport.port import ClientTls, Handler, NobodyListensError, TransportLimits
from felix.transport.streams import RECEIVING, SENDING, STOPPED, Outbox, StreamTable
from felix.transport.udp import Address, Datagrams

log = logging.getLogger("felix.transport")

REASON_BYTES_MAX: Final = 256
"""Longest reason on the wire: a CONNECTION_CLOSE must fit the smallest datagram with room to spare."""

PACED_STEPS_MAX: Final = 4096
"""Steps of pacing that a close hurries through; more than a congestion window of small datagrams."""

PACED_STEP_S: Final = 0.002
"""A deadline further ahead than this is not the pacer's."""

ENGINE_FAILED: Final = "the QUIC engine failed"
"""Why a connection ended whose machine raised an error."""

# Of this machine, since the sockets and the peers are.
_clock = REAL.clock.monotonic


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
        "_flush_scheduled",
        "_flush_waits",
        "_handler",
        "_heard_at",
        "_leaf_sha256",
        "_liveness",
        "_looks_at",
        "_loop",
        "_machine",
        "_outbox",
        "_over",
        "_owner",
        "_peer_address",
        "_protocols",
        "_released",
        "_sent_at",
        "_streams",
        "_timer",
        "_tls",
        "_udp",
        "_watch",
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
        self._streams = StreamTable(limits.streams_max, is_client=self.is_client)
        self._outbox = Outbox()
        self._flush_scheduled = False
        self._flush_waits: bool | None = False
        """For what will be sent behind it; None: it has waited, and does so no more."""
        self._busy = False
        self._above_high = False
        self._released = False
        self._over = LazyEvent()
        self._timer = DeadlineTimer(loop, _clock, self._deadline_reached)
        now = _clock()
        self._heard_at = now
        self._sent_at = now
        self._looks_at = now
        self._liveness = None if tls is None else Liveness(limits.keepalive_ms / 1000)
        self._watch: asyncio.TimerHandle | None = loop.call_later(
            handshake_timeout, self._handshake_late, handshake_timeout
        )
        """Until it is established, of the handshake's end; from then on a client's, of its next look at the server."""

    # the port

    @property
    def peer_address(self) -> tuple[str, int]:
        return self._peer_address[0], self._peer_address[1]

    @property
    def server_name(self) -> str:
        return "" if self._tls is None else self._tls.server_name

    @property
    def heard_at(self) -> float:
        return self._heard_at

    @property
    def server_leaf_sha256(self) -> bytes:
        if self.is_client and not self._leaf_sha256 and not self._released:
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
        self._streams.check_room(bidirectional=bidirectional)
        stream_id = self._machine.next_stream_id(bidirectional)
        self._streams.opened(stream_id)
        return stream_id

    def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        if self.is_closed:
            self._require_open()
        state = self._streams.states.get(stream_id, 0)
        if not state & SENDING:
            raise ValueError(f"stream {stream_id} is not open for sending")
        if end:
            self._streams.end_sending(stream_id)
        if state & STOPPED or not (data or end):
            return
        self._outbox.put(stream_id, data, end)
        if not self._flush_scheduled and not self._busy:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def will_send(self) -> None:
        if not self._flush_scheduled:
            self._schedule_flush()
        elif self._flush_waits is not None:
            self._flush_waits = True

    def backlog_bytes(self) -> int:
        if self.is_closed:
            return 0
        backlog: int = self._outbox.held_bytes + self._machine.unsent_bytes()
        if backlog >= self.limits.backlog_high_bytes:
            # Whoever is told so stops and waits for `drained`, also if most of it leaves with this turn.
            self._above_high = True
        return backlog

    def reset_stream(self, stream_id: int, code: int) -> None:
        self._require_open()
        state = self._streams.states.get(stream_id, 0)
        if not state & SENDING:
            raise ValueError(f"stream {stream_id} is not open for sending")
        if self._outbox.drop(stream_id):
            # The engine must know of a stream before it can reset it.
            self._machine.write(stream_id, b"", False)
        if not state & STOPPED:
            self._machine.reset(stream_id, code)
        self._streams.end_sending(stream_id)
        self._schedule_flush()

    def close(self, code: int = 0, reason: str = "") -> None:
        if self.is_closed:
            return
        self._transmit_all()
        self._end(code, reason, None)

    async def wait_closed(self) -> None:
        await self._over.wait()

    # the socket's side

    def receive(self, data: bytes, segment_bytes: int, address: Address, now: float) -> None:
        """Datagrams for this connection; `process` follows in the same turn."""
        if self._released:
            return
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
        """Deliver events, then transmit.

        Where a client's handler was given something and had nothing to say to it at once, the task that waited for it goes first, and what is left
        to transmit, an acknowledgement of QUIC's at most, follows in the same event loop iteration, or with what the task sends.
        """
        if self._released:
            return
        self._busy = True
        try:
            was_given = self._deliver()
        finally:
            self._busy = False
        if self.is_client and was_given and not self._outbox.pending and not self._machine.unsent_bytes():
            self._schedule_flush()
        else:
            self._transmit(now)

    def writable(self) -> None:
        self._transmit(_clock())

    def peer_refused(self) -> None:
        """The kernel was told that nobody listens at the peer's address."""
        if self.is_closed:
            # Nobody is left to hear the end of the closing period.
            self._release()
        elif not self.is_established:
            self._fail(_nobody_listens(shown(self._peer_address)))
            self._release()
        elif self._liveness is not None and self._liveness.refused() is Verdict.PING:
            self._ping(_clock())

    def abandon(self, error: FelixError) -> None:
        """Give up, before or just after the handshake: nobody will use this connection."""
        if self.is_established:
            self.close()
        elif not self.is_closed:
            self._end_on_wire(QUIC_INTERNAL, 0, "the attempt was given up")
            self._fail(error)
            self._release()

    # events

    def _deliver(self) -> bool:
        """Whether the handler was given bytes of a stream."""
        was_given = False
        machine = self._machine
        types = machine.events
        next_event = machine.next_event
        stream_data = types.stream_data
        while (event := next_event()) is not None:
            kind = type(event)
            if kind is stream_data:
                if not self.is_closed:
                    was_given = True
                    self._stream_data(event.stream_id, event.data, event.end_stream)
            elif kind is types.cid_issued:
                self._owner.cid_issued(self, event.connection_id)
            elif kind is types.cid_retired:
                self._owner.cid_retired(self, event.connection_id)
            elif kind is types.terminated:
                self._machine_closed(MachineClosed(event.error_code, event.frame_type, event.reason_phrase))
                self._release()
                return False
            elif self.is_closed:
                continue
            elif kind is types.handshake_completed:
                self._handshake_completed(event.alpn_protocol)
            elif kind is types.stream_reset:
                self._stream_reset(event.stream_id, event.error_code)
            elif kind is types.stop_sending and self._streams.stop(event.stream_id):
                self._outbox.drop(event.stream_id)
        if not self.is_closed:
            closing = machine.closing()
            if closing is not None:
                self._machine_closed(closing)
        return was_given and not self.is_closed

    def _handshake_completed(self, alpn: str | None) -> None:
        if alpn not in self._protocols:
            self._end_on_wire(TLS_ALERTS + ALERT_NO_APPLICATION_PROTOCOL, 0, "no common application protocol")
            self._fail(no_common_protocol(shown(self._peer_address), self._protocols))
            return
        self._stop_watch()
        if (why := self._machine.closing()) is not None:
            # It ended in the same moment: nobody can use it. The engine's own event of the end releases it.
            self._machine_closed(why)
            return
        self.is_established = True
        self.protocol = alpn
        if self.is_client:
            self._look_later(_clock())
        try:
            self._handler = self._owner.established(self)
            self._handler.connected(self)
        except Exception:
            self._handler_failed()

    def _stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        state = self._streams.states.get(stream_id)
        if state is None:
            if not self._taken_up(stream_id):
                return
            state = self._streams.states[stream_id]
        if not state & RECEIVING:
            return
        if end:
            self._streams.end_receiving(stream_id)
        elif not data:
            return
        assert self._handler is not None
        try:
            self._handler.stream_data(stream_id, data, end)
        except Exception:
            self._handler_failed()

    def _stream_reset(self, stream_id: int, code: int) -> None:
        state = self._streams.states.get(stream_id)
        if state is None:
            if not self._taken_up(stream_id):
                return
            state = self._streams.states[stream_id]
        if not state & RECEIVING:
            return
        self._streams.end_receiving(stream_id)
        assert self._handler is not None
        try:
            self._handler.stream_reset(stream_id, code)
        except Exception:
            self._handler_failed()

    def _taken_up(self, stream_id: int) -> bool:
        """Whether a stream that was unknown is the peer's; the connection ends where it is one too many."""
        try:
            return self._streams.take_up(stream_id)
        except UnavailableError as error:
            self._end(error.code, error.sentence, None)
            return False

    # transmitting

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled and not self._busy:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._flush_waits:
            # Behind the callback that sends; once, whoever else is about to send by then.
            self._flush_waits = None
            self._loop.call_soon(self._flush)
            return
        self._flush_scheduled = False
        self._flush_waits = False
        self._transmit(_clock())

    def _transmit(self, now: float) -> None:
        if self._released:
            return
        machine = self._machine
        try:
            if self._outbox.pending and not self.is_closed:
                for stream_id, (pieces, end) in self._outbox.take().items():
                    machine.write(stream_id, pieces[0] if len(pieces) == 1 else b"".join(pieces), end)
            if self._udp.blocked:
                self._udp.wait_writable(self)
                deadline = machine.deadline()
            else:
                out, deadline = machine.transmit(now)
                if out:
                    self._sent_at = now
                    self._timer.spins = 0
                    self.answered = True
                    self._send(out)
        except Exception:
            self._engine_failed("while sending")
            return
        self._timer.arm(deadline, now, is_pacing=machine.is_pacing)
        if not self.is_closed:
            unsent = self._outbox.held_bytes + machine.unsent_bytes()
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
        if self.is_client:
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

    def _deadline_reached(self, now: float) -> None:
        if self._released:
            return
        try:
            self._machine.handle_deadline(now)
        except Exception:
            self._engine_failed("on its timer")
            return
        self.process(now)

    def _handshake_late(self, waited: float) -> None:
        self._watch = None
        self._end_on_wire(QUIC_INTERNAL, 0, "the handshake took too long")
        self._fail(handshake_late(shown(self._peer_address), waited))
        self._release()

    def _check_liveness(self) -> None:
        """Client only: keep the connection up, and notice a server that is gone well before the idle timeout."""
        self._watch = None
        if self.is_closed or self._liveness is None:
            return
        now = _clock()
        verdict = self._liveness.look(now, self._heard_at, self._sent_at, now - self._looks_at)
        if verdict is Verdict.GONE:
            self._end(
                Code.DISCONNECTED,
                f"the server at {shown(self._peer_address)} has not answered for {now - self._heard_at:.1f} s",
                QUIC_INTERNAL,
            )
            return
        if verdict is Verdict.PING:
            self._ping(now)
        self._look_later(now)

    def _look_later(self, now: float) -> None:
        self._looks_at = now + LIVENESS_TICK_S
        self._watch = self._loop.call_later(LIVENESS_TICK_S, self._check_liveness)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _ping(self, now: float) -> None:
        if self._liveness is not None:
            self._liveness.pinged(now)
        try:
            self._machine.ping()
        except Exception:
            log.debug("the engine could not ping", exc_info=True)
        self._schedule_flush()

    # ending

    def _require_open(self) -> None:
        if self.is_closed:
            raise connection_closed(shown(self._peer_address))

    def _handler_failed(self) -> None:
        log.exception("the handler of the connection with %s failed", shown(self._peer_address))
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
        said = reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore")
        try:
            self._machine.close(code, frame_type, said)
        except Exception:
            log.debug("the engine could not close", exc_info=True)
        was_busy, self._busy = self._busy, True
        self._outbox.clear()
        self.is_closed, before = True, self.is_closed
        self._transmit(_clock())
        self.is_closed = before
        self._busy = was_busy

    def _engine_failed(self, when: str) -> None:
        log.exception("the %s engine failed %s, with %s", self.engine_name, when, shown(self._peer_address))
        try:
            # Else the peer waits for its own silence to tell: up to its idle timeout.
            self._machine.close(QUIC_INTERNAL, 0, ENGINE_FAILED)
            out, _ = self._machine.transmit(_clock())
            if out and not self._udp.blocked:
                self._send(out)
        except Exception:
            log.debug("the peer could not be told", exc_info=True)
        self._machine_closed(MachineClosed(QUIC_INTERNAL, 0, ENGINE_FAILED))
        self._release()

    def _machine_closed(self, why: MachineClosed) -> None:
        if self.is_closed:
            return
        if not self.is_established:
            self._fail(self._handshake_error(why))
            return
        self._closed(*explain_close(why, self.limits.idle_timeout_ms))

    def _closed(self, code: int, reason: str) -> None:
        """Established, now over: tell the owner and, in the next turn, the handler."""
        self.is_closed = True
        self._outbox.clear()
        self._streams.clear()
        self._stop_watch()
        self._owner.ended(self)
        self._loop.call_soon(self._tell_closed, int(code), reason)

    def _tell_closed(self, code: int, reason: str) -> None:
        self._over.set()
        handler, self._handler = self._handler, None
        if handler is None:
            return
        try:
            handler.closed(code, reason)
        except Exception:
            log.exception(
                "the handler of the connection with %s failed in closed()", shown(self._peer_address)
            )

    def _fail(self, error: FelixError) -> None:
        """Never established."""
        if self.is_closed:
            return
        self.is_closed = True
        self._stop_watch()
        self._over.set()
        self._owner.failed(self, error)

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        self._udp.forget(self)
        self._timer.end()
        self._stop_watch()
        self._owner.released(self)
        # In the next turn: it may be the machine that led here.
        self._loop.call_soon(self._machine.release)

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
        self._end_on_wire(QUIC_CONNECTION_REFUSED, 0, reason)
        self._fail(UnavailableError(reason, code=Code.LIMIT_SESSIONS))

    def _handshake_error(self, why: MachineClosed) -> FelixError:
        tls = self._tls
        expected = (
            None
            if tls is None
            else Expected(tls.server_name, tls.authorities_pem, self._machine.peer_chain_der)
        )
        now = datetime.fromtimestamp(REAL.clock.now_ms() / 1000, UTC)
        return explain_handshake(why, shown(self._peer_address), self._protocols, expected, now)


def _nobody_listens(peer: str) -> NobodyListensError:
    return NobodyListensError(
        f"Nobody listens at {peer} (UDP): the machine there refused.",
        code=Code.UNAVAILABLE,
        hint="Check the address, and that the broker runs.",
        retry_after_ms=1000,
    )
