"""What is written to a cluster's records, and what it is compared with: each writer's transactions, from what he has read.

Every transaction compares each record that it rests on by its revision, so that one whose answer was lost can be decided anew: of two
under the same compare only one happens, whichever comes late. Pure: nothing is sent here; ids are handed in.

Who writes what: a broker its own `nodes`, `brokers` and `pulse` (`registration`); the controller, in its term, places, elects, moves and
removes shards; a shard's leader changes its sets while its lease holds; an operator recovers a shard, and reconciles a region (`reconciliation`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import msgspec

from audit.unclean_leaf import WHY_CHARS_MAX, UncleanCause, UncleanElection
from region.cluster import membership
from region.cluster.election import (
    Brokers,
    LogEnd,
    Unopened,
    candidates,
    has_stopped,
    has_yielded,
    is_eligible,
    may_ask_for_ends,
)
from region.cluster.records import (
    ClusterKeys,
    ControllerRecord,
    FrozenRecord,
    RebalanceRecord,
    ShardId,
    ShardRecord,
    encode,
)
from region.cluster.view import ClusterView
from region.metadata.transaction import OPERATIONS_MAX, Absent, Compare, Delete, ModRevision, Put, Write

SHARDS_PER_TRANSACTION: Final = 60
"""With a compare for each shard and for each broker that it names, and two writes for each shard at most, within a store's `OPERATIONS_MAX`."""


NO_ENDS: Final[Mapping[str, LogEnd | Unopened]] = MappingProxyType({})
"""Of a shard of which nobody was asked."""


class Reason(StrEnum):
    """Why a transaction is not made."""

    CHANGED = "changed"
    NOT_LEADER = "not leader"
    NO_LEASE = "no lease"
    NOT_REGISTERED = "not registered"
    STILL_LEADS = "still leads"
    NOBODY_ELIGIBLE = "nobody eligible"
    STILL_ALIVE = "still alive"
    TOO_EARLY = "too early"
    NOT_NAMED = "not named"
    BEHIND = "behind"
    SYSTEM_AUDIT = "system audit"
    OTHER_FOLDER = "other folder"
    OLD_FOLDER = "old folder"
    OLD_STORE = "old store"
    SUPERSEDED = "superseded"
    OLD_BROKER = "old broker"
    NO_REPORT = "no report"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why it is not done, for the program and for a person. `retry`: it may be once something else has happened by itself."""

    reason: Reason
    sentence: str
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Transaction:
    """All `writes` if all `compares` hold, else none."""

    compares: tuple[Compare, ...]
    writes: tuple[Write, ...]


def join(parts: Sequence[Transaction]) -> Transaction:
    """The parts as one. What several compare is compared once; they write different keys."""
    compares = dict.fromkeys(compare for part in parts for compare in part.compares)
    return Transaction(tuple(compares), tuple(write for part in parts for write in part.writes))


def batches(parts: Iterable[Transaction], common: Transaction) -> list[tuple[int, Transaction]]:
    """The parts, joined in order to as few transactions as fit, each with `common`; with the number of parts in each."""
    found: list[tuple[int, Transaction]] = []
    taken: list[Transaction] = []
    compares: set[Compare] = set(common.compares)
    for part in parts:
        wanted = compares.union(part.compares)
        if taken and (len(taken) == SHARDS_PER_TRANSACTION or len(wanted) > OPERATIONS_MAX):
            found.append((len(taken), join([common, *taken])))
            taken, wanted = [], {*common.compares, *part.compares}
        taken.append(part)
        compares = wanted
    if taken:
        found.append((len(taken), join([common, *taken])))
    return found


# The controller


def begin_term(view: ClusterView, broker: str, lease: int) -> Transaction | Refusal:
    """Become the controller under the broker's own lease. The create revision of the key is the term."""
    registration = view.brokers.registration(broker)
    if not registration:
        return Refusal(Reason.NO_LEASE, f"Broker {broker} is not registered as alive.", retry=True)
    key = view.keys.controller
    return Transaction(
        (Absent(key), unchanged(view, view.keys.broker(broker))),
        (Put(key, encode(ControllerRecord(broker, registration), key), lease),),
    )


