"""Nobody's keys, or an operator's who has somebody of rank sign afterwards: whom a report and a proof name for a crossing are those who had approved
and accepted before it crossed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_half_signed_again import again
from audit_log import EGRESS_ORIGIN, trust
from crossing_logs import DEPARTURES, SIGNED, START_MS, World, write_world
from signed_grants import approver, paper_leaf
from slow_runs import only_slow

from audit.leaf import Kind, Leaf, Side
from audit.proof import check_proof, prove
from audit.spark.agreements import _NAMES, FirstCrossing, _first_crossings, rows_of
from audit.tile import MemoryFiles
from audit.tile_disk import Folder
from policy.approval import CLOCK_SKEW_MS, sign_approval

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

S = SIGNED[DEPARTURES]
DAY_MS = 86_400_000
CAROL = "spiffe://eu-west.acme/operator/carol"
BEFORE = ({each.claim.approver for each in S.approvals}, S.half.accepted_by)
CEO = str(approver("eu-west", "ceo").spiffe_id)


def world() -> World:
    """Ten records; a day later somebody else approves and accepts, and ten more cross. Each log has the papers in that order."""
    made = World()
    made.grant(DEPARTURES, START_MS - 1_000)
    made.batch(DEPARTURES, 0, START_MS + 1_000, 10, withheld=0.0)
    later = START_MS + DAY_MS
    papers = (
        sign_approval(S.terms.hash(), approver("eu-west", "ceo"), later),
        again(S, "eu-west", later - S.half.signed_at, accepted_by=CAROL),
    )
    for log, side in ((made.egress, Side.EGRESS), (made.ingress, Side.INGRESS)):
        log.append([paper_leaf(each, S, side, later) for each in papers])
    made.batch(DEPARTURES, 0, later + 60_000, 10, withheld=0.0)
    return made


def told(leaves: list[tuple[int, Leaf]], crossed: dict[str, FirstCrossing]) -> tuple[set[str], str]:
    (row,) = rows_of(EGRESS_ORIGIN, leaves, MemoryFiles({}), trust(), crossed).terms
    found = dict(zip(_NAMES, row, strict=True))
    return set(found["approvers"]), found["accepted_by"]


def test_rows_name_those_who_signed_before_the_first_crossing(tally: Tally) -> None:
    leaves = list(enumerate(leaf for append in world().egress for leaf in append))
    first, second = (index for index, leaf in leaves if leaf.header.kind is Kind.INTENT)
    times = {index: leaf.header.time_ms for index, leaf in leaves}
    assert told(leaves, {S.grant: FirstCrossing(first, times[first])}) == BEFORE
    later = (BEFORE[0] | {CEO}, CAROL)
    assert told(leaves, {S.grant: FirstCrossing(second, times[second])}) == later
    assert told(leaves, {}) == later, "nothing crossed in the time asked for"
    assert told(leaves, {"g-another": FirstCrossing(first, times[first])}) == later
    # What had not been approved when it crossed is a finding; the row says what was signed at all.
    assert told(leaves, {S.grant: FirstCrossing(0, START_MS)}) == later
    tally("first crossings", 5)


def test_a_proof_names_those_who_signed_before_its_record(tmp_path: Path, tally: Tally) -> None:
    """Nor who dated an approval later than the crossing, whatever log it stands in."""
    made = world()
    dated = sign_approval(S.terms.hash(), approver("eu-west", "early"), START_MS + 1_001 + CLOCK_SKEW_MS)
    made.egress.insert(1, [paper_leaf(dated, S, Side.EGRESS, START_MS - 900)])
    egress, _ = write_world(tmp_path, made)
    for offset, expected in ((3, BEFORE), (13, (BEFORE[0] | {CEO, dated.claim.approver}, CAROL))):
        shown = check_proof(prove(Folder(egress), trust(), DEPARTURES, 0, offset), trust()).approved
        assert shown is not None
        assert (set(shown.approvers), shown.accepted_by) == expected
        tally("proofs beside later approvals", 1)


@only_slow
@pytest.mark.spark
def test_a_report_names_those_who_signed_before_what_it_is_about(
    spark: SparkSession, tmp_path: Path, tally: Tally
) -> None:
    from audit.spark.report import run_report

    paths = write_world(tmp_path, world())
    windows: dict[str, Any]
    for name, windows, expected in (
        ("all", {}, BEFORE),
        ("first", {"until": START_MS + DAY_MS}, BEFORE),
        ("second", {"since": START_MS + DAY_MS}, (BEFORE[0] | {CEO}, CAROL)),
    ):
        result = run_report(paths, tmp_path / name, trust=trust(), session=spark, **windows)
        for row in result.report.register.records():
            assert (set(row["approvers"]), row["accepted_by"]) == expected, name
        tally("reports", 1)


def border(arrival_ms: int) -> World:
    """Ten records leave a moment before midnight and arrive so much later; an hour after it somebody else approves and accepts."""
    made, midnight = World(), START_MS + DAY_MS
    made.grant(DEPARTURES, START_MS - 1_000)

    def there(leaves: list[Leaf]) -> list[Leaf]:
        return [
            Leaf(msgspec.structs.replace(leaf.header, time_ms=leaf.header.time_ms + arrival_ms), leaf.entries)
            for leaf in leaves
        ]

    made.batch(DEPARTURES, 0, midnight - 100, 10, withheld=0.0, change=there)
    later = midnight + 3_600_000
    papers = (
        sign_approval(S.terms.hash(), approver("eu-west", "ceo"), later),
        again(S, "eu-west", later - S.half.signed_at, accepted_by=CAROL),
    )
    for log, side in ((made.egress, Side.EGRESS), (made.ingress, Side.INGRESS)):
        log.append([paper_leaf(each, S, side, later) for each in papers])
    return made


@only_slow
@pytest.mark.spark
def test_a_report_names_them_where_records_leave_in_one_time_and_arrive_in_another(
    spark: SparkSession, tmp_path: Path, tally: Tally
) -> None:
    from audit.spark.report import run_report

    midnight, hour = START_MS + DAY_MS, 3_600_000
    window: dict[str, Any]
    for name, arrival_ms, logs, window in (
        ("after", 200, slice(None), {"since": midnight}),
        ("of one log", 200, slice(1, None), {"since": midnight, "until": midnight + 1_000}),
        ("by a clock that is a day behind", -DAY_MS, slice(None), {"until": midnight - hour}),
    ):
        folder = tmp_path / name.replace(" ", "-")
        paths = write_world(folder, border(arrival_ms))[logs]
        result = run_report(
            paths, folder / "report", trust=trust(), session=spark, cosignatures_min=0, **window
        )
        for row in result.report.register.records():
            assert (set(row["approvers"]), row["accepted_by"]) == BEFORE, name
        tally("reports", 1)


@pytest.mark.spark
def test_no_leaf_of_a_third_region_changes_what_is_the_first_crossing(
    spark: SparkSession, tally: Tally
) -> None:
    """It names the grant and an old envelope in a log of its own, within the time that is asked for."""
    columns = (
        "log string, version int, kind string, side string, leaf_index bigint, time_ms bigint, grant_id string, terms_hash string, "
        "envelope_sha256 binary, source_region string, destination_region string, bridge string, stream string, "
        "destination_stream string, shard int, incarnation binary"
    )

    def leaf(
        log: str, kind: str, side: str, at: int, envelope: bytes, to: str = "eu-west"
    ) -> tuple[Any, ...]:
        link = ("us-east", to, "a bridge", DEPARTURES, DEPARTURES, 0, b"i")
        return (log, 2, kind, side, at, at, S.grant, S.terms.hash().hex(), envelope, *link)

    rows = [
        leaf(EGRESS_ORIGIN, "GRANT", "egress", 1, b""),
        leaf(EGRESS_ORIGIN, "INTENT", "egress", 10, b"old"),
        leaf(EGRESS_ORIGIN, "INTENT", "egress", 20, b"late"),
        leaf(EGRESS_ORIGIN, "INTENT", "egress", 40, b"new"),
    ]
    third = [leaf("ap-south.acme/audit", "ACK", "ingress", 45, b"old", "ap-south")]
    answered = [leaf(EGRESS_ORIGIN, "ACK", "egress", 31, b"late")]
    for more, first in (([], 40), (third, 40), ([*third, *answered], 20)):
        found = _first_crossings(spark.createDataFrame(rows + more, columns), 30, None)
        assert found[EGRESS_ORIGIN] == {S.grant: FirstCrossing(first, first)}
    tally("leaves of a third region", 2)
