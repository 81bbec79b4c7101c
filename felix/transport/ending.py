"""Why a QUIC connection ended, in words: what a machine says, as the error or the code and sentence that the application gets.

Pure. Only the driver and the engines use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from felix.errors import Code, FelixError, ProtocolError, UnavailableError

# RFC 9000, section 20.1, and RFC 9001, section 4.8
QUIC_INTERNAL: Final = 0x01
QUIC_CONNECTION_REFUSED: Final = 0x02
QUIC_APPLICATION_ERROR: Final = 0x0C
TLS_ALERTS: Final = 0x100
ALERT_NO_APPLICATION_PROTOCOL: Final = 120
_ALERTS_CERTIFICATE: Final = frozenset((42, 43, 44, 45, 46, 48))
_ALERT_HANDSHAKE_FAILURE: Final = 40


class MachineClosed(NamedTuple):
    """Why a machine ended. `frame_type` None: the application of one side closed it."""

    code: int
    frame_type: int | None
    reason: str


class Expected(NamedTuple):
    """Whom a client meant to reach, and what it knows of the certificate that came: `chain_der` gives it, leaf first."""

    server_name: str
    authorities_pem: bytes
    chain_der: Callable[[], list[bytes]]


def shown(address: Sequence[Any]) -> str:
    """`host:port`, an IPv6 host in brackets."""
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}"


def explain_close(why: MachineClosed, idle_timeout_ms: int) -> tuple[int, str]:
    """The code and reason with which an established connection is over."""
    if why.frame_type is None:
        return why.code, why.reason
    if "idle timeout" in why.reason.lower():
        return (
            Code.DISCONNECTED,
            f"nothing arrived for {idle_timeout_ms / 1000:g} s or the peer's shorter idle timeout",
        )
    if why.code == QUIC_INTERNAL and why.reason:
        return Code.DISCONNECTED, why.reason
    return Code.PROTOCOL, f"QUIC error {int(why.code):#x}: {why.reason or 'no reason given'}"


def explain_handshake(
    why: MachineClosed, peer: str, protocols: tuple[str, ...], expected: Expected | None, now: datetime
) -> FelixError:
    """The error of a handshake that failed. `expected`: None on a server."""
    alert = int(why.code) - TLS_ALERTS
    if why.frame_type is not None and (
        alert == ALERT_NO_APPLICATION_PROTOCOL
        # What the native engine's server says instead.
        or (alert == _ALERT_HANDSHAKE_FAILURE and "alpn" in why.reason.lower())
    ):
        return no_common_protocol(peer, protocols)
    if why.frame_type is not None and alert in _ALERTS_CERTIFICATE and expected is not None:
        from felix.transport.certificate import explain_refusal  # here: it needs all of X.509

        return explain_refusal(
            expected.chain_der(), expected.authorities_pem, expected.server_name, peer, now, why.reason
        )
    if why.frame_type is not None and why.code == QUIC_CONNECTION_REFUSED:
        return UnavailableError(
            f"The server at {peer} refused the connection: {why.reason or 'no reason given'}.",
            code=Code.LIMIT_SESSIONS,
            retry_after_ms=1000,
        )
    if why.frame_type is None or why.code == QUIC_APPLICATION_ERROR:
        return UnavailableError(
            f"The server at {peer} closed the connection during the handshake: {why.reason or 'no reason given'}.",
            code=Code.UNAVAILABLE,
            retry_after_ms=1000,
        )
    if why.code == QUIC_INTERNAL:
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


def no_common_protocol(peer: str, protocols: tuple[str, ...]) -> FelixError:
    """Of a handshake whose ends speak no application protocol in common."""
    return ProtocolError(
        f"The peer at {peer} does not speak {' or '.join(map(repr, protocols))} (TLS application protocol).",
        code=Code.VERSION_UNSUPPORTED,
        hint="Check that the address is a Felix broker's, and that both sides run compatible versions.",
    )


def handshake_late(peer: str, waited_s: float) -> UnavailableError:
    """Of a handshake that was not complete in time."""
    return UnavailableError(
        f"The server at {peer} (UDP) did not complete a handshake within {waited_s:g} s.",
        code=Code.TIMEOUT,
        hint="Check the address, the firewall, and that the broker runs.",
        retry_after_ms=1000,
    )


def connection_closed(peer: str) -> UnavailableError:
    """Of what is asked of a connection that is over."""
    return UnavailableError(
        f"The connection to {peer} is closed.", code=Code.DISCONNECTED, hint="Connect again."
    )
