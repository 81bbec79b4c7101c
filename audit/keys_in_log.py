"""Under which keys what stands in one log verifies, leaf by leaf: those of now, and below their ends former ones. Pure over `Files`.

A region that changes a policy or receipt key says in its bundle where the former one ended: of each log that it had cosigned, or signed itself,
the size then and the root (keys.bundle.FormerKeys). Whoever has the former key can sign today, and a source's operator can write such a document into its log
at any place that nobody has cosigned. So a document or receipt under a former key counts where

1. the bundle names an end of the key in this very log;
2. its leaf stands below that end; and
3. the leaves up to there are those that the region itself had cosigned, or signed: the log's tree has the end's root at that size. It is the tree that is verified:
   a consistency proof holds the end's root to the checkpoint's, whatever the tiles say that are read for it (audit.consistency). Of a copy of the log that is shorter, and of a proof that does not carry the path to that root: the region itself has cosigned the checkpoint at hand, and a witness cosigns no two histories.
   Its own witness says so whether or not a policy counts it among those whose cosignatures are asked for, and nobody else does (`SignedCheckpoint.seen_by`).
   In a region's own logs, which it does not cosign, the cosignatures that are asked for stand in for its own, where the copy or the proof's checkpoint is shorter
   than the end; a proof under a larger one carries the path.

Callers: audit.verify, audit.proof, audit.tlog_proof, audit.agreement, audit.spark; region.evidence.document_log, for what a region is to sign again. Brokers and agents take nothing by it: they ask for keys of now alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from audit.checkpoint import Checkpoint
from audit.consistency import continues
from audit.origin import Origin
from audit.receipt import Receipt, open_receipt, read_unverified, signer_of
from audit.signed_body import ReceiptKeys
from audit.tile import Files
from audit.trust import Ending, Trust
from felix.errors import TamperError
from keys.pin import SignedPin, not_signed, parse_pin
from keys.signing import VerifyKey
from policy.signed import SignatureError, SignedDocument, key_id

Counts = Callable[[Ending, int], bool]
"""Whether what a former key signed counts at this leaf, which is below the key's end: rule 3."""


def never(ending: Ending, index: int) -> bool:
    """No former key counts."""
    return False


