"""The cache service of a broker: which streams are caches, their shards' states, and the calls that come in.

A cache's log is read when its stream is opened; calls that come before wait for it. One handler per exchange: a get is answered
in the iteration of the event loop in which it came in, a mutation when it is durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from felix.cache_messages import (
    CacheStats,
    CompareAndSet,
    Compared,
    Counted,
    Delete,
    DeleteMany,
    Found,
    FoundMany,
    Get,
    GetMany,
    Increment,
    Page,
    Put,
    PutMany,
    Scan,
    Stats,
    Stored,
    StoredMany,
    decode_call,
)
from felix.errors import Code, FelixError, ProtocolError, RequestError, UnavailableError
from felix.frames import CALL_BYTES_MAX
from felix.messages import CacheOpened, CacheTraffic, OpenCache, Request
from felix.names import StreamName, shard_for_key
from felix.settings import CacheSettings, Views
from policy.access import Verb, not_found_or_forbidden
from region.broker import Broker
from region.cache.shard import CacheShard
from region.cache.state import Entry, Waiter
from region.exchange import Exchange
from region.gather import Gather
from region.limits.quota import Meter
from region.log.shard import ShardLog
from region.ports import Exchanging, Role
from region.streams.hosted import ELSEWHERE_RETRY_MS, HostedStream, not_serving

log = logging.getLogger("felix.region.cache")

LOAD_WAIT_S: Final = 10.0
"""A call waits so long for a cache whose log is being read."""
PAGE_BYTES_MAX: Final = 256 << 10
"""Of a page of a scan, one large value aside."""
REPLY_BYTES_MAX: Final = CALL_BYTES_MAX - (16 << 10)
ENTRY_SPARE: Final = 48
"""Around a key and a value in a reply."""


class Cache:
    """One cache: the states of its stream's shards, or why one does not serve."""

    def __init__(self, stream: HostedStream, settings: CacheSettings, broker: Broker) -> None:
        self.stream = stream
        self.settings = settings
        self.watches = 0
        self.shards: dict[int, CacheShard | FelixError] = {
            number: CacheShard(
                stream.name,
                number,
                shard,
                settings,
                broker.budgets.cache,
                broker.budgets.catch_up,
                lambda: broker.streams_ms(),
                broker.runtime.clock.monotonic,
                stream.record.config.former_cache.ttls,
            )
            if isinstance(shard, ShardLog)
            else shard
            for number, shard in stream.replicas.items()
        }
        self._loading = asyncio.ensure_future(self._load())

    @property
    def serving(self) -> list[CacheShard]:
        """The shards that have a state."""
        return [shard for shard in self.shards.values() if isinstance(shard, CacheShard)]

    async def _load(self) -> None:
        for shard in self.serving:
            try:
                await shard.load()
            except FelixError as error:
                log.error("cache %s shard %d does not serve: %s", self.stream.name, shard.number, error)
            except Exception as error:
                log.exception("cache %s shard %d could not be read", self.stream.name, shard.number)
                shard.failure = FelixError(
                    f"The broker could not read it: {type(error).__name__}.", code=Code.INTERNAL
                )

    def prepare(self, views: Views) -> None:
        """region.streams.hosted.Altering: nothing that is written or accepted from here on contradicts these. Raises as CacheShard.prepare."""
        if views.cache is not None and views.cache != self.settings:
            for shard in self.serving:
                shard.prepare(views.cache)

    def altered(self) -> None:
        config = self.stream.record.config
        assert config.views.cache is not None
        self.settings = config.views.cache
        for shard in self.serving:
            shard.alter(self.settings, config.former_cache.ttls)

    def traffic(self) -> CacheTraffic:
        """What it holds and what was counted, over all shards."""
        states = [shard.state for shard in self.serving]
        return CacheTraffic(
            str(self.stream.name),
            sum(len(state.entries) for state in states),
            sum(state.size_bytes for state in states),
            self.settings.bytes_max * self.stream.shard_count,
            sum(state.hits for state in states),
            sum(state.misses for state in states),
            sum(state.evicted for state in states),
            sum(state.expired for state in states),
            self.watches,
        )

    def shard(self, number: int) -> CacheShard:
        """Raises what the stream gives for a shard that it has not, that does not serve, or that another broker serves."""
        found = self.shards.get(number)
        if isinstance(found, CacheShard):
            return found
        self.stream.shard(number)
        raise not_serving(self.stream.name, number, found or FelixError("It is not open."))

    def of(self, key: bytes) -> CacheShard:
        """The shard of a key. Raises as `shard`."""
        count = self.stream.shard_count
        number = shard_for_key(key, count) if count > 1 else 0
        found = self.shards.get(number)
        return found if isinstance(found, CacheShard) else self.shard(number)

    async def loaded(self, shards: list[CacheShard]) -> None:
        """Raises UnavailableError where reading the log takes longer than LOAD_WAIT_S."""
        try:
            async with asyncio.timeout(LOAD_WAIT_S):
                for shard in shards:
                    await shard.ready.wait()
        except TimeoutError:
            raise UnavailableError(
                f"The log of {self.stream.name} is still being read.",
                code=Code.UNAVAILABLE,
                retry_after_ms=1000,
            ) from None

    async def close(self) -> None:
        self._loading.cancel()
        for shard in self.serving:
            await shard.close()


