"""The leader's rules, each by the trace that asks for it (R: the corrections of the cluster's design)."""

from __future__ import annotations

from typing import Any

import pytest
from replication.shard import Shard, frames, members, record, sent, swaps

from region.cluster.records import Yielded, YieldReason
from region.log.point import LogPoint
from region.replication.core import KEEP_MS
from region.replication.leader import (
    APPEND_BYTES_MAX,
    BELOW_MIN_MS,
    COPY_BYTES_MAX,
    COPY_IN_FLIGHT_BYTES_MAX,
    DETACHED_MS,
    EXPAND_BACKOFF_MS,
    FRAME_COST_BYTES,
    HAND_OVER_MS,
    HUNG_MS,
    IN_FLIGHT_GROUPS_MAX,
    LINK_DOWN_MS,
    OPENING_MS,
    PROBE_MS,
    REPLICA_LAG_MS,
    Phase,
)  # fmt: skip
from region.replication.messages import Action, Append, Commit, Durable, Placed, Probe
from region.replication.ready import (
    Begun,
    DiskFailed,
    FilesSeen,
    FramesRead,
    Keep,
    Linked,
    Living,
    MinWanted,
    Outcome,
    Ready,
    Swap,
    SwapAnswered,
    Synced,
    Written,
    YieldAsked,
)  # fmt: skip


def serving(**more: object) -> Shard:
    """a leads epoch 1 with b and c in sync and placed; nothing is written yet."""
    shard = Shard("a", **more)  # type: ignore[arg-type]
    shard.lead(record())
    for peer in "bc":
        shard.place(peer)
        for log in shard.replica.logs:
            shard.ack(peer, 0, log=log)
    assert shard.leader.may_append()
    return shard


def alone() -> Shard:
    """a leads without the others, whose links are down; both have all that is committed."""
    shard = Shard("a")
    for peer in "bc":
        shard.tell(Linked(peer, False))
    shard.lead(record(isr="a1", elr="b1 c1"))
    return shard


def answer(shard: Shard, swap: Swap | None, outcome: Outcome = Outcome.APPLIED) -> object:
    assert swap is not None
    shard.revision += 1
    return shard.tell(SwapAnswered(swap.attempt, outcome, shard.revision))


def test_a_group_is_committed_once_every_member_has_it_on_its_disk() -> None:
    shard = serving()
    ready = shard.write(3)
    assert len(sent(ready, Append)) == 2, "frames are sent on before they are synced here"
    assert ready.sync
    shard.ack("b", 3)
    shard.ack("c", 3)
    assert shard.commit() == 0, "not on its own disk"
    assert shard.sync().committed == [0]
    shard.write()
    shard.sync()
    shard.ack("b", 4)
    assert shard.commit() == 3
    told = shard.ack("c", 4)
    assert shard.commit() == 4
    assert len(sent(told, Commit)) == 2, "no frames go that would carry it"


def test_each_log_of_a_shard_is_committed_by_itself() -> None:
    shard = serving(logs=2)
    shard.write(2, log=1)
    shard.sync()
    shard.ack("b", 2, log=1)
    shard.ack("c", 2, log=1)
    assert (shard.commit(0), shard.commit(1)) == (0, 2)


def test_nothing_is_committed_below_min() -> None:
    shard = Shard("a")
    shard.lead(record(isr="a1", elr="b1 c1"))
    shard.sync()
    assert not shard.leader.may_append()
    assert shard.leader.phase is Phase.SERVING or shard.commit() == 0


def test_a_leader_serves_once_all_that_it_held_is_committed() -> None:
    shard = Shard("a", end=5, starts=((1, 0),))
    ready = shard.read(record(epoch=2))
    assert ready.begin[0].start.start == LogPoint(5)
    assert not shard.place("b", 5, starts=((1, 0),)).send, (
        "nobody is placed before the epoch has begun on the disk"
    )
    begun = shard.tell(Begun(2))
    assert [(each.peer, type(each.message)) for each in begun.send] == [("c", Probe), ("b", Placed)], (
        "b has asked already"
    )
    shard.place("c", 3, starts=((1, 0),))
    shard.ack("b", 5)
    shard.ack("c", 3)
    phase = shard.leader.phase
    assert phase is Phase.PREPARING
    assert not shard.leader.may_append()
    shard.ack("c", 5)
    assert shard.leader.phase is Phase.SERVING


def test_of_who_asks_before_the_epoch_has_begun_the_newest_question_is_answered() -> None:
    shard = Shard("a", end=5, starts=((1, 0),))
    shard.read(record(epoch=2))
    shard.place("b", 5, starts=((1, 0),), ask=1)
    shard.place("b", 4, starts=((1, 0),), ask=2)
    (answer,) = sent(shard.tell(Begun(2)), Placed)
    assert (answer.ask, answer.logs[0].point) == (2, LogPoint(4))


def test_who_asked_over_a_link_that_went_down_before_the_epoch_had_begun_is_to_ask_again() -> None:
    shard = Shard("a", end=5, starts=((1, 0),))
    shard.read(record(epoch=2))
    shard.place("b", 5, starts=((1, 0),))
    shard.tell(Linked("b", False))
    shard.tell(Linked("b", True))
    begun = shard.tell(Begun(2))
    assert len(sent(begun, Probe)) == 2 and not sent(begun, Placed)


