"""Who leads a stream, by the shard records that are known: this broker, and in which epochs, or another one, and where it is reached.

All shards of a stream have one leader so far (`together`): a broker that leads some of them, while the others are not placed yet or have
another leader, serves none.

Pure. Invariant: an epoch is this broker's only under its present registration, so what was led before a restart is not led again
without an election.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

from region.cluster.election import has_yielded
from region.cluster.records import ShardId, ShardRecord
from region.cluster.view import ClusterView


class Leader(NamedTuple):
    """A broker that leads. `address`: where clients reach it, `host:port`; empty where it is not alive."""

    broker: str
    address: str
    epoch: int


class Assignments:
    """What `view` says of the broker `broker`, whose present registration `registration` tells (0: none yet)."""

    def __init__(self, view: ClusterView, broker: str, registration: Callable[[], int]) -> None:
        self._view = view
        self._broker = broker
        self._registration = registration

    def epochs(self, incarnation: str, shards: int, stopped: Container[int] = ()) -> dict[int, int]:
        """The epoch of each shard of a stream that this broker leads as a whole, but for those that are `stopped`; empty where it does not."""
        found: dict[int, int] = {}
        for number in range(shards):
            if number in stopped:
                continue
            record = self._view.shards.get(ShardId(incarnation, number))
            if record is None or not self._is_ours(record):
                return {}
            found[number] = record.epoch
        return found

    def leader(self, incarnation: str, shard: int = 0) -> Leader | None:
        """Who leads a shard; None while nobody does."""
        record = self._view.shards.get(ShardId(incarnation, shard))
        if record is None or not record.leader or has_yielded(record):
            return None
        return Leader(record.leader, self.address(record.leader), record.epoch)

    def placed(self, incarnation: str, shard: int = 0) -> str:
        """The broker that has a shard's records, whether it leads now or not; empty before it is placed."""
        record = self._view.shards.get(ShardId(incarnation, shard))
        return "" if record is None else record.leader or record.replicas[0]

    def members(self, incarnation: str, shard: int) -> tuple[list[str], list[str]]:
        """The brokers that have copies of a shard, and those of them that are in sync."""
        record = self._view.shards.get(ShardId(incarnation, shard))
        return ([], []) if record is None else (list(record.replicas), sorted(record.isr))

    def unclean(self, incarnation: str, shard: int) -> int:
        """The last epoch of a shard whose leader may have lacked what was committed; 0: none."""
        record = self._view.shards.get(ShardId(incarnation, shard))
        return 0 if record is None else record.unclean

    def address(self, broker: str) -> str:
        """Where clients reach a broker; empty where it is not alive."""
        alive = self._view.alive.get(broker)
        return "" if alive is None else alive.client_address

    def _is_ours(self, record: ShardRecord) -> bool:
        registration = self._registration()
        return (
            record.leader == self._broker
            and not has_yielded(record)
            and registration != 0
            and record.isr.get(self._broker) == registration
        )
