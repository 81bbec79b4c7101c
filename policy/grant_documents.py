"""What regions sign about a grant: its two halves, later words on it, deny entries; how they are signed and opened.

The **export grant** carries the terms and is signed by the source region's policy key; the **import grant** names the same terms
hash and is signed by the destination's. A `Standing` pauses, resumes or revokes a grant, or says where its link goes on
(policy.truncation); a `DenyEntry` forbids a stream whatever is granted. The grant book decides what they amount to together
(policy.grant).

Invariants: an `open_…` returns only what a trusted key of the region signed that the document speaks for; what `sign_…` makes, the
region's policy in force allows. Pure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from felix.errors import Code, RequestError
from felix.names import NamePattern, SpiffeId, parse_region
from policy.approval import ApprovalBody, require_size
from policy.quantity import Instant
from policy.residency import APPROVALS_MAX, Decision, ResidencyPolicy, decide_grant
from policy.signed import (
    Purpose,
    SignatureError,
    SignedDocument,
    Trusted,
    canonical,
    decode_body,
    sign,
    verify,
)
from policy.terms import GrantId, GrantTerms, Hash, Line, Number, OptionalLine, grant_id
from policy.truncation import Truncation

EVERYWHERE: Final = "*"

ApprovalCount = Annotated[int, msgspec.Meta(ge=0, le=APPROVALS_MAX)]


class GrantError(RequestError):
    """A grant that does not hold."""

    default_code = Code.GRANT_INVALID


class ExportGrant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body that the source region signs. `approvals`, `separate`: what its policy asked for when it was made."""

    version: Literal[2] = 2
    grant: GrantId
    terms: GrantTerms
    terms_hash: Hash
    approvals: ApprovalCount
    separate: bool
    policy_revision: Number
    policy_hash: Hash
    signed_at: Number

    def __post_init__(self) -> None:
        found = self.terms.hash()
        if self.terms_hash != found.hex() or self.grant != grant_id(found):
            raise ValueError("its id and terms hash are not those of the terms it carries")


class ImportGrant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body that the destination region signs. `accepted_by`: SPIFFE id of the operator who accepted."""

    version: Literal[2] = 2
    grant: GrantId
    terms_hash: Hash
    stream: str
    destination_stream: str
    from_region: str
    to_region: str
    bridge: str
    accepted_by: str
    approvals: ApprovalCount
    separate: bool
    policy_revision: Number
    policy_hash: Hash
    signed_at: Number

    def __post_init__(self) -> None:
        # Bounded and well formed: what is listed here may get into another region's log. Whether it fits an export, `agree` says.
        NamePattern(self.stream)
        NamePattern(self.destination_stream)
        parse_region(self.from_region)
        parse_region(self.to_region)
        if SpiffeId.parse(self.bridge).kind != "bridge":
            raise ValueError(f"{self.bridge} is not a bridge identity")
        acceptor = SpiffeId.parse(self.accepted_by)
        if (acceptor.kind, acceptor.region) != ("operator", self.to_region):
            raise ValueError(f"{self.accepted_by} is not an operator of {self.to_region}")


class StandingAction(StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    REVOKE = "revoke"
    ACCEPT_TRUNCATION = "accept-truncation"
    """a link that stopped because what had crossed is gone goes on (policy.truncation)"""
    RESEND = "resend"
    """the source goes back for records that stayed, under the terms that hold now (policy.truncation)"""


class Standing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One region's later word on a grant. `sequence` grows with each one by that region on that grant."""

    version: Literal[1] = 1
    grant: GrantId
    action: StandingAction
    region: str
    sequence: Number
    at: Number
    by: Line
    reason: OptionalLine = ""
    truncation: Truncation | msgspec.UnsetType = msgspec.UNSET
    """of `accept-truncation` and `resend`, and of nothing else"""

    def __post_init__(self) -> None:
        goes_back = self.action in (StandingAction.ACCEPT_TRUNCATION, StandingAction.RESEND)
        if goes_back != isinstance(self.truncation, Truncation):
            raise ValueError(
                "accept-truncation and resend name where the link goes on, and nothing else does"
            )


class DenyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One region's signed no to a stream or pattern, towards one other region or `*`. `lifted` takes it back."""

    version: Literal[1] = 1
    streams: str
    peer: str
    region: str
    sequence: Number
    at: Number
    by: Line
    reason: OptionalLine = ""
    lifted: bool = False

    def __post_init__(self) -> None:
        NamePattern(self.streams)
        parse_region(self.region)
        if self.peer != EVERYWHERE:
            parse_region(self.peer)


def sign_export(
    terms: GrantTerms, policy: ResidencyPolicy, key: Ed25519PrivateKey, now: int
) -> SignedDocument:
    """The source region's half. Raises ResidencyError where its policy does not allow these terms, GrantError
    where they have expired already, SignatureError where they are longer than other regions take."""
    if policy.region != terms.from_region:
        raise GrantError(f"The terms are for data of {terms.from_region}; this region is {policy.region}.")
    _refuse_expired(terms, now)
    decision = decide_grant(policy, terms, terms.pattern, now)
    if not decision.allowed:
        raise decision.error()
    body = ExportGrant(
        grant=grant_id(terms.hash()),
        terms=terms,
        terms_hash=terms.hash().hex(),
        approvals=_asked(decision),
        separate=_separate(decision),
        policy_revision=policy.revision,
        policy_hash=policy.hash.hex(),
        signed_at=now,
    )
    signed = sign(Purpose.EXPORT, policy.region, canonical(body), key)
    require_size("export", signed.encode_file())
    return signed


