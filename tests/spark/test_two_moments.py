"""Two logs of a link in use are never of one moment: what one of them does not reach is open, and what it should have differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import crossing_logs
import msgspec
import pytest
from attacks.test_one_party_alone import EGRESS, INGRESS, files_of
from crossing_logs import DEPARTURES, INCARNATION, SIGNED, START_MS, World, trust, write_world
from long_runs import count
from signed_grants import Signed, signed_grant
from slow_runs import only_slow
from spark.test_truncation_report import ResentWorld

from audit.accounting import AnnouncedAgain
from audit.leaf import LEAF_COLUMNS, GapKind, Kind, Leaf, Side, leaf_row
from audit.spark import begun_again
from audit.spark.reconciliation import (
    DIFFERS,
    LONG_UNANNOUNCED,
    OPEN,
    Given,
    LogEnd,
    coverage_findings,
    envelope_findings,
    envelopes,
    perhaps_before,
)
from audit.spark.report import EXIT_ONE_SIDE, run_report
from audit.spark.shard_key import SHARD_KEY
from audit.spark.source import BatchDigests, _told
from audit.verify import Report, verify_log
from policy import residency

QUIET_MS: Final = 3 * 3_600_000
"""How long nothing crosses in the middle of the history."""
READ: Final = [
    (name, kind)
    for name, kind in LEAF_COLUMNS
    if name
    in {
        "kind",
        "side",
        "time_ms",
        "envelope_sha256",
        "entries_sha256",
        "parts",
        "path",
        "gap",
        "reason",
        "grant_id",
        "terms_hash",
        "first_offset",
        "last_offset",
        "records",
        "record_bytes",
        "source_epoch",
        "destination_first_offset",
        "destination_last_offset",
        *SHARD_KEY,
    }
]
ADDED: Final = {
    "log": "string",
    "leaf_index": "bigint",
    "batch_sha256": "string",
    "receipt_leaf": "bigint",
    "receipt_ms": "bigint",
}
NEVER_ANNOUNCED: Final = "arrival-without-intent"
NEVER_ARRIVED: Final = "receipt-without-arrival"
Found = Counter[tuple[str, str]]
"""How often the findings of a pair of logs have which status and name."""


@pytest.fixture(scope="module")
def policies_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "parse_policy", cache(residency.parse_policy))
        yield


@dataclass
class Live(World):
    """A link whose grant is followed by others, and whose source begins another incarnation."""

    signed: Signed = SIGNED[DEPARTURES]
    incarnation: bytes = INCARNATION
    epoch: int = 1

    def granted(self, stream: str, shard: int) -> dict[str, Any]:
        return super().granted(stream, shard) | {
            "incarnation": self.incarnation,
            "source_epoch": self.epoch,
            "grant_id": self.signed.grant,
            "terms_hash": self.signed.terms.hash(),
        }

    def follow(self, number: int, time_ms: int) -> None:
        """Another grant for the same stream."""
        self.signed = signed_grant(stream=DEPARTURES, expires=START_MS + 10**10 + number)
        self.grant(DEPARTURES, time_ms, self.signed)


class History(NamedTuple):
    egress: list[list[Leaf]]
    ingress: list[list[Leaf]]
    quiet: tuple[int, int]
    """how many appends each has before the quiet hours"""


@cache
def history() -> History:
    """Two shards, batches in flight, withheld records, a gap, a batch that the next grant announces again, one whose answer was lost,
    hours in which nothing crosses, another epoch and another incarnation."""
    world = Live()
    at_ms = START_MS
    world.grant(DEPARTURES, at_ms - 1_000)
    world.batch(DEPARTURES, 0, at_ms, 6, withheld=0.4)
    world.batch(DEPARTURES, 1, at_ms + 10, 4, withheld=0.0)
    world.gap(DEPARTURES, 0, 5, at_ms + 20)
    for number in range(2):
        world.batch(DEPARTURES, 0, at_ms + 30 + number, 3, withheld=0.0)
    # Both are announced before the first is answered.
    world.egress[-3:-1] = reversed(world.egress[-3:-1])
    # It never arrives, and the next grant announces it again.
    world.batch(DEPARTURES, 0, at_ms + 40, 4, withheld=0.3, receipt=False, arrives=False)
    world.offsets[DEPARTURES, 0] -= 4
    world.follow(1, at_ms + 50)
    world.batch(DEPARTURES, 0, at_ms + 60, 5, withheld=0.0)
    # It arrives, and the answer is lost.
    world.batch(DEPARTURES, 0, at_ms + 70, 2, withheld=0.0, receipt=False)
    quiet = len(world.egress), len(world.ingress)
    at_ms += QUIET_MS
    world.follow(2, at_ms)
    world.epoch = 2
    world.batch(DEPARTURES, 0, at_ms + 10, 3, withheld=0.0)
    cut = world.granted(DEPARTURES, 1) | {"first_offset": 2, "last_offset": 3}
    gap = world.header(
        Kind.GAP, Side.EGRESS, at_ms + 20, DEPARTURES, gap=GapKind.TRUNCATION, sentence="Cut back.", **cut
    )
    world.egress.append([Leaf(gap)])
    world.offsets[DEPARTURES, 1], world.incarnation = 2, b"derived" + bytes(9)
    world.batch(DEPARTURES, 1, at_ms + 30, 3, withheld=1.0)
    world.batch(DEPARTURES, 1, at_ms + 40, 3, withheld=0.0)
    return History(world.egress, world.ingress, quiet)


def flat(appends: Sequence[list[Leaf]]) -> list[Leaf]:
    return [leaf for leaves in appends for leaf in leaves]


class Pair(NamedTuple):
    """Two logs of a link as they were given, each by its name and how many leaves it has."""

    egress: tuple[str, int]
    ingress: tuple[str, int]
    again: tuple[AnnouncedAgain, ...] = ()
    followed: tuple[int, ...] = ()
    source_ms: int = 0
    """until when the source's own log goes, where it is given"""


