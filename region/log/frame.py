"""What a log writes as one entry, and what it reads: batches as they stand, sealed. Pure."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from felix.batch import Batch, BatchHeader, body_checksum
from region.log.segment import NOTE_PIECE_BYTES_MAX, Kind, SegmentEntry, beside_bytes_max


class Place(IntEnum):
    """Where in a segment of its leader's a frame stands, for copies whose segments are to begin where the leader's begin."""

    UNKNOWN = 0
    """not told: a copy ends its segments by its own limits"""
    FIRST = 1
    LATER = 2


class Frame(msgspec.Struct, frozen=True, gc=False):
    """What `write` puts into the file as one entry, and what is the same on every copy of a log. The batch, if any, is sealed and
    carries its final header.

    Without batch and annotation it frees the slot. `is_note`: the annotation is a piece of a note, which the next frame that is none has.
    `place`: of the first of a group; nothing is known of those behind it.
    """

    batch: Batch | None
    base_offset: int
    leader_epoch: int
    slot: int = 0
    annotation: bytes = b""
    is_note: bool = False
    place: Place = Place.UNKNOWN

    @property
    def kind(self) -> Kind:
        """Of its entry."""
        if self.is_note:
            return Kind.NOTE
        return Kind.POSITION if self.batch is None else Kind.BATCH

    def stands_as(self, other: Frame | SegmentEntry) -> bool:
        """Whether `other` is at the same place, of the same epoch, and has the same beside its batch."""
        return (
            self.base_offset == other.base_offset
            and self.leader_epoch == other.leader_epoch
            and self.slot == other.slot
            and self.annotation == other.annotation
            and self.is_note == other.is_note
        )


def note_pieces(data: bytes) -> int:
    """In how many entries a note stands."""
    return -(-len(data) // NOTE_PIECE_BYTES_MAX)


def note_frames(data: bytes, base_offset: int, leader_epoch: int) -> list[Frame]:
    """A note in pieces, to stand before what it is for."""
    return [
        Frame(None, base_offset, leader_epoch, annotation=data[at : at + NOTE_PIECE_BYTES_MAX], is_note=True)
        for at in range(0, len(data), NOTE_PIECE_BYTES_MAX)
    ]


class SealedBatch(msgspec.Struct, frozen=True, gc=False):
    """A batch as it stands on disk; `data` is header and body."""

    header: BatchHeader
    data: memoryview


def misfit(frame: Frame, offset: int, shard: int) -> str:
    """Why a frame of another copy cannot stand at `offset` of this shard; empty where it can."""
    if frame.base_offset != offset:
        return "they do not follow each other"
    if len(frame.annotation) > beside_bytes_max(frame.kind):
        return f"its annotation has {len(frame.annotation)} bytes"
    if frame.batch is None:
        return ""
    header, body = frame.batch.header, frame.batch.body
    if (header.base_offset, header.leader_epoch) != (offset, frame.leader_epoch):
        return "its batch's header is of another place"
    if header.shard != shard:
        return f"its batch is of shard {header.shard}"
    if len(body) != header.body_length or body_checksum(body) != header.body_checksum:
        return "its body's checksum does not hold"
    return ""