def resign(view: ClusterView, term: int) -> Transaction:
    """Let another broker be the controller."""
    return Transaction((ModRevision(view.keys.controller, term),), (Delete(view.keys.controller),))


def in_term(view: ClusterView, term: int) -> Transaction:
    """What every transaction of a controller compares: that it is in its term, and that the store did not go back."""
    return Transaction((ModRevision(view.keys.controller, term), Absent(view.keys.frozen)), ())


def place(view: ClusterView, shard: ShardId, record: ShardRecord, deleted: str) -> Transaction:
    """A new shard, unless it is there or its stream was deleted. `deleted`: the key of that mark."""
    assert record.epoch == 1 and record.isr == {
        broker: view.nodes[broker].registration for broker in record.isr
    }
    key = view.keys.shard(shard)
    return Transaction(
        (Absent(key), Absent(deleted), *_nodes(view, record.isr)), (_put(view, shard, record),)
    )


def elect(view: ClusterView, shard: ShardId, election: str) -> Transaction | Refusal:
    """A leader for the next epoch, from the members that surely have all that is committed; or, if there is none, the mark that nobody
    leads. Compared is that the leader has stopped, and the start of each broker that is written into the record."""
    record = view.shards[shard]
    if not leader_has_stopped(view, record):
        return Refusal(
            Reason.STILL_LEADS, f"{record.leader} holds its lease and has not yielded.", retry=True
        )
    brokers = view.brokers
    found = candidates(record, brokers)
    if found:
        after = membership.elected(record, found[0], brokers.registrations(), view.nodes, election)
    elif record.leader:
        after = membership.vacant(record)
    else:
        return Refusal(Reason.NOBODY_ELIGIBLE, why_vacant(view, shard), retry=True)
    return Transaction(
        (*_stopped(view, shard), *_nodes(view, after.isr if found else ())), (_put(view, shard, after),)
    )


def elect_longest(
    view: ClusterView, shard: ShardId, winner: str, election: str, end: LogEnd | None = None
) -> Transaction | Refusal:
    """After a power cut of an `interval` shard: the copy that goes on longest leads, and is marked as perhaps shorter than before. `end`: its, as it said."""
    record = view.shards[shard]
    if not (leader_has_stopped(view, record) and may_ask_for_ends(record, view.brokers)):
        return Refusal(
            Reason.CHANGED, "A member surely has all that is committed, or is not back yet.", retry=True
        )
    registration = view.brokers.registration(winner)
    after = membership.elected_unclean(record, winner, registration, election)
    told = end.offset if end is not None and end.registration == registration else None
    said = unclean_election(
        shard, after, "power-cut", winner, told,
        why="its acknowledgements are not synced, and no copy that may lead is sure to have them all; this one goes on longest",
    )  # fmt: skip
    return Transaction(
        (*_stopped(view, shard), *_nodes(view, record.members())),
        (_put(view, shard, after), state_unclean(view.keys, said)),
    )


def begin_anew(view: ClusterView, shard: ShardId, broker: str, election: str) -> Transaction | Refusal:
    """After the leader of a shard that is in memory alone has stopped: `broker` leads it, without anything."""
    record, registration = view.shards[shard], view.brokers.registration(broker)
    if not leader_has_stopped(view, record):
        return Refusal(Reason.CHANGED, f"{record.leader} leads the shard.", retry=True)
    if not registration:
        return Refusal(Reason.NOT_REGISTERED, f"{broker} is not alive.", retry=True)
    after = membership.begun_anew(record, broker, registration, election)
    return Transaction((*_stopped(view, shard), *_nodes(view, [broker])), (_put(view, shard, after),))


def take_out_replaced(view: ClusterView, shard: ShardId) -> Transaction | Refusal:
    """Remove the members whose folders were replaced from all sets."""
    record = view.shards[shard]
    after = membership.without_replaced(record, view.nodes)
    if after == record:
        return Refusal(Reason.CHANGED, "No member's folder was replaced.")
    return Transaction(
        (
            unchanged(view, view.keys.shard(shard)),
            *_nodes(view, record.members().keys() - after.members().keys()),
        ),
        (_put(view, shard, after),),
    )


