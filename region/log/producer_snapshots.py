"""Snapshots of a shard's producers: one after each roll of a segment, so that the producers at any point are told by the last snapshot below
it and the batches of a segment or two behind it, never by the whole log.

`<offset>.producers` is the table of what stands below that offset. `producers` is the newest one, of a clean stop (and, in a folder that Felix 0.1
left, of a roll). The state of a compaction has a copy of its own, since batches that told of producers are gone after it.

They are shortcuts: one that is missing or damaged is passed by, and the log is read from further back. Batches cannot tell what stood before
the log's start or was compacted away; there, a snapshot that knows too much is cut back to what the log still has, which may know fewer than 32
batches of a producer. Threads that open, close or change a folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from felix.errors import CorruptionError
from felix.storage.port import Files
from felix.storage.small_file import load_checked, save_checked
from region.log.producers import ProducerTable, decode_snapshot

PRODUCERS_NAME: Final = "producers"
SNAPSHOT_SUFFIX: Final = ".producers"


def snapshot_name(offset: int) -> str:
    """Of the snapshot of what stands below `offset`; names sort as offsets do."""
    return f"{offset:020d}{SNAPSHOT_SUFFIX}"


def parse_snapshot_name(name: str) -> int | None:
    """The offset, or None where it is no snapshot's name."""
    digits = name.removesuffix(SNAPSHOT_SUFFIX)
    return int(digits) if digits.isdecimal() and name == snapshot_name(int(digits)) else None


class ProducerSnapshots:
    """Those of one folder. `copy`: that of its compaction, or empty."""

    def __init__(self, files: Files, folder: Path, copy: bytes = b"") -> None:
        self._files = files
        self._folder = folder
        self._copy = copy

    def offsets(self, names: Iterable[str] | None = None) -> list[int]:
        """Of those with an offset in their names, lowest first. `names`: of the folder, where they are known."""
        names = self._files.names(self._folder) if names is None else names
        found = (parse_snapshot_name(name) for name in names)
        return sorted(offset for offset in found if offset is not None)

    def newest(
        self, below: int | None = None, names: Iterable[str] | None = None
    ) -> tuple[ProducerTable, int] | None:
        """The newest one of what stands below its offset, which is at most `below`; None where there is none that decodes. `names`: of the
        folder, where they are known."""
        others = [
            found
            for found in (self._load(PRODUCERS_NAME), _decode(self._copy))
            if found and (below is None or found[1] <= below)
        ]
        best = max(others, key=lambda found: found[1], default=None)
        for offset in reversed(self.offsets(names)):
            if best and offset <= best[1]:
                break
            if below is not None and offset > below:
                continue
            if (found := self._load(snapshot_name(offset))) and found[1] == offset:
                return found
        return best

    def at(self, end: int, floor: int) -> tuple[ProducerTable, int]:
        """What to begin with, and from which offset on the log's batches are to be counted, to know the producers at `end`. Below `floor`
        the log no longer has all its batches."""
        found = self.newest(end)
        if found and found[1] >= floor:
            return found
        if floor:
            over = [one for one in (self._load(PRODUCERS_NAME), _decode(self._copy)) if one and one[1] > end]
            over += [
                one
                for offset in self.offsets()
                if offset > end and (one := self._load(snapshot_name(offset)))
            ]
            if over:
                table, _ = min(over, key=lambda one: one[1])
                table.rollback(end)
                return table, end
        return found or (ProducerTable(), 0)

    def save(self, snapshot: bytes, offset: int) -> None:
        """Make a snapshot of what stands below `offset` durable. Raises OSError."""
        save_checked(self._files, self._folder / snapshot_name(offset), snapshot)

    def save_last(self, snapshot: bytes) -> None:
        """That of a clean stop. Raises OSError."""
        path = self._folder / PRODUCERS_NAME
        if load_checked(self._files, path) != snapshot:
            save_checked(self._files, path, snapshot)

    def cut(self, end: int) -> None:
        """The log ends at `end` by now: forget what knows more. The caller syncs the folder."""
        for offset in self.offsets():
            if offset > end:
                self._files.remove(self._folder / snapshot_name(offset))
        last = self._load(PRODUCERS_NAME)
        if last is None or last[1] > end:
            self._files.remove(self._folder / PRODUCERS_NAME)

    def trim(self, floor: int) -> None:
        """Below `floor` the log no longer has all its batches: forget what no cut will ask for, but not the last one there is."""
        for offset in self.offsets()[:-1]:
            if offset < floor:
                with suppress(OSError):
                    self._files.remove(self._folder / snapshot_name(offset))

    def _load(self, name: str) -> tuple[ProducerTable, int] | None:
        payload = load_checked(self._files, self._folder / name)
        return None if payload is None else _decode(payload)


def _decode(payload: bytes) -> tuple[ProducerTable, int] | None:
    if not payload:
        return None
    try:
        return decode_snapshot(payload)
    except CorruptionError:
        return None
