"""How a broker is opened: what it needs, in order, each part made with what it needs of those before it.

Invariants: nothing is served before the metadata store has proved to be this region's; what was opened is on the stack, which closes it in
the reverse order, whatever fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec

from audit.copied_disk import become_copied
from audit.note import Algorithm
from audit.origin import region_origin
from audit.submission import Submissions
from audit.trail import Trail
from audit.trust import RegionTrust
from audit.witness import DiskWitnessStore
from felix import __version__
from felix.collector import collector_paused
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.messages import (
    OpenCache,
    OpenConsumer,
    OpenIngest,
    OpenQueue,
    OpenRelay,
    OpenTransactions,
    WatchCache,
)
from felix.names import StreamName
from felix.runtime.port import Runtime
from felix.storage.begun import SUFFIX, BegunFolder
from felix.storage.disk import PRIVATE_FILES, SHARED_FILES, boot_id
from felix.storage.port import Files
from felix.storage.release_mark import mark_release
from felix.transaction_messages import TRANSACTIONS_STREAM
from felix.transport.port import Engine, TransportLimits, engine_named
from keys.authority import RegionAuthority, load_authority
from keys.bundle import RegionBundle
from keys.certification import load_certification
from keys.key_file import load_key_pair, load_signing_key
from keys.keyring import Keyring, open_keyring, open_provider
from keys.pin import decode_logged
from keys.reopening import KeyFile
from keys.shared import RegionKeys, SharedKeyring, find_first_root, open_copies
from keys.signing import VerifyKey
from keys.store import KEY_FILE, KeyStore
from region.arrival_index import ArrivalIndex
from region.at_once import at_once
from region.audit_log import LOGS, AuditLog
from region.audit_port import ArrivalLog, AuditPort
from region.audit_requests import PassedTold, StreamsPassed
from region.audit_server import AuditServer
from region.broker import Broker
from region.broker_certificate import BrokerCertificate
from region.budget import Budgets
from region.cache import watch
from region.cache.service import CacheService
from region.cluster.audit_home import Before
from region.cluster.clocks import RegionClock
from region.cluster.key_rotation import KeyRotation
from region.cluster.member import Catalogued, ClusterMember
from region.cluster.node_file import NAME as NODE_FILE
from region.cluster.node_file import NodeFile
from region.cluster.records import ShardId
from region.cluster.registration import Start
from region.cluster.registry import Address as MemberAddress
from region.cluster.stream_keys import StreamKeys
from region.clustered import Clustered
from region.config import RegionConfig
from region.copied_log import AUDIT, NO_AUDIT
from region.copy_troubles import CopyTroubles
from region.copying_audit_log import AUDIT_COPIES
from region.document_log import DocumentLog
from region.erasure import Destruction, Erasure, KeyringDestruction, SharedDestruction
from region.evidence import open_evidence
from region.export import ExportService
from region.folder import RegionFolder
from region.governance.lasting import accepted_by_leaf
from region.governance.leaves import Alone, Neighbours
from region.governance.own_words import OwnWords
from region.governance.service import Governance
from region.home_leaves import HomeLeaves, MovingLeaves
from region.ingest import IngestService
from region.inventory import STREAMS
from region.key_service import KeyringRotation, KeyService, Rotation
from region.landings import Landings
from region.log.directory import LogDirectory
from region.log.open_logs import OpenLogs, logs_max_of, raise_files_limit, relays_max_of
from region.log.scrub import Scrub
from region.log.shard import ShardHooks
from region.log_key_store import require_log_key_of_now
from region.metadata.catalog import Catalog
from region.metadata.destroyed_keys import DestroyedKeys
from region.metadata.embedded import EmbeddedStore
from region.metadata.etcd import EtcdConfig, EtcdStore, EtcdTls
from region.metadata.genesis import claim_or_verify, region_prefix, sign_genesis
from region.metadata.mirror import CatalogMirror, MirrorChange
from region.metadata.port import MetadataStore
from region.metadata.records import AUDIT_STREAM, Stream
from region.metadata.registration import Holder, Registration, is_holder
from region.own_files import OwnFiles
from region.peer_requests import PeerRequests
from region.peers import Peers
from region.queue.service import QueueService
from region.queue.worker import queue_opener
from region.quota_exchange import QuotaExchange
from region.relay import RelayService
from region.remote_audit import RemoteAudit
from region.renewal import IdentityRenewal
from region.replicas import Replicas, SystemStream
from region.replication.links import LocalBroker
from region.requests import Requests, ViewTraffic
from region.sealing import KeyringSeal
from region.session import Services
from region.signing_keys import keys_made_instead, require_of_now
from region.stream_follower import StreamFollower
from region.stream_settings import HOT_BYTES, shard_settings
from region.streams import StreamTable
from region.subscriptions.service import SubscriptionService
from region.transactions.applier import Participant
from region.transactions.coordinator import Coordinator
from region.transactions.lanes import Lanes
from region.transactions.participants import QueueParticipant, SubscriptionParticipant
from region.transactions.service import TransactionService
from region.transactions.stream_leaders import StreamLeaders
from region.trust_store import Memory
from region.trusted_bundles import (
    offer_bundles,
    own_bundle,
    pinned_bundles,
    signed_pins,
    trusted_files,
)
from region.views.together import places_together
from region.witness_memory import WitnessMemory
from region.witnessing import Witnessing

log = logging.getLogger("felix.region.startup")

SWITCH_S: Final = 0.0005
"""How long a thread may hold the interpreter while another wants it. Python's own 5 ms is what the event loop would wait for each thread
that seals and writes a noisy tenant's batches; measured with `python -m benchmarks fairness`."""
OPENED_AT_ONCE: Final = 8
"""Streams that a start opens together: twice as many as there are threads that look at their folders."""
CONNECTIONS_SPARE: Final = 256
"""Connections beyond the limit of sessions: clients that are refused, or have not authenticated yet."""


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


