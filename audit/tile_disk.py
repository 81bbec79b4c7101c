"""A log's folder on disk: read by path, write whole files atomically and durably.

Invariants: a file is either whole or not there (written beside, synced, renamed); after `flush` returned, every
`write` before it survives a power failure, names included. A failed sync raises OSError and is never retried:
the caller stops. Blocking: never call from an event loop. Callers: audit.trail, audit.witness, cli.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TEMPORARY: Final = ".new"


class Folder:
    """`audit.tile.Files` on disk, and writing. Paths are relative, with / between the parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dirty: set[Path] = set()

    def read(self, path: str) -> bytes | None:
        """The file's bytes, None where there is none."""
        try:
            return (self.path / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty where there is none. Files being written are left out."""
        try:
            names = [path.name for path in (self.path / folder).iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in names if not name.endswith(_TEMPORARY))

    def write(self, path: str, data: bytes) -> None:
        """Replace the file. Its bytes are durable on return; its name is after `flush`."""
        target = self.path / path
        self._make(target.parent)
        beside = target.with_name(target.name + _TEMPORARY)
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fdatasync(file.fileno())
        beside.replace(target)
        self._dirty.add(target.parent)

    def flush(self) -> None:
        """Make the names of all files written so far durable."""
        for folder in sorted(self._dirty, key=lambda path: -len(path.parts)):
            sync_folder(folder)
        self._dirty.clear()

    def remove(self, path: str) -> None:
        """Remove a file if it is there; not durable by itself (a file that comes back must do no harm)."""
        (self.path / path).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        """Remove an empty folder if it is there."""
        path = self.path / folder
        self._dirty.discard(path)
        try:
            path.rmdir()
        except OSError:
            return
        self._dirty.add(path.parent)

    def _make(self, folder: Path) -> None:
        if folder in self._dirty or folder.is_dir():
            return
        self._make(folder.parent)
        folder.mkdir(exist_ok=True)
        self._dirty.add(folder.parent)


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that the names in it are durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
