"""The synchronous face of the client, for scripts and notebooks: the same objects behind a background loop.

::

    import felix.sync

    with felix.sync.connect("us-east") as region:
        orders = region.stream("acme/payments/orders")
        offset = orders.publish(b'{"id": 7}', key=b"7")
        for record in orders.subscribe(start="earliest"):
            ...

One thread with one event loop per client; any thread may call. A call blocks until it is done, and Ctrl-C ends the wait
(what was already sent stays sent). Inside a running event loop use `felix.connect`; from there a blocking call is refused,
but for the loop that runs a notebook's cells: a cell blocks it anyway, as any cell does until it is done.
Errors are those of `felix.client`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from felix import cache, client, publisher, queue, subscription, transaction
from felix.batch import Headers, NewRecord, Record
from felix.cache_messages import CacheStats
from felix.connection import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, SessionInfo
from felix.consumer import AckMode, Consumer, ConsumerBatch, ConsumerRecord
from felix.errors import Code, RequestError
from felix.identity import Identity
from felix.messages import (
    Answer,
    Durability,
    LinkState,
    RegionState,
    Request,
    Retention,
    StreamState,
    SubscriptionState,
    Throttled,
)
from felix.names import StreamName
from felix.notebook import Rows
from felix.profile import Profile
from felix.publisher import (
    BATCH_BYTES_DEFAULT,
    BATCH_RECORDS_DEFAULT,
    BUFFER_BYTES_DEFAULT,
    DEADLINE_MS_DEFAULT,
    Acks,
    MessageId,
    Payload,
    Receipt,
    Refusal,
)
from felix.queue_messages import LEASE_BYTES_MAX, PeekedJob, QueueState
from felix.settings import (
    NO_VIEWS,
    CacheChange,
    CacheSettings,
    Compaction,
    Deduplication,
    Offload,
    QueueChange,
    RetriesChange,
    SubscriptionSettings,
    Views,
)
from felix.subscription import CREDIT_BYTES_DEFAULT, Gap, OnGap, ReceivedBatch, StartAt
from felix.transport.port import Engine

STOP_TIMEOUT_S: Final = 5.0
"""How long `close` waits for the background thread."""

T = TypeVar("T")


class _Background:
    """A thread that runs an event loop, and calls into it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="felix-sync", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop and wait. Raises what it raises."""
        try:
            if threading.current_thread() is self._thread or _loop_would_wait():
                raise RequestError(
                    "felix.sync would block the event loop that runs in this thread.",
                    code=Code.STATE,
                    hint="Use `felix.connect` there, with await.",
                )
            if not self._thread.is_alive():
                raise RequestError("This client is closed.", code=Code.STATE)
        except RequestError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(STOP_TIMEOUT_S)


def _loop_would_wait() -> bool:
    """Whether a loop runs in this thread that is not one of ipykernel's own, on which a notebook's cells run."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return False
    application = sys.modules.get("ipykernel.kernelapp")
    if application is None or not application.IPKernelApp.initialized():
        return True
    # A kernel's main shell has its loop; a subshell is a thread of ipykernel's with a loop of its own.
    shells = (application.IPKernelApp.instance().kernel, threading.current_thread())
    return not any(
        getattr(getattr(shell, "io_loop", None), "asyncio_loop", None) is running for shell in shells
    )


def connect(
    region: str | None = None,
    *,
    identity: Identity | Path | str | None = None,
    profile: Profile | None = None,
    engine: Engine | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    tracing: bool | None = None,
) -> SyncRegion:
    """Connect now; arguments and errors are those of `felix.connect`. Close it, or use it as `with`."""
    background = _Background()
    try:
        made = client.connect(
            region,
            identity=identity,
            profile=profile,
            engine=engine,
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
            tracing=tracing,
        )
        background.call(made.open())
    except BaseException:
        background.stop()
        raise
    return SyncRegion(background, made)


