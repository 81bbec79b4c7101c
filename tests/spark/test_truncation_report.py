"""The report over two logs of a stream that goes on under a derived incarnation: its source was put back, or what stayed was sent again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossing_logs import DAY_MS, DEPARTURES, INCARNATION, SIGNED, START_MS, World, trust, write_world
from signed_grants import paper_leaf, signed_grant, signing_key
from slow_runs import only_slow

from audit.leaf import GapKind, Header, Kind, Leaf, Side
from audit.spark.report import run_report
from audit.tile_disk import Folder
from audit.verify import verify_log
from policy.grant import Standing, StandingAction, sign_standing
from policy.truncation import Accepted, Truncation


@dataclass
class CutWorld(World):
    incarnation: bytes = INCARNATION

    def granted(self, stream: str, shard: int) -> dict[str, Any]:
        return super().granted(stream, shard) | {"incarnation": self.incarnation}


def test_a_truncation_is_shown_and_both_logs_reconcile(spark: Any, tmp_path: Path) -> None:
    world = CutWorld()
    world.grant(DEPARTURES, START_MS)
    for number in range(2):
        world.batch(DEPARTURES, 0, START_MS + 1_000 * number, 10, withheld=0.0)
    # Offsets 10 to 19 had crossed; the source was put back to 10, and wrote others.
    cut = world.granted(DEPARTURES, 0) | {"first_offset": 10, "last_offset": 19}
    header = world.header(
        Kind.GAP,
        Side.EGRESS,
        START_MS + 3_000,
        DEPARTURES,
        gap=GapKind.TRUNCATION,
        sentence="Cut back.",
        **cut,
    )
    world.egress.append([Leaf(header)])
    world.offsets[DEPARTURES, 0], world.incarnation = 10, b"derived" + bytes(9)
    for number in range(3):
        world.batch(DEPARTURES, 0, START_MS + 4_000 + 1_000 * number, 10, withheld=0.0)
    result = run_report(write_world(tmp_path, world), tmp_path / "out", trust=trust(), session=spark)
    assert result.report.findings.records() == []
    rows = [
        (row["incarnation"], row["crossed"], row["delivered"], row["gap"], row["unaccounted"])
        for row in result.report.reconciliation.records()
    ]
    assert sorted(rows) == sorted(
        [(INCARNATION.hex(), 20, 20, 0, 0), ((b"derived" + bytes(9)).hex(), 30, 30, 0, 0)]
    )
    assert "gap-truncation" in {row["exception"] for row in result.report.exceptions.records()}


RESENT = Accepted(
    Truncation(stream=DEPARTURES, shard=0, incarnation=INCARNATION.hex(), epoch=0, offset=0),
    "us-east",
    START_MS + 1_500,
    is_resend=True,
)
DERIVED = RESENT.incarnation


@dataclass
class ResentWorld(CutWorld):
    def header(self, kind: Kind, side: Side, time_ms: int, stream: str, **more: Any) -> Header:
        if kind is Kind.WITHHELD and self.incarnation == DERIVED:
            more |= {"reason": "crossed-before", "code": 0}
        return super().header(kind, side, time_ms, stream, **more)

    def resend(self) -> None:
        """The source's standing, in both logs; from here on the shard begins again."""
        signed = SIGNED[DEPARTURES]
        body = Standing(
            grant=signed.grant, action=StandingAction.RESEND, region="us-east", sequence=1, at=RESENT.at, by="alice",
            truncation=RESENT.truncation,
        )  # fmt: skip
        document = sign_standing(body, signing_key("us-east"))
        for side, appends in ((Side.EGRESS, self.egress), (Side.INGRESS, self.ingress)):
            appends.append([paper_leaf(document, signed, side, RESENT.at)])
        self.offsets[DEPARTURES, 0], self.incarnation = 0, DERIVED


