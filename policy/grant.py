"""Grants: two signed documents that let one stream cross, and the book that answers whether it may right now.

The **export grant** carries the terms and is signed by the source region's policy key; the **import grant** names
the same terms hash and is signed by the destination's. Each states how many approvals its region asks for, and on each
side so many different people must have signed the terms' hash (policy.approval). Without all of this nothing moves.
Later changes are signed documents too: a `Standing` pauses, resumes or revokes, or accepts a truncation; a `DenyEntry`
forbids a stream whatever is granted.

States of a grant (TRANSITIONS is the table that the code runs on)::

    offered ──complete──▶ active ◀──pause/resume──▶ paused
       └──────────── revoke, expire ──────────────▶ revoked, expired   (final)

Checks of `GrantBook.check`, in this order; each has its own refusal:

 1. no signed deny entry names the stream          8. each side has the approvals that its half asks for
 2. there is a grant for stream and regions        9. it is not paused by either region
 3. both documents are there                      10. the record is not on its way back, nor travels onward unasked
 4. both signatures hold                          11. the region's policy in force allows it, and has the approvals that it
 5. both name the same terms                          asks for
 6. the bridge is the one that is named, and the  12. its byte budget is not used up
    grant is not revoked
 7. the grant has begun, and has not expired

Invariants:
- a `GrantBook` believes nothing that no trusted key signed: what cannot be verified is kept as a problem to report,
  never as a grant, and a forged revocation revokes nothing;
- deny wins over allow, revoked wins over everything later;
- of several standings by one region the one with the highest sequence holds: an old resume cannot be played again
  over a newer pause;
- of several exports, or imports of one region, under one id the one that was signed last holds;
- a book is made of at most DOCUMENTS_MAX documents. What is too much is left out by whole grants, those first that end first,
  and is refused and reported; what denies is never left out, so that leaving out allows nothing.

Pure: no clock, no disk. Brokers on both sides, the agent and the commands ask; what the book is made of comes from metadata.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Annotated, Final, Literal, NamedTuple, Self

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from felix.errors import Code, RequestError
from felix.identity import TrustBundle
from felix.names import NamePattern, SpiffeId, StreamName, parse_region
from policy.approval import (
    Approval,
    ApprovalBody,
    ApprovalRule,
    Document,
    Tally,
    name_of,
    open_approval,
    tally,
)
from policy.claims import read_claim, select_documents
from policy.pattern import PatternSet
from policy.quantity import Instant, Size
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
from policy.truncation import Accepted, Live, Truncation, chain

DOCUMENTS_MAX: Final = 100_000
"""Documents in one book: each is verified once when the book is made."""
DECISIONS_MAX: Final = 4_096
"""Remembered policy decisions; beyond that the memory starts anew."""
ANEW_FROM: Final = 8
"""Where more than one of so many grants changes, a new book costs less than a changed one."""
EVERYWHERE: Final = "*"
NEVER: Final = 1 << 63
"""A time (ms) that does not come."""

ApprovalCount = Annotated[int, msgspec.Meta(ge=0, le=APPROVALS_MAX)]


class GrantError(RequestError):
    """A grant that does not hold."""

    default_code = Code.GRANT_INVALID


# ------------------------------------------------------------------------------------------------ documents


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
        NamePattern(self.stream)
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
    where they have expired already."""
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
    return sign(Purpose.EXPORT, policy.region, canonical(body), key)


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


# ----------------------------------------------------------------------------------------- the state machine


class GrantState(StrEnum):
    OFFERED = "offered"
    ACTIVE = "active"
    PAUSED = "paused"
    REVOKED = "revoked"
    EXPIRED = "expired"


class GrantEvent(StrEnum):
    COMPLETE = "complete"
    """both halves are there, and on each side the approvals that they ask for"""
    PAUSE = "pause"
    RESUME = "resume"
    REVOKE = "revoke"
    EXPIRE = "expire"


TRANSITIONS: Final[Mapping[tuple[GrantState, GrantEvent], GrantState]] = {
    (GrantState.OFFERED, GrantEvent.COMPLETE): GrantState.ACTIVE,
    (GrantState.ACTIVE, GrantEvent.PAUSE): GrantState.PAUSED,
    (GrantState.PAUSED, GrantEvent.RESUME): GrantState.ACTIVE,
    (GrantState.OFFERED, GrantEvent.REVOKE): GrantState.REVOKED,
    (GrantState.ACTIVE, GrantEvent.REVOKE): GrantState.REVOKED,
    (GrantState.PAUSED, GrantEvent.REVOKE): GrantState.REVOKED,
    (GrantState.OFFERED, GrantEvent.EXPIRE): GrantState.EXPIRED,
    (GrantState.ACTIVE, GrantEvent.EXPIRE): GrantState.EXPIRED,
    (GrantState.PAUSED, GrantEvent.EXPIRE): GrantState.EXPIRED,
}
"""What is not in the table leaves the state as it is: `revoked` and `expired` are final."""


def advance(state: GrantState, event: GrantEvent) -> GrantState:
    """The state after an event."""
    return TRANSITIONS.get((state, event), state)


# ------------------------------------------------------------------------------------------------- the answer


class RefusalKind(StrEnum):
    """Why nothing crosses; one sentence and one code for each."""

    DENIED = "denied"
    NO_GRANT = "no-grant"
    IMPORT_MISSING = "import-missing"
    EXPORT_MISSING = "export-missing"
    FORGED = "forged"
    OUTDATED = "outdated"
    LEFT_OUT = "left-out"
    TERMS_MISMATCH = "terms-mismatch"
    WRONG_BRIDGE = "wrong-bridge"
    REVOKED = "revoked"
    NOT_YET = "not-yet"
    EXPIRED = "expired"
    NOT_APPROVED = "not-approved"
    PAUSED = "paused"
    LOOP = "loop"
    ONWARD = "onward"
    AGAINST_POLICY = "against-policy"
    BUDGET = "budget"


