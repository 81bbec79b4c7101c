"""Streams with copies whose closed segments go into a store: one upload for all copies, whoever leads, and nothing lost on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from threading import Event, current_thread
from typing import Any

import msgspec
import pytest
from cluster.clustered_region import ClusteredRegion
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import payloads, until
from slow_runs import only_slow

import felix
from felix.errors import RequestError
from felix.settings import Offload, Views
from region import node
from region.cluster.records import ShardId, ShardRecord
from region.config import StorageConfig
from region.log import fsspec_store, maintenance
from region.log.disk import DiskLog
from region.log.offload import ListPointer, OffloadList
from region.log.segment_limits import SegmentLimits
from region.log.shared_offload import SharedLists
from region.streams import settings as stream_settings

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd
STREAM = "acme/ops/orders"
COPIERS_THREADS = "log-lists"
NAMES = ("b1", "b2", "b3")


@pytest.fixture
async def region(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ClusteredRegion]:
    monkeypatch.setattr(stream_settings, "OFFLOADED_SEGMENTS", SegmentLimits(segment_bytes_max=1_000))
    monkeypatch.setattr(node, "OFFLOAD_CHECK_S", 0.05)
    region = ClusteredRegion(tmp_path, etcd, len(NAMES))
    allowed = StorageConfig(offload_allow=(url_of(tmp_path),))
    region.config = msgspec.structs.replace(region.config, storage=allowed)
    try:
        await region.start(*NAMES)
        yield region
    finally:
        await region.stop()


def url_of(folder: Path) -> str:
    return f"file://{folder}/store"


def objects(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "store").rglob("*") if path.is_file())


def segments_in(folder: Path) -> Counter[str]:
    """How often each segment is in the store, by its base offset."""
    return Counter(name[:20] for name in objects(folder) if name.endswith(".seg"))


def record_of(region: ClusteredRegion) -> ShardRecord:
    broker = next(iter(region.nodes))
    stream = region.nodes[broker].broker.streams.get(felix.StreamName.parse(STREAM))
    assert stream is not None
    return region.clustered(broker).member.mirror.view.shards[ShardId(stream.record.incarnation, 0)]


def log_of(region: ClusteredRegion, name: str) -> DiskLog | None:
    """A broker's copy of the records."""
    peers = region.nodes[name]._parts.peers
    stream = region.nodes[name].broker.streams.get(felix.StreamName.parse(STREAM))
    if peers is None or stream is None:
        return None
    disk = peers.replicas.host.disks(ShardId(stream.record.incarnation, 0)).get(0)
    return disk and disk.log


async def until_record(region: ClusteredRegion, **wanted: int) -> None:
    def holds() -> bool:
        record = record_of(region)
        return (
            not record.target
            and len(record.replicas) == wanted["copies"]
            and len(record.isr) == wanted["copies"]
        )

    await until(holds, 60)


async def fill(client: felix.RegionClient, published: list[bytes], count: int) -> None:
    stream = client.stream(STREAM)
    for _ in range(count // 10):
        group = [b"%d" % (len(published) + at) * 10 for at in range(10)]
        # One group after the other: a segment ends between two.
        await asyncio.gather(*(stream.publish(each) for each in group))
        published += group


def is_offloaded(region: ClusteredRegion, least: int) -> bool:
    """Whether all closed segments of all copies are in the store alone, at least so many."""
    for name in {*record_of(region).replicas} & {*region.nodes}:
        log = log_of(region, name)
        if log is None or any(one.is_local for one in log.segments[:-1]) or len(log.segments) <= least:
            return False
    return True


async def test_a_leader_offloads_for_all_copies_and_the_next_goes_on(
    region: ClusteredRegion, tmp_path: Path
) -> None:
    published: list[bytes] = []
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=3, views=Views(offload=Offload(url_of(tmp_path), 0)))
        await fill(client, published, 150)
        await until(lambda: is_offloaded(region, 3), 60)
        first = record_of(region)
        assert first.offloaded is not None and first.offloaded.epoch == first.epoch
        await region.stop(first.leader)
    async with region.client(next(iter(region.nodes))) as client:
        await fill(client, published, 100)
        await until(lambda: is_offloaded(region, 6), 60)
        second = record_of(region)
        assert second.offloaded is not None and second.offloaded.epoch == second.epoch > first.epoch
        assert set(segments_in(tmp_path).values()) == {1}, "nothing was uploaded twice"
        await region.start(first.leader)
        await until_record(region, copies=3)
        await until(lambda: is_offloaded(region, 6), 60)
        assert await payloads(client, STREAM, len(published)) == published
        assert set(segments_in(tmp_path).values()) == {1}
        assert sum(name.startswith("list-") for name in objects(tmp_path)) == 1
        await client.delete_stream(STREAM)
        await until(lambda: not objects(tmp_path), 60)


