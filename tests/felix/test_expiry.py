"""Stages of a certificate's life, and what is told of them once."""

from __future__ import annotations

import pytest

from felix.expiry import FORGET_MS, WATCHED_MAX, ExpiryWatch, Life, Notice, Stage, stage_of, until_text

LIFE = Life(0, 30_000)


@pytest.mark.parametrize(
    ("now_ms", "stage"),
    [
        (0, Stage.FRESH),
        (19_999, Stage.FRESH),
        (20_000, Stage.DUE),
        (26_999, Stage.DUE),
        (27_000, Stage.URGENT),
        (29_999, Stage.URGENT),
        (30_000, Stage.EXPIRED),
        (90_000, Stage.EXPIRED),
    ],
)
def test_a_stage_begins_in_the_last_third_and_in_the_last_tenth(now_ms: int, stage: Stage) -> None:
    assert stage_of(LIFE, now_ms) is stage


@pytest.mark.parametrize(
    ("left_s", "text"),
    [
        (2 * 86_400 + 5 * 3_600 + 59, "expires in 2d 5h"),
        (86_400, "expires in 1d"),
        (3 * 3_600 + 7 * 60, "expires in 3h 7m"),
        (40, "expires in 40s"),
        (0, "expired 0s ago"),
        (-61, "expired 1m 1s ago"),
    ],
)
def test_the_time_that_is_left_has_the_two_units_that_count(left_s: int, text: str) -> None:
    assert until_text(left_s * 1000, 0) == text


def test_each_stage_is_told_once_and_a_renewed_certificate_ends_it() -> None:
    watch = ExpiryWatch()
    watch.see("orders", "client", LIFE)
    watch.see("b1", "broker", Life(0, 100_000))
    assert watch.notices(10_000) == []
    assert watch.notices(21_000) == [Notice("orders", "client", LIFE, Stage.DUE)]
    assert watch.notices(22_000) == [] and len(watch.expiring(22_000, 5)) == 1
    assert [each.stage for each in watch.notices(28_000)] == [Stage.URGENT]
    watch.see("orders", "client", Life(28_000, 58_000))
    watch.see("orders", "client", LIFE)  # a session that still has the old one
    assert watch.notices(29_000) == [] == watch.expiring(29_000, 5)
    assert watch.seconds_left(29_000) == {"client": 29.0, "broker": 71.0}
    assert [each.name for each in watch.notices(200_000)] == ["orders", "b1"]
    assert watch.notices(200_000 + FORGET_MS) == [] and watch.seconds_left(0) == {}


def test_names_are_bounded() -> None:
    watch = ExpiryWatch()
    for number in range(WATCHED_MAX + 5):
        watch.see(f"c{number}", "client", LIFE)
    assert len(watch.expiring(29_000, WATCHED_MAX * 2)) == WATCHED_MAX
