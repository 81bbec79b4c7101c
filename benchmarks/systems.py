"""The systems that are measured beside one another, and what a measurement asks of each: ports that Felix, Redis and
NATS implement in modules of their own (felix_system, redis_system, nats_system).

A module of a peer is imported only where its client is installed, and only in the process that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from benchmarks.peers import NATS, REDIS, REDIS_SYNCED

Payloads = Sequence[bytes | memoryview]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the systems are: the home folder of Felix's region, and ports on this machine."""

    home: Path
    engine: str
    ports: dict[str, int]


class Kept(msgspec.Struct, frozen=True):
    """A system as it is measured: which server it needs ("" for Felix), in which module it is, and how safe a record is
    once it is acknowledged."""

    server: str
    module: str
    promise: str


SYSTEMS: Final = {
    "felix-fsync": Kept("", "felix_system", "synced, sealed"),
    "felix-ephemeral": Kept("", "felix_system", "in memory"),
    "nats": Kept(NATS, "nats_system", "not kept, not acknowledged"),
    "jetstream": Kept(NATS, "nats_system", "in a file, synced every 2 min"),
    "redis": Kept(REDIS, "redis_system", "in memory"),
    "redis-aof": Kept(REDIS_SYNCED, "redis_system", "synced"),
}
FELIX: Final = tuple(name for name, kept in SYSTEMS.items() if not kept.server)

QUEUES: Final = ("felix-fsync", "jetstream", "redis", "redis-aof")
"""Those that have queues."""
CACHES: Final = ("felix-fsync", "jetstream", "redis", "redis-aof")
"""Those that have caches."""


class FanoutWriter(Protocol):
    """Publishes into one stream."""

    async def open(self) -> None:
        """Connect, and make the stream."""

    async def publish(self, payloads: list[bytes]) -> None:
        """Publish all, in order, after what was passed before; returns once all are acknowledged, where the system
        acknowledges."""

    async def close(self) -> None:
        """Remove the stream, and disconnect."""


class FanoutReader(Protocol):
    """Reads one stream over a connection of its own."""

    async def open(self, take: Callable[[Payloads], None]) -> None:
        """Connect and subscribe; from now on `take` is called with what arrives, in order."""

    async def close(self) -> None:
        """Disconnect."""


def fanout_writer(system: str, place: Place, stream: str) -> FanoutWriter:
    """The publisher's end of a stream of the system; `stream` is [a-z0-9-]."""
    writer: FanoutWriter = _module(system).fanout_writer(system, place, stream)
    return writer


def fanout_reader(system: str, place: Place, stream: str) -> FanoutReader:
    """A subscriber's end."""
    reader: FanoutReader = _module(system).fanout_reader(system, place, stream)
    return reader


class Job(NamedTuple):
    """One job that a worker has leased."""

    payload: bytes | memoryview
    handle: Any
    """What the system needs to acknowledge it."""


class QueueWriter(Protocol):
    """Puts jobs into one queue."""

    async def open(self) -> None:
        """Connect, and make the queue."""

    async def put(self, payloads: list[bytes]) -> None:
        """Put all; returns once the system has acknowledged them."""

    async def left(self) -> int:
        """How many jobs are not finished, as the queue itself says."""

    async def close(self) -> None:
        """Remove the queue, and disconnect."""


class QueueWorker(Protocol):
    """One worker, over a connection of its own."""

    async def open(self) -> None:
        """Connect."""

    async def lease(self, count: int) -> list[Job]:
        """Up to `count` jobs; waits for the first, but not for ever: may return none."""

    async def ack(self, jobs: list[Job]) -> None:
        """They are finished; returns once the system has said so."""

    async def close(self) -> None:
        """Disconnect."""


class CacheClient(Protocol):
    """One client of a cache; calls of many tasks may be under way at once."""

    async def open(self) -> None:
        """Connect, and make the cache."""

    async def put(self, key: str, value: bytes) -> None:
        """Set the value; returns once the system has acknowledged it."""

    async def get(self, key: str) -> bytes | None:
        """The newest value."""

    async def close(self) -> None:
        """Remove the cache, and disconnect."""


def queue_writer(system: str, place: Place, queue: str) -> QueueWriter:
    """The end that puts; `queue` is [a-z0-9-]."""
    writer: QueueWriter = _module(system).queue_writer(system, place, queue)
    return writer


def queue_worker(system: str, place: Place, queue: str) -> QueueWorker:
    """A worker's end."""
    worker: QueueWorker = _module(system).queue_worker(system, place, queue)
    return worker


def cache_client(system: str, place: Place, cache: str) -> CacheClient:
    """A client of a cache; `cache` is [a-z0-9-]."""
    client: CacheClient = _module(system).cache_client(system, place, cache)
    return client


def _module(system: str) -> Any:
    return import_module(f"benchmarks.{SYSTEMS[system].module}")
