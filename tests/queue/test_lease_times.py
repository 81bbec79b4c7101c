"""Leases and delays where the clock is set while they last; and leases that another broker gave their time, or this one before it began anew: its clock may have been wrong."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from felix.settings import QueueSettings
from region.queue.state import VISIBILITY_MS_MAX, Delay, Phase, QueueState

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
    lease_next(state, now_ms, visibility_ms)
    return state


def lease_next(state: QueueState, now_ms: int, visibility_ms: int) -> None:
    record = state.next_ready()
    assert record is not None
    state.lease(record, now_ms + visibility_ms, 1, now_ms)
    state.leased([record], now_ms + visibility_ms, 1)


def read_again(entries: Iterable[bytes], records: int, now_ms: int) -> QueueState:
    """What the next leader makes of a journal."""
    after = QueueState(QueueSettings(visibility_ms=30_000))
    for entry in entries:
        after.apply(entry, now_ms)
    after.take_up_run(records, 0, now_ms)
    return after


@pytest.mark.parametrize("by_ms", [-HOUR_MS, HOUR_MS])
@pytest.mark.parametrize("visibility_ms", [30_000, 120_000])
def test_a_lease_lasts_as_long_as_it_was_to_wherever_the_clock_is_set(visibility_ms: int, by_ms: int) -> None:
    state = leased_at(NOW_MS, visibility_ms)
    before = state.entries()
    after = NOW_MS + by_ms
    entries = state.clock_set(by_ms, after)
    # Another one begins, by the clock as it is now.
    lease_next(state, after, 500_000)
    assert not state.tick(after) and state.counts[Phase.LEASED] == 2
    state.tick(after + visibility_ms - 1)
    assert state.counts[Phase.LEASED] == 2
    assert state.tracked[0].leased_ms == after, "as peek shows it"
    state.tick(after + visibility_ms)
    assert state.counts[Phase.LEASED] == 1 and state.tracked[0].phase is Phase.READY
    # So it does at the next leader.
    led = read_again([*before, *entries], 2, after)
    assert led.tracked[0].phase is Phase.LEASED and led.next_due_ms == after + visibility_ms


def test_a_lease_that_was_extended_while_the_clock_was_ahead_lasts_as_long_from_when_it_is_right() -> None:
    state = leased_at(NOW_MS, 30_000)
    state.clock_set(HOUR_MS, NOW_MS + HOUR_MS)
    state.extend([(0, 1, 1)], NOW_MS + HOUR_MS + 30_000)
    state.clock_set(-HOUR_MS, NOW_MS)
    assert state.tracked[0].leased_ms == NOW_MS, "which is shown"
    state.tick(NOW_MS + 29_999)
    assert state.counts[Phase.LEASED] == 1
    state.tick(NOW_MS + 30_000)
    assert state.counts[Phase.LEASED] == 0 and state.tracked[0].phase is Phase.READY


def test_a_lease_of_before_a_start_goes_by_the_clock_as_it_is() -> None:
    """It may have been wrong when the broker started, and is right now."""
    state = replayed(NOW_MS + 30_000, NOW_MS - HOUR_MS)
    assert not state.clock_set(HOUR_MS, NOW_MS)
    state.tick(NOW_MS + 30_000)
    assert state.counts[Phase.LEASED] == 0


def test_a_lease_that_ran_out_while_the_clock_was_ahead_has_run_out_for_the_next_leader() -> None:
    state = leased_at(NOW_MS + HOUR_MS, 30_000)
    before = state.entries()
    state.tick(NOW_MS + HOUR_MS + 30_000)
    assert state.tracked[0].phase is Phase.READY
    led = read_again([*before, *state.clock_set(-HOUR_MS, NOW_MS + 30_000)], 2, NOW_MS + 40_000)
    led.tick(NOW_MS + 40_000)
    assert led.counts[Phase.READY] == 2


@pytest.mark.parametrize("by_ms", [-HOUR_MS, HOUR_MS])
def test_what_was_given_back_waits_as_long_as_it_was_to_wherever_the_clock_is_set(by_ms: int) -> None:
    state = leased_at(NOW_MS, 30_000)
    before = state.entries()
    given_back, _, _ = state.nack([(0, 1, 1)], 60_000, NOW_MS)
    after = NOW_MS + by_ms
    entries = state.clock_set(by_ms, after)
    for led in (state, read_again([*before, *given_back, *entries], 2, after)):
        led.tick(after + 59_999)
        assert led.tracked[0].phase is Phase.DELAYED
        led.tick(after + 60_000)
        assert led.tracked[0].phase is Phase.READY


def delayed(published_ms: int, taken_up_ms: int, wanted: Delay, own_from: int = 0) -> QueueState:
    """A shard with one job, which asks to come later."""
    state = QueueState(QueueSettings(visibility_ms=30_000))
    state.own_from = own_from
    state.take_up(0, published_ms, 4, wanted, None, taken_up_ms)
    return state


@pytest.mark.parametrize("by_ms", [-HOUR_MS, HOUR_MS])
def test_a_job_that_was_put_with_a_delay_comes_after_it_wherever_the_clock_is_set(by_ms: int) -> None:
    state = delayed(NOW_MS, NOW_MS, Delay(0, 60_000))
    assert not state.clock_set(by_ms, NOW_MS + by_ms), "the journal knows nothing of it"
    state.tick(NOW_MS + by_ms + 59_999)
    assert state.counts[Phase.DELAYED] == 1
    state.tick(NOW_MS + by_ms + 60_000)
    assert state.counts[Phase.READY] == 1


def test_a_time_of_the_day_goes_by_the_clock_as_it_is() -> None:
    state = delayed(NOW_MS, NOW_MS, Delay(NOW_MS + HOUR_MS + 60_000, 60_000))
    state.clock_set(HOUR_MS, NOW_MS + HOUR_MS)
    state.tick(NOW_MS + HOUR_MS + 59_999)
    assert state.counts[Phase.DELAYED] == 1
    state.tick(NOW_MS + HOUR_MS + 60_000)
    assert state.counts[Phase.READY] == 1


def test_a_delay_of_before_a_start_goes_by_the_clock_as_it_is() -> None:
    state = delayed(NOW_MS - 2 * HOUR_MS, NOW_MS - HOUR_MS, Delay(0, 2 * HOUR_MS + 30_000), own_from=1)
    state.clock_set(HOUR_MS, NOW_MS)
    state.tick(NOW_MS + 29_999)
    assert state.counts[Phase.DELAYED] == 1
    state.tick(NOW_MS + 30_000)
    assert state.counts[Phase.READY] == 1


@pytest.mark.parametrize("own_from", [0, 1])
def test_a_job_whose_time_says_that_it_was_put_later_than_now_waits_for_its_delay_from_now_on(
    own_from: int,
) -> None:
    """A shard's times are never set back, so new records have the wrong one for as long as the clock was ahead."""
    state = delayed(NOW_MS + HOUR_MS, NOW_MS, Delay(0, 60_000), own_from)
    state.tick(NOW_MS + 59_999)
    assert state.counts[Phase.DELAYED] == 1
    state.tick(NOW_MS + 60_000)
    assert state.counts[Phase.READY] == 1


def test_a_job_that_was_put_before_a_start_by_a_clock_that_was_ahead_waits_for_its_delay_once_that_is_right() -> (
    None
):
    state = delayed(NOW_MS + HOUR_MS, NOW_MS + HOUR_MS, Delay(0, 60_000), own_from=1)
    for _ in range(2):
        state.clock_set(-HOUR_MS, NOW_MS)
        state.tick(NOW_MS + 59_999)
        assert state.counts[Phase.DELAYED] == 1
        state.clock_set(HOUR_MS, NOW_MS + HOUR_MS)
    state.clock_set(-HOUR_MS, NOW_MS)
    state.tick(NOW_MS + 60_000)
    assert state.counts[Phase.READY] == 1
