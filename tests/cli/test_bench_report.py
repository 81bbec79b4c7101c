"""`felix bench report`: logs that verify, a report that accounts for every record, and no rate where one is missing."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from long_runs import only_long
from shared_spark import shared_session
from slow_runs import only_slow
from typer.testing import CliRunner

from audit.leaf import Kind, decode_leaf
from audit.tile import read_entries
from audit.tile_disk import Folder
from audit.verify import verify_log
from cli import bench_report
from cli.benchmark.audit_logs import LogBooks, LogPlan, make_logs
from cli.benchmark.measurement import machine
from cli.benchmark.reporting import (
    ReportPlan,
    ReportSize,
    ReportTimes,
    _measure,
    measure_reports,
    unaccounted,
)
from cli.benchmark.tree_memory import tree_bytes
from cli.main import app

PLAN = LogPlan(records=9_000, batch_records=2_500, streams=2, shards=2)


def test_logs_that_are_made_verify_and_hold_what_the_books_say(tmp_path: Path) -> None:
    made = make_logs(tmp_path, PLAN)
    books = made.books
    assert books.crossed + books.withheld == PLAN.records and books.withheld > 0
    egress, ingress = (
        verify_log(Folder(path), made.trust, cosignatures_min=1) for path in (made.egress, made.ingress)
    )
    for report in (egress, ingress):
        assert report.ok, report.findings[:3]
    assert (egress.records["INTENT"], egress.records["WITHHELD"]) == (books.crossed, books.withheld)
    assert egress.records["ACK"] == ingress.records["ACK"] == books.crossed
    assert (egress.size, ingress.size) == (books.egress_leaves, books.ingress_leaves)


def test_both_sides_cut_long_batches_into_other_leaves(tmp_path: Path) -> None:
    made = make_logs(tmp_path, PLAN)
    cuts: list[list[int]] = []
    for path, kind in ((made.egress, Kind.INTENT), (made.ingress, Kind.ACK)):
        size = made.books.egress_leaves if kind is Kind.INTENT else made.books.ingress_leaves
        headers = [decode_leaf(data).header for _, data in read_entries(Folder(path), 0, size, size)]
        cuts.append([header.records for header in headers if header.kind is kind and header.parts > 1])
    assert sum(cuts[0]) == sum(cuts[1]) and cuts[0] != cuts[1]


def result_of(books: LogBooks, **totals: int) -> Any:
    said = {
        "records": books.crossed, "withheld": books.withheld, "acknowledged": books.crossed, "delivered": books.crossed,
        "record_bytes": books.bytes, "differences": 0, "open": 0, "breaches": 0,
    } | totals  # fmt: skip
    rows = [{"status": "reconciled", "covered": books.crossed + books.withheld}]
    report = SimpleNamespace(
        totals=SimpleNamespace(**said), reconciliation=SimpleNamespace(records=lambda: rows)
    )
    return SimpleNamespace(
        report=report, record_entries=2 * books.crossed + books.withheld, leaves=books.egress_leaves + books.ingress_leaves
    )  # fmt: skip


def test_a_record_that_is_not_accounted_for_is_said() -> None:
    books = LogBooks(crossed=10, withheld=1, bytes=100, batches=1, egress_leaves=3, ingress_leaves=2)
    assert unaccounted(result_of(books), books) == ()
    for name in (
        "records",
        "withheld",
        "acknowledged",
        "delivered",
        "record_bytes",
        "differences",
        "open",
        "breaches",
    ):
        assert len(unaccounted(result_of(books, **{name: 9}), books)) == 1, name


def test_no_rate_is_printed_where_one_record_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    size = ReportSize(
        records=11, books=LogBooks(crossed=10, withheld=1), made_s=1, seconds=2, cpu_seconds=3, process_bytes_max=1 << 20
    )  # fmt: skip
    times = ReportTimes(machine=machine(), plan=ReportPlan(sizes=(11,)), sizes=[size])
    monkeypatch.setattr(bench_report, "measure_reports", lambda *_: times)
    said = CliRunner().invoke(app, ["bench", "report"])
    assert said.exit_code == 0
    lost = msgspec.structs.replace(size, problems=("records crossed: 9 in the report, 10 made",))
    times = msgspec.structs.replace(times, sizes=[size, lost])
    monkeypatch.setattr(bench_report, "measure_reports", lambda *_: times)
    for more in ([], ["--json"]):
        said = CliRunner().invoke(app, ["bench", "report", *more])
        assert said.exit_code == 6
        assert said.stdout == "", "neither rate nor table"


def test_memory_of_a_process_is_that_of_its_descendants_too(tmp_path: Path) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    for number, parent, pages in ((1, 0, 1000), (20, 1, 10), (21, 20, 20), (22, 21, 30), (23, 1, 500)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(f"{number} (a (worker) 1) S {parent} 0 0")
        (tmp_path / str(number) / "statm").write_text(f"9999 {pages} 3 4")
    (tmp_path / "24").mkdir()  # ended while it was looked at
    assert tree_bytes(20, tmp_path) == 60 * page
    assert tree_bytes(99, tmp_path) == 0


@only_slow
@pytest.mark.spark
def test_a_report_over_made_logs_accounts_for_every_record(tmp_path: Path, spark: Any) -> None:
    """In this process, where Spark has started: what is measured is not the report's alone, what is accounted for is."""
    ours, theirs = multiprocessing.Pipe()
    plan = ReportPlan(sizes=(5_000,), batch_records=2_500)
    with shared_session(spark):
        _measure(theirs, plan, 5_000, str(tmp_path / "home"))
    size = ours.recv()
    while isinstance(size, str):
        size = ours.recv()
    assert isinstance(size, ReportSize)
    assert size.problems == () and size.records == 5_000 and size.cpu_seconds > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.spark
@only_long
def test_each_size_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    times = measure_reports(ReportPlan(sizes=(5_000,), batch_records=2_500), tmp_path)
    (size,) = times.sizes
    assert size.problems == () and size.records == 5_000 and size.cpu_seconds > 0
    assert size.tree_bytes_max >= size.process_bytes_max // 2
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
