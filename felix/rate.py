"""A rate: so much a second, after a burst. Pure; time comes in, in seconds of any clock that does not go back.

A charge may exceed the balance: then there is a debt, and callers wait until time has paid it. A caller that must not go into
debt asks for `lack_s` first.
"""

from __future__ import annotations


class TokenBucket:
    """Tokens of one rate. Over any time no more is let through than the rate, one burst, and the last charge."""

    __slots__ = ("_at", "burst", "debt_s", "level", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        """`rate`: per second, above 0. `burst`: what may come at once after a pause; the bucket begins with it."""
        assert rate > 0 and burst >= 0
        self.rate = rate
        self.burst = burst
        self.level = burst
        """the balance at the last time; below 0 a debt"""
        self.debt_s = 0.0
        """seconds in which there was a debt, since the beginning"""
        self._at = now

    def settle(self, now: float) -> None:
        """Let the time since the last call pay."""
        passed = now - self._at
        if passed <= 0:
            return
        self._at = now
        if self.level < 0:
            self.debt_s += min(passed, -self.level / self.rate)
        self.level = min(self.burst, self.level + passed * self.rate)

    def charge(self, amount: float, now: float) -> None:
        """So much is used, whatever is left."""
        self.settle(now)
        self.level -= amount

    def wait_s(self, now: float) -> float:
        """Seconds until there is no debt."""
        self.settle(now)
        return -self.level / self.rate if self.level < 0 else 0.0

    def lack_s(self, amount: float, now: float) -> float:
        """Seconds until so much may be charged without a debt; 0: now."""
        self.settle(now)
        return (amount - self.level) / self.rate if self.level < amount else 0.0

    def alter(self, rate: float, burst: float, now: float) -> None:
        """Another rate from now on; a debt stays, at the new rate."""
        self.settle(now)
        self.rate, self.burst = rate, burst
        self.level = min(self.level, burst)
