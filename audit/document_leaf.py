"""Document leaves: that a signed document stands in the log, inline or by its hash. Pure.

A grant, an acceptance, an approval, a pause, a deny entry, a revocation, a policy: whatever decides what may cross is a
signed document, and its leaf stands in the log before anything crosses under it. The leaf repeats what finds it (grant,
terms hash, regions); every statement about the grant is read from the document, once its signature was checked.

A document of more than `DOCUMENT_BYTES_MAX` bytes stands in a file beside the log, `documents/<SHA-256 in hex>`
(audit.document_disk keeps it; it is durable before its leaf is appended). Callers: bridge (egress), region
(ingress), and through `read_document` verifier and report.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from audit.leaf import DOCUMENT_BYTES_MAX, DOCUMENT_KINDS, Header, Kind, Leaf, Side
from audit.tile import Files
from felix.errors import RequestError, TamperError

DOCUMENTS_FOLDER: Final = "documents"
DOCUMENT_FILE_BYTES_MAX: Final = 1 << 20
"""A policy has at most some hundred kB; a file beside the log must not become a way to store anything."""


def document_path(document_sha256: bytes) -> str:
    """Where a document stands that is too long for its leaf; relative to the log's folder."""
    return f"{DOCUMENTS_FOLDER}/{document_sha256.hex()}"


def stands_beside(document: bytes) -> bool:
    """True where the document is too long for its leaf, and must be kept beside the log first."""
    return len(document) > DOCUMENT_BYTES_MAX


def document_leaf(
    kind: Kind,
    document: bytes,
    *,
    side: Side,
    time_ms: int,
    actor: str,
    source_region: str,
    destination_region: str,
    grant_id: str = "",
    terms_hash: bytes = b"",
    bridge: str = "",
    stream: str = "",
    destination_stream: str = "",
    policy_version: int = 0,
    policy_hash: bytes = b"",
    action: str = "",
    sentence: str = "",
) -> Leaf:
    """The leaf of one signed document, given as it was signed. `actor`: who put it here (SPIFFE id).

    A document that concerns no grant has its own region at both ends. A GRANT needs bridge and both streams, a
    POLICY version and hash, a STANDING its action (`audit.leaf.REQUIRED`). Raises RequestError where the document is
    empty or has more than `DOCUMENT_FILE_BYTES_MAX` bytes.
    """
    assert kind in DOCUMENT_KINDS
    if not 0 < len(document) <= DOCUMENT_FILE_BYTES_MAX:
        raise RequestError(
            f"A document of {len(document)} bytes cannot be audited; 1 to {DOCUMENT_FILE_BYTES_MAX} are allowed."
        )
    return Leaf(
        Header(
            kind=kind,
            side=side,
            time_ms=time_ms,
            source_region=source_region,
            destination_region=destination_region,
            bridge=bridge,
            stream=stream,
            destination_stream=destination_stream,
            grant_id=grant_id,
            terms_hash=terms_hash,
            policy_version=policy_version,
            policy_hash=policy_hash,
            actor=actor,
            action=action,
            sentence=sentence,
            document=b"" if stands_beside(document) else document,
            document_sha256=sha256(document).digest(),
        )
    )


def read_document(header: Header, files: Files) -> bytes | None:
    """The document of a leaf, from the leaf itself or from beside the log; None where it is not there.

    Raises TamperError where the file holds something else. Its signatures are for the caller to check.
    """
    if header.document:
        return header.document
    if not header.document_sha256:
        return None
    data = files.read(document_path(header.document_sha256))
    if data is not None and sha256(data).digest() != header.document_sha256:
        raise TamperError(
            f"The file {document_path(header.document_sha256)} does not hold the document that its leaf names."
        )
    return data
