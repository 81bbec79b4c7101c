"""F8 in a region of several brokers: store and folders are put back together, from one copy of before. Who led then is elected again, at the same
offset, and other records get the offsets of those that crossed: the link stops."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from attacks.conftest import Tally
from attacks.test_f08_truncation import accept, link, numbered
from cluster.clustered_mesh import ClusteredMesh, two_clusters

from audit.leaf import GapKind, Kind

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]


async def begun(mesh: ClusteredMesh, first: int, count: int) -> None:
    """The source's brokers are up, and its stream takes records again."""
    await mesh.clusters["us-east"].start("b1", "b2")
    await mesh.publish(numbered(first, count))


async def test_a_store_and_its_brokers_put_back_stop_the_link(tmp_path: Path, tally: Tally) -> None:
    async with two_clusters(tmp_path) as mesh:
        us = mesh.clusters["us-east"]
        folders = {
            us.folder.root / "data": tmp_path / "data-old",
            tmp_path / "etcd-us": tmp_path / "etcd-old",
        }
        await mesh.create()
        await mesh.grant()
        await mesh.publish(numbered(0, 5))
        async with mesh.agent() as agent:
            await link(agent, "active", 5)
        await us.stop()
        us.etcd.stop()
        for folder, aside in folders.items():
            shutil.copytree(folder, aside)
        us.etcd.start()
        await begun(mesh, 100, 5)
        async with mesh.agent() as agent:
            await link(agent, "active", 10)
        await us.stop()
        us.etcd.stop()
        for folder, aside in folders.items():
            shutil.rmtree(folder)
            shutil.copytree(aside, folder)
        us.etcd.start()
        await begun(mesh, 900, 8)
        async with mesh.agent() as agent:
            held = await link(agent, "truncated")
            assert held.cut is not None and held.cut.offset == 5
            await accept(mesh, held)
            await link(agent, "active", 13)
        assert await mesh.arrived() == 18, "what was written since the cut crosses"
    assert [gap.gap for gap in mesh.headers(mesh.egress_folder, Kind.GAP)] == [GapKind.TRUNCATION]
    assert mesh.verify_egress().ok
    tally("sources of several brokers put back to an older copy", 1)
