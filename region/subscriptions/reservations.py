"""What transactions that are not decided yet acknowledge of durable subscriptions, on this broker.

Invariant: it outlives what a journal is read back into, so that nothing of it is delivered, or acknowledged by another transaction, before the
first one is over. Used by `service`, `store` and `subscription`, on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from felix.ranges import RangeSet


class Reservations:
    """By stream (incarnation), shard and subscription; nothing is kept of one that has none."""

    def __init__(self) -> None:
        self._held: dict[tuple[bytes, int, bytes], RangeSet] = {}

    def add(
        self, incarnation: bytes, shard: int, subscription: bytes, ranges: Iterable[tuple[int, int]]
    ) -> None:
        """These offsets are reserved."""
        held = self._held.setdefault((incarnation, shard, subscription), RangeSet())
        for first, following in ranges:
            held.add(first, following)

    def remove(
        self, incarnation: bytes, shard: int, subscription: bytes, ranges: Iterable[tuple[int, int]]
    ) -> None:
        """These offsets are not reserved any more, as far as they were."""
        held = self._held.get((incarnation, shard, subscription))
        if held is None:
            return
        for first, following in ranges:
            held.remove(first, following)
        if not held:
            del self._held[incarnation, shard, subscription]

    def of(self, incarnation: bytes, shard: int) -> Iterator[tuple[bytes, RangeSet]]:
        """What is reserved in one shard, by subscription."""
        for (stream, number, subscription), held in list(self._held.items()):
            if (stream, number) == (incarnation, shard):
                yield subscription, held
