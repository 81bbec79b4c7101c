"""Agreements: what the signed documents in a log say about its crossings, and whether each crossing may stand there. Pure.

Fed with a log's leaves in order. Of each document leaf (version 2) it reads the document, from the leaf or through a
loader from beside the log, verifies it under the keys of the region that it speaks for (policy keys, of now or below their ends in this log, audit.keys_in_log; for
an approval the approver's chain under the region's root), and holds the leaf to it. What nobody signed is not believed, and nothing legal
is taken from a leaf's own fields.

A crossing, an INTENT in an egress log or an ACK in an ingress log, must find *before itself, in the same log*:

1. GRANT and ACCEPT, whose documents agree, with its grant id and terms hash, for its stream, bridge and regions;
2. as many approvals by different people on each side as that side's half states, and on the log's own side as its policy asks;
3. the policy under which the own side's half was made, or a later one of that region: that one, or the newest, lets it cross;
4. no revocation by either of the two regions; no pause and no deny entry that was in the log `STANDING_GRACE_MS` before;
5. its time inside the grant's window.

These are the checks that brokers and agents make (`policy.grant.GrantBook`), on the documents that the log had by then. A half that
replaced another one and asks for more stops crossings as a pause does: for `STANDING_GRACE_MS` after its leaf, the one before it still allows them.

For the register: feed every document leaf of a log to `Agreements.take`, in order, and then take every legal field from
`Agreements.agreement(grant_id)`: the terms as signed, who approved and accepted them, policies, countries. Where it gives
None, or `complete` is false, no pair of signed documents covers the crossing: `crossed-without-terms`, a breach.

Memory is bounded, counts are not. Of a grant's documents, those are held that later ones have not replaced: the newest
halves, APPROVERS_MAX approvals of each region, and of pauses and resumptions what `audit.words` holds. A revocation is held for ever.
So one region cannot make another's log wrong by signing many documents. Only grants can be too many (GRANTS_MAX, for each region by itself).
What the log's own region forbade, and when (`stops`), is held as long as the log is. Callers: audit.verify, audit.proof, audit.spark.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgspec

from audit.allowance import Allowed
from audit.crossed import Crossed
from audit.halves import Half, Halves, Paper
from audit.keys_in_log import KeysInLog
from audit.leaf import DOCUMENT_KINDS, Header, Kind, Leaf, Side, Terms
from audit.legal_fields import legal_fields
from audit.origin import Origin
from audit.pin_leaf import differences, is_pinned
from audit.trust import Trust
from audit.words import Denied, Ranked, Words
from felix.errors import FelixError
from felix.names import NamePattern, SpiffeId, StreamName
from policy.approval import (
    APPROVERS_MAX,
    Approval,
    ApprovalBody,
    ApprovalRule,
    Document,
    Tally,
    earliest,
    has_come,
    late_ms,
    name_of,
    open_approval,
    parse_document,
    tally,
)
from policy.grant import (
    EVERYWHERE,
    NEVER,
    Attempt,
    DenyEntry,
    ExportGrant,
    Fit,
    GrantBook,
    GrantView,
    ImportGrant,
    Refusal,
    Standing,
    StandingAction,
    agree,
    approves,
    check_path,
    deny_rank,
    fit_of,
    half_rank,
    open_export,
    open_import,
    paused,
    standing_rank,
)
from policy.residency import Decision, ResidencyPolicy, decide_grant, open_policy
from policy.signed import Purpose, SignatureError, SignedDocument, Trusted, decode_body, verify
from policy.terms import GrantTerms
from policy.truncation import Accepted, Truncation

OUTLAWED: Final = "outlawed"
"""The word of a stop that a policy says."""
CLOCK_SLACK_MS: Final = 60_000
"""By how much a leaf's time may be before that of one before it, and nothing follows from it."""
STANDING_GRACE_MS: Final = 10_000
"""What was on its way when a pause or a deny entry reached the log may still be written down so long after it."""
GRANTS_MAX: Final = 1 << 16
"""Grants of one log whose first document one region signed, and whose documents are held: some 10 kB each. A broker keeps 5,000 documents
of another region (region.governance), so nobody's grants but the log's own region's come near it, and no region's take the places of another's."""
ACCEPTANCES_MAX: Final = 64
"""Acceptances of one grant that differ in what they accept, held until its export says which one fits; of more, those signed last."""
POLICIES_MAX: Final = 1_024
"""Revisions of one region's policy that are held. Of more, half of them go: those that no half names before others, then the older."""
POLICIES_READ_MAX: Final = 4_096
"""Policies whose reading is remembered, with some 500 bytes each, or SENTENCE_MAX: the largest takes 0.6 s, and a leaf that names it again has 250 bytes."""
SENTENCE_MAX: Final = 2_000
"""Characters, of why a policy does not hold: it may have any number of mistakes."""
TIMES_MAX: Final = 1 << 16
"""Leaves whose times run back, or are run back from, that are held of one log. A clock that is wrong so often says nothing."""
DECISIONS_ASKED_MAX: Final = 200_000
"""Of policies about what arrived, asked of one log for a report: 0.1 ms each, and ten times as long under policies of the largest size."""
DECISIONS_MAX: Final = 256
"""Of policies about streams, remembered for one grant: a pattern may fit many streams. More are made anew."""

Load = Callable[[Header], bytes | None]
"""Gives a leaf's document, from the leaf or from beside the log (`audit.document_leaf.read_document`); None: not there."""

VERSION_1_UNSUPPORTED: Final = (
    "that Felix 0.1 wrote them: whoever has the log's key can write its format today, for which nothing has to be signed",
    "that the terms are those that both regions signed: the documents are not in the leaves, or were not checked",
    "that named people approved the terms: approvals were texts",
    "who accepted the grant at the destination, and under which policy",
    "that grants were not paused, and streams not denied, when records crossed",
    "the records' keys, headers and times: commitments cover payloads alone",
)
"""What leaves of version 1 do not show, whoever reads them."""


class Elsewhere(NamedTuple):
    """A region says itself that it is in another country than a policy says."""

    region: str
    said: str
    by_itself: str
    where: str
    """bundle or policy"""

    def sentence(self, policy: str) -> str:
        """`policy`: which one it is, after "the policy"."""
        return f"{self.region} is in {self.said} by the policy {policy}, and in {self.by_itself} by {self.region}'s own {self.where}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """What two regions signed about one grant, verified. Times in ms since the Unix epoch."""

    grant_id: str
    export: ExportGrant
    accepted: ImportGrant
    approvals: tuple[ApprovalBody, ...]
    """everybody's whose approval holds, of both sides, by approver; who of them counts is the halves' and policies' say"""
    source_policy: ResidencyPolicy | None
    """of the source, where it stands in the log: the one that the export was made under, else the newest later one"""
    destination_policy: ResidencyPolicy | None
    problems: tuple[str, ...]
    """what is missing of it; empty where it is complete"""
    leaves: tuple[int, ...]
    """indexes of the leaves that it was read from"""

    @property
    def complete(self) -> bool:
        """True where nothing crosses under it for want of a document."""
        return not self.problems

    @property
    def terms(self) -> GrantTerms:
        return self.export.terms

    @property
    def terms_hash(self) -> bytes:
        return bytes.fromhex(self.export.terms_hash)

    @property
    def approvers(self) -> tuple[str, ...]:
        """SPIFFE ids of those who approved, both sides."""
        return tuple(body.approver for body in self.approvals)

    @property
    def accepted_by(self) -> str:
        """SPIFFE id of the operator of the destination who accepted."""
        return self.accepted.accepted_by

    def place(self, region: str) -> tuple[str, str]:
        """Country and jurisdiction of a region, by the signed policies: the source's word before the destination's. Empty
        texts where neither policy stands in the log."""
        for policy in (self.source_policy, self.destination_policy):
            if policy is not None and (entry := policy.file.regions.get(region)) is not None:
                return entry.country, entry.jurisdiction
        return "", ""

    def elsewhere(self, trust: Trust) -> tuple[Elsewhere, ...]:
        """Which of the two regions says itself that it is in another country than the policy which counts here: in its bundle, as people compared that, or
        where none is trusted in its own policy. Who signs that policy says where the other region is, and lets records cross by that."""
        found = []
        for region, policy in (
            (self.terms.from_region, self.source_policy),
            (self.terms.to_region, self.destination_policy),
        ):
            said, trusted = self.place(region)[0], trust.find(region)
            own = None if policy is None else policy.file.regions.get(region)
            by_itself = trusted.country if trusted is not None else own.country if own is not None else ""
            if said and by_itself and said != by_itself:
                found.append(
                    Elsewhere(region, said, by_itself, "bundle" if trusted is not None else "policy")
                )
        return tuple(found)

    @property
    def legal_fields(self) -> Terms:
        """The legal fields as the reports name them. Every one is signed; `approvers` are those whose approvals hold."""
        terms = self.terms
        found = legal_fields(terms, self.place(terms.from_region)[0], self.place(terms.to_region)[0])
        return msgspec.structs.replace(found, approvers=self.approvers)


