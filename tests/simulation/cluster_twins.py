"""Rules of a cluster that can be switched off, one by one: some seed of the standard run has to fail without each of them.

None is an option of the product: each rule is a function or method of its own, which a twin replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import pytest
from cluster import test_transactions
from replication import test_follower, test_leader
from simulation import (
    cluster_audit,
    cluster_disaster,
    cluster_offload,
    cluster_producers,
    cluster_readers,
    cluster_transactions,
    cluster_world,
)
from simulation.cluster_checks import BrokenError
from simulation.cluster_offload import Change, Turns
from simulation.cluster_transactions import Coordinator
from simulation.cluster_world import ClusterWorld, Fault, Scene, draw, simulate_cluster
from simulation.log_model import Captured, DiskModel, LogModel
from simulation.switching import missed, patched, switched_off

from region import reconciliation
from region.cluster import membership, registration, transactions
from region.cluster.controller import ControllerCore
from region.cluster.election import Brokers, LogEnd
from region.cluster.records import ShardId, ShardRecord, YieldReason
from region.cluster.transactions import Transaction
from region.cluster.view import ClusterView
from region.log import shared_offload
from region.log.offload import Offloaded, OffloadList
from region.log.point import LogPoint
from region.reconciliation import ShardTold
from region.replication import leader
from region.replication.core import ReplicaCore
from region.replication.follower import FollowerCore
from region.replication.leader import Follower, LeaderCore, Phase
from region.replication.messages import Append, Durable, Placed
from region.replication.ready import Outcome, Ready, RecordRead, Send, SwapAnswered, YieldAsked
from region.replication.replica import Fence, Log, Replica
from region.replication.standing import Standing
from region.transactions.positions import Comparison, Placing, compare
from region.transactions.rounds import Effect, Rounds
from region.transactions.state import UNKNOWN_OFFSET

SEEDS_MAX: Final = 2_000
"""So many seeds may pass before a rule that is switched off must have been missed."""


class Twin(NamedTuple):
    """A cluster without one rule. `seed` missed it when it was last looked for (`make simulate WORLD=cluster TWINS=1`). None: no seed of the standard
    run is known to; `scenario`, the trace that asks for the rule, fails without it."""

    rule: str
    seed: int | None
    off: Callable[[pytest.MonkeyPatch], None]
    scenario: Callable[[], None] | None = None


def acknowledge_early(self: FollowerCore, log: Log, ready: Ready) -> None:
    """Says that frames are on the disk before they are."""
    fence, replica = self.replica.fence, self.replica
    ready.send.append(
        Send(
            self.leader,
            Durable(self.epoch, fence.election, replica.registration, self.ask, log.number, log.end),
        )
    )


def open_as_durable(self: Replica, *, begin: Any = Replica.__post_init__) -> None:
    """Takes what recovery found for synced."""
    begin(self)
    for log in self.logs.values():
        log.durable = log.end


def enough_by_the_newest(self: LeaderCore) -> bool:
    """Counts members of an expansion that is only sent."""
    assert self.standing is not None
    record = self.standing.all[-1]
    return len(record.isr) >= record.min and not record.elr


def enough_with_elr(self: LeaderCore) -> bool:
    """Commits by a `min` of the catalog, while others are still eligible."""
    assert self.standing is not None
    minimum = self._min_wanted or self.standing.record.min
    return all(len(record.isr) >= minimum for record in self.standing.all)


def only_read(self: Standing) -> list[ShardRecord]:
    """Whom an expansion lets in counts once that is known."""
    return [self.record]


def only_sent(self: Standing) -> list[ShardRecord]:
    """Whom a shrink leaves out counts no more once it is sent."""
    return [self._sent.record if self._sent is not None else self.record]


def give_up(self: Standing, answer: SwapAnswered, *, take: Any = Standing.answered) -> bool:
    """A swap without an answer did not happen."""
    if answer.outcome is Outcome.UNKNOWN:
        answer = answer._replace(outcome=Outcome.REFUSED)
    return bool(take(self, answer))


def join_at_the_commit_point(
    self: LeaderCore, peer: str, follower: Follower, record: ShardRecord, now: int
) -> bool:
    """Lets in whoever has reached the commit point that is known."""
    return (
        bool(follower.logs)
        and record.isr.get(peer) != follower.registration
        and follower.down_since < 0
        and peer in (*record.replicas, *record.target)
        and follower.has({number: log.commit for number, log in self.replica.logs.items()})
    )


def join_at_once(self: LeaderCore, peer: str, follower: Follower, record: ShardRecord, now: int) -> bool:
    """Lets in whoever follows."""
    return (
        bool(follower.logs)
        and record.isr.get(peer) != follower.registration
        and peer in (*record.replicas, *record.target)
    )


def lead_whatever_the_registration(self: LeaderCore, record: ShardRecord) -> bool:
    """Goes on in an epoch after a restart."""
    replica = self.replica
    return (
        record.leader == replica.broker
        and record.yielded is None
        and record.epoch == replica.fence.epoch
        and not replica.stopped
    )


def lead_anew(self: LeaderCore, record: ShardRecord) -> bool:
    """Goes on in an epoch after a restart, and counts itself under the registration that is recorded."""
    if not lead_whatever_the_registration(self, record):
        return False
    self.replica.registration = record.isr.get(self.replica.broker, self.replica.registration)
    return True


def held_by_anybody(self: LeaderCore, member: str, registration: int, log: Log) -> LogPoint | None:
    """Counts an acknowledgement, whichever start of the broker it is of."""
    if member == self.replica.broker:
        return log.durable
    follower = self.followers.get(member)
    copy = None if follower is None else follower.logs.get(log.number)
    return None if copy is None else copy.durable


def held_before_the_sync(
    self: LeaderCore, member: str, registration: int, log: Log, *, held: Any = LeaderCore._held_by
) -> LogPoint | None:
    """Counts its own writes before they are synced."""
    if member == self.replica.broker:
        return log.end
    found: LogPoint | None = held(self, member, registration, log)
    return found


def serve_at_once(
    self: LeaderCore,
    record: ShardRecord,
    revision: int,
    now: int,
    ready: Ready,
    *,
    elect: Any = LeaderCore._elect,
) -> None:
    """Leads before its logs are synced and the epoch is on its disk."""
    elect(self, record, revision, now, ready)
    self.phase = Phase.PREPARING
    for log in self.replica.logs.values():
        log.durable = log.end


def answer_without_lease(self: LeaderCore, now: int) -> bool:
    """Answers what rests on no commit, whatever became of its lease."""
    return self.phase is Phase.SERVING


def any_question(self: LeaderCore, follower: Follower, durable: Durable) -> bool:
    """Counts acknowledgements of an earlier place."""
    return durable.epoch == self.epoch and durable.registration == follower.registration


def any_answer(self: FollowerCore, message: Placed) -> bool:
    """Does what any placement says."""
    return message.registration == self.replica.registration


def any_place(self: FollowerCore, message: Append) -> bool:
    """Takes frames that were meant for another place."""
    return self.placed and message.registration == self.replica.registration


def hear_old_records(self: Any, event: RecordRead) -> bool:
    """Acts on a record that is older than its registration."""
    self._revision = max(1, self._revision, event.revision)
    self.replica.fence.read(event.record)
    return True


def anybody(record: ShardRecord, brokers: Brokers) -> list[str]:
    """Elects any replica that is alive."""
    alive = [name for name in record.replicas if brokers.registration(name)]
    return sorted(alive, key=lambda name: (name == record.leader, alive.index(name)))


def in_any_term(view: ClusterView, term: int) -> Transaction:
    """Compares nothing of the controller's term."""
    return Transaction((), ())


