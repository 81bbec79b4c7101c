"""One shard over a real log: what is refused takes what rests on it along, others' appends count from their append on, operations
are carried out once, and a log read again gives the same state."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from log.building import FailingFiles, serving, until
from msgspec.structs import replace

from felix.batch import Batch, NewRecord, body_checksum, encode_batch
from felix.cache_messages import DEFAULT_TTL
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.names import StreamName
from felix.settings import CACHE_BYTES_MIN, CacheSettings, Durability
from region.cache import shard as cache_shard
from region.cache.shard import CacheShard
from region.cache.state import ENTRY_BYTES
from region.limits.budget import Budget
from region.log.errors import read_failed
from region.log.point import LogPoint
from region.log.ring import Entry
from region.log.shard import ShardHooks, ShardLog, ShardSettings
from region.streams.settings import delivery_frame

NAME = StreamName.parse("acme/web/sessions")

pytestmark = pytest.mark.timeout(60)


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


class Held:
    """A loaded shard, its calls awaited."""

    def __init__(self, shard: CacheShard, clock: Clock, budget: Budget) -> None:
        self.shard, self.clock, self.budget = shard, clock, budget

    def _waiter(self) -> tuple[asyncio.Future[int], cache_shard.Waiter]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def done(version: int, error: FelixError | None) -> None:
            if error is None:
                future.set_result(version)
            else:
                future.set_exception(error)

        return future, done

    def put(self, key: bytes, value: bytes, ttl_ms: int = DEFAULT_TTL) -> asyncio.Future[int]:
        future, done = self._waiter()
        self.shard.put(key, value, ttl_ms, done)
        return future

    def delete(self, key: bytes) -> asyncio.Future[int]:
        future, done = self._waiter()
        self.shard.delete(key, done)
        return future

    def swap(self, key: bytes, value: bytes, version: int, operation: bytes) -> asyncio.Future[int]:
        """The new version, or less than 0: the version that stands, negative, less one."""
        future, done = self._waiter()
        self.shard.compare_and_set(
            key, value, version, DEFAULT_TTL, operation, done, lambda found, error: done(-1 - found, error)
        )
        return future

    def count(self, key: bytes, operation: bytes, by: int = 1) -> asyncio.Future[int]:
        future, done = self._waiter()
        self.shard.increment(key, by, DEFAULT_TTL, operation, lambda number, _, error: done(number, error))
        return future

    def get(self, key: bytes) -> bytes | None:
        entry = self.shard.up_to_date().get(key, self.clock())
        return None if entry is None else entry.value

    @property
    def values(self) -> dict[bytes, bytes]:
        return {
            key: entry.value
            for key, entry in self.shard.up_to_date().entries.items()
            if entry.lives(self.clock())
        }


@asynccontextmanager
async def holding(
    folder: Path | None,
    settings: CacheSettings | None = None,
    files: FailingFiles | None = None,
    budget_bytes: int = 1 << 30,
) -> AsyncIterator[Held]:
    clock, budget = Clock(), Budget("cache", budget_bytes)
    durability = Durability("fsync" if folder else "ephemeral", 0)
    hooks = ShardHooks(frame_prefix=delivery_frame)
    async with serving(folder, ShardSettings(durability), hooks, files) as log:
        shard = CacheShard(
            NAME,
            3,
            log,
            settings or CacheSettings(),
            budget,
            Budget("catch_up", 1 << 26),
            clock,
            time.monotonic,
        )
        await shard.load()
        try:
            yield Held(shard, clock, budget)
        finally:
            await shard.close()
            assert budget.used_bytes == 0


async def test_a_cache_whose_log_is_cut_below_what_it_applied_shows_nothing_of_it(tmp_path: Path) -> None:
    async with holding(tmp_path) as held:
        await held.put(b"a", b"1")
        kept = held.shard.log.high_watermark
        await held.put(b"a", b"2")
        await held.shard.log.truncate(LogPoint(kept))
        with pytest.raises(UnavailableError, match=f"was cut at offset {kept}") as refused:
            held.shard.check()
        assert refused.value.code is Code.SHARD_STOPPED
    async with holding(tmp_path) as held:
        assert held.values == {b"a": b"1"}


async def test_a_cache_whose_log_cannot_be_read_for_a_moment_is_read_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a start, and where its stream is opened again: nothing is wrong with the log, and nobody else would read it."""
    async with holding(tmp_path) as held:
        await held.put(b"a", b"1")
    read, failed = ShardLog.read, list[OSError]()

    async def fail_first(log: ShardLog, offset: int, max_bytes: int) -> list[Entry]:
        if len(failed) < 2:
            failed.append(OSError(errno.EIO, "no answer"))
            error = read_failed(failed[-1], tmp_path)
            error.retry_after_ms = 1
            raise error
        return await read(log, offset, max_bytes)

    monkeypatch.setattr(ShardLog, "read", fail_first)
    async with holding(tmp_path) as held:
        assert len(failed) == 2
        assert held.values == {b"a": b"1"}
        await held.put(b"a", b"2")


