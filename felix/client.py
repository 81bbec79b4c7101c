"""Client: a region and its streams, as an application sees them.

::

    async with felix.connect("us-east") as region:
        orders = region.stream("acme/payments/orders")
        offset = await orders.publish(b'{"id": 7}', key=b"7")
        async for record in orders.subscribe(start="earliest"):
            ...

A `RegionClient` keeps one session, reconnects when it is lost, and moves publishers and subscriptions to the new one. It
reaches the one region of its profile and no other. Everything here belongs to one event loop; `felix.sync` is for threads.

Errors, by who must act (felix.errors): `RequestError` change the request; `UnavailableError` try again;
`ProtocolError` the broker is broken; `CorruptionError` the region's operator must look.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

import msgspec

from felix.backoff import BackoffPolicy
from felix.connection import (
    CONNECT_TIMEOUT_S,
    RELAYING,
    REQUEST_TIMEOUT_S,
    RegionConnection,
    Relaying,
    SessionInfo,
)
from felix.errors import Code, FelixError, RequestError
from felix.identity import Identity
from felix.messages import (
    PAGE_MAX,
    AlterStream,
    AnswerT,
    CacheTraffic,
    CreateStream,
    CrossingExplained,
    DeleteNamespace,
    DeleteQuota,
    DeleteStream,
    DescribeMesh,
    DescribeRegion,
    DescribeStream,
    DescribeSubscription,
    DescribeTraffic,
    DestroyRetiredRoots,
    DrainBroker,
    ExplainCrossing,
    KeyState,
    LinkState,
    ListKeys,
    ListLinks,
    ListNamespaces,
    ListQuotas,
    ListRights,
    ListStreams,
    ListSubscriptions,
    MeshPage,
    PutNamespace,
    PutQuota,
    PutRights,
    QuotaState,
    ReaderTraffic,
    RebalanceShards,
    RecoverShard,
    RegionState,
    Request,
    RetireBroker,
    RotateKeys,
    ShardMoves,
    StopRebalancing,
    StreamState,
    StreamTraffic,
    SubscriptionPage,
    SubscriptionState,
    Throttled,
)
from felix.names import StreamName
from felix.page import pages
from felix.profile import Profile, load_profile
from felix.quota import QuotaLimits
from felix.renewal import IdentityKeeper
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
    Views,
)
from felix.tracing import Tracing, tracing, tracing_wanted
from felix.transport.port import Engine, TransportLimits

if TYPE_CHECKING:
    from felix.cache import Cache
    from felix.publisher import Publisher
    from felix.queue import Queue
    from felix.stream import Stream
    from felix.transaction import Transaction, Transactions

STREAM_PUBLISHERS_MAX: Final = 64
"""Publishers that `Stream.publish` opens by itself; the least recently used is closed for a new one. Below the 100
QUIC streams of a session, so that publishers made by hand find room."""

LEAVE_S: Final = 5.0
"""How long a client that is left with an exception waits for what is under way: its error is not to be told minutes later, because no broker answers."""

LISTED_TIMEOUT_S: Final = 2.0
"""How long a listing waits for the broker that leads one of its streams."""

T = TypeVar("T")


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
) -> RegionClient:
    """A client of a region, by name (its profile is under `FELIX_HOME`) or by `profile`. Use it as `async with`.

    `identity`: who to come as: a name in the region's folder, a path, or an `Identity`; None: the profile's own. Timeouts in
    seconds; `wait_for_broker`: False does not wait if the kernel says that no process listens. `relay`: whether other brokers of the
    region are reached through the one that the profile leads to: `auto` (where their own addresses do not answer), `always`, `never`. `tracing`: see felix.tracing;
    None: what `FELIX_TRACING` says. `engine`, `runtime`: for tests. Entering raises what `RegionConnection.open` and
    `load_profile` raise.
    """
    if (region is None) == (profile is None):
        raise RequestError("Connect either to a region by name or by a profile.", code=Code.CONFIG_INVALID)
    if relay not in RELAYING:
        raise RequestError(
            f"relay is {relay!r}; it is one of {', '.join(RELAYING)}.", code=Code.CONFIG_INVALID
        )
    return RegionClient(
        region,
        profile,
        identity,
        engine=engine,
        transport_limits=transport_limits,
        backoff=backoff,
        connect_timeout_s=connect_timeout_s,
        request_timeout_s=request_timeout_s,
        wait_for_broker=wait_for_broker,
        relay=relay,
        tracing_on=tracing_wanted() if tracing is None else tracing,
        runtime=runtime,
    )


class RegionClient:
    """One region. Made by `connect`; open inside `async with`, or between `open` and `close`."""

    def __init__(
        self,
        region: str | None,
        profile: Profile | None,
        identity: Identity | Path | str | None,
        *,
        engine: Engine | None,
        transport_limits: TransportLimits | None,
        backoff: BackoffPolicy | None,
        connect_timeout_s: float,
        request_timeout_s: float,
        wait_for_broker: bool,
        relay: Relaying,
        tracing_on: bool,
        runtime: Runtime,
    ) -> None:
        self._name = region
        self._profile = profile
        self._identity = identity
        self._engine = engine
        self._transport_limits = transport_limits
        self._backoff = backoff
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._wait_for_broker = wait_for_broker
        self._relay: Relaying = relay
        self._tracing_on = tracing_on
        self._runtime = runtime
        self._connection: RegionConnection | None = None
        self._keeper: IdentityKeeper | None = None
        self._publishers: OrderedDict[StreamName, Publisher] = OrderedDict()
        self._publishing: dict[StreamName, tuple[float, int]] = {}
        self._caches: dict[StreamName, Cache] = {}
        self._queues: dict[StreamName, Queue] = {}
        self._transactions: Transactions | None = None

    # -- life -----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(None if kind is None else LEAVE_S)

    async def open(self) -> None:
        """Connect. Raises UnavailableError where no broker answers in time, RequestError where profile, identity or
        region are wrong, ProtocolError where the peer speaks another protocol."""
        if self._connection is not None:
            raise RequestError(
                "This client is open already.", code=Code.STATE, hint="Make another with felix.connect."
            )
        profile = await asyncio.to_thread(self._resolve)
        connection = RegionConnection(
            profile,
            engine=self._engine,
            transport_limits=self._transport_limits,
            backoff=self._backoff,
            connect_timeout_s=self._connect_timeout_s,
            request_timeout_s=self._request_timeout_s,
            wait_for_broker=self._wait_for_broker,
            runtime=self._runtime,
            relay=self._relay,
        )
        await connection.open()
        self._connection = connection
        self._keeper = IdentityKeeper(connection)
        self._keeper.start()

    def _resolve(self) -> Profile:
        identity = self._identity
        if self._profile is None:
            assert self._name is not None
            profile = load_profile(self._name, identity=identity if isinstance(identity, str) else "")
        else:
            profile = self._profile
            if isinstance(identity, str):
                identity = Path(identity)
        return replace(profile, identity=identity) if isinstance(identity, Identity | Path) else profile

    async def close(self) -> None:
        """Flush what `Stream.publish` still has open, end every subscription and the session. Idempotent. Where the client is left with an
        exception, that has 5 s."""
        await self._close(None)

    async def _close(self, flush_s: float | None) -> None:
        connection = self._connection
        if connection is None:
            return
        for cache in self._caches.values():
            cache.close()
        publishers, self._publishers = self._publishers, OrderedDict()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(flush_s):
                    for queue in self._queues.values():
                        with suppress(FelixError):
                            await queue.flush()
                    for publisher in publishers.values():
                        # The publishing call awaits the outcome; here it is only given time to arrive.
                        with suppress(FelixError):
                            await publisher.close()
        finally:
            # Also where whoever closes is cancelled: nobody else could.
            for queue in self._queues.values():
                queue.close()
            for publisher in publishers.values():
                publisher.abort()
            if self._transactions is not None:
                self._transactions.close()
                self._transactions = None
            try:
                if self._keeper is not None:
                    await self._keeper.close()
            finally:
                await connection.close()

    @property
    def connection(self) -> RegionConnection:
        """For felix/ itself. Raises RequestError(STATE) before the client is open."""
        if self._connection is None:
            raise RequestError(
                "This client is not connected.",
                code=Code.STATE,
                hint="Use `async with felix.connect(…) as region`.",
            )
        return self._connection

    @property
    def session(self) -> SessionInfo:
        """Of the newest session: the broker that answered, this client's identity, and what it may do."""
        return self.connection.session

    @property
    def is_connected(self) -> bool:
        """True while a session stands; False while a new one is being made."""
        return self._connection is not None and self._connection.link is not None

    @property
    def throttled(self) -> Throttled | None:
        """The quota that slows this session down now, as the broker says; None where none does."""
        link = self.connection.link
        return link.throttled if link is not None else None

    @property
    def reconnects(self) -> int:
        """How often the client reconnected."""
        return self.connection.reconnects

    # -- streams --------------------------------------------------------------------------------------

    def stream(self, name: str | StreamName, *, linger_ms: float = 0, compress: int = 0) -> Stream:
        """A stream by its name, tenant/namespace/name; whether it exists is not asked. Raises RequestError(NAME_INVALID).

        `linger_ms` and `compress` are of `Stream.publish` and its like, as in `Stream.publisher`: what is set when the first record
        of this stream is published counts for this client.
        """
        from felix.stream import Stream

        parsed = StreamName.parse(name) if isinstance(name, str) else name
        if linger_ms or compress:
            self._publishing[parsed] = (linger_ms, compress)
        return Stream(self, parsed)

    def queue(self, name: str | StreamName) -> Queue:
        """A queue by its name; whether it exists is not asked. Raises RequestError(NAME_INVALID)."""
        from felix.queue import Queue

        parsed = StreamName.parse(name) if isinstance(name, str) else name
        held = self._queues.get(parsed)
        if held is None:
            held = self._queues[parsed] = Queue(self, parsed)
        return held

    async def create_queue(
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
        from felix.queue import queue_views

        views = queue_views(
            visibility=visibility,
            attempts=attempts,
            retry=retry,
            retry_max=retry_max,
            dead_letter=dead_letter,
            ordered_by_key=ordered_by_key,
        )
        return await self.create_stream(
            name,
            shards=shards,
            durability=durability,
            retention=retention,
            ring_bytes=ring_bytes,
            views=views,
            replicas=replicas,
            min_in_sync=min_in_sync,
        )

    async def create_stream(
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
        wanted = CreateStream(
            str(StreamName.parse(str(name))),
            shards,
            durability or Durability(),
            retention or Retention(),
            ring_bytes,
            views,
            replicas,
            min_in_sync,
            acks,
        )
        return await self.connection.request(wanted)

    async def alter_stream(
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
        wanted = AlterStream(
            str(StreamName.parse(str(name))),
            incarnation,
            retention,
            compaction,
            deduplication,
            offload,
            list(remove),
            queue,
            cache,
            replicas,
            min_in_sync,
        )
        return await self.connection.request(wanted)

    async def describe_stream(self, name: str | StreamName) -> StreamState:
        """Settings and offsets of a stream. Raises RequestError(NOT_FOUND_OR_FORBIDDEN)."""
        return await self.connection.request(DescribeStream(str(StreamName.parse(str(name)))))

    async def delete_stream(self, name: str | StreamName, *, incarnation: bytes = b"") -> str:
        """Delete a stream and its records, and destroy its key; with `incarnation`, only if it is still that one. Returns the broker's note."""
        return (
            await self.connection.request(DeleteStream(str(StreamName.parse(str(name))), incarnation))
        ).note

    async def list_subscriptions(self, stream: str = "") -> AsyncIterator[SubscriptionState]:
        """Durable subscriptions of a stream, or of all that this identity may subscribe to, without shards and consumers.

        Of a stream that another broker leads, that one is asked; where it does not answer soon, `leader` names it and counters are 0.
        """
        request = ListSubscriptions(stream, "", PAGE_MAX)

        def last(page: SubscriptionPage) -> str:
            return f"{page.subscriptions[-1].stream} {page.subscriptions[-1].name}"

        async for page in pages(self.connection, request, "subscriptions", last):
            for state in page.subscriptions:
                if state.leader:
                    with suppress(FelixError):
                        asked = DescribeSubscription(state.stream, state.name)
                        found = await self.connection.request(asked, timeout_s=LISTED_TIMEOUT_S)
                        state = msgspec.structs.replace(found, shards=[], consumers=[])
                yield state

    async def list_streams(self, prefix: str = "") -> AsyncIterator[StreamState]:
        """The streams that this identity may see, by name, page after page.

        Of a stream that another broker leads, that one is asked; where it does not answer soon, offsets and sizes are 0.
        """
        request = ListStreams(prefix, "", PAGE_MAX)
        async for page in pages(self.connection, request, "streams", lambda page: page.streams[-1].stream):
            for state in page.streams:
                if any(not shard.is_told and not shard.stopped for shard in state.state):
                    with suppress(FelixError):
                        state = await self.connection.request(
                            DescribeStream(state.stream), timeout_s=LISTED_TIMEOUT_S
                        )
                yield state

    # -- caches ---------------------------------------------------------------------------------------

    def cache(self, name: str | StreamName, *, exchanges: int = EXCHANGES_DEFAULT) -> Cache:
        """A cache by its name; whether it exists is not asked. The same one for the same name; `exchanges` is of the first.

        Raises RequestError(NAME_INVALID, CONFIG_INVALID).
        """
        from felix.cache import Cache

        parsed = StreamName.parse(str(name))
        held = self._caches.get(parsed)
        if held is None:
            held = self._caches[parsed] = Cache(self.connection, parsed, exchanges=exchanges)
        return held

    async def create_cache(
        self,
        name: str | StreamName,
        settings: CacheSettings | None = None,
        *,
        shards: int = 1,
        durability: Durability | None = None,
        replicas: int = 0,
        min_in_sync: int = 0,
    ) -> Cache:
        """Create a cache: a compacted stream with the latest value of each key in memory. Its copies are as `create_stream` has them. Errors
        as `create_stream`."""
        await self.create_stream(
            name,
            shards=shards,
            durability=durability,
            views=Views(cache=settings or CacheSettings()),
            replicas=replicas,
            min_in_sync=min_in_sync,
        )
        return self.cache(name)

    def transaction(
        self,
        *,
        timeout_s: float = TRANSACTION_TIMEOUT_S,
        transactional_id: str = "",
        compress: int = 0,
    ) -> Transaction:
        """Records for several streams, and acknowledgements, that become visible together or not at all; use it as `async with`.

        It is aborted where it is open for longer than `timeout_s` (the broker says how long it may be). With a
        `transactional_id`, the first transaction of this client under it ends what an older instance has open.
        """
        from felix.transaction import Transaction, Transactions

        if self._transactions is None:
            self._transactions = Transactions(self.connection)
        return Transaction(
            self._transactions, timeout_s=timeout_s, transactional_id=transactional_id, compress=compress
        )

    # -- the region -----------------------------------------------------------------------------------

    async def describe(self) -> RegionState:
        """Gauges of the broker that answers."""
        return await self.connection.request(DescribeRegion())

    async def put_namespace(self, namespace: str, settings: NamespaceSettings) -> None:
        """Say how a namespace (`tenant/namespace`) treats streams that do not exist; counts at once. For operators."""
        await self.connection.request(PutNamespace(namespace, settings))

    async def delete_namespace(self, namespace: str) -> str:
        """Streams of the namespace are created by hand again; answers what a person should know of it."""
        return (await self.connection.request(DeleteNamespace(namespace))).note

    async def list_namespaces(self) -> dict[str, NamespaceSettings]:
        """Namespaces with settings of their own."""
        found: dict[str, NamespaceSettings] = {}
        request = ListNamespaces("", PAGE_MAX)
        async for page in pages(self.connection, request, "namespaces", lambda page: max(page.namespaces)):
            found |= page.namespaces
        return found

    async def put_quota(
        self, scope: str, name: str, limits: QuotaLimits, unset: Sequence[str] = ()
    ) -> QuotaState:
        """Set the limits that `limits` names, of a `tenant` or an `identity` (by its SPIFFE id), and take away those in
        `unset`; they count at once."""
        return await self.connection.request(PutQuota(scope, name, limits, list(unset)))

    async def delete_quota(self, scope: str, name: str) -> str:
        """Back to the region's defaults; answers what a person should know of it."""
        return (await self.connection.request(DeleteQuota(scope, name))).note

    async def list_quotas(self, scope: str = "", name: str = "") -> list[QuotaState]:
        """Limits and use of tenants and identities at the broker that answers, tenants first. An identity that is no
        operator's may ask for its own alone."""
        found: list[QuotaState] = []
        request = ListQuotas(scope, name, limit=PAGE_MAX)
        async for page in pages(self.connection, request, "quotas"):
            found += page.quotas
        return found

    async def stream_traffic(self, prefix: str = "") -> tuple[int, list[StreamTraffic]]:
        """Traffic of each stream at the broker that answers, since its start, and the time of the counts (ms)."""
        found: list[StreamTraffic] = []
        time_ms = 0
        request = DescribeTraffic("streams", prefix, limit=PAGE_MAX)
        async for page in pages(self.connection, request, "streams"):
            found += page.streams
            time_ms = page.time_ms
        return time_ms, found

    async def reader_traffic(self, prefix: str = "") -> list[ReaderTraffic]:
        """Readers at the broker that answers: what they were sent, how far behind they are and what they wait for."""
        found: list[ReaderTraffic] = []
        request = DescribeTraffic("readers", prefix, limit=PAGE_MAX)
        async for page in pages(self.connection, request, "readers"):
            found += page.readers
        return found

    async def cache_traffic(self, prefix: str = "") -> list[CacheTraffic]:
        """The size of each cache at the broker that answers, and its counters since the broker serves it."""
        found: list[CacheTraffic] = []
        request = DescribeTraffic("caches", prefix, limit=PAGE_MAX)
        async for page in pages(self.connection, request, "caches"):
            found += page.caches
        return found

    async def put_rights(
        self, identity: str, rights: Sequence[str], *, held: Sequence[str] | None = None
    ) -> None:
        """Replace the rights of an identity, as `publish acme/ops/*`; an empty list takes all away, at once. `held`: what it had when these were chosen.
        Raises RequestError(CONFLICT) where it has others by now."""
        await self.connection.request(PutRights(identity, list(rights), None if held is None else list(held)))

    async def list_rights(self) -> dict[str, list[str]]:
        """All rights, by identity."""
        found: dict[str, list[str]] = {}
        request = ListRights("", PAGE_MAX)
        async for page in pages(self.connection, request, "rights", lambda page: max(page.rights)):
            found |= page.rights
        return found

    async def list_keys(self, stream: str = "") -> list[KeyState]:
        """Keys by id, level and state; never their bytes."""
        found: list[KeyState] = []
        async for page in pages(self.connection, ListKeys(stream, limit=PAGE_MAX), "keys"):
            found += page.keys
        return found

    async def drain_broker(
        self, broker: str, *, drain: bool = True, partly: bool = False, beside: Sequence[str] = ()
    ) -> None:
        """Have the copies on one of several brokers moved to others, or no longer. Returns once that is decided; `describe` says how many it
        still has. Where copies have nowhere to go, once those of `beside` are drained as well, nothing is done; with `partly` those copies stay.
        Raises RequestError(CONFLICT, NOT_FOUND, UNSUPPORTED)."""
        await self.connection.request(DrainBroker(broker, drain, partly, list(beside)))

    async def retire_broker(self, broker: str) -> None:
        """Say that one of several brokers is gone for good. Raises RequestError(NOT_FOUND, CONFLICT) where it is alive or a shard names it."""
        await self.connection.request(RetireBroker(broker))

    async def recover_shard(
        self, stream: str, shard: int, broker: str, *, lost: Sequence[str] = (), powered_off: bool = False
    ) -> str:
        """Have `broker` lead a shard that nobody may lead by rule; what its copy lacks is lost. Returns the broker's note. Raises
        RequestError(CONFLICT, NOT_FOUND) where a copy that is alive has more, or one that is away or would be cut is not named in `lost`."""
        return (
            await self.connection.request(RecoverShard(stream, shard, broker, list(lost), powered_off))
        ).note

    async def rebalance(self, *, dry_run: bool = False, since: int = 0) -> ShardMoves:
        """Move copies until each of several brokers has its share; with `dry_run`, only say what would move first. Returns once that is
        decided. `since`: the `revision` of an earlier answer; `moved` counts from there. Raises RequestError(UNSUPPORTED)."""
        return await self.connection.request(RebalanceShards(dry_run, since))

    async def stop_rebalancing(self, *, since: int = 0) -> ShardMoves:
        """End what `rebalance` began: what has not begun to move stays where it is (`total`), and what moves arrives (`under_way`). `is_asked` says whether there was
        anything to end. Raises RequestError(UNSUPPORTED)."""
        return await self.connection.request(StopRebalancing(since))

    async def rotate_keys(self, level: str, stream: str = "") -> str:
        """Rotate the data keys (of one stream, where named) or the root key. Returns the broker's note."""
        return (await self.connection.request(RotateKeys(level, stream))).note

    async def destroy_retired_roots(self) -> str:
        """Destroy the root keys that rotations retired. Returns the broker's note. Raises RequestError(CONFLICT) where one may be needed still."""
        return (await self.connection.request(DestroyRetiredRoots())).note

    async def list_links(self) -> list[LinkState]:
        """Links of bridges, as their agents last said."""
        found: list[LinkState] = []
        async for page in pages(self.connection, ListLinks(limit=PAGE_MAX), "links"):
            found += page.links
        return found

    async def describe_mesh(self) -> MeshPage:
        """The mesh as the region knows it: regions, grants, denials and audit logs, all in one. Takes the right to observe."""
        found = MeshPage()
        for what in ("regions", "grants", "denials", "logs"):
            async for page in pages(self.connection, DescribeMesh(what, limit=PAGE_MAX), what):
                getattr(found, what).extend(getattr(page, what))
        return found

    async def explain_crossing(
        self, stream: str | StreamName, source: str, destination: str
    ) -> CrossingExplained:
        """Whether the stream may cross between these regions now, by which rule and grant, and why not: the broker's own decision.
        Takes the right to observe the stream."""
        return await self.connection.request(
            ExplainCrossing(str(StreamName.parse(str(stream))), source, destination)
        )

    async def request(self, request: Request[AnswerT], *, timeout_s: float | None = None) -> AnswerT:
        """Any request of the protocol (felix.messages) and its answer.

        Raises what the broker refuses it with; UnavailableError: TIMEOUT, or DISCONNECTED where the connection was lost
        before the answer and asking twice could do harm.
        """
        return await self.connection.request(request, timeout_s=timeout_s)

    # -- publishers of `Stream.publish` ---------------------------------------------------------------

    def _tracer(self) -> Tracing | None:
        return tracing() if self._tracing_on else None

    def _new_producer_id(self) -> int:
        return self.connection.runtime.random.getrandbits(63) or 1

    async def _publisher(self, name: StreamName) -> Publisher:
        while True:
            publisher = self._publishers.get(name)
            if publisher is not None and publisher._lost_its_stream and not publisher.held_bytes:
                # Who publishes after he was told so means the stream that is there now.
                del self._publishers[name]
                publisher.abort()
                publisher = None
            if publisher is None or publisher.is_over:
                if len(self._publishers) >= STREAM_PUBLISHERS_MAX:
                    self._close_idle_publisher()
                linger_ms, compress = self._publishing.get(name, (0.0, 0))
                publisher = self.stream(name).publisher(linger_ms=linger_ms, compress=compress)
                self._publishers[name] = publisher
            self._publishers.move_to_end(name)
            if publisher.shards:
                return publisher
            await publisher._stands()
            if not publisher.is_over:
                return publisher

    def _close_idle_publisher(self) -> None:
        """The least recently used one that nobody waits for: neither until it is open nor for an acknowledgement."""
        for name, publisher in self._publishers.items():
            if publisher.is_over or (publisher.shards and not publisher.held_bytes):
                del self._publishers[name]
                publisher.abort()
                return