CODES: Final[Mapping[RefusalKind, Code]] = {
    RefusalKind.DENIED: Code.RESIDENCY_DENIED,
    RefusalKind.NO_GRANT: Code.GRANT_MISSING,
    RefusalKind.IMPORT_MISSING: Code.GRANT_MISSING,
    RefusalKind.EXPORT_MISSING: Code.GRANT_MISSING,
    RefusalKind.FORGED: Code.GRANT_INVALID,
    RefusalKind.OUTDATED: Code.GRANT_INVALID,
    RefusalKind.LEFT_OUT: Code.GRANT_MISSING,
    RefusalKind.NOT_APPROVED: Code.NOT_APPROVED,
    RefusalKind.TERMS_MISMATCH: Code.GRANT_MISMATCH,
    RefusalKind.WRONG_BRIDGE: Code.IDENTITY_REFUSED,
    RefusalKind.REVOKED: Code.GRANT_REVOKED,
    RefusalKind.NOT_YET: Code.GRANT_NOT_YET,
    RefusalKind.EXPIRED: Code.GRANT_EXPIRED,
    RefusalKind.PAUSED: Code.PAUSED,
    RefusalKind.LOOP: Code.LOOP_REFUSED,
    RefusalKind.ONWARD: Code.RESIDENCY_DENIED,
    RefusalKind.AGAINST_POLICY: Code.RESIDENCY_DENIED,
    RefusalKind.BUDGET: Code.BUDGET_EXHAUSTED,
}


class Attempt(NamedTuple):
    """What somebody wants to do: move records of `stream` from one region to the other.

    `bridge` None: whichever the grant names. `path`: the regions that the records have been in, oldest first; the source
    region itself may be among them.
    """

    stream: StreamName
    from_region: str
    to_region: str
    bridge: SpiffeId | None = None
    path: tuple[str, ...] = ()


class Allowed(NamedTuple):
    """It may cross, under this grant. `export` and `accepted` are the two bodies that agree."""

    export: ExportGrant
    accepted: ImportGrant
    terms_hash: bytes
    destination_stream: StreamName
    decision: Decision | None
    """of the policy that was asked; None where none was"""

    @property
    def grant(self) -> str:
        return self.export.grant

    @property
    def terms(self) -> GrantTerms:
        return self.export.terms


class Refusal(NamedTuple):
    """It may not, for this reason. `grant` is empty where no grant is involved; `rule` where no policy rule is."""

    kind: RefusalKind
    sentence: str
    hint: str
    grant: str = ""
    rule: str = ""

    @property
    def code(self) -> Code:
        return CODES[self.kind]

    def error(self) -> GrantError:
        """The refusal as an error."""
        return GrantError(self.sentence, code=self.code, hint=self.hint)


def check_path(grant: str, terms: GrantTerms, path: tuple[str, ...]) -> Refusal | None:
    """The refusal of one record for where it has been, or None.

    For the bridge, which asks the book once for a batch and this for every record that has a path.
    """
    elsewhere = [region for region in path if region != terms.from_region]
    if terms.to_region in elsewhere:
        return Refusal(
            RefusalKind.LOOP,
            f"The records have been in {terms.to_region} already; they do not return there.",
            "Grant the stream in one direction only, or filter what came from there.",
            grant,
        )
    if elsewhere and not terms.onward:
        return Refusal(
            RefusalKind.ONWARD,
            f"The records came from {elsewhere[0]}, and the grant {grant} does not allow onward transfer.",
            "Make a grant that allows it, where the policy does.",
            grant,
        )
    return None


class Problem(NamedTuple):
    """A document that the book does not believe, and why."""

    document: Document
    sentence: str


class _Unbelieved(NamedTuple):
    """What an unverified grant claims to be about: enough to say that it was not believed, and nothing else."""

    grant: str
    pattern: NamePattern
    from_region: str
    to_region: str
    kind: RefusalKind
    sentence: str
    hint: str


@dataclass(slots=True)
class _Entry:
    grant: str
    export: ExportGrant | None = None
    imports: dict[str, list[ImportGrant]] = field(default_factory=dict)
    """By the region that signed them: who signs under another region's id stands beside it, not in its place."""
    approvals: dict[SpiffeId, ApprovalBody] = field(default_factory=dict)
    speaking: dict[str, tuple[ApprovalBody, ...]] = field(default_factory=dict)
    """By region, once the book is complete: those of the grant's own mesh."""
    approved_from: int = NEVER
    """When all approvals that the halves ask for were found to be there. Later they still are: a book does not change, and
    time only adds to those that count. Asked at every read."""
    counted_from: dict[tuple[str, ApprovalRule], int] = field(default_factory=dict)
    """The same for a region's rules."""

    def count_speaking(self) -> None:
        """Of the approvals that are there, those of the grant's own mesh."""
        if self.export is not None:
            mesh = self.export.terms.bridge_id.mesh
            for who, body in sorted(self.approvals.items()):
                if who.mesh == mesh:
                    self.speaking[who.region] = (*self.speaking.get(who.region, ()), body)

    def halves(self) -> Iterator[ImportGrant]:
        for held in self.imports.values():
            yield from held

    def newest_half(self) -> ImportGrant | None:
        """What is shown where there is no export: the acceptance that was signed last."""
        return max(self.halves(), key=_signed, default=None)