def test_who_hears_of_an_election_before_its_leader_does_is_answered_once_that_leads() -> None:
    shard = Shard("a", end=5, starts=((1, 0),))
    shard.read(record(epoch=1, leader="b"))
    assert shard.place("b", 5, starts=((1, 0),), epoch=3) == Ready()
    assert shard.place("c", 5, starts=((1, 0),), epoch=2, ask=1) == Ready()
    assert shard.place("c", 4, starts=((1, 0),), epoch=2, ask=2) == Ready()
    shard.read(record(epoch=2))
    begun = shard.tell(Begun(2))
    assert [(each.peer, type(each.message)) for each in begun.send] == [("b", Probe), ("c", Placed)]
    assert sent(begun, Placed)[0].ask == 2
    assert shard.read(record(epoch=3, leader="b")).deposed, "what was said in an epoch is no election"


def test_a_question_in_an_election_that_never_was_is_answered_in_no_other() -> None:
    shard = Shard("a", end=5, starts=((1, 0),))
    shard.read(record(epoch=1, leader="b"))
    shard.place("c", 5, starts=((1, 0),), epoch=2)
    shard.read(record(epoch=2, election="f" * 16))
    begun = shard.tell(Begun(2))
    assert len(sent(begun, Probe)) == 2 and not sent(begun, Placed)


def test_what_was_asked_before_an_epoch_that_was_lost_is_not_answered_in_the_next() -> None:
    shard = Shard("a", end=5, starts=((1, 0),))
    shard.read(record(epoch=2))
    shard.place("b", 5, starts=((1, 0),))
    assert shard.read(record(epoch=3, leader="b")).deposed
    shard.read(record(epoch=4))
    begun = shard.tell(Begun(4))
    assert len(sent(begun, Probe)) == 2 and not sent(begun, Placed)


def test_that_nothing_of_a_log_is_committed_is_not_told() -> None:
    shard = Shard("a", logs=2)
    shard.lead(record(isr="a1 b1", replicas=("a", "b")))
    shard.place("b")
    assert not any(sent(shard.ack("b", 0, log=log), Commit) for log in (0, 1))
    shard.write(1)
    shard.sync()
    assert [told.log for told in sent(shard.ack("b", 1), Commit)] == [0]


def test_r1_an_expansion_that_is_not_known_counts_for_all_and_not_for_min() -> None:
    shard = Shard("a")
    shard.lead(record(isr="a1", elr="c1"))
    shard.place("b")
    ready = shard.ack("b", 0)
    assert ready.swap is not None
    assert ready.swap.record.isr == members("a1 b1")
    assert not shard.leader.may_append(), "with the record that stands for sure, one member is too few"
    answer(shard, ready.swap, Outcome.UNKNOWN)
    assert not shard.leader.may_append()
    again = swaps(shard.wait(1_000))
    answer(shard, again[0])
    assert shard.leader.may_append()


def test_r2_reading_the_same_revision_settles_no_swap() -> None:
    shard = serving()
    shard.leader._members = lambda: ["b", "c", "d"]  # type: ignore[method-assign]
    wide = record(replicas=("a", "b", "c", "d"))
    shard.read(wide)
    shard.place("d")
    swap = shard.ack("d", 0).swap
    answer(shard, swap, Outcome.UNKNOWN)
    shard.read(wide, shard.revision - 1)
    shard.write()
    shard.sync()
    shard.ack("b", 1)
    shard.ack("c", 1)
    assert shard.commit() == 0, "d may be in sync"
    again = swaps(shard.wait(1_000))
    answer(shard, again[0], Outcome.REFUSED)
    assert shard.commit() == 0, "the second try was refused; the first one may still be on its way"
    settled = swaps(shard.wait(1_000))
    answer(shard, settled[0])
    shard.ack("d", 1)
    assert shard.commit() == 1


def test_a_later_revision_settles_all_swaps() -> None:
    shard = serving()
    shard.read(record(replicas=("a", "b", "c", "d")))
    shard.place("d")
    answer(shard, shard.ack("d", 0).swap, Outcome.UNKNOWN)
    shard.write()
    shard.sync()
    shard.ack("b", 1)
    shard.ack("c", 1)
    assert shard.commit() == 0
    shard.read(record(replicas=("a", "b", "c", "d")))
    shard.ack("b", 1)
    assert shard.commit() == 1


def test_r3_nobody_joins_below_what_was_held_at_the_election() -> None:
    shard = Shard("a", end=5, starts=((1, 0),), commit=2)
    shard.lead(record(epoch=2, isr="a1 b1", replicas=("a", "b", "d")))
    shard.place("d", 3, starts=((1, 0),))
    assert shard.ack("d", 3).swap is None, "above the known commit point, below the end at the election"
    assert shard.ack("d", 5).swap is not None


def test_r3_in_every_log() -> None:
    shard = Shard("a", logs=2, end=5, starts=((1, 0),))
    shard.lead(record(epoch=2, isr="a1 b1", replicas=("a", "b", "d")))
    shard.place("d", 5, starts=((1, 0),))
    assert shard.ack("d", 5, log=0).swap is None
    assert shard.ack("d", 5, log=1).swap is not None


def test_r4_an_end_that_was_only_told_counts_for_nothing() -> None:
    shard = Shard("a", end=5, starts=((1, 0),))
    shard.lead(record(epoch=2))
    shard.place("b", 5, starts=((1, 0),))
    shard.place("c", 5, starts=((1, 0),))
    assert shard.commit() == 0
    shard.ack("b", 5)
    shard.ack("c", 5)
    assert shard.commit() == 5