def open_export(document: SignedDocument, trusted: Trusted) -> ExportGrant:
    """A verified export grant. Raises SignatureError."""
    verify(document, trusted)
    _refuse_old(document)
    export = decode_body(document, ExportGrant, Purpose.EXPORT)
    if export.terms.from_region != document.region:
        raise SignatureError(
            f"An export grant for data of {export.terms.from_region} is signed by {document.region}."
        )
    return export


def open_import(document: SignedDocument, trusted: Trusted) -> ImportGrant:
    """A verified import grant. Raises SignatureError."""
    verify(document, trusted)
    _refuse_old(document)
    accepted = decode_body(document, ImportGrant, Purpose.IMPORT)
    if accepted.to_region != document.region:
        raise SignatureError(f"An import grant for {accepted.to_region} is signed by {document.region}.")
    return accepted


def sign_import(
    export: SignedDocument,
    policy: ResidencyPolicy,
    key: Ed25519PrivateKey,
    trusted: Trusted,
    accepted_by: str,
    now: int,
) -> SignedDocument:
    """The destination region's half, made from the export grant it was handed. `accepted_by`: an operator's SPIFFE id.

    Raises SignatureError where the export grant does not verify, GrantError where it is for another region or
    expired, ResidencyError where the destination's own policy does not allow the terms.
    """
    offered = open_export(export, trusted)
    terms = offered.terms
    if policy.region != terms.to_region:
        raise GrantError(
            f"The grant {offered.grant} is for {terms.to_region}; this region is {policy.region}."
        )
    _refuse_expired(terms, now)
    decision = decide_grant(policy, terms, terms.pattern, now)
    if not decision.allowed:
        raise decision.error()
    body = ImportGrant(
        grant=offered.grant,
        terms_hash=offered.terms_hash,
        stream=terms.stream,
        destination_stream=terms.destination_stream,
        from_region=terms.from_region,
        to_region=terms.to_region,
        bridge=terms.bridge,
        accepted_by=accepted_by,
        approvals=_asked(decision),
        separate=_separate(decision),
        policy_revision=policy.revision,
        policy_hash=policy.hash.hex(),
        signed_at=now,
    )
    return sign(Purpose.IMPORT, policy.region, canonical(body), key)


def sign_standing(standing: Standing, key: Ed25519PrivateKey) -> SignedDocument:
    """A pause, a resume or a revocation, by one of the grant's two regions."""
    return sign(Purpose.STANDING, standing.region, canonical(standing), key)


def sign_deny(entry: DenyEntry, key: Ed25519PrivateKey) -> SignedDocument:
    """A deny entry, or its lifting."""
    return sign(Purpose.DENY, entry.region, canonical(entry), key)


class OutdatedError(SignatureError):
    """A grant that a former version made, and that is not in force any more."""


class _Versioned(msgspec.Struct):
    version: int = 0
    grant: str = ""


def _refuse_old(document: SignedDocument) -> None:
    """Raises OutdatedError for a grant of version 0.1, whose approvers were a text and not signatures."""
    try:
        found = msgspec.json.decode(document.body, type=_Versioned)
    except msgspec.MsgspecError:
        return
    if found.version == 1:
        raise OutdatedError(
            f"The grant {found.grant[:18]} was made by Felix 0.1, where approvals were texts and not signatures; it is not in "
            "force any more.",
            hint="Make it anew with `felix bridge allow`, have it accepted and approved.",
        )


def _asked(decision: Decision) -> int:
    return max(rule.approvals for rule in decision.approvals)


def _separate(decision: Decision) -> bool:
    return any(rule.separate for rule in decision.approvals)


def _refuse_expired(terms: GrantTerms, now: int) -> None:
    if terms.expires <= now:
        raise GrantError(
            f"The terms expired at {Instant(terms.expires)}.", code=Code.GRANT_EXPIRED, hint="Make new terms."
        )


Fit = tuple[str, str, str, str, str, str]
"""What an acceptance accepts."""


def fit_of(accepted: ImportGrant) -> Fit:
    """Of two acceptances of one fit both agree with an export, or neither."""
    return (
        accepted.terms_hash,
        accepted.stream,
        accepted.destination_stream,
        accepted.from_region,
        accepted.to_region,
        accepted.bridge,
    )


def approves(export: ExportGrant, body: ApprovalBody) -> bool:
    """True where the approval is of these terms, by somebody of one of their two regions and of the bridge's mesh. A grant's id is made of
    a part of the terms' hash: an approval that names the id may be of other terms."""
    terms = export.terms
    return (
        body.terms_hash == export.terms_hash
        and body.region in (terms.from_region, terms.to_region)
        and SpiffeId.parse(body.approver).mesh == terms.bridge_id.mesh
    )


def agree(export: ExportGrant, accepted: ImportGrant) -> bool:
    """True where both halves name the same terms, stream, direction and bridge."""
    terms = export.terms
    return (
        export.terms_hash == accepted.terms_hash
        and terms.stream == accepted.stream
        and terms.destination_stream == accepted.destination_stream
        and (terms.from_region, terms.to_region) == (accepted.from_region, accepted.to_region)
        and terms.bridge == accepted.bridge
    )
