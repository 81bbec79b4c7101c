"""A broker as a process: opens what it needs, in order, serves, and closes in the reverse order.

Invariants: nothing is served before the metadata store has proved to be this region's; what was opened is closed,
whatever fails; a stop answers what is under way first.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from audit.note import Algorithm, NoteSigner
from audit.origin import region_origin, witness_name
from audit.submission import Submissions
from audit.trail import Trail, TrailSettings
from audit.trust import RegionTrust, Trust
from audit.witness import DiskWitnessStore, Witness
from felix.address import Address
from felix.collector import collector_paused
from felix.errors import Code, FelixError, RequestError
from felix.expiry import Life, until_text
from felix.health import HealthServer
from felix.identity import Identity
from felix.messages import (
    Goodbye,
    OpenCache,
    OpenConsumer,
    OpenIngest,
    OpenQueue,
    OpenTransactions,
    WatchCache,
)
from felix.names import SpiffeId, StreamName
from felix.periodic import every
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.storage.disk import PRIVATE_FILES, SHARED_FILES
from felix.storage.port import Files
from felix.tasks import end_tasks
from felix.transport.port import Engine, Listener, ServerTls, TransportLimits, engine_named
from keys.authority import RegionAuthority, load_authority
from keys.bundle import RegionBundle, SignedBundle, decode_bundle
from keys.certification import load_certification
from keys.key_file import load_key_pair, load_ml_dsa_key, load_signing_key
from keys.keyring import Keyring, open_keyring
from keys.signing import VerifyKey
from region.at_once import at_once
from region.broker import Broker
from region.budget import Budgets
from region.cache import watch
from region.cache.service import CacheService
from region.config import RegionConfig
from region.document_log import DocumentLog
from region.export import ExportService
from region.folder import RegionFolder
from region.governance import Governance
from region.ingest import IngestService
from region.landings import Landings
from region.log.directory import LogDirectory
from region.log.open_logs import raise_files_limit
from region.metadata.catalog import Catalog
from region.metadata.embedded import EmbeddedStore
from region.metadata.etcd import EtcdConfig, EtcdStore, EtcdTls
from region.metadata.genesis import claim_or_verify, sign_genesis
from region.metadata.mirror import CatalogMirror, MirrorChange
from region.metadata.port import MetadataStore
from region.metadata.records import Stream
from region.metadata.registration import Holder, Registration
from region.metrics import BrokerCollector
from region.queue.service import QueueService
from region.queue.worker import queue_opener
from region.renewal import IdentityRenewal
from region.requests import Requests, ViewTraffic
from region.sealing import KeyringSeal
from region.session import ClientSession, Services
from region.streams import HostedStream, StreamTable
from region.subscriptions.service import SubscriptionService
from region.transactions.coordinator import OPEN_MAX, SYSTEM_STREAM, Coordinator
from region.transactions.participants import QueueParticipant, SubscriptionParticipant
from region.transactions.service import TransactionService
from region.trust_store import Memory
from region.witness_memory import WitnessMemory
from region.witnessing import Witnessing

log = logging.getLogger("felix.region.node")

OFFLOAD_CHECK_S: Final = 1.0
"""How often the broker looks whether segments are to be offloaded."""
OFFLOAD_CHECKS_PER_DELETION: Final = 60
"""Objects of deleted streams that a store did not delete are asked for again so seldom."""
COMPACT_CHECK_S: Final = 5.0
"""How often the broker looks whether a compacted stream's shards are worth a pass."""
SWITCH_S = 0.0005
"""How long a thread may hold the interpreter while another wants it. Python's own 5 ms is what the event loop would wait for each thread
that seals and writes a noisy tenant's batches; measured with `python -m benchmarks fairness`."""
OPENED_AT_ONCE: Final = 8
"""Streams that a start opens together: twice as many as there are threads that look at their folders."""
MEASURE_S = 1.0
"""How often the broker looks what is used and stored; rates are over this long."""
RENEW_CHECK_S = 60.0
"""How often the broker looks whether its certificate is due for renewal."""
_ADVICE: Final = {
    "issuing": ": felix identity renew-issuing, where the root key is",
}
"""The hint for a certificate that is not renewed automatically."""
CONNECTIONS_SPARE = 256
"""Connections beyond the limit of sessions: clients that are refused, or have not authenticated yet."""
LEAVE_MS = 500
"""Clients are told to leave, and have this long before their connections close."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a broker runs on beside its runtime. What is left out is this machine's, as the configuration says."""

    files: Files = PRIVATE_FILES
    """for the logs of streams, and what is remembered beside them"""
    evidence: Files = SHARED_FILES
    """for the audit log, and what is cosigned"""
    engine: Engine | None = None
    store: MetadataStore | None = None
    open_keys: Callable[..., Keyring] = open_keyring
    """called as `keys.keyring.open_keyring` is"""


