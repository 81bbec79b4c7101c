"""A region of several brokers with real logs, links, registries and controllers, in one process: on simulated time, disks and network,
where everything fails as a test wants it, or on real files and real QUIC. Clients append through the logs that are led, as numbered producers
do, and what they were told is held against what the logs have.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

from cluster.simulated_brokers import Store
from msgspec.structs import replace

from felix.batch import Batch, NewRecord, body_checksum, decode_records, encode_batch
from felix.errors import FelixError, UnavailableError
from felix.identity import Identity
from felix.names import SpiffeId
from felix.peer import TrustBundle
from felix.runtime.port import Runtime
from felix.runtime.real import now_ms
from felix.runtime.simulated import WORK_S_MAX, SimulatedLoop, Standstill, simulated
from felix.storage.memory import MemoryDisk
from felix.storage.port import Files
from felix.tasks import end_tasks
from felix.transport.memory import MemoryEngine, MemoryNetwork
from felix.transport.port import Engine, Listener, ServerTls
from keys.authority import RegionAuthority, create_authority
from region.cluster.controller import StreamWish
from region.cluster.controller_service import ControllerService
from region.cluster.mirror import ClusterMirror
from region.cluster.node_file import NodeFile
from region.cluster.records import Health, ShardId, ShardRecord
from region.cluster.registration import Start
from region.cluster.registry import Address, Registry
from region.copies.copied_frames import CopiedFrames
from region.copies.peer_requests import PeerRequests
from region.log.frame import Frame as LogFrame
from region.log.point import LogPoint
from region.log.scrub import Scrub
from region.log.segment import ShardIdentity
from region.log.segment_limits import SegmentLimits
from region.log.shard import ShardHooks, ShardLog, ShardSettings
from region.metadata.port import MetadataStore
from region.replication.disk import LogPlan, ReplicaDisk
from region.replication.history import BEGINNING, EpochStart
from region.replication.host import ReplicaHost
from region.replication.hosted import ShardPlan, not_leader
from region.replication.links import LINK_LIMITS, PEER_ALPN, LocalBroker, PeerLinks
from region.replication.messages import Frame

REGION, MESH = "us-east", "acme"
STREAM = "ab" * 16
NAMES = ("a", "b", "c")
LOGS = (0, 1)
"""A record log and a journal."""
LEASE_MS = 2_000
PORT = 7443
SEGMENTS = SegmentLimits(segment_bytes_max=6_000)
START_MS = now_ms()
"""Certificates hold on simulated and on real time alike."""
PATIENCE_S = 2.0
"""A client that has no answer for so long asks again."""


@cache
def authority() -> RegionAuthority:
    return create_authority(REGION, MESH, START_MS)


@cache
def identity(broker: str, kind: str = "broker") -> Identity:
    names = (f"{broker}.{REGION}.{MESH}",) if kind == "broker" else ()
    return authority().issue_identity(SpiffeId(REGION, MESH, kind, broker), START_MS, dns_names=names)


def bundle() -> TrustBundle:
    return TrustBundle([authority().anchor()])


def sealed(batch: Batch) -> Batch:
    """A stand-in for a seal: other bytes, other checksum, and its own inverse."""
    body = bytes(byte ^ 0x5A for byte in batch.body)
    return Batch(replace(batch.header, body_checksum=body_checksum(body)), body)


@dataclass
class Machine:
    """What outlives a broker's process."""

    name: str
    folder: Path
    boots: int = 1
    lives: int = 0
    disk: MemoryDisk | None = None
    standstill: Standstill = field(default_factory=Standstill)
    """of what blocks in its processes: its disk does not answer"""


