"""Leases that another broker gave their time, or this one before it began anew: its clock may have been wrong."""

from __future__ import annotations

import pytest

from felix.settings import QueueSettings
from region.queue.state import SET_BACK_MS, VISIBILITY_MS_MAX, Phase, QueueState

NOW_MS = 1_800_000_000_000
DAY_MS = 24 * 3_600_000


def replayed(until_ms: int, now_ms: int) -> QueueState:
    """A shard whose first job was leased until then, taken up again at `now_ms`."""
    before = QueueState(QueueSettings(visibility_ms=30_000))
    before.take_up_run(2, 0, NOW_MS)
    record = before.next_ready()
    assert record is not None
    before.lease(record, until_ms, 1, 0)
    entry = before.leased([record], until_ms, 1)
    after = QueueState(QueueSettings(visibility_ms=30_000))
    after.apply(entry, now_ms)
    after.take_up_run(2, 0, now_ms)
    assert after.tracked[0].phase is Phase.LEASED
    return after


@pytest.mark.parametrize("ahead_ms", [DAY_MS, 10_000 * DAY_MS])
def test_a_lease_from_a_clock_far_ahead_ends_after_the_queues_visibility(ahead_ms: int) -> None:
    state = replayed(NOW_MS + ahead_ms + 30_000, NOW_MS)
    assert state.next_due_ms == NOW_MS + 30_000
    state.tick(NOW_MS + 29_999)
    assert state.counts[Phase.LEASED] == 1
    state.tick(NOW_MS + 30_000)
    assert state.counts[Phase.LEASED] == 0 and state.counts[Phase.READY] == 2


def test_its_worker_can_still_acknowledge_it() -> None:
    state = replayed(NOW_MS + DAY_MS, NOW_MS)
    _, lost = state.ack([(0, 1, 1)], NOW_MS)
    assert not lost and 0 in state.done


def test_the_longest_lease_that_a_worker_can_ask_for_keeps_its_time() -> None:
    state = replayed(NOW_MS + VISIBILITY_MS_MAX, NOW_MS)
    assert state.next_due_ms == NOW_MS + VISIBILITY_MS_MAX


HOUR_MS = 3_600_000


def leased_at(now_ms: int, visibility_ms: int) -> QueueState:
    """A shard whose first job was leased now."""
    state = QueueState(QueueSettings(visibility_ms=30_000))
    state.take_up_run(2, 0, now_ms)
    record = state.next_ready()
    assert record is not None
    state.lease(record, now_ms + visibility_ms, 1, now_ms)
    state.leased([record], now_ms + visibility_ms, 1)
    return state


@pytest.mark.parametrize("visibility_ms", [30_000, 120_000])
def test_a_lease_that_began_while_the_clock_was_ahead_lasts_as_long_from_when_it_is_right(
    visibility_ms: int,
) -> None:
    state = leased_at(NOW_MS + HOUR_MS, visibility_ms)
    # Another one begins, by the clock as it is now.
    state.take_up_run(3, 0, NOW_MS)
    record = state.next_ready()
    assert record is not None
    state.lease(record, NOW_MS + 500_000, 2, NOW_MS)
    state.leased([record], NOW_MS + 500_000, 2)
    assert not state.tick(NOW_MS) and state.counts[Phase.LEASED] == 2
    assert state.next_due_ms == NOW_MS + visibility_ms
    state.tick(NOW_MS + visibility_ms - 1)
    assert state.counts[Phase.LEASED] == 2
    state.tick(NOW_MS + visibility_ms)
    assert state.counts[Phase.LEASED] == 1 and state.tracked[0].phase is Phase.READY


def test_a_lease_that_was_extended_while_the_clock_was_ahead_lasts_as_long_from_when_it_is_right() -> None:
    state = leased_at(NOW_MS, 30_000)
    state.extend([(0, 1, 1)], NOW_MS + HOUR_MS + 30_000, NOW_MS + HOUR_MS)
    state.tick(NOW_MS + 1_000)
    assert state.tracked[0].leased_ms == NOW_MS, "which is shown"
    state.tick(NOW_MS + 30_999)
    assert state.counts[Phase.LEASED] == 1
    state.tick(NOW_MS + 31_000)
    assert state.counts[Phase.LEASED] == 0 and state.tracked[0].phase is Phase.READY


def test_a_clock_that_was_set_a_little_changes_no_lease() -> None:
    state = leased_at(NOW_MS, 30_000)
    state.tick(NOW_MS - SET_BACK_MS)
    assert state.next_due_ms == NOW_MS + 30_000