def forgotten_with_its_controller(self: ControllerCore) -> bool:
    """A word to rebalance counts for whoever was the controller when it was given."""
    view = self.view
    return view.rebalance is not None and view.revision_of(view.keys.rebalance) > self.term


def has_a_target(record: ShardRecord) -> bool:
    """Takes a target for reached as soon as it is set."""
    return record.target != ()


def never(*asked: object) -> bool:
    return False


def nothing(*asked: object, **how: object) -> None:
    return None


def the_least(
    copies: Mapping[str, ShardTold], minimum: int, away: int, same: Collection[str]
) -> tuple[list[str], str]:
    """Goes on from the copy that has least."""
    return sorted(copies, key=lambda broker: [(log.kind, log.epoch, log.end) for log in copies[broker].logs])[
        :1
    ], ""


def an_ill_copy_comes_back_alone(what: str) -> None:
    """One of three copies is lost, older or damaged; its broker starts again, and is the only one that lives for a while."""
    at, lasts = (2_500, 50) if what == "older copy" else (4_000, 6_000)
    ill = Fault(at, what, 1, 1, lasts, 0)
    others = (Fault(4_070, "crash", 0, 0, 8_000, 0), Fault(4_080, "crash", 2, 2, 8_000, 0))
    assert simulate_cluster(0, Scene(faults=(ill, *others))).counts["ill copies left"] == 1


