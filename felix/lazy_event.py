"""Events that take memory while somebody waits for them: a real one has a queue of 760 bytes, and of many thousands nobody waits for most.

Invariant: whoever waits is woken by the next `set`, whatever follows it. `LazyEvent` is of the event loop, `LazyThreadEvent` of threads. Callers: everybody.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Final

_making: Final = threading.Lock()
"""Of all of them: it is held for an assignment, by those who set one or begin to wait."""


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


class LazyThreadEvent:
    """As `threading.Event` that is set once, for any thread."""

    __slots__ = ("_is_set", "_waited_for")

    def __init__(self) -> None:
        self._is_set = False
        self._waited_for: threading.Event | None = None

    def is_set(self) -> bool:
        """Whether `wait` returns at once."""
        return self._is_set

    def set(self) -> None:
        """Wake all who wait."""
        with _making:
            self._is_set = True
            waited_for, self._waited_for = self._waited_for, None
        if waited_for is not None:
            waited_for.set()

    def wait(self, timeout_s: float) -> bool:
        """Until it is set, or for so many seconds; whether it is."""
        with _making:
            if self._is_set:
                return True
            if self._waited_for is None:
                self._waited_for = threading.Event()
            waited_for = self._waited_for
        return waited_for.wait(timeout_s)
