"""Which records of a shard crossed, by source offset, and under which incarnation: what crossed is not sent again. Pure.

After a truncation that was accepted, and after a resend, a link's records cross under a derived incarnation that begins
at an offset below what had crossed (policy.truncation). Below an accepted truncation the records are those that crossed;
from there on the source has others. After a resend they are all the same records, and only those that stayed the first
time may cross now. `Crossed.before` says which crossed already; `Crossed.take` counts those that do so again. The others are
passed by: WITHHELD with the reason `crossed-before`, which no leaf may give where no resend was asked for (`Crossed.is_resent`).

Invariants: what is held is a bit per offset, in chunks; a chunk of which every offset crossed costs nothing.
Callers: audit.verify (holds both logs to it), audit.spark.arrived_before (one log to the other), region.crossing.ingest (refuses what crossed).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from audit.leaf import Kind, Leaf, Side, decode_leaf, iter_entries, read_header
from audit.position import ShardName
from felix.errors import ProtocolError
from policy.truncation import TRUNCATIONS_MAX, Live

CROSSED_BEFORE: Final = "crossed-before"
"""Why a record stays that a resend passes by."""
CHUNK: Final = 1 << 12
"""Offsets of one chunk: 512 bytes where some of them crossed, so that no record, wherever it says that it lies, takes more than
eight times what its entry in the log does."""
DERIVED_MAX: Final = 1 << 16
"""Derived incarnations that are remembered of one region's word: no region takes the places of another's."""
CROSSED_AHEAD: Final = 1 << 18
"""Of how many source offsets from its position on a destination says at once whether they crossed before a resend: four of
the largest batches."""
CROSSED_BEHIND_MAX: Final = 3 << 19
"""And of how many behind: 24 of the largest batches. Both together are 224 KiB, and a control frame takes 256."""
PAGE_CHUNKS: Final = 1 << 13
"""Chunks of which some offsets are in the set, of one page: 4 MiB."""
PAGE_RUN_CHUNKS: Final = 1 << 17
"""Chunks of one page of which all are: whoever takes a page in holds an entry for each."""
_FULL: Final = (1 << CHUNK) - 1
_CHUNK_BYTES: Final = CHUNK // 8


class Page(NamedTuple):
    """A part of an `OffsetSet`, as one broker tells it to another: whole chunks, in order."""

    runs: list[tuple[int, int]]
    """chunks of which every offset is in the set: the first one's number, and how many"""
    numbers: list[int]
    """of the chunks of which some offsets are"""
    bits: bytes
    """a bit for each offset of those, the lowest bit of the first byte first"""
    end: int
    """the number of the first chunk that the page says nothing of; 0: it is the last page"""


