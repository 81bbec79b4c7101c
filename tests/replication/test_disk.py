"""A replica's log on its disk: elections and commit point beside it, cuts, copies, and what a loss of power or a failed sync leaves."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from uuid import uuid4

import msgspec
import pytest
from long_runs import count
from replication.sealed import IDENTITY, entry, keyed, position

from felix.batch import Batch
from felix.errors import CorruptionError, RequestError
from felix.settings import Compaction
from felix.storage.disk import DiskFiles
from felix.storage.memory import MemoryDisk
from felix.storage.port import is_full
from region.log.compactor import WorkEndedError
from region.log.disk import DiskLog
from region.log.frame import Frame as LogFrame
from region.log.fsspec_store import no_pace
from region.log.offload import OffloadList, object_url
from region.log.offloader import upload
from region.log.point import LogPoint
from region.log.segment_limits import SegmentLimits
from region.log.shard_settings import no_tag
from region.replication.disk import (
    COPY_SUFFIX,
    ELECTIONS_NAME,
    FETCHED_FOR_COPY_MAX,
    OLD_SUFFIX,
    UNKNOWN_ELECTION,
    LogPlan,
    ReplicaDisk,
    rewrite_unsynced,
)  # fmt: skip
from region.replication.history import EpochStart
from region.replication.messages import Frame
from region.replication.origin import Beginning, decode_beginning, encode_beginning

FOLDER = Path("/shard")
PLAN = LogPlan(0, FOLDER, IDENTITY, SegmentLimits(segment_bytes_max=900))


def begun(epoch: int, offset: int, note: int = 0) -> EpochStart:
    return EpochStart(epoch, f"{epoch:016x}", LogPoint(offset, note))


def opened(disk: MemoryDisk) -> ReplicaDisk:
    files = disk.mount()
    found = ReplicaDisk.open(PLAN, files=files)
    files.sync_folder(FOLDER.parent)
    return found


def write(log: ReplicaDisk, *entries: LogFrame, starts: tuple[EpochStart, ...] = ()) -> None:
    log.write(log.log.end_point, entries, starts, now_ms=1_000)


def frames(log: ReplicaDisk) -> list[Frame]:
    """All of them, with bodies as bytes."""
    found: list[Frame] = []
    at, end = log.log.start_point, log.log.end_point
    while at < end:
        for frame in log.read(at, 500, end):
            body = frame.body
            assert isinstance(body, LogFrame)
            batch = body.batch and Batch(body.batch.header, bytes(body.batch.body))
            found.append(frame._replace(body=msgspec.structs.replace(body, batch=batch)))
            at = frame.end
    return found


def test_elections_and_the_commit_point_outlive_the_process() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    log.begin(begun(1, 0))
    write(log, entry(0, 1, 2), position(2, 1, b"at", 5))
    log.sync()
    log.keep(LogPoint(2))
    log.begin(begun(4, 2, 1))
    write(log, entry(2, 4))
    log.close()
    again = opened(disk).beginning()
    assert again.history.starts == (begun(1, 0), begun(4, 2, 1))
    assert (again.end, again.durable, again.commit) == (LogPoint(3), LogPoint(3), LogPoint(2))


def test_a_frame_whose_epoch_is_new_never_stands_without_its_election() -> None:
    for seed in range(count(30, 1_000)):
        random = Random(seed)
        disk = MemoryDisk()
        log = opened(disk)
        known = {}
        for epoch in range(1, random.randrange(2, 6)):
            start = EpochStart(epoch, f"{random.getrandbits(64):016x}", log.log.end_point)
            known[epoch] = start
            end = log.log.end_point.offset
            if random.random() < 0.5:
                # Led here.
                log.begin(start)
                if random.random() < 0.3:
                    continue
                write(log, entry(end, epoch, random.randrange(1, 3)))
            else:
                write(log, entry(end, epoch, random.randrange(1, 3)), starts=(start,))
            if random.random() < 0.4:
                log.sync()
        disk.lose_power(random)
        again = opened(disk)
        epochs = {frame.epoch for frame in frames(again)}
        starts = {start.epoch: start for start in again.beginning().history.starts}
        assert epochs <= set(starts), seed
        assert all(known[epoch] == start for epoch, start in starts.items())
        assert all(start.start <= again.log.end_point for start in starts.values())


def test_an_epoch_in_which_nothing_is_written_costs_the_disk_nothing_and_is_forgotten() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    write(log, entry(0, 1), starts=(begun(1, 0),))
    log.sync()
    calls: list[str] = []
    disk.on_call = lambda name, _: calls.append(name)
    log.begin(begun(5, 1))
    assert log.beginning().history.last == begun(5, 1) and log.log.epochs.current == 5
    assert not calls
    assert opened(disk).beginning().history.starts == (begun(1, 0),)


@pytest.mark.parametrize("is_led", [True, False])
def test_a_full_disk_refuses_the_first_frame_of_an_epoch_and_takes_it_later(is_led: bool) -> None:
    disk = MemoryDisk()
    log = opened(disk)
    starts = (begun(3, 0),)
    if is_led:
        log.begin(*starts)
    room_bytes, disk.room_bytes = disk.room_bytes, 0
    with pytest.raises(OSError, match="No space"):
        write(log, entry(0, 3), starts=starts)
    disk.room_bytes = room_bytes
    write(log, entry(0, 3), starts=starts)
    log.sync()
    disk.lose_power(Random(1))
    assert opened(disk).beginning().history.starts == (begun(3, 0),)


def test_an_older_epoch_goes_on_where_a_newer_one_wrote_nothing() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    write(log, entry(0, 1), starts=(begun(1, 0),))
    log.begin(begun(2, 1))
    log.cut(LogPoint(1))
    write(log, entry(1, 1), entry(2, 3), starts=(begun(3, 2),))
    log.close()
    again = opened(disk)
    assert [start.epoch for start in again.history.starts] == [1, 3]
    assert [frame.epoch for frame in frames(again)] == [1, 1, 3]


def test_a_log_that_was_closed_begins_no_segment_for_a_repair_that_is_late() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    write(log, entry(0, 1), starts=(begun(1, 0),))
    log.close()
    before = disk.files()
    with pytest.raises(WorkEndedError):
        log.close_active(log.log.segments[-1])
    assert disk.files() == before


def test_a_cut_below_the_commit_point_that_was_kept_lowers_it_first() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    write(log, *(entry(at, 1) for at in range(9)), starts=(begun(1, 0),))
    log.sync()
    log.keep(LogPoint(8))
    log.cut(LogPoint(3))
    write(log, *(entry(at, 2) for at in range(3, 9)), starts=(begun(2, 3),))
    log.close()
    assert opened(disk).beginning().commit == LogPoint(3)


@pytest.mark.parametrize("damage", ["flipped", "not json"])
def test_elections_that_cannot_be_read_stop_the_copy(damage: str, tmp_path: Path) -> None:
    plan = LogPlan(0, tmp_path / "shard", IDENTITY)
    log = ReplicaDisk.open(plan, files=DiskFiles())
    write(log, entry(0, 1), starts=(begun(1, 0),))
    log.close()
    path = tmp_path / "shard" / ELECTIONS_NAME
    if damage == "flipped":
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(b"")
    with pytest.raises(CorruptionError, match="who led the epochs") as stopped:
        ReplicaDisk.open(plan, files=DiskFiles())
    assert "built anew" in stopped.value.hint


def test_elections_that_are_gone_stop_the_copy(tmp_path: Path) -> None:
    plan = LogPlan(0, tmp_path / "shard", IDENTITY)
    log = ReplicaDisk.open(plan, files=DiskFiles())
    log.begin(begun(1, 0))
    write(log, entry(0, 1))
    log.close()
    (tmp_path / "shard" / ELECTIONS_NAME).unlink()
    with pytest.raises(CorruptionError, match="it is gone"):
        ReplicaDisk.open(plan, files=DiskFiles())


def test_it_says_that_a_log_was_here_or_went_further(tmp_path: Path) -> None:
    plan = LogPlan(0, tmp_path / "shard", IDENTITY)
    log = ReplicaDisk.open(plan, files=DiskFiles())
    assert not log.is_anew
    write(log, *(entry(at, 1) for at in range(3)), starts=(begun(1, 0),))
    log.sync()
    log.close()
    shutil.copytree(plan.folder, tmp_path / "earlier")
    log = ReplicaDisk.open(plan, files=DiskFiles())
    assert not (log.is_anew or log.is_short)
    write(log, entry(3, 1))
    log.sync()
    log.keep(LogPoint(4))
    log.close()
    shutil.rmtree(plan.folder)
    shutil.copytree(tmp_path / "earlier", plan.folder)
    log = ReplicaDisk.open(plan, files=DiskFiles())
    assert log.is_short and not log.is_anew
    log.close()
    shutil.rmtree(plan.folder)
    # Until something is written to it: a start may fail before that.
    for _ in range(2):
        log = ReplicaDisk.open(plan, files=DiskFiles())
        assert log.is_anew
        log.close()
    log = ReplicaDisk.open(plan, files=DiskFiles())
    write(log, entry(0, 2), starts=(begun(2, 0),))
    log.close()
    log = ReplicaDisk.open(plan, files=DiskFiles())
    assert not log.is_anew
    log.close()


def test_a_log_that_was_not_replicated_before_has_epochs_that_nobody_was_elected_for(tmp_path: Path) -> None:
    folder = tmp_path / "shard"
    log, _ = DiskLog.open(folder, IDENTITY, now_ms=1_000)
    log.begin_epoch(7)
    log.write([entry(0, 7)], 1_000)
    log.close()
    again = ReplicaDisk.open(LogPlan(0, folder, IDENTITY), files=DiskFiles())
    assert again.history.starts == (EpochStart(7, UNKNOWN_ELECTION, LogPoint(0)),)
    again.close()


def test_a_log_that_becomes_a_copy_while_it_is_led_goes_on_in_its_epoch() -> None:
    disk = MemoryDisk()
    files = disk.mount()
    alone, _ = DiskLog.open(FOLDER, IDENTITY, now_ms=1_000, files=files)
    alone.begin_epoch(3)
    alone.write_frames(alone.end_point, [entry(0, epoch=3)], 1_000)
    alone.begin_epoch(5)
    alone.write_frames(alone.end_point, [entry(1, epoch=5)], 1_000)
    alone.close()
    led = replace(PLAN, led=(5, "5" * 16))
    log = ReplicaDisk.open(led, files=files)
    assert [(each.epoch, each.election) for each in log.history.starts] == [
        (3, UNKNOWN_ELECTION),
        (5, "5" * 16),
    ]
    assert not log.is_anew and not log.is_short
    # Elected in the very epoch that it led: it goes on where it ended.
    log.begin(EpochStart(5, "5" * 16, log.log.end_point))
    write(log, entry(2, epoch=5))
    log.sync()
    # The power goes; the next start is elected for another epoch, and knows who was for this one.
    disk.lose_power(Random(1))
    found = ReplicaDisk.open(replace(PLAN, led=(9, "9" * 16)), files=disk.mount())
    assert found.history.last[:2] == (5, "5" * 16) and found.log.end_offset == 3


@pytest.mark.parametrize("loses_power", [False, True])
def test_a_log_that_becomes_a_copy_keeps_all_wherever_it_is_cut_off(loses_power: bool) -> None:
    class EndsError(Exception):
        pass

    led, calls, goes_through = replace(PLAN, led=(5, "5" * 16)), 0, False
    while not goes_through:
        disk = MemoryDisk()
        files = disk.mount()
        alone, _ = DiskLog.open(FOLDER, IDENTITY, now_ms=1_000, files=files)
        files.sync_folder(FOLDER.parent)
        alone.begin_epoch(5)
        alone.write_frames(alone.end_point, [entry(at, epoch=5) for at in range(3)], 1_000)
        alone.close()
        left = calls

        def ends(call: str, path: Path) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise EndsError

        disk.on_call = ends
        try:
            ReplicaDisk.open(led, files=files)
            goes_through = True
        except EndsError:
            pass
        disk.on_call = None
        if loses_power:
            disk.lose_power(Random(calls))
        # Its next start is before the next election, or behind it.
        log = ReplicaDisk.open(
            replace(PLAN, led=[(5, "5" * 16), (9, "9" * 16)][calls % 2]), files=disk.mount()
        )
        assert not log.is_anew and not log.is_short and log.log.end_offset == 3
        assert log.history.last.epoch == 5
        assert calls % 2 or log.history.last.election == "5" * 16
        calls += 1
    assert calls > 10


def test_a_copy_begins_where_the_leaders_log_does_and_goes_on_with_its_frames() -> None:
    leader, follower = opened(MemoryDisk()), opened(disk := MemoryDisk())
    for epoch in (1, 2):
        end = leader.log.end_point
        write(leader, entry(end.offset, epoch, 1, b"note", 9), starts=(begun(epoch, end.offset),))
        for at in range(end.offset + 1, end.offset + 20):
            write(leader, entry(at, epoch))
    start = leader.trim(LogPoint(25), now_ms=1_000)
    assert start > LogPoint(0)
    write(follower, entry(0, 1), starts=(begun(1, 0),))
    copy = follower.begin_anew(leader.told_beginning())
    assert copy.beginning().end == copy.beginning().commit == start
    at = start
    for frame in frames(leader):
        body = frame.body
        assert isinstance(body, LogFrame)
        starts = tuple(each for each in leader.history.starts if at <= each.start < frame.end)
        copy.write(at, [body], starts, now_ms=1_000)
        at = frame.end
    assert frames(copy) == frames(leader)
    assert copy.log.annotations == leader.log.annotations == {9: b"note"}
    copy.close()
    disk.lose_power(Random(1))
    again = opened(disk)
    assert frames(again) == frames(leader) and again.history.starts == leader.history.starts


def test_a_copy_that_is_cut_off_at_any_call_leaves_the_old_log_or_the_new_one() -> None:
    leader = opened(MemoryDisk())
    for at in range(60):
        write(leader, entry(at, 1), starts=(begun(1, 0),) if not at else ())
    leader.trim(LogPoint(40), now_ms=1_000)
    told = leader.told_beginning()
    for name in (OLD_SUFFIX, COPY_SUFFIX, "both"):
        disk = MemoryDisk()
        log = opened(disk)
        write(log, entry(0, 1), starts=(begun(1, 0),))
        log.close()
        files = disk.mount()
        if name in (COPY_SUFFIX, "both"):
            files.make_folder(FOLDER.with_name(FOLDER.name + COPY_SUFFIX))
        if name in (OLD_SUFFIX, "both"):
            files.rename(FOLDER, FOLDER.with_name(FOLDER.name + OLD_SUFFIX))
        again = opened(disk)
        assert again.beginning().end == LogPoint(1), name
        assert again.begin_anew(told).beginning().end == told.origin.point


class Lying(DiskFiles):
    """A disk whose syncs fail while `fails`; what was written stays in the cache."""

    def __init__(self) -> None:
        self.fails = False
        self.rewritten: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def open(self, path: Path, flags: int) -> int:
        descriptor = super().open(path, flags)
        self._names[descriptor] = path.name
        return descriptor

    def pwritev(self, descriptor, buffers, position):  # type: ignore[no-untyped-def]
        written = super().pwritev(descriptor, buffers, position)
        name = self._names[descriptor]
        self.rewritten[name] = self.rewritten.get(name, 0) + written
        return written


def test_what_a_failed_sync_may_have_left_in_the_cache_is_written_again_at_the_start(tmp_path: Path) -> None:
    """R11: the pages are there and clean, so that a sync of them would do nothing."""
    plan = LogPlan(0, tmp_path / "shard", IDENTITY)
    log = ReplicaDisk.open(plan, files=DiskFiles())
    write(log, entry(0, 1, payload=b"synced"), starts=(begun(1, 0),))
    log.sync()
    synced = log.log._written.synced_to
    write(log, entry(1, 1, payload=b"not synced"))
    log.abandon()
    (segment,) = (tmp_path / "shard").glob("*.seg")
    files = Lying()
    rewrite_unsynced(files, tmp_path / "shard")
    assert files.rewritten == {segment.name: segment.stat().st_size - synced}
    again = ReplicaDisk.open(plan, files=DiskFiles())
    assert again.beginning().end == LogPoint(2)
    again.close()
    untouched = Lying()
    rewrite_unsynced(untouched, tmp_path / "shard")
    assert not untouched.rewritten, "all of it was synced"


def same(batch: Batch) -> Batch:
    return batch


def compact(log: ReplicaDisk) -> None:
    producers = log.producers.encode(log.log.end_offset)
    assert log.compact(log.log.end_offset, Compaction(), producers, same, same) is not None


def brought(leader: ReplicaDisk, follower: ReplicaDisk, beginning: Beginning) -> None:
    """The leader's closed segments, piece by piece."""
    follower.collect()
    for closed in beginning.closed:
        position = 0
        while position < closed.size:
            data = leader.read_piece(closed.base_offset, closed.generation, position, 100)
            follower.take_piece(closed, position, data)
            position += len(data)


