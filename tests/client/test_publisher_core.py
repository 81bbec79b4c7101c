"""The publisher's core against a broker's own rules for sequences, with answers that are late, refusals, lost links and streams made anew."""

from __future__ import annotations

from collections import Counter, deque
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from long_runs import count

from felix import Code, FelixError, NewRecord, RequestError, UnavailableError
from felix.backoff import BackoffPolicy
from felix.batch import BATCH_BYTES_MAX, Batch, decode_batch, decode_records
from felix.frames import FRAME_HEADER_BYTES, AppendedBody, FrameDecoder, FrameType
from felix.messages import Throttled
from felix.names import StreamName
from felix.publisher_core import (
    FLUSHED,
    FLYING_BATCHES_FILL,
    FULL,
    ITERATION_ENDED,
    LINGERS,
    LINK_LOST,
    NOTHING,
    OPENED,
    ROOM_WANTED,
    Acknowledged,
    Event,
    Failed,
    NeverFits,
    Opened,
    PendingBatch,
    PublisherCore,
    Ready,
    Refused,
    StreamRefused,
    TimeCame,
)
from region.log.producers import ProducerTable, Remembered, Verdict

STREAM = StreamName.parse("acme/ops/orders")
IN_FLIGHT = 31
WINDOW = 1 << 24
LARGE = 200_000
"""Bytes of a payload, so that a few fill the smallest buffer."""
DEADLINE_S = 30.0


def core_of(**settings: Any) -> PublisherCore:
    made = PublisherCore(STREAM, BackoffPolicy(), Random(1), producer_id=7, **settings)
    made.step(Opened(b"i" * 16, 1, BATCH_BYTES_MAX, WINDOW, IN_FLIGHT), 0.0)
    return made


def send(core: PublisherCore, ticket: object | None = None, now: float = 0.0) -> PendingBatch:
    batch = core.next_batch(now)
    assert batch is not None
    core.sent(batch, ticket)
    return batch


def records_of(batch: PendingBatch) -> list[bytes]:
    return [bytes(record.payload) for record in decode_records(Batch(batch.header, batch.body))]


def appended(base: int) -> AppendedBody:
    return AppendedBody(base, 0, 0)


# -- one by one --------------------------------------------------------------------------------------------


def test_a_record_leaves_at_the_end_of_the_iteration_and_its_caller_learns_the_offset() -> None:
    core = core_of()
    assert core.add(b"a", None, None) is OPENED
    assert core.add(b"b", None, None, "caller") is None
    assert core.next_batch(0.0) is None
    core.step(ITERATION_ENDED, 0.0)
    batch = send(core, "sending")
    ready = core.step(Acknowledged(batch, "sending", appended(40)), 0.0)
    assert ready.delivered is not None
    assert list(zip(ready.delivered.callers, ready.delivered.offsets, strict=True)) == [
        (None, 40),
        ("caller", 41),
    ]
    assert (core.held_bytes, core.progress.contiguous) == (0, 2)


def test_the_frame_is_what_a_broker_reads() -> None:
    core = core_of()
    core.add_batch([NewRecord(b"a", b"k"), NewRecord(b"b", b"k")], None, "caller", expected_offset=9)
    batch = send(core, "sending")
    (frame,) = FrameDecoder(frozenset(FrameType)).feed(batch.frame(5))
    assert (frame.type, frame.correlation) == (FrameType.CONDITIONAL, 5)
    assert len(batch.frame(5)) == batch.frame_bytes
    read = decode_batch(bytes(frame.body)[8:])
    assert [bytes(record.payload) for record in decode_records(read)] == [b"a", b"b"]


def test_the_linger_begins_with_the_first_record_and_wakes_once_for_the_oldest() -> None:
    core = core_of(linger_ms=100)
    core.add(b"a", None, None)
    core.step(LINGERS, 1.0)
    assert core.wake_at == 1.1
    core.add(b"b", None, None)
    core.step(TimeCame(None), 1.05)
    assert core.next_batch(1.05) is None
    core.step(TimeCame(None), 1.1)
    assert records_of(send(core, "sending", 1.1)) == [b"a", b"b"]
    assert core.wake_at == pytest.approx(1.1 + 120)


