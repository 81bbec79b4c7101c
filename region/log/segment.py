"""The segment: the file format of the log, as bytes in and values out. Layout with rationale in docs/log.md.

A segment is one header and then entries, back to back. Integers are big-endian, checksums XXH3-64.

Segment header::

    0  magic "FELIXSEG"   8     32 salt                  8
    8  version (1, 2, 3)  2     40 incarnation          16
    10 header length      2     56 region length         1
    12 shard              4     57 stream length         1
    16 base_offset        8     58 commitment length     2
    24 created_ms         8     60 region, stream, key commitment, span (version 2) or head (version 3), then
                                   checksum (8) of all before it

Version 2 is a segment that compaction wrote (region.log.compaction). Its entries may leave offsets out, so its span
says what the file has to hold: end offset 8, segment bytes 8, batches 8, records 8, generation 4.

Version 3 is every other one that is written now. Its head says at which point of the log it begins (region.log.point): note 4, how many
position entries stand behind the last batch before it; carried 4, how many entries at its beginning are copies of annotations that
were in force then. Version 1, of Felix 0.1, says neither.

Entry: a header of 48 bytes, then the annotation, then the batch (felix.batch, sealed where the stream is)::

    0  magic "FE"         2     16 base_offset           8   of the batch; without one, the next offset
    2  kind (1, 2, 3)     1     24 synced_to             8   bytes of this file known to be on disk then
    3  reserved           1     32 slot                  8   whose annotation it is, chosen by the caller
    4  annotation length  2     40 checksum              8   seeded with the salt, of 0..40 and annotation
    6  reserved           2     48 annotation, batch
    8  batch length       4
    12 leader_epoch       4

Invariants: a decoded entry's checksums hold (its own with the segment's salt, the batch header's, and the
body's if asked), its batch has the entry's base offset, epoch and length, and the segment's shard. The salt
is random per segment, so no payload can imitate an entry: after damage, whatever decodes really was an entry.
Nothing here touches a file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple

import xxhash

from felix.batch import BATCH_BYTES_MAX, HEADER_BYTES, BatchHeader, Buffer, body_checksum, decode_header
from felix.errors import CorruptionError, RequestError

SEGMENT_SUFFIX: Final = ".seg"
ENTRY_HEADER_BYTES: Final = 48
ANNOTATION_BYTES_MAX: Final = 1_024
"""A source position with its ids fits many times; entries stay small enough to carry over at every roll."""
NOTE_PIECE_BYTES_MAX: Final = 60_000
"""Of a note: a longer one stands in several entries. The length field has 16 bits, and an entry without a batch stays small."""
ANNOTATION_SLOTS_MAX: Final = 384
"""Every roll carries all annotations over: 384 of them stay under 420 KB."""
COMMITMENT_BYTES_MAX: Final = 256
"""A key commitment is a hash or two."""
ENTRY_BYTES_MAX: Final = ENTRY_HEADER_BYTES + ANNOTATION_BYTES_MAX + BATCH_BYTES_MAX
ENTRY_HEAD_BYTES_MAX: Final = ENTRY_HEADER_BYTES + max(
    ANNOTATION_BYTES_MAX + HEADER_BYTES, NOTE_PIECE_BYTES_MAX
)
"""Of an entry without the body of its batch: what it takes to tell that it is one."""
HEADER_PREFIX_BYTES: Final = 60
HEADER_BYTES_MAX: Final = HEADER_PREFIX_BYTES + 255 + 255 + COMMITMENT_BYTES_MAX + 36 + 8

_MAGIC: Final = b"FELIXSEG"
_VERSION_0_1: Final = 1
_VERSION_COMPACTED: Final = 2
_VERSION: Final = 3
_SPAN: Final = struct.Struct(">QQQQI")
_HEAD: Final = struct.Struct(">II")
_PREFIX: Final = struct.Struct(">8sHHIQqQ16sBBH")
_ENTRY_MAGIC: Final = b"FE"
_ENTRY: Final = struct.Struct(">2sBBHHIIQQQ")
_CHECKSUM: Final = struct.Struct(">Q")
assert _PREFIX.size == HEADER_PREFIX_BYTES
assert _ENTRY.size == ENTRY_HEADER_BYTES - 8


class Kind(IntEnum):
    """What an entry holds."""

    BATCH = 1
    POSITION = 2
    """An annotation alone: it takes no offset. Without bytes it frees its slot."""
    NOTE = 3
    """A piece of a note (region.log.ahead), in the place of an annotation: it takes no offset, belongs to the next entry of another kind,
    and is no slot's. Only logs that have copies hold any."""


