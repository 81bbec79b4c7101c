"""A rate, with time handed in: over any time no more than it, one burst, and the last charge."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from felix.rate import TokenBucket

BURST_S = 1.0


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 50_000)), min_size=1, max_size=40),
)
def test_whoever_waits_for_a_bucket_never_goes_faster_than_its_rate(
    rate: int, uses: list[tuple[float, int]]
) -> None:
    bucket, now, used = TokenBucket(rate, rate * BURST_S, 0.0), 0.0, 0
    for pause_s, amount in uses:
        now += pause_s
        now += bucket.wait_s(now)
        assert bucket.wait_s(now) < 1e-6 * max(1.0, now)
        # Before each use there is no debt, so what was used before is paid for by time and one burst.
        assert used <= rate * (now + BURST_S) * (1 + 1e-9) + 1
        bucket.charge(amount, now)
        used += amount


def test_debt_is_counted_as_long_as_it_lasted() -> None:
    bucket = TokenBucket(100, 100, 0.0)
    bucket.charge(300, 0.0)
    assert bucket.wait_s(0.0) == 2.0
    assert bucket.wait_s(1.0) == 1.0
    assert bucket.wait_s(10.0) == 0.0
    assert bucket.debt_s == 2.0


def test_whoever_must_not_go_beyond_is_told_how_long_to_wait() -> None:
    bucket = TokenBucket(2.0, 3.0, 0.0)
    assert bucket.lack_s(3, 0.0) == 0.0
    bucket.charge(3, 0.0)
    assert bucket.lack_s(1, 0.0) == 0.5
    assert bucket.lack_s(1, 0.25) == 0.25
    assert bucket.lack_s(1, 0.5) == 0.0
    assert bucket.lack_s(3, 100.0) == 0.0 < bucket.lack_s(4, 100.0), (
        "what was not used is not saved beyond the burst"
    )


def test_without_a_burst_a_pause_saves_nothing() -> None:
    bucket = TokenBucket(100.0, 0.0, 0.0)
    bucket.charge(50, 10.0)
    assert bucket.wait_s(10.0) == 0.5


def test_a_debt_stays_at_another_rate() -> None:
    bucket = TokenBucket(100.0, 100.0, 0.0)
    bucket.charge(300, 0.0)
    bucket.alter(400.0, 400.0, 0.0)
    assert bucket.wait_s(0.0) == 0.5
    bucket.alter(10.0, 10.0, 100.0)
    assert bucket.level == 10.0, "what was saved is no more than the new burst"


def test_a_clock_that_stands_pays_nothing() -> None:
    bucket = TokenBucket(100.0, 0.0, 5.0)
    bucket.charge(100, 4.0)
    assert bucket.wait_s(4.0) == bucket.wait_s(5.0) == 1.0
