"""How name patterns relate to each other: one covers another, or two overlap; and many patterns that are asked together.

`NamePattern.matches` answers for one name; a grant with a wildcard stands for many names, and whether a
rule holds for all of them or for some is decided here, on the patterns alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from felix.names import NamePattern, StreamName

T = TypeVar("T")


def covers(wide: NamePattern, narrow: NamePattern) -> bool:
    """True where every name that `narrow` matches is matched by `wide` too."""
    for outer, inner in zip(wide.text.split("/"), narrow.text.split("/"), strict=True):
        if outer.endswith("*"):
            if not inner.rstrip("*").startswith(outer[:-1]):
                return False
        elif outer != inner:
            return False
    return True


def overlap(one: NamePattern, other: NamePattern) -> bool:
    """True where some name is matched by both."""
    for left, right in zip(one.text.split("/"), other.text.split("/"), strict=True):
        left_open, right_open = left.endswith("*"), right.endswith("*")
        left_stem, right_stem = left.rstrip("*"), right.rstrip("*")
        if left_open and right_open:
            if not (left_stem.startswith(right_stem) or right_stem.startswith(left_stem)):
                return False
        elif left_open:
            if not right.startswith(left_stem):
                return False
        elif right_open:
            if not left.startswith(right_stem):
                return False
        elif left != right:
            return False
    return True


class PatternMap(Generic[T]):
    """A value for each of many patterns. Which match a name is answered from the name's own parts and their beginnings, so it does
    not cost more for more patterns that have nothing to do with the name."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, dict[str, T]]] = {}

    def put(self, pattern: NamePattern, value: T) -> None:
        """Put a pattern in, in place of what it had."""
        first, second, third = pattern.text.split("/")
        self._parts.setdefault(first, {}).setdefault(second, {})[third] = value

    def get(self, pattern: NamePattern) -> T | None:
        """What this very pattern has."""
        first, second, third = pattern.text.split("/")
        return self._parts.get(first, {}).get(second, {}).get(third)

    def remove(self, pattern: NamePattern) -> None:
        """Take a pattern out that is in."""
        first, second, third = pattern.text.split("/")
        seconds = self._parts[first]
        del seconds[second][third]
        if not seconds[second]:
            del seconds[second]
        if not seconds:
            del self._parts[first]

    def matching(self, name: StreamName) -> Iterator[T]:
        """The values of the patterns that match the name."""
        for first in _fitting(name.tenant):
            for second in _fitting(name.namespace) if first in self._parts else ():
                thirds = self._parts[first].get(second)
                for third in _fitting(name.name) if thirds is not None else ():
                    if thirds is not None and third in thirds:
                        yield thirds[third]


class PatternSet:
    """Patterns of which some match a name or none does."""

    def __init__(self) -> None:
        self._map = PatternMap[None]()

    def add(self, pattern: NamePattern) -> None:
        """Put a pattern in."""
        self._map.put(pattern, None)

    def matches(self, name: StreamName) -> bool:
        """True where one of the patterns matches the name."""
        return any(True for _ in self._map.matching(name))


def _fitting(part: str) -> Iterator[str]:
    """Every part of a pattern that this part of a name fits."""
    yield part
    for end in range(len(part) + 1):
        yield f"{part[:end]}*"
