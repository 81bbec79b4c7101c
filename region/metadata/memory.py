"""The metadata store's memory twin, for tests and for regions that forget on purpose. Nothing outlives the process."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from region.metadata.local import (
    BATCH_EVENTS_MAX,
    HISTORY_EVENTS_MAX,
    Batch,
    LocalStore,
    check_revision,
)
from region.metadata.port import FIRST_REVISION, PAGE_BYTES_MAX
from region.metadata.transaction import (
    Change,
    Compare,
    Delete,
    Entry,
    Event,
    Page,
    Put,
    TransactResult,
    Write,
)


async def _others_turn() -> None:
    """After each answer others run first, as with a store that has a disk or a network: answers grow old."""
    await asyncio.sleep(0)


class MemoryStore(LocalStore):
    """Entries in a dictionary, history in a bounded queue of revisions."""

    def __init__(self, *, history_events_max: int = HISTORY_EVENTS_MAX, runtime: Runtime = REAL) -> None:
        """`history_events_max`: revisions kept for watchers."""
        super().__init__("in memory", runtime)
        self._history_max = history_events_max
        self._entries: dict[str, Entry] = {}
        self._history: deque[Change] = deque()
        self._revision = FIRST_REVISION
        self._compacted = 0

    async def _get(self, key: str) -> Entry | None:
        entry = self._entries.get(key)
        await _others_turn()
        return entry

    async def _range(self, prefix: str, limit: int, after: str) -> Page:
        page = self._page(prefix, limit, after)
        await _others_turn()
        return page

    def _page(self, prefix: str, limit: int, after: str) -> Page:
        found: list[Entry] = []
        size = 0
        for key in sorted(key for key in self._entries if key.startswith(prefix) and key > after):
            entry = self._entries[key]
            size += len(entry.value)
            if len(found) == limit or (found and size > PAGE_BYTES_MAX):
                return Page(tuple(found), self._revision, more=True)
            found.append(entry)
        return Page(tuple(found), self._revision, more=False)

    async def _commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> TransactResult:
        succeeded = all(compare.holds(self._entries.get(compare.key)) for compare in compares)
        if succeeded:
            self._apply(writes)
        result = TransactResult(succeeded, self._revision)
        await _others_turn()
        return result

    def _apply(self, writes: Sequence[Write]) -> None:
        revision = self._revision + 1
        events: list[Event] = []
        for write in writes:
            old = self._entries.get(write.key)
            if isinstance(write, Put):
                created = revision if old is None else old.create_revision
                entry = Entry(write.key, bytes(write.value), created, revision, write.lease)
                self._entries[write.key] = entry
                events.append(Event(write.key, entry))
            elif old is not None:
                del self._entries[write.key]
                events.append(Event(write.key, None))
        if events:
            self._revision = revision
            self._history.append(Change(revision, tuple(events)))
            while len(self._history) > self._history_max:
                self._compacted = self._history.popleft().revision
            self._signal()

    async def _changes(self, prefix: str, from_revision: int) -> Batch:
        check_revision(from_revision, self._compacted, self._revision)
        start = bisect_left(self._history, from_revision, key=lambda change: change.revision)
        found: list[Change] = []
        events = 0
        for position in range(start, len(self._history)):
            change = self._history[position]
            if events >= BATCH_EVENTS_MAX:
                return Batch(found, change.revision, more=True)
            under = tuple(event for event in change.events if event.key.startswith(prefix))
            if under:
                found.append(Change(change.revision, under))
                events += len(under)
        return Batch(found, self._revision + 1, more=False)

    async def _remember_lease(self, lease_id: int, ttl_ms: int) -> None:
        pass

    async def _expire(self, lease_ids: Sequence[int]) -> None:
        for lease_id in lease_ids:
            self._apply([Delete(key) for key, entry in self._entries.items() if entry.lease == lease_id])

    async def _release(self) -> None:
        pass
