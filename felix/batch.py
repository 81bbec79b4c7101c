"""Records and batches: the unit of the wire, the log, the seal, replication and delivery.

A producer encodes a batch once; from then on its body stays these bytes until a consumer decodes it. The
broker reads and rewrites the fixed header alone. Layout in docs/wire.md, vectors in tests/vectors/.

Header, 96 bytes, big-endian::

    0  magic "FX"        2     32 producer_id       8
    2  version           1     40 producer_epoch    4
    3  flags             1     44 plain_length      4   body bytes before compression and seal
    4  shard             4     48 base_sequence     8
    8  base_offset       8     56 key_id           16   zero unless SEALED
    16 append_time_ms    8     72 body_length       4
    24 leader_epoch      4     76 reserved          4   zero
    28 records           4     80 body_checksum     8   XXH3-64 of the body as it stands
                               88 header_checksum   8   XXH3-64 of bytes 0..88

Body, before compression, columns so that record i is found without a scan::

    payload_end   u32 × count            end of payload i within the payload blob
    key_end       u32 × count            only with KEYED
    headers_end   u32 × count            only with HEADERS
    key blob, headers blob, payload blob

One record's headers: ``u16 count``, then per header ``u16 name length, name, u32 value length, value``.

Invariants: `decode_header` accepts a header only if its checksum, magic, version and lengths hold;
`decode_records` accepts a body only if every column is monotonic and ends where its blob ends. Bytes that do
not hold raise RequestError(BATCH_MALFORMED); code that reads from a disk turns that into CorruptionError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, repeat
from operator import gt
from typing import Final, NamedTuple

import msgspec
import xxhash
import zstandard

from felix.errors import Code, RequestError
from felix.steps import Steps

HEADER_BYTES: Final = 96
BATCH_BYTES_MAX: Final = 1 << 20
"""Header and body as they travel: 1 MiB keeps one batch well inside every credit window."""
PLAIN_BYTES_MAX: Final = 4 << 20
"""Body after decompression: bounds what a small compressed batch can make a consumer allocate."""
RECORDS_MAX: Final = 65_536
"""Records in one batch; an audit leaf and a decoder's index stay bounded."""
OFFSET_MAX: Final = (1 << 63) - 2
"""The highest offset of a record: the one after it is a position, and fits 63 bits, too."""
KEY_BYTES_MAX: Final = 4_096
HEADERS_MAX: Final = 64
MESSAGE_ID_HEADER: Final = "felix.message-id"
"""The record header that a stream with deduplication knows a repeated record by."""
PRODUCER_ID_MAX: Final = (1 << 63) - 1
"""Of a client's producer. Higher ids are reserved for the broker, so that no client's batch is mistaken for a dead letter."""
BRIDGED_EPOCH: Final = (1 << 32) - 1
"""The producer epoch, under no producer id, of a batch that a bridge brought: the destination's broker writes it, and takes it from no client."""
MESSAGE_ID_BYTES_MAX: Final = 64
"""A UUID as text has 36, a SHA-256 in hex 64."""

STEP_PARTS: Final = 8_192
"""Entries of a batch that are joined in one step: some milliseconds, since most are views."""
COMPRESS_LEVEL_MAX: Final = 19
"""The levels of zstd above take memory that a consumer would have to find, too."""

FLAG_ZSTD: Final = 0x01
FLAG_SEALED: Final = 0x02
FLAG_KEYED: Final = 0x04
FLAG_HEADERS: Final = 0x08
_FLAGS_KNOWN: Final = FLAG_ZSTD | FLAG_SEALED | FLAG_KEYED | FLAG_HEADERS

TOMBSTONE_HEADER: Final = "felix.tombstone"
"""A record with a header of this name says that its key is deleted: compaction keeps it for a while, then it goes."""
NO_KEY_ID: Final = bytes(16)
_MAGIC: Final = b"FX"
_VERSION: Final = 1
_HEADER: Final = struct.Struct(">2sBBIQqIIQIIQ16sIIQQ")
_BODY: Final = struct.Struct(">Q")
assert _HEADER.size == HEADER_BYTES

