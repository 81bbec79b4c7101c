"""Clients of one region, each with what it was promised: publishing and reading, jobs, values under keys, a durable cursor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from random import Random
from typing import ClassVar, Protocol, TypeVar, cast

from simulation.script import Step
from simulation.world import RUN_S_MAX, Client, InvariantError, World

import felix
from felix.client import RegionClient
from felix.errors import Code, FelixError
from felix.profile import Profile
from felix.queue import Job, QueueConsumer
from felix.runtime.port import Runtime
from felix.settings import CacheSettings, QueueSettings, Retries, Views
from felix.transport.port import Engine

STREAM = "acme/payments/orders"
QUEUE = "acme/payments/invoices"
CACHE = "acme/payments/balances"
CURSOR = "billing"
CLIENT = "client"
"""The host that all of them run on."""
PAUSES_S = (0.0, 0.001, 0.3)
BURSTS, BURST_MAX = 10, 5
JOBS, WORKERS = 10, 2
VISIBILITY_S = 2.0
RETRIES = Retries(attempts_max=0, interval_ms=50, interval_ms_max=1_000)
"""A job that is leased again and again to a worker behind a partition is no dead letter here."""
STREAMS: dict[str, Views] = {
    STREAM: Views(),
    QUEUE: Views(queue=QueueSettings(visibility_ms=round(VISIBILITY_S * 1000), retries=RETRIES)),
    CACHE: Views(cache=CacheSettings()),
}
OPERATIONS, KEYS = 12, 3
ACK_TIMEOUT_S = 2.0
AGAIN_S = 0.2
"""Who was refused asks again after so long."""


T = TypeVar("T")


class Reachable(Protocol):
    """A world whose region clients reach."""

    client_runtime: Runtime

    def engine(self, host: str) -> Engine: ...

    def profile(self) -> Profile: ...


class RegionUser(Client):
    """A client of the world's first region."""

    stream: ClassVar[str]
    """What it uses."""

    @asynccontextmanager
    async def region(self) -> AsyncIterator[RegionClient]:
        world = cast("Reachable", self.world)
        async with felix.connect(
            profile=world.profile(),
            engine=world.engine(CLIENT),
            connect_timeout_s=RUN_S_MAX,
            request_timeout_s=RUN_S_MAX,
            runtime=world.client_runtime,
        ) as client:
            yield client

    async def run(self) -> None:
        async with self.region() as client:
            await self.use(client)

    async def check(self) -> None:
        async with self.region() as client:
            await self.look(client)

    async def use(self, region: RegionClient) -> None:
        raise NotImplementedError

    async def look(self, region: RegionClient) -> None:
        """At what is there when all is over."""
        raise NotImplementedError


async def publish(stream: felix.Stream, payload: bytes) -> int | None:
    """The offset; None where it was given up, so that nobody knows whether it is there."""
    try:
        return await stream.publish(payload)
    except FelixError:
        return None


