"""What changes a log's folder beside its groups of appends: in threads of the commit pool, one at a time.

Invariants: whoever writes there holds `lock`; a failure other than a full disk stops the log, unless the work is a shortcut that recovery can
do without. `submit` and `change` are called on the loop, `tell` in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from threading import Lock
from typing import TypeVar

from felix.errors import CorruptionError, FelixError
from region.log.errors import StorageFailedError, storage_error

_T = TypeVar("_T")


class FolderWriter:
    """Of one log. `stop` stops it for good."""

    __slots__ = ("_folder", "_loop", "_pool", "_stop", "lock")

    def __init__(
        self,
        folder: Path,
        lock: Lock,
        pool: Executor,
        loop: asyncio.AbstractEventLoop,
        stop: Callable[[FelixError], None],
    ) -> None:
        self.lock = lock
        self._folder = folder
        self._pool = pool
        self._loop = loop
        self._stop = stop

    def submit(self, work: Callable[[], None], *, optional: bool = False) -> None:
        """Do `work` without waiting for it. `optional`: a shortcut, whose failure stops nothing."""

        def run() -> None:
            try:
                with self.lock:
                    work()
            except (OSError, FelixError) as error:
                if not optional:
                    failure = error if isinstance(error, FelixError) else storage_error(error, self._folder)
                    self.tell(lambda: self._stop(failure))

        self._pool.submit(run)

    async def change(self, work: Callable[..., _T], *arguments: object) -> _T:
        """What `work` returns. Raises UnavailableError where the disk is full, or too many files are open; StorageFailedError, CorruptionError, which stop the log; and
        what else `work` raises."""

        def run() -> _T:
            with self.lock:
                return work(*arguments)

        try:
            return await self._loop.run_in_executor(self._pool, run)
        except OSError as error:
            failure = storage_error(error, self._folder)
            if isinstance(failure, StorageFailedError):
                self._stop(failure)
            raise failure from error
        except (StorageFailedError, CorruptionError) as error:
            self._stop(error)
            raise

    def tell(self, callback: Callable[[], None]) -> None:
        """Call this on the loop."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The loop is closed: the process is going down, and nobody waits any more.
            return
