"""Pace: a burst, then so many a second, each caller by itself."""

from __future__ import annotations

from felix.pace import Pace


def test_a_burst_then_so_many_a_second_each_caller_by_itself() -> None:
    now = [0.0]
    pace = Pace(2.0, 3, 10, lambda: now[0])
    assert [pace.take("a") for _ in range(4)] == [0, 0, 0, 500]
    assert pace.take("b") == 0
    now[0] = 0.25
    assert pace.take("a") == 250
    now[0] = 0.5
    assert [pace.take("a"), pace.take("a")] == [0, 500]
    now[0] = 1000.0
    assert [pace.take("a") for _ in range(4)] == [0, 0, 0, 500], (
        "what was not used is not saved beyond the burst"
    )


def test_callers_that_are_remembered_are_bounded() -> None:
    pace = Pace(1.0, 1, 2, lambda: 0.0)
    assert pace.take("a") == 0 and pace.take("a") > 0
    pace.take("b")
    pace.take("c")
    assert pace.take("a") == 0, "the one that was longest away was forgotten"
