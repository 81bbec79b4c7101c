"""A RangeSet is a set of integers, written as ranges."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.errors import ProtocolError
from felix.ranges import RangeSet, chunks, pairs

RANGES = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda each: (each[0], each[0] + each[1]))
STEPS = st.lists(st.tuples(st.booleans(), RANGES), max_size=30)


@given(STEPS, RANGES)
def test_it_is_a_set_of_integers(steps: list[tuple[bool, tuple[int, int]]], asked: tuple[int, int]) -> None:
    ranges, model = RangeSet(), set[int]()
    for adding, (first, following) in steps:
        if adding:
            ranges.add(first, following)
            model |= set(range(first, following))
        else:
            ranges.remove(first, following)
            model -= set(range(first, following))
        assert {n for first, following in ranges for n in range(first, following)} == model
        assert ranges.count == len(model)
        flat = ranges.flat()
        assert all(low < high for low, high in pairwise(flat)), "in order, none adjacent or empty"
    wanted = set(range(*asked))
    assert {n for low, high in ranges.within(*asked) for n in range(low, high)} == wanted & model
    assert {n for low, high in ranges.missing(*asked) for n in range(low, high)} == wanted - model
    assert all((n in ranges) == (n in model) for n in range(60))
    assert RangeSet(pairs(ranges.flat())) == ranges == ranges.copy()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=40))
def test_what_is_only_added_to_has_a_floor_and_ranges_above_it(added: list[tuple[int, int]]) -> None:
    ranges, model = RangeSet(), set[int]()
    for start, length in added:
        ranges.add(start, start + length)
        model.update(range(start, start + length))
        floor = next(offset for offset in range(100) if offset not in model)
        assert ranges.end_of(0) == floor
        assert [offset for offset in range(80) if offset in ranges] == sorted(model)
        above = [(start, end) for start, end in ranges if start > floor]
        assert ranges.missing(0, floor) == [] and len(above) + bool(floor) == len(ranges)
        assert all(end < start for (_, end), (start, _) in pairwise(above))
        assert ranges.count - floor == sum(offset > floor for offset in model)
        for offset in range(80):
            assert ranges.end_of(offset) == next(each for each in range(offset, 100) if each not in model)


@given(st.integers(0, 50), st.lists(st.tuples(st.integers(0, 90), st.integers(1, 5)), max_size=20))
def test_the_next_range_is_found(floor: int, added: list[tuple[int, int]]) -> None:
    ranges = RangeSet([(0, floor), *((start, start + length) for start, length in added)])
    held = {offset for offset in range(120) if offset in ranges}
    for offset in range(110):
        if offset not in held:
            later = [each for each in held if each > offset]
            assert ranges.start_after(offset) == (min(later) if later else None)


def test_a_long_set_is_cut_into_lists_of_bounded_length() -> None:
    ranges = [(n * 10, n * 10 + 3) for n in range(25)]
    found = list(chunks(ranges, 10))
    assert [len(flat) for flat in found] == [20, 20, 10]
    assert [pair for flat in found for pair in pairs(flat)] == ranges


@pytest.mark.parametrize("flat", [[1], [3, 3], [5, 2], [-1, 4]])
def test_what_is_no_list_of_ranges_is_refused(flat: list[int]) -> None:
    with pytest.raises(ProtocolError):
        pairs(flat)
