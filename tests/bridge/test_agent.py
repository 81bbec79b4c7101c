"""The agent between two real brokers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bridge_mesh import Mesh, flight, two_regions, until

from felix.provenance import PATH_HEADER


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def crossed(mesh: Mesh, count: int) -> None:
    await until(lambda: _has(mesh, count), f"{count} records at the destination")


async def _has(mesh: Mesh, count: int) -> bool:
    return await mesh.arrived() >= count


async def test_granted_records_cross_transformed_and_both_logs_agree(mesh: Mesh) -> None:
    await mesh.create()
    payloads = [flight(number) for number in range(300)]
    await mesh.publish(payloads)
    grant = await mesh.grant()
    async with mesh.agent() as agent:
        await crossed(mesh, 300)
        records = await mesh.read("eu-west", 300)
        await until(lambda: agent.links()[0].position == 300, "the position")
        link = agent.links()[0]
        assert (link.grant, link.state, link.crossed, link.lag_records) == (grant, "active", 300, 0)
    for before, record in zip(payloads, records, strict=True):
        source, arrived = json.loads(before), json.loads(bytes(record.payload))
        assert arrived["flight"] == source["flight"]
        assert arrived["tailnum"] != source["tailnum"]
        assert "hour" not in arrived
        assert record.headers[PATH_HEADER] == b"us-east"
    await mesh.stop("eu-west")
    assert mesh.reconcile() == 300
    report = mesh.verify_egress(cosignatures_min=1)
    assert report.ok, report.findings
    assert report.unanswered == 0
    assert mesh.verify_ingress().ok, mesh.verify_ingress().findings
