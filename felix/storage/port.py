"""The port of storage: files and folders as the log uses them.

Everything takes a position (`pread`, `pwritev`): no call depends on a shared file position, so threads may read while one
writes. Durability is explicit: `sync` for a file's bytes, `sync_folder` for the names in a folder; whatever was not synced
may be gone after a loss of power, in any part. Calls block.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

BUFFERS_PER_WRITE_MAX: Final = 1_000
"""Under IOV_MAX, which is 1,024 on Linux."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE})
_FAILED: Final = frozenset({errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.EUCLEAN})


def is_full(error: OSError) -> bool:
    """True where a write failed for want of room (device, quota or file-size limit) and nothing else is wrong."""
    return error.errno in _FULL


def is_exhausted(error: OSError) -> bool:
    """True where a file could not be opened because the process, or the machine, has too many open: nothing was done, and it passes."""
    return error.errno in _EXHAUSTED


def lacks_resources(error: OSError) -> bool:
    """True where room or descriptors are lacking: nothing else is wrong, and what waits for them goes on once there are some."""
    return is_full(error) or is_exhausted(error)


def has_failed(error: OSError) -> bool:
    """True where the disk did not do what it was asked to, or is read-only or gone: nothing is wrong with what was asked."""
    return error.errno in _FAILED


class FolderLock(Protocol):
    """A folder that one process has to itself."""

    @property
    def identity(self) -> str:
        """Until this machine restarts, only one process can hold the lock of this identity. Empty if the system does not report
        its boot.
        """

    def is_elsewhere(self) -> bool:
        """Whether the folder that is locked is not at its path any more: it was moved or unmounted, or another one mounted over it, and what is written by its path goes
        there. False once it was let go of."""

    def release(self) -> None:
        """Let go; the end of the process does the same."""


class Files(Protocol):
    """One process's view of its disk. Each call raises OSError as an operating system does."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor. `flags`: of `os.O_RDONLY`, `O_WRONLY`, `O_RDWR`, `O_CREAT`, `O_EXCL`, `O_TRUNC`. Never waits, as for whoever
        would write into a pipe."""

    def close(self, descriptor: int) -> None:
        """Let go of it, which no error of the disk prevents: none is raised. What was to last was synced before."""

    def pwritev(self, descriptor: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
        """How many bytes were written; fewer than given where there is no room for more."""

    def pread(self, descriptor: int, length: int, position: int) -> bytes: ...

    def truncate(self, descriptor: int, length: int) -> None: ...

    def size(self, descriptor: int) -> int:
        """Raises OSError (EINVAL) of what is no file: a folder, a pipe, a device."""

    def sync(self, descriptor: int) -> None:
        """The bytes of the file, and its length, are durable. After an OSError they never will be by another `sync`."""

    def sync_folder(self, folder: Path) -> None:
        """The names in the folder are durable."""

    def names(self, folder: Path) -> list[str]:
        """What is in a folder, in order. Raises FileNotFoundError."""

    def exists(self, path: Path) -> bool: ...

    def is_folder(self, path: Path) -> bool: ...

    def make_folder(self, folder: Path) -> None:
        """With those above it; nothing where it exists."""

    def rename(self, source: Path, target: Path) -> None:
        """In one step, in place of a file that is there."""

    def remove(self, path: Path) -> None:
        """A file; nothing where there is none. Who has it open reads on."""

    def remove_folder(self, folder: Path) -> None:
        """With all that is in it; nothing where there is none."""

    def free_bytes(self, folder: Path) -> int:
        """Bytes that may still be written where `folder` is."""

    def lock(self, folder: Path) -> FolderLock:
        """Make the folder where it is missing, and keep other processes out. Raises UnavailableError where one is in."""


def write_all(files: Files, descriptor: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
    """Write every byte at `position`; the position after. Raises OSError, perhaps with part of it written."""
    for start in range(0, len(buffers), BUFFERS_PER_WRITE_MAX):
        rest = list(buffers[start : start + BUFFERS_PER_WRITE_MAX])
        wanted = sum(map(len, rest))
        while True:
            written = files.pwritev(descriptor, rest, position)
            position += written
            wanted -= written
            if not wanted:
                break
            if not written:
                raise OSError(errno.EIO, "a write of more than nothing wrote nothing")
            while written >= len(rest[0]):
                written -= len(rest.pop(0))
            rest[0] = memoryview(rest[0])[written:]
    return position
