"""A cache as an application sees it: one broker, the SDK, real connections."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from region_home import running
from region_peer import client, until

import felix
from felix import Code, FelixError, RequestError, UnavailableError
from felix.cache import Cache, Change, Position
from felix.settings import CACHE_BYTES_MIN, CacheSettings
from region.folder import RegionFolder
from region.node import Node

NAME = "acme/web/sessions"

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["fsync", "ephemeral"])
async def cache(request: pytest.FixtureRequest, region: felix.RegionClient) -> Cache:
    return await region.create_cache(NAME, shards=3, durability=felix.Durability(request.param))


async def told(watch: felix.Watch, until_: str) -> list[Change]:
    """Changes up to one of this kind, or of this key."""
    found: list[Change] = []
    async with asyncio.timeout(120):
        async for change in watch:
            found.append(change)
            if until_ in (change.kind, change.key.decode()):
                return found
    raise AssertionError


async def test_what_was_put_is_got_with_its_version_until_it_is_deleted(cache: Cache) -> None:
    assert await cache.get("a") is None
    version = await cache.put("a", b"1")
    assert await cache.get("a") == (b"1", version, None)
    assert await cache.get(b"a") == (b"1", version, None)
    newer = await cache.put("a", "two")
    assert newer > version
    entry = await cache.get("a")
    assert entry is not None and entry.value == b"two"
    assert await cache.exists("a") and await cache.ttl("a") == felix.FOREVER
    assert await cache.delete("a")
    assert not await cache.delete("a")
    assert await cache.get("a") is None and not await cache.exists("a") and await cache.ttl("a") is None


async def test_a_value_is_gone_when_its_ttl_is_over_and_every_watch_is_told(cache: Cache) -> None:
    async with cache.watch() as watch:
        assert [change.kind for change in await told(watch, "ready")] == ["ready"]
        await cache.put("brief", b"x", ttl=0.05)
        entry = await cache.get("brief")
        assert entry is None or (entry.ttl is not None and entry.ttl <= 0.05)
        found = await told(watch, "expired")
        assert [(change.kind, change.key) for change in found] == [("put", b"brief"), ("expired", b"brief")]
        assert await cache.get("brief") is None


async def test_compare_and_set_sets_once_for_a_version(cache: Cache) -> None:
    first = await cache.compare_and_set("k", b"1", version=0)
    assert first
    assert await cache.compare_and_set("k", b"2", version=0) is None
    outcomes = await asyncio.gather(
        *(cache.compare_and_set("k", b"%d" % number, version=first) for number in range(20))
    )
    (second,) = [version for version in outcomes if version]
    entry = await cache.get("k")
    assert entry is not None and entry.version == second
    assert entry.value == b"%d" % outcomes.index(second)


async def test_increments_at_once_are_all_counted(cache: Cache) -> None:
    counts = await asyncio.gather(*(cache.increment("hits") for _ in range(50)))
    assert sorted(counts) == list(range(1, 51))
    assert await cache.increment("hits", -20) == 30
    entry = await cache.get("hits")
    assert entry is not None and entry.value == b"30"
    await cache.put("word", b"x")
    with pytest.raises(RequestError):
        await cache.increment("word")
    await cache.put("large", b"%d" % ((1 << 63) - 1))
    with pytest.raises(RequestError):
        await cache.increment("large")


async def test_the_ttl_of_an_increment_counts_where_it_makes_the_key(cache: Cache) -> None:
    await cache.increment("window", ttl=100)
    await cache.increment("window", ttl=10_000)
    left = await cache.ttl("window")
    assert left is not None and left <= 100


async def test_many_keys_go_and_come_in_few_calls_and_are_scanned_in_pages(cache: Cache) -> None:
    items = {b"user:%04d" % number: b"v%d" % number for number in range(2_500)}
    versions = await cache.put_many(items)
    assert len(versions) == 2_500 and len(set(zip(versions, items, strict=True))) == 2_500
    await cache.put("other", b"x")
    assert {key: entry.value async for key, entry in cache.scan("user:")} == items
    found = await cache.get_many([*items, "missing"])
    assert {key: entry.value for key, entry in found.items()} == items
    assert await cache.delete_many(list(items)[:1_500]) == 1_500
    assert len([key async for key, _ in cache.scan()]) == 1_001
    stats = await cache.stats()
    assert (stats.keys, stats.deletes, stats.puts) == (1_001, 1_500, 2_501)
    assert stats.hits == 2_500 and stats.misses == 1


async def test_large_values_come_in_several_answers(cache: Cache) -> None:
    large = {b"large:%d" % number: bytes([number]) * 400_000 for number in range(6)}
    await cache.put_many(large)
    assert {key: entry.value for key, entry in (await cache.get_many(large)).items()} == large
    assert {key: entry.value async for key, entry in cache.scan()} == large


async def test_a_watch_tells_the_state_then_changes_and_resumes_where_it_was(cache: Cache) -> None:
    await cache.put_many({"a:1": b"1", "a:2": b"2", "b:1": b"x"})
    async with cache.watch(prefix="a:") as watch:
        begun = await told(watch, "ready")
        assert {change.key: change.value for change in begun[:-1]} == {b"a:1": b"1", b"a:2": b"2"}
        assert begun[0].position is None
        await cache.put("a:3", b"3")
        await cache.put("b:2", b"x")
        await cache.delete("a:1")
        changes = await told(watch, "deleted")
        assert [(change.kind, change.key) for change in changes] == [("put", b"a:3"), ("deleted", b"a:1")]
        position = changes[-1].position
        assert position is not None
    await cache.put("a:4", b"4")
    async with cache.watch(prefix="a:", resume=str(position)) as watch:
        first, *_ = await told(watch, "ready")
        assert (first.kind, first.key) == ("put", b"a:4")


async def test_a_position_of_another_incarnation_begins_with_a_reset(cache: Cache) -> None:
    await cache.put("a", b"1")
    async with cache.watch(resume=Position(bytes(16), {0: 0, 1: 0, 2: 0})) as watch:
        assert [change.kind for change in await told(watch, "ready")] == ["reset", "put", "ready"]


async def test_a_watch_of_one_key_tells_only_of_it(cache: Cache) -> None:
    async with cache.watch(key="a") as watch:
        await told(watch, "ready")
        await cache.put("ab", b"1")
        await cache.put("a", b"2")
        assert [(change.kind, change.key) for change in await told(watch, "a")] == [("put", b"a")]


async def test_a_mirror_reads_like_a_dict_and_follows(cache: Cache) -> None:
    await cache.put_many({f"m:{number}": b"%d" % number for number in range(100)})
    async with cache.mirror("m:") as mirror:
        assert len(mirror) == 100 and mirror["m:7"] == b"7" and "m:100" not in mirror
        version = await cache.put("m:7", b"seven")
        await mirror.reached("m:7", version)
        assert mirror["m:7"] == b"seven" and mirror.version("m:7") == version
        await cache.delete("m:7")
        await until(lambda: "m:7" not in mirror)
        await until(lambda: mirror.is_current)


async def test_plain_publishing_writes_to_the_cache_like_any_put(
    cache: Cache, region: felix.RegionClient
) -> None:
    stream = region.stream(NAME)
    async with cache.watch() as watch:
        await told(watch, "ready")
        offset = await stream.publish(b"published", key=b"p")
        entry = await cache.get("p")
        assert entry is not None and entry.value == b"published" and entry.version == offset + 1
        assert await cache.compare_and_set("p", b"set", version=entry.version)
        await stream.publish(b"", key=b"p", headers={"felix.tombstone": b"deleted"})
        assert await cache.get("p") is None
        await stream.publish(b"no key")
        await stream.publish(b"x", key=b"q", headers={"felix.expires-at": b"1000"})
        assert await cache.get("q") is None
        kinds = [(change.kind, change.key) for change in await told(watch, "expired")]
        assert kinds == [("put", b"p"), ("put", b"p"), ("deleted", b"p"), ("put", b"q"), ("expired", b"q")]


async def test_the_least_recently_used_are_evicted_and_watches_told(region: felix.RegionClient) -> None:
    cache = await region.create_cache(NAME, CacheSettings(bytes_max=CACHE_BYTES_MIN))
    value = bytes(100_000)
    async with cache.mirror() as mirror:
        await cache.put("keep", b"x")
        for number in range(30):
            await cache.put(f"k{number}", value)
            assert await cache.get("keep") is not None
        stats = await cache.stats()
        assert stats.evicted > 10 and stats.size_bytes <= CACHE_BYTES_MIN
        assert await cache.get("k0") is None and await cache.get("k29") is not None
        scanned = {key: entry.value async for key, entry in cache.scan()}
        await until(lambda: dict(mirror) == scanned)


async def test_a_cache_that_refuses_keeps_what_it_has(region: felix.RegionClient) -> None:
    cache = await region.create_cache(NAME, CacheSettings(bytes_max=CACHE_BYTES_MIN, eviction="refuse"))
    value = bytes(300_000)
    for number in range(3):
        await cache.put(f"k{number}", value)
    with pytest.raises(UnavailableError) as refused:
        await cache.put("k3", value)
    assert refused.value.code is Code.LIMIT_MEMORY
    await cache.put("k0", bytes(299_000))
    await cache.delete("k1")
    await cache.put("k3", value)
    assert {key async for key, _ in cache.scan()} == {b"k0", b"k2", b"k3"}


async def test_the_ttl_of_the_cache_counts_where_a_put_names_none(region: felix.RegionClient) -> None:
    cache = await region.create_cache(NAME, CacheSettings(ttl_ms=60_000))
    await cache.put("a", b"1")
    await cache.put("b", b"1", ttl=felix.FOREVER)
    left = await cache.ttl("a")
    assert left is not None and left <= 60
    assert await cache.ttl("b") == felix.FOREVER
    await region.stream(NAME).publish(b"1", key=b"c")
    left = await cache.ttl("c")
    assert left is not None and left <= 60


async def test_everything_is_back_after_a_restart_and_watches_go_on(
    folder: RegionFolder, tmp_path: Path
) -> None:
    data = str(tmp_path / "data")
    async with client_over_restarts(folder, data) as (region, restart):
        cache = await region.create_cache(NAME, shards=2)
        await cache.put_many({f"k{number}": b"%d" % number for number in range(50)})
        await cache.put("brief", b"x", ttl=0.2)
        await cache.delete("k0")
        version = await cache.put("k1", b"one")
        await cache.increment("count", 5)
        async with cache.mirror() as mirror:
            assert len(mirror) in (50, 51)
            await restart()
            assert await cache.get("k1") == (b"one", version, None)
            assert await cache.get("k0") is None
            assert await cache.increment("count") == 6
            await cache.put("after", b"1")
            await until(lambda: "after" in mirror and "brief" not in mirror)
            assert dict(mirror) == {key: entry.value async for key, entry in cache.scan()}
            assert len(mirror) == 51


class client_over_restarts:
    """A client, and what stops the broker and starts it again under its feet."""

    def __init__(self, folder: RegionFolder, data: str) -> None:
        self._folder, self._data = folder, data

    async def __aenter__(self) -> tuple[felix.RegionClient, object]:
        import socket

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        await self._start()
        self._client = client(self._folder)
        await self._client.open()
        return self._client, self._restart

    async def _start(self) -> None:
        from felix.address import Address

        self._running = running(self._folder, data=self._data, listen=Address("127.0.0.1", self._port))
        await self._running.__aenter__()

    async def _restart(self) -> None:
        await self._running.__aexit__(None, None, None)
        await self._start()

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        await self._running.__aexit__(None, None, None)


async def test_rights_are_asked_for_each_side_and_end_watches_at_once(node: Node) -> None:
    from felix.runtime.real import now_ms
    from region.bootstrap import issue_identity
    from region.config import load_config

    issue_identity(node.folder, load_config(node.folder.config), "client", "web", now_ms())
    identity = "spiffe://us-east.acme/client/web"
    async with client(node.folder) as operator, client(node.folder, "web") as web:
        mine = await operator.create_cache(NAME)
        await mine.put("a", b"1")
        cache = web.cache(NAME)
        for attempt in (cache.get("a"), cache.put("a", b"2"), cache.stats()):
            with pytest.raises(FelixError) as refused:
                await attempt
            assert refused.value.code is Code.NOT_FOUND_OR_FORBIDDEN
        await operator.put_rights(identity, [f"subscribe {NAME}"])
        assert (await cache.get("a")) is not None
        with pytest.raises(FelixError) as refused:
            await cache.put("a", b"2")
        assert refused.value.code is Code.NOT_FOUND_OR_FORBIDDEN
        async with cache.watch() as watch:
            await told(watch, "ready")
            await operator.put_rights(identity, [f"publish {NAME}"])
            with pytest.raises(FelixError) as refused:
                await asyncio.wait_for(anext(watch), 20)
            assert refused.value.code is Code.NOT_FOUND_OR_FORBIDDEN
        await cache.put("a", b"2")
        with pytest.raises(FelixError):
            await cache.get("a")
        with pytest.raises(FelixError):
            await web.create_cache("acme/web/other")


async def test_a_deleted_cache_ends_watches_and_a_new_one_of_its_name_is_empty(
    region: felix.RegionClient,
) -> None:
    cache = await region.create_cache(NAME)
    await cache.put("a", b"1")
    async with cache.watch() as watch:
        await told(watch, "ready")
        await region.delete_stream(NAME)
        with pytest.raises(FelixError):
            await asyncio.wait_for(anext(watch), 20)
    with pytest.raises(FelixError):
        await cache.get("a")
    await region.create_cache(NAME)
    assert await cache.get("a") is None


async def test_a_stream_is_no_cache_and_a_cache_has_no_retention(region: felix.RegionClient) -> None:
    await region.create_stream("acme/web/plain")
    with pytest.raises(RequestError) as refused:
        await region.cache("acme/web/plain").get("a")
    assert refused.value.code is Code.UNSUPPORTED
    with pytest.raises(RequestError) as refused:
        await region.create_stream(
            NAME, retention=felix.Retention(3_600_000), views=felix.settings.Views(cache=CacheSettings())
        )
    assert refused.value.code is Code.CONFIG_INVALID


async def test_what_cannot_travel_is_refused_here(cache: Cache) -> None:
    for attempt in (
        cache.put("", b"x"),
        cache.put("k" * 5000, b"x"),
        cache.put("k", bytes(2_000_000)),
        cache.put("k", b"x", ttl=0),
    ):
        with pytest.raises(RequestError):
            await attempt
    with pytest.raises(RequestError):
        cache.watch(key="a", prefix="b")
    with pytest.raises(RequestError):
        cache.watch(credit_bytes=10)
    with pytest.raises(RequestError):
        Position.parse("nonsense")


async def test_a_transaction_writes_to_caches_all_at_once_while_others_write(
    region: felix.RegionClient,
) -> None:
    cache = await region.create_cache(NAME, shards=2)
    await cache.put("count", b"0")
    keys = [b"t%d" % number for number in range(20)]

    async def count() -> None:
        for _ in range(30):
            await cache.increment("count")

    async with cache.mirror() as mirror:
        counting = asyncio.ensure_future(count())
        for round_ in range(5):
            async with region.transaction() as transaction:
                for key in keys:
                    await transaction.publish(NAME, b"%d" % round_, key=key)
                seen = await cache.get_many(keys)
                assert {entry.value for entry in seen.values()} <= {b"%d" % (round_ - 1)}
            seen = await cache.get_many(keys)
            assert {key: entry.value for key, entry in seen.items()} == dict.fromkeys(keys, b"%d" % round_)
        await counting
        assert await cache.increment("count") == 31
        await until(lambda: mirror.get(b"count") == b"31" and all(mirror[key] == b"4" for key in keys))
