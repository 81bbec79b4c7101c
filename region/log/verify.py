"""Verification of a shard's folder at rest: every byte is looked at, nothing is changed. Blocking; for `felix log verify`.

The steps, numbered as in docs/log.md:

1. every file is one of the log's; what a crash may leave behind is named, and is no damage;
2. each segment's header holds, names this shard, and agrees with the file's name;
3. each entry decodes, with the checksums of its own header, its batch's header and its body; offsets follow each other
   (in a compacted segment they only rise, and the number of batches and records is its header's); neither append
   times nor leader epochs go back; `synced_to` stays within the file;
4. each segment ends where the next one begins, and the next one says behind how many positions that is;
5. the mark decodes, names the oldest and the newest segment, and what it says was synced is there. Bytes behind that in
   the newest segment which do not decode are a torn tail: recovery will cut them, and nothing acknowledged is in them;
6. indexes, the epochs' history, the producers' snapshot and the state of compaction decode and agree with the segments.
   All but the last are made anew where they do not: a note;
7. with `open_batch`: each batch is sealed, opens with its key, and its records decode;
8. segments that are in a store stand in their places between the others; with `check_object` each is read there and
   compared with what was uploaded.

A finding that is damage means that the shard would be refused, or records of it cannot be read; a note does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from felix.batch import FLAG_SEALED, HEADER_BYTES, Batch, decode_records
from felix.errors import CorruptionError, FelixError
from felix.storage.disk import DiskFiles
from felix.storage.port import Files
from felix.storage.small_file import TEMPORARY_SUFFIX, load_checked, read_file
from region.log.ahead import AHEAD_NAMES
from region.log.compaction import COMPACTION_NAME, CompactionState, decode_compaction
from region.log.durable_mark import MARK_NAME, Mark, decode_mark
from region.log.index import INDEX_SUFFIX, SparseIndex, decode_index
from region.log.offload import FETCHED_SUFFIX, OFFLOADED_NAME, Offloaded, OffloadState, decode_offload
from region.log.point import LogPoint, PointCounter
from region.log.producer_snapshots import PRODUCERS_NAME, parse_snapshot_name
from region.log.producers import decode_snapshot
from region.log.recovery import EPOCHS_NAME, decode_epochs, evidence_beyond, judge_tail
from region.log.segment import (
    HEADER_BYTES_MAX,
    SEGMENT_SUFFIX,
    EntryDamagedError,
    SegmentEntry,
    SegmentHeader,
    ShardIdentity,
    decode_segment_header,
    parse_segment_name,
    segment_name,
)
from region.log.segment_scan import scan_bytes

FINDINGS_MAX: Final = 1_000
"""Of one shard: a folder of rubbish must not fill the memory with sentences."""
SMALL_FILES: Final = (MARK_NAME, EPOCHS_NAME, PRODUCERS_NAME, COMPACTION_NAME, OFFLOADED_NAME, *AHEAD_NAMES)

OpenBatch = Callable[[Batch], Batch]
CheckObject = Callable[[Offloaded], None]
Progress = Callable[[int], None]
"""Called with the bytes that were looked at since the last call."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong and where. `position` in bytes; `offset` in records, -1 where it concerns none."""

    file: str
    position: int
    offset: int
    what: str
    is_damage: bool = True


@dataclass(slots=True)
class ShardVerdict:
    """One shard, counted and judged. Offsets from `log_start` up to, not including, `log_end`."""

    stream: str
    incarnation: str
    shard: int
    segments: int = 0
    compacted_segments: int = 0
    segment_bytes: int = 0
    batches: int = 0
    records: int = 0
    opened: int = 0
    offloaded_segments: int = 0
    offloaded_bytes: int = 0
    objects_compared: int = 0
    log_start: int = 0
    log_end: int = 0
    torn_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    findings_left_out: int = 0

    @property
    def is_whole(self) -> bool:
        """True where nothing is damaged."""
        return not any(finding.is_damage for finding in self.findings)


