"""The processes of a measurement through Felix: the broker, the publisher, the subscriber.

All three are what a user would run: the broker is a founded region's node, publisher and subscriber are the public
SDK. The parent (cli.benchmark.measurement) tells them what to do through their pipes, one message at a time; a role
answers each. The subscriber tells the publisher through a pipe of their own how much it has, so that what is on the
way stays bounded as in the raw relay: nothing is measured that only fills a buffer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final

import msgspec

import felix
from cli.benchmark.accounting import Account, Ledger, Made, checksum_of, fillers, made_at_ns, payloads_of
from cli.benchmark.figures import Latency, rate_per_second
from cli.benchmark.processes import HOST, next_message, until_parent_is_done
from cli.benchmark.raw_quic import WINDOW_BYTES
from felix.address import Address
from felix.batch import NewRecord
from felix.collector import keep_what_is_there, start_kept
from felix.profile import load_profile
from felix.publisher import Publisher
from felix.publisher_core import Receipt
from felix.runtime.real import now_ms
from felix.settings import Durability, Retention
from felix.subscription import CREDIT_BYTES_DEFAULT, ReceivedBatch, Subscription
from felix.transport.port import engine_named
from region.bootstrap import found_region, write_profile
from region.config import RegionConfig, load_config
from region.folder import RegionFolder
from region.node import Node

REGION: Final = "bench"
RING_BYTES: Final = 64 << 20
"""Of an ephemeral stream; several times what may be on the way."""
RING_BATCHES: Final = 4096
"""Batches on the way at most; well below what a ring holds (region.log.ring)."""
IN_FLIGHT: Final = 64
"""Batches that wait for their acknowledgement at once, per shard: twice what the publisher sends ahead."""
PROGRESS_BYTES: Final = 256 << 10
PROGRESS_BATCHES: Final = 256
"""The subscriber tells how much it has after each such step."""
STILL_S: Final = 5.0
"""Nothing came for this long: what is missing is lost."""
AFTER_S: Final = 0.05
"""How long the subscriber still listens for what must not come."""
WARM_SHARE: Final = 0.2
"""Of the records, left out of a rate: slow start, and the first turns of every loop."""
INTERVAL_MS: Final = 50
"""Of the `interval` durability."""


class Case(msgspec.Struct, frozen=True, order=True):
    """What is measured: engine, durability (fsync, interval, ephemeral), payload bytes, records per batch."""

    engine: str
    durability: str
    payload_bytes: int
    batch_records: int

    def __str__(self) -> str:
        return f"{self.engine} {self.durability} {self.payload_bytes} B × {self.batch_records}"


class Prepare(msgspec.Struct, frozen=True):
    """Make (publisher) or subscribe to (subscriber) the stream."""

    stream: str
    case: Case
    shards: int
    followed: bool
    """A subscriber reads along; else it reads back, after everything is published."""


class Load(msgspec.Struct, frozen=True):
    """Publish for `seconds` or up to `records_max`. `batches_per_second` 0: as fast as `in_flight` allows; `batch_records` 0: as
    the case has them."""

    seconds: float
    records_max: int
    in_flight: int = IN_FLIGHT
    batches_per_second: float = 0.0
    batch_records: int = 0


class Sent(msgspec.Struct, frozen=True):
    """What the publisher has done in a phase; counts and checksums since the stream was made, per shard."""

    rate: float
    latency: Latency | None
    counts: dict[int, int]
    checksums: dict[int, int]
    misplaced: int


class Collect(msgspec.Struct, frozen=True):
    """The publisher is done with a phase; everything up to these counts must come."""

    sent: Sent


class Got(msgspec.Struct, frozen=True):
    """What the subscriber has received in a phase; the account is since the stream was made."""

    rate: float
    latency: Latency | None
    account: Account


class Release(msgspec.Struct, frozen=True):
    """The case is over: delete the stream, or end the subscription."""


Command = Prepare | Load | Collect | Release


# the broker


def found_bench_region(home: Path) -> RegionFolder:
    """Found the region of a measurement in `home`."""
    folder = RegionFolder.of(REGION, home)
    found_region(
        folder,
        region=REGION,
        mesh="bench",
        country="XX",
        jurisdiction="XX",
        entity="benchmark",
        listen=Address(HOST, 0),
        health=None,
        now_ms=now_ms(),
    )
    return folder


@asynccontextmanager
async def serving(folder: RegionFolder, config: RegionConfig) -> AsyncIterator[None]:
    """The region's broker, and a profile that finds it, until the block ends."""
    node = await Node.start(folder, config)
    try:
        write_profile(folder, config.region, config.mesh, node.address)
        yield
    finally:
        await node.stop()