class SyncRegion:
    """A region, as `felix.client.RegionClient`, blocking."""

    def __init__(self, background: _Background, region: client.RegionClient) -> None:
        self._background = background
        self._region = region

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session and the background thread. Idempotent."""
        if self._background._thread.is_alive():
            try:
                self._background.call(self._region.close())
            finally:
                self._background.stop()

    @property
    def session(self) -> SessionInfo:
        """The newest session."""
        return self._region.session

    @property
    def is_connected(self) -> bool:
        return self._region.is_connected

    @property
    def throttled(self) -> Throttled | None:
        """The quota that slows this session down now, as the broker says; None where none does."""
        return self._region.throttled

    def stream(self, name: str | StreamName, *, linger_ms: float = 0, compress: int = 0) -> SyncStream:
        """A stream by its name, as `RegionClient.stream`. Raises RequestError(NAME_INVALID)."""
        return SyncStream(self._background, self._region.stream(name, linger_ms=linger_ms, compress=compress))

    def create_stream(
        self,
        name: str | StreamName,
        *,
        shards: int = 1,
        durability: Durability | None = None,
        retention: Retention | None = None,
        ring_bytes: int = 0,
        views: Views = NO_VIEWS,
    ) -> StreamState:
        return self._background.call(
            self._region.create_stream(
                name,
                shards=shards,
                durability=durability,
                retention=retention,
                ring_bytes=ring_bytes,
                views=views,
            )
        )

    def alter_stream(
        self,
        name: str | StreamName,
        *,
        retention: Retention | None = None,
        compaction: Compaction | None = None,
        deduplication: Deduplication | None = None,
        offload: Offload | None = None,
        queue: QueueChange | None = None,
        cache: CacheChange | None = None,
        remove: Sequence[str] = (),
        incarnation: bytes = b"",
    ) -> StreamState:
        return self._background.call(
            self._region.alter_stream(
                name,
                retention=retention,
                compaction=compaction,
                deduplication=deduplication,
                offload=offload,
                queue=queue,
                cache=cache,
                remove=remove,
                incarnation=incarnation,
            )
        )

    def describe_stream(self, name: str | StreamName) -> StreamState:
        return self._background.call(self._region.describe_stream(name))

    def delete_stream(self, name: str | StreamName, *, incarnation: bytes = b"") -> None:
        self._background.call(self._region.delete_stream(name, incarnation=incarnation))

    def list_links(self) -> Rows[LinkState]:
        """Links of bridges, as their agents last said."""
        return Rows(self._background.call(self._region.list_links()))

    def list_streams(self, prefix: str = "") -> Rows[StreamState]:
        async def all_of_them() -> Rows[StreamState]:
            return Rows([state async for state in self._region.list_streams(prefix)])

        return self._background.call(all_of_them())

    def queue(self, name: str | StreamName) -> SyncQueue:
        """A queue by its name. Raises RequestError(NAME_INVALID)."""

        async def make() -> queue.Queue:
            return self._region.queue(name)

        return SyncQueue(self._background, self._background.call(make()))

    def create_queue(
        self,
        name: str | StreamName,
        *,
        visibility: float = 30,
        attempts: int = 5,
        retry: float = 1,
        retry_max: float = 300,
        dead_letter: str = "",
        ordered_by_key: bool = False,
        shards: int = 1,
        durability: Durability | None = None,
        retention: Retention | None = None,
        ring_bytes: int = 0,
    ) -> StreamState:
        return self._background.call(
            self._region.create_queue(
                name,
                visibility=visibility,
                attempts=attempts,
                retry=retry,
                retry_max=retry_max,
                dead_letter=dead_letter,
                ordered_by_key=ordered_by_key,
                shards=shards,
                durability=durability,
                retention=retention,
                ring_bytes=ring_bytes,
            )
        )

    def cache(self, name: str | StreamName) -> SyncCache:
        """A cache by its name. Raises RequestError(NAME_INVALID)."""

        async def make() -> cache.Cache:
            return self._region.cache(name)

        return SyncCache(self._background, self._background.call(make()))

    def create_cache(
        self,
        name: str | StreamName,
        settings: CacheSettings | None = None,
        *,
        shards: int = 1,
        durability: Durability | None = None,
    ) -> SyncCache:
        made = self._background.call(
            self._region.create_cache(name, settings, shards=shards, durability=durability)
        )
        return SyncCache(self._background, made)

    def transaction(
        self,
        *,
        timeout_s: float = transaction.TRANSACTION_TIMEOUT_S,
        transactional_id: str = "",
        compress: int = 0,
    ) -> SyncTransaction:
        """As `RegionClient.transaction`; use it as `with`."""

        async def make() -> transaction.Transaction:
            return self._region.transaction(
                timeout_s=timeout_s, transactional_id=transactional_id, compress=compress
            )

        return SyncTransaction(self._background, self._background.call(make()))

    def describe(self) -> RegionState:
        return self._background.call(self._region.describe())

    def request(self, request: Request, *, timeout_s: float | None = None) -> Answer:
        """Any request of the protocol and its answer."""
        return self._background.call(self._region.request(request, timeout_s=timeout_s))


class SyncTransaction:
    """A transaction, as `felix.transaction.Transaction`, blocking; use it as `with`."""

    def __init__(self, background: _Background, inner: transaction.Transaction) -> None:
        self._background = background
        self._inner = inner

    def __enter__(self) -> Self:
        self._background.call(self._inner.begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._background.call(self._inner.__aexit__(kind, error, trace))

    def publish(
        self,
        stream: str | StreamName,
        payload: Payload,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        shard: int | None = None,
        message_id: MessageId | None = None,
    ) -> transaction.TransactionRecord:
        """Add a record; it has an offset after the commit."""
        return self._background.call(
            self._inner.publish(stream, payload, key=key, headers=headers, shard=shard, message_id=message_id)
        )

    def commit(self) -> list[int]:
        """Commit; the offsets in the order of publishing. May be called again after UnavailableError."""
        return self._background.call(self._inner.commit())

    def abort(self) -> None:
        self._background.call(self._inner.abort())


class SyncStream:
    """One stream, as `felix.client.Stream`, blocking."""

    def __init__(self, background: _Background, stream: client.Stream) -> None:
        self._background = background
        self._stream = stream

    @property
    def name(self) -> StreamName:
        return self._stream.name

    def publish(
        self,
        payload: Payload,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        shard: int | None = None,
        expected_offset: int | None = None,
        message_id: MessageId | None = None,
    ) -> int:
        """Publish one record; its offset. One round trip each: for many, `publish_many` or `publisher`."""
        return self._background.call(
            self._stream.publish(
                payload,
                key=key,
                headers=headers,
                shard=shard,
                expected_offset=expected_offset,
                message_id=message_id,
            )
        )

    def publish_many(
        self, payloads: Sequence[Payload], keys: Sequence[bytes | None] | None = None
    ) -> list[int]:
        """Publish many records; their offsets in the order given."""
        return self._background.call(self._stream.publish_many(payloads, keys))

    def publish_batch(
        self, records: Sequence[NewRecord], *, shard: int | None = None, expected_offset: int | None = None
    ) -> Receipt:
        """Publish records as one batch, wholly or not at all."""
        return self._background.call(
            self._stream.publish_batch(records, shard=shard, expected_offset=expected_offset)
        )

    def publisher(
        self,
        *,
        batch_bytes: int = BATCH_BYTES_DEFAULT,
        batch_records: int = BATCH_RECORDS_DEFAULT,
        buffer_bytes: int = BUFFER_BYTES_DEFAULT,
        acks: Acks = "all",
        compress: int = 0,
        deadline_ms: int = DEADLINE_MS_DEFAULT,
        on_refused: Callable[[Refusal], None] | None = None,
    ) -> SyncPublisher:
        """For many records: they are gathered in this thread and handed over by the batch. Use it as `with`."""

        async def make() -> publisher.Publisher:
            made = self._stream.publisher(
                batch_bytes=batch_bytes,
                batch_records=batch_records,
                buffer_bytes=buffer_bytes,
                acks=acks,
                compress=compress,
                deadline_ms=deadline_ms,
                on_refused=on_refused,
            )
            await made.open()
            return made

        return SyncPublisher(self._background, self._background.call(make()), batch_bytes, batch_records)

    def subscribe(
        self,
        start: StartAt = "latest",
        *,
        offsets: dict[int, int] | None = None,
        shards: Collection[int] | None = None,
        credit_bytes: int = CREDIT_BYTES_DEFAULT,
        on_gap: OnGap = "log",
    ) -> SyncSubscription:
        """An iterator of records, as `felix.client.Stream.subscribe`. A function for `on_gap` runs in the background thread."""

        async def make() -> subscription.Subscription:
            made = self._stream.subscribe(
                start, offsets=offsets, shards=shards, credit_bytes=credit_bytes, on_gap=on_gap
            )
            await made.open()
            return made

        return SyncSubscription(self._background, self._background.call(make()))

    def consumer(
        self,
        name: str,
        *,
        settings: SubscriptionSettings | None = None,
        consumer: str = "",
        ack: AckMode = "explicit",
        credit_bytes: int = CREDIT_BYTES_DEFAULT,
        on_gap: Callable[[Gap], None] | None = None,
    ) -> SyncConsumer:
        """A consumer of a durable subscription, as `felix.client.Stream.consumer`. A function for `on_gap` runs in the background
        thread."""

        async def make() -> Consumer:
            made = self._stream.consumer(
                name,
                settings=settings,
                consumer=consumer,
                ack=ack,
                credit_bytes=credit_bytes,
                on_gap=on_gap,
            )
            await made.open()
            return made

        return SyncConsumer(self._background, self._background.call(make()))

    def create_subscription(
        self, name: str, settings: SubscriptionSettings | None = None
    ) -> SubscriptionState:
        return self._background.call(self._stream.create_subscription(name, settings))

    def alter_subscription(
        self,
        name: str,
        *,
        ack_timeout: float | None = None,
        retries: RetriesChange | None = None,
        unacked_max: int | None = None,
        inactive_ttl: float | None = None,
    ) -> SubscriptionState:
        return self._background.call(
            self._stream.alter_subscription(
                name,
                ack_timeout=ack_timeout,
                retries=retries,
                unacked_max=unacked_max,
                inactive_ttl=inactive_ttl,
            )
        )

    def subscriptions(self) -> Rows[SubscriptionState]:
        """The stream's durable subscriptions, without shards and consumers."""
        return Rows(self._background.call(self._stream.subscriptions()))

    def describe_subscription(self, name: str) -> SubscriptionState:
        return self._background.call(self._stream.describe_subscription(name))

    def seek_subscription(
        self,
        name: str,
        start: StartAt = "latest",
        *,
        offsets: dict[int, int] | None = None,
        shards: Collection[int] | None = None,
    ) -> str:
        return self._background.call(
            self._stream.seek_subscription(name, start, offsets=offsets, shards=shards)
        )

    def delete_subscription(self, name: str) -> None:
        self._background.call(self._stream.delete_subscription(name))

    def create(
        self,
        *,
        shards: int = 1,
        durability: Durability | None = None,
        retention: Retention | None = None,
        ring_bytes: int = 0,
        views: Views = NO_VIEWS,
    ) -> StreamState:
        return self._background.call(
            self._stream.create(
                shards=shards, durability=durability, retention=retention, ring_bytes=ring_bytes, views=views
            )
        )

    def describe(self) -> StreamState:
        return self._background.call(self._stream.describe())

    def delete(self, *, incarnation: bytes = b"") -> None:
        self._background.call(self._stream.delete(incarnation=incarnation))