def move(view: ClusterView, shard: ShardId, target: tuple[str, ...]) -> Transaction | Refusal:
    """Lead the shard to the brokers `target`, the first of which is to lead, be they new or the replicas; () ends a move where it
    stands. Whoever is to lead, or to get a copy, must be alive; a copy that stays may be away."""
    record = view.shards[shard]
    after = msgspec.structs.replace(record, target=target)
    strangers = after.members().keys() - {*after.replicas, *after.target}
    if strangers:
        return Refusal(
            Reason.STILL_ALIVE,
            f"{', '.join(sorted(strangers))} came in with the move and must leave the sets first.",
        )
    needed = [broker for broker in target if broker == target[0] or broker not in record.replicas]
    if unknown := [broker for broker in needed if not view.brokers.registration(broker)]:
        return Refusal(Reason.NOT_REGISTERED, f"{', '.join(unknown)} is not alive.", retry=True)
    if after == record or (target and len(target) < record.min):
        return Refusal(Reason.CHANGED, "That is where it is, or too few for its min.")
    return Transaction(
        (unchanged(view, view.keys.shard(shard)), *_nodes(view, target)), (_put(view, shard, after),)
    )


def arrive(view: ClusterView, shard: ShardId) -> Transaction | Refusal:
    """A move whose target is in sync and leads is done: the others are replicas no more."""
    record = view.shards[shard]
    if not membership.has_arrived(record):
        return Refusal(Reason.CHANGED, "Its target is not in sync yet, or does not lead.", retry=True)
    return Transaction(
        (unchanged(view, view.keys.shard(shard)),), (_put(view, shard, membership.arrived(record)),)
    )


def remove(view: ClusterView, shard: ShardId, deleted: str, deleted_revision: int) -> Transaction:
    """Forget a shard whose stream was deleted, as the mark `deleted` says."""
    key = view.keys.shard(shard)
    return Transaction((unchanged(view, key), ModRevision(deleted, deleted_revision)), (Delete(key),))


def while_rebalancing(view: ClusterView, made: Transaction) -> Transaction:
    """A move that an operator's word asks for, and nothing else: it does not begin once the word is taken back, whoever hears of that how late."""
    return Transaction((*made.compares, unchanged(view, view.keys.rebalance)), made.writes)


def rebalanced(view: ClusterView) -> Transaction:
    """Nothing is left to move, or to be moved, as an operator says. A newer word than the one that was carried out, or read, stays."""
    key = view.keys.rebalance
    return Transaction((unchanged(view, key),), (Delete(key),))


# A shard's leader


def change(
    view: ClusterView, shard: ShardId, leader: str, before: ShardRecord, revision: int, after: ShardRecord
) -> Transaction | Refusal:
    """The leader's change of sets, min, durability, the list of offloaded segments, or its word that it yields: `before`, as read at `revision`, becomes `after`.

    Compared are the record, the leader's own lease and registration, and the start of each member that is newly written. `after` may be
    equal to `before`: that settles an earlier change whose answer was lost.
    """
    assert _leaders_part(before) == _leaders_part(after), (
        "a leader changes sets, min, durability and what is offloaded, and yields"
    )
    registration = before.isr.get(leader)
    if before.leader != leader or has_yielded(before):
        return Refusal(Reason.NOT_LEADER, f"{leader} does not lead epoch {before.epoch}, or has yielded it.")
    if registration is None or view.brokers.registration(leader) != registration:
        return Refusal(
            Reason.NO_LEASE,
            f"{leader} is not alive under the registration that it was elected with.",
            retry=True,
        )
    written = {member for member, number in after.isr.items() if before.isr.get(member) != number}
    if after.durability != before.durability:
        written = set(after.isr)
    for member in written:
        node = view.nodes.get(member)
        if node is None or node.registration != after.isr[member]:
            return Refusal(
                Reason.NOT_REGISTERED, f"{member} was started again since it was seen in sync.", retry=True
            )
    return Transaction(
        (
            ModRevision(view.keys.shard(shard), revision),
            unchanged(view, view.keys.broker(leader)),
            Absent(view.keys.frozen),
            *_nodes(view, written),
        ),
        (_put(view, shard, after),),
    )


def _leaders_part(record: ShardRecord) -> ShardRecord:
    return msgspec.structs.replace(
        record, isr={}, elr={}, failed={}, min=1, durability="fsync", yielded=None, offloaded=None
    )


