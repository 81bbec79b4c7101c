"""Terms of a grant that holds, for tests that change one thing at a time."""

from __future__ import annotations

from typing import Any

from policy.terms import Basis, GrantTerms
from policy.transform import build_spec

DAY = 86_400_000


def terms(**changes: Any) -> GrantTerms:
    fields: dict[str, Any] = {
        "stream": "acme/ops/departures",
        "from_region": "us-east",
        "to_region": "eu-west",
        "bridge": "spiffe://us-east.acme/bridge/us-to-eu",
        "purpose": "analytics",
        "basis": Basis.SCC,
        "reference": "SCC-2026-014",
        "exporter": "Acme Inc",
        "importer": "Acme Ltd",
        "owner": "flight operations",
        "drawn_up_by": f"spiffe://{changes.get('from_region', 'us-east')}.acme/operator/alice",
        "not_before": 0,
        "expires": 80 * DAY,
        "transform": build_spec(pseudonymize=["tailnum"], drop=["hour", "minute"]),
    }
    return GrantTerms(**{**fields, **changes})