def test_an_answer_to_a_sending_that_was_forgotten_does_not_count() -> None:
    core = core_of()
    core.add(b"a", None, None)
    core.step(FLUSHED, 0.0)
    batch = send(core, "first")
    assert core.step(LINK_LOST, 0.0).forget == ["first"]
    send(core, "second")
    gone = RequestError("Gone.")
    assert core.step(Refused(batch, "first", gone), 0.0) is NOTHING
    assert core.step(Acknowledged(batch, "first", appended(0)), 0.0) is NOTHING
    assert core.step(Acknowledged(batch, "second", appended(0)), 0.0).delivered is not None
    assert core.step(Acknowledged(batch, "second", appended(0)), 0.0) is NOTHING, "and none counts twice"


def test_behind_a_hole_the_rest_is_numbered_anew() -> None:
    core = core_of(batch_records=1)
    for payload in (b"a", b"b", b"c"):
        core.add(payload, None, None)
    first, second, third = (send(core, ticket) for ticket in "123")
    gap = RequestError("A gap.", code=Code.SEQUENCE_GAP)
    ready = core.step(Refused(first, "1", RequestError("No.")), 0.0)
    assert [given_up.refusal.error.sentence for given_up in ready.given_up] == ["No."]
    assert core.next_batch(0.0) is None, "its answer is on the way"
    assert core.step(Refused(second, "2", gap), 0.0).forget == ["3"]
    assert [(send(core, ticket), ticket)[0] for ticket in "45"] == [second, third]
    assert [(each.header.producer_epoch, each.header.base_sequence) for each in (second, third)] == [
        (1, 0),
        (1, 1),
    ]


def test_what_no_session_has_room_for_is_given_up() -> None:
    core = core_of()
    core.add(b"x" * 5_000, None, None)
    core.step(FLUSHED, 0.0)
    batch = core.next_batch(0.0)
    assert batch is not None
    (given_up,) = core.step(NeverFits(batch, 4_096), 0.0).given_up
    assert given_up.refusal.error.code is Code.BATCH_TOO_LARGE
    assert (core.next_batch(0.0), core.held_bytes) == (None, 0)


def test_with_enough_on_the_way_an_open_batch_goes_on_filling() -> None:
    core = core_of()
    for number in range(FLYING_BATCHES_FILL + 1):
        core.add(b"%d" % number, None, None)
        core.step(ITERATION_ENDED, 0.0)
        if number < FLYING_BATCHES_FILL:
            send(core, number)
    assert core.next_batch(0.0) is None
    core.add(b"more", None, None)
    core.step(FLUSHED, 0.0)
    assert len(records_of(send(core, "closed by a flush"))) == 2


def test_a_record_never_joins_a_batch_that_it_would_overfill() -> None:
    core = core_of(batch_bytes=BATCH_BYTES_MAX)
    core.step(Opened(b"j" * 16, 2, BATCH_BYTES_MAX, WINDOW, IN_FLIGHT), 0.0)
    in_first, in_second = b"0", b"1"
    core.add(b"a" * 600_000, None, None, shard=0)
    core.add(b"b" * 600_000, None, None, shard=1)
    assert core.add(b"c" * 600_000, None, None) is FULL, "neither open batch has room for it"
    core.step(FLUSHED, 0.0)
    sizes = sorted(len(records_of(send(core, ticket))) for ticket in (in_first, in_second, b"2"))
    assert sizes == [1, 1, 1]


def test_without_acknowledgements_a_batch_is_dealt_with_once_it_left() -> None:
    core = core_of(acks="none")
    core.add(b"a", None, None)
    core.step(FLUSHED, 0.0)
    assert send(core).header.producer_id == 0
    assert (core.held_bytes, core.progress.acknowledged) == (0, 1)
    assert not core.step(StreamRefused(RequestError("Too large.")), 0.0).reopen
    assert core.step(StreamRefused(RequestError("No right.", code=Code.FORBIDDEN)), 0.0).reopen
    assert core.error is not None
    assert core.error.sentence == "Too large."


def test_what_came_too_late_says_what_slowed_it_down() -> None:
    core = core_of(deadline_ms=1_000)
    core.add(b"a", None, None)
    core.step(FLUSHED, 0.0)
    throttled = Throttled("namespace", "acme/ops", "publish_bytes", 100, 50)
    assert core.next_batch(0.0) is not None
    (given_up,) = core.step(TimeCame(throttled), core.wake_at).given_up
    assert given_up.refusal.error.code is Code.TIMEOUT
    assert (
        "could not be sent, while namespace acme/ops is at its publish_bytes"
        in given_up.refusal.error.sentence
    )
    assert given_up.refusal.error.hint == "It is not in the log."


