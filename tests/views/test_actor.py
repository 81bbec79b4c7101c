"""A view's actor: what was decided on a refused entry is not there, so nothing is decided until the journal was read again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from felix.errors import Code, FelixError, UnavailableError
from region.gather import Done
from region.views.actor import ViewActor
from region.views.due import DueTimer


class Sum:
    """A view whose state is a number, and what it was told, in order."""

    def __init__(self) -> None:
        self.value = 0
        self.told: list[str] = []

    def begin(self) -> None:
        self.value = 0
        self.told.append("begin")

    def replay(self, entry: bytes) -> None:
        self.value += int(entry)

    def replayed(self) -> None:
        self.told.append(f"replayed {self.value}")

    def preface(self) -> bytes:
        return b"0"

    def entries(self) -> Iterator[bytes]:
        yield b"%d" % self.value

    def lost(self, error: FelixError) -> None:
        self.told.append(f"lost {error.sentence}")

    def resumed(self) -> None:
        self.told.append("resumed")


class Held:
    """A journal in memory: what is refused is not in it, and it answers when it is told to."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []
        self.waiting: list[tuple[bytes, Done]] = []
        self.lost: FelixError | None = None
        self.unreadable: FelixError | None = None
        self.full: FelixError | None = None
        """why it takes nothing for a while, although it was read"""

    def refusal(self) -> FelixError | None:
        return self.lost or self.full

    async def replay(self) -> AsyncIterator[bytes]:
        if self.unreadable is not None:
            raise self.unreadable
        for entry in list(self.kept):
            yield entry
        self.lost = None

    def append(self, entry: bytes, done: Done) -> None:
        if self.lost is not None:
            done(self.lost)
        else:
            self.waiting.append((entry, done))

    def answer(self, refused: FelixError | None = None) -> None:
        self.lost = refused
        waiting, self.waiting = self.waiting, []
        for entry, done in waiting:
            if refused is None:
                self.kept.append(entry)
            done(refused)

    async def close(self) -> None:
        self.answer()


async def served(view: Sum) -> tuple[ViewActor, Held]:
    actor = ViewActor("The sum", view, None, again_s=0)
    held = Held()
    actor.journal = held  # type: ignore[assignment]
    await actor.open()
    return actor, held


def add(view: Sum, actor: ViewActor, numbers: list[int], answers: list[FelixError | None]) -> None:
    view.value += sum(numbers)
    actor.write([b"%d" % number for number in numbers], answers.append)


async def settled(actor: ViewActor) -> None:
    async with asyncio.timeout(60):
        await asyncio.sleep(0)
        while actor.is_reloading:  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0)


async def test_entries_are_answered_once_they_are_durable_and_the_last_answers_for_all() -> None:
    view, answers = Sum(), list[FelixError | None]()
    actor, held = await served(view)
    add(view, actor, [1, 2, 3], answers)
    assert not answers and actor.refusal() is None
    held.answer()
    add(view, actor, [], answers)
    assert answers == [None, None] and held.kept == [b"0", b"1", b"2", b"3"], "behind the preface"
    add(view, actor, [4], answers)
    held.answer()
    assert held.kept[4:] == [b"4"], "which stands there once"


async def test_a_decision_that_was_made_before_is_answered_once_that_is_durable() -> None:
    """As an acknowledgement that is repeated while the first one waits for the copies."""
    view, answers = Sum(), list[FelixError | None]()
    actor, held = await served(view)
    add(view, actor, [1], answers)
    add(view, actor, [], answers)
    add(view, actor, [], answers)
    assert not answers
    held.answer()
    assert answers == [None, None, None]
    add(view, actor, [2], answers)
    add(view, actor, [], answers)
    full = UnavailableError("full", code=Code.DISK_FULL)
    held.answer(full)
    assert answers[3:] == [full, full]
    add(view, actor, [], answers)
    assert answers[5] is not None, "of a state that is no more"
    await settled(actor)
    add(view, actor, [], answers)
    assert answers[6] is None


async def test_after_a_refusal_nothing_is_decided_until_the_journal_was_read_again() -> None:
    view, answers = Sum(), list[FelixError | None]()
    actor, held = await served(view)
    add(view, actor, [5], answers)
    held.answer()
    full = UnavailableError("full", code=Code.DISK_FULL)
    add(view, actor, [7, 8], answers)
    held.answer(full)
    # It is told before whoever waits, once, and the state is that of the journal in the end.
    assert answers == [None, full] and not actor.is_serving
    refusal = actor.refusal()
    assert refusal is not None and "reads its journal again" in refusal.sentence
    add(view, actor, [9], answers)
    assert answers[2] is not None and not held.waiting
    await settled(actor)
    assert view.told == ["begin", "replayed 0", "lost full", "begin", "replayed 5", "resumed"]
    assert view.value == 5 and actor.is_serving and actor.refusal() is None


