"""Nobody's keys: the agent's clock is set back while its link runs. What it announces then has a time at which the grant was not approved
yet: nothing is announced until the clock has caught up."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridge_mesh import flight, two_regions, until
from runtimes import with_wall

from felix.runtime.real import now_ms

pytestmark = pytest.mark.timeout(300)

HOUR_MS = 3_600_000


async def test_nothing_is_announced_at_a_time_at_which_it_was_not_approved(tmp_path: Path) -> None:
    back_ms = 0
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.grant(not_before=now_ms() - 24 * HOUR_MS)
        async with mesh.agent(with_wall(lambda: now_ms() - back_ms)) as agent:
            await mesh.publish([flight(0)])
            await mesh.crossed(1)
            # No plan comes between the two: the link itself asks before each batch.
            back_ms = 2 * HOUR_MS
            await mesh.publish([flight(number) for number in range(1, 10)])
            await until(lambda: agent.links()[0].state != "active", "the link waits")
            assert await mesh.arrived() == 1
            back_ms = 0
            await mesh.crossed(10)
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)
        report = mesh.verify_egress()
        assert report.ok, [finding.sentence for finding in report.findings]
