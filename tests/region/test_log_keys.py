"""A region that version 0.1 founded gets ML-DSA-44 log keys: old logs hold as before, other regions compare fingerprints."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner
from version_0_1 import EGRESS, EU_WEST, US_EAST, lay_out

from audit.leaf import Header, Kind, Leaf, Side
from audit.note import Algorithm, NoteSigner
from audit.origin import region_origin
from audit.tile_disk import Folder
from audit.trail import Trail
from audit.trust import Trust
from audit.verify import verify_log
from cli.region import app
from felix.errors import RequestError, TamperError
from keys.bundle import RegionBundle, check_update, decode_bundle
from keys.key_file import load_ml_dsa_key, load_signing_key
from region.bootstrap import add_log_keys
from region.config import load_config
from region.folder import RegionFolder

NOW = 1_900_000_000_000


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = lay_out(tmp_path)
    monkeypatch.setenv("FELIX_HOME", str(home))
    return home


def bundle(home: Path, region: str = "us-east") -> RegionBundle:
    return decode_bundle((home / region / "bundle.json").read_bytes()).bundle


def trust_of(home: Path) -> Trust:
    return Trust.of([bundle(home), bundle(home, "eu-west")])


async def test_a_log_of_version_0_1_goes_on_with_both_keys_and_all_of_it_holds(home: Path) -> None:
    folder = RegionFolder(home / "us-east")
    config, before, old = load_config(folder.config), bundle(home), trust_of(home)
    signed = add_log_keys(folder, config, NOW)
    assert signed is not None and signed.bundle == bundle(home)
    added = set(signed.bundle.audit_keys) - set(before.audit_keys)
    assert set(before.audit_keys) < set(signed.bundle.audit_keys), "what was named stays named"
    assert {key.algorithm for key in added} == {"ml-dsa-44"}
    assert {(key.name, key.role) for key in added} == {(key.name, key.role) for key in before.audit_keys}
    for log in (EGRESS, US_EAST, EU_WEST):
        report = verify_log(Folder(home / log), trust_of(home))
        # Leaves of version 1 are taken for what they are by their root alone.
        roots = [] if report.version_1 is None else [report.version_1.root]
        assert (
            not report.findings and verify_log(Folder(home / log), trust_of(home), accept_version_1=roots).ok
        ), log
    assert add_log_keys(folder, config, NOW + 1) is None, "nothing is missing any more"

    origin = region_origin(config.region, config.mesh)
    signer = NoteSigner.from_key(origin, load_signing_key(folder.audit_key), Algorithm.ED25519)
    ml_dsa = NoteSigner.from_ml_dsa(origin, load_ml_dsa_key(folder.audit_ml_dsa_key))
    witnesses = tuple(trust_of(home).witnesses_for("us-east"))
    trail = Trail.open(home / US_EAST, signer, also=[ml_dsa], witnesses=witnesses)
    size = trail.status().durable
    header = Header(
        kind=Kind.KEY, side=Side.INGRESS, time_ms=NOW, source_region="us-east", destination_region="us-east",
        key_id=b"k" * 16, action="made", actor=f"spiffe://us-east.{config.mesh}/operator/operator",
    )  # fmt: skip
    await trail.append([Leaf(header)])
    trail.close()
    opened = trust_of(home).log(origin).open((home / US_EAST / "checkpoint").read_bytes())
    assert opened.checkpoint.size == size + 1
    assert {by.key.algorithm for by in opened.signed} == {Algorithm.ED25519, Algorithm.ML_DSA_44}
    for trust in (trust_of(home), old):
        report = verify_log(Folder(home / US_EAST), trust)
        assert report.findings == [] and report.size == size + 1


def test_another_region_takes_the_new_keys_by_their_fingerprint_alone(home: Path) -> None:
    trusted = home / "eu-west" / "trusted" / "us-east.json"
    held = decode_bundle(trusted.read_bytes()).bundle
    said = CliRunner().invoke(app, ["add-log-keys", "--region", "us-east"])
    assert said.exit_code == 0, said.output
    new = decode_bundle((home / "us-east" / "bundle.json").read_bytes())
    with pytest.raises(TamperError, match=r"one more key us-east\.acme/audit"):
        check_update(held, new)
    words = ["trust", str(home / "us-east" / "bundle.json"), "--region", "eu-west", "--offline"]
    for refused in (words, [*words, "--fingerprint", held.fingerprint()]):
        answer = CliRunner().invoke(app, refused)
        assert isinstance(answer.exception, RequestError)
        assert decode_bundle(trusted.read_bytes()).bundle == held
    # Of a region's founding, the fingerprint says nothing of bridges' logs, which have one more key, too.
    answer = CliRunner().invoke(app, [*words, "--fingerprint", new.bundle.fingerprint()])
    assert isinstance(answer.exception, RequestError)
    assert "one more key us-east.acme/bridge/" in str(answer.exception)
    assert "--whole" in answer.exception.hint
    answer = CliRunner().invoke(app, [*words, "--fingerprint", new.bundle.whole_fingerprint()])
    assert answer.exit_code == 0, answer.output
    assert decode_bundle(trusted.read_bytes()).bundle == new.bundle
