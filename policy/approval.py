"""Approvals: one person's signature over the terms of a grant, made with an identity that can do nothing else.

An approval names a grant, the hash of its terms, the region for which it speaks, and the approver
(`spiffe://<region>.<mesh>/approver/<name>`). The approver's key (ECDSA P-256, felix.identity) signs its canonical bytes
for the purpose `grant-approval`; the certificate chain goes with it. It can be made offline, on a machine that has
neither region nor broker, and is brought as a file or a token.

Checked by `open_approval`, in this order:

1. the body is of a version that is known here, and its grant id is that of its terms hash;
2. the approver is an identity of kind `approver` of the region that the approval speaks for;
3. the chain leads to the root of that region in its bundle, and was valid at `at` (felix.peer, steps 1 to 5); it is that path and has no certificate
   besides, since the approver's signature is over the body alone: whoever carries an approval would put into it what he likes;
4. the signature is by the leaf's key, over these bytes and for this purpose.

Invariants:
- a file or token is accepted only as exactly the bytes that `encode_file` or `encode_token` write;
- parsing proves nothing: only `open_approval` does, against roots that the caller trusts;
- of an ECDSA signature anybody makes another one that holds: the broker of the approver's region takes the one that `sign_approval` gives (`refuse_twin`), and
  what was signed before that was so holds in either form;
- an approval holds for as long as the grant: its certificate need not live that long, but it was valid at `at`. The
  approver states `at`; the broker of the approver's region takes an approval only while its certificate is valid.

Pure. Anyone may call.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from felix.errors import FelixError, RequestError, of_later_release
from felix.frames import CONTROL_BYTES_MAX
from felix.identity import CHAIN_BYTES_MAX, Identity
from felix.names import SpiffeId, parse_region
from felix.peer import SIGNATURE_BYTES_MAX, TrustAnchor, TrustBundle, encode_chain, verify_chain
from felix.remembered import Remembered, digest_of
from policy.signed import (
    BODIES_BYTES_MAX,
    FILE_BYTES_MAX,
    VERDICTS_BYTES_MAX,
    Purpose,
    SignatureError,
    SignedDocument,
    canonical,
    encode_file,
    encode_token,
    parse_exactly,
)
from policy.terms import GrantId, Hash, Number, OptionalLine, grant_id

APPROVAL_BYTES_MAX: Final = 2 * CHAIN_BYTES_MAX
"""A chain of the largest size, its line feeds escaped, and a body of some 500 bytes."""
KIND_BYTES_MAX: Final[Mapping[str, int]] = {
    "export": 128 << 10,
    "import": 16 << 10,
    "approval": 2 * APPROVAL_BYTES_MAX,
    "standing": 16 << 10,
    "deny": 16 << 10,
    "policy": CONTROL_BYTES_MAX - 256,
}
"""Of a document's file, by the kind under which regions list it to each other and put it there: what is longer nobody takes, and refuses before
it is read. Each fits one request and one page of a list, whose frames have `CONTROL_BYTES_MAX` bytes, around a policy some 100. An export has some 2 KiB; one with 256 transform rules over the longest field paths in ASCII fits, and `sign_export` signs no
longer one. The others are of a few texts of 256 characters."""
CLOCK_SKEW_MS: Final = 300_000
"""An approver's clock may be so much ahead; what is dated later than that does not count yet."""
ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of P-256 (SEC 2, 2.4.2)."""
APPROVERS_MAX: Final = 256
"""People of one region whose approvals of one grant are kept, by brokers, agents and verifiers of a log: many times what any
policy requires (`policy.residency.APPROVALS_MAX`). Of more, those who approved first; the others change nothing.
"""
APPROVER: Final = "approver"
"""The kind of identity that approves; it opens no session."""


class ApprovalBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the approver signs. `at`: ms since the Unix epoch, by the approver's clock."""

    version: Literal[1] = 1
    grant: GrantId
    terms_hash: Hash
    region: str
    approver: str
    at: Number
    comment: OptionalLine = ""

    def __post_init__(self) -> None:
        if self.grant != grant_id(bytes.fromhex(self.terms_hash)):
            raise ValueError("its grant id is not that of its terms hash")
        approver = SpiffeId.parse(self.approver)
        if approver.kind != APPROVER or approver.region != parse_region(self.region):
            raise ValueError(f"{self.approver} is not an approver of {self.region}")

    @property
    def name(self) -> str:
        """The approver's name: what `separate` compares, and what a policy's `approvers` lists."""
        return name_of(self.approver)


