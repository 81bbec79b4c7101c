"""Two regions of several brokers and a bridge for tests: real nodes in this process on a real etcd for each region, real documents, a real agent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bridge_mesh import POLICIES, STREAM, Mesh
from cluster.clustered_region import LEASE_MS, ClusteredRegion
from etcd_process import running_etcd

from audit.leaf import Kind
from felix.errors import FelixError
from felix.names import SpiffeId, StreamName
from region.config import RegionConfig, load_config
from region.folder import RegionFolder
from region.log.shard import ShardLog


@dataclass
class ClusteredMesh(Mesh):
    """`clusters` by region. Operators and the agent know every broker of a region, unless `through` names one."""

    clusters: dict[str, ClusteredRegion] = field(default_factory=dict)
    through: dict[str, str] = field(default_factory=dict)
    """by region: the one broker that operators and agents are told of"""

    def addresses(self, region: str) -> tuple[str, ...]:
        """Of all its brokers."""
        return places(self.clusters[region].config)

    def first_addresses(self, region: str) -> tuple[str, ...]:
        """As of `Mesh`: those of one broker, where `through` names it."""
        named = self.through.get(region)
        config = self.clusters[region].config
        return self.addresses(region) if named is None else (str(config.of_broker(named).listen),)

    def documents(self, region: str, kind: str) -> dict[str, bytes]:
        """As of `Mesh`: what the broker with the audit log holds."""
        operator = SpiffeId(region, "acme", "operator", "operator")
        node = next(iter(self.clusters[region].nodes.values()))
        return node.services.governance.documents(operator, kind)

    async def arrived(self, stream: str = STREAM) -> int:
        """As of `Mesh`: at whoever leads the stream."""
        return sum(shard.high_watermark for shard in self.led("eu-west", stream))

    def led(self, region: str, stream: str = STREAM) -> list[ShardLog]:
        """A stream's logs, where some running broker leads it."""
        for node in self.clusters[region].nodes.values():
            hosted = node.broker.streams.get(StreamName.parse(stream))
            if hosted is not None and hosted.serving:
                return hosted.serving
        return []

    def leader(self, region: str, stream: str = STREAM) -> str:
        """Who leads a stream, as the first running broker knows."""
        cluster = self.clusters[region]
        return cluster.leader(next(iter(cluster.nodes)), stream)

    @property
    def ingress_folder(self) -> Path:
        """The destination's audit log, on its first broker's disk."""
        return first_log(self.eu)


@asynccontextmanager
async def two_clusters(
    home: Path, count: int = 2, *, source: int = 0, lease_ms: int = LEASE_MS
) -> AsyncIterator[ClusteredMesh]:
    """Both regions' brokers up, policies in force. `source`: brokers of the source, if not as many."""
    mesh = ClusteredMesh.make(home)
    (home / "etcd-us").mkdir()
    (home / "etcd-eu").mkdir()
    with running_etcd(home / "etcd-us") as us, running_etcd(home / "etcd-eu") as eu:
        for region, etcd, brokers in (("us-east", us, source or count), ("eu-west", eu, count)):
            mesh.clusters[region] = ClusteredRegion(
                home, etcd, brokers, lease_ms=lease_ms, folder=mesh.folder(region)
            )
        try:
            for cluster in mesh.clusters.values():
                await cluster.start(*cluster.names)
            for region in POLICIES:
                await mesh.enact_policies_of(region)
            yield mesh
        finally:
            for cluster in mesh.clusters.values():
                await cluster.stop()


class ProcessMesh(Mesh):
    """Regions whose brokers are processes (cluster.processes): operators and the agent know all that the configurations name."""

    async def arrived(self, stream: str = STREAM) -> int:
        """As of `Mesh`, as the leader of the stream's first shard says; 0 while none answers."""
        try:
            async with self.operator("eu-west") as client:
                state = await client.describe_stream(stream)
        except FelixError:
            return 0
        return state.state[0].high_watermark

    def is_logged(self, records: int) -> bool:
        """Whether the destination's audit log has, below its checkpoint, that so many arrived."""
        acks = self.headers(self.ingress_folder, Kind.ACK)
        return sum(header.records for header in acks) >= records

    def addresses(self, region: str) -> tuple[str, ...]:
        """Of all its brokers."""
        return places(load_config(self.folder(region).config))

    @property
    def ingress_folder(self) -> Path:
        """The destination's audit log, on its first broker's disk."""
        return first_log(self.eu)


def places(config: RegionConfig) -> tuple[str, ...]:
    """Where the brokers of a region listen."""
    assert config.cluster is not None
    return tuple(str(each.listen) for each in config.cluster.brokers)


def first_log(folder: RegionFolder) -> Path:
    """The audit log on the first broker's disk."""
    return folder.root / "data" / "b1" / "audit"
