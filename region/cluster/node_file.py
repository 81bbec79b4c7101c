"""The file `node` of a broker's data folder: whose folder it is and how far its registrations went (registration.FolderRecord).

Written whole and synced before what it announces is sent to the store. Every call blocks on the disk; one thread at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from felix.errors import CorruptionError
from felix.runtime.port import Random
from felix.storage.port import Files
from felix.storage.small_file import load_checked, save_checked
from region.cluster.records import FOLDER_CHARS
from region.cluster.registration import FolderRecord

NAME: Final = "node"


class NodeFile:
    """`folder`: the data folder, which exists and is locked by this process."""

    def __init__(self, files: Files, folder: Path, random: Random) -> None:
        self._files = files
        self._path = folder / NAME
        self._random = random

    def load(self) -> FolderRecord:
        """What the file says, or that of a new folder, with an id of its own, which nothing is written of yet.

        Raises CorruptionError where the file cannot be read: taken for a new folder, it would be refused for a reason that misleads.
        """
        if not self._files.exists(self._path):
            return FolderRecord(folder=self._random.randbytes(FOLDER_CHARS // 2).hex())
        payload = load_checked(self._files, self._path)
        try:
            if payload is not None:
                return msgspec.json.decode(payload, type=FolderRecord)
        except msgspec.MsgspecError:
            pass
        raise CorruptionError(
            f"{self._path} is damaged: it says whose data folder this is.",
            hint="Put the file back as this broker wrote it last.",
        )

    def save(self, record: FolderRecord) -> None:
        """Durably, in place of what was there. Raises OSError."""
        save_checked(self._files, self._path, msgspec.json.encode(record))
