"""One broker and one client on simulated time, disk and network, and what chance does to them.

The broker is the real one: sessions, streams, logs, recovery. Its parts that need a folder of certificates (governance, audit) are
left out. Every loss of power drops what was not synced; every invariant is looked at when the faults have ended and the broker
has started once more from what the disk kept.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path as FilePath
from random import Random
from typing import Any

import felix
from felix.address import Address
from felix.batch import Batch, decode_batch, decode_records
from felix.errors import FelixError
from felix.frames import FRAME_HEADER_BYTES
from felix.identity import Identity, TrustBundle
from felix.names import SpiffeId, StreamName
from felix.profile import Profile
from felix.runtime.port import Runtime
from felix.runtime.simulated import SimulatedClock, SimulatedLoop, simulated
from felix.transport.memory import MemoryEngine, MemoryNetwork, Path
from felix.transport.port import ServerTls, TransportLimits
from keys.authority import RegionAuthority, create_authority
from region.broker import Broker
from region.budget import Budgets
from region.config import RegionConfig
from region.log.directory import LogDirectory
from region.metadata.catalog import Catalog
from region.metadata.memory import MemoryStore
from region.metadata.records import StreamConfig
from region.session import ClientSession, Services
from region.storage.memory import MemoryDisk, MemoryFiles
from region.streams import StreamTable

START_MS = 1_800_000_000_000
STREAM = StreamName("acme", "payments", "orders")
HOST, PORT, SERVER_NAME = "broker", 7443, "b1.us-east.acme"
FOLDER = FilePath("/streams")
RECORDS = 40
FAULTS_MAX = 5
FAULTS = ("power", "power", "kill", "part", "path", "full", "sync", "clock")
RUN_S_MAX = 600.0
"""Of simulated time: five times what a publisher tries for."""
EVENTS_SHOWN = 60


@cache
def authority() -> RegionAuthority:
    return create_authority("us-east", "acme", START_MS)


@cache
def identity(kind: str, name: str) -> Identity:
    names = [SERVER_NAME] if kind == "broker" else []
    return authority().issue_identity(SpiffeId("us-east", "acme", kind, name), START_MS, dns_names=names)


class Plain:
    """A stream that is kept unsealed: the seal has tests of its own."""

    def seal(self, batch: Batch) -> Batch:
        return batch

    open_batch = seal

    def commitment(self) -> bytes:
        return b""


@dataclass
class Outcome:
    """What a run came to."""

    seed: int
    acknowledged: int
    starts: int
    events: list[str]

    @property
    def digest(self) -> str:
        """Of all that happened, in order: the same of every run of one seed."""
        return hashlib.sha256("\n".join(self.events).encode()).hexdigest()


class InvariantError(AssertionError):
    """What the product promises did not hold."""


@dataclass
class World:
    """One run."""

    seed: int
    loop: SimulatedLoop
    clock: SimulatedClock
    runtime: Runtime
    disk: MemoryDisk = field(default_factory=MemoryDisk)
    starts: int = 0
    events: list[str] = field(default_factory=list)
    acknowledged: dict[bytes, int] = field(default_factory=dict)
    refused: list[bytes] = field(default_factory=list)
    delivered: list[bytes] = field(default_factory=list)
    streams: StreamTable | None = None
    syncs_fail: bool = False

    def __post_init__(self) -> None:
        self.random = self.loop.random
        self.network = MemoryNetwork(self.random)
        self.store = MemoryStore(runtime=self.runtime)
        self.disk.on_call = self._on_call

    def note(self, event: str) -> None:
        self.events.append(f"{self.loop.time():.6f} {event}")

    def _on_call(self, call: str, path: FilePath) -> None:
        if call == "sync" and self.syncs_fail:
            self.note(f"disk sync {path.name} fails")
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        if call not in ("exists", "size", "free_bytes", "is_folder"):
            self.note(f"disk {call} {path.name}")

    # -- the broker ------------------------------------------------------------------------------------

    @property
    def process(self) -> str:
        return f"broker {self.starts}"

    def mount(self) -> MemoryFiles:
        return self.disk.mount()

    async def start(self) -> None:
        """Start the broker from what its disk has."""
        self.starts += 1
        self.note("start")
        with self.loop.process(self.process):
            await asyncio.create_task(self._serve())
        self.note("started")

    async def _serve(self) -> None:
        budgets = Budgets()
        directory = LogDirectory(FOLDER, "us-east", files=self.mount(), runtime=self.runtime)
        self.streams = streams = StreamTable(
            directory, budgets.ring, lambda *_: Plain(), lambda _: None, runtime=self.runtime
        )
        catalog = Catalog(self.store, "us-east")
        config = RegionConfig(
            region="us-east",
            mesh="acme",
            country="US",
            listen=Address(HOST, PORT),
            broker="b1",
            operators=["operator"],
        )
        broker = Broker(
            config,
            streams=streams,
            catalog=catalog,
            budgets=budgets,
            transport_limits=TransportLimits(),
            runtime=self.runtime,
        )
        broker.trust = TrustBundle([authority().anchor()])
        for record in await catalog.list_streams():
            await streams.open(record)
        if streams.get(STREAM) is None:
            await broker.create_stream(STREAM, StreamConfig(shards=1))
        nothing: Any = None
        services = Services(broker, nothing, nothing, nothing, nothing, {})
        server = identity("broker", "b1")
        await MemoryEngine(self.network, HOST).listen(
            HOST, PORT, ServerTls(server.chain_pem, server.key_pem()), lambda: ClientSession(services)
        )

    def crash(self, *, power: bool) -> None:
        """The broker's process ends at this moment, perhaps with its machine."""
        self.note(f"crash{' of power' if power else ''}")
        self.loop.end(self.process)
        self.network.crash(HOST)
        if power:
            self.disk.lose_power(self.random)
        else:
            self.disk.kill()

    # -- the client ------------------------------------------------------------------------------------

    async def publish(self) -> None:
        """Publish records one after the other, some at once, each until it is acknowledged or given up."""
        profile = Profile(
            region="us-east",
            mesh="acme",
            addresses=(f"{HOST}:{PORT}",),
            authority=authority().anchor().root_pem,
            identity=identity("operator", "operator"),
            server_name=SERVER_NAME,
        )
        async with felix.connect(
            profile=profile,
            engine=MemoryEngine(self.network, "client"),
            connect_timeout_s=RUN_S_MAX,
            request_timeout_s=RUN_S_MAX,
            runtime=self.runtime,
        ) as client:
            orders = client.stream(str(STREAM))
            consuming = asyncio.create_task(self._consume(orders))
            number = 0
            while number < RECORDS:
                burst = [b"%d" % each for each in range(number, number + self.random.randint(1, 5))]
                number += len(burst)
                await asyncio.gather(*(self._publish(orders, payload) for payload in burst))
                await asyncio.sleep(self.random.choice((0, 0.001, 0.3)))
            await consuming

    async def _consume(self, stream: felix.Stream) -> None:
        """Read until all that may still be acknowledged has come."""
        async with stream.subscribe("earliest") as subscription:
            async for record in subscription:
                self.note(f"delivered {bytes(record.payload).decode()} at {record.offset}")
                if record.offset != len(self.delivered):
                    raise InvariantError(
                        f"offset {record.offset} was delivered after {len(self.delivered)} records"
                    )
                self.delivered.append(bytes(record.payload))
                if int(record.payload) >= RECORDS - 1:
                    return

    async def _publish(self, stream: felix.Stream, payload: bytes) -> None:
        try:
            offset = await stream.publish(payload)
        except FelixError as error:
            self.note(f"given up {payload.decode()}: {error.code.name}")
            self.refused.append(payload)
            return
        self.note(f"acknowledged {payload.decode()} at {offset}")
        self.acknowledged[payload] = offset

    # -- the run ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        self.network.path = self.random.choice((Path(), Path(0.0005, 0.002), Path(0.01, 0.05, 0.1)))
        await self.start()
        with self.loop.process("client"):
            publishing = asyncio.create_task(self.publish())
        for _ in range(self.random.randint(1, FAULTS_MAX)):
            # Most often while records are on their way.
            await asyncio.sleep(self.random.choice((0.002, 0.02, 0.5)) * self.random.random())
            await self._fault()
        try:
            async with asyncio.timeout(RUN_S_MAX):
                await publishing
        except TimeoutError:
            raise InvariantError("the broker serves no more although the faults have ended") from None
        except FelixError as error:
            raise InvariantError(f"the client cannot go on: {error}") from error
        self.crash(power=True)
        await self.start()
        await self.check()

    async def _fault(self) -> None:
        match self.random.choice(FAULTS):
            case "part":
                self.note("part")
                self.network.part("client", HOST)
                await asyncio.sleep(self.random.choice((0.01, 1.0, 40.0)))
                self.note("heal")
                self.network.heal()
            case "path":
                self.note("another path")
                self.network.path = self.random.choice((Path(), Path(0.001, 0.005, 0.2)))
            case "full":
                self.note("the disk is full")
                room_bytes, self.disk.room_bytes = self.disk.room_bytes, self.random.choice((0, 300))
                await asyncio.sleep(self.random.choice((0.01, 0.5)))
                self.note("the disk has room again")
                self.disk.room_bytes += room_bytes
            case "sync":
                self.note("syncs fail")
                self.syncs_fail = True
                await asyncio.sleep(0.5)
                self.syncs_fail = False
                # The shard has stopped, or nothing was synced meanwhile: an operator starts the broker again.
                self.crash(power=self.random.random() < 0.5)
                await self.start()
            case "clock":
                self.clock.start_ms += self.random.choice((-60_000, -1, 1_000, 86_400_000))
                self.note("the clock jumps")
            case how:
                self.crash(power=how == "power")
                await asyncio.sleep(self.random.random() * 0.2)
                await self.start()

    async def check(self) -> None:
        """Served again, nothing acknowledged or delivered lost or moved, nothing twice, nothing that nobody sent, in order."""
        try:
            found = await self.stored()
        except FelixError as error:
            raise InvariantError(f"the shard does not serve: {error}") from error
        numbers = [int(payload) for payload in found]
        if len(set(found)) != len(found):
            raise InvariantError(
                f"twice: {sorted(number for number in numbers if numbers.count(number) > 1)}"
            )
        if not set(numbers) <= set(range(RECORDS + 5)):
            raise InvariantError("records that nobody published")
        for payload, offset in self.acknowledged.items():
            if offset >= len(found) or found[offset] != payload:
                raise InvariantError(
                    f"record {payload.decode()} was acknowledged at {offset} and is not there"
                )
        if found[: len(self.delivered)] != self.delivered:
            raise InvariantError("what was delivered is not what is there")
        if not self.refused and numbers != sorted(numbers):
            raise InvariantError(f"out of order: {numbers}")

    async def stored(self) -> list[bytes]:
        assert self.streams is not None
        hosted = self.streams.get(STREAM)
        assert hosted is not None
        shard, found, offset = hosted.shard(0), list[bytes](), 0
        while offset < shard.high_watermark:
            for entry in await shard.read(offset, 1 << 20):
                records = decode_records(decode_batch(entry.data[FRAME_HEADER_BYTES:]))
                found += [bytes(record.payload) for record in records]
                offset = entry.next_offset
        return found


def simulate(seed: int, world: type[World] = World) -> Outcome:
    """One run. Raises what went wrong, with the seed and the last events."""
    loop = SimulatedLoop(Random(seed))
    logging.getLogger("felix").setLevel(logging.CRITICAL)
    runtime = simulated(loop, START_MS)
    assert isinstance(runtime.clock, SimulatedClock)
    made = world(seed, loop, runtime.clock, runtime)
    try:
        loop.run_until_complete(made.run())
        return Outcome(seed, len(made.acknowledged), made.starts, made.events)
    except BaseException as error:
        error.add_note(f"seed {seed}; the last events:\n" + "\n".join(made.events[-EVENTS_SHOWN:]))
        raise
    finally:
        with suppress(Exception):
            loop.close()
