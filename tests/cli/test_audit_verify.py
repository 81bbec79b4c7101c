"""`felix audit verify` for a person: what a log lacks, what to do about it, and which file it is about."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest
from audit_log import EGRESS_ORIGIN, POLICY_SEEDS, REGION_ORIGIN, STREAM, egress_appends, key, region_bundle
from crossing_logs import START_MS, write_log
from msgspec.structs import replace
from signed_grants import grant_leaves, paper_leaf, signed_grant, standing
from typer.testing import CliRunner

from audit.leaf import Side
from audit.proof import prove
from audit.tile_disk import Folder
from audit.tlog_proof import prove_leaves
from audit.trust import Trust
from cli.audit import to_report
from cli.main import app
from cli.output import iso
from keys.bundle import sign_bundle
from policy.grant import StandingAction


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two logs of us-east that nobody cosigned, its bridge's and its own with a policy alone; and bundles of both regions."""
    folder = tmp_path_factory.mktemp("verify")
    write_log(folder / "log", EGRESS_ORIGIN, egress_appends(10))
    signed = signed_grant()
    write_log(folder / "own", REGION_ORIGIN, [[paper_leaf(signed.source_policy, signed)]])
    for region in ("us-east", "eu-west"):
        (folder / region).write_bytes(sign_bundle(region_bundle(region), key(POLICY_SEEDS[region])).encode())
    return folder


def verify(folder: Path, log: str, *regions: str, cosignatures: int = 1) -> tuple[int, str]:
    words = [word for region in regions for word in ("--bundle", str(folder / region))]
    command = ["audit", "verify", str(folder / log), *words, "--cosignatures", str(cosignatures)]
    done = CliRunner().invoke(app, command, env={"FELIX_HOME": str(folder / "home")})
    return done.exit_code, " ".join(done.output.split())


def test_a_region_alone_is_told_how_to_verify_without_a_cosignature_and_who_could_give_one(
    folder: Path,
) -> None:
    code, said = verify(folder, "own", "us-east")
    assert code == 5 and "1 log: 1 of them does not verify" in said
    assert "nobody but us-east is trusted here" in said and "--cosignatures 0 verifies" in said
    assert "another region by a bridge, or name an outside witness" in said


def test_a_log_that_is_not_cosigned_yet_says_when_it_will_be(folder: Path) -> None:
    code, said = verify(folder, "log", "us-east", "eu-west")
    assert code == 5 and "other regions cosign a log when" in said and "nobody but" not in said


def test_a_log_that_was_changed_gets_no_advice_to_ask_for_less(folder: Path) -> None:
    copytree(folder / "log", folder / "changed")
    bundle = next((folder / "changed").glob("tile/entries/**/*.p/*"))
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 1
    bundle.write_bytes(data)
    code, said = verify(folder, "changed", "us-east", "eu-west")
    assert code == 5 and "--cosignatures" not in said


def test_a_log_that_does_not_verify_is_shown_with_the_age_of_the_bundles(folder: Path) -> None:
    """An auditor's may be of before a change of keys: then a genuine log says that keys are none of a region's."""
    newer = key(211)
    changed = replace(region_bundle("us-east"), policy_keys=(newer.verify_key.public,))
    (folder / "other-keys").write_bytes(sign_bundle(changed, newer).encode())
    code, said = verify(folder, "own", "other-keys", "eu-west", cosignatures=0)
    assert code == 5 and "none of us-east's policy keys" in said
    issued = iso(changed.issued_ms)
    assert f"us-east of {issued}" in said and "take its current one" in said
    code, said = verify(folder, "own", "us-east", "eu-west", cosignatures=0)
    assert code == 0 and "issued" not in said and f"of {issued}" not in said


def test_a_proof_that_does_not_hold_is_shown_with_the_age_of_the_bundles(folder: Path) -> None:
    newer = key(211)
    changed = replace(region_bundle("us-east"), policy_keys=(newer.verify_key.public,))
    (folder / "other-keys").write_bytes(sign_bundle(changed, newer).encode())
    files, trusted = Folder(folder / "log"), Trust.of(map(region_bundle, ("us-east", "eu-west")))
    proof = prove(files, trusted, STREAM, 0, 0)
    (folder / "proof").write_bytes(proof)
    (folder / "leaf").write_bytes(prove_leaves(files, trusted, STREAM, 0, 0)[0])
    for name in ("proof", "leaf"):
        for bundle, holds in (("us-east", True), ("other-keys" if name == "proof" else "eu-west", False)):
            words = ["audit", "check-proof", str(folder / name), "--cosignatures", "0"]
            for each in (bundle, "eu-west"):
                words += ["--bundle", str(folder / each)]
            done = CliRunner().invoke(app, words, env={"FELIX_HOME": str(folder / "home")})
            assert (done.exit_code == 0) == holds, done.output
            assert ("take its current one" in str(done.exception)) == (not holds), done.exception


def test_a_log_that_verifies_gets_no_hint_and_one_closing_line(folder: Path) -> None:
    code, said = verify(folder, "log", "us-east", "eu-west", cosignatures=0)
    assert code == 0 and said.endswith("1 log: verified") and "--cosignatures" not in said


def test_what_cannot_be_checked_is_named_by_its_file(folder: Path) -> None:
    (folder / "ill").mkdir()
    (folder / "ill" / "checkpoint").write_text("no note\n")
    code, said = verify(folder, "ill", "us-east")
    assert code == 5 and f"{folder / 'ill'} DOES NOT VERIFY nothing in it could be checked" in said
    assert "0 leaves" not in said and "--cosignatures" not in said


def test_a_report_leaves_out_a_region_that_leads_nowhere_yet_and_no_log_of_a_crossing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    trust = Trust.of([region_bundle("us-east"), region_bundle("eu-west")])
    own, log = folder / "own", folder / "log"
    assert to_report([log, own], trust, []) == [log]
    assert "is left out: nobody has cosigned it yet" in " ".join(capsys.readouterr().err.split())
    assert to_report([own], trust, []) == [own], "alone it is refused, with the reason"
    # What forbids may be what a bridge kept from its own log.
    signed = signed_grant()
    leaves = [
        *(grant_leaves(signed, Side.EGRESS, START_MS - 2_000)),
        paper_leaf(
            standing(signed.grant, StandingAction.REVOKE, "us-east", at=START_MS), signed, time_ms=START_MS
        ),
    ]
    write_log(tmp_path / "revoked", REGION_ORIGIN, [[leaf] for leaf in leaves])
    assert to_report([log, tmp_path / "revoked"], trust, []) == [log, tmp_path / "revoked"]
    changed = copytree(own, tmp_path / "changed")
    checkpoint = changed / "checkpoint"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-9] + b"AAAAAAA=\n")
    assert to_report([log, changed], trust, []) == [log, changed], "one that does not verify is refused"
