"""Pace: so many calls a second by each of many callers, after a burst. Pure; the clock is handed in."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from felix.bounded import BoundedMap
from felix.rate import TokenBucket


class Pace:
    """A token bucket for each caller. Of more than `callers_max` the one longest away is forgotten."""

    def __init__(self, per_s: float, burst: int, callers_max: int, clock_s: Callable[[], float]) -> None:
        assert per_s > 0 and burst >= 1
        self._per_s, self._burst, self._clock_s = per_s, burst, clock_s
        self._callers: BoundedMap[str, TokenBucket] = BoundedMap(callers_max)

    def take(self, caller: str) -> int:
        """0 where the caller may go on, else after how many ms it may ask again."""
        now = self._clock_s()
        bucket = self._callers.use(caller)
        if bucket is None:
            bucket = TokenBucket(self._per_s, self._burst, now)
            self._callers.put(caller, bucket)
        lack_s = bucket.lack_s(1, now)
        if lack_s:
            return ceil(lack_s * 1000)
        bucket.charge(1, now)
        return 0