class SyncPublisher:
    """Gathers records in the caller's thread; one thread at a time.

    There is no linger here: a record leaves when its batch is full, or with `flush` or `close`.
    """

    def __init__(
        self, background: _Background, inner: publisher.Publisher, batch_bytes: int, batch_records: int
    ) -> None:
        self._background = background
        self._inner = inner
        self._batch_bytes = batch_bytes
        self._batch_records = batch_records
        self._records: list[tuple[bytes, bytes | None, Headers | None]] = []
        self._gathered_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._records.clear()
            self._background.loop.call_soon_threadsafe(self._inner.abort)

    @property
    def progress(self) -> publisher.PublishProgress:
        """How far it has come; what is still gathered here does not count as given."""

        async def ask() -> publisher.PublishProgress:
            return self._inner.progress

        return self._background.call(ask())

    def send(
        self,
        payload: Payload,
        key: bytes | None = None,
        headers: Headers | None = None,
        *,
        message_id: MessageId | None = None,
    ) -> None:
        """Gather one record; hands over, and waits for room, when a batch is full. Raises as `Publisher.send`, then."""
        if message_id is not None:
            headers = publisher.with_message_id(headers, message_id)
        taken = publisher.payload_bytes(payload)
        self._records.append((taken, key, headers))
        self._gathered_bytes += len(taken)
        if self._gathered_bytes >= self._batch_bytes or len(self._records) >= self._batch_records:
            self._hand_over()

    def send_many(self, payloads: Iterable[Payload], keys: Iterable[bytes | None] | None = None) -> None:
        """Gather many records."""
        for payload, key in publisher.paired(payloads, keys):
            self.send(payload, key)

    def flush(self) -> None:
        """Return once all is acknowledged. Raises as `Publisher.flush`."""
        self._hand_over()
        self._background.call(self._inner.flush())

    def close(self) -> None:
        """Flush and end the publish stream."""
        try:
            self._hand_over()
        finally:
            self._background.call(self._inner.close())

    def _hand_over(self) -> None:
        if not self._records:
            return
        records, self._records, self._gathered_bytes = self._records, [], 0

        async def send_all() -> None:
            for payload, key, headers in records:
                await self._inner.send(payload, key, headers)

        self._background.call(send_all())