async def test_followers_read_a_list_once_and_keep_as_much_as_the_stream_says_by_now(
    region: ClusteredRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[bytes] = []
    may_upload, read = False, Counter[str]()
    real_waiting, real_read = maintenance.waiting, SharedLists.read
    monkeypatch.setattr(
        maintenance, "waiting", lambda disk, below: real_waiting(disk, below) if may_upload else []
    )

    def reading(self: SharedLists, pointer: ListPointer | None) -> OffloadList:
        if pointer is not None:
            read[pointer.url] += 1
        return real_read(self, pointer)

    monkeypatch.setattr(SharedLists, "read", reading)

    def are_marked() -> bool:
        logs = [log_of(region, name) for name in NAMES]
        return all(log is not None and all(one.remote for one in log.segments[:-1]) for log in logs)

    async with region.client("b1") as client:
        keeps = Offload(url_of(tmp_path), 1 << 30)
        await client.create_stream(STREAM, replicas=3, views=Views(offload=keeps))
        await fill(client, published, 100)
        may_upload = True
        await until(are_marked, 60)
        assert not is_offloaded(region, 3)
        await client.alter_stream(STREAM, offload=Offload(url_of(tmp_path), 0))
        await until(lambda: is_offloaded(region, 3), 60)
        assert await payloads(client, STREAM, len(published)) == published
    pointer = record_of(region).offloaded
    assert pointer is not None and read == {pointer.url: 2}, "by each of two followers"


async def test_the_only_copy_gets_others_moves_and_is_the_only_one_again(
    region: ClusteredRegion, tmp_path: Path
) -> None:
    published: list[bytes] = []
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=1, views=Views(offload=Offload(url_of(tmp_path), 0)))
        await fill(client, published, 150)
        await until(lambda: len(segments_in(tmp_path)) > 3, 60)
        await client.alter_stream(STREAM, replicas=3)
        await until_record(region, copies=3)
        await fill(client, published, 50)
        await until(lambda: is_offloaded(region, 4), 60)
        assert set(segments_in(tmp_path).values()) == {1}, "also what was there before"
        assert await payloads(client, STREAM, len(published)) == published
        await client.alter_stream(STREAM, replicas=1)
        await until_record(region, copies=1)
        before = record_of(region)
        await client.drain_broker(before.leader)
        await until(lambda: record_of(region).leader not in ("", before.leader), 60)
        await until_record(region, copies=1)
        await fill(client, published, 50)
        assert await payloads(client, STREAM, len(published)) == published


class Reads:
    """How many lists new copies read, and the base offsets of the segments that anybody fetches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lists = 0
        self.segments: list[int] = []
        self.goes_on = Event()
        self.goes_on.set()
        real_read, get_file = SharedLists.read, fsspec_store.get_file

        def reading(lists: SharedLists, pointer: ListPointer | None) -> OffloadList:
            if current_thread().name.startswith(COPIERS_THREADS):
                self.lists += 1
                assert self.goes_on.wait(60)
            return real_read(lists, pointer)

        def getting(*arguments: Any) -> fsspec_store.Digest:
            self.segments.append(int(arguments[1].rpartition("/")[2][:20]))
            return get_file(*arguments)

        monkeypatch.setattr(SharedLists, "read", reading)
        monkeypatch.setattr(fsspec_store, "get_file", getting)


async def until_led_by(region: ClusteredRegion, name: str, copies: int) -> None:
    """Stop leaders until this broker's copy leads; then start them again."""
    stopped: set[str] = set()
    while (leader := record_of(region).leader) != name:
        await region.stop(leader)
        stopped.add(leader)
        await until(lambda: record_of(region).leader not in {"", *stopped}, 60)
    await region.start(*stopped)
    await until_record(region, copies=copies)


