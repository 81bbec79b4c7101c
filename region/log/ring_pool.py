"""The memory that rings of durable shards share: taken entry by entry out of one budget, given back as entries leave.

What a ring holds is on the disk as well, so any of it may go at any time: where the budget is used up, the ring that was appended to
longest ago gives way. An idle shard holds nothing, a busy one up to its own bound, and all together never more than the budget.

Invariants: `held_bytes` is what the pool took of the budget and has not given back; it is the sum over its rings. Used by one thread, the
event loop's.
"""

from __future__ import annotations

from typing import Protocol


class Budget(Protocol):
    """Bytes of one purpose (region.limits.budget)."""

    limit_bytes: int
    used_bytes: int

    def take(self, amount: int) -> bool: ...
    def give(self, amount: int) -> None: ...


class Held(Protocol):
    """A ring, as the pool sees it."""

    def give_way(self) -> None:
        """Let go of the oldest entry, and `give` its bytes back. There is one."""


class RingPool:
    """See the module. Whoever else takes of the budget asks `make_room` first."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        # In order of the last append, oldest first; those alone that hold something.
        self._rings: dict[Held, int] = {}
        self.held_bytes = 0

    @property
    def room_bytes(self) -> int:
        """What others could take if all rings gave way."""
        return self._budget.limit_bytes - self._budget.used_bytes + self.held_bytes

    def make_room(self, amount: int) -> bool:
        """Let rings give way until `amount` is free; False where that is not enough, with all as it was."""
        if amount > self.room_bytes:
            return False
        while self._budget.limit_bytes - self._budget.used_bytes < amount:
            next(iter(self._rings)).give_way()
        return True

    def take(self, ring: Held, amount: int) -> bool:
        """Bytes for the newest entry of `ring`, where there is room or others give way, itself last of all; False takes nothing."""
        self._rings[ring] = self._rings.pop(ring, 0)
        if not self.make_room(amount) or not self._budget.take(amount):
            if not self._rings[ring]:
                del self._rings[ring]
            return False
        # It may have given way itself, and be gone from here.
        self._rings[ring] = self._rings.get(ring, 0) + amount
        self.held_bytes += amount
        return True

    def give(self, ring: Held, amount: int) -> None:
        """Bytes of entries that left `ring`."""
        left = self._rings[ring] - amount
        assert left >= 0
        if left:
            self._rings[ring] = left
        else:
            del self._rings[ring]
        self.held_bytes -= amount
        self._budget.give(amount)