class OffsetSet:
    """A set of offsets, given and asked for as bit masks: bit 0 stands for the first offset."""

    __slots__ = ("_chunks", "next")

    def __init__(self) -> None:
        self._chunks: dict[int, int] = {}
        self.next = 0
        """the offset after the highest"""

    def add(self, first: int, mask: int) -> None:
        """Put the offsets of `mask` in, whose lowest bit is `first`."""
        self.next = max(self.next, first + mask.bit_length())
        for chunk, part in _parts(first, mask):
            if part:
                held = self._chunks.get(chunk, 0) | part
                # One object for all full chunks.
                self._chunks[chunk] = _FULL if held == _FULL else held

    def common(self, first: int, mask: int) -> int:
        """Those of `mask` that are in the set, as a mask."""
        found = (self._chunks.get(chunk, 0) & part for chunk, part in _parts(first, mask))
        data = b"".join(part.to_bytes(_CHUNK_BYTES, "little") for part in found)
        return int.from_bytes(data, "little") >> first % CHUNK

    def page(self, first: int, count: int) -> bytes:
        """A bit for each of `count` offsets from `first` on, the lowest bit of the first byte first."""
        return self.common(first, (1 << count) - 1).to_bytes(-(-count // 8), "little").rstrip(b"\0")

    def pages(self, chunk: int) -> Iterator[Page]:
        """The set from this chunk on, in pages that are bounded by what is in them, wherever it lies; at least one. The set must not change
        meanwhile."""
        runs, numbers, bits, full = list[tuple[int, int]](), list[int](), list[bytes](), 0
        for number in sorted(each for each in self._chunks if each >= chunk):
            if len(numbers) == PAGE_CHUNKS or full == PAGE_RUN_CHUNKS:
                yield Page(runs, numbers, b"".join(bits), number)
                runs, numbers, bits, full = [], [], [], 0
            held = self._chunks[number]
            if held != _FULL:
                numbers.append(number)
                bits.append(held.to_bytes(_CHUNK_BYTES, "little"))
                continue
            full += 1
            if runs and sum(runs[-1]) == number:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((number, 1))
        yield Page(runs, numbers, b"".join(bits), 0)

    def take(self, page: Page) -> None:
        """Put a page in. Raises ProtocolError where it says more than a page may."""
        full = sum(count for _, count in page.runs)
        if (
            full > PAGE_RUN_CHUNKS
            or any(first < 0 or count < 1 for first, count in page.runs)
            or len(page.numbers) > PAGE_CHUNKS
            or min(page.numbers, default=0) < 0
            or len(page.bits) != len(page.numbers) * _CHUNK_BYTES
        ):
            raise ProtocolError("A page of offsets that crossed is longer than pages are, or not as it says.")
        for first, count in page.runs:
            self._chunks.update(dict.fromkeys(range(first, first + count), _FULL))
            self.next = max(self.next, (first + count) * CHUNK)
        for at, number in enumerate(page.numbers):
            part = page.bits[at * _CHUNK_BYTES : (at + 1) * _CHUNK_BYTES]
            self.add(number * CHUNK, int.from_bytes(part, "little"))

    def __contains__(self, offset: int) -> bool:
        return bool(self._chunks.get(offset // CHUNK, 0) >> offset % CHUNK & 1)

    def update(self, other: OffsetSet, below: int | None = None) -> None:
        """Put another set's offsets in, all or those below a bound."""
        for chunk, held in other._chunks.items():
            first = chunk * CHUNK
            if below is None or first + CHUNK <= below:
                self.add(first, held)
            elif first < below:
                self.add(first, held & (1 << below - first) - 1)


def _parts(first: int, mask: int) -> Iterator[tuple[int, int]]:
    """Each chunk that the mask reaches into, and the mask's bits there, from the chunk's first offset on."""
    chunk, at = divmod(first, CHUNK)
    # As bytes: a shift for every chunk would copy a long mask as often.
    data = (mask << at).to_bytes(mask.bit_length() + at + 7 >> 3, "little")
    for start in range(0, len(data), _CHUNK_BYTES):
        yield chunk + start // _CHUNK_BYTES, int.from_bytes(data[start : start + _CHUNK_BYTES], "little")


class Derived(NamedTuple):
    """Which incarnation another goes on from."""

    ended: bytes
    below: int | None
    """of what crossed under `ended`, only offsets below are the same records, after a truncation; None: all are, after a resend"""
    by: str = ""
    """the region whose word it is"""


class Crossed:
    """Fed with a log's leaves in order. In an egress log a record crossed once its INTENT has its ACK; in an ingress log,
    by its ACK leaf."""

    def __init__(self) -> None:
        self._sets: dict[tuple[ShardName, bytes], OffsetSet] = {}
        self._origins: dict[bytes, Derived] = {}
        self._said: Counter[str] = Counter()
        self._announced: dict[tuple[ShardName, bytes, bytes], list[tuple[int, int]]] = {}

    def derive(self, incarnation: bytes, ended: bytes, truncated_at: int | None, by: str = "") -> None:
        """`incarnation` goes on where `ended` ends: after a truncation at that offset, or (None) with a resend. `by`: whose word it is; whoever
        calls has asked whether that region may say so."""
        if incarnation not in self._origins and self._said[by] < DERIVED_MAX:
            self._said[by] += 1
            self._origins[incarnation] = Derived(ended, truncated_at, by)

    @property
    def derived(self) -> dict[bytes, Derived]:
        """What was derived, by incarnation."""
        return dict(self._origins)

    def is_resent(self, incarnation: bytes) -> bool:
        """Whether this incarnation began with a resend, or one that it goes on from did."""
        return any(origin.below is None for origin in self._goes_on_from(incarnation))

    def is_too_long(self, incarnation: bytes) -> bool:
        """Whether this incarnation goes on from more others than a link, or a broker, ever follows."""
        count = sum(1 for _ in self._goes_on_from(incarnation, TRUNCATIONS_MAX + 1))
        return count > TRUNCATIONS_MAX

    def _goes_on_from(self, incarnation: bytes, most: int = TRUNCATIONS_MAX) -> Iterator[Derived]:
        """From the last one back; never more than so many: whoever keeps a log may write a chain of any length into it, and each of its
        leaves is asked about."""
        for _ in range(most):
            origin = self._origins.get(incarnation)
            if origin is None:
                return
            yield origin
            incarnation = origin.ended

    def take(self, leaf: Leaf) -> int:
        """Take a leaf. Returns how many of its records had crossed before, under an incarnation that this one goes on from."""
        header = leaf.header
        if not header.records or header.kind not in (Kind.INTENT, Kind.ACK):
            return 0
        name = ShardName.of(header)
        envelope = (name, header.incarnation, header.envelope_sha256)
        if header.kind is Kind.ACK and header.side is Side.EGRESS:
            own = self._sets.setdefault(envelope[:2], OffsetSet())
            for first, mask in self._announced.pop(envelope, ()):
                own.add(first, mask)
            return 0
        earlier, twice = list(self._earlier(name, header.incarnation)), 0
        for first, mask in _masks(leaf):
            twice += _common(earlier, first, mask).bit_count()
            if header.kind is Kind.INTENT:
                self._announced.setdefault(envelope, []).append((first, mask))
            else:
                self._sets.setdefault(envelope[:2], OffsetSet()).add(first, mask)
        return twice

    def lacks(self, leaf: Leaf) -> list[int]:
        """The source offsets of a leaf that had not crossed before its incarnation began, or are others at the source now."""
        earlier = list(self._earlier(ShardName.of(leaf.header), leaf.header.incarnation))
        return [
            first + at
            for first, mask in _masks(leaf)
            for missing in (mask & ~_common(earlier, first, mask),)
            for at in range(missing.bit_length())
            if missing >> at & 1
        ]

    def before(self, name: ShardName, incarnation: bytes) -> OffsetSet:
        """All that crossed before this incarnation began, and is the same at the source still."""
        found = OffsetSet()
        for held, below in self._earlier(name, incarnation):
            found.update(held, below)
        return found

    def _earlier(self, name: ShardName, incarnation: bytes) -> Iterator[tuple[OffsetSet, int | None]]:
        """What crossed under each incarnation that this one goes on from, and below which offset that holds."""
        below: int | None = None
        for origin in self._goes_on_from(incarnation):
            if origin.below is not None:
                below = origin.below if below is None else min(below, origin.below)
            held = self._sets.get((name, origin.ended))
            if held is not None:
                yield held, below


def crossed_before(leaves: Iterable[memoryview], name: ShardName, lives: Sequence[Live]) -> OffsetSet:
    """Of one shard, what a log's leaves say that crossed before the newest of `lives` began. Leaves that cannot be read say
    nothing."""
    crossed, earlier = Crossed(), {live.incarnation for live in lives[:-1]}
    for live in lives:
        if live.accepted is not None:
            crossed.derive(live.incarnation, live.accepted.ended, live.accepted.truncated_at)
    for data in leaves:
        header = read_header(data)
        if (
            header is not None
            and header.kind in (Kind.INTENT, Kind.ACK)
            and header.incarnation in earlier
            and ShardName.of(header) == name
        ):
            crossed.take(decode_leaf(data))
    return crossed.before(name, lives[-1].incarnation)


class Arrived(NamedTuple):
    """Below which source offset a shard arrived under an incarnation; 0 where nothing did."""

    below: int
    """whichever bridge brought it"""
    brought: int
    """by the bridge that asks: LOGGED_UNTOLD where that is not known"""


def arrived_below(leaves: Iterable[memoryview], name: ShardName, incarnation: bytes, bridge: str) -> Arrived:
    """By what an ingress log's leaves say."""
    below = brought = 0
    for data in leaves:
        header = read_header(data)
        if (
            header is not None
            and (header.kind, header.side, header.incarnation) == (Kind.ACK, Side.INGRESS, incarnation)
            and ShardName.of(header) == name
        ):
            assert header.last_offset is not None
            below = max(below, header.last_offset + 1)
            if header.bridge == bridge:
                brought = max(brought, header.last_offset + 1)
    return Arrived(below, brought)


def _common(earlier: Iterable[tuple[OffsetSet, int | None]], first: int, mask: int) -> int:
    """Those of `mask` that are in one of these sets, below the offset to which that set counts, as a mask."""
    found = 0
    for held, below in earlier:
        found |= held.common(first, mask if below is None else _cut(mask, below - first))
    return found


def _cut(mask: int, bits: int) -> int:
    """The lowest `bits` of a mask. A document may name any offset: no number is made that is longer than the mask."""
    return mask if bits >= mask.bit_length() else mask & (1 << max(0, bits)) - 1


def _masks(leaf: Leaf) -> list[tuple[int, int]]:
    """A bit for each record that a crossing lists, in masks with the first offset of each.

    A leaf may say any range, and few records in it: a mask is no longer than what is listed close together.
    """
    header = leaf.header
    first, last = header.first_offset, header.last_offset
    assert first is not None and last is not None
    if header.records == last - first + 1:
        return [(first, (1 << header.records) - 1)]
    found: list[tuple[int, bytearray]] = []
    for entry in iter_entries(leaf):
        if not found or entry.offset - found[-1][0] >= CHUNK:
            found.append((entry.offset, bytearray()))
        base, bits = found[-1]
        at = entry.offset - base
        bits.extend(bytes(max(0, (at >> 3) + 1 - len(bits))))
        bits[at >> 3] |= 1 << (at & 7)
    return [(base, int.from_bytes(bits, "little")) for base, bits in found]
