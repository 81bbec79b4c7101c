"""The signers of a log or a witness, by the files that their keys lie in. Blocks. Callers: whoever opens an audit log, or runs a witness."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from audit.note import Algorithm, NoteSigner
from felix.errors import FelixError
from keys.key_file import load_ml_dsa_key, load_signing_key


def held_keys(name: str, ed25519: Path, ml_dsa: Path) -> frozenset[bytes]:
    """The public halves of a log's keys in these files; a file that is not there, or cannot be read, has none."""
    found = set[bytes]()
    with suppress(FelixError, OSError):
        found.add(NoteSigner.from_key(name, load_signing_key(ed25519), Algorithm.ED25519).key.public)
    with suppress(FelixError, OSError):
        found.add(NoteSigner.from_ml_dsa(name, load_ml_dsa_key(ml_dsa)).key.public)
    return frozenset(found)


def load_signers(
    name: str, ed25519: Path, ml_dsa: Path, algorithm: Algorithm = Algorithm.ED25519
) -> tuple[NoteSigner, ...]:
    """The Ed25519 signer, and the ML-DSA-44 one where its file is there: what was founded before there were any has none. `algorithm`: of the
    Ed25519 one. Raises as `load_signing_key`."""
    first = NoteSigner.from_key(name, load_signing_key(ed25519), algorithm)
    if not ml_dsa.exists():
        return (first,)
    return first, NoteSigner.from_ml_dsa(name, load_ml_dsa_key(ml_dsa))
