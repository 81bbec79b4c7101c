"""Looking at every byte of a closed segment, a window at a time, beside whoever reads and writes the log. What the disk does not give is damage,
too. Blocking: threads only.

Invariant: nothing is changed; a file that is gone is a FileNotFoundError: the caller knows whether the segment was let go of meanwhile.
"""

from __future__ import annotations

import os
from typing import Final

from felix.storage.port import Files
from region.log.segment import ENTRY_BYTES_MAX, EntryIncompleteError, scan_window
from region.log.segment_scan import damaged
from region.log.segment_state import SegmentState
from region.log.unread import AroundUnread

CHECK_BYTES: Final = 2 * ENTRY_BYTES_MAX
"""Looked at at a time, at most: room for the largest entry, and a few hundredths of a second of a thread."""


class SegmentCheck:
    """Of one segment, from its header to its end: `step` until it says so."""

    def __init__(self, files: Files, segment: SegmentState) -> None:
        self.segment = segment
        self.position = 0
        """up to where it was looked at, in bytes"""
        self._files = files
        self._reads = AroundUnread(files)
        self._offset = segment.base_offset
        self._batches = self._records = 0

    def step(self) -> bool:
        """Look at the next CHECK_BYTES, about; whether that was the last of it.

        Raises SegmentDamagedError, FileNotFoundError, OSError.
        """
        segment, begin = self.segment, self.position
        descriptor = self._files.open(segment.path, os.O_RDONLY)
        try:
            size = self._files.size(descriptor)
            wanted = min(CHECK_BYTES, max(0, segment.segment_bytes - begin))
            window = self._reads.pread(descriptor, wanted, begin)
        finally:
            self._files.close(descriptor)
        if size != segment.segment_bytes or len(window) != wanted:
            raise damaged(segment.path, size, self._offset, f"{size} bytes of {segment.segment_bytes}")
        at = self._header_bytes(window) if begin == 0 else 0
        self._entries(memoryview(window)[at:], begin + at)
        if self.position < segment.segment_bytes:
            return False
        self._check_end()
        return True

    def _header_bytes(self, window: bytes) -> int:
        encoded = self.segment.header.encode()
        if window[: len(encoded)] != encoded:
            raise damaged(self.segment.path, 0, self._offset, "its header is not what was written")
        self.position = len(encoded)
        return len(encoded)

    def _entries(self, window: memoryview, at: int) -> None:
        segment, header = self.segment, self.segment.header
        entries, stopped = scan_window(
            window, at=at, salt=header.salt, shard=header.identity.shard, verify_body=True
        )
        for entry in entries:
            if entry.base_offset != self._offset and not (header.span and entry.base_offset > self._offset):
                raise damaged(
                    segment.path,
                    entry.position,
                    self._offset,
                    f"offset {entry.base_offset} stands where {self._offset} is next",
                )
            if entry.header is not None:
                self._batches += 1
                self._records += entry.header.records
            self._offset, self.position = entry.next_offset, entry.end
        # An entry that only the window cuts off stands whole at the beginning of the next one.
        cut_by_window = (
            isinstance(stopped, EntryIncompleteError)
            and bool(entries)
            and self.position + stopped.needed <= segment.segment_bytes
        )
        if stopped is not None and not cut_by_window:
            raise damaged(segment.path, self.position, self._offset, str(stopped))

    def _check_end(self) -> None:
        segment, span = self.segment, self.segment.header.span
        if span is None:
            if self._offset != segment.next_offset:
                raise damaged(
                    segment.path, self.position, self._offset, f"it ends before {segment.next_offset}"
                )
        elif (self._batches, self._records) != (span.batches, span.records) or self._offset > span.end_offset:
            raise damaged(segment.path, self.position, self._offset, "it does not hold what its header says")
