"""What a region judges by now: the regions that it trusts, its policy and its book of grants, decided again at each change of the store.

Invariants: while it is decided, and where that fails, nothing is allowed by what held before: a revocation may be in what came.
On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Final

from audit.trail import Trail
from keys.signing import SigningKey
from policy.approval import Document
from policy.grant import DOCUMENTS_MAX, GrantBook
from policy.residency import ResidencyPolicy
from policy.signed import SignedDocument
from region.broker import Broker
from region.evidence.document_log import DocumentLog
from region.governance.book import MadeBook, make_book
from region.governance.changed_keys import ChangedKeys
from region.governance.document_watch import DocumentWatch
from region.governance.held_documents import HeldDocuments
from region.governance.leaves import DocumentLeaves, Drain, Neighbours
from region.governance.pin_leaves import PinLeaves
from region.governance.policy_in_force import PolicyInForce
from region.governance.trusted_regions import TrustedRegions
from region.metadata.catalog import Catalog
from region.metadata.mirror import CatalogMirror, MirrorChange
from region.trust.held_document import digest_of
from region.trust.trust_store import forbids

log = logging.getLogger("felix.region.governance")

RELOAD_S: Final = 0.02
"""Documents that the store holds without a leaf get theirs one by one; what allows counts soon after, together."""


MIRROR_TIMEOUT_S: Final = 10.0
"""How long a put document waits until this broker judges by it."""


class Judgement:
    """One per broker."""

    def __init__(
        self,
        broker: Broker,
        log_key: SigningKey,
        catalog: Catalog,
        mirror: CatalogMirror,
        trail: Trail,
        regions: TrustedRegions,
        policies: PolicyInForce,
        held: HeldDocuments,
        watch: DocumentWatch,
        logged: DocumentLog,
        drain: Drain,
        neighbours: Neighbours,
        instead: Collection[bytes] = (),
    ) -> None:
        """`watch` is told of each change. `logged`, `drain`, `neighbours`: as DocumentLeaves has them; `log_key`, `catalog`, `instead`: as ChangedKeys."""
        self.regions = regions
        self.policies = policies
        self.held = held
        self.watch = watch
        self._stored: set[bytes] = set()
        """digests of what the store has, and the log has no leaf of"""
        self.leaves = DocumentLeaves(
            broker, regions.own, trail, logged, policies, lambda: self.book, drain, self._leaf_written, neighbours, self._reload_now,
            self._stored.__contains__, held.require_in_time,
        )  # fmt: skip
        self.pin_leaves = PinLeaves(
            broker, regions.own.region, regions.own.mesh, trail, logged, lambda: neighbours.writes_here
        )
        self.changed_keys = ChangedKeys(
            broker,
            regions.own,
            log_key,
            catalog,
            mirror,
            trail,
            logged,
            lambda: neighbours.writes_here,
            instead,
        )
        self.book = GrantBook()
        self._broker = broker
        self._mirror = mirror
        self._trail = trail
        self._made: MadeBook | None = None
        self._waiting: set[bytes] = set()
        """digests of what counts only with its leaf, and has none"""
        self._reloading: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def policy(self) -> ResidencyPolicy | None:
        """The residency policy in force; without one, nothing may cross."""
        return self.policies.policy

    def follow(self) -> None:
        """Take in what the mirror holds, now and at each change."""
        self._mirror.on_change(self._changed)
        self.reload()
        self.leaves.look_compared()

    def _changed(self, change: MirrorChange) -> None:
        if self._closed:
            return
        if change.section in ("grants", "revocations", "denies", "policy", "trusted", "pins", "signing_keys"):
            try:
                self.reload()
            finally:
                self._broker.recheck_sessions()

    def reload(self) -> None:
        """Decide again, by what the store holds now."""
        try:
            self._judge_anew()
        finally:
            self.watch.changed()

    def _judge_anew(self) -> None:
        # Whatever fails from here on, nothing is allowed by what held before: a revocation may be in what came.
        self.book = GrantBook()
        self.changed_keys.read_note()
        before, self._made = self._made, None
        self.regions.read()
        self.pin_leaves.log_soon(self.regions.pins_of_all())
        self.changed_keys.log_soon()
        self._trail.checkpoints.trust_witnesses(self.regions.witnesses())
        self._waiting = set()
        self._stored.clear()
        policy = self.policies.read()
        if policy is not None:
            self.leaves.log_soon(policy)
            self._waiting.add(digest_of(policy))
            self._stored.add(digest_of(policy))
        documents, waiting = self.held.sort()
        self._stored.update(map(digest_of, waiting))
        self._waiting |= {digest_of(document) for document in waiting if not counts_at_once(document)}
        self._made = make_book(
            before,
            documents,
            self.held.lasting.in_force(),
            self.regions.believed_policy_keys(),
            dict(self.regions.bundles),
            self.regions.trust,
        )
        self.book = self._made.book
        if self.book.left_out:
            first = ", ".join(claim.grant for claim in self.book.left_out[:3])
            log.error(
                "%d grants are left out, and nothing crosses under them: %d documents are the most that one broker takes (%s …)",
                len(self.book.left_out), DOCUMENTS_MAX, first,
            )  # fmt: skip
        for problem in self.book.problems:
            log.error("a document of %s is not believed: %s", problem.document.region, problem.sentence)
        for document in waiting:
            self.leaves.log_soon(document)

    async def take_in(self, document: Document, revision: int) -> None:
        """A document that the store has since `revision` gets its leaf; returns once this broker judges by it."""
        if counts_at_once(document):
            # In force before its leaf: behind that nothing is taken any more.
            await self.follow_to(revision)
        await self.leaves.log_stored(document)
        await self.follow_to(revision)
        self.recheck(document)

    async def follow_to(self, revision: int) -> None:
        """Wait until this broker judges by what the store had then."""
        async with asyncio.timeout(MIRROR_TIMEOUT_S):
            await self._mirror.wait_for(revision)

    def recheck(self, document: Document) -> None:
        """A document has its leaf: judge by it now, where it counts only with one."""
        if digest_of(document) in self._waiting:
            self._reload_now()

    def _leaf_written(self, document: Document) -> None:
        if counts_at_once(document):
            # In force since it came; with its leaf it is shown to bridges, too.
            self.watch.changed()
            if isinstance(document, SignedDocument) and self.held.lasting.is_of_several_keys(document):
                self._reload_soon()
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
                self.reload()
            finally:
                self._broker.recheck_sessions()

    async def close(self) -> None:
        """Judge no more; leaves that are being written are given up, and the next start writes them."""
        self._closed = True
        await self.pin_leaves.close()
        await self.changed_keys.close()
        await self.leaves.close()


def counts_at_once(document: Document) -> bool:
    """What forbids, leaf or no leaf."""
    return isinstance(document, SignedDocument) and forbids(document)
