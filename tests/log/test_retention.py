"""Retention: whole segments, oldest first, never the active one, never what a limit promises to keep."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from region.log.retention import Retention, SegmentSpan, plan_deletion

SPANS = [SegmentSpan(100 * at, 100 * at + 100, 1_000, 10 * at) for at in range(5)]


def test_by_age() -> None:
    assert plan_deletion(SPANS, Retention(age_ms=100), 111) == 2
    assert plan_deletion(SPANS, Retention(age_ms=100), 100) == 0
    assert plan_deletion(SPANS, Retention(age_ms=100), 10**9) == 4


def test_by_bytes() -> None:
    assert plan_deletion(SPANS, Retention(bytes_kept=3_000), 0) == 2
    assert plan_deletion(SPANS, Retention(bytes_kept=3_001), 0) == 1
    assert plan_deletion(SPANS, Retention(bytes_kept=0), 0) == 4


def test_without_limits_nothing_goes() -> None:
    assert plan_deletion(SPANS, Retention(), 10**12) == 0


@given(
    st.lists(st.tuples(st.integers(1, 999), st.integers(0, 50)), min_size=1, max_size=20),
    st.none() | st.integers(0, 500),
    st.none() | st.integers(0, 9_999),
    st.integers(0, 2_000),
)
def test_promises(
    parts: list[tuple[int, int]], age_ms: int | None, bytes_kept: int | None, now_ms: int
) -> None:
    spans, time_ms = [], 0
    for at, (size, later) in enumerate(parts):
        time_ms += later
        spans.append(SegmentSpan(at, at + 1, size, time_ms))
    count = plan_deletion(spans, Retention(age_ms, bytes_kept), now_ms)
    assert 0 <= count < len(spans)
    kept = sum(span.segment_bytes for span in spans[count:])
    for span in spans[:count]:
        young = age_ms is None or span.last_time_ms + age_ms >= now_ms
        assert not young or (bytes_kept is not None and kept >= bytes_kept)
