"""The leaf of any signed document, by what it is: which kind, about which grant, between which regions. Pure.

The leaf repeats of the document what finds it, and a revocation's reason; whoever reads the log takes every statement from the
document itself. Callers: bridge (egress), region (ingress), before the document is in force
or is brought anywhere; a revocation's leaf comes after what was on its way under the grant.
"""

from __future__ import annotations

from typing import Final

import msgspec

from audit.document_leaf import document_leaf
from audit.leaf import Kind, Leaf, Side
from policy.approval import Approval, Document
from policy.grant import EVERYWHERE, DenyEntry, ExportGrant, ImportGrant, Standing, StandingAction
from policy.residency import ResidencyPolicy
from policy.signed import Purpose, decode_body
from policy.terms import GrantTerms

DENY: Final = "deny"
LIFT: Final = "lift"


def signed_leaf(
    document: Document,
    *,
    own_region: str,
    time_ms: int,
    actor: str,
    terms: GrantTerms | None = None,
    policy: ResidencyPolicy | None = None,
    drain_until_ms: int = 0,
    side: Side | None = None,
) -> Leaf:
    """The leaf of a verified document. `terms`: of the grant that an approval or standing is about, where they are known;
    `policy`: the document's own, where it is one; `drain_until_ms`: of a revocation. `side`: which log; by default the side of
    `own_region` in the grant. Raises SignatureError where the document cannot be read.
    """

    def leaf(kind: Kind, regions: tuple[str, str], **fields: object) -> Leaf:
        stands = side or (Side.EGRESS if regions[0] == own_region else Side.INGRESS)
        return document_leaf(
            kind,
            document.encode_file(),
            side=stands,
            time_ms=time_ms,
            actor=actor,
            source_region=regions[0],
            destination_region=regions[1],
            **fields,  # type: ignore[arg-type]
        )

    def about(grant: str, region: str) -> tuple[tuple[str, str], dict[str, object]]:
        """Regions and names of a grant; of one that is not known, the region that speaks."""
        if terms is None:
            return (region, region), {"grant_id": grant}
        return (terms.from_region, terms.to_region), {
            "grant_id": grant,
            "terms_hash": terms.hash(),
            "bridge": terms.bridge,
            "stream": terms.stream,
            "destination_stream": terms.destination_stream,
        }

    if isinstance(document, Approval):
        claim = document.claim
        regions, fields = about(claim.grant, claim.region)
        fields["terms_hash"] = bytes.fromhex(claim.terms_hash)
        return leaf(Kind.APPROVE, regions, **fields)
    match document.purpose:
        case Purpose.EXPORT:
            export = decode_body(document, ExportGrant, Purpose.EXPORT)
            terms = export.terms
            regions, fields = about(export.grant, document.region)
            return leaf(
                Kind.GRANT,
                regions,
                policy_version=export.policy_revision,
                policy_hash=bytes.fromhex(export.policy_hash),
                **fields,
            )
        case Purpose.IMPORT:
            half = decode_body(document, ImportGrant, Purpose.IMPORT)
            return leaf(
                Kind.ACCEPT,
                (half.from_region, half.to_region),
                grant_id=half.grant,
                terms_hash=bytes.fromhex(half.terms_hash),
                bridge=half.bridge,
                stream=half.stream,
                destination_stream=half.destination_stream,
                policy_version=half.policy_revision,
                policy_hash=bytes.fromhex(half.policy_hash),
            )
        case Purpose.STANDING:
            standing = decode_body(document, Standing, Purpose.STANDING)
            regions, fields = about(standing.grant, standing.region)
            if standing.action is not StandingAction.REVOKE:
                return leaf(Kind.STANDING, regions, action=standing.action.value, **fields)
            # As the document in the same leaf says it, for whoever lists the log.
            found = leaf(Kind.REVOKE, regions, sentence=standing.reason, **fields)
            return msgspec.structs.replace(
                found, header=msgspec.structs.replace(found.header, drain_until_ms=drain_until_ms)
            )
        case Purpose.DENY:
            entry = decode_body(document, DenyEntry, Purpose.DENY)
            peer = entry.region if entry.peer == EVERYWHERE else entry.peer
            return leaf(Kind.DENY_ENTRY, (entry.region, peer), action=LIFT if entry.lifted else DENY)
    assert document.purpose is Purpose.POLICY and policy is not None
    return leaf(
        Kind.POLICY,
        (document.region, document.region),
        policy_version=policy.revision,
        policy_hash=policy.hash,
    )
