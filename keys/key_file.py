"""Private keys in files of their own, which are never overwritten. Blocks on the disk."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey

from felix.errors import Code, RequestError
from felix.files import PRIVATE, create_file, read_file
from keys.hybrid import HybridKeyPair
from keys.post_quantum import MlDsaKey
from keys.signing import SigningKey


def save_signing_key(key: SigningKey, path: Path) -> None:
    """Write a new private file. Raises RequestError(ALREADY_EXISTS)."""
    create_file(path, key.pem(), PRIVATE)


def load_signing_key(path: Path) -> SigningKey:
    """Raises RequestError: NOT_FOUND, FORBIDDEN where others may read it, INVALID."""
    key = _load_pem(path, "a signing key")
    if not isinstance(key, Ed25519PrivateKey):
        raise RequestError(f"{path} holds a key that is not Ed25519.", code=Code.INVALID)
    return SigningKey.of(key)


def save_ml_dsa_key(key: MlDsaKey, path: Path) -> None:
    """Write a new private file. Raises RequestError(ALREADY_EXISTS)."""
    create_file(path, key.pem(), PRIVATE)


def load_ml_dsa_key(path: Path) -> MlDsaKey:
    """Raises RequestError: NOT_FOUND, FORBIDDEN where others may read it, INVALID."""
    key = _load_pem(path, "an ML-DSA-44 signing key")
    if not isinstance(key, MLDSA44PrivateKey):
        raise RequestError(f"{path} holds a key that is not ML-DSA-44.", code=Code.INVALID)
    return MlDsaKey.of(key)


def _load_pem(path: Path, what: str) -> object:
    """The private key in a PEM file, of whatever algorithm. `what` names it where the file cannot be read."""
    pem = read_file(path, what, private=True)
    try:
        return serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise RequestError(f"{path} holds no readable signing key: {error}.", code=Code.INVALID) from error


def save_key_pair(pair: HybridKeyPair, path: Path) -> None:
    """Write a new private file. Raises RequestError(ALREADY_EXISTS)."""
    create_file(path, pair.encode_private(), PRIVATE)


def load_key_pair(path: Path) -> HybridKeyPair:
    """Raises RequestError: NOT_FOUND, FORBIDDEN where others may read it, INVALID."""
    try:
        return HybridKeyPair.decode_private(read_file(path, "a hybrid private key", private=True))
    except RequestError as error:
        if error.code is not Code.INVALID:
            raise
        raise RequestError(f"{path}: {error.sentence}", hint="Restore it from its backup.") from error
