"""The leader-epoch history."""

from __future__ import annotations

from random import Random

import pytest

from felix.errors import Code, RequestError
from region.log.epochs import (
    CHANCE_MAX,
    EPOCH_MAX,
    EPOCH_ORIGIN_MS,
    EPOCH_TICK_MS,
    EPOCHS_MAX,
    EpochHistory,
    EpochStart,
    elected_epoch,
    next_epoch,
)


def test_follower_finds_where_an_epoch_ended() -> None:
    history = EpochHistory()
    assert history.current == 0
    assert history.begin(1, 0) and history.begin(3, 10) and history.begin(4, 25)
    assert not history.begin(4, 30)
    assert history.end_of(1, 40) == EpochStart(1, 10)
    assert history.end_of(2, 40) == EpochStart(1, 10)
    assert history.end_of(3, 40) == EpochStart(3, 25)
    assert history.end_of(9, 40) == EpochStart(4, 40)
    assert history.end_of(0, 40) == EpochStart(0, 0)


def test_older_epoch_cannot_begin() -> None:
    history = EpochHistory()
    history.begin(5, 0)
    with pytest.raises(RequestError) as conflict:
        history.begin(4, 10)
    assert conflict.value.code is Code.CONFLICT


def test_epoch_without_a_batch_leaves_its_place_to_the_next() -> None:
    history = EpochHistory()
    history.begin(1, 0)
    history.begin(2, 10)
    history.begin(3, 10)
    assert history.starts == (EpochStart(1, 0), EpochStart(3, 10))


def test_truncate_and_clamp() -> None:
    history = EpochHistory([EpochStart(1, 0), EpochStart(2, 10), EpochStart(3, 20)])
    history.clamp(15)
    assert history.starts[-1] == EpochStart(3, 15)
    history.truncate(15, 3)
    assert history.current == 3, "a position of that epoch stands at the offset"
    history.truncate(15, 2)
    assert history.current == 2
    history.truncate(15)
    assert history.current == 2


def test_history_is_bounded_and_keeps_the_newest() -> None:
    history = EpochHistory()
    for number in range(1, EPOCHS_MAX + 11):
        history.begin(number, number * 5)
    assert len(history.starts) == EPOCHS_MAX
    assert history.starts[-1] == EpochStart(EPOCHS_MAX + 10, (EPOCHS_MAX + 10) * 5)


def test_next_epoch_is_above_the_last_and_above_those_of_a_copy_that_began_earlier() -> None:
    now, chance = EPOCH_ORIGIN_MS + 1_000_000, Random(7)
    lost = next_epoch(1, now, chance)
    assert lost == 4_000
    assert next_epoch(1, now + EPOCH_TICK_MS, chance) > lost, "an older copy, opened later"


def test_where_the_clock_is_behind_no_two_histories_count_on_alike() -> None:
    chance, behind = Random(7), EPOCH_ORIGIN_MS + 1_000_000 - 60_000
    found = {next_epoch(4_000, behind, chance) for _ in range(100)}
    assert len(found) == 100
    assert min(found) > 4_000 and max(found) <= 4_000 + CHANCE_MAX


def test_there_is_a_next_epoch_however_often_a_broker_starts_with_a_clock_that_is_behind() -> None:
    chance, epoch = Random(7), 4_000
    for _ in range(100_000):
        before, epoch = epoch, next_epoch(epoch, EPOCH_ORIGIN_MS, chance)
        assert before < epoch <= EPOCH_MAX


def test_two_elections_after_one_epoch_begin_different_ones_that_rise() -> None:
    random, current, same = Random(7), 1, 0
    for _ in range(20_000):
        ours, theirs = (elected_epoch(current, f"{random.getrandbits(64):016x}") for _ in range(2))
        assert current < ours <= EPOCH_MAX and current < theirs
        same += ours == theirs
        current = ours
    assert same == 0, "with this seed; each time it is one in hundreds of thousands"
    assert elected_epoch(EPOCH_MAX - 1, "f" * 16) == EPOCH_MAX