@only_slow
def test_a_resend_is_shown_and_both_logs_reconcile(spark: Any, tmp_path: Path) -> None:
    world = ResentWorld()
    world.grant(DEPARTURES, START_MS)
    world.batch(DEPARTURES, 0, START_MS, 10, withheld=1.0)
    world.batch(DEPARTURES, 0, START_MS + 1_000, 10, withheld=0.0)
    world.resend()
    world.batch(DEPARTURES, 0, START_MS + 2_000, 10, withheld=0.0)
    world.batch(DEPARTURES, 0, START_MS + 3_000, 10, withheld=1.0)
    result = run_report(write_world(tmp_path, world), tmp_path / "out", trust=trust(), session=spark)
    report = result.report
    assert report.findings.records() == []
    rows = {
        row["incarnation"]: (row["crossed"], row["delivered"], row["withheld"], row["passed_by"], row["unaccounted"])
        for row in report.reconciliation.records()
    }  # fmt: skip
    assert rows == {INCARNATION.hex(): (10, 10, 10, 0, 0), DERIVED.hex(): (10, 10, 0, 10, 0)}
    (transfer,) = report.register.records()
    assert (transfer["records"], transfer["withheld"]) == (20, 10)
    assert "passed by in a resend" in (tmp_path / "out" / "report.html").read_text()


@only_slow
def test_what_a_resend_passes_by_must_have_arrived_before(spark: Any, tmp_path: Path) -> None:
    """A rogue agent, or one that believed a rogue destination, says of 10 records that stayed that they had crossed."""
    world = ResentWorld()
    world.grant(DEPARTURES, START_MS)
    world.batch(DEPARTURES, 0, START_MS, 10, withheld=1.0)
    world.batch(DEPARTURES, 0, START_MS + 1_000, 10, withheld=0.0)
    world.resend()
    world.batch(DEPARTURES, 0, START_MS + 2_000, 15, withheld=1.0)
    result = run_report(write_world(tmp_path, world), tmp_path / "out", trust=trust(), session=spark)
    (found,) = result.report.findings.records()
    assert (found["status"], found["finding"]) == ("differs", "passed-by-without-arrival")
    assert (found["first_offset"], found["last_offset"], found["records"]) == (0, 9, 10)
    assert found["incarnation"] == DERIVED.hex()
    statuses = {row["incarnation"]: row["status"] for row in result.report.reconciliation.records()}
    assert statuses[DERIVED.hex()] == "differs"


def test_nothing_is_passed_by_where_no_resend_was_asked_for(tmp_path: Path) -> None:
    world = ResentWorld()
    world.grant(DEPARTURES, START_MS)
    world.batch(DEPARTURES, 0, START_MS, 10, withheld=0.0)
    world.offsets[DEPARTURES, 0], world.incarnation = 0, DERIVED
    world.batch(DEPARTURES, 0, START_MS + 2_000, 10, withheld=1.0)
    egress, _ = write_world(tmp_path, world)
    (found,) = verify_log(Folder(egress), trust()).findings
    assert found.step == 7 and "none was asked for" in found.sentence


@only_slow
def test_what_another_bridge_is_said_to_have_brought_must_have_arrived(spark: Any, tmp_path: Path) -> None:
    """A destination that says it is further than it is keeps records out that nobody withheld, and its own log shows it."""
    world = CutWorld()
    world.grant(DEPARTURES, START_MS)
    for number in range(2):
        world.batch(DEPARTURES, 0, START_MS + 1_000 * number, 10, withheld=0.0)
    # Of the first bridge's log only the grant is here: the second one begins where the destination says, five records too far.
    del world.egress[1:]
    world.offsets[DEPARTURES, 0] += 5
    gap = world.granted(DEPARTURES, 0) | {"first_offset": 0, "last_offset": 24}
    header = world.header(
        Kind.GAP, Side.EGRESS, START_MS + 3_000, DEPARTURES, gap=GapKind.ELSEWHERE, sentence="It has them.", **gap
    )  # fmt: skip
    world.egress.append([Leaf(header)])
    world.batch(DEPARTURES, 0, START_MS + 4_000, 10, withheld=0.0)
    result = run_report(write_world(tmp_path, world), tmp_path / "out", trust=trust(), session=spark)
    (found,) = (
        row for row in result.report.findings.records() if row["finding"] == "elsewhere-without-arrival"
    )
    assert (found["first_offset"], found["last_offset"], found["records"]) == (20, 24, 5)
    assert found["status"] == "differs"