class SyncSubscription:
    """An iterator of records; one batch is fetched from the background loop at a time. One thread at a time."""

    def __init__(self, background: _Background, inner: subscription.Subscription) -> None:
        self._background = background
        self._inner = inner
        self._records: Iterator[Record] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unsubscribe. Idempotent."""
        if self._background._thread.is_alive():
            self._background.call(self._inner.close())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        while True:
            for record in self._records:
                return subscription.own_record(record)
            self._records = self.next_batch().records()

    def next_batch(self, timeout_s: float | None = None) -> ReceivedBatch:
        """The next batch. Raises TimeoutError where none came within `timeout_s` seconds (None: waits)."""

        async def fetch() -> ReceivedBatch:
            async with asyncio.timeout(timeout_s):
                return await self._inner.next_batch()

        return self._background.call(fetch())

    def take(self, records: int, timeout_s: float | None = None) -> Rows[Record]:
        """The next `records` records; fewer where the next batch did not come within `timeout_s` seconds (None: waits)."""
        found: Rows[Record] = Rows()
        while len(found) < records:
            taken = [
                subscription.own_record(record) for record in islice(self._records, records - len(found))
            ]
            found += taken
            if not taken:
                try:
                    self._records = self.next_batch(timeout_s).records()
                except TimeoutError:
                    break
        return found

    @property
    def positions(self) -> dict[int, int]:
        """Per shard, the offset after the last batch given out."""
        return self._inner.positions

    @property
    def gaps(self) -> list[Gap]:
        """The newest gaps."""
        return list(self._inner.gaps)


class SyncCache:
    """One cache, as `felix.cache.Cache`, blocking."""

    def __init__(self, background: _Background, inner: cache.Cache) -> None:
        self._background = background
        self._inner = inner

    @property
    def name(self) -> StreamName:
        return self._inner.name

    def get(self, key: cache.Key) -> cache.Entry | None:
        return self._background.call(self._inner.get(key))

    def put(self, key: cache.Key, value: cache.Value, *, ttl: float | None = None) -> int:
        return self._background.call(self._inner.put(key, value, ttl=ttl))

    def delete(self, key: cache.Key) -> bool:
        return self._background.call(self._inner.delete(key))

    def compare_and_set(
        self, key: cache.Key, value: cache.Value, *, version: int, ttl: float | None = None
    ) -> int | None:
        return self._background.call(self._inner.compare_and_set(key, value, version=version, ttl=ttl))

    def increment(self, key: cache.Key, by: int = 1, *, ttl: float | None = None) -> int:
        return self._background.call(self._inner.increment(key, by, ttl=ttl))

    def exists(self, key: cache.Key) -> bool:
        return self._background.call(self._inner.exists(key))

    def ttl(self, key: cache.Key) -> float | None:
        return self._background.call(self._inner.ttl(key))

    def get_many(self, keys: Iterable[cache.Key]) -> dict[bytes, cache.Entry]:
        return self._background.call(self._inner.get_many(keys))

    def put_many(
        self,
        items: Mapping[cache.Key, cache.Value] | Iterable[tuple[cache.Key, cache.Value]],
        *,
        ttl: float | None = None,
    ) -> list[int]:
        return self._background.call(self._inner.put_many(items, ttl=ttl))

    def delete_many(self, keys: Iterable[cache.Key]) -> int:
        return self._background.call(self._inner.delete_many(keys))

    def scan(self, prefix: cache.Key = b"") -> list[tuple[bytes, cache.Entry]]:
        """All of them, in memory."""

        async def all_of_them() -> list[tuple[bytes, cache.Entry]]:
            return [found async for found in self._inner.scan(prefix)]

        return self._background.call(all_of_them())

    def stats(self) -> CacheStats:
        return self._background.call(self._inner.stats())

    def alter(
        self, *, bytes_max: int | None = None, ttl: float | None = None, eviction: str | None = None
    ) -> StreamState:
        return self._background.call(self._inner.alter(bytes_max=bytes_max, ttl=ttl, eviction=eviction))

    def watch(
        self,
        *,
        key: cache.Key | None = None,
        prefix: cache.Key = b"",
        resume: cache.Position | str | None = None,
        coalesce: bool = False,
    ) -> SyncWatch:
        """An iterator of changes, as `felix.cache.Cache.watch`. Close it, or use it as `with`."""

        async def make() -> cache.Watch:
            made = self._inner.watch(key=key, prefix=prefix, resume=resume, coalesce=coalesce)
            await made.open()
            return made

        return SyncWatch(self._background, self._background.call(make()))


class SyncWatch:
    """An iterator of changes; one message is fetched from the background loop at a time. One thread at a time."""

    def __init__(self, background: _Background, inner: cache.Watch) -> None:
        self._background = background
        self._inner = inner
        self._changes: Iterator[cache.Change] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it. Idempotent."""

        async def end() -> None:
            self._inner.close()

        if self._background._thread.is_alive():
            self._background.call(end())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> cache.Change:
        for change in self._changes:
            return change
        self._changes = iter(self.changes())
        return next(self._changes)

    def changes(self, timeout_s: float | None = None) -> list[cache.Change]:
        """The changes of the next message. Raises TimeoutError where none came within `timeout_s` seconds (None: waits)."""

        async def fetch() -> list[cache.Change]:
            async with asyncio.timeout(timeout_s):
                return await self._inner.changes()

        return self._background.call(fetch())


