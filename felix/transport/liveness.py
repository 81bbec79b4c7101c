"""Whether a client's server still answers: when to ping it, and when it is gone, well before QUIC's idle timeout.

Pure; times are seconds of one monotonic clock. Only felix.transport.driver_connection uses it.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

LIVENESS_TICK_S: Final = 1.0
"""How often a client looks whether its server still answers."""

UNANSWERED_S: Final = 5.0
"""A server that answers no PING for this long is gone; several retransmissions on a slow path."""

UNANSWERED_AFTER_REFUSAL_S: Final = 1.0
"""The same once its machine said that nobody listens there. The message could be forged, so it is verified."""


class Verdict(Enum):
    """What is to be done about a server now."""

    WAIT = "wait"
    PING = "ping"
    GONE = "gone"


class Liveness:
    """What one client knows of its server. `keepalive_s` 0: silence on a connection that nobody uses is no reason to ping."""

    __slots__ = ("_is_refused", "_keepalive_s", "_pinged_at")

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._pinged_at: float | None = None
        self._is_refused = False

    def pinged(self, now: float) -> None:
        """A PING leaves. The wait is from the first that was not answered."""
        if self._pinged_at is None:
            self._pinged_at = now

    def refused(self) -> Verdict:
        """The server's machine said that nobody listens there."""
        if self._is_refused:
            return Verdict.WAIT
        self._is_refused = True
        return Verdict.PING

    def look(self, now: float, heard_at: float, sent_at: float, late_s: float = 0.0) -> Verdict:
        """Every `LIVENESS_TICK_S`; when something last came and last left. `late_s`: how much later it is than it was to be."""
        if self._pinged_at is not None and heard_at > self._pinged_at:
            self._pinged_at = None
            self._is_refused = False
        if self._pinged_at is not None:
            if late_s >= LIVENESS_TICK_S:
                # This process stood still: that it heard nothing says nothing of the server.
                self._pinged_at += late_s
            allowed = UNANSWERED_AFTER_REFUSAL_S if self._is_refused else UNANSWERED_S
            return Verdict.GONE if now - self._pinged_at >= allowed else Verdict.WAIT
        if (sent_at > heard_at and now - heard_at >= LIVENESS_TICK_S) or (
            self._keepalive_s and now - max(heard_at, sent_at) >= self._keepalive_s
        ):
            return Verdict.PING
        return Verdict.WAIT