THIS_MACHINE: Final = Machine()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a broker consists of once it is open, and before it listens."""

    broker: Broker
    directory: LogDirectory
    streams: StreamTable
    follower: StreamFollower
    services: Services
    caches: CacheService
    queues: QueueService
    subscriptions: SubscriptionService
    transactions: Coordinator
    certificate: BrokerCertificate
    registration: Registration | None
    """In a metadata store that several processes may open."""
    clustered: Clustered | None
    """Of one of several brokers."""
    peers: Peers | None
    """Its links and copies, the same."""

    def may_not_write(self) -> str:
        """Why nothing may be appended, as a sentence without its end; empty where the broker may write. Also asked from other threads."""
        return _why(self.registration if self.clustered is None else self.clustered.member)


async def open_broker(
    folder: RegionFolder,
    config: RegionConfig,
    runtime: Runtime,
    machine: Machine,
    stack: AsyncExitStack,
    *,
    replace_folder: bool = False,
) -> Parts:
    """Everything but the listener. What is opened is put on `stack` at once. `replace_folder`: of one of several brokers, the data folder is
    a new one, and what was in its former one is given up."""
    data = folder.root / config.data
    now_ms = runtime.clock.now_ms
    if config.cluster is None:
        # Before anything is made: a lock or a store of its own would stand where those of the region stood.
        await asyncio.to_thread(_refuse_folders, data, config.region)
    begun = _begun_folders(folder, config, machine)
    for each in begun:
        await asyncio.to_thread(each.require)
    machine.files.make_folder(data)
    sys.setswitchinterval(SWITCH_S)
    files_max = raise_files_limit()
    # On a simulated network there are no sockets.
    relays_wanted = 0 if config.cluster is None or machine.engine is not None else config.limits.relays
    relays_max = relays_max_of(relays_wanted, files_max)
    if relays_max < relays_wanted:
        log.warning(
            "limits.relays is %d, and this broker carries %d connections to others at most: it may open %d files (raise the hard limit, ulimit -Hn).",
            relays_wanted, relays_max, files_max,
        )  # fmt: skip
    open_logs = OpenLogs(logs_max_of(files_max - relays_max))
    storage = config.storage
    streams_clock = RegionClock(runtime.clock)
    streams_runtime = (
        runtime if config.cluster is None else msgspec.structs.replace(runtime, clock=streams_clock)
    )
    directory = LogDirectory(
        data / STREAMS,
        config.region,
        offload_rate_bytes=storage.offload_rate,
        fetched_bytes_max=storage.offload_cache,
        files=machine.files,
        runtime=streams_runtime,
    )
    stack.push_async_callback(directory.close)
    if config.cluster is None:
        # Again, now that nobody can turn it into a region of several meanwhile.
        await asyncio.to_thread(_refuse_folders, data, config.region)

    def authority() -> RegionAuthority:
        return load_authority(folder.authority, config.region, config.mesh)

    issuing = await asyncio.to_thread(authority)
    certification = await asyncio.to_thread(load_certification, folder.authority)
    own = await asyncio.to_thread(own_bundle, folder, config)
    # Nothing is written before that: from here on an earlier release has no business in the folder.
    await asyncio.to_thread(mark_release, machine.files, data, __version__)
    if config.cluster is None:
        alone = await asyncio.to_thread(machine.open_keys, folder.keys, config.region, runtime=runtime)
        stack.callback(alone.close)
    store = machine.store or await open_store(folder, config, runtime)
    stack.push_async_callback(store.close)
    await _claim(store, folder, config, own=RegionTrust(own), now_ms=now_ms())
    registration: Registration | None = None
    clustered: Clustered | None = None
    shared: StreamKeys | None = None
    keyring: RegionKeys
    key_files: list[KeyFile]
    rotation: Rotation
    destruction: Destruction | None = None
    if config.cluster is not None:
        clustered = await _join(
            store,
            folder,
            config,
            directory.lock_identity,
            machine.files,
            runtime,
            stack,
            log_keys=await asyncio.to_thread(_log_keys, folder, config, own),
            replace=replace_folder,
        )
        shared, rotation = await _share_keys(store, folder, config, machine, clustered.member, runtime, stack)
        keyring, destruction = shared.keyring, SharedDestruction(rotation)
        key_files = [shared, *([keyring.own] if keyring.own is not None else [])]
        # A machine that was stopped and goes on may have done so twice, from one image.
        clustered.member.on_lease(keyring.rotate_data)
    else:
        keyring, rotation, key_files = alone, KeyringRotation(alone), [alone]
        if config.metadata.kind == "etcd":
            await _refuse_cluster(store, config.region)
            # Before the audit log is opened, which may sign.
            registration = await Registration.open(
                store, config.region, _holder(folder, config, directory.lock_identity, now_ms())
            )
            stack.push_async_callback(registration.close)
    registered = registration if clustered is None else clustered.member
    catalog = Catalog(store, config.region)
    if clustered is not None:
        # Registered by now: who changes the keys of the log sees this broker, or this broker what was told.
        await require_log_key_of_now(catalog, own)
    mirror = CatalogMirror(store, config.region, runtime)
    await mirror.start()
    stack.push_async_callback(mirror.close)
    cosigned = WitnessMemory(
        store, config.region, DiskWitnessStore(data / "witness", machine.evidence), runtime
    )
    audited = None if clustered is None else clustered.member.audit.stream
    has_audit_log = clustered is None or audited is not None or clustered.has_audit_log

    def may_not_write() -> str:
        if clustered is not None and not clustered.has_audit_log:
            home = clustered.audit_home
            if not home:
                return "No broker leads the region's audit log"
            return f"The region's audit log is written by broker {home}"
        return _why(registered)

    def may_not_sign() -> str:
        if (
            clustered is not None
            and clustered.has_audit_log
            and audited is None
            and clustered.member.is_beginning
        ):
            # What stands on this disk alone, and has no checkpoint after a kill, is read at the start.
            return ""
        return may_not_write()

    before = None if clustered is None else clustered.member.audit.before
    if before is not None and before.broker == config.broker:
        await asyncio.to_thread(
            become_copied, data / AUDIT, before.size, bytes.fromhex(before.root), machine.evidence
        )
    witness, trail = await asyncio.to_thread(
        open_evidence,
        folder,
        config,
        own,
        cosigned,
        may_not_write,
        may_not_sign,
        name=AUDIT if has_audit_log else NO_AUDIT,
        files=machine.evidence,
        runtime=runtime,
        copied=audited is not None,
    )
    stack.push_async_callback(asyncio.to_thread, trail.close)
    for each in begun:
        await asyncio.to_thread(each.remember, runtime.random)
    witnesses = config.audit.witnesses if has_audit_log else ()
    submissions = Submissions(trail, [each.target(folder.root) for each in witnesses], runtime)
    # One note is to have the cosignatures of them all, and of the regions that bridges may lead to.
    files = await asyncio.to_thread(trusted_files, folder)
    known = {*mirror.trusted(), *(signed.bundle.region for signed in files)}
    trail.checkpoints.expect_cosigners(len(known) + len(config.audit.witnesses))
    submissions.start()
    stack.push_async_callback(asyncio.to_thread, submissions.stop)

    # A few more than sessions, so that the refusal is the broker's and has its sentence.
    transport_limits = TransportLimits(connections_max=config.limits.sessions + CONNECTIONS_SPARE)
    peers: Peers | None = None
    if clustered is not None:
        peers = Peers(
            clustered.member,
            directory,
            mirror.streams,
            LocalBroker(
                config.broker,
                config.region,
                config.mesh,
                clustered.member.registry.registration,
                clustered.member.registry.folder,
            ),
            # Made below, before anybody calls.
            identity=lambda: certificate.identity,
            anchor=own.anchor(),
            engine=machine.engine or engine_named(config.engine or None),
            limits=transport_limits,
            settings=lambda config: shard_settings(config, HOT_BYTES),
            make_seal=lambda name, incarnation, shard: KeyringSeal(keyring, name, incarnation, shard),
            open_logs=open_logs,
            runtime=runtime,
            streams_runtime=streams_runtime,
            system={} if audited is None else {AUDIT_STREAM: SystemStream(audited, LOGS)},
            scrub=Scrub(config.storage.scrub_rate, config.storage.scrub_every),
            copy_rate=config.storage.copy_rate,
        )
        links = peers.links
        streams_clock.others = lambda: links.clock_offsets
        clustered.replicas = peers.replicas
        clustered.requests, clustered.ends = peers.requests, peers.ends
        clustered.troubles = CopyTroubles(peers.requests, clustered.own_troubles)
        stack.push_async_callback(peers.close)
    budgets = Budgets()
    streams = StreamTable(
        directory,
        budgets.ring,
        lambda name, incarnation, shard: KeyringSeal(keyring, name, incarnation, shard),
        lambda: None if registered is None else registered.refusal(),
        streams_runtime,
        open_logs,
        clustered,
    )
    broker = Broker(
        config,
        streams=streams,
        catalog=catalog,
        budgets=budgets,
        transport_limits=transport_limits,
        runtime=runtime,
        clustered=clustered,
        streams_clock=None if config.cluster is None else streams_clock,
    )
    if clustered is not None and peers is not None:
        clustered.tell_others(broker.bridges)
        view = clustered.member.mirror.view
        exchange = QuotaExchange(broker, peers.requests, lambda: view.alive)
        stack.push_async_callback(exchange.close)
    if destruction is None:
        ledger = DestroyedKeys(store, config.region)
        await ledger.load()
        destruction = KeyringDestruction(alone, ledger, lambda: mirror.deleted_streams, streams.is_closed)
    broker.erasure = erasure = Erasure(
        destruction,
        trail,
        config.region,
        runtime.clock.now_ms,
        lambda: clustered is None or clustered.has_audit_log,
    )
    stack.push_async_callback(erasure.close)
    certificate = BrokerCertificate(config, authority, issuing, certification, broker.expiries, now_ms)
    caches = CacheService(broker)
    landings = Landings()
    memory = Memory(data / "governance", runtime, machine.files)
    stack.push_async_callback(asyncio.to_thread, memory.close)
    broker.own_files = OwnFiles(store, key_files, memory, runtime.clock)
    remembered = await asyncio.to_thread(memory.load)
    logged = await asyncio.to_thread(DocumentLog.open, trail, memory.folder / "logged", runtime.clock)
    # If store and copies come from a backup, the audit log still has the later documents that forbid.
    forgotten = await asyncio.to_thread(logged.forgotten, remembered.every())
    counting = accepted_by_leaf(forgotten, logged, OwnWords(own))
    remembered = remembered._replace(documents=[*remembered.documents, *counting])
    audit: AuditPort = trail
    index = ArrivalIndex(trail)
    arrivals: ArrivalLog = index
    neighbours: Neighbours = Alone()
    if clustered is not None and peers is not None:
        audit, arrivals, neighbours = _among_others(
            config.region, clustered, mirror, peers.requests, trail, logged, index, now_ms, stack
        )
    governance = Governance(
        broker, catalog, mirror,
        KeyService(keyring, rotation, trail, config.region, runtime.clock.now_ms), trail,
        Witnessing(witness, trail, config.region, runtime.clock, submissions),
        own,
        await asyncio.to_thread(load_signing_key, folder.audit_key),
        lambda: pinned_bundles(folder),
        memory, remembered, logged, landings.drained, audit, arrivals, neighbours,
        await asyncio.to_thread(signed_pins, folder, own),
        decode_logged(await asyncio.to_thread(logged.pins), own),
        instead := await asyncio.to_thread(keys_made_instead, folder),
    )  # fmt: skip
    import_key = await asyncio.to_thread(load_key_pair, folder.import_key)
    receipt_key = await asyncio.to_thread(load_signing_key, folder.receipt_key)
    require_of_now(own, receipt_key, logged.signing_keys, instead)
    if peers is not None:
        peers.requests.serve(StreamsPassed, partial(_passed, governance, streams))
    export = ExportService(broker, governance, keyring, receipt_key)
    ingest = IngestService(broker, governance, landings, import_key, receipt_key)
    if shared is not None:
        streams.before_opening.append(_ensure_key(shared))
    # Nobody sees a stream before all that landed in it over a border is in the ingress log.
    streams.before_found.append(ingest.settle)
    stack.callback(ingest.close)
    stack.push_async_callback(governance.close)
    subscriptions = SubscriptionService(broker, catalog, mirror)
    queues = QueueService(broker)
    participants: dict[str, Participant] = {
        "subscription": SubscriptionParticipant(broker, subscriptions),
        "queue": QueueParticipant(broker, queues),
    }
    leaders = None
    if clustered is not None and peers is not None:
        leaders = StreamLeaders(broker, clustered, peers.requests)
    transactions = Coordinator(broker, participants, leaders=leaders)
    if clustered is not None and peers is not None:
        lanes = Lanes(broker, clustered, peers.requests, participants, transactions.may_be_decided)
        streams.before_serving.append(transactions.lead)
    relays = RelayService(broker, clustered, relays_max)
    stack.callback(relays.close)
    services = Services(
        broker,
        governance.verify,
        governance,
        export,
        Requests(
            broker,
            governance,
            export,
            catalog,
            mirror,
            subscriptions,
            ViewTraffic([subscriptions.traffic, queues.traffic], caches.traffic),
        ),
        # The authority is read each time: a renewed issuing certificate is taken without a restart.
        IdentityRenewal(broker, lambda: authority().without_root_key(), governance.keys.record),
        {
            OpenIngest: ingest.open,
            OpenTransactions: TransactionService(broker, transactions).open,
            OpenConsumer: subscriptions.open,
            OpenCache: caches.open,
            WatchCache: watch.opener(caches),
            OpenQueue: queue_opener(queues),
            OpenRelay: relays.open,
        },
        relays,
    )

    follower = StreamFollower(streams, mirror, landings.opened)
    governance.follow()
    if (over := governance.keys_over()) is not None:
        # By the store: this broker may have no copy of the log.
        raise over
    # Of the store's pins and this broker's own, the later ones are known now.
    await offer_bundles(*governance.lacking(files), catalog, mirror)
    governance.strays.start()
    stack.push_async_callback(governance.strays.close)
    governance.put_back.start()
    stack.push_async_callback(governance.put_back.close)
    _follow_settings(broker, mirror)
    if clustered is not None:
        clustered.receives = governance.receives
        _follow_wishes(clustered, mirror, follower)
        assert peers is not None
        peers.replicas.on_led(follower.assigned)
        # What landed and has no leaf yet keeps its stream from being served until the broker with the audit log is reached.
        peers.requests.on_linked(follower.look)
        await peers.replicas.open()
        peers.replicas.release = streams.release
        peers.replicas.notes_from = ingest.notes_from
        if audited is not None:
            assert shared is not None
            clustered.audit = _copy_audit_log(
                audited,
                before,
                peers.replicas,
                directory,
                governance,
                shared,
                clustered.member,
                open_logs,
                cosigned,
                runtime,
            )
            # Nothing is signed before this broker is home.
            cosigned.copies = clustered.audit
            clustered.audit.start()
            stack.push_async_callback(clustered.audit.close)
    await streams.remove_marked(mirror.deleted_streams)
    stack.push_async_callback(streams.close)
    stack.push_async_callback(queues.close)
    records = dict(mirror.streams)
    if clustered is not None:
        for record in records.values():
            if clustered.may_hold_arrivals(record):
                landings.unopened(StreamName.parse(record.name))
        _follow_arrivals(clustered, mirror, landings)
    # Committed transactions are applied before their streams serve.
    system = records.pop(TRANSACTIONS_STREAM, None)
    if system is not None:
        await streams.open(system)
    if clustered is None:
        await transactions.start(streams)

    async def open_stream(record: Stream) -> None:
        try:
            await streams.open(record)
        except FelixError as error:
            # One stream that does not fit must not keep the others from being served.
            log.error("stream %s cannot be opened: %s", record.name, error)
            name = StreamName.parse(record.name)
            if clustered is None:
                landings.unopened(name)  # of several brokers, what may be here alone is waited for already
            follower.retry(name)
        else:
            follower.assigned(record.name)

    with collector_paused():
        await at_once(OPENED_AT_ONCE, open_stream, records.values())
    landings.streams_opened()

    erasure.start()
    _follow_deletions(mirror, rotation, erasure)

    await subscriptions.start()
    stack.push_async_callback(subscriptions.close)

    if clustered is None:
        await transactions.started()
    else:
        stack.push_async_callback(lanes.close)
    stack.push_async_callback(transactions.close)
    return Parts(
        broker,
        directory,
        streams,
        follower,
        services,
        caches,
        queues,
        subscriptions,
        transactions,
        certificate,
        registration,
        clustered,
        peers,
    )


async def _share_keys(
    store: MetadataStore,
    folder: RegionFolder,
    config: RegionConfig,
    machine: Machine,
    member: ClusterMember,
    runtime: Runtime,
    stack: AsyncExitStack,
) -> tuple[StreamKeys, KeyRotation]:
    """The keys that the brokers of a cluster share, and their rotation. Raises as `StreamKeys.open`, and what opening a key file raises."""
    region, own_folder = config.region, folder.root / config.data / "keys"

    def open_files() -> tuple[SharedKeyring, KeyStore]:
        own = None
        if (own_folder / KEY_FILE).exists():
            # Of a release in which each broker had a keyring of its own.
            own = machine.open_keys(own_folder, region, runtime=runtime)
            stack.callback(own.close)
        copies = open_copies(own_folder, region, monotonic=runtime.clock.monotonic)
        stack.callback(copies.close)
        provider = open_provider(folder.keys, region, runtime)
        return SharedKeyring(region, provider, own, former=folder.keys, runtime=runtime), copies

    keyring, copies = await asyncio.to_thread(open_files)
    shared = StreamKeys(
        store,
        keyring,
        copies,
        lambda: find_first_root(folder.keys, region, keyring.provider),
        config.broker,
        runtime,
    )
    stack.push_async_callback(shared.close)
    rotation = KeyRotation(store, shared, config.broker, lambda: member.brokers, runtime)
    await shared.open()
    await rotation.start()
    stack.push_async_callback(rotation.close)
    return shared, rotation


def _among_others(
    region: str,
    clustered: Clustered,
    mirror: CatalogMirror,
    requests: PeerRequests,
    trail: Trail,
    logged: DocumentLog,
    index: ArrivalIndex,
    now_ms: Callable[[], int],
    stack: AsyncExitStack,
) -> tuple[AuditPort, ArrivalLog, Neighbours]:
    """How one of several brokers reaches the region's audit log, on its own disk or on another one's, and what it tells the others of it."""
    member = clustered.member
    is_copied = member.audit.stream is not None
    if is_copied or clustered.has_audit_log:
        here = HomeLeaves(
            member.broker,
            lambda: member.brokers,
            partial(_may_hold_arrivals, clustered, mirror),
            requests.is_up,
            lambda concerned: clustered.leaders(mirror.streams, concerned),
            lambda broker, asked: requests.ask(broker, asked, PassedTold),
        )
        server = AuditServer(requests, trail, index, logged, here, now_ms, lambda: clustered.has_audit_log)
        stack.push_async_callback(server.close)
        if not is_copied:
            return server, index, here
    remote = RemoteAudit(region, requests, lambda: clustered.audit_home)
    stack.push_async_callback(remote.close)
    if not is_copied:
        return remote, remote.arrivals, remote.leaves
    member.on_assigned(lambda name: requests.news.tell() if name == str(AUDIT_STREAM) else None)
    return remote, remote.arrivals, MovingLeaves(here, remote.leaves, lambda: clustered.has_audit_log)


def _copy_audit_log(
    record: Stream,
    before: Before | None,
    replicas: Replicas,
    directory: LogDirectory,
    governance: Governance,
    shared: StreamKeys,
    member: ClusterMember,
    open_logs: OpenLogs,
    cosigned: WitnessMemory,
    runtime: Runtime,
) -> AuditLog:
    """The part that this broker has in the audit log that several brokers copy."""
    incarnation, logged, keys = bytes.fromhex(record.incarnation), governance.logged, governance.keys

    async def taken() -> None:
        new = await asyncio.to_thread(logged.refresh)
        # A broker that began with an older copy of the log, or none, may have keys that the region gave up: the start could not know.
        governance.look_at_keys()
        if new:
            governance.remember_pins(await asyncio.to_thread(logged.pins))
            governance.decide_again()
        keys.know(await asyncio.to_thread(logged.recent_keys))

    return AuditLog(
        record,
        replicas.host,
        directory,
        governance.trail,
        lambda kind: replicas.host.lead(ShardId(record.incarnation, 0), kind),
        lambda number: KeyringSeal(shared.keyring, AUDIT_STREAM, incarnation, number),
        lambda seal: ShardHooks(
            seal.seal,
            seal.open_batch,
            seal.commitment,
            refusal=member.refusal,
            runtime=runtime,
            open_logs=open_logs,
        ),
        has_key=lambda: shared.ensure(AUDIT_STREAM, incarnation),
        taken=taken,
        refusal=governance.keys_refusal,
        see_log_key=governance.see_log_key,
        may_sign=governance.require_log_key,
        # What the store has without a leaf gets it now.
        became_home=governance.decide_again,
        witnessed=cosigned,
        before=before,
        runtime=runtime,
    )


def _ensure_key(shared: StreamKeys) -> Callable[[StreamName, Stream], Awaitable[None]]:
    """What gives a stream its key before its logs are opened. What is only in memory is not sealed."""

    async def ensure(name: StreamName, record: Stream) -> None:
        if record.config.durability.kind != "ephemeral":
            await shared.ensure(name, bytes.fromhex(record.incarnation))

    return ensure


async def _passed(
    governance: Governance, streams: StreamTable, peer: str, asked: StreamsPassed
) -> PassedTold:
    """What is asked of the leader of streams with copies. A stream that is served here has all that arrived before under a leaf."""
    if not await governance.passed_here(asked.digest):
        return PassedTold(False, [])
    served = (streams.get(StreamName.parse(name)) for name in asked.streams)
    return PassedTold(
        True, [str(stream.name) for stream in served if stream is not None and stream.is_served]
    )


def _may_hold_arrivals(clustered: Clustered, mirror: CatalogMirror, broker: str) -> Iterator[StreamName]:
    """The streams of which a broker's disk may have records that came over a border, and have no leaf yet."""
    for record in mirror.streams.values():
        if clustered.may_hold_arrivals(record, broker):
            yield StreamName.parse(record.name)


