"""Which entry bundle may hold the leaf of a record. Pure. A hint, never evidence: what it points at is checked.

The file `index` grows by the rows of one bundle when the bundle is full, 40 bytes a row: bundle u64, key 16, first
and last offset u64. The key is BLAKE2b-128 over kind, stream and shard. A bundle without any row's kind has one
row of zero key, so the last row says how far the index goes. It is rebuilt from the bundles where it is
missing or torn. Whoever reads a log that another wrote asks no index: what it leaves out would not be found. Callers: audit.tree_disk (writes),
audit.proof (reads, for region.evidence.arrival_index).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from struct import Struct
from typing import Final

from audit.leaf import Header, Kind

INDEX_PATH: Final = "index"
ROW_BYTES: Final = 40
_ROW: Final = Struct(">Q16sQQ")
_NOTHING: Final = bytes(16)
_INDEXED: Final = (Kind.INTENT, Kind.ACK, Kind.WITHHELD, Kind.GAP)


def _key(kind: Kind, stream: str, shard: int) -> bytes:
    return blake2b(f"{kind:d} {shard} {stream}".encode(), digest_size=16).digest()


def bundle_rows(bundle: int, headers: Iterable[Header | None]) -> bytes:
    """The rows of one full bundle: per kind, stream and shard the offsets from lowest to highest.

    None stands for a leaf that cannot be read; it has no row.
    """
    ranges: dict[bytes, tuple[int, int]] = {}
    for header in headers:
        if header is None:
            continue
        first, last = header.first_offset, header.last_offset
        if header.kind in _INDEXED and first is not None and last is not None:
            key = _key(header.kind, header.stream, header.shard)
            low, high = ranges.get(key, (first, last))
            ranges[key] = min(low, first), max(high, last)
    if not ranges:
        return _ROW.pack(bundle, _NOTHING, 0, 0)
    return b"".join(_ROW.pack(bundle, key, low, high) for key, (low, high) in sorted(ranges.items()))


def candidate_bundles(index: bytes, kind: Kind, stream: str, shard: int, offset: int) -> list[int]:
    """The bundles whose rows cover this offset, ascending."""
    key, whole = _key(kind, stream, shard), len(index) - len(index) % ROW_BYTES
    return sorted(
        {
            bundle
            for bundle, found, first, last in _ROW.iter_unpack(memoryview(index)[:whole])
            if found == key and first <= offset <= last
        }
    )


def bundles_indexed(index: bytes) -> int:
    """How many bundles the rows go through without a hole; 0 where the rows are no index."""
    last = -1
    for bundle, _, _, _ in _ROW.iter_unpack(memoryview(index)[: len(index) - len(index) % ROW_BYTES]):
        if bundle not in (last, last + 1):
            return 0
        last = bundle
    return last + 1


def cut_index(index: bytes, bundles: int) -> bytes:
    """The whole rows of the first `bundles` bundles."""
    rows = memoryview(index)[: len(index) - len(index) % ROW_BYTES]
    for at, (bundle, _, _, _) in enumerate(_ROW.iter_unpack(rows)):
        if bundle >= bundles:
            return bytes(rows[: at * ROW_BYTES])
    return bytes(rows)
