"""In which order committed transactions are applied to streams that several brokers lead, and when they are shown. Pure.

A *lane* is a stream that transactions write into, or acknowledge records of; its leader applies what it is asked to, and hides it until it is
told to show it. Transactions are taken in *rounds*: each lane of a round is asked for its part at once, and when all have answered, all are
told to show theirs. A lane whose leader does not answer in time *falls behind*: the others are shown without it, and it goes on by itself, with
what is committed meanwhile behind what it has. What it has of the round that is under way it shows with that round.

What happened goes in, what is to be done comes out. Invariants:
- a lane is asked for one group at a time, in the order of the numbers, and for the next one only once the last one was applied and shown: so a
  leader can tell what it has by the last number that it knows;
- a group is shown, in whatever lane, once it is applied in all lanes of its round, but those that fell behind;
- a transaction is concluded once each of its lanes has applied and shown it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from region.transactions.positions import group_length


class Apply(NamedTuple):
    """Have a lane's leader apply its part of these transactions, however often it takes; then `applied`."""

    lane: str
    numbers: tuple[int, ...]


class Show(NamedTuple):
    """Have a lane's leader show all up to this number; then `shown`, also where nobody is reached: it shows it by itself."""

    lane: str
    number: int


class Conclude(NamedTuple):
    """A transaction is where it belongs, everywhere."""

    number: int


class Wait(NamedTuple):
    """Say `waited` with this round if it is still under way after a while."""

    round: int


Effect = Apply | Show | Conclude | Wait
_Lanes = Mapping[str, Counter[int]]


class Rounds:
    """See the module."""

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()
        self._lanes: dict[int, _Lanes] = {}
        """of each transaction that is not concluded, how many batches it has in each shard of each lane"""
        self._left: dict[int, set[str]] = {}
        """lanes that have not shown it yet"""
        self._asked: dict[str, tuple[int, ...]] = {}
        self._round = 0
        self._first = 0
        """the first transaction of the round"""
        self._applying: set[str] = set()
        self._applied: list[str] = []
        self._showing: set[str] = set()
        self._behind: dict[str, deque[int]] = {}
        """what lanes that fell behind are to be asked for next"""
        self._ahead: list[str] = []
        """those of them that have applied what they are asked for of the round that is under way"""

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def behind(self) -> frozenset[str]:
        """The lanes that fell behind."""
        return frozenset(self._behind)

    def commit(self, number: int, lanes: _Lanes) -> list[Effect]:
        """A transaction is committed, behind all before it: how many batches it has in each shard of each lane."""
        assert number not in self._lanes and number > max(self._waiting, default=0)
        self._lanes[number] = lanes
        self._left[number] = set(lanes)
        self._waiting.append(number)
        return self._begin()

    def applied(self, lane: str) -> list[Effect]:
        """A lane has applied what it was asked for last."""
        if lane in self._behind:
            if not self._applying or self._asked[lane][-1] < self._first:
                return [self._show(lane)]
            self._ahead.append(lane)
            return []
        self._applying.remove(lane)
        self._applied.append(lane)
        return self._show_round()

    def waited(self, round_: int) -> list[Effect]:
        """A round has taken as long as it may: what has not answered falls behind."""
        if round_ != self._round or not self._applying:
            return []
        for lane in self._applying:
            self._behind[lane] = deque()
        self._applying = set()
        return self._show_round()

    def shown(self, lane: str) -> list[Effect]:
        """A lane shows what it has applied."""
        effects: list[Effect] = []
        for number in self._asked.pop(lane):
            left = self._left[number]
            left.remove(lane)
            if not left:
                del self._left[number], self._lanes[number]
                effects.append(Conclude(number))
        if lane in self._showing:
            self._showing.remove(lane)
            return effects + self._begin()
        queue = self._behind[lane]
        if queue:
            length = group_length(self._lanes[each][lane] for each in queue)
            effects.append(self._ask(lane, _taken(queue, length)))
        else:
            del self._behind[lane]
        return effects

    def _begin(self) -> list[Effect]:
        """The next round, where none is under way. One whose lanes are all behind is over at once."""
        effects: list[Effect] = []
        while self._waiting and not self._applying and not self._showing:
            self._round += 1
            self._first = self._waiting[0]
            length = group_length(map(self._batches, self._waiting))
            wanted: dict[str, list[int]] = {}
            for number in _taken(self._waiting, length):
                for lane in self._lanes[number]:
                    if lane in self._behind:
                        self._behind[lane].append(number)
                    else:
                        wanted.setdefault(lane, []).append(number)
                if not self._lanes[number]:
                    del self._left[number], self._lanes[number]
                    effects.append(Conclude(number))
            for lane, some in wanted.items():
                self._applying.add(lane)
                effects.append(self._ask(lane, some))
            if wanted:
                effects.append(Wait(self._round))
        return effects

    def _batches(self, number: int) -> dict[tuple[str, int], int]:
        """How many a transaction has in each shard, of all lanes."""
        return {
            (lane, shard): count
            for lane, shards in self._lanes[number].items()
            for shard, count in shards.items()
        }

    def _ask(self, lane: str, numbers: Sequence[int]) -> Apply:
        assert lane not in self._asked
        self._asked[lane] = tuple(numbers)
        return Apply(lane, tuple(numbers))

    def _show_round(self) -> list[Effect]:
        if self._applying:
            return []
        self._showing, self._applied = set(self._applied), []
        ahead, self._ahead = self._ahead, []
        shown: list[Effect] = [self._show(lane) for lane in (*ahead, *sorted(self._showing))]
        return shown if self._showing else shown + self._begin()

    def _show(self, lane: str) -> Show:
        return Show(lane, self._asked[lane][-1])


def _taken(queue: deque[int], length: int) -> list[int]:
    return [queue.popleft() for _ in range(length)]
