"""Key ids: 16 bytes that say whose key it is before any cryptography runs.

::

    0   region tag    4    first bytes of SHA-256 over `felix/region-tag/1`, a zero byte and the region's name
    4   kind          1    high nibble: version (1); low nibble: 1 root, 2 stream, 3 data (stored), 4 transfer, 5 withheld,
                         6 data (derived)
    5   random       11

A tag is a label, not a proof: 4 bytes can collide for one pair of regions in four thousand million, and then the
context that every wrapping and every seal binds (with the region's full name) still refuses. Pure; anyone may call.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from enum import IntEnum
from functools import lru_cache
from typing import Final

from felix.context import purpose_prefix
from felix.errors import Code, RequestError
from keys.errors import KeyScopeError

KEY_ID_BYTES: Final = 16
RANDOM_BYTES: Final = 11
_TAG_BYTES: Final = 4
_VERSION: Final = 1


class KeyKind(IntEnum):
    """What a key is for; part of its id, so that one kind cannot stand in for another."""

    ROOT = 1
    STREAM = 2
    DATA = 3
    TRANSFER = 4
    WITHHELD = 5
    DERIVED = 6


@lru_cache(maxsize=256)
def region_tag(region: str) -> bytes:
    """The 4 bytes that every key id of `region` begins with."""
    return hashlib.sha256(purpose_prefix("region-tag") + region.encode()).digest()[:_TAG_BYTES]


def new_key_id(region: str, kind: KeyKind, random: bytes) -> bytes:
    """An id from 11 random bytes. Ids are never zero, which in a batch header means "not sealed"."""
    assert len(random) == RANDOM_BYTES
    return region_tag(region) + bytes([_VERSION << 4 | kind]) + random


def kind_of(key_id: bytes) -> KeyKind | None:
    """The kind that an id says; None where it says none that is known."""
    if len(key_id) != KEY_ID_BYTES or key_id[_TAG_BYTES] >> 4 != _VERSION:
        return None
    with suppress(ValueError):
        return KeyKind(key_id[_TAG_BYTES] & 0x0F)
    return None


def check_key_id(key_id: bytes, region: str, kind: KeyKind) -> None:
    """Refuse an id that is not of this region and kind.

    Raises KeyScopeError(KEY_SCOPE) for another region's id or kind, RequestError(INVALID) for a wrong length.
    """
    if len(key_id) != KEY_ID_BYTES:
        raise RequestError(f"A key id has {KEY_ID_BYTES} bytes, not {len(key_id)}.", code=Code.INVALID)
    if key_id[:_TAG_BYTES] != region_tag(region):
        raise KeyScopeError(
            f"Key {key_id.hex()} does not belong to region {region}.",
            hint="Keys never leave their region; data of another region arrives through a bridge.",
        )
    if key_id[_TAG_BYTES] != _VERSION << 4 | kind:
        raise KeyScopeError(
            f"Key {key_id.hex()} is of kind {key_id[_TAG_BYTES]:#04x}, where a {kind.name.lower()} key is needed."
        )
