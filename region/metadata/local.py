"""What the stores that live in this process share: leases by the local clock, and watches over their history.

A watcher is a cursor over the history, not a queue: a slow one costs no memory, and one that compaction overtakes gets an error.
Used only by `memory` and `embedded`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Final, NamedTuple

from felix.errors import Code, FelixError, UnavailableError
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.told import Told
from region.metadata.lease import Deadlines, cancel_and_wait, lease_lost
from region.metadata.port import CompactedError, MetadataStore
from region.metadata.transaction import Change, Compare, Put, TransactResult, Write

_log = logging.getLogger(__name__)

_SWEEP_RETRY_MS: Final = 1_000
HISTORY_EVENTS_MAX: Final = 10_000
"""Events kept for watchers that were away; older ones are compacted, and those watchers load again."""
HISTORY_BYTES_MAX: Final = 64 << 20
"""Values kept in the history, whatever their number."""
HISTORY_SLACK: Final = 10
"""Compact once a bound is exceeded by a tenth: one large deletion instead of one per write."""
BATCH_EVENTS_MAX: Final = 256
"""Events a watcher takes at a time (more only where one revision has more)."""
BATCH_BYTES_MAX: Final = 4 << 20
"""Values a watcher takes at a time (more only where one revision has more)."""


class Batch(NamedTuple):
    """A piece of history. `next_revision`: where to go on; `more`: whether there is more right now."""

    changes: list[Change]
    next_revision: int
    more: bool


def check_revision(from_revision: int, compacted: int, current: int) -> None:
    """Raises CompactedError unless history from `from_revision` on is whole."""
    if from_revision <= compacted:
        raise CompactedError(
            f"Metadata history up to revision {compacted} was compacted; a watch from {from_revision} would miss changes.",
            hint="Load the prefix again and watch from the revision of what was loaded.",
        )
    if from_revision > current + 1:
        raise CompactedError(
            f"A watch from revision {from_revision} was asked for, but the metadata store is at {current}: "
            "it was put back to an earlier state.",
            hint="Load the prefix again and watch from the revision of what was loaded.",
        )


class LocalStore(MetadataStore):
    """Base of the in-process stores. Subclasses keep entries and history; this keeps leases and wakes watchers."""

    def __init__(self, where: str, runtime: Runtime = REAL) -> None:
        super().__init__(where, runtime.clock)
        self._random = runtime.random
        self._deadlines = Deadlines()
        self._changed = asyncio.Event()
        self._granted = asyncio.Event()
        self._sweeper: asyncio.Task[None] | None = None
        self._unswept = Told(runtime.clock.monotonic)

    @abstractmethod
    async def _commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult: ...

    @abstractmethod
    async def _changes(self, prefix: str, from_revision: int) -> Batch: ...

    @abstractmethod
    async def _remember_lease(self, lease_id: int, ttl_ms: int) -> None: ...

    @abstractmethod
    async def _expire(self, lease_ids: Sequence[int]) -> None:
        """Delete what is bound to the leases, each lease one revision, and the leases."""

    @abstractmethod
    async def _release(self) -> None: ...

    def _signal(self) -> None:
        """Wake every watcher: there is a new revision (or an end)."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _transact(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult:
        # Checked before the commit is queued: the sweep of a lease that runs out now is queued behind it, so
        # a key bound here is still deleted.
        now_ms = self.clock.boot_ms()
        for write in writes:
            if isinstance(write, Put) and write.lease and not self._deadlines.holds(write.lease, now_ms):
                raise lease_lost(write.lease)
        return await self._commit(compares, writes)

    async def _watch(self, prefix: str, from_revision: int) -> AsyncGenerator[Change, None]:
        while True:
            self._check_open()
            changed = self._changed
            batch = await self._changes(prefix, from_revision)
            for change in batch.changes:
                yield change
            from_revision = batch.next_revision
            if not batch.more:
                await changed.wait()

    async def _lease_grant(self, ttl_ms: int) -> tuple[int, int]:
        lease_id = self._random.getrandbits(62) + 1
        await self._remember_lease(lease_id, ttl_ms)
        self._deadlines.grant(lease_id, ttl_ms, self.clock.boot_ms())
        self._start_sweeper()
        return lease_id, ttl_ms

    async def _lease_renew(self, lease_id: int) -> int:
        self._check_open()
        return self._deadlines.renew(lease_id, self.clock.boot_ms())

    async def _lease_revoke(self, lease_id: int) -> None:
        self._check_open()
        if self._deadlines.end(lease_id, self.clock.boot_ms()):
            try:
                await self._expire([lease_id])
            except BaseException:
                # It is swept like one that ran out.
                self._start_sweeper()
                raise
            self._deadlines.forget(lease_id)

    def _start_sweeper(self) -> None:
        self._granted.set()
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="metadata lease sweep")

    async def _sweep(self) -> None:
        while True:
            next_ms = self._deadlines.next_ms()
            self._granted.clear()
            try:
                async with asyncio.timeout(
                    None if next_ms is None else max(0, next_ms - self.clock.boot_ms()) / 1_000
                ):
                    await self._granted.wait()
            except TimeoutError:
                due = self._deadlines.due(self.clock.boot_ms())
                try:
                    await self._expire(due)
                except FelixError as error:
                    # Such as a full disk. The leases stay due, and nobody can renew or bind them meanwhile.
                    if self._unswept.begins():
                        _log.warning("Leases that ran out could not be swept: %s", error)
                    await asyncio.sleep(_SWEEP_RETRY_MS / 1_000)
                    continue
                self._unswept.ends()
                for lease_id in due:
                    self._deadlines.forget(lease_id)

    async def _close(self) -> None:
        await cancel_and_wait(self._sweeper)
        await self._release()
        self._signal()


def unavailable(where: str, why: str, hint: str, code: Code = Code.UNAVAILABLE) -> UnavailableError:
    """The error of an in-process store that cannot answer."""
    return UnavailableError(
        f"The metadata store {where} cannot answer: {why}.", code=code, hint=hint, retry_after_ms=1_000
    )
