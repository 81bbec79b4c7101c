"""Use of one grant's budget and rate for records that came into this region. Pure; time is an argument.

The agent holds itself to both. The destination counts for itself: the budget from its own ingress log (the bytes of ACK
leaves, `audit.trail.Trail.charged_bytes`) and what is on its way there, so a restart forgets nothing; the rate by
holding envelopes back, so an honest agent, whose bucket is the same, is never refused for it.

In a region of several brokers each that leads a destination of the grant has a meter, and hears what the log says whenever a link is
opened and with the answer to each leaf: it lacks what was on its way elsewhere meanwhile.

Invariants: `taken_bytes` is at most what the log says and what is on its way, each byte once, and at least what the log said when it was
heard last; no range is taken that passes the budget by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BURST_S: Final = 1.0
"""What was not used for a second may be used at once (docs/bridges.md), as at the agent."""


@dataclass(slots=True)
class GrantMeter:
    """Of one grant, for all its links. Sizes in bytes of keys, encoded headers and payloads; a range that
    has none counts EMPTY_RANGE_BYTES (`audit.leaf.Header.charged_bytes`)."""

    taken_bytes: int
    _spent_until_s: float = 0.0

    def fits(self, budget_bytes: int, size: int) -> bool:
        """Whether so many bytes more are within the budget; a budget of 0 is none."""
        return not budget_bytes or self.taken_bytes + size <= budget_bytes

    def hear(self, logged_bytes: int) -> None:
        """The log had so many bytes under the grant, whoever brought them."""
        self.taken_bytes = max(self.taken_bytes, logged_bytes)

    def take(self, size: int) -> None:
        """A range of this size is on its way to the log."""
        self.taken_bytes += size

    def give_back(self, size: int) -> None:
        """It did not get there."""
        self.taken_bytes -= size

    def wait_s(self, rate_bytes: int, now_s: float) -> float:
        """How long the next range is held back; 0: not at all. A rate of 0 is none."""
        return max(0.0, self._spent_until_s - now_s) if rate_bytes else 0.0

    def spend(self, rate_bytes: int, size: int, now_s: float) -> None:
        """A range of this size goes on now."""
        if rate_bytes:
            begun = max(self._spent_until_s, now_s - BURST_S)
            self._spent_until_s = begun + size / rate_bytes