def name_of(identity: str) -> str:
    """The last part of a valid SPIFFE id."""
    return identity.rpartition("/")[2]


def earliest(body: ApprovalBody) -> tuple[int, str, str]:
    """Of two approvals of one grant the lesser is kept: by when, whom, and with what words it was signed."""
    return body.at, body.approver, body.comment


def has_come(body: ApprovalBody, now: int) -> bool:
    """Whether the approval's time, by the approver's clock, had come at `now` (ms)."""
    return body.at <= now + CLOCK_SKEW_MS


class ApprovalRule(NamedTuple):
    """How many people of one region must approve, and who counts. `approvers` empty: every approver of the region.

    `rule`: the policy's rule that asks; empty where the grant itself does.
    """

    approvals: int
    separate: bool = False
    approvers: tuple[str, ...] = ()
    rule: str = ""


class Tally(NamedTuple):
    """How far one region's approvals have come, by names of approvers, sorted."""

    region: str
    needed: int
    approved: tuple[str, ...]
    """who counts"""
    not_counted: tuple[tuple[str, str], ...] = ()
    """who signed, and why that does not count"""

    @property
    def missing(self) -> int:
        return max(0, self.needed - len(self.approved))

    def __str__(self) -> str:
        who = f"approved by {', '.join(self.approved)}" if self.approved else "nobody has approved it"
        more = f", {self.missing} missing" if self.missing else ""
        rest = "".join(f"; {name} does not count: {why}" for name, why in self.not_counted)
        return f"{self.region}: {len(self.approved)} of {self.needed} ({who}{rest}){more}"


def tally(
    rule: ApprovalRule,
    region: str,
    approvals: Iterable[ApprovalBody],
    terms_hash: str,
    concerned: Collection[str],
    now: int,
) -> Tally:
    """Who of a region has approved the terms, as a rule counts. `approvals` are verified, and of that region and mesh;
    `concerned`: names of those who drew the terms up or accepted them."""
    approved: set[str] = set()
    others: dict[str, str] = {}
    for body in approvals:
        name = body.name
        if body.terms_hash != terms_hash:
            continue
        if not has_come(body, now):
            others[name] = "its time is still to come"
        elif rule.separate and name in concerned:
            others[name] = "who drew a grant up or accepted it does not approve it"
        elif rule.approvers and name not in rule.approvers:
            others[name] = f"the rule {rule.rule} does not name this approver"
        else:
            approved.add(name)
    excluded = tuple((name, why) for name, why in sorted(others.items()) if name not in approved)
    return Tally(region, rule.approvals, tuple(sorted(approved)), excluded)


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: Any
    chain: Annotated[str, msgspec.Meta(max_length=CHAIN_BYTES_MAX)]
    purpose: Literal["grant-approval"] = "grant-approval"
    signature: str


@dataclass(frozen=True, slots=True)
class Approval:
    """A body, the approver's certificate chain (PEM, leaf first) and the signature (DER). That it holds is
    `open_approval`'s to say."""

    body: bytes
    chain_pem: bytes
    signature: bytes

    @property
    def purpose(self) -> Purpose:
        """What the signature is for."""
        return Purpose.APPROVAL

    @property
    def claim(self) -> ApprovalBody:
        """The body, as it stands. Raises SignatureError where it is none."""
        return _decode(self.body)

    @property
    def region(self) -> str:
        """The region that the approval claims to speak for. Raises SignatureError."""
        return self.claim.region

    def _file(self) -> _File:
        signature = urlsafe_b64encode(self.signature).rstrip(b"=").decode()
        return _File(body=msgspec.json.decode(self.body), chain=self.chain_pem.decode(), signature=signature)

    def encode_file(self) -> bytes:
        """Readable JSON that ends in a line feed."""
        return encode_file(self._file())

    def encode_token(self) -> str:
        """One line of base64url without padding."""
        return encode_token(self._file())

    @classmethod
    def parse(cls, data: bytes | str) -> Self:
        """A file or a token. Raises SignatureError for anything that was not written by this class."""
        return parse_exactly(data, 2 * APPROVAL_BYTES_MAX, cls._from_json, cls._file, _unreadable)

    @classmethod
    def _from_json(cls, data: bytes) -> Self:
        try:
            file = msgspec.json.decode(data, type=_File)
            padding = "=" * (-len(file.signature) % 4)
            signature = urlsafe_b64decode(file.signature.encode("ascii") + padding.encode())
            chain = file.chain.encode()
            approval = cls(canonical(file.body), chain, signature)
            if len(signature) > SIGNATURE_BYTES_MAX:
                raise _unreadable(f"a signature of {len(signature)} bytes is none")
            if _rewritten(chain) != chain:
                raise _unreadable("its certificate chain is not in canonical form")
            _decode(approval.body)
        except msgspec.ValidationError as error:
            raise _unreadable(str(error)) from None
        except (msgspec.MsgspecError, x509.InvalidVersion, ValueError, OverflowError, RecursionError):
            raise _unreadable("it is not an approval") from None
        return approval