@pytest.mark.parametrize("isr", ["a2 b1", "b1"])
def test_r6_nobody_leads_who_was_not_elected_under_this_registration(isr: str) -> None:
    shard = Shard("a", 1)
    assert not shard.read(record(isr=isr)).begin
    assert shard.leader.phase is Phase.IDLE


def test_j9_a_copy_that_lost_what_it_acknowledged_leads_only_where_an_operator_accepts_that() -> None:
    for unclean, leads in ((0, False), (1, False), (2, True)):
        shard = Shard("a")
        shard.replica.lost, shard.replica.lost_in = True, 1
        ready = shard.read(record(epoch=max(unclean, 1), unclean=unclean, isr="a1", minimum=1))
        assert bool(ready.begin) is leads and (ready.swap is None) is leads


def test_r6_an_epoch_is_led_once() -> None:
    shard = serving()
    shard.tell(Living({"a": 1, "b": 1, "c": 1}))
    swap = shard.tell(YieldAsked("drain")).swap
    answer(shard, swap)
    assert shard.leader.phase is Phase.IDLE
    assert not shard.read(record()).begin, "however the record looks"
    assert shard.read(record(epoch=2)).begin


def test_r7_an_acknowledgement_of_another_registration_counts_for_nothing() -> None:
    shard = serving()
    shard.write()
    shard.sync()
    shard.ack("b", 1)
    shard.place("c", 0, registration=2)
    joins = shard.ack("c", 1, registration=2)
    assert shard.commit() == 0
    assert joins.swap is not None
    assert joins.swap.record.isr == members("a1 b1 c2")
    answer(shard, joins.swap)
    assert shard.commit() == 1


def test_f7_an_acknowledgement_of_an_earlier_place_counts_for_nothing() -> None:
    shard = serving()
    shard.write()
    shard.sync()
    shard.ack("b", 1)
    shard.place("c", 0, ask=2)
    shard.ack("c", 1, ask=1)
    assert shard.commit() == 0
    shard.ack("c", 1, ask=2)
    assert shard.commit() == 1


def test_r8_who_ends_below_what_it_acknowledged_leaves_all_sets() -> None:
    shard = serving()
    shard.write(3)
    shard.ack("c", 3)
    ready = shard.place("c", 2, ask=2)
    assert ready.alarms
    assert ready.swap is not None
    assert ready.swap.record.members() == members("a1 b1")
    replaced = serving()
    replaced.write(3)
    replaced.ack("c", 3)
    assert not replaced.place("c", 0, registration=2, folder="e" * 32).alarms, "a new folder says so"


def test_r9_min_changes_with_elr_in_one_swap() -> None:
    shard = Shard("a")
    shard.lead(record(isr="a1", elr="b1"))
    swap = shard.tell(MinWanted(1)).swap
    assert swap is not None
    assert (swap.record.min, swap.record.elr) == (1, {})
    shard.sync()
    assert not shard.leader.may_append()
    answer(shard, swap)
    assert shard.leader.may_append()


def test_r10_an_epoch_with_another_election_freezes_the_shard() -> None:
    shard = serving()
    ready = shard.read(record(election="e" * 16))
    assert ready.alarms
    assert ready.deposed
    assert not shard.read(record(epoch=2)).begin
    other = serving()
    other.read(record(epoch=0x5, leader="b"))
    assert other.read(record(epoch=0x4)).alarms, "an epoch that falls"


def test_r10_revisions_that_fall_are_of_a_store_that_went_back() -> None:
    shard = serving()
    assert shard.read(record(), 3).alarms
    assert not shard.leader.leads


def test_r11_a_failed_sync_ends_the_epoch_for_good() -> None:
    shard = serving()
    shard.write()
    shard.ack("b", 1)
    shard.ack("c", 1)
    ready = shard.tell(DiskFailed(0))
    assert ready.deposed
    assert ready.swap is not None
    assert ready.swap.record.yielded == Yielded(1, "failed")
    assert "a" not in ready.swap.record.isr
    shard.tell(Synced(0, LogPoint(1), 0))
    assert shard.commit() == 0
    answer(shard, ready.swap, Outcome.UNKNOWN)
    assert swaps(shard.wait(1_000)), "until it is known to be written"
    assert not shard.read(record(epoch=2)).begin, "not before a restart"


def test_r12_a_leader_without_a_lease_stops_committing_in_the_end() -> None:
    shard = serving()
    shard.replica.lease.until_ms = shard.now + 5_000
    shard.tick(4_800)
    assert not shard.leader.may_answer(shard.now), "what rests on no commit ends with the lease"
    shard.tick(5_000)
    assert shard.leader.may_append(), "what rests on a commit goes on"
    assert shard.tick(DETACHED_MS).deposed
    assert not shard.leader.may_append()


def test_r20_a_sync_that_never_returns_ends_the_epoch_where_another_one_may_lead() -> None:
    shard = serving()
    shard.tell(Living({"a": 1, "b": 1, "c": 1}))
    shard.write()
    answer(shard, swaps(shard.wait(REPLICA_LAG_MS + 1_000))[0])
    stopped = swaps(shard.wait(HUNG_MS))
    assert [swap.record.yielded for swap in stopped] == [Yielded(1, "hung")]


