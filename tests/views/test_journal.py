"""The journal gives back what was appended, over restarts, snapshots, refusals and torn ends; and it does not grow for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from log.building import IDENTITY, FailingFiles, serving, until

from felix.errors import FelixError, UnavailableError
from region.log.errors import StorageFailedError
from region.log.point import LogPoint
from region.log.shard import ShardHooks, ShardLog, ShardSettings
from region.views.journal import Journal

pytestmark = pytest.mark.timeout(60)


class Counter:
    """The simplest view: a number per name. An entry is `name value`."""

    def __init__(self, log: ShardLog | None, snapshot_bytes_min: int = 2_000) -> None:
        self.values: dict[str, int] = {}
        self.journal = Journal(log, self.state, snapshot_bytes_min=snapshot_bytes_min)

    def state(self) -> list[bytes]:
        return [f"{name} {value}".encode() for name, value in self.values.items()]

    def apply(self, entry: bytes) -> None:
        name, value = entry.decode().split()
        self.values[name] = int(value)

    async def reload(self) -> None:
        self.values.clear()
        async for entry in self.journal.replay():
            self.apply(entry)

    def put(self, name: str, value: int) -> asyncio.Future[None]:
        entry = f"{name} {value}".encode()
        self.apply(entry)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: FelixError | None) -> None:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self.journal.append(entry, done)
        return future


@asynccontextmanager
async def counting(folder: Path, files: FailingFiles | None = None) -> AsyncIterator[Counter]:
    async with serving(folder, files=files) as shard:
        counter = Counter(shard)
        await counter.reload()
        yield counter
        await counter.journal.close()


async def test_entries_come_back_in_order_after_a_restart(tmp_path: Path) -> None:
    async with counting(tmp_path) as counter:
        await asyncio.gather(*(counter.put(f"n{number % 7}", number) for number in range(50)))
        before = dict(counter.values)
    async with counting(tmp_path) as counter:
        assert counter.values == before


async def test_what_is_appended_in_one_turn_is_one_batch(tmp_path: Path) -> None:
    async with serving(tmp_path) as shard:
        counter = Counter(shard)
        await asyncio.gather(*(counter.put("n", number) for number in range(50)))
        assert shard.counters.batches == 1


async def test_a_model_over_thousands_of_entries_snapshots_and_restarts(tmp_path: Path) -> None:
    random = Random(7)
    model: dict[str, int] = {}
    snapshots = 0
    for _ in range(12):
        async with counting(tmp_path) as counter:
            assert counter.values == model
            for _ in range(40):
                waiting = []
                for _ in range(random.randrange(1, 20)):
                    name, value = f"n{random.randrange(40)}", random.randrange(10**6)
                    model[name] = value
                    waiting.append(counter.put(name, value))
                await asyncio.gather(*waiting)
            snapshots += counter.journal.snapshots
            assert counter.journal._log is not None
            # Never much more than what a snapshot is due for, and the snapshot itself.
            assert counter.journal.size_bytes < 200_000
    assert snapshots >= 12


async def test_entries_appended_while_a_snapshot_is_written_are_replayed_after_it(tmp_path: Path) -> None:
    async with counting(tmp_path) as counter:
        for number in range(200):
            counter.put(f"n{number}", number)
        counter.journal._flush()
        counter.journal._begin_snapshot()
        last = counter.put("n0", 1_000)
        await last
        await until(lambda: counter.journal.snapshots > 0)
    async with counting(tmp_path) as counter:
        assert counter.values["n0"] == 1_000
        assert len(counter.values) == 200


async def test_an_unfinished_snapshot_counts_for_nothing(tmp_path: Path) -> None:
    async with counting(tmp_path) as counter:
        await counter.put("kept", 1)
        counter.journal._append([b"\1"], lambda error: None)
        counter.journal._append([b"\2stale 5"], lambda error: None)
        await counter.put("later", 2)
    async with counting(tmp_path) as counter:
        assert counter.values == {"kept": 1, "later": 2}


async def test_after_a_refusal_nothing_is_taken_until_the_entries_are_replayed(tmp_path: Path) -> None:
    files = FailingFiles()
    async with counting(tmp_path, files) as counter:
        await counter.put("a", 1)
        files.room = 0
        with pytest.raises(FelixError):
            await counter.put("a", 2)
        assert counter.journal.lost is not None and counter.journal.refusal() is not None
        with pytest.raises(FelixError):
            await counter.put("a", 3)
        files.room = None
        await counter.reload()
        assert counter.values == {"a": 1}
        shard = counter.journal._log
        assert shard is not None
        shard._core._retry_at = 0
        await counter.put("a", 4)
    async with counting(tmp_path) as counter:
        assert counter.values == {"a": 4}


async def test_of_a_log_that_ended_nothing_is_replayed_though_it_holds_nothing(tmp_path: Path) -> None:
    """A replay that succeeds lets the view decide, which would fail at once and bring the next one."""
    async with serving(tmp_path) as shard:
        counter = Counter(shard)
        await counter.reload()
        shard.stop(StorageFailedError("The disk failed."))
        with pytest.raises(StorageFailedError):
            await counter.put("n", 1)
        with pytest.raises(StorageFailedError):
            await counter.reload()
        assert counter.journal.lost is not None


async def test_an_ephemeral_view_keeps_nothing_and_waits_for_nothing() -> None:
    counter = Counter(None)
    await counter.put("a", 1)
    assert counter.values == {"a": 1}
    await counter.reload()
    assert counter.values == {}


async def test_a_receiver_that_fails_keeps_nobody_else_of_its_group_waiting(tmp_path: Path) -> None:
    async with counting(tmp_path) as counter:

        def failing(error: FelixError | None) -> None:
            raise RuntimeError("a mistake")

        counter.journal.append(b"n 1", failing)
        async with asyncio.timeout(120):
            await counter.put("m", 2)
            await counter.reload()
        assert counter.values == {"n": 1, "m": 2}


async def test_until_a_replay_has_come_to_its_end_nothing_is_decided(tmp_path: Path) -> None:
    """What is half read is no state: a replay that fails or is given up leaves the journal as lost as it was."""
    files = FailingFiles()
    async with counting(tmp_path, files) as counter:
        await asyncio.gather(*(counter.put(f"n{number}", number) for number in range(10)))
        files.room = 0
        with pytest.raises(FelixError):
            await counter.put("n1", 99)
        files.room = None
        entries = counter.journal.replay()
        await anext(entries)
        await entries.aclose()
        assert counter.journal.refusal() is not None
        with pytest.raises(FelixError):
            await counter.put("n1", 100)
        await counter.reload()
        assert counter.journal.lost is None
        async with asyncio.timeout(120):
            # The disk was full a moment ago; there is no event for its end.
            while counter.journal.refusal() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert counter.values == {f"n{number}": number for number in range(10)}


class Nowhere:
    """The other copies are gone: nothing is committed any more."""

    def committed(self, durable: LogPoint) -> LogPoint:
        return LogPoint(0)

    def acknowledged(self, durable: LogPoint) -> LogPoint:
        return LogPoint(0)

    def may_cut(self, point: LogPoint) -> bool:
        return False


async def test_of_a_log_that_is_led_elsewhere_nobody_waits_for_what_is_not_committed(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        shard = await ShardLog.open(
            tmp_path,
            IDENTITY,
            ShardSettings(),
            ShardHooks(),
            commit_pool=pool,
            read_pool=pool,
            commit=Nowhere(),
        )
        counter = Counter(shard)
        put = counter.put("n", 1)
        settling = asyncio.ensure_future(counter.journal.settled())
        await until(lambda: shard.durable_offset == 1)
        assert not settling.done()
        shard.stop(UnavailableError("another broker leads it"))
        await settling
        await counter.journal.close()
        assert not put.done()
        await shard.close()
        with pytest.raises(UnavailableError, match="may be in the log or not"):
            await put
