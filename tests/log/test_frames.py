"""A log that is copied frame by frame is the same log: points, bytes, annotations, producers, epochs, and what readers see.

Both logs are on disks in memory; the copy's loses its power now and then, and goes on where it stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from log.building import (
    IDENTITY,
    append,
    batch_of,
    compact,
    keyed,
    open_disk,
    payloads_of,
    placed,
    serving,
    write_batches,
)
from long_runs import count

from felix.batch import Batch, NewRecord, encode_batch
from felix.errors import Code, RequestError
from felix.settings import Deduplication
from felix.storage.disk import DiskFiles
from felix.storage.memory import MemoryDisk
from region.log.disk import DiskLog
from region.log.epochs import EpochHistory, EpochStart
from region.log.errors import OffsetOutOfRangeError
from region.log.frame import Frame, note_frames, note_pieces
from region.log.index import INDEX_INTERVAL_BYTES
from region.log.origin import Origin
from region.log.point import LogPoint
from region.log.producers import ProducerTable, Remembered
from region.log.recovery import recover
from region.log.segment import Head, decode_segment_header
from region.log.segment_limits import SegmentLimits
from region.log.shard import ShardSettings
from region.log.verify import verify_shard

FOLDER = Path("/shard")
SEEDS = range(count(40, 2_000))
LEADERS = SegmentLimits(segment_bytes_max=900)
FOLLOWERS = SegmentLimits(segment_bytes_max=1_300)
"""Other segments than the leader's: frames are the same, files are not."""


def opened(disk: MemoryDisk, limits: SegmentLimits, origin: Origin | None = None) -> DiskLog:
    files = disk.mount()
    log = open_disk(FOLDER, files, limits=limits, origin=origin)
    files.sync_folder(FOLDER.parent)
    return log


def frames_of(log: DiskLog, point: LogPoint | None = None) -> list[tuple[LogPoint, Frame]]:
    """Every frame from `point` on, with where the log stands behind it; bodies as bytes."""
    found: list[tuple[LogPoint, Frame]] = []
    at = point or log.start_point
    while frames := log.read_frames(at, 700, log.end_point):
        for frame in frames:
            at = after(at, frame)
            batch = frame.batch and Batch(frame.batch.header, bytes(frame.batch.body))
            found.append((at, msgspec.structs.replace(frame, batch=batch)))
    assert at == log.end_point
    return found


def after(point: LogPoint, frame: Frame) -> LogPoint:
    if frame.batch is None:
        return LogPoint(point.offset, point.note + 1)
    return LogPoint(frame.batch.header.next_offset)


def producers_of(table: ProducerTable) -> dict[int, tuple[Remembered, ...]]:
    return dict(table)