class Stop(NamedTuple):
    """What the log's own region forbade to leave it, from when on and until when, by the times of the leaves (ms)."""

    leaf: int
    word: str
    """revoked, paused, denied or outlawed"""
    grant_id: str
    """empty of a deny entry"""
    streams: str
    """of a deny entry, a pattern of names; of a policy, the stream; else empty"""
    peer: str
    """the region it must not go to; empty: any"""
    from_ms: int
    until_ms: int | None
    """None: it still holds at the log's end"""
    document: bytes = b""
    """the SHA-256 of the word"""
    may_wait: bool = False
    """whether what crossed before may arrive long after it: a policy is brought to nobody, and an envelope waits at the destination until the grant's rate lets it in"""
    told_to_ms: int | None = None
    """of a policy that still holds at the log's end: until when it is known that no later one took its place; None: it is"""
    until_leaf: int | None = None
    """of what ended it; None also where a policy's own dates did"""
    sure_from_ms: int = NEVER
    """no earlier than any leaf before it says: it is later than `from_ms` where the log's clock had been set back"""
    sure_until_ms: int | None = None
    """no later than any leaf behind its end says: the clock may have been ahead then"""


class _Policy(NamedTuple):
    """A revision, its leaf, and the time of that (ms). `era`: of the key that signed it (audit.keys_in_log)."""

    policy: ResidencyPolicy
    leaf: int
    time_ms: int
    era: int = 0
    document: bytes = b""
    """its SHA-256"""

    @property
    def rank(self) -> tuple[int, int]:
        """Of two policies of a region the one under the later key counts, and then the higher revision."""
        return self.era, self.policy.revision


@dataclass(slots=True)
class _Held:
    """What the documents about one grant say so far."""

    export: Halves[ExportGrant] | None = None
    """all of one grant have the terms of the first"""
    accepted: dict[Fit, Halves[ImportGrant]] = field(default_factory=dict)
    """those that fit the export; before there is one, all that may fit"""
    approved: dict[tuple[str, str], dict[tuple[str, str], tuple[ApprovalBody, Paper]]] = field(
        default_factory=dict
    )
    """by region and mesh, and by approver and terms hash: those of the export's terms; before there is one, of any"""
    standings: dict[str, Words[Standing]] = field(default_factory=dict)
    """pauses and resumptions by region"""
    goes_on: list[Accepted] = field(default_factory=list)
    """truncations that were accepted, and resends, before it was known between which regions the grant is"""
    revoked_by: dict[str, int] = field(default_factory=dict)
    """the leaf of the first revocation of each region; those at the grant's two ends have a say"""
    stops: _Stops | None = None
    """what the log's own region said"""
    last_ms: int = 0
    """the latest time of a crossing"""
    book: GrantBook | None = None
    """of the newest halves, and the approvals"""
    older: tuple[Half[ExportGrant], Half[ImportGrant], GrantBook] | None = None
    """the same of two halves of which one was replaced"""
    decisions: dict[tuple[str, bytes, bool], Decision] = field(default_factory=dict)
    """of policies about a stream, by the policy's hash and whether it is in force"""
    approved_from: dict[tuple[bytes, str, ApprovalRule], int] = field(default_factory=dict)
    """from when on (ms) a policy's rule has its approvals, by the policy's hash and who accepted the grant"""
    placed: dict[tuple[int, int, bytes, int], tuple[str, ...]] = field(default_factory=dict)
    """where regions are otherwise, by the leaves of two halves, the policy that lets a crossing stand, and how many policies had been taken"""
    agreed: Agreement | None = None
    """the newest that was complete before a half was signed again"""

    @property
    def exports(self) -> tuple[ExportGrant, ...]:
        return () if self.export is None else (self.export.newest.body,)

    @property
    def imports(self) -> tuple[ImportGrant, ...]:
        return tuple(halves.newest.body for halves in self.accepted.values())

    @property
    def approvals(self) -> list[ApprovalBody]:
        """Those that hold, by approver."""
        bodies = (body for held in self.approved.values() for body, _ in held.values())
        return sorted(bodies, key=lambda body: body.approver)

    @property
    def papers(self) -> list[Paper]:
        """What the newest halves and the approvals are read from, in the log's order."""
        found = [halves.newest.paper for halves in self.accepted.values()]
        if self.export is not None:
            found.append(self.export.newest.paper)
        return sorted((*found, *self.signatures), key=lambda paper: paper.leaf)

    @property
    def signatures(self) -> Iterator[Paper]:
        """What the approvals are read from."""
        return (paper for held in self.approved.values() for _, paper in held.values())

    def revoked(self, terms: GrantTerms) -> bool:
        """Whether one of the grant's two regions revoked it; nobody else can."""
        return not self.revoked_by.keys().isdisjoint((terms.from_region, terms.to_region))

    def paused(self, terms: GrantTerms, until_ms: int) -> Refusal | None:
        """Whether one of the two had paused it by then (ms), by the times of the leaves."""
        for region in (terms.from_region, terms.to_region):
            words = self.standings.get(region)
            standing = None if words is None else words.stop(until_ms)
            if standing is not None:
                return paused(standing)
        return None

    def is_newer(self, body: ExportGrant | ImportGrant, era: int) -> bool:
        """Whether this half takes the place of the one that is held, or fills an empty one. The first export fixes the grant's terms: an id
        is a part of their hash, and who draws up terms may find two of one id."""
        if isinstance(body, ExportGrant):
            newest = None if self.export is None else self.export.newest.body
            if newest is not None and newest.terms_hash != body.terms_hash:
                return False
            return self.export is None or self.export.is_newer(body, era)
        if self.export is not None and not agree(self.export.newest.body, body):
            return False
        before = self.accepted.get(fit_of(body))
        return before is None or before.is_newer(body, era)

    def keep_half(self, body: ExportGrant | ImportGrant, paper: Paper, time_ms: int) -> None:
        """Hold a half that is newer, and whose leaf has this time (ms)."""
        if isinstance(body, ExportGrant):
            if self.export is not None:
                self.export.take(Half(body, paper), time_ms)
                return
            self.export = Halves(Half(body, paper), time_ms)
            self.approved = {
                place: {key: each for key, each in held.items() if approves(body, each[0])}
                for place, held in self.approved.items()
            }
            self.accepted = {
                fit: halves for fit, halves in self.accepted.items() if agree(body, halves.newest.body)
            }
            return
        halves = self.accepted.get(fit_of(body))
        if halves is not None:
            halves.take(Half(body, paper), time_ms)
            return
        self.accepted[fit_of(body)] = Halves(Half(body, paper))
        if len(self.accepted) > ACCEPTANCES_MAX:
            del self.accepted[min(self.accepted, key=lambda fit: half_rank(self.accepted[fit].newest.body))]

    def keep_approval(self, body: ApprovalBody, paper: Paper) -> bool:
        """Hold an approval; False where it changes nothing. As in a grant's book: one of other terms is of nothing here; of two by one person, the one of the earlier time;
        and of too many people of one region, the earlier ones: at any time as many of them count as are asked for, or all."""
        if self.export is not None and not approves(self.export.newest.body, body):
            return False
        approver = SpiffeId.parse(body.approver)
        held = self.approved.setdefault((approver.region, approver.mesh), {})
        before = held.get((body.approver, body.terms_hash))
        if before is None and len(held) >= APPROVERS_MAX:
            before = max(held.values(), key=lambda each: earliest(each[0]))
        if before is not None:
            if earliest(before[0]) <= earliest(body):
                return False
            del held[before[0].approver, before[0].terms_hash]
        held[body.approver, body.terms_hash] = body, paper
        return True

    def changed(self) -> None:
        """Halves or approvals changed."""
        self.book = self.older = None
        self.decisions.clear()
        self.approved_from.clear()