class SyncQueue:
    """One queue, as `felix.queue.Queue`, blocking."""

    def __init__(self, background: _Background, inner: queue.Queue) -> None:
        self._background = background
        self._inner = inner

    @property
    def name(self) -> StreamName:
        return self._inner.name

    def put(
        self,
        payload: Payload,
        *,
        key: bytes | None = None,
        delay: float = 0,
        deliver_at: datetime | None = None,
        priority: int | None = None,
        headers: Headers | None = None,
    ) -> int:
        return self._background.call(
            self._inner.put(
                payload, key=key, delay=delay, deliver_at=deliver_at, priority=priority, headers=headers
            )
        )

    def put_many(
        self,
        payloads: Sequence[Payload],
        keys: Sequence[bytes | None] | None = None,
        *,
        delay: float = 0,
        deliver_at: datetime | None = None,
        priority: int | None = None,
        headers: Headers | None = None,
    ) -> list[int]:
        return self._background.call(
            self._inner.put_many(
                payloads, keys, delay=delay, deliver_at=deliver_at, priority=priority, headers=headers
            )
        )

    def lease(
        self,
        records: int = 1,
        *,
        wait: float = 0,
        visibility: float | None = None,
        max_bytes: int = LEASE_BYTES_MAX,
    ) -> list[SyncJob]:
        leased = self._background.call(
            self._inner.lease(records, wait=wait, visibility=visibility, max_bytes=max_bytes)
        )
        return [SyncJob(self._background, job) for job in leased]

    def consume(
        self,
        *,
        visibility: float | None = None,
        prefetch: int = queue.PREFETCH_DEFAULT,
        prefetch_bytes: int = queue.PREFETCH_BYTES_DEFAULT,
        auto_extend: bool = True,
    ) -> SyncQueueConsumer:
        """An iterator of jobs, as `felix.queue.Queue.consume`. Use it as `with`."""

        async def make() -> queue.QueueConsumer:
            made = self._inner.consume(
                visibility=visibility,
                prefetch=prefetch,
                prefetch_bytes=prefetch_bytes,
                auto_extend=auto_extend,
            )
            await made.open()
            return made

        return SyncQueueConsumer(self._background, self._background.call(make()))

    def describe(self) -> QueueState:
        return self._background.call(self._inner.describe())

    def peek(self, records: int = 10) -> list[PeekedJob]:
        return self._background.call(self._inner.peek(records))

    def redrive(self, records: int = 0) -> int:
        return self._background.call(self._inner.redrive(records))

    def purge(self) -> int:
        return self._background.call(self._inner.purge())

    def alter(
        self,
        *,
        visibility: float | None = None,
        attempts: int | None = None,
        retry: float | None = None,
        retry_max: float | None = None,
        dead_letter: str | None = None,
        ordered_by_key: bool | None = None,
    ) -> StreamState:
        return self._background.call(
            self._inner.alter(
                visibility=visibility,
                attempts=attempts,
                retry=retry,
                retry_max=retry_max,
                dead_letter=dead_letter,
                ordered_by_key=ordered_by_key,
            )
        )

    def delete(self) -> None:
        self._background.call(self._inner.delete())


