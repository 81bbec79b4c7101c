"""What a worker does with a disk that is full while a copy comes."""

from __future__ import annotations

import asyncio
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from region_peer import until
from replication.sealed import IDENTITY, entry

from felix.runtime.real import REAL
from felix.storage.memory import MemoryDisk
from region.log.durable_mark import MARK_NAME
from region.log.errors import FULL_RETRY_MS
from region.log.point import LogPoint
from region.replication.copying import Collect, Piece
from region.replication.disk import LogPlan, ReplicaDisk
from region.replication.history import BEGINNING, EpochStart
from region.replication.log_worker import Collected, DiskFull, LogBegun, LogWorker, Told
from region.replication.origin import Closed
from region.replication.ready import Begin, CopyFailed, Keep, Sync, Synced, Truncate, Write
from region.replication.wire import frames_from

PIECE = Piece(Closed(0, 1, 3), 0, b"abc")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("make_folder", [DiskFull(0), CopyFailed(0)]),
        ("pwritev", [Collected(0, Collect()), DiskFull(0), CopyFailed(0)]),
    ],
)
async def test_a_full_disk_ends_a_copy_and_not_the_log(call: str, expected: list[Told]) -> None:
    disk = MemoryDisk()
    told: asyncio.Queue[Told] = asyncio.Queue()
    with ThreadPoolExecutor(1) as pool:
        worker = LogWorker(
            ReplicaDisk.open(LogPlan(0, Path("/shard"), IDENTITY), files=disk.mount()),
            pool,
            REAL,
            told.put_nowait,
        )

        def full(name: str, path: Path) -> None:
            if name == call:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        disk.on_call = full
        worker.put(Collect())
        if call != "make_folder":
            worker.put(PIECE)
        assert [await told.get() for _ in expected] == expected
        assert "No space" in worker.full
        disk.on_call = None
        worker.put(Collect())
        worker.put(PIECE)
        assert [await told.get() for _ in range(2)] == [Collected(0, Collect()), Collected(0, PIECE)]
        await worker.idle()
        assert not worker.failure and not worker.full
        worker.disk.close()


