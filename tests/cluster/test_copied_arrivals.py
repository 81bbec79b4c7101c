"""A destination stream with several copies, on real brokers in this process: whatever step of a range its leader is lost at, each record arrives once,
is read by nobody before its leaf stands, and both logs say the same. `make test-long` loses it at every step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bridge_mesh import STREAM, flight, until
from cluster.clustered_mesh import ClusteredMesh, two_clusters
from long_runs import IS_LONG, count, only_long

from audit.leaf import Kind
from felix.settings import Compaction, Views
from region import node
from region.cluster.records import ShardId
from region.copies.replicas import Replicas
from region.crossing.ingest import IngestStream
from region.evidence.remote_audit import RemoteArrivals
from region.log.frame import Frame
from region.log.segment_limits import SegmentLimits
from region.log.shard_files import ShardFiles
from region.streams import settings as stream_settings

pytestmark = pytest.mark.etcd
STEP = 40
"""Records that are published for each step."""
LEASE_MS = 2_000
SMALL = SegmentLimits(segment_bytes_max=3_000)


class Steps:
    """Ranges of the leader of now are held at a step, until it is lost."""

    def __init__(self, mesh: ClusteredMesh, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mesh, self.monkeypatch, self.published = mesh, monkeypatch, 0

    async def publish(self) -> None:
        await self.mesh.publish([flight(self.published + number) for number in range(STEP)], batch=10)
        self.published += STEP

    def all_in_sync(self) -> bool:
        """Also of the audit log."""
        cluster = self.mesh.clusters["eu-west"]
        return not any(
            cluster.clustered(name).alarms(hosted.record for hosted in node.broker.streams)
            for name, node in cluster.nodes.items()
        )

    async def lose(self, hold: Callable[[pytest.MonkeyPatch, asyncio.Event], None]) -> None:
        """Hold what comes now at a step, and stop the leader there; what was published has crossed in the end."""
        cluster, held = self.mesh.clusters["eu-west"], asyncio.Event()
        leader = self.mesh.leader("eu-west")
        with self.monkeypatch.context() as patch:
            hold(patch, held)
            await self.publish()
            await asyncio.wait_for(held.wait(), 60)
            await cluster.stop(leader)
        await self.mesh.crossed(self.published)
        assert self.mesh.leader("eu-west") != leader
        await cluster.start(leader)
        await until(self.all_in_sync, "all copies in sync")

    def before_the_copies(self, patch: pytest.MonkeyPatch, held: asyncio.Event) -> None:
        """The records and their note are on the leader's disk alone."""
        (shard,) = self.mesh.led("eu-west")
        loop = asyncio.get_running_loop()

        def write(files: ShardFiles, copies: Any, frames: list[Frame]) -> int:
            if files is not shard._files:
                return original(files, copies, frames)
            files.disk.write(frames, 1)
            loop.call_soon_threadsafe(held.set)
            return 0

        original: Any = ShardFiles._write_beside
        patch.setattr(ShardFiles, "_write_beside", write)

    def before_the_leaf(self, patch: pytest.MonkeyPatch, held: asyncio.Event) -> None:
        """The records are committed, their leaf waits."""
        self._hold(patch, held, "_log")

    def before_the_receipt(self, patch: pytest.MonkeyPatch, held: asyncio.Event) -> None:
        """The leaf stands, and nobody was told."""
        self._hold(patch, held, "_logged")

    def _hold(self, patch: pytest.MonkeyPatch, held: asyncio.Event, step: str) -> None:
        leader, original = self.mesh.leader("eu-west"), getattr(IngestStream, step)

        def hold(stream: IngestStream, *what: Any) -> None:
            if stream._service.broker.broker_id == leader:
                held.set()
            else:
                original(stream, *what)

        patch.setattr(IngestStream, step, hold)


async def test_each_record_arrives_once_and_with_its_leaf_whatever_step_its_leader_is_lost_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_clusters(tmp_path, 3, source=1, lease_ms=LEASE_MS) as mesh:
        await mesh.create()
        async with mesh.operator("eu-west") as client:
            made = await client.create_stream(STREAM, replicas=3)
            assert made.replicas == 3
        await mesh.grant()
        steps = Steps(mesh, monkeypatch)
        async with mesh.agent():
            await steps.publish()
            await mesh.crossed(STEP)
            await nobody_reads_before_the_leaf(mesh, steps, monkeypatch)
            for hold in (steps.before_the_copies, steps.before_the_receipt)[: count(0, 2)]:
                await steps.lose(hold)
        if IS_LONG:
            cluster, leader = mesh.clusters["eu-west"], mesh.leader("eu-west")
            await cluster.stop(leader)
            await steps.publish()
            async with mesh.agent():
                await mesh.crossed(steps.published)
            await cluster.start(leader)
        found = await mesh.read("eu-west", steps.published)
        assert mesh.numbers(found) == list(range(steps.published)), "each once, and in order"

        def in_the_log() -> bool:
            acks = mesh.headers(mesh.ingress_folder, Kind.ACK)
            return sum(header.records for header in acks) >= steps.published

        await until(in_the_log, "a checkpoint over all that arrived")
    assert mesh.reconcile() == steps.published
    assert mesh.verify_egress().ok and mesh.verify_ingress().ok


