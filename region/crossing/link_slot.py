"""The state that a destination's shard keeps of a link: one annotation of its log, in one slot. Pure.

The slot is 8 bytes of SHA-256 over the names of source region, stream and shard; the names stand in the annotation beside,
so that two links whose hashes meet are refused, never misread. A slot belongs to the link, not to an incarnation: the
newest incarnation takes it over, so a stream that is re-created any number of times uses one.

Layout, big-endian; the first byte is one that no position of version 0.1 begins with::

    0   magic fe "LS" 02    4     44  epoch           4   of the newest range that brought records
    4   live incarnation    16    48  read to         8   the source offset after that range
    20  own incarnation     16    56  region length   1
    36  statement time, ms  8     57  stream length   1, then both names, then the position

Version 0.1 gave every incarnation a slot, XXH3-64 of its names, that holds a position alone. `old_slot` finds it; the first
range that lands afterwards moves it over (region.crossing.ingest).

Invariants: `LinkRecord.decode(r.encode()) == r`; at most ANNOTATION_BYTES_MAX bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

import xxhash

from felix.context import bind
from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from region.log.segment import ANNOTATION_SLOTS_MAX

ENVELOPES_MAX: Final = 24
"""Ranges that a position remembers: as many as may be on the way without a receipt."""
LINKS_MAX: Final = ANNOTATION_SLOTS_MAX - 16
"""Slots of a shard that links may take, all together: the rest is for what is the region's own, transactions above all."""
REGION_LINKS_MAX: Final = 64
"""Of one source region: each is another stream that was granted into this one."""

_POSITION: Final = struct.Struct(">QB")
_NEWEST: Final = struct.Struct(">QQI")
_MAGIC: Final = b"\xfeLS\x02"
_RECORD: Final = struct.Struct(">4s16s16sQIQBB")


class Landed(NamedTuple):
    """One range that was appended: source offset, offset here, records (0: nothing of the range crossed)."""

    source_base: int
    base_offset: int
    records: int

    @property
    def first_offset(self) -> int | None:
        """Of its records here; None where nothing of the range crossed."""
        return self.base_offset if self.records else None

    @property
    def last_offset(self) -> int | None:
        return self.base_offset + self.records - 1 if self.records else None


class Position(NamedTuple):
    """The source offset that comes next, and the newest ranges."""

    next_offset: int
    newest: tuple[Landed, ...] = ()

    def encode(self) -> bytes:
        """At most 9 + 24 × 20 = 489 bytes."""
        assert len(self.newest) <= ENVELOPES_MAX
        return _POSITION.pack(self.next_offset, len(self.newest)) + b"".join(
            _NEWEST.pack(*landed) for landed in self.newest
        )

    @classmethod
    def decode(cls, data: bytes) -> Position:
        """Raises CorruptionError."""
        if len(data) < _POSITION.size:
            raise CorruptionError("A bridge position in the log is cut off.")
        next_offset, count = _POSITION.unpack_from(data)
        if len(data) != _POSITION.size + count * _NEWEST.size:
            raise CorruptionError("A bridge position in the log has a wrong length.")
        return cls(next_offset, tuple(map(Landed._make, _NEWEST.iter_unpack(data[_POSITION.size :]))))

    def after(self, landed: Landed, next_offset: int) -> Position:
        """The position once one more range has landed."""
        return Position(next_offset, (*self.newest, landed)[-ENVELOPES_MAX:])

    def find(self, source_base: int) -> Landed | None:
        """The newest range that began at this source offset."""
        return next((landed for landed in reversed(self.newest) if landed.source_base == source_base), None)


class LinkRecord(NamedTuple):
    """What a slot holds. `live` is the incarnation that `position` counts in, `own` the stream's; they differ after an
    accepted truncation. `epoch` and `read_to` are 0 before the first range with records."""

    region: str
    stream: str
    live: bytes
    own: bytes
    statement_ms: int
    epoch: int
    read_to: int
    position: Position

    def encode(self) -> bytes:
        """At most 58 + 63 + 191 + 489 = 801 bytes."""
        region, stream = self.region.encode(), self.stream.encode()
        head = _RECORD.pack(
            _MAGIC,
            self.live,
            self.own,
            self.statement_ms,
            self.epoch,
            self.read_to,
            len(region),
            len(stream),
        )
        return b"".join((head, region, stream, self.position.encode()))

    @classmethod
    def decode(cls, data: bytes) -> LinkRecord | None:
        """None where the annotation is none of a link, or one of version 0.1. Raises CorruptionError."""
        if not data.startswith(_MAGIC):
            return None
        if len(data) < _RECORD.size:
            raise CorruptionError("A link's annotation in the log is cut off.")
        _, live, own, time_ms, epoch, read_to, of_region, of_stream = _RECORD.unpack_from(data)
        at, end = _RECORD.size + of_region, _RECORD.size + of_region + of_stream
        try:
            region, stream = data[_RECORD.size : at].decode(), data[at:end].decode()
        except UnicodeDecodeError:
            raise CorruptionError("A link's annotation in the log has no names.") from None
        return cls(region, stream, live, own, time_ms, epoch, read_to, Position.decode(data[end:]))


def link_slot(source_region: str, stream: str, shard: int) -> int:
    """The slot of a link: 8 bytes of SHA-256 over its names."""
    return int.from_bytes(
        hashlib.sha256(bind("link-slot-name", source_region, stream, shard)).digest()[:8], "big"
    )


def old_slot(source_region: str, stream: str, incarnation: bytes, shard: int) -> int:
    """The slot that version 0.1 gave a link: XXH3-64 of its names."""
    return int(xxhash.xxh3_64_intdigest(bind("link-slot", source_region, stream, incarnation, shard)))


def held_record(annotations: Mapping[int, bytes], slot: int, region: str, stream: str) -> LinkRecord | None:
    """What the slot holds of this link; None where it is free.

    Raises RequestError(CONFLICT) where another link, or something else, holds it; UnavailableError(LIMIT_MEMORY) where it is
    free and may not be taken.
    """
    data = annotations.get(slot)
    if data is None:
        _check_room(annotations, region)
        return None
    record = LinkRecord.decode(data)
    if record is None or (record.region, record.stream) != (region, stream):
        held = "something else" if record is None else f"{record.stream} of {record.region}"
        raise RequestError(
            f"The place of {stream} of {region} in the destination's log is held by {held}.",
            code=Code.CONFLICT,
            hint="Give the grant another destination stream.",
        )
    return record


def _check_room(annotations: Mapping[int, bytes], region: str) -> None:
    """A link never takes a slot that others need."""
    records = [LinkRecord.decode(data) for data in annotations.values()]
    own = sum(record is not None and record.region == region for record in records)
    if own >= REGION_LINKS_MAX or len(records) >= LINKS_MAX:
        raise UnavailableError(
            f"A shard of the destination stream remembers {own} links of {region} and {len(records)} annotations in all; "
            f"{REGION_LINKS_MAX} and {LINKS_MAX} are the most for links.",
            code=Code.LIMIT_MEMORY,
            hint="Give the grant another destination stream.",
            retry_after_ms=30_000,
        )
