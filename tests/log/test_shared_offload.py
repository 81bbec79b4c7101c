"""Offload of a log with copies: leaders that follow each other share one list, whatever fails in the middle of a turn."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec
import pytest
from log.building import IDENTITY, batch_of, open_disk, placed, restore_shard
from log.test_compaction import Crash
from log.test_offload import HOOKS, SMALL, offload, read_all
from msgspec.structs import replace

from felix.errors import Code, CorruptionError, FelixError, UnavailableError
from felix.settings import Offload, Retention
from felix.storage.disk import DiskFiles
from felix.storage.port import Files
from felix.storage.small_file import load_checked, save_checked
from keys.link import tag
from region.log import fsspec_store as store
from region.log import maintenance
from region.log.copies import LedLog
from region.log.directory import offload_base, shard_place
from region.log.disk import DiskLog
from region.log.errors import SegmentDamagedError
from region.log.frame import Frame, Place
from region.log.offload import (
    OFFLOADED_NAME,
    ListPointer,
    OffloadList,
    OffloadState,
    decode_list,
    decode_offload,
    encode_list,
    encode_offload,
    epoch_of,
    list_name,
    object_name,
    object_url,
)
from region.log.offloader import check_object, delete_object
from region.log.point import LogPoint
from region.log.producers import ProducerTable
from region.log.segment import ShardIdentity
from region.log.shard import ShardLog, ShardSettings, ShardStore
from region.log.shared_offload import TAG, ForgedListError, SharedLists, delete_all

FOLLOWERS_READ = 10_000
SECRET = bytes(range(32))


def lists_of(identity: ShardIdentity) -> SharedLists:
    return SharedLists(shard_place(identity), lambda purpose, data: tag(SECRET, purpose, data, *identity))


LISTS = lists_of(IDENTITY)


class Record:
    """What the shard's record says: which epoch leads, and which list is in force. `told`: before and after each change of the pointer."""

    def __init__(self) -> None:
        self.epoch = 0
        self.pointer: ListPointer | None = None
        self.told: Callable[[], None] = lambda: None

    @property
    def heard(self) -> ListPointer | None:
        """What of it the leader knows."""
        return self.pointer

    def change(self, pointer: ListPointer) -> None:
        self.pointer = pointer


