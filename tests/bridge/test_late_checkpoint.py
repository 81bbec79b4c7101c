"""A destination whose log makes its checkpoints seldom, or cannot now, is not taken for one that was put back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bridge_mesh import Mesh, flight, two_regions, until

from audit.leaf import Kind
from bridge import receipted


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def test_an_agent_that_starts_before_the_checkpoint_of_its_newest_receipt_goes_on(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leaf stands, and whoever may ask for it is shown a checkpoint with it: no DENY leaf says that the region's log was rolled back."""
    monkeypatch.setattr(receipted, "LATE_S", 0.0)
    node = mesh.nodes["eu-west"]
    await mesh.create()
    await mesh.publish([flight(0)])
    await mesh.grant()
    # As `audit.checkpoint_every: 1h` in region.yaml.
    trail = node.services.governance.trail
    trail._settings = type(trail._settings)(checkpoint_interval_ms=3_600_000)
    async with mesh.agent():
        await mesh.crossed(1)
        # What the shorter interval of before would have had covered in the middle.
        await asyncio.to_thread(trail.publish)
        await mesh.publish([flight(1)])
        await mesh.crossed(2)
        await until(lambda: len(mesh.headers(mesh.egress_folder, Kind.ACK)) == 2, "both receipts")
    assert trail.checkpoints.newest.size < trail.status().durable
    await mesh.publish([flight(2)])
    async with mesh.agent() as agent:
        async with asyncio.timeout(30):
            while await mesh.arrived() < 3:
                assert "rolled back" not in "".join(link.reason for link in agent.links())
                await asyncio.sleep(0.05)
    assert not mesh.headers(mesh.egress_folder, Kind.DENY)
