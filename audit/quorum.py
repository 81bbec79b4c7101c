"""How far a log's checkpoints have a quorum of witnesses, and for how long it has been behind. Pure over a trail's values.

Callers: bridge.agent, which lets nothing cross where the lag is over what its configuration allows.
"""

from __future__ import annotations

from collections.abc import Iterable

from audit.checkpoint import SignedCheckpoint
from audit.lag import Lag
from audit.witness_policy import WitnessPolicy
from policy.quantity import Duration


class Quorum:
    """Told now and then what is cosigned and how far the log is. `size` never falls under one policy."""

    def __init__(self, policy: WitnessPolicy, max_lag_ms: int) -> None:
        self.policy = policy
        self.size = 0
        """leaves under a checkpoint that has a quorum"""
        self._max_lag_ms = max_lag_ms
        self._lag = Lag()
        self._missing = ""

    def take(self, policy: WitnessPolicy) -> None:
        """Go by another policy from now on: the next update says how far the log has had its quorum. A leaf that was waited for before, and has
        none by this policy either, has been waited for as long; one that had a quorum by the former policy alone, from that update on."""
        self.policy = policy
        self.size = 0

    def update(self, now_ms: int, cosigned: Iterable[SignedCheckpoint], durable: int) -> None:
        """`cosigned`: checkpoints with verified cosignatures; `durable`: leaves of the log. Any clock that does not go
        back."""
        newest: SignedCheckpoint | None = None
        for held in cosigned:
            if newest is None or held.checkpoint.size > newest.checkpoint.size:
                newest = held
            if self.policy.is_met(by.key for by in held.cosigned):
                self.size = max(self.size, held.checkpoint.size)
        self._missing = self.policy.missing(by.key for by in newest.cosigned) if newest else "nobody cosigned"
        self._lag.update(now_ms, self.size, durable)

    @property
    def max_lag(self) -> Duration:
        """For how long leaves may wait for it."""
        return Duration(self._max_lag_ms)

    def lag_ms(self, now_ms: int) -> int:
        """For how long there has been a leaf that no quorum has cosigned."""
        return self._lag.ms(now_ms)

    def refuses(self, now_ms: int) -> str:
        """Why nothing may cross, or an empty string."""
        lag = self._lag.ms(now_ms)
        if lag <= self._max_lag_ms:
            return ""
        because = f": {self._missing}" if self._missing else ""
        return (
            f"For {Duration(lag // 1000 * 1000)} there have been leaves of the egress log that no quorum of witnesses "
            f"cosigned; {Duration(self._max_lag_ms)} are allowed{because}."
        )