def verified(log: str, leaves: list[Leaf]) -> Report:
    report = verify_log(files_of(log, leaves), trust())
    assert report.ok, report.findings
    return report


def rows_of(leaves: list[Leaf], log: str) -> Iterator[dict[str, Any]]:
    """The rows that `audit.spark.source` makes of a log's leaves, as far as reconciliation reads them."""
    digests = BatchDigests()
    for index, leaf in enumerate(leaves):
        row = leaf_row(leaf)
        told: tuple[str | None, int | None, int | None] = (digests.take(leaf), None, None)
        if leaf.header.kind is Kind.ACK and leaf.header.side is Side.EGRESS:
            told = _told(leaf.header)
        if row["bridge"]:
            yield {name: row[name] for name, _ in READ} | dict(zip(ADDED, (log, index, *told), strict=True))


def frame(spark: Any, rows: list[dict[str, Any]], ddl: str) -> Any:
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    kind = StructType.fromDDL(ddl)
    assert isinstance(kind, StructType)
    return spark.createDataFrame(pa.Table.from_pylist(rows, schema=to_arrow_schema(kind, timezone="UTC")))


def findings(spark: Any, logs: Mapping[str, list[Leaf]], pairs: Sequence[Pair]) -> list[Found]:
    """What reconciliation finds of each pair, each as the logs of a link of its own, all in one job."""
    ends, reports, rows = list[LogEnd](), list[SimpleNamespace](), list[dict[str, Any]]()
    for number, pair in enumerate(pairs):
        names = f"us-{number}.acme/bridge/b", f"eu-{number}.acme/audit"
        for origin, (log, size) in zip(names, pair[:2], strict=True):
            ends.append(LogEnd(origin, size, max(leaf.header.time_ms for leaf in logs[log][:size])))
            rows.append({"number": number, "log": log, "name": origin, "size": size})
        if pair.source_ms:
            ends.append(LogEnd(f"us-{number}.acme/audit", 1, pair.source_ms))
        reports.append(SimpleNamespace(origin=names[0], announced_again=pair.again, followed=pair.followed))
    leaves = spark.sql(
        """
        SELECT leaves.* EXCEPT (log, bridge, source_region, destination_region), name AS log,
               concat('spiffe://us-', number, '.acme/bridge/b') AS bridge, concat('us-', number) AS source_region,
               concat('eu-', number) AS destination_region
        FROM {leaves} AS leaves JOIN {pairs} AS pairs ON leaves.log = pairs.log AND leaf_index < size
        """,
        leaves=frame(
            spark,
            [row for name, each in logs.items() for row in rows_of(each, name)],
            ", ".join(f"{name} {kind}" for name, kind in (*READ, *ADDED.items())),
        ),
        pairs=frame(spark, rows, "number int, log string, name string, size int"),
    )
    marked = begun_again.mark(leaves, cast("Any", reports)).localCheckpoint()
    found = envelope_findings(envelopes(marked, Given(ends))).unionByName(coverage_findings(marked))
    counted = [Found() for _ in pairs]
    for row in found.select("source_region", "status", "finding").collect():
        counted[int(row["source_region"][3:])][row["status"], row["finding"]] += 1
    return counted


