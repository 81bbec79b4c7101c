"""The compactor: one pass over a shard's closed segments. Blocking: a thread of its own, never the event loop.

What goes is region.log.compaction's decision; here are the files. A group of neighbouring segments is copied into one
new file under another name, synced, and takes their place in one rename (DiskLog.replace_segments); groups go oldest
first. At every moment the folder holds the log: before the rename the old segments, after it the new one, and what a
crash leaves of either is told apart by the generation in the new one's header (region.log.recovery).

Batches that keep all their records are copied as they stand, seal and all. Of others each run of consecutive records
that stay becomes a batch, sealed anew with a key of its own leader epoch: base offset and sequence move on, append
time, epoch and producer stay. Annotations of closed segments are not copied: the newest of every slot stand in the
active one.

Before the first rename it is durable how far tombstones may be gone, up to where keys were learned, below which the log cannot be cut any more, and
what the producers' table and the epochs' history were: both are no longer in the batches afterwards.

Where there is no room, or a key is gone, the pass ends and the segments stay as they are.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from felix.batch import (
    FLAG_KEYED,
    HEADER_BYTES,
    Batch,
    BatchHeader,
    cut_batch,
    decode_records,
)
from felix.errors import Code, RequestError, UnavailableError
from felix.storage.port import Files, write_all
from felix.storage.small_file import TEMPORARY_SUFFIX
from region.log.compaction import (
    KEYS_BYTES_MAX,
    CompactionReport,
    CompactionState,
    KeyMap,
    Pace,
    Verdicts,
    judge,
)
from region.log.disk import DiskLog
from region.log.epochs import EpochStart
from region.log.index import SparseIndex
from region.log.segment import (
    EntryDamagedError,
    Kind,
    SegmentHeader,
    Span,
    encode_entry_header,
    segment_name,
)
from region.log.segment_scan import damaged, scan_bytes
from region.log.segment_state import SegmentState

WRITE_BYTES: Final = 1 << 20
"""Gathered before a write."""
ROOM_BYTES_MIN: Final = 64 << 20
"""Left free beside what a group's copy may take: appends come first."""

Transform = Callable[[Batch], Batch]


class WorkEndedError(UnavailableError):
    """Work in the background was asked to end, because the shard closes; nothing is wrong."""

    default_code = Code.SHUTTING_DOWN

    def __init__(self) -> None:
        super().__init__("The shard is closing.")


@dataclass(frozen=True, slots=True)
class PassSettings:
    """What a pass is asked for. Times in ms; `below` is the offset that no segment of the pass reaches past."""

    now_ms: int
    lag_ms: int
    tombstone_ms: int
    below: int
    keys_bytes_max: int = KEYS_BYTES_MAX


