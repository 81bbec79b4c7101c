"""The timer of a machine, over a loop whose time the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from felix.transport.deadline import SET_MAX, SLEEP_S, SPIN_S, SPINS_MAX, DeadlineTimer

ACK_S, LOSS_S, IDLE_S = 0.0015, 0.027, 30.0


class Handle:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at, self.callback = at, callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """Calls what is due; `made` counts the timers that were ever set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.handles: list[Handle] = []
        self.made = 0
        self.fired: list[float] = []
        self.timer = DeadlineTimer(
            cast("asyncio.AbstractEventLoop", self), lambda: self.now, self.fired.append
        )

    def arm(self, in_s: float | None, *, is_pacing: bool = False) -> None:
        self.timer.arm(None if in_s is None else self.now + in_s, self.now, is_pacing=is_pacing)

    def call_later(self, delay: float, callback: Callable[..., None], *arguments: object) -> Handle:
        self.made += 1
        self.handles.append(Handle(self.now + delay, lambda: callback(*arguments)))
        return self.handles[-1]

    def call_soon(self, callback: Callable[..., None], *arguments: object) -> Handle:
        return self.call_later(0.0, callback, *arguments)

    @property
    def set_timers(self) -> list[Handle]:
        return [handle for handle in self.handles if not handle.is_cancelled]

    def advance(self, by_s: float) -> None:
        until = self.now + by_s
        while due := [handle for handle in self.set_timers if handle.at <= until]:
            first = min(due, key=lambda handle: handle.at)
            self.handles.remove(first)
            self.now = max(self.now, first.at)
            first.callback()
        self.now = until


def test_it_fires_once_when_the_deadline_is_reached() -> None:
    loop = Loop()
    loop.arm(LOSS_S)
    loop.advance(LOSS_S - 0.001)
    assert loop.fired == []
    loop.advance(0.002)
    assert loop.fired == [100.0 + LOSS_S]


def test_a_deadline_that_gets_later_sets_no_timer_until_the_one_that_is_set_comes() -> None:
    loop = Loop()
    loop.arm(ACK_S)
    loop.arm(LOSS_S)
    loop.arm(IDLE_S)
    assert loop.made == 1
    loop.advance(ACK_S)
    assert (loop.fired, loop.made) == ([], 2)
    loop.advance(IDLE_S)
    assert loop.fired == [100.0 + IDLE_S]


def test_deadlines_that_alternate_between_near_and_far_set_one_timer_for_each_near_one() -> None:
    loop = Loop()
    loop.arm(IDLE_S)
    loop.arm(LOSS_S)
    for _ in range(10):
        loop.arm(ACK_S)
        loop.arm(LOSS_S)
        loop.advance(0.002)
    assert loop.made == 12
    assert loop.fired == []


def test_no_more_timers_are_set_than_allowed() -> None:
    loop = Loop()
    for step in range(20, 0, -1):
        loop.arm(0.01 * step)
        assert len(loop.set_timers) <= SET_MAX
    loop.advance(0.01)
    assert loop.fired == [100.01]


def test_only_the_pacers_deadline_is_awaited_by_iterating_the_loop_and_not_forever() -> None:
    loop = Loop()
    loop.arm(SPIN_S / 2)
    assert loop.set_timers[0].at == loop.now + SLEEP_S
    loop = Loop()
    loop.arm(SPIN_S / 2, is_pacing=True)
    assert loop.set_timers[0].at == loop.now
    for _ in range(SPINS_MAX):
        (spin,) = loop.set_timers
        loop.handles.clear()
        spin.callback()
    assert loop.set_timers[0].at == loop.now + SLEEP_S


def test_two_timers_that_come_in_the_other_order_leave_the_deadline_kept() -> None:
    loop = Loop()
    loop.arm(LOSS_S)
    loop.arm(ACK_S)
    loop.arm(LOSS_S)
    late, early = loop.set_timers
    loop.handles.clear()
    loop.now += LOSS_S - 0.0005
    late.callback()
    early.callback()
    loop.advance(0.002)
    assert loop.fired == [100.0 + LOSS_S + 0.0005]


def test_without_a_deadline_and_after_the_end_nothing_fires() -> None:
    loop = Loop()
    loop.arm(ACK_S)
    loop.arm(None)
    loop.advance(1)
    loop.arm(LOSS_S)
    loop.arm(ACK_S)
    loop.timer.end()
    assert loop.set_timers == []
    loop.arm(ACK_S)
    loop.advance(IDLE_S)
    assert loop.fired == []


@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.floats(-0.001, 0.05), st.floats(-0.001, 40.0)),
            st.booleans(),
            st.floats(0.0, 0.05),
        ),
        max_size=40,
    )
)
def test_whatever_deadlines_come_the_last_one_is_met_within_a_sleep_and_never_early(
    steps: list[tuple[float | None, bool, float]],
) -> None:
    loop = Loop()
    for in_s, is_pacing, then_s in steps:
        loop.fired.clear()
        deadline = None if in_s is None else loop.now + in_s
        armed_at = loop.now
        loop.arm(in_s, is_pacing=is_pacing)
        assert len(loop.set_timers) <= SET_MAX
        loop.advance(then_s)
        assert deadline is not None or not loop.fired
        if deadline is not None:
            assert all(at >= deadline for at in loop.fired)
            assert loop.fired or loop.now <= max(deadline, armed_at) + SLEEP_S + 1e-9
