"""Signed documents in the egress log: each one that concerns this bridge has its leaf there before it is brought to a region,
and before the first INTENT under it. Once each, over restarts too: the ledger says what the log has.

Which documents: those of the bridge's own grants (halves, approvals, standings), deny entries between its regions, and the
residency policy of its own region; of them, those whose signatures hold and whose region has a say in the grant, and of acceptances and
approvals those that are of its terms: what another region signs besides has no place in this log. A revocation's leaf comes once no link under
its grant is in session any more: what is on its way is dealt with first.

What has its leaf counts until a later word does, whatever is listed (bridge.said).

Invariants: a leaf is durable, and its document beside the log where it is too long for it, before `log` returns; what is not
in the ledger is brought nowhere (`is_logged`), and nothing crosses under a grant one of whose documents is not
(`require_logged`), or before the source's policy as it stands there lets it cross (`require_allowed`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import takewhile
from typing import Final, NamedTuple

from audit.document_disk import keep_document
from audit.leaf import Side
from audit.signed_leaf import signed_leaf
from bridge.document_sync import KINDS, Documents, parse_documents
from bridge.link_context import LinkContext
from bridge.said import BYTES_MAX, WORDS_MAX, Said
from felix.errors import FelixError, RequestError, UnavailableError
from felix.names import StreamName
from felix.pace import Pace
from felix.peer import TrustBundle
from policy.approval import APPROVERS_MAX, Approval, Document, earliest
from policy.grant import (
    EVERYWHERE,
    Allowed,
    Attempt,
    DenyEntry,
    ExportGrant,
    GrantBook,
    ImportGrant,
    Standing,
    StandingAction,
    agree,
    approves,
)
from policy.residency import ResidencyPolicy, open_policy
from policy.signed import Purpose, SignedDocument, Trusted, decode_body
from policy.terms import GrantTerms

log = logging.getLogger("felix.bridge.documents")

POLICY: Final = "policy"
"""What the source's residency policy is listed as."""
DRAIN_MS: Final = 10_000
"""After a revocation is known here, no INTENT under its grant is announced later than this."""
_ORDER: Final = (
    Purpose.POLICY,
    Purpose.EXPORT,
    Purpose.IMPORT,
    Purpose.APPROVAL,
    Purpose.STANDING,
    Purpose.DENY,
)


FOREIGN_PER_S: Final = 1 / 60
"""Leaves of documents that one other region signed, after FOREIGN_BURST: each is a leaf, and may be a file, for ever, and a region may
sign as many as it likes. What forbids holds for the links before it has its leaf; what allows waits for it."""
FOREIGN_BURST: Final = 5_000
"""As many as a region keeps of another's (region.governance): years of grants, or a bridge that is new to them."""
REGIONS_MAX: Final = 1_000


class Paper(NamedTuple):
    """One verified document. `grant`: which it is about, empty for policies and deny entries."""

    document: Document
    file: bytes
    digest: bytes
    grant: str = ""
    revokes: bool = False
    policy: ResidencyPolicy | None = None
    made_under: int = 0
    """of an export half, the revision of its region's policy"""


