"""Evidence that says half: leaves that are each well formed and signed, and together say what is not so.

Tried with the keys of one party, and its own log alone or both logs: a proof whose INTENT lists records that the receipt does
not count, or other records than it is for; a residency policy that only a leaf of version 1 names; a crossing under terms that share a grant's id and nothing
else; a revocation by a region that has no say; a leaf that calls itself ingress in an egress log; an arrival under another
grant than was announced, whose receipt is left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, files_of
from audit_log import RECEIPT_KEY, STREAM, Link, trust
from crossing_logs import DAY_MS, DEPARTURES, EGRESS_ORIGIN, OVER, START_MS, World, write_log, write_world
from signed_grants import paper_leaf, signed_grant, standing
from slow_runs import only_slow

from audit.leaf import Header, Kind, Leaf, Side
from audit.proof import check_proof, prove
from audit.receipt import WITHOUT_ENTRIES_UNSUPPORTED, read_unverified
from audit.spark.report import EXIT_DIFFERENCES, EXIT_ONE_SIDE, run_report
from audit.verify import verify_log
from felix.errors import TamperError
from policy.grant import StandingAction

replace = msgspec.structs.replace


# A proof's INTENT and its receipt


def test_a_proof_shows_no_receipt_for_a_record_that_the_receipt_does_not_count(tally: Tally) -> None:
    tried = 0
    for withheld in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
        link, forged = Link(), Link()
        honest = link.intent(3, withheld)
        lies = [leaf for leaf in forged.intent(3) if leaf.header.kind is Kind.INTENT]
        ack = link.ack(honest)
        files = files_of(EGRESS, [*link.agreement(), *lies, ack])
        for offset in range(3):
            with pytest.raises(TamperError, match="lists 3 records"):
                check_proof(prove(files, trust(), STREAM, 0, offset), trust())
            tried += 1
        # Called the first of two parts, it would have to leave room for the second.
        for part in (0, 1):
            split = [Leaf(replace(leaf.header, part=part, parts=2), leaf.entries) for leaf in lies]
            files = files_of(EGRESS, [*link.agreement(), *split, ack])
            with pytest.raises(TamperError, match="does not cover the range"):
                check_proof(prove(files, trust(), STREAM, 0, 0), trust())
            tried += 1
    tally("proofs of records that no receipt counts", tried)


def test_a_proof_of_each_part_of_a_split_batch_holds() -> None:
    link = Link()
    intents = link.intent(2_000, (3, 1_500))
    parts = [leaf for leaf in intents if leaf.header.kind is Kind.INTENT]
    assert len(parts) > 2
    files = files_of(EGRESS, [*link.agreement(), *intents, link.ack(intents)])
    assert verify_log(files, trust()).ok
    for leaf in parts:
        for offset in (leaf.header.first_offset, leaf.header.last_offset):
            assert offset is not None
            proven = check_proof(prove(files, trust(), STREAM, 0, offset), trust())
            assert proven.receipt is not None and proven.receipt.records == 1_998


def test_a_receipt_is_for_the_records_that_the_destination_has_and_for_no_others(tally: Tally) -> None:
    """As many records of the same range, and one of them another: the egress log alone tells, and so does a proof."""
    tried = 0
    for count in (3, 2_000):
        # Which record did not cross, and which one the INTENT says did not.
        for stayed, said in ((0, 1), (2, 0), (1, 2)):
            link, forged = Link(), Link()
            ack = link.ack(link.intent(count, (stayed,)))
            lies = forged.intent(count, (said,))
            files = files_of(EGRESS, [*link.agreement(), *lies, ack])
            (found,) = verify_log(files, trust()).findings
            assert found.step == 7 and "other records than its INTENT lists" in found.sentence
            with pytest.raises(TamperError, match="other records than its INTENT lists"):
                check_proof(prove(files, trust(), STREAM, 0, stayed), trust())
            tried += 2
    tally("receipts beside records that did not arrive", tried)


def test_a_proof_of_a_split_batch_shows_all_of_it_or_nothing(tally: Tally) -> None:
    link = Link()
    intents = link.intent(2_000)
    files = files_of(EGRESS, [*link.agreement(), *intents, link.ack(intents), *link.intent(2_000)])
    document = json.loads(prove(files, trust(), STREAM, 0, 0))
    other = json.loads(prove(files, trust(), STREAM, 0, 1_999))
    parts = document["parts"]
    assert len(parts) == len(intents) - 1 > 1
    tried = [
        [],
        parts[:-1],
        parts[1:],
        parts[::-1],
        [*parts, parts[0]],
        [document["intent"], *parts],
        other["parts"],
    ]
    for each in tried:
        with pytest.raises(TamperError, match=r"every INTENT leaf|no part of the batch"):
            check_proof(json.dumps(document | {"parts": each}).encode(), trust())
    assert check_proof(json.dumps(document).encode(), trust()).unsupported == ()
    tally("proofs with parts of a batch left out or exchanged", len(tried))


def test_a_receipt_of_before_holds_and_says_what_it_does_not_show() -> None:
    link = Link()
    intents = link.intent(2_000, (5,))
    ack = link.ack(intents)
    receipt = replace(read_unverified(ack.header.receipt), entries_sha256=b"")
    body = msgspec.msgpack.encode(
        {name: value for name, value in msgspec.structs.asdict(receipt).items() if value != b""}
    )
    signed = {"key_id": RECEIPT_KEY.key_id, "body": body, "signature": RECEIPT_KEY.sign("receipt", body)}
    before = Leaf(replace(ack.header, receipt=msgspec.msgpack.encode(signed)))
    files = files_of(EGRESS, [*link.agreement(), *intents, before])
    report = verify_log(files, trust())
    assert report.ok and report.unsupported == WITHOUT_ENTRIES_UNSUPPORTED
    data = prove(files, trust(), STREAM, 0, 0)
    proven = check_proof(data, trust())
    assert proven.receipt is not None and proven.unsupported == WITHOUT_ENTRIES_UNSUPPORTED
    assert json.loads(data)["parts"] == []


# Documents


def test_a_policy_that_a_leaf_of_version_1_names_is_not_there() -> None:
    link = Link()
    papers = link.agreement()
    policy = next(leaf for leaf in papers if leaf.header.kind is Kind.POLICY)
    named = Leaf(replace(policy.header, document=b"", document_sha256=b""), b"", 1)
    intents = link.intent()
    rest = [leaf for leaf in papers if leaf is not policy]
    files = files_of(EGRESS, [named, *rest, *intents, link.ack(intents)])
    report = verify_log(files, trust())
    assert [(found.step, "the policy of us-east that its half names stands in no POLICY leaf" in found.sentence) for found in report.findings] == [(7, True)]  # fmt: skip
    with pytest.raises(
        TamperError, match="the policy of us-east that its half names stands in no POLICY leaf"
    ):
        check_proof(prove(files, trust(), STREAM, 0, 0), trust())


def test_terms_that_share_a_grants_id_are_not_the_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id is 80 bits of the hash: who draws up terms can find two of one id. The other half names the whole hash."""
    import signed_grants

    import policy.approval
    import policy.grant
    import policy.grant_documents
    import policy.signed

    for module in (policy.grant_documents, policy.approval):
        monkeypatch.setattr(module, "grant_id", lambda _: "g-aaaaaaaaaaaaaaaa")
    make = signed_grants.signed_grant.__wrapped__
    agreed, invented = make(), make(purpose="marketing")
    earlier = msgspec.json.decode(invented.export.body) | {"signed_at": 1}
    half = msgspec.convert(earlier, policy.grant.ExportGrant)
    export = policy.signed.sign(
        policy.signed.Purpose.EXPORT, "us-east", policy.signed.canonical(half), signed_grants.signing_key("us-east")
    )  # fmt: skip
    other = invented._replace(export=export)
    link = Link(grant_id="g-aaaaaaaaaaaaaaaa")
    papers = [*signed_grants.grant_leaves(agreed), paper_leaf(export, other)]
    link.signed = other
    intents = link.intent()
    report = verify_log(files_of(EGRESS, [*papers, *intents, link.ack(intents)]), trust())
    assert any("its hash of terms is not the grant's" in found.sentence for found in report.findings)
    link = Link(grant_id="g-aaaaaaaaaaaaaaaa")
    link.signed = agreed
    intents = link.intent()
    assert verify_log(files_of(EGRESS, [*papers, *intents, link.ack(intents)]), trust()).ok


