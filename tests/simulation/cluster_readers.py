"""Clients of the simulated cluster that read a shard's records, from one broker after the other.

A subscription begins at a broker that holds a lease and leads (R17): that is who tells where the log ends. Once begun it goes on below its broker's
commit point, also where the lease has ended meanwhile. Nobody may be told an end below one that he saw (5), and what a reader
gets is what is committed, in order, each once (3).
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from simulation.cluster_checks import BrokenError

from region.cluster.records import ShardId
from region.log.point import LogPoint
from region.replication.core import ReplicaCore

if TYPE_CHECKING:
    from simulation.cluster_world import ClusterWorld, Machine

LOG: Final = 0
PAUSES_MS: Final = (40, 150, 400, 1_200)
STAYS: Final = 0.9
"""Of so many looks, the subscription goes on; else the reader begins a new one, at whatever broker."""


class Reader:
    """One client. It draws by itself, so that what else happens does not depend on whether somebody reads."""

    def __init__(self, world: ClusterWorld, name: str, shard: ShardId) -> None:
        self.world, self.name, self.shard = world, name, shard
        self.random = Random(f"reader {world.seed} {name}")
        self.at = LogPoint(0)
        """what it has read"""
        self.told = LogPoint(0)
        """the highest end that it was told"""
        self._source: tuple[Machine, int, int] | None = None
        """whom it reads from: a process, in one epoch"""

    def look(self) -> None:
        """Read what there is, or look for somebody who tells where the log ends."""
        if self.world.calm:
            return
        if self._source is None or self.random.random() > STAYS:
            self._begin()
        else:
            self._go_on()
        self.world.later(self.random.choice(PAUSES_MS), self.look)

    def forget(self) -> None:
        """What it read may be gone, as an operator was told."""
        self.at = self.told = LogPoint(0)
        self._source = None

    def _asked(self, machine: Machine) -> ReplicaCore | None:
        return (
            machine.cores.get(self.shard) if machine.up and machine.paused_until <= self.world.now else None
        )

    def _begin(self) -> None:
        self._source = None
        machine = self.random.choice(self.world.machines)
        core = self._asked(machine)
        if core is None or not may_begin(core, self.world.local(machine)):
            self.world.counts["readers sent on"] += 1
            return
        end = core.replica.logs[LOG].commit
        if end < self.told:
            raise BrokenError(
                f"5: {self.name} is told an end of {end} by {machine.name}, and saw {self.told}"
            )
        self.told = end
        self._source = (machine, machine.life, core.leader.epoch)
        self.world.counts["subscriptions"] += 1

    def _go_on(self) -> None:
        assert self._source is not None
        machine, life, epoch = self._source
        core = self._asked(machine)
        if machine.life != life or core is None or core.leader.epoch != epoch or not core.leader.commits:
            if machine.paused_until <= self.world.now:
                self._source = None
            return
        log, model = core.replica.logs[LOG], machine.disk.log(self.shard, LOG)
        # What retention let go of is told as a gap.
        self.at = max(self.at, log.start)
        known = self.world.checks.committed.get((self.shard, LOG), [])
        for frame in model.read(self.at, 1 << 20):
            if frame.end > log.commit:
                break
            index = self.world.checks.index(known, frame)
            if index < 0 or known[index] != frame or (index and known[index - 1].end > self.at):
                raise BrokenError(
                    f"3: {self.name} reads {frame} of {machine.name} behind {self.at}, and that is not what is committed"
                )
            self.at = frame.end
            self.world.counts["read"] += 1
        self.told = max(self.told, self.at)


def may_begin(core: ReplicaCore, now: int) -> bool:
    """R17: a holder of a lease tells where a log ends, nobody else."""
    return core.leader.may_answer(now)