class EgressDocuments:
    """One per agent."""

    def __init__(self, context: LinkContext) -> None:
        self._context = context
        self._papers: tuple[Paper, ...] = ()
        self._book = GrantBook()
        self.said = Said()
        context.derived = self.said.derived
        self.is_newer: Callable[[], bool] = lambda: False
        """whether a region lists something else by now: the leaves that are missing wait until that was looked at"""
        self._seen_ms: dict[bytes, int] = {}
        self._logging = asyncio.Lock()
        self._pace = Pace(FOREIGN_PER_S, FOREIGN_BURST, REGIONS_MAX, context.runtime.clock.monotonic)
        self._held_back: set[str] = set()
        """regions of which documents wait"""
        self._no_room: set[bytes] = set()
        """documents that get no leaf for want of room, as long as the log says what it said when that was asked"""
        self._room_of = 0
        """`said.changes` of then"""
        self._unwritable: set[bytes] = set()
        """Documents of which no leaf can be made."""

    def recall(self, words: Iterable[Document]) -> None:
        """Take what stands in the egress log, which is open now."""
        for document in words:
            self.said.take(document)

    def counting(self, listed: GrantBook) -> GrantBook:
        """What counts: the book of what the regions list now, with what the log has of later words than are genuine there."""
        beside = self.said.beside(listed.believed)
        return listed.including(beside) if beside else listed

    async def read(self, held: Mapping[str, Documents], trusted: Trusted, anchors: TrustBundle) -> GrantBook:
        """Take what the regions list now; the book of what counts. In a thread: a region may list ten thousand documents, each with a
        signature to verify, and the links of every other region go on meanwhile."""
        while True:
            changes = self.said.changes
            book, papers = await asyncio.to_thread(self._read, held, trusted, anchors)
            # A link that began meanwhile may have written a leaf, which then counts. What is verified is remembered.
            if self.said.changes == changes:
                self._take(papers, book)
                return book

    def _read(
        self, held: Mapping[str, Documents], trusted: Trusted, anchors: TrustBundle
    ) -> tuple[GrantBook, dict[bytes, Paper]]:
        documents: list[Document] = []
        for listed in held.values():
            parsed = parse_documents({kind: listed.get(kind, {}) for kind in KINDS})
            documents += (document for document in parsed if not self.said.refuses(document))
        book = self.counting(GrantBook(documents, trusted, anchors))
        return book, self._papers_of(held, trusted, book)

    def _papers_of(
        self, held: Mapping[str, Documents], trusted: Trusted, book: GrantBook
    ) -> dict[bytes, Paper]:
        """The documents that concern this bridge, by their hashes. Changes nothing."""
        context = self._context
        papers: dict[bytes, Paper] = {}
        own, regions = book.carried_by(str(context.bridge))
        source = context.source.region
        listed = {region: parse_documents(documents) for region, documents in held.items()}
        believed = book.believed
        current = self.said.current(believed)
        logged = context.ledger.documents
        for region, documents in listed.items():
            for document in documents:
                if document.purpose is Purpose.POLICY:
                    paper = self._policy(document, trusted) if region == document.region == source else None
                elif document not in believed:
                    continue
                else:
                    paper = _paper(document, own, regions, book)
                # Of a word that another one took the place of, none is made any more: whoever verifies may have forgotten the later one.
                if paper is not None and (paper.policy or paper.digest in logged or document in current):
                    papers[paper.digest] = paper
        return _without_more_approvers(papers)

    def _take(self, papers: dict[bytes, Paper], book: GrantBook) -> None:
        now = self._context.clock_ms()
        self._seen_ms = {
            digest: self._seen_ms.get(digest, now) for digest, paper in papers.items() if paper.revokes
        }
        self._papers = tuple(sorted(papers.values(), key=_order))
        self._unwritable.intersection_update(papers)
        self._no_room.intersection_update(papers)
        self._book = book

    def _policy(self, document: Document, trusted: Trusted) -> Paper | None:
        assert isinstance(document, SignedDocument)
        try:
            policy = open_policy(document, trusted, "the source's policy")
        except FelixError as error:
            log.error("the policy of %s is not believed: %s", document.region, error)
            return None
        file = document.encode_file()
        return Paper(document, file, sha256(file).digest(), policy=policy)

    @property
    def _policies(self) -> Iterator[Paper]:
        """Of the papers those that are policies, which come first."""
        return takewhile(lambda paper: paper.policy is not None, self._papers)

    @property
    def is_waiting(self) -> bool:
        """True while a document has no leaf yet that may get it now."""
        return any(
            paper.digest not in self._context.ledger.documents
            and paper.digest not in self._unwritable
            and paper.digest not in self._no_room
            and paper.document.region not in self._held_back
            for paper in self._papers
        )

    def is_logged(self, digest: bytes) -> bool:
        """True where the document with this hash may be brought to a region."""
        return digest in self._context.ledger.documents

    def require_logged(self, grant: str) -> None:
        """Raises UnavailableError unless all that the grant rests on stands in the egress log, the source's policy included."""
        logged = self._context.ledger.documents
        if not any(paper.digest in logged for paper in self._policies):
            raise UnavailableError(
                f"The residency policy of {self._context.source.region} does not stand in the egress log yet.",
                retry_after_ms=500,
            )
        needed = [paper for paper in self._papers if paper.grant == grant and not paper.revokes]
        if not needed or any(paper.digest not in logged for paper in needed):
            raise UnavailableError(
                f"The documents of {grant} do not stand in the egress log yet.", retry_after_ms=500
            )

    def require_allowed(self, stream: StreamName, destination: str, grant: str, now_ms: int) -> None:
        """Raises UnavailableError unless halves, approvals and the source's policy, as they stand in the egress log, let the stream cross at
        `now_ms`, the time of the leaf that would say so.

        Asked once the source's broker has let the link read, and before each INTENT: the broker goes by the policy that it has, and by
        its own clock, while whoever verifies the log goes by the leaves. A policy whose leaf is missing, or that begins within the
        difference of two clocks, is waited for; so is this clock, where it was set back.
        """
        context = self._context
        logged = context.ledger.documents
        policies = [
            paper.policy for paper in self._policies if paper.policy is not None and paper.digest in logged
        ]
        newest = max(policies, key=lambda policy: policy.revision, default=None)
        source = context.source.region
        attempt = Attempt(stream, source, destination, context.bridge)
        found = None if newest is None else self._book.check(attempt, newest, now_ms, grant=grant)
        if not isinstance(found, Allowed):
            which = "none" if newest is None else f"revision {newest.revision}"
            why = "" if found is None else f" {found.sentence}"
            raise UnavailableError(
                f"{source} lets {stream} cross, and its policy in the egress log ({which}) does not yet.{why}",
                hint="The agent goes on once the policy that allows it stands in its log; compare the clocks of both machines.",
                retry_after_ms=500,
            )

    async def log(self, is_busy: Callable[[str], bool]) -> int:
        """Append the leaves that are missing; durable on return. Returns how many. Raises AuditUnavailableError, OSError.

        `is_busy`: whether a link under this grant is in session; its revocation waits. A document whose leaf cannot be made waits
        too, and nothing behind it does: what one region wrote must not keep another region's pause from its leaf.
        """
        logged = self._context.ledger.documents
        missing = [
            paper
            for paper in self._papers
            if paper.digest not in logged and paper.digest not in self._unwritable
        ]
        written = 0
        self._held_back.clear()
        if self._room_of != self.said.changes:
            self._no_room.clear()
            self._room_of = self.said.changes
        for paper in missing:
            if written and self.is_newer():
                break
            waits = (paper.revokes and is_busy(paper.grant)) or not self._has_policy(paper)
            if not waits and self._may_log(paper):
                try:
                    written += await asyncio.shield(asyncio.ensure_future(self._append(paper)))
                except RequestError as error:
                    self._unwritable.add(paper.digest)
                    log.error("a document of %s gets no leaf: %s", paper.document.region, error)
        return written

    def _has_policy(self, paper: Paper) -> bool:
        """Whether an export half stands behind the policy that it was made under, or a later one, as whoever verifies the log
        asks. The two are listed one after the other: a half may be seen before its policy."""
        logged = self._context.ledger.documents
        return not paper.made_under or any(
            held.policy is not None and held.policy.revision >= paper.made_under and held.digest in logged
            for held in self._policies
        )

    def _may_log(self, paper: Paper) -> bool:
        """Whether this document gets its leaf now. Of another region's own words so many, and so many bytes, are held; and its leaves are
        paced."""
        region = paper.document.region
        if region == self._context.source.region:
            return True
        if region in self._held_back:
            return False
        if paper.digest in self._no_room:
            return False
        if not self.said.has_room(paper.document):
            if not self._no_room:
                log.warning(
                    "the egress log has %d grants, pauses and deny entries of %s, or %d MiB: no more get a leaf. Begin with a new bridge.",
                    WORDS_MAX, region, BYTES_MAX >> 20,
                )  # fmt: skip
            self._no_room.add(paper.digest)
            return False
        if self._pace.take(region):
            log.warning("%s signs documents without end; their leaves wait", region)
            self._held_back.add(region)
            return False
        return True

    async def _append(self, paper: Paper) -> bool:
        context = self._context
        async with self._logging:
            if paper.digest in context.ledger.documents:
                return False
            trail = context.open_trail()
            now_ms = context.clock_ms()
            # What is no longer listed, since this waited, is signed all the same.
            seen_ms = self._seen_ms.get(paper.digest, now_ms)
            leaf = signed_leaf(
                paper.document,
                own_region=context.source.region,
                time_ms=now_ms,
                actor=str(context.bridge),
                terms=self._terms(paper.grant),
                policy=paper.policy,
                drain_until_ms=seen_ms + DRAIN_MS if paper.revokes else 0,
                side=Side.EGRESS,
            )
            await asyncio.to_thread(keep_document, trail.files, paper.file)
            context.failpoints.at("document-kept")
            # The log may be opened again meanwhile: a leaf behind what its ledger is being read from would be missed there, and written twice.
            await context.open_trail().append([leaf])
            context.ledger.apply(leaf.header)
            self.said.take(paper.document)
            context.failpoints.at("document-logged")
            return True

    def _terms(self, grant: str) -> GrantTerms | None:
        half = self._book.half(grant)
        return half.terms if isinstance(half, ExportGrant) else None


