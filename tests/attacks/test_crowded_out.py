"""Much of one thing takes the place of nothing else: another region's words, or findings about another shard."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, ORIGINS
from audit_log import EGRESS_ORIGIN, INCARNATION, INGRESS_ORIGIN, TIME_MS, Link, trust
from crossing_logs import DEPARTURES, START_MS, World, write_log, write_world
from crossing_logs import trust as crossing_trust
from long_runs import only_long
from signed_grants import grant_leaves, paper_leaf, signed_grant, signing_key, standing

from audit import crossed as crossed_module
from audit.agreement import Agreements
from audit.continuity import Continuity
from audit.crossed import Crossed, Derived
from audit.leaf import Leaf, Side
from audit.origin import Origin
from audit.tile_disk import Folder
from audit.verify import FINDINGS_MAX, SKIPPED, TIME_BACK, TIME_BACK_MS, Report, verify_log
from policy.grant import Standing, StandingAction, sign_standing
from policy.truncation import TRUNCATIONS_MAX, Accepted, Truncation

SIGNED = signed_grant()


def goes_on(
    action: StandingAction, region: str, offset: int, ended: bytes = b"\xab" * 16
) -> tuple[Leaf, bytes]:
    """A leaf with a resend, or an accepted truncation, and the incarnation that begins there."""
    cut = Truncation(stream=SIGNED.terms.stream, shard=0, incarnation=ended.hex(), epoch=0, offset=offset)
    body = Standing(
        grant=SIGNED.grant,
        action=action,
        region=region,
        sequence=offset,
        at=TIME_MS,
        by="alice",
        truncation=cut,
    )
    document = sign_standing(body, signing_key(region))
    leaf = paper_leaf(document, SIGNED, time_ms=TIME_MS)
    return leaf, Accepted(cut, region, TIME_MS, action is StandingAction.RESEND).incarnation


@pytest.mark.parametrize("grant_first", [True, False])
def test_what_goes_on_is_the_word_of_who_may_say_so(grant_first: bool, tally: Tally) -> None:
    said = {
        (action, region): goes_on(action, region, number)
        for number, (action, region) in enumerate(
            (action, region) for action in (StandingAction.RESEND, StandingAction.ACCEPT_TRUNCATION) for region in ("us-east", "eu-west")
        )
    }  # fmt: skip
    agreements = Agreements(trust(), Origin.parse(ORIGINS[EGRESS]))
    papers, words = grant_leaves(SIGNED, Side.EGRESS), [leaf for leaf, _ in said.values()]
    for index, leaf in enumerate([*papers, *words] if grant_first else [*words, *papers]):
        agreements.take(index, leaf, lambda header: header.document)
    expected = {incarnation for (action, region), (_, incarnation) in said.items() if region == "us-east" or action is StandingAction.ACCEPT_TRUNCATION}  # fmt: skip
    assert set(agreements.crossed.derived) == expected
    tally("words about where a link goes on", len(said))


def test_no_region_takes_the_places_of_anothers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    from audit.spark.arrived_before import _Arrived

    monkeypatch.setattr(crossed_module, "DERIVED_MAX", 4)
    others = {b"o%d" % number: Derived(b"x", None, "ap-south") for number in range(10)}
    honest = {b"h": Derived(b"before", None, "us-east")}
    crossed = Crossed()
    for incarnation, found in (others | honest).items():
        crossed.derive(incarnation, *found)
    assert len(crossed.derived) == 5 and crossed.is_resent(b"h")
    arrived = _Arrived(others | honest, ("us-east", "eu-west"), ())
    assert set(arrived._crossed.derived) == {b"h"}


def test_a_report_copies_no_offsets_for_each_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of incarnations go on from one: under each of them a leaf that takes the destination's word."""
    pytest.importorskip("pyspark")
    from audit.spark.arrived_before import _Arrived

    link, names = Link(), [b"%016d" % number for number in range(100)]
    arrived = _Arrived(
        {name: Derived(INCARNATION, 4, "us-east") for name in names}, ("us-east", "eu-west"), ()
    )
    intents = link.intent(6, withhold=(1,))
    for leaf in link.delivery(intents):
        arrived.take(leaf)

    def copied(*_: object) -> None:
        raise AssertionError("the offsets of one incarnation were copied for another")

    monkeypatch.setattr(crossed_module.OffsetSet, "update", copied)
    link.offset = 0
    (passed_by, _) = link.intent(6, withhold=(0, 1, 3, 4))
    for name in names:
        under = Leaf(msgspec.structs.replace(passed_by.header, incarnation=name), passed_by.entries)
        assert arrived.lacks(under) == [(1, 1), (4, 4)], "1 stayed, 4 lies behind the truncation"


