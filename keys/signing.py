"""Ed25519 keys for what a region states: policies, grants, audit checkpoints, receipts.

A signature is over `felix/<purpose>/1`, a zero byte, and the message, so one made for a receipt is worth nothing as
a policy. Signed notes (C2SP signed-note), whose format fixes what is signed, are signed as they stand; they must
hold no zero byte, which every other message here begins with, so the two can never be taken for each other.

A public key of small order is no key: signatures that anybody can write hold under it, for most or all messages, so whoever names one
can deny what it signed. It is refused wherever a public key is read, and so is one whose bytes are not the one encoding of its point.

The id of a key is the first 16 bytes of SHA-256 over its 32 public bytes. Pure, loading and saving aside.
Source: RFC 8032 (Ed25519; the encoding of points is in section 5.1.2).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from felix.context import purpose_prefix
from felix.errors import Code, RequestError, TamperError

PUBLIC_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
SIGNING_KEY_ID_BYTES: Final = 16
_FIELD: Final = (1 << 255) - 19
_SIGN_BIT: Final = 1 << 255
_ORDER_8_Y: Final = int.from_bytes(
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
)
"""Of two of the four points of order 8; the other two have its negative."""
_SMALL_ORDER_Y: Final = frozenset({0, 1, _FIELD - 1, _ORDER_8_Y, _FIELD - _ORDER_8_Y})
"""The y of all eight points whose order divides 8: these of order 4, 1, 2 and 8. No other point has one of them."""


def check_public(public: bytes) -> None:
    """Raises RequestError(INVALID) for a public key of small order, or one that is not encoded as RFC 8032 does it. 32 bytes."""
    y = int.from_bytes(public, "little") & ~_SIGN_BIT
    if y % _FIELD in _SMALL_ORDER_Y:
        raise RequestError(
            "Not an Ed25519 public key: a point of small order, under which anybody's signatures hold.",
            code=Code.INVALID,
            hint="Do not trust who names it: no honest key is one.",
        )
    if y >= _FIELD:
        raise RequestError(
            "Not an Ed25519 public key: another encoding of a point than its own.", code=Code.INVALID
        )


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """The public half: 32 bytes."""

    public: bytes
    _key: Ed25519PublicKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises RequestError(INVALID) where these are not the bytes of a public key, or of one of small order."""
        try:
            object.__setattr__(self, "_key", Ed25519PublicKey.from_public_bytes(self.public))
        except ValueError as error:
            raise RequestError(f"Not an Ed25519 public key: {error}.", code=Code.INVALID) from error
        check_public(self.public)

    @property
    def key_id(self) -> bytes:
        """16 bytes."""
        return hashlib.sha256(self.public).digest()[:SIGNING_KEY_ID_BYTES]

    def holds(self, purpose: str, message: bytes, signature: bytes) -> bool:
        """True where `signature` is this key's over `message`, for `purpose`."""
        return self._holds(purpose_prefix(purpose) + message, signature)

    def verify(self, purpose: str, message: bytes, signature: bytes) -> None:
        """Raises TamperError where the signature does not hold."""
        if not self.holds(purpose, message, signature):
            raise TamperError(
                f"The {purpose} signature by key {self.key_id.hex()} does not hold.",
                hint="The document was changed, or another key signed it.",
            )

    def note_holds(self, text: str, signature: bytes) -> bool:
        """True where `signature` is this key's over the text of a signed note."""
        return "\0" not in text and self._holds(text.encode(), signature)

    def _holds(self, message: bytes, signature: bytes) -> bool:
        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The private half; in no repr."""

    _key: Ed25519PrivateKey = field(repr=False, compare=False)
    verify_key: VerifyKey

    @classmethod
    def generate(cls) -> Self:
        """A new key from the system's randomness."""
        return cls.of(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """The key of a 32-byte seed (RFC 8032, section 5.1.5)."""
        return cls.of(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def of(cls, key: Ed25519PrivateKey) -> Self:
        """With its public key."""
        return cls(key, VerifyKey(key.public_key().public_bytes_raw()))

    @property
    def key_id(self) -> bytes:
        """16 bytes; the same as the verify key's."""
        return self.verify_key.key_id

    @property
    def private_key(self) -> Ed25519PrivateKey:
        """For signers that bind their purposes themselves (policy.signed, which may not import this package)."""
        return self._key

    def sign(self, purpose: str, message: bytes) -> bytes:
        """64 bytes over the prefix of `purpose` and `message`; the same input gives the same signature."""
        return self._key.sign(purpose_prefix(purpose) + message)

    def sign_note(self, text: str) -> bytes:
        """64 bytes over the text of a signed note, its last newline included."""
        assert "\0" not in text
        assert text.endswith("\n")
        return self._key.sign(text.encode())

    def pem(self) -> bytes:
        """PKCS#8, not encrypted. For private files only."""
        return self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
