"""Lag: for how long something has been behind. Pure; times in ms of any clock that does not go back."""

from __future__ import annotations


class Lag:
    """Told now and then how far it is and how far it should be; says since when it has not been there.

    Exact to the time between two updates: it remembers one mark, how far it should have been and when that was seen.
    """

    def __init__(self) -> None:
        self._mark: tuple[int, int] | None = None

    def update(self, now_ms: int, have: int, want: int) -> None:
        """`have` and `want` in the same unit; `want` may only grow, and so does `have`, unless another thing is asked for from now on."""
        if self._mark is not None and have >= self._mark[1]:
            self._mark = None
        if self._mark is None and have < want:
            self._mark = (now_ms, want)

    def ms(self, now_ms: int) -> int:
        """0 where it is not behind."""
        return 0 if self._mark is None else max(0, now_ms - self._mark[0])