# -- in any order ------------------------------------------------------------------------------------------


class Sending(NamedTuple):
    """A batch as it left: its header stays as it was then."""

    batch: PendingBatch
    header: Any
    payloads: list[bytes]
    incarnation: bytes


class Shard:
    """One shard of the broker: what is in its log, and the sequences, by the broker's own table."""

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self.table = ProducerTable()

    def take(self, sending: Sending) -> AppendedBody | FelixError:
        header = sending.header
        decision = self.table.decide(
            header.producer_id, header.producer_epoch, header.base_sequence, header.records
        )
        assert decision.verdict not in (Verdict.FENCED, Verdict.FORGOTTEN), (
            "a broker knows each repeated batch"
        )
        if decision.first is not None:
            return appended(decision.first.base_offset)
        if decision.verdict is Verdict.GAP:
            return RequestError("A gap.", code=Code.SEQUENCE_GAP)
        base = len(self.log)
        self.log += sending.payloads
        self.table.settle(base)
        self.table.record(
            header.producer_id,
            Remembered(
                header.producer_epoch, header.base_sequence, header.base_sequence + header.records, base, 0
            ),
        )
        return appended(base)


class CoreAgainstBroker(RuleBasedStateMachine):
    """The broker takes batches in order, answers in order, and may refuse; a link may be lost with both on the way."""

    @initialize(
        shards=st.integers(1, 3),
        linger_ms=st.sampled_from([0, 50]),
        batch_records=st.sampled_from([1, 4]),
    )
    def begin(self, shards: int, linger_ms: int, batch_records: int) -> None:
        self.now = 0.0
        self.core = PublisherCore(
            STREAM, BackoffPolicy(), Random(1), producer_id=7, linger_ms=linger_ms, batch_records=batch_records,
            batch_bytes=BATCH_BYTES_MAX, buffer_bytes=BATCH_BYTES_MAX, deadline_ms=int(DEADLINE_S * 1000),
        )  # fmt: skip
        self.lingers = linger_ms > 0
        self.began = False
        self.given = 0
        self.refused_stream = False
        self.callers: Counter[int] = Counter()
        self.offsets: dict[int, int] = {}
        self.dealt_with: Counter[bytes] = Counter()
        self.delivered: list[tuple[bytes, int, bytes, int]] = []
        self.brokers: dict[bytes, list[Shard]] = {}
        self.incarnation = b""
        self.standing = False
        self.inbound: deque[tuple[object, Sending]] = deque()
        self.answers: deque[tuple[object, Sending, AppendedBody | FelixError]] = deque()
        self.awaited: dict[object, Sending] = {}
        self.open_stream(b"one", shards)

    # What the shell does:

    def step(self, event: Event) -> None:
        self.carry_out(self.core.step(event, self.now))

    def carry_out(self, ready: Ready) -> None:
        for ticket in ready.forget:
            assert self.awaited.pop(ticket, None), "what is forgotten was awaited, and is forgotten once"
        if ready.delivered is not None:
            delivered = ready.delivered
            for caller, offset in zip(delivered.callers, delivered.offsets, strict=False):
                if caller is not None:
                    self.callers[caller] += 1
                    self.offsets[caller] = offset
            if delivered.caller is not None:
                self.callers[delivered.caller] += 1
        for given_up in ready.given_up:
            for caller in (*given_up.callers, given_up.caller):
                if caller is not None:
                    self.callers[caller] += 1
            self.dealt_with.update(bytes(record.payload[:8]) for record in given_up.refusal.records())
        if ready.reopen:
            self.lose_link()

    def open_stream(self, incarnation: bytes, shards: int) -> None:
        self.incarnation = incarnation
        self.brokers.setdefault(incarnation, [Shard() for _ in range(shards)])
        self.standing = True
        self.step(Opened(incarnation, len(self.brokers[incarnation]), BATCH_BYTES_MAX, WINDOW, IN_FLIGHT))

    def lose_link(self) -> None:
        self.standing = False
        self.inbound.clear()
        self.answers.clear()
        self.step(LINK_LOST)
        assert not self.awaited

    def pump(self, batches: int) -> None:
        while self.standing and batches > 0 and (batch := self.core.next_batch(self.now)) is not None:
            assert batch.accumulator.unsent[0] is batch
            ticket = object()
            payloads = [payload[:8] for payload in records_of(batch)]
            sending = Sending(batch, batch.header, payloads, self.incarnation)
            self.core.sent(batch, ticket)
            self.inbound.append((ticket, sending))
            self.awaited[ticket] = sending
            batches -= 1

    def added(self, what: object) -> None:
        if what is not None and self.lingers:
            self.step(LINGERS)
        elif what is not None:
            self.began = True

    def has_room(self) -> bool:
        return self.core.held_bytes < self.core.buffer_bytes

    # What may happen:

    @rule(
        many=st.integers(1, 40), key=st.sampled_from([None, b"a", b"b", b"c"]), with_caller=st.booleans(),
        large=st.booleans(),
    )  # fmt: skip
    def add(self, many: int, key: bytes | None, with_caller: bool, large: bool) -> None:
        for _ in range(many):
            if not self.has_room():
                return
            number, self.given = self.given, self.given + 1
            payload = b"%08d" % number + (b"x" * LARGE if large else b"")
            self.added(self.core.add(payload, key, None, number if with_caller else None))

    @rule(records=st.integers(1, 3))
    def add_batch(self, records: int) -> None:
        if self.has_room():
            first, self.given = self.given, self.given + records
            numbers = range(first, self.given)
            self.core.add_batch([NewRecord(b"%08d" % number) for number in numbers], None, first)

    @rule()
    def end_the_iteration(self) -> None:
        if self.began:
            self.began = False
            self.step(ITERATION_ENDED)

    @rule(event=st.sampled_from([FLUSHED, ROOM_WANTED]))
    def close_what_is_open(self, event: Event) -> None:
        self.step(event)

    @rule(batches=st.integers(1, 40))
    def send(self, batches: int) -> None:
        self.pump(batches)

    @precondition(lambda self: self.inbound)
    @rule(
        batches=st.integers(1, 40),
        refuse=st.sampled_from(
            [
                None, None, UnavailableError("Not now.", retry_after_ms=20), RequestError("Never."),
                RequestError("No right.", code=Code.FORBIDDEN),
            ]
        ),
    )  # fmt: skip
    def broker_takes(self, batches: int, refuse: FelixError | None) -> None:
        """The first one of them is refused, perhaps."""
        for _ in range(min(batches, len(self.inbound))):
            ticket, sending = self.inbound.popleft()
            answer: AppendedBody | FelixError = refuse or self.brokers[sending.incarnation][
                sending.header.shard
            ].take(sending)
            refuse = None
            self.answers.append((ticket, sending, answer))

    @precondition(lambda self: self.answers)
    @rule(answers=st.integers(1, 40))
    def answers_come(self, answers: int) -> None:
        for _ in range(answers):
            if not self.answers:
                return
            ticket, sending, answer = self.answers.popleft()
            was_awaited = self.awaited.pop(ticket, None) is not None
            event = (
                Acknowledged(sending.batch, ticket, answer)
                if isinstance(answer, AppendedBody)
                else Refused(sending.batch, ticket, answer)
            )
            ready = self.core.step(event, self.now)
            assert was_awaited or ready is NOTHING
            if ready.delivered is not None:
                self.dealt_with.update(sending.payloads)
                base = ready.delivered.receipt.base_offset
                self.delivered += [
                    (sending.incarnation, sending.header.shard, payload, base + at)
                    for at, payload in enumerate(sending.payloads)
                ]  # type: ignore[misc]
            self.carry_out(ready)

    @precondition(lambda self: self.standing)
    @rule()
    def the_link_breaks(self) -> None:
        self.lose_link()

    @precondition(lambda self: not self.standing)
    @rule(anew=st.sampled_from([False, False, True]), shards=st.integers(1, 3))
    def another_link_stands(self, anew: bool, shards: int) -> None:
        incarnation = b"%d" % len(self.brokers) if anew else self.incarnation
        self.open_stream(incarnation, shards)

    @rule(seconds=st.sampled_from([0.01, 0.05, 1.0, DEADLINE_S]))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.core.wake_at:
            self.step(TimeCame(None))

    # What holds after each:

    @invariant()
    def memory_is_counted_and_bounded(self) -> None:
        core = self.core
        held = sum(
            accumulator.open_bytes
            + sum(each.held_bytes for each in accumulator.unacknowledged if not each.done)
            for accumulator in core.accumulators
        )
        assert held == core.held_bytes <= core.buffer_bytes + LARGE + 100

    @invariant()
    def each_shard_is_in_order(self) -> None:
        for accumulator in self.core.accumulators:
            waiting = list(accumulator.unacknowledged)
            assert not waiting or not waiting[0].done
            assert accumulator.flying <= IN_FLIGHT
            left = [each for each in waiting if not each.done]
            assert list(accumulator.unsent) == left[len(left) - len(accumulator.unsent) :]
            assert all(each.sent for each in left[: len(left) - len(accumulator.unsent)])
            assert not any(each.sent or each.ticket for each in accumulator.unsent)
            ends = [(each.header.producer_epoch, each.header.base_sequence) for each in left]
            assert ends == sorted(set(ends))

    @invariant()
    def awaited_is_what_the_core_awaits(self) -> None:
        tickets = [
            each.ticket for accumulator in self.core.accumulators for each in accumulator.unacknowledged
            if each.ticket is not None
        ]  # fmt: skip
        assert set(tickets) == set(self.awaited)

    @invariant()
    def the_timer_is_early_enough(self) -> None:
        for accumulator in self.core.accumulators:
            assert self.core.wake_at <= accumulator.linger_until
            assert accumulator.stalled_until is None or self.core.wake_at <= accumulator.stalled_until
            for each in accumulator.unacknowledged:
                assert each.deadline == float("inf") or each.done or self.core.wake_at <= each.deadline

    @invariant()
    def nobody_is_told_twice(self) -> None:
        assert all(times == 1 for times in self.callers.values())
        assert all(times == 1 for times in self.dealt_with.values())

    @invariant()
    def logs_have_each_record_once_and_in_order(self) -> None:
        for shards in self.brokers.values():
            for shard in shards:
                assert all(one < next_one for one, next_one in zip(shard.log, shard.log[1:], strict=False))

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        # Everything is served again: all is dealt with, without anybody's deadline.
        if not self.standing:
            self.open_stream(self.incarnation, 1)
        self.step(FLUSHED)
        for _ in range(1_000):
            if not self.core.held_bytes:
                break
            self.pump(40)
            if self.inbound:
                self.broker_takes(40, None)
            elif self.answers:
                self.answers_come(40)
            else:
                self.now = self.core.wake_at
                self.step(TimeCame(None))
            self.each_shard_is_in_order()
        assert self.core.held_bytes == 0
        self.logs_have_each_record_once_and_in_order()
        assert sum(self.dealt_with.values()) == self.given == len(self.dealt_with)
        for incarnation, shard, payload, offset in self.delivered:
            assert self.brokers[incarnation][shard].log[offset] == payload  # type: ignore[index]
        progress = self.core.progress
        assert (progress.given, progress.acknowledged) == (self.given, len(self.delivered))