class SyncQueueConsumer:
    """An iterator of jobs. One thread at a time; a job may be settled from any."""

    def __init__(self, background: _Background, inner: queue.QueueConsumer) -> None:
        self._background = background
        self._inner = inner

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """As `felix.queue.QueueConsumer.close`."""
        if self._background._thread.is_alive():
            self._background.call(self._inner.close())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SyncJob:
        job = self.next_job()
        if job is None:
            raise StopIteration
        return job

    def next_job(self, timeout_s: float | None = None) -> SyncJob | None:
        """The next job; None after `close`. Raises TimeoutError where none came within `timeout_s` seconds (None: waits)."""

        async def fetch() -> queue.Job | None:
            async with asyncio.timeout(timeout_s):
                try:
                    return await anext(self._inner)
                except StopAsyncIteration:
                    return None

        job = self._background.call(fetch())
        return SyncJob(self._background, job) if job is not None else None


class SyncJob:
    """One leased job, as `felix.queue.Job`; `ack`, `nack` and `extend` return once that is durable."""

    __slots__ = ("_background", "_job")

    def __init__(self, background: _Background, job: queue.Job) -> None:
        self._background = background
        self._job = job

    @property
    def payload(self) -> bytes:
        return self._job.payload

    @property
    def key(self) -> bytes | None:
        return self._job.key

    @property
    def headers(self) -> dict[str, bytes]:
        return self._job.headers

    @property
    def attempts(self) -> int:
        return self._job.attempts

    @property
    def shard(self) -> int:
        return self._job.shard

    @property
    def offset(self) -> int:
        return self._job.offset

    def ack(self) -> None:
        async def ack() -> None:
            await self._job.ack()

        self._background.call(ack())

    def nack(self, *, delay: float | None = None, reason: str = "") -> None:
        async def nack() -> None:
            await self._job.nack(delay=delay, reason=reason)

        self._background.call(nack())

    def extend(self, visibility: float | None = None) -> None:
        async def extend() -> None:
            await self._job.extend(visibility)

        self._background.call(extend())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def leave() -> None:
            await self._job.__aexit__(kind, error, trace)

        self._background.call(leave())