class Compactor:
    """One pass. `writer` is held while the folder's segments are exchanged, and for no longer."""

    def __init__(
        self,
        disk: DiskLog,
        files: Files,
        settings: PassSettings,
        *,
        seal: Transform,
        open_batch: Transform,
        writer: AbstractContextManager[object],
        pace: Pace,
    ) -> None:
        self._disk = disk
        self._files = files
        self._settings = settings
        self._seal = seal
        self._open = open_batch
        self._writer = writer
        self._pace = pace
        self._keys = KeyMap(settings.keys_bytes_max)
        self._read = self._written = self._removed = self._tombstones = 0
        self._segments_read = self._segments_written = 0

    def run(self, producers: bytes, epochs: Sequence[EpochStart]) -> CompactionReport | None:
        """The pass; None where there is nothing to compact. `producers` is a snapshot that covers all closed segments.

        Raises CorruptionError, OSError (the disk is full, or worse), what opening or sealing raises, and whatever
        `pace` ends the pass with. Groups that were exchanged before that stay exchanged: each is a step of its own.
        """
        disk, settings = self._disk, self._settings
        monotonic_ns = disk.runtime.clock.monotonic_ns
        begun, cuts = monotonic_ns(), disk.cuts
        segments = [one for one in disk.segments[:-1] if one.next_offset <= settings.below]
        before = disk.compaction
        scan_end = self._learn(segments, before.clean_to)
        if scan_end <= before.clean_to:
            return None
        segments = [one for one in segments if one.base_offset < scan_end]
        fixed_to = before.fixed_to
        state = CompactionState(
            before.clean_to, before.tombstones_from, producers, tuple(epochs), learned_to=fixed_to
        )
        with self._writer:
            if disk.cuts != cuts:
                return None
            disk.save_compaction(state)
        last = segments[-1]
        while segments:
            group, written, last_tombstone = self._copy(segments, scan_end, last)
            segments = segments[len(group) :]
            if written is None:
                continue
            try:
                known = msgspec.structs.replace(
                    state,
                    tombstones_from=max(state.tombstones_from, last_tombstone + 1),
                    learned_to=max(state.learned_to, scan_end),
                )
                with self._writer:
                    if disk.cuts != cuts:
                        # What was learned may stand there no more.
                        return None
                    if known != state:
                        disk.save_compaction(known)
                        state = known
                    exchanged = disk.replace_segments(group, written, _aside(written.path))
            finally:
                self._files.remove(_aside(written.path))
            if not exchanged:
                # Retention took them in the meantime, or they are in a store: the stream is offloaded by now.
                return None
        with self._writer:
            if disk.cuts != cuts:
                return None
            disk.save_compaction(msgspec.structs.replace(state, clean_to=scan_end))
        return CompactionReport(
            self._segments_read,
            self._segments_written,
            self._read,
            self._written,
            self._removed,
            self._tombstones,
            scan_end,
            monotonic_ns() - begun,
        )

    def _batches(self, segment: SegmentState, offset: int = 0) -> Iterator[tuple[BatchHeader, memoryview]]:
        """The batches of a segment that reach past `offset`, each whole and verified, `pace` called before each."""
        position = self._disk.position_for_offset(segment, offset)
        self._segments_read += 1
        descriptor = self._files.open(segment.path, os.O_RDONLY)
        try:
            for entry, data in scan_bytes(
                self._files,
                descriptor,
                segment.header,
                position,
                segment.segment_bytes,
                verify_bodies=True,
            ):
                position = entry.end
                self._read += entry.length
                header = entry.header
                if header and header.next_offset > offset:
                    self._pace()
                    yield header, data[entry.length - header.total_length :]
        except EntryDamagedError as error:
            raise damaged(segment.path, position, segment.base_offset, str(error)) from error
        finally:
            self._files.close(descriptor)

    def _plain(self, header: BatchHeader, data: memoryview) -> Batch:
        batch = Batch(header, data[HEADER_BYTES:])
        return self._open(batch)

    def _learn(self, segments: Sequence[SegmentState], clean_to: int) -> int:
        """Fill the map from the dirty end; the offset up to which it knows every key's last record."""
        settings = self._settings
        reached = clean_to
        for segment in segments:
            if segment.next_offset <= clean_to:
                continue
            for header, data in self._batches(segment, clean_to):
                if header.append_time_ms > settings.now_ms - settings.lag_ms or self._keys.is_full:
                    return reached
                if header.flags & FLAG_KEYED:
                    self._keys.add(decode_records(self._plain(header, data)))
                reached = header.next_offset
            reached = segment.next_offset
        return reached

    def _copy(
        self, segments: Sequence[SegmentState], scan_end: int, last: SegmentState
    ) -> tuple[list[SegmentState], SegmentState | None, int]:
        """Copy the first of `segments`, and as many behind it as fit; None where nothing would change by it.

        The new segment is written and synced under its name aside. Also the last tombstone that was left out, or -1.
        """
        first = segments[0]
        group: list[SegmentState] = []
        removed_before, last_tombstone = self._removed, -1
        aside_path: Path | None = None
        writer = _SegmentWriter(self._disk.folder, self._files, first, self._disk.new_salt())
        try:
            for segment in segments:
                if group and writer.length + segment.segment_bytes > self._disk.limits.segment_bytes_max:
                    break
                self._check_room(segment.segment_bytes)
                group.append(segment)
                keep = segment.next_offset - 1 if segment is last else -1
                for header, data in self._batches(segment):
                    last_tombstone = max(
                        last_tombstone, self._copy_batch(writer, header, data, scan_end, keep)
                    )
            if self._removed == removed_before and len(group) == 1:
                return group, None, -1
            generation = max(one.generation for one in group) + 1
            written = writer.finish(group[-1].next_offset, generation)
            aside_path = _aside(written.path)
            self._written += written.segment_bytes
            self._segments_written += 1
            return group, written, last_tombstone
        finally:
            writer.close(keep=aside_path)

    def _copy_batch(
        self, writer: _SegmentWriter, header: BatchHeader, data: memoryview, scan_end: int, keep: int
    ) -> int:
        """Copy what stays of one batch; the last tombstone left out, or -1."""
        if header.base_offset >= scan_end or not header.flags & FLAG_KEYED:
            writer.add(header, data[HEADER_BYTES:])
            return -1
        settings = self._settings
        plain = self._plain(header, data)
        records = list(decode_records(plain))
        verdicts = judge(
            records, self._keys, tombstones_before_ms=settings.now_ms - settings.tombstone_ms, keep=keep
        )
        if not verdicts.removed:
            writer.add(header, data[HEADER_BYTES:])
            return -1
        self._removed += verdicts.removed
        self._tombstones += verdicts.tombstones_removed
        for run in self._runs(plain, verdicts):
            sealed = self._seal(run)
            writer.add(sealed.header, sealed.body)
        return verdicts.last_tombstone

    def _runs(self, plain: Batch, verdicts: Verdicts) -> Iterator[Batch]:
        pending = verdicts.runs[::-1]
        while pending:
            first, count = pending.pop()
            try:
                yield cut_batch(plain, first, count)
            except RequestError:
                # A producer that compresses harder than we do: its parts need more room than the whole.
                if count == 1:
                    raise
                half = count // 2
                pending += [(first + half, count - half), (first, half)]

    def _check_room(self, wanted: int) -> None:
        if self._files.free_bytes(self._disk.folder) < wanted + ROOM_BYTES_MIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._disk.folder))


