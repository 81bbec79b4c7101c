"""Identities in files. Blocks on the disk."""

from __future__ import annotations

from pathlib import Path

from felix.errors import Code, RequestError
from felix.files import PRIVATE, read_file, replace_file
from felix.identity import Identity, parse_identity


def load_identity(path: Path, key_path: Path | None = None) -> Identity:
    """An identity from one file with chain and key, or from two files.

    Raises RequestError: NOT_FOUND, FORBIDDEN (a private key that others may read), IDENTITY_REFUSED.
    """
    pem = read_file(path, "a certificate chain")
    if key_path is None and b"CERTIFICATE-----" in pem and b"PRIVATE KEY-----" not in pem:
        raise RequestError(
            f"{path} has no private key, and there is none beside it.",
            code=Code.IDENTITY_REFUSED,
            hint=f"Put the key that the certificate was requested for beside it, as {path.stem}.key, mode 600.",
        )
    if key_path is None:
        pem = read_file(path, "a certificate chain", private=True)
    else:
        pem = pem + b"\n" + read_file(key_path, "the private key of an identity", private=True)
    try:
        return parse_identity(pem)
    except RequestError as error:
        raise RequestError(f"{path}: {error.sentence}", code=error.code, hint=error.hint) from error


def save_identity(identity: Identity, path: Path) -> None:
    """Chain and key into one private file, in one step, in place of an older one."""
    replace_file(path, identity.chain_pem + identity.key_pem(), PRIVATE)
