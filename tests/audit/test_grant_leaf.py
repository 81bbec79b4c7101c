"""GRANT leaves say what the signed terms say."""

from __future__ import annotations

from hashlib import sha256

from audit.grant_leaf import grant_leaf
from audit.leaf import DOCUMENT_BYTES_MAX, Kind, Side, decode_leaf, encode_leaf, leaf_row
from policy.terms import Basis, GrantTerms, grant_id
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


def test_a_grant_stands_in_its_leaf_in_full() -> None:
    leaf = grant_leaf(
        TERMS,
        side=Side.EGRESS,
        time_ms=5,
        actor="spiffe://us-east.acme/operator/alice",
        policy_version=3,
        policy_hash=b"p" * 32,
        source_country="US",
        destination_country="DE",
        document=b"signed",
    )
    again = decode_leaf(encode_leaf(leaf))
    assert again == leaf and again.header.kind is Kind.GRANT
    assert again.header.terms_hash == TERMS.hash() and again.header.grant_id == grant_id(TERMS.hash())
    row = leaf_row(again)
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
        "approvers": [],
        "expires_ms": 2_000_000_000_000,
        "filter": "carrier == 'UA'",
        "keep_others": True,
        "budget_bytes": 10**9,
        "document": b"signed",
        "lineage": [("tailnum", "pseudonymize", "tailnum"), ("crew", "drop", "crew")],
    }
    assert {name: row[name] for name in expected} == expected


def test_a_document_that_is_too_long_is_named_by_its_hash_alone() -> None:
    leaf = grant_leaf(
        TERMS, side=Side.INGRESS, time_ms=5, actor="a", document=b"x" * (DOCUMENT_BYTES_MAX + 1)
    )
    assert leaf.header.document == b"" and leaf.header.terms_hash == TERMS.hash()
    assert leaf.header.document_sha256 == sha256(b"x" * (DOCUMENT_BYTES_MAX + 1)).digest()
    encode_leaf(leaf)
