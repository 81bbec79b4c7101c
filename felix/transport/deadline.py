"""The timer of one QUIC machine: wakes at the deadline that it names after each transmit.

On the event loop. Only felix.transport.driver_connection uses it.

Invariant: of the timers that are set, each is earlier than the one set before it, and none is later than the deadline, but for what `SLEEP_S` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

SLEEP_S: Final = 0.001
"""The shortest sleep. Loops count in milliseconds, and what has a deadline, acknowledgements and losses, bears one."""

SPIN_S: Final = 0.0002
"""A deadline of the pacer this near is awaited by iterating the loop: a paced sender that slept a millisecond for each burst would be slow."""

SPINS_MAX: Final = 256
"""Iterations in a row that send nothing; after so many the loop sleeps, whatever the engine's timer says."""

SET_MAX: Final = 3
"""Timers set at once: for an acknowledgement, for a loss, for the idle timeout."""


class DeadlineTimer:
    """Calls `fire` once the deadline is reached.

    Deadlines come and go with every datagram: an acknowledgement in a millisecond, a loss in 30, the idle timeout in 30 seconds, and again.
    Timers are not moved with them. One that fires before the deadline, since it got later, sees so and goes on; and where a deadline gets nearer, the
    timers for what is further ahead stay set, so that the next one of theirs costs nothing.
    """

    __slots__ = ("_clock", "_deadline", "_fire", "_is_pacing", "_loop", "_set", "spins")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float], fire: Callable[[float], None]
    ) -> None:
        """`fire` gets the time."""
        self._loop = loop
        self._clock = clock
        self._fire: Callable[[float], None] | None = fire
        self._deadline: float | None = None
        self._is_pacing = False
        self._set: list[tuple[float, asyncio.Handle]] = []
        """With the time of each, the earliest last."""
        self.spins = 0
        """Iterations in a row that sent nothing; whoever sends something puts it back to 0."""

    def arm(self, deadline: float | None, now: float, *, is_pacing: bool) -> None:
        """Wake at `deadline`, and at no earlier one; None: there is none. `is_pacing`: it may be the pacer's."""
        self._deadline = deadline
        self._is_pacing = is_pacing
        if deadline is None or self._fire is None:
            return
        is_near = is_pacing and deadline - now <= SPIN_S and self.spins < SPINS_MAX
        at = deadline if is_near else max(deadline, now + SLEEP_S)
        timers = self._set
        if timers and timers[-1][0] <= at:
            return
        if len(timers) == SET_MAX:
            timers.pop()[1].cancel()
        handle: asyncio.Handle
        if is_near:
            self.spins += 1
            handle = self._loop.call_soon(self._woken, at)
        else:
            self.spins = 0
            handle = self._loop.call_later(at - now, self._woken, at)
        timers.append((at, handle))

    def end(self) -> None:
        """It fires no more, and lets go of whom it called."""
        self._fire = None
        self._deadline = None
        timers, self._set = self._set, []
        for _, handle in timers:
            handle.cancel()

    def _woken(self, at: float) -> None:
        timers = self._set
        if timers and timers[-1][0] == at:
            timers.pop()
        else:
            # Loops that count in milliseconds may call two of one millisecond in either order.
            self._set = [each for each in timers if each[0] != at]
        if self._deadline is None or self._fire is None:
            return
        now = self._clock()
        if self._deadline > now:
            self.arm(self._deadline, now, is_pacing=self._is_pacing)
        else:
            self._fire(now)
