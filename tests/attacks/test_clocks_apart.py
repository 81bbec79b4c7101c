"""Clocks of two regions that are minutes apart: what crossed lawfully is no breach in a report, and a word that an agent keeps to itself
is still found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_words_held_back import MINUTE_MS, PAUSE, RESUME, REVOKE, words
from audit_log import EGRESS_ORIGIN, INGRESS_ORIGIN, REGION_ORIGIN
from crossing_logs import DEPARTURES, SIGNED, START_MS, World, trust, write_log, write_world
from signed_grants import paper_leaf, standing
from slow_runs import only_slow

from audit.agreement import OUTLAWED, Stop
from audit.leaf import Kind, Leaf, Side
from audit.spark.report import run_report
from audit.spark.stops import Clocks, Ranks, Seen, as_of, clocks, rows
from audit.tile_disk import Folder
from audit.verify import verify_log
from policy.grant import StandingAction

SAID = ((2, PAUSE, 1), (10, RESUME, 2), (20, REVOKE, 3))
"""At which minute, by the source's clock."""


def found_in(
    spark: Any, folder: Path, ahead: int, crossings: tuple[int, ...], *, brought: bool
) -> set[tuple[str, str]]:
    """Severity and name of what the report says of arrivals. `ahead`: minutes of the destination's clock; `brought`: its log has the words."""
    world = World()

    def there(leaves: list[Leaf]) -> list[Leaf]:
        return [
            Leaf(
                msgspec.structs.replace(leaf.header, time_ms=leaf.header.time_ms + ahead * MINUTE_MS),
                leaf.entries,
            )
            for leaf in leaves
        ]

    world.grant(DEPARTURES, START_MS - 1_000)
    world.ingress[-1] = there(world.ingress[-1])
    said = [(START_MS + at * MINUTE_MS, action, sequence, "us-east") for at, action, sequence in SAID]
    things: list[tuple[int, StandingAction | None, int]] = [(at, None, 0) for at in crossings]
    if brought:
        things += SAID
    for at, action, sequence in sorted(things, key=lambda thing: thing[0]):
        time_ms = START_MS + at * MINUTE_MS
        if action is None:
            world.batch(DEPARTURES, 0, time_ms, 10, withheld=0.0, change=there)
            continue
        signed = SIGNED[DEPARTURES]
        document = standing(signed.grant, action, "us-east", sequence, at=time_ms)
        world.ingress.append(there([paper_leaf(document, signed, Side.INGRESS, time_ms=time_ms)]))
    paths = [*write_world(folder, world), folder / "region"]
    write_log(paths[2], REGION_ORIGIN, [words(*said)], cosign=True)
    for path in paths:
        assert verify_log(Folder(path), trust()).ok
    result = run_report(paths, folder / "out", trust=trust(), session=spark)
    listed = result.report.exceptions.records()
    return {(row["severity"], row["exception"]) for row in listed if row["exception"].startswith("arrived-")}


@only_slow
@pytest.mark.parametrize(("ahead", "brought"), [(-3, True), (3, False)])
def test_what_crossed_lawfully_is_no_breach(
    spark: Any, tmp_path: Path, ahead: int, brought: bool, tally: Tally
) -> None:
    found = found_in(spark, tmp_path, ahead, (1, 11, 19), brought=brought)
    assert {severity for severity, _ in found} <= {"notice"}
    if brought:
        assert found == set()
    tally("lawful crossings between clocks that are apart", 3)


@only_slow
def test_a_revocation_that_was_held_back_is_found_between_clocks_that_are_apart(
    spark: Any, tmp_path: Path, tally: Tally
) -> None:
    found = found_in(spark, tmp_path, 3, (1, 25), brought=False)
    assert ("breach", "arrived-though-revoked") in found
    tally("words held back between clocks that are apart", 1)


def seen(time_ms: int, kind: Kind) -> Seen:
    return Seen(0, time_ms, kind, "us-east", "eu-west")


