"""`felix bench`: its accounting finds what it must find, a tiny run reconciles, and nothing is printed that does not."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from cli import bench
from cli.benchmark.accounting import (
    PAYLOAD_BYTES_MIN,
    Account,
    Ledger,
    Made,
    checksum_of,
    fillers,
    payloads_of,
)
from cli.benchmark.figures import Latency, Spread, percentile, rate_per_second
from cli.benchmark.measurement import Plan, Report, measure
from cli.main import app
from felix.batch import Batch, NewRecord, decode_batch, encode_batch
from felix.errors import RequestError
from felix.subscription import ReceivedBatch

PAYLOAD_BYTES = 64
BATCHES = 8
RECORDS = 5
RECORDS_MAX = 1_000
"""Of a phase of a measurement: what ends it, and not the time, which a busy machine has little of."""


def delivered() -> list[Batch]:
    """Batches of one shard as a broker delivers them: with offsets, over the wire's encoding."""
    found = []
    for number in range(BATCHES):
        made = Made(0, number * RECORDS, RECORDS, 1_000 + number)
        payloads = payloads_of(made, fillers(PAYLOAD_BYTES))
        batch = encode_batch([NewRecord(payload) for payload in payloads])
        batch = batch.with_header(replace(batch.header, base_offset=made.first))
        found.append(decode_batch(batch.encode()))
    return found


def account_of(batches: Sequence[Batch], **ledger: bool) -> Account:
    books = Ledger(PAYLOAD_BYTES, **ledger)
    for batch in batches:
        received = ReceivedBatch(batch, batch.header.base_offset)
        books.receive(0, ((record.offset, record.payload) for record in received.records()))
    made = [Made(0, number * RECORDS, RECORDS, 1_000 + number) for number in range(BATCHES)]
    return books.close({0: BATCHES * RECORDS}, checksum_of(made, fillers(PAYLOAD_BYTES)))


def test_what_came_once_and_in_order_is_lossless() -> None:
    account = account_of(delivered())
    assert account.is_lossless
    assert account == Account(published=40, received=40)


def test_a_dropped_batch_is_found() -> None:
    batches = delivered()
    del batches[3]
    account = account_of(batches)
    assert not account.is_lossless
    assert (account.lost, account.received) == (RECORDS, 35)


def test_a_dropped_end_is_found() -> None:
    account = account_of(delivered()[:-1])
    assert not account.is_lossless
    assert account.lost == RECORDS


def test_nothing_at_all_is_found() -> None:
    account = account_of([])
    assert not account.is_lossless
    assert account.lost == 40


def test_a_repeated_batch_is_found() -> None:
    batches = delivered()
    batches.insert(3, batches[2])
    account = account_of(batches)
    assert not account.is_lossless
    assert (account.duplicated, account.lost) == (RECORDS, 0)


def test_swapped_batches_are_found() -> None:
    batches = delivered()
    batches[2], batches[3] = batches[3], batches[2]
    account = account_of(batches)
    assert not account.is_lossless
    assert (account.reordered, account.lost, account.duplicated) == (RECORDS, 0, 0)


def test_a_changed_payload_is_found_where_all_checksums_of_the_batch_hold() -> None:
    batches = delivered()
    payloads = payloads_of(Made(0, 10, RECORDS, 1_002), fillers(PAYLOAD_BYTES))
    payloads[1] = payloads[1][:-1] + bytes([payloads[1][-1] ^ 1])
    forged = encode_batch([NewRecord(payload) for payload in payloads])
    batches[2] = decode_batch(forged.with_header(replace(forged.header, base_offset=10)).encode())
    account = account_of(batches)
    assert not account.is_lossless
    assert account.damaged == 1


def test_a_changed_time_is_found_by_the_checksum() -> None:
    batches = delivered()
    payloads = payloads_of(Made(0, 10, RECORDS, 7), fillers(PAYLOAD_BYTES))
    forged = encode_batch([NewRecord(payload) for payload in payloads])
    batches[2] = decode_batch(forged.with_header(replace(forged.header, base_offset=10)).encode())
    account = account_of(batches)
    assert not account.is_lossless
    assert not account.checksums_agree


def test_a_wrong_offset_is_found() -> None:
    batches = delivered()
    batches[7] = batches[7].with_header(replace(batches[7].header, base_offset=36))
    account = account_of(batches)
    assert not account.is_lossless
    assert account.misplaced == RECORDS


