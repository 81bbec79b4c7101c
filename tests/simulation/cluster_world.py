"""Three to five brokers, a modelled store and two clients on simulated time: the replication cores, and the records and transactions of a
cluster, with everything that may go wrong between them. Level one: cores are driven, no process, socket or file is.

Each shard has a record log and a journal. Brokers register, hold leases, watch, elect and replicate as the modules of `region.cluster` and
`region.replication` decide; disks lose what was not synced (a crash of a process loses nothing), fail, hang and come back as older copies;
messages are lost, late, doubled and out of order; links are cut in one direction; the store answers late or not at all, applies late,
and is away.

What is promised is looked at after every step (`cluster_checks`), and in the end, when all faults are over, everything has to be served again.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from random import Random
from typing import Final, NamedTuple

from simulation.cluster_audit import AUDIT_STREAM, AuditHome
from simulation.cluster_checks import OPERATOR, BrokenError, Checks
from simulation.cluster_disaster import Disaster
from simulation.cluster_offload import Offload
from simulation.cluster_operator import WORDS, Operator, shards_of
from simulation.cluster_producers import PRODUCERS, Producer
from simulation.cluster_readers import Reader
from simulation.cluster_transactions import LANES, Transactions
from simulation.log_model import DiskModel, LogModel
from simulation.script import shrink
from simulation.store_model import (
    Answer,
    Backup,
    Found,
    Granted,
    LeaseLost,
    StoreClient,
    StoreModel,
    Watch,
)

from region import reconciliation
from region.cluster import controller
from region.cluster.controller import ControllerCore
from region.cluster.election import has_yielded
from region.cluster.membership import with_yield
from region.cluster.records import (
    BrokerRecord,
    ClusterKeys,
    NodeRecord,
    ShardId,
    ShardRecord,
    decode_node,
    decode_shard,
    encode,
)
from region.cluster.registration import FolderRecord, Start, announce, intend, raise_pulse, registered
from region.cluster.transactions import (
    Reason,
    Refusal,
    Transaction,
    change,
    leave_sets,
    move,
    open_again,
)  # fmt: skip
from region.cluster.view import ClusterView
from region.copies.replicas import GIVE_UP_S
from region.log.point import LogPoint
from region.metadata.transaction import Change, Put, Snapshot, TransactResult
from region.reconciliation import FolderReport, LogTold, ShardTold
from region.replication.core import ReplicaCore
from region.replication.history import BEGINNING, History
from region.replication.leader import DETACHED_MS
from region.replication.messages import Frame, Message
from region.replication.ready import (
    Begun,
    Copied,
    CopyFailed,
    DiskFailed,
    FramesRead,
    Leaving,
    Linked,
    Living,
    MinWanted,
    Outcome,
    Ready,
    Received,
    RecordRead,
    Swap,
    SwapAnswered,
    Synced,
    Tick,
    Trimmed,
    Written,
    YieldAsked,
)  # fmt: skip
from region.replication.replica import BrokerLease, Log, Replica

LEASE_MS: Final = 2_000
TICK_MS: Final = 250
LEFT_OUT_CHECKED: Final = 20
"""Of so many ticks that are left out, one is looked at: a copy of the core has to have nothing to do."""
PULSE_MS: Final = 2_000
FAULTS_MS: Final = 9_000
"""So long things go wrong."""
CALM_MS: Final = 60_000
"""After so long without faults all has to be well: joining again alone may wait for half a minute."""
PATIENCE_MS: Final = 1_500
"""A client that has no answer for so long asks again."""
EVENTS_SHOWN: Final = 200
SHRINK_TRIES_MAX: Final = 60
REGION: Final = "us-east"


class Fault(NamedTuple):
    """At `at_ms`, something happens to a broker, or a pair, for so long."""

    at_ms: int
    what: str
    where: int
    other: int
    lasts_ms: int
    number: int

    def __str__(self) -> str:
        return f"at {self.at_ms} ms: {self.what} {self.where}/{self.other} for {self.lasts_ms} ms ({self.number})"


@dataclass(frozen=True)
class Scene:
    """What a run is about: drawn from its seed, or written by hand."""

    brokers: int = 3
    shards: int = 1
    minimum: int = 2
    faults: tuple[Fault, ...] = ()
    appends: bool = True
    audited: bool = False
    """the first shard is an audit log: its leader signs what is committed of it"""
    transacted: bool = False
    """the leader of the first shard coordinates transactions that write into the others"""
    offloaded: bool = False
    """segments of the first shard lie in a store"""
    answers_early: bool = False
    """`acks: leader`: records are answered once they are durable on their leader"""
    numbered: bool = False
    """producers write as well, with several batches in flight under sequences"""
    reopened: bool = False
    """copies whose disks failed are opened again by their brokers, and not by a restart"""
    operated: bool = False
    """operators drain brokers, even out copies and change how many there are"""


FAULTS: Final = {
    "crash": 6, "power": 6, "pause": 5, "link": 6, "deaf": 6, "alone": 4, "store": 5, "store deaf": 3, "outage": 2, "doubt": 5, "lag": 3,
    "fail": 3, "hang": 2, "slow": 4, "replace": 2, "snapshot": 2, "net": 5, "min": 2, "yield": 3, "move": 2, "trim": 2, "all power": 1,
}  # fmt: skip
ILL_COPIES: Final = 0.2
"""Of so many seeds, one copy of a shard is gone, older than it was, or damaged."""
STORES_BACK: Final = 0.12
"""Of so many of the others, the store is put back from a backup, and reconciled from the folders."""
RECOVERED: Final = 0.1
"""Of so many of the rest, all that have what was committed are away, and an operator lets a copy lead that may lack some of it."""
APART: Final = {"lost copy", "older copy", "damaged copy", "store back"}
"""Faults of seeds in which nothing is recovered so."""
AUDITED: Final = 0.15
"""In so many seeds the first shard is an audit log."""
TRANSACTED: Final = 0.1
"""In so many of the others there are transactions. A journal whose end was given up is none of their promises."""


OFFLOADED: Final = 0.15
"""In so many of the rest segments lie in a store: where no copy, and no record, goes back to what it was."""


ANSWERED_EARLY: Final = 0.15
"""In so many of the rest records are answered once they are durable on their leader."""
NUMBERED: Final = 0.2
"""In so many of the rest there are producers with sequences, and a broker stands still for longer than its lease."""
REOPENED: Final = 0.25
"""In so many seeds more syncs fail, and the copies are opened again in the same process."""
OPERATED: Final = 0.15
"""In so many of the rest operators give words beside faults."""
OPERATED_SHARDS: Final = 3
NOT_OPERATED: Final = frozenset({*APART, "recovered", "snapshot", "replace", "min", "move", "frozen"})
"""What operators do otherwise, or what their words would be taken for."""
WATCH_LATE_MS: Final = 1_000
"""How long a process that stood still may go on before its watch shows it what happened meanwhile."""
EARLY_FAULTS: Final = {"stop": 5, "yield": 5, "move": 2, "slow": 3, "net": 3, "trim": 1, "link": 1, "late": 6}
"""What may happen then: every leader that goes gives up of its own accord, and copies are slow, or not reached for a while. What ends a leader
otherwise may lose what the others had not, as `acks: leader` says."""
GIVE_UP_MS: Final = int(GIVE_UP_S * 1_000)
GIVE_UP_LOOK_MS: Final = 20
LEAVE_MS: Final = 100
"""What a broker that is stopped does once it has said that it leaves: its last messages are on their way."""


def draw(seed: int) -> Scene:
    """What a seed's run is about."""
    random = Random(f"scene {seed}")
    brokers = random.choice((3, 3, 3, 4, 5))
    names, weights = list(FAULTS), list(FAULTS.values())
    faults = []
    for what in random.choices(names, weights, k=random.randint(2, 9)):
        where = random.randrange(brokers)
        other = (where + random.randrange(1, brokers)) % brokers
        lasts = random.choice((300, 1_200, 3_000, 6_000))
        faults.append(
            Fault(
                random.randrange(500, FAULTS_MS),
                what,
                where,
                other,
                random.randrange(50, lasts),
                random.getrandbits(16),
            )
        )
    shards, minimum = random.choice((1, 1, 2)), random.choice((2, 2, 2, 1))
    # Apart from the rest, which seeds are remembered by.
    random = Random(f"ill copies {seed}")
    if random.random() < ILL_COPIES:
        what, where = random.choice(("lost copy", "older copy", "damaged copy")), random.randrange(brokers)
        at, lasts = random.randrange(2_000, FAULTS_MS), random.randrange(50, 3_000)
        faults.append(Fault(at, what, where, where, lasts, random.getrandbits(16)))
    elif random.random() < STORES_BACK:
        at, lasts = random.randrange(1_000, 4_000), random.randrange(300, 4_500)
        faults.append(Fault(at, "store back", 0, 0, lasts, random.getrandbits(16)))
    random = Random(f"recover shard {seed}")
    if not any(fault.what in APART for fault in faults) and random.random() < RECOVERED:
        at, where, lasts = (
            random.randrange(700, 3_000),
            random.randrange(brokers),
            random.randrange(3_500, 6_000),
        )
        faults.append(Fault(at, "recovered", where, where, lasts, random.getrandbits(16)))
    audited = Random(f"home {seed}").random() < AUDITED
    transacted = (
        not audited
        and all(fault.what != "recovered" for fault in faults)
        and Random(f"transacted {seed}").random() < TRANSACTED
    )
    if transacted:
        shards = 1 + LANES
    offloaded = (
        not (audited or transacted)
        and not any(fault.what in {*APART, "recovered", "snapshot"} for fault in faults)
        and Random(f"offloaded {seed}").random() < OFFLOADED
    )
    answers_early = (
        not (audited or transacted or offloaded)
        and not any(fault.what in {*APART, "recovered", "snapshot"} for fault in faults)
        and Random(f"early {seed}").random() < ANSWERED_EARLY
    )
    if answers_early:
        return draw_early(seed, brokers, shards)
    numbered = (
        not (audited or transacted or offloaded)
        and not any(fault.what in {*APART, "recovered", "snapshot"} for fault in faults)
        and Random(f"numbered {seed}").random() < NUMBERED
    )
    if numbered:
        random = Random(f"frozen {seed}")
        at, where = random.randrange(1_000, 5_000), random.randrange(brokers)
        lasts = random.randrange(3 * LEASE_MS // 2, 3 * LEASE_MS)
        faults.append(Fault(at, "frozen", where, where, lasts, random.getrandbits(16)))
    operated = (
        not (audited or transacted or offloaded or numbered)
        and Random(f"operated {seed}").random() < OPERATED
    )
    if operated:
        return draw_operated(seed, brokers, faults, minimum)
    random = Random(f"reopened {seed}")
    reopened = random.random() < REOPENED
    for _ in range(random.randint(1, 5) if reopened else 0):
        at, where = random.randrange(700, FAULTS_MS), random.randrange(brokers)
        faults.append(Fault(at, "fail", where, where, 0, random.getrandbits(16)))
    faults.sort()
    return Scene(
        brokers, shards, minimum, tuple(faults),
        audited=audited, transacted=transacted, offloaded=offloaded, numbered=numbered, reopened=reopened,
    )  # fmt: skip


def draw_early(seed: int, brokers: int, shards: int) -> Scene:
    """A run with `acks: leader`, in which nothing happens that may lose what was answered early."""
    random = Random(f"early faults {seed}")
    whats = random.choices(list(EARLY_FAULTS), list(EARLY_FAULTS.values()), k=random.randint(3, 9))
    faults = []
    for what in whats:
        where = random.randrange(brokers)
        other = (where + random.randrange(1, brokers)) % brokers
        at, lasts = random.randrange(700, FAULTS_MS), random.randrange(50, random.choice((300, 1_200, 3_000)))
        faults.append(Fault(at, what, where, other, lasts, random.getrandbits(16)))
    return Scene(brokers, shards, 1, tuple(sorted(faults)), answers_early=True)


def draw_operated(seed: int, brokers: int, faults: list[Fault], minimum: int) -> Scene:
    """A run with operators: the faults of any other, and words beside them."""
    random = Random(f"operators {seed}")
    brokers, reopened = max(brokers, random.choice((4, 4, 5))), random.random() < 0.5
    found = [fault for fault in faults if fault.what not in NOT_OPERATED]
    for what in random.choices(list(WORDS), list(WORDS.values()), k=random.randint(3, 8)):
        at, where = random.randrange(700, FAULTS_MS), random.randrange(brokers)
        found.append(Fault(at, what, where, where, random.randrange(50, 3_000), random.getrandbits(16)))
    return Scene(brokers, OPERATED_SHARDS, minimum, tuple(sorted(found)), reopened=reopened, operated=True)


@dataclass
class Append:
    """A client's append on its way at a leader."""

    client: Client
    number: int
    log: int
    point: LogPoint


@dataclass
class Machine:
    """A broker: what outlives its process (disk, boot), and its process while there is one."""

    name: str
    index: int
    disk: DiskModel
    rate: float
    boots: int = 1
    life: int = 0
    up: bool = False
    paused_until: int = 0
    client: StoreClient | None = None
    view: ClusterView = field(default_factory=lambda: ClusterView(ClusterKeys(REGION)))
    watch: Watch | None = None
    registration: int = 0
    lease: int = 0
    sent: int = 0
    """when the newest renewal of the lease was asked for, by the machine's clock"""
    announced_at: int = 0
    is_told: bool = False
    """whether the cores know of the lease: once the watch has reached `announced_at`, and what was elected before it"""
    was_fenced: bool = False
    """whether this process has lost a lease"""
    held: BrokerLease = field(default_factory=BrokerLease)
    cores: dict[ShardId, ReplicaCore] = field(default_factory=dict)
    appends: dict[ShardId, deque[Append]] = field(default_factory=dict)
    syncing: set[tuple[ShardId, int]] = field(default_factory=set)
    again: set[tuple[ShardId, int]] = field(default_factory=set)
    reopening: set[ShardId] = field(default_factory=set)
    """copies that have failed, and are opened again soon"""
    reopened: set[ShardId] = field(default_factory=set)
    """copies that were; where nobody leads, their records are to say so"""
    controller: ControllerCore | None = None
    replacing: bool = False
    stopping: bool = False
    copy: DiskModel | None = None

    @property
    def boot(self) -> str:
        return f"{self.index:08x}{self.boots:08x}"


@dataclass
class Client:
    """Appends its numbers one after the other, each until it is acknowledged, and reads how far the log goes."""

    name: str
    shard: ShardId
    number: int = 0
    at: int = 0
    """the broker that it asks"""
    asked_ms: int = -1
    waits: bool = False
    pause: int = 0
    """until when it does not go on"""
    acknowledged: list[int] = field(default_factory=list)


class ClusterWorld:
    """One run."""

    def __init__(self, seed: int, scene: Scene | None = None) -> None:
        self.seed = seed
        self.scene = draw(seed) if scene is None else scene
        self.random = Random(f"cluster {seed}")
        self.now = 0
        self.noted: deque[tuple[int, tuple[object, ...]]] = deque(maxlen=EVENTS_SHOWN)
        self.counts: Counter[str] = Counter()
        self.keys = ClusterKeys(REGION)
        self.store = StoreModel(Random(f"store {seed}"))
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._made = 0
        self.steps = 0
        self.loss, self.doubles, self.shuffle, self.delay_ms = 0.0, 0.0, 0.0, 3
        self.cut: set[tuple[int, int]] = set()
        self.machines = [
            Machine(
                f"b{index + 1}", index, DiskModel(FolderRecord(folder=f"{index + 1:032x}")),
                1.0 + self.random.uniform(-0.004, 0.004),
            )
            for index in range(self.scene.brokers)
        ]  # fmt: skip
        self.by_name = {machine.name: machine for machine in self.machines}
        self.shards = (
            shards_of(self.scene.shards)
            if self.scene.operated
            else [ShardId(f"{number + 1:032x}", 0) for number in range(self.scene.shards)]
        )
        self.calm = False
        self.is_reconciling = False
        """all brokers are stopped, and stay so"""
        self.in_doubt = False
        """what was acknowledged may be lost, as an operator was told: nothing is promised any more"""
        self.checks = Checks(self)
        self.store.wrote = self.checks.wrote
        self.clients = [
            Client(f"c{number}", shard, at=number % self.scene.brokers)
            for number, shard in enumerate([*self.shards, self.shards[0]])
        ]
        self.readers = [
            Reader(self, f"r{number}", client.shard) for number, client in enumerate(self.clients)
        ]
        self.producers = [
            Producer(self, f"p{number}", self.shards[0])
            for number in range(PRODUCERS if self.scene.numbered else 0)
        ]
        self.audit = AuditHome(self, self.shards[0]) if self.scene.audited else None
        self.transactions = Transactions(self, self.shards) if self.scene.transacted else None
        self.offload = Offload(self, self.shards[0]) if self.scene.offloaded else None
        self.operator = self.store.client(OPERATOR)
        self.words = Operator(self) if self.scene.operated else None
        self._folders = self.scene.brokers
        self._late_ms: dict[int, int] = {}
        """by machine: what it is told arrives so much later"""
        self._once_answered: list[Fault] = []
        """what happens to the next leader that answers a record early, at once"""
        elections = Random(f"elections {seed}")
        self._elections = (f"{elections.getrandbits(64):016x}" for _ in repeat(None))

    def election(self) -> str:
        """A fresh election id."""
        return next(self._elections)

    # -- time ------------------------------------------------------------------------------------------

    def later(self, delay_ms: float, happens: Callable[[], None]) -> None:
        """After so long."""
        self._made += 1
        heapq.heappush(self._heap, (self.now + max(1, int(delay_ms)), self._made, happens))

    def on(self, machine: Machine, delay_ms: float, happens: Callable[[], None]) -> None:
        """After so long, if this process still lives; a process that is paused does it when it goes on."""
        life = machine.life

        def due() -> None:
            if machine.life == life and machine.up:
                if machine.paused_until > self.now:
                    self.later(machine.paused_until - self.now, due)
                else:
                    happens()

        self.later(delay_ms, due)

    def within(self, machine: Machine, happens: Callable[[Answer], None]) -> Callable[[Answer], None]:
        """An answer of the store to this process."""
        life = machine.life

        def done(answer: Answer) -> None:
            if machine.life == life and machine.up:
                if machine.paused_until > self.now:
                    self.on(machine, machine.paused_until - self.now, lambda: happens(answer))
                else:
                    happens(answer)

        return done

    def local(self, machine: Machine) -> int:
        """What the machine's clock says."""
        return int(self.now * machine.rate)

    def note(self, *event: object) -> None:
        self.noted.append((self.now, event))

    def run_until(self, end_ms: int, done: Callable[[], bool] | None = None) -> bool:
        """Let happen what happens; whether `done` came true, which is asked every half second."""
        ask_ms = self.now + 500
        heap, store = self._heap, self.store
        while True:
            next_store = store.next_ms()
            if heap and (next_store is None or heap[0][0] <= next_store):
                at = heap[0][0]
                if at > end_ms:
                    break
                self.now = max(self.now, at)
                _, _, happens = heapq.heappop(heap)
                if next_store is not None:
                    store.now_ms = max(store.now_ms, self.now)
                happens()
            elif next_store is not None and next_store <= end_ms:
                self.now = max(self.now, int(next_store))
                store.run(next_store)
            else:
                break
            if done is not None and self.now >= ask_ms:
                ask_ms = self.now + 500
                if done():
                    return True
        self.now = max(self.now, end_ms)
        return False

    # -- a run -----------------------------------------------------------------------------------------

    def play(self) -> None:
        """From the first start to the last look. Raises BrokenError."""
        self.begin()
        self.run_until(FAULTS_MS)
        self.rest()

    def begin(self) -> None:
        names = [machine.name for machine in self.machines]
        for number, shard in enumerate(self.shards):
            order = tuple(names[(at + number) % len(names)] for at in range(min(3, len(names))))
            record = ShardRecord(
                stream=AUDIT_STREAM if self.scene.audited and number == 0 else self._name(number),
                epoch=1, election=f"{number + 1:016x}", leader=order[0], replicas=order, isr=dict.fromkeys(order, 1), min=self.scene.minimum,
            )  # fmt: skip
            key = self.keys.shard(shard)
            self.store.transact((), (Put(key, encode(record, key)),))
        for machine in self.machines:
            self.start(machine)
        for fault in self.scene.faults:
            self.later(fault.at_ms, lambda fault=fault: self.fault(fault))  # type: ignore[misc]
        if self.scene.appends:
            for client in self.clients:
                self.later(700, lambda client=client: self.drive(client))  # type: ignore[misc]
            for reader in self.readers:
                self.later(800, reader.look)
            for producer in self.producers:
                self.later(900, producer.look)
            if self.transactions is not None:
                self.transactions.begin()

    def _name(self, number: int) -> str:
        """Of the stream of the shard with this place among all."""
        return f"acme/test/orders{number if self.words is None else sorted(self.words.wishes).index(self.shards[number].incarnation)}"

    def rest(self) -> None:
        """No more faults: everything is served again, and nothing that was promised is missing."""
        while self.is_reconciling:
            self.run_until(self.now + 500)
        if self.in_doubt:
            return
        self.calm = True
        self.note("calm")
        self.heal()
        for machine in self.machines:
            # A pause goes on to its end: cut short, what it put off would be heard after what came later.
            disk = machine.disk
            failed = {shard for shard, core in machine.cores.items() if core.replica.failed}
            bad = disk.fails or disk.hangs or not failed <= machine.reopening
            disk.fails = disk.hangs = False
            disk.slow_ms = 0
            if machine.up and bad:
                self.crash(machine, power=False)
            self._repair(machine)
            if not machine.up:
                self.start(machine)
        begun = self.now
        well = self.run_until(begun + CALM_MS, self.well)
        self.counts["calm seconds"] += (self.now - begun) // 1_000
        if not well:
            raise BrokenError(f"20: not well {CALM_MS} ms after the last fault: {self.why_not_well()}")
        self.checks.finish()

    def heal(self) -> None:
        self.store.heal()
        for machine in self.machines:
            if machine.client is not None:
                machine.client.heal()
        faults = self.store.faults
        faults.lost = faults.unanswered = faults.late = 0.0
        faults.lag_ms = (1, 4)
        self.loss = self.doubles = self.shuffle = 0.0
        for one, other in list(self.cut):
            self.reconnect(one, other)

    def record(self, shard: ShardId) -> ShardRecord:
        """As it stands in the store."""
        key = self.keys.shard(shard)
        return decode_shard(self.store.entries[key].value, key)

    def node(self, broker: str) -> NodeRecord | None:
        """What the store says of it, whoever has read it yet."""
        key = self.keys.node(broker)
        return decode_node(entry.value, key) if (entry := self.store.entries.get(key)) is not None else None

    def leader_of(self, shard: ShardId) -> tuple[Machine, ReplicaCore] | None:
        """Who leads the epoch of the record, if it serves."""
        record = self.record(shard)
        machine = self.by_name.get(record.leader)
        if machine is None or not machine.up or shard not in machine.cores:
            return None
        core = machine.cores[shard]
        return (machine, core) if core.leader.epoch == record.epoch and core.leader.may_append() else None

    def well(self) -> bool:
        return not self.why_not_well()

    def vacant(self) -> set[ShardId]:
        """Shards of which no member is left that could lead by rule."""
        return {shard for shard in self.shards if not self.checks.somebody_has_all(shard, self.record(shard))}

    def why_not_well(self) -> str:
        for shard in self.shards:
            record = self.record(shard)
            if not self.checks.somebody_has_all(shard, record):
                self.counts["vacant"] += 1
                continue
            found = self.leader_of(shard)
            if found is None:
                return f"shard {shard.incarnation[-1]} is not served: {record}"
            if set(record.isr) != set(record.replicas) or record.elr or record.target:
                return f"not all replicas are in sync: {record}"
            _, core = found
            # Of what was answered early, no client waits for the commit.
            if self.scene.answers_early and not all(log.is_committed for log in core.replica.logs.values()):
                return "not all that the leader has is committed"
            for name in record.replicas:
                other = self.by_name[name].cores.get(shard)
                # Not its commit point: where no append follows, a commit that a lossy link swallowed is told with the next one.
                if other is None or any(
                    other.replica.logs[number].durable != log.end for number, log in core.replica.logs.items()
                ):
                    return f"{name} lacks what the leader has"
        if self.counts["vacant"]:
            return "" if self.transactions is None else self.transactions.what_is_missing(self.vacant())
        waiting = [client.name for client in self.clients if client.waits]
        if waiting:
            return f"clients {waiting} wait"
        if self.words is not None and (why := self.words.why_not_well()):
            return why
        return "" if self.transactions is None else self.transactions.why_not_well()

    # -- starting and ending ---------------------------------------------------------------------------

    def start(self, machine: Machine) -> None:
        """A process: it registers, opens its logs, and announces itself."""
        if self.is_reconciling or (self.words is not None and machine is self.words.gone):
            return
        machine.life += 1
        machine.up = True
        machine.paused_until = 0
        machine.client = self.store.client(machine.name, machine.index)
        machine.view = ClusterView(self.keys)
        machine.cores, machine.appends = {}, {}
        machine.syncing, machine.again = set(), set()
        machine.reopening, machine.reopened = set(), set()
        machine.lease = machine.registration = 0
        machine.is_told, machine.was_fenced = True, False
        machine.stopping = False
        machine.held = BrokerLease()
        machine.controller = ControllerCore(self.keys, machine.name, LEASE_MS, self._elections)
        self.counts["starts"] += 1
        self.note(machine.name, "starts")
        self._register(machine)

    def _register(self, machine: Machine) -> None:
        client = machine.client
        assert client is not None

        def again(delay: int = 300) -> None:
            self.on(machine, delay, lambda: self._register(machine))

        def loaded(answer: Answer) -> None:
            if not isinstance(answer, Snapshot):
                again()
                return
            machine.view.load(answer)
            start = Start(
                machine.name, machine.name, machine.boot, f"lock{machine.index}{machine.disk.file.folder}"
            )
            step = intend(machine.view, machine.disk.file, start, replace=machine.replacing)
            if isinstance(step, Refusal):
                self.note(machine.name, "may not register:", step.reason)
                self.counts[f"refused: {step.reason}"] += 1
                if step.reason is Reason.OLD_FOLDER:
                    # What an operator does then: the copy is given up.
                    self.replace_folder(machine)
                again()
                return
            machine.disk.file = step.file
            client.transact(
                step.transaction.compares,
                step.transaction.writes,
                self.within(machine, lambda answer: done(answer)),
            )

        def done(answer: Answer) -> None:
            if not isinstance(answer, TransactResult) or not answer.succeeded:
                again()
                return
            machine.disk.file = registered(machine.disk.file)
            machine.replacing = False
            machine.registration = machine.disk.file.registration
            self._open(machine, answer.revision)

        client.load((self.keys.prefix,), self.within(machine, loaded))

    def replace_folder(self, machine: Machine) -> None:
        """An empty folder, in place of the one that was there."""
        self._folders += 1
        machine.disk = DiskModel(FolderRecord(folder=f"{self._folders:032x}"))
        machine.replacing = True
        self.checks.replaced(machine)

    def _open(self, machine: Machine, revision: int) -> None:
        """The logs, as they are found; then everything that was told since the registration."""
        self.note(machine.name, "is registered as", machine.registration)
        ill = [
            shard for shard in self.shards if shard in machine.disk.damaged or machine.disk.is_short(shard)
        ]
        if ill:
            self._leave_sets(machine, ill, lambda: self._opened(machine, revision, ill))
        else:
            self._opened(machine, revision, ill)

    def _leave_sets(self, machine: Machine, shards: list[ShardId], done: Callable[[], None]) -> None:
        """Before it is alive, it is no member of these shards' sets: nobody is to elect it for what it had."""
        client = machine.client
        assert client is not None

        def loaded(answer: Answer) -> None:
            if not isinstance(answer, Snapshot):
                self.on(machine, 300, again)
                return
            machine.view.load(answer)
            for shard in shards:
                is_damaged = shard in machine.disk.damaged
                made = leave_sets(machine.view, shard, machine.name, if_alone=not is_damaged)
                if made is not None:
                    self.note(machine.name, "leaves the sets of", shard.incarnation[-1])
                    self.counts["ill copies left"] += 1
                    client.transact(
                        made.compares,
                        made.writes,
                        self.within(machine, lambda _: self.on(machine, 10, again)),
                    )
                    return
            done()

        def again() -> None:
            client.load((self.keys.prefix,), self.within(machine, loaded))

        again()

    def _opened(self, machine: Machine, revision: int, ill: list[ShardId]) -> None:
        for shard in self.shards:
            machine.appends[shard] = deque()
            if shard not in machine.disk.damaged:
                core = machine.cores[shard] = self._core(machine, shard, revision)
                core.replica.lost = shard in ill
                held = machine.view.shards.get(shard)
                core.replica.lost_in = 0 if held is None else held.epoch
        self._load(machine)
        self.on(machine, TICK_MS, lambda: self._tick(machine))
        self.on(machine, PULSE_MS, lambda: self._pulse(machine))
        for other in self.machines:
            if other is not machine and other.up:
                self._link(other, machine, True)

    def _core(self, machine: Machine, shard: ShardId, revision: int) -> ReplicaCore:
        logs = {}
        for number in (0, 1):
            model = machine.disk.log(shard, number)
            model.recover()
            end = model.end
            logs[number] = Log(
                number,
                History(model.starts),
                model.start,
                end,
                commit=max(model.start, min(model.kept, end)),
                kept=model.kept,
            )
        return ReplicaCore(
            Replica(
                machine.name, machine.registration, machine.disk.file.folder, revision, "fsync", logs, lease=machine.held,
                answers_early=self.scene.answers_early,
            )
        )  # fmt: skip

    def _load(self, machine: Machine) -> None:
        """All records, and a watch from there."""
        client = machine.client
        assert client is not None

        def loaded(answer: Answer) -> None:
            if not isinstance(answer, Snapshot):
                self.on(machine, 300, lambda: self._load(machine))
                return
            core = machine.controller
            assert core is not None
            machine.view = core.view
            self.steer(machine, controller.Loaded(answer))
            if self.words is not None:
                self.words.tell(machine)
            self._hear_records(machine, self.shards)
            self._look_for_lease(machine)
            machine.watch = client.watch((self.keys.prefix,), answer.revision + 1, changed, lost)
            if not machine.lease:
                self._announce(machine)

        def changed(told: Change) -> None:
            if machine.life != life or not machine.up:
                return
            if machine.paused_until > self.now:
                # In order with what was put off before.
                self.on(machine, machine.paused_until - self.now, lambda: self._hear(machine, told))
            else:
                self._hear(machine, told)

        def lost() -> None:
            if machine.life == life and machine.up:
                self.on(machine, 10, lambda: self._load(machine))

        life = machine.life
        client.load((self.keys.prefix,), self.within(machine, loaded))

    def _hear(self, machine: Machine, told: Change) -> None:
        self.steer(machine, controller.Changed(told))
        keys = {event.key for event in told.events}
        self._hear_records(machine, [shard for shard in self.shards if self.keys.shard(shard) in keys])
        if any(key.startswith(self.keys.brokers) for key in keys):
            living = machine.view.brokers.registrations()
            for shard in self.shards:
                self.step(machine, shard, Living(living))
        self._look_for_lease(machine)

    def _hear_records(self, machine: Machine, shards: list[ShardId]) -> None:
        view = machine.view
        for shard in shards:
            record = view.shards.get(shard)
            if record is not None:
                self.step(
                    machine,
                    shard,
                    RecordRead(record, view.revision_of(self.keys.shard(shard)), view.revision),
                )

    def _announce(self, machine: Machine) -> None:
        """Alive, under a lease; again after each that was lost."""
        client = machine.client
        assert client is not None
        sent = self.local(machine)

        def again() -> None:
            self.on(machine, 200, lambda: self._announce(machine))

        def granted(answer: Answer) -> None:
            if not isinstance(answer, Granted):
                again()
                return
            machine.lease = answer.lease
            record = BrokerRecord(
                registration=machine.registration, folder=machine.disk.file.folder,
                lock=f"lock{machine.index}{machine.disk.file.folder}", host=machine.name,
                client_address=f"{machine.name}:1", peer_address=f"{machine.name}:2",
            )  # fmt: skip
            made = announce(machine.view, machine.disk.file, machine.name, record, answer.lease)
            if isinstance(made, Refusal):
                self.note(machine.name, "may not announce itself:", made.reason)
                if made.reason is Reason.SUPERSEDED:
                    self.crash(machine, power=False)
                    return
                again()
                return
            client.transact(made.compares, made.writes, self.within(machine, announced))

        def announced(answer: Answer) -> None:
            if isinstance(answer, TransactResult) and answer.succeeded:
                machine.announced_at, machine.is_told = answer.revision, False
                self._hold(machine, sent)
            else:
                again()

        machine.lease, machine.is_told = -1, True
        client.grant(LEASE_MS, self.within(machine, granted))

    def _hold(self, machine: Machine, sent: int) -> None:
        """The lease was taken or renewed by a request sent at `sent`."""
        machine.sent = sent
        if machine.is_told or self._is_shown(machine):
            self._tell_lease(machine)
        self.on(machine, LEASE_MS // 3, lambda: self._renew(machine))

    def _is_shown(self, machine: Machine) -> bool:
        """Whether what was elected while the broker was not alive is known to it: a store that went back may not know it either."""
        return machine.view.revision >= machine.announced_at and not self._is_frozen(machine)

    def _is_frozen(self, machine: Machine) -> bool:
        """Whether it has heard that the store went back, and others may have been elected in its place before."""
        return machine.was_fenced and bool(machine.view.revision_of(self.keys.frozen))

    def _tell_lease(self, machine: Machine) -> None:
        if not machine.is_told:
            machine.is_told = True
            self.steer(machine, controller.Leased(machine.lease))
        machine.held.until_ms = machine.sent + LEASE_MS

    def _look_for_lease(self, machine: Machine) -> None:
        if machine.lease > 0 and not machine.is_told and self._is_shown(machine):
            self._tell_lease(machine)

    def _renew(self, machine: Machine) -> None:
        client, sent = machine.client, self.local(machine)
        assert client is not None

        def renewed(answer: Answer) -> None:
            if isinstance(answer, Granted):
                self._hold(machine, sent)
            elif isinstance(answer, LeaseLost):
                self.note(machine.name, "has lost its lease")
                machine.was_fenced = True
                self.steer(machine, controller.LeaseLost())
                self._announce(machine)
            else:
                self._renew(machine)

        client.renew(machine.lease, self.within(machine, renewed))

    def _pulse(self, machine: Machine) -> None:
        client = machine.client
        assert client is not None
        step = raise_pulse(machine.view, machine.disk.file, machine.name)
        if not isinstance(step, Refusal):
            machine.disk.file = step.file
            client.transact(
                step.transaction.compares, step.transaction.writes, self.within(machine, lambda answer: None)
            )
        self.on(machine, PULSE_MS, lambda: self._pulse(machine))

    def crash(self, machine: Machine, *, power: bool) -> None:
        """The process ends, perhaps with its machine."""
        if not machine.up:
            return
        self.note(machine.name, "loses its", "power" if power else "process")
        self.counts["power" if power else "crashes"] += 1
        machine.up = False
        machine.life += 1
        if machine.watch is not None:
            self.store.client(machine.name, machine.index).end(machine.watch)
        for shard in list(machine.appends):
            self._unknown(machine, shard)
        if power:
            machine.boots += 1
            for log in machine.disk.every():
                log.lose_power(self.random)
        machine.disk.hangs = machine.disk.fails = False
        for other in self.machines:
            if other is not machine and other.up:
                self._link(machine, other, False)

    # -- the network -----------------------------------------------------------------------------------

    def _link(self, machine: Machine, other: Machine, up: bool) -> None:
        """Both, where they live, hear that their link is up or down."""
        for one, two in ((machine, other), (other, machine)):
            if one.up:
                self.on(one, 20, lambda one=one, two=two: self._linked(one, two, up))  # type: ignore[misc]

    def _linked(self, machine: Machine, other: Machine, up: bool) -> None:
        if up and (not other.up or self._is_cut(machine, other)):
            return
        for shard in machine.cores:
            self.step(machine, shard, Linked(other.name, up))

    def _is_cut(self, one: Machine, other: Machine) -> bool:
        return (one.index, other.index) in self.cut or (other.index, one.index) in self.cut

    def disconnect(self, one: int, other: int) -> None:
        """What one says, the other does not hear. After a while both know that their link is down."""
        if (one, other) in self.cut:
            return
        self.cut.add((one, other))
        a, b = self.machines[one], self.machines[other]
        self.later(
            self.random.choice((200, 600, 3_000)),
            lambda: self._link(a, b, False) if self._is_cut(a, b) else None,
        )

    def reconnect(self, one: int, other: int) -> None:
        self.cut.discard((one, other))
        a, b = self.machines[one], self.machines[other]
        if not self._is_cut(a, b):
            self._link(a, b, True)

    def send(self, machine: Machine, peer: str, shard: ShardId, message: Message) -> None:
        other = self.by_name.get(peer)
        if other is None or other is machine or (machine.index, other.index) in self.cut:
            return
        random = self.random
        if self.loss and random.random() < self.loss:
            return
        delay = self.delay_ms + self._late_ms.get(other.index, 0)
        if self.shuffle and random.random() < self.shuffle:
            delay += random.randint(1, 400)
        life = other.life

        def arrive() -> None:
            if other.life == life and (machine.index, other.index) not in self.cut:
                self.on(other, 0, lambda: self._arrive(other, machine.name, shard, message))

        self.later(delay, arrive)
        if self.doubles and random.random() < self.doubles:
            self.later(delay + random.randint(1, 800), arrive)

    def _arrive(self, machine: Machine, peer: str, shard: ShardId, message: Message) -> None:
        if shard in machine.cores:
            self.step(machine, shard, Received(peer, message))

    # -- steps of cores --------------------------------------------------------------------------------

    def step(self, machine: Machine, shard: ShardId, event: object) -> None:
        core = machine.cores.get(shard)
        if core is None:
            return
        self.steps += 1
        self.checks.before(shard, core)
        ready = core.step(event, self.local(machine))
        self._carry_out(machine, shard, core, ready, event)
        self.checks.after(machine, shard, core, ready, event)
        if machine.up and core is machine.cores.get(shard):
            self._answer(machine, shard, core, ready)
            if self.transactions is not None:
                self.transactions.stepped(machine, shard, core)

    def _carry_out(
        self, machine: Machine, shard: ShardId, core: ReplicaCore, ready: Ready, event: object
    ) -> None:
        disk = machine.disk
        for cut in ready.truncate:
            self.note(machine.name, "cuts log", cut.log, "at", cut.point)
            self.counts["cuts"] += 1
            disk.log(shard, cut.log).cut(cut.point)
            disk.lower_mark(shard, cut.log, cut.point)
        if ready.begin:
            self._begin(machine, shard, core, ready)
        for write in ready.write:
            log = disk.log(shard, write.log)
            assert log.end == write.prev, (log.end, write.prev)
            log.frames.extend(write.frames)
            history = log.history()
            for start in write.starts:
                if start.epoch > history.last.epoch:
                    history.begin(start)
            log.starts = history.starts
        for send in ready.send:
            self.send(machine, send.peer, shard, send.message)
        for sync in ready.sync:
            self._sync(machine, shard, sync.log, sync.cuts)
        for copy in ready.copy:
            self.on(
                machine, self.random.randint(20, 300),
                self._of(core, machine, shard, partial(self._copy, machine, shard, copy.peer, copy.log)),
            )  # fmt: skip
        for read in ready.read:
            frames = disk.log(shard, read.log).read(read.begin, min(read.size, 400))
            event = FramesRead(read.peer, read.ask, read.log, read.begin, frames)
            self.on(machine, 1, self._of(core, machine, shard, partial(self.step, machine, shard, event)))
        for keep in ready.keep:
            disk.log(shard, keep.log).kept = keep.point
            disk.marks[shard, keep.log] = keep.point
        for trim in ready.trim:
            disk.log(shard, trim.log).trim(trim.point)
        if ready.swap is not None:
            self._swap(machine, shard, ready.swap)
        for alarm in ready.alarms:
            self.note(machine.name, "ALARM", alarm)
            self.counts["alarms"] += 1
            self.checks.alarmed(machine, shard, alarm)

    def _begin(self, machine: Machine, shard: ShardId, core: ReplicaCore, ready: Ready) -> None:
        """N1: everything is synced, and the epoch's beginning with it."""
        epoch = core.leader.epoch
        self.note(machine.name, "begins epoch", epoch)
        for begin in ready.begin:
            log = machine.disk.log(shard, begin.log)
            log.starts = core.replica.logs[begin.log].history.starts
        captured = {begin.log: machine.disk.log(shard, begin.log).begin_sync() for begin in ready.begin}

        def begun() -> None:
            disk = machine.disk
            if disk.hangs:
                return
            if disk.fails:
                self._disk_fails(machine, shard, 0)
                return
            for number, synced in captured.items():
                disk.log(shard, number).sync(synced)
            self.step(machine, shard, Begun(epoch))

        self.on(machine, self._sync_ms(machine), self._of(core, machine, shard, begun))

    def _sync_ms(self, machine: Machine) -> int:
        slow = machine.disk.slow_ms
        return self.random.randint(1, slow) if slow else self.random.randint(1, 4)

    def _sync(self, machine: Machine, shard: ShardId, number: int, cuts: int) -> None:
        at = (shard, number)
        if at in machine.syncing:
            machine.again.add(at)
            return
        machine.syncing.add(at)
        log, core = machine.disk.log(shard, number), machine.cores[shard]
        captured, point = log.begin_sync(), log.end

        def synced() -> None:
            if machine.disk.hangs:
                return
            machine.syncing.discard(at)
            if machine.disk.fails:
                self._disk_fails(machine, shard, number)
                return
            if core.replica.failed:
                return
            log.sync(captured)
            if at in machine.again:
                machine.again.discard(at)
                self._sync(machine, shard, number, core.replica.logs[number].cuts)
            self.step(machine, shard, Synced(number, point, cuts))

        self.on(machine, self._sync_ms(machine), self._of(core, machine, shard, synced))

    def _of(
        self, core: ReplicaCore, machine: Machine, shard: ShardId, happens: Callable[[], None]
    ) -> Callable[[], None]:
        """What is under way for a core whose copy is opened again is over."""

        def due() -> None:
            if machine.cores.get(shard) is core:
                happens()

        return due

    def _disk_fails(self, machine: Machine, shard: ShardId, number: int) -> None:
        self.note(machine.name, "fails a sync of log", number)
        machine.disk.log(shard, number).fail()
        machine.disk.fails = False
        self.counts["failed syncs"] += 1
        had_failed = machine.cores[shard].replica.failed
        self.step(machine, shard, DiskFailed(number))
        after = self.random.randint(500, 3_000)
        if not self.scene.reopened:
            # An operator, or what watches over processes, starts it again.
            self.later(after, partial(self._restart, machine, machine.life))
        elif not had_failed:
            machine.reopening.add(shard)
            self.on(machine, after, partial(self._open_again, machine, shard))

    def _open_again(self, machine: Machine, shard: ShardId) -> None:
        """As `ReplicaHost._open_again`: once nobody leads with it, and the record says so."""
        core, record = machine.cores[shard], machine.view.shards.get(shard)
        if (
            record is None
            or core.replica.fence.frozen
            or core.leader.leads
            or machine.disk.hangs
            or (record.leader == machine.name and not has_yielded(record))
        ):
            self.on(machine, 200, partial(self._open_again, machine, shard))
            return
        if core.replica.failed != "failed":
            machine.reopening.discard(shard)
            return
        self.note(machine.name, "opens", shard.incarnation[-1], "again")
        self.counts["opened again"] += 1
        again = self._core(machine, shard, core.replica.registered_at)
        for number, log in again.replica.logs.items():
            model = machine.disk.log(shard, number)
            model.sync(model.begin_sync())
            log.durable = log.end
            assert log.end >= core.replica.logs[number].durable
        again.replica.lost = core.replica.lost
        again.replica.lost_in = core.replica.lost_in
        again.go_on_from(core)
        machine.cores[shard] = again
        machine.reopening.discard(shard)
        machine.reopened.add(shard)
        for number in (0, 1):
            machine.syncing.discard((shard, number))
            machine.again.discard((shard, number))
        self.step(machine, shard, Living(machine.view.brokers.registrations()))
        self._hear_records(machine, [shard])

    def _say_of_failed(self, machine: Machine, shard: ShardId) -> None:
        """As the host does: a copy that failed and is elected says so; one that is open again and counts as failed, while nobody leads, does too."""
        core, record = machine.cores[shard], machine.view.shards.get(shard)
        if record is None or not self.scene.reopened:
            return
        view, made = machine.view, None
        if record.failed.get(machine.name) != machine.registration and not core.replica.failed:
            machine.reopened.discard(shard)
        if (
            core.replica.failed == "failed"
            and record.leader == machine.name
            and record.isr.get(machine.name) == machine.registration
            and not has_yielded(record)
            and not core.leader.leads
        ):
            self.counts["elected in vain"] += 1
            made = change(
                view,
                shard,
                machine.name,
                record,
                view.revision_of(self.keys.shard(shard)),
                with_yield(record, "failed"),
            )
        elif (
            shard in machine.reopened
            and not core.replica.failed
            and (not record.leader or has_yielded(record))
        ):
            made = open_again(view, shard, machine.name)
            self.counts["counted again"] += not isinstance(made, Refusal)
        if made is not None and not isinstance(made, Refusal):
            assert machine.client is not None
            machine.client.transact(made.compares, made.writes, lambda answer: None)

    def _restart(self, machine: Machine, life: int) -> None:
        if machine.life == life and machine.up:
            self.crash(machine, power=False)
            self.start(machine)

    def _copy(self, machine: Machine, shard: ShardId, peer: str, number: int) -> None:
        other = self.by_name[peer]
        core = other.cores.get(shard)
        if not other.up or core is None or self._is_cut(machine, other):
            self.step(machine, shard, CopyFailed(number))
            return
        self.counts["copies"] += 1
        source = other.disk.log(shard, number)
        durable = core.replica.logs[number].durable
        frames = source.below(durable)
        end = frames[-1].end if frames else source.start
        starts = tuple(start for start in source.starts if start.start < end)
        log = LogModel(list(frames), starts, source.start, BEGINNING, list(frames), starts)
        log.kept = min(machine.disk.log(shard, number).kept, end)
        machine.disk.logs[shard][number] = log
        if number == 0:
            machine.disk.offloaded.pop(shard, None)
        machine.disk.lower_mark(shard, number, end)
        self.step(machine, shard, Copied(number, log.start, end, History(starts)))

    # -- the record ------------------------------------------------------------------------------------

    def _swap(self, machine: Machine, shard: ShardId, swap: Swap) -> None:
        client, core = machine.client, machine.cores[shard]
        assert client is not None
        made = change(machine.view, shard, machine.name, swap.before, swap.revision, swap.record)
        if isinstance(made, Refusal):
            refused = partial(self.step, machine, shard, SwapAnswered(swap.attempt, Outcome.REFUSED))
            self.on(machine, 1, self._of(core, machine, shard, refused))
            return
        self.note(machine.name, "swaps", _told(swap.before), "for", _told(swap.record))

        def done(answer: Answer) -> None:
            outcome, revision = Outcome.UNKNOWN, 0
            if machine.cores.get(shard) is not core:
                return
            if isinstance(answer, TransactResult):
                outcome = Outcome.APPLIED if answer.succeeded else Outcome.REFUSED
                revision = answer.revision
            elif isinstance(answer, LeaseLost):
                outcome = Outcome.REFUSED
            self.counts[f"swaps {outcome.value}"] += 1
            self.note(machine.name, "swap:", outcome.value, revision)
            self.step(machine, shard, SwapAnswered(swap.attempt, outcome, revision))

        client.transact(made.compares, made.writes, self.within(machine, done))

    # -- the controller --------------------------------------------------------------------------------

    def steer(self, machine: Machine, event: controller.Event) -> None:
        """Let this broker's part in being the controller hear it, and do what follows."""
        client, core = machine.client, machine.controller
        assert client is not None and core is not None
        for action in core.step(event, self.local(machine)):
            match action:
                case controller.Transact(id_, made):
                    client.transact(
                        made.compares,
                        made.writes,
                        self.within(machine, lambda answer, id_=id_: self._steered(machine, id_, answer)),  # type: ignore[misc]
                    )
                case controller.Find(id_, keys):
                    client.read(
                        keys,
                        self.within(machine, lambda answer, id_=id_: self._found(machine, id_, answer)),  # type: ignore[misc]
                    )
                case controller.Alarm(subject, sentence):
                    self.note(machine.name, "controller:", subject, sentence)
                case controller.AskEnds():
                    raise AssertionError("no shard is of interval here")

    def _steered(self, machine: Machine, id_: int, answer: Answer) -> None:
        self.steer(machine, controller.Answered(id_, answer if isinstance(answer, TransactResult) else None))

    def _found(self, machine: Machine, id_: int, answer: Answer) -> None:
        if isinstance(answer, Found):
            self.steer(machine, controller.Found(id_, answer.entries, answer.revision))
        else:
            self.steer(machine, controller.Found(id_, None))

    # -- time in a process -----------------------------------------------------------------------------

    def _tick(self, machine: Machine) -> None:
        is_detached = self.local(machine) > machine.held.until_ms + DETACHED_MS
        for shard, core in list(machine.cores.items()):
            if self.local(machine) < core.rests_until_ms and not is_detached:
                self.counts["ticks left out"] += 1
                if self.counts["ticks left out"] % LEFT_OUT_CHECKED == 0:
                    self.checks.left_out(machine, core)
            else:
                self.step(machine, shard, Tick())
            self._say_of_failed(machine, shard)
        self.steer(machine, controller.Tick())
        if self.audit is not None:
            self.audit.look(machine)
        if self.offload is not None:
            self.offload.tick(machine)
        self.on(machine, TICK_MS, lambda: self._tick(machine))

    # -- clients ---------------------------------------------------------------------------------------

    def drive(self, client: Client) -> None:
        """Ask, and ask again: somebody else where the one asked does not lead."""
        if self.calm and not client.waits:
            return
        machine = self.machines[client.at]
        core = machine.cores.get(client.shard)
        if client.asked_ms >= 0 and self.now - client.asked_ms < PATIENCE_MS:
            self.later(PATIENCE_MS // 10, lambda: self.drive(client))
            return
        if not client.waits and client.pause > self.now:
            self.later(client.pause - self.now, lambda: self.drive(client))
            return
        if machine.up and machine.paused_until <= self.now and core is not None and core.leader.may_append():
            client.waits = True
            client.asked_ms = self.now
            self._append(machine, client, core)
        else:
            client.waits = True
            record = self.record(client.shard)
            client.at = (
                self.by_name[record.leader].index
                if record.leader and self.random.random() < 0.6
                else self.random.randrange(len(self.machines))
            )
            client.asked_ms = -1
        self.later(PATIENCE_MS // 10 if client.asked_ms >= 0 else 150, lambda: self.drive(client))

    def _append(self, machine: Machine, client: Client, core: ReplicaCore) -> None:
        """A record; sometimes with a position behind it, and an entry of the journal, which is what is answered by."""
        shard, me = client.shard, (client.name, client.number)
        number = client.number % 3 == 2
        disk = machine.disk.log(shard, number)
        for frame in reversed(disk.frames):
            if frame.body == me:
                # Sent again: answered once what it became is committed.
                machine.appends[shard].append(Append(client, client.number, number, frame.end))
                self._answer(machine, shard, core, Ready())
                return
        for frame in self.checks.committed.get((shard, number), ()):
            if frame.end <= disk.start and frame.body == me:
                # Retention took it. The producers' table, which each copy has, knows it for a week.
                machine.appends[shard].append(Append(client, client.number, number, frame.end))
                self._answer(machine, shard, core, Ready())
                return
        prev = disk.end
        epoch = core.leader.epoch
        frames = [Frame(epoch, LogPoint(prev.offset + 1), 100, me)]
        if client.number % 4 == 1:
            frames.append(Frame(epoch, LogPoint(prev.offset + 1, 1), 30, ("position", *me)))
        machine.appends[shard].append(Append(client, client.number, number, frames[0].end))
        self.write(machine, shard, number, tuple(frames))

    def write(self, machine: Machine, shard: ShardId, number: int, frames: tuple[Frame, ...]) -> None:
        """Frames of a leader, to its own file first."""
        disk = machine.disk.log(shard, number)
        prev = disk.end
        disk.frames.extend(frames)
        self.step(machine, shard, Written(number, prev, frames))

    def _answer(self, machine: Machine, shard: ShardId, core: ReplicaCore, ready: Ready) -> None:
        """Clients whose appends are committed, or whose leader is none any more."""
        if ready.deposed:
            self._unknown(machine, shard)
        waiting = machine.appends.get(shard)
        if not waiting or not core.leader.commits:
            return
        # Journals are never answered early.
        early = core.replica.answers_early and core.leader.may_answer(self.local(machine))
        left: deque[Append] = deque()
        for append in waiting:
            log = core.replica.logs[append.log]
            if log.commit >= append.point:
                self._acknowledge(append)
            elif early and append.log == 0 and log.durable >= append.point:
                self.counts["answered early"] += 1
                self._acknowledge(append)
                if self._once_answered:
                    fault = self._once_answered.pop()._replace(where=machine.index, number=0)
                    self.on(machine, 1, lambda fault=fault: self.fault(fault))  # type: ignore[misc]
            else:
                left.append(append)
        machine.appends[shard] = left

    def _acknowledge(self, append: Append) -> None:
        client = append.client
        if client.number == append.number and client.waits:
            client.waits = False
            client.asked_ms = -1
            client.acknowledged.append(append.number)
            self.counts["acknowledged"] += 1
            self.checks.acknowledged(client, append)
            client.number += 1
            client.pause = self.now + self.random.choice((0, 0, 300, 900))

    def _unknown(self, machine: Machine, shard: ShardId) -> None:
        for append in machine.appends.get(shard, ()):
            append.client.asked_ms = -1
        machine.appends[shard] = deque()

    def _stop_in_order(self, machine: Machine, lasts: int) -> None:
        """As `Replicas.give_up`: hand on what is led, leave what others lead, and end; one broker after the other, as a rolling restart does."""
        if any(not each.up or each.stopping or not each.lease for each in self.machines):
            return
        self.counts["stops"] += 1
        machine.stopping = True
        began = self.now
        for shard in list(machine.cores):
            self.step(machine, shard, YieldAsked("drain"))

        def look() -> None:
            gives_up = any(core.leader.gives_up for core in machine.cores.values()) or any(
                has_yielded(record)
                for record in machine.view.shards.values()
                if record.leader == machine.name
            )
            if gives_up and self.now - began < GIVE_UP_MS:
                self.on(machine, GIVE_UP_LOOK_MS, look)
                return
            self.counts["stops in time"] += not gives_up
            for shard in list(machine.cores):
                self.step(machine, shard, Leaving())
            self.on(machine, LEAVE_MS, end)

        def end() -> None:
            self.crash(machine, power=False)
            self.start_after(machine, lasts)

        self.on(machine, 1, look)

    # -- faults ----------------------------------------------------------------------------------------

    def fault(self, fault: Fault) -> None:
        if self.calm:
            return
        if self.scene.answers_early and fault.what in {"stop", "yield"} and fault.number & 1:
            self._once_answered.append(fault)
            return
        self.note("fault", fault)
        machine = self.machines[fault.where]
        lasts, client = fault.lasts_ms, machine.client
        assert client is not None
        match fault.what:
            case "crash" | "power":
                self.crash(machine, power=fault.what == "power")
                self.start_after(machine, lasts)
            case "all power":
                for each in self.machines:
                    self.crash(each, power=True)
                    self.start_after(each, 1 + (lasts * (each.index + 1)) // 4)
            case "pause":
                machine.paused_until = max(machine.paused_until, self.now + lasts)
            case "frozen":
                # For longer than its lease, and it goes on before its watch tells it what happened meanwhile.
                machine.paused_until = max(machine.paused_until, self.now + lasts)
                client.cut_in = True
                self.later(lasts + fault.number % WATCH_LATE_MS, client.heal)
            case "link":
                for pair in ((fault.where, fault.other), (fault.other, fault.where)):
                    self.disconnect(*pair)
                    self.later(lasts, lambda pair=pair: self.reconnect(*pair))  # type: ignore[misc]
            case "deaf":
                self.disconnect(fault.other, fault.where)
                self.later(lasts, lambda: self.reconnect(fault.other, fault.where))
            case "alone":
                for other in self.machines:
                    if other is not machine:
                        for pair in ((fault.where, other.index), (other.index, fault.where)):
                            self.disconnect(*pair)
                            self.later(lasts, lambda pair=pair: self.reconnect(*pair))  # type: ignore[misc]
                if fault.number & 1:
                    client.cut_in = client.cut_out = True
                    self.later(lasts, client.heal)
            case "store":
                client.cut_in = client.cut_out = True
                self.later(lasts, client.heal)
            case "store deaf":
                client.cut_in = True
                self.later(lasts, client.heal)
            case "outage":
                self.store.stop()
                self.later(lasts, self.store.heal)
            case "doubt":
                faults = self.store.faults
                faults.unanswered, faults.late = 0.2, 0.25

                def sure() -> None:
                    faults.unanswered = faults.late = 0.0

                self.later(lasts, sure)
            case "lag":
                self.store.faults.lag_ms = (1, 1_500)
                self.later(lasts, lambda: setattr(self.store.faults, "lag_ms", (1, 4)))
            case "fail":
                machine.disk.fails = True
            case "hang":
                disk = machine.disk
                disk.hangs = True
                restart = partial(self._restart, machine, machine.life)
                self.later(lasts + 12_000 * (fault.number & 1), restart)
            case "slow":
                disk = machine.disk
                disk.slow_ms = fault.number % 900 + 10
                self.later(lasts, lambda: setattr(disk, "slow_ms", 0))
            case "replace":
                if self.checks.may_replace(machine):
                    self.crash(machine, power=True)
                    self.replace_folder(machine)
                    self.start_after(machine, lasts)
            case "snapshot":
                machine.copy = machine.disk.copy()
                self.later(lasts + 2_500, lambda: self._put_back(machine))
            case "net":
                self.loss = (fault.number & 3) * 0.06
                self.doubles = (fault.number >> 2 & 3) * 0.07
                self.shuffle = (fault.number >> 4 & 3) * 0.12

                def clear() -> None:
                    self.loss = self.doubles = self.shuffle = 0.0

                self.later(lasts, clear)
            case "recovered":
                Disaster(self, machine, fault).begin()
            case "store back":
                backup = self.store.backup()
                self.later(lasts, lambda: self._put_store_back(backup, fault.number))
            case "lost copy" | "older copy" | "damaged copy":
                self._make_ill(machine, fault)
            case "min":
                for shard in machine.cores:
                    for each in self.machines:
                        self.on(each, 1, partial(self.step, each, shard, MinWanted(1 + fault.number % 2)))
            case "yield":
                for shard in list(machine.cores):
                    self.step(machine, shard, YieldAsked("drain"))
            case "late":
                self._late_ms[fault.where] = fault.number % 700 + 50
                self.later(lasts, lambda: self._late_ms.update({fault.where: 0}))
            case "stop":
                self._stop_in_order(machine, lasts)
            case "move":
                self._move(machine, fault)
            case "trim":
                for shard in list(machine.cores):
                    self._trim(machine, shard)
            case what if self.words is not None and what in WORDS:
                self.words.asks(fault)
            case what:
                raise AssertionError(what)

    def start_after(self, machine: Machine, delay: int) -> None:
        life = machine.life

        def start() -> None:
            if machine.life == life and not machine.up:
                self.start(machine)

        self.later(delay, start)

    def _put_back(self, machine: Machine) -> None:
        """The volume's older snapshot takes its place, where it is older than a pulse (a younger one is not noticed: the docs say so)."""
        copy, machine.copy = machine.copy, None
        if copy is None or self.calm or not self.checks.may_replace(machine):
            return
        pulse = machine.view.pulses.get(machine.name)
        if copy.file.folder != machine.disk.file.folder or pulse is None or pulse.pulse <= copy.file.pulse:
            return
        self.crash(machine, power=True)
        self.note(machine.name, "comes back with an older copy of its folder")
        self.counts["older copies"] += 1
        machine.disk = copy
        self.checks.replaced(machine)
        self.start_after(machine, 500)

    def _put_store_back(self, backup: Backup, number: int) -> None:
        """The store is what it was. Brokers may go on for a while; then all are stopped, and an operator reconciles the region."""
        if self.is_reconciling or any(machine.disk.damaged for machine in self.machines):
            return
        self.is_reconciling = True
        self.note("the store is put back to revision", backup.revision, "from", self.store.revision)
        self.counts["stores back"] += 1
        goes_on_ms = 1 + (number % 1_500 if number & 1 else 0)
        self.store.restore(backup)

        def stop() -> None:
            for machine in self.machines:
                self.crash(machine, power=bool(number >> machine.index & 2))
            self.later(LEASE_MS, reconcile)

        def reconcile() -> None:
            self.store.heal()
            if any(key.startswith(self.keys.brokers) for key in self.store.entries):
                self.later(500, reconcile)
            else:
                # Now and then the command is killed, and run again.
                if cut := (number >> 4) % 6:
                    self._reconcile(cut)
                self._reconcile()

        self.later(goes_on_ms, stop)

    def _reconcile(self, writes: int | None = None) -> None:
        """`felix region reconcile`, with every broker's folder; the run ends without a word after so many `writes`."""
        allowed = repeat(0) if writes is None else iter(range(writes))

        def view() -> ClusterView:
            entries, read = self.store.entries, ClusterView(self.keys)
            read.load(Snapshot(tuple(entries[key] for key in sorted(entries)), self.store.revision))
            return read

        def do(made: list[Transaction]) -> None:
            for each in made:
                if next(allowed, None) is None:
                    return
                answer = self.store.transact(each.compares, each.writes)
                assert isinstance(answer, TransactResult) and answer.succeeded, each

        names = [machine.name for machine in self.machines]
        plan = reconciliation.reconcile(
            view(), {}, (), {machine.name: self._heard(machine) for machine in self.machines}, names,
            without=(), election=self.election,
        )  # fmt: skip
        assert not isinstance(plan, Refusal), plan
        if frozen := reconciliation.freeze(view(), names[0], plan):
            do([frozen])
        do(reconciliation.brokers(view(), plan))
        do(reconciliation.shards(view(), plan))
        if writes is not None:
            self.note("the command is killed", plan.losses)
            self.counts["reconciling cut off"] += 1
            return
        do([reconciliation.thaw(view())])
        self.in_doubt = bool(plan.losses)
        self.note("the region is reconciled", plan.losses)
        self.counts["reconciled in doubt" if plan.losses else "reconciled"] += 1
        self.is_reconciling = False
        if not self.in_doubt:
            for machine in self.machines:
                self.start(machine)

    def _heard(self, machine: Machine) -> FolderReport:
        """What a folder says while nobody writes to it; all of it is synced then."""
        disk, file = machine.disk, machine.disk.file
        shards = []
        for shard, logs in disk.logs.items():
            told = []
            for number, log in logs.items():
                log.recover()
                log.sync(log.begin_sync())
                last = log.history().last
                kept = disk.marks.get((shard, number), LogPoint(0))
                told.append(
                    LogTold(
                        kind=number,
                        epoch=last.epoch,
                        election=last.election,
                        end=log.end,
                        kept=kept,
                        starts=log.starts,
                    )
                )
            shards.append(
                ShardTold(stream="", incarnation=shard.incarnation, number=shard.number, logs=tuple(told))
            )
        return FolderReport(
            region=REGION, broker=machine.name, folder=file.folder, registration=file.registration, intended=file.intended, pulse=file.pulse,
            host=machine.name, boot=machine.boot, version="", made_ms=self.now, shards=tuple(shards),
        )  # fmt: skip

    def _make_ill(self, machine: Machine, fault: Fault) -> None:
        """The folder of one shard is gone, is put back as it was earlier, or cannot be read; that of the broker is as it was."""
        shard = self.shards[fault.number % len(self.shards)]
        older = machine.disk.copy().logs.get(shard, {})

        def happens() -> None:
            disk = machine.disk
            if self.calm or shard not in disk.logs or not self.checks.may_replace(machine):
                return
            # What was committed since its commit point was kept last is not noticed: the docs say so.
            if fault.what == "older copy" and not any(
                log.end < disk.marks.get((shard, number), LogPoint(0)) for number, log in older.items()
            ):
                return
            if fault.what == "lost copy" and not any(
                mark > LogPoint(0) for at, mark in disk.marks.items() if at[0] == shard
            ):
                return
            self.crash(machine, power=True)
            self.note(machine.name, "has a", fault.what, "of", shard.incarnation[-1])
            self.counts[fault.what] += 1
            self.checks.is_ill(machine, shard)
            if fault.what == "older copy":
                disk.logs[shard] = older
            elif fault.what == "lost copy":
                del disk.logs[shard]
            else:
                disk.damaged.add(shard)
                self.later(fault.lasts_ms + 3_000, lambda: self._repair(machine))
            self.start_after(machine, 100 + fault.number % 700)

        if fault.what == "older copy":
            self.later(fault.lasts_ms + 1_500, happens)
        else:
            happens()

    def _repair(self, machine: Machine) -> None:
        """What an operator does with damaged copies: the broker is stopped, they are removed, and it is started."""
        disk = machine.disk
        if disk.damaged:
            self.crash(machine, power=False)
            for shard in disk.damaged:
                disk.logs.pop(shard, None)
            disk.damaged.clear()
            self.start(machine)

    def _move(self, machine: Machine, fault: Fault) -> None:
        """An operator moves a shard to other brokers."""
        if len(self.machines) == 3 or not machine.up:
            return
        shard = self.shards[fault.number % len(self.shards)]
        names = [each.name for each in self.machines]
        target = tuple(names[(fault.number + at) % len(names)] for at in range(3))
        if shard in machine.view.shards:
            made = move(machine.view, shard, target)
            if not isinstance(made, Refusal) and machine.client is not None:
                self.note("operator moves", target)
                machine.client.transact(made.compares, made.writes, lambda answer: None)

    def _trim(self, machine: Machine, shard: ShardId) -> None:
        """Retention: a leader lets go of half of what is committed."""
        core = machine.cores[shard]
        if (
            not core.leader.may_append()
            or self.transactions is not None
            or (self.audit is not None and shard == self.audit.shard)
        ):
            return
        for number, log in core.replica.logs.items():
            model = machine.disk.log(shard, number)
            below = model.below(log.commit)
            if len(below) > 3:
                point = below[len(below) // 2].end
                model.trim(point)
                self.counts["trims"] += 1
                self.step(machine, shard, Trimmed(number, point))


def _told(record: ShardRecord) -> str:
    sets = f"isr {record.isr} elr {record.elr}" + (f" target {record.target}" if record.target else "")
    yielded = f" yielded {record.yielded.why}" if record.yielded else ""
    return f"[{record.epoch} {record.leader} {sets} min {record.min}{yielded}]"


@dataclass
class Result:
    """What a run came to."""

    seed: int
    counts: Counter[str]
    steps: int
    simulated_ms: int
    events: list[str]


def told(world: ClusterWorld) -> list[str]:
    return [f"{at:6} {' '.join(map(str, parts))}" for at, parts in world.noted]


def simulate_cluster(seed: int, scene: Scene | None = None) -> Result:
    """One run. Raises BrokenError, with what happened last and how to play it again."""
    world = ClusterWorld(seed, scene)
    try:
        world.play()
    except (BrokenError, AssertionError) as error:
        broken = error if isinstance(error, BrokenError) else BrokenError(f"assertion: {error!r}")
        broken.seed = seed
        broken.add_note("the last events:\n" + "\n".join(told(world)))
        broken.add_note(f"again: make simulate WORLD=cluster FIRST={seed} SEEDS=1")
        if broken is error:
            raise
        raise broken from error
    return Result(seed, world.counts, world.steps, world.now, told(world))


def simulate_cluster_or_explain(seed: int) -> Result:
    """The same; of a seed that fails the fewest faults with which it still does are looked for, and told."""
    try:
        return simulate_cluster(seed)
    except BrokenError as error:
        broken = error
    scene = draw(seed)

    def fails(faults: tuple[Fault, ...]) -> bool:
        try:
            simulate_cluster(seed, replace(scene, faults=faults))
        except BrokenError:
            return True
        return False

    least = shrink(scene.faults, fails, SHRINK_TRIES_MAX)
    broken.add_note("the least that breaks a promise:\n" + "\n".join(map(str, least)))
    raise broken
