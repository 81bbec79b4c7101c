"""A report whose tables have more rows than it lists: whoever makes rows up by the thousand hides nobody's, and no total.

The limit is scaled down from 100,000 rows; the code is the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import audit_log
import pytest
from attacks.conftest import Tally
from crossing_logs import COMMITMENT_KEY, DEPARTURES, START_MS, World, write_log, write_world
from slow_runs import only_slow

import audit.spark.report as reports
from audit.leaf import Committer, Header, Kind, Leaf, Side, intent_leaves
from audit.spark.report import EXIT_CLEAN, EXIT_ONE_SIDE, run_report
from audit.trust import Trust
from felix.batch import Record

pytestmark = pytest.mark.spark

THIRD = "ap-south.acme/bridge/aaa"
ROWS = 10


def made_up(streams: int) -> list[Leaf]:
    """Leaves that a third region's bridge may write into its own log at will: they sort before everybody's."""
    leaves: list[Leaf] = []
    for number in range(streams):
        name = f"acme/x/s{number}"
        header = Header(
            kind=Kind.WITHHELD,
            side=Side.EGRESS,
            time_ms=START_MS,
            source_region="ap-south",
            destination_region="eu-west",
            bridge="spiffe://ap-south.acme/bridge/aaa",
            stream=name,
            destination_stream=name,
            incarnation=b"z" * 16,
            first_offset=0,
            last_offset=0,
            grant_id="g-x",
            reason="filtered",
        )
        committer = Committer(COMMITMENT_KEY, name, b"z" * 16, 0)
        leaves += intent_leaves(header, [Record(0, START_MS, b"", {}, b"x")], committer)
    return leaves


@only_slow
def test_rows_that_nobody_agreed_on_push_no_transfer_out_of_a_report(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setitem(audit_log.SEEDS, THIRD, 23)
    monkeypatch.setitem(audit_log.SEEDS, "ap-south.acme/audit", 21)
    monkeypatch.setitem(audit_log.WITNESS_SEEDS, "ap-south.acme/witness", 24)
    world = World()
    world.grant(DEPARTURES, START_MS - 1000)
    world.batch(DEPARTURES, 0, START_MS + 1000, 40, withheld=0.0)
    logs = write_world(tmp_path, world)
    third = tmp_path / "third"
    write_log(third, THIRD, [made_up(3 * ROWS)], cosign=True)
    # Not from the cache: the third region has keys in this test alone.
    known = Trust.of(audit_log.region_bundle(name) for name in ("us-east", "eu-west", "ap-south"))

    monkeypatch.setattr(reports, "ROWS_MAX", ROWS)
    result = run_report([logs[0], third], tmp_path / "report", trust=known, session=spark)
    report = result.report
    assert result.exit_code not in (EXIT_CLEAN, EXIT_ONE_SIDE)
    assert (report.totals.records, report.totals.acknowledged) == (40, 40)
    assert report.totals.withheld in (0, 3 * ROWS), "all of them, where they count at all"
    for table in ("register", "reconciliation"):
        rows = getattr(report, table).records()
        assert len(rows) == ROWS and report.left_off[table] > ROWS
        assert any(row["source_region"] == "us-east" for row in rows), (
            f"the {table} lists what was agreed on first"
        )
    assert "are not listed, here or in the files" in result.page.read_text()
    assert any("us-east to eu-west" in each for each in report.missing.counterparts)
    tally("rows beyond the limit of a report", sum(report.left_off.values()))