class Node:
    """One broker. `start`, then `stop`; a node is not started twice."""

    def __init__(
        self,
        folder: RegionFolder,
        config: RegionConfig,
        runtime: Runtime = REAL,
        machine: Machine = Machine(),
    ) -> None:
        self.folder = folder
        self.config = config
        self._machine = machine
        self._runtime = runtime
        self._now_ms = runtime.clock.now_ms
        self.broker: Broker
        self.subscriptions: SubscriptionService
        self.services: Services
        self.caches: CacheService
        self.queues: QueueService
        self.transactions: Coordinator
        self.listener: Listener
        self._directory: LogDirectory
        self._certification = b""
        self._registration: Registration | None = None
        self.health: HealthServer | None = None
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = ""
        # Names and incarnations of changed catalog records that were not processed yet.
        self._streams_wanted: set[StreamName] = set()
        self._streams_gone: set[str] = set()
        self._streams_changed = asyncio.Event()

    @property
    def address(self) -> Address:
        """Where clients reach the broker; the real port where 0 was asked."""
        return Address(*self.listener.address)

    @property
    def server_names(self) -> tuple[str, ...]:
        """What the broker's certificate carries."""
        config = self.config
        return (f"{config.broker}.{config.region}.{config.mesh}", f"{config.region}.{config.mesh}")

    # -- start -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open everything and listen. What was opened before a failure is closed again."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        folder, config = self.folder, self.config
        data = folder.root / config.data
        machine = self._machine
        machine.files.make_folder(data)
        self._ready = "the broker is starting"
        sys.setswitchinterval(SWITCH_S)
        files_max = raise_files_limit()

        storage = config.storage
        directory = LogDirectory(
            data / "streams",
            config.region,
            offload_rate_bytes=storage.offload_rate,
            fetched_bytes_max=storage.offload_cache,
            files=machine.files,
            runtime=self._runtime,
        )
        self._stack.push_async_callback(directory.close)
        self._directory = directory
        authority = await asyncio.to_thread(load_authority, folder.authority, config.region, config.mesh)
        self._certification = await asyncio.to_thread(load_certification, folder.authority)
        own = await asyncio.to_thread(_own_bundle, folder, config)
        keyring = await asyncio.to_thread(
            machine.open_keys, folder.keys, config.region, runtime=self._runtime
        )
        self._stack.callback(keyring.close)
        store = await self._open_store(data)
        self._stack.push_async_callback(store.close)
        audit_key = await asyncio.to_thread(load_signing_key, folder.audit_key)
        root = hashlib.sha256(own.root_pem.encode()).hexdigest()
        genesis = sign_genesis(config.region, config.mesh, root, self._now_ms(), audit_key)
        earlier = [
            VerifyKey(key.public)
            for key in RegionTrust(own).logs
            if key.name == region_origin(config.region, config.mesh) and key.algorithm is Algorithm.ED25519
        ]
        await claim_or_verify(store, genesis, audit_key.verify_key, earlier)
        registration: Registration | None = None
        if config.metadata.kind == "etcd":
            # Before the audit log is opened, which may sign.
            registration = await Registration.open(
                store, config.region, _holder(folder, config, directory.lock_identity, self._now_ms())
            )
            self._stack.push_async_callback(registration.close)
        self._registration = registration
        catalog = Catalog(store, config.region)
        mirror = CatalogMirror(store, config.region)
        await mirror.start()
        self._stack.push_async_callback(mirror.close)
        await self._offer_bundles(catalog, mirror)
        cosigned = WitnessMemory(
            store, config.region, DiskWitnessStore(data / "witness", machine.evidence), self._runtime
        )
        witness, trail = await asyncio.to_thread(self._open_audit, data, own, cosigned)
        self._stack.push_async_callback(asyncio.to_thread, trail.close)
        submissions = Submissions(
            trail, [each.target(folder.root) for each in config.audit.witnesses], self._runtime
        )
        # One note is to have the cosignatures of them all, and of the regions that bridges may lead to.
        trail.expect_cosigners(len(mirror.trusted()) + len(config.audit.witnesses))
        submissions.start()
        self._stack.push_async_callback(asyncio.to_thread, submissions.stop)

        budgets = Budgets()

        def changed(stream: HostedStream) -> None:
            if stream.deleted:
                self.broker.recheck_sessions()
                return
            self.caches.stream_opened(stream)
            self.subscriptions.stream_opened(stream)

        streams = StreamTable(
            directory,
            budgets.ring,
            lambda name, incarnation, shard: KeyringSeal(keyring, name, incarnation, shard),
            changed,
            self._may_not_write,
            self._runtime,
            files_max,
        )
        self.broker = broker = Broker(
            config,
            streams=streams,
            catalog=catalog,
            budgets=budgets,
            # A few more than sessions, so that the refusal is the broker's and has its sentence.
            transport_limits=TransportLimits(connections_max=config.limits.sessions + CONNECTIONS_SPARE),
            runtime=self._runtime,
        )
        self.caches = CacheService(broker)
        landings = Landings()
        memory = Memory(data / "governance", self._runtime, machine.files)
        self._stack.push_async_callback(asyncio.to_thread, memory.close)
        remembered = await asyncio.to_thread(memory.load)
        logged = await asyncio.to_thread(DocumentLog.open, trail, memory.folder / "logged")
        # If store and copies come from a backup, the audit log still has the later documents that forbid.
        forgotten = await asyncio.to_thread(logged.forgotten, remembered.every())
        remembered = remembered._replace(documents=[*remembered.documents, *forgotten])
        governance = Governance(
            broker, catalog, mirror, keyring, trail,
            Witnessing(witness, trail, config.region, self._runtime.clock, submissions),
            own,
            lambda: pinned_bundles(folder),
            memory, remembered, logged, landings.drained,
        )  # fmt: skip
        import_key = await asyncio.to_thread(load_key_pair, folder.import_key)
        receipt_key = await asyncio.to_thread(load_signing_key, folder.receipt_key)
        export = ExportService(broker, governance, keyring, receipt_key)
        ingest = IngestService(broker, governance, landings, import_key, receipt_key)
        # Nobody sees a stream before all that landed in it over a border is in the ingress log.
        streams.before_serving.append(ingest.settle)
        self._stack.callback(ingest.close)
        self._stack.push_async_callback(governance.close)
        self.subscriptions = subscriptions = SubscriptionService(broker, catalog, mirror)
        self.queues = QueueService(broker)
        self.transactions = transactions = Coordinator(
            broker,
            {
                "subscription": SubscriptionParticipant(broker, subscriptions),
                "queue": QueueParticipant(broker, self.queues),
            },
        )
        self.services = Services(
            broker,
            governance,
            export,
            Requests(
                broker,
                governance,
                export,
                catalog,
                mirror,
                subscriptions,
                ViewTraffic([subscriptions.traffic, self.queues.traffic], self.caches.traffic),
            ),
            IdentityRenewal(
                broker,
                # Read each time: a renewed issuing certificate is taken without a restart.
                lambda: load_authority(folder.authority, config.region, config.mesh).without_root_key(),
                governance.keys.record,
            ),
            {
                OpenIngest: ingest.open,
                OpenTransactions: TransactionService(broker, transactions).open,
                OpenConsumer: subscriptions.open,
                OpenCache: self.caches.open,
                WatchCache: watch.opener(self.caches),
                OpenQueue: queue_opener(self.queues),
            },
        )

        mirror.on_change(self._mirror_changed)
        governance.follow()
        self._take_rights(mirror)
        broker.set_quotas(mirror.quotas)
        broker.set_namespaces(mirror.namespaces)
        mirror.on_change(
            lambda change: (
                broker.set_namespaces(mirror.namespaces) if change.section == "namespaces" else None
            )
        )
        mirror.on_change(
            lambda change: broker.set_quotas(mirror.quotas) if change.section == "quotas" else None
        )
        mirror.on_change(lambda change: self._take_rights(mirror) if change.section == "rights" else None)
        for deleted in mirror.deleted_streams.values():
            await streams.remove(StreamName.parse(deleted.name), deleted.incarnation)
        self._stack.push_async_callback(streams.close)
        self._stack.push_async_callback(self.queues.close)
        records = dict(mirror.streams)
        # Committed transactions are applied before their streams serve.
        system = records.pop(SYSTEM_STREAM, None)
        if system is not None:
            await streams.open(system)
        await transactions.start(streams)

        async def open_stream(record: Stream) -> None:
            try:
                await streams.open(record)
            except FelixError as error:
                # One stream that does not fit must not keep the others from being served.
                log.error("stream %s cannot be opened: %s", record.name, error)
                self._streams_wanted.add(StreamName.parse(record.name))

        with collector_paused():
            await at_once(OPENED_AT_ONCE, open_stream, records.values())
        landings.streams_opened()

        await subscriptions.start()
        self._stack.push_async_callback(subscriptions.close)

        await transactions.started()
        self._stack.push_async_callback(transactions.close)
        await self._listen(authority)
        self._repeat(streams, directory)
        self._spawn(self._follow_streams(streams, mirror))
        self._spawn(self._renew(authority))
        if registration is not None:
            self._spawn(registration.keep())
        self._stack.push_async_callback(self._stop_tasks)
        self._ready = ""
        log.info("broker %s of %s serves at %s", config.broker, config.region, self.address)

    async def _open_store(self, data: Path) -> MetadataStore:
        settings = self.config.metadata
        if self._machine.store is not None:
            return self._machine.store
        if settings.kind == "embedded":
            return await EmbeddedStore.open(data / "metadata.db", runtime=self._runtime)
        base = self.folder.root

        def path(text: str) -> Path | None:
            return base / text if text else None

        password = ""
        if settings.password_file:
            password = (await asyncio.to_thread((base / settings.password_file).read_text)).strip()
        tls = EtcdTls(path(settings.ca), path(settings.cert), path(settings.key)) if settings.ca else None
        return await EtcdStore.open(
            EtcdConfig(endpoints=settings.endpoints, tls=tls, user=settings.user, password=password)
        )

    async def _offer_bundles(self, catalog: Catalog, mirror: CatalogMirror) -> None:
        """Bundles in `trusted/` that the region does not know yet: trusted while no broker ran."""
        for path, signed in await asyncio.to_thread(_trusted_files, self.folder):
            region = signed.bundle.region
            if not _is_newer(signed.bundle, mirror.trusted().get(region)):
                continue
            log.info("trusting %s, from %s", region, path)
            revision = await catalog.put_trusted(
                region, signed.encode(), revision=mirror.trusted_revision(region)
            )
            await mirror.wait_for(revision)

    def _open_audit(self, data: Path, own: RegionBundle, cosigned: WitnessMemory) -> tuple[Witness, Trail]:
        """Of other regions only the pinned ones are known yet; governance adds those that the store names rightly."""
        region, mesh = self.config.region, self.config.mesh
        known = list(pinned_bundles(self.folder).values())
        audit_key = load_signing_key(self.folder.audit_key)
        cosigned.move_in()
        cosigning_key = load_signing_key(self.folder.witness_key)
        witness = Witness(
            NoteSigner.from_key(witness_name(region, mesh), cosigning_key, Algorithm.COSIGNATURE),
            [key for bundle in known for key in RegionTrust(bundle).logs],
            cosigned,
            lambda: self._now_ms() // 1000,
            also=_post_quantum(witness_name(region, mesh), self.folder.witness_ml_dsa_key),
        )
        signer = NoteSigner.from_key(region_origin(region, mesh), audit_key, Algorithm.ED25519)
        also = _post_quantum(region_origin(region, mesh), self.folder.audit_ml_dsa_key)
        trail = Trail.open(
            data / "audit",
            signer,
            also=also,
            earlier=RegionTrust(own).earlier_keys(signer.key.name, (each.key for each in (signer, *also))),
            witnesses=[
                *Trust.of((*known, own)).witnesses_for(region),
                *(key for each in self.config.audit.witnesses for key in each.target(self.folder.root).keys),
            ],
            settings=TrailSettings(checkpoint_interval_ms=self.config.audit.checkpoint_every),
            refusal=self._not_registered,
            files=self._machine.evidence,
            runtime=self._runtime,
        )
        if trail.recovered is not None:
            log.warning("audit log: %s", trail.recovered)
        return witness, trail

    async def _listen(self, authority: RegionAuthority) -> None:
        config = self.config
        engine = self._machine.engine or engine_named(config.engine or None)
        self.listener = await engine.listen(
            config.listen.host,
            config.listen.port,
            self._tls(self._issue(authority)),
            lambda: ClientSession(self.services),
            self.broker.transport_limits,
        )
        self._stack.push_async_callback(self._leave)
        if config.health is not None:
            collector = BrokerCollector(
                self.broker.metrics,
                self._gauges,
                self._shard_gauges,
                self.broker.quotas,
                self.subscriptions.lags,
                lambda: self.broker.expiries.seconds_left(self._now_ms()),
            )
            self.health = HealthServer(
                config.health.host,
                config.health.port,
                collector,
                lambda: self._ready or self._not_registered(),
            )
            self._stack.push_async_callback(asyncio.to_thread, self.health.close)

    def _issue(self, authority: RegionAuthority) -> Identity:
        config = self.config
        identity = SpiffeId(config.region, config.mesh, "broker", config.broker)
        issued = authority.issue_identity(identity, self._now_ms(), dns_names=self.server_names)
        see = self.broker.expiries.see
        see(str(identity), "broker", Life(issued.not_before_ms, issued.not_after_ms))
        for kind, (start_ms, end_ms) in authority.lives().items():
            see(f"{authority.trust_domain} {kind} certificate", kind, Life(start_ms, end_ms))
        return issued

    def _tls(self, identity: Identity) -> ServerTls:
        """The broker's TLS chain, followed by the certificates of an organisation."""
        return ServerTls(identity.chain_pem + self._certification, identity.key_pem())

    # -- while it serves -------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    def _may_not_write(self) -> FelixError | None:
        """Why nothing may be appended: another broker may serve this region. Asked for each append."""
        return None if self._registration is None else self._registration.refusal()

    def _not_registered(self) -> str:
        """The same as a sentence without its end; empty where the broker may write. Also asked from other threads."""
        refusal = self._may_not_write()
        return "" if refusal is None else refusal.sentence.removesuffix(".")

    async def _stop_tasks(self) -> None:
        await end_tasks(*self._tasks)

    def _repeat(self, streams: StreamTable, directory: LogDirectory) -> None:
        """Start the periodic work. If a run fails by a bug, quotas use their last known values, logs stay as they were, and the
        other streams are still processed.
        """
        storage, turns = self.config.storage, count(1)

        async def measure() -> None:
            self.broker.sweep()
            await asyncio.to_thread(self.services.governance.logged.save)

        async def retain() -> None:
            self.subscriptions.hold_all()
            await streams.sweep(self._now_ms())

        async def offload() -> None:
            await streams.offload(self._now_ms(), storage.offload_allow)
            if next(turns) % OFFLOAD_CHECKS_PER_DELETION == 0:
                await asyncio.to_thread(directory.retry_deletions)

        for period_s, turn, failure in (
            (MEASURE_S, measure, "what is in use could not be measured"),
            (
                self.config.subscriptions.sweep_every / 1000,
                lambda: self.subscriptions.sweep(self._now_ms()),
                "inactive subscriptions could not be looked at",
            ),
            (storage.sweep_every / 1000, retain, "retention could not be applied"),
            (COMPACT_CHECK_S, lambda: streams.compact(self._now_ms()), "streams could not be compacted"),
            (OFFLOAD_CHECK_S, offload, "segments could not be offloaded"),
        ):
            self._spawn(every(period_s, turn, failure, log))

    async def _renew(self, authority: RegionAuthority) -> None:
        """Renew the broker's certificate in time, and say of all certificates when they near their end."""
        config = self.config
        current = self._issue(authority)
        while True:
            for each in self.broker.expiries.notices(self._now_ms()):
                log.warning(
                    "%s %s%s",
                    each.name,
                    until_text(each.life.not_after_ms, self._now_ms()),
                    _ADVICE.get(each.kind, ""),
                )
            await asyncio.sleep(RENEW_CHECK_S)
            if current.renewal_due(self._now_ms()):
                try:
                    # Read again: a renewed issuing certificate is taken without a restart.
                    authority = await asyncio.to_thread(
                        load_authority, self.folder.authority, config.region, config.mesh
                    )
                    current = self._issue(authority)
                    self.listener.renew(self._tls(current))
                except Exception:
                    # Whatever it is may pass; a broker whose certificate ends is lost to its clients.
                    log.exception("the broker's certificate could not be renewed")

    def _mirror_changed(self, change: MirrorChange) -> None:
        if change.section == "streams":
            self._streams_wanted.add(StreamName.parse(change.name))
        elif change.section == "deleted":
            self._streams_gone.add(change.name)
        else:
            return
        self._streams_changed.set()

    async def _follow_streams(self, streams: StreamTable, mirror: CatalogMirror) -> None:
        """Open and close what the catalog says, also when another broker wrote it."""
        while True:
            await self._streams_changed.wait()
            self._streams_changed.clear()
            try:
                await self._follow_once(streams, mirror)
            except Exception:
                # A mistake of ours: what changes next is followed all the same.
                log.exception("the catalog's streams could not be followed")

    async def _follow_once(self, streams: StreamTable, mirror: CatalogMirror) -> None:
        """The streams that changed since, and those that could not be opened then."""
        while self._streams_gone:
            deleted = mirror.deleted_streams.get(self._streams_gone.pop())
            if deleted is None:
                continue
            held = streams.get(StreamName.parse(deleted.name))
            if held is not None and held.record.incarnation == deleted.incarnation:
                await streams.remove(held.name, deleted.incarnation)
        for name in sorted(self._streams_wanted):
            self._streams_wanted.discard(name)
            record = mirror.streams.get(name)
            if record is None:
                continue
            try:
                await streams.open(record)
            except RequestError as error:
                log.info("stream %s: %s", record.name, error)
            except FelixError as error:
                log.error("stream %s cannot be opened: %s", record.name, error)
                # Tried again with the next change, which may be what makes room.
                self._streams_wanted.add(name)

    def _take_rights(self, mirror: CatalogMirror) -> None:
        self.broker.set_rights(mirror.rights_table())

    # -- stats -----------------------------------------------------------------------------------------

    def _gauges(self) -> dict[str, float]:
        status = self.services.governance.trail.status()
        return {
            **self.broker.gauges(),
            **self.subscriptions.gauges(),
            **self._stranger_gauges(),
            "offload_cache_bytes": self._directory.fetched_bytes,
            "offload_cache_bytes_limit": self._directory.fetched_bytes_max,
            "offload_refused": self.broker.streams.offload_refused,
            "audit_leaves": status.durable,
            "audit_checkpoint_leaves": status.checkpoint,
            "audit_cosigned_leaves": status.cosigned,
            "audit_pending_bytes": status.pending_bytes,
            "audit_failed": float(bool(status.failure)),
            **self.services.governance.witnessing.gauges(),
            "transactions_open": self.transactions.open_count,
            "transactions_open_limit": OPEN_MAX,
            "transactions_owed": self.transactions.owed_count,
            "transactions_committed": self.transactions.committed,
            "transactions_aborted": self.transactions.aborted,
            "transactions_timed_out": self.transactions.timed_out,
        }

    def _stranger_gauges(self) -> dict[str, float]:
        """Connections that have not authenticated yet, with their limits."""
        listener, limits = self.listener, self.broker.transport_limits
        return {
            "connections": listener.connection_count,
            "connections_limit": limits.connections_max,
            "strangers": listener.stranger_count,
            "strangers_limit": limits.handshakes_pending_max,
            "stranger_bytes": listener.stranger_bytes,
            "stranger_bytes_limit": limits.strangers_bytes_max,
            "strangers_evicted": listener.strangers_evicted,
        }

    def _shard_gauges(self) -> list[tuple[str, int, dict[str, float]]]:
        found: list[tuple[str, int, dict[str, float]]] = []
        for stream in self.broker.streams:
            for number, shard in stream.replicas.items():
                if isinstance(shard, FelixError):
                    found.append((str(stream.name), number, {"stopped": 1.0}))
                    continue
                counters = shard.counters
                values: dict[str, float] = {
                    "log_start_offset": shard.log_start_offset,
                    "high_watermark": shard.high_watermark,
                    "disk_bytes": shard.disk_bytes,
                    "ring_bytes": shard.ring_bytes,
                    "ring_bytes_limit": shard.settings.ring_bytes_max,
                    "pending_bytes": shard.pending_bytes,
                    "pending_bytes_limit": shard.settings.pending_bytes_max,
                    "appended_batches": counters.batches,
                    "appended_records": counters.records,
                    "appended_bytes": counters.appended_bytes,
                    "syncs": counters.syncs,
                    "sync_seconds": counters.sync_ns / 1e9,
                    "segments": shard.segment_count,
                    "segments_deleted": counters.segments_deleted,
                    "remote_bytes": shard.remote_bytes,
                    "offload_waiting_bytes": shard.offload_waiting_bytes,
                    "offloaded_segments": counters.offloaded_segments,
                    "offloaded_bytes": counters.offloaded_bytes,
                    "offload_failed": counters.offload_failed,
                    "fetched_segments": counters.fetched_segments,
                    "fetched_bytes": counters.fetched_bytes,
                    "dirty_bytes": shard.dirty_bytes,
                    "compacted_to": shard.compacted_to,
                    "compactions": counters.compactions,
                    "compactions_failed": counters.compactions_failed,
                    "compaction_read_bytes": counters.compaction_read_bytes,
                    "compaction_written_bytes": counters.compaction_written_bytes,
                    "compaction_removed_records": counters.compaction_removed_records,
                    "compaction_seconds": counters.compaction_ns / 1e9,
                    "stopped": float(shard.failure is not None),
                    **self.caches.stats(stream, number),
                }
                deduplication = shard.settings.deduplication
                if deduplication is not None:
                    values["message_ids"] = shard.message_ids
                    values["message_ids_limit"] = deduplication.ids_max
                    values["repeated_ids"] = counters.repeated_ids
                values |= self.queues.gauges(stream.name, number)
                found.append((str(stream.name), number, values))
        return found

    # -- stop ------------------------------------------------------------------------------------------

    async def _leave(self) -> None:
        self._ready = "the broker is shutting down"
        self.broker.leaving = True
        self.services.governance.watch.close()
        for session in list(self.broker.sessions):
            session.leave(Goodbye(f"Broker {self.config.broker} is shutting down.", LEAVE_MS))
        if self.broker.sessions:
            await asyncio.sleep(LEAVE_MS / 1000)
        await self.listener.close("the broker is shutting down")

    async def stop(self) -> None:
        """Close everything, with every acknowledgement kept. Safe to call twice."""
        await self._stack.aclose()
        log.info("broker %s of %s stopped", self.config.broker, self.config.region)