class Agreements:
    """The documents of one log, so far."""

    def __init__(self, trust: Trust, origin: Origin, keys: KeysInLog | None = None) -> None:
        """`keys`: of the log; None: no former key counts in it."""
        self._origin = origin
        self._in_log = KeysInLog(trust, origin.text) if keys is None else keys
        self._trust, self._anchors = trust, trust.anchors
        self._grants: dict[str, _Held] = {}
        self._judged: tuple[Header, bool] | None = None
        """the crossing that was judged last and may stand, and whether it does by halves that were replaced"""
        self._policies_taken = 0
        self._begun: Counter[str] = Counter()
        """grants by the region whose document came first"""
        self._policies: dict[str, dict[bytes, _Policy]] = {}
        self._read_policies: dict[bytes, dict[str, Any] | str] = {}
        """by the SHA-256 of the document, what its leaf repeats, or why it does not hold"""
        self._times = _Times()
        self._in_force: list[_Policy] = []
        """the policies of the own region that were in force, one after the other"""
        self._has_forgotten = False
        """whether some of them are held no more: which was in force when is not known then"""
        self._denied = Denied()
        self._own_denies = _Stops()
        self.documents = 0
        """how many were verified"""
        self.crossed = Crossed()
        """which records crossed, and from which incarnation another goes on"""
        self.late_ms = 0
        """where the leaf that was taken last is of an approval by one of the log's own region, which has it from its people: for how long the approver's
        certificate had ended by the leaf's time (policy.approval.late_ms)"""

    # -- documents -------------------------------------------------------------------------------------

    def take(self, index: int, leaf: Leaf, load: Load) -> list[str]:
        """Take the next document leaf. Returns a sentence for each thing that does not hold; such a document is not
        believed. Leaves of other kinds, and of version 1, are left aside."""
        header, self.late_ms = leaf.header, 0
        if header.kind not in DOCUMENT_KINDS:
            return []
        self._judged = None
        if leaf.version == 1:
            return []
        self._times.take(index, header.time_ms)
        what = header.kind.name if not header.grant_id else f"{header.kind.name} of {header.grant_id}"
        try:
            data = load(header)
            if data is None:
                return [f"{what}: its document is neither in the leaf nor beside the log."]
            if sha256(data).digest() != header.document_sha256:
                return [f"{what}: the document is not the one that the leaf names."]
            document = parse_document(data)
            differing = self._open(index, header, document)
        except FelixError as error:
            return [f"{what}: {error.sentence}"]
        if differing:
            return [f"{what}: leaf and document differ in {', '.join(differing)}."]
        self.documents += 1
        return []

    def pinned(self, index: int, leaf: Leaf, load: Load) -> list[str]:
        """What does not hold of the pin in a KEY leaf, a sentence for each thing; other leaves are left aside. Which bundle is believed is not
        asked: that is the verifier's own choice."""
        header = leaf.header
        if not is_pinned(header) or leaf.version == 1:
            return []
        try:
            data = load(header)
            if data is None:
                return ["KEY, pinned: its pin is neither in the leaf nor beside the log."]
            if sha256(data).digest() != header.document_sha256:
                return ["KEY, pinned: the pin is not the one that the leaf names."]
            pin = self._in_log.open_pin(data, index, self._origin.region)
        except FelixError as error:
            return [f"KEY, pinned: {error.sentence}"]
        if differing := differences(header, pin):
            return [f"KEY, pinned: leaf and pin differ in {', '.join(differing)}."]
        self.documents += 1
        return []

    def _open(self, index: int, header: Header, document: Document) -> list[str]:
        """Verify and keep a document; or in what the leaf differs from it. Raises SignatureError."""
        kind = kind_of(document)
        if kind is not header.kind:
            return ["kind"]
        if not isinstance(document, Approval):
            self._in_log.require_not_ended(document, index)
        keys = self._in_log.policy_keys_at(index)
        if isinstance(document, Approval):
            approval = open_approval(document, self._anchors)
            if self._origin.bridge is None and approval.region == self._origin.region:
                # In another log, and an agent's, it may come at any time.
                self.late_ms = late_ms(document, header.time_ms)
            said: dict[str, Any] = {
                "grant_id": approval.grant,
                "terms_hash": bytes.fromhex(approval.terms_hash),
            }
            return self._keep(index, header, document, approval.grant, said, approval)
        match document.purpose:
            case Purpose.POLICY:
                return self._policy(index, header, document, keys)
            case Purpose.EXPORT:
                export = open_export(document, keys)
                return self._keep(index, header, document, export.grant, _said_by_export(export), export)
            case Purpose.IMPORT:
                accepted = open_import(document, keys)
                said = _said_by_import(accepted)
                return self._keep(index, header, document, accepted.grant, said, accepted)
            case Purpose.STANDING:
                verify(document, keys)
                standing = decode_body(document, Standing, Purpose.STANDING)
                said = {"grant_id": standing.grant}
                if kind is Kind.STANDING:
                    said["action"] = standing.action.value
                if standing.region != document.region:
                    return ["region"]
                return self._keep(index, header, document, standing.grant, said, standing)
        verify(document, keys)
        entry = decode_body(document, DenyEntry, Purpose.DENY)
        if entry.region != document.region:
            return ["region"]
        peer = entry.region if entry.peer == EVERYWHERE else entry.peer
        if differing := _differences(header, {"source_region": entry.region, "destination_region": peer}):
            return differing
        era = self._in_log.era(document)
        self._denied.take(entry, header.time_ms, era)
        if entry.region == self._origin.region:
            towards = "" if entry.peer == EVERYWHERE else entry.peer
            word = "" if entry.lifted else "denied"
            digest = header.document_sha256
            stop = Stop(index, word, "", entry.streams, towards, header.time_ms, None, digest)
            self._own_denies.take(("", entry.streams, towards, False), (era, deny_rank(entry)), stop)
        return []

    def _policy(self, index: int, header: Header, document: SignedDocument, keys: Trusted) -> list[str]:
        read = self._read_policies.get(header.document_sha256)
        if isinstance(read, str):
            raise SignatureError(read)
        if read is not None:
            differing = _differences(header, read)
            if differing or header.policy_hash in self._policies.get(header.source_region, {}):
                return differing
        if read is None and len(self._read_policies) >= POLICIES_READ_MAX:
            del self._read_policies[next(iter(self._read_policies))]
        try:
            policy = open_policy(document, keys, "the policy in the log")
        except FelixError as error:
            self._read_policies[header.document_sha256] = error.sentence[:SENTENCE_MAX]
            raise
        said = self._read_policies[header.document_sha256] = {
            "policy_version": policy.revision,
            "policy_hash": policy.hash,
            "source_region": policy.region,
            "destination_region": policy.region,
        }
        differing = _differences(header, said)
        if not differing:
            held, era = self._policies.setdefault(policy.region, {}), self._in_log.era(document)
            self._policies_taken += 1
            known = held.setdefault(
                policy.hash, _Policy(policy, index, header.time_ms, era, header.document_sha256)
            )
            if known.era < era:
                # The same text, signed again under a later key.
                held[policy.hash] = known._replace(era=era)
            if policy.region == self._origin.region:
                self._came_into_force(_Policy(policy, index, header.time_ms, era, header.document_sha256))
                if len(held) == 1:
                    # Nothing was complete without it.
                    for grant, about in self._grants.items():
                        self._remember_older(about, grant, header.time_ms)
            if len(held) > POLICIES_MAX:
                self._policies[policy.region] = self._half_of(held)
                self._has_forgotten |= policy.region == self._origin.region
        return differing

    def _came_into_force(self, found: _Policy) -> None:
        """A policy of the own region, unless one that outranks it is in force. An earlier text may come back, under a later key: then it is in force from this leaf on, and what it says
        of the time before is nothing."""
        newest = self._in_force[-1] if self._in_force else None
        if newest is not None and found.rank <= newest.rank:
            return
        if newest is not None and newest.policy.hash == found.policy.hash:
            self._in_force[-1] = newest._replace(era=found.era)
        else:
            # Of what was forgotten nothing is concluded, and what was replaced a moment ago is asked still.
            self._in_force = [*(self._in_force[-1:] if self._has_forgotten else self._in_force), found]

    def _half_of(self, policies: dict[bytes, _Policy]) -> dict[bytes, _Policy]:
        """The newest of these revisions, those that a half was made under before all others."""
        named: set[str] = set()
        for held in self._grants.values():
            named.update(export.policy_hash for export in held.exports)
            named.update(accepted.policy_hash for accepted in held.imports)
        newest = max(policies, key=lambda hash_: policies[hash_].rank)
        kept = sorted(
            policies,
            key=lambda hash_: (hash_ == newest, hash_.hex() in named, *policies[hash_].rank),
            reverse=True,
        )
        return {hash_: policies[hash_] for hash_ in kept[: POLICIES_MAX // 2]}

    def _keep(
        self,
        index: int,
        header: Header,
        document: Document,
        grant: str,
        said: dict[str, Any],
        body: ExportGrant | ImportGrant | ApprovalBody | Standing,
    ) -> list[str]:
        held = self._grants.get(grant)
        terms = _terms_of(held, body)
        if isinstance(body, ImportGrant) and not (held and held.exports and agree(held.exports[0], body)):
            # An acceptance of something else is believed for nothing, and says nothing about the log: its leaf repeats it.
            pass
        elif not header.bridge:
            # Written before the grant was known there: the region that signed stands for both.
            said |= {"source_region": document.region, "destination_region": document.region}
        elif terms is not None:
            # What else the leaf says of the grant is the grant's, or is left out. An approval says itself which terms it is of, and is
            # of nothing here where these are others.
            said = {
                name: value
                for name, value in _names(terms).items()
                if name in ("source_region", "destination_region") or getattr(header, name)
            } | said
            said["side"] = Side.EGRESS if self._origin.region == terms.from_region else Side.INGRESS
            if self._origin.region not in (terms.from_region, terms.to_region):
                return ["region: the grant is between other regions than the log's own"]
        if differing := _differences(header, said):
            return differing
        if held is None:
            if self._begun[document.region] >= GRANTS_MAX:
                return [f"more than {GRANTS_MAX} grants of which {document.region} signed the first document"]
            self._begun[document.region] += 1
            held = self._grants[grant] = _Held()
        era = 0 if isinstance(document, Approval) else self._in_log.era(document)
        paper = Paper(index, document, era)
        match body:
            case ExportGrant() | ImportGrant():
                if held.is_newer(body, era):
                    if held.exports and held.imports:
                        self._remember(held, grant)
                    held.keep_half(body, paper, header.time_ms)
                    held.changed()
                    self._derive(held)
                    self._remember_older(held, grant, header.time_ms)
            case ApprovalBody():
                if held.keep_approval(body, paper):
                    held.changed()
                    self._remember_older(held, grant, header.time_ms)
            case Standing():
                self._stand(held, index, header, body, era)
        return []

    def _stand(self, held: _Held, index: int, header: Header, standing: Standing, era: int) -> None:
        action, time_ms = standing.action, header.time_ms
        if isinstance(standing.truncation, Truncation):
            goes_on = Accepted(
                standing.truncation, standing.region, standing.at, action is StandingAction.RESEND
            )
            held.goes_on.append(goes_on)
            self._derive(held)
            return
        if action is StandingAction.REVOKE:
            held.revoked_by.setdefault(standing.region, index)
        else:
            words = held.standings.setdefault(standing.region, Words())
            rank = era, standing_rank(standing)
            words.take(rank, time_ms, standing, stops=action is StandingAction.PAUSE)
        if standing.region == self._origin.region:
            if held.stops is None:
                held.stops = _Stops()
            key = (standing.grant, "", "", action is StandingAction.REVOKE)
            word, digest = _FORBIDS.get(action, ""), header.document_sha256
            stop = Stop(index, word, standing.grant, "", "", time_ms, None, digest)
            held.stops.take(key, (era, standing_rank(standing)), stop)

    def _derive(self, held: _Held) -> None:
        """What goes on under another incarnation: what is let out again is the source's word alone; what is gone, the destination's, too, in logs of
        versions that went by it (policy.truncation)."""
        for export in held.exports:
            ends = export.terms.from_region, export.terms.to_region
            for found in held.goes_on:
                if found.region in ends[: 1 if found.is_resend else 2]:
                    self.crossed.derive(found.incarnation, found.ended, found.truncated_at, found.region)
            held.goes_on.clear()

    def _remember(self, held: _Held, grant: str) -> None:
        """A half is about to be signed again, and may ask for more approvals than there are: under what was complete until now,
        records crossed lawfully, and no region undoes that alone."""
        found = self.agreement(grant)
        if found is not None and found.complete:
            held.agreed = found

    def _remember_older(self, held: _Held, grant: str, time_ms: int) -> None:
        """A document came, in a leaf of this time, that may complete two halves of which one was replaced a moment ago: what was on its
        way crosses under them lawfully, as under what `_remember` remembers."""
        if held.agreed is not None or held.export is None or not held.accepted:
            return
        now_ms = held.export.newest.body.terms.expires - 1

        def enough(export: ExportGrant, accepted: ImportGrant, half: ExportGrant | ImportGrant) -> bool:
            return not _lacking(held, half, export, accepted, now_ms).missing

        pair = self._older_pair(held, enough, time_ms - STANDING_GRACE_MS)
        if pair is None:
            return
        view = self._book_of(held, pair).get(grant, now_ms)
        if view.export is not None and view.accepted is not None:
            found = self._agreement(held, view)
            held.agreed = found if found.complete else None

    def taken_late(self, header: Header) -> int:
        """By how much (ms) the latest crossing before this REVOKE, which was just taken, was taken after the revocation was in force and drained, by
        the times of the two leaves; 0 where none was. Both times are the writer's word: its leaf was put off, or a clock was set back."""
        held = self._grants.get(header.grant_id)
        # Nothing crossed where no half is known; and a third region's word ends nothing.
        if held is None or not header.drain_until_ms or not held.exports:
            return 0
        return max(0, held.last_ms - header.drain_until_ms) if held.revoked(held.exports[-1].terms) else 0

    # -- crossings -------------------------------------------------------------------------------------

    def judge(self, header: Header) -> list[str]:
        """Why this INTENT or ingress ACK of version 2 may not stand here: a sentence, or nothing."""
        what = f"{header.kind.name} under grant {header.grant_id}"
        held = self._grants.get(header.grant_id)
        if held is None:
            return [f"{what}: no GRANT and no ACCEPT leaf stands before it."]
        if not held.exports:
            return [f"{what}: no GRANT leaf stands before it."]
        if not held.imports:
            return [f"{what}: no ACCEPT leaf stands before it."]
        terms = held.exports[-1].terms
        if held.revoked(terms):
            return [f"{what}: the grant was revoked before."]
        held.last_ms = max(held.last_ms, header.time_ms)
        if all(bytes.fromhex(export.terms_hash) != header.terms_hash for export in held.exports):
            return [f"{what}: its hash of terms is not the grant's."]
        try:
            stream, bridge = StreamName.parse(header.stream), SpiffeId.parse(header.bridge)
        except FelixError as error:
            return [f"{what}: {error.sentence}"]
        attempt = Attempt(stream, header.source_region, header.destination_region, bridge, header.path)
        problem, is_older = self._standing(held, attempt, header)
        self._judged = None if problem else (header, is_older)
        return [f"{what}: {problem}"] if problem else []

    def _standing(self, held: _Held, attempt: Attempt, header: Header) -> tuple[str, bool]:
        """Why a crossing may not stand here, or nothing; and whether that is by halves that were replaced."""
        problem = self._refusal(held, self._book(held), attempt, header)
        if not problem or (older := self._older_book(held, attempt.stream, header)) is None:
            return problem, False
        # It was on its way when a half was signed again, or may not stand under the one before either.
        return self._refusal(held, older, attempt, header), True

    def outlawed(self, header: Header) -> str:
        """Of a crossing that may stand here: why the newest policy of the own side in the log, or the one that its half names once that is over, does not allow it; or nothing. Brokers ask the
        policy in force, and agents do now, so no honest one is in a log since. It breaks no rule: what was read before may have been announced then by agents of before."""
        held = self._grants.get(header.grant_id)
        if held is None or not held.exports or not held.imports:
            return ""
        export, accepted, own = held.exports[-1], held.imports[-1], self._own(header)
        until_ms = header.time_ms - STANDING_GRACE_MS
        newest = next((each for each in reversed(self._in_force) if each.time_ms <= until_ms), None)
        if newest is None or own != self._origin.region:
            return ""
        policy = newest.policy
        if not policy.in_force(until_ms):
            return f"revision {policy.revision} of the policy of {own} is not in force by its own dates"
        if (export if own == export.terms.from_region else accepted).policy_hash == policy.hash.hex():
            return ""
        stream = StreamName.parse(header.stream)
        decision = self._decide(held, export, accepted, stream, policy, header.time_ms)
        return (
            "" if decision.allowed else f"revision {policy.revision} of the policy of {own} does not allow it"
        )

    def strayed(self, header: Header) -> list[str]:
        """Why the records of this egress ACK of version 2 may not have been where it says, and its receipt: a sentence, or nothing. An INTENT may
        have said nothing of it. Whether its grant stands is asked of INTENTs alone (`judge`)."""
        held = self._grants.get(header.grant_id)
        for export in () if held is None else held.exports:
            if bytes.fromhex(export.terms_hash) == header.terms_hash:
                refusal = check_path(header.grant_id, export.terms, header.path)
                return [f"ACK under grant {header.grant_id}: {refusal.sentence}"] if refusal else []
        return []

    def allowed(self, header: Header) -> Allowed | None:
        """What the terms under which this crossing of version 2 stands allow altogether; None where no export of these terms stands before it."""
        held = self._grants.get(header.grant_id)
        export = None if held is None else next(iter(held.exports), None)
        if export is None or bytes.fromhex(export.terms_hash) != header.terms_hash:
            return None
        return Allowed(export.terms.budget_bytes, export.terms.rate_bytes)

    def _refusal(self, held: _Held, book: GrantBook, attempt: Attempt, header: Header) -> str:
        """Why the crossing may not stand here, by the halves in this book; or nothing."""
        result = book.check(attempt, None, header.time_ms, grant=header.grant_id)
        if not isinstance(result, Refusal):
            until_ms = header.time_ms - STANDING_GRACE_MS
            arriving = held.exports[-1].terms.destination_of(attempt.stream)
            stopped = self._denied.refusal(attempt, arriving, until_ms) or held.paused(
                held.exports[-1].terms, until_ms
            )
            result = stopped or result
        if isinstance(result, Refusal):
            return result.sentence
        if result.terms_hash != header.terms_hash:
            return "its hash of terms is not the grant's."
        if str(result.destination_stream) != header.destination_stream:
            return f"it arrives as {header.destination_stream}, the grant says {result.destination_stream}."
        return self._policy_unmet(held, result.export, result.accepted, attempt.stream, header)

    def rests_on(self, header: Header, approvals_max: int) -> list[int]:
        """Indexes of the leaves from which follows that this crossing, about which `judge` finds nothing, may stand here: the two halves,
        the own side's policy that lets it, and the one that its half names, where they are two; the approvals that they ask for; and of
        the other approvals the earliest, `approvals_max` in all."""
        held, stream = self._grants[header.grant_id], StreamName.parse(header.stream)
        export, accepted = self._halves_of(held, stream, header)
        own, pair = self._own(header), (export.body, accepted.body)
        policy = self._policy_that_lets(held, *pair, stream, header)
        made = export.body if own == header.source_region else accepted.body
        named = self._policies[own].get(bytes.fromhex(made.policy_hash), policy)
        asked = self._decide(held, *pair, stream, policy.policy, header.time_ms).approvals
        chosen: list[int] = []
        rest: list[tuple[tuple[int, str, str], int]] = []
        for region, half in (
            (header.source_region, export.body),
            (header.destination_region, accepted.body),
        ):
            rules = [ApprovalRule(half.approvals, half.separate), *(asked if region == own else ())]
            names: set[str] = set()
            found = held.approved.get((region, SpiffeId.parse(header.bridge).mesh), {})
            people = sorted(found.values(), key=lambda each: earliest(each[0]))
            for rule in rules:
                counted = set(_tally(held, rule, region, *pair, header.time_ms).approved)
                for body, _ in people:
                    if len(names & counted) >= rule.approvals:
                        break
                    if body.name in counted:
                        names.add(body.name)
            chosen += [paper.leaf for body, paper in people if body.name in names]
            rest += [(earliest(body), paper.leaf) for body, paper in people if body.name not in names]
        more = [leaf for _, leaf in sorted(rest)[: max(0, approvals_max - len(chosen))]]
        return sorted({export.paper.leaf, accepted.paper.leaf, policy.leaf, named.leaf, *chosen, *more})

    def placed_otherwise(self, header: Header) -> tuple[str, ...]:
        """Of this crossing, about which `judge` finds nothing: a sentence for each region that says itself that it is in another country than the own side's policy by
        which this crosses, and for each that does than the one which its half names, where that is another: by that the register names countries."""
        held, stream = self._grants[header.grant_id], StreamName.parse(header.stream)
        export, accepted = self._halves_of(held, stream, header)
        lets = self._policy_that_lets(held, export.body, accepted.body, stream, header).policy
        key = (export.paper.leaf, accepted.paper.leaf, lets.hash, self._policies_taken)
        found = held.placed.get(key)
        if found is None:
            if len(held.placed) >= DECISIONS_MAX:
                held.placed.clear()
            found = held.placed[key] = self._placed(header, export.body, accepted.body, lets)
        return found

    def _placed(
        self, header: Header, export: ExportGrant, accepted: ImportGrant, lets: ResidencyPolicy
    ) -> tuple[str, ...]:
        made = Agreement(
            header.grant_id, export, accepted, (),
            self._policy_for(header.source_region, export), self._policy_for(header.destination_region, accepted),
            (), (),
        )  # fmt: skip
        by = (
            replace(made, source_policy=lets)
            if self._own(header) == header.source_region
            else replace(made, destination_policy=lets)
        )
        crossed = by.elsewhere(self._trust)
        return (
            *(each.sentence("under which records crossed") for each in crossed),
            *(
                each.sentence("that the grant was made under")
                for each in made.elsewhere(self._trust)
                if each not in crossed
            ),
        )

    def lets(self, header: Header) -> ResidencyPolicy:
        """The own side's policy that lets this crossing, about which `judge` finds nothing, stand here: of several the one that its half
        names before the newest."""
        held, stream = self._grants[header.grant_id], StreamName.parse(header.stream)
        export, accepted = self._halves_of(held, stream, header)
        return self._policy_that_lets(held, export.body, accepted.body, stream, header).policy

    def _halves_of(
        self, held: _Held, stream: StreamName, header: Header
    ) -> tuple[Half[ExportGrant], Half[ImportGrant]]:
        """The two halves under which a crossing stands: the newest, or where it does not stand under these, those before."""
        assert held.export is not None
        (accepted,) = held.accepted.values()
        if self._judged is not None and self._judged[0] is header:
            is_older = self._judged[1]
        else:
            bridge = SpiffeId.parse(header.bridge)
            attempt = Attempt(stream, header.source_region, header.destination_region, bridge, header.path)
            _, is_older = self._standing(held, attempt, header)
        if is_older:
            assert held.older is not None
            return held.older[:2]
        return held.export.newest, accepted.newest

    def _policy_that_lets(
        self, held: _Held, export: ExportGrant, accepted: ImportGrant, stream: StreamName, header: Header
    ) -> _Policy:
        own = self._own(header)
        half = export if own == header.source_region else accepted
        return next(
            found
            for found in self._policies_for(own, half, header.time_ms - STANDING_GRACE_MS)
            if not self._asks(held, export, accepted, stream, found.policy, header.time_ms)
        )

    def named(self, header: Header) -> list[str]:
        """Why this leaf of version 2, which accounts for source offsets, may not name its grant here: a sentence, or nothing. What
        both regions signed must stand before it, be for its link and stream, and not be revoked; what else a crossing needs is
        asked of crossings alone (`judge`)."""
        what = f"{header.kind.name} under grant {header.grant_id}"
        held = self._grants.get(header.grant_id)
        if held is None or not held.exports or not held.imports:
            return [f"{what}: no GRANT and no ACCEPT leaf stands before it."]
        if held.revoked(held.exports[-1].terms):
            return [f"{what}: the grant was revoked before."]
        accepted = {half.terms_hash for half in held.imports}
        wanted = header.terms_hash.hex()
        terms = next((half.terms for half in held.exports if half.terms_hash == wanted in accepted), None)
        if terms is None:
            return [f"{what}: its hash of terms is not the grant's."]
        said = (header.source_region, header.destination_region, header.bridge)
        try:
            stream = StreamName.parse(header.stream)
            fits = NamePattern(terms.stream).matches(stream) and said == (
                terms.from_region, terms.to_region, terms.bridge
            )  # fmt: skip
        except FelixError as error:
            return [f"{what}: {error.sentence}"]
        if not fits or str(terms.destination_of(stream)) != header.destination_stream:
            return [f"{what}: the grant is for another stream, for another bridge, or between other regions."]
        return []

    def _book(self, held: _Held) -> GrantBook:
        """The book of the grant's halves and approvals; later words are asked for besides."""
        if held.book is None:
            held.book = self._book_with(held.papers)
        return held.book

    def _older_book(self, held: _Held, stream: StreamName, header: Header) -> GrantBook | None:
        """The book of two halves that both let the crossing go ahead, of those that count at its time and of which one was replaced;
        None where there are none."""

        def enough(export: ExportGrant, accepted: ImportGrant, half: ExportGrant | ImportGrant) -> bool:
            return self._has_asked(held, half, export, accepted, stream, header)

        pair = self._older_pair(held, enough, header.time_ms - STANDING_GRACE_MS)
        if pair is None:
            return None
        if held.older is None or held.older[:2] != pair:
            held.older = (*pair, self._book_of(held, pair))
        return held.older[2]

    @staticmethod
    def _older_pair(
        held: _Held,
        enough: Callable[[ExportGrant, ImportGrant, ExportGrant | ImportGrant], bool],
        until_ms: int,
    ) -> tuple[Half[ExportGrant], Half[ImportGrant]] | None:
        """Two halves, of those whose place was taken later than this (ms) or was not, that have what they ask for; None where none was
        replaced. `enough`: whether a half, the last argument, has that in this export and acceptance."""
        assert held.export is not None
        (accepted_halves,) = held.accepted.values()
        exports, imports = list(held.export.counting(until_ms)), list(accepted_halves.counting(until_ms))
        if len(exports) + len(imports) == 2:
            return None
        newest_export, newest_import = exports[0].body, imports[0].body
        # What a half asks for, it asks of its own side: each is found alone.
        export = next((half for half in exports if enough(half.body, newest_import, half.body)), exports[0])
        accepted = next((half for half in imports if enough(newest_export, half.body, half.body)), imports[0])
        return export, accepted

    def _book_of(self, held: _Held, pair: tuple[Half[ExportGrant], Half[ImportGrant]]) -> GrantBook:
        """The book of these halves and the grant's approvals."""
        return self._book_with((*(half.paper for half in pair), *held.signatures))

    def _book_with(self, papers: Iterable[Paper]) -> GrantBook:
        # Each was verified at its leaf: under a former key below its end.
        return GrantBook((paper.document for paper in papers), self._in_log.policy_keys, self._anchors)

    def _has_asked(
        self,
        held: _Held,
        half: ExportGrant | ImportGrant,
        export: ExportGrant,
        accepted: ImportGrant,
        stream: StreamName,
        header: Header,
    ) -> bool:
        """Whether as many people approved as this half of the two asks for, and on the own side its policy."""
        region = export.terms.from_region if half is export else export.terms.to_region
        if _lacking(held, half, export, accepted, header.time_ms).missing:
            return False
        return region != self._own(header) or not self._policy_unmet(held, export, accepted, stream, header)

    def _own(self, header: Header) -> str:
        return header.source_region if header.side is Side.EGRESS else header.destination_region

    def _policy_unmet(
        self, held: _Held, export: ExportGrant, accepted: ImportGrant, stream: StreamName, header: Header
    ) -> str:
        """What the own side's policy asks for and the documents before the crossing do not have; or nothing."""
        own = self._own(header)
        half = export if own == export.terms.from_region else accepted
        policies = self._policies_for(own, half, header.time_ms - STANDING_GRACE_MS)
        if not policies:
            return f"the policy of {own} that its half names stands in no POLICY leaf before it, and no later one does."
        unmet = [
            self._asks(held, export, accepted, stream, found.policy, header.time_ms) for found in policies
        ]
        return "" if not all(unmet) else unmet[0]

    def _policies_for(
        self, region: str, half: ExportGrant | ImportGrant, until_ms: int
    ) -> tuple[_Policy, ...]:
        """What lets a crossing stand, each alone: the policy that a region's half was made under, and of the later ones of that region the
        newest in the log, as its broker asks the one in force; with those whose place was taken by a leaf that is younger than this (ms).
        An older one says nothing of the half, nor does another text of the same revision: it may be laxer and name other countries, and
        whoever writes the log would choose it. One that came behind a newer one never had its place."""
        known = self._policies.get(region, {})
        named = known.get(bytes.fromhex(half.policy_hash))
        made_under = (0, half.policy_revision) if named is None else named.rank
        later = (held for held in known.values() if held.rank > made_under)
        counting = [] if named is None else [named]
        behind: int | None = None
        for held in sorted(later, key=lambda held: held.rank, reverse=True):
            if behind is not None and held.leaf > behind:
                continue
            counting.append(held)
            behind = held.leaf
            if held.time_ms <= until_ms:
                break
        return tuple(counting)

    def _policy_for(self, region: str, half: ExportGrant | ImportGrant) -> ResidencyPolicy | None:
        """The policy that a region's half was made under, else the newest later one of the region that stands in the log."""
        return next((held.policy for held in self._policies_for(region, half, NEVER)), None)

    def _decide(
        self,
        held: _Held,
        export: ExportGrant,
        accepted: ImportGrant,
        stream: StreamName,
        policy: ResidencyPolicy,
        now: int,
    ) -> Decision:
        terms = export.terms
        made = export if policy.region == terms.from_region else accepted
        # What was on its way when a policy ended may still be written down.
        at = now if policy.in_force(now) else now - STANDING_GRACE_MS
        if made.policy_hash == policy.hash.hex():
            at = made.signed_at
        key = (str(stream), policy.hash, policy.in_force(at))
        decision = held.decisions.get(key)
        if decision is None:
            if len(held.decisions) >= DECISIONS_MAX:
                held.decisions.clear()
            decision = held.decisions[key] = decide_grant(policy, terms, stream, at)
        return decision

    def _asks(
        self,
        held: _Held,
        export: ExportGrant,
        accepted: ImportGrant,
        stream: StreamName,
        policy: ResidencyPolicy,
        now: int,
    ) -> str:
        region = policy.region
        decision = self._decide(held, export, accepted, stream, policy, now)
        if not decision.allowed:
            return (
                f"the policy of {region}, revision {policy.revision}, does not allow it. {decision.sentence}"
            )
        for rule in decision.approvals:
            counted = (policy.hash, accepted.accepted_by, rule)
            if now >= held.approved_from.get(counted, NEVER):
                continue
            found = _tally(held, rule, region, export, accepted, now)
            if found.missing:
                return f"rule {rule.rule} of the policy of {region}, revision {policy.revision}: {found}."
            held.approved_from[counted] = now
        return ""

    # -- what is known ---------------------------------------------------------------------------------

    def agreement(self, grant_id: str, time_ms: int = NEVER) -> Agreement | None:
        """What both regions signed about this grant, as far as the log has come, with the approvals whose time had come by `time_ms`; None where there are no two halves that
        agree. `Agreement.problems` says what else is missing. Where a half was signed again and is not approved as it asks now, what
        was complete before."""
        held = self._grants.get(grant_id)
        if held is None:
            return None
        newest = self._newest(held, grant_id)
        found = newest if newest is not None and newest.complete else held.agreed or newest
        if found is None:
            return None
        return replace(found, approvals=tuple(body for body in found.approvals if has_come(body, time_ms)))

    def _newest(self, held: _Held, grant_id: str) -> Agreement | None:
        if not held.exports or not held.imports:
            return None
        # Which of several halves counts is the book's to say. Who approved, as of the grant's last moment: whether there were
        # enough when something crossed is asked of each crossing.
        view = self._book(held).get(grant_id, held.exports[-1].terms.expires - 1)
        return None if view.export is None or view.accepted is None else self._agreement(held, view)

    def _agreement(self, held: _Held, view: GrantView) -> Agreement:
        export, accepted = view.export, view.accepted
        assert export is not None and accepted is not None
        terms = export.terms
        policies = {
            region: self._policy_for(region, half)
            for region, half in ((terms.from_region, export), (terms.to_region, accepted))
        }
        lacking = [str(found) for found in view.approvals if found.missing]
        problems = [f"The grant {view.grant} is not approved. {'. '.join(lacking)}."] if lacking else []
        own = self._origin.region
        if self._policies.get(own) is None:
            problems.append(f"No POLICY leaf of {own} stands in the log.")
        leaves = tuple(paper.leaf for paper in held.papers)
        return Agreement(
            view.grant,
            export,
            accepted,
            tuple(held.approvals),
            policies[terms.from_region],
            policies[terms.to_region],
            tuple(problems),
            leaves,
        )

    def revocations(self, grant_id: str) -> tuple[int, ...]:
        """Indexes of the REVOKE leaves that end this grant, in order: of each of its two regions the first. Empty where no
        GRANT leaf says which regions these are."""
        held = self._grants.get(grant_id)
        if held is None or not held.exports:
            return ()
        terms = held.exports[-1].terms
        ends = terms.from_region, terms.to_region
        return tuple(sorted(index for region, index in held.revoked_by.items() if region in ends))

    def grants(self) -> tuple[str, ...]:
        """The grants that documents in the log are about, sorted."""
        return tuple(sorted(self._grants))

    def stops(self) -> tuple[Stop, ...]:
        """What the log's own region forbade to leave it by its words: its revocations and pauses of grants out of it, its deny entries. An agent that
        keeps such a document to itself has it neither in its egress log nor at the destination."""
        found: list[Stop] = []
        for _, held in sorted(self._grants.items()):
            if held.stops is not None and self._is_own(held):
                found += held.stops.all()
        return tuple(self._times.surely(stop) for stop in (*found, *self._own_denies.all()))

    def outlawed_stops(self, arrived: Iterable[tuple[str, str]]) -> tuple[tuple[Stop, ...], int]:
        """What the own region's policies forbade to leave it, of these grants and streams, under which something arrived, the most important first; and of how many of them that was not
        asked: of so many policies about so many streams no more than DECISIONS_ASKED_MAX are. Approvals that a policy asked for may have come in between, and are not asked for here."""
        asked, decisions, left_off = list[_Asked](), 0, 0
        if self._has_forgotten:
            return (), sum(1 for _ in arrived)
        for grant, name in arrived:
            held, stream = self._grants.get(grant), _stream_of(name)
            if held is None or held.export is None or stream is None or not self._is_own(held):
                continue
            terms, begun = held.export.newest.body.terms, held.export.first_ms
            if not NamePattern(terms.stream).matches(stream):
                continue
            # Nothing crosses under it at other times, and a region may have had any number of policies.
            during = [
                at
                for at, each in enumerate(self._in_force)
                if self._until(at) > begun and each.time_ms < terms.expires
            ]
            if decisions + len(during) > DECISIONS_ASKED_MAX:
                left_off += 1
                continue
            decisions += len(during)
            asked.append(_Asked(grant, stream, terms, begun, during))
        # Policy by policy: what it takes to ask one is made once.
        by_policy: dict[int, list[_Asked]] = {}
        for one in asked:
            for at in one.policies:
                by_policy.setdefault(at, []).append(one)
        for at, ones in sorted(by_policy.items()):
            for one in ones:
                one.allowed[at] = _allows(self._in_force[at].policy, one.terms, one.stream)
        stops = (stop for one in asked for stop in self._outlawed_stops(one))
        return tuple(self._times.surely(stop) for stop in stops), left_off

    def policy_ranks(self) -> dict[str, tuple[tuple[tuple[int, int], int], ...]]:
        """By region, the ranks of the policies that are held, and the times of their leaves (ms)."""
        return {
            region: tuple((each.rank, each.time_ms) for each in held.values())
            for region, held in self._policies.items()
        }

    def _is_own(self, held: _Held) -> bool:
        """Whether it is a grant out of the log's own region."""
        return bool(held.exports) and held.exports[-1].terms.from_region == self._origin.region

    def _until(self, at: int) -> int:
        """Until when (ms) this one of the policies was in force."""
        return self._in_force[at + 1].time_ms if at + 1 < len(self._in_force) else NEVER

    def _outlawed_stops(self, asked: _Asked) -> Iterator[Stop]:
        """When the own policy in force did not allow the terms of a grant for this stream."""
        stop: Stop | None = None
        for at, (allowed_from, allowed_to) in sorted(asked.allowed.items()):
            each, until = self._in_force[at], self._until(at)
            for from_ms, to_ms in (
                (each.time_ms, min(until, allowed_from)),
                (max(each.time_ms, allowed_to), until),
            ):
                if from_ms >= to_ms or to_ms <= asked.begun_ms:
                    continue
                if stop is None or stop.until_ms != from_ms:
                    if stop is not None:
                        yield stop
                    stop = Stop(
                        each.leaf, OUTLAWED, asked.grant, str(asked.stream), "", max(asked.begun_ms, from_ms), to_ms,
                        each.document, asked.terms.rate_bytes > 0,
                    )  # fmt: skip
                ended = self._in_force[at + 1].leaf if to_ms == until != NEVER else None
                stop = stop._replace(until_ms=to_ms, until_leaf=ended)
        if stop is not None:
            yield stop if stop.until_ms != NEVER else stop._replace(until_ms=None)


@dataclass(slots=True)
class _Asked:
    """A stream of a grant, about which policies are asked."""

    grant: str
    stream: StreamName
    terms: GrantTerms
    begun_ms: int
    policies: list[int]
    """those in force that are to be asked, by their place"""
    allowed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """from when to when (ms) each would allow it"""


def _stream_of(name: str) -> StreamName | None:
    """None for a text that is no name: a leaf may say any."""
    try:
        return StreamName.parse(name)
    except FelixError:
        return None


class _Times:
    """What the times of a log's leaves, which stand in their order, say of each other. A clock may be wrong, and then be set right: a leaf is no older than those before it, and
    no younger than those behind it."""

    def __init__(self) -> None:
        self._latest: list[tuple[int, int]] = []
        """leaves that are later than all before them, where one behind is earlier by more than CLOCK_SLACK_MS; the newest last, whatever is behind"""
        self._earliest: list[tuple[int, int]] = []
        """leaves that are earlier than one before them by as much, and than all of these behind them"""

    def take(self, index: int, time_ms: int) -> None:
        """Take the next document's leaf."""
        if len(self._latest) + len(self._earliest) >= TIMES_MAX:
            return
        if not self._latest or time_ms >= self._latest[-1][1]:
            if self._latest and not (self._earliest and self._earliest[-1][0] > self._latest[-1][0]):
                # Nothing is earlier than the one before: it says no more than this one.
                self._latest.pop()
            self._latest.append((index, time_ms))
        elif time_ms < self._latest[-1][1] - CLOCK_SLACK_MS:
            while self._earliest and self._earliest[-1][1] >= time_ms:
                self._earliest.pop()
            self._earliest.append((index, time_ms))

    def surely(self, stop: Stop) -> Stop:
        """With the times from when and until when it surely held."""
        before = bisect_right(self._latest, stop.leaf, key=itemgetter(0))
        latest_ms = self._latest[before - 1][1] if before else stop.from_ms
        since_ms = latest_ms if latest_ms > stop.from_ms + CLOCK_SLACK_MS else stop.from_ms
        until_ms = stop.until_ms
        if until_ms is not None and stop.until_leaf is not None:
            behind = bisect_right(self._earliest, stop.until_leaf, key=itemgetter(0))
            until_ms = min([until_ms, *(time_ms for _, time_ms in self._earliest[behind : behind + 1])])
        return stop._replace(sure_from_ms=since_ms, sure_until_ms=until_ms)


class _Stops:
    """Intervals from words in order. Only a word that lets go on ends one: a stop that is said again goes on from where it began, or
    saying it every minute would leave no moment at which it had been said long enough to have arrived."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, str, str, bool], tuple[Ranked, Stop]] = {}
        self._ended: list[Stop] = []

    def take(self, key: tuple[str, str, str, bool], rank: Ranked, stop: Stop) -> None:
        """`key`: what it is about. A stop without a word lets it go on. What is outranked says nothing."""
        held = self._newest.get(key)
        if held is not None:
            if rank <= held[0]:
                return
            if held[1].word and stop.word:
                stop = held[1]
            elif held[1].word:
                self._ended.append(held[1]._replace(until_ms=stop.from_ms, until_leaf=stop.leaf))
        self._newest[key] = rank, stop

    def all(self) -> tuple[Stop, ...]:
        """Those that ended, and those that hold."""
        return (*self._ended, *(stop for _, stop in self._newest.values() if stop.word))


_FORBIDS: Final = {StandingAction.PAUSE: "paused", StandingAction.REVOKE: "revoked"}


def read_agreements(
    trust: Trust, origin: Origin, leaves: Iterable[tuple[int, Leaf]], load: Load
) -> tuple[Agreements, list[str]]:
    """The agreements of a log's document leaves, given in order with their indexes, and what did not hold about them."""
    found, problems = Agreements(trust, origin), []
    for index, leaf in leaves:
        problems += found.take(index, leaf, load)
    return found, problems


_KINDS: Final = {
    Purpose.EXPORT: Kind.GRANT,
    Purpose.IMPORT: Kind.ACCEPT,
    Purpose.APPROVAL: Kind.APPROVE,
    Purpose.DENY: Kind.DENY_ENTRY,
    Purpose.POLICY: Kind.POLICY,
}


def kind_of(document: Document) -> Kind:
    """Of the leaf that this document belongs into. Raises SignatureError where it cannot be read."""
    if isinstance(document, Approval) or document.purpose is not Purpose.STANDING:
        return _KINDS[document.purpose]
    action = decode_body(document, Standing, Purpose.STANDING).action
    return Kind.REVOKE if action is StandingAction.REVOKE else Kind.STANDING


def _said_by_export(export: ExportGrant) -> dict[str, Any]:
    return _names(export.terms) | {
        "grant_id": export.grant,
        "terms_hash": bytes.fromhex(export.terms_hash),
        "policy_version": export.policy_revision,
        "policy_hash": bytes.fromhex(export.policy_hash),
    }


def _said_by_import(accepted: ImportGrant) -> dict[str, Any]:
    return {
        "grant_id": accepted.grant,
        "terms_hash": bytes.fromhex(accepted.terms_hash),
        "source_region": accepted.from_region,
        "destination_region": accepted.to_region,
        "bridge": accepted.bridge,
        "stream": accepted.stream,
        "destination_stream": accepted.destination_stream,
    }


def _names(terms: GrantTerms) -> dict[str, Any]:
    return {
        "source_region": terms.from_region,
        "destination_region": terms.to_region,
        "bridge": terms.bridge,
        "stream": terms.stream,
        "destination_stream": terms.destination_stream,
        "terms_hash": terms.hash(),
    }


def _terms_of(held: _Held | None, body: object) -> GrantTerms | None:
    """The terms of the grant that a document is about, where they are known by now."""
    if isinstance(body, ExportGrant):
        return body.terms
    return held.exports[-1].terms if held is not None and held.exports else None


def _tally(
    held: _Held, rule: ApprovalRule, region: str, export: ExportGrant, accepted: ImportGrant, now: int
) -> Tally:
    """How far the approvals of one of the two regions have come."""
    terms = export.terms
    approved = held.approved.get((region, terms.bridge_id.mesh), {})
    concerned = {name_of(terms.drawn_up_by)}
    if region == terms.to_region:
        concerned.add(name_of(accepted.accepted_by))
    return tally(rule, region, (body for body, _ in approved.values()), export.terms_hash, concerned, now)


def _lacking(
    held: _Held, half: ExportGrant | ImportGrant, export: ExportGrant, accepted: ImportGrant, now: int
) -> Tally:
    """How far the approvals that this half of the two asks for have come."""
    region = export.terms.from_region if half is export else export.terms.to_region
    return _tally(held, ApprovalRule(half.approvals, half.separate), region, export, accepted, now)


def _allows(policy: ResidencyPolicy, terms: GrantTerms, stream: StreamName) -> tuple[int, int]:
    """From when to when (ms) a policy that is in force all the time would allow these terms; never: (NEVER, NEVER)."""
    begin: int = policy.file.valid_from or 0
    end: int = NEVER if policy.file.valid_until is None else policy.file.valid_until
    if begin >= end or not decide_grant(policy, terms, stream, begin).allowed:
        return NEVER, NEVER
    return begin, end


def _differences(header: Header, said: dict[str, Any]) -> list[str]:
    return [name for name, value in said.items() if getattr(header, name) != value]
