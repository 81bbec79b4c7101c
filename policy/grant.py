"""Grants: two signed documents that let one stream cross, and the book that answers whether it may right now.

The **export grant** carries the terms and is signed by the source region's policy key; the **import grant** names
the same terms hash and is signed by the destination's. One without the other moves nothing. Later changes are
signed documents too: a `Standing` pauses, resumes or revokes, or accepts a truncation; a `DenyEntry` forbids a stream
whatever is granted.

States of a grant (TRANSITIONS is the table that the code runs on)::

    offered ──accept──▶ active ◀──pause/resume──▶ paused
       └──────────── revoke, expire ────────────▶ revoked, expired   (final)

Checks of `GrantBook.check`, in this order; each has its own refusal:

 1. no signed deny entry names the stream          7. the grant has begun, and has not expired
 2. there is a grant for stream and regions        8. it is not paused by either region
 3. both documents are there                       9. the record is not on its way back, nor travels onward unasked
 4. both signatures hold                          10. the region's policy in force allows it
 5. both name the same terms                      11. its byte budget is not used up
 6. the bridge is the one that is named, and the grant is not revoked

Invariants:
- a `GrantBook` believes nothing that no trusted key signed: what cannot be verified is kept as a problem to report,
  never as a grant, and a forged revocation revokes nothing;
- deny wins over allow, revoked wins over everything later;
- of several standings by one region the one with the highest sequence holds: an old resume cannot be played again
  over a newer pause.

Pure: no clock, no disk. Brokers on both sides and the agent ask; what the book is made of comes from metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, Literal, NamedTuple, Self

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from felix.errors import Code, RequestError
from felix.names import NamePattern, SpiffeId, StreamName, parse_region
from policy.quantity import Instant, Size
from policy.residency import Decision, Question, ResidencyPolicy, decide
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
from policy.truncation import Accepted, Live, Truncation, live_incarnation

DOCUMENTS_MAX: Final = 100_000
"""Signed documents in one book: each is verified once when the book is made."""
DECISIONS_MAX: Final = 4_096
"""Remembered policy decisions; beyond that the memory starts anew."""
EVERYWHERE: Final = "*"


class GrantError(RequestError):
    """A grant that does not hold."""

    default_code = Code.GRANT_INVALID


# ------------------------------------------------------------------------------------------------ documents


class ExportGrant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body that the source region signs."""

    version: Literal[1] = 1
    grant: GrantId
    terms: GrantTerms
    terms_hash: Hash
    policy_revision: Number
    policy_hash: Hash
    signed_at: Number

    def __post_init__(self) -> None:
        found = self.terms.hash()
        if self.terms_hash != found.hex() or self.grant != grant_id(found):
            raise ValueError("its id and terms hash are not those of the terms it carries")


class ImportGrant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body that the destination region signs."""

    version: Literal[1] = 1
    grant: GrantId
    terms_hash: Hash
    stream: str
    destination_stream: str
    from_region: str
    to_region: str
    bridge: str
    accepted_by: Line
    policy_revision: Number
    policy_hash: Hash
    signed_at: Number

    def __post_init__(self) -> None:
        NamePattern(self.stream)


class StandingAction(StrEnum):
    PAUSE = "pause"
    RESUME = "resume"
    REVOKE = "revoke"
    ACCEPT_TRUNCATION = "accept-truncation"
    """a link that stopped because what had crossed is gone goes on (policy.truncation)"""


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
    """of `accept-truncation`, and of nothing else"""

    def __post_init__(self) -> None:
        if (self.action is StandingAction.ACCEPT_TRUNCATION) != isinstance(self.truncation, Truncation):
            raise ValueError("accept-truncation names a truncation, and nothing else does")


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
    decision = decide(policy, Question(terms.pattern, terms.from_region, terms.to_region, terms), now)
    if not decision.allowed:
        raise decision.error()
    body = ExportGrant(
        grant=grant_id(terms.hash()),
        terms=terms,
        terms_hash=terms.hash().hex(),
        policy_revision=policy.revision,
        policy_hash=policy.hash.hex(),
        signed_at=now,
    )
    return sign(Purpose.EXPORT, policy.region, canonical(body), key)


def open_export(document: SignedDocument, trusted: Trusted) -> ExportGrant:
    """A verified export grant. Raises SignatureError."""
    verify(document, trusted)
    export = decode_body(document, ExportGrant, Purpose.EXPORT)
    if export.terms.from_region != document.region:
        raise SignatureError(
            f"An export grant for data of {export.terms.from_region} is signed by {document.region}."
        )
    return export


def open_import(document: SignedDocument, trusted: Trusted) -> ImportGrant:
    """A verified import grant. Raises SignatureError."""
    verify(document, trusted)
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
    """The destination region's half, made from the export grant it was handed.

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
    decision = decide(policy, Question(terms.pattern, terms.from_region, terms.to_region, terms), now)
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
    ACCEPT = "accept"
    PAUSE = "pause"
    RESUME = "resume"
    REVOKE = "revoke"
    EXPIRE = "expire"


