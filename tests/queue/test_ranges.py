"""Done ranges against a set."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from region.queue.ranges import DoneRanges


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=40))
def test_ranges_hold_what_a_set_holds(added: list[tuple[int, int]]) -> None:
    ranges, model = DoneRanges(), set[int]()
    for start, length in added:
        ranges.add(start, start + length)
        model.update(range(start, start + length))
        floor = next(offset for offset in range(100) if offset not in model)
        assert ranges.floor == floor
        assert [offset for offset in range(80) if offset in ranges] == sorted(model)
        pairs = list(ranges)
        assert all(floor < start < end for start, end in pairs)
        assert all(end < start for (_, end), (start, _) in pairwise(pairs))
        assert ranges.above == sum(offset > floor for offset in model)
        for offset in range(80):
            assert ranges.end_of(offset) == next(each for each in range(offset, 100) if each not in model)


@given(st.integers(0, 50), st.lists(st.tuples(st.integers(0, 90), st.integers(1, 5)), max_size=20))
def test_the_next_range_is_found(floor: int, added: list[tuple[int, int]]) -> None:
    ranges = DoneRanges(floor, [(start, start + length) for start, length in added])
    done = {offset for offset in range(120) if offset in ranges}
    for offset in range(ranges.floor, 110):
        if offset not in done:
            later = [each for each in done if each > offset]
            assert ranges.start_after(offset) == (min(later) if later else None)