async def broker(pipe: Pipe, home: Path, engine: str) -> None:
    """Found a region in `home`, serve it until the parent is done. Answers once it serves."""
    async with AsyncExitStack() as stack:
        # As `felix region up` starts one.
        with start_kept():
            folder = found_bench_region(home)
            config = msgspec.structs.replace(load_config(folder.config), engine=engine)
            await stack.enter_async_context(serving(folder, config))
        pipe.send(None)
        await until_parent_is_done(pipe)


@asynccontextmanager
async def bench_client(home: Path, engine: str) -> AsyncIterator[felix.RegionClient]:
    profile = await asyncio.to_thread(load_profile, REGION, home=home)
    async with felix.connect(profile=profile, engine=engine_named(engine)) as client:
        yield client


# the publisher


async def publisher(pipe: Pipe, progress: Pipe, home: Path, engine: str) -> None:
    """Carry out Prepare, Load and Release."""
    async with bench_client(home, engine) as client:
        load: PublishLoad | None = None
        pipe.send(None)
        while (command := await next_message(pipe)) is not None:
            match command:
                case Prepare():
                    await _create(client, command)
                    load = PublishLoad(client, progress, command)
                    await load.open()
                    keep_what_is_there()
                    pipe.send(None)
                case Load():
                    assert load is not None
                    pipe.send(await load.run(command))
                case Release():
                    assert load is not None
                    await load.close()
                    await client.delete_stream(load.stream)
                    pipe.send(None)


async def _create(client: felix.RegionClient, wanted: Prepare) -> None:
    kind = wanted.case.durability
    await client.create_stream(
        wanted.stream,
        shards=wanted.shards,
        durability=Durability(kind, INTERVAL_MS if kind == "interval" else 0),
        retention=Retention(),
        ring_bytes=RING_BYTES if kind == "ephemeral" else 0,
    )