class Judged(NamedTuple):
    """What was found of each pair."""

    honest: dict[tuple[int, int], Found]
    """by how many appends of the history each log has"""
    liars: list[Found]
    """of `LIARS`, in order"""


LIARS: Final = (
    ("nothing", "arrived", 0, OPEN, NEVER_ANNOUNCED),
    ("one shard", "arrived", 0, DIFFERS, NEVER_ANNOUNCED),
    ("nothing, later", "arrived", 0, OPEN, LONG_UNANNOUNCED),
    ("nothing", "arrived", START_MS + QUIET_MS, OPEN, LONG_UNANNOUNCED),
    ("withheld", "not withheld", 0, DIFFERS, NEVER_ANNOUNCED),
    ("all", "one shard arrived", 0, DIFFERS, NEVER_ARRIVED),
    ("answered, dated back", "before it arrived", START_MS + 10 * QUIET_MS, OPEN, NEVER_ARRIVED),
    ("told of a far leaf", "one in flight", 0, OPEN, NEVER_ANNOUNCED),
)
"""An egress log, an ingress log, until when the source's own log goes, and what there must be."""


def lies() -> dict[str, list[Leaf]]:
    """Logs that keep something to themselves, by name."""
    whole = history()
    egress, ingress = flat(whole.egress[: whole.quiet[0]]), flat(whole.ingress[: whole.quiet[1]])
    later = World()
    later.deny(DEPARTURES, START_MS + QUIET_MS, 501, "No.")
    stays, crosses = Live(), Live()
    for world, share in ((stays, 1.0), (crosses, 0.0)):
        world.grant(DEPARTURES, START_MS)
        world.batch(DEPARTURES, 0, START_MS, 5, withheld=share, receipt=False, arrives=world is crosses)
    far = Live()
    far.grant(DEPARTURES, START_MS)
    with pytest.MonkeyPatch.context() as patch:
        # The destination keeps it out of its log, and signs a receipt for a leaf that never was.
        patch.setattr(
            crossing_logs,
            "receipt_for",
            lambda ack, intents, _, of=crossing_logs.receipt_for: of(ack, intents, 10**6),
        )
        far.batch(DEPARTURES, 1, START_MS, 4, withheld=0.0, arrives=False)
    told = flat(far.egress)
    far.batch(DEPARTURES, 0, START_MS + 1_000, 4, withheld=0.0)
    late = Live()
    late.grant(DEPARTURES, START_MS)
    late.batch(DEPARTURES, 0, START_MS, 4, withheld=0.0)
    before = flat(late.ingress)
    late.batch(DEPARTURES, 0, START_MS + QUIET_MS, 4, withheld=0.0)
    answered = flat(late.egress)
    answered[-1] = Leaf(msgspec.structs.replace(answered[-1].header, time_ms=START_MS), answered[-1].entries)
    other = flat(crosses.ingress)
    other[-1] = Leaf(msgspec.structs.replace(other[-1].header, envelope_sha256=b"e" * 32), other[-1].entries)
    return {
        "all": egress,
        "answered, dated back": answered,
        "arrived": ingress,
        "before it arrived": before,
        "nothing": whole.egress[0],
        "nothing, later": whole.egress[0] + flat(later.egress),
        "one in flight": flat(far.ingress),
        "told of a far leaf": told,
        "one shard": [leaf for leaf in egress if leaf.header.shard == 0],
        "one shard arrived": [leaf for leaf in ingress if leaf.header.shard == 0],
        "withheld": flat(stays.egress),
        "not withheld": other,
    }


@pytest.fixture(scope="module")
def judged(spark: Any, policies_read_once: None) -> Judged:
    egress, ingress, quiet = history()
    logs = lies() | {EGRESS: flat(egress), INGRESS: flat(ingress)}
    said = {left: verified(EGRESS, flat(egress[:left])) for left in range(1, len(egress) + 1)}
    for right in range(1, len(ingress) + 1):
        verified(INGRESS, flat(ingress[:right]))
    every = [(left, right) for left in said for right in range(1, len(ingress) + 1)]
    edges = {
        each
        for each in every
        if {1, quiet[0], len(egress)} & {each[0]} and {1, quiet[1], len(ingress)} & {each[1]}
    }
    some = [each for at, each in enumerate(every) if each in edges or at % count(5, 1) == 0]
    pairs = [
        Pair((EGRESS, len(flat(egress[:left]))), (INGRESS, len(flat(ingress[:right]))),
             tuple(said[left].announced_again), tuple(said[left].followed))
        for left, right in some
    ]  # fmt: skip
    pairs += [
        Pair((sent, len(logs[sent])), (arrived, len(logs[arrived])), source_ms=source_ms)
        for sent, arrived, source_ms, _, _ in LIARS
    ]
    found = findings(spark, logs, pairs)
    return Judged(dict(zip(some, found, strict=False)), found[len(some) :])


