"""Reports: Spark's totals against a count in plain Python, refusals, windows, differences, the same bytes twice."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from audit_log import OPERATOR
from crossing_logs import (
    BRIDGE,
    CREW,
    DAY_MS,
    DEPARTURES,
    EGRESS_ORIGIN,
    INGRESS_ORIGIN,
    ORDERS,
    REGION_ORIGIN,
    SIGNED,
    START_MS,
    TERMS,
    Made,
    World,
    count_files,
    five_days,
    grant_id,
    read_leaves,
    terms_hash,
    trust,
    write_log,
    write_world,
)
from signed_grants import ACCEPTOR, grant_leaves, signed_grant
from slow_runs import only_slow
from spark.lineage_endpoint import Again

from audit.leaf import Header, Kind, Leaf
from audit.spark.agreements import rows_of
from audit.spark.document import STATEMENT
from audit.spark.reconciliation import Given, LogEnd
from audit.spark.report import (
    EXIT_CLEAN,
    EXIT_DIFFERENCES,
    EXIT_ONE_SIDE,
    EXIT_REFUSED,
    MADE_NAME,
    REFUSED_NAME,
    ReportRefusedError,
    ReportResult,
    _missing,
    run_report,
)
from audit.spark.table import Column, Table, Type
from audit.tile import MemoryFiles
from audit.trust import Trust
from audit.unclean_leaf import UncleanElection, unclean_leaf
from felix.errors import RequestError

pytestmark = pytest.mark.spark


def by_stream(result: ReportResult, column: str) -> Counter[str]:
    counted: Counter[str] = Counter()
    for row in result.report.register.records():
        counted[row["stream"]] += row[column]
    return +counted


def files_of(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


# Five days without fault


def test_every_total_equals_a_count_of_the_files_in_plain_python(five: Made) -> None:
    counts = count_files(*five.logs)
    assert by_stream(five.result, "records") == counts["crossed"]
    assert by_stream(five.result, "record_bytes") == counts["bytes"]
    assert by_stream(five.result, "withheld") == counts["withheld"]
    denied = Counter[str]()
    for row in five.result.report.volumes.records():
        denied[row["stream"]] += row["denied"]
    assert +denied == counts["denied"]
    assert by_stream(five.result, "delivered") == counts["delivered"]
    assert by_stream(five.result, "acknowledged") == counts["acknowledged"]
    totals = five.result.report.totals
    assert totals.records == counts["crossed"].total() > 5_000
    assert totals.record_bytes == counts["bytes"].total()
    assert five.result.record_entries == counts["entries"]["all"]
    newest = {log.origin: log.newest_ms for log in five.result.report.logs}
    assert newest == {
        (path / "checkpoint").read_text().split("\n")[0]: max(
            leaf.header.time_ms for leaf in read_leaves(path)
        )
        for path in five.logs
    }
    assert (
        sum(row["gap"] for row in five.result.report.reconciliation.records()) == counts["gap"].total() == 25
    )


def test_volumes_by_day_equal_a_count_of_the_files(five: Made) -> None:
    counts = count_files(*five.logs)["day"]
    found = {
        (row["day"], row["stream"]): row["records"]
        for row in five.result.report.volumes.records()
        if row["records"]
    }
    expected = {
        (f"2025-10-{10 + day - START_MS // DAY_MS:02d}", stream): records
        for (day, stream), records in counts.items()
    }
    assert found == expected and len(found) >= 8
    line = five.result.report.time_line
    assert sum(records for _, _, records, _, _ in line) == five.result.report.totals.records


def test_published_is_crossed_and_withheld_and_gaps_and_delivered_is_crossed(five: Made) -> None:
    for row in five.result.report.reconciliation.records():
        assert row["status"] == "reconciled"
        assert row["covered"] == row["last_offset"] - row["first_offset"] + 1
        assert row["covered"] == row["crossed"] + row["withheld"] + row["gap"]
        assert row["crossed"] == row["delivered"] == row["acknowledged"]
        assert row["crossed_bytes"] == row["delivered_bytes"]
    assert five.result.report.findings.rows == ()
    assert five.result.exit_code == EXIT_ONE_SIDE, "the source's own log was not given"
    assert five.result.report.missing.sources == ("us-east",)
    assert five.result.report.missing.counterparts == ()
    (region,) = five.result.report.missing.region_logs
    assert region.startswith("us-east: its own log was not given") and region in five.result.page.read_text()


@only_slow
def test_one_side_alone_is_no_clean_report_and_its_first_page_says_what_is_missing(
    five: Made, spark: Any, tmp_path: Path
) -> None:
    alone = run_report([five.logs[0]], tmp_path / "out", trust=trust(), session=spark)
    assert alone.exit_code == EXIT_ONE_SIDE
    assert {row["status"] for row in alone.report.reconciliation.records()} == {"one side only"}
    (counterpart,) = alone.report.missing.counterparts
    assert counterpart == (
        "us-east to eu-west: the log of eu-west was not given, so this link rests on one side's word."
    )
    assert len(alone.report.missing.region_logs) == 2
    page = alone.page.read_text()
    said = page.index("the log of eu-west was not given")
    assert page.index('id="summary"') < said < page.index("Records crossed"), "before any number"
    assert json.loads((alone.out / "report.json").read_text())["not_given"]["counterparts"] == [counterpart]


def test_legal_fields_are_those_that_the_regions_signed(five: Made) -> None:
    rows = {row["stream"]: row for row in five.result.report.register.records()}
    for stream, terms in TERMS.items():
        row = rows[stream]
        assert (
            row["terms_found"] and row["terms_hash"] == terms_hash(stream).hex() and row["unsigned"] is None
        )
        for name in ("purpose", "reference", "exporter", "importer", "owner", "drawn_up_by"):
            assert row[name] == getattr(terms, name)
        assert (row["basis"], row["article"]) == (terms.basis.value, f"GDPR {terms.basis.article}")
        assert row["categories"] == list(terms.categories)
        # Who approved and who accepted is who signed; countries are the signed policies' word.
        assert row["approvers"] == [
            "spiffe://eu-west.acme/approver/dpo",
            "spiffe://us-east.acme/approver/dpo",
        ]
        assert row["accepted_by"] == ACCEPTOR
        assert (row["source_country"], row["source_jurisdiction"]) == ("US", "US")
        assert (row["destination_country"], row["destination_jurisdiction"]) == ("IE", "EU")
        assert (row["not_before"], row["expires"]) == (terms.not_before, terms.expires)
        assert row["policy_versions"] == ["1"]
        assert row["egress_cosigners"] == ["eu-west"] and row["ingress_cosigners"] == ["us-east"]
    assert (rows[DEPARTURES]["key_rule"], rows[ORDERS]["key_rule"]) == ("pseudonymize", "hash")
    assert (rows[DEPARTURES]["headers"], rows[DEPARTURES]["trace"]) == (["x-batch"], True)
    assert (rows[ORDERS]["headers"], rows[ORDERS]["trace"]) == ([], False)
    assert rows[DEPARTURES]["format"] == "json"
    assert rows[DEPARTURES]["mechanism"] == "module two"
    assert rows[DEPARTURES]["assessment"] == "TIA-2026-003" and rows[ORDERS]["assessment"] is None
    assert rows[ORDERS]["denied"] and rows[ORDERS]["last_time"] < TERMS[ORDERS].expires, (
        "attempts are no crossings"
    )
    assert CREW not in rows, "what was only denied is no transfer"


def test_exceptions_tell_controls_that_worked_from_what_is_worth_knowing(five: Made) -> None:
    rows = five.result.report.exceptions.records()
    found = {(row["severity"], row["exception"], row["stream"]): row for row in rows}
    counts = count_files(*five.logs)
    assert found["refused", "grant-missing", CREW]["events"] == counts["denied"][CREW]
    assert found["refused", "grant-expired", ORDERS]["events"] == counts["denied"][ORDERS]
    assert (
        found["refused", "withheld-transform-failed", DEPARTURES]["records"] == counts["withheld"][DEPARTURES]
    )
    assert found["notice", "gap-retention", DEPARTURES]["records"] == 25
    assert found["notice", "onward-allowed", ORDERS]["events"] == 1
    # One INTENT names the regions; of the other batch its ACK does, as the destination's receipt has them; the destination's leaves name both.
    onward = [row for row in rows if row["exception"] == "onward-transfer"]
    assert {row["log"]: row["events"] for row in onward} == {EGRESS_ORIGIN: 2, INGRESS_ORIGIN: 2}
    assert (
        len(
            {
                sum(row["records"] for row in onward if row["log"] == log)
                for log in (EGRESS_ORIGIN, INGRESS_ORIGIN)
            }
        )
        == 1
    )
    assert {row["stream"] for row in onward} == {ORDERS} and all(
        "ap-south, us-east" in row["sentence"] for row in onward
    )
    assert not [row for row in rows if row["severity"] == "breach"]


def test_lineage_says_what_becomes_of_each_field(five: Made) -> None:
    rows = [
        (row["stream"], row["part"], row["field"], row["action"], row["output"])
        for row in five.result.report.lineage.records()
    ]
    assert rows == [
        (DEPARTURES, "field", "crew", "drop", None),
        (DEPARTURES, "field", "tailnum", "pseudonymize", "tailnum"),
        (DEPARTURES, "field", "*", "keep", "*"),
        (DEPARTURES, "key", "key", "pseudonymize", "key"),
        (DEPARTURES, "header", "x-batch", "keep", "x-batch"),
        (DEPARTURES, "header", "traceparent", "keep", "traceparent"),
        (DEPARTURES, "header", "*", "drop", None),
        (ORDERS, "field", "amount", "keep", "amount"),
        (ORDERS, "field", "customer", "hash", "customer"),
        (ORDERS, "field", "card", "mask:4", "card"),
        (ORDERS, "field", "*", "drop", None),
        (ORDERS, "key", "key", "hash", "key"),
        (ORDERS, "header", "*", "drop", None),
    ]


def test_csv_parquet_and_json_hold_the_same_rows(five: Made) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    out = five.result.out
    whole = json.loads((out / "report.json").read_text())
    assert whole["statement"] == STATEMENT and "not a statement" in STATEMENT
    for table in five.result.report.tables:
        with (out / "tables" / f"{table.name}.csv").open(newline="") as file:
            lines = list(csv.DictReader(file))
        columns = pq.read_table(out / "tables" / f"{table.name}.parquet")
        assert len(lines) == columns.num_rows == len(whole["tables"][table.name]) == len(table.rows)
    orders = next(row for row in whole["tables"]["register"] if row["stream"] == ORDERS)
    assert orders["reference"] == "=Decision 2023/1795"
    with (out / "tables" / "register.csv").open(newline="") as file:
        shown = next(row for row in csv.DictReader(file) if row["stream"] == ORDERS)
    assert shown["reference"] == "'=Decision 2023/1795"


def test_checksums_cover_every_file_but_the_one_that_says_when(five: Made) -> None:
    files = files_of(five.result.out)
    said = dict(line.split("  ")[::-1] for line in files["SHA256SUMS"].decode().splitlines())
    assert said == {
        name: sha256(data).hexdigest()
        for name, data in files.items()
        if name not in ("SHA256SUMS", MADE_NAME)
    }


def test_the_same_logs_give_the_same_bytes(five: Made, again: Again) -> None:
    first, second = files_of(five.result.out), files_of(again.out)
    assert first.pop(MADE_NAME) != second.pop(MADE_NAME)
    assert {name for name in first if first[name] != second.get(name)} == set()
    assert first.keys() == second.keys()
    assert json.loads((again.out / MADE_NAME).read_text())["made_at"] == "1970-01-01T00:00:00.000Z"


@only_slow
def test_a_window_limits_what_counts_and_not_what_reconciles(five: Made, spark: Any, tmp_path: Path) -> None:
    since, until = START_MS + DAY_MS, START_MS + 2 * DAY_MS
    result = run_report(five.logs, tmp_path / "day", trust=trust(), session=spark, since=since, until=until)
    counts = count_files(*five.logs)["day"]
    expected = {stream: counts[since // DAY_MS, stream] for stream in (DEPARTURES, ORDERS)}
    assert by_stream(result, "records") == Counter(expected)
    assert {row["day"] for row in result.report.volumes.records()} == {"2025-10-11"}
    assert result.report.reconciliation == five.result.report.reconciliation
    rows = {row["stream"]: row for row in result.report.register.records()}
    assert rows[DEPARTURES]["purpose"] == "delay analytics"


@only_slow
def test_what_nobody_cosigned_is_told_in_every_window_that_reaches_it(spark: Any, tmp_path: Path) -> None:
    """The egress log's checkpoint was cosigned after two days; a report of the fourth begins behind the first leaf that is not, which says of itself
    that it is of a later time."""
    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    for day in range(4):
        if day == 2:
            cosigned = len(world.egress)
            world.deny(DEPARTURES, START_MS + 10 * DAY_MS, 501, "refused")
        world.batch(DEPARTURES, 0, START_MS + day * DAY_MS, withheld=0.0)
    logs = write_world(tmp_path, World(egress=world.egress[:cosigned], ingress=world.ingress))
    write_log(logs[0], EGRESS_ORIGIN, world.egress[cosigned:])
    first = sum(map(len, world.egress[:cosigned]))

    def told(name: str, **window: int) -> list[tuple[str, int, int]]:
        result = run_report(logs, tmp_path / name, trust=trust(), session=spark, **window)
        assert result.exit_code == EXIT_ONE_SIDE, (
            "what breaks no rule changes nothing; us-east's own log was not given"
        )
        return [
            (row["log"], row["first_leaf"], row["records"])
            for row in result.report.exceptions.records()
            if (row["severity"], row["exception"]) == ("notice", "not-cosigned")
        ]

    assert told("last", since=START_MS + 3 * DAY_MS, until=START_MS + 4 * DAY_MS) == [
        (EGRESS_ORIGIN, first, 80)
    ]
    assert told("before", since=START_MS, until=START_MS + 2 * DAY_MS) == []


# Logs that do not verify


def test_a_tampered_log_makes_no_report_and_says_which_leaf(five: Made, spark: Any, tmp_path: Path) -> None:
    ill = Path(shutil.copytree(five.logs[0], tmp_path / "egress"))
    bundle = ill / "tile/entries/000"
    data = bytearray(bundle.read_bytes())
    data[-5] ^= 1
    bundle.write_bytes(data)
    out = tmp_path / "out"
    shutil.copytree(five.result.out, out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ReportRefusedError, match=r"Leaf 255 in tile/entries/000") as refused:
        run_report([ill, five.logs[1]], out, trust=trust(), session=spark)
    assert refused.value.exit_code == EXIT_REFUSED not in (EXIT_CLEAN, EXIT_DIFFERENCES)
    assert set(files_of(out)) == {REFUSED_NAME, "notes.txt"}, (
        "an earlier report must not stand beside a refusal"
    )
    assert not (out / "tables").exists()
    said = json.loads((out / REFUSED_NAME).read_text())
    assert said["refused"] is True and said["problems"][0]["leaf"] == 255
    sentences = " ".join(problem["sentence"] for problem in said["problems"])
    assert "root that the checkpoint signs" in sentences, "whatever felix audit verify finds stands there"


def test_a_log_of_an_untrusted_key_is_refused_before_spark_starts(five: Made, tmp_path: Path) -> None:
    with pytest.raises(ReportRefusedError, match="No bundle of") as refused:
        run_report(five.logs, tmp_path / "out", trust=Trust())
    assert len(refused.value.problems) == 2
    assert set(files_of(tmp_path / "out")) == {REFUSED_NAME}


# Logs that verify and differ


@pytest.fixture(scope="module")
def ill(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> ReportResult:
    """Two honest logs of a bridge and a region that did much wrong."""
    world, now = World(), START_MS

    def later() -> int:
        nonlocal now
        now += 60_000
        return now

    def change_commitment(leaves: list[Leaf]) -> list[Leaf]:
        (leaf,) = leaves
        changed = bytearray(leaf.entries)
        changed[3 * 68 + 25] ^= 1
        return [Leaf(leaf.header, bytes(changed))]

    def lose_one(leaves: list[Leaf]) -> list[Leaf]:
        (leaf,) = leaves
        fields = {name: getattr(leaf.header, name) for name in leaf.header.__struct_fields__}
        size = int.from_bytes(leaf.entries[-52:-48], "big")
        fields |= {
            "records": fields["records"] - 1,
            "record_bytes": fields["record_bytes"] - size,
            "destination_last_offset": fields["destination_last_offset"] - 1,
        }
        return [Leaf(Header(**fields), leaf.entries[:-68])]

    def halve(leaves: list[Leaf]) -> list[Leaf]:
        """The same records in two leaves: not a difference."""
        (leaf,) = leaves
        fields = {name: getattr(leaf.header, name) for name in leaf.header.__struct_fields__}
        middle = fields["first_offset"] + 5
        halves = []
        for part, (entries, first, last, to) in enumerate(
            (
                (
                    leaf.entries[: 5 * 68],
                    fields["first_offset"],
                    middle - 1,
                    fields["destination_first_offset"],
                ),
                (
                    leaf.entries[5 * 68 :],
                    middle,
                    fields["last_offset"],
                    fields["destination_first_offset"] + 5,
                ),
            )
        ):
            own = fields | {
                "part": part, "parts": 2, "records": len(entries) // 68, "first_offset": first, "last_offset": last,
                "record_bytes": sum(
                    int.from_bytes(entries[at + 16 : at + 20], "big") for at in range(0, len(entries), 68)
                ),
                "destination_first_offset": to, "destination_last_offset": to + len(entries) // 68 - 1,
            }  # fmt: skip
            halves.append(Leaf(Header(**own), entries))
        return halves

    world.grant(DEPARTURES, now)
    world.revoke(DEPARTURES, later(), region="ap-south")  # trusted, and no party to the grant

    def batch(**more: Any) -> None:
        world.batch(DEPARTURES, 0, later(), 10, withheld=0.0, **more)

    batch()  # 0-9: well
    batch(receipt=False)  # 10-19: arrived, its receipt never logged
    batch(arrives=False)  # 20-29: a receipt, and nothing in the ingress log
    batch(change=change_commitment)  # 30-39
    batch(change=lose_one)  # 40-49
    batch(change=halve)  # 50-59: well
    world.offsets[DEPARTURES, 0] += 4  # 60-63: nobody says why
    batch()  # 64-73
    world.ingress.append(world.ingress[-1])  # appended twice
    world.egress.append(world.egress[-2])  # announced twice
    world.revoke(DEPARTURES, later())
    batch()  # 74-83: after the revocation
    batch(receipt=False, arrives=False)  # 84-93: in flight
    world.batch(ORDERS, 1, TERMS[ORDERS].expires + 5, 10, withheld=0.0)  # under terms that nobody states
    world.batch(CREW, 0, later(), 5, withheld=1.0)  # under nobody's terms either, and not one record crosses
    folder = tmp_path_factory.mktemp("ill")
    return run_report(
        write_world(folder, world),
        folder / "out",
        trust=trust("us-east", "eu-west", "ap-south"),
        session=spark,
    )


def found(result: ReportResult) -> set[tuple[str, str, int, int]]:
    return {
        (row["finding"], row["status"], row["first_offset"], row["last_offset"])
        for row in result.report.findings.records()
    }


def test_each_difference_between_two_honest_logs_is_named_with_its_place(ill: ReportResult) -> None:
    assert found(ill) == {
        ("intent-without-receipt", "differs", 10, 19),
        ("receipt-without-arrival", "differs", 20, 29),
        ("commitment-differs", "differs", 33, 33),
        ("count-differs", "differs", 40, 49),
        ("record-not-delivered", "differs", 49, 49),
        ("undeclared-gap", "differs", 60, 63),
        ("duplicate-intent", "differs", 64, 73),
        ("announced-twice", "differs", 64, 73),
        ("duplicate-arrival", "differs", 64, 73),
        ("delivered-twice", "differs", 64, 73),
        ("receipt-count-differs", "differs", 64, 73),
        ("intent-without-receipt", "open", 84, 93),
        ("intent-without-arrival", "open", 84, 93),
    }
    # Of what lies at one place, as many records as it has offsets.
    by_place = ("undeclared-gap", "announced-twice", "delivered-twice")
    counted = {row["finding"]: row["records"] for row in ill.report.findings.records()}
    assert [counted[finding] for finding in by_place] == [4, 10, 10]
    assert ill.exit_code == EXIT_DIFFERENCES
    status = {row["stream"]: row["status"] for row in ill.report.reconciliation.records()}
    assert status == {DEPARTURES: "differs", ORDERS: "reconciled", CREW: "reconciled"}


def test_crossings_outside_their_terms_are_breaches(ill: ReportResult) -> None:
    breaches = {
        (row["exception"], row["stream"], row["records"])
        for row in ill.report.exceptions.records()
        if row["severity"] == "breach"
    }
    assert breaches == {
        ("crossed-after-revocation", DEPARTURES, 20),
        ("crossed-without-terms", ORDERS, 10),
        # Offsets that no leaf accounts for: also among the findings, between whose leaves they lie.
        ("rule-broken", DEPARTURES, 10),
        # The arrival of what crossed without terms, in the ingress log.
        ("rule-broken", ORDERS, 10),
        ("crossed-without-terms", CREW, 0),
        ("rule-broken", CREW, 0),
        # The WITHHELD leaf names a grant that nobody signed, either.
        ("rule-broken", CREW, 5),
    }
    revoked = {
        row["exception"]: (row["events"], row["first_leaf"])
        for row in ill.report.exceptions.records()
        if row["action"] == "revoke"
    }
    # The third region's revocation stands before all crossings, and forbids none.
    assert revoked["revocation-without-effect"] == (1, 5)
    assert revoked["grant-ended"][0] == 1 and len(revoked) == 2
    rows = {row["stream"]: row for row in ill.report.register.records()}
    assert rows[ORDERS]["terms_found"] is False and rows[ORDERS]["basis"] is None
    # Where every record stayed there is no first crossing.
    assert (rows[CREW]["withheld"], rows[CREW]["first_time"], rows[CREW]["last_time"]) == (5, None, None)
    assert rows[ORDERS]["first_time"] == rows[ORDERS]["last_time"] == TERMS[ORDERS].expires + 5


@only_slow
def test_a_region_s_own_log_beside_its_bridge_s_does_not_confuse_either(
    five: Made, spark: Any, tmp_path: Path
) -> None:
    """Grants and denials stand in the source region's own log as well; crossings stand in the bridge's alone."""
    own = World()
    own.grant(DEPARTURES, START_MS - 1_000)
    own.deny(
        DEPARTURES, START_MS + 1, 505, "The grant was revoked.", grant_id=grant_id(DEPARTURES),
        terms_hash=terms_hash(DEPARTURES),
    )  # fmt: skip
    # Somebody asks for another stream under the grant that holds for this one: its terms are not lent to the attempt.
    own.deny(CREW, START_MS + 2, 501, "No grant lets it cross.", grant_id=grant_id(DEPARTURES))
    given_up = UncleanElection(
        stream=DEPARTURES,
        incarnation="ab" * 16,
        shard=0,
        epoch=9,
        election="0123456789abcdef",
        cause="recovered",
        leader="b2",
        end=20,
        given_up=("b1",),
        by=OPERATOR,
    )
    leaf = unclean_leaf(given_up, region="us-east", time_ms=START_MS + 3, writer=OPERATOR)
    # What is told is what the statement says.
    own.egress.append([Leaf(msgspec.structs.replace(leaf.header, sentence="Nothing was lost."))])
    write_log(tmp_path / "own", REGION_ORIGIN, own.egress, cosign=True)
    result = run_report([tmp_path / "own", *five.logs], tmp_path / "out", trust=trust(), session=spark)
    assert result.exit_code == EXIT_CLEAN and result.report.missing.region_logs == ()
    row = next(row for row in result.report.register.records() if row["stream"] == DEPARTURES)
    alone = next(row for row in five.result.report.register.records() if row["stream"] == DEPARTURES)
    assert row["denied"] == 1
    assert CREW not in {each["stream"] for each in result.report.register.records()}
    volumes = [each for each in result.report.volumes.records() if each["stream"] == CREW]
    assert volumes and all(each["purpose"] is each["basis"] is None for each in volumes)
    (lost,) = [each for each in result.report.exceptions.records() if each["exception"] == "unclean-election"]
    assert (lost["severity"], lost["stream"], lost["actor"]) == ("notice", DEPARTURES, OPERATOR)
    assert lost["sentence"] == given_up.sentence and lost["action"] == "recover-shard"
    tried = [each for each in result.report.exceptions.records() if each["grant_id"] == grant_id(DEPARTURES)]
    assert [(each["stream"], each["events"]) for each in tried if each["code"] == 501] == [(CREW, 1)]
    assert result.report.totals.denied == five.result.report.totals.denied + 2
    for name in ("egress_log", "egress_leaves", "egress_checkpoint", "records", "reconciliation"):
        assert row[name] == alone[name]
    without = run_report([tmp_path / "own", five.logs[1]], tmp_path / "half", trust=trust(), session=spark)
    assert {each["status"] for each in without.report.reconciliation.records()} == {"one side only"}
    assert without.report.totals.records == 0 and without.report.totals.delivered > 0
    assert without.exit_code == EXIT_ONE_SIDE not in (EXIT_CLEAN, EXIT_DIFFERENCES, EXIT_REFUSED)
    (counterpart,) = without.report.missing.counterparts
    assert counterpart.startswith(f"us-east to eu-west: the egress log of {BRIDGE} was not given")
    assert without.report.missing.region_logs == (), "both regions' own logs are here"
    assert without.report.findings.rows == ()


def test_the_egress_log_of_one_bridge_stands_in_for_no_other(spark: Any) -> None:
    given = Given(LogEnd(origin, 1, 0) for origin in (EGRESS_ORIGIN, INGRESS_ORIGIN))
    second = BRIDGE + "-2"
    rows = spark.sql(
        f"""SELECT bridge, {given.egress} AS egress, {given.ingress} AS ingress FROM VALUES
            ('{BRIDGE}', 'eu-west'), ('{second}', 'eu-west'), (NULL, 'us-east') AS t(bridge, destination_region)"""
    ).collect()
    assert [(row["bridge"], row["egress"], row["ingress"]) for row in rows] == [
        (BRIDGE, True, True), (second, False, True), (None, False, False),
    ]  # fmt: skip
    names = ("source_region", "destination_region", "bridge", "status")
    columns = tuple(Column(name, Type.TEXT, name) for name in names)
    reconciled = [
        ("us-east", "eu-west", BRIDGE, "reconciled"),
        ("us-east", "eu-west", second, "one side only"),
    ]
    alone = Table("reconciliation", "", columns, tuple(reconciled))
    logs = [SimpleNamespace(origin=origin) for origin in (EGRESS_ORIGIN, INGRESS_ORIGIN)]
    found = _missing(logs, Table("transfers", "", columns, ()), list(alone.records()), given)  # type: ignore[arg-type]
    assert found.counterparts == (
        f"us-east to eu-west: the egress log of {second} was not given, so this link rests on one side's word.",
    )


def granted_by(*origins: str) -> tuple[str, ...]:
    """What a report of these logs says of granted links of which it has no log; us-east's own has all documents of a grant."""
    signed = signed_grant()
    read = rows_of(REGION_ORIGIN, enumerate(grant_leaves(signed)), MemoryFiles(), trust())
    empty = Table("transfers", "", (), ())
    logs = [SimpleNamespace(origin=origin) for origin in origins]
    given = Given(LogEnd(origin, 1, 0) for origin in origins)
    return _missing(logs, empty, [], given, read.granted).granted  # type: ignore[arg-type]


