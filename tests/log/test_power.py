"""A process is killed, its log is recovered and served, then the power goes: nothing that was served is gone.

The disk (felix.storage.memory) keeps what was synced, and of everything else, bytes and names in the folder, any part may go. What a
killed process wrote stays readable until then, as in a page cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from hypothesis import example, given, settings
from hypothesis import strategies as st
from log.building import (
    IDENTITY,
    batch_of,
    compact,
    keyed,
    masked,
    open_disk,
    placed,
    stored,
    write_batches,
)

from felix.settings import Durability, Retention
from felix.storage.memory import MemoryDisk
from felix.storage.port import Files
from region.log.disk import DiskLog
from region.log.frame import Frame
from region.log.segment_limits import SegmentLimits
from region.log.shard import ShardHooks, ShardLog, ShardSettings

T = TypeVar("T")

FOLDER = Path("/shard")
LIMITS = SegmentLimits(segment_bytes_max=600)
CHANGES = ("pwritev", "truncate", "sync", "sync_folder", "rename", "remove")
CALLS_MAX = 60
"""More calls that change something than any of the steps below makes."""


class Killed(BaseException):
    """The process ends here."""


class LosesAll(Random):
    """The chance that nothing had reached the disk that was not synced."""

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        return seq[0]


class Fate:
    """Ends the process after so many calls that change something."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.disk = disk
        self.kill_after: int | None = None
        disk.on_call = self.called

    def called(self, name: str, path: Path) -> None:
        makes = name == "open" and self.disk.find(path) is None
        if self.kill_after is None or not (makes or name in CHANGES):
            return
        self.kill_after -= 1
        if self.kill_after < 0:
            raise Killed


def opened(disk: MemoryDisk) -> tuple[DiskLog, Files]:
    files = disk.mount()
    log = open_disk(FOLDER, files, limits=LIMITS)
    files.sync_folder(FOLDER.parent)
    return log, files


@dataclass(frozen=True)
class Served:
    """What a log shows to others once it is open."""

    start: int
    end: int
    batches: tuple[bytes, ...]
    annotations: tuple[tuple[int, bytes], ...]

    @classmethod
    def by(cls, log: DiskLog) -> Served:
        batches, offset = [], log.start_offset
        while found := log.read(offset, 4_096, log.end_offset):
            batches += [bytes(batch.data) for batch in found]
            offset = found[-1].header.next_offset
        return cls(log.start_offset, log.end_offset, tuple(batches), tuple(sorted(log.annotations.items())))


def write_group(log: DiskLog, number: int) -> None:
    """Batches whose keys come again, so that compaction has something to do, and an annotation; not synced."""
    frames, offset = [], log.end_offset
    for at in range(3):
        batch = masked(placed(keyed((b"k%d" % at, b"%d.%d" % (number, at) * 9)), offset))
        frames.append(Frame(batch, offset, 0, at, b"@%d.%d" % (number, at)))
        offset = batch.header.next_offset
    log.write(frames, 1_000 + number)


def work(log: DiskLog, steps: Sequence[str], files: Files) -> None:
    for number, step in enumerate(steps):
        match step:
            case "write":
                write_group(log, number)
            case "sync":
                log.sync()
            case "roll" if log.end_offset > log.segments[-1].base_offset:
                log.roll(2_000)
            case "compact":
                compact(log, now_ms=1_000_000, files=files)
            case "trim":
                log.trim(log.end_offset - 1, 2_000)
            case "retain":
                log.delete_old(Retention(size_bytes=1_200), 2_000, below=log.end_offset)


STEPS = st.sampled_from(["write", "write", "write", "sync", "roll", "compact", "trim", "retain"])


@given(
    before=st.lists(STEPS, max_size=8),
    steps=st.lists(STEPS, min_size=1, max_size=6),
    kill_after=st.integers(0, CALLS_MAX),
    kill_again=st.integers(0, 12),
    power_goes_in_recovery=st.booleans(),
    removals_first=st.booleans(),
    seed=st.none() | st.integers(0, 1_000),
)
@example(["write", "roll", "write", "roll", "write"], ["trim"], 12, 6, True, True, None)
@settings(deadline=None)
def test_what_is_served_after_a_kill_is_there_after_a_power_cut(
    before: list[str],
    steps: list[str],
    kill_after: int,
    kill_again: int,
    power_goes_in_recovery: bool,
    removals_first: bool,
    seed: int | None,
) -> None:
    random, disk = LosesAll() if seed is None else Random(seed), MemoryDisk()
    fate = Fate(disk)
    log, files = opened(disk)
    work(log, before, files)
    fate.kill_after = kill_after
    with contextlib.suppress(Killed):
        work(log, steps, files)
    fate.kill_after = kill_again
    try:
        log, _ = opened(disk)
    except Killed:
        fate.kill_after = None
        if power_goes_in_recovery:
            disk.lose_power(random, removals_first=removals_first)
        log, _ = opened(disk)
    fate.kill_after = None
    served = Served.by(log)
    disk.lose_power(random, removals_first=removals_first)
    again, _ = opened(disk)
    assert Served.by(again) == served


async def test_a_shard_says_that_what_recovery_kept_is_synced_and_it_is() -> None:
    disk = MemoryDisk()
    interval = ShardSettings(durability=Durability("interval", 60_000))
    log, _ = opened(disk)
    write_batches(log, [batch_of(b"synced")])
    log.sync()
    write_batches(log, [batch_of(b"page cache")])
    with ThreadPoolExecutor(1) as pool:
        shard = await ShardLog.open(
            FOLDER, IDENTITY, interval, ShardHooks(), commit_pool=pool, read_pool=pool, files=disk.mount()
        )
        crossed = [entry.base_offset for entry in await shard.read_sealed(0, 1 << 20)]
        assert shard.synced_offset == shard.high_watermark == 2 and crossed == [0, 1]
    disk.lose_power(LosesAll())
    log, _ = opened(disk)
    assert stored(log) == [b"synced", b"page cache"]
