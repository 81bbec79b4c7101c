"""Clients that use a queue, a durable subscription and a cache for ever, and note what they were told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from cluster.cache_history import CacheHistory, contend, get

import felix
from felix import Code, FelixError

PAUSE_S: Final = 0.02
"""Between two jobs, two records, and two calls of a cache: a long run is judged whole."""
AGAIN_S: Final = 0.1
"""Who was refused asks again after so long."""
KEYS: Final = ("first", "second", "third")
"""That clients contend for."""
SUBSCRIPTION: Final = "crew"
WAIT_S: Final = 120.0
"""Longest wait for something that must happen; only a failing run waits this long."""


async def work(
    region: felix.RegionClient,
    name: str,
    recorded: Counter[bytes],
    faults: list[str],
    broken: frozenset[bytes] = frozenset(),
) -> None:
    """Take jobs for ever, and count what the queue confirmed as done. Those that are `broken` are given back each time."""
    async with region.queue(name).consume(prefetch=8) as worker:
        async for job in worker:
            try:
                if job.payload in broken:
                    await job.nack(delay=0, reason="broken")
                    continue
                await job.ack()
            except FelixError as error:
                # Nobody knows whether it was recorded: the job comes again, or it was. One that is given back again, since the answer was
                # lost, may be another's by then; one that is acknowledged again is recognised.
                assert error.code is not Code.LEASE_LOST or job.payload in broken, (job.payload, error)
                faults.append(error.code.name)
            else:
                recorded[job.payload] += 1


async def consume(
    stream: felix.Stream, acknowledged: set[bytes], again: list[bytes], faults: list[str]
) -> None:
    """Acknowledge what comes, for ever. `again`: what came although it was known to be acknowledged."""
    async with stream.consumer("crew") as consumer:
        async for record in consumer:
            payload = bytes(record.payload)
            if payload in acknowledged:
                again.append(payload)
            if await consumer.ack(record):
                acknowledged.add(payload)
            else:
                faults.append("lost")


async def put(cache: felix.Cache, confirmed: dict[str, int]) -> None:
    """Put numbers under twenty keys, one after the other, and count them in one more."""
    number = 0
    while True:
        number += 1
        key = f"k{number % 20}"
        await cache.put(key, b"%d" % number)
        confirmed[key] = number
        assert await cache.increment("count") == number
        await asyncio.sleep(0.002)


class ViewLoad:
    """A queue, a durable subscription and a cache at work whatever happens, also where they are refused.

    What is held against what they were told: a job that was recorded as done is recorded once, and is not given under that lease or a later one
    again; a record that was acknowledged does not come again; no job or record that was confirmed is missing; the cache is linearizable.
    """

    def __init__(self, queue: str, stream: str, cache: str, *, replicas: int = 3) -> None:
        """`replicas`: copies of each; 0: as many as the region gives a new stream."""
        self._replicas = replicas
        self.streams: Final = (queue, stream, cache)
        self.broken: list[str] = []
        """promises, as soon as one is seen to be"""
        self.done: dict[bytes, int] = {}
        """by job, the token under which it was recorded as done"""
        self.read: set[bytes] = set()
        """records whose acknowledgement was confirmed"""
        self._put: set[bytes] = set()
        self._published: set[bytes] = set()
        self._unsure: set[bytes] = set()
        """jobs whose acknowledgement was not answered, or did not count"""
        self._came: set[bytes] = set()
        self._cache = CacheHistory()
        self._refused = Counter[str]()
        self._tasks: list[asyncio.Task[None]] = []
        self._begun: list[asyncio.Task[None]] = []

    def __str__(self) -> str:
        refused = ", ".join(f"{number} {name}" for name, number in sorted(self._refused.items()))
        return (
            f"{len(self.done)} of {len(self._put)} jobs done, {len(self.read)} of {len(self._published)} records read for good, "
            f"{self._cache.stored} swaps stored; refused: {refused or 'nothing'}"
        )

    @asynccontextmanager
    async def going_on(self, one: felix.RegionClient, other: felix.RegionClient) -> AsyncIterator[None]:
        """On two clients, until the block ends. Then nothing is put and published any more, and everything is done and read."""
        queue, stream, cache = self.streams
        await one.create_queue(queue, replicas=self._replicas, visibility=30)
        await one.create_stream(stream, replicas=self._replicas)
        await one.create_cache(cache, replicas=self._replicas)
        await one.stream(stream).create_subscription(SUBSCRIPTION, felix.SubscriptionSettings("earliest"))
        begin = asyncio.ensure_future
        self._begun = [begin(self._put_jobs(one)), begin(self._publish(one))]
        self._tasks = [
            *(begin(self._again(self._work, each)) for each in (one, other)),
            begin(self._again(self._consume, other)),
            *(
                begin(contend(each.cache(cache), name, KEYS, self._cache, PAUSE_S))
                for name, each in (("a", one), ("b", other))
            ),
        ]
        try:
            yield
            for task in self._begun:
                task.cancel()
            await asyncio.wait(self._begun)
            await self._until(lambda: self._put <= self.done.keys() | self._unsure)
            await self._until(lambda: self._published <= self._came)
        finally:
            for task in (*self._begun, *self._tasks):
                task.cancel()
            await asyncio.gather(*self._begun, *self._tasks, return_exceptions=True)

    async def goes_on(self, number: int) -> None:
        """So many more jobs are done, records acknowledged and swaps stored."""
        done, read, stored = (each + number for each in (len(self.done), len(self.read), self._cache.stored))
        await self._until(
            lambda: len(self.done) >= done and len(self.read) >= read and self._cache.stored >= stored
        )

    async def check(self, region: felix.RegionClient) -> None:
        """What is there, once nobody works any more."""
        queue, stream, cache = self.streams
        left = {bytes(each.job.payload) for each in await region.queue(queue).peek(1_000)}
        if again := left & self.done.keys():
            self.broken.append(f"jobs {sorted(again)[:3]} were recorded as done and are there")
        if lost := self._put - self.done.keys() - self._unsure - left:
            self.broken.append(f"jobs {sorted(lost)[:3]} were put and are gone")
        async with region.stream(stream).consumer(SUBSCRIPTION) as consumer:
            state = await region.stream(stream).describe_subscription(SUBSCRIPTION)
            for _ in range(sum(each.lag_records for each in state.shards)):
                async with asyncio.timeout(WAIT_S):
                    self._comes(await anext(consumer))
        for key in KEYS:
            await get(region.cache(cache), key, self._cache)
        self._cache.check()
        assert not self.broken, self.broken

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                assert not self.broken, self.broken
                for task in (*self._tasks, *self._begun):
                    if task.done() and not task.cancelled():
                        task.result()
                await asyncio.sleep(0.02)
        assert not self.broken, self.broken

    async def _put_jobs(self, region: felix.RegionClient) -> None:
        number, queue = 0, region.queue(self.streams[0])
        while True:
            payload, number = b"job %d" % number, number + 1
            try:
                await queue.put(payload)
                self._put.add(payload)
            except FelixError as error:
                await self._was_refused("put", error)
            await asyncio.sleep(PAUSE_S)

    async def _publish(self, region: felix.RegionClient) -> None:
        number, stream = 0, region.stream(self.streams[1])
        while True:
            payload, number = b"record %d" % number, number + 1
            try:
                await stream.publish(payload)
                self._published.add(payload)
            except FelixError as error:
                await self._was_refused("publish", error)
            await asyncio.sleep(PAUSE_S)

    async def _again(
        self, work: Callable[[felix.RegionClient], Coroutine[Any, Any, None]], region: felix.RegionClient
    ) -> None:
        while True:
            try:
                await work(region)
            except FelixError as error:
                await self._was_refused(work.__name__.strip("_"), error)

    async def _was_refused(self, what: str, error: FelixError) -> None:
        self._refused[f"{what} {error.code.name}"] += 1
        await asyncio.sleep(AGAIN_S)

    async def _work(self, region: felix.RegionClient) -> None:
        async with region.queue(self.streams[0]).consume(prefetch=4) as worker:
            async for job in worker:
                payload = bytes(job.payload)
                if job.token >= self.done.get(payload, job.token + 1):
                    self.broken.append(
                        f"{payload!r} was recorded as done by lease {self.done[payload]} and is given by lease {job.token}"
                    )
                try:
                    await job.ack()
                except FelixError as error:
                    self._unsure.add(payload)
                    self._refused[f"ack {error.code.name}"] += 1
                else:
                    if payload in self.done:
                        self.broken.append(f"{payload!r} was recorded as done twice")
                    self.done[payload] = job.token

    async def _consume(self, region: felix.RegionClient) -> None:
        async with region.stream(self.streams[1]).consumer(SUBSCRIPTION) as consumer:
            async for record in consumer:
                self._comes(record)
                if await consumer.ack(record):
                    self.read.add(bytes(record.payload))

    def _comes(self, record: felix.ConsumerRecord) -> None:
        payload = bytes(record.payload)
        self._came.add(payload)
        if payload in self.read:
            self.broken.append(f"{payload!r} was acknowledged and comes again")
