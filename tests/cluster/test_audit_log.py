"""The audit log of a region of several brokers: copied to them, written by one, gone on with by another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cluster.clustered_region import ClusteredRegion, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import until

from audit.checkpoint import note_size
from audit.leaf import Header, Kind, Leaf, Side

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd


def key_leaf(number: int) -> Leaf:
    return Leaf(
        Header(
            kind=Kind.KEY,
            side=Side.INGRESS,
            time_ms=1_700_000_000_000 + number,
            source_region="us-east",
            destination_region="us-east",
            actor="spiffe://acme/us-east/service/probe",
            action="renewed",
            key_id=number.to_bytes(16, "big"),
        )
    )


async def home_of(region: ClusteredRegion) -> str:
    def homes() -> list[str]:
        return [name for name in region.nodes if region.clustered(name).has_audit_log]

    await until(lambda: len(homes()) == 1, 60)
    return homes()[0]


async def test_each_broker_has_the_log_and_another_goes_on_with_it(tmp_path: Path, etcd: EtcdProcess) -> None:
    async with serving(tmp_path, etcd, 3) as region:
        home = await home_of(region)
        trail = region.nodes[home].services.governance.trail
        assert [await trail.append([key_leaf(number)]) for number in range(5)] == list(range(5))
        note = await asyncio.to_thread(trail.publish)
        assert note_size(note) == 5
        trails = {name: node.services.governance.trail for name, node in region.nodes.items()}
        await until(lambda: all(note_size(each.checkpoint()) == 5 for each in trails.values()), 30)
        assert len({each.checkpoint() for each in trails.values()}) == 1
        await region.stop(home)
        other = await home_of(region)
        assert other != home
        assert await trails[other].append([key_leaf(5)]) == 5
        await region.start(home)
        await until(lambda: note_size(region.nodes[home].services.governance.trail.checkpoint()) == 6, 30)
