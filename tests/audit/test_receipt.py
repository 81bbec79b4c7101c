"""Receipts: signed by the destination, bound to their purpose, compared with the ACK that carries them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from audit_log import RECEIPT_KEY, RECEIPT_KEYS, Link, key
from hypothesis import given
from hypothesis import strategies as st

from audit.receipt import Receipt, differences, open_receipt, read_unverified, sign_receipt
from cli.exits import EXIT_DAMAGED, exit_code
from felix.errors import Code, LaterReleaseError, TamperError


def test_a_receipt_goes_round_and_agrees_with_its_ack() -> None:
    link = Link()
    ack = link.ack(link.intent())
    receipt = open_receipt(ack.header.receipt, RECEIPT_KEYS)
    assert receipt == read_unverified(ack.header.receipt)
    assert differences(receipt, ack.header) == []
    other = msgspec.structs.replace(ack.header, last_offset=7, grant_id="g-2")
    assert differences(receipt, other) == ["grant_id", "last_offset"]


def test_another_key_or_purpose_is_refused() -> None:
    link = Link()
    data = link.ack(link.intent()).header.receipt
    with pytest.raises(TamperError, match="none of eu-west's receipt keys"):
        open_receipt(data, replace(RECEIPT_KEYS, by_id={}))
    with pytest.raises(TamperError, match="does not hold"):
        open_receipt(data, replace(RECEIPT_KEYS, by_id={RECEIPT_KEY.key_id: key(9).verify_key.public}))
    parts = msgspec.msgpack.decode(data)
    parts["signature"] = RECEIPT_KEY.sign("grant", parts["body"])
    with pytest.raises(TamperError, match="does not hold"):
        open_receipt(msgspec.msgpack.encode(parts), RECEIPT_KEYS)


def test_a_receipt_of_another_region_or_about_another_log_is_refused() -> None:
    link = Link()
    data = link.ack(link.intent()).header.receipt
    with pytest.raises(TamperError, match="arrived in eu-west is signed by us-east"):
        open_receipt(data, replace(RECEIPT_KEYS, region="us-east"))
    with pytest.raises(TamperError, match="which is not us-east"):
        open_receipt(data, replace(RECEIPT_KEYS, ingress_origin="us-east.acme/audit"))


@given(st.data())
def test_no_flipped_bit_passes(data: st.DataObject) -> None:
    link = Link()
    whole = link.ack(link.intent()).header.receipt
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(TamperError):
        open_receipt(bytes(changed), RECEIPT_KEYS)


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_no_receipt(data: bytes) -> None:
    with pytest.raises(TamperError):
        open_receipt(data, RECEIPT_KEYS)
    with pytest.raises(TamperError):
        read_unverified(sign_receipt(read_of(), RECEIPT_KEY) + data + b"x")


def read_of() -> Receipt:
    link = Link()
    return read_unverified(link.ack(link.intent()).header.receipt)


def test_what_a_later_release_signed_is_told_from_what_was_changed() -> None:
    link = Link()
    parts = msgspec.msgpack.decode(link.ack(link.intent()).header.receipt)
    body = msgspec.msgpack.encode({**msgspec.msgpack.decode(parts["body"]), "of_later": 1})
    signed = {**parts, "body": body, "signature": RECEIPT_KEY.sign("receipt", body)}
    with pytest.raises(
        LaterReleaseError, match=r"unknown field `of_later`.*later release.*upgrade whoever says so"
    ) as later:
        open_receipt(msgspec.msgpack.encode(signed), RECEIPT_KEYS)
    assert later.value.code is Code.VERSION_UNSUPPORTED and exit_code(later.value) == EXIT_DAMAGED
    forged = {**signed, "signature": bytes(64)}
    with pytest.raises(TamperError, match="signature does not hold"):
        open_receipt(msgspec.msgpack.encode(forged), RECEIPT_KEYS)
    with pytest.raises(TamperError) as refused:
        open_receipt(msgspec.msgpack.encode({**parts, "body": b"\xff"}), RECEIPT_KEYS)
    assert "later release" not in str(refused.value)
