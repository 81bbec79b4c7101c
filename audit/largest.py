"""The largest of many things, and how many others there were: memory is bounded, and no number of small ones hides a large one.

Pure. Callers: audit.accounting, audit.verify.
"""

from __future__ import annotations

from heapq import heappush, heappushpop
from typing import Generic, TypeVar

T = TypeVar("T")


class Largest(Generic[T]):
    """What was added, `most` of it at most. Of equal ones the first stay."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: list[tuple[int, int, T]] = []
        self._added = 0

    def add(self, size: int, each: T) -> None:
        """Take one of this size, in any unit."""
        self._added += 1
        add = heappush if len(self._held) < self._most else heappushpop
        add(self._held, (size, -self._added, each))

    @property
    def left_off(self) -> int:
        """How many were added and are not held."""
        return self._added - len(self._held)

    def in_order(self) -> list[T]:
        """Those that are held, as they were added."""
        return [each for _, _, each in sorted(self._held, key=lambda held: -held[1])]
