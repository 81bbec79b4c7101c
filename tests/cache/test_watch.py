"""Watches at their edges: a state that changes while it is told, a ring that goes on without the watcher, many watchers at once, links
that are lost in the middle. However it goes, the replica ends as the cache is."""

from __future__ import annotations

import asyncio
import random

import pytest
from region_peer import client, until

import felix
from felix.cache import WATCH_CREDIT_BYTES_MIN, Cache, Watch
from felix.errors import Code, UnavailableError
from felix.quota import QuotaLimits
from felix.settings import CacheSettings, Views
from region.cache import watch as broker_watch
from region.metadata.records import RING_BYTES_MIN
from region.node import Node

NAME = "acme/web/sessions"

pytestmark = pytest.mark.timeout(120)


class Replica:
    """What is told, put together; versions of a key never go back between two resets."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.values: dict[bytes, bytes] = {}
        self.versions: dict[bytes, int] = {}
        self.told = 0
        self.resets = 0
        self.ready = False
        self.going = asyncio.Event()
        self.going.set()
        self.task = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        async for change in self.watch:
            await self.going.wait()
            self.told += 1
            if change.kind == "reset":
                self.values.clear()
                self.versions.clear()
                self.resets += 1
            elif change.kind == "ready":
                self.ready = True
            else:
                assert change.version > self.versions.get(change.key, 0)
                self.versions[change.key] = change.version
                if change.value is None:
                    self.values.pop(change.key, None)
                else:
                    self.values[change.key] = change.value

    async def same_as(self, cache: Cache) -> None:
        wanted = {key: entry.value async for key, entry in cache.scan()}
        self.going.set()

        def same() -> bool:
            if self.task.done():
                self.task.result()
            return self.values == wanted

        await until(same, 120)

    async def end(self) -> None:
        self.watch.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def change_for_a_while(cache: Cache, keys: int, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(rounds):
        key = b"key:%05d" % chance.randrange(keys)
        match chance.randrange(4):
            case 0:
                await cache.delete(key)
            case 1:
                await cache.increment(key + b"#")
            case _:
                await cache.put(key, b"%d of %d" % (number, seed))


@pytest.mark.parametrize("durability", ["fsync", "ephemeral"])
async def test_a_state_that_changes_while_it_is_told_ends_right(
    region: felix.RegionClient, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_watch, "PAGE_KEYS", 16)
    cache = await region.create_cache(NAME, shards=3, durability=felix.Durability(durability))
    await cache.put_many({b"key:%05d" % number: b"first" for number in range(3_000)})
    writers = [asyncio.ensure_future(change_for_a_while(cache, 3_000, 150, seed)) for seed in range(6)]
    replicas = []
    for number in range(12):
        replicas.append(Replica(cache.watch(coalesce=number % 2 == 0)))
        await asyncio.sleep(0.01)
    await asyncio.gather(*writers)
    for replica in replicas:
        await replica.same_as(cache)
        assert replica.ready and not replica.resets
        await replica.end()


async def test_a_watcher_that_the_ring_has_overtaken_is_told_the_whole_state_again(
    region: felix.RegionClient,
) -> None:
    await region.create_stream(
        NAME,
        durability=felix.Durability("ephemeral"),
        ring_bytes=RING_BYTES_MIN,
        views=Views(cache=CacheSettings()),
    )
    cache = region.cache(NAME)
    replica = Replica(cache.watch(credit_bytes=WATCH_CREDIT_BYTES_MIN))
    await until(lambda: replica.ready)
    replica.going.clear()
    for number in range(150):
        await cache.put(f"k{number % 5}", bytes([number]) * 40_000)
    await cache.delete("k1")
    await replica.same_as(cache)
    assert replica.resets and b"k1" not in replica.values
    await replica.end()


async def test_links_that_are_lost_in_the_middle_lose_no_change(region: felix.RegionClient) -> None:
    cache = await region.create_cache(NAME, shards=2)
    await cache.put_many({b"key:%05d" % number: b"first" * 50 for number in range(2_000)})
    replica = Replica(cache.watch(credit_bytes=WATCH_CREDIT_BYTES_MIN))
    writers = [asyncio.ensure_future(change_for_a_while(cache, 2_000, 80, seed)) for seed in range(4)]
    for _ in range(5):
        await asyncio.sleep(0.05)
        link = region.connection.link
        if link is not None:
            link.fail(UnavailableError("lost by the test", code=Code.DISCONNECTED))
    await asyncio.gather(*writers)
    await replica.same_as(cache)
    await replica.end()


async def test_watchers_of_one_prefix_share_what_is_encoded(
    node: Node, region: felix.RegionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = 0
    encode = broker_watch.encode_message

    def counted(*arguments: object) -> bytes:
        nonlocal encoded
        encoded += 1
        return encode(*arguments)  # type: ignore[arg-type]

    cache = await region.create_cache(NAME)
    replicas = [Replica(cache.watch(prefix="a" if number % 2 else "")) for number in range(20)]
    await until(lambda: all(replica.ready for replica in replicas))
    monkeypatch.setattr(broker_watch, "encode_message", counted)
    for number in range(20):
        await cache.put(f"a{number}", b"x")
    for replica in replicas:
        await replica.same_as(cache)
        await replica.end()
    # Once for each of the two prefixes, and not for each of the 20 watchers.
    assert encoded == 40


async def test_a_watcher_of_other_keys_knows_how_far_the_log_is(
    node: Node, region: felix.RegionClient
) -> None:
    cache = await region.create_cache(NAME)
    async with cache.watch(prefix="quiet") as watch:
        assert (await anext(watch)).kind == "ready"
        await cache.put_many({f"loud:{number}": b"x" for number in range(broker_watch.PROGRESS_OFFSETS + 10)})
        reading = asyncio.ensure_future(anext(watch))
        await until(lambda: (watch.position or watch.position) and max(watch._at.values()) > 4_000)
        reading.cancel()
        position = watch.position
    assert position is not None
    async with cache.watch(prefix="quiet", resume=position) as watch:
        assert (await anext(watch)).kind == "ready"


async def test_quotas_bound_what_a_cache_takes_and_gives(node: Node, region: felix.RegionClient) -> None:
    cache = await region.create_cache(NAME)
    await region.put_quota("tenant", "acme", QuotaLimits(stored_bytes=1))
    with pytest.raises(UnavailableError) as refused:
        for _ in range(3):
            await cache.put("k", bytes(1_000))
    assert refused.value.code is Code.LIMIT_STORED
    assert await cache.get("other") is None
    await region.delete_quota("tenant", "acme")
    await region.put_quota("tenant", "acme", QuotaLimits(subscriptions=1))
    async with cache.watch() as watch, client(node.folder, request_timeout_s=2.0) as other:
        assert await anext(watch)
        with pytest.raises(UnavailableError):
            await other.cache(NAME).watch().open()
        assert node.broker.metrics.refusals["limit_subscriptions"]
