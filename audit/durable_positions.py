"""What a log's durable leaves say, asked from any thread. Caller: audit.trail (applies); bridge and region ask.

Invariant: a leaf counts here once it is durable, and never before. Nothing blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from audit.leaf import Header
from audit.position import Crossing, LinkShard, Positions, ShardName


class DurablePositions:
    """`audit.position.Positions` of an open log, one thread at a time."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        self._lock = threading.Lock()

    def apply(self, first: int, headers: Iterable[Header | None]) -> None:
        """These leaves, from index `first` on, are durable."""
        with self._lock:
            for at, header in enumerate(headers):
                self._positions.apply(first + at, header)

    def refuses(self, headers: list[Header]) -> str:
        """As `Positions.refuses`."""
        with self._lock:
            return self._positions.refuses(headers)

    def last_intent(self, key: LinkShard) -> Crossing | None:
        """The newest INTENT of this link shard."""
        with self._lock:
            return self._positions.last_intent(key)

    def last_ack(self, key: LinkShard) -> Crossing | None:
        """The newest ACK of this link shard."""
        with self._lock:
            return self._positions.last_ack(key)

    def arrived_below(self, shard: ShardName, incarnation: bytes) -> int:
        """As `Positions.arrived_below`."""
        with self._lock:
            return self._positions.arrived_below(shard, incarnation)

    def brought_below(self, key: LinkShard, incarnation: bytes) -> int | None:
        """As `Positions.brought_below`."""
        with self._lock:
            return self._positions.brought_below(key, incarnation)

    def newest_incarnation(self, shard: ShardName) -> bytes:
        """As `Positions.newest_incarnation`."""
        with self._lock:
            return self._positions.newest_incarnation(shard)

    def unanswered(self, key: LinkShard) -> tuple[Crossing, ...]:
        """INTENTs without an ACK, oldest first."""
        with self._lock:
            return self._positions.unanswered(key)

    def charged_bytes(self, grant_id: str) -> int:
        """Bytes of records announced (egress) or appended (ingress) under this grant."""
        with self._lock:
            return self._positions.charged_bytes(grant_id)

    @property
    def unreadable(self) -> tuple[int, ...]:
        """Indexes of leaves that cannot be read; whoever runs the log must be told of them."""
        with self._lock:
            return tuple(self._positions.unreadable)

    def link_shards(self) -> list[LinkShard]:
        """Every link shard that the log has a position of."""
        with self._lock:
            return self._positions.keys()