def records(log: ReplicaDisk) -> list[bytes]:
    found: list[bytes] = []
    offset, end = log.log.start_offset, log.log.end_offset
    while offset < end and (batches := log.log.read(offset, 500, end)):
        found += [bytes(batch.data) for batch in batches]
        offset = batches[-1].header.next_offset
    return found


@pytest.mark.parametrize("seed", range(count(20, 500)))
def test_a_copy_of_a_compacted_log_begins_with_its_segments_and_goes_on_with_its_frames(seed: int) -> None:
    random = Random(seed)
    leader, follower = opened(MemoryDisk()), opened(MemoryDisk())
    leader.begin(begun(2, 0))
    follower.begin(begun(1, 0))
    for _ in range(random.randrange(60, 100)):
        keys = [b"k%d" % random.randrange(6) for _ in range(random.randrange(1, 4))]
        write(leader, keyed(leader.log.end_offset, 2, *keys))
    leader.sync()
    compact(leader)
    assert leader.frames_from > LogPoint(0), "frames of what was compacted have holes"
    for _ in range(random.randrange(5)):
        write(leader, keyed(leader.log.end_offset, 2, b"k1"))
    beginning = decode_beginning(encode_beginning(leader.told_beginning()))
    assert beginning.closed and beginning.origin.point >= leader.frames_from
    brought(leader, follower, beginning)
    follower = follower.begin_anew(beginning)
    end = leader.log.end_point
    while follower.log.end_point < end:
        sent = leader.read(follower.log.end_point, 500, end)
        follower.write(
            follower.log.end_point,
            [frame.body for frame in sent if isinstance(frame.body, LogFrame)],
            now_ms=2_000,
        )
    assert records(follower) == records(leader)
    assert follower.history.starts == leader.history.starts
    assert follower.log.compaction.clean_to == leader.log.compaction.clean_to
    assert follower.frames_from == leader.frames_from
    # It is compacted by itself, and read again after a restart.
    for _ in range(30):
        write(follower, keyed(follower.log.end_offset, 2, b"k%d" % random.randrange(3)))
    follower.sync()
    compact(follower)
    before = records(follower)
    follower.close()
    again = ReplicaDisk.open(PLAN, files=follower._files)
    assert records(again) == before and again.frames_from > leader.frames_from


