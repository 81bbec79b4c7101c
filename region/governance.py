"""What the region has agreed to, and the audit log that records it.

Signed documents (grants, standings, deny entries, residency policies, bundles of other regions) come in here, are
verified against the keys of the region that must have signed them, and only then reach the metadata store. From
there every broker's mirror takes them, and this module judges by them: the grant book is rebuilt on every change,
and every question is asked of it in memory.

Invariants: nothing is believed because it stands in the store: the book verifies each document again; what a broker once
knew of cannot be taken back there, also by way of its restart (region.trust_store): a revocation stays, a policy gives way only to a newer one, and a
region's bundle only to one that its own policy key signed; what cannot be read allows nothing; a refusal
that concerns residency is handed to the audit log as a DENY leaf before it is answered; without an audit log that can
be written, nothing is let in or out.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from audit.signed_leaf import signed_leaf
from audit.trail import Trail
from audit.trust import RegionTrust, Trust
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.identity import Binding, Proof
from felix.names import NamePattern, SpiffeId, StreamName
from felix.pace import Pace
from felix.peer import Peer, TrustBundle, verify_peer
from keys.bundle import RegionBundle, check_update, decode_bundle
from keys.keyring import Keyring
from policy.access import Verb
from policy.approval import (
    APPROVERS_MAX,
    CLOCK_SKEW_MS,
    Approval,
    ApprovalBody,
    Document,
    open_approval,
    parse_document,
    refuse_ended,
    require_size,
)
from policy.explanation import Explanation, explain_crossing
from policy.grant import (
    DOCUMENTS_MAX,
    EVERYWHERE,
    Allowed,
    Attempt,
    DenyEntry,
    ExportGrant,
    GrantBook,
    GrantError,
    ImportGrant,
    RefusalKind,
    Standing,
    StandingAction,
    agree,
    approves,
    half_rank,
    made_under_later,
    open_export,
    open_import,
)
from policy.residency import ResidencyPolicy, check_successor, open_policy
from policy.signed import Purpose, SignedDocument, decode_body, verify
from policy.terms import GrantTerms
from policy.truncation import Accepted, Truncation
from region.arrival_index import ArrivalIndex
from region.broker import Broker
from region.denials import DENIED_PEERS_MAX, Denials
from region.document_log import DocumentLog
from region.document_watch import DocumentWatch
from region.held_document import (
    HeldDocument,
    denies_between,
    digest_of,
    document_id,
    grant_of,
    is_revocation,
    require_signer,
)
from region.key_service import KeyService
from region.metadata.catalog import Catalog
from region.metadata.mirror import CatalogMirror, MirrorChange
from region.metadata.records import DocumentKind, Policy
from region.metadata.records import Side as DocumentSide
from region.trust_store import Memory, Newest, Remembered, forbids, place_of
from region.witnessing import Witnessing

log = logging.getLogger("felix.region.governance")

SYNCED_KINDS: Final = ("export", "import", "approval", "standing", "deny")
"""What a bridge may list, and bring from the other region: the region that signed it is what counts, not who carries it."""
DOCUMENT_KINDS: Final = ("export", "import", "approval", "standing", "deny", "policy", "bundle")
"""Names of the kinds of documents in PutDocument and ListDocuments."""
CUT_OFF_MS_MAX: Final = 30_000
"""How long grants are judged by what is known while the metadata store does not answer: a revocation may stand in it."""
PEER_DOCUMENTS_MAX: Final = 5_000
"""Documents signed by one other region: enough for years of grants, and still verified in less than a second. A pause that was lifted,
and whatever else a later word took the place of, is removed from the store before anything is refused; it stands in the log."""
PEER_BYTES_MAX: Final = 64 << 20
"""And their bytes in all: five times what so many documents commonly are. A document may be 128 KiB (policy.approval)."""
SIGNED_AGAIN_MAX: Final = 8
"""How often another region may sign one half again, as it does after a new policy; each time is a leaf, and may be a file, for ever."""
SIGNED_AGAIN_PER_S: Final = 1 / 3_600
"""And so often after that."""
SUPERSEDED_MAX: Final = 1_000
"""How many pauses, resumptions, deny entries and liftings another region may replace by later ones at once: each is a leaf for ever.
A night's maintenance of 500 grants."""
SUPERSEDED_PER_S: Final = 1 / 60
"""And so many after that. What is refused is in force in the region that signed it, and nothing crosses without both."""
COMPACTED_MAX: Final = 100
"""Superseded documents that one document removes from the store where there is no room for it."""
CHANGED_MAX: Final = 256
"""Documents that a book is changed by; where more come at once, a new one costs less."""
HALVES_MAX: Final = 20_000
"""Halves that are remembered as signed again; one region can have 5,000 here."""
DRAIN_MS: Final = 10_000
"""How long a revocation's caller waits for transfers in flight under the grant. The revocation's leaf follows them, however long
they take.
"""
RELOAD_S: Final = 0.02
"""Documents that the store holds without a leaf get theirs one by one; what allows counts soon after, together."""
LOG_AGAIN_S: Final = 1.0
"""How soon the leaf of a document is tried again that the audit log did not take."""
MIRROR_TIMEOUT_S: Final = 10.0
"""How long a put document waits until this broker judges by it."""

Drain = Callable[[str, Callable[[StreamName], bool]], Awaitable[None]]
"""Returns once nothing that was taken under the grant is on its way any more."""

_STORED: Final[dict[str, tuple[DocumentKind, DocumentSide]]] = {
    "export": ("grants", "export"),
    "import": ("grants", "import"),
    "approval": ("grants", "approval"),
    "standing": ("revocations", "state"),
    "deny": ("denies", "state"),
}
"""The catalog's section of each kind."""
_OF_NO_GRANT: Final = frozenset(
    (RefusalKind.DENIED, RefusalKind.FORGED, RefusalKind.OUTDATED, RefusalKind.LEFT_OUT)
)
"""Refusals that hold whichever grant is named."""
_DONE: Final = {
    StandingAction.PAUSE: "paused",
    StandingAction.RESUME: "resumed",
    StandingAction.REVOKE: "revoked",
    StandingAction.ACCEPT_TRUNCATION: "to go on after a truncation, accepted",
    StandingAction.RESEND: "to send again what stayed, asked for",
}
_PURPOSES: Final = {
    "export": Purpose.EXPORT,
    "import": Purpose.IMPORT,
    "approval": Purpose.APPROVAL,
    "standing": Purpose.STANDING,
    "deny": Purpose.DENY,
    "policy": Purpose.POLICY,
}


