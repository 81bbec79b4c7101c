"""`python -m benchmarks fairness` and `slow-consumer`: small runs reconcile, memory stays within its limits, and what is wrong is said."""

from __future__ import annotations

import json

import msgspec
import pytest
from long_runs import only_long
from typer.testing import CliRunner

from benchmarks import tenants
from benchmarks.__main__ import app
from benchmarks.fairness import FairnessPlan, FairnessReport
from benchmarks.slow_consumer import MemoryReport, SlowPlan, SlowReport
from cli.benchmark.accounting import Account
from felix.errors import RequestError


@only_long
def test_a_small_run_of_fairness_reconciles(monkeypatch: pytest.MonkeyPatch) -> None:
    small = FairnessPlan(seconds=0.3, repeats=1, noisy_records_max=20_000, quota_bytes=16 << 20)
    monkeypatch.setattr(tenants, "QUICK_FAIRNESS", small)
    said = CliRunner().invoke(app, ["fairness", "--quick", "--json", "--quota", "16MiB/s"])
    assert said.exit_code == 0, said.output
    report = msgspec.json.decode(said.stdout, type=FairnessReport)
    assert report.is_lossless
    alone, elsewhere, unbound, bound = report.results
    assert (alone.noise.median, alone.p99_ratio.values, elsewhere.p99_of_control.values) == (0, [1.0], [1.0])
    assert elsewhere.noise.median > 0 < unbound.noise.median and bound.noise.median > 0
    assert all(result.latency.samples for result in report.results)
    tenants.print_fairness(report)


def test_a_small_run_of_a_slow_consumer_reconciles_within_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    small = SlowPlan(seconds=0.3, repeats=1, backlog_bytes=16 << 20)
    monkeypatch.setattr(tenants, "QUICK_SLOW", small)
    monkeypatch.setattr(tenants, "BACKLOG_BYTES_MIN", 1)
    said = CliRunner().invoke(app, ["slow-consumer", "--quick", "--json"])
    assert said.exit_code == 0, said.output
    report = msgspec.json.decode(said.stdout, type=SlowReport)
    assert report.is_lossless
    assert report.memory.is_within
    assert report.slow.received == report.reader.received >= (16 << 20) // 1024
    assert report.memory.budgets["ring"][0] > 0
    tenants.print_slow(report)


def test_memory_beyond_a_limit_and_lost_records_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    within = MemoryReport(resident_before=5, resident_most=9, growth_allowed=4, budgets={"ring": (3, 3)})
    assert within.is_within
    assert not msgspec.structs.replace(within, resident_most=10).is_within
    assert not msgspec.structs.replace(within, budgets={"ring": (4, 3)}).is_within
    with pytest.raises(tenants.typer.Exit) as caught:
        tenants.settle([("the noise", Account(published=5, received=4, lost=1))])
    assert caught.value.exit_code == tenants.EXIT_UNRECONCILED
    assert "the noise: not lossless" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["fairness", "--engine", "carrier-pigeon"],
        ["fairness", "--quota", "much"],
        ["slow-consumer", "--backlog", "1MiB"],
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str]) -> None:
    said = CliRunner().invoke(app, words)
    assert isinstance(said.exception, RequestError)


def test_json_is_what_the_struct_says() -> None:
    assert json.loads(msgspec.json.encode(SlowPlan()))["per_second"] == 200.0
