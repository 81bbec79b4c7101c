"""A bridge agent renews its identity while records cross; the other region needs nothing for it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from bridge_mesh import BRIDGE, flight, two_regions, until
from region_home import make_region

import bridge.renewal
from audit.leaf import Kind
from audit.origin import region_origin
from audit.tile_disk import Folder
from audit.verify import verify_log
from felix.identity_file import load_identity
from felix.runtime.real import now_ms
from region.bootstrap import issue_identity
from region.config import load_config

DAY = 86_400_000


async def test_an_agent_renews_its_identity_and_what_crosses_goes_on_under_the_bundle_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # It has regions of its own, not those that other tests have.
    monkeypatch.setattr("bridge_mesh.copied", lambda found, home: found(home))
    monkeypatch.setattr(
        "bridge_mesh.make_region",
        lambda home, region, *, at_ms: make_region(home, region, at_ms=at_ms - 10 * DAY),
    )
    monkeypatch.setattr(bridge.renewal, "RENEW_S", 0.05)
    async with two_regions(tmp_path) as mesh:
        old = issue_identity(mesh.us, load_config(mesh.us.config), "bridge", BRIDGE, now_ms() - 6 * DAY)
        path, trusted = mesh.us.identity(BRIDGE), mesh.eu.trusted / "us-east.json"
        bundles = (mesh.us.bundle.read_bytes(), trusted.read_bytes())
        with caplog.at_level(logging.WARNING, "felix.bridge.renewal"):
            async with mesh.agent():
                # It has no right yet: it may not be renewed, and says so.
                await until(lambda: "has no right in us-east" in caplog.text, "the warning")
                assert "expires in 23h 5" in caplog.text and "could not be renewed" in caplog.text
                assert load_identity(path).chain_pem == old.chain_pem
                await mesh.create()
                await mesh.grant()
                await mesh.publish([flight(number) for number in range(100)])
                await until(lambda: load_identity(path).chain_pem != old.chain_pem, "the renewed identity")
                await mesh.crossed(100)
                new = load_identity(path)
                for node in mesh.nodes.values():
                    # Both regions' sessions are made anew with the new certificate.
                    end_ms = new.not_after_ms
                    await until(
                        lambda node=node, end_ms=end_ms: any(  # type: ignore[misc]
                            session.peer is not None and session.peer.not_after_ms == end_ms
                            for session in node.broker.sessions
                        ),
                        f"the session with {node.config.region}",
                    )
                await mesh.publish([flight(number) for number in range(100, 150)])
                await mesh.crossed(150)
        assert await mesh.arrived() == 150
        assert new.private_key != old.private_key and new.not_after_ms > now_ms() + 6 * DAY
        assert (mesh.us.bundle.read_bytes(), trusted.read_bytes()) == bundles
        await mesh.stop("us-east")
        leaves = mesh.leaves(mesh.us.root / "data" / "audit", Kind.KEY)
        (leaf,) = (each for each in leaves if each.header.action != "pinned")
        assert (leaf.header.action, leaf.header.actor) == ("renewed", str(old.spiffe_id))
        await mesh.stop("eu-west")
        assert mesh.verify_egress().ok and mesh.verify_ingress().ok
        own = Folder(mesh.us.root / "data" / "audit")
        assert verify_log(own, mesh.trust, origin=region_origin("us-east", "acme"), cosignatures_min=0).ok
