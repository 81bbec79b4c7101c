"""Receipts: the destination region's signed word that an envelope arrived and was appended. Pure.

A receipt is Ed25519 over ``b"felix/receipt/1\\0"`` and the body's bytes; the body is a MessagePack map of
`Receipt`'s fields, the whole is a MessagePack map of key_id, body and signature. It stands in the egress log's ACK
leaf and in every proof. Invariants: `open_receipt(sign_receipt(r, …), …) == r`; a receipt is used only after
`open_receipt` returned; it was then signed by the region that it calls its destination, about that region's own log. Callers: region ingest (signs), bridge (checks), audit.verify, audit.proof, audit.spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from audit.leaf import Digest, Header, Id16, Natural, Text
from felix.errors import TamperError
from keys.signing import SigningKey, VerifyKey

PURPOSE: Final = "receipt"
RECEIPT_BYTES_MAX: Final = 4_096


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


class _Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key_id: Id16
    body: bytes
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


_encoder: Final = msgspec.msgpack.Encoder()
_signed: Final = msgspec.msgpack.Decoder(_Signed)
_body: Final = msgspec.msgpack.Decoder(Receipt)


def sign_receipt(receipt: Receipt, key: SigningKey) -> bytes:
    """The signed receipt's bytes."""
    body = _encoder.encode(receipt)
    data = _encoder.encode(_Signed(key.key_id, body, key.sign(PURPOSE, body)))
    assert len(data) <= RECEIPT_BYTES_MAX
    return data


@dataclass(frozen=True, slots=True)
class ReceiptKeys:
    """The keys under which one region's receipts verify: not a mapping, so that nobody adds another region's to it."""

    region: str
    ingress_origin: str
    """the log that the region's receipts are about"""
    by_id: Mapping[bytes, bytes]
    """Ed25519 public keys by the key id that receipts name"""

    @classmethod
    def of(cls, region: str, ingress_origin: str, publics: Iterable[bytes]) -> ReceiptKeys:
        """From Ed25519 public keys as a bundle lists them."""
        return cls(region, ingress_origin, {VerifyKey(public).key_id: public for public in publics})


def open_receipt(data: bytes, keys: ReceiptKeys) -> Receipt:
    """Verify and read. `keys`: those of the region that the receipt must be from.

    Raises TamperError where the key is none of that region's, the signature does not hold, the body is no receipt, or
    it is about another destination or another region's log.
    """
    signed = _read(data)
    public = keys.by_id.get(signed.key_id)
    if public is None:
        raise TamperError(
            f"A receipt is signed by the key {signed.key_id.hex()}, which is none of {keys.region}'s receipt keys."
        )
    if not VerifyKey(public).holds(PURPOSE, signed.body, signed.signature):
        raise TamperError("A receipt's signature does not hold.")
    receipt = _decode(signed)
    if receipt.destination_region != keys.region:
        raise TamperError(
            f"A receipt for records that arrived in {receipt.destination_region} is signed by {keys.region}."
        )
    if receipt.ingress_origin != keys.ingress_origin:
        raise TamperError(
            f"A receipt of {keys.region} names the log {receipt.ingress_origin!r}, which is not {keys.ingress_origin}."
        )
    return receipt


def read_unverified(data: bytes) -> Receipt:
    """The receipt without its signature checked, for display only. Raises TamperError."""
    return _decode(_read(data))


def _read(data: bytes) -> _Signed:
    if len(data) > RECEIPT_BYTES_MAX:
        raise TamperError(f"{len(data)} bytes are not a receipt.")
    try:
        return _signed.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TamperError(f"A receipt does not decode: {error}.") from error


def _decode(signed: _Signed) -> Receipt:
    try:
        return _body.decode(signed.body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TamperError(f"A receipt's body does not decode: {error}.") from error


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
    return [name for name in _SHARED if getattr(receipt, name) != getattr(ack, name)]