class ShardIdentity(NamedTuple):
    """Whose log a folder holds. `stream` is `tenant/namespace/name`, `incarnation` 16 bytes."""

    region: str
    stream: str
    incarnation: bytes
    shard: int


class Span(NamedTuple):
    """What a compacted segment stands for, offsets up to `end_offset`, and what it holds of them.

    `generation` is above that of every segment that it took the place of.
    """

    end_offset: int
    segment_bytes: int
    batches: int
    records: int
    generation: int


class Head(NamedTuple):
    """At which point of the log a segment begins, beside its base offset: behind `note` position entries that follow the last batch
    before it. Its first `carried` entries are copies of annotations in force then."""

    note: int = 0
    carried: int = 0


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What stands at the head of a segment file. Times in ms since the Unix epoch. `span`: of a compacted one; `head`: of any
    other that version 0.1 did not write."""

    identity: ShardIdentity
    base_offset: int
    created_ms: int
    salt: int
    commitment: bytes
    span: Span | None = None
    head: Head | None = None

    def encode(self) -> bytes:
        """The header's bytes, checksum last. Their number does not depend on the span's values."""
        region, stream = self.identity.region.encode(), self.identity.stream.encode()
        assert len(region) < 256 and len(stream) < 256 and len(self.identity.incarnation) == 16
        assert len(self.commitment) <= COMMITMENT_BYTES_MAX
        version, more = _VERSION_0_1, b""
        if self.span:
            version, more = _VERSION_COMPACTED, _SPAN.pack(*self.span)
        elif self.head:
            version, more = _VERSION, _HEAD.pack(*self.head)
        length = HEADER_PREFIX_BYTES + len(region) + len(stream) + len(self.commitment) + len(more) + 8
        head = b"".join(
            (
                _PREFIX.pack(
                    _MAGIC, version, length, self.identity.shard, self.base_offset, self.created_ms,
                    self.salt, self.identity.incarnation, len(region), len(stream), len(self.commitment),
                ),
                region, stream, self.commitment, more,
            )
        )  # fmt: skip
        return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))


class EntryDamagedError(Exception):
    """The bytes at this place are not an entry of this segment; `args[0]` says what is wrong."""


class EntryIncompleteError(EntryDamagedError):
    """The bytes end before the entry does. `needed` bytes from its start would show more of it."""

    def __init__(self, sentence: str, needed: int) -> None:
        super().__init__(sentence)
        self.needed = needed


def decode_segment_header(data: Buffer) -> tuple[SegmentHeader, int]:
    """The header at the start of `data` and its length in bytes. Raises CorruptionError."""
    if len(data) < HEADER_PREFIX_BYTES:
        raise CorruptionError(f"{len(data)} bytes are fewer than a segment header's {HEADER_PREFIX_BYTES}.")
    (
        magic, version, length, shard, base_offset, created_ms, salt, incarnation,
        region_length, stream_length, commitment_length,
    ) = _PREFIX.unpack_from(data, 0)  # fmt: skip
    if magic != _MAGIC or not _VERSION_0_1 <= version <= _VERSION:
        raise CorruptionError(
            f"Magic {magic!r} version {version} is not {_MAGIC!r} version {_VERSION_0_1} to {_VERSION}.",
            hint="A newer Felix may have written it.",
        )
    more_length = {_VERSION_COMPACTED: _SPAN.size, _VERSION: _HEAD.size}.get(version, 0)
    more_at = HEADER_PREFIX_BYTES + region_length + stream_length + commitment_length
    expected = more_at + more_length + 8
    if length != expected or len(data) < length:
        raise CorruptionError(f"A segment header of {length} bytes where its parts take {expected}.")
    (checksum,) = _CHECKSUM.unpack_from(data, length - 8)
    if xxhash.xxh3_64_intdigest(memoryview(data)[: length - 8]) != checksum:
        raise CorruptionError("The segment header's checksum does not hold.")
    stream_at = HEADER_PREFIX_BYTES + region_length
    commitment_at = stream_at + stream_length
    try:
        region = bytes(data[HEADER_PREFIX_BYTES:stream_at]).decode()
        stream = bytes(data[stream_at:commitment_at]).decode()
    except UnicodeDecodeError as error:
        raise CorruptionError(f"The segment header's names are not UTF-8: {error}.") from error
    identity = ShardIdentity(region, stream, incarnation, shard)
    span = Span(*_SPAN.unpack_from(data, more_at)) if version == _VERSION_COMPACTED else None
    head = Head(*_HEAD.unpack_from(data, more_at)) if version == _VERSION else None
    if span and not (base_offset < span.end_offset and span.generation > 0):
        raise CorruptionError(f"A compacted segment's span {tuple(span)} does not begin at {base_offset}.")
    return SegmentHeader(
        identity, base_offset, created_ms, salt, bytes(data[commitment_at:more_at]), span, head
    ), length


def encode_entry_header(
    kind: Kind,
    *,
    base_offset: int,
    leader_epoch: int,
    synced_to: int,
    batch_length: int,
    slot: int,
    annotation: bytes,
    salt: int,
) -> bytes:
    """Entry header and annotation; the batch's own bytes follow it in the file."""
    assert len(annotation) <= beside_bytes_max(kind)
    assert (batch_length > 0) == (kind is Kind.BATCH)
    head = _ENTRY.pack(
        _ENTRY_MAGIC, kind, 0, len(annotation), 0, batch_length, leader_epoch, base_offset, synced_to, slot
    )
    checksum = xxhash.xxh3_64_intdigest(head + annotation if annotation else head, seed=salt)
    return b"".join((head, _CHECKSUM.pack(checksum), annotation))


