"""The processes of a measurement over a border: two regions, the agent between them, a publisher, a subscriber.

All five are what a user would run: founded regions' nodes, a bridge's agent with its own identity, and the public
SDK at both ends. The parent (cli.benchmark.crossing) founds the regions, signs the documents, and tells each role what
to do, one message at a time; a role answers each. `Finish` ends a role in order, and is answered when its state is on
the disk: an audit log's last checkpoint is written then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final

import msgspec

import felix
from bridge.agent import Agent
from bridge.config import BridgeConfig
from cli.benchmark.accounting import Made
from cli.benchmark.departures import Arrivals, Departure, DepartureLedger, crossing_of, payloads_of
from cli.benchmark.figures import Latency, rate_per_second
from cli.benchmark.processes import next_message
from cli.benchmark.roles import AFTER_S, IN_FLIGHT, WARM_SHARE
from felix.batch import NewRecord
from felix.errors import RequestError
from felix.messages import PutDocument
from felix.profile import load_profile
from felix.publisher import Publisher
from felix.subscription import ReceivedBatch, Subscription
from felix.transport.port import engine_named
from region.bootstrap import write_profile
from region.config import RegionConfig, load_config
from region.folder import RegionFolder
from region.node import Node

STILL_S: Final = 30.0
"""If nothing arrives for this long, the missing records are lost. By then a restarted agent is past its first pauses."""
LOOK_S: Final = 0.05
"""How often is looked whether the destination has the stream."""


class Prepare(msgspec.Struct, frozen=True):
    """Put these documents, as kind and file; at the source, make the stream first and give the bridge its right."""

    documents: list[tuple[str, bytes]]
    stream: str
    shards: int
    rights: dict[str, list[str]]


class Burst(msgspec.Struct, frozen=True):
    """Publish as fast as IN_FLIGHT batches a shard allow."""

    records: int
    batch_records: int


class Lone(msgspec.Struct, frozen=True):
    """Publish single records at an even pace."""

    records: int
    records_per_second: float


class ReadBack(msgspec.Struct, frozen=True):
    """Read the stream here, in its own region, from these offsets to the end of what was published."""

    offsets: dict[int, int]


class Sent(msgspec.Struct, frozen=True):
    """What was published: records/s from the first one's making to the last acknowledgement; `counts` since the stream was
    made."""

    rate: float
    latency: Latency | None
    made: list[Made]
    counts: dict[int, int]


class Expect(msgspec.Struct, frozen=True):
    """These batches were published; wait until all of them that may cross have arrived."""

    made: list[Made]


class Arrived(msgspec.Struct, frozen=True):
    """What came of one phase. `span_s`: from the first record's making to the last one's arrival."""

    rate: float
    span_s: float
    records: int
    latency: Latency | None
    arrivals: Arrivals


class Begin(msgspec.Struct, frozen=True):
    """Start the agent."""


class End(msgspec.Struct, frozen=True):
    """Stop the agent in order; it may begin again."""


class Links(msgspec.Struct, frozen=True):
    """Ask the source what its links say."""


class Finish(msgspec.Struct, frozen=True):
    """The role's work is done."""


# brokers and agent


async def serve_region(pipe: Pipe, home: Path, region: str, engine: str) -> None:
    """Serve a founded region. Answers with its address."""
    folder = RegionFolder.of(region, home)
    config: RegionConfig = msgspec.structs.replace(load_config(folder.config), engine=engine)
    node = await Node.start(folder, config)
    try:
        write_profile(folder, config.region, config.mesh, node.address)
        pipe.send(str(node.address))
        await next_message(pipe)
    finally:
        await node.stop()
    pipe.send(None)


async def carry(pipe: Pipe, config: BridgeConfig, base: Path) -> None:
    """The bridge's agent: Begin, End, Finish."""
    agent: Agent | None = None
    pipe.send(None)
    try:
        while not isinstance(command := await next_message(pipe), Finish | None):
            if isinstance(command, Begin):
                agent = await Agent.start(config, base)
            elif agent is not None:
                await agent.stop()
                agent = None
            pipe.send(None)
    finally:
        if agent is not None:
            await agent.stop()
    pipe.send(None)


