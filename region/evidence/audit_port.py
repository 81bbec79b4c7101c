"""The region's audit log, as its broker's parts use it: a port, since the log may be on another broker's disk.

`AuditPort` takes leaves and says how the log is; `audit.trail.Trail` is one, and so is `region.evidence.remote_audit.RemoteAudit`. `ArrivalLog` says, and
writes, what the log has of ranges that arrived: `region.evidence.arrival_index.ArrivalIndex` reads it here, `region.evidence.remote_audit.RemoteArrivals` asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from audit.crossed import Arrived, OffsetSet
from audit.errors import AuditUnavailableError
from audit.leaf import EncodedLeaf, Leaf
from audit.position import ShardName
from audit.trail import Done, TrailStatus
from felix.errors import FelixError
from felix.names import SpiffeId
from keys.transfer import TransferScope
from policy.truncation import Live


class AuditPort(Protocol):
    """Where leaves go, and whether they may."""

    @property
    def failure(self) -> AuditUnavailableError | None:
        """Why the log takes no leaves now: then nothing may cross."""

    def status(self) -> TrailStatus:
        """Where the log is. `durable`: so many leaves at least are on its disk."""

    def append_nowait(
        self, leaves: Sequence[Leaf | EncodedLeaf], done: Done, loop: asyncio.AbstractEventLoop | None = None
    ) -> int:
        """Accept these leaves, all or none; `done` is called on `loop` with the first one's index once they are durable. What is returned counts
        only where the log is here. Raises AuditUnavailableError where the log takes no more."""


class FoundAck(NamedTuple):
    """The index of an ACK leaf in the ingress log, and the envelope that it answers."""

    leaf: int
    envelope_sha256: bytes


class ArrivalLog(Protocol):
    """What the ingress log has of ranges that arrived. All of it may raise UnavailableError."""

    def refusal(self) -> FelixError | None:
        """Why nothing may arrive now, though the log takes leaves: what arrives would have a time that is wrong."""

    async def append_missing(self, since: int, groups: Sequence[list[EncodedLeaf]]) -> list[int]:
        """Append those groups, each of one range, that the log does not have from leaf `since` on; which ones these were. Durable on return."""

    async def find_ack(self, scope: TransferScope, source_offset: int) -> FoundAck | None:
        """The ACK leaf that begins at this source offset, whichever bridge brought it under whichever grant."""

    async def crossed_before(self, bridge: SpiffeId, name: ShardName, lives: Sequence[Live]) -> OffsetSet:
        """What arrived of a shard before the newest of `lives` began. May read the whole log."""

    async def arrived_below(self, bridge: SpiffeId, name: ShardName, incarnation: bytes) -> Arrived:
        """Below which source offset a shard arrived under this incarnation, and by this bridge. May read the whole log."""

    async def charged_bytes(self, grant: str) -> int:
        """Bytes of records that arrived under a grant."""

    def charged_at_least(self, grant: str) -> int:
        """As much of that as is known here without asking."""

    async def close(self) -> None:
        """Begin no more reads."""
