"""Recovery: what a shard's folder holds after a stop or a crash, and whether it may serve.

The question is always the same: bytes that do not decode, are they a write that a crash interrupted (cut them
and say so) or acknowledged data that was damaged (refuse, and never cut)? The file alone cannot tell, because
one group commit writes many batches and a power loss may keep any of its pages. What tells is *evidence of a
sync*, the highest position of a segment that is known to have been on disk:

1. every segment but the last was synced whole before the next one was created;
2. every entry carries `synced_to`, what was synced when it was written; an entry that decodes, before or
   after the damage, is proof (entries are salted per segment, nothing imitates one);
3. the mark (region.log.durable_mark) is written after each sync and before its acknowledgements.

Rules, in this order:

- damage below the evidence, a segment shorter than it, a missing segment, offsets that do not follow each
  other, a segment of another shard: CorruptionError naming file, position and offset. The shard does not
  serve;
- damage at or above the evidence is a torn tail: nothing from there on was acknowledged under `fsync` (under
  `interval`, at most what its interval allows). It is cut and reported;
- without a readable mark, damage that any decodable entry follows is refused as well: with one kind of
  evidence gone, a doubt goes in favour of the data.

What this promises: after a crash of the process nothing acknowledged is ever cut, because the mark survives
in the page cache. After a loss of power on an honest disk nothing acknowledged is damaged, so nothing
acknowledged is cut. One case stays undecidable on one disk: power is lost *and* the last synced group is
damaged *and* the mark of that very sync (no more than `MARK_SYNC_IDLE_S` old) was not yet on disk; it is
treated as a torn tail, and reported.

Segments that compaction wrote (region.log.compaction) may leave offsets out. Their headers say what they stand for and
what they hold, and are held to it. Segments that lie within the span of one of a later generation are what a crash left
of the ones it replaced: they are deleted, since it was whole on disk before it got its name.

What recovery keeps is on the disk before it returns, whoever wrote it: the folder's names and the mark before anything is
deleted by them, the last segment once it was read. So nothing that is served, told or carried over a border after a restart goes
with the power. Closed segments and small files are synced before they get their names. A shard that was closed in order
(region.log.clean_stop) is on the disk already.

Called once per shard, when it opens, in a thread; nothing else uses the folder then.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from felix.errors import CorruptionError
from felix.storage.port import Files, write_all
from felix.storage.small_file import TEMPORARY_SUFFIX, load_checked, read_file, save_checked
from region.log.compaction import COMPACTION_NAME, CompactionState, decode_compaction, encode_compaction
from region.log.durable_mark import MARK_NAME, Mark, decode_mark
from region.log.epochs import EpochHistory, EpochStart
from region.log.index import INDEX_SUFFIX, SparseIndex, decode_index
from region.log.offload import FETCHED_SUFFIX, OFFLOADED_NAME, OffloadState, decode_offload
from region.log.point import PointCounter
from region.log.producer_snapshots import ProducerSnapshots
from region.log.producers import ProducerTable
from region.log.segment import (
    ENTRY_HEAD_BYTES_MAX,
    HEADER_BYTES_MAX,
    SEGMENT_SUFFIX,
    EntryDamagedError,
    SegmentEntry,
    SegmentHeader,
    ShardIdentity,
    decode_segment_header,
    find_entries,
    parse_segment_name,
    segment_name,
)
from region.log.segment_scan import WINDOW_BYTES, annotate, count_batch, damaged, scan_file
from region.log.segment_state import SegmentState, counter_of, in_store, told_from, write_index

EPOCHS_NAME: Final = "epochs"


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What recovery found. All zero and empty where the log was as its last writer left it."""

    segments: int = 0
    verified_bytes: int = 0
    cut_file: str = ""
    cut_position: int = 0
    cut_bytes: int = 0
    cut_from_offset: int = 0
    cut_reason: str = ""
    indexes_rebuilt: int = 0
    mark_missing: bool = False
    producers_rebuilt: bool = False
    epochs_rebuilt: bool = False


