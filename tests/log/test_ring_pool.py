"""Rings that share memory: never more than the budget, taken with entries and given back with them; the longest idle gives way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from region.limits.budget import Budget
from region.log.ring import ENTRY_OVERHEAD_BYTES, Entry, Ring
from region.log.ring_pool import RingPool

UNIT = 1_000


def append(ring: Ring, size: int = UNIT - ENTRY_OVERHEAD_BYTES) -> None:
    ring.append(Entry(ring.next_offset, ring.next_offset + 1, 0, bytes(size)))


def test_an_idle_ring_holds_nothing_and_the_one_appended_to_longest_ago_gives_way() -> None:
    budget = Budget("ring", 4 * UNIT)
    pool = RingPool(budget)
    idle, old, new = (Ring(pool=pool) for _ in range(3))
    for ring in (old, old, new):
        append(ring)
    assert (budget.used_bytes, len(idle)) == (3 * UNIT, 0)
    append(old)
    append(new)
    # `new` was appended to longer ago than `old` when the last but one came; now `old` gave way.
    assert (len(old), len(new), budget.used_bytes) == (2, 2, 4 * UNIT)
    assert (old.first_offset, old.next_offset) == (1, 3)
    assert old.read(0, 1) is None
    assert budget.refused == 0


def test_what_is_reserved_makes_rings_give_way_and_never_more_than_they_hold() -> None:
    budget = Budget("ring", 4 * UNIT)
    pool = RingPool(budget)
    ring = Ring(pool=pool)
    for _ in range(4):
        append(ring)
    assert not pool.make_room(4 * UNIT + 1)
    assert len(ring) == 4
    assert pool.make_room(3 * UNIT) and budget.take(3 * UNIT)
    assert (len(ring), pool.room_bytes) == (1, UNIT)
    append(ring)
    assert (ring.first_offset, ring.next_offset) == (4, 5)
    assert pool.make_room(UNIT) and budget.take(UNIT)
    # There is no room for a single entry: the ring stays empty, and readers go to the disk.
    append(ring)
    assert (len(ring), ring.first_offset, ring.next_offset) == (0, 6, 6)
    assert (ring.read(6, 1), ring.read(5, 1)) == ([], None)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 3), st.integers(1, 6 * UNIT)),
            st.tuples(st.just("truncate"), st.integers(0, 3), st.integers(0, 5)),
            st.tuples(st.just("clear"), st.integers(0, 3), st.just(0)),
            st.tuples(st.just("reserve"), st.just(0), st.integers(1, UNIT)),
        ),
        max_size=60,
    )
)
def test_the_pool_holds_what_its_rings_hold_and_no_more_than_the_budget(
    steps: list[tuple[str, int, int]],
) -> None:
    budget = Budget("ring", 8 * UNIT)
    pool = RingPool(budget)
    rings = [Ring(bytes_max=3 * UNIT, entries_max=5, pool=pool) for _ in range(4)]
    reserved = 0
    for what, at, amount in steps:
        ring = rings[at]
        match what:
            case "append":
                append(ring, amount)
            case "truncate":
                ring.truncate(max(ring.first_offset, ring.next_offset - amount))
            case "clear":
                ring.clear()
            case _ if pool.make_room(amount) and budget.take(amount):
                reserved += amount
        held = sum(each.bytes_held + len(each) * ENTRY_OVERHEAD_BYTES for each in rings)
        assert pool.held_bytes == held
        assert budget.used_bytes == reserved + held <= budget.limit_bytes
        for each in rings:
            found = each.read(each.first_offset, 1 << 30)
            assert found is not None and len(found) == len(each)