def test_r20_of_several_whose_disks_hang_the_last_one_stays_and_leads_once_its_disk_answers() -> None:
    shard = Shard("a")
    shard.tell(Living({"a": 1, "b": 1, "c": 1}))
    led = record(isr="a1", elr="b1 c1", failed={"b": 1, "c": 1})
    shard.read(led)
    shard.wait(2 * HUNG_MS)
    assert shard.core.leader.phase is Phase.ELECTED, (
        "its disk has not answered since, and nobody else is any better"
    )
    shard.tell(Begun(led.epoch))
    assert shard.core.leader.phase is not Phase.ELECTED and shard.core.leader.leads


@pytest.mark.parametrize("others", ["live", "failed", "are away"])
def test_r20_a_leader_whose_disk_does_not_answer_gives_way_only_to_one_that_may_lead(others: str) -> None:
    shard = serving()
    shard.tell(Living({"a": 1} if others == "are away" else {"a": 1, "b": 1, "c": 1}))
    if others == "failed":
        shard.read(record(failed={"b": 1, "c": 1}))
    assert not shard.tell(YieldAsked("hung")).deposed, (
        "what it waits for may have been asked before it was elected"
    )
    shard.wait(HUNG_MS)
    assert shard.tell(YieldAsked("hung")).deposed is (others == "live")


def test_r21_a_leader_that_reaches_nobody_gives_others_the_chance_once_they_live() -> None:
    shard = alone()
    assert not swaps(shard.wait(60_000)), "nobody lives who could lead in its place"
    shard.tell(Living({"b": 1}))
    assert not swaps(shard.wait(BELOW_MIN_MS - 500)), "it may still be about to be reached"
    assert swaps(shard.wait(1_000))[0].record.yielded == Yielded(1, "unreachable")


def test_r21_a_leader_that_was_alone_waits_for_the_copies_of_whoever_comes_back() -> None:
    shard = alone()
    shard.wait(60_000)
    shard.tell(Living({"b": 2, "c": 2}))
    shard.wait(BELOW_MIN_MS - 1_000)
    for peer in "bc":
        shard.tell(Linked(peer, True))
    assert not swaps(shard.wait(OPENING_MS - 1_000)), "their copies are being opened"
    shard.place("b", registration=2)
    joined = swaps([shard.ack("b", 0, registration=2), *shard.wait(200)])
    assert [swap.record.isr for swap in joined] == [members("a1 b2")]


def test_r21_a_member_that_is_linked_and_says_nothing_of_the_shard_is_not_waited_for_for_ever() -> None:
    shard = alone()
    shard.tell(Living({"b": 1}))
    shard.tell(Linked("b", True))
    assert not swaps(shard.wait(OPENING_MS - 200))
    yielded = swaps(shard.wait(BELOW_MIN_MS + 500))
    assert yielded[0].record.yielded == Yielded(1, "unreachable")


def test_r21_at_most_once_a_minute() -> None:
    shard = alone()
    shard.tell(Living({"b": 1}))
    answer(shard, swaps(shard.wait(BELOW_MIN_MS + 1_000))[0])
    shard.lead(record(epoch=2, isr="a1", elr="b1 c1"))
    assert not swaps(shard.wait(BELOW_MIN_MS + 1_000))


def test_r23_whoever_is_needed_for_a_commit_joins_at_once_also_where_it_has_just_left() -> None:
    shard = serving()
    for peer in "bc":
        shard.tell(Linked(peer, False))
    answer(shard, swaps(shard.wait(1_500))[0])
    assert not shard.leader.may_append()
    shard.tell(Linked("b", True))
    shard.place("b", 0, ask=2)
    joined = swaps([shard.ack("b", 0, ask=2), *shard.wait(600)])
    assert joined[0].record.isr == members("a1 b1")


def test_r23_a_pause_of_the_leader_is_nobody_elses_lag() -> None:
    shard = serving()
    shard.write()
    assert not swaps([shard.tick(REPLICA_LAG_MS * 3)])
    late = swaps(shard.wait(REPLICA_LAG_MS + 500))
    assert late[0].record.isr == members("a1"), "but they had their time"
    assert late[0].record.elr == members("b1 c1")


def test_r23_a_member_that_left_waits_before_it_joins() -> None:
    shard = serving()
    shard.tell(Linked("c", False))
    swap = swaps(shard.wait(1_500))[0]
    assert swap.record.isr == members("a1 b1")
    answer(shard, swap)
    shard.tell(Linked("c", True))
    shard.place("c", 0, ask=2)
    assert shard.ack("c", 0, ask=2).swap is None
    shard.ack("b", 0)
    joined = swaps(shard.wait(EXPAND_BACKOFF_MS + 500))
    assert joined == [] or joined[0].record.isr == members("a1 b1 c1")


def test_copies_of_a_new_shard_may_be_opened_late_while_nothing_is_written() -> None:
    shard = Shard("a")
    shard.lead(record())
    waited = shard.wait(OPENING_MS - 1_000)
    assert not swaps(waited) and any(sent(ready, Probe) for ready in waited), "they are asked for"
    late = swaps(shard.wait(REPLICA_LAG_MS + 2_000))
    assert late[0].record.isr == members("a1"), "but not for ever"


