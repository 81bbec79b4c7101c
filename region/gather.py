"""Answers that come later, to a call of one part or of many.

Code that makes a durable decision calls `done(None)` once it is durable, or `done(error)` if it never will be. A call that
decides in several places gathers their answers and gives one: the first error, or none.

Invariants: `answer` is called once, after every part that was asked for has been answered, and not before `asked`; parts may
be answered while others are still being asked for. On the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from felix.errors import FelixError

Done = Callable[[FelixError | None], None]


class Gather:
    """The parts of one call: hand each one `part()`, then call `asked`."""

    __slots__ = ("_answer", "_error", "_left")

    def __init__(self, answer: Done) -> None:
        self._answer = answer
        self._left = 1
        self._error: FelixError | None = None

    def part(self) -> Done:
        """What one more part is to call, once."""
        self._left += 1
        return self.done

    def asked(self) -> None:
        """All parts have been asked for. Without any the answer comes now."""
        self.done(None)

    def done(self, error: FelixError | None) -> None:
        """One part is over."""
        self._error = self._error or error
        self._left -= 1
        if not self._left:
            self._answer(self._error)


def ignore(error: FelixError | None) -> None:
    """For a part that no caller waits for: its outcome is reported elsewhere."""


def resolving(future: asyncio.Future[None]) -> Done:
    """A callback that resolves a future, unless its waiter was cancelled."""

    def done(error: FelixError | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    return done


async def awaited(begin: Callable[[Done], None]) -> None:
    """Begin something and wait until it is done. Raises why it is not."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    begin(resolving(future))
    await future
