"""Reading a shard's segments in threads, wherever they are: what is only in a store is brought back first.

Only region.log.shard calls this, on the loop.

Invariants:
- of several readers that want the same segment back, one fetches it;
- damage in the folder stops the shard, since what else is damaged nobody knows, unless the log has copies: then the segment is repaired
  from them, and only what none of them has is refused; damage in a store's copy stops nothing;
- a read that the disk does not answer is refused, and may be tried again: nothing was changed. READ_FAILURES_MAX in a row stop the shard;
- a read that crosses a truncation is no proof of damage: it is to be repeated.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from felix.errors import Code, CorruptionError, FelixError, UnavailableError
from felix.lazy_event import LazyThreadEvent
from felix.storage.port import Files
from region.log.compactor import ROOM_BYTES_MIN
from region.log.counters import ShardCounters
from region.log.disk import DiskLog
from region.log.errors import (
    NotLocalError,
    SegmentDamagedError,
    StorageFailedError,
    read_failed,
    storage_error,
)
from region.log.frame import SealedBatch
from region.log.offloader import Throttle, fetch
from region.log.segment_state import SegmentState
from region.log.shard_settings import ShardStore
from region.log.store_calls import ended_by

log = logging.getLogger("felix.region.log")

FETCHES_PER_READ_MAX: Final = 4
"""A read reaches into one segment, rarely two; a cache that is too small for its readers must not keep one for ever."""
REPAIRS_PER_READ_MAX: Final = 4
"""A read reaches into one segment, rarely two; a disk that damages what was just repaired needs a person."""
REPAIR_RETRY_MS: Final = 1_000
READ_FAILURES_MAX: Final = 8
"""Reads of one log that fail in a row: an error that passes costs one, or as many as are under way; a disk that is gone answers none."""

_T = TypeVar("_T")


async def read_repaired(
    read: Callable[[], Awaitable[_T]], repair: Callable[[SegmentDamagedError], Awaitable[None]]
) -> _T:
    """What `read` returns, once what it finds damaged is repaired. Raises as both do; UnavailableError where it is damaged again and again."""
    for _ in range(REPAIRS_PER_READ_MAX):
        try:
            return await read()
        except SegmentDamagedError as error:
            await repair(error)
    raise UnavailableError("What is read is damaged again and again.", retry_after_ms=REPAIR_RETRY_MS)


class _FetchedDamageError(Exception):
    """A store gave something else than was uploaded."""

    def __init__(self, found: CorruptionError) -> None:
        super().__init__(str(found))
        self.found = found


class DiskReader:
    """See the module. `failed` is told what stops the shard; `ending` ends what is being fetched. `repair`: as `Copies.repair`, of a log that has copies."""

    def __init__(
        self,
        disk: DiskLog,
        files: Files,
        store: ShardStore,
        pool: Executor,
        counters: ShardCounters,
        *,
        folder: Path,
        ending: LazyThreadEvent,
        failed: Callable[[FelixError], None],
        repair: Callable[[SegmentDamagedError], Awaitable[None]] | None = None,
    ) -> None:
        self.truncations = 0
        """Begun and ended: a read across one may meet bytes that are being cut."""
        self._disk = disk
        self._files = files
        self._store = store
        self._pool = pool
        self._counters = counters
        self._folder = folder
        self._ending = ending
        self._failed = failed
        self._repair = repair
        self._loop = asyncio.get_running_loop()
        self._fetching: dict[int, asyncio.Future[None]] = {}
        self._failures = 0
        """reads in a row that the disk did not answer"""

    async def read(self, offset: int, max_bytes: int, below: int) -> list[SealedBatch]:
        """Batches from the one that holds `offset` on, all of them before `below`: at least one, then up to `max_bytes`.

        Raises CorruptionError, which stops the shard unless it is a store's copy that is damaged, and UnavailableError.
        """
        read = partial(self._disk.read, around_damage=self._repair is not None)
        batches = await self._perform(read, offset, max_bytes, below)
        self._counters.disk_reads += 1
        self._counters.disk_read_bytes += sum(len(batch.data) for batch in batches)
        return batches

    async def offset_for_time(self, time_ms: int, below: int) -> int:
        """Base offset of the first batch before `below` that was appended at or after `time_ms`, else `below`. Raises as `read`."""
        return await self._perform(self._disk.offset_for_time, time_ms, below)

    async def read_notes(self, offset: int, wanted: Callable[[bytes], bool]) -> list[bytes]:
        """Notes that stand in the log, as `DiskLog.read_notes` finds them. Raises as `read`, and OffsetOutOfRangeError."""
        return await self._perform(lambda: self._disk.read_notes(offset, wanted))

    @contextmanager
    def truncating(self) -> Iterator[None]:
        """The log is cut meanwhile."""
        self.truncations += 1
        try:
            yield
        finally:
            self.truncations += 1

    async def ended(self) -> None:
        """Nothing is being fetched any more, and nothing that was is kept."""
        if self._fetching:
            await asyncio.wait(list(self._fetching.values()))
        self._store.cache.forget(self._folder)

    async def _perform(self, read: Callable[..., _T], *arguments: int) -> _T:
        once = partial(self._perform_once, read, *arguments)
        return await once() if self._repair is None else await read_repaired(once, self._repair)

    async def _perform_once(self, read: Callable[..., _T], *arguments: int) -> _T:
        before = self.truncations
        try:
            for _ in range(FETCHES_PER_READ_MAX):
                try:
                    found = await self._loop.run_in_executor(self._pool, read, *arguments)
                except NotLocalError as error:
                    missing = error.segment
                else:
                    self._failures = 0
                    return found
                await self._fetch(missing)
            raise UnavailableError(
                "What was fetched from the store was pushed out again before it was read.", retry_after_ms=100
            )
        except _FetchedDamageError as error:
            # The store's copy: what is local is as it was.
            raise error.found from error
        except CorruptionError as error:
            if before % 2 or before != self.truncations:
                raise UnavailableError(
                    "The log was truncated while it was read.", code=Code.UNAVAILABLE, retry_after_ms=50
                ) from error
            if self._repair is None or not isinstance(error, SegmentDamagedError):
                self._failed(error)
            raise
        except OSError as error:
            failure = storage_error(error, self._folder)
            if not isinstance(failure, StorageFailedError):
                raise failure from error
            self._failures += 1
            if self._failures >= READ_FAILURES_MAX:
                self._failed(failure)
                raise failure from error
            if self._failures == 1:
                log.warning("a read is refused: %s", failure)
            raise read_failed(error, self._folder) from error

    async def fetch(self, segment: SegmentState) -> None:
        """Bring a segment back from its store; of several that want it, one does it. Raises UnavailableError, CorruptionError (of the store's copy)."""
        try:
            await self._fetch(segment)
        except _FetchedDamageError as error:
            raise error.found from error

    async def _fetch(self, segment: SegmentState) -> None:
        entry = segment.remote
        assert entry is not None
        under_way = self._fetching.get(segment.base_offset)
        if under_way is not None:
            await asyncio.shield(under_way)
            return

        def bring() -> None:
            try:
                # Appends come first: what is read back must not take the last room from them.
                if self._files.free_bytes(self._folder) < entry.segment_bytes + ROOM_BYTES_MIN:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))
                with ended_by(self._ending):
                    fetch(
                        self._files,
                        entry,
                        segment.fetched_path,
                        self._store.cache,
                        Throttle(self._store.rate_bytes, self._ending, self._store.clock),
                    )
                if segment.base_offset < self._disk.start_offset:
                    # Retention let go of it meanwhile.
                    self._store.cache.drop(segment.fetched_path)
            except CorruptionError as error:
                raise _FetchedDamageError(error) from error
            except OSError as error:
                raise storage_error(error, self._folder) from error

        future = self._loop.run_in_executor(self._store.fetch_pool or self._store.pool, bring)
        self._fetching[segment.base_offset] = future
        future.add_done_callback(lambda _: self._fetching.pop(segment.base_offset, None))
        await asyncio.shield(future)
        self._counters.fetched_segments += 1
        self._counters.fetched_bytes += entry.segment_bytes
