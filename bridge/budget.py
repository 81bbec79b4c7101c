"""How fast and how much may cross under a grant. Pure: time comes in.

Invariants: over any time the rate lets through at most so many bytes per second and one second's worth on top; a grant's
budget is never exceeded, not even by a part of a batch.
"""

from __future__ import annotations

from typing import Final

from felix.rate import TokenBucket

BURST_S: Final = 1.0
"""What was not used for a second may be used at once; more would be no rate."""


def rate_limit(rate_bytes: int, now_s: float) -> TokenBucket | None:
    """Shared by all links of one grant; None where its terms limit nothing. A batch may be longer than the burst: then the next one
    waits longer."""
    return TokenBucket(rate_bytes, rate_bytes * BURST_S, now_s) if rate_bytes else None


def fits_budget(budget_bytes: int, charged_bytes: int, size: int) -> bool:
    """Whether so many bytes more may cross; a budget of 0 is none."""
    return not budget_bytes or charged_bytes + size <= budget_bytes