def test_only_a_grants_two_regions_revoke_it() -> None:
    everybody = trust("us-east", "eu-west", "ap-south")
    for region, holds in (("us-east", False), ("eu-west", False), ("ap-south", True)):
        link = Link()
        revoke = paper_leaf(standing(link.signed.grant, StandingAction.REVOKE, region=region), link.signed)
        intents = link.intent()
        files = files_of(EGRESS, [*link.agreement(), revoke, *intents, link.ack(intents)])
        assert verify_log(files, everybody).ok is holds, region


# Reports


def crossed(**arrives_as: Any) -> World:
    """Three batches without receipts, as if all were still on its way; two grants are for the stream."""
    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    world.grant(DEPARTURES, START_MS - 1_000, OTHER)

    def change(leaves: list[Leaf]) -> list[Leaf]:
        return [Leaf(replace(leaf.header, **arrives_as), leaf.entries) for leaf in leaves]

    for number in range(3):
        world.batch(DEPARTURES, 0, START_MS + number, count=10, withheld=0.0, receipt=False, change=change)
    return world


OTHER = signed_grant(stream=DEPARTURES, purpose="marketing", expires=START_MS + 90 * DAY_MS, onward=True)


@only_slow
def test_a_leaf_that_calls_itself_ingress_stands_in_for_no_ingress_log(spark: Any, tmp_path: Path) -> None:
    world = crossed()
    seal = Header(
        kind=Kind.SEAL, side=Side.INGRESS, time_ms=START_MS, source_region="us-east", destination_region="us-east",
        seal_file="register.parquet", seal_sha256=b"s" * 32,
    )  # fmt: skip
    world.egress.append([Leaf(seal)])
    write_log(tmp_path / "egress", EGRESS_ORIGIN, world.egress, cosign=True)
    alone = run_report([tmp_path / "egress"], tmp_path / "out", trust=trust(), session=spark)
    assert alone.exit_code == EXIT_ONE_SIDE
    assert {row["status"] for row in alone.report.reconciliation.records()} == {"one side only"}