def test_a_copy_that_is_not_there_yet_holds_up_what_is_written_no_longer_than_others_and_joins_at_once() -> (
    None
):
    shard = Shard("a")
    shard.lead(record())
    shard.place("b")
    shard.ack("b", 0)
    shard.wait(10_000)
    shard.write()
    shard.ack("b", 1)
    swap = swaps(shard.wait(REPLICA_LAG_MS + 500))[0]
    assert swap.record.isr == members("a1 b1")
    answer(shard, swap)
    shard.place("c", 0)
    shard.ack("c", 0)
    joined = shard.ack("c", 1).swap
    assert joined is not None and joined.record.isr == members("a1 b1 c1"), "it did not come and go"


def test_a_member_whose_link_came_up_while_it_had_no_copy_joins_once_it_has_one() -> None:
    shard = serving()
    shard.tell(Linked("c", False))
    answer(shard, swaps(shard.wait(1_500))[0])
    without = record(isr="a1 b1", replicas=("a", "b"))
    shard.read(without)
    shard.tell(Linked("c", True))
    shard.read(record(isr="a1 b1", replicas=("a", "b"), target=("a", "b", "c")))
    shard.place("c", 0, registration=2, ask=1)
    shard.ack("b", 0)
    joined = swaps([shard.ack("c", 0, registration=2, ask=1), *shard.wait(200)])
    assert [swap.record.isr for swap in joined] == [members("a1 b1 c2")]


def test_a_shrink_counts_only_once_it_is_known() -> None:
    shard = serving()
    shard.write()
    shard.sync()
    shard.ack("b", 1)
    shard.tell(Linked("c", False))
    swap = swaps(shard.wait(1_500))[0]
    assert shard.commit() == 0
    answer(shard, swap)
    assert shard.commit() == 1


def test_a_leader_whose_epoch_is_over_answers_nothing() -> None:
    shard = serving()
    shard.write()
    shard.sync()
    ready = shard.read(record(epoch=2, leader="b"))
    assert ready.deposed
    shard.ack("b", 1, epoch=1)
    shard.ack("c", 1, epoch=1)
    assert shard.commit() == 0


@pytest.mark.parametrize("epoch", [1, 2, (1 << 32) - 1])
def test_no_message_deposes_and_a_newer_record_does(epoch: int) -> None:
    shard = serving()
    for peer in ("b", "0z"):
        assert not shard.hear(peer, Placed(epoch, "00000000000000ff", 1, 1, ())).deposed
        assert not shard.hear(peer, Durable(epoch, "00000000000000ff", 1, 1, 0, LogPoint(9))).committed
    assert not shard.replica.stopped
    assert shard.read(record(epoch=2, leader="b")).deposed


def test_what_is_in_flight_is_bounded_and_read_later() -> None:
    shard = serving()
    for _ in range(IN_FLIGHT_GROUPS_MAX + 5):
        shard.write()
    assert len(shard.leader.followers["b"].logs[0].flight) == IN_FLIGHT_GROUPS_MAX
    ready = shard.ack("b", 2)
    read = ready.read[0]
    assert read.begin == LogPoint(IN_FLIGHT_GROUPS_MAX)
    told = shard.tell(FramesRead("b", 1, 0, read.begin, frames(1, IN_FLIGHT_GROUPS_MAX, 5)))
    assert sent(told, Append)[0].prev == read.begin


def behind(isr: str, minimum: int = 2) -> tuple[Shard, Ready]:
    """a leads a log of five groups, which b has; c has none of it, and asks. What it answers."""
    shard = Shard("a", starts=((1, 0),), end=5)
    shard.lead(record(epoch=2, isr=isr, minimum=minimum))
    shard.place("b", 5, epoch=1, starts=((1, 0),))
    shard.ack("b", 5)
    return shard, shard.place("c")


def test_a_copy_that_nobody_waits_for_is_read_in_small_pieces_at_the_pace_of_copies() -> None:
    shard, ready = behind("a1 b1")
    assert [(read.size, read.paced) for read in ready.read] == [(COPY_BYTES_MAX, COPY_BYTES_MAX)]
    assert shard.leader.may_append()
    shard.write(3)
    ready = shard.tell(FramesRead("c", 1, 0, LogPoint(0), frames(1, 0, 2)))
    # Two frames were read for it, and three were written that it was not sent.
    assert [(read.size, read.paced, read.beside) for read in ready.read] == [
        (COPY_BYTES_MAX, COPY_BYTES_MAX - 10 - FRAME_COST_BYTES, FRAME_COST_BYTES)
    ]


def test_what_is_written_faster_than_it_is_copied_is_not_paced() -> None:
    shard, _ = behind("a1 b1")
    shard.tell(Written(0, shard.log.end, frames(2, 5, 1, COPY_BYTES_MAX + 100)))
    ready = shard.tell(FramesRead("c", 1, 0, LogPoint(0), frames(1, 0, 1)))
    assert [read.paced for read in ready.read] == [0]


def test_little_of_a_copy_is_in_flight_unless_it_is_written_faster() -> None:
    shard, _ = behind("a1 b1")
    ready = shard.tell(FramesRead("c", 1, 0, LogPoint(0), frames(1, 0, 1, COPY_IN_FLIGHT_BYTES_MAX)))
    assert ready.read == []
    assert [read.begin for read in shard.ack("c", 1, epoch=2).read] == [LogPoint(1)]
    shard, _ = behind("a1 b1")
    shard.tell(Written(0, shard.log.end, frames(2, 5, 1, 2 * COPY_IN_FLIGHT_BYTES_MAX)))
    ready = shard.tell(FramesRead("c", 1, 0, LogPoint(0), frames(1, 0, 1, COPY_IN_FLIGHT_BYTES_MAX)))
    assert [read.paced for read in ready.read] == [0]