class LateRecord(Record):
    """One of which the leader knows what it heard last. While it `is_away` nobody answers, and nothing is heard: what it was asked for before
    that it does once, where it `does`."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.known: ListPointer | None = None
        self.asked: ListPointer | None = None
        self.does, self.is_away = does, False

    @property
    def heard(self) -> ListPointer | None:
        return self.known

    def change(self, pointer: ListPointer) -> None:
        if self.is_away:
            if self.does == "at once":
                self.pointer = pointer
            self.asked = self.asked or pointer
            raise UnavailableError("Nobody answers.")
        if self.pointer != self.known:
            self.known = self.pointer
            raise UnavailableError("The record was changed meanwhile.")
        self.known = self.pointer = pointer

    def come_back(self) -> None:
        self.is_away = False
        if self.does == "late":
            self.pointer = self.asked


class Led:
    """Copies of which none but this one counts, in one epoch (`region.log.copies.Copies`)."""

    def __init__(self, disk: DiskLog, record: Record, pool: Executor) -> None:
        record.epoch += 1
        self.disk, self.record, self.pool, self.epoch = disk, record, pool, record.epoch
        self.producers = ProducerTable(settled=disk.end_offset)
        disk.shares_offload = True
        disk.begin_epoch(self.epoch)

    def led(self, log: LedLog) -> None: ...
    def committed(self, durable: LogPoint) -> LogPoint:
        return durable

    def acknowledged(self, durable: LogPoint) -> LogPoint:
        return durable

    def may_cut(self, point: LogPoint) -> bool:
        return False

    def refusal(self) -> FelixError | None:
        return None

    def written(self, prev: LogPoint, frames: Sequence[Frame]) -> None: ...
    def trimmed(self, start: LogPoint) -> None: ...
    def failed(self, error: FelixError) -> None:
        raise error

    def full(self, error: FelixError) -> None: ...

    async def repair(self, damage: SegmentDamagedError) -> None:
        raise damage

    @property
    def offloaded(self) -> ListPointer | None:
        return self.record.heard

    async def point_to(self, pointer: ListPointer) -> None:
        self.record.told()
        if self.record.epoch != self.epoch:
            raise UnavailableError("Another leader was elected.", code=Code.NOT_LEADER)
        self.record.change(pointer)
        self.record.told()

    @property
    def lists(self) -> SharedLists:
        return LISTS

    def released(self) -> None: ...


@asynccontextmanager
async def leading(
    disk: DiskLog, record: Record, place: str, local_bytes: int = 0, retention: Retention | None = None
) -> AsyncIterator[ShardLog]:
    settings = ShardSettings(
        segments=SMALL, offload=Offload(place, local_bytes), retention=retention or Retention()
    )
    with ThreadPoolExecutor(2) as pool:
        copies = Led(disk, record, pool)
        shard = await ShardLog.lead(IDENTITY, settings, HOOKS, copies, read_pool=pool, store=ShardStore(pool))
        try:
            yield shard
        finally:
            await shard.close()


def filled(folder: Path, batches: int = 20) -> DiskLog:
    log = open_disk(folder, limits=SMALL)
    grown(log, batches)
    return log


def grown(log: DiskLog, batches: int) -> None:
    for _ in range(batches):
        batch = placed(batch_of(b"%d" % log.end_offset * 40), log.end_offset, 1_000)
        log.write([Frame(batch, batch.header.base_offset, 0)], 1_000)
    log.sync()


def copied(log: DiskLog, folder: Path) -> DiskLog:
    """Another copy, whose segments begin where those of `log` do."""
    other = open_disk(folder, limits=SMALL)
    while (point := other.end_point) < log.end_point:
        frames = log.read_frames(point, FOLLOWERS_READ, log.end_point)
        first = Place.FIRST if log.begins_segment(point) else Place.LATER
        other.write_frames(point, [replace(frames[0], place=first), *frames[1:]], 1_000)
    other.sync()
    other.shares_offload = True
    return other


async def turns(shard: ShardLog, place: str) -> None:
    """Until nothing is due."""
    now_ms = 0
    while shard.offload_due(now_ms):
        await shard.offload(now_ms, place)
        now_ms += 1


def check_store(record: Record, log: DiskLog, place: str) -> OffloadList:
    """The list in force has each closed segment of the log, every object is what it says, and nothing else is there."""
    listed = LISTS.read(record.pointer)
    assert [one.base_offset for one in listed.segments] == [one.base_offset for one in log.segments[:-1]]
    for one in listed.segments:
        check_object(one)
    assert record.pointer is not None
    wanted = {record.pointer.url} | {url for one in listed.segments for url in (one.url, one.manifest_url)}
    assert {object_url(place, name) for name in store.list_names(place)} == wanted
    return listed


@pytest.fixture
def place() -> str:
    return offload_base(f"memory://felix/{uuid4().hex}", IDENTITY)


async def test_a_copy_knows_its_own_segments_in_the_list_and_reads_them_from_the_store(
    tmp_path: Path, place: str
) -> None:
    record, log = Record(), filled(tmp_path / "a")
    other = copied(log, tmp_path / "b")
    everything = read_all(log)
    async with leading(log, record, place) as shard:
        await turns(shard, place)
    listed = check_store(record, log, place)
    assert other.follow_offloaded(listed.segments, log.segments[1].next_offset) == 2, (
        "what is committed there"
    )
    assert other.follow_offloaded(listed.segments, other.end_offset) == len(listed.segments) - 2
    while (oldest := other.droppable(0)) is not None:
        other.drop_local(oldest)
    assert len(list((tmp_path / "b").glob("*.seg"))) == 1
    assert read_all(other) == everything
    other.close()
    again = open_disk(tmp_path / "b", limits=SMALL)
    assert read_all(again) == everything
    again.close()
    restore_shard(place, tmp_path / "c", IDENTITY, log._files, HOOKS.tag)
    restored = open_disk(tmp_path / "c", limits=SMALL)
    assert read_all(restored) == everything[: restored.end_offset]
    restored.close()


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_copy_whose_objects_are_named_no_more_goes_by_those_that_are(
    tmp_path: Path, place: str, is_local: bool
) -> None:
    """The store of the records was put back, and a leader that knew nothing of the list before uploaded its own."""
    log, record = filled(tmp_path / "a"), Record()
    other, third = copied(log, tmp_path / "b"), copied(log, tmp_path / "c")
    everything = read_all(log)
    async with leading(log, record, place) as shard:
        await turns(shard, place)
    before = LISTS.read(record.pointer)
    other.follow_offloaded(before.segments, other.end_offset)
    if not is_local:
        while (oldest := other.droppable(0)) is not None:
            other.drop_local(oldest)
        assert read_all(other) == everything
    record.pointer = None
    async with leading(third, record, place) as shard:
        await turns(shard, place)
    now = check_store(record, third, place)
    assert not {one.url for one in now.segments} & {one.url for one in before.segments}
    assert other.follow_offloaded(now.segments, other.end_offset) == len(now.segments)
    assert other.offload.segments == now.segments
    assert other.follow_offloaded(now.segments, other.end_offset) == 0
    while (oldest := other.droppable(0)) is not None:
        other.drop_local(oldest)
    assert read_all(other) == everything
    other.close()
    again = open_disk(tmp_path / "b", limits=SMALL)
    assert read_all(again) == everything
    again.close()


async def test_what_one_store_did_not_delete_goes_once_it_does_though_another_one_is_offloaded_to(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, log = Record(), filled(tmp_path / "a")
    other = offload_base(f"memory://felix/{uuid4().hex}", IDENTITY)
    async with leading(log, record, place) as shard:
        await turns(shard, place)
        grown(log, 20)
    async with leading(log, record, other) as shard:
        await turns(shard, other)
        assert store.list_names(place) and store.list_names(other)
        real, is_away = store.delete, True

        def delete(url: str) -> None:
            if is_away and url.startswith(place):
                raise UnavailableError("The store is away.")
            real(url)

        monkeypatch.setattr(store, "delete", delete)
        listed = LISTS.read(record.pointer)
        await shard.trim(listed.segments[-2].base_offset)
        now_ms, failed = 10, 0
        for _ in range(5):
            now_ms += 3 * maintenance.OFFLOAD_AGAIN_MS_MAX
            if shard.offload_due(now_ms):
                try:
                    await shard.offload(now_ms, other)
                except UnavailableError:
                    failed += 1
        assert failed and store.list_names(place)
        left = LISTS.read(record.pointer)
        assert {one.url.rpartition("/")[0] for one in left.segments} == {other}
        wanted = {url for one in left.segments for url in (one.url, one.manifest_url)}
        assert record.pointer is not None
        assert {object_url(other, name) for name in store.list_names(other)} == {*wanted, record.pointer.url}
        is_away = False
        for _ in range(3):
            now_ms += 3 * maintenance.OFFLOAD_AGAIN_MS_MAX
            if shard.offload_due(now_ms):
                await shard.offload(now_ms, other)
        assert store.list_names(place) == []


@pytest.mark.parametrize("loses_answers", [False, True])
async def test_another_leader_goes_on_wherever_the_one_before_it_ended(
    loses_answers: bool, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each call of the store or of the record: before it was done, or, `loses_answers`, behind it."""
    calls, left = 0, -1

    def call() -> None:
        nonlocal calls
        calls += 1
        if left == 0 or calls > left > 0:
            raise UnavailableError("It does not answer.")

    def around(name: str) -> None:
        done = getattr(store, name)

        def wrapped(*arguments: object) -> object:
            if not loses_answers:
                call()
            found = done(*arguments)
            if loses_answers:
                call()
            return found

        monkeypatch.setattr(store, name, wrapped)

    for name in ("put_file", "put_bytes", "get_bytes", "digest_of", "delete", "list_names"):
        around(name)
    at, ends = 1, False
    while not ends:
        folder, base = tmp_path / str(at), offload_base(f"memory://felix/{uuid4().hex}", IDENTITY)
        record, log = Record(), filled(folder / "a", 9)
        record.told = call
        other = copied(log, folder / "b")
        everything = read_all(log)
        calls, left = 0, at
        async with leading(log, record, base, 10_000) as deposed:
            try:
                await turns(deposed, base)
                ends = True
            except UnavailableError:
                pass
            left = -1
            async with leading(other, record, base) as shard:
                await turns(shard, base)
                listed = check_store(record, other, base)
                # The one before wakes up.
                with pytest.raises(UnavailableError):
                    grown(log, 6)
                    deposed.commit_moved()
                    while True:
                        await deposed.offload(1 << 40, base)
                assert LISTS.read(record.pointer) == listed
                for one in listed.segments:
                    check_object(one)
        assert read_all(other) == everything
        log.close()
        other.close()
        at += 3


