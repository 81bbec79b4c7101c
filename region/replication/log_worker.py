"""Carries out on commit threads what a replica's core asks of one of its logs, in the order in which it was asked.

Jobs are put on the event loop and done by one thread of a shared pool at a time, a group at a time: consecutive appends are one write, and
all writes of a group share one sync. What came of them is told on the loop, in order.

Invariants:
- after a failure nothing is done any more: what was not told never happened, as far as the core knows;
- a full disk fails nothing: a leader's append is refused and leaves no trace, a follower's write is tried again while the leader's window
  bounds what waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from threading import Lock
from typing import Final

from felix.batch import Batch
from felix.errors import CorruptionError, FelixError
from felix.runtime.port import Runtime
from felix.storage.port import is_full
from region.cluster.records import YieldReason
from region.log.errors import FULL_RETRY_MS, disk_full
from region.log.frame import Frame as LogFrame
from region.log.group_commit import GROUP_BYTES_MAX
from region.log.point import LogPoint
from region.replication.disk import ReplicaDisk
from region.replication.messages import Frame
from region.replication.origin import Beginning
from region.replication.ready import (
    Begin,
    Copied,
    CopyFailed,
    DiskFailed,
    Keep,
    Sync,
    Synced,
    Trim,
    Trimmed,
    Truncate,
    Write,
)  # fmt: skip
from region.replication.wire import frames_from

log = logging.getLogger("felix.region.replication")

JOB_BYTES: Final = 64
"""What a job without frames counts as."""


@dataclass(slots=True, eq=False)
class AppendJob:
    """A leader's append: a batch with its final place still to be given, or a position where `batch` is None. `answer`: of the point
    behind it, once that is committed."""

    epoch: int
    batch: Batch | None
    slot: int
    annotation: bytes
    answer: asyncio.Future[LogPoint]

    @property
    def size(self) -> int:
        """Bytes, about."""
        return JOB_BYTES + len(self.annotation) + (self.batch.header.total_length if self.batch else 0)


@dataclass(frozen=True, slots=True)
class Replace:
    """Begin the log anew (COPY)."""

    beginning: Beginning


@dataclass(frozen=True, slots=True)
class TrimOwn:
    """A leader lets go of what stands before `point`."""

    point: LogPoint


Job = AppendJob | Truncate | Begin | Write | Sync | Keep | Trim | TrimOwn | Replace


@dataclass(frozen=True, slots=True)
class Appended:
    """A leader's appends are in the file. `jobs`: with the points behind each."""

    log: int
    prev: LogPoint
    frames: tuple[Frame, ...]
    jobs: tuple[tuple[AppendJob, LogPoint], ...]


@dataclass(frozen=True, slots=True)
class AppendRefused:
    """Nothing of these appends was written."""

    log: int
    jobs: tuple[AppendJob, ...]
    error: FelixError


@dataclass(frozen=True, slots=True)
class LogBegun:
    """The epoch's beginning stands in this log's history."""

    log: int
    epoch: int


Told = Appended | AppendRefused | LogBegun | Synced | Copied | CopyFailed | Trimmed | DiskFailed


