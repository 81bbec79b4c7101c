"""Files as the log uses them: one thin class over the operating system's calls, so that tests can make any call fail.

Everything takes a position (`pread`, `pwritev`): no call depends on a shared file position, so threads may
read while one writes. Durability is explicit: `sync` for a file's bytes, `sync_folder` for the names in a
folder.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import xxhash

BUFFERS_PER_WRITE_MAX: Final = 1_000
"""Under IOV_MAX, which is 1,024 on Linux."""
TEMPORARY_SUFFIX: Final = ".tmp"

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_SMALL_MAGIC: Final = b"FELIXSML"


def is_full(error: OSError) -> bool:
    """True where a write failed for want of room (device, quota or file-size limit) and nothing else is wrong."""
    return error.errno in _FULL


class Files:
    """The real calls. Each raises OSError as the operating system gives it."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def pwritev(self, descriptor: int, buffers: Sequence[bytes | memoryview], position: int) -> int:
        return os.pwritev(descriptor, buffers, position)

    def pread(self, descriptor: int, length: int, position: int) -> bytes:
        return os.pread(descriptor, length, position)

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def truncate(self, descriptor: int, length: int) -> None:
        os.ftruncate(descriptor, length)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def free_bytes(self, folder: Path) -> int:
        """Bytes that may still be written where `folder` is."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)


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


def create_durably(files: Files, path: Path, buffers: Sequence[bytes | memoryview]) -> int:
    """Write a new file, sync it, then give it its name and sync the folder: it exists whole or not at all.

    Returns the open descriptor. On OSError nothing is left under `path` that was not there before.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    descriptor = files.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(files, descriptor, buffers, 0)
        files.sync(descriptor)
        files.replace(temporary, path)
        files.sync_folder(path.parent)
    except OSError:
        files.close(descriptor)
        files.unlink(temporary)
        raise
    return descriptor


def read_file(files: Files, path: Path) -> bytes | None:
    """The whole of a small file; None where there is none."""
    try:
        descriptor = files.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return files.pread(descriptor, files.size(descriptor), 0)
    finally:
        files.close(descriptor)


def save_checked(files: Files, path: Path, payload: bytes) -> None:
    """Replace a small file durably: magic, XXH3-64 of the payload, payload."""
    files.close(create_durably(files, path, (_SMALL_MAGIC, xxhash.xxh3_64_digest(payload), payload)))


def load_checked(files: Files, path: Path) -> bytes | None:
    """The payload of such a file; None where it is missing or damaged."""
    data = read_file(files, path)
    if data is None or data[:8] != _SMALL_MAGIC or xxhash.xxh3_64_digest(data[16:]) != data[8:16]:
        return None
    return data[16:]
