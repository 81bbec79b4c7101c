"""Pace: so many calls a second by each of many callers, after a burst. Pure; the clock is handed in."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil


class Pace:
    """A token bucket for each caller. Of more than `callers_max` the one longest away is forgotten."""

    def __init__(self, per_s: float, burst: int, callers_max: int, clock_s: Callable[[], float]) -> None:
        assert per_s > 0 and burst >= 1 and callers_max >= 1
        self._per_s, self._burst, self._callers_max, self._clock_s = per_s, burst, callers_max, clock_s
        self._held: dict[str, tuple[float, float]] = {}

    def take(self, caller: str) -> int:
        """0 where the caller may go on, else after how many ms it may ask again."""
        now = self._clock_s()
        tokens, at = self._held.pop(caller, (float(self._burst), now))
        tokens = min(float(self._burst), tokens + (now - at) * self._per_s)
        if len(self._held) >= self._callers_max:
            del self._held[next(iter(self._held))]
        if tokens >= 1:
            self._held[caller] = (tokens - 1, now)
            return 0
        self._held[caller] = (tokens, now)
        return ceil((1 - tokens) / self._per_s * 1000)