class LogWorker:
    """Of one log. `put`, `drop_appends` and `halt` are called on the loop, `tell` is, too."""

    def __init__(
        self,
        disk: ReplicaDisk,
        pool: Executor,
        runtime: Runtime,
        seal: Callable[[Batch], Batch],
        tell: Callable[[Told], None],
    ) -> None:
        self.disk = disk
        self.failure = ""
        self.waiting_bytes = 0
        """Of what was put and not done; counted on the loop."""
        self._number = disk.plan.number
        self._pool = pool
        self._runtime = runtime
        self._seal = seal
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_ms = max(0, disk.log.last_time_ms)
        # Shared with the thread.
        self._lock = Lock()
        self._jobs: deque[Job] = deque()
        self._running = False
        self._halted = False

    # -- on the loop -----------------------------------------------------------------------------------

    def put(self, job: Job) -> None:
        """To be done behind what was put before."""
        with self._lock:
            if self._halted:
                if isinstance(job, AppendJob):
                    self._answer_halted(job)
                return
            self._jobs.append(job)
            self.waiting_bytes += _size(job)
            if self._running:
                return
            self._running = True
        self._idle.clear()
        self._pool.submit(self._run)

    def drop_appends(self) -> list[AppendJob]:
        """Take back the appends that no thread has begun with."""
        with self._lock:
            dropped = [job for job in self._jobs if isinstance(job, AppendJob)]
            if dropped:
                self._jobs = deque(job for job in self._jobs if not isinstance(job, AppendJob))
        self.waiting_bytes -= sum(job.size for job in dropped)
        return dropped

    def halt(self, why: str) -> None:
        """Do nothing more of what was put."""
        with self._lock:
            self._halted = True
            self.failure = self.failure or why
            jobs = list(self._jobs)
            self._jobs.clear()
        for job in jobs:
            if isinstance(job, AppendJob):
                self._answer_halted(job)

    async def idle(self) -> None:
        """Return once no thread is at it."""
        await self._idle.wait()

    def _answer_halted(self, job: AppendJob) -> None:
        if not job.answer.done():
            job.answer.set_exception(
                FelixError(f"The shard has stopped: {self.failure or 'its disk failed'}.")
            )

    # -- in a thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        group: list[Job] = []
        size = 0
        with self._lock:
            while self._jobs and not (group and size + _size(self._jobs[0]) > GROUP_BYTES_MAX):
                group.append(self._jobs.popleft())
                size += _size(group[-1])
        left: list[Job] = []
        try:
            left = self._perform(group)
        except CorruptionError as error:
            self._fail("corrupt", error.sentence)
        except (OSError, FelixError) as error:
            self._fail("failed", str(error))
        except Exception as error:
            log.exception("replicating log %s failed", self.disk.plan.folder)
            self._fail("failed", f"{type(error).__name__}: {error}")
        with self._lock:
            self._jobs.extendleft(reversed(left))
            more = bool(self._jobs) and not self._halted
            self._running = more
        self._soon(self._done, size - sum(map(_size, left)), not more)
        if more and left:
            # The disk is full: soon it may have room.
            self._soon(self._loop.call_later, FULL_RETRY_MS / 1_000, self._again)
        elif more:
            self._pool.submit(self._run)

    def _again(self) -> None:
        self._pool.submit(self._run)

    def _done(self, size: int, idle: bool) -> None:
        self.waiting_bytes -= size
        if idle and not self._running:
            self._idle.set()

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            # The loop is gone, and everybody that would hear of it.
            log.debug("nobody hears of log %s any more", self.disk.plan.folder)

    def _say(self, told: Told) -> None:
        self._soon(self._tell, told)

    def _fail(self, why: YieldReason, sentence: str) -> None:
        with self._lock:
            self._halted = True
            self.failure = sentence
            jobs = [job for job in self._jobs if isinstance(job, AppendJob)]
            self._jobs.clear()
        log.error("log %s stops (%s): %s", self.disk.plan.folder, why, sentence)
        for job in jobs:
            self._soon(self._answer_halted, job)
        self._say(DiskFailed(self._number, why))

    def _perform(self, group: list[Job]) -> list[Job]:
        """Do them in order; those that are left because the disk is full."""
        sync: Sync | None = None
        at = 0
        while at < len(group):
            job = group[at]
            if isinstance(job, Sync):
                # Later writes of the group share it.
                sync = job
                at += 1
                continue
            if isinstance(job, AppendJob):
                appends: list[AppendJob] = []
                while at < len(group) and isinstance(each := group[at], AppendJob):
                    appends.append(each)
                    at += 1
                self._append(appends)
                continue
            if isinstance(job, Write):
                try:
                    self._write(job)
                except OSError as error:
                    if not is_full(error):
                        raise
                    self._sync(sync)
                    return group[at:]
                at += 1
                continue
            if sync is not None:
                self._sync(sync)
                sync = None
            self._do(job)
            at += 1
        self._sync(sync)
        return []

    def _sync(self, sync: Sync | None) -> None:
        if sync is not None:
            self._say(Synced(self._number, self.disk.sync(), sync.cuts))

    def _write(self, write: Write) -> None:
        entries = []
        for frame in write.frames:
            assert isinstance(frame.body, LogFrame)
            entries.append(frame.body)
        self.disk.write(write.prev, entries, write.starts, now_ms=self._runtime.clock.now_ms())

    def _do(self, job: Truncate | Begin | Keep | Trim | TrimOwn | Replace) -> None:
        disk, now_ms = self.disk, self._runtime.clock.now_ms()
        match job:
            case Truncate():
                disk.cut(job.point)
            case Begin():
                disk.begin(job.start)
                self._say(LogBegun(self._number, job.start.epoch))
            case Keep():
                disk.keep(job.point)
            case Trim():
                disk.trim(job.point, now_ms=now_ms)
            case TrimOwn():
                start = disk.trim(job.point, now_ms=now_ms)
                self._say(Trimmed(self._number, start))
            case Replace():
                self._replace(job.beginning)

    def _replace(self, beginning: Beginning) -> None:
        try:
            self.disk = self.disk.begin_anew(beginning)
        except (CorruptionError, OSError) as error:
            if isinstance(error, OSError) and not is_full(error):
                raise
            log.warning("log %s cannot be begun anew: %s", self.disk.plan.folder, error)
            self._say(CopyFailed(self._number))
            return
        begun = self.disk.beginning()
        self._say(Copied(self._number, begun.start, begun.end, begun.history))

    def _append(self, jobs: list[AppendJob]) -> None:
        """Give batches their places, seal them, and write them as one group."""
        disk = self.disk
        prev = disk.log.end_point
        offset = prev.offset
        time_ms = max(self._last_ms, self._runtime.clock.now_ms())
        entries: list[LogFrame] = []
        try:
            for job in jobs:
                if job.batch is None:
                    entries.append(LogFrame(None, offset, job.epoch, job.slot, job.annotation))
                    continue
                header = job.batch.header._replace(
                    shard=disk.plan.identity.shard, base_offset=offset, leader_epoch=job.epoch, append_time_ms=time_ms
                )  # fmt: skip
                sealed = self._seal(Batch(header, job.batch.body))
                entries.append(LogFrame(sealed, offset, job.epoch, job.slot, job.annotation))
                offset = sealed.header.next_offset
        except FelixError as error:
            # The seal refused: nothing was written.
            self._say(AppendRefused(self._number, tuple(jobs), error))
            return
        try:
            disk.write(prev, entries, now_ms=time_ms)
        except OSError as error:
            if not is_full(error):
                raise
            self._say(AppendRefused(self._number, tuple(jobs), disk_full()))
            return
        self._last_ms = time_ms
        frames = frames_from(prev, entries)
        placed = tuple((job, frame.end) for job, frame in zip(jobs, frames, strict=True))
        self._say(Appended(self._number, prev, frames, placed))


def _size(job: Job) -> int:
    if isinstance(job, AppendJob):
        return job.size
    return sum(frame.size for frame in job.frames) if isinstance(job, Write) else JOB_BYTES
