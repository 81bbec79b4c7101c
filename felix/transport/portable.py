"""The portable engine: aioquic, QUIC and TLS 1.3 in readable Python over OpenSSL's primitives.

Key exchange: X25519 and the NIST curves; it has no hybrid post-quantum group, and neither has a connection of
which it is one end. It does not probe paths: to another machine it sends the smallest QUIC datagram.

Certificates: names by service_identity, the chain by OpenSSL, against the given authorities alone.
Only the driver calls these.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection, QuicConnectionError
from aioquic.quic.packet import QuicErrorCode, QuicProtocolVersion
from aioquic.quic.stream import QuicStream
from aioquic.tls import Epoch, load_pem_private_key, load_pem_x509_certificates
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from felix.transport.driver import DriverEngine
from felix.transport.ending import MachineClosed
from felix.transport.machine import EventTypes, ServerIdentity, Transmission
from felix.transport.packet import CID_BYTES
from felix.transport.port import DATAGRAM_BYTES_MIN, ClientTls, ServerTls, TransportLimits
from felix.transport.udp import Address

NAME: Final = "aioquic"

ETHERNET_BYTES: Final = 1472
"""Larger than this is meant for loopback alone; up to it, the engine cannot probe and stays at the minimum."""

PACKET_BYTES_MAX: Final = 16_384
"""The largest datagram that the engine can build: it writes a long packet's length in two bytes."""

FRAGMENTS_MAX: Final = 4096
"""Pieces of one stream that wait for what is missing before them: more than a full window with every fourth packet lost."""

CRYPTO_PENDING_BYTES_MAX: Final = 32 * 1024
"""Handshake bytes ahead of those that were read: more than the longest certificate chain (RFC 9000, section 7.5: 4,096)."""

CRYPTO_FRAGMENTS_MAX: Final = 64
"""Pieces of them; a flight has fewer datagrams."""

_TYPES: Final = EventTypes(
    stream_data=events.StreamDataReceived,
    stream_reset=events.StreamReset,
    stop_sending=events.StopSendingReceived,
    handshake_completed=events.HandshakeCompleted,
    cid_issued=events.ConnectionIdIssued,
    cid_retired=events.ConnectionIdRetired,
    terminated=events.ConnectionTerminated,
)

# The engine logs every closed connection; the driver hands the same to the handler.
if logging.getLogger("quic").level == logging.NOTSET:
    logging.getLogger("quic").setLevel(logging.ERROR)