def _follow_arrivals(clustered: Clustered, mirror: CatalogMirror, landings: Landings) -> None:
    """What may have arrived in a stream and has no leaf yet is no longer waited for here once another broker has its records, too, or alone: whoever leads
    it writes the leaves before it is served, and is waited for."""

    def look(name: StreamName) -> None:
        record = mirror.streams.get(name)
        if record is not None and clustered.placed_on(record) and not clustered.may_hold_arrivals(record):
            landings.opened(name)

    def changed(change: MirrorChange) -> None:
        if change.section == "streams":
            look(StreamName.parse(change.name))

    clustered.member.on_assigned(lambda name: look(StreamName.parse(name)))
    mirror.on_change(changed)


def _follow_wishes(clustered: Clustered, mirror: CatalogMirror, follower: StreamFollower) -> None:
    """The controller places what the catalog has, and what this broker leads is opened."""
    member, replicas = clustered.member, clustered.replicas
    assert replicas is not None

    def changed(change: MirrorChange) -> None:
        if change.section in ("streams", "deleted", "grants"):
            member.catalog_changed()
        if change.section == "streams":
            replicas.look_at(change.name)

    def catalogued() -> Catalogued:
        streams = mirror.streams.values()
        return Catalogued(
            streams,
            mirror.deletions(),
            places_together(streams, mirror.subscriptions.values()),
            lambda stream: clustered.why_it_stays(stream) != "",
        )

    member.follow(catalogued)
    mirror.on_change(changed)
    member.on_assigned(follower.assigned)


