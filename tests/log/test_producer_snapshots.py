"""What producers did up to a point: told by the last snapshot below it, whatever is missing or damaged; and without reading the whole log."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from log.building import (
    IDENTITY,
    SMALL,
    append,
    batch_of,
    compact,
    flip,
    keyed,
    masked,
    open_disk,
    payloads_of,
    placed,
    serving,
)

from felix.errors import Code, RequestError
from felix.storage.disk import DiskFiles
from felix.storage.memory import MemoryDisk
from region.log.disk import DiskLog
from region.log.frame import Frame
from region.log.point import LogPoint
from region.log.producer_snapshots import PRODUCERS_NAME, parse_snapshot_name, snapshot_name
from region.log.producers import ProducerTable, Remembered
from region.log.recovery import recover
from region.log.shard import ShardHooks, ShardSettings
from region.log.verify import verify_shard

SEGMENTS = 30


class Counted(DiskFiles):
    """The real calls, and which segments were opened."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def open(self, path: Path, flags: int) -> int:
        if path.suffix == ".seg":
            self.opened.append(path.name)
        return super().open(path, flags)


def table_of(sequence: int) -> dict[int, tuple[Remembered, ...]]:
    """Of producer 9, whose batches are one record each at the offset of their sequence: all that it published below `sequence`."""
    remembered = [Remembered(0, at, at + 1, at, 1_000) for at in range(sequence)]
    return {9: tuple(remembered[-32:])} if remembered else {}


def newest(producers: ProducerTable) -> dict[int, tuple[Remembered, ...]]:
    """A table may remember more than it promises."""
    return {producer: batches[-32:] for producer, batches in producers}


def filled(folder: Path, files: DiskFiles | None = None, segments: int = SEGMENTS) -> DiskLog:
    log, known = open_disk(folder, files, limits=SMALL), ProducerTable()
    while log.segment_count < segments:
        offset, before = log.end_offset, log.segment_count
        append(log, batch_of(b"%d" % offset * 50, producer=9, sequence=offset))
        known.settle(offset)
        known.record(9, Remembered(0, offset, offset + 1, offset, 1_000))
        if log.segment_count > before:
            log.save_producers(known.encode(log.end_offset), log.end_offset)
    return log


def test_a_cut_reads_a_segment_or_two_of_many(tmp_path: Path) -> None:
    files = Counted()
    log = filled(tmp_path, files)
    while log.end_offset > 20:
        files.opened.clear()
        cut = log.end_offset - 40
        if cut < 0:
            break
        producers = log.truncate(LogPoint(cut))
        assert newest(producers) == table_of(cut)
        assert len(set(files.opened)) <= 3
    log.close()
    assert verify_shard(tmp_path, IDENTITY).findings == []


@pytest.mark.parametrize("harm", ["missing", "damaged", "of another offset"])
def test_a_snapshot_that_does_not_hold_is_passed_by(tmp_path: Path, harm: str) -> None:
    log = filled(tmp_path, segments=8)
    cut = log.end_offset - 5
    for path in sorted(tmp_path.glob("*.producers"))[-3:]:
        if harm == "missing":
            path.unlink()
        elif harm == "damaged":
            flip(path, path.read_bytes()[20:])
        else:
            path.write_bytes(min(tmp_path.glob("*.producers")).read_bytes())
    if harm != "missing":
        assert {finding.is_damage for finding in verify_shard(tmp_path, IDENTITY).findings} == {False}
    log.abandon()
    assert newest(recover(tmp_path, IDENTITY, files=DiskFiles()).producers) == table_of(cut + 5)
    log = open_disk(tmp_path, limits=SMALL)
    assert newest(log.truncate(LogPoint(cut))) == table_of(cut)
    log.close()
    assert newest(recover(tmp_path, IDENTITY, files=DiskFiles()).producers) == table_of(cut)