@dataclass
class Leader:
    """A log that is appended to, and what is known of it besides."""

    random: Random
    disk: MemoryDisk = field(default_factory=MemoryDisk)
    producers: ProducerTable = field(default_factory=ProducerTable)
    sequences: dict[int, int] = field(default_factory=dict)
    epoch: int = 1

    def __post_init__(self) -> None:
        self.log = opened(self.disk, LEADERS)

    def frame(self, offset: int) -> Frame:
        random = self.random
        slot, annotation = random.randrange(3), random.randbytes(random.randrange(1, 30))
        kind = random.randrange(7)
        if kind == 0:
            return Frame(None, offset, self.epoch, slot, annotation)
        if kind == 1:
            return Frame(None, offset, self.epoch, slot)
        if kind == 6:
            return Frame(None, offset, self.epoch, annotation=annotation, is_note=True)
        producer = random.randrange(3)
        sequence = self.sequences.get(producer, 0)
        batch = placed(
            batch_of(
                *(random.randbytes(random.randrange(200)) for _ in range(random.randrange(1, 4))),
                producer=producer,
                sequence=sequence if producer else 0,
            ),
            offset,
            1_000 + offset,
            self.epoch,
        )
        header = batch.header
        if producer:
            self.sequences[producer] = sequence + header.records
            self.producers.settle(offset)
            self.producers.record(
                producer,
                Remembered(0, sequence, sequence + header.records, offset, header.append_time_ms),
            )
        return Frame(batch, offset, self.epoch, slot, annotation if kind == 2 else b"")

    def write(self) -> None:
        if self.random.random() < 0.1:
            self.epoch += self.random.randrange(1, 3)
            history = EpochHistory(list(self.log.epochs.starts))
            history.begin(self.epoch, self.log.end_offset)
            self.log.save_epochs(history)
        frames: list[Frame] = []
        offset = self.log.end_offset
        for _ in range(self.random.randrange(1, 5)):
            frames.append(self.frame(offset))
            offset = frames[-1].batch.header.next_offset if frames[-1].batch else offset
        self.log.write(frames, 1_000)
        self.log.sync()

    def step(self) -> None:
        kind = self.random.randrange(12)
        if kind == 0:
            self.log.trim(self.random.randint(self.log.start_offset, self.log.end_offset), 1_000)
        elif kind == 1:
            self.log.close()
            self.log = opened(self.disk, LEADERS)
        elif kind == 2:
            self.snapshot()
        else:
            self.write()

    def snapshot(self) -> None:
        end = self.log.end_offset
        self.log.save_producers(self.producers.encode(end), end)

    def origin(self) -> Origin:
        return self.log.origin(self.producers.encode(self.log.end_offset))


@dataclass
class Follower:
    """A copy whose power goes now and then."""

    random: Random
    leader: Leader
    disk: MemoryDisk = field(default_factory=MemoryDisk)

    def __post_init__(self) -> None:
        self.log = opened(self.disk, FOLLOWERS, self.leader.origin())

    def copy(self, max_bytes: int) -> bool:
        """One group; False where there is nothing more."""
        source, point = self.leader.log, self.log.end_point
        try:
            frames = source.read_frames(point, max_bytes, source.end_point)
        except OffsetOutOfRangeError:
            # The leader has let go of what comes next.
            assert point < source.start_point
            self.disk = MemoryDisk()
            self.log = opened(self.disk, FOLLOWERS, self.leader.origin())
            return True
        self.log.write_frames(point, frames, 1_000)
        if self.random.random() < 0.5:
            self.log.sync()
        return bool(frames)

    def step(self) -> None:
        kind = self.random.randrange(10)
        if kind == 0:
            self.disk.lose_power(self.random)
            # Where the log was never synced, it begins anew.
            self.log = opened(self.disk, FOLLOWERS, self.leader.origin())
        elif kind == 1:
            self.disk.kill()
            self.log = opened(self.disk, FOLLOWERS)
        elif kind == 2 and self.log.start_offset < self.log.end_offset:
            self.log.close()
            known = recover(FOLDER, IDENTITY, files=self.disk.mount()).producers
            self.log = opened(self.disk, FOLLOWERS)
            self.log.save_producers(known.encode(self.log.end_offset))
            self.log.trim(self.random.randint(self.log.start_offset, self.log.end_offset), 1_000)
        else:
            self.copy(self.random.randrange(1, 3_000))

    def finish(self) -> None:
        while self.copy(2_000):
            pass


def assert_same(leader: DiskLog, follower: DiskLog, disks: tuple[MemoryDisk, MemoryDisk]) -> None:
    point = max(leader.start_point, follower.start_point)
    ours, theirs = frames_of(leader, point), frames_of(follower, point)
    assert theirs == ours
    assert follower.end_point == leader.end_point
    assert follower.annotations == leader.annotations
    begun = [one for one in leader.epochs.starts if one.start_offset < leader.end_offset]
    assert [one for one in follower.epochs.starts if one.start_offset < follower.end_offset] == begun
    for time_ms in range(900, 1_100, 7):
        found = max(leader.offset_for_time(time_ms, leader.end_offset), point.offset)
        assert max(follower.offset_for_time(time_ms, follower.end_offset), point.offset) == found
    leader.close()
    follower.close()
    known = [recover(FOLDER, IDENTITY, files=disk.mount()) for disk in disks]
    assert known[0].segments[-1].end_point == known[1].segments[-1].end_point
    assert known[0].annotations == known[1].annotations


