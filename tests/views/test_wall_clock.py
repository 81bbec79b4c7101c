"""A view sees that the wall clock was set, before it decides anything by it."""

from __future__ import annotations

from random import Random

import pytest

from region.cluster.clocks import CLOCK_OFF_MS_MAX
from region.views.wall_clock import HELD_MS, SET_MS, HeldClock, WallClock

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


def held(clocks: Clocks) -> HeldClock:
    return HeldClock(lambda: clocks.wall_ms, lambda: clocks.boot_ms)


def test_what_deletes_does_not_believe_a_clock_that_jumps_ahead_for_an_hour() -> None:
    clocks = Clocks()
    clock, began_ms = held(clocks), clocks.wall_ms
    clocks.wall_ms += 5 * HOUR_MS
    assert clock.now_ms() == began_ms
    clocks.pass_by(HELD_MS - 1)
    assert clock.now_ms() == began_ms + HELD_MS - 1
    clocks.pass_by(1)
    assert clock.now_ms() == clocks.wall_ms


def test_a_clock_that_is_set_right_in_that_time_has_done_nothing() -> None:
    clocks = Clocks()
    clock, began_ms = held(clocks), clocks.wall_ms
    clocks.wall_ms += 5 * HOUR_MS
    clock.now_ms()
    clocks.pass_by(1_000)
    clocks.wall_ms -= 5 * HOUR_MS
    assert clock.now_ms() == began_ms + 1_000
    clocks.pass_by(2 * HELD_MS)
    assert clock.now_ms() == clocks.wall_ms == began_ms + 1_000 + 2 * HELD_MS


def test_a_clock_that_is_behind_and_set_right_is_believed_an_hour_later_and_one_that_is_set_back_at_once() -> (
    None
):
    clocks = Clocks()
    clock = held(clocks)
    clocks.wall_ms -= HOUR_MS
    assert clock.now_ms() == clocks.wall_ms
    clocks.wall_ms += HOUR_MS
    assert clock.now_ms() == clocks.wall_ms - HOUR_MS
    clocks.pass_by(HELD_MS)
    assert clock.now_ms() == clocks.wall_ms


@pytest.mark.parametrize("seed", range(20))
def test_it_is_never_later_than_the_clock_shows_and_shows_the_same_once_that_is_left_alone(seed: int) -> None:
    clocks, random = Clocks(), Random(seed)
    clock = held(clocks)
    for _ in range(100):
        if random.random() < 0.5:
            clocks.wall_ms += random.choice((-1, 1)) * random.randrange(10 * HOUR_MS)
        clocks.pass_by(random.randrange(HOUR_MS))
        assert clock.now_ms() <= clocks.wall_ms
    clocks.pass_by(HELD_MS)
    assert clock.now_ms() == clocks.wall_ms


def test_a_clock_that_drifts_over_its_bound_among_others_is_not_set_each_time() -> None:
    """It is held to theirs from there on, and jumps by the bound as often as it is measured to be beyond it."""
    assert SET_MS >= CLOCK_OFF_MS_MAX + 1_000
