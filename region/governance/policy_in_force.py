"""The residency policy that a region judges by.

Invariants: the policy in force has its leaf in the audit log; only its successor replaces it, also over a restart (region.trust.trust_store).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from felix.errors import FelixError
from keys.bundle import RegionBundle
from policy.residency import ResidencyPolicy, check_successor, open_policy
from policy.signed import SignedDocument
from region.evidence.document_log import DocumentLog
from region.metadata.mirror import CatalogMirror
from region.metadata.records import Policy
from region.trust.held_document import digest_of
from region.trust.trust_store import Memory

log = logging.getLogger("felix.region.governance")


class PolicyInForce:
    """One per broker."""

    def __init__(
        self,
        own: RegionBundle,
        mirror: CatalogMirror,
        logged: DocumentLog,
        memory: Memory,
        remembered: Iterable[SignedDocument],
    ) -> None:
        """`remembered`: policies that were in force before a restart."""
        self.policy: ResidencyPolicy | None = None
        """in force now; without one, nothing may cross"""
        self.record: Policy | None = None
        """what `policy` was read from"""
        self.problem = ""
        """why what the store has is not believed"""
        self.unbelieved = 0
        """the version of what the store has, where it is no policy under a policy key of now: it gives way to any that is, whatever its number"""
        self._own = own
        self._mirror = mirror
        self._logged = logged
        self._memory = memory
        self.newest: ResidencyPolicy | None = None
        """the last one that was, whatever the store has now"""
        self._parsed: tuple[bytes, SignedDocument, ResidencyPolicy] | None = None
        for document in remembered:
            if document.region != own.region:
                continue
            try:
                policy = self.open(document)
            except FelixError as error:
                log.error("a policy that was kept cannot be read: %s", error)
                continue
            if self.newest is None or policy.revision > self.newest.revision:
                self.newest = policy

    def open(self, document: SignedDocument) -> ResidencyPolicy:
        """A policy of this region. Raises what is wrong with it."""
        return open_policy(document, {self._own.region: self._own.policy_keys}, "the policy in force")

    def read(self) -> SignedDocument | None:
        """Take in the policy that the store holds now. Returns it where its leaf is missing."""
        held = self._mirror.policy
        self.problem, self.unbelieved = "", 0
        if held is None:
            self.policy = None
            return None
        try:
            if self._parsed is None or self._parsed[0] != held.document:
                self.unbelieved = held.version
                document = SignedDocument.parse(held.document)
                self._parsed = held.document, document, self.open(document)
                self.unbelieved = 0
            _, document, policy = self._parsed
            is_other = self.newest is None or self.newest.hash != policy.hash
            if self.newest is not None and is_other:
                check_successor(self.newest, policy)
            if digest_of(document) not in self._logged:
                # Until then the one before it, as of a half that is signed again.
                return document
            if is_other:
                self._memory.keep_policy(held.document)
            self.policy, self.newest, self.record = policy, policy, held
        except FelixError as error:
            log.error("the residency policy is not believed, so nothing may cross: %s", error)
            self.problem = (
                f"The residency policy that the metadata store has is not believed, so nothing may cross: {error.sentence} Put one into force that the "
                "policy key of now signs: felix policy apply FILE."
            )
            self.policy = None
        return None
