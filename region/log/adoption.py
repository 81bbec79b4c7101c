"""A log that begins with another copy's closed segments: files as they stand, scanned, then named. Blocking.

For a copy that is far behind, or whose frames are no longer all there because they were compacted: closed segments come as files, and
frames go on behind them (`DiskLog.write_frames`).

Invariants:
- no file gets a segment's name before every byte of it was verified, and synced;
- until all are named and the active segment stands behind them, the mark names one that is missing: recovery refuses the folder,
  and whoever copies begins anew in another one. It is never taken for a shorter log.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from felix.errors import Code, CorruptionError, RequestError
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.storage.port import Files
from felix.storage.small_file import TEMPORARY_SUFFIX, create_durably, save_checked
from region.log.beginning import beginning, encode_beginning
from region.log.compaction import COMPACTION_NAME, CompactionState, encode_compaction
from region.log.durable_mark import MARK_NAME, Mark
from region.log.index import INDEX_SUFFIX, SparseIndex
from region.log.origin import Origin
from region.log.point import LogPoint, PointCounter
from region.log.producer_snapshots import ProducerSnapshots
from region.log.recovery import EPOCHS_NAME, encode_epochs
from region.log.segment import (
    HEADER_BYTES_MAX,
    SEGMENT_SUFFIX,
    EntryDamagedError,
    Head,
    SegmentHeader,
    ShardIdentity,
    decode_segment_header,
    no_commitment,
    segment_name,
)
from region.log.segment_scan import damaged, scan_file
from region.log.segment_state import write_index


def adopt_segments(
    folder: Path,
    identity: ShardIdentity,
    asides: Sequence[Path],
    origin: Origin,
    *,
    files: Files,
    now_ms: int,
    compaction: CompactionState | None = None,
    commitment: Callable[[], bytes] = no_commitment,
    runtime: Runtime = REAL,
) -> None:
    """Let the files `asides`, which lie in `folder` under temporary names, oldest first, be the beginning of a log that goes on at
    `origin`, their end. `compaction`: the other copy's state. Afterwards `DiskLog.open` opens the log.

    Raises RequestError(CONFLICT) where the folder holds a log, or what a copy that did not end left of one; CorruptionError where a file
    is not what it should be, with nothing changed; OSError.
    """
    assert asides and all(path.parent == folder and path.suffix == TEMPORARY_SUFFIX for path in asides)
    if any(name == MARK_NAME or name.endswith(SEGMENT_SUFFIX) for name in files.names(folder)):
        raise RequestError(f"{folder} holds a log already.", code=Code.CONFLICT)
    found: list[tuple[SegmentHeader, SparseIndex]] = []
    reached: LogPoint | None = None
    for path in asides:
        header, index, end = _scan(files, path, identity, reached)
        found.append((header, index))
        # Compaction left the positions of its segments out.
        reached = LogPoint(end.offset, origin.point.note if header.span else end.note)
    if reached != origin.point:
        raise damaged(asides[-1], 0, origin.point.offset, f"it ends at {reached}, not at {origin.point}")
    known = beginning(origin)
    snapshot = known.producers.encode(origin.point.offset)
    first = found[0][0].base_offset
    files.close(create_durably(files, folder / MARK_NAME, (Mark(origin.point.offset, 0, first).encode(),)))
    save_checked(files, folder / EPOCHS_NAME, encode_epochs(known.epochs))
    ProducerSnapshots(files, folder).save(snapshot, origin.point.offset)
    if compaction is not None and compaction != CompactionState():
        state = msgspec.structs.replace(
            compaction, producers=snapshot, epochs=known.epochs.starts, learned_to=origin.point.offset
        )
        save_checked(files, folder / COMPACTION_NAME, encode_compaction(state))
    for path, (header, index) in zip(asides, found, strict=True):
        target = folder / segment_name(header.base_offset, header.span.generation if header.span else 0)
        write_index(files, target.with_suffix(INDEX_SUFFIX), index.encode())
        files.rename(path, target)
    files.sync_folder(folder)
    active = SegmentHeader(
        identity,
        origin.point.offset,
        now_ms,
        runtime.random.getrandbits(64),
        commitment(),
        head=Head(origin.point.note, len(known.annotations)),
    )
    path = folder / segment_name(origin.point.offset)
    files.close(create_durably(files, path, encode_beginning(active, known.annotations)))


def _scan(
    files: Files, path: Path, identity: ShardIdentity, reached: LogPoint | None
) -> tuple[SegmentHeader, SparseIndex, LogPoint]:
    """Every byte of a file that is to follow `reached`: its header, its index, and where the log stands behind it. Synced."""
    descriptor = files.open(path, os.O_RDWR)
    try:
        try:
            header, start = decode_segment_header(files.pread(descriptor, HEADER_BYTES_MAX, 0))
        except CorruptionError as error:
            raise damaged(path, 0, 0, error.sentence.rstrip(".")) from error
        if header.identity != identity:
            raise damaged(path, 0, header.base_offset, f"it belongs to {header.identity}, not to {identity}")
        if reached is not None and header.base_offset != reached.offset:
            raise damaged(path, 0, header.base_offset, f"offset {reached.offset} is next")
        size = files.size(descriptor)
        counter = PointCounter(header, header.head.note if header.head else reached.note if reached else 0)
        index = SparseIndex(header.base_offset, start)
        batches = records = 0
        try:
            for entry in scan_file(files, descriptor, header, start, size, verify_bodies=True):
                if entry.base_offset != index.next_offset and not (
                    header.span and entry.base_offset > index.next_offset
                ):
                    raise EntryDamagedError(f"offset {entry.base_offset} where {index.next_offset} is next")
                counter.follow(entry)
                if batch := entry.header:
                    index.add(
                        batch.base_offset, batch.next_offset, entry.position, entry.end, batch.append_time_ms
                    )
                    batches += 1
                    records += batch.records
                else:
                    index.add_position(entry.end)
        except EntryDamagedError as error:
            raise damaged(path, index.segment_bytes, index.next_offset, str(error)) from error
        if span := header.span:
            if (size, batches, records) != (span.segment_bytes, span.batches, span.records):
                raise damaged(path, size, index.next_offset, "it does not hold what its header says")
            index.end_at(span.end_offset)
        files.sync(descriptor)
        return header, index, LogPoint(index.next_offset, counter.note)
    finally:
        files.close(descriptor)