class KeysInLog:
    """Of one log."""

    def __init__(self, trust: Trust, origin: str, counts: Counts = never) -> None:
        self._trust, self._origin, self._counts = trust, origin, counts
        self._now = trust.policy_keys
        self._endings = trust.endings(origin)
        self._cached: dict[tuple[Ending, ...], dict[str, tuple[bytes, ...]]] = {(): self._now}
        self._eras: dict[str, dict[str, int]] = {}
        """by region and key id"""
        self._former_receipt_keys: dict[str, dict[bytes, bytes]] = {}
        """by region and key id"""

    @property
    def has_endings(self) -> bool:
        """Whether any former key ended in this log."""
        return bool(self._endings)

    @property
    def policy_keys(self) -> Mapping[str, tuple[bytes, ...]]:
        """Every policy key that may count anywhere in the log: for documents that were verified at their leaves."""
        return self._with(tuple(ending for ending in self._endings if ending.role == "policy"))

    def policy_keys_at(self, index: int) -> Mapping[str, tuple[bytes, ...]]:
        """The policy keys under which a document in this leaf verifies, by region."""
        if not self._endings:
            return self._now
        return self._with(tuple(e for e in self._endings if e.role == "policy" and self._holds(e, index)))

    def require_not_ended(self, document: SignedDocument, index: int) -> None:
        """Raises SignatureError where the key that this document names had ended before this leaf, with a sentence that says so: else
        `policy.signed.verify` would call it a stranger's."""
        former = self._trust.former_policy_keys(document.region)
        public = next((public for public in former if key_id(public) == document.key), None)
        if public is None:
            return
        ending = self._ending(document.region, "policy", public)
        if ending is None or not self._holds(ending, index):
            raise SignatureError(
                f"The document is signed with the key {document.key[:32]}, {self._why(document.region, ending, index)}",
                hint="Have that region sign it again with its key of now, or treat the document as forged.",
            )

    def era(self, document: SignedDocument) -> int:
        """How many times its region has given a policy key up before the one that this document names was its last: what was signed under a later key takes the place of
        what was under an earlier one, whatever numbers they have. Whoever had a former key could sign the highest number (decision 0172)."""
        eras = self._eras.get(document.region)
        if eras is None:
            eras = self._eras[document.region] = self._trust.policy_eras(document.region)
        return eras.get(document.key, 0)

    def open_receipt(self, data: bytes, index: int) -> Receipt:
        """Verify a receipt in this leaf under the keys of the region that it says it is from. Raises TamperError."""
        region = self._trust.region(read_unverified(data).destination_region)
        public = self._former_of(data, region.region)
        keys = region.receipt_keys
        if public is not None:
            ending = self._ending(region.region, "receipt", public)
            if ending is None or not self._holds(ending, index):
                raise TamperError(
                    f"A receipt is signed by the key {signer_of(data).hex()}, {self._why(region.region, ending, index)}"
                )
            keys = ReceiptKeys.of(keys.region, keys.ingress_origin, (*keys.by_id.values(), public))
        return open_receipt(data, keys)

    def open_pin(self, data: bytes, index: int, region: str) -> SignedPin:
        """Verify a pin in this leaf under the policy keys of the region whose log it is. Raises RequestError, TamperError."""
        pin = parse_pin(data, region, self._trust.region(region).mesh)
        if pin.holds_under(self.policy_keys_at(index)[region]):
            return pin
        for public in self._trust.former_policy_keys(region):
            if pin.holds_under((public,)):
                ending = self._ending(region, "policy", public)
                raise TamperError(
                    f"The pin of {pin.bundle.region} is signed by the key {key_id(public)[:32]}, {self._why(region, ending, index)}"
                )
        raise not_signed(pin)

    def ending_of_document(self, document: object) -> Ending | None:
        """Of a document that verified in this log: where the key ended that signed it; None where it is one of now."""
        if not isinstance(document, SignedDocument):
            return None
        mine = (e for e in self._endings if (e.region, e.role) == (document.region, "policy"))
        return next((ending for ending in mine if key_id(ending.public) == document.key), None)

    def ending_of_receipt(self, data: bytes) -> Ending | None:
        """The same of a receipt."""
        region = read_unverified(data).destination_region
        public = self._former_of(data, region)
        return None if public is None else self._ending(region, "receipt", public)

    def is_of_former_key(self, receipt: bytes) -> bool:
        """Whether a receipt names a former key of its region, which counts here or does not."""
        return self._former_of(receipt, read_unverified(receipt).destination_region) is not None

    def _former_of(self, receipt: bytes, region: str) -> bytes | None:
        """The former key of its region that a receipt names."""
        known = self._former_receipt_keys.get(region)
        if known is None:
            former = self._trust.former_receipt_keys(region)
            known = {VerifyKey(public).key_id: public for public in former}
            self._former_receipt_keys[region] = known
        return known.get(signer_of(receipt)) if known else None

    def _ending(self, region: str, role: str, public: bytes) -> Ending | None:
        found = (e for e in self._endings if (e.region, e.role, e.public) == (region, role, public))
        return next(found, None)

    def _holds(self, ending: Ending, index: int) -> bool:
        return index < ending.size and self._counts(ending, index)

    def _with(self, endings: tuple[Ending, ...]) -> dict[str, tuple[bytes, ...]]:
        found = self._cached.get(endings)
        if found is None:
            found = dict(self._now)
            for ending in endings:
                found[ending.region] = (*found[ending.region], ending.public)
            self._cached[endings] = found
        return found

    def _why(self, region: str, ending: Ending | None, index: int) -> str:
        """Of a former key that does not count in this leaf."""
        if ending is None:
            return (
                f"which {region} gave up: it names no end of it in this log, so it counts for nothing here."
            )
        if index >= ending.size:
            return f"which {region} gave up at {ending.size:,} leaves of this log: this is leaf {index:,}."
        return (
            f"which {region} gave up at {ending.size:,} leaves of this log, and nothing shows that these are the leaves that "
            f"{region} had cosigned or signed by then."
        )


def keys_of_log(
    trust: Trust, checkpoint: Checkpoint, files: Files, seen: Mapping[str, int], covered: int
) -> KeysInLog:
    """The keys of a log of which the files are at hand, as of this checkpoint, which the caller holds to the leaves. `seen`: how many of them each region's own witness
    cosigned at most; `covered`: how many are cosigned as required. Both are held to the tree by the caller. Reads some tiles for each end."""
    origin, size = checkpoint.origin, checkpoint.size
    own = Origin.parse(origin).region
    ends = {(ending.size, ending.root) for ending in trust.endings(origin) if ending.size <= size}
    passed = {end for end in ends if _has_passed(files, checkpoint, *end)}

    def counts(ending: Ending, index: int) -> bool:
        if ending.size <= size:
            return (ending.size, ending.root) in passed
        return index < (covered if ending.region == own else seen.get(ending.region, 0))

    return KeysInLog(trust, origin, counts)


def _has_passed(files: Files, checkpoint: Checkpoint, size: int, root: bytes) -> bool:
    try:
        return continues(files, checkpoint, size, root)
    except TamperError:
        # What is damaged is told by whoever reads the log whole.
        return False


def keys_of_proof(
    trust: Trust,
    origin: str,
    size: int,
    root: bytes,
    seen_by: Collection[str],
    shown: Mapping[int, Collection[tuple[int, bytes]]],
) -> KeysInLog:
    """The keys of a log of which a proof shows some leaves under one checkpoint, of this size and root, cosigned as is asked for. `seen_by`: regions whose own witnesses cosigned it; `shown`: by leaf the
    sizes and roots of ends under which the proof shows it, too."""
    own = Origin.parse(origin).region

    def counts(ending: Ending, index: int) -> bool:
        if (ending.size, ending.root) in shown.get(index, ()):
            return True
        if ending.size == size:
            return ending.root == root
        if ending.region == own:
            # A region signs its own log and does not cosign it: whoever cosigned a larger checkpoint does not say what stood below the end.
            return size < ending.size
        return ending.region in seen_by

    return KeysInLog(trust, origin, counts)
