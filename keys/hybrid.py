"""Hybrid public-key encryption: ML-KEM-768 with X25519, HKDF-SHA256, AES-256-GCM, single shot, base mode.

What is sealed to such a key stays closed unless both the lattice and the curve are broken. Layouts, each behind one
byte that names the suite (1)::

    public key    suite 1, ML-KEM-768 public key 1,184, X25519 public key 32
    private key   prefix `felix/hybrid-private-key/1` and a zero byte, suite 1, ML-KEM seed 64, X25519 32
    sealed        suite 1, encapsulated key 1,120, ciphertext n, tag 16

Callers bind everything that a sealed value is for into `info`. Base mode does not authenticate the sender: senders also sign.
Pure, except for loading and saving. Source: RFC 9180 (HPKE); the hybrid KEM as in draft-ietf-hpke-pq.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)

from felix.context import purpose_prefix
from felix.errors import Code, RequestError, TamperError

_SUITE_ID: Final = b"\x01"
_SUITE: Final = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_LATTICE_PUBLIC_BYTES: Final = 1_184
_LATTICE_SEED_BYTES: Final = 64
_CURVE_BYTES: Final = 32
PUBLIC_BYTES: Final = 1 + _LATTICE_PUBLIC_BYTES + _CURVE_BYTES
OVERHEAD_BYTES: Final = 1 + 1_120 + 16
"""What sealing adds."""
SEALED_BYTES_MAX: Final = 4_096
"""Only keys are sealed this way; whatever is larger is refused before any cryptography."""
_PRIVATE_PREFIX: Final = purpose_prefix("hybrid-private-key") + _SUITE_ID


@dataclass(frozen=True, slots=True)
class HybridPublicKey:
    """Where others seal to; `encoded` is public and travels in bundles and on the wire."""

    encoded: bytes
    _key: MLKEM768X25519PublicKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises RequestError(INVALID) where the bytes are no such key."""
        if len(self.encoded) != PUBLIC_BYTES or self.encoded[:1] != _SUITE_ID:
            raise RequestError(
                f"Not a hybrid public key: {PUBLIC_BYTES} bytes that begin with {_SUITE_ID.hex()} are expected."
            )
        try:
            lattice = MLKEM768PublicKey.from_public_bytes(self.encoded[1 : 1 + _LATTICE_PUBLIC_BYTES])
            curve = X25519PublicKey.from_public_bytes(self.encoded[1 + _LATTICE_PUBLIC_BYTES :])
        except ValueError as error:
            raise RequestError(f"Not a hybrid public key: {error}.") from error
        object.__setattr__(self, "_key", MLKEM768X25519PublicKey(lattice, curve))

    def seal(self, plaintext: bytes, info: bytes) -> bytes:
        """Sealed bytes, others each time. Raises RequestError(INVALID) where it is too much, or the key is weak."""
        if len(plaintext) + OVERHEAD_BYTES > SEALED_BYTES_MAX:
            raise RequestError(f"{len(plaintext)} bytes are too many to be sealed to a public key.")
        try:
            return _SUITE_ID + _SUITE.encrypt(plaintext, self._key, info)
        except ValueError as error:
            # X25519 with a point of low order.
            raise RequestError(f"The hybrid public key cannot be sealed to: {error}.") from error


@dataclass(frozen=True, slots=True)
class HybridKeyPair:
    """The private half, and `public` beside it; nothing private in its repr."""

    _encoded: bytes = field(repr=False, compare=False)
    _key: MLKEM768X25519PrivateKey = field(repr=False, compare=False)
    public: HybridPublicKey

    @classmethod
    def generate(cls) -> Self:
        """A new pair from the system's randomness."""
        return cls._of(
            MLKEM768PrivateKey.generate().private_bytes_raw(), X25519PrivateKey.generate().private_bytes_raw()
        )

    @classmethod
    def _of(cls, seed: bytes, scalar: bytes) -> Self:
        lattice = MLKEM768PrivateKey.from_seed_bytes(seed)
        curve = X25519PrivateKey.from_private_bytes(scalar)
        public = HybridPublicKey(
            _SUITE_ID + lattice.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()
        )
        return cls(_PRIVATE_PREFIX + seed + scalar, MLKEM768X25519PrivateKey(lattice, curve), public)

    @classmethod
    def decode_private(cls, encoded: bytes) -> Self:
        """The pair of `encode_private`. Raises RequestError(INVALID)."""
        secret = encoded.removeprefix(_PRIVATE_PREFIX)
        if not encoded.startswith(_PRIVATE_PREFIX) or len(secret) != _LATTICE_SEED_BYTES + _CURVE_BYTES:
            raise RequestError("Not a hybrid private key.", code=Code.INVALID)
        return cls._of(secret[:_LATTICE_SEED_BYTES], secret[_LATTICE_SEED_BYTES:])

    def encode_private(self) -> bytes:
        """The private bytes. For private files only."""
        return self._encoded

    def open(self, sealed: bytes, info: bytes, what: str) -> bytes:
        """The plaintext. `what` names it in an error ("the data key of …").

        Raises TamperError(TAMPERED) where it was changed, sealed to another key, or for another purpose.
        """
        if not OVERHEAD_BYTES <= len(sealed) <= SEALED_BYTES_MAX or sealed[:1] != _SUITE_ID:
            raise TamperError(
                f"{what[:1].upper()}{what[1:]}, {len(sealed)} bytes, is not sealed as it must be."
            )
        try:
            return _SUITE.decrypt(sealed[1:], self._key, info)
        except (InvalidTag, ValueError):
            raise TamperError(
                f"{what[:1].upper()}{what[1:]} was sealed to another key or for another purpose, or was changed."
            ) from None