@asynccontextmanager
async def _client(home: Path, region: str, engine: str) -> AsyncIterator[felix.RegionClient]:
    profile = await asyncio.to_thread(load_profile, region, home=home)
    async with felix.connect(profile=profile, engine=engine_named(engine)) as client:
        yield client


async def _prepare(client: felix.RegionClient, wanted: Prepare) -> None:
    if wanted.shards:
        await client.create_stream(wanted.stream, shards=wanted.shards)
    for identity, rights in wanted.rights.items():
        await client.put_rights(identity, rights)
    for kind, document in wanted.documents:
        await client.request(PutDocument(kind, document))


# the source's end


async def depart(pipe: Pipe, home: Path, region: str, engine: str) -> None:
    """Publishes at the source, and reads there: Prepare, Burst, Lone, ReadBack, Links, Finish."""
    load: DepartureLoad | None = None
    async with _client(home, region, engine) as client:
        pipe.send(None)
        while not isinstance(command := await next_message(pipe), Finish | None):
            match command:
                case Prepare():
                    await _prepare(client, command)
                    load = DepartureLoad(client, command.stream, command.shards)
                    await load.open()
                    pipe.send(None)
                case Burst():
                    assert load is not None
                    pipe.send(await load.burst(command))
                case Lone():
                    assert load is not None
                    pipe.send(await load.lone(command))
                case ReadBack():
                    assert load is not None
                    pipe.send(await load.read_back(command.offsets))
                case Links():
                    found = await client.list_links()
                    pipe.send("; ".join(f"shard {each.shard}: {each.state}, {each.reason}" for each in found))
        if load is not None:
            await load.close()
    pipe.send(None)


class DepartureLoad:
    """Publishes departures into one stream, batch after batch round the shards."""

    def __init__(self, client: felix.RegionClient, stream: str, shards: int) -> None:
        self._client = client
        self._stream = stream
        self._publisher: Publisher = client.stream(stream).publisher()
        self._counts = dict.fromkeys(range(shards), 0)
        self._next_shard = 0
        self._made: list[Made] = []
        self._acked: list[tuple[int, int]] = []
        self._times_ns: list[int] = []

    async def open(self) -> None:
        """Open the publish stream."""
        await self._publisher.open()

    async def close(self) -> None:
        """Flush and end."""
        await self._publisher.close()

    def _begin(self) -> None:
        self._made, self._acked, self._times_ns = [], [], []

    def _sent(self) -> Sent:
        made = sorted(self._made, key=lambda each: (each.shard, each.first))
        span_ns = max(at for at, _ in self._acked) - min(each.made_ns for each in made)
        rate = sum(count for _, count in self._acked) / max(span_ns, 1) * 1e9
        return Sent(rate, Latency.of(self._times_ns), made, dict(self._counts))

    async def burst(self, wanted: Burst) -> Sent:
        """One phase; everything is acknowledged when it returns."""
        self._begin()
        left = wanted.records

        async def work() -> None:
            nonlocal left
            while left:
                records = min(left, wanted.batch_records)
                left -= records
                await self._publish(records)

        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT * len(self._counts)):
                group.create_task(work())
        return self._sent()

    async def lone(self, wanted: Lone) -> Sent:
        """Single records, whether or not earlier ones have arrived."""
        self._begin()
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(wanted.records):
                wait = begun + number / wanted.records_per_second - time.monotonic()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._publish(1))
        return self._sent()

    async def _publish(self, count: int) -> None:
        shard = self._next_shard
        self._next_shard = (shard + 1) % len(self._counts)
        first = self._counts[shard]
        self._counts[shard] = first + count
        made = Made(shard, first, count, time.monotonic_ns())
        receipt = await self._publisher.publish_batch(list(map(NewRecord, payloads_of(made))), shard)
        now_ns = time.monotonic_ns()
        if (receipt.base_offset, receipt.records) != (first, count):
            raise RequestError(
                f"Records {first} to {first + count - 1} were acknowledged at offset {receipt.base_offset}."
            )
        self._made.append(made)
        self._acked.append((now_ns, count))
        self._times_ns.append(now_ns - made.made_ns)

    async def read_back(self, offsets: Mapping[int, int]) -> float:
        """Records per second to a subscriber in the source's own region."""
        left = sum(self._counts.values()) - sum(offsets.values())
        arrived: list[tuple[int, int]] = []
        subscription = self._client.stream(self._stream).subscribe("earliest", offsets=dict(offsets))
        try:
            async with asyncio.timeout(STILL_S):
                async for batch in subscription.batches():
                    found = len(batch.payloads())
                    arrived.append((time.monotonic_ns(), found))
                    left -= found
                    if left <= 0:
                        break
        finally:
            await subscription.close()
        return rate_per_second(arrived, WARM_SHARE)


