"""GRANT leaves from grants: the terms that two regions signed, as the transfer register shows them. Pure.

Nothing is inferred: every field is one of the signed terms, or the country that the signed policy gives a region.
Callers: bridge (egress), region ingest (ingress), before the first INTENT or ACK under a grant.
"""

from __future__ import annotations

from audit.document_leaf import document_leaf
from audit.leaf import FieldLineage, Kind, Leaf, Side, Terms
from policy.lineage import field_lineage
from policy.terms import GrantTerms, grant_id


def terms_of(terms: GrantTerms, source_country: str = "", destination_country: str = "") -> Terms:
    """The terms as a leaf keeps them."""
    lineage = field_lineage(terms.transform)
    return Terms(
        purpose=terms.purpose,
        basis=terms.basis.value,
        article=f"GDPR {terms.basis.article}" if terms.basis.article else "",
        mechanism=terms.mechanism,
        reference=terms.reference,
        assessment=terms.transfer_assessment,
        categories=terms.categories,
        exporter=terms.exporter,
        importer=terms.importer,
        source_country=source_country,
        destination_country=destination_country,
        owner=terms.owner,
        not_before_ms=terms.not_before,
        expires_ms=terms.expires,
        lineage=tuple(FieldLineage(field=found.field, action=found.action.value) for found in lineage.fields),
        keep_others=lineage.others_kept,
        filter=terms.transform.filter,
        wildcard=terms.wildcard,
        onward=terms.onward,
        rate_bytes_per_second=terms.rate_bytes,
        budget_bytes=terms.budget_bytes,
    )


def grant_leaf(
    terms: GrantTerms,
    *,
    side: Side,
    time_ms: int,
    actor: str,
    policy_version: int = 0,
    policy_hash: bytes = b"",
    source_country: str = "",
    destination_country: str = "",
    document: bytes,
) -> Leaf:
    """The GRANT leaf. `actor`: who put the grant into force here (SPIFFE id); `document`: the signed grant."""
    terms_hash = terms.hash()
    return document_leaf(
        Kind.GRANT,
        document,
        side=side,
        time_ms=time_ms,
        source_region=terms.from_region,
        destination_region=terms.to_region,
        bridge=terms.bridge,
        stream=terms.stream,
        destination_stream=terms.destination_stream,
        grant_id=grant_id(terms_hash),
        terms_hash=terms_hash,
        policy_version=policy_version,
        policy_hash=policy_hash,
        actor=actor,
        terms=terms_of(terms, source_country, destination_country),
    )
