"""A bounded map: what is held of things that come without end. Where there is no room, the longest unused goes.

Pure, and for one thread at a time.

Invariants: no more than `most` is held, by number or by what `weigh` says; the newest entry always stays, however heavy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedMap(Generic[K, V]):
    """Entries in order of their last use. `weigh`: of a value, without it each counts 1; a value's weight does not change while
    it is held. `gone` is called with each entry that had to go for another."""

    __slots__ = ("_entries", "_gone", "_weigh", "most", "weight")

    def __init__(
        self,
        most: int,
        *,
        weigh: Callable[[V], int] | None = None,
        gone: Callable[[K, V], object] | None = None,
    ) -> None:
        assert most >= 1
        self.most = most
        self.weight = 0
        """of all that is held"""
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._weigh = weigh
        self._gone = gone

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """Keys, the longest unused first."""
        return iter(self._entries)

    def items(self) -> list[tuple[K, V]]:
        """A copy, the longest unused first."""
        return list(self._entries.items())

    def values(self) -> list[V]:
        """A copy, the longest unused first."""
        return list(self._entries.values())

    def use(self, key: K) -> V | None:
        """The value, which is the last used now; None where there is none."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def look(self, key: K) -> V | None:
        """The value, without being used."""
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        """Hold it as the last used, in place of what the key had; others go where there is no room."""
        self.pop(key)
        self._entries[key] = value
        self.weight += self._weight(value)
        while self.weight > self.most and len(self._entries) > 1:
            old, lost = self._entries.popitem(last=False)
            self.weight -= self._weight(lost)
            if self._gone is not None:
                self._gone(old, lost)

    def pop(self, key: K) -> V | None:
        """Hold it no more; what it was."""
        value = self._entries.pop(key, None)
        if value is not None:
            self.weight -= self._weight(value)
        return value

    def clear(self) -> None:
        """Hold nothing."""
        self._entries.clear()
        self.weight = 0

    def _weight(self, value: V) -> int:
        return 1 if self._weigh is None else self._weigh(value)
