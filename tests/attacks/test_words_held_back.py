"""An agent that keeps its region's word to itself: a revocation, a pause, a deny entry, which it brings neither to the destination nor
into its egress log, and goes on. Both logs of the link verify and reconcile; the source's own log says since when nothing may leave.

The report is of one world, in which the same agent also writes the largest numbers that its leaves may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attacks.conftest import Tally
from attacks.test_former_keys import root_of
from audit_log import POLICY_SEEDS, REGION_ORIGIN, key, region_bundle
from crossing_logs import (
    CREW,
    DEPARTURES,
    ORDERS,
    SIGNED,
    START_MS,
    TERMS,
    World,
    trust,
    write_log,
    write_world,
)
from signed_grants import (
    Signed,
    deny_entry,
    grant_leaves,
    paper_leaf,
    policy_document,
    signed_grant,
    signing_key,
    standing,
)
from slow_runs import only_slow

from audit.agreement import Agreements, Stop
from audit.keys_in_log import KeysInLog
from audit.leaf import TIME_MS_MAX, GapKind, Kind, Leaf, Side
from audit.origin import Origin
from audit.spark.exceptions import BREACH, BROUGHT_MS
from audit.spark.report import EXIT_DIFFERENCES, run_report
from audit.spark.table import COUNT_MAX
from audit.tile_disk import Folder
from audit.trust import Trust
from audit.verify import verify_log
from felix.batch import OFFSET_MAX
from keys.bundle import FormerKeys, KeyEnd
from policy.grant import NEVER, StandingAction
from policy.quantity import Instant
from policy.residency import parse_policy, sign_policy
from policy.signed import SignedDocument

MINUTE_MS = 60_000
PAUSE, RESUME, REVOKE = StandingAction.PAUSE, StandingAction.RESUME, StandingAction.REVOKE


def words(*said: tuple[int, StandingAction, int, str]) -> list[Leaf]:
    """The source's own log: what is agreed, and then its and others' words about the first grant."""
    signed = SIGNED[DEPARTURES]
    leaves = grant_leaves(signed, Side.EGRESS, START_MS - 1_000)
    for time_ms, action, sequence, region in said:
        document = standing(signed.grant, action, region, sequence, at=time_ms)
        leaves.append(paper_leaf(document, signed, time_ms=time_ms))
    return leaves


def stops_of(
    leaves: list[Leaf],
    origin: str = REGION_ORIGIN,
    arrived: Sequence[tuple[str, str]] = (),
    trusting: Trust | None = None,
) -> list[Stop]:
    """`arrived`: grants and streams of which something arrived."""
    trusted = trusting or trust()
    keys = KeysInLog(trusted, origin, lambda ending, index: True)
    agreements = Agreements(trusted, Origin.parse(origin), keys)
    for index, leaf in enumerate(leaves):
        assert not agreements.take(index, leaf, lambda header: header.document)
    outlawed, unasked = agreements.outlawed_stops(arrived)
    assert not unasked
    stops = sorted((*agreements.stops(), *outlawed), key=lambda stop: stop.leaf)
    assert all(stop.document == leaves[stop.leaf].header.document_sha256 for stop in stops)
    return [
        stop._replace(document=b"", until_leaf=None, sure_from_ms=NEVER, sure_until_ms=None) for stop in stops
    ]


def test_a_regions_log_says_from_when_to_when_it_forbade_what_may_leave_it() -> None:
    said = [
        (1, PAUSE, 1, "us-east"),
        (5, RESUME, 2, "us-east"),
        (6, PAUSE, 1, "us-east"),
        (7, PAUSE, 9, "eu-west"),
    ]
    leaves = words(*((START_MS + at, *rest) for at, *rest in said), (START_MS + 9, REVOKE, 3, "us-east"))  # type: ignore[misc]
    other = [
        deny_entry("acme/ops/*", sequence=1),
        deny_entry("acme/ops/*", sequence=2, lifted=True),
        deny_entry("acme/payments/*", region="eu-west"),
        deny_entry("acme/payments/*"),
    ]
    signed = SIGNED[DEPARTURES]
    leaves += [paper_leaf(document, signed, time_ms=START_MS + 20 + at) for at, document in enumerate(other)]
    grant, first = signed.grant, len(grant_leaves(signed))
    assert stops_of(leaves) == [
        Stop(first, "paused", grant, "", "", START_MS + 1, START_MS + 5),
        Stop(first + 4, "revoked", grant, "", "", START_MS + 9, None),
        Stop(first + 5, "denied", "", "acme/ops/*", "", START_MS + 20, START_MS + 21),
        Stop(first + 8, "denied", "", "acme/payments/*", "", START_MS + 23, None),
    ]


def test_a_stop_that_is_said_again_goes_on_from_where_it_began(tally: Tally) -> None:
    """Words less than two minutes apart: nothing arrives against one of them alone for long enough, and all the time against them."""
    pauses = [(START_MS + number * 100_000, PAUSE, number + 1, "us-east") for number in range(5)]
    leaves = words(
        *pauses, (START_MS + 500_000, RESUME, 6, "us-east"), (START_MS + 600_000, PAUSE, 7, "us-east")
    )
    signed, first = SIGNED[DEPARTURES], len(words())
    # Of one number the word that stops holds (`policy.grant.deny_rank`), whichever came first.
    denials = [(1, False), (2, False), (3, True), (3, False), (4, False)]
    for at, (sequence, lifted) in enumerate(denials):
        document = deny_entry("acme/ops/*", sequence=sequence, lifted=lifted)
        leaves.append(paper_leaf(document, signed, time_ms=START_MS + 700_000 + at))
    denied = partial(Stop, word="denied", grant_id="", streams="acme/ops/*", peer="")
    assert stops_of(leaves) == [
        Stop(first, "paused", signed.grant, "", "", START_MS, START_MS + 500_000),
        Stop(first + 6, "paused", signed.grant, "", "", START_MS + 600_000, None),
        denied(first + 7, from_ms=START_MS + 700_000, until_ms=START_MS + 700_002),
        denied(first + 10, from_ms=START_MS + 700_003, until_ms=None),
    ]
    tally("stops said again", 6)


@pytest.mark.parametrize("action", [RESUME, PAUSE])
def test_no_later_word_takes_a_revocation_back(action: StandingAction) -> None:
    leaves = words((START_MS, REVOKE, 1, "us-east"), (START_MS + 1, action, 2, "us-east"))
    assert [stop.until_ms for stop in stops_of(leaves) if stop.word == "revoked"] == [None]


def policy(revision: int, *, allows: bool = True, more: str = "") -> SignedDocument:
    """us-east's policy in another revision. `more`: a line at its end."""
    text = policy_document("us-east", revision=revision).body.decode()
    text = text if allows else text.replace("bases: [scc, adequacy]", "bases: [bcr]")
    return sign_policy(parse_policy(text + more, "us-east"), signing_key("us-east"))