def test_a_link_that_is_granted_and_of_which_no_log_was_given_is_named() -> None:
    """A region that gives the logs of one bridge, and not those of another: its own log says that there is one."""
    (said,) = granted_by(REGION_ORIGIN)
    assert said.startswith(f"us-east to eu-west: {BRIDGE} may carry records, by {signed_grant().grant}")
    assert granted_by(REGION_ORIGIN, EGRESS_ORIGIN) == granted_by(REGION_ORIGIN, INGRESS_ORIGIN) == ()
    (said,) = granted_by(REGION_ORIGIN, EGRESS_ORIGIN + "-2", "ap-south.acme/audit")
    assert "neither its egress log nor the log of eu-west was given" in said


def test_a_grant_that_lets_nothing_cross_is_no_link() -> None:
    signed = signed_grant()
    for lacking in range(1, len(grant_leaves(signed))):
        leaves = [leaf for at, leaf in enumerate(grant_leaves(signed)) if at != lacking]
        assert rows_of(REGION_ORIGIN, enumerate(leaves), MemoryFiles(), trust()).granted == {}


@only_slow
def test_a_report_names_such_a_link_on_its_first_page(spark: Any, tmp_path: Path) -> None:
    own = World()
    own.grant(DEPARTURES, START_MS - 1_000)
    write_log(tmp_path / "own", REGION_ORIGIN, own.egress, cosign=True)
    result = run_report([tmp_path / "own"], tmp_path / "out", trust=trust(), session=spark)
    assert result.exit_code == EXIT_CLEAN
    (said,) = result.report.missing.granted
    page = result.page.read_text()
    assert page.index("so what crossed there is not in this report") < page.index("Records crossed")
    assert json.loads((result.out / "report.json").read_text())["not_given"]["granted"] == [said]


