"""What the region has agreed to, and the audit log that records it: the broker's questions, answered in memory.

Signed documents (grants, standings, deny entries, residency policies, bundles of other regions) come in through `intake`, are
verified against the keys of the region that must have signed them, and only then reach the metadata store. From there every
broker's mirror takes them: `judgement` reads `trusted_regions`, `policy_in_force` and `held_documents` at each change, has `leaves`
written for what the audit log lacks, and rebuilds the `book` of grants.

Invariants: nothing is believed because it stands in the store: the book verifies each document again, and another region's bundle counts once
this one's operator compared it; what a broker once knew of cannot be taken back there, also by way of its restart (region.trust.trust_store): a revocation
stays, a policy gives way only to a newer one, and a region's bundle only to its own successor or a later pin; what cannot be read allows nothing; a refusal
that concerns residency is handed to the audit log as a DENY leaf before it is answered; without an audit log that can
be written, nothing is let in or out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from audit.trail import Trail
from audit.trust import RegionTrust
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.identity import Binding, Proof
from felix.messages import DocumentPage, ListDocuments
from felix.names import SpiffeId, StreamName
from felix.pace import Pace
from felix.peer import Peer, verify_peer
from keys.bundle import RegionBundle
from keys.pin import SignedPin, decode_logged
from keys.signing import SigningKey
from policy.access import Verb
from policy.explanation import Explanation, explain_crossing
from policy.grant import Allowed, Attempt, GrantBook, GrantError, RefusalKind
from policy.residency import ResidencyPolicy
from policy.signed import SignedDocument
from policy.terms import GrantTerms
from region.broker import Broker
from region.evidence.arrival_index import ArrivalIndex
from region.evidence.audit_port import ArrivalLog, AuditPort
from region.evidence.document_log import DocumentLog
from region.evidence.stray_documents import StrayDocuments
from region.evidence.witness_key import unnamed
from region.evidence.witnessing import Witnessing
from region.governance.denials import Denials
from region.governance.document_watch import DocumentWatch
from region.governance.held_documents import STORED, HeldDocuments
from region.governance.intake import DocumentIntake
from region.governance.judgement import Judgement
from region.governance.lasting import LastingDocuments, read_remembered
from region.governance.leaves import Alone, Drain, Neighbours
from region.governance.logged_truncations import logged_exports, logged_truncations
from region.governance.own_words import OwnWords
from region.governance.policy_in_force import PolicyInForce
from region.governance.put_back import PutBack
from region.governance.trusted_regions import TrustedRegions
from region.key_service import KeyService
from region.listing import fitting
from region.metadata.catalog import Catalog
from region.metadata.mirror import CatalogMirror
from region.trust.held_document import document_id
from region.trust.trust_store import Memory, Remembered, described

SYNCED_KINDS: Final = ("export", "import", "approval", "standing", "deny")
"""What a bridge may list, and bring from the other region: the region that signed it is what counts, not who carries it."""
OWN_KINDS: Final = ("policy", "pin")
"""And what a bridge of this region may list besides: what it signs its leaves by, and whose bundles it goes by."""
DOCUMENT_KINDS: Final = ("export", "import", "approval", "standing", "deny", "policy", "bundle", "pin")
"""Names of the kinds of documents in PutDocument and ListDocuments."""
JUDGED: Final = "judged"
"""What operators list besides: which of the documents this broker judges by (HeldDocuments.judged)."""
TRUNCATIONS: Final = "truncation"
"""And which words on where its links go on the region's audit log has (region.governance.logged_truncations): read there each time that somebody asks."""
TRUNCATION_EXPORTS: Final = "truncation-export"
"""And the exports of the grants that these words are on, by grant, from there, too: the store may have them no more."""
LISTS_PER_S: Final = 100.0
"""Pages of documents for all bridges of one other region: an agent lists six kinds where something changed, once a second at most."""
LISTS_BURST: Final = 200
"""Lists of 16 bridges that start together, each of two pages a kind. Who has more to list waits between the pages."""
LISTERS_MAX: Final = 1_000
"""Regions whose pace is remembered."""
CUT_OFF_MS_MAX: Final = 30_000
"""How long grants are judged by what is known while the metadata store does not answer: a revocation may stand in it."""
_OF_NO_GRANT: Final = frozenset(
    (RefusalKind.DENIED, RefusalKind.FORGED, RefusalKind.OUTDATED, RefusalKind.LEFT_OUT)
)
"""Refusals that hold whichever grant is named."""


