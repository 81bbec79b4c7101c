"""The states of a link, and its window: what is sent, in which order, and what a restart may repeat."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.link import (
    AHEAD_BYTES,
    TRANSITIONS,
    Announced,
    Denials,
    LinkEvent,
    LinkPhase,
    OnTheWay,
    SendWindow,
    Todo,
    advance,
)
from felix.errors import Code, CorruptionError, ProtocolError

WINDOW = 4


def test_every_phase_can_be_held_and_ended_and_only_a_plan_leaves_stopped() -> None:
    for phase in LinkPhase:
        assert advance(phase, LinkEvent.HOLD) is LinkPhase.WAITING
        assert advance(phase, LinkEvent.END) is LinkPhase.STOPPED
    left = {
        event
        for (phase, event), after in TRANSITIONS.items()
        if phase is LinkPhase.STOPPED and after is not phase
    }
    assert left == {LinkEvent.HOLD, LinkEvent.ALLOW}


def test_a_denied_link_says_so_until_it_is_open_again() -> None:
    phase = LinkPhase.WAITING
    for event, after in (
        (LinkEvent.ALLOW, LinkPhase.OPENING),
        (LinkEvent.OPENED, LinkPhase.ACTIVE),
        (LinkEvent.REFUSE, LinkPhase.DENIED),
        (LinkEvent.ALLOW, LinkPhase.DENIED),
        (LinkEvent.OPENED, LinkPhase.ACTIVE),
        (LinkEvent.LOST, LinkPhase.WAITING),
    ):
        phase = advance(phase, event)
        assert phase is after


def window(
    position: int = 0, accounted_to: int | None = None, unanswered: tuple[Announced, ...] = ()
) -> SendWindow:
    return SendWindow(
        position=position,
        accounted_to=accounted_to,
        unanswered=unanswered,
        envelopes_max=WINDOW,
        credit_bytes=10_000,
    )


def way(first: int, last: int, is_again: bool = False, size: int = 100) -> OnTheWay:
    envelope = b"%d-%d" % (first, last)
    return OnTheWay(
        first,
        last,
        last - first + 1,
        envelope.ljust(size),
        sha256(envelope).digest(),
        bytes(32),
        ("us-east",),
        is_again,
    )


def announced(first: int, last: int) -> Announced:
    return Announced(first, last, way(first, last).envelope_sha256)


def test_a_new_link_crosses_from_where_the_destination_stands() -> None:
    held = window(position=10)
    assert held.judge(10, 19) is Todo.CROSS
    with pytest.raises(ProtocolError):
        held.judge(30, 39)


def test_of_a_batch_that_is_cut_into_many_no_more_leave_than_may_be_on_the_way() -> None:
    """The destination ends the session of who sends more, and with it all links to it; and again when they are sent again."""
    held = window()
    ways = [way(10 * at, 10 * at + 9) for at in range(3 * WINDOW)]
    for each in ways:
        held.judge(each.first_offset, each.last_offset)
        held.put(each)
        held.durable(each)
    for at in range(len(ways)):
        assert held.sendable() == (ways[:WINDOW] if not at else ways[WINDOW + at - 1 :][:1])
        assert held.answered(ways[at].last_offset + 1) is ways[at]
    assert held.is_empty


def test_of_a_batch_that_becomes_many_times_as_long_no_more_waits_than_a_batch_has_without_rules() -> None:
    held = window()
    size, put = 1_000_000, 0
    while not held.is_crowded:
        held.judge(put, put)
        held.put(way(put, put, size=size))
        put += 1
    assert size * put <= AHEAD_BYTES + 10_000 + 2 * size


def test_nothing_leaves_before_its_leaves_are_durable_and_in_order() -> None:
    held = window()
    first, second = way(0, 9), way(10, 19)
    for each in (first, second):
        held.judge(each.first_offset, each.last_offset)
        held.put(each)
    held.durable(second)
    assert held.sendable() == []
    held.durable(first)
    assert held.sendable() == [first, second]
    assert held.sendable() == []


def test_after_a_crash_what_landed_is_asked_for_again_and_what_was_announced_is_sent_again() -> None:
    held = window(
        position=20, accounted_to=40, unanswered=(announced(10, 19), announced(20, 29), announced(30, 39))
    )
    assert held.next_offset == 10
    assert [held.judge(first, first + 9) for first in (10, 20, 30)] == [Todo.RESEND] * 3
    assert held.judge(40, 49) is Todo.CROSS


def test_what_landed_and_was_answered_is_left_out() -> None:
    held = window(position=30, accounted_to=30, unanswered=(announced(10, 19),))
    assert held.judge(10, 19) is Todo.RESEND
    assert held.judge(20, 29) is Todo.SKIP
    assert held.judge(30, 39) is Todo.CROSS


def test_another_envelope_than_was_announced_is_not_sent() -> None:
    held = window(position=0, accounted_to=10, unanswered=(Announced(0, 9, b"x" * 32),))
    assert held.judge(0, 9) is Todo.RESEND
    with pytest.raises(CorruptionError) as caught:
        held.put(way(0, 9, is_again=True))
    assert caught.value.code is Code.TAMPERED


def test_a_destination_that_has_more_than_the_log_stops_the_link() -> None:
    with pytest.raises(CorruptionError) as caught:
        window(position=50, accounted_to=40)
    assert caught.value.code is Code.ROLLED_BACK


def test_nothing_new_is_announced_before_what_was_announced_is_answered() -> None:
    held = window(position=0, accounted_to=10, unanswered=(announced(0, 9),))
    held.judge(0, 9)
    again = way(0, 9, is_again=True)
    held.put(again)
    assert not held.has_room
    held.durable(again)
    held.sendable()
    held.answered(10)
    assert held.has_room


def test_a_gap_is_covered_from_the_position_and_has_a_leaf_for_what_was_not_announced() -> None:
    held = window(position=20, accounted_to=40, unanswered=(announced(20, 29), announced(30, 39)))
    leap = held.leap(60)
    assert leap is not None
    assert (leap.cover_first, leap.leaf_first, leap.announced) == (20, 40, announced(20, 29))
    assert held.next_offset == 60
    assert held.leap(60) is None
    assert window(position=60, unanswered=(announced(10, 19),)).leap(60) is None


def test_a_receipt_for_what_was_not_sent_is_refused() -> None:
    held = window()
    held.judge(0, 9)
    held.put(way(0, 9))
    with pytest.raises(ProtocolError):
        held.answered(10)


def test_the_same_refusal_is_news_once() -> None:
    denials = Denials()
    assert [denials.is_new(501, "a"), denials.is_new(501, "a"), denials.is_new(502, "a")] == [
        True,
        False,
        True,
    ]
    denials.forget()
    assert denials.is_new(502, "a")


@dataclass
class World:
    """A destination and an egress log, and an agent between them that dies whenever it likes."""

    position: int = 0
    newest: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    intents: list[tuple[int, int]] = field(default_factory=list)
    acks: set[int] = field(default_factory=set)
    landed: list[int] = field(default_factory=list)

    def open(self) -> SendWindow:
        return window(
            self.position,
            self.intents[-1][1] + 1 if self.intents else None,
            tuple(announced(first, last) for first, last in self.intents if first not in self.acks),
        )

    def receive(self, each: OnTheWay) -> int:
        """As region.crossing.ingest does: contiguous, and the newest ranges are answered again."""
        if each.first_offset == self.position:
            self.position = each.last_offset + 1
            self.newest.append((each.first_offset, each.last_offset))
            self.landed += range(each.first_offset, each.last_offset + 1)
        else:
            assert (each.first_offset, each.last_offset) in self.newest, "asked for what was forgotten"
        return each.last_offset + 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_however_often_the_agent_dies_every_record_lands_once_with_one_intent(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=20))
    batches = []
    for size in sizes:
        start = batches[-1][1] + 1 if batches else 0
        batches.append((start, start + size - 1))
    end = batches[-1][1] + 1
    # Of one batch of the source, which was cut: its pieces are taken at once.
    begins = {first for first, _ in batches if data.draw(st.booleans())} | {0}
    world = World()
    for life in range(200):
        held = world.open()
        waiting: deque[OnTheWay] = deque()
        line: deque[OnTheWay] = deque()
        receipts: deque[int] = deque()
        steps = data.draw(st.integers(0, 15)) if life < 30 else 10_000
        while steps and not (held.next_offset == end and held.is_empty):
            steps -= 1
            choices = []
            if held.has_room and held.next_offset < end:
                choices.append("read")
            choices += ["sync"] * bool(waiting) + ["land"] * bool(line) + ["answer"] * bool(receipts)
            match data.draw(st.sampled_from(choices)) if life < 30 else choices[-1]:
                case "read":
                    behind = [each for each in batches if each[0] >= held.next_offset]
                    pieces = [
                        behind[0],
                        *takewhile(lambda each: each[0] not in begins, behind[1:]),
                    ]
                    for first, last in pieces:
                        todo = held.judge(first, last)
                        if todo is not Todo.SKIP:
                            each = way(first, last, todo is Todo.RESEND)
                            held.put(each)
                            if todo is Todo.CROSS:
                                waiting.append(each)
                            else:
                                held.durable(each)
                case "sync":
                    each = waiting.popleft()
                    world.intents.append((each.first_offset, each.last_offset))
                    held.durable(each)
                case "land":
                    receipts.append(world.receive(line.popleft()))
                case "answer":
                    world.acks.add(held.answered(receipts.popleft()).first_offset)
            line += held.sendable()
            assert len(line) + len(receipts) <= WINDOW
            assert {(each.first_offset, each.last_offset) for each in line} <= set(world.intents)
        if held.next_offset == end and held.is_empty:
            break
    assert world.landed == list(range(end))
    assert world.intents == batches
    assert world.acks == {first for first, _ in batches}
