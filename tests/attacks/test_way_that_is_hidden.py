"""A bridge's agent hides that a batch came by a third region: in the INTENT, in the ACK, or by leaving both out. The destination saw each
record's path, and its receipt and its own leaf say so. Or it names regions so that they are read as another way. What reports say of it: tests/spark/test_report.py, attacks/test_half_told_evidence.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks import test_one_party_alone
from attacks.test_one_party_alone import EGRESS, INGRESS, files_of
from audit_log import STREAM, Link, receipt_for, trust
from crossing_logs import DEPARTURES, EGRESS_ORIGIN, START_MS, write_log
from signed_grants import signed_grant
from slow_runs import only_slow
from spark.test_two_moments import Live

from audit import leaf as leaf_module
from audit.leaf import EncodedLeaf, Kind, Leaf, Side, decode_leaf, encode_leaf
from audit.proof import check_proof, prove
from audit.receipt import WITHOUT_PATH_UNSUPPORTED
from audit.spark.report import EXIT_ONE_SIDE, ReportRefusedError, run_report
from audit.verify import Report, verify_log
from felix.errors import CorruptionError, RequestError, TamperError

OVER: tuple[str, ...] = ("ap-south", "us-east")


def with_path(leaf: Leaf, path: tuple[str, ...]) -> Leaf:
    return Leaf(msgspec.structs.replace(leaf.header, path=path), leaf.entries)


def logs(*, onward: bool = True) -> tuple[list[Leaf], Leaf, Leaf, Link]:
    """What stands before a crossing, its INTENT and its ACK, of records that had been in ap-south."""
    link = Link()
    link.signed = signed_grant(onward=onward)
    link.grant_id = link.signed.grant
    papers = link.agreement()
    intent = with_path(link.intent()[-1], OVER)
    return papers, intent, link.ack([intent]), link


def verified(papers: list[Leaf], *leaves: Leaf, log: str = EGRESS) -> Report:
    return verify_log(files_of(log, [*papers, *leaves]), trust())


def sentences(report: Report) -> str:
    return " ".join(finding.sentence for finding in report.findings)


def test_the_egress_log_says_it_as_the_destination_signed_it() -> None:
    papers, intent, ack, _ = logs()
    report = verified(papers, intent, ack)
    assert report.ok and report.unsupported == ()
    assert "its INTENT says that the records had been in us-east" in sentences(
        verified(papers, with_path(intent, ("us-east",)), ack)
    )
    for lie in (("us-east",), ()):
        assert "differ in path" in sentences(verified(papers, intent, with_path(ack, lie)))


def test_an_intent_that_names_no_region_says_that_it_does_not_and_its_ack_does() -> None:
    papers, intent, ack, _ = logs()
    report = verified(papers, with_path(intent, ()), ack)
    assert report.ok and report.unsupported == WITHOUT_PATH_UNSUPPORTED


def test_logs_of_before_verify_and_say_what_they_do_not_show() -> None:
    papers, intent, ack, link = logs()
    head = msgspec.structs.replace(ack.header, path=())
    before = Leaf(msgspec.structs.replace(head, receipt=receipt_for(head, [intent])))
    report = verified(papers, intent, before)
    assert report.ok and report.unsupported == WITHOUT_PATH_UNSUPPORTED
    arrived = [with_path(leaf, ()) for leaf in link.delivery([intent])]
    there = verified(link.agreement(Side.INGRESS), *arrived, log=INGRESS)
    assert there.ok and there.unsupported == WITHOUT_PATH_UNSUPPORTED


NO_WAYS = {
    "two regions as one name": ("ap-south,us-east",),
    "an empty name": ("", "us-east"),
    "markup": ("<script>", "us-east"),
    "a line": ("ap-south\n", "us-east"),
    "another spelling": ("AP-South", "us-east"),
    "the source left out": ("ap-south",),
    "the source first": ("us-east", "ap-south"),
}


@pytest.mark.parametrize("way", NO_WAYS.values(), ids=NO_WAYS)
def test_a_way_that_is_none_of_regions_with_the_source_last_is_no_leaf_and_stands_out(
    way: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has the hash that the destination signed for the true way."""
    papers, intent, ack, _ = logs()
    intent, ack = with_path(intent, way), with_path(ack, way)
    for leaf in (intent, ack):
        with pytest.raises(RequestError, match="cannot be written: it could not be read again"):
            encode_leaf(leaf)
        with pytest.raises(CorruptionError, match="its path"):
            decode_leaf(leaf_module._encode(leaf))
    monkeypatch.setattr(test_one_party_alone, "encoded", leaf_module._encode)
    report = verified(papers, intent, ack)
    assert [(found.step, found.leaf) for found in report.findings if "its path" in found.sentence] == [
        (6, len(papers)),
        (6, len(papers) + 1),
    ]


def test_a_way_that_comes_through_the_source_twice_is_one() -> None:
    papers, intent, _, link = logs()
    intent = with_path(intent, ("us-east", "ap-south", "us-east"))
    assert verified(papers, intent, link.ack([intent])).ok


@pytest.mark.parametrize("said", [(), ("us-east",)], ids=["nothing", "the source alone"])
def test_an_ack_that_names_a_region_which_the_terms_exclude_is_found_whatever_its_intent_says(
    said: tuple[str, ...],
) -> None:
    papers, intent, ack, _ = logs(onward=False)
    intent = with_path(intent, said)
    assert "ACK under grant" in sentences(verified(papers, intent, ack))
    assert "came from ap-south, and the grant" in sentences(verified(papers, intent, ack))
    files = files_of(EGRESS, [*papers, intent, ack])
    with pytest.raises(
        TamperError, match=r"in other regions than its ACK|ACK does not hold.*came from ap-south"
    ):
        check_proof(prove(files, trust(), STREAM, 0, 1), trust())


@pytest.mark.parametrize("log", [EGRESS, INGRESS])
def test_terms_that_let_no_third_region_through_are_asked_on_both_sides(log: str) -> None:
    papers, intent, _, link = logs(onward=False)
    if log == INGRESS:
        report = verified(link.agreement(Side.INGRESS), *link.delivery([intent]), log=log)
    else:
        report = verified(papers, intent)
    assert "came from ap-south, and the grant" in sentences(report)


@pytest.mark.spark
@only_slow
def test_a_report_on_the_egress_log_alone_is_not_silent_about_regions_that_are_named_as_one(
    spark: Any, tmp_path: Path
) -> None:
    signed = signed_grant(stream=DEPARTURES, expires=START_MS + 10**9, onward=True)
    world = Live(signed=signed)
    world.grant(DEPARTURES, START_MS - 1_000, signed)
    world.batch(DEPARTURES, 0, START_MS, 5, withheld=0.0, path=OVER)

    def one_name(leaf: Leaf) -> Leaf | EncodedLeaf:
        if leaf.header.kind not in (Kind.INTENT, Kind.ACK):
            return leaf
        lie = with_path(leaf, (",".join(OVER),))
        return EncodedLeaf(lie.header, leaf_module._encode(lie))

    def told(name: str, appends: list[Any]) -> Any:
        write_log(tmp_path / name, EGRESS_ORIGIN, appends, cosign=True)
        return run_report([tmp_path / name], tmp_path / f"{name}-out", trust=trust(), session=spark)

    honest = told("honest", world.egress)
    assert honest.exit_code == EXIT_ONE_SIDE
    assert "onward-transfer" in {row["exception"] for row in honest.report.exceptions.records()}
    with pytest.raises(ReportRefusedError, match="its path has what is no region's name"):
        told("lied", [[one_name(leaf) for leaf in leaves] for leaves in world.egress])
