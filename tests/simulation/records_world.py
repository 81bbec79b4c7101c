"""Brokers of a region over a modelled store: they register, die in every way, are replaced and come back, while each of them would be the
controller; and of each shard how much every copy has, as a number. Nothing is replicated frame by frame here (`cluster_world` does that):
what is committed is on every copy that the leader counts, at once.

Looked at: whoever leads has all that is committed, unless the record says otherwise, which it may for `interval` alone; an epoch has one
leader and one election. In the end all brokers run: every shard is led that has a copy left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal

from simulation.controller_host import ControllerHost
from simulation.store_model import Answer, Found, Granted, StoreModel

from region.cluster import membership, registration, transactions
from region.cluster.controller import AskEnds, EndTold, Leased, LeaseLost, StreamWish, Tick, Wanted
from region.cluster.election import LogEnd, has_yielded
from region.cluster.records import (
    BrokerRecord,
    ClusterKeys,
    Health,
    ShardId,
    ShardRecord,
    YieldReason,
    decode_shard,
)
from region.cluster.registration import FolderRecord, Start, Step
from region.cluster.transactions import Refusal, Transaction
from region.cluster.view import ClusterView
from region.metadata.transaction import Snapshot, TransactResult

KEYS: Final = ClusterKeys("us-east")
LEASE_MS: Final = 2_000
TICK_MS: Final = 100
FAULTS_MS: Final = 12_000
CALM_MS: Final = 25_000
"""After the last fault: a request that comes late, then five leases, then what had to wait for them."""
EVENTS_SHOWN: Final = 60


class BrokenError(AssertionError):
    """What the records promise did not hold."""


@dataclass
class Copy:
    """A broker's copy of one shard: how much it has, and how much of that would outlive its machine. `failed`: it cannot serve under that
    registration; `left`: the epoch that this process stopped leading for good, and `why`."""

    has: int = 0
    synced: int = 0
    failed: int = 0
    left: int = 0
    why: YieldReason = "drain"


@dataclass
class Standing:
    """A leader's change that was sent and is not settled: it may stand, or may yet."""

    revision: int
    after: ShardRecord


@dataclass
class Machine:
    """A broker's machine, folder and process. `life`: of the process; what was asked by an earlier one is not answered to it."""

    name: str
    file: FolderRecord
    boot: int = 1
    up: bool = False
    is_new: bool = True
    replaces: bool = False
    life: int = 0
    busy: bool = False
    lease: int = 0
    valid_until_ms: float = 0
    renews: bool = False
    pulsed_ms: float = 0
    paused_until_ms: float = 0
    up_at_ms: float = 0
    stops: bool = False
    host: ControllerHost | None = None
    copies: dict[ShardId, Copy] = field(default_factory=dict)
    standing: dict[ShardId, Standing] = field(default_factory=dict)


