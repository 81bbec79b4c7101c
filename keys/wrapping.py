"""One key under another: AES-256-GCM-SIV, random nonce, bound to both keys' ids and to what the inner key is for.

Wrapped: ``nonce 12 || ciphertext || tag 16``. The AES key is derived from the wrapping secret and its key id. GCM-SIV
(RFC 8452) because a wrapping key lives for years and across processes, where no counter can be kept: a nonce that
came twice would tell only whether two wrapped keys are the same. Pure; providers and the keyring call.
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from felix.context import bind
from felix.errors import TamperError

NONCE_BYTES: Final = 12
WRAPPED_BYTES_MAX: Final = 4_096
"""A wrapped key has 60 bytes here and a few hundred from a key service."""
_TAG_BYTES: Final = 16


def _cipher(secret: bytes, key_id: bytes) -> AESGCMSIV:
    return AESGCMSIV(HKDFExpand(SHA256(), 32, bind("wrap", key_id)).derive(secret))


def wrap(secret: bytes, key_id: bytes, plaintext: bytes, context: bytes, nonce: bytes) -> bytes:
    """`plaintext` under the key `key_id`, whose secret is `secret` (32 bytes); `nonce` is 12 random bytes."""
    assert len(nonce) == NONCE_BYTES
    return nonce + _cipher(secret, key_id).encrypt(nonce, plaintext, context)


def unwrap(secret: bytes, key_id: bytes, wrapped: bytes, context: bytes) -> bytes:
    """What was wrapped. Raises TamperError(TAMPERED) where key, context or bytes are not those of the wrapping."""
    if not NONCE_BYTES + _TAG_BYTES <= len(wrapped) <= WRAPPED_BYTES_MAX:
        raise TamperError(f"{len(wrapped)} bytes cannot be a key wrapped under key {key_id.hex()}.")
    try:
        return _cipher(secret, key_id).decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], context)
    except InvalidTag:
        raise TamperError(
            f"A key wrapped under key {key_id.hex()} was changed, or belongs to another stream, shard or region.",
            hint="Restore the region's key folder from a backup, together with its root keys.",
        ) from None
