"""How long the files of a log may be.

A log's owner chooses what stands in its folder, and a file of a terabyte takes no room on the owner's disk. Whoever reads a log
refuses a file that is longer than any of its kind before reading it.
Callers: audit.tile_disk, audit.spark.files.
"""

from __future__ import annotations

from typing import Final

from audit.document_leaf import DOCUMENT_FILE_BYTES_MAX, DOCUMENTS_FOLDER
from audit.leaf import LEAF_BYTES_MAX
from audit.merkle import HASH_BYTES, TILE_WIDTH
from audit.note import NOTE_BYTES_MAX
from audit.tile import CHECKPOINT_PATH, COSIGNED_PATH, KEPT_MAX, KEPT_PATH, WAL_FOLDER, WITNESSED_PATH
from audit.wal_disk import SEGMENT_BYTES_MAX
from felix.errors import TamperError

WAL_FILE_BYTES_MAX: Final = 4 * SEGMENT_BYTES_MAX
"""A segment is rolled once it is longer than `SEGMENT_BYTES_MAX`. What was waiting then, as much and a bundle at most, stands in it as well."""
BUNDLE_BYTES_MAX: Final = TILE_WIDTH * (2 + LEAF_BYTES_MAX)
_NOTES: Final = frozenset((CHECKPOINT_PATH, COSIGNED_PATH, WITNESSED_PATH))


def file_bytes_max(path: str) -> int | None:
    """Of the file at this path, relative to the log's folder. None: one that its writer alone reads, as a shortcut."""
    folder, _, rest = path.partition("/")
    if path in _NOTES:
        return NOTE_BYTES_MAX
    if path == KEPT_PATH:
        return KEPT_MAX * NOTE_BYTES_MAX
    if folder == DOCUMENTS_FOLDER:
        return DOCUMENT_FILE_BYTES_MAX
    if folder == WAL_FOLDER:
        return WAL_FILE_BYTES_MAX
    if folder == "tile":
        return BUNDLE_BYTES_MAX if rest.startswith("entries/") else TILE_WIDTH * HASH_BYTES
    return None


def too_long(path: str, bytes_max: int) -> TamperError:
    """What is said of a longer one."""
    return TamperError(f"The file {path} has more than {bytes_max} bytes, and none of its kind has.")
