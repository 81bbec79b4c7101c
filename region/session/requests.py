"""Requests on the control stream: who may ask, and what is done.

One method per request, named as the request is on the wire. Rights are asked first, so that an
answer never tells more than a right allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from felix.errors import Code, ProtocolError, RequestError, UnavailableError
from felix.messages import (
    AlterStream,
    AlterSubscription,
    Answer,
    BrokerState,
    CacheTraffic,
    CheckpointAnswer,
    Cosign,
    CreateStream,
    CreateSubscription,
    CrossingExplained,
    DataKeySealed,
    DeleteNamespace,
    DeleteQuota,
    DeleteStream,
    DeleteSubscription,
    DescribeMesh,
    DescribeRegion,
    DescribeStream,
    DescribeSubscription,
    DescribeTraffic,
    DestroyRetiredRoots,
    DocumentPage,
    Done,
    DrainBroker,
    ExpiryState,
    ExplainCrossing,
    GetCheckpoint,
    GetDataKey,
    GetLinkSecret,
    GetStreamStatement,
    KeyPage,
    LinkPage,
    LinkSecretSealed,
    ListDocuments,
    ListKeys,
    ListLinks,
    ListNamespaces,
    ListQuotas,
    ListRights,
    ListStreams,
    ListSubscriptions,
    MeshPage,
    NamespacePage,
    PutCosignature,
    PutDocument,
    PutNamespace,
    PutQuota,
    PutRights,
    QuotaPage,
    QuotaState,
    ReaderTraffic,
    RebalanceShards,
    RecoverShard,
    Redriven,
    RedriveSubscription,
    RegionState,
    ReportLinks,
    Request,
    RetireBroker,
    RightsPage,
    RotateKeys,
    SeekSubscription,
    ShardMoves,
    StopRebalancing,
    StreamPage,
    StreamState,
    StreamStated,
    StreamTraffic,
    SubscriptionPage,
    SubscriptionState,
    TrafficPage,
    Witnessed,
    WitnessedSize,
)
from felix.names import SpiffeId, StreamName
from felix.quota import NO_LIMITS, QuotaLimits
from felix.settings import DEAD_SUFFIX, NO_VIEWS, Retries, Views, altered
from policy.access import Verb, parse_rights
from region.broker import Broker, auto_config
from region.cluster.problems import NOTHING, unreadable
from region.clustered import Clustered
from region.crossing.export import ExportService
from region.governance.service import SYNCED_KINDS, Governance
from region.listing import Listing, fitting
from region.log.store_calls import silence_problems
from region.metadata import records
from region.metadata.catalog import Catalog
from region.metadata.mirror import CatalogMirror
from region.session import overview
from region.session.audience import AUDIENCES, request_name
from region.session.told import told
from region.subscriptions.service import SubscriptionService
from region.views.dead_letter import dead_letter_name

T = TypeVar("T")

IN_FORCE_S: Final = 10.0
EXPIRING_MAX: Final = 50
"""Certificates that `describe_region` names, the nearest end first."""

Handler = Callable[["Requests", SpiffeId, Any], Awaitable[Answer]]


class ViewTraffic(NamedTuple):
    """What goes through views: who reads, one entry for each stream that is read, and what caches hold."""

    readers: Sequence[Callable[[], Iterable[ReaderTraffic]]]
    caches: Callable[[], list[CacheTraffic]]


class Requests:
    """Carries out requests of authenticated sessions."""

    def __init__(
        self,
        broker: Broker,
        governance: Governance,
        export: ExportService,
        catalog: Catalog,
        mirror: CatalogMirror,
        subscriptions: SubscriptionService,
        views: ViewTraffic,
    ) -> None:
        self._broker = broker
        self._governance = governance
        self._export = export
        self._catalog = catalog
        self._mirror = mirror
        self._subscriptions = subscriptions
        self._views = views

    async def answer(self, identity: SpiffeId, request: Request[Any]) -> Answer:
        """Raises what the request's own method raises."""
        handler = _HANDLERS.get(type(request))
        if handler is None:
            raise ProtocolError(f"{type(request).__name__} is not for the control stream.", code=Code.STATE)
        return await handler(self, identity, request)

    # -- streams ---------------------------------------------------------------------------------------

    async def create_stream(self, identity: SpiffeId, request: CreateStream) -> StreamState:
        name = StreamName.parse(request.stream)
        self._broker.refuse_reserved(name.tenant)
        self._broker.require(identity, Verb.ADMIN, name)
        config = records.StreamConfig(
            shards=request.shards,
            durability=request.durability,
            retention=request.retention,
            ring_bytes=request.ring_bytes or records.RING_BYTES_DEFAULT,
            views=request.views,
            replicas=request.replicas,
            min_in_sync=request.min_in_sync,
            acks=request.acks,
        )
        config = self._broker.with_copies(config)
        if request.views.queue is not None:
            self._check_dead_letters(identity, name, request.views.queue.retries, copies=config.replicas)
            config = msgspec.structs.replace(config, dead_letter_by=str(identity))
        made = await self._broker.create_stream(name, config)
        return made.describe(detail=True, fence=self._broker.fence())

    async def alter_stream(self, identity: SpiffeId, request: AlterStream) -> StreamState:
        name = StreamName.parse(request.stream)
        self._broker.require(identity, Verb.ADMIN, name)
        hosted = await self._broker.find_stream(name, Verb.ADMIN)
        self._broker.require_led(hosted)
        if request.incarnation not in (b"", hosted.incarnation):
            raise RequestError(
                f"{name} is another incarnation than the one to be changed.", code=Code.CONFLICT
            )
        changes: dict[str, Any] = {
            part: value for part in _ALTERABLE if (value := getattr(request, part)) is not None
        }
        for part in request.remove:
            if part not in _ALTERABLE or part in changes:
                raise RequestError(
                    f"{part[:40]!r} cannot be taken away" + (" and set at once." if part in changes else "."),
                    hint=f"What can be taken away is {', '.join(_ALTERABLE)}.",
                )
            changes[part] = None

        await self._broker.check_offload(request.offload)
        if request.replicas is not None:
            self._broker.check_copies(name, request.replicas)
            self._broker.check_more_copies(hosted, request.replicas)

        def change(config: records.StreamConfig) -> records.StreamConfig:
            retention = config.retention if request.retention is None else request.retention
            views = msgspec.structs.replace(
                config.views, **changes, **_altered_view(name, config.views, request)
            )
            views.check()
            named_by = config.dead_letter_by
            if request.queue is not None and request.queue.retries is not None and views.queue is not None:
                named = request.queue.retries.dead_letter is not None
                self._check_dead_letters(identity, name, views.queue.retries, may_publish=not named)
                if named:
                    named_by = str(identity)
            for view in hosted.views:
                view.prepare(views)
            former = config.former_cache.ttls
            if config.views.cache and views.cache and config.views.cache.ttl_ms != views.cache.ttl_ms:
                former = (*former, records.FormerTtl(self._broker.streams_ms(), config.views.cache.ttl_ms))
            return msgspec.structs.replace(
                config,
                retention=retention,
                views=views,
                former_cache=records.FormerCache(former),
                dead_letter_by=named_by,
                replicas=config.replicas if request.replicas is None else request.replicas,
                min_in_sync=config.min_in_sync if request.min_in_sync is None else request.min_in_sync,
            )

        before = hosted.record.config
        try:
            record = await self._catalog.alter_stream(name, hosted.record.incarnation, change)
        except BaseException:
            hosted.settle_views()
            raise
        if (before.replicas, before.min_in_sync) != (record.config.replicas, record.config.min_in_sync):
            await self._alter_dead_letters(name, before, record.config)
        altered = await self._broker.streams.open(record)
        return altered.describe(detail=True, fence=self._broker.fence())

    async def _alter_dead_letters(
        self, name: StreamName, before: records.StreamConfig, after: records.StreamConfig
    ) -> None:
        """The stream that the region made for a stream's dead letters has as many copies as that, or it could not go where its leader goes."""
        dead = self._broker.streams.get(StreamName(name.tenant, name.namespace, name.name + DEAD_SUFFIX))
        if dead is None or dead.record.config.replicas != before.replicas:
            return

        def change(config: records.StreamConfig) -> records.StreamConfig:
            return msgspec.structs.replace(config, replicas=after.replicas, min_in_sync=after.min_in_sync)

        await self._broker.streams.open(
            await self._catalog.alter_stream(dead.name, dead.record.incarnation, change)
        )

    def _check_dead_letters(
        self,
        identity: SpiffeId,
        name: StreamName,
        retries: Retries,
        *,
        may_publish: bool = False,
        copies: int = 0,
    ) -> None:
        """Raises RequestError where a queue's dead letters have no place to go, or none that its maker may write to (where that
        is not known: `may_publish`). `copies`: of a queue that is about to be made."""
        try:
            target = dead_letter_name(name, retries)
        except RequestError as error:
            raise RequestError(
                f"The dead letters of {name} need a stream with a valid name: {error.sentence}",
                code=Code.NAME_INVALID,
                hint="Choose a shorter name, or name the stream with --dead-letter.",
            ) from error
        if target == name:
            raise RequestError(f"{name} cannot be its own dead-letter stream.", code=Code.CONFIG_INVALID)
        if retries.dead_letter and not may_publish:
            self._broker.require(identity, Verb.PUBLISH, target)
            self._broker.check_dead_letters(name, target, copies)

    async def delete_stream(self, identity: SpiffeId, request: DeleteStream) -> Done:
        name = StreamName.parse(request.stream)
        self._broker.require(identity, Verb.ADMIN, name)
        hosted = await self._broker.find_stream(name, Verb.ADMIN)
        if request.incarnation and hosted.ephemeral:
            # Each election begins another, which its leader alone knows.
            self._broker.require_led(hosted)
        if request.incarnation not in (b"", hosted.incarnation):
            raise RequestError(
                f"{name} is another incarnation than the one to be deleted.", code=Code.CONFLICT
            )
        deleted = await self._catalog.delete_stream(
            name,
            incarnation=hosted.record.incarnation,
            deleted_ms=self._broker.clock_ms(),
            by=str(identity),
        )
        left = await self._broker.streams.remove(name, deleted.incarnation)
        said = (
            f"{name} is deleted. Its records are not removed from the disk yet, which failed ({left}): that is done by itself once it works."
            if left
            else f"{name} and its records are deleted."
        )
        if self._broker.erasure is not None and not hosted.ephemeral:
            said = f"{said} {await self._broker.erasure.stream_deleted(deleted)}".rstrip()
        return Done(said)

    async def describe_stream(self, identity: SpiffeId, request: DescribeStream) -> StreamState:
        name = StreamName.parse(request.stream)
        self._require_any(identity, name)
        stream = await self._broker.find_stream(name)
        self._broker.require_led(stream)
        return stream.describe(detail=True)

    async def list_streams(self, identity: SpiffeId, request: ListStreams) -> StreamPage:
        seen = (
            stream
            for stream in self._broker.streams.index.listed(request.prefix, request.after)
            if self._sees(identity, stream.name)
        )
        found = list(islice(seen, request.limit + 1))
        fence = self._broker.fence()
        detail = not request.brief
        page = fitting(stream.describe(detail=detail, fence=fence) for stream in found[: request.limit])
        return StreamPage(page, len(page) < len(found))

    def _sees(self, identity: SpiffeId, name: StreamName) -> bool:
        return self._broker.sees(identity, name)

    def _require_any(self, identity: SpiffeId, name: StreamName) -> None:
        if not self._sees(identity, name):
            self._broker.require(identity, Verb.SUBSCRIBE, name)

    # -- rights ----------------------------------------------------------------------------------------

    async def put_rights(self, identity: SpiffeId, request: PutRights) -> Done:
        self._broker.require_operator(identity, "change rights")
        identity = SpiffeId.parse(request.identity)
        if identity.region != self._broker.region:
            raise RequestError(
                f"{identity} is of region {identity.region!r}; rights are given to identities of "
                f"{self._broker.region!r}.",
                code=Code.WRONG_REGION,
            )
        parsed = [right for text in request.rights for right in parse_rights(text)]
        for right in parsed:
            self._broker.refuse_reserved(str(right.pattern).partition("/")[0])
        rights = list(map(str, parsed))
        if rights:
            await self._catalog.set_rights(identity, rights, request.held)
        else:
            await self._catalog.delete_rights(identity, request.held)
        await self._in_force(identity)
        return Done()

    async def _in_force(self, identity: SpiffeId) -> None:
        """Wait until this broker judges by what the catalog now says of the identity."""
        try:
            async with asyncio.timeout(IN_FORCE_S):
                # Another change may have come since: what counts is that the mirror is not behind.
                while True:
                    following = self._mirror.advanced
                    written = sorted(await self._catalog.rights(identity))
                    if sorted(map(str, self._mirror.rights(identity))) == written:
                        return
                    await following.wait()
        except TimeoutError:
            raise UnavailableError(
                f"The rights of {identity} are written, and this broker has not taken them over in {IN_FORCE_S:.0f} s.",
                hint="They take effect by themselves once the metadata store answers again.",
            ) from None

    async def list_rights(self, identity: SpiffeId, request: ListRights) -> RightsPage:
        self._broker.require_operator(identity, "list rights")
        table = await self._catalog.list_rights()
        names = sorted(str(identity) for identity in table if str(identity) > request.after)
        page = fitting((name, list(table[SpiffeId.parse(name)])) for name in names[: request.limit])
        return RightsPage(dict(page), len(names) > len(page))

    # -- namespaces ------------------------------------------------------------------------------------

    async def put_namespace(self, identity: SpiffeId, request: PutNamespace) -> Done:
        self._broker.require_operator(identity, "change namespaces")
        tenant, _, rest = request.namespace.partition("/")
        self._broker.refuse_reserved(tenant)
        request.settings.check()
        config = self._broker.with_copies(auto_config(request.settings, NO_VIEWS))
        records.check_stream_config(StreamName(tenant, rest, "x"), config)
        revision = await self._catalog.put_namespace(request.namespace, request.settings)
        await self._mirror.wait_for(revision)
        return Done()

    async def delete_namespace(self, identity: SpiffeId, request: DeleteNamespace) -> Done:
        self._broker.require_operator(identity, "change namespaces")
        if not await self._catalog.delete_namespace(request.namespace):
            return Done(f"{request.namespace} had no settings.")
        try:
            async with asyncio.timeout(IN_FORCE_S):
                await self._mirror.until(lambda: request.namespace not in self._broker.namespaces)
        except TimeoutError:
            raise UnavailableError(
                "The settings are gone, and this broker has not heard of it yet."
            ) from None
        return Done()

    async def list_namespaces(self, identity: SpiffeId, request: ListNamespaces) -> NamespacePage:
        self._broker.require_operator(identity, "list namespaces")
        held = self._broker.namespaces
        names = sorted(name for name in held if name > request.after)
        page = fitting((name, held[name]) for name in names[: request.limit])
        return NamespacePage(dict(page), len(names) > len(page))

    # -- quotas ----------------------------------------------------------------------------------------

    async def put_quota(self, identity: SpiffeId, request: PutQuota) -> QuotaState:
        self._broker.require_operator(identity, "change quotas")
        holder = self._quota_holder(request.scope, request.name)
        request.limits.check(request.scope)
        written = await self._catalog.change_quota(holder, request.limits, request.unset)
        await self._quota_in_force(request.scope, request.name, written)
        return self._quota_state(request.scope, request.name)

    async def delete_quota(self, identity: SpiffeId, request: DeleteQuota) -> Done:
        self._broker.require_operator(identity, "change quotas")
        if not await self._catalog.delete_quota(self._quota_holder(request.scope, request.name)):
            return Done(f"The {request.scope} {request.name} had no quota of its own.")
        await self._quota_in_force(request.scope, request.name, NO_LIMITS)
        return Done()

    def _quota_holder(self, scope: str, name: str) -> str | SpiffeId:
        """Raises RequestError where it is neither a tenant, nor an identity of this region or a bridge of another."""
        if scope == "tenant":
            return name
        if scope != "identity":
            raise RequestError(f"A quota is of a tenant or of an identity, not of a {scope[:40]!r}.")
        found = SpiffeId.parse(name)
        if found.region != self._broker.region and found.kind != "bridge":
            raise RequestError(
                f"{found} is of region {found.region!r}, of which only bridges come in here.",
                code=Code.WRONG_REGION,
                hint=f"Give quotas to identities of {self._broker.region} and to bridges of other regions.",
            )
        return found

    async def _quota_in_force(self, scope: str, name: str, written: QuotaLimits) -> None:
        try:
            async with asyncio.timeout(IN_FORCE_S):
                # Another change may have come since: what counts is that this broker is not behind.
                revision = self._mirror.revision
                await self._mirror.until(
                    lambda: (
                        self._broker.quotas.own_limits(scope, name) == written  # type: ignore[arg-type]
                        or self._mirror.revision > revision + 1
                    )
                )
        except TimeoutError:
            raise UnavailableError(
                f"The quota of {name} is written, and this broker has not taken it over in {IN_FORCE_S:.0f} s.",
                hint="It takes effect by itself once the metadata store answers again.",
            ) from None

    async def list_quotas(self, identity: SpiffeId, request: ListQuotas) -> QuotaPage:
        """Everything is an operator's to see; an identity may ask for its own."""
        if (request.scope, request.name) != ("identity", str(identity)):
            self._broker.require_operator(identity, "list the quotas of others")
        quotas = self._broker.quotas
        if request.scope and request.name:
            self._quota_holder(request.scope, request.name)
            return QuotaPage([self._quota_state(request.scope, request.name)])
        names = [
            (scope, name)
            for scope, name in quotas.known()
            if request.scope in ("", scope) and request.name in ("", name)
        ]
        # Tenants first.
        listing = _listing(request, names, lambda each: f"{each[0] != 'tenant':d} {each[1]}")
        return QuotaPage(*listing.page(self._quota_state(*each) for each in listing.entries))

    def _quota_state(self, scope: str, name: str) -> QuotaState:
        quotas = self._broker.quotas
        own, counts = quotas.own_limits(scope, name), quotas.limits(scope, name)  # type: ignore[arg-type]
        account = quotas.find(scope, name)  # type: ignore[arg-type]
        if account is None:
            return QuotaState(scope, name, own, counts)
        used, throttled = quotas.used(account), quotas.throttled_ms(account)
        if scope == "tenant":
            streams = self._broker.streams.index.count(name)
            used |= {"streams": streams} if streams else {}
        return QuotaState(scope, name, own, counts, used, throttled, dict(account.refused))

    # -- signed documents, audit -----------------------------------------------------------------------

    async def put_document(self, identity: SpiffeId, request: PutDocument) -> Done:
        if identity.kind != "bridge" or request.kind not in SYNCED_KINDS:
            self._broker.require_operator(identity, f"put a {request.kind} document")
        return Done(await self._governance.put(identity, request.kind, request.body))

    async def list_documents(self, identity: SpiffeId, request: ListDocuments) -> DocumentPage:
        return await self._governance.list_documents(identity, request)

    async def cosign(self, identity: SpiffeId, request: Cosign) -> Witnessed:
        self._require_witnessing(identity)
        return await self._governance.witnessing.cosign(identity, request.checkpoint, request.proof)

    async def witnessed_size(self, identity: SpiffeId, request: WitnessedSize) -> Witnessed:
        self._require_witnessing(identity)
        return await self._governance.witnessing.witnessed_size(request.origin)

    async def get_checkpoint(self, identity: SpiffeId, request: GetCheckpoint) -> CheckpointAnswer:
        self._require_witnessing(identity)
        return await self._governance.witnessing.checkpoint(identity, request.from_size, request.leaf)

    async def put_cosignature(self, identity: SpiffeId, request: PutCosignature) -> Done:
        self._require_witnessing(identity)
        await self._governance.witnessing.put_cosignature(identity, request.cosigned)
        return Done()

    def _require_witnessing(self, identity: SpiffeId) -> None:
        """Checkpoints and cosignatures go between regions over bridges, or by an operator's hand."""
        if identity.kind != "bridge":
            self._broker.require_operator(identity, "ask for checkpoints and cosignatures")

    # -- keys ------------------------------------------------------------------------------------------

    async def list_keys(self, identity: SpiffeId, request: ListKeys) -> KeyPage:
        self._broker.require_operator(identity, "list keys")
        keys = await self._governance.keys.list(request.stream)
        if self._broker.erasure is not None:
            destroyed = self._broker.erasure.shown(request.stream)
            gone = {key.id for key in destroyed}
            keys = [*(key for key in keys if key.id not in gone), *destroyed]
        listing = _listing(
            request, keys, lambda key: f"{_LEVELS.index(key.level)} {key.created_ms:015} {key.id.hex()}"
        )
        return KeyPage(*listing.page(listing.entries))

    async def drain_broker(self, identity: SpiffeId, request: DrainBroker) -> Done:
        self._broker.require_operator(identity, "drain brokers")
        several = self._several()

        def require_room() -> None:
            if request.drain and not request.partly:
                several.require_room(
                    [stream.record for stream in self._broker.streams], request.broker, request.beside
                )

        await several.drain(request.broker, on=request.drain, require=require_room)
        return Done()

    async def retire_broker(self, identity: SpiffeId, request: RetireBroker) -> Done:
        self._broker.require_operator(identity, "retire brokers")
        await self._several().retire(request.broker)
        return Done()

    async def recover_shard(self, identity: SpiffeId, request: RecoverShard) -> Done:
        self._broker.require_operator(identity, "recover shards")
        several = self._several()
        hosted = await self._broker.find_stream(StreamName.parse(request.stream), Verb.ADMIN)
        note = await several.recover(
            hosted.record,
            request.shard,
            request.broker,
            request.lost,
            powered_off=request.powered_off,
            by=str(identity),
        )
        return Done(note)

    async def rebalance_shards(self, identity: SpiffeId, request: RebalanceShards) -> ShardMoves:
        self._broker.require_operator(identity, "move copies")
        return await self._several().rebalance(dry_run=request.dry_run, since=request.since, by=str(identity))

    async def stop_rebalancing(self, identity: SpiffeId, request: StopRebalancing) -> ShardMoves:
        self._broker.require_operator(identity, "move copies")
        return await self._several().stop_rebalancing(since=request.since, by=str(identity))

    def _several(self) -> Clustered:
        """Raises RequestError(UNSUPPORTED) where the region has one broker."""
        if self._broker.clustered is None:
            raise RequestError(
                f"{self._broker.region} has one broker, so there is nothing to move.",
                code=Code.UNSUPPORTED,
                hint="Several brokers are docs/clusters.md.",
            )
        return self._broker.clustered

    async def rotate_keys(self, identity: SpiffeId, request: RotateKeys) -> Done:
        self._broker.require_operator(identity, "rotate keys")
        return Done(await self._governance.keys.rotate(identity, request.level, request.stream))

    async def destroy_retired_roots(self, identity: SpiffeId, request: DestroyRetiredRoots) -> Done:
        self._broker.require_operator(identity, "destroy keys")
        erasure = self._broker.erasure
        assert erasure is not None
        return Done(await erasure.destroy_retired_roots(str(identity)))

    # -- region and links ------------------------------------------------------------------------------

    async def describe_region(self, identity: SpiffeId, request: DescribeRegion) -> RegionState:
        broker = self._broker
        broker.require_observer(identity, "describe the region")
        origin, size = self._governance.audit_state()
        gauges = broker.gauges() | self._governance.witnessing.gauges()
        several = broker.clustered
        if several is not None and several.replicas is not None:
            gauges |= several.replicas.gauges()
        found, bridges, brokers = NOTHING, broker.bridges(), list[BrokerState]()
        own_files = [] if broker.own_files is None else broker.own_files.problems()
        if several is not None:
            records = [stream.record for stream in broker.streams]
            # Each asks the other brokers, and waits for those that do not answer.
            found, bridges, brokers = await asyncio.gather(
                several.hear_problems(records), several.bridges(bridges), several.states(records)
            )
        return RegionState(
            broker.region, broker.mesh, broker.broker_id, broker.started_ms, gauges, origin, size,
            [
                ExpiryState(each.name, each.kind, each.life.not_after_ms, each.stage.name.lower())
                for each in broker.expiries.expiring(broker.clock_ms(), EXPIRING_MAX)
            ],
            bridges,
            brokers,
            # Each has room of its own: of either there may be very many.
            [
                *told([*found.problems, *own_files, *silence_problems(), *broker.streams.disks.problems(), *unreadable(self._mirror.faults)]),
                *told(self._governance.problems),
            ],
            0 if several is None else broker.default_replicas,
            0 if several is None else several.moving,
            told(found.remarks),
        )  # fmt: skip

    async def describe_traffic(self, identity: SpiffeId, request: DescribeTraffic) -> TrafficPage:
        broker = self._broker
        broker.require_observer(identity, "see the region's traffic")
        found: list[StreamTraffic] | list[ReaderTraffic] | list[CacheTraffic]
        if request.what == "streams":
            found = [stream.traffic() for stream in broker.streams]
        elif request.what == "readers":
            found = [*broker.traffic(), *(each for readers in self._views.readers for each in readers())]
            # In an order that stays while nobody comes or goes.
            found.sort(key=lambda each: (each.stream, each.kind, each.name))
        elif request.what == "caches":
            found = self._views.caches()
        else:
            raise RequestError(f"Traffic is of streams, readers or caches, not of {request.what[:40]!r}.")
        chosen = [
            each
            for each in found
            if each.stream.startswith(request.prefix) and broker.observes(identity, each.stream)
        ]
        listing = _listing(request, chosen, _traffic_name)
        page, more, following = listing.page(listing.entries)
        return TrafficPage(
            broker.clock_ms(),
            [each for each in page if isinstance(each, StreamTraffic)],
            [each for each in page if isinstance(each, ReaderTraffic)],
            [each for each in page if isinstance(each, CacheTraffic)],
            more,
            following,
        )

    async def describe_mesh(self, identity: SpiffeId, request: DescribeMesh) -> MeshPage:
        broker, governance = self._broker, self._governance
        broker.require_observer(identity, "see the mesh")
        if request.what == "regions":
            regions = _listing(request, governance.bundles.values(), lambda bundle: bundle.region)
            page, more, following = regions.page(map(overview.known_region, regions.entries))
            return MeshPage(regions=page, more=more, next=following)
        if request.what == "grants":
            summaries = map(overview.grant_summary, governance.book.list(broker.clock_ms()))
            seen = (each for each in summaries if broker.observes(identity, each.stream))
            grants = _listing(request, seen, lambda each: each.grant)
            held, more, following = grants.page(grants.entries)
            return MeshPage(grants=held, more=more, next=following)
        if request.what == "denials":
            entries = (each for each in governance.book.denies() if broker.observes(identity, each.streams))
            denials = _listing(request, entries, lambda each: f"{each.streams} {each.region} {each.peer}")
            standing, more, following = denials.page(map(overview.denial, denials.entries))
            return MeshPage(denials=standing, more=more, next=following)
        if request.what != "logs":
            raise RequestError(
                f"A mesh has regions, grants, denials and logs, not {request.what[:40]!r}.",
            )
        witness = governance.witnessing.witness
        # The own one first, which has no name here.
        logs = _listing(request, ["", *witness.origins], lambda origin: f"log {origin}")
        own = [overview.own_log(governance.trail)] if "" in logs.entries else []
        cosigned = await asyncio.to_thread(
            overview.cosigned_logs, witness, [each for each in logs.entries if each]
        )
        shown, more, following = logs.page([*own, *cosigned])
        return MeshPage(logs=shown, more=more, next=following)

    async def explain_crossing(self, identity: SpiffeId, request: ExplainCrossing) -> CrossingExplained:
        self._broker.require_observer(identity, "ask what may cross")
        stream = StreamName.parse(request.stream)
        if not self._broker.observes(identity, str(stream)):
            raise RequestError(
                f"{identity} may not observe {stream}.",
                code=Code.FORBIDDEN,
                hint="This takes the right to observe it, or an operator's identity of this region.",
            )
        return overview.crossing_explained(
            self._governance.explain(stream, request.source, request.destination)
        )

    async def report_links(self, identity: SpiffeId, request: ReportLinks) -> Done:
        self._export.report(identity, request.links)
        return Done()

    async def list_links(self, identity: SpiffeId, request: ListLinks) -> LinkPage:
        self._broker.require_observer(identity, "list links")
        links = [link for link in self._export.links() if self._broker.observes(identity, link.stream)]
        listing = _listing(request, links, lambda each: f"{each.grant} {each.stream} {each.shard:09}")
        return LinkPage(*listing.page(listing.entries))

    async def get_link_secret(self, identity: SpiffeId, request: GetLinkSecret) -> LinkSecretSealed:
        return await self._export.link_secret(identity, request)

    async def get_stream_statement(self, identity: SpiffeId, request: GetStreamStatement) -> StreamStated:
        return await self._export.stream_statement(identity, request)

    async def get_data_key(self, identity: SpiffeId, request: GetDataKey) -> DataKeySealed:
        return await self._export.data_key(identity, request)

    # -- durable subscriptions -------------------------------------------------------------------------

    async def create_subscription(self, identity: SpiffeId, request: CreateSubscription) -> SubscriptionState:
        return await self._subscriptions.create(identity, request)

    async def alter_subscription(self, identity: SpiffeId, request: AlterSubscription) -> SubscriptionState:
        return await self._subscriptions.alter(identity, request)

    async def describe_subscription(
        self, identity: SpiffeId, request: DescribeSubscription
    ) -> SubscriptionState:
        return await self._subscriptions.describe(identity, request)

    async def list_subscriptions(self, identity: SpiffeId, request: ListSubscriptions) -> SubscriptionPage:
        page = await self._subscriptions.page(identity, request)
        held = fitting(page.subscriptions)
        return SubscriptionPage(held, page.more or len(held) < len(page.subscriptions))

    async def seek_subscription(self, identity: SpiffeId, request: SeekSubscription) -> Done:
        return await self._subscriptions.seek(identity, request)

    async def redrive_subscription(self, identity: SpiffeId, request: RedriveSubscription) -> Redriven:
        return await self._subscriptions.redrive(identity, request)

    async def delete_subscription(self, identity: SpiffeId, request: DeleteSubscription) -> Done:
        return await self._subscriptions.delete(identity, request)


