"""Authorities and approvers for tests of grants, made once: keys and certificates cost more than anything they test."""

from __future__ import annotations

from functools import cache

from felix.identity import Identity, TrustBundle
from felix.names import SpiffeId
from keys.authority import RegionAuthority, create_authority

DAY = 86_400_000
MADE_MS = 5 * DAY
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
