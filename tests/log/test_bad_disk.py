"""A log on a disk that fills up, that fails a sync, and that loses what was not synced (felix.storage.memory)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random

import pytest
from log.building import SMALL, batch_of, open_disk, write_batches

from felix.batch import decode_batch, decode_records
from felix.errors import UnavailableError
from felix.settings import Retention
from felix.storage.memory import MemoryDisk
from region.log.disk import DiskLog
from region.log.errors import StorageFailedError
from region.log.offload import Offloaded
from region.log.point import LogPoint

FOLDER = Path("/shard")
SEEDS = range(40)


def opened(disk: MemoryDisk) -> DiskLog:
    files = disk.mount()
    log = open_disk(FOLDER, files)
    files.sync_folder(FOLDER.parent)
    return log


def payloads(log: DiskLog) -> list[bytes]:
    found, offset = [], log.start_offset
    while batches := log.read(offset, 1 << 20, log.end_offset):
        found += [
            bytes(record.payload) for batch in batches for record in decode_records(decode_batch(batch.data))
        ]
        offset = batches[-1].header.next_offset
    return found


def test_what_a_full_disk_took_a_part_of_does_not_come_back_into_a_closed_segment() -> None:
    for seed in SEEDS:
        disk = MemoryDisk()
        log = opened(disk)
        write_batches(log, [batch_of(b"first" * 20)])
        log.sync()
        disk.room_bytes = 90
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            write_batches(log, [batch_of(b"too much" * 40)])
        disk.room_bytes = 1 << 20
        log.roll(2_000)
        write_batches(log, [batch_of(b"second")])
        log.sync()
        assert log.segment_count == 2
        disk.lose_power(Random(seed))
        assert payloads(opened(disk)) == [b"first" * 20, b"second"]


def test_what_recovery_serves_after_a_failed_sync_outlasts_a_loss_of_power() -> None:
    for seed in SEEDS:
        disk = MemoryDisk()
        log = opened(disk)
        write_batches(log, [batch_of(b"first")])
        log.sync()
        write_batches(log, [batch_of(b"second" * 300)])

        def fail(call: str, path: Path) -> None:
            if call == "sync" and ".seg" in path.name:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        disk.on_call = fail
        with pytest.raises(StorageFailedError):
            log.sync()
        disk.on_call = None
        disk.kill()
        served = payloads(opened(disk))
        assert served == [b"first", b"second" * 300]
        disk.lose_power(Random(seed))
        assert payloads(opened(disk)) == served


HOUR_MS = 3_600_000


def several(disk: MemoryDisk) -> DiskLog:
    """A log of several closed segments, and one that is written to."""
    files = disk.mount()
    log = open_disk(FOLDER, files, limits=SMALL)
    for _ in range(12):
        write_batches(log, [batch_of(b"x" * 700)])
        log.sync()
    assert log.segment_count > 3
    return log


@pytest.mark.parametrize("room", [0, 20])
@pytest.mark.parametrize("how", ["retention", "trim"])
def test_a_full_disk_lets_go_of_closed_segments_though_none_can_be_begun(room: int, how: str) -> None:
    """All that is in the newest one is too old as well: it would be closed first, for which there is no room."""
    disk = MemoryDisk()
    log = several(disk)
    disk.room_bytes = room
    end, now_ms = log.end_offset, 1_000 + 2 * HOUR_MS

    def let_go() -> int:
        if how == "trim":
            return log.trim(end, now_ms)
        return log.delete_old(Retention(age_ms=HOUR_MS), now_ms, below=end)

    assert let_go() > 2
    assert disk.room_bytes > 5_000
    assert let_go() == 1, "there is room to close the newest one by now"
    assert (log.start_offset, log.end_offset) == (end, end)
    disk.kill()
    again = opened(disk)
    assert (again.start_offset, again.end_offset) == (end, end)


def test_a_full_disk_with_nothing_to_let_go_of_says_so() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    write_batches(log, [batch_of(b"x" * 700)])
    log.sync()
    disk.room_bytes = 0
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        log.delete_old(Retention(age_ms=HOUR_MS), 1_000 + 2 * HOUR_MS, below=log.end_offset)
    assert payloads(log) == [b"x" * 700]


def test_a_full_disk_lets_go_of_segments_that_are_in_a_store_as_well() -> None:
    """What is in the store is to be deleted there: for saying so there is no room, and the files go all the same."""
    disk = MemoryDisk()
    log = several(disk)
    urls = []
    for segment in log.segments[:-1]:
        url = f"memory://full/{segment.path.name}"
        urls.append(url)
        header, end = segment.header.encode(), segment.next_offset
        entry = Offloaded(url, header, end, segment.segment_bytes, segment.last_time_ms, "00" * 32)
        log.add_offloaded(segment, entry)
    disk.room_bytes = 0
    first = log.segments[2].base_offset
    assert log.trim(first, 1_000) == 2
    assert disk.room_bytes > 3_000
    assert (log.start_offset, log.offload.pending_deletion) == (first, tuple(urls[:2]))
    disk.room_bytes = 0
    disk.kill()
    again = open_disk(FOLDER, disk.mount(), limits=SMALL)
    assert (again.start_offset, again.offload.pending_deletion) == (first, tuple(urls[:2]))
    assert [one.url for one in again.offload.segments] == urls[2:]


def test_a_segment_whose_name_could_not_be_synced_ends_the_log_and_not_what_it_holds() -> None:
    """Also for want of room: a log that went on in the segment before would have the next one's offsets twice, and open no more."""
    disk = MemoryDisk()
    log = opened(disk)
    write_batches(log, [batch_of(b"first")])
    log.sync()

    def fail(call: str, path: Path) -> None:
        if call == "sync_folder":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    disk.on_call = fail
    with pytest.raises(StorageFailedError):
        log.roll(2_000)
    disk.on_call = None
    with pytest.raises(StorageFailedError):
        write_batches(log, [batch_of(b"second")])
    disk.kill()
    again = opened(disk)
    write_batches(again, [batch_of(b"second")])
    again.sync()
    disk.kill()
    assert payloads(opened(disk)) == [b"first", b"second"]