class Broker:
    """One process: a registry, its part in being the controller, links, and the host of its replicas."""

    def __init__(
        self,
        machine: Machine,
        store: MetadataStore,
        engine: Engine,
        files: Files,
        runtime: Runtime,
        shards: int,
        address: tuple[str, int],
        pools: tuple[Executor, Executor] | None = None,
        *,
        answers_early: bool = False,
        scrub: Scrub | None = None,
    ) -> None:
        self.name = machine.name
        self._scrub = scrub
        self._answers_early = answers_early
        self._machine = machine
        self._runtime = runtime
        self._shards = shards
        self._address = address
        files.make_folder(machine.folder)
        self.mirror = ClusterMirror(store, REGION, runtime)
        told = f"{address[0]}:{address[1]}"
        self.registry = Registry(
            store,
            self.mirror,
            NodeFile(files, machine.folder, runtime.random),
            Start(
                broker=self.name,
                host=self.name,
                boot=f"boot-{machine.boots}",
                lock=f"{self.name}-{machine.boots}",
            ),
            Address(told, told),
            lease_ms=LEASE_MS,
            runtime=runtime,
        )
        self.controller = ControllerService(
            store, self.mirror, self.registry, lambda asked: None, lease_ms=LEASE_MS, runtime=runtime
        )
        commits, reads = pools or (runtime.pool(2, "commit"), runtime.pool(2, "read"))
        self._pools = (commits, reads)
        self._engine = engine
        self.links: PeerLinks
        self._listener: Listener
        self._files = files
        self.host: ReplicaHost
        self._controls: asyncio.Task[None] | None = None
        self.logs: dict[tuple[ShardId, int], ShardLog] = {}
        """that are led here"""
        self._led: dict[ShardId, int] = {}
        self._leading: dict[ShardId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.mirror.start()
        await self.registry.open()
        registration = self.registry.registration
        folder = self.mirror.view.nodes[self.name].folder
        self.requests = PeerRequests(self.name)
        frames = CopiedFrames(self.requests)

        def linked(peer: str, up: bool) -> None:
            self.host.linked(peer, up)
            self.requests.linked(peer, up)

        self.links = PeerLinks(
            self._engine,
            LocalBroker(self.name, REGION, MESH, registration, folder),
            lambda: identity(self.name),
            bundle,
            authority().anchor().root_pem,
            lambda peer, said: self.host.heard(peer, said),
            linked,
            is_member=self.mirror.view.is_registered,
            mirror_revision=lambda: self.mirror.view.revision,
            runtime=self._runtime,
            requested=self.requests.requested,
        )
        self.requests.links = self.links
        self.host = ReplicaHost(
            self.name,
            self.mirror,
            self.links,
            files=self._files,
            commit_pool=self._pools[0],
            read_pool=self._pools[1],
            runtime=self._runtime,
            sync_failed=self.registry.sync_failed,
            source=frames,
            scrub=self._scrub,
        )
        frames.serve(self.host)
        self.host.on_change(self._led_by_somebody)
        plans = [
            plan_of(ShardId(STREAM, number), self._machine.folder, answers_early=self._answers_early)
            for number in range(self._shards)
        ]
        await self.host.open(
            plans, registration=registration, folder=folder, registered_at=self.mirror.view.revision
        )
        self.registry.on_lease(self.host.leased)
        own = identity(self.name)
        self._listener = await self._engine.listen(
            *self._address,
            ServerTls(own.chain_pem, own.key_pem()),
            self.links.accept,
            LINK_LIMITS,
            PEER_ALPN,
        )
        await self.registry.announce(Health(open=True))
        self.host.start()
        self._controls = asyncio.get_running_loop().create_task(self.controller.run())

    def _led_by_somebody(self, shard: ShardId) -> None:
        task = asyncio.get_running_loop().create_task(self._lead(shard))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _lead(self, shard: ShardId) -> None:
        """Open the logs of a shard that serves here, and close those of one that does no more."""
        async with self._leading[shard]:
            if self._led.get(shard, 0) == self.host.epoch(shard):
                return
            for number in LOGS:
                if (led := self.logs.pop((shard, number), None)) is not None:
                    await led.close()
            epoch = self._led[shard] = self.host.epoch(shard)
            for number in LOGS if epoch else ():
                try:
                    copies = self.host.lead(shard, number)
                except UnavailableError:
                    return
                identity = ShardIdentity(
                    REGION, "acme/test/orders", bytes.fromhex(shard.incarnation), shard.number
                )
                hooks = ShardHooks(seal=sealed, open_batch=sealed, runtime=self._runtime)
                self.logs[shard, number] = await ShardLog.lead(
                    identity,
                    ShardSettings(segments=SEGMENTS),
                    hooks,
                    copies,
                    read_pool=self._pools[1],
                    files=self._files,
                )

    def log(self, shard: ShardId, number: int) -> ShardLog:
        """A log that is led here. Raises UnavailableError."""
        found = self.logs.get((shard, number))
        if found is None or not self.host.serves(shard):
            raise not_leader(shard)
        return found

    async def append(
        self, shard: ShardId, number: int, batch: Batch, *, annotation: bytes = b"", slot: int = 0
    ) -> LogPoint:
        """The point behind a batch, once it is committed."""
        appended = await self.log(shard, number).append(batch, annotation=annotation, slot=slot)
        return LogPoint(appended.base_offset + batch.header.records)

    async def close(self, *, in_order: bool = True) -> None:
        for task in list(self._tasks):
            await task
        if in_order:
            for led in self.logs.values():
                await led.close()
        if self._controls is not None:
            await end_tasks(self._controls)
        await self.controller.close()
        await self.requests.close()
        await self.links.close()
        await self._listener.close()
        await (self.host.close() if in_order else self.host.abandon())
        await self.registry.close(in_order=in_order)
        await self.mirror.close()
        for pool in self._pools:
            pool.shutdown(wait=False)


def plan_of(shard: ShardId, folder: Path, *, answers_early: bool = False) -> ShardPlan:
    made = ShardIdentity(REGION, "acme/test/orders", bytes.fromhex(shard.incarnation), shard.number)
    logs = tuple(LogPlan(number, folder / f"s{shard.number}-{number}", made, SEGMENTS) for number in LOGS)
    return ShardPlan(shard, logs, answers_early=answers_early)


@dataclass
class Client:
    """Appends its numbers, each until it is acknowledged, to whoever leads."""

    name: str
    shard: ShardId
    number: int = 0
    producer: int = 1
    annotates: bool = True
    sent: dict[int, int] = field(default_factory=lambda: dict.fromkeys(LOGS, 0))
    """per log, how many were acknowledged: the next one's sequence"""
    acknowledged: list[tuple[int, int, LogPoint]] = field(default_factory=list)
    """(log, number, point)"""
    refused: int = 0
    unknown: int = 0

    def payload(self, number: int) -> bytes:
        return f"{self.name}:{number}".encode() + b"." * (number % 7 * 40)

    def annotation(self, number: int) -> bytes:
        """What stands in its slot from this append on."""
        return f"{self.name} is at {number}".encode() if self.annotates else b""


class Region:
    """The store, the machines, and the processes that run."""

    def __init__(self, store: MetadataStore, random: Random, shards: int = 1) -> None:
        self.store = store
        self.random = random
        self.shards = [ShardId(STREAM, number) for number in range(shards)]
        self.machines = {name: Machine(name, Path("/data")) for name in NAMES}
        self.running: dict[str, Broker] = {}
        self.clients: list[Client] = []
        self.annotated: dict[tuple[ShardId, int], dict[int, bytes]] = {}
        """what a test has had committed by itself, by slot"""
        self._clients_end = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # -- what tests look at ----------------------------------------------------------------------------

    async def until(self, holds: Callable[[], object], seconds: float = 120) -> None:
        """Raises what a client got that it must not get, as soon as there is such a thing."""
        async with asyncio.timeout(seconds):
            while not holds():
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.05)

    def record(self, shard: ShardId) -> ShardRecord | None:
        """As the broker that has read most of the store knows it."""
        views = [broker.mirror.view for broker in self.running.values()]
        newest = max(views, key=lambda view: view.revision)
        return newest.shards.get(shard)

    def leader(self, shard: ShardId) -> Broker | None:
        """Who takes appends, of the newest epoch."""
        serving = [
            broker
            for broker in self.running.values()
            if hasattr(broker, "host") and broker.host.serves(shard)
        ]
        return max(serving, key=lambda broker: broker.host._hosted[shard].core.leader.epoch, default=None)

    def is_well(self) -> bool:
        """Every shard is served, every copy is in sync and has all."""
        for shard in self.shards:
            record, leader = self.record(shard), self.leader(shard)
            if record is None or leader is None or set(record.isr) != set(NAMES) or record.elr:
                return False
            own = leader.host.replica(shard)
            assert own is not None
            for broker in self.running.values():
                copy = broker.host.replica(shard)
                if copy is None or any(
                    copy.logs[number].durable != log.end or log.commit != log.end
                    for number, log in own.logs.items()
                ):
                    return False
        return len(self.running) == len(NAMES)

    async def well(self) -> None:
        await self.until(self.is_well)

    # -- clients ---------------------------------------------------------------------------------------

    def append_all_the_time(self, clients: int = 2, *, annotated: bool = True) -> None:
        """`annotated`: each append brings an annotation to its client's slot."""
        for number in range(clients):
            client = Client(
                f"c{number}", self.shards[number % len(self.shards)], producer=number + 1, annotates=annotated
            )
            self.clients.append(client)
            self._tasks.append(asyncio.get_running_loop().create_task(self._drive(client)))

    async def _drive(self, client: Client) -> None:
        while not self._clients_end.is_set():
            leader = self.leader(client.shard)
            if leader is None:
                await asyncio.sleep(0.05)
                continue
            number = LOGS[client.number % 3 == 2]
            made = encode_batch(
                [NewRecord(client.payload(client.number))],
                producer_id=client.producer,
                base_sequence=client.sent[number],
            )
            try:
                async with asyncio.timeout(PATIENCE_S):
                    point = await leader.append(
                        client.shard,
                        number,
                        made,
                        annotation=client.annotation(client.number),
                        slot=client.producer,
                    )
            except (UnavailableError, TimeoutError) as error:
                unknown = isinstance(error, TimeoutError) or "not written" not in error.sentence
                client.unknown += unknown
                client.refused += not unknown
                await asyncio.sleep(0.05)
                continue
            client.sent[number] += 1
            client.acknowledged.append((number, client.number, point))
            client.number += 1
            await asyncio.sleep(self.random.choice((0.0, 0.03, 0.1)))

    async def no_more_appends(self) -> None:
        self._clients_end.set()
        for task in self._tasks:
            await task

    async def end_clients(self) -> None:
        """However far they are: a scene that failed leaves no task with an exception behind, which the collector would log in
        the middle of any later test."""
        await end_tasks(*self._tasks)

    def acknowledged(self) -> int:
        return sum(len(client.acknowledged) for client in self.clients)

    # -- the end ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Nothing that was acknowledged is missing, all copies are equal frame by frame, and know the annotations that these come to."""
        for shard in self.shards:
            logs: dict[int, list[Frame]] = {}
            begins: dict[int, LogPoint] = {}
            for number in LOGS:
                disks = {
                    name: broker.host._hosted[shard].workers[number].disk
                    for name, broker in self.running.items()
                }
                # Copies let go of whole segments, which differ.
                begin = begins[number] = max(disk.log.start_point for disk in disks.values())
                copies = {
                    name: [frame for frame in frames_of(disk) if frame.end > begin]
                    for name, disk in disks.items()
                }
                logs[number] = copies["a"]
                self._check_annotations(shard, number, disks, frames_of(disks["a"]))
                assert all(copy == copies["a"] for copy in copies.values()), f"copies of log {number} differ"
                histories = {name: epochs_of(disk, begin) for name, disk in disks.items()}
                assert all(each == histories["a"] for each in histories.values()), histories
            for client in self.clients:
                if client.shard == shard:
                    check_client(client, logs, begins)

    def _check_annotations(
        self, shard: ShardId, number: int, disks: dict[str, ReplicaDisk], frames: list[Frame]
    ) -> None:
        """Each copy, and who leads, has of each slot what was written there last, also where that was let go of."""
        wanted = dict(self.annotated.get((shard, number), {}))
        for client in self.clients:
            told = [sent for log, sent, _ in client.acknowledged if log == number]
            if client.shard == shard and client.annotates and told:
                wanted[client.producer] = client.annotation(told[-1])
        for frame in frames:
            body = frame.body
            assert isinstance(body, LogFrame)
            if body.annotation:
                wanted[body.slot] = body.annotation
        for name, disk in disks.items():
            assert disk.log.annotations == wanted, f"annotations of log {number} at {name}"
        for name, broker in self.running.items():
            led = broker.logs.get((shard, number))
            if led is not None and broker.host.serves(shard):
                assert led.annotations == wanted, f"annotations of log {number}, which {name} leads"