class RecordsWorld:
    """One run, drawn from its seed."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.store = StoreModel(random, clock_rate=random.uniform(0.99, 1.01))
        self.events: list[str] = []
        self.counts = {"elections": 0, "unclean": 0, "commits": 0, "late": 0}
        self.calm = False
        self.machines = [
            Machine(f"b{n}", FolderRecord(folder=self._hex(32))) for n in range(random.choice((3, 3, 4, 5)))
        ]
        self.by_name = {machine.name: machine for machine in self.machines}
        self.clients = {
            machine.name: self.store.client(machine.name, n) for n, machine in enumerate(self.machines)
        }
        replicas = random.choice((1, 2, 3, 3))
        durabilities: tuple[Literal["fsync", "interval"], ...] = ("fsync", "interval")
        self.wishes = tuple(
            StreamWish(
                f"{n:032x}",
                f"a/b/s{n}",
                2,
                replicas,
                random.randint(1, min(2, replicas)),
                durability,
                spread=True,
            )
            for n, durability in enumerate(durabilities)
        )
        self.shards = [
            ShardId(wish.incarnation, number) for wish in self.wishes for number in range(wish.shards)
        ]
        for machine in self.machines:
            machine.copies = {shard: Copy() for shard in self.shards}
        self.committed = dict.fromkeys(self.shards, 0)
        self.records: dict[ShardId, ShardRecord] = {}
        self.begun = dict.fromkeys(self.shards, 0)
        self.lossy: set[ShardId] = set()
        self.looked = 0

    def run(self) -> None:
        """Faults, then calm; raises BrokenError."""
        while self.store.now_ms < FAULTS_MS:
            self._pass()
            if self.random.random() < 0.15:
                self._fault()
        self.calm = True
        self.store.faults = type(self.store.faults)()
        self.store.heal()
        for client in self.clients.values():
            client.heal()
        for machine in self.machines:
            # A disk that failed is exchanged with its machine off, and what was not synced is gone.
            if any(copy.failed for copy in machine.copies.values()):
                self._die(machine, power=False)
            machine.paused_until_ms = machine.up_at_ms = 0
        while self.store.now_ms < FAULTS_MS + CALM_MS:
            self._pass()
        self.counts["late"] = self.store.applied_late
        for shard in self.shards:
            record = self.records.get(shard)
            if record is None:
                raise BrokenError(f"{shard} was never placed")
            leader = self.by_name.get(record.leader)
            serves = leader is not None and self._leads(leader, shard, record)
            if not serves and record.members():
                raise BrokenError(f"{shard} is not led: {record}")

    def _pass(self) -> None:
        self.store.run(self.store.now_ms + TICK_MS)
        self._look()
        for machine in self.machines:
            self._live(machine)
            self._look()

    def note(self, what: str) -> None:
        self.events.append(f"{self.store.now_ms:9.0f} {what}")

    def _hex(self, chars: int) -> str:
        return f"{self.random.getrandbits(4 * chars):0{chars}x}"

    # Faults

    def _fault(self) -> None:
        random, store = self.random, self.store
        machine = random.choice(self.machines)
        what = random.choice(
            (
                "crash",
                "crash",
                "power",
                "power",
                "stop",
                "replace",
                "pause",
                "cut",
                "member",
                "late",
                "outage",
                "yield",
                "fail",
                "sync",
                "heal",
            )
        )
        self.note(f"{what} {machine.name}")
        match what:
            case "crash":
                self._die(machine, power=False)
            case "power":
                for each in self.machines if random.random() < 0.15 else [machine]:
                    self._die(each, power=True)
            case "stop":
                machine.stops = machine.up
            case "replace":
                # Disks are lost one at a time, not all of them.
                if sum(other.replaces for other in self.machines) == 0:
                    self._die(machine, power=True)
                    machine.replaces = True
                    machine.file = FolderRecord(folder=self._hex(32))
                    machine.copies = {shard: Copy() for shard in self.shards}
            case "pause":
                machine.paused_until_ms = store.now_ms + random.choice((1_000, 5_000))
            case "cut":
                client = self.clients[machine.name]
                client.cut_out, client.cut_in = random.choice(((True, False), (False, True), (True, True)))
            case "member":
                store.isolate(random.randrange(store.members))
            case "late":
                store.faults.late = store.faults.unanswered = random.choice((0.0, 0.2))
                store.faults.lag_ms = random.choice(((1, 4), (100, 1_500)))
            case "outage":
                store.stop()
            case "yield" | "fail":
                for shard in self.shards:
                    record = self.records.get(shard)
                    if record is not None and self._leads(machine, shard, record):
                        self._stop_leading(
                            machine, shard, record.epoch, "failed" if what == "fail" else "drain"
                        )
                        break
            case "sync":
                self._sync(machine)
            case _:
                store.heal()
                store.faults.late = store.faults.unanswered = 0.0
                for client in self.clients.values():
                    client.heal()

    def _die(self, machine: Machine, *, power: bool) -> None:
        machine.up, machine.stops, machine.lease, machine.renews, machine.busy = False, False, 0, False, False
        machine.life += 1
        machine.up_at_ms = self.store.now_ms + self.random.choice((200, 1_000, 6_000))
        machine.standing.clear()
        machine.boot += power
        if machine.host is not None:
            machine.host.die()
            machine.host = None
        for copy in machine.copies.values():
            if power:
                copy.has = copy.synced
            copy.left = copy.failed = 0

    def _sync(self, machine: Machine) -> None:
        for copy in machine.copies.values():
            if not copy.failed:
                copy.synced = copy.has

    # A broker's process

    def _live(self, machine: Machine) -> None:
        now = self.store.now_ms
        if now < machine.up_at_ms or now < machine.paused_until_ms:
            return
        if machine.host is None:
            ids = iter(lambda: self._hex(16), "")
            machine.host = self._host(machine, ids)
        host = machine.host
        if machine.lease and now >= machine.valid_until_ms:
            machine.lease = 0
            host.step(LeaseLost())
        if not machine.busy:
            if not machine.up:
                self._register(machine)
            elif not machine.lease:
                self._announce(machine)
            elif machine.stops:
                self._stop(machine)
            else:
                self._renew(machine)
                if now >= machine.pulsed_ms + LEASE_MS:
                    machine.pulsed_ms = now
                    self._pulse(machine)
        host.step(Tick())
        for shard in self.shards:
            self._lead(machine, shard)
        if self.random.random() < 0.1:
            self._sync(machine)

    def _host(self, machine: Machine, ids: Iterator[str]) -> ControllerHost:
        def ask(asked: AskEnds) -> None:
            for name in asked.brokers:
                other = self.by_name[name]
                copy = other.copies[asked.shard]
                if other.up and machine.host is not None:
                    end = LogEnd(other.file.registration, 1, "0" * 16, (copy.has, 0))
                    machine.host.step(EndTold(asked.shard, name, end))

        host = ControllerHost(self.clients[machine.name], KEYS, machine.name, LEASE_MS, ids, ask)
        host.step(Wanted(self.wishes))
        return host

    def _ask(self, machine: Machine, made: Transaction, happened: object) -> None:
        """Send a transaction of the process; `happened()` if it did."""
        life, machine.busy = machine.life, True

        def done(answer: Answer) -> None:
            if machine.life == life:
                machine.busy = False
                if isinstance(answer, TransactResult) and answer.succeeded:
                    assert callable(happened)
                    happened()

        self.clients[machine.name].transact(made.compares, made.writes, done)

    def _known(self, machine: Machine) -> ClusterView | None:
        view = machine.host.core.view if machine.host is not None else None
        return view if view is not None and view.revision else None

    def _register(self, machine: Machine) -> None:
        # Linearizable: what the watch says may be old, and then the transaction would fail, again and again.
        life, machine.busy = machine.life, True

        def done(answer: Answer) -> None:
            if machine.life != life:
                return
            machine.busy = False
            if not isinstance(answer, Snapshot):
                return
            view = ClusterView(KEYS)
            view.load(answer)
            start = Start(
                machine.name,
                f"h-{machine.name}",
                f"{machine.name}:{machine.boot}",
                f"{machine.boot}:{machine.file.folder}",
            )
            step = registration.intend(view, machine.file, start, replace=machine.replaces)
            if isinstance(step, Step):
                machine.file = step.file
                self._ask(machine, step.transaction, registered)
            elif not step.retry:
                raise BrokenError(f"{machine.name} is refused: {step.sentence}")

        def registered() -> None:
            machine.file = registration.registered(machine.file)
            machine.up, machine.replaces = True, False
            self.note(f"{machine.name} is registered as {machine.file.registration}")

        self.clients[machine.name].load(
            (KEYS.node(machine.name), KEYS.broker(machine.name), KEYS.pulse(machine.name)), done
        )

    def _announce(self, machine: Machine) -> None:
        client, life, sent_ms = self.clients[machine.name], machine.life, self.store.now_ms
        machine.busy = True

        def granted(answer: Answer) -> None:
            if machine.life == life:
                machine.busy = False
                if isinstance(answer, Granted):
                    keys = [
                        KEYS.node(machine.name),
                        KEYS.broker(machine.name),
                        KEYS.pulse(machine.name),
                        KEYS.alone,
                    ]
                    machine.busy = True
                    client.read(keys, lambda found: read(found, answer.lease))

        def read(answer: Answer, lease: int) -> None:
            if machine.life != life:
                return
            machine.busy = False
            if not isinstance(answer, Found):
                return
            view = ClusterView(KEYS)
            view.absorb(answer.entries, answer.revision)
            record = BrokerRecord(
                registration=machine.file.registration,
                folder=machine.file.folder,
                lock=f"{machine.boot}:{machine.file.folder}",
                host=f"h-{machine.name}",
                client_address="c",
                peer_address="p",
                health=Health(open=True),
            )
            made = registration.announce(view, machine.file, machine.name, record, lease)
            if isinstance(made, Refusal):
                raise BrokenError(f"{machine.name} may not be alive again: {made.sentence}")
            self._ask(machine, made, lambda: announced(lease))

        def announced(lease: int) -> None:
            machine.lease, machine.valid_until_ms, machine.renews = lease, sent_ms + LEASE_MS, False
            if machine.host is not None:
                machine.host.step(Leased(lease))

        client.grant(LEASE_MS, granted)

    def _renew(self, machine: Machine) -> None:
        now, life, lease = self.store.now_ms, machine.life, machine.lease
        if machine.renews or machine.valid_until_ms - now > 2 * LEASE_MS / 3:
            return
        machine.renews = True

        def done(answer: Answer) -> None:
            if machine.life == life and machine.lease == lease:
                machine.renews = False
                if isinstance(answer, Granted):
                    machine.valid_until_ms = now + LEASE_MS

        self.clients[machine.name].renew(lease, done)

    def _pulse(self, machine: Machine) -> None:
        view = self._known(machine)
        if view is None:
            return
        step = registration.raise_pulse(view, machine.file, machine.name)
        if isinstance(step, Step):
            machine.file = step.file
            self._ask(machine, step.transaction, lambda: None)

    def _stop(self, machine: Machine) -> None:
        view = self._known(machine)
        if view is None or any(copy.failed for copy in machine.copies.values()):
            machine.stops = False
            return
        step = registration.stop(view, machine.file, machine.name)
        if isinstance(step, Step):
            self._sync(machine)
            machine.file = step.file
            # Nothing is acknowledged any more, whether the store hears of it or not.
            life = machine.life
            self._ask(machine, step.transaction, lambda: None)
            machine.up = False
            self.store._at(500, lambda: self._die(machine, power=False) if machine.life == life else None)

    # A shard's leader, and what is committed

    def _leads(self, machine: Machine, shard: ShardId, record: ShardRecord) -> bool:
        copy = machine.copies[shard]
        return (
            machine.up
            and not machine.stops
            and record.leader == machine.name
            and record.isr.get(machine.name) == machine.file.registration
            and copy.left != record.epoch
            and not copy.failed
            and not has_yielded(record)
        )

    def _lead(self, machine: Machine, shard: ShardId) -> None:
        """One look of the broker that leads as the store has it; a leader that does not know of its successor is `cluster_world`'s."""
        record, view = self.records.get(shard), self._known(machine)
        standing = machine.standing.get(shard)
        if (
            standing is not None
            and view is not None
            and view.revision_of(KEYS.shard(shard)) > standing.revision
        ):
            machine.standing.pop(shard)
        if record is None or view is None:
            return
        if not self._leads(machine, shard, record):
            if machine.up and machine.copies[shard].left == record.epoch:
                self._yield(machine, shard, record)
            return
        self._begin(machine, shard, record)
        known = view.shards.get(shard)
        standing = machine.standing.get(shard)
        if known is None or known.epoch != record.epoch:
            return
        may_stand = [record, known, *([standing.after] if standing else [])]
        self._commit(shard, machine, may_stand)
        if standing is None:
            self._change(machine, shard, known, view)

    def _commit(self, shard: ShardId, leader: Machine, may_stand: list[ShardRecord]) -> None:
        counted: dict[str, int] = {}
        for record in may_stand:
            if len(record.isr) < record.min or record.elr:
                return
            counted |= record.isr
        copies = []
        for name, number in counted.items():
            member = self.by_name[name]
            if (
                not member.up
                or member.stops
                or member.file.registration != number
                or member.copies[shard].failed
            ):
                return
            copies.append(member.copies[shard])
        self.committed[shard] += 1
        self.counts["commits"] += 1
        for copy in copies:
            copy.has = self.committed[shard]
            if may_stand[0].durability == "fsync":
                copy.synced = copy.has

    def _change(self, machine: Machine, shard: ShardId, known: ShardRecord, view: ClusterView) -> None:
        after = known
        missing = [name for name, number in known.isr.items() if not self._follows(name, shard, number)]
        if leavers := [name for name in missing if name != machine.name]:
            after = membership.with_shrunk(known, leavers)
        else:
            for name in known.replicas:
                other = self.by_name[name]
                number = other.file.registration
                if (
                    known.isr.get(name) != number
                    and self._follows(name, shard, number)
                    and self.random.random() < 0.3
                ):
                    # It has caught up, and synced that (F8).
                    other.copies[shard].has = other.copies[shard].synced = self.committed[shard]
                    after = membership.with_expanded(known, name, number)
                    break
        if after != known:
            self._send(machine, shard, known, after, view)

    def _follows(self, name: str, shard: ShardId, number: int) -> bool:
        machine = self.by_name[name]
        return (
            machine.up
            and not machine.stops
            and machine.file.registration == number
            and not machine.copies[shard].failed
        )

    def _stop_leading(self, machine: Machine, shard: ShardId, epoch: int, why: YieldReason) -> None:
        copy = machine.copies[shard]
        copy.left, copy.why = epoch, why
        if why == "failed":
            copy.failed = machine.file.registration
            # A failed sync takes what was in the page cache alone.
            copy.has = copy.synced
            machine.file = registration.after_failed_sync(machine.file)

    def _yield(self, machine: Machine, shard: ShardId, record: ShardRecord) -> None:
        """Say that it stopped, until the store has it."""
        view = self._known(machine)
        is_its = record.leader == machine.name and not has_yielded(record)
        if is_its and view is not None and shard not in machine.standing and view.shards.get(shard) == record:
            self._send(machine, shard, record, membership.with_yield(record, machine.copies[shard].why), view)

    def _send(
        self, machine: Machine, shard: ShardId, before: ShardRecord, after: ShardRecord, view: ClusterView
    ) -> None:
        revision, life = view.revision_of(KEYS.shard(shard)), machine.life
        made = transactions.change(view, shard, machine.name, before, revision, after)
        if isinstance(made, Refusal):
            return
        standing = machine.standing[shard] = Standing(revision, after)

        def done(answer: Answer) -> None:
            # Refused for good: it settles. Unknown: it may stand until a later revision is read, or it is sent again and answered.
            if machine.life != life or machine.standing.get(shard) is not standing:
                return
            if isinstance(answer, TransactResult) and not answer.succeeded:
                machine.standing.pop(shard)
            elif not isinstance(answer, TransactResult):
                self.clients[machine.name].transact(made.compares, made.writes, done)

        self.clients[machine.name].transact(made.compares, made.writes, done)

    # What must hold

    def _look(self) -> None:
        history = self.store.history
        while self.looked < len(history):
            for event in history[self.looked].events:
                if event.key.startswith(KEYS.shards) and event.entry is not None:
                    self._judge(KEYS.shard_of(event.key), decode_shard(event.entry.value, event.key))
            self.looked += 1

    def _judge(self, shard: ShardId, record: ShardRecord) -> None:
        before = self.records.get(shard)
        self.records[shard] = record
        if before is None:
            return
        self.note(
            f"{shard.incarnation[-1]}/{shard.number} epoch {record.epoch} led by {record.leader or '-'} isr {record.isr} elr {record.elr} "
            f"{record.failed or ''} {record.yielded or ''}"
        )
        if record.epoch < before.epoch:
            raise BrokenError(f"{shard} went from epoch {before.epoch} to {record.epoch}")
        if record.epoch == before.epoch:
            if record.election != before.election or record.leader not in (before.leader, ""):
                raise BrokenError(f"{shard} has two leaders in epoch {record.epoch}")
            return
        self.counts["elections"] += 1
        if record.unclean == record.epoch:
            self.counts["unclean"] += 1
            self.lossy.add(shard)
            if record.durability == "fsync":
                raise BrokenError(f"{shard}: an unclean election of what was synced")

    def _begin(self, machine: Machine, shard: ShardId, record: ShardRecord) -> None:
        """A broker begins to lead an epoch: what it has is what the shard is."""
        if self.begun[shard] == record.epoch:
            return
        self.begun[shard] = record.epoch
        has, committed = machine.copies[shard].has, self.committed[shard]
        if has < committed and shard not in self.lossy:
            raise BrokenError(
                f"{shard}: {machine.name} leads epoch {record.epoch} with {has} of {committed} that are committed"
            )
        self.committed[shard] = min(has, committed)
        self.lossy.discard(shard)


def play(seed: int) -> RecordsWorld:
    """One run; what it did last is told where it fails."""
    world = RecordsWorld(seed)
    try:
        world.run()
    except AssertionError as error:
        told = "\n".join(world.events[-EVENTS_SHOWN:])
        raise BrokenError(f"seed {seed}: {error}\n{told}") from error
    return world
