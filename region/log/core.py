"""What a shard's log decides: one value in, one value out. Pure: no clock, no thread, no file, no callback.

`LogCore.step(event, now)` changes the core and gives a `Ready`: what is to be written, who is to be answered, what may be read. The
actor (region.log.shard) carries it out, in the order of Ready's fields, and brings back what came of it as the next event. In the words of
etcd's raft: what must be durable before what is told.

Three ends, never one:

- the *log end*: accepted, numbered, perhaps still on its way to the disk;
- the *durable* end: as durable here as the stream asks;
- the *committed* end (the high watermark): durable on every copy that counts. What that is, the commit port says; alone, it is what is
  durable here.

They are points of the log, not offsets: a position entry has no offset of its own, and is told apart by how many follow a batch.

Invariants (asserted after each step in tests/log/test_core.py):
- committed <= durable <= log end, and nobody reads above the committed offset, nor above the first note that is not released;
- the committed end never goes back, but for `Truncated`, which asks the port first;
- each append is answered once: refused, or with its place once its point is committed, in the order of appending; where the commit port
  lets what is durable here be answered (`acks: leader`), what carries an annotation or a note still waits for its commit;
- offsets are given in the order of appending, without holes: where a write is refused, so is all that was on its way behind it;
- producers and ids settle at the committed end: what may still be cut may still be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Final, NamedTuple, Protocol

import msgspec

from felix.batch import Batch
from felix.errors import Code, FelixError, RequestError, UnavailableError
from region.log.admission import Admission, Admitted, Appended, Repeated, misfit
from region.log.ahead import Note
from region.log.counters import ShardCounters
from region.log.errors import FULL_RETRY_MS, disk_full
from region.log.frame import note_pieces
from region.log.point import LogPoint
from region.log.producers import ProducerTable
from region.log.ring import Entry
from region.log.segment import ANNOTATION_BYTES_MAX, ANNOTATION_SLOTS_MAX, ShardIdentity
from region.log.segment_scan import annotate
from region.log.shard_settings import ShardSettings
from region.log.states import TRANSITIONS, State
from region.log.states import Event as Turn

MARK_SYNC_IDLE_S: Final = 1.0
"""The mark is brought to the disk this long after appends began; see region.log.recovery for what it proves."""

Done = Callable[[Appended | FelixError], None]
"""Whom an append is answered to. The core carries it and never calls it."""


EntryOf = Callable[[Batch], Entry]


class CommitPort(Protocol):
    """How far the log is committed."""

    def committed(self, durable: LogPoint) -> LogPoint:
        """The highest point that is durable on every copy that counts, with ours at `durable`. Never falls, but after a cut."""

    def acknowledged(self, durable: LogPoint) -> LogPoint:
        """Up to where appends may be answered: from what `committed` says to `durable`."""

    def may_cut(self, point: LogPoint) -> bool:
        """Whether what stands from there on may be cut, though it was committed: nobody else was promised it."""


class Alone:
    """One copy: what is durable here is committed, and no other copy was told of it."""

    def committed(self, durable: LogPoint) -> LogPoint:
        """All of it."""
        return durable

    def acknowledged(self, durable: LogPoint) -> LogPoint:
        """The same."""
        return durable

    def may_cut(self, point: LogPoint) -> bool:
        """Always: to cut a lone log is to put it back."""
        return True


class Pending(msgspec.Struct, eq=False):
    """An append on its way. Without batch and annotation it frees its slot, or only waits for those before it (a repeated batch).

    `entry` is what readers will get of the batch; who writes it fills it in.
    """

    batch: Batch | None
    answer: Appended
    done: Done
    size: int
    epoch: int
    slot: int
    annotation: bytes
    point: LogPoint
    """where the log ends with it"""
    entry: Entry | None = None
    frees_slot: bool = False
    note: Note | None = None

    @property
    def rests_on_commit(self) -> bool:
        """Whether its answer says that it is committed, whatever plain batches are told: others build on it."""
        return bool(self.annotation) or self.frees_slot or self.note is not None


# -- events --------------------------------------------------------------------------------------------


class Append(msgspec.Struct, frozen=True):
    """A batch, an annotation for `slot`, or both in one; see `ShardLog.append_nowait`. `time_ms`: the wall clock. `held`: why the broker
    may not append now."""

    batch: Batch | None
    done: Done
    time_ms: int
    annotation: bytes = b""
    slot: int = 0
    expected_offset: int | None = None
    as_it_is: bool = False
    note: Note | None = None
    held: FelixError | None = None


class FreeSlot(NamedTuple):
    """Let go of a slot's annotation."""

    slot: int
    done: Done
    held: FelixError | None = None


