"""The mark: what is known to be on disk, in 64 bytes of their own file. Pure; region.log.disk writes it.

Written in place after each sync has returned and before its batches are acknowledged; itself synced when a
segment closes, before segments are deleted or truncated, when a shard falls idle and when it closes. So it
never says too much, and after a crash of the process (not of the machine) it says exactly how far
acknowledgements can reach.

Layout, big-endian::

    0  magic "FELIXMRK"   8     32 synced_to         8   bytes of that segment known to be on disk
    8  version            4     40 log_start         8   base offset of the oldest segment
    12 reserved           4     48 reserved          8
    16 segment            8     56 checksum          8   XXH3-64 of 0..56
    24 reserved           8

A mark that does not decode is no evidence; that alone never makes a log refuse or lose anything.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash

from felix.batch import Buffer

MARK_NAME: Final = "mark"
MARK_BYTES: Final = 64

_MAGIC: Final = b"FELIXMRK"
_VERSION: Final = 1
_MARK: Final = struct.Struct(">8sI4xQ8xQQ8x")
assert _MARK.size == MARK_BYTES - 8


class Mark(NamedTuple):
    """`segment` is the base offset of the newest segment, `synced_to` a position in it."""

    segment: int
    synced_to: int
    log_start: int

    def encode(self) -> bytes:
        """The 64 bytes."""
        head = _MARK.pack(_MAGIC, _VERSION, self.segment, self.synced_to, self.log_start)
        return head + xxhash.xxh3_64_digest(head)


def decode_mark(data: Buffer) -> Mark | None:
    """The mark, or None where the bytes are not one."""
    if len(data) != MARK_BYTES:
        return None
    head = bytes(data[: MARK_BYTES - 8])
    magic, version, segment, synced_to, log_start = _MARK.unpack(head)
    if (magic, version) != (_MAGIC, _VERSION) or xxhash.xxh3_64_digest(head) != bytes(data[MARK_BYTES - 8 :]):
        return None
    return Mark(segment, synced_to, log_start)
