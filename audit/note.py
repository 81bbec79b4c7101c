"""Signed notes: text with signature lines. Pure. Source: https://c2sp.org/signed-note.

A key is known by name and key id; signatures of unknown keys are ignored, a signature of a known key that does not
verify refuses the whole note, and a note that no known key signed is refused. Two signature types:

- 0x01, Ed25519 over the text;
- 0x04, a witness's timestamped cosignature (https://c2sp.org/tlog-cosignature, `cosignature/v1`): eight bytes of
  POSIX seconds, then Ed25519 over ``cosignature/v1\\ntime <seconds>\\n`` and the text.

Invariants: `parse_note(encode_note(note)) == note`; nothing of a note is used before `verify_note` returned.
Callers: audit.checkpoint, audit.witness, audit.verify, audit.proof.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from felix.errors import RequestError, TamperError
from keys.signing import SigningKey

NOTE_BYTES_MAX: Final = 65_536
SIGNATURES_MAX: Final = 64
"""The specification asks for at least 16."""
KEY_ID_BYTES: Final = 4
_ED25519_BYTES: Final = 64
_PUBLIC_BYTES: Final = 32
_TIME_BYTES: Final = 8
_TIME_MAX: Final = (1 << 63) - 1


class Algorithm(IntEnum):
    """Signature type bytes of the specification that are spoken here."""

    ED25519 = 0x01
    COSIGNATURE = 0x04


class Signature(NamedTuple):
    """One signature line."""

    name: str
    key_id: bytes
    data: bytes


class Note(NamedTuple):
    """Text, ending in a newline, and its signature lines in order."""

    text: str
    signatures: tuple[Signature, ...]

    def with_signatures(self, more: Iterable[Signature]) -> Note:
        """The same text with further signatures; one of the same key replaces the older one."""
        kept = {(signature.name, signature.key_id): signature for signature in self.signatures}
        kept.update({(signature.name, signature.key_id): signature for signature in more})
        return Note(self.text, tuple(kept.values()))


def check_key_name(name: str) -> str:
    """Raises RequestError(INVALID) unless `name` can stand in a signature line."""
    if not name or "+" in name or any(c.isspace() or ord(c) < 0x20 for c in name):
        raise RequestError(f"{name!r} is not a note key's name: no spaces, no control characters, no +.")
    return name


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """A public key under a name: `<name>+<key id, 8 hex digits>+<base64 of type and key>` (a *vkey*)."""

    name: str
    algorithm: Algorithm
    public: bytes

    def __post_init__(self) -> None:
        check_key_name(self.name)
        if len(self.public) != _PUBLIC_BYTES:
            raise RequestError(f"An Ed25519 key has {_PUBLIC_BYTES} bytes, this one {len(self.public)}.")

    @property
    def key_id(self) -> bytes:
        """SHA-256(name ‖ newline ‖ type ‖ public key), its first four bytes."""
        material = self.name.encode() + b"\n" + bytes([self.algorithm]) + self.public
        return sha256(material).digest()[:KEY_ID_BYTES]

    @classmethod
    def parse(cls, text: str) -> VerifierKey:
        """Read a vkey. Raises RequestError(INVALID) with what was expected."""
        try:
            name, key_id, encoded = text.strip().split("+", 2)
            material = b64decode(encoded, validate=True)
            key = cls(name, Algorithm(material[0]), material[1:])
            if bytes.fromhex(key_id) != key.key_id or len(key_id) != 2 * KEY_ID_BYTES:
                raise ValueError("its key id does not fit")
        except (ValueError, IndexError) as error:
            raise RequestError(
                f"{text[:120]!r} is not a verifier key ({error}): expected <name>+<8 hex digits>+<base64>."
            ) from error
        return key

    def __str__(self) -> str:
        material = bytes([self.algorithm]) + self.public
        return f"{self.name}+{self.key_id.hex()}+{b64encode(material).decode()}"

    def verify(self, text: str, data: bytes) -> int | None:
        """Check a signature by this key. Returns the POSIX seconds of a cosignature, None for a plain one.

        Raises TamperError.
        """
        time_s: int | None = None
        if self.algorithm is Algorithm.COSIGNATURE:
            time_s = int.from_bytes(data[:_TIME_BYTES], "big")
            data = data[_TIME_BYTES:]
        wrong = f"The signature by {self.name} does not hold."
        if len(data) != _ED25519_BYTES or (time_s is not None and time_s > _TIME_MAX):
            raise TamperError(wrong)
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(data, _message(text, time_s).encode())
        except (InvalidSignature, ValueError) as error:
            raise TamperError(wrong) from error
        return time_s


@dataclass(frozen=True, slots=True)
class NoteSigner:
    """A name, a public key, and whatever signs with the private one (in memory, or in a key service)."""

    key: VerifierKey
    sign_text: Callable[[str], bytes]
    """Ed25519 over the text's UTF-8 bytes as they stand, 64 bytes out; may block, may raise."""

    @classmethod
    def from_key(cls, name: str, key: SigningKey, algorithm: Algorithm) -> NoteSigner:
        """A signer with its key in memory. A witness's key must sign nothing else."""
        return cls(VerifierKey(name, algorithm, key.verify_key.public), key.sign_note)

    def sign(self, text: str) -> Signature:
        """An Ed25519 signature line for this text."""
        assert self.key.algorithm is Algorithm.ED25519
        return Signature(self.key.name, self.key.key_id, self.sign_text(_message(text, None)))

    def cosign(self, text: str, time_s: int) -> Signature:
        """A timestamped cosignature for this text; `time_s` in POSIX seconds."""
        assert self.key.algorithm is Algorithm.COSIGNATURE and 0 <= time_s <= _TIME_MAX
        data = time_s.to_bytes(_TIME_BYTES, "big") + self.sign_text(_message(text, time_s))
        return Signature(self.key.name, self.key.key_id, data)