# A broker that has a copy


def leave_sets(view: ClusterView, shard: ShardId, broker: str, *, if_alone: bool) -> Transaction | None:
    """`broker` says that what it had acknowledged is gone from its copy, before it could lead with what is left: it is no member any more,
    and the leader is nobody where it was that. None where it is none, or is the last one and not `if_alone`.

    Compared is its own start, so that none before or after it says so.
    """
    record = view.shards[shard]
    members = record.members()
    if broker not in members or (len(members) == 1 and not if_alone):
        return None
    after = membership.without_member(record, broker)
    return Transaction(
        (unchanged(view, view.keys.shard(shard)), Absent(view.keys.frozen), *_nodes(view, [broker])),
        (_put(view, shard, after),),
    )


def open_again(view: ClusterView, shard: ShardId, broker: str) -> Transaction | Refusal:
    """`broker` says that its copy, which had failed, is open again with all that it had acknowledged: it may be elected under the registration that
    it failed with. Where somebody leads, that one says so as it lets it in.

    Compared are the record, its own lease and registration.
    """
    record = view.shards[shard]
    registration = record.failed.get(broker)
    if registration is None or (record.leader and not has_yielded(record)):
        return Refusal(Reason.CHANGED, f"The copy of {broker} is not out, or the shard is led.")
    if view.brokers.registration(broker) != registration:
        return Refusal(
            Reason.NO_LEASE, f"{broker} is not alive under the registration that it failed with.", retry=True
        )
    after = msgspec.structs.replace(record, failed=membership.without(record.failed, [broker]))
    return Transaction(
        (
            unchanged(view, view.keys.shard(shard)),
            unchanged(view, view.keys.broker(broker)),
            Absent(view.keys.frozen),
            *_nodes(view, [broker]),
        ),
        (_put(view, shard, after),),
    )


# An operator


def recover(
    view: ClusterView,
    shard: ShardId,
    winner: str,
    dead: Collection[str],
    election: str,
    *,
    silent_ms: Mapping[str, int],
    detached_ms: int,
    powered_off: bool = False,
    ends: Mapping[str, LogEnd | Unopened] = NO_ENDS,
    by: str = "",
) -> Transaction | Refusal:
    """Elect outside the rules, accepting loss: `winner` leads although it may lack what was committed. The audit log is told by whom (`by`, SPIFFE id).

    `dead`: the brokers whose copies are given up; all that have one and are not alive must be named, and no member among them may be alive.
    `silent_ms`: for how long each has had no lease; a leader may go on committing until `detached_ms` after it lost its own, unless it is
    `powered_off`. `ends`: how far the copies go that are alive, as was just heard: `winner` leads only if none of them goes further, and what
    one of them has beside it, or cannot open, must be named, too.
    """
    record = view.shards[shard]
    if record.stream.startswith("felix/system/audit"):
        return Refusal(
            Reason.SYSTEM_AUDIT,
            "The audit log is never led by a copy that may lack leaves: it would be a second history.",
        )
    if not leader_has_stopped(view, record):
        return Refusal(Reason.STILL_LEADS, f"{record.leader} leads the shard.")
    brokers, replicas = view.brokers, {*record.replicas, *record.target}
    given_up = sorted(
        member
        for member, recorded in record.members().items()
        # What it had went with its folder, as an operator said.
        if member != winner and not membership.is_replaced(view.nodes.get(member), recorded)
    )
    away = [broker for broker in replicas - {winner} if not brokers.registration(broker)]
    if missing := [broker for broker in sorted({*given_up, *away}) if broker not in dead]:
        return Refusal(
            Reason.NOT_NAMED,
            f"{', '.join(missing)} may have all that is committed and must be named as lost, too.",
        )
    # One that may not lead and has said what it has, or that it cannot open it, is compared below.
    if alive := [
        member
        for member in given_up
        if member in view.alive
        and (is_eligible(record, member, brokers) or not _has_told(member, ends, brokers))
    ]:
        return Refusal(
            Reason.STILL_ALIVE, f"{', '.join(alive)} may have all that is committed, and is alive."
        )
    early = [
        member for member in given_up if member not in view.alive and silent_ms.get(member, 0) < detached_ms
    ]
    if early and not powered_off:
        return Refusal(
            Reason.TOO_EARLY,
            f"{', '.join(early)} may still commit what would be lost: a leader that is cut off stops {detached_ms // 60_000} minutes after its lease.",
            retry=True,
        )
    registration = brokers.registration(winner)
    if not registration or winner not in replicas:
        return Refusal(Reason.NOT_REGISTERED, f"{winner} is no living replica of the shard.", retry=True)
    others = sorted(replicas - {winner, *away})
    if refusal := _why_not_from(winner, others, dead, ends, brokers):
        return refusal
    after = membership.elected_unclean(record, winner, registration, election)
    own = ends.get(winner) if _has_told(winner, ends, brokers) else None
    said = unclean_election(
        shard, after, "recovered", winner, own.offset if isinstance(own, LogEnd) else None,
        given_up={*given_up, *away, *replicas.intersection(dead)} - {winner}, powered_off=powered_off, by=by,
    )  # fmt: skip
    return Transaction(
        (
            *_stopped(view, shard),
            # Whoever comes, or comes back, meanwhile may have more.
            *_nodes(view, replicas & view.nodes.keys()),
            *(
                unchanged(view, view.keys.broker(broker))
                if broker in view.alive
                else Absent(view.keys.broker(broker))
                for broker in sorted({*given_up, *away})
            ),
            Absent(view.keys.frozen),
        ),
        (_put(view, shard, after), state_unclean(view.keys, said)),
    )