class GrantView(NamedTuple):
    """One grant for a list: its state at the time asked for."""

    grant: str
    state: GrantState
    export: ExportGrant | None
    accepted: ImportGrant | None
    paused_by: tuple[str, ...]
    approvals: tuple[Tally, ...] = ()
    """how far the source's and the destination's approvals have come, as their halves ask"""

    @property
    def waits_for(self) -> str:
        """What an offered grant waits for, and who paused a paused one; else empty."""
        if self.state is GrantState.PAUSED:
            return f"paused by {' and '.join(self.paused_by)}"
        if self.state is not GrantState.OFFERED:
            return ""
        if self.export is None:
            return "waits for the source's half"
        if self.accepted is None:
            return f"waits for {self.export.terms.to_region} to accept"
        missing = [f"{tally.region} {tally.missing}" for tally in self.approvals if tally.missing]
        return f"waits for approvals: {', '.join(missing)}"


class _Step(IntEnum):
    """How far a candidate came; of several refused candidates the one that came furthest tells why."""

    DOCUMENTS = 3
    SIGNATURES = 4
    TERMS = 5
    BRIDGE = 6
    TIME = 7
    APPROVALS = 8
    STANDING = 9
    PATH = 10
    POLICY = 11
    BUDGET = 12


class GrantBook:
    """All that is granted, as one region knows it. A changed book is a new one (`including`)."""

    __slots__ = (
        "_anchors",
        "_decisions",
        "_denies",
        "_denying",
        "_documents_max",
        "_entries",
        "_exact",
        "_groups",
        "_problems",
        "_standings",
        "_truncations",
        "_trusted",
        "_unbelieved",
        "_wild",
        "left_out",
    )

    def __init__(
        self,
        documents: Iterable[Document] = (),
        trusted: Trusted | None = None,
        anchors: TrustBundle | None = None,
        *,
        documents_max: int | None = None,
    ) -> None:
        """Verifies every document once. `trusted`: the policy keys of both regions, this one's included; `anchors`: their
        roots, under which their approvers' certificates stand. What is more than `documents_max` (DOCUMENTS_MAX) is in `left_out`."""
        self._documents_max = DOCUMENTS_MAX if documents_max is None else documents_max
        chosen, self.left_out = select_documents(tuple(dict.fromkeys(documents)), self._documents_max)
        self._trusted: Trusted = trusted or {}
        self._anchors = anchors or TrustBundle()
        self._groups: dict[str, dict[Document, None]] = {}
        self._entries: dict[str, _Entry] = {}
        self._unbelieved: dict[str, tuple[_Unbelieved, ...]] = {}
        self._standings: dict[tuple[str, str], Standing] = {}
        self._truncations: dict[tuple[str, int], list[tuple[str, Accepted]]] = {}
        self._denies: dict[tuple[str, str, str], DenyEntry] = {}
        self._decisions: dict[tuple[bytes, str, str, bool, bool], Decision] = {}
        self._problems: dict[str, tuple[Problem, ...]] = {}
        for document in chosen:
            group = _group_of(document)
            self._groups.setdefault(group, {})[document] = None
            try:
                self._take(document)
            except SignatureError as error:
                self._disbelieve(group, document, error)
        self._remember_left_out()
        exact: dict[tuple[str, str, str], list[_Entry]] = {}
        wild: list[tuple[NamePattern, tuple[str, str], _Entry]] = []
        for _, entry in sorted(self._entries.items()):
            entry.count_speaking()
            for pattern, ends in _places(entry):
                if pattern.is_exact:
                    exact.setdefault((str(pattern), *ends), []).append(entry)
                else:
                    wild.append((pattern, ends, entry))
        # Every read of a bridge asks this book, so an exact name is looked up, not searched for.
        self._exact = {place: tuple(found) for place, found in exact.items()}
        self._wild = tuple(wild)
        self._denying = {
            key: (NamePattern(deny.streams), deny) for key, deny in self._denies.items() if not deny.lifted
        }

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Documents that were not believed, for the operator and the audit log."""
        return tuple(problem for found in self._problems.values() for problem in found)

    def including(self, documents: Iterable[Document]) -> Self:
        """A book with these documents besides."""
        return self.changed((), documents)

    def changed(self, gone: Iterable[Document], come: Iterable[Document]) -> Self:
        """The book without `gone` and with `come`, under the same keys: what a new one of all these documents would be, but
        only the grants and deny entries that these are about are made anew."""
        groups = dict(self._groups)
        touched: dict[str, None] = {}
        for documents, stays in ((gone, False), (come, True)):
            for document in documents:
                group = _group_of(document)
                if group not in touched:
                    touched[group] = None
                    groups[group] = dict(groups.get(group, {}))
                if stays:
                    groups[group][document] = None
                else:
                    groups[group].pop(document, None)
        count = sum(map(len, groups.values()))
        if self.left_out or count > self._documents_max or len(touched) * ANEW_FROM > len(groups):
            every = tuple(document for group in groups.values() for document in group)
            return type(self)(every, self._trusted, self._anchors, documents_max=self._documents_max)
        made = self._copy()
        made._groups = {group: held for group, held in groups.items() if held}
        for group in touched:
            made._leave_group(group, self._groups.get(group, {}))
            part = type(self)(groups[group], self._trusted, self._anchors)
            made._join(part)
        return made

    def _copy(self) -> Self:
        """Entries and tuples are shared; nothing changes them."""
        made = object.__new__(type(self))
        made._documents_max, made.left_out = self._documents_max, self.left_out
        made._trusted, made._anchors = self._trusted, self._anchors
        made._entries, made._unbelieved = dict(self._entries), dict(self._unbelieved)
        made._standings, made._denies = dict(self._standings), dict(self._denies)
        made._truncations, made._decisions = dict(self._truncations), {}
        made._problems, made._exact = dict(self._problems), dict(self._exact)
        made._wild, made._denying = self._wild, dict(self._denying)
        return made

    def _leave_group(self, group: str, documents: Iterable[Document]) -> None:
        """Forget what these documents, all of a group, said."""
        self._problems.pop(group, None)
        self._unbelieved.pop(group, None)
        entry = self._entries.pop(group, None)
        if entry is not None:
            for pattern, ends in _places(entry):
                place = (str(pattern), *ends)
                if pattern.is_exact and len(self._exact[place]) > 1:
                    self._exact[place] = tuple(each for each in self._exact[place] if each is not entry)
                elif pattern.is_exact:
                    del self._exact[place]
            self._wild = tuple(each for each in self._wild if each[2] is not entry)
        for document in documents:
            if isinstance(document, Approval) or document.purpose not in (Purpose.STANDING, Purpose.DENY):
                continue
            try:
                if document.purpose is Purpose.DENY:
                    key = _deny_key(decode_body(document, DenyEntry, Purpose.DENY))
                    self._denies.pop(key, None)
                    self._denying.pop(key, None)
                    continue
                standing = decode_body(document, Standing, Purpose.STANDING)
            except SignatureError:
                continue
            self._standings.pop((standing.grant, standing.region), None)
            if (
                isinstance(cut := standing.truncation, Truncation)
                and (cut.stream, cut.shard) in self._truncations
            ):
                left = [
                    each for each in self._truncations[cut.stream, cut.shard] if each[0] != standing.grant
                ]
                self._truncations[cut.stream, cut.shard] = left

    def _join(self, part: GrantBook) -> None:
        """Take what the book of one group says; nothing of this group is here."""
        self._problems |= part._problems
        self._unbelieved |= part._unbelieved
        self._standings |= part._standings
        self._denies |= part._denies
        self._denying |= part._denying
        for shard, accepted in part._truncations.items():
            self._truncations[shard] = [*self._truncations.get(shard, ()), *accepted]
        self._entries |= part._entries
        for place, found in part._exact.items():
            self._exact[place] = tuple(sorted((*self._exact.get(place, ()), *found), key=_grant_of))
        if part._wild:
            self._wild = tuple(sorted((*self._wild, *part._wild), key=lambda each: each[2].grant))

    def _take(self, document: Document) -> None:
        if isinstance(document, Approval):
            body = open_approval(document, self._anchors)
            approvals = self._entry(body.grant).approvals
            held = approvals.get(approver := SpiffeId.parse(body.approver))
            if held is None or (body.at, body.comment) < (held.at, held.comment):
                approvals[approver] = body
            return
        match document.purpose:
            case Purpose.EXPORT:
                export = open_export(document, self._trusted)
                entry = self._entry(export.grant)
                entry.export = _newer(entry.export, export)
            case Purpose.IMPORT:
                accepted = open_import(document, self._trusted)
                self._entry(accepted.grant).imports.setdefault(document.region, []).append(accepted)
            case Purpose.STANDING:
                verify(document, self._trusted)
                self._stand(decode_body(document, Standing, Purpose.STANDING), document.region)
            case Purpose.DENY:
                verify(document, self._trusted)
                entry_ = decode_body(document, DenyEntry, Purpose.DENY)
                if entry_.region != document.region:
                    raise SignatureError(f"A deny entry of {entry_.region} is signed by {document.region}.")
                key = _deny_key(entry_)
                # Of two of one number, the one that denies holds.
                if key not in self._denies or _deny_rank(self._denies[key]) < _deny_rank(entry_):
                    self._denies[key] = entry_
            case Purpose.POLICY | Purpose.APPROVAL:
                raise SignatureError(f"A {document.purpose} is no grant document.")

    def _entry(self, grant: str) -> _Entry:
        return self._entries.setdefault(grant, _Entry(grant))

    def _stand(self, standing: Standing, signer: str) -> None:
        if standing.region != signer:
            raise SignatureError(f"A {standing.action} by {standing.region} is signed by {signer}.")
        key = (standing.grant, standing.region)
        if isinstance(standing.truncation, Truncation):
            cut = standing.truncation
            is_resend = standing.action is StandingAction.RESEND
            accepted = Accepted(cut, standing.region, standing.at, is_resend)
            self._truncations.setdefault((cut.stream, cut.shard), []).append((standing.grant, accepted))
            return
        held = self._standings.get(key)
        if held is None or _outranks(standing, held):
            self._standings[key] = standing

    def accepted_truncations(self, grant: str, stream: str, shard: int) -> dict[str, Accepted]:
        """Truncations and resends of a shard, under this grant or another into the same stream of the same region, by the incarnation
        (hex) that each ends."""
        ends = self._ends_of(grant, stream)
        accepted: dict[str, Accepted] = {}
        for named, found in self._truncations.get((stream, shard), ()):
            # What it lets go out again is the source's word alone; what is gone, either end's.
            if found.region not in ends[: 1 if found.is_resend else 2] or (
                named != grant and self._ends_of(named, stream) != ends
            ):
                continue
            held = accepted.get(found.truncation.incarnation)
            # Where both regions accept the end of one incarnation, the later word counts, whatever order they came in.
            if held is None or _last_word(held) < _last_word(found):
                accepted[found.truncation.incarnation] = found
        return accepted

    def cut_under(self, grants: Collection[str]) -> set[str]:
        """The grants under which a truncation or a resend was accepted that counts for one of these, too: whoever crosses under
        these needs their documents to know what lives now."""
        exact: dict[str, set[tuple[str, ...]]] = {}
        wild: dict[tuple[str, ...], PatternSet] = {}
        for grant in grants:
            entry = self._entries.get(grant)
            if entry is None or entry.export is None:
                continue
            terms = entry.export.terms
            if terms.wildcard:
                wild.setdefault(_ends(terms), PatternSet()).add(NamePattern(terms.stream))
            else:
                exact.setdefault(terms.stream, set()).add(self._ends_of(grant, terms.stream))
        found: set[str] = set()
        counts: dict[tuple[str, tuple[str, ...]], bool] = {}
        for (stream, _), accepted in self._truncations.items():
            for named, _ in accepted:
                ends = self._ends_of(named, stream)
                if (stream, ends) not in counts:
                    patterns = wild.get(ends[:2]) if ends[2:] == (stream,) else None
                    counts[stream, ends] = ends in exact.get(stream, ()) or (
                        patterns is not None and patterns.matches(StreamName.parse(stream))
                    )
                if counts[stream, ends]:
                    found.add(named)
        return found

    def incarnations(self, grant: str, stream: str, shard: int, incarnation: bytes) -> tuple[Live, ...]:
        """What a shard crossed under, from its stream's own incarnation to the one that lives now: another begins wherever a
        truncation was accepted."""
        return chain(incarnation, self.accepted_truncations(grant, stream, shard))

    def live_incarnation(self, grant: str, stream: str, shard: int, incarnation: bytes) -> Live:
        """What a shard crosses under now."""
        return self.incarnations(grant, stream, shard, incarnation)[-1]

    def _ends_of(self, grant: str, stream: str) -> tuple[str, ...]:
        """The regions that the grant is between, and the stream that `stream` arrives as; empty for a grant that is not known."""
        entry = self._entries.get(grant)
        if entry is None or entry.export is None:
            return ()
        terms = entry.export.terms
        return (*_ends(terms), stream if terms.wildcard else terms.destination_stream)

    def _disbelieve(self, group: str, document: Document, error: SignatureError) -> None:
        self._problems[group] = (*self._problems.get(group, ()), Problem(document, error.sentence))
        # Only to answer "there is a grant, but it is forged" instead of "there is none"; it allows nothing.
        claim = None if isinstance(document, Approval) else read_claim(document)
        if claim is None or claim.pattern is None:
            return
        outdated = isinstance(error, OutdatedError)
        found = _Unbelieved(
            claim.grant,
            claim.pattern,
            claim.from_region,
            claim.to_region,
            RefusalKind.OUTDATED if outdated else RefusalKind.FORGED,
            error.sentence,
            error.hint if outdated else "Find out who wrote it; make or fetch a genuine one.",
        )
        self._unbelieved[group] = (*self._unbelieved.get(group, ()), found)

    def _remember_left_out(self) -> None:
        for claim in self.left_out:
            if claim.pattern is not None:
                found = _Unbelieved(
                    claim.grant,
                    claim.pattern,
                    claim.from_region,
                    claim.to_region,
                    RefusalKind.LEFT_OUT,
                    f"There are more documents than one book takes, and those of the grant {claim.grant} were left out.",
                    "Remove grants that ended long ago from the metadata store.",
                )
                self._unbelieved[claim.grant] = (*self._unbelieved.get(claim.grant, ()), found)

    # ------------------------------------------------------------------------------------------- questions

    def check(
        self,
        attempt: Attempt,
        policy: ResidencyPolicy | None,
        now: int,
        used: Mapping[str, int] | None = None,
        *,
        grant: str = "",
    ) -> Allowed | Refusal:
        """Whether the attempt may go ahead at `now` (ms).

        `policy` is the asking region's own, in force; None for who has none, as the agent: both brokers ask theirs.
        `used`: bytes that crossed so far, by grant id. `grant`: under this grant and no other.
        """
        denied = self._denied(attempt)
        if denied is not None:
            return denied
        best: tuple[_Step, Refusal] | None = None
        for entry in self._concerning(attempt):
            if grant and entry.grant != grant:
                continue
            result = self._judge(entry, attempt, policy, now, used or {})
            if isinstance(result, Allowed):
                return result
            if best is None or result[0] > best[0]:
                best = result
        unbelieved = self._disbelief(attempt, grant)
        if unbelieved is not None and (best is None or best[0] < _Step.SIGNATURES):
            return unbelieved
        if best is not None:
            return best[1]
        return Refusal(
            RefusalKind.NO_GRANT,
            f"No grant lets {attempt.stream} cross from {attempt.from_region} to {attempt.to_region}.",
            "Make one with `felix bridge allow`, and have the destination accept it.",
        )

    def check_grant(self, grant: str, bridge: SpiffeId | None, now: int) -> Refusal | None:
        """Why nothing at all crosses under a grant, whichever stream it is; None where some stream may.

        Denials of streams and policies are not asked. For a pattern that no stream fits yet.
        """
        entry = self._entries.get(grant)
        if entry is None:
            return Refusal(
                RefusalKind.NO_GRANT,
                f"There is no grant {grant[:40]}.",
                "List them with `felix bridge list`.",
            )
        found = self._agreement(entry, bridge, now)
        return found[1] if isinstance(found[1], Refusal) else None

    def _denied(self, attempt: Attempt) -> Refusal | None:
        for pattern, entry in self._denying.values():
            if entry.region not in (attempt.from_region, attempt.to_region):
                continue
            if _is_towards(entry, attempt) and pattern.matches(attempt.stream):
                return _denial(entry, attempt, attempt.stream)
        return None

    def _denied_there(self, attempt: Attempt, arriving: StreamName) -> Refusal | None:
        """The destination denies a stream by the name that it has there, too."""
        for pattern, entry in self._denying.values():
            if (
                entry.region == attempt.to_region
                and _is_towards(entry, attempt)
                and pattern.matches(arriving)
            ):
                return _denial(entry, attempt, arriving)
        return None

    def _concerning(self, attempt: Attempt) -> Iterator[_Entry]:
        ends = (attempt.from_region, attempt.to_region)
        yield from self._exact.get((str(attempt.stream), *ends), ())
        for pattern, found, entry in self._wild:
            if found == ends and pattern.matches(attempt.stream):
                yield entry

    def _disbelieved(self) -> Iterator[_Unbelieved]:
        for found in self._unbelieved.values():
            yield from found

    def _disbelief(self, attempt: Attempt, grant: str) -> Refusal | None:
        for claim in self._disbelieved():
            if grant and claim.grant != grant:
                continue
            if (claim.from_region, claim.to_region) == attempt[1:3] and claim.pattern.matches(attempt.stream):
                return Refusal(
                    claim.kind,
                    f"The grant for {attempt.stream} from {attempt.from_region} to {attempt.to_region} is not "
                    f"believed. {claim.sentence}"
                    if claim.kind is RefusalKind.FORGED
                    else claim.sentence,
                    claim.hint,
                )
        return None

    def _agreement(
        self, entry: _Entry, bridge: SpiffeId | None, now: int
    ) -> tuple[ExportGrant, ImportGrant] | tuple[_Step, Refusal]:
        """Checks 3 to 9, which are about the grant and not about a record: the two halves that agree, or why not."""
        name, export = entry.grant, entry.export

        def refuse(step: _Step, kind: RefusalKind, sentence: str, hint: str) -> tuple[_Step, Refusal]:
            return step, Refusal(kind, sentence, hint, name)

        if export is None:
            half = entry.newest_half()
            by, source = (half.to_region, half.from_region) if half is not None else ("Nobody", "its source")
            return refuse(
                _Step.DOCUMENTS,
                RefusalKind.EXPORT_MISSING,
                f"{by} accepted the grant {name}, but there is no export grant by {source}.",
                f"Fetch the export grant from {source}.",
            )
        terms = export.terms
        halves = entry.imports.get(terms.to_region, [])
        if not halves:
            return refuse(
                _Step.DOCUMENTS,
                RefusalKind.IMPORT_MISSING,
                f"{terms.from_region} offers {terms.stream} under the grant {name}, but {terms.to_region} has not "
                "accepted it.",
                f"Have {terms.to_region} accept it with `felix bridge accept`.",
            )
        accepted = _agreeing(export, halves)
        if accepted is None:
            return refuse(
                _Step.TERMS,
                RefusalKind.TERMS_MISMATCH,
                f"The two halves of the grant {name} do not name the same terms.",
                f"Have {terms.to_region} accept the export grant anew.",
            )
        if bridge is not None and terms.bridge != str(bridge):
            return refuse(
                _Step.BRIDGE,
                RefusalKind.WRONG_BRIDGE,
                f"The grant {name} is for the bridge {terms.bridge}, not for {bridge}.",
                "Run the agent with the identity that the grant names.",
            )
        standings = [self._standings.get((name, region)) for region in _ends(terms)]
        for standing in standings:
            if standing is not None and standing.action is StandingAction.REVOKE:
                return refuse(
                    _Step.BRIDGE,
                    RefusalKind.REVOKED,
                    f"{standing.region} revoked the grant {name} at {Instant(standing.at)}{_because(standing.reason)}.",
                    "A revoked grant stays revoked; a new one has to be made.",
                )
        if now < terms.not_before:
            return refuse(
                _Step.TIME,
                RefusalKind.NOT_YET,
                f"The grant {name} holds only from {Instant(terms.not_before)}.",
                "Wait, or make a grant that begins earlier.",
            )
        if now >= terms.expires:
            return refuse(
                _Step.TIME,
                RefusalKind.EXPIRED,
                f"The grant {name} expired at {Instant(terms.expires)}.",
                "Make a new grant, and have the destination accept it.",
            )
        if now < entry.approved_from:
            tallies = self._tallies(entry, export, accepted, now)
            if any(found.missing for found in tallies):
                return _Step.APPROVALS, _not_approved(name, tallies)
            entry.approved_from = now
        for standing in standings:
            if standing is not None and standing.action is StandingAction.PAUSE:
                return refuse(
                    _Step.STANDING,
                    RefusalKind.PAUSED,
                    f"{standing.region} paused the grant {name} at {Instant(standing.at)}{_because(standing.reason)}.",
                    f"Only {standing.region} can resume it, with `felix bridge resume`.",
                )
        return export, accepted

    def _tallies(
        self, entry: _Entry, export: ExportGrant, accepted: ImportGrant | None, now: int
    ) -> tuple[Tally, ...]:
        """How far both sides' approvals have come, as the halves that are there ask."""
        terms = export.terms
        found = [
            self._tally(
                entry,
                export,
                accepted,
                terms.from_region,
                ApprovalRule(export.approvals, export.separate),
                now,
            )
        ]
        if accepted is not None:
            asked = ApprovalRule(accepted.approvals, accepted.separate)
            found.append(self._tally(entry, export, accepted, terms.to_region, asked, now))
        return tuple(found)

    def _tally(
        self,
        entry: _Entry,
        export: ExportGrant,
        accepted: ImportGrant | None,
        region: str,
        rule: ApprovalRule,
        now: int,
    ) -> Tally:
        terms = export.terms
        concerned = {name_of(terms.drawn_up_by)}
        if accepted is not None and region == terms.to_region:
            concerned.add(name_of(accepted.accepted_by))
        return tally(rule, region, entry.speaking.get(region, ()), export.terms_hash, concerned, now)

    def _judge(
        self,
        entry: _Entry,
        attempt: Attempt,
        policy: ResidencyPolicy | None,
        now: int,
        used: Mapping[str, int],
    ) -> Allowed | tuple[_Step, Refusal]:
        found = self._agreement(entry, attempt.bridge, now)
        if isinstance(found[1], Refusal):
            return found
        export, accepted = found
        assert isinstance(export, ExportGrant)
        name, terms = entry.grant, export.terms
        arriving = terms.destination_of(attempt.stream)
        denied = self._denied_there(attempt, arriving)
        if denied is not None:
            return _Step.STANDING, denied
        strayed = check_path(name, terms, attempt.path)
        if strayed is not None:
            return _Step.PATH, strayed
        decision = None if policy is None else self._decide(policy, attempt, terms, name, now)
        if policy is not None and decision is not None:
            if not decision.allowed:
                return _Step.POLICY, Refusal(
                    RefusalKind.DENIED if decision.denied else RefusalKind.AGAINST_POLICY,
                    f"The grant {name} is against the policy of {policy.region}, revision {policy.revision}: "
                    + " ".join(map(str, decision.reasons)),
                    "Ask `felix bridge explain`; make a grant that the policy allows.",
                    name,
                    decision.rule,
                )
            for rule in decision.approvals:
                if now >= entry.counted_from.get((policy.region, rule), NEVER):
                    continue
                counted = self._tally(entry, export, accepted, policy.region, rule, now)
                if counted.missing:
                    return _Step.POLICY, _not_approved(name, (counted,), policy, rule)
                entry.counted_from[policy.region, rule] = now
        spent = used.get(name, 0)
        if terms.budget_bytes and spent >= terms.budget_bytes:
            return _Step.BUDGET, Refusal(
                RefusalKind.BUDGET,
                f"The grant {name} has used up its budget of {Size(terms.budget_bytes)}: {spent} bytes crossed.",
                "Make a new grant with a new budget.",
                name,
            )
        return Allowed(export, accepted, bytes.fromhex(export.terms_hash), arriving, decision)

    def _decide(
        self, policy: ResidencyPolicy, attempt: Attempt, terms: GrantTerms, name: str, now: int
    ) -> Decision:
        """The policy's decision, remembered: it depends on `now` only through the policy's own validity."""
        file = policy.file
        begun = file.valid_from is None or now >= file.valid_from
        over = file.valid_until is not None and now >= file.valid_until
        key = (policy.hash, name, str(attempt.stream), begun, over)
        found = self._decisions.get(key)
        if found is None:
            if len(self._decisions) >= DECISIONS_MAX:
                self._decisions.clear()
            found = self._decisions[key] = decide_grant(policy, terms, attempt.stream, now)
        return found

    def list(self, now: int) -> tuple[GrantView, ...]:
        """Every grant with its state at `now`, by id."""
        return tuple(
            self._view(entry, now)
            for _, entry in sorted(self._entries.items())
            if entry.export is not None or entry.imports
        )

    def _view(self, entry: _Entry, now: int) -> GrantView:
        name, export = entry.grant, entry.export
        if export is None:
            accepted = entry.newest_half()
        else:
            accepted = _agreeing(export, entry.imports.get(export.terms.to_region, []))
        state = GrantState.OFFERED
        tallies: tuple[Tally, ...] = ()
        if export is not None:
            tallies = self._tallies(entry, export, accepted, now)
            if accepted is not None and not any(found.missing for found in tallies):
                state = advance(state, GrantEvent.COMPLETE)
        half = export.terms if export is not None else accepted
        ends = () if half is None else sorted((half.from_region, half.to_region))
        standings = [self._standings[name, region] for region in ends if (name, region) in self._standings]
        pausing = [held.region for held in standings if held.action is StandingAction.PAUSE]
        if pausing:
            state = advance(state, GrantEvent.PAUSE)
        if any(held.action is StandingAction.REVOKE for held in standings):
            state = advance(state, GrantEvent.REVOKE)
        if export is not None and now >= export.terms.expires:
            state = advance(state, GrantEvent.EXPIRE)
        return GrantView(name, state, export, accepted, tuple(pausing), tallies)

    def get(self, grant: str, now: int) -> GrantView:
        """One grant by its id. Raises GrantError(GRANT_MISSING)."""
        entry = self._entries.get(grant)
        if entry is None or (entry.export is None and not entry.imports):
            raise GrantError(
                f"There is no grant {grant[:40]}.",
                code=Code.GRANT_MISSING,
                hint="List them with `felix bridge list`.",
            )
        return self._view(entry, now)

    def approval(self, grant: str, approver: SpiffeId) -> ApprovalBody | None:
        """What an approver signed about a grant, where it is believed."""
        entry = self._entries.get(grant)
        return None if entry is None else entry.approvals.get(approver)

    def is_revoked_by(self, grant: str, region: str) -> bool:
        """Whether the region has revoked the grant: its first revocation holds, and no other one is needed."""
        held = self._standings.get((grant, region))
        return held is not None and held.action is StandingAction.REVOKE

    def claimed_destination(self, grant: str) -> str:
        """Where a grant that is not believed claims to lead; for the refusal's sentence alone. Empty: no such claim."""
        return next((claim.to_region for claim in self._disbelieved() if claim.grant == grant), "")

    def denies(self) -> tuple[DenyEntry, ...]:
        """The deny entries that stand."""
        return tuple(entry for _, entry in sorted(self._denies.items()) if not entry.lifted)

    def next_sequence(self, grant: str, region: str) -> int:
        """The sequence for the region's next standing on a grant."""
        held = self._standings.get((grant, region))
        return held.sequence + 1 if held else 1

    def next_deny_sequence(self, region: str, streams: str, peer: str) -> int:
        """The sequence for the region's next deny entry (or its lifting) on a pattern towards a peer."""
        held = self._denies.get((region, streams, peer))
        return held.sequence + 1 if held else 1