def _message(text: str, time_s: int | None) -> str:
    return text if time_s is None else f"cosignature/v1\ntime {time_s}\n{text}"


def encode_note(note: Note) -> bytes:
    """The note's bytes: text, blank line, signature lines."""
    assert note.text.endswith("\n") and note.signatures
    lines = [
        f"— {signature.name} {b64encode(signature.key_id + signature.data).decode()}\n"
        for signature in note.signatures
    ]
    return (note.text + "\n" + "".join(lines)).encode()


def parse_note(data: bytes) -> Note:
    """Read a note; no signature is checked. Raises TamperError where the bytes are not a signed note."""
    if len(data) > NOTE_BYTES_MAX:
        raise TamperError(f"A signed note of {len(data)} bytes is over the limit of {NOTE_BYTES_MAX}.")
    try:
        whole = data.decode()
    except UnicodeDecodeError as error:
        raise TamperError("A signed note is not valid UTF-8.") from error
    if any(c < " " and c != "\n" for c in whole):
        raise TamperError("A signed note contains a control character.")
    at = whole.rfind("\n\n")
    if at < 0 or not whole.endswith("\n"):
        raise TamperError("A signed note has no blank line before its signatures, or no last newline.")
    # Split at newlines alone: str.splitlines would also split at characters that a name may not hold.
    lines = whole[at + 2 : -1].split("\n") if len(whole) > at + 2 else []
    if not 0 < len(lines) <= SIGNATURES_MAX:
        raise TamperError(f"A signed note has 1 to {SIGNATURES_MAX} signatures, this one {len(lines)}.")
    return Note(whole[: at + 1], tuple(map(_parse_signature, lines)))


def _parse_signature(line: str) -> Signature:
    dash, _, rest = line.partition(" ")
    name, _, encoded = rest.partition(" ")
    try:
        check_key_name(name)
        data = b64decode(encoded, validate=True)
    except (binascii.Error, ValueError, RequestError) as error:
        raise TamperError(f"{line[:120]!r} is not a signature line.") from error
    # b64decode accepts stray bits behind the last byte; two spellings of one signature would be a hole.
    if dash != "—" or len(data) <= KEY_ID_BYTES or b64encode(data).decode() != encoded:
        raise TamperError(f"{line[:120]!r} is not a signature line.")
    return Signature(name, data[:KEY_ID_BYTES], data[KEY_ID_BYTES:])


class Verified(NamedTuple):
    """A known key whose signature holds, and for a cosignature its POSIX seconds."""

    key: VerifierKey
    time_s: int | None


def verify_note(note: Note, keys: Iterable[VerifierKey]) -> list[Verified]:
    """Check every signature whose key is among `keys`; at least one must be there.

    Raises TamperError where a known key's signature does not hold, or none of them signed.
    """
    known = {(key.name, key.key_id): key for key in keys}
    verified = []
    for signature in note.signatures:
        key = known.get((signature.name, signature.key_id))
        if key is not None:
            verified.append(Verified(key, key.verify(note.text, signature.data)))
    if not verified:
        names = ", ".join(sorted({key.name for key in known.values()})) or "no key"
        raise TamperError(f"The note carries no signature of a known key ({names} is known).")
    return verified
