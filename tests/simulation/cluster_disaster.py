"""All that have what was committed are away, and an operator lets another copy lead (`felix region recover-shard`, R12).

One broker is cut off until the leader goes on without it. Then the others lose their power, or reach the store no more while they go on
among themselves. The operator names them as lost: at once where he knows that they are off, else once they surely have stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from simulation.store_model import Answer

from region.cluster import transactions
from region.cluster.election import JournalEnd, LogEnd
from region.cluster.records import ShardId
from region.cluster.transactions import Refusal
from region.cluster.view import ClusterView
from region.metadata.transaction import Snapshot, TransactResult
from region.replication.core import ReplicaCore
from region.replication.leader import DETACHED_MS

if TYPE_CHECKING:
    from simulation.cluster_world import ClusterWorld, Fault, Machine

CUT_OFF_MS: Final = 3_000
"""After so long the leader has left out whom it does not hear."""
TRIES_MS: Final = 400
RECOVERED_AFTER_MS: Final = DETACHED_MS
"""So long after its lease a member may go on committing."""


def told(core: ReplicaCore, registration: int) -> LogEnd:
    """How far a broker says that its copy goes."""
    records, *journals = (
        JournalEnd(number, log.history.epoch_before(log.end), (log.end.offset, log.end.note))
        for number, log in sorted(core.replica.logs.items())
    )
    return LogEnd(registration, records.epoch, "", records.end, tuple(journals))


class Disaster:
    """One, of the brokers but `survivor`."""

    def __init__(self, world: ClusterWorld, survivor: Machine, fault: Fault) -> None:
        self.world, self.survivor = world, survivor
        self.lasts_ms = fault.lasts_ms
        self.are_off = bool(fault.number & 3)
        self.others = [machine for machine in world.machines if machine is not survivor]
        self._until_ms = 0
        self._silent_since: dict[str, int] = {}

    def begin(self) -> None:
        self._cut(True)
        self.world.later(CUT_OFF_MS, self._lose)

    def _cut(self, is_cut: bool) -> None:
        for other in self.others:
            for pair in ((self.survivor.index, other.index), (other.index, self.survivor.index)):
                (self.world.disconnect if is_cut else self.world.reconnect)(*pair)

    def _lose(self) -> None:
        world = self.world
        if world.calm:
            return
        self._until_ms = world.now + self.lasts_ms
        for other in self.others:
            if self.are_off:
                world.crash(other, power=True)
                world.start_after(other, self.lasts_ms)
            elif (client := other.client) is not None:
                client.cut_in = client.cut_out = True
                world.later(self.lasts_ms, client.heal)
        if self.are_off:
            self._cut(False)
        else:
            world.later(self.lasts_ms, lambda: self._cut(False))
        for shard in world.shards:
            self._try(shard)

    def _try(self, shard: ShardId) -> None:
        """What the operator reads, and does."""
        world = self.world

        def loaded(answer: Answer) -> None:
            if isinstance(answer, Snapshot) and not world.calm:
                view = ClusterView(world.keys)
                view.load(answer)
                self._recover(view, shard)

        if world.now < self._until_ms and not world.calm:
            world.operator.load((world.keys.prefix,), loaded)
            world.later(TRIES_MS, lambda: self._try(shard))

    def _recover(self, view: ClusterView, shard: ShardId) -> None:
        world = self.world
        for machine in world.machines:
            if machine.name in view.alive:
                self._silent_since.pop(machine.name, None)
            else:
                self._silent_since.setdefault(machine.name, world.now)
        record = view.shards[shard]
        if record.unclean or self.survivor.name not in record.replicas:
            return
        dead = [machine.name for machine in self.others]
        made = transactions.recover(
            view,
            shard,
            self.survivor.name,
            dead,
            world.election(),
            silent_ms={name: world.now - since for name, since in self._silent_since.items()},
            detached_ms=RECOVERED_AFTER_MS,
            powered_off=not any(machine.up for machine in self.others),
            ends={
                machine.name: told(core, machine.registration)
                for machine in world.machines
                if machine.up and (core := machine.cores.get(shard)) is not None
            },
        )
        if isinstance(made, Refusal):
            world.counts[f"not recovered: {made.reason}"] += 1
        else:
            world.note("the operator lets", self.survivor.name, "lead", shard.incarnation[-1])
            world.operator.transact(made.compares, made.writes, self._answered)

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, TransactResult) and answer.succeeded:
            self.world.counts["recovered"] += 1
