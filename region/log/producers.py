"""Producers' sequences: which batch of an idempotent producer is new, repeated, out of order or fenced.

A producer numbers its records: a batch covers `base_sequence` .. + records, the next batch goes on from
there, and a new producer epoch starts again at 0. Producer id 0 asks for none of this. The table is rebuilt
from the batch headers of the log; a snapshot of it is a shortcut, never the truth. Pure: time and offsets
come in.

Invariants:
- per producer, at least the last `BATCHES_REMEMBERED` batches below the settled offset, and every one above
  it, are remembered, so that refusing what is above it (`rollback`) leaves the table as it was;
- a producer is forgotten only by count (least recently used first) or age, never while a batch of it is
  unsettled;
- an unknown producer, or a new epoch, begins at sequence 0: a later start would hide a lost first batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from felix.errors import Code, CorruptionError, RequestError

BATCHES_REMEMBERED: Final = 32
"""A client keeps fewer batches of a shard in flight, so every retry finds its first attempt."""
PRODUCERS_MAX: Final = 8_192
"""Per shard: bounds memory (about 6 KiB each, where all of them publish) and the size of the snapshot."""
PRODUCER_AGE_MS: Final = 7 * 24 * 3_600_000
"""A producer that was silent for a week begins anew."""


class Verdict(Enum):
    """What to do with a batch."""

    ACCEPT = "accept"
    DUPLICATE = "duplicate"
    GAP = "gap"
    FORGOTTEN = "forgotten"
    FENCED = "fenced"


class Remembered(NamedTuple):
    """A batch that was appended; sequences and offsets in records, time in ms."""

    epoch: int
    base_sequence: int
    next_sequence: int
    base_offset: int
    append_time_ms: int


class Decision(NamedTuple):
    """The verdict; with DUPLICATE the first append, with the others what was expected (0 for a new producer)."""

    verdict: Verdict
    first: Remembered | None = None
    expected_sequence: int = 0
    current_epoch: int = 0


_ACCEPT: Final = Decision(Verdict.ACCEPT)


class _Snapshot(msgspec.Struct, array_like=True):
    offset: int
    producers: list[tuple[int, list[Remembered]]]


# Made here: shards and logs are opened on several threads, and msgspec learns a type at its first use, not safely on two.
_snapshot: Final = msgspec.msgpack.Decoder(_Snapshot)


class ProducerTable:
    """The producers of one shard."""

    __slots__ = ("_producers", "_settled", "age_ms", "producers_max")

    def __init__(
        self, *, settled: int = 0, producers_max: int = PRODUCERS_MAX, age_ms: int = PRODUCER_AGE_MS
    ) -> None:
        self.producers_max = producers_max
        self.age_ms = age_ms
        self._settled = settled
        # In order of last use, oldest first.
        self._producers: dict[int, deque[Remembered]] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def __iter__(self) -> Iterator[tuple[int, tuple[Remembered, ...]]]:
        return ((producer, tuple(batches)) for producer, batches in self._producers.items())

    def decide(
        self, producer_id: int, epoch: int, base_sequence: int, records: int, *, shortened: bool = False
    ) -> Decision:
        """What to do with this batch. Changes nothing.

        `shortened`: the shard leaves out repeated records, and what it kept of a batch has the end of its sequence.
        """
        if not producer_id:
            return _ACCEPT
        batches = self._producers.get(producer_id)
        if batches is None:
            return _ACCEPT if base_sequence == 0 else Decision(Verdict.GAP, None, 0, epoch)
        last = batches[-1]
        if epoch < last.epoch:
            return Decision(Verdict.FENCED, None, last.next_sequence, last.epoch)
        if epoch > last.epoch:
            return _ACCEPT if base_sequence == 0 else Decision(Verdict.GAP, None, 0, epoch)
        if base_sequence == last.next_sequence:
            return _ACCEPT
        if base_sequence > last.next_sequence:
            return Decision(Verdict.GAP, None, last.next_sequence, epoch)
        for batch in batches:
            if (batch.epoch, batch.next_sequence) == (epoch, base_sequence + records) and (
                batch.base_sequence == base_sequence or (shortened and batch.base_sequence > base_sequence)
            ):
                return Decision(Verdict.DUPLICATE, batch, last.next_sequence, epoch)
        return Decision(Verdict.FORGOTTEN, None, last.next_sequence, epoch)

    def record(self, producer_id: int, batch: Remembered) -> None:
        """Remember an appended batch. Offsets come in increasing."""
        if not producer_id:
            return
        batches = self._producers.pop(producer_id, None)
        if batches is None:
            batches = deque()
        self._producers[producer_id] = batches
        batches.append(batch)
        while len(batches) > BATCHES_REMEMBERED and batches[BATCHES_REMEMBERED].base_offset < self._settled:
            batches.popleft()
        while len(self._producers) > self.producers_max:
            oldest, remembered = next(iter(self._producers.items()))
            if remembered[-1].base_offset >= self._settled:
                break
            del self._producers[oldest]

    def settle(self, offset: int) -> None:
        """Batches below `offset` are durable and will not be rolled back."""
        self._settled = offset

    def rollback(self, offset: int) -> None:
        """Forget batches at or above `offset`: they were refused or truncated after all."""
        self._settled = min(self._settled, offset)
        for producer_id in list(self._producers):
            batches = self._producers[producer_id]
            while batches and batches[-1].base_offset >= offset:
                batches.pop()
            if not batches:
                del self._producers[producer_id]

    def expire(self, now_ms: int) -> int:
        """Forget producers silent for longer than `age_ms`; how many."""
        aged = []
        for producer_id, batches in self._producers.items():
            if batches[-1].append_time_ms + self.age_ms >= now_ms:
                break
            aged.append(producer_id)
        for producer_id in aged:
            del self._producers[producer_id]
        return len(aged)

    def encode(self, offset: int) -> bytes:
        """A snapshot of what is known of batches below `offset`."""
        producers = []
        for producer_id, batches in self._producers.items():
            known = [batch for batch in batches if batch.base_offset < offset]
            if known:
                producers.append((producer_id, known[-BATCHES_REMEMBERED:]))
        return msgspec.msgpack.encode(_Snapshot(offset, producers))


def decode_snapshot(data: bytes) -> tuple[ProducerTable, int]:
    """The table of a snapshot, and the offset up to which it knows the log. Raises CorruptionError."""
    try:
        snapshot = _snapshot.decode(data)
    except msgspec.DecodeError as error:
        raise CorruptionError(f"The snapshot of producers does not decode: {error}.") from error
    table = ProducerTable(settled=snapshot.offset)
    for producer_id, batches in snapshot.producers:
        for batch in islice(batches, BATCHES_REMEMBERED):
            table.record(producer_id, batch)
    return table, snapshot.offset


def refusal(producer_id: int, base_sequence: int, decision: Decision) -> RequestError:
    """The error that a verdict other than ACCEPT and DUPLICATE is answered with."""
    if decision.verdict is Verdict.FENCED:
        return RequestError(
            f"Producer {producer_id:#x} was fenced: epoch {decision.current_epoch} of it is in use.",
            code=Code.PRODUCER_FENCED,
            hint="Another instance took over; stop this one, or ask for a new epoch.",
        )
    if decision.verdict is Verdict.FORGOTTEN:
        return RequestError(
            f"Sequence {base_sequence} of producer {producer_id:#x} is older than its last {BATCHES_REMEMBERED} "
            f"batches; the next one expected is {decision.expected_sequence}.",
            code=Code.SEQUENCE_GAP,
            hint="It was appended before or never; read the stream to tell, then go on with a new epoch.",
        )
    return RequestError(
        f"Sequence {base_sequence} of producer {producer_id:#x} leaves a gap: {decision.expected_sequence} is next.",
        code=Code.SEQUENCE_GAP,
        hint="Send the missing batches first, or begin a new epoch at sequence 0.",
    )