def test_a_copy_that_hears_nothing_ends_its_segment_by_its_age_and_is_compacted() -> None:
    """Its leader ends its own once nothing is written any more; what was deleted last must not stand here until the next record."""
    disk = MemoryDisk()
    log = opened(disk)
    log.begin(begun(2, 0))
    for key in (b"k1", b"k1", b"k2"):
        write(log, keyed(log.log.end_offset, 2, key))
    log.sync()
    end, wanted = log.log.end_offset, Compaction(lag_ms=0)
    assert log.log.segment_count == 1
    assert not log.compaction_due(end - 1, 0), "what may still be cut is not closed for this"
    assert log.compaction_due(end, 0)
    assert log.compact(end, wanted, log.producers.encode(end), same, same) is not None
    assert log.log.segment_count == 2 and not log.compaction_due(end, 0)
    assert [batch.header.base_offset for batch in log.log.read(0, 5_000, end)] == [1, 2]
    write(log, keyed(end, 2, b"k3"))
    log.sync()
    log.close()
    again = ReplicaDisk.open(PLAN, files=log._files)
    assert again.log.end_offset == end + 1 and again.log.segment_count == 2


def in_store_alone(log: ReplicaDisk, place: str, count: int) -> OffloadList:
    """Have the oldest segments in a store alone; the list of them."""
    listed = OffloadList(log.log.start_offset).more(
        upload(log._files, one, object_url(place, one.path.name), log.log.epochs.starts, no_pace, no_tag)
        for one in log.log.segments[:count]
    )
    log.log.follow_offloaded(listed.segments, log.log.end_offset)
    for one in log.log.segments[:count]:
        log.log.drop_local(one)
    return listed