def policies(*said: tuple[int, SignedDocument]) -> list[Leaf]:
    """The source's own log: what is agreed, and then its later policies, each in its minute."""
    signed = SIGNED[DEPARTURES]
    return words() + [
        paper_leaf(document, signed, time_ms=START_MS + minute * MINUTE_MS) for minute, document in said
    ]


def outlawed(
    leaves: list[Leaf], signed: Signed | None = None, stream: str = DEPARTURES, trusting: Trust | None = None
) -> list[tuple[int, int | None]]:
    """From when to when, in minutes."""
    arrived = [((signed or SIGNED[DEPARTURES]).grant, stream)]
    return [
        ((stop.from_ms - START_MS) // MINUTE_MS, stop.until_ms and (stop.until_ms - START_MS) // MINUTE_MS)
        for stop in stops_of(leaves, arrived=arrived, trusting=trusting)
        if stop.word == "outlawed"
    ]


def test_a_policy_forbids_while_it_is_in_force_and_does_not_allow_the_terms(tally: Tally) -> None:
    no, yes = partial(policy, allows=False), policy
    until = f'valid_until: "{Instant(START_MS + 7 * MINUTE_MS)}"\n'
    since = f'valid_from: "{Instant(START_MS + 9 * MINUTE_MS)}"\n'
    logs: list[tuple[list[Leaf], list[tuple[int, int | None]]]] = [
        (policies(), []),
        (policies((3, yes(2))), []),
        (policies((3, no(2))), [(3, None)]),
        (policies((3, no(2)), (5, yes(3))), [(3, 5)]),
        (policies((3, no(2)), (5, no(3)), (8, yes(4))), [(3, 8)]),
        (policies((3, no(2)), (5, yes(3)), (8, no(4))), [(3, 5), (8, None)]),
        # One that another had taken the place of says nothing.
        (policies((3, yes(5)), (5, no(2))), []),
        (policies((3, no(5)), (5, yes(2))), [(3, None)]),
        # Its own dates.
        (policies((3, yes(2, more=until))), [(7, None)]),
        (policies((3, yes(2, more=until)), (8, no(3)), (9, yes(4))), [(7, 9)]),
        (policies((3, yes(2, more=since))), [(3, 9)]),
    ]
    for number, (leaves, found) in enumerate(logs):
        assert outlawed(leaves) == found, number
    tally("policies that outlaw a grant, and give way", len(logs))


def test_a_policy_forbids_no_grant_before_it_was_made_and_of_a_pattern_each_stream_by_its_name() -> None:
    signed = SIGNED[DEPARTURES]
    grant, first = grant_leaves(signed, Side.EGRESS, START_MS), policy(1)
    early = [
        paper_leaf(policy(revision, allows=revision > 2), signed, time_ms=START_MS - 9) for revision in (2, 3)
    ]
    assert outlawed([paper_leaf(first, signed, time_ms=START_MS - 10), *early, *grant[1:]]) == []
    wild = signed_grant(stream="acme/ops/*", destination_stream="acme/ops/*", wildcard=True)
    crew = "deny:\n  - {name: crew-stays, streams: [acme/ops/crew], because: it stays}\n"
    later = paper_leaf(policy(2, more=crew), wild, time_ms=START_MS + 3 * MINUTE_MS)
    leaves = [*grant_leaves(wild, Side.EGRESS, START_MS), later]
    found = {
        name: outlawed(leaves, wild, name)
        for name in ("acme/ops/crew", "acme/ops/tails", "acme/other/crew", "no name")
    }
    assert found == {
        "acme/ops/crew": [(3, None)],
        "acme/ops/tails": [],
        "acme/other/crew": [],
        "no name": [],
    }


def test_an_earlier_text_that_comes_back_under_a_later_key_says_nothing_of_the_time_between() -> None:
    """The policy key was stolen. The region gives it up, and goes back to the first policy that it had, which did not allow what the second one did."""
    former, now = key(POLICY_SEEDS["us-east"]).verify_key.public, key(40)
    first, second, thief = policy(2, allows=False), policy(3), policy(99)
    leaves = policies((1, first), (2, second), (7, thief))
    gone = FormerKeys(policy_keys=(former,), ends=(KeyEnd(REGION_ORIGIN, len(leaves), root_of(leaves)),))
    bundle = region_bundle("us-east", issued_ms=START_MS + 1, policy_keys=(now.verify_key.public,))
    trusting = Trust.of([bundle.with_former((gone,)), region_bundle("eu-west")])
    for back, found in ((first, [(1, 2), (8, None)]), (second, [(1, 2)]), (thief, [(1, 2)])):
        text = parse_policy(back.body.decode(), "us-east")
        again = paper_leaf(
            sign_policy(text, now.private_key), SIGNED[DEPARTURES], time_ms=START_MS + 8 * MINUTE_MS
        )
        assert outlawed([*leaves, again], trusting=trusting) == found


@only_slow
@pytest.mark.parametrize("rate", [0, 1_000])
def test_what_arrived_against_a_policy_that_a_bridge_kept_to_itself_is_told(
    spark: Any, tmp_path: Path, rate: int, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A breach; but where what had crossed before may have waited for the grant's rate, whose crossings are looked at first."""
    signed = signed_grant(
        stream=DEPARTURES, destination_stream=DEPARTURES, rate_bytes=rate, expires=START_MS + 10**10
    )
    monkeypatch.setitem(SIGNED, DEPARTURES, signed)
    monkeypatch.setitem(TERMS, DEPARTURES, signed.terms)
    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    for minute in (1, 3, 5, 9):
        world.batch(DEPARTURES, 0, START_MS + minute * MINUTE_MS, 10, withheld=0.0)
    own = grant_leaves(signed, Side.EGRESS, START_MS - 1_000)
    for minute, document in ((2, policy(2, allows=False)), (7, policy(3))):
        own.append(paper_leaf(document, signed, time_ms=START_MS + minute * MINUTE_MS))
    paths = [*write_world(tmp_path, world), tmp_path / "region"]
    write_log(paths[2], REGION_ORIGIN, [own], cosign=True)
    for path in paths:
        assert verify_log(Folder(path), trust()).ok
    result = run_report(paths, tmp_path / "out", trust=trust(), session=spark)
    found = {
        (row["severity"], row["exception"]): row["records"]
        for row in result.report.exceptions.records()
        if row["exception"].startswith("arrived")
    }
    told = ("notice", "arrived-perhaps-though-outlawed") if rate else (BREACH, "arrived-though-outlawed")
    assert found == {told: 20}
    assert (result.exit_code == EXIT_DIFFERENCES) is not rate
    tally("arrivals against a policy that was held back", 2)


def extremes(world: World) -> None:
    """Every large number that a leaf may have, in sums and in times."""
    for shard in (5, 6, (1 << 31) - 1):
        common = world.granted(DEPARTURES, shard) | {"first_offset": 0, "last_offset": OFFSET_MAX}
        gap = world.header(Kind.GAP, Side.EGRESS, START_MS, DEPARTURES, gap=GapKind.RETENTION, **common)
        world.egress.append([Leaf(gap)])
    for time_ms in (0, TIME_MS_MAX):
        world.batch(DEPARTURES, 7, time_ms, 2, withheld=1.0, receipt=False, arrives=False)
        world.egress[-1] = [leaf for leaf in world.egress[-1] if leaf.header.kind is Kind.WITHHELD]
        world.deny(CREW, time_ms, 501, "No grant.", records=COUNT_MAX, record_bytes=COUNT_MAX)


@only_slow
def test_what_arrived_against_the_sources_word_is_a_breach(spark: Any, tmp_path: Path, tally: Tally) -> None:
    other = signed_grant(stream=DEPARTURES, purpose="marketing", expires=START_MS + 10**10)
    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    world.grant(ORDERS, START_MS - 1_000)
    world.grant(DEPARTURES, START_MS - 1_000, other)
    extremes(world)
    # Minute by minute, one batch of each stream; the source's word comes with minutes 2 (pause) to 8 (resume), 20 (revoke), 30 (deny).
    minutes = (1, 2, 5, 7, 9, 15, 20, 22)
    for minute in minutes:
        world.batch(DEPARTURES, 0, START_MS + minute * MINUTE_MS, 10, withheld=0.0)
    for minute in (*minutes, 40):
        world.batch(ORDERS, 1, START_MS + minute * MINUTE_MS, 10, withheld=0.0)
    own = words(
        (START_MS + 2 * MINUTE_MS, PAUSE, 1, "us-east"),
        (START_MS + 8 * MINUTE_MS, RESUME, 2, "us-east"),
        (START_MS + 20 * MINUTE_MS, REVOKE, 3, "us-east"),
    )
    own[1:1] = grant_leaves(SIGNED[ORDERS], Side.EGRESS, START_MS - 1_000)[1:]
    denied = deny_entry("acme/payments/*", at=START_MS + 30 * MINUTE_MS)
    own.append(paper_leaf(denied, SIGNED[ORDERS], time_ms=START_MS + 30 * MINUTE_MS))
    paths = [*write_world(tmp_path, world), tmp_path / "region"]
    write_log(paths[2], REGION_ORIGIN, [own], cosign=True)
    for path in paths:
        assert verify_log(Folder(path), trust()).ok
    result = run_report(paths, tmp_path / "out", trust=trust(), session=spark)
    rows = result.report.exceptions.records()
    breaches = {(row["exception"], row["stream"]): (row["events"], row["records"]) for row in rows if row["severity"] == BREACH}  # fmt: skip
    assert breaches == {
        ("arrived-though-paused", DEPARTURES): (1, 10),
        ("arrived-though-revoked", DEPARTURES): (1, 10),
        ("arrived-though-denied", ORDERS): (1, 10),
    }
    assert result.exit_code == EXIT_DIFFERENCES and not result.report.totals.differences
    assert BROUGHT_MS == MINUTE_MS
    tally("arrivals against a word that was held back", len(breaches))
    # A leaf of the largest numbers keeps no report from being made.
    assert [row["records"] for row in rows if row["exception"] == "gap-retention"] == [COUNT_MAX]
    tally("leaves with the largest numbers", 7)


def test_of_too_many_policies_about_too_many_streams_is_said_how_many_were_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signed = SIGNED[DEPARTURES]
    agreements = Agreements(trust(), Origin.parse(REGION_ORIGIN))
    for index, leaf in enumerate(policies((3, policy(2, allows=False)), (5, policy(3)))):
        agreements.take(index, leaf, lambda header: header.document)
    arrived = [(signed.grant, DEPARTURES)] * 2
    monkeypatch.setattr("audit.agreement.DECISIONS_ASKED_MAX", 5)
    stops, unasked = agreements.outlawed_stops([("g-unknown", DEPARTURES), *arrived])
    assert ([(stop.leaf, stop.until_leaf) for stop in stops], unasked) == (
        [(len(words()), len(words()) + 1)],
        1,
    )
    monkeypatch.setattr("audit.agreement.POLICIES_MAX", 3)
    agreements.take(
        99, paper_leaf(policy(4), signed, time_ms=START_MS + 9 * MINUTE_MS), lambda header: header.document
    )
    assert agreements.outlawed_stops(arrived) == ((), 2), "which was in force when is not known any more"


def test_where_the_clock_was_set_right_a_word_held_surely_no_longer_than_the_leaves_around_it_say() -> None:
    signed = SIGNED[DEPARTURES]

    def surely(*said: tuple[int, StandingAction]) -> list[tuple[int, int | None]]:
        leaves = words(
            *((START_MS + at * MINUTE_MS, action, at_, "us-east") for at_, (at, action) in enumerate(said, 1))
        )
        agreements = Agreements(trust(), Origin.parse(REGION_ORIGIN))
        for index, leaf in enumerate(leaves):
            agreements.take(index, leaf, lambda header: header.document)
        return [
            ((stop.sure_from_ms - START_MS) // MINUTE_MS, stop.sure_until_ms and (stop.sure_until_ms - START_MS) // MINUTE_MS)
            for stop in agreements.stops()
            if stop.grant_id == signed.grant and stop.word == "paused"
        ]  # fmt: skip

    assert surely((1, PAUSE), (5, RESUME)) == [(1, 5)]
    assert surely((9, RESUME), (2, PAUSE)) == [(9, None)], "it had been ahead, or is behind now"
    assert surely((1, PAUSE), (60, RESUME), (7, RESUME)) == [(1, 7)], "it was ahead when it was resumed"
    assert surely((8, RESUME), (1, PAUSE), (5, RESUME), (9, PAUSE)) == [(8, 5), (9, None)]


@only_slow
@pytest.mark.parametrize(
    "case", ["given way since", "logs that end before", "a pattern", "a clock set right"]
)
def test_a_policy_forbids_as_far_as_the_logs_go(
    spark: Any, tmp_path: Path, case: str, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its region's log was copied before others: then it is not said of what crossed since. Of a pattern each stream is asked for by its name."""
    if case == "a pattern":
        wild = signed_grant(
            stream="acme/ops/*", destination_stream="acme/ops/*", wildcard=True, expires=START_MS + 10**10
        )
        monkeypatch.setitem(SIGNED, DEPARTURES, wild)
        monkeypatch.setitem(TERMS, DEPARTURES, wild.terms)
    signed = SIGNED[DEPARTURES]
    world = World()
    world.grant(DEPARTURES, START_MS - 1_000)
    world.batch(DEPARTURES, 0, START_MS + 4 * MINUTE_MS, 10, withheld=0.0)
    if case == "given way since":
        world.egress.append([paper_leaf(policy(4), signed, time_ms=START_MS + 6 * MINUTE_MS)])
    kept = len(world.egress)
    world.batch(DEPARTURES, 0, START_MS + 9 * MINUTE_MS, 20, withheld=0.0)
    if case == "logs that end before":
        del world.egress[kept:]
    own = grant_leaves(signed, Side.EGRESS, START_MS - 1_000)
    if case == "a clock set right":
        own += [paper_leaf(policy(2), signed, time_ms=START_MS + 30 * MINUTE_MS)]
    no = f"deny:\n  - {{name: stays, streams: [{DEPARTURES}], because: it stays}}\n"
    outlaws = policy(3 if case == "a clock set right" else 2, more=no)
    own += [paper_leaf(outlaws, signed, time_ms=START_MS + 2 * MINUTE_MS)]
    paths = [*write_world(tmp_path, world), tmp_path / "region"]
    write_log(paths[2], REGION_ORIGIN, [own], cosign=True)
    result = run_report(paths, tmp_path / "out", trust=trust(), session=spark)
    found = {
        (row["severity"], row["exception"]): row["records"]
        for row in result.report.exceptions.records()
        if row["exception"].startswith("arrived")
    }
    breach, perhaps = (BREACH, "arrived-though-outlawed"), ("notice", "arrived-perhaps-though-outlawed")
    assert (
        found
        == {
            "given way since": {breach: 10},
            "logs that end before": {breach: 10, perhaps: 20},
            "a pattern": {breach: 30},
            "a clock set right": {perhaps: 30},
        }[case]
    )
    tally("policies as far as the logs go", 1)
