"""The lock on a data folder: one process at a time. Touches the file system (flock).

The lock goes with the process: it needs no cleaning up after a crash. The file names the holder for people.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final, Self

from felix.errors import Code, UnavailableError

LOCK_NAME = "lock"


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Random, new with each start of the machine; empty where the system has none (it is Linux's)."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class FolderLock:
    """Held from construction to `release` (or the process's end). Raises UnavailableError where another holds it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK_NAME
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise UnavailableError(
                f"The folder {folder} is in use by another process, pid {holder}.",
                code=Code.CONFLICT,
                hint="Stop that one first, or give this one another folder.",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor: int | None = descriptor

    @property
    def identity(self) -> str:
        """Of the locked file: as long as this machine is not started again, whoever holds the lock of this identity is the
        only process that does. Empty where the system does not say when it was started.

        A copy of the folder has another one, also on the same machine; so has the same volume on another machine.
        """
        assert self._descriptor is not None
        status = os.fstat(self._descriptor)
        boot = boot_id()
        return f"{boot}:{status.st_dev}:{status.st_ino}" if boot else ""

    def release(self) -> None:
        """Let go. The file stays: removing it would let two processes hold two files of one name."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