def test_a_copy_of_a_log_whose_oldest_segments_are_in_a_store_begins_behind_them() -> None:
    leader, disk = opened(MemoryDisk()), MemoryDisk()
    write(leader, position(0, 1, b"before", 9), entry(0, 1), starts=(begun(1, 0),))
    for at in range(1, 60):
        write(leader, entry(at, 1), position(at + 1, 1, b"note %d" % at, at % 3))
    leader.sync()
    listed = in_store_alone(leader, f"memory://felix/{uuid4().hex}", 6)
    told = decode_beginning(encode_beginning(leader.told_beginning()))
    at = leader.log.segments[6].base_point
    assert (told.start, told.origin.point) == (LogPoint(0), at)
    assert leader.frames_from == leader.log.segments[6 - FETCHED_FOR_COPY_MAX].base_point
    follower = opened(disk)
    write(follower, entry(0, 1), starts=(begun(1, 0),))
    assert told.start is not None
    chain = listed.between(told.start, at.offset)
    assert chain == listed.segments
    copy = follower.begin_anew(told, chain)
    known = copy.beginning()
    assert (known.start, known.end, known.commit) == (LogPoint(0), at, at)
    assert copy.log.places.fixed_to == at
    while copy.log.end_point < leader.log.end_point:
        sent = leader.read_placed(copy.log.end_point, 500, leader.log.end_point)
        bodies = [frame.body for frame in sent if isinstance(frame.body, LogFrame)]
        copy.write(copy.log.end_point, bodies, now_ms=2_000)
    copy.close()
    disk.lose_power(Random(1))
    again = opened(disk)
    assert [one.base_point for one in again.log.segments] == [one.base_point for one in leader.log.segments]
    assert again.log.annotations == leader.log.annotations
    assert again.history.starts == leader.history.starts
    assert again.log.offload.segments == listed.segments
    # Others are begun by it as well.
    assert again.told_beginning().origin.point == at
    again.cut(again.log.segments[7].base_point)
    again.cut(at)
    assert again.log.end_point == at and again.history.starts == leader.history.starts
    with pytest.raises(RequestError, match="offloaded behind"):
        again.cut(LogPoint(at.offset - 1))