async def test_nothing_is_told_to_be_durable_between_the_moment_when_there_is_room_and_the_one_when_it_is_seen() -> (
    None
):
    view, answers = Sum(), list[FelixError | None]()
    actor, held = await served(view)
    full = UnavailableError("full", code=Code.DISK_FULL, retry_after_ms=50)
    add(view, actor, [5], answers)
    held.full = full
    held.answer(full)
    while view.told.count("replayed 0") < 2:  # noqa: ASYNC110 - nobody announces it
        await asyncio.sleep(0)
    # It was read again, and waits for room. There is room, and nobody has looked yet.
    held.full = None
    assert actor.is_reloading and actor.is_whole and not actor.is_serving and actor.refusal() is not None
    add(view, actor, [7], answers)
    assert answers[1] is not None, "it is not in the journal"
    await settled(actor)
    assert actor.refusal() is None and view.told[-1] == "resumed"
    add(view, actor, [9], answers)
    held.answer()
    assert answers[2] is None and held.kept == [b"0", b"9"]


async def test_a_journal_that_cannot_be_read_is_tried_until_it_can() -> None:
    view, answers = Sum(), list[FelixError | None]()
    actor, held = await served(view)
    held.unreadable = FelixError("torn")
    add(view, actor, [1], answers)
    held.answer(UnavailableError("full"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert actor.is_reloading and view.told.count("begin") > 2
    held.unreadable = None
    await settled(actor)
    assert view.told[-2:] == ["replayed 0", "resumed"]


async def test_a_refused_snapshot_that_nobody_waits_for_is_found_by_the_next_question() -> None:
    view = Sum()
    actor, held = await served(view)
    held.lost = UnavailableError("full")
    assert actor.refusal() is not None
    assert view.told == ["begin", "replayed 0"], "whoever asks is in the midst of something"
    await settled(actor)
    assert actor.refusal() is None
    assert view.told[2:] == ["lost full", "begin", "replayed 0", "resumed"]


async def test_what_was_never_opened_is_not_read_again() -> None:
    view = Sum()
    actor = ViewActor("The sum", view, None, again_s=0)
    assert actor.refusal() is not None
    await settled(actor)
    assert not view.told


async def test_a_closed_view_writes_what_waits_and_decides_nothing() -> None:
    view, answers = Sum(), list[FelixError | None]()
    actor, _ = await served(view)
    add(view, actor, [1], answers)
    await actor.close()
    assert answers == [None]
    refusal = actor.refusal()
    assert refusal is not None and refusal.code is Code.SHUTTING_DOWN and not actor.is_reloading


@pytest.mark.parametrize("armed", [(5_000, 3_000), (3_000, 5_000)])
async def test_a_timer_is_armed_for_one_time_and_sooner_where_it_is_asked_to_be(
    armed: tuple[int, int],
) -> None:
    timer = DueTimer(lambda: None, lambda: 1_000)
    for due_ms in armed:
        timer.arm_sooner(due_ms)
    assert timer.due_ms == 3_000
    timer.arm(4_000)
    assert timer.due_ms == 4_000
    timer.arm(0)
    assert timer.due_ms == 0
    timer.arm_sooner(9_000)
    assert timer.due_ms == 9_000
    timer.cancel()


async def test_a_timer_calls_once_and_may_be_armed_in_the_call() -> None:
    calls: list[int] = []
    over = asyncio.Event()

    def tick() -> None:
        calls.append(timer.due_ms)
        if len(calls) == 2:
            over.set()
        else:
            timer.arm(1)

    timer = DueTimer(tick, lambda: 1_000, least_s=0)
    timer.arm(1_000)
    async with asyncio.timeout(60):
        await over.wait()
    await asyncio.sleep(0)
    assert calls == [0, 0]


async def test_a_journal_that_cannot_be_read_for_long_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor, held = await served(Sum())
    held.lost = held.unreadable = UnavailableError("The disk has failed.", code=Code.SHARD_STOPPED)
    assert actor.refusal() is not None
    for _ in range(50):
        await asyncio.sleep(0)
    assert actor.is_reloading and sum("has failed" in line for line in caplog.messages) == 1
    held.unreadable = None
    await settled(actor)
    assert actor.is_serving