def test_a_copy_of_frames_is_the_same_log_whatever_power_goes_meanwhile() -> None:
    for seed in SEEDS:
        random = Random(seed)
        leader = Leader(random)
        for _ in range(random.randrange(12)):
            leader.step()
        follower = Follower(random, leader)
        for _ in range(25):
            (leader if random.random() < 0.4 else follower).step()
        follower.finish()
        files = follower.disk.mount()
        found = recover(FOLDER, IDENTITY, files=files)
        assert producers_of(found.producers) == producers_of(leader.producers), seed
        follower.log = opened(follower.disk, FOLLOWERS)
        assert_same(leader.log, follower.log, (leader.disk, follower.disk))


def test_two_copies_cut_at_one_point_are_the_same_log_and_go_on_from_there() -> None:
    for seed in SEEDS:
        random = Random(seed)
        leader = Leader(random)
        for _ in range(12):
            leader.write()
            if random.random() < 0.3:
                leader.snapshot()
        follower = Follower(random, leader)
        follower.finish()
        snapshots = [path for path in leader.disk.files() if path.suffix == ".producers"]
        if snapshots and random.random() < 0.5:
            leader.disk.flip(random.choice(snapshots), random.randrange(8 * 20))
        points = [point for point, _ in frames_of(leader.log)]
        cut = random.choice([leader.log.start_point, *points[:-1]])
        kept = [found for found in frames_of(leader.log) if found[0] <= cut]
        ours, theirs = leader.log.truncate(cut), follower.log.truncate(cut)
        assert frames_of(leader.log) == frames_of(follower.log) == kept, seed
        assert leader.log.end_point == follower.log.end_point == cut
        assert producers_of(ours) == producers_of(theirs), seed
        newest = max((frame.leader_epoch for _, frame in kept), default=0)
        assert leader.log.epochs.current <= newest and follower.log.epochs.current <= newest
        for log in (leader.log, follower.log):
            assert all(one.start_offset < cut.offset or one.epoch <= newest for one in log.epochs.starts)
            assert log.epochs.current == newest or cut == log.segments[-1].base_point, seed
        leader.producers = ours
        leader.sequences = {producer: batches[-1].next_sequence for producer, batches in ours}
        for _ in range(4):
            leader.write()
            follower.finish()
        assert_same(leader.log, follower.log, (leader.disk, follower.disk))


def test_a_segment_that_does_not_follow_the_positions_before_it_is_found(tmp_path: Path) -> None:
    log = open_disk(tmp_path)
    append(log, batch_of(b"a"))
    log.write([Frame(None, 1, 0, 7, b"@"), Frame(None, 1, 0, 8, b"@")], 1_000)
    log.roll(1_000)
    log.write([Frame(None, 1, 0, 7, b"@@")], 1_000)
    assert log.segments[-1].header.head == (2, 2)
    assert (log.segments[-1].base_point, log.end_point) == (LogPoint(1, 2), LogPoint(1, 3))
    log.close()
    assert verify_shard(tmp_path, IDENTITY).findings == []
    path = max(tmp_path.glob("*.seg"))
    header, length = decode_segment_header(whole := path.read_bytes())
    path.write_bytes(replace(header, head=Head(1, 2)).encode() + whole[length:])
    (found,) = verify_shard(tmp_path, IDENTITY).findings
    assert found.what == "it begins behind 1 positions, but 2 stand before it"


