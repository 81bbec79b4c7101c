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


def test_a_reader_has_read_as_much_of_a_log_as_its_records_say_however_often_it_was_put_back() -> None:
    """Against the records themselves: a log that is written, copied, put back and cut, in epochs by chance, and a reader that comes now and then."""
    compared = parted = 0
    for seed in range(400):
        random = Random(seed)
        log: list[tuple[int, int]] = []
        history, copies = EpochHistory(), [([], EpochHistory())]
        read: list[tuple[int, int]] = []
        met: list[tuple[int, int]] = []
        epoch, numbers = 0, iter(random.sample(range(1, EPOCH_MAX), 100))
        for number in range(60):
            what = random.choice(("write", "write", "start", "copy", "put back", "cut", "read"))
            if what == "write" and epoch:
                history.begin(epoch, len(log))
                log += [(epoch, number * 10 + each) for each in range(random.randint(1, 4))]
            elif what == "copy":
                copies.append((list(log), EpochHistory(list(history.starts))))
            elif what in ("put back", "cut"):
                if what == "put back":
                    kept, known = random.choice(copies)
                    log, history = list(kept), EpochHistory(list(known.starts))
                else:
                    del log[random.randint(0, len(log)) :]
                    history.truncate(len(log))
            if what in ("start", "put back", "cut") or not epoch:
                # Each opening begins an epoch, above those of the log and of a number that was never given.
                above = [each for each in numbers if each > history.current]
                if not above:
                    break
                epoch = random.choice(above)
                numbers = iter([each for each in random.sample(range(1, EPOCH_MAX), 100) if each != epoch])
            if what == "read":
                shared = next(
                    (at for at, (one, other) in enumerate(zip(read, log, strict=False)) if one != other),
                    min(len(read), len(log)),
                )
                said = min(history.shared_end(met, len(read)), len(log))
                assert said == shared, (seed, met, history.starts, len(read))
                compared, parted = compared + 1, parted + (shared < len(read))
                del read[shared:]
                met = [each for each in met if each[1] < shared]
                for at in range(shared, len(log)):
                    if not met or met[-1][0] != log[at][0]:
                        met.append((log[at][0], at))
                read = list(log)
    assert compared > 1_000 and parted > 100, (compared, parted)


def test_an_epoch_that_is_not_remembered_any_more_is_taken_for_one_of_the_log() -> None:
    history = EpochHistory()
    for number in range(EPOCHS_MAX + 10):
        history.begin(10 + number, number)
    # Its record stands below the first that is remembered.
    assert history.shared_end([(10, 0)], 1) == 1
    assert history.shared_end([(10, 0), (11, 1)], 5) == 5
    assert EpochHistory().shared_end([], 7) == 7
