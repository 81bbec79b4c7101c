"""Points of a log: places between its entries, told apart also where only position entries lie between them.

An offset alone does not say where a log ends: a position entry has none of its own, and at one offset a log may hold none, one or
three of them. A point is the same on every copy of a log, whatever their segments are: copies of annotations that a segment begins with
are not counted. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from region.log.segment import SegmentEntry, SegmentHeader


class LogPoint(NamedTuple):
    """A place between entries: below it are all batches below `offset`, and `note` position entries behind the last of them."""

    offset: int
    note: int = 0


class PointCounter:
    """Along the entries of one segment, in their order: where the log stands after each. `note`: where the segment begins."""

    __slots__ = ("_carried", "note", "offset")

    def __init__(self, header: SegmentHeader, note: int) -> None:
        self.offset = header.base_offset
        self.note = note
        # Version 1 does not say how many are copies: they alone have no leader's epoch, where a broker wrote them.
        self._carried = header.head.carried if header.head else -1

    @property
    def point(self) -> LogPoint:
        """After the last entry that was followed."""
        return LogPoint(self.offset, self.note)

    def stand_at(self, point: LogPoint) -> None:
        """Go on from here, where one of the log's own entries begins."""
        self.offset, self.note = point
        self._carried = 0

    def follow(self, entry: SegmentEntry) -> bool:
        """Whether `entry` is one of the log's own; False for a copy of an annotation that the segment begins with."""
        if entry.header is not None:
            self.offset, self.note, self._carried = entry.next_offset, 0, 0
            return True
        if self._carried and (self._carried > 0 or entry.leader_epoch == 0):
            self._carried -= self._carried > 0
            return False
        self.note += 1
        self._carried = 0
        return True
