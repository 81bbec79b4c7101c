"""Leaves of the documents that a region holds: each gets one in the audit log, by whoever put it there or by itself.

Invariants: a document whose leaf could not be written is tried again until it stands; a revocation's leaf comes behind what was on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from audit.signed_leaf import signed_leaf
from audit.trail import Trail
from felix.errors import FelixError
from felix.names import NamePattern, SpiffeId, StreamName
from keys.bundle import RegionBundle
from policy.approval import Document
from policy.signed import Purpose, SignedDocument
from policy.terms import GrantTerms
from region.broker import Broker
from region.document_log import DocumentLog
from region.governance.policy_in_force import PolicyInForce
from region.held_document import digest_of, grant_of, is_revocation

log = logging.getLogger("felix.region.governance")

DRAIN_MS: Final = 10_000
"""How long a revocation's caller waits for transfers in flight under the grant. The revocation's leaf follows them, however long
they take.
"""
LOG_AGAIN_S: Final = 1.0
"""How soon the leaf of a document is tried again that the audit log did not take."""

Drain = Callable[[str, Callable[[StreamName], bool]], Awaitable[None]]
"""Returns once nothing that was taken under the grant is on its way any more."""


class DocumentLeaves:
    """One per broker."""

    def __init__(
        self,
        broker: Broker,
        own: RegionBundle,
        trail: Trail,
        logged: DocumentLog,
        policies: PolicyInForce,
        terms: Callable[[str], GrantTerms | None],
        drain: Drain,
        written: Callable[[Document], None],
    ) -> None:
        """`own`: the broker's region. `terms`: those of a grant, as they are known now. `drain` waits until nothing
        that was taken under a grant is on its way. `written` is told of each leaf that `log_soon` wrote."""
        self._broker = broker
        self._identity = SpiffeId(own.region, own.mesh, "broker", broker.broker_id)
        """who puts what came by nobody's request"""
        self._trail = trail
        self._logged = logged
        self._policies = policies
        self._terms = terms
        self._drain = drain
        self._written = written
        self._actors: dict[bytes, SpiffeId] = {}
        self._writing: dict[bytes, asyncio.Task[None]] = {}
        self._closed = False

    def name_actor(self, document: Document, actor: SpiffeId) -> None:
        """The document's leaf, if it gets one, is to say that `actor` put it."""
        self._actors[digest_of(document)] = actor

    def forget_actor(self, document: Document) -> None:
        """The document was not put."""
        self._actors.pop(digest_of(document), None)

    async def log_stored(self, document: Document) -> None:
        """The leaf of a document that the store has; where the log does not take it, it is tried again, and so at the next start."""
        try:
            await self.log(document)
        except (FelixError, OSError):
            self.log_soon(document)
            raise

    def log_soon(self, document: Document) -> asyncio.Task[None]:
        """Write the leaf of a document that the store holds and the log does not, and decide again with it."""
        digest = digest_of(document)
        held = self._writing.get(digest)
        if held is None:
            held = self._writing[digest] = asyncio.ensure_future(self._write(document))
            held.add_done_callback(lambda _: self._writing.pop(digest, None))
        return held

    async def _write(self, document: Document) -> None:
        while not self._closed:
            try:
                await self.log(document)
                break
            except (FelixError, OSError) as error:
                log.error(
                    "the audit log did not take a %s of %s: %s", document.purpose, document.region, error
                )
                if self._trail.failure is not None:
                    return  # nothing crosses any more
            await asyncio.sleep(LOG_AGAIN_S)
        self._written(document)

    async def log(self, document: Document) -> None:
        """Append the document's leaf, where the log has none. Raises AuditUnavailableError, OSError."""
        digest = digest_of(document)
        if digest in self._logged:
            self._actors.pop(digest, None)
            return
        now = self._broker.clock_ms()
        drain_until = 0
        grant = grant_of(document)
        if isinstance(document, SignedDocument) and is_revocation(document):
            drain_until = now + DRAIN_MS
            await self._drain(grant, lambda arriving: self._arrives(grant, arriving))
        actor = self._actors.get(digest) or self._identity
        leaf = signed_leaf(
            document,
            own_region=self._identity.region,
            time_ms=now,
            actor=str(actor),
            terms=self._terms(grant),
            policy=self._policies.open(document)
            if isinstance(document, SignedDocument) and document.purpose is Purpose.POLICY
            else None,
            drain_until_ms=drain_until,
        )
        await self._logged.append(document.encode_file(), leaf)
        self._actors.pop(digest, None)

    def _arrives(self, grant: str, arriving: StreamName) -> bool:
        """Whether records under the grant may arrive in this stream here."""
        terms = self._terms(grant)
        if terms is None:
            return False
        return NamePattern(terms.stream if terms.wildcard else terms.destination_stream).matches(arriving)

    async def close(self) -> None:
        """Leaves that are being written are given up; the next start writes them."""
        self._closed = True
        for task in list(self._writing.values()):
            task.cancel()
        await asyncio.gather(*self._writing.values(), return_exceptions=True)
