"""Bits of a minority of copies flip, of the leader's or of a follower's: no reader gets a wrong byte, and every segment is whole again in the end."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from long_runs import count
from replication.replicated_region import LOGS, NAMES, SimulatedRegion, frames_of, play, sealed

from felix.batch import HEADER_BYTES, NewRecord, encode_batch
from felix.errors import CorruptionError, FelixError
from felix.settings import Compaction
from region.cluster.records import ShardId
from region.log.scrub import Scrub
from region.log.segment import ENTRY_HEADER_BYTES, SegmentEntry
from region.log.segment_check import SegmentCheck
from region.log.segment_scan import scan_file
from region.replication import repairer
from region.replication.disk import ReplicaDisk


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairer, "SCRUB_LOOK_S", 0.2)


FLIPS = count(12, 200)
"""In each of the scenes below, some of them at once."""
OFTEN = Scrub(rate_bytes=1 << 20, every_ms=1)


def disk_of(region: SimulatedRegion, name: str, number: int = 0, shard: int = 0) -> ReplicaDisk:
    return region.running[name].host.disks(region.shards[shard])[number]


def closed_of(region: SimulatedRegion, name: str) -> list[tuple[int, Path, int]]:
    """Closed segments of a broker's copies: log, path and bytes."""
    return [
        (number, segment.path, segment.segment_bytes)
        for number in LOGS
        for segment in disk_of(region, name, number).log.segments[:-1]
    ]


def flip(region: SimulatedRegion, name: str, path: Path, size: int) -> None:
    disk = region.machines[name].disk
    assert disk is not None
    disk.flip(path, region.random.randrange(size * 8))


def flip_entries(region: SimulatedRegion, name: str, offset: int) -> None:
    """Flip bits all over the segment that has this offset: what it carries of earlier ones, annotations and batches. Once more puts it back."""
    segment = next(one for one in disk_of(region, name).log.segments if one.next_offset > offset)
    disk = region.machines[name].disk
    assert disk is not None
    for at in range(segment.start + 20, segment.segment_bytes, 100):
        disk.flip(segment.path, at * 8)


def is_whole(region: SimulatedRegion, name: str) -> bool:
    files = region.running[name]._files
    for number in LOGS:
        for segment in disk_of(region, name, number).log.segments[:-1]:
            check = SegmentCheck(files, segment)
            try:
                while not check.step():
                    pass
            except CorruptionError:
                return False
    return True


async def has_closed_segments(region: SimulatedRegion, segments: int = 4, *, annotated: bool = False) -> None:
    region.append_all_the_time(annotated=annotated)
    await region.until(lambda: all(disk_of(region, name).log.segment_count > segments for name in NAMES), 600)


def follower_of(region: SimulatedRegion) -> str:
    leader = region.leader(region.shards[0])
    assert leader is not None
    return next(name for name in NAMES if name != leader.name)


def leader_of(region: SimulatedRegion) -> str:
    leader = region.leader(region.shards[0])
    assert leader is not None
    return leader.name


@pytest.mark.parametrize("victim_of", [follower_of, leader_of], ids=["follower", "leader"])
@pytest.mark.parametrize("seed", range(count(1, 25)))
def test_the_scrub_finds_flipped_bits_and_has_the_segments_written_anew(
    seed: int, victim_of: Callable[[SimulatedRegion], str]
) -> None:
    async def scene(region: SimulatedRegion) -> None:
        await has_closed_segments(region)
        victim = victim_of(region)
        repairs, flipped = region.running[victim].host.repairs, 0
        while flipped < FLIPS:
            hit = set()
            for _ in range(region.random.randrange(1, 4)):
                _, path, size = region.random.choice(closed_of(region, victim))
                if path not in hit:
                    hit.add(path)
                    flip(region, victim, path, size)
            flipped += len(hit)
            await region.until(lambda: repairs.repaired >= flipped and not repairs.damaged)  # noqa: B023
        assert is_whole(region, victim)
        assert repairs.found == repairs.repaired == flipped and repairs.rounds
        assert not region.running[victim].host.alarms
        record = region.record(region.shards[0])
        assert record is not None and set(record.isr) == set(NAMES) and record.epoch == 1, (
            "nothing else stopped"
        )
        await region.no_more_appends()
        await region.well()
        region.check()

    play(scene, seed, scrub=OFTEN)


