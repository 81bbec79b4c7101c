"""How far transactions have come in a shard, as its annotation says. Pure.

The annotation is written with each batch of a transaction, in one entry of the log. It names the transactions that were applied there last,
and where their batches stand; numbers only grow.

Invariant: a batch that stands in the shard is never missing by `compare`, and one that does not stand there is missing until its shard has a
later transaction: whoever applies asks for transactions in order, the next one once the last one is there.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import xxhash

from region.transactions.state import UNKNOWN_OFFSET, Part

PARTS_PER_SHARD_MAX: Final = 30
"""Batches of one transaction in one shard, and of one group: an annotation names them all, in 480 of its 512 bytes."""
GROUP_TRANSACTIONS_MAX: Final = 256
"""Applied together: bounds how long the first of a group waits for the last."""
SLOT: Final = int(xxhash.xxh3_64_intdigest(b"felix/transactions"))
"""The annotation slot of every shard that says how far transactions have come in it."""

_POSITION: Final = struct.Struct(">Qq")
_ShardT = TypeVar("_ShardT", bound=Hashable)


class Placing(NamedTuple):
    """A batch to place in its shard, and how many of its transaction stand before it there."""

    part: Part
    before: int


class Comparison(NamedTuple):
    """Offsets of what is there, by number and index; what is missing, in order; the positions that the next annotation keeps."""

    placed: dict[tuple[int, int], tuple[int, ...]]
    missing: list[Part]
    positions: list[tuple[int, int]]


def decode_positions(annotation: bytes) -> list[tuple[int, int]]:
    """Number and first offset of each batch of the newest group in a shard."""
    return [(number, offset) for number, offset in _POSITION.iter_unpack(annotation)]


def encode_positions(positions: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(_POSITION.pack(*entry) for entry in positions[-PARTS_PER_SHARD_MAX:])


def group_length(batches: Iterable[Mapping[_ShardT, int]]) -> int:
    """How many transactions, from the first on, are applied together: as many as the annotation of each shard can name, and one at least. Of
    each, how many batches it has in each shard."""
    counts: Counter[_ShardT] = Counter()
    length = 0
    for each in batches:
        counts.update(each)
        if length and (
            length >= GROUP_TRANSACTIONS_MAX or any(counts[shard] > PARTS_PER_SHARD_MAX for shard in each)
        ):
            break
        length += 1
    return length


def newest(annotation: bytes) -> int:
    """The last transaction that is applied in a shard, or half of it; 0 where there is none."""
    held = decode_positions(annotation)
    return held[-1][0] if held else 0


def placings(parts: Iterable[Part]) -> list[Placing]:
    """All parts of each of some transactions in one shard, in order."""
    counts: Counter[int] = Counter()
    found = []
    for part in parts:
        found.append(Placing(part, counts[part.number]))
        counts[part.number] += 1
    return found


def compare(annotation: bytes, wanted: Sequence[Placing]) -> Comparison:
    """What a shard with this annotation has of `wanted`, whose numbers do not fall."""
    held = decode_positions(annotation)
    last = held[-1][0] if held else 0
    there: dict[int, list[int]] = {}
    for number, offset in held:
        there.setdefault(number, []).append(offset)
    placed: dict[tuple[int, int], tuple[int, ...]] = {}
    missing: list[Part] = []
    for part, before in wanted:
        known = there.get(part.number, ())
        if before < len(known):
            placed[part.number, part.index] = (known[before],)
        elif part.number < last:
            placed[part.number, part.index] = (UNKNOWN_OFFSET,)
        else:
            missing.append(part)
    numbers = {part.number for part, _ in wanted}
    return Comparison(placed, missing, [entry for entry in held if entry[0] in numbers])