Buffer = bytes | bytearray | memoryview
Headers = Mapping[str, bytes]


def _malformed(sentence: str) -> RequestError:
    return RequestError(f"Malformed batch: {sentence}.", code=Code.BATCH_MALFORMED)


class BatchHeader(msgspec.Struct, frozen=True, gc=False):
    """The fixed header. Lengths in bytes, times in ms since the Unix epoch, offsets in records."""

    flags: int
    shard: int
    base_offset: int
    append_time_ms: int
    leader_epoch: int
    records: int
    producer_id: int
    producer_epoch: int
    plain_length: int
    base_sequence: int
    key_id: bytes
    body_length: int
    body_checksum: int

    @property
    def is_bridged(self) -> bool:
        """Whether the region's broker appended it for a bridge. In a batch of a client's it may not be."""
        return self.producer_epoch == BRIDGED_EPOCH and not self.producer_id

    @property
    def next_offset(self) -> int:
        """The offset after the batch's last record."""
        return self.base_offset + self.records

    @property
    def total_length(self) -> int:
        """Header and body, in bytes."""
        return HEADER_BYTES + self.body_length

    def encode(self) -> bytes:
        """The 96 bytes of the header, with a new checksum."""
        head = _HEADER.pack(
            _MAGIC, _VERSION, self.flags, self.shard, self.base_offset, self.append_time_ms,
            self.leader_epoch, self.records, self.producer_id, self.producer_epoch, self.plain_length,
            self.base_sequence, self.key_id, self.body_length, 0, self.body_checksum, 0,
        )[: HEADER_BYTES - 8]  # fmt: skip
        return head + _BODY.pack(xxhash.xxh3_64_intdigest(head))

    def immutable_fields(self) -> bytes:
        """The fields that stay as appended for as long as the batch exists, in header order.

        They are what a seal binds (keys.envelope): all but lengths and checksums, which a seal itself changes.
        """
        return _IMMUTABLE.pack(
            _VERSION, self.flags | FLAG_SEALED, self.shard, self.base_offset, self.append_time_ms,
            self.leader_epoch, self.records, self.producer_id, self.producer_epoch, self.plain_length,
            self.base_sequence,
        )  # fmt: skip


_IMMUTABLE: Final = struct.Struct(">BBIQqIIQIIQ")


def decode_header(data: Buffer, offset: int = 0) -> BatchHeader:
    """Read and check the header at `offset`. Raises RequestError(BATCH_MALFORMED); reads no body."""
    if len(data) - offset < HEADER_BYTES:
        raise _malformed(f"{max(0, len(data) - offset)} bytes are fewer than a header's {HEADER_BYTES}")
    (
        magic, version, flags, shard, base_offset, append_time_ms, leader_epoch, count, producer_id,
        producer_epoch, plain_length, base_sequence, key_id, body_length, reserved, body_checksum, checksum,
    ) = _HEADER.unpack_from(data, offset)  # fmt: skip
    if magic != _MAGIC or version != _VERSION:
        raise _malformed(f"magic {magic!r} version {version} is not FX version {_VERSION}")
    if xxhash.xxh3_64_intdigest(memoryview(data)[offset : offset + HEADER_BYTES - 8]) != checksum:
        raise _malformed("the header's checksum does not hold")
    if flags & ~_FLAGS_KNOWN or reserved:
        raise _malformed(f"unknown flags {flags:#04x} or reserved bits {reserved:#x}")
    if not 0 < count <= RECORDS_MAX:
        raise _malformed(f"{count} records; a batch holds 1 to {RECORDS_MAX}")
    if HEADER_BYTES + body_length > BATCH_BYTES_MAX or plain_length > PLAIN_BYTES_MAX:
        raise RequestError(
            f"A batch of {HEADER_BYTES + body_length} bytes ({plain_length} uncompressed) is over the limits of "
            f"{BATCH_BYTES_MAX} and {PLAIN_BYTES_MAX}.",
            code=Code.BATCH_TOO_LARGE,
            hint="Publish smaller batches.",
        )
    return BatchHeader(
        flags, shard, base_offset, append_time_ms, leader_epoch, count, producer_id, producer_epoch,
        plain_length, base_sequence, key_id, body_length, body_checksum,
    )  # fmt: skip