def test_a_copy_that_waits_for_its_turn_is_not_asked_to_ask_anew() -> None:
    shard, _ = behind("a1 b1")
    assert not [probe for ready in shard.wait(5_000) for probe in sent(ready, Probe)]
    shard.tell(FramesRead("c", 1, 0, LogPoint(0), frames(1, 0, 5)))
    assert not [probe for ready in shard.wait(400) for probe in sent(ready, Probe)]
    assert [probe for ready in shard.wait(400) for probe in sent(ready, Probe)]


@pytest.mark.parametrize(("isr", "minimum"), [("a1 b1 c1", 2), ("a1", 2), ("a1 b1", 3)])
def test_a_copy_that_publishers_wait_for_is_not_paced(isr: str, minimum: int) -> None:
    _, ready = behind(isr, minimum)
    assert [(read.size, read.paced, read.beside) for read in ready.read] == [(APPEND_BYTES_MAX, 0, 0)]


def test_a_follower_that_asks_for_what_was_let_go_of_is_told_to_copy() -> None:
    shard = serving()
    shard.write(5)
    shard.sync()
    shard.ack("b", 5)
    shard.ack("c", 5)
    shard.log.start = LogPoint(3)
    answer_ = sent(shard.place("c", 1, ask=2, epoch=1, starts=((1, 0),)), Placed)[0]
    assert answer_.logs[0].action is Action.COPY


def test_a_follower_that_lacks_what_a_store_alone_has_is_told_to_copy() -> None:
    shard = serving()
    shard.write(5)
    shard.sync()
    shard.ack("b", 5)
    shard.ack("c", 5)
    shard.tell(FilesSeen(0, LogPoint(3), LogPoint(4)))
    for end, action in ((2, Action.COPY), (3, Action.APPEND)):
        answer_ = sent(shard.place("c", end, ask=end, epoch=1, starts=((1, 0),)), Placed)[0]
        assert answer_.logs[0].action is action


def test_a_move_ends_with_the_leader_giving_way() -> None:
    shard = serving()
    ready = shard.read(record(isr="a1 b1 c1", target=("b", "c")))
    assert ready.swap is not None
    assert ready.swap.record.yielded == Yielded(1, "move")


def test_a_leader_that_is_elected_while_another_is_to_lead_hands_over_as_soon_as_it_may() -> None:
    shard = Shard("a")
    ready = shard.lead(record(isr="a1 b1 c1", target=("b", "a", "c")))
    assert ready.deposed and ready.swap is not None
    assert ready.swap.record.yielded == Yielded(1, "move")


@pytest.mark.parametrize("is_told", [False, True])
def test_a_yield_does_not_wait_because_of_what_was_swapped_before(is_told: bool) -> None:
    """A broker is stopped as soon as all copies are in sync. Its last swap was seen before it was answered, or is to be settled yet."""
    shard = serving()
    shard.tell(Living({"a": 1, "b": 1, "c": 1}))
    swap = shard.tell(MinWanted(1)).swap
    assert swap is not None
    if is_told:
        shard.read(swap.record)
    else:
        answer(shard, swap, Outcome.REFUSED)
    ready = shard.tell(YieldAsked("drain"))
    assert ready.deposed and ready.swap is not None and ready.swap.record.yielded == Yielded(1, "drain")


def test_a_change_waits_no_longer_once_the_one_before_was_seen() -> None:
    shard = serving()
    for wanted in (1, 3, 1):
        swap = shard.tell(MinWanted(wanted)).swap
        assert swap is not None and swap.record.min == wanted
        shard.read(swap.record)


def test_a_leader_with_nobody_else_stays_when_it_is_to_be_drained() -> None:
    shard = Shard("a")
    shard.lead(record(isr="a1", minimum=1, replicas=("a",)))
    assert not shard.tell(YieldAsked("drain")).deposed
    assert shard.leader.may_append()


def test_nor_does_it_yield_to_members_that_are_not_alive_or_were_started_again() -> None:
    shard = serving()
    for living in ({"a": 1}, {"a": 1, "b": 2, "c": 2}):
        shard.tell(Living(living))
        assert not shard.tell(YieldAsked("drain")).deposed
        assert shard.leader.phase is Phase.SERVING
    shard.tell(Living({"a": 1, "b": 2, "c": 1}))
    assert shard.tell(YieldAsked("drain")).deposed


def answering_early(isr: str = "a1 b1 c1", **more: Any) -> Shard:
    """a leads with `acks: leader`, all others live, and b and c are placed, as far as they are in sync; three groups are durable here alone."""
    shard = Shard("a")
    shard.replica.answers_early = True
    shard.tell(Living({"a": 1, "b": 1, "c": 1}))
    shard.lead(record(isr=isr, minimum=1, **more))
    for peer in "bc":
        if f"{peer}1" in isr:
            shard.place(peer)
            shard.ack(peer, 0)
    shard.write(3)
    shard.sync()
    assert shard.commit() == (3 if isr == "a1" else 0) and shard.leader.may_answer(shard.now)
    return shard


