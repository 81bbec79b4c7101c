"""What a broker's replica of one shard is, whether it leads or follows: its logs, and the newest epoch it knows. Pure.

Leader and follower core stand on it, one at a time.

Invariants (asserted after each step in the simulator):
- in each log, start <= commit <= end and durable <= end; what this process commits is durable here;
- `commit` and `Fence.epoch` never fall while the process lives, but where an unclean election lets `commit` fall.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from region.cluster.records import ShardDurability, ShardRecord
from region.log.point import LogPoint
from region.replication.history import BEGINNING, EpochStart, History
from region.replication.messages import Durable, Frame, Status

_T = TypeVar("_T")


def all_but(held: frozenset[_T], one: _T) -> frozenset[_T]:
    """All but one; where nothing is left the empty set that all share, since one of its own takes 216 bytes in each copy."""
    return (held - {one}) or frozenset()


@dataclass(slots=True)
class Log:
    """One log: the shard's records, or a journal beside them.

    `end`: behind all that was given to the file. `durable`: on the disk, as a sync of this process has proved: after a start it is the
    beginning, whatever recovery found (F8). `commit`: durable wherever it counts, as far as this replica knows. `kept`: the commit point
    that stands in the folder. `frames_from`: a copy that lacks what is before is begun anew, since it was compacted, or is in a store alone.
    `fixed_to`: it cannot be cut before, for the same reasons. `cuts`: how often it was cut or replaced: a sync that began before a cut proves nothing of what came after.
    """

    number: int
    history: History = field(default_factory=History)
    start: LogPoint = BEGINNING
    end: LogPoint = BEGINNING
    durable: LogPoint = BEGINNING
    commit: LogPoint = BEGINNING
    kept: LogPoint = BEGINNING
    frames_from: LogPoint = BEGINNING
    fixed_to: LogPoint = BEGINNING
    cuts: int = 0
    syncing_since: int = -1
    """ms; -1: no sync is asked for"""

    @property
    def is_committed(self) -> bool:
        """Whether all that was given to the file is."""
        return self.commit >= self.end

    def take(self, frames: tuple[Frame, ...], starts: tuple[EpochStart, ...]) -> None:
        """The log goes on with these."""
        for begun in starts:
            if begun.epoch > self.history.last.epoch:
                self.history.begin(begun)
        self.end = frames[-1].end

    def synced(self, point: LogPoint, cuts: int) -> bool:
        """A sync has returned; whether it says anything of the log as it is now."""
        if cuts != self.cuts:
            return False
        self.durable = max(self.durable, point)
        if self.durable >= self.end:
            self.syncing_since = -1
        return True

    def cut(self, point: LogPoint) -> None:
        """What stood from `point` on is gone."""
        self.cuts += 1
        self.end = point
        self.history.truncate(point)
        # The cut itself has to reach the disk: until it did, a restart may find again what was cut.
        self.durable = min(self.durable, point)
        self.commit = min(self.commit, point)
        self.kept = min(self.kept, point)


class Fence:
    """The newest epoch that this replica knows of, from its own logs or from the record (F1, R7, R10).

    `led`: the newest epoch that this process has led, or was elected to lead: it leads none twice (N0). `frozen`: why nothing is done any
    more, where the store went back.
    """

    __slots__ = ("election", "epoch", "frozen", "led")

    def __init__(self, epoch: int = 0, election: str = "") -> None:
        self.epoch = epoch
        self.election = election
        self.led = 0
        self.frozen = ""

    def stale(self, epoch: int) -> bool:
        """Whether a newer one is known."""
        return epoch < self.epoch

    def read(self, record: ShardRecord) -> None:
        """The record, newer than any read before. Freezes where it says an epoch below one known, or another election of that one: what
        a record or a log said was taken back."""
        if record.epoch < self.epoch:
            self.freeze(
                f"the record says epoch {record.epoch}, and epoch {self.epoch} is known: the store went back"
            )
        elif record.epoch > self.epoch:
            self.epoch, self.election = record.epoch, record.election
        elif record.election != self.election:
            self.freeze(
                f"epoch {record.epoch} has two elections, {self.election} and {record.election}: the store went back"
            )

    def freeze(self, why: str) -> None:
        """Nothing is led, followed or acknowledged any more, until an operator has reconciled the region."""
        self.frozen = self.frozen or why


@dataclass(slots=True)
class BrokerLease:
    """Until when the broker's lease holds (ms of the clock that cores are told the time by), counted from before each renewal was sent. One for
    all copies of a broker, whose host alone moves it, and only forward."""

    until_ms: int = 0


@dataclass(slots=True)
class Replica:
    """This broker's copy of a shard. `registered_at`: the store's revision that registered it: older records say nothing to it (R7)."""

    broker: str
    registration: int
    folder: str
    registered_at: int
    durability: ShardDurability
    logs: dict[int, Log]
    fence: Fence = field(init=False)
    failed: str = ""
    """why neither leading nor following is possible before the logs are opened again, or a restart (R11)"""
    copying: frozenset[int] = frozenset()
    """logs that are being replaced by copies of the leader's"""
    lease: BrokerLease = field(default_factory=BrokerLease)
    lost: bool = False
    """what was acknowledged here is gone from this copy: it leads nothing before a leader has let it into the in-sync set again, or an operator
    has it lead although it lacks that"""
    lost_in: int = 0
    """the record's epoch when that was found: what an operator does comes later"""
    answers_early: bool = False
    """`acks: leader`: an append may be answered once it is durable on the leader, before it is committed"""
    handed_over: tuple[int, dict[int, LogPoint]] | None = None
    """the newest epoch that this process yielded after a hand-over, and per log the furthest that may have been answered in it: what it took since waits for its commit"""

    def __post_init__(self) -> None:
        newest = max((log.history.last for log in self.logs.values()), default=EpochStart(0, "", BEGINNING))
        self.fence = Fence(newest.epoch, newest.election)

    def may_be_told(self, log: Log, point: LogPoint) -> bool:
        """Whether anybody may have been told, before it was committed, of what stands in a log from `point` on."""
        if not self.answers_early:
            return False
        handed = self.handed_over
        return handed is None or handed[0] != log.history.last.epoch or point < handed[1][log.number]

    @property
    def stopped(self) -> bool:
        """Whether it does nothing any more."""
        return bool(self.failed or self.fence.frozen)

    def stale_answer(self) -> Durable:
        """To a leader of an older epoch than one known."""
        fence = self.fence
        return Durable(fence.epoch, fence.election, self.registration, 0, 0, BEGINNING, Status.STALE)

    @property
    def synced(self) -> bool:
        """Whether all that it has is on its disk."""
        return all(log.durable == log.end for log in self.logs.values())