def published(key: bytes, value: bytes) -> Batch:
    return encode_batch([NewRecord(value, key)], shard=3)


async def test_a_refused_append_takes_what_was_decided_on_it_along(tmp_path: Path) -> None:
    files = FailingFiles()
    async with holding(tmp_path, files=files) as held:
        first = await held.put(b"a", b"1")
        await held.put(b"n", b"5")
        files.room = 0
        waiting = [
            held.put(b"a", b"2"),
            held.swap(b"a", b"3", first, b"o" * 16),
            held.count(b"n", b"p" * 16),
            held.count(b"n", b"q" * 16),
            held.delete(b"b"),
        ]
        assert held.get(b"a") == b"1", "nobody reads what is not durable"
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        # Nothing was there to delete, and that rested on what is durable.
        assert outcomes.pop() == 0
        assert {getattr(each, "code", None) for each in outcomes} == {Code.DISK_FULL}, outcomes
        assert held.values == {b"a": b"1", b"n": b"5"}
        files.room = None
        held.shard.log._core._retry_at = 0
        assert await held.swap(b"a", b"3", first, b"o" * 16) > first
        assert await held.count(b"n", b"p" * 16) == 6
    async with holding(tmp_path) as held:
        assert held.values == {b"a": b"3", b"n": b"6"}


async def test_what_others_append_counts_from_its_append_on(tmp_path: Path) -> None:
    async with holding(tmp_path) as held:
        first = await held.put(b"a", b"1")
        held.shard.log.append_nowait(published(b"a", b"7"), lambda _: None)
        swapped = held.swap(b"a", b"mine", first, b"o" * 16)
        counted = held.count(b"a", b"p" * 16)
        assert await swapped < -1 - first, "it has a later version, and that is told once it is durable"
        assert await counted == 8
        assert held.get(b"a") == b"8"


async def test_what_was_decided_before_anothers_append_stands_before_it(tmp_path: Path) -> None:
    async with holding(tmp_path) as held:
        mine = held.put(b"a", b"mine")
        held.shard.log.append_nowait(published(b"a", b"theirs"), lambda _: None)
        assert await mine == 1
        await until(lambda: held.get(b"a") == b"theirs")
        assert held.shard.up_to_date().entries[b"a"].version == 2


async def test_an_answer_that_rests_on_anothers_refused_append_is_refused(tmp_path: Path) -> None:
    files = FailingFiles()
    async with holding(tmp_path, files=files) as held:
        await held.put(b"a", b"1")
        files.room = 0
        held.shard.log.append_nowait(published(b"a", b"x"), lambda _: None)
        with pytest.raises(UnavailableError):
            await held.swap(b"a", b"mine", 1, b"o" * 16)
        assert held.get(b"a") == b"1"
        assert not held.shard.state.staged


