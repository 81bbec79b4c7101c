"""Signed documents for tests of audit logs: policies, both halves of a grant, approvals; and their leaves.

Regions, keys and the link are those of `audit_log`; everything is really signed, by the region that must have signed it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import msgspec
from audit_log import BRIDGE, OPERATOR, POLICY_SEEDS, STREAM, TIME_MS, authority, key, trust

from audit.agreement import kind_of
from audit.document_leaf import document_leaf
from audit.leaf import Kind, Leaf, Side
from felix.identity import Identity
from felix.names import SpiffeId
from policy.approval import Approval, Document, sign_approval
from policy.grant import (
    DenyEntry,
    ExportGrant,
    ImportGrant,
    Standing,
    StandingAction,
    open_export,
    open_import,
    sign_deny,
    sign_export,
    sign_import,
    sign_standing,
)
from policy.residency import ResidencyPolicy, open_policy, parse_policy, sign_policy
from policy.signed import SignedDocument
from policy.terms import Basis, GrantTerms
from policy.transform import build_spec

HOUR_MS = 3_600_000
ACCEPTOR = "spiffe://eu-west.acme/operator/bob"
_POLICY = """
version: 1
name: {region}
revision: {revision}
region: {region}
regions:
  us-east: {{country: US, jurisdiction: US}}
  eu-west: {{country: IE, jurisdiction: EU}}
  ap-south: {{country: IN, jurisdiction: IN}}
