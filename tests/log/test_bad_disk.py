"""A log on a disk that fills up, that fails a sync, and that loses what was not synced (felix.storage.memory)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random

import pytest
from log.building import batch_of, open_disk, write_batches

from felix.batch import decode_batch, decode_records
from felix.storage.memory import MemoryDisk
from region.log.disk import DiskLog
from region.log.errors import StorageFailedError

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
