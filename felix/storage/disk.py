"""The disk of this machine: one thin class over the operating system's calls, and the lock on a folder (flock)."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from felix.errors import Code, UnavailableError

LOCK_NAME: Final = "lock"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Random, new with each start of the machine; empty where the system has none (it is Linux's)."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class DiskFiles:
    """The real calls. Each raises OSError as the operating system gives it. `mode`: of files that it makes, `folder_mode`: of
    folders, both less the umask."""

    _mode, _folder_mode = 0o600, 0o700

    def __init__(self, mode: int = _mode, folder_mode: int = _folder_mode) -> None:
        self._mode, self._folder_mode = mode, folder_mode

    def open(self, path: Path, flags: int) -> int:
        # Not to wait for the other end of a pipe; of files it changes nothing.
        return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, self._mode)

    def close(self, descriptor: int) -> None:
        try:
            os.close(descriptor)
        except OSError as error:
            # Else the number is another file's by now, or will be.
            if error.errno == errno.EBADF:
                raise

    def pwritev(self, descriptor: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
        return os.pwritev(descriptor, buffers, position)

    def pread(self, descriptor: int, length: int, position: int) -> bytes:
        return os.pread(descriptor, length, position)

    def truncate(self, descriptor: int, length: int) -> None:
        os.ftruncate(descriptor, length)

    def size(self, descriptor: int) -> int:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a file")
        return found.st_size

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def names(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are what is wanted

    def exists(self, path: Path) -> bool:
        return path.exists()

    def is_folder(self, path: Path) -> bool:
        return path.is_dir()

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(self._folder_mode, parents=True, exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> None:
        if folder.exists():
            shutil.rmtree(folder)

    def free_bytes(self, folder: Path) -> int:
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    def lock(self, folder: Path) -> FileLock:
        return FileLock(folder)


class HeldError(Exception):
    """Another process has the lock; `holder`: its number, as far as it could be written."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


def lock_file(path: Path) -> int:
    """Make the file where there is none, and lock it for this process: a descriptor, which has the lock until it is closed. Raises HeldError, OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise HeldError(holder) from error
    # It is for people: on a full disk the file is locked without it.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def is_elsewhere(path: Path, descriptor: int) -> bool:
    """Whether another file than the open one is at its path, or none: its folder was moved or unmounted, or another one mounted over it. Raises OSError."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return True
    return not os.path.samestat(there, os.fstat(descriptor))


class FileLock:
    """A folder's lock, held from construction to `release` (or the process's end). Raises UnavailableError where another holds it.

    It goes with the process: it needs no cleaning up after a crash. The file names the holder for people.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK_NAME
        try:
            self._descriptor: int | None = lock_file(self._path)
        except HeldError as error:
            raise UnavailableError(
                f"The folder {folder} is in use by another process, pid {error.holder}.",
                code=Code.CONFLICT,
                hint="Stop that one first, or give this one another folder.",
            ) from error

    @property
    def identity(self) -> str:
        """Of the locked file: see `FolderLock`. A copy of the folder has another one, also on the same machine; so has
        the same volume on another machine."""
        assert self._descriptor is not None
        status = os.fstat(self._descriptor)
        boot = boot_id()
        return f"{boot}:{status.st_dev}:{status.st_ino}" if boot else ""

    def is_elsewhere(self) -> bool:
        """See `FolderLock`."""
        # Another thread may let go of it.
        descriptor = self._descriptor
        return descriptor is not None and is_elsewhere(self._path, descriptor)

    def release(self) -> None:
        """Let go. The file stays: removing it would let two processes hold two files of one name."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


PRIVATE_FILES: Final = DiskFiles()
SHARED_FILES: Final = DiskFiles(0o666, 0o777)
"""For what others may read as the umask says: an audit log."""