class ImportTerms(NamedTuple):
    """What an ingest needs to know of its grant."""

    destination: StreamName
    terms_hash: bytes
    terms: GrantTerms
    decided_ms: int
    """when this was true: the leaf of what crosses by it says so, and no later moment"""


class Governance:
    """One per broker."""

    def __init__(
        self,
        broker: Broker,
        catalog: Catalog,
        mirror: CatalogMirror,
        keys: KeyService,
        trail: Trail,
        witnessing: Witnessing,
        own: RegionBundle,
        log_key: SigningKey,
        pinned: Callable[[], Mapping[str, RegionBundle]],
        memory: Memory,
        remembered: Remembered,
        logged: DocumentLog,
        drain: Drain,
        audit: AuditPort | None = None,
        arrivals: ArrivalLog | None = None,
        neighbours: Neighbours | None = None,
        signed: Iterable[SignedPin] = (),
        logged_pins: Iterable[SignedPin] = (),
        instead: Collection[bytes] = (),
    ) -> None:
        """`signed`: pins of other regions that stand in this region's folder; `logged_pins`: in its audit log, oldest first. `instead`: signing keys that were made where the bundle was lost. `audit`, `arrivals`, `neighbours`: of one of several brokers; else all of it is `trail`. `pinned` reads other regions' bundles that an operator put into this region's folder, their fingerprints
        compared. `memory` keeps what must not be taken back; `remembered` is what it kept before. `logged`: the documents
        that have a leaf. `drain` waits until nothing that was taken under a grant is on its way."""
        self.broker = broker
        self.trail = trail
        """this broker's; it is the region's audit log where that is here"""
        self.audit: AuditPort = trail if audit is None else audit
        self.keys = keys
        self.witnessing = witnessing
        self.logged = logged
        self.strays = StrayDocuments(lambda: trail.files)
        self.watch = DocumentWatch(self._shown)
        self._lists = Pace(LISTS_PER_S, LISTS_BURST, LISTERS_MAX, broker.runtime.clock.monotonic)
        regions = TrustedRegions(
            own, mirror, pinned, witnessing.witness.follow_all, memory, remembered.trusted,
            lambda: trail.checkpoints.witnesses, signed, logged_pins, broker.clock_ms,
        )  # fmt: skip
        lasting, policies = read_remembered(remembered)
        self._judgement = Judgement(
            broker, log_key, catalog, mirror, trail, regions,
            PolicyInForce(own, mirror, logged, memory, policies),
            HeldDocuments(
                regions, mirror, logged, LastingDocuments(logged, memory, lasting, regions.believed_policy_keys, OwnWords(own)), broker.clock_ms
            ),
            self.watch, logged, drain, neighbours or Alone(), instead,
        )  # fmt: skip
        self._intake = DocumentIntake(broker, self._judgement, catalog, mirror, logged)
        self.keys_ended = self._judgement.changed_keys.ended
        """waits until the log says that this broker's keys were given up"""
        self.keys_refusal = lambda: self._judgement.changed_keys.refusal
        """why nothing is taken here any more; None where this broker has the region's keys of now, as far as it has the log"""
        self.keys_over: Callable[[], RequestError | None] = lambda: self._judgement.changed_keys.over
        """the same, as a start says it"""
        self.look_at_keys = self._judgement.changed_keys.look
        self.see_log_key = self._judgement.changed_keys.see_log_key
        self.require_log_key = self._judgement.changed_keys.require_log_key
        self.follow = self._judgement.follow
        self.decide_again = self._judgement.reload
        """after the log has got leaves of other brokers"""
        self.lacking = self._judgement.regions.lacking
        """the pins and bundles that the store lacks, once this broker judges"""
        self.passed_here = self._judgement.leaves.passed_here
        self.receives = self._judgement.leaves.may_arrive
        self.denials = Denials(broker, self.audit, own.region, lambda: self.book, lambda: self.bundles)
        self.denied = self.denials.denied
        """hands a DENY leaf for a refusal to the audit log, and gives the refusal back"""
        self.arrivals: ArrivalLog = ArrivalIndex(trail) if arrivals is None else arrivals
        self.put_back = PutBack(
            self._judgement.held, regions, catalog, mirror, self.watch,
            lambda: neighbours is None or neighbours.writes_here, broker.runtime.clock,
        )  # fmt: skip
        """puts back what the store lost, once started"""
        self._own = own
        self._mirror = mirror
        self._cut_off_ms: int | None = None
        """since when the metadata store cannot be followed, by the clock that counts from the boot"""

    async def put(self, actor: SpiffeId, kind: str, body: bytes) -> str:
        """Take a signed document that somebody brings. Raises the refusal."""
        self._require_keys()
        return await self._intake.put(actor, kind, body)

    def _require_keys(self) -> None:
        if (refusal := self._judgement.changed_keys.refusal) is not None:
            raise refusal

    def remember_pins(self, logged: Iterable[bytes]) -> None:
        """Those that stand in the region's audit log, of which other brokers have written leaves."""
        if self._judgement.regions.remember(decode_logged(logged, self._own)):
            self._judgement.reload()

    def verify(self, proof: Proof, binding: Binding) -> Peer:
        """Who the client is, by the roots of the regions that are trusted now. Another region's identity is let in only as a bridge."""
        peer = verify_peer(proof, binding, self._judgement.regions.trust, self.broker.clock_ms())
        identity, own = peer.spiffe_id, self._own.region
        if identity.region != own and identity.kind != "bridge":
            raise RequestError(
                f"{identity} is of region {identity.region!r}; this is {own!r}, where only a bridge of "
                "another region may come in.",
                code=Code.WRONG_REGION,
                hint=f"Use an identity that {own} issued.",
            )
        return peer

    @property
    def policy(self) -> ResidencyPolicy | None:
        """The residency policy in force; without one, nothing may cross."""
        return self._judgement.policy

    @property
    def book(self) -> GrantBook:
        """Every grant this region knows of."""
        return self._judgement.book

    @property
    def bundles(self) -> Mapping[str, RegionBundle]:
        """This region's bundle and those it trusts, by region."""
        return MappingProxyType(self._judgement.regions.bundles)

    @property
    def problems(self) -> list[str]:
        """An audit log that has stopped, or waits for room; keys of before in this region's folder; a policy that is not believed; regions that the store names and this broker does not believe, with the command to go on with; and what stands
        beside the audit log and is no document of it."""
        stale = self._judgement.changed_keys.problem
        # What is wrong with copies of the log is said of each.
        stopped = "" if self.trail.copied else self.trail.status().failure
        return [
            *filter(None, [stopped]),
            *filter(None, [self.logged.put_back]),
            *([stale] if stale else []),
            *filter(
                None, [self._judgement.changed_keys.unread, unnamed(self._own, self.witnessing.witness.key)]
            ),
            *filter(None, [self._judgement.policies.problem]),
            *(
                f"In force at this broker, and no other region is told: {described(document)}, which has no leaf in the audit log, and gets none under the policy key that "
                f"{self._own.region} gave up. Say it again (felix bridge deny, pause or revoke)."
                for document in self._judgement.held.lasting.to_be_said_again()
            ),
            *self.strays.problems,
            # Last: whoever can write the store makes as many as he likes.
            *self._judgement.regions.problems.values(),
        ]

    def trusts(self, region: str) -> bool:
        """Whether identities of this region may have sessions here: its own, and regions whose trust was not taken back."""
        return region not in self._judgement.regions.withdrawn

    def trust_of(self, region: str) -> RegionTrust:
        """The signing keys of a trusted region. Raises RequestError(NOT_FOUND)."""
        return self._judgement.regions.of(region)

    # -- questions -------------------------------------------------------------------------------------

    def check_export(self, bridge: SpiffeId, grant_id: str, stream: StreamName, action: str) -> Allowed:
        """Whether a bridge may take sealed records of this stream. Raises the refusal, after its DENY leaf."""
        to_region = self._destination_of(grant_id)
        try:
            # Two permissions, given apart: the right to read as a bridge, and the grant of both regions.
            self.broker.require(bridge, Verb.BRIDGE_READ, stream)
            if not to_region:
                self.book.get(grant_id, self.broker.clock_ms())
            now_ms = self.broker.clock_ms()
            return self._check(Attempt(stream, self._own.region, to_region, bridge), grant_id, now_ms)
        except UnavailableError:
            # Nobody decided anything: no refusal of residency, and no leaf of one.
            raise
        except FelixError as error:
            raise self.denied(
                error, actor=bridge, action=action, stream=str(stream), grant_id=grant_id, to_region=to_region
            ) from None

    def check_import(
        self, bridge: SpiffeId, grant_id: str, from_region: str, stream: StreamName
    ) -> ImportTerms:
        """Whether a bridge may bring records of this stream in. Raises the refusal; the caller writes its leaf."""
        now_ms = self.broker.clock_ms()
        allowed = self._check(Attempt(stream, from_region, self._own.region, bridge), grant_id, now_ms)
        refusal = self.arrivals.refusal()
        if refusal is not None:
            raise refusal
        return ImportTerms(allowed.destination_stream, allowed.terms_hash, allowed.terms, now_ms)

    def explain(self, stream: StreamName, source: str, destination: str) -> Explanation:
        """What `check_export` and `check_import` would decide of this stream, and why. Raises RequestError where neither region is
        this one, and what keeps everything from crossing."""
        if self._own.region not in (source, destination) or source == destination:
            raise RequestError(f"{self._own.region} answers for crossings from it or to it.")
        policy = self._require_policy()
        return explain_crossing(self.book, policy, stream, source, destination, self.broker.clock_ms())

    def _require_policy(self) -> ResidencyPolicy:
        """The policy in force. Raises what keeps everything from crossing, whatever was granted."""
        self._require_keys()
        failure = self.audit.failure
        if failure is not None:
            raise failure
        if not self._judgement.leaves.is_current:
            raise UnavailableError(
                f"Broker {self.broker.broker_id} does not know at the moment which documents have their leaf in the audit log of {self._own.region}.",
                hint="It asks the broker that has the log, or waits for the disks; nothing crosses here until it knows.",
                retry_after_ms=100,
            )
        self._require_current()
        if self.policy is None:
            raise RequestError(
                f"{self._own.region} has no residency policy in force, and an empty policy allows nothing.",
                code=Code.RESIDENCY_DENIED,
                hint="Put one in force: felix policy apply FILE.",
            )
        return self.policy

    def _destination_of(self, grant_id: str) -> str:
        try:
            view = self.book.get(grant_id, self.broker.clock_ms())
        except GrantError:
            return self.book.claimed_destination(grant_id)
        if view.export is not None:
            return view.export.terms.to_region
        return view.accepted.to_region if view.accepted is not None else ""

    def _check(self, attempt: Attempt, grant_id: str, now: int) -> Allowed:
        policy = self._require_policy()
        result = self.book.check(attempt, policy, now, grant=grant_id)
        if isinstance(result, Allowed):
            return result
        if result.kind is RefusalKind.NO_GRANT:
            other = self.book.check(attempt, policy, now)
            if isinstance(other, Allowed):
                raise GrantError(
                    f"{attempt.stream} crosses from {attempt.from_region} to {attempt.to_region} under the grant "
                    f"{other.grant}, not under {grant_id[:40]}.",
                    code=Code.GRANT_MISMATCH,
                    hint="Use the grant that holds now.",
                )
            # The state of another grant is no reason to stop crossings under this one.
            own = self.book.check_grant(grant_id, attempt.bridge, now)
            if own is not None and own.kind is not RefusalKind.NO_GRANT:
                result = own
            elif other.kind in _OF_NO_GRANT:
                result = other
        raise result.error()

    def _require_current(self) -> None:
        """Raises UnavailableError where this broker has been cut off from the metadata store for too long."""
        if self._mirror.is_current:
            self._cut_off_ms = None
            return
        # Not by the wall clock: set back, it would have grants judged so for longer.
        now = self.broker.runtime.clock.boot_ms()
        if self._cut_off_ms is None:
            self._cut_off_ms = now
        if now - self._cut_off_ms > CUT_OFF_MS_MAX:
            raise UnavailableError(
                f"The metadata store has not answered for {(now - self._cut_off_ms) // 1000} s, so it is not known "
                "whether the grant was revoked.",
                hint="Nothing crosses until it answers again.",
                retry_after_ms=1000,
            )

    # -- documents -------------------------------------------------------------------------------------

    def documents(self, identity: SpiffeId, kind: str) -> dict[str, bytes]:
        """Documents of one kind by id. A bridge sees those of its own grants and their regions, and what cut its streams; an
        operator all."""
        self._require_may_list(identity, kind)
        if kind == "bundle":
            return self._mirror.trusted()
        if kind == "pin":
            return self._judgement.regions.pins()
        if kind == "policy":
            policy = self._mirror.policy
            if identity.kind == "bridge" and policy is not None and self.policy is not None:
                policy = self._judgement.policies.record
            return {} if policy is None else {str(policy.version): policy.document}
        held = self._judgement.held
        if kind == JUDGED:
            return held.judged()
        found = self._mirror.documents(*STORED[kind])
        if identity.kind != "bridge":
            # What the store lost counts all the same.
            lost = held.lost().get(kind, {})
            return {name: document.encode_file() for name, document in lost.items()} | found
        own, regions = self.book.carried_by(str(identity))
        if not own:
            return {}
        # A document without a leaf in the log does not leave the region.
        found = {
            name: shown
            for name, data in found.items()
            if (shown := self._judgement.held.shown_as(data)) is not None
        }
        if kind in ("export", "standing"):
            # What its streams cross under now may rest on what was accepted under another bridge's grant.
            own |= self.book.cut_under(own)
        if kind in ("export", "import", "approval", "standing"):
            return {name: data for name, data in found.items() if name.split(".")[0] in own}
        return {
            name: data for name, data in found.items() if self._judgement.held.denies_between(data, regions)
        }

    def _require_may_list(self, identity: SpiffeId, kind: str) -> None:
        is_own = kind in OWN_KINDS and identity.region == self._own.region
        if identity.kind != "bridge" or not (kind in SYNCED_KINDS or is_own):
            self.broker.require_operator(identity, f"list {kind} documents")
        kinds = (*DOCUMENT_KINDS, JUDGED, TRUNCATIONS, TRUNCATION_EXPORTS)
        if kind not in kinds:
            raise RequestError(f"There are no {kind!r} documents.", hint=f"Kinds: {', '.join(kinds)}.")

    async def list_documents(self, identity: SpiffeId, request: ListDocuments) -> DocumentPage:
        """One page, after the wait that is asked for. Raises RequestError, UnavailableError(LIMIT_RATE) where another region asks too often."""
        self._require_may_list(identity, request.kind)
        if identity.region != self._own.region:
            wait_ms = self._lists.take(identity.region)
            if wait_ms:
                raise UnavailableError(
                    f"{identity.region} lists the documents of {self._own.region} more than {LISTS_PER_S:g} times a second.",
                    code=Code.LIMIT_RATE,
                    hint="List them again after the time that the answer names.",
                    retry_after_ms=wait_ms,
                )
        if request.kind in (TRUNCATIONS, TRUNCATION_EXPORTS):
            return await self._list_truncations(request)
        if request.wait_ms:
            await self.watch.wait(identity, request.known, request.wait_ms)
            self._require_may_list(identity, request.kind)
        documents, left = self.watch.behind(identity, request.kind, request.after, request.limit)
        page = fitting(documents)
        revision = b"" if request.after else self.watch.revision(identity)
        return DocumentPage(dict(page), left > len(page), revision)

    async def _list_truncations(self, request: ListDocuments) -> DocumentPage:
        listed = self._truncations if request.kind == TRUNCATIONS else self._truncation_exports
        named = sorted((await asyncio.to_thread(listed)).items())
        left = [each for each in named if each[0] > request.after]
        page = fitting(left[: request.limit])
        return DocumentPage(dict(page), len(left) > len(page), b"")

    def _truncations(self) -> dict[str, bytes]:
        words = logged_truncations(self.logged, self._own)
        return {document_id(SignedDocument.parse(data)): data for data in words}

    def _truncation_exports(self) -> dict[str, bytes]:
        words = logged_truncations(self.logged, self._own).values()
        return logged_exports(self.logged, self._own, {word.grant for word in words})

    def _shown(self, identity: SpiffeId) -> dict[str, dict[str, bytes]]:
        """All that an identity may list, by kind."""
        kinds: tuple[str, ...] = (*DOCUMENT_KINDS, JUDGED)
        if identity.kind == "bridge":
            kinds = (*SYNCED_KINDS, *OWN_KINDS) if identity.region == self._own.region else SYNCED_KINDS
        return {kind: self.documents(identity, kind) for kind in kinds}

    def audit_state(self) -> tuple[str, int]:
        """The audit log's origin and durable size in leaves."""
        return self.trail.key.name, self.audit.status().durable

    async def close(self) -> None:
        """Leaves that are being written are written, unless they wait for room on a full disk; the next start reads on from here."""
        self.trail.end_waiting()
        await self._judgement.close()
        await self.arrivals.close()
        await self.logged.close()
