"""Retention `acked` through a real broker: what every durable subscription has acknowledged goes, and nothing before."""

from __future__ import annotations

import asyncio
from pathlib import Path

from region_home import running
from region_peer import client, until

import felix
from policy.quantity import Duration
from region.config import StorageConfig
from region.folder import RegionFolder
from region.log.shard import ShardLog
from region.node import Node

BAGS = "acme/ops/bags"
QUICK = StorageConfig(sweep_every=Duration(10))


def shard_of(node: Node) -> ShardLog:
    (shard,) = node.broker.stream(felix.StreamName.parse(BAGS)).serving
    return shard


async def acknowledge(region: felix.RegionClient, name: str, count: int) -> None:
    async with asyncio.timeout(120), region.stream(BAGS).consumer(name) as consumer:
        for _ in range(count):
            assert await consumer.ack(await anext(consumer))


async def test_records_go_once_all_have_acknowledged_them_and_their_time_is_up(
    folder: RegionFolder, tmp_path: Path
) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data, storage=QUICK) as node, client(folder) as region:
        await region.create_stream(BAGS, retention=felix.Retention(age_ms=20, acked=True))
        bags = region.stream(BAGS)
        for name in ("belt", "customs"):
            await bags.create_subscription(name, felix.SubscriptionSettings("earliest"))
        for at in range(10):
            await bags.publish(b"%d" % at)
        await acknowledge(region, "belt", 10)
        await until(lambda: shard_of(node).segment_count > 1)
        assert shard_of(node).log_start_offset == 0, "customs has seen nothing yet"
    async with running(folder, data=data, storage=QUICK) as node, client(folder) as region:
        await asyncio.sleep(0.2)
        assert shard_of(node).log_start_offset == 0, "nor does a restart forget that"
        await acknowledge(region, "customs", 10)
        await until(lambda: shard_of(node).log_start_offset == 10)
        await region.stream(BAGS).publish(b"stays")
        await asyncio.sleep(0.2)
        assert shard_of(node).log_start_offset == 10
