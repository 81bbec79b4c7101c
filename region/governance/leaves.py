"""Leaves of the documents that a region holds: each gets one in the audit log, by whoever put it there or by itself.

Invariants: a document whose leaf could not be written is tried again until it stands; the leaf of what stops crossings comes behind those
of what was taken before: of a revocation, a pause, a deny entry, and of a half or a policy that takes another's place. What counts only with its
leaf lets the one before it count until this broker knows of the leaf, and verification allows that for STANDING_GRACE_MS: so nothing crosses where
it was not known KNOWN_MS_MAX ago that a leaf does not stand.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from operator import itemgetter
from typing import Final, Protocol

from audit.leaf import Leaf
from audit.signed_leaf import signed_leaf
from audit.trail import Trail
from felix.errors import FelixError
from felix.names import NamePattern, SpiffeId, StreamName
from felix.tasks import end_tasks
from keys.bundle import RegionBundle
from policy.approval import Approval, Document
from policy.grant import EVERYWHERE, DenyEntry, ExportGrant, GrantBook, GrantError, ImportGrant
from policy.signed import Purpose, SignatureError, SignedDocument, decode_body
from policy.terms import GrantTerms
from region.broker import Broker
from region.evidence.document_log import KNOWN_MS_MAX, DocumentLog
from region.governance.policy_in_force import PolicyInForce
from region.trust.held_document import digest_of, grant_of, is_revocation
from region.trust.trust_store import forbids

log = logging.getLogger("felix.region.governance")

DRAIN_MS: Final = 10_000
"""How long the caller who puts what stops a grant waits for transfers in flight under it. The leaf follows them, however long they take."""
POLICY_WAIT_S: Final = 60.0
"""How long the leaf of a policy waits for what was taken before. It concerns every stream, and one that is damaged must not keep a stricter
policy from being in force: what such a stream holds of before a crash may then stand behind it."""
LOG_AGAIN_S: Final = 1.0
"""How soon the leaf of a document is tried again that the audit log did not take."""

LOOK_S: Final = 1.0
"""How often is asked for a document's leaf, and looked who writes it, while what the document stops is waited for."""

Stopped = tuple[Callable[[str], bool], Callable[[StreamName], bool]]
"""Whether a grant, and a stream in which something may arrive, are concerned."""
Drain = Callable[[Callable[[str], bool], Callable[[StreamName], bool]], Awaitable[None]]
"""Returns once nothing that was taken before, under the grants and into the streams that are asked for, is on its way any more."""


class Neighbours(Protocol):
    """The region's other brokers, as far as leaves of documents concern them (region.evidence.home_leaves)."""

    @property
    def writes_here(self) -> bool:
        """Whether the audit log is this broker's to write."""

    async def all_passed(
        self, digest: bytes, leads_to: Callable[[StreamName], bool], is_stored: Callable[[], bool]
    ) -> None:
        """Before a document's leaf is written here: what it stops, and the others had taken before, has its leaves. `leads_to`: whether that
        may have arrived in a stream. `is_stored`: whether the store has the document, so that each of them sees it."""

    async def has_leaf(self, digest: bytes, *, passed: bool) -> bool | None:
        """Where it is written elsewhere: whether it stands; None where it may. `passed`: what the document stops here has its leaves; then the answer waits for the
        leaf, for less than KNOWN_MS_MAX."""

    def leaf_of(self, digest: bytes) -> int | None:
        """The index of the leaf that stands, as whoever wrote it said; None where it was not said, or is known here."""

    def written(self, digest: bytes) -> None:
        """A document has its leaf."""


class Alone:
    """A region of one broker."""

    writes_here: Final = True

    async def all_passed(
        self, digest: bytes, leads_to: Callable[[StreamName], bool], is_stored: Callable[[], bool]
    ) -> None:
        """There are no others."""

    async def has_leaf(self, digest: bytes, *, passed: bool) -> bool | None:
        """Never asked."""
        raise AssertionError("the log is here")

    def leaf_of(self, digest: bytes) -> int | None:
        """Nobody else says it."""
        return None

    def written(self, digest: bytes) -> None:
        """There is nobody to tell."""


