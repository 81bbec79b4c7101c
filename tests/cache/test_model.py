"""A cache against a dict, through a real broker and the SDK: whatever is done, and however often broker, links and log change under
it, answers are the model's, and every watcher's replica equals the model once nothing is under way.

The broker's clock is the test's. Compaction is asked for by the test, and is as eager as it can be.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from cluster.clustered_region import ClusteredRegion
from etcd_process import EtcdProcess
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from long_runs import count, seeded
from region_home import make_region, running
from region_peer import client, until
from slow_runs import only_slow

import felix
from felix import Code, RequestError, UnavailableError
from felix.address import Address
from felix.cache import Cache, Position, Watch
from felix.runtime.real import now_ms
from felix.settings import CACHE_BYTES_MIN, CacheSettings, Compaction, Views
from region.cache.state import ENTRY_BYTES
from region.log.segment_limits import SegmentLimits
from region.node import Node
from region.streams import settings as stream_settings

SELDOM_LEAST: Final = 3
EVICTED_LEAST: Final = 100
"""How often each kind of step must have been taken; what chance leaves out is tried on."""
STEPS: Final = int(os.environ.get("FELIX_CACHE_STEPS", count(1_500, 10_000)))
STEPS_FEW: Final = count(600, 10_000)
STEPS_PER_EXAMPLE: Final = 250
ROUNDS_MOST: Final = 20
GONE_ROUNDS: Final = 20
GONE_RECORDS: Final = 40
WAIT_S: Final = 60.0

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

T = TypeVar("T")
KEYS = [
    *(b"user:%d" % number for number in range(12)),
    *(b"n:%d" % number for number in range(4)),
    b"k",
    b"\xff\x00",
]
SIZES = st.runner().flatmap(lambda machine: machine.sizes)
TTLS = st.runner().flatmap(lambda machine: machine.ttls)
PREFIXES = [b"", b"user:", b"user:1", b"n:"]


class World:
    """One broker over all examples, on a clock of its own, and a client of it."""

    def __init__(self, home: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = make_region(home, "us-east")
        self.later_ms = 0
        self.steps: Counter[str] = Counter()
        self.looks = 0
        self.caches = 0
        self.node: Node
        self.run(self._open(home))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 2 * WAIT_S))

    def now_ms(self) -> int:
        return now_ms() + self.later_ms

    async def _open(self, home: Path) -> None:
        self.data = str(home / "data")
        self.address = Address("127.0.0.1", 0)
        await self._start()
        self.address = self.node.address
        self.client = client(self.folder)
        await self.client.open()

    async def _start(self) -> None:
        self._running = running(self.folder, data=self.data, listen=self.address)
        self.node = await self._running.__aenter__()
        self.node.broker.clock_ms = self.now_ms

    async def restart(self) -> None:
        await self._running.__aexit__(None, None, None)
        await self._start()

    async def close(self) -> None:
        await self.client.close()
        await self._running.__aexit__(None, None, None)


class ClusteredWorld(World):
    """Two brokers, of which one leads every cache, and a client that was told of the other one alone."""

    def __init__(self, home: Path, etcd: EtcdProcess) -> None:
        self.etcd = etcd
        super().__init__(home)

    async def _open(self, home: Path) -> None:
        self.region = ClusteredRegion(home / "several", self.etcd, 2)
        await self.region.start("b1", "b2")
        await self.region.drain("b1")
        self._take_leader()
        self.client = self.region.client("b1")
        await self.client.open()

    def _take_leader(self) -> None:
        self.node = self.region.nodes["b2"]
        self.node.broker.clock_ms = self.now_ms

    async def restart(self) -> None:
        await self.region.stop("b2")
        await self.region.start("b2")
        self._take_leader()

    async def close(self) -> None:
        await self.client.close()
        await self.region.stop()


WORLD: World | None = None


class Value:
    def __init__(self, value: bytes, version: int, expires_at_ms: int | None) -> None:
        self.value, self.version, self.expires_at_ms = value, version, expires_at_ms


class Replica:
    """What a watcher makes of what it is told, however slowly; it may go away and come back where it was."""

    def __init__(self, cache: Cache, prefix: bytes, coalesce: bool) -> None:
        self.cache, self.prefix, self.coalesce = cache, prefix, coalesce
        self.values: dict[bytes, tuple[bytes, int]] = {}
        self.position: Position | None = None
        self.paused = asyncio.Event()
        self.paused.set()
        self.watch: Watch
        self.begin()

    def begin(self) -> None:
        if self.position is None:
            self.values.clear()
        self.watch = self.cache.watch(prefix=self.prefix, resume=self.position, coalesce=self.coalesce)
        self.task = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        async for change in self.watch:
            await self.paused.wait()
            if change.kind == "reset":
                self.values.clear()
                WORLD.steps["reset"] += 1  # type: ignore[union-attr]
            elif change.kind == "put":
                assert change.key.startswith(self.prefix) and change.value is not None
                # A key only moves forward, within one telling.
                assert change.version > self.values.get(change.key, (b"", 0))[1]
                self.values[change.key] = change.value, change.version
            elif change.kind != "ready":
                self.values.pop(change.key, None)
            self.position = change.position

    async def leave(self) -> None:
        self.watch.close()
        self.task.cancel()
        with suppress(asyncio.CancelledError, UnavailableError):
            await self.task


class CacheAgainstDict(RuleBasedStateMachine):
    """Values with ttls, in three shards; nothing is evicted."""

    settings: Final = CacheSettings()
    shards: Final = 3
    sizes: Final = st.integers(0, 300)
    times: Final = True

    def __init__(self) -> None:
        super().__init__()
        assert WORLD is not None
        self.world = WORLD
        self.world.caches += 1
        self.name = f"acme/model/cache-{self.world.caches}"
        self.mine: Counter[str] = Counter()
        self.model: OrderedDict[bytes, Value] = OrderedDict()
        self.replicas: list[Replica] = []
        self.world.run(self._create())

    async def _create(self) -> None:
        await self.world.client.create_stream(
            self.name,
            shards=self.shards,
            views=Views(cache=self.settings, compaction=Compaction(tombstone_ms=1_000)),
        )
        self.cache = self.world.client.cache(self.name)
        for prefix in PREFIXES[:2]:
            self.replicas.append(Replica(self.cache, prefix, coalesce=bool(prefix)))

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.world.run(self._end())

    async def _end(self) -> None:
        try:
            await self.come_back_to_what_is_gone()
            await self._quiet()
        finally:
            for replica in self.replicas:
                await replica.leave()
            await self.world.client.delete_stream(self.name)

    async def come_back_to_what_is_gone(self) -> None:
        """A watcher returns to where it was when the tombstones after that are compacted away: chance alone brings it there too seldom."""
        replica, key, resets = self.replicas[0], b"gone", self.world.steps["reset"]
        for _ in range(GONE_ROUNDS):
            replica.paused.set()
            if replica.task.done():
                replica.begin()
            await self.cache.put(key, b"")
            await until(lambda: key in replica.values)
            await replica.leave()
            await self.cache.delete(key)
            # Into another segment, in each shard: that of the tombstone is compacted once it takes no more.
            for number in range(GONE_RECORDS):
                await self.cache.put(b"later:%d" % number, b"g" * 300)
            await self.cache.delete_many([b"later:%d" % number for number in range(GONE_RECORDS)])
            await self._compact()
            replica.begin()
            await until(lambda: key not in replica.values)
            if self.world.steps["reset"] > resets:
                return
        raise AssertionError(f"{GONE_ROUNDS} rounds, and no watcher was told to begin anew")

    # -- the model

    def step(self, kind: str, count: int = 1) -> None:
        self.world.steps[kind] += count
        self.mine.update((kind, "all"))
        self.world.looks += 1
        if self.world.looks % 50 == 0:
            self.world.run(self._look())

    def live(self, key: bytes) -> Value | None:
        held = self.model.get(key)
        if held is None or (held.expires_at_ms is not None and self.world.now_ms() >= held.expires_at_ms):
            return None
        return held

    def touched(self, key: bytes) -> None:
        self.model.move_to_end(key)

    def wrote(self, key: bytes, value: bytes, version: int, ttl_s: float | None) -> None:
        before = self.model.get(key)
        assert before is None or version > before.version
        expires = None if ttl_s is None else self.world.now_ms() + int(ttl_s * 1000)
        self.model[key] = Value(value, version, expires)
        self.model.move_to_end(key)

    def make_room(self, key: bytes, value: bytes) -> None: ...

    async def _look(self) -> None:
        """Everything that is there, as a scan tells it."""
        found = {key: (entry.value, entry.version) async for key, entry in self.cache.scan()}
        assert found == {
            key: (held.value, held.version) for key, held in self.model.items() if self.live(key) is not None
        }

    async def _quiet(self) -> None:
        """Let every watcher catch up, and compare."""
        await self._look()
        for replica in self.replicas:
            replica.paused.set()
            if replica.task.done():
                replica.begin()

            def same(replica: Replica = replica) -> bool:
                assert not replica.task.done() or replica.task.result() is None
                return replica.values == {
                    key: (held.value, held.version)
                    for key, held in self.model.items()
                    if key.startswith(replica.prefix) and self.live(key) is not None
                }

            try:
                async with asyncio.timeout(WAIT_S):
                    while not same():  # noqa: ASYNC110 - nobody announces it
                        await asyncio.sleep(0.002)
            except TimeoutError:
                wanted = {key: held.version for key, held in self.model.items() if self.live(key)}
                found = {key: version for key, (_, version) in replica.values.items()}
                raise AssertionError(f"{replica.prefix!r} told {found}, model has {wanted}") from None

    # -- rules: one key

    # Far enough from the test's own pace that no ttl ends between an answer and its check.
    ttls = st.sampled_from([None, None, None, 100.0, 1_000.0])

    @rule(key=st.sampled_from(KEYS), size=SIZES, ttl=TTLS)
    def put(self, key: bytes, size: int, ttl: float | None) -> None:
        value = bytes([size % 251]) * size
        self.make_room(key, value)
        self.wrote(key, value, self.world.run(self.cache.put(key, value, ttl=ttl)), ttl)
        self.step("put")

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: bytes) -> None:
        entry, held = self.world.run(self.cache.get(key)), self.live(key)
        assert (entry and (entry.value, entry.version)) == (held and (held.value, held.version))
        if held is not None:
            assert entry is not None and (entry.ttl is None) == (held.expires_at_ms is None)
            self.touched(key)
        self.step("get")

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: bytes) -> None:
        assert self.world.run(self.cache.delete(key)) == (self.live(key) is not None)
        self.model.pop(key, None)
        self.step("delete")

    @rule(key=st.sampled_from(KEYS), right=st.booleans(), size=SIZES, ttl=TTLS)
    def compare_and_set(self, key: bytes, right: bool, size: int, ttl: float | None) -> None:
        held = self.live(key)
        current = held.version if held is not None else 0
        value = b"c" * size
        expected = current if right else current + 1
        if right:
            self.make_room(key, value)
        version = self.world.run(self.cache.compare_and_set(key, value, version=expected, ttl=ttl))
        assert (version is not None) == right
        if version is not None:
            self.wrote(key, value, version, ttl)
        self.step("compare_and_set")

    @rule(key=st.sampled_from(KEYS), by=st.integers(-5, 5), times=st.integers(1, 6), ttl=TTLS)
    def increments_at_once(self, key: bytes, by: int, times: int, ttl: float | None) -> None:
        held = self.live(key)
        if held is not None and (not held.value.removeprefix(b"-").isdigit() or len(held.value) > 20):
            with pytest.raises(RequestError):
                self.world.run(self.cache.increment(key, by))
            self.step("increment")
            return
        before = int(held.value) if held is not None else 0
        self.make_room(key, b"%d" % (before + by * times))

        async def all_at_once() -> list[int]:
            return await asyncio.gather(*(self.cache.increment(key, by, ttl=ttl) for _ in range(times)))

        numbers = self.world.run(all_at_once())
        assert sorted(numbers) == sorted(before + by * (number + 1) for number in range(times))
        entry = self.world.run(self.cache.get(key))
        assert entry is not None and entry.value == b"%d" % (before + by * times)
        expires = held.expires_at_ms if held is not None else None
        self.wrote(key, entry.value, entry.version, ttl if held is None else None)
        if held is not None:
            self.model[key].expires_at_ms = expires
        self.step("increment", times)

    @rule(key=st.sampled_from(KEYS), racers=st.integers(2, 8))
    def compare_and_set_races(self, key: bytes, racers: int) -> None:
        held = self.live(key)
        current = held.version if held is not None else 0
        self.make_room(key, b"racer 1")

        async def race() -> list[int | None]:
            return await asyncio.gather(
                *(self.cache.compare_and_set(key, b"racer %d" % n, version=current) for n in range(racers))
            )

        outcomes = self.world.run(race())
        ((winner, version),) = [(n, version) for n, version in enumerate(outcomes) if version is not None]
        self.wrote(key, b"racer %d" % winner, version, None)
        self.step("compare_and_set", racers)

    # -- rules: many keys, and other ways in

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=8, unique=True), size=SIZES)
    def put_many(self, keys: list[bytes], size: int) -> None:
        value = b"m" * size
        for key in keys:
            self.make_room(key, value)
            before = self.model.pop(key, None)
            self.model[key] = Value(value, before.version if before is not None else 0, None)
        versions = self.world.run(self.cache.put_many(dict.fromkeys(keys, value)))
        for key, version in zip(keys, versions, strict=True):
            # The first of them may have been evicted for the last ones.
            if key in self.model:
                self.wrote(key, value, version, None)
        self.step("put", len(keys))

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=8, unique=True))
    def get_and_delete_many(self, keys: list[bytes]) -> None:
        found = self.world.run(self.cache.get_many(keys))
        expected = {key: held for key in keys if (held := self.live(key)) is not None}
        assert {key: entry.version for key, entry in found.items()} == {
            key: held.version for key, held in expected.items()
        }
        assert self.world.run(self.cache.delete_many(keys)) == len(expected)
        for key in expected:
            del self.model[key]
        self.step("delete", 2 * len(keys))

    @rule(prefix=st.sampled_from(PREFIXES))
    def scan(self, prefix: bytes) -> None:
        async def keys() -> list[bytes]:
            return [key async for key, _ in self.cache.scan(prefix)]

        found = self.world.run(keys())
        assert sorted(found) == sorted(
            key for key in self.model if key.startswith(prefix) and self.live(key) is not None
        )
        self.step("scan")

    @rule(
        key=st.sampled_from(KEYS),
        size=SIZES,
        kind=st.sampled_from(["put", "timed", "deleted", "no key"]),
    )
    def publish(self, key: bytes, size: int, kind: str) -> None:
        stream, value = self.world.client.stream(self.name), b"p" * size
        if kind == "no key":
            self.world.run(stream.publish(value))
        elif kind == "deleted":
            self.world.run(stream.publish(b"", key=key, headers={"felix.tombstone": b"deleted"}))
            self.model.pop(key, None)
        else:
            headers = None
            if kind == "timed" and self.times:
                headers = {"felix.expires-at": b"%d" % (self.world.now_ms() + 100_000)}
            offset = self.world.run(stream.publish(value, key=key, headers=headers))
            self.wrote(key, value, offset + 1, 100.0 if headers else None)
            self.made_too_much()
        self.step("publish")

    def made_too_much(self) -> None: ...

    # -- rules: time, restarts, links, the log

    @rule(seconds=st.sampled_from([50, 150, 2_000]))
    def time_passes(self, seconds: int) -> None:
        self.world.later_ms += seconds * 1000
        self.step("time")

    @precondition(lambda self: self.mine["restart"] * 200 + 100 < self.mine["all"])
    @rule()
    def restart(self) -> None:
        self.world.run(self.world.restart())
        self.restarted()
        self.world.run(self._look())
        self.step("restart")

    def restarted(self) -> None: ...

    @precondition(lambda self: self.mine["link"] * 100 < self.mine["all"])
    @rule()
    def the_link_is_lost(self) -> None:
        link = self.world.client.connection.link
        if link is not None:
            link.fail(UnavailableError("lost by the test", code=Code.DISCONNECTED))
        self.step("link")

    @precondition(lambda self: self.mine["compact"] * 40 < self.mine["all"])
    @rule()
    def compact(self) -> None:
        self.world.run(self._compact())
        self.step("compact")

    async def _compact(self) -> None:
        await self.world.node.broker.streams.maintenance.compact(self.world.now_ms() + 10_000)
        hosted = self.world.node.broker.streams.get(felix.StreamName.parse(self.name))
        assert hosted is not None
        for shard in hosted.serving:
            self.world.steps["removed"] += shard.counters.compaction_removed_records
            shard.counters.compaction_removed_records = 0

    # -- rules: watchers

    @precondition(lambda self: len(self.replicas) < 5)
    @rule(prefix=st.sampled_from(PREFIXES), coalesce=st.booleans())
    def watch(self, prefix: bytes, coalesce: bool) -> None:
        async def begin() -> None:
            self.replicas.append(Replica(self.cache, prefix, coalesce))

        self.world.run(begin())
        self.step("watch")

    @rule(which=st.integers(0, 4))
    def watcher_leaves_or_comes_back(self, which: int) -> None:
        async def change(replica: Replica) -> None:
            if replica.task.done():
                replica.begin()
            else:
                await replica.leave()

        if which < len(self.replicas):
            self.world.run(change(self.replicas[which]))
        self.step("watch")

    @rule(which=st.integers(0, 4))
    def watcher_stalls_or_goes_on(self, which: int) -> None:
        if which < len(self.replicas):
            paused = self.replicas[which].paused
            paused.clear() if paused.is_set() else paused.set()
        self.step("watch")

    @precondition(lambda self: self.mine["quiet"] * 60 < self.mine["all"])
    @rule()
    def quiet(self) -> None:
        self.world.run(self._quiet())
        self.step("quiet")


class FullCacheAgainstDict(CacheAgainstDict):
    """Large values in one shard without ttls: the least recently used are evicted, and the model says which."""

    settings: Final = CacheSettings(bytes_max=CACHE_BYTES_MIN)
    shards: Final = 1
    sizes: Final = st.sampled_from([30, 120_000, 160_000, 200_000])
    times: Final = False
    ttls = st.none()

    async def come_back_to_what_is_gone(self) -> None: ...

    def held_bytes(self) -> int:
        return sum(len(key) + len(held.value) + ENTRY_BYTES for key, held in self.model.items())

    def evict(self, sparing: bytes, more: int) -> None:
        while self.held_bytes() + more > CACHE_BYTES_MIN:
            oldest = next(key for key in self.model if key != sparing)
            del self.model[oldest]
            self.world.steps["evicted"] += 1

    def make_room(self, key: bytes, value: bytes) -> None:
        before = self.model.get(key)
        size = len(key) + len(value) + ENTRY_BYTES
        self.evict(key, size - (len(key) + len(before.value) + ENTRY_BYTES if before is not None else 0))

    def made_too_much(self) -> None:
        self.evict(b"", 0)

        async def settled() -> None:
            while (await self.cache.stats()).size_bytes != self.held_bytes():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

        try:
            self.world.run(settled())
        except TimeoutError:
            found = self.world.run(self.cache.stats())
            raise AssertionError(f"{found}, model {self.held_bytes()}, {len(self.model)} keys") from None

    def restarted(self) -> None:
        # What was read last is not kept: the order is that of the log.
        for key in sorted(self.model, key=lambda key: self.model[key].version):
            self.model.move_to_end(key)


@pytest.mark.parametrize(
    ("machine", "segment_bytes", "steps"),
    [
        pytest.param(CacheAgainstDict, 4_000, STEPS_FEW, id="ttls"),
        pytest.param(CacheAgainstDict, 4_000, STEPS, marks=only_slow, id="ttls, longer"),
        pytest.param(FullCacheAgainstDict, 2_000_000, STEPS // 2, id="evictions"),
    ],
)
def test_whatever_is_done_answers_and_watchers_are_the_models(
    machine: type[CacheAgainstDict], segment_bytes: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_settings, "COMPACTED_SEGMENTS", SegmentLimits(segment_bytes_max=segment_bytes))
    home = Path(tempfile.mkdtemp(prefix="felix-cache-"))
    compare(World(home), home, machine, steps)


@only_slow
@pytest.mark.etcd
def test_the_same_through_a_broker_that_does_not_lead(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(stream_settings, "COMPACTED_SEGMENTS", SegmentLimits(segment_bytes_max=4_000))
    home = Path(tempfile.mkdtemp(prefix="felix-cache-"))
    etcd = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    etcd.start()
    try:
        compare(ClusteredWorld(home, etcd), home, CacheAgainstDict, STEPS // 3)
    finally:
        etcd.stop()


def compare(world: World, home: Path, machine: type[CacheAgainstDict], wanted: int) -> None:
    """At least so many steps, and some of each kind."""
    global WORLD
    WORLD = world
    least = dict.fromkeys(("restart", "link", "compact", "quiet", "watch"), SELDOM_LEAST)
    least |= {"evicted": EVICTED_LEAST} if machine is FullCacheAgainstDict else {"reset": 1, "removed": 1}

    def lacks_some() -> bool:
        return any(world.steps[kind] < number for kind, number in least.items())

    try:
        # An example leaves out kinds of steps as a whole, so that others come more often: several are wanted, each of its own seed.
        for number in range(ROUNDS_MOST):
            if world.looks >= wanted and not lacks_some():
                break
            run_state_machine_as_test(
                seeded(machine, number),
                settings=settings(
                    max_examples=wanted // STEPS_PER_EXAMPLE // 2 + 1,
                    stateful_step_count=STEPS_PER_EXAMPLE,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    print_blob=True,
                    report_multiple_bugs=False,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        print(dict(world.steps))
        assert world.looks >= wanted
        assert not lacks_some(), world.steps
    finally:
        world.run(world.close())
        world.loop.close()
        shutil.rmtree(home)