async def test_retention_deletes_in_the_store_once_a_list_without_it_is_in_force(
    tmp_path: Path, place: str
) -> None:
    record, log = Record(), filled(tmp_path / "a")
    other = copied(log, tmp_path / "b")
    async with leading(log, record, place) as shard:
        await turns(shard, place)
        before = LISTS.read(record.pointer)
        other.follow_offloaded(before.segments, other.end_offset)
        assert await shard.trim(before.segments[2].next_offset) == 3
        assert {one.url for one in before.segments[:3]} <= {
            object_url(place, name) for name in store.list_names(place)
        }
        await turns(shard, place)
        listed = check_store(record, log, place)
        assert listed.start == log.start_offset and not log.offload.pending_deletion
    # The other one has not heard of it, and leads.
    async with leading(other, record, place) as shard:
        await turns(shard, place)
        assert other.start_offset == log.start_offset
        check_store(record, other, place)
    assert read_all(other) == read_all(log)


async def test_a_deleted_stream_leaves_nothing_in_the_store_of_which_retention_let_go_of_all_else(
    tmp_path: Path, place: str
) -> None:
    """Neither the list, which names no segment any more, nor what a leader that failed has uploaded in vain."""
    record, log = Record(), filled(tmp_path / "a")
    other = copied(log, tmp_path / "b")
    async with leading(log, record, place) as shard:
        await turns(shard, place)
        other.follow_offloaded(LISTS.read(record.pointer).segments, other.end_offset)
        for each in (log, other):
            each.trim(each.segments[-1].base_offset, 1_000)
        await turns(shard, place)
        assert not LISTS.read(record.pointer).segments
    store.put_bytes(b"left", object_url(place, object_name(30, 7)))
    other.close()
    for folder in (tmp_path / "a", tmp_path / "b"):
        before = store.list_names(place)
        assert len(before) == 2
        payload = load_checked(DiskFiles(), folder / OFFLOADED_NAME)
        assert payload is not None
        delete_all(decode_offload(payload))
        assert store.list_names(place) == []
        for name in before:
            store.put_bytes(b"left", object_url(place, name))


