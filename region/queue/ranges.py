"""Which offsets of a shard are done: everything below a floor, and ranges above it. Pure.

Invariants: ranges are sorted, not empty, do not touch each other and begin above the floor; the floor never goes down.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class DoneRanges:
    """Add-only. A range costs two numbers; there is at most one more of them than there are offsets between them."""

    __slots__ = ("_ends", "_starts", "floor")

    def __init__(self, floor: int = 0, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.floor = floor
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def __contains__(self, offset: int) -> bool:
        if offset < self.floor:
            return True
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._ends[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The ranges above the floor, as start and end."""
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __len__(self) -> int:
        """Ranges above the floor."""
        return len(self._starts)

    @property
    def above(self) -> int:
        """Offsets that are done above the floor."""
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        """Offsets from `start` to before `end` are done."""
        if start <= self.floor:
            if end > self.floor:
                self._raise(end)
            return
        if start >= end:
            return
        # The ranges that the new one touches become one with it.
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def _raise(self, floor: int) -> None:
        count = bisect_right(self._starts, floor)
        if count:
            floor = max(floor, self._ends[count - 1])
            del self._starts[:count]
            del self._ends[:count]
        self.floor = floor

    def end_of(self, offset: int) -> int:
        """The first offset at or above `offset` that is not done."""
        if offset < self.floor:
            offset = self.floor
        at = bisect_right(self._starts, offset) - 1
        return self._ends[at] if at >= 0 and offset < self._ends[at] else offset

    def start_after(self, offset: int) -> int | None:
        """Where the next range above `offset`, which is not done, begins."""
        at = bisect_right(self._starts, offset)
        return self._starts[at] if at < len(self._starts) else None
