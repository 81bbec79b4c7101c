"""`python -m benchmarks shards` and `sessions`: a small run finds all that it wrote and made, and what is missing ends it with exit code 6."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from benchmarks import light, sessions, shards
from benchmarks.__main__ import app
from benchmarks.sessions import SessionsPlan, SessionsReport
from benchmarks.shards import ShardsPlan, ShardsReport, sample_of
from cli.exits import EXIT_UNRECONCILED


def test_a_small_run_finds_after_a_restart_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light, "QUICK_SHARDS", ShardsPlan(shards=8, sample=2, idle_s=0.1))
    monkeypatch.setattr(shards, "SETTLE_S", 0.0)
    said = CliRunner().invoke(app, ["shards", "--quick", "--json"])
    assert said.exit_code == 0, said.output
    report = msgspec.json.decode(said.stdout, type=ShardsReport)
    assert report.is_whole and not report.refused
    assert [part.shards for part in report.made] == [2, 4, 6, 8]
    assert (report.checked, report.lost, report.restarted_shards) == (6, 0, 8)
    assert report.files and report.restart.start_s > 0 and report.killed.start_s > 0
    light.print_shards(report)

    short = msgspec.structs.replace(report, restarted_shards=7)
    monkeypatch.setattr(light, "measure_shards", lambda *_: short)
    said = CliRunner().invoke(app, ["shards", "--quick", "--json"])
    assert said.exit_code == EXIT_UNRECONCILED
    assert "7 of 8 shards came back" in said.output


def test_a_small_run_of_sessions_has_all_of_them_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light, "QUICK_SESSIONS", SessionsPlan(sessions=5, sample=2, idle_s=0.1))
    monkeypatch.setattr(sessions, "SETTLE_S", 0.0)
    said = CliRunner().invoke(app, ["sessions", "--quick", "--json"])
    assert said.exit_code == 0, said.output
    report = msgspec.json.decode(said.stdout, type=SessionsReport)
    assert (report.opened, report.refused, report.asked, report.unanswered) == (5, "", 2, 0)
    assert report.bytes_per_session > 0
    light.print_sessions(report)

    silent = msgspec.structs.replace(report, unanswered=1)
    monkeypatch.setattr(light, "measure_sessions", lambda *_: silent)
    said = CliRunner().invoke(app, ["sessions", "--quick", "--json"])
    assert said.exit_code == EXIT_UNRECONCILED
    assert "1 of 2 sessions were not answered" in said.output


def test_a_sample_is_spread_over_all_streams() -> None:
    assert sample_of(100, 4) == [0, 25, 50, 75]
    assert sample_of(3, 10) == [0, 1, 2]
