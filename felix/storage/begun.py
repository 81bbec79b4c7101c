"""Folders that a process has begun: one that is empty at a later start is away, not new.

A folder on a disk of its own is empty while that is not mounted, or another one is mounted in its place. Whoever began anew there would leave behind what was acknowledged, and give a log
another history. So such a folder has an id (`begun`, in it), and a file on another disk, where there is one, remembers it. Invariant: nothing is acknowledged in a folder before it is
remembered; who finds another folder than the remembered one, or nothing in it, does not start, and writes nothing.

A folder without an id that holds something is of an earlier release, or of a backup from then: it is taken as it is. Blocking. Callers: region.startup, bridge.agent.
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Final, NamedTuple

from felix.errors import UnavailableError
from felix.runtime.port import Random
from felix.storage.port import Files, has_failed, lacks_resources
from felix.storage.small_file import read_line, write_line

log = logging.getLogger("felix.storage")

MARK: Final = "begun"
SUFFIX: Final = ".begun"
"""Of the name of a file that remembers a folder."""
_ID_BYTES: Final = 16
_NOTHING: Final = frozenset({"lock", "lost+found"})
"""What an empty folder may hold: the lock of whoever looked, and what a file system puts there itself."""


class BegunFolder(NamedTuple):
    """`memory`: the file that remembers it: without it the folder would begin anew. `lost`: what to do where its disk is lost for good; a sentence. `apart`: names of folders in it that may lie on disks of their
    own: they are there, as what these are mounted at, where its own disk is not."""

    files: Files
    path: Path
    memory: Path
    lost: str
    apart: frozenset[str] = frozenset()

    def require(self) -> None:
        """Before anything is written there. Raises UnavailableError where it is not the folder that is remembered; OSError where that cannot be read."""
        remembered = read_line(self.files, self.memory)
        if not remembered:
            return
        found = read_line(self.files, self.path / MARK)
        if found == remembered or (not found and self._holds_something()):
            return
        if found:
            what = f"{self.path} is not the folder that was used here before: another disk is mounted in its place, or somebody moved it."
        else:
            what = f"{self.path} is empty{self._but_for()}, and was not when it was used last: its disk is not mounted, or somebody moved what was in it."
        raise UnavailableError(
            what,
            hint=f"Nothing was written there. Put the right one back, or its backup, and start again. {self.lost}",
        )

    def remember(self, random: Random) -> None:
        """It exists, and this process has it to itself: from now on it is the one. Raises OSError.

        A disk that has no room, has failed, or is not this process's to write keeps nobody from starting: then as much is remembered as before.
        """
        try:
            remembered, found = read_line(self.files, self.memory), read_line(self.files, self.path / MARK)
            if not found:
                found = remembered or random.randbytes(_ID_BYTES).hex()
                write_line(self.files, self.path / MARK, found)
            if remembered != found:
                self.files.make_folder(self.memory.parent)
                write_line(self.files, self.memory, found)
        except OSError as error:
            if not (
                lacks_resources(error) or has_failed(error) or error.errno in (errno.EACCES, errno.EPERM)
            ):
                raise
            log.warning("it is not remembered that %s was begun: %s", self.path, error)

    def _names(self) -> set[str]:
        try:
            return set(self.files.names(self.path))
        except FileNotFoundError:
            return set()

    def _holds_something(self) -> bool:
        return not self._names() <= _NOTHING | self.apart

    def _but_for(self) -> str:
        """What is there, and does not count, as the end of a clause."""
        apart = sorted(self._names() & self.apart)
        return f" but for {' and '.join(apart)}" if apart else ""
