"""The assignment of shards to a subscription's consumers: sticky, balanced, changed step by step.

A pure state machine. `rebalance` compares what is with what should be and returns what is to be done; the caller tells the
consumers. A shard goes from one consumer to another in steps: it is revoked; its consumer finishes, acknowledges and gives it
back (`released`), or its time runs out; only then is it assigned to the other. So no shard ever has two owners.

Invariants:
- a shard has at most one owner; while there are consumers, one that has none gets one with the next `rebalance`;
- once what was revoked is back and `rebalance` was called again, numbers of shards differ by at most one between the
  consumers that count;
- no more shards move than balance takes: who has no more than its part keeps all of it;
- a stalled consumer does not count while another one does; with `exclusive`, one counts.

Times in ms.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Step(Enum):
    """The next step: assign a shard; revoke it with a drain time; revoke it at once."""

    ASSIGN = "assign"
    REVOKE = "revoke"
    FENCE = "fence"


class Move(NamedTuple):
    """One step, for one shard and the consumer it is about."""

    step: Step
    shard: int
    member: int


class Group:
    """The consumers of one subscription, by number, in the order in which they came."""

    __slots__ = ("_exclusive", "_shards", "drain_ms", "draining", "members", "owners")

    def __init__(self, shards: int, *, drain_ms: int, exclusive: bool = False) -> None:
        self._shards = shards
        self.drain_ms = drain_ms
        self._exclusive = exclusive
        self.members: dict[int, bool] = {}
        """True for one that is stalled."""
        self.owners: dict[int, int] = {}
        self.draining: dict[int, int] = {}
        """Shards that were revoked and are not back yet, with when their time is up."""

    # -- what happened ---------------------------------------------------------------------------------

    def join(self, member: int) -> None:
        assert member not in self.members
        self.members[member] = False

    def leave(self, member: int) -> list[int]:
        """The consumer is gone; returns the shards that it had."""
        del self.members[member]
        return [shard for shard in self.of(member) if self._free(shard)]

    def released(self, member: int, shard: int) -> bool:
        """The consumer gave the shard back. False where it did not have it."""
        return self.owners.get(shard) == member and self._free(shard)

    def stall(self, member: int) -> None:
        """The consumer acknowledges nothing any more."""
        self.members[member] = True

    def clock_set(self, by_ms: int) -> None:
        """The clock was set ahead, or, negative, back: what was revoked has the time that is left of it."""
        for shard in self.draining:
            self.draining[shard] += by_ms

    def resume(self, member: int) -> bool:
        """It does again. True where it was stalled."""
        stalled, self.members[member] = self.members[member], False
        return stalled

    # -- what is so ------------------------------------------------------------------------------------

    def of(self, member: int) -> list[int]:
        """The shards that the consumer has."""
        return sorted(shard for shard, owner in self.owners.items() if owner == member)

    def next_ms(self) -> int | None:
        """When the time of something that was revoked is up."""
        return min(self.draining.values(), default=None)

    # -- what is to be done ----------------------------------------------------------------------------

    def rebalance(self, now_ms: int) -> list[Move]:
        """Steps towards balance, already applied to this state before the consumers are notified."""
        moves: list[Move] = []
        for shard in [shard for shard, until_ms in self.draining.items() if until_ms <= now_ms]:
            moves.append(Move(Step.FENCE, shard, self.owners[shard]))
            self._free(shard)
        for shard, member in self._plan().items():
            owner = self.owners.get(shard)
            if owner == member or shard in self.draining:
                continue
            if owner is not None and not self.members[owner]:
                self.draining[shard] = now_ms + self.drain_ms
                moves.append(Move(Step.REVOKE, shard, owner))
                continue
            if owner is not None:
                # A stalled consumer would not answer.
                moves.append(Move(Step.FENCE, shard, owner))
                self._free(shard)
            self.owners[shard] = member
            moves.append(Move(Step.ASSIGN, shard, member))
        return moves

    def _free(self, shard: int) -> bool:
        del self.owners[shard]
        self.draining.pop(shard, None)
        return True

    def _plan(self) -> dict[int, int]:
        """Shard → consumer, as it should be."""
        counted = [member for member, stalled in self.members.items() if not stalled] or list(self.members)
        if self._exclusive and counted:
            # The consumer with the most keeps its shards: shards that are still on their way to it are not diverted.
            counted = [max(counted, key=lambda member: (len(self.of(member)), -counted.index(member)))]
        if not counted:
            return {}
        least, more = divmod(self._shards, len(counted))
        # The larger parts go to those who have most already. What is being given back does not count as kept.
        held = {
            member: sorted(self.of(member), key=lambda shard: (shard in self.draining, shard))
            for member in counted
        }
        order = sorted(counted, key=lambda member: -len(held[member]))
        part = {member: least + (index < more) for index, member in enumerate(order)}
        plan = {shard: member for member in order for shard in held[member][: part[member]]}
        left = iter(shard for shard in range(self._shards) if shard not in plan)
        for member in counted:
            for _ in range(part[member] - len(held[member][: part[member]])):
                plan[next(left)] = member
        return plan
