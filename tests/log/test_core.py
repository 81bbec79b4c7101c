"""The log's core against a simple model, with writes that are refused, a commit that lags, holds, notes, cuts and stops."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from log.building import IDENTITY, batch_of

from felix.batch import Batch
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.settings import EPHEMERAL, FSYNC, Compaction, Deduplication, Durability, Offload, Retention
from region.log import core
from region.log.admission import Appended
from region.log.ahead import Note
from region.log.core import LogCore, Pending, Ready
from region.log.point import LogPoint
from region.log.ring import Entry
from region.log.segment_limits import SegmentLimits
from region.log.shard_settings import OPENED_WITH, ShardSettings
from region.log.states import Event, State

INTERVAL = Durability("interval", 50)
BEGIN = LogPoint(0)
ERROR = UnavailableError("It was refused.")


def entry_of(batch: Batch) -> Entry:
    header = batch.header
    return Entry(header.base_offset, header.next_offset, header.append_time_ms, batch.body)


@dataclass
class Lagging:
    """Other copies: they have come so far, and no further."""

    others: LogPoint
    cuts: bool = True
    here: LogPoint | None = None
    """on the disk of the leader, whose word is enough for an answer; None: it is not"""

    def committed(self, durable: LogPoint) -> LogPoint:
        return min(durable, self.others)

    def acknowledged(self, durable: LogPoint) -> LogPoint:
        return self.committed(durable) if self.here is None else max(self.others, min(durable, self.here))

    def may_cut(self, point: LogPoint) -> bool:
        return self.cuts


def core_of(settings: ShardSettings | None = None, commit: Lagging | None = None) -> LogCore:
    made = LogCore.beginning(IDENTITY, settings or ShardSettings(), LogPoint(0), entry_of, commit=commit)
    made.turn(Event.OPENED)
    return made


@dataclass
class Driver:
    """An actor without threads and files: keeps what it was told, in order."""

    core: LogCore
    queue: list[Pending] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """what was told, as text"""
    read: list[Entry] = field(default_factory=list)
    now: float = 0.0

    def step(self, event: core.Event) -> Ready:
        ready = self.core.step(event, self.now)
        if ready.appended is not None:
            self.log.append(f"observe {ready.appended.header.base_offset}")
        if ready.write is not None:
            self.queue.append(ready.write)
        for entry in ready.readable:
            self.read.append(entry)
            self.log.append(f"read to {entry.next_offset}")
        if ready.rolled_back is not None:
            self.log.append(f"rolled back to {ready.rolled_back[0]}")
        for done, result in ready.answers:
            done(result)
        return ready

    def append(self, name: str, batch: Batch | None, **more: object) -> Ready:
        def done(result: Appended | FelixError) -> None:
            if isinstance(result, FelixError):
                self.log.append(f"{name} refused {result.code.name}")
            else:
                again = " again" if result.duplicate else ""
                self.log.append(f"{name} at {result.base_offset}{again}")

        return self.step(core.Append(batch, done, 1_000, **more))  # type: ignore[arg-type]

    def write(self, count: int | None = None) -> Ready:
        group, self.queue = self.queue[:count], self.queue[count:] if count is not None else []
        for item in group:
            if item.batch is not None:
                item.entry = entry_of(item.batch)
        return self.step(core.Written(group))

    def told(self) -> list[str]:
        log, self.log = self.log, []
        return log


# -- scenarios -----------------------------------------------------------------------------------------


def test_an_append_is_written_then_read_then_answered() -> None:
    actor = Driver(core_of())
    assert actor.append("a", batch_of(b"1", b"2")).write is not None
    assert actor.told() == ["observe 0"]
    assert (actor.core.log_end.offset, actor.core.durable.offset, actor.core.committed.offset) == (2, 0, 0)
    actor.write()
    assert actor.told() == ["read to 2", "a at 0"]
    assert actor.core.log_end == actor.core.durable == actor.core.committed == LogPoint(2)


def test_what_is_durable_here_alone_is_neither_read_nor_answered_until_it_is_committed() -> None:
    others = Lagging(BEGIN)
    actor = Driver(core_of(commit=others))
    actor.append("a", batch_of(b"1"))
    actor.append("b", batch_of(b"2"))
    actor.write()
    assert actor.told() == ["observe 0", "observe 1"] and actor.core.durable == LogPoint(2)
    others.others = LogPoint(1)
    actor.step(core.CommitMoved())
    assert actor.told() == ["read to 1", "a at 0"]
    others.others = LogPoint(9)
    actor.step(core.CommitMoved())
    assert actor.told() == ["read to 2", "b at 1"]


def test_with_acks_leader_what_is_on_its_disk_is_answered_before_it_is_committed_and_read_after() -> None:
    others = Lagging(BEGIN, here=BEGIN)
    actor = Driver(core_of(commit=others))
    actor.append("a", batch_of(b"1", producer=5))
    actor.append("p", None, annotation=b"1", slot=7)
    actor.append("b", batch_of(b"2"))
    actor.write()
    assert actor.told() == ["observe 0", "observe 1"], "given to the file, and not synced"
    others.here = LogPoint(2)
    actor.step(core.CommitMoved())
    assert actor.told() == ["a at 0"], "others build on a position: it, and what stands behind it, waits"
    assert actor.core.annotations == {} and actor.core.readable_to == 0
    others.others = LogPoint(1, 1)
    actor.step(core.CommitMoved())
    assert actor.told() == ["read to 1", "p at 1", "b at 1"]
    actor.step(core.Closed())
    assert actor.told() == [], "each is answered once"


def test_a_position_is_told_apart_from_another_one_at_the_same_offset() -> None:
    others = Lagging(BEGIN)
    actor = Driver(core_of(commit=others))
    actor.append("a", batch_of(b"1"))
    for number in range(3):
        actor.append(f"p{number}", None, annotation=b"%d" % number, slot=7)
    actor.write()
    actor.told()
    others.others = LogPoint(1, 2)
    actor.step(core.CommitMoved())
    assert actor.told() == ["read to 1", "a at 0", "p0 at 1", "p1 at 1"]
    assert actor.core.annotations == {7: b"1"}, "what is not committed is not told"
    others.others = LogPoint(1, 3)
    actor.step(core.CommitMoved())
    assert actor.told() == ["p2 at 1"] and actor.core.annotations == {7: b"2"}


def test_a_repeated_batch_is_answered_when_its_first_copy_is_committed_and_fails_with_it() -> None:
    others = Lagging(BEGIN)
    actor = Driver(core_of(commit=others))
    batch = batch_of(b"1", producer=5)
    actor.append("first", batch)
    actor.append("again", batch)
    actor.write()
    assert actor.told() == ["observe 0"]
    others.others = LogPoint(1)
    actor.step(core.CommitMoved())
    assert actor.told() == ["read to 1", "first at 0", "again at 0 again"]
    actor.append("late", batch)
    assert actor.told() == ["late at 0 again"] and not actor.queue
    second = batch_of(b"2", producer=5, sequence=1)
    actor.append("second", second)
    actor.append("second again", second)
    actor.step(core.WriteRefused(ERROR))
    assert actor.told() == [
        "observe 1",
        "rolled back to 1",
        "second refused UNAVAILABLE",
        "second again refused UNAVAILABLE",
    ]


def test_a_refused_write_takes_everything_behind_it_and_its_offsets_are_given_anew() -> None:
    actor = Driver(core_of())
    actor.append("a", batch_of(b"1"))
    actor.append("b", batch_of(b"2", b"3", producer=5))
    actor.append("c", batch_of(b"4"))
    actor.write(1)
    actor.told()
    actor.queue.clear()
    actor.step(core.WriteRefused(ERROR, no_room=True))
    assert actor.told() == ["rolled back to 1", "b refused UNAVAILABLE", "c refused UNAVAILABLE"]
    assert actor.core.state is State.FULL and actor.core.log_end == LogPoint(1)
    actor.now += 1
    actor.append("b2", batch_of(b"2", b"3", producer=5))
    actor.append("d", batch_of(b"5"))
    actor.write()
    assert actor.told() == ["observe 1", "d refused DISK_FULL", "read to 3", "b2 at 1"]
    assert actor.core.state is State.SERVING


def test_a_stop_refuses_what_no_thread_has_begun_and_leaves_the_rest_to_its_end() -> None:
    actor = Driver(core_of())
    for name in "abc":
        actor.append(name, batch_of(b"1"))
    actor.told()
    # A thread has taken the first; two wait.
    actor.step(core.Dropped(ERROR, 2))
    assert actor.told() == ["rolled back to 1", "b refused UNAVAILABLE", "c refused UNAVAILABLE"]
    actor.write(1)
    assert actor.told() == ["read to 1", "a at 0"]
    assert actor.core.state is State.FAILED and actor.core.failure is ERROR
    actor.append("d", batch_of(b"1"))
    assert actor.told() == ["d refused UNAVAILABLE"]


def test_holds_and_notes_keep_readers_below_them_and_answers_go_on() -> None:
    actor = Driver(core_of())
    note = actor.core.take_note(b"leaves")
    actor.append("noted", batch_of(b"1"), note=note)
    actor.append("behind", batch_of(b"2"))
    actor.write()
    assert actor.told() == ["observe 0", "observe 1", "noted at 0", "behind at 1"]
    actor.step(core.VisibilityHeld())
    actor.step(core.NoteReleased(note))
    assert actor.told() == [] and actor.core.readable_to == 0 and actor.core.invisible_bytes > 0
    actor.step(core.VisibilityReleased())
    assert actor.told() == ["read to 1", "read to 2"] and actor.core.invisible_bytes == 0


def test_what_was_committed_is_not_cut_where_others_count_on_it() -> None:
    others = Lagging(LogPoint(1), cuts=False)
    actor = Driver(core_of(commit=others))
    actor.append("a", batch_of(b"1"))
    actor.append("b", batch_of(b"2", producer=5))
    actor.write()
    actor.told()
    refused = actor.core.cut_refusal(LogPoint(0))
    assert isinstance(refused, RequestError) and refused.code is Code.CONFLICT
    assert actor.core.cut_refusal(LogPoint(1)) is None
    actor.step(core.Truncated(LogPoint(1)))
    assert actor.told() == ["rolled back to 1", "b refused NOT_LEADER"]
    assert actor.core.log_end == actor.core.durable == actor.core.committed == LogPoint(1)
    others.others = LogPoint(9)
    actor.append("b2", batch_of(b"3", producer=5))
    actor.write()
    assert actor.told() == ["observe 1", "read to 2", "b2 at 1"], "the producer may send what was cut again"


def test_each_setting_is_altered_while_the_shard_serves_but_for_what_it_was_opened_with() -> None:
    """A setting that is added later counts without a word in the core: `fields` has it here, too."""
    opened = ShardSettings()
    wanted = ShardSettings(
        INTERVAL, Retention(age_ms=7), SegmentLimits(segment_age_ms=7), compaction=Compaction(), offload=Offload("file:///x"),
        ring_bytes_max=7, ring_entries_max=7, pending_bytes_max=7, deduplication=Deduplication(), first_offset=7,
    )  # fmt: skip
    names = [each.name for each in fields(ShardSettings)]
    same = [name for name in names if getattr(opened, name) == getattr(wanted, name)]
    assert not same, "give a setting that is new another value above"
    core = core_of(opened)
    core.alter(wanted)
    assert core.settings == replace(wanted, **{name: getattr(opened, name) for name in OPENED_WITH})
    assert {name for name in names if getattr(core.settings, name) == getattr(opened, name)} == set(
        OPENED_WITH
    )
    assert core.admission.ids is not None


def test_what_closes_uncommitted_is_answered_as_unknown() -> None:
    actor = Driver(core_of(commit=Lagging(BEGIN)))
    actor.append("a", batch_of(b"1"))
    actor.write()
    actor.told()
    actor.step(core.Closed())
    assert actor.told() == ["a refused NOT_LEADER"] and actor.core.state is State.STOPPED


def test_timers_are_asked_for_once_until_they_came() -> None:
    actor = Driver(core_of(ShardSettings(durability=INTERVAL)))
    actor.append("a", batch_of(b"1"))
    ready = actor.write()
    assert (ready.sync_in_s, ready.mark_in_s) == (0.05, core.MARK_SYNC_IDLE_S)
    actor.append("b", batch_of(b"1"))
    ready = actor.write()
    assert (ready.sync_in_s, ready.mark_in_s) == (None, None)
    assert actor.step(core.SyncDue()).sync and actor.step(core.MarkDue()).sync_mark
    actor.append("c", batch_of(b"1"))
    ready = actor.write()
    assert (ready.sync_in_s, ready.mark_in_s) == (0.05, core.MARK_SYNC_IDLE_S)


def test_an_ephemeral_log_needs_nobody_to_write_it() -> None:
    actor = Driver(core_of(ShardSettings(durability=EPHEMERAL)))
    assert actor.append("a", batch_of(b"1")).write is None
    actor.append("p", None, annotation=b"x", slot=3)
    assert actor.told() == ["observe 0", "read to 1", "a at 0", "p at 1"]
    assert actor.core.annotations == {3: b"x"}


def test_whoever_may_not_write_is_refused_before_anything_else() -> None:
    actor = Driver(core_of())
    held = UnavailableError("Elsewhere.", code=Code.NOT_LEADER)
    actor.append("a", batch_of(b"1"), held=held)
    closing = UnavailableError("Closing.", code=Code.SHUTTING_DOWN)
    actor.step(core.Hold(closing))
    actor.append("b", batch_of(b"1"))
    actor.step(core.Release(held))
    actor.append("c", batch_of(b"1"))
    actor.step(core.Release(closing))
    actor.append("d", batch_of(b"1"))
    assert actor.told() == [
        "a refused NOT_LEADER",
        "b refused SHUTTING_DOWN",
        "c refused SHUTTING_DOWN",
        "observe 0",
    ]


# -- against a model -----------------------------------------------------------------------------------

DURABILITIES = st.sampled_from([FSYNC, FSYNC, INTERVAL, EPHEMERAL])


class CoreAgainstModel(RuleBasedStateMachine):
    """The model: what was appended in order, cut where a write was refused; nothing else."""

    @initialize(durability=DURABILITIES, lags=st.booleans(), deduplicates=st.booleans())
    def begin(self, durability: Durability, lags: bool, deduplicates: bool) -> None:
        self.others = Lagging(BEGIN) if lags and durability is not EPHEMERAL else None
        self.actor = Driver(
            core_of(
                ShardSettings(
                    durability=durability,
                    deduplication=Deduplication(60_000, 100) if deduplicates else None,
                    pending_bytes_max=4_000,
                ),
                self.others,
            )
        )
        self.accepted: list[bytes] = []
        """payloads in the order of their offsets, written or not"""
        self.answers: dict[int, Appended | FelixError] = {}
        self.asked: dict[int, bytes] = {}
        self.sequence = 0
        self.notes: list[Note] = []
        self.holds = 0
        self.seen_committed = LogPoint(0)

    def _append(self, payload: bytes, batch: Batch, note: Note | None = None) -> None:
        number = len(self.asked)
        self.asked[number] = payload

        def done(result: Appended | FelixError) -> None:
            assert number not in self.answers, "answered twice"
            self.answers[number] = result

        before = self.actor.core.log_end.offset
        self.actor.step(core.Append(batch, done, 1_000, note=note))
        if self.actor.core.log_end.offset > before:
            self.accepted.append(payload)

    @rule(size=st.integers(1, 400))
    def append(self, size: int) -> None:
        payload = b"%d:" % len(self.asked) + b"x" * size
        self._append(payload, batch_of(payload))

    @rule()
    def append_numbered(self) -> None:
        """Of a producer that goes on where the log says it is."""
        known = dict(self.actor.core.admission.producers)
        sequence = known[9][-1].next_sequence if 9 in known else 0
        payload = b"%d" % len(self.asked)
        self._append(payload, batch_of(payload, producer=9, sequence=sequence))

    @rule()
    def append_with_a_note(self) -> None:
        note = self.actor.core.take_note(b"note")
        self.notes.append(note)
        payload = b"%d" % len(self.asked)
        self._append(payload, batch_of(payload), note)

    @rule(slot=st.integers(0, 3))
    def annotate(self, slot: int) -> None:
        number = len(self.asked)
        self.asked[number] = b""

        def done(result: Appended | FelixError) -> None:
            assert number not in self.answers
            self.answers[number] = result

        self.actor.step(core.Append(None, done, 1_000, b"@%d" % number, slot))

    @precondition(lambda self: self.notes)
    @rule()
    def release_note(self) -> None:
        self.actor.step(core.NoteReleased(self.notes.pop(0)))

    @rule()
    def hold(self) -> None:
        self.holds += 1
        self.actor.step(core.VisibilityHeld())

    @precondition(lambda self: self.holds)
    @rule()
    def release(self) -> None:
        self.holds -= 1
        self.actor.step(core.VisibilityReleased())

    @precondition(lambda self: self.actor.queue)
    @rule(count=st.integers(1, 5))
    def write(self, count: int) -> None:
        self.actor.write(count)

    @precondition(lambda self: self.actor.queue)
    @rule(no_room=st.booleans())
    def refuse(self, no_room: bool) -> None:
        self.actor.queue.clear()
        self.actor.step(core.WriteRefused(ERROR, no_room=no_room))
        self.actor.now += 10
        del self.accepted[self.actor.core.log_end.offset :]

    @precondition(lambda self: self.others is not None)
    @rule(offset=st.integers(0, 60), note=st.integers(0, 3))
    def others_catch_up(self, offset: int, note: int) -> None:
        assert self.others is not None
        self.others.others = max(self.others.others, LogPoint(offset, note))
        self.actor.step(core.CommitMoved())

    @precondition(lambda self: not self.actor.queue)
    @rule(back=st.integers(0, 4))
    def cut(self, back: int) -> None:
        held = self.actor.core
        end = max(0, held.log_end.offset - back)
        if end < held.log_end.offset and LogPoint(end) >= held.committed:
            self.actor.step(core.Truncated(LogPoint(end)))
            del self.accepted[end:]

    @invariant()
    def the_ends_are_in_order(self) -> None:
        held = self.actor.core
        assert self.seen_committed <= held.committed <= held.durable <= held.log_end
        assert held.readable_to <= held.committed.offset
        self.seen_committed = held.committed
        if self.notes:
            assert held.readable_to <= held._noted[self.notes[0].number]

    @invariant()
    def what_is_read_is_what_was_accepted(self) -> None:
        found = [bytes(entry.data) for entry in self.actor.read]
        assert len(found) == self.actor.core.readable_to
        for body, payload in zip(found, self.accepted, strict=False):
            assert payload in body

    @invariant()
    def what_is_answered_is_committed_and_stands_where_it_says(self) -> None:
        for number, result in self.answers.items():
            payload = self.asked[number]
            if isinstance(result, Appended) and payload:
                assert result.base_offset < self.actor.core.committed.offset
                assert self.accepted[result.base_offset] == payload

    @invariant()
    def nothing_waits_that_is_committed(self) -> None:
        held = self.actor.core
        assert not held._uncommitted or held._uncommitted[0].point > held.committed
        waiting = len(held._uncommitted) + len(held.writing)
        assert len(self.asked) == len(self.answers) + waiting
        assert held.pending_bytes == sum(item.size for item in held.writing)

    def teardown(self) -> None:
        if not hasattr(self, "actor"):
            return
        if self.actor.queue:
            self.actor.write()
        self.actor.step(core.Closed())
        assert len(self.answers) == len(self.asked), "each append is answered"


CoreAgainstModel.TestCase.settings = hypothesis_settings(
    max_examples=40, stateful_step_count=40, deadline=None
)
TestCoreAgainstModel = pytest.mark.timeout(120)(CoreAgainstModel.TestCase)
