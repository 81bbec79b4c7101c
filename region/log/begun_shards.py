"""Which shards of a folder of logs were begun: one whose own folder is gone later was lost, and is not new.

A shard that has never been opened here has no folder, and begins at offset 0. So would one whose folder was removed, or went where a file system that was
repaired puts what it finds: offsets that readers, bridges and consumers have seen would be given to other records, and nobody would say so.
The file `begun-shards`, in the folder of logs, names the shards that were opened; such a one is refused where its folder is missing or empty.

It is written from time to time, and at a stop: of a shard that began since, nothing is known after a crash, and it is taken as before. A name is written once
its shard's folder is on the disk for good. Shards with copies are not named: they have their own evidence (region.replication.disk).

`BegunShards` is changed on the event loop; `read` and `save` block, and one at a time calls them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from felix.errors import CorruptionError
from felix.storage.port import Files
from felix.storage.small_file import load_checked, save_checked
from region.log.companions import RECORDS, JournalKind, kind_of, shard_of

BEGUN_SHARDS_NAME: Final = "begun-shards"
BEGIN_ANEW_NAME: Final = "begin-anew"
"""Of a file in a shard's folder by which a person says that what it had is lost for good."""

_decoder: Final = msgspec.msgpack.Decoder(dict[str, list[int]])


def read_begun_shards(files: Files, data: Path) -> dict[str, set[int]]:
    """By the stream's folder, which of its shards were begun; none where the file is missing or damaged. Raises OSError."""
    payload = load_checked(files, data / BEGUN_SHARDS_NAME)
    try:
        found = _decoder.decode(payload) if payload is not None else {}
    except msgspec.DecodeError:
        return {}
    return {stream: set(shards) for stream, shards in found.items()}


def missing_shards(files: Files, data: Path) -> list[tuple[str, int]]:
    """The stream's folder and the number of each shard that was begun, and of which nothing is left. Blocks. Raises OSError."""
    return [
        (stream, shard)
        for stream, shards in sorted(read_begun_shards(files, data).items())
        for shard in sorted(shards)
        if not _names(files, data / stream / f"{shard:05d}")
    ]


def _names(files: Files, folder: Path) -> list[str]:
    try:
        return files.names(folder)
    except FileNotFoundError:
        return []


class BegunShards:
    """Of one folder of logs; `stream` is the name of a stream's folder in it."""

    __slots__ = ("_changes", "_data", "_files", "_saved", "_streams")

    def __init__(self, files: Files, data: Path) -> None:
        """Blocks. Raises OSError."""
        self._files, self._data = files, data
        self._streams = read_begun_shards(files, data)
        self._changes = self._saved = 0

    def has(self, stream: str, shard: int) -> bool:
        return shard in self._streams.get(stream, ())

    def add(self, stream: str, shard: int) -> None:
        """It was opened, and its folder is on the disk."""
        if not self.has(stream, shard):
            self._streams.setdefault(stream, set()).add(shard)
            self._changes += 1

    def discard(self, stream: str, shard: int) -> None:
        """It is no longer this folder's to remember."""
        if self.has(stream, shard):
            self._streams[stream].remove(shard)
            self._changes += 1

    def discard_stream(self, stream: str) -> None:
        """The stream is deleted."""
        if self._streams.pop(stream, None):
            self._changes += 1

    @property
    def is_saved(self) -> bool:
        """Whether the file has what is known."""
        return self._changes == self._saved

    def taken(self) -> tuple[int, bytes]:
        """What `save` writes, as it is now."""
        shards = {stream: sorted(shards) for stream, shards in self._streams.items() if shards}
        return self._changes, msgspec.msgpack.encode(shards)

    def save(self, taken: tuple[int, bytes]) -> None:
        """Blocks. Raises OSError, and leaves what was saved before."""
        changes, payload = taken
        if changes < self._saved:
            return  # what was taken later is written already
        save_checked(self._files, self._data / BEGUN_SHARDS_NAME, payload)
        self._saved = changes


def give_leave(files: Files, folder: Path) -> None:
    """Have a log that is gone begin anew. Blocks. Raises OSError."""
    files.make_folder(folder)
    files.close(files.open(folder / BEGIN_ANEW_NAME, os.O_CREAT | os.O_RDWR))
    files.sync_folder(folder)
    files.sync_folder(folder.parent)


def require_folder(files: Files, folder: Path, number: int) -> None:
    """Of a log that was begun. Blocks. Raises CorruptionError where nothing is left of it, unless a person said that it is to begin anew; OSError."""
    names = _names(files, folder)
    if not names:
        shard, kind = shard_of(number), kind_of(number)
        what, then = f"shard {shard}", "the shard begins anew at offset 0"
        store = ", or run `felix log restore` where its segments are in a store"
        if kind != RECORDS:
            of = JournalKind(kind).name.lower() if kind in set(JournalKind) else str(kind)
            what = f"the journal of shard {shard} ({of})"
            store = ""
            then = "it begins anew, and jobs that were done, or records that were acknowledged, are given out again"
        raise CorruptionError(
            f"{folder} is gone, or empty, and {what} was there: somebody removed it, or its disk lost it.",
            hint=f"Put it back from where it went, as from `lost+found`, or from a backup{store}. "
            f"If what it had is lost for good, put an empty file `{BEGIN_ANEW_NAME}` into that folder: at the broker's next start {then}.",
        )
    if BEGIN_ANEW_NAME in names and len(names) > 1:
        # It has begun, and the word was for that once.
        files.remove(folder / BEGIN_ANEW_NAME)
