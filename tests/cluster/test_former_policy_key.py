"""What a former policy key of another region forbade, and the next one lifted, in a region of several brokers: all judge alike, whoever has the log."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from bridge_mesh import until
from cluster.audited import home_of
from cluster.clustered_region import ClusteredRegion, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_home import make_region

from felix.messages import PutDocument
from felix.runtime.real import now_ms
from keys.bundle import SignedBundle, decode_bundle, sign_bundle
from keys.key_file import load_signing_key
from keys.signing import SigningKey
from policy.grant import DenyEntry, sign_deny
from region.bootstrap import trust_region

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd

HIGHEST = (1 << 53) - 1


async def trust(region: ClusteredRegion, bundle: SignedBundle) -> None:
    pin = trust_region(region.folder, bundle, now_ms())
    assert pin is not None
    async with region.client(min(region.nodes)) as client:
        await client.request(PutDocument("pin", pin.encode()))
    await all_of(region, lambda governance: governance.bundles.get("eu-west") == bundle.bundle)


async def say(region: ClusteredRegion, key: SigningKey, number: int, *, lifted: bool, at: str) -> None:
    entry = DenyEntry(
        streams="acme/ops/*", peer="*", region="eu-west", sequence=number, at=now_ms(), by="a", lifted=lifted
    )
    async with region.client(at) as client:
        await client.request(PutDocument("deny", sign_deny(entry, key.private_key).encode_file()))


async def all_of(region: ClusteredRegion, holds) -> None:  # type: ignore[no-untyped-def]
    await until(
        lambda: all(holds(node.services.governance) for node in region.nodes.values()), "every broker"
    )


async def denied(region: ClusteredRegion, is_denied: bool) -> None:
    await all_of(region, lambda governance: bool(governance.book.denies()) is is_denied)


@pytest.mark.parametrize("brokers", [2, 3])
async def test_all_brokers_judge_alike_whoever_has_the_log_and_whatever_they_lost(
    tmp_path: Path, etcd: EtcdProcess, brokers: int
) -> None:
    eu = make_region(tmp_path / "others", "eu-west")
    bundle, former, new = (
        decode_bundle(eu.bundle.read_bytes()),
        load_signing_key(eu.policy_key),
        SigningKey.generate(),
    )
    changed = msgspec.structs.replace(
        bundle.bundle, issued_ms=bundle.bundle.issued_ms + 1, policy_keys=(new.verify_key.public,)
    )
    async with serving(tmp_path, etcd, brokers) as region:
        await trust(region, bundle)
        home = await home_of(region)
        other = next(name for name in region.nodes if name != home)
        await say(region, former, HIGHEST, lifted=False, at=other)
        await denied(region, True)
        await trust(region, sign_bundle(changed, new))
        await denied(region, True)
        await say(region, new, 1, lifted=True, at=other)
        await denied(region, False)
        for lost in (home, other):
            await region.stop(lost)
            await denied(region, False)
            shutil.rmtree(region.folder.root / region.config.of_broker(lost).data / "governance")
            await region.start(lost)
            await denied(region, False)
        await say(region, new, 2, lifted=False, at=other)
        await denied(region, True)
