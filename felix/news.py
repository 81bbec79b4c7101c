"""Waiting, on the event loop, for something that a change brings about.

Invariant: whoever takes `following`, looks, and then waits for it misses no change. One event loop, no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class News:
    """That something has changed."""

    def __init__(self) -> None:
        self.following = asyncio.Event()
        """Set at the next change."""

    def tell(self) -> None:
        """Something has changed: wake all that wait."""
        self.following.set()
        self.following = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds that only a change can bring about. Bound it with a timeout."""
        while not holds():
            await self.following.wait()
