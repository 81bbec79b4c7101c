"""Brokers of one region on machines of their own: another region is trusted once, on one of them, and every broker believes the same."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from bridge_mesh import until
from cluster.clustered_region import ClusteredRegion
from etcd_process import EtcdProcess, etcd_of_each_test
from region_home import make_region

from felix.messages import DescribeRegion, PutDocument
from felix.runtime.real import now_ms
from keys.bundle import decode_bundle
from region.bootstrap import trust_region
from region.folder import RegionFolder
from region.node import Node

__all__ = ["etcd_of_each_test"]  # the fixture


async def test_what_one_machine_compared_counts_on_the_others_and_a_bundle_in_etcd_on_none(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    region = ClusteredRegion(tmp_path, etcd, 2)
    second = RegionFolder(tmp_path / "second" / "us-east")
    shutil.copytree(region.folder.root, second.root)
    second.policy_key.unlink()
    eu, ap = (make_region(tmp_path / "others", name) for name in ("eu-west", "ap-south"))
    real = decode_bundle(eu.bundle.read_bytes())
    try:
        await region.start("b1")
        region.nodes["b2"] = await Node.start(second, region.config.of_broker("b2"))
        brokers = [node.services.governance for node in region.nodes.values()]
        pin = trust_region(region.folder, real, now_ms())
        assert pin is not None and not any(second.trusted.iterdir())
        async with region.client("b1") as client:
            await client.request(PutDocument("pin", pin.encode()))
        await until(lambda: all(each.bundles.get("eu-west") == real.bundle for each in brokers), "the pin")
        prefix = "/felix/1/us-east"
        forged = make_region(tmp_path / "forged", "eu-west").bundle.read_text()
        for name, bundle in (("eu-west", forged), ("ap-south", ap.bundle.read_text())):
            await asyncio.to_thread(etcd.ctl, "put", f"{prefix}/trusted/{name}", bundle)
        await until(lambda: all(each.problems for each in brokers), "the problem")
        for each in brokers:
            assert each.bundles["eu-west"] == real.bundle and "ap-south" not in each.bundles
            (problem,) = each.problems
            assert "bundle of ap-south that nobody compared" in problem
        async with region.client("b2") as client:
            assert any("ap-south" in each for each in (await client.request(DescribeRegion())).alarms)
    finally:
        await region.stop()
