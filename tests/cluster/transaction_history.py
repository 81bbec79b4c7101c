"""What clients were told of their transactions, held against what stands in the streams in the end: the judge of "whole or none".

Each record names its transaction, its place in it, and how many there are. Every rule has a name, and tests/cluster/test_transaction_history.py
has a history for each that it must refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple

SHOWN_MAX: Final = 3
"""Of each rule, so many cases are told."""


class Outcome(Enum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class Place(NamedTuple):
    """Where a record stands."""

    stream: str
    shard: int
    offset: int


class Record(NamedTuple):
    """The `index`-th record of transaction `number` of a writer."""

    writer: str
    number: int
    index: int

    def encode(self) -> bytes:
        return f"{self.writer}/{self.number}/{self.index}".encode()

    @classmethod
    def decode(cls, payload: bytes) -> Record:
        writer, number, index = payload.decode().split("/")
        return cls(writer, int(number), int(index))


Stored = Mapping[Place, Record]


@dataclass
class TransactionHistory:
    """Of all writers."""

    sizes: dict[tuple[str, int], int] = field(default_factory=dict)
    """records of each transaction"""
    outcomes: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    told: dict[Record, Place] = field(default_factory=dict)
    """where the records of committed transactions stand, as their writers were told; not where that was not known (offset -1)"""

    def check(self, stored: Stored) -> None:
        """`stored`: all that stands in the streams. Raises AssertionError with every rule that was broken, by its name."""
        broken = [
            f"{name}: {what}"
            for name, rule in RULES.items()
            for what in islice(rule(self, stored), SHOWN_MAX)
        ]
        assert not broken, "\n".join(broken)

    def parts(self, stored: Stored) -> dict[tuple[str, int], set[int]]:
        found: dict[tuple[str, int], set[int]] = {key: set() for key in self.sizes}
        for record in stored.values():
            found.setdefault((record.writer, record.number), set()).add(record.index)
        return found


def half(history: TransactionHistory, stored: Stored) -> Iterator[str]:
    for key, found in history.parts(stored).items():
        if found and len(found) != history.sizes.get(key, 0):
            yield f"{key}: {len(found)} of {history.sizes.get(key, 0)} records stand"


def doubled(history: TransactionHistory, stored: Stored) -> Iterator[str]:
    seen: dict[Record, Place] = {}
    for place, record in stored.items():
        if seen.setdefault(record, place) != place:
            yield f"{record} stands at {seen[record]} and at {place}"


def lost(history: TransactionHistory, stored: Stored) -> Iterator[str]:
    parts = history.parts(stored)
    for key, outcome in history.outcomes.items():
        if outcome is Outcome.COMMITTED and not parts[key]:
            yield f"{key} was committed, and nothing of it stands"


def undone(history: TransactionHistory, stored: Stored) -> Iterator[str]:
    parts = history.parts(stored)
    for key, outcome in history.outcomes.items():
        if outcome is Outcome.ABORTED and parts[key]:
            yield f"{key} was aborted, and {len(parts[key])} records of it stand"


def moved(history: TransactionHistory, stored: Stored) -> Iterator[str]:
    for record, place in history.told.items():
        if stored.get(place) != record:
            yield f"{record} was told to stand at {place}, where {stored.get(place)} does"


RULES: Final[dict[str, Callable[[TransactionHistory, Stored], Iterator[str]]]] = {
    "half": half,
    "doubled": doubled,
    "lost": lost,
    "undone": undone,
    "moved": moved,
}
