"""`python -m benchmarks fanout`, `queue` and `cache`: each system reconciles in a tiny run, what is not installed is left out with a word, and
no rate is printed for what was lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import msgspec
import pytest
from long_runs import count
from typer.testing import CliRunner

from benchmarks import beside, peers
from benchmarks.__main__ import app
from benchmarks.caching import CacheAccount, CachePlan, CacheReport, measure_cache
from benchmarks.fanout import FanoutPlan, FanoutReport, measure_fanout
from benchmarks.queueing import QueueAccount, QueuePlan, QueueReport, measure_queue
from benchmarks.systems import CACHES, QUEUES, SYSTEMS
from cli.benchmark.accounting import Account
from felix.errors import RequestError

REPEATS = count(1, 2)
TINY = FanoutPlan(
    subscribers=(1, 3),
    payload_bytes=(64,),
    chunk=8,
    repeats=REPEATS,
    load_s=2.0,
    paced_s=0.1,
    records_max=400,
)


@pytest.fixture(scope="module")
def report() -> FanoutReport:
    return measure_fanout(TINY)


def test_every_subscriber_of_every_system_has_everything(report: FanoutReport) -> None:
    lossy = [
        (str(result.case), result.account) for result in report.results if not result.account.is_lossless
    ]
    assert not lossy
    measured = {result.case.system for result in report.results}
    assert measured == installed(SYSTEMS)
    for result in report.results:
        assert result.account.published == result.account.received
        assert result.account.received >= TINY.repeats * result.case.subscribers * 400
        assert result.delivered_per_second.median > 0
        assert result.paced is not None
        assert set(result.felix) == {"felix-fsync", "felix-ephemeral"} - {result.case.system}


def installed(systems: Iterable[str]) -> set[str]:
    return {
        name for name in systems if not (server := SYSTEMS[name].server) or not peers.reason_missing(server)
    }


def test_what_is_not_installed_is_left_out_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.shutil, "which", lambda name: None)
    assert "apt-get install nats-server" in peers.reason_missing(peers.NATS)
    monkeypatch.setattr(peers.shutil, "which", lambda name: name)
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert re.search(r"pip install 'nats-py\S+' 'redis\[hiredis\]", peers.reason_missing(peers.REDIS))


def test_felix_alone_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.shutil, "which", lambda name: None)
    tiny = msgspec.structs.replace(TINY, subscribers=(1,), repeats=1)
    monkeypatch.setattr(beside, "QUICK_FANOUT", tiny)
    answer = CliRunner().invoke(app, ["fanout", "--quick", "--json", "--size", "64"])
    assert answer.exit_code == 0
    assert "redis is left out: redis-server is not installed (apt-get install redis-server)" in answer.stderr
    document = json.loads(answer.stdout)
    assert [result["case"]["system"] for result in document["results"]] == ["felix-fsync", "felix-ephemeral"]


def test_people_see_a_table(report: FanoutReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "measure_fanout", lambda *_: report)
    answer = CliRunner().invoke(app, ["fanout", "--quick"], env={"COLUMNS": "200"})
    assert answer.exit_code == 0
    assert "in order and unchanged" in answer.stdout


def test_no_rate_is_printed_for_what_was_lost(report: FanoutReport, monkeypatch: pytest.MonkeyPatch) -> None:
    lossy = msgspec.structs.replace(report.results[0], account=Account(published=9, received=8, lost=1))
    found = msgspec.structs.replace(report, results=[lossy, *report.results[1:]])
    monkeypatch.setattr(beside, "measure_fanout", lambda *_: found)
    answer = CliRunner().invoke(app, ["fanout"])
    assert answer.exit_code == 6
    assert "records/s" not in answer.stdout
    assert "lost 1" in answer.stderr


@pytest.fixture(scope="module")
def cache_report() -> CacheReport:
    return measure_cache(CachePlan(concurrency=(1, 8), keys=20, calls=200, lone_calls=50, repeats=REPEATS))


def test_every_cache_answers_the_newest_value(cache_report: CacheReport) -> None:
    assert cache_report.is_lossless
    assert {result.case.system for result in cache_report.results} == installed(CACHES)
    for result in cache_report.results:
        calls = REPEATS * (50 if result.case.concurrency == 1 else 200)
        assert (result.account.put, result.account.got) == (calls, calls)
        assert result.get is not None
        assert (result.felix_get is None) == (result.case.system == "felix-fsync")


def test_caches_are_printed_and_wrong_ones_are_not(
    cache_report: CacheReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "measure_cache", lambda *_: cache_report)
    answer = CliRunner().invoke(app, ["cache", "--quick"], env={"COLUMNS": "200"})
    assert answer.exit_code == 0
    assert "each of the newest value" in answer.stdout
    first, *others = cache_report.results
    stale = msgspec.structs.replace(first, account=CacheAccount(put=5, got=5, stale=1))
    wrong = msgspec.structs.replace(cache_report, results=[stale, *others])
    monkeypatch.setattr(beside, "measure_cache", lambda *_: wrong)
    answer = CliRunner().invoke(app, ["cache"])
    assert answer.exit_code == 6
    assert "stale 1" in " ".join(answer.stderr.split())


@pytest.fixture(scope="module")
def queue_report() -> QueueReport:
    return measure_queue(QueuePlan(workers=(1, 3), jobs=200, paced_jobs=20, repeats=1))


def test_every_queue_has_every_job_finished_once(queue_report: QueueReport) -> None:
    assert queue_report.is_lossless
    assert {result.case.system for result in queue_report.results} == installed(QUEUES)
    for result in queue_report.results:
        assert result.account == QueueAccount(put=220, finished=220)
        assert result.to_hand is not None
        assert (result.felix is None) == (result.case.system == "felix-fsync")


def test_queues_are_printed_and_wrong_ones_are_not(
    queue_report: QueueReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "measure_queue", lambda *_: queue_report)
    answer = CliRunner().invoke(app, ["queue", "--quick"], env={"COLUMNS": "200"})
    assert answer.exit_code == 0
    assert "each finished once and nothing left" in answer.stdout
    first, *others = queue_report.results
    twice = msgspec.structs.replace(first, account=QueueAccount(put=5, finished=6, handed_out_twice=1))
    wrong = msgspec.structs.replace(queue_report, results=[twice, *others])
    monkeypatch.setattr(beside, "measure_queue", lambda *_: wrong)
    answer = CliRunner().invoke(app, ["queue"])
    assert answer.exit_code == 6
    assert "handed out twice 1" in " ".join(answer.stderr.split())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--system", "carrier-pigeon"], "no system 'carrier-pigeon'"),
        (["--subscribers", "0"], "0 subscribers cannot be measured"),
        (["--size", "8"], "cannot be measured"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(options: list[str], sentence: str) -> None:
    answer = CliRunner().invoke(app, ["fanout", *options])
    assert isinstance(answer.exception, RequestError)
    assert sentence in str(answer.exception)
