"""The timer of a view goes by a clock that may be set."""

from __future__ import annotations

import asyncio

import pytest

from region.views import due
from region.views.due import DueTimer

HOUR_MS = 3_600_000


class Told:
    """A clock that is set by hand, and how often the timer called."""

    def __init__(self) -> None:
        self.now_ms = HOUR_MS
        self.called = asyncio.Event()
        self.timer = DueTimer(self.called.set, lambda: self.now_ms)


async def test_what_is_due_once_a_clock_was_set_ahead_is_called_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due, "LOOK_S", 0.01, raising=False)
    told = Told()
    told.timer.arm(2 * HOUR_MS)
    await asyncio.sleep(0.05)
    assert not told.called.is_set() and told.timer.due_ms == 2 * HOUR_MS
    told.now_ms = 2 * HOUR_MS
    await asyncio.wait_for(told.called.wait(), 30)
    assert told.timer.due_ms == 0


async def test_a_clock_that_is_set_back_calls_no_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due, "LOOK_S", 0.01, raising=False)
    told = Told()
    told.timer.arm(told.now_ms + 100)
    told.now_ms = 0
    await asyncio.wait_for(told.called.wait(), 30)


async def test_a_timer_that_is_cancelled_or_armed_anew_does_not_call_for_what_was_before() -> None:
    told = Told()
    told.timer.arm(told.now_ms + 10)
    told.timer.arm(told.now_ms + HOUR_MS)
    await asyncio.sleep(0.05)
    assert not told.called.is_set()
    told.timer.arm_sooner(told.now_ms + 1)
    await asyncio.wait_for(told.called.wait(), 30)
    told.called.clear()
    told.timer.arm(told.now_ms + 10)
    told.timer.cancel()
    await asyncio.sleep(0.05)
    assert not told.called.is_set() and told.timer.due_ms == 0
