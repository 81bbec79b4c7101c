"""A bridge between two regions of several brokers each: what leads the streams is another broker than the one with the audit log."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridge_mesh import flight, until
from cluster.clustered_mesh import two_clusters

from audit.leaf import Kind

pytestmark = pytest.mark.etcd

RECORDS = 300


async def test_what_is_led_by_brokers_without_the_audit_log_crosses_and_reconciles(tmp_path: Path) -> None:
    async with two_clusters(tmp_path) as mesh:
        for cluster in mesh.clusters.values():
            await cluster.drain("b1")
        await mesh.create()
        assert mesh.leader("us-east") == "b2"
        await mesh.publish([flight(number) for number in range(RECORDS)])
        await mesh.grant()
        async with mesh.agent():
            await mesh.crossed(RECORDS)
            assert mesh.leader("eu-west") == "b2"
            assert sorted(mesh.numbers(await mesh.read("eu-west", RECORDS))) == list(range(RECORDS))
            await until(lambda: mesh.headers(mesh.ingress_folder, Kind.ACK), "a checkpoint")
    assert mesh.reconcile() == RECORDS
    assert mesh.verify_egress().ok and mesh.verify_ingress().ok
