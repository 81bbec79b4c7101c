"""Signed notes: text with signature lines. Pure. Source: https://c2sp.org/signed-note.

A line names its key by name and key id. Anybody can make two keys of one name and one id (keys.note_key), so a line holds if any known
key of its name and id makes it hold. Lines of unknown keys are ignored. One that no known key makes hold is *broken*: what that means is
for the caller to say (`check_note`), and `verify_note` refuses the note, as it does where no known key signed. Three signature types:

- 0x01, Ed25519 over the text;
- 0x04, a witness's timestamped cosignature (https://c2sp.org/tlog-cosignature, `cosignature/v1`): eight bytes of
  POSIX seconds, then Ed25519 over ``cosignature/v1\\ntime <seconds>\\n`` and the text;
- 0x06, ML-DSA-44, of a log or a witness (the same page, `subtree/v1`): eight bytes of POSIX seconds, then the signature
  over the signer's name, the time, and the checkpoint's origin, size and root. It is over nothing else of the text.

Invariants: `parse_note(encode_note(note)) == note`; nothing of a note is used before `check_note` or `verify_note` returned.
Callers: audit.checkpoint, audit.witness, audit.verify, audit.proof.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from struct import pack
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from audit.tree_head import parse_tree_head
from felix.errors import RequestError, TamperError
from keys.note_key import COSIGNATURE_TYPE, ED25519_TYPE, ML_DSA_44_TYPE, NOTE_KEY_ID_BYTES, note_key_id
from keys.post_quantum import (
    ML_DSA_PUBLIC_BYTES,
    ML_DSA_SIGNATURE_BYTES,
    MlDsaKey,
    check_ml_dsa_public,
    ml_dsa_holds,
)
from keys.signing import SigningKey, check_public

NOTE_BYTES_MAX: Final = 131_072
"""A line with an ML-DSA-44 signature has about 3,300 bytes: room for the log's and some 36 witnesses'."""
SIGNATURES_MAX: Final = 64
"""The specification asks for at least 16."""
KEY_ID_BYTES: Final = NOTE_KEY_ID_BYTES
_ED25519_BYTES: Final = 64
_NAME_BYTES_MAX: Final = 255
"""Of a name in an ML-DSA-44 message, which counts it in one byte; and of an origin there."""
_UNFIT: Final = re.compile(r"[\s\x00-\x1f+]")
"""What no key's name has."""
_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f]")
"""What no note has: its lines end in newlines."""
_TIME_BYTES: Final = 8
_TIME_MAX: Final = (1 << 63) - 1


class Algorithm(IntEnum):
    """Signature type bytes of the specification that are spoken here."""

    ED25519 = ED25519_TYPE
    COSIGNATURE = COSIGNATURE_TYPE
    ML_DSA_44 = ML_DSA_44_TYPE

    @property
    def is_post_quantum(self) -> bool:
        """True where a quantum computer is not known to forge it."""
        return self is Algorithm.ML_DSA_44


_PUBLIC_BYTES: Final = {
    Algorithm.ED25519: 32,
    Algorithm.COSIGNATURE: 32,
    Algorithm.ML_DSA_44: ML_DSA_PUBLIC_BYTES,
}


class Signature(NamedTuple):
    """One signature line."""

    name: str
    key_id: bytes
    data: bytes


class Note(NamedTuple):
    """Text, ending in a newline, and its signature lines in order."""

    text: str
    signatures: tuple[Signature, ...]

    def signed_by(self, name: str) -> Note:
        """The same text with the lines under this name alone."""
        return Note(self.text, tuple(line for line in self.signatures if line.name == name))

    def with_signatures(self, more: Iterable[Signature]) -> Note:
        """The same text with further signatures; one of the same key replaces the older one."""
        kept = {(signature.name, signature.key_id): signature for signature in self.signatures}
        kept.update({(signature.name, signature.key_id): signature for signature in more})
        return Note(self.text, tuple(kept.values()))


