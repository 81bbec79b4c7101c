"""Correlation ids of one session, and who waits under each.

Invariants:
- an id is in use at most once;
- whoever waits is called once, also by `end`; a watcher as often as its id is refused.

Pure. Used by felix.link alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from felix.errors import FelixError
from felix.frames import AppendedBody
from felix.messages import Answer

CORRELATION_MAX: Final = (1 << 32) - 1


class Pending(Protocol):
    """A caller that waits for the frames of one correlation id."""

    def answered(self, answer: Answer) -> None: ...

    def acknowledged(self, appended: AppendedBody) -> None: ...

    def refused(self, error: FelixError) -> None: ...


class Correlations:
    """Frames that come under an id nobody waits for are ignored."""

    __slots__ = ("_last", "_pending", "_watchers")

    def __init__(self) -> None:
        self._pending: dict[int, Pending] = {}
        self._watchers: dict[int, Callable[[FelixError], None]] = {}
        self._last = 0

    def __bool__(self) -> bool:
        """Whether an answer is outstanding."""
        return bool(self._pending)

    def unused(self) -> int:
        """An id that is nobody's."""
        number = self._last
        while True:
            number = number + 1 if number < CORRELATION_MAX else 1
            if number not in self._pending and number not in self._watchers:
                self._last = number
                return number

    def register(self, pending: Pending) -> int:
        """An id under which `pending` is called, once."""
        number = self.unused()
        self._pending[number] = pending
        return number

    def oldest(self, wanted: Callable[[Pending], bool]) -> int:
        """The id that has waited longest, of those that are `wanted`; 0: there is none."""
        return next((number for number, pending in self._pending.items() if wanted(pending)), 0)

    def forget(self, correlation: int) -> bool:
        """Nobody waits under this one any more; whether it was still to be called."""
        return self._pending.pop(correlation, None) is not None

    def watch(self, refused: Callable[[FelixError], None]) -> int:
        """An id under which any number of refusals may come, until `unwatch`."""
        number = self.unused()
        self._watchers[number] = refused
        return number

    def unwatch(self, correlation: int) -> None:
        self._watchers.pop(correlation, None)

    def acknowledged(self, correlation: int, appended: AppendedBody) -> None:
        waiting = self._pending.pop(correlation, None)
        if waiting is not None:
            waiting.acknowledged(appended)

    def answered(self, correlation: int, answer: Answer) -> None:
        waiting = self._pending.pop(correlation, None)
        if waiting is not None:
            waiting.answered(answer)

    def refused(self, correlation: int, error: FelixError) -> None:
        waiting = self._pending.pop(correlation, None)
        if waiting is not None:
            waiting.refused(error)
        elif correlation in self._watchers:
            self._watchers[correlation](error)

    def end(self) -> list[Pending]:
        """The session is over; those who still waited."""
        pending, self._pending = self._pending, {}
        self._watchers.clear()
        return list(pending.values())