@dataclass(slots=True)
class _Segment:
    path: Path
    header: SegmentHeader
    start: int
    size: int
    index: SparseIndex


class _Verification:
    def __init__(
        self,
        folder: Path,
        identity: ShardIdentity,
        files: Files,
        open_batch: OpenBatch | None,
        progress: Progress,
        check_object: CheckObject | None,
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._files = files
        self._open = open_batch
        self._progress = progress
        self._check_object = check_object
        self._offload = OffloadState()
        self._time_ms = self._epoch = -1
        self._reached: LogPoint | None = None
        """Where the log stands behind the segment before, where that has all of its entries."""
        self.verdict = ShardVerdict(identity.stream, identity.incarnation.hex(), identity.shard)

    def _find(
        self, path: Path, what: str, *, position: int = 0, offset: int = -1, is_damage: bool = True
    ) -> None:
        if len(self.verdict.findings) >= FINDINGS_MAX:
            self.verdict.findings_left_out += 1
            return
        self.verdict.findings.append(Finding(str(path), position, offset, what, is_damage))

    def _note(self, path: Path, what: str) -> None:
        self._find(path, what, is_damage=False)

    def run(self) -> ShardVerdict:
        self._offload = self._load_offload()
        paths = self._names()  # 1
        if not paths and self._files.exists(self._folder / OFFLOADED_NAME):
            self._find(
                self._folder / OFFLOADED_NAME,
                "it names what of the log is in a store, and no segment is here: the log was lost, or its restoration was broken off",
            )
        mark_bytes = read_file(self._files, self._folder / MARK_NAME)
        mark = decode_mark(mark_bytes or b"")
        if mark_bytes is not None and mark is None:
            self._note(self._folder / MARK_NAME, "the mark does not decode")
        segments = [found for path in paths if (found := self._header(path)) is not None]  # 2
        segments = self._without_leftovers(segments, mark)
        for segment in segments:
            self._scan(segment, mark, is_last=segment is segments[-1])  # 3, 5, 7
        places = [(one.header.base_offset, one.index.next_offset, one.path) for one in segments]
        local = {base for base, _, _ in places}
        places += [place for place in self._offloaded(mark) if place[0] not in local]  # 8
        places.sort(key=lambda place: place[0])
        self._follow(places)  # 4
        self._check_mark(places, mark)  # 5
        self._check_small_files(segments)  # 6
        return self.verdict

    def _load_offload(self) -> OffloadState:
        path = self._folder / OFFLOADED_NAME
        payload = load_checked(self._files, path)
        if payload is None:
            if self._files.exists(path):
                self._find(path, "its checksum does not hold, and it names the segments that are in a store")
            return OffloadState()
        try:
            return decode_offload(payload)
        except CorruptionError as error:
            self._find(path, error.sentence.rstrip("."))
            return OffloadState()

    def _offloaded(self, mark: Mark | None) -> list[tuple[int, int, Path]]:
        """8: the segments in a store, as places in the log; those that are local as well left out by the caller."""
        places = []
        path = self._folder / OFFLOADED_NAME
        for entry in self._offload.segments:
            header = entry.segment_header
            if mark and header.base_offset < mark.log_start:
                self._note(path, f"{entry.url} is left by an interrupted deletion")
                continue
            self.verdict.offloaded_segments += 1
            self.verdict.offloaded_bytes += entry.segment_bytes
            if header.identity != self._identity:
                self._find(path, f"{entry.url} belongs to {header.identity}", offset=header.base_offset)
            if self._check_object is not None:
                try:
                    self._check_object(entry)
                    self.verdict.objects_compared += 1
                except FelixError as error:
                    self._find(path, error.sentence.rstrip("."), offset=header.base_offset)
            places.append((header.base_offset, entry.next_offset, path))
        return places

    def _names(self) -> list[Path]:
        segments = []
        for name in self._files.names(self._folder):
            path = self._folder / name
            if path.name.endswith(TEMPORARY_SUFFIX):
                self._note(path, "left by a crash; the next start removes it")
            elif path.suffix == SEGMENT_SUFFIX:
                if parse_segment_name(path.name) is None:
                    self._find(path, "this is not the name of a segment")
                else:
                    segments.append(path)
            elif path.suffix == INDEX_SUFFIX:
                offloaded = {segment_name(one.base_offset) for one in self._offload.segments}
                segment = path.with_suffix(SEGMENT_SUFFIX)
                if not self._files.exists(segment) and segment.name not in offloaded:
                    self._note(path, "an index without its segment")
            elif path.suffix == FETCHED_SUFFIX:
                self._note(path, "a copy for reading; the next start removes it")
            elif path.name not in SMALL_FILES and parse_snapshot_name(path.name) is None:
                self._note(path, "not a file of the log")
        return sorted(segments, key=lambda path: parse_segment_name(path.name) or (0, 0))

    def _header(self, path: Path) -> _Segment | None:
        descriptor = self._files.open(path, os.O_RDONLY)
        try:
            header, start = decode_segment_header(self._files.pread(descriptor, HEADER_BYTES_MAX, 0))
            size = self._files.size(descriptor)
        except CorruptionError as error:
            self._find(path, error.sentence.rstrip("."))
            return None
        finally:
            self._files.close(descriptor)
        generation = header.span.generation if header.span else 0
        if header.identity != self._identity:
            self._find(path, f"it belongs to {header.identity}, not to {self._identity}")
            return None
        if parse_segment_name(path.name) != (header.base_offset, generation):
            self._find(path, "its name states another base offset or generation", offset=header.base_offset)
        if header.span and header.span.segment_bytes != size:
            self._find(
                path, f"{size} bytes of {header.span.segment_bytes}", position=size, offset=header.base_offset
            )
        return _Segment(path, header, start, size, SparseIndex(header.base_offset, start))

    def _without_leftovers(self, segments: list[_Segment], mark: Mark | None) -> list[_Segment]:
        """What an interrupted deletion or compaction left is not part of the log any more."""
        kept = []
        for segment in segments:
            base = segment.header.base_offset
            if mark and base < mark.log_start:
                self._note(segment.path, "left by an interrupted deletion; the next start removes it")
            elif any(_replaces(other.header, segment.header) for other in segments):
                self._note(segment.path, "left by an interrupted compaction; the next start removes it")
            else:
                kept.append(segment)
        return kept

    def _scan(self, segment: _Segment, mark: Mark | None, *, is_last: bool) -> None:
        verdict, header, index = self.verdict, segment.header, segment.index
        verdict.segments += 1
        verdict.compacted_segments += header.span is not None
        verdict.segment_bytes += segment.size
        batches, records = verdict.batches, verdict.records
        counter = self._begin_counting(segment)
        descriptor = self._files.open(segment.path, os.O_RDONLY)
        evidence = segment.start
        if mark and is_last and mark.segment == header.base_offset:
            evidence = max(evidence, mark.synced_to)
        stopped: EntryDamagedError | None = None
        try:
            try:
                for entry, data in scan_bytes(
                    self._files, descriptor, header, segment.start, segment.size, verify_bodies=True
                ):
                    self._entry(segment, entry, data)
                    counter.follow(entry)
                    evidence = max(evidence, entry.synced_to)
                    self._progress(entry.length)
            except EntryDamagedError as error:
                stopped = error
            position = index.segment_bytes
            highest, beyond = (
                evidence_beyond(self._files, descriptor, header, position, segment.size)
                if stopped
                else (0, 0)
            )
        finally:
            self._files.close(descriptor)
        if stopped and not is_last:
            self._find(segment.path, str(stopped), position=position, offset=index.next_offset)
        elif is_last:
            reason = judge_tail(
                position=position,
                segment_bytes=segment.size,
                evidence=max(evidence, highest),
                mark_readable=mark is not None,
                entries_beyond=beyond,
            )
            if reason:
                what = f"{stopped}; {reason}" if stopped else reason
                self._find(segment.path, what, position=position, offset=index.next_offset)
            elif stopped:
                verdict.torn_bytes = segment.size - position
                self._note(
                    segment.path,
                    f"a torn tail of {segment.size - position} bytes, never acknowledged; the next start cuts it",
                )
        self._reached = None if stopped or header.span else counter.point
        if span := header.span:
            found = verdict.batches - batches, verdict.records - records
            if not stopped and found != (span.batches, span.records):
                self._find(
                    segment.path,
                    f"{found[0]} batches with {found[1]} records where its header says {span.batches} with "
                    f"{span.records}",
                    position=segment.size,
                )
            if span.end_offset >= index.next_offset:
                index.end_at(span.end_offset)

    def _begin_counting(self, segment: _Segment) -> PointCounter:
        """4: of the points; the offsets are `_follow`'s."""
        header, reached = segment.header, self._reached
        known = reached.note if reached and reached.offset == header.base_offset else None
        if header.head is None:
            return PointCounter(header, known or 0)
        if known is not None and header.head.note != known:
            self._find(
                segment.path,
                f"it begins behind {header.head.note} positions, but {known} stand before it",
                offset=header.base_offset,
            )
        return PointCounter(header, header.head.note)

    def _entry(self, segment: _Segment, entry: SegmentEntry, data: memoryview) -> None:
        index, path = segment.index, segment.path
        holes = segment.header.span is not None
        if entry.base_offset != index.next_offset and not (holes and entry.base_offset > index.next_offset):
            self._find(
                path,
                f"offset {entry.base_offset} follows where {index.next_offset} is next",
                position=entry.position,
                offset=index.next_offset,
            )
            # Go on from what is there: one hole is one finding.
            index.next_offset = max(index.next_offset, entry.base_offset)
        if entry.synced_to > entry.position:
            self._find(
                path,
                "it claims that bytes behind it were synced",
                position=entry.position,
                offset=entry.base_offset,
            )
        header = entry.header
        if header is None:
            index.add_position(entry.end)
            return
        if header.base_offset >= index.next_offset:
            index.add(
                header.base_offset, header.next_offset, entry.position, entry.end, header.append_time_ms
            )
        else:
            index.add_position(entry.end)
        self.verdict.batches += 1
        self.verdict.records += header.records
        for what, value, newest in (
            ("append time", header.append_time_ms, self._time_ms),
            ("leader epoch", header.leader_epoch, self._epoch),
        ):
            if value < newest:
                self._find(
                    path,
                    f"its {what} {value} is before {newest}",
                    position=entry.position,
                    offset=header.base_offset,
                )
        self._time_ms = max(self._time_ms, header.append_time_ms)
        self._epoch = max(self._epoch, header.leader_epoch)
        if self._open is not None:
            self._unseal(segment, entry, data)

    def _unseal(self, segment: _Segment, entry: SegmentEntry, data: memoryview) -> None:
        header, open_batch = entry.header, self._open
        assert header is not None and open_batch is not None
        what = ""
        if not header.flags & FLAG_SEALED:
            what = "it is not sealed"
        else:
            body = data[entry.length - header.total_length + HEADER_BYTES :]
            try:
                for _ in decode_records(open_batch(Batch(header, body))):
                    pass
                self.verdict.opened += 1
            except FelixError as error:
                what = error.sentence.rstrip(".")
        if what:
            self._find(segment.path, what, position=entry.position, offset=header.base_offset)

    def _follow(self, places: list[tuple[int, int, Path]]) -> None:
        if places:
            self.verdict.log_start, self.verdict.log_end = places[0][0], places[-1][1]
        for (_, next_offset, path), (following, _, _) in pairwise(places):
            if next_offset != following:
                self._find(
                    path,
                    f"the segment ends at offset {next_offset}, but the next one begins at {following}",
                    offset=next_offset,
                )

    def _check_mark(self, places: list[tuple[int, int, Path]], mark: Mark | None) -> None:
        if mark is None:
            return
        for what, wanted, found in (
            ("oldest", mark.log_start, places[0][0] if places else -1),
            ("newest", mark.segment, places[-1][0] if places else -1),
        ):
            # A crash between creating a segment and writing the mark leaves a newer one than it names.
            if found != wanted and not (what == "newest" and found > wanted):
                self._find(
                    self._folder,
                    f"the {what} segment begins at offset {wanted}, and it is missing",
                    offset=wanted,
                )

    def _check_small_files(self, segments: list[_Segment]) -> None:
        files, folder = self._files, self._folder
        for segment in segments[:-1]:
            path = segment.path.with_suffix(INDEX_SUFFIX)
            stored = read_file(files, path)
            index = stored and decode_index(
                stored,
                base_offset=segment.header.base_offset,
                segment_bytes=segment.size,
                start=segment.start,
            )
            if not index or index.encode() != segment.index.encode():
                self._note(path, "missing, damaged or of another segment; it is made anew from its segment")
        payload = self._payload(EPOCHS_NAME)
        if payload is not None:
            history = decode_epochs(payload)
            if history is None:
                self._note(folder / EPOCHS_NAME, "it does not decode; it is made anew from the batches")
            elif self._epoch > history.current:
                self._note(
                    folder / EPOCHS_NAME, f"it ends at epoch {history.current}, the batches at {self._epoch}"
                )
        for name in (PRODUCERS_NAME, *files.names(folder)):
            if name != PRODUCERS_NAME and parse_snapshot_name(name) is None:
                continue
            payload = self._payload(name)
            if payload is not None:
                self._snapshot(folder / name, payload)
        compacted_to = max((one.header.span.end_offset for one in segments if one.header.span), default=0)
        state = CompactionState()
        payload = self._payload(COMPACTION_NAME)
        if payload is not None:
            state = decode_compaction(payload) or state
            if state.producers:
                self._snapshot(folder / COMPACTION_NAME, state.producers)
        if compacted_to and state == CompactionState():
            self._note(
                folder / COMPACTION_NAME, "missing or damaged; the shard is compacted again from its start"
            )

    def _payload(self, name: str) -> bytes | None:
        payload = load_checked(self._files, self._folder / name)
        if payload is None and self._files.exists(self._folder / name):
            self._note(self._folder / name, "its checksum does not hold; it is made anew")
        return payload

    def _snapshot(self, path: Path, payload: bytes) -> None:
        try:
            _, offset = decode_snapshot(payload)
        except CorruptionError as error:
            self._note(path, error.sentence.rstrip("."))
            return
        named = parse_snapshot_name(path.name)
        if named is not None and named != offset:
            self._note(path, f"it is of what stands below offset {offset}; it is not used")


def _replaces(other: SegmentHeader, segment: SegmentHeader) -> bool:
    """Whether compaction wrote `other` in place of `segment`."""
    if other.span is None:
        return False
    generation = segment.span.generation if segment.span else 0
    return (
        generation < other.span.generation
        and other.base_offset <= segment.base_offset < other.span.end_offset
    )


def verify_shard(
    folder: Path,
    identity: ShardIdentity,
    *,
    files: Files | None = None,
    open_batch: OpenBatch | None = None,
    progress: Progress = lambda _: None,
    check_object: CheckObject | None = None,
) -> ShardVerdict:
    """Look at every byte of a shard that no broker serves at the moment. Raises OSError where a file cannot be read."""
    return _Verification(folder, identity, files or DiskFiles(), open_batch, progress, check_object).run()


def shard_bytes(folder: Path) -> int:
    """Bytes of a shard's segments, for showing how far a verification is."""
    return sum(path.stat().st_size for path in _segments_of(folder))


def _segments_of(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.suffix == SEGMENT_SUFFIX)
