"""Leaves of version 1: what was written then is still read, by the rules of then, and is never taken for version 2.

The bytes are put together here from docs/audit.md, not by the product's encoder.
"""

from __future__ import annotations

import struct
from hashlib import blake2b, sha256
from typing import Any

import msgspec
import pytest

from audit.leaf import (
    Header,
    Kind,
    Leaf,
    Side,
    decode_header,
    decode_leaf,
    encode_leaf,
    iter_entries,
    leaf_row,
)
from felix.batch import OFFSET_MAX
from felix.errors import CorruptionError, RequestError

HEAD: dict[str, Any] = {
    "kind": 1,
    "side": "egress",
    "time_ms": 1_700_000_000_000,
    "source_region": "us-east",
    "destination_region": "eu-west",
    "bridge": "spiffe://us-east.acme/bridge/us-to-eu",
    "stream": "acme/ops/departures",
    "destination_stream": "acme/ops/departures",
    "incarnation": b"i" * 16,
    "first_offset": 0,
    "last_offset": 0,
    "records": 1,
    "payload_bytes": 7,
    "commitment_key_id": b"c" * 16,
    "grant_id": "g-1",
    "terms_hash": b"t" * 32,
    "source_batch_sha256": b"b" * 32,
    "envelope_sha256": b"e" * 32,
}
GRANT: dict[str, Any] = {
    **{name: HEAD[name] for name in ("side", "time_ms", "source_region", "destination_region", "bridge")},
    **{name: HEAD[name] for name in ("stream", "destination_stream", "grant_id", "terms_hash")},
    "kind": 6,
    "actor": "spiffe://us-east.acme/operator/alice",
    "terms": {"purpose": "p", "basis": "scc", "article": "a", "reference": "r"},
    "document": b"signed",
}
NO_TERMS = {name: value for name, value in GRANT.items() if name != "terms"}
ENTRY = struct.pack(">QqI", 0, 1, 7) + blake2b(b"x", digest_size=32).digest() + bytes(16)


def leaf_of(version: int, head: dict[str, Any], entries: bytes = b"") -> bytes:
    packed = msgspec.msgpack.encode(head)
    return struct.pack(">2sBBHH", b"FL", version, 0, len(packed), len(entries) // 68) + packed + entries


def test_it_is_read_by_its_own_rules_and_written_again_as_it_was() -> None:
    data = leaf_of(1, HEAD, ENTRY)
    leaf = decode_leaf(data)
    assert leaf.version == 1 and leaf.header.listed_bytes == 7 and leaf.header.record_bytes == 0
    assert [entry.size for entry in iter_entries(leaf)] == [7]
    assert decode_leaf(encode_leaf(leaf)) == leaf
    row = leaf_row(leaf)
    assert row["version"] == 1 and row["record_bytes"] == 7 and row["document_sha256"] is None
    grant = decode_leaf(leaf_of(1, GRANT))
    assert grant.version == 1 and grant.header.terms is not None
    assert decode_header(leaf_of(1, {**GRANT, "kind": 7})).kind is Kind.REVOKE


@pytest.mark.parametrize(
    ("version", "head", "entries", "says"),
    [
        (2, HEAD, ENTRY, "payload_bytes"),
        (1, {**HEAD, "payload_bytes": 0, "record_bytes": 7}, ENTRY, "record_bytes"),
        (2, GRANT, b"", "document_sha256"),
        (2, {**GRANT, "document_sha256": bytes(32)}, b"", "has no terms"),
        (2, {**GRANT, "document_sha256": sha256(b"signed").digest()}, b"", "has no terms"),
        (2, {**NO_TERMS, "document_sha256": bytes(32)}, b"", "not the one"),
        (1, {**GRANT, "kind": 11}, b"", "no kind ACCEPT"),
        (3, HEAD, ENTRY, "versions 1 and 2"),
        (0, HEAD, ENTRY, "versions 1 and 2"),
    ],
)
def test_what_belongs_to_the_other_version_is_refused(
    version: int, head: dict[str, Any], entries: bytes, says: str
) -> None:
    with pytest.raises(CorruptionError, match=says):
        decode_leaf(leaf_of(version, head, entries))


def test_the_document_kinds_of_version_2_go_round() -> None:
    common = {name: value for name, value in GRANT.items() if name not in ("terms", "kind", "side")}
    common |= {"document_sha256": sha256(b"signed").digest(), "policy_version": 1, "policy_hash": b"p" * 32}
    for kind in (6, 7, 8, 11, 12, 13, 14):
        header = Header(kind=Kind(kind), side=Side.INGRESS, action="pause", **common)
        leaf = Leaf(header)
        assert leaf.version == 2 and decode_leaf(encode_leaf(leaf)) == leaf
        with pytest.raises(RequestError, match="needs document_sha256"):
            encode_leaf(Leaf(msgspec.structs.replace(header, document=b"", document_sha256=b"")))
        beside = Leaf(msgspec.structs.replace(header, document=b""))
        assert decode_leaf(encode_leaf(beside)) == beside


@pytest.mark.parametrize(
    "name", ["first_offset", "last_offset", "time_ms", "records", "shard", "source_epoch"]
)
@pytest.mark.parametrize("value", [-1, OFFSET_MAX + 1, (1 << 63) - 1, 1 << 63, 1 << 64, "1", None])
def test_what_could_not_be_read_again_is_not_written(name: str, value: object) -> None:
    header = msgspec.structs.replace(
        decode_leaf(leaf_of(1, HEAD, ENTRY)).header, payload_bytes=0, record_bytes=7
    )
    good = Leaf(header, ENTRY)
    encode_leaf(good)
    wrong = Leaf(msgspec.structs.replace(header, **{name: value}), ENTRY)
    try:
        data = encode_leaf(wrong)
    except RequestError:
        return
    assert decode_leaf(data) == wrong
