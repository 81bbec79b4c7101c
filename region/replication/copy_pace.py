"""The pace of copies that are not in sync: so many bytes a second of all of them that one broker sends. Event loop only.

Without a bound a copy takes what the leader's event loop, its link and the other broker's disk can give, and publishers wait behind it. What publishers
wait for is not paced: copies in sync, and those that a shard needs before it can be written (region.replication.leader). Neither are bytes that were
written while a copy is made, so that it gains on its stream by this rate however fast that is written.
"""

from __future__ import annotations

import asyncio
from typing import Final

from felix.rate import TokenBucket
from felix.runtime.port import Clock

COPY_RATE_BYTES: Final = 8 << 20
"""A second: decision 0136 has what publishers notice of it."""
BURST_S: Final = 0.004
"""What may come at once after a pause, in time of the rate: one message of a copy. More of them in a row hold the event loop for as long as publishers notice."""
TURN_S_MAX: Final = 2.0
"""Nothing waits longer, however many copies are made at once: a follower gives up a leader that does not answer (COPY_MS)."""


class CopyPace:
    """One per broker."""

    def __init__(self, rate_bytes: int, clock: Clock) -> None:
        self._clock = clock
        self._bucket = TokenBucket(rate_bytes, rate_bytes * BURST_S, clock.monotonic())

    async def take(self, size: int) -> None:
        """Return once `size` more bytes may be read and sent, behind those who asked before."""
        now = self._clock.monotonic()
        wait_s = self._bucket.wait_s(now)
        if wait_s < TURN_S_MAX:
            self._bucket.charge(size, now)
        if wait_s > 0:
            await asyncio.sleep(min(wait_s, TURN_S_MAX))

    def give_back(self, size: int) -> None:
        """So much less was read than was taken; below 0: more."""
        self._bucket.charge(-size, self._clock.monotonic())
