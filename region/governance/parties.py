"""The parties of a grant and of a deny entry, who alone have a say in it: a region takes documents only of those that they concern. Pure. `own`: the region that asks."""

from __future__ import annotations

from felix.errors import Code, RequestError
from felix.names import SpiffeId
from policy.approval import ApprovalBody
from policy.grant import EVERYWHERE, DenyEntry, ExportGrant, GrantError, ImportGrant, Standing, approves
from policy.terms import GrantTerms
from policy.truncation import Truncation


def require_party(own: str, actor: SpiffeId, bridge: str, from_region: str, to_region: str) -> None:
    """A grant concerns this region; a bridge may bring only documents of its own grants."""
    require_ends(own, from_region, to_region)
    if actor.kind == "bridge" and str(actor) != bridge:
        raise RequestError(f"{actor} cannot bring a grant of {bridge}.", code=Code.FORBIDDEN)


def require_ends(own: str, from_region: str, to_region: str) -> None:
    """A grant concerns this region. Raises RequestError(WRONG_REGION)."""
    if own not in (from_region, to_region):
        raise RequestError(
            f"The grant is between {from_region} and {to_region}; this is {own}.",
            code=Code.WRONG_REGION,
        )


def require_end(own: str, standing: Standing, ends: tuple[str, ...]) -> None:
    """Only the two regions of a grant have a say in it. Raises GrantError(GRANT_INVALID). Of a grant that is not known here
    anybody may speak: where it comes later, its book asks who did."""
    if ends and own not in ends:
        raise RequestError(
            f"The grant {standing.grant} is between {' and '.join(ends)}; this is {own}.",
            code=Code.WRONG_REGION,
        )
    if ends and standing.region not in ends:
        raise GrantError(
            f"The grant {standing.grant} is between {' and '.join(ends)}; {standing.region} has no say in it.",
            hint="One of the grant's two regions must sign it.",
        )


def require_source(standing: Standing, ends: tuple[str, ...]) -> None:
    """Where a shard goes on, after a truncation or for a resend, its source decides (policy.truncation). Raises GrantError."""
    if isinstance(standing.truncation, Truncation) and ends and standing.region != ends[0]:
        raise GrantError(
            f"From where on a stream crosses under {standing.grant} is for {ends[0]} to say, its source; this is signed by "
            f"{standing.region}.",
            hint=f"Have it decided there, if the link is truncated: felix bridge resume {standing.grant} --accept-truncation.",
        )


def require_concerned(own: str, entry: DenyEntry) -> None:
    """A deny entry concerns this region. Raises RequestError(WRONG_REGION)."""
    if entry.region != own and entry.peer not in (EVERYWHERE, own):
        raise RequestError(
            f"The entry is between {entry.region} and {entry.peer}; this is {own}.",
            code=Code.WRONG_REGION,
        )


def require_say(own: str, body: ApprovalBody, export: ExportGrant | None) -> ExportGrant:
    """An approval is of terms that are held here, and by somebody of this mesh and of one of their two regions. Returns the export grant
    that has the terms. Raises GrantError, RequestError(WRONG_REGION)."""
    if export is None or export.terms_hash != body.terms_hash:
        raise GrantError(
            f"{own} does not have the terms that {body.approver} approved as {body.grant}.",
            code=Code.GRANT_MISSING,
            hint="Put the export grant first.",
        )
    terms = export.terms
    require_ends(own, terms.from_region, terms.to_region)
    if not approves(export, body):
        raise GrantError(
            f"The grant {body.grant} is between {terms.from_region} and {terms.to_region}; {body.approver} has no say "
            "in it.",
            hint="An approver of one of the grant's two regions must sign it.",
        )
    return export


def ends_of(terms: GrantTerms) -> tuple[str, str]:
    """Source and destination."""
    return terms.from_region, terms.to_region


def other_terms(accepted: ImportGrant) -> GrantError:
    """What to raise where an acceptance does not fit its export."""
    return GrantError(
        f"{accepted.to_region} accepted other terms than those of {accepted.grant}: another hash, stream, region or bridge.",
        code=Code.GRANT_MISMATCH,
        hint="Accept the export grant as it was signed.",
    )
