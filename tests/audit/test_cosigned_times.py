"""Leaves that are dated later than a cosignature that covers them, against a comparison of each with each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from audit.cosigned_times import SLACK_MS, DatedLate, TimesOfCosignatures, dated_late

MINUTE_MS = 60_000


def told(cosigned: list[tuple[int, int]], times: list[int], records: int = 1) -> list[DatedLate]:
    """`cosigned`: sizes and times (ms)."""
    found = TimesOfCosignatures()
    for number, (size, time_ms) in enumerate(cosigned):
        found.add(size, time_ms, f"party-{number}")
    each = [found.take(index, time_ms, records) for index, time_ms in enumerate(times)]
    return [one for one in (*each, found.end()) if one is not None]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=5),
    st.lists(st.integers(0, 8), max_size=9),
)
def test_a_leaf_is_told_where_any_cosignature_that_covers_it_is_of_before(
    cosigned: list[tuple[int, int]], minutes: list[int]
) -> None:
    held = [(size, 2 * MINUTE_MS * at) for size, at in cosigned]
    times = [2 * MINUTE_MS * at for at in minutes]
    late = {
        index: time_ms - min(at for size, at in held if size > index)
        for index, time_ms in enumerate(times)
        if any(size > index and time_ms - at > SLACK_MS for size, at in held)
    }
    found = told(held, times)
    covered = [index for one in found for index in range(one.leaf, one.leaf + one.leaves)]
    assert covered == sorted(late)
    assert all(one.records == one.leaves for one in found)
    for one in found:
        assert one.by_ms == max(late[index] for index in range(one.leaf, one.leaf + one.leaves))


def test_clocks_of_two_regions_may_differ_a_little() -> None:
    assert told([(2, 0)], [SLACK_MS, SLACK_MS]) == []
    assert told([(2, 0)], [0, SLACK_MS + 1, 10**9]) == [DatedLate(1, 1, 1, SLACK_MS + 1, "party-0")]
    assert told([], [10**12]) == []


def test_a_proof_is_held_to_its_earliest_cosignature() -> None:
    cosigned = [("eu-west", 1_000), ("ap-south", 2_000)]
    assert dated_late(cosigned, 1_000_000, None) == dated_late((), 10**15) == ()
    assert dated_late([("outside", 0)], 10**15) == ()
    (said,) = dated_late(cosigned, 0, 1_100_000)
    assert said.startswith("when it crossed: a leaf is dated 100 s after eu-west cosigned it")
