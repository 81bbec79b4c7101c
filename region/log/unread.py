"""Reading around what a disk does not give: a bad sector is read as zeros, which no entry is, so that it counts as damage of its segment, and all else is
read. Blocking. Only where a log has copies that may have what is lost.
"""

from __future__ import annotations

import errno
from typing import Final, Protocol

UNREAD_BLOCK_BYTES: Final = 4_096
"""The least that is taken for lost: a page, or a sector."""

_UNREAD: Final = frozenset({errno.EIO, errno.EBADMSG, errno.ENODATA})


class Reads(Protocol):
    """What scans of segments need of `felix.storage.port.Files`."""

    def pread(self, descriptor: int, length: int, position: int) -> bytes: ...


class SizedReads(Reads, Protocol):
    """As it is read around."""

    def size(self, descriptor: int) -> int: ...


def is_unread(error: OSError) -> bool:
    """Whether the disk did not give what it has: an error of the medium, or a checksum of the file system's."""
    return error.errno in _UNREAD


class AroundUnread:
    """Reads by which what the disk does not give is zeros."""

    def __init__(self, files: SizedReads) -> None:
        self.error: OSError | None = None
        """what the disk said last of something that is zeros; None: it has given everything"""
        self._files = files

    def pread(self, descriptor: int, length: int, position: int) -> bytes:
        """As `Files.pread`; of what fails one half is read, then the other, down to UNREAD_BLOCK_BYTES: an error that passes costs another read."""
        try:
            return self._files.pread(descriptor, length, position)
        except OSError as error:
            if not is_unread(error):
                raise
            failed = error
        begin = position // UNREAD_BLOCK_BYTES
        blocks = (position + length - 1) // UNREAD_BLOCK_BYTES - begin + 1
        if blocks <= 1:
            self.error = failed
            return bytes(min(length, max(0, self._files.size(descriptor) - position)))
        first = (begin + blocks // 2) * UNREAD_BLOCK_BYTES - position
        had = self.pread(descriptor, first, position)
        if len(had) < first:
            return had
        return had + self.pread(descriptor, length - first, position + first)
