"""The state and decisions of one broker: access rights, hosted streams, and the audit entries about them.

Sessions ask it; `region.startup` feeds it. It owns no socket and no thread. Metadata is asked through the catalog's
mirror, in memory, so a changed right or grant takes effect with the change, and no decision waits for a store.

Invariants: every answer about a stream that the asker has no right to is the same as for one that does not
exist; nothing here leads to another region: there is no address of one in this process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NoReturn

import msgspec

from felix.errors import Code, FelixError, NotLeaderError, RequestError, UnavailableError
from felix.expiry import ExpiryWatch, Life
from felix.messages import ReaderTraffic
from felix.names import RESERVED_TENANT, NamePattern, SpiffeId, StreamName
from felix.peer import Peer
from felix.quota import QuotaLimits, Scope
from felix.runtime.port import Clock, Runtime
from felix.runtime.real import REAL
from felix.settings import NO_VIEWS, Durability, NamespaceSettings, Offload, Retention, Views
from felix.transport.port import TransportLimits
from policy.access import Rights, Verb, not_found_or_forbidden
from policy.pattern import covers
from region.clustered import Clustered
from region.config import RegionConfig
from region.limits.budget import Budgets
from region.limits.quota import Account, Quotas
from region.metadata.catalog import Catalog, StreamsFullError
from region.metadata.records import StreamConfig, check_stream_config, is_replicated, one_copy_since
from region.metrics import BrokerMetrics
from region.own_files import OwnFiles
from region.ports import LiveSession
from region.scheduler import FairScheduler, Gate
from region.streams.erasure import Erasure
from region.streams.hosted import HostedStream
from region.streams.offload import check_offload
from region.streams.places import places_of, refusal
from region.streams.table import StreamTable
from region.tracing import AppendTracing

log = logging.getLogger("felix.region")

READ_BYTES_MAX: Final = 1 << 20
"""Read from disk and sent at a time: long enough to be worth a call, short enough that subscriptions take turns."""
READS_MAX: Final = 8
"""Such reads at once: twice as many as there are threads for them, so that none waits for the loop. More would only queue in
front of the threads, where tenants are not served in turn.
"""
DELIVERY_WAIT_S: Final = 0.02
"""How long delivery that found the budget used up waits before it looks again."""

MADE_AGAIN_MS: Final = 20
"""A stream that is being made is there by then, as a rule."""
MAKING_MAX: Final = 1_000
"""Streams that are made or looked up at once for who uses them: more only where the metadata store does not answer, and each is a task."""
NOT_MADE_MAX: Final = 1_000
"""Reasons kept for who asks again, why a stream could not be made."""
OF_THE_LOG: Final = frozenset((Code.SEQUENCE_GAP, Code.OFFSET_MISMATCH, Code.PRODUCER_FENCED))
"""Refusals that say what stands in a log, or does not. A client that is told of a gap numbers anew what it has not been told of: told so by a broker that was
the leader once, it would put that into the next leader's log a second time."""
ALL_RIGHTS: Final = tuple(f"{verb} */*/*" for verb in Verb)
"""Rights of an operator that the configuration names."""


def auto_config(settings: NamespaceSettings, views: Views) -> StreamConfig:
    """Settings of a stream that its first use creates."""
    return StreamConfig(
        shards=settings.shards,
        durability=Durability(settings.durability, settings.interval_ms),
        retention=Retention(settings.retention_ms, settings.retention_bytes),
        views=views,
        replicas=0,
    )


