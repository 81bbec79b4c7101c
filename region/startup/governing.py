"""What may cross a border, as a broker judges it: the documents that it knows, their leaves, and the two ends of links."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

from felix.names import SpiffeId, StreamName
from keys.key_file import load_key_pair, load_signing_key
from keys.pin import decode_logged
from region.cluster.records import ShardId
from region.cluster.stream_keys import StreamKeys
from region.clustered import Clustered
from region.copies.peer_requests import PeerRequests
from region.copies.peers import Peers
from region.crossing.export import ExportService
from region.crossing.ingest import IngestService
from region.crossing.landings import Landings
from region.evidence.arrival_index import ArrivalIndex
from region.evidence.audit_log import AuditLog
from region.evidence.audit_port import ArrivalLog, AuditPort
from region.evidence.audit_requests import PassedTold, StreamsPassed
from region.evidence.audit_server import AuditServer
from region.evidence.document_log import DocumentLog
from region.evidence.home_leaves import HomeLeaves, MovingLeaves
from region.evidence.remote_audit import RemoteAudit
from region.evidence.witnessing import Witnessing
from region.governance.lasting import accepted_by_leaf
from region.governance.leaves import Alone, Neighbours
from region.governance.own_words import OwnWords
from region.governance.service import Governance
from region.governance.unclean_leaves import UncleanLeaves
from region.key_service import KeyService
from region.log.shard import ShardHooks
from region.metadata.mirror import CatalogMirror
from region.metadata.records import AUDIT_STREAM, Stream
from region.own_files import OwnFiles
from region.startup.evidence import Evidence
from region.startup.ground import Ground
from region.startup.metadata import Metadata
from region.startup.serving import Serving
from region.streams.sealing import KeyringSeal
from region.streams.table import StreamTable
from region.trust.signing_keys import keys_made_instead, require_of_now
from region.trust.trust_store import Memory
from region.trust.trusted_bundles import offer_bundles, pinned_bundles, signed_pins


@dataclass(frozen=True, slots=True)
class Governing:
    """`export` and `ingest`: the ends of links here; `landings`: what arrived and has no leaf yet."""

    governance: Governance
    export: ExportService
    ingest: IngestService
    landings: Landings
    unclean: UncleanLeaves | None
    """of one of several brokers"""


async def open_governance(
    ground: Ground, metadata: Metadata, evidence: Evidence, serving: Serving
) -> Governing:
    """Read what was known of documents, here and in the log. Nothing is judged before `begin_judging`."""
    folder, config, runtime, stack = ground.folder, ground.config, ground.runtime, ground.stack
    broker, streams, trail, clustered = serving.broker, serving.streams, evidence.trail, metadata.clustered
    landings = Landings()
    memory = Memory(ground.data / "governance", runtime, ground.machine.files)
    stack.push_async_callback(asyncio.to_thread, memory.close)
    broker.own_files = OwnFiles(metadata.store, metadata.keys.files, memory, runtime.clock)
    remembered = await asyncio.to_thread(memory.load)
    logged = await asyncio.to_thread(DocumentLog.open, trail, memory.folder / "logged", runtime.clock)
    # If store and copies come from a backup, the audit log still has the later documents that forbid.
    forgotten = await asyncio.to_thread(logged.forgotten, remembered.every())
    counting = accepted_by_leaf(forgotten, logged, OwnWords(ground.own))
    remembered = remembered._replace(documents=[*remembered.documents, *counting])
    index = ArrivalIndex(trail)
    audit: AuditPort = trail
    arrivals: ArrivalLog = index
    neighbours: Neighbours = Alone()
    unclean: UncleanLeaves | None = None
    if clustered is not None and serving.peers is not None:
        audit, arrivals, neighbours = _among_others(
            ground, clustered, metadata.mirror, serving.peers.requests, evidence, logged, index
        )
        unclean = UncleanLeaves(
            clustered.member.mirror,
            SpiffeId(config.region, config.mesh, "broker", config.broker),
            trail,
            logged,
            lambda: neighbours.writes_here,
            runtime.clock.now_ms,
        )
    governance = Governance(
        broker, metadata.catalog, metadata.mirror,
        KeyService(metadata.keys.keyring, metadata.keys.rotation, trail, config.region, runtime.clock.now_ms), trail,
        Witnessing(evidence.witness, trail, config.region, runtime.clock, evidence.submissions),
        ground.own,
        await asyncio.to_thread(load_signing_key, folder.audit_key),
        lambda: pinned_bundles(folder),
        memory, remembered, logged, landings.drained, audit, arrivals, neighbours,
        await asyncio.to_thread(signed_pins, folder, ground.own),
        decode_logged(await asyncio.to_thread(logged.pins), ground.own),
        instead := await asyncio.to_thread(keys_made_instead, folder),
    )  # fmt: skip
    import_key = await asyncio.to_thread(load_key_pair, folder.import_key)
    receipt_key = await asyncio.to_thread(load_signing_key, folder.receipt_key)
    require_of_now(ground.own, receipt_key, logged.signing_keys, instead)
    if serving.peers is not None:
        serving.peers.requests.serve(StreamsPassed, partial(_passed, governance, streams))
    export = ExportService(broker, governance, metadata.keys.keyring, receipt_key)
    ingest = IngestService(broker, governance, landings, import_key, receipt_key)
    if metadata.keys.shared is not None:
        streams.before_opening.append(_ensure_key(metadata.keys.shared))
    # Nobody sees a stream before all that landed in it over a border is in the ingress log.
    streams.before_found.append(ingest.settle)
    stack.callback(ingest.close)
    stack.push_async_callback(governance.close)
    if unclean is not None:
        stack.push_async_callback(unclean.close)
    return Governing(governance, export, ingest, landings, unclean)


async def begin_judging(ground: Ground, metadata: Metadata, evidence: Evidence, governing: Governing) -> None:
    """Judge by what the store has, from now on. Raises RequestError where the region gave up the keys that this broker has."""
    governance, stack = governing.governance, ground.stack
    governance.follow()
    if (over := governance.keys_over()) is not None:
        # By the store: this broker may have no copy of the log.
        raise over
    # Of the store's pins and this broker's own, the later ones are known now.
    await offer_bundles(*governance.lacking(evidence.trusted), metadata.catalog, metadata.mirror)
    governance.strays.start()
    stack.push_async_callback(governance.strays.close)
    governance.put_back.start()
    stack.push_async_callback(governance.put_back.close)
    if governing.unclean is not None:
        governing.unclean.follow()


def copy_audit_log(
    ground: Ground, metadata: Metadata, evidence: Evidence, governing: Governing, peers: Peers
) -> AuditLog | None:
    """The part that this broker has in the audit log that several brokers copy; None where one broker's disk has it. It is to be started."""
    record, clustered, shared = evidence.copied, metadata.clustered, metadata.keys.shared
    if record is None:
        return None
    assert clustered is not None and shared is not None
    governance, refusal = governing.governance, clustered.member.refusal
    incarnation, logged, keys = bytes.fromhex(record.incarnation), governance.logged, governance.keys

    async def taken() -> None:
        new = await asyncio.to_thread(logged.refresh)
        # A broker that began with an older copy of the log, or none, may have keys that the region gave up: the start could not know.
        governance.look_at_keys()
        if new:
            governance.remember_pins(await asyncio.to_thread(logged.pins))
            governance.decide_again()
        keys.know(await asyncio.to_thread(logged.recent_keys))

    def became_home() -> None:
        # What the store has without a leaf gets it now.
        governance.decide_again()
        if governing.unclean is not None:
            governing.unclean.look()

    return AuditLog(
        record,
        peers.replicas.host,
        ground.directory,
        governance.trail,
        lambda kind: peers.replicas.host.lead(ShardId(record.incarnation, 0), kind),
        lambda number: KeyringSeal(shared.keyring, AUDIT_STREAM, incarnation, number),
        lambda seal: ShardHooks(
            seal.seal,
            seal.open_batch,
            seal.commitment,
            refusal=refusal,
            runtime=ground.runtime,
            open_logs=ground.open_logs,
        ),
        has_key=lambda: shared.ensure(AUDIT_STREAM, incarnation),
        taken=taken,
        refusal=governance.keys_refusal,
        see_log_key=governance.see_log_key,
        may_sign=governance.require_log_key,
        became_home=became_home,
        witnessed=evidence.cosigned,
        before=evidence.before,
        runtime=ground.runtime,
    )