Document = SignedDocument | Approval
"""All that regions and people sign about a grant."""


def _unreadable(reason: str) -> SignatureError:
    return SignatureError(
        f"The approval cannot be read: {reason.removesuffix('.')}.",
        hint=of_later_release(reason) or "Have it made again with `felix bridge approve`.",
    )


def _rewritten(chain: bytes) -> bytes:
    """The chain without comments and other spellings, so that no two files are the same approval."""
    return encode_chain(x509.load_pem_x509_certificates(chain))


_claims: Final = Remembered[ApprovalBody](BODIES_BYTES_MAX // 4)
_documents: Final = Remembered[Document | tuple[str, str]](BODIES_BYTES_MAX // 2)
_verdicts: Final = Remembered[str](VERDICTS_BYTES_MAX)


def _decode(body: bytes) -> ApprovalBody:
    return _claims.ask(digest_of(body), lambda: _read(body), lambda _: 4 * len(body))


def _read(body: bytes) -> ApprovalBody:
    try:
        claim = msgspec.json.decode(body, type=ApprovalBody)
    except FelixError as error:
        raise _unreadable(error.sentence) from None
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise _unreadable(str(error)) from None
    if canonical(claim) != body:
        raise _unreadable("its body is not in canonical form")
    return claim


def require_size(kind: str, data: bytes) -> None:
    """Raises SignatureError where a document of this kind cannot be so long."""
    most = KIND_BYTES_MAX.get(kind, FILE_BYTES_MAX)
    if len(data) > most:
        raise SignatureError(
            f"A document of the kind {kind!r} has {len(data)} bytes, and {most} are allowed.",
            hint="Fetch it again from the region that signed it, or shorten what it says and sign it anew.",
        )


def parse_document(data: bytes | str) -> Document:
    """A signed document or an approval, from a file or a token. Raises SignatureError."""
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    found = _documents.ask(digest_of(raw), lambda: _parsed(raw), _weight)
    if isinstance(found, tuple):
        sentence, hint = found
        raise SignatureError(sentence, hint=hint)
    return found


def _weight(found: Document | tuple[str, str]) -> int:
    if isinstance(found, tuple):
        return 2 * sum(map(len, found))
    return len(found.body) + (len(found.chain_pem) if isinstance(found, Approval) else 0)


def _parsed(raw: bytes) -> Document | tuple[str, str]:
    """The document, or why it cannot be read and what to do. Both are remembered, as what `verify` finds is."""
    try:
        return Approval.parse(raw) if _purpose_of(raw) == Purpose.APPROVAL else SignedDocument.parse(raw)
    except SignatureError as error:
        return error.sentence, error.hint


class _Purposed(msgspec.Struct):
    purpose: str = ""


def _purpose_of(raw: bytes) -> str:
    """The purpose that a file or token claims; empty if it claims none. Not trusted: the parser checks it."""
    if len(raw) > FILE_BYTES_MAX:
        return ""
    try:
        packed = (
            raw if raw.startswith(b"{") else urlsafe_b64decode(raw.strip() + b"=" * (-len(raw.strip()) % 4))
        )
        return msgspec.json.decode(packed, type=_Purposed).purpose
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""


def sign_approval(terms_hash: bytes, identity: Identity, at: int, comment: str = "") -> Approval:
    """The approval of the terms with this hash by `identity`, at `at` (ms).

    Raises SignatureError where the identity is no approver's, RequestError for an unusable comment.
    """
    approver = identity.spiffe_id
    if approver.kind != APPROVER:
        raise SignatureError(
            f"{approver} is of kind {approver.kind}; approvals are signed by identities of kind {APPROVER}.",
            hint=f"Issue one, of the same person's name: felix identity issue {approver.name} --kind {APPROVER}.",
        )
    body = canonical(
        ApprovalBody(
            grant=grant_id(terms_hash),
            terms_hash=terms_hash.hex(),
            region=approver.region,
            approver=str(approver),
            at=at,
            comment=comment,
        )
    )
    try:
        _decode(body)
    except SignatureError as error:
        raise RequestError(error.sentence, hint="See docs/policy.md.") from None
    return Approval(body, identity.chain_pem, _lower(identity.sign(Purpose.APPROVAL, body)))


def _lower(signature: bytes) -> bytes:
    """Of a signature (r, s) and its twin (r, n - s), which anybody makes of it and which holds as well, the one with the lower s (SEC 1, 4.1.4)."""
    r, s = decode_dss_signature(signature)
    return encode_dss_signature(r, min(s, ORDER - s))


def refuse_twin(approval: Approval) -> None:
    """Raises SignatureError where the signature of an approval that holds is the higher one of the two: so that nobody makes two files of a new one. Releases of before signed either,
    and what they signed holds."""
    if _lower(approval.signature) != approval.signature:
        raise SignatureError(
            f"The signature of the approval by {approval.claim.approver} is the higher one of two that hold.",
            hint="Have the approver sign again with this release: felix bridge approve.",
        )


def open_approval(approval: Approval, trust: TrustBundle) -> ApprovalBody:
    """A verified approval. `trust`: the roots of the regions whose approvers may speak.

    Raises SignatureError(GRANT_INVALID) with the step that failed.
    """
    claim = approval.claim
    approver = SpiffeId.parse(claim.approver)
    anchor = trust.anchor(approver.trust_domain)
    if anchor is None:
        raise SignatureError(
            f"The approval is by {claim.approver}, and the root of {approver.trust_domain} is not known here.",
            hint="Take that region's bundle.json and trust it first: felix region trust FILE --fingerprint …",
        )
    # Remembered, because a changed grant book is a new one, of mostly the same documents.
    question = digest_of(
        approval.body, approval.chain_pem, approval.signature, anchor.region, anchor.mesh, anchor.root_pem
    )
    failure = _verdicts.ask(question, lambda: _failure(approval, anchor, claim.at), len)
    if failure:
        raise SignatureError(failure, hint="Do not use it; have the approver sign again.")
    return claim


def refuse_ended(approval: Approval, trust: TrustBundle, now: int) -> None:
    """Raises SignatureError where the approver's certificate is not valid at `now` (ms): an approval is handed in
    while its certificate lives, so that a former approver cannot backdate one."""
    claim = open_approval(approval, trust)
    anchor = trust.anchor(SpiffeId.parse(claim.approver).trust_domain)
    assert anchor is not None
    failure = _failure(approval, anchor, now)
    if failure:
        raise SignatureError(
            failure, hint="Renew the approver's identity, and have the grant approved with the new one."
        )


def late_ms(approval: Approval, now: int) -> int:
    """For how long (ms) the approver's certificate had ended at `now`, of an approval that holds: 0 where it had not, or by no more than
    CLOCK_SKEW_MS. So long it may take from who took it to who writes the audit log, whose clock may be ahead."""
    chain = x509.load_pem_x509_certificates(approval.chain_pem)
    ended_ms = min(int(certificate.not_valid_after_utc.timestamp() * 1000) for certificate in chain)
    return now - ended_ms if now - ended_ms > CLOCK_SKEW_MS else 0


def refuse_late(approval: Approval, now: int) -> None:
    """Raises SignatureError where an approval that holds gets no leaf any more in the audit log of its approver's region, as his certificate has
    ended."""
    if by_ms := late_ms(approval, now):
        raise SignatureError(
            f"The approval by {approval.claim.approver} came {by_ms // 1000:,} s after the certificate of its approver had ended.",
            hint="Renew the approver's identity, and have the grant approved with the new one.",
        )


def _failure(approval: Approval, anchor: TrustAnchor, at: int) -> str:
    """Why an approval does not hold under this root at `at`, or nothing."""
    claim = approval.claim
    try:
        peer = verify_chain(approval.chain_pem, TrustBundle([anchor]), at, (APPROVER,), exact=True)
    except FelixError as error:
        return f"The approval by {claim.approver} does not hold: {error.sentence}"
    if str(peer.spiffe_id) != claim.approver:
        return f"The approval names {claim.approver}, and its certificate {peer.spiffe_id}."
    if not peer.signed(Purpose.APPROVAL, approval.body, approval.signature):
        return f"The signature of {claim.approver} does not hold: the approval was forged or changed."
    return ""
