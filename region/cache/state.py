"""The state of one shard of a cache. Pure: no I/O, and the time comes in.

Two layers. `entries` is what the log says up to what is durable: all that readers see. On top of it stands what has been staged
for the log and is not durable yet: `newest` looks through both, so decisions (compare and set, increment, what to evict) are
right however many are on their way. Staged changes are settled in the order of their offsets, or rolled back together.

Invariants:
- an entry's version is its record's offset plus one; versions of a key only grow;
- `size_bytes` is the sum over entries of key, value and ENTRY_BYTES; what has been decided here never takes it beyond
  `bytes_max`; records that others wrote may, until `relieve` has evicted as much;
- of the broker's budget is taken what entries and staged changes need, whichever is more, as far as it reaches;
- an expired entry is never read, whether its tombstone has been written or not;
- the newest OPERATIONS_MAX operation ids of the log are known, those on their way besides.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Final, NamedTuple

from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.settings import CacheSettings
from region.cache.keys import KeyIndex
from region.cache.records import RECORD_BYTES, Change, Reason
from region.limits.budget import Budget

ENTRY_BYTES: Final = 400
"""Memory of an entry in addition to its key and value: two bytes objects, a tuple with two numbers, an ordered dict's node,
places in the index and the heap of deadlines.
"""
OPERATIONS_MAX: Final = 32_768
"""Operation ids remembered per shard; about 300 bytes each. A client asks again within seconds, and the log keeps every record
for two minutes before it is compacted (felix.settings.Views.compacted)."""
DEADLINES_SPARE: Final = 1_024
"""Deadlines of values that were replaced stay in the heap until they are this many more than the living ones."""
NUMBER_MIN: Final = -(1 << 63)
NUMBER_MAX: Final = (1 << 63) - 1
NUMBER_DIGITS_MAX: Final = 20

Waiter = Callable[[int, FelixError | None], None]
"""Called once with the version of what was staged, or with why it is not in the log."""


class Entry(NamedTuple):
    """A value that stands. `expires_at_ms` 0: never. `version` is -1 while it has no offset yet."""

    value: bytes
    version: int
    expires_at_ms: int

    def lives(self, now_ms: int) -> bool:
        return not self.expires_at_ms or now_ms < self.expires_at_ms


class Staged:
    """Changes that are one batch of the log, or will be. `base_offset` is -1 until it has been appended."""

    __slots__ = ("base_offset", "changes", "next_offset", "size_bytes", "waiters")

    def __init__(self) -> None:
        self.base_offset = -1
        self.next_offset = -1
        self.changes: list[tuple[int, Change]] = []
        """Each with its record's place in the batch."""
        self.size_bytes = 0
        self.waiters: list[tuple[int, Waiter]] = []
        """Each with the place in the batch of the record whose version it waits for."""


class Operation(NamedTuple):
    """The outcome of an operation id."""

    version: int
    value: bytes


class Decision(NamedTuple):
    """The part of a decision that its caller gets. `place` in the open batch whose version it will have; -1: nothing is
    written, and the answer stands now (`settled`) or once what was staged before is durable."""

    place: int
    settled: bool
    number: int = 0


