"""What a journal says of records that were lost counts for none that stands in their place: queues and durable subscriptions against a list of records,
over openings, lost ends and snapshots by chance."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from felix.settings import QueueSettings, SubscriptionSettings
from region.log.epochs import EVERYTHING, EpochHistory
from region.queue import state
from region.queue.state import QueueState
from region.subscriptions.entries import Dropped, Moved, encode
from region.subscriptions.progress import Progress
from region.views.dead_letter import GONE, Move, Outbox, _Entry
from region.views.history import EPOCHS_TOLD, shared_end, told

NAME = b"billing."


class Records:
    """A shard's records, by what they are, and its epochs, as far as a view asks for them."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.epochs = EpochHistory()
        self.epoch = 0
        self._made = 0

    @property
    def log_end_offset(self) -> int:
        return len(self.held)

    def newest_epochs(self, count: int) -> list[tuple[int, int]]:
        found = [(start.epoch, start.start_offset) for start in self.epochs.starts]
        if self.epoch > self.epochs.current:
            found.append((self.epoch, self.log_end_offset))
        return found[-count:]

    def append(self) -> None:
        self._made += 1
        self.epochs.begin(self.epoch, self.log_end_offset)
        self.held.append(self._made)

    def lose(self, count: int) -> None:
        del self.held[max(0, len(self.held) - count) :]
        if count % 2:
            self.epochs.truncate(len(self.held))
        else:
            # As a recovery that finds the file of epochs whole.
            self.epochs.clamp(len(self.held))


class View:
    """One of the two: its journal, and which records were done."""

    def __init__(self, records: Any) -> None:
        self.records = records
        self.journal: list[Any] = []
        self.done: set[int] = set()
        self.is_told = False

    def write(self, *entries: Any) -> None:
        if not self.is_told:
            self.is_told = True
            self.journal.append(self.preface())
        self.journal += entries

    def open(self) -> None:
        self.is_told = False
        self.begin()
        for entry in self.journal:
            self.replay(entry)
        held = self.records.held
        assert self.settled(len(held)) == [each in self.done for each in held]

    def preface(self) -> Any: ...
    def begin(self) -> None: ...
    def replay(self, entry: Any) -> None: ...
    def settle(self, offset: int) -> None: ...
    def snapshot(self) -> None: ...
    def settled(self, end: int) -> list[bool]: ...


class Queue(View):
    def preface(self) -> bytes:
        return state.preface(told(self.records))

    def begin(self) -> None:
        self.state = QueueState(QueueSettings())

    def replay(self, entry: bytes) -> None:
        self.state.apply(entry, 0, lambda epochs: shared_end(self.records, epochs))

    def settle(self, offset: int) -> None:
        # Leased, and then done.
        self.state.take_up_run(self.records.log_end_offset, 0, 0)
        record = self.state.tracked[offset]
        self.state._ready[record.priority].remove(offset)
        self.state._ready[record.priority].appendleft(offset)
        self.state.lease(record, 1_000, 1, 0)
        self.write(self.state.leased([record], 1_000, 1))
        entry, _ = self.state.ack([(offset, 1, record.token)], 0)
        self.write(entry)

    def snapshot(self) -> None:
        self.journal = [self.preface(), *self.state.entries()]

    def settled(self, end: int) -> list[bool]:
        assert (not self.state.done or self.state.done.next <= end) and all(
            offset < end for offset in self.state.tracked
        )
        return [offset in self.state.done for offset in range(end)]


class Subscription(View):
    def preface(self) -> Dropped:
        return Dropped(b"", told(self.records))

    def begin(self) -> None:
        self.progress, self.end = Progress(NAME, SubscriptionSettings()), EVERYTHING
        self.progress.replay(Moved(NAME, 0))

    def replay(self, entry: Any) -> None:
        if isinstance(entry, Dropped):
            self.end = shared_end(self.records, entry.epochs)
        else:
            self.progress.replay(entry, self.end)

    def settle(self, offset: int) -> None:
        self.write(*self.progress.ack([(offset, offset + 1)]))

    def snapshot(self) -> None:
        self.journal = [self.preface(), *self.progress.snapshot()]

    def settled(self, end: int) -> list[bool]:
        assert self.progress.committed <= end and (
            not self.progress.settled or self.progress.settled.next <= end
        )
        return [offset < self.progress.committed or offset in self.progress.settled for offset in range(end)]


def play(view: View, records: Records, random: Random) -> int:
    """How many records were lost that were done."""
    lost = 0
    for _ in range(random.randint(2, 12)):
        # Some openings in which nothing is written, and more of them than a journal tells.
        for _ in range(random.choice((1, 1, 1, EPOCHS_TOLD + 2))):
            records.epoch = max(records.epoch, records.epochs.current) + random.randint(1, 9)
        view.open()
        for _ in range(random.randint(0, 12)):
            free = [at for at, each in enumerate(records.held) if each not in view.done]
            match random.choice(("append", "append", "done", "done", "snapshot")):
                case "append":
                    records.append()
                case "done" if free:
                    offset = free[0] if random.random() < 0.7 else random.choice(free)
                    view.settle(offset)
                    view.done.add(records.held[offset])
                case "snapshot" if random.random() < 0.3:
                    view.snapshot()
        if random.random() < 0.5:
            before = set(records.held)
            records.lose(random.randint(0, 6))
            lost += len((before - set(records.held)) & view.done)
    view.open()
    return lost


@pytest.mark.parametrize("kind", [Queue, Subscription])
def test_what_is_done_is_of_records_that_are_there_whatever_was_lost(kind: type[View]) -> None:
    lost = 0
    for seed in range(150):
        records = Records()
        view = kind(records)
        lost += play(view, records, Random(seed))
    assert lost > 50


def test_an_earlier_release_passes_by_what_says_a_history() -> None:
    class Before(msgspec.Struct, frozen=True, array_like=True, tag=4):
        subscription: bytes

    entry = msgspec.msgpack.decode(state.preface([5, 0, 9, 150]), type=state.Entry)
    assert entry == state.Entry(state.Kind.DONE, [])
    assert msgspec.msgpack.decode(encode(Dropped(b"", [5, 0])), type=Before) == Before(b"")


def test_a_record_that_was_lost_on_its_way_to_the_dead_letters_is_named_no_more() -> None:
    outbox = Outbox()
    move = Move("acme/ops/dead", 0, 0, 0, [3, 7, 9], [1, 1, 1], "")
    _, over = outbox.take(msgspec.msgpack.encode(_Entry(0, move)), 8)
    assert over is None and outbox.pending[0].offsets == [3, 7, GONE] and outbox.pending[0].held == [3, 7]
    assert outbox.take(msgspec.msgpack.encode(_Entry(0, move)), EVERYTHING)[1] is None
    assert outbox.pending[1] == move
