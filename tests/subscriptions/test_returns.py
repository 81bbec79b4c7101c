"""Dead letters that are given back, step by step: the process ends anywhere, and each record is delivered exactly where its dead letter is gone."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial

import msgspec
import pytest
from long_runs import count

from felix.errors import CorruptionError, FelixError, UnavailableError
from felix.settings import SubscriptionSettings
from region.gather import Done, ignore
from region.log.epochs import EVERYTHING
from region.subscriptions import returns as module
from region.subscriptions.entries import (
    Dropped,
    Failed,
    Letter,
    Moved,
    Returned,
    Returning,
    Settled,
    decode,
    encode,
)
from region.subscriptions.progress import Progress, Redelivered
from region.subscriptions.returns import Returns

BILLING = bytes(8)
RECORDS = 30


class Life:
    """One life of a broker: what it knows is made of the journal. `synced` of the journal's entries are durable, and so is what `removed` says."""

    def __init__(self, chance: random.Random, journal: list[bytes], removed: set[int], refuses: bool) -> None:
        self.chance = chance
        self.journal = journal
        self.buffer: list[tuple[bytes, Done]] = []
        self.removed = removed
        self.refuses = refuses
        self.left: list[int] = []
        self.mistakes: list[str] = []
        """Seen where an error would only be logged."""
        self.progress = Progress(BILLING, SubscriptionSettings())
        self.returns = Returns(
            BILLING, "orders, shard 0", self.append, self.remove, self.leave, self.returned
        )
        for data in journal:
            entry = decode(data)
            if isinstance(entry, Returning):
                self.progress.take_back(self.returns.take(entry, EVERYTHING).offsets)
            elif isinstance(entry, Returned):
                self.progress.returned(self.returns.take_returned().offsets)
            else:
                self.progress.replay(entry)
        self.returns.start()

    def append(self, entry: Returning | Returned, done: Done) -> None:
        self.buffer.append((encode(entry), done))
        asyncio.get_running_loop().call_later(self.chance.uniform(0, 0.002), self.sync)

    def sync(self) -> None:
        """What waits is durable, in order."""
        waiting, self.buffer = self.buffer, []
        for entry, done in waiting:
            self.journal.append(entry)
            done(None)

    async def remove(self, returning: Returning) -> None:
        written = [decode(entry) for entry in self.journal]
        begun = [each.offsets for each in written if isinstance(each, Returning)]
        if returning.offsets not in begun:
            self.mistakes.append("a dead letter is taken out before it is durable that its record comes back")
        await asyncio.sleep(self.chance.uniform(0, 0.002))
        if self.refuses and self.chance.random() < 0.5:
            raise UnavailableError("The queue's disk is full.")
        self.removed.update(returning.letters)
        await asyncio.sleep(self.chance.uniform(0, 0.002))

    def leave(self, returning: Returning) -> None:
        self.left += returning.letters

    def returned(self, returning: Returning) -> None:
        if not set(returning.letters) <= self.removed:
            self.mistakes.append("a record is delivered whose dead letter is there")
        self.progress.returned(returning.offsets)

    def snapshot(self) -> None:
        """The journal is what this life knows, and nothing else."""
        self.journal[:] = [
            *map(encode, self.progress.snapshot()),
            *(
                encode(entry)
                for each in self.returns.pending
                for entry in (each, *self.progress.settled_again(each.offsets))
            ),
        ]

    def unsettled(self) -> set[int]:
        return {n for n in range(RECORDS) if n >= self.progress.committed and n not in self.progress.settled}


def note(told: set[int], some: list[int], error: FelixError | None) -> None:
    if error is None:
        told.update(some)


