"""The log of one shard as the broker uses it, on the event loop: append, read, follow the tail.

Appends are put into a pending group; a thread of the shared pool seals, writes and syncs a group while the
next one accumulates, so one sync serves all that waited (group commit). Everything else here runs on the
loop.

Invariants:
- an append is answered exactly once: with its offset after the durability that the stream asks for, or with
  an error;
- offsets are given in the order of appending, without holes: where a group is refused, so is all that was
  pending behind it, and the offsets are given anew;
- readers see nothing at or above the high watermark; it moves when a group is durable, up to the first batch whose note is
  not released (region.log.ahead);
- after a failed sync or write the shard is FAILED for good: no wait is answered but with the error, no sync
  tried again;
- pending bytes, ring and annotations are bounded; what is beyond is refused with a code.

States and what moves between them are in region.log.states, reading from disk and store in
region.log.disk_reader, compaction and offload in region.log.maintenance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event as ThreadEvent
from threading import Lock
from typing import Final, NamedTuple, Protocol, TypeVar

from felix.batch import (
    BATCH_BYTES_MAX,
    FLAG_HEADERS,
    FLAG_SEALED,
    HEADER_BYTES,
    NO_KEY_ID,
    Batch,
    BatchHeader,
    body_checksum,
)
from felix.errors import (
    Code,
    CorruptionError,
    FelixError,
    OffsetMismatchError,
    RequestError,
    UnavailableError,
)
from keys.envelope import SEAL_BYTES
from region.log.ahead import Ahead, Note
from region.log.compaction import KEYS_BYTES_MAX, CompactionReport
from region.log.compactor import WorkEndedError
from region.log.counters import ShardCounters
from region.log.disk import (
    ANNOTATION_SLOTS_MAX,
    FULL_RETRY_MS,
    DiskLog,
    Frame,
    OffsetOutOfRangeError,
    SealedBatch,
    StorageFailedError,
    disk_full,
    storage_error,
)
from region.log.disk_reader import DiskReader
from region.log.durability import Kind
from region.log.epochs import EpochHistory
from region.log.maintenance import COMPACTION_SHARE, Maintenance
from region.log.message_ids import Identified, MessageIds, identified, message_ids, repeated_offsets, sift
from region.log.offloader import OffloadReport
from region.log.producers import ProducerTable, Remembered, Verdict, refusal
from region.log.recovery import Recovered, RecoveryReport, annotate
from region.log.ring import Entry, Ring
from region.log.segment import ANNOTATION_BYTES_MAX, ShardIdentity
from region.log.shard_settings import ShardHooks, ShardSettings, ShardStore
from region.log.states import TRANSITIONS, Event, State
from region.storage.disk import DiskFiles
from region.storage.port import Files, is_full

__all__ = [
    "TRANSITIONS",
    "AppendObserver",
    "Appended",
    "Done",
    "Event",
    "ShardHooks",
    "ShardLog",
    "ShardSettings",
    "ShardStore",
    "State",
    "WorkEndedError",
]

GROUP_BYTES_MAX: Final = 8 << 20
"""Written before one sync: bounds how long the first of a group waits for the last."""
IDS_READ_BYTES: Final = 4 << 20
"""Read at a time where the window of message ids is read from the log."""
MARK_SYNC_IDLE_S: Final = 1.0
"""The mark is brought to the disk this long after appends began; see region.log.recovery for what it proves."""

_T = TypeVar("_T")


class Appended(NamedTuple):
    """Where a batch stands. For a repeated one, where its first copy does.

    `offsets`, one per record, where deduplication left some out, so that they do not follow each other.
    """

    base_offset: int
    append_time_ms: int
    duplicate: bool = False
    offsets: tuple[int, ...] = ()


Done = Callable[[Appended | FelixError], None]


@dataclass(slots=True)
class _Pending:
    """An append on its way. Without batch and annotation it frees its slot, or only waits for those before it (a repeated
    batch)."""

    batch: Batch | None
    answer: Appended
    done: Done
    size: int
    epoch: int
    slot: int
    annotation: bytes
    entry: Entry | None = None
    frees_slot: bool = False
    note: Note | None = None


class AppendObserver(Protocol):
    """Who has to know every batch from its append on, whoever appended it: a view that decides by what is on its way."""

    def appending(self) -> None:
        """Something is about to be appended: what the observer wants to stand before it is to be appended now."""

    def appended(self, batch: Batch) -> None:
        """A plain batch has its offset; it is not durable yet."""

    def rolled_back(self, offset: int, error: FelixError) -> None:
        """Batches from `offset` on were refused after all; the next one may get the same offsets."""


class ShardLog:
    """See the module. Construct with `open`; all methods are called on the loop that opened it."""

    def __init__(
        self,
        identity: ShardIdentity,
        settings: ShardSettings,
        hooks: ShardHooks,
        commit_pool: Executor,
        read_pool: Executor,
        store: ShardStore | None = None,
    ) -> None:
        self.identity = identity
        self.settings = settings
        self.counters = ShardCounters()
        self.report = RecoveryReport()
        self.state = State.OPENING
        self.failure: FelixError | None = None
        self.annotations: dict[int, bytes] = {}
        self.pending_bytes = 0
        self.observer: AppendObserver | None = None
        self._hooks = hooks
        self._commit_pool = commit_pool
        self._read_pool = read_pool
        self._loop = asyncio.get_running_loop()
        self._folder = Path()
        self._ephemeral = settings.durability.kind is Kind.EPHEMERAL
        self._ring = self._new_ring(settings.first_offset)
        self._disk: DiskLog | None = None
        self._producers = ProducerTable(settled=settings.first_offset)
        self._ids = MessageIds(settings.deduplication) if settings.deduplication else None
        self._epochs = EpochHistory()
        self._next_offset = settings.first_offset
        self._high_watermark = settings.first_offset
        # The end of what is as durable as the stream asks: above the high watermark while visibility is held.
        self._durable_end = settings.first_offset
        self._visibility_holds = 0
        self._invisible: list[Entry] = []
        self._invisible_bytes = 0
        self._log_start = settings.first_offset
        self._last_time_ms = 0
        self._tail_callbacks: list[Callable[[], None]] = []
        self._tail_scheduled = False
        self._kick_scheduled = False
        self._hold: UnavailableError | None = None
        self._retry_at = 0.0
        self._in_flight = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self._sync_timer: asyncio.TimerHandle | None = None
        self._mark_timer: asyncio.TimerHandle | None = None
        self._segments_seen = 1
        # With `acked` retention nothing goes before the subscriptions have said what they need.
        self._held_from: int | None = 0
        self._closed = False
        self._files: Files = DiskFiles()
        self._reader: DiskReader | None = None
        self._maintenance: Maintenance | None = None
        self._ahead: Ahead | None = None
        # Of notes that are not released, by their number: the offset that nobody may read yet.
        self._noted: dict[int, int] = {}
        self._next_note = 0
        # Ends what moves to and from a store.
        self._ending = ThreadEvent()
        self._store = store or ShardStore(read_pool)
        # Shared with the commit thread, under `_lock`.
        self._lock = Lock()
        self._queue: list[_Pending] = []
        self._committing = False
        self._refusing: FelixError | None = None
        # One writer of the folder at a time.
        self._writer = Lock()

    @classmethod
    async def open(
        cls,
        folder: Path | None,
        identity: ShardIdentity,
        settings: ShardSettings,
        hooks: ShardHooks,
        *,
        commit_pool: Executor,
        read_pool: Executor,
        store: ShardStore | None = None,
        files: Files | None = None,
        full_verify: bool = False,
    ) -> ShardLog:
        """Recover the shard in `folder` (None for an ephemeral one) and serve it.

        Raises CorruptionError where it must not serve, UnavailableError where the disk does not let it.
        """
        shard = cls(identity, settings, hooks, commit_pool, read_pool, store)
        if shard._ephemeral:
            shard._move(Event.OPENED)
            return shard
        assert folder is not None
        shard_folder = shard._folder = folder
        shard._files = files or DiskFiles()

        def recover() -> tuple[DiskLog, Recovered]:
            return DiskLog.open(
                shard_folder,
                identity,
                now_ms=hooks.clock_ms(),
                files=files,
                limits=settings.segments,
                commitment=hooks.commitment,
                runtime=hooks.runtime,
                full_verify=full_verify,
            )

        try:
            disk, recovered = await shard._loop.run_in_executor(commit_pool, recover)
        except OSError as error:
            raise storage_error(error, shard_folder) from error
        shard._adopt(disk, recovered)
        shard._move(Event.OPENED)
        if shard._ids is not None:
            await shard._read_ids(shard._ids)
        return shard

    async def _read_ids(self, window: MessageIds) -> None:
        """Read the window of message ids from the records: they are the truth."""
        now_ms = max(self._last_time_ms, self._hooks.clock_ms())
        offset = await self.offset_for_time(now_ms - window.window_ms)

        def collect(batches: Sequence[SealedBatch]) -> list[Identified]:
            found: list[Identified] = []
            for batch in batches:
                if batch.header.flags & FLAG_HEADERS:
                    try:
                        plain = self._hooks.open_batch(Batch(batch.header, batch.data[HEADER_BYTES:]))
                    except FelixError as error:
                        # Destroyed on purpose: nobody reads these records again, nor their ids.
                        if error.code is not Code.KEY_DESTROYED:
                            raise
                        continue
                    found += identified(plain)
            return found

        assert self._reader is not None
        while offset < self._high_watermark:
            batches = await self._reader.read(offset, IDS_READ_BYTES, self._high_watermark)
            found = await self._loop.run_in_executor(self._read_pool, collect, batches)
            window.record(found)
            window.settle(now_ms)
            offset = batches[-1].header.next_offset

    def _new_ring(self, next_offset: int) -> Ring:
        return Ring(
            next_offset, bytes_max=self.settings.ring_bytes_max, entries_max=self.settings.ring_entries_max
        )

    def _adopt(self, disk: DiskLog, recovered: Recovered) -> None:
        self._disk = disk
        self.report = recovered.report
        self.annotations = dict(disk.annotations)
        self._epochs = recovered.epochs
        self._producers = recovered.producers
        self._next_offset = self._high_watermark = self._durable_end = disk.end_offset
        self._log_start = disk.start_offset
        self._last_time_ms = max(0, disk.last_time_ms)
        self._segments_seen = disk.segment_count
        self._ring = self._new_ring(disk.end_offset)
        self._ahead = Ahead(self._folder, self._files)
        self._reader = DiskReader(
            disk,
            self._files,
            self._store,
            self._read_pool,
            self.counters,
            folder=self._folder,
            ending=self._ending,
            failed=self._fail,
        )
        self._maintenance = Maintenance(
            self,
            disk,
            self._files,
            self._hooks,
            self._store,
            folder=self._folder,
            writer=self._writer,
            ending=self._ending,
        )

    def _move(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    # What the log holds.

    @property
    def log_start_offset(self) -> int:
        """The oldest offset that can be read."""
        return self._ring.first_offset if self._ephemeral else self._log_start

    @property
    def high_watermark(self) -> int:
        """The offset after the last record that readers may see."""
        return self._high_watermark

    @property
    def synced_offset(self) -> int:
        """The offset after the last record that readers may see and that is on the disk, so that no power cut takes it back.

        Below the high watermark on a stream that syncs in intervals; 0 on an ephemeral one.
        """
        return 0 if self._disk is None else min(self._high_watermark, self._disk.synced_offset)

    @property
    def log_end_offset(self) -> int:
        """The offset that the next batch will get."""
        return self._next_offset

    @property
    def epochs(self) -> EpochHistory:
        """The leader-epoch history; change it with `begin_epoch` only."""
        return self._epochs

    @property
    def message_ids(self) -> int:
        """Message ids remembered; 0 where the stream does not ask for it."""
        return 0 if self._ids is None else len(self._ids)

    @property
    def ring_bytes(self) -> int:
        """Bytes in the ring."""
        return self._ring.bytes_held

    @property
    def disk_bytes(self) -> int:
        """Bytes in segment files."""
        return self._disk.bytes_held if self._disk else 0

    @property
    def segment_count(self) -> int:
        """Segment files."""
        return self._disk.segment_count if self._disk else 0

    @property
    def compacted_to(self) -> int:
        """Below this offset each key stands at most once, and offsets may be left out."""
        return self._disk.compaction.clean_to if self._disk else 0

    @property
    def tombstones_from(self) -> int:
        """Below this offset tombstones may be gone: who knows the log's state only up to an offset below it, and goes on
        from there, may miss that a key was deleted, and must read the whole state anew."""
        return self._disk.compaction.tombstones_from if self._disk else 0

    @property
    def remote_bytes(self) -> int:
        """Bytes of segments that are in a store."""
        return self._disk.remote_bytes if self._disk else 0

    @property
    def offload_waiting_bytes(self) -> int:
        """Bytes of closed segments that are to be offloaded and are not yet."""
        if self._disk is None or self.settings.offload is None:
            return 0
        return sum(one.segment_bytes for one in self._disk.segments[:-1] if one.remote is None)

    @property
    def dirty_bytes(self) -> int:
        """Bytes of closed segments that hold what was not compacted yet."""
        if self._disk is None:
            return 0
        spans = self._disk.dirty_spans(self._high_watermark)
        return sum(one.segment_bytes for one in spans if one.next_offset > self.compacted_to)

    # Appending.

    def append_nowait(
        self,
        batch: Batch | None,
        done: Done,
        *,
        annotation: bytes = b"",
        slot: int = 0,
        expected_offset: int | None = None,
        as_it_is: bool = False,
        note: Note | None = None,
    ) -> None:
        """Append a plain batch, an annotation for `slot`, or both in one; `done` is called once, on the loop.

        Header fields that are the broker's (shard, base offset, append time, leader epoch) are set here.
        The annotation of a repeated batch is not kept: the first copy's is. With `expected_offset` a batch that is
        not a repeated one is appended only where the log ends there, pending batches counted. `as_it_is`: no record is left
        out for its message id. `note`, of `take_note`, is on the disk before the batch is.
        `done` may be called before this returns (refusals, ephemeral shards). What it is called with:
        Appended, or RequestError (SEQUENCE_GAP, PRODUCER_FENCED, OFFSET_MISMATCH, BATCH_TOO_LARGE, INVALID), UnavailableError
        (LIMIT_MEMORY, DISK_FULL, SHARD_STOPPED …).
        """
        if self.observer is not None:
            self.observer.appending()
        note_bytes = len(note.data) if note else 0
        refused = self._refusal(batch, annotation, slot, note_bytes)
        if refused:
            done(refused)
            return
        now_ms = max(self._last_time_ms, self._hooks.clock_ms())
        answer = Appended(self._next_offset, now_ms)
        if batch is None:
            self._enqueue(
                _Pending(
                    None,
                    answer,
                    done,
                    len(annotation) + note_bytes,
                    self._epochs.current,
                    slot,
                    annotation,
                    note=note,
                )
            )
            return
        ids = sifted = None
        if self._ids is not None:
            try:
                ids = message_ids(batch)
                if ids is not None and not as_it_is:
                    sifted = sift(batch, ids, self._ids, self._next_offset, now_ms)
            except RequestError as error:
                done(error)
                return
        header = batch.header
        if header.producer_id:
            decision = self._producers.decide(
                header.producer_id,
                header.producer_epoch,
                header.base_sequence,
                header.records,
                shortened=self._ids is not None,
            )
            if decision.verdict is Verdict.DUPLICATE:
                assert decision.first is not None
                self.counters.duplicates += 1
                self._answer_repeated(self._repeated(header, decision.first, ids, now_ms), done)
                return
            # What is all in the log already is answered whatever its sequence: the log has no trace of a repetition.
            settled = sifted is not None and sifted.batch is None and decision.verdict is not Verdict.FENCED
            if decision.verdict is not Verdict.ACCEPT and not settled:
                done(refusal(header.producer_id, header.base_sequence, decision))
                return
            if settled and decision.verdict is Verdict.ACCEPT:
                # Nothing of it will be in the log: it ends where the producer's next batch begins.
                end = header.base_sequence + header.records
                self._producers.record(
                    header.producer_id,
                    Remembered(header.producer_epoch, end, end, self._next_offset, now_ms),
                )
        if sifted is not None and sifted.batch is not batch:
            self.counters.repeated_ids += header.records - (
                sifted.batch.header.records if sifted.batch else 0
            )
            if sifted.batch is None:
                if annotation:
                    # It stands in the log by itself, where the log ends.
                    answer = Appended(self._next_offset, now_ms, True, sifted.offsets)
                    epoch = self._epochs.current
                    self._enqueue(_Pending(None, answer, done, len(annotation), epoch, slot, annotation))
                    return
                self._answer_repeated(Appended(sifted.offsets[0], now_ms, True, sifted.offsets), done)
                return
            batch, header = sifted.batch, sifted.batch.header
            answer = Appended(self._next_offset, now_ms, offsets=sifted.offsets)
        if expected_offset is not None and expected_offset != self._next_offset:
            done(self._mismatch(expected_offset))
            return
        if header.producer_id:
            self._producers.record(
                header.producer_id,
                Remembered(
                    header.producer_epoch,
                    header.base_sequence,
                    header.base_sequence + header.records,
                    self._next_offset,
                    now_ms,
                ),
            )
        if self._ids is not None and ids is not None:
            self._ids.record(
                sifted.fresh
                if sifted is not None
                else (
                    Identified(found, offset, now_ms)
                    for offset, found in enumerate(ids, self._next_offset)
                    if found is not None
                )
            )
        header = header._replace(
            shard=self.identity.shard,
            base_offset=self._next_offset,
            append_time_ms=now_ms,
            leader_epoch=self._epochs.current,
            key_id=NO_KEY_ID,
        )
        self._last_time_ms = now_ms
        self._next_offset = header.next_offset
        size = header.total_length + len(annotation) + note_bytes
        numbered = Batch(header, batch.body)
        if self.observer is not None:
            self.observer.appended(numbered)
        self._enqueue(
            _Pending(numbered, answer, done, size, header.leader_epoch, slot, annotation, note=note)
        )

    def _repeated(
        self, header: BatchHeader, first: Remembered, ids: list[bytes | None] | None, now_ms: int
    ) -> Appended:
        """Where the first copy of a batch stands, or what was kept of it."""
        if self._ids is None or ids is None or first.next_sequence - first.base_sequence == header.records:
            return Appended(first.base_offset, first.append_time_ms, duplicate=True)
        offsets = repeated_offsets(ids, self._ids, first, now_ms)
        return Appended(offsets[0], first.append_time_ms, True, offsets)

    def _answer_repeated(self, answer: Appended, done: Done) -> None:
        if max(answer.offsets, default=answer.base_offset) < self._durable_end:
            done(answer)
        else:
            # The first copy is not durable yet; this one is answered after it, and fails with it.
            self._enqueue(_Pending(None, answer, done, 0, 0, 0, b""))

    def _mismatch(self, expected_offset: int) -> OffsetMismatchError:
        return OffsetMismatchError(
            f"The log of shard {self.identity.shard} of {self.identity.stream} ends at offset {self._next_offset}, not at "
            f"{expected_offset}; nothing was appended.",
            hint="Read what came in between, decide again, and expect the new end.",
            log_end=self._next_offset,
        )

    async def append(
        self,
        batch: Batch | None,
        *,
        annotation: bytes = b"",
        slot: int = 0,
        expected_offset: int | None = None,
    ) -> Appended:
        """`append_nowait`, awaited. Raises what that is answered with."""
        future: asyncio.Future[Appended] = self._loop.create_future()

        def done(result: Appended | FelixError) -> None:
            if future.done():
                return
            if isinstance(result, FelixError):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.append_nowait(batch, done, annotation=annotation, slot=slot, expected_offset=expected_offset)
        return await future

    def take_note(self, data: bytes) -> Note:
        """A note for the next append. From now on nobody reads what is appended, until `release_note`: call it once what the
        note is for is done, or the append was refused. A crash before leaves the note to `read_notes`."""
        note = Note(self._next_note, data)
        self._next_note += 1
        self._noted[note.number] = self._next_offset
        return note

    def release_note(self, note: Note) -> None:
        """What the note stands for is done: its batch can be read, up to the next note that is not released."""
        self._noted.pop(note.number, None)
        ahead = self._ahead
        assert ahead is not None
        ahead.released = next(iter(self._noted), self._next_note)
        if not self._noted:
            self._submit(ahead.tidy, optional=True)
        if not self._visibility_holds:
            before = self._high_watermark
            self._show()
            if self._high_watermark > before:
                self._wake_tail_soon()

    async def read_notes(self) -> list[Note]:
        """What a crash left of notes, in their order: the batch of each may be in the log, or not. Before the first append."""
        return [] if self._ahead is None else await self._change(self._ahead.read)

    async def clear_notes(self) -> None:
        """What `read_notes` gave is done."""
        if self._ahead is not None:
            await self._change(self._ahead.clear)

    def free_slot_nowait(self, slot: int, done: Done) -> None:
        """Let go of a slot's annotation; `done` is called as for an append. Nothing is written where the slot is free."""
        refused = self._not_serving() if self.state is not State.SERVING else self.held_back()
        if refused:
            done(refused)
            return
        answer = Appended(self._next_offset, self._last_time_ms)
        if slot not in self.annotations:
            done(answer)
            return
        self._enqueue(_Pending(None, answer, done, 0, self._epochs.current, slot, b"", frees_slot=True))

    def _refusal(
        self, batch: Batch | None, annotation: bytes, slot: int, note_bytes: int
    ) -> FelixError | None:
        """Why nothing may be appended now, or not this; None where it may."""
        if self.state is not State.SERVING and (stopped := self._state_refusal()):
            return stopped
        if held := self._hold or self._hooks.refusal():
            return held
        if annotation and slot not in self.annotations and len(self.annotations) >= ANNOTATION_SLOTS_MAX:
            return RequestError(
                f"The shard holds annotations of {ANNOTATION_SLOTS_MAX} sources, which is the most it can.",
                hint="Spread the sources over more shards.",
            )
        if len(annotation) > ANNOTATION_BYTES_MAX or (batch is None and not annotation):
            return RequestError(
                f"An annotation has 1 to {ANNOTATION_BYTES_MAX} bytes, not {len(annotation)}."
            )
        size = len(annotation) + note_bytes
        if batch:
            header = batch.header
            size += header.total_length
            if len(batch.body) != header.body_length or body_checksum(batch.body) != header.body_checksum:
                # Once written it would look like damage, and stop the shard for everybody.
                return RequestError(
                    "The batch's body is not the one that its header was made for.", code=Code.BATCH_MALFORMED
                )
            if header.flags & FLAG_SEALED:
                return RequestError(
                    "The batch is sealed already; a shard takes plain batches and seals them itself."
                )
            if header.total_length + SEAL_BYTES > BATCH_BYTES_MAX:
                return RequestError(
                    f"A batch of {header.total_length} bytes leaves no room for its seal; "
                    f"{BATCH_BYTES_MAX - SEAL_BYTES} are allowed.",
                    code=Code.BATCH_TOO_LARGE,
                    hint="Publish smaller batches.",
                )
        waiting = self.pending_bytes + self._invisible_bytes
        if waiting + size > self.settings.pending_bytes_max:
            self.counters.refused_memory += 1
            return UnavailableError(
                f"{waiting} bytes of this shard wait for the disk; "
                f"{self.settings.pending_bytes_max} are allowed.",
                code=Code.LIMIT_MEMORY,
                retry_after_ms=50,
            )
        return None

    def _state_refusal(self) -> FelixError | None:
        if self.state is State.FULL:
            now = self._loop.time()
            if now >= self._retry_at:
                self._retry_at = now + FULL_RETRY_MS / 1000
                return None
            self.counters.refused_disk_full += 1
            return disk_full()
        return self._not_serving()

    def _not_serving(self) -> FelixError:
        if self.failure:
            return self.failure
        return UnavailableError(f"The shard is {self.state.value}.", code=Code.SHUTTING_DOWN)

    def _enqueue(self, item: _Pending) -> None:
        if self._ephemeral:
            self._append_ephemeral(item)
            return
        with self._lock:
            refusing = self._refusing
            if not refusing:
                self._queue.append(item)
        if refusing:
            # The commit thread has just refused what this would follow; the loop hears of it next.
            self._forget(item)
            self._tell_rollback(item.answer.base_offset, refusing)
            item.done(refusing)
            return
        self.pending_bytes += item.size
        self._in_flight += 1
        self._drained.clear()
        if not self._kick_scheduled:
            self._kick_scheduled = True
            # At the end of this loop turn: what is appended together is committed together.
            self._loop.call_soon(self._kick)

    def _forget(self, item: _Pending) -> None:
        """Take back the offset of an item that was never queued."""
        if item.batch:
            self._take_back(item.batch.header.base_offset)

    def _take_back(self, offset: int) -> None:
        """What was appended from `offset` on is not in the log after all."""
        self._next_offset = offset
        self._producers.rollback(offset)
        if self._ids is not None:
            self._ids.rollback(offset)

    def _settle(self) -> None:
        """All below the durable end is as durable as it will be."""
        self._producers.settle(self._durable_end)
        if self._ids is not None:
            self._ids.settle(self._last_time_ms)

    def _append_ephemeral(self, item: _Pending) -> None:
        if item.annotation or item.frees_slot:
            annotate(self.annotations, item.slot, item.annotation, alone=item.frees_slot)
        if item.batch:
            self._count(item.batch.header)
            self._accept(self._plain_entry(item.batch))
            self._settle()
            if not self._visibility_holds:
                self._show()
                self._wake_tail_soon()
        item.done(item.answer)

    def _count(self, header: BatchHeader) -> None:
        self.counters.batches += 1
        self.counters.records += header.records
        self.counters.appended_bytes += header.total_length

    def _plain_entry(self, batch: Batch) -> Entry:
        header = batch.header
        data = b"".join((self._hooks.frame_prefix(header), header.encode(), batch.body))
        return Entry(header.base_offset, header.next_offset, header.append_time_ms, data)

    def _kick(self) -> None:
        self._kick_scheduled = False
        with self._lock:
            if self._committing or not self._queue:
                return
            self._committing = True
        self._commit_pool.submit(self._commit)

    # In a commit thread.

    def _commit(self) -> None:
        """Commit one group, tell the loop, and go on if there is more."""
        with self._lock:
            size = count = 0
            for item in self._queue:
                if count and size + item.size > GROUP_BYTES_MAX:
                    break
                size += item.size
                count += 1
            group, self._queue = self._queue[:count], self._queue[count:]
        refusal_: FelixError | None = None
        no_room = failed = False
        sync_ns = 0
        try:
            with self._writer:
                sync_ns = self._write(group)
        except StorageFailedError as error:
            refusal_, failed = error, True
        except OSError as error:
            refusal_, no_room = disk_full(), is_full(error)
            if not no_room:
                refusal_, failed = storage_error(error, self._folder), True
        except FelixError as error:
            # The seal refused (a key is gone, a provider does not answer): nothing was written.
            refusal_ = error
        except Exception as error:
            refusal_, failed = _bug(error), True
        with self._lock:
            if refusal_:
                group += self._queue
                self._queue = []
                self._refusing = refusal_
            more = bool(self._queue)
            self._committing = more
        if refusal_:
            self._tell(lambda: self._refuse(group, refusal_, no_room=no_room, failed=failed))
        else:
            self._tell(lambda: self._finish(group, sync_ns))
        if more:
            # Back of the pool's queue: other shards get their turn.
            self._commit_pool.submit(self._commit)

    def _write(self, group: Sequence[_Pending]) -> int:
        """Seal, write and, where acknowledgements ask for it, sync a group; ns the sync took."""
        disk, ahead = self._disk, self._ahead
        assert disk is not None and ahead is not None
        notes = [item.note for item in group if item.note]
        if notes:
            ahead.write(notes)
        frames = []
        for item in group:
            if item.batch:
                item.entry = self._plain_entry(item.batch)
                sealed = self._hooks.seal(item.batch)
            elif item.annotation or item.frees_slot:
                sealed = None
            else:
                continue
            frames.append(Frame(sealed, item.answer.base_offset, item.epoch, item.slot, item.annotation))
        if not frames:
            return 0
        disk.write(frames, self._hooks.clock_ms())
        if self.settings.durability.kind is not Kind.FSYNC:
            return 0
        begun = self._hooks.runtime.clock.monotonic_ns()
        disk.sync()
        return self._hooks.runtime.clock.monotonic_ns() - begun

    def _accept(self, entry: Entry) -> None:
        """An entry is durable; `_show` lets it be read."""
        self._invisible.append(entry)
        self._invisible_bytes += len(entry.data)
        self._durable_end = entry.next_offset

    def _show(self) -> None:
        """Let what is durable be read, up to the first note that is not released."""
        limit = next(iter(self._noted.values()), self._durable_end)
        shown = 0
        for entry in self._invisible:
            if entry.next_offset > limit:
                break
            self._ring.append(entry)
            self._invisible_bytes -= len(entry.data)
            self._high_watermark = entry.next_offset
            shown += 1
        del self._invisible[:shown]

    def hold_visibility(self) -> None:
        """From now on appends become durable and are answered, and nobody reads them, until `release_visibility`.

        Holds are counted. What is held counts as pending, so a hold that lasts is felt as LIMIT_MEMORY.
        """
        self._visibility_holds += 1

    def release_visibility(self) -> None:
        """With the last hold, what became durable meanwhile can be read at once; followers of the tail hear of it with the
        loop's next turn, so that several shards released in one turn show together."""
        assert self._visibility_holds
        self._visibility_holds -= 1
        if not self._visibility_holds and self._durable_end > self._high_watermark:
            self._show()
            self._wake_tail_soon()

    def stop(self, error: FelixError) -> None:
        """Stop serving for good, because something that was promised of this shard cannot be kept: as a failed write does."""
        self._fail(error)

    def _wake_tail_soon(self) -> None:
        if not self._tail_scheduled:
            self._tail_scheduled = True
            self._loop.call_soon(self._wake_tail)

    def _tell(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The loop is closed: the process is going down, and nobody waits any more.
            return

    # Back on the loop.

    def _finish(self, group: Sequence[_Pending], sync_ns: int) -> None:
        """A group is as durable as its stream asks: let it be read, answer it, wake the tail."""
        before = self._high_watermark
        for item in group:
            self._in_flight -= 1
            self.pending_bytes -= item.size
            if item.annotation or item.frees_slot:
                annotate(self.annotations, item.slot, item.annotation, alone=item.frees_slot)
            if item.batch and item.entry:
                self._count(item.batch.header)
                self._accept(item.entry)
        if not self._visibility_holds:
            self._show()
        self._settle()
        self.counters.groups += 1
        if sync_ns:
            self.counters.syncs += 1
            self.counters.sync_ns += sync_ns
        if self.state is State.FULL:
            self._move(Event.ROOM)
        for item in group:
            self._answer(item, item.answer)
        self._arm_timers()
        if self._high_watermark > before:
            self._wake_tail()
        if not self._in_flight:
            self._drained.set()

    def _answer(self, item: _Pending, result: Appended | FelixError) -> None:
        """One caller's mistake must not keep the others of its group waiting."""
        try:
            item.done(result)
        except Exception as error:
            self._report("The receiver of an append's answer failed", error)

    def _report(self, what: str, error: Exception) -> None:
        self._loop.call_exception_handler({"message": f"{what} ({self.identity.stream})", "exception": error})

    def _arm_timers(self) -> None:
        if self.settings.durability.kind is Kind.INTERVAL and self._sync_timer is None:
            self._sync_timer = self._loop.call_later(
                self.settings.durability.interval_ms / 1000, self._sync_soon
            )
        if self._mark_timer is None:
            self._mark_timer = self._loop.call_later(MARK_SYNC_IDLE_S, self._sync_mark_soon)
        disk, reader = self._disk, self._reader
        if disk and reader and disk.segment_count != self._segments_seen:
            self._segments_seen = disk.segment_count
            # A rolled segment: what is before it need not be read again to know the producers.
            snapshot, truncations = self.producers_snapshot(), reader.truncations

            def save() -> None:
                # A truncation in between made the snapshot claim what is no longer there.
                if truncations == reader.truncations:
                    disk.save_producers(snapshot)

            self._submit(save, optional=True)

    def _sync_soon(self) -> None:
        self._sync_timer = None
        disk = self._disk
        assert disk is not None
        sync = disk.sync

        def timed() -> None:
            begun = self._hooks.runtime.clock.monotonic_ns()
            sync()
            elapsed = self._hooks.runtime.clock.monotonic_ns() - begun
            self._tell(lambda: self._count_sync(elapsed))

        self._submit(timed)

    def _count_sync(self, elapsed_ns: int) -> None:
        self.counters.syncs += 1
        self.counters.sync_ns += elapsed_ns
        # Who may read only what is synced has something to read now.
        self._wake_tail()

    def _sync_mark_soon(self) -> None:
        self._mark_timer = None
        assert self._disk is not None
        self._submit(self._disk.sync_mark)

    def _submit(self, work: Callable[[], None], *, optional: bool = False) -> None:
        """Do something to the folder in a commit thread. A failure stops the shard, unless the work is a shortcut."""
        if self.state not in (State.SERVING, State.FULL):
            return

        def run() -> None:
            try:
                with self._writer:
                    work()
            except (OSError, FelixError) as error:
                if not optional:
                    failure = error if isinstance(error, FelixError) else storage_error(error, self._folder)
                    self._tell(lambda: self._fail(failure))

        self._commit_pool.submit(run)

    def _refuse(self, group: Sequence[_Pending], error: FelixError, *, no_room: bool, failed: bool) -> None:
        """Nothing of `group` is in the log: give its offsets back and answer."""
        self._take_back(self._durable_end)
        for item in group:
            self._in_flight -= 1
            self.pending_bytes -= item.size
        if no_room:
            self.counters.refused_disk_full += len(group)
            self._retry_at = self._loop.time() + FULL_RETRY_MS / 1000
            self._move(Event.NO_ROOM)
        with self._lock:
            self._refusing = None
        self._tell_rollback(self._next_offset, error)
        if failed:
            self._fail(error)
        for item in group:
            self._answer(item, error)
        if not self._in_flight:
            self._drained.set()

    def _fail(self, error: FelixError) -> None:
        """Stop serving, for good. What is pending is answered by the commit thread's refusal or here."""
        if self.failure is None and self.state is not State.STOPPED:
            self.failure = error
        self._move(Event.FAILURE)
        with self._lock:
            waiting, self._queue = self._queue, []
        for item in waiting:
            self._in_flight -= 1
            self.pending_bytes -= item.size
        if waiting:
            self._tell_rollback(min(item.answer.base_offset for item in waiting), error)
        for item in waiting:
            self._answer(item, error)
        if not self._in_flight:
            self._drained.set()
        self._wake_tail()

    def _tell_rollback(self, offset: int, error: FelixError) -> None:
        if self.observer is not None:
            self.observer.rolled_back(offset, error)

    # Reading.

    def subscribe_tail(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` on the loop, once per group, when the high watermark moved or the shard failed.

        Returns what ends it.
        """
        self._tail_callbacks.append(callback)

        def unsubscribe() -> None:
            if callback in self._tail_callbacks:
                self._tail_callbacks.remove(callback)

        return unsubscribe

    def _wake_tail(self) -> None:
        self._tail_scheduled = False
        for callback in tuple(self._tail_callbacks):
            try:
                callback()
            except Exception as error:
                self._report("A follower of the tail failed", error)

    def _check_readable(self, offset: int) -> None:
        if self.state not in (State.SERVING, State.FULL):
            raise self._not_serving().with_traceback(None)
        if not self.log_start_offset <= offset <= self._high_watermark:
            raise OffsetOutOfRangeError(offset, self.log_start_offset, self._high_watermark)

    def read_hot(self, offset: int, max_bytes: int) -> list[Entry] | None:
        """Entries from the one that holds `offset` on, from memory: at least one, then up to `max_bytes`.

        An empty list at the high watermark; None where only the disk has them (`read`). Raises
        OffsetOutOfRangeError outside the log, which names the first offset there is; UnavailableError.
        """
        self._check_readable(offset)
        found = self._ring.read(offset, max_bytes)
        if found is not None:
            self.counters.hot_reads += 1
        return found

    async def read(self, offset: int, max_bytes: int) -> list[Entry]:
        """As `read_hot`, from memory or disk. Also raises what opening a sealed batch raises, and CorruptionError."""
        hot = self.read_hot(offset, max_bytes)
        if hot is not None:
            return hot
        assert self._reader is not None
        batches = await self._reader.read(offset, max_bytes, self._high_watermark)
        return await self._loop.run_in_executor(self._read_pool, self._open_entries, batches)

    def _open_entries(self, batches: Sequence[SealedBatch]) -> list[Entry]:
        return [
            self._plain_entry(self._hooks.open_batch(Batch(batch.header, batch.data[HEADER_BYTES:])))
            for batch in batches
        ]

    async def read_sealed(self, offset: int, max_bytes: int) -> list[Entry]:
        """Batches as they stand on disk, below the synced offset: for bridges and followers. Raises as `read` does.

        What is not synced may be gone after a power cut, and its offsets given to other records: it stays here until then.

        Raises RequestError(UNSUPPORTED) on an ephemeral shard, which has nothing sealed.
        """
        if self._ephemeral:
            raise RequestError("An ephemeral shard keeps nothing sealed.", code=Code.UNSUPPORTED)
        self._check_readable(offset)
        assert self._reader is not None
        synced = self.synced_offset
        if offset >= synced:
            return []
        batches = await self._reader.read(offset, max_bytes, synced)
        return [
            Entry(batch.header.base_offset, batch.header.next_offset, batch.header.append_time_ms, batch.data)
            for batch in batches
        ]

    async def offset_for_time(self, time_ms: int) -> int:
        """Base offset of the first readable batch appended at or after `time_ms`, else the high watermark."""
        self._check_readable(self._high_watermark)
        if self._reader is None:
            return self._ring.offset_for_time(time_ms)
        return await self._reader.offset_for_time(time_ms, self._high_watermark)

    # Changing what is there.

    async def begin_epoch(self, epoch: int) -> None:
        """Become leader under `epoch`: durable before this returns; batches appended from now on carry it.

        Appends are refused meanwhile. Raises RequestError(CONFLICT) where a newer epoch has begun.
        """
        async with _Held(self, "its leader epoch changes"):
            history = EpochHistory(list(self._epochs.starts))
            if not history.begin(epoch, self._next_offset):
                return
            if self._disk:
                await self._change(self._disk.save_epochs, history)
            self._epochs = history

    async def truncate(self, offset: int) -> None:
        """Cut every batch that reaches past `offset`; for a follower whose log parts from its leader's.

        Appends are refused meanwhile. Raises OffsetOutOfRangeError outside the log.
        """
        async with _Held(self, "its log is being truncated"):
            if offset == self._next_offset:
                return
            self._check_readable(offset)
            if self._disk is None:
                self._ring.truncate(offset)
                self._high_watermark = self._durable_end = self._ring.next_offset
                self._take_back(self._high_watermark)
                return
            self._high_watermark = offset
            self._ring.truncate(offset)
            assert self._reader is not None
            with self._reader.truncating():
                self._producers = await self._change(self._disk.truncate, offset)
            self._next_offset = self._high_watermark = self._durable_end = self._disk.end_offset
            if self._ids is not None:
                self._ids.rollback(self._next_offset)
            self.annotations = dict(self._disk.annotations)
            self._segments_seen = self._disk.segment_count
            self._ring.truncate(self._next_offset)
            history = EpochHistory(list(self._epochs.starts))
            history.truncate(self._next_offset)
            await self._change(self._disk.save_epochs, history)
            self._epochs = history

    def hold_from(self, offset: int | None) -> None:
        """Under `acked` retention keep everything from `offset` on: the lowest committed offset of the shard's durable
        subscriptions; None where it has none, so that time and size alone decide. Until it is called once, all is kept."""
        self._held_from = offset

    def alter(self, settings: ShardSettings) -> None:
        """Take over retention, segments, compaction and deduplication of `settings`, from now on; all else stays as it was
        opened. A window of message ids that begins here does not know what was appended before."""
        self.settings = replace(
            self.settings,
            retention=settings.retention,
            segments=settings.segments,
            compaction=settings.compaction,
            deduplication=settings.deduplication,
            offload=settings.offload,
        )
        if settings.deduplication is None:
            self._ids = None
        elif self._ids is None:
            self._ids = MessageIds(settings.deduplication)
        else:
            self._ids.window_ms = settings.deduplication.window_ms
            self._ids.ids_max = settings.deduplication.ids_max
        if self._disk is not None:
            self._disk.limits = settings.segments

    async def sweep(self, now_ms: int) -> int:
        """Apply retention; the segments deleted (for an ephemeral shard, 0: its batches go one by one)."""
        if self.state not in (State.SERVING, State.FULL):
            return 0
        self._producers.expire(now_ms)
        retention = self.settings.retention
        disk = self._disk
        if disk is None:
            if retention.age_ms is not None:
                self._ring.evict_before(
                    now_ms - retention.age_ms, self._held_from if retention.acked else None
                )
            return 0
        below, hold = self._high_watermark, self._held_from
        if not disk.retention_due(retention, now_ms, below=below, hold=hold):
            return 0
        try:
            count = await self._change(lambda: disk.delete_old(retention, now_ms, below=below, hold=hold))
        except UnavailableError as error:
            if error.code is Code.DISK_FULL:
                # The roll before deletion found no room; the next sweep tries again.
                return 0
            raise
        self._log_start = disk.start_offset
        self.counters.segments_deleted += count
        self._segments_seen = disk.segment_count
        return count

    async def trim(self, offset: int) -> int:
        """Let go of what is below `offset`, in whole segments: for a log whose owner no longer needs it (a journal below
        its snapshot). The segments deleted; for an ephemeral shard 0.

        Raises OffsetOutOfRangeError above the high watermark; UnavailableError as a sweep does, DISK_FULL included.
        """
        if offset > self._high_watermark:
            raise OffsetOutOfRangeError(offset, self.log_start_offset, self._high_watermark)
        disk = self._disk
        if disk is None:
            return 0
        count = await self._change(disk.trim, offset, self._hooks.clock_ms())
        self._log_start = disk.start_offset
        self.counters.segments_deleted += count
        self._segments_seen = disk.segment_count
        return count

    # Maintenance: see region.log.maintenance.

    def compaction_due(self, now_ms: int) -> bool:
        """Whether `compact` would be worth its work; never where the stream is not compacted."""
        return self._maintenance is not None and self._maintenance.compaction_due(now_ms)

    async def compact(
        self,
        now_ms: int,
        pool: Executor,
        *,
        share: float = COMPACTION_SHARE,
        keys_bytes_max: int = KEYS_BYTES_MAX,
    ) -> CompactionReport | None:
        """One pass over the closed segments, in a thread of `pool`; None where there is nothing to compact.

        Reads and appends go on. `share` of the thread's time is worked, the rest slept. Raises UnavailableError: DISK_FULL,
        with all as it was; SHUTTING_DOWN where the shard closes meanwhile. CorruptionError, which stops the shard, and what
        opening or sealing a batch raises.
        """
        if self._maintenance is None:
            return None
        return await self._maintenance.compact(now_ms, pool, share, keys_bytes_max)

    def offload_due(self, now_ms: int) -> bool:
        """Whether `offload` would do anything."""
        return self._maintenance is not None and self._maintenance.offload_due(now_ms)

    async def offload(self, now_ms: int, base: str) -> OffloadReport:
        """Copy closed segments to the store, to below the URL `base`, let local files go that are beyond what is kept here,
        and delete in the store what retention let go; with an empty `base` only the last. Appends and reads go on.

        Raises UnavailableError: the store does not do what it is asked, and is tried again after a while, longer each
        time; SHUTTING_DOWN where the shard closes. CorruptionError, which stops the shard.
        """
        if self._maintenance is None:
            return OffloadReport()
        return await self._maintenance.offload(now_ms, base)

    def offload_later(self, now_ms: int) -> None:
        """A turn came to nothing: the next one is due after a while, longer each time."""
        if self._maintenance is not None:
            self._maintenance.offload_later(now_ms)

    def changes_refused(self) -> FelixError | None:
        """Why closed segments may not be rewritten or moved now; None where they may."""
        if self.state not in (State.SERVING, State.FULL):
            return self._hold or self._not_serving()
        return self.held_back()

    def held_back(self) -> FelixError | None:
        """Why a log that serves takes no appends for now: it is being changed, or its broker may not write. None where it does."""
        return self._hold or self._hooks.refusal()

    def producers_snapshot(self) -> bytes:
        """The producers and their sequences up to the high watermark, as they stand in a shard's folder."""
        return self._producers.encode(self._high_watermark)

    def segments_changed(self) -> None:
        """Their number is another than before, and not because one was rolled."""
        assert self._disk is not None
        self._segments_seen = self._disk.segment_count

    async def _change(self, work: Callable[..., _T], *arguments: object) -> _T:
        """Change the folder in a commit thread, as its only writer."""

        def run() -> _T:
            with self._writer:
                return work(*arguments)

        try:
            return await self._loop.run_in_executor(self._commit_pool, run)
        except OSError as error:
            failure = storage_error(error, self._folder)
            if not is_full(error):
                self._fail(failure)
            raise failure from error
        except (StorageFailedError, CorruptionError) as error:
            self._fail(error)
            raise

    async def close(self) -> None:
        """Answer what is pending, sync, and close. A failed shard's files are only closed. Repeating it does nothing."""
        if self.state is State.STOPPED:
            return
        self._hold = UnavailableError("The shard is closing.", code=Code.SHUTTING_DOWN)
        if self._maintenance is not None:
            self._maintenance.end()
        self._ending.set()
        await self._drained.wait()
        if self._reader is not None:
            await self._reader.ended()
        if self._maintenance is not None:
            await self._maintenance.ended()
        if self._closed:
            return
        self._closed = True
        for timer in (self._sync_timer, self._mark_timer):
            if timer:
                timer.cancel()
        failed = self.state is State.FAILED
        self._move(Event.CLOSED)
        disk, ahead = self._disk, self._ahead
        if disk is None or ahead is None:
            return
        if failed:
            await self._change(disk.abandon)
            await self._change(ahead.close)
            return
        snapshot = self.producers_snapshot()

        def finish() -> None:
            try:
                disk.save_producers(snapshot)
            except OSError as error:
                # It is only a shortcut; recovery reads the log instead.
                if not is_full(error):
                    raise
            finally:
                ahead.close()
                disk.close()

        await self._change(finish)


class _Held:
    """No append while the folder changes under it; begins once everything pending is answered."""

    def __init__(self, shard: ShardLog, why: str) -> None:
        self._shard = shard
        self._refusal = UnavailableError(
            f"The shard takes no appends while {why}.", code=Code.UNAVAILABLE, retry_after_ms=50
        )

    async def __aenter__(self) -> None:
        shard = self._shard
        if shard._hold:
            raise shard._hold.with_traceback(None)
        shard._hold = self._refusal
        try:
            await shard._drained.wait()
        except asyncio.CancelledError:
            shard._hold = None
            raise
        if shard.state not in (State.SERVING, State.FULL):
            shard._hold = None
            raise shard._not_serving().with_traceback(None)

    async def __aexit__(self, *_: object) -> None:
        if self._shard._hold is self._refusal:
            self._shard._hold = None


def _bug(error: Exception) -> FelixError:
    failure = FelixError(f"The shard stops: {type(error).__name__}: {error}.")
    failure.__cause__ = error
    return failure
