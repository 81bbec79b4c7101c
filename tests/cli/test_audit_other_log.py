"""Evidence about another log than the one that was meant: a checkpoint that somebody remembered of it, and a log in its folder. No command passes over it."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import pytest
from audit_log import EGRESS_ORIGIN, POLICY_SEEDS, REGION_ORIGIN, STREAM, egress_appends, key, region_bundle
from crossing_logs import write_log
from region_home import make_region
from signed_grants import paper_leaf, signed_grant
from typer.testing import CliRunner

from audit.spark.report import EXIT_REFUSED
from cli.exits import EXIT_DAMAGED, EXIT_FAILED, exit_code
from cli.main import app
from felix.errors import FelixError
from keys.bundle import sign_bundle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two logs of us-east, its bridge's and its own, and bundles of both regions."""
    folder = tmp_path_factory.mktemp("other")
    write_log(folder / "log", EGRESS_ORIGIN, egress_appends(2), cosign=True)
    signed = signed_grant()
    write_log(folder / "own", REGION_ORIGIN, [[paper_leaf(signed.source_policy, signed)]])
    for region in ("us-east", "eu-west"):
        (folder / region).write_bytes(sign_bundle(region_bundle(region), key(POLICY_SEEDS[region])).encode())
    return folder


def audit(folder: Path, home: Path, *words: str) -> tuple[int, str]:
    bundles = [word for region in ("us-east", "eu-west") for word in ("--bundle", str(folder / region))]
    command = ["audit", *words, *bundles]
    done = CliRunner().invoke(app, command, env={"FELIX_HOME": str(home)})
    if isinstance(done.exception, FelixError):
        return exit_code(done.exception), done.exception.sentence
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_checkpoint_of_a_log_that_is_not_there_is_held_to_nothing_and_says_so(
    folder: Path, tmp_path: Path, form: tuple[str, ...]
) -> None:
    """Who wants to know whether a log was rolled back, and is shown another one in its place."""
    words = ("verify", str(folder / "own"), "--cosignatures", "0", *form)
    remembered = ("--remembered", str(folder / "log" / "checkpoint"))
    assert audit(folder, tmp_path, *words)[0] == 0
    code, said = audit(folder, tmp_path, *words, *remembered)
    assert code == EXIT_FAILED and f"is a checkpoint of {EGRESS_ORIGIN}, which is none of these logs" in said
    code, said = audit(folder, tmp_path, *words, *remembered, str(folder / "log"))
    assert code == 0 and "none of these logs" not in said


def test_neither_a_report_nor_a_restored_log_goes_by_a_checkpoint_of_another(
    folder: Path, tmp_path: Path
) -> None:
    remembered = ("--remembered", str(folder / "log" / "checkpoint"))
    code, said = audit(folder, tmp_path, "restore", str(folder / "own"), str(tmp_path / "to"), *remembered)
    assert code == EXIT_FAILED and "none of these logs" in said and not (tmp_path / "to").exists()
    words = ("report", "--log", str(folder / "own"), "--cosignatures", "0", "--out", str(tmp_path / "out"))
    code, said = audit(folder, tmp_path, *words, *remembered)
    assert code == EXIT_FAILED and "none of these logs" in said and not (tmp_path / "out").exists()


def test_another_log_in_a_logs_folder_does_not_pass_for_it(folder: Path, tmp_path: Path) -> None:
    """A whole and genuine log of the region, put where the log of its bridge has its place."""
    place = make_region(tmp_path, "us-east").bridges / "us-to-eu" / "egress"
    copytree(folder / "own", place)
    assert audit(folder, tmp_path / "elsewhere", "verify", str(place), "--cosignatures", "0")[0] == 0
    code, said = audit(folder, tmp_path, "verify", str(place), "--cosignatures", "0")
    assert code == EXIT_DAMAGED and EGRESS_ORIGIN in said and REGION_ORIGIN in said
    words = ("report", "--log", str(place), "--cosignatures", "0", "--out", str(tmp_path / "out"))
    code, said = audit(folder, tmp_path, *words)
    assert code == EXIT_REFUSED and "is the folder of" in said and not (tmp_path / "out").exists()


def test_a_proof_without_its_receipt_does_not_say_that_the_log_has_none(folder: Path, tmp_path: Path) -> None:
    """Whoever hands a proof on may leave the receipt out; what is left is a genuine proof of the INTENT."""
    proof, changed = tmp_path / "whole.json", tmp_path / "changed.json"
    words = ("--log", str(folder / "log"), "--stream", STREAM, "--offset", "0", "--out", str(proof))
    assert audit(folder, tmp_path, "prove", *words)[0] == 0
    code, said = audit(folder, tmp_path, "check-proof", str(proof))
    assert code == 0 and "receipt signed by eu-west" in said
    changed.write_text(json.dumps({**json.loads(proof.read_bytes()), "ack": None}))
    code, said = audit(folder, tmp_path, "check-proof", str(changed))
    assert code == 0 and "not shown: this proof has no receipt" in said and "in the log yet" not in said


def test_links_in_a_circle_are_no_log_and_end_in_words(folder: Path, tmp_path: Path) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    code, said = audit(folder, tmp_path, "report", "--log", str(circle), "--out", str(tmp_path / "out"))
    assert code == EXIT_REFUSED and "What is at checkpoint" in said and "is not a file" in said
