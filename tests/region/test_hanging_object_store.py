"""A store that takes what it is asked and never answers: nothing but its own streams' old records waits for it, and that with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import hanging_object_store
import pytest
from hanging_object_store import HangingFiles, hanging
from region_home import running
from region_peer import client, until

import felix
from felix.errors import Code, UnavailableError
from felix.settings import Offload, Views
from region import node as node_module
from region.config import StorageConfig
from region.folder import RegionFolder
from region.log import store_calls
from region.log.segment_limits import SegmentLimits
from region.log.shard import ShardLog
from region.log.store_calls import silent_stores
from region.node import Node
from region.streams import settings as stream_settings

ROLLS, AGAIN, OTHER = "acme/ops/rolls", "acme/ops/again", "acme/ops/other"
URL = "hanging://store"


def shard_of(node: Node, name: str = ROLLS) -> ShardLog:
    (shard,) = node.broker.stream(felix.StreamName.parse(name)).serving
    return shard


async def fill(region: felix.RegionClient, name: str, count: int) -> None:
    stream = region.stream(name)
    for begin in range(0, count, 10):
        # One group after the other: a segment ends between two.
        await asyncio.gather(*(stream.publish(b"%06d" % at * 30) for at in range(begin, begin + 10)))


async def first_of(region: felix.RegionClient) -> bytes:
    async with region.stream(ROLLS).subscribe("earliest") as reader:
        async for record in reader:
            return bytes(record.payload)
    raise AssertionError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stream_settings, "OFFLOADED_SEGMENTS", SegmentLimits(segment_bytes_max=3_000))
    monkeypatch.setattr(node_module, "OFFLOAD_CHECK_S", 0.05)
    monkeypatch.setattr(node_module, "OFFLOAD_CHECKS_PER_DELETION", 2)
    hanging_object_store.clear()
    yield
    hanging_object_store.clear()


@pytest.mark.parametrize("call", ["makedirs", "write", "body", "read"])
async def test_a_store_that_hangs_holds_up_no_other_one_no_deletion_and_no_stop(
    folder: RegionFolder, tmp_path: Path, call: str
) -> None:
    good = f"file://{tmp_path}/good"
    storage = StorageConfig(offload_allow=(URL, good))
    data = str(tmp_path / "data")
    async with running(folder, data=data, storage=storage) as node, client(folder) as region:
        with hanging(call):
            await region.create_stream(OTHER)
            await fill(region, OTHER, 100)
            await region.create_stream(ROLLS, views=Views(offload=Offload(URL, 0)))
            await fill(region, ROLLS, 100)
            await until(lambda: HangingFiles.waiting[call] > 0)
            async with asyncio.timeout(30):
                await region.delete_stream(ROLLS)
            assert HangingFiles.waiting[call] == 1, "it was left alone"
            await region.create_stream(AGAIN, views=Views(offload=Offload(URL, 0)))
            await fill(region, AGAIN, 100)
            await until(lambda: HangingFiles.waiting[call] > 1)
            async with asyncio.timeout(30):
                await node.stop()
    # What came late is deleted, once that is known, and so is all else of the stream that was deleted.
    async with running(folder, data=data, storage=storage) as node, client(folder) as region:
        await until(lambda: shard_of(node, AGAIN).offload_waiting_bytes == 0)
        await region.delete_stream(AGAIN)
        await until(lambda: not hanging_object_store.objects())


async def test_of_two_stores_one_hangs_and_the_other_one_is_used(
    folder: RegionFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_calls, "STALLED_S", 3.0)
    good = f"file://{tmp_path}/good"
    storage = StorageConfig(offload_allow=(URL, good))
    async with (
        running(folder, data=str(tmp_path / "data"), storage=storage) as node,
        client(folder) as region,
    ):
        with hanging():
            await region.create_stream(ROLLS, views=Views(offload=Offload(URL, 0)))
            await fill(region, ROLLS, 100)
            await until(lambda: HangingFiles.waiting.total() > 0)
            await region.create_stream(OTHER, views=Views(offload=Offload(good, 0)))
            await fill(region, OTHER, 100)
            await until(lambda: shard_of(node, OTHER).counters.offloaded_segments > 2)
            await until(lambda: shard_of(node).counters.offload_failed > 1)
            assert shard_of(node).offload_waiting_bytes > 0
        # The probe, or what was left alone, says that it is there again.
        await until(lambda: shard_of(node).offload_waiting_bytes == 0, 90)


async def test_what_takes_long_in_one_store_holds_up_no_other_one(
    folder: RegionFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is given up: an upload over a slow way, and the deletion of a hundred thousand objects, take hours."""
    monkeypatch.setattr(store_calls, "STALLED_S", 600.0)
    good = f"file://{tmp_path}/good"
    storage = StorageConfig(offload_allow=(URL, good))
    data = str(tmp_path / "data")
    slow = [f"acme/ops/slow-{at}" for at in range(4)]
    async with running(folder, data=data, storage=storage) as node, client(folder) as region:
        for name in slow:
            await region.create_stream(name, views=Views(offload=Offload(URL, 0)))
            await fill(region, name, 30)
        await region.create_stream(ROLLS, views=Views(offload=Offload(good, 0)))
        await fill(region, ROLLS, 100)
        for name in (*slow, ROLLS):
            await until(lambda name=name: shard_of(node, name).offload_waiting_bytes == 0)  # type: ignore[misc]
    async with running(folder, data=data, storage=storage) as node, client(folder) as region:
        with hanging("write", "delete"):
            for name in slow:
                await region.delete_stream(name)
            await until(lambda: HangingFiles.waiting["delete"] > 0)
            await region.create_stream(AGAIN, views=Views(offload=Offload(URL, 0)))
            await fill(region, AGAIN, 100)
            await until(lambda: HangingFiles.waiting["write"] > 0)
            # For some looks at what is to be deleted.
            await asyncio.sleep(20 * node_module.OFFLOAD_CHECK_S)
            async with asyncio.timeout(30):
                assert await first_of(region) == b"000000" * 30, "which is only in the other store"
            await region.create_stream(OTHER, views=Views(offload=Offload(good, 0)))
            await fill(region, OTHER, 100)
            await until(lambda: shard_of(node, OTHER).counters.offloaded_segments > 2)
        await until(lambda: shard_of(node, AGAIN).offload_waiting_bytes == 0)
        await until(lambda: not any("slow" in each for each in hanging_object_store.objects()))