TRANSITIONS: Final[Mapping[tuple[GrantState, GrantEvent], GrantState]] = {
    (GrantState.OFFERED, GrantEvent.ACCEPT): GrantState.ACTIVE,
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
    TERMS_MISMATCH = "terms-mismatch"
    WRONG_BRIDGE = "wrong-bridge"
    REVOKED = "revoked"
    NOT_YET = "not-yet"
    EXPIRED = "expired"
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

    `path`: the regions that the records have been in, oldest first; the source region itself may be among them.
    """

    stream: StreamName
    from_region: str
    to_region: str
    bridge: SpiffeId
    path: tuple[str, ...] = ()


class Allowed(NamedTuple):
    """It may cross, under this grant. `export` and `accepted` are the two bodies that agree."""

    export: ExportGrant
    accepted: ImportGrant
    terms_hash: bytes
    destination_stream: StreamName
    decision: Decision

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

    document: SignedDocument
    sentence: str


class _Forged(NamedTuple):
    """What an unverified grant claims to be about: enough to say that it was not believed, and nothing else."""

    grant: str
    pattern: NamePattern
    from_region: str
    to_region: str
    sentence: str


@dataclass(slots=True)
class _Entry:
    grant: str
    export: ExportGrant | None = None
    accepted: list[ImportGrant] | None = None


class GrantView(NamedTuple):
    """One grant for a list: its state at the time asked for."""

    grant: str
    state: GrantState
    export: ExportGrant | None
    accepted: ImportGrant | None
    paused_by: tuple[str, ...]


class _Step(IntEnum):
    """How far a candidate came; of several refused candidates the one that came furthest tells why."""

    DOCUMENTS = 3
    SIGNATURES = 4
    TERMS = 5
    BRIDGE = 6
    TIME = 7
    STANDING = 8
    PATH = 9
    POLICY = 10
    BUDGET = 11


class GrantBook:
    """All that is granted, as one region knows it. A changed book is a new one (`including`)."""

    __slots__ = (
        "_decisions",
        "_denies",
        "_denying",
        "_documents",
        "_entries",
        "_exact",
        "_forged",
        "_standings",
        "_truncations",
        "_trusted",
        "_wild",
        "problems",
    )

    def __init__(self, documents: Iterable[SignedDocument] = (), trusted: Trusted | None = None) -> None:
        """Verifies every document once. `trusted`: the policy keys of both regions, this one's included.

        Raises GrantError where there are more than DOCUMENTS_MAX documents.
        """
        self._documents = tuple(dict.fromkeys(documents))
        if len(self._documents) > DOCUMENTS_MAX:
            raise GrantError(f"{len(self._documents)} grant documents; {DOCUMENTS_MAX} are allowed.")
        self._trusted: Trusted = trusted or {}
        self._entries: dict[str, _Entry] = {}
        self._forged: list[_Forged] = []
        self._standings: dict[tuple[str, str], Standing] = {}
        self._truncations: dict[tuple[str, str, int], dict[str, Accepted]] = {}
        self._denies: dict[tuple[str, str, str], DenyEntry] = {}
        self._decisions: dict[tuple[bytes, str, str, bool, bool], Decision] = {}
        problems: list[Problem] = []
        for document in self._documents:
            try:
                self._take(document)
            except SignatureError as error:
                problems.append(Problem(document, error.sentence))
                self._remember_forged(document, error)
        self._index()
        self.problems: tuple[Problem, ...] = tuple(problems)
        """Documents that were not believed, for the operator and the audit log."""

    def including(self, documents: Iterable[SignedDocument]) -> Self:
        """A book with these documents besides."""
        return type(self)((*self._documents, *documents), self._trusted)

    def _take(self, document: SignedDocument) -> None:
        match document.purpose:
            case Purpose.EXPORT:
                export = open_export(document, self._trusted)
                self._entry(export.grant).export = export
            case Purpose.IMPORT:
                accepted = open_import(document, self._trusted)
                entry = self._entry(accepted.grant)
                entry.accepted = [*(entry.accepted or []), accepted]
            case Purpose.STANDING:
                verify(document, self._trusted)
                self._stand(decode_body(document, Standing, Purpose.STANDING), document.region)
            case Purpose.DENY:
                verify(document, self._trusted)
                entry_ = decode_body(document, DenyEntry, Purpose.DENY)
                if entry_.region != document.region:
                    raise SignatureError(f"A deny entry of {entry_.region} is signed by {document.region}.")
                key = (entry_.region, entry_.streams, entry_.peer)
                if key not in self._denies or self._denies[key].sequence < entry_.sequence:
                    self._denies[key] = entry_
            case Purpose.POLICY | Purpose.APPROVAL:
                raise SignatureError(f"A {document.purpose} is no grant document.")

    def _index(self) -> None:
        """Every read of a bridge asks this book, so an exact name is looked up, not searched for."""
        self._exact: dict[tuple[str, str, str], list[_Entry]] = {}
        self._wild: list[tuple[NamePattern, tuple[str, str], _Entry]] = []
        for entry in self._entries.values():
            named = [(half.stream, half.from_region, half.to_region) for half in entry.accepted or ()]
            if entry.export is not None:
                terms = entry.export.terms
                named.append((terms.stream, terms.from_region, terms.to_region))
            for stream, source, destination in dict.fromkeys(named):
                pattern = NamePattern(stream)
                if pattern.is_exact:
                    self._exact.setdefault((stream, source, destination), []).append(entry)
                else:
                    self._wild.append((pattern, (source, destination), entry))
        self._denying = [
            (NamePattern(deny.streams), deny) for deny in self._denies.values() if not deny.lifted
        ]

    def _entry(self, grant: str) -> _Entry:
        return self._entries.setdefault(grant, _Entry(grant))

    def _stand(self, standing: Standing, signer: str) -> None:
        if standing.region != signer:
            raise SignatureError(f"A {standing.action} by {standing.region} is signed by {signer}.")
        key = (standing.grant, standing.region)
        if isinstance(standing.truncation, Truncation):
            self._accept(Accepted(standing.truncation, standing.region, standing.at), standing.grant)
            return
        held = self._standings.get(key)
        if held is not None and held.action is StandingAction.REVOKE:
            return
        if held is None or standing.action is StandingAction.REVOKE or held.sequence < standing.sequence:
            self._standings[key] = standing

    def _accept(self, accepted: Accepted, grant: str) -> None:
        cut = accepted.truncation
        of_shard = self._truncations.setdefault((grant, cut.stream, cut.shard), {})
        held = of_shard.get(cut.incarnation)
        # Where both regions accept the end of one incarnation, the later word counts, whatever order they came in.
        if held is None or (held.at, held.region) < (accepted.at, accepted.region):
            of_shard[cut.incarnation] = accepted

    def live_incarnation(self, grant: str, stream: str, shard: int, incarnation: bytes) -> Live:
        """What a shard crosses under, given its stream's own incarnation: another where a truncation was accepted."""
        return live_incarnation(incarnation, self._truncations.get((grant, stream, shard), {}))

    def _remember_forged(self, document: SignedDocument, error: SignatureError) -> None:
        # Only to answer "there is a grant, but it is forged" instead of "there is none"; it allows nothing.
        try:
            if document.purpose is Purpose.EXPORT:
                export = msgspec.json.decode(document.body, type=_ExportClaim)
                grant, claim = export.grant, export.terms
            elif document.purpose is Purpose.IMPORT:
                claim = msgspec.json.decode(document.body, type=_Claim)
                grant = claim.grant
            else:
                return
            pattern = NamePattern(claim.stream)
        except (msgspec.MsgspecError, ValueError, RequestError):
            return
        self._forged.append(_Forged(grant, pattern, claim.from_region, claim.to_region, error.sentence))

    # ------------------------------------------------------------------------------------------- questions

    def check(
        self, attempt: Attempt, policy: ResidencyPolicy, now: int, used: Mapping[str, int] | None = None
    ) -> Allowed | Refusal:
        """Whether the attempt may go ahead at `now` (ms).

        `policy` is the asking region's own, in force. `used`: bytes that crossed so far, by grant id.
        """
        denied = self._denied(attempt)
        if denied is not None:
            return denied
        best: tuple[_Step, Refusal] | None = None
        for entry in self._concerning(attempt):
            result = self._judge(entry, attempt, policy, now, used or {})
            if isinstance(result, Allowed):
                return result
            if best is None or result[0] > best[0]:
                best = result
        forged = self._forgery(attempt)
        if forged is not None and (best is None or best[0] < _Step.SIGNATURES):
            return forged
        if best is not None:
            return best[1]
        return Refusal(
            RefusalKind.NO_GRANT,
            f"No grant lets {attempt.stream} cross from {attempt.from_region} to {attempt.to_region}.",
            "Make one with `felix bridge allow`, and have the destination accept it.",
        )

    def _denied(self, attempt: Attempt) -> Refusal | None:
        for pattern, entry in self._denying:
            if entry.region not in (attempt.from_region, attempt.to_region):
                continue
            peer = attempt.to_region if entry.region == attempt.from_region else attempt.from_region
            if entry.peer in (EVERYWHERE, peer) and pattern.matches(attempt.stream):
                because = f": {entry.reason.removesuffix('.')}" if entry.reason else ""
                return Refusal(
                    RefusalKind.DENIED,
                    f"{entry.region} denies that {attempt.stream} crosses from {attempt.from_region} to "
                    f"{attempt.to_region}{because}.",
                    f"Deny wins over every grant; only {entry.region} can lift it.",
                )
        return None

    def _concerning(self, attempt: Attempt) -> Iterator[_Entry]:
        ends = (attempt.from_region, attempt.to_region)
        yield from self._exact.get((str(attempt.stream), *ends), ())
        for pattern, found, entry in self._wild:
            if found == ends and pattern.matches(attempt.stream):
                yield entry

    def _forgery(self, attempt: Attempt) -> Refusal | None:
        for claim in self._forged:
            if (claim.from_region, claim.to_region) == attempt[1:3] and claim.pattern.matches(attempt.stream):
                return Refusal(
                    RefusalKind.FORGED,
                    f"The grant for {attempt.stream} from {attempt.from_region} to {attempt.to_region} is not "
                    f"believed. {claim.sentence}",
                    "Find out who wrote it; make or fetch a genuine one.",
                )
        return None

    def _judge(
        self, entry: _Entry, attempt: Attempt, policy: ResidencyPolicy, now: int, used: Mapping[str, int]
    ) -> Allowed | tuple[_Step, Refusal]:
        name, export = entry.grant, entry.export

        def refuse(
            step: _Step, kind: RefusalKind, sentence: str, hint: str, rule: str = ""
        ) -> tuple[_Step, Refusal]:
            return step, Refusal(kind, sentence, hint, name, rule)

        if export is None:
            return refuse(
                _Step.DOCUMENTS,
                RefusalKind.EXPORT_MISSING,
                f"{attempt.to_region} accepted the grant {name}, but there is no export grant by {attempt.from_region}.",
                f"Fetch the export grant from {attempt.from_region}.",
            )
        if not entry.accepted:
            return refuse(
                _Step.DOCUMENTS,
                RefusalKind.IMPORT_MISSING,
                f"{attempt.from_region} offers {attempt.stream} under the grant {name}, but {attempt.to_region} has not "
                "accepted it.",
                f"Have {attempt.to_region} accept it with `felix bridge accept`.",
            )
        terms = export.terms
        accepted = next((half for half in entry.accepted if _agree(export, half)), None)
        if accepted is None:
            return refuse(
                _Step.TERMS,
                RefusalKind.TERMS_MISMATCH,
                f"The two halves of the grant {name} do not name the same terms.",
                f"Have {attempt.to_region} accept the export grant anew.",
            )
        if terms.bridge != str(attempt.bridge):
            return refuse(
                _Step.BRIDGE,
                RefusalKind.WRONG_BRIDGE,
                f"The grant {name} is for the bridge {terms.bridge}, not for {attempt.bridge}.",
                "Run the agent with the identity that the grant names.",
            )
        standings = [self._standings.get((name, region)) for region in (terms.from_region, terms.to_region)]
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
        for standing in standings:
            if standing is not None and standing.action is StandingAction.PAUSE:
                return refuse(
                    _Step.STANDING,
                    RefusalKind.PAUSED,
                    f"{standing.region} paused the grant {name} at {Instant(standing.at)}{_because(standing.reason)}.",
                    f"Only {standing.region} can resume it, with `felix bridge resume`.",
                )
        strayed = check_path(name, terms, attempt.path)
        if strayed is not None:
            return _Step.PATH, strayed
        decision = self._decide(policy, attempt, terms, name, now)
        if not decision.allowed:
            return refuse(
                _Step.POLICY,
                RefusalKind.DENIED if decision.denied else RefusalKind.AGAINST_POLICY,
                f"The grant {name} is against the policy of {policy.region}, revision {policy.revision}: "
                + " ".join(map(str, decision.reasons)),
                "Ask `felix bridge explain`; make a grant that the policy allows.",
                decision.rule,
            )
        spent = used.get(name, 0)
        if terms.budget_bytes and spent >= terms.budget_bytes:
            return refuse(
                _Step.BUDGET,
                RefusalKind.BUDGET,
                f"The grant {name} has used up its budget of {Size(terms.budget_bytes)}: {spent} bytes crossed.",
                "Make a new grant with a new budget.",
            )
        return Allowed(
            export, accepted, bytes.fromhex(export.terms_hash), terms.destination_of(attempt.stream), decision
        )

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
            question = Question(attempt.stream, attempt.from_region, attempt.to_region, terms)
            found = self._decisions[key] = decide(policy, question, now)
        return found

    def list(self, now: int) -> tuple[GrantView, ...]:
        """Every grant with its state at `now`, by id."""
        return tuple(self._view(entry, now) for _, entry in sorted(self._entries.items()))

    def _view(self, entry: _Entry, now: int) -> GrantView:
        name, export = entry.grant, entry.export
        accepted = next(
            (half for half in entry.accepted or () if export is None or _agree(export, half)), None
        )
        state = GrantState.OFFERED
        if export is not None and accepted is not None:
            state = advance(state, GrantEvent.ACCEPT)
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
        return GrantView(name, state, export, accepted, tuple(pausing))

    def get(self, grant: str, now: int) -> GrantView:
        """One grant by its id. Raises GrantError(GRANT_MISSING)."""
        entry = self._entries.get(grant)
        if entry is None:
            raise GrantError(
                f"There is no grant {grant[:40]}.",
                code=Code.GRANT_MISSING,
                hint="List them with `felix bridge list`.",
            )
        return self._view(entry, now)

    def claimed_destination(self, grant: str) -> str:
        """Where a grant that is not believed claims to lead; for the refusal's sentence alone. Empty: no such claim."""
        return next((claim.to_region for claim in self._forged if claim.grant == grant), "")

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


class _Claim(msgspec.Struct):
    stream: str
    from_region: str
    to_region: str
    grant: str = ""


class _ExportClaim(msgspec.Struct):
    terms: _Claim
    grant: str = ""


def _ends(terms: GrantTerms) -> tuple[str, str]:
    return terms.from_region, terms.to_region


def _agree(export: ExportGrant, accepted: ImportGrant) -> bool:
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
