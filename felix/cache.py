"""Cache: keys and values of a region, and the watch that follows them.

::

    sessions = region.cache("acme/web/sessions")
    await sessions.put("user:7", b"{...}", ttl=3600)
    entry = await sessions.get("user:7")        # Entry(value, version, ttl) or None
    async for change in sessions.watch(prefix="user:"):
        ...

A mutation is answered when it is as durable as the cache is, and every get after the answer sees it. Calls of one key go out in
the order in which they are made; calls of many keys share a few exchanges and are pipelined. What is lost with a connection is
asked again by itself: gets, puts and deletes because asking twice does the same (a put that is repeated may overwrite what
another client put meanwhile), compare-and-set and increment because they carry an operation id that the broker carries out once.

A watch survives reconnects: it goes on where it was, or tells the whole state again after a `reset`. Everything here belongs to one
event loop; `felix.sync` is for threads.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from itertools import count
from types import MappingProxyType, TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

import msgspec

from felix import cache_messages as wire
from felix.backoff import Backoff
from felix.batch import KEY_BYTES_MAX
from felix.connection import RegionConnection
from felix.errors import Code, FelixError, ProtocolError, RequestError, UnavailableError
from felix.exchange import Exchange
from felix.frames import CALL_BYTES_MAX, FRAME_HEADER_BYTES, Frame
from felix.messages import AlterStream, Answer, CacheOpened, OpenCache, StreamState, WatchCache
from felix.names import StreamName, shard_for_key
from felix.runtime.port import Clock
from felix.settings import DURATION_MS_MAX, EXCHANGES_DEFAULT, CacheChange
from felix.subscription import EpochsRead
from felix.tasks import end_tasks

EXCHANGES_MAX: Final = 16
WATCH_CREDIT_BYTES: Final = 2 << 20
WATCH_CREDIT_BYTES_MIN: Final = FRAME_HEADER_BYTES + CALL_BYTES_MAX
FOREVER: Final = math.inf
"""A ttl without end, where the cache was made with another one."""
MANY_BYTES: Final = 256 << 10
"""Of one call of put_many; more is split."""
MANY_KEYS: Final = 1_000
SCAN_KEYS: Final = 1_000

_AGAIN: Final = (
    Code.DISCONNECTED,
    Code.SHUTTING_DOWN,
    Code.UNAVAILABLE,
    Code.LIMIT_RATE,
    Code.NOT_LEADER,
)
"""Refusals that pass by themselves."""

Key = str | bytes
Value = bytes | bytearray | memoryview | str
Kind = Literal["put", "deleted", "expired", "evicted", "reset", "ready"]
_KINDS: Final[dict[int, Kind]] = {
    wire.PUT: "put",
    wire.DELETED: "deleted",
    wire.EXPIRED: "expired",
    wire.EVICTED: "evicted",
}


class Entry(NamedTuple):
    """A value that was there. `version` grows with every change of the key; `ttl` is what was left, in seconds (None: no end)."""

    value: bytes
    version: int
    ttl: float | None


class Position(NamedTuple):
    """The position of a watch, for programs that want to resume from it. `str()` and `parse` for storing it."""

    incarnation: bytes
    offsets: Mapping[int, int]
    epochs: EpochsRead = MappingProxyType({})
    """By them the broker sees whether the log was put back to an earlier copy since."""

    def __str__(self) -> str:
        offsets = ",".join(
            f"{shard}:{offset}" + "".join(f":{epoch}-{since}" for epoch, since in self.epochs.get(shard, ()))
            for shard, offset in sorted(self.offsets.items())
        )
        return f"{self.incarnation.hex()}@{offsets}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises RequestError(INVALID)."""
        incarnation, _, rest = text.partition("@")
        try:
            parts = [part.split(":") for part in rest.split(",")]
            offsets = {int(shard): int(offset) for shard, offset, *_ in parts}
            epochs = {int(shard): [_epoch(each) for each in met] for shard, _, *met in parts if met}
            return cls(bytes.fromhex(incarnation), offsets, epochs)
        except ValueError as error:
            raise RequestError(f"{text[:80]!r} is no position of a watch.") from error


def _epoch(text: str) -> tuple[int, int]:
    """Raises ValueError."""
    epoch, since = text.split("-")
    return int(epoch), int(since)


