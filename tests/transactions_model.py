"""Coordinators, leaders and the requests between them on a simulated loop of messages: what a seed draws is lost, late, doubled, or ends somebody.

A model of region.transactions.lane_applier and lanes around their pure parts (rounds, positions): the journal and the copies of shards are taken
to be durable once written, which the simulator of clusters proves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from region.transactions.positions import (
    Placing,
    compare,
    encode_positions,
    newest,
    placings,
)
from region.transactions.rounds import Apply, Conclude, Effect, Rounds, Show, Wait
from region.transactions.state import Part

LANES = ("s1", "s2", "s3")
SHARDS = 2
LOOK = 10
"""What can only be whole at the end is looked at after so many steps."""


class Shard:
    """What copies of a shard hold: batches, and the annotation that was written with the last one."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int]] = []
        self.annotation = b""

    def place(self, wanted: Sequence[Placing], most: int) -> bool:
        """Append what is missing, at most so many; whether all of it is there."""
        _, missing, positions = compare(self.annotation, wanted)
        for part in missing[:most]:
            positions.append((part.number, len(self.records)))
            self.records.append((part.number, part.index))
            self.annotation = encode_positions(positions)
        return most >= len(missing)


@dataclass
class Leader:
    """Of a stream: what it hides from readers, in one epoch of it."""

    shards: list[Shard]
    term: int = 0
    shown: int = 0
    hidden_from: list[int | None] = field(default_factory=lambda: [None] * SHARDS)
    hidden: int = 0

    def apply(self, term: int, numbers: Sequence[int], wanted: dict[int, list[Placing]], most: int) -> bool:
        if term < self.term:
            return False
        self.term = term
        if numbers[-1] > self.shown:
            self.hidden = max(self.hidden, numbers[-1])
            for number in wanted:
                if self.hidden_from[number] is None:
                    self.hidden_from[number] = len(self.shards[number].records)
        whole = True
        for number, parts in wanted.items():
            whole &= self.shards[number].place(parts, most)
        return whole

    def show(self, number: int) -> None:
        self.shown = max(self.shown, number)
        if self.hidden <= number:
            self.hidden_from = [None] * SHARDS

    def visible(self) -> set[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for shard, end in zip(self.shards, self.hidden_from, strict=True):
            found.update(shard.records[:end])
        return found


class Model:
    """One run. `decide` commits at the coordinator of now; `step` does one thing that chance draws."""

    rounds = Rounds
    checks_terms = True

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.shards = {lane: [Shard() for _ in range(SHARDS)] for lane in LANES}
        self.leaders = {lane: Leader(self.shards[lane]) for lane in LANES}
        self.away: set[str] = set()
        self.journal: dict[int, list[Part]] = {}
        self.concluded: set[int] = set()
        self.moved = False
        """whether a leader or the coordinator changed, or a lane fell behind: until then each transaction shows at once"""
        self.term = 0
        self.coordinators: dict[int, Rounds] = {}
        self.network: list[tuple[int, Effect]] = []
        self.timers: list[tuple[int, int]] = []
        self.elect()

    @property
    def number(self) -> int:
        return max(self.journal, default=0) + 1

    def elect(self) -> None:
        """Another coordinator replays the journal; what the last one asked is on its way still."""
        self.term += 1
        self.coordinators = {self.term: self.rounds()}
        for number in sorted(self.journal.keys() - self.concluded):
            self._commit(number)

    def decide(self) -> None:
        number = self.number
        parts = [
            Part(number, index, self.random.choice(LANES), b"", self.random.randrange(SHARDS), b"")
            for index in range(self.random.randint(1, 5))
        ]
        self.journal[number] = parts
        self._commit(number)

    def _commit(self, number: int) -> None:
        lanes: dict[str, Counter[int]] = {}
        for part in self.journal[number]:
            lanes.setdefault(part.stream, Counter())[part.shard] += 1
        self._carry_out(self.term, self.coordinators[self.term].commit(number, lanes))

    def _carry_out(self, term: int, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Apply() | Show():
                    self.network.append((term, effect))
                case Conclude(number):
                    self.concluded.add(number)
                case Wait(round_):
                    self.timers.append((term, round_))

    def step(self) -> None:
        draw = self.random.random()
        if draw < 0.15:
            self.decide()
        elif draw < 0.18:
            self.moved = True
            self.elect()
        elif draw < 0.22:
            lane = self.random.choice(LANES)
            if lane in self.away:
                self.away.remove(lane)
            else:
                # The next leader knows the records, and nothing of what is hidden.
                self.moved = True
                self.leaders[lane] = Leader(self.shards[lane])
                if self.random.random() < 0.3:
                    self.away.add(lane)
        elif draw < 0.26 and self.timers:
            self._wait(self.random.randrange(len(self.timers)))
        elif self.network:
            self._deliver(self.random.randrange(len(self.network)))

    def _wait(self, at: int) -> None:
        term, round_ = self.timers.pop(at)
        rounds = self.coordinators.get(term)
        if rounds is not None:
            effects = rounds.waited(round_)
            self.moved |= bool(rounds.behind)
            self._carry_out(term, effects)

    def _deliver(self, at: int) -> None:
        term, effect = self.network[at]
        assert isinstance(effect, Apply | Show)
        leader = self.leaders[effect.lane]
        doubled = self.random.random() < 0.1
        if not doubled:
            self.network.pop(at)
        answered = False
        if effect.lane not in self.away:
            if isinstance(effect, Show):
                leader.show(effect.number)
                answered = True
            else:
                most = self.random.choice((0, 1, 99))
                answered = self.apply(leader, term, effect, most)
        rounds = self.coordinators.get(term)
        if rounds is None or doubled:
            return  # nobody hears the answer
        if isinstance(effect, Show):
            self._carry_out(term, rounds.shown(effect.lane))
        elif answered and self.random.random() > 0.1:
            self._carry_out(term, rounds.applied(effect.lane))
        else:
            self.network.append((term, effect))

    def apply(self, leader: Leader, term: int, effect: Apply, most: int) -> bool:
        wanted: dict[int, list[Part]] = {}
        for number in effect.numbers:
            for part in self.journal[number]:
                if part.stream == effect.lane:
                    wanted.setdefault(part.shard, []).append(part)
        placed = {number: placings(parts) for number, parts in wanted.items()}
        return leader.apply(term, effect.numbers, placed, most)

    def settle(self) -> None:
        """No more faults: all that was decided is applied."""
        self.away.clear()
        for _ in range(100_000):
            if not self.network:
                break
            self._deliver(0)

    # -- what must hold

    def check(self) -> None:
        """At every step."""
        for lane in LANES:
            for number, shard in enumerate(self.shards[lane]):
                wanted = [
                    (part.number, part.index)
                    for each in sorted(self.journal)
                    for part in self.journal[each]
                    if (part.stream, part.shard) == (lane, number)
                ]
                assert shard.records == wanted[: len(shard.records)], "each part once, in order"
                assert newest(shard.annotation) == (shard.records[-1][0] if shard.records else 0)
        if not self.moved:
            seen = {(lane, part) for lane in LANES for part in self.leaders[lane].visible()}
            for parts in self.journal.values():
                there = sum((part.stream, (part.number, part.index)) in seen for part in parts)
                assert there in (0, len(parts)) or self._being_shown(parts[0].number), "whole or none"

    def _being_shown(self, number: int) -> bool:
        """Between the first leader that was told and the last: one round trip."""
        return any(isinstance(effect, Show) and effect.number >= number for _, effect in self.network)

    def check_end(self) -> None:
        assert self.concluded == self.journal.keys(), "concluded"
        for number, parts in self.journal.items():
            for part in parts:
                there = self.shards[part.stream][part.shard].records.count((number, part.index))
                assert there == 1, "whole"


def run(model: Model, steps: int = 200) -> Model:
    for number in range(steps):
        model.step()
        if not model.moved or number % LOOK == 0:
            model.check()
    model.settle()
    model.check()
    model.check_end()
    return model
