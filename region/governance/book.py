"""The book of grants, rebuilt only where documents changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from felix.peer import TrustBundle
from keys.bundle import RegionBundle
from policy.approval import Document
from policy.grant import DOCUMENTS_MAX, GrantBook
from policy.signed import SignedDocument

CHANGED_MAX: Final = 256
"""Documents that a book is changed by; where more come at once, a new one costs less."""


class MadeBook(NamedTuple):
    """A book, and what it was made of."""

    keys: dict[str, tuple[bytes, ...]]
    bundles: dict[str, RegionBundle]
    documents: dict[int, Document]
    """by object"""
    book: GrantBook


def make_book(
    before: MadeBook | None,
    grants: Iterable[Document],
    lasting: tuple[SignedDocument, ...],
    keys: dict[str, tuple[bytes, ...]],
    bundles: dict[str, RegionBundle],
    trust: TrustBundle,
) -> MadeBook:
    """The book of these documents: of the book `before`, only the changed grants are rebuilt, unless keys changed too. `lasting`: what forbids
    or lifts, verified when it was accepted, whatever keys its region has now."""
    documents = (*grants, *lasting)
    accepted = frozenset(lasting)
    # Parsed once, so what stayed is the same object; `before` keeps what went, so no other object has its id.
    now = {id(document): document for document in documents}
    if before is not None and (before.keys, before.bundles) == (keys, bundles) and not before.book.left_out:
        come = [document for name, document in now.items() if name not in before.documents]
        gone = [document for name, document in before.documents.items() if name not in now]
        if len(come) + len(gone) <= CHANGED_MAX and len(now) <= DOCUMENTS_MAX:
            # The same document may stand in the store under two names.
            gone = [document for document in gone if document not in documents]
            return MadeBook(keys, bundles, now, before.book.changed(gone, come, accepted))
    return MadeBook(keys, bundles, now, GrantBook(documents, keys, trust, accepted=accepted))
