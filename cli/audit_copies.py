"""Which of a log's copies on this machine is read, of a region that has several brokers here.

Invariant: a copy is chosen only where all copies here are of one history. Blocks. Caller: cli.audit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from audit.checkpoint import Checkpoint
from audit.merkle import root_from_nodes
from audit.note import parse_note
from audit.tile import CHECKPOINT_PATH, TileHashes
from audit.tile_disk import Folder
from felix.errors import TamperError


class _Copy(NamedTuple):
    path: Path
    checkpoint: Checkpoint


def furthest_copy(paths: Sequence[Path]) -> Path:
    """Of these folders, the one whose checkpoint has the most leaves; of equal ones the first, and the first folder where none has any.

    Signatures are not verified here. Raises TamperError where the checkpoints of two copies are of different histories.
    """
    copies = [copy for path in paths if (copy := _read(path)) is not None]
    if not copies:
        return next((path for path in paths if path.is_dir()), paths[0])
    furthest = max(copies, key=lambda copy: copy.checkpoint.size)
    for copy in copies:
        if copy is not furthest and not _continues(furthest, copy.checkpoint):
            raise TamperError(
                f"Two copies of the audit log {copy.checkpoint.origin} on this machine have different histories: the tree of "
                f"{copy.checkpoint.size} leaves, which the checkpoint of {copy.path} signs, is not a part of the one of "
                f"{furthest.checkpoint.size} leaves in {furthest.path}.",
                hint="Keep both folders, and run `felix audit verify FOLDER` on each. Checkpoints that another region has cosigned say which "
                "history was shown to others.",
            )
    return furthest.path


def _read(path: Path) -> _Copy | None:
    """None where there is no checkpoint with leaves that can be read: verifying that folder says why."""
    try:
        data = Folder(path).read(CHECKPOINT_PATH)
        checkpoint = None if data is None else Checkpoint.parse(parse_note(data).text)
    except (OSError, TamperError):
        return None
    return None if checkpoint is None or checkpoint.size == 0 else _Copy(path, checkpoint)


def _continues(copy: _Copy, before: Checkpoint) -> bool:
    """Whether the tree of this copy had that root. Where its tiles cannot be read nothing is said: verifying it finds that."""
    own = copy.checkpoint
    if before.origin != own.origin:
        return False
    if before.size == own.size:
        return before.root == own.root
    try:
        return root_from_nodes(before.size, TileHashes(Folder(copy.path), own.size)) == before.root
    except TamperError:
        return True
