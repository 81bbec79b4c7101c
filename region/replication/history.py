"""The epochs of one log by points and elections, and where two histories part.

An epoch is told by its number *and* its election id: a metadata store that went back gives a number twice, never an id. Where both logs
have an epoch of one election, they are equal up to the end that the shorter one has of it, because an epoch has one leader, which leads it
once (N0) and writes no point twice. KIP-101 and KIP-279 rest on the same. `region.log.epochs` is the history as it stands on a disk today,
by offsets and without elections. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final, NamedTuple

from region.log.epochs import EPOCHS_MAX
from region.log.point import LogPoint

STARTS_MAX: Final = 16
"""Epochs that a follower tells at once: it seldom differs from its leader by more than one or two; older ones are asked for."""
BEGINNING: Final = LogPoint(0, 0)


class EpochStart(NamedTuple):
    """What stands behind `start`, up to the next epoch's, is of `epoch`, whose leader was elected by `election`."""

    epoch: int
    election: str
    start: LogPoint


class History:
    """The newest EPOCHS_MAX epochs of a log, oldest first. Invariants: epochs strictly increase, starts never decrease, and only the
    last one may have nothing behind its start."""

    __slots__ = ("_starts",)

    def __init__(self, starts: Iterable[EpochStart] = ()) -> None:
        self._starts = list(starts)

    @property
    def starts(self) -> tuple[EpochStart, ...]:
        """All of them, oldest first."""
        return tuple(self._starts)

    @property
    def last(self) -> EpochStart:
        """The newest; epoch 0 before the first."""
        return self._starts[-1] if self._starts else EpochStart(0, "", BEGINNING)

    def begin(self, begun: EpochStart) -> None:
        """The log goes on in this epoch from there. Asserts that none as new has begun."""
        assert begun.epoch > self.last.epoch, (begun, self._starts)
        # An epoch in which nothing was written has no place of its own.
        self.truncate(begun.start)
        self._starts.append(begun)
        del self._starts[:-EPOCHS_MAX]

    def find(self, epoch: int) -> EpochStart | None:
        """The start of exactly this epoch."""
        for start in reversed(self._starts):
            if start.epoch <= epoch:
                return start if start.epoch == epoch else None
        return None

    def end_of(self, epoch: int, log_end: LogPoint) -> LogPoint:
        """Where the first epoch above `epoch` begins; `log_end` where there is none."""
        end = log_end
        for start in reversed(self._starts):
            if start.epoch <= epoch:
                break
            end = start.start
        return end

    def epoch_before(self, point: LogPoint) -> int:
        """The epoch of what stands just before `point`; 0 at the beginning."""
        for start in reversed(self._starts):
            if start.start < point:
                return start.epoch
        return 0

    def within(self, begin: LogPoint, end: LogPoint) -> tuple[EpochStart, ...]:
        """Epochs that begin at or behind `begin` and before `end`: what a copy that goes on from `begin` to `end` has to learn."""
        return tuple(start for start in self._starts if begin <= start.start < end)

    def newest(self, below: int = 0) -> tuple[tuple[EpochStart, ...], bool]:
        """At most STARTS_MAX epochs, of those below `below` where it is given; and whether there are none older."""
        known = [start for start in self._starts if start.epoch < below] if below else self._starts
        return tuple(known[-STARTS_MAX:]), len(known) <= STARTS_MAX

    def truncate(self, point: LogPoint) -> None:
        """The log was cut at `point`: epochs that begin there or behind it have nothing left."""
        while self._starts and self._starts[-1].start >= point:
            self._starts.pop()


class Parting(Enum):
    """What comparing two histories came to, where it is no point."""

    OLDER = "none of the epochs told is ours: tell older ones"
    CONFLICT = "one epoch, two elections: the store went back"


def parting(
    theirs: Sequence[EpochStart], complete: bool, their_end: LogPoint, ours: History, our_end: LogPoint
) -> LogPoint | Parting:
    """Up to where a copy with the history `theirs`, which ends at `their_end`, is equal to ours. `complete`: they told all they have."""
    end = their_end
    for start in reversed(theirs):
        mine = ours.find(start.epoch)
        if mine is not None:
            if mine.election != start.election:
                return Parting.CONFLICT
            return min(end, ours.end_of(start.epoch, our_end))
        end = start.start
    return end if complete else Parting.OLDER