def test_no_number_of_findings_about_one_shard_hides_another(tmp_path: Path, tally: Tally) -> None:

    link, other = Link(), Link(shard=1)
    crowd = [link.gap(1) for _ in range(2)]
    many = [crowd[0]] + [crowd[0]] * (FINDINGS_MAX + 100)
    other_first, _ = other.gap(1), other.gap(4)
    hole = other.gap(1)
    folder = tmp_path / "log"
    write_log(folder, EGRESS_ORIGIN, [link.agreement(), *([leaf] for leaf in many), [other_first], [hole]])
    report = verify_log(Folder(folder), trust(), cosignatures_min=0)
    last = report.size - 1
    assert len(report.findings) + report.left_off == FINDINGS_MAX + 101 and report.left_off
    assert last in report.miscounted and any(found.leaf == last for found in report.findings)
    assert len(report.miscounted) == 2
    tally("findings about one shard", FINDINGS_MAX)


def test_what_breaks_no_rule_and_should_be_seen_is_told_with_its_place(tmp_path: Path) -> None:
    """Offsets that are in no leaf between two grants, and a time before that of the leaf before it."""
    link, other = Link(), signed_grant(purpose="another one")
    intents = link.intent()
    leaves = [*link.agreement(), *grant_leaves(other, Side.EGRESS), *intents, link.ack(intents)]
    skipping = len(leaves)
    link.offset, link.destination_offset = 10, 10
    link.signed, link.grant_id = other, other.grant
    link.time_ms += 60_000
    leaves += link.intent()
    back = len(leaves)
    link.time_ms -= TIME_BACK_MS + 5_000
    leaves += link.intent()
    write_log(tmp_path / "log", EGRESS_ORIGIN, [leaves], cosign=True)
    report = verify_log(Folder(tmp_path / "log"), trust())
    assert report.ok, report.findings
    assert report.skipped == 7
    assert [(seen.leaf, seen.name, seen.records) for seen in report.notices] == [
        (skipping, SKIPPED, 7),
        (back, TIME_BACK, 0),
    ]
    assert "3 to 9 are in no leaf" in report.notices[0].sentence
    honest = Link()
    write_log(tmp_path / "honest", EGRESS_ORIGIN, [honest.agreement(), honest.intent(), honest.intent()])
    assert verify_log(Folder(tmp_path / "honest"), trust(), cosignatures_min=0).notices == ()