class _Made(NamedTuple):
    """A book, and what it was made of."""

    keys: dict[str, tuple[bytes, ...]]
    bundles: dict[str, RegionBundle]
    documents: dict[int, Document]
    """by object"""
    book: GrantBook


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
        keyring: Keyring,
        trail: Trail,
        witnessing: Witnessing,
        own: RegionBundle,
        pinned: Callable[[], Mapping[str, RegionBundle]],
        memory: Memory,
        remembered: Remembered,
        logged: DocumentLog,
        drain: Drain,
    ) -> None:
        """`pinned` reads other regions' bundles that an operator put into this region's folder, their fingerprints
        compared. `memory` keeps what must not be taken back; `remembered` is what it kept before. `logged`: the documents
        that have a leaf. `drain` waits until nothing that was taken under a grant is on its way."""
        self.broker = broker
        self.trail = trail
        self._catalog = catalog
        self._mirror = mirror
        self.keys = KeyService(keyring, trail, own.region, lambda: broker.clock_ms())
        self._own = own
        self._bundles: dict[str, RegionBundle] = {own.region: own}
        self._trust = TrustBundle()
        """of these bundles, once the catalog was read"""
        self._pinned = pinned
        self._believed = dict(pinned())
        self._memory = memory
        self.logged = logged
        self._drain = drain
        self._parsed: dict[bytes, HeldDocument] = {}
        self._halves: dict[str, list[SignedDocument]] = {}
        self._stand_ins: dict[bytes, HeldDocument] = {}
        """by the digest of a half that waits for its leaf: the one whose place it takes, and which counts until then"""
        self._waiting: set[bytes] = set()
        """digests of what counts only with its leaf, and has none"""
        self._newest = Newest()
        self._unverified: dict[bytes, SignedDocument] = {}
        self._taken: set[bytes] = set()
        self._actors: dict[bytes, SpiffeId] = {}
        self._logging: dict[bytes, asyncio.Task[None]] = {}
        self._reloading: asyncio.TimerHandle | None = None
        self._closed = False
        self._signed_by: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()
        self._cut_off_ms: int | None = None
        self._book = GrantBook()
        self._made: _Made | None = None
        self._policy: ResidencyPolicy | None = None
        self._newest_policy: ResidencyPolicy | None = None
        self._in_force: Policy | None = None
        """what `_policy` was read from"""
        self._read_from: tuple[bytes, SignedDocument, ResidencyPolicy] | None = None
        self._remember(remembered)
        self.denials = Denials(broker, trail, own.region, lambda: self._book, lambda: self._bundles)
        self.denied = self.denials.denied
        """hands a DENY leaf for a refusal to the audit log, and gives the refusal back"""
        self.arrivals = ArrivalIndex(trail)
        self._superseded = Pace(
            SUPERSEDED_PER_S, SUPERSEDED_MAX, DENIED_PEERS_MAX, broker.runtime.clock.monotonic
        )
        self._signed_again = Pace(
            SIGNED_AGAIN_PER_S, SIGNED_AGAIN_MAX, HALVES_MAX, broker.runtime.clock.monotonic
        )
        self.witnessing = witnessing
        self.watch = DocumentWatch(self._shown)

    def verify(self, proof: Proof, binding: Binding) -> Peer:
        """Who the client is, by the roots of the regions that are trusted now. Another region's identity is let in only as a bridge."""
        peer = verify_peer(proof, binding, self._trust, self.broker.clock_ms())
        identity, own = peer.spiffe_id, self._own.region
        if identity.region != own and identity.kind != "bridge":
            raise RequestError(
                f"{identity} is of region {identity.region!r}; this is {own!r}, where only a bridge of "
                "another region may come in.",
                code=Code.WRONG_REGION,
                hint=f"Use an identity that {own} issued.",
            )
        return peer

    # -- following the catalog -------------------------------------------------------------------------

    def follow(self) -> None:
        """Take in what the mirror holds, now and at each change."""
        self._mirror.on_change(self._changed)
        self._reload()

    def _changed(self, change: MirrorChange) -> None:
        if self._closed:
            return
        if change.section in ("grants", "revocations", "denies", "policy", "trusted"):
            try:
                self._reload()
            finally:
                self.broker.recheck_sessions()

    def _reload(self) -> None:
        try:
            self._judge_anew()
        finally:
            self.watch.changed()

    def _judge_anew(self) -> None:
        # Whatever fails from here on, nothing is allowed by what held before: a revocation may be in what came.
        self._book = GrantBook()
        made, self._made = self._made, None
        self._bundles = bundles = self._read_bundles()
        self._trust = TrustBundle(bundle.anchor() for bundle in bundles.values())
        self.trail.trust_witnesses(Trust.of(bundles.values()).witnesses_for(self._own.region))
        self._waiting = set()
        self._policy = self._read_policy()
        documents, waiting = self._sorted_documents()
        self._waiting |= {digest_of(document) for document in waiting if not _counts_at_once(document)}
        self._made = self._make_book(made, (*documents, *self._newest))
        self._book = self._made.book
        if self._book.left_out:
            first = ", ".join(claim.grant for claim in self._book.left_out[:3])
            log.error(
                "%d grants are left out, and nothing crosses under them: %d documents are the most that one broker takes (%s …)",
                len(self._book.left_out), DOCUMENTS_MAX, first,
            )  # fmt: skip
        for problem in self._book.problems:
            log.error("a document of %s is not believed: %s", problem.document.region, problem.sentence)
        for document in waiting:
            self._log_soon(document)

    def _make_book(self, made: _Made | None, documents: tuple[Document, ...]) -> _Made:
        """The book of these documents: of the previous book, only the changed grants are rebuilt, unless keys changed too."""
        # Parsed once, so what stayed is the same object; `made` keeps what went, so no other object has its id.
        now = {id(document): document for document in documents}
        keys, bundles = self._believed_policy_keys(), dict(self._bundles)
        if made is not None and (made.keys, made.bundles) == (keys, bundles) and not made.book.left_out:
            come = [document for name, document in now.items() if name not in made.documents]
            gone = [document for name, document in made.documents.items() if name not in now]
            if len(come) + len(gone) <= CHANGED_MAX and len(now) <= DOCUMENTS_MAX:
                # The same document may stand in the store under two names.
                gone = [document for document in gone if document not in documents]
                return _Made(keys, bundles, now, made.book.changed(gone, come))
        return _Made(keys, bundles, now, GrantBook(documents, keys, self._trust))

    def _sorted_documents(self) -> tuple[list[Document], list[Document]]:
        """What the store holds: the documents of the book, besides those that `_newest` holds, and those whose leaf is missing.

        What forbids is in force at once; what allows, once its leaf stands in the audit log.
        """
        parsed: dict[bytes, HeldDocument] = {}
        for section, side in _STORED.values():
            for name, data in self._mirror.documents(section, side).items():
                held = self._parsed.get(data)
                try:
                    # Parsed once: the rest of a change costs little, however many documents there are.
                    parsed[data] = held if held is not None else HeldDocument.of(data)
                except FelixError as error:
                    log.error("document %s/%s/%s cannot be read: %s", section, side, name, error)
        before, self._parsed = self._parsed, parsed
        self._halves = {}
        for held in parsed.values():
            if held.half_of and isinstance(held.document, SignedDocument):
                self._halves.setdefault(held.half_of, []).append(held.document)
        self._signed_by = Counter(held.document.region for held in parsed.values())
        self._bytes_of = Counter()
        for data, held in parsed.items():
            self._bytes_of[held.document.region] += len(data)
        self._unverified |= {
            held.digest: held.document
            for held in parsed.values()
            if held.lasts and held.digest not in self._taken and isinstance(held.document, SignedDocument)
        }
        waiting = self._take_lasting()
        documents: list[Document] = []
        for held in parsed.values():
            if held.lasts:
                continue
            if held.document.region not in self._bundles:
                log.error("a document of %s is not believed: the region is not trusted", held.document.region)
            elif held.digest in self.logged or not self._is_genuine(held.document):
                # For a document that is not genuine, the book says why it rejects it.
                documents.append(held.document)
            elif self._has_place(held.document):
                waiting.append(held.document)
        self._stand_ins = self._stand_in(before, waiting)
        documents += [held.document for held in self._stand_ins.values()]
        return documents, waiting

    def _stand_in(
        self, before: Mapping[bytes, HeldDocument], waiting: list[Document]
    ) -> dict[bytes, HeldDocument]:
        """For each half that waits for its leaf the one that counted in its place before: a link does not stop because a half is signed
        again, and what the log has not is not asked for either."""
        found: dict[bytes, HeldDocument] = {}
        missing = {digest_of(document) for document in waiting}
        halves = [held for held in self._parsed.values() if held.half_of and held.digest in missing]
        if halves:
            counted = {
                _place_of_half(held): one
                for held in before.values()
                if held.half_of
                and (one := held if held.digest in self.logged else self._stand_ins.get(held.digest))
                is not None
            }
            for half in halves:
                if (one := counted.get(_place_of_half(half))) is not None:
                    found[half.digest] = one
        return found

    def _take_lasting(self) -> list[Document]:
        """Take what forbids, and what lifts it once it has its leaf, into `_newest`. Returns those without a leaf."""
        waiting: list[Document] = []
        for digest, document in list(self._unverified.items()):
            if not self._is_genuine(document):
                # Its region's bundle may come back: what was kept here is kept until then.
                if digest not in self._kept:
                    del self._unverified[digest]
                    log.error("a %s of %s is not believed", document.purpose, document.region)
                continue
            if digest not in self.logged:
                waiting.append(document)
                if not forbids(document):
                    continue
            del self._unverified[digest]
            self._taken.add(digest)
            key = self._newest.take(document)
            if key is not None:
                self._memory.keep(key, document.encode_file())
        return waiting

    def _is_genuine(self, document: Document) -> bool:
        """Whether the region that it names signed it, by what this broker believes of that region, and has a say in it."""
        try:
            if isinstance(document, Approval):
                open_approval(document, self._trust)
            else:
                verify(document, self._believed_policy_keys())
                self._require_own_word(document)
        except FelixError:
            return False
        return True

    def _require_own_word(self, document: SignedDocument) -> None:
        """Raises GrantError where a region speaks in another's name, of a grant that is none of its own, and RequestError
        where what it denies is not between it and this region."""
        if document.purpose is Purpose.STANDING:
            standing = decode_body(document, Standing, Purpose.STANDING)
            require_signer(document, standing.region, str(standing.action))
            self._require_end(standing)
        elif document.purpose is Purpose.DENY:
            entry = decode_body(document, DenyEntry, Purpose.DENY)
            require_signer(document, entry.region, "deny entry")
            self._require_concerned(entry)

    def _has_place(self, document: Document) -> bool:
        """Whether a genuine half or approval is one that `put` would have taken, too. What others signed about each other has no leaf
        here and is not held, whoever put it into the store."""
        try:
            if isinstance(document, Approval):
                self._require_say(document.claim, self._export_of(document.claim.grant))
            elif document.purpose is Purpose.EXPORT:
                terms = open_export(document, self._believed_policy_keys()).terms
                self._require_ends(terms.from_region, terms.to_region)
            elif document.purpose is Purpose.IMPORT:
                accepted = open_import(document, self._believed_policy_keys())
                self._require_ends(accepted.from_region, accepted.to_region)
                export = self._export_of(accepted.grant)
                if export is not None and not agree(export, accepted):
                    raise _other_terms(accepted)
        except FelixError as error:
            log.error(
                "a %s of %s in the store has no place here: %s", document.purpose, document.region, error
            )
            return False
        return True

    def _require_concerned(self, entry: DenyEntry) -> None:
        """A deny entry concerns this region. Raises RequestError(WRONG_REGION)."""
        if entry.region != self._own.region and entry.peer not in (EVERYWHERE, self._own.region):
            raise RequestError(
                f"The entry is between {entry.region} and {entry.peer}; this is {self._own.region}.",
                code=Code.WRONG_REGION,
            )

    def _require_say(self, body: ApprovalBody, export: ExportGrant | None) -> ExportGrant:
        """An approval is of terms that are held here, and by somebody of this mesh and of one of their two regions. Returns the export grant
        that has the terms. Raises GrantError, RequestError(WRONG_REGION)."""
        if export is None or export.terms_hash != body.terms_hash:
            raise GrantError(
                f"{self._own.region} does not have the terms that {body.approver} approved as {body.grant}.",
                code=Code.GRANT_MISSING,
                hint="Put the export grant first.",
            )
        terms = export.terms
        self._require_ends(terms.from_region, terms.to_region)
        if not approves(export, body):
            raise GrantError(
                f"The grant {body.grant} is between {terms.from_region} and {terms.to_region}; {body.approver} has no say "
                "in it.",
                hint="An approver of one of the grant's two regions must sign it.",
            )
        return export

    def _remember(self, remembered: Remembered) -> None:
        """The documents that this broker had accepted before its restart. Each is verified like those of the store."""
        for data in remembered.every():
            try:
                document = SignedDocument.parse(data)
                if place_of(document) is not None:
                    self._unverified[digest_of(document)] = document
                elif document.purpose is Purpose.POLICY and document.region == self._own.region:
                    policy, newest = self._own_policy(document), self._newest_policy
                    if newest is None or policy.revision > newest.revision:
                        self._newest_policy = policy
            except FelixError as error:
                log.error("a document that was kept cannot be read: %s", error)
        self._kept = frozenset(self._unverified)

    def _own_policy(self, document: SignedDocument) -> ResidencyPolicy:
        return open_policy(document, {self._own.region: self._own.policy_keys}, "the policy in force")

    def _read_bundles(self) -> dict[str, RegionBundle]:
        """Bundles of the regions that the store trusts; what was believed before gives way only to its own successor."""
        bundles = {self._own.region: self._own}
        for region, data in self._mirror.trusted().items():
            if region == self._own.region:
                log.error("the metadata store holds a bundle of %s itself; it is not believed", region)
                continue
            held = self._believed.get(region)
            try:
                signed = decode_bundle(data)
                bundle = signed.bundle
                if bundle.region != region:
                    raise RequestError(f"It is of {bundle.region}.")
                if held is not None and held != bundle and not self._is_pinned(bundle):
                    check_update(held, signed)
                held = self._believed[region] = bundle
                self.witnessing.witness.follow_all(RegionTrust(bundle).logs)
            except FelixError as error:
                log.error("the bundle of %s in the metadata store is not believed: %s", region, error)
            if held is not None:
                bundles[region] = held
        return bundles

    def _is_pinned(self, bundle: RegionBundle) -> bool:
        """True where an operator put this very bundle into the region's folder, whatever was trusted before."""
        return self._pinned().get(bundle.region) == bundle

    def _trusted_policy_keys(self) -> dict[str, tuple[bytes, ...]]:
        return {region: bundle.policy_keys for region, bundle in self._bundles.items()}

    def _believed_policy_keys(self) -> dict[str, tuple[bytes, ...]]:
        """Those of every region that was believed once: what it forbade then is not forgotten when its bundle is taken away."""
        believed = {region: bundle.policy_keys for region, bundle in self._believed.items()}
        return believed | self._trusted_policy_keys()

    def _read_policy(self) -> ResidencyPolicy | None:
        held = self._mirror.policy
        if held is None:
            return None
        try:
            if self._read_from is None or self._read_from[0] != held.document:
                document = SignedDocument.parse(held.document)
                self._read_from = held.document, document, self._own_policy(document)
            _, document, policy = self._read_from
            newest = self._newest_policy
            if digest_of(document) not in self.logged:
                if newest is not None and newest.hash != policy.hash:
                    check_successor(newest, policy)
                self._log_soon(document)
                self._waiting.add(digest_of(document))
                # Until then the one before it, as of a half that is signed again.
                return self._policy
            if newest is not None and newest.hash != policy.hash:
                check_successor(newest, policy)
            if newest is None or newest.hash != policy.hash:
                self._memory.keep_policy(held.document)
            self._newest_policy, self._in_force = policy, held
            return policy
        except FelixError as error:
            log.error("the residency policy is not believed, so nothing may cross: %s", error)
            return None

    @property
    def policy(self) -> ResidencyPolicy | None:
        """The residency policy in force; without one, nothing may cross."""
        return self._policy

    def trust_of(self, region: str) -> RegionTrust:
        """The signing keys of a trusted region. Raises RequestError(NOT_FOUND)."""
        bundle = self._bundles.get(region)
        if bundle is None:
            raise RequestError(f"The region {region} is not trusted here.", code=Code.NOT_FOUND)
        return RegionTrust(bundle)

    @property
    def bundles(self) -> Mapping[str, RegionBundle]:
        """This region's bundle and those it trusts, by region."""
        return MappingProxyType(self._bundles)

    @property
    def book(self) -> GrantBook:
        """Every grant this region knows of."""
        return self._book

    # -- questions -------------------------------------------------------------------------------------

    def check_export(self, bridge: SpiffeId, grant_id: str, stream: StreamName, action: str) -> Allowed:
        """Whether a bridge may take sealed records of this stream. Raises the refusal, after its DENY leaf."""
        to_region = self._destination_of(grant_id)
        try:
            # Two permissions, given apart: the right to read as a bridge, and the grant of both regions.
            self.broker.require(bridge, Verb.BRIDGE_READ, stream)
            if not to_region:
                self._book.get(grant_id, self.broker.clock_ms())
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
        return ImportTerms(allowed.destination_stream, allowed.terms_hash, allowed.terms, now_ms)

    def explain(self, stream: StreamName, source: str, destination: str) -> Explanation:
        """What `check_export` and `check_import` would decide of this stream, and why. Raises RequestError where neither region is
        this one, and what keeps everything from crossing."""
        if self._own.region not in (source, destination) or source == destination:
            raise RequestError(f"{self._own.region} answers for crossings from it or to it.")
        policy = self._require_policy()
        return explain_crossing(self._book, policy, stream, source, destination, self.broker.clock_ms())

    def _require_policy(self) -> ResidencyPolicy:
        """The policy in force. Raises what keeps everything from crossing, whatever was granted."""
        if self.trail.failure is not None:
            raise self.trail.failure
        self._require_current()
        if self._policy is None:
            raise RequestError(
                f"{self._own.region} has no residency policy in force, and an empty policy allows nothing.",
                code=Code.RESIDENCY_DENIED,
                hint="Put one in force: felix policy apply FILE.",
            )
        return self._policy

    def _destination_of(self, grant_id: str) -> str:
        try:
            view = self._book.get(grant_id, self.broker.clock_ms())
        except GrantError:
            return self._book.claimed_destination(grant_id)
        if view.export is not None:
            return view.export.terms.to_region
        return view.accepted.to_region if view.accepted is not None else ""

    def _check(self, attempt: Attempt, grant_id: str, now: int) -> Allowed:
        policy = self._require_policy()
        result = self._book.check(attempt, policy, now, grant=grant_id)
        if isinstance(result, Allowed):
            return result
        if result.kind is RefusalKind.NO_GRANT:
            other = self._book.check(attempt, policy, now)
            if isinstance(other, Allowed):
                raise GrantError(
                    f"{attempt.stream} crosses from {attempt.from_region} to {attempt.to_region} under the grant "
                    f"{other.grant}, not under {grant_id[:40]}.",
                    code=Code.GRANT_MISMATCH,
                    hint="Use the grant that holds now.",
                )
            # The state of another grant is no reason to stop crossings under this one.
            own = self._book.check_grant(grant_id, attempt.bridge, now)
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
        now = self.broker.clock_ms()
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

    async def put(self, actor: SpiffeId, kind: str, body: bytes) -> str:
        """Verify a signed document and put it in force. Returns a sentence for a person. Raises the refusal."""
        if kind == "bundle":
            return await self._put_bundle(body)
        require_size(kind, body)
        document = parse_document(body)
        if document.purpose is not _PURPOSES.get(kind):
            raise RequestError(
                f"The document is a {document.purpose}, not of the kind {kind!r}.", code=Code.GRANT_INVALID
            )
        if isinstance(document, Approval):
            return await self._put_approval(actor, document)
        if kind == "policy":
            return await self._put_policy(actor, document)
        verify(document, self._trusted_policy_keys())
        if kind == "standing":
            return await self._put_standing(actor, document)
        await self._require_room(document)
        if kind == "deny":
            entry = decode_body(document, DenyEntry, Purpose.DENY)
            require_signer(document, entry.region, "deny entry")
            self._require_concerned(entry)
            if await self._is_outranked(actor, document):
                return f"{entry.region} has a later word on {entry.streams} to or from {entry.peer}."
            await self._store_and_log(actor, "denies", "state", document_id(document), document)
            return f"{entry.streams} to or from {entry.peer}: {'lifted' if entry.lifted else 'denied'}."
        if kind == "import":
            accepted = open_import(document, self._trusted_policy_keys())
            self._require_party(actor, accepted.bridge, accepted.from_region, accepted.to_region)
            self._require_same_terms(accepted)
            self._require_policy_of(accepted, accepted.to_region)
            # By the region that signed it: nobody's acceptance stands in the place of another's.
            name = f"{accepted.grant}.{accepted.to_region}"
            before = await self._require_newest("import", name, document, accepted)
            await self._store_and_log(actor, "grants", "import", name, document, before)
            return f"{accepted.grant} is accepted by {accepted.to_region}."
        export = open_export(document, self._trusted_policy_keys())
        terms = export.terms
        self._require_party(actor, terms.bridge, terms.from_region, terms.to_region)
        self._require_policy_of(export, terms.from_region)
        before = await self._require_newest("export", export.grant, document, export)
        await self._store_and_log(actor, "grants", "export", export.grant, document, before)
        return f"{export.grant} is granted by {terms.from_region}."

    async def _put_standing(self, actor: SpiffeId, document: SignedDocument) -> str:
        standing = decode_body(document, Standing, Purpose.STANDING)
        require_signer(document, standing.region, str(standing.action))
        self._book.get(standing.grant, self.broker.clock_ms())
        self._require_end(standing)
        done = f"{standing.grant} is {_DONE[standing.action]} by {standing.region}."
        if self._book.is_revoked_by(standing.grant, standing.region):
            # The first one holds. Others would be kept, verified at each change, and have no end.
            return f"{standing.grant} is revoked by {standing.region} already."
        held = self._accepted_before(standing)
        if held is not None:
            # A later word would begin another incarnation, and what crossed under the one that this began would be unknown.
            return f"{standing.grant} is {_DONE[standing.action]} by {held.region} already, from offset {held.truncation.offset} on."
        name = document_id(document)
        if standing.action is not StandingAction.REVOKE:
            if await self._is_outranked(actor, document):
                return f"{standing.region} has a later word on {standing.grant}."
            await self._require_room(document)
            await self._store_and_log(actor, "revocations", "state", name, document)
            return done
        # A revocation takes effect whether or not the log can be written, and its leaf comes behind what it found on its way.
        revision = await self._store(actor, "revocations", "state", name, document)
        await self._follow_to(revision)
        await asyncio.wait({self._log_soon(document)}, timeout=DRAIN_MS / 1000)
        return done

    def _accepted_before(self, standing: Standing) -> Accepted | None:
        """What this region said before that is the same as this word of its own about a shard: who decides twice has one answer."""
        cut = standing.truncation
        if not isinstance(cut, Truncation) or standing.region != self._own.region:
            return None
        held = self._book.accepted_truncations(standing.grant, cut.stream, cut.shard).get(cut.incarnation)
        is_resend = standing.action is StandingAction.RESEND
        if held is None or (held.truncation, held.region, held.is_resend) != (
            cut,
            standing.region,
            is_resend,
        ):
            return None
        return held

    async def _store_and_log(
        self,
        actor: SpiffeId,
        kind: DocumentKind,
        side: DocumentSide,
        name: str,
        document: Document,
        before: int | None = None,
    ) -> None:
        """Into the store first, then its leaf, and wait until this broker judges by it. The log never knows of what the store does
        not have: whatever ends this between the two, what stands in the store without a leaf gets one, and allows nothing
        before that. `before`: the revision that it replaces, None for whichever there is."""
        revision = await self._store(actor, kind, side, name, document, before)
        await self._log_stored(document)
        await self._follow_to(revision)
        if digest_of(document) in self._waiting:
            self._reload_now()

    async def _log_stored(self, document: Document) -> None:
        """The leaf of a document that the store has; where the log does not take it, it is tried again, and so at the next start."""
        try:
            await self._log(document)
        except (FelixError, OSError):
            self._log_soon(document)
            raise

    def _log_soon(self, document: Document) -> asyncio.Task[None]:
        """Write the leaf of a document that the store holds and the log does not, and decide again with it."""
        digest = digest_of(document)
        held = self._logging.get(digest)
        if held is None:
            held = self._logging[digest] = asyncio.ensure_future(self._log_and_reload(document))
            held.add_done_callback(lambda _: self._logging.pop(digest, None))
        return held

    async def _log_and_reload(self, document: Document) -> None:
        while not self._closed:
            try:
                await self._log(document)
                break
            except (FelixError, OSError) as error:
                log.error(
                    "the audit log did not take a %s of %s: %s", document.purpose, document.region, error
                )
                if self.trail.failure is not None:
                    return  # nothing crosses any more
            await asyncio.sleep(LOG_AGAIN_S)
        if _counts_at_once(document):
            # In force since it came; with its leaf it is shown to bridges, too.
            self.watch.changed()
        else:
            self._reload_soon()

    def _reload_soon(self) -> None:
        """Judge by what has its leaf now; once for many documents."""
        if self._reloading is None and not self._closed:
            self._reloading = asyncio.get_running_loop().call_later(RELOAD_S, self._reload_now)

    def _reload_now(self) -> None:
        self._reloading = None
        if not self._closed:
            try:
                self._reload()
            finally:
                self.broker.recheck_sessions()

    async def _log(self, document: Document) -> None:
        """Append the document's leaf, where the log has none. Raises AuditUnavailableError, OSError."""
        digest = digest_of(document)
        if digest in self.logged:
            self._actors.pop(digest, None)
            return
        now = self.broker.clock_ms()
        drain_until = 0
        grant = grant_of(document)
        if isinstance(document, SignedDocument) and is_revocation(document):
            drain_until = now + DRAIN_MS
            await self._drain(grant, lambda arriving: self._arrives(grant, arriving))
        own = self._own
        actor = self._actors.get(digest) or SpiffeId(own.region, own.mesh, "broker", self.broker.broker_id)
        leaf = signed_leaf(
            document,
            own_region=own.region,
            time_ms=now,
            actor=str(actor),
            terms=self._terms_of(grant),
            policy=self._own_policy(document)
            if isinstance(document, SignedDocument) and document.purpose is Purpose.POLICY
            else None,
            drain_until_ms=drain_until,
        )
        await self.logged.append(document.encode_file(), leaf)
        self._actors.pop(digest, None)

    def _arrives(self, grant: str, arriving: StreamName) -> bool:
        """Whether records under the grant may arrive in this stream here."""
        terms = self._terms_of(grant)
        if terms is None:
            return False
        return NamePattern(terms.stream if terms.wildcard else terms.destination_stream).matches(arriving)

    def _terms_of(self, grant: str) -> GrantTerms | None:
        try:
            export = self._book.get(grant, self.broker.clock_ms()).export
        except GrantError:
            return None
        return None if export is None else export.terms

    async def close(self) -> None:
        """Leaves that are being written are written; the next start reads on from here."""
        self._closed = True
        for task in list(self._logging.values()):
            task.cancel()
        await asyncio.gather(*self._logging.values(), return_exceptions=True)
        await self.arrivals.close()
        await self.logged.close()

    async def _put_approval(self, actor: SpiffeId, approval: Approval) -> str:
        trust, now = self._trust, self.broker.clock_ms()
        body = open_approval(approval, trust)
        approver = SpiffeId.parse(body.approver)
        export = self._require_say(body, self._book.get(body.grant, now).export)
        self._require_party(actor, export.terms.bridge, *_ends(export.terms))
        if body.region == self._own.region:
            refuse_ended(approval, trust, now)
            if body.at > now + CLOCK_SKEW_MS:
                raise GrantError(
                    f"The approval of {body.grant} by {approver.name} is dated {(body.at - now) // 1000} s ahead.",
                    hint="Compare the clocks, and have it signed again.",
                )
        if self._book.approval(body.grant, approver) is not None:
            return f"{body.grant} is approved by {approver.name} of {body.region} already."
        if self._book.approvers(body.grant, body.region) >= APPROVERS_MAX:
            raise GrantError(
                f"{APPROVERS_MAX} people of {body.region} have approved {body.grant}; no more are kept.",
                hint="More approvals change nothing.",
            )
        await self._require_room(approval)
        name = f"{body.grant}.{hashlib.sha256(body.approver.encode()).hexdigest()[:24]}"
        await self._store_and_log(actor, "grants", "approval", name, approval)
        found = next(
            (each for each in self._book.get(body.grant, now).approvals if each.region == body.region), None
        )
        return f"{body.grant} is approved by {approver.name} of {body.region}." + (
            f" {found}." if found else ""
        )

    def _require_same_terms(self, accepted: ImportGrant) -> None:
        """An acceptance fits the export grant that is held under its id. Raises GrantError(GRANT_MISMATCH)."""
        try:
            export = self._book.get(accepted.grant, self.broker.clock_ms()).export
        except GrantError:
            return
        if export is not None and not agree(export, accepted):
            raise _other_terms(accepted)

    def _require_policy_of(self, half: ExportGrant | ImportGrant, region: str) -> None:
        """An own half comes behind its policy: what crosses under it could not be shown to be allowed. Raises GrantError(CONFLICT)."""
        if region != self._own.region or self._policy is None:
            return
        later = made_under_later(half, self._policy)
        if later is not None:
            raise GrantError(later.sentence, code=Code.CONFLICT, hint=later.hint)

    async def _require_newest(
        self, kind: str, name: str, document: SignedDocument, half: ExportGrant | ImportGrant
    ) -> int:
        """A half does not take the place of one that outranks it, nor one of another region's again and again. Returns the revision of what
        it would replace.

        Raises GrantError(CONFLICT), UnavailableError(LIMIT_RATE).
        """
        stored = await self._catalog.document(*_STORED[kind], name)
        if stored is None:
            return 0
        try:
            held, keys = SignedDocument.parse(stored.document), self._trusted_policy_keys()
            before = open_export(held, keys) if kind == "export" else open_import(held, keys)
        except FelixError:
            return stored.revision  # what is not believed is replaced
        if before.terms_hash != half.terms_hash:
            raise GrantError(
                f"The grant {half.grant} stands with other terms here: two terms have the same id.",
                code=Code.CONFLICT,
                hint="Change a word of the new terms, and grant them again: they get another id.",
            )
        if half_rank(before) > half_rank(half):
            raise GrantError(
                f"{held.region} signed {before.grant} again at {before.signed_at}; this is an older one.",
                code=Code.CONFLICT,
            )
        if document.region == self._own.region or held == document:
            return stored.revision
        wait_ms = self._signed_again.take(f"{kind}/{name}")
        if wait_ms:
            raise UnavailableError(
                f"{document.region} has signed {before.grant} {SIGNED_AGAIN_MAX} times and more.",
                code=Code.LIMIT_RATE,
                hint="Make a new grant, or bring this one later.",
                retry_after_ms=wait_ms,
            )
        return stored.revision

    def _require_party(self, actor: SpiffeId, bridge: str, from_region: str, to_region: str) -> None:
        """A grant concerns this region; a bridge may bring only documents of its own grants."""
        self._require_ends(from_region, to_region)
        if actor.kind == "bridge" and str(actor) != bridge:
            raise RequestError(f"{actor} cannot bring a grant of {bridge}.", code=Code.FORBIDDEN)

    def _require_ends(self, from_region: str, to_region: str) -> None:
        """A grant concerns this region. Raises RequestError(WRONG_REGION)."""
        if self._own.region not in (from_region, to_region):
            raise RequestError(
                f"The grant is between {from_region} and {to_region}; this is {self._own.region}.",
                code=Code.WRONG_REGION,
            )

    def _require_end(self, standing: Standing) -> None:
        """Only the two regions of a grant have a say in it. Raises GrantError(GRANT_INVALID). Of a grant that is not known here
        anybody may speak: where it comes later, its book asks who did."""
        ends = self._ends_of(standing.grant)
        if ends and self._own.region not in ends:
            raise RequestError(
                f"The grant {standing.grant} is between {' and '.join(ends)}; this is {self._own.region}.",
                code=Code.WRONG_REGION,
            )
        if ends and standing.region not in ends:
            raise GrantError(
                f"The grant {standing.grant} is between {' and '.join(ends)}; {standing.region} has no say in it.",
                hint="One of the grant's two regions must sign it.",
            )

    def _export_of(self, grant: str) -> ExportGrant | None:
        """A grant's genuine export, where the store holds one."""
        keys = self._believed_policy_keys()
        for document in self._halves.get(grant, ()):
            if document.purpose is Purpose.EXPORT:
                try:
                    return open_export(document, keys)
                except FelixError:
                    continue
        return None

    def _ends_of(self, grant: str) -> tuple[str, ...]:
        """The regions of a grant, by its genuine export; without one, by whatever acceptances there are. Empty where it is not
        known."""
        export = self._export_of(grant)
        if export is not None:
            return _ends(export.terms)
        keys, ends = self._believed_policy_keys(), dict[str, None]()
        for document in self._halves.get(grant, ()):
            try:
                accepted = open_import(document, keys)
            except FelixError:
                continue
            ends |= dict.fromkeys((accepted.from_region, accepted.to_region))
        return tuple(ends)

    async def _put_policy(self, actor: SpiffeId, document: SignedDocument) -> str:
        policy = open_policy(document, {self._own.region: self._own.policy_keys}, "the policy")
        if self._policy is not None:
            check_successor(self._policy, policy)
        await self._catalog.put_policy(policy.revision, document.encode_file())
        self._actors[digest_of(document)] = actor
        await self._log_stored(document)
        if digest_of(document) in self._waiting:
            self._reload_now()
        async with asyncio.timeout(MIRROR_TIMEOUT_S):
            await self.watch.until(
                lambda: self._policy is not None and self._policy.revision >= policy.revision
            )
        return f"Policy revision {policy.revision} of {policy.region} is in force."

    async def _put_bundle(self, body: bytes) -> str:
        signed = decode_bundle(body)
        bundle = signed.bundle
        if bundle.region == self._own.region:
            raise RequestError("That is this region's own bundle.", hint="Trust the other region's.")
        if bundle.mesh != self._own.mesh:
            raise RequestError(
                f"{bundle.region} belongs to mesh {bundle.mesh!r}, this region to {self._own.mesh!r}.",
                code=Code.WRONG_REGION,
            )
        held = self._bundles.get(bundle.region)
        if held == bundle:
            return f"{bundle.region} is trusted already."
        if held is not None and not await asyncio.to_thread(self._is_pinned, bundle):
            check_update(held, signed)
        revision = self._mirror.trusted_revision(bundle.region)
        await self._catalog.put_trusted(bundle.region, body, revision=revision)
        return f"{bundle.region} is trusted, fingerprint {bundle.fingerprint()}."

    async def _is_outranked(self, actor: SpiffeId, document: SignedDocument) -> bool:
        """True where a later word takes the place of this one, which gets its leaf and is kept no longer. Raises
        UnavailableError(LIMIT_RATE) where another region replaces its words without end."""
        if (
            document.region != self._own.region
            and self._newest.has(document)
            and digest_of(document) not in self.logged
        ):
            wait_ms = self._superseded.take(document.region)
            if wait_ms:
                raise UnavailableError(
                    f"{document.region} has replaced {SUPERSEDED_MAX} of its pauses and deny entries and more.",
                    code=Code.LIMIT_RATE,
                    hint="Bring this one later.",
                    retry_after_ms=wait_ms,
                )
        if not self._newest.outranks(document):
            return False
        self._actors[digest_of(document)] = actor
        await self._log(document)
        return True

    async def _require_room(self, document: Document) -> None:
        """Another region may have so many documents kept here, of so many bytes, and one revocation of each grant besides. A half takes the
        place of the one before it; no newer document takes another's. Raises UnavailableError(LIMIT_MEMORY)."""
        region = document.region
        if region == self._own.region or self._has_room(document):
            return
        await self._compact(region)
        replaces = isinstance(document, SignedDocument) and self._newest.has(document)
        if not replaces and not self._has_room(document):
            raise UnavailableError(
                f"{region} has {self._signed_by[region]} documents of {self._bytes_of[region] >> 20} MiB in {self._own.region}; "
                f"{PEER_DOCUMENTS_MAX} of {PEER_BYTES_MAX >> 20} MiB in all are the most that are kept.",
                code=Code.LIMIT_MEMORY,
                hint="Remove grants that ended long ago from the metadata store.",
            )

    def _has_room(self, document: Document) -> bool:
        """Whether a document of another region fits, in the place of the half before it, where it is one."""
        region, data = document.region, document.encode_file()
        halves = self._halves.get(HeldDocument.of(data).half_of, ())
        before = next(
            (
                len(half.encode_file())
                for half in halves
                if (half.purpose, half.region) == (document.purpose, region)
            ),
            0,
        )
        fits = self._bytes_of[region] - before + len(data) <= PEER_BYTES_MAX
        return fits and (before > 0 or self._signed_by[region] < PEER_DOCUMENTS_MAX)

    async def _compact(self, region: str) -> None:
        """Remove a region's documents from the store whose place a later word took: they stand in the log, and what this broker keeps
        of the later word holds against them should somebody bring them again."""
        outranked = [
            (kind, side, name)
            for kind, side in (_STORED["standing"], _STORED["deny"])
            for name, data in self._mirror.documents(kind, side).items()
            if (held := self._parsed.get(data)) is not None
            and held.document.region == region
            and held.digest in self.logged
            and isinstance(held.document, SignedDocument)
            and self._newest.outranks(held.document)
        ]
        for kind, side, name in outranked[:COMPACTED_MAX]:
            await self._catalog.delete_document(kind, side, name)
        async with asyncio.timeout(MIRROR_TIMEOUT_S):
            await self._mirror.until(
                lambda: all(self._mirror.document(*place) is None for place in outranked[:COMPACTED_MAX])
            )

    async def _store(
        self,
        actor: SpiffeId,
        kind: DocumentKind,
        side: DocumentSide,
        name: str,
        document: Document,
        before: int | None = None,
    ) -> int:
        """Keep a verified document in place of the one of revision `before`, or of whichever there is; its leaf names the actor.
        Returns the revision that has it. Raises RequestError(CONFLICT)."""
        digest = digest_of(document)
        self._actors[digest] = actor
        try:
            data = document.encode_file()
            held = await self._catalog.document(kind, side, name)
            if held is not None and held.document == data:
                return held.revision
            if before is None:
                before = 0 if held is None else held.revision
            return (await self._catalog.put_document(kind, side, name, data, revision=before)).revision
        except BaseException:
            self._actors.pop(digest, None)
            raise

    async def _follow_to(self, revision: int) -> None:
        """Wait until this broker judges by what the store had then."""
        await asyncio.wait_for(self._mirror.wait_for(revision), MIRROR_TIMEOUT_S)

    def documents(self, identity: SpiffeId, kind: str) -> dict[str, bytes]:
        """Documents of one kind by id. A bridge sees those of its own grants and their regions, and what cut its streams; an
        operator all."""
        own_policy = kind == "policy" and identity.region == self._own.region
        if identity.kind != "bridge" or not (kind in SYNCED_KINDS or own_policy):
            self.broker.require_operator(identity, f"list {kind} documents")
        if kind == "bundle":
            return self._mirror.trusted()
        if kind == "policy":
            policy = self._mirror.policy
            if identity.kind == "bridge" and policy is not None and self._policy is not None:
                policy = self._in_force
            return {} if policy is None else {str(policy.version): policy.document}
        if kind not in _STORED:
            raise RequestError(
                f"There are no {kind!r} documents.", hint=f"Kinds: {', '.join(DOCUMENT_KINDS)}."
            )
        found = self._mirror.documents(*_STORED[kind])
        if identity.kind != "bridge":
            return found
        # A document without a leaf in the log does not leave the region.
        found = {name: shown for name, data in found.items() if (shown := self._shown_as(data)) is not None}
        own, regions = self._book.carried_by(str(identity))
        if kind in ("export", "standing"):
            # What its streams cross under now may rest on what was accepted under another bridge's grant.
            own |= self._book.cut_under(own)
        if kind in ("export", "import", "approval", "standing"):
            return {name: data for name, data in found.items() if name.split(".")[0] in own}
        return {name: data for name, data in found.items() if denies_between(data, regions)}

    def _shown_as(self, data: bytes) -> bytes | None:
        """A document of the store, as bridges may see it: with its leaf, or what counts until it has one; None where there is nothing."""
        held = self._parsed.get(data)
        if held is None or held.digest in self.logged:
            return None if held is None else data
        before = self._stand_ins.get(held.digest)
        return None if before is None else before.document.encode_file()

    def _shown(self, identity: SpiffeId) -> dict[str, dict[str, bytes]]:
        """All that an identity may list, by kind."""
        kinds: tuple[str, ...] = DOCUMENT_KINDS
        if identity.kind == "bridge":
            kinds = (*SYNCED_KINDS, "policy") if identity.region == self._own.region else SYNCED_KINDS
        return {kind: self.documents(identity, kind) for kind in kinds}

    # -- witnessing ------------------------------------------------------------------------------------

    def audit_state(self) -> tuple[str, int]:
        """The audit log's origin and durable size in leaves."""
        return self.trail.key.name, self.trail.status().durable


def _counts_at_once(document: Document) -> bool:
    """What forbids, leaf or no leaf."""
    return isinstance(document, SignedDocument) and forbids(document)


def _place_of_half(held: HeldDocument) -> tuple[str, Purpose, str]:
    return held.half_of, held.document.purpose, held.document.region


def _ends(terms: GrantTerms) -> tuple[str, str]:
    return terms.from_region, terms.to_region


def _other_terms(accepted: ImportGrant) -> GrantError:
    return GrantError(
        f"{accepted.to_region} accepted other terms than those of {accepted.grant}: another hash, stream, region or bridge.",
        code=Code.GRANT_MISMATCH,
        hint="Accept the export grant as it was signed.",
    )