async def test_readers_of_old_records_are_told_that_the_store_hangs_and_go_on_once_it_answers(
    folder: RegionFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_calls, "STALLED_S", 0.5)
    storage = StorageConfig(offload_allow=(URL,))
    data = str(tmp_path / "data")
    async with (
        running(folder, data=data, storage=storage) as node,
        client(folder) as region,
    ):
        await region.create_stream(ROLLS, views=Views(offload=Offload(URL, 0)))
        await fill(region, ROLLS, 100)
        shard = shard_of(node)
        await until(lambda: shard.counters.offloaded_segments == shard.segment_count - 1 > 2)
        await until(lambda: shard.disk_bytes < shard.store_only_bytes)
    # Records that came lately are in memory until then.
    async with running(folder, data=data, storage=storage) as node, client(folder) as region:
        shard = shard_of(node)
        with hanging("body", "info"):
            for _ in range(3):
                with pytest.raises(UnavailableError) as told:
                    async with asyncio.timeout(10):
                        await shard.read(0, 1_000)
                assert told.value.code is Code.UNAVAILABLE and "does not answer" in told.value.sentence
            (problem,) = (await region.describe()).alarms
            assert problem.startswith("The store hanging://store takes what it is asked and does not answer")
            assert silent_stores() == ["hanging://store"]
            assert HangingFiles.waiting["body"] == 1, "of a store that is silent nothing is asked"
            reading = asyncio.ensure_future(first_of(region))
            # Writers, and readers of what is local, are not concerned.
            await fill(region, ROLLS, 20)
            assert not reading.done()
        async with asyncio.timeout(60):
            assert await reading == b"000000" * 30
        assert not silent_stores()
