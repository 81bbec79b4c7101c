"""A region's records in a modelled store, and brokers that come and go by the rules: the scene of scripted traces.

Everything happens at once and in the order of the script; what a script does late or not at all, it does by hand.
"""

from __future__ import annotations

from random import Random
from typing import Any

from cluster.samples import KEYS, SHARD, shard_record
from simulation.store_model import Granted, StoreModel

from region.cluster import registration, transactions
from region.cluster.records import BrokerRecord, Health, NodeRecord, ShardId, ShardRecord, decode_node, encode
from region.cluster.registration import FolderRecord, Start, Step
from region.cluster.transactions import Reason, Refusal, Transaction
from region.cluster.view import ClusterView
from region.metadata.transaction import Put, Snapshot, TransactResult

LEASE_MS = 5_000


class Stage:
    """The store, and of each broker its machine's boot, its folder and its lease."""

    def __init__(self, brokers: str = "abc") -> None:
        self.store = StoreModel(Random(1))
        self.store.faults.expiry_ms = (0, 0)
        self.files: dict[str, FolderRecord] = {}
        self.boots = dict.fromkeys(brokers, 1)
        self.leases: dict[str, int] = {}
        self.elections = 0
        for name in brokers:
            self.files[name] = FolderRecord(folder=f"{ord(name):032x}")
            self.start(name)

    def view(self) -> ClusterView:
        """What the store has, as one who reads it now knows it."""
        view = ClusterView(KEYS)
        entries = self.store.entries
        view.load(Snapshot(tuple(entries[key] for key in sorted(entries)), self.store.revision))
        return view

    def do(self, made: Transaction | Refusal) -> bool:
        """Whether the transaction happened. It must not have been refused before."""
        assert isinstance(made, Transaction), made
        result = self.store.transact(made.compares, made.writes)
        return isinstance(result, TransactResult) and result.succeeded

    def whole(self, name: str, **differently: Any) -> Start:
        told = {
            "broker": name,
            "host": f"h-{name}",
            "boot": self.boot(name),
            "lock": f"{self.boot(name)}:{name}",
        }
        return Start(**(told | differently))

    def boot(self, name: str) -> str:
        return f"boot-{name}-{self.boots[name]}"

    # A broker's life

    def intend(self, name: str, *, replace: bool = False, **differently: Any) -> Step | Refusal:
        """A start up to its transaction, which is not sent; the file is written."""
        step = registration.intend(
            self.view(), self.files[name], self.whole(name, **differently), replace=replace
        )
        if isinstance(step, Step):
            self.files[name] = step.file
        return step

    def start(self, name: str, *, replace: bool = False, **differently: Any) -> None:
        """The process starts, registers and is alive."""
        step = self.intend(name, replace=replace, **differently)
        assert isinstance(step, Step), step
        assert self.do(step.transaction)
        self.files[name] = registration.registered(self.files[name])
        assert self.do(self.announce(name))

    def announce(self, name: str) -> Transaction | Refusal:
        granted = self._grant(name)
        file = self.files[name]
        record = BrokerRecord(
            registration=file.registration,
            folder=file.folder,
            lock=f"{self.boot(name)}:{name}",
            host=f"h-{name}",
            client_address=f"{name}:7443",
            peer_address=f"{name}:7443",
            health=Health(open=True),
        )
        return registration.announce(self.view(), file, name, record, granted)

    def _grant(self, name: str) -> int:
        told: list[Any] = []
        self.store.client(name).grant(LEASE_MS, told.append)
        while not told:
            self.store.run(self.store.now_ms + 1)
        assert isinstance(told[0], Granted)
        self.leases[name] = told[0].lease
        return told[0].lease

    def lose_lease(self, name: str) -> None:
        """Nobody renewed it, and it has ended."""
        self.store._revoke(self.leases.pop(name))

    def die(self, name: str, *, power: bool = False) -> None:
        """The process is gone and its lease has ended; with `power`, its machine is off, too."""
        if name in self.leases:
            self.lose_lease(name)
        self.boots[name] += power

    def stop(self, name: str) -> None:
        """The process ends in order."""
        self.pulse_step(registration.stop(self.view(), self.files[name], name), name)
        self.leases.pop(name, None)

    def pulse(self, name: str) -> None:
        self.pulse_step(registration.raise_pulse(self.view(), self.files[name], name), name)

    def pulse_step(self, step: Step | Refusal, name: str) -> None:
        assert isinstance(step, Step), step
        self.files[name] = step.file
        assert self.do(step.transaction)

    def registration(self, name: str) -> int:
        key = KEYS.node(name)
        return decode_node(self.store.entries[key].value, key).registration

    def node(self, name: str) -> NodeRecord:
        return self.view().nodes[name]

    # A shard

    def place(self, isr: str, elr: str = "", number: int = 0, **fields: Any) -> ShardId:
        """Write a record as it may stand: members under the registrations that they have now."""
        shard = ShardId(SHARD.incarnation, number)
        record = shard_record(self._members(isr), self._members(elr), **fields)
        self.store.transact([], [Put(KEYS.shard(shard), encode(record, "of the test"))])
        return shard

    def _members(self, names: str) -> dict[str, int]:
        return {name: self.registration(name) for name in names}

    def record(self, shard: ShardId = SHARD) -> ShardRecord:
        return self.view().shards[shard]

    def elect(self, shard: ShardId = SHARD) -> Transaction | Refusal:
        self.elections += 1
        return transactions.elect(self.view(), shard, f"{self.elections:016x}")

    def led(self, shard: ShardId = SHARD) -> str:
        """Elect; who leads."""
        assert self.do(self.elect(shard))
        return self.record(shard).leader

    def change(
        self, after: ShardRecord, leader: str = "", view: ClusterView | None = None
    ) -> Transaction | Refusal:
        """The leader's change of the record as it stands in `view`, by default as it stands now."""
        view = view or self.view()
        before = view.shards[SHARD]
        return transactions.change(
            view, SHARD, leader or before.leader, before, view.revision_of(KEYS.shard(SHARD)), after
        )


def refused(made: object, reason: Reason) -> bool:
    """Whether it was refused for this reason."""
    return isinstance(made, Refusal) and made.reason is reason