async def read_all(region: SimulatedRegion, shard: ShardId) -> list[tuple[int, bytes]]:
    leader = region.leader(shard)
    assert leader is not None
    log, found, at = leader.log(shard, 0), list[tuple[int, bytes]](), 0
    while at < log.high_watermark:
        # Sealed, so from the disk: what is in memory is as it was.
        for entry in await log.read_sealed(at, 2_000):
            found.append((entry.base_offset, bytes(entry.data)))
            at = entry.next_offset
    return found


@pytest.mark.parametrize("seed", range(count(1, 25)))
def test_a_reader_at_the_leader_waits_for_the_repair_and_gets_what_was_written(seed: int) -> None:
    async def scene(region: SimulatedRegion) -> None:
        await has_closed_segments(region)
        await region.no_more_appends()
        await region.well()
        shard, leader = region.shards[0], leader_of(region)
        whole = await read_all(region, shard)
        for _ in range(FLIPS):
            # The one that is written to as well: it is closed, and written anew.
            segment = region.random.choice(disk_of(region, leader).log.segments)
            begin = segment.start if segment is disk_of(region, leader).log.segments[-1] else 0
            if segment.segment_bytes - begin < 60:
                continue
            machine = region.machines[leader].disk
            assert machine is not None
            machine.flip(segment.path, region.random.randrange(begin * 8, segment.segment_bytes * 8))
            assert await read_all(region, shard) == whole
        assert leader_of(region) == leader and not region.running[leader].host.alarms
        region.check()

    play(scene, seed)


@pytest.mark.parametrize("annotated", [False, True])
def test_what_no_copy_has_is_refused_and_nothing_else_stops(annotated: bool) -> None:
    async def scene(region: SimulatedRegion) -> None:
        await has_closed_segments(region, annotated=annotated)
        shard, leader = region.shards[0], leader_of(region)
        lost = disk_of(region, leader).log.segments[1]
        for name in NAMES:
            flip_entries(region, name, lost.base_offset)
        log = region.running[leader].log(shard, 0)
        with pytest.raises(CorruptionError, match=f"Offsets {lost.base_offset} to .* cannot be read"):
            for _ in range(600):
                try:
                    await log.read_sealed(lost.base_offset, 100)
                except CorruptionError:
                    raise
                except FelixError:
                    pass
                # While copies are asked for it.
                await asyncio.sleep(1)
        assert await log.read_sealed(lost.next_offset, 100)
        assert await log.read_sealed(0, 100)
        assert "could not be repaired" in region.running[leader].host.alarms[shard]
        before = region.acknowledged()
        await region.until(lambda: region.acknowledged() > before + 20)
        # One of the others gets its bytes back, as from a backup, and the rest is repaired from it.
        back = next(name for name in NAMES if name != leader)
        flip_entries(region, back, lost.base_offset)
        await region.until(lambda: region.running[leader].host.repairs.repaired)
        assert is_whole(region, leader)
        await region.until(lambda: shard not in region.running[leader].host.alarms)
        assert await log.read_sealed(lost.base_offset, 100)
        await region.no_more_appends()

    play(scene, 4)


def batches_of(region: SimulatedRegion, name: str, offset: int) -> list[SegmentEntry]:
    """Those of the closed segment that has this offset, with where they stand in its file."""
    segment = next(one for one in disk_of(region, name).log.segments if one.next_offset > offset)
    files = region.running[name]._files
    descriptor = files.open(segment.path, 0)
    try:
        entries = scan_file(
            files, descriptor, segment.header, segment.start, segment.segment_bytes, verify_bodies=True
        )
        return [entry for entry in entries if entry.header]
    finally:
        files.close(descriptor)


