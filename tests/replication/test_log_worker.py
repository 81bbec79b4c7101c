"""What a worker does with a disk that is full while a copy comes."""

from __future__ import annotations

import asyncio
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from replication.sealed import IDENTITY

from felix.runtime.real import REAL
from felix.storage.memory import MemoryDisk
from region.replication.copying import Collect, Piece
from region.replication.disk import LogPlan, ReplicaDisk
from region.replication.log_worker import Collected, DiskFull, LogWorker, Told
from region.replication.origin import Closed
from region.replication.ready import CopyFailed

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