def body_checksum(body: Buffer) -> int:
    """XXH3-64 of a body as it stands (compressed or sealed, if it is)."""
    return int(xxhash.xxh3_64_intdigest(body))


class Batch(msgspec.Struct, frozen=True):
    """A header and its body. `body` may be a view into a larger buffer; it is never changed in place."""

    header: BatchHeader
    body: bytes | memoryview

    def encode(self) -> bytes:
        """Header and body as they travel and stand in the log."""
        return b"".join((self.header.encode(), self.body))

    def with_header(self, header: BatchHeader) -> Batch:
        """The same body under another header."""
        return Batch(header, self.body)


def decode_batch(data: Buffer) -> Batch:
    """One whole batch, nothing after it; header and body checksums checked. The body is a view into `data`.

    Raises RequestError(BATCH_MALFORMED | BATCH_TOO_LARGE).
    """
    header = decode_header(data)
    if len(data) != header.total_length:
        raise _malformed(f"{len(data)} bytes where the header says {header.total_length}")
    body = memoryview(data)[HEADER_BYTES:]
    if body_checksum(body) != header.body_checksum:
        raise _malformed("the body's checksum does not hold")
    return Batch(header, body)


class Record(NamedTuple):
    """One record as a consumer sees it. `payload` and `key` may be views into the batch."""

    offset: int
    timestamp_ms: int
    key: bytes | memoryview | None
    headers: Mapping[str, bytes]
    payload: bytes | memoryview

    def _repr_html_(self) -> str:
        """For notebooks."""
        from felix.notebook import html_of  # here: only a notebook asks

        return html_of(self)


class NewRecord(NamedTuple):
    """One record as a producer gives it. An empty key is no key."""

    payload: bytes
    key: bytes | None = None
    headers: Headers | None = None


_NO_HEADERS: Final[Mapping[str, bytes]] = {}


def encode_headers(headers: Headers) -> bytes:
    """One record's headers. Raises RequestError(INVALID) where there are too many or a name is too long."""
    if len(headers) > HEADERS_MAX:
        raise RequestError(f"{len(headers)} headers on one record; {HEADERS_MAX} are allowed.")
    parts = [struct.pack(">H", len(headers))]
    try:
        for name, value in headers.items():
            raw = name.encode()
            if not 0 < len(raw) <= 255:
                raise RequestError(f"A header name has 1 to 255 bytes, {name[:40]!r} has {len(raw)}.")
            parts += (struct.pack(">H", len(raw)), raw, struct.pack(">I", len(value)), value)
        return b"".join(parts)
    except (UnicodeEncodeError, AttributeError, TypeError) as error:
        raise RequestError(f"A header's name is text and its value bytes: {error}.") from error


def decode_headers(data: Buffer) -> dict[str, bytes]:
    """The headers of one record; of one name twice, the last. Raises RequestError(BATCH_MALFORMED)."""
    return dict(decode_header_pairs(data))


def decode_header_pairs(data: Buffer) -> list[tuple[str, bytes]]:
    """The headers of one record as they stand, a name that is there twice included. Raises RequestError(BATCH_MALFORMED)."""
    try:
        (count,) = struct.unpack_from(">H", data, 0)
        if count > HEADERS_MAX:
            raise _malformed(f"{count} headers on one record")
        at, found = 2, list[tuple[str, bytes]]()
        for _ in range(count):
            (length,) = struct.unpack_from(">H", data, at)
            name = bytes(data[at + 2 : at + 2 + length]).decode()
            at += 2 + length
            (length,) = struct.unpack_from(">I", data, at)
            value = bytes(data[at + 4 : at + 4 + length])
            if len(value) != length:
                raise _malformed("a header's value is cut off")
            found.append((name, value))
            at += 4 + length
    except (struct.error, UnicodeDecodeError) as error:
        raise _malformed(f"record headers: {error}") from error
    if at != len(data):
        raise _malformed("bytes after a record's last header")
    return found


