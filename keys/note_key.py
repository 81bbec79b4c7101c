"""Key ids of signed notes: four bytes that a signature line names its key by, besides the name.

Four bytes tell keys of honest people apart, and nobody else's: two keys of one name and one id are found in seconds. So whoever reads
lines tries each key of a name and id (audit.note), and no new bundle may name two (keys.bundle). Pure.
Source: https://c2sp.org/signed-note.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

NOTE_KEY_ID_BYTES: Final = 4
ED25519_TYPE: Final = 0x01
COSIGNATURE_TYPE: Final = 0x04
ML_DSA_44_TYPE: Final = 0x06
"""Signature types of the specification."""


def note_key_id(name: str, signature_type: int, public: bytes) -> bytes:
    """SHA-256(name ‖ newline ‖ type ‖ public key), its first four bytes."""
    return sha256(name.encode() + b"\n" + bytes([signature_type]) + public).digest()[:NOTE_KEY_ID_BYTES]