@only_long
@pytest.mark.spark
def test_a_report_lists_notices_and_trusts_no_shard_that_was_not_counted(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from audit.spark import report as report_module
    from audit.spark.reconciliation import DIFFERS, RECONCILED

    world = World()
    world.grant(DEPARTURES, START_MS)
    for time_ms in (START_MS + 100_000, START_MS + 10_000):
        world.batch(DEPARTURES, 0, time_ms, 5, withheld=0.0)
    beyond_from = {INGRESS_ORIGIN: sum(map(len, world.ingress))}
    world.batch(DEPARTURES, 2, START_MS + 10_000, 5, withheld=0.0)
    beyond_from[EGRESS_ORIGIN] = sum(map(len, world.egress))
    world.batch(DEPARTURES, 1, START_MS + 11_000, 5, withheld=0.0)
    world.batch(DEPARTURES, 0, START_MS + 12_000, 5, withheld=0.0)
    verify_all = report_module.verify_all

    def beyond(*given: Any) -> list[Report]:
        """As if each log had so many shards that those that begin there are not counted."""
        verified = verify_all(*given)
        for one in verified:
            one.uncounted_from = beyond_from[one.origin]
        return verified

    monkeypatch.setattr(report_module, "verify_all", beyond)
    paths = write_world(tmp_path, world)
    result = report_module.run_report(paths, tmp_path / "out", trust=crossing_trust(), session=spark)
    rows = [row for row in result.report.exceptions.records() if row["exception"] == TIME_BACK]
    assert [(row["severity"], row["stream"], row["log"]) for row in rows] == [
        ("notice", DEPARTURES, EGRESS_ORIGIN),
        ("notice", DEPARTURES, INGRESS_ORIGIN),
    ]
    statuses = {row["shard"]: row["status"] for row in result.report.reconciliation.records()}
    assert statuses == {0: RECONCILED, 1: DIFFERS, 2: DIFFERS}
    assert result.exit_code == report_module.EXIT_DIFFERENCES


def denied(*times_ms: int) -> list[Leaf]:
    """Leaves about nothing that moves, with these times."""
    link = Link()
    return [
        msgspec.structs.replace(leaf, header=msgspec.structs.replace(leaf.header, time_ms=time_ms))
        for leaf, time_ms in ((link.deny(), each) for each in times_ms)
    ]


def test_times_that_run_back_step_by_step_are_told_and_the_largest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("audit.verify.NOTICES_MAX", 2)
    step, day = TIME_BACK_MS - 1_000, 86_400_000
    stairs = [TIME_MS - number * step for number in range(61)]
    ahead = [TIME_MS, TIME_MS + day, TIME_MS + 1, TIME_MS + 2, TIME_MS + 3 - 30 * day, TIME_MS + 4, TIME_MS]
    for number, (times, told, untold) in enumerate(((stairs, 2, 28), (ahead, 2, 0))):
        folder = tmp_path / str(number)
        write_log(folder, EGRESS_ORIGIN, [denied(*times)])
        report = verify_log(Folder(folder), trust(), cosignatures_min=0)
        back = [seen for seen in report.notices if seen.name == TIME_BACK]
        assert (len(back), report.notices_left_off) == (told, untold)
    # One leaf of the future is told once, and takes no other's place.
    assert [seen.leaf for seen in back] == [2, 4]
    assert "2,591,999 s" in back[1].sentence


def test_shards_that_are_not_counted_take_no_place_of_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    for module in ("accounting", "continuity"):
        monkeypatch.setattr(f"audit.{module}.LINK_SHARDS_MAX", 8)
    monkeypatch.setattr("audit.verify.FINDINGS_MAX", 4)
    monkeypatch.setattr("audit.verify.PLACES_MAX", 4)
    honest = Link()
    first, lie = honest.gap(3), honest.gap(2)
    made_up = [Link(shard=number) for number in range(1, 41)]
    folder = tmp_path / "log"
    gaps = [link.gap(1) for link in made_up]
    write_log(
        folder, EGRESS_ORIGIN, [honest.agreement(), [first], *([each] for each in gaps), [first], [lie]]
    )
    report = verify_log(Folder(folder), trust(), cosignatures_min=0)
    at, beyond_from = report.size - 2, len(honest.agreement()) + 8
    assert report.miscounted == (at,) and any(found.leaf == at for found in report.findings)
    assert report.uncounted_from == beyond_from, "of the others nobody knows"
    assert any(found.leaf == beyond_from and "More than 8" in found.sentence for found in report.findings)
    # Without a crowd nothing is said of the rest.
    write_log(tmp_path / "few", EGRESS_ORIGIN, [honest.agreement(), [first], *([each] for each in gaps[:7])])
    few = verify_log(Folder(tmp_path / "few"), trust(), cosignatures_min=0)
    assert few.ok and few.uncounted_from is None
    tally("shards beyond those that are counted", 33)


@pytest.mark.parametrize("crowd", ["one shard", "grants"])
def test_what_is_wrong_in_a_shards_first_leaf_is_listed(
    crowd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """A crossing without a grant, with which its shard begins and ends: nothing else in the log tells of it."""
    monkeypatch.setattr("audit.verify.FINDINGS_MAX", 4)
    monkeypatch.setattr("audit.verify.PLACES_MAX", 4)
    honest, lying = Link(), Link(shard=1, grant_id=f"{99:026d}")
    gap = honest.gap(1)
    others = [honest.grant(grant_id=f"{number:026d}") for number in range(20)]
    many = [gap] * 20 if crowd == "one shard" else others
    write_log(
        tmp_path / "log", EGRESS_ORIGIN, [honest.agreement(), *([leaf] for leaf in many), lying.intent()]
    )
    report = verify_log(Folder(tmp_path / "log"), trust(), cosignatures_min=0)
    assert report.left_off and any(found.leaf == report.size - 1 for found in report.findings)
    tally(f"findings about {crowd} before one about another", len(many))


def test_places_are_not_given_back_where_leaves_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a log that has such a leaf now and then would have any number of shards remembered, and of findings listed."""
    for module in ("accounting", "continuity"):
        monkeypatch.setattr(f"audit.{module}.LINK_SHARDS_MAX", 8)
    continuity = Continuity()
    for number in range(24):
        continuity.apply(Link(shard=number).gap(1), number, lambda: True)
        if number % 4 == 3:
            continuity.forget()
    assert continuity.uncounted_from == 8 and not continuity.miscounted


def test_no_number_of_small_skips_hides_a_wide_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr("audit.accounting.SKIPS_MAX", 3)
    link = Link()
    leaves, wide = link.agreement(), {3: 10**9, 6: 10**8}
    for number in range(8):
        # Something is left out before each grant but the first.
        other = signed_grant(purpose=f"number {number}")
        leaves += grant_leaves(other, Side.EGRESS, link.time_ms)
        link.signed, link.grant_id = other, other.grant
        link.offset += wide.get(number, 5)
        leaves.append(link.gap(1))
    write_log(tmp_path / "log", EGRESS_ORIGIN, [leaves])
    report = verify_log(Folder(tmp_path / "log"), trust(), cosignatures_min=0)
    assert [seen.records for seen in report.notices] == [5, 10**9, 10**8]
    assert report.notices_left_off == 4
    tally("small skips before a wide one", 7)


def test_no_leaf_walks_a_chain_that_no_link_follows(tmp_path: Path, tally: Tally) -> None:
    chain = [b"%016d" % number for number in range(1_000)]
    crossed = Crossed()
    for ended, begun in pairwise(chain):
        crossed.derive(begun, ended, None)
    followed = crossed._goes_on_from(chain[-1])
    assert len(list(followed)) == TRUNCATIONS_MAX
    assert crossed.is_too_long(chain[TRUNCATIONS_MAX + 1]) and not crossed.is_too_long(chain[TRUNCATIONS_MAX])
    tally("incarnations in a chain", len(chain))


def test_a_crossing_under_a_longer_chain_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossed_module, "TRUNCATIONS_MAX", 2)
    monkeypatch.setattr("audit.verify.TRUNCATIONS_MAX", 2)
    link, words, ended = Link(), list[Leaf](), INCARNATION
    told: list[list[str]] = []
    for number in range(1, 4):
        leaf, ended = goes_on(StandingAction.RESEND, "us-east", number, ended)
        words.append(leaf)
        (gap,) = (Link().gap(1),)
        moved = msgspec.structs.replace(
            gap, header=msgspec.structs.replace(gap.header, incarnation=ended, time_ms=TIME_MS)
        )
        folder = tmp_path / str(number)
        write_log(folder, EGRESS_ORIGIN, [link.agreement(), words, [moved]])
        found = verify_log(Folder(folder), trust(), cosignatures_min=0).findings
        told.append([each.sentence for each in found if each.step == 7])
    assert told[:2] == [[], []] and "more than 2 others" in told[2][0]


def test_no_regions_grants_take_the_places_of_anothers(monkeypatch: pytest.MonkeyPatch, tally: Tally) -> None:
    monkeypatch.setattr("audit.agreement.GRANTS_MAX", 3)
    agreements = Agreements(trust(), Origin.parse(ORIGINS[EGRESS]))

    def take(document: Any, **changes: Any) -> list[str]:
        return agreements.take(0, paper_leaf(document, SIGNED, **changes), lambda header: header.document)

    made_up = [f"g-{letter * 16}" for letter in "abcdefghi"]
    told = [take(standing(each, StandingAction.PAUSE, "eu-west"), grant_id=each) for each in made_up]
    assert all("of which eu-west signed the first document" in said[0] for said in told[3:])
    assert not any(told[:3]) and not any(take(each) for each in SIGNED.documents())
    assert agreements.agreement(SIGNED.grant) is not None
    tally("grants of another region", len(made_up))