class Written(NamedTuple):
    """The oldest of what was handed over is as durable as the stream asks, each batch with its entry. `sync_ns`: 0 without a sync."""

    group: Sequence[Pending]
    sync_ns: int = 0


class WriteRefused(NamedTuple):
    """Nothing of what is on its way is in the log. `no_room`: for want of it; `failed`: the log's state is not known any more."""

    error: FelixError
    no_room: bool = False
    failed: bool = False


class Dropped(NamedTuple):
    """The shard stops for good. `waiting`: of what is on its way, how many no thread has begun to write, the newest."""

    error: FelixError
    waiting: int


class CommitMoved(NamedTuple):
    """The commit port may have another answer."""


class NoteReleased(NamedTuple):
    """What a note stands for is done."""

    note: Note


class VisibilityHeld(NamedTuple):
    """What is committed from now on is answered, and not read. Counted."""


class VisibilityReleased(NamedTuple):
    """The end of one hold."""


class Hold(NamedTuple):
    """No appends until `Release`: the folder changes, or the shard closes."""

    why: UnavailableError


class Release(NamedTuple):
    """The end of a hold, if it is this one."""

    why: UnavailableError


class EpochBegan(NamedTuple):
    """Batches appended from now on carry it."""

    epoch: int


class Cutting(NamedTuple):
    """The log is about to be cut: nobody reads from there on."""

    point: LogPoint


class Truncated(NamedTuple):
    """The log was cut. None for producers: those that are known are rolled back."""

    end: LogPoint
    producers: ProducerTable | None = None
    annotations: dict[int, bytes] | None = None


class SyncDue(NamedTuple):
    """The timer of `Ready.sync_in_s`."""


class MarkDue(NamedTuple):
    """The timer of `Ready.mark_in_s`."""


class Closed(NamedTuple):
    """Nothing is on its way any more."""


Event = (
    Append
    | FreeSlot
    | Written
    | WriteRefused
    | Dropped
    | CommitMoved
    | NoteReleased
    | VisibilityHeld
    | VisibilityReleased
    | Hold
    | Release
    | EpochBegan
    | Cutting
    | Truncated
    | SyncDue
    | MarkDue
    | Closed
)


class Ready(msgspec.Struct, frozen=True):
    """What is to be done, in this order."""

    appended: Batch | None = None
    """has its offset, and is not durable: observers are to know"""
    write: Pending | None = None
    """to be written behind what was handed over before, and synced where the stream asks for it"""
    readable: Sequence[Entry] = ()
    """may be read from now on, in order"""
    rolled_back: tuple[int, FelixError] | None = None
    """what was appended from this offset on is not in the log: observers are to know"""
    answers: Sequence[tuple[Done, Appended | FelixError]] = ()
    sync_in_s: float | None = None
    mark_in_s: float | None = None
    sync: bool = False
    """what was written, now"""
    sync_mark: bool = False


NOTHING: Final = Ready()


