"""The publisher's core against a broker's own rules for sequences, with answers that are late, refusals, lost links and streams made anew."""

from __future__ import annotations

from collections import Counter, deque
from math import inf
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from long_runs import count

from felix import Code, FelixError, NewRecord, RequestError, UnavailableError
from felix.backoff import BackoffPolicy
from felix.batch import BATCH_BYTES_MAX, Batch, decode_batch, decode_records
from felix.errors import NotLeaderError
from felix.frames import FRAME_HEADER_BYTES, AppendedBody, FrameDecoder, FrameType
from felix.messages import Throttled
from felix.names import StreamName
from felix.provenance import PATH_HEADER
from felix.publisher_core import (
    FLUSHED,
    FLYING_BATCHES_FILL,
    FULL,
    GRACE_S,
    ITERATION_ENDED,
    LINGERS,
    LINK_LOST,
    NOTHING,
    OPEN_PART,
    OPENED,
    ROOM_WANTED,
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
from region.log.producers import BATCHES_IN_FLIGHT_MAX, ProducerTable, Remembered, Verdict

STREAM = StreamName.parse("acme/ops/orders")
IN_FLIGHT = 31
WINDOW = 1 << 24
LARGE = 200_000
"""Bytes of a payload, so that a few fill the smallest buffer."""
NOT_NOW = UnavailableError("Not now.", retry_after_ms=20)
NEVER = RequestError("Never.")
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
    ready = core.acknowledged(batch, "sending", appended(40))
    assert ready.delivered is not None
    assert list(zip(ready.delivered.callers or (), ready.delivered.offsets, strict=True)) == [
        (None, 40),
        ("caller", 41),
    ]
    assert (core.held_bytes, core.progress.contiguous) == (0, 2)


def test_the_frame_is_what_a_broker_reads() -> None:
    core = core_of()
    core.add_batch([NewRecord(b"a", b"k"), NewRecord(b"b", b"k")], None, "caller", 0.0, expected_offset=9)
    batch = send(core, "sending")
    (frame,) = FrameDecoder(frozenset(FrameType)).feed(batch.frame(5))
    assert (frame.type, frame.correlation) == (FrameType.CONDITIONAL, 5)
    assert len(batch.frame(5)) == batch.frame_bytes
    read = decode_batch(bytes(frame.body)[8:])
    assert [bytes(record.payload) for record in decode_records(read)] == [b"a", b"b"]


def test_a_producer_names_no_regions_in_a_records_headers() -> None:
    core = core_of()
    own = {"note": b"mine", PATH_HEADER: b"ap-south"}
    with pytest.raises(RequestError, match="written by bridges; a producer does not set it"):
        core.add(b"a", None, own)
    with pytest.raises(RequestError, match="written by bridges"):
        core.add_batch([NewRecord(b"a"), NewRecord(b"b", None, own)], None, "caller", 0.0)
    assert core.given == 0 and core.add(b"a", None, {"note": b"mine"}) is OPENED


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
    assert core.wake_at == pytest.approx(1.1 + 120 * OPEN_PART)


def test_an_answer_to_a_sending_that_was_forgotten_does_not_count() -> None:
    core = core_of()
    core.add(b"a", None, None)
    core.step(FLUSHED, 0.0)
    batch = send(core, "first")
    assert core.step(LINK_LOST, 0.0).forget == ["first"]
    send(core, "second")
    gone = RequestError("Gone.")
    assert core.step(Refused(batch, "first", gone), 0.0) is NOTHING
    assert core.acknowledged(batch, "first", appended(0)) is NOTHING
    assert core.acknowledged(batch, "second", appended(0)).delivered is not None
    assert core.acknowledged(batch, "second", appended(0)) is NOTHING, "and none counts twice"


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


def test_the_rest_goes_on_when_the_head_was_not_answered_in_time() -> None:
    core = core_of(batch_records=1, deadline_ms=1_000)
    core.add(b"a", None, None)
    send(core, "1")
    core.add(b"b", None, None)
    second = send(core, "2", now=0.5)
    assert core.step(Refused(second, "2", RequestError("A gap.", code=Code.SEQUENCE_GAP)), 0.6) is NOTHING
    assert core.step(TimeCame(None), 1.0).forget == ["1"]
    assert send(core, "3", now=1.0) is second
    assert (second.header.producer_epoch, second.header.base_sequence) == (1, 0)


def test_a_first_refusal_is_waited_for_no_longer_once_another_publish_stream_stands() -> None:
    core = core_of()
    opened = Opened(b"i" * 16, 1, BATCH_BYTES_MAX, WINDOW, IN_FLIGHT)
    not_here = NotLeaderError("Not here.", retry_after_ms=250, stream=str(STREAM))
    core.add(b"a", None, None)
    core.step(FLUSHED, 0.0)
    batch = send(core, "first")
    assert core.step(Refused(batch, "first", not_here), 0.0).reopen
    core.step(LINK_LOST, 0.0)
    assert core.next_batch(0.0) is None
    core.step(opened, 0.01)
    assert send(core, "second", 0.01) is batch
    core.step(Refused(batch, "second", not_here), 0.02)
    core.step(LINK_LOST, 0.02)
    core.step(opened, 0.03)
    assert core.next_batch(0.03) is None, "brokers that name each other are not asked as fast as they answer"
    core.step(TimeCame(None), 0.3)
    assert send(core, "third", 0.3) is batch


def test_shards_have_their_turns() -> None:
    core = core_of(batch_records=1)
    core.step(Opened(b"j" * 16, 3, BATCH_BYTES_MAX, WINDOW, IN_FLIGHT), 0.0)
    for number in range(9):
        core.add(b"%d" % number, None, None, shard=number // 3)
    assert [send(core, ticket).header.shard for ticket in range(9)] == [0, 1, 2] * 3


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


def test_what_came_too_late_says_how_it_stands_with_the_broker() -> None:
    core = core_of(deadline_ms=1_000)
    core.add(b"a", None, None)
    core.step(FLUSHED, 0.0)
    send(core, "1")
    (given_up,) = core.step(TimeCame(None, "no session with the broker stands"), core.wake_at).given_up
    assert given_up.refusal.error.sentence.endswith(
        "it was sent and not answered; no session with the broker stands."
    )


def test_what_was_sent_once_may_be_in_the_log_also_where_it_waits_to_be_sent_again() -> None:
    core = core_of(deadline_ms=1_000)
    core.add(b"a", None, None)
    core.step(FLUSHED, 0.0)
    send(core, "1")
    core.step(LINK_LOST, 0.5)
    (given_up,) = core.step(TimeCame(None, "no session with the broker stands"), core.wake_at).given_up
    assert "it was sent and not answered" in given_up.refusal.error.sentence
    assert given_up.refusal.error.hint == "Whether it is in the log is not known."


@pytest.mark.parametrize("linger_ms", [0.0, 5.0])
def test_what_nobody_takes_is_given_up_in_time_also_before_it_is_a_batch(linger_ms: float) -> None:
    """No session stands: batches are closed as they are sent."""
    core = core_of(deadline_ms=1_000, linger_ms=linger_ms)
    core.add(b"a", None, None)
    core.step(LINGERS if linger_ms else ITERATION_ENDED, 10.0)
    core.add(b"b", None, None)
    ready = 10.0 + linger_ms / 1_000
    assert core.wake_at <= ready + OPEN_PART
    assert not core.step(TimeCame(None), 10.5).given_up and core.wake_at == ready + 1
    (given_up,) = core.step(TimeCame(None, "no session with the broker stands"), ready + 1).given_up
    assert given_up.refusal.error.sentence.endswith(
        "it could not be sent; no session with the broker stands."
    )
    assert core.held_bytes == 0 and core.wake_at == inf
    # The next one has its own time, whenever it is looked at.
    core.add(b"c", None, None)
    assert not core.step(TimeCame(None), 20.0).given_up
    core.step(LINGERS if linger_ms else ITERATION_ENDED, 20.0)
    assert not core.step(TimeCame(None), 20.9).given_up
    assert records_of(send(core, "1", 20.9)) == [b"c"]


def test_a_record_that_comes_late_is_not_given_up_with_those_that_waited_before_it() -> None:
    """No session stands, and somebody publishes now and then."""
    core = core_of(deadline_ms=1_000)
    given_up = dict[bytes, float]()
    published = dict[bytes, float]()
    for step in range(160):
        now = 10.0 + step / 100
        if step < 50:
            payload = b"%d" % step
            if core.add(payload, None, None) is OPENED:
                core.step(ITERATION_ENDED, now)
            published[payload] = now
        if core.wake_at <= now:
            for each in core.step(TimeCame(None), now).given_up:
                given_up |= {bytes(record.payload): now for record in each.refusal.records()}
    assert given_up.keys() == published.keys()
    waited = [given_up[payload] - published[payload] for payload in published]
    assert min(waited) >= 1 - OPEN_PART - 0.011 and max(waited) <= 1.011
    assert core.held_bytes == 0 and core.wake_at == inf


def test_a_linger_that_is_longer_than_the_deadline_gives_nothing_up_that_nobody_tried_to_send() -> None:
    core = core_of(deadline_ms=1_000, linger_ms=5_000)
    core.add(b"a", None, None)
    core.step(LINGERS, 0.0)
    assert not core.step(TimeCame(None), 1.5).given_up and core.next_batch(1.5) is None
    core.step(TimeCame(None), 5.0)
    assert records_of(send(core, "1", 5.0)) == [b"a"]


def test_a_process_that_stood_still_reads_what_came_meanwhile_before_it_gives_up() -> None:
    core = core_of(deadline_ms=1_000)
    core.add(b"a", None, None)
    core.step(FLUSHED, 0.0)
    send(core, "1")
    assert not core.step(TimeCame(None, stood_still=True), 130.0).given_up
    assert core.wake_at == 130.0 + GRACE_S
    assert len(core.step(TimeCame(None, stood_still=True), 130.0 + GRACE_S).given_up) == 1, "once"


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


class World:
    """A core with its shell, and a broker that takes batches in order and may refuse. A link may be lost with batches and answers on
    the way. What happens is drawn from a seed."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = 0.0
        self.lingers = random.random() < 0.3
        self.core = PublisherCore(
            STREAM, BackoffPolicy(), Random(1), producer_id=7, linger_ms=50 if self.lingers else 0,
            batch_records=random.choice([1, 2, 4]), batch_bytes=BATCH_BYTES_MAX, buffer_bytes=BATCH_BYTES_MAX,
            deadline_ms=int(DEADLINE_S * 1000),
        )  # fmt: skip
        self.refusals = random.choice([0.0, 0.1, 0.4])
        self.in_flight = random.choice([2, IN_FLIGHT, BATCHES_IN_FLIGHT_MAX])
        self.began = False
        self.given = 0
        self.callers: Counter[int] = Counter()
        self.wanted: set[int] = set()
        self.dealt_with: Counter[bytes] = Counter()
        self.delivered: list[tuple[bytes, int, bytes, int]] = []
        self.brokers: dict[bytes, list[Shard]] = {}
        self.incarnation = b""
        self.standing = False
        self.inbound: deque[tuple[object, Sending]] = deque()
        self.answers: deque[tuple[object, Sending, AppendedBody | FelixError]] = deque()
        self.awaited: dict[object, Sending] = {}
        self.open_stream(b"0", random.randint(1, 3))

    # What the shell does:

    def step(self, event: Event) -> None:
        self.carry_out(self.core.step(event, self.now))

    def carry_out(self, ready: Ready) -> None:
        for ticket in ready.forget:
            assert self.awaited.pop(ticket, None), "what is forgotten was awaited, and is forgotten once"
        if ready.delivered is not None:
            self.callers.update(each for each in ready.delivered.callers or () if each is not None)
            if ready.delivered.caller is not None:
                self.callers[ready.delivered.caller] += 1
        for given_up in ready.given_up:
            self.callers.update(each for each in (*given_up.callers, given_up.caller) if each is not None)
            self.dealt_with.update(bytes(record.payload[:8]) for record in given_up.refusal.records())
        if ready.reopen:
            self.lose_link()

    def open_stream(self, incarnation: bytes, shards: int) -> None:
        self.incarnation = incarnation
        self.brokers.setdefault(incarnation, [Shard() for _ in range(shards)])
        self.standing = True
        shards = len(self.brokers[incarnation])
        self.step(Opened(incarnation, shards, BATCH_BYTES_MAX, WINDOW, self.in_flight))

    def lose_link(self) -> None:
        self.standing = False
        self.inbound.clear()
        self.answers.clear()
        self.step(LINK_LOST)
        assert not self.awaited

    def pump(self, batches: int) -> None:
        while self.standing and batches and (batch := self.core.next_batch(self.now)) is not None:
            assert batch.accumulator.stalled_until is None
            ticket = object()
            payloads = [payload[:8] for payload in records_of(batch)]
            sending = Sending(batch, batch.header, payloads, self.incarnation)
            self.core.sent(batch, ticket)
            self.inbound.append((ticket, sending))
            self.awaited[ticket] = sending
            batches -= 1

    def number(self, with_caller: bool) -> int:
        number, self.given = self.given, self.given + 1
        if with_caller:
            self.wanted.add(number)
        return number

    # What may happen:

    def records_are_added(self) -> None:
        random = self.random
        for _ in range(random.choice([1, 2, 3, 8, 40])):
            if self.core.held_bytes >= self.core.buffer_bytes:
                return
            with_caller = random.random() < 0.5
            number = self.number(with_caller)
            payload = b"%08d" % number + (b"x" * LARGE if random.random() < 0.02 else b"")
            key = random.choice([None, None, b"a", b"b", b"c"])
            if self.core.add(payload, key, None, number if with_caller else None) is None:
                continue
            if self.lingers:
                self.step(LINGERS)
            else:
                self.began = True

    def a_batch_is_added(self) -> None:
        if self.core.held_bytes < self.core.buffer_bytes:
            first = self.number(with_caller=True)
            others = [self.number(with_caller=False) for _ in range(self.random.randrange(3))]
            self.core.add_batch(
                [NewRecord(b"%08d" % number) for number in (first, *others)], None, first, self.now
            )

    def what_is_open_closes(self) -> None:
        if self.began:
            self.began = False
            self.step(ITERATION_ENDED)
        elif self.random.random() < 0.3:
            self.step(self.random.choice([FLUSHED, ROOM_WANTED]))

    def batches_leave(self) -> None:
        self.pump(self.random.choice([1, 3, 40]))

    def the_broker_takes_some(self) -> None:
        for _ in range(min(self.random.choice([1, 2, 5, 40]), len(self.inbound))):
            ticket, sending = self.inbound.popleft()
            answer: AppendedBody | FelixError
            if self.random.random() < self.refusals:
                answer = self.random.choice(
                    [NOT_NOW, NOT_NOW, NEVER, NEVER, RequestError("No right.", code=Code.FORBIDDEN)]
                )
            else:
                answer = self.brokers[sending.incarnation][sending.header.shard].take(sending)
            self.answers.append((ticket, sending, answer))

    def answers_come(self) -> None:
        for _ in range(self.random.choice([1, 2, 5, 40])):
            if not self.answers:
                return
            ticket, sending, answer = self.next_answer()
            was_awaited = self.awaited.pop(ticket, None) is not None
            if isinstance(answer, AppendedBody):
                ready = self.core.acknowledged(sending.batch, ticket, answer)
            else:
                ready = self.core.step(Refused(sending.batch, ticket, answer), self.now)
            assert was_awaited or ready is NOTHING
            if ready.delivered is not None:
                self.dealt_with.update(sending.payloads)
                where = sending.incarnation, sending.header.shard
                base = ready.delivered.receipt.base_offset
                self.delivered += [
                    (*where, payload, base + at) for at, payload in enumerate(sending.payloads)
                ]
            self.carry_out(ready)

    def next_answer(self) -> tuple[object, Sending, AppendedBody | FelixError]:
        """In order; but a refusal may overtake what waits for a disk."""
        if self.random.random() < 0.3:
            for at, (_, _, answer) in enumerate(self.answers):
                if isinstance(answer, FelixError):
                    answered = self.answers[at]
                    del self.answers[at]
                    return answered
        return self.answers.popleft()

    def the_link_comes_or_goes(self) -> None:
        if self.standing:
            if self.random.random() < 0.2:
                self.lose_link()
        elif self.random.random() < 0.15:
            self.open_stream(b"%d" % len(self.brokers), self.random.randint(1, 3))
        else:
            self.open_stream(self.incarnation, 0)

    def time_goes_on(self) -> None:
        self.now += self.random.choice([0.01, 0.02, 0.05, 1.0, DEADLINE_S / 2])
        if self.now >= self.core.wake_at:
            self.step(TimeCame(None))

    def run(self, steps: int) -> None:
        happenings = {
            self.records_are_added: 6, self.a_batch_is_added: 1, self.what_is_open_closes: 4, self.batches_leave: 6,
            self.the_broker_takes_some: 6, self.answers_come: 6, self.the_link_comes_or_goes: 2, self.time_goes_on: 2,
        }  # fmt: skip
        for happening in self.random.choices(list(happenings), list(happenings.values()), k=steps):
            happening()
            self.check()
        self.serve_everything()
        self.check_the_end()

    def serve_everything(self) -> None:
        """Faults are over: nobody comes to a deadline, and all is dealt with."""
        self.refusals = 0.0
        self.step(FLUSHED)
        for _ in range(500):
            if not self.standing:
                self.open_stream(self.incarnation, 0)
            self.pump(40)
            if self.inbound:
                self.the_broker_takes_some()
            elif self.answers:
                self.answers_come()
            elif not self.core.held_bytes:
                break
            else:
                stalls = [each.stalled_until for each in self.core.accumulators if each.stalled_until]
                assert stalls, "what is held is on the way, or waits for its time to be sent again"
                self.now = max(self.now, min(stalls))
                self.step(TimeCame(None))
            self.check()

    # What holds after each:

    def check(self) -> None:
        core = self.core
        held = 0
        tickets = set()
        for accumulator in core.accumulators:
            left = [each for each in accumulator.unacknowledged if not each.done]
            unsent = len(accumulator.unsent)
            held += accumulator.open_bytes + sum(each.held_bytes for each in left)
            assert left[:1] == list(accumulator.unacknowledged)[:1], "the first one is not dealt with"
            assert accumulator.flying <= self.in_flight
            assert list(accumulator.unsent) == left[len(left) - unsent :], "they leave in order"
            assert all(each.sent for each in left[: len(left) - unsent])
            assert not any(each.sent or each.ticket for each in accumulator.unsent)
            tickets |= {each.ticket for each in left if each.ticket is not None}
            ends = [(each.header.producer_epoch, each.header.base_sequence) for each in left]
            assert ends == sorted(set(ends))
            due = [accumulator.linger_until, accumulator.stalled_until or inf]
            due += [each.deadline for each in left if each.deadline != inf]
            assert core.wake_at <= min(due)
        assert tickets == set(self.awaited)
        assert held == core.held_bytes <= core.buffer_bytes + LARGE + 100
        assert not self.callers or max(self.callers.values()) == 1, "nobody is told twice"
        assert not self.dealt_with or max(self.dealt_with.values()) == 1
        progress = core.progress
        assert progress.contiguous <= progress.given == self.given
        assert progress.acknowledged == len(self.delivered)

    def check_the_end(self) -> None:
        assert self.core.held_bytes == 0
        assert set(self.callers) == self.wanted, "everybody is told"
        assert len(self.dealt_with) == self.given
        for shards in self.brokers.values():
            for shard in shards:
                assert shard.log == sorted(set(shard.log)), "each record once, in the order given"
        for incarnation, number, payload, offset in self.delivered:
            assert self.brokers[incarnation][number].log[offset] == payload


@hypothesis_settings(max_examples=count(120, 20_000), deadline=None)
@given(st.integers(0, 1 << 32))
def test_whatever_happens_records_are_in_order_once_and_everybody_is_told(seed: int) -> None:
    World(Random(seed)).run(80)


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
    assert core.acknowledged(sending, "sending", appended(0)) is NOTHING
    assert (core.held_bytes, core.next_batch(0.0), core.wake_at) == (0, None, float("inf"))


def test_a_frame_is_as_long_as_is_said() -> None:
    core = core_of()
    core.add(b"a", b"k", {"h": b"v"})
    core.step(FLUSHED, 0.0)
    batch = send(core, "sending")
    assert len(batch.frame(1)) == batch.frame_bytes == FRAME_HEADER_BYTES + batch.header.total_length
