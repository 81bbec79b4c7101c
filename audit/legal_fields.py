"""Legal fields of a grant, as reports name them, from its signed terms. Pure.

Nothing is inferred: every field is one of the signed terms, or the country that a signed policy gives a region. No leaf
of version 2 states any of them; readers verify the document first (audit.agreement), which is who calls this.
"""

from __future__ import annotations

from audit.leaf import FieldLineage, Terms
from policy.lineage import field_lineage
from policy.terms import GrantTerms


def legal_fields(terms: GrantTerms, source_country: str = "", destination_country: str = "") -> Terms:
    """The legal fields of these terms. Countries: those that a signed policy gives to the regions; approvers are not the terms' to say."""
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
        lineage=tuple(FieldLineage(field=found.field, action=found.told) for found in lineage.fields),
        keep_others=lineage.others_kept,
        filter=terms.transform.filter,
        wildcard=terms.wildcard,
        onward=terms.onward,
        rate_bytes_per_second=terms.rate_bytes,
        budget_bytes=terms.budget_bytes,
    )
