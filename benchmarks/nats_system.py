"""NATS as a system among others (benchmarks.systems): core subjects, and JetStream with a store in files.

JetStream is written with `publish_async` and read by ordered push consumers, its fastest ways in this client; a stream with
work-queue retention and a pull consumer is its queue, a key-value bucket its cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import nats
from nats.js.api import ConsumerConfig, RetentionPolicy, StorageType
from nats.js.errors import KeyNotFoundError

from benchmarks.peers import NATS
from benchmarks.systems import Job, Payloads, Place
from cli.benchmark.processes import HOST

GROUP: Final = "workers"
VISIBILITY_S: Final = 30.0
PULL_S: Final = 1.0
PENDING_MAX: Final = 10_000
"""Leased and not acknowledged, of all workers; more than they take at once."""
UNBOUNDED: Final = -1
"""What waits in a subscriber is bounded by the measurement itself; the client's own limits would drop records."""


async def connected(place: Place) -> Any:
    """A connection to the measured server."""
    return await nats.connect(f"nats://{HOST}:{place.ports[NATS]}", pending_size=8 << 20)


class _CoreWriter:
    def __init__(self, place: Place, subject: str) -> None:
        self._place = place
        self._subject = subject
        self._connection: Any = None

    async def open(self) -> None:
        self._connection = await connected(self._place)

    async def publish(self, payloads: list[bytes]) -> None:
        publish, subject = self._connection.publish, self._subject
        for payload in payloads:
            await publish(subject, payload)
        # Nothing is acknowledged; the client's own task writes what was handed over.
        await asyncio.sleep(0)

    async def close(self) -> None:
        await self._connection.close()


class _StreamWriter(_CoreWriter):
    _retention = RetentionPolicy.LIMITS

    def __init__(self, place: Place, stream: str) -> None:
        super().__init__(place, stream)
        self._turn = asyncio.Lock()
        self._jetstream: Any = None

    async def open(self) -> None:
        await super().open()
        self._jetstream = self._connection.jetstream()
        await self._jetstream.add_stream(
            name=self._subject,
            subjects=[self._subject],
            storage=StorageType.FILE,
            num_replicas=1,
            retention=self._retention,
        )

    async def publish(self, payloads: list[bytes]) -> None:
        publish, subject = self._jetstream.publish_async, self._subject
        async with self._turn:
            acknowledged = [await publish(subject, payload) for payload in payloads]
        await asyncio.gather(*acknowledged)

    async def close(self) -> None:
        await self._jetstream.delete_stream(self._subject)
        await super().close()


class _Reader:
    def __init__(self, place: Place, subject: str, stream: bool) -> None:
        self._place = place
        self._subject = subject
        self._stream = stream
        self._connection: Any = None

    async def open(self, take: Callable[[Payloads], None]) -> None:
        async def arrived(message: Any) -> None:
            take((message.data,))

        self._connection = await connected(self._place)
        source = self._connection.jetstream() if self._stream else self._connection
        ordered = {"ordered_consumer": True} if self._stream else {}
        await source.subscribe(
            self._subject,
            cb=arrived,
            pending_msgs_limit=UNBOUNDED,
            pending_bytes_limit=UNBOUNDED,
            **ordered,
        )
        await self._connection.flush()

    async def close(self) -> None:
        await self._connection.close()


def fanout_writer(system: str, place: Place, stream: str) -> _CoreWriter:
    """See benchmarks.systems."""
    return _StreamWriter(place, stream) if system == "jetstream" else _CoreWriter(place, stream)


def fanout_reader(system: str, place: Place, stream: str) -> _Reader:
    """See benchmarks.systems."""
    return _Reader(place, stream, system == "jetstream")


class _QueueWriter(_StreamWriter):
    _retention = RetentionPolicy.WORK_QUEUE

    async def open(self) -> None:
        await super().open()
        await self._jetstream.add_consumer(
            self._subject,
            ConsumerConfig(durable_name=GROUP, max_ack_pending=PENDING_MAX, ack_wait=VISIBILITY_S),
        )

    async def put(self, payloads: list[bytes]) -> None:
        await self.publish(payloads)

    async def left(self) -> int:
        """A work queue drops a job once its acknowledgement has come in."""
        return int((await self._jetstream.stream_info(self._subject)).state.messages)


class _QueueWorker:
    def __init__(self, place: Place, subject: str) -> None:
        self._place = place
        self._subject = subject
        self._connection: Any = None
        self._pulled: Any = None

    async def open(self) -> None:
        self._connection = await connected(self._place)
        jetstream = self._connection.jetstream()
        self._pulled = await jetstream.pull_subscribe_bind(consumer=GROUP, stream=self._subject)

    async def lease(self, count: int) -> list[Job]:
        try:
            messages = await self._pulled.fetch(count, timeout=PULL_S)
        except TimeoutError:
            return []
        return [Job(message.data, message) for message in messages]

    async def ack(self, jobs: list[Job]) -> None:
        # `ack_sync` waits for the server's word, as the other systems do.
        await asyncio.gather(*(job.handle.ack_sync(timeout=VISIBILITY_S) for job in jobs))

    async def close(self) -> None:
        await self._connection.close()


class _Cache:
    def __init__(self, place: Place, bucket: str) -> None:
        self._place = place
        self._bucket = bucket
        self._connection: Any = None
        self._jetstream: Any = None
        self._values: Any = None

    async def open(self) -> None:
        self._connection = await connected(self._place)
        self._jetstream = self._connection.jetstream()
        self._values = await self._jetstream.create_key_value(bucket=self._bucket, storage=StorageType.FILE)

    async def put(self, key: str, value: bytes) -> None:
        await self._values.put(key, value)

    async def get(self, key: str) -> bytes | None:
        try:
            value: bytes | None = (await self._values.get(key)).value
        except KeyNotFoundError:
            return None
        return value

    async def close(self) -> None:
        await self._jetstream.delete_key_value(self._bucket)
        await self._connection.close()


def queue_writer(_system: str, place: Place, queue: str) -> _QueueWriter:
    """See benchmarks.systems."""
    return _QueueWriter(place, queue)


def queue_worker(_system: str, place: Place, queue: str) -> _QueueWorker:
    """See benchmarks.systems."""
    return _QueueWorker(place, queue)


def cache_client(_system: str, place: Place, cache: str) -> _Cache:
    """See benchmarks.systems."""
    return _Cache(place, cache)
