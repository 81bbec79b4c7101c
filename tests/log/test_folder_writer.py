"""What failures of a change in a log's folder mean for the log."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock

import pytest

from felix.errors import Code, CorruptionError, FelixError, UnavailableError
from region.log.errors import StorageFailedError
from region.log.folder_writer import FolderWriter

FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")


def failing(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


async def test_work_holds_the_lock_and_what_it_returns_is_awaited() -> None:
    lock = Lock()
    stopped: list[FelixError] = []
    with ThreadPoolExecutor(1) as pool:
        writer = FolderWriter(Path("/log"), lock, pool, asyncio.get_running_loop(), stopped.append)
        assert await writer.change(lambda name: (name, lock.locked()), "cut") == ("cut", True)
        told: asyncio.Queue[bool] = asyncio.Queue()
        writer.submit(lambda: writer.tell(partial(told.put_nowait, lock.locked())))
        assert await told.get()
    assert not lock.locked() and not stopped


@pytest.mark.parametrize(
    ("error", "raised", "stops"),
    [
        (FULL, UnavailableError, False),
        (BROKEN, StorageFailedError, True),
        (CorruptionError("A checksum does not hold."), CorruptionError, True),
    ],
)
async def test_a_change_that_fails_stops_the_log_unless_only_room_is_wanting(
    error: Exception, raised: type[FelixError], stops: bool
) -> None:
    stopped: list[FelixError] = []
    with ThreadPoolExecutor(1) as pool:
        writer = FolderWriter(Path("/log"), Lock(), pool, asyncio.get_running_loop(), stopped.append)
        with pytest.raises(raised) as told:
            await writer.change(failing(error))
    assert [failure.code for failure in stopped] == [told.value.code] * stops
    assert stops or told.value.code is Code.DISK_FULL


async def test_a_shortcut_that_fails_stops_nothing() -> None:
    stopped: asyncio.Queue[FelixError] = asyncio.Queue()
    with ThreadPoolExecutor(1) as pool:
        writer = FolderWriter(Path("/log"), Lock(), pool, asyncio.get_running_loop(), stopped.put_nowait)
        writer.submit(failing(BROKEN), optional=True)
        writer.submit(failing(CorruptionError("A checksum does not hold.")))
        assert isinstance(await stopped.get(), CorruptionError)
    assert stopped.empty()
