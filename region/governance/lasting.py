"""What forbids, and what lifts it: in each place the newest document counts, also where the store has it no more.

Invariants: what was once accepted (this broker kept it, or it has its leaf in the region's audit log) stays its region's word, whatever keys that
region has now, and where it is not trusted any more: its signature was verified when it was accepted, and whoever administers the store
writes neither into the log nor into this broker's folder. But a leaf behind the end of a key that this region itself gave up shows no word of it: a broker that had not
heard of the change wrote it. What forbids under a key that its region gave up is lifted by no word under such
a key, and by one under a key of now where it came later (region.trust.trust_store.Newest).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from hashlib import sha256

from felix.errors import FelixError
from policy.approval import Document
from policy.signed import Purpose, SignedDocument, Trusted
from region.evidence.document_log import DocumentLog
from region.governance.own_words import OwnWords
from region.trust.held_document import HeldDocument, digest_of
from region.trust.trust_store import Memory, Newest, Remembered, forbids, place_of, same_place

log = logging.getLogger("felix.region.governance")


def read_remembered(remembered: Remembered) -> tuple[list[SignedDocument], list[SignedDocument]]:
    """The documents that this broker had accepted before its restart: those that forbid or lift, and policies. None is verified yet."""
    lasting: list[SignedDocument] = []
    policies: list[SignedDocument] = []
    for data in remembered.every():
        try:
            document = SignedDocument.parse(data)
            if place_of(document) is not None:
                lasting.append(document)
            elif document.purpose is Purpose.POLICY:
                policies.append(document)
        except FelixError as error:
            log.error("a document that was kept cannot be read: %s", error)
    return lasting, policies


def accepted_by_leaf(documents: Iterable[bytes], logged: DocumentLog, own_words: OwnWords) -> list[bytes]:
    """Of documents that were read from the log those that count as accepted by their leaf."""
    counting = []
    for data in documents:
        try:
            document = SignedDocument.parse(data)
        except FelixError as error:
            log.error("a document in the audit log cannot be read: %s", error)
            continue
        if own_words.counts_by_leaf(document, logged.leaf_of(sha256(data).digest())):
            counting.append(data)
    return counting


class LastingDocuments:
    """One per broker."""

    def __init__(
        self,
        logged: DocumentLog,
        memory: Memory,
        remembered: Iterable[SignedDocument],
        trusted: Callable[[], Trusted],
        own_words: OwnWords,
    ) -> None:
        """`logged`: the documents that have a leaf; `memory` keeps what must not be taken back; `remembered`: what it kept before. `trusted`: the
        policy keys that regions have now. `own_words`: what counts of this region's own former ones."""
        self._own_words = own_words
        self._newest = Newest()
        self._trusted = trusted
        self._logged = logged
        self._memory = memory
        self._unverified = {digest_of(document): document for document in remembered}
        self._kept = frozenset(self._unverified)
        self._without_leaf: dict[bytes, SignedDocument] = {}
        """this region's words under a key that it gave up, which had no leaf by then and get none"""
        self._taken: set[bytes] = set()

    def in_force(self) -> tuple[SignedDocument, ...]:
        """Of each place the word that counts."""
        return tuple(self._newest.in_force(self._trusted(), self._leaf_of))

    def _leaf_of(self, document: SignedDocument) -> int | None:
        """The index of its leaf; None where it has none yet. A word of this region that gets none was accepted before any under a key of now."""
        return -1 if self._is_without_leaf(document) else self._logged.leaf_of(digest_of(document))

    def to_be_said_again(self) -> list[SignedDocument]:
        """Of what is in force the words of this region that get no leaf: under a key that it gave up, which they had none under. Nobody but this broker knows them."""
        if not self._without_leaf:
            return []
        return [document for document in self.in_force() if self._is_without_leaf(document)]

    def is_to_be_said_again(self, document: SignedDocument) -> bool:
        """Whether such a word is in force in this document's place."""
        return any(same_place(document, held) for held in self.to_be_said_again())

    def _is_without_leaf(self, document: SignedDocument) -> bool:
        # A copy of the log that was behind may have got it since.
        return (
            bool(self._without_leaf)
            and (digest := digest_of(document)) in self._without_leaf
            and digest not in self._logged
        )

    def every(self) -> Iterable[SignedDocument]:
        """Of each place, and of each key that signed there, the newest word: those that a later word of another key may let count again."""
        return self._newest

    def has(self, document: SignedDocument) -> bool:
        """Whether something is held in this document's place, be it this one or another."""
        return self._newest.has(document)

    def outranks(self, document: SignedDocument) -> bool:
        """Whether a later word of the same region stands in this document's place: nothing comes of it any more."""
        return self._newest.outranks(document, self._trusted())

    def outranks_for_good(self, document: SignedDocument) -> bool:
        """The same, whatever keys its region gives up."""
        return self._newest.outranks(document, {})

    def is_of_several_keys(self, document: SignedDocument) -> bool:
        """Whether its leaf decides which word counts in its place."""
        return self._newest.is_of_several_keys(document)

    def _is_accepted(self, document: SignedDocument, digest: bytes) -> bool:
        """Whether its leaf shows that it was: one behind the end of a key that this region gave up does not."""
        return digest in self._logged and self._own_words.counts_by_leaf(
            document, self._logged.leaf_of(digest)
        )

    def take(
        self, held: Iterable[HeldDocument], is_genuine: Callable[[Document, bool], bool]
    ) -> list[Document]:
        """Take what forbids of these and of what was kept, and what lifts it once it has its leaf. Returns those that are to get one.
        `is_genuine` is told whether the document was accepted before."""
        self._unverified |= {
            each.digest: each.document
            for each in held
            if each.lasts and each.digest not in self._taken and isinstance(each.document, SignedDocument)
        }
        waiting: list[Document] = []
        for digest, document in list(self._unverified.items()):
            if not is_genuine(document, digest in self._kept or self._is_accepted(document, digest)):
                # Its region's bundle may come back: what was kept here is kept until then.
                if digest not in self._kept:
                    del self._unverified[digest]
                    log.error("a %s of %s is not believed", document.purpose, document.region)
                continue
            if digest not in self._logged:
                if self._own_words.is_former(document):
                    # Its leaf would stand behind the key's end, where nothing counts that the key signed.
                    if forbids(document):
                        self._without_leaf[digest] = document
                else:
                    waiting.append(document)
                if not forbids(document):
                    continue
            del self._unverified[digest]
            self._taken.add(digest)
            key = self._newest.take(document, self._is_without_leaf)
            if key is not None:
                self._memory.keep(key, document.encode_file())
        return waiting
