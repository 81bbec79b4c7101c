"""The table of streams: a stream's shards are created together, and no crash takes back what was created, or leaves what cannot be
opened."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Barrier, Event, Lock

import pytest
from log.building import batch_of

from felix.batch import Batch
from felix.errors import Code, CorruptionError, FelixError, UnavailableError
from felix.names import StreamName
from felix.storage.memory import MemoryDisk, MemoryFiles
from felix.tasks import end_tasks
from region.limits.budget import Budgets
from region.log.begun_shards import BEGIN_ANEW_NAME
from region.log.companions import JournalKind
from region.log.directory import LogDirectory, shard_folder
from region.log.point import LogPoint
from region.log.segment_limits import SegmentLimits
from region.log.shard import ShardLog
from region.metadata.catalog import Catalog
from region.metadata.memory import MemoryStore
from region.metadata.mirror import CatalogMirror
from region.metadata.records import Stream, StreamConfig
from region.streams import disks as stream_disks
from region.streams.follower import StreamFollower
from region.streams.hosted import HostedStream
from region.streams.table import SHARDS_AT_ONCE, StreamTable

pytestmark = pytest.mark.timeout(300)

NAME = StreamName.parse("acme/payments/orders")
DATA = Path("/felix/data")
SHARDS = 2 * SHARDS_AT_ONCE
WAIT_S = 120


class PlainSeal:
    def seal(self, batch: Batch) -> Batch:
        return batch

    def open_batch(self, batch: Batch) -> Batch:
        return batch

    def commitment(self) -> bytes:
        return bytes(32)

    def tag(self, purpose: str, data: bytes) -> bytes:
        return b""


class Watched(MemoryFiles):
    """The memory twin, with its syncs counted; its process ends at one of them."""

    syncs: Counter[str]
    ends_at = 0
    disk: MemoryDisk
    together: Barrier | None = None
    """As many shards' folders as are made at once, or none is."""
    counting: Lock

    def make_folder(self, folder: Path) -> None:
        if self.together is not None:
            self.together.wait(WAIT_S)
        super().make_folder(folder)

    def sync(self, descriptor: int) -> None:
        self._count("file")
        super().sync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        self._count(str(folder))
        super().sync_folder(folder)

    def _count(self, what: str) -> None:
        with self.counting:
            self.syncs[what] += 1
            ends = self.syncs.total() == self.ends_at
        if ends:
            self.disk.kill()


def mounted(disk: MemoryDisk) -> Watched:
    files = disk.mount(Watched)
    assert isinstance(files, Watched)
    files.syncs, files.disk, files.counting = Counter(), disk, Lock()
    return files


def table(files: MemoryFiles) -> tuple[StreamTable, LogDirectory]:
    directory = LogDirectory(DATA, "us-east", files=files)
    return StreamTable(directory, Budgets().ring, lambda *_: PlainSeal()), directory


async def opened(streams: StreamTable, shards: int) -> HostedStream:
    config = StreamConfig(shards=shards)
    return await streams.open(Stream(name=str(NAME), incarnation="ab" * 16, created_ms=1, config=config))


async def test_a_streams_shards_are_created_together_with_few_syncs_each() -> None:
    files = mounted(MemoryDisk())
    streams, directory = table(files)
    files.syncs.clear()
    files.together = Barrier(SHARDS_AT_ONCE)
    stream = await opened(streams, SHARDS)
    files.together = None
    assert list(stream.replicas) == list(range(SHARDS)), "in order"
    assert all(isinstance(shard, ShardLog) for shard in stream.replicas.values())
    # What stands above the stream's folder is synced for the shards that are created first, and not for each.
    assert files.syncs[str(DATA)] <= SHARDS_AT_ONCE
    assert files.syncs[str(DATA.parent)] <= SHARDS_AT_ONCE
    await streams.close()
    await directory.close()


async def test_what_streams_hold_on_the_disk_is_known_after_each_change_of_it() -> None:
    streams, directory = table(mounted(MemoryDisk()))
    stream = await opened(streams, 2)
    shard = stream.shard(1)
    shard.alter(replace(shard.settings, segments=SegmentLimits(segment_bytes_max=2_000)))

    def held() -> int:
        known = streams.disks.stored_bytes()[NAME.tenant]
        assert known == sum(each.disk_bytes for each in stream.serving)
        return known

    sizes = [held()]
    for _ in range(8):
        await shard.append(batch_of(b"." * 900))
        sizes.append(held())
    assert sizes == sorted(set(sizes)), "each append makes it larger"
    await shard.trim(4)
    assert held() < sizes[-1]
    trimmed = held()
    await shard.truncate(LogPoint(7))
    assert held() < trimmed
    await streams.remove(NAME, stream.record.incarnation)
    assert not streams.disks.stored_bytes()
    await streams.close()
    await directory.close()


