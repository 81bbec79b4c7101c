"""A log whose disk is full for a while: what was accepted waits, nothing is said of it, and it goes on by itself."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from audit_log import Link, log_signer, trust

from audit.errors import AuditUnavailableError
from audit.leaf import Leaf
from audit.tile_disk import Folder
from audit.trail import Trail, TrailSettings
from audit.verify import verify_log
from felix.storage.memory import MemoryDisk

LOG = Path("/log")
SETTINGS = TrailSettings(checkpoint_interval_ms=5)
WAIT_S = 30


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("audit.trail.FULL_RETRY_MS", 5)


class Appends:
    """Leaves that were accepted, and what was said of each, in order."""

    def __init__(self, trail: Trail) -> None:
        self._trail = trail
        self._link = Link()
        self._changed = threading.Condition()
        self.accepted: list[int] = []
        self.told: list[tuple[int, AuditUnavailableError | None]] = []

    def put(self, count: int = 1) -> bool:
        """Whether it was accepted."""
        leaves: list[Leaf] = [self._link.deny() for _ in range(count)]
        try:
            self.accepted.append(self._trail.append_nowait(leaves, self._done))
        except AuditUnavailableError:
            return False
        return True

    def _done(self, first: int, error: AuditUnavailableError | None) -> None:
        with self._changed:
            self.told.append((first, error))
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all that was accepted was answered."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.told) == len(self.accepted), WAIT_S)


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(WAIT_S * 500):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError("it did not come to pass")


def opened(disk: MemoryDisk, **more: object) -> Trail:
    files = disk.mount()
    files.make_folder(LOG)
    return Trail.open(LOG, log_signer(), files=files, **({"settings": SETTINGS} | more))  # type: ignore[arg-type]


def check(disk: MemoryDisk, size: int) -> None:
    report = verify_log(Folder(LOG, disk.mount()), trust(), cosignatures_min=0)
    assert report.ok, report.findings
    assert report.size == size


@pytest.mark.parametrize("room", [0, 1, 400, 501, 1_300, 2_500, 9_000, 60_000, 100_000, 131_000, 160_000])
def test_it_waits_for_room_and_goes_on_by_itself(room: int) -> None:
    """So much room that the disk is full in the write-ahead file, in the edge of the tree, in a full bundle, a tile, or the index."""
    disk = MemoryDisk()
    trail = opened(disk)
    appends = Appends(trail)
    assert appends.put(3)
    appends.wait()
    before, disk.room_bytes = disk.room_bytes, room
    # What is removed behind a checkpoint gives room again, so that it may take more once it has refused.
    until(lambda: not appends.put(7))
    assert trail.stopped is None
    disk.room_bytes += before - room
    appends.wait()
    assert [first for first, _ in appends.told] == appends.accepted
    assert not any(error for _, error in appends.told)
    until(lambda: trail.failure is None)
    while len(appends.accepted) < 90:
        assert appends.put(7)
    appends.wait()
    trail.close()
    check(disk, 3 + 7 * (len(appends.accepted) - 1))


def test_what_is_not_written_is_not_told_and_a_kill_loses_only_that() -> None:
    disk = MemoryDisk()
    trail = opened(disk)
    appends = Appends(trail)
    assert appends.put(5)
    appends.wait()
    disk.room_bytes = 100
    assert appends.put(5)
    until(lambda: "waits for room" in trail.status().failure)
    with pytest.raises(AuditUnavailableError, match="waits for room") as caught:
        trail.publish()
    assert caught.value.retry_after_ms
    assert len(appends.told) == 1, "it is written nowhere"
    disk.kill()
    disk.room_bytes = 1 << 30
    again = opened(disk)
    assert again.status().size == 5
    again.close()
    check(disk, 5)


def test_one_that_ends_while_its_disk_is_full_refuses_what_it_accepted() -> None:
    disk = MemoryDisk()
    trail = opened(disk)
    appends = Appends(trail)
    assert appends.put(5)
    appends.wait()
    trail.publish()
    disk.room_bytes = 100
    assert appends.put(5)
    trail.close()
    appends.wait()
    assert appends.told[0] == (0, None)
    assert appends.told[1][1] is not None
    disk.room_bytes = 1 << 30
    again = opened(disk)
    assert again.status().size == 5
    again.close()


def test_a_sync_that_fails_for_want_of_room_stops_it() -> None:
    """The kernel forgets it: another one would prove nothing."""
    disk = MemoryDisk()
    trail = opened(disk)
    appends = Appends(trail)
    assert appends.put()
    appends.wait()

    def fail(call: str, path: Path) -> None:
        if call == "sync" and path.suffix == ".wal":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    disk.on_call = fail
    assert appends.put()
    appends.wait()
    disk.on_call = None
    assert appends.told[1][1] is not None
    assert trail.stopped is not None
    assert not appends.put()
    trail.close()


def test_a_segment_that_cannot_be_begun_goes_on_in_the_one_before() -> None:
    disk = MemoryDisk()
    trail = opened(disk, settings=TrailSettings(checkpoint_interval_ms=5, segment_bytes_max=4_000))
    appends = Appends(trail)

    def fail(call: str, path: Path) -> None:
        if call == "open" and path.suffix == ".wal":
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))

    disk.on_call = fail
    for _ in range(30):
        assert appends.put()
        appends.wait()
    disk.on_call = None
    assert len([path for path in disk.files() if path.suffix == ".wal"]) == 1
    for _ in range(30):
        assert appends.put()
        appends.wait()
    assert not any(error for _, error in appends.told)
    assert len([path for path in disk.files() if path.suffix == ".wal"]) > 1
    trail.close()
    check(disk, 60)


def test_it_is_said_once_that_there_is_no_room(caplog: pytest.LogCaptureFixture) -> None:
    disk = MemoryDisk()
    trail = opened(disk)
    appends = Appends(trail)
    assert appends.put()
    appends.wait()
    trail.publish()
    tried = 0

    def count(call: str, path: Path) -> None:
        nonlocal tried
        tried += call == "pwritev" and path.suffix == ".wal"

    disk.on_call, disk.room_bytes = count, 10
    with caplog.at_level(logging.INFO, logger="felix.audit"):
        assert appends.put()
        until(lambda: tried > 20)
        disk.room_bytes = 1 << 30
        appends.wait()
        until(lambda: trail.failure is None)
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 2, said
    assert "waits for room" in said[0]
    assert "goes on" in said[1]
    trail.close()


@pytest.mark.parametrize("at", range(1, 12))
def test_too_many_open_files_hold_it_up_and_stop_nothing(at: int) -> None:
    """Wherever it would open one, for three tries."""
    disk = MemoryDisk()
    trail = opened(disk)
    opens = refused = 0

    def exhausted(call: str, path: Path) -> None:
        nonlocal opens, refused
        if call == "open":
            opens += 1
            if at <= opens < at + 3:
                refused += 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    disk.on_call = exhausted
    appends, count = Appends(trail), 0
    while refused < 3:
        count += appends.put(7)
        appends.wait()
        assert trail.stopped is None
    until(lambda: trail.failure is None)
    disk.on_call = None
    assert not any(error for _, error in appends.told)
    trail.close()
    check(disk, 7 * count)
