"""Producers of the simulated cluster: batches under a producer's epoch and sequence, several in flight, now at this broker and now at another.

A producer sends what is not acknowledged again, in order and under the same sequences, wherever it goes on; a leader knows from its log what it
has already. One that is told that its sequence has a gap takes the next epoch and numbers anew what is not acknowledged (`felix.publisher_core`): that
is right where the answer is of a log that has all that is committed, and doubles records where it is not. So it is given under a lease alone (decision 0185).
Each record is committed once, in the order in which it was sent (11).
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from simulation.cluster_checks import BrokenError

from region.cluster.records import ShardId
from region.log.point import LogPoint
from region.replication.core import ReplicaCore
from region.replication.messages import Frame

if TYPE_CHECKING:
    from simulation.cluster_world import ClusterWorld, Machine

LOG: Final = 0
PRODUCERS: Final = 2
PAUSES_MS: Final = (20, 60, 200, 500)
IN_FLIGHT: Final = 4
STAYS: Final = 0.85
"""Of so many looks, the producer stays at its broker; else it connects anew, to whichever: its link was cut, or its process began again."""
SILENT_MS: Final = 1_500
"""A broker that is silent for so long is left."""


class Numbered(NamedTuple):
    """What a batch says of itself, and the record in it."""

    producer: str
    epoch: int
    sequence: int
    record: int


class Producer:
    """One client. It draws by itself. `first`: the oldest record without an acknowledgement; `begun`: the record that has sequence 0 of `epoch`."""

    def __init__(self, world: ClusterWorld, name: str, shard: ShardId) -> None:
        self.world, self.name, self.shard = world, name, shard
        self.random = Random(f"producer {world.seed} {name}")
        self.first, self.next = 0, 0
        self.epoch, self.begun = 0, 0
        self._at: Machine | None = None
        self._life = self._led = 0
        """of the broker that is asked: its process, and the epoch in which it led"""
        self._known: dict[Numbered, LogPoint] = {}
        """what its table of producers says of this one; nothing else changes that while it leads"""
        self._sent: dict[int, LogPoint] = {}
        """where records stand in its log that are not acknowledged"""
        self._heard_ms = 0

    def look(self) -> None:
        """Hear what was acknowledged, and send what is next."""
        if self.world.calm and self.first == self.next:
            return
        core = self._core()
        if core is not None and self.random.random() < STAYS:
            self._go_on(core)
        elif core is None and self._is_silent():
            pass  # until it is left
        else:
            self._connect()
        self.world.later(self.random.choice(PAUSES_MS), self.look)

    def _is_silent(self) -> bool:
        at = self._at
        return (
            at is not None
            and at.up
            and at.paused_until > self.world.now
            and self.world.now - self._heard_ms < SILENT_MS
        )

    def _core(self) -> ReplicaCore | None:
        """Of the broker that is asked, while it takes appends in the epoch in which it was first asked."""
        at = self._at
        core = None if at is None or not self._answers(at) else at.cores.get(self.shard)
        if at is None or core is None or (at.life, core.leader.epoch) != (self._life, self._led):
            return None
        return core if core.leader.commits else None

    def _answers(self, machine: Machine) -> bool:
        return machine.up and machine.paused_until <= self.world.now

    def _connect(self) -> None:
        self._at, self._sent = None, {}
        machine = self.random.choice(self.world.machines)
        core = machine.cores.get(self.shard) if self._answers(machine) else None
        if core is not None and core.leader.may_append():
            self._at, self._life, self._led = machine, machine.life, core.leader.epoch
            self._heard_ms, self._known = self.world.now, self._table(machine)
            self.world.counts["producers connected"] += 1

    def _go_on(self, core: ReplicaCore) -> None:
        self._heard_ms = self.world.now
        commit = core.replica.logs[LOG].commit
        while self.first in self._sent and self._sent[self.first] <= commit:
            del self._sent[self.first]
            self.first += 1
            self.world.counts["acknowledged to producers"] += 1
        if not core.leader.may_append():
            return
        for record in range(self.first, self.first + IN_FLIGHT):
            if record not in self._sent and not (self.world.calm and record >= self.next):
                self.next = max(self.next, record + 1)
                if not self._send(core, record):
                    return

    def _send(self, core: ReplicaCore, record: int) -> bool:
        """Whether the next may follow."""
        assert self._at is not None
        machine = self._at
        disk = machine.disk.log(self.shard, LOG)
        batch = Numbered(self.name, self.epoch, record - self.begun, record)
        known = self._known
        if batch in known:
            self._sent[record] = known[batch]
            self.world.counts["sent again"] += 1
            return True
        newest = max(((each.epoch, each.sequence) for each in known), default=(-1, -1))
        expected = (newest[0], newest[1] + 1) if newest[0] == self.epoch else (self.epoch, 0)
        if (batch.epoch, batch.sequence) != expected:
            self._refused(core)
            return False
        point = LogPoint(disk.end.offset + 1)
        self._sent[record] = known[batch] = point
        self.world.write(machine, self.shard, LOG, (Frame(core.leader.epoch, point, 100, batch),))
        # What was written may have ended its leadership.
        return self._core() is core

    def _table(self, machine: Machine) -> dict[Numbered, LogPoint]:
        """The table of producers goes with the copy of a log, and retention takes nothing from it."""
        disk = machine.disk.log(self.shard, LOG)
        trimmed = (
            frame
            for frame in self.world.checks.committed.get((self.shard, LOG), ())
            if frame.end <= disk.start
        )
        return {
            frame.body: frame.end
            for frame in (*trimmed, *disk.frames)
            if isinstance(frame.body, Numbered) and frame.body.producer == self.name
        }

    def _refused(self, core: ReplicaCore) -> None:
        """The sequence has a gap, if the log may say so."""
        assert self._at is not None
        if not speaks_of_the_log(core, self.world.local(self._at)):
            self.world.counts["gaps not told"] += 1
            self._at, self._sent = None, {}
            return
        self.world.counts["gaps told"] += 1
        self.epoch += 1
        self.begun = self.first
        self._sent = {}

    def finish(self) -> None:
        """Each record once, in order, and all that was acknowledged."""
        found = [
            frame.body.record
            for frame in self.world.checks.committed.get((self.shard, LOG), ())
            if isinstance(frame.body, Numbered) and frame.body.producer == self.name
        ]
        if found != [*range(len(found))] or len(found) < self.first:
            wrong = next((at for at, record in enumerate(found) if record != at), len(found))
            raise BrokenError(
                f"11: {self.name} sent {self.next} records and has {self.first} acknowledged; committed are {found[wrong - 3 : wrong + 6]} from the "
                f"{wrong - 3}. on"
            )


def speaks_of_the_log(core: ReplicaCore, now: int) -> bool:
    """Whether a refusal may say what the log has, or has not: under a lease alone, as another one may lead without it."""
    return core.leader.may_answer(now)
