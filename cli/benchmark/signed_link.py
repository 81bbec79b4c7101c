"""The documents that must stand in a link's logs before anything crosses, really signed: policies, grants, approvals.

For synthetic logs (`cli.benchmark.audit_logs`). Keys of logs, witnesses, receipts and policies follow from a seed; the two
authorities, and so the approvers' certificates, are new every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

from audit.document_leaf import document_leaf
from audit.leaf import Kind, Leaf, Side
from audit.trust import Trust
from felix.names import SpiffeId
from keys.authority import RegionAuthority, create_authority
from keys.bundle import AuditKey, RegionBundle
from keys.hybrid import HybridKeyPair
from keys.signing import SigningKey
from policy.approval import Document, sign_approval
from policy.grant import ExportGrant, open_export, sign_export, sign_import
from policy.residency import ResidencyPolicy, open_policy, parse_policy, sign_policy
from policy.signed import SignedDocument
from policy.terms import Basis, GrantTerms
from policy.transform import build_spec

MESH: Final = "bench"
SOURCE: Final = "us-east"
DESTINATION: Final = "eu-west"
BRIDGE: Final = f"spiffe://{SOURCE}.{MESH}/bridge/us-to-eu"
OPERATOR: Final = f"spiffe://{SOURCE}.{MESH}/operator/bench"
ACCEPTOR: Final = f"spiffe://{DESTINATION}.{MESH}/operator/bench"
EGRESS_ORIGIN: Final = f"{SOURCE}.{MESH}/bridge/us-to-eu"
INGRESS_ORIGIN: Final = f"{DESTINATION}.{MESH}/audit"
HOUR_MS: Final = 3_600_000
LIFETIME_MS: Final = 300 * 24 * HOUR_MS
_POLICY: Final = """
version: 1
name: {region}
revision: 1
region: {region}
regions:
  us-east: {{country: US, jurisdiction: US}}
  eu-west: {{country: NL, jurisdiction: EU}}