class Change(NamedTuple):
    """One event of a watch. `kind`: put, deleted, expired, evicted; `reset`: discard all earlier events, the whole state
    follows; `ready`: all keys that existed when the watch began have been delivered. `value` is set for a put.
    """

    kind: Kind
    key: bytes = b""
    value: bytes | None = None
    version: int = 0
    expires_at_ms: int = 0
    """By the broker's clock; 0 for never."""
    position: Position | None = None
    """Where to resume after this change; None while the initial state is being delivered."""


class Cache:
    """One cache of a region. Made by `RegionClient.cache`, which gives the same one for the same name."""

    def __init__(
        self, connection: RegionConnection, name: StreamName, *, exchanges: int = EXCHANGES_DEFAULT
    ) -> None:
        """Raises RequestError(CONFIG_INVALID)."""
        if not 1 <= exchanges <= EXCHANGES_MAX:
            raise RequestError(
                f"{exchanges} exchanges; 1 to {EXCHANGES_MAX} are allowed.", code=Code.CONFIG_INVALID
            )
        self.name = name
        self._connection = connection
        self._pool: list[Exchange | None] = [None] * exchanges
        self._opening = asyncio.Lock()
        self._shards = 0
        self._operations = count()
        self._why_not_open = ""
        self._operation_prefix = connection.runtime.random.randbytes(8)

    def __repr__(self) -> str:
        return f"Cache({str(self.name)!r})"

    # -- one key ---------------------------------------------------------------------------------------

    async def get(self, key: Key) -> Entry | None:
        """The value, or None. Raises RequestError (no right, no such cache), UnavailableError."""
        data = key_bytes(key)
        return _entry(await self._call(data, wire.Get(data)))

    async def put(self, key: Key, value: Value, *, ttl: float | None = None) -> int:
        """Put it, and return its version. `ttl` in seconds; None: the cache's own; FOREVER: without end.

        Raises RequestError (no right, too large); UnavailableError, with LIMIT_MEMORY where a cache that evicts nothing is full.
        """
        data = key_bytes(key)
        stored: wire.Stored = await self._call(data, wire.Put(data, value_bytes(value), ttl_ms(ttl)))
        return stored.version

    async def delete(self, key: Key) -> bool:
        """Delete it; whether it was there (where the answer was lost and it was asked again: perhaps False)."""
        data = key_bytes(key)
        stored: wire.Stored = await self._call(data, wire.Delete(data))
        return stored.version > 0

    async def compare_and_set(
        self, key: Key, value: Value, *, version: int, ttl: float | None = None
    ) -> int | None:
        """Put it where the key has this version (0: where it is not there). The new version, or None where it has another."""
        data = key_bytes(key)
        call = wire.CompareAndSet(data, value_bytes(value), version, self._operation(), ttl_ms(ttl))
        compared: wire.Compared = await self._call(data, call)
        return compared.version if compared.is_set else None

    async def increment(self, key: Key, by: int = 1, *, ttl: float | None = None) -> int:
        """Add to the number under the key (64 bits, kept as decimal digits; 0 where there is none); the number then.

        `ttl` counts where the key is made by it; the expiry of one that is there stays. Raises RequestError where there is no
        number, or where it would not fit.
        """
        data = key_bytes(key)
        call = wire.Increment(data, by, self._operation(), ttl_ms(ttl))
        counted: wire.Counted = await self._call(data, call)
        return counted.value

    async def exists(self, key: Key) -> bool:
        """Whether it is there; the value does not travel."""
        data = key_bytes(key)
        found: wire.Found = await self._call(data, wire.Get(data, value=False))
        return found.version > 0

    async def ttl(self, key: Key) -> float | None:
        """Seconds that are left; FOREVER for one without end; None where the key is not there."""
        data = key_bytes(key)
        found: wire.Found = await self._call(data, wire.Get(data, value=False))
        if not found.version:
            return None
        return found.ttl_ms / 1000 if found.ttl_ms else FOREVER

    # -- many keys -------------------------------------------------------------------------------------

    async def get_many(self, keys: Iterable[Key]) -> dict[bytes, Entry]:
        """The entries that are there, by key."""
        wanted = list(dict.fromkeys(map(key_bytes, keys)))
        found: dict[bytes, Entry] = {}
        for begin in range(0, len(wanted), MANY_KEYS):
            part = wanted[begin : begin + MANY_KEYS]
            while part:
                answer: wire.FoundMany = await self._call(part[0], wire.GetMany(part))
                if not answer.entries:
                    raise ProtocolError("The broker answered a get of many keys with nothing.")
                for key, (version, value, left) in zip(part, answer.entries, strict=False):
                    if version:
                        found[key] = Entry(value, version, left / 1000 if left else None)
                part = part[len(answer.entries) :]
        return found

    async def put_many(
        self, items: Mapping[Key, Value] | Iterable[tuple[Key, Value]], *, ttl: float | None = None
    ) -> list[int]:
        """Put many; their versions, in the order given. Not one transaction: where it raises, some may have been put."""
        pairs = items.items() if isinstance(items, Mapping) else items
        left = ttl_ms(ttl)
        group: list[tuple[bytes, bytes]] = []
        size = 0
        versions: list[int] = []
        for key, value in pairs:
            pair = key_bytes(key), value_bytes(value)
            if group and (size + len(pair[1]) > MANY_BYTES or len(group) == MANY_KEYS):
                versions += await self._put_group(group, left)
                group, size = [], 0
            group.append(pair)
            size += len(pair[0]) + len(pair[1])
        return versions + (await self._put_group(group, left) if group else [])

    async def _put_group(self, group: list[tuple[bytes, bytes]], left_ms: int) -> list[int]:
        stored: wire.StoredMany = await self._call(group[0][0], wire.PutMany(group, left_ms))
        return stored.versions

    async def delete_many(self, keys: Iterable[Key]) -> int:
        """Delete many; how many were there."""
        wanted = list(dict.fromkeys(map(key_bytes, keys)))
        count_ = 0
        for begin in range(0, len(wanted), MANY_KEYS):
            part = wanted[begin : begin + MANY_KEYS]
            stored: wire.StoredMany = await self._call(part[0], wire.DeleteMany(part))
            count_ += sum(version > 0 for version in stored.versions)
        return count_

    async def scan(self, prefix: Key = b"") -> AsyncIterator[tuple[bytes, Entry]]:
        """Keys that begin so, and their entries: shard by shard, in order within each, page after page. A page is of one moment."""
        begins = key_bytes(prefix, empty=True)
        for shard in range(await self.shards()):
            after = b""
            while True:
                page: wire.Page = await self._call(begins, wire.Scan(shard, begins, after, SCAN_KEYS))
                for key, version, value, left in page.entries:
                    yield key, Entry(value, version, left / 1000 if left else None)
                if not page.more or not page.entries:
                    break
                if page.entries[-1][0] <= after:
                    raise RequestError(
                        "Scan was answered with a page that does not go on behind what was listed.",
                        hint="No honest broker answers so: ask the region's operator.",
                    )
                after = page.entries[-1][0]

    async def stats(self) -> wire.CacheStats:
        """The broker's counters of this cache."""
        stats: wire.CacheStats = await self._call(b"", wire.Stats())
        return stats

    async def alter(
        self, *, bytes_max: int | None = None, ttl: float | None = None, eviction: str | None = None
    ) -> StreamState:
        """Change the cache's settings while it serves; what is None stays, values do, too, but for what no longer fits.

        `bytes_max` per shard: with less, the least recently used are evicted, some at a time (a cache that refuses is only made as
        small as what it holds). `ttl` in seconds, FOREVER without end: of values put from now on without one. Raises
        RequestError: FORBIDDEN, CONFIG_INVALID, UNSUPPORTED; CONFLICT where what it holds would not fit.
        """
        change = CacheChange(bytes_max, None if ttl is None else ttl_ms(ttl), eviction)
        return await self._connection.request(AlterStream(str(self.name), cache=change))

    async def shards(self) -> int:
        """How many shards the cache has."""
        if not self._shards:
            await self._exchange(0)
        return self._shards

    # -- watching --------------------------------------------------------------------------------------

    def watch(
        self,
        *,
        key: Key | None = None,
        prefix: Key = b"",
        resume: Position | str | None = None,
        coalesce: bool = False,
        credit_bytes: int = WATCH_CREDIT_BYTES,
    ) -> Watch:
        """An iterator of changes: first the state (puts, then `ready`), then every change as it comes.

        `resume`: the position of an earlier change: only later changes are delivered, or a `reset` and the whole state if the
        broker no longer has them. `coalesce`: while behind, only the last change of a key. `credit_bytes` bounds what is held
        here unread. Raises RequestError(CONFIG_INVALID) here; the iterator what the broker refuses it with.
        """
        if key is not None and prefix:
            raise RequestError("A watch is of a key or of a prefix, not of both.", code=Code.CONFIG_INVALID)
        if credit_bytes < WATCH_CREDIT_BYTES_MIN:
            raise RequestError(
                f"{credit_bytes} bytes of credit would not hold every change; {WATCH_CREDIT_BYTES_MIN} do.",
                code=Code.CONFIG_INVALID,
            )
        if isinstance(resume, str):
            resume = Position.parse(resume)
        return Watch(
            self._connection,
            self.name,
            b"" if key is None else key_bytes(key),
            key_bytes(prefix, empty=True),
            resume,
            coalesce,
            credit_bytes,
        )

    def mirror(self, prefix: Key = b"") -> Mirror:
        """A copy of these keys in this process, kept right by a watch. Use it as `async with`."""
        return Mirror(self.watch(prefix=prefix), self._connection.runtime.clock)

    # -- calls -----------------------------------------------------------------------------------------

    def _operation(self) -> bytes:
        return self._operation_prefix + next(self._operations).to_bytes(8, "big")

    async def _call(self, key: bytes, message: wire.Positional) -> Any:
        """One call and its reply; asked again where it was lost, or refused for a reason that passes."""
        number = hash(key) % len(self._pool)
        exchange = self._pool[number]
        if exchange is None or exchange.is_over:
            exchange = await self._exchange(number)
        try:
            return await exchange.call(message, again=False)
        except UnavailableError as error:
            if not _passes(error):
                raise
            return await self._again(number, message, error)

    async def _again(self, number: int, message: wire.Positional, error: UnavailableError) -> Any:
        connection = self._connection
        backoff = Backoff(connection.policy, connection.runtime.random)
        clock = connection.runtime.clock
        limit = clock.monotonic() + connection.request_timeout_s
        while clock.monotonic() < limit:
            await asyncio.sleep(backoff.after_ms(error) / 1000)
            try:
                return await (await self._exchange(number)).call(message, again=False)
            except UnavailableError as another:
                if not _passes(another):
                    raise
                error = another
        raise error

    async def _exchange(self, number: int) -> Exchange:
        """An open exchange of the pool. Raises what the broker refuses it with, UnavailableError(TIMEOUT)."""
        limit_s = self._connection.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._opened(number)
        except TimeoutError:
            why = self._why_not_open or self._connection.why_unreached
            raise UnavailableError(
                f"The cache {self.name} could not be opened within {limit_s:g} s. {why}".rstrip(),
                code=Code.TIMEOUT,
                hint="Is the region up? `felix region status` tells.",
            ) from None

    async def _opened(self, number: int) -> Exchange:
        async with self._opening:
            exchange = self._pool[number]
            if exchange is not None and not exchange.is_over:
                return exchange
            exchange = Exchange(
                self._connection, lambda: OpenCache(str(self.name)), wire.decode_reply, stream=self.name
            )
            try:
                opened = await exchange.open()
            except BaseException:
                self._why_not_open = exchange.why_not_open
                exchange.close()
                raise
            self._why_not_open = ""
            if not isinstance(opened, CacheOpened):
                exchange.close()
                raise ProtocolError(f"The broker answered OpenCache with a {type(opened).__name__}.")
            self._shards = opened.shards
            self._pool[number] = exchange
            return exchange

    def close(self) -> None:
        """End the exchanges; they are opened again when they are needed."""
        for number, exchange in enumerate(self._pool):
            if exchange is not None:
                exchange.close()
                self._pool[number] = None


