"""A process on a disk that fails a sync when it is told to, and says nothing more of that file (cluster.played_broker).

As on Linux, where a sync that failed has dropped what it should have written, a later one of the same file succeeds and brings none of that to the disk,
before it was written again. Here such a sync does nothing at all. So what is counted as synced on the strength of one is gone with the power. Of a
folder a later sync is one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Final

TOLD_BY: Final = "TESTS_FAILING_SYNCS"
"""A file: while it is there, the next sync of a path that has its text in it fails, and the file goes."""

Inode = tuple[int, int]
Range = tuple[int, int]


class Syncs:
    """Of this process."""

    def __init__(self, told_by: Path) -> None:
        self._told_by = told_by
        self._lock = Lock()
        self._written: dict[Inode, list[Range]] = defaultdict(list)
        """what was written of each file since it was synced"""
        self._dropped: dict[Inode, list[Range]] = {}
        """what a sync that failed dropped, and nobody wrote again"""

    def failing(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def synced(file: int) -> None:
            status = os.fstat(file)
            inode = (status.st_dev, status.st_ino)
            fails = self._fails(file)
            with self._lock:
                written = self._written.pop(inode, [])
                if fails and not stat.S_ISDIR(status.st_mode):
                    self._dropped[inode] = [*self._dropped.get(inode, []), *written]
                elif self._dropped.get(inode):
                    # It would bring what was dropped to the disk as well.
                    self._written[inode] = written
                    return
            if fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(file)

        return synced

    def pwritev(self, file: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
        size = _pwritev(file, buffers, position)
        self._note(file, (position, position + size))
        return size

    def pwrite(self, file: int, data: bytes | memoryview, position: int) -> int:
        size = _pwrite(file, data, position)
        self._note(file, (position, position + size))
        return size

    def ftruncate(self, file: int, size: int) -> None:
        _ftruncate(file, size)
        self._note(file, None, size)

    def _note(self, file: int, written: Range | None, end: int | None = None) -> None:
        status = os.fstat(file)
        inode = (status.st_dev, status.st_ino)
        with self._lock:
            if written is not None:
                self._written[inode].append(written)
            gone = written if written is not None else (end or 0, 1 << 62)
            if inode in self._dropped:
                self._dropped[inode] = without(self._dropped[inode], gone)

    def _fails(self, file: int) -> bool:
        try:
            wanted = self._told_by.read_text()
            if wanted not in os.readlink(f"/proc/self/fd/{file}"):
                return False
            # Of several threads one has it.
            self._told_by.unlink()
        except FileNotFoundError:
            return False
        return True


def without(ranges: Sequence[Range], gone: Range) -> list[Range]:
    """What is left of `ranges`."""
    begin, end = gone
    parts = [part for one in ranges for part in ((one[0], min(one[1], begin)), (max(one[0], end), one[1]))]
    return [part for part in parts if part[0] < part[1]]


_pwritev, _pwrite, _ftruncate = os.pwritev, os.pwrite, os.ftruncate


def install(syncs: Syncs) -> None:
    """This process's own go by it from now on."""
    os.fsync, os.fdatasync = syncs.failing(os.fsync), syncs.failing(os.fdatasync)  # type: ignore[assignment]
    os.pwritev, os.pwrite, os.ftruncate = syncs.pwritev, syncs.pwrite, syncs.ftruncate  # type: ignore[assignment]
