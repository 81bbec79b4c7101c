"""The follower's rules, each by the trace that asks for it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from replication.shard import Shard, append, commit, election, frames, placed, record, sent

from region.log.point import LogPoint
from region.replication.follower import ASK_AGAIN_MS, ON_ITS_WAY_MS
from region.replication.history import STARTS_MAX, EpochStart, History
from region.replication.messages import Action, Durable, Follow, Probe, Status
from region.replication.ready import (
    Copied,
    CopyFailed,
    CopyWanted,
    DiskFailed,
    FilesSeen,
    Linked,
    Lost,
    Synced,
    Truncate,
)  # fmt: skip


def following(end: int = 0, starts: tuple[tuple[int, int], ...] = (), **more: object) -> Shard:
    """b follows a in epoch 2, and was told to go on where its log ends."""
    shard = Shard("b", end=end, starts=starts, **more)  # type: ignore[arg-type]
    shard.read(record(epoch=2))
    shard.sync()
    shard.hear("a", placed(2, end, ask=shard.follower.ask))
    assert shard.follower.placed
    return shard


def test_f4_it_acknowledges_what_is_on_its_disk() -> None:
    shard = following()
    ready = shard.hear("a", append(2, 0, 0, 2, ask=1))
    assert ready.write
    assert not sent(ready, Durable)
    assert sent(shard.sync(), Durable)[0].point == LogPoint(2)


def test_f8_it_tells_no_end_before_that_is_on_its_disk() -> None:
    shard = Shard("b", end=3, starts=((1, 0),))
    ready = shard.read(record(epoch=2))
    assert not sent(ready, Follow)
    assert ready.sync
    assert sent(shard.sync(), Follow)[0].logs[0].end == LogPoint(3)


def test_f2_it_takes_frames_where_its_log_ends_and_nowhere_else() -> None:
    shard = following(3, ((1, 0),))
    ready = shard.hear("a", append(2, 4, 2, ask=2))
    assert not ready.write
    assert sent(ready, Follow), "it asks again"
    other = following(3, ((1, 0),))
    assert not other.hear("a", append(2, 3, 2, ask=2)).write, "at the place, but behind another epoch"


def test_frames_that_come_twice_are_taken_once() -> None:
    shard = following()
    shard.hear("a", append(2, 0, 0, 2, ask=1))
    again = shard.hear("a", append(2, 0, 0, 2, ask=1))
    assert not again.write
    assert not sent(again, Follow)


def test_f1_it_hears_no_leader_of_an_older_epoch() -> None:
    shard = following()
    ready = shard.hear("c", append(1, 0, 0, ask=1))
    assert sent(ready, Durable)[0].status is Status.STALE
    assert sent(ready, Durable)[0].epoch == 2
    assert not ready.write


def test_f1_nor_one_older_than_its_own_log() -> None:
    shard = Shard("b", end=3, starts=((5, 0),))
    shard.read(record(epoch=5))
    assert sent(shard.hear("a", append(4, 3, 5, ask=1)), Durable)[0].status is Status.STALE


def test_r7_it_hears_nobody_before_it_has_read_a_record_as_new_as_its_registration() -> None:
    shard = Shard("b", registered_at=50)
    assert not shard.hear("a", placed(2, 0, ask=1)).send
    assert not shard.read(record(epoch=1), 49).send
    assert sent(shard.read(record(epoch=2), 50), Follow)


def test_f7_only_the_answer_to_the_last_question_counts() -> None:
    shard = Shard("b", end=3, starts=((1, 0),))
    shard.read(record(epoch=2))
    shard.sync()
    asked = shard.follower.ask
    shard.tick(500)
    assert shard.follower.ask == asked + 1
    assert not shard.hear("a", placed(2, 0, ask=asked)).truncate
    assert shard.hear("a", placed(2, 1, ask=asked + 1)).truncate
    assert not shard.hear("a", placed(2, 0, ask=asked + 1)).truncate, "once"


def test_f3_it_is_cut_where_histories_part_and_acknowledges_once_that_is_on_the_disk() -> None:
    shard = Shard("b", end=5, starts=((1, 0),), commit=2)
    shard.read(record(epoch=2))
    shard.sync()
    ready = shard.hear("a", placed(2, 3, ask=shard.follower.ask))
    assert ready.truncate[0].point == LogPoint(3)
    assert not sent(ready, Durable)
    assert sent(shard.sync(), Durable)[0].point == LogPoint(3)


def test_a_sync_that_began_before_a_cut_proves_nothing_of_what_came_after() -> None:
    shard = Shard("b", end=5, starts=((1, 0),))
    shard.read(record(epoch=2))
    shard.sync()
    cuts = shard.log.cuts
    ask = shard.follower.ask
    shard.hear("a", placed(2, 3, ask=ask))
    shard.hear("a", append(2, 3, 1, 2, ask=ask))
    assert not sent(shard.tell(Synced(0, LogPoint(5), cuts)), Durable)
    assert sent(shard.sync(), Durable)[0].point == LogPoint(5)


def test_f3_never_below_what_is_committed() -> None:
    shard = Shard("b", end=5, starts=((1, 0),), commit=4)
    shard.read(record(epoch=2))
    shard.sync()
    ready = shard.hear("a", placed(2, 3, ask=shard.follower.ask))
    assert ready.alarms
    assert not ready.truncate
    assert shard.replica.failed == "corrupt"


def test_f3_but_where_the_record_says_that_committed_records_were_given_up() -> None:
    shard = Shard("b", end=5, starts=((1, 0),), commit=4)
    shard.read(record(epoch=2, unclean=2))
    shard.sync()
    ready = shard.hear("a", placed(2, 3, ask=shard.follower.ask))
    assert ready.truncate
    assert ready.lost == [Lost(0, 3, 5, given_up=True)], "whoever was told of them is told that they are gone"


def test_what_was_not_committed_is_cut_and_not_given_up() -> None:
    shard = Shard("b", end=5, starts=((1, 0),), commit=3)
    shard.read(record(epoch=2))
    shard.sync()
    assert shard.hear("a", placed(2, 3, ask=shard.follower.ask)).lost == [Lost(0, 3, 5)]


@pytest.mark.parametrize(
    ("handed", "told"),
    [(None, True), ((1, 3), False), ((1, 2), False), ((1, 4), True), ((2, 3), True)],
    ids=["by nobody", "from there on", "from before", "from behind it", "in another epoch"],
)
def test_of_what_is_cut_nobody_was_told_that_was_taken_during_a_hand_over(
    handed: tuple[int, int] | None, told: bool
) -> None:
    """`acks: leader`: a leader that hands over takes what comes, and answers once it is committed."""
    shard = Shard("b", end=5, starts=((1, 0),), commit=2)
    shard.replica.answers_early = True
    if handed is not None:
        shard.replica.handed_over = handed[0], {0: LogPoint(handed[1])}
    shard.read(record(epoch=3))
    shard.sync()
    assert shard.hear("a", placed(3, 3, ask=shard.follower.ask)).lost == [Lost(0, 3, 5, told_early=told)]


def test_the_commit_point_is_the_leaders_as_far_as_its_own_disk_has_it() -> None:
    shard = following()
    shard.hear("a", append(2, 0, 0, 3, ask=1, commit=2))
    assert shard.commit() == 0
    assert shard.sync().committed == [0]
    assert shard.commit() == 2
    shard.hear("a", commit(2, 9, ask=1))
    assert shard.commit() == 3
    kept = shard.tick(1_000).keep
    assert kept[0].point == LogPoint(3)


def test_f5_it_trims_to_the_leaders_beginning_but_not_above_what_is_committed() -> None:
    shard = following()
    shard.hear("a", append(2, 0, 0, 4, ask=1))
    shard.sync()
    assert not shard.hear("a", append(2, 4, 2, ask=1, commit=0, start=3)).trim
    shard.hear("a", commit(2, 2, ask=1))
    shard.sync()
    assert shard.hear("a", append(2, 5, 2, ask=1, commit=5, start=4)).trim[0].point <= shard.log.commit


def test_r11_a_failed_disk_neither_follows_nor_acknowledges() -> None:
    shard = following()
    shard.hear("a", append(2, 0, 0, ask=1))
    assert sent(shard.tell(DiskFailed(0)), Durable)[0].status is Status.FAILED
    assert not shard.sync().send
    assert not shard.read(record(epoch=3, leader="c")).send


def test_older_epochs_are_told_when_they_are_asked_for() -> None:
    starts = tuple((epoch, epoch) for epoch in range(1, STARTS_MAX + 5))
    shard = Shard("b", end=50, starts=starts)
    shard.read(record(epoch=99))
    told = sent(shard.sync(), Follow)[0].logs[0]
    assert len(told.starts) == STARTS_MAX
    assert not told.complete
    again = sent(shard.hear("a", placed(99, 0, ask=shard.follower.ask, action=Action.OLDER)), Follow)[0].logs[
        0
    ]
    assert again.starts[-1].epoch == told.starts[0].epoch - 1
    assert again.complete


def test_a_copy_takes_the_logs_place() -> None:
    shard = Shard("b", end=3, starts=((1, 0),), commit=3)
    shard.read(record(epoch=2))
    shard.sync()
    ready = shard.hear("a", placed(2, 5, ask=shard.follower.ask, action=Action.COPY))
    assert ready.copy
    history = History([EpochStart(1, election(1), LogPoint(0))])
    asked = sent(shard.tell(Copied(0, LogPoint(5), LogPoint(9), history)), Follow)[0]
    assert asked.logs[0].end == LogPoint(9)


@pytest.mark.parametrize("ends", ["it is there", "it came to nothing"])
def test_who_is_elected_while_it_has_its_log_copied_leads_once_that_is_over(ends: str) -> None:
    """In sync all the while, as where nobody appends: its leader is lost, and nobody but it may be elected."""
    shard = Shard("b", end=3, starts=((1, 0),), commit=3)
    shard.read(record())
    shard.sync()
    shard.hear("a", placed(1, 3, ask=shard.follower.ask))
    assert shard.tell(CopyWanted(0)).copy
    assert not shard.read(record(epoch=2, leader="b", isr="b1 c1")).begin
    history = History([EpochStart(1, election(1), LogPoint(0))])
    over = CopyFailed(0) if ends == "it came to nothing" else Copied(0, LogPoint(3), LogPoint(4), history)
    assert [begin.start.epoch for begin in shard.tell(over).begin] == [2]
    assert shard.leader.leads and not shard.follower.leader


def test_a_copy_that_lacks_what_is_committed_is_refused() -> None:
    shard = Shard("b", end=3, starts=((1, 0),), commit=3)
    shard.read(record(epoch=2))
    shard.sync()
    shard.hear("a", placed(2, 5, ask=shard.follower.ask, action=Action.COPY))
    assert shard.tell(Copied(0, LogPoint(0), LogPoint(2), History())).alarms


def test_a_copy_that_lacks_what_was_given_up_is_taken() -> None:
    """Also where retention let go here of all that the new leader has, so that nothing can be cut."""
    shard = Shard("b", end=5, starts=((1, 0),), commit=4)
    shard.read(record(epoch=2, unclean=2))
    shard.sync()
    shard.hear("a", placed(2, 0, ask=shard.follower.ask, action=Action.COPY))
    ready = shard.tell(Copied(0, LogPoint(0), LogPoint(2), History()))
    assert not ready.alarms and sent(ready, Follow)
    assert ready.lost == [Lost(0, 0, 5, given_up=True)], "no epoch of what it had is the leader's"
    assert (shard.log.end, shard.log.commit) == (LogPoint(2), LogPoint(2))


@pytest.mark.parametrize("point", [2, 3])
def test_a_log_that_cannot_be_cut_there_is_begun_anew(point: int) -> None:
    """What an unclean election gave up was compacted, or is in a store."""
    shard = Shard("b", end=5, starts=((1, 0),), commit=4)
    shard.read(record(epoch=2, unclean=2))
    shard.sync()
    shard.tell(FilesSeen(0, LogPoint(0), LogPoint(3)))
    ready = shard.hear("a", placed(2, point, ask=shard.follower.ask))
    assert bool(ready.copy) is (point == 2) and bool(ready.truncate) is (point == 3)


def test_a_copy_behind_what_is_in_a_store_has_that_committed() -> None:
    shard = Shard("b")
    shard.read(record(epoch=2))
    shard.sync()
    shard.hear("a", placed(2, 0, ask=shard.follower.ask, action=Action.COPY))
    history = History([EpochStart(1, election(1), LogPoint(0))])
    shard.tell(Copied(0, LogPoint(1), LogPoint(9), history, LogPoint(9)))
    assert (shard.log.start, shard.log.commit, shard.log.end) == (LogPoint(1), LogPoint(9), LogPoint(9))


def test_a_leader_known_by_a_message_alone_is_not_heard_until_its_record_is_read() -> None:
    shard = following()
    assert not shard.hear("c", append(3, 0, 0, ask=9)).send
    assert shard.hear("a", append(2, 0, 0, ask=1)).write, "what a message alone says takes nothing away"
    shard.read(record(epoch=3, leader="c"))
    assert [each.peer for each in shard.sync().send] == ["c"]


@pytest.mark.parametrize("peer", ["0z", "c"])
def test_who_does_not_lead_the_epoch_is_not_followed_in_it(peer: str) -> None:
    shard = following()
    ready = shard.hear(peer, append(2, 0, 0, ask=1))
    assert not ready.send
    assert not ready.write
    assert shard.follower.leader == "a"


@pytest.mark.parametrize("epoch", [2, 3, (1 << 32) - 1])
def test_a_message_with_an_election_of_its_own_freezes_nothing(epoch: int) -> None:
    shard = following()
    for peer in ("c", "0z"):
        assert not shard.hear(peer, Probe(epoch, "00000000000000ff")).send
        assert not shard.hear(peer, Durable(epoch, "00000000000000ff", 1, 1, 0, LogPoint(0))).send
    assert not shard.replica.stopped
    assert shard.hear("a", append(2, 0, 0, ask=1)).write


def test_a_copy_that_comes_to_nothing_is_asked_for_after_growing_pauses_and_told_of() -> None:
    shard = following(3, ((1, 0),))
    asked, alarms, at = [], [], shard.now
    while shard.now < at + 60_000:
        ready = shard.tick(100)
        ready.send += shard.hear("a", Probe(2, election(2))).send
        alarms += ready.alarms
        if sent(ready, Follow):
            asked.append(shard.now)
            assert shard.hear("a", placed(2, 5, ask=shard.follower.ask, action=Action.COPY)).copy
            alarms += shard.tell(CopyFailed(0)).alarms
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses == sorted(pauses)
    assert pauses[0] >= ASK_AGAIN_MS
    assert pauses[-1] >= 16_000
    assert len(alarms) == 1
    assert sent(shard.read(record(epoch=3, leader="c")), Follow), (
        "another leader may have what this one could not give"
    )


def test_an_epoch_in_which_it_wrote_nothing_is_forgotten_where_an_older_one_goes_on() -> None:
    """b began epoch 2 at offset 3 and was deposed; a, which leads epoch 3, has more of epoch 1."""
    shard = Shard("b", end=3, starts=((1, 0), (2, 3)))
    shard.read(record(epoch=3))
    shard.sync()
    ask = shard.follower.ask
    ready = shard.hear("a", placed(3, 3, ask=ask))
    assert ready.truncate == [Truncate(0, LogPoint(3))], "its history is cut on the disk, too"
    assert sent(ready, Durable)[0].point == LogPoint(3)
    older = append(3, 3, 1, 2, ask=ask)._replace(frames=frames(1, 3, 2), starts=())
    assert shard.hear("a", older).write
    shard.hear("a", append(3, 5, 1, ask=ask))
    assert [start.epoch for start in shard.log.history.starts] == [1, 3]


def test_an_epoch_that_its_leader_begins_where_it_ends_comes_again_with_the_first_frames() -> None:
    shard = Shard("b", end=3, starts=((1, 0), (2, 3)))
    shard.read(record(epoch=2))
    shard.sync()
    ask = shard.follower.ask
    shard.hear("a", placed(2, 3, ask=ask))
    assert shard.hear("a", append(2, 3, 1, ask=ask)).write
    assert [start.epoch for start in shard.log.history.starts] == [1, 2]


def test_a_question_that_crosses_its_leaders_is_asked_once() -> None:
    shard = Shard("b")
    (asked,) = sent(shard.read(record(epoch=2)), Follow)
    shard.now += ON_ITS_WAY_MS // 2
    assert not sent(shard.hear("a", Probe(2, election(2))), Follow)
    assert sent(shard.hear("a", placed(2, 0, ask=asked.ask)), Durable), "what was asked first is answered"
    assert sent(shard.hear("a", Probe(2, election(2))), Follow), "it has its answer, and is asked to ask anew"


def test_a_question_that_seemed_to_cross_its_leaders_and_was_lost_is_asked_anew_soon() -> None:
    shard = Shard("b")
    shard.read(record(epoch=2))
    assert not sent(shard.hear("a", Probe(2, election(2))), Follow)
    assert sent(shard.tick(ON_ITS_WAY_MS), Follow)
    assert not sent(shard.tick(ASK_AGAIN_MS - 100), Follow), "and then as late as any"
    assert sent(shard.tick(), Follow)


def test_a_question_that_is_old_when_its_leader_asks_is_asked_anew() -> None:
    shard = Shard("b")
    shard.read(record(epoch=2))
    shard.now += ON_ITS_WAY_MS
    assert sent(shard.hear("a", Probe(2, election(2))), Follow)


def test_a_follower_that_knows_its_place_needs_no_ticks() -> None:
    shard = Shard("b")
    shard.read(record())
    shard.tick()
    assert not shard.core.is_quiescent, "a question is open"
    shard.hear("a", placed(1, 0, ask=shard.follower.ask))
    shard.tick()
    assert shard.core.is_quiescent
    shard.tell(Linked("a", True))
    shard.tick()
    assert not shard.core.is_quiescent, "it has asked again"