def check_key_name(name: str) -> str:
    """Raises RequestError(INVALID) unless `name` can stand in a signature line."""
    if not name or _UNFIT.search(name):
        raise RequestError(f"{name!r} is not a note key's name: no spaces, no control characters, no +.")
    return name


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """A public key under a name: `<name>+<key id, 8 hex digits>+<base64 of type and key>` (a *vkey*)."""

    name: str
    algorithm: Algorithm
    public: bytes
    from_size: int = field(default=0, compare=False)
    """a log's key signs checkpoints of so many leaves or more: what another key of the log signed before is none of its own"""
    to_size: int | None = field(default=None, compare=False)
    """and of so many at most, where another key signs from there on; None: it has no end"""

    def __post_init__(self) -> None:
        check_key_name(self.name)
        expected = _PUBLIC_BYTES[self.algorithm]
        if len(self.public) != expected:
            what = "An ML-DSA-44" if self.algorithm is Algorithm.ML_DSA_44 else "An Ed25519"
            raise RequestError(f"{what} key has {expected} bytes, this one {len(self.public)}.")
        if self.algorithm is Algorithm.ML_DSA_44:
            check_ml_dsa_public(self.public)
        else:
            check_public(self.public)
        if self.algorithm is Algorithm.ML_DSA_44 and len(self.name.encode()) > _NAME_BYTES_MAX:
            raise RequestError(f"An ML-DSA-44 key's name has {_NAME_BYTES_MAX} bytes at most.")

    @property
    def key_id(self) -> bytes:
        """SHA-256(name ‖ newline ‖ type ‖ public key), its first four bytes."""
        return note_key_id(self.name, self.algorithm, self.public)

    def covers(self, size: int) -> bool:
        """Whether it may sign a checkpoint of so many leaves."""
        return self.from_size <= size and (self.to_size is None or size <= self.to_size)

    def meets(self, other: VerifierKey) -> bool:
        """Whether both may sign one and the same checkpoint; where one ends another begins, with a checkpoint that both may sign."""
        return (self.to_size is None or other.from_size < self.to_size) and (
            other.to_size is None or self.from_size < other.to_size
        )

    @classmethod
    def parse(cls, text: str) -> VerifierKey:
        """Read a vkey. Raises RequestError(INVALID) with what was expected."""
        try:
            # Around it blanks of a command line or a file: others belong to the name, which may not have them.
            name, key_id, encoded = text.strip(" \t\r\n").split("+", 2)
            material = b64decode(encoded, validate=True)
            key = cls(name, Algorithm(material[0]), material[1:])
            # One spelling per key: hexadecimal in small letters, base64 without stray bits.
            is_spelled_so = key_id == key.key_id.hex() and b64encode(material).decode() == encoded
        except (ValueError, IndexError) as error:
            raise RequestError(
                f"{text[:120]!r} is not a verifier key: expected <name>+<8 hex digits>+<base64>."
            ) from error
        if not is_spelled_so:
            raise RequestError(f"{text[:120]!r} is not a verifier key: its key id does not fit.")
        return key

    def __str__(self) -> str:
        material = bytes([self.algorithm]) + self.public
        return f"{self.name}+{self.key_id.hex()}+{b64encode(material).decode()}"

    def verify(self, text: str, data: bytes) -> int | None:
        """Check a signature by this key. Returns the POSIX seconds of a cosignature, None for a plain signature.

        An ML-DSA-44 signature may have the time 0: then it does not say that there was no larger tree. Raises
        TamperError.
        """
        time_s: int | None = None
        if self.algorithm is not Algorithm.ED25519:
            time_s = int.from_bytes(data[:_TIME_BYTES], "big")
            data = data[_TIME_BYTES:]
        wrong = f"The signature by {self.name} does not hold."
        if time_s is not None and time_s > _TIME_MAX:
            raise TamperError(wrong)
        message = signed_message(self, text, time_s)
        if self.algorithm is Algorithm.ML_DSA_44:
            if len(data) != ML_DSA_SIGNATURE_BYTES or not ml_dsa_holds(self.public, message, data):
                raise TamperError(wrong)
            return time_s
        if len(data) != _ED25519_BYTES:
            raise TamperError(wrong)
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(data, message)
        except (InvalidSignature, ValueError) as error:
            raise TamperError(wrong) from error
        return time_s


def signs_from(keys: Iterable[VerifierKey]) -> int:
    """Of so many leaves on the keys sign that have no end: where the last of the others ends."""
    return max((key.to_size or 0 for key in keys), default=0)


def unbounded(keys: Iterable[VerifierKey]) -> tuple[VerifierKey, ...]:
    """The same keys, for checkpoints of any size: of what was taken before their ends were known, or says nothing."""
    return tuple(VerifierKey(key.name, key.algorithm, key.public) for key in keys)


def signed_message(key: VerifierKey, text: str, time_s: int | None) -> bytes:
    """What a signature of this key's type is over. Raises TamperError where the text is no checkpoint and must be one."""
    if key.algorithm is Algorithm.ML_DSA_44:
        assert time_s is not None
        head = parse_tree_head(text)
        name, origin = key.name.encode(), head.origin.encode()
        if len(origin) > _NAME_BYTES_MAX:
            raise TamperError(f"An origin of {len(origin)} bytes; ML-DSA-44 signs up to {_NAME_BYTES_MAX}.")
        return b"".join(
            (
                b"subtree/v1\n\0",
                pack(">B", len(name)) + name,
                pack(">Q", time_s),
                pack(">B", len(origin)) + origin,
                pack(">QQ", 0, head.size),
                head.root,
            )
        )
    return (text if time_s is None else f"cosignature/v1\ntime {time_s}\n{text}").encode()


