"""Places: spread over hosts and zones, balanced, and stable where brokers come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from region.cluster.placement import Planning, Site, Wish, place, plan
from region.cluster.records import ShardId


def alone(count: int, **changed: bool) -> list[Site]:
    """Brokers on hosts of their own."""
    return [Site(f"b{n}", f"h{n}") for n in range(count)]


def copies(places: Mapping[ShardId, tuple[str, ...]]) -> Counter[str]:
    return Counter(broker for replicas in places.values() for broker in replicas)


def leads(places: Mapping[ShardId, tuple[str, ...]]) -> Counter[str]:
    return Counter(replicas[0] for replicas in places.values())


def moved(before: Mapping[ShardId, tuple[str, ...]], after: Mapping[ShardId, tuple[str, ...]]) -> int:
    return sum(len({*after[shard]} - {*before[shard]}) for shard in after)


def wish(shards: int, replicas: int, *, spread: bool = True, stream: int = 0) -> Wish:
    return Wish(f"{stream:032x}", shards, replicas, spread)


@st.composite
def regions(draw: st.DrawFn) -> list[Site]:
    hosts = draw(st.integers(1, 6))
    zone_of = [f"z{draw(st.integers(0, 2))}" for _ in range(hosts)]
    on = draw(st.lists(st.integers(0, hosts - 1), min_size=1, max_size=8))
    return [Site(f"b{n}", f"h{host}", zone_of[host]) for n, host in enumerate(on)]


WISHES = st.lists(
    st.builds(wish, st.integers(1, 9), st.integers(1, 4), spread=st.booleans()), min_size=1, max_size=4
).map(
    lambda found: [Wish(f"{n:032x}", each.shards, each.replicas, each.spread) for n, each in enumerate(found)]
)


def spread_of(sites: Sequence[Site], replicas: Sequence[str]) -> tuple[int, int]:
    by_name = {site.broker: site for site in sites}
    hosts = Counter(by_name[broker].host for broker in replicas)
    zones = Counter(by_name[broker].zone for broker in replicas)
    return sum(n * (n - 1) for n in hosts.values()), sum(n * (n - 1) for n in zones.values())


@settings(max_examples=30, deadline=None)
@given(regions(), WISHES, st.randoms(use_true_random=False))
def test_copies_are_as_many_as_wanted_and_share_hosts_only_where_there_are_too_few(
    sites, wishes, random
) -> None:  # type: ignore[no-untyped-def]
    places = plan(sites, wishes, {})
    assert len(places) == sum(each.shards for each in wishes)
    hosts = {site.host for site in sites}
    zones = {site.zone for site in sites}
    for each in wishes:
        groups = {places[ShardId(each.incarnation, number)] for number in range(each.shards)}
        assert each.spread or len(groups) == 1, "together"
        for replicas in groups:
            assert len(set(replicas)) == len(replicas) == min(each.replicas, len(sites))
            used = {site.host for site in sites if site.broker in replicas}
            assert len(used) == min(len(replicas), len(hosts))
            if len(hosts) == len(sites):
                used_zones = {site.zone for site in sites if site.broker in replicas}
                assert len(used_zones) == min(len(replicas), len(zones))
    shuffled = list(sites), list(wishes)
    for each in shuffled:
        random.shuffle(each)
    assert plan(*shuffled, {}) == places, "whatever the order"
    assert plan(sites, wishes, places) == places, "nothing moves where nothing changed"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(0, 60), st.integers(1, 3))
def test_of_brokers_on_hosts_of_their_own_each_has_its_share_and_a_join_moves_one_share(
    count: int, shards: int, replicas: int
) -> None:
    wishes = [wish(shards, replicas)]
    places: dict[ShardId, tuple[str, ...]] = {}
    for brokers in range(1, count + 1):
        before, places = places, plan(alone(brokers), wishes, places)
        had = min(replicas, brokers - 1)
        added = shards * (min(replicas, brokers) - had)
        if before:
            assert moved(before, places) - added <= shards * min(replicas, brokers) // brokers
        for counted in (copies(places), leads(places)):
            numbers = [counted[f"b{n}"] for n in range(brokers)]
            assert max(numbers) - min(numbers) <= 1


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 7), st.integers(1, 60), st.integers(1, 3), st.data())
def test_draining_moves_what_the_broker_has_and_for_the_balance_at_most_one_share(
    count: int, shards: int, replicas: int, data: st.DataObject
) -> None:
    sites = alone(count)
    before = plan(sites, [wish(shards, replicas)], {})
    gone = data.draw(st.sampled_from([site.broker for site in sites]))
    drained = [Site(site.broker, site.host, drain=site.broker == gone) for site in sites]
    after = plan(drained, [wish(shards, replicas)], before)
    assert gone not in copies(after)
    share = sum(copies(after).values()) // (count - 1)
    assert moved(before, after) <= copies(before)[gone] + share


def test_a_broker_that_is_not_alive_keeps_what_it_has_and_gets_nothing() -> None:
    before = plan(alone(3), [wish(6, 2)], {})
    sites = [Site("b0", "h0", alive=False), *alone(4)[1:]]
    after = plan(sites, [wish(6, 2), wish(6, 2, stream=1)], before)
    assert copies(after)["b0"] <= copies(before)["b0"] == 4
    assert not any("b0" in replicas for shard, replicas in after.items() if shard not in before)


def test_a_host_of_its_own_is_worth_a_move_and_a_busier_broker() -> None:
    crowded = [Site("b1", "h1"), Site("b2", "h1")]
    before = plan(crowded, [wish(6, 2)], {})
    after = plan([*crowded, Site("b3", "h2")], [wish(6, 2)], before)
    assert copies(after)["b3"] == 6
    assert all(spread_of([*crowded, Site("b3", "h2")], replicas) == (0, 2) for replicas in after.values())


def test_many_shards_on_uneven_zones_stay_balanced_within_their_zones() -> None:
    sites = [Site("b1", "h1", "z1"), *(Site(f"b{n}", f"h{n}", "z2") for n in range(2, 5))]
    places = plan(sites, [wish(30, 2)], {})
    assert copies(places) == {"b1": 30, "b2": 10, "b3": 10, "b4": 10}
    assert max(leads(places).values()) - min(leads(places).values()) <= 1


def test_fewer_copies_keep_the_leader() -> None:
    before = plan(alone(4), [wish(8, 3)], {})
    after = plan(alone(4), [wish(8, 2)], before)
    assert all({*after[shard]} < {*before[shard]} for shard in before)


def test_without_a_broker_that_may_have_any_there_is_no_place() -> None:
    assert plan([Site("b1", "h1", drain=True)], [wish(2, 3)], {}) == {
        ShardId(f"{0:032x}", 0): (),
        ShardId(f"{0:032x}", 1): (),
    }


def test_a_plan_that_is_made_by_slices_is_the_plan() -> None:
    sites = [Site(f"b{n}", f"h{n}", f"z{n % 3}") for n in range(7)]
    before = plan(sites[:6], [wish(40, 3)], {})
    for wishes, current in (([wish(40, 3), wish(9, 2, stream=1, spread=False)], before), ([], {})):
        planning, slices = Planning(sites, wishes, current), 0
        while (made := planning.advance(20)) is None:
            slices += 1
        assert made == plan(sites, wishes, current) and planning.advance(1) == made
        assert slices > 20 or not wishes


def test_streams_of_one_group_get_the_place_of_the_one_that_has_one() -> None:
    sites = alone(4)
    group = [Wish(f"{n:032x}", 2, 1, groups=("jobs",)) for n in range(3)]
    others = [Wish(f"{n:032x}", 1, 1) for n in range(3, 12)]
    first = plan(sites, [*group, *others], {})
    assert len({first[ShardId(each.incarnation, number)] for each in group for number in range(2)}) == 1
    present = {ShardId(group[1].incarnation, number): ("b3",) for number in range(2)}
    later = plan(sites, [*group, *others], present)
    assert {later[ShardId(each.incarnation, number)] for each in group for number in range(2)} == {("b3",)}


def test_streams_of_one_group_that_have_different_places_keep_them() -> None:
    group = [Wish(f"{n:032x}", 1, 1, groups=("jobs",)) for n in range(3)]
    present = {
        ShardId(each.incarnation, 0): (broker,) for each, broker in zip(group, ("b1", "b2"), strict=False)
    }
    places = plan(alone(3), group, present)
    assert [places[ShardId(each.incarnation, 0)] for each in group] == [("b1",), ("b2",), ("b1",)]


def test_streams_of_one_group_that_want_other_numbers_of_copies_are_placed_by_themselves() -> None:
    one, three = Wish("1" * 32, 1, 1, groups=("jobs",)), Wish("2" * 32, 1, 3, groups=("jobs",))
    places = plan(alone(3), [one, three], {})
    assert len(places[ShardId(one.incarnation, 0)]) == 1 and len(places[ShardId(three.incarnation, 0)]) == 3


def test_a_stream_stands_where_its_first_group_does_whatever_its_second_says() -> None:
    common, one, one_dead, other = (f"{n:032x}" for n in range(4))
    wishes = [
        Wish(common, 1, 1, groups=("common", "all")),
        Wish(one, 1, 1, groups=("one", "all")),
        Wish(one_dead, 1, 1, groups=("one", "all")),
        Wish(other, 1, 1, groups=("other", "all")),
    ]
    present = {ShardId(one, 0): ("b2",), ShardId(other, 0): ("b0",)}
    places = plan(alone(3), wishes, present)
    assert places[ShardId(one_dead, 0)] == ("b2",)
    assert places[ShardId(common, 0)] in {("b0",), ("b2",)}
    assert places[ShardId(one, 0)] == ("b2",) and places[ShardId(other, 0)] == ("b0",)


@settings(max_examples=30, deadline=None)
@given(regions(), WISHES, WISHES)
def test_new_streams_are_placed_by_the_same_rules_and_move_nothing(sites, old, new) -> None:  # type: ignore[no-untyped-def]
    before = plan(sites, old, {})
    wishes = [Wish(f"{100 + n:032x}", each.shards, each.replicas, each.spread) for n, each in enumerate(new)]
    places = place(sites, wishes, before)
    assert place(sites[::-1], wishes[::-1], before) == places, "whatever the order"
    assert not places.keys() & before.keys()
    hosts = {site.host for site in sites}
    for each in wishes:
        found = {places[ShardId(each.incarnation, number)] for number in range(each.shards)}
        assert each.spread or len(found) == 1, "together"
        for replicas in found:
            assert len(set(replicas)) == len(replicas) == min(each.replicas, len(sites))
            used = {site.host for site in sites if site.broker in replicas}
            assert len(used) == min(len(replicas), len(hosts))


def test_streams_that_come_one_by_one_give_each_broker_its_share_of_copies_and_leaders() -> None:
    sites, places = [*alone(5), Site("gone", "h9", alive=False), Site("drained", "h8", drain=True)], {}
    for number in range(40):
        places |= place(sites, [wish(1, 3, stream=number)], places)
    assert {*copies(places).values()} == {24} and {*leads(places).values()} <= {7, 8, 9}
    assert not {"gone", "drained"} & copies(places).keys()


def test_a_new_stream_of_a_group_gets_the_place_of_the_one_that_has_one() -> None:
    placed, joins = Wish("1" * 32, 2, 2, groups=("a", "b")), Wish("2" * 32, 1, 2, groups=("b", "c"))
    before = {ShardId(placed.incarnation, number): ("b2", "b0") for number in range(2)}
    [found] = place(alone(3), [joins, placed], before).values()
    assert found != ("b2", "b0") and "b1" in found, "neither of its groups is the other's in that place"
    found = place(alone(3), [Wish(joins.incarnation, 1, 2, groups=("c", "b")), placed], before)
    assert found == {ShardId(joins.incarnation, 0): ("b2", "b0")}
    assert place([Site("b0", "h0", drain=True)], [joins], {}) == {ShardId(joins.incarnation, 0): ()}
