"""Leaves of a third region's log that verifies, about other regions' grants: what they say reaches no query as an expression, takes
nothing out of another link's rows, and lends nothing to them. One leaf of anybody's keeps no report from being made.

Tried: GRANT leaves of version 1 with a grant id of somebody else's, patterns that sort first, fit everything, are no expression or take an expression
for ever, hashes of terms that sort first; receipts for more records than a column holds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import audit_log
import pytest
from attacks.conftest import Tally
from audit_log import region_bundle
from crossing_logs import DEPARTURES, SIGNED, START_MS, TERMS, World, write_log, write_world
from slow_runs import only_slow

from audit.leaf import EncodedLeaf, Header, Kind, Leaf, Side, Terms, _encode, decode_header, decode_leaf
from audit.spark.report import EXIT_ONE_SIDE, run_report
from audit.spark.table import COUNT_MAX, pattern_to_regex, total
from audit.trust import Trust

THIRD = "ap-south.acme/audit"
OTHER_STREAM = "acme/ops/salaries"
HOSTILE = (
    "(",
    "[",
    "a{2",
    "\\",
    "\\E(",
    "\\\\EE(",
    "*(",
    "*a" * 200 + "b",
    "**",
    "a*/b*/*",
    "*\n",
    "a/a/a",
    "*/*/*",
    "(?=",
    "\\Q",
    "$",
    "'",
    '"',
    "",
)


@pytest.fixture(autouse=True)
def keys_of_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(audit_log.SEEDS, THIRD, 21)
    monkeypatch.setitem(audit_log.WITNESS_SEEDS, "ap-south.acme/witness", 24)


def claim(stream: str, terms_hash: bytes) -> Leaf:
    """A GRANT leaf of version 1, as only its own code writes it, under the id of a grant between other regions."""
    terms = Terms(purpose="INVENTED", basis="scc", article="y", reference="z")
    made = Header(
        kind=Kind.GRANT, side=Side.EGRESS, time_ms=START_MS, source_region="ap-south", destination_region="eu-west",
        bridge="spiffe://ap-south.acme/bridge/to-eu", stream=stream or "-", destination_stream="x", grant_id=SIGNED[DEPARTURES].grant,
        terms_hash=terms_hash, actor="a", terms=terms,
    )  # fmt: skip
    return decode_leaf(_encode(Leaf(made, b"", 1)))


def encoded(leaf: Leaf) -> EncodedLeaf:
    data = _encode(leaf)
    return EncodedLeaf(decode_header(data), data)


def honest() -> World:
    """A grant, a batch that crossed, and two refusals under the grant's id: of its stream, and of another one."""
    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    world.batch(DEPARTURES, 0, START_MS + 1_000, 40, withheld=0.0)
    for stream in (DEPARTURES, OTHER_STREAM):
        world.deny(stream, START_MS + 1_500, 503, "The grant has expired.", grant_id=SIGNED[DEPARTURES].grant)
    return world


@only_slow
@pytest.mark.spark
def test_a_third_regions_claims_about_a_grant_change_no_row_of_its_link(
    spark: Any, tmp_path: Path, tally: Tally
) -> None:
    paths = write_world(tmp_path, honest())
    hashes = (bytes(32), b"\xff" * 32, TERMS[DEPARTURES].hash())
    claims = [claim(stream, terms_hash) for stream in HOSTILE for terms_hash in hashes]
    refused = Header(
        kind=Kind.DENY, side=Side.EGRESS, time_ms=START_MS, source_region="ap-south", destination_region="eu-west", actor="a",
        action="read", rule="grant", code=503, sentence="No.", stream=DEPARTURES, grant_id=SIGNED[DEPARTURES].grant,
    )  # fmt: skip
    # Version 1 before version 2: each leaf of the log is in its place, and the log verifies.
    leaves = [encoded(leaf) for leaf in (*claims, Leaf(refused, b"", 1), Leaf(refused))]
    write_log(tmp_path / "third", THIRD, [[leaf] for leaf in leaves], cosign=True)  # type: ignore[list-item]
    made = []
    for number, logs in enumerate((paths, [*paths, tmp_path / "third"])):
        everybody = Trust.of(map(region_bundle, ("us-east", "eu-west", "ap-south")))
        made.append(run_report(logs, tmp_path / f"out{number}", trust=everybody, session=spark))
    before, after = (
        [row for row in result.report.register.records() if row["source_region"] == "us-east"]
        for result in made
    )
    assert after == before and [row["denied"] for row in before if row["terms_found"]] == [1]
    assert not [row for row in made[1].report.register.records() if row["source_region"] == "ap-south"]
    # What it says of a grant that it is no party to is found; it keeps nobody's report from being made.
    assert made[0].exit_code == EXIT_ONE_SIDE and made[1].report.totals.records == 40
    tally("claims about another region's grant", len(claims))


@pytest.mark.spark
def test_a_pattern_is_no_expression_and_a_sum_no_overflow(spark: Any, tally: Tally) -> None:
    rows = [(each, re.sub(r"[*](?=/|\Z)", "anything", each)) for each in HOSTILE]
    patterns = spark.createDataFrame(rows, "pattern string, name string")
    found = spark.sql(
        f"SELECT pattern, name, name RLIKE {pattern_to_regex('pattern')} AS fits FROM {{p}}", p=patterns
    )
    assert all(row["fits"] for row in found.collect())
    other = patterns.selectExpr("pattern", "concat(name, '!') AS name")
    found = spark.sql(f"SELECT name RLIKE {pattern_to_regex('pattern')} AS fits, pattern FROM {{p}}", p=other)
    assert [row["pattern"] for row in found.collect() if row["fits"]] == [
        each for each in HOSTILE if each.endswith("*")
    ]
    sums = spark.createDataFrame(
        [(COUNT_MAX, True), (COUNT_MAX, True), (3, False)], "records bigint, counts boolean"
    )
    (row,) = spark.sql(
        f"SELECT {total('records', 'counts')} AS most, {total('records', 'NOT counts')} AS few, {total('records', 'false')} AS none FROM {{s}}",
        s=sums,
    ).collect()
    assert (row["most"], row["few"], row["none"]) == (COUNT_MAX, 3, 0)
    # With a choice at each star, this would end with nobody who waits for it.
    endless = spark.createDataFrame([("*a" * 200 + "b", "a" * 512)], "pattern string, name string")
    (row,) = spark.sql(
        f"SELECT name RLIKE {pattern_to_regex('pattern')} AS fits FROM {{p}}", p=endless
    ).collect()
    assert not row["fits"]
    tally("patterns that are none", len(HOSTILE) + 1)