class SyncConsumer:
    """A consumer of a durable subscription, as `felix.consumer.Consumer`, blocking. One thread at a time iterates."""

    def __init__(self, background: _Background, inner: Consumer) -> None:
        self._background = background
        self._inner = inner

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._background._thread.is_alive():
            self._background.call(self._inner.__aexit__(kind, error, trace))

    def close(self) -> None:
        """Acknowledge what was asked for, and leave. Idempotent."""
        if self._background._thread.is_alive():
            self._background.call(self._inner.close())

    @property
    def shards(self) -> list[int]:
        """The shards that this consumer has now."""
        return self._inner.shards

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ConsumerRecord:
        record = self.next()
        if record is None:
            raise StopIteration
        return record

    def next(self, timeout_s: float | None = None) -> ConsumerRecord | None:
        """The next record; None once the consumer is closed. Raises TimeoutError where none came within `timeout_s` seconds."""

        async def take() -> ConsumerRecord | None:
            async with asyncio.timeout(timeout_s):
                return await anext(self._inner, None)

        return self._background.call(take())

    def ack(self, record: ConsumerRecord | ConsumerBatch) -> bool:
        """As `Consumer.ack`: True once it is durable, False where it did not count."""
        return self._background.call(self._inner.ack(record))

    def ack_through(self, record: ConsumerRecord | ConsumerBatch) -> bool:
        return self._background.call(self._inner.ack_through(record))

    def nack(
        self, record: ConsumerRecord | ConsumerBatch, *, delay: float | None = None, reason: str = ""
    ) -> bool:
        return self._background.call(self._inner.nack(record, delay=delay, reason=reason))
