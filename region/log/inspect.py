"""A segment's structure without its contents, for `felix log inspect`. Values in, values out: nothing is opened. The
header itself is region.log.segment.decode_segment_header's.

Payloads, keys, annotations' bytes and bodies are never among what is given back; lengths, offsets and times
are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from felix.batch import FLAG_HEADERS, FLAG_KEYED, FLAG_SEALED, FLAG_ZSTD, Buffer
from region.log.segment import (
    EntryDamagedError,
    decode_entry,
    decode_segment_header,
    find_entries,
)

_FLAG_NAMES = ((FLAG_ZSTD, "zstd"), (FLAG_SEALED, "sealed"), (FLAG_KEYED, "keyed"), (FLAG_HEADERS, "headers"))


class EntryLine(NamedTuple):
    """One entry. `records` is 0 and the batch's fields are empty for an annotation alone."""

    position: int
    length: int
    base_offset: int
    records: int
    leader_epoch: int
    append_time_ms: int
    flags: tuple[str, ...]
    key_id: str
    producer_id: int
    base_sequence: int
    synced_to: int
    slot: int
    annotation_length: int


class DamageLine(NamedTuple):
    """Bytes that are no entry: from `position`, `length` of them up to the next entry that decodes or the end."""

    position: int
    length: int
    reason: str


def inspect_entries(data: Buffer) -> Iterator[EntryLine | DamageLine]:
    """Every entry of a whole segment file, bodies verified; damage is named and passed over.

    Raises CorruptionError where the segment's header does not decode.
    """
    header, index = decode_segment_header(data)
    view = memoryview(data)
    shard = header.identity.shard
    while index < len(view):
        try:
            entry = decode_entry(view, index, at=0, salt=header.salt, shard=shard, verify_body=True)
        except EntryDamagedError as error:
            following = find_entries(
                view[index + 1 :], at=index + 1, salt=header.salt, shard=shard, whole=True
            )
            end = following[0].position if following else len(view)
            yield DamageLine(index, end - index, str(error))
            index = end
            continue
        batch = entry.header
        yield EntryLine(
            position=entry.position,
            length=entry.length,
            base_offset=entry.base_offset,
            records=batch.records if batch else 0,
            leader_epoch=entry.leader_epoch,
            append_time_ms=batch.append_time_ms if batch else 0,
            flags=tuple(name for flag, name in _FLAG_NAMES if batch and batch.flags & flag),
            key_id=batch.key_id.hex() if batch and batch.flags & FLAG_SEALED else "",
            producer_id=batch.producer_id if batch else 0,
            base_sequence=batch.base_sequence if batch else 0,
            synced_to=entry.synced_to,
            slot=entry.slot,
            annotation_length=len(entry.annotation),
        )
        index += entry.length
