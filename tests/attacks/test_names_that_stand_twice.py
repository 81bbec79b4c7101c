"""Whoever keeps a log, or signs receipts, writes a map that has a name twice: one reader would take the first, another the last. Nobody reads it."""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec
import pytest
from attacks import test_one_party_alone
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, files_of
from audit_log import Link, key, trust

from audit.leaf import Header, Kind, Leaf, Side, Terms, _encode, decode_header, decode_leaf, encode_leaf
from audit.receipt import open_receipt, read_unverified
from audit.signed_body import ReceiptKeys
from audit.verify import verify_log
from felix.errors import CorruptionError, TamperError
from policy.signed import raw_public_key

PREFIX: Final = 8

encode: Final = msgspec.msgpack.encode


def map_of(pairs: list[tuple[str, Any]], head: str = "map 16") -> bytes:
    """MessagePack, with either head of a map that fits (specification, map format family)."""
    count = bytes([0x80 | len(pairs)]) if head == "fixmap" else b"\xde" + struct.pack(">H", len(pairs))
    return count + b"".join(encode(name) + encode(value) for name, value in pairs)


def with_head(data: bytes, head: bytes) -> bytes:
    """The leaf with another header."""
    (length,) = struct.unpack_from(">H", data, 4)
    return data[:4] + struct.pack(">H", len(head)) + data[6:PREFIX] + head + data[PREFIX + length :]


def pairs_of(data: bytes) -> list[tuple[str, Any]]:
    (length,) = struct.unpack_from(">H", data, 4)
    return list(msgspec.msgpack.decode(data[PREFIX : PREFIX + length]).items())


def refusal() -> Leaf:
    return Leaf(
        Header(
            kind=Kind.DENY, side=Side.EGRESS, time_ms=1_000, source_region="us-east", destination_region="eu-west", stream="acme/a/b",
            actor="x", action="carry", rule="r", code=1, sentence="s", grant_id="g-aaaaaaaaaaaaaaaa",
        )
    )  # fmt: skip


def test_a_leaf_that_names_a_thing_twice_is_no_leaf(tally: Tally) -> None:
    data = _encode(refusal())
    pairs = pairs_of(data)
    for name, value in pairs:
        for doubled in ([*pairs, (name, value)], [(name, value), *pairs]):
            with pytest.raises(CorruptionError, match="twice"):
                decode_leaf(with_head(data, map_of(doubled)))
            tally("headers that name a thing twice", 1)
    with pytest.raises(CorruptionError, match="twice"):
        decode_header(with_head(data, map_of([*pairs, ("grant_id", "g-bbbbbbbbbbbbbbbb")])))


def test_nor_is_one_that_does_inside_its_terms(tally: Tally) -> None:
    terms = Terms(purpose="p", basis="scc", article="a", reference="r")
    made = Header(
        kind=Kind.GRANT, side=Side.EGRESS, time_ms=1_000, source_region="us-east", destination_region="eu-west", bridge="b", stream="s",
        destination_stream="s", grant_id="g", terms_hash=bytes(32), actor="a", terms=terms,
    )  # fmt: skip
    data = _encode(Leaf(made, b"", 1))
    assert decode_leaf(data).header == made
    inner = encode(terms)
    doubled = map_of([*msgspec.msgpack.decode(inner).items(), ("basis", "adequacy")])
    head = encode(made).replace(inner, doubled)
    with pytest.raises(CorruptionError, match="twice"):
        decode_leaf(with_head(data, head))
    tally("headers that name a thing twice", 1)


@pytest.mark.parametrize("head", ["fixmap", "map 16"])
def test_the_order_of_names_is_free_and_so_is_a_default(head: str) -> None:
    data = _encode(refusal())
    pairs = [*pairs_of(data)[::-1], ("shard", 0), ("path", []), ("parts", 1)]
    assert decode_leaf(with_head(data, map_of(pairs, head))) == refusal()


def test_a_log_with_such_a_leaf_does_not_verify(monkeypatch: pytest.MonkeyPatch, tally: Tally) -> None:
    link = Link()
    intents = link.intent(3)
    leaves = [*link.agreement(), *intents, link.ack(intents)]
    assert not verify_log(files_of(EGRESS, leaves), trust()).findings
    lie = refusal()
    honest = _encode(lie)
    doubled = with_head(honest, map_of([*pairs_of(honest), ("actor", "another")]))
    monkeypatch.setattr(
        test_one_party_alone, "encoded", lambda leaf: doubled if leaf is lie else encode_leaf(leaf)
    )
    found = verify_log(files_of(EGRESS, [*leaves, lie]), trust()).findings
    assert [each.step for each in found] == [6]
    assert "twice" in found[0].sentence
    tally("logs with a name twice", 1)


@pytest.mark.parametrize("part", ["body", "frame"])
def test_a_receipt_that_says_a_thing_twice_is_no_receipt(part: str, tally: Tally) -> None:
    link = Link()
    ack = link.ack(link.intent(3)).header
    signer = next(
        each for each in map(key, range(32)) if each.key_id == msgspec.msgpack.decode(ack.receipt)["key_id"]
    )
    receipt = read_unverified(ack.receipt)
    keys = ReceiptKeys.of(
        receipt.destination_region, receipt.ingress_origin, [raw_public_key(signer.private_key)]
    )
    assert open_receipt(ack.receipt, keys) == receipt
    frame = msgspec.msgpack.decode(ack.receipt)
    if part == "body":
        frame["body"] = map_of([*msgspec.msgpack.decode(frame["body"]).items(), ("records", 2)])
        frame["signature"] = signer.sign("receipt", frame["body"])
        data = encode(frame)
    else:
        data = map_of([*frame.items(), ("body", frame["body"])])
    with pytest.raises(TamperError, match="twice"):
        open_receipt(data, keys)
    tally("receipts that say a thing twice", 1)


def test_a_receipt_of_before_has_one_reading() -> None:
    """Without the hash of the entries, whose default it then is."""
    link = Link()
    ack = link.ack(link.intent(3)).header
    frame = msgspec.msgpack.decode(ack.receipt)
    body = msgspec.msgpack.decode(frame["body"])
    body.pop("entries_sha256", None)
    frame["body"] = encode(body)
    assert read_unverified(encode(frame)).entries_sha256 == b""