class CacheService:
    """See the module. `open` and `open_watch` are what the node registers for OpenCache and WatchCache."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._caches: dict[HostedStream, Cache] = {}
        broker.streams.on_change(self._stream_changed)

    def _stream_changed(self, stream: HostedStream) -> None:
        """A stream came, or this broker leads it now: where it is a cache, read its log."""
        settings = stream.record.config.views.cache
        if stream.deleted or settings is None or stream.elsewhere is not None:
            return
        cache = self._caches[stream] = Cache(stream, settings, self.broker)
        stream.closing.append(partial(self._close, cache))
        stream.views.append(cache)

    async def _close(self, cache: Cache) -> None:
        self._caches.pop(cache.stream, None)
        await cache.close()

    def cache(self, name: StreamName, verb: Verb) -> Cache:
        """Raises RequestError: NOT_FOUND_OR_FORBIDDEN, UNSUPPORTED where the stream is no cache; NotLeaderError where another broker
        leads it."""
        stream = self.broker.use_stream(name, verb, Views(cache=CacheSettings()))
        if stream.record.config.views.cache is None:
            raise RequestError(
                f"{name} is a stream, and no cache.",
                code=Code.UNSUPPORTED,
                hint="Make one with `felix cache create`.",
            )
        self.broker.require_led(stream)
        found = self._caches.get(stream)
        if found is None:
            raise UnavailableError(f"The cache {name} is being opened.", retry_after_ms=ELSEWHERE_RETRY_MS)
        return found

    def open(self, session: Exchanging, stream_id: int) -> Role:
        """The role of an exchange of calls."""
        return Exchange(self.broker, session, stream_id, partial(CacheCalls, self), decode_call)

    def traffic(self) -> list[CacheTraffic]:
        """Every cache that is served."""
        return [cache.traffic() for cache in self._caches.values()]

    def stats(self, stream: HostedStream, number: int) -> dict[str, float]:
        """A shard's gauges, by name; none where the stream is no cache."""
        cache = self._caches.get(stream)
        shard = cache.shards.get(number) if cache is not None else None
        if not isinstance(shard, CacheShard):
            return {}
        return {**shard.state.stats(), "cache_watches": shard.watchers}