def a_lost_copy_comes_back_alone() -> None:
    an_ill_copy_comes_back_alone("lost copy")


def an_older_copy_comes_back_alone() -> None:
    an_ill_copy_comes_back_alone("older copy")


def a_damaged_copy_comes_back_alone() -> None:
    an_ill_copy_comes_back_alone("damaged copy")


def a_copy_leaves_ill_after_another_one_failed() -> None:
    """The leader is left alone below `min`."""
    faults = (Fault(6_111, "fail", 1, 2, 221, 54_941), Fault(6_858, "damaged copy", 2, 2, 493, 38_596))
    assert simulate_cluster(205279, Scene(faults=faults)).counts["ill copies left"] == 1


def stop_when_asked(self: LeaderCore, event: YieldAsked, now: int, ready: Ready) -> None:
    """Gives up although nobody can go on."""
    if self.standing is not None:
        self._stop(event.why, now, ready)


def give_up_at_once(self: LeaderCore, why: YieldReason, now: int, ready: Ready) -> None:
    """Yields whatever was answered early."""
    self._stop(why, now, ready)


def always(*asked: object) -> bool:
    return True


def begin_without_lease(core: ReplicaCore, now: int) -> bool:
    """Tells where a log ends, whatever became of the lease."""
    return core.leader.commits


def all_that_is_held(core: ReplicaCore) -> LogPoint:
    """Signs what is not committed yet."""
    return core.replica.logs[cluster_audit.LEAVES].end


def sign_in_the_cache(self: LogModel, captured: Captured) -> None:
    """Takes what is in the page cache for durable, as `interval` does."""


def power_goes_everywhere() -> None:
    """An audit log that is signed, and a loss of power on all machines at once."""
    scene = Scene(faults=(Fault(4_000, "all power", 0, 0, 400, 0),), audited=True)
    assert simulate_cluster(0, scene).counts["checkpoints"] > 1


def a_coordinator_is_cut_off() -> None:
    """From the others and the store, not from a writer: another one coordinates, and this one does not know it for a while."""
    simulate_cluster(2, Scene(shards=3, faults=(Fault(2_500, "alone", 0, 1, 6_000, 1),), transacted=True))


def recover_whoever_lives(
    view: ClusterView, shard: ShardId, winner: str, dead: Collection[str], election: str, **asked: object
) -> Transaction:
    """Lets the operator's choice lead, whoever else may have what was committed and is alive."""
    after = membership.elected_unclean(
        view.shards[shard], winner, view.brokers.registration(winner), election
    )
    return Transaction(
        (transactions.unchanged(view, view.keys.shard(shard)),), (transactions._put(view, shard, after),)
    )


