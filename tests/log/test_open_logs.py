"""Logs that are not written to hold no files; those that were written to longest ago close theirs, with all that was written on the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from felix.batch import Batch, NewRecord, encode_batch
from felix.errors import UnavailableError
from felix.storage.disk import DiskFiles
from region.log import open_logs
from region.log.disk import DiskLog
from region.log.frame import Frame
from region.log.open_logs import OPEN_LOGS_MAX, OpenLogs, logs_max_of, raise_files_limit, relays_max_of
from region.log.segment import ShardIdentity

EPOCH = 1


class Counted(DiskFiles):
    """The disk, with what is open counted and a bound on it."""

    def __init__(self, most: int = 1_000) -> None:
        self.open_files: dict[int, Path] = {}
        self.most = most

    def open(self, path: Path, flags: int) -> int:
        if len(self.open_files) >= self.most:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        descriptor = super().open(path, flags)
        self.open_files[descriptor] = path
        return descriptor

    def close(self, descriptor: int) -> None:
        del self.open_files[descriptor]
        super().close(descriptor)


def frame_at(offset: int) -> Frame:
    batch = encode_batch([NewRecord(b"%d" % offset)])
    header = replace(batch.header, base_offset=offset, leader_epoch=EPOCH, shard=0)
    return Frame(Batch(header, batch.body), offset, EPOCH)


@contextmanager
def opened(folder: Path, names: Sequence[str], files: Counted, logs: OpenLogs) -> Iterator[list[DiskLog]]:
    held = [
        DiskLog.open(
            folder / name,
            ShardIdentity("r", f"a/b/{name}", bytes(16), 0),
            now_ms=1,
            files=files,
            open_logs=logs,
        )[0]
        for name in names
    ]
    yield held
    for log in held:
        log.close()


def test_only_those_written_to_last_hold_files_and_nothing_written_is_lost(tmp_path: Path) -> None:
    files, logs, names = Counted(), OpenLogs(2), [f"s{at}" for at in range(6)]
    with opened(tmp_path, names, files, logs) as held:
        assert len(files.open_files) == 2 * len(logs) == 4
        for offset in range(3):
            for log in held:
                log.write([frame_at(offset)], 1)
                # Another one is written to before this one's sync: it is synced by whoever closes it.
        assert len(files.open_files) == 4
        assert [log.synced_offset for log in held[:4]] == [3] * 4
        held[0].sync()
        held[0].sync_mark()
    assert not files.open_files and not len(logs)
    with opened(tmp_path, names, files, logs) as held:
        assert [log.end_offset for log in held] == [3] * 6
        # Opened as they were left: nothing is open before the first write.
        assert not files.open_files


def test_one_that_is_being_written_to_keeps_its_files(tmp_path: Path) -> None:
    files, logs = Counted(), OpenLogs(1)
    with opened(tmp_path, ["a", "b"], files, logs) as (a, b):
        with b.writer:
            a.write([frame_at(0)], 1)
            assert len(files.open_files) == 4
        b.write([frame_at(0)], 1)
        assert len(files.open_files) == 2


def test_a_process_with_too_many_files_open_refuses_a_write_and_goes_on_later(tmp_path: Path) -> None:
    files, logs = Counted(), OpenLogs(1)
    with opened(tmp_path, ["a", "b"], files, logs) as (a, _):
        files.most = 0
        with pytest.raises(UnavailableError, match="Too many open files") as caught:
            a.write([frame_at(0)], 1)
        assert caught.value.retry_after_ms
        files.most = 10
        a.write([frame_at(0)], 1)
        a.sync()
        assert a.end_offset == a.synced_offset == 1


def test_the_soft_limit_is_raised_to_the_hard_one_where_the_system_lets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [1_024, 4_096]
    monkeypatch.setattr(open_logs.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(open_logs.resource, "setrlimit", lambda _, wanted: limits.__setitem__(0, wanted[0]))
    assert raise_files_limit() == limits[0] == 4_096

    def refused(*_: object) -> None:
        raise ValueError

    limits[:] = [1_024, open_logs.resource.RLIM_INFINITY]
    monkeypatch.setattr(open_logs.resource, "setrlimit", refused)
    assert raise_files_limit() == 1_024
    limits[0] = limits[1]
    assert logs_max_of(raise_files_limit()) == OPEN_LOGS_MAX


def test_the_bound_leaves_files_for_all_else() -> None:
    assert logs_max_of(1 << 20) == OPEN_LOGS_MAX
    assert logs_max_of(1_024) == 384
    assert logs_max_of(10) == 1


@pytest.mark.parametrize(
    ("wanted", "files", "relays", "logs"),
    [
        (256, 1_024, 256, 256),
        (10_000, 1_024, 384, 192),
        (10_000, 1 << 20, 10_000, OPEN_LOGS_MAX),
        (256, 100, 0, 1),
    ],
)
def test_relays_leave_half_of_the_files_to_logs(wanted: int, files: int, relays: int, logs: int) -> None:
    assert relays_max_of(wanted, files) == relays
    assert logs_max_of(files - relays) == logs
