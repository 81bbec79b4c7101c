"""The streams that a broker serves, and its links to the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from felix.transport.port import TransportLimits, engine_named
from region.broker import Broker
from region.broker_certificate import BrokerCertificate
from region.copies.copy_troubles import CopyTroubles
from region.copies.peers import Peers
from region.copies.replicas import SystemStream
from region.evidence.audit_log import LOGS
from region.limits.budget import Budgets
from region.log.scrub import Scrub
from region.metadata.destroyed_keys import DestroyedKeys
from region.metadata.records import AUDIT_STREAM
from region.quota_exchange import QuotaExchange
from region.replication.links import LocalBroker
from region.startup.evidence import Evidence
from region.startup.ground import Ground
from region.startup.metadata import Metadata
from region.streams.erasure import Destruction, Erasure, KeyringDestruction
from region.streams.sealing import KeyringSeal
from region.streams.settings import HOT_BYTES, shard_settings
from region.streams.table import StreamTable

CONNECTIONS_SPARE: Final = 256
"""Connections beyond the limit of sessions: clients that are refused, or have not authenticated yet."""


@dataclass(frozen=True, slots=True)
class Serving:
    """`peers`: links to the other brokers and copies of their logs, of one of several."""

    broker: Broker
    streams: StreamTable
    erasure: Erasure
    certificate: BrokerCertificate
    peers: Peers | None


async def open_serving(ground: Ground, metadata: Metadata, evidence: Evidence) -> Serving:
    """Everything that a stream is served with; no stream yet."""
    config, runtime, machine, stack = ground.config, ground.runtime, ground.machine, ground.stack
    clustered, keyring = metadata.clustered, metadata.keys.keyring
    # A few more than sessions, so that the refusal is the broker's and has its sentence.
    transport_limits = TransportLimits(connections_max=config.limits.sessions + CONNECTIONS_SPARE)
    peers: Peers | None = None
    if clustered is not None:
        peers = Peers(
            clustered.member,
            ground.directory,
            metadata.mirror.streams,
            LocalBroker(
                config.broker,
                config.region,
                config.mesh,
                clustered.member.registry.registration,
                clustered.member.registry.folder,
            ),
            # Made below, before anybody calls.
            identity=lambda: certificate.identity,
            anchor=ground.own.anchor(),
            engine=machine.engine or engine_named(config.engine or None),
            limits=transport_limits,
            settings=lambda config: shard_settings(config, HOT_BYTES),
            make_seal=lambda name, incarnation, shard: KeyringSeal(keyring, name, incarnation, shard),
            open_logs=ground.open_logs,
            runtime=runtime,
            streams_runtime=ground.streams_runtime,
            system={} if evidence.copied is None else {AUDIT_STREAM: SystemStream(evidence.copied, LOGS)},
            scrub=Scrub(config.storage.scrub_rate, config.storage.scrub_every),
            copy_rate=config.storage.copy_rate,
        )
        links = peers.links
        ground.streams_clock.others = lambda: links.clock_offsets
        clustered.replicas = peers.replicas
        clustered.requests, clustered.ends = peers.requests, peers.ends
        clustered.troubles = CopyTroubles(peers.requests, clustered.own_troubles)
        stack.push_async_callback(peers.close)
    budgets = Budgets()
    registered = metadata.registered
    streams = StreamTable(
        ground.directory,
        budgets.ring,
        lambda name, incarnation, shard: KeyringSeal(keyring, name, incarnation, shard),
        lambda: None if registered is None else registered.refusal(),
        ground.streams_runtime,
        ground.open_logs,
        clustered,
    )
    broker = Broker(
        config,
        streams=streams,
        catalog=metadata.catalog,
        budgets=budgets,
        transport_limits=transport_limits,
        runtime=runtime,
        clustered=clustered,
        streams_clock=None if config.cluster is None else ground.streams_clock,
    )
    if clustered is not None and peers is not None:
        clustered.disk_problems = streams.disks.problems
        clustered.tell_others(broker.bridges)
        view = clustered.member.mirror.view
        exchange = QuotaExchange(broker, peers.requests, lambda: view.alive)
        stack.push_async_callback(exchange.close)
    broker.erasure = erasure = Erasure(
        await _destruction(metadata, streams, config.region),
        evidence.trail,
        config.region,
        runtime.clock.now_ms,
        lambda: clustered is None or clustered.has_audit_log,
    )
    stack.push_async_callback(erasure.close)
    certificate = BrokerCertificate(
        config, ground.authority, ground.issuing, ground.certification, broker.expiries, runtime.clock.now_ms
    )
    return Serving(broker, streams, erasure, certificate, peers)


async def _destruction(metadata: Metadata, streams: StreamTable, region: str) -> Destruction:
    """How keys are destroyed: all brokers let go of those that they share."""
    keys = metadata.keys
    if keys.destruction is not None:
        return keys.destruction
    assert keys.alone is not None
    ledger = DestroyedKeys(metadata.store, region)
    await ledger.load()
    return KeyringDestruction(keys.alone, ledger, lambda: metadata.mirror.deleted_streams, streams.is_closed)