class Parts(msgspec.Struct, frozen=True):
    """Records taken apart as a body has them, one entry each; None where no record has such an entry.

    An empty key is no key; empty headers are none.
    """

    payloads: Sequence[Buffer]
    keys: Sequence[Buffer] | None
    headers: Sequence[Buffer] | None
    """encoded"""

    def rows(self) -> Iterator[tuple[Buffer, Buffer, Buffer]]:
        """Key, encoded headers and payload of each record."""
        return zip(
            repeat(b"") if self.keys is None else self.keys,
            repeat(b"") if self.headers is None else self.headers,
            self.payloads,
            strict=False,
        )

    @property
    def size_bytes(self) -> int:
        """All of it, without what a batch adds."""
        parts = (self.payloads, self.keys, self.headers)
        return sum(sum(map(len, part)) for part in parts if part is not None)

    def chosen(self, indexes: Sequence[int]) -> Parts:
        """These records alone, in this order."""
        payloads, keys, headers = self.payloads, self.keys, self.headers
        return Parts(
            [payloads[at] for at in indexes],
            None if keys is None else [keys[at] for at in indexes],
            None if headers is None else [headers[at] for at in indexes],
        )


def encode_parts(records: Sequence[NewRecord]) -> Parts:
    """Records as they will stand in a body. Raises RequestError(INVALID) for a key or headers that are too long."""
    payloads, keys, headers = zip(*records, strict=True)
    key_parts: list[Buffer] | None = None
    header_parts: list[Buffer] | None = None
    if any(keys):
        key_parts = [key or b"" for key in keys]
        longest = max(map(len, key_parts))
        if longest > KEY_BYTES_MAX:
            raise RequestError(f"A key has {longest} bytes; {KEY_BYTES_MAX} are allowed.")
    if any(headers):
        # Records of one batch often share one mapping; it is encoded once.
        known: dict[int, bytes] = {}
        header_parts = []
        for each in headers:
            encoded = known.get(id(each))
            if encoded is None:
                encoded = known[id(each)] = encode_headers(each) if each else b""
            header_parts.append(encoded)
    return Parts(payloads, key_parts, header_parts)


def encode_batch(
    records: Sequence[NewRecord],
    *,
    shard: int = 0,
    producer_id: int = 0,
    producer_epoch: int = 0,
    base_sequence: int = 0,
    compress: int = 0,
) -> Batch:
    """Encode records once, as they will travel, be kept and be delivered.

    `compress`: a level of zstd, 1 (also True) to COMPRESS_LEVEL_MAX, or 0. A body that does not get smaller stays as it is.

    Raises RequestError(BATCH_TOO_LARGE | INVALID) where a limit named in this module is passed.
    """
    _check_count(len(records))
    return batch_of(
        encode_parts(records),
        shard=shard,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        compress=compress,
    )


def _check_count(count: int) -> None:
    if not 0 < count <= RECORDS_MAX:
        raise RequestError(
            f"A batch holds 1 to {RECORDS_MAX} records, not {count}.", code=Code.BATCH_TOO_LARGE
        )


def batch_of(
    parts: Parts,
    *,
    shard: int = 0,
    producer_id: int = 0,
    producer_epoch: int = 0,
    base_sequence: int = 0,
    compress: int = 0,
) -> Batch:
    """A batch of records that are encoded already. Errors and `compress` as `encode_batch`."""
    payloads, keys, headers = parts.payloads, parts.keys, parts.headers
    count = len(payloads)
    _check_count(count)
    column = f">{count}I"
    flags = 0
    # Lengths are bounded before they are packed, so that no u32 overflows.
    ends = list(accumulate(map(len, payloads)))
    _check_plain(ends[-1])
    columns = [struct.pack(column, *ends)]
    blobs: list[Buffer] = []
    if keys is not None:
        flags |= FLAG_KEYED
        columns.append(struct.pack(column, *accumulate(map(len, keys))))
        blobs += keys
    if headers is not None:
        _check_plain(sum(map(len, headers)))
        flags |= FLAG_HEADERS
        columns.append(struct.pack(column, *accumulate(map(len, headers))))
        blobs += headers
    body = b"".join((*columns, *blobs, *payloads))
    return _batch(
        body,
        flags,
        count,
        shard=shard,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        compress=compress,
    )


