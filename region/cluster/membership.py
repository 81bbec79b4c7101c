"""How the sets of a shard change: each change is a function from one record to the next.

`isr` and `elr` together have all that is committed; a commit waits for every member of `isr`, and happens only while `isr` has `min`
members and `elr` has none. So whoever leaves `isr` while it falls below `min` stays eligible (KIP-966), with the registration that stood
for him, and `elr` empties with the change that makes `isr` large enough. Pure; `election` says who may lead, `transactions` what is
compared where a change is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from region.cluster.records import (
    CANNOT_SERVE,
    NodeRecord,
    ShardDurability,
    ShardRecord,
    Yielded,
    YieldReason,
)
from region.log.epochs import elected_epoch


def with_expanded(record: ShardRecord, member: str, registration: int) -> ShardRecord:
    """`member` is in sync under `registration`: it has all that is committed, and every commit waits for it from now on."""
    failed = {broker: failure for broker, failure in record.failed.items() if broker != member}
    return _settled(record, record.isr | {member: registration}, without(record.elr, [member]), failed)


def with_shrunk(record: ShardRecord, leavers: Collection[str]) -> ShardRecord:
    """No commit waits for `leavers` any more. They stay eligible while `isr` is below `min`, for nothing is committed without them."""
    left = {broker: registration for broker, registration in record.isr.items() if broker in leavers}
    return _settled(record, without(record.isr, leavers), record.elr | left, record.failed)


def with_min(record: ShardRecord, minimum: int) -> ShardRecord:
    """`minimum` members are needed for a commit from now on; in one change with `elr`, which what was set aside for the old number
    may not outlive."""
    return _settled(msgspec.structs.replace(record, min=minimum), record.isr, record.elr, record.failed)


def with_durability(record: ShardRecord, durability: ShardDurability) -> ShardRecord:
    """What members acknowledge from now on means `durability`.

    To `interval`: written before any acknowledges so little. To `fsync`: written once every member of `isr`, under the registration that
    is recorded, has synced what it acknowledged; nobody knows that of `elr`, which is dropped.
    """
    if durability == "fsync" and record.durability != "fsync":
        record = msgspec.structs.replace(record, elr={})
    return msgspec.structs.replace(record, durability=durability)


def with_yield(record: ShardRecord, why: YieldReason) -> ShardRecord:
    """The leader stops serving for good in this epoch.

    Where its copy cannot serve, it leaves `isr` if a member of either set remains, and is not elected again under this registration.
    """
    yielded = msgspec.structs.replace(record, yielded=Yielded(record.epoch, why))
    leader = record.leader
    if why not in CANNOT_SERVE or leader not in record.isr:
        return yielded
    failed = record.failed | {leader: record.isr[leader]}
    isr, elr = record.isr, record.elr
    if len(record.members()) > 1:
        isr = without(isr, [leader])
        if has_all_that_is_committed(record.durability, why):
            elr = elr | {leader: record.isr[leader]}
    return _settled(yielded, isr, elr, failed)


def has_all_that_is_committed(durability: ShardDurability, why: YieldReason) -> bool:
    """Whether a copy that cannot serve for the reason `why` still has, after a restart, all that it acknowledged."""
    # A failed sync takes from the page cache what was acknowledged without one.
    return why == "hung" or (why == "failed" and durability == "fsync")


def elected(
    record: ShardRecord,
    winner: str,
    registrations: Mapping[str, int],
    nodes: Mapping[str, NodeRecord],
    election: str,
) -> ShardRecord:
    """`winner` leads the next epoch. `registrations`: of the brokers that are alive.

    In sync stay the members of the old `isr` that are alive and have not been restarted; a member of `elr` may lack what the winner has.
    """
    isr = {winner: registrations[winner]}
    for member, registration in record.isr.items():
        if registrations.get(member) == registration and record.failed.get(member) != registration:
            isr.setdefault(member, registration)
    others = without(record.members(), isr)
    next_epoch = msgspec.structs.replace(
        record, epoch=elected_epoch(record.epoch, election), election=election, leader=winner, yielded=None
    )
    elr = {
        member: registration
        for member, registration in others.items()
        if not is_replaced(nodes.get(member), registration)
    }
    return _settled(next_epoch, isr, elr, without(record.failed, [winner]))


def elected_unclean(
    record: ShardRecord, winner: str, registration: int, election: str, *, epoch: int | None = None
) -> ShardRecord:
    """`winner` leads the next epoch (or `epoch`), although it may lack what was committed: its copy is what the shard is from now on."""
    epoch = elected_epoch(record.epoch, election) if epoch is None else epoch
    return msgspec.structs.replace(
        record,
        epoch=epoch,
        election=election,
        leader=winner,
        yielded=None,
        isr={winner: registration},
        elr={},
        failed={},
        unclean=epoch,
    )


def begun_anew(record: ShardRecord, broker: str, registration: int, election: str) -> ShardRecord:
    """`broker` leads the next epoch of a shard that is in memory alone, with nothing: what the last leader had is gone with it."""
    return msgspec.structs.replace(
        record,
        epoch=elected_epoch(record.epoch, election),
        election=election,
        leader=broker,
        yielded=None,
        replicas=(broker,),
        isr={broker: registration},
        elr={},
        failed={},
        target=(),
    )


def vacant(record: ShardRecord) -> ShardRecord:
    """Nobody leads; the epoch stays, and who has all that is committed."""
    return msgspec.structs.replace(record, leader="")


def without_replaced(record: ShardRecord, nodes: Mapping[str, NodeRecord]) -> ShardRecord:
    """The record without the members whose folder is another one since they were recorded: what they had is gone.

    A leader stays in `isr` until another is elected: it is of an earlier registration, so it does not lead any more.
    """
    replaced = [
        member
        for member, registration in record.members().items()
        if member != record.leader and is_replaced(nodes.get(member), registration)
    ]
    return msgspec.structs.replace(
        record,
        isr=without(record.isr, replaced),
        elr=without(record.elr, replaced),
        failed=without(record.failed, replaced),
    )


def without_member(record: ShardRecord, member: str) -> ShardRecord:
    """The record without a member that has lost what it had. `elr` stays as it is: who is in it may be all that is left."""
    return msgspec.structs.replace(
        record,
        leader="" if record.leader == member else record.leader,
        isr=without(record.isr, [member]),
        elr=without(record.elr, [member]),
        failed=without(record.failed, [member]),
    )


def is_replaced(node: NodeRecord | None, registration: int) -> bool:
    """Whether what a broker had under `registration` was in another folder than its present one. Of a broker whose record is not known,
    or cannot be read, nobody says that."""
    return node is not None and registration < node.whole_since


def place_of(record: ShardRecord) -> tuple[str, ...]:
    """The brokers that have a shard, or that its move leads to; the first leads it, or is to lead it. After an election that need not be the first of its replicas."""
    if record.target or record.leader not in record.replicas:
        return record.target or record.replicas
    return (record.leader, *(broker for broker in record.replicas if broker != record.leader))


def is_enough(record: ShardRecord, place: tuple[str, ...]) -> bool:
    """Whether a shard can be on so many brokers: a commit needs no more."""
    return len(place) >= max(record.min, 1)


def has_arrived(record: ShardRecord) -> bool:
    """Whether a move is done but for its record: all of `target` are in sync, and the first of them leads and goes on leading."""
    return is_target_in_sync(record) and record.leader == record.target[0] and record.yielded is None


def is_target_in_sync(record: ShardRecord) -> bool:
    """Whether there is a move and all that it leads to have what is committed: a leader that is not their first yields now. Of a move
    that changes the leader alone, it is enough that the next one has it."""
    if not is_enough(record, record.target):
        return False
    needed = record.target[:1] if moves_leader_alone(record) else record.target
    return record.isr.keys() >= set(needed)


def moves_leader_alone(record: ShardRecord) -> bool:
    """Whether there is a move, and the copies stay where they are."""
    return bool(record.target) and set(record.target) == set(record.replicas)


def arrived(record: ShardRecord) -> ShardRecord:
    """A move is done: `target` are the replicas."""
    assert has_arrived(record)
    gone = [broker for broker in record.members() if broker not in record.target]
    return msgspec.structs.replace(
        record,
        replicas=record.target,
        target=(),
        isr=without(record.isr, gone),
        elr=without(record.elr, gone),
        failed=without(record.failed, [broker for broker in record.failed if broker not in record.target]),
    )


def without(registrations: Mapping[str, int], brokers: Collection[str]) -> dict[str, int]:
    """`registrations` but those of `brokers`."""
    return {broker: number for broker, number in registrations.items() if broker not in brokers}


def _settled(
    record: ShardRecord, isr: dict[str, int], elr: dict[str, int], failed: dict[str, int]
) -> ShardRecord:
    """With these sets: `elr` only while `isr` is below `min`, and of failures only those of members."""
    if len(isr) >= record.min:
        elr = {}
    failed = {broker: number for broker, number in failed.items() if (isr | elr).get(broker) == number}
    return msgspec.structs.replace(record, isr=isr, elr=elr, failed=failed)