# the destination's end


async def arrive(pipe: Pipe, home: Path, region: str, engine: str) -> None:
    """Subscribes at the destination: Prepare, Expect, Finish."""
    async with _client(home, region, engine) as client:
        load: ArrivalLoad | None = None
        pipe.send(None)
        while not isinstance(command := await next_message(pipe), Finish | None):
            match command:
                case Prepare():
                    await _prepare(client, command)
                    load = ArrivalLoad(client, command.stream)
                    pipe.send(None)
                case Expect():
                    assert load is not None
                    pipe.send(await load.expect(command.made))
        if load is not None:
            await load.close()
    pipe.send(None)


class ArrivalLoad:
    """Reads the stream at the destination from its beginning, and keeps the books of it."""

    def __init__(self, client: felix.RegionClient, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._ledger = DepartureLedger()
        self._decode = msgspec.json.Decoder(Departure).decode
        self._kept: list[ReceivedBatch] = []
        self._arrived: list[tuple[int, int]] = []
        self._received: dict[int, int] = {}
        self._wanted: dict[int, int] = {}
        self._news = asyncio.Event()
        self._subscription: Subscription | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def close(self) -> None:
        """End the subscription."""
        self._reading.cancel()
        await asyncio.wait([self._reading])
        if self._subscription is not None:
            await self._subscription.close()

    async def _read(self) -> None:
        # The first envelope makes the stream here.
        while True:
            if [each async for each in self._client.list_streams()]:
                break
            await asyncio.sleep(LOOK_S)
        self._subscription = self._client.stream(self._stream).subscribe("earliest")
        async for batch in self._subscription.batches():
            self._arrived.append((time.monotonic_ns(), len(batch.payloads())))
            self._received[batch.shard] = self._received.get(batch.shard, 0) + len(batch)
            self._kept.append(batch)
            self._news.set()

    async def expect(self, made: list[Made]) -> Arrived:
        """Wait for everything that may cross, then for what must not come, and keep the books."""
        for shard, count in crossing_of(made).items():
            self._wanted[shard] = self._wanted.get(shard, 0) + count
        while any(self._received.get(shard, 0) < count for shard, count in self._wanted.items()):
            self._news.clear()
            try:
                async with asyncio.timeout(STILL_S):
                    await self._news.wait()
            except TimeoutError:
                if self._reading.done():
                    self._reading.result()
                break
        await asyncio.sleep(AFTER_S)
        arrived, self._arrived = self._arrived, []
        kept, self._kept = self._kept, []
        self._ledger.publish(made)
        times_ns = []
        for (at_ns, records), batch in zip(arrived, kept, strict=True):
            self._ledger.receive(batch.shard, batch.records())
            if records:
                # A batch is made at once.
                times_ns.append(at_ns - self._decode(batch.payloads()[0]).made_ns)
        return Arrived(
            rate_per_second(arrived, WARM_SHARE),
            (arrived[-1][0] - min(each.made_ns for each in made)) / 1e9 if arrived else 0.0,
            sum(records for _, records in arrived),
            Latency.of(times_ns),
            self._ledger.close(),
        )
