"""A cache's settings are altered while it serves: what fits stays as it is, over restarts too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from region_home import make_region, running
from region_peer import client, until

import felix
from felix.cache import Cache
from felix.errors import Code, RequestError, UnavailableError
from felix.runtime.real import now_ms
from felix.settings import CACHE_BYTES_MIN, CacheChange, CacheSettings
from region.bootstrap import issue_identity
from region.cache.shard import CacheShard
from region.cache.state import CacheState, entry_bytes
from region.config import load_config
from region.folder import RegionFolder
from region.limits.budget import Budget
from region.node import Node

NAME = "acme/web/sessions"
VALUE = bytes(2_000)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RegionFolder:
    folder = make_region(tmp_path_factory.mktemp("home"), "us-east")
    issue_identity(folder, load_config(folder.config), "client", "web", now_ms())
    return folder


@pytest.fixture
async def node(folder: RegionFolder, tmp_path: Path) -> AsyncIterator[Node]:
    async with running(folder, data=str(tmp_path / "data")) as made:
        yield made


@pytest.fixture
async def region(node: Node) -> AsyncIterator[felix.RegionClient]:
    async with client(node.folder) as made:
        yield made


def shards(node: Node) -> list[CacheShard]:
    (cache,) = node.caches._caches.values()
    return cache.serving


async def keys(cache: Cache) -> set[bytes]:
    return {key async for key, _ in cache.scan()}


async def test_a_smaller_cache_lets_the_least_recently_used_go_while_puts_go_on(
    folder: RegionFolder, tmp_path: Path
) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data) as node, client(folder) as region:
        cache = await region.create_cache(NAME, CacheSettings(bytes_max=4 << 20))
        await cache.put_many({f"k{n:04}": VALUE for n in range(1_500)})
        await cache.get_many([f"k{n:04}" for n in range(50)])  # these were used last
        state = await cache.alter(bytes_max=CACHE_BYTES_MIN)
        assert state.views.cache == CacheSettings(bytes_max=CACHE_BYTES_MIN)
        for n in range(100):
            await cache.put(f"new{n}", VALUE)
            assert await cache.exists(f"new{n}")
        (shard,) = shards(node)
        await until(lambda: shard.state.coming_bytes <= CACHE_BYTES_MIN and not shard.state.staged)
        left = await keys(cache)
        assert {b"new%d" % n for n in range(100)} | {b"k%04d" % n for n in range(50)} <= left
        assert b"k0050" not in left
        stats = await cache.stats()
        assert stats.size_bytes <= stats.limit_bytes == CACHE_BYTES_MIN
        assert stats.evicted == 1_600 - stats.keys
        # With more memory nothing goes any more.
        await cache.alter(bytes_max=2 << 20)
        await cache.put_many({f"more{n}": VALUE for n in range(100)})
        left = await keys(cache)
        assert len(left) == stats.keys + 100
    async with running(folder, data=data), client(folder) as region:
        assert (await region.describe_stream(NAME)).views.cache == CacheSettings(bytes_max=2 << 20)
        assert await keys(region.cache(NAME)) == left


def test_a_put_into_a_cache_that_was_made_smaller_makes_room_for_itself_alone() -> None:
    state = CacheState(CacheSettings(bytes_max=4 << 20), Budget("cache", 1 << 30))
    for n in range(1_500):
        state.make_room(b"k%04d" % n, VALUE)
        state.put(b"k%04d" % n, VALUE, 0)
    staged = state.take_open()
    state.appended(staged, 0, len(staged.changes))
    state.settle(len(staged.changes))
    state.settings = CacheSettings(bytes_max=CACHE_BYTES_MIN)
    before = state.coming_bytes
    state.make_room(b"new", VALUE)
    state.put(b"new", VALUE, 0)
    assert len(state.open.changes) <= 3
    assert state.coming_bytes <= before + entry_bytes(b"new", VALUE)
    # The rest goes in turns, each bounded.
    turns = 0
    while state.relieve(8 << 10):
        turns += 1
        staged = state.take_open()
        base = state.staged[-1].next_offset if state.staged else 1_500
        state.appended(staged, base, base + len(staged.changes))
        state.settle(base + len(staged.changes))
    assert turns > 10 and state.size_bytes <= CACHE_BYTES_MIN


async def test_another_ttl_counts_from_then_on_and_never_for_what_is_there(
    folder: RegionFolder, tmp_path: Path
) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data), client(folder) as region:
        cache = await region.create_cache(NAME, CacheSettings(), shards=2)
        await cache.put("old", b"1")
        await region.stream(NAME).publish(b"2", key=b"published")
        await cache.alter(ttl=0.3)
        await cache.put("short", b"3")
        await cache.put("for good", b"4", ttl=felix.FOREVER)
        await region.stream(NAME).publish(b"5", key=b"short too")
        assert await cache.ttl("old") == felix.FOREVER == await cache.ttl("published")
        assert (await cache.ttl("short") or 0) <= 0.3
        async with asyncio.timeout(120):
            while await keys(cache) != {b"old", b"published", b"for good"}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await cache.alter(ttl=500)
        await cache.put("long", b"6")
        await cache.alter(ttl=felix.FOREVER)
        await region.stream(NAME).publish(b"7", key=b"last")
    time.sleep(0.3)  # noqa: ASYNC251 - longer than the ttl that none of these has
    async with running(folder, data=data), client(folder) as region:
        cache = region.cache(NAME)
        assert await keys(cache) == {b"old", b"published", b"for good", b"long", b"last"}
        assert {await cache.ttl(key) for key in ("old", "published", "for good", "last")} == {felix.FOREVER}
        assert 400 < (await cache.ttl("long") or 0) <= 500
        config = (await region.describe_stream(NAME)).views.cache
        assert config == CacheSettings()


async def test_a_cache_that_refuses_is_not_made_smaller_than_what_it_holds(
    region: felix.RegionClient,
) -> None:
    cache = await region.create_cache(NAME, CacheSettings(bytes_max=4 << 20, eviction="refuse"))
    await cache.put_many({f"k{n:04}": VALUE for n in range(800)})
    with pytest.raises(RequestError) as refused:
        await cache.alter(bytes_max=CACHE_BYTES_MIN)
    assert refused.value.code is Code.CONFLICT
    await cache.put_many({f"k{n:04}": VALUE for n in range(800, 1_500)})  # it is as large as before
    assert len(await keys(cache)) == 1_500
    await cache.alter(bytes_max=(4 << 20) - 100_000)
    with pytest.raises(UnavailableError) as full:
        await cache.put_many({f"n{n:04}": VALUE for n in range(500)})
    assert full.value.code is Code.LIMIT_MEMORY
    held = await keys(cache)
    assert {b"k%04d" % n for n in range(1_500)} <= held
    # Let it evict, make it small, let it refuse again.
    await cache.alter(bytes_max=CACHE_BYTES_MIN, eviction="lru")
    async with asyncio.timeout(120):
        while (await cache.stats()).size_bytes > CACHE_BYTES_MIN:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await cache.alter(eviction="refuse")
    with pytest.raises(UnavailableError):
        await cache.put_many({f"n{n:04}": VALUE for n in range(500)})


async def test_who_may_and_what_cannot_be(region: felix.RegionClient, node: Node) -> None:
    cache = await region.create_cache(NAME)
    await region.create_stream("acme/web/plain")
    for changes in ({"bytes_max": 5}, {"eviction": "random"}):
        with pytest.raises(RequestError) as refused:
            await cache.alter(**changes)  # type: ignore[arg-type]
        assert refused.value.code is Code.CONFIG_INVALID
    with pytest.raises(RequestError) as refused:
        await region.alter_stream("acme/web/plain", cache=CacheChange(ttl_ms=5))
    assert refused.value.code is Code.UNSUPPORTED
    async with client(node.folder, "web") as web:
        await region.put_rights(web.session.identity, [f"publish {NAME}", f"subscribe {NAME}"])
        with pytest.raises(RequestError) as refused:
            await web.cache(NAME).alter(ttl=5)
        assert refused.value.code is Code.NOT_FOUND_OR_FORBIDDEN
        await region.put_rights(web.session.identity, [f"admin {NAME}"])
        await web.cache(NAME).alter(ttl=5)
    assert (await region.describe_stream(NAME)).views.cache == CacheSettings(ttl_ms=5_000)


async def test_its_figures_are_those_of_all_its_shards(region: felix.RegionClient) -> None:
    cache = await region.create_cache(NAME, CacheSettings(bytes_max=2 << 20), shards=3)
    await region.create_stream("acme/web/plain")
    await cache.put_many({f"k{n}": b"v" for n in range(20)})
    await cache.get_many([f"k{n}" for n in range(30)])
    async with cache.watch() as watch:
        await anext(watch)
        (found,) = await region.cache_traffic()
    assert (found.stream, found.keys, found.bytes_limit, found.hits, found.misses) == (
        NAME, 20, 6 << 20, 20, 10,
    )  # fmt: skip
    assert found.watches == 1 and found.size_bytes > 20 * 400
    assert await region.cache_traffic("globex/") == []