class _Opened(msgspec.Struct):
    """A link stands: in the queue of events, so that what came before it is of the link before."""

    incarnation: bytes
    skew_ms: int
    epochs: EpochsRead


class Watch:
    """An async iterator of `Change`. Ends with `close` (or `async with`), or raises why the broker ended it. One that is merely dropped
    stays open, and keeps its place among the session's streams."""

    def __init__(
        self,
        connection: RegionConnection,
        name: StreamName,
        key: bytes,
        prefix: bytes,
        resume: Position | None,
        coalesce: bool,
        credit_bytes: int,
    ) -> None:
        self.skew_ms = 0
        """The broker's clock less this machine's, as of the last connect, up to the time that a message takes."""
        self._name, self._key, self._prefix = name, key, prefix
        self._coalesce = coalesce
        self._window_bytes = credit_bytes
        self._clock = connection.runtime.clock
        self._exchange = Exchange(connection, self._request, self._decode, self, stream=name)
        self._is_begun = self._is_closed = False
        self._error: FelixError | None = None
        # The position of the received changes: where a new link resumes.
        self._incarnation = resume.incarnation if resume else b""
        self._reached: dict[int, int] = dict(resume.offsets) if resume else {}
        self._resumable = resume is not None
        self._epochs: EpochsRead = dict(resume.epochs) if resume else {}
        self._link_epochs: EpochsRead = self._epochs
        """What the link that stands was told. They count once it has told something: until then it is not known that it goes on from there."""
        # Changes that were not given out yet, and the credit for them.
        self._events: deque[tuple[object, int]] = deque()
        self._came = asyncio.Event()
        self._event_bytes = 0
        self._given_bytes = self._granted_bytes = 0
        # The position of the changes that were given out.
        self._at: dict[int, int] = dict(self._reached)
        self._at_incarnation = self._incarnation
        self._at_resumable = self._resumable
        self._at_epochs: EpochsRead = self._epochs
        self._at_link_epochs: EpochsRead = self._epochs
        self._ready = False
        self._began = resume is not None
        self._ahead: dict[bytes, int] = {}
        self._changes: Iterator[Change] = iter(())
        self._in_hand = False
        """Changes of the newest message are given out one by one; `_in_hand_position` is where a resume goes on behind the last of them that was."""
        self._in_hand_position: Position | None = None

    # -- an iterator -----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def open(self) -> None:
        """Begin; the iterator does so by itself. Raises what the broker refuses it with; where it raises, or is cancelled, the watch is
        closed."""
        try:
            await self._stands()
        except BaseException as error:
            if isinstance(error, FelixError):
                self._error = self._error or error
            self.close()
            raise

    async def _stands(self) -> None:
        """As `open`; but where who waits is cancelled, it begins all the same."""
        if not self._is_begun:
            self._is_begun = True
            await self._exchange.open()

    def close(self) -> None:
        """End it. Idempotent."""
        self._is_closed = self._error is None or self._is_closed
        self._exchange.close()
        self._error = self._error or UnavailableError("The watch was closed.", code=Code.DISCONNECTED)
        self._events.clear()
        self._came.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while True:
            if (change := self._next_in_hand()) is not None:
                return change
            try:
                await self._hold_next()
            except UnavailableError:
                if self._is_closed:
                    raise StopAsyncIteration from None
                raise

    def _next_in_hand(self) -> Change | None:
        """The next change of those that are given out one by one; None where there is no more. For `felix.sync`."""
        for change in self._changes:
            self._in_hand_position = change.position
            return change
        self._in_hand = False
        return None

    async def _hold_next(self) -> None:
        """Give the changes of the next message out one by one. For `felix.sync`."""
        before = self.position
        found = await self._next_event()
        self._hold(found, before)

    def _hold(self, changes: list[Change], before: Position | None) -> None:
        self._changes, self._in_hand, self._in_hand_position = iter(changes), bool(changes), before

    async def changes(self) -> list[Change]:
        """The changes of the next message; at least one. For who takes many."""
        found = list(self._changes)
        while not found:
            found = await self._next_event()
        self._in_hand = False
        return found

    @property
    def is_current(self) -> bool:
        """True while connected, with nothing received that has not been given out."""
        return self._ready and self._exchange.is_open and not self._events

    @property
    def position(self) -> Position | None:
        """Where to resume after the last change given out; None while the initial state is being delivered."""
        return self._in_hand_position if self._in_hand else self._reached_position()

    def _reached_position(self) -> Position | None:
        if not self._at_resumable:
            return None
        return Position(self._at_incarnation, dict(self._at), dict(self._at_epochs))

    async def _next_event(self) -> list[Change]:
        await self._stands()
        while not self._events:
            if self._error is not None:
                raise self._error
            self._came.clear()
            await self._came.wait()
        event, size = self._events.popleft()
        if size:
            self._given_bytes += size
            if self._given_bytes + self._window_bytes - self._granted_bytes >= self._window_bytes // 2:
                self._granted_bytes = self._given_bytes + self._window_bytes
                self._exchange.extend_credit(self._granted_bytes)
        return self._told(event)

    def _told(self, event: object) -> list[Change]:
        """The changes that an event means to the application."""
        if not isinstance(event, _Opened):
            self._at_epochs = self._at_link_epochs
        match event:
            case wire.Changes(shard, next_offset, rows):
                base, incarnation = dict(self._at), self._at_incarnation
                told: list[Change] = []
                for kind, key, version, value, expires_at_ms in rows:
                    if version <= self._ahead.get(key, 0):
                        continue
                    position = (
                        Position(incarnation, {**base, shard: version}, self._at_epochs)
                        if self._at_resumable
                        else None
                    )
                    told.append(
                        Change(
                            _KINDS[kind],
                            key,
                            value if kind == wire.PUT else None,
                            version,
                            expires_at_ms,
                            position,
                        )
                    )
                self._at[shard] = next_offset
                return told
            case wire.Initial(shard, entries):
                begun = self._at.get(shard, 0)
                for key, version, _, _ in entries:
                    if version > begun:
                        self._ahead[key] = version
                return [
                    Change("put", key, value, version, expires_at_ms)
                    for key, version, value, expires_at_ms in entries
                ]
            case wire.Reset(offsets):
                self._at = dict(offsets)
                self._at_resumable = self._ready = False
                self._ahead.clear()
                began, self._began = self._began, True
                return [Change("reset")] if began else []
            case wire.Ready():
                self._ahead.clear()
                was_ready, self._ready, self._at_resumable = self._ready, True, True
                return [] if was_ready else [Change("ready", position=self._reached_position())]
            case _Opened(incarnation, skew_ms, epochs):
                self._at_incarnation, self.skew_ms = incarnation, skew_ms
                self._at_link_epochs = epochs
        return []

    # -- the exchange ----------------------------------------------------------------------------------

    def _request(self) -> WatchCache:
        resumes = self._resumable
        return WatchCache(
            str(self._name),
            self._prefix,
            self._key,
            self._incarnation if resumes else b"",
            dict(self._reached) if resumes else {},
            self._coalesce,
            self._window_bytes,
            {shard: list(met) for shard, met in self._epochs.items()} if resumes else {},
        )

    def _decode(self, body: memoryview) -> wire.WatchEvent:
        self._event_bytes = FRAME_HEADER_BYTES + len(body)
        return wire.decode_event(body)

    def opened(self, answer: Answer) -> None:
        if isinstance(answer, CacheOpened):
            self._incarnation = answer.incarnation
            # Unread events belong to the previous link, whose credit is void.
            self._events = deque((event, 0) for event, _ in self._events)
            self._given_bytes, self._granted_bytes = 0, self._window_bytes
            self._link_epochs = answer.epochs
            self._push(_Opened(answer.incarnation, answer.now_ms - self._clock.now_ms(), answer.epochs), 0)

    def lost(self, error: FelixError) -> None: ...

    def ended(self, error: FelixError) -> None:
        self._error = self._error or error
        self._came.set()

    def event(self, event: Any) -> None:
        self._epochs = self._link_epochs
        match event:
            case wire.Changes(shard, next_offset, _):
                self._reached[shard] = next_offset
            case wire.Reset(offsets):
                self._reached, self._resumable = dict(offsets), False
            case wire.Ready():
                self._resumable = True
        self._push(event, self._event_bytes)

    def frame(self, frame: Frame) -> None:
        raise ProtocolError(f"A {frame.type.name} frame on a watch.", code=Code.FRAME_UNKNOWN)

    def _push(self, event: object, size: int) -> None:
        self._events.append((event, size))
        self._came.set()