def flip_batch(region: SimulatedRegion, name: str, offset: int, *, behind: int = 20) -> None:
    """Flip eight bytes of the batch that has this offset."""
    batch = next(one for one in batches_of(region, name, offset) if one.next_offset > offset)
    segment = next(one for one in disk_of(region, name).log.segments if one.next_offset > offset)
    disk = region.machines[name].disk
    assert disk is not None
    for byte in range(8):
        disk.flip(segment.path, (batch.position + behind + byte) * 8)


async def all_copies_closed(region: SimulatedRegion) -> list[int]:
    """Offsets of three batches that all copies have in one closed segment."""
    await has_closed_segments(region)
    await region.no_more_appends()
    await region.well()
    batches = batches_of(region, "a", disk_of(region, "a").log.segments[1].base_offset)
    assert len(batches) > 3
    return [batches[at].base_offset for at in (0, len(batches) // 2, len(batches) - 1)]


def test_copies_with_different_bad_batches_lose_nothing() -> None:
    async def scene(region: SimulatedRegion) -> None:
        offsets = await all_copies_closed(region)
        shard, leader = region.shards[0], leader_of(region)
        whole = await read_all(region, shard)
        for name, offset in zip(NAMES, offsets, strict=True):
            flip_batch(region, name, offset)
        assert await read_all(region, shard) == whole
        await region.until(lambda: all(is_whole(region, name) for name in NAMES))
        assert leader_of(region) == leader and not region.running[leader].host.alarms
        region.check()

    play(scene, 8, scrub=OFTEN)


@pytest.mark.parametrize("behind", [20, ENTRY_HEADER_BYTES + HEADER_BYTES], ids=["head", "body"])
def test_one_bad_batch_at_the_same_place_of_all_copies_is_all_that_is_refused(behind: int) -> None:
    async def scene(region: SimulatedRegion) -> None:
        _, lost, _ = await all_copies_closed(region)
        shard, leader = region.shards[0], leader_of(region)
        whole = await read_all(region, shard)
        for name in NAMES:
            flip_batch(region, name, lost, behind=behind)
        log, found, at = region.running[leader].log(shard, 0), list[tuple[int, bytes]](), 0
        refused = set[int]()
        while at < log.high_watermark:
            try:
                for one in await log.read_sealed(at, 2_000):
                    found.append((one.base_offset, bytes(one.data)))
                    at = one.next_offset
            except CorruptionError as error:
                assert f"Offsets {lost} to " in str(error)
                refused.add(at)
                at += 1
        begins = [offset for offset, _ in whole]
        assert refused == set(range(lost, begins[begins.index(lost) + 1]))
        assert found == [one for one in whole if one[0] != lost]
        assert f"offsets {lost} to {max(refused)} of log 0" in region.running[leader].host.alarms[shard]

    play(scene, 8)


def test_a_copy_that_is_behind_gets_what_its_leader_had_to_repair_first() -> None:
    async def scene(region: SimulatedRegion) -> None:
        region.append_all_the_time(annotated=False)
        await region.until(lambda: disk_of(region, "a").log.segment_count > 2, 600)
        away = follower_of(region)
        region.kill(away)
        before = disk_of(region, leader_of(region)).log.segment_count
        await region.until(lambda: disk_of(region, leader_of(region)).log.segment_count > before + 3, 600)
        leader = leader_of(region)
        for segment in disk_of(region, leader).log.segments[before:-1]:
            flip(region, leader, segment.path, segment.segment_bytes)
        await region.start(away)
        await region.no_more_appends()
        await region.well()
        assert leader_of(region) == leader
        region.check()
        assert frames_of(disk_of(region, away)) == frames_of(disk_of(region, leader))

    play(scene, 5)


@pytest.mark.parametrize("where", ["the header of a closed segment", "the last segment"])
def test_a_copy_that_is_damaged_when_its_broker_starts_is_built_anew(where: str) -> None:
    async def scene(region: SimulatedRegion) -> None:
        await has_closed_segments(region, 2)
        victim = follower_of(region)
        segments = disk_of(region, victim).log.segments
        folder = segments[0].path.parent
        region.kill(victim)
        disk = region.machines[victim].disk
        assert disk is not None
        if where == "the last segment":
            disk.flip(segments[-1].path, (segments[-1].start + 20) * 8)
        else:
            disk.flip(segments[0].path, 20 * 8)
        await region.start(victim)
        files, host = region.running[victim]._files, region.running[victim].host
        aside = folder.with_name(f"{folder.name}.damaged")
        assert files.exists(aside)
        ((shard, told),) = host.aside()
        assert shard == region.shards[0] and told.path == aside
        # All of it, as it was: what can still be read there is a person's to judge.
        assert told.size >= sum(segment.segment_bytes for segment in segments)
        await region.no_more_appends()
        await region.well()
        region.check()
        await region.until(lambda: not files.exists(aside))
        await region.until(lambda: not host.aside())

    play(scene, 6, scrub=OFTEN)


def test_no_copy_compacts_what_has_notes_that_may_be_needed() -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard, leader = region.shards[0], leader_of(region)
        for number in range(120):
            record = NewRecord(b"%d" % number + b"." * 200, b"key %d" % (number % 7))
            await region.running[leader].append(shard, 0, encode_batch([record]))
        await region.well()
        for name in NAMES:
            closed = disk_of(region, name).log.segments[:-1]
            late = closed[len(closed) // 2].next_offset

            async def notes_from(annotations: Mapping[int, bytes], late: int = late) -> int | None:
                return late

            await region.running[name].host.maintenance.compact(
                shard, 0, Compaction(lag_ms=0), sealed, sealed, notes_from
            )
            compacted = [one for one in disk_of(region, name).log.segments if one.header.span]
            assert compacted and all(one.next_offset < late for one in compacted)

    play(scene, 7)


@pytest.mark.parametrize("victim_of", [follower_of, leader_of], ids=["follower", "leader"])
def test_a_damaged_compacted_segment_has_its_log_copied_from_the_leader(
    victim_of: Callable[[SimulatedRegion], str],
) -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard, leader = region.shards[0], leader_of(region)
        for number in range(120):
            record = NewRecord(b"%d" % number + b"." * 200, b"key %d" % (number % 7))
            await region.running[leader].append(shard, 0, encode_batch([record]))
        await region.well()
        for name in NAMES:
            await region.running[name].host.maintenance.compact(
                shard, 0, Compaction(lag_ms=0), sealed, sealed
            )
        victim = victim_of(region)
        segment = disk_of(region, victim).log.segments[0]
        assert segment.header.span is not None
        flip(region, victim, segment.path, segment.segment_bytes)
        await region.until(lambda: disk_of(region, victim).log.segments[0] is not segment)
        await region.well()
        assert is_whole(region, victim)
        assert (leader_of(region) == leader) is (victim != leader)
        await region.until(lambda: not region.running[victim].host.repairs.damaged)

    play(scene, 7, scrub=OFTEN)


def test_a_compacted_segment_that_the_disk_does_not_give_for_a_moment_is_not_copied() -> None:
    async def scene(region: SimulatedRegion) -> None:
        shard, leader = region.shards[0], leader_of(region)
        for number in range(120):
            record = NewRecord(b"%d" % number + b"." * 200, b"key %d" % (number % 7))
            await region.running[leader].append(shard, 0, encode_batch([record]))
        await region.well()
        await region.running[leader].host.maintenance.compact(shard, 0, Compaction(lag_ms=0), sealed, sealed)
        segment, repairs = disk_of(region, leader).log.segments[0], region.running[leader].host.repairs
        assert segment.header.span is not None
        disk = region.machines[leader].disk
        assert disk is not None

        def fails(call: str, path: Path) -> None:
            if call == "pread" and path == segment.path and not repairs.found:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

        disk.on_call = fails
        await region.until(lambda: repairs.found and not repairs.damaged)
        assert disk_of(region, leader).log.segments[0] is segment and leader_of(region) == leader
        await region.well()

    play(scene, 7, scrub=OFTEN)