def epochs_of(disk: ReplicaDisk, begin: LogPoint) -> list[EpochStart]:
    """What a copy knows of its epochs of which something stands in every copy."""
    return [start for start in disk.history.starts if begin <= start.start < disk.log.end_point]


def check_client(client: Client, logs: dict[int, list[Frame]], begins: dict[int, LogPoint]) -> None:
    """Each acknowledged number stands once, at the point that was told, and they follow each other in the order in which they were sent."""
    places: dict[int, dict[bytes, list[LogPoint]]] = {}
    for number, frames in logs.items():
        places[number] = defaultdict(list)
        for frame in frames:
            body = frame.body
            assert isinstance(body, LogFrame) and body.batch is not None
            plain = sealed(body.batch)
            places[number][payload_of(plain)].append(frame.end)
    last = dict.fromkeys(logs, BEGINNING)
    for number, sent, point in client.acknowledged:
        if point <= begins[number]:
            # Let go of since.
            continue
        found = places[number].get(client.payload(sent), [])
        assert found == [point], (
            f"{client.name}:{sent} was acknowledged at {point} of log {number}, and stands at {found}"
        )
        assert point > last[number], f"{client.name}:{sent} stands before what was sent earlier"
        last[number] = point


def payload_of(batch: Batch) -> bytes:
    (record,) = decode_records(batch)
    return bytes(record.payload)


