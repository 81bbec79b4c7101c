"""A signed document as a region holds it: parsed once, named by its digest; and what governance asks of one. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import NamedTuple

from felix.errors import FelixError
from policy.approval import Approval, Document, parse_document
from policy.claims import read_claim
from policy.grant import EVERYWHERE, DenyEntry, GrantError, Standing, StandingAction
from policy.signed import Purpose, SignedDocument, decode_body
from region.trust.trust_store import place_of


class HeldDocument(NamedTuple):
    """A document of the store, parsed once. `lasts`: it forbids, or lifts what did (region.trust.trust_store). `half_of`: the grant that
    it is a half of, empty for any other document. `denies`: of a deny entry that can be read, whose it is, and towards whom."""

    document: Document
    digest: bytes
    lasts: bool
    half_of: str
    denies: tuple[str, str] | None

    @classmethod
    def of(cls, data: bytes) -> HeldDocument:
        """Raises SignatureError."""
        document = parse_document(data)
        lasts = isinstance(document, SignedDocument) and place_of(document) is not None
        is_half = isinstance(document, SignedDocument) and document.purpose in (
            Purpose.EXPORT,
            Purpose.IMPORT,
        )
        claim = read_claim(document) if is_half else None
        return cls(
            document, digest_of(document), lasts, "" if claim is None else claim.grant, _denied_ends(document)
        )

    def denies_between(self, regions: Collection[str]) -> bool:
        """Whether it is a deny entry of one of these regions, towards another of them or towards all."""
        if self.denies is None:
            return False
        region, peer = self.denies
        return region in regions and (peer == EVERYWHERE or peer in regions)


def require_signer(document: SignedDocument, region: str, what: str) -> None:
    """A region signs for itself alone. Raises GrantError(GRANT_INVALID)."""
    if document.region != region:
        raise GrantError(
            f"A {what} by {region} is signed by {document.region}.",
            hint=f"Only {region} can sign it; find out who wrote this one.",
        )


def digest_of(document: Document) -> bytes:
    """What names a document in the log: the SHA-256 of its file."""
    return hashlib.sha256(document.encode_file()).digest()


def grant_of(document: Document) -> str:
    """The grant that an approval or a standing is about; empty for other documents. Raises SignatureError."""
    if isinstance(document, Approval):
        return document.claim.grant
    if document.purpose is Purpose.STANDING:
        return decode_body(document, Standing, Purpose.STANDING).grant
    return ""


def is_revocation(document: SignedDocument) -> bool:
    """Raises SignatureError where a standing cannot be read."""
    return (
        document.purpose is Purpose.STANDING
        and decode_body(document, Standing, Purpose.STANDING).action is StandingAction.REVOKE
    )


def _denied_ends(document: Document) -> tuple[str, str] | None:
    if not isinstance(document, SignedDocument) or document.purpose is not Purpose.DENY:
        return None
    try:
        entry = decode_body(document, DenyEntry, Purpose.DENY)
    except FelixError:
        return None
    return entry.region, entry.peer


def document_id(document: SignedDocument) -> str:
    """A name for a document in the store: the grant it is about, and a hash."""
    digest = hashlib.sha256(document.body + document.signature).hexdigest()[:24]
    if document.purpose is Purpose.STANDING:
        return f"{decode_body(document, Standing, Purpose.STANDING).grant}.{digest}"
    return f"d.{digest}"