@dataclass(slots=True)
class LogCore:
    """See the module. `now` of `step`: seconds of a clock that does not go back."""

    identity: ShardIdentity
    settings: ShardSettings
    admission: Admission
    commit: CommitPort
    in_memory: bool
    """an ephemeral log: what is accepted is as durable as it will be"""
    entry_of: EntryOf
    notes_in_log: bool
    """notes stand in the log, each before what it is for: a log that has copies"""
    log_end: LogPoint
    durable: LogPoint
    committed: LogPoint
    counters: ShardCounters = field(default_factory=ShardCounters)
    state: State = State.OPENING
    failure: FelixError | None = None
    hold: UnavailableError | None = None
    annotations: dict[int, bytes] = field(default_factory=dict)
    epoch: int = 0
    last_time_ms: int = 0
    readable_to: int = 0
    pending_bytes: int = 0
    """on their way to the disk"""
    invisible_bytes: int = 0
    """durable, and not readable yet"""
    # Lists, of which groups leave: an empty deque takes 760 bytes, and of most shards all three are empty.
    writing: list[Pending] = field(default_factory=list)
    """handed over, oldest first"""
    _uncommitted: list[Pending] = field(default_factory=list)
    _invisible: list[Entry] = field(default_factory=list)
    _holds: int = 0
    # Of notes that are not released, by their number: the offset that nobody may read yet.
    _noted: dict[int, int] = field(default_factory=dict)
    _next_note: int = 0
    _retry_at: float = 0.0
    _sync_armed: bool = False
    _mark_armed: bool = False

    @classmethod
    def beginning(
        cls,
        identity: ShardIdentity,
        settings: ShardSettings,
        point: LogPoint,
        entry_of: EntryOf,
        *,
        producers: ProducerTable | None = None,
        commit: CommitPort | None = None,
        notes_in_log: bool = False,
    ) -> LogCore:
        """Of a log whose entries below `point` are committed, such as one that was recovered alone. `entry_of`, pure, gives what
        readers get of a batch. `notes_in_log`: its copies need its notes."""
        return cls(
            identity,
            settings,
            Admission(
                identity,
                # An empty one is one, too: whoever handed it in goes on with it.
                ProducerTable(settled=point.offset) if producers is None else producers,
                settings.deduplication,
            ),
            commit or Alone(),
            settings.durability.kind == "ephemeral",
            entry_of,
            notes_in_log,
            log_end=point,
            durable=point,
            committed=point,
            readable_to=point.offset,
        )

    @property
    def first_unreleased(self) -> int:
        """The number of the oldest note that is not released, else of the next one."""
        return next(iter(self._noted), self._next_note)

    @property
    def has_notes(self) -> bool:
        """Whether some note is not released."""
        return bool(self._noted)

    def cut_refusal(self, point: LogPoint) -> FelixError | None:
        """Why the log may not be cut there: what stands behind it was committed, and others count on it. None where it may."""
        if point >= self.committed or self.commit.may_cut(point):
            return None
        return RequestError(
            f"The log is committed up to offset {self.committed.offset}; it cannot be cut at {point.offset}.",
            code=Code.CONFLICT,
        )

    def take_note(self, data: bytes) -> Note:
        """A note for the next append: from now on nobody reads what is appended, until it is released."""
        note = Note(self._next_note, data)
        self._next_note += 1
        self._noted[note.number] = self.log_end.offset
        return note

    def alter(self, settings: ShardSettings) -> None:
        """Take over all of it but what the shard was opened with (`ShardSettings.altered`)."""
        self.settings = self.settings.altered(settings)
        self.admission.alter(settings.deduplication)

    def not_serving(self) -> FelixError:
        """Why a shard that does not serve does not."""
        if self.failure:
            return self.failure
        return UnavailableError(f"The shard is {self.state.value}.", code=Code.SHUTTING_DOWN)

    def turn(self, what: Turn) -> None:
        """Something happened to the shard as a whole (region.log.states)."""
        self.state = TRANSITIONS[self.state, what]

    def step(self, event: Event, now: float) -> Ready:
        """What `event` means, at `now`."""
        # First, and by their exact types: these two are each batch's.
        if type(event) is Append:
            return self._append(event, now)
        if type(event) is Written:
            return self._written(event)
        match event:
            case FreeSlot():
                return self._free_slot(event)
            case WriteRefused():
                return self._write_refused(event, now)
            case Dropped():
                return self._dropped(event)
            case CommitMoved():
                return self._advance()
            case NoteReleased(note):
                self._noted.pop(note.number, None)
                return Ready(readable=self._show())
            case VisibilityHeld():
                self._holds += 1
            case VisibilityReleased():
                assert self._holds
                self._holds -= 1
                return Ready(readable=self._show())
            case Hold(why):
                self.hold = why
            case Release(why):
                if self.hold is why:
                    self.hold = None
            case EpochBegan(epoch):
                self.epoch = epoch
            case Cutting(point):
                self.readable_to = min(self.readable_to, point.offset)
            case Truncated():
                return self._truncated(event)
            case SyncDue():
                self._sync_armed = False
                return Ready(sync=True)
            case MarkDue():
                self._mark_armed = False
                return Ready(sync_mark=True)
            case Closed():
                return self._closed()
        return NOTHING

    # -- appending -------------------------------------------------------------------------------------

    def _append(self, event: Append, now: float) -> Ready:
        batch, annotation = event.batch, event.annotation
        refused = self._refusal(event, now)
        if refused is not None:
            return Ready(answers=((event.done, refused),))
        now_ms = max(self.last_time_ms, event.time_ms)
        end = self.log_end
        note_bytes = len(event.note.data) if event.note else 0
        if batch is None:
            return self._position(event, Appended(end.offset, now_ms), len(annotation) + note_bytes)
        verdict = self.admission.admit(
            batch,
            end.offset,
            self.epoch,
            now_ms,
            expected_offset=event.expected_offset,
            as_it_is=event.as_it_is,
        )
        if type(verdict) is Admitted:
            batch, answer = verdict.batch, verdict.answer
            header = batch.header
            self.counters.repeated_ids += verdict.left_out
            self.last_time_ms = now_ms
            if self.in_memory and not (annotation or self._holds or self._invisible or self._noted):
                return self._kept_in_memory(batch, header.next_offset, event.done, answer)
            self.log_end = end = LogPoint(header.next_offset, 0)
            size = header.total_length + len(annotation) + note_bytes
            item = Pending(
                batch,
                answer,
                event.done,
                size,
                self.epoch,
                event.slot,
                annotation,
                end,
                None,
                False,
                event.note,
            )
            return self._hand_over(item)
        if isinstance(verdict, Repeated):
            return self._repeated(event, verdict, now_ms)
        assert isinstance(verdict, FelixError)
        return Ready(answers=((event.done, verdict),))

    def _kept_in_memory(self, batch: Batch, end: int, done: Done, answer: Appended) -> Ready:
        """What `_hand_over` comes to where nothing is hidden: an ephemeral log has no other copy, so its three ends are one."""
        header, counters = batch.header, self.counters
        counters.batches += 1
        counters.records += header.records
        counters.appended_bytes += header.total_length
        self.log_end = self.durable = self.committed = LogPoint(end, 0)
        self.readable_to = end
        self.admission.settle(end, self.last_time_ms)
        return Ready(batch, None, (self.entry_of(batch),), None, ((done, answer),))

    def _repeated(self, event: Append, verdict: Repeated, now_ms: int) -> Ready:
        if verdict.by_ids:
            self.counters.repeated_ids += verdict.left_out
            if event.annotation:
                # It stands in the log by itself, where the log ends.
                answer = Appended(self.log_end.offset, now_ms, True, verdict.answer.offsets)
                return self._position(event, answer, len(event.annotation))
        else:
            self.counters.duplicates += 1
        if verdict.end <= self.committed.offset:
            return Ready(answers=((event.done, verdict.answer),))
        # The first copy is not committed yet; this one is answered after it, and fails with it.
        return self._hand_over(Pending(None, verdict.answer, event.done, 0, self.epoch, 0, b"", self.log_end))

    def _position(self, event: Append, answer: Appended, size: int) -> Ready:
        pieces = note_pieces(event.note.data) if event.note is not None and self.notes_in_log else 0
        self.log_end = LogPoint(self.log_end.offset, self.log_end.note + pieces + 1)
        item = Pending(
            None, answer, event.done, size, self.epoch, event.slot, event.annotation, self.log_end, note=event.note
        )  # fmt: skip
        return self._hand_over(item)

    def _free_slot(self, event: FreeSlot) -> Ready:
        refused = self.not_serving() if self.state is not State.SERVING else self.hold or event.held
        answer = Appended(self.log_end.offset, self.last_time_ms)
        if refused is not None:
            return Ready(answers=((event.done, refused),))
        if event.slot not in self.annotations:
            return Ready(answers=((event.done, answer),))
        self.log_end = LogPoint(self.log_end.offset, self.log_end.note + 1)
        item = Pending(
            None, answer, event.done, 0, self.epoch, event.slot, b"", self.log_end, frees_slot=True
        )
        return self._hand_over(item)

    def _hand_over(self, item: Pending) -> Ready:
        if self.in_memory:
            if item.batch is not None:
                item.entry = self.entry_of(item.batch)
            return self._keep((item,), item.batch)
        self.writing.append(item)
        self.pending_bytes += item.size
        return Ready(item.batch, item)

    def _refusal(self, event: Append, now: float) -> FelixError | None:
        """Why nothing may be appended now, or not this; None where it may."""
        if self.state is not State.SERVING and (stopped := self._state_refusal(now)):
            return stopped
        if held := self.hold or event.held:
            return held
        batch, annotation = event.batch, event.annotation
        if (
            annotation
            and event.slot not in self.annotations
            and len(self.annotations) >= ANNOTATION_SLOTS_MAX
        ):
            return RequestError(
                f"The shard holds annotations of {ANNOTATION_SLOTS_MAX} sources, which is the most it can.",
                hint="Spread the sources over more shards.",
            )
        if len(annotation) > ANNOTATION_BYTES_MAX or (batch is None and not annotation):
            return RequestError(
                f"An annotation has 1 to {ANNOTATION_BYTES_MAX} bytes, not {len(annotation)}."
            )
        size = len(annotation) + (len(event.note.data) if event.note else 0)
        if batch is not None:
            size += batch.header.total_length
            if (wrong := misfit(batch)) is not None:
                return wrong
        waiting = self.pending_bytes + self.invisible_bytes
        if waiting + size > self.settings.pending_bytes_max:
            self.counters.refused_memory += 1
            return UnavailableError(
                f"{waiting} bytes of this shard wait for the disk; "
                f"{self.settings.pending_bytes_max} are allowed.",
                code=Code.LIMIT_MEMORY,
                retry_after_ms=50,
            )
        return None

    def no_room(self, now: float) -> FelixError | None:
        """Why every append is refused at once: the disk was full a moment ago. None where one may find out whether it still is."""
        return disk_full() if self.state is State.FULL and now < self._retry_at else None

    def _state_refusal(self, now: float) -> FelixError | None:
        if self.state is not State.FULL:
            return self.not_serving()
        if now >= self._retry_at:
            self._retry_at = now + FULL_RETRY_MS / 1000
            return None
        self.counters.refused_disk_full += 1
        return disk_full()

    # -- what became of it -----------------------------------------------------------------------------

    def _written(self, event: Written) -> Ready:
        group, sync_ns = event
        counters, writing = self.counters, self.writing
        assert len(group) <= len(writing) and all(map(is_, group, writing))
        del writing[: len(group)]
        self.pending_bytes -= sum(item.size for item in group)
        counters.groups += 1
        if sync_ns:
            counters.syncs += 1
            counters.sync_ns += sync_ns
        if self.state is State.FULL:
            self.turn(Turn.ROOM)
        ready = self._keep(group)
        if self._mark_armed and (self._sync_armed or self.settings.durability.kind != "interval"):
            return ready
        sync_in_s = mark_in_s = None
        if not self._mark_armed:
            self._mark_armed, mark_in_s = True, MARK_SYNC_IDLE_S
        if self.settings.durability.kind == "interval" and not self._sync_armed:
            self._sync_armed, sync_in_s = True, self.settings.durability.interval_ms / 1000
        return msgspec.structs.replace(ready, sync_in_s=sync_in_s, mark_in_s=mark_in_s)

    def _keep(self, group: Sequence[Pending], appended: Batch | None = None) -> Ready:
        """These are durable."""
        counters, uncommitted = self.counters, self._uncommitted
        for item in group:
            uncommitted.append(item)
            entry = item.entry
            if entry is not None and item.batch is not None:
                header = item.batch.header
                counters.batches += 1
                counters.records += header.records
                counters.appended_bytes += header.total_length
                self._invisible.append(entry)
                self.invisible_bytes += len(entry.data)
        self.durable = group[-1].point
        return self._advance(appended)

    def _advance(self, appended: Batch | None = None) -> Ready:
        """Move the committed end, and what it releases."""
        committed = self.commit.committed(self.durable)
        acknowledged = self.commit.acknowledged(self.durable)
        assert self.committed <= committed <= acknowledged <= self.durable
        self.committed = committed
        waiting = self._uncommitted
        answers: list[tuple[Done, Appended | FelixError]] = []
        for item in waiting:
            if item.point > acknowledged or (item.point > committed and item.rests_on_commit):
                break
            if item.annotation or item.frees_slot:
                annotate(self.annotations, item.slot, item.annotation, alone=item.frees_slot)
            answers.append((item.done, item.answer))
        del waiting[: len(answers)]
        self.admission.settle(committed.offset, self.last_time_ms)
        return Ready(appended, None, self._show(), None, answers)

    def _show(self) -> Sequence[Entry]:
        """Let what is committed be read, up to the first note that is not released."""
        if self._holds or not self._invisible:
            return ()
        limit = self.committed.offset
        if self._noted:
            limit = min(limit, next(iter(self._noted.values())))
        invisible, shown = self._invisible, list[Entry]()
        for entry in invisible:
            if entry.next_offset > limit:
                break
            self.invisible_bytes -= len(entry.data)
            shown.append(entry)
        del invisible[: len(shown)]
        if shown:
            self.readable_to = shown[-1].next_offset
        return shown

    def _write_refused(self, event: WriteRefused, now: float) -> Ready:
        group = list(self.writing)
        if event.no_room:
            self.counters.refused_disk_full += len(group)
            self._retry_at = now + FULL_RETRY_MS / 1000
            self.turn(Turn.NO_ROOM)
        if event.failed:
            self._stop(event.error)
        return self._take_back(group, event.error)

    def _dropped(self, event: Dropped) -> Ready:
        self._stop(event.error)
        first = len(self.writing) - event.waiting
        return self._take_back(
            [item for place, item in enumerate(self.writing) if place >= first], event.error
        )

    def _stop(self, error: FelixError) -> None:
        if self.failure is None and self.state is not State.STOPPED:
            self.failure = error
        self.turn(Turn.FAILURE)

    def _take_back(self, group: Sequence[Pending], error: FelixError) -> Ready:
        """The newest of what is on its way is not in the log after all: its offsets are given anew."""
        if not group:
            return NOTHING
        assert len(group) <= len(self.writing) and all(map(is_, group, self.writing[-len(group) :]))
        del self.writing[-len(group) :]
        self.pending_bytes -= sum(item.size for item in group)
        self.log_end = self.writing[-1].point if self.writing else self.durable
        self._forget_from(self.log_end.offset)
        return Ready(rolled_back=(self.log_end.offset, error), answers=[(item.done, error) for item in group])

    def _forget_from(self, offset: int) -> None:
        """What was appended from there on is not in the log after all, and other batches get its offsets."""
        self.admission.rollback(offset)
        # A note that is not released yet stands at the lowest offset that its batch may still hide.
        for number, hidden_from in self._noted.items():
            self._noted[number] = min(hidden_from, offset)

    def _truncated(self, event: Truncated) -> Ready:
        point = event.end
        assert not self.writing and point <= self.log_end
        error = UnavailableError(
            f"The log was cut at offset {point.offset}; what was appended from there on is not in it.",
            code=Code.NOT_LEADER,
        )
        answers: list[tuple[Done, Appended | FelixError]] = []
        while self._uncommitted and self._uncommitted[-1].point > point:
            answers.append((self._uncommitted.pop().done, error))
        while self._invisible and self._invisible[-1].next_offset > point.offset:
            self.invisible_bytes -= len(self._invisible.pop().data)
        self.log_end = self.durable = point
        self.committed = min(self.committed, point)
        self.readable_to = min(self.readable_to, point.offset)
        if event.producers is not None:
            self.admission.producers = event.producers
        self._forget_from(point.offset)
        if event.annotations is not None:
            self.annotations = event.annotations
        return Ready(rolled_back=(point.offset, error), answers=answers[::-1])

    def _closed(self) -> Ready:
        """What is durable here and committed nowhere else yet: nobody can say what becomes of it."""
        error = UnavailableError(
            "The shard closed before this was committed; it may be in the log or not.", code=Code.NOT_LEADER
        )
        answers = [(item.done, error) for item in self._uncommitted]
        self._uncommitted.clear()
        self.turn(Turn.CLOSED)
        return Ready(answers=answers)
