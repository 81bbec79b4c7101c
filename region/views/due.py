"""The one timer of a view: called when the next thing is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

LOOK_S: Final = 5.0
"""How often an armed timer looks at its clock. Whoever sets a clock right that was behind waits no longer for what is due since, and a look costs microseconds."""


class DueTimer:
    """Calls `tick` at a time in ms; one call at a time, so the callee sets the time of the next call itself. On the event
    loop.
    """

    __slots__ = ("_calls_s", "_clock_ms", "_handle", "_least_s", "_most_s", "_tick", "due_ms")

    def __init__(
        self,
        tick: Callable[[], None],
        clock_ms: Callable[[], int],
        *,
        least_s: float = 0.001,
        most_s: float = 3_600.0,
    ) -> None:
        """Not sooner than `least_s` from now, however late it is: what is due may be undoable for a moment. At the latest after `most_s`, and after as long
        as it was to be when it was armed, since clocks are set: back, or, to be seen within LOOK_S, ahead."""
        self.due_ms = 0
        """What it is armed for; 0 where it is not."""
        self._tick = tick
        self._clock_ms = clock_ms
        self._least_s = least_s
        self._most_s = most_s
        self._handle: asyncio.TimerHandle | None = None
        self._calls_s = 0.0
        """the loop's time at which it calls, wherever the clock is then"""

    def arm(self, due_ms: int) -> None:
        """Call at this time, and at no other; 0: not at all."""
        if due_ms == self.due_ms:
            return
        self.cancel()
        if due_ms:
            self.due_ms = due_ms
            delay_s = min(self._most_s, max(self._least_s, self._left_s()))
            loop = asyncio.get_running_loop()
            self._calls_s = loop.time() + delay_s
            self._handle = loop.call_later(min(delay_s, LOOK_S), self._look)

    def arm_sooner(self, due_ms: int) -> None:
        """Call at this time, or before, where it is armed for a sooner one."""
        if not self.due_ms or due_ms < self.due_ms:
            self.arm(due_ms)

    def cancel(self) -> None:
        """Do not call."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self.due_ms = None, 0

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        left_s = min(self._left_s(), self._calls_s - loop.time())
        if left_s > 0:
            self._handle = loop.call_later(min(left_s, LOOK_S), self._look)
            return
        self._handle, self.due_ms = None, 0
        self._tick()

    def _left_s(self) -> float:
        """By the clock as it is now."""
        return (self.due_ms - self._clock_ms()) / 1000