async def test_a_loss_of_power_takes_no_shard_back_that_was_created() -> None:
    disk = MemoryDisk()
    streams, directory = table(mounted(disk))
    stream = await opened(streams, SHARDS)
    await asyncio.gather(*(shard.append(batch_of(b"kept")) for shard in stream.serving))
    disk.lose_power(Random(1), removals_first=True)
    with suppress(FelixError, OSError):
        await streams.close()
    with suppress(FelixError, OSError):
        await directory.close()

    streams, directory = table(mounted(disk))
    (stored,) = directory.stored()
    assert stored.shards == tuple(range(SHARDS))
    stream = await opened(streams, SHARDS)
    assert [shard.high_watermark for shard in stream.serving] == [1] * SHARDS
    await streams.close()
    await directory.close()


@pytest.mark.parametrize("seed", range(12))
async def test_a_crash_in_the_middle_of_a_creation_leaves_nothing_that_cannot_be_opened(seed: int) -> None:
    random, disk = Random(seed), MemoryDisk()
    files = mounted(disk)
    streams, directory = table(files)
    files.ends_at = files.syncs.total() + random.randint(1, 8 * 6)
    with suppress(FelixError, OSError):
        await opened(streams, 6)
    with suppress(FelixError, OSError):
        await streams.close()
    with suppress(FelixError, OSError):
        await directory.close()
    disk.lose_power(random, removals_first=bool(seed % 2))

    streams, directory = table(mounted(disk))
    stream = await opened(streams, 6)
    assert len(stream.serving) == 6
    for shard in stream.serving:
        await shard.append(batch_of(b"first"))
        assert shard.failure is None
    await streams.close()
    await directory.close()


async def test_what_was_deleted_while_a_broker_was_down_goes_at_its_start_however_many_marks_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = MemoryDisk()
    streams, directory = table(mounted(disk))
    kept, gone = (
        Stream(name=f"acme/ops/{name}", incarnation=life * 16, created_ms=1, config=StreamConfig())
        for name, life in (("kept", "ab"), ("gone", "cd"))
    )
    for record in (kept, gone):
        await streams.open(record)
    await streams.close()
    await directory.close()
    streams, directory = table(mounted(disk))
    asked: list[str] = []
    delete = directory.delete_stream

    async def counted(name: StreamName, incarnation: bytes) -> None:
        asked.append(str(name))
        await delete(name, incarnation)

    monkeypatch.setattr(directory, "delete_stream", counted)
    await streams.remove_marked({f"{number:032x}" for number in range(20_000)} | {gone.incarnation})
    assert asked == [gone.name]
    assert [str(stored.name) for stored in directory.stored()] == [kept.name]
    with pytest.raises(FelixError, match="was deleted"):
        await streams.open(gone)
    await streams.close()
    await directory.close()


@pytest.mark.parametrize("room", [0, 300])
async def test_a_stream_for_which_there_was_no_room_serves_once_there_is(room: int) -> None:
    """300 bytes: for one of its shards."""
    disk = MemoryDisk()
    streams, directory = table(mounted(disk))
    told: list[tuple[int, bool]] = []
    streams.on_change(lambda stream: told.append((len(stream.serving), stream.ceased)))
    whole, disk.room_bytes = disk.room_bytes, room
    stream = await opened(streams, 2)
    assert stream.unopened
    assert len(stream.serving) == bool(room)
    refused = stream.find(stream.unopened[0])
    assert isinstance(refused, UnavailableError)
    assert (refused.code, bool(refused.retry_after_ms)) == (Code.DISK_FULL, True)
    assert await opened(streams, 2) is stream, "there is none yet"
    serving = stream.serving
    disk.room_bytes = 0
    assert (await opened(streams, 2)).serving == serving, "what serves is not disturbed for nothing"
    told.clear()
    disk.room_bytes = whole
    assert await opened(streams, 2) is stream
    assert not stream.unopened
    assert told[-1] == (2, False)
    for number in range(2):
        await stream.shard(number).append(batch_of(b"here"))
    await streams.close()
    await directory.close()


async def test_the_follower_tries_a_stream_again_for_which_there_was_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("region.streams.follower.RETRY_S", 0.01)
    disk = MemoryDisk()
    streams, directory = table(mounted(disk))
    store = MemoryStore()
    catalog, mirror = Catalog(store, "us-east"), CatalogMirror(store, "us-east")
    follower = StreamFollower(streams, mirror, lambda name: None)
    whole, disk.room_bytes = disk.room_bytes, 0
    record = await catalog.create_stream(NAME, StreamConfig(), incarnation=b"i" * 16, created_ms=1)
    await mirror.start()
    stream = await streams.open(record)
    follower.opened(stream)
    running = asyncio.create_task(follower.run())
    await asyncio.sleep(0.1)
    assert stream.unopened
    disk.room_bytes = whole
    async with asyncio.timeout(WAIT_S):
        while stream.unopened or not stream.serving:  # noqa: ASYNC110 - what is waited for is not an event
            await asyncio.sleep(0.01)
    await end_tasks(running)
    await mirror.close()
    await streams.close()
    await directory.close()


