"""The leader-epoch history of a shard: which leader's epoch begins at which offset.

A follower finds with it where its log and a new leader's part; a bridge finds with it that a log was cut back or restored
since it read it (docs/bridges.md). That needs numbers that are never given twice, also not by a log that was put back to
an earlier copy of itself: so every opening of a shard begins an epoch, and `next_epoch` takes the number from the clock, or from chance
where the clock is behind. Of several brokers an election begins one, whose number is drawn by chance (`elected_epoch`).

Pure; the caller makes it durable before the first batch of an epoch is appended. Invariants: epochs strictly increase,
start offsets never decrease.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

from felix.errors import Code, RequestError
from felix.runtime.port import Random

EPOCHS_MAX: Final = 1_024
"""Epochs remembered, one for each start of the broker in which something was appended: 40 KB, years of restarts. They are
kept beyond the records that they began with: a bridge that was away for long asks about records that retention took."""
EPOCH_TICK_MS: Final = 250
"""Two starts of one shard are further apart than this, whoever stops, copies and starts; 32 bits of it last until 2060."""
EPOCH_ORIGIN_MS: Final = 1_767_225_600_000
"""2026-01-01T00:00:00Z."""


CHANCE_MAX: Final = 1 << 20
"""From how many numbers one is chosen where the clock is behind: a log and its copy take the same one with one in a million."""
_ROOM_SHIFT: Final = 12
"""And from no more than this part of the numbers that are left: however often a broker starts, there are always more."""
EPOCH_MAX: Final = (1 << 32) - 1
EVERYTHING: Final = 1 << 63
"""Above every offset: where nobody says which epochs something was said of, as of an earlier release, it is taken as it is."""


def next_epoch(current: int, now_ms: int, chance: Random) -> int:
    """The number of an epoch that begins now: above `current`, and above any given before by a clock that goes right.

    Where the clock is not above `current` (it was ahead before, or is behind now), two histories that part there would both count on by
    one: the number is one of the next ones, by chance.
    """
    tick = (now_ms - EPOCH_ORIGIN_MS) // EPOCH_TICK_MS
    if tick > current:
        return tick
    return current + 1 + chance.randrange(_choices(current))


def elected_epoch(current: int, election: str) -> int:
    """The number of the epoch that an election begins, by the first half of its 64 random bits (in hex): a store and its copy, which was put back, both elect a
    leader after `current`, and not into the same epoch."""
    return current + 1 + (int(election, 16) >> 32) % _choices(current)


def _choices(current: int) -> int:
    """From how many numbers one is drawn."""
    return max(1, min(CHANCE_MAX, EPOCH_MAX - current >> _ROOM_SHIFT))


class EpochStart(NamedTuple):
    """`epoch` begins with the batch at `start_offset`."""

    epoch: int
    start_offset: int


class EpochHistory:
    """The newest EPOCHS_MAX epochs in which something was appended, oldest first."""

    __slots__ = ("_starts",)

    def __init__(self, starts: list[EpochStart] | None = None) -> None:
        self._starts = starts or []

    @property
    def starts(self) -> tuple[EpochStart, ...]:
        """All of them, oldest first."""
        return tuple(self._starts)

    @property
    def current(self) -> int:
        """The newest epoch; 0 before the first."""
        return self._starts[-1].epoch if self._starts else 0

    def begin(self, epoch: int, start_offset: int) -> bool:
        """Begin `epoch` at `start_offset`; True where that changed anything.

        Raises RequestError(CONFLICT) where a newer epoch has begun already.
        """
        if epoch < self.current:
            raise RequestError(
                f"Epoch {epoch} cannot begin: epoch {self.current} has begun already.",
                code=Code.CONFLICT,
                hint="A newer leader was elected; ask the metadata store which one.",
            )
        if self._starts and epoch == self.current:
            return False
        # An epoch in which nothing was appended has no place of its own.
        while self._starts and self._starts[-1].start_offset >= start_offset:
            self._starts.pop()
        self._starts.append(EpochStart(epoch, start_offset))
        del self._starts[:-EPOCHS_MAX]
        return True

    def end_of(self, epoch: int, log_end: int) -> EpochStart:
        """The newest epoch not above `epoch`, with the offset at which the next one begins (or `log_end`).

        Where the history begins above `epoch`, the answer is epoch 0 and the first start.
        """
        at = bisect_right(self._starts, epoch, key=lambda start: start.epoch)
        end = self._starts[at].start_offset if at < len(self._starts) else log_end
        return EpochStart(self._starts[at - 1].epoch if at else 0, end)

    def shared_end(self, read: Iterable[tuple[int, int]], offset: int) -> int:
        """How far a reader has read this log, who stands at `offset` and has met these epochs before it, each from which offset on; oldest first, and
        perhaps only the newest ones. Less than `offset`: the log lost its end since then, or was put back, and has other records from there on."""
        known = {start.epoch for start in self._starts}
        for epoch, since in sorted(read, reverse=True):
            if epoch in known or epoch < min(known, default=0):
                return min(offset, self.end_of(epoch, offset).start_offset)
            # Nothing that the reader had of it is here.
            offset = min(offset, max(since, 0))
        return offset

    def truncate(self, offset: int, epoch: int = 0) -> None:
        """Forget epochs that begin at or after `offset`, but those up to `epoch`: of it is what stands there still, a position."""
        while self._starts and self._starts[-1].start_offset >= offset and self._starts[-1].epoch > epoch:
            self._starts.pop()

    def clamp(self, log_end: int) -> None:
        """An epoch cannot begin past the end of the log; its number stays."""
        self._starts = [EpochStart(start.epoch, min(start.start_offset, log_end)) for start in self._starts]
