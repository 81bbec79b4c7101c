"""Which logs have files open for writing: the most recently written ones, and no more of them than a bound.

A log opens its last segment and its mark when it is written to. Where that makes too many, the log that was written to longest ago brings
what it has to the disk and closes its own, until its next write: a shard that nobody writes to holds no file. So the number of shards
is not bound by the number of files that a process may open.

Invariants: a log that is being written to keeps its files; a file is closed only when all that is in it is on the disk, so that no
failure of the disk is lost with it. Any thread may call; the lock here is never held while a log's is taken.
"""

from __future__ import annotations

import resource
from threading import Lock
from typing import Final, Protocol

FILES_PER_LOG: Final = 2
"""The last segment, and the mark."""
OPEN_LOGS_MAX: Final = 1_024
"""Written to at one time; the next one costs a sync and two openings more."""
OTHER_FILES: Final = 256
"""Of what a process may have open: sockets, the audit log, the metadata store, reads, uploads."""


class OpenLog(Protocol):
    """A log, as it is seen here."""

    def release_files(self) -> bool:
        """Close what is open for writing, on the disk; False where somebody is writing, or the disk does not take it."""


class OpenLogs:
    """See the module. One per process, as a rule: it is the process whose files are counted."""

    def __init__(self, logs_max: int = OPEN_LOGS_MAX) -> None:
        assert logs_max > 0
        self.logs_max = logs_max
        self._lock = Lock()
        # In order of the last write, oldest first.
        self._logs: dict[OpenLog, None] = {}

    def __len__(self) -> int:
        return len(self._logs)

    def used(self, log: OpenLog) -> None:
        """`log` is about to be written to, its own lock held. Those that are too many close their files."""
        with self._lock:
            self._logs.pop(log, None)
            self._logs[log] = None
            count = len(self._logs) - self.logs_max
            victims = [each for each, _ in zip(self._logs, range(count), strict=False)]
            for each in victims:
                del self._logs[each]
        for each in victims:
            if not each.release_files():
                with self._lock:
                    self._logs[each] = None

    def closed(self, log: OpenLog) -> None:
        """`log` has no files open any more."""
        with self._lock:
            self._logs.pop(log, None)


def raise_files_limit() -> int:
    """Let this process open as many files as the system lets it (the soft limit of a shell is 1,024 as a rule); how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            # Some systems call the hard limit unlimited, and let nobody have it.
            return soft
    return hard if hard != resource.RLIM_INFINITY else OPEN_LOGS_MAX * FILES_PER_LOG + OTHER_FILES


def relays_max_of(wanted: int, files_max: int) -> int:
    """How many relays, of which each is a socket, a process may have that may open `files_max`: `wanted`, and half of what all else leaves at most,
    so that logs can be written."""
    return min(wanted, max(0, files_max - OTHER_FILES) // 2)


def logs_max_of(files_max: int) -> int:
    """How many logs may have files open in a process that may open `files_max`."""
    return max(1, min(OPEN_LOGS_MAX, (files_max - OTHER_FILES) // FILES_PER_LOG))
