"""One shard of a cache at work: follows its log, decides, appends, answers once it is durable.

Everything is on the event loop. The mutations decided in one event loop iteration form one batch of the log. The shard sees the
appends of other writers (a publisher, a bridge, a transaction) when they are made (ShardLog.observer), so that decisions take
all earlier ones into account; readers see only durable values. A mutation is answered when readers see it: a read after the
answer returns that value or a newer one.

Invariants:
- what is applied is the log up to its high watermark, in its order;
- a waiter is called once; where a batch is refused, so is everything that was decided on top of it;
- before the log has been read (`ready`) nothing is decided or read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import Final, NamedTuple, Protocol

import msgspec

from felix.batch import Batch, decode_batch
from felix.bounded import BoundedMap
from felix.cache_messages import DEFAULT_TTL
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.frames import FRAME_HEADER_BYTES
from felix.names import StreamName
from felix.settings import CacheSettings
from region.cache.records import RECORD_BYTES, Change, decode_changes, encode_changes
from region.cache.state import CacheState, Staged, Waiter
from region.limits.budget import Budget
from region.log.ring import Entry as LogEntry
from region.log.shard import Appended, ShardLog, State
from region.metadata.records import FormerTtl
from region.streams.hosted import not_serving
from region.views.due import DueTimer

log = logging.getLogger("felix.region.cache")

BATCH_BYTES: Final = 256 << 10
"""Mutations decided in one event loop iteration are appended in batches of about this size."""
RECORDS_MAX: Final = 8_192
"""Mutations in one batch; applying them takes a few ms."""
SWEEP_KEYS_MAX: Final = 512
"""Expired keys of one iteration of the event loop: about a ms of it."""
SWEEP_MS_MIN: Final = 20
SWEEP_MS_MAX: Final = 250
"""A deadline that comes in while the shard waits for a later one is met so late at most."""
RETRY_MS: Final = 1_000
"""After the log refused tombstones."""
READ_BYTES_MAX: Final = 1 << 20
LOAD_STEP_S: Final = 0.005
"""While a log is read at the start the loop is left to others this often."""
LOAD_SAID_S: Final = 5.0
LOAD_NEAR: Final = 2_048
"""Offsets from the end at which appends are observed: what comes in from there is held until the rest has been read."""
CLOSE_LOOK_S: Final = 0.002
CLOSE_LOOKS: Final = 2_500
"""5 s for what is on its way, when the cache is closed."""
DECODED_BYTES_MAX: Final = 4 << 20
"""Batches decoded for watches, per shard: those that follow live, and those that catch up side by side, share them."""
DECODED_STEP_BYTES: Final = 64 << 10
"""Given to a watch at once."""
ENCODED_MAX: Final = 64
"""Frames of changes encoded for one watch that others may want: only of the newest event loop iteration."""
CATCH_UP_WAIT_S: Final = 0.005
"""How long reading waits for the catch-up budget before it asks again."""


class Decoded(NamedTuple):
    """A batch's changes by version, for watches."""

    base_offset: int
    next_offset: int
    changes: list[tuple[int, Change]]
    size_bytes: int


class Watcher(Protocol):
    """Called when changes have been applied."""

    def pump(self) -> None: ...