class CacheState:
    """See the module. `open` are the changes staged since the last batch was appended."""

    def __init__(self, settings: CacheSettings, budget: Budget) -> None:
        self.settings = settings
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.index = KeyIndex()
        self.size_bytes = 0
        self.open = Staged()
        self.staged: deque[Staged] = deque()
        self.hits = self.misses = self.puts = self.deletes = self.expired = self.evicted = 0
        self._budget = budget
        self._charged = 0
        self._coming_bytes = 0
        """`size_bytes` as it will be once all that is staged is settled."""
        self._newest: dict[bytes, tuple[Staged, int]] = {}
        self._deadlines: list[tuple[int, bytes]] = []
        self._timed = 0
        self._operations: OrderedDict[bytes, Operation] = OrderedDict()
        self._coming_operations: dict[bytes, tuple[Staged, int]] = {}
        self._let_go: list[bytes] = []

    # -- reading ---------------------------------------------------------------------------------------

    def get(self, key: bytes, now_ms: int) -> Entry | None:
        """The durable value, and that it was used."""
        entry = self.entries.get(key)
        if entry is None or (entry.expires_at_ms and now_ms >= entry.expires_at_ms):
            self.misses += 1
            return None
        self.hits += 1
        self.entries.move_to_end(key)
        return entry

    def peek(self, key: bytes, now_ms: int) -> Entry | None:
        """The durable value; nothing is counted."""
        entry = self.entries.get(key)
        return entry if entry is not None and entry.lives(now_ms) else None

    def page(
        self, prefix: bytes, after: bytes, limit: int, now_ms: int
    ) -> Iterator[tuple[bytes, Entry | None]]:
        """Up to `limit` keys in order with their values; None where one has expired."""
        entries = self.entries
        for key in self.index.page(prefix, after, limit):
            entry = entries[key]
            yield key, entry if entry.lives(now_ms) else None

    def newest(self, key: bytes, now_ms: int) -> tuple[Entry | None, bool]:
        """The value as decided so far, and whether that is durable."""
        found = self._newest.get(key)
        if found is None:
            return self.peek(key, now_ms), True
        staged, at = found
        place, change = staged.changes[at]
        if change.reason is not Reason.PUT:
            return None, False
        version = staged.base_offset + place + 1 if staged.base_offset >= 0 else -1
        entry = Entry(change.value, version, change.expires_at_ms)
        return (entry if entry.lives(now_ms) else None), False

    @property
    def next_deadline_ms(self) -> int | None:
        """When the next value may expire."""
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def coming_bytes(self) -> int:
        """Its size once all staged changes are settled."""
        return self._coming_bytes

    # -- deciding --------------------------------------------------------------------------------------

    def check_size(self, key: bytes, value: bytes) -> None:
        """Raises RequestError(BATCH_TOO_LARGE) for what can never be held."""
        if entry_bytes(key, value) > self.settings.bytes_max:
            raise RequestError(
                f"{len(value)} bytes do not fit into a cache of {self.settings.bytes_max} bytes a shard.",
                code=Code.BATCH_TOO_LARGE,
            )

    def make_room(self, key: bytes, value: bytes) -> bool:
        """Stage the evictions that let `value` come in; whether there were any. Raises UnavailableError(LIMIT_MEMORY)."""
        before = len(self.open.changes)
        after = self._coming_bytes + entry_bytes(key, value) - self._newest_bytes(key)
        limit = self.settings.bytes_max
        if after > limit or after > self._charged:
            free = self._budget.limit_bytes - self._budget.used_bytes
            room = min(limit, self._charged + free)
            wanted = after - room
            if self._coming_bytes > limit:
                # It was made smaller, and `relieve` sees to that some at a time: a put makes room for itself alone.
                wanted = min(wanted, max(0, after - self._coming_bytes))
            if after > room and (self.settings.eviction == "refuse" or not self._evict(wanted, key)):
                if room < limit:
                    self._budget.refused += 1
                raise _full(self.settings, room < limit)
        return len(self.open.changes) > before

    def put(self, key: bytes, value: bytes, expires_at_ms: int, operation: bytes = b"") -> int:
        """Stage a put; its place in the open batch. `make_room` comes first."""
        return self._stage(Change(key, value, expires_at_ms, Reason.PUT, operation))

    def delete(self, key: bytes, now_ms: int) -> Decision:
        """Stage a tombstone where the key is there."""
        entry, settled = self.newest(key, now_ms)
        if entry is None:
            return Decision(-1, settled)
        return Decision(self._stage(Change(key, b"", 0, Reason.DELETED)), False)

    def repeated(self, operation: bytes) -> tuple[Operation, Staged | None, int] | None:
        """What an operation that was asked for before did; with the batch and the place it waits for, if it is not durable."""
        done = self._operations.get(operation)
        if done is not None:
            return done, None, 0
        coming = self._coming_operations.get(operation)
        if coming is None:
            return None
        staged, at = coming
        place, change = staged.changes[at]
        return Operation(-1, change.value), staged, place

    def counted(self, key: bytes, by: int, now_ms: int) -> tuple[int, int | None]:
        """The result of an increment, and the expiry, which stays (None: the key is created). Raises RequestError."""
        entry, _ = self.newest(key, now_ms)
        if entry is None:
            return by, None
        number = _number(entry.value) + by
        if not NUMBER_MIN <= number <= NUMBER_MAX:
            raise RequestError(f"Adding {by} takes the number out of the 64 bits that it has.")
        return number, entry.expires_at_ms

    def sweep(self, now_ms: int, keys_max: int, bytes_max: int) -> int:
        """Stage tombstones for at most `keys_max` expired values, until the open batch has `bytes_max`; how many."""
        count = 0
        deadlines = self._deadlines
        while (
            deadlines and deadlines[0][0] <= now_ms and count < keys_max and self.open.size_bytes < bytes_max
        ):
            deadline, key = heappop(deadlines)
            entry = self.entries.get(key)
            if entry is not None and entry.expires_at_ms == deadline and key not in self._newest:
                self._stage(Change(key, b"", 0, Reason.EXPIRED))
                count += 1
        return count

    def relieve(self, bytes_max: int) -> int:
        """Stage evictions for what records of others have made too much, whatever `eviction` says, until the open batch has
        `bytes_max`; how many. What is left comes with the next call."""
        if not self._let_go and self._coming_bytes <= min(self.settings.bytes_max, self._charged):
            return 0
        before = len(self.open.changes)
        while self._let_go and self.open.size_bytes < bytes_max:
            key = self._let_go.pop()
            if key not in self._newest and key not in self.entries:
                self._stage(Change(key, b"", 0, Reason.EVICTED))
        for key in self.entries:
            room = min(self.settings.bytes_max, self._charged)
            if self._coming_bytes <= room or self.open.size_bytes >= bytes_max:
                break
            if key not in self._newest:
                self._stage(Change(key, b"", 0, Reason.EVICTED))
        return len(self.open.changes) - before

    def _evict(self, wanted_bytes: int, sparing: bytes) -> bool:
        """Stage evictions of the least recently used until `wanted_bytes` are free; False (and nothing) where they are not."""
        freed, victims = 0, []
        newest = self._newest
        for key, entry in self.entries.items():
            if freed >= wanted_bytes:
                break
            if key not in newest and key != sparing:
                victims.append(key)
                freed += entry_bytes(key, entry.value)
        if freed < wanted_bytes:
            return False
        for key in victims:
            self._stage(Change(key, b"", 0, Reason.EVICTED))
        return True

    # -- staging, settling, rolling back ---------------------------------------------------------------

    def _stage(self, change: Change) -> int:
        staged = self.open
        place = len(staged.changes)
        self._place(staged, place, change)
        staged.size_bytes += len(change.key) + len(change.value) + RECORD_BYTES
        return place

    def _place(self, staged: Staged, place: int, change: Change) -> None:
        key = change.key
        coming = entry_bytes(key, change.value) if change.reason is Reason.PUT else 0
        self._coming_bytes += coming - self._newest_bytes(key)
        at = len(staged.changes)
        staged.changes.append((place, change))
        self._newest[key] = (staged, at)
        if change.operation:
            self._coming_operations[change.operation] = (staged, at)
        self._charge()

    def _newest_bytes(self, key: bytes) -> int:
        found = self._newest.get(key)
        if found is None:
            entry = self.entries.get(key)
            return 0 if entry is None else entry_bytes(key, entry.value)
        change = found[0].changes[found[1]][1]
        return entry_bytes(key, change.value) if change.reason is Reason.PUT else 0

    def take_open(self) -> Staged:
        """The open changes, to be appended; others are gathered from now on."""
        staged, self.open = self.open, Staged()
        return staged

    def appended(self, staged: Staged, base_offset: int, next_offset: int) -> None:
        """The batch of `staged` has its offsets. Batches come in the log's order."""
        assert not self.staged or self.staged[-1].next_offset <= base_offset
        staged.base_offset, staged.next_offset = base_offset, next_offset
        self.staged.append(staged)

    def foreign(self, changes: list[tuple[int, Change]], base_offset: int, next_offset: int) -> Staged:
        """Somebody else's batch, by offset of its changes, on its way into the log."""
        staged = Staged()
        for offset, change in changes:
            self._place(staged, offset - base_offset, change)
        self.appended(staged, base_offset, next_offset)
        return staged

    def settle(self, durable: int) -> list[Staged]:
        """Apply what stands below the offset `durable`; the batches, in order."""
        settled: list[Staged] = []
        staged, newest = self.staged, self._newest
        while staged and staged[0].next_offset <= durable:
            batch = staged.popleft()
            first = batch.base_offset + 1
            for at, (place, change) in enumerate(batch.changes):
                self._apply(change, first + place)
                if newest.get(change.key) == (batch, at):
                    del newest[change.key]
                if change.operation and self._coming_operations.get(change.operation) == (batch, at):
                    del self._coming_operations[change.operation]
            settled.append(batch)
        if settled:
            self._charge()
        return settled

    def roll_back(self, offset: int) -> list[Staged]:
        """Forget batches at or above `offset`, and what was decided on top of them; they, in order."""
        gone: list[Staged] = []
        while self.staged and self.staged[-1].base_offset >= offset:
            gone.append(self.staged.pop())
        if gone:
            gone.reverse()
            gone.append(self.take_open())
            self._decide_again(gone)
        return gone

    def drop(self, staged: Staged) -> list[Staged]:
        """Forget a batch that the log did not take, and what was decided on top of it; they, in order."""
        gone = [staged, self.take_open()]
        self._decide_again(gone)
        return gone

    def _decide_again(self, gone: list[Staged]) -> None:
        """Rebuild the layer of staged changes over the entries."""
        kept = list(self.staged)
        self._newest.clear()
        self._coming_operations.clear()
        self._coming_bytes = self.size_bytes
        for batch in kept:
            changes, batch.changes = batch.changes, []
            for place, change in changes:
                self._place(batch, place, change)
        for batch in gone:
            for _, change in batch.changes:
                entry = self.entries.get(change.key)
                if entry is not None and entry.expires_at_ms:
                    # Its deadline may have been taken off the heap for a tombstone that is not there.
                    heappush(self._deadlines, (entry.expires_at_ms, change.key))
        self._charge()

    def load(self, change: Change, version: int) -> None:
        """A record of the log, before anything is staged.

        A moment of the log may be beyond `bytes_max`: before the evictions for records of others, or those with which the cache
        was made smaller. Which keys these evicted depended on what was read, so they are read from the log too, and not
        decided anew. What the budget has no room for is let go, oldest first, and gets its tombstone with the next `relieve`.
        """
        evicted, expired, puts, deletes = self.evicted, self.expired, self.puts, self.deletes
        self._apply(change, version)
        self.evicted, self.expired, self.puts, self.deletes = evicted, expired, puts, deletes
        self._coming_bytes = self.size_bytes
        self._charge()
        while self.entries and self.size_bytes > self._charged:
            key = next(iter(self.entries))
            self._remove(key)
            self._let_go.append(key)
            self._coming_bytes = self.size_bytes
            self._charge()

    def loaded(self) -> None:
        """The log has been read: what came in meanwhile is layered upon it."""
        self._decide_again([])

    def _apply(self, change: Change, version: int) -> None:
        key = change.key
        if change.reason is not Reason.PUT:
            if key in self.entries:
                self._remove(key)
            if change.reason is Reason.DELETED:
                self.deletes += 1
            elif change.reason is Reason.EXPIRED:
                self.expired += 1
            else:
                self.evicted += 1
            return
        entries = self.entries
        before = entries.get(key)
        if before is None:
            self.index.add(key)
            self.size_bytes += entry_bytes(key, change.value)
        else:
            self.size_bytes += len(change.value) - len(before.value)
            self._timed -= before.expires_at_ms > 0
            entries.move_to_end(key)
        entries[key] = Entry(change.value, version, change.expires_at_ms)
        self.puts += 1
        if change.expires_at_ms:
            self._timed += 1
            heappush(self._deadlines, (change.expires_at_ms, key))
            if len(self._deadlines) > 2 * self._timed + DEADLINES_SPARE:
                self._deadlines = [
                    (entry.expires_at_ms, key) for key, entry in entries.items() if entry.expires_at_ms
                ]
                heapify(self._deadlines)
        if change.operation:
            self._operations[change.operation] = Operation(version, change.value)
            if len(self._operations) > OPERATIONS_MAX:
                self._operations.popitem(last=False)

    def _remove(self, key: bytes) -> None:
        entry = self.entries.pop(key)
        self.index.discard(key)
        self.size_bytes -= entry_bytes(key, entry.value)
        self._timed -= entry.expires_at_ms > 0

    # -- the budget ------------------------------------------------------------------------------------

    def _charge(self) -> None:
        """Bring what is taken of the budget to what is needed, as far as it reaches."""
        wanted = max(self.size_bytes, self._coming_bytes) - self._charged
        budget = self._budget
        if wanted > 0:
            taken = min(wanted, budget.limit_bytes - budget.used_bytes)
            if budget.take(taken):
                self._charged += taken
        elif wanted < 0:
            budget.give(-wanted)
            self._charged += wanted

    def close(self) -> None:
        """Give the budget back."""
        self._budget.give(self._charged)
        self._charged = 0

    def stats(self) -> dict[str, Any]:
        """What is counted, by name."""
        return {
            "cache_keys": len(self.entries),
            "cache_bytes": self.size_bytes,
            "cache_bytes_limit": self.settings.bytes_max,
            "cache_hits": self.hits,
            "cache_misses": self.misses,
            "cache_puts": self.puts,
            "cache_deletes": self.deletes,
            "cache_expired": self.expired,
            "cache_evicted": self.evicted,
        }


def entry_bytes(key: bytes, value: bytes) -> int:
    """Size of an entry."""
    return len(key) + len(value) + ENTRY_BYTES


def _number(value: bytes) -> int:
    """The number that a value says. Raises RequestError."""
    digits = value[1:] if value[:1] == b"-" else value
    if not digits.isdigit() or len(value) > NUMBER_DIGITS_MAX:
        raise RequestError(
            f"The value {value[:24].decode(errors='backslashreplace')!r} is no number.",
            hint="Increment only what was made by increment, or holds digits.",
        )
    return int(value)


def _full(settings: CacheSettings, is_budget: bool) -> UnavailableError:
    if is_budget:
        return UnavailableError(
            "The memory that this broker gives to all caches is used up.",
            code=Code.LIMIT_MEMORY,
            hint="Delete keys or caches, or have limits.cache_budget raised.",
        )
    return UnavailableError(
        f"The cache holds the {settings.bytes_max} bytes a shard that it may.",
        code=Code.LIMIT_MEMORY,
        hint="Delete keys, give values a ttl, or alter the cache: more bytes, or eviction lru.",
    )
