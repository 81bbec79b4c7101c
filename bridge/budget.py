"""How fast and how much may cross under a grant. Pure: time comes in.

Invariants: over any time the rate lets through at most `rate` bytes per second and one second's worth on top; a grant's
budget is never exceeded, not even by a part of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BURST_MS: Final = 1_000
"""What was not used for a second may be used at once; more would be no rate."""


@dataclass(slots=True)
class RateLimit:
    """A byte rate shared by all links of one grant; `rate` 0: none."""

    rate: int
    _spent_until_ms: float = 0.0

    def wait_ms(self, now_ms: float) -> float:
        """How long until something may leave; 0: now."""
        return max(0.0, self._spent_until_ms - now_ms) if self.rate else 0.0

    def spend(self, size: int, now_ms: float) -> None:
        """So many bytes leave now. A batch may be longer than the burst: then the next one waits longer."""
        if self.rate:
            begun = max(self._spent_until_ms, now_ms - BURST_MS)
            self._spent_until_ms = begun + size * 1000 / self.rate


def fits_budget(budget_bytes: int, charged_bytes: int, size: int) -> bool:
    """Whether so many bytes more may cross; a budget of 0 is none."""
    return not budget_bytes or charged_bytes + size <= budget_bytes
