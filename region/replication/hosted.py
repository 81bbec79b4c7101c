"""A copy that this broker has of a shard, with its core and its logs' workers, and what follows from these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from felix.errors import Code, UnavailableError
from region.cluster.records import ShardDurability, ShardId
from region.log.left import what_is_missing
from region.log.point import LogPoint
from region.replication.copier import Copier
from region.replication.copies import HostedCopies
from region.replication.core import ReplicaCore
from region.replication.disk import LogPlan, ReplicaDisk
from region.replication.leader import HUNG_MS, Phase
from region.replication.log_worker import LogWorker

RETRY_MS: Final = 250
"""How soon a refused append may be tried again."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A shard that this broker has a copy of, with all its logs."""

    shard: ShardId
    logs: tuple[LogPlan, ...]
    durability: ShardDurability = "fsync"
    answers_early: bool = False
    """`acks: leader`: an append is answered once it is durable on the leader; it is read once it is committed, as ever."""


@dataclass(slots=True)
class Hosted:
    """A replica of this broker."""

    plan: ShardPlan
    core: ReplicaCore
    workers: dict[int, LogWorker]
    copier: Copier = field(init=False)
    led: dict[int, HostedCopies] = field(default_factory=dict)
    """per log: whoever leads it here, until it is released"""
    is_settling: bool = False
    """deposed, while logs are not released"""
    was_led: bool = False
    """as listeners were told"""
    min_wanted: int = 0
    """as the core was told"""
    put_off: list[object] = field(default_factory=list)
    """events meanwhile"""
    to_begin: dict[int, int] = field(default_factory=dict)
    """per log the epoch that it is about to begin"""
    full_again_ms: int = 0
    """from when on a full disk, or one that takes no repair, has another one lead"""
    hangs: bool = False
    """its disk has not answered for HUNG_MS"""
    broken: str = ""
    """why nothing is done any more: our own mistake"""
    ends: dict[int, LogPoint] = field(default_factory=dict)
    """per log that has failed, and is closed: how far it may have been acknowledged"""
    is_abandoned: bool = False
    """whether its logs are closed, to be opened again"""
    unchanged: str = ""
    """why its record was not changed when that was tried last, as the log has it; empty once it was"""

    @property
    def shard(self) -> ShardId:
        """Whose replica it is."""
        return self.plan.shard

    @property
    def answers_early(self) -> bool:
        """As `Replica.answers_early`."""
        return self.core.replica.answers_early

    @property
    def is_fsync(self) -> bool:
        """Whether nothing is acknowledged here that was not synced."""
        return self.plan.durability == "fsync"

    @property
    def leads(self) -> bool:
        """Whether it commits as leader."""
        return self.core.leader.commits and not self.broken

    @property
    def serves(self) -> bool:
        """Whether it leads, and all that it had at its election is committed (N3): before anybody leads its logs here, all that they have. Whoever
        led them in this epoch and released them, as another shard of the stream was not led, may have left what is not."""
        return (
            self.core.leader.phase is Phase.SERVING
            and not self.is_settling
            and not self.broken
            and (bool(self.led) or all(log.is_committed for log in self.core.replica.logs.values()))
        )

    @property
    def has_failed(self) -> bool:
        """Whether what is known here of its logs may not be what is on the disk."""
        return bool(self.broken) or any(worker.failure for worker in self.workers.values())

    @property
    def is_hung(self) -> bool:
        """Whether the disk of one of its logs has not answered for HUNG_MS."""
        return any(worker.unanswered_s * 1_000 > HUNG_MS for worker in self.workers.values())

    @property
    def is_whole(self) -> bool:
        """Whether its shard is led elsewhere, or every copy of that is in sync."""
        standing = self.core.leader.standing
        return standing is None or standing.record.isr.keys() >= set(standing.record.replicas)

    def acknowledged(self, number: int) -> LogPoint:
        """How far a log that has failed may have been acknowledged."""
        durable = self.core.replica.logs[number].durable
        return durable if self.is_fsync else max(durable, self.workers[number].disk.log.end_point)

    def lags(self, number: int) -> dict[str, int]:
        """How many records of a log that is led here each other copy has not acknowledged. One that is away lacks what came since, and of one that is not known
        yet it is all. From every thread."""
        log, found = self.core.replica.logs[number], {}
        for peer, follower in list(self.core.leader.followers.items()):
            copy = follower.logs.get(number)
            durable = follower.acknowledged.get(number, log.start) if copy is None else copy.durable
            found[peer] = max(0, log.end.offset - max(log.start.offset, durable.offset))
        return found

    def producers(self, number: int) -> bytes:
        """Those of a log, as far as whoever leads it here shows them, else of all that it has."""
        led = self.led.get(number)
        snapshot = None if led is None else led.snapshot()
        disk = self.workers[number].disk
        return disk.producers.encode(disk.log.end_offset) if snapshot is None else snapshot


def what_was_lost(before: Hosted, disks: Mapping[int, ReplicaDisk]) -> str:
    """What a copy whose logs had failed, and are open again, has not any more; empty where it has all."""
    for number, end in before.ends.items():
        if missing := what_is_missing(disks[number].log.end_point, end):
            return f"log {number} {missing}"
    return ""


def not_leader(shard: ShardId) -> UnavailableError:
    """The answer to an append where the shard is not led, or no longer."""
    return UnavailableError(
        f"This broker does not lead shard {shard.number}. It was not written.",
        code=Code.NOT_LEADER,
        hint="Ask the shard's new leader; a producer's sequence tells it what it has already.",
        retry_after_ms=RETRY_MS,
    )