class DocumentLeaves:
    """One per broker."""

    def __init__(
        self,
        broker: Broker,
        own: RegionBundle,
        trail: Trail,
        logged: DocumentLog,
        policies: PolicyInForce,
        book: Callable[[], GrantBook],
        drain: Drain,
        written: Callable[[Document], None],
        neighbours: Neighbours,
        compared: Callable[[], None],
        is_stored: Callable[[bytes], bool],
        require_in_time: Callable[[Document, int], None] = lambda document, now: None,
    ) -> None:
        """`own`: the broker's region. `book`: what counts now. `drain` waits until nothing that was taken before is on its way. `written` is told of each leaf that `log_soon` wrote.
        `compared` is called once it is known of all documents of a start whether they have their leaf. `is_stored`: whether the store has a document, by its digest.
        `require_in_time` raises SignatureError where a document gets no leaf any more at that time (ms)."""
        self._broker = broker
        self._identity = SpiffeId(own.region, own.mesh, "broker", broker.broker_id)
        """who puts what came by nobody's request"""
        self._trail = trail
        self._logged = logged
        self._policies = policies
        self._book = book
        self._drain = drain
        self._written = written
        self._neighbours = neighbours
        self._compared = compared
        self._is_stored = is_stored
        self._require_in_time = require_in_time
        self._unasked: set[bytes] = set()
        """documents that are written elsewhere, and of which it is not known whether they were"""
        self._is_compared = neighbours.writes_here
        """whether it is known of all documents that the store held at the start whether they have their leaf"""
        self._lacked: dict[bytes, int] = {}
        """documents whose leaf another broker writes: when it was asked last (`Clock.boot_ms`) and had none"""
        self._least: tuple[bytes, int] = b"", 0
        self._following: Counter[bytes] = Counter()
        """how many follow a document: who has put it, and whoever writes what the store holds"""
        self._actors: dict[bytes, SpiffeId] = {}
        self._writing: dict[bytes, asyncio.Task[None]] = {}
        self._without_leaf: dict[bytes, Document] = {}
        """what this broker judges by and has asked for the leaf of, until that stands"""
        self._arriving: tuple[GrantBook | None, tuple[NamePattern, ...]] = None, ()
        """of a book, the streams in which something may arrive"""
        self._closed = False

    @property
    def is_current(self) -> bool:
        """Whether it is known of all documents that this broker has seen which of them had no leaf KNOWN_MS_MAX ago."""
        # Few at a time: those that wait for what they stop.
        return (
            self._is_compared
            and self._logged.writing_ms() <= KNOWN_MS_MAX
            and (not self._lacked or self._now_ms() - self._asked_last_ms() <= KNOWN_MS_MAX)
        )

    def _asked_last_ms(self) -> int:
        """The least of `_lacked`. Times there only rise, so what was the least is, as long as it stands."""
        digest, asked_ms = self._least
        if self._lacked.get(digest) != asked_ms:
            self._least = digest, asked_ms = min(self._lacked.items(), key=itemgetter(1))
        return asked_ms

    def _now_ms(self) -> int:
        return self._broker.runtime.clock.boot_ms()

    def name_actor(self, document: Document, actor: SpiffeId) -> None:
        """The document's leaf, if it gets one, is to say that `actor` put it."""
        self._actors[digest_of(document)] = actor

    def forget_actor(self, document: Document) -> None:
        """The document was not put."""
        self._actors.pop(digest_of(document), None)

    async def log_stored(self, document: Document) -> None:
        """The leaf of a document that the store has; where the log does not take it, it is tried again, and so at the next start. Where what
        was taken before is on its way for longer than DRAIN_MS, the leaf follows by itself."""
        self._without_leaf.setdefault(digest_of(document), document)
        try:
            async with asyncio.timeout(DRAIN_MS / 1000):
                await self._let_pass(document)
        except TimeoutError:
            self.log_soon(document)
            return
        try:
            await self.log(document)
        except (FelixError, OSError, asyncio.CancelledError):
            self.log_soon(document)
            raise

    def log_soon(self, document: Document) -> asyncio.Task[None]:
        """Write the leaf of a document that the store holds and the log does not, and decide again with it."""
        digest = digest_of(document)
        held = self._writing.get(digest)
        if held is None:
            if not self._neighbours.writes_here:
                self._unasked.add(digest)
            self._without_leaf.setdefault(digest, document)
            held = self._writing[digest] = asyncio.ensure_future(self._write(document))
            held.add_done_callback(lambda _: self._writing.pop(digest, None))
        return held

    async def _write(self, document: Document) -> None:
        told = ""
        while not self._closed:
            try:
                await self.log(document)
                break
            except SignatureError as error:
                log.error("a %s of %s gets no leaf: %s", document.purpose, document.region, error)
                digest = digest_of(document)
                self._logged.lacks(digest)
                self._forget(document, digest)
                break
            except (FelixError, OSError) as error:
                if str(error) != told:
                    told = str(error)
                    log.error(
                        "the audit log did not take a %s of %s: %s", document.purpose, document.region, error
                    )
                if self._neighbours.writes_here and self._trail.is_over:
                    return  # nothing crosses any more
            await asyncio.sleep(LOG_AGAIN_S)
        self._written(document)

    async def log(self, document: Document) -> None:
        """Append the document's leaf, where the log has none. Raises AuditUnavailableError, OSError."""
        digest = digest_of(document)
        self._without_leaf.setdefault(digest, document)
        while digest not in self._logged:
            # Who writes the log may change meanwhile.
            carry_out = self._append if self._neighbours.writes_here else self._follow
            if await carry_out(document, digest):
                break
        self._forget(document, digest)

    def _forget(self, document: Document, digest: bytes) -> None:
        """It has its leaf, or gets none."""
        self.forget_actor(document)
        self._without_leaf.pop(digest, None)
        self._asked(digest)

    async def _append(self, document: Document, digest: bytes) -> bool:
        """Let pass what the document stops, and write its leaf here; False where this broker has not got the log any more."""
        is_revoked = isinstance(document, SignedDocument) and is_revocation(document)
        revoked_ms = self._broker.clock_ms()
        passing = asyncio.ensure_future(self._let_pass(document))
        try:
            while not await _ends(passing):
                if not self._neighbours.writes_here:
                    return False
        finally:
            await end_tasks(passing)

        def leaf() -> Leaf:
            now = self._broker.clock_ms()
            self._require_in_time(document, now)
            return signed_leaf(
                document,
                own_region=self._identity.region,
                # A revocation says since when it is in force.
                time_ms=revoked_ms if is_revoked else now,
                actor=str(self._actors.get(digest) or self._identity),
                terms=self._terms(grant_of(document)),
                policy=self._policies.open(document)
                if isinstance(document, SignedDocument) and document.purpose is Purpose.POLICY
                else None,
                drain_until_ms=revoked_ms + DRAIN_MS if is_revoked else 0,
            )

        await self._logged.append(document.encode_file(), leaf)
        self._neighbours.written(digest)
        return True

    async def _follow(self, document: Document, digest: bytes) -> bool:
        """Let pass what the document stops here, and wait until it has its leaf, which another broker writes; False where this broker has gone on
        with the log. It asks all the while: an earlier process of it may have said that all has passed."""
        passing: asyncio.Task[None] | None = None
        passed = False
        self._lacked.setdefault(digest, self._now_ms())
        self._following[digest] += 1
        try:
            while not self._neighbours.writes_here:
                # Nor does whoever writes leaves write it then.
                self._require_in_time(document, self._broker.clock_ms())
                asked_ms = self._now_ms()
                stands = await self._neighbours.has_leaf(digest, passed=passed)
                if stands:
                    self._logged.learn(digest, self._neighbours.leaf_of(digest))
                    return True
                if stands is False:
                    self._logged.lacks(digest)
                    self._lacked[digest] = max(asked_ms, self._lacked[digest])
                    self._asked(digest)
                passing = passing or asyncio.ensure_future(self._let_pass(document))
                passed = passed or await _ends(passing)
            return False
        finally:
            self._following[digest] -= 1
            if not self._following[digest]:
                del self._following[digest], self._lacked[digest]
            if passing is not None:
                await end_tasks(passing)

    def _asked(self, digest: bytes) -> None:
        self._unasked.discard(digest)
        self.look_compared()

    def look_compared(self) -> None:
        """Whether it is known of all documents of the start whether they have their leaf."""
        if not self._is_compared and not self._unasked:
            self._is_compared = True
            self._compared()

    async def _let_pass(self, document: Document) -> None:
        """Wait for what the document stops and was taken before, on every broker: behind its leaf it would be held against it. The times of
        the leaves do not tell: a clock may have been set right between the two."""
        if (stopped := self._stopped_by(document)) is None:
            return
        is_policy = isinstance(document, SignedDocument) and document.purpose is Purpose.POLICY
        try:
            async with asyncio.timeout(POLICY_WAIT_S if is_policy else None):
                await self._drain(*stopped)
                digest = digest_of(document)
                await self._neighbours.all_passed(digest, stopped[1], partial(self._is_stored, digest))
        except TimeoutError:
            if not is_policy:
                raise
            log.warning("the policy's leaf no longer waits for transfers of before: a stream does not open")

    async def passed_here(self, digest: bytes) -> bool:
        """Wait until what a document stops, and was taken before on this broker, has its leaves or never will; False where this broker does not judge by
        the document."""
        if digest in self._logged:
            return True
        if (document := self._without_leaf.get(digest)) is None:
            return False
        if (stopped := self._stopped_by(document)) is not None:
            await self._drain(*stopped)
        return True

    def _stopped_by(self, document: Document) -> Stopped | None:
        """Under which grants, and into which streams, a document stops what is on its way; None where it stops nothing."""
        if isinstance(document, Approval):
            return None
        if document.purpose is Purpose.POLICY:
            return lambda grant: True, self.may_arrive
        if document.purpose is Purpose.DENY:
            entry = decode_body(document, DenyEntry, Purpose.DENY)
            if entry.lifted:
                return None
            return lambda grant: self._may_deny(entry, grant), partial(self._denies, entry)
        stopped = grant_of(document) if forbids(document) else self._replaced_by(document)
        if not stopped:
            return None
        return lambda grant: grant == stopped, partial(self._arrives, stopped)

    def _replaced_by(self, document: SignedDocument) -> str:
        """The grant of which this half takes another's place; empty where it does not."""
        if document.purpose is Purpose.EXPORT:
            grant = decode_body(document, ExportGrant, Purpose.EXPORT).grant
        elif document.purpose is Purpose.IMPORT:
            grant = decode_body(document, ImportGrant, Purpose.IMPORT).grant
        else:
            return ""
        try:
            view = self._book().get(grant, self._broker.clock_ms())
        except GrantError:
            return ""
        before = view.export if document.purpose is Purpose.EXPORT else view.accepted
        return "" if before is None else grant

    def _terms(self, grant: str) -> GrantTerms | None:
        half = self._book().half(grant)
        return half.terms if isinstance(half, ExportGrant) else None

    def _arrives(self, grant: str, arriving: StreamName) -> bool:
        """Whether records under the grant may arrive in this stream here."""
        terms = self._terms(grant)
        return terms is not None and self._leads_to(terms, arriving)

    def may_arrive(self, arriving: StreamName) -> bool:
        """Whether records under any grant that is known may arrive in this stream here."""
        book = self._book()
        if self._arriving[0] is not book:
            known = (self._terms(grant) for grant in book.grants())
            self._arriving = (
                book,
                tuple(_destinations(terms) for terms in known if terms is not None and self._is_here(terms)),
            )
        return any(pattern.matches(arriving) for pattern in self._arriving[1])

    def _leads_to(self, terms: GrantTerms, arriving: StreamName) -> bool:
        return self._is_here(terms) and _destinations(terms).matches(arriving)

    def _is_here(self, terms: GrantTerms) -> bool:
        """Under a grant out of this region nothing arrives here, whatever streams have that name."""
        return terms.to_region == self._identity.region

    def _may_deny(self, entry: DenyEntry, grant: str) -> bool:
        """Whether the entry may name what crosses under the grant: nobody else's traffic keeps it from its leaf."""
        terms = self._terms(grant)
        return terms is None or _names(entry, terms, None)

    def _denies(self, entry: DenyEntry, arriving: StreamName) -> bool:
        """Whether what arrives in this stream here may be what the entry names, there or here."""
        granted = (self._terms(grant) for grant in self._book().grants())
        return any(
            terms is not None and self._leads_to(terms, arriving) and _names(entry, terms, arriving)
            for terms in granted
        )

    async def close(self) -> None:
        """Leaves that are being written are given up; the next start writes them."""
        self._closed = True
        for task in list(self._writing.values()):
            task.cancel()
        await asyncio.gather(*self._writing.values(), return_exceptions=True)


async def _ends(task: asyncio.Task[None]) -> bool:
    """Whether it has ended within LOOK_S. Raises what it raises."""
    await asyncio.wait((task,), timeout=LOOK_S)
    if task.done():
        task.result()
    return task.done()


def _destinations(terms: GrantTerms) -> NamePattern:
    """The streams in which something may arrive under these terms."""
    return NamePattern(terms.stream if terms.wildcard else terms.destination_stream)


def _names(entry: DenyEntry, terms: GrantTerms, arriving: StreamName | None) -> bool:
    """Whether the entry may name what crosses under these terms, or of that what arrives in one stream."""
    regions = terms.from_region, terms.to_region
    if entry.region not in regions or (entry.peer != EVERYWHERE and entry.peer not in regions):
        return False
    denied = NamePattern(entry.streams)
    if terms.wildcard:
        return arriving is None or denied.matches(arriving)
    return any(denied.matches(StreamName.parse(name)) for name in (terms.stream, terms.destination_stream))