@dataclass(frozen=True, slots=True)
class NoteSigner:
    """A name, a public key, and whatever signs with the private one (in memory, or in a key service)."""

    key: VerifierKey
    sign_message: Callable[[bytes], bytes]
    """Signs the message as it stands, by the key's algorithm; may block, may raise."""

    @classmethod
    def from_key(cls, name: str, key: SigningKey, algorithm: Algorithm) -> NoteSigner:
        """An Ed25519 signer with its key in memory. A witness's key must sign nothing else."""
        assert algorithm is not Algorithm.ML_DSA_44
        return cls(
            VerifierKey(name, algorithm, key.verify_key.public),
            lambda message: key.sign_note(message.decode()),
        )

    @classmethod
    def from_ml_dsa(cls, name: str, key: MlDsaKey) -> NoteSigner:
        """An ML-DSA-44 signer with its key in memory, for a log or a witness."""
        return cls(VerifierKey(name, Algorithm.ML_DSA_44, key.public), key.sign_note)

    def sign(self, text: str, time_s: int = 0) -> Signature:
        """A log's signature line for this text. `time_s` in POSIX seconds; Ed25519 signatures carry none."""
        assert self.key.algorithm is not Algorithm.COSIGNATURE
        return self._line(text, None if self.key.algorithm is Algorithm.ED25519 else time_s)

    def cosign(self, text: str, time_s: int) -> Signature:
        """A witness's timestamped cosignature for this text; `time_s` in POSIX seconds."""
        assert self.key.algorithm is not Algorithm.ED25519 and 0 < time_s <= _TIME_MAX
        return self._line(text, time_s)

    def _line(self, text: str, time_s: int | None) -> Signature:
        data = self.sign_message(signed_message(self.key, text, time_s))
        stamp = b"" if time_s is None else time_s.to_bytes(_TIME_BYTES, "big")
        return Signature(self.key.name, self.key.key_id, stamp + data)


def encode_note(note: Note) -> bytes:
    """The note's bytes: text, blank line, signature lines."""
    assert note.text.endswith("\n") and note.signatures
    return f"{note.text}\n".encode() + encode_signatures(note.signatures)


def encode_signatures(signatures: Iterable[Signature]) -> bytes:
    """Signature lines alone, as a witness answers with them."""
    return "".join(
        f"— {signature.name} {b64encode(signature.key_id + signature.data).decode()}\n"
        for signature in signatures
    ).encode()


def parse_signatures(data: bytes) -> tuple[Signature, ...]:
    """Read signature lines alone. Raises TamperError where they are not one to SIGNATURES_MAX of them."""
    note = parse_note(b"\n\n" + data)
    if note.text != "\n":
        raise TamperError("Signature lines alone have no text before them.")
    return note.signatures


def parse_note(data: bytes) -> Note:
    """Read a note; no signature is checked. Raises TamperError where the bytes are not a signed note."""
    if len(data) > NOTE_BYTES_MAX:
        raise TamperError(f"A signed note of {len(data)} bytes is over the limit of {NOTE_BYTES_MAX}.")
    try:
        whole = data.decode()
    except UnicodeDecodeError as error:
        raise TamperError("A signed note is not valid UTF-8.") from error
    if _CONTROL.search(whole):
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
    """A known key whose signature holds, for a cosignature its POSIX seconds, and the line."""

    key: VerifierKey
    time_s: int | None
    line: Signature


class CheckedNote(NamedTuple):
    """What known keys say of a note's lines, each list in the order of the lines. Lines of unknown keys stand in neither."""

    verified: list[Verified]
    broken: list[Signature]
    """lines under the name and id of known keys, none of which makes them hold"""


def check_note(note: Note, keys: Iterable[VerifierKey]) -> CheckedNote:
    """Check every line whose name and id a key among `keys` has. Refuses nothing."""
    known: dict[tuple[str, bytes], list[VerifierKey]] = {}
    for key in keys:
        known.setdefault((key.name, key.key_id), []).append(key)
    checked = CheckedNote([], [])
    for line in note.signatures:
        tried = known.get((line.name, line.key_id), ())
        held = next((by for key in tried if (by := _verify_line(key, note.text, line)) is not None), None)
        if held is not None:
            checked.verified.append(held)
        elif tried:
            checked.broken.append(line)
    return checked


def _verify_line(key: VerifierKey, text: str, line: Signature) -> Verified | None:
    try:
        return Verified(key, key.verify(text, line.data), line)
    except TamperError:
        return None


def broken_line(line: Signature) -> TamperError:
    """What a note is refused with where this line must hold, and does not."""
    return TamperError(f"The signature by {line.name} does not hold.")


def verify_note(note: Note, keys: Iterable[VerifierKey]) -> list[Verified]:
    """Check every line whose key is among `keys`; at least one must be there.

    Raises TamperError where such a line does not hold, or none of them signed.
    """
    keys = tuple(keys)
    checked = check_note(note, keys)
    if checked.broken:
        raise broken_line(checked.broken[0])
    if not checked.verified:
        names = ", ".join(sorted({key.name for key in keys})) or "no key"
        raise TamperError(f"The note carries no signature of a known key ({names} is known).")
    return checked.verified
