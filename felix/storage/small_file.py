"""Files that exist whole or not at all: written aside, synced, renamed; the small ones with a checksum."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from felix.storage.port import Files, write_all

TEMPORARY_SUFFIX: Final = ".tmp"
LINE_BYTES_MAX: Final = 256
_MAGIC: Final = b"FELIXSML"


def create_durably(files: Files, path: Path, buffers: Sequence[bytes | memoryview]) -> int:
    """Write a new file, sync it, then give it its name and sync the folder: it exists whole or not at all.

    Returns the open descriptor. On OSError nothing is left under `path` that was not there before; with EIO it may be there all the same,
    whatever kept the folder from being synced, so that nobody goes on as if it were not.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    descriptor = files.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(files, descriptor, buffers, 0)
        files.sync(descriptor)
        files.rename(temporary, path)
        sync_name(files, path)
    except OSError:
        files.close(descriptor)
        with suppress(OSError):
            files.remove(temporary)
        raise
    return descriptor


def sync_name(files: Files, path: Path) -> None:
    """Make the name of a file durable. Raises OSError (EIO), also where it is for want of room or of descriptors: what the caller could take for
    undone is there."""
    try:
        files.sync_folder(path.parent)
    except OSError as error:
        raise OSError(errno.EIO, f"The name could not be synced: {error}", str(path)) from error


def replace_durably(files: Files, path: Path, data: bytes) -> None:
    """Put new content in place of a file's, or make it. Raises OSError, and leaves the old one."""
    files.close(create_durably(files, path, (data,)))


def read_file(files: Files, path: Path, bytes_max: int | None = None) -> bytes | None:
    """The whole of a small file; None where there is none. Raises OSError (EFBIG) of a longer one than `bytes_max`, unread."""
    try:
        descriptor = files.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        size = files.size(descriptor)
        if bytes_max is not None and size > bytes_max:
            raise OSError(errno.EFBIG, f"{size} bytes where {bytes_max} are allowed", str(path))
        return files.pread(descriptor, size, 0)
    finally:
        files.close(descriptor)


def read_line(files: Files, path: Path) -> str:
    """The text of a file of one line; empty where there is none. Raises OSError, also (EFBIG) of one that is longer than LINE_BYTES_MAX."""
    return (read_file(files, path, LINE_BYTES_MAX) or b"").decode(errors="replace").strip()


def write_line(files: Files, path: Path, text: str) -> None:
    """Put another line in its place, durably, or make the file. Raises OSError, and leaves the old one."""
    replace_durably(files, path, f"{text}\n".encode())


def save_checked(files: Files, path: Path, payload: bytes) -> None:
    """Replace a small file durably: magic, XXH3-64 of the payload, payload."""
    files.close(create_durably(files, path, (_MAGIC, xxhash.xxh3_64_digest(payload), payload)))


def load_checked(files: Files, path: Path) -> bytes | None:
    """The payload of such a file; None where it is missing or damaged."""
    data = read_file(files, path)
    if data is None or data[:8] != _MAGIC or xxhash.xxh3_64_digest(data[16:]) != data[8:16]:
        return None
    return data[16:]
