"""The native engine: qh3, whose packet core, TLS and recovery are compiled.

Key exchange: offers X25519MLKEM768 first, the hybrid of X25519 and ML-KEM-768, and uses it with any peer that
has it, so between two native ends what is recorded today stays closed to a quantum computer later.

Certificates: verified by the engine's compiled web PKI verifier against the given authorities alone.
Only the driver calls these.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any, Final

import msgspec
from qh3._hazmat import Buffer
from qh3.quic import events
from qh3.quic.configuration import QuicConfiguration
from qh3.quic.connection import QuicConnection, QuicConnectionError
from qh3.quic.packet import (
    QuicErrorCode,
    QuicTransportParameters,
    pull_quic_transport_parameters,
    push_quic_transport_parameters,
)
from qh3.quic.tls_bridge import QuicTlsBridgeError
from qh3.tls import AlertDescription, ExtensionType, SignatureAlgorithm, load_pem_x509_certificates

from felix.errors import Code, UnavailableError
from felix.runtime.real import REAL
from felix.transport.driver import DriverEngine
from felix.transport.ending import MachineClosed
from felix.transport.machine import EventTypes, ServerIdentity, Transmission
from felix.transport.packet import CID_BYTES
from felix.transport.port import DATAGRAM_BYTES_MIN, ClientTls, ServerTls, TransportLimits
from felix.transport.udp import Address

NAME: Final = "qh3"

PROBED_BYTES_MAX: Final = 1472
"""The largest datagram that the engine probes for, and that its client admits to receive unless told otherwise."""

START_BYTES: Final = 1280
"""What the engine sends before it has probed a path (IPv6's smallest link)."""

WAIT_FOR_PEER_S: Final = 0.01
"""How soon a connection tries again that may not send more before its peer proved its address."""

PACED_S_MAX: Final = 0.1
"""A wait of the pacer that is longer than this is not skipped: it means that almost nothing may be in flight."""

_NO_ROOM: Final = "packet builder capacity exhausted"

_TYPES: Final = EventTypes(
    stream_data=events.StreamDataReceived,
    stream_reset=events.StreamReset,
    stop_sending=events.StopSendingReceived,
    handshake_completed=events.HandshakeCompleted,
    cid_issued=events.ConnectionIdIssued,
    cid_retired=events.ConnectionIdRetired,
    terminated=events.ConnectionTerminated,
)

_SIGNATURES: Final = [
    int(algorithm)
    for algorithm in (
        SignatureAlgorithm.ED25519,
        SignatureAlgorithm.ECDSA_SECP256R1_SHA256,
        SignatureAlgorithm.ECDSA_SECP384R1_SHA384,
        SignatureAlgorithm.RSA_PSS_RSAE_SHA256,
        SignatureAlgorithm.RSA_PSS_RSAE_SHA384,
    )
]
"""What a server may sign the handshake with; the engine's own list leaves Ed25519 out."""

# The engine warns about every peer that closes; the driver hands the same to the handler.
if logging.getLogger("quic").level == logging.NOTSET:
    logging.getLogger("quic").setLevel(logging.ERROR)


class _AfterHandshake:
    """Stands where a server's TLS stood, which holds 11 KiB, a quarter of an idle session, and has no more to do: packets are sealed by the
    core. A client has no message for it after the handshake (RFC 9001, sections 4.1.3 and 6): one that sends some is sent away,
    as TLS itself would.
    """

    handshake_complete = True

    def receive_crypto(self, *_: object, **__: object) -> None:
        raise QuicTlsBridgeError(
            QuicErrorCode.CRYPTO_ERROR + int(AlertDescription.unexpected_message),
            "a handshake message after the handshake",
        )


_AFTER_HANDSHAKE: Final[Any] = _AfterHandshake()


class _Connection(QuicConnection):
    """The engine's connection, with three things put right, and its TLS let go where it is no longer needed.

    - The engine's client always announces that it takes 1,472 bytes, so that a server could never send it more,
      even over loopback. Between two ends of one machine that halves the throughput.
    - Where what may be sent to an unproven address (RFC 9000, section 8.1) is less than the next packet, the
      packet core raises, and what it built before in the same pass is lost. That is a wait for the peer,
      no failure: aioquic's client, whose first datagram is padded outside of its packet, meets it every time.
    - Where a handshake has failed and more of it comes in the next packet, the engine forgets why it failed. A refused
      certificate would then look like a broken peer; so the first cause stays.
    """

    _cause: Any = None

    @property
    def _close_event(self) -> Any:
        return self._cause

    @_close_event.setter
    def _close_event(self, event: Any) -> None:
        self._cause = self._cause or event

    def _create_tls(self, remote_source_cid: bytes | None) -> Any:
        bridge = super()._create_tls(remote_source_cid)
        size = self.configuration.max_datagram_size
        if self.configuration.is_client and size > PROBED_BYTES_MAX:
            bridge.tls.handshake_extensions = [
                (
                    kind,
                    _with_payload_bytes(value, size)
                    if kind == ExtensionType.QUIC_TRANSPORT_PARAMETERS
                    else value,
                )
                for kind, value in bridge.tls.handshake_extensions
            ]
        return bridge

    def _drain_tls(self) -> None:
        super()._drain_tls()
        if self._handshake_complete and not self.configuration.is_client:
            # It and its context refer to each other.
            vars(self._tls).clear()
            self._tls = _AFTER_HANDSHAKE
            # The packet core has taken them; they were kept to be compared with what TLS would say next.
            self._applied_transport_parameters = None

    def release(self) -> None:
        """As `felix.transport.machine.Machine`: TLS refers to itself and to the connection."""
        if self._tls is not None:
            vars(self._tls).clear()
        vars(self).clear()

    @property
    def core(self) -> Any:
        """The packet core; None on a server until its first packet was read."""
        return self._core

    @property
    def is_up(self) -> bool:
        """The handshake is complete: what is written goes to the core at once."""
        return bool(self._handshake_complete)

    def poll(self, now: float, out: list[tuple[bytes, Any]]) -> bool:
        """Append every datagram that may leave at `now`; whether there was one."""
        assert self._core is not None
        poll = self._core.poll_transmit
        before = len(out)
        try:
            while (datagram := poll(now)) is not None:
                out.append((datagram[0], datagram[1]))
            self.waits_for_peer = False
        except RuntimeError as error:
            if _NO_ROOM not in str(error):
                raise
            self.waits_for_peer = True
        return len(out) > before

    waits_for_peer = False


def _with_payload_bytes(encoded: bytes, size: int) -> bytes:
    """Transport parameters with another `max_udp_payload_size` (RFC 9000, section 18.2)."""
    parameters: QuicTransportParameters = pull_quic_transport_parameters(Buffer(data=encoded))
    parameters.max_udp_payload_size = size
    buffer = Buffer(capacity=len(encoded) + 64)
    push_quic_transport_parameters(buffer, parameters)
    return bytes(buffer.data)


class NativeMachine:
    """`felix.transport.machine.Machine` over a qh3 connection.

    Over loopback the engine's pacer is skipped. It spreads a congestion window over a round trip, to spare queues in
    the network; there are none, and with large datagrams and the short wakes of an event loop it would hold each
    message of a fresh connection for milliseconds. Skipping works through the clock that the engine sees: it runs
    ahead of ours by what was skipped, so that round trips, measured in it, stay true.
    """

    __slots__ = ("_ahead", "_has_unsent", "_is_paced", "_quic", "_send", "events", "is_pacing", "next_event")

    def __init__(self, quic: _Connection, *, is_paced: bool) -> None:
        self._quic = quic
        self._is_paced = is_paced
        self._ahead = 0.0
        self._has_unsent = False
        """Something was written that was not seen to leave. Asking the core costs more than most transmits, which have nothing to say."""
        self.is_pacing = False
        self.events = _TYPES
        # Bound once: these run for every transmit.
        self.next_event = quic.next_event
        self._send = quic.send_stream_data

    @property
    def first_cid(self) -> bytes:
        return bytes(self._quic.host_cid)

    def receive(self, data: bytes, segment_bytes: int, address: Address, now: float) -> None:
        if len(data) <= segment_bytes:
            self._quic.receive_many_datagrams([data], address, now + self._ahead)
        else:
            self._quic.receive_gro_buffer(data, segment_bytes, address, now + self._ahead)

    def write(self, stream_id: int, data: bytes, end: bool) -> None:
        self._has_unsent = True
        self._send(stream_id, data, end)

    def unsent_bytes(self) -> int:
        return self._quic.get_send_buffer_size() if self._has_unsent else 0

    def transmit(self, now: float) -> Transmission:
        quic = self._quic
        core = quic.core
        out: list[tuple[bytes, Address]] = []
        if core is None:
            return out, None
        now += self._ahead
        quic.poll(now, out)
        if self._has_unsent and quic.is_up:
            self._has_unsent = quic.get_send_buffer_size() > 0
        timer = core.get_timer()
        if not self._is_paced:
            # An acknowledgement that is due hides the pacer's timer while stream data waits.
            while (
                timer is not None
                and (
                    (is_pacer := timer[0] == "pacing")
                    or (
                        timer[0] == "ack_application" and self._has_unsent and core.get_send_buffer_size(None)
                    )
                )
                and timer[1] - now <= PACED_S_MAX
            ):
                skipped = max(0.0, timer[1] - now) + 1e-6
                self._ahead += skipped
                now += skipped
                has_sent = quic.poll(now, out)
                timer = core.get_timer()
                if is_pacer and not has_sent:
                    break
        return out, self._deadline_of(timer)

    def deadline(self) -> float | None:
        core = self._quic.core
        return None if core is None else self._deadline_of(core.get_timer())

    def _deadline_of(self, timer: tuple[str, float] | None) -> float | None:
        """In our clock, of the core's next timer."""
        if timer is None:
            return None
        self.is_pacing = timer[0] == "pacing"
        at = timer[1] - self._ahead
        if self._quic.waits_for_peer:
            # Its own timer is for now, again and again; the peer's answer is what it waits for.
            at = max(at, REAL.clock.monotonic() + WAIT_FOR_PEER_S)
        return at

    def handle_deadline(self, now: float) -> None:
        self._quic.handle_timer(now + self._ahead)

    def next_stream_id(self, bidirectional: bool) -> int:
        try:
            return int(self._quic._open_stream(is_unidirectional=not bidirectional))
        except ValueError as error:
            raise UnavailableError(
                f"The peer allows no further stream now: {error}.",
                code=Code.LIMIT_SUBSCRIPTIONS,
                hint="End a stream first.",
            ) from error
        except QuicConnectionError as error:
            # Closed already; the event that says so is still to come.
            raise UnavailableError(
                f"The connection is closed: {error}.", code=Code.DISCONNECTED, hint="Connect again."
            ) from error

    def reset(self, stream_id: int, code: int) -> None:
        self._quic.reset_stream(stream_id, code)

    def ping(self) -> None:
        self._quic.send_ping(0)

    def close(self, code: int, frame_type: int | None, reason: str) -> None:
        self._quic.close(code, frame_type, reason)

    def closing(self) -> MachineClosed | None:
        event = self._quic._close_event
        if event is None:
            return None
        return MachineClosed(int(event.error_code), event.frame_type, event.reason_phrase)

    def admit(self) -> None:
        """Streams that nobody has opened cost this engine nothing: a session refuses them before the proof."""

    def widen(self) -> None:
        """The packet core's windows are those of its beginning; what a stranger may send is counted by the driver alone."""

    def peer_chain_der(self) -> list[bytes]:
        leaf = self._quic.get_peercert()
        if leaf is None:
            return []
        return [bytes(c.public_bytes()) for c in (leaf, *self._quic.get_issuercerts())]

    def release(self) -> None:
        self._quic.release()


class _Certified:
    """A server's certificate and key, and the configuration that its connections share: the engine changes nothing in it."""

    def __init__(self, certificate: Any, chain: Any, key: Any) -> None:
        self._certificate, self._chain, self._key = certificate, chain, key
        self._made: tuple[object, QuicConfiguration] | None = None

    def configuration(
        self, limits: TransportLimits, protocols: tuple[str, ...], datagram_bytes: int
    ) -> QuicConfiguration:
        """With these limits; made anew only where they differ from the last connection's."""
        asked = (limits, protocols, datagram_bytes)
        if self._made is None or self._made[0] != asked:
            made = _configuration(limits, protocols, datagram_bytes, is_client=False)
            made.certificate, made.certificate_chain, made.private_key = (
                self._certificate,
                self._chain,
                self._key,
            )
            self._made = asked, made
        return self._made[1]


class NativeMachinery(msgspec.Struct, frozen=True):
    """`felix.transport.machine.Machinery` for qh3."""

    name: str = NAME

    def read_identity(self, tls: ServerTls) -> ServerIdentity:
        configuration = QuicConfiguration(is_client=False)
        configuration.load_cert_chain(tls.chain_pem, tls.key_pem)
        leaf = configuration.certificate
        assert leaf is not None
        return ServerIdentity(
            _Certified(leaf, configuration.certificate_chain, configuration.private_key),
            hashlib.sha256(bytes(leaf.public_bytes())).digest(),
        )

    def accept(
        self,
        identity: Any,
        limits: TransportLimits,
        protocols: tuple[str, ...],
        datagram_bytes: int,
        original_cid: bytes,
        retry_cid: bytes | None,
    ) -> NativeMachine:
        return NativeMachine(
            _Connection(
                configuration=identity.configuration(limits, protocols, datagram_bytes),
                original_destination_connection_id=original_cid,
                retry_source_connection_id=retry_cid,
            ),
            is_paced=datagram_bytes <= PROBED_BYTES_MAX,
        )

    def dial(
        self,
        tls: ClientTls,
        limits: TransportLimits,
        alpn: str,
        datagram_bytes: int,
        address: Address,
        now: float,
    ) -> NativeMachine:
        if not load_pem_x509_certificates(tls.authorities_pem):
            raise ValueError("there is no certificate in them")
        configuration = _configuration(limits, (alpn,), datagram_bytes, is_client=True)
        configuration.server_name = tls.server_name
        configuration.cadata = tls.authorities_pem
        configuration.signature_algorithms = _SIGNATURES
        quic = _Connection(configuration=configuration)
        quic.connect(address, now)
        return NativeMachine(quic, is_paced=datagram_bytes <= PROBED_BYTES_MAX)


def _configuration(
    limits: TransportLimits, protocols: tuple[str, ...], datagram_bytes: int, *, is_client: bool
) -> QuicConfiguration:
    jumbo = datagram_bytes > PROBED_BYTES_MAX
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=list(protocols),
        connection_id_length=CID_BYTES,
        idle_timeout=limits.idle_timeout_ms / 1000,
        max_data=limits.connection_window_bytes,
        max_stream_data=limits.stream_window_bytes,
        # On a real path: start small; the engine probes up to what the path carries (RFC 8899).
        max_datagram_size=datagram_bytes
        if jumbo
        else max(DATAGRAM_BYTES_MIN, min(datagram_bytes, START_BYTES)),
        probe_datagram_size=not jumbo and datagram_bytes >= PROBED_BYTES_MAX,
    )


def engine() -> DriverEngine:
    """The native engine, as `felix.transport.port.engine_named` returns it."""
    return DriverEngine(NativeMachinery())
