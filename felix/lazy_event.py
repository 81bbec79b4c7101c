"""An event of asyncio that takes memory while somebody waits for it: a real one has a queue of 760 bytes, and of many thousands nobody waits for most.

Invariant: whoever waits is woken by the next `set`, whatever follows it. On the event loop. Callers: everybody.
"""

from __future__ import annotations

import asyncio


class LazyEvent:
    """As `asyncio.Event`, as far as it goes."""

    __slots__ = ("_is_set", "_waited_for")

    def __init__(self, *, is_set: bool = False) -> None:
        self._is_set = is_set
        self._waited_for: asyncio.Event | None = None

    def is_set(self) -> bool:
        """Whether `wait` returns at once."""
        return self._is_set

    def set(self) -> None:
        """Wake all who wait."""
        self._is_set = True
        if self._waited_for is not None:
            self._waited_for.set()
            self._waited_for = None

    def clear(self) -> None:
        """Whoever waits from now on waits for the next `set`."""
        self._is_set = False

    async def wait(self) -> None:
        """Until it is set."""
        if self._is_set:
            return
        if self._waited_for is None:
            self._waited_for = asyncio.Event()
        await self._waited_for.wait()
