"""A budget that was passed, though both regions' brokers and the bridge are to hold it: by an agent that leaves its own check out, and a
destination that lets it in. Each log shows it by itself, at the leaf that passes it, and a log that uses its budget to the last byte is not found."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_logs_of_version_1 import TERMS, as_version_1
from attacks.test_one_party_alone import EGRESS, INGRESS, ORIGINS, files_of
from audit_log import EGRESS_ORIGIN, INGRESS_ORIGIN, Link
from crossing_logs import DEPARTURES, START_MS, trust, write_world
from signed_grants import signed_grant
from slow_runs import only_slow
from spark.test_two_moments import Live, flat

from audit.leaf import Kind, Leaf, Side
from audit.spark.report import EXIT_DIFFERENCES, run_report
from audit.verify import FASTER, OVER_BUDGET, TIME_BACK, Finding, verify_log
from policy import residency


@pytest.fixture(autouse=True, scope="module")
def policies_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "parse_policy", cache(residency.parse_policy))
        yield


def link(budget: int = 0, rate: int = 0) -> tuple[Live, str]:
    """What crossed under a grant, and its id: two shards, a batch that stays, a gap, one that never arrives and is announced again under another
    grant, which has no limits."""
    signed = signed_grant(stream=DEPARTURES, expires=START_MS + 10**9, budget_bytes=budget, rate_bytes=rate)
    world = Live(signed=signed)
    world.grant(DEPARTURES, START_MS - 1_000, signed)
    world.batch(DEPARTURES, 0, START_MS, 6, withheld=0.3)
    world.batch(DEPARTURES, 1, START_MS + 10, 4, withheld=0.0)
    world.batch(DEPARTURES, 1, START_MS + 20, 4, withheld=1.0)
    world.gap(DEPARTURES, 0, 5, START_MS + 30)
    world.batch(DEPARTURES, 1, START_MS + 40, 5, withheld=0.0)
    world.batch(DEPARTURES, 0, START_MS + 50, 4, withheld=0.0, receipt=False, arrives=False)
    world.offsets[DEPARTURES, 0] -= 4
    world.follow(1, START_MS + 60)
    world.batch(DEPARTURES, 0, START_MS + 70, 4, withheld=0.0)
    return world, signed.grant


def crossed(world: Live, grant: str, log: str) -> list[tuple[int, int]]:
    """Of the leaves by which something crossed under this grant: the index, and how many bytes had by then; an envelope without records
    counts 256."""
    leaves, kind = (flat(world.egress), Kind.INTENT) if log == EGRESS else (flat(world.ingress), Kind.ACK)
    found, total = [], 0
    for index, leaf in enumerate(leaves):
        if (
            leaf.header.kind is kind
            and leaf.header.grant_id == grant
            and leaf.header.side.name == log.upper()
        ):
            total += leaf.header.listed_bytes or 256
            found.append((index, total))
    return found


def findings(world: Live, log: str) -> list[Finding]:
    leaves = flat(world.egress if log == EGRESS else world.ingress)
    return verify_log(files_of(log, leaves), trust()).findings


@pytest.mark.parametrize("log", [EGRESS, INGRESS])
def test_a_budget_is_used_to_the_last_byte_and_no_further(log: str, tally: Tally) -> None:
    (*_, (before, less), (last, most)) = crossed(*link(), log)
    assert findings(link(most)[0], log) == []
    (found,) = findings(link(most - 1)[0], log)
    assert (found.step, found.leaf, found.name) == (7, last, OVER_BUDGET)
    assert f"{most - 1:,} bytes" in found.sentence
    assert [each.leaf for each in findings(link(less - 1)[0], log)] == [before, last]
    tally("budgets that were passed by a byte", 2)


def gaps(budget: int, count: int) -> Live:
    """A link by which nothing crossed but so many gaps, each with an envelope without records."""
    signed = signed_grant(stream=DEPARTURES, expires=START_MS + 10**9, budget_bytes=budget)
    world = Live(signed=signed)
    world.grant(DEPARTURES, START_MS - 1_000, signed)
    for number in range(count):
        world.gap(DEPARTURES, 0, 5, START_MS + number)
    return world


@pytest.mark.parametrize("log", [EGRESS, INGRESS])
def test_envelopes_without_records_count_too(log: str, tally: Tally) -> None:
    assert findings(gaps(1_024, 4), log) == []
    (found,) = findings(gaps(1_023, 4), log)
    assert found.name == OVER_BUDGET
    tally("budgets that were passed by envelopes without records", 1)


def test_a_gap_that_grew_before_its_envelope_was_answered_counts_once() -> None:
    """Agents of before did not ask for the second envelope, and an honest log of theirs is not found."""
    world = gaps(256, 1)
    answer = world.egress.pop()
    grown = world.egress[-1][-1].header
    gap = msgspec.structs.replace(world.egress[-1][0].header, first_offset=5, last_offset=7)
    longer = msgspec.structs.replace(grown, last_offset=7, envelope_sha256=b"e" * 32)
    world.egress.append([Leaf(gap), Leaf(longer)])
    assert answer[0].header.kind is Kind.ACK and findings(world, EGRESS) == []


def test_envelopes_without_records_that_begin_at_one_offset_count_but_for_one(tally: Tally) -> None:
    """An agent that writes ever longer ones, or ever the same, as if its gap had grown before it was answered."""

    def found(budget: int, lasts: list[int]) -> int:
        world = gaps(budget, 1)
        world.egress.pop()
        gap, first = (leaf.header for leaf in world.egress[-1])
        gap = msgspec.structs.replace(gap, first_offset=5, last_offset=max(lasts))
        again = [
            Leaf(msgspec.structs.replace(first, last_offset=last, envelope_sha256=bytes([number]) * 32))
            for number, last in enumerate(lasts)
        ]
        world.egress.append([Leaf(gap), *again] if max(lasts) > 4 else again)
        over = [each for each in findings(world, EGRESS) if each.name == OVER_BUDGET]
        return len(over)

    longer = [7 + number for number in range(12)]
    assert [found(number * 256, longer) for number in (12, 11, 6, 1)] == [0, 1, 6, 11]
    assert found(256, [4, 4, 4]) == 3, "the same once more is none that grew"
    tally("envelopes without records at one offset", 14)


def test_an_envelope_without_records_that_has_the_name_of_the_one_before_it_counts(tally: Tally) -> None:
    def found(budget: int, *, part: int = 0, parts: int = 1, shard: int = 1) -> list[str]:
        world, _ = link(budget)
        before = next(
            block for block in world.egress if any(leaf.header.kind is Kind.INTENT for leaf in block)
        )
        (last,) = [leaf.header for leaf in before if leaf.header.kind is Kind.INTENT][-1:]
        empty = msgspec.structs.replace(
            last, shard=shard, records=0, record_bytes=0, part=part, parts=parts, path=()
        )
        before.append(Leaf(empty))
        return [each.name for each in findings(world, EGRESS) if each.name == OVER_BUDGET]

    (*_, (_, most)) = crossed(*link(), EGRESS)
    assert found(most + 256) == []
    assert OVER_BUDGET in found(most)
    assert OVER_BUDGET in found(most, shard=0)
    assert OVER_BUDGET in found(most, shard=0, part=1, parts=2), "a second part, and there was no first"
    tally("envelopes without records under another one's name", 3)


@pytest.mark.parametrize("side", [Side.EGRESS, Side.INGRESS])
def test_the_budget_that_leaves_of_version_1_state_is_asked_too(side: Side) -> None:
    def found(budget: int) -> list[str]:
        ends = Link(grant_id="g-invented")
        intents = ends.intent()
        leaves = [ends.grant(side), *(intents if side is Side.EGRESS else ends.delivery(intents))]
        old = [as_version_1(leaf) for leaf in leaves]
        stated = msgspec.structs.replace(TERMS, budget_bytes=budget)
        old[0] = Leaf(msgspec.structs.replace(old[0].header, terms=stated), version=1)
        report = verify_log(files_of(EGRESS if side is Side.EGRESS else INGRESS, old), trust())
        return [each.name for each in report.findings]

    size = sum(leaf.header.record_bytes for leaf in Link().intent())
    assert found(size) == []
    assert found(size - 1) == [OVER_BUDGET]


def test_what_crossed_faster_than_its_rate_is_told(tally: Tally) -> None:
    def told(rate: int, log: str = EGRESS) -> list[str]:
        world, _ = link(rate=rate)
        report = verify_log(files_of(log, flat(world.egress if log == EGRESS else world.ingress)), trust())
        assert report.ok
        return [each.name for each in report.notices]

    assert told(1) == [FASTER]
    assert told(1_000) == []
    assert told(1, INGRESS) == [], "arrivals come in bursts"
    tally("rates that were passed", 1)


def paced(rate: int, times: list[tuple[int, int]], other: list[int] | None = None) -> list[str]:
    """What is told of an egress log under this rate, bytes a second, with a batch of so many records at each time (ms after the start), and under
    another grant, which has none, one at each of the `other` times."""
    signed = signed_grant(stream=DEPARTURES, expires=START_MS + 6 * 10**9, rate_bytes=rate)
    world = Live(signed=signed)
    world.grant(DEPARTURES, START_MS - 1_000, signed)
    for at_ms, records in times:
        world.batch(DEPARTURES, 0, START_MS + at_ms, records, withheld=0.0)
    if other:
        world.follow(1, START_MS + other[0])
        for at_ms in other:
            world.batch(DEPARTURES, 1, START_MS + at_ms, 1, withheld=0.0)
    report = verify_log(files_of(EGRESS, flat(world.egress)), trust())
    assert report.ok
    return [each.name for each in report.notices]


def test_a_burst_is_told_however_quiet_it_was_before_and_after(tally: Tally) -> None:
    month_ms = 30 * 86_400_000
    burst = [(month_ms + 100 * number, 20) for number in range(20)]
    assert paced(20, burst) == [FASTER]
    assert paced(20, [(0, 1), *burst, (2 * month_ms, 1)]) == [FASTER], "the average is far below the rate"
    assert paced(1_000_000, [(0, 1), *burst, (2 * month_ms, 1)]) == []
    # One batch is taken at once, however large.
    assert paced(1, [(0, 1), (month_ms, 60), (2 * month_ms, 1)]) == []
    tally("bursts behind quiet times", 4)


def test_a_leaf_of_another_grant_that_is_dated_back_hides_no_burst(tally: Tally) -> None:
    burst = [(1_000_000 + 100 * number, 20) for number in range(20)]
    assert sorted(paced(20, burst, [1_100_000, 900_000])) == [FASTER, TIME_BACK]
    # Nor does one of its own: what follows is counted by itself.
    dated = [(1_000_000, 1), *((900_000 + 100 * number, 20) for number in range(20))]
    assert sorted(paced(20, dated)) == [FASTER, TIME_BACK]
    tally("leaves dated back beside a burst", 2)


@only_slow
def test_the_report_calls_it_a_breach_in_either_log(spark: Any, tmp_path: Path, tally: Tally) -> None:
    world, grant = link(1_000, 1)
    result = run_report(write_world(tmp_path, world), tmp_path / "out", trust=trust(), session=spark)
    report, wanted = result.report, {log: crossed(world, grant, log) for log in (EGRESS, INGRESS)}
    breaches = {row["log"]: row for row in report.exceptions.records() if row["severity"] == "breach"}
    assert {row["exception"] for row in breaches.values()} == {OVER_BUDGET}
    for log, origin in ((EGRESS, EGRESS_ORIGIN), (INGRESS, INGRESS_ORIGIN)):
        beyond = [index for index, by_then in wanted[log] if by_then > 1_000]
        row = breaches[origin]
        assert ORIGINS[log] == origin
        assert (row["first_leaf"], row["last_leaf"], row["events"]) == (beyond[0], beyond[-1], len(beyond))
    assert FASTER in {row["exception"] for row in report.exceptions.records()}
    limits = {
        tuple(row["grant_ids"]): (row["budget_bytes"], row["rate_bytes_per_second"])
        for row in report.register.records()
    }
    assert limits[grant,] == (1_000, 1)
    assert sorted(limits.values()) == [(0, 0), (1_000, 1)]
    assert result.exit_code == EXIT_DIFFERENCES
    tally("reports of a budget that was passed", 1)
