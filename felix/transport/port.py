"""The transport port: what Felix asks of a QUIC engine, and what an engine promises.

An application gives a `Handler` and gets a `Connection`. All calls in both directions are synchronous and
happen on the event loop; nothing here blocks. Two engines stand behind the port (`engine_named`): `qh3`, the
native default, and `aioquic`, the portable one. The wire is standard QUIC version 1 (RFC 9000, RFC 9001), so
each speaks with the other.

Invariants that every engine keeps:

- `connected` comes first, and only after the TLS 1.3 handshake and the ALPN check succeeded. A connection
  that fails before has no callback at all on a server; on a client `connect` raises. 0-RTT is never used.
- `closed` comes exactly once and last. After it, `send` and its siblings raise `UnavailableError`.
- Stream data is in order, without gaps and without repeats; `end` is true once, with the last piece, which
  may be empty.
- What `send` was given leaves at the end of the same event loop iteration, as far as the peer's flow control and the
  congestion window reach. The rest is the backlog: the application asks `backlog_bytes`, stops above
  `TransportLimits.backlog_high_bytes`, and goes on when `drained` is called.
- A handler that raises ends its own connection (code `INTERNAL`), never another one.

Neither engine lets the application hold back the receive window: the windows below bound what one peer can
have in flight, and credit in Felix's own frames bounds what it may send at all.

A connection that a server accepts is a *stranger* until the application calls `admit`. What strangers cost is bounded in
bytes on the wire, where nothing escapes the count (fragments, far offsets, handshake messages, repeats), per connection and
together, and in number, per address and together. Where there are too many, the oldest of the address with the most goes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final, Literal, Protocol

import msgspec

from felix.collector import collector_paused
from felix.errors import Code, RequestError, UnavailableError
from felix.extras import SDK, install_command
from felix.transport.udp import DatagramPath

ALPN: Final = "felix/1"
"""The protocol name that both ends must agree on in the TLS handshake (RFC 7301)."""

CONNECT_TIMEOUT_S: Final = 10.0
"""How long `Engine.connect` waits for a handshake: several retransmissions on a slow path."""

ENGINE_VARIABLE: Final = "FELIX_QUIC_ENGINE"
"""The environment variable that names the engine where the configuration does not."""

_ENGINE_MODULES: Final = {"qh3": "felix.transport.native", "aioquic": "felix.transport.portable"}

ENGINE_NAMES: Final = tuple(_ENGINE_MODULES)
"""Names that `engine_named` knows, the default first."""

EngineName = Literal["", "qh3", "aioquic"]
"""As a configuration says it; empty where it leaves it open."""

DATAGRAM_BYTES_MIN: Final = 1200
"""The smallest datagram that every QUIC path must carry (RFC 9000, section 14)."""

UDP_PAYLOAD_BYTES_MAX: Final = 65_507
"""What an IPv4 UDP datagram can carry at most."""


class NobodyListensError(UnavailableError):
    """The kernel was told (ICMP) that no process has the address: there is no point in waiting for an answer."""


class ServerTls(msgspec.Struct, frozen=True):
    """A server's certificate chain (leaf first) and the leaf's private key, both PEM, the key unencrypted."""

    chain_pem: bytes
    key_pem: bytes

    def __repr__(self) -> str:
        return "ServerTls(chain_pem=…, key_pem=…)"


class ClientTls(msgspec.Struct, frozen=True):
    """Whom a client trusts, and whom it expects: authorities as PEM, and the DNS name in the certificate."""

    authorities_pem: bytes
    server_name: str

    def __post_init__(self) -> None:
        # Without a name an engine may take whatever name the certificate has.
        if not self.server_name:
            raise RequestError(
                "A connection needs the name of the server that it expects; it is empty.",
                code=Code.NAME_INVALID,
            )


class TransportLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Every bound of the transport, with its reason. Bytes, milliseconds and counts, as the names say."""

    idle_timeout_ms: int = 30_000
    """A connection on which nothing arrived for this long is over: long enough for a slow path, short enough
    that a vanished peer does not hold its place for minutes."""

    keepalive_ms: int = 10_000
    """A connection that sent nothing for this long sends a PING, so that an idle one stays up and a dead peer
    is noticed: three tries within the idle timeout. 0: none."""

    handshake_timeout_ms: int = 10_000
    """A handshake that is not complete by then is dropped by the server, so that half-open ones do not add up."""

    stream_window_bytes: int = 8 * 1024 * 1024
    """What one stream may have in flight towards us: a fast path's bandwidth times its delay."""

    connection_window_bytes: int = 16 * 1024 * 1024
    """What all streams of one connection may have in flight towards us together."""

    streams_max: int = 100
    """Streams that a peer may have open at once, per direction kind. At most 100: what both engines offer."""

    connections_max: int = 4096
    """Connections of one listener. One more is told so (close code LIMIT_SESSIONS, with a reason) and closed."""

    handshakes_pending_max: int = 256
    """Strangers of one listener: connections whose handshake is under way, or whose application has not admitted them; each
    costs a signature and 50 to 90 KiB. From half of it on, a client must prove its address first (Retry, RFC 9000, section
    8.1.2); at the limit the oldest stranger of the address with the most of them is sent away."""

    handshakes_per_address_max: int = 64
    """The same, of one IPv4 address or one IPv6 /64: a quarter, so that no one address has the most of it."""

    stranger_bytes_max: int = 64 * 1024
    """Bytes on the wire that a stranger may send, in all, and its receive window where the engine can raise one later: a
    handshake with Felix's proof takes below 10 KiB, the longest certificate chain and repeats included below 40."""

    strangers_bytes_max: int = 2 * 1024 * 1024
    """The same, of all strangers together; beyond it the one that sent the most is sent away. Fragments of a stream cost an
    engine up to 12 times their bytes on the wire (measured), so these cost below 24 MiB."""

    backlog_high_bytes: int = 4 * 1024 * 1024
    """From here on the application should stop sending; above a fast path's congestion window."""

    backlog_low_bytes: int = 1024 * 1024
    """`drained` is called once the backlog fell to this: enough left that the path does not run dry."""

    datagram_bytes_max: int = 1472
    """The largest UDP payload on a path to another machine: Ethernet's 1,500 less IPv4 and UDP headers. The native
    engine's client starts at 1,280 and probes up to this where it is 1,472 or more (RFC 8899); its server, and the
    portable engine, do not probe and stay at 1,280 and 1,200."""

    datagram_loopback_bytes_max: int = 16 * 1024
    """The UDP payload used where the peer is this machine itself, whose path cannot be smaller than the loopback
    interface says; larger datagrams cost less per byte."""

    socket_buffer_bytes: int = 8 * 1024 * 1024
    """Asked of the kernel for each UDP socket, both ways; it may grant less (`net.core.rmem_max`)."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("idle_timeout_ms", 10, 24 * 3600 * 1000),
            ("keepalive_ms", 0, 24 * 3600 * 1000),
            ("handshake_timeout_ms", 10, 24 * 3600 * 1000),
            ("stream_window_bytes", 1024, 1 << 40),
            ("connection_window_bytes", 1024, 1 << 40),
            ("streams_max", 1, 100),
            ("connections_max", 1, 1 << 20),
            ("handshakes_pending_max", 1, 1 << 20),
            ("handshakes_per_address_max", 1, 1 << 20),
            ("stranger_bytes_max", 8 * 1024, 1 << 30),
            ("strangers_bytes_max", 8 * 1024, 1 << 40),
            ("backlog_high_bytes", 1, 1 << 40),
            ("backlog_low_bytes", 0, 1 << 40),
            ("datagram_bytes_max", DATAGRAM_BYTES_MIN, UDP_PAYLOAD_BYTES_MAX),
            ("datagram_loopback_bytes_max", DATAGRAM_BYTES_MIN, UDP_PAYLOAD_BYTES_MAX),
            ("socket_buffer_bytes", 1024, 1 << 30),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise RequestError(
                    f"The transport limit {name} is {value}; it must be from {low} to {high}.",
                    code=Code.CONFIG_INVALID,
                )
        if self.backlog_low_bytes >= self.backlog_high_bytes:
            raise RequestError(
                f"The transport limit backlog_low_bytes ({self.backlog_low_bytes}) must be below "
                f"backlog_high_bytes ({self.backlog_high_bytes}).",
                code=Code.CONFIG_INVALID,
            )


class Connection(Protocol):
    """One QUIC connection, as the application uses it. Not safe to use from another thread."""

    @property
    def peer_address(self) -> tuple[str, int]:
        """Numeric host and port of the peer, as last validated by the engine."""

    @property
    def server_name(self) -> str:
        """On a client: the name that TLS verified in the server's certificate. On a server: empty."""

    @property
    def is_client(self) -> bool: ...

    @property
    def engine_name(self) -> str: ...

    @property
    def is_closed(self) -> bool:
        """True from `close` or the peer's close on."""

    @property
    def heard_at(self) -> float:
        """When the peer's last datagram came, in seconds of the monotonic clock."""

    @property
    def server_leaf_sha256(self) -> bytes:
        """SHA-256 of the certificate (DER) that the server of this connection showed in its handshake, on both ends."""

    def admit(self, bytes_max: int = 0) -> None:
        """On a server: the application knows its peer, which is no stranger from now on. With 0 it has the full windows and
        may send without bound; else it keeps the stranger's window, and the connection ends (LIMIT_MEMORY) once it has sent
        more than `bytes_max` bytes in all. May be called again; on a client, and once closed, it does nothing."""

    def open_stream(self, *, bidirectional: bool) -> int:
        """The id of a new stream; the peer learns of it with its first data. Raises UnavailableError when closed,
        or when the peer's limit of open streams is reached."""

    def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """Queue bytes; they leave at the end of this event loop iteration. `end`: nothing follows on this stream.

        Any contiguous buffer will do; it must not change before the turn ends."""

    def will_send(self) -> None:
        """Whoever calls this has a callback scheduled (`call_soon`) that will `send`. What is about to leave waits for it, one event loop
        iteration at most, and leaves with it. Optional: it saves an iteration, and datagrams."""

    def backlog_bytes(self) -> int:
        """Bytes given to `send` that were not yet transmitted for the first time."""

    def reset_stream(self, stream_id: int, code: int) -> None:
        """Give up sending on a stream; the peer's handler gets `stream_reset`. Queued bytes are dropped."""

    def close(self, code: int = 0, reason: str = "") -> None:
        """End the connection and tell the peer why. What was queued before leaves as far as the congestion window
        reaches; the backlog beyond is dropped, so an orderly end is agreed on in the application's frames first."""

    async def wait_closed(self) -> None:
        """Return once the handler's `closed` was called."""


