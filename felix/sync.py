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
Errors are those of `felix.client`. Functions that are handed over (`on_gap`, `on_refused`, ...) run in the background thread.

Written by sdk/sync_face.py from the asynchronous classes (`make sync`): change those, and felix.blocking.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, Self

from felix import cache_messages as wire
from felix import client
from felix.backoff import BackoffPolicy
from felix.batch import Headers, NewRecord
from felix.blocking import (
    Background,
    Blocking,
    BlockingConsumer,
    BlockingJob,
    BlockingMirror,
    BlockingRegion,
    BlockingTransaction,
    ChangeIterator,
    GatheringPublisher,
    JobIterator,
    RecordIterator,
    inner_of,
)
from felix.cache import WATCH_CREDIT_BYTES, Cache, Entry, Key, Position, Value
from felix.connection import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, Relaying, SessionInfo
from felix.consumer import AckMode, ConsumerBatch, ConsumerRecord
from felix.identity import Identity
from felix.messages import (
    AnswerT,
    CacheTraffic,
    CrossingExplained,
    KeyState,
    LinkState,
    MeshPage,
    QuotaState,
    ReaderTraffic,
    Redriven,
    RegionState,
    Request,
    ShardMoves,
    StreamState,
    StreamTraffic,
    SubscriptionState,
    Throttled,
)
from felix.names import StreamName
from felix.notebook import Rows
from felix.payload import MessageId, Payload, RecordKey
from felix.profile import Profile
from felix.publisher_core import (
    BATCH_BYTES_DEFAULT,
    BATCH_RECORDS_DEFAULT,
    BUFFER_BYTES_DEFAULT,
    DEADLINE_MS_DEFAULT,
    Acks,
    Receipt,
    Refusal,
)
from felix.queue import PREFETCH_BYTES_DEFAULT, PREFETCH_DEFAULT, Queue
from felix.queue_messages import LEASE_BYTES_MAX, Held, PeekedJob, QueueState
from felix.quota import QuotaLimits
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.settings import (
    EXCHANGES_DEFAULT,
    NO_VIEWS,
    TRANSACTION_TIMEOUT_S,
    CacheChange,
    CacheSettings,
    Compaction,
    Deduplication,
    Durability,
    NamespaceSettings,
    Offload,
    QueueChange,
    Retention,
    Retries,
    RetriesChange,
    SubscriptionSettings,
    Views,
)
from felix.stream import Stream
from felix.subscription import CREDIT_BYTES_DEFAULT, EpochsRead, Gap, OnGap, StartAt
from felix.transaction import TransactionRecord
from felix.transport.port import Engine, TransportLimits


def connect(
    region: str | None = None,
    *,
    identity: Identity | Path | str | None = None,
    profile: Profile | None = None,
    engine: Engine | None = None,
    transport_limits: TransportLimits | None = None,
    backoff: BackoffPolicy | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    wait_for_broker: bool = True,
    relay: Relaying = "auto",
    tracing: bool | None = None,
    runtime: Runtime = REAL,
) -> SyncRegion:
    """Connect now; arguments and errors are those of `felix.connect`. Close it, or use it as `with`."""
    background = Background()
    try:
        made = client.connect(
            region,
            identity=identity,
            profile=profile,
            engine=engine,
            transport_limits=transport_limits,
            backoff=backoff,
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
            wait_for_broker=wait_for_broker,
            relay=relay,
            tracing=tracing,
            runtime=runtime,
        )
        background.call(made.open())
    except BaseException:
        background.stop()
        raise
    return SyncRegion(background, made)


