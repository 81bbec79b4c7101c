"""A region of several brokers for tests: real nodes in this process on one real etcd, each with a data folder of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from etcd_process import EtcdProcess
from ports import claim_port
from region_home import us_east
from region_peer import client

import felix
from felix.address import Address
from policy.quantity import Duration
from region.bootstrap import write_profile
from region.cluster.transactions import Transaction
from region.clustered import Clustered
from region.config import ClusterBroker, ClusterConfig, MetadataConfig, RegionConfig, load_config
from region.folder import RegionFolder
from region.metadata.transaction import Put
from region.node import Node

LEASE_MS = 10_000


class ClusteredRegion:
    """Brokers b1, b2 … of one region. `start` and `stop` one; `client` reaches one alone."""

    def __init__(
        self,
        home: Path,
        etcd: EtcdProcess,
        count: int,
        *,
        lease_ms: int = LEASE_MS,
        folder: RegionFolder | None = None,
    ) -> None:
        """`folder`: of a region that was founded already; else us-east is, in `home`."""
        self.etcd = etcd
        self.folder: RegionFolder = us_east(home) if folder is None else folder
        brokers = tuple(
            ClusterBroker(id=f"b{number}", listen=Address("127.0.0.1", claim_port()))
            for number in range(1, count + 1)
        )
        loaded = load_config(self.folder.config)
        # Each test has the region's name, and so the keys of it, in an etcd of its own.
        self.config: RegionConfig = msgspec.structs.replace(
            loaded,
            metadata=MetadataConfig(kind="etcd", endpoints=(etcd.endpoint.removeprefix("http://"),)),
            cluster=ClusterConfig(brokers=brokers, lease=Duration(lease_ms)),
        )
        self.nodes: dict[str, Node] = {}
        self.names = tuple(broker.id for broker in brokers)

    async def start(self, *names: str) -> None:
        """Start brokers, one after the other."""
        for name in names:
            self.nodes[name] = await Node.start(self.folder, self.config.of_broker(name))

    async def stop(self, *names: str) -> None:
        """Stop brokers in order; all that run where none is named."""
        for name in names or tuple(self.nodes):
            await self.nodes.pop(name).stop()

    def clustered(self, name: str) -> Clustered:
        """What a running broker knows of its cluster."""
        found = self.nodes[name].broker.clustered
        assert found is not None
        return found

    def leader(self, name: str, stream: str) -> str:
        """Who leads a stream, as a running broker knows."""
        hosted = self.nodes[name].broker.streams.get(felix.StreamName.parse(stream))
        return "" if hosted is None else self.clustered(name).leader_of(hosted.record, 0)

    async def heard(self) -> None:
        """Wait until each running broker knows what the metadata store has: what one has changed, another one hears a moment later (slow_news.py)."""
        mirror = self.clustered(next(iter(self.nodes))).member.mirror
        told = await mirror._store.transact((), (Put(f"{mirror.view.keys.prefix}heard", b""),))
        async with asyncio.timeout(60):
            for name, node in self.nodes.items():
                member = self.clustered(name).member
                await member.until(lambda view=member.mirror.view: view.revision >= told.revision)
                await node.services.governance._mirror.wait_for(told.revision)

    async def in_sync(self, name: str, stream: str) -> None:
        """Wait until a running broker knows that the stream's copies on all brokers that run are in sync, and no others."""
        hosted = self.nodes[name].broker.streams.get(felix.StreamName.parse(stream))
        assert hosted is not None
        clustered, running = self.clustered(name), sorted(self.nodes)
        async with asyncio.timeout(60):
            await clustered.member.until(
                lambda: all(
                    clustered.members(hosted.record, shard)[1] == running
                    for shard in range(hosted.shard_count)
                )
            )

    def lose_answers(self, name: str) -> None:
        """What a running broker asks of the store for an operator is done, and not answered."""
        mirror = self.clustered(name).member.mirror

        async def commit(made: Transaction) -> None:
            assert (await type(mirror).commit(mirror, made)) is not None
            mirror.absorb(*await mirror.find(compare.key for compare in made.compares))

        mirror.commit = commit  # type: ignore[method-assign]

    async def drain(self, name: str) -> None:
        """Place nothing more on a running broker."""
        await self.clustered(name).drain(name, on=True)

    def client(self, name: str, **options: Any) -> felix.RegionClient:
        """A client, an operator's unless `options` say whose, whose profile names one broker alone."""
        place = self.config.of_broker(name).own_place
        assert place is not None
        write_profile(self.folder, self.config.region, self.config.mesh, place.client_address)
        return client(self.folder, **options)


@asynccontextmanager
async def serving(
    home: Path, etcd: EtcdProcess, count: int = 3, started: int | None = None, *, lease_ms: int = LEASE_MS
) -> AsyncIterator[ClusteredRegion]:
    """A region of `count` brokers, of which the first `started` run (all, unless said), until the block ends."""
    region = ClusteredRegion(home, etcd, count, lease_ms=lease_ms)
    try:
        await region.start(*(f"b{number}" for number in range(1, (started or count) + 1)))
        yield region
    finally:
        await region.stop()


@asynccontextmanager
async def publishing(client: felix.RegionClient, stream: str) -> AsyncIterator[list[bytes]]:
    """Publish to a stream of one shard, one record after the other, each at the next offset, until the block ends: what was published."""
    published: list[bytes] = []
    goes_on = True

    async def publish() -> None:
        async with client.stream(stream).publisher() as publisher:
            while goes_on:
                published.append(b"%d" % len(published))
                assert await publisher.publish(published[-1]) == len(published) - 1

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publish())
        yield published
        goes_on = False
