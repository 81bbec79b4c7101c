"""The documents that the metadata store holds: which of them count, which wait for their leaf in the audit log, and which are not believed.

Invariants: each document is parsed once; what forbids is in force at once, what allows once its leaf stands in the audit log; what is not
genuine, or has no place in this region, gets no leaf. On the event loop.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Final

from felix.errors import FelixError
from policy.approval import Approval, Document, open_approval, refuse_late
from policy.grant import DenyEntry, ExportGrant, Standing, agree, open_export, open_import
from policy.signed import Purpose, SignedDocument, decode_body, verify
from region.evidence.document_log import DocumentLog
from region.governance.lasting import LastingDocuments
from region.governance.parties import (
    ends_of,
    other_terms,
    require_concerned,
    require_end,
    require_ends,
    require_say,
)
from region.governance.trusted_regions import TrustedRegions
from region.metadata.mirror import CatalogMirror
from region.metadata.records import DocumentKind
from region.metadata.records import Side as DocumentSide
from region.trust.held_document import HeldDocument, digest_of, document_id, require_signer

log = logging.getLogger("felix.region.governance")

STORED: Final[dict[str, tuple[DocumentKind, DocumentSide]]] = {
    "export": ("grants", "export"),
    "import": ("grants", "import"),
    "approval": ("grants", "approval"),
    "standing": ("revocations", "state"),
    "deny": ("denies", "state"),
}
"""The catalog's section of each kind."""
PEER_DOCUMENTS_MAX: Final = 5_000
"""Documents signed by one other region: enough for years of grants, and still verified in less than a second. A pause that was lifted,
and whatever else a later word took the place of, is removed from the store before anything is refused; it stands in the log."""
PEER_BYTES_MAX: Final = 64 << 20
"""And their bytes in all: five times what so many documents commonly are. A document may be 128 KiB (policy.approval)."""


