"""An agent that is killed at every step: each record crosses once, with one INTENT, and both logs agree."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from bridge_mesh import Mesh, flight, two_regions, until

from audit.leaf import Kind
from bridge.failpoint import STEPS
from policy.transform import build_spec

ROUND = 60


@pytest.mark.fault
async def test_killed_at_each_step_every_record_crosses_once(tmp_path: Path) -> None:
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        # Every second flight is filtered out, and from some batches nothing crosses at all.
        await mesh.grant(transform=build_spec(pseudonymize=["tailnum"], filter_="distance > 500"))
        published: list[bytes] = []
        for step in STEPS:
            batch = [
                flight(len(published) + at, distance=1400 if at % 2 and not 20 <= at < 40 else 100)
                for at in range(ROUND)
            ]
            published += batch
            await mesh.publish(batch, batch=10)
            child = await mesh.child("cosign:1" if step == "cosign" else f"{step}:3")
            try:
                async with asyncio.timeout(120):
                    assert await child.wait() == -9, step
            finally:
                if child.returncode is None:
                    child.kill()
        async with mesh.agent() as agent:
            await until(
                lambda: (links := agent.links()) and links[0].position == len(published), "the last position"
            )
        wanted = [at for at in range(len(published)) if at % ROUND % 2 and not 20 <= at % ROUND < 40]
        assert mesh.numbers(await mesh.read("eu-west", len(wanted))) == wanted
        assert await mesh.arrived() == len(wanted)
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)
        _check(mesh, len(published), len(wanted))


def _check(mesh: Mesh, published: int, crossed: int) -> None:
    assert mesh.reconcile() == crossed
    egress, ingress = mesh.verify_egress(), mesh.verify_ingress()
    assert egress.ok, egress.findings
    assert ingress.ok, ingress.findings
    assert egress.unanswered == 0
    withheld = sum(header.records for header in mesh.headers(mesh.egress_folder, Kind.WITHHELD))
    assert withheld == published - crossed