classes:
  measured: {{description: Made up., streams: [bench/reports/*]}}
{way}s:
  - name: measured
    classes: [measured]
    {toward}: {{regions: [us-east, eu-west]}}
    bases: [scc]
    keys: [keep, drop, hash, pseudonymize]
    lifetime: 900d
    approvals: 1
"""


def seeded_key(seed: int, what: str) -> SigningKey:
    """A key that follows from a seed: never for anything but made-up logs."""
    return SigningKey.from_seed(sha256(f"felix bench {seed} {what}".encode()).digest())


def witness(region: str) -> str:
    """The name of the region's witness."""
    return f"{region}.{MESH}/witness"


class _Grant(NamedTuple):
    body: ExportGrant
    documents: tuple[tuple[Kind, bytes], ...]
    """GRANT, ACCEPT and both approvals, in the order of the log"""


class SignedLink:
    """A link from SOURCE to DESTINATION with one grant per stream, in force from an hour before `start_ms`."""

    def __init__(self, seed: int, streams: Sequence[str], start_ms: int) -> None:
        self._seed, self._start_ms, self._at = seed, start_ms, start_ms - HOUR_MS
        self._authorities: dict[str, RegionAuthority] = {
            region: create_authority(region, MESH, self._at - HOUR_MS) for region in (SOURCE, DESTINATION)
        }
        self.receipt_key = seeded_key(seed, "receipt")
        self.trust = Trust.of(map(self._bundle, (SOURCE, DESTINATION)))
        self._policies = {region: self._policy(region) for region in (SOURCE, DESTINATION)}
        self._grants = {stream: self._sign(stream) for stream in streams}

    def _bundle(self, region: str) -> RegionBundle:
        log = EGRESS_ORIGIN if region == SOURCE else INGRESS_ORIGIN
        receipts = self.receipt_key if region == DESTINATION else seeded_key(self._seed, "no receipt")
        country, jurisdiction = ("US", "US") if region == SOURCE else ("NL", "EU")
        return RegionBundle(
            region=region,
            mesh=MESH,
            country=country,
            jurisdiction=jurisdiction,
            issued_ms=self._at,
            root_pem=self._authorities[region].anchor().root_pem.decode(),
            policy_keys=(self._policy_key(region).verify_key.public,),
            receipt_keys=(receipts.verify_key.public,),
            audit_keys=(
                AuditKey(log, "log", seeded_key(self._seed, log).verify_key.public),
                AuditKey(
                    witness(region), "cosigner", seeded_key(self._seed, witness(region)).verify_key.public
                ),
            ),
            import_key=HybridKeyPair.generate().public.encoded,
        )

    def _policy_key(self, region: str) -> SigningKey:
        return seeded_key(self._seed, f"policy of {region}")

    def _policy(self, region: str) -> tuple[SignedDocument, ResidencyPolicy]:
        way, toward = ("export", "to") if region == SOURCE else ("import", "from")
        text = _POLICY.format(region=region, way=way, toward=toward)
        document = sign_policy(parse_policy(text, region), self._policy_key(region).private_key)
        return document, open_policy(document, self.trust.policy_keys, region)

    def _sign(self, stream: str) -> _Grant:
        terms = GrantTerms(
            stream=stream, from_region=SOURCE, to_region=DESTINATION, bridge=BRIDGE, purpose="measurement", basis=Basis.SCC,
            reference="SCC-BENCH", categories=("made up",), exporter="Bench Inc.", importer="Bench B.V.", owner="bench",
            drawn_up_by=OPERATOR, not_before=self._at, expires=self._start_ms + LIFETIME_MS,
            transform=build_spec(pseudonymize=["name"]),
        )  # fmt: skip
        source, destination = (self._policies[region][1] for region in (SOURCE, DESTINATION))
        keys = self.trust.policy_keys
        export = sign_export(terms, source, self._policy_key(SOURCE).private_key, self._at)
        accepted = sign_import(
            export, destination, self._policy_key(DESTINATION).private_key, keys, ACCEPTOR, self._at
        )
        approvals = [
            sign_approval(
                terms.hash(),
                self._authorities[region].issue_identity(SpiffeId(region, MESH, "approver", "dpo"), self._at),
                self._at,
            )
            for region in (SOURCE, DESTINATION)
        ]
        documents: tuple[tuple[Kind, Document], ...] = (
            (Kind.GRANT, export),
            (Kind.ACCEPT, accepted),
            *((Kind.APPROVE, each) for each in approvals),
        )
        return _Grant(
            open_export(export, keys), tuple((kind, each.encode_file()) for kind, each in documents)
        )

    def crossing(self, stream: str) -> dict[str, Any]:
        """What leaves of crossings say of their grant."""
        body = self._grants[stream].body
        return {
            "grant_id": body.grant, "terms_hash": body.terms.hash(), "policy_version": body.policy_revision,
            "policy_hash": bytes.fromhex(body.policy_hash),
        }  # fmt: skip

    def leaves(self, side: Side) -> list[Leaf]:
        """All that must stand in this side's log before the first crossing."""
        own = SOURCE if side is Side.EGRESS else DESTINATION
        document, policy = self._policies[own]
        made = [
            document_leaf(
                Kind.POLICY,
                document.encode_file(),
                side=side,
                time_ms=self._at,
                actor=OPERATOR,
                source_region=own,
                destination_region=own,
                policy_version=policy.revision,
                policy_hash=policy.hash,
            )
        ]
        for stream, grant in self._grants.items():
            for kind, data in grant.documents:
                said = self.crossing(stream)
                if kind is not Kind.GRANT:
                    said = {name: said[name] for name in ("grant_id", "terms_hash")}
                made.append(
                    document_leaf(
                        kind,
                        data,
                        side=side,
                        time_ms=self._at,
                        actor=OPERATOR,
                        source_region=SOURCE,
                        destination_region=DESTINATION,
                        bridge=BRIDGE,
                        stream=stream,
                        destination_stream=stream,
                        **said,
                    )
                )
        return made
