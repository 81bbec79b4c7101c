"""Checkpoints: what a log says about itself, signed. Pure. Source: https://c2sp.org/tlog-checkpoint.

A checkpoint is a signed note of origin, size and root hash, and possibly extension lines. The log signs with a key
named as its origin; witnesses add cosignatures. Invariants: `Checkpoint.parse(c.text()) == c`; sizes have no
leading zeroes; the root has 32 bytes. Callers: audit.trail, audit.witness, audit.verify, audit.proof.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from audit.merkle import HASH_BYTES
from audit.note import Algorithm, Note, Verified, VerifierKey, parse_note, verify_note
from felix.errors import TamperError

_SIZE_DIGITS_MAX: Final = 19


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tree of the log `origin` at `size` leaves has this root."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()

    def text(self) -> str:
        """The note's text, with its last newline."""
        lines = (self.origin, str(self.size), b64encode(self.root).decode(), *self.extensions)
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        """Read a note's text. Raises TamperError where it is not a checkpoint."""
        lines = text.split("\n")
        if len(lines) < 4 or lines.pop() or not all(lines):
            raise TamperError(
                "A checkpoint has three lines or more (origin, size, root), none of them empty."
            )
        origin, size, root, *extensions = lines
        plain = size.isascii() and size.isdecimal() and len(size) <= _SIZE_DIGITS_MAX
        if not plain or (size[0] == "0" and size != "0"):
            raise TamperError(f"{size[:40]!r} is not a checkpoint's size.")
        try:
            digest = b64decode(root, validate=True)
        except (binascii.Error, ValueError) as error:
            raise TamperError(f"{root[:80]!r} is not a checkpoint's root hash.") from error
        if len(digest) != HASH_BYTES or b64encode(digest).decode() != root:
            raise TamperError(f"{root[:80]!r} is not a checkpoint's root hash.")
        return cls(origin, int(size), digest, tuple(extensions))


class SignedCheckpoint(NamedTuple):
    """A checkpoint whose log signature holds, its note, and the witnesses whose cosignatures hold."""

    checkpoint: Checkpoint
    note: Note
    cosigned: tuple[Verified, ...]


def open_checkpoint(
    data: bytes, log_key: VerifierKey, witnesses: Iterable[VerifierKey] = ()
) -> SignedCheckpoint:
    """Read and verify a checkpoint note: signed by the log, its origin the log key's name.

    Cosignatures of unknown witnesses are ignored, a bad one of a known witness refuses the note.
    Raises TamperError.
    """
    note = parse_note(data)
    verified = verify_note(note, (log_key, *witnesses))
    checkpoint = Checkpoint.parse(note.text)
    if checkpoint.origin != log_key.name:
        raise TamperError(f"The checkpoint is of the log {checkpoint.origin!r}, expected {log_key.name!r}.")
    if not any(by.key == log_key for by in verified):
        raise TamperError(f"The checkpoint of {checkpoint.origin} is not signed by the log's own key.")
    cosigned = tuple(by for by in verified if by.key.algorithm is Algorithm.COSIGNATURE)
    return SignedCheckpoint(checkpoint, note, cosigned)