def test_a_ring_may_have_let_go_of_its_oldest_and_of_nothing_else() -> None:
    assert account_of(delivered()[2:], may_start_late=True) == Account(published=40, received=30, aged_out=10)
    assert account_of(delivered()[2:], may_start_late=True).is_lossless
    assert not account_of(delivered()[2:]).is_lossless
    assert not account_of(delivered()[2:-1], may_start_late=True).is_lossless


def test_accounts_add_up() -> None:
    one = Account(published=2, received=1, lost=1, checksums_agree=False)
    assert one + Account(published=3, received=3) == Account(
        published=5, received=4, lost=1, checksums_agree=False
    )


def test_figures() -> None:
    assert [percentile(range(1, 101), share) for share in (0.0, 50.0, 99.0, 99.9, 100.0)] == [
        1,
        50,
        99,
        100,
        100,
    ]
    assert Latency.of([]) is None
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, [3.0, 1.0, 2.0])
    # 10 records each 0.1 s; the first fifth is not counted.
    events = [(number * 100_000_000, 10) for number in range(10)]
    assert rate_per_second(events, 0.2) == pytest.approx(100.0)
    assert rate_per_second([], 0.2) == 0.0
    assert rate_per_second([(5, 10)], 0.2) == 0.0


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    found = {}
    for kind, engine, durability in (("deliver", "qh3", "ephemeral"), ("publish", "aioquic", "fsync")):
        found[kind] = measure(
            Plan(
                kind=kind,
                engines=(engine,),
                durabilities=(durability,),
                payload_bytes=(64,),
                batch_records=(1, 16),
                shards=2,
                repeats=1,
                load_s=300.0,
                paced_s=0.3,
                records_max=RECORDS_MAX,
                relay_bytes=1 << 20,
            )
        )
    return found


@pytest.mark.parametrize("kind", ["deliver", "publish"])
def test_a_tiny_run_reconciles(reports: dict[str, Report], kind: str) -> None:
    report = reports[kind]
    assert report.is_lossless
    assert [result.case.batch_records for result in report.results] == [1, 16]
    for result in report.results:
        assert result.account.published == result.account.received
        assert (
            result.account.published >= RECORDS_MAX // result.case.batch_records * result.case.batch_records
        )
        assert result.records_per_second.median > 0
        assert result.share.median > 0
        assert result.loaded is not None
        assert result.half is not None
        assert (result.lone is not None) == (result.case.batch_records == 1)


def test_json_has_every_figure_with_its_spread(
    reports: dict[str, Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measure", lambda *_: reports["deliver"])
    answer = CliRunner().invoke(app, ["bench", "deliver", "--quick", "--json"])
    assert answer.exit_code == 0
    document = json.loads(answer.stdout)
    assert set(document) == {"kind", "type", "machine", "plan", "seconds", "sync", "yardsticks", "results"}
    result = document["results"][0]
    assert result["case"] == {
        "engine": "qh3", "durability": "ephemeral", "payload_bytes": 64, "batch_records": 1,
    }  # fmt: skip
    assert set(result["records_per_second"]) == {"median", "low", "high", "values"}
    assert set(result["lone"]) == {"p50_us", "p90_us", "p99_us", "p999_us", "samples"}
    document["kind"] = document.pop("type")
    read = msgspec.convert(document, type=Report, strict=False)
    assert msgspec.json.encode(read) == msgspec.json.encode(reports["deliver"])


def test_people_see_a_table(reports: dict[str, Report], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure", lambda *_: reports["publish"])
    answer = CliRunner().invoke(app, ["bench", "publish", "--quick"], env={"COLUMNS": "200"})
    assert answer.exit_code == 0
    assert "Acknowledged, 2 shards" in answer.stdout
    assert "each found once, in order and unchanged" in answer.stdout


def test_no_rate_is_printed_for_what_was_lost(
    reports: dict[str, Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = reports["deliver"]
    lossy = msgspec.structs.replace(good.results[0], account=Account(published=1000, received=990, lost=10))
    report = msgspec.structs.replace(good, results=[lossy, *good.results[1:]])
    monkeypatch.setattr(bench, "measure", lambda *_: report)
    answer = CliRunner().invoke(app, ["bench", "deliver"])
    assert answer.exit_code == 6
    assert "records/s" not in answer.stdout
    assert "lost 10" in answer.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--engine", "msquic"], "no engine 'msquic'"),
        (["--durability", "maybe"], "no durability 'maybe'"),
        (["--size", str(PAYLOAD_BYTES_MIN - 1)], "cannot be measured"),
        (["--batch", "100000"], "cannot be measured"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(options: list[str], sentence: str) -> None:
    answer = CliRunner().invoke(app, ["bench", "publish", *options])
    assert isinstance(answer.exception, RequestError)
    assert sentence in str(answer.exception)
