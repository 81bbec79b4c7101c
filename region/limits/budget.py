"""Process-wide byte budgets: many sessions together cannot hold what one may not.

A budget is taken before memory is, and given back when it is free; what cannot be taken is refused or waits.
Invariant: 0 ≤ used ≤ limit, always. Used on the event loop alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

MEBIBYTE: Final = 1 << 20


@dataclass(slots=True)
class Budget:
    """Bytes of one purpose. `name` is what metrics and errors call it."""

    name: str
    limit_bytes: int
    used_bytes: int = 0
    refused: int = 0

    def take(self, amount: int) -> bool:
        """True where `amount` fits, and is then taken; False takes nothing."""
        assert amount >= 0
        if self.used_bytes + amount > self.limit_bytes:
            self.refused += 1
            return False
        self.used_bytes += amount
        return True

    def give(self, amount: int) -> None:
        """Return what was taken."""
        assert 0 <= amount <= self.used_bytes, (self.name, amount, self.used_bytes)
        self.used_bytes -= amount


@dataclass(slots=True)
class Budgets:
    """The broker's budgets; metrics show each with its limit."""

    publish: Budget = field(default_factory=lambda: Budget("publish", 256 * MEBIBYTE))
    """Publish credit handed out to all sessions: batches on the way in or not yet durable."""
    ingest: Budget = field(default_factory=lambda: Budget("ingest", 256 * MEBIBYTE))
    """Ingest credit handed out to bridges of other regions: envelopes on the way in or without a receipt."""
    delivery: Budget = field(default_factory=lambda: Budget("delivery", 256 * MEBIBYTE))
    """Bytes given to all connections and not yet sent."""
    catch_up: Budget = field(default_factory=lambda: Budget("catch_up", 64 * MEBIBYTE))
    """Bytes read from disk for subscribers that have fallen behind, not yet sent."""

    ring: Budget = field(default_factory=lambda: Budget("ring", 1024 * MEBIBYTE))
    """Newest records of all shards in memory; taken when a stream is opened."""
    cache: Budget = field(default_factory=lambda: Budget("cache", 512 * MEBIBYTE))
    """Keys and values that caches hold in memory."""
    queue: Budget = field(default_factory=lambda: Budget("queue", 128 * MEBIBYTE))
    """Records that queues have read ahead for their workers."""
    transactions: Budget = field(default_factory=lambda: Budget("transactions", 64 * MEBIBYTE))
    """Batches and acknowledgements of open transactions, until they are committed or dropped."""

    exchange: Budget = field(default_factory=lambda: Budget("exchange", 64 * MEBIBYTE))
    """Calls to queues, caches, consumers and transactions that are not answered yet."""

    def all(self) -> tuple[Budget, ...]:
        return (
            self.publish, self.ingest, self.delivery, self.catch_up, self.ring, self.cache, self.queue, self.transactions,
            self.exchange,
        )  # fmt: skip

    def limit(self, limits: Mapping[str, int]) -> None:
        """Set the limits, by the budgets' names; every budget is named."""
        for budget in self.all():
            budget.limit_bytes = limits[budget.name]