@pytest.mark.parametrize("records", [0, 2])
def test_a_note_is_read_whole_beside_what_it_is_for_and_no_slot_has_it(tmp_path: Path, records: int) -> None:
    long, short = bytes(range(251)) * 600, b"short"
    log = open_disk(tmp_path / "log")
    append(log, batch_of(b"before"))
    log.write([Frame(None, 1, 0, 0, b"@")], 1_000)
    batch = placed(batch_of(*[b"it"] * records), 1) if records else None
    for note in (short, long):
        pieces = note_frames(note, 1, 0)
        assert len(pieces) == note_pieces(note)
        for piece in pieces:
            log.write([piece], 1_000)
        log.write(
            [Frame(None, 1, 0, 7, note[:9]) if note is short else Frame(batch, 1, 0, 8, note[:9])], 1_000
        )
    append(log, batch_of(b"behind"))
    assert log.annotations == {0: b"@", 7: b"short", 8: long[:9]}
    copy = open_disk(tmp_path / "copy")
    while frames := log.read_frames(copy.end_point, 100_000, log.end_point):
        copy.write_frames(copy.end_point, frames, 1_000)
    for each in (log, copy):
        each.close()
    for folder in (log.folder, copy.folder):
        assert verify_shard(folder, IDENTITY).findings == []
        again = open_disk(folder)
        assert again.annotations == log.annotations
        assert again.read_notes(1, lambda note: True) == [short, long]
        assert again.read_notes(1, lambda note: note == long) == [long]
        assert again.read_notes(0, lambda note: True) == []
        again.close()


@pytest.mark.parametrize("records", [0, 1])
def test_a_note_without_what_it_is_for_is_no_part_of_the_next_leaders(tmp_path: Path, records: int) -> None:
    log = open_disk(tmp_path)
    log.write(note_frames(bytes(70_000), 0, 1)[:1], 1_000)
    batch = placed(batch_of(b"it"), 0, epoch=2) if records else None
    log.write([*note_frames(b"n", 0, 2), Frame(batch, 0, 2, 7, b"@")], 1_000)
    assert log.read_notes(0, lambda note: True) == [b"n"]
    log.write([Frame(None, log.end_point.offset, 3, 7, b"@")], 1_000)
    assert log.read_notes(0, lambda note: True) == [b"n"]
    log.close()


def test_a_segment_is_not_ended_between_a_note_and_what_it_is_for(tmp_path: Path) -> None:
    log = open_disk(tmp_path, limits=SegmentLimits(segment_bytes_max=100))
    append(log, batch_of(b"before"))
    log.write(note_frames(b"n", 1, 0), 1_000)
    log.write([Frame(placed(batch_of(b"it"), 1), 1, 0)], 1_000)
    append(log, batch_of(b"behind"))
    log.trim(2, 1_000)
    assert log.start_offset == 2
    with pytest.raises(OffsetOutOfRangeError):
        log.read_notes(1, lambda note: True)
    log.close()
    bounds = [
        decode_segment_header(path.read_bytes())[0].base_offset for path in sorted(tmp_path.glob("*.seg"))
    ]
    assert bounds == [2]


@pytest.mark.parametrize("begins", ["restart", "cut"])
def test_a_segment_is_not_ended_behind_a_note_that_a_log_ends_with(begins: str, tmp_path: Path) -> None:
    log = open_disk(tmp_path)
    append(log, batch_of(b"before"))
    limits = log.limits = SegmentLimits(segment_bytes_max=log.segments[0].segment_bytes + 1)
    log.write(note_frames(b"n", 1, 0), 1_000)
    if begins == "cut":
        log.write([Frame(None, 1, 0, 7, b"@")], 1_000)
        log.truncate(LogPoint(1, 1))
    else:
        log.close()
        log = open_disk(tmp_path, limits=limits)
    log.trim(1, 1_000)
    log.write([Frame(placed(batch_of(b"it"), 1), 1, 0)], 1_000)
    assert [segment.base_offset for segment in log.segments] == [0]
    append(log, batch_of(b"behind"))
    assert [segment.base_offset for segment in log.segments] == [0, 2]
    log.close()