def never_given_up(self: FollowerCore, log: Log) -> LogPoint:
    """Keeps what was committed here, although the record says that it is given up."""
    return log.commit


def take_for_applied(self: Coordinator, lane: str, numbers: Sequence[int]) -> None:
    """Goes on without the answer of a lane's leader."""
    parts = [part for number in numbers for part in self.held[number].parts if part.stream == lane]
    for part in parts:
        self._offsets[part.number][part.index] = (UNKNOWN_OFFSET,)
    self._ask(lane, parts, numbers[-1], nothing)
    self._later(1, lambda: self._carry_out(self.rounds.applied(lane)))


class ShowsEach(Rounds):
    """Shows a lane once it has its own part."""

    def _show_round(self) -> list[Effect]:
        self._showing.update(self._applied)
        lanes, self._applied = self._applied, []
        return [self._show(lane) for lane in lanes]

    def _begin(self) -> list[Effect]:
        return [] if self._applying else super()._begin()


class ShowsAtOnceBehind(Rounds):
    """A lane that fell behind shows what it has, though others of the round do not have theirs."""

    def applied(self, lane: str) -> list[Effect]:
        return [self._show(lane)] if lane in self._behind else super().applied(lane)


def as_if_empty(annotation: bytes, wanted: Sequence[Placing]) -> Comparison:
    """Appends what it is asked for, whatever it has."""
    return compare(b"", wanted)


def delete_at_once(self: Turns, change: Change) -> None:
    """Deletes what its new list does not name before that one is in force."""
    shared_offload.delete_unlisted(change.before, change.old, change.new)


def move_anyhow(
    view: ClusterView, shard: ShardId, leader: str, before: ShardRecord, revision: int, after: ShardRecord
) -> Transaction:
    """Moves the pointer, whatever became of the record."""
    return Transaction((), (transactions._put(view, shard, after),))


def a_pointer_is_moved_late() -> None:
    """Leaders end one after the other, and what they asked of the store may happen seconds later."""
    ends = (Fault(2_600 + 2_000 * at, "crash", at, at, 1_500, 1) for at in range(3))
    scene = Scene(faults=(Fault(700, "doubt", 0, 1, 8_000, 1), *ends), offloaded=True)
    assert simulate_cluster(13, scene).counts["lists"]


def with_restarts(seed: int) -> None:
    """The scene of a seed, where what failed is not opened again without a restart, and no more syncs fail for that."""
    scene = draw(seed)
    assert scene.reopened
    faults = tuple(fault for fault in scene.faults if fault.what != "fail" or fault.lasts_ms)
    simulate_cluster(seed, replace(scene, faults=faults, reopened=False))


def begin_a_list(self: OffloadList, own: Iterable[Offloaded], end: int) -> OffloadList:
    """A new leader lists what it uploads itself."""
    return OffloadList(self.start)