@only_slow
def test_what_was_announced_under_other_terms_than_it_arrived_under_is_found(
    spark: Any, tmp_path: Path, tally: Tally
) -> None:
    """Both grants are in force on both sides, so neither log alone shows anything; and no receipt says which it was."""

    def report(name: str, world: World) -> Any:
        paths = write_world(tmp_path / name, world)
        return run_report(paths, tmp_path / f"{name}-out", trust=trust(), session=spark)

    honest = report("honest", crossed())
    assert honest.exit_code == EXIT_ONE_SIDE and honest.report.totals.open
    told = report("told", crossed(grant_id=OTHER.grant, terms_hash=OTHER.terms.hash(), path=OVER))
    assert told.report.totals.breaches == 0
    assert told.exit_code == EXIT_DIFFERENCES
    found = [row for row in told.report.findings.records() if row["finding"] == "terms-differ"]
    assert len(found) == 3 and OTHER.grant in found[0]["sentence"]
    ways = [row for row in told.report.findings.records() if row["finding"] == "path-differs"]
    assert len(ways) == 3 and "by the ingress log they had been in ap-south, us-east" in ways[0]["sentence"]
    epoch = report("epoch", crossed(source_epoch=7))
    assert epoch.exit_code == EXIT_DIFFERENCES and epoch.report.totals.breaches == 0
    tally("announcements that the arrival contradicts", 6)


@only_slow
def test_a_destination_that_writes_its_uncosigned_leaves_anew_is_found_by_its_receipts(
    spark: Any, tmp_path: Path, tally: Tally
) -> None:
    """It puts two arrivals in another order, one of them at other offsets, and signs again before anybody cosigned. Each log verifies."""
    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    for shard in (0, 1):
        world.batch(DEPARTURES, shard, START_MS + shard, count=10, withheld=0.0)
    world.ingress.append(world.ingress.pop(-2))
    (moved,) = world.ingress[-1]
    there = {"destination_first_offset": 30, "destination_last_offset": 39}
    world.ingress[-1] = [Leaf(replace(moved.header, **there), moved.entries)]
    result = run_report(write_world(tmp_path, world), tmp_path / "out", trust=trust(), session=spark)
    assert result.exit_code == EXIT_DIFFERENCES and result.report.totals.breaches == 0
    found = [row["finding"] for row in result.report.findings.records()]
    assert found == ["arrival-moved", "place-differs", "arrival-moved"]
    tally("arrivals in another place than their receipts say", 3)
