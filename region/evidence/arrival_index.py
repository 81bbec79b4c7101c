"""What the ingress log on this broker's disk says of ranges that arrived (region.evidence.audit_port): by their place, before a resend, under an earlier
incarnation; and leaves that it lacks of them. Callers: region.crossing.ingest, region.evidence.audit_server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from audit.checkpoint import note_size
from audit.crossed import Arrived, OffsetSet
from audit.leaf import EncodedLeaf, Header, Kind, Side, read_header
from audit.position import LinkShard, ShardName
from audit.proof import Wanted, find_leaves
from audit.range_index import INDEX_PATH
from audit.trail import Trail
from felix.errors import FelixError
from felix.names import SpiffeId
from keys.transfer import TransferScope
from policy.truncation import Live
from region.evidence.audit_port import FoundAck
from region.evidence.crossed_reader import CrossedReader


class Place(NamedTuple):
    """Where a range that arrived begins: no other range of the log has it."""

    source_region: str
    destination_region: str
    stream: str
    shard: int
    destination_stream: str
    incarnation: bytes
    first_offset: int

    @classmethod
    def of(cls, scope: TransferScope, source_offset: int) -> Place:
        """In a link's scope."""
        return cls(
            scope.source_region, scope.destination_region, str(scope.stream), scope.shard, str(scope.destination), scope.incarnation, source_offset,
        )  # fmt: skip

    @classmethod
    def of_leaf(cls, header: Header) -> Place:
        """Of an ACK leaf."""
        assert header.first_offset is not None
        return cls(
            header.source_region, header.destination_region, header.stream, header.shard, header.destination_stream, header.incarnation,
            header.first_offset,
        )  # fmt: skip


class ArrivalIndex:
    """One per audit log."""

    def __init__(self, trail: Trail) -> None:
        self._trail = trail
        self._crossed = CrossedReader(trail)

    def refusal(self) -> FelixError | None:
        """As `ArrivalLog`: one clock gives the times of all leaves."""
        return None

    async def append_missing(self, since: int, groups: Sequence[list[EncodedLeaf]]) -> list[int]:
        """As `ArrivalLog`."""
        there = await self.find_groups(since, groups)
        missing = [number for number in range(len(groups)) if number not in there]
        for number in missing:
            await self._trail.append(groups[number])
        return missing

    async def find_groups(self, since: int, groups: Sequence[list[EncodedLeaf]]) -> dict[int, int]:
        """Which groups of leaves the log has from leaf `since` on, and where: by number, the index of the first leaf.

        A range that arrived is known by its place, not by its leaves' bytes: of one that was refused and sent again, one note may be gone."""
        return await asyncio.to_thread(_find_groups, self._trail, since, groups) if groups else {}

    async def find_ack(self, scope: TransferScope, source_offset: int) -> FoundAck | None:
        """As `ArrivalLog`."""
        return await self.find_place(Place.of(scope, source_offset))

    async def find_place(self, place: Place) -> FoundAck | None:
        """The ACK leaf of the range that begins at this place."""

        def find() -> FoundAck | None:
            size = note_size(self._trail.publish())
            files = self._trail.files
            wanted = Wanted(
                place.stream, place.shard, place.first_offset, place.destination_region, place.incarnation
            )
            hint = files.read(INDEX_PATH)
            for index, leaf, _ in find_leaves(files, size, hint, Kind.ACK, Side.INGRESS, wanted):
                if Place.of_leaf(leaf.header) == place:
                    return FoundAck(index, leaf.header.envelope_sha256)
            return None

        return await asyncio.to_thread(find)

    async def crossed_before(self, bridge: SpiffeId, name: ShardName, lives: Sequence[Live]) -> OffsetSet:
        """As `ArrivalLog`. Reads the whole log."""
        return await self._crossed.read(str(bridge), name, lives)

    async def arrived_below(self, bridge: SpiffeId, name: ShardName, incarnation: bytes) -> Arrived:
        """As `ArrivalLog`."""
        positions = self._trail.positions
        brought = positions.brought_below(LinkShard(str(bridge), *name), incarnation)
        if brought is not None and positions.newest_incarnation(name) in (b"", incarnation):
            return Arrived(positions.arrived_below(name, incarnation), brought)
        # Another incarnation came last. This one may be new, or a source's older stream that was restored or stated again.
        return await self._crossed.arrived_below(str(bridge), name, incarnation)

    async def charged_bytes(self, grant: str) -> int:
        """As `ArrivalLog`."""
        return self._trail.positions.charged_bytes(grant)

    def charged_at_least(self, grant: str) -> int:
        """As `ArrivalLog`."""
        return self._trail.positions.charged_bytes(grant)

    async def close(self) -> None:
        """Begin no more reads."""
        await self._crossed.close()


def is_arrival(header: Header) -> bool:
    """Whether a leaf says that records arrived here."""
    return (header.kind, header.side) == (Kind.ACK, Side.INGRESS)


def _find_groups(trail: Trail, since: int, groups: Sequence[list[EncodedLeaf]]) -> dict[int, int]:
    """Blocks."""
    wanted: dict[object, list[int]] = {}
    for number, leaves in enumerate(groups):
        wanted.setdefault(_name(leaves[0].header, leaves[0].data), []).append(number)
    found: dict[int, int] = {}
    for index, data in trail.leaves(since):
        header = read_header(data)
        if header is not None:
            for number in wanted.get(_name(header, data), ()):
                found.setdefault(number, index)
    return found


def _name(header: Header, data: bytes | memoryview) -> object:
    """Of a leaf, or of a range's first: no other of the log has it."""
    return Place.of_leaf(header) if is_arrival(header) else hashlib.sha256(data).digest()
