"""The portable engine: aioquic, QUIC and TLS 1.3 in readable Python over OpenSSL's primitives.

Key exchange: X25519 and the NIST curves; it has no hybrid post-quantum group, and neither has a connection of
which it is one end. It does not probe paths: to another machine it sends the smallest QUIC datagram.

Certificates: names by service_identity, the chain by OpenSSL, against the given authorities alone.
Only the driver calls these.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicProtocolVersion
from aioquic.tls import load_pem_private_key, load_pem_x509_certificates
from cryptography.hazmat.primitives.serialization import Encoding

from felix.transport.driver import DriverEngine, EventTypes, MachineClosed
from felix.transport.packet import CID_BYTES
from felix.transport.port import DATAGRAM_BYTES_MIN, ClientTls, ServerTls, TransportLimits
from felix.transport.udp import Address

NAME: Final = "aioquic"

ETHERNET_BYTES: Final = 1472
"""Larger than this is meant for loopback alone; up to it, the engine cannot probe and stays at the minimum."""

PACKET_BYTES_MAX: Final = 16_384
"""The largest datagram that the engine can build: it writes a long packet's length in two bytes."""

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


class PortableMachine:
    """`felix.transport.driver.Machine` over an aioquic connection."""

    __slots__ = ("_quic", "_written", "deadline", "events", "handle_deadline", "next_event", "transmit")

    def __init__(self, quic: QuicConnection) -> None:
        self._quic = quic
        self.events = _TYPES
        self._written: set[int] = set()
        """Streams that may hold bytes not yet transmitted."""
        self.deadline = quic.get_timer
        self.handle_deadline = quic.handle_timer
        self.next_event = quic.next_event
        self.transmit = quic.datagrams_to_send

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


@dataclass(frozen=True, slots=True)
class PortableMachinery:
    """`felix.transport.driver.Machinery` for aioquic."""

    name: str = NAME

    def read_identity(self, tls: ServerTls) -> Any:
        return load_pem_x509_certificates(tls.chain_pem), load_pem_private_key(tls.key_pem)

    def accept(
        self,
        identity: Any,
        limits: TransportLimits,
        alpn: str,
        datagram_bytes: int,
        original_cid: bytes,
        retry_cid: bytes | None,
    ) -> PortableMachine:
        configuration = _configuration(limits, alpn, datagram_bytes, is_client=False)
        chain, configuration.private_key = identity
        configuration.certificate, configuration.certificate_chain = chain[0], chain[1:]
        return PortableMachine(
            QuicConnection(
                configuration=configuration,
                original_destination_connection_id=original_cid,
                retry_source_connection_id=retry_cid,
            )
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
        configuration = _configuration(limits, alpn, datagram_bytes, is_client=True)
        configuration.server_name = tls.server_name
        configuration.cadata = tls.authorities_pem
        quic = QuicConnection(configuration=configuration)
        quic.connect(address, now)
        return PortableMachine(quic)


def _configuration(
    limits: TransportLimits, alpn: str, datagram_bytes: int, *, is_client: bool
) -> QuicConfiguration:
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=[alpn],
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