def _group_of(document: Document) -> str:
    """What a document is about: its grant, or the key of a deny entry. What two documents of different groups say has nothing to do
    with each other. Those that nobody can read are together, and say nothing."""
    try:
        if isinstance(document, Approval):
            return document.claim.grant
        match document.purpose:
            case Purpose.EXPORT:
                return decode_body(document, ExportGrant, Purpose.EXPORT).grant
            case Purpose.IMPORT:
                return decode_body(document, ImportGrant, Purpose.IMPORT).grant
            case Purpose.STANDING:
                return decode_body(document, Standing, Purpose.STANDING).grant
            case Purpose.DENY:
                return "\0".join(_deny_key(decode_body(document, DenyEntry, Purpose.DENY)))
    except SignatureError:
        pass
    return ""


def _deny_key(entry: DenyEntry) -> tuple[str, str, str]:
    return entry.region, entry.streams, entry.peer


def _grant_of(entry: _Entry) -> str:
    return entry.grant


def _places(entry: _Entry) -> list[tuple[NamePattern, tuple[str, str]]]:
    """Stream, and source and destination, that an entry is found under."""
    named = [(half.stream, half.from_region, half.to_region) for half in entry.halves()]
    if entry.export is not None:
        terms = entry.export.terms
        named.append((terms.stream, terms.from_region, terms.to_region))
    return [(NamePattern(stream), (source, to)) for stream, source, to in dict.fromkeys(named)]