@pytest.mark.parametrize("why", ["drain", "move", "clock", "stuck"])
def test_a_leader_that_answered_early_hands_over_once_every_copy_in_sync_has_that(why: YieldReason) -> None:
    shard = answering_early()
    assert not shard.tell(YieldAsked(why)).deposed
    assert not shard.leader.may_answer(shard.now), "what is durable here alone is answered no more"
    assert shard.leader.may_append() and shard.leader.gives_up
    shard.write()
    shard.sync()
    assert not shard.ack("b", 4).deposed
    ready = shard.ack("c", 3)
    assert shard.commit() == 3 and ready.deposed, (
        "what came afterwards was not answered, and is not waited for"
    )
    assert ready.swap is not None and ready.swap.record.yielded == Yielded(1, why)
    assert ready.swap.record.isr == members("a1 b1 c1")
    assert shard.replica.handed_over == (1, {0: LogPoint(3)}), "what it cuts behind that nobody was told of"


def test_a_move_leads_to_another_leader_once_that_one_has_what_was_answered() -> None:
    shard = answering_early()
    assert not shard.read(record(isr="a1 b1 c1", minimum=1, target=("b", "c"))).deposed
    shard.ack("b", 3)
    swap = shard.ack("c", 3).swap
    assert swap is not None and swap.record.yielded == Yielded(1, "move")


def test_a_copy_that_does_not_come_holds_no_hand_over_up_and_does_not_lead() -> None:
    shard = answering_early()
    shard.tell(YieldAsked("drain"))
    shard.ack("b", 3)
    assert not swaps(shard.wait(HAND_OVER_MS - 100))
    (swap,) = swaps(shard.wait(200))
    assert swap.record.yielded == Yielded(1, "drain")
    assert swap.record.members() == members("a1 b1"), "c lacks what was answered"


def test_where_nobody_else_has_what_was_answered_a_leader_waits_and_stays_once_all_others_left() -> None:
    shard = answering_early()
    shard.tell(YieldAsked("drain"))
    waited = shard.wait(REPLICA_LAG_MS + 500)
    assert not any(ready.deposed for ready in waited)
    (swap, *_) = swaps(waited)
    assert swap.record.isr == members("a1") and swap.record.yielded is None, "both are late"
    answer(shard, swap)
    assert shard.commit() == 3 and shard.leader.phase is Phase.SERVING
    assert shard.leader.may_answer(shard.now) and not shard.leader.gives_up


def test_a_leader_waits_no_more_for_those_that_die_while_it_hands_over() -> None:
    shard = answering_early()
    shard.tell(YieldAsked("drain"))
    shard.tell(Living({"a": 1}))
    assert shard.leader.may_answer(shard.now) and not shard.leader.gives_up


def test_a_new_copy_that_never_asked_is_not_handed_to_where_another_one_has_all() -> None:
    shard = Shard("a")
    shard.replica.answers_early = True
    shard.tell(Living({"a": 1, "b": 1, "c": 1}))
    shard.lead(record(minimum=1))
    shard.place("c")
    shard.ack("c", 0)
    shard.wait(5_000)
    assert shard.leader.standing is not None and "b" in shard.leader.standing.record.isr, (
        "it is about to be opened"
    )
    shard.write(3)
    shard.sync()
    shard.ack("c", 3)
    shard.tell(YieldAsked("drain"))
    (swap,) = swaps(shard.wait(HAND_OVER_MS + 100))
    assert swap.record.members() == members("a1 c1") and swap.record.yielded == Yielded(1, "drain")


def test_what_was_answered_in_an_epoch_before_is_handed_over_too() -> None:
    shard = Shard("a", end=5, starts=((1, 0),))
    shard.replica.answers_early = True
    shard.tell(Living({"a": 1, "b": 1, "c": 1}))
    assert shard.read(record(epoch=2, minimum=1)).begin
    assert not shard.tell(YieldAsked("drain")).deposed, "its epoch has not begun on the disk"
    assert not shard.tell(Begun(2)).deposed
    for peer in "bc":
        shard.place(peer, 5, epoch=1, starts=((1, 0),))
    assert not shard.ack("b", 5).deposed
    assert shard.ack("c", 5).deposed


@pytest.mark.parametrize("why", ["failed", "hung", "corrupt"])
def test_a_leader_that_cannot_serve_waits_for_nothing_that_it_answered(why: YieldReason) -> None:
    shard = answering_early()
    shard.tell(YieldAsked("drain"))
    ready = shard.tell(DiskFailed(0, why))
    assert ready.deposed and ready.swap is not None and ready.swap.record.yielded == Yielded(1, why)
    assert why == "hung" or answering_early().tell(YieldAsked(why)).deposed


def test_a_leader_that_is_handing_over_needs_ticks() -> None:
    shard = answering_early()
    shard.ack("b", 3)
    shard.tell(Linked("c", False))
    shard.tell(YieldAsked("drain"))
    shard.tick()
    assert not shard.core.is_quiescent
    shard.wait(HAND_OVER_MS)
    assert shard.leader.phase is Phase.YIELDED


def test_an_epoch_that_is_lost_while_it_is_handed_over_is_not_yielded() -> None:
    shard = answering_early()
    shard.tell(YieldAsked("drain"))
    ready = shard.read(record(epoch=2, leader="b", minimum=1))
    assert ready.deposed and ready.swap is None and not shard.leader.gives_up


def test_more_members_for_a_commit_are_asked_for_once_there_are_so_many_copies() -> None:
    shard = serving()
    assert shard.tell(MinWanted(4)).swap is None
    wide = record(isr="a1 b1 c1", replicas=("a", "b", "c", "d"))
    swap = shard.read(wide).swap or shard.tick().swap
    assert swap is not None and swap.record.min == 4


