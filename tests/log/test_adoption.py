"""A log that begins with another copy's closed segments and goes on with its frames is the same log, whatever power goes meanwhile."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from random import Random

import pytest
from log.building import IDENTITY, compact, keyed, masked, placed
from long_runs import count

from felix.errors import Code, CorruptionError, RequestError
from felix.storage.memory import MemoryDisk, MemoryFiles
from felix.storage.port import Files, write_all
from region.log.adoption import adopt_segments
from region.log.disk import DiskLog
from region.log.frame import Frame
from region.log.point import LogPoint
from region.log.producers import ProducerTable, Remembered
from region.log.recovery import Recovered
from region.log.segment import ShardIdentity
from region.log.segment_limits import SegmentLimits
from region.log.segment_scan import count_batch
from region.log.verify import verify_shard

FOLDER = Path("/shard")
SEEDS = range(count(40, 1_000))
LIMITS = SegmentLimits(segment_bytes_max=900)


class Killed(BaseException):
    """The process ends here."""


class Ends:
    """A process that ends after so many calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, name: str, path: Path) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


def opened(disk: MemoryDisk) -> tuple[DiskLog, Recovered, MemoryFiles]:
    files = disk.mount()
    log, found = DiskLog.open(FOLDER, IDENTITY, now_ms=1_000, files=files, limits=LIMITS)
    files.sync_folder(FOLDER.parent)
    return log, found, files


def write(log: DiskLog, producers: ProducerTable, random: Random) -> None:
    offset, epoch = log.end_offset, 1 + log.end_offset // 20
    kind = random.randrange(5)
    note = random.randbytes(random.randrange(1, 20))
    if kind == 0:
        frame = Frame(None, offset, epoch, random.randrange(3), note)
    else:
        records = [(b"k%d" % random.randrange(6), random.randbytes(60)) for _ in range(3)]
        batch = masked(placed(keyed(*records, producer=9, sequence=offset), offset, 1_000 + offset, epoch))
        count_batch(producers, batch.header)
        frame = Frame(batch, offset, epoch, 7, note if kind == 1 else b"")
    log.write([frame], 1_000)
    log.sync()


def a_leader(random: Random) -> tuple[MemoryDisk, DiskLog, ProducerTable]:
    disk, producers = MemoryDisk(), ProducerTable()
    log, _, files = opened(disk)
    while log.segment_count < 4 or random.random() < 0.5:
        write(log, producers, random)
    if random.random() < 0.5:
        compact(log, files=files, producers=producers.encode(log.end_offset))
    if random.random() < 0.3:
        log.trim(log.segments[1].base_offset, 1_000)
    for _ in range(random.randrange(4)):
        write(log, producers, random)
    return disk, log, producers


def bytes_of(disk: MemoryDisk, path: Path) -> bytes:
    found = disk.find(path)
    return bytes(found.data)  # type: ignore[union-attr]


def brought(leader: MemoryDisk, log: DiskLog, files: Files) -> list[Path]:
    """The leader's closed segments, in the follower's folder under temporary names."""
    files.make_folder(FOLDER)
    files.sync_folder(FOLDER.parent)
    asides = []
    for number, segment in enumerate(log.segments[:-1]):
        path = FOLDER / f"copy{number}.tmp"
        descriptor = files.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        write_all(files, descriptor, (bytes_of(leader, segment.path),), 0)
        files.close(descriptor)
        asides.append(path)
    return asides


def copy_segments(leader: MemoryDisk, log: DiskLog, producers: ProducerTable, files: Files) -> None:
    origin = log.origin(producers.encode(log.end_offset), is_last=True)
    adopt_segments(
        FOLDER,
        IDENTITY,
        brought(leader, log, files),
        origin,
        files=files,
        now_ms=2_000,
        compaction=log.compaction,
    )


def entries(log: DiskLog) -> list[bytes]:
    found, offset = [], log.start_offset
    while batches := log.read(offset, 2_000, log.end_offset):
        found += [bytes(batch.data) for batch in batches]
        offset = batches[-1].header.next_offset
    return found


def latest(producers: ProducerTable) -> dict[int, tuple[Remembered, ...]]:
    return {producer: batches[-32:] for producer, batches in producers}


def test_segments_and_then_frames_are_the_same_log() -> None:
    for seed in SEEDS:
        random = Random(seed)
        leader, log, producers = a_leader(random)
        disk = MemoryDisk()
        copy_segments(leader, log, producers, disk.mount())
        copy, _, _ = opened(disk)
        for _ in range(3):
            while frames := log.read_frames(copy.end_point, 500, log.end_point):
                copy.write_frames(copy.end_point, frames, 2_000)
            write(log, producers, random)
        while frames := log.read_frames(copy.end_point, 500, log.end_point):
            copy.write_frames(copy.end_point, frames, 2_000)
        assert entries(copy) == entries(log), seed
        assert (copy.end_point, copy.annotations) == (log.end_point, log.annotations)
        assert copy.compaction.clean_to == log.compaction.clean_to
        copy.close()
        copy, found, files = opened(disk)
        assert latest(found.producers) == latest(producers), seed
        assert found.epochs.starts == log.epochs.starts
        copy.close()
        assert verify_shard(FOLDER, IDENTITY, files=files).is_whole


def test_what_a_power_cut_left_of_a_copy_is_never_taken_for_a_shorter_log() -> None:
    refused = 0
    for seed in range(2):
        random = Random(seed)
        leader, log, producers = a_leader(random)
        begins = log.segments[-1].base_offset
        calls, is_whole = 0, False
        while not is_whole:
            disk = MemoryDisk()
            files = disk.mount()
            disk.on_call = Ends(calls)
            with contextlib.suppress(Killed):
                copy_segments(leader, log, producers, files)
                is_whole = True
            disk.on_call = None
            disk.lose_power(random)
            try:
                half, _, _ = opened(disk)
            except CorruptionError:
                assert not is_whole
                refused += 1
            else:
                assert half.end_offset == begins if is_whole else half.end_offset in (0, begins)
                half.close()
            calls += 1
    assert refused > 10, "few copies were met half way"


def test_a_file_that_is_not_what_it_should_be_is_refused_and_nothing_changes() -> None:
    leader, log, producers = a_leader(Random(3))
    origin = log.origin(producers.encode(log.end_offset), is_last=True)
    disk = MemoryDisk()
    files = disk.mount()
    asides = brought(leader, log, files)
    before = [(path, bytes_of(disk, path)) for path in disk.files()]

    def refused(
        paths: list[Path], identity: ShardIdentity = IDENTITY, point: LogPoint = origin.point
    ) -> None:
        changed = type(origin)(point, origin.annotations, origin.producers, origin.epochs)
        with pytest.raises(CorruptionError):
            adopt_segments(FOLDER, identity, paths, changed, files=files, now_ms=2_000)

    refused(asides[:-1])
    refused(asides[::-1])
    refused([asides[0], *asides[2:]])
    refused(asides, IDENTITY._replace(shard=4))
    refused(asides, point=LogPoint(origin.point.offset, origin.point.note + 1))
    for bit in range(0, len(bytes_of(disk, asides[0])) * 8, 397):
        disk.flip(asides[0], bit)
        refused(asides)
        disk.flip(asides[0], bit)
    assert [(path, bytes_of(disk, path)) for path in disk.files()] == before
    adopt_segments(FOLDER, IDENTITY, asides, origin, files=files, now_ms=2_000)
    with pytest.raises(RequestError) as held:
        adopt_segments(FOLDER, IDENTITY, asides, origin, files=files, now_ms=2_000)
    assert held.value.code is Code.CONFLICT
