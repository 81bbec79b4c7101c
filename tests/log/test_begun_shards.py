"""A shard whose folder is gone is not taken for a new one."""

from __future__ import annotations

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import cast

import pytest
from log.building import batch_of

from felix.errors import CorruptionError
from felix.names import StreamName
from felix.runtime.real import REAL
from felix.settings import EPHEMERAL
from felix.storage.disk import DiskFiles
from felix.storage.memory import MemoryDisk
from felix.storage.small_file import TEMPORARY_SUFFIX
from region.cluster.mirror import ClusterMirror
from region.cluster.records import ShardId
from region.log.begun_shards import (
    BEGIN_ANEW_NAME,
    BEGUN_SHARDS_NAME,
    missing_shards,
    read_begun_shards,
)
from region.log.directory import LogDirectory, folder_name, shard_folder
from region.log.open_logs import OpenLogs
from region.log.segment import ShardIdentity
from region.log.shard import ShardHooks, ShardLog, ShardSettings
from region.replication.disk import LogPlan
from region.replication.hosted import ShardPlan
from region.replication.opening import CopyOpener

NAME = StreamName.parse("acme/payments/orders")
INCARNATION = bytes(range(16))
PLACE = folder_name(NAME, INCARNATION)


async def opened(directory: LogDirectory, shard: int) -> ShardLog:
    return await directory.open_shard(NAME, INCARNATION, shard, ShardSettings(), ShardHooks())


async def begin(data: Path, shards: int = 2) -> None:
    """A folder with that many shards, each with one batch, and a stop in order."""
    directory = LogDirectory(data, "us-east")
    for shard in range(shards):
        await (await opened(directory, shard)).append(batch_of(b"kept"))
    await directory.close()


def folder_of(data: Path, shard: int) -> Path:
    return shard_folder(data, NAME, INCARNATION, shard)


@pytest.mark.parametrize("stream_too", [False, True])
@pytest.mark.parametrize("emptied", [False, True])
async def test_a_shard_whose_folder_went_is_refused_and_the_others_serve(
    tmp_path: Path, *, stream_too: bool, emptied: bool
) -> None:
    await begin(tmp_path)
    shutil.rmtree(tmp_path / PLACE if stream_too else folder_of(tmp_path, 1))
    if emptied:
        folder_of(tmp_path, 1).mkdir(parents=True)
    for _ in range(2):  # as it is at each start
        directory = LogDirectory(tmp_path, "us-east")
        with pytest.raises(CorruptionError, match="is gone, or empty") as refused:
            await opened(directory, 1)
        assert BEGIN_ANEW_NAME in refused.value.hint and "felix log restore" in refused.value.hint
        if not stream_too:
            assert (await opened(directory, 0)).high_watermark == 1
        assert folder_of(tmp_path, 1).exists() == emptied, "nothing was made in its place"
        await directory.close()


async def test_it_is_remembered_beside_a_crash_once_it_was_written(tmp_path: Path) -> None:
    live, later = tmp_path / "live", tmp_path / "later"
    live.mkdir()
    directory = LogDirectory(live, "us-east")
    await (await opened(directory, 0)).append(batch_of(b"kept"))
    await directory.remember_begun()
    await (await opened(directory, 1)).append(batch_of(b"kept"))
    shutil.copytree(live, later, ignore=shutil.ignore_patterns("lock"))  # as a crash leaves it
    await directory.close()
    for shard in range(2):
        shutil.rmtree(folder_of(later, shard))
    directory = LogDirectory(later, "us-east")
    with pytest.raises(CorruptionError, match="is gone"):
        await opened(directory, 0)
    assert (await opened(directory, 1)).high_watermark == 0, "nothing tells of it"
    await directory.close()


async def test_a_person_has_it_begin_anew_once(tmp_path: Path) -> None:
    await begin(tmp_path)
    for _ in range(2):
        shutil.rmtree(folder_of(tmp_path, 1))
        directory = LogDirectory(tmp_path, "us-east")
        with pytest.raises(CorruptionError):
            await opened(directory, 1)
        folder_of(tmp_path, 1).mkdir()
        (folder_of(tmp_path, 1) / BEGIN_ANEW_NAME).touch()
        log = await opened(directory, 1)
        assert log.high_watermark == 0
        await log.append(batch_of(b"anew"))
        await directory.close()
        directory = LogDirectory(tmp_path, "us-east")
        assert (await opened(directory, 1)).high_watermark == 1
        assert not (folder_of(tmp_path, 1) / BEGIN_ANEW_NAME).exists(), "it was said for that once"
        await directory.close()


