"""A log's folder: read by path, write whole files atomically and durably.

Invariants: a file is either whole or not there (written beside, synced, renamed); after `flush` returned, every
`write` before it survives a power failure, names included; what failed for want of room (`is_full`) has left nothing, and may be tried
again. A failed sync raises OSError and is never retried: the caller stops. A log that is open (`lock`) is written in the folder that was locked, or not at all. Blocking: never call from an event loop. Callers: audit.trail, audit.witness, cli.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from audit.file_size import file_bytes_max, too_long
from felix.errors import Code, RequestError, TamperError, UnavailableError
from felix.storage.disk import SHARED_FILES
from felix.storage.port import Files, FolderLock, write_all
from felix.storage.small_file import read_file

_TEMPORARY: Final = ".new"
_NO_FILE: Final = frozenset((errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO))
"""What opening or measuring a folder, a pipe, a device, a socket or links in a circle ends with."""


class Folder:
    """`audit.tile.Files` in a folder, and writing. Paths are relative, with / between the parts."""

    def __init__(self, path: Path, files: Files = SHARED_FILES) -> None:
        """`files`: the storage that the folder is in."""
        self.path = path
        self.storage = files
        self._lock: FolderLock | None = None
        self._dirty: set[Path] = set()
        self._made: set[Path] = set()

    def beside(self) -> Folder:
        """The same folder, for another thread: what it writes it flushes itself."""
        other = Folder(self.path, self.storage)
        other._lock = self._lock
        return other

    def lock(self, hint: str = "") -> FolderLock:
        """Have the log to oneself. Raises RequestError(CONFLICT), with this hint, where another process has it open."""
        try:
            self._lock = self.storage.lock(self.path)
            return self._lock
        except UnavailableError as error:
            raise RequestError(
                f"The audit log {self.path} is open in another process.", code=Code.CONFLICT, hint=hint
            ) from error

    def require_there(self) -> None:
        """Raises OSError (ESTALE) where this folder was locked, and is not at its path any more: what is written by path would be in another one."""
        if self._lock is not None and self._lock.is_elsewhere():
            raise OSError(
                errno.ESTALE,
                "It is not the folder that was opened: that was moved or unmounted, or another one mounted over it. Put it back, or start again with what is there",
                str(self.path),
            )

    def read(self, path: str) -> bytes | None:
        """The file's bytes, None where there is none. Raises TamperError of a longer one than any of its kind, and of what is no file."""
        bytes_max = file_bytes_max(path)
        try:
            return read_file(self.storage, self.path / path, bytes_max)
        except NotADirectoryError:
            return None
        except OSError as error:
            if error.errno == errno.EFBIG and bytes_max is not None:
                raise too_long(path, bytes_max) from error
            if error.errno in _NO_FILE:
                raise TamperError(f"What is at {path} is not a file.") from error
            raise

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty where there is none. Files being written are left out."""
        try:
            names = self.storage.names(self.path / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [name for name in names if not name.endswith(_TEMPORARY)]

    def write(self, path: str, data: bytes) -> None:
        """Replace the file. Its bytes are durable on return; its name is after `flush`. Raises OSError, and leaves the old one."""
        target, storage = self.path / path, self.storage
        self.require_there()
        self._make(target.parent)
        beside = target.with_name(target.name + _TEMPORARY)
        descriptor = storage.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(storage, descriptor, (data,), 0)
            storage.sync(descriptor)
        except OSError:
            # What there was room for would keep it from others.
            with suppress(OSError):
                storage.remove(beside)
            raise
        finally:
            storage.close(descriptor)
        storage.rename(beside, target)
        self.require_there()
        self._dirty.add(target.parent)

    def append(self, path: str, data: bytes) -> None:
        """Add to the end of a file, all or nothing. Not durable: for what is derived from other files."""
        self.require_there()
        descriptor = self.storage.open(self.path / path, os.O_WRONLY | os.O_CREAT)
        try:
            end = self.storage.size(descriptor)
            try:
                write_all(self.storage, descriptor, (data,), end)
            except OSError:
                self.storage.truncate(descriptor, end)
                raise
        finally:
            self.storage.close(descriptor)

    def flush(self) -> None:
        """Make the names of all files written so far durable."""
        for folder in sorted(self._dirty, key=lambda path: -len(path.parts)):
            try:
                self.storage.sync_folder(folder)
            except OSError as error:
                # Also for want of room: nobody may try it again and believe it.
                raise OSError(
                    errno.EIO, f"The names in it could not be synced: {error}", str(folder)
                ) from error
        self._dirty.clear()

    def remove(self, path: str) -> None:
        """Remove a file if it is there; not durable by itself (a file that comes back must do no harm)."""
        self.require_there()
        self.storage.remove(self.path / path)

    def remove_folder(self, folder: str) -> None:
        """Remove an empty folder if it is there."""
        path = self.path / folder
        self._dirty.discard(path)
        self._made.discard(path)
        try:
            if self.storage.names(path):
                return
            self.storage.remove_folder(path)
        except OSError:
            return
        self._dirty.add(path.parent)

    def _make(self, folder: Path) -> None:
        if folder in self._made:
            return
        if folder != self.path:
            self._make(folder.parent)
        self.storage.make_folder(folder)
        self._made.add(folder)
        # Also where it was there: whoever made it may have ended before its name was durable.
        self._dirty.add(folder.parent)