def frames_of(disk: ReplicaDisk) -> list[Frame]:
    """All frames of a log, with bodies as bytes."""
    found: list[Frame] = []
    at, end = disk.log.start_point, disk.log.end_point
    while at < end:
        for frame in disk.read(at, 1 << 20, end):
            body = frame.body
            assert isinstance(body, LogFrame)
            whole = body.batch and Batch(body.batch.header, bytes(body.batch.body))
            found.append(frame._replace(body=replace(body, batch=whole)))
            at = frame.end
    return found


class SimulatedRegion(Region):
    """On simulated time, disks and network. A process is killed with no word to anybody."""

    def __init__(
        self,
        loop: SimulatedLoop,
        store: MetadataStore,
        shards: int = 1,
        *,
        answers_early: bool = False,
        scrub: Scrub | None = None,
    ) -> None:
        """`answers_early`: its shards are of a stream with `acks: leader`. `scrub`: how brokers look at closed segments; None: they do not."""
        super().__init__(store, loop.random, shards)
        self.scrub = scrub
        self.answers_early = answers_early
        self.loop = loop
        self.network = MemoryNetwork(loop.random)
        self.faults: list[tuple[float, str, str, str]] = []
        """what went wrong so far: when, what, where"""
        for machine in self.machines.values():
            machine.disk = MemoryDisk()

    async def start(self, *names: str) -> None:
        """Start these brokers, again while the store does not let them."""
        for name in names or NAMES:
            while name not in self.running:
                try:
                    await self._start(name)
                except FelixError:
                    self._end(name)
                    await asyncio.sleep(0.5)
        wish = StreamWish(
            STREAM,
            "acme/test/orders",
            shards=len(self.shards),
            replicas=3,
            min=1 if self.answers_early else 2,
        )
        for broker in self.running.values():
            broker.controller.want([wish], {})

    async def _start(self, name: str) -> None:
        machine = self.machines[name]
        machine.lives += 1
        assert machine.disk is not None
        with self.loop.process(f"{name}{machine.lives}"):
            broker = Broker(
                machine, self.store, MemoryEngine(self.network, name), machine.disk.mount(),
                simulated(self.loop, START_MS, machine.standstill),
                len(self.shards), (name, PORT), answers_early=self.answers_early, scrub=self.scrub,
            )  # fmt: skip
            task = asyncio.get_running_loop().create_task(broker.start())
        await task
        machine.disk.mounted.sync_folder(Path("/"))
        self.running[name] = broker

    def _end(self, name: str) -> None:
        machine = self.machines[name]
        assert machine.disk is not None
        self.loop.end(f"{name}{machine.lives}")
        self.network.crash(name)
        machine.disk.kill()

    def kill(self, name: str, *, power: bool = False) -> None:
        """The process ends with no word to anybody, perhaps with its machine."""
        machine = self.machines[name]
        assert machine.disk is not None
        self._end(name)
        if power:
            machine.boots += 1
            machine.disk.lose_power(self.random)
        del self.running[name]