class Handler(Protocol):
    """What the application does with one connection. One object per connection; calls come on the event loop."""

    def connected(self, connection: Connection) -> None:
        """The handshake is complete; streams can be opened."""

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        """The next bytes of a stream, opened by either side; `end`: no more will come."""

    def stream_reset(self, stream_id: int, code: int) -> None:
        """The peer gave up sending on this stream; no more data will come on it."""

    def drained(self) -> None:
        """The backlog fell to the low-water mark after it had passed the high-water mark."""

    def closed(self, code: int, reason: str) -> None:
        """Exactly once, last. `code` is what either side gave to `close`, or a `felix.errors.Code`: DISCONNECTED
        where the peer fell silent or its address is gone, PROTOCOL where a QUIC rule was broken."""


NO_OTHERS: Final[Mapping[str, Callable[[], Handler]]] = {}
"""A listener that speaks one protocol."""


class Listener(Protocol):
    """A bound UDP socket that accepts connections."""

    @property
    def address(self) -> tuple[str, int]:
        """Numeric host and the port in use (the real one where 0 was asked)."""

    @property
    def connection_count(self) -> int:
        """Connections with a complete handshake, not yet closed."""

    @property
    def handshake_count(self) -> int:
        """Handshakes under way."""

    @property
    def stranger_count(self) -> int:
        """Connections that are not admitted, those whose handshake is under way included."""

    @property
    def stranger_bytes(self) -> int:
        """What they have sent, in bytes on the wire."""

    @property
    def strangers_evicted(self) -> int:
        """How many were sent away, since the start, because there were too many or they sent too much."""

    @property
    def intake_bytes(self) -> int:
        """Read from the socket, and kept until their connections' next round."""

    @property
    def intake_dropped_bytes(self) -> int:
        """Dropped since the start, because the intake was full; QUIC sends them again."""

    def renew(self, tls: ServerTls) -> None:
        """Use another certificate for connections from now on; those that exist stay. Raises RequestError where
        the certificate or key cannot be read, and then keeps the old one."""

    async def close(self, reason: str = "") -> None:
        """Stop accepting, close every connection (code SHUTTING_DOWN), release the port. Idempotent."""


