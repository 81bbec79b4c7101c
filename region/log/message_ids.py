"""Message ids: which of a batch's records a producer has published before, in the shard's bounded window.

A producer that has no sequence, only an id per record, puts it into the header `felix.message-id`. A shard of a stream
that asks for deduplication remembers the ids of its newest records; a record whose id is among them is not appended
again, and is answered with the offset of the first one. The truth is in the records: the window is read from the log when
the shard opens. Pure: time and offsets come in.

Invariants:
- ids stand in the order of their offsets, and so of their times;
- what is older than `window_ms` at an append is not found, and what is beyond the newest `ids_max` is forgotten once
  what pushed it out is settled, so that refusing that (`rollback`) leaves the window as it was;
- `sift` changes nothing: what it finds is remembered by `record` once the batch is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from felix.batch import (
    FLAG_HEADERS,
    FLAG_ZSTD,
    MESSAGE_ID_BYTES_MAX,
    MESSAGE_ID_HEADER,
    Batch,
    NewRecord,
    decode_record_headers,
    decode_records,
    encode_batch,
)
from felix.errors import RequestError
from felix.settings import Deduplication
from region.log.producers import Remembered

_NAME: Final = MESSAGE_ID_HEADER


class Identified(NamedTuple):
    """An id, the offset of its record, and when that was appended (ms)."""

    id: bytes
    offset: int
    time_ms: int


class MessageIds:
    """The window of one shard."""

    __slots__ = ("_ids", "ids_max", "window_ms")

    def __init__(self, settings: Deduplication) -> None:
        self.window_ms = settings.window_ms
        self.ids_max = settings.ids_max
        self._ids: dict[bytes, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def find(self, message_id: bytes, now_ms: int) -> int | None:
        """The offset of the record with this id, where it is within the window."""
        found = self._ids.get(message_id)
        if found is None or found[1] + self.window_ms < now_ms:
            return None
        return found[0]

    def record(self, entries: Iterable[Identified]) -> None:
        """Remember appended records, in the order of their offsets.

        Of one id the newest counts: an older one had left the window when this was appended, or both came over a border.
        """
        ids = self._ids
        for message_id, offset, time_ms in entries:
            ids.pop(message_id, None)
            ids[message_id] = (offset, time_ms)

    def settle(self, now_ms: int) -> None:
        """What was recorded is durable: forget what is beyond the bounds."""
        ids = self._ids
        while ids:
            oldest = next(iter(ids))
            if len(ids) <= self.ids_max and ids[oldest][1] + self.window_ms >= now_ms:
                return
            del ids[oldest]

    def rollback(self, offset: int) -> None:
        """Forget records at or above `offset`: they were refused or truncated after all."""
        ids = self._ids
        while ids:
            newest = next(reversed(ids))
            if ids[newest][0] < offset:
                return
            del ids[newest]


class Sifted(NamedTuple):
    """What is left of a batch (None: nothing), the offset of each of its records, and the ids that are new."""

    batch: Batch | None
    offsets: tuple[int, ...]
    fresh: tuple[Identified, ...]


def message_ids(batch: Batch, *, as_it_is: bool = False) -> list[bytes | None] | None:
    """The message id of every record; None where no record has one. `as_it_is`: one that may not be is none, as in what stands in a log (`identified`): nobody can send another record in this one's place.

    Raises RequestError(BATCH_MALFORMED), and RequestError(INVALID) where an id is empty or too long.
    """
    if not batch.header.flags & FLAG_HEADERS:
        return None
    ids = [headers.get(_NAME) for headers in decode_record_headers(batch)]
    if as_it_is:
        ids = [found if found and len(found) <= MESSAGE_ID_BYTES_MAX else None for found in ids]
    if not any(found is not None for found in ids):
        return None
    for found in ids:
        if found is not None and not 0 < len(found) <= MESSAGE_ID_BYTES_MAX:
            raise RequestError(
                f"A message id of {len(found)} bytes; 1 to {MESSAGE_ID_BYTES_MAX} are allowed.",
                hint="Use a UUID, or a hash of what makes the record the same.",
            )
    return ids


def identified(batch: Batch) -> list[Identified]:
    """The ids of a batch as it stands in the log, with offsets and time. An id that may not be is passed over."""
    header = batch.header
    if not header.flags & FLAG_HEADERS:
        return []
    return [
        Identified(found, offset, header.append_time_ms)
        for offset, headers in enumerate(decode_record_headers(batch), header.base_offset)
        if (found := headers.get(_NAME)) is not None and 0 < len(found) <= MESSAGE_ID_BYTES_MAX
    ]


def sift(
    batch: Batch, ids: Sequence[bytes | None], window: MessageIds, next_offset: int, now_ms: int
) -> Sifted:
    """Leave out the records whose id is in the window, or earlier in the batch.

    A batch that gets shorter keeps the *end* of its sequence: its base sequence moves on by what was left out. So the
    producer's next batch follows on it, also once the producers are read from the log again.
    """
    offsets: list[int] = []
    kept: list[int] = []
    fresh: dict[bytes, int] = {}
    for place, message_id in enumerate(ids):
        if message_id is not None:
            first = fresh.get(message_id)
            if first is None:
                first = window.find(message_id, now_ms)
            if first is not None:
                offsets.append(first)
                continue
            fresh[message_id] = next_offset + len(kept)
        offsets.append(next_offset + len(kept))
        kept.append(place)
    left: Batch | None = batch
    if not kept:
        left = None
    elif len(kept) < len(ids):
        left = _shortened(batch, kept)
    return Sifted(left, tuple(offsets), tuple(Identified(found, at, now_ms) for found, at in fresh.items()))


def _shortened(batch: Batch, kept: Sequence[int]) -> Batch:
    header = batch.header
    records = list(decode_records(batch))
    wanted = [
        NewRecord(
            bytes(records[at].payload), bytes(key) if (key := records[at].key) else None, records[at].headers
        )
        for at in kept
    ]
    return encode_batch(
        wanted,
        shard=header.shard,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence + header.records - len(kept) if header.producer_id else 0,
        compress=bool(header.flags & FLAG_ZSTD),
    )


def repeated_offsets(
    ids: Sequence[bytes | None], window: MessageIds, first: Remembered, now_ms: int
) -> tuple[int, ...]:
    """The offset of each record of a repeated batch that was shorter when it was appended the first time.

    A record without an id was appended; one with an id is where its id says. An id that has left the window since then
    leaves its record the place that comes next, which is where it stands if it was appended.
    """
    cursor = first.base_offset
    end = cursor + first.next_sequence - first.base_sequence
    offsets: list[int] = []
    for message_id in ids:
        found = None if message_id is None else window.find(message_id, now_ms)
        if found is None:
            found = min(cursor, max(first.base_offset, end - 1))
        offsets.append(found)
        if found == cursor:
            cursor += 1
    return tuple(offsets)
