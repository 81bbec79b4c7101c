"""A log whose disk fails for a moment: it is opened again by whoever writes it, with all that was durable and nothing that was refused."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from audit_log import Link, log_signer, trust
from long_runs import count

from audit.errors import AuditUnavailableError
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.trail_reopening import TrailReopening
from audit.verify import verify_log
from felix.errors import CorruptionError
from felix.reopening import REOPEN_MS_MIN
from felix.storage.memory import MemoryDisk

LOG = Path("/log")
SETTINGS = TrailSettings(checkpoint_interval_ms=1_000_000, segment_bytes_max=40_000)
"""Checkpoints when the test says so, so that each run makes the same calls; and several segments."""
ROUNDS = 3
APPENDS = 16
LEAVES = 7
"""336 in all: a bundle is filled, and write-ahead segments are removed."""


class Writer:
    """Appends to a log, and keeps account of what it was told."""

    def __init__(self, disk: MemoryDisk, **more: object) -> None:
        self.disk = disk
        files = disk.mount()
        files.make_folder(LOG)
        self.trail = Trail.open(LOG, log_signer(), files=files, settings=SETTINGS, **more)  # type: ignore[arg-type]
        self.told = 0
        """leaves that were said to be durable"""
        self._link = Link()

    def append(self) -> AuditUnavailableError | None:
        told: list[tuple[int, AuditUnavailableError | None]] = []
        answered = threading.Event()

        def done(first: int, error: AuditUnavailableError | None) -> None:
            told.append((first, error))
            answered.set()

        try:
            self.trail.append_nowait([self._link.deny() for _ in range(LEAVES)], done)
        except AuditUnavailableError as error:
            return error
        assert answered.wait(30)
        first, failed = told[0]
        if failed is None:
            assert first == self.told, "an index is given once"
            self.told += LEAVES
        return failed

    def round(self) -> AuditUnavailableError | None:
        for _ in range(APPENDS):
            if (error := self.append()) is not None:
                return error
        try:
            self.trail.publish()
        except AuditUnavailableError as error:
            return error
        return None


def check(disk: MemoryDisk, size: int) -> None:
    report = verify_log(Folder(LOG, disk.mount()), trust(), cosignatures_min=0)
    assert report.ok, report.findings
    assert report.size == size


def calls_of_the_workload() -> list[tuple[str, Path]]:
    disk, calls = MemoryDisk(), list[tuple[str, Path]]()
    writer = Writer(disk)
    disk.on_call = lambda call, path: calls.append((call, path))
    for _ in range(ROUNDS):
        assert writer.round() is None
    disk.on_call = None
    writer.trail.close()
    return calls


CALLS = calls_of_the_workload()
CHANGING = ("open", "pwritev", "sync", "sync_folder", "rename", "remove", "close")
FAILING = [at for at, (call, _) in enumerate(CALLS) if call in CHANGING][:: count(5, 1)]


@pytest.mark.parametrize("part", range(4))
def test_whichever_call_fails_it_goes_on_with_all_that_was_told_and_nothing_that_was_refused(
    part: int,
) -> None:
    """Each call of a workload fails once; then the log is opened again, written to, and the power fails."""
    stopped = 0
    for at in FAILING[part::4]:
        disk = MemoryDisk()
        writer = Writer(disk)
        calls = 0

        def fail(call: str, path: Path, at: int = at) -> None:
            nonlocal calls
            calls += 1
            if calls == at + 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

        disk.on_call = fail
        refused = None
        for _ in range(ROUNDS):
            refused = refused or writer.round()
        disk.on_call = None
        if writer.trail.stopped is not None:
            stopped += 1
            assert writer.trail.may_reopen
            writer.trail.reopen()
        assert writer.trail.failure is None, CALLS[at]
        assert writer.trail.status().durable == writer.told, CALLS[at]
        assert writer.append() is None, CALLS[at]
        writer.trail.publish()
        disk.lose_power(random.Random(at))
        check(disk, writer.told)
        again = Writer(disk)
        assert again.trail.status().durable == writer.told
        again.trail.close()
    assert stopped, "most calls stop it"


def failing(disk: MemoryDisk, call: str, path: str) -> Callable[[], None]:
    """The next such call fails. What is returned ends that."""

    def fail(named: str, of: Path) -> None:
        if named == call and path in str(of):
            disk.on_call = None
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(of))

    disk.on_call = fail

    def over() -> None:
        disk.on_call = None

    return over


def stopped_writer(disk: MemoryDisk) -> Writer:
    writer = Writer(disk)
    assert writer.round() is None
    failing(disk, "sync", ".wal")
    assert writer.append() is not None
    assert "has stopped: its disk failed" in writer.trail.status().failure
    return writer


def test_a_try_that_fails_says_so_and_another_one_may_follow() -> None:
    disk = MemoryDisk()
    writer = stopped_writer(disk)
    failing(disk, "open", "checkpoint")
    with pytest.raises(OSError, match="Input/output"):
        writer.trail.reopen()
    assert "could not be opened again" in writer.trail.status().failure
    assert writer.append() is not None
    writer.trail.reopen()
    assert writer.append() is None
    writer.trail.close()
    check(disk, writer.told)


def test_a_log_that_lost_what_was_durable_stays_stopped() -> None:
    disk = MemoryDisk()
    writer = stopped_writer(disk)
    wal = max(path for path in disk.files() if path.suffix == ".wal")
    files = disk.mounted
    file = files.open(wal, os.O_RDWR)
    size = files.size(file)
    files.truncate(file, size // 2)
    files.close(file)
    with pytest.raises(CorruptionError, match="its checkpoint covers"):
        writer.trail.reopen()
    assert writer.append() is not None
    writer.trail.close()


def test_a_log_that_lost_what_no_checkpoint_covers_stays_stopped() -> None:
    disk = MemoryDisk()
    writer = Writer(disk)
    assert writer.round() is None
    wal = max(path for path in disk.files() if path.suffix == ".wal")
    files = disk.mounted
    file = files.open(wal, os.O_RDWR)
    covered = files.size(file)
    assert writer.append() is None
    failing(disk, "sync", ".wal")
    assert writer.append() is not None
    files.truncate(file, covered)
    with pytest.raises(CorruptionError, match="has lost some"):
        writer.trail.reopen()
    writer.trail.close()


def test_what_was_refused_does_not_come_back_where_the_sync_behind_its_cut_failed() -> None:
    """It was on the disk: the next segment could not be made behind it."""
    disk = MemoryDisk()
    writer = Writer(disk)
    opens = 0

    def fail(call: str, path: Path) -> None:
        nonlocal opens
        if call == "open" and path.suffix == ".wal":
            opens += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    disk.on_call = fail
    while writer.append() is None:
        pass
    assert opens == 1 and writer.told
    failing(disk, "sync", ".wal")
    with pytest.raises(OSError, match="Input/output"):
        writer.trail.reopen()
    writer.trail.reopen()
    assert writer.trail.status().durable == writer.told
    disk.lose_power(random.Random(1))
    again = Writer(disk)
    assert again.trail.status().durable == writer.told
    again.trail.close()
    check(disk, writer.told)


def test_a_cut_that_is_made_again_needs_no_room() -> None:
    disk = MemoryDisk()
    writer = stopped_writer(disk)
    disk.room_bytes = 0
    # What a snapshot needs is written when there is room.
    writer.trail.reopen()
    assert writer.trail.status().durable == writer.told
    disk.room_bytes = 1 << 30
    writer.trail.close()
    check(disk, writer.told)


def test_tries_come_at_their_times_and_a_mistake_is_not_tried() -> None:
    class Clock:
        now_s = 100.0

        def monotonic(self) -> float:
            return self.now_s

    clock, disk = Clock(), MemoryDisk()
    writer = stopped_writer(disk)
    reopening = TrailReopening(writer.trail, clock)  # type: ignore[arg-type]
    assert not reopening.is_due(), "not at once"
    clock.now_s += REOPEN_MS_MIN / 1000
    assert reopening.is_due()
    failing(disk, "open", "checkpoint")
    assert not reopening.open()
    clock.now_s += REOPEN_MS_MIN / 1000
    assert not reopening.is_due(), "twice as long"
    clock.now_s += REOPEN_MS_MIN / 1000
    assert reopening.is_due()
    assert reopening.open()
    assert writer.append() is None
    assert reopening.opened == 1
    assert not reopening.is_due()
    writer.trail._fail("a mistake", ValueError("of ours"))
    assert not writer.trail.may_reopen
    clock.now_s += 3_600
    assert not reopening.is_due()
    assert not reopening.is_due()
    writer.trail.close()


def test_an_orderly_end_waits_until_it_is_open_or_not() -> None:
    disk = MemoryDisk()
    writer = stopped_writer(disk)
    begun, go_on = threading.Event(), threading.Event()

    def hang(call: str, path: Path) -> None:
        if call == "open" and path.name == "checkpoint":
            begun.set()
            assert go_on.wait(30)

    disk.on_call = hang
    opening = threading.Thread(target=writer.trail.reopen)
    opening.start()
    assert begun.wait(30)
    closing = threading.Thread(target=writer.trail.close)
    closing.start()
    disk.on_call = None
    go_on.set()
    opening.join(30)
    closing.join(30)
    assert not closing.is_alive()
    check(disk, writer.told)


def test_a_disk_that_does_not_answer_is_said_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("felix.storage.disk_waits.HUNG_S", 0.05)
    disk = MemoryDisk()
    writer = Writer(disk)
    assert writer.append() is None
    go_on = threading.Event()

    def hang(call: str, path: Path) -> None:
        if call == "sync" and path.suffix == ".wal":
            assert go_on.wait(30)

    disk.on_call = hang
    appending = threading.Thread(target=writer.append)
    appending.start()
    pause = threading.Event()
    for _ in range(3_000):
        if writer.trail.status().failure:
            break
        pause.wait(0.01)
    assert "waits for its disk, which has not answered" in writer.trail.status().failure
    assert writer.trail.stopped is None
    disk.on_call = None
    go_on.set()
    appending.join(30)
    assert not writer.trail.status().failure
    writer.trail.close()


@pytest.mark.parametrize("how", ["moved away", "an older copy in its place"])
@pytest.mark.parametrize("is_back", ["before it writes", "after it stopped"])
def test_what_is_written_goes_into_the_folder_that_was_opened(tmp_path: Path, how: str, is_back: str) -> None:
    """Where another one is mounted over it, say, and later it is back: bundles, tiles, checkpoints and new segments are in one folder, and nothing is removed for what is in another."""
    folder, elsewhere, older = tmp_path / "log", tmp_path / "elsewhere", tmp_path / "older"
    settings = TrailSettings(checkpoint_interval_ms=1_000_000, segment_bytes_max=20_000)
    trail = Trail.open(folder, log_signer(), settings=settings)
    link, told = Link(), 0

    def append(times: int) -> None:
        nonlocal told
        for _ in range(times):
            failed: list[object] = []
            answered = threading.Event()

            def said(
                first: int,
                error: AuditUnavailableError | None,
                failed: list[object] = failed,
                answered: threading.Event = answered,
            ) -> None:
                failed.append(error)
                answered.set()

            try:
                trail.append_nowait([link.deny() for _ in range(LEAVES)], said)
            except AuditUnavailableError:
                return
            assert answered.wait(30)
            told += 0 if failed[0] else LEAVES

    append(2)
    trail.publish()
    shutil.copytree(folder, older)
    folder.rename(elsewhere)
    if how == "an older copy in its place":
        older.rename(folder)
    before = sorted(path for path in folder.rglob("*") if path.is_file())
    append(1 if is_back == "before it writes" else 40)
    if is_back == "after it stopped":
        with pytest.raises(AuditUnavailableError, match="not the folder that was opened"):
            trail.publish()
        with pytest.raises(OSError, match="not the folder"):
            trail.reopen()
        assert sorted(path for path in folder.rglob("*") if path.is_file()) == before
    if folder.exists():
        folder.rename(older)
    elsewhere.rename(folder)
    if trail.stopped is not None:
        trail.reopen()
    append(60)
    trail.publish()
    assert trail.status().durable == told
    trail.close()
    check_folder(folder, told)
    again = Trail.open(folder, log_signer())
    assert again.status().durable == told
    again.close()


def check_folder(folder: Path, size: int) -> None:
    report = verify_log(Folder(folder), trust(), cosignatures_min=0)
    assert report.ok, report.findings
    assert report.size == size


def test_a_log_that_is_opened_again_while_the_process_ends_waits_for_no_room() -> None:
    disk = MemoryDisk()
    writer = stopped_writer(disk)
    writer.trail.end_waiting()
    writer.trail.reopen()
    disk.room_bytes = 0
    refused = writer.append()
    assert refused is not None and "it ends while its disk is full" in refused.sentence
    disk.room_bytes = 1 << 30
    writer.trail.close()
    check(disk, writer.told)