def _last_word(accepted: Accepted) -> tuple[int, str, bool, int, int]:
    """Of two of one instant and region always the same one."""
    cut = accepted.truncation
    return accepted.at, accepted.region, accepted.is_resend, cut.epoch, cut.offset


def _ends(terms: GrantTerms) -> tuple[str, str]:
    return terms.from_region, terms.to_region


def _newer(held: ExportGrant | None, found: ExportGrant) -> ExportGrant:
    """The one that was signed last; of two of one instant always the same one."""
    return found if held is None else max(held, found, key=_signed)


def _signed(half: ExportGrant | ImportGrant) -> tuple[int, bytes]:
    return half.signed_at, canonical(half)


def _agreeing(export: ExportGrant, halves: Iterable[ImportGrant]) -> ImportGrant | None:
    """Of the import grants that name the export's terms, the one that was signed last."""
    return max((half for half in halves if agree(export, half)), key=_signed, default=None)


def _outranks(found: Standing, held: Standing) -> bool:
    """Whether `found` holds rather than `held`, of one region on one grant: the first revocation, else the highest sequence."""
    revokes = StandingAction.REVOKE
    if held.action is revokes or found.action is revokes:
        return found.action is revokes and (held.action is not revokes or _first(found) < _first(held))
    return _standing_rank(found) > _standing_rank(held)


