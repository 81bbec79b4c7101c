"""Legal fields are what the signed terms say, and nothing else."""

from __future__ import annotations

import msgspec

from audit.legal_fields import legal_fields
from policy.terms import Basis, GrantTerms
from policy.transform import Action, FieldRule, TransformSpec

TERMS = GrantTerms(
    stream="acme/ops/departures",
    from_region="us-east",
    to_region="eu-west",
    bridge="spiffe://us-east.acme/bridge/us-to-eu",
    purpose="analytics",
    basis=Basis.SCC,
    mechanism="module two",
    reference="SCC-2026-014",
    transfer_assessment="TIA-7",
    categories=("travel",),
    exporter="Acme Inc.",
    importer="Acme Europe GmbH",
    owner="ops",
    drawn_up_by="spiffe://us-east.acme/operator/alice",
    not_before=1,
    expires=2_000_000_000_000,
    transform=TransformSpec(
        fields=(
            FieldRule(field="tailnum", do=Action.PSEUDONYMIZE),
            FieldRule(field="crew", do=Action.DROP),
        ),
        filter="carrier == 'UA'",
    ),
    budget_bytes=10**9,
)


def test_the_legal_fields_are_those_of_the_terms() -> None:
    fields = msgspec.json.decode(msgspec.json.encode(legal_fields(TERMS, "US", "DE")))
    expected = {
        "purpose": "analytics",
        "basis": "scc",
        "article": "GDPR 46(2)(c)-(d)",
        "mechanism": "module two",
        "reference": "SCC-2026-014",
        "assessment": "TIA-7",
        "categories": ["travel"],
        "exporter": "Acme Inc.",
        "importer": "Acme Europe GmbH",
        "source_country": "US",
        "destination_country": "DE",
        "owner": "ops",
        "not_before_ms": 1,
        "expires_ms": 2_000_000_000_000,
        "filter": "carrier == 'UA'",
        "budget_bytes": 10**9,
        "lineage": [{"field": "tailnum", "action": "pseudonymize"}, {"field": "crew", "action": "drop"}],
    }
    assert fields == expected