classes:
  operational: {{description: Flights., streams: [acme/ops/*, acme/payments/*]}}
{way}s:
  - name: rule
    classes: [operational]
    {toward}: {{regions: [us-east, eu-west, ap-south]}}
    bases: [scc, adequacy]
    keys: [keep, drop, hash, pseudonymize]
    headers: [x-batch]
    trace: true
    lifetime: 900d
    onward: true
    wildcards: true
    approvals: {approvals}
    separate: {separate}
"""


def signing_key(region: str) -> Any:
    return key(POLICY_SEEDS[region]).private_key


@cache
def policy_document(
    region: str,
    approvals: int = 1,
    separate: bool = False,
    revision: int = 1,
    *,
    country: str = "US",
    more_streams: int = 0,
) -> SignedDocument:
    """us-east's policy is about exports, the others' about imports. `country`: of us-east; `more_streams`: patterns of a class beside, which make it long."""
    way, toward = ("export", "to") if region == "us-east" else ("import", "from")
    text = _POLICY.format(
        region=region,
        revision=revision,
        way=way,
        toward=toward,
        approvals=approvals,
        separate=str(separate).lower(),
    )
    text = text.replace(
        "us-east: {country: US, jurisdiction: US}",
        f"us-east: {{country: {country}, jurisdiction: {country}}}",
    )
    if more_streams:
        streams = ", ".join(f"acme/a{number:030}/*" for number in range(more_streams))
        text = text.replace(
            "classes:\n", f"classes:\n  other: {{description: Others., streams: [{streams}]}}\n"
        )
    return sign_policy(parse_policy(text, region), signing_key(region))


def opened_policy(document: SignedDocument) -> ResidencyPolicy:
    return open_policy(document, trust("us-east", "eu-west", "ap-south").policy_keys, "a test")


@cache
def approver(region: str, name: str = "dpo") -> Identity:
    return authority(region).issue_identity(SpiffeId(region, "acme", "approver", name), TIME_MS - HOUR_MS)


@cache
def _opened(export: SignedDocument) -> ExportGrant:
    """Verified once: worlds of thousands of leaves ask for its id with each of them."""
    return open_export(export, trust().policy_keys)


class Signed(NamedTuple):
    """A grant with all that it needs."""

    terms: GrantTerms
    source_policy: SignedDocument
    destination_policy: SignedDocument
    export: SignedDocument
    accepted: SignedDocument
    approvals: tuple[Approval, ...]

    @property
    def body(self) -> ExportGrant:
        return _opened(self.export)

    @property
    def half(self) -> ImportGrant:
        return open_import(self.accepted, trust().policy_keys)

    @property
    def grant(self) -> str:
        return self.body.grant

    def documents(self) -> tuple[Document, ...]:
        """In the order in which a log has them."""
        return (self.source_policy, self.destination_policy, self.export, self.accepted, *self.approvals)


def make_terms(**changes: Any) -> GrantTerms:
    fields: dict[str, Any] = {
        "stream": STREAM,
        "from_region": "us-east",
        "to_region": "eu-west",
        "bridge": BRIDGE,
        "purpose": "analytics",
        "basis": Basis.SCC,
        "reference": "SCC-2026-014",
        "categories": ("travel",),
        "exporter": "Acme Inc.",
        "importer": "Acme Europe GmbH",
        "owner": "ops",
        "drawn_up_by": OPERATOR,
        "not_before": TIME_MS - HOUR_MS,
        "expires": TIME_MS + 10**9,
        "transform": build_spec(pseudonymize=["tailnum"]),
    }
    return GrantTerms(**(fields | changes))


@cache
def signed_grant(approvals: int = 1, separate: bool = False, **changes: Any) -> Signed:
    """A grant in force, signed an hour before the first leaf. `approvals`: as many on each side, by dpo, dpo1, dpo2 …"""
    source, destination = (policy_document(region, approvals, separate) for region in ("us-east", "eu-west"))
    terms, at = make_terms(**changes), TIME_MS - HOUR_MS + 1_000
    export = sign_export(terms, opened_policy(source), signing_key("us-east"), at)
    accepted = sign_import(
        export, opened_policy(destination), signing_key("eu-west"), trust().policy_keys, ACCEPTOR, at
    )
    names = ["dpo", *(f"dpo{number}" for number in range(1, approvals))][:approvals]
    signed = tuple(
        sign_approval(terms.hash(), approver(region, name), at)
        for region in ("us-east", "eu-west")
        for name in names
    )
    return Signed(terms, source, destination, export, accepted, signed)


def standing(
    grant: str, action: StandingAction, region: str = "us-east", sequence: int = 1, at: int = TIME_MS
) -> SignedDocument:
    body = Standing(grant=grant, action=action, region=region, sequence=sequence, at=at, by="alice")
    return sign_standing(body, signing_key(region))


def deny_entry(
    streams: str, region: str = "us-east", sequence: int = 1, lifted: bool = False, at: int = TIME_MS
) -> SignedDocument:
    body = DenyEntry(
        streams=streams, peer="*", region=region, sequence=sequence, at=at, by="alice", lifted=lifted
    )
    return sign_deny(body, signing_key(region))


def paper_leaf(
    document: Document, signed: Signed, side: Side = Side.EGRESS, time_ms: int = TIME_MS, **changes: Any
) -> Leaf:
    """The leaf of a document as bridge and broker write it."""
    kind, terms = kind_of(document), signed.terms
    fields: dict[str, Any] = {
        "source_region": terms.from_region,
        "destination_region": terms.to_region,
        "grant_id": signed.grant,
        "terms_hash": terms.hash(),
        "bridge": terms.bridge,
        "stream": terms.stream,
        "destination_stream": terms.destination_stream,
    }
    if kind is Kind.GRANT:
        body = signed.body
        fields |= {"policy_version": body.policy_revision, "policy_hash": bytes.fromhex(body.policy_hash)}
    elif kind is Kind.POLICY:
        assert isinstance(document, SignedDocument)
        policy = parse_policy(document.body.decode(), "a test")
        fields = {
            "source_region": policy.region,
            "destination_region": policy.region,
            "policy_version": policy.revision,
            "policy_hash": policy.hash,
        }
    elif kind is Kind.DENY_ENTRY:
        fields = {"source_region": document.region, "destination_region": document.region, "action": "deny"}
    elif kind is Kind.STANDING:
        fields["action"] = msgspec.json.decode(document.body)["action"]
    leaf = document_leaf(kind, document.encode_file(), side=side, time_ms=time_ms, actor=OPERATOR, **fields)
    return Leaf(msgspec.structs.replace(leaf.header, **changes), b"", leaf.version) if changes else leaf


def grant_leaves(signed: Signed, side: Side = Side.EGRESS, time_ms: int = TIME_MS) -> list[Leaf]:
    """All that must stand in a log of this side before the first crossing."""
    own = signed.source_policy if side is Side.EGRESS else signed.destination_policy
    documents = (own, signed.export, signed.accepted, *signed.approvals)
    return [paper_leaf(document, signed, side, time_ms) for document in documents]
