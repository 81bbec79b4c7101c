"""Carries out on commit threads what a replica's core asks of one of its logs, in the order in which it was asked.

Jobs are done by one thread of a shared pool at a time, a group at a time: all writes of a group share one sync. What came of them is told
on the loop, in order. A log that is led here is written by its leader, whose work comes by `executor` and takes its turn like all else.

Invariants:
- after a failure nothing is done any more: what was not told never happened, as far as the core knows;
- a full disk fails nothing: what finds no room is tried again, in its turn, while the leader's window bounds what waits for it. A commit
  point waits beside the others, as an old one is only lower, and is let go of where the log is cut or begun anew;
- what `executor` was given is done, or its future says why not.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Final, TypeVar

from felix.errors import CorruptionError, FelixError
from felix.lazy_event import LazyEvent
from felix.runtime.port import Runtime
from felix.storage.port import is_exhausted, is_full
from region.cluster.records import YieldReason
from region.log.errors import FULL_RETRY_MS, StorageFailedError, TooManyFilesError
from region.log.frame import Frame as LogFrame
from region.log.group_commit import GROUP_BYTES_MAX
from region.replication.copying import Collect, Piece, Replace
from region.replication.disk import ReplicaDisk
from region.replication.ready import (
    Begin,
    Copied,
    CopyFailed,
    DiskFailed,
    Keep,
    Sync,
    Synced,
    Trim,
    Truncate,
    Write,
)  # fmt: skip

log = logging.getLogger("felix.region.replication")

JOB_BYTES: Final = 64
"""What a job without frames counts as."""

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Call:
    """Work of whoever leads the log."""

    work: Callable[[], object]
    done: Future[object]

    def perform(self) -> None:
        """In a thread."""
        try:
            result = self.work()
        except BaseException as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


@dataclass(frozen=True, slots=True)
class _KeepAgain:
    """There was no room for it."""

    keep: Keep


Job = Call | Truncate | Begin | Write | Sync | Keep | _KeepAgain | Trim | Replace | Collect | Piece


@dataclass(frozen=True, slots=True)
class Collected:
    """This is done: what comes next of the copy may be asked for."""

    log: int
    job: Collect | Piece


@dataclass(frozen=True, slots=True)
class LogBegun:
    """The epoch's beginning stands in this log's history."""

    log: int
    epoch: int


@dataclass(frozen=True, slots=True)
class DiskFull:
    """What is to be written to this log waits for room."""

    log: int


Told = DiskFull | LogBegun | Collected | Synced | Copied | CopyFailed | DiskFailed


class LogWorker:
    """Of one log. `put` and `halt` are called on the loop, `tell` is, too."""

    def __init__(
        self,
        disk: ReplicaDisk,
        pool: Executor,
        runtime: Runtime,
        tell: Callable[[Told], None],
    ) -> None:
        self.disk = disk
        self.failure = ""
        self.is_disk_error = False
        """whether it failed by an error of its disk, which may pass; false where it is damaged, or by a mistake of ours"""
        self.full = ""
        """why what is to be written waits: the disk has no room; empty while it has"""
        self.executor: Executor = _Executor(self)
        """Does what whoever leads the log wants done to it, behind what was put before. Its threads may use it, too."""
        self.waiting_bytes = 0
        """Of what was put and not done; counted on the loop."""
        self._number = disk.plan.number
        self._pool = pool
        self._runtime = runtime
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._idle = LazyEvent(is_set=True)
        # In a thread.
        self._waiting: Job | None = None
        self._unkept: Keep | None = None
        self._asked_s = math.inf
        """when the oldest of what is not done was put, or the last group before it was done"""
        # Shared with the thread.
        self._lock = Lock()
        self._jobs: list[Job] = []
        self._running = False
        self._halted = False

    # -- on the loop -----------------------------------------------------------------------------------

    def put(self, job: Job) -> None:
        """To be done behind what was put before."""
        with self._lock:
            if self._halted:
                if isinstance(job, Call):
                    self._refuse(job)
                return
            self._jobs.append(job)
            self.waiting_bytes += _size(job)
            if self._running:
                return
            self._running = True
            self._idle.clear()
            self._asked_s = self._runtime.clock.monotonic()
        self._pool.submit(self._run)

    def halt(self, why: str, *, is_disk_error: bool = False) -> None:
        """Do nothing more of what was put. `is_disk_error`: as the attribute."""
        with self._lock:
            self._halted = True
            if not self.failure:
                self.failure, self.is_disk_error = why, is_disk_error
            jobs = list(self._jobs)
            self._jobs.clear()
        self._refuse_calls(jobs)

    @property
    def unanswered_s(self) -> float:
        """For how long the disk has not answered what it was asked; 0 while nothing waits for it. What waits for room is asked again and again."""
        return max(0.0, self._runtime.clock.monotonic() - self._asked_s)

    async def idle(self) -> None:
        """Return once no thread is at it."""
        await self._idle.wait()

    def _refuse_calls(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if isinstance(job, Call):
                self._refuse(job)

    def _refuse(self, call: Call) -> None:
        if not call.done.done():
            call.done.set_exception(FelixError(f"The log has stopped: {self.failure or 'its disk failed'}."))

    # -- in a thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        group: list[Job] = []
        size = 0
        with self._lock:
            for job in self._jobs:
                if group and size + _size(job) > GROUP_BYTES_MAX:
                    break
                group.append(job)
                size += _size(job)
            del self._jobs[: len(group)]
        left: list[Job] = []
        try:
            left = self._perform(group)
        except CorruptionError as error:
            self._fail("corrupt", error.sentence, group)
        except (OSError, FelixError) as error:
            self._fail(
                "failed", str(error), group, is_disk_error=isinstance(error, OSError | StorageFailedError)
            )
        except Exception as error:
            log.exception("replicating log %s failed", self.disk.plan.folder)
            self._fail("failed", f"{type(error).__name__}: {error}", group)
        with self._lock:
            self._jobs[:0] = left
            more = bool(self._jobs) and not self._halted
            self._running = more
            self._asked_s = self._runtime.clock.monotonic() if more else math.inf
        self._soon(self._done, size - sum(map(_size, left)), not more)
        if more and left:
            # The disk is full, or too many files are open: soon it may be otherwise.
            self._soon(self._loop.call_later, FULL_RETRY_MS / 1_000, self._again)
        elif more:
            self._pool.submit(self._run)

    def _again(self) -> None:
        self._pool.submit(self._run)

    def _done(self, size: int, idle: bool) -> None:
        with self._lock:
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

    def _fail(
        self, why: YieldReason, sentence: str, group: Sequence[Job], *, is_disk_error: bool = False
    ) -> None:
        with self._lock:
            self._halted = True
            self.failure, self.is_disk_error = sentence, is_disk_error
            jobs = [*group, *self._jobs]
            self._jobs.clear()
        log.error("log %s stops (%s): %s", self.disk.plan.folder, why, sentence)
        self._refuse_calls(jobs)
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
            if not isinstance(job, Write) and sync is not None:
                self._sync(sync)
                sync = None
            try:
                self._do(job)
            except OSError as error:
                if is_full(error):
                    self._note_full(error)
                    self._waiting = job
                elif not self._passes(job, error):
                    raise
                self._sync(sync)
                return group[at:]
            except TooManyFilesError as error:
                if not self._passes(job, error):
                    raise
                self._sync(sync)
                return group[at:]
            if isinstance(job, Write) or job is self._waiting:
                self.full, self._waiting = "", None
            at += 1
        self._sync(sync)
        return []

    def _passes(self, job: Job, error: OSError | TooManyFilesError) -> bool:
        """Whether the process had too many files open for it, so that nothing of it was done, and it is tried again."""
        if not isinstance(job, Write | Begin) or (isinstance(error, OSError) and not is_exhausted(error)):
            return False
        log.warning("log %s waits: %s", self.disk.plan.folder, error)
        return True

    def _sync(self, sync: Sync | None) -> None:
        if sync is not None:
            self._say(Synced(self._number, self.disk.sync(), sync.cuts))

    def _note_full(self, error: CorruptionError | OSError) -> None:
        if isinstance(error, OSError) and not self.full:
            self.full = str(error)
            self._say(DiskFull(self._number))

    def _write(self, write: Write) -> None:
        entries = []
        for frame in write.frames:
            assert isinstance(frame.body, LogFrame)
            entries.append(frame.body)
        self.disk.write(write.prev, entries, write.starts, now_ms=self._runtime.clock.now_ms())

    def _keep(self, keep: Keep) -> None:
        self._unkept = None
        try:
            self.disk.keep(keep.point)
        except OSError as error:
            if is_full(error):
                self._note_full(error)
            elif not is_exhausted(error):
                raise
            self._unkept = keep
            self._soon(self._loop.call_later, FULL_RETRY_MS / 1_000, self.put, _KeepAgain(keep))
        else:
            self.full = ""

    def _do(
        self, job: Call | Write | Truncate | Begin | Keep | _KeepAgain | Trim | Replace | Collect | Piece
    ) -> None:
        disk, now_ms = self.disk, self._runtime.clock.now_ms()
        match job:
            case Write():
                self._write(job)
            case Call():
                job.perform()
            case Truncate():
                self._unkept = None
                disk.cut(job.point)
            case Begin():
                disk.begin(job.start)
                self._say(LogBegun(self._number, job.start.epoch))
            case Keep():
                self._keep(job)
            case _KeepAgain():
                if self._unkept is job.keep:
                    self._keep(job.keep)
            case Trim():
                disk.trim(job.point, now_ms=now_ms)
            case Replace():
                self._replace(job)
            case Collect() | Piece():
                self._collect(job)

    def _collect(self, job: Collect | Piece) -> None:
        try:
            if isinstance(job, Piece):
                self.disk.take_piece(job.closed, job.position, job.data)
            else:
                self.disk.collect()
        except OSError as error:
            if not is_full(error):
                raise
            log.warning("log %s cannot be begun anew: %s", self.disk.plan.folder, error)
            self._note_full(error)
            self._say(CopyFailed(self._number))
            return
        self.full = ""
        self._say(Collected(self._number, job))

    def _replace(self, job: Replace) -> None:
        self._unkept = None
        try:
            self.disk = self.disk.begin_anew(job.beginning, job.listed)
        except (CorruptionError, OSError) as error:
            if isinstance(error, OSError) and not is_full(error):
                raise
            log.warning("log %s cannot be begun anew: %s", self.disk.plan.folder, error)
            self._note_full(error)
            self._say(CopyFailed(self._number))
            return
        self.full = ""
        begun = self.disk.beginning()
        # What stands in a store is committed.
        commit = begun.end if job.listed else begun.start
        self._say(Copied(self._number, begun.start, begun.end, begun.history, commit))


class _Executor(Executor):
    """A worker, as those see it who bring it work."""

    def __init__(self, worker: LogWorker) -> None:
        self._worker = worker

    def submit(self, work: Callable[..., _T], /, *arguments: object, **named: object) -> Future[_T]:
        done: Future[Any] = Future()
        # From now on it cannot be cancelled: what was asked of the disk is done.
        done.set_running_or_notify_cancel()
        self._worker.put(Call(partial(work, *arguments, **named), done))
        return done


def _size(job: Job) -> int:
    if isinstance(job, Piece):
        return JOB_BYTES + len(job.data)
    return sum(frame.size for frame in job.frames) if isinstance(job, Write) else JOB_BYTES
