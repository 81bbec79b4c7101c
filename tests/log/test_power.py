"""A process is killed, its log is recovered and served, then the power goes: nothing that was served is gone.

The disk here keeps what was synced and loses everything else: bytes, and names in the folder. What a killed process wrote stays
readable until then, as in a page cache.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
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
    serving,
    stored,
    write_batches,
)

from region.log.disk import DiskLog, Frame, SegmentLimits
from region.log.durability import Durability, Kind
from region.log.retention import Retention
from region.log.shard import ShardSettings
from region.storage.disk import DiskFiles
from region.storage.port import Files

LIMITS = SegmentLimits(segment_bytes_max=600)
CALLS_MAX = 60
"""More calls that change something than any of the steps below makes."""


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Node:
    """A file, whatever its name: what of it is on the disk."""

    synced: bytes = b""


@dataclass
class PowerFiles(DiskFiles):
    """The real calls, without their syncs, in one folder. `kill_after` so many calls that change something, the process ends."""

    folder: Path
    kill_after: int | None = None
    entries: dict[str, Node] = field(default_factory=dict)
    synced_names: dict[str, Node] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)

    def _change(self) -> None:
        if self.kill_after is not None:
            self.kill_after -= 1
            if self.kill_after < 0:
                raise Killed

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT and path.name not in self.entries:
            self._change()
            self.entries[path.name] = Node()
        descriptor = super().open(path, flags)
        self.nodes[descriptor] = self.entries[path.name]
        return descriptor

    def pwritev(self, descriptor: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
        self._change()
        return super().pwritev(descriptor, buffers, position)

    def truncate(self, descriptor: int, length: int) -> None:
        self._change()
        super().truncate(descriptor, length)

    def sync(self, descriptor: int) -> None:
        self._change()
        self.nodes[descriptor].synced = os.pread(descriptor, self.size(descriptor), 0)

    def sync_folder(self, folder: Path) -> None:
        self._change()
        assert folder == self.folder
        self.synced_names = dict(self.entries)

    def rename(self, source: Path, target: Path) -> None:
        self._change()
        self.entries[target.name] = self.entries.pop(source.name)
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._change()
        self.entries.pop(path.name, None)
        super().remove(path)

    def lose_power(self, *, deletions_stay: bool) -> None:
        """Of names that were not synced, deletions may have reached the disk before the rest did."""
        left = {
            name: node
            for name, node in self.synced_names.items()
            if not deletions_stay or name in self.entries
        }
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        for name, node in left.items():
            (self.folder / name).write_bytes(node.synced)
        self.entries, self.synced_names = dict(left), dict(left)


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
                log.delete_old(Retention(bytes_kept=1_200), 2_000, below=log.end_offset)


STEPS = st.sampled_from(["write", "write", "write", "sync", "roll", "compact", "trim", "retain"])


@given(
    before=st.lists(STEPS, max_size=8),
    steps=st.lists(STEPS, min_size=1, max_size=6),
    kill_after=st.integers(0, CALLS_MAX),
    kill_again=st.integers(0, 12),
    power_goes_in_recovery=st.booleans(),
    deletions_stay=st.booleans(),
)
@example(["write", "roll", "write", "roll", "write"], ["trim"], 12, 4, True, True)
@settings(deadline=None)
def test_what_is_served_after_a_kill_is_there_after_a_power_cut(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[str],
    steps: list[str],
    kill_after: int,
    kill_again: int,
    power_goes_in_recovery: bool,
    deletions_stay: bool,
) -> None:
    folder = tmp_path_factory.mktemp("log")
    files = PowerFiles(folder)
    log = open_disk(folder, files, limits=LIMITS)
    work(log, before, files)
    files.kill_after = kill_after
    with contextlib.suppress(Killed):
        work(log, steps, files)
    log.abandon()
    files.kill_after = kill_again
    try:
        log = open_disk(folder, files, limits=LIMITS)
    except Killed:
        files.kill_after = None
        if power_goes_in_recovery:
            files.lose_power(deletions_stay=deletions_stay)
        log = open_disk(folder, files, limits=LIMITS)
    files.kill_after = None
    served = Served.by(log)
    log.abandon()
    files.lose_power(deletions_stay=deletions_stay)
    again = open_disk(folder, files, limits=LIMITS)
    assert Served.by(again) == served
    again.close()
    shutil.rmtree(folder)


async def test_a_shard_says_that_what_recovery_kept_is_synced_and_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "shard"
    folder.mkdir()
    files = PowerFiles(folder)
    interval = ShardSettings(durability=Durability(Kind.INTERVAL, 60_000))
    log = open_disk(folder, files)
    write_batches(log, [batch_of(b"synced")])
    log.sync()
    write_batches(log, [batch_of(b"page cache")])
    log.abandon()
    async with serving(folder, interval, files=files) as shard:
        crossed = [entry.base_offset for entry in await shard.read_sealed(0, 1 << 20)]
        assert shard.synced_offset == shard.high_watermark == 2 and crossed == [0, 1]
        files.lose_power(deletions_stay=False)
        assert stored(open_disk(folder)) == [b"synced", b"page cache"]
        assert shard.identity == IDENTITY
