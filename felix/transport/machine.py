"""What a QUIC engine is to the driver: machines without I/O, and the machinery that makes them.

Both engines (felix.transport.native, felix.transport.portable) implement it; felix.transport.driver_connection runs a machine. Nobody else may use it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from felix.transport.ending import MachineClosed
from felix.transport.port import ClientTls, ServerTls, TransportLimits
from felix.transport.udp import Address


class EventTypes(NamedTuple):
    """The engine's event classes. Both engines name their fields alike."""

    stream_data: type[Any]
    stream_reset: type[Any]
    stop_sending: type[Any]
    handshake_completed: type[Any]
    cid_issued: type[Any]
    cid_retired: type[Any]
    terminated: type[Any]


Transmission = tuple[list[tuple[bytes, Address]], float | None]
"""Datagrams that leave now, and when the machine is to be called next, where nothing happens before."""


class Machine(Protocol):
    """A sans-IO QUIC connection. Times are seconds of one monotonic clock."""

    events: EventTypes

    @property
    def is_pacing(self) -> bool:
        """The deadline that was named last may be that of more datagrams, which would have left but for the pacer."""

    @property
    def first_cid(self) -> bytes:
        """The connection id that the peer uses first."""

    def receive(self, data: bytes, segment_bytes: int, address: Address, now: float) -> None: ...
    def transmit(self, now: float) -> Transmission: ...
    def next_event(self) -> Any: ...
    def deadline(self) -> float | None:
        """As the last transmission said, or what it is by what happened since."""

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

    def release(self) -> None:
        """Let go of all that the engine's connection holds; nothing of it is called again. Engines' connections refer to themselves, and
        would keep their memory until Python looks for cycles, which what lies outside of Python never makes it do."""


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
