"""What a SUBSCRIPTIONS journal holds: entries of every durable subscription of one shard.

An entry is a MessagePack array that begins with its kind; `subscription` is the 8 bytes that tell this subscription from any other,
also from an earlier one of the same name. Ranges are flat lists (felix.ranges) of distances, so that they stay small: each number
is counted from the one before it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

import msgspec

from felix.errors import CorruptionError

ID_BYTES: Final = 8
RANGES_MAX: Final = 16_384
"""Ranges of one entry; with up to 18 bytes each it stays far below what a journal takes."""


class Moved(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """All below `offset` counts as done, nothing above it: the first position, or a seek."""

    subscription: bytes
    offset: int


class Settled(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Acknowledged, put among the dead letters, or gone from the log."""

    subscription: bytes
    distances: list[int]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Delivered `attempts` times without success; again when `due_ms` has come."""

    subscription: bytes
    attempts: int
    due_ms: int
    reason: str
    distances: list[int]


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The subscription was deleted. With `epochs` (region.views.history) and no subscription: of which records the entries behind it speak. An earlier
    release takes that for a deletion of none."""

    subscription: bytes
    epochs: list[int] = []


class Letter(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """What the subscription's dead letters keep (region.views.dead_letter)."""

    subscription: bytes
    entry: bytes


class Returning(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The records at `offsets` are not settled any more, and not delivered before `Returned` (region.subscriptions.returns). The dead letter of
    each is at the same place of `letters`, in a shard of that incarnation of a queue. An earlier release refuses it."""

    subscription: bytes
    queue: str
    incarnation: bytes
    shard: int
    letters: list[int]
    offsets: list[int]


class Returned(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The dead letters of the oldest `Returning` are gone from their queue: its records are delivered, as if they never had been."""

    subscription: bytes


Entry = Moved | Settled | Failed | Dropped | Letter | Returning | Returned

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    return _encoder.encode(entry)


def decode(data: bytes) -> Entry:
    """Raises CorruptionError."""
    try:
        entry: Entry = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"An entry of a journal of subscriptions is none: {error}.") from error
    return entry


def clipped(ranges: Iterable[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """What of the ranges is below `end`."""
    return [(first, min(following, end)) for first, following in ranges if first < end]


def pack(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Distances of rising ranges."""
    found: list[int] = []
    at = 0
    for first, following in ranges:
        found += (first - at, following - first)
        at = following
    return found


def unpack(distances: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges. Raises CorruptionError."""
    if len(distances) % 2 or any(distance < 0 for distance in distances):
        raise CorruptionError("An entry of a journal of subscriptions names ranges that are none.")
    edges = list(accumulate(distances))
    return list(zip(edges[::2], edges[1::2], strict=True))