async def test_what_a_first_turn_has_uploaded_in_vain_goes_with_the_stream(
    tmp_path: Path, place: str
) -> None:
    record, log = Record(), filled(tmp_path)

    def lose() -> None:
        raise UnavailableError("The answer was lost.")

    record.told = lose
    async with leading(log, record, place) as shard:
        with pytest.raises(UnavailableError):
            await shard.offload(0, place)
    assert store.list_names(place) and not log.offload.urls
    payload = load_checked(DiskFiles(), tmp_path / OFFLOADED_NAME)
    assert payload is not None
    delete_all(decode_offload(payload))
    assert store.list_names(place) == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_place_that_an_earlier_version_noted_nowhere_is_known_after_retention_let_go_of_all_there(
    is_killed: bool, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path)
    offload(log, place)
    log.close()
    state = encode_offload(replace(log.offload, places=()))
    save_checked(DiskFiles(), tmp_path / OFFLOADED_NAME, state)
    again, _ = DiskLog.open(tmp_path, IDENTITY, now_ms=1_000, limits=SMALL, shares_offload=True)
    with monkeypatch.context() as patch:
        if is_killed:
            patch.setattr(again, "save_offload", killed)
        with pytest.raises(Crash) if is_killed else nullcontext():
            again.trim(again.segments[-1].base_offset, 1_000)
    again.abandon()
    again, _ = DiskLog.open(tmp_path, IDENTITY, now_ms=1_000, limits=SMALL, shares_offload=True)
    assert again.offload == OffloadState(places=(place,))
    again.close()


def killed(_: object) -> None:
    raise Crash