def test_no_snapshot_is_left_that_knows_what_was_cut_or_that_nobody_will_ask_for(tmp_path: Path) -> None:
    log = filled(tmp_path, segments=8)
    log.save_producers(ProducerTable().encode(log.end_offset))
    cut = log.end_offset // 2
    log.truncate(LogPoint(cut))

    def offsets() -> list[int]:
        return sorted(
            offset for path in tmp_path.iterdir() if (offset := parse_snapshot_name(path.name)) is not None
        )

    assert offsets()[-1] == cut and not (tmp_path / PRODUCERS_NAME).exists()
    log.trim(cut, 1_000)
    assert offsets() == [cut]
    log.close()


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_compaction_took_is_known_from_its_copy_also_where_the_log_lost_its_end(is_kept: bool) -> None:
    """An `interval` log whose newest records went with the power, after a pass that remembered their producer."""
    for seed in range(8):
        disk, folder = MemoryDisk(), Path("/shard")
        files = disk.mount()
        log = open_disk(folder, files)
        files.sync_folder(folder.parent)
        known = ProducerTable()

        def publish(sequence: int, log: DiskLog = log, known: ProducerTable = known) -> None:
            known.record(9, Remembered(0, sequence, sequence + 1, sequence, 1_000))
            append(log, keyed((b"k", b"%d" % sequence), producer=9, sequence=sequence))

        for sequence in range(4):
            publish(sequence)
        log.roll(2_000)
        publish(4)
        for sequence in (5, 6):
            known.record(9, Remembered(0, sequence, sequence + 1, sequence, 1_000))
            unsynced(log, sequence)
        if is_kept:
            log.save_producers(known.encode(4), 4)
        compact(log, files=files, producers=known.encode(7))
        disk.lose_power(Random(seed))
        for _ in range(2):
            files = disk.mount()
            found = recover(folder, IDENTITY, files=files)
            end = found.segments[-1].next_offset
            assert 5 <= end <= 7
            assert newest(found.producers) == table_of(end), seed
        log = open_disk(folder, disk.mount())
        (again,) = newest(log.truncate(LogPoint(4))).values() if end > 4 else ((),)
        assert [one.base_offset for one in again] == [0, 1, 2, 3]
        log.close()


def unsynced(log: DiskLog, sequence: int) -> None:
    batch = masked(placed(keyed((b"k", b"%d" % sequence), producer=9, sequence=sequence), sequence))
    log.write([Frame(batch, sequence, 0)], 1_000)


async def test_a_cut_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    log = open_disk(tmp_path)
    append(log, keyed((b"a", b"1"), (b"a", b"2")))
    log.roll(1_000)
    compact(log)
    append(log, keyed((b"b", b"3")))
    log.close()
    async with serving(tmp_path, hooks=ShardHooks(open_batch=masked)) as shard:
        with pytest.raises(RequestError) as refused:
            await shard.truncate(LogPoint(1))
        assert refused.value.code is Code.UNSUPPORTED
        assert (shard.high_watermark, shard.log_end_offset) == (3, 3)
        assert payloads_of(await shard.read(0, 1)) == [b"2"]
        assert payloads_of(await shard.read(2, 1)) == [b"3"]


async def test_a_shard_leaves_a_snapshot_at_each_roll_and_cuts_by_it(tmp_path: Path) -> None:
    async with serving(tmp_path, ShardSettings(segments=SMALL)) as shard:
        for sequence in range(60):
            await shard.append(batch_of(b"%d" % sequence * 50, producer=9, sequence=sequence))
        assert shard.segment_count > 3
        await shard.truncate(LogPoint(20))
        again = await shard.append(batch_of(b"19" * 50, producer=9, sequence=19))
        assert (again.base_offset, again.duplicate) == (19, True)
        assert (await shard.append(batch_of(b"new", producer=9, sequence=20))).base_offset == 20
        assert payloads_of(await shard.read(20, 100)) == [b"new"]
    names = DiskFiles().names(tmp_path)
    assert PRODUCERS_NAME in names and snapshot_name(20) in names