class _Held(NamedTuple):
    value: bytes
    version: int
    expires_at_ms: int


class Mirror(Mapping[bytes, bytes]):
    """Keys and values of a cache in this process. Reads cost nothing and never wait; they are as new as the newest event
    received, and each key only moves forward. While disconnected the mirror does not change (`is_current` is False); then it
    catches up. If the broker sends the whole state again, the old state stays until the new one is complete.
    """

    def __init__(self, watch: Watch, clock: Clock) -> None:
        self._watch = watch
        self._clock = clock
        self._entries: dict[bytes, _Held] = {}
        self._next: dict[bytes, _Held] | None = {}
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Returns once the state is here. Raises what the broker refuses the watch with; where it raises, or is cancelled, the mirror is
        closed."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._follow())
        try:
            while self._next is not None:
                await self._change()
        except BaseException:
            self._watch.close()
            self._task.cancel()
            raise

    async def close(self) -> None:
        """Stop following; what was last known stays readable."""
        self._watch.close()
        if self._task is not None:
            await end_tasks(self._task)

    async def _follow(self) -> None:
        try:
            while True:
                for change in await self._watch.changes():
                    self._apply(change)
                self._changed.set()
        except FelixError as error:
            self._error = error
        except asyncio.CancelledError:
            # Whoever waits for a change is not cancelled.
            self._error = UnavailableError("The mirror was closed.", code=Code.DISCONNECTED)
            raise
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._changed.set()

    def _apply(self, change: Change) -> None:
        entries = self._entries if self._next is None else self._next
        match change.kind:
            case "put":
                assert change.value is not None
                entries[change.key] = _Held(change.value, change.version, change.expires_at_ms)
            case "reset":
                self._next = {}
            case "ready":
                if self._next is not None:
                    self._entries, self._next = self._next, None
            case _:
                entries.pop(change.key, None)

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()

    def _held(self, key: Key) -> _Held | None:
        held = self._entries.get(key_bytes(key))
        if held is None or (held.expires_at_ms and self._now_ms() >= held.expires_at_ms):
            return None
        return held

    def _now_ms(self) -> int:
        return self._clock.now_ms() + self._watch.skew_ms

    def __getitem__(self, key: Key) -> bytes:
        held = self._held(key)
        if held is None:
            raise KeyError(key)
        return held.value

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str | bytes) and self._held(key) is not None

    def __iter__(self) -> Iterator[bytes]:
        now_ms = self._now_ms()
        return iter(
            [
                key
                for key, held in self._entries.items()
                if not held.expires_at_ms or now_ms < held.expires_at_ms
            ]
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def version(self, key: Key) -> int:
        """Of the value that is here; 0 where there is none."""
        held = self._held(key)
        return 0 if held is None else held.version

    @property
    def is_current(self) -> bool:
        """True while connected, with everything that has arrived taken in."""
        return self._next is None and self._watch.is_current and self._error is None

    @property
    def position(self) -> Position | None:
        """As `Watch.position`."""
        return self._watch.position

    async def reached(self, key: Key, version: int) -> None:
        """Wait until what is here is at least as new as this version of the key: to read here what was put with `Cache`.

        Raises what ended the watch.
        """
        shard = self._shard(key_bytes(key))
        while self._next is not None or self._watch._at.get(shard, 0) < version:
            await self._change()

    def _shard(self, key: bytes) -> int:
        return shard_for_key(key, max(1, len(self._watch._at)))


def _passes(error: UnavailableError) -> bool:
    """Whether it is worth asking again: a broker short of memory for the moment says when, and one that opens a shard again whose disk has failed; a full
    cache, and a shard that stays stopped, do not."""
    return error.code in _AGAIN or (
        error.code in (Code.LIMIT_MEMORY, Code.SHARD_STOPPED) and error.retry_after_ms is not None
    )


def key_bytes(key: Key, *, empty: bool = False) -> bytes:
    """A key as it travels: text as UTF-8. Raises RequestError(INVALID)."""
    data = _encoded(key) if isinstance(key, str) else bytes(key)
    if len(data) > KEY_BYTES_MAX or (not data and not empty):
        raise RequestError(f"A key has 1 to {KEY_BYTES_MAX} bytes, not {len(data)}.")
    return data


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"This text cannot be sent: {error}.") from error


def value_bytes(value: Value) -> bytes:
    """A value as it travels. Raises RequestError(BATCH_TOO_LARGE)."""
    data = _encoded(value) if isinstance(value, str) else bytes(value)
    if len(data) > wire.VALUE_BYTES_MAX:
        raise RequestError(
            f"A value of {len(data)} bytes; {wire.VALUE_BYTES_MAX} are allowed.", code=Code.BATCH_TOO_LARGE
        )
    return data


def ttl_ms(ttl: float | None) -> int:
    """A ttl in seconds as it travels. Raises RequestError(INVALID)."""
    if ttl is None:
        return wire.DEFAULT_TTL
    if ttl == FOREVER:
        return 0
    if not ttl > 0 or ttl * 1000 > DURATION_MS_MAX:
        raise RequestError(
            f"A ttl of {ttl} s; more than 0 s and at most a year are allowed, or FOREVER.",
            hint="Delete the key where it is to go at once.",
        )
    return max(1, round(ttl * 1000))


def _entry(found: wire.Found) -> Entry | None:
    if not found.version:
        return None
    return Entry(found.value, found.version, found.ttl_ms / 1000 if found.ttl_ms else None)
