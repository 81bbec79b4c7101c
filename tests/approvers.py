"""Authorities and approvers for tests of grants, made once: keys and certificates cost more than anything they test."""

from __future__ import annotations

from functools import cache

import msgspec

from felix.identity import Identity
from felix.names import SpiffeId
from felix.peer import TrustBundle
from keys.authority import RegionAuthority, create_authority
from policy.approval import Approval, Document, sign_approval
from policy.grant import ExportGrant
from policy.signed import Purpose

DAY = 86_400_000
MADE_MS = DAY // 2
"""When the authorities and the approvers' identities were made."""


@cache
def authority(region: str, mesh: str = "acme") -> RegionAuthority:
    return create_authority(region, mesh, MADE_MS)


@cache
def approver(name: str, region: str = "us-east", made_ms: int = MADE_MS) -> Identity:
    return authority(region).issue_identity(SpiffeId(region, "acme", "approver", name), made_ms)


@cache
def roots(*regions: str) -> TrustBundle:
    return TrustBundle(authority(region).anchor() for region in regions or ("us-east", "eu-west"))


@cache
def approvals(terms_hash: bytes, at: int = DAY, *regions: str) -> tuple[Approval, ...]:
    """One approval for each region (by default of us-east and eu-west), by its approver dpo."""
    return tuple(
        sign_approval(terms_hash, approver("dpo", region), at) for region in regions or ("us-east", "eu-west")
    )


def with_approvals(*documents: Document, at: int = DAY) -> tuple[Document, ...]:
    """The documents, and for every export grant among them one approval of each of the two regions."""
    found = list(documents)
    for document in documents:
        if document.purpose is Purpose.EXPORT:
            try:
                export = msgspec.json.decode(document.body, type=ExportGrant)
            except msgspec.MsgspecError:
                continue
            found += approvals(bytes.fromhex(export.terms_hash), at)
    return tuple(found)