class SyncRegion(BlockingRegion):
    """As `felix.client.RegionClient`, blocking; see `felix.blocking.BlockingRegion`."""

    __slots__ = ()

    @property
    def session(self) -> SessionInfo:
        """Of the newest session: the broker that answered, this client's identity, and what it may do."""
        return self._inner.session

    @property
    def is_connected(self) -> bool:
        """True while a session stands; False while a new one is being made."""
        return self._inner.is_connected

    @property
    def throttled(self) -> Throttled | None:
        """The quota that slows this session down now, as the broker says; None where none does."""
        return self._inner.throttled

    @property
    def reconnects(self) -> int:
        """How often the client reconnected."""
        return self._inner.reconnects

    def stream(self, name: str | StreamName, *, linger_ms: float = 0, compress: int = 0) -> SyncStream:
        """A stream by its name, tenant/namespace/name; whether it exists is not asked. Raises RequestError(NAME_INVALID).

        `linger_ms` and `compress` are of `Stream.publish` and its like, as in `Stream.publisher`: what is set when the first record
        of this stream is published counts for this client.
        """
        return SyncStream(
            self._background,
            self._background.run(self._inner.stream, name, linger_ms=linger_ms, compress=compress),
        )

    def queue(self, name: str | StreamName) -> SyncQueue:
        """A queue by its name; whether it exists is not asked. Raises RequestError(NAME_INVALID)."""
        return SyncQueue(self._background, self._background.run(self._inner.queue, name))

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
        replicas: int = 0,
        min_in_sync: int = 0,
    ) -> StreamState:
        """Create a queue: a stream whose records are leased to workers. Raises as `create_stream`.

        `visibility`: seconds that a lease lasts; `attempts`: deliveries before a record goes to the dead letters (0: without bound);
        `retry`: seconds until a record that was given back is tried again, doubled each time up to `retry_max`; `dead_letter`: a
        stream for them, else the queue's name with `.dead`; `ordered_by_key`: one record of a key is out at a time. Its copies are as
        `create_stream` has them; its dead letters get as many.
        """
        return self._background.call(
            self._inner.create_queue(
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
                replicas=replicas,
                min_in_sync=min_in_sync,
            )
        )

    def create_stream(
        self,
        name: str | StreamName,
        *,
        shards: int = 1,
        durability: Durability | None = None,
        retention: Retention | None = None,
        ring_bytes: int = 0,
        views: Views = NO_VIEWS,
        replicas: int = 0,
        min_in_sync: int = 0,
        acks: str = "quorum",
    ) -> StreamState:
        """Create a stream. Raises RequestError: ALREADY_EXISTS, FORBIDDEN, CONFIG_INVALID.

        `durability`: fsync unless said; `retention`: without bound unless said; `ring_bytes`: memory of an ephemeral shard;
        `views`: queue, cache, compaction, deduplication, offload (felix.settings). `replicas`: copies of each shard, on as many of the
        region's brokers, 0: as the region has it; a record is acknowledged once every copy in sync has it, of which there are at least
        `min_in_sync`, 0: a majority. `acks`: `leader` has a record acknowledged once it is durable on the leader alone: sooner, and
        what the other copies did not have yet is lost where the leader fails. It is read once it is committed either way.
        """
        return self._background.call(
            self._inner.create_stream(
                name,
                shards=shards,
                durability=durability,
                retention=retention,
                ring_bytes=ring_bytes,
                views=views,
                replicas=replicas,
                min_in_sync=min_in_sync,
                acks=acks,
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
        replicas: int | None = None,
        min_in_sync: int | None = None,
        incarnation: bytes = b"",
    ) -> StreamState:
        """Change settings of a stream while it serves; what is None stays. `remove` names what is taken away: compaction,
        deduplication, offload. `queue` and `cache`: as `Queue.alter` and `Cache.alter`, which have plainer arguments. `replicas` and
        `min_in_sync` (0: a majority) of a stream of several copies: those are made, or dropped, after this returns. Raises
        RequestError: NOT_FOUND_OR_FORBIDDEN, CONFIG_INVALID, UNSUPPORTED for a stream that is no queue or cache, CONFLICT for
        another incarnation.
        """
        return self._background.call(
            self._inner.alter_stream(
                name,
                retention=retention,
                compaction=compaction,
                deduplication=deduplication,
                offload=offload,
                queue=queue,
                cache=cache,
                remove=remove,
                replicas=replicas,
                min_in_sync=min_in_sync,
                incarnation=incarnation,
            )
        )

    def describe_stream(self, name: str | StreamName) -> StreamState:
        """Settings and offsets of a stream. Raises RequestError(NOT_FOUND_OR_FORBIDDEN)."""
        return self._background.call(self._inner.describe_stream(name))

    def delete_stream(self, name: str | StreamName, *, incarnation: bytes = b"") -> str:
        """Delete a stream and its records, and destroy its key; with `incarnation`, only if it is still that one. Returns the broker's note."""
        return self._background.call(self._inner.delete_stream(name, incarnation=incarnation))

    def list_subscriptions(self, stream: str = "") -> Rows[SubscriptionState]:
        """Durable subscriptions of a stream, or of all that this identity may subscribe to, without shards and consumers.

        Of a stream that another broker leads, that one is asked; where it does not answer soon, `leader` names it and counters are 0.
        """
        return self._background.collect(self._inner.list_subscriptions, stream)

    def list_streams(self, prefix: str = "") -> Rows[StreamState]:
        """The streams that this identity may see, by name, page after page.

        Of a stream that another broker leads, that one is asked; where it does not answer soon, offsets and sizes are 0.
        """
        return self._background.collect(self._inner.list_streams, prefix)

    def cache(self, name: str | StreamName, *, exchanges: int = EXCHANGES_DEFAULT) -> SyncCache:
        """A cache by its name; whether it exists is not asked. The same one for the same name; `exchanges` is of the first.

        Raises RequestError(NAME_INVALID, CONFIG_INVALID).
        """
        return SyncCache(self._background, self._background.run(self._inner.cache, name, exchanges=exchanges))

    def create_cache(
        self,
        name: str | StreamName,
        settings: CacheSettings | None = None,
        *,
        shards: int = 1,
        durability: Durability | None = None,
        replicas: int = 0,
        min_in_sync: int = 0,
    ) -> SyncCache:
        """Create a cache: a compacted stream with the latest value of each key in memory. Its copies are as `create_stream` has them. Errors
        as `create_stream`."""
        return SyncCache(
            self._background,
            self._background.call(
                self._inner.create_cache(
                    name,
                    settings,
                    shards=shards,
                    durability=durability,
                    replicas=replicas,
                    min_in_sync=min_in_sync,
                )
            ),
        )

    def transaction(
        self, *, timeout_s: float = TRANSACTION_TIMEOUT_S, transactional_id: str = "", compress: int = 0
    ) -> SyncTransaction:
        """Records for several streams, and acknowledgements, that become visible together or not at all; use it as `async with`.

        It is aborted where it is open for longer than `timeout_s` (the broker says how long it may be). With a
        `transactional_id`, the first transaction of this client under it ends what an older instance has open.
        """
        return SyncTransaction(
            self._background,
            self._background.run(
                self._inner.transaction,
                timeout_s=timeout_s,
                transactional_id=transactional_id,
                compress=compress,
            ),
        )

    def describe(self) -> RegionState:
        """Gauges of the broker that answers."""
        return self._background.call(self._inner.describe())

    def put_namespace(self, namespace: str, settings: NamespaceSettings) -> None:
        """Say how a namespace (`tenant/namespace`) treats streams that do not exist; counts at once. For operators."""
        self._background.call(self._inner.put_namespace(namespace, settings))

    def delete_namespace(self, namespace: str) -> str:
        """Streams of the namespace are created by hand again; answers what a person should know of it."""
        return self._background.call(self._inner.delete_namespace(namespace))

    def list_namespaces(self) -> dict[str, NamespaceSettings]:
        """Namespaces with settings of their own."""
        return self._background.call(self._inner.list_namespaces())

    def put_quota(self, scope: str, name: str, limits: QuotaLimits, unset: Sequence[str] = ()) -> QuotaState:
        """Set the limits that `limits` names, of a `tenant` or an `identity` (by its SPIFFE id), and take away those in
        `unset`; they count at once."""
        return self._background.call(self._inner.put_quota(scope, name, limits, unset))

    def delete_quota(self, scope: str, name: str) -> str:
        """Back to the region's defaults; answers what a person should know of it."""
        return self._background.call(self._inner.delete_quota(scope, name))

    def list_quotas(self, scope: str = "", name: str = "") -> Rows[QuotaState]:
        """Limits and use of tenants and identities at the broker that answers, tenants first. An identity that is no
        operator's may ask for its own alone."""
        return Rows(self._background.call(self._inner.list_quotas(scope, name)))

    def stream_traffic(self, prefix: str = "") -> tuple[int, list[StreamTraffic]]:
        """Traffic of each stream at the broker that answers, since its start, and the time of the counts (ms)."""
        return self._background.call(self._inner.stream_traffic(prefix))

    def reader_traffic(self, prefix: str = "") -> Rows[ReaderTraffic]:
        """Readers at the broker that answers: what they were sent, how far behind they are and what they wait for."""
        return Rows(self._background.call(self._inner.reader_traffic(prefix)))

    def cache_traffic(self, prefix: str = "") -> Rows[CacheTraffic]:
        """The size of each cache at the broker that answers, and its counters since the broker serves it."""
        return Rows(self._background.call(self._inner.cache_traffic(prefix)))

    def put_rights(self, identity: str, rights: Sequence[str], *, held: Sequence[str] | None = None) -> None:
        """Replace the rights of an identity, as `publish acme/ops/*`; an empty list takes all away, at once. `held`: what it had when these were chosen.
        Raises RequestError(CONFLICT) where it has others by now."""
        self._background.call(self._inner.put_rights(identity, rights, held=held))

    def list_rights(self) -> dict[str, list[str]]:
        """All rights, by identity."""
        return self._background.call(self._inner.list_rights())

    def list_keys(self, stream: str = "") -> Rows[KeyState]:
        """Keys by id, level and state; never their bytes."""
        return Rows(self._background.call(self._inner.list_keys(stream)))

    def drain_broker(
        self, broker: str, *, drain: bool = True, partly: bool = False, beside: Sequence[str] = ()
    ) -> None:
        """Have the copies on one of several brokers moved to others, or no longer. Returns once that is decided; `describe` says how many it
        still has. Where copies have nowhere to go, once those of `beside` are drained as well, nothing is done; with `partly` those copies stay.
        Raises RequestError(CONFLICT, NOT_FOUND, UNSUPPORTED)."""
        self._background.call(self._inner.drain_broker(broker, drain=drain, partly=partly, beside=beside))

    def retire_broker(self, broker: str) -> None:
        """Say that one of several brokers is gone for good. Raises RequestError(NOT_FOUND, CONFLICT) where it is alive or a shard names it."""
        self._background.call(self._inner.retire_broker(broker))

    def recover_shard(
        self, stream: str, shard: int, broker: str, *, lost: Sequence[str] = (), powered_off: bool = False
    ) -> str:
        """Have `broker` lead a shard that nobody may lead by rule; what its copy lacks is lost. Returns the broker's note. Raises
        RequestError(CONFLICT, NOT_FOUND) where a copy that is alive has more, or one that is away or would be cut is not named in `lost`."""
        return self._background.call(
            self._inner.recover_shard(stream, shard, broker, lost=lost, powered_off=powered_off)
        )

    def rebalance(self, *, dry_run: bool = False, since: int = 0) -> ShardMoves:
        """Move copies until each of several brokers has its share; with `dry_run`, only say what would move first. Returns once that is
        decided. `since`: the `revision` of an earlier answer; `moved` counts from there. Raises RequestError(UNSUPPORTED)."""
        return self._background.call(self._inner.rebalance(dry_run=dry_run, since=since))

    def stop_rebalancing(self, *, since: int = 0) -> ShardMoves:
        """End what `rebalance` began: what has not begun to move stays where it is (`total`), and what moves arrives (`under_way`). `is_asked` says whether there was
        anything to end. Raises RequestError(UNSUPPORTED)."""
        return self._background.call(self._inner.stop_rebalancing(since=since))

    def rotate_keys(self, level: str, stream: str = "") -> str:
        """Rotate the data keys (of one stream, where named) or the root key. Returns the broker's note."""
        return self._background.call(self._inner.rotate_keys(level, stream))

    def destroy_retired_roots(self) -> str:
        """Destroy the root keys that rotations retired. Returns the broker's note. Raises RequestError(CONFLICT) where one may be needed still."""
        return self._background.call(self._inner.destroy_retired_roots())

    def list_links(self) -> Rows[LinkState]:
        """Links of bridges, as their agents last said."""
        return Rows(self._background.call(self._inner.list_links()))

    def describe_mesh(self) -> MeshPage:
        """The mesh as the region knows it: regions, grants, denials and audit logs, all in one. Takes the right to observe."""
        return self._background.call(self._inner.describe_mesh())

    def explain_crossing(self, stream: str | StreamName, source: str, destination: str) -> CrossingExplained:
        """Whether the stream may cross between these regions now, by which rule and grant, and why not: the broker's own decision.
        Takes the right to observe the stream."""
        return self._background.call(self._inner.explain_crossing(stream, source, destination))

    def request(self, request: Request[AnswerT], *, timeout_s: float | None = None) -> AnswerT:
        """Any request of the protocol (felix.messages) and its answer.

        Raises what the broker refuses it with; UnavailableError: TIMEOUT, or DISCONNECTED where the connection was lost
        before the answer and asking twice could do harm.
        """
        return self._background.call(self._inner.request(request, timeout_s=timeout_s))


class SyncTransaction(BlockingTransaction):
    """As `felix.transaction.Transaction`, blocking; see `felix.blocking.BlockingTransaction`."""

    __slots__ = ()

    def begin(self) -> None:
        """Raises RequestError where the broker refuses it, TRANSACTION_FENCED where a newer instance has taken over."""
        self._background.call(self._inner.begin())

    def publish(
        self,
        stream: str | StreamName,
        payload: Payload,
        *,
        key: RecordKey | None = None,
        headers: Headers | None = None,
        shard: int | None = None,
        message_id: MessageId | None = None,
    ) -> TransactionRecord:
        """Add a record; it has an offset after the commit. As `Stream.publish` otherwise."""
        return self._background.call(
            self._inner.publish(stream, payload, key=key, headers=headers, shard=shard, message_id=message_id)
        )

    def acknowledge(
        self, *work: SyncJob | ConsumerRecord | ConsumerBatch, consumer: SyncConsumer | None = None
    ) -> None:
        """Acknowledge with the commit: jobs of queues, and records or batches of a durable subscription's `consumer`.

        They are done if the transaction is committed, and not otherwise: aborted, jobs are given back, and records are redelivered.
        """
        self._background.call(self._inner.acknowledge(*map(inner_of, work), consumer=inner_of(consumer)))

    def commit(self) -> list[int]:
        """Commit, and return the offsets of the records in the order in which they were published, once all can be read.

        May be called again where it raised UnavailableError. Raises what the module says.
        """
        return self._background.call(self._inner.commit())

    def abort(self) -> None:
        """Drop it: nothing of it will be in any stream. Raises RequestError(CONFLICT) where it is committed."""
        self._background.call(self._inner.abort())


class SyncStream(Blocking[Stream]):
    """As `felix.stream.Stream`, blocking."""

    __slots__ = ()

    def publish(
        self,
        payload: Payload,
        *,
        key: RecordKey | None = None,
        headers: Headers | None = None,
        shard: int | None = None,
        expected_offset: int | None = None,
        message_id: MessageId | None = None,
    ) -> int:
        """Publish one record and return its offset once the stream's durability holds for it.

        `shard` overrides what the key says. With `expected_offset` it is appended only where the log of its shard ends
        there; else OffsetMismatchError says where it ends, in `log_end`. `message_id`: where the stream deduplicates, a
        record whose id it remembers is not appended again, and the offset is that of the first one.
        Many at once share batches: `await asyncio.gather(*(stream.publish(p) for p in payloads))`. For streams of records,
        use `publisher`. Raises RequestError (no right, too large), UnavailableError after two minutes of trying.
        """
        return self._background.call(
            self._inner.publish(
                payload,
                key=key,
                headers=headers,
                shard=shard,
                expected_offset=expected_offset,
                message_id=message_id,
            )
        )

    def publish_many(
        self, payloads: Sequence[Payload], keys: Sequence[RecordKey | None] | None = None
    ) -> list[int]:
        """Publish many records and return their offsets in the order given, once all are acknowledged."""
        return self._background.call(self._inner.publish_many(payloads, keys))

    def publish_batch(
        self, records: Sequence[NewRecord], *, shard: int | None = None, expected_offset: int | None = None
    ) -> Receipt:
        """Publish records as one batch in one shard, wholly or not at all; with `expected_offset`, only where the log of
        the shard ends there."""
        return self._background.call(
            self._inner.publish_batch(records, shard=shard, expected_offset=expected_offset)
        )

    def publisher(
        self,
        *,
        linger_ms: float = 0,
        batch_bytes: int = BATCH_BYTES_DEFAULT,
        batch_records: int = BATCH_RECORDS_DEFAULT,
        buffer_bytes: int = BUFFER_BYTES_DEFAULT,
        acks: Acks = "all",
        compress: int = 0,
        deadline_ms: int = DEADLINE_MS_DEFAULT,
        on_refused: Callable[[Refusal], None] | None = None,
    ) -> SyncPublisher:
        """A publisher of its own, for throughput; use it as `async with`.

        A batch closes at `batch_bytes`, at `batch_records`, or `linger_ms` after its first record (0: at the end of the
        event loop iteration). `buffer_bytes` bounds what is not acknowledged; `deadline_ms` how long a batch is tried. `compress`: a
        level of zstd, 1 (also True) to 19, on the event loop (level 1: about 2 ms for a full MiB); what does not get smaller is left. `on_refused` is called with every batch that is given up.
        Raises RequestError(CONFIG_INVALID).
        """
        return SyncPublisher(
            self._background,
            self._background.opened(
                self._inner.publisher,
                linger_ms=linger_ms,
                batch_bytes=batch_bytes,
                batch_records=batch_records,
                buffer_bytes=buffer_bytes,
                acks=acks,
                compress=compress,
                deadline_ms=deadline_ms,
                on_refused=on_refused,
            ),
            linger_ms=linger_ms,
            batch_bytes=batch_bytes,
            batch_records=batch_records,
        )

    def subscribe(
        self,
        start: StartAt = "latest",
        *,
        offsets: dict[int, int] | None = None,
        incarnation: bytes = b"",
        shards: Collection[int] | None = None,
        credit_bytes: int = CREDIT_BYTES_DEFAULT,
        on_gap: OnGap = "log",
        grant: str = "",
        epochs: EpochsRead | None = None,
    ) -> SyncSubscription:
        """A subscription: an async iterator of records; `batches()` of it is the fast way.

        `start`: "earliest", "latest", an offset, or a time (with a time zone). `offsets` overrides it per shard, as in
        `Subscription.positions` of an earlier one; with its `incarnation`, a re-created stream is detected, and with its `epochs` a log that
        lost records since, or was put back.
        `shards`: only these; None: all. `credit_bytes` bounds what is held here unread. `on_gap`: see felix.subscription.
        `grant`: sealed batches under an export grant, for bridges. Raises RequestError(INVALID, CONFIG_INVALID) here, and
        what the broker refuses it with at the first record.
        """
        return SyncSubscription(
            self._background,
            self._background.opened(
                self._inner.subscribe,
                start,
                offsets=offsets,
                incarnation=incarnation,
                shards=shards,
                credit_bytes=credit_bytes,
                on_gap=on_gap,
                grant=grant,
                epochs=epochs,
            ),
        )

    def consumer(
        self,
        name: str,
        *,
        start: Literal["earliest", "latest"] | None = None,
        ack_timeout: float | None = None,
        retries: Retries | None = None,
        unacked_max: int | None = None,
        inactive_ttl: float | None = None,
        exclusive: bool | None = None,
        settings: SubscriptionSettings | None = None,
        consumer: str = "",
        ack: AckMode = "explicit",
        credit_bytes: int = CREDIT_BYTES_DEFAULT,
        on_assigned: Callable[[int], None] | None = None,
        on_revoked: Callable[[int], None] | None = None,
        on_gap: Callable[[Gap], None] | None = None,
    ) -> SyncConsumer:
        """A consumer of the durable subscription `name`; use it as `async with` (felix.consumer).

        Any of `start`, `ack_timeout` and `inactive_ttl` (seconds), `retries`, `unacked_max`, `exclusive`, or `settings` as a whole
        make the subscription where there is none; where there is, they must be the same. With none of them it must exist.
        `consumer`: a name for people, as `describe_subscription` shows it; host and process id where nothing is said. `ack`: "explicit", or "auto": a record is done when the next one is asked for.
        `on_assigned` and `on_revoked` are called with a shard that comes, or is gone; `on_gap` with what retention took.
        Raises RequestError(CONFIG_INVALID, NAME_INVALID).
        """
        return SyncConsumer(
            self._background,
            self._background.opened(
                self._inner.consumer,
                name,
                start=start,
                ack_timeout=ack_timeout,
                retries=retries,
                unacked_max=unacked_max,
                inactive_ttl=inactive_ttl,
                exclusive=exclusive,
                settings=settings,
                consumer=consumer,
                ack=ack,
                credit_bytes=credit_bytes,
                on_assigned=on_assigned,
                on_revoked=on_revoked,
                on_gap=on_gap,
            ),
        )

    def create_subscription(
        self, name: str, settings: SubscriptionSettings | None = None, *, begin: int | datetime | None = None
    ) -> SubscriptionState:
        """A durable subscription, before its first consumer. `begin`: an offset, of all shards, or a time (with a time zone) from which
        on it gets records, instead of where `settings` say. Raises RequestError: ALREADY_EXISTS, CONFIG_INVALID, OFFSET_OUT_OF_RANGE;
        then there is none."""
        return self._background.call(self._inner.create_subscription(name, settings, begin=begin))

    def alter_subscription(
        self,
        name: str,
        *,
        ack_timeout: float | None = None,
        retries: RetriesChange | None = None,
        unacked_max: int | None = None,
        inactive_ttl: float | None = None,
    ) -> SubscriptionState:
        """Change its settings while its consumers go on; a setting that is None stays, and so do positions. Durations in seconds
        (`inactive_ttl` 0: never). Delivered records keep their ack timeout. Raises RequestError: NOT_FOUND, CONFIG_INVALID;
        FORBIDDEN for an identity that neither created it nor has the right `admin`.
        """
        return self._background.call(
            self._inner.alter_subscription(
                name,
                ack_timeout=ack_timeout,
                retries=retries,
                unacked_max=unacked_max,
                inactive_ttl=inactive_ttl,
            )
        )

    def subscriptions(self) -> Rows[SubscriptionState]:
        """The stream's durable subscriptions, without shards and consumers."""
        return Rows(self._background.call(self._inner.subscriptions()))

    def describe_subscription(self, name: str) -> SubscriptionState:
        """Its settings, positions, lag and consumers. Raises RequestError(NOT_FOUND)."""
        return self._background.call(self._inner.describe_subscription(name))

    def seek_subscription(
        self,
        name: str,
        start: StartAt = "latest",
        *,
        offsets: dict[int, int] | None = None,
        shards: Collection[int] | None = None,
    ) -> str:
        """Move its position, of all shards or of `shards`; `offsets` (by shard) alone move these. What its consumers have in hand
        no longer counts. Returns the broker's note. Raises RequestError: FORBIDDEN, OFFSET_OUT_OF_RANGE."""
        return self._background.call(
            self._inner.seek_subscription(name, start, offsets=offsets, shards=shards)
        )

    def redrive_subscription(self, name: str, records: int = 0) -> Redriven:
        """Deliver its dead letters to it again, oldest first, up to `records` (0: all there are), and to none of the stream's other readers; attempts start at
        zero. Says how many, and how many stay. Those before an error are delivered. Raises RequestError: FORBIDDEN for an identity that neither
        created it nor has the right `admin`, UNSUPPORTED; UnavailableError."""
        return self._background.call(self._inner.redrive_subscription(name, records))

    def delete_subscription(self, name: str) -> None:
        """Its consumers end, its position is forgotten. Raises RequestError: NOT_FOUND, FORBIDDEN."""
        self._background.call(self._inner.delete_subscription(name))

    def create(
        self,
        *,
        shards: int = 1,
        durability: Durability | None = None,
        retention: Retention | None = None,
        ring_bytes: int = 0,
        views: Views = NO_VIEWS,
    ) -> StreamState:
        """As `RegionClient.create_stream`."""
        return self._background.call(
            self._inner.create(
                shards=shards, durability=durability, retention=retention, ring_bytes=ring_bytes, views=views
            )
        )

    def describe(self) -> StreamState:
        """As `RegionClient.describe_stream`."""
        return self._background.call(self._inner.describe())

    def delete(self, *, incarnation: bytes = b"") -> None:
        """As `RegionClient.delete_stream`."""
        self._background.call(self._inner.delete(incarnation=incarnation))


class SyncPublisher(GatheringPublisher):
    """As `felix.publisher.Publisher`, blocking; see `felix.blocking.GatheringPublisher`."""

    __slots__ = ()

    def abort(self) -> None:
        """End at once. What is not acknowledged is given up, and whoever waits for it is told so."""
        self._background.run(self._inner.abort)

    @property
    def shards(self) -> int:
        """Shards of the stream; 0 before it is open."""
        return self._inner.shards

    @property
    def is_over(self) -> bool:
        """True once it takes no more records: closed, or refused for good."""
        return self._inner.is_over

    @property
    def held_bytes(self) -> int:
        """Bytes of records accepted and not yet acknowledged; `buffer_bytes` bounds them."""
        return self._inner.held_bytes


class SyncSubscription(RecordIterator):
    """As `felix.subscription.Subscription`, blocking; see `felix.blocking.RecordIterator`."""

    __slots__ = ()

    @property
    def positions(self) -> dict[int, int]:
        """Per shard, the offset after the last record or batch given out: where a resume goes on. `offsets=` takes it."""
        return self._inner.positions

    @property
    def epochs(self) -> dict[int, list[tuple[int, int]]]:
        """Per shard, the newest leader epochs of the batches right before `positions`, each with the offset from which on they were read. `epochs=` takes it,
        beside `offsets=`: so a log that was put back to an earlier copy, and has grown since, is not taken for the one that was read."""
        return self._inner.epochs

    @property
    def incarnation(self) -> bytes:
        """The 16 bytes that tell this stream from another of the same name; empty before it is open. The stream that `positions` are of: another one
        counts once its gap is told."""
        return self._inner.incarnation

    @property
    def held_bytes(self) -> int:
        """Bytes that came and are not consumed yet; `credit_bytes` bounds them."""
        return self._inner.held_bytes

    @property
    def resumes(self) -> int:
        """How often the broker was asked again after the first time."""
        return self._inner.resumes


class SyncConsumer(BlockingConsumer):
    """As `felix.consumer.Consumer`, blocking; see `felix.blocking.BlockingConsumer`."""

    __slots__ = ()

    @property
    def shards(self) -> list[int]:
        """The shards that this consumer has now; none while it stands by."""
        return self._inner.shards

    @property
    def is_open(self) -> bool:
        """True while the broker knows this consumer."""
        return self._inner.is_open

    @property
    def held_bytes(self) -> int:
        """Bytes that came and were not handed out yet; `credit_bytes` bounds them."""
        return self._inner.held_bytes

    def ack(self, record: ConsumerRecord | ConsumerBatch) -> bool:
        """Acknowledge the record, or all of the batch. True once that is durable. False if it does not count (the shard was
        reassigned, or the consumer was closed): then the records are redelivered. Also False if the connection was lost before
        the answer: then they are redelivered unless the broker had carried it out. Acknowledgements of one event loop iteration
        are sent together. Raises RequestError if the broker refuses it for another reason.
        """
        return self._background.call(self._inner.ack(record))

    def ack_through(self, record: ConsumerRecord | ConsumerBatch) -> bool:
        """All of the record's shard that was handed out, up to and including the record, is done. Returns as `ack`."""
        return self._background.call(self._inner.ack_through(record))

    def nack(
        self, record: ConsumerRecord | ConsumerBatch, *, delay: float | None = None, reason: str = ""
    ) -> bool:
        """The record failed: it is redelivered after `delay` seconds (None: as the subscription's retries say), or goes to the
        dead-letter stream with `reason` once it had all its attempts. Returns as `ack`."""
        return self._background.call(self._inner.nack(record, delay=delay, reason=reason))


class SyncCache(Blocking[Cache]):
    """As `felix.cache.Cache`, blocking."""

    __slots__ = ()

    def get(self, key: Key) -> Entry | None:
        """The value, or None. Raises RequestError (no right, no such cache), UnavailableError."""
        return self._background.call(self._inner.get(key))

    def put(self, key: Key, value: Value, *, ttl: float | None = None) -> int:
        """Put it, and return its version. `ttl` in seconds; None: the cache's own; FOREVER: without end.

        Raises RequestError (no right, too large); UnavailableError, with LIMIT_MEMORY where a cache that evicts nothing is full.
        """
        return self._background.call(self._inner.put(key, value, ttl=ttl))

    def delete(self, key: Key) -> bool:
        """Delete it; whether it was there (where the answer was lost and it was asked again: perhaps False)."""
        return self._background.call(self._inner.delete(key))

    def compare_and_set(
        self, key: Key, value: Value, *, version: int, ttl: float | None = None
    ) -> int | None:
        """Put it where the key has this version (0: where it is not there). The new version, or None where it has another."""
        return self._background.call(self._inner.compare_and_set(key, value, version=version, ttl=ttl))

    def increment(self, key: Key, by: int = 1, *, ttl: float | None = None) -> int:
        """Add to the number under the key (64 bits, kept as decimal digits; 0 where there is none); the number then.

        `ttl` counts where the key is made by it; the expiry of one that is there stays. Raises RequestError where there is no
        number, or where it would not fit.
        """
        return self._background.call(self._inner.increment(key, by, ttl=ttl))

    def exists(self, key: Key) -> bool:
        """Whether it is there; the value does not travel."""
        return self._background.call(self._inner.exists(key))

    def ttl(self, key: Key) -> float | None:
        """Seconds that are left; FOREVER for one without end; None where the key is not there."""
        return self._background.call(self._inner.ttl(key))

    def get_many(self, keys: Iterable[Key]) -> dict[bytes, Entry]:
        """The entries that are there, by key."""
        return self._background.call(self._inner.get_many(keys))

    def put_many(
        self, items: Mapping[Key, Value] | Iterable[tuple[Key, Value]], *, ttl: float | None = None
    ) -> list[int]:
        """Put many; their versions, in the order given. Not one transaction: where it raises, some may have been put."""
        return self._background.call(self._inner.put_many(items, ttl=ttl))

    def delete_many(self, keys: Iterable[Key]) -> int:
        """Delete many; how many were there."""
        return self._background.call(self._inner.delete_many(keys))

    def scan(self, prefix: Key = b"") -> Rows[tuple[bytes, Entry]]:
        """Keys that begin so, and their entries: shard by shard, in order within each, page after page. A page is of one moment."""
        return self._background.collect(self._inner.scan, prefix)

    def stats(self) -> wire.CacheStats:
        """The broker's counters of this cache."""
        return self._background.call(self._inner.stats())

    def alter(
        self, *, bytes_max: int | None = None, ttl: float | None = None, eviction: str | None = None
    ) -> StreamState:
        """Change the cache's settings while it serves; what is None stays, values do, too, but for what no longer fits.

        `bytes_max` per shard: with less, the least recently used are evicted, some at a time (a cache that refuses is only made as
        small as what it holds). `ttl` in seconds, FOREVER without end: of values put from now on without one. Raises
        RequestError: FORBIDDEN, CONFIG_INVALID, UNSUPPORTED; CONFLICT where what it holds would not fit.
        """
        return self._background.call(self._inner.alter(bytes_max=bytes_max, ttl=ttl, eviction=eviction))

    def shards(self) -> int:
        """How many shards the cache has."""
        return self._background.call(self._inner.shards())

    def watch(
        self,
        *,
        key: Key | None = None,
        prefix: Key = b"",
        resume: Position | str | None = None,
        coalesce: bool = False,
        credit_bytes: int = WATCH_CREDIT_BYTES,
    ) -> SyncWatch:
        """An iterator of changes: first the state (puts, then `ready`), then every change as it comes.

        `resume`: the position of an earlier change: only later changes are delivered, or a `reset` and the whole state if the
        broker no longer has them. `coalesce`: while behind, only the last change of a key. `credit_bytes` bounds what is held
        here unread. Raises RequestError(CONFIG_INVALID) here; the iterator what the broker refuses it with.
        """
        return SyncWatch(
            self._background,
            self._background.opened(
                self._inner.watch,
                key=key,
                prefix=prefix,
                resume=resume,
                coalesce=coalesce,
                credit_bytes=credit_bytes,
            ),
        )

    def mirror(self, prefix: Key = b"") -> SyncMirror:
        """A copy of these keys in this process, kept right by a watch. Use it as `async with`."""
        return SyncMirror(self._background, self._background.opened(self._inner.mirror, prefix))


class SyncWatch(ChangeIterator):
    """As `felix.cache.Watch`, blocking; see `felix.blocking.ChangeIterator`."""

    __slots__ = ()

    @property
    def is_current(self) -> bool:
        """True while connected, with nothing received that has not been given out."""
        return self._inner.is_current

    @property
    def position(self) -> Position | None:
        """Where to resume after the last change given out; None while the initial state is being delivered."""
        return self._inner.position


class SyncMirror(BlockingMirror):
    """As `felix.cache.Mirror`, blocking; see `felix.blocking.BlockingMirror`."""

    __slots__ = ()

    def version(self, key: Key) -> int:
        """Of the value that is here; 0 where there is none."""
        return self._background.run(self._inner.version, key)

    @property
    def is_current(self) -> bool:
        """True while connected, with everything that has arrived taken in."""
        return self._inner.is_current

    @property
    def position(self) -> Position | None:
        """As `Watch.position`."""
        return self._inner.position

    def reached(self, key: Key, version: int) -> None:
        """Wait until what is here is at least as new as this version of the key: to read here what was put with `Cache`.

        Raises what ended the watch.
        """
        self._background.call(self._inner.reached(key, version))


class SyncQueue(Blocking[Queue]):
    """As `felix.queue.Queue`, blocking."""

    __slots__ = ()

    def put(
        self,
        payload: Payload,
        *,
        key: RecordKey | None = None,
        delay: float = 0,
        deliver_at: datetime | None = None,
        priority: int | None = None,
        headers: Headers | None = None,
    ) -> int:
        """Put one record in and return its offset, once it is as durable as the queue.

        `delay`: seconds from its arrival until a worker may have it; `deliver_at`: not before this time (with a time zone).
        `priority`: 0 to 9, 4 where nothing is said; of the records that are ready together the highest goes first. It is published
        like any record (`Stream.publish`), so it is there once, however often the connection breaks. Raises as that does.
        """
        return self._background.call(
            self._inner.put(
                payload, key=key, delay=delay, deliver_at=deliver_at, priority=priority, headers=headers
            )
        )

    def put_many(
        self,
        payloads: Sequence[Payload],
        keys: Sequence[RecordKey | None] | None = None,
        *,
        delay: float = 0,
        deliver_at: datetime | None = None,
        priority: int | None = None,
        headers: Headers | None = None,
    ) -> list[int]:
        """Put many records in, and return their offsets in the order given once all are durable. The rest counts for each."""
        return self._background.call(
            self._inner.put_many(
                payloads, keys, delay=delay, deliver_at=deliver_at, priority=priority, headers=headers
            )
        )

    def consume(
        self,
        *,
        visibility: float | None = None,
        prefetch: int = PREFETCH_DEFAULT,
        prefetch_bytes: int = PREFETCH_BYTES_DEFAULT,
        auto_extend: bool = True,
        extend_for: float | None = None,
        worker: str = "",
    ) -> SyncQueueConsumer:
        """Jobs as they become ready: an async iterator that never ends by itself.

        `visibility`: seconds that a lease lasts (None: as the queue says). `prefetch`: jobs that may be here unsettled, looked at
        or not. With `auto_extend` the leases of all of them are extended for as long as this consumer lives; without, a job that
        takes longer than its visibility goes to another worker. `extend_for`: a job that is not settled so many seconds after it was
        handed out is not extended any more, so that one that hangs goes to another worker, too. `worker`: a name for people, as
        `describe` and `peek` show it; host and process id where nothing is said. Raises RequestError(CONFIG_INVALID).
        """
        return SyncQueueConsumer(
            self._background,
            self._background.opened(
                self._inner.consume,
                visibility=visibility,
                prefetch=prefetch,
                prefetch_bytes=prefetch_bytes,
                auto_extend=auto_extend,
                extend_for=extend_for,
                worker=worker,
            ),
        )

    def lease(
        self,
        records: int = 1,
        *,
        wait: float = 0,
        visibility: float | None = None,
        max_bytes: int = LEASE_BYTES_MAX,
    ) -> list[SyncJob]:
        """Up to `records` jobs, of together `max_bytes`; waits up to `wait` seconds for the first. An empty list where none came.

        A lease whose answer is lost with the connection runs out by itself; jobs that come after the call was cancelled are given back
        unseen. Raises RequestError, UnavailableError.
        """
        return [
            SyncJob(self._background, each)
            for each in self._background.call(
                self._inner.lease(records, wait=wait, visibility=visibility, max_bytes=max_bytes)
            )
        ]

    def settle(
        self, verb: str, jobs: Sequence[Held], *, delay: float | None = None, reason: str = ""
    ) -> list[tuple[int, int]]:
        """`ack`, `nack`, `release` or `extend` jobs by shard, offset and token, as another process leased them. Returns shard and
        offset of those whose leases are lost. `delay`, in seconds: of a nack; of an extension, for how long."""
        return self._background.call(self._inner.settle(verb, jobs, delay=delay, reason=reason))

    def flush(self) -> None:
        """Return once everything said of jobs that `lease` gave is answered."""
        self._background.call(self._inner.flush())

    def describe(self) -> QueueState:
        """How many records are ready, leased, delayed, dead; how old the oldest is; rates; who works."""
        return self._background.call(self._inner.describe())

    def peek(self, records: int = 10) -> list[PeekedJob]:
        """The first records that are not done, and what they are, without leasing them. Of a leased one: since when, who has it, and
        the token, with which `settle` can end the lease of a worker that hangs."""
        return self._background.call(self._inner.peek(records))

    def redrive(self, records: int = 0) -> int:
        """Bring dead letters back into the queue, oldest first, up to `records` (0: all there are); attempts start at zero.
        Returns how many.
        """
        return self._background.call(self._inner.redrive(records))

    def purge(self) -> int:
        """Everything in the queue is done, also what workers hold. How many records that were."""
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
        """Change the queue's settings while workers go on; what is None stays. As `RegionClient.create_queue` has them.

        Leases and waits that began keep the time that they were given; attempts so far count against the new bound, and dead
        letters that have landed stay where they are. `dead_letter` empty: NAME.dead again. `ordered_by_key` cannot be
        another than it is. Raises RequestError: FORBIDDEN, CONFIG_INVALID, UNSUPPORTED.
        """
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
        """Delete the queue and its records; its dead letters stay."""
        self._background.call(self._inner.delete())


class SyncQueueConsumer(JobIterator):
    """As `felix.queue.QueueConsumer`, blocking; see `felix.blocking.JobIterator`."""

    __slots__ = ()

    def flush(self) -> None:
        """Return once everything said of jobs so far is answered."""
        self._background.call(self._inner.flush())

    @property
    def lost(self) -> int:
        """Jobs of this consumer of which the lease was lost before they were settled."""
        return self._inner.lost

    @property
    def buffered(self) -> int:
        """Jobs that are here and were not looked at."""
        return self._inner.buffered

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SyncJob:
        job = self.next_job()
        if job is None:
            raise StopIteration
        return job

    def next_job(self, timeout_s: float | None = None) -> SyncJob | None:
        """The next job; None after `close`. Raises TimeoutError where none came within `timeout_s` seconds (None: waits)."""
        job = self._next(timeout_s)
        return None if job is None else SyncJob(self._background, job)


class SyncJob(BlockingJob):
    """As `felix.queue.Job`, blocking; see `felix.blocking.BlockingJob`."""

    __slots__ = ()

    @property
    def payload(self) -> bytes:
        return self._inner.payload

    @property
    def key(self) -> bytes | None:
        return self._inner.key

    @property
    def headers(self) -> dict[str, bytes]:
        return self._inner.headers

    @property
    def attempts(self) -> int:
        """How often the job was handed out, this time counted."""
        return self._inner.attempts

    @property
    def shard(self) -> int:
        return self._inner.shard

    @property
    def offset(self) -> int:
        """With the shard, what names the job."""
        return self._inner.offset

    @property
    def token(self) -> int:
        """Of the lease, as transactions and the wire name it."""
        return self._inner.token

    @property
    def timestamp_ms(self) -> int:
        """When it was published, by the broker's clock."""
        return self._inner.timestamp_ms

    @property
    def settled(self) -> bool:
        """True once it was acknowledged or given back here."""
        return self._inner.settled

    @property
    def lost(self) -> bool:
        """True once the broker said that the lease is lost: another worker may have the job, and what is done here does not count.
        Of a job that is extended, by a consumer or by `extend`, it is noticed within a third of the visibility."""
        return self._inner.lost

    def ack(self) -> None:
        """The job is done. Awaited: durably so. Raises RequestError(LEASE_LOST) where it is another's by now, UnavailableError."""
        self._background.wait(self._inner.ack)

    def nack(self, *, delay: float | None = None, reason: str = "") -> None:
        """Give the job back, for after `delay` seconds (None: as the queue's retries say). With its last attempt it goes to the dead
        letters, with the reason. Raises as `ack`."""
        self._background.wait(self._inner.nack, delay=delay, reason=reason)

    def extend(self, visibility: float | None = None) -> None:
        """Keep the job for `visibility` seconds from now (None: as the queue says). Raises as `ack`."""
        self._background.wait(self._inner.extend, visibility)

    def release(self) -> None:
        """Give the job back unseen: at once, and it does not count as an attempt."""
        self._background.wait(self._inner.release)

    @property
    def queue_name(self) -> StreamName:
        """Of the queue that it was leased from."""
        return self._inner.queue_name
