"""The wall clock of a view, which says by how much somebody has set it.

What a broker has seen begin (a lease, a delivery, a delay) lasts as long as it was to, wherever the clock is set meanwhile: its time moves with the clock.
What stands in a log or a journal from before goes by the clock as it is. Pure; on one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SET_MS: Final = 5_000
"""A clock that goes ahead or back by less is held for one that was set a little, or that runs faster or slower: times end so much sooner or later then."""


class WallClock:
    """See the module. Times in ms."""

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