@pytest.mark.parametrize("durable", [True, False])
async def test_an_operation_is_carried_out_once_however_often_it_is_asked_for(
    tmp_path: Path, durable: bool
) -> None:
    async with holding(tmp_path if durable else None) as held:
        once = [held.count(b"n", b"o" * 16, 3) for _ in range(3)]
        assert await asyncio.gather(*once) == [3, 3, 3]
        assert await held.count(b"n", b"o" * 16, 3) == 3
        version = await held.swap(b"k", b"1", 0, b"p" * 16)
        assert await held.swap(b"k", b"1", 0, b"p" * 16) == version
        await held.put(b"n", b"100")
    if durable:
        async with holding(tmp_path) as held:
            assert await held.count(b"n", b"o" * 16, 3) == 3
            assert await held.swap(b"k", b"1", 0, b"p" * 16) == version
            assert held.values == {b"n": b"100", b"k": b"1"}
            assert await held.count(b"n", b"q" * 16, 3) == 103


async def test_a_batch_that_is_none_inside_does_nothing(tmp_path: Path) -> None:
    good = published(b"a", b"1")
    body = b"\xff" * len(good.body)
    broken = Batch(replace(good.header, body_checksum=body_checksum(body)), body)
    async with holding(tmp_path) as held:
        await held.shard.log.append(broken)
        version = await held.put(b"a", b"2")
        assert held.values == {b"a": b"2"} and version == 2
        assert held.shard.malformed == 1
    async with holding(tmp_path) as held:
        assert held.values == {b"a": b"2"}


async def test_what_the_budget_has_no_room_for_is_let_go_and_stays_gone(tmp_path: Path) -> None:
    async with holding(tmp_path) as held:
        for number in range(100):
            held.put(b"%03d" % number, bytes(1_000))
        await held.put(b"last", b"x")
    room = 50 * (1_003 + ENTRY_BYTES)
    async with holding(tmp_path, budget_bytes=room) as held:
        assert len(held.values) <= 50 and held.get(b"last") == b"x" and held.get(b"000") is None
        assert held.budget.used_bytes <= room
        await until(lambda: not held.shard.state.staged and not held.shard.state.open.changes)
        kept = set(held.values)
        # One cache cannot take what the budget does not have, and evicts its own instead.
        await held.put(b"new", bytes(5_000))
        assert held.get(b"new") is not None and held.budget.used_bytes <= room
    async with holding(tmp_path) as held:
        assert set(held.values) <= kept | {b"new"}, "the tombstones are in the log"


async def test_expired_values_get_their_tombstones_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_shard, "SWEEP_KEYS_MAX", 10)
    async with holding(tmp_path) as held:
        for number in range(35):
            held.put(b"%d" % number, b"x", 500)
        await held.put(b"kept", b"x")
        held.clock.now_ms += 499
        assert len(held.values) == 36
        held.clock.now_ms += 1
        assert held.get(b"3") is None and held.values == {b"kept": b"x"}
        assert held.shard.sweep() <= 10
        await until(lambda: held.shard.state.expired == 35)
        assert len(held.shard.state.entries) == 1
    async with holding(tmp_path) as held:
        assert set(held.shard.state.entries) == {b"kept"}


async def test_deadlines_of_replaced_values_do_not_pile_up(tmp_path: Path) -> None:
    async with holding(None) as held:
        for number in range(5_000):
            held.put(b"k", b"%d" % number, 1_000_000)
        await held.put(b"k", b"last")
        assert len(held.shard.state._deadlines) < 1_100


async def test_what_does_not_fit_at_all_is_refused_at_once(tmp_path: Path) -> None:
    async with holding(None, CacheSettings(bytes_max=CACHE_BYTES_MIN)) as held:
        with pytest.raises(RequestError):
            held.put(b"k", bytes(CACHE_BYTES_MIN))


async def test_large_values_and_many_keys_of_one_turn_are_several_batches(tmp_path: Path) -> None:
    async with holding(tmp_path) as held:
        waiting = [held.put(b"%d" % number, bytes(100_000)) for number in range(20)]
        waiting += [held.put(b"n%d" % number, b"x") for number in range(10_000)]
        await asyncio.gather(*waiting)
        assert len(held.values) == 10_020
        assert 10 <= held.shard.log.counters.batches <= 15
    async with holding(tmp_path) as held:
        assert len(held.values) == 10_020