def state_unclean(keys: ClusterKeys, said: UncleanElection) -> Put:
    """What has an unclean election told to the audit log; to be written with the record that says so."""
    return Put(keys.unclean_election(said), said.encode())


def unclean_election(
    shard: ShardId,
    after: ShardRecord,
    cause: UncleanCause,
    leader: str,
    end: int | None,
    *,
    given_up: Collection[str] = (),
    powered_off: bool = False,
    by: str = "",
    why: str = "",
) -> UncleanElection:
    """The statement of a record that says so. `leader`: whose copy it is led from; `end`: that copy's, where it was told."""
    return UncleanElection(
        stream=after.stream,
        incarnation=shard.incarnation,
        shard=shard.number,
        epoch=after.epoch,
        election=after.election,
        cause=cause,
        leader=leader,
        end=end,
        given_up=tuple(sorted(given_up)),
        powered_off=powered_off,
        by=by,
        why=why[:WHY_CHARS_MAX],
    )


def _has_told(broker: str, ends: Mapping[str, LogEnd | Unopened], brokers: Brokers) -> bool:
    """Whether `broker` has said, under its present registration, how far its copy goes."""
    end = ends.get(broker)
    return end is not None and end.registration == brokers.registration(broker)


def _why_not_from(
    winner: str,
    others: Sequence[str],
    dead: Collection[str],
    ends: Mapping[str, LogEnd | Unopened],
    brokers: Brokers,
) -> Refusal | None:
    """Why `winner` is not to be the shard's copy while these, which are alive, have copies, too."""
    told = {broker: ends[broker] for broker in (winner, *others) if _has_told(broker, ends, brokers)}
    own = told.get(winner)
    unopened_own = (
        Refusal(Reason.BEHIND, f"{winner} cannot open its copy: {own.why}")
        if isinstance(own, Unopened)
        else None
    )
    if not others:
        # Alone: who has not said is taken; who says that there is nothing to lead from is not.
        return unopened_own
    if silent := [
        broker
        for broker in (winner, *others)
        if broker not in told and (broker == winner or broker not in dead)
    ]:
        return Refusal(
            Reason.NO_REPORT,
            f"{', '.join(silent)} is alive and has not said how far its copy goes.",
            retry=True,
        )
    if unopened_own is not None:
        return unopened_own
    assert isinstance(own, LogEnd)
    known = {broker: end for broker in others if isinstance(end := told.get(broker), LogEnd)}
    if more := [broker for broker, end in known.items() if end.rank > own.rank]:
        lacks = max(known[broker].offset for broker in more) - own.offset
        has = [
            " with ".join(
                [f"{broker} is alive and has {known[broker]}", *known[broker].journals_beyond(own)[:1]]
            )
            for broker in more
        ]
        return Refusal(
            Reason.BEHIND,
            f"{winner} has {own}{f' and lacks {lacks:,} of them' if lacks > 0 else ''}: {', '.join(has)}, the last of epoch "
            f"{max(known[broker].last_epoch for broker in more)}; those of {winner} end with epoch {own.last_epoch}.",
        )
    cut = {broker: lost for broker, end in known.items() if broker not in dead and (lost := end.beyond(own))}
    unopened = [broker for broker in others if isinstance(told.get(broker), Unopened) and broker not in dead]
    if cut or unopened:
        said = [f"{broker} has {' and '.join(lost)}, which would be cut" for broker, lost in cut.items()]
        said += [f"{broker} cannot open its copy, which may have more" for broker in unopened]
        return Refusal(Reason.NOT_NAMED, f"{'; '.join(said)}: it must be named as lost, too.")
    return None