def _follow_deletions(mirror: CatalogMirror, rotation: Rotation, erasure: Erasure) -> None:
    """Keys of deleted streams go, also where another broker was asked to delete them."""

    def changed(change: MirrorChange) -> None:
        if change.section == "deleted":
            erasure.look_soon()

    mirror.on_change(changed)
    if isinstance(rotation, KeyRotation):
        rotation.on_news.append(erasure.look_soon)


def _follow_settings(broker: Broker, mirror: CatalogMirror) -> None:
    """Rights, quotas and namespaces as the catalog has them, now and at each change."""
    takers: dict[str, Callable[[], None]] = {
        "rights": lambda: broker.set_rights(mirror.rights_table()),
        "quotas": lambda: broker.set_quotas(mirror.quotas),
        "namespaces": lambda: broker.set_namespaces(mirror.namespaces),
    }

    def changed(change: MirrorChange) -> None:
        if take := takers.get(change.section):
            take()

    for take in takers.values():
        take()
    mirror.on_change(changed)


class _Registered(Protocol):
    def refusal(self) -> UnavailableError | None: ...


def _why(registered: _Registered | None) -> str:
    refusal = None if registered is None else registered.refusal()
    return "" if refusal is None else refusal.sentence.removesuffix(".")


async def _join(
    store: MetadataStore,
    folder: RegionFolder,
    config: RegionConfig,
    lock: str,
    files: Files,
    runtime: Runtime,
    stack: AsyncExitStack,
    *,
    log_keys: Sequence[VerifyKey],
    replace: bool,
) -> Clustered:
    """Become a member of the region's cluster. Raises as `ClusterMember.open`, and RequestError where the region was served by one broker
    alone: what that one has, this one has not."""
    cluster, place = config.cluster, config.own_place
    assert cluster is not None and place is not None
    served = await store.get(region_prefix(config.region) + "registered")
    if served is not None and is_holder(served.value):
        raise RequestError(
            f"{config.region} was served by one broker, whose records are on its disk: several brokers would begin its streams anew.",
            code=Code.CONFLICT,
            hint=f"Start it without cluster: in region.yaml, or turn it into one of several: felix region to-cluster {config.region}.",
        )
    address = str(place.client_address)
    member = await ClusterMember.open(
        store,
        config.region,
        Start(
            config.broker,
            place.host or socket.gethostname(),
            boot_id(),
            lock,
            zone=place.zone,
            version=__version__,
        ),
        NodeFile(files, folder.root / config.data, runtime.random),
        MemberAddress(address, address),
        lease_ms=cluster.lease,
        audit_copies=min(AUDIT_COPIES, len(cluster.brokers)),
        log_keys=log_keys,
        runtime=runtime,
        replace=replace,
    )
    stack.push_async_callback(member.close)
    return Clustered(member)


