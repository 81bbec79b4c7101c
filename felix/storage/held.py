"""Files of folders that a process has to itself: what goes by a path goes to the folder that was locked, or nowhere.

A folder may be moved, unmounted, or have another one mounted over it while a process has it open. Whoever then makes, renames, removes or reads by a path would do so in whatever is
there. Invariant: below the held folders each such call raises OSError (ESTALE) where the locked folder is not at its path, before the call; one that makes or renames also where it is not
there afterwards, so that nobody believes what stands in another folder. What is done by descriptor goes on where it was opened. Blocking. Caller: region.log.directory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from felix.storage.port import Files, FolderLock


class HeldFiles:
    """`felix.storage.port.Files`."""

    def __init__(self, files: Files, lock: FolderLock, *folders: Path) -> None:
        """`folders`: that one, and others that come and go with it."""
        self._files, self._lock, self._folders = files, lock, folders

    def _require_there(self, path: Path) -> None:
        if any(path.is_relative_to(folder) for folder in self._folders) and self._lock.is_elsewhere():
            raise OSError(
                errno.ESTALE,
                "The folder is not the one that was opened: that was moved or unmounted, or another one mounted over it. Put it back, or start again with what is there",
                str(path),
            )

    def open(self, path: Path, flags: int) -> int:
        self._require_there(path)
        descriptor = self._files.open(path, flags)
        if flags & os.O_CREAT:
            try:
                self._require_there(path)
            except OSError:
                self._files.close(descriptor)
                raise
        return descriptor

    def close(self, descriptor: int) -> None:
        self._files.close(descriptor)

    def pwritev(self, descriptor: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
        return self._files.pwritev(descriptor, buffers, position)

    def pread(self, descriptor: int, length: int, position: int) -> bytes:
        return self._files.pread(descriptor, length, position)

    def truncate(self, descriptor: int, length: int) -> None:
        self._files.truncate(descriptor, length)

    def size(self, descriptor: int) -> int:
        return self._files.size(descriptor)

    def sync(self, descriptor: int) -> None:
        self._files.sync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        self._require_there(folder)
        self._files.sync_folder(folder)
        self._require_there(folder)

    def names(self, folder: Path) -> list[str]:
        self._require_there(folder)
        return self._files.names(folder)

    def exists(self, path: Path) -> bool:
        return self._files.exists(path)

    def is_folder(self, path: Path) -> bool:
        return self._files.is_folder(path)

    def make_folder(self, folder: Path) -> None:
        self._require_there(folder)
        self._files.make_folder(folder)
        self._require_there(folder)

    def rename(self, source: Path, target: Path) -> None:
        self._require_there(target)
        self._files.rename(source, target)
        self._require_there(target)

    def remove(self, path: Path) -> None:
        self._require_there(path)
        self._files.remove(path)

    def remove_folder(self, folder: Path) -> None:
        self._require_there(folder)
        self._files.remove_folder(folder)

    def free_bytes(self, folder: Path) -> int:
        return self._files.free_bytes(folder)

    def lock(self, folder: Path) -> FolderLock:
        return self._files.lock(folder)