def all_of(*offs: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def off(patch: pytest.MonkeyPatch) -> None:
        for each in offs:
            each(patch)

    return off


TWINS: Final = (
    Twin(
        "F1: no leader of an older epoch is heard",
        None,
        patched(FollowerCore, "_is_stale", never),
        test_follower.test_f1_it_hears_no_leader_of_an_older_epoch,
    ),
    Twin("F2: frames are taken where the log ends", 11, patched(FollowerCore, "_fits", always)),
    Twin(
        "F4: a follower syncs before it acknowledges",
        0,
        patched(FollowerCore, "_acknowledge_early", acknowledge_early),
    ),
    Twin(
        "F7: only the answer to the last question counts",
        13,
        all_of(
            patched(FollowerCore, "_is_answer", any_answer),
            patched(FollowerCore, "_is_for_this_place", any_place),
            patched(LeaderCore, "_is_of_its_last_question", any_question),
        ),
    ),
    Twin(
        "F8, R4: what recovery kept is synced before it is told",
        1,
        patched(Replica, "__post_init__", open_as_durable),
    ),
    Twin(
        "L1: what rests on no commit needs a lease",
        14,
        patched(LeaderCore, "may_answer", answer_without_lease),
    ),
    Twin(
        "L1: a new lease counts once the watch has shown what was elected before it",
        None,
        patched(ClusterWorld, "_is_shown", always),
        partial(with_restarts, 1369),
    ),
    Twin(
        "L1: a lease that follows a lost one counts for nothing in a store that went back",
        248197,
        patched(ClusterWorld, "_is_frozen", never),
    ),
    Twin("L2: the leader's own disk counts, too", 1, patched(LeaderCore, "_held_by", held_before_the_sync)),
    Twin("L4: below min nothing is committed", 10, patched(LeaderCore, "_enough", always)),
    Twin(
        "L4: nor where a copy left ill, once that is read",
        None,
        patched(LeaderCore, "_enough", always),
        a_copy_leaves_ill_after_another_one_failed,
    ),
    Twin("L6: who joins has what was committed", 0, patched(LeaderCore, "_may_join", join_at_once)),
    Twin(
        "N1: an epoch has begun on the disk before it is led",
        296,
        patched(LeaderCore, "_elect", serve_at_once),
    ),
    Twin(
        "N3: a leader serves once what it held is committed",
        None,
        patched(LeaderCore, "_prepared", always),
        test_leader.test_a_leader_serves_once_all_that_it_held_is_committed,
    ),
    Twin(
        "R1: an expansion counts for min once it is known",
        39,
        patched(LeaderCore, "_enough", enough_by_the_newest),
    ),
    Twin(
        "an expansion counts for all from its sending",
        None,
        patched(Standing, "all", property(only_read)),
        test_leader.test_r2_reading_the_same_revision_settles_no_swap,
    ),
    Twin("a shrink counts once it is known", 14, patched(Standing, "all", property(only_sent))),
    Twin(
        "R2: a swap without an answer may happen yet",
        None,
        patched(Standing, "answered", give_up),
        test_leader.test_r2_reading_the_same_revision_settles_no_swap,
    ),
    Twin(
        "R3: who joins has what was held at the election",
        None,
        patched(LeaderCore, "_may_join", join_at_the_commit_point),
        test_leader.test_r3_nobody_joins_below_what_was_held_at_the_election,
    ),
    Twin("R6: an epoch is led by the start that was elected", 1, patched(LeaderCore, "_may_lead", lead_anew)),
    Twin(
        "R7: an acknowledgement is of a registration",
        None,
        patched(LeaderCore, "_held_by", held_by_anybody),
        test_leader.test_r7_an_acknowledgement_of_another_registration_counts_for_nothing,
    ),
    Twin("R8: an older copy of a folder is refused", 75, patched(registration, "_pulse_of", lambda *_: None)),
    Twin(
        "R9: min is the record's, and elr is empty",
        None,
        patched(LeaderCore, "_enough", enough_with_elr),
        test_leader.test_r9_min_changes_with_elr_in_one_swap,
    ),
    Twin(
        "R11: a start writes again what a failed sync left to the cache",
        0,
        patched(LogModel, "recover", lambda self: None),
    ),
    Twin("only members of isr and elr are elected", 0, patched(transactions, "candidates", anybody)),
    Twin("a controller writes in its term alone", 15, patched(transactions, "in_term", in_any_term)),
    Twin(
        "a move ends once all that it leads to are in sync",
        979,
        patched(membership, "is_target_in_sync", has_a_target),
    ),
    Twin(
        "F3: nothing is cut below what is committed",
        None,
        patched(FollowerCore, "_may_cut", always),
        test_follower.test_f3_never_below_what_is_committed,
    ),
    Twin(
        "R7: nothing is heard before a record as new as the registration is read",
        None,
        patched(ReplicaCore, "_take_record", hear_old_records),
        test_follower.test_r7_it_hears_nobody_before_it_has_read_a_record_as_new_as_its_registration,
    ),
    Twin(
        "R8: whoever lost what it acknowledged leaves",
        None,
        patched(LeaderCore, "_look_for_loss", lambda *_: None),
        test_leader.test_r8_who_ends_below_what_it_acknowledged_leaves_all_sets,
    ),
    Twin(
        "R10: a region is reconciled from copies that have all that was committed",
        606,
        patched(reconciliation, "_best", the_least),
    ),
    Twin(
        "J9: a copy that is gone leaves the sets, and leads nothing",
        None,
        patched(DiskModel, "is_short", never),
        a_lost_copy_comes_back_alone,
    ),
    Twin(
        "J9: a copy that is older than what it acknowledged leaves the sets, and leads nothing",
        None,
        patched(DiskModel, "is_short", never),
        an_older_copy_comes_back_alone,
    ),
    Twin(
        "J14: a copy that cannot be read leaves the sets",
        None,
        patched(cluster_world, "leave_sets", nothing),
        a_damaged_copy_comes_back_alone,
    ),
    Twin(
        "a move that leads to another leader ends with the leader's word",
        None,
        patched(LeaderCore, "_hand_over", nothing),
        test_leader.test_a_move_ends_with_the_leader_giving_way,
    ),
    Twin(
        "a rebalancing goes on with the next controller",
        24,
        patched(ControllerCore, "rebalances", property(forgotten_with_its_controller)),
    ),
    Twin(
        "a drained leader goes only where somebody else is alive and eligible",
        None,
        patched(LeaderCore, "_handlers", LeaderCore._handlers | {YieldAsked: stop_when_asked}),
        test_leader.test_a_leader_with_nobody_else_stays_when_it_is_to_be_drained,
    ),
    Twin(
        "what was answered early is committed before another one leads",
        615,
        patched(LeaderCore, "_give_up", give_up_at_once),
    ),
    Twin(
        "a leader that gives up hands over to none that lacks what it answered",
        None,
        patched(LeaderCore, "_has", always),
        test_leader.test_where_nobody_else_has_what_was_answered_a_leader_waits_and_stays_once_all_others_left,
    ),
    Twin(
        "R10: a store that went back freezes the shard",
        None,
        patched(Fence, "freeze", lambda *_: None),
        test_leader.test_r10_an_epoch_with_another_election_freezes_the_shard,
    ),
    Twin(
        "R12: commits end in the end without a lease",
        None,
        patched(leader, "DETACHED_MS", 1 << 40),
        test_leader.test_r12_a_leader_without_a_lease_stops_committing_in_the_end,
    ),
    Twin(
        "R12: an operator waits until who is cut off has stopped",
        242,
        patched(cluster_disaster, "RECOVERED_AFTER_MS", 0),
    ),
    Twin(
        "R12: nothing is recovered while somebody lives who has what was committed",
        171,
        patched(transactions, "recover", recover_whoever_lives),
    ),
    Twin(
        "R12: nothing is recovered from a copy while another that is alive has more",
        None,
        patched(transactions, "_why_not_from", lambda *_: None),
        test_transactions.test_r12_a_copy_is_not_recovered_from_while_another_that_is_alive_has_more,
    ),
    Twin(
        "R12: whoever is away, or would be cut, is named as lost",
        None,
        patched(transactions, "_why_not_from", lambda *_: None),
        test_transactions.test_r12_who_is_away_or_would_cut_or_cannot_open_its_copy_is_named,
    ),
    Twin(
        "R12: what would be cut of a journal counts, too",
        None,
        patched(LogEnd, "journals_beyond", lambda *_: []),
        test_transactions.test_r12_a_living_copy_whose_journal_goes_further_is_named_and_how_much_of_it_is_cut,
    ),
    Twin(
        "F3: what was given up may be cut",
        36,
        patched(FollowerCore, "must_keep", never_given_up),
    ),
    Twin(
        "R13: what is signed is durable",
        None,
        patched(LogModel, "sync", sign_in_the_cache),
        power_goes_everywhere,
    ),
    Twin(
        "19: only what is committed is signed", 49, patched(cluster_audit, "signed_up_to", all_that_is_held)
    ),
    Twin(
        "R17: a holder of a lease tells where a log ends",
        120,
        patched(cluster_readers, "may_begin", begin_without_lease),
    ),
    Twin(
        "11: that a sequence has a gap is told with a lease",
        284,
        patched(cluster_producers, "speaks_of_the_log", always),
    ),
    Twin(
        "R20: a disk that hangs has failed",
        None,
        patched(leader, "HUNG_MS", 1 << 40),
        test_leader.test_r20_a_sync_that_never_returns_ends_the_epoch_where_another_one_may_lead,
    ),
    Twin(
        "R21: who reaches nobody gives way",
        None,
        patched(LeaderCore, "_look_for_others", lambda *_: None),
        test_leader.test_r21_a_leader_that_reaches_nobody_gives_others_the_chance_once_they_live,
    ),
    Twin(
        "R21: whoever is reached is waited for",
        None,
        patched(LeaderCore, "_reaches", never),
        test_leader.test_r21_a_leader_that_was_alone_waits_for_the_copies_of_whoever_comes_back,
    ),
    Twin(
        "N6: a leader does for transactions what their coordinator asks, in its epoch",
        5,
        patched(cluster_transactions, "is_coordinator", always),
    ),
    Twin(
        "18: a transaction is told as committed once each lane has applied it",
        5,
        all_of(
            patched(Coordinator, "_apply", take_for_applied),
            patched(cluster_transactions.Transactions, "is_whole", nothing),
        ),
    ),
    Twin(
        "18: a transaction is shown once all of it is applied",
        5,
        patched(cluster_transactions, "Rounds", ShowsEach),
    ),
    Twin(
        "18: so it is in a lane that fell behind",
        48034,
        patched(cluster_transactions, "Rounds", ShowsAtOnceBehind),
    ),
    Twin(
        "18: what an annotation names is not appended again",
        25,
        patched(cluster_transactions, "compare", as_if_empty),
    ),
    Twin(
        "18: nothing is in a shard before its decision is durable",
        97,
        patched(cluster_transactions, "is_decided", always),
    ),
    Twin(
        "18: a coordinator begins with what its journal says is owed",
        25,
        patched(cluster_transactions, "owed", lambda *_: []),
    ),
    Twin(
        "18: that nothing of a transaction is there is told with a lease",
        None,
        patched(cluster_transactions, "may_tell", always),
        a_coordinator_is_cut_off,
    ),
    Twin(
        "24: nothing is deleted before a list without it is in force",
        127,
        patched(Turns, "_wrote", delete_at_once),
    ),
    Twin(
        "24: a pointer is moved in the record as it was read",
        None,
        patched(cluster_offload, "change", move_anyhow),
        a_pointer_is_moved_late,
    ),
    Twin(
        "24: nothing of a later epoch is deleted",
        None,
        patched(shared_offload, "epoch_of", lambda name: 0),
        partial(with_restarts, 1573),
    ),
    Twin(
        "24: a new leader goes on from the list in force",
        104,
        patched(OffloadList, "taken_over", begin_a_list),
    ),
    Twin("a leader needs ticks while a copy has not all", 1, patched(LeaderCore, "_is_at_rest", always)),
    Twin(
        "R23: who joins again waits",
        None,
        patched(leader, "EXPAND_BACKOFF_MS", 0),
        test_leader.test_r23_a_member_that_left_waits_before_it_joins,
    ),
)


def caught(twin: Twin, *, anew: bool = False, seeds_max: int = SEEDS_MAX) -> BrokenError | None:
    """What fails without the rule: its scenario, where it has one, or a seed; `anew`: the first seed that does."""
    if twin.scenario is None or anew:
        return missed(twin, simulate_cluster, BrokenError, seeds_max, anew=anew)
    with switched_off(twin):
        try:
            twin.scenario()
        except (AssertionError, IndexError) as error:
            return BrokenError(f"{twin.rule}: {error}")
    return None