CoreAgainstBroker.TestCase.settings = hypothesis_settings(
    max_examples=count(60, 3_000), stateful_step_count=50, deadline=None
)
TestCoreAgainstBroker = pytest.mark.timeout(count(120, 3_000))(CoreAgainstBroker.TestCase)


def test_whoever_waits_is_told_when_the_publisher_fails() -> None:
    core = core_of(batch_records=2)
    for number in range(5):
        core.add(b"%d" % number, None, None, number)
    sending = send(core, "sending")
    ready = core.step(Failed(UnavailableError("Closed.")), 0.0)
    assert ready.forget == ["sending"]
    told = [caller for given_up in ready.given_up for caller in given_up.callers]
    assert told == [0, 1, 2, 3, 4]
    assert core.step(Failed(UnavailableError("Again.")), 0.0) is NOTHING
    assert core.step(Acknowledged(sending, "sending", appended(0)), 0.0) is NOTHING
    assert (core.held_bytes, core.next_batch(0.0), core.wake_at) == (0, None, float("inf"))


def test_a_frame_is_as_long_as_is_said() -> None:
    core = core_of()
    core.add(b"a", b"k", {"h": b"v"})
    core.step(FLUSHED, 0.0)
    batch = send(core, "sending")
    assert len(batch.frame(1)) == batch.frame_bytes == FRAME_HEADER_BYTES + batch.header.total_length