class Orders(RegionUser):
    """Publishes records one after the other, some at once, and reads them. What is acknowledged stays where it is, in order, once."""

    name: ClassVar[str] = "orders"
    stream: ClassVar[str] = STREAM

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.acknowledged: dict[int, int] = {}
        self.refused: set[int] = set()
        self.delivered: list[int] = []
        self.records = sum(step.number for step in self.steps)

    @classmethod
    def draw(cls, random: Random) -> list[Step]:
        return [
            Step(cls.name, "publish", random.choice(PAUSES_S), number=random.randint(1, BURST_MAX))
            for _ in range(BURSTS)
        ]

    async def use(self, region: RegionClient) -> None:
        stream = region.stream(STREAM)
        reading = asyncio.create_task(self._read(stream))
        number = 0
        for step in self.steps:
            await asyncio.sleep(step.after_s)
            burst = range(number, number := number + step.number)
            await asyncio.gather(*(self._publish(stream, each) for each in burst))
        # Nothing that comes after this one may still be acknowledged.
        await self._publish(stream, self.records)
        await reading

    async def _publish(self, stream: felix.Stream, number: int) -> None:
        offset = await publish(stream, b"%d" % number)
        while offset is None and number == self.records:
            await asyncio.sleep(AGAIN_S)
            offset = await publish(stream, b"%d" % number)
        self.world.note(f"published {number}: {offset}")
        if offset is None:
            self.refused.add(number)
        elif number < self.records:
            self.acknowledged[number] = offset
            self.world.count("acknowledged")

    async def _read(self, stream: felix.Stream) -> None:
        while True:
            try:
                await self._follow(stream)
                return
            except FelixError as error:
                # A shard whose disk failed does not serve until its broker is started again.
                self.world.note(f"reading is refused: {error.code.name}")
                await asyncio.sleep(AGAIN_S)

    async def _follow(self, stream: felix.Stream) -> None:
        async with stream.subscribe(len(self.delivered)) as subscription:
            async for record in subscription:
                number = int(bytes(record.payload))
                self.world.note(f"delivered {number} at {record.offset}")
                if record.offset != len(self.delivered):
                    raise InvariantError(
                        f"offset {record.offset} was delivered after {len(self.delivered)} records"
                    )
                self.delivered.append(number)
                if number == self.records:
                    return

    async def look(self, region: RegionClient) -> None:
        stream = region.stream(STREAM)
        end = (await stream.describe()).state[0].high_watermark
        found = await self.stored(stream, end)
        numbers = [number for number in found if number != self.records]
        if len(set(numbers)) != len(numbers):
            raise InvariantError(f"twice: {sorted({n for n in numbers if numbers.count(n) > 1})}")
        if not set(numbers) <= set(range(self.records)):
            raise InvariantError("records that nobody published")
        for number, offset in self.acknowledged.items():
            if offset >= len(found) or found[offset] != number:
                raise InvariantError(f"record {number} was acknowledged at {offset} and is not there")
        if found[: len(self.delivered)] != self.delivered:
            raise InvariantError("what was delivered is not what is there")
        if not self.refused and numbers != sorted(numbers):
            raise InvariantError(f"out of order: {numbers}")

    async def stored(self, stream: felix.Stream, end: int) -> list[int]:
        found: list[int] = []
        if end:
            async with stream.subscribe("earliest") as subscription:
                async for record in subscription:
                    found.append(int(bytes(record.payload)))
                    if record.offset >= end - 1:
                        break
        return found


class Invoices(RegionUser):
    """Puts jobs, and has two workers do them. A job that was put is done; once it is recorded as done it does not come again, and no
    two workers are given one lease."""

    name: ClassVar[str] = "invoices"
    stream: ClassVar[str] = QUEUE

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.put: set[int] = set()
        self.unknown: set[int] = set()
        """put, perhaps: nobody was told"""
        self.finished: dict[int, int] = {}
        """by job, the token under which it was recorded as done"""
        self.tried: set[int] = set()
        self.holders: dict[tuple[int, int], int] = {}
        """by job and token, the worker who was given it"""

    @classmethod
    def draw(cls, random: Random) -> list[Step]:
        return [
            Step(
                cls.name,
                random.choice(("put", "put", "put, to be given back", "put, to be done slowly")),
                random.choice(PAUSES_S),
                number=number,
            )
            for number in range(1, JOBS + 1)
        ]

    async def use(self, region: RegionClient) -> None:
        queue = region.queue(QUEUE)
        working = [asyncio.create_task(self._work(queue, worker)) for worker in range(WORKERS)]
        try:
            for step in self.steps:
                await asyncio.sleep(step.after_s)
                try:
                    await queue.put(b"%d" % step.number)
                except FelixError as error:
                    self.world.note(f"job {step.number} not put: {error.code.name}")
                    self.unknown.add(step.number)
                else:
                    self.world.note(f"job {step.number} put")
                    self.put.add(step.number)
            while await self._left(queue):
                for task in working:
                    if task.done():
                        task.result()
                await asyncio.sleep(AGAIN_S)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
        for task in working:
            if not task.cancelled():
                task.result()

    async def _left(self, queue: felix.Queue) -> bool:
        try:
            state = await queue.describe()
        except FelixError:
            return True
        return bool(state.ready or state.leased or state.delayed or state.waiting)

    async def _work(self, queue: felix.Queue, worker: int) -> None:
        while True:
            try:
                async with queue.consume(visibility=VISIBILITY_S, prefetch=3, auto_extend=False) as consumer:
                    await self._consume(consumer, worker)
            except FelixError as error:
                self.world.note(f"worker {worker} is refused: {error.code.name}")
                await asyncio.sleep(AGAIN_S)

    async def _consume(self, consumer: QueueConsumer, worker: int) -> None:
        async for job in consumer:
            number, token = self._given(job, worker)
            what = next(step.what for step in self.steps if step.number == number)
            if what.endswith("given back") and token == 1:
                await self._told(job.nack(delay=0.05))
                continue
            if what.endswith("slowly") and token == 1:
                await asyncio.sleep(VISIBILITY_S * 1.5)
            self.tried.add(number)
            if await self._told(job.ack()):
                self.world.note(f"worker {worker} finished {number} by lease {token}")
                if number in self.finished:
                    raise InvariantError(
                        f"job {number} was recorded as done by leases {self.finished[number]} and {token}"
                    )
                self.finished[number] = token
                self.world.count("jobs")

    def _given(self, job: Job, worker: int) -> tuple[int, int]:
        number, token = int(bytes(job.payload)), job.token
        self.world.note(f"worker {worker} has {number} by lease {token}")
        # What an older lease gave may still be on its way. The lease that finished it comes again where it was written nowhere.
        if token >= self.finished.get(number, token + 1):
            raise InvariantError(f"job {number} was recorded as done and is handed out again")
        if self.holders.setdefault((number, token), worker) != worker:
            raise InvariantError(f"lease {token} of job {number} was given to two workers")
        return number, token

    async def _told(self, said: asyncio.Future[None]) -> bool:
        try:
            await said
        except FelixError as error:
            self.world.note(f"settling is refused: {error.code.name}")
            return False
        return True

    async def look(self, region: RegionClient) -> None:
        queue = region.queue(QUEUE)
        left = {int(bytes(each.job.payload)) for each in await queue.peek(JOBS * 2)}
        if left & set(self.finished):
            raise InvariantError(
                f"jobs {sorted(left & set(self.finished))} were recorded as done and are there"
            )
        lost = self.put - self.tried - left
        if lost:
            raise InvariantError(f"jobs {sorted(lost)} were put, and nobody ever had them")


