"""`felix bench bridge`: its books find what must not happen at a border, a tiny run settles, and no rate stands without."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from audit.leaf import ENTRY_BYTES, Kind
from cli import bench
from cli.benchmark.accounting import Made
from cli.benchmark.crossing import CrossingPlan, CrossingReport, measure_crossing
from cli.benchmark.departures import (
    Arrivals,
    DepartureLedger,
    crossing_of,
    departure,
    is_withheld,
    payloads_of,
    withheld_below,
)
from cli.benchmark.settlement import LogBooks, Settlement, settle
from cli.main import app
from felix.batch import Record
from felix.errors import RequestError

COUNT = 600
MADE = [Made(0, first, 100, 1_000 + first) for first in range(0, COUNT, 100)]
CROSSING = [sequence for sequence in range(COUNT) if not is_withheld(sequence)]


def crossed(sequence: int, **changes: object) -> bytes:
    """A record as the destination's subscriber must have it."""
    source = departure(sequence, 1_000 + sequence // 100 * 100)
    fields = {"tailnum": f"pseudonym of {source.tailnum}", "hour": -1, "minute": -1, **changes}
    return msgspec.json.encode(msgspec.structs.replace(source, **fields))


def arrivals_of(payloads: list[bytes]) -> Arrivals:
    ledger = DepartureLedger()
    ledger.publish(MADE)
    ledger.receive(0, [Record(offset, 0, None, {}, payload) for offset, payload in enumerate(payloads)])
    return ledger.close()


def whole() -> list[bytes]:
    return [crossed(sequence) for sequence in CROSSING]


def test_a_departure_is_as_long_as_a_flight() -> None:
    lengths = [len(payload) for payload in payloads_of(Made(0, 10_000, 200, 123_456_789_012_345))]
    assert 300 <= min(lengths) <= max(lengths) <= 400
    assert crossing_of(MADE) == {0: len(CROSSING)}
    assert withheld_below(COUNT) == COUNT - len(CROSSING) == 2


def test_what_crossed_once_in_order_and_transformed_is_clean() -> None:
    assert arrivals_of(whole()) == Arrivals(delivered=len(CROSSING))
    assert arrivals_of(whole()).is_clean


@pytest.mark.parametrize(
    ("harm", "wanted"),
    [
        (lambda held: held[:5] + held[6:], {"lost": 1}),
        (lambda held: held[:-7], {"lost": 7}),
        (lambda held: [], {"lost": len(CROSSING)}),
        (lambda held: [*held, held[3]], {"duplicated": 1}),
        (lambda held: [held[1], held[0], *held[2:]], {"reordered": 1}),
        (lambda held: [crossed(0, dep_time=1), *held[1:]], {"damaged": 1}),
        (lambda held: [crossed(0, made_ns=1), *held[1:]], {"damaged": 1}),
        (
            lambda held: [crossed(0, tailnum=f"pseudonym of {departure(1, 0).tailnum}"), *held[1:]],
            {"damaged": 1},
        ),
        (lambda held: [b"no json", *held[1:]], {"damaged": 1}),
        (lambda held: [crossed(0, tailnum=departure(0, 0).tailnum), *held[1:]], {"leaked": 1}),
        (lambda held: [crossed(0, hour=5), *held[1:]], {"leaked": 1}),
        (lambda held: [*held, crossed(249)], {"leaked": 1}),
    ],
)
def test_harm_at_the_destination_is_found(
    harm: Callable[[list[bytes]], list[bytes]], wanted: dict[str, int]
) -> None:
    found = arrivals_of(harm(whole()))
    assert not found.is_clean
    assert {name: getattr(found, name) for name in wanted} == wanted


def test_a_wrong_offset_at_the_destination_is_found() -> None:
    ledger = DepartureLedger()
    ledger.publish(MADE)
    ledger.receive(
        0, [Record(offset + (offset > 9), 0, None, {}, payload) for offset, payload in enumerate(whole())]
    )
    assert ledger.close().misplaced == len(CROSSING) - 10


def entries(offsets: list[int]) -> list[bytes]:
    return [offset.to_bytes(8, "big") + bytes(ENTRY_BYTES - 8) for offset in offsets]


def logs() -> tuple[LogBooks, LogBooks]:
    """Both logs' books of a crossing in which nothing went wrong."""
    egress = LogBooks(
        entries={
            Kind.INTENT: {0: entries(CROSSING)},
            Kind.WITHHELD: {0: entries([249, 499])},
        },
        acknowledged=len(CROSSING),
        leaves=14,
        cosigned=14,
    )
    ingress = LogBooks(entries={Kind.ACK: {0: entries(CROSSING)}}, leaves=6, cosigned=6)
    return egress, ingress


ARRIVED = Arrivals(delivered=len(CROSSING))


def test_numbers_that_agree_settle() -> None:
    found = settle({0: COUNT}, ARRIVED, *logs())
    assert found.is_reconciled
    assert (found.published, found.crossed, found.withheld) == (600, 598, 2)
    assert found.acknowledged == found.landed == found.delivered == 598


@pytest.mark.parametrize(
    ("kind", "changed", "sentence"),
    [
        (Kind.INTENT, CROSSING[:-1], "one INTENT each"),
        (Kind.INTENT, [0, *CROSSING], "599 INTENT entries over 598 records"),
        (Kind.INTENT, [1, 0, *CROSSING[2:]], "in order"),
        (Kind.WITHHELD, [249], "are not those that must stay"),
        (Kind.WITHHELD, [249, 500], "are not those that must stay"),
    ],
)
def test_an_egress_log_that_says_otherwise_does_not_settle(
    kind: Kind, changed: list[int], sentence: str
) -> None:
    egress, ingress = logs()
    egress.entries[kind][0] = entries(changed)
    assert sentence in "; ".join(settle({0: COUNT}, ARRIVED, egress, ingress).problems)


def test_other_differences_do_not_settle() -> None:
    egress, ingress = logs()

    def problems(
        arrivals: Arrivals = ARRIVED, one: LogBooks = egress, other: LogBooks = ingress, count: int = COUNT
    ) -> str:
        return "; ".join(settle({0: count}, arrivals, one, other).problems)

    assert "published 601" in problems(count=601)
    assert "delivered 597 differ" in problems(Arrivals(delivered=597, lost=1))
    assert "at the destination: lost 1" in problems(Arrivals(delivered=597, lost=1))
    assert "acknowledged 500" in problems(one=replace(egress, acknowledged=500))
    assert "other entries" in problems(other=replace(ingress, entries={}))
    assert "the ingress log does not verify: torn" in problems(other=replace(ingress, verdict=["torn"]))
    assert "nobody has cosigned the egress log" in problems(one=replace(egress, cosigned=0))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> CrossingReport:
    """A tiny run, for real: five processes."""
    folder = tmp_path_factory.mktemp("bench")
    found = measure_crossing(
        CrossingPlan(records=1_100, batch_records=100, lone_records=10, shards=2, repeats=1), folder
    )
    assert not list(folder.iterdir())
    return found


def test_a_tiny_run_settles(report: CrossingReport) -> None:
    assert report.is_reconciled, report.results[0].settlement.problems
    (result,) = report.results
    settlement = result.settlement
    assert settlement.published == 2 * 100 + 10 + 2 * 1_100
    assert settlement.withheld > 0
    assert settlement.crossed == settlement.delivered == settlement.published - settlement.withheld
    for rate in (result.crossing, result.catch_up, result.publish, result.local):
        assert rate.median > 0
    assert result.lone is not None
    assert result.lone_publish is not None
    assert result.lone.samples + settlement.withheld >= 10


def run(monkeypatch: pytest.MonkeyPatch, report: CrossingReport, *options: str) -> tuple[int, str, str]:
    plans = []

    def measure(plan: CrossingPlan, _folder: Path | None, _said: object) -> CrossingReport:
        plans.append(plan)
        return report

    monkeypatch.setattr(bench, "measure_crossing", measure)
    answer = CliRunner().invoke(app, ["bench", "bridge", *options], env={"COLUMNS": "200"})
    assert len(plans) == 1
    return answer.exit_code, answer.stdout, answer.stderr


def test_people_see_rates_and_the_settlement(report: CrossingReport, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, _ = run(monkeypatch, report, "--quick")
    assert code == 0
    assert "crossed, a backlog" in said
    assert "leaves verify" in " ".join(said.split())


def test_json_reads_back(report: CrossingReport, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, _ = run(monkeypatch, report, "--json")
    assert code == 0
    document = json.loads(said)
    assert set(document) == {"kind", "type", "machine", "plan", "seconds", "sync", "results"}
    document["kind"] = document.pop("type")
    read = msgspec.convert(document, type=CrossingReport)
    assert msgspec.json.encode(read) == msgspec.json.encode(report)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_no_rate_is_printed_for_what_does_not_settle(
    report: CrossingReport, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    lossy: Settlement = msgspec.structs.replace(
        report.results[0].settlement, problems=["published 2 is not crossed 1 + withheld 0"]
    )
    result = msgspec.structs.replace(report.results[0], settlement=lossy)
    code, said, wrong = run(monkeypatch, msgspec.structs.replace(report, results=[result]), *options)
    assert code == 6
    assert said == ""
    assert "published 2 is not crossed 1" in wrong


def test_an_unknown_engine_is_refused_before_anything_starts() -> None:
    answer = CliRunner().invoke(app, ["bench", "bridge", "--engine", "msquic"])
    assert isinstance(answer.exception, RequestError)
    assert "no engine 'msquic'" in str(answer.exception)
