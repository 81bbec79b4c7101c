"""Felix as a system among others (cli.benchmark.systems): the public SDK, one client for each reader and writer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import felix
from cli.benchmark.roles import REGION, RING_BYTES
from cli.benchmark.systems import Payloads, Place
from felix.profile import load_profile
from felix.publisher import Publisher
from felix.subscription import Subscription
from felix.transport.port import engine_named

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
    """See cli.benchmark.systems."""
    return _Writer(place, stream, _DURABILITIES[system])


def fanout_reader(_system: str, place: Place, stream: str) -> _Reader:
    """See cli.benchmark.systems."""
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
    """See cli.benchmark.systems."""
    return _Cache(place, cache)