class Balances(RegionUser):
    """Changes values one after the other, while a mirror follows: every answer is the model's, versions grow, and the mirror comes to
    what is there."""

    name: ClassVar[str] = "balances"
    stream: ClassVar[str] = CACHE

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.possible: dict[bytes, set[bytes | None]] = {}
        """by key, what may be there: more than one value where nobody was told whether a change was made"""
        self.versions: dict[bytes, int] = {}

    @classmethod
    def draw(cls, random: Random) -> list[Step]:
        return [
            Step(
                cls.name,
                random.choice(("put", "increment", "delete", "compare", "get")),
                random.choice(PAUSES_S),
                where=f"k{random.randrange(KEYS)}",
                number=number,
            )
            for number in range(1, OPERATIONS + 1)
        ]

    async def use(self, region: RegionClient) -> None:
        cache = region.cache(CACHE, exchanges=1)
        mirror = cache.mirror()
        await self._until_served(mirror.open)
        for step in self.steps:
            await asyncio.sleep(step.after_s)
            key = step.where.encode()
            before = self.possible.setdefault(key, {None})
            try:
                await self._change(cache, step, key)
            except FelixError as error:
                self.world.note(f"{step.what} {step.where}: {error.code.name}")
                self.possible[key] = before | {_after(step, value) for value in before}
            else:
                self.world.count("cache")
        for key in self.possible:
            entry = await self._until_served(partial(cache.get, key))
            self._know(key, None if entry is None else entry.value)
            if entry is not None:
                await mirror.reached(key, entry.version)
                if mirror.get(key) != entry.value:
                    raise InvariantError(f"the mirror has {mirror.get(key)!r} for {key!r}, the cache {entry}")
        await mirror.close()

    async def _until_served(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except FelixError as error:
                if error.code is Code.NOT_FOUND:
                    raise
                self.world.note(f"the cache does not serve: {error.code.name}")
                await asyncio.sleep(AGAIN_S)

    async def _change(self, cache: felix.Cache, step: Step, key: bytes) -> None:
        before, value = self.possible[key], b"%d" % step.number
        match step.what:
            case "put":
                self._grown(key, await cache.put(key, value))
            case "delete":
                await cache.delete(key)
            case "increment":
                found = b"%d" % await cache.increment(key, step.number)
                if found not in {_after(step, each) for each in before}:
                    raise InvariantError(f"{key!r} was one of {before}; {step.number} more gave {found!r}")
                self.possible[key] = {found}
                return
            case "compare":
                entry = await cache.get(key)
                self._know(key, None if entry is None else entry.value)
                # It was not changed by others, so it has the version.
                version = 0 if entry is None else entry.version
                changed = await cache.compare_and_set(key, value, version=version)
                if changed is None:
                    raise InvariantError(f"{key!r} has another version than {version}, and nobody changed it")
                self._grown(key, changed)
            case _:
                entry = await cache.get(key)
                self._know(key, None if entry is None else entry.value)
                return
        self.possible[key] = {_after(step, each) for each in self.possible[key]}

    def _grown(self, key: bytes, version: int) -> None:
        if version <= self.versions.get(key, 0):
            raise InvariantError(f"{key!r} had version {self.versions[key]}, and a change made it {version}")
        self.versions[key] = version

    def _know(self, key: bytes, value: bytes | None) -> None:
        self.world.note(f"{key.decode()} is {value!r}")
        if value not in self.possible[key]:
            raise InvariantError(f"{key!r} is {value!r}, by what was answered one of {self.possible[key]}")
        self.possible[key] = {value}

    async def look(self, region: RegionClient) -> None:
        cache = region.cache(CACHE, exchanges=1)
        for key in self.possible:
            entry = await cache.get(key)
            self._know(key, None if entry is None else entry.value)


def _after(step: Step, value: bytes | None) -> bytes | None:
    """What a key has after a step that was made, where it had `value`."""
    match step.what:
        case "put" | "compare":
            return b"%d" % step.number
        case "delete":
            return None
        case "increment":
            return b"%d" % (int(value or b"0") + step.number)
        case _:
            return value


class Billing(RegionUser):
    """Reads the orders by a durable subscription. What it acknowledged does not come again, everything else does, and the position
    only moves forward."""

    name: ClassVar[str] = "billing"
    stream: ClassVar[str] = STREAM

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.acked: set[int] = set()
        self.committed = 0

    async def use(self, region: RegionClient) -> None:
        stream = region.stream(STREAM)
        orders = next((each for each in self.world.clients if isinstance(each, Orders)), None)
        if orders is None:
            return
        reading = asyncio.create_task(self._read(stream))
        # An acknowledgement whose answer was lost may have been carried out: only the position says that all is done.
        while orders.records not in orders.delivered or self.committed < len(orders.delivered):
            await asyncio.sleep(AGAIN_S)
            if reading.done():
                reading.result()
            await self._position(stream)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading

    async def _read(self, stream: felix.Stream) -> None:
        while True:
            try:
                async with stream.consumer(CURSOR, start="earliest", ack_timeout=ACK_TIMEOUT_S) as consumer:
                    async for record in consumer:
                        await self._take(consumer, record)
            except FelixError as error:
                self.world.note(f"{CURSOR} is refused: {error.code.name}")
                await asyncio.sleep(AGAIN_S)

    async def _take(self, consumer: felix.Consumer, record: felix.ConsumerRecord) -> None:
        offset = record.offset
        self.world.note(
            f"{CURSOR} has {bytes(record.payload).decode()} at {offset}, attempt {record.attempt}"
        )
        if offset in self.acked:
            raise InvariantError(f"offset {offset} was acknowledged and comes again")
        if offset < self.committed:
            raise InvariantError(f"the position is {self.committed}, and {offset} comes")
        if await consumer.ack(record):
            self.acked.add(offset)
            self.world.count("cursor")
            self.world.note(f"{CURSOR} acknowledged {offset}")

    async def _position(self, stream: felix.Stream) -> None:
        try:
            state = await stream.describe_subscription(CURSOR)
        except FelixError:
            return
        for shard in state.shards:
            if shard.committed < self.committed:
                raise InvariantError(f"the position was {self.committed} and is {shard.committed}")
            self.committed = shard.committed

    async def look(self, region: RegionClient) -> None:
        stream = region.stream(STREAM)
        if not self.acked:
            return
        await self._position(stream)
        end = (await stream.describe()).state[0].high_watermark
        if self.committed < end:
            raise InvariantError(f"all of {end} records were acknowledged; the position is {self.committed}")
