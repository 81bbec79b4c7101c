"""One foreign envelope, opened and inspected step by step, so that no other work of the broker waits for it. Pure.

An envelope of 198 kB can hold 65,536 records. Opening it, checking each record against the terms and making the entries of its
audit leaves takes longer than an event loop may be held, so all of it is a generator: between two steps, its caller decides
whether other work runs. A step takes a few milliseconds at most.

Nothing of an envelope is used before all of it was inspected: one record that breaks the terms refuses the whole. And nothing of it is kept but what was
inspected: a body that came compressed is compressed anew, here. Of one body there are any number of zstd frames (RFC 8878), which hold blocks of no bytes, and
choices, that no reader shows: a sender's own would carry what no leaf commits to and no budget counts.
Callers: region.crossing.ingest.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final, NamedTuple

import zstandard
from msgspec import structs

from audit.leaf import Committer, Header, LeafPart, iter_leaf_parts, iter_packed
from felix.batch import BATCH_BYTES_MAX, FLAG_ZSTD, Batch, compressed_with, decode_columns, expanded
from felix.errors import RequestError
from felix.peer import Peer
from felix.provenance import PathUnion
from felix.steps import Steps
from keys.transfer import TransferEnvelope, TransferKey, open_envelope
from policy.inspection import Inspection

STEP_RECORDS: Final = 256
"""Records of one step: about a millisecond."""
STEP_BYTES: Final = 32 << 10
"""Bytes after which a step ends, however few records they are: each may be looked at, value by value."""

COMPRESS_STEP_BYTES: Final = 128 << 10
"""Bytes that are compressed in one step at COMPRESS_LEVEL: one or two milliseconds."""
COMPRESS_LEVEL: Final = 1
"""Of zstd: as bridges compress."""
COMPRESS_BETTER_LEVEL: Final = 9
"""Where that is too long for a batch, since the bridge of another release makes it shorter. It may be longer, too: of noise in few symbols."""
COMPRESS_BETTER_STEP_BYTES: Final = 16 << 10
"""The same at that level."""
FRAME_BYTES_MAX: Final = BATCH_BYTES_MAX - 256
"""Of a batch that a stream takes: there is room for its header and its seal."""


class Inspected(NamedTuple):
    """What an envelope holds. `batch` is None where nothing of its range crosses."""

    batch: Batch | None
    records: int
    size_bytes: int
    """keys, encoded headers and payloads"""
    parts: tuple[LeafPart, ...]
    """of the range's audit leaves"""
    entries_sha256: bytes
    """of the packed entries of them all, for the receipt"""
    path: tuple[str, ...]
    """the regions that the records have been in, all together (felix.provenance)"""
    offsets: Sequence[int]
    """of the records, at the source"""


def inspect(
    key: TransferKey,
    envelope: TransferEnvelope,
    agent: Peer,
    inspection: Inspection,
    committer: Committer,
    leaf: Header,
) -> Steps[Inspected]:
    """Open and check an envelope. `leaf`: the header of its leaves but for what the append decides.

    Raises what `open_envelope`, `decode_columns` and `Inspection.record` raise, with the record's source offset.
    """
    crossing = open_envelope(key, envelope, agent)
    yield
    if crossing.batch is None:
        return Inspected(None, 0, 0, tuple(iter_leaf_parts(leaf, b"")), sha256().digest(), (), ())
    batch = expanded(crossing.batch)
    columns = decode_columns(batch)
    yield
    offsets, packed, size = crossing.source_offsets, [], 0
    stepped = 0
    union = PathUnion()
    entries = iter_packed(offsets, batch.header.append_time_ms, columns, committer)
    check = inspection.steps
    for at, (offset, (record_key, headers, payload)) in enumerate(zip(offsets, columns.rows(), strict=True)):
        try:
            union.add((yield from check(record_key, headers, payload)))
        except RequestError as error:
            raise _at(error, offset) from None
        size += len(record_key) + len(headers) + len(payload)
        packed.append(next(entries))
        if at % STEP_RECORDS == STEP_RECORDS - 1 or size - stepped >= STEP_BYTES:
            stepped = size
            yield
    parts, digest, path = [], sha256(), union.regions
    for part in iter_leaf_parts(structs.replace(leaf, path=path), b"".join(packed)):
        parts.append(part)
        digest.update(part.entries)
        yield
    if crossing.batch.header.flags & FLAG_ZSTD:
        batch = yield from _compress(batch)
    return Inspected(batch, len(packed), size, tuple(parts), digest.digest(), path, offsets)


def _compress(batch: Batch) -> Steps[Batch]:
    """The batch with its body compressed; as it is where that does not make it shorter. Of a body that a bridge of this release sent some frame is short enough for a batch: the one that it made."""
    body = memoryview(batch.body)
    shortest = yield from _squeezed(body, COMPRESS_LEVEL, COMPRESS_STEP_BYTES)
    if len(shortest) > FRAME_BYTES_MAX:
        # In one piece, as bridges do: what is cut into steps may come out some 10 kB longer. It takes about 10 ms, and is seldom asked for.
        shortest = min(shortest, zstandard.ZstdCompressor(level=COMPRESS_LEVEL).compress(body), key=len)
        yield
    if len(shortest) > FRAME_BYTES_MAX:
        better = yield from _squeezed(body, COMPRESS_BETTER_LEVEL, COMPRESS_BETTER_STEP_BYTES)
        shortest = min(shortest, better, key=len)
    return compressed_with(batch, shortest) if len(shortest) < len(body) else batch


def _squeezed(body: memoryview, level: int, step_bytes: int) -> Steps[bytes]:
    """One zstd frame, made step by step."""
    into = zstandard.ZstdCompressor(level=level).compressobj(size=len(body))
    pieces = []
    for at in range(0, len(body), step_bytes):
        pieces.append(into.compress(body[at : at + step_bytes]))
        yield
    pieces.append(into.flush())
    return b"".join(pieces)


def _at(error: RequestError, offset: int) -> RequestError:
    return type(error)(
        f"The record at source offset {offset} is refused. {error.sentence}", code=error.code, hint=error.hint
    )
