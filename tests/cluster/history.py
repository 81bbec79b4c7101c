"""What writers were told, what readers saw and what brokers said of themselves, held against each other: the judge of a replicated shard.

All of it comes from the outside, from clients; times are of one clock, in seconds. Every rule has a name, and tests/cluster/test_history.py
has a history for each that it must refuse.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Final, NamedTuple


class Sent(NamedTuple):
    """A record of a writer, `number` from 0 on, sent for the first time at `at`."""

    writer: str
    number: int
    at: float


class Acknowledged(NamedTuple):
    """What a writer was told: its record stands at `offset`."""

    writer: str
    number: int
    offset: int
    at: float


class Seen(NamedTuple):
    """A record as a reader was given it, or as it stands in the end (`at` counts for nothing then). `append_ms`: when the broker took it, by its clock."""

    offset: int
    writer: str
    number: int
    append_ms: int = 0
    at: float = 0.0


class Told(NamedTuple):
    """What `leader` said of the shard that it leads, to a client that asked it from `asked` on: in which epoch, and where the committed records
    end. `leader` is empty where the client does not know who answered."""

    asked: float
    leader: str
    epoch: int
    end: int


@dataclass
class History:
    """Of one shard. Each writer sends its numbers from 0 on, several at a time, in their order, each until it is acknowledged."""

    sent: list[Sent] = field(default_factory=list)
    acknowledged: list[Acknowledged] = field(default_factory=list)
    read: dict[str, list[Seen]] = field(default_factory=dict)
    """by reader, which began with the earliest record, in the order in which it was given them"""
    told: dict[str, list[Told]] = field(default_factory=dict)
    """by client, in its order"""
    _next: dict[str, int] = field(default_factory=dict)

    # -- what clients note -----------------------------------------------------------------------------

    def sends(self, writer: str) -> int:
        """The number of the writer's next record, which it sends now."""
        number = self._next.get(writer, 0)
        self._next[writer] = number + 1
        self.sent.append(Sent(writer, number, time.monotonic()))
        return number

    def was_told(self, writer: str, number: int, offset: int) -> None:
        """It is acknowledged."""
        self.acknowledged.append(Acknowledged(writer, number, offset, time.monotonic()))

    def saw(self, reader: str, offset: int, writer: str, number: int, append_ms: int = 0) -> None:
        """A reader was given a record."""
        self.read.setdefault(reader, []).append(Seen(offset, writer, number, append_ms, time.monotonic()))

    # -- the judgement ---------------------------------------------------------------------------------

    def check(self, stored: Sequence[Seen]) -> None:
        """`stored`: the whole shard at the end. Raises AssertionError with every rule that was broken, by its name."""
        broken = [
            f"{name}: {what}"
            for name, rule in RULES.items()
            for what in islice(rule(self, stored), SHOWN_MAX)
        ]
        assert not broken, "\n".join(broken)


SHOWN_MAX: Final = 3
"""Of each rule, so many cases are told: one mistake breaks it for thousands of records."""
Rule = Callable[[History, Sequence[Seen]], Iterator[str]]


def _places(stored: Sequence[Seen]) -> dict[tuple[str, int], int]:
    return {(each.writer, each.number): each.offset for each in stored}