async def _refuse_cluster(store: MetadataStore, region: str) -> None:
    """Raises RequestError where several brokers have the region's records: one alone would begin its streams anew."""
    nodes = await store.range(f"{region_prefix(region)}nodes/", limit=1)
    if nodes.entries:
        raise _several(region)


def _begun_folders(folder: RegionFolder, config: RegionConfig, machine: Machine) -> list[BegunFolder]:
    """What may lie on disks of its own, the outermost first. Of one of several brokers the metadata store knows the data folder, and others have copies of the audit log."""
    data, memory = folder.root / config.data, folder.root / f"data{SUFFIX}"
    streams, streams_memory = data / STREAMS, data / f"{STREAMS}{SUFFIX}"
    if config.cluster is not None:
        up = f"felix region up {config.region} --broker {config.broker} --replace-folder"
        lost = f"Where it is lost for good, move {data} aside, and have its copies made anew: {up} (docs/clusters.md, A data folder is lost)."
        return [BegunFolder(machine.files, streams, streams_memory, lost)]
    empty = f"Where it is lost for good, and streams are to begin empty: remove {streams_memory}."
    gone = "Where it is lost for good: docs/operations.md, When a region's audit log is gone for good."
    return [
        BegunFolder(machine.files, data, memory, gone),
        BegunFolder(machine.files, streams, streams_memory, empty),
        BegunFolder(machine.evidence, data / AUDIT, data / f"{AUDIT}{SUFFIX}", gone),
    ]


