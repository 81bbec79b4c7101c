"""Leaves: what is written is what is read, what does not hold is refused, long batches are split."""

from __future__ import annotations

import contextlib
from hashlib import blake2b, sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.leaf import (
    ENTRY_BYTES,
    LEAF_BYTES_MAX,
    LEAF_COLUMNS,
    CommitmentKey,
    Committer,
    FieldLineage,
    GapKind,
    Header,
    Kind,
    Leaf,
    Side,
    Terms,
    decode_header,
    decode_leaf,
    encode_leaf,
    find_entry,
    intent_leaves,
    iter_entries,
    leaf_row,
    payload_commitment,
    split_leaves,
)
from felix.batch import Record
from felix.errors import CorruptionError, RequestError

KEY = CommitmentKey(b"c" * 16, b"s" * 32)
INCARNATION = b"i" * 16
STREAM = "acme/ops/departures"
DOCUMENT = {"document": b"signed", "document_sha256": sha256(b"signed").digest()}


def header(kind: Kind = Kind.INTENT, side: Side = Side.EGRESS, **more: object) -> Header:
    fields: dict[str, object] = {
        "kind": kind,
        "side": side,
        "time_ms": 1_700_000_000_000,
        "source_region": "us-east",
        "destination_region": "eu-west",
        "bridge": "spiffe://us-east.acme/bridge/us-to-eu",
        "stream": STREAM,
        "destination_stream": STREAM,
        "incarnation": INCARNATION,
        "first_offset": 0,
        "last_offset": 9,
        "grant_id": "g-1",
        "terms_hash": b"t" * 32,
        "source_batch_sha256": b"b" * 32,
        "envelope_sha256": b"e" * 32,
    }
    return Header(**(fields | more))  # type: ignore[arg-type]


def records(first: int, count: int, size: int = 20) -> list[Record]:
    return [Record(first + i, 1_000 + i, b"k%d" % (i % 7), {}, b"p" * size) for i in range(count)]


def committer() -> Committer:
    return Committer(KEY, STREAM, INCARNATION, 0)


def test_an_intent_goes_round() -> None:
    (leaf,) = intent_leaves(header(), records(0, 10), committer())
    again = decode_leaf(encode_leaf(leaf))
    assert again == leaf
    assert [entry.offset for entry in iter_entries(again)] == list(range(10))
    assert again.header.records == 10 and again.header.record_bytes == 220
    assert decode_header(encode_leaf(leaf)) == leaf.header


def test_the_commitment_is_blake2b_over_context_and_the_whole_record() -> None:
    name = STREAM.encode()
    context = len(name).to_bytes(2, "big") + name + INCARNATION + (0).to_bytes(4, "big")
    headers = b"\x00\x01\x00\x01h\x00\x00\x00\x01v"
    plain = context + (7).to_bytes(8, "big") + (1).to_bytes(8, "big") + (3).to_bytes(4, "big")
    plain += len(headers).to_bytes(4, "big") + b"key" + headers + b"payload"
    expected = blake2b(plain, key=KEY.secret, digest_size=32, person=b"felix/record/2").digest()
    assert committer().commit(7, 1, b"key", headers, b"payload") == expected
    (leaf,) = intent_leaves(
        header(first_offset=7, last_offset=7), [Record(7, 1, b"key", {"h": b"v"}, b"payload")], committer()
    )
    (entry,) = iter_entries(leaf)
    assert entry.commitment == expected and entry.size == 3 + 10 + 7
    (leaf,) = intent_leaves(
        header(first_offset=7, last_offset=7), [Record(7, 1, None, {}, b"payload")], committer()
    )
    (entry,) = iter_entries(leaf)
    assert entry.tag == bytes(16) and entry.size == 7


def test_a_leaf_of_version_1_commits_to_the_payload_alone() -> None:
    name = STREAM.encode()
    context = len(name).to_bytes(2, "big") + name + INCARNATION + (0).to_bytes(4, "big")
    plain = context + (7).to_bytes(8, "big") + b"payload"
    expected = blake2b(plain, key=KEY.secret, digest_size=32, person=b"felix/payload/1").digest()
    assert payload_commitment(KEY, STREAM, INCARNATION, 0, 7, b"payload") == expected


def test_bytes_that_move_between_key_headers_and_payload_change_the_commitment() -> None:
    seen = {
        committer().commit(0, 0, key, headers, payload)
        for key, headers, payload in [
            (b"ab", b"", b""), (b"a", b"b", b""), (b"a", b"", b"b"), (b"", b"ab", b""), (b"", b"a", b"b"), (b"", b"", b"ab"),
        ]
    }  # fmt: skip
    assert len(seen) == 6