@dataclass(slots=True)
class Recovered:
    """A folder's content: segments oldest first (empty for a new shard) and what was replayed from them."""

    segments: list[SegmentState]
    annotations: dict[int, bytes] = field(default_factory=dict)
    epochs: EpochHistory = field(default_factory=EpochHistory)
    producers: ProducerTable = field(default_factory=ProducerTable)
    report: RecoveryReport = field(default_factory=RecoveryReport)
    compaction: CompactionState = field(default_factory=CompactionState)
    offload: OffloadState = field(default_factory=OffloadState)
    note_is_open: bool = False
    """the last entry is a piece of a note"""


def evidence_beyond(
    files: Files, descriptor: int, segment: SegmentHeader, start: int, end: int
) -> tuple[int, int]:
    """Past damage at `start`: the highest `synced_to` of any entry that decodes, and how many did."""
    highest, count, position = 0, 0, start + 1
    while position < end:
        window = files.pread(descriptor, min(WINDOW_BYTES, end - position), position)
        is_last = len(window) < WINDOW_BYTES
        following = position + len(window) - ENTRY_HEAD_BYTES_MAX
        for entry in find_entries(
            window, at=position, salt=segment.salt, shard=segment.identity.shard, whole=False
        ):
            if is_last or entry.position < following:
                highest = max(highest, entry.synced_to)
                count += 1
        if is_last:
            break
        position = following
    return highest, count


def write_again(files: Files, descriptor: int, start: int, end: int) -> None:
    """Put the bytes of a range where they stand already, so that the next sync has to write them."""
    while start < end:
        window = files.pread(descriptor, min(WINDOW_BYTES, end - start), start)
        start = write_all(files, descriptor, (window,), start)


def judge_tail(
    *, position: int, segment_bytes: int, evidence: int, mark_readable: bool, entries_beyond: int
) -> str | None:
    """Why a last segment that decodes up to `position` must be refused; None where the rest may be cut.

    Pure: the rules of this module's docstring.
    """
    if position < evidence:
        return (
            f"{evidence - position} bytes from here on had been synced and acknowledged"
            if segment_bytes >= evidence
            else f"the file ends {evidence - segment_bytes} bytes before what had been synced and acknowledged"
        )
    if position < segment_bytes and not mark_readable and entries_beyond:
        return f"{entries_beyond} whole entries follow, and without a readable mark they may be acknowledged"
    return None


def encode_epochs(history: EpochHistory) -> bytes:
    """The payload of the epochs file."""
    return msgspec.json.encode(history.starts)


# Made here: shards and logs are opened on several threads, and msgspec learns a type at its first use, not safely on two.
_epochs: Final = msgspec.json.Decoder(list[EpochStart])


def decode_epochs(payload: bytes) -> EpochHistory | None:
    """The history, or None where the payload is not one."""
    try:
        return EpochHistory(_epochs.decode(payload))
    except msgspec.DecodeError:
        return None


