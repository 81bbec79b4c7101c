"""Two operators of one region accept the same truncation, the second of what was shown before the first one's word: the link goes on
from the first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attacks.test_f08_truncation import accept, link, numbered, source_put_back
from bridge_mesh import Mesh, two_regions

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def test_the_same_truncation_accepted_twice_is_accepted_once(mesh: Mesh, tmp_path: Path) -> None:
    await source_put_back(mesh, tmp_path / "older")
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        await accept(mesh, held)
        await link(agent, "active", 13)
        before = mesh.documents("us-east", "standing")
        assert len(before) == 1
        await accept(mesh, held)
        assert mesh.documents("us-east", "standing") == before
        await mesh.publish(numbered(1_000, 4))
        await link(agent, "active", 17)
        assert await mesh.arrived() == 22
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    assert mesh.verify_egress().ok
    assert mesh.verify_ingress().ok