def _among_others(
    ground: Ground,
    clustered: Clustered,
    mirror: CatalogMirror,
    requests: PeerRequests,
    evidence: Evidence,
    logged: DocumentLog,
    index: ArrivalIndex,
) -> tuple[AuditPort, ArrivalLog, Neighbours]:
    """How one of several brokers reaches the region's audit log, on its own disk or on another one's, and what it tells the others of it."""
    member = clustered.member
    is_copied = evidence.copied is not None
    if is_copied or clustered.has_audit_log:
        here = HomeLeaves(
            member.broker,
            lambda: member.brokers,
            partial(_may_hold_arrivals, clustered, mirror),
            requests.is_up,
            lambda concerned: clustered.leaders(mirror.streams, concerned),
            lambda broker, asked: requests.ask(broker, asked, PassedTold),
        )
        server = AuditServer(
            requests,
            evidence.trail,
            index,
            logged,
            here,
            ground.runtime.clock.now_ms,
            lambda: clustered.has_audit_log,
        )
        ground.stack.push_async_callback(server.close)
        if not is_copied:
            return server, index, here
    remote = RemoteAudit(ground.config.region, requests, lambda: clustered.audit_home)
    ground.stack.push_async_callback(remote.close)
    if not is_copied:
        return remote, remote.arrivals, remote.leaves
    member.on_assigned(lambda name: requests.news.tell() if name == str(AUDIT_STREAM) else None)
    return remote, remote.arrivals, MovingLeaves(here, remote.leaves, lambda: clustered.has_audit_log)


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
