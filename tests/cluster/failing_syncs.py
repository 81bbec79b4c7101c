"""`felix` on a disk that fails a sync when it is told to, and says nothing more of that file: for tests.

As on Linux, where a sync that failed has dropped what it should have written, a later one of the same file succeeds and does nothing. So
what is counted as synced on the strength of one is gone with the power.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cli.main import main

TOLD_BY: Final = "TESTS_FAILING_SYNCS"
"""A file: while it is there, the next sync of a path that has its text in it fails, and the file goes."""


class Syncs:
    """Of this process."""

    def __init__(self, told_by: Path) -> None:
        self._told_by = told_by
        self._failed: set[tuple[int, int]] = set()

    def failing(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def synced(file: int) -> None:
            status = os.fstat(file)
            inode = (status.st_dev, status.st_ino)
            if inode in self._failed:
                return
            if self._fails(file):
                self._failed.add(inode)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(file)

        return synced

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


if __name__ == "__main__":
    syncs = Syncs(Path(os.environ[TOLD_BY]))
    os.fsync, os.fdatasync = syncs.failing(os.fsync), syncs.failing(os.fdatasync)  # type: ignore[assignment]
    main()
