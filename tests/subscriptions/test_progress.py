"""How far a subscription has come in a shard: what it holds stays small, and what counts as an attempt."""

from __future__ import annotations

import pytest
from long_runs import count

from felix.settings import Retries, SubscriptionSettings
from region.subscriptions.progress import WAITING_MAX, Progress

NOW = 1_700_000_000_000


def test_delays_of_every_length_leave_few_kinds_of_waiting_records() -> None:
    """Every acknowledgement and every look at what is due walks them all."""
    progress = Progress(bytes(8), SubscriptionSettings(retries=Retries(attempts_max=0)))
    progress.move(0)
    progress.assign(1)
    records = count(2_000, 5_000)
    progress.delivered(0, records, NOW)
    for offset in range(records):
        delay_ms = 1_000_000 + 70_001 * offset
        progress.nack([(offset, offset + 1)], delay_ms, "no", NOW)
        (kind,) = (kind for kind, ranges in progress._waiting.items() if offset in ranges)
        assert kind.due_ms >= NOW + delay_ms, "never too early"
    assert progress.waiting_count == records
    assert len(progress._waiting) <= WAITING_MAX + 64
    due = progress.again(NOW + 3 * (1_000_000 + 70_001 * records))
    assert sum(following - first for again in due for first, following in again.ranges) == records


ACK_TIMEOUT_MS = 1_000


def failed_once() -> Progress:
    """Of ten records, the third and fourth were nacked, and the others acknowledged; two attempts are allowed."""
    progress = Progress(
        bytes(8), SubscriptionSettings(ack_timeout_ms=ACK_TIMEOUT_MS, retries=Retries(attempts_max=2))
    )
    progress.move(0)
    progress.assign(1)
    progress.delivered(0, 10, NOW)
    progress.nack([(3, 5)], 0, "no", NOW)
    progress.ack([(0, 3), (5, 10)])
    (again,) = progress.again(NOW)
    assert again.attempt == 2 and again.ranges == [(3, 5)]
    return progress


def test_a_redelivery_that_was_not_sent_is_no_attempt() -> None:
    progress = failed_once()
    now = NOW
    for _ in range(5):
        now += 2 * ACK_TIMEOUT_MS
        assert not progress.expire(now) and not progress.give_up(now) and not progress.again(now)
        assert progress.held_up(now), "its consumer is found to be stalled"
        assert not progress.held_up(now)
    assert not progress.nack([(3, 5)], 0, "the copy of before", now)
    assert (progress.out_count, progress.waiting_count) == (0, 2)
    assert progress.next_ms() == progress._unsent[0].deadline_ms > now

    assert not progress.redelivered(3, 4, now)
    assert (progress.out_count, progress.waiting_count) == (1, 1)
    late = now + 2 * ACK_TIMEOUT_MS
    assert progress.expire(late)
    (dying,) = progress.give_up(late)
    assert (dying.offset, dying.attempts) == (3, 2)


def test_a_consumer_that_dies_failed_at_none_of_the_records_that_it_was_not_sent() -> None:
    progress = failed_once()
    assert not progress.release(NOW, died=True)
    assert not progress.give_up(NOW)
    progress.assign(2)
    progress.cursor = 10
    assert [each.attempt for each in progress.again(NOW)] == [2]

    progress.redelivered(3, 5, NOW)
    assert progress.release(NOW, died=True)
    assert [each.offset for each in progress.give_up(NOW + ACK_TIMEOUT_MS)] == [3]


def test_unsent_redeliveries_keep_their_attempts_over_a_restart_and_a_revocation() -> None:
    progress = failed_once()
    read = Progress(bytes(8), progress.settings)
    for entry in progress.snapshot():
        read.replay(entry)
    assert list(read.assign(2)) == [(3, 10)], "settled, or waiting"
    read.cursor = 10
    assert [each.attempt for each in read.again(NOW)] == [2]

    progress.unsent(NOW)
    assert [each.attempt for each in progress.again(NOW)] == [2]


def test_a_redelivery_that_compaction_took_needs_no_acknowledgement() -> None:
    progress = failed_once()
    assert progress.redelivered(4, 5, NOW), "the journal is told"
    assert progress.committed == 4 and progress.out_count == 1
    progress.ack([(4, 5)])
    assert progress.committed == 10


HOUR_MS = 3_600_000


@pytest.mark.parametrize("by_ms", [-HOUR_MS, HOUR_MS])
def test_what_is_out_has_its_ack_timeout_wherever_the_clock_is_set(by_ms: int) -> None:
    progress = Progress(bytes(8), SubscriptionSettings(ack_timeout_ms=ACK_TIMEOUT_MS))
    progress.move(0)
    progress.assign(1)
    progress.delivered(0, 10, NOW)
    due_ms = progress.next_ms()
    assert due_ms is not None
    assert not progress.clock_set(by_ms), "the journal knows nothing of it"
    assert progress.next_ms() == due_ms + by_ms
    assert not progress.expire(due_ms + by_ms - 1)
    assert progress.expire(due_ms + by_ms) and progress.waiting_count == 10


@pytest.mark.parametrize("by_ms", [-HOUR_MS, HOUR_MS])
def test_a_redelivery_that_waits_to_be_sent_is_found_late_in_time_wherever_the_clock_is_set(
    by_ms: int,
) -> None:
    progress = failed_once()
    progress.clock_set(by_ms)
    assert not progress.held_up(NOW + by_ms)
    assert progress.held_up(NOW + by_ms + 2 * ACK_TIMEOUT_MS)


@pytest.mark.parametrize("by_ms", [-HOUR_MS, HOUR_MS])
def test_what_was_given_back_waits_as_long_as_it_was_to_also_for_the_next_leader(by_ms: int) -> None:
    progress = Progress(bytes(8), SubscriptionSettings(ack_timeout_ms=ACK_TIMEOUT_MS))
    progress.move(0)
    progress.assign(1)
    progress.delivered(0, 10, NOW)
    journal = [*progress.snapshot(), *progress.nack([(2, 4)], 60_000, "no", NOW)]
    due_ms = progress.next_ms()
    assert due_ms is not None
    journal += progress.clock_set(by_ms)
    led = Progress(bytes(8), progress.settings)
    for entry in journal:
        led.replay(entry)
    led.assign(2)
    led.cursor = 10
    for each in (progress, led):
        assert not each.again(NOW + by_ms + 59_999)
        (again,) = each.again(NOW + by_ms + 70_000)
        assert again == (2, [(2, 4)])


def test_what_waited_before_a_start_goes_by_the_clock_as_it_is() -> None:
    """It may have been wrong when the broker started, and is right now."""
    progress = Progress(bytes(8), SubscriptionSettings(ack_timeout_ms=ACK_TIMEOUT_MS))
    progress.move(0)
    progress.assign(1)
    progress.delivered(0, 1, NOW)
    journal = [*progress.snapshot(), *progress.nack([(0, 1)], 60_000, "no", NOW)]
    led = Progress(bytes(8), progress.settings)
    for entry in journal:
        led.replay(entry)
    led.assign(2)
    led.cursor = 1
    assert not led.clock_set(HOUR_MS)
    assert not led.again(NOW)
    assert led.again(NOW + 70_000)


def test_a_shard_that_was_let_go_while_the_clock_was_ahead_is_delivered_at_once_when_it_is_right() -> None:
    progress = failed_once()
    progress.redelivered(3, 5, NOW)
    progress.release(NOW, died=False)
    progress.clock_set(-HOUR_MS)
    progress.assign(2)
    progress.cursor = 10
    assert [each.attempt for each in progress.again(NOW - HOUR_MS)] == [2]