def test_equal_payloads_have_different_commitments_and_equal_keys_equal_tags() -> None:
    (leaf,) = intent_leaves(header(), records(0, 10), committer())
    entries = list(iter_entries(leaf))
    assert len({entry.commitment for entry in entries}) == 10
    assert entries[0].tag == entries[7].tag != entries[1].tag
    other = Committer(KEY, STREAM, INCARNATION, 1)
    assert other.commit(0, 0, b"", b"", b"p") != committer().commit(0, 0, b"", b"", b"p")
    assert other.tag(b"k0") == entries[0].tag


@given(st.integers(1, 5_000), st.integers(0, 1 << 40), st.booleans())
def test_a_long_batch_is_split_and_covers_its_range_once(count: int, first: int, ingress: bool) -> None:
    batch = [Record(first + i, 0, None, {}, b"") for i in range(count)]
    more: dict[str, object] = {"first_offset": first, "last_offset": first + count - 1}
    if ingress:
        more |= {"destination_first_offset": 3, "destination_last_offset": 3 + count - 1}
    kind, side = (Kind.ACK, Side.INGRESS) if ingress else (Kind.INTENT, Side.EGRESS)
    leaves = intent_leaves(header(kind, side, **more), batch, committer())
    at, to, listed = first, 3, []
    for part, leaf in enumerate(leaves):
        assert len(encode_leaf(leaf)) <= LEAF_BYTES_MAX
        assert (leaf.header.part, leaf.header.parts) == (part, len(leaves))
        assert leaf.header.first_offset == at
        assert leaf.header.last_offset is not None
        at = leaf.header.last_offset + 1
        if ingress:
            assert leaf.header.destination_first_offset == to
            assert leaf.header.destination_last_offset is not None
            to = leaf.header.destination_last_offset + 1
        listed += [entry.offset for entry in iter_entries(leaf)]
    assert at == first + count
    assert listed == list(range(first, first + count))


def test_withheld_records_leave_holes_that_the_range_still_covers() -> None:
    batch = [record for record in records(0, 10) if record.offset not in (0, 4, 9)]
    (leaf,) = intent_leaves(header(), batch, committer())
    assert (leaf.header.first_offset, leaf.header.last_offset, leaf.header.records) == (0, 9, 7)
    assert find_entry(leaf, 4) is None
    found = find_entry(leaf, 5)
    assert found is not None and found.offset == 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"envelope_sha256": b""}, "needs envelope_sha256"),
        ({"grant_id": ""}, "needs grant_id"),
        ({"envelope_sha256": b"short"}, "is not 32 bytes"),
        ({"incarnation": b"x"}, "is not 16 bytes"),
        ({"first_offset": 10}, "is no range"),
        ({"last_offset": 3}, "outside"),
        ({"records": 11}, "10 entries"),
        ({"record_bytes": 1}, "bytes in entries"),
        ({"part": 1}, "part 1 of 1"),
        ({"kind": Kind.GAP, "gap": GapKind.RETENTION}, "lists no records"),
    ],
)
def test_a_leaf_that_does_not_hold_is_neither_written_nor_read(change: dict[str, object], says: str) -> None:
    (leaf,) = intent_leaves(header(), records(0, 10), committer())
    wrong = Leaf(msgspec.structs.replace(leaf.header, **change), leaf.entries)
    with pytest.raises(RequestError, match=says):
        encode_leaf(wrong)
    head = msgspec.msgpack.encode(wrong.header)
    data = b"FL\x02\x00" + len(head).to_bytes(2, "big") + (10).to_bytes(2, "big") + head + wrong.entries
    with pytest.raises(CorruptionError, match=says):
        decode_leaf(data)


def test_entries_out_of_order_are_refused() -> None:
    (leaf,) = intent_leaves(header(), records(0, 10), committer())
    swapped = leaf.entries[ENTRY_BYTES : 2 * ENTRY_BYTES] + leaf.entries[:ENTRY_BYTES]
    with pytest.raises(RequestError, match="out of order"):
        encode_leaf(Leaf(leaf.header, swapped + leaf.entries[2 * ENTRY_BYTES :]))


def test_every_truncation_is_refused() -> None:
    data = encode_leaf(intent_leaves(header(), records(0, 3), committer())[0])
    for length in range(len(data)):
        with pytest.raises(CorruptionError):
            decode_leaf(data[:length])
    with pytest.raises(CorruptionError):
        decode_leaf(data + b"\0")


@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_only_corruption(data: bytes) -> None:
    for candidate in (data, b"FL\x01\x00" + data, b"FL\x02\x00" + data):
        with pytest.raises(CorruptionError):
            decode_leaf(candidate)