async def test_a_damaged_list_stops_offload_and_deletes_nothing(tmp_path: Path, place: str) -> None:
    record, log = Record(), filled(tmp_path / "a")
    other = copied(log, tmp_path / "b")
    async with leading(log, record, place) as shard:
        await turns(shard, place)
    assert record.pointer is not None
    whole, names = store.get_bytes(record.pointer.url), store.list_names(place)
    store.put_bytes(whole[:-9] + b"x" + whole[-8:], record.pointer.url)
    async with leading(other, record, place) as shard:
        with pytest.raises(CorruptionError, match="is not the list"):
            await shard.offload(0, place)
        assert shard.failure is None and store.list_names(place) == names
        store.put_bytes(whole, record.pointer.url)
        await turns(shard, place)
        check_store(record, other, place)


async def test_a_list_that_the_store_changes_as_it_is_written_is_never_in_force(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, log = Record(), filled(tmp_path / "a")
    put = store.put_bytes

    def changes(data: bytes, url: str) -> None:
        put(data[:-9] + b"x" + data[-8:] if "/list-" in url else data, url)

    async with leading(log, record, place) as shard:
        with monkeypatch.context() as patch:
            patch.setattr(store, "put_bytes", changes)
            with pytest.raises(UnavailableError, match="not what was written"):
                await shard.offload(0, place)
            assert record.pointer is None and shard.failure is None
        while shard.offload_due(60_000):
            await shard.offload(60_000, place)
        check_store(record, log, place)


def test_a_store_that_does_not_say_whether_an_object_is_there_is_not_believed_that_it_is_not(
    tmp_path: Path, place: str
) -> None:
    url = f"file://{tmp_path}/store/object"
    assert not store.is_there(url) and not store.is_there(f"{place}/object")
    store.put_bytes(b"here", url)
    assert store.is_there(url)
    # What a share answers whose server is away, and a path in which a link leads back to itself.
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UnavailableError):
        store.is_there(f"file://{tmp_path}/loop/object")


@pytest.mark.parametrize("is_applied", [True, False])
async def test_a_change_of_the_list_whose_answer_is_lost_leaves_nothing_behind(
    is_applied: bool, tmp_path: Path, place: str
) -> None:
    """Also of objects without an epoch in their names, of the time with one copy, which no listing deletes."""
    log, record = filled(tmp_path / "a"), Record()
    offload(log, place)
    grown(log, 6)
    async with leading(log, record, place) as shard:
        await turns(shard, place)
        check_store(record, log, place)
        await shard.trim(log.segments[2].next_offset)
        before, calls = record.pointer, 0

        def lose() -> None:
            nonlocal calls
            calls += 1
            if calls == (2 if is_applied else 1):
                raise UnavailableError("The answer was lost.")

        record.told = lose
        with pytest.raises(UnavailableError):
            await shard.offload(0, place)
        assert (record.pointer != before) is is_applied
        now_ms = 1 << 40
        while shard.offload_due(now_ms):
            await shard.offload(now_ms, place)
        check_store(record, log, place)
        assert not shard.offload_due(now_ms)