def test_a_list_reaches_where_its_segments_follow_each_other_from_the_logs_beginning_on() -> None:
    log = opened(MemoryDisk())
    for at in range(40):
        write(log, entry(at, 1), starts=(begun(1, 0),) if not at else ())
    log.sync()
    listed = in_store_alone(log, f"memory://felix/{uuid4().hex}", 4)
    one, two, three, four = listed.segments
    end = four.next_offset
    assert listed.between(LogPoint(two.base_offset), three.next_offset) == (two, three)
    assert OffloadList(0, (one, two, four)).between(LogPoint(0), end) is None
    assert listed.between(LogPoint(0), end - 1) is None and listed.between(LogPoint(1), end) is None
    assert listed.between(LogPoint(0, 1), end) is None, "positions stand before it"
    # Of a leader whose segments were others: one that ends elsewhere leads nowhere.
    longer = msgspec.structs.replace(two, next_offset=two.next_offset + 1, url="of another leader")
    assert OffloadList(0, (one, longer, two, three, four)).between(LogPoint(0), end) == listed.segments


def test_a_copy_of_compacted_segments_does_not_take_for_committed_what_may_be_cut() -> None:
    leader, follower = opened(MemoryDisk()), opened(disk := MemoryDisk())
    leader.begin(begun(1, 0))
    for number in range(60):
        write(leader, keyed(number, 1, b"k%d" % (number % 3)))
    leader.sync()
    compact(leader)
    told = leader.told_beginning()
    brought(leader, follower, told)
    copy = follower.begin_anew(told)
    assert copy.beginning().commit < copy.beginning().end == told.origin.point
    copy.close()
    assert opened(disk).beginning().commit == copy.beginning().commit