class CacheShard:
    """See the module. `load`, then everything else; `close` at the end."""

    def __init__(
        self,
        name: StreamName,
        number: int,
        shard: ShardLog,
        settings: CacheSettings,
        budget: Budget,
        catch_up: Budget,
        clock_ms: Callable[[], int],
        monotonic: Callable[[], float],
        former_ttls: Sequence[FormerTtl] = (),
    ) -> None:
        """`former_ttls`: see region.metadata.records.FormerCache."""
        self.name, self.number, self.log = name, number, shard
        self.settings = settings
        self.former_ttls = former_ttls
        self._tells_forever = bool(former_ttls)
        """Whether values that never expire are marked in the log: always, if the cache's own ttl has ever been altered."""
        self.state = CacheState(settings, budget)
        self.applied = shard.log_start_offset
        """Everything below is in the state."""
        self.ready = asyncio.Event()
        self.failure: FelixError | None = None
        self.malformed = 0
        self._catch_up = catch_up
        self.clock_ms = clock_ms
        self._monotonic = monotonic
        self._loop = asyncio.get_running_loop()
        self._own: Staged | None = None
        self._observed_from: float = inf
        """Appends from this offset on are seen as they come."""
        self._refused: FelixError | None = None
        """Why what was decided here was last rolled back."""
        self._rollbacks = 0
        self._flush_due = False
        self._timer = DueTimer(self._sweep, lambda: self.clock_ms())
        self._watchers: list[Watcher] = []
        self._decoded: BoundedMap[int, Decoded] = BoundedMap(
            DECODED_BYTES_MAX, weigh=lambda decoded: decoded.size_bytes
        )
        self.encoded: dict[object, tuple[bytes, int]] = {}
        """Frames that a watch has encoded in this event loop iteration, and their records, for other watches like it."""
        self._unfollow: Callable[[], None] | None = None
        self._closed = False

    # -- life ------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read the log, then follow it. Raises what reading raises; waiting callers get it as `failure`."""
        try:
            await self._load()
        except FelixError as error:
            self.failure = error
            raise
        finally:
            self.ready.set()

    async def _load(self) -> None:
        shard, began = self.log, self._monotonic()
        said = stepped = began
        first = self.applied
        while True:
            caught_up = self.applied >= min(shard.high_watermark, shard.log_end_offset - LOAD_NEAR)
            if shard.observer is None and caught_up:
                # From here on what is appended is seen as it comes; what stands before is read.
                self._observed_from = shard.log_end_offset
                shard.observer = self
            if self.applied >= self._observed_from:
                break
            if self.applied >= shard.high_watermark:
                await asyncio.sleep(CATCH_UP_WAIT_S)  # pending appends of before
                if shard.failure is not None:
                    raise shard.failure
                continue
            for entry in await self._read_loading():
                if entry.base_offset >= self._observed_from:
                    break
                if entry.next_offset <= self.applied:
                    continue
                for offset, change in self._decode(decode_batch(memoryview(entry.data)[FRAME_HEADER_BYTES:])):
                    if offset >= self.applied:
                        self.state.load(change, offset + 1)
                self.applied = entry.next_offset
                now = self._monotonic()
                if now - stepped > LOAD_STEP_S:
                    await asyncio.sleep(0)
                    stepped = self._monotonic()
                if now - said > LOAD_SAID_S:
                    said = now
                    log.info(
                        "cache %s shard %d: %d of %d records read",
                        self.name, self.number, self.applied - first, shard.high_watermark - first,
                    )  # fmt: skip
        took = self._monotonic() - began
        if took > LOAD_SAID_S:
            log.info(
                "cache %s shard %d: %d keys after %.1f s",
                self.name,
                self.number,
                len(self.state.entries),
                took,
            )
        self.state.loaded()
        self._unfollow = shard.subscribe_tail(self.follow)
        self.follow()
        self._arm()

    async def _read_loading(self) -> list[LogEntry]:
        """What comes next of the log, as soon as its disk gives it: nobody else would read it again. Raises what does not pass."""
        is_said = False
        while True:
            try:
                return await self.read(self.applied)
            except UnavailableError as error:
                if self._closed or self.log.failure is not None:
                    raise
                if not is_said:
                    is_said = True
                    log.warning("cache %s shard %d is still being read: %s", self.name, self.number, error)
                await asyncio.sleep((error.retry_after_ms or RETRY_MS) / 1000)

    async def read(self, offset: int) -> list[LogEntry]:
        """From memory, or from the disk within the broker's catch-up budget. Raises as `ShardLog.read` does."""
        hot = self.log.read_hot(offset, READ_BYTES_MAX)
        if hot is not None:
            return hot
        # Others give back when they have sent: there is no one event to wait for.
        while not self._catch_up.take(READ_BYTES_MAX):  # noqa: ASYNC110
            await asyncio.sleep(CATCH_UP_WAIT_S)
        try:
            return await self.log.read(offset, READ_BYTES_MAX)
        finally:
            self._catch_up.give(READ_BYTES_MAX)

    async def close(self) -> None:
        """Append what was decided and wait for it; the log is closed by its owner."""
        self._closed = True
        self._timer.cancel()
        self._flush()
        for _ in range(CLOSE_LOOKS):
            if not self.state.staged or self.log.state is not State.SERVING:
                break
            await asyncio.sleep(CLOSE_LOOK_S)
        if self.log.observer is self:
            self.log.observer = None
        if self._unfollow is not None:
            self._unfollow()
        gone = UnavailableError("The cache is closing.", code=Code.SHUTTING_DOWN, retry_after_ms=500)
        self._fail([*self.state.staged, self.state.take_open()], gone)
        self.failure = self.failure or gone
        self.ready.set()
        self.state.close()

    def prepare(self, settings: CacheSettings) -> None:
        """These may be the settings soon; `alter` follows. Raises RequestError(CONFLICT) where what is held would have to go,
        UnavailableError while the log is being read."""
        old = self.settings
        if settings.ttl_ms != old.ttl_ms:
            self._tells_forever = True
        if settings.eviction != "refuse" or (settings.bytes_max, "refuse") == (old.bytes_max, old.eviction):
            return
        if not self.ready.is_set():
            raise UnavailableError(
                f"The log of {self.name} is still being read.", code=Code.UNAVAILABLE, retry_after_ms=1000
            )
        held = self.state.coming_bytes
        if held > settings.bytes_max:
            raise RequestError(
                f"Shard {self.number} of {self.name} holds {held} bytes, and a cache that refuses evicts nothing for "
                f"{settings.bytes_max}.",
                code=Code.CONFLICT,
                hint="Delete keys first, leave it more bytes, or let it evict: eviction lru.",
            )
        if settings.bytes_max < old.bytes_max:
            # Nothing may come in between that would not fit any more.
            self.state.settings = msgspec.structs.replace(self.state.settings, bytes_max=settings.bytes_max)

    def alter(self, settings: CacheSettings, former_ttls: Sequence[FormerTtl]) -> None:
        """Use other settings from now on. The excess is then evicted, some of it in every event loop iteration."""
        self.settings = self.state.settings = settings
        self.former_ttls = former_ttls
        if self.ready.is_set() and not self._closed and self.failure is None:
            self._loop.call_soon(self.follow)

    def check(self) -> None:
        """Raises UnavailableError where the shard does not serve: NotLeaderError, SHUTTING_DOWN, SHARD_STOPPED."""
        why = self.failure or self.log.failure
        if why is not None:
            raise not_serving(self.name, self.number, why)

    # -- reading ---------------------------------------------------------------------------------------

    def up_to_date(self) -> CacheState:
        """The state of everything durable. Raises as `check`."""
        if self.applied != self.log.high_watermark:
            self.follow()
        if self.failure is not None or self.log.failure is not None:
            self.check()
        return self.state

    def ttl_left(self, expires_at_ms: int) -> int:
        """Ms, at least 1; 0 where it never expires."""
        return max(1, expires_at_ms - self.clock_ms()) if expires_at_ms else 0

    # -- deciding --------------------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes, ttl_ms: int, waiter: Waiter) -> None:
        """Put it. Raises RequestError(BATCH_TOO_LARGE), UnavailableError(LIMIT_MEMORY); `waiter` gets the version."""
        self.check()
        self._before(len(key) + len(value) + RECORD_BYTES)
        self._put(key, value, self._expiry(ttl_ms), b"", waiter)

    def delete(self, key: bytes, waiter: Waiter) -> None:
        """Delete it; the waiter gets the tombstone's version, 0 where nothing was there."""
        self.check()
        self._before(len(key) + RECORD_BYTES)
        place, settled, _ = self.state.delete(key, self.clock_ms())
        if place >= 0:
            self.state.open.waiters.append((place, waiter))
            self._soon()
        elif settled:
            waiter(0, None)
        else:
            self._after_newest(lambda _, error: waiter(0, error))

    def compare_and_set(
        self,
        key: bytes,
        value: bytes,
        version: int,
        ttl_ms: int,
        operation: bytes,
        waiter: Waiter,
        conflict: Waiter,
    ) -> None:
        """Set it where the key has this version; else `conflict` gets the version it has."""
        self.check()
        self._before(len(key) + len(value) + RECORD_BYTES)
        if self._was_asked(operation, waiter):
            return
        entry, settled = self.state.newest(key, self.clock_ms())
        if (entry.version if entry is not None else 0) == version:
            self._put(key, value, self._expiry(ttl_ms), operation, waiter)
        elif settled:
            conflict(entry.version if entry is not None else 0, None)
        else:

            def tell(_: int, error: FelixError | None) -> None:
                found = self.state.peek(key, self.clock_ms())
                conflict(found.version if found is not None else 0, error)

            self._after_newest(tell)

    def increment(
        self,
        key: bytes,
        by: int,
        ttl_ms: int,
        operation: bytes,
        answer: Callable[[int, int, FelixError | None], None],
    ) -> None:
        """Add to the number under the key. `answer` gets the number and the version."""
        self.check()
        self._before(len(key) + RECORD_BYTES)
        done = self.state.repeated(operation)
        if done is not None:
            number = int(done[0].value)
            if not self._was_asked(operation, lambda version, error: answer(number, version, error)):
                raise AssertionError("an operation was forgotten within a turn")
            return
        number, expires_at_ms = self.state.counted(key, by, self.clock_ms())
        if expires_at_ms is None:
            expires_at_ms = self._expiry(ttl_ms)
        self._put(
            key,
            b"%d" % number,
            expires_at_ms,
            operation,
            lambda version, error: answer(number, version, error),
        )

    def _was_asked(self, operation: bytes, waiter: Waiter) -> bool:
        """True where it was: then its first copy answers this one too."""
        done = self.state.repeated(operation)
        if done is None:
            return False
        what, staged, place = done
        if staged is None:
            waiter(what.version, None)
        else:
            staged.waiters.append((place, waiter))
        return True

    def _put(self, key: bytes, value: bytes, expires_at_ms: int, operation: bytes, waiter: Waiter) -> None:
        """Stage it; `_before` has been asked, so that nothing is refused between what was decided and this."""
        state, rollbacks = self.state, self._rollbacks
        state.check_size(key, value)
        if state.make_room(key, value):
            self._before(len(key) + len(value) + RECORD_BYTES)
            if self._rollbacks != rollbacks:
                assert self._refused is not None
                raise self._refused
        place = state.put(key, value, expires_at_ms, operation)
        state.open.waiters.append((place, waiter))
        self._soon()

    def _expiry(self, ttl_ms: int) -> int:
        if ttl_ms == DEFAULT_TTL:
            ttl_ms = self.settings.ttl_ms
        return self.clock_ms() + ttl_ms if ttl_ms else 0

    def _before(self, size: int) -> None:
        """Append what is open where it and `size` would be too much for a batch."""
        open_ = self.state.open
        if open_.changes and (open_.size_bytes + size > BATCH_BYTES or len(open_.changes) >= RECORDS_MAX):
            self._flush()

    def _after_newest(self, waiter: Waiter) -> None:
        """Answer once all that has been decided is durable."""
        state = self.state
        staged = state.open if state.open.changes or not state.staged else state.staged[-1]
        assert staged.changes or staged.base_offset >= 0
        staged.waiters.append((0, waiter))

    # -- appending -------------------------------------------------------------------------------------

    def _soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Append what is open."""
        self._flush_due = False
        state = self.state
        if not state.open.changes or self._own is not None:
            return
        staged = state.take_open()
        try:
            batch = encode_changes(
                (change for _, change in staged.changes),
                default_ttl=self._tells_forever or self.settings.ttl_ms > 0,
            )
        except RequestError as error:
            self._fail(state.drop(staged), error)
            return
        self._own = staged
        try:
            self.log.append_nowait(batch, lambda result: self._appended(staged, result))
        finally:
            self._own = None

    def _appended(self, staged: Staged, result: Appended | FelixError) -> None:
        if isinstance(result, Appended):
            self.follow()
        elif staged.base_offset < 0:
            self._fail(self.state.drop(staged), result)
        # One that had its offset already was rolled back with all others.

    # What the log tells (region.log.shard.AppendObserver).

    def appending(self) -> None:
        if self._own is None:
            # Earlier decisions are appended first.
            self._flush()

    def appended(self, batch: Batch) -> None:
        header, own = batch.header, self._own
        if own is not None:
            self.state.appended(own, header.base_offset, header.next_offset)
            return
        self.state.foreign(self._decode(batch), header.base_offset, header.next_offset)

    def rolled_back(self, offset: int, error: FelixError) -> None:
        self._observed_from = min(self._observed_from, offset)
        self._fail(self.state.roll_back(offset), error)
        if offset < self.applied:
            # The entries contain the truncated records: show nothing any more that is in no log.
            self.failure = self.failure or UnavailableError(
                f"The log of shard {self.number} of {self.name} was cut at offset {offset}, below {self.applied}, up to which the "
                "cache has applied it.",
                code=Code.SHARD_STOPPED,
                hint="Restart the broker: the cache then reads the log as it is.",
            )

    def _decode(self, batch: Batch) -> list[tuple[int, Change]]:
        try:
            return decode_changes(batch, self._ttl_at(batch.header.append_time_ms))
        except RequestError as error:
            # Checksums hold: somebody published what is no batch inside. Subscribers get it as it is; here it does nothing.
            self.malformed += 1
            log.warning(
                "cache %s shard %d: the batch at offset %d does not decode: %s",
                self.name, self.number, batch.header.base_offset, error,
            )  # fmt: skip
            return []

    def _ttl_at(self, time_ms: int) -> int:
        """The cache's own ttl when a record was appended: what stands in the log does not change with the settings."""
        for former in self.former_ttls:
            if time_ms <= former.until_ms:
                return former.ttl_ms
        return self.settings.ttl_ms

    def _fail(self, gone: list[Staged], error: FelixError) -> None:
        if gone:
            self._rollbacks += 1
            self._refused = error
        for staged in gone:
            waiters, staged.waiters = staged.waiters, []
            for _, waiter in waiters:
                waiter(0, error)

    # -- following -------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Apply what has become durable, answer who waited for it, tell the watches."""
        durable = self.log.high_watermark
        if durable > self.applied:
            settled = self.state.settle(durable)
            self.applied = durable
            self.encoded.clear()
            if self._watchers:
                for staged in settled:
                    self._keep_decoded(staged)
            for staged in settled:
                first = staged.base_offset + 1
                for place, waiter in staged.waiters:
                    waiter(first + place, None)
            if not self._timer.due_ms:
                self._arm()
        if self.state.relieve(BATCH_BYTES):
            self._soon()
        for watcher in tuple(self._watchers):
            watcher.pump()

    # -- expiring --------------------------------------------------------------------------------------

    def _arm(self) -> None:
        deadline = self.state.next_deadline_ms
        if deadline is not None and not self._closed:
            now_ms = self.clock_ms()
            self._timer.arm_sooner(min(max(deadline, now_ms + SWEEP_MS_MIN), now_ms + SWEEP_MS_MAX))

    def _sweep(self) -> None:
        if self.log.state is not State.SERVING:
            self._timer.arm(self.clock_ms() + RETRY_MS)
            return
        self.sweep()
        self._arm()

    def sweep(self) -> int:
        """Write tombstones for what has expired, a bounded number; how many."""
        count = self.state.sweep(self.clock_ms(), SWEEP_KEYS_MAX, BATCH_BYTES)
        if count:
            self._flush()
        return count

    # -- watching --------------------------------------------------------------------------------------

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Call `pump` after each change. Returns what ends it."""
        self._watchers.append(watcher)

        def unwatch() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

        return unwatch

    def covers(self, offset: int) -> bool:
        """True where the log tells all that happened from `offset` on."""
        return offset >= self.log.log_start_offset and offset >= self.log.tombstones_from

    def decoded(self, offset: int) -> list[Decoded] | None:
        """Batches from the one that holds `offset` on, below `applied`, decoded; None where only the disk has them."""
        found: list[Decoded] = []
        size = 0
        while size < DECODED_STEP_BYTES and (batch := self._decoded.look(offset)) is not None:
            found.append(batch)
            offset, size = batch.next_offset, size + batch.size_bytes
        if found:
            return found
        entries = self.log.read_hot(offset, READ_BYTES_MAX)
        return None if entries is None else self.decode_entries(entries)

    def decode_entries(self, entries: list[LogEntry]) -> list[Decoded]:
        """What the log gave, decoded once for all watches."""
        found: list[Decoded] = []
        for entry in entries:
            if entry.base_offset >= self.applied:
                break
            decoded = self._decoded.look(entry.base_offset)
            if decoded is None or decoded.next_offset != entry.next_offset:
                changes = self._decode(decode_batch(memoryview(entry.data)[FRAME_HEADER_BYTES:]))
                decoded = Decoded(
                    entry.base_offset,
                    entry.next_offset,
                    [(offset + 1, change) for offset, change in changes],
                    len(entry.data),
                )
                self._decoded.put(decoded.base_offset, decoded)
            found.append(decoded)
        return found

    def _keep_decoded(self, staged: Staged) -> None:
        first = staged.base_offset + 1
        size = sum(len(change.key) + len(change.value) + RECORD_BYTES for _, change in staged.changes)
        changes = [(first + place, change) for place, change in staged.changes]
        decoded = Decoded(staged.base_offset, staged.next_offset, changes, size)
        self._decoded.put(decoded.base_offset, decoded)
