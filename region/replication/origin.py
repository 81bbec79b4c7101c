"""Where a copy of a log begins whose frames the leader no longer has from the beginning on: as bytes, for ORIGIN. Pure.

The annotations and epochs that were true there come along, with the elections of these; then frames bring the rest. Of a log that was
compacted, whose frames have holes, the closed segments come as files before that: they are named here, and asked for piece by piece. Of a
log whose oldest segments are in a store alone, none comes: the list in force says where they are.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from felix.batch import OFFSET_MAX
from felix.errors import Code, ProtocolError
from region.log.compaction import CompactionState
from region.log.epochs import EPOCHS_MAX
from region.log.epochs import EpochStart as LogEpoch
from region.log.origin import Origin
from region.log.point import LogPoint
from region.log.segment import ANNOTATION_BYTES_MAX, ANNOTATION_SLOTS_MAX
from region.replication.history import EpochStart


class Closed(NamedTuple):
    """A closed segment of the leader's: its base offset, which compaction wrote it (0: none), and its bytes."""

    base_offset: int
    generation: int
    size: int


class Beginning(NamedTuple):
    """What a copy begins with. `starts`: epochs that began before it, with their elections. `closed`: the segments before it, oldest
    first, of a log that was compacted as `compaction` says; their end is where it begins. `start`: where the leader's log begins, of one
    that has what is before the origin in a store alone."""

    origin: Origin
    starts: tuple[EpochStart, ...]
    closed: tuple[Closed, ...] = ()
    compaction: CompactionState = CompactionState()
    start: LogPoint | None = None


class _Told(msgspec.Struct, frozen=True, array_like=True):
    point: LogPoint
    annotations: list[tuple[int, bytes]]
    producers: bytes
    epochs: list[LogEpoch]
    starts: list[EpochStart]
    closed: list[Closed] = []
    clean_to: int = 0
    tombstones_from: int = 0
    start: LogPoint | None = None


_decoder = msgspec.msgpack.Decoder(_Told)


def encode_beginning(beginning: Beginning) -> bytes:
    """The payload of an ORIGIN."""
    origin = beginning.origin
    told = _Told(
        origin.point,
        list(origin.annotations.items()),
        origin.producers,
        list(origin.epochs),
        list(beginning.starts),
        list(beginning.closed),
        beginning.compaction.clean_to,
        beginning.compaction.tombstones_from,
        beginning.start,
    )
    return msgspec.msgpack.encode(told)


def decode_beginning(payload: bytes) -> Beginning:
    """Raises ProtocolError. Whether the snapshot of producers holds is looked at where a log is begun with it."""
    try:
        told = _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise ProtocolError(
            f"Where a log begins cannot be read: {error}.", code=Code.FRAME_MALFORMED
        ) from error
    epochs = [start.epoch for start in told.starts]
    if (
        not 0 <= told.point.offset <= OFFSET_MAX + 1
        or not 0 <= told.point.note < 1 << 32
        or len(told.annotations) > ANNOTATION_SLOTS_MAX
        or any(
            len(annotation) > ANNOTATION_BYTES_MAX or not 0 <= slot < 1 << 64
            for slot, annotation in told.annotations
        )
        or max(len(told.epochs), len(told.starts)) > EPOCHS_MAX
        or epochs != sorted(set(epochs))
        or any(start.start >= told.point or start.epoch < 1 for start in told.starts)
        or not _holds(told)
    ):
        raise ProtocolError("Where a log begins is told by what is out of bounds.", code=Code.FRAME_MALFORMED)
    origin = Origin(told.point, dict(told.annotations), told.producers, tuple(told.epochs))
    # Producers and epochs of before are the origin's.
    compaction = CompactionState(told.clean_to, told.tombstones_from)
    return Beginning(origin, tuple(told.starts), tuple(told.closed), compaction, told.start)


def _holds(told: _Told) -> bool:
    """Whether what is said of closed segments, and of those in a store, can be."""
    bases = [closed.base_offset for closed in told.closed]
    return (
        bases == sorted(set(bases))
        and all(0 <= base < told.point.offset for base in bases)
        and all(0 <= closed.generation < 1 << 32 and closed.size > 0 for closed in told.closed)
        and 0 <= told.clean_to <= told.point.offset
        and 0 <= told.tombstones_from <= told.point.offset
        and (
            told.start is None
            or (
                not told.closed
                and 0 <= told.start.offset < told.point.offset
                and 0 <= told.start.note < 1 << 32
            )
        )
    )