class Engine(Protocol):
    """A QUIC implementation."""

    @property
    def name(self) -> str: ...

    async def listen(
        self,
        host: str,
        port: int,
        tls: ServerTls,
        make_handler: Callable[[], Handler],
        limits: TransportLimits = ...,
        alpn: str = ALPN,
        others: Mapping[str, Callable[[], Handler]] = NO_OTHERS,
    ) -> Listener:
        """Bind and accept. `others`: who handles connections that speak another protocol on the same port, by its name. Raises RequestError where the address cannot be used (in use, not ours, no right), or
        the certificate or key cannot be read."""

    async def connect(
        self,
        host: str,
        port: int,
        tls: ClientTls,
        handler: Handler,
        limits: TransportLimits = ...,
        alpn: str = ALPN,
        timeout: float = CONNECT_TIMEOUT_S,  # noqa: ASYNC109 - the sentence of the error says what was tried
        path: DatagramPath | None = None,
    ) -> Connection:
        """A connection whose handshake is complete; `handler.connected` was called before this returns. `path`: what datagrams go
        through; None: a socket. The connection closes it when it ends, or cannot be made.

        Raises UnavailableError where nobody answers within `timeout` seconds or the peer refuses for now,
        RequestError (IDENTITY_REFUSED, IDENTITY_EXPIRED) where the server's certificate is not the expected one,
        ProtocolError (VERSION_UNSUPPORTED) where the peer speaks no common ALPN or QUIC version.
        """


def engine_named(name: str | None = None) -> Engine:
    """The engine of that name; None: the one in `FELIX_QUIC_ENGINE`, else the native one."""
    chosen = name or os.environ.get(ENGINE_VARIABLE, "") or ENGINE_NAMES[0]
    module = _ENGINE_MODULES.get(chosen)
    if module is not None:
        # Imported here, by name: an application that uses one engine does not load the other.
        try:
            with collector_paused():
                engine: Engine = import_module(module).engine()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != chosen:
                raise
            raise RequestError(
                f"The QUIC engine {chosen!r} is not installed.",
                code=Code.CONFIG_INVALID,
                hint=install_command(SDK, "portable") if chosen == "aioquic" else "pip install 'qh3>=2.1,<3'",
            ) from error
        return engine
    source = "asked for" if name else f"named by {ENGINE_VARIABLE}"
    raise RequestError(
        f"There is no QUIC engine {chosen!r}, {source}.",
        code=Code.CONFIG_INVALID,
        hint=f"Use one of: {', '.join(ENGINE_NAMES)}.",
    )
