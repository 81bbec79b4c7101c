"""A clean stop says which shards are on the disk: the next start syncs none of them. A crash, a copy and a failed shard are not taken for one."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from log.building import batch_of

from felix.errors import RequestError, UnavailableError
from felix.names import StreamName
from felix.settings import Durability
from felix.storage.disk import DiskFiles
from felix.storage.memory import MemoryDisk, MemoryFiles
from felix.storage.port import Files
from region.log.clean_stop import CLEAN_STOP_NAME, save_clean_stop, take_clean_stop
from region.log.directory import LogDirectory
from region.log.open_logs import OpenLogs
from region.log.shard import ShardHooks, ShardLog, ShardSettings

NAME = StreamName.parse("acme/payments/orders")
INCARNATION = bytes(16)
DATA = Path("/data")


class Counting(MemoryFiles):
    """The memory twin, with its syncs counted."""

    syncs: Counter[str]

    def sync(self, descriptor: int) -> None:
        self.syncs["file"] += 1
        super().sync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        self.syncs["folder"] += 1
        super().sync_folder(folder)


async def shard_of(directory: LogDirectory, number: int = 0) -> ShardLog:
    return await directory.open_shard(NAME, INCARNATION, number, ShardSettings(), ShardHooks())


def files_of(disk: MemoryDisk) -> Counting:
    files = disk.mount(Counting)
    assert isinstance(files, Counting)
    files.syncs = Counter()
    return files


async def test_a_start_after_a_clean_stop_syncs_one_folder_however_many_shards_there_are() -> None:
    disk = MemoryDisk()
    directory = LogDirectory(DATA, "us-east", files=files_of(disk))
    for number in range(5):
        shard = await shard_of(directory, number)
        await shard.append(batch_of(b"kept"))
    await directory.close()

    files = files_of(disk)
    directory = LogDirectory(DATA, "us-east", files=files)
    assert not files.exists(DATA / CLEAN_STOP_NAME)
    shards = [await shard_of(directory, number) for number in range(5)]
    assert [shard.high_watermark for shard in shards] == [1] * 5
    assert files.syncs == {"folder": 1}
    # Nothing was written, so nothing is to be synced at the end either, but for the word of it.
    await directory.close()
    assert files.syncs == {"folder": 2, "file": 1}

    directory = LogDirectory(DATA, "us-east", files=files_of(disk))
    shard = await shard_of(directory)
    await shard.append(batch_of(b"more"))
    disk.kill()
    disk.lose_power(Random(1))
    directory = LogDirectory(DATA, "us-east", files=(files := files_of(disk)))
    assert (await shard_of(directory)).high_watermark == 2
    assert files.syncs["file"], "after a crash what is kept is synced"
    # Of shards that were clean and not opened, a crash takes the word as well.
    files.syncs.clear()
    assert (await shard_of(directory, 1)).high_watermark == 1
    assert files.syncs["file"]
    await directory.close()


async def test_a_copy_of_a_folder_is_not_taken_for_one_that_is_on_the_disk(tmp_path: Path) -> None:
    first, copy = tmp_path / "first", tmp_path / "copy"
    directory = LogDirectory(first, "us-east")
    await (await shard_of(directory)).append(batch_of(b"kept"))
    await directory.close()
    shutil.copytree(first, copy)
    for folder, clean in ((copy, set()), (first, {"acme~payments~orders~" + "0" * 32 + "/00000"})):
        lock = DiskFiles().lock(folder)
        assert take_clean_stop(DiskFiles(), folder, lock.identity) == clean
        lock.release()


def test_what_is_damaged_or_of_no_known_place_says_nothing(tmp_path: Path) -> None:
    files: Files = DiskFiles()
    save_clean_stop(files, tmp_path, "boot:1:2", ["a/00000"])
    assert take_clean_stop(files, tmp_path, "another boot:1:2") == {"a/00000"}
    assert take_clean_stop(files, tmp_path, "boot:1:2") == set(), "it is gone once it was taken"
    save_clean_stop(files, tmp_path, "", ["a/00000"])
    assert take_clean_stop(files, tmp_path, "") == set()
    (tmp_path / CLEAN_STOP_NAME).write_bytes(b"not this")
    assert take_clean_stop(files, tmp_path, "boot:1:2") == set()


async def test_a_shard_that_failed_is_not_among_those_that_were_closed_in_order() -> None:
    disk = MemoryDisk()
    directory = LogDirectory(DATA, "us-east", files=files_of(disk))
    for number in range(2):
        await (await shard_of(directory, number)).append(batch_of(b"kept"))
    directory.shards[1].stop(UnavailableError("the disk does not answer"))
    await directory.close()
    files = files_of(disk)
    directory = LogDirectory(DATA, "us-east", files=files)
    await shard_of(directory, 0)
    assert files.syncs == {"folder": 1}
    await shard_of(directory, 1)
    assert files.syncs["file"]
    await directory.close()


async def test_an_epoch_that_was_put_off_begins_with_the_first_append_or_before_it_is_told() -> None:
    disk = MemoryDisk()

    async def opened(files: Files) -> tuple[LogDirectory, ShardLog]:
        directory = LogDirectory(DATA, "us-east", files=files)
        shard = await shard_of(directory)
        shard.begin_epoch_later()
        return directory, shard

    directory, shard = await opened(files_of(disk))
    assert shard.epochs.starts == ()
    first = await shard.append(batch_of(b"1"))
    (begun,) = shard.epochs.starts
    assert (begun.start_offset, first.base_offset) == (0, 0)
    await directory.close()

    directory, shard = await opened(files_of(disk))
    assert shard.epochs.starts == (begun,), "nothing was written, so nothing began"
    await directory.close()

    directory, shard = await opened(files_of(disk))
    # Who asks while an append is on its way hears of its epoch, and so does who asks before any.
    on_its_way = asyncio.ensure_future(shard.append(batch_of(b"2")))
    await asyncio.sleep(0)
    await shard.begin_due_epoch()
    await on_its_way
    told = shard.epochs.starts
    assert [start.start_offset for start in told] == [0, 1]
    await directory.close()

    directory, shard = await opened(files_of(disk))
    both = await asyncio.gather(shard.begin_due_epoch(), shard.begin_due_epoch(), return_exceptions=True)
    assert [type(one) for one in both] == [type(None), UnavailableError], "who asks meanwhile asks again"
    before = shard.epochs
    await shard.begin_due_epoch()
    await shard.append(batch_of(b"3"))
    assert shard.epochs.starts == before.starts and [s.start_offset for s in before.starts] == [0, 1, 2]
    disk.kill()
    disk.lose_power(Random(2))
    directory, shard = await opened(files_of(disk))
    assert shard.epochs.starts == before.starts
    with pytest.raises(RequestError):
        await shard.begin_epoch(1)
    await directory.close()


async def lives(seed: int) -> None:
    """Shards that sync seldom, in some lives that end in order, by a kill, or with the power: what a start served stays, and so does
    what was closed in order; of anything else the power may take the end."""
    random, disk, shards = Random(seed), MemoryDisk(), 3
    least, most = [0] * shards, [0] * shards
    settings = ShardSettings(durability=Durability("interval", 60_000))
    for _ in range(6):
        directory = LogDirectory(DATA, "us-east", files=disk.mount())
        logs = OpenLogs(random.choice([1, 2, shards]))
        held: dict[int, ShardLog] = {}
        for number in range(shards):
            if random.random() < 0.7:
                held[number] = shard = await directory.open_shard(
                    NAME, INCARNATION, number, settings, ShardHooks(open_logs=logs)
                )
                assert least[number] <= shard.high_watermark <= most[number], (seed, number)
                least[number] = most[number] = shard.high_watermark
        for _ in range(random.randrange(6) if held else 0):
            number = random.choice(list(held))
            await held[number].append(batch_of(b"x"))
            most[number] += 1
        if random.random() < 0.5:
            await directory.close()
            for number in held:
                least[number] = most[number]
        disk.kill()
        if random.random() < 0.5:
            disk.lose_power(random)


async def test_what_a_start_served_stays_however_the_lives_before_it_ended() -> None:
    for seed in range(40):
        await lives(seed)


async def test_a_directory_that_cannot_be_opened_lets_go_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = DiskFiles()
    directory = LogDirectory(tmp_path, "us-east", files=files)
    await (await shard_of(directory)).append(batch_of(b"kept"))
    await directory.close()

    def fails(folder: Path) -> None:
        raise OSError(errno.EIO, "a test")

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_folder", fails)
        with pytest.raises(OSError, match="a test"):
            LogDirectory(tmp_path, "us-east", files=files)
    directory = LogDirectory(tmp_path, "us-east", files=files)
    assert (await shard_of(directory)).high_watermark == 1
    await directory.close()
