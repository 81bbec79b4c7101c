"""Where a copy of a log begins whose frames the leader no longer has from the beginning on: as bytes, for ORIGIN. Pure.

The annotations and epochs that were true there come along, with the elections of these; then frames bring the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from felix.batch import OFFSET_MAX
from felix.errors import Code, ProtocolError
from region.log.epochs import EPOCHS_MAX
from region.log.epochs import EpochStart as LogEpoch
from region.log.origin import Origin
from region.log.point import LogPoint
from region.log.segment import ANNOTATION_BYTES_MAX, ANNOTATION_SLOTS_MAX
from region.replication.history import EpochStart


class Beginning(NamedTuple):
    """What a copy begins with. `starts`: epochs that began before it, with their elections."""

    origin: Origin
    starts: tuple[EpochStart, ...]


class _Told(msgspec.Struct, frozen=True, array_like=True):
    point: LogPoint
    annotations: list[tuple[int, bytes]]
    producers: bytes
    epochs: list[LogEpoch]
    starts: list[EpochStart]


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
    ):
        raise ProtocolError("Where a log begins is told by what is out of bounds.", code=Code.FRAME_MALFORMED)
    origin = Origin(told.point, dict(told.annotations), told.producers, tuple(told.epochs))
    return Beginning(origin, tuple(told.starts))