class _Recovery:
    """One pass over a folder, oldest segment first."""

    def __init__(
        self,
        files: Files,
        folder: Path,
        identity: ShardIdentity,
        *,
        full: bool,
        synced: bool,
        shares_offload: bool,
        producers: tuple[ProducerTable, int] | None = None,
    ) -> None:
        self.files = files
        self.shares_offload = shares_offload
        self.folder = folder
        self.identity = identity
        self.full = full
        self.synced = synced
        # Listed once: most files that a folder may hold are not in most folders, and a start asks for them of thousands.
        self.names = files.names(folder)
        epochs = self._load_epochs()
        stored = self._load_compaction()
        self.compaction = stored or CompactionState()
        self.compaction_missing = stored is None
        if epochs is None and self.compaction.epochs:
            epochs = EpochHistory(list(self.compaction.epochs))
        self.snapshots = ProducerSnapshots(files, folder, self.compaction.producers)
        self.is_second = producers is not None
        producers = producers or self.snapshots.newest(names=self.names)
        self.epochs_rebuilt = epochs is None
        self.producers_rebuilt = producers is None
        self.epochs = epochs or EpochHistory()
        self.producers, self.replay_from = producers or (ProducerTable(), 0)
        self.offload = self._load_offload()
        self.indexes_rebuilt = 0
        self.verified_bytes = 0
        self.cut: tuple[Path, int, int, int, str] | None = None
        self.note_is_open = False

    def _load(self, name: str) -> bytes | None:
        """A small file's payload; None where it is missing or damaged."""
        return load_checked(self.files, self.folder / name) if name in self.names else None

    def _load_epochs(self) -> EpochHistory | None:
        payload = self._load(EPOCHS_NAME)
        return None if payload is None else decode_epochs(payload)

    def _load_compaction(self) -> CompactionState | None:
        payload = self._load(COMPACTION_NAME)
        return None if payload is None else decode_compaction(payload)

    def _load_offload(self) -> OffloadState:
        """Raises CorruptionError where the file is there and damaged: it is the only word of what is elsewhere."""
        if OFFLOADED_NAME not in self.names:
            return OffloadState()
        payload = self._load(OFFLOADED_NAME)
        if payload is None:
            raise damaged(
                self.folder / OFFLOADED_NAME,
                0,
                0,
                "its checksum does not hold, and it names the segments that are offloaded",
            )
        return decode_offload(payload)

    def read_header(self, descriptor: int, path: Path) -> tuple[SegmentHeader, int, int]:
        """Header, its length, and the file's length."""
        try:
            header, length = decode_segment_header(self.files.pread(descriptor, HEADER_BYTES_MAX, 0))
            size = self.files.size(descriptor)
        except CorruptionError as error:
            raise damaged(path, 0, base_of(path), error.sentence.rstrip(".")) from error
        if header.identity != self.identity:
            raise damaged(
                path, 0, header.base_offset, f"it belongs to {header.identity}, not to {self.identity}"
            )
        generation = header.span.generation if header.span else 0
        if parse_segment_name(path.name) != (header.base_offset, generation):
            raise damaged(path, 0, header.base_offset, "its name states another base offset or generation")
        if header.span and header.span.segment_bytes != size:
            raise damaged(path, 0, header.base_offset, f"{size} bytes of {header.span.segment_bytes}")
        return header, length, size

    def visit(
        self,
        index: SparseIndex,
        path: Path,
        entry: SegmentEntry,
        counter: PointCounter,
        *,
        holes: bool = False,
    ) -> None:
        """Check that an entry follows the one before it; replay it."""
        if counter.follow(entry) and entry.leader_epoch > self.epochs.current:
            self.epochs.begin(entry.leader_epoch, entry.base_offset)
        if entry.base_offset != index.next_offset and not (holes and entry.base_offset > index.next_offset):
            raise damaged(
                path,
                entry.position,
                index.next_offset,
                f"offset {entry.base_offset} follows where {index.next_offset} is next",
            )
        header = entry.header
        if header is None:
            index.add_position(entry.end)
            return
        index.add(header.base_offset, header.next_offset, entry.position, entry.end, header.append_time_ms)
        if header.producer_id and header.base_offset >= self.replay_from:
            count_batch(self.producers, header)

    def closed(self, path: Path, next_base: int, before: SegmentState | None) -> SegmentState:
        """A segment that another follows: whole, and ending where that one begins."""
        descriptor = self.files.open(path, os.O_RDONLY)
        try:
            header, start, size = self.read_header(descriptor, path)
            counter = counter_of(header, before)
            base_note = counter.note
            stored = read_file(self.files, path.with_suffix(INDEX_SUFFIX))
            index = stored and decode_index(
                stored, base_offset=header.base_offset, segment_bytes=size, start=start
            )
            replayed = next_base > self.replay_from or self.epochs_rebuilt
            if index and not self.full and not replayed:
                self._check_end(descriptor, path, header, index, counter)
            else:
                index = self._scan_closed(
                    descriptor, path, header, start, size, counter, bodies=self.full or not index
                )
        finally:
            self.files.close(descriptor)
        if index.next_offset != next_base:
            raise damaged(
                path,
                size,
                index.next_offset,
                f"the segment ends here, but the next one begins at {next_base}",
            )
        state = SegmentState(path, header, start, index.next_offset, size, index.last_time_ms, None)
        state.base_note, state.end_note = base_note, counter.note
        return state

    def _check_end(
        self, descriptor: int, path: Path, header: SegmentHeader, index: SparseIndex, counter: PointCounter
    ) -> None:
        """Follow the entries from the index's last place to the end of the file."""
        position = index.positions[-1] if index.positions else index.start
        offset = index.offsets[-1] if index.offsets else index.base_offset
        try:
            for entry in scan_file(
                self.files, descriptor, header, position, index.segment_bytes, verify_bodies=False
            ):
                if entry.base_offset != offset and not (header.span and entry.base_offset > offset):
                    raise damaged(path, entry.position, offset, f"offset {entry.base_offset} stands here")
                counter.follow(entry)
                offset, position = entry.next_offset, entry.end
        except EntryDamagedError as error:
            raise damaged(path, position, offset, str(error)) from error
        if header.span and offset <= header.span.end_offset:
            offset = header.span.end_offset
        if offset != index.next_offset:
            raise damaged(path, position, offset, f"the index says that {index.next_offset} is next")

    def _scan_closed(
        self,
        descriptor: int,
        path: Path,
        header: SegmentHeader,
        start: int,
        size: int,
        counter: PointCounter,
        *,
        bodies: bool,
    ) -> SparseIndex:
        index = SparseIndex(header.base_offset, start)
        try:
            batches = records = 0
            for entry in scan_file(self.files, descriptor, header, start, size, verify_bodies=bodies):
                self.visit(index, path, entry, counter, holes=header.span is not None)
                batches += entry.header is not None
                records += entry.header.records if entry.header else 0
        except EntryDamagedError as error:
            raise damaged(path, index.segment_bytes, index.next_offset, str(error)) from error
        if span := header.span:
            if (batches, records) != (span.batches, span.records) or index.next_offset > span.end_offset:
                raise damaged(
                    path,
                    size,
                    index.next_offset,
                    f"{batches} batches with {records} records where its header says {span.batches} with "
                    f"{span.records}",
                )
            index.end_at(span.end_offset)
        if bodies:
            self.verified_bytes += size
        if read_file(self.files, path.with_suffix(INDEX_SUFFIX)) != (encoded := index.encode()):
            self.indexes_rebuilt += 1
            write_index(self.files, path.with_suffix(INDEX_SUFFIX), encoded)
        return index

    def last(
        self, path: Path, mark: Mark | None, before: SegmentState | None
    ) -> tuple[SegmentState, dict[int, bytes]]:
        """The newest segment: verified to its last byte, a torn tail cut."""
        annotations: dict[int, bytes] = {}
        descriptor = self.files.open(path, os.O_RDWR)
        try:
            header, start, size = self.read_header(descriptor, path)
            if header.span:
                raise damaged(path, 0, header.span.end_offset, "no segment follows this compacted one")
            counter = counter_of(header, before)
            base_note = counter.note
            index = SparseIndex(header.base_offset, start)
            evidence = max(start, mark.synced_to if mark and mark.segment == header.base_offset else 0)
            stopped: EntryDamagedError | None = None
            try:
                for entry in scan_file(self.files, descriptor, header, start, size, verify_bodies=True):
                    self.visit(index, path, entry, counter)
                    evidence = max(evidence, entry.synced_to)
                    self.note_is_open = entry.is_note
                    annotate(
                        annotations,
                        entry.slot,
                        entry.annotation,
                        alone=entry.header is None,
                        is_note=entry.is_note,
                    )
            except EntryDamagedError as error:
                stopped = error
            position, offset = index.segment_bytes, index.next_offset
            highest, beyond = (
                evidence_beyond(self.files, descriptor, header, position, size) if stopped else (0, 0)
            )
            reason = judge_tail(
                position=position,
                segment_bytes=size,
                evidence=max(evidence, highest),
                mark_readable=mark is not None,
                entries_beyond=beyond,
            )
            if reason:
                raise damaged(path, position, offset, f"{stopped}; {reason}" if stopped else reason)
            if stopped:
                self.cut = (path, position, size - position, offset, str(stopped))
                self.files.truncate(descriptor, position)
            # What decodes is served from now on, so it must be on disk, whoever wrote it. Where a sync failed before, the
            # kernel calls pages clean that it could not write: they reach the disk only if they are written once more.
            if not self.synced or stopped or evidence < position:
                write_again(self.files, descriptor, min(evidence, position), position)
                self.files.sync(descriptor)
        finally:
            self.files.close(descriptor)
        self.verified_bytes += position
        state = SegmentState(path, header, start, offset, position, index.last_time_ms, index)
        state.base_note, state.end_note = base_note, counter.note
        return state, annotations

    def run(self) -> Recovered:
        """All of it. Raises CorruptionError; OSError as it comes."""
        # A killed process leaves names and the mark in the page cache alone. What follows goes by them, deletes by them, and lets
        # what is kept be told: they are on the disk first.
        if not self.synced:
            self.files.sync_folder(self.folder)
        mark = self._synced_mark()
        paths = [self.folder / name for name in self.names if name.endswith(SEGMENT_SUFFIX)]
        for name in self.names:
            if name.endswith((TEMPORARY_SUFFIX, FETCHED_SUFFIX)):
                self.files.remove(self.folder / name)
        for path in paths:
            if parse_segment_name(path.name) is None:
                raise damaged(path, 0, 0, "this is not the name of a segment")
        paths = self._finish_compaction(sorted(paths, key=_place))
        if mark:
            paths = self._finish_deletion(paths, mark)
            if not paths or base_of(paths[-1]) < mark.segment:
                raise damaged(
                    self.folder,
                    0,
                    mark.segment,
                    f"the segment that begins at offset {mark.segment} is missing",
                )
        if not paths:
            if OFFLOADED_NAME in self.names:
                raise damaged(
                    self.folder / OFFLOADED_NAME,
                    0,
                    0,
                    "it names what of the log is in a store, and no segment is here: the log was lost, or is being restored. `felix log restore` "
                    "brings it back, also where it was broken off",
                )
            return Recovered([], report=RecoveryReport(epochs_rebuilt=True))
        segments = self._closed_segments(paths)
        state, annotations = self.last(paths[-1], mark, segments[-1] if segments else None)
        segments.append(state)
        if self.replay_from > state.next_offset:
            # Acknowledged under `interval` and lost with the power, or cut by hand: the snapshot knows too much.
            known = self.snapshots.at(state.next_offset, told_from(segments))
            again = _Recovery(
                self.files, self.folder, self.identity, full=False, synced=False,
                shares_offload=self.shares_offload, producers=known,
            )  # fmt: skip
            again.cut = self.cut
            return again.run()
        self.producers.settle(state.next_offset)
        if self.is_second:
            self.forget_above(state.next_offset)
        self.epochs.clamp(state.next_offset)
        compacted_to = max((one.next_offset for one in segments if one.header.span), default=0)
        if self.compaction_missing and compacted_to:
            # What is compacted is looked at again; how far tombstones are gone is not known, so all of it counts.
            self.compaction = CompactionState(0, compacted_to, learned_to=segments[-1].base_offset)
        file, position, size, offset, reason = self.cut or (None, 0, 0, 0, "")
        report = RecoveryReport(
            segments=len(segments),
            verified_bytes=self.verified_bytes,
            cut_file=str(file) if file else "",
            cut_position=position,
            cut_bytes=size,
            cut_from_offset=offset,
            cut_reason=reason,
            indexes_rebuilt=self.indexes_rebuilt,
            mark_missing=mark is None,
            producers_rebuilt=self.producers_rebuilt,
            epochs_rebuilt=self.epochs_rebuilt,
        )
        return Recovered(
            segments, annotations, self.epochs, self.producers, report, self.compaction, self.offload,
            self.note_is_open,
        )  # fmt: skip

    def forget_above(self, end: int) -> None:
        """Other batches will get the offsets from `end` on: no snapshot that knows of them is left."""
        snapshot = self.producers.encode(end)
        self.snapshots.save(snapshot, end)
        self.snapshots.cut(end)
        if self.compaction.producers:
            self.compaction = msgspec.structs.replace(self.compaction, producers=snapshot)
            save_checked(self.files, self.folder / COMPACTION_NAME, encode_compaction(self.compaction))
        self.files.sync_folder(self.folder)

    def _synced_mark(self) -> Mark | None:
        path = self.folder / MARK_NAME
        mark = decode_mark(read_file(self.files, path) or b"")
        if mark and not self.synced:
            descriptor = self.files.open(path, os.O_RDWR)
            try:
                self.files.sync(descriptor)
            finally:
                self.files.close(descriptor)
        return mark

    def _write_mark_again(self, mark: Mark) -> None:
        """Where a sync of it failed before, another one alone would prove nothing; as with the last segment's bytes."""
        descriptor = self.files.open(self.folder / MARK_NAME, os.O_RDWR)
        try:
            write_all(self.files, descriptor, (mark.encode(),), 0)
            self.files.sync(descriptor)
        finally:
            self.files.close(descriptor)

    def _closed_segments(self, paths: list[Path]) -> list[SegmentState]:
        """All but the last of `paths`, and those that are in a store only, in their places."""
        remote = {entry.base_offset: entry for entry in self.offload.segments}
        places: list[tuple[int, Path | None]] = [(base_of(path), path) for path in paths]
        local = {base for base, _ in places}
        places += [(base, None) for base in remote if base not in local]
        places.sort(key=lambda place: place[0])
        segments: list[SegmentState] = []
        for (base, path), (next_base, _) in pairwise(places):
            entry = remote.get(base)
            if path is not None:
                state = self.closed(path, next_base, segments[-1] if segments else None)
                state.remote = entry
            else:
                assert entry is not None
                header = entry.segment_header
                path = self.folder / segment_name(base)
                if entry.next_offset != next_base or header.identity != self.identity:
                    raise damaged(
                        self.folder / OFFLOADED_NAME,
                        0,
                        base,
                        f"{entry.url} ends at {entry.next_offset}, but the next segment begins at {next_base}",
                    )
                state = in_store(path, entry, entry.base_note)
            segments.append(state)
        return segments

    def _finish_compaction(self, paths: list[Path]) -> list[Path]:
        """Delete segments that one of a later generation has taken the place of, and indexes of such."""
        gone: set[Path] = set()
        for path in paths:
            base, generation = _place(path)
            if not generation:
                continue
            descriptor = self.files.open(path, os.O_RDONLY)
            try:
                span = self.read_header(descriptor, path)[0].span
            finally:
                self.files.close(descriptor)
            assert span is not None
            gone.update(
                other
                for other in paths
                if base <= base_of(other) < span.end_offset and _place(other)[1] < generation
            )
        for path in gone:
            self.files.remove(path)
        kept = [path for path in paths if path not in gone]
        names = {path.stem for path in kept} | {f"{one.base_offset:020d}" for one in self.offload.segments}
        for name in self.names:
            if name.endswith(INDEX_SUFFIX) and name.removesuffix(INDEX_SUFFIX) not in names:
                self.files.remove(self.folder / name)
        return kept

    def _finish_deletion(self, paths: list[Path], mark: Mark) -> list[Path]:
        """Retention writes the new start before it deletes: what is below it was being deleted."""
        kept = [path for path in paths if base_of(path) >= mark.log_start]
        gone = [one for one in self.offload.segments if one.base_offset < mark.log_start]
        if gone:
            doomed = () if self.shares_offload else tuple(one.url for one in gone)
            self.offload = msgspec.structs.replace(
                self.offload,
                segments=tuple(one for one in self.offload.segments if one not in gone),
                pending_deletion=(*self.offload.pending_deletion, *doomed),
                places=self.offload.all_places,
            )
        oldest = min(
            [*map(base_of, kept[:1]), *(one.base_offset for one in self.offload.segments)], default=-1
        )
        if kept and oldest != mark.log_start:
            raise damaged(
                self.folder,
                0,
                mark.log_start,
                f"the log starts at {mark.log_start}, but the oldest segment begins at {oldest}",
            )
        if kept:
            if gone or len(kept) < len(paths):
                self._write_mark_again(mark)
            for path in paths[: len(paths) - len(kept)]:
                self.files.remove(path)
                self.files.remove(path.with_suffix(INDEX_SUFFIX))
        return kept


def base_of(path: Path) -> int:
    """The base offset that a segment's name states."""
    return _place(path)[0]


def _place(path: Path) -> tuple[int, int]:
    parsed = parse_segment_name(path.name)
    assert parsed is not None
    return parsed


def recover(
    folder: Path,
    identity: ShardIdentity,
    *,
    files: Files,
    full: bool = False,
    synced: bool = False,
    shares_offload: bool = False,
) -> Recovered:
    """Read a shard's folder, cut a torn tail, refuse damage. With `full`, every byte of every segment is verified. `synced`: whoever wrote
    it last closed it in order (region.log.clean_stop), so that what is as the mark says is on the disk. `shares_offload`: as `DiskLog` has it.

    Raises CorruptionError where the shard must not serve; what it names was not changed.
    """
    return _Recovery(files, folder, identity, full=full, synced=synced, shares_offload=shares_offload).run()
