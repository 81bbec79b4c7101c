"""Nobody's keys: the source's clock was days ahead while its link opened once, and is right again. Its statements of now are no older than that
one for more than five minutes, and the link goes on; an older one of a right clock is refused as ever (test_f14_incarnations.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attacks.test_f08_truncation import link, numbered
from bridge_mesh import Mesh, two_regions

pytestmark = pytest.mark.timeout(300)

DAY_MS = 86_400_000


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def test_a_clock_that_was_days_ahead_stops_no_link_once_it_is_right(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It binds as one that is five minutes ahead, which a test does not wait for.
    monkeypatch.setattr("region.crossing.ingest.CLOCK_SKEW_MS", 0)
    await mesh.create()
    await mesh.grant(expires=mesh.now_ms() + 80 * DAY_MS)
    await mesh.publish(numbered(0, 5))
    broker = mesh.nodes["us-east"].broker
    right = broker.clock_ms
    with monkeypatch.context() as ahead:
        ahead.setattr(broker, "clock_ms", lambda: right() + 6 * DAY_MS)
        async with mesh.agent() as agent:
            await link(agent, "active", 5)
    await mesh.publish(numbered(5, 5))
    async with mesh.agent() as agent:
        await link(agent, "active", 10)
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    assert mesh.verify_egress().ok
    assert mesh.verify_ingress().ok