class _SegmentWriter:
    """A compacted segment on its way: entries behind a place for its header, which is written last."""

    def __init__(self, folder: Path, files: Files, first: SegmentState, salt: int) -> None:
        self._folder = folder
        self._files = files
        header = first.header
        self._header = SegmentHeader(
            header.identity,
            header.base_offset,
            header.created_ms,
            salt,
            header.commitment,
            Span(header.base_offset + 1, 0, 0, 0, 1),
        )
        self._start = self.length = len(self._header.encode())
        self._index = SparseIndex(header.base_offset, self._start)
        self._batches = self._records = 0
        self._buffers: list[bytes | memoryview] = [bytes(self._start)]
        self._buffered = self._flushed = 0
        # Known by its base offset until its generation is: one pass writes one file at a time.
        self._path = _aside(folder / segment_name(header.base_offset, first.generation + 1))
        self._descriptor = files.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def add(self, header: BatchHeader, body: bytes | memoryview) -> None:
        entry = encode_entry_header(
            Kind.BATCH,
            base_offset=header.base_offset,
            leader_epoch=header.leader_epoch,
            synced_to=0,
            batch_length=header.total_length,
            slot=0,
            annotation=b"",
            salt=self._header.salt,
        )
        begin = self.length
        self.length += len(entry) + header.total_length
        self._index.add(header.base_offset, header.next_offset, begin, self.length, header.append_time_ms)
        self._buffers += (entry, header.encode(), body)
        self._batches += 1
        self._records += header.records
        self._buffered += len(entry) + header.total_length
        if self._buffered >= WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._flushed = write_all(self._files, self._descriptor, self._buffers, self._flushed)
        self._buffers, self._buffered = [], 0

    def finish(self, end_offset: int, generation: int) -> SegmentState:
        """Header and sync; the file is whole under its name aside. Its index is in the state."""
        self._flush()
        assert self._flushed == self.length
        index = self._index
        index.end_at(end_offset)
        span = Span(end_offset, self.length, self._batches, self._records, generation)
        header = SegmentHeader(
            self._header.identity,
            self._header.base_offset,
            self._header.created_ms,
            self._header.salt,
            self._header.commitment,
            span,
        )
        encoded = header.encode()
        assert len(encoded) == self._start
        write_all(self._files, self._descriptor, (encoded,), 0)
        self._files.sync(self._descriptor)
        path = self._folder / segment_name(header.base_offset, generation)
        if _aside(path) != self._path:
            self._files.rename(self._path, _aside(path))
        return SegmentState(path, header, self._start, end_offset, self.length, index.last_time_ms, index)

    def close(self, *, keep: Path | None) -> None:
        """Close the file; remove it unless it was finished."""
        self._files.close(self._descriptor)
        if keep is None:
            with suppress(OSError):
                self._files.remove(self._path)


def _aside(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY_SUFFIX)