async def test_a_store_that_deletes_nothing_for_a_while_holds_up_no_upload(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, log = Record(), filled(tmp_path / "a")
    monkeypatch.setattr(maintenance, "UPLOADS_PER_LIST", 2)
    closed = log.segments[:-1]
    async with leading(log, record, place) as shard:
        await shard.offload(0, place)
        with monkeypatch.context() as patch:

            def refuses(url: str) -> None:
                raise UnavailableError(f"{url} may not be deleted.")

            patch.setattr(store, "delete", refuses)
            for turn in range(2, (len(closed) + 1) // 2 + 1):
                with pytest.raises(UnavailableError, match="may not be deleted"):
                    await shard.offload(turn << 20, place)
                assert len(LISTS.read(record.pointer).segments) == min(2 * turn, len(closed))
        assert shard.offload_due(1 << 40)
        await shard.offload(1 << 40, place)
        check_store(record, log, place)


async def test_a_store_that_fails_now_and_then_is_given_each_segment_once(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, log = Record(), filled(tmp_path / "a", 50)
    put_file = store.put_file
    calls: list[str] = []

    def put(files: Files, source: Path, url: str, pace: store.Pace = store.no_pace) -> store.Digest:
        calls.append(url)
        if len(calls) % 3 == 0:
            raise UnavailableError("Not this time.")
        return put_file(files, source, url, pace)

    monkeypatch.setattr(store, "put_file", put)
    closed = len(log.segments) - 1
    assert closed > 6
    async with leading(log, record, place) as shard:
        now_ms, failed = 0, 0
        while shard.offload_due(now_ms) and failed < closed:
            with suppress(UnavailableError):
                await shard.offload(now_ms, place)
                failed -= 1
            failed += 1
            # Each time it took something.
            now_ms += maintenance.OFFLOAD_AGAIN_MS
        assert shard.counters.offloaded_segments == closed and shard.counters.offload_failed == failed
    check_store(record, log, place)
    assert failed == (closed - 1) // 2 and len(calls) == closed + failed


async def test_a_crash_between_a_start_and_the_deletion_below_it_dooms_no_object_of_a_list(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, log = Record(), filled(tmp_path / "a")
    other = copied(log, tmp_path / "b")
    async with leading(log, record, place) as shard:
        await turns(shard, place)
    listed = LISTS.read(record.pointer)
    other.follow_offloaded(listed.segments, other.end_offset)

    def ends(_: object) -> None:
        raise OSError("the power is cut")

    monkeypatch.setattr(other, "save_offload", ends)
    with pytest.raises(OSError, match="power"):
        other.trim(listed.segments[2].next_offset, 1_000)
    other.abandon()
    shared = open_disk(tmp_path / "b", limits=SMALL, shares_offload=True)
    assert shared.start_offset == listed.segments[2].next_offset
    assert shared.offload.segments == listed.segments[3:] and not shared.offload.pending_deletion
    shared.close()


async def test_an_index_of_another_file_that_a_power_cut_left_is_not_gone_by(
    tmp_path: Path, place: str
) -> None:
    record, log = Record(), filled(tmp_path / "a")
    other = open_disk(tmp_path / "b", limits=SMALL, commitment=lambda: b"c" * 32)
    for one in log.segments:
        for frame in log.read_frames(one.base_point, 1 << 20, one.end_point):
            first = Place.FIRST if log.begins_segment(other.end_point) else Place.LATER
            other.write_frames(other.end_point, [replace(frame, place=first)], 1_000)
    other.sync()
    other.shares_offload = True
    everything = read_all(log)
    async with leading(log, record, place) as shard:
        await turns(shard, place)
    other.follow_offloaded(LISTS.read(record.pointer).segments, other.end_offset)
    indexes = {one.index_path: one.index_path.read_bytes() for one in other.segments[:-1]}
    while (oldest := other.droppable(0)) is not None:
        other.drop_local(oldest)
    other.close()
    assert not any(path.exists() for path in indexes), "the files have other lengths"
    for path, data in indexes.items():
        path.write_bytes(data)
    again = open_disk(tmp_path / "b", limits=SMALL, shares_offload=True)
    assert read_all(again) == everything
    again.close()


async def test_what_the_only_copy_offloaded_is_the_first_list(tmp_path: Path, place: str) -> None:
    log = filled(tmp_path / "a")
    offload(log, place)
    record = Record()
    names = {one.url for one in log.offload.segments}
    grown(log, 6)
    async with leading(log, record, place) as shard:
        await turns(shard, place)
        listed = check_store(record, log, place)
        assert names < {one.url for one in listed.segments}, "none was uploaded again"


async def test_an_unclean_election_gives_up_what_was_listed_behind_it(tmp_path: Path, place: str) -> None:
    record, log = Record(), filled(tmp_path / "a", 10)
    short = copied(log, tmp_path / "b")
    grown(log, 10)
    async with leading(log, record, place) as shard:
        await turns(shard, place)
    async with leading(short, record, place) as shard:
        await turns(shard, place)
    listed = LISTS.read(record.pointer)
    assert listed.segments and all(one.next_offset <= short.end_offset for one in listed.segments)
    assert sum(name.endswith(".seg") for name in store.list_names(place)) == len(listed.segments)


def test_names_tell_the_epoch_of_who_wrote_them() -> None:
    assert epoch_of("00000000000000000007-0000000003.seg") == 3
    assert epoch_of("00000000000000000007-0000000003.seg.json") == 3
    assert epoch_of("list-0000000012-0123456789abcdef.json") == 12
    assert epoch_of("00000000000000000007.seg") is epoch_of("else") is None


def test_a_list_that_cannot_be_read_names_its_object() -> None:
    for data in (b"", b"{}x", b'{"version":2}', b'{"segments":[{"url":"u"}]}'):
        with pytest.raises(CorruptionError, match="memory://x/list"):
            decode_list(data, "memory://x/list")
    assert decode_list(b"{}", "") == OffloadList()


def pointer_to(listed: OffloadList, url: str, epoch: int, lists: bytes = SECRET) -> ListPointer:
    """As who holds this secret would make it, of a list that stands at `url`."""
    data = encode_list(listed)
    store.put_bytes(data, url)
    bare = ListPointer(url, hashlib.sha256(data).hexdigest(), epoch)
    return msgspec.structs.replace(bare, tag=tag(lists, TAG, bare.tagged, *IDENTITY).hex())


def all_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


OTHER: Final = IDENTITY._replace(stream="acme/payments/refunds", incarnation=bytes(16))


@pytest.mark.parametrize(
    "how", ["untagged", "of another shard", "elsewhere", "a stranger's object", "no object at all", "dotted"]
)
async def test_a_list_that_no_broker_wrote_touches_nothing_and_is_replaced(
    tmp_path: Path, place: str, how: str
) -> None:
    record, log = Record(), filled(tmp_path / "a")
    async with leading(log, record, place) as shard:
        await turns(shard, place)
    listed = check_store(record, log, place)
    victim = tmp_path / "elsewhere" / "root.key"
    victim.parent.mkdir()
    victim.write_bytes(b"no object")
    manifest = victim.with_name("root.key.json")
    manifest.write_bytes(b"{}")
    stranger = msgspec.structs.replace(listed.segments[0], url=f"file://{victim}", next_offset=1 << 40)
    url, other = object_url(place, list_name(1, "f" * 64)), offload_base(f"file://{tmp_path}/s", OTHER)
    match how:
        case "untagged":
            forged = pointer_to(OffloadList(190, (stranger,)), url, 1, b"!" * 32)
        case "of another shard":
            forged = lists_of(OTHER).write(listed, other, 1)
        case "elsewhere":
            forged = pointer_to(listed, f"file://{tmp_path}/elsewhere/list.json", 1)
        case "a stranger's object":
            forged = pointer_to(OffloadList(0, (stranger, *listed.segments)), url, 1)
        case "no object at all":
            forged = ListPointer("data:application/json;base64,e30=", "0" * 64, 1)
        case "dotted":
            segments = (msgspec.structs.replace(stranger, url=f"{place}/../../{victim.name}"),)
            forged = pointer_to(OffloadList(0, segments), url, 1)
    before = all_below(tmp_path), log.start_offset
    with pytest.raises(ForgedListError):
        LISTS.read(forged)
    record.pointer = forged
    async with leading(log, record, place) as shard:
        await turns(shard, place)
    assert record.pointer not in (None, forged)
    assert LISTS.read(record.pointer).segments == listed.segments
    assert (all_below(tmp_path), log.start_offset) == before
    for one in listed.segments:
        check_object(one)


async def test_a_list_says_that_records_are_gone_and_is_believed_where_their_objects_are(
    tmp_path: Path, place: str
) -> None:
    record, log = Record(), filled(tmp_path / "a")
    async with leading(log, record, place) as shard:
        await turns(shard, place)
    listed = check_store(record, log, place)
    fourth = listed.segments[3]
    # Whoever led before let go of three segments, and deleted the objects of two of them.
    record.pointer = LISTS.write(listed.less(fourth.base_offset), place, record.epoch)
    for one in listed.segments[:2]:
        delete_object(one.url)
    async with leading(log, record, place) as shard:
        await turns(shard, place)
    assert log.start_offset == listed.segments[2].base_offset
    assert LISTS.read(record.pointer).segments == listed.segments[2:]


@pytest.mark.parametrize("knows_the_list", [True, False])
async def test_a_pointer_to_a_list_that_was_replaced_ends_no_offload(
    tmp_path: Path, place: str, knows_the_list: bool
) -> None:
    record, log = Record(), filled(tmp_path / "a", 160)
    other = copied(log, tmp_path / "b")
    async with leading(log, record, place) as shard:
        await shard.offload(0, place)
        replaced = record.pointer
        await turns(shard, place)
        assert record.pointer != replaced
        if knows_the_list:
            record.pointer = replaced
            await shard.offload(1 << 40, place)
            check_store(record, log, place)
    record.pointer = replaced
    # The next leader has heard of no list.
    async with leading(other, record, place) as shard:
        for turn in range(1, 5):
            await shard.offload(turn << 40, place)
    check_store(record, other, place)
    # A store that has nothing of the shard's may be another one: nothing is begun anew in it.
    for name in store.list_names(place):
        store.delete(object_url(place, name))
    async with leading(other, record, place) as shard:
        with pytest.raises(UnavailableError):
            await shard.offload(0, place)


async def test_a_list_with_a_segment_that_ends_before_it_begins_is_damaged(
    tmp_path: Path, place: str
) -> None:
    record, log = Record(), filled(tmp_path / "a")
    async with leading(log, record, place) as shard:
        await turns(shard, place)
    last = LISTS.read(record.pointer).segments[-1]
    circle = msgspec.structs.replace(last, next_offset=last.base_offset - 1)
    with pytest.raises(CorruptionError, match="before it begins"):
        decode_list(encode_list(OffloadList(0, (circle,))), "a list")


@pytest.mark.parametrize("fails", ["deletions", "the answer of the record"])
async def test_what_is_in_force_is_not_written_over(
    fails: str, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other copies may have let their files go by then: an upload that is broken off would have ended what is whole."""
    record, log = Record(), filled(tmp_path / "a")
    put, put_file = list[str](), store.put_file
    lost = 0

    def delete(url: str) -> None:
        raise UnavailableError("The store deletes nothing.")

    def lose_answer() -> None:
        nonlocal lost
        lost += 1
        if lost % 4 == 0:
            raise UnavailableError("The record was changed, and does not say so.")

    def counted(files: Files, source: Path, url: str, pace: store.Pace) -> store.Digest:
        put.append(url)
        return put_file(files, source, url, pace)

    async with leading(log, record, place) as shard:
        await turns(shard, place)
        grown(log, 20)
    monkeypatch.setattr(store, "put_file", counted)
    if fails == "deletions":
        monkeypatch.setattr(store, "delete", delete)
    else:
        record.told = lose_answer
    async with leading(log, record, place) as shard:
        for turn in range(8):
            with suppress(UnavailableError):
                await shard.offload(turn * maintenance.ORPHANS_AGAIN_MS, place)
    assert put and sorted(put) == sorted(set(put))
    assert all(one.remote is not None for one in log.segments[:-1])


@pytest.mark.parametrize("does", ["at once", "late", "nothing"])
async def test_what_may_be_in_force_is_not_written_over(
    does: str, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader neither gets an answer nor hears that its list is in force. Copies that heard of it may have let their files go by then."""
    record, log = LateRecord(does), filled(tmp_path / "a")
    put, put_file, put_bytes = list[str](), store.put_file, store.put_bytes

    def put_segment(files: Files, source: Path, url: str, pace: store.Pace) -> store.Digest:
        put.append(url)
        return put_file(files, source, url, pace)

    def put_small(data: bytes, url: str) -> None:
        put.append(url)
        put_bytes(data, url)

    async with leading(log, record, place) as shard:
        await turns(shard, place)
        grown(log, 80)
    monkeypatch.setattr(store, "put_file", put_segment)
    monkeypatch.setattr(store, "put_bytes", put_small)
    async with leading(log, record, place) as shard:
        now_ms = 0
        for is_away in (False, True, True, True, False, False, False):
            if record.is_away and not is_away:
                record.come_back()
            record.is_away = is_away
            with suppress(UnavailableError):
                await shard.offload(now_ms, place)
            now_ms += maintenance.OFFLOAD_AGAIN_MS_MAX
            if record.pointer is not None:
                for one in LISTS.read(record.pointer).segments:
                    check_object(one)
        await shard.offload(now_ms + maintenance.ORPHANS_AGAIN_MS, place)
    assert put and sorted(put) == sorted(set(put))
    check_store(record, log, place)
