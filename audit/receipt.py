"""Receipts: the destination region's signed word that an envelope arrived and was appended, and which records it held. Pure.

A signed body (audit.signed_body) of the purpose "receipt", with `Receipt`'s fields. It stands in the egress log's ACK
leaf and in every proof. `entries_sha256` is over the entries that the destination made itself of what it appended: they are
equal to those of the source's INTENT byte for byte, or the receipt is for other records (`is_for`). Receipts of before have none,
and do not say which records of their range arrived.

Invariants: `open_receipt(sign_receipt(r, …), …) == r`; a receipt is used only after
`open_receipt` returned; it was then signed by the region that it calls its destination, about that region's own log, and is for no more
records than its range has offsets. Callers: region ingest (signs), bridge (checks), audit.verify, audit.proof, audit.spark.
"""

from __future__ import annotations

from typing import Final

import msgspec

from audit.leaf import Digest, Header, Id16, Natural, Text
from audit.signed_body import ReceiptKeys, SignedForm
from felix.errors import TamperError
from felix.provenance import path_sha256
from keys.signing import SigningKey

PURPOSE: Final = "receipt"
RECEIPT_BYTES_MAX: Final = 4_096

WITHOUT_ENTRIES_UNSUPPORTED: Final = (
    "which records of their ranges some receipts are for: they state a range and a count, and no hash of the records",
)
"""What a receipt without `entries_sha256` does not show."""
WITHOUT_PATH_UNSUPPORTED: Final = (
    "which regions some records had been in: their leaves, or the receipts for them, do not say",
)
"""What a receipt without `path_sha256` does not show, and a leaf without `path`."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the destination says it did. Offsets in records, both ends included; time in ms since the Unix epoch."""

    grant_id: Text
    terms_hash: Digest
    source_region: Text
    destination_region: Text
    bridge: Text
    stream: Text
    destination_stream: Text
    shard: Natural
    source_epoch: Natural
    incarnation: Id16
    first_offset: Natural
    last_offset: Natural
    records: Natural
    envelope_sha256: Digest
    destination_first_offset: Natural | None
    destination_last_offset: Natural | None
    """None where nothing of the range crossed"""
    ingress_origin: Text
    """the ingress log's origin"""
    ingress_index: Natural
    """the index of the (first) ACK leaf in it"""
    time_ms: Natural
    entries_sha256: Digest = b""
    """SHA-256 of the packed entries of all its ACK leaves there, in their order; empty in receipts of before"""
    path_sha256: Digest = b""
    """SHA-256 of the regions that the records have been in (felix.provenance.path_sha256), as `path` in the ACK leaves there; empty where there
    are no records, and in receipts of before"""

    def is_for(self, entries_sha256: bytes) -> bool:
        """Whether it is for the records whose packed entries have this SHA-256, as far as it says."""
        return self.entries_sha256 in (b"", entries_sha256)


_form: Final = SignedForm(Receipt, PURPOSE, "receipt", RECEIPT_BYTES_MAX)


def sign_receipt(receipt: Receipt, key: SigningKey) -> bytes:
    """The signed receipt's bytes."""
    return _form.sign(receipt, key)


def open_receipt(data: bytes, keys: ReceiptKeys) -> Receipt:
    """Verify and read. `keys`: those of the region that the receipt must be from.

    Raises TamperError where the key is none of that region's, the signature does not hold, the body is no receipt, or
    it is about another destination or another region's log, or for more records than its range has offsets.
    """
    receipt = _form.open(data, keys)
    if receipt.destination_region != keys.region:
        raise TamperError(
            f"A receipt for records that arrived in {receipt.destination_region} is signed by {keys.region}."
        )
    if receipt.ingress_origin != keys.ingress_origin:
        raise TamperError(
            f"A receipt of {keys.region} names the log {receipt.ingress_origin!r}, which is not {keys.ingress_origin}."
        )
    offsets = receipt.last_offset - receipt.first_offset + 1
    if receipt.records > offsets:
        raise TamperError(
            f"A receipt of {keys.region} is for {receipt.records} records of {receipt.first_offset}..{receipt.last_offset}, "
            "which are not so many offsets."
        )
    return receipt


def read_unverified(data: bytes) -> Receipt:
    """The receipt without its signature checked: for display, and where the signature is checked elsewhere. Raises TamperError."""
    return _form.read_unverified(data)


def signer_of(data: bytes) -> bytes:
    """The id of the key that a receipt says signed it. Raises TamperError."""
    return _form.signer(data)


_SHARED: Final = (
    "grant_id",
    "terms_hash",
    "source_region",
    "destination_region",
    "bridge",
    "stream",
    "destination_stream",
    "shard",
    "source_epoch",
    "incarnation",
    "first_offset",
    "last_offset",
    "records",
    "envelope_sha256",
    "destination_first_offset",
    "destination_last_offset",
)


def differences(receipt: Receipt, ack: Header) -> list[str]:
    """The fields in which a receipt and the ACK leaf that carries it differ; empty where they agree."""
    differing = [name for name in _SHARED if getattr(receipt, name) != getattr(ack, name)]
    if receipt.path_sha256 not in (b"", path_sha256(ack.path)):
        differing.append("path")
    return differing