def beside_bytes_max(kind: int) -> int:
    """The most bytes that an entry of this kind has beside its batch: an annotation, or a piece of a note."""
    return NOTE_PIECE_BYTES_MAX if kind == Kind.NOTE else ANNOTATION_BYTES_MAX


class SegmentEntry(NamedTuple):
    """One entry, decoded in place. Positions are those of the buffer it was decoded from, plus its `at`."""

    position: int
    length: int
    base_offset: int
    leader_epoch: int
    synced_to: int
    slot: int
    annotation: bytes
    header: BatchHeader | None
    is_note: bool = False
    """`annotation` is a piece of a note."""

    @property
    def end(self) -> int:
        """Position after the entry."""
        return self.position + self.length

    @property
    def next_offset(self) -> int:
        """The offset after the entry's batch; its own base offset where it has none."""
        return self.base_offset + self.header.records if self.header else self.base_offset


def decode_entry(
    data: Buffer, index: int, *, at: int, salt: int, shard: int, verify_body: bool
) -> SegmentEntry:
    """The entry that begins at `data[index]`, where `data[0]` stands at position `at` of its file.

    Raises EntryDamagedError, or EntryIncompleteError where `data` ends before the entry does.
    """
    available = len(data) - index
    if available < ENTRY_HEADER_BYTES:
        raise EntryIncompleteError(
            f"{available} bytes are fewer than an entry header's {ENTRY_HEADER_BYTES}", ENTRY_HEADER_BYTES
        )
    magic, kind, zero, annotation_length, also_zero, batch_length, epoch, base_offset, synced_to, slot = (
        _ENTRY.unpack_from(data, index)
    )
    if magic != _ENTRY_MAGIC:
        raise EntryDamagedError(f"{magic!r} stands where an entry begins with {_ENTRY_MAGIC!r}")
    if annotation_length > beside_bytes_max(kind) or batch_length > BATCH_BYTES_MAX or zero or also_zero:
        raise EntryDamagedError("its lengths are over their limits")
    head_length = ENTRY_HEADER_BYTES + annotation_length
    length = head_length + batch_length
    if available < head_length:
        raise EntryIncompleteError(f"{available} bytes of an entry's {length}", length)
    view = memoryview(data)
    annotation = bytes(view[index + ENTRY_HEADER_BYTES : index + head_length])
    (checksum,) = _CHECKSUM.unpack_from(data, index + ENTRY_HEADER_BYTES - 8)
    head = bytes(view[index : index + ENTRY_HEADER_BYTES - 8])
    if xxhash.xxh3_64_intdigest(head + annotation if annotation else head, seed=salt) != checksum:
        raise EntryDamagedError("the entry header's checksum does not hold")
    position = at + index
    if kind in (Kind.POSITION, Kind.NOTE):
        if batch_length:
            raise EntryDamagedError("an entry without a batch states a batch length")
        return SegmentEntry(
            position, length, base_offset, epoch, synced_to, slot, annotation, None, kind == Kind.NOTE
        )
    if kind != Kind.BATCH or batch_length < HEADER_BYTES:
        raise EntryDamagedError(f"an entry of kind {kind} with a batch of {batch_length} bytes")
    if available < head_length + HEADER_BYTES:
        raise EntryIncompleteError(f"{available} bytes of an entry's {length}", length)
    try:
        header = decode_header(data, index + head_length)
    except RequestError as error:
        raise EntryDamagedError(error.sentence.rstrip(".")) from error
    if (header.base_offset, header.leader_epoch, header.total_length, header.shard) != (
        base_offset,
        epoch,
        batch_length,
        shard,
    ):
        raise EntryDamagedError("the batch's header is not the one that the entry was written for")
    if verify_body:
        if available < length:
            raise EntryIncompleteError(f"{available} bytes of an entry's {length}", length)
        body_at = index + head_length + HEADER_BYTES
        if body_checksum(view[body_at : index + length]) != header.body_checksum:
            raise EntryDamagedError("the body's checksum does not hold")
    return SegmentEntry(position, length, base_offset, epoch, synced_to, slot, annotation, header)