# Bad input


def test_a_folder_that_cannot_be_written_is_named_before_a_log_is_read(five: Made, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/felix")):
        with pytest.raises(RequestError, match="cannot be written to"):
            run_report(["nowhere"], out, trust=Trust())


def test_the_same_log_twice_is_refused(five: Made, tmp_path: Path) -> None:
    copy = shutil.copytree(five.logs[0], tmp_path / "copy")
    with pytest.raises(RequestError, match="are both the log"):
        run_report([five.logs[0], copy], tmp_path / "out", trust=trust())


def test_an_empty_window_no_log_and_a_bad_endpoint_are_refused_at_once(five: Made, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="window is empty"):
        run_report(five.logs, tmp_path / "out", trust=trust(), since=5, until=5)
    with pytest.raises(RequestError, match="at least one audit log"):
        run_report([], tmp_path / "out", trust=trust())
    with pytest.raises(RequestError, match="no OpenLineage endpoint"):
        run_report(five.logs, tmp_path / "out", trust=trust(), openlineage_url="ftp://somewhere")
    assert not (tmp_path / "out").exists()


@only_slow
def test_a_window_before_everything_is_an_empty_report(spark: Any, tmp_path: Path) -> None:
    world = five_days(12)
    logs = write_world(tmp_path, world)
    result = run_report(logs, tmp_path / "out", trust=trust(), session=spark, until=1)
    assert result.report.register.rows == () and result.report.totals.records == 0
    assert "no crossings in the window" in result.page.read_text()


@only_slow
def test_what_the_next_grant_announces_again_counts_once_and_is_named(spark: Any, tmp_path: Path) -> None:
    """The bridge died between INTENTs and receipts, and the grant was renewed meanwhile: one batch had arrived, two had not."""
    renewed = signed_grant(
        stream=DEPARTURES, purpose="capacity planning, second year", expires=START_MS + 90 * DAY_MS
    )

    class Renewed(World):
        signed = SIGNED[DEPARTURES]

        def granted(self, stream: str, shard: int) -> dict[str, Any]:
            said = {"grant_id": self.signed.grant, "terms_hash": self.signed.terms.hash()}
            return super().granted(stream, shard) | said

    def logs(folder: Path, at: int) -> list[Path]:
        world = Renewed()
        world.grant(DEPARTURES, START_MS)
        world.batch(DEPARTURES, 0, START_MS + 1_000, 10)
        world.batch(DEPARTURES, 0, START_MS + 2_000, 10, receipt=False)
        for number in (3, 4):
            world.batch(
                DEPARTURES, 0, START_MS + 1_000 * number, 10, withheld=0.3, receipt=False, arrives=False
            )
        world.signed = renewed
        world.grant(DEPARTURES, START_MS + 5_000, renewed)
        world.offsets[DEPARTURES, 0] = at
        world.arrived[DEPARTURES, 0] = sum(
            leaf.header.records for leaves in world.ingress for leaf in leaves if leaf.header.kind is Kind.ACK
        )
        world.batch(DEPARTURES, 0, START_MS + 6_000, 15, withheld=0.0)
        world.batch(DEPARTURES, 0, START_MS + 7_000, 15)
        return write_world(folder, world)

    both = logs(tmp_path / "lawful", 20)
    report = run_report(both, tmp_path / "out", trust=trust(), session=spark).report
    # They count once; and whether the destination had taken them under the first grant's terms is its word alone.
    assert {(each["finding"], each["status"]) for each in report.findings.records()} == {
        ("announced-not-answered", "open")
    }
    (row,) = report.reconciliation.records()
    assert (row["status"], row["covered"], row["unaccounted"], row["findings"]) == ("open", 50, 0, 0)
    silent = sum(each["records"] for each in report.findings.records())
    assert row["unanswered"] == silent > 0 and row["first_offset"] == 0 and row["last_offset"] == 49
    by_terms = {
        each["terms_hash"]: (each["unanswered"], each["unanswered_bytes"] > 0)
        for each in report.register.records()
    }
    assert by_terms == {
        SIGNED[DEPARTURES].terms.hash().hex(): (silent, True),
        renewed.terms.hash().hex(): (0, False),
    }
    assert row["crossed"] == row["delivered"] and row["crossed"] + row["withheld"] == 50
    named = [each for each in report.exceptions.records() if each["exception"] == "announced-again"]
    assert sum(each["events"] for each in named) == 2
    assert sum(each["records"] for each in report.register.records()) == row["crossed"]

    # Of the egress log alone nobody knows whether what has no receipt arrived.
    alone = run_report(both[:1], tmp_path / "alone", trust=trust(), session=spark).report
    assert sorted((each["finding"], each["status"]) for each in alone.findings.records()) == [
        ("announced-not-answered", "open"),
        ("announced-not-answered", "open"),
        ("intent-without-receipt", "open"),
    ]
    # What had arrived is not announced again.
    twice = run_report(logs(tmp_path / "twice", 10), tmp_path / "more", trust=trust(), session=spark).report
    assert {"announced-twice", "delivered-twice"} <= {each["finding"] for each in twice.findings.records()}


@only_slow
def test_what_is_dated_back_out_of_a_window_is_named_in_its_report(spark: Any, tmp_path: Path) -> None:
    """The report of the time before was made already, and has none of it."""
    world, cut = World(), START_MS + 30 * DAY_MS
    world.grant(DEPARTURES, START_MS - 1_000)
    world.batch(DEPARTURES, 0, START_MS + DAY_MS, 10, withheld=0)
    world.batch(DEPARTURES, 0, cut + DAY_MS, 10, withheld=0)
    world.batch(DEPARTURES, 0, START_MS + 2 * DAY_MS, 500, withheld=0)
    write_log(tmp_path / "egress", EGRESS_ORIGIN, world.egress, cosign=True)
    for since, count in ((cut, 1), (cut + 10 * DAY_MS, 0)):
        logs, out = [tmp_path / "egress"], tmp_path / f"{count}"
        made = run_report(logs, out, trust=trust(), session=spark, since=since, until=since + 10 * DAY_MS)
        told = [each["exception"] for each in made.report.exceptions.records()]
        assert told.count("time-back") == count


@only_slow
def test_what_is_dated_back_by_less_than_a_minute_out_of_a_window_is_named_in_its_report(
    spark: Any, tmp_path: Path
) -> None:
    """In one log alone, and by so little that no clock was set back: behind a leaf of the window stands one that is dated before it."""
    world, cut = World(), START_MS + 30 * DAY_MS
    world.grant(DEPARTURES, START_MS - 1_000)
    world.batch(DEPARTURES, 0, cut - 40_000, 10, withheld=0)
    world.batch(DEPARTURES, 0, cut + 10_000, 10, withheld=0)
    world.batch(DEPARTURES, 0, cut - 30_000, 500, withheld=0)
    world.batch(DEPARTURES, 0, cut + 20_000, 10, withheld=0)
    write_log(tmp_path / "egress", EGRESS_ORIGIN, world.egress, cosign=True)
    made = run_report([tmp_path / "egress"], tmp_path / "out", trust=trust(), session=spark, since=cut)
    rows = [each for each in made.report.exceptions.records() if each["exception"] == "dated-before-window"]
    assert [(each["severity"], each["records"]) for each in rows] == [("notice", 500)]
    assert made.report.logs[0].size > rows[0]["last_leaf"] >= rows[0]["first_leaf"] > 0


@only_slow
def test_what_is_dated_back_before_a_window_begins_is_named_where_it_arrived(
    spark: Any, tmp_path: Path
) -> None:
    """No leaf of the agent's says so, if it writes them before its first of the window: the destination's clock does."""
    world, cut = World(), START_MS + 30 * DAY_MS
    world.grant(DEPARTURES, START_MS - 1_000)
    world.batch(DEPARTURES, 0, START_MS + DAY_MS, 10, withheld=0)
    arrived = len(world.ingress)
    world.batch(DEPARTURES, 0, START_MS + 2 * DAY_MS, 500, withheld=0)
    later = [
        [Leaf(msgspec.structs.replace(each.header, time_ms=cut + 1_000), each.entries) for each in leaves]
        for leaves in world.ingress[arrived:]
    ]
    world.ingress[arrived:] = later
    # Of one envelope's INTENT leaves all but the last one.
    world.batch(DEPARTURES, 0, cut + 2_000, 1_500, withheld=0)
    *parts, last = world.egress[-2]
    assert parts
    dated_back = [
        Leaf(msgspec.structs.replace(each.header, time_ms=START_MS + 2 * DAY_MS), each.entries)
        for each in parts
    ]
    world.egress[-2] = [*dated_back, last]
    world.batch(DEPARTURES, 0, cut + DAY_MS, 10, withheld=0)
    made = run_report(
        write_world(tmp_path, world),
        tmp_path / "out",
        trust=trust(),
        session=spark,
        since=cut,
        until=cut + 10 * DAY_MS,
    )
    told = Counter[str]()
    for each in made.report.exceptions.records():
        told[each["exception"]] += each["records"]
    assert told["announced-outside-window"] == 500 + 1_500 - last.header.records