class CacheCalls:
    """The calls of one exchange (region.exchange.Handler)."""

    def __init__(self, service: CacheService, exchange: Exchange) -> None:
        self._service = service
        self._exchange = exchange
        self._cache: Cache
        self._is_open = False
        self._may_read = self._may_write = False

    def open(self, correlation: int, request: Request[Any]) -> None:
        assert isinstance(request, OpenCache)
        exchange = self._exchange
        try:
            name = StreamName.parse(request.stream)
            self._take_rights(name)
            if not self._may_read and not self._may_write:
                raise not_found_or_forbidden(Verb.SUBSCRIBE, name, "cache")
            self._cache = cache = self._service.cache(name, Verb.SUBSCRIBE)
        except (RequestError, UnavailableError) as error:
            exchange.fail(error, correlation)
            return
        self._is_open = True
        opened = CacheOpened(cache.stream.incarnation, cache.stream.shard_count, exchange.broker.streams_ms())
        exchange.opened(correlation, opened)

    def _take_rights(self, name: StreamName) -> None:
        broker, identity = self._exchange.broker, self._exchange.identity
        self._may_read = broker.allows(identity, Verb.SUBSCRIBE, name)
        self._may_write = broker.allows(identity, Verb.PUBLISH, name)

    def call(self, correlation: int, call: Any) -> None:
        kind = type(call)
        if kind is Get:
            # What a cache does most: as few steps as it can be.
            cache = self._cache
            shard = cache.of(call.key)
            if self._may_read and shard.ready.is_set():
                self._may_deliver()
                entry = shard.up_to_date().get(call.key, shard.clock_ms())
                self._reply_found(correlation, shard, entry, call)
                return
        reads, method, shards_of = _CALLS[kind]
        if not (self._may_read if reads else self._may_write):
            verb = Verb.SUBSCRIBE if reads else Verb.PUBLISH
            raise not_found_or_forbidden(verb, self._cache.stream.name, "cache")
        if reads:
            self._may_deliver()
        shards = shards_of(self._cache, call)
        if all(shard.ready.is_set() for shard in shards):
            method(self, correlation, call)
        else:
            self._exchange.spawn(correlation, self._later(shards, method, correlation, call))

    async def _later(
        self,
        shards: list[CacheShard],
        method: Callable[[CacheCalls, int, Any], None],
        correlation: int,
        call: Any,
    ) -> None:
        await self._cache.loaded(shards)
        method(self, correlation, call)

    # -- reading ---------------------------------------------------------------------------------------

    def get(self, correlation: int, call: Get) -> None:
        shard = self._cache.of(call.key)
        entry = shard.up_to_date().get(call.key, shard.clock_ms())
        self._reply_found(correlation, shard, entry, call)

    def _reply_found(self, correlation: int, shard: CacheShard, entry: Entry | None, call: Get) -> None:
        if entry is not None:
            self._meter.delivered(len(entry.value) if call.value else 0, 1)
        self._exchange.reply(correlation, _found(shard, entry, call.value))

    # -- quotas ----------------------------------------------------------------------------------------

    @property
    def _meter(self) -> Meter:
        meter = self._exchange.meter
        assert meter is not None
        return meter

    def _may_deliver(self) -> None:
        """Raises UnavailableError(LIMIT_RATE): an answer cannot wait as a delivery can."""
        refusal = self._meter.delivery_refusal()
        if refusal is not None:
            raise refusal

    def _publish(self, size: int, records: int) -> None:
        """Count what is to be written. Raises UnavailableError(LIMIT_RATE, LIMIT_STORED)."""
        meter = self._meter
        refusal = meter.refusal(size)
        if refusal is not None:
            raise refusal
        throttle = meter.published(size, records)
        if throttle is not None:
            self._exchange.session.throttled(throttle)

    def get_many(self, correlation: int, call: GetMany) -> None:
        entries: list[tuple[int, bytes, int]] = []
        size = 0
        for key in call.keys:
            shard = self._cache.of(key)
            entry = shard.up_to_date().get(key, shard.clock_ms())
            if entry is None:
                size += ENTRY_SPARE
                entries.append((0, b"", 0))
                continue
            size += len(entry.value) + ENTRY_SPARE
            if size > REPLY_BYTES_MAX and entries:
                break
            entries.append((entry.version, entry.value, shard.ttl_left(entry.expires_at_ms)))
        self._meter.delivered(size, sum(version > 0 for version, _, _ in entries))
        self._exchange.reply(correlation, FoundMany(entries))

    def scan(self, correlation: int, call: Scan) -> None:
        shard = self._cache.shard(call.shard)
        entries: list[tuple[bytes, int, bytes, int]] = []
        size = 0
        seen = 0
        for key, entry in shard.up_to_date().page(call.prefix, call.after, call.limit, shard.clock_ms()):
            if entry is not None:
                value = entry.value if call.values else b""
                size += len(key) + len(value) + ENTRY_SPARE
                if size > PAGE_BYTES_MAX and entries:
                    break
                entries.append((key, entry.version, value, shard.ttl_left(entry.expires_at_ms)))
            seen += 1
        if not entries and seen == call.limit:
            # A page of nothing but expired keys: they are on their way out.
            self._exchange.refuse(
                correlation,
                UnavailableError(
                    "Expired keys are being taken out.", code=Code.UNAVAILABLE, retry_after_ms=50
                ),
            )
            return
        more = seen == call.limit or size > PAGE_BYTES_MAX
        self._meter.delivered(size, len(entries))
        self._exchange.reply(correlation, Page(entries, shard.applied, more))

    def stats(self, correlation: int, call: Stats) -> None:
        shards = self._cache.serving
        states = [shard.state for shard in shards]
        self._exchange.reply(
            correlation,
            CacheStats(
                sum(len(state.entries) for state in states),
                sum(state.size_bytes for state in states),
                self._cache.settings.bytes_max * self._cache.stream.shard_count,
                sum(state.hits for state in states),
                sum(state.misses for state in states),
                sum(state.puts for state in states),
                sum(state.deletes for state in states),
                sum(state.expired for state in states),
                sum(state.evicted for state in states),
                self._cache.watches,
            ),
        )

    # -- mutations -------------------------------------------------------------------------------------

    def _answer(self, correlation: int, make: Callable[[int], Any]) -> Waiter:
        def answer(version: int, error: FelixError | None) -> None:
            if error is None:
                self._exchange.reply(correlation, make(version))
            else:
                self._exchange.refuse(correlation, error)

        return answer

    def put(self, correlation: int, call: Put) -> None:
        self._publish(len(call.key) + len(call.value), 1)
        self._cache.of(call.key).put(call.key, call.value, call.ttl_ms, self._answer(correlation, Stored))

    def delete(self, correlation: int, call: Delete) -> None:
        self._publish(len(call.key), 1)
        self._cache.of(call.key).delete(call.key, self._answer(correlation, Stored))

    def compare_and_set(self, correlation: int, call: CompareAndSet) -> None:
        self._publish(len(call.key) + len(call.value), 1)
        self._cache.of(call.key).compare_and_set(
            call.key,
            call.value,
            call.version,
            call.ttl_ms,
            call.operation,
            self._answer(correlation, partial(Compared, True)),
            self._answer(correlation, partial(Compared, False)),
        )

    def increment(self, correlation: int, call: Increment) -> None:
        def answer(number: int, version: int, error: FelixError | None) -> None:
            if error is None:
                self._exchange.reply(correlation, Counted(number, version))
            else:
                self._exchange.refuse(correlation, error)

        self._publish(len(call.key), 1)
        self._cache.of(call.key).increment(call.key, call.by, call.ttl_ms, call.operation, answer)

    def put_many(self, correlation: int, call: PutMany) -> None:
        self._publish(sum(len(key) + len(value) for key, value in call.items), len(call.items))
        gathered = _Gathered(self._exchange, correlation, len(call.items))
        for at, (key, value) in enumerate(call.items):
            gathered.ask(at, partial(self._cache.of(key).put, key, value, call.ttl_ms))
        gathered.asked()

    def delete_many(self, correlation: int, call: DeleteMany) -> None:
        self._publish(sum(map(len, call.keys)), len(call.keys))
        gathered = _Gathered(self._exchange, correlation, len(call.keys))
        for at, key in enumerate(call.keys):
            gathered.ask(at, partial(self._cache.of(key).delete, key))
        gathered.asked()

    # -- the rest of a handler -------------------------------------------------------------------------

    def credit(self, limit_bytes: int) -> None:
        raise ProtocolError("An exchange of calls takes no credit.", code=Code.STATE)

    def pump(self) -> None: ...

    def rights_changed(self) -> None:
        if not self._is_open:
            return
        stream = self._cache.stream
        self._take_rights(stream.name)
        if stream.deleted:
            self._exchange.fail(RequestError(f"The cache {stream.name} was deleted.", code=Code.NOT_FOUND))
        elif (elsewhere := stream.elsewhere) is not None:
            self._exchange.fail(elsewhere)
        elif not self._may_read and not self._may_write:
            self._exchange.fail(not_found_or_forbidden(Verb.SUBSCRIBE, stream.name, "cache"))

    def closed(self) -> None: ...