class Filling:
    """A worker on a disk whose room goes."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.disk = MemoryDisk()
        self.told: list[Told] = []
        self.files = self.disk.mount()
        self.worker = LogWorker(
            ReplicaDisk.open(LogPlan(0, Path("/shard"), IDENTITY), files=self.files),
            pool,
            REAL,
            self.told.append,
        )

    def full(self, is_full: bool) -> None:
        """Creating a file finds no room, or does; the mark has its place, which is written anew."""

        def no_room(name: str, path: Path) -> None:
            if name == "pwritev" and path.suffix == ".tmp" and path.stem != MARK_NAME:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        self.disk.on_call = no_room if is_full else None

    def write(self, offset: int, epoch: int) -> LogPoint:
        """Returns where the log ends then."""
        (frame,) = frames_from(LogPoint(offset), [entry(offset, epoch)])
        starts = (EpochStart(epoch, f"{epoch:016x}", LogPoint(offset)),)
        self.worker.put(Write(0, LogPoint(offset), (frame,), starts))
        self.worker.put(Sync(0, 0))
        return frame.end


async def until_told(filling: Filling, told: Told) -> None:
    await until(lambda: told in filling.told or filling.worker.failure)
    assert not filling.worker.failure


async def test_a_commit_point_waits_for_room_and_holds_up_nothing_else() -> None:
    with ThreadPoolExecutor(1) as pool:
        filling = Filling(pool)
        worker = filling.worker
        end = filling.write(0, 1)
        await until_told(filling, Synced(0, end, 0))
        filling.full(True)
        worker.put(Keep(0, end))
        await until_told(filling, DiskFull(0))
        assert "No space" in worker.full and worker.disk.kept == BEGINNING
        # Whoever leads the log is answered meanwhile.
        assert await asyncio.wrap_future(worker.executor.submit(lambda: "done")) == "done"
        filling.full(False)
        await until(lambda: not worker.full)
        await worker.idle()
        assert worker.disk.kept == end and not worker.failure
        worker.disk.close()


async def test_a_commit_point_that_waits_for_room_is_let_go_of_where_the_log_is_cut() -> None:
    with ThreadPoolExecutor(1) as pool:
        filling = Filling(pool)
        worker = filling.worker
        end = filling.write(0, 1)
        await until_told(filling, Synced(0, end, 0))
        filling.full(True)
        worker.put(Keep(0, end))
        await until_told(filling, DiskFull(0))
        filling.full(False)
        filling.told.clear()
        worker.put(Truncate(0, BEGINNING))
        again = filling.write(0, 2)
        await until_told(filling, Synced(0, again, 0))
        await asyncio.sleep(2 * FULL_RETRY_MS / 1_000)
        assert worker.disk.kept == BEGINNING, "it says that nothing is lost here"
        worker.disk.close()


@pytest.mark.parametrize("fails", range(12))
async def test_a_cut_goes_on_wherever_the_disk_was_full(fails: int) -> None:
    """The call that fails is one after the other of those that write."""
    with ThreadPoolExecutor(1) as pool:
        filling = Filling(pool)
        worker = filling.worker
        ends = [filling.write(number, number + 1) for number in range(3)]
        worker.put(Keep(0, ends[-1]))
        await until_told(filling, Synced(0, ends[-1], 0))
        await worker.idle()
        calls = 0

        def no_room(name: str, path: Path) -> None:
            nonlocal calls
            if name == "pwritev" and path.suffix == ".tmp" and path.stem != MARK_NAME:
                calls += 1
                if calls == fails + 1:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        filling.disk.on_call = no_room
        # On a busy machine the log was synced as far as that before it is cut, too.
        filling.told.clear()
        worker.put(Truncate(0, ends[0]))
        again = filling.write(1, 5)
        await until_told(filling, Synced(0, again, 0))
        assert not worker.failure and not worker.full
        assert (DiskFull(0) in filling.told) is (calls > fails)
        worker.disk.close()
        filling.disk.on_call = None
        opened = ReplicaDisk.open(LogPlan(0, Path("/shard"), IDENTITY), files=filling.disk.mount())
        assert [start.epoch for start in opened.history.starts] == [1, 5]
        assert opened.log.epochs.current == 5 and opened.log.end_point == again
        assert opened.kept == ends[0] and not opened.is_short
        opened.close()


async def test_an_epoch_begins_once_there_is_room_and_stands_on_the_disk_then() -> None:
    with ThreadPoolExecutor(1) as pool:
        filling = Filling(pool)
        worker = filling.worker
        worker.disk.is_anew = True
        filling.full(True)
        start = EpochStart(3, f"{3:016x}", BEGINNING)
        worker.put(Begin(0, start))
        await until_told(filling, DiskFull(0))
        assert LogBegun(0, 3) not in filling.told
        filling.full(False)
        await until_told(filling, LogBegun(0, 3))
        await worker.idle()
        assert not worker.full and not worker.failure
        filling.disk.kill()
        opened = ReplicaDisk.open(LogPlan(0, Path("/shard"), IDENTITY), files=filling.disk.mount())
        assert opened.history.last == start
        opened.close()


async def test_frames_and_epochs_wait_for_descriptors() -> None:
    with ThreadPoolExecutor(1) as pool:
        filling = Filling(pool)
        worker = filling.worker
        first = filling.write(0, 1)
        await until_told(filling, Synced(0, first, 0))
        refused = 0

        def exhausted(name: str, path: Path) -> None:
            nonlocal refused
            if name == "open":
                refused += 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

        filling.disk.on_call = exhausted
        second = filling.write(1, 2)
        await until(lambda: refused > 1 or bool(worker.failure))
        assert not worker.failure and Synced(0, second, 0) not in filling.told
        filling.disk.on_call = None
        await until_told(filling, Synced(0, second, 0))
        filling.disk.on_call = exhausted
        refused = 0
        worker.put(Keep(0, second))
        await until(lambda: refused > 1 or bool(worker.failure))
        filling.disk.on_call = None
        await until(lambda: worker.disk.kept == second or bool(worker.failure))
        assert not worker.failure
        worker.disk.close()
