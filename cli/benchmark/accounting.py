"""The accounting of a measurement: payloads that say which they are, and the ledger that finds what is wrong.

Payload, big-endian: sequence number within the shard (8 bytes), time of its making in ns of this machine's
monotonic clock (8), then bytes that follow from the sequence number alone. So every received payload is compared
whole, byte for byte, with what it must be. A stream is made for one measurement and written by one publisher,
so a record's offset in the log must also be its sequence number.

Pure: clocks are read by the callers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from random import Random
from typing import Final, NamedTuple

import msgspec
import xxhash

_STAMP: Final = struct.Struct(">QQ")
PAYLOAD_BYTES_MIN: Final = _STAMP.size + 8
FILLERS: Final = 16
"""Different fillings in turn, so that a swapped or repeated payload does not look right."""
MISSING_KEPT: Final = 1 << 18
"""Sequence numbers remembered as missing, to tell late records from repeated ones."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """What was published and what came of it, in records."""

    published: int = 0
    received: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    damaged: int = 0
    misplaced: int = 0
    """Acknowledged or delivered with another offset than the one that its place in the shard asks for."""
    aged_out: int = 0
    """Left the ring of an ephemeral stream before it was read back; that was allowed and is no loss."""
    checksums_agree: bool = True

    @property
    def is_lossless(self) -> bool:
        """True where every record published came once, in order, unchanged, at its own offset."""
        return (
            not (self.lost or self.duplicated or self.reordered or self.damaged or self.misplaced)
            and self.received + self.aged_out == self.published
            and self.checksums_agree
        )

    def __add__(self, other: Account) -> Account:
        return Account(
            published=self.published + other.published,
            received=self.received + other.received,
            lost=self.lost + other.lost,
            duplicated=self.duplicated + other.duplicated,
            reordered=self.reordered + other.reordered,
            damaged=self.damaged + other.damaged,
            misplaced=self.misplaced + other.misplaced,
            aged_out=self.aged_out + other.aged_out,
            checksums_agree=self.checksums_agree and other.checksums_agree,
        )


class Made(NamedTuple):
    """A batch that the publisher made: records [first, first + records) of the shard, at `made_ns`."""

    shard: int
    first: int
    records: int
    made_ns: int


def fillers(payload_bytes: int) -> list[bytes]:
    """What follows the stamp, by sequence number modulo FILLERS."""
    assert payload_bytes >= PAYLOAD_BYTES_MIN
    random = Random(payload_bytes)  # noqa: S311 - both ends must know it; nothing secret is drawn
    return [random.randbytes(payload_bytes - _STAMP.size) for _ in range(FILLERS)]


def payloads_of(made: Made, filling: list[bytes]) -> list[bytes]:
    """The payloads of a batch."""
    pack, made_ns = _STAMP.pack, made.made_ns
    return [
        pack(sequence, made_ns) + filling[sequence % FILLERS]
        for sequence in range(made.first, made.first + made.records)
    ]


def made_at_ns(payload: bytes | memoryview) -> int:
    """When the payload was made."""
    return int(_STAMP.unpack_from(payload)[1])


def sequence_of(payload: bytes | memoryview) -> int:
    """Which record the payload says it is."""
    return int(_STAMP.unpack_from(payload)[0])


def filling_of(payload: bytes | memoryview) -> bytes | memoryview:
    """What follows the stamp."""
    return payload[_STAMP.size :]


def checksum_of(batches: Iterable[Made], filling: list[bytes]) -> dict[int, int]:
    """XXH3-64 over all payloads of each shard, in order."""
    hashes: dict[int, xxhash.xxh3_64] = {}
    for made in batches:
        digest = hashes.setdefault(made.shard, xxhash.xxh3_64())
        for payload in payloads_of(made, filling):
            digest.update(payload)
    return {shard: digest.intdigest() for shard, digest in hashes.items()}


class _ShardTally:
    """One shard, as far as it was received."""

    __slots__ = ("digest", "expected", "first", "missing")

    def __init__(self) -> None:
        self.digest = xxhash.xxh3_64()
        self.first = self.expected = 0
        self.missing: set[int] = set()


class Ledger:
    """The consumer's books: `receive` every record of a shard in the order delivered, then `close`."""

    def __init__(self, payload_bytes: int, *, may_start_late: bool = False) -> None:
        """`may_start_late`: the stream is a ring, read after it was written; its oldest records may be gone."""
        self._filling = fillers(payload_bytes)
        self._may_start_late = may_start_late
        self._tallies: dict[int, _ShardTally] = {}
        self._received = self._lost = self._duplicated = 0
        self._reordered = self._damaged = self._misplaced = 0

    def receive(self, shard: int, records: Iterable[tuple[int, bytes | memoryview]]) -> None:
        """Records of one shard, as offset and payload."""
        tally = self._tallies.get(shard)
        if tally is None:
            tally = self._tallies[shard] = _ShardTally()
            if self._may_start_late:
                records = list(records)
                tally.first = tally.expected = records[0][0] if records else 0
        for offset, payload in records:
            tally.digest.update(payload)
            if len(payload) < PAYLOAD_BYTES_MIN:
                self._damaged += 1
                continue
            sequence = _STAMP.unpack_from(payload)[0]
            if payload[_STAMP.size :] != self._filling[sequence % FILLERS]:
                self._damaged += 1
                continue
            if sequence == tally.expected:
                tally.expected += 1
            else:
                self._out_of_turn(tally, sequence)
            if offset != sequence:
                self._misplaced += 1

    def _out_of_turn(self, tally: _ShardTally, sequence: int) -> None:
        if sequence > tally.expected:
            self._lost += sequence - tally.expected
            tally.missing.update(
                range(tally.expected, min(sequence, tally.expected + MISSING_KEPT - len(tally.missing)))
            )
            tally.expected = sequence + 1
        elif sequence in tally.missing:
            tally.missing.discard(sequence)
            self._lost -= 1
            self._reordered += 1
        else:
            self._duplicated += 1

    def close(self, published: dict[int, int], checksums: dict[int, int], misplaced: int = 0) -> Account:
        """The account, given how many records of each shard were published, the checksum over each, and how many
        the publisher found acknowledged at a wrong offset."""
        lost, aged_out, received, agree = self._lost, 0, 0, True
        for shard, count in published.items():
            tally = self._tallies.get(shard) or _ShardTally()
            lost += max(0, count - tally.expected)
            aged_out += tally.first
            received += tally.expected - tally.first - len(tally.missing)
            # A shard that was not read from its beginning has no checksum to compare.
            agree = agree and (bool(tally.first) or tally.digest.intdigest() == checksums.get(shard, 0))
        return Account(
            published=sum(published.values()),
            received=received,
            lost=lost,
            duplicated=self._duplicated,
            reordered=self._reordered,
            damaged=self._damaged,
            misplaced=self._misplaced + misplaced,
            aged_out=aged_out,
            checksums_agree=agree,
        )