@only_slow
async def test_a_new_copy_begins_behind_what_is_in_the_store_and_serves_all_of_it(
    region: ClusteredRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list that it reads first is damaged, and another one is in force when it asks again."""
    published: list[bytes] = []
    reads = Reads(monkeypatch)
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=2, views=Views(offload=Offload(url_of(tmp_path), 0)))
        await fill(client, published, 200)
        await until(lambda: is_offloaded(region, 7), 60)
        before = record_of(region)
        (added,) = {*NAMES} - {*before.replicas}
        led = log_of(region, before.leader)
        assert before.offloaded is not None and led is not None
        local_from = led.segments[-1].base_offset
        (listed,) = (tmp_path / "store").rglob(before.offloaded.url.rpartition("/")[2])
        whole = listed.read_bytes()
        listed.write_bytes(whole[:-9] + b"x" + whole[-8:])
        await client.alter_stream(STREAM, replicas=3)
        await until(lambda: reads.lists > 0, 60)
        await fill(client, published, 30)
        await until_record(region, copies=3)
        assert min(reads.segments, default=local_from) >= local_from, "nothing of what was there was fetched"
    await until_led_by(region, added, 3)
    async with region.client(added) as client:
        assert await payloads(client, STREAM, len(published)) == published


async def test_a_new_copy_goes_on_with_another_leader_and_its_list(
    region: ClusteredRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[bytes] = []
    reads = Reads(monkeypatch)
    async with region.client("b1") as client:
        await client.create_stream(STREAM, replicas=2, views=Views(offload=Offload(url_of(tmp_path), 0)))
        await fill(client, published, 150)
        await until(lambda: is_offloaded(region, 5), 60)
        before = record_of(region)
        (added,) = {*NAMES} - {*before.replicas}
        reads.goes_on.clear()
        await client.alter_stream(STREAM, replicas=3)
        await until(lambda: reads.lists > 0, 60)
    await region.stop(before.leader)
    await until(lambda: record_of(region).leader not in ("", before.leader), 60)
    reads.goes_on.set()
    await region.start(before.leader)
    await until_record(region, copies=3)
    await until_led_by(region, added, 3)
    async with region.client(added) as client:
        assert await payloads(client, STREAM, len(published)) == published


async def is_recovered(client: felix.RegionClient, name: str, lost: str) -> bool:
    """Whether this broker's copy leads without the other's. Not yet, where the broker is not known to be back, its lease lapsed, or the other one is not known to be gone."""
    try:
        await client.recover_shard(STREAM, 0, name, lost=[lost], powered_off=True)
    except RequestError as error:
        assert "no living replica" in error.sentence or f"{lost} leads the shard" in error.sentence
        return False
    return True


@only_slow
async def test_a_copy_whose_offloaded_records_were_given_up_is_begun_anew(
    region: ClusteredRegion, tmp_path: Path
) -> None:
    published: list[bytes] = []
    async with region.client("b1") as client:
        offload = Views(offload=Offload(url_of(tmp_path), 0))
        await client.create_stream(STREAM, replicas=2, min_in_sync=1, views=offload)
        await fill(client, published, 50)
        await until(lambda: is_offloaded(region, 1), 60)
    longer = record_of(region).leader
    (shorter,) = {*record_of(region).replicas} - {longer}
    (other,) = {*NAMES} - {longer, shorter}
    await region.stop(shorter)
    async with region.client(other) as client:
        given_up = [*published]
        await fill(client, given_up, 100)
        await until(lambda: (log := log_of(region, longer)) is not None and not log.segments[-2].is_local, 60)
        await region.stop(longer)
        await region.start(shorter)
        await until(partial(is_recovered, client, shorter, longer), 60)
        await fill(client, published, 20)
        await region.start(longer)
        await until_record(region, copies=2)
    await until_led_by(region, longer, 2)
    async with region.client(other) as client:
        assert await payloads(client, STREAM, len(published)) == published
