"""What a leaf says about a grant and a policy: taken from the signed documents, never inferred. Pure."""

from __future__ import annotations

from audit.leaf import FieldLineage, Header, Kind, Leaf, Side, Terms
from policy.grant import ExportGrant
from policy.lineage import field_lineage
from policy.signed import SignedDocument


def grant_leaf(
    export: ExportGrant,
    document: SignedDocument,
    *,
    side: Side,
    actor: str,
    time_ms: int,
    source_country: str,
    destination_country: str,
) -> Leaf:
    """A GRANT leaf with the terms in full, and the signed export grant as its region wrote it."""
    terms = export.terms
    lineage = field_lineage(terms.transform)
    return Leaf(
        Header(
            kind=Kind.GRANT,
            side=side,
            time_ms=time_ms,
            source_region=terms.from_region,
            destination_region=terms.to_region,
            bridge=terms.bridge,
            stream=terms.stream,
            destination_stream=terms.destination_stream,
            grant_id=export.grant,
            terms_hash=bytes.fromhex(export.terms_hash),
            policy_version=export.policy_revision,
            policy_hash=bytes.fromhex(export.policy_hash),
            actor=actor,
            document=document.encode_file(),
            terms=Terms(
                purpose=terms.purpose,
                basis=terms.basis.value,
                article=f"GDPR {terms.basis.article}" if terms.basis.article else "",
                reference=terms.reference,
                assessment=terms.transfer_assessment,
                categories=terms.categories,
                exporter=terms.exporter,
                importer=terms.importer,
                source_country=source_country,
                destination_country=destination_country,
                owner=terms.owner,
                approvers=terms.approvers,
                not_before_ms=terms.not_before,
                expires_ms=terms.expires,
                lineage=tuple(
                    FieldLineage(field=field.field, action=field.action.value) for field in lineage.fields
                ),
                keep_others=lineage.others_kept,
                filter=terms.transform.filter,
                wildcard=terms.wildcard,
                onward=terms.onward,
                rate_bytes_per_second=terms.rate_bytes,
                budget_bytes=terms.budget_bytes,
            ),
        )
    )