def test_one_half_brought_late_does_not_move_what_is_known_of_the_clocks() -> None:
    """Whoever brings documents late may move both bounds by what it brings late of all halves, and by no more."""
    own = {b"1": seen(0, Kind.GRANT), b"2": seen(500, Kind.GRANT), b"3": seen(900, Kind.ACCEPT)}
    other = {
        b"1": seen(10**9, Kind.GRANT),
        b"2": seen(700, Kind.GRANT),
        b"3": seen(850, Kind.ACCEPT),
        b"4": seen(0, Kind.GRANT),
    }
    assert clocks(own, other, "us-east", "eu-west") == Clocks(-50, 200)
    assert clocks(own, other, "us-east", "ap-south") == Clocks(0, 0), "halves of other regions say nothing"
    late = own | {b"5": seen(0, Kind.REVOKE)}, other | {b"5": seen(10**9, Kind.REVOKE)}
    assert clocks(*late, "us-east", "eu-west") == Clocks(-50, 200), "nor does a word that was held back"


def test_each_stop_is_held_to_every_other_regions_log() -> None:
    stop = Stop(4, "paused", "g", "", "", 1, None, b"d" * 32, sure_from_ms=1)
    logs = {
        REGION_ORIGIN: {b"d" * 32: Seen(4, 1, Kind.STANDING, "us-east", "eu-west")},
        INGRESS_ORIGIN: {b"d" * 32: Seen(7, 9, Kind.STANDING, "us-east", "eu-west")},
        "ap-south.acme/audit": {},
    }
    assert list(rows({REGION_ORIGIN: (stop,), INGRESS_ORIGIN: ()}, logs)) == [
        ("us-east", "g", "paused", 1, None, "ap-south.acme/audit", None, 0, 0, False, None, 1, None),
        ("us-east", "g", "paused", 1, None, INGRESS_ORIGIN, 7, 0, 0, False, None, 1, None),
    ]


def test_a_policy_that_stands_in_another_regions_log_is_no_word_that_was_brought() -> None:
    """That log's verification asks no policy of the source: whoever writes it there would have all that arrives behind it passed over."""
    stop = Stop(4, OUTLAWED, "g", "acme/ops/departures", "", 1, None, b"d" * 32, sure_from_ms=1)
    there = Seen(0, 0, Kind.POLICY, "us-east", "us-east")
    logs = {REGION_ORIGIN: {b"d" * 32: there}, INGRESS_ORIGIN: {b"d" * 32: there}}
    (row,) = rows({REGION_ORIGIN: (stop,)}, logs)
    assert row[:3] == ("us-east", "g acme/ops/departures", OUTLAWED) and row[6] is None


def test_where_the_sources_log_was_copied_before_the_others_a_later_policy_ends_its_last_one() -> None:
    stop = Stop(4, OUTLAWED, "g", "acme/ops/departures", "", 100_000, None, sure_from_ms=100_000)
    own: Ranks = {"us-east": (((0, 1), 0), ((0, 2), 100_000))}
    newest = {REGION_ORIGIN: 500_000, EGRESS_ORIGIN: 700_000, INGRESS_ORIGIN: 10**9}

    def ends(*later: tuple[tuple[int, int], int], of: str = EGRESS_ORIGIN) -> tuple[int | None, int | None]:
        ranks = {
            REGION_ORIGIN: own,
            of: {"us-east": (*own["us-east"], *later), "eu-west": (((9, 9), 600_000),)},
        }
        found = as_of(stop, REGION_ORIGIN, ranks, newest)
        assert found.sure_until_ms == found.until_ms
        return found.until_ms, found.told_to_ms

    assert ends() == (None, 700_000)
    assert ends(((0, 3), 600_000), ((1, 1), 650_000)) == (600_000, None)
    assert ends(((0, 3), 439_999)) == (None, 700_000), "the own log goes on behind it, and lacks it"
    assert ends(((0, 3), 600_000), of=INGRESS_ORIGIN) == (None, 700_000), "another region's log shows nothing"
    assert as_of(stop._replace(word="paused"), REGION_ORIGIN, {}, {}).told_to_ms is None