class Scan(NamedTuple):
    """What a window of a segment holds: entries, and why the scan ended."""

    entries: list[SegmentEntry]
    stopped: EntryDamagedError | None
    """None where the window ends with an entry's end."""


def scan_window(data: Buffer, *, at: int, salt: int, shard: int, verify_body: bool) -> Scan:
    """All entries from the start of `data` (which stands at position `at`) up to the first that is not whole.

    Without `verify_body` an entry counts once its headers are in the window; its body may reach past it.
    """
    entries: list[SegmentEntry] = []
    index, length = 0, len(data)
    while index < length:
        try:
            entry = decode_entry(data, index, at=at, salt=salt, shard=shard, verify_body=verify_body)
        except EntryDamagedError as stopped:
            return Scan(entries, stopped)
        entries.append(entry)
        index += entry.length
    return Scan(entries, None)


def find_entries(data: Buffer, *, at: int, salt: int, shard: int, whole: bool) -> list[SegmentEntry]:
    """Every entry that decodes anywhere in `data`, for looking past damage. Bodies are checked if `whole`."""
    raw, found, index = bytes(data), [], 0
    while (index := raw.find(_ENTRY_MAGIC, index)) >= 0:
        try:
            entry = decode_entry(raw, index, at=at, salt=salt, shard=shard, verify_body=whole)
        except EntryDamagedError:
            index += 1
            continue
        found.append(entry)
        index += ENTRY_HEADER_BYTES
    return found


def find_entry(data: Buffer, *, salt: int, shard: int) -> int | None:
    """Where in `data` the first entry begins whose head decodes."""
    raw, index = bytes(data), 0
    while (index := raw.find(_ENTRY_MAGIC, index)) >= 0:
        try:
            decode_entry(raw, index, at=0, salt=salt, shard=shard, verify_body=False)
        except EntryDamagedError:
            index += 1
        else:
            return index
    return None


def segment_name(base_offset: int, generation: int = 0) -> str:
    """The file name of the segment that begins at this offset; names sort as offsets do.

    A segment that compaction wrote has its generation in the name: it never takes the name of one that is still read.
    """
    marked = f".{generation}" if generation else ""
    return f"{base_offset:020d}{marked}{SEGMENT_SUFFIX}"


@lru_cache(maxsize=1024)
def parse_segment_name(name: str) -> tuple[int, int] | None:
    """Base offset and generation, or None where it is no segment's name. Kept for a while: the first segments of most logs have one name."""
    offset, _, generation = name.removesuffix(SEGMENT_SUFFIX).partition(".")
    if not offset.isdecimal() or not (not generation or generation.isdecimal()):
        return None
    parsed = int(offset), int(generation or 0)
    return parsed if name == segment_name(*parsed) else None


def no_commitment() -> bytes:
    """The key commitment of a stream that is kept unsealed."""
    return b""