def _listing(
    request: ListQuotas | ListKeys | DescribeTraffic | DescribeMesh | ListLinks,
    entries: Iterable[T],
    name: Callable[[T], str],
) -> Listing[T]:
    return Listing(entries, name, after=request.after, limit=request.limit, skip=request.skip)


def _traffic_name(each: StreamTraffic | ReaderTraffic | CacheTraffic) -> str:
    if isinstance(each, ReaderTraffic):
        return f"{each.stream} {each.kind} {each.name} {each.identity}"
    return each.stream


_LEVELS: Final = ("root", "stream", "data")
"""Keys are listed from the top, the oldest first."""
_ALTERABLE: Final = ("compaction", "deduplication", "offload")


def _altered_view(name: StreamName, views: Views, request: AlterStream) -> dict[str, Any]:
    """The queue or cache as it is to be. Raises RequestError(UNSUPPORTED) for a stream that is none."""
    found: dict[str, Any] = {}
    for part, old, change in (
        ("queue", views.queue, request.queue),
        ("cache", views.cache, request.cache),
    ):
        if change is None:
            continue
        if old is None:
            raise RequestError(
                f"{name} is no {part}.",
                code=Code.UNSUPPORTED,
                hint="What a stream is is decided when it is created.",
            )
        found[part] = altered(old, change)
    return found


_HANDLERS: Final[Mapping[type, Handler]] = {
    request: getattr(Requests, request_name(request))
    for request in AUDIENCES
    if hasattr(Requests, request_name(request))
}
"""A request is carried out by the method that has its name on the wire; the others are a session's own, or open an exchange."""
