"""Which shards cannot leave a broker that is drained, and what is said of them; and which moves are counted as done."""

from __future__ import annotations

import pytest
from cluster.samples import SHARD
from cluster.stage import Stage

from region.cluster import draining, registration, transactions
from region.cluster.records import ShardId
from region.cluster.view import ClusterView
from region.metadata.transaction import Snapshot


def seen(stage: Stage, view: ClusterView) -> None:
    """`view` hears of every record as it stands now."""
    entries = stage.store.entries
    view.absorb({key: entries[key] for key in sorted(entries)}, stage.store.revision)


@pytest.mark.parametrize(
    ("brokers", "isr", "minimum", "leaving", "stays"),
    [
        ("abc", "ab", 2, "a", False),
        ("abc", "abc", 2, "a", False),  # with one copy less
        ("abc", "abc", 3, "a", True),
        ("ab", "ab", 2, "a", True),
        ("ab", "ab", 1, "a", False),
        ("ab", "a", 1, "a", False),
        ("a", "a", 1, "a", True),
        ("abc", "ab", 2, "c", False),
        ("abcd", "abc", 2, "cd", False),
        ("abcd", "abc", 2, "bcd", True),
    ],
)
def test_a_shard_stays_where_fewer_others_may_have_copies_than_a_commit_needs(
    brokers: str, isr: str, minimum: int, leaving: str, stays: bool
) -> None:
    stage = Stage(brokers)
    stage.place(isr, min=minimum, replicas=tuple(isr))
    found = draining.bound(stage.view(), {*leaving})
    assert [each.shard for each in found] == ([SHARD] if stays else [])
    assert not draining.bound(stage.view(), {*leaving}, {SHARD.incarnation})


def test_a_broker_without_a_copy_is_not_drained_as_well_where_one_that_is_drained_still_has_to_go() -> None:
    stage = Stage("abcd")
    stage.place("abc", min=3, replicas=tuple("abc"))
    assert stage.do(registration.drain(stage.view(), "a", on=True))
    found = draining.bound(stage.view(), {"d"})
    assert [each.shard for each in found] == [SHARD]
    assert draining.drained_with(stage.view(), found) == {"a"}
    # Where it has to stay whatever becomes of d, d need not.
    stage.die("d")
    assert [each.shard for each in draining.bound(stage.view(), {"a"})] == [SHARD]
    assert not draining.bound(stage.view(), {"d"})


def test_a_broker_that_is_away_may_keep_a_copy_and_gets_none() -> None:
    stage = Stage("abc")
    stage.place("ab", min=2, replicas=("a", "b"))
    stage.die("b")
    assert not draining.bound(stage.view(), {"a"})
    stage.die("c")
    assert draining.bound(stage.view(), {"a"})


def test_it_is_said_which_streams_stay_and_what_to_do_first() -> None:
    stage = Stage("abc")
    stage.place("abc", min=2)
    assert stage.do(registration.drain(stage.view(), "c", on=True))
    view = stage.view()
    found = draining.bound(view, {"b"})
    assert draining.sentence(found) == f"{stage.record().stream} needs 2 copies and 1 broker may have one"
    way = draining.way_out(view, found, {"b"}, "us-east")
    assert way.startswith("Have 4 brokers first (felix region scale 4 --region us-east")
    assert "felix region undrain c" in way
    assert f"felix stream alter {stage.record().stream} --replicas 1 --min-in-sync 1" in way


def test_a_move_counts_once_it_has_ended_where_it_was_to_end() -> None:
    stage = Stage("abc")
    first, second = (
        stage.place("ab", number=number, replicas=("a", "b"), leader="a", min=1) for number in range(2)
    )
    view = stage.view()
    for shard in (first, second):
        assert stage.do(transactions.move(stage.view(), shard, ("a", "c")))
    seen(stage, view)
    assert not view.arrived
    stage.place("ac", number=0, replicas=("a", "b"), target=("a", "c"), leader="a", min=1)
    seen(stage, view)
    assert stage.do(transactions.arrive(stage.view(), first))
    # The other one's leader died half way, and it was given up.
    stage.place("b", number=1, replicas=("a", "b"), leader="b", min=1)
    seen(stage, view)
    assert view.arrived == {ShardId(SHARD.incarnation, 0): view.revision_of(view.keys.shard(first))}
    view.load(Snapshot(tuple(stage.store.entries.values()), stage.store.revision))
    assert first in view.arrived and second not in view.arrived


def test_of_two_words_that_are_given_at_once_the_later_one_finds_the_earlier() -> None:
    stage = Stage("abc")
    first, second = (registration.drain(stage.view(), name, on=True) for name in "ab")
    assert stage.do(first)
    # Between them they leave one broker: what the second rests on has changed, and what is left is counted anew.
    assert not stage.do(second)
    assert stage.do(registration.drain(stage.view(), "b", on=True))
    back = [registration.drain(stage.view(), name, on=False) for name in "ab"]
    assert all(map(stage.do, back)), "brokers that come back do not wait for each other"
