"""One segment of a log, as the log keeps it in memory, and what follows from several of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from felix.storage.port import Files, lacks_resources, write_all
from region.log.index import INDEX_SUFFIX, SparseIndex
from region.log.offload import FETCHED_SUFFIX, Offloaded
from region.log.point import LogPoint, PointCounter
from region.log.segment import SegmentHeader


@dataclass(slots=True)
class SegmentState:
    """One segment file, as the log keeps it in memory. `index` of a closed segment is loaded when it is asked for."""

    path: Path
    header: SegmentHeader
    start: int
    next_offset: int
    segment_bytes: int
    last_time_ms: int
    index: SparseIndex | None
    remote: Offloaded | None = None
    """Where a verified copy is."""
    is_local: bool = True
    """False once the local file was let go; never so without `remote`."""
    base_note: int = 0
    """Position entries between the last batch before the segment and its beginning."""
    end_note: int = 0
    """Those behind its last batch, or behind the one before it where it has none. 0 where they are not known: in a compacted
    segment, and in one that is in a store only."""

    @property
    def fetched_path(self) -> Path:
        """Where a copy for reading is kept for a while, of a segment that is not local."""
        return self.path.with_suffix(FETCHED_SUFFIX)

    @property
    def base_offset(self) -> int:
        """The first offset of the segment."""
        return self.header.base_offset

    @property
    def base_point(self) -> LogPoint:
        """Where the log stands before the segment's first own entry."""
        return LogPoint(self.header.base_offset, self.base_note)

    @property
    def end_point(self) -> LogPoint:
        """Where the log stands behind its last entry."""
        return LogPoint(self.next_offset, self.end_note)

    @property
    def generation(self) -> int:
        """0, or which compaction wrote it."""
        return self.header.span.generation if self.header.span else 0

    @property
    def index_path(self) -> Path:
        """Where the segment's index is kept."""
        return self.path.with_suffix(INDEX_SUFFIX)


def told_from(segments: Sequence[SegmentState]) -> int:
    """Below this offset the log no longer has all its batches within reach: what producers did there only snapshots know."""
    gone = [one.next_offset for one in segments if one.header.span or not one.is_local]
    return max([*(one.base_offset for one in segments[:1]), *gone], default=0)


def counter_of(header: SegmentHeader, before: SegmentState | None) -> PointCounter:
    """Of a segment that follows `before`. Version 1 does not say at which point it begins: the one before it tells, or it is 0."""
    if header.head:
        return PointCounter(header, header.head.note)
    return PointCounter(header, before.end_note if before and not header.span else 0)


def write_index(files: Files, path: Path, encoded: bytes) -> None:
    """Write an index file. Neither synced nor insisted on: a torn or missing one is made anew from its segment."""
    try:
        descriptor = files.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(files, descriptor, (encoded,), 0)
        finally:
            files.close(descriptor)
    except OSError as error:
        if not lacks_resources(error):
            raise


def in_store(path: Path, entry: Offloaded, base_note: int, end_note: int = 0) -> SegmentState:
    """A segment of this log whose bytes are a store's alone: they may be another copy's file, with another salt and length. `path`: where its file
    was; notes as `SegmentState` has them."""
    return SegmentState(
        path,
        entry.segment_header,
        len(entry.header),
        entry.next_offset,
        entry.segment_bytes,
        entry.last_time_ms,
        None,
        entry,
        is_local=False,
        base_note=base_note,
        end_note=end_note,
    )