def batch_steps(parts: Parts, *, shard: int = 0, compress: int = 0) -> Steps[Batch]:
    """As `batch_of`, in steps of some milliseconds. One that is too long is refused before it is put together."""
    count = len(parts.payloads)
    if count <= STEP_PARTS:
        return batch_of(parts, shard=shard, compress=compress)
    _check_count(count)
    pieces, blobs, plain_length, flags = list[bytes](), list[Sequence[Buffer]](), 0, 0
    for entries, flag in ((parts.payloads, 0), (parts.keys, FLAG_KEYED), (parts.headers, FLAG_HEADERS)):
        if entries is None:
            continue
        ends = list(accumulate(map(len, entries)))
        plain_length += 4 * count + ends[-1]
        _check_plain(plain_length)
        pieces.append(struct.pack(f">{count}I", *ends))
        blobs.append(entries)
        flags |= flag
        yield
    for blob in (*blobs[1:], blobs[0]):
        for at in range(0, count, STEP_PARTS):
            pieces.append(b"".join(blob[at : at + STEP_PARTS]))
            yield
    body = b"".join(pieces)
    yield
    return _batch(body, flags, count, shard=shard, compress=compress)


def _check_plain(plain_length: int) -> None:
    if plain_length > PLAIN_BYTES_MAX:
        raise RequestError(
            f"A batch of {plain_length} bytes; {PLAIN_BYTES_MAX} are allowed.", code=Code.BATCH_TOO_LARGE
        )


def _batch(
    body: bytes,
    flags: int,
    count: int,
    *,
    shard: int = 0,
    producer_id: int = 0,
    producer_epoch: int = 0,
    base_sequence: int = 0,
    compress: int = 0,
) -> Batch:
    plain_length = len(body)
    _check_plain(plain_length)
    if compress:
        squeezed = zstandard.ZstdCompressor(level=compress).compress(body)
        if len(squeezed) < plain_length:
            body, flags = squeezed, flags | FLAG_ZSTD
    if HEADER_BYTES + len(body) > BATCH_BYTES_MAX:
        raise RequestError(
            f"A batch of {HEADER_BYTES + len(body)} bytes; {BATCH_BYTES_MAX} are allowed.",
            code=Code.BATCH_TOO_LARGE,
            hint="Publish smaller records or fewer in one batch.",
        )
    header = BatchHeader(
        flags, shard, 0, 0, 0, count, producer_id, producer_epoch, plain_length, base_sequence,
        NO_KEY_ID, len(body), body_checksum(body),
    )  # fmt: skip
    return Batch(header, body)


