"""A broker, opened: everything but the listener."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from felix.collector import collector_paused
from felix.errors import FelixError
from felix.names import StreamName
from felix.runtime.port import Runtime
from felix.told import Told
from felix.transaction_messages import TRANSACTIONS_STREAM
from region.at_once import at_once
from region.broker import Broker
from region.broker_certificate import BrokerCertificate
from region.cache.service import CacheService
from region.cluster.key_rotation import KeyRotation
from region.cluster.member import Catalogued
from region.clustered import Clustered
from region.config import RegionConfig
from region.copies.peers import Peers
from region.crossing.landings import Landings
from region.folder import RegionFolder
from region.key_service import Rotation
from region.log.directory import LogDirectory
from region.metadata.mirror import CatalogMirror, MirrorChange
from region.metadata.records import Stream
from region.metadata.registration import Registration
from region.queue.service import QueueService
from region.retention_clock import RetentionClock
from region.session.client_session import Services
from region.startup.evidence import Evidence, open_audit_log
from region.startup.governing import Governing, begin_judging, copy_audit_log, open_governance
from region.startup.ground import Ground, Machine, open_ground
from region.startup.metadata import Metadata, open_metadata, why_not
from region.startup.serving import Serving, open_serving
from region.startup.views import open_views
from region.streams.erasure import Erasure
from region.streams.follower import StreamFollower
from region.streams.table import StreamTable
from region.subscriptions.service import SubscriptionService
from region.transactions.coordinator import Coordinator
from region.views.together import places_together

log = logging.getLogger("felix.region.startup")

OPENED_AT_ONCE: Final = 8
"""Streams that a start opens together: twice as many as there are threads that look at their folders."""


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
    retention_clock: RetentionClock

    def may_not_write(self) -> str:
        """Why nothing may be appended, as a sentence without its end; empty where the broker may write. Also asked from other threads."""
        return why_not(self.registration if self.clustered is None else self.clustered.member)


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
    ground = await open_ground(folder, config, runtime, machine, stack)
    metadata = await open_metadata(ground, replace_folder=replace_folder)
    evidence = await open_audit_log(ground, metadata)
    serving = await open_serving(ground, metadata, evidence)
    governing = await open_governance(ground, metadata, evidence, serving)
    views = open_views(ground, metadata, serving, governing)
    streams, mirror, clustered = serving.streams, metadata.mirror, metadata.clustered
    broker = serving.broker
    retention_clock = await asyncio.to_thread(
        RetentionClock,
        machine.files,
        ground.data,
        broker.streams_ms,
        broker.boot_ms,
        Told(runtime.clock.monotonic),
    )
    follower = StreamFollower(streams, mirror, governing.landings.opened)
    await begin_judging(ground, metadata, evidence, governing)
    _follow_settings(broker, mirror)
    if clustered is not None:
        await _begin_copies(ground, metadata, evidence, serving, governing, follower)
    await streams.remove_marked(mirror.deleted_streams)
    stack.push_async_callback(streams.close)
    stack.push_async_callback(views.queues.close)
    await _open_streams(metadata, streams, governing.landings, views.transactions, follower)
    serving.erasure.start()
    _follow_deletions(mirror, metadata.keys.rotation, serving.erasure)
    await views.subscriptions.start()
    stack.push_async_callback(views.subscriptions.close)
    if views.lanes is None:
        await views.transactions.started()
    else:
        stack.push_async_callback(views.lanes.close)
    stack.push_async_callback(views.transactions.close)
    return Parts(
        broker,
        ground.directory,
        streams,
        follower,
        views.services,
        views.caches,
        views.queues,
        views.subscriptions,
        views.transactions,
        serving.certificate,
        metadata.registration,
        clustered,
        serving.peers,
        retention_clock,
    )


async def _begin_copies(
    ground: Ground,
    metadata: Metadata,
    evidence: Evidence,
    serving: Serving,
    governing: Governing,
    follower: StreamFollower,
) -> None:
    """One of several brokers: its copies are opened, and go on as the cluster's records say."""
    clustered, peers = metadata.clustered, serving.peers
    assert clustered is not None and peers is not None
    clustered.receives = governing.governance.receives
    _follow_wishes(clustered, metadata.mirror, follower)
    peers.replicas.on_led(follower.assigned)
    # What landed and has no leaf yet keeps its stream from being served until the broker with the audit log is reached.
    peers.requests.on_linked(follower.look)
    await peers.replicas.open()
    peers.replicas.release = serving.streams.release
    peers.replicas.notes_from = governing.ingest.notes_from
    clustered.audit = copy_audit_log(ground, metadata, evidence, governing, peers)
    if clustered.audit is not None:
        # Nothing is signed before this broker is home.
        evidence.cosigned.copies = clustered.audit
        clustered.audit.start()
        ground.stack.push_async_callback(clustered.audit.close)


async def _open_streams(
    metadata: Metadata,
    streams: StreamTable,
    landings: Landings,
    transactions: Coordinator,
    follower: StreamFollower,
) -> None:
    """Open what the catalog has and this broker serves. One that does not fit is told, and tried again."""
    mirror, clustered = metadata.mirror, metadata.clustered
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
