"""Any flipped bit of a closed segment is found, and the segment is written anew from another copy's frames, byte for byte where it stood."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from long_runs import count
from msgspec.structs import replace
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
from region.log.segment_survey import LostPart, lost_parts

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

    def lost(self, segment: SegmentState) -> list[LostPart]:
        descriptor = self.files.open(segment.path, 0)
        try:
            return lost_parts(self.files, descriptor, segment)
        finally:
            self.files.close(descriptor)

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
        repair = SegmentRepair(self.log, self.files, segment)
        try:
            repair.survey()
            while repair.part:
                annotations = self.other.annotations_at(repair.reached)
                repair.take(self.other.read_frames(repair.reached, 300, repair.limit), annotations)
            repair.verify()
            return self.finish(repair)
        finally:
            repair.abandon()


def frames_of(log: DiskLog, begin: LogPoint, end: LogPoint) -> list[Frame]:
    found: list[Frame] = []
    while begin < end:
        for frame in log.read_frames(begin, 1 << 20, end):
            whole = frame.batch and Batch(frame.batch.header, bytes(frame.batch.body))
            found.append(replace(frame, batch=whole))
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
    segment = next(
        one for one in copies.log.segments if frames_of(copies.log, one.base_point, one.end_point)[-1].batch
    )
    copies.disk.flip(segment.path, (segment.segment_bytes - 3) * 8)
    before = copies.bytes_of(segment)
    last = frames_of(copies.other, segment.base_point, segment.end_point)[-1]
    assert last.batch is not None
    changed = entry(last.base_offset, last.leader_epoch, last.batch.header.records, payload=b"another")
    for wrong in ([changed], [forged(last)], [entry(last.base_offset + 1, last.leader_epoch, 1)]):
        assert refuses(copies, segment, {}, [wrong])
    repair = SegmentRepair(copies.log, copies.files, segment)
    repair.survey()
    repair.take([], {})
    repair.leave()
    assert not repair.part and len(repair.left) == 1 and not repair.is_changed
    repair.abandon()
    assert copies.bytes_of(segment) == before
    assert not [name for name in copies.files.names(Path("/shard")) if name.endswith(".tmp")]


def forged(frame: Frame) -> Frame:
    """Another frame that takes as many bytes, and holds: its checksums are its own."""
    if frame.batch is None:
        return replace(frame, slot=frame.slot + 1)
    header, body = frame.batch.header, bytes(frame.batch.body)
    body = body[:-1] + bytes([body[-1] ^ 1])
    return replace(frame, batch=Batch(replace(header, body_checksum=body_checksum(body)), body))


def refuses(
    copies: Copies, segment: SegmentState, annotations: dict[int, bytes], answers: list[list[Frame]]
) -> str:
    """How a repair with these answers is refused; empty where they fit."""
    repair = SegmentRepair(copies.log, copies.files, segment)
    try:
        repair.survey()
        for answer in answers:
            repair.take(answer, annotations)
        return ""
    except RequestError as refused:
        assert refused.code == Code.CONFLICT
        return str(refused)
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
    """Each entry damaged in turn, and each that is asked for forged by whoever is asked, given as one answer and frame by frame."""
    random, tried = Random(4), 0
    copies = Copies(random)
    for segment in copies.log.segments[:-1]:
        had = frames_of(copies.other, segment.base_point, segment.end_point)
        for damaged, at in enumerate(places(segment, had)):
            copies.disk.flip(segment.path, (at + random.choice((0, 13, 41))) * 8)
            (part,) = copies.lost(segment)
            assert part.position == at
            asked = frames_of(copies.other, part.begin, part.limit)
            holds = part.limit.offset - part.next_offset > 0  # the batch behind the part is not taken
            for other, frame in enumerate(asked[: len(asked) - holds]):
                if other == 0 and frame.batch is None:
                    continue  # nothing of it can be read
                given = [*asked[:other], forged(frame), *asked[other + 1 :]]
                for answers in ([given], [[one] for one in given]):
                    assert refuses(copies, segment, {}, answers), damaged
                    tried += 1
            assert copies.repair(segment)
    assert tried > 50
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
        assert refuses(copies, segment, {}, answers)
    assert copies.repair(segment)


def test_annotations_that_differ_from_what_a_segment_begins_with_are_refused() -> None:
    copies = Copies(Random(2))
    segment = next(
        one for one in copies.log.segments[1:-1] if len(copies.other.annotations_at(one.base_point)) > 1
    )
    annotations = copies.other.annotations_at(segment.base_point)
    copies.disk.flip(segment.path, (segment.start + 20) * 8)
    had = copies.other.read_frames(segment.base_point, 1 << 20, segment.end_point)
    for slot, annotation in list(annotations.items())[1:]:
        changed = annotations | {slot: bytes([annotation[0] ^ 1]) + annotation[1:]}
        assert f"another annotation {slot}" in refuses(copies, segment, changed, [had])


def test_a_segment_that_was_let_go_of_meanwhile_is_not_put_back() -> None:
    copies = Copies(Random(3))
    segment = copies.log.segments[0]
    copies.disk.flip(segment.path, (segment.start + 20) * 8)
    repair = SegmentRepair(copies.log, copies.files, segment)
    repair.survey()
    repair.take(copies.other.read_frames(repair.reached, 1 << 20, repair.limit), {})
    repair.verify()
    with copies.log.writer:
        copies.log.trim(segment.next_offset, 1_000)
    assert not copies.finish(repair)
    repair.abandon()
    assert not copies.files.exists(segment.path)


def test_lost_parts_are_all_that_does_not_hold_and_what_is_filled_is_as_it_was() -> None:
    """Stretches of a segment overwritten, a part of them filled: nothing else changes, and what is left is filled later."""
    random = Random(6)
    copies = Copies(random)
    whole = all_of(copies.other)
    for _ in range(count(60, 2_000)):
        segment = random.choice(copies.log.segments[:-1])
        was = copies.bytes_of(segment)
        for _ in range(random.randrange(1, 4)):
            begin = random.randrange(segment.segment_bytes)
            for at in range(begin, min(begin + random.randrange(1, 200), segment.segment_bytes)):
                copies.disk.flip(segment.path, at * 8 + random.randrange(8))
        damaged = copies.bytes_of(segment)
        repair, left = SegmentRepair(copies.log, copies.files, segment), 0
        repair.survey()
        while repair.part:
            part = repair.part
            assert damaged[part.position : part.end] != was[part.position : part.end]
            if left < 1 and random.random() < 0.5:
                repair.leave()
                left += 1
                continue
            annotations = copies.other.annotations_at(repair.reached)
            repair.take(copies.other.read_frames(repair.reached, 100, part.limit), annotations)
        if repair.is_changed:
            repair.verify()
            assert copies.finish(repair)
        repair.abandon()
        assert len(repair.left) == left
        assert [part[:5] for part in copies.lost(segment)] == [part[:5] for part in repair.left]
        # Between the parts that were left nothing is damaged any more; in them nothing was changed.
        for part in repair.left:
            now = copies.bytes_of(segment)
            assert now[part.position : part.end] == damaged[part.position : part.end]
        assert copies.repair(segment)
        copies.check(segment)
    assert all_of(copies.log) == whole


def test_readers_get_all_but_a_batch_that_is_damaged() -> None:
    copies = Copies(Random(1), [entry(at, 1, payload=b"." * 60) for at in range(40)])
    segment = copies.log.segments[1]
    had = frames_of(copies.log, segment.base_point, segment.end_point)
    for place in (20, ENTRY_HEADER_BYTES + 100):  # of the entry's head, and of its body
        bit = (places(segment, had)[2] + place) * 8
        copies.disk.flip(segment.path, bit)
        lost = had[2].base_offset
        assert [part[2:4] for part in copies.lost(segment)] == [(LogPoint(lost), lost + 1)]
        before = copies.log.read(segment.base_offset, 1 << 20, segment.next_offset, around_damage=True)
        assert [one.header.base_offset for one in before] == [segment.base_offset, lost - 1]
        behind = copies.log.read(lost + 1, 1 << 20, segment.next_offset, around_damage=True)
        assert (
            behind[0].header.base_offset == lost + 1 and behind[-1].header.next_offset == segment.next_offset
        )
        assert len(copies.log.read_frames(segment.base_point, 1 << 20, segment.end_point)) == 2
        behind_it = copies.log.read_frames(LogPoint(lost + 1), 1 << 20, segment.end_point, is_guessed=True)
        assert behind_it[0].base_offset == lost + 1
        assert copies.log.read_frames(LogPoint(lost + 2), 1 << 20, segment.end_point)
        for read in (
            copies.log.read,
            lambda at, size, _, end=segment.end_point: copies.log.read_frames(LogPoint(at), size, end),
        ):
            with pytest.raises(SegmentDamagedError) as found:
                read(lost, 1 << 20, segment.next_offset)
            assert found.value.position == places(segment, had)[2]
        copies.disk.flip(segment.path, bit)
