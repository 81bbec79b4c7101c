"""A watch: the keys of a cache, or those with a prefix, and every change to them, as a cursor per shard over the log.

It begins with the whole state: it notes each shard's offset, sends the keys page by page, each page as of the moment it is read,
and then every change from the noted offsets on. So there is no gap, and the broker holds nothing for it meanwhile; versions show
where a page is ahead of the noted offset. Or it begins at the watcher's own position, as long as the log still has all changes
since. If it does not (tombstones compacted away, a ring that advanced, a log that was put back to an earlier copy), the watch sends a Reset and then the whole state. The
same happens to a watch that falls so far behind.

Invariants: nothing is sent beyond credit; unsent changes are not held; changes are sent in the log's order, and none is left
out, unless a later one of the same key is in the same message and the watcher asked only for that; Ready is sent once after each
beginning.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from felix.cache_messages import Changes, Initial, Ready, Reset, no_call
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.frames import CALL_BYTES_MAX, FRAME_HEADER_BYTES, FrameType
from felix.messages import CacheOpened, Request, WatchCache, encode_message
from felix.names import StreamName
from felix.session import CreditLine
from policy.access import Verb, not_found_or_forbidden
from region.cache.records import RECORD_BYTES, Change
from region.cache.service import Cache, CacheService
from region.cache.shard import ENCODED_MAX, CacheShard, Decoded
from region.exchange import Exchange
from region.limits.quota import Meter
from region.ports import Exchanging, Role

log = logging.getLogger("felix.region.cache")

CREDIT_BYTES_MIN: Final = FRAME_HEADER_BYTES + CALL_BYTES_MAX
"""A watch with less could not take every change."""
EVENT_BYTES: Final = 64 << 10
"""Size of one message, except for one large value: a watcher must be able to hold this much, and watches share encodings of this
size.
"""
PAGE_KEYS: Final = 1_024
EPOCHS_TOLD: Final = 4
"""A watcher says with these that it has read this log: the newest that both know is enough."""
PROGRESS_OFFSETS: Final = 4_096
"""After so many offsets without a change for it, a watcher is sent the log's end, so that it can resume there."""


