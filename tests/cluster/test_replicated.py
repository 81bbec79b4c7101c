"""Streams with several copies on real brokers in one process: what describes them, what is refused, and copies that come and go."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster.clustered_region import ClusteredRegion, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from region_home import make_region, running
from region_peer import client as operator_of
from region_peer import payloads, until

import felix
from felix.errors import Code, RequestError
from felix.settings import Durability, QueueSettings, Views
from region.log.directory import shard_folder
from region.metadata.records import StreamConfig, decode, min_in_sync
from region.replication.disk import ReplicaDisk

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd
STREAM = "acme/ops/orders"
NAMES = ("b1", "b2", "b3")


@pytest.fixture
async def region(tmp_path: Path, etcd: EtcdProcess) -> AsyncIterator[ClusteredRegion]:
    async with serving(tmp_path, etcd, len(NAMES)) as region:
        yield region


async def test_a_leader_that_stops_is_followed_by_one_that_has_all(region: ClusteredRegion) -> None:
    async with region.client("b3") as client:
        made = await client.create_stream(STREAM, replicas=3)
        assert (made.replicas, made.min_in_sync) == (3, 2)
        published: list[bytes] = []
        async with client.stream(STREAM).publisher() as publisher:
            for number in range(20):
                published.append(b"%d" % number)
                assert await publisher.publish(published[-1]) == number
            leader = region.leader("b3", STREAM)
            # The client's own broker stays.
            gone = leader if leader != "b3" else "b2"
            await region.stop(gone)
            for number in range(20, 40):
                published.append(b"%d" % number)
                assert await publisher.publish(published[-1]) == number
        assert await payloads(client, STREAM, 40) == published
        await region.in_sync("b3", STREAM)
        # The controller or not, each says the same.
        for name in region.nodes:
            streams = [hosted.record for hosted in region.nodes[name].broker.streams]
            await until(lambda name=name, streams=streams: len(region.clustered(name).alarms(streams)) == 2)  # type: ignore[misc]
            away, copies = region.clustered(name).alarms(streams)
            assert away.startswith(f"Broker {gone} was stopped and is not alive")
            assert copies.startswith(f"Too few copies while {gone} is not alive: acme/ops/orders shard 0")
        await region.start(gone)
        await region.in_sync("b3", STREAM)
        now = region.leader("b3", STREAM)
        await region.in_sync(now, STREAM)
        assert region.nodes[now].gauges.values()["copies"] == 2  # and the audit log
        ((_, _, gauges),) = region.nodes[now].gauges.shards()
        assert (gauges["copies"], gauges["copies_in_sync"]) == (3, 3) and gauges["copy_lag_records"] >= 0
        state = (await client.describe_stream(STREAM)).state[0]
        assert sorted(state.replicas) == state.in_sync == sorted(NAMES)

        async def is_calm() -> bool:
            return not (await client.describe()).alarms

        await until(is_calm, 60)  # the audit log's copy comes by itself


async def test_with_acks_leader_what_was_acknowledged_is_there_after_a_stop_in_order(
    region: ClusteredRegion,
) -> None:
    async with region.client("b3") as client:
        made = await client.create_stream(STREAM, replicas=3, acks="leader")
        assert (made.replicas, made.min_in_sync, made.acks) == (3, 1, "leader")
        for number in range(10):
            assert await client.stream(STREAM).publish(b"%d" % number) == number
        leader = region.leader("b3", STREAM)
        await region.stop(leader if leader != "b3" else "b2")
        assert await client.stream(STREAM).publish(b"10") == 10
        assert await payloads(client, STREAM, 11) == [b"%d" % number for number in range(11)]


async def test_a_copy_that_is_gone_is_made_anew_from_its_leaders(region: ClusteredRegion) -> None:
    async with region.client("b3") as client:
        await client.create_stream(STREAM, replicas=3)
        for number in range(10):
            await client.stream(STREAM).publish(b"%d" % number)
        leader = region.leader("b3", STREAM)
        follower = "b1" if leader != "b1" else "b2"
        stream = region.nodes[follower].broker.streams.get(felix.StreamName.parse(STREAM))
        assert stream is not None
        incarnation = bytes.fromhex(stream.record.incarnation)
        await region.stop(follower)
        data = region.folder.root / region.config.of_broker(follower).data / "streams"
        folder = shard_folder(data, stream.name, incarnation, 0)
        assert folder.is_dir()
        shutil.rmtree(folder)
        await client.stream(STREAM).publish(b"10")
        await region.start(follower)
        await region.in_sync("b3", STREAM)
        # It has all: the others may go.
        for name in NAMES:
            if name not in (follower, "b3"):
                await region.stop(name)
        assert await payloads(client, STREAM, 11) == [b"%d" % number for number in range(11)]
        await client.stream(STREAM).publish(b"11")


async def test_a_stream_that_is_deleted_goes_from_every_copy(region: ClusteredRegion) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=3)
        await client.stream(STREAM).publish(b"x")
        await region.in_sync("b1", STREAM)
        await client.delete_stream(STREAM)
        folders = [region.folder.root / region.config.of_broker(name).data / "streams" for name in NAMES]
        await until(
            lambda: (
                not any("acme~ops~orders" in each.name for folder in folders for each in folder.iterdir())
            ),
            60,
        )
    async with region.client("b2") as client:
        again = await client.create_stream(STREAM, replicas=3)
        assert again.replicas == 3
        assert await client.stream(STREAM).publish(b"y") == 0


async def test_what_copies_cannot_be_is_refused(region: ClusteredRegion) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"replicas": 4}, "4 copies, and us-east has 3 brokers"),
        ({"replicas": 8}, "8 copies; 1 to 7"),
        ({"replicas": 3, "min_in_sync": 4}, "waits for 4 of 3 copies"),
        ({"replicas": 3, "acks": "all"}, "acks 'all'; it is quorum or leader"),
        ({"replicas": 3, "acks": "leader", "min_in_sync": 2}, "it waits for the leader alone"),
        ({"acks": "leader"}, "of a stream of one copy"),
        ({"replicas": 3, "durability": Durability("ephemeral")}, "ephemeral, which has one copy"),
        ({"replicas": 3, "acks": "leader", "views": Views(queue=QueueSettings())}, "answers stand for good"),
    ]
    async with region.client("b1") as client:
        for asked, sentence in cases:
            with pytest.raises(RequestError, match=sentence) as refused:
                await client.create_stream(STREAM, **asked)
            assert refused.value.code is Code.CONFIG_INVALID


async def test_a_region_that_says_so_gives_new_streams_several_copies_where_they_may_have_them(
    region: ClusteredRegion,
) -> None:
    async with region.client("b1") as client:
        assert (await client.create_stream("acme/ops/one")).replicas == 1
        assert (await client.describe()).replicas == 1
    cluster = region.config.cluster
    assert cluster is not None
    region.config = msgspec.structs.replace(
        region.config, cluster=msgspec.structs.replace(cluster, replicas=3)
    )
    await region.stop("b1")
    await region.start("b1")
    async with region.client("b1") as client:
        assert (await client.describe()).replicas == 3
        assert (await client.create_stream(STREAM)).replicas == 3
        assert (await client.create_stream("acme/ops/two", replicas=2)).replicas == 2
        kept = await client.create_stream("acme/ops/kept", durability=Durability("ephemeral"))
        assert kept.replicas == 1
        assert (await client.describe_stream("acme/ops/one")).replicas == 1


async def test_brokers_on_several_hosts_give_new_streams_up_to_three_copies(region: ClusteredRegion) -> None:
    await region.heard()
    shown = region.clustered("b1").member.mirror.view.nodes
    hosts = {name: msgspec.structs.replace(node, host=f"host-of-{name}") for name, node in shown.items()}
    async with region.client("b1") as client:
        assert (await client.describe()).replicas == 1, "all are on this machine"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(region.clustered("b1").member.mirror.view, "nodes", hosts)
            assert (await client.describe()).replicas == 3
            made = await client.create_stream(STREAM)
            assert (made.replicas, made.min_in_sync) == (3, 2)
            assert (await client.create_queue("acme/ops/jobs")).replicas == 3
            await client.create_cache("acme/ops/prices")
            assert (await client.describe_stream("acme/ops/prices")).replicas == 3
            assert (await client.create_stream("acme/ops/one", replicas=1)).replicas == 1
            kept = await client.create_stream("acme/ops/kept", durability=Durability("ephemeral"))
            assert kept.replicas == 1
        state = (await client.describe_stream("acme/ops/one")).state[0]
        assert state.replicas == state.in_sync and len(state.replicas) == 1


async def test_a_region_of_one_broker_keeps_one_copy(tmp_path: Path) -> None:
    folder = make_region(tmp_path, "us-east")
    async with running(folder), operator_of(folder) as client:
        with pytest.raises(RequestError, match="3 copies, and us-east has one broker"):
            await client.create_stream(STREAM, replicas=3)
        assert (await client.create_stream(STREAM)).replicas == 1


def test_a_record_of_an_older_version_means_one_copy() -> None:
    config = decode(b'{"shards": 2}', StreamConfig, "key")
    assert (config.replicas, min_in_sync(config)) == (1, 1)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
async def test_why_a_copy_left_the_in_sync_set_is_told_by_every_broker(
    region: ClusteredRegion, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=3)
        await region.in_sync("b1", STREAM)
        leader = region.leader("b1", STREAM)
        ill, other = (name for name in NAMES if name != leader)
        data, is_ill = region.folder.root / region.config.of_broker(ill).data, asyncio.Event()
        write = ReplicaDisk.write

        def fails(disk: ReplicaDisk, *given: Any, **named: Any) -> None:
            if is_ill.is_set() and disk.plan.folder.is_relative_to(data):
                raise OSError(number, os.strerror(number), str(disk.plan.folder))
            write(disk, *given, **named)

        monkeypatch.setattr(ReplicaDisk, "write", fails)
        is_ill.set()
        assert await client.stream(STREAM).publish(b"more") == 0
    for name in (leader, other):
        async with region.client(name) as client:

            async def is_told(client: felix.RegionClient = client) -> bool:
                copy = f"The copy of shard 0 of {STREAM} at broker {ill}: its disk "
                problems = (await client.describe()).alarms
                return any(
                    each.startswith(copy) and os.strerror(number) in each for each in problems
                ) and any(each.startswith(f"Not every copy is in sync: {STREAM}") for each in problems)

            await until(is_told, 30)
    is_ill.clear()
    if number == errno.ENOSPC:
        await region.in_sync(leader, STREAM)
        async with region.client(other) as client:

            async def is_calm() -> bool:
                return not (await client.describe()).alarms

            await until(is_calm, 30)