def play(
    scene: Callable[[SimulatedRegion], Awaitable[None]],
    seed: int,
    shards: int = 1,
    *,
    answers_early: bool = False,
    scrub: Scrub | None = None,
) -> None:
    """A scene on simulated time, which begins when all brokers are up and every copy is in sync."""
    loop = SimulatedLoop(Random(seed))

    async def work() -> None:
        store = Store(loop)
        # The sweep of leases is nobody's who may be killed.
        await store.grant(60_000)
        region = SimulatedRegion(loop, store, shards, answers_early=answers_early, scrub=scrub)
        await region.start()
        await region.well()
        try:
            await scene(region)
        finally:
            await region.end_clients()
        for broker in list(region.running.values()):
            await broker.close()
        await store.close()

    try:
        loop.run_until_complete(work())
    finally:
        loop.close()


FAULTS = (
    "kill",
    "power",
    "all power",
    "part",
    "deaf",
    "slow",
    "store",
    "fail",
    "trim",
    "full",
    "yield",
    "hang",
)


async def go_wrong(region: SimulatedRegion, seconds: float) -> None:
    """Faults that chance chooses, for so long, several at a time; then none are left."""
    random, loop = region.random, region.loop
    until_s = loop.time() + seconds
    while loop.time() < until_s:
        name, other = random.sample(NAMES, 2)
        await _fault(region, random.choice(FAULTS), name, other)
        await asyncio.sleep(random.choice((0.05, 0.5, 2.0, 4.0)))
    region.network.heal()
    loop.work_s_max = WORK_S_MAX
    for name in NAMES:
        machine = region.machines[name]
        if name in region.running and is_to_be_restarted(region, name):
            # What watches over processes starts it again.
            region.kill(name)
        if name not in region.running:
            await region.start(name)
        assert machine.disk is not None
    assert isinstance(region.store, Store)
    region.store.is_away = False