async def nobody_reads_before_the_leaf(
    mesh: ClusteredMesh, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader is lost between records and leaf: who leads next serves nobody while it brings the leaf."""
    asked, goes_on = asyncio.Event(), asyncio.Event()
    original: Any = RemoteArrivals.append_missing

    async def append_missing(arrivals: RemoteArrivals, *what: Any) -> Any:
        asked.set()
        await goes_on.wait()
        return await original(arrivals, *what)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteArrivals, "append_missing", append_missing)
        losing = asyncio.ensure_future(steps.lose(steps.before_the_leaf))
        await asyncio.wait_for(asked.wait(), 60)
        assert mesh.led("eu-west") == [], "it is not served yet"
        goes_on.set()
        await losing


@only_long
async def test_copies_that_compact_themselves_keep_what_a_leader_to_come_writes_leaves_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_settings, "COMPACTED_SEGMENTS", SMALL)
    monkeypatch.setattr(node, "COMPACT_CHECK_S", 3_600.0)
    async with two_clusters(tmp_path, 3, source=1, lease_ms=LEASE_MS) as mesh:
        await mesh.create()
        async with mesh.operator("eu-west") as client:
            await client.create_stream(STREAM, replicas=3, views=Views(compaction=Compaction()))
        await mesh.grant()
        cluster, steps = mesh.clusters["eu-west"], Steps(mesh, monkeypatch)

        def hosts() -> list[Replicas]:
            return [peers.replicas for node in cluster.nodes.values() if (peers := node._parts.peers)]

        shard = ShardId(mesh.led("eu-west")[0].identity.incarnation.hex(), 0)

        def compacted(replicas: Replicas) -> int:
            """Behind the last segment that was compacted."""
            segments = replicas.host.disks(shard)[0].log.segments
            return max((one.next_offset for one in segments if one.header.span), default=0)

        async def compact(replicas: Replicas) -> None:
            """Small segments are put together, and what is no record goes."""
            replicas.host.limit_segments(shard, 0, SegmentLimits())
            await replicas.compact()
            replicas.host.limit_segments(shard, 0, SMALL)

        async with mesh.agent():
            for _ in range(3):
                await steps.publish()
                await mesh.crossed(steps.published)
            leader, arrived = mesh.leader("eu-west"), steps.published
            with monkeypatch.context() as patch:
                held = asyncio.Event()
                steps.before_the_leaf(patch, held)
                await steps.publish()
                await asyncio.wait_for(held.wait(), 60)
                await until(
                    lambda: {each.host.committed(shard, 0).offset for each in hosts()} == {steps.published},
                    "all is committed",
                )
                for replicas in hosts():
                    await compact(replicas)
                    assert 0 < compacted(replicas) <= arrived
                await cluster.stop(leader)
            await mesh.crossed(steps.published)
            await cluster.start(leader)
            await until(steps.all_in_sync, "all copies in sync")
            await steps.publish()
            await mesh.crossed(steps.published)
            for replicas in hosts():
                await compact(replicas)
                assert compacted(replicas) > arrived, "notes whose leaves stand go"
            found = await mesh.read("eu-west", steps.published)
            assert mesh.numbers(found) == list(range(steps.published)), "each once, and in order"
    assert mesh.reconcile() == steps.published
    assert mesh.verify_egress().ok and mesh.verify_ingress().ok


@only_long
async def test_with_too_few_copies_in_sync_its_link_waits_and_others_go_on_and_copies_come_and_go(
    tmp_path: Path,
) -> None:
    other = "acme/ops/crew"
    async with two_clusters(tmp_path, 3, source=1, lease_ms=LEASE_MS) as mesh:
        cluster = mesh.clusters["eu-west"]
        for stream, least in ((STREAM, 3), (other, 2)):
            await mesh.create(stream)
            async with mesh.operator("eu-west") as client:
                await client.create_stream(stream, replicas=3, min_in_sync=least)
            await mesh.grant(stream=stream)

        async with mesh.operator("us-east") as client:
            rights = [f"bridge-read {stream}" for stream in (STREAM, other)]
            await client.put_rights(str(mesh.bridge_id), rights)

        async def publish(stream: str, first: int) -> None:
            await mesh.publish([flight(first + number) for number in range(STEP)], stream, batch=10)

        async with mesh.agent():
            for stream in (STREAM, other):
                await publish(stream, 0)
                await mesh.crossed(STEP, stream)
            gone = next(
                name
                for name in cluster.names
                if name not in (mesh.leader("eu-west"), mesh.leader("eu-west", other))
            )
            await cluster.stop(gone)
            for stream in (STREAM, other):
                await publish(stream, STEP)
            await mesh.crossed(2 * STEP, other)
            assert await mesh.arrived() == STEP, "two of three copies are not enough"
            async with mesh.operator("eu-west") as client:
                await client.alter_stream(STREAM, min_in_sync=2)
            await mesh.crossed(2 * STEP)
            await cluster.start(gone)
            for copies in (2, 3):
                async with mesh.operator("eu-west") as client:
                    await client.alter_stream(STREAM, replicas=copies)
                await publish(STREAM, copies * STEP)
                await mesh.crossed((copies + 1) * STEP)
            async with mesh.operator("eu-west") as client:
                await client.drain_broker(leader := mesh.leader("eu-west"))
                await until(lambda: mesh.leader("eu-west") not in ("", leader), "another leader")
            await publish(STREAM, 4 * STEP)
            await mesh.crossed(5 * STEP)
            found = await mesh.read("eu-west", 5 * STEP)
            assert mesh.numbers(found) == list(range(5 * STEP)), "each once, and in order"
    assert mesh.verify_egress().ok and mesh.verify_ingress().ok
