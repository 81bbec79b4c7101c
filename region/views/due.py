"""The one timer of a view: called when the next thing is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class DueTimer:
    """Calls `tick` at a time in ms; one call at a time, so the callee sets the time of the next call itself. On the event
    loop.
    """

    __slots__ = ("_clock_ms", "_handle", "_least_s", "_most_s", "_tick", "due_ms")

    def __init__(
        self,
        tick: Callable[[], None],
        clock_ms: Callable[[], int],
        *,
        least_s: float = 0.001,
        most_s: float = 3_600.0,
    ) -> None:
        """Not sooner than `least_s` from now, however late it is: what is due may be undoable for a moment. At the latest after
        `most_s`, since clocks are set."""
        self.due_ms = 0
        """What it is armed for; 0 where it is not."""
        self._tick = tick
        self._clock_ms = clock_ms
        self._least_s = least_s
        self._most_s = most_s
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, due_ms: int) -> None:
        """Call at this time, and at no other; 0: not at all."""
        if due_ms == self.due_ms:
            return
        self.cancel()
        if due_ms:
            self.due_ms = due_ms
            delay_s = min(self._most_s, max(self._least_s, (due_ms - self._clock_ms()) / 1000))
            self._handle = asyncio.get_running_loop().call_later(delay_s, self._call)

    def arm_sooner(self, due_ms: int) -> None:
        """Call at this time, or before, where it is armed for a sooner one."""
        if not self.due_ms or due_ms < self.due_ms:
            self.arm(due_ms)

    def cancel(self) -> None:
        """Do not call."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self.due_ms = None, 0

    def _call(self) -> None:
        self._handle, self.due_ms = None, 0
        self._tick()