async def test_what_is_deleted_has_copies_or_is_in_memory_is_not_remembered(tmp_path: Path) -> None:
    await begin(tmp_path, 3)
    directory = LogDirectory(tmp_path, "us-east")
    assert read_begun_shards(DiskFiles(), tmp_path) == {PLACE: {0, 1, 2}}
    # Whoever keeps copies has evidence of its own.
    folder = await directory.make_folder(NAME, INCARNATION, 2)
    await directory.delete_copy([folder, folder.with_name(f"{folder.name}.damaged")], [])
    await directory.open_shard(NAME, bytes(16), 0, ShardSettings(durability=EPHEMERAL), ShardHooks())
    await directory.remember_begun()
    assert read_begun_shards(DiskFiles(), tmp_path) == {PLACE: {0, 1}}
    await directory.delete_stream(NAME, INCARNATION)
    assert (await opened(directory, 0)).high_watermark == 0
    await directory.delete_stream(NAME, INCARNATION)
    await directory.close()
    assert read_begun_shards(DiskFiles(), tmp_path) == {}


async def test_a_copy_is_not_begun_in_the_place_of_what_was_lost(tmp_path: Path) -> None:
    await begin(tmp_path)
    shutil.rmtree(folder_of(tmp_path, 1))
    directory = LogDirectory(tmp_path, "us-east")
    for _ in range(2):
        with pytest.raises(CorruptionError, match="is gone"):
            await directory.make_folder(NAME, INCARNATION, 1)
    await directory.close()
    assert missing_shards(DiskFiles(), tmp_path) == [(PLACE, 1)]


@pytest.mark.parametrize("content", [b"", b"FELIXSML", b"no such file", bytes(400)])
async def test_a_memory_that_cannot_be_read_says_nothing(tmp_path: Path, content: bytes) -> None:
    await begin(tmp_path)
    (tmp_path / BEGUN_SHARDS_NAME).write_bytes(content)
    shutil.rmtree(folder_of(tmp_path, 1))
    directory = LogDirectory(tmp_path, "us-east")
    assert [(await opened(directory, shard)).high_watermark for shard in range(2)] == [1, 0]
    await directory.close()
    assert read_begun_shards(DiskFiles(), tmp_path) == {PLACE: {0, 1}}


async def test_a_full_disk_keeps_nothing_from_going_on_and_the_next_turn_writes_it(tmp_path: Path) -> None:
    disk = MemoryDisk()
    files = disk.mount()
    files.make_folder(tmp_path)
    directory = LogDirectory(tmp_path, "us-east", files=files)
    await opened(directory, 0)
    room, disk.room_bytes = disk.room_bytes, 0
    await directory.remember_begun()
    assert read_begun_shards(files, tmp_path) == {}
    disk.room_bytes = room
    await directory.remember_begun()
    assert read_begun_shards(files, tmp_path) == {PLACE: {0}}
    assert not any(name.endswith(TEMPORARY_SUFFIX) for name in files.names(tmp_path))
    await directory.close()


async def test_it_is_written_beside_a_pass_of_compaction(tmp_path: Path) -> None:
    directory = LogDirectory(tmp_path, "us-east")
    await opened(directory, 0)
    end = threading.Event()
    under_way = directory.maintenance_pool.submit(end.wait, 300)
    try:
        async with asyncio.timeout(60):
            await directory.remember_begun()
        assert read_begun_shards(DiskFiles(), tmp_path) == {PLACE: {0}} and not under_way.done()
    finally:
        end.set()
    await directory.close()


async def test_a_copy_that_moves_away_is_forgotten_before_it_goes(tmp_path: Path) -> None:
    await begin(tmp_path)
    directory = LogDirectory(tmp_path, "us-east")
    folder = await directory.make_folder(NAME, INCARNATION, 1)
    await directory.delete_copy([folder], [])
    assert read_begun_shards(DiskFiles(), tmp_path) == {PLACE: {0}}, "also where the broker is killed now"
    assert missing_shards(DiskFiles(), tmp_path) == []
    await directory.close()


async def test_a_copy_in_the_place_of_a_stream_that_is_gone_outlives_the_power() -> None:
    root = Path("/data/b1/streams")
    disk = MemoryDisk()
    files = disk.mount()
    files.make_folder(root)
    for each in (root, *root.parents):
        files.sync_folder(each)
    gone = CorruptionError("It is gone.")
    plan = LogPlan(
        0, folder_of(root, 0), ShardIdentity("us-east", str(NAME), INCARNATION, 0), kept_in=root, gone=gone
    )
    with ThreadPoolExecutor(1) as pool:
        opener = CopyOpener(
            "b1", cast(ClusterMirror, None), files=files, runtime=REAL, open_logs=OpenLogs(), pool=pool, closing_pool=pool
        )  # fmt: skip
        shards = ShardPlan(ShardId(INCARNATION.hex(), 0), (plan,), "fsync")
        with pytest.raises(CorruptionError, match="It is gone"):
            await opener.open(shards)
        assert not files.exists(folder_of(root, 0))
        (copy,) = (await opener.open(shards, anew=True)).values()
        copy.sync()
    for seed in range(8):
        disk.lose_power(Random(seed))
        assert disk.mount().exists(folder_of(root, 0)), "what it acknowledges is in a folder that lasts"
