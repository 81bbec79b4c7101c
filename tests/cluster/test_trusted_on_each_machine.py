"""Brokers of one region on machines of their own: another region is trusted once, on one of them, and every broker believes the same."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
from bridge_mesh import until
from cluster.audited import home_of, log_of, shows, verified
from cluster.clustered_region import ClusteredRegion, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_home import make_region

from audit.leaf import Kind, decode_leaf
from felix.messages import DescribeRegion, PutDocument
from felix.runtime.real import now_ms
from keys.bundle import decode_bundle, sign_bundle
from keys.pin import decode_pin
from keys.signing import SigningKey
from region.bootstrap import trust_region
from region.folder import RegionFolder
from region.node import Node
from region.trust.trusted_bundles import own_bundle

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


async def test_a_pin_has_one_leaf_whichever_broker_is_home_and_who_has_a_copy_of_the_log_believes_it(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """The store goes back to the pin of before, and a broker lost what it kept."""
    prefix, eu = "/felix/1/us-east", make_region(tmp_path / "others", "eu-west")
    async with serving(tmp_path, etcd, 3) as region:
        operators = RegionFolder(tmp_path / "operators" / "us-east")
        shutil.copytree(region.folder.root, operators.root, ignore=shutil.ignore_patterns("data*"))
        first, key = decode_bundle(eu.bundle.read_bytes()), SigningKey.generate()
        changed = msgspec.structs.replace(
            first.bundle, issued_ms=first.bundle.issued_ms + 1, policy_keys=(key.verify_key.public,)
        )
        home = await home_of(region)
        pins = []
        for bundle in (first, sign_bundle(changed, key)):
            pin = trust_region(operators, bundle, now_ms())
            assert pin is not None
            pins.append(pin)
            async with region.client(home) as client:
                await client.request(PutDocument("pin", pin.encode()))
        for name in region.nodes:
            await shows(region, name, 2)
        await region.stop(home)
        other = await home_of(region)
        for name in (home, other):
            leaves = [decode_leaf(data).header for data in verified(region, name)]
            assert [(leaf.kind, leaf.action) for leaf in leaves] == [(Kind.KEY, "pinned")] * 2
            assert decode_pin(leaves[1].document, own_bundle(region.folder, region.config)) == pins[1]
        shutil.rmtree(log_of(region, home).path.parent / "governance")
        await asyncio.to_thread(etcd.ctl, "put", f"{prefix}/trusted/eu-west", first.encode().decode())
        await asyncio.to_thread(etcd.ctl, "put", f"{prefix}/pins/eu-west", pins[0].encode().decode())
        await region.start(home)
        for name, node in region.nodes.items():
            service = node.services.governance
            await until(lambda service=service: not service.problems, "the pin that was put back")  # type: ignore[misc]
            assert service.bundles["eu-west"] == changed, name
