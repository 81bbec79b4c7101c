"""Whether a log's folder is written by one process alone, or is one of several brokers' copies.

Invariant: it is one or the other, and is never opened as the other kind: that would be another history of the log. Blocks. Callers: audit.trail, and a
region's start, which makes a copy of a folder.
"""

from __future__ import annotations

from pathlib import Path

from audit.checkpoint import Checkpoint
from audit.errors import RolledBackError
from audit.note import parse_note
from audit.tile import CHECKPOINT_PATH, COPIED_PATH, WAL_FOLDER
from audit.tile_disk import Folder
from audit.wal_disk import Recovery, segment_name, segments
from felix.errors import Code, RequestError
from felix.storage.disk import SHARED_FILES
from felix.storage.port import Files


def require_kind(folder: Folder, *, copied: bool) -> None:
    """Raises RequestError(CONFLICT) where a log that several brokers have copies of is to be written alone, or the other way round."""
    if copied and folder.names(WAL_FOLDER):
        raise RequestError(
            f"The audit log {folder.path} was written by one broker alone, and brokers do not copy it.",
            code=Code.CONFLICT,
            hint="Move the folder aside: the leaves come from the other brokers.",
        )
    if copied and folder.read(COPIED_PATH) is None:
        _mark_copied(folder)
    elif not copied and folder.read(COPIED_PATH) is not None:
        raise RequestError(
            f"The audit log {folder.path} is one of several brokers' copies: written here alone, it would be another history.",
            code=Code.CONFLICT,
            hint="The region's brokers write it together, with the configuration that has them as several (docs/clusters.md).",
        )


def become_copied(path: Path, size: int, root: bytes, files: Files = SHARED_FILES) -> None:
    """Have the log in this folder, which one process alone wrote, be one of several brokers' copies from now on. Blocks. What was cut off is finished
    by the next call.

    Raises RequestError(CONFLICT) where another process has it open, RolledBackError where its last checkpoint is another one than that of `size` leaves
    and `root`, or where it has leaves behind that; CorruptionError where its write-ahead file is damaged.
    """
    folder = Folder(path, files)
    lock = folder.lock()
    try:
        if folder.read(COPIED_PATH) is None:
            note = folder.read(CHECKPOINT_PATH)
            # A folder that takes the place of a lost one has nothing, and gets all from the other copies.
            is_new = note is None and not segments(files, path / WAL_FOLDER)
            signed = None if note is None else Checkpoint.parse(parse_note(note).text)
            recovery = Recovery(path / WAL_FOLDER, size, files)
            for _ in recovery:
                pass
            is_same = signed is not None and (signed.size, signed.root, recovery.size) == (size, root, size)
            if not is_same and not is_new:
                has = 0 if signed is None else max(signed.size, recovery.size)
                raise RolledBackError(
                    f"The audit log {path} has {has} leaves, and it went on as copies from {size} with another checkpoint.",
                    hint="This is not the folder that the log was in then. Put that one back; `felix audit verify` tells them apart.",
                )
            _mark_copied(folder)
        # All of it is in bundles, under the checkpoint.
        for first in segments(files, path / WAL_FOLDER):
            files.remove(path / WAL_FOLDER / segment_name(first))
        folder.remove_folder(WAL_FOLDER)
        folder.flush()
    finally:
        lock.release()


def _mark_copied(folder: Folder) -> None:
    folder.write(
        COPIED_PATH, b"Several brokers have copies of this log; its leaves are in felix/system/audit.\n"
    )
    folder.flush()
