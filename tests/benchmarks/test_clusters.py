"""`python -m benchmarks cluster`, `failover` and `new-copy`: small runs settle all that they wrote, and what is missing ends them with exit code 6."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from etcd_process import etcd_binary
from long_runs import only_long
from typer.testing import CliRunner

from benchmarks import clusters
from benchmarks.__main__ import app
from benchmarks.copies import (
    FIRST,
    THREE_COPIES,
    TWO_COPIES,
    CopiesPlan,
    CopiesReport,
    Round,
    report_of,
)
from benchmarks.dead_leader import RECORDS_BEFORE, DeadLeaderReport, Taken
from benchmarks.failover import FailoverPlan, FailoverReport, Pauses, longest_gap_ns
from benchmarks.new_copy import PHASES, NewCopyPlan, NewCopyReport
from benchmarks.new_copy import Round as NewCopyRound
from benchmarks.new_copy import report_of as new_copy_report_of
from benchmarks.process_use import children_of
from cli.benchmark.accounting import Account
from cli.benchmark.figures import Latency, Spread
from cli.benchmark.measurement import machine
from cli.exits import EXIT_UNRECONCILED
from felix.errors import RequestError

needs_etcd = pytest.mark.skipif(etcd_binary() is None, reason="no etcd")


@only_long
@needs_etcd
@pytest.mark.etcd
def test_a_small_run_of_a_cluster_reconciles(monkeypatch: pytest.MonkeyPatch) -> None:
    small = CopiesPlan(
        seconds=0.3, records_max=2_000, lone=5, repeats=1, cases=(FIRST, TWO_COPIES, THREE_COPIES)
    )
    monkeypatch.setattr(clusters, "QUICK_COPIES", small)
    said = CliRunner().invoke(app, ["cluster", "--quick", "--json"])
    assert said.exit_code == 0, said.output
    report = msgspec.json.decode(said.stdout, type=CopiesReport)
    assert report.is_lossless
    assert [result.case for result in report.results] == [FIRST, TWO_COPIES, THREE_COPIES]
    assert all(sum(result.led) == 6 and result.rate.median > 0 for result in report.results)
    clusters.print_copies(report)


@only_long
@needs_etcd
@pytest.mark.etcd
@pytest.mark.fault
def test_a_small_run_of_a_failover_finds_every_acknowledged_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "QUICK_FAILOVER", FailoverPlan(kills=1, lease_ms=1_000))
    said = CliRunner().invoke(app, ["failover", "--quick", "--json"])
    assert said.exit_code == 0, said.output
    report = msgspec.json.decode(said.stdout, type=FailoverReport)
    assert report.account.is_lossless and report.account.received > 0
    assert [(each.signal, len(each.seconds.values)) for each in report.pauses] == [
        ("SIGKILL", 1),
        ("SIGTERM", 1),
    ]
    clusters.print_failover(report)


@only_long
@needs_etcd
@pytest.mark.etcd
@pytest.mark.fault
def test_a_small_run_of_a_dead_leader_finds_every_acknowledged_record() -> None:
    said = CliRunner().invoke(app, ["failover", "--shards", "12", "--kills", "1", "--json"])
    assert said.exit_code == 0, said.output
    report = msgspec.json.decode(said.stdout, type=DeadLeaderReport)
    assert report.account.is_lossless and report.account.received >= 12 * (RECORDS_BEFORE + 2)
    assert report.taken.keys() == set(Taken.__struct_fields__)
    first, last = report.taken["written_first"].values, report.taken["written_last"].values
    assert len(first) == len(last) == 1 and 0 < first[0] <= last[0]
    clusters.print_dead_leader(report)


@only_long
@needs_etcd
@pytest.mark.etcd
def test_a_small_run_of_a_new_copy_finds_every_acknowledged_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "QUICK_NEW_COPY", NewCopyPlan(gib=0.005, seconds=0.5))
    said = CliRunner().invoke(app, ["new-copy", "--quick", "--copy-rate", "2MiB", "--json"])
    assert said.exit_code == 0, said.output
    report = msgspec.json.decode(said.stdout, type=NewCopyReport)
    assert report.account.is_lossless and report.account.received > 80 * 16
    assert [each.phase for each in report.phases] == list(PHASES)
    assert report.copy_s.median > 0
    clusters.print_new_copy(report)


def taken(cpu_us: float, *, lost: int = 0) -> Round:
    latency = Latency.of([1_000_000])
    account = Account(published=10, received=10 - lost, lost=lost)
    return Round(
        rate=1e6 / cpu_us, broker_cpu_us=cpu_us, etcd_cpu_us=0.1, lone=latency, led=[6], account=account
    )


def test_the_third_copy_costs_what_three_take_beyond_two_in_the_same_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounds = {
        FIRST: [taken(2), taken(4)],
        TWO_COPIES: [taken(6), taken(10)],
        THREE_COPIES: [taken(8), taken(15)],
    }
    report = report_of(CopiesPlan(repeats=2, cases=tuple(rounds)), rounds, [], seconds=1.0)
    assert report.third_copy_cpu_us is not None and report.third_copy_cpu_us.values == [2, 5]
    assert [result.cpu_ratio.values for result in report.results] == [[1, 1], [3, 2.5], [4, 3.75]]
    assert report.results[1].rate_ratio.values == pytest.approx([1 / 3, 0.4])
    clusters.print_copies(report)
    assert "the third copy: 3.50 (2.00 – 5.00) µs" in capsys.readouterr().out
    alone = report_of(CopiesPlan(repeats=1, cases=(FIRST,)), {FIRST: [taken(2)]}, [], seconds=1.0)
    assert alone.third_copy_cpu_us is None


def test_no_figure_is_printed_where_a_record_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    short = report_of(CopiesPlan(repeats=1, cases=(FIRST,)), {FIRST: [taken(2, lost=1)]}, [], seconds=1.0)
    monkeypatch.setattr(clusters, "measure_copies", lambda *_: short)
    said = CliRunner().invoke(app, ["cluster", "--quick"])
    assert said.exit_code == EXIT_UNRECONCILED
    assert "1 broker, 1 copy: not lossless" in said.output and "CPU" not in said.output

    doubled = FailoverReport(
        kind="failover",
        machine=machine(),
        plan=FailoverPlan(),
        seconds=1.0,
        lease_ms=5_000,
        undisturbed_s=0.1,
        pauses=[Pauses(signal="SIGKILL", seconds=Spread.of([5.0]))],
        account=Account(published=1, received=1, duplicated=1),
    )
    monkeypatch.setattr(clusters, "measure_failover", lambda *_: doubled)
    said = CliRunner().invoke(app, ["failover", "--quick", "--json"])
    assert said.exit_code == EXIT_UNRECONCILED
    assert "duplicated 1" in said.output and "5.0" not in said.output


def copied(before_ms: int, during_ms: int, *, lost: int = 0) -> NewCopyRound:
    found = [Latency.of([ms * 1_000_000]) for ms in (before_ms, during_ms, during_ms)]
    return NewCopyRound(
        latencies={phase: latency for phase, latency in zip(PHASES, found, strict=True) if latency},
        copied_bytes=10 << 20,
        copy_s=2.0,
        account=Account(published=10, received=10 - lost, lost=lost),
    )


def test_a_new_copy_is_held_against_what_was_before_it_in_the_same_round(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = new_copy_report_of(NewCopyPlan(repeats=2), [copied(4, 6), copied(10, 10)], seconds=1.0)
    assert [each.p99_ratio.values for each in report.phases] == [[1, 1], [1.5, 1], [1.5, 1]]
    clusters.print_new_copy(report)
    assert "in sync after 2.00 (2.00 – 2.00) s: 5.00 (5.00 – 5.00) MiB a second" in capsys.readouterr().out

    short = new_copy_report_of(NewCopyPlan(), [copied(4, 6, lost=1)], seconds=1.0)
    monkeypatch.setattr(clusters, "measure_new_copy", lambda *_: short)
    said = CliRunner().invoke(app, ["new-copy", "--quick"])
    assert said.exit_code == EXIT_UNRECONCILED
    assert "lost 1" in said.output and "MiB" not in said.output


@pytest.mark.parametrize(
    ("times", "since", "longest"),
    [
        ([], 0, 0),
        ([5], 9, 0),
        ([1, 100, 110, 170, 180], 105, 60),
        ([1, 100, 400, 410], 105, 300),
        ([100, 400], 400, 0),
        ([10, 30], 0, 20),
    ],
)
def test_a_pause_begins_with_the_last_acknowledgement_before_the_signal(
    times: list[int], since: int, longest: int
) -> None:
    assert longest_gap_ns(times, since) == longest


def test_a_lease_that_is_no_time_is_refused() -> None:
    said = CliRunner().invoke(app, ["failover", "--lease", "soon"])
    assert isinstance(said.exception, RequestError)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_children_of_a_process_are_found() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in children_of(os.getpid())
        assert children_of(child.pid) == []
    finally:
        child.communicate(b"\n")
    assert child.pid not in children_of(os.getpid())