def test_a_segment_that_is_gone_is_told_as_nothing() -> None:
    leader = opened(MemoryDisk())
    leader.begin(begun(1, 0))
    for number in range(60):
        write(leader, keyed(number, 1, b"k%d" % (number % 3)))
    leader.sync()
    compact(leader)
    (first, *_) = leader.told_beginning().closed
    assert leader.read_piece(first.base_offset, first.generation + 1, 0, 100) == b""
    assert leader.read_piece(first.base_offset, first.generation, first.size, 100) == b""
    assert len(leader.read_piece(first.base_offset, first.generation, first.size - 10, 100)) == 10


def test_a_copy_that_finds_no_room_as_it_takes_the_place_of_the_log_leaves_that_in_use() -> None:
    """Wherever: frames go to the log that is there, and the next copy takes its place."""
    at, failed = 0, True
    while failed:
        leader, follower = opened(MemoryDisk()), opened(disk := MemoryDisk())
        write(follower, entry(0, 1), entry(1, 1), starts=(begun(1, 0),))
        follower.sync()
        follower.keep(LogPoint(1))
        write(leader, entry(0, 1), starts=(begun(1, 0),))
        write(leader, entry(1, 2), starts=(begun(2, 1),))
        beginning = decode_beginning(encode_beginning(leader.told_beginning()))
        failed, calls = False, 0

        def no_room(call: str, path: Path, fails: int = at) -> None:
            nonlocal failed, calls
            if call in ("open", "pwritev", "sync", "rename"):
                calls += 1
                if calls == fails + 1:
                    failed = True
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        disk.on_call = no_room
        took_place = False
        try:
            follower = follower.begin_anew(beginning)
            took_place = True
        except OSError as error:
            assert is_full(error), at
        disk.on_call = None
        if not took_place:
            write(follower, entry(2, 1))
            follower.sync()
            assert [frame.base_offset for frame in entries(follower)] == [0, 1, 2]
            follower = follower.begin_anew(beginning)
        write(follower, *entries(leader), starts=leader.history.starts)
        follower.sync()
        disk.lose_power(Random(at))
        again = opened(disk)
        assert frames(again) == frames(leader) and not again.is_short, at
        assert not disk.mounted.exists(FOLDER.with_name(FOLDER.name + OLD_SUFFIX))
        at += 1
    assert at > 20


def entries(log: ReplicaDisk) -> list[LogFrame]:
    return [frame.body for frame in frames(log) if isinstance(frame.body, LogFrame)]
