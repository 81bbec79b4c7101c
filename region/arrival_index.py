"""What the ingress log says of ranges that arrived: by their place, before a resend, under an earlier incarnation. Callers: region.ingest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from audit.checkpoint import note_size
from audit.crossed import OffsetSet
from audit.leaf import Kind, Side
from audit.position import ShardName
from audit.proof import Wanted, find_leaves
from audit.range_index import INDEX_PATH
from audit.trail import Trail
from felix.names import SpiffeId
from keys.transfer import TransferScope
from policy.truncation import Live
from region.crossed_reader import CrossedReader


class FoundAck(NamedTuple):
    """The index of an ACK leaf in the ingress log, and the envelope that it answers."""

    leaf: int
    envelope_sha256: bytes


class ArrivalIndex:
    """One per broker."""

    def __init__(self, trail: Trail) -> None:
        self._trail = trail
        self._crossed = CrossedReader(trail)

    async def find_ack(self, scope: TransferScope, source_offset: int) -> FoundAck | None:
        """The ingress ACK leaf that begins at this source offset, whichever bridge brought it under whichever grant."""

        def find() -> FoundAck | None:
            size = note_size(self._trail.publish())
            files = self._trail.files
            wanted = Wanted(
                str(scope.stream),
                scope.shard,
                source_offset,
                scope.destination_region,
                scope.incarnation,
            )
            hint = files.read(INDEX_PATH)
            for index, leaf, _ in find_leaves(files, size, hint, Kind.ACK, Side.INGRESS, wanted):
                if (
                    leaf.header.source_region == scope.source_region
                    and leaf.header.destination_stream == str(scope.destination)
                    and leaf.header.first_offset == source_offset
                ):
                    return FoundAck(index, leaf.header.envelope_sha256)
            return None

        return await asyncio.to_thread(find)

    async def crossed_before(self, bridge: SpiffeId, name: ShardName, lives: Sequence[Live]) -> OffsetSet:
        """What the ingress log says that arrived of a shard before the newest of `lives` began. Reads the whole log."""
        return await self._crossed.read(str(bridge), name, lives)

    async def arrived_below(self, bridge: SpiffeId, name: ShardName, incarnation: bytes) -> int:
        """Below which source offset the ingress log says that a shard arrived under this incarnation. Reads the whole log."""
        return await self._crossed.arrived_below(str(bridge), name, incarnation)

    async def close(self) -> None:
        """Begin no more reads."""
        await self._crossed.close()
