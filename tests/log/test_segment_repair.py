"""Any flipped bit of a closed segment is found, and the segment is written anew from another copy's frames, byte for byte where it stood."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from long_runs import count
from replication.sealed import IDENTITY, entry, position

from felix.batch import Batch, body_checksum
from felix.errors import Code, RequestError
from felix.storage.memory import MemoryDisk, MemoryFiles
from region.log.disk import DiskLog
from region.log.errors import SegmentDamagedError
from region.log.frame import Frame, note_frames
from region.log.point import LogPoint
from region.log.segment import ENTRY_HEADER_BYTES
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

    def __init__(self, random: Random, written: list[Frame] | None = None) -> None:
        self.disk = MemoryDisk()
        self.files = self.disk.mount()
        self.other = self.open(MemoryDisk().mount(), 1_700)
        self.log = self.open(self.files, 1_000)
        for frame in frames(random, 120) if written is None else written:
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


def frames_of(log: DiskLog, begin: LogPoint, end: LogPoint) -> list[Frame]:
    found: list[Frame] = []
    while begin < end:
        for frame in log.read_frames(begin, 1 << 20, end):
            whole = frame.batch and Batch(frame.batch.header, bytes(frame.batch.body))
            found.append(frame._replace(batch=whole))
            begin = (
                LogPoint(frame.batch.header.next_offset)
                if frame.batch
                else LogPoint(begin.offset, begin.note + 1)
            )
    return found


def all_of(log: DiskLog) -> list[Frame]:
    return frames_of(log, log.start_point, log.end_point)


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


def forged(frame: Frame) -> Frame:
    """Another frame that takes as many bytes, and holds: its checksums are its own."""
    if frame.batch is None:
        return frame._replace(slot=frame.slot + 1)
    header, body = frame.batch.header, bytes(frame.batch.body)
    body = body[:-1] + bytes([body[-1] ^ 1])
    return frame._replace(batch=Batch(header._replace(body_checksum=body_checksum(body)), body))


def refuses(
    copies: Copies, segment: SegmentState, annotations: dict[int, bytes], answers: list[list[Frame]]
) -> str:
    """How a repair with these answers is refused."""
    repair = SegmentRepair(copies.log, copies.files, segment, annotations)
    try:
        with pytest.raises(RequestError) as refused:
            for answer in answers:
                repair.take(answer)
        assert refused.value.code == Code.CONFLICT
        return str(refused.value)
    finally:
        repair.abandon()


def places(segment: SegmentState, had: list[Frame]) -> list[int]:
    """Where each of them stands in the file."""
    at, found = segment.segment_bytes, list[int]()
    for frame in reversed(had):
        at -= (
            ENTRY_HEADER_BYTES
            + len(frame.annotation)
            + (frame.batch.header.total_length if frame.batch else 0)
        )
        found.append(at)
    return found[::-1]


def test_of_what_can_still_be_read_another_copy_changes_nothing_before_and_behind_the_damage() -> None:
    """Each entry damaged in turn, and each other one forged by whoever is asked, given as one answer and frame by frame."""
    random, tried = Random(4), 0
    copies = Copies(random)
    for segment in copies.log.segments[:-1]:
        had = frames_of(copies.other, segment.base_point, segment.end_point)
        annotations = copies.other.annotations_at(segment.base_point)
        for damaged, at in enumerate(places(segment, had)):
            bit = (at + random.choice((0, 13, 41))) * 8
            copies.disk.flip(segment.path, bit)
            for other, frame in enumerate(had):
                if other == damaged and frame.batch is None:
                    continue  # nothing of it can be read
                given = [*had[:other], forged(frame), *had[other + 1 :]]
                for answers in ([given], [[one] for one in given]):
                    assert refuses(copies, segment, annotations, answers)
                    tried += 1
            assert copies.repair(segment)
    assert tried > 300
    assert all_of(copies.log) == all_of(copies.other)


def test_entries_that_begin_elsewhere_than_what_can_still_be_read_are_refused() -> None:
    """One is damaged, and whoever is asked makes it longer and the next one shorter, so that all others would stand between what was written."""
    copies = Copies(Random(1), [entry(at, 1, payload=b"." * 60) for at in range(40)])
    segment = copies.log.segments[1]
    first, second, *rest = frames_of(copies.log, segment.base_point, segment.end_point)
    copies.disk.flip(segment.path, (segment.start + 20) * 8)
    shifted = [
        entry(first.base_offset, 1, payload=b"." * 70),
        *(entry(one.base_offset, 1, payload=b"." * 60) for one in (second, *rest[:-1])),
        entry(rest[-1].base_offset, 1, payload=b"." * 50),
    ]
    for answers in ([shifted], [[frame] for frame in shifted]):
        assert "another entry begins" in refuses(copies, segment, {}, answers)
    assert copies.repair(segment)


def test_annotations_that_differ_from_what_a_segment_begins_with_are_refused() -> None:
    copies = Copies(Random(2))
    segment = next(
        one for one in copies.log.segments[1:-1] if len(copies.other.annotations_at(one.base_point)) > 1
    )
    annotations = copies.other.annotations_at(segment.base_point)
    copies.disk.flip(segment.path, (segment.segment_bytes - 3) * 8)
    had = copies.other.read_frames(segment.base_point, 1 << 20, segment.end_point)
    for slot, annotation in annotations.items():
        changed = annotations | {slot: bytes([annotation[0] ^ 1]) + annotation[1:]}
        assert f"another annotation {slot}" in refuses(copies, segment, changed, [had])


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