def _order(paper: Paper) -> tuple[bool, int, bytes]:
    """What others rest on comes first, a revocation last."""
    return paper.revokes, _ORDER.index(paper.document.purpose), paper.digest


def _without_more_approvers(papers: dict[bytes, Paper]) -> dict[bytes, Paper]:
    """Of a grant's approvals by one region those that whoever verifies the log holds: of each person the earliest, and of more
    people than are held those who approved first. Another one of the same person changes nothing, however many there are."""
    people: dict[tuple[str, str], dict[str, tuple[tuple[int, str, str], bytes]]] = {}
    for digest, paper in papers.items():
        if isinstance(paper.document, Approval):
            claim = paper.document.claim
            found = people.setdefault((claim.grant, claim.region), {})
            rank = earliest(claim), digest
            found[claim.approver] = min(rank, found.get(claim.approver, rank))
    kept = {digest for found in people.values() for _, digest in sorted(found.values())[:APPROVERS_MAX]}
    return {
        digest: paper
        for digest, paper in papers.items()
        if digest in kept or not isinstance(paper.document, Approval)
    }


def _paper(
    document: Document, own: Collection[str], regions: Collection[str], book: GrantBook
) -> Paper | None:
    """A document that concerns the bridge; None for one that does not."""
    file = document.encode_file()
    digest = sha256(file).digest()
    made_under = 0
    if isinstance(document, Approval):
        grant, revokes = document.claim.grant, False
    elif document.purpose is Purpose.DENY:
        entry = decode_body(document, DenyEntry, Purpose.DENY)
        concerned = entry.region in regions and (entry.peer == EVERYWHERE or entry.peer in regions)
        return Paper(document, file, digest) if concerned else None
    elif document.purpose is Purpose.EXPORT:
        export = decode_body(document, ExportGrant, Purpose.EXPORT)
        grant, revokes, made_under = export.grant, False, export.policy_revision
    elif document.purpose is Purpose.IMPORT:
        accepted = decode_body(document, ImportGrant, Purpose.IMPORT)
        granted = book.half(accepted.grant)
        if not isinstance(granted, ExportGrant) or not agree(granted, accepted):
            return None
        grant, revokes = accepted.grant, False
    else:
        standing = decode_body(document, Standing, Purpose.STANDING)
        grant, revokes = standing.grant, standing.action is StandingAction.REVOKE
    half = book.half(grant) if grant in own else None
    if not isinstance(half, ExportGrant):
        return None
    if isinstance(document, Approval):
        has_say = approves(half, document.claim)
    else:
        has_say = document.region in (half.terms.from_region, half.terms.to_region)
    if not has_say:
        return None
    return Paper(document, file, digest, grant, revokes, made_under=made_under)
