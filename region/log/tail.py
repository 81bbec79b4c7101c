"""Who follows a log's tail, and when they are told. Event loop only.

Invariant: every follower is told of what can be read, or that the shard failed, once per group that was written at most; one's mistake does
not keep the others waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Tail:
    """Of one log. `report` is told of a follower that raises."""

    __slots__ = ("_is_due", "_loop", "_report", "followers")

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[str, Exception], None]) -> None:
        self.followers: list[Callable[[], None]] = []
        self._loop = loop
        self._report = report
        self._is_due = False

    def follow(self, follower: Callable[[], None]) -> Callable[[], None]:
        """Call `follower` each time, until what is returned is called."""
        self.followers.append(follower)

        def end() -> None:
            if follower in self.followers:
                self.followers.remove(follower)

        return end

    def wake(self) -> None:
        """Tell them now."""
        self._is_due = False
        for follower in tuple(self.followers):
            try:
                follower()
            except Exception as error:
                self._report("A follower of the tail failed", error)

    def wake_soon(self) -> None:
        """Tell them in the loop's next iteration, once, however often this is called before."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.wake)
