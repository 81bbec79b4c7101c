"""RangeSet: which offsets of a shard are acknowledged, done, skipped or awaited, as ranges instead of one by one.

A range is [first, next). On the wire and in journals a set stands as a flat list: first, next, first, next, rising. Pure.

Invariants: ranges are disjoint, not adjacent, not empty, and in order; `count` is the number of offsets in them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from felix.errors import Code, ProtocolError


class RangeSet:
    """A set of offsets. Adding and removing a range costs a binary search and the moving of what lies behind."""

    __slots__ = ("_edges", "count")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._edges: list[int] = []
        self.count = 0
        for first, following in ranges:
            self.add(first, following)

    def __bool__(self) -> bool:
        return bool(self._edges)

    def __len__(self) -> int:
        """How many ranges."""
        return len(self._edges) // 2

    def __iter__(self) -> Iterator[tuple[int, int]]:
        edges = self._edges
        return zip(edges[::2], edges[1::2], strict=True)

    def __contains__(self, offset: int) -> bool:
        return bisect_right(self._edges, offset) % 2 == 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeSet) and self._edges == other._edges

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RangeSet({list(self)})"

    @property
    def first(self) -> int:
        """The lowest offset; not asked of an empty set."""
        return self._edges[0]

    @property
    def next(self) -> int:
        """The offset after the highest; not asked of an empty set."""
        return self._edges[-1]

    def add(self, first: int, following: int) -> None:
        """Put [first, following) in."""
        if first >= following:
            return
        edges = self._edges
        low, high = bisect_left(edges, first), bisect_right(edges, following)
        if low == high and low % 2:
            return  # it lies inside one range
        self.count += following - first - self._covered(low, high, first, following)
        edges[low:high] = ([first] if low % 2 == 0 else []) + ([following] if high % 2 == 0 else [])

    def remove(self, first: int, following: int) -> None:
        """Take [first, following) out, as far as it is in."""
        edges = self._edges
        if first >= following or not edges or following <= edges[0] or first >= edges[-1]:
            return
        low, high = bisect_left(edges, first), bisect_right(edges, following)
        self.count -= self._covered(low, high, first, following)
        edges[low:high] = ([first] if low % 2 else []) + ([following] if high % 2 else [])

    def _covered(self, low: int, high: int, first: int, following: int) -> int:
        """Offsets of [first, following) that are in; `low` and `high` are the edges within it."""
        inner = self._edges[low:high]
        if low % 2:
            inner.insert(0, first)
        if high % 2:
            inner.append(following)
        return sum(inner[1::2]) - sum(inner[::2])

    def within(self, first: int, following: int) -> list[tuple[int, int]]:
        """The parts of [first, following) that are in."""
        edges = self._edges
        if first >= following or not edges or following <= edges[0] or first >= edges[-1]:
            return []
        low, high = bisect_right(edges, first), bisect_left(edges, following)
        inner = edges[low:high]
        if low % 2:
            inner.insert(0, first)
        if high % 2:
            inner.append(following)
        return list(zip(inner[::2], inner[1::2], strict=True))

    def missing(self, first: int, following: int) -> list[tuple[int, int]]:
        """The parts of [first, following) that are not in."""
        found: list[tuple[int, int]] = []
        at = first
        for begin, end in self.within(first, following):
            if at < begin:
                found.append((at, begin))
            at = end
        if at < following:
            found.append((at, following))
        return found

    def end_of(self, offset: int) -> int:
        """The first offset at or above `offset` that is not in."""
        at = bisect_right(self._edges, offset)
        return self._edges[at] if at % 2 else offset

    def start_after(self, offset: int) -> int | None:
        """Where the next range above `offset`, which is not in, begins."""
        at = bisect_right(self._edges, offset)
        return self._edges[at] if at < len(self._edges) else None

    def flat(self) -> list[int]:
        """As it stands on the wire."""
        return list(self._edges)

    def copy(self) -> RangeSet:
        made = RangeSet()
        made._edges, made.count = list(self._edges), self.count
        return made


def pairs(flat: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges of a flat list. Raises ProtocolError(FRAME_MALFORMED) where it is none."""
    found = list(zip(flat[::2], flat[1::2], strict=False))
    if len(flat) % 2 or any(first >= following or first < 0 for first, following in found):
        raise ProtocolError(
            "Ranges stand as first, next, first, next: each next above its first.", code=Code.FRAME_MALFORMED
        )
    return found


def chunks(ranges: Iterable[tuple[int, int]], ranges_max: int) -> Iterator[list[int]]:
    """Flat lists of at most `ranges_max` ranges each."""
    flat: list[int] = []
    for first, following in ranges:
        flat += (first, following)
        if len(flat) >= 2 * ranges_max:
            yield flat
            flat = []
    if flat:
        yield flat