def test_frames_are_taken_only_where_the_log_ends_and_of_no_older_leader(tmp_path: Path) -> None:
    log = open_disk(tmp_path)
    first = Frame(placed(batch_of(b"1"), 0, epoch=2), 0, 2)
    log.write_frames(LogPoint(0), [first], 1_000)
    log.write_frames(LogPoint(1), [Frame(None, 1, 2, 7, b"@")], 1_000)

    def refused(point: LogPoint, frame: Frame) -> Code:
        with pytest.raises(RequestError) as found:
            log.write_frames(point, [frame], 1_000)
        return found.value.code

    second = Frame(placed(batch_of(b"2"), 1, epoch=2), 1, 2)
    for point in (LogPoint(0), LogPoint(1), LogPoint(1, 2), LogPoint(2)):
        assert refused(point, second) is Code.CONFLICT
    end = LogPoint(1, 1)
    assert refused(end, Frame(placed(batch_of(b"2"), 1, epoch=1), 1, 1)) is Code.CONFLICT
    assert second.batch is not None
    torn = Batch(second.batch.header, second.batch.body[:-1])
    for wrong in (
        msgspec.structs.replace(second, base_offset=2),
        msgspec.structs.replace(second, batch=torn),
        msgspec.structs.replace(second, leader_epoch=3),
        msgspec.structs.replace(second, annotation=bytes(1_025)),
        Frame(None, 1, 2, annotation=bytes(60_001), is_note=True),
        Frame(Batch(msgspec.structs.replace(second.batch.header, shard=9), second.batch.body), 1, 2),
    ):
        assert refused(end, wrong) is Code.BATCH_MALFORMED
    log.write_frames(end, [second], 1_000)
    assert log.end_point == LogPoint(2)
    with pytest.raises(OffsetOutOfRangeError):
        log.read_frames(LogPoint(1, 2), 100, log.end_point)
    log.close()


async def test_readers_producers_and_message_ids_go_on_at_the_copy(tmp_path: Path) -> None:
    settings = ShardSettings(deduplication=Deduplication(window_ms=60_000, ids_max=100))
    first, second = tmp_path / "first", tmp_path / "second"

    def identified(name: str) -> Batch:
        return encode_batch([NewRecord(b"of " + name.encode(), headers={"felix.message-id": name.encode()})])

    async with serving(first, settings) as leader:
        await leader.begin_epoch(5)
        await leader.append(batch_of(b"a", b"b", producer=9))
        await leader.append(identified("x"), annotation=b"@1", slot=3)
        await leader.append(None, annotation=b"@2", slot=4)
        seen = [entry.data for entry in await leader.read(0, 1 << 20)]
    source, copy = open_disk(first), open_disk(second)
    while frames := source.read_frames(copy.end_point, 10, source.end_point):
        copy.write_frames(copy.end_point, frames, 1_000)
    source.close()
    copy.close()
    async with serving(second, settings) as leader:
        assert [entry.data for entry in await leader.read(0, 1 << 20)] == seen
        assert leader.annotations == {3: b"@1", 4: b"@2"}
        assert leader.epochs.starts == (EpochStart(5, 0),)
        again = await leader.append(batch_of(b"a", b"b", producer=9))
        assert (again.base_offset, again.duplicate) == (0, True)
        again = await leader.append(identified("x"))
        assert again.offsets == (2,)
        assert payloads_of(await leader.read(0, 1 << 20)) == [b"a", b"b", b"of x"]
        await leader.append(None, annotation=b"@3", slot=4)


