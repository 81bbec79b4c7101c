"""Logs that are written today in the format of Felix 0.1: nothing has to be signed for them but the log itself, so both regions together, or
whoever has a bridge's key, could tell any terms. Nobody takes them for more than they are unless he says that he knows these very leaves.

Tried: two new logs of version 1 for a stream that no grant was ever signed for; genuine logs of version 0.1; such leaves before those of
version 2, accepted and then changed, reordered, lengthened; the commands' and the report's last word on each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, INGRESS, files_of
from audit_log import EGRESS_ORIGIN, INGRESS_ORIGIN, POLICY_SEEDS, Link, key, region_bundle, trust
from crossing_logs import write_log
from slow_runs import only_slow
from typer.testing import CliRunner
from version_0_1 import EGRESS as OLD_EGRESS
from version_0_1 import EU_WEST, US_EAST, lay_out, trust_of

from audit import leaf as leaf_module
from audit.agreement import VERSION_1_UNSUPPORTED
from audit.leaf import EncodedLeaf, Kind, Leaf, Side, Terms, decode_header, encode_leaf
from audit.merkle import Tree, leaf_hash
from audit.tile_disk import Folder
from audit.verify import Version1, verify_log
from cli.exits import EXIT_DAMAGED, EXIT_VERSION_1
from cli.main import app
from keys.bundle import sign_bundle

TERMS = Terms(purpose="INVENTED", basis="adequacy", article="45", reference="never")


def as_version_1(leaf: Leaf) -> Leaf:
    """As its own code writes it who likes the format of then better."""
    header = leaf.header
    if header.kind is Kind.GRANT:
        header = msgspec.structs.replace(header, terms=TERMS, document=b"", document_sha256=b"")
    if header.record_bytes:
        header = msgspec.structs.replace(header, payload_bytes=header.record_bytes, record_bytes=0)
    return Leaf(header, leaf.entries, 1)


def root_of(leaves: list[Leaf]) -> bytes:
    tree = Tree()
    for leaf in leaves:
        tree.add(leaf_hash(encode_leaf(leaf)))
    return tree.root()


def written_today() -> tuple[list[Leaf], list[Leaf]]:
    """Both logs of a link on which nobody signed anything but receipts and logs."""
    link = Link(grant_id="g-invented")
    intents = link.intent()
    egress = [as_version_1(leaf) for leaf in (link.grant(), *intents, link.ack(intents, 1))]
    link.destination_offset = 0
    ingress = [as_version_1(leaf) for leaf in (link.grant(Side.INGRESS), *link.delivery(intents))]
    return egress, ingress


def test_logs_that_two_regions_write_today_in_the_format_of_then_do_not_pass(tally: Tally) -> None:
    for log, leaves in zip((EGRESS, INGRESS), written_today(), strict=True):
        report = verify_log(files_of(log, leaves), trust())
        assert report.findings == [] and not report.ok
        assert report.version_1 == Version1(len(leaves), root_of(leaves), False)
        assert set(VERSION_1_UNSUPPORTED) <= set(report.unsupported)
        assert verify_log(files_of(log, leaves), trust(), accept_version_1=[root_of(leaves)]).ok
        tally("logs of version 1, written today", 1)


def test_what_was_accepted_is_these_leaves_and_no_others(tally: Tally) -> None:
    old, _ = written_today()
    link = Link(shard=1)
    papers, intents = link.agreement(), link.intent()
    new = [*papers, *intents, link.ack(intents)]
    accepted = [root_of(old)]
    for count in range(len(new) + 1):
        # The log goes on in version 2: what was accepted of it stays so.
        report = verify_log(files_of(EGRESS, [*old, *new[:count]]), trust(), accept_version_1=accepted)
        assert report.ok and report.version_1 == Version1(len(old), accepted[0], True)
    more = as_version_1(Link(shard=2, grant_id="g-invented").gap(3))
    changed = [*old[:-1], as_version_1(Leaf(msgspec.structs.replace(old[-1].header, time_ms=1), b"", 1))]
    for leaves in (
        [*old, more, *new],
        [*changed, *new],
        [more, *old, *new],
        [old[0], old[2], old[1], *old[3:], *new],
    ):
        report = verify_log(files_of(EGRESS, leaves), trust(), accept_version_1=accepted)
        assert not report.ok and report.version_1 is not None and not report.version_1.accepted
        tally("other leaves than were accepted", 1)
    # Behind a leaf of version 2 there are none, whoever accepts what.
    report = verify_log(
        files_of(EGRESS, [*papers, *old]), trust(), accept_version_1=[*accepted, Tree().root()]
    )
    assert {found.step for found in report.findings} == {6}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return lay_out(tmp_path)


def test_a_genuine_log_of_then_says_that_it_is_one(home: Path) -> None:
    for log, crossed in ((OLD_EGRESS, True), (EU_WEST, True), (US_EAST, False)):
        report = verify_log(Folder(home / log), trust_of(home))
        assert report.findings == [] and report.ok is not crossed
        assert report.version_1 == (Version1(report.size, report.root, False) if crossed else None)
        assert verify_log(Folder(home / log), trust_of(home), accept_version_1=[report.root]).ok


def run(home: Path, *words: str) -> tuple[int, str]:
    bundles = [
        word for region in ("us-east", "eu-west") for word in ("--bundle", str(home / region / "bundle.json"))
    ]
    done = CliRunner().invoke(app, ["audit", *words, *bundles], env={"FELIX_HOME": str(home / "nowhere")})
    return done.exit_code, " ".join(done.output.split())


def test_the_commands_say_so_and_how_to_accept_it(home: Path) -> None:
    log = str(home / OLD_EGRESS)
    root = verify_log(Folder(home / OLD_EGRESS), trust_of(home)).root.hex()
    code, said = run(home, "verify", log)
    assert code == EXIT_VERSION_1 and "OF VERSION 0.1" in said and f"--accept-version-1 {root}" in said
    assert "cannot support" in said and "but for what crossed in leaves of version 0.1" in said
    code, said = run(home, "verify", log, "--accept-version-1", root)
    assert code == 0 and "cannot support" in said and said.endswith("1 log: verified")
    code, said = run(home, "verify", log, "--accept-version-1", "ab")
    assert code not in (0, EXIT_DAMAGED, EXIT_VERSION_1)
    code, said = run(home, "verify", log, "--accept-version-1", root, "--cosignatures", "3")
    assert code == EXIT_DAMAGED
    code, said = run(home, "check-proof", str(home / "record.proof.json"))
    assert code == EXIT_VERSION_1 and "The proof holds" in said and "cannot support" in said
    record = msgspec.json.decode((home / "record.proof.json").read_bytes())["record"]
    code, said = run(
        home, "prove", "--format", "tlog-proof", "--log", log, "--out", str(home / "record"),
        "--stream", record["stream"], "--shard", str(record["shard"]), "--offset", str(record["offset"]),
    )  # fmt: skip
    assert code == 0, said
    for file in ("record.tlog-proof", "record.ack.tlog-proof"):
        for form in ((), ("--json",)):
            code, said = run(home, "check-proof", str(home / file), *form)
            assert code == EXIT_VERSION_1 and "that Felix 0.1 wrote them" in said, file


@only_slow
@pytest.mark.spark
def test_a_report_shows_it_in_each_row_and_is_not_clean(spark: Any, tmp_path: Path, tally: Tally) -> None:
    from audit.spark.report import EXIT_ONE_SIDE, run_report
    from audit.spark.report import EXIT_VERSION_1 as REPORTED

    assert REPORTED == EXIT_VERSION_1
    logs, roots = [], []
    for name, origin, leaves in zip(
        ("e", "i"), (EGRESS_ORIGIN, INGRESS_ORIGIN), written_today(), strict=True
    ):
        data = [leaf_module._encode(leaf) for leaf in leaves]
        write_log(
            tmp_path / name, origin, [[EncodedLeaf(decode_header(each), each)] for each in data], cosign=True
        )  # type: ignore[list-item]
        logs.append(tmp_path / name)
        roots.append(root_of(leaves))
    for accepted, code, status, verification in (
        ((), EXIT_VERSION_1, "of version 0.1", "of version 0.1"),
        ((roots[0],), EXIT_VERSION_1, "of version 0.1", "of version 0.1"),
        (roots, EXIT_ONE_SIDE, "reconciled", "verified"),
    ):
        result = run_report(logs, tmp_path / "out", trust=trust(), session=spark, accept_version_1=accepted)
        assert result.exit_code == code
        (shard,) = result.report.reconciliation.records()
        assert (shard["status"], shard["version_1"], shard["delivered"]) == (status, True, 3)
        (row,) = result.report.register.records()
        assert (row["verification"], row["version_1"], row["terms_found"]) == (verification, True, False)
        page = result.page.read_text()
        assert "They cannot support" in page and all(root.hex() in page for root in roots)
        tally("reports of version 1", 1)


def test_the_report_command_takes_what_this_machines_regions_remember(tmp_path: Path) -> None:
    """As `felix audit verify` does: a log put back from a copy is no shorter than what a region here has cosigned."""
    from cli import audit as commands

    link = Link()
    write_log(tmp_path / "log", EGRESS_ORIGIN, [link.agreement()], cosign=True)
    note = (tmp_path / "log" / "checkpoint").read_bytes()
    given: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "remembered_here", lambda: [note])
        patch.setattr(
            "audit.spark.report.run_report", lambda *_, **more: given.append(more["remembered"]) or 1 / 0
        )
        (tmp_path / "us-east").write_bytes(
            sign_bundle(region_bundle("us-east"), key(POLICY_SEEDS["us-east"])).encode()
        )
        words = ["audit", "report", "--log", str(tmp_path / "log"), "--bundle", str(tmp_path / "us-east")]
        CliRunner().invoke(app, words, env={"FELIX_HOME": str(tmp_path / "home")})
    assert given == [[note]]
