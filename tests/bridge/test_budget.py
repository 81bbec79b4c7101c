"""Rates and budgets, with time handed in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bridge.budget import BURST_S, fits_budget, rate_limit


@given(st.integers(1, 10_000), st.lists(st.tuples(st.integers(1, 5_000), st.integers(0, 500)), max_size=50))
def test_no_more_leaves_than_the_rate_and_one_burst(rate: int, sends: list[tuple[int, int]]) -> None:
    limit, now_s, sent, last = rate_limit(rate, 0.0), 0.0, 0, 0
    assert limit is not None
    for size, pause_ms in sends:
        now_s += pause_ms / 1000
        now_s += limit.wait_s(now_s)
        limit.charge(size, now_s)
        sent += size
        last = size
        assert (sent - last) / rate <= now_s + BURST_S + 1e-9


def test_without_a_rate_nothing_waits() -> None:
    assert rate_limit(0, 0.0) is None


def test_a_budget_is_never_exceeded() -> None:
    assert fits_budget(0, 1 << 60, 1)
    assert fits_budget(100, 60, 40)
    assert not fits_budget(100, 60, 41)