def _refuse_folders(data: Path, region: str) -> None:
    """The same, by the folders of such brokers on this machine. Blocks."""
    if any(data.glob(f"*/{NODE_FILE}")):
        raise _several(region)


def _several(region: str) -> RequestError:
    return RequestError(
        f"{region} is served by several brokers, whose records are on their disks: one alone would begin its streams anew.",
        code=Code.CONFLICT,
        hint=f"Keep cluster: in region.yaml, and metadata: with its etcd. Where `felix region to-cluster {region}` was cut off, run it again.",
    )


async def _claim(
    store: MetadataStore, folder: RegionFolder, config: RegionConfig, *, own: RegionTrust, now_ms: int
) -> None:
    """The store is this region's, from its first use on. Raises what `claim_or_verify` raises."""
    audit_key = await asyncio.to_thread(load_signing_key, folder.audit_key)
    root = hashlib.sha256(own.bundle.root_pem.encode()).hexdigest()
    genesis = sign_genesis(config.region, config.mesh, root, now_ms, audit_key)
    await claim_or_verify(store, genesis, audit_key.verify_key, _earlier_log_keys(config, own))


def _log_keys(folder: RegionFolder, config: RegionConfig, own: RegionBundle) -> list[VerifyKey]:
    """The Ed25519 keys of the region's own audit log, the one that signs it first. Blocks."""
    return [load_signing_key(folder.audit_key).verify_key, *_earlier_log_keys(config, RegionTrust(own))]


