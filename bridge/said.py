"""What the egress log says of grants and streams: of each thing the newest word that has a leaf there. Pure.

Whoever verifies the log holds each crossing to what stands in it. So does the agent: a half, a pause or a deny entry that a region listed for a
moment, and that has its leaf, counts until a later word of the same region does, whatever the regions list now. Of a half it counts only
where a half of that region is listed: without any, there is no grant.

Invariant: what is held is bounded for each region by itself, in words and in bytes, and nothing is forgotten: a word that has no room gets no
leaf (`has_room`). `current` and `beside` may be asked in another thread than the one that takes. Callers: bridge.documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from felix.errors import FelixError
from policy.approval import Approval, Document
from policy.grant import (
    DenyEntry,
    ExportGrant,
    ImportGrant,
    Standing,
    StandingAction,
    deny_rank,
    fit_of,
    half_rank,
    standing_rank,
)
from policy.signed import Purpose, decode_body
from policy.signed_again import accepted_by
from policy.truncation import Accepted, Truncation

WORDS_MAX: Final = 32_768
"""Of one region: six times what a broker keeps of another's documents."""
BYTES_MAX: Final = 64 << 20
"""And their bytes, as much as an agent holds of a region's list."""

_Key = tuple[str, ...]
_HALF: Final = "half"


class Said:
    """The newest words of every region."""

    def __init__(self) -> None:
        self._held: dict[str, dict[_Key, tuple[Any, Document]]] = {}
        """by region and by what they are about, with their rank there"""
        self._first: dict[tuple[str, str], str] = {}
        """of the exports that are held the hash of their terms, by region and grant, whichever key signed them"""
        self._bytes: Counter[str] = Counter()
        self.derived: dict[bytes, bytes] = {}
        """by each incarnation that begins where a truncation was accepted, or with a resend, the one that ends there: whichever key signed that, and also where no broker lists it
        any more"""
        self.changes = 0
        """how many words were taken so far"""

    def take(self, document: Document) -> None:
        """Take a genuine document that has its leaf."""
        found = _place_of(document)
        if found is None:
            if (goes_on := _goes_on_of(document)) is not None:
                self.derived[goes_on.incarnation] = goes_on.ended
            return
        key, rank = found
        held = self._held.setdefault(document.region, {})
        if (key in held and held[key][0] >= rank) or self.refuses(document):
            return
        if (export := _export_of(document)) is not None:
            self._first.setdefault((document.region, export.grant), export.terms_hash)
        self._bytes[document.region] += _size(document) - (_size(held[key][1]) if key in held else 0)
        held[key] = rank, document
        self.changes += 1

    def has_room(self, document: Document) -> bool:
        """Whether the word may be taken. One that no later word replaces is not held, and a revocation is one for each grant: both may."""
        found = _place_of(document)
        if found is None or found[0][0] == "revoke":
            return True
        held = self._held.get(document.region, {})
        before = _size(held[found[0]][1]) if found[0] in held else 0
        fits = self._bytes[document.region] - before + _size(document) <= BYTES_MAX
        return fits and (before > 0 or len(held) < WORDS_MAX)

    def refuses(self, document: Document) -> bool:
        """Whether it is the export of other terms than those that the log has under its id: the first stand, whichever key signed them."""
        export = _export_of(document)
        if export is None:
            return False
        return self._first.get((document.region, export.grant), export.terms_hash) != export.terms_hash

    def current(self, listed: Iterable[Document]) -> set[Document]:
        """Of genuine documents those that no later word takes the place of, be it one of these or one that is held."""
        documents = list(listed)
        shown, found = _newest(documents), set[Document]()
        for document in documents:
            place = _place_of(document)
            if place is not None:
                key, rank = place
                held = self._held.get(document.region, {}).get(key)
                if rank < shown[document.region, key] or (held is not None and rank < held[0]):
                    continue
            found.add(document)
        return found

    def beside(self, listed: Iterable[Document]) -> list[Document]:
        """What counts besides these genuine documents, which the regions list now. A half is compared with those under every key: a region
        may have several keys of now, and whoever verifies goes by the highest of their halves."""
        shown = _newest(listed)
        halves: dict[tuple[str, _Key], Any] = {}
        for (region, key), rank in shown.items():
            if key[0] == _HALF:
                place = region, key[:-1]
                halves[place] = max(rank, halves.get(place, rank))
        found = list[Document]()
        for region, held in tuple(self._held.items()):
            for key, (rank, document) in tuple(held.items()):
                if key[0] == _HALF:
                    listed_rank = halves.get((region, key[:-1]))
                    counts = listed_rank is not None and rank > listed_rank
                else:
                    counts = (region, key) not in shown or rank > shown[region, key]
                if counts:
                    found.append(document)
        return found


def _export_of(document: Document) -> ExportGrant | None:
    """None where it is no export, and where it cannot be read."""
    if isinstance(document, Approval) or document.purpose is not Purpose.EXPORT:
        return None
    try:
        return decode_body(document, ExportGrant, Purpose.EXPORT)
    except FelixError:
        return None


def _goes_on_of(document: Document) -> Accepted | None:
    """None where it says nothing of where a link goes on, and where it cannot be read."""
    if isinstance(document, Approval) or document.purpose is not Purpose.STANDING:
        return None
    try:
        standing = decode_body(document, Standing, Purpose.STANDING)
    except FelixError:
        return None
    return accepted_by(standing) if isinstance(standing.truncation, Truncation) else None


def _size(document: Document) -> int:
    return len(document.encode_file())


def _newest(listed: Iterable[Document]) -> dict[tuple[str, _Key], Any]:
    """The highest rank of each region and place."""
    shown: dict[tuple[str, _Key], Any] = {}
    for document in listed:
        found = _place_of(document)
        if found is not None:
            place = document.region, found[0]
            shown[place] = max(found[1], shown.get(place, found[1]))
    return shown


def _place_of(document: Document) -> tuple[_Key, Any] | None:
    """What a document is about, and its rank there as whoever verifies a log ranks it; None for one that no later word replaces, and for
    one that cannot be read. A half, and a word that stops or lets go on, is of the key that signed it, too, which comes last: where its region gave
    that key up, whoever verifies believes it no more, and it takes the place of none under the next."""
    if isinstance(document, Approval):
        return None
    try:
        match document.purpose:
            case Purpose.EXPORT:
                export = decode_body(document, ExportGrant, Purpose.EXPORT)
                return (_HALF, "export", export.grant, document.key), half_rank(export)
            case Purpose.IMPORT:
                accepted = decode_body(document, ImportGrant, Purpose.IMPORT)
                # An acceptance of something else takes no other's place, whatever terms it names.
                place = (_HALF, "import", accepted.grant, *fit_of(accepted), document.key)
                return place, half_rank(accepted)
            case Purpose.STANDING:
                standing = decode_body(document, Standing, Purpose.STANDING)
                if standing.action is StandingAction.REVOKE:
                    # Of several the first holds, and any of them ends the grant.
                    return ("revoke", standing.grant), ()
                if standing.action in (StandingAction.PAUSE, StandingAction.RESUME):
                    return ("stand", standing.grant, document.key), standing_rank(standing)
            case Purpose.DENY:
                entry = decode_body(document, DenyEntry, Purpose.DENY)
                return ("deny", entry.streams, entry.peer, document.key), deny_rank(entry)
    except FelixError:
        pass
    return None