async def test_the_process_ends_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each record the dead letter has the same number; all that is unsettled, and whose dead letter is gone, is delivered and acknowledged."""
    monkeypatch.setattr(module, "RETRY_S_MIN", 0.001)
    chance = random.Random(7)
    ended_between = 0
    for _ in range(count(60, 600)):
        journal = [encode(Moved(BILLING, RECORDS))]
        removed: set[int] = set()
        told: set[int] = set()
        delivered: Counter[int] = Counter()
        letters = list(range(RECORDS))
        chance.shuffle(letters)
        while len(delivered) < RECORDS:
            life = Life(chance, journal, removed, refuses=chance.random() < 0.3)
            for _ in range(chance.randrange(1, 4)):
                returning = any(life.returns.pending)
                if letters and not returning:
                    some = [letters.pop() for _ in range(min(len(letters), chance.randrange(1, 5)))]
                    entry = Returning(BILLING, "acme/ops/orders.dead", bytes(16), 0, some, some)
                    life.progress.take_back(some)

                    life.returns.begin(entry, partial(note, told, some))
                await asyncio.sleep(chance.uniform(0, 0.012))
                if not life.buffer and chance.random() < 0.3:
                    life.snapshot()
                for offset in sorted(life.unsettled()):
                    if not life.progress.is_taken(offset):
                        assert offset in removed
                        delivered[offset] += 1
                        life.sync()
                        life.journal.append(encode(Settled(BILLING, [offset, 1])))
                        life.progress.ack([(offset, offset + 1)])
            assert not life.mistakes
            ended_between += any(life.returns.pending)
            # What is durable stays, and nothing else.
            life.buffer.clear()
            life.returns.stop()
            assert told <= removed, "none is told before it is so"
            begun = {n for each in map(decode, journal) if isinstance(each, Returning) for n in each.letters}
            letters = sorted({*letters, *life.left} - removed - begun)
            chance.shuffle(letters)
        assert set(delivered.values()) == {1} and removed == set(range(RECORDS))
    assert ended_between > 20


@pytest.mark.parametrize("how", ["acknowledged", "passed", "sought back and acknowledged"])
async def test_what_was_settled_on_its_way_back_is_so_in_a_journal_that_is_written_anew(how: str) -> None:
    """Its dead letter cannot be taken out meanwhile."""
    life = Life(random.Random(7), [encode(Moved(BILLING, 10))], set(), refuses=False)
    life.progress.assign(1)
    life.progress.take_back([5, 7])
    life.returns.begin(Returning(BILLING, "acme/ops/orders.dead", bytes(16), 0, [0, 1], [5, 7]), ignore)
    if how == "acknowledged":
        life.progress.ack([(5, 6)])
    elif how == "passed":
        life.progress.move(20)
    else:
        life.progress.move(0)
        life.progress.assign(2)
        life.progress.delivered(0, 10, 0)
        life.progress.ack([(0, 6), (8, 10)])
    life.snapshot()
    life.returns.stop()
    after = Life(random.Random(7), life.journal, set(), refuses=False)
    after.returns.stop()
    assert (after.progress.committed, after.progress.settled) == (
        life.progress.committed,
        life.progress.settled,
    )


async def test_what_was_with_its_owner_as_it_was_given_back_and_failed_is_delivered_once_after_a_restart() -> (
    None
):
    """A seek had brought it already; its dead letter cannot be taken out meanwhile."""
    life = Life(random.Random(7), [encode(Moved(BILLING, 0))], set(), refuses=False)
    life.progress.assign(1)
    life.progress.delivered(0, 10, 0)
    life.progress.take_back([5])
    life.returns.begin(Returning(BILLING, "acme/ops/orders.dead", bytes(16), 0, [0], [5]), ignore)
    life.sync()
    life.journal += map(encode, life.progress.nack([(5, 6)], 0, "no", 0))
    life.returns.stop()
    after = Life(random.Random(7), life.journal, set(), refuses=False)
    after.returns.stop()
    after.progress.assign(1)
    after.progress.delivered(0, 10, 10)
    assert after.progress.again(10) == [Redelivered(2, [(5, 6)])]
    after.progress.redelivered(0, 10, 10)
    assert not after.progress.is_taken(5)
    after.progress.returned([5])
    assert not after.progress.is_back and after.progress.again(10) == []


def test_records_that_their_log_lost_keep_their_dead_letters() -> None:
    returns = Returns(BILLING, "orders", *([None] * 4))  # type: ignore[arg-type]
    taken = returns.take(Returning(BILLING, "q", bytes(16), 1, [4, 5, 6], [70, 80, 90]), 85)
    assert (taken.letters, taken.offsets) == ([4, 5], [70, 80])
    assert list(returns.pending) == [taken]
    assert returns.take_returned() == taken
    with pytest.raises(CorruptionError):
        returns.take_returned()


def test_an_earlier_release_refuses_what_it_does_not_know() -> None:
    """It would take the record for acknowledged, and its dead letter is gone."""
    known = msgspec.msgpack.Decoder(Moved | Settled | Failed | Dropped | Letter)
    for entry in (Returning(BILLING, "q", bytes(16), 0, [1], [2]), Returned(BILLING)):
        assert decode(encode(entry)) == entry
        with pytest.raises(msgspec.ValidationError):
            known.decode(encode(entry))
