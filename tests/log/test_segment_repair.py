"""Any flipped bit of a closed segment is found, and the segment is written anew from another copy's frames, byte for byte where it stood."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from long_runs import count
from replication.sealed import IDENTITY, entry, position

from felix.batch import Batch
from felix.errors import Code, RequestError
from felix.storage.memory import MemoryDisk, MemoryFiles
from region.log.disk import DiskLog
from region.log.errors import SegmentDamagedError
from region.log.frame import Frame, note_frames
from region.log.point import LogPoint
from region.log.segment_check import SegmentCheck
from region.log.segment_limits import SegmentLimits
from region.log.segment_repair import SegmentRepair
from region.log.segment_state import SegmentState

FLIPS = count(400, 10_000)


def frames(random: Random, number: int) -> list[Frame]:
    found: list[Frame] = []
    offset, epoch = 0, 1
    for _ in range(number):
        epoch += random.random() < 0.05
        match random.randrange(6):
            case 0:
                found.append(position(offset, epoch, random.randbytes(9), random.randrange(3)))
            case 1:
                found += note_frames(random.randbytes(30), offset, epoch)
                found.append(entry(offset, epoch, 1))
                offset += 1
            case _:
                records = random.randrange(1, 4)
                payload = random.randbytes(random.randrange(1, 90))
                found.append(entry(offset, epoch, records, b"x" * random.randrange(3), 1, payload))
                offset += records
    return found


class Copies:
    """A log on two disks, whose segments end elsewhere."""

    def __init__(self, random: Random) -> None:
        self.disk = MemoryDisk()
        self.files = self.disk.mount()
        self.other = self.open(MemoryDisk().mount(), 1_700)
        self.log = self.open(self.files, 1_000)
        for frame in frames(random, 120):
            for log in (self.other, self.log):
                with log.writer:
                    log.write_frames(log.end_point, [frame], 1_000)

    @staticmethod
    def open(files: MemoryFiles, size: int) -> DiskLog:
        return DiskLog.open(
            Path("/shard"),
            IDENTITY,
            now_ms=1_000,
            files=files,
            limits=SegmentLimits(segment_bytes_max=size),
        )[0]

    def check(self, segment: SegmentState) -> None:
        check = SegmentCheck(self.files, segment)
        while not check.step():
            pass

    def bytes_of(self, segment: SegmentState) -> bytes:
        descriptor = self.files.open(segment.path, 0)
        try:
            return self.files.pread(descriptor, 1 << 20, 0)
        finally:
            self.files.close(descriptor)

    def finish(self, repair: SegmentRepair) -> bool:
        with self.log.writer:
            return repair.finish()

    def repair(self, segment: SegmentState) -> bool:
        annotations = self.other.annotations_at(segment.base_point)
        repair = SegmentRepair(self.log, self.files, segment, annotations)
        try:
            while not repair.is_whole:
                repair.take(self.other.read_frames(repair.reached, 300, segment.end_point))
            repair.verify()
            return self.finish(repair)
        finally:
            repair.abandon()


def all_of(log: DiskLog) -> list[Frame]:
    found: list[Frame] = []
    at = log.start_point
    while at < log.end_point:
        for frame in log.read_frames(at, 1 << 20, log.end_point):
            whole = frame.batch and Batch(frame.batch.header, bytes(frame.batch.body))
            found.append(frame._replace(batch=whole))
            at = LogPoint(frame.batch.header.next_offset) if frame.batch else LogPoint(at.offset, at.note + 1)
    return found


def test_every_flipped_bit_is_found_and_repaired() -> None:
    random = Random(1)
    copies = Copies(random)
    whole, closed = all_of(copies.other), copies.log.segments[:-1]
    assert len(closed) > 5
    for flip in range(FLIPS):
        segment = random.choice(closed)
        copies.disk.flip(segment.path, random.randrange(segment.segment_bytes * 8))
        with pytest.raises(SegmentDamagedError):
            copies.check(segment)
        assert copies.repair(segment)
        copies.check(segment)
        if flip % 100 == 0:
            assert all_of(copies.log) == whole
    assert all_of(copies.log) == whole
    assert copies.log.segments[:-1] == closed
    copies.log.close()
    reopened = copies.open(copies.files, 1_000)
    assert all_of(reopened) == whole and reopened.annotations == copies.other.annotations


def test_frames_that_are_not_those_that_were_written_are_refused_and_nothing_is_changed() -> None:
    copies = Copies(Random(2))
    segment = copies.log.segments[2]
    copies.disk.flip(segment.path, (segment.segment_bytes - 3) * 8)
    before = copies.bytes_of(segment)
    had = copies.other.read_frames(segment.base_point, 1 << 20, segment.end_point)
    at = next(number for number, frame in enumerate(had) if frame.batch is not None)
    batch = had[at].batch
    assert batch is not None
    changed = entry(had[at].base_offset, had[at].leader_epoch, batch.header.records, payload=b"another")
    for wrong in ([*had[:at], changed, *had[at + 1 :]], had[at + 1 :]):
        repair = SegmentRepair(
            copies.log, copies.files, segment, copies.other.annotations_at(segment.base_point)
        )
        with pytest.raises(RequestError) as refused:
            repair.take(wrong)
        repair.abandon()
        assert refused.value.code == Code.CONFLICT
    repair = SegmentRepair(copies.log, copies.files, segment, copies.other.annotations_at(segment.base_point))
    repair.take(had[:at])
    with pytest.raises(RequestError, match="does not have what"):
        repair.verify()
    assert not copies.finish(repair)
    repair.abandon()
    assert copies.bytes_of(segment) == before
    assert not [name for name in copies.files.names(Path("/shard")) if name.endswith(".tmp")]


def test_a_segment_that_was_let_go_of_meanwhile_is_not_put_back() -> None:
    copies = Copies(Random(3))
    segment = copies.log.segments[0]
    repair = SegmentRepair(copies.log, copies.files, segment, {})
    repair.take(copies.other.read_frames(segment.base_point, 1 << 20, segment.end_point))
    repair.verify()
    with copies.log.writer:
        copies.log.trim(segment.next_offset, 1_000)
    assert not copies.finish(repair)
    repair.abandon()
    assert not copies.files.exists(segment.path)
