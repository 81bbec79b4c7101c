"""The leader-epoch history of a shard: which leader's epoch begins at which offset.

A follower finds with it where its log and a new leader's part. Pure; the caller makes it durable before the
first batch of an epoch is appended. Invariants: epochs strictly increase, start offsets never decrease.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from felix.errors import Code, RequestError


class EpochStart(NamedTuple):
    """`epoch` begins with the batch at `start_offset`."""

    epoch: int
    start_offset: int


class EpochHistory:
    """The epochs that still have a place in the log, oldest first."""

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
        return True

    def end_of(self, epoch: int, log_end: int) -> EpochStart:
        """The newest epoch not above `epoch`, with the offset at which the next one begins (or `log_end`).

        Where the history begins above `epoch`, the answer is epoch 0 and the first start.
        """
        at = bisect_right(self._starts, epoch, key=lambda start: start.epoch)
        end = self._starts[at].start_offset if at < len(self._starts) else log_end
        return EpochStart(self._starts[at - 1].epoch if at else 0, end)

    def truncate(self, offset: int) -> None:
        """Forget epochs that begin at or after `offset`."""
        while self._starts and self._starts[-1].start_offset >= offset:
            self._starts.pop()

    def clamp(self, log_end: int) -> None:
        """An epoch cannot begin past the end of the log; its number stays."""
        self._starts = [EpochStart(start.epoch, min(start.start_offset, log_end)) for start in self._starts]

    def trim(self, log_start: int) -> None:
        """Forget epochs that ended at or before `log_start`."""
        while len(self._starts) > 1 and self._starts[1].start_offset <= log_start:
            del self._starts[0]
