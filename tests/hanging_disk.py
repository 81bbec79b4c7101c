"""A disk that hangs: an ext4 of its own in a file, on which writes and syncs wait until it goes on (FIFREEZE). Needs root on Linux and loop devices."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.machines import why_not

BYTES = 512 << 20
"""Sparse. etcd makes its write-ahead log 64 MB at once."""


def why_no_disk() -> str:
    """Why no disk can be made to hang here; empty where one can."""
    return why_not()


class HangingDisk:
    """Mounted at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hangs = False

    def hang(self) -> None:
        """What is written from now on waits; what is read is answered."""
        _run("fsfreeze", "--freeze", str(self.folder))
        self._hangs = True

    def go_on(self) -> None:
        if self._hangs:
            _run("fsfreeze", "--unfreeze", str(self.folder))
            self._hangs = False


@contextmanager
def hanging_disk(folder: Path) -> Iterator[HangingDisk]:
    """A disk at this folder, until the block ends; whoever uses it ends before, or in it after `go_on`."""
    folder.mkdir(parents=True, exist_ok=True)
    image = folder.with_name(f"{folder.name}.ext4")
    with image.open("wb") as made:
        os.truncate(made.fileno(), BYTES)
    _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    _run("mount", "-o", "loop", str(image), str(folder))
    disk = HangingDisk(folder)
    try:
        yield disk
    finally:
        disk.go_on()
        _run("umount", "--lazy", str(folder))
        image.unlink()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