def _standing_rank(standing: Standing) -> tuple[int, bool, bytes]:
    """Of two of one number, the one that pauses holds."""
    return standing.sequence, standing.action is StandingAction.PAUSE, canonical(standing)


def _deny_rank(entry: DenyEntry) -> tuple[int, bool, bytes]:
    return entry.sequence, not entry.lifted, canonical(entry)


def _first(standing: Standing) -> tuple[int, bytes]:
    return standing.at, canonical(standing)


def _is_towards(entry: DenyEntry, attempt: Attempt) -> bool:
    peer = attempt.to_region if entry.region == attempt.from_region else attempt.from_region
    return entry.peer in (EVERYWHERE, peer)


def _denial(entry: DenyEntry, attempt: Attempt, stream: StreamName) -> Refusal:
    because = f": {entry.reason.removesuffix('.')}" if entry.reason else ""
    arriving = f" as {stream}" if stream != attempt.stream else ""
    return Refusal(
        RefusalKind.DENIED,
        f"{entry.region} denies that {attempt.stream} crosses from {attempt.from_region} to "
        f"{attempt.to_region}{arriving}{because}.",
        f"Deny wins over every grant; only {entry.region} can lift it.",
    )


def _not_approved(
    grant: str,
    tallies: Iterable[Tally],
    policy: ResidencyPolicy | None = None,
    rule: ApprovalRule | None = None,
) -> Refusal:
    lacking = [found for found in tallies if found.missing]
    asked = f", as rule {rule.rule} of revision {policy.revision} asks" if policy is not None and rule else ""
    return Refusal(
        RefusalKind.NOT_APPROVED,
        f"The grant {grant} is not approved{asked}. {'. '.join(map(str, lacking))}.",
        f"Another approver signs it: felix bridge approve {grant} --as NAME --region {lacking[0].region}.",
        grant,
        rule.rule if rule else "",
    )


def agree(export: ExportGrant, accepted: ImportGrant) -> bool:
    """True where both halves name the same terms, stream, direction and bridge."""
    terms = export.terms
    return (
        export.terms_hash == accepted.terms_hash
        and terms.stream == accepted.stream
        and terms.destination_stream == accepted.destination_stream
        and _ends(terms) == (accepted.from_region, accepted.to_region)
        and terms.bridge == accepted.bridge
    )


def _because(reason: str) -> str:
    return f" ({reason.removesuffix('.')})" if reason else ""