class Broker:
    """Shared by all sessions of one broker process."""

    def __init__(
        self,
        config: RegionConfig,
        *,
        streams: StreamTable,
        catalog: Catalog,
        budgets: Budgets,
        transport_limits: TransportLimits,
        runtime: Runtime = REAL,
        clustered: Clustered | None = None,
        streams_clock: Clock | None = None,
    ) -> None:
        """`streams_clock`: what streams go by, where that is not the runtime's (region.cluster.clocks). `clustered`: its place among several brokers; None where it is the only one."""
        self.clustered = clustered
        self.erasure: Erasure | None = None
        self.own_files: OwnFiles | None = None
        """what destroys keys; of a broker that is open"""
        self.config = config
        self.region, self.mesh, self.broker_id = config.region, config.mesh, config.broker
        self.streams = streams
        self.catalog = catalog
        self.transport_limits = transport_limits
        self.runtime = runtime
        self.clock_ms = runtime.clock.now_ms
        self.boot_ms = runtime.clock.boot_ms
        self._streams_clock = streams_clock
        self.started_ms = self.clock_ms()
        self.metrics = BrokerMetrics()
        self.expiries = ExpiryWatch()
        """Certificates that sessions presented, and the broker's own."""
        self.budgets = budgets
        self.budgets.limit(config.limits.budgets)
        self.quotas = Quotas(
            runtime.clock.monotonic,
            config.quotas.tenant.limits,
            config.quotas.identity.limits,
            [str(SpiffeId(self.region, self.mesh, "operator", name)) for name in config.operators],
        )
        self.share_quotas: Callable[[], None] = lambda: None
        """of one of several brokers: tell the others what was measured (region.quota_exchange)"""
        self.sessions: set[LiveSession] = set()
        self.turns = FairScheduler(lambda go_on: asyncio.get_running_loop().call_soon(go_on))
        self.reads = Gate(
            READS_MAX,
            lambda: budgets.catch_up.take(READ_BYTES_MAX),
            lambda: budgets.catch_up.give(READ_BYTES_MAX),
        )
        self.leaving = False
        self._waiting: set[LiveSession] = set()
        self.namespaces: dict[str, NamespaceSettings] = {}
        self._making: dict[StreamName, asyncio.Task[None]] = {}
        self._not_made: dict[StreamName, FelixError] = {}
        self._retry: asyncio.TimerHandle | None = None
        self.tracing = AppendTracing(config.region) if config.tracing.exporter != "none" else None
        self._operators = frozenset(
            SpiffeId(self.region, self.mesh, "operator", name) for name in config.operators
        )
        self._operator_rights = Rights.decode({str(operator): ALL_RIGHTS for operator in self._operators})
        self._rights = Rights()
        streams.on_change(self._stream_changed)

    # -- sessions and rights ---------------------------------------------------------------------------

    def admit(self, session: LiveSession, peer: Peer) -> None:
        """Room for one more session, or a refusal with when to try again."""
        if self.leaving:
            raise UnavailableError(
                f"Broker {self.broker_id} is shutting down.", code=Code.SHUTTING_DOWN, retry_after_ms=1000
            )
        identity = peer.spiffe_id
        places = places_of(self.config.limits.sessions)
        quota = self.quotas.own_limits("identity", str(identity)).sessions

        def ask(without: LiveSession | None = None) -> str:
            held = [
                each.identity
                for each in self.sessions
                if each is not without and not each.ended and each.identity is not None
            ]
            is_operator = self.is_operator(identity)
            return refusal(places, self.region, held, identity, is_operator=is_operator, quota=quota)

        why = ask()
        if why and quota is None and (stale := self._longest_silent(identity)) is not None:
            why = ask(without=stale)
            if not why:
                stale.superseded()
        if why:
            raise UnavailableError(
                f"Broker {self.broker_id} {why}.",
                code=Code.LIMIT_SESSIONS,
                hint="End other sessions first, or have the limit raised: limits.sessions, felix quota set.",
                retry_after_ms=5000,
            )
        self.metrics.authenticated += 1
        kind = identity.kind if identity.region == self.region else f"foreign {identity.kind}"
        self.expiries.see(str(identity), kind, Life(peer.not_before_ms, peer.not_after_ms))

    def _longest_silent(self, identity: SpiffeId) -> LiveSession | None:
        """The session that a bridge of another region gives up for a new one: of its own, that which was silent longest.

        An agent that was killed says no goodbye, and its session stays until the idle timeout; one that is killed again and
        again would otherwise find every place of its identity taken by its own dead."""
        if identity.region == self.region:
            return None
        own = (each for each in self.sessions if each.identity == identity and not each.ended)
        return min(own, key=lambda each: each.heard_at, default=None)

    def session_closed(self, session: LiveSession) -> None:
        self.sessions.discard(session)
        self._waiting.discard(session)

    def _stream_changed(self, stream: HostedStream) -> None:
        if stream.deleted or stream.ceased:
            self.recheck_sessions()

    def set_rights(self, table: dict[str, list[str]]) -> None:
        """The region's rights have changed: sessions end what is no longer allowed."""
        self._rights = Rights.decode(table)
        self.recheck_sessions()

    def recheck_sessions(self) -> None:
        """Rights, grants or streams changed: every session looks at what it has open. One that cannot say what it still may do is ended."""
        for session in list(self.sessions):
            if session.identity is not None:
                try:
                    session.rights_changed()
                except Exception as error:
                    # Those after it in the set must hear of a revocation, too.
                    log.exception("the rights of %s could not be looked at", session.identity)
                    session.fail(
                        FelixError(f"The broker failed: {type(error).__name__}.", code=Code.INTERNAL)
                    )

    def set_quotas(self, own: Mapping[tuple[Scope, str], QuotaLimits]) -> None:
        """Limits have changed; they count at once."""
        self.quotas.set_limits(dict(own))
        for session in list(self.sessions):
            if session.identity is not None:
                session.quotas_changed()

    def shares_rose(self, accounts: Sequence[Account]) -> None:
        """Of one of several brokers: it may let through more of these accounts' rates than it could."""
        if not accounts:
            return
        rose = frozenset(accounts)
        for session in list(self.sessions):
            if session.is_charged_to(rose):
                session.quotas_changed()

    def sees(self, identity: SpiffeId, name: StreamName) -> bool:
        """True where some right lets the identity know of the stream."""
        return any(
            self.allows(identity, verb, name)
            for verb in (Verb.SUBSCRIBE, Verb.PUBLISH, Verb.ADMIN, Verb.BRIDGE_READ)
        )

    def rights_of(self, identity: SpiffeId) -> list[str]:
        """The identity's rights as text, sorted."""
        rights = (*self._rights.of(identity), *self._operator_rights.of(identity))
        return sorted({str(right) for right in rights})

    def has_right(self, identity: SpiffeId) -> bool:
        """True where the identity has some right in this region, whatever it is."""
        if identity.region != self.region:
            return False
        return bool(self._rights.of(identity) or self._operator_rights.of(identity))

    def allows(self, identity: SpiffeId, verb: Verb, name: StreamName) -> bool:
        """True if a right allows it. An identity of another region has no rights, and no identity has rights to Felix's own
        streams.
        """
        if identity.region != self.region or name.tenant == RESERVED_TENANT:
            return False
        return self._rights.allows(identity, verb, name) or self._operator_rights.allows(identity, verb, name)

    def refuse_reserved(self, tenant: str) -> None:
        """Raises RequestError(FORBIDDEN) for the tenant whose streams are Felix's own."""
        if tenant == RESERVED_TENANT:
            raise RequestError(
                f"The tenant {RESERVED_TENANT!r} is reserved: its streams are the broker's own.",
                code=Code.FORBIDDEN,
                hint="Use another tenant.",
            )

    def require(self, identity: SpiffeId, verb: Verb, name: StreamName, what: str = "stream") -> None:
        """Raises RequestError(NOT_FOUND_OR_FORBIDDEN), the same for no right and for no stream."""
        if not self.allows(identity, verb, name):
            raise not_found_or_forbidden(verb, name, what)

    def is_operator(self, identity: SpiffeId) -> bool:
        """True for those whom the configuration names, and for those of this region who have the right to operate."""
        if identity in self._operators:
            return True
        return identity.region == self.region and any(
            right.verb is Verb.OPERATE for right in self._rights.of(identity)
        )

    def require_operator(self, identity: SpiffeId, what: str) -> None:
        """Raises RequestError(FORBIDDEN) for anyone but an operator with the right to operate."""
        if self.is_operator(identity):
            return
        raise RequestError(
            f"{identity} may not {what}.",
            code=Code.FORBIDDEN,
            hint="This takes an operator's identity of this region.",
        )

    def require_observer(self, identity: SpiffeId, what: str) -> None:
        """Raises RequestError(FORBIDDEN) for anyone but an operator, or an identity of this region with some right to observe."""
        if identity.region == self.region and any(
            right.verb is Verb.OBSERVE for right in self._rights.of(identity)
        ):
            return
        if not self.is_operator(identity):
            raise RequestError(
                f"{identity} may not {what}.",
                code=Code.FORBIDDEN,
                hint="This takes the right to observe, or an operator's identity of this region.",
            )

    def observes(self, identity: SpiffeId, streams: str) -> bool:
        """True where the identity may see what goes on with these streams, a name or a pattern: all to an operator, else what one of
        its rights to observe covers as a whole."""
        if self.is_operator(identity):
            return True
        wanted = NamePattern(streams)
        return identity.region == self.region and any(
            right.verb is Verb.OBSERVE and covers(right.pattern, wanted)
            for right in self._rights.of(identity)
        )

    # -- streams ---------------------------------------------------------------------------------------

    def stream(self, name: StreamName, verb: Verb = Verb.SUBSCRIBE) -> HostedStream:
        """The stream by name; for askers whose right has been checked. Raises as `require` does."""
        stream = self.streams.get(name)
        if stream is None:
            raise not_found_or_forbidden(verb, name)
        return stream

    def fence(self) -> FelixError | None:
        """Why this broker may not answer now for what its logs hold: another one may lead them. None where it may."""
        return None if self.clustered is None else self.clustered.member.refusal()

    def refusal_of_append(self, error: FelixError) -> FelixError:
        """What a client is told whose append a log refused: where that speaks of the log, `fence` comes first."""
        return (self.fence() or error) if error.code in OF_THE_LOG else error

    def require_led(self, stream: HostedStream, *, commits: bool = False) -> None:
        """Raises NotLeaderError where this broker may not answer for the stream: another leads it, or may. `commits`: what is answered rests
        on commits alone, where the stream has copies."""
        if stream.elsewhere is not None:
            raise stream.elsewhere
        error = None if commits and stream.rests_on_commits else self.fence()
        if error is not None:
            raise NotLeaderError(
                error.sentence, hint=error.hint, retry_after_ms=error.retry_after_ms, stream=stream.text
            )

    def kept_elsewhere(self, name: StreamName) -> str:
        """The other broker that has a stream's records; empty where this one has them, or nobody yet."""
        stream = self.streams.get(name)
        if self.clustered is None or stream is None:
            return ""
        keeper = self.clustered.placed_on(stream.record)
        return "" if keeper == self.broker_id else keeper

    def why_apart(self, source: StreamName, target: StreamName) -> str:
        """Why what this broker leads of `source` cannot go into `target`, now and after the next election: the two are not on the same
        brokers. Empty where they are, or where one of them does not exist."""
        held, other = self.streams.get(source), self.streams.get(target)
        if self.clustered is None or held is None or other is None:
            return ""
        if is_replicated(held.record.config) and is_replicated(other.record.config):
            places, others = self.clustered.replicas_of(held.record), self.clustered.replicas_of(other.record)
            return "" if places == others else f"{target} has its copies on {', '.join(sorted(others))}"
        if is_replicated(held.record.config) or is_replicated(other.record.config):
            return _copies_differ(target, held.record.config.replicas, other.record.config.replicas)
        keeper = self.kept_elsewhere(target)
        return f"{target} is on {keeper}" if keeper else ""

    def check_dead_letters(self, source: StreamName, target: StreamName, copies: int = 0) -> None:
        """Raises RequestError(UNSUPPORTED) where dead letters of one that is led here, or is to be made with so many copies, cannot go
        into a stream that is there."""
        other, why = self.streams.get(target), ""
        if self.streams.get(source) is not None:
            why = "" if self.kept_elsewhere(source) else self.why_apart(source, target)
        elif self.clustered is not None and other is not None and other.record.config.replicas != copies:
            why = _copies_differ(target, copies, other.record.config.replicas)
        if why:
            raise RequestError(
                f"Dead letters of {source} stay on the broker that leads it, {self.broker_id}, and {why}.",
                code=Code.UNSUPPORTED,
                hint="Name a stream that does not exist yet, or none: it is placed beside its source.",
            )

    def set_namespaces(self, settings: Mapping[str, NamespaceSettings]) -> None:
        """Settings of namespaces have changed; they count at once."""
        self.namespaces = dict(settings)

    def use_stream(
        self, name: StreamName, verb: Verb = Verb.SUBSCRIBE, views: Views = NO_VIEWS
    ) -> HostedStream:
        """The stream by name, for askers whose right has been checked and who are about to use it.

        If it does not exist and its namespace creates streams on first use, its creation begins: raises UnavailableError, to be
        retried at once. Otherwise raises as `stream` does, and the reason why it could not be created.
        """
        held = self.streams.get(name)
        if held is not None:
            return held
        namespace = f"{name.tenant}/{name.namespace}"
        settings = self.namespaces.get(namespace)
        failed = self._not_made.pop(name, None)
        if failed is not None:
            raise failed
        if len(self._making) >= MAKING_MAX and name not in self._making:
            raise UnavailableError(
                f"{MAKING_MAX} streams are being made or looked up, the most at once.",
                retry_after_ms=10 * MADE_AGAIN_MS,
            )
        is_made = settings is not None and settings.auto_create and name.tenant != RESERVED_TENANT
        if not is_made:
            what = "stream" if views is NO_VIEWS else "cache" if views.cache is not None else "queue"
            error = not_found_or_forbidden(verb, name, what)
            self._look_up_or_raise(name, error)
        assert settings is not None
        if name not in self._making:
            # Those of others, and names that are being looked up, are not of this namespace.
            there = self.streams.index.count(name.tenant, name.namespace) + sum(
                (each.tenant, each.namespace) == (name.tenant, name.namespace)
                for each in self._making
                if self.streams.get(each) is None
            )
            if there >= settings.streams_max:
                self._look_up_or_raise(name, _namespace_full(namespace, there, settings.streams_max))
            task = asyncio.ensure_future(self._make(name, settings, views))
            self._making[name] = task
        raise UnavailableError(
            f"{name} is being made by its first use.", code=Code.UNAVAILABLE, retry_after_ms=MADE_AGAIN_MS
        )

    def _look_up_or_raise(self, name: StreamName, missing: FelixError) -> NoReturn:
        """For a stream that is not here: `missing`, once the catalog has none of its name either, where other brokers may have made it a moment ago. Whoever made it
        leads its client here before it is heard of here."""
        if self.clustered is None:
            raise missing
        if name not in self._making:
            self._making[name] = asyncio.ensure_future(self._look_up(name, missing))
        raise UnavailableError(
            f"Whether another broker has made {name} is being looked up.", retry_after_ms=MADE_AGAIN_MS
        )

    async def find_stream(self, name: StreamName, verb: Verb = Verb.SUBSCRIBE) -> HostedStream:
        """As `stream`; of several brokers one looks into the catalog itself: another may have made the stream a moment ago."""
        if self.clustered is not None and self.streams.get(name) is None:
            with suppress(RequestError):
                await self.streams.open(await self.catalog.describe_stream(name))
        return self.stream(name, verb)

    async def find_to_use(self, name: StreamName) -> HostedStream:
        """As `use_stream`, for who can wait for a look into the catalog."""
        with suppress(RequestError):
            await self.find_stream(name)
        return self.use_stream(name)

    async def _look_up(self, name: StreamName, missing: FelixError) -> None:
        try:
            await self.find_stream(name)
        except RequestError:
            self._refused_making(name, missing)
        except FelixError as error:
            self._refused_making(name, error)
        finally:
            self._making.pop(name, None)

    def _refused_making(self, name: StreamName, error: FelixError) -> None:
        if len(self._not_made) >= NOT_MADE_MAX:
            self._not_made.clear()
        self._not_made[name] = error

    async def _make(self, name: StreamName, settings: NamespaceSettings, views: Views) -> None:
        try:
            await self.ensure_stream(
                name, auto_config(settings, views), in_namespace_max=settings.streams_max
            )
            log.info("stream %s was made by its first use", name)
        except FelixError as error:
            self._refused_making(name, error)
        finally:
            self._making.pop(name, None)

    def streams_ms(self) -> int:
        """The wall clock that streams go by, and the jobs, values and subscriptions that live with them."""
        return self.clock_ms() if self._streams_clock is None else self._streams_clock.now_ms()

    async def create_stream(
        self, name: StreamName, config: StreamConfig, *, in_namespace_max: int = 0
    ) -> HostedStream:
        """Write a new stream into the catalog and open it; `config.replicas` 0: as many copies as the region has it. `in_namespace_max`: how many streams its
        namespace may have; 0: any number. Raises
        RequestError(ALREADY_EXISTS, CONFIG_INVALID), UnavailableError(LIMIT_MEMORY, LIMIT_STREAMS)."""
        # Asked before anything is written: the catalog must not name a stream that cannot be opened.
        config = self.with_copies(config)
        check_stream_config(name, config)
        self.check_copies(name, config.replicas)
        await self.check_offload(config.views.offload)
        self.streams.check_room(name, config)
        self.quotas.check_stream(name.tenant, self.streams.index.count(name.tenant))
        self.quotas.creating(name.tenant, 1)
        try:
            record = await self.catalog.create_stream(
                name,
                config,
                incarnation=self.runtime.random.randbytes(16),
                created_ms=self.clock_ms(),
                most=self._streams_max(name, in_namespace_max),
            )
            stream = await self.streams.open(record)
            if self.clustered is not None:
                await self.clustered.placed(record)
            return stream
        except StreamsFullError as full:
            # Other brokers made some at the same time.
            namespace = f"{name.tenant}/{name.namespace}"
            if full.prefix == f"{namespace}/":
                raise _namespace_full(namespace, full.count, in_namespace_max) from full
            raise self.quotas.streams_refused(name.tenant, full.count) from full
        finally:
            self.quotas.creating(name.tenant, -1)

    def _streams_max(self, name: StreamName, in_namespace: int) -> dict[str, int]:
        """How many streams may have names that begin so, where other brokers make some, too."""
        if self.clustered is None:
            return {}
        of_tenant = self.quotas.limits("tenant", name.tenant).streams or 0
        found = {f"{name.tenant}/": of_tenant, f"{name.tenant}/{name.namespace}/": in_namespace}
        return {prefix: most for prefix, most in found.items() if most}

    @property
    def default_replicas(self) -> int:
        """Copies of a new stream that does not say how many, where it may have several."""
        cluster = self.config.cluster
        if cluster is None or self.clustered is None:
            return 1
        return cluster.replicas or self.clustered.default_replicas()

    def with_copies(self, config: StreamConfig) -> StreamConfig:
        """With as many copies as the region has it, where it does not say how many."""
        if config.replicas:
            return config
        count = 1 if one_copy_since(config) else self.default_replicas
        return msgspec.structs.replace(config, replicas=count)

    def check_more_copies(self, stream: HostedStream, replicas: int) -> None:
        """Raises RequestError(CONFLICT) where a stream of one copy cannot get more."""
        if self.clustered is None or replicas == 1:
            return
        if (why := self.clustered.why_it_stays(stream.record)) and not one_copy_since(stream.record.config):
            raise RequestError(
                f"{stream.name} is {why}: what has arrived and has no audit leaf yet is known to one broker.",
                code=Code.CONFLICT,
                hint="Copy its records into another stream of this region, and give that one the copies.",
            )

    def check_copies(self, name: StreamName, replicas: int) -> None:
        """Raises RequestError(CONFIG_INVALID) where the region has fewer brokers than the stream is to have copies."""
        cluster = self.config.cluster
        # Some may have joined since this one read its configuration, others may never have been started.
        joined = 0 if self.clustered is None else len(self.clustered.member.brokers)
        count = 1 if cluster is None else max(len(cluster.brokers), joined)
        if replicas > count:
            brokers = "one broker" if count == 1 else f"{count} brokers"
            raise RequestError(
                f"Stream {name}: {replicas} copies, and {self.region} has {brokers}: each copy is on a broker of its own.",
                code=Code.CONFIG_INVALID,
                hint="Leave --replicas away."
                if count == 1
                else f"Ask for at most {count} copies, or name more brokers in region.yaml.",
            )

    async def check_offload(self, offload: Offload | None) -> None:
        """Raises RequestError(FORBIDDEN, CONFIG_INVALID) where the region does not allow it, or cannot do it."""
        if offload is not None:
            await asyncio.to_thread(check_offload, offload.url, self.config.storage.offload_allow)

    async def ensure_stream(
        self, name: StreamName, config: StreamConfig, *, in_namespace_max: int = 0
    ) -> HostedStream:
        """The stream, made as by `create_stream` where it does not exist; of several that ask at once, one makes it."""
        held = self.streams.get(name)
        if held is not None:
            return held
        try:
            return await self.create_stream(name, config, in_namespace_max=in_namespace_max)
        except RequestError as error:
            if error.code is not Code.ALREADY_EXISTS:
                raise
            return await self.streams.open(await self.catalog.describe_stream(name))

    # -- delivery --------------------------------------------------------------------------------------

    def delivery_waits(self, session: LiveSession) -> None:
        """The delivery budget is used up: the session is asked again soon, since room comes from other sessions."""
        self._waiting.add(session)
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(DELIVERY_WAIT_S, self._retry_delivery)

    def _retry_delivery(self) -> None:
        self._retry = None
        waiting, self._waiting = self._waiting, set()
        self.settle_delivery()
        for session in waiting:
            session.pump()

    def settle_delivery(self) -> None:
        """Charge the delivery budget with what really waits now: idle connections have drained since they sent."""
        for session in list(self.sessions):
            session.settle_delivery()

    def sweep(self) -> None:
        """Once a second: what waits, what is stored, how fast it goes."""
        self.settle_delivery()
        self.quotas.sweep(self.streams.disks.stored_bytes())
        self.share_quotas()

    def traffic(self) -> list[ReaderTraffic]:
        """Who reads by sessions' own subscriptions."""
        return [each for session in list(self.sessions) for each in session.traffic()]

    def bridges(self) -> list[str]:
        """The names of this region's bridges that have a session."""
        held = [session.identity for session in list(self.sessions) if not session.ended]
        own = {
            each.name
            for each in held
            if each is not None and (each.kind, each.region) == ("bridge", self.region)
        }
        return sorted(own)

    # -- stats -----------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Every gauge by name; each limit follows the gauge that it limits."""
        places = places_of(self.config.limits.sessions)
        known = [session.identity for session in list(self.sessions) if session.identity is not None]
        found: dict[str, float] = {
            "sessions": len(known),
            "sessions_limit": places.limit,
            "sessions_foreign": sum(identity.region != self.region for identity in known),
            "sessions_foreign_limit": places.foreign,
            "sessions_kept_for_operators": places.operators,
            "subscriptions": sum(session.subscription_count for session in list(self.sessions)),
            "streams": len(self.streams),
        }
        for budget in self.budgets.all():
            found[f"{budget.name}_bytes"] = budget.used_bytes
            found[f"{budget.name}_bytes_limit"] = budget.limit_bytes
        return found


def _namespace_full(namespace: str, there: int, most: int) -> UnavailableError:
    return UnavailableError(
        f"{namespace} has {there} streams, and no more than {most} are made by their first use.",
        code=Code.LIMIT_STREAMS,
        hint="Delete some, create it by hand, or raise --streams-max of the namespace.",
        retry_after_ms=60_000,
    )


def _copies_differ(target: StreamName, copies: int, others: int) -> str:
    return f"{target} has another number of copies, {others} and not {copies}"