class _Connection(QuicConnection):
    """The engine's connection, with what it may be made to hold put right.

    - The engine doubles its windows by the highest offset that it has seen, and fills the hole before it with zeros: a peer
      that sends single bytes at rising offsets makes it hold gigabytes. Here a window is what was consumed plus its size.
    - A server begins with a stranger's window, for streams and for the connection; `widen` raises both.
    - The fragments of one stream are at most FRAGMENTS_MAX; each costs the engine 120 bytes, and a walk over all before it.
    - Handshake messages are at most CRYPTO_PENDING_BYTES_MAX ahead of what was read; the engine allows 512 KiB per epoch.
    - Until `admit`, the first stream is the only one: the engine makes every stream below the one that is named.
    - Datagrams are of DATAGRAM_BYTES_MIN until no Initial packet is sent any more (RFC 9000, section 14.1): the engine pads each that has one
      to the largest there may be, and on loopback four of them were all that a server takes of a stranger.
    """

    def __init__(self, *, window_bytes: int, stream_window_bytes: int, is_widened: bool, **more: Any) -> None:
        super().__init__(**more)
        self._max_datagram_size = DATAGRAM_BYTES_MIN
        self._window_bytes = window_bytes
        self._stream_window_bytes = stream_window_bytes
        self._is_admitted = is_widened
        self._consumed_bytes = 0
        self._received_on: QuicStream | None = None

    def widen(self, window_bytes: int, stream_window_bytes: int) -> None:
        """Known now: these windows count."""
        self._window_bytes, self._stream_window_bytes = window_bytes, stream_window_bytes

    def admit(self) -> None:
        """It has proved who it is: it may open streams, in the windows that count."""
        self._is_admitted = True

    def consumed(self, size: int) -> None:
        """So many bytes were handed on, or will never come."""
        self._consumed_bytes += size

    def held_bytes(self, stream_id: int) -> int:
        """Of a stream that was reset: what counts against the window and will never be handed on."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.receiver.highest_offset - stream.receiver.starting_offset()

    def _discard_epoch(self, epoch: Epoch) -> None:
        super()._discard_epoch(epoch)
        if epoch is Epoch.INITIAL:
            self._max_datagram_size = self._configuration.max_datagram_size

    def _get_or_create_stream(self, frame_type: int, stream_id: int) -> QuicStream:
        if not self._is_admitted and stream_id and stream_id not in self._streams:
            raise QuicConnectionError(
                error_code=QuicErrorCode.STREAM_LIMIT_ERROR,
                frame_type=frame_type,
                reason_phrase="A second stream came before the proof of identity",
            )
        self._received_on = super()._get_or_create_stream(frame_type, stream_id)
        return self._received_on

    def _handle_stream_frame(self, context: Any, frame_type: int, buf: Any) -> None:
        self._received_on = None
        super()._handle_stream_frame(context, frame_type, buf)
        stream = self._received_on
        if stream is not None and len(stream.receiver._ranges) > FRAGMENTS_MAX:
            raise QuicConnectionError(
                error_code=QuicErrorCode.INTERNAL_ERROR,
                frame_type=frame_type,
                reason_phrase=f"More than {FRAGMENTS_MAX} fragments of a stream",
            )

    def _handle_crypto_frame(self, context: Any, frame_type: int, buf: Any) -> None:
        at = buf.tell()
        end = buf.pull_uint_var() + buf.pull_uint_var()
        buf.seek(at)
        receiver = self._crypto_streams[context.epoch].receiver
        if (
            end - receiver.starting_offset() > CRYPTO_PENDING_BYTES_MAX
            or len(receiver._ranges) > CRYPTO_FRAGMENTS_MAX
        ):
            raise QuicConnectionError(
                error_code=QuicErrorCode.CRYPTO_BUFFER_EXCEEDED,
                frame_type=frame_type,
                reason_phrase="too much crypto buffering",
            )
        super()._handle_crypto_frame(context, frame_type, buf)

    def _write_connection_limits(self, builder: Any, space: Any) -> None:
        limit = self._local_max_data
        limit.value = _raised(limit.value, self._consumed_bytes, self._window_bytes)
        # With nothing used the engine does not double; all else it does as ever.
        used, limit.used = limit.used, 0
        try:
            super()._write_connection_limits(builder, space)
        finally:
            limit.used = used

    def _write_stream_limits(self, builder: Any, space: Any, stream: QuicStream) -> None:
        receiver = stream.receiver
        if stream.max_stream_data_local and not receiver.is_finished:
            stream.max_stream_data_local = _raised(
                stream.max_stream_data_local, receiver.starting_offset(), self._stream_window_bytes
            )
        highest, receiver.highest_offset = receiver.highest_offset, 0
        try:
            super()._write_stream_limits(builder, space, stream)
        finally:
            receiver.highest_offset = highest


def _raised(limit: int, consumed: int, window: int) -> int:
    """The limit to tell the peer: what was consumed and a window; told once that is half a window more."""
    return max(limit, consumed + window) if consumed + window - limit >= window // 2 else limit


class PortableMachine:
    """`felix.transport.machine.Machine` over an aioquic connection."""

    __slots__ = ("_limits", "_quic", "_written", "deadline", "events", "handle_deadline")

    def __init__(self, quic: _Connection, limits: TransportLimits) -> None:
        self._quic = quic
        self._limits = limits
        self.events = _TYPES
        self._written: set[int] = set()
        """Streams that may hold bytes not yet transmitted."""
        self.deadline = quic.get_timer
        self.handle_deadline = quic.handle_timer

    @property
    def first_cid(self) -> bytes:
        return self._quic.host_cid

    def receive(self, data: bytes, segment_bytes: int, address: Address, now: float) -> None:
        receive = self._quic.receive_datagram
        if len(data) <= segment_bytes:
            receive(data, address, now)
            return
        for at in range(0, len(data), segment_bytes):
            receive(data[at : at + segment_bytes], address, now)

    def transmit(self, now: float) -> Transmission:
        return self._quic.datagrams_to_send(now), self._quic.get_timer()

    @property
    def is_pacing(self) -> bool:
        return self._quic._pacing_at is not None

    def next_event(self) -> Any:
        event = self._quic.next_event()
        if isinstance(event, events.StreamDataReceived):
            self._quic.consumed(len(event.data))
        elif isinstance(event, events.StreamReset):
            self._quic.consumed(self._quic.held_bytes(event.stream_id))
        return event

    def admit(self) -> None:
        self._quic.admit()

    def widen(self) -> None:
        self._quic.widen(self._limits.connection_window_bytes, self._limits.stream_window_bytes)

    def next_stream_id(self, bidirectional: bool) -> int:
        stream_id = self._quic.get_next_available_stream_id(is_unidirectional=not bidirectional)
        # Takes the id; the engine holds the stream back while the peer's limit is reached.
        self._quic.send_stream_data(stream_id, b"")
        return stream_id

    def write(self, stream_id: int, data: bytes, end: bool) -> None:
        self._quic.send_stream_data(stream_id, data, end)
        self._written.add(stream_id)

    def unsent_bytes(self) -> int:
        total = 0
        streams = self._quic._streams
        for stream_id in tuple(self._written):
            stream = streams.get(stream_id)
            unsent = 0
            if stream is not None and not stream.sender.buffer_is_empty:
                unsent = stream.sender._buffer_stop - stream.sender.highest_offset
            if unsent:
                total += unsent
            else:
                self._written.discard(stream_id)
        return total

    def reset(self, stream_id: int, code: int) -> None:
        self._quic.reset_stream(stream_id, code)
        self._written.discard(stream_id)

    def ping(self) -> None:
        self._quic.send_ping(0)

    def close(self, code: int, frame_type: int | None, reason: str) -> None:
        self._quic.close(error_code=code, frame_type=frame_type, reason_phrase=reason)

    def closing(self) -> MachineClosed | None:
        event = self._quic._close_event
        if event is None:
            return None
        return MachineClosed(int(event.error_code), event.frame_type, event.reason_phrase)

    def peer_chain_der(self) -> list[bytes]:
        leaf = self._quic.tls._peer_certificate
        if leaf is None:
            return []
        return [c.public_bytes(Encoding.DER) for c in (leaf, *self._quic.tls._peer_certificate_chain)]

    def release(self) -> None:
        # What was sent and not acknowledged refers to the space that holds it.
        for space in self._quic._spaces.values():
            space.sent_packets.clear()
        vars(self._quic).clear()


class PortableMachinery(msgspec.Struct, frozen=True):
    """`felix.transport.machine.Machinery` for aioquic."""

    name: str = NAME

    def read_identity(self, tls: ServerTls) -> ServerIdentity:
        chain = load_pem_x509_certificates(tls.chain_pem)
        return ServerIdentity((chain, load_pem_private_key(tls.key_pem)), chain[0].fingerprint(SHA256()))

    def accept(
        self,
        identity: Any,
        limits: TransportLimits,
        protocols: tuple[str, ...],
        datagram_bytes: int,
        original_cid: bytes,
        retry_cid: bytes | None,
    ) -> PortableMachine:
        window = limits.stranger_bytes_max
        configuration = _configuration(limits, protocols, datagram_bytes, is_client=False)
        configuration.max_data = configuration.max_stream_data = window
        chain, configuration.private_key = identity
        configuration.certificate, configuration.certificate_chain = chain[0], chain[1:]
        return PortableMachine(
            _Connection(
                window_bytes=window,
                stream_window_bytes=window,
                is_widened=False,
                configuration=configuration,
                original_destination_connection_id=original_cid,
                retry_source_connection_id=retry_cid,
            ),
            limits,
        )

    def dial(
        self,
        tls: ClientTls,
        limits: TransportLimits,
        alpn: str,
        datagram_bytes: int,
        address: Address,
        now: float,
    ) -> PortableMachine:
        if not load_pem_x509_certificates(tls.authorities_pem):
            raise ValueError("there is no certificate in them")
        configuration = _configuration(limits, (alpn,), datagram_bytes, is_client=True)
        configuration.server_name = tls.server_name
        configuration.cadata = tls.authorities_pem
        quic = _Connection(
            window_bytes=limits.connection_window_bytes,
            stream_window_bytes=limits.stream_window_bytes,
            is_widened=True,
            configuration=configuration,
        )
        quic.connect(address, now)
        return PortableMachine(quic, limits)


def _configuration(
    limits: TransportLimits, protocols: tuple[str, ...], datagram_bytes: int, *, is_client: bool
) -> QuicConfiguration:
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=list(protocols),
        congestion_control_algorithm="cubic",
        connection_id_length=CID_BYTES,
        idle_timeout=limits.idle_timeout_ms / 1000,
        max_data=limits.connection_window_bytes,
        max_stream_data=limits.stream_window_bytes,
        max_datagram_size=(
            min(datagram_bytes, PACKET_BYTES_MAX) if datagram_bytes > ETHERNET_BYTES else DATAGRAM_BYTES_MIN
        ),
        supported_versions=[QuicProtocolVersion.VERSION_1],
    )


def engine() -> DriverEngine:
    """The portable engine, as `felix.transport.port.engine_named` returns it."""
    return DriverEngine(PortableMachinery())
