"""What deletes by age goes on from where the broker was, for an hour, where it starts much later by its clock."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from felix.storage.memory import MemoryDisk, MemoryFiles
from felix.told import Told
from region.retention_clock import AWAY_MS, NAME, SAVE_MS, RetentionClock
from region.views.wall_clock import HELD_MS

DAY_MS = 86_400_000
DATA = Path("/data")


class Machine:
    """A broker's folder, and clocks that a test sets."""

    def __init__(self) -> None:
        self.files = MemoryFiles(MemoryDisk())
        self.files.make_folder(DATA)
        self.wall_ms, self.boot_ms = 1_800_000_000_000, 50_000

    def start(self) -> RetentionClock:
        return RetentionClock(
            self.files, DATA, lambda: self.wall_ms, lambda: self.boot_ms, Told(lambda: self.boot_ms / 1_000)
        )

    def pass_by(self, ms: int) -> None:
        self.wall_ms += ms
        self.boot_ms += ms


@pytest.fixture
def machine() -> Machine:
    return Machine()


async def test_a_clock_that_is_ahead_at_a_start_is_believed_an_hour_later(machine: Machine) -> None:
    before_ms = await machine.start().now_ms()
    assert before_ms == machine.wall_ms
    machine.wall_ms += 30 * DAY_MS
    clock = machine.start()
    assert await clock.now_ms() == before_ms
    machine.pass_by(HELD_MS - 1)
    assert await clock.now_ms() == before_ms + HELD_MS - 1
    machine.pass_by(1)
    assert await clock.now_ms() == machine.wall_ms


async def test_nor_is_it_by_another_start_before_that(machine: Machine) -> None:
    before_ms = await machine.start().now_ms()
    machine.wall_ms += DAY_MS
    for _ in range(5):
        clock = machine.start()
        await clock.now_ms()
        machine.pass_by(HELD_MS // 2)
        await clock.now_ms()
    assert await clock.now_ms() == before_ms + 5 * (HELD_MS // 2)


async def test_one_that_is_set_right_meanwhile_has_done_nothing(machine: Machine) -> None:
    before_ms = await machine.start().now_ms()
    machine.wall_ms += DAY_MS
    clock = machine.start()
    await clock.now_ms()
    machine.wall_ms -= DAY_MS
    machine.pass_by(1_000)
    assert await clock.now_ms() == machine.wall_ms == before_ms + 1_000
    machine.pass_by(2 * HELD_MS)
    assert await clock.now_ms() == machine.wall_ms


@pytest.mark.parametrize("away_ms", [-DAY_MS, 0, AWAY_MS])
async def test_a_broker_that_was_away_for_a_short_time_or_whose_clock_is_behind_goes_by_it_at_once(
    machine: Machine, away_ms: int
) -> None:
    await machine.start().now_ms()
    machine.wall_ms += away_ms
    assert await machine.start().now_ms() == machine.wall_ms


async def test_a_new_folder_and_a_file_that_is_damaged_say_nothing(machine: Machine) -> None:
    await machine.start().now_ms()
    descriptor = machine.files.open(DATA / NAME, 2)
    machine.files.pwritev(descriptor, [b"x"], 20)
    machine.files.close(descriptor)
    machine.wall_ms += DAY_MS
    assert await machine.start().now_ms() == machine.wall_ms


async def test_it_is_written_once_a_minute_and_again_where_that_failed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = machine.start()
    written = await clock.now_ms()
    machine.pass_by(SAVE_MS - 1)
    await clock.now_ms()

    def known() -> int:
        payload = RetentionClock(machine.files, DATA, lambda: 2**50, lambda: 0, Told(lambda: 0.0))._load()
        return payload

    assert known() == written

    def fails(path: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(machine.files, "sync_folder", fails)
        machine.pass_by(1)
        assert await clock.now_ms() == machine.wall_ms, "a full disk keeps nobody from deleting"
    machine.pass_by(1)
    assert await clock.now_ms() == known() == machine.wall_ms
