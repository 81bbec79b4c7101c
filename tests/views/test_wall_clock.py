"""A view sees that the wall clock was set, before it decides anything by it."""

from __future__ import annotations

import pytest

from region.views.wall_clock import SET_MS, WallClock

HOUR_MS = 3_600_000


class Clocks:
    def __init__(self) -> None:
        self.wall_ms, self.boot_ms = 1_800_000_000_000, 5_000
        self.told: list[int] = []
        self.clock = WallClock(lambda: self.wall_ms, lambda: self.boot_ms, self.told.append)

    def pass_by(self, ms: int) -> None:
        self.wall_ms += ms
        self.boot_ms += ms


@pytest.mark.parametrize("by_ms", [HOUR_MS, -HOUR_MS, SET_MS + 1, -SET_MS - 1])
def test_a_clock_that_is_set_is_told_once(by_ms: int) -> None:
    clocks = Clocks()
    clocks.pass_by(100 * HOUR_MS)
    assert clocks.clock.now_ms() == clocks.wall_ms and not clocks.told
    clocks.wall_ms += by_ms
    clocks.pass_by(HOUR_MS)
    assert clocks.clock.now_ms() == clocks.wall_ms and clocks.told == [by_ms]
    clocks.pass_by(HOUR_MS)
    assert clocks.clock.now_ms() == clocks.wall_ms and clocks.told == [by_ms]
    clocks.wall_ms -= by_ms
    clocks.clock.now_ms()
    assert clocks.told == [by_ms, -by_ms]


def test_a_clock_that_is_set_a_little_is_not() -> None:
    clocks = Clocks()
    clocks.wall_ms -= SET_MS
    assert clocks.clock.now_ms() == clocks.wall_ms and not clocks.told


def test_who_asks_again_while_it_is_told_is_not_told_again() -> None:
    clocks = Clocks()
    again: list[int] = []

    def was_set(by_ms: int) -> None:
        again.append(clocks.clock.now_ms())

    clocks.clock = WallClock(lambda: clocks.wall_ms, lambda: clocks.boot_ms, was_set)
    clocks.wall_ms += HOUR_MS
    assert clocks.clock.now_ms() == clocks.wall_ms and again == [clocks.wall_ms]
