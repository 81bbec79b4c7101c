"""What documents claim to be about, before they are verified; and which of too many documents a grant book leaves out.

Claims are never trusted. A refusal uses them to name a rejected document, and they group documents by grant, so that a grant
book without room for all drops whole grants: an export without its revocation would allow what was forbidden.

Pure. For policy.grant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from felix.errors import FelixError
from felix.names import NamePattern
from policy.approval import Approval, Document
from policy.signed import Purpose, SignedDocument

_ENDLESS: Final = 1 << 63


class Claim(NamedTuple):
    """What a document says of itself. `pattern` None: it names no stream; `ends`: ms, when its grant ends at the latest."""

    grant: str
    pattern: NamePattern | None
    from_region: str
    to_region: str
    ends: int = _ENDLESS


class _Terms(msgspec.Struct):
    stream: str = ""
    from_region: str = ""
    to_region: str = ""
    expires: int = _ENDLESS


class _Body(_Terms):
    grant: str = ""
    terms: _Terms | None = None
    action: str = ""
    at: int = _ENDLESS


def read_claim(document: Document) -> Claim | None:
    """What a document claims, or None where it cannot be read or is about no grant."""
    if isinstance(document, SignedDocument) and document.purpose in (Purpose.DENY, Purpose.POLICY):
        return None
    try:
        body = msgspec.json.decode(document.body, type=_Body)
        stated: _Terms = body if body.terms is None else body.terms
        pattern = NamePattern(stated.stream) if stated.stream else None
    except (msgspec.MsgspecError, ValueError, RecursionError, FelixError):
        return None
    if document.purpose is Purpose.EXPORT:
        ends = stated.expires
    elif document.purpose is Purpose.STANDING and body.action == "revoke":
        ends = body.at
    else:
        ends = _ENDLESS
    return Claim(body.grant, pattern, stated.from_region, stated.to_region, ends)


def select_documents(
    documents: Sequence[Document], documents_max: int
) -> tuple[tuple[Document, ...], tuple[Claim, ...]]:
    """As many documents as a grant book holds, in their order, and the grants that were left out.

    Deny entries stay before all else. Then grants stay with all that is said about them, or not at all: those that end last
    first; those without an export grant, which allow nothing, last of all.
    """
    if len(documents) <= documents_max:
        return tuple(documents), ()
    groups: dict[str, list[int]] = {}
    claims: dict[str, Claim] = {}
    denies: list[int] = []
    for index, document in enumerate(documents):
        if not isinstance(document, Approval) and document.purpose is Purpose.DENY:
            denies.append(index)
            continue
        claim = read_claim(document) or Claim("", None, "", "", 0)
        groups.setdefault(claim.grant, []).append(index)
        held = claims.get(claim.grant)
        if held is None:
            claims[claim.grant] = claim
        else:
            named = claim if document.purpose is Purpose.EXPORT or held.pattern is None else held
            claims[claim.grant] = named._replace(ends=min(held.ends, claim.ends))
    exported = {
        claims_grant
        for claims_grant, indexes in groups.items()
        if any(documents[index].purpose is Purpose.EXPORT for index in indexes)
    }
    kept = set(denies[:documents_max])
    left_out: list[Claim] = []
    for grant in sorted(
        groups, key=lambda grant: (grant in exported, claims[grant].ends, grant), reverse=True
    ):
        # Where denials alone are too many, nothing is known for sure, and nothing is granted.
        if len(denies) <= documents_max and len(kept) + len(groups[grant]) <= documents_max:
            kept.update(groups[grant])
        else:
            left_out.append(claims[grant])
    return tuple(documents[index] for index in sorted(kept)), tuple(left_out)