def at_rest(**more: object) -> Shard:
    """As `serving`, of a start in which all that is committed has been kept."""
    shard = serving(**more)
    shard.wait(1_500)
    assert shard.core.is_quiescent
    return shard


def test_a_shard_that_nothing_happens_to_needs_no_ticks() -> None:
    shard = serving()
    shard.write()
    shard.tick()
    assert not shard.core.is_quiescent, "a sync and two copies are outstanding"
    shard.sync()
    shard.ack("b", 1)
    shard.tick()
    assert not shard.core.is_quiescent, "one copy is outstanding"
    shard.ack("c", 1)
    shard.tick()
    assert not shard.core.is_quiescent, "where it is committed is not kept"
    shard.wait(1_000)
    assert shard.core.is_quiescent
    assert shard.tick(3_600_000) == Ready()


def test_a_shard_whose_commit_point_is_to_be_kept_later_needs_no_ticks_before() -> None:
    shard = at_rest()
    for end in (1, 2):
        shard.write()
        shard.sync()
        shard.ack("b", end)
        shard.ack("c", end)
        shard.tick()
    assert not shard.core.is_quiescent, "the first was kept, and the second is to be a second later"
    kept_at = shard.core.rests_until_ms
    assert shard.now < kept_at <= shard.now + KEEP_MS
    while shard.now + 100 < kept_at:
        assert shard.tick() == Ready() and shard.core.rests_until_ms == kept_at
    shard.now = kept_at - 100
    assert shard.tick().keep == [Keep(0, LogPoint(2))]
    assert shard.core.is_quiescent


def test_what_happens_while_a_commit_point_waits_to_be_kept_ends_the_rest_and_nobody_is_late() -> None:
    shard = at_rest()
    for end in (1, 2):
        shard.write()
        shard.sync()
        shard.ack("b", end)
        shard.ack("c", end)
        shard.tick()
    shard.now += PROBE_MS - 100
    shard.write()
    assert not shard.core.rests_until_ms
    waited = shard.wait(PROBE_MS)
    assert not any(sent(ready, Probe) for ready in waited), "they have their time"


def test_who_is_alive_ends_no_rest() -> None:
    shard = at_rest()
    assert shard.tell(Living({"a": 1, "b": 1})) == Ready()
    assert shard.core.is_quiescent
    shard.tell(YieldAsked("drain"))
    assert shard.leader.phase is Phase.YIELDED, "b may lead, as it heard"


def test_after_an_hour_without_ticks_nobody_is_late() -> None:
    shard = at_rest()
    shard.now += 3_600_000
    shard.replica.lease.until_ms += 3_600_000
    shard.write()
    assert not shard.core.is_quiescent
    assert shard.ack("b", 1).swap is None, "c is not late because it was not asked anything"
    waited = shard.wait(REPLICA_LAG_MS // 4)
    assert not swaps(waited) and not any(sent(ready, Probe) for ready in waited), "they have their time"
    late = swaps(shard.wait(REPLICA_LAG_MS))
    assert late[0].record.isr == members("a1 b1"), "and no more of it"


@pytest.mark.parametrize("asked", [2, 3], ids=["as it is", "more"])
def test_what_the_catalog_asks_for_is_no_rest(asked: int) -> None:
    shard = at_rest()
    told = shard.tell(MinWanted(asked))
    shard.tick()
    assert shard.core.is_quiescent is (told.swap is None) is (asked == 2)


def test_a_copy_that_is_cut_off_is_waited_for_until_it_counts_for_nothing() -> None:
    shard = at_rest()
    shard.tell(Linked("c", False))
    waited = shard.wait(LINK_DOWN_MS + 200)
    assert not shard.core.is_quiescent
    answer(shard, swaps(waited)[0])
    shard.tick()
    assert shard.core.is_quiescent, "its link says when it is back"
    assert sent(shard.tell(Linked("c", True)), Probe)
    shard.tick()
    assert not shard.core.is_quiescent, "it may be let in again"


def test_a_copy_that_went_before_the_election_is_not_waited_for() -> None:
    shard = Shard("a")
    shard.tell(Linked("c", False))
    shard.lead(record(isr="a1 b1"))
    shard.place("b")
    shard.ack("b", 0)
    waited = shard.wait(1_500)
    assert shard.core.is_quiescent and not any(sent(ready, Probe) for ready in waited)
    assert sent(shard.tell(Linked("c", True)), Probe)


def test_an_end_of_the_lease_ends_the_rest() -> None:
    shard = at_rest()
    shard.replica.lease.until_ms = shard.now
    assert not shard.tick(DETACHED_MS).deposed
    assert shard.tick().deposed


def test_a_copy_that_was_given_up_and_is_wanted_again_is_asked_to_follow_anew() -> None:
    """The leader reads of both late: meanwhile the copy read of both, asked, and was placed as the one that it was."""
    shard = serving()
    assert not sent(shard.read(record(isr="a1 b1", replicas=("a", "b"))), Probe)
    wanted = shard.read(record(isr="a1 b1", replicas=("a", "b"), target=("b", "c")))
    assert [(each.peer, type(each.message)) for each in wanted.send] == [("c", Probe)]
    shard.place("c")
    assert not sent(shard.read(record(isr="a1 b1 c1", replicas=("a", "b"), target=("b", "c"))), Probe)
