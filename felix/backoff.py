"""Backoff: how long to wait before trying again, growing, bounded, and spread so that clients do not march in step.

Pure: randomness comes in, and waiting is the caller's affair.
"""

from __future__ import annotations

from typing import Final

import msgspec

from felix.errors import Code, FelixError, NotLeaderError, RequestError
from felix.runtime.port import Random

ELECTION_WAIT_MS_MAX: Final = 250
"""The longest wait for a leader, at first: when a lease ends its successor is there within milliseconds, and whoever had doubled his wait
meanwhile would wait for as long again."""
ELECTION_WAITS: Final = 60
"""So many such waits, twice the default lease in all; then nobody knows when there will be a leader, and waits are as long as after any failures."""


class BackoffPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the wait, in ms."""

    first_ms: int = 50
    """After the first failure: a broker that restarts is back soon."""
    ceiling_ms: int = 5_000
    """Never longer: the broker may be back any time, and one try is cheap."""

    def __post_init__(self) -> None:
        if not 1 <= self.first_ms <= self.ceiling_ms:
            raise RequestError(
                f"A backoff from {self.first_ms} to {self.ceiling_ms} ms cannot be kept; the first must be at least "
                "1 ms and not above the ceiling.",
                code=Code.CONFIG_INVALID,
            )


class Backoff(msgspec.Struct):
    """The waits of one series of failures: the ceiling doubles, the wait is drawn from its upper half."""

    policy: BackoffPolicy
    random: Random
    failures: int = 0
    epoch: int = 0
    """the newest that a refusal named"""

    def next_ms(self, at_least_ms: int | None = None) -> int:
        """The next wait in ms; never below what the peer asked for, which may be above the ceiling."""
        return self._next_ms(at_least_ms, self.policy.ceiling_ms)

    def after_ms(self, error: FelixError | None) -> int:
        """The next wait in ms after this refusal, as `next_ms`. Where nobody leads it is ELECTION_WAIT_MS_MAX at most, or what the broker asked for. The first refusal
        that names a newer epoch begins the series anew: whoever was elected since is about to serve."""
        if isinstance(error, NotLeaderError) and error.epoch > self.epoch:
            self.epoch, self.failures = error.epoch, 0
        is_election = isinstance(error, NotLeaderError) and self.failures < ELECTION_WAITS
        return self._next_ms(
            None if error is None else error.retry_after_ms,
            min(self.policy.ceiling_ms, ELECTION_WAIT_MS_MAX) if is_election else self.policy.ceiling_ms,
        )

    def _next_ms(self, at_least_ms: int | None, ceiling_ms: int) -> int:
        ceiling = min(ceiling_ms, self.policy.first_ms << min(self.failures, 30))
        self.failures += 1
        drawn = ceiling - self.random.randrange(ceiling // 2 + 1)
        return max(1, drawn, at_least_ms or 0)

    def reset(self) -> None:
        """It worked; the next series begins at the first wait."""
        self.failures = 0
