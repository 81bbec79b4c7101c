"""Where histories of epochs part: KIP-101, KIP-279, and a store that went back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from region.log.point import LogPoint
from region.replication.history import STARTS_MAX, EpochStart, History, Parting, parting


def history(*starts: tuple[int, int]) -> History:
    return History([EpochStart(epoch, f"{epoch}", LogPoint(at)) for epoch, at in starts])


def part(theirs: History, their_end: int, ours: History, our_end: int) -> LogPoint | Parting:
    return parting(theirs.starts, True, LogPoint(their_end), ours, LogPoint(our_end))


def test_a_copy_of_the_same_epoch_goes_on_where_the_shorter_one_ends() -> None:
    assert part(history((1, 0)), 7, history((1, 0)), 9) == LogPoint(7)
    assert part(history((1, 0)), 9, history((1, 0), (2, 7)), 12) == LogPoint(7)


def test_epochs_that_the_leader_never_had_are_passed_over() -> None:
    assert part(history((1, 0), (2, 5)), 8, history((1, 0), (3, 6)), 9) == LogPoint(5)


def test_nothing_in_common_parts_at_the_beginning() -> None:
    assert part(history((2, 0)), 4, history((3, 0)), 6) == LogPoint(0)
    assert parting(history((2, 0)).starts, False, LogPoint(4), history((3, 0)), LogPoint(6)) is Parting.OLDER


def test_one_epoch_of_two_elections_parts_nowhere() -> None:
    theirs = (EpochStart(2, "other", LogPoint(3)),)
    assert parting(theirs, True, LogPoint(4), history((1, 0), (2, 3)), LogPoint(6)) is Parting.CONFLICT


def test_positions_at_one_offset_are_told_apart() -> None:
    ours = History([EpochStart(1, "1", LogPoint(0)), EpochStart(2, "2", LogPoint(4, 1))])
    theirs = (EpochStart(1, "1", LogPoint(0)),)
    assert parting(theirs, True, LogPoint(4, 3), ours, LogPoint(6)) == LogPoint(4, 1)


def test_an_epoch_in_which_nothing_was_written_has_no_place() -> None:
    grown = history((1, 0), (2, 5))
    grown.begin(EpochStart(3, "3", LogPoint(5)))
    assert [start.epoch for start in grown.starts] == [1, 3]
    grown.truncate(LogPoint(5))
    assert grown.last.epoch == 1


def test_newest_says_whether_there_are_older_ones() -> None:
    grown = history(*((epoch, epoch) for epoch in range(1, STARTS_MAX + 3)))
    starts, complete = grown.newest()
    assert (len(starts), complete) == (STARTS_MAX, False)
    assert grown.newest(starts[0].epoch) == (grown.starts[:2], True)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=10), st.data())
def test_two_logs_part_where_their_frames_do(common: list[int], data: st.DataObject) -> None:
    """Logs as lists of the epochs of their frames: each epoch's frames were written by one leader, so they are equal as far as both have
    them, which no list with epochs of its own for each log breaks."""
    shared = sorted(common)
    least = max(shared, default=0)
    mine = shared + sorted(data.draw(st.lists(st.sampled_from([least + 2, least + 4]), max_size=5)))
    theirs = shared + sorted(data.draw(st.lists(st.sampled_from([least + 1, least + 3]), max_size=5)))

    def told(log: list[int]) -> History:
        made = History()
        for at, epoch in enumerate(log):
            if epoch > made.last.epoch:
                made.begin(EpochStart(epoch, f"{epoch}", LogPoint(at)))
        return made

    assert part(told(theirs), len(theirs), told(mine), len(mine)) == LogPoint(len(shared))
