"""Contexts: what a signature or an encryption is bound to, so that no bytes mean two things.

Invariants: a context begins with `felix/<purpose>/1` and a zero byte, and every part after it stands behind its
length (u32, big-endian), so two different lists of parts never give the same bytes. Pure; anyone may call.
"""

from __future__ import annotations

import re
import struct
from typing import Final

PURPOSE: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
"""A purpose's shape; with no `/` and no zero byte in it, one prefix is never the beginning of another."""

_LENGTH: Final = struct.Struct(">I")


def purpose_prefix(purpose: str) -> bytes:
    """`felix/<purpose>/1` and a zero byte: what everything that is signed for `purpose` begins with."""
    assert PURPOSE.fullmatch(purpose), purpose
    return f"felix/{purpose}/1\0".encode()


def bind(purpose: str, *parts: bytes | str | int) -> bytes:
    """The prefix of `purpose`, then each part behind its length; text as UTF-8, numbers as u64 big-endian."""
    out = [purpose_prefix(purpose)]
    for part in parts:
        if isinstance(part, int):
            raw = part.to_bytes(8, "big")
        elif isinstance(part, str):
            raw = part.encode()
        else:
            raw = part
        out += (_LENGTH.pack(len(raw)), raw)
    return b"".join(out)
