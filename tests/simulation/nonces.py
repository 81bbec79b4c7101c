"""Which nonces stand on a disk: the key and the counter of every sealed batch in its segments (keys.envelope)."""

from __future__ import annotations

import os
from collections.abc import Iterator

from felix.batch import FLAG_SEALED, HEADER_BYTES
from felix.storage.memory import MemoryDisk
from keys.envelope import COUNTER_BYTES
from region.log.segment import HEADER_BYTES_MAX, SEGMENT_SUFFIX, decode_segment_header
from region.log.segment_scan import scan_bytes


def nonces(disk: MemoryDisk) -> Iterator[tuple[bytes, bytes]]:
    """Key id and counter, of each batch. Every log that has a segment here has been recovered, so every entry is whole."""
    files = disk.mounted
    for path in disk.files():
        if path.suffix != SEGMENT_SUFFIX:
            continue
        descriptor = files.open(path, os.O_RDONLY)
        try:
            segment, start = decode_segment_header(files.pread(descriptor, HEADER_BYTES_MAX, 0))
            end = files.size(descriptor)
            for entry, data in scan_bytes(files, descriptor, segment, start, end, verify_bodies=True):
                if entry.header is not None and entry.header.flags & FLAG_SEALED:
                    body = entry.length - entry.header.total_length + HEADER_BYTES
                    yield entry.header.key_id, bytes(data[body : body + COUNTER_BYTES])
        finally:
            files.close(descriptor)