def _holder(folder: RegionFolder, config: RegionConfig, lock: str, since_ms: int) -> Holder:
    return Holder(
        broker=config.broker,
        host=socket.gethostname(),
        process=os.getpid(),
        folder=str(folder.root),
        lock=lock,
        lease_ms=config.metadata.lease,
        since_ms=since_ms,
    )


def _post_quantum(name: str, path: Path) -> list[NoteSigner]:
    """The ML-DSA-44 signer whose key is in this file; none in a region that was founded before there were any."""
    return [NoteSigner.from_ml_dsa(name, load_ml_dsa_key(path))] if path.exists() else []


def _own_bundle(folder: RegionFolder, config: RegionConfig) -> RegionBundle:
    bundle = decode_bundle(_read(folder.bundle)).bundle
    if (bundle.region, bundle.mesh) != (config.region, config.mesh):
        raise RequestError(
            f"{folder.config} is for {config.region}.{config.mesh}, and {folder.bundle} for "
            f"{bundle.region}.{bundle.mesh}.",
            code=Code.WRONG_REGION,
            hint="Each region has a state folder of its own.",
        )
    return bundle


def _trusted_files(folder: RegionFolder) -> list[tuple[Path, SignedBundle]]:
    return [(path, decode_bundle(_read(path))) for path in sorted(folder.trusted.glob("*.json"))]


def pinned_bundles(folder: RegionFolder) -> dict[str, RegionBundle]:
    """Other regions' bundles as an operator put them into the folder. Blocks."""
    return {signed.bundle.region: signed.bundle for _, signed in _trusted_files(folder)}


def _is_newer(bundle: RegionBundle, held: bytes | None) -> bool:
    """Whether to write this bundle to the store. An unreadable bundle in the store does not prevent it."""
    try:
        return held is None or bundle.issued_ms > decode_bundle(held).bundle.issued_ms
    except FelixError:
        return True


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read: {error.strerror or error}.",
            code=Code.NOT_FOUND,
            hint="Make the region first: felix region init NAME --mesh MESH.",
        ) from error