class CacheWatch:
    """One watch, on an exchange of its own (region.exchange.Handler)."""

    def __init__(self, service: CacheService, exchange: Exchange) -> None:
        self._service = service
        self._exchange = exchange
        self._cache: Cache | None = None
        self._shards: dict[int, CacheShard] = {}
        self._key = self._prefix = b""
        self._coalesce = False
        self._credit = CreditLine(0)
        self._wanted_bytes = 0
        self._cursors: dict[int, int] = {}
        self._told: dict[int, int] = {}
        """Per shard, what the watcher knows that the log has reached."""
        self._pages: deque[tuple[int, bytes]] = deque()
        """Shards whose state is still to be sent, each with the last key sent."""
        self._ready_at: dict[int, int] | None = None
        """The offsets at which Ready is due; None while the state is being sent, and once Ready was sent."""
        self._order: deque[int] = deque()
        self._reading: asyncio.Task[None] | None = None
        self._paced: asyncio.TimerHandle | None = None
        self._holds = self._live = self._telling = False
        self._unwatch: list[Callable[[], None]] = []

    # -- the handler -----------------------------------------------------------------------------------

    def open(self, correlation: int, request: Request[Any]) -> None:
        assert isinstance(request, WatchCache)
        exchange = self._exchange
        try:
            name = StreamName.parse(request.stream)
            exchange.broker.require(exchange.identity, Verb.SUBSCRIBE, name, "cache")
            if request.credit_bytes < CREDIT_BYTES_MIN:
                raise RequestError(
                    f"A watch with {request.credit_bytes} bytes of credit could not take every change.",
                    hint=f"Grant at least {CREDIT_BYTES_MIN} bytes.",
                )
            if request.key and request.prefix:
                raise RequestError("A watch is of a key or of a prefix, not of both.")
            self._cache = cache = self._service.cache(name, Verb.SUBSCRIBE)
            self._key, self._prefix = request.key, request.key or request.prefix
            self._coalesce = request.coalesce
            self._credit = CreditLine(request.credit_bytes)
            of_key = cache.of(request.key) if request.key else None
            for number in range(cache.stream.shard_count):
                shard = cache.shard(number)
                if of_key is None or shard is of_key:
                    self._shards[number] = shard
        except (RequestError, UnavailableError) as error:
            exchange.fail(error, correlation)
            return
        exchange.spawn(correlation, self._begin(cache, correlation, request))

    async def _begin(self, cache: Cache, correlation: int, request: WatchCache) -> None:
        exchange = self._exchange
        try:
            await cache.loaded(list(self._shards.values()))
            for shard in self._shards.values():
                shard.up_to_date()
        except UnavailableError as error:
            exchange.fail(error, correlation)
            return
        refusal = self._refusal()
        if refusal is not None:
            exchange.fail(refusal, correlation)
        if exchange.over:
            return
        try:
            self._meter.hold("subscriptions")
        except UnavailableError as error:
            exchange.fail(error, correlation)
            return
        self._holds = True
        told = {} if cache.stream.ephemeral else self._shards
        epochs = {number: shard.log.newest_epochs(EPOCHS_TOLD) for number, shard in told.items()}
        opened = CacheOpened(
            cache.stream.incarnation, cache.stream.shard_count, exchange.broker.streams_ms(), epochs
        )
        exchange.opened(correlation, opened)
        cache.watches += 1
        self._unwatch = [shard.watch(self) for shard in self._shards.values()]
        self._order = deque(self._shards)
        offsets = request.offsets if request.incarnation == cache.stream.incarnation else {}
        epochs_read = {} if cache.stream.ephemeral else request.epochs
        if set(offsets) >= set(self._shards) and all(
            shard.covers(offsets[number])
            and offsets[number] <= shard.applied
            and shard.log.epochs.shared_end(epochs_read.get(number, ()), offsets[number]) == offsets[number]
            for number, shard in self._shards.items()
        ):
            self._cursors = {number: offsets[number] for number in self._shards}
            self._told = dict(self._cursors)
            self._ready_at = {number: shard.applied for number, shard in self._shards.items()}
        else:
            self._reset()
        self._live = True
        self.pump()

    def call(self, correlation: int, call: Any) -> None:
        raise AssertionError("no call decodes on a watch")

    def credit(self, limit_bytes: int) -> None:
        self._credit.extend(limit_bytes)
        if self._wanted_bytes <= self._credit.left_bytes:
            self._wanted_bytes = 0
        self.pump()

    def rights_changed(self) -> None:
        refusal = self._refusal()
        if refusal is not None:
            self._exchange.fail(refusal)

    def _refusal(self) -> FelixError | None:
        cache, exchange = self._cache, self._exchange
        if cache is None:
            return None
        name = cache.stream.name
        if cache.stream.deleted:
            return RequestError(f"The cache {name} was deleted.", code=Code.NOT_FOUND)
        if not exchange.broker.allows(exchange.identity, Verb.SUBSCRIBE, name):
            return not_found_or_forbidden(Verb.SUBSCRIBE, name, "cache")
        return cache.stream.elsewhere

    def closed(self) -> None:
        self._live = False
        if self._cache is not None and self._unwatch:
            self._cache.watches -= 1
        for unwatch in self._unwatch:
            unwatch()
        self._unwatch.clear()
        if self._holds:
            self._holds = False
            self._meter.release("subscriptions")
        if self._paced is not None:
            self._paced.cancel()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    # -- telling ---------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Tell the whole state, as from now."""
        self._cursors = {number: shard.applied for number, shard in self._shards.items()}
        self._told = dict(self._cursors)
        self._pages = deque((number, b"") for number in self._shards)
        self._ready_at = None
        # Small, and once per beginning: it need not wait for credit.
        self._send(encode_message(FrameType.REPLY, Reset(dict(self._cursors))))

    def pump(self) -> None:
        """Send what is in memory now; read the rest in a task."""
        if not self._live or self._reading is not None or self._telling:
            return
        self._telling = True
        try:
            while self._live and self._step():
                pass
        except FelixError as error:
            self._exchange.fail(error)
        finally:
            self._telling = False

    def _step(self) -> bool:
        """One message; False where nothing is left, or nothing more may be sent."""
        if not self._may_send():
            return False
        if self._pages:
            return self._tell_page()
        for _ in range(len(self._order)):
            number = self._order[0]
            shard, cursor = self._shards[number], self._cursors[number]
            if cursor >= shard.applied:
                self._order.rotate(-1)
                continue
            shard.check()
            if not shard.covers(cursor):
                self._reset()
                return True
            batches = shard.decoded(cursor)
            if batches is None:
                self._reading = asyncio.ensure_future(self._read(number))
                return False
            if not self._tell_changes(number, cursor, batches):
                return False
            self._order.rotate(-1)
            return True
        return self._tell_ready()

    def _may_send(self) -> bool:
        if (
            self._wanted_bytes
            or self._credit.left_bytes <= FRAME_HEADER_BYTES
            or not self._exchange.may_send()
        ):
            return False
        throttle = self._meter.delivery_throttle()
        if throttle is None:
            return True
        self._exchange.session.throttled(throttle)
        if self._paced is None:
            self._paced = asyncio.get_running_loop().call_later(throttle.wait_s, self._go_on)
        return False

    @property
    def _meter(self) -> Meter:
        meter = self._exchange.meter
        assert meter is not None
        return meter

    def _go_on(self) -> None:
        self._paced = None
        self.pump()

    def _fits(self, frame: bytes) -> bool:
        """False, and a note of what is wanted, where the credit does not reach."""
        if len(frame) <= self._credit.left_bytes:
            return True
        self._wanted_bytes = len(frame)
        return False

    def _send(self, frame: bytes, records: int = 0) -> None:
        self._meter.delivered(len(frame), records)
        self._credit.use(min(len(frame), self._credit.left_bytes))
        self._exchange.deliver(frame)

    def _tell_page(self) -> bool:
        number, after = self._pages[0]
        shard = self._shards[number]
        shard.check()
        state, now_ms = shard.state, shard.clock_ms()
        entries: list[tuple[bytes, int, bytes, int]] = []
        size, last, is_whole = 0, b"", True
        if self._key:
            entry = state.peek(self._key, now_ms)
            if entry is not None:
                entries.append((self._key, entry.version, entry.value, entry.expires_at_ms))
        else:
            seen = 0
            for key, entry in state.page(self._prefix, after, PAGE_KEYS, now_ms):
                if entry is not None:
                    size += len(key) + len(entry.value) + RECORD_BYTES
                    if size > EVENT_BYTES and entries:
                        is_whole = False
                        break
                    entries.append((key, entry.version, entry.value, entry.expires_at_ms))
                last = key
                seen += 1
            is_whole = is_whole and seen < PAGE_KEYS
        if entries:
            frame = encode_message(FrameType.REPLY, Initial(number, entries))
            if not self._fits(frame):
                return False
            self._send(frame, len(entries))
        if is_whole:
            self._pages.popleft()
        else:
            self._pages[0] = (number, last)
        if not self._pages:
            self._ready_at = {each: shard.applied for each, shard in self._shards.items()}
        return True

    def _tell_changes(self, number: int, cursor: int, batches: list[Decoded]) -> bool:
        """Send the changes of as many batches as one message holds; False where the credit does not reach for them."""
        shard = self._shards[number]
        count, size = 0, 0
        for batch in batches:
            size += batch.size_bytes
            if count and size > EVENT_BYTES and not self._coalesce:
                break
            count += 1
        batches = batches[:count]
        next_offset = batches[-1].next_offset
        memo = (cursor, next_offset, self._key, self._prefix, self._coalesce)
        encoded = shard.encoded.get(memo)
        if encoded is None:
            wanted = [
                (version, change)
                for batch in batches
                for version, change in batch.changes
                if version > cursor and self._concerns(change)
            ]
            return self._tell_wanted(number, cursor, next_offset, wanted, memo)
        frame, records = encoded
        if not self._fits(frame):
            return False
        self._send(frame, records)
        self._cursors[number] = self._told[number] = next_offset
        return True

    def _tell_wanted(
        self, number: int, cursor: int, next_offset: int, wanted: list[tuple[int, Change]], memo: object
    ) -> bool:
        shard = self._shards[number]
        if self._coalesce:
            newest = {change.key: version for version, change in wanted}
            wanted = [(version, change) for version, change in wanted if newest[change.key] == version]
        if not wanted:
            self._cursors[number] = next_offset
            if next_offset - self._told[number] < PROGRESS_OFFSETS:
                return True
        at = 0
        while True:
            rows: list[tuple[int, bytes, int, bytes, int]] = []
            size = 0
            while at < len(wanted) and size < EVENT_BYTES:
                version, change = wanted[at]
                part = len(change.key) + len(change.value) + RECORD_BYTES
                if rows and size + part > EVENT_BYTES:
                    break
                size += part
                rows.append((change.reason, change.key, version, change.value, change.expires_at_ms))
                at += 1
            is_last = at == len(wanted)
            reached = next_offset if is_last else wanted[at - 1][0]
            frame = encode_message(FrameType.REPLY, Changes(number, reached, rows))
            if not self._fits(frame):
                return False
            if is_last and len(rows) == len(wanted) and len(shard.encoded) < ENCODED_MAX:
                shard.encoded[memo] = frame, len(rows)
            self._send(frame, len(rows))
            self._cursors[number] = self._told[number] = reached
            if is_last:
                return True
            if not self._may_send():
                return False

    def _concerns(self, change: Change) -> bool:
        return change.key == self._key if self._key else change.key.startswith(self._prefix)

    def _tell_ready(self) -> bool:
        at = self._ready_at
        if at is None or any(self._cursors[number] < offset for number, offset in at.items()):
            return False
        frame = encode_message(FrameType.REPLY, Ready())
        if not self._fits(frame):
            return False
        self._send(frame)
        self._ready_at = None
        return True

    async def _read(self, number: int) -> None:
        """Read what is not in memory for one shard, and tell it."""
        shard, cursor = self._shards[number], self._cursors[number]
        try:
            entries = await shard.read(cursor)
            if not self._live:
                return
            if shard.covers(cursor):
                batches = shard.decode_entries(entries)
                if batches and self._may_send():
                    self._tell_changes(number, cursor, batches)
        except RequestError as error:
            if error.code is not Code.OFFSET_OUT_OF_RANGE:
                self._exchange.fail(error)
                return
            # The log's start passed the cursor during the read: the next step starts over.
        except FelixError as error:
            self._exchange.fail(error)
            return
        except Exception:
            log.exception("a watch could not read %s shard %d", shard.name, number)
            self._exchange.fail(FelixError("The broker could not read its log.", code=Code.INTERNAL))
            return
        finally:
            self._reading = None
        asyncio.get_running_loop().call_soon(self.pump)


def opener(service: CacheService) -> Callable[[Exchanging, int], Role]:
    """What the node registers for WatchCache."""

    def open_watch(session: Exchanging, stream_id: int) -> Role:
        return Exchange(service.broker, session, stream_id, partial(CacheWatch, service), no_call)

    return open_watch