@only_slow
def test_an_empty_envelope_of_its_own_is_not_what_another_bridge_brought(spark: Any, tmp_path: Path) -> None:
    """There is one bridge. Its agent says that another one brought 10 records, and moves the destination over them itself."""
    world = CutWorld()
    world.grant(DEPARTURES, START_MS)
    world.gap(DEPARTURES, 0, 10, START_MS + 1_000)
    gap, intent = world.egress[-2]
    fields = {name: getattr(gap.header, name) for name in gap.header.__struct_fields__}
    world.egress[-2] = [Leaf(Header(**(fields | {"gap": GapKind.ELSEWHERE}))), intent]
    world.batch(DEPARTURES, 0, START_MS + 2_000, 10, withheld=0.0)
    result = run_report(write_world(tmp_path, world), tmp_path / "out", trust=trust(), session=spark)
    (found,) = result.report.findings.records()
    assert (found["status"], found["finding"]) == ("differs", "elsewhere-without-arrival")
    assert (found["first_offset"], found["last_offset"], found["records"]) == (0, 9, 10)


@only_slow
def test_nor_is_one_under_another_grant_of_its_own(spark: Any, tmp_path: Path) -> None:
    """The agent has two grants, leaves 10 records out under the one, and has the destination pass over them under the other. Both logs verify, and agree."""
    other = signed_grant(stream=DEPARTURES, purpose="marketing", expires=START_MS + 90 * DAY_MS)
    world = CutWorld()
    world.grant(DEPARTURES, START_MS)
    world.grant(DEPARTURES, START_MS, other)
    world.gap(DEPARTURES, 0, 10, START_MS + 1_000)
    gap, intent = world.egress[-2]
    fields = {name: getattr(gap.header, name) for name in gap.header.__struct_fields__}
    said = {"gap": GapKind.ELSEWHERE, "grant_id": other.grant, "terms_hash": other.terms.hash()}
    world.egress[-2] = [Leaf(Header(**(fields | said))), intent]
    world.batch(DEPARTURES, 0, START_MS + 2_000, 10, withheld=0.0)
    logs = write_world(tmp_path, world)
    for log in logs:
        report = verify_log(Folder(log), trust())
        assert report.ok, report.findings
    result = run_report(logs, tmp_path / "out", trust=trust(), session=spark)
    (found,) = result.report.findings.records()
    assert (found["status"], found["finding"]) == ("differs", "elsewhere-without-arrival")
    assert (found["first_offset"], found["last_offset"], found["records"]) == (0, 9, 10)


def test_a_bridge_that_says_of_its_own_ranges_that_another_one_brought_them_is_found(
    spark: Any, tmp_path: Path
) -> None:
    """Under the grant that it has: what it announced had arrived by itself (shard 0), or by nobody (shard 1)."""
    world = CutWorld()
    world.grant(DEPARTURES, START_MS)
    for shard in range(2):
        world.batch(DEPARTURES, shard, START_MS + 1_000, 10, withheld=0.0)
        world.batch(DEPARTURES, shard, START_MS + 2_000, 10, withheld=0.0, receipt=False, arrives=not shard)
        gap = world.granted(DEPARTURES, shard) | {"first_offset": 10, "last_offset": 19}
        header = world.header(
            Kind.GAP, Side.EGRESS, START_MS + 3_000, DEPARTURES, gap=GapKind.ELSEWHERE, sentence="Another one.", **gap
        )  # fmt: skip
        world.egress.append([Leaf(header)])
        world.batch(DEPARTURES, shard, START_MS + 4_000, 10, withheld=0.0)
    logs = write_world(tmp_path, world)
    for log in logs:
        report = verify_log(Folder(log), trust())
        assert report.ok, report.findings
    result = run_report(logs, tmp_path / "out", trust=trust(), session=spark)
    found = {
        (row["shard"], row["finding"], row["status"], row["first_offset"], row["last_offset"])
        for row in result.report.findings.records()
    }
    assert found == {
        # It arrived, so what was announced counts, and the gap beside it.
        (0, "announced-again-though-answered", "differs", 10, 19),
        (0, "intent-without-receipt", "differs", 10, 19),
        (0, "accounted-twice", "differs", 10, 19),
        (1, "announced-not-answered", "open", 10, 19),
        (1, "elsewhere-without-arrival", "differs", 10, 19),
    }
