"""The three lines that a checkpoint's text begins with: origin, size, root. Pure. Source: https://c2sp.org/tlog-checkpoint.

Apart from audit.checkpoint, because what an ML-DSA-44 cosignature signs is made from these values and not from the
text. Invariants: a text has one reading and `TreeHead.text` gives it back; sizes have no leading zeroes; the root has
32 bytes, in canonical base64. Callers: audit.note, audit.checkpoint.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import Final, NamedTuple

from audit.merkle import HASH_BYTES
from felix.errors import TamperError

SIZE_MAX: Final = (1 << 63) - 1
"""Beyond what any log has leaves, and what SQLite and msgpack hold as they are."""
_SIZE_DIGITS_MAX: Final = 19


class TreeHead(NamedTuple):
    """The tree of the log `origin` at `size` leaves has this root; `extensions` are the lines behind it."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()

    def text(self) -> str:
        """The note's text, with its last newline."""
        lines = (self.origin, str(self.size), b64encode(self.root).decode(), *self.extensions)
        return "\n".join(lines) + "\n"


def parse_tree_head(text: str) -> TreeHead:
    """Read a note's text. Raises TamperError where it is not a checkpoint's."""
    lines = text.split("\n")
    if len(lines) < 4 or lines.pop() or not all(lines):
        raise TamperError("A checkpoint has three lines or more (origin, size, root), none of them empty.")
    origin, size, root, *extensions = lines
    digest = decode_hash(root)
    if digest is None:
        raise TamperError(f"{root[:80]!r} is not a checkpoint's root hash.")
    number = parse_size(size)
    if number is None:
        raise TamperError(f"{size[:40]!r} is not a checkpoint's size.")
    return TreeHead(origin, number, digest, tuple(extensions))


def parse_size(text: str) -> int | None:
    """A number of leaves as the specifications write it: ASCII digits, no leading zero. None where it is none."""
    plain = text.isascii() and text.isdecimal() and len(text) <= _SIZE_DIGITS_MAX
    if not plain or (text[0] == "0" and text != "0"):
        return None
    size = int(text)
    return size if size <= SIZE_MAX else None


def decode_hash(text: str) -> bytes | None:
    """32 bytes from their one spelling in base64. None where it is not that."""
    try:
        digest = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return digest if len(digest) == HASH_BYTES and b64encode(digest).decode() == text else None
