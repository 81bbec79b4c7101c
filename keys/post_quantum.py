"""ML-DSA-44 keys for signed notes: checkpoints of audit logs, and cosignatures. Source: FIPS 204, empty context.

A key of this kind signs what https://c2sp.org/tlog-cosignature calls a cosigned_message, which says whose key it is and
what it is about, and nothing else; so it needs no purpose of ours before it. Ed25519 keys are keys.signing's. Pure,
loading and saving aside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey, MLDSA44PublicKey

ML_DSA_PUBLIC_BYTES: Final = 1_312
ML_DSA_SIGNATURE_BYTES: Final = 2_420
_NOTE_LABEL: Final = b"subtree/v1\n\0"


@dataclass(frozen=True, slots=True)
class MlDsaKey:
    """The private half, in no repr, and its 1,312 public bytes."""

    _key: MLDSA44PrivateKey = field(repr=False, compare=False)
    public: bytes

    @classmethod
    def generate(cls) -> Self:
        """A new key from the system's randomness."""
        return cls.of(MLDSA44PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """The key of a 32-byte seed (FIPS 204, algorithm 6)."""
        return cls.of(MLDSA44PrivateKey.from_seed_bytes(seed))

    @classmethod
    def of(cls, key: MLDSA44PrivateKey) -> Self:
        """With its public key."""
        return cls(key, key.public_key().public_bytes_raw())

    def sign_note(self, message: bytes) -> bytes:
        """2,420 bytes over a cosigned_message; each time another signature, since the system's randomness goes in."""
        assert message.startswith(_NOTE_LABEL)
        return self._key.sign(message)

    def pem(self) -> bytes:
        """PKCS#8, not encrypted. For private files only."""
        return self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def ml_dsa_holds(public: bytes, message: bytes, signature: bytes) -> bool:
    """True where the signature is this public key's over the message."""
    try:
        MLDSA44PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
