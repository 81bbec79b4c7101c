"""A compacted stream through a real broker: sealed, compacted, restarted, read without a gap."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from region_home import running
from region_peer import client

import felix
from felix.batch import TOMBSTONE_HEADER
from felix.errors import Code, RequestError
from felix.runtime.real import now_ms
from felix.settings import Compaction, Offload, Views
from region.folder import RegionFolder
from region.log.segment_limits import SegmentLimits
from region.node import Node
from region.streams import settings as stream_settings

SEATS = "acme/ops/seats"


async def read_all(
    region: felix.RegionClient, start: felix.subscription.StartAt, until: int
) -> dict[int, bytes]:
    """Offset → payload, up to the record at offset `until`; fails where the SDK saw a gap."""
    found: dict[int, bytes] = {}
    async with asyncio.timeout(120), region.stream(SEATS).subscribe(start, on_gap="raise") as reader:
        async for record in reader:
            found[record.offset] = bytes(record.payload)
            if record.offset >= until:
                break
        assert reader.gap_count == 0
    return found


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_settings, "COMPACTED_SEGMENTS", SegmentLimits(segment_bytes_max=4_000))
    # A pass of the broker's own that is under way would take the place of the test's.
    monkeypatch.setattr("region.node.COMPACT_CHECK_S", 3600)


async def compacted(node: Node) -> None:
    """Let the broker compact, as its own loop does every few seconds."""
    await node.broker.streams.maintenance.compact(now_ms())


@pytest.mark.usefixtures("small_segments")
async def test_what_is_compacted_is_read_without_a_gap_also_after_a_restart(
    folder: RegionFolder, tmp_path: Path
) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data) as node, client(folder) as region:
        await region.create_stream(SEATS, views=Views(compaction=Compaction()))
        last: dict[bytes, int] = {}
        async with region.stream(SEATS).publisher(batch_records=7) as publisher:
            for at in range(600):
                key = b"seat %d" % (at * 7 % 25)
                await publisher.send(b"%d" % at * 10, key=key)
                last[key] = at
                if at % 60 == 59:
                    await publisher.flush()  # a segment ends with what is written at once
            await publisher.send(b"", key=b"seat 3", headers={TOMBSTONE_HEADER: b""})
        await compacted(node)
        (shard,) = node.broker.stream(felix.StreamName.parse(SEATS)).serving
        assert shard.counters.compaction_removed_records > 300
        assert len(await read_all(region, "earliest", 600)) == 601, (
            "what is still in memory is sent from there"
        )
    async with running(folder, data=data) as node, client(folder) as region:
        (shard,) = node.broker.stream(felix.StreamName.parse(SEATS)).serving
        assert shard.compacted_to > 0 and shard.report.cut_bytes == 0
        found = await read_all(region, "earliest", 600)
        assert len(found) < 300 and all(at in found for at in last.values())
        holes = [at for at in range(600) if at not in found]
        assert min(await read_all(region, holes[0], 600)) == min(at for at in found if at > holes[0])
        async with region.stream(SEATS).publisher() as publisher:
            await publisher.send(b"after", key=b"seat 1")
        assert (await read_all(region, "earliest", 601))[601] == b"after"


async def test_settings_that_do_not_go_together_are_refused(folder: RegionFolder, tmp_path: Path) -> None:
    async with running(folder, data=str(tmp_path / "data")), client(folder) as region:
        for durability, views in (
            ("fsync", Views(compaction=Compaction(), offload=Offload("file:///x"))),
            ("ephemeral", Views(compaction=Compaction())),
        ):
            with pytest.raises(RequestError) as refused:
                await region.create_stream(SEATS, durability=felix.Durability(durability), views=views)
            assert refused.value.code is Code.CONFIG_INVALID