def test_a_log_without_descriptors_takes_nothing_and_goes_on_once_there_are_some() -> None:
    """Wherever they run out as it writes, closes a segment, or lets go of one."""
    at = 0
    while True:
        disk = MemoryDisk()
        files = disk.mount()
        log = open_disk(FOLDER, files, limits=SMALL)
        files.sync_folder(FOLDER.parent)
        opens, failed = 0, False

        def exhausted(call: str, path: Path, fails: int = at) -> None:
            nonlocal opens, failed
            if call == "open":
                opens += 1
                if opens == fails + 1:
                    failed = True
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

        disk.on_call = exhausted
        expected: list[bytes] = []
        for number in range(8):
            payload = b"%d" % number * 700
            for _ in range(2):
                try:
                    log.begin_epoch(1 + number // 3)
                    write_batches(log, [batch_of(payload)])
                    break
                except (OSError, UnavailableError) as error:
                    assert not isinstance(error, StorageFailedError), (at, error)
            log.sync()
            expected.append(payload)
        disk.on_call = None
        assert payloads(log) == expected
        disk.lose_power(Random(at))
        assert payloads(opened(disk)) == expected
        if not failed:
            assert at > 5
            return
        at += 1


@pytest.mark.parametrize("how", ["retention", "trim"])
def test_a_log_without_descriptors_lets_go_of_closed_segments_though_nothing_can_be_begun(how: str) -> None:
    """Neither the segment that would follow the newest one, nor the list of what is in a store."""
    disk = MemoryDisk()
    log = several(disk)
    for segment in log.segments[:-1]:
        header, end = segment.header.encode(), segment.next_offset
        url = f"memory://without/{segment.path.name}"
        entry = Offloaded(url, header, end, segment.segment_bytes, segment.last_time_ms, "00" * 32)
        log.add_offloaded(segment, entry)
    end, now_ms = log.end_offset, 1_000 + 2 * HOUR_MS

    def exhausted(call: str, path: Path) -> None:
        if call == "open" and path.name.endswith(".tmp"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    def let_go() -> int:
        if how == "trim":
            return log.trim(end, now_ms)
        return log.delete_old(Retention(age_ms=HOUR_MS), now_ms, below=end)

    disk.on_call = exhausted
    assert let_go() > 2
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        let_go()
    disk.on_call = None
    assert let_go() == 1
    assert (log.start_offset, log.end_offset) == (end, end)
    assert len(log.offload.pending_deletion) > 2
    disk.kill()
    again = opened(disk)
    assert (again.start_offset, again.end_offset) == (end, end)


def test_a_cut_without_descriptors_halfway_ends_the_log() -> None:
    """What is written next would go to the file of a segment that is gone."""
    disk = MemoryDisk()
    log = several(disk)
    cut = LogPoint(2)

    def exhausted(call: str, path: Path) -> None:
        if call == "open" and not path.name.endswith((".tmp", "producers")) and log.end_offset == cut.offset:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    disk.on_call = exhausted
    with pytest.raises(StorageFailedError):
        log.truncate(cut)
    disk.on_call = None
    disk.kill()
    again = opened(disk)
    write_batches(again, [batch_of(b"after")])
    again.sync()
    disk.kill()
    # What was to be cut may be found again.
    assert payloads(opened(disk)) in [[*[b"x" * 700] * number, b"after"] for number in (2, 3)]
