"""Keys in order, for scans and watches: cheap to add to and to take from, ordered when somebody looks. Pure.

New keys are gathered unsorted, removed ones are remembered as gone, and both are worked into the sorted list once they are many:
a put costs O(1), a page O(log n + page) and, now and then, one merge of two sorted runs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

UNSORTED_MAX: Final = 256
"""A page looks through so many at most besides the sorted ones."""
GONE_MIN: Final = 1_024
"""Fewer are not worth a pass over all."""


class KeyIndex:
    """The keys of one shard. A key is added when it is not in it, and discarded when it is."""

    __slots__ = ("_gone", "_sorted", "_unsorted")

    def __init__(self) -> None:
        self._sorted: list[bytes] = []
        self._unsorted: list[bytes] = []
        self._gone: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._unsorted) - len(self._gone)

    def add(self, key: bytes) -> None:
        if key in self._gone:
            self._gone.remove(key)
        else:
            self._unsorted.append(key)

    def discard(self, key: bytes) -> None:
        gone = self._gone
        gone.add(key)
        if len(gone) > GONE_MIN and 2 * len(gone) > len(self._sorted) + len(self._unsorted):
            self._sorted = [each for each in self._sorted if each not in gone]
            self._unsorted = [each for each in self._unsorted if each not in gone]
            gone.clear()

    def page(self, prefix: bytes, after: bytes, limit: int) -> list[bytes]:
        """Up to `limit` keys that begin with `prefix` and come after `after` (empty: from the first), in order."""
        if len(self._unsorted) > UNSORTED_MAX:
            # The old run is sorted already: sorting the whole is one merge.
            self._sorted += sorted(self._unsorted)
            self._sorted.sort()
            self._unsorted = []
        ordered, gone = self._sorted, self._gone
        begin = bisect_left(ordered, prefix)
        if after:
            begin = max(begin, bisect_right(ordered, after))
        found: list[bytes] = []
        for at in range(begin, len(ordered)):
            key = ordered[at]
            if not key.startswith(prefix) or len(found) == limit:
                break
            if key not in gone:
                found.append(key)
        found += (key for key in self._unsorted if key.startswith(prefix) and key > after and key not in gone)
        found.sort()
        return found[:limit]
