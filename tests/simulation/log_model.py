"""A broker's disk, modelled: the logs of its shards as lists of frames, what a loss of power leaves of them, and the file `node`.

What a process writes is in the page cache, which outlives the process; a loss of power leaves what was synced, and perhaps some of what
came after. A sync that fails leaves a hole: what it was to write never comes to the disk, and the next sync says that all is well.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from operator import attrgetter
from random import Random
from typing import NamedTuple

from region.cluster.records import ShardId
from region.cluster.registration import FolderRecord
from region.log.offload import Offloaded
from region.log.point import LogPoint
from region.replication.history import BEGINNING, EpochStart, History
from region.replication.messages import Frame

END = attrgetter("end")


class Captured(NamedTuple):
    """What a sync is to bring to the disk."""

    number: int
    frames: list[Frame]
    starts: tuple[EpochStart, ...]


@dataclass
class LogModel:
    """One log. `start`: what stood before was let go of."""

    frames: list[Frame] = field(default_factory=list)
    starts: tuple[EpochStart, ...] = ()
    start: LogPoint = BEGINNING
    kept: LogPoint = BEGINNING
    """the commit point in the folder"""
    stable: list[Frame] = field(default_factory=list)
    stable_starts: tuple[EpochStart, ...] = ()
    hole: int = -1
    """frames from this index on never come to the disk; -1: no sync has failed"""
    syncs: int = 0
    """that began"""
    synced: int = 0
    """the newest of them that has returned"""

    @property
    def end(self) -> LogPoint:
        return self.frames[-1].end if self.frames else self.start

    def cut(self, point: LogPoint) -> None:
        del self.frames[bisect_right(self.frames, point, key=END) :]
        self.starts = tuple(start for start in self.starts if start.start < point)

    def trim(self, point: LogPoint) -> None:
        kept = bisect_right(self.frames, point, key=END)
        del self.frames[:kept]
        self.stable = [frame for frame in self.stable if frame.end > point]
        if self.hole >= 0:
            self.hole = max(0, self.hole - kept)
        self.start = max(self.start, point)

    def read(self, begin: LogPoint, size: int) -> tuple[Frame, ...]:
        """Frames from `begin` on; none where they were let go of."""
        if begin < self.start:
            return ()
        at = bisect_right(self.frames, begin, key=END)
        found: list[Frame] = []
        for frame in self.frames[at:]:
            if found and size < frame.size:
                break
            found.append(frame)
            size -= frame.size
        return tuple(found)

    def below(self, point: LogPoint) -> list[Frame]:
        return self.frames[: bisect_right(self.frames, point, key=END)]

    def begin_sync(self) -> Captured:
        """What stands in the cache now."""
        self.syncs += 1
        return Captured(self.syncs, list(self.frames), self.starts)

    def sync(self, captured: Captured) -> None:
        """What stood in the cache when the sync began is on the disk. One that began before another one which has returned adds nothing."""
        if captured.number < self.synced:
            return
        self.synced, captured_frames, starts = captured
        # What was let go of meanwhile is not there again.
        frames = [frame for frame in captured_frames if frame.end > self.start]
        self.stable = frames if self.hole < 0 else frames[: self.hole]
        self.stable_starts = starts

    def fail(self) -> None:
        """A sync failed: the cache has it, the disk never will."""
        same = 0
        for cached, stable in zip(self.frames, self.stable, strict=False):
            if cached != stable:
                break
            same += 1
        self.hole = same if self.hole < 0 else min(self.hole, same)

    def lose_power(self, random: Random) -> None:
        whole = self.frames if self.hole < 0 else self.frames[: self.hole]
        if whole[: len(self.stable)] == self.stable:
            self.frames = whole[: random.randint(len(self.stable), len(whole))]
        elif random.random() < 0.5:
            self.frames = list(self.stable)
        else:
            self.frames = list(whole)
        end = self.end
        starts = self.starts if random.random() < 0.5 else self.stable_starts
        # The history is remade from the frames: a start that nothing stands behind may be lost, one with frames never is.
        known = {start.epoch: start for start in (*self.starts, *self.stable_starts)}
        epochs = {frame.epoch for frame in self.frames} | {
            start.epoch for start in starts if start.start == end
        }
        self.starts = tuple(
            known[epoch] for epoch in sorted(epochs) if epoch in known and known[epoch].start <= end
        )
        if self.start > BEGINNING:
            older = [
                start
                for start in self.stable_starts
                if start.start < self.start and start.epoch not in epochs
            ]
            self.starts = tuple(sorted({*older, *self.starts}))

    def recover(self) -> None:
        """A start writes again what a failed sync may have left to the cache. An epoch without frames is durable where the log was begun anew
        with it, and else not: here one in two is."""
        self.hole = -1
        self.starts = tuple(start for start in self.starts if start.start < self.end or start.epoch % 2)

    def copy(self) -> LogModel:
        return replace(self, frames=list(self.frames), stable=list(self.stable))

    def history(self) -> History:
        return History(self.starts)


@dataclass
class DiskModel:
    """A data folder. `fails`: the next syncs do; `hangs`: they never return; `slow_ms`: they take up to so long. `marks`: the commit points that are kept
    outside of the shards' folders. `damaged`: shards whose logs cannot be opened."""

    file: FolderRecord
    logs: dict[ShardId, dict[int, LogModel]] = field(default_factory=dict)
    marks: dict[tuple[ShardId, int], LogPoint] = field(default_factory=dict)
    damaged: set[ShardId] = field(default_factory=set)
    offloaded: dict[ShardId, dict[int, Offloaded]] = field(default_factory=dict)
    """segments that are in a store, and here no more, by base offset"""
    fails: bool = False
    hangs: bool = False
    slow_ms: int = 0

    def log(self, shard: ShardId, number: int) -> LogModel:
        return self.logs.setdefault(shard, {}).setdefault(number, LogModel())

    def lower_mark(self, shard: ShardId, number: int, point: LogPoint) -> None:
        """What is committed behind `point` is given up."""
        if self.marks.get((shard, number), point) > point:
            self.marks[shard, number] = point

    def is_short(self, shard: ShardId) -> bool:
        """Whether a log of the shard ends before what is known to be committed of it."""
        return any(mark > self.log(*at).end for at, mark in self.marks.items() if at[0] == shard)

    def every(self) -> list[LogModel]:
        return [log for logs in self.logs.values() for log in logs.values()]

    def copy(self) -> DiskModel:
        """A snapshot of the volume."""
        return DiskModel(
            self.file,
            {
                shard: {number: log.copy() for number, log in logs.items()}
                for shard, logs in self.logs.items()
            },
            dict(self.marks),
        )
