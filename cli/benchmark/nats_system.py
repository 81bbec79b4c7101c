"""NATS as a system among others (cli.benchmark.systems): core subjects, and JetStream with a store in files.

JetStream is written with `publish_async` and read by ordered push consumers, its fastest ways in this client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import nats
from nats.js.api import StorageType

from cli.benchmark.peers import NATS
from cli.benchmark.processes import HOST
from cli.benchmark.systems import Payloads, Place

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
    def __init__(self, place: Place, stream: str) -> None:
        super().__init__(place, stream)
        self._turn = asyncio.Lock()
        self._jetstream: Any = None

    async def open(self) -> None:
        await super().open()
        self._jetstream = self._connection.jetstream()
        await self._jetstream.add_stream(
            name=self._subject, subjects=[self._subject], storage=StorageType.FILE, num_replicas=1
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
    """See cli.benchmark.systems."""
    return _StreamWriter(place, stream) if system == "jetstream" else _CoreWriter(place, stream)


def fanout_reader(system: str, place: Place, stream: str) -> _Reader:
    """See cli.benchmark.systems."""
    return _Reader(place, stream, system == "jetstream")