def is_to_be_restarted(region: SimulatedRegion, name: str) -> bool:
    """Whether a copy there has failed, and is not to come back by itself: of half of those that would, chance waits for that."""
    host = region.running[name].host
    failed = [hosted for hosted in host._hosted.values() if hosted.core.replica.failed]
    # A chance of its own.
    waits = Random(f"{name} {region.loop.time()}").random() < 0.5
    return bool(failed) and not (waits and all(host.reopener.is_waiting(hosted.shard) for hosted in failed))


async def _fault(region: SimulatedRegion, what: str, name: str, other: str) -> None:
    random, running = region.random, region.running
    region.faults.append((region.loop.time(), what, name, other))
    match what:
        case "kill" | "power":
            if name in running:
                region.kill(name, power=what == "power")
                await asyncio.sleep(random.choice((0.1, 1.0, 3.0)))
                if name not in running:
                    await region.start(name)
        case "all power":
            for each in list(running):
                region.kill(each, power=True)
            for each in random.sample(NAMES, len(NAMES)):
                await region.start(each)
        case "part" | "deaf":
            region.network.part(name, other, both=what == "part")
            region.loop.call_later(random.choice((0.3, 2.0, 6.0)), region.network.heal)
        case "slow":
            region.loop.work_s_max = random.choice((0.05, 0.4))
            region.loop.call_later(2.0, setattr, region.loop, "work_s_max", WORK_S_MAX)
        case "store":
            assert isinstance(region.store, Store)
            region.store.is_away = True
            await asyncio.sleep(random.choice((0.2, 1.0, 3.0)))
            region.store.is_away = False
        case "fail" | "full":
            disk = region.machines[name].disk
            assert disk is not None
            if name in running:
                error = errno.EIO if what == "fail" else errno.ENOSPC
                calls = ("sync",) if what == "fail" else ("pwritev",)
                disk.on_call = failing(calls, error, random.randrange(1, 6))
                await asyncio.sleep(0.5)
                disk.on_call = None
                if name in running and what == "fail" and is_to_be_restarted(region, name):
                    # What watches over processes starts it again.
                    region.kill(name)
                    await region.start(name)
        case "trim":
            shard = random.choice(region.shards)
            leader = region.leader(shard)
            if leader is not None:
                replica = leader.host.replica(shard)
                assert replica is not None
                with suppress(FelixError):
                    await leader.log(shard, 0).trim(replica.logs[0].commit.offset // 2)
        case "hang":
            # Longer than a leader waits for its disk, or not.
            standstill = region.machines[name].standstill
            standstill.begin()
            region.loop.call_later(random.choice((0.5, 3.0, 15.0)), standstill.end)
        case "yield":
            if name in running:
                running[name].host.give_up("drain")


def failing(calls: tuple[str, ...], error: int, number: int) -> Callable[[str, Path], None]:
    """The next `number` of these calls on a log's segments fail."""
    left = number

    def on_call(call: str, path: Path) -> None:
        nonlocal left
        if left and call in calls and ".seg" in path.name:
            left -= 1
            raise OSError(error, os.strerror(error), str(path))

    return on_call
