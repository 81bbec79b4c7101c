"""The wall clock where somebody sets it: what has begun goes on, and what cannot be taken back waits.

What a broker has seen begin (a lease, a delivery, a delay) lasts as long as it was to, wherever the clock is set meanwhile: its time moves with the clock.
What stands in a log or a journal from before goes by the clock as it is. Pure; on one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SET_MS: Final = 6_000
"""A clock that goes ahead or back by less is held for one that was set a little, or that runs faster or slower: times end so much sooner or later then. More than what the
clock of one of several brokers goes at once as it drifts away from the others' (region.cluster.clocks): that may be often."""


HELD_MS: Final = 3_600_000
"""How long a clock that was set ahead is not believed by what deletes records: time for whoever set it wrong to set it right."""


class WallClock:
    """Says by how much it was set. Times in ms."""

    __slots__ = ("_boot_ms", "_offset_ms", "_wall_ms", "_was_set")

    def __init__(
        self, wall_ms: Callable[[], int], boot_ms: Callable[[], int], was_set: Callable[[int], None]
    ) -> None:
        """`boot_ms`: never goes back (felix.runtime.port.Clock). `was_set`: the clock was set by so much since the last look, ahead, or, negative, back."""
        self._wall_ms = wall_ms
        self._boot_ms = boot_ms
        self._was_set = was_set
        self._offset_ms = wall_ms() - boot_ms()

    def now_ms(self) -> int:
        """The wall clock as it is; `was_set` is told before, so that what is decided now begins by the same clock as all else."""
        now_ms = self._wall_ms()
        by_ms = now_ms - self._boot_ms() - self._offset_ms
        if abs(by_ms) > SET_MS:
            self._offset_ms += by_ms
            self._was_set(by_ms)
        return now_ms


class HeldClock:
    """A wall clock for what deletes: where it is set ahead, it goes on as before for HELD_MS, and where it is set back meanwhile nothing has happened."""

    __slots__ = ("_ahead", "_boot_ms", "_clock")

    def __init__(self, wall_ms: Callable[[], int], boot_ms: Callable[[], int], ahead_ms: int = 0) -> None:
        """`ahead_ms`: by how much it may have been set ahead just now."""
        self._boot_ms = boot_ms
        self._clock = WallClock(wall_ms, boot_ms, self._was_set)
        self._ahead: list[tuple[int, int]] = []
        """by how much it was set ahead, each with the end of its time by `boot_ms`; the newest last"""
        if ahead_ms:
            self._was_set(ahead_ms)

    def _was_set(self, by_ms: int) -> None:
        if by_ms > 0:
            self._ahead.append((self._boot_ms() + HELD_MS, by_ms))
            return
        back_ms = -by_ms
        while self._ahead and back_ms:
            until_ms, ahead_ms = self._ahead.pop()
            if ahead_ms > back_ms:
                self._ahead.append((until_ms, ahead_ms - back_ms))
            back_ms -= min(ahead_ms, back_ms)

    def now_ms(self) -> int:
        """Never later than the clock shows."""
        now_ms, boot_ms = self._clock.now_ms(), self._boot_ms()
        self._ahead = [each for each in self._ahead if each[0] > boot_ms]
        return now_ms - sum(ahead_ms for _, ahead_ms in self._ahead)