async def test_a_full_disk_is_a_problem_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    disk = MemoryDisk()
    streams, directory = table(mounted(disk))
    stream = await opened(streams, 3)
    whole, disk.room_bytes = disk.room_bytes, 0
    with caplog.at_level("INFO", logger="felix.region.streams"):
        for _ in range(3):
            for number in range(3):
                with suppress(UnavailableError):
                    await stream.shard(number).append(batch_of(b"no room" * 99))
        (problem,) = streams.disks.problems()
        assert "3 shards take nothing" in problem
        disk.room_bytes = whole
        async with asyncio.timeout(WAIT_S):
            for number in range(3):
                while True:
                    try:
                        await stream.shard(number).append(batch_of(b"room"))
                        break
                    except UnavailableError as error:
                        assert error.code is Code.DISK_FULL
                        await asyncio.sleep((error.retry_after_ms or 1) / 1_000)
    assert not streams.disks.problems()
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 2, said
    assert said[0].startswith("The disk is full")
    await streams.close()
    await directory.close()


async def test_a_log_that_is_damaged_or_gone_is_a_problem() -> None:
    disk = MemoryDisk()
    streams, directory = table(mounted(disk))
    stream = await opened(streams, 3)
    for number in range(3):
        await stream.shard(number).append(batch_of(b"kept"))
    folders = [shard_folder(DATA, NAME, bytes.fromhex("ab" * 16), number) for number in range(3)]
    await streams.close()
    await directory.close()
    files = mounted(disk)
    files.remove_folder(folders[1])
    for name in files.names(folders[2]):
        if name.endswith(".seg"):
            files.remove(folders[2] / name)
    streams, directory = table(files)
    stream = await opened(streams, 3)
    (problem,) = streams.disks.problems()
    assert problem.startswith("2 logs do not serve, damaged or gone (acme/payments/orders shard 1, …)")
    assert "is gone, or empty" in problem and "begin-anew" in problem
    assert [shard.identity.shard for shard in stream.serving] == [0]
    # A journal beside a shard is opened once a view is asked for.
    number = JournalKind.QUEUE.number(0)
    assert await streams.open_companion(stream, number) is not None
    await streams.close()
    await directory.close()
    files = mounted(disk)
    for gone in (*folders[1:], shard_folder(DATA, NAME, bytes.fromhex("ab" * 16), number)):
        if files.exists(gone):
            files.remove_folder(gone)
    streams, directory = table(files)
    stream = await opened(streams, 1)
    assert not streams.disks.problems()
    for _ in range(2):
        with pytest.raises(CorruptionError, match=r"the journal of shard 0 \(queue\) was there") as refused:
            await streams.open_companion(stream, number)
        assert "jobs that were done" in refused.value.hint
        (problem,) = streams.disks.problems()
        assert problem.startswith("1 log does not serve, damaged or gone") and "(queue)" in problem
    assert not stream.companions
    files.make_folder(folder := shard_folder(DATA, NAME, bytes.fromhex("ab" * 16), number))
    files.close(files.open(folder / BEGIN_ANEW_NAME, os.O_CREAT | os.O_RDWR))
    assert await streams.open_companion(stream, number) is not None
    assert not streams.disks.problems()
    await streams.close()
    await directory.close()


async def test_a_disk_that_does_not_answer_is_a_problem_and_holds_up_no_other_shards_readers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_disks, "UNANSWERED_S", 0.0)
    disk, goes_on = MemoryDisk(), Event()
    streams, directory = table(mounted(disk))
    stream = await opened(streams, 2)
    await stream.shard(1).append(batch_of(b"before"))
    assert not streams.disks.problems()

    def hang(call: str, path: Path) -> None:
        if call == "sync":
            goes_on.wait(WAIT_S)

    disk.on_call = hang
    waiting = asyncio.create_task(stream.shard(0).append(batch_of(b"waits")))
    async with asyncio.timeout(WAIT_S):
        while not streams.disks.problems():  # noqa: ASYNC110 - it is asked for
            await asyncio.sleep(0.01)
    (problem,) = streams.disks.problems()
    assert problem.startswith(
        "The disk has not answered for 0 s: 1 shard waits for it (acme/payments/orders shard 0)"
    )
    assert len(await stream.shard(1).read(0, 100)) == 1 and not waiting.done()
    goes_on.set()
    await waiting
    assert not streams.disks.problems()
    await streams.close()
    await directory.close()


async def test_a_stream_is_removed_where_it_is_deleted_and_not_where_its_broker_ends() -> None:
    """What goes by that counts on whether anybody opens it again."""
    disk = MemoryDisk()
    streams, directory = table(mounted(disk))
    gone = await opened(streams, 1)
    await streams.remove(gone.name, gone.record.incarnation)
    assert gone.deleted and gone.removed
    await streams.close()
    await directory.close()
    streams, directory = table(mounted(disk))
    kept = await opened(streams, 1)
    await streams.close()
    assert kept.deleted and not kept.removed
    await directory.close()
