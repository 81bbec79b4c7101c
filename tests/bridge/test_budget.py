"""Rates and budgets, with time handed in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bridge.budget import BURST_MS, RateLimit, fits_budget


@given(st.integers(1, 10_000), st.lists(st.tuples(st.integers(1, 5_000), st.integers(0, 500)), max_size=50))
def test_no_more_leaves_than_the_rate_and_one_burst(rate: int, sends: list[tuple[int, int]]) -> None:
    limit, now, sent, last = RateLimit(rate), 0.0, 0, 0
    for size, pause in sends:
        now += pause + limit.wait_ms(now + pause)
        limit.spend(size, now)
        sent += size
        last = size
        assert (sent - last) * 1000 / rate <= now + BURST_MS + 1e-6


def test_without_a_rate_nothing_waits() -> None:
    limit = RateLimit(0)
    limit.spend(1 << 40, 0)
    assert limit.wait_ms(0) == 0


def test_a_budget_is_never_exceeded() -> None:
    assert fits_budget(0, 1 << 60, 1)
    assert fits_budget(100, 60, 40)
    assert not fits_budget(100, 60, 41)
