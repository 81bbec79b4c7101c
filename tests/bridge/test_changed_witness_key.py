"""The key with which a region cosigns other regions' logs is changed: what it had cosigned is cosigned again under the new one, and who has the old one is believed no more."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bridge_mesh import BRIDGE, Mesh, flight, two_regions, until
from slow_runs import only_slow
from typer.testing import CliRunner

from audit.checkpoint import open_checkpoint
from audit.note import Algorithm, encode_note
from audit.origin import egress_origin, region_origin, witness_name
from audit.signer_disk import load_signers
from audit.trust import RegionTrust
from audit.verify import verify_log
from cli.region import app
from felix.messages import PutDocument
from felix.runtime.real import now_ms
from keys.bundle import SignedBundle, decode_bundle
from region.bootstrap import trust_region
from region.config import load_config
from region.evidence import witness_key
from region.evidence.witness_key import change_witness_key
from region.trust import begun_change


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        yield mesh


def logs(mesh: Mesh) -> dict[str, Path]:
    return {
        egress_origin("us-east", "acme", BRIDGE): mesh.egress_folder,
        region_origin("us-east", "acme"): mesh.us.root / "data" / "audit",
        region_origin("eu-west", "acme"): mesh.ingress_folder,
    }


async def twenty_crossed(mesh: Mesh) -> None:
    """A grant that is put everywhere, and 20 records under it, all of it cosigned."""
    await mesh.grant()
    await mesh.publish([flight(n) for n in range(20)])
    async with mesh.agent():
        await mesh.crossed(20)
        await until(lambda: all_ok(mesh), "every log is cosigned")


async def take(mesh: Mesh, by: str, signed: SignedBundle) -> None:
    pin = trust_region(mesh.folder(by), signed, now_ms())
    assert pin is not None
    async with mesh.operator(by) as client:
        await client.request(PutDocument("pin", pin.encode()))


def all_ok(mesh: Mesh) -> bool:
    """Whether every log verifies to its end under the bundles of now, each with the other region's cosignature."""
    reports = (
        verify_log(mesh.log_files(path), mesh.trust, origin=origin, cosignatures_min=1)
        for origin, path in logs(mesh).items()
    )
    return all(report.ok for report in reports)


@pytest.mark.parametrize("region", [pytest.param("eu-west", marks=only_slow), "us-east"])
async def test_every_log_holds_under_the_new_bundle_alone_before_anything_else_crosses(
    mesh: Mesh, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(mesh.home))
    await twenty_crossed(mesh)
    other = "us-east" if region == "eu-west" else "eu-west"
    before, secrets = mesh.bundle(region), mesh.home / "old secrets"
    shutil.copytree(mesh.folder(region).secrets, secrets)
    done = CliRunner().invoke(app, ["change-witness-key", "--region", region])
    assert done.exit_code == 0, done.exception
    signed = decode_bundle(mesh.folder(region).bundle.read_bytes())
    now = RegionTrust(signed.bundle).witnesses
    assert signed.bundle.fingerprint() in done.output and len(now) == 2
    assert not {key.public for key in now} & {key.public for key in RegionTrust(before).witnesses}
    assert (
        signed.bundle.policy_keys == before.policy_keys and signed.bundle.receipt_keys == before.receipt_keys
    )
    assert not all_ok(mesh), "nothing of the other region's logs is cosigned under the new key yet"

    await mesh.stop(region)
    await mesh.start(region)
    await take(mesh, other, signed)
    async with mesh.agent():
        await until(lambda: all_ok(mesh), "every log is cosigned under the new key")
        await mesh.publish([flight(n) for n in range(20, 30)])
        await mesh.crossed(30)
        await until(lambda: all_ok(mesh), "what crossed since, too")
    # The thief's line on the other region's newest checkpoint is nobody's.
    origin = region_origin(other, "acme")
    note = (logs(mesh)[origin] / "checkpoint").read_bytes()
    opened = open_checkpoint(note, RegionTrust(mesh.bundle(other)).log_keys(origin))
    thief = load_signers(
        witness_name(region, "acme"),
        secrets / "witness.pem",
        secrets / "witness.mldsa.pem",
        Algorithm.COSIGNATURE,
    )
    shown = encode_note(
        opened.known_note().with_signatures(
            key.cosign(opened.known_note().text, now_ms() // 1000) for key in thief
        )
    )
    assert not open_checkpoint(shown, RegionTrust(mesh.bundle(other)).log_keys(origin), now).cosigned


async def test_a_change_that_is_cut_off_is_finished_by_the_next_call_and_a_broker_with_the_old_key_says_so(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = mesh.eu, load_config(mesh.eu.config)
    before = folder.bundle.read_bytes()

    def cut_off(*_: object) -> None:
        raise OSError("no power")

    for name in ("save_signing_key", "save_ml_dsa_key", "replace_file"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no power"):
            patch.setattr(witness_key, name, cut_off)
            change_witness_key(folder, config, now_ms())
        assert folder.bundle.read_bytes() == before
    moved = begun_change._move

    def second_fails(path: Path, place: Path) -> None:
        if path.name == "new.witness.pem":
            cut_off()
        moved(path, place)

    for fails in (cut_off, second_fails):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no power"):
            patch.setattr(begun_change, "_move", fails)
            change_witness_key(folder, config, now_ms())
    named = folder.bundle.read_bytes()
    assert named != before
    await mesh.stop("eu-west")
    await mesh.start("eu-west")
    (problem,) = mesh.nodes["eu-west"].services.governance.problems
    assert "count nowhere" in problem and "change-witness-key again" in problem
    assert change_witness_key(folder, config, now_ms()).encode() == named == folder.bundle.read_bytes()
    assert not list(folder.secrets.glob("new.*"))
    await mesh.stop("eu-west")
    await mesh.start("eu-west")
    assert not mesh.nodes["eu-west"].services.governance.problems
