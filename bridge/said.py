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
        self._bytes: Counter[str] = Counter()
        self.changes = 0
        """how many words were taken so far"""

    def take(self, document: Document) -> None:
        """Take a genuine document that has its leaf."""
        found = _place_of(document)
        if found is None:
            return
        key, rank = found
        held = self._held.setdefault(document.region, {})
        if key in held and (held[key][0] >= rank or _of_other_terms(document, held[key][1])):
            return
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
        """Whether it is the export of other terms than those that the log has under its id: the first stand."""
        if isinstance(document, Approval) or document.purpose is not Purpose.EXPORT:
            return False
        found = _place_of(document)
        if found is None:
            return False
        held = self._held.get(document.region, {}).get(found[0])
        return held is not None and _of_other_terms(document, held[1])

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
        """What counts besides these genuine documents, which the regions list now."""
        shown = _newest(listed)
        return [
            document
            for region, held in tuple(self._held.items())
            for key, (rank, document) in tuple(held.items())
            if (rank > shown[region, key] if (region, key) in shown else key[0] != _HALF)
        ]


def _of_other_terms(document: Document, held: Document) -> bool:
    """Of two documents of one place: whether they are exports of different terms, whose hashes begin alike."""
    if isinstance(document, Approval) or isinstance(held, Approval) or document.purpose is not Purpose.EXPORT:
        return False
    one, other = (decode_body(each, ExportGrant, Purpose.EXPORT) for each in (document, held))
    return one.terms_hash != other.terms_hash


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
    one that cannot be read. A word that stops or lets go on is of the key that signed it, too: where its region gave that key up, whoever verifies
    believes it no more, and it takes the place of none under the next."""
    if isinstance(document, Approval):
        return None
    try:
        match document.purpose:
            case Purpose.EXPORT:
                export = decode_body(document, ExportGrant, Purpose.EXPORT)
                return (_HALF, "export", export.grant), half_rank(export)
            case Purpose.IMPORT:
                accepted = decode_body(document, ImportGrant, Purpose.IMPORT)
                # An acceptance of something else takes no other's place, whatever terms it names.
                return (_HALF, "import", accepted.grant, *fit_of(accepted)), half_rank(accepted)
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