def test_a_log_whose_start_was_let_go_begins_behind_the_positions_that_stood_there(tmp_path: Path) -> None:
    log = open_disk(tmp_path)
    append(log, batch_of(b"a"))
    log.write([Frame(None, 1, 0, 7, b"@1"), Frame(None, 1, 0, 7, b"@2")], 1_000)
    log.roll(1_000)
    append(log, batch_of(b"b"))
    log.trim(1, 1_000)
    for _ in range(2):
        assert (log.start_point, log.end_point) == (LogPoint(1, 2), LogPoint(2))
        assert log.origin(b"").annotations == {7: b"@2"}
        log.close()
        log = open_disk(tmp_path)
    log.close()


async def test_a_log_may_begin_above_offset_0(tmp_path: Path) -> None:
    settings = ShardSettings(first_offset=500)
    async with serving(tmp_path, settings) as shard:
        assert (shard.log_start_offset, shard.high_watermark, shard.log_end_offset) == (500, 500, 500)
        assert (await shard.append(batch_of(b"a"))).base_offset == 500
        with pytest.raises(OffsetOutOfRangeError) as gap:
            await shard.read(0, 100)
        assert gap.value.first_offset == 500
    for _ in range(2):
        async with serving(tmp_path, ShardSettings(first_offset=9)) as shard:
            assert (shard.log_start_offset, shard.log_end_offset) == (500, 501), "it is there already"
            assert payloads_of(await shard.read(500, 100)) == [b"a"]
    (tmp_path / "mark").unlink()
    found = recover(tmp_path, IDENTITY, files=DiskFiles())
    assert found.segments[0].base_offset == 500


def test_what_was_compacted_is_not_given_out_as_frames(tmp_path: Path) -> None:
    log = open_disk(tmp_path)
    append(log, keyed((b"a", b"1"), (b"a", b"2")))
    log.roll(1_000)
    compact(log)
    append(log, keyed((b"b", b"3")))
    for ask in (lambda: log.read_frames(log.start_point, 100, log.end_point), lambda: log.origin(b"")):
        with pytest.raises(RequestError) as refused:
            ask()
        assert refused.value.code is Code.UNSUPPORTED
    assert len(log.read_frames(LogPoint(2), 100, log.end_point)) == 1
    log.close()


class CountingFiles(DiskFiles):
    """Counts the bytes that are asked for."""

    asked = 0

    def pread(self, descriptor: int, size: int, position: int) -> bytes:
        self.asked += size
        return super().pread(descriptor, size, position)


def test_a_read_of_frames_takes_from_the_file_what_it_gives_and_finds_long_ones_whole(tmp_path: Path) -> None:
    files = CountingFiles()
    log = open_disk(tmp_path / "log", files)
    long = (200_000, 900_000)
    sizes = [*[100] * 4_000, *long, *[100] * 4_000]
    write_batches(log, [placed(batch_of(bytes(size)), at) for at, size in enumerate(sizes)])
    at, reads, given = log.start_point, 0, 0
    files.asked = 0
    while frames := log.read_frames(at, 10_000, log.end_point):
        size = sum(frame.batch.header.total_length for frame in frames if frame.batch)
        assert size <= 10_000 or len(frames) == 1
        for frame in frames:
            at = after(at, frame)
        reads, given = reads + 1, given + len(frames)
    assert given == len(sizes)
    # Each from the index's entry before its point on, and once more what its window cut off: a long one at the end of the read before it, too.
    assert files.asked <= reads * 2.5 * INDEX_INTERVAL_BYTES + 3 * sum(long)


def test_frames_that_count_for_more_than_they_have_are_fewer_and_one_at_least(tmp_path: Path) -> None:
    log = open_disk(tmp_path / "log")
    write_batches(log, [placed(batch_of(bytes(100)), at) for at in range(50)])
    everything = log.read_frames(log.start_point, 20_000, log.end_point)
    assert len(everything) == 50
    for beside, wanted in ((0, 50), (1_700, 10), (30_000, 1)):
        assert len(log.read_frames(log.start_point, 20_000, log.end_point, beside=beside)) == wanted
