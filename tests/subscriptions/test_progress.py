"""How far a subscription has come in a shard: what it holds stays small, and what counts as an attempt."""

from __future__ import annotations

import pytest
from long_runs import count

from felix.errors import Code
from felix.settings import Retries, SubscriptionSettings
from region.subscriptions.progress import AT_ONCE_MS, WAITING_MAX, Progress

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


def given_back(*offsets: int) -> Progress:
    """Of ten records that an owner was sent, and acknowledged, these had been dead letters and are on their way back."""
    progress = Progress(bytes(8), SubscriptionSettings(unacked_max=3))
    progress.move(0)
    progress.assign(1)
    progress.delivered(0, 10, NOW)
    progress.ack([(0, 10)])
    progress.take_back(offsets)
    return progress


def test_what_is_on_its_way_back_is_nobodys() -> None:
    progress = given_back(2, 3, 7)
    assert progress.committed == 2 and list(progress.settled) == [(4, 7), (8, 10)]
    assert not progress.again(NOW) and progress.lag(10) == progress.waiting_count == 3
    refused = progress.reserve([(3, 4)])
    assert refused is not None and refused.code is Code.CONSUMER_FENCED
    assert progress.up_to(9) == [(4, 7), (8, 10)]
    progress.ack(progress.up_to(9))
    assert progress.committed == 2
    # Who had it in hand when its time ran out has worked on it after all.
    progress.ack([(2, 3)])
    assert progress.committed == 3
    progress.returned([2, 3, 7])
    (again,) = progress.again(NOW)
    assert (again.attempt, again.ranges) == (1, [(3, 4), (7, 8)])


def test_no_more_come_back_at_a_time_than_the_owner_may_have() -> None:
    progress = given_back(*range(8))
    progress.returned(range(8))
    assert not progress.has_room, "what is back goes before what is new"
    (again,) = progress.again(NOW)
    assert again.ranges == [(0, 3)]
    assert not progress.again(NOW) and progress.next_ms() != AT_ONCE_MS
    progress.redelivered(0, 10, NOW)
    assert progress.up_to(9) == [(0, 3), (8, 10)], "what nobody was sent is not meant"
    progress.ack([(0, 2)])
    assert progress.next_ms() == AT_ONCE_MS
    (again,) = progress.again(NOW)
    assert again.ranges == [(3, 5)]

    apart = given_back(1, 3, 5, 7)
    apart.returned([1, 3, 5, 7])
    (again,) = apart.again(NOW)
    assert again.ranges == [(1, 2), (3, 4), (5, 6)]


def test_what_came_back_and_was_not_sent_is_delivered_to_the_next_owner_for_the_first_time() -> None:
    progress = given_back(2, 7)
    progress.returned([2, 7])
    progress.release(NOW, died=True)
    assert list(progress.assign(2)) == [(3, 7), (8, 10)]
    progress.delivered(0, 10, NOW)
    assert progress.out_count == 2 and progress.up_to(9) == [(2, 10)]


def test_a_snapshot_holds_nothing_of_what_came_back_but_that_it_is_not_settled() -> None:
    progress = given_back(2, 7)
    progress.returned([7])
    read = Progress(bytes(8), progress.settings)
    for entry in progress.snapshot():
        read.replay(entry)
    # What is on its way is told behind it (region.subscriptions.store).
    read.take_back([2])
    assert read.committed == 2 and list(read.settled) == list(progress.settled)
    assert list(read.assign(2)) == [(2, 7), (8, 10)]


def test_what_is_ahead_of_the_owner_comes_to_it_once() -> None:
    """As after a seek back: its owner was not told to leave it out."""
    progress = Progress(bytes(8), SubscriptionSettings())
    progress.move(0)
    assert not progress.assign(1)
    progress.delivered(0, 5, NOW)
    progress.take_back([3, 7])
    progress.returned([3, 7])
    assert not progress.again(NOW) and progress.out_count == 5
    progress.delivered(5, 10, NOW)
    assert not progress.again(NOW) and progress.out_count == 10

    # One that a transaction settles before the owner's cursor has come to it is not among what the owner leaves out, either.
    progress.move(0)
    progress.assign(2)
    progress.ack([(7, 8)])
    progress.take_back([7])
    progress.returned([7])
    progress.delivered(0, 10, NOW)
    assert not progress.again(NOW) and progress.out_count == 10


def test_of_a_batch_that_begins_below_what_is_committed_the_rest_is_out() -> None:
    """The owner's delivery left out what was acknowledged, and goes on within the batch."""
    progress = given_back(2)
    progress.returned([2])
    progress.release(NOW, died=False)
    progress.assign(2)
    progress.delivered(0, 3, NOW)
    progress.ack([(2, 3)])
    assert (progress.committed, progress.cursor) == (10, 3)
    progress.delivered(8, 12, NOW)
    assert progress.out_count == 2
    progress.take_back([9])
    progress.returned([9])
    (again,) = progress.again(NOW)
    assert again.ranges == [(9, 10)]
