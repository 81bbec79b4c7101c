"""This region's words on where its links go on (policy.truncation), as its audit log has them: under a policy key that it has now, or under a former one below that key's
end. Blocks.

What a former key signed counts at no broker any more, and whoever has that key and writes the metadata store can put any word there. In the log he gets no leaf: no broker takes what a
former key signed. So what is signed again (`felix bridge sign-again`) comes from the log, by the rules by which it is verified (audit.keys_in_log). Callers: the service, which lists
them for operators, and the intake, which takes them again.

So do the terms of the grants that these words are on: one that ended may have been removed from the store since, and no broker takes its export again, which is under the former key.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from felix.errors import FelixError
from keys.bundle import RegionBundle
from policy.grant import Standing, open_export
from policy.signed import Purpose, SignedDocument, decode_body, verify
from policy.truncation import Truncation
from region.evidence.document_log import DocumentLog

log = logging.getLogger("felix.region.governance")


def logged_truncations(logged: DocumentLog, own: RegionBundle) -> dict[bytes, Standing]:
    """The truncations that the region accepted, and the resends that it asked for, by their documents, oldest leaf first."""
    keys = logged.keys_of(own)
    found: dict[bytes, Standing] = {}
    for index, data in logged.lasting():
        try:
            if (document := _own_word(data, own, Purpose.STANDING)) is None:
                continue
            standing = decode_body(document, Standing, Purpose.STANDING)
            if isinstance(standing.truncation, Truncation) and standing.region == own.region:
                verify(document, keys.policy_keys_at(index))
                found[data] = standing
        except FelixError as error:
            log.warning("the word of leaf %d is not signed again: %s", index, error)
    return found


def logged_exports(logged: DocumentLog, own: RegionBundle, grants: Collection[str]) -> dict[str, bytes]:
    """The exports of these grants that the region signed, by grant, of each its first leaf. A grant's id follows from its terms, so whichever leaf it is, they are the same."""
    keys = logged.keys_of(own)
    found: dict[str, bytes] = {}
    for index, data in logged.exports():
        try:
            if (document := _own_word(data, own, Purpose.EXPORT)) is None:
                continue
            grant = open_export(document, keys.policy_keys_at(index)).grant
        except FelixError as error:
            log.warning("the export of leaf %d is not told: %s", index, error)
            continue
        if grant in grants:
            found.setdefault(grant, data)
    return found


def _own_word(data: bytes, own: RegionBundle, purpose: Purpose) -> SignedDocument | None:
    """The document, where it says that this region signed it for this purpose. Raises FelixError where it is none."""
    document = SignedDocument.parse(data)
    return document if document.region == own.region and document.purpose is purpose else None