def test_a_batch_of_which_nothing_crosses_has_a_leaf_without_entries() -> None:
    (leaf,) = intent_leaves(header(), [], committer())
    assert decode_leaf(encode_leaf(leaf)) == leaf
    assert (leaf.header.first_offset, leaf.header.last_offset, leaf.header.records) == (0, 9, 0)
    assert leaf.header.commitment_key_id == KEY.key_id and leaf_row(leaf)["entries_sha256"] is None
    with pytest.raises(RequestError, match="needs records"):
        encode_leaf(Leaf(header(Kind.WITHHELD, reason="filtered", commitment_key_id=KEY.key_id)))


def test_destination_offsets_are_one_per_record() -> None:
    more = {"destination_first_offset": 0, "destination_last_offset": 3}
    with pytest.raises(RequestError, match="destination offsets"):
        intent_leaves(header(Kind.ACK, Side.INGRESS, **more), records(0, 10), committer())
    for change in ({"records": 0, **more}, {"records": 4}):
        with pytest.raises(RequestError, match="if and only if"):
            encode_leaf(Leaf(header(Kind.ACK, **change)))
    encode_leaf(Leaf(header(Kind.ACK, records=4, **more)))
    encode_leaf(Leaf(header(Kind.ACK)))


def test_entries_need_a_range() -> None:
    with pytest.raises(RequestError, match="an offset range"):
        split_leaves(header(first_offset=None), b"")


def test_a_grant_of_version_1_keeps_its_terms_and_the_row_shows_them_flat() -> None:
    terms = Terms(
        purpose="analytics",
        basis="scc",
        article="GDPR 46(2)(c)",
        reference="SCC-2026-014",
        categories=("travel",),
        approvers=("spiffe://us-east.acme/operator/alice",),
        expires_ms=5,
        lineage=(FieldLineage(field="tailnum", action="pseudonymize"),),
    )
    leaf = Leaf(header(Kind.GRANT, actor="spiffe://us-east.acme/operator/alice", terms=terms), b"", 1)
    again = decode_leaf(encode_leaf(leaf))
    assert again.header.terms == terms
    row = leaf_row(again)
    assert list(row) == [name for name, _ in LEAF_COLUMNS]
    assert row["kind"] == "GRANT" and row["reference"] == "SCC-2026-014"
    assert row["lineage"] == [("tailnum", "pseudonymize", "tailnum")]
    assert row["categories"] == ["travel"] and row["wildcard"] is False
    assert row["gap"] is None and row["entries_sha256"] is None and row["terms_hash"] == "74" * 32


def test_the_row_of_an_intent_has_no_terms_and_a_digest_of_its_entries() -> None:
    row = leaf_row(intent_leaves(header(), records(0, 10), committer())[0])
    assert row["kind"] == "INTENT" and row["side"] == "egress" and row["records"] == 10
    assert row["first_offset"] == 0 and row["purpose"] is None and row["lineage"] is None
    assert len(row["entries_sha256"]) == 64


@given(st.data())
def test_a_flipped_bit_raises_nothing_but_corruption(data: st.DataObject) -> None:
    (leaf,) = intent_leaves(header(), records(0, 10), committer())
    changed = bytearray(encode_leaf(leaf))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(CorruptionError):
        assert decode_leaf(bytes(changed)) != leaf


@pytest.mark.parametrize("change", [{"of_later": 1}, {"kind": 99}])
def test_a_leaf_of_a_later_release_is_refused_as_one(change: dict[str, object]) -> None:
    (leaf,) = intent_leaves(header(), records(0, 10), committer())
    data = encode_leaf(leaf)
    length = int.from_bytes(data[4:6], "big")
    head = msgspec.msgpack.encode({**msgspec.msgpack.decode(data[8 : 8 + length]), **change})
    later = data[:4] + len(head).to_bytes(2, "big") + data[6:8] + head + data[8 + length :]
    for each in (later, data[:2] + b"\x03" + data[3:]):
        with pytest.raises(CorruptionError, match="later release of Felix made it"):
            decode_leaf(each)
    with pytest.raises(CorruptionError) as refused:
        decode_leaf(data[:8] + b"\xff" + data[9:])
    assert "later" not in str(refused.value)


def test_why_a_leaf_is_none_does_not_repeat_all_that_its_writer_put_there() -> None:
    (leaf,) = intent_leaves(header(), records(0, 10), committer())
    data = encode_leaf(leaf)
    head = msgspec.msgpack.encode({"a name" * 9_000: 1})
    with pytest.raises(CorruptionError, match="unknown field `a name") as refused:
        decode_leaf(
            data[:4]
            + len(head).to_bytes(2, "big")
            + data[6:8]
            + head
            + data[8 + int.from_bytes(data[4:6], "big") :]
        )
    assert len(refused.value.sentence) < 300