def hole(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    for expected, each in enumerate(stored):
        if each.offset != expected:
            yield f"offset {each.offset} stands where {expected} should"
            return


def doubled(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    places: dict[tuple[str, int], int] = {}
    for each in stored:
        before = places.setdefault((each.writer, each.number), each.offset)
        if before != each.offset:
            yield f"{each.writer} {each.number} stands at {before} and at {each.offset}"


def invented(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    known = {(each.writer, each.number) for each in history.sent}
    for each in (*stored, *(seen for reader in history.read.values() for seen in reader)):
        if (each.writer, each.number) not in known:
            yield f"{each.writer} {each.number} at {each.offset} was never sent"
    for told in history.acknowledged:
        if (told.writer, told.number) not in known:
            yield f"{told.writer} {told.number} was acknowledged and never sent"


def reordered(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    newest: dict[str, int] = {}
    for each in stored:
        if each.number < newest.get(each.writer, -1):
            yield f"{each.writer} {each.number} stands behind {newest[each.writer]}"
        newest[each.writer] = max(newest.get(each.writer, -1), each.number)


def skipped(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    """A writer's later record stands, and one before it does not: its sequence has a gap."""
    numbers: dict[str, set[int]] = {}
    for each in stored:
        numbers.setdefault(each.writer, set()).add(each.number)
    for writer, found in numbers.items():
        for missing in sorted(set(range(max(found) + 1)) - found):
            yield f"{writer} {missing} does not stand, and {max(found)} does"


def lost(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    places = _places(stored)
    for each in history.acknowledged:
        if (each.writer, each.number) not in places:
            yield f"{each.writer} {each.number} was acknowledged at {each.offset}, and is gone"


def moved(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    places = _places(stored)
    for each in history.acknowledged:
        if places.get((each.writer, each.number), each.offset) != each.offset:
            yield f"{each.writer} {each.number} was acknowledged at {each.offset} and stands at {places[each.writer, each.number]}"


def acknowledged_twice(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    offsets: dict[int, tuple[str, int]] = {}
    places: dict[tuple[str, int], int] = {}
    for each in history.acknowledged:
        record = (each.writer, each.number)
        if offsets.setdefault(each.offset, record) != record:
            yield f"offset {each.offset} was told to {offsets[each.offset]} and to {record}"
        if places.setdefault(record, each.offset) != each.offset:
            yield f"{record} was told {places[record]} and {each.offset}"


def acknowledged_before_sent(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    sent = {(each.writer, each.number): each.at for each in history.sent}
    for each in history.acknowledged:
        if each.at < sent.get((each.writer, each.number), each.at):
            yield f"{each.writer} {each.number} was acknowledged before it was sent"


def against_real_time(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    """What was sent after another record had been acknowledged, by whomever, stands behind it (linearizability of appends)."""
    sent = sorted(history.sent, key=lambda each: each.at)
    places = _places(stored)
    furthest, at = -1, 0
    told = sorted(history.acknowledged, key=lambda each: each.at)
    for each in sent:
        while at < len(told) and told[at].at < each.at:
            furthest = max(furthest, told[at].offset)
            at += 1
        place = places.get((each.writer, each.number))
        if place is not None and place < furthest:
            yield f"{each.writer} {each.number} stands at {place}, and was sent after {furthest} had been acknowledged"


def time_runs_back(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    for before, after in pairwise(stored):
        if after.append_ms < before.append_ms:
            yield f"offset {after.offset} was appended {before.append_ms - after.append_ms} ms before {before.offset}"


def read_out_of_order(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    for reader, seen in history.read.items():
        for before, after in pairwise(seen):
            if after.offset <= before.offset:
                yield f"{reader} was given {after.offset} after {before.offset}"


def read_with_a_hole(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    for reader, seen in history.read.items():
        for expected, after in zip((-1, *(each.offset for each in seen)), seen, strict=False):
            if after.offset > expected + 1:
                yield f"{reader} was given {after.offset}, and not {expected + 1}"


def read_and_gone(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    end = stored[-1].offset + 1 if stored else 0
    for reader, seen in history.read.items():
        for each in seen:
            if each.offset >= end:
                yield f"{reader} was given {each.offset}, and the shard ends at {end}"


def read_and_changed(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    held = {each.offset: (each.writer, each.number, each.append_ms) for each in stored}
    for reader, seen in history.read.items():
        for each in seen:
            given = (each.writer, each.number, each.append_ms)
            if held.get(each.offset, given) != given:
                yield f"{reader} was given {given} at {each.offset}, where {held[each.offset]} stands"


def two_orders(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    given: dict[int, tuple[str, tuple[str, int]]] = {}
    for reader, seen in history.read.items():
        for each in seen:
            first, record = given.setdefault(each.offset, (reader, (each.writer, each.number)))
            if record != (each.writer, each.number):
                yield f"at {each.offset} {first} was given {record}, and {reader} {each.writer} {each.number}"


def read_before_sent(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    sent = {(each.writer, each.number): each.at for each in history.sent}
    for reader, seen in history.read.items():
        for each in seen:
            if each.at < sent.get((each.writer, each.number), each.at):
                yield f"{reader} was given {each.writer} {each.number} before it was sent"


def two_leaders(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    leaders: dict[int, str] = {}
    for each in (told for client in history.told.values() for told in client if told.leader):
        if leaders.setdefault(each.epoch, each.leader) != each.leader:
            yield f"{leaders[each.epoch]} and {each.leader} both lead epoch {each.epoch}"


def epoch_falls(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    for before, after in (pair for told in history.told.values() for pair in pairwise(told)):
        if after.epoch < before.epoch:
            yield f"epoch {after.epoch} was told after {before.epoch}"


def end_falls(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    for before, after in (pair for told in history.told.values() for pair in pairwise(told)):
        if after.end < before.end:
            yield f"the end {after.end} was told after {before.end}"


def end_gone(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    end = stored[-1].offset + 1 if stored else 0
    for each in (told for client in history.told.values() for told in client):
        if each.end > end:
            yield f"the end {each.end} was told, and the shard ends at {end}"


def stale_end(history: History, stored: Sequence[Seen]) -> Iterator[str]:
    """Whoever asks is told of all that had been acknowledged by then: ends are told by a lease holder alone."""
    told = sorted(history.acknowledged, key=lambda each: each.at)
    furthest, at = -1, 0
    for each in sorted(told for client in history.told.values() for told in client):
        while at < len(told) and told[at].at < each.asked:
            furthest = max(furthest, told[at].offset)
            at += 1
        if each.end <= furthest:
            yield f"{each.leader} told the end {each.end} in epoch {each.epoch} after {furthest} had been acknowledged"


RULES: Final[dict[str, Rule]] = {
    rule.__name__.replace("_", " "): rule
    for rule in (
        hole, doubled, invented, reordered, skipped, lost, moved, acknowledged_twice, acknowledged_before_sent, against_real_time,
        time_runs_back, read_out_of_order, read_with_a_hole, read_and_gone, read_and_changed, two_orders, read_before_sent, two_leaders,
        epoch_falls, end_falls, end_gone, stale_end,
    )
}  # fmt: skip
