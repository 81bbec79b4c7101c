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

from array import array
from collections.abc import Iterator
from enum import Enum
from typing import Final

import msgspec

from felix.errors import Code, CorruptionError, RequestError

BATCHES_REMEMBERED: Final = 128
"""A client keeps fewer batches of a shard in flight (`BATCHES_IN_FLIGHT_MAX`), so every retry finds its first attempt."""
BATCHES_IN_FLIGHT_MAX: Final = BATCHES_REMEMBERED - 1
"""What the broker tells a publisher that it may have in flight for each shard: a single record per batch, 512 callers and 31 in
flight reached 0.75 of the rate (0074)."""
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


class Remembered(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A batch that was appended; sequences and offsets in records, time in ms."""

    epoch: int
    base_sequence: int
    next_sequence: int
    base_offset: int
    append_time_ms: int


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The verdict; with DUPLICATE the first append, with the others what was expected (0 for a new producer)."""

    verdict: Verdict
    first: Remembered | None = None
    expected_sequence: int = 0
    current_epoch: int = 0


_ACCEPT: Final = Decision(Verdict.ACCEPT)


class _History:
    """The remembered batches of one producer, oldest first. Packed integers: 40 bytes a batch, where tuples take 190."""

    __slots__ = ("_packed", "last")

    def __init__(self, first: Remembered) -> None:
        self._packed = array("q", _packed(first))
        self.last = first
        """The newest."""

    def __len__(self) -> int:
        return len(self._packed) // _FIELDS

    def __iter__(self) -> Iterator[Remembered]:
        packed = self._packed
        return (Remembered(*packed[at : at + _FIELDS]) for at in range(0, len(packed), _FIELDS))

    def append(self, batch: Remembered) -> None:
        self._packed.extend(_packed(batch))
        self.last = batch

    def trim(self, settled: int) -> None:
        """Drop the oldest, as long as `BATCHES_REMEMBERED` others lie below the settled offset."""
        packed, at = self._packed, BATCHES_REMEMBERED * _FIELDS + _BASE_OFFSET
        gone = 0
        while at + gone < len(packed) and packed[at + gone] < settled:
            gone += _FIELDS
        del packed[:gone]

    def cut(self, offset: int) -> bool:
        """Drop batches at or above `offset`; False where none is left."""
        packed = self._packed
        while packed and packed[_BASE_OFFSET - _FIELDS] >= offset:
            del packed[-_FIELDS:]
        if packed:
            self.last = Remembered(*packed[-_FIELDS:])
        return bool(packed)

    def below(self, offset: int) -> list[Remembered]:
        """Of the batches below `offset` the newest, `BATCHES_REMEMBERED` at most."""
        return [batch for batch in self if batch.base_offset < offset][-BATCHES_REMEMBERED:]


_FIELDS: Final = len(Remembered.__struct_fields__)
_BASE_OFFSET: Final = Remembered.__struct_fields__.index("base_offset")


def _packed(batch: Remembered) -> tuple[int, ...]:
    return (
        batch.epoch,
        batch.base_sequence,
        batch.next_sequence,
        batch.base_offset,
        batch.append_time_ms,
    )


class _Snapshot(msgspec.Struct, array_like=True):
    offset: int
    producers: list[tuple[int, list[Remembered]]]


_BATCH_BYTES: Final = 1 + 9 * _FIELDS
"""At most, in msgpack: an array of integers."""
SNAPSHOT_BYTES_LEAST: Final = PRODUCERS_MAX * (16 + _BATCH_BYTES) + 64
"""So much a snapshot takes at most that has one batch of each producer."""
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
        self._producers: dict[int, _History] = {}

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
        last = batches.last
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
            self._producers[producer_id] = _History(batch)
        else:
            self._producers[producer_id] = batches
            batches.append(batch)
            batches.trim(self._settled)
        while len(self._producers) > self.producers_max:
            oldest, remembered = next(iter(self._producers.items()))
            if remembered.last.base_offset >= self._settled:
                break
            del self._producers[oldest]

    def settle(self, offset: int) -> None:
        """Batches below `offset` are durable and will not be rolled back."""
        self._settled = offset

    def rollback(self, offset: int) -> None:
        """Forget batches at or above `offset`: they were refused or truncated after all."""
        self._settled = min(self._settled, offset)
        for producer_id in list(self._producers):
            if not self._producers[producer_id].cut(offset):
                del self._producers[producer_id]

    def expire(self, now_ms: int) -> int:
        """Forget producers silent for longer than `age_ms`; how many."""
        aged = []
        for producer_id, batches in self._producers.items():
            if batches.last.append_time_ms + self.age_ms >= now_ms:
                break
            aged.append(producer_id)
        for producer_id in aged:
            del self._producers[producer_id]
        return len(aged)

    def encode(self, offset: int) -> bytes:
        """A snapshot of what is known of batches below `offset`."""
        producers = []
        for producer_id, batches in self._producers.items():
            known = batches.below(offset)
            if known:
                producers.append((producer_id, known))
        return msgspec.msgpack.encode(_Snapshot(offset, producers))


def decode_snapshot(data: bytes) -> tuple[ProducerTable, int]:
    """The table of a snapshot, and the offset up to which it knows the log. Raises CorruptionError."""
    try:
        snapshot = _snapshot.decode(data)
    except msgspec.DecodeError as error:
        raise CorruptionError(f"The snapshot of producers does not decode: {error}.") from error
    table = ProducerTable(settled=snapshot.offset)
    for producer_id, batches in snapshot.producers:
        for batch in batches[-BATCHES_REMEMBERED:]:
            table.record(producer_id, batch)
    return table, snapshot.offset


def shorten_snapshot(data: bytes, bytes_max: int) -> bytes:
    """A snapshot of at most `bytes_max` bytes: of the producers that were used longest ago, only the newest batch stays. What they send again
    from before it is refused as forgotten. Asserts room for one batch of each; raises CorruptionError."""
    assert bytes_max >= SNAPSHOT_BYTES_LEAST
    if len(data) <= bytes_max:
        return data
    try:
        snapshot = _snapshot.decode(data)
    except msgspec.DecodeError as error:
        raise CorruptionError(f"The snapshot of producers does not decode: {error}.") from error
    room = bytes_max - SNAPSHOT_BYTES_LEAST
    for at in range(len(snapshot.producers) - 1, -1, -1):
        producer_id, batches = snapshot.producers[at]
        kept = min(len(batches), 1 + room // _BATCH_BYTES)
        room -= (kept - 1) * _BATCH_BYTES
        snapshot.producers[at] = producer_id, batches[-kept:]
    return msgspec.msgpack.encode(snapshot)


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