def test_honest_logs_of_two_moments_never_differ(judged: Judged) -> None:
    egress, ingress, quiet = history()
    found, last = judged.honest, (len(egress), len(ingress))

    def is_apart(left: int, right: int) -> bool:
        """Whether hours lie between the two, in which nothing crossed."""
        return (left < quiet[0] and right > quiet[1]) or (left > quiet[0] and right < quiet[1])

    for (left, right), what in found.items():
        assert is_apart(left, right) or {status for status, _ in what} <= {OPEN}, (left, right, what)
    assert found[last] == {(OPEN, "announced-not-answered"): 1}
    # However short one log is, what the other one shows is not left out.
    receipts, arrivals = acks(egress[: quiet[0]]), acks(ingress[: quiet[1]])
    assert found[quiet[0], 1][OPEN, NEVER_ARRIVED] == receipts
    assert found[1, quiet[1]][OPEN, NEVER_ANNOUNCED] == arrivals
    # Nor does it stay open, whichever of them goes on.
    assert found[last[0], 1][DIFFERS, NEVER_ARRIVED] == receipts
    # What the ingress log dates accuses no egress log.
    unannounced = found[1, last[1]]
    assert unannounced[OPEN, NEVER_ANNOUNCED] + unannounced[OPEN, LONG_UNANNOUNCED] == acks(ingress)
    assert unannounced[OPEN, LONG_UNANNOUNCED] > 0


def acks(appends: Sequence[list[Leaf]]) -> int:
    return sum(leaf.header.kind is Kind.ACK for leaf in flat(appends))


def test_what_a_log_keeps_to_itself_does_not_stay_open(judged: Judged) -> None:
    for (sent, arrived, _, status, finding), found in zip(LIARS, judged.liars, strict=True):
        assert {each for each, name in found if name == finding} == {status}, (sent, arrived, found)


def test_what_is_passed_by_is_no_later_than_what_stands_behind_it(spark: Any) -> None:
    """An agent dates the leaf years ahead: what stands behind it in its log says by when it was written."""
    hour, now = 3_600_000, START_MS + QUIET_MS
    logs = {
        # What was passed by at START, dated years ahead, and something behind it hours later; then it alone; then in its time.
        "a": [(START_MS + 1_000 * QUIET_MS, True), (now, False)],
        "b": [(START_MS + 1_000 * QUIET_MS, True)],
        "c": [(now - hour, True), (now, False)],
    }
    rows = [
        {"log": log, "leaf_index": index, "time_ms": time_ms, "trusts": trusts, "bridge": f"spiffe://us-{log}.acme/bridge/b",
         "source_region": f"us-{log}", "destination_region": f"eu-{log}"}
        for log, leaves in logs.items()
        for index, (time_ms, trusts) in enumerate(leaves)
    ]  # fmt: skip
    leaves = frame(
        spark,
        rows,
        "log string, leaf_index bigint, time_ms bigint, trusts boolean, bridge string, source_region string, destination_region string",
    )
    ends = [
        LogEnd(f"us-{log}.acme/bridge/b", len(each), max(time_ms for time_ms, _ in each))
        for log, each in logs.items()
    ] + [LogEnd(f"eu-{log}.acme/audit", 1, now) for log in logs]
    sides = frame(
        spark, [], "bridge string, destination_region string, intent_leaf bigint, arrival_leaf bigint"
    )
    found = (
        perhaps_before(leaves, leaves.where("trusts"), sides, Given(ends)).select("log", "is_ahead").collect()
    )
    assert {row["log"]: row["is_ahead"] for row in found} == {"a": False, "b": True, "c": True}


@only_slow
def test_a_report_whose_ingress_log_is_older(spark: Any, tmp_path: Path) -> None:
    """What a resend passes by arrived before, and the ingress log was copied earlier still."""
    world = ResentWorld()
    world.grant(DEPARTURES, START_MS)
    world.batch(DEPARTURES, 0, START_MS, 10, withheld=0.0)
    world.resend()
    world.batch(DEPARTURES, 0, START_MS + 2_000, 10, withheld=1.0)
    del world.ingress[1:]
    result = run_report(write_world(tmp_path, world), tmp_path / "out", trust=trust(), session=spark)
    assert {(row["status"], row["finding"]) for row in result.report.findings.records()} == {
        (OPEN, "receipt-without-arrival"),
        (OPEN, "passed-by-without-arrival"),
    }
    assert result.exit_code == EXIT_ONE_SIDE, "the source's own log was not given"
