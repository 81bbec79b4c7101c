"""The two files that a log is written to: its last segment, and its mark. Blocking: threads only, one at a time.

Invariants: after a sync that failed, or a write that left a file in an unknown state, nothing is written or synced any more, whoever
asks; what a full disk took a part of is cut off again before anything else is written, and is gone from the disk with the next sync.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from felix.storage.port import Files, is_exhausted, is_full, write_all
from felix.storage.small_file import create_durably
from region.log.durable_mark import MARK_NAME, Mark
from region.log.errors import StorageFailedError, too_many_files


class WrittenFiles:
    """Of one log. Descriptors are -1 while nobody writes (region.log.open_logs)."""

    def __init__(self, files: Files, folder: Path) -> None:
        self._files = files
        self._folder = folder
        self.synced_to = 0
        """Position in the segment below which everything is on the disk."""
        self._segment = -1
        self._mark = -1
        self._cut_unsynced = False
        """What a full disk took a part of was cut off again, and the next sync brings that to the disk: a closed segment has
        nothing behind its last entry."""
        self._mark_unsynced = False
        self._failure: StorageFailedError | None = None

    @property
    def _mark_path(self) -> Path:
        # Not kept: a path takes 0.4 KiB, and an idle log needs none.
        return self._folder / MARK_NAME

    def require_sound(self) -> None:
        """Raises StorageFailedError where something failed before."""
        if self._failure:
            raise self._failure

    @contextmanager
    def fatal(self, what: str, path: Path | None = None) -> Iterator[None]:
        """An OSError in here ends the log: no later write or sync is tried, whoever asks. `path`: of what; None: the mark."""
        self.require_sound()
        try:
            yield
        except OSError as error:
            self._failure = StorageFailedError(
                f"{what} failed in {path or self._mark_path}: {error.strerror or error}. The shard stops; nothing that waited for "
                "this was acknowledged."
            )
            raise self._failure from error

    def open(self, segment: Path) -> None:
        """Open what is not. Raises UnavailableError where the process has too many files open: nothing was written."""
        try:
            if self._segment < 0:
                self._segment = self._files.open(segment, os.O_RDWR)
            if self._mark < 0:
                self._mark = self._files.open(self._mark_path, os.O_RDWR)
        except OSError as error:
            if not is_exhausted(error):
                raise
            raise too_many_files(error, self._folder) from error

    def append(self, segment: Path, buffers: Sequence[bytes | memoryview], end: int) -> int:
        """Write behind position `end` of the segment; where it ends then. Raises OSError for want of room, with the segment as it was,
        StorageFailedError otherwise.
        """
        try:
            return write_all(self._files, self._segment, buffers, end)
        except OSError as error:
            with self.fatal("Writing", segment):
                if not is_full(error):
                    raise
                self._files.truncate(self._segment, end)
                self._cut_unsynced = True
            raise

    def sync(self, segment: Path, end: int) -> bool:
        """Bring what is below position `end` of the segment to the disk; whether there was anything. Raises StorageFailedError."""
        if end <= self.synced_to and not self._cut_unsynced:
            return False
        with self.fatal("A sync", segment):
            self._files.sync(self._segment)
        self._cut_unsynced = False
        self.synced_to = end
        return True

    def begin(self, descriptor: int, end: int) -> None:
        """From now on the segment behind `descriptor` is written to, whose `end` bytes are on the disk."""
        if self._segment >= 0:
            self._files.close(self._segment)
        self._segment, self.synced_to = descriptor, end

    def cut(self, segment: Path, end: int) -> None:
        """Go on in this segment, cut at position `end`, durably."""
        self.begin(self._files.open(segment, os.O_RDWR), end)
        self._files.truncate(self._segment, end)
        self._files.sync(self._segment)

    def create_mark(self, mark: Mark) -> None:
        """The first mark of a log, durable on return."""
        self._mark = create_durably(self._files, self._mark_path, (mark.encode(),))

    def write_mark(self, mark: Mark) -> None:
        """Write the mark; it is on the disk with `sync_mark`. Raises StorageFailedError."""
        with self.fatal("Writing"):
            self._mark_unsynced = True
            write_all(self._files, self._mark, (mark.encode(),), 0)

    def sync_mark(self) -> None:
        """Bring the mark itself to the disk. Raises StorageFailedError."""
        if self._mark_unsynced:
            with self.fatal("A sync"):
                self._files.sync(self._mark)
            self._mark_unsynced = False

    def close(self) -> None:
        """Close both, and promise nothing."""
        for descriptor in (self._segment, self._mark):
            if descriptor >= 0:
                self._files.close(descriptor)
        self._segment = self._mark = -1
