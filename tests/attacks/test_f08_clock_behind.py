"""F8 where the source's clock is behind: the log and its older copy both begin an epoch that the clock does not number. What was lost is found
all the same."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attacks.test_f08_truncation import accept, checked, keep, link, numbered, put_back, streams_folder
from bridge_mesh import Mesh, two_regions

from felix.runtime import real

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


@pytest.mark.parametrize(
    ("first_ms", "later_ms"), [(0, -50_000), (200_000, 0)], ids=["behind later", "ahead at first"]
)
async def test_a_source_put_back_by_a_clock_that_is_behind_stops_its_link(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_ms: int, later_ms: int
) -> None:
    ahead_ms = 0
    monkeypatch.setattr(real.SystemClock, "now_ms", lambda clock: time.time_ns() // 1_000_000 + ahead_ms)
    await mesh.create()
    await mesh.grant()

    async def write(first: int, count: int, off_ms: int) -> None:
        """The source starts with a clock that is off by so much, takes records and has its clock set right."""
        nonlocal ahead_ms
        ahead_ms = off_ms
        await mesh.start("us-east")
        await mesh.publish(numbered(first, count))
        ahead_ms = 0

    await mesh.stop("us-east")
    await write(0, 5, first_ms)
    async with mesh.agent():
        await mesh.crossed(5)
    await mesh.stop("us-east")
    keep(streams_folder(mesh, "us-east"), tmp_path / "older")
    await write(100, 5, later_ms)
    async with mesh.agent() as agent:
        await link(agent, "active", 10)
    await mesh.stop("us-east")
    put_back(tmp_path / "older", streams_folder(mesh, "us-east"))
    await write(900, 8, later_ms)
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        assert held.cut is not None and held.cut.offset == 5
        assert await mesh.arrived() == 10
        await accept(mesh, held)
        await link(agent, "active", 13)
        assert await mesh.arrived() == 18
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    checked(mesh)