def _earlier_log_keys(config: RegionConfig, own: RegionTrust) -> list[VerifyKey]:
    return [
        VerifyKey(key.public)
        for key in own.logs
        if key.name == region_origin(config.region, config.mesh) and key.algorithm is Algorithm.ED25519
    ]


async def open_store(folder: RegionFolder, config: RegionConfig, runtime: Runtime) -> MetadataStore:
    """The region's metadata store, as its configuration says. Raises what opening it raises."""
    settings, base = config.metadata, folder.root
    if settings.kind == "embedded":
        return await EmbeddedStore.open(base / config.data / "metadata.db", runtime=runtime)

    def path(text: str) -> Path | None:
        return base / text if text else None

    password = ""
    if settings.password_file:
        try:
            password = (await asyncio.to_thread((base / settings.password_file).read_text)).strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise RequestError(
                f"The file with the metadata store's password, {base / settings.password_file}, cannot be read: {why}.",
                code=Code.CONFIG_INVALID,
                hint="Put it there, or name another with metadata.password_file.",
            ) from error
    tls = EtcdTls(path(settings.ca), path(settings.cert), path(settings.key)) if settings.ca else None
    return await EtcdStore.open(
        EtcdConfig(endpoints=settings.endpoints, tls=tls, user=settings.user, password=password)
    )


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
