"""Two regions of several brokers and a bridge for tests: real nodes in this process on a real etcd for each region, real documents, a real agent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from bridge_mesh import POLICIES, STREAM, Mesh
from cluster.clustered_region import LEASE_MS, ClusteredRegion
from etcd_process import running_etcd

from bridge.config import BridgeConfig, DestinationConfig
from felix.names import SpiffeId, StreamName
from felix.profile import Profile
from region.config import load_config
from region.log.shard import ShardLog


@dataclass
class ClusteredMesh(Mesh):
    """`clusters` by region. Operators and the agent know every broker of a region, unless `through` names one."""

    clusters: dict[str, ClusteredRegion] = field(default_factory=dict)
    through: dict[str, str] = field(default_factory=dict)
    """by region: the one broker that operators and agents are told of"""

    def addresses(self, region: str) -> tuple[str, ...]:
        """Of all its brokers."""
        cluster = self.clusters[region].config.cluster
        assert cluster is not None
        return tuple(str(each.listen) for each in cluster.brokers)

    def first_addresses(self, region: str) -> tuple[str, ...]:
        """Of whom operators are told."""
        named = self.through.get(region)
        config = self.clusters[region].config
        return self.addresses(region) if named is None else (str(config.of_broker(named).listen),)

    def profile(self, region: str) -> Profile:
        """An operator's."""
        self.ports[region] = 1  # replaced below
        return replace(super().profile(region), addresses=self.first_addresses(region))

    def bridge_config(self, **changes: object) -> BridgeConfig:
        """As of `Mesh`, with every address."""
        config = BridgeConfig(
            name=super().bridge_id.name,
            source="us-east",
            mesh="acme",
            source_addresses=self.first_addresses("us-east"),
            destinations=(DestinationConfig(region="eu-west", addresses=self.addresses("eu-west")),),
        )
        return msgspec.structs.replace(config, **changes)

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
        return self.eu.root / "data" / "b1" / "audit"


@asynccontextmanager
async def two_clusters(
    home: Path, count: int = 2, *, lease_ms: int = LEASE_MS
) -> AsyncIterator[ClusteredMesh]:
    """Both regions' brokers up, policies in force."""
    mesh = ClusteredMesh.make(home)
    (home / "etcd-us").mkdir()
    (home / "etcd-eu").mkdir()
    with running_etcd(home / "etcd-us") as us, running_etcd(home / "etcd-eu") as eu:
        for region, etcd in (("us-east", us), ("eu-west", eu)):
            mesh.clusters[region] = ClusteredRegion(
                home, etcd, count, lease_ms=lease_ms, folder=mesh.folder(region)
            )
        try:
            for cluster in mesh.clusters.values():
                await cluster.start(*(f"b{number}" for number in range(1, count + 1)))
            for region in POLICIES:
                await mesh.enact_policies_of(region)
            yield mesh
        finally:
            for cluster in mesh.clusters.values():
                await cluster.stop()


class ProcessMesh(Mesh):
    """Regions whose brokers are processes (cluster.processes): operators and the agent know what the regions' profiles name."""

    def addresses(self, region: str) -> tuple[str, ...]:
        """Of all brokers of a region."""
        cluster = load_config(self.folder(region).config).cluster
        assert cluster is not None
        return tuple(str(each.listen) for each in cluster.brokers)

    def profile(self, region: str) -> Profile:
        """An operator's."""
        self.ports[region] = 1  # replaced below
        return replace(super().profile(region), addresses=self.addresses(region))

    def write_config(self) -> Path:
        """As of `Mesh`, with every address."""
        path = self.us.root / "bridge.yaml"
        path.write_text(
            f"name: {self.bridge_id.name}\nmesh: acme\nsource: us-east\n"
            f"source_addresses: {list(self.addresses('us-east'))}\n"
            f"destinations:\n  - region: eu-west\n    addresses: {list(self.addresses('eu-west'))}\n"
        )
        return path

    @property
    def ingress_folder(self) -> Path:
        """The destination's audit log, on its first broker's disk."""
        return self.eu.root / "data" / "b1" / "audit"