def plain_body(batch: Batch) -> bytes | memoryview:
    """The body's columns, decompressed if need be. The batch must not be sealed."""
    header = batch.header
    if header.flags & FLAG_SEALED:
        raise _malformed("it is sealed; open it with its data key first")
    if not header.flags & FLAG_ZSTD:
        body = batch.body
    else:
        try:
            # A frame that states its own size is allocated at that size, so the statement is checked first.
            if zstandard.frame_content_size(batch.body) != header.plain_length:
                raise _malformed("its zstd frame is not of the length that the header states")
            # One frame and nothing after it: bytes that no reader decodes would cross unseen.
            body = zstandard.ZstdDecompressor().decompress(batch.body, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise _malformed(f"zstd: {error}") from error
    if len(body) != header.plain_length:
        raise _malformed(f"{len(body)} bytes uncompressed where the header says {header.plain_length}")
    return body


def expanded(batch: Batch) -> Batch:
    """The same records with their body uncompressed, for who looks into it and then makes it anew: it may be longer than a batch may travel.
    The batch must not be sealed. Raises RequestError(BATCH_MALFORMED)."""
    if not batch.header.flags & FLAG_ZSTD:
        return batch
    body = plain_body(batch)
    return Batch(_of_body(batch.header, batch.header.flags & ~FLAG_ZSTD, body), body)


def compressed_with(batch: Batch, frame: bytes) -> Batch:
    """An uncompressed batch with this zstd frame, which must be of its body."""
    assert not batch.header.flags & FLAG_ZSTD
    return Batch(_of_body(batch.header, batch.header.flags | FLAG_ZSTD, frame), frame)


def _of_body(header: BatchHeader, flags: int, body: Buffer) -> BatchHeader:
    return msgspec.structs.replace(
        header, flags=flags, body_length=len(body), body_checksum=body_checksum(body)
    )


def cut_batch(batch: Batch, first: int, count: int) -> Batch:
    """`count` consecutive records of an unsealed batch, from its record `first` on, as a batch of their own.

    Base offset and base sequence move on by `first`; append time, epochs and producer stay. Compressed if it was.
    Raises RequestError(BATCH_MALFORMED), and BATCH_TOO_LARGE where a part of a compressed batch does not fit one.
    """
    assert first >= 0 and 0 < count <= batch.header.records - first
    columns = _columns(batch)
    pairs = [(columns.payload_ends, columns.payloads)]
    if columns.headers_ends:
        pairs.insert(0, (columns.headers_ends, columns.headers))
    if columns.key_ends:
        pairs.insert(0, (columns.key_ends, columns.keys))
    blobs: list[memoryview] = []
    # The columns stand in another order than their blobs: the payloads' is the first column and the last blob.
    ends_of: list[bytes] = []
    for ends, blob in pairs:
        begin = ends[first - 1] if first else 0
        ends_of.append(struct.pack(f">{count}I", *(end - begin for end in ends[first : first + count])))
        blobs.append(blob[begin : ends[first + count - 1]])
    body = b"".join((ends_of[-1], *ends_of[:-1], *blobs))
    header = batch.header
    flags, plain_length = header.flags & ~FLAG_ZSTD, len(body)
    if header.flags & FLAG_ZSTD:
        squeezed = zstandard.ZstdCompressor(level=1).compress(body)
        if len(squeezed) < plain_length:
            body, flags = squeezed, flags | FLAG_ZSTD
    if HEADER_BYTES + len(body) > BATCH_BYTES_MAX:
        raise RequestError(
            f"A part of a batch has {HEADER_BYTES + len(body)} bytes; {BATCH_BYTES_MAX} are allowed.",
            code=Code.BATCH_TOO_LARGE,
        )
    return Batch(
        msgspec.structs.replace(
            header,
            flags=flags,
            base_offset=header.base_offset + first,
            base_sequence=header.base_sequence + first,
            records=count,
            plain_length=plain_length,
            body_length=len(body),
            body_checksum=body_checksum(body),
        ),
        body,
    )


def _column(body: memoryview, at: int, count: int, what: str) -> tuple[int, ...]:
    if len(body) < at + 4 * count:
        raise _malformed(f"the {what} column is cut off")
    ends: tuple[int, ...] = struct.unpack_from(f">{count}I", body, at)
    if any(map(gt, ends, ends[1:])):
        raise _malformed(f"the {what} column runs backwards")
    return ends


_record: Final = partial(tuple.__new__, Record)
"""Record._make without its check of the length: of what a consumer does per record, most was making the tuple."""


class Columns(msgspec.Struct, frozen=True, gc=False):
    """A body taken apart: where its entries end, each within its blob. None where no record has such an entry.

    An empty key is no key; empty headers are none. The blobs are views, which keep the batch in memory.
    """

    payload_ends: tuple[int, ...]
    payloads: memoryview
    key_ends: tuple[int, ...] | None
    keys: memoryview
    headers_ends: tuple[int, ...] | None
    headers: memoryview

    def rows(self) -> Iterator[tuple[Buffer, Buffer, Buffer]]:
        """Key, encoded headers and payload of each record, one after the other."""
        return zip(
            repeat(b"") if self.key_ends is None else _entries(self.keys, self.key_ends),
            repeat(b"") if self.headers_ends is None else _entries(self.headers, self.headers_ends),
            _entries(self.payloads, self.payload_ends),
            strict=False,
        )


def _columns(batch: Batch) -> Columns:
    """Check the whole structure of an unsealed batch's body. Raises RequestError(BATCH_MALFORMED)."""
    count, flags = batch.header.records, batch.header.flags
    body = memoryview(plain_body(batch))
    at = 4 * count
    payload_ends = _column(body, 0, count, "payload")
    key_ends = headers_ends = None
    if flags & FLAG_KEYED:
        key_ends = _column(body, at, count, "key")
        at += 4 * count
    if flags & FLAG_HEADERS:
        headers_ends = _column(body, at, count, "headers")
        at += 4 * count
    headers_at = at + (key_ends[-1] if key_ends else 0)
    payloads_at = headers_at + (headers_ends[-1] if headers_ends else 0)
    if payloads_at + payload_ends[-1] != len(body):
        raise _malformed("its columns do not end where its body ends")
    return Columns(
        payload_ends, body[payloads_at:], key_ends, body[at:headers_at], headers_ends, body[headers_at:payloads_at]
    )  # fmt: skip


def _entries(blob: memoryview, ends: tuple[int, ...]) -> Iterator[memoryview]:
    """The entries of a blob, one after the other."""
    return map(blob.__getitem__, map(slice, (0, *ends), ends))


def decode_records(batch: Batch) -> Iterator[Record]:
    """The records of an unsealed batch, in order; payloads and keys are views, nothing is copied.

    The whole body's structure is checked before the first record is handed out.
    Raises RequestError(BATCH_MALFORMED).
    """
    header, columns = batch.header, _columns(batch)
    keys: Iterator[memoryview | None] = repeat(None)
    if columns.key_ends:
        keys = (key or None for key in _entries(columns.keys, columns.key_ends))
    headers: Iterator[Mapping[str, bytes]] = repeat(_NO_HEADERS)
    if columns.headers_ends:
        encoded = _entries(columns.headers, columns.headers_ends)
        headers = (decode_headers(each) if each else _NO_HEADERS for each in encoded)
    offsets = range(header.base_offset, header.next_offset)
    payloads = _entries(columns.payloads, columns.payload_ends)
    return map(_record, zip(offsets, repeat(header.append_time_ms), keys, headers, payloads))


def decode_record_headers(batch: Batch) -> list[Mapping[str, bytes]]:
    """Only the headers of every record of an unsealed batch. Raises RequestError(BATCH_MALFORMED)."""
    columns = _columns(batch)
    if not columns.headers_ends:
        return [_NO_HEADERS] * batch.header.records
    encoded = _entries(columns.headers, columns.headers_ends)
    return [decode_headers(each) if each else _NO_HEADERS for each in encoded]


def decode_parts(batch: Batch) -> Parts:
    """The records of an unsealed batch as they stand, as views. Raises RequestError(BATCH_MALFORMED)."""
    columns = _columns(batch)
    return Parts(
        list(_entries(columns.payloads, columns.payload_ends)),
        list(_entries(columns.keys, columns.key_ends)) if columns.key_ends else None,
        list(_entries(columns.headers, columns.headers_ends)) if columns.headers_ends else None,
    )


def decode_payloads(batch: Batch) -> list[memoryview]:
    """Only the payloads of an unsealed batch, as views. Raises RequestError(BATCH_MALFORMED)."""
    columns = _columns(batch)
    return list(_entries(columns.payloads, columns.payload_ends))


def decode_columns(batch: Batch) -> Columns:
    """The columns of an unsealed batch as they stand, for consumers that keep columns themselves: no work per record.

    Raises RequestError(BATCH_MALFORMED).
    """
    return _columns(batch)
