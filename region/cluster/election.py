"""Who may lead a shard, and in which order they are tried.

A copy may lead by rule only if it surely has all that is committed: it is a member of `isr` or `elr`, and nothing that it acknowledged
under the registration that is *recorded* for it can have been lost since. Pure; `controller` decides when there is an election.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from region.cluster.membership import is_replaced
from region.cluster.records import BrokerRecord, NodeRecord, ShardRecord
from region.log.companions import JournalKind

NOBODY: Final = ""


@dataclass(frozen=True, slots=True)
class Brokers:
    """The brokers of a region as they stood at one time: all that were ever registered, and those that are alive."""

    nodes: Mapping[str, NodeRecord]
    alive: Mapping[str, BrokerRecord]

    def registration(self, broker: str) -> int:
        """Under which `broker` is alive; 0 where it is not, or is just being registered anew."""
        node, alive = self.nodes.get(broker), self.alive.get(broker)
        if node is None or alive is None or node.registration != alive.registration:
            return 0
        return alive.registration

    def registrations(self) -> dict[str, int]:
        """Of all that are alive."""
        return {broker: number for broker in self.alive if (number := self.registration(broker))}


class JournalEnd(NamedTuple):
    """How far a log beside the records goes: `kind` (region.log.companions), the epoch of its last entry, and its end."""

    kind: int
    epoch: int
    end: tuple[int, int]

    def __str__(self) -> str:
        known = {kind.value: f"{kind.name.lower()} journal" for kind in JournalKind}
        return known.get(self.kind, f"journal {self.kind}")


@dataclass(frozen=True, slots=True)
class LogEnd:
    """How far a broker's copy of a shard goes, as it said under `registration`: the epoch of its last entry with its
    election id, and its end."""

    registration: int
    last_epoch: int
    election: str
    end: tuple[int, int]
    journals: tuple[JournalEnd, ...] = ()
    """of each log beside the records, by their kinds"""

    @property
    def rank(self) -> tuple[object, ...]:
        """The larger it is, the more there is of what was committed last (Raft, 5.4.1): the last epoch, then the end."""
        return self.last_epoch, self.end, self.journals

    @property
    def offset(self) -> int:
        """Of the next record."""
        return self.end[0]

    def beyond(self, other: LogEnd) -> list[str]:
        """What this copy has and the `other` lacks: what is cut here once that one leads. A phrase for each log; none where it lacks nothing."""
        records = f"records {other.offset:,} to {self.offset - 1:,}"
        return [*([records] if self.offset > other.offset else []), *self.journals_beyond(other)]

    def journals_beyond(self, other: LogEnd) -> list[str]:
        """The same, of the logs beside the records."""
        found = []
        ends = {journal.kind: journal for journal in other.journals}
        for journal in self.journals:
            theirs = ends.get(journal.kind, JournalEnd(journal.kind, 0, (0, 0)))
            begin, end = theirs.end[0], journal.end[0]
            if end > begin:
                found.append(f"entries {begin:,} to {end - 1:,} of the {journal}")
            elif journal.epoch > theirs.epoch:
                found.append(f"the entries of epoch {journal.epoch} of the {journal}")
        return found

    def __str__(self) -> str:
        return f"records to {self.offset - 1:,}" if self.offset else "no records"


@dataclass(frozen=True, slots=True)
class Unopened:
    """What a broker said under `registration` that has a shard's copy and cannot open it: why. It may have anything."""

    registration: int
    why: str


def has_stopped(record: ShardRecord, alive: Mapping[str, BrokerRecord]) -> bool:
    """Whether the leader of the record's epoch has stopped leading for certain, or there is none: it yielded, its lease ended, or it was
    started again. As long as its lease holds, only its own word counts."""
    if not record.leader or has_yielded(record):
        return True
    broker = alive.get(record.leader)
    return broker is None or broker.registration != record.isr.get(record.leader)


def has_yielded(record: ShardRecord) -> bool:
    """Whether the leader said that it stopped serving in the record's epoch."""
    return record.yielded is not None and record.yielded.epoch == record.epoch


def is_eligible(record: ShardRecord, member: str, brokers: Brokers) -> bool:
    """Whether `member` is alive and surely has all that is committed.

    What it acknowledged counts by the registration in the record, which its folder must have outlived: with `fsync` if the folder is the
    same, with `interval` if no unsynced byte can have been lost since either.
    """
    recorded, registration = record.members().get(member), brokers.registration(member)
    if recorded is None or not registration:
        return False
    node = brokers.nodes[member]
    failed = record.failed.get(member)
    if record.durability == "fsync":
        return recorded >= node.whole_since and failed != registration
    return recorded >= node.kept_since and failed is None


def candidates(record: ShardRecord, brokers: Brokers) -> list[str]:
    """The members that may lead by rule, the best first."""
    eligible = [member for member in record.members() if is_eligible(record, member, brokers)]
    return sorted(eligible, key=lambda member: _rank(record, member, brokers))


def _rank(record: ShardRecord, member: str, brokers: Brokers) -> tuple[int, ...]:
    """Lower is better. Who has just yielded, or is being drained, comes last; then whoever the move is for; where members of the sets
    could not reach each other, who is reached by most; then who was in sync without a restart, in sync, eligible; then whose logs are
    open; then the order of the replicas."""
    wanted = record.target or record.replicas
    reached = 0
    if record.yielded is not None and record.yielded.why == "unreachable":
        reached = sum(
            member in broker.health.reaches
            for name, broker in brokers.alive.items()
            if name != member and name in record.replicas
        )
    if record.isr.get(member) == brokers.registration(member):
        standing = 0
    else:
        standing = 1 if member in record.isr else 2
    return (
        has_yielded(record) and member == record.leader,
        brokers.nodes[member].drain,
        bool(record.target) and member not in record.target,
        -reached,
        standing,
        not brokers.alive[member].health.open,
        wanted.index(member) if member in wanted else len(wanted),
    )


def may_ask_for_ends(record: ShardRecord, brokers: Brokers) -> bool:
    """Whether an `interval` shard may go on with what is left of it: all of its members are alive, none in a replaced folder and with a
    disk that serves, and none surely has all that is committed. Unsynced bytes are what `interval` does not promise at a power cut."""
    members = record.members()
    return (
        record.durability == "interval"
        and bool(members)
        and all(_has_something_left(record, member, brokers) for member in members)
        and not candidates(record, brokers)
    )


def _has_something_left(record: ShardRecord, member: str, brokers: Brokers) -> bool:
    registration = brokers.registration(member)
    return (
        registration != 0
        and record.failed.get(member) != registration
        and not is_replaced(brokers.nodes[member], record.members()[member])
    )


def longest(record: ShardRecord, ends: Mapping[str, LogEnd], brokers: Brokers) -> str:
    """Of the members of an `interval` shard, the one with the highest last epoch and end, of equal ones by their journals; `NOBODY` while one has not told its end."""
    told = {
        member: end
        for member in record.members()
        if (end := ends.get(member)) is not None and end.registration == brokers.registration(member)
    }
    if not told or len(told) < len(record.members()):
        return NOBODY
    order = {member: -place for place, member in enumerate(record.replicas)}
    return max(told, key=lambda member: (told[member].rank, order.get(member, -len(order))))
