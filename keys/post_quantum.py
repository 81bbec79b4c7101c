"""ML-DSA-44 keys for signed notes: checkpoints of audit logs, and cosignatures. Source: FIPS 204, empty context.

A public key all of whose coefficients are small, or near half the modulus, is no key: with a response of zero one constant answer holds under
it for nearly every message, so anybody can sign. It is refused wherever a public key is read. (Whoever publishes a private key does the
same, which nobody can see.)

A key of this kind signs what https://c2sp.org/tlog-cosignature calls a cosigned_message, which says whose key it is and
what it is about, and nothing else; so it needs no purpose of ours before it. Ed25519 keys are keys.signing's. Pure,
loading and saving aside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey, MLDSA44PublicKey

from felix.errors import Code, RequestError

ML_DSA_PUBLIC_BYTES: Final = 1_312
ML_DSA_SIGNATURE_BYTES: Final = 2_420
_NOTE_LABEL: Final = b"subtree/v1\n\0"
_Q: Final = 8_380_417
_RHO_BYTES: Final = 32
_T1_BITS: Final = 10
_DROPPED_BITS: Final = 13
_COEFFICIENTS: Final = 1_024
"""Of a public key's four polynomials."""
_CHECKED_MAX: Final = 512
"""Public keys that are known to be some: a check takes 0.2 ms, and keys are made from their bytes again and again."""


def _from_nothing(coefficient: int) -> int:
    """How far twice this coefficient of t1, at its place, is from a multiple of q."""
    twice = (coefficient << (_DROPPED_BITS + 1)) % _Q
    return min(twice, _Q - twice)


_FROM_NOTHING: Final = tuple(map(_from_nothing, range(1 << _T1_BITS)))
_FROM_NOTHING_MIN: Final = _Q // 8 * _COEFFICIENTS
"""The sum over an honest key is about q/4 for each coefficient, and lies 28 standard deviations above this. For an answer to hold for one
message in 2^40 the challenge times t1, a sum of 39 of them, must stay within 95,232 of one value at all places: some 14,000 for each."""


@lru_cache(maxsize=_CHECKED_MAX)
def check_ml_dsa_public(public: bytes) -> None:
    """Raises RequestError(INVALID) for an ML-DSA-44 public key under which anybody's signatures hold. 1,312 bytes.

    With z = 0, a verifier computes w1 from the challenge times t1 alone (FIPS 204, algorithm 8). Where that stays within one interval of
    HighBits, whatever the challenge, the hash of the message and that constant is a challenge that holds. The challenge has 39 coefficients
    of 1 or -1: their sum is odd, so half the modulus stays half the modulus, and 0 stays 0.
    """
    total, mask = 0, (1 << _T1_BITS) - 1
    for at in range(_RHO_BYTES, ML_DSA_PUBLIC_BYTES, 5):
        four = int.from_bytes(public[at : at + 5], "little")
        total += _FROM_NOTHING[four & mask] + _FROM_NOTHING[four >> 10 & mask]
        total += _FROM_NOTHING[four >> 20 & mask] + _FROM_NOTHING[four >> 30]
    if total < _FROM_NOTHING_MIN:
        raise RequestError(
            "Not an ML-DSA-44 public key: its coefficients are so small that anybody's signatures hold.",
            code=Code.INVALID,
            hint="Do not trust who names it: no honest key is one.",
        )


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
