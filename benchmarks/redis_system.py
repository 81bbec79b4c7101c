"""Redis as a system among others (benchmarks.systems): streams, written in pipelines, read by blocking XREAD; a stream
with a consumer group as a queue; plain keys as a cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from redis.asyncio import Redis

from benchmarks.systems import SYSTEMS, Job, Payloads, Place
from cli.benchmark.processes import HOST

READ_RECORDS: Final = 256
"""Of one XREAD: several pipelines' worth."""
BLOCK_MS: Final = 1_000
PIPELINE_CALLS_MAX: Final = 1_024
"""Payloads that one pipeline carries at most: what was handed over while the last one was on its way."""
FIELD: Final = b"p"
GROUP: Final = "workers"


def client(system: str, place: Place) -> Any:
    """A client; its replies are bytes."""
    return Redis(host=HOST, port=place.ports[SYSTEMS[system].server])


class _Writer:
    """One pipeline at a time, so that the order is kept; what is handed over meanwhile shares the next one."""

    def __init__(self, redis: Any, key: str) -> None:
        self._redis = redis
        self._key = key
        self._turn = asyncio.Lock()
        self._waiting: list[tuple[list[bytes], asyncio.Future[None]]] = []

    async def open(self) -> None:
        await self._redis.ping()

    async def publish(self, payloads: list[bytes]) -> None:
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((payloads, done))
        async with self._turn:
            if not done.done():
                await self._send()
        await done

    async def _send(self) -> None:
        taken: list[asyncio.Future[None]] = []
        calls = 0
        pipeline = self._redis.pipeline(transaction=False)
        while self._waiting and calls < PIPELINE_CALLS_MAX:
            payloads, done = self._waiting.pop(0)
            for payload in payloads:
                pipeline.xadd(self._key, {FIELD: payload})
            calls += len(payloads)
            taken.append(done)
        await pipeline.execute()
        for done in taken:
            done.set_result(None)

    async def close(self) -> None:
        await self._redis.delete(self._key)
        await self._redis.aclose()


class _Reader:
    def __init__(self, redis: Any, key: str) -> None:
        self._redis = redis
        self._key = key
        self._reading: asyncio.Task[None] | None = None

    async def open(self, take: Callable[[Payloads], None]) -> None:
        await self._redis.ping()
        self._reading = asyncio.get_running_loop().create_task(self._read(take))

    async def _read(self, take: Callable[[Payloads], None]) -> None:
        last: bytes | str = "0"
        while True:
            answer = await self._redis.xread({self._key: last}, count=READ_RECORDS, block=BLOCK_MS)
            for entries in _entries_of(answer):
                take([fields[FIELD] for _, fields in entries])
                last = entries[-1][0]

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._redis.aclose()


def _entries_of(answer: Any) -> list[list[tuple[bytes, dict[bytes, bytes]]]]:
    """Lists of entries, whichever protocol version the client speaks: a list of pairs, or a mapping to lists."""
    if not answer:
        return []
    if isinstance(answer, dict):
        return [entries for lists in answer.values() for entries in lists if entries]
    return [entries for _, entries in answer]


def fanout_writer(system: str, place: Place, stream: str) -> _Writer:
    """See benchmarks.systems."""
    return _Writer(client(system, place), stream)


def fanout_reader(system: str, place: Place, stream: str) -> _Reader:
    """See benchmarks.systems."""
    return _Reader(client(system, place), stream)


class _QueueWriter:
    """A stream and a consumer group; a job that is acknowledged is removed, as from a queue."""

    def __init__(self, redis: Any, key: str) -> None:
        self._redis = redis
        self._key = key
        self._writer = _Writer(redis, key)

    async def open(self) -> None:
        await self._redis.xgroup_create(self._key, GROUP, id="0", mkstream=True)

    async def put(self, payloads: list[bytes]) -> None:
        await self._writer.publish(payloads)

    async def left(self) -> int:
        pending = (await self._redis.xpending(self._key, GROUP))["pending"]
        return max(int(await self._redis.xlen(self._key)), int(pending))

    async def close(self) -> None:
        await self._writer.close()


class _QueueWorker:
    def __init__(self, redis: Any, key: str) -> None:
        self._redis = redis
        self._key = key
        self._name = f"worker-{id(self)}"

    async def open(self) -> None:
        await self._redis.ping()

    async def lease(self, count: int) -> list[Job]:
        answer = await self._redis.xreadgroup(
            GROUP, self._name, {self._key: ">"}, count=count, block=BLOCK_MS
        )
        return [Job(fields[FIELD], entry) for entries in _entries_of(answer) for entry, fields in entries]

    async def ack(self, jobs: list[Job]) -> None:
        entries = [job.handle for job in jobs]
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.xack(self._key, GROUP, *entries)
        pipeline.xdel(self._key, *entries)
        await pipeline.execute()

    async def close(self) -> None:
        await self._redis.aclose()


class _Cache:
    def __init__(self, redis: Any, cache: str) -> None:
        self._redis = redis
        self._prefix = cache + ":"

    async def open(self) -> None:
        await self._redis.ping()

    async def put(self, key: str, value: bytes) -> None:
        await self._redis.set(self._prefix + key, value)

    async def get(self, key: str) -> bytes | None:
        value: bytes | None = await self._redis.get(self._prefix + key)
        return value

    async def close(self) -> None:
        await self._redis.flushdb()
        await self._redis.aclose()


def queue_writer(system: str, place: Place, queue: str) -> _QueueWriter:
    """See benchmarks.systems."""
    return _QueueWriter(client(system, place), queue)


def queue_worker(system: str, place: Place, queue: str) -> _QueueWorker:
    """See benchmarks.systems."""
    return _QueueWorker(client(system, place), queue)


def cache_client(system: str, place: Place, cache: str) -> _Cache:
    """See benchmarks.systems."""
    return _Cache(client(system, place), cache)
