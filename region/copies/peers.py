"""What a broker of several has to do with the others besides the metadata store: links to them, and the copies that it keeps of their streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from felix.identity import Identity
from felix.names import StreamName
from felix.peer import TrustAnchor, TrustBundle
from felix.runtime.port import Runtime
from felix.transport.port import Engine, TransportLimits
from region.cluster.member import ClusterMember
from region.copies.copied_frames import CopiedFrames
from region.copies.copy_ends import CopyEnds
from region.copies.peer_requests import PeerRequests
from region.copies.replicas import Folders, Replicas, SystemStream
from region.log.open_logs import OpenLogs
from region.log.scrub import Scrub
from region.log.seal import MakeSeal
from region.log.shard_settings import ShardSettings
from region.metadata.records import Stream, StreamConfig
from region.replication.links import LocalBroker, PeerLinks


class Peers:
    """One per broker of a cluster."""

    def __init__(
        self,
        member: ClusterMember,
        folders: Folders,
        streams: Mapping[StreamName, Stream],
        me: LocalBroker,
        *,
        identity: Callable[[], Identity],
        anchor: TrustAnchor,
        engine: Engine,
        limits: TransportLimits,
        settings: Callable[[StreamConfig], ShardSettings],
        make_seal: MakeSeal,
        open_logs: OpenLogs,
        runtime: Runtime,
        streams_runtime: Runtime,
        system: Mapping[StreamName, SystemStream],
        scrub: Scrub,
        copy_rate: int,
    ) -> None:
        """`streams_runtime`: with the clock that copies go by. `system`, `settings`, `make_seal`, `scrub`, `copy_rate`: as `Replicas` has them. `anchor`: the region's authority. `limits`: of connections that this broker
        takes."""
        bundle = TrustBundle([anchor])
        self.requests = PeerRequests(me.broker)
        self.links = PeerLinks(
            engine,
            me,
            identity,
            lambda: bundle,
            anchor.root_pem,
            lambda peer, said: self.replicas.host.heard(peer, said),
            self._linked,
            is_member=member.mirror.view.is_registered,
            mirror_revision=lambda: member.mirror.view.revision,
            runtime=runtime,
            accept_limits=limits,
            requested=self.requests.requested,
        )
        self.requests.links = self.links
        frames = CopiedFrames(self.requests)
        self.replicas = Replicas(
            member,
            me.region,
            folders,
            self.links,
            streams,
            settings=settings,
            make_seal=make_seal,
            open_logs=open_logs,
            runtime=streams_runtime,
            system=system,
            source=frames,
            scrub=scrub,
            copy_rate=copy_rate,
        )
        frames.serve(self.replicas.host)
        self.ends = CopyEnds(self.requests, self.replicas.host)

    def _linked(self, peer: str, up: bool) -> None:
        self.replicas.host.linked(peer, up)
        self.requests.linked(peer, up)

    async def close(self) -> None:
        """End the links, and close all copies."""
        await self.requests.close()
        await self.links.close()
        await self.replicas.close()
