"""The wall clock of one broker of several, held to those of most of them.

What is told by a broker's wall clock and cannot be taken back (records that retention lets go of, values that expire, message ids that are forgotten) is promised
by the time that people have, which most clocks of a region show. So where at least three brokers' clocks are known, and the own one is further than
CLOCK_OFF_MS_MAX from the middle one, streams and what lives with them go by that. Two clocks that differ do not say which one is wrong: then the own one counts, as it does where
a broker is alone. Certificates, grants and the leaves of audit logs go by the own clock, whatever others say (decision 0120).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from felix.runtime.port import Clock

CLOCK_OFF_MS_MAX: Final = 5_000
"""What one broker's clock may be off: it is known to a second or so."""


def middle(own: int, others: Sequence[int]) -> int:
    """The own clock, or where most others are further from it than CLOCK_OFF_MS_MAX, on the same side, the nearest one that half of them do not lie beyond.
    `others`: in order; fewer than two say nothing."""
    count = len(others)
    if count < 2:
        return own
    nearest = min(max(own, others[(count - 1) // 2]), others[count // 2])
    return own if abs(own - nearest) <= CLOCK_OFF_MS_MAX else nearest


class RegionClock:
    """A Clock. `others` is to be set once there are links: by how much each other broker's wall clock is more than this broker's `boot_ms`, in order. On any thread."""

    def __init__(self, own: Clock) -> None:
        self._own = own
        self.others: Callable[[], Sequence[int]] = tuple
        self.monotonic = own.monotonic
        self.monotonic_ns = own.monotonic_ns
        self.boot_ms = own.boot_ms

    def now_ms(self) -> int:
        own_ms, others = self._own.now_ms(), self.others()
        if len(others) < 2:
            return own_ms
        boot_ms = self.boot_ms()
        return boot_ms + middle(own_ms - boot_ms, others)