class PublishLoad:
    """Publishes batches into one stream, and keeps the books of it."""

    def __init__(self, client: felix.RegionClient, progress: Pipe, wanted: Prepare) -> None:
        case = wanted.case
        self.stream = wanted.stream
        self._case = case
        self._batch_records = case.batch_records
        self._batch_bytes = case.payload_bytes * case.batch_records
        self._filling = fillers(case.payload_bytes)
        self._publisher: Publisher = client.stream(wanted.stream).publisher()
        self._followed = wanted.followed
        self._progress = progress
        self._counts = dict.fromkeys(range(wanted.shards), 0)
        self._made: list[Made] = []
        self._misplaced = 0
        self._acked: list[tuple[int, int]] = []
        self._times_ns: list[int] = []
        self._next_shard = 0
        self._sent_batches = 0
        self._received_batches = 0
        self._room = asyncio.Event()
        self._room.set()
        self._batches_on_way = max(IN_FLIGHT, min(RING_BATCHES, WINDOW_BYTES // self._batch_bytes))

    async def open(self) -> None:
        """Open the publish stream, and listen to the subscriber."""
        await self._publisher.open()
        asyncio.get_running_loop().add_reader(self._progress.fileno(), self._progressed)

    async def close(self) -> None:
        """Flush and end."""
        asyncio.get_running_loop().remove_reader(self._progress.fileno())
        await self._publisher.close()

    def _progressed(self) -> None:
        try:
            self._received_batches = self._progress.recv()
        except (EOFError, ConnectionResetError):
            # The subscriber is gone; the parent hears of it, too.
            asyncio.get_running_loop().remove_reader(self._progress.fileno())
            return
        if self._has_room():
            self._room.set()

    def _has_room(self) -> bool:
        return not self._followed or self._sent_batches - self._received_batches < self._batches_on_way

    async def run(self, load: Load) -> Sent:
        """One phase; everything published is acknowledged when it returns."""
        self._acked, self._times_ns = [], []
        self._batch_records = load.batch_records or self._case.batch_records
        batches_left = max(1, load.records_max // self._batch_records)
        until = time.monotonic() + load.seconds
        if load.batches_per_second:
            await self._paced(load.batches_per_second, until, batches_left)
        else:
            last = self._sent_batches + batches_left
            workers = [self._work(last, until) for _ in range(load.in_flight * len(self._counts))]
            await asyncio.gather(*workers)
        rate = rate_per_second(self._acked, WARM_SHARE)
        return Sent(
            rate,
            Latency.of(self._times_ns),
            dict(self._counts),
            checksum_of(self._made, self._filling),
            self._misplaced,
        )

    async def _work(self, last: int, until: float) -> None:
        """One of those who publish at once, each the next batch when its last one is acknowledged."""
        while True:
            while not self._has_room():
                self._room.clear()
                await self._room.wait()
            if self._sent_batches >= last or time.monotonic() >= until:
                return
            await self._publish()

    async def _paced(self, batches_per_second: float, until: float, batches_left: int) -> None:
        """At an even pace, whether or not earlier ones are acknowledged: a slow answer delays nobody's clock."""
        async with asyncio.TaskGroup() as group:
            begun = time.monotonic()
            for number in range(batches_left):
                due = begun + number / batches_per_second
                if due >= until:
                    break
                wait = due - time.monotonic()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._publish())

    async def _publish(self) -> None:
        shard = self._next_shard
        self._next_shard = (shard + 1) % len(self._counts)
        first = self._counts[shard]
        self._counts[shard] = first + self._batch_records
        self._sent_batches += 1
        made = Made(shard, first, self._batch_records, time.monotonic_ns())
        self._made.append(made)
        records = list(map(NewRecord, payloads_of(made, self._filling)))
        receipt: Receipt = await self._publisher.publish_batch(records, shard)
        now_ns = time.monotonic_ns()
        self._acked.append((now_ns, made.records))
        self._times_ns.append(now_ns - made.made_ns)
        if (receipt.base_offset, receipt.records) != (first, made.records):
            self._misplaced += made.records


# the subscriber


async def subscriber(pipe: Pipe, progress: Pipe, home: Path, engine: str) -> None:
    """Carry out Prepare, Collect and Release."""
    async with bench_client(home, engine) as client, AsyncExitStack() as open_loads:
        load: DeliverLoad | None = None
        pipe.send(None)
        while (command := await next_message(pipe)) is not None:
            match command:
                case Prepare():
                    load = DeliverLoad(client, progress, command)
                    open_loads.push_async_callback(load.close)
                    if command.followed:
                        await load.open()
                    keep_what_is_there()
                    pipe.send(None)
                case Collect():
                    assert load is not None
                    await load.open()
                    pipe.send(await load.collect(command.sent))
                case Release():
                    assert load is not None
                    await load.close()
                    pipe.send(None)


class DeliverLoad:
    """Reads one stream from its beginning, and keeps the books of it."""

    def __init__(self, client: felix.RegionClient, progress: Pipe, wanted: Prepare) -> None:
        self._client = client
        self._progress = progress
        self._followed = wanted.followed
        self._stream = wanted.stream
        self._ledger = Ledger(
            wanted.case.payload_bytes,
            may_start_late=wanted.case.durability == "ephemeral" and not wanted.followed,
        )
        self._subscription: Subscription | None = None
        self._reading: asyncio.Task[None] | None = None
        self._kept: list[ReceivedBatch] = []
        self._arrived: list[tuple[int, int]] = []
        self._times_ns: list[int] = []
        self._ends: dict[int, int] = {}
        self._batches = 0
        self._news = asyncio.Event()

    async def open(self) -> None:
        """Subscribe and read, unless that was done."""
        subscription = await self.subscribe()
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read(subscription))

    async def subscribe(self, credit_bytes: int = CREDIT_BYTES_DEFAULT) -> Subscription:
        """Subscribe, unless that was done, and leave what comes where it is."""
        if self._subscription is None:
            self._subscription = self._client.stream(self._stream).subscribe(
                start="earliest", credit_bytes=credit_bytes
            )
            await self._subscription.open()
        return self._subscription

    async def close(self) -> None:
        """End the subscription."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self._subscription is not None:
            await self._subscription.close()

    async def _read(self, subscription: Subscription) -> None:
        told_bytes = told_batches = 0
        async for batch in subscription.batches():
            payloads = batch.payloads()
            now_ns = time.monotonic_ns()
            self._arrived.append((now_ns, len(payloads)))
            self._times_ns.append(now_ns - made_at_ns(payloads[0]))
            self._ends[batch.shard] = batch.next_offset
            # Its books are kept between the phases; of the payloads only the batch stays.
            self._kept.append(batch)
            self._batches += 1
            told_bytes += batch.header.body_length
            told_batches += 1
            if self._followed and (told_bytes >= PROGRESS_BYTES or told_batches >= PROGRESS_BATCHES):
                told_bytes = told_batches = 0
                self._progress.send(self._batches)
            self._news.set()

    async def collect(self, sent: Sent) -> Got:
        """Wait for all that was published, then for what must not come, and settle the books."""
        while any(self._ends.get(shard, 0) < count for shard, count in sent.counts.items()):
            self._news.clear()
            try:
                async with asyncio.timeout(STILL_S):
                    await self._news.wait()
            except TimeoutError:
                break
        await asyncio.sleep(AFTER_S)
        if self._followed:
            self._progress.send(self._batches)
        arrived, self._arrived = self._arrived, []
        times_ns, self._times_ns = self._times_ns, []
        kept, self._kept = self._kept, []
        for batch in kept:
            self._ledger.receive(batch.shard, ((record.offset, record.payload) for record in batch.records()))
        return Got(
            rate_per_second(arrived, WARM_SHARE),
            Latency.of(times_ns),
            self._ledger.close(sent.counts, sent.checksums, sent.misplaced),
        )
