"""Which release of Felix has written to a folder: an earlier one must leave it alone.

Formats carry versions, but fields are added to what has one, and who does not know them may pass them over, or write the rest back without them. So each
process marks the folder that it owns before it writes there, and none starts in one that a later release has marked. Minor releases count: what a patch
release writes, every release of the same minor one reads.

The mark is a text of one line, `release` in the folder. One that cannot be read as a release is taken for none. Callers: region.startup, bridge.egress_disk, and commands that
look into folders of processes which are stopped.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Final

from felix.errors import Code, RequestError
from felix.storage.port import Files, has_failed, lacks_resources
from felix.storage.small_file import read_line, write_line

log = logging.getLogger("felix.storage")

MARK: Final = "release"


def require_release(files: Files, folder: Path, release: str) -> None:
    """Before `release` writes there. Raises RequestError(UNSUPPORTED) where a later one has, OSError where the mark cannot be read."""
    _accepted(files, folder, release)


def _accepted(files: Files, folder: Path, release: str) -> str:
    """The mark. Raises as `require_release`."""
    marked = read_line(files, folder / MARK)
    if is_later(marked, release):
        raise RequestError(
            f"{folder} was used by release {marked} of Felix, and this is release {release}: it may not understand what it finds, or lose it.",
            code=Code.UNSUPPORTED,
            hint=f"Start release {marked} again. To go back to an earlier one, put the backup of before the upgrade in the folder's place (docs/operations.md, Going back).",
        )
    return marked


def is_later(release: str, than: str) -> bool:
    """Whether what `release` wrote may be more than the release `than` understands."""
    return _minor(release) > _minor(than)


def mark_release(files: Files, folder: Path, release: str) -> None:
    """`release` is about to write in `folder`, which this process owns. Raises as `require_release`.

    A disk that takes no mark, because it is full, say, keeps nobody from starting: then the mark of before stays.
    """
    if _minor(_accepted(files, folder, release)) == _minor(release):
        return
    try:
        write_line(files, folder / MARK, release)
    except OSError as error:
        if not lacks_resources(error) and not has_failed(error):
            raise
        log.warning("%s is not marked as used by release %s: %s", folder, release, error)


def _minor(release: str) -> tuple[int, int]:
    """Major and minor number; (0, 0), before any release, where it is none."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)
