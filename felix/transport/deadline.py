"""The timer of one QUIC machine: wakes at the deadline that it names after each transmit.

On the event loop. Only felix.transport.driver_connection uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

SPIN_S: Final = 0.0002
"""A deadline this near is awaited by turning the loop: its sleep is a millisecond at least, and a paced sender
that slept that long for each burst would be slow."""

SPINS_MAX: Final = 256
"""Turns in a row that send nothing; after so many the loop sleeps, whatever the engine's timer says."""


class DeadlineTimer:
    """Calls `fire` at the deadline or before; whoever is called looks at the deadline anew."""

    __slots__ = ("_at", "_fire", "_handle", "_loop", "spins")

    def __init__(self, loop: asyncio.AbstractEventLoop, fire: Callable[[], None]) -> None:
        self._loop = loop
        self._fire: Callable[[], None] | None = fire
        self._handle: asyncio.Handle | None = None
        self._at = 0.0
        self.spins = 0
        """Turns in a row that sent nothing; whoever sends something puts it back to 0."""

    def arm(self, deadline: float, now: float) -> None:
        """Wake at `deadline`. A timer that is set for earlier stays: it looks again when it fires, which costs
        less than a cancelled timer per transmit."""
        if self._handle is not None:
            if self._at <= deadline:
                return
            self._handle.cancel()
        self._at = deadline
        delay = deadline - now
        if delay <= SPIN_S and self.spins < SPINS_MAX:
            self.spins += 1
            self._handle = self._loop.call_soon(self._fired)
        else:
            self.spins = 0
            self._handle = self._loop.call_later(max(delay, 0.001), self._fired)

    def end(self) -> None:
        """It fires no more, and lets go of whom it called."""
        self._fire = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fired(self) -> None:
        self._handle = None
        if self._fire is not None:
            self._fire()
