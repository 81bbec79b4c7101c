"""Leases: a promise of the store that what is bound to them goes away once nobody renews them.

Here: `Lease`, the holder's side, the same over every store; `Deadlines`, the granting side of the stores that
live in this process; the clock both use.

Invariants:
- a holder counts its time from *before* a grant or renewal was sent, so `remaining_ms` never says more than
  the store will honour: a leader that stops at 0 has stopped before another can be elected;
- a lease that was lost stays lost; `lost` is set exactly once and `reason` says why.

Created only by the stores; used by the holders of leases.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from felix.errors import Code, RequestError, UnavailableError

LEASE_TTL_MS_MIN: Final = 1_000
"""etcd counts leases in whole seconds (and grants no less than one and a half election timeouts)."""
LEASE_TTL_MS_MAX: Final = 3_600_000
"""An hour: a lease is a sign of life, and one that outlives an outage says nothing."""
_RENEWALS_PER_TTL: Final = 3
"""Two renewals may fail before the third would come too late."""
_RETRY_MS: Final = 200
"""Pause after a failed renewal, while time remains."""


class LeaseLostError(RequestError):
    """The store does not know the lease: it ran out or was revoked. What was bound to it is gone."""

    default_code = Code.NOT_FOUND


def lease_lost(lease_id: int) -> LeaseLostError:
    """The error for a lease that the store does not hold (any more)."""
    return LeaseLostError(
        f"Lease {lease_id:#x} is not held by the metadata store: it ran out or was revoked.",
        hint="Grant a new lease and write again what was bound to this one.",
    )


class Lease:
    """A granted lease, held by this process.

    `lost` is set once the lease is gone: the store said so, its time ran out without a renewal, it was
    revoked, or the store was closed. With `keep_alive` started, it is renewed three times per TTL.
    """

    def __init__(
        self,
        lease_id: int,
        ttl_ms: int,
        *,
        sent_ms: int,
        renew: Callable[[int], Awaitable[int]],
        revoke: Callable[[int], Awaitable[None]],
        clock_ms: Callable[[], int],
    ) -> None:
        """`clock_ms`: as Clock.boot_ms, for the store counts the time of a suspension too. `sent_ms`: it before the grant was sent. `renew(id)` answers the TTL, or raises LeaseLostError."""
        self.id = lease_id
        self.ttl_ms = ttl_ms
        self.lost = asyncio.Event()
        self.reason = ""
        self.resumed_ms = 0
        """when it was renewed after the store had said nothing for two thirds of a TTL, as `renewed_ms`; 0 where it never was"""
        self._valid_until_ms = sent_ms + ttl_ms
        self._renew = renew
        self._revoke = revoke
        self._clock_ms = clock_ms
        self._keeper: asyncio.Task[None] | None = None

    def remaining_ms(self) -> int:
        """How long the store surely keeps this lease from now on; 0 once it is lost or may be."""
        return 0 if self.lost.is_set() else max(0, self._valid_until_ms - self._clock_ms())

    @property
    def renewed_ms(self) -> int:
        """When what the store answered last was sent, by the clock of `clock_ms`."""
        return self._valid_until_ms - self.ttl_ms

    def keep_alive(self) -> None:
        """Renew in the background until the lease is lost, revoked or its store is closed."""
        if self._keeper is None and not self.lost.is_set():
            self._keeper = asyncio.get_running_loop().create_task(
                self._keep(), name=f"metadata lease {self.id:#x}"
            )

    async def renew(self) -> None:
        """One renewal. Raises LeaseLostError if the store does not hold it, UnavailableError if it cannot say."""
        if self.lost.is_set():
            raise lease_lost(self.id)
        sent_ms = self._clock_ms()
        try:
            ttl_ms = await self._renew(self.id)
        except LeaseLostError as error:
            self.lose(error.sentence)
            raise
        if sent_ms - self.renewed_ms > self.ttl_ms * 2 // 3:
            self.resumed_ms = sent_ms
        self._valid_until_ms = max(self._valid_until_ms, sent_ms + ttl_ms)

    async def revoke(self) -> None:
        """Give the lease back: what is bound to it is deleted now. A lost lease is left alone."""
        if self.lost.is_set():
            return
        self.lose("The lease was revoked by its holder.")
        await self._revoke(self.id)

    def lose(self, reason: str) -> None:
        """Mark the lease as lost and stop renewing it. Nothing is sent."""
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
        if self._keeper is not None and self._keeper is not asyncio.current_task():
            self._keeper.cancel()
        self._keeper = None

    async def _keep(self) -> None:
        pause_ms = self.ttl_ms // _RENEWALS_PER_TTL
        while not self.lost.is_set():
            await asyncio.sleep(min(pause_ms, self.remaining_ms()) / 1_000)
            try:
                async with asyncio.timeout(self.remaining_ms() / 1_000):
                    await self.renew()
                pause_ms = self.ttl_ms // _RENEWALS_PER_TTL
            except LeaseLostError:
                return
            except (UnavailableError, TimeoutError):
                pause_ms = _RETRY_MS
            if self.remaining_ms() == 0:
                self.lose(f"No renewal reached the metadata store for {self.ttl_ms} ms.")


class Deadlines:
    """When each granted lease runs out. Pure: the clock's reading is handed in, nothing waits here."""

    def __init__(self) -> None:
        self._leases: dict[int, tuple[int, int]] = {}

    def grant(self, lease_id: int, ttl_ms: int, now_ms: int) -> None:
        """Hold `lease_id` until `now_ms + ttl_ms`."""
        assert lease_id not in self._leases
        self._leases[lease_id] = (ttl_ms, now_ms + ttl_ms)

    def renew(self, lease_id: int, now_ms: int) -> int:
        """Another TTL from now; answers the TTL. Raises LeaseLostError, also where it ran out a moment ago."""
        if not self.holds(lease_id, now_ms):
            raise lease_lost(lease_id)
        ttl_ms, _ = self._leases[lease_id]
        self._leases[lease_id] = (ttl_ms, now_ms + ttl_ms)
        return ttl_ms

    def holds(self, lease_id: int, now_ms: int) -> bool:
        """True while the lease has not run out."""
        held = self._leases.get(lease_id)
        return held is not None and now_ms < held[1]

    def is_known(self, lease_id: int) -> bool:
        """True also once it has run out, until it is forgotten."""
        return lease_id in self._leases

    def end(self, lease_id: int, now_ms: int) -> bool:
        """It runs out now, if it has not before. True where the lease was known."""
        held = self._leases.get(lease_id)
        if held is not None:
            self._leases[lease_id] = (held[0], min(held[1], now_ms))
        return held is not None

    def forget(self, lease_id: int) -> bool:
        """True where the lease was known."""
        return self._leases.pop(lease_id, None) is not None

    def due(self, now_ms: int) -> list[int]:
        """Leases that ran out, oldest first."""
        return [
            lease_id
            for deadline, lease_id in sorted((d, i) for i, (_, d) in self._leases.items())
            if deadline <= now_ms
        ]

    def next_ms(self) -> int | None:
        """The earliest deadline, or None."""
        return min((deadline for _, deadline in self._leases.values()), default=None)


async def cancel_and_wait(task: asyncio.Task[None] | None) -> None:
    """Cancel a background task and wait until it has ended, whatever it ended with."""
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