class _Gathered:
    """The answers to the parts of one call, given as one: the first error, or all versions."""

    def __init__(self, exchange: Exchange, correlation: int, count: int) -> None:
        self._exchange = exchange
        self._correlation = correlation
        self._versions = [0] * count
        self._gather = Gather(self._answer)
        self.asked = self._gather.asked

    def ask(self, at: int, mutate: Callable[[Waiter], None]) -> None:
        done = self._gather.part()

        def stored(version: int, error: FelixError | None) -> None:
            self._versions[at] = version
            done(error)

        try:
            mutate(stored)
        except (RequestError, UnavailableError) as error:
            done(error)

    def _answer(self, error: FelixError | None) -> None:
        if error is None:
            self._exchange.reply(self._correlation, StoredMany(self._versions))
        else:
            self._exchange.refuse(self._correlation, error)


def _found(shard: CacheShard, entry: Entry | None, with_value: bool) -> Found:
    if entry is None:
        return _NOTHING
    return Found(
        entry.version,
        entry.value if with_value else b"",
        shard.ttl_left(entry.expires_at_ms) if entry.expires_at_ms else 0,
    )


_NOTHING: Final = Found(0)


def _of_key(cache: Cache, call: Any) -> list[CacheShard]:
    return [cache.of(call.key)]


def _all(cache: Cache, call: Any) -> list[CacheShard]:
    return cache.serving


def _one(cache: Cache, call: Scan) -> list[CacheShard]:
    return [cache.shard(call.shard)]


_CALLS: Final[
    dict[type, tuple[bool, Callable[[CacheCalls, int, Any], None], Callable[[Cache, Any], list[CacheShard]]]]
] = {
    Get: (True, CacheCalls.get, _of_key),
    GetMany: (True, CacheCalls.get_many, _all),
    Scan: (True, CacheCalls.scan, _one),
    Stats: (True, CacheCalls.stats, _all),
    Put: (False, CacheCalls.put, _of_key),
    Delete: (False, CacheCalls.delete, _of_key),
    CompareAndSet: (False, CacheCalls.compare_and_set, _of_key),
    Increment: (False, CacheCalls.increment, _of_key),
    PutMany: (False, CacheCalls.put_many, _all),
    DeleteMany: (False, CacheCalls.delete_many, _all),
}
"""Whether it reads, what answers it, which shards must be there first."""