class HeldDocuments:
    """One per broker."""

    def __init__(
        self,
        regions: TrustedRegions,
        mirror: CatalogMirror,
        logged: DocumentLog,
        lasting: LastingDocuments,
        clock_ms: Callable[[], int],
    ) -> None:
        """`logged`: the documents that have a leaf."""
        self._clock_ms = clock_ms
        self.lasting = lasting
        self._regions = regions
        self._mirror = mirror
        self._logged = logged
        self._parsed: dict[bytes, HeldDocument] = {}
        self._halves: dict[str, list[SignedDocument]] = {}
        self._stand_ins: dict[bytes, HeldDocument] = {}
        """by the digest of a half that waits for its leaf: the one whose place it takes, and which counts until then"""
        self._counting: set[bytes] = set()
        """digests of what the store holds and the book is made of, besides what lasts"""
        self._signed_by: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()
        self._lost: dict[str, dict[str, SignedDocument]] | None = None
        """what `lost` found since documents changed"""

    def sort(self) -> tuple[list[Document], list[Document]]:
        """What the store holds: the documents of the book, besides those that `lasting` holds, and those whose leaf is missing.

        What forbids is in force at once; what allows, once its leaf stands in the audit log.
        """
        parsed: dict[bytes, HeldDocument] = {}
        for section, side in STORED.values():
            for name, data in self._mirror.documents(section, side).items():
                held = self._parsed.get(data)
                try:
                    # Parsed once: the rest of a change costs little, however many documents there are.
                    parsed[data] = held if held is not None else HeldDocument.of(data)
                except FelixError as error:
                    log.error("document %s/%s/%s cannot be read: %s", section, side, name, error)
        before, self._parsed = self._parsed, parsed
        self._halves = {}
        for held in parsed.values():
            if held.half_of and isinstance(held.document, SignedDocument):
                self._halves.setdefault(held.half_of, []).append(held.document)
        self._signed_by = Counter(held.document.region for held in parsed.values())
        self._bytes_of = Counter()
        for data, held in parsed.items():
            self._bytes_of[held.document.region] += len(data)
        waiting = self.lasting.take(parsed.values(), self._is_genuine)
        self._lost = None
        documents: list[Document] = []
        self._counting = set()
        withdrawn = self._regions.withdrawn
        for held in parsed.values():
            if held.lasts:
                continue
            if held.document.region in withdrawn:
                continue
            if held.document.region not in self._regions.bundles:
                log.error("a document of %s is not believed: the region is not trusted", held.document.region)
            elif held.digest in self._logged or not self._is_genuine(held.document):
                # For a document that is not genuine, the book says why it rejects it.
                documents.append(held.document)
                self._counting.add(held.digest)
            elif self._has_place(held.document):
                waiting.append(held.document)
        self._stand_ins = self._stand_in(before, waiting)
        documents += [held.document for held in self._stand_ins.values()]
        return documents, waiting

    def _stand_in(
        self, before: Mapping[bytes, HeldDocument], waiting: list[Document]
    ) -> dict[bytes, HeldDocument]:
        """For each half that waits for its leaf the one that counted in its place before: a link does not stop because a half is signed
        again, and what the log has not is not asked for either."""
        found: dict[bytes, HeldDocument] = {}
        missing = {digest_of(document) for document in waiting}
        halves = [held for held in self._parsed.values() if held.half_of and held.digest in missing]
        if halves:
            counted = {
                _place_of_half(held): one
                for held in before.values()
                if held.half_of
                and (one := held if held.digest in self._logged else self._stand_ins.get(held.digest))
                is not None
            }
            for half in halves:
                if (one := counted.get(_place_of_half(half))) is not None:
                    found[half.digest] = one
        return found

    def _is_genuine(self, document: Document, is_accepted: bool = False) -> bool:
        """Whether the region that it names signed it, by what this broker believes of that region, and has a say in it. `is_accepted`: that it
        signed it was verified when it was accepted."""
        try:
            if isinstance(document, Approval):
                open_approval(document, self._regions.trust)
            else:
                if not is_accepted:
                    verify(document, self._regions.believed_policy_keys())
                self._require_own_word(document)
        except FelixError:
            return False
        return True

    def _require_own_word(self, document: SignedDocument) -> None:
        """Raises GrantError where a region speaks in another's name, of a grant that is none of its own, and RequestError
        where what it denies is not between it and this region."""
        if document.purpose is Purpose.STANDING:
            standing = decode_body(document, Standing, Purpose.STANDING)
            require_signer(document, standing.region, str(standing.action))
            require_end(self._regions.own.region, standing, self.ends_of(standing.grant))
        elif document.purpose is Purpose.DENY:
            entry = decode_body(document, DenyEntry, Purpose.DENY)
            require_signer(document, entry.region, "deny entry")
            require_concerned(self._regions.own.region, entry)

    def _has_place(self, document: Document) -> bool:
        """Whether a genuine half or approval is one that `put` would have taken, too. What others signed about each other has no leaf
        here and is not held, whoever put it into the store."""
        try:
            if isinstance(document, Approval):
                require_say(self._regions.own.region, document.claim, self._export_of(document.claim.grant))
                self.require_in_time(document, self._clock_ms())
            elif document.purpose is Purpose.EXPORT:
                terms = open_export(document, self._regions.believed_policy_keys()).terms
                require_ends(self._regions.own.region, terms.from_region, terms.to_region)
            elif document.purpose is Purpose.IMPORT:
                accepted = open_import(document, self._regions.believed_policy_keys())
                require_ends(self._regions.own.region, accepted.from_region, accepted.to_region)
                export = self._export_of(accepted.grant)
                if export is not None and not agree(export, accepted):
                    raise other_terms(accepted)
        except FelixError as error:
            log.error(
                "a %s of %s in the store has no place here: %s", document.purpose, document.region, error
            )
            return False
        return True

    def require_in_time(self, document: Document, now: int) -> None:
        """Whether a document without a leaf may get one at `now` (ms): an approval by one of this region's people may while his certificate lives,
        whoever wrote it into the store. Raises SignatureError."""
        if isinstance(document, Approval) and document.region == self._regions.own.region:
            refuse_late(document, now)

    def _export_of(self, grant: str) -> ExportGrant | None:
        """A grant's genuine export, where the store holds one."""
        keys = self._regions.believed_policy_keys()
        for document in self._halves.get(grant, ()):
            if document.purpose is Purpose.EXPORT:
                try:
                    return open_export(document, keys)
                except FelixError:
                    continue
        return None

    def ends_of(self, grant: str) -> tuple[str, ...]:
        """The regions of a grant, by its genuine export; without one, by whatever acceptances there are. Empty where it is not
        known."""
        export = self._export_of(grant)
        if export is not None:
            return ends_of(export.terms)
        keys, ends = self._regions.believed_policy_keys(), dict[str, None]()
        for document in self._halves.get(grant, ()):
            try:
                accepted = open_import(document, keys)
            except FelixError:
                continue
            ends |= dict.fromkeys((accepted.from_region, accepted.to_region))
        return tuple(ends)

    def has_room(self, document: Document) -> bool:
        """Whether a document of another region fits, in the place of the half before it, where it is one."""
        region, data = document.region, document.encode_file()
        halves = self._halves.get(HeldDocument.of(data).half_of, ())
        before = next(
            (
                len(half.encode_file())
                for half in halves
                if (half.purpose, half.region) == (document.purpose, region)
            ),
            0,
        )
        fits = self._bytes_of[region] - before + len(data) <= PEER_BYTES_MAX
        return fits and (before > 0 or self._signed_by[region] < PEER_DOCUMENTS_MAX)

    def judged(self) -> dict[str, bytes]:
        """What the book is made of, by the SHA-256 (hex) of each document's file: empty where the store has it, or lost it (`lost`)."""
        found = dict.fromkeys((digest.hex() for digest in self._counting), b"")
        for held in self._stand_ins.values():
            found[held.digest.hex()] = held.document.encode_file()
        for document in self.lasting.in_force():
            found[digest_of(document).hex()] = b""
        return found

    def lost(self) -> dict[str, dict[str, SignedDocument]]:
        """What forbids or lifts, was accepted here, and is not in the store: by the kind of document and by its name there."""
        if self._lost is None:
            stored = {held.document for held in self._parsed.values() if held.lasts}
            self._lost = {"standing": {}, "deny": {}}
            for document in self.lasting.every():
                if document not in stored:
                    kind = "deny" if document.purpose is Purpose.DENY else "standing"
                    self._lost[kind][document_id(document)] = document
        return self._lost

    def shown_as(self, data: bytes) -> bytes | None:
        """A document of the store, as bridges may see it: with its leaf, or what counts until it has one; None where there is nothing."""
        held = self._parsed.get(data)
        if held is None or held.digest in self._logged:
            return None if held is None else data
        before = self._stand_ins.get(held.digest)
        return None if before is None else before.document.encode_file()

    def denies_between(self, data: bytes, regions: Collection[str]) -> bool:
        """Whether a document of the store is a deny entry of one of these regions, towards another of them or towards all."""
        held = self._parsed.get(data)
        return held is not None and held.denies_between(regions)

    def taken_by(self, region: str) -> tuple[int, int]:
        """How many documents a region signed that are held here, and their bytes."""
        return self._signed_by[region], self._bytes_of[region]

    def outranked(self, region: str) -> list[tuple[DocumentKind, DocumentSide, str]]:
        """Where the store holds a region's documents whose place a later word took, and which have their leaf."""
        return [
            (kind, side, name)
            for kind, side in (STORED["standing"], STORED["deny"])
            for name, data in self._mirror.documents(kind, side).items()
            if (held := self._parsed.get(data)) is not None
            and held.document.region == region
            and held.digest in self._logged
            and isinstance(held.document, SignedDocument)
            and self.lasting.outranks_for_good(held.document)
        ]


def _place_of_half(held: HeldDocument) -> tuple[str, Purpose, str]:
    return held.half_of, held.document.purpose, held.document.region