def rebalance(view: ClusterView, by: str) -> Transaction:
    """Have the controller, whichever broker that is or becomes, move copies until each broker has its share. `by`: who asks."""
    key = view.keys.rebalance
    return Transaction((unchanged(view, key),), (Put(key, encode(RebalanceRecord(by), key)),))


def freeze(view: ClusterView, broker: str, why: str) -> Transaction:
    """Say that the store went back: nothing is placed or elected until it has been reconciled.

    Compared is the broker's own start: a mark that comes late, once the region was reconciled and its brokers were started again, is none.
    """
    key = view.keys.frozen
    return Transaction(
        (Absent(key), *_nodes(view, [broker])), (Put(key, encode(FrozenRecord(broker, why), key)),)
    )


def went_back(known: tuple[int, str], record: ShardRecord) -> bool:
    """Whether a record that is read now is of an earlier state than `known`, epoch and election id of a log or of an earlier record."""
    epoch, election = known
    return record.epoch < epoch or (record.epoch == epoch and record.election != election)


def leader_has_stopped(view: ClusterView, record: ShardRecord) -> bool:
    """As `election.has_stopped`; where what the leader says of itself cannot be read, such as a later version's word, it has not."""
    is_told = not record.leader or view.keys.broker(record.leader) not in view.unreadable
    return is_told and has_stopped(record, view.alive)


def why_vacant(view: ClusterView, shard: ShardId) -> str:
    """Why nobody can lead the shard, member by member, as a sentence for a person."""
    return f"{view.shards[shard].stream} shard {shard.number}: {reasons_vacant(view, shard)}."


def reasons_vacant(view: ClusterView, shard: ShardId) -> str:
    """The same, without the shard's name."""
    record, brokers = view.shards[shard], view.brokers
    reasons = []
    for member, recorded in sorted(record.members().items()):
        registration, node = brokers.registration(member), view.nodes.get(member)
        if membership.is_replaced(node, recorded):
            why = "has another folder"
        elif not registration:
            why = "is not alive"
        elif record.failed.get(member) == registration or (
            member in record.failed and record.durability == "interval"
        ):
            why = "has a copy that failed"
        else:
            why = "may have lost what was not synced"
        reasons.append(f"{member} {why}")
    return "; ".join(reasons) or "no copy has all that is committed"


def _stopped(view: ClusterView, shard: ShardId) -> tuple[Compare, ...]:
    """The record as it was read, and that its leader has stopped leading."""
    record = view.shards[shard]
    compares: tuple[Compare, ...] = (unchanged(view, view.keys.shard(shard)),)
    if record.leader and not has_yielded(record):
        compares += (unchanged(view, view.keys.broker(record.leader)),)
    return compares


def _nodes(view: ClusterView, brokers: Iterable[str]) -> tuple[Compare, ...]:
    """That these brokers have not been started again, and have the folders that were seen."""
    return tuple(unchanged(view, view.keys.node(broker)) for broker in sorted(brokers))


def unchanged(view: ClusterView, key: str) -> Compare:
    """That the key is as it is known in `view`."""
    revision = view.revision_of(key)
    return ModRevision(key, revision) if revision else Absent(key)


def _put(view: ClusterView, shard: ShardId, record: ShardRecord) -> Put:
    key = view.keys.shard(shard)
    return Put(key, encode(record, key))
