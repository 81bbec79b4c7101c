"""Felix as a system among others (benchmarks.systems): the public SDK, one client for each reader and writer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import felix
from benchmarks.systems import Job, Payloads, Place
from cli.benchmark.roles import REGION, RING_BYTES
from felix.profile import load_profile
from felix.publisher import Publisher
from felix.queue import QueueConsumer
from felix.subscription import Subscription
from felix.transport.port import engine_named

LEASE_WAIT_S: Final = 1.0
"""A worker that has waited so long looks whether it is to go on."""
PREFETCH: Final = 256
"""Jobs on their way to a worker: so that it has the next ones while it acknowledges."""

_DURABILITIES: Final = {"felix-fsync": "fsync", "felix-ephemeral": "ephemeral"}


async def connected(place: Place) -> felix.RegionClient:
    """A client of the measured region, open."""
    profile = await asyncio.to_thread(load_profile, REGION, home=place.home)
    client = felix.connect(profile=profile, engine=engine_named(place.engine))
    await client.open()
    return client


class _Writer:
    def __init__(self, place: Place, stream: str, durability: str) -> None:
        self._place = place
        self._stream = f"bench/fanout/{stream}"
        self._durability = durability
        self._client: felix.RegionClient | None = None
        self._publisher: Publisher | None = None

    async def open(self) -> None:
        client = self._client = await connected(self._place)
        await client.create_stream(
            self._stream,
            durability=felix.Durability(self._durability, 0),
            ring_bytes=RING_BYTES if self._durability == "ephemeral" else 0,
        )
        self._publisher = client.stream(self._stream).publisher()
        await self._publisher.open()

    async def publish(self, payloads: list[bytes]) -> None:
        assert self._publisher is not None
        await self._publisher.publish_batch(list(map(felix.NewRecord, payloads)), 0)

    async def close(self) -> None:
        if self._client is not None:
            if self._publisher is not None:
                await self._publisher.close()
            await self._client.delete_stream(self._stream)
            await self._client.close()


class _Reader:
    def __init__(self, place: Place, stream: str) -> None:
        self._place = place
        self._stream = f"bench/fanout/{stream}"
        self._client: felix.RegionClient | None = None
        self._subscription: Subscription | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self, take: Callable[[Payloads], None]) -> None:
        self._client = await connected(self._place)
        self._subscription = self._client.stream(self._stream).subscribe("earliest", on_gap="raise")
        await self._subscription.open()
        self._reading = asyncio.get_running_loop().create_task(self._read(self._subscription, take))

    async def _read(self, subscription: Subscription, take: Callable[[Payloads], None]) -> None:
        async for batch in subscription.batches():
            take(batch.payloads())

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self._subscription is not None:
            await self._subscription.close()
        if self._client is not None:
            await self._client.close()


def fanout_writer(system: str, place: Place, stream: str) -> _Writer:
    """See benchmarks.systems."""
    return _Writer(place, stream, _DURABILITIES[system])


def fanout_reader(_system: str, place: Place, stream: str) -> _Reader:
    """See benchmarks.systems."""
    return _Reader(place, stream)


class _Cache:
    def __init__(self, place: Place, cache: str) -> None:
        self._place = place
        self._name = f"bench/cache/{cache}"
        self._client: felix.RegionClient | None = None
        self._cache: felix.Cache | None = None

    async def open(self) -> None:
        self._client = await connected(self._place)
        self._cache = await self._client.create_cache(self._name)

    async def put(self, key: str, value: bytes) -> None:
        assert self._cache is not None
        await self._cache.put(key, value)

    async def get(self, key: str) -> bytes | None:
        assert self._cache is not None
        entry = await self._cache.get(key)
        return None if entry is None else entry.value

    async def close(self) -> None:
        if self._client is not None:
            await self._client.delete_stream(self._name)
            await self._client.close()


def cache_client(_system: str, place: Place, cache: str) -> _Cache:
    """See benchmarks.systems."""
    return _Cache(place, cache)


class _QueueWriter:
    def __init__(self, place: Place, queue: str) -> None:
        self._place = place
        self._name = f"bench/queue/{queue}"
        self._client: felix.RegionClient | None = None
        self._queue: felix.Queue | None = None

    async def open(self) -> None:
        self._client = await connected(self._place)
        await self._client.create_queue(self._name)
        self._queue = self._client.queue(self._name)

    async def put(self, payloads: list[bytes]) -> None:
        assert self._queue is not None
        await self._queue.put_many(payloads)

    async def left(self) -> int:
        assert self._queue is not None
        state = await self._queue.describe()
        return state.ready + state.leased + state.delayed + state.waiting

    async def close(self) -> None:
        if self._client is not None:
            await self._client.delete_stream(self._name)
            await self._client.close()


class _QueueWorker:
    """By `consume`, as applications do: jobs are pushed ahead of the worker."""

    def __init__(self, place: Place, queue: str) -> None:
        self._place = place
        self._name = f"bench/queue/{queue}"
        self._client: felix.RegionClient | None = None
        self._consumer: QueueConsumer | None = None

    async def open(self) -> None:
        self._client = await connected(self._place)
        self._consumer = self._client.queue(self._name).consume(prefetch=PREFETCH)

    async def lease(self, count: int) -> list[Job]:
        consumer = self._consumer
        assert consumer is not None
        try:
            async with asyncio.timeout(LEASE_WAIT_S):
                jobs = [await anext(consumer)]
        except TimeoutError:
            return []
        while consumer.buffered and len(jobs) < count:
            jobs.append(await anext(consumer))
        return [Job(job.payload, job) for job in jobs]

    async def ack(self, jobs: list[Job]) -> None:
        # What is said of jobs in one event loop iteration travels together.
        await asyncio.gather(*(job.handle.ack() for job in jobs))

    async def close(self) -> None:
        if self._consumer is not None:
            await self._consumer.close()
        if self._client is not None:
            await self._client.close()


def queue_writer(_system: str, place: Place, queue: str) -> _QueueWriter:
    """See benchmarks.systems."""
    return _QueueWriter(place, queue)


def queue_worker(_system: str, place: Place, queue: str) -> _QueueWorker:
    """See benchmarks.systems."""
    return _QueueWorker(place, queue)
