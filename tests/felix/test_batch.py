"""Batches: a round trip really goes round, and no bytes from outside do anything but decode or be refused."""

import itertools
import struct

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from long_runs import count
from msgspec.structs import replace

from felix.batch import (
    BATCH_BYTES_MAX,
    FLAG_ZSTD,
    HEADER_BYTES,
    PLAIN_BYTES_MAX,
    STEP_PARTS,
    Batch,
    BatchHeader,
    NewRecord,
    Parts,
    batch_of,
    batch_steps,
    body_checksum,
    decode_batch,
    decode_header,
    decode_parts,
    decode_payloads,
    decode_records,
    encode_batch,
    encode_headers,
    encode_parts,
)
from felix.errors import Code, RequestError
from felix.steps import finished

HEADERS = st.dictionaries(st.text(min_size=1, max_size=20), st.binary(max_size=40), max_size=4)
RECORD = st.builds(
    NewRecord, st.binary(max_size=300), st.none() | st.binary(min_size=1, max_size=40), st.none() | HEADERS
)
RECORDS = st.lists(RECORD, min_size=1, max_size=40)


@given(RECORDS, st.booleans(), st.integers(0, 2**32 - 1))
def test_records_come_back_as_they_were_given(records: list[NewRecord], compress: bool, shard: int) -> None:
    sent = encode_batch(
        records, shard=shard, producer_id=7, producer_epoch=1, base_sequence=99, compress=compress
    )
    stamped = sent.with_header(replace(sent.header, base_offset=1000, append_time_ms=1_700_000_000_000))
    batch = decode_batch(stamped.encode())
    assert batch.header == stamped.header
    assert batch.header.next_offset == 1000 + len(records)
    got = list(decode_records(batch))
    assert [bytes(r.payload) for r in got] == [r.payload for r in records]
    assert [r.key and bytes(r.key) for r in got] == [r.key for r in records]
    assert [dict(r.headers) for r in got] == [dict(r.headers or {}) for r in records]
    assert [r.offset for r in got] == list(range(1000, 1000 + len(records)))
    assert {r.timestamp_ms for r in got} == {1_700_000_000_000}


@given(RECORDS, st.booleans(), st.data())
def test_every_flipped_bit_is_found(records: list[NewRecord], compress: bool, data: st.DataObject) -> None:
    raw = bytearray(encode_batch(records, compress=compress).encode())
    at = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[at // 8] ^= 1 << at % 8
    with pytest.raises(RequestError):
        decode_batch(raw)


@given(RECORDS, st.data())
def test_every_cut_is_found(records: list[NewRecord], data: st.DataObject) -> None:
    raw = encode_batch(records).encode()
    with pytest.raises(RequestError):
        decode_batch(raw[: data.draw(st.integers(0, len(raw) - 1))])


@settings(max_examples=count(600, 2_000))
@given(st.binary(max_size=400), st.integers(0, 15), st.integers(1, 50))
def test_a_valid_header_over_any_body_decodes_or_is_refused(body: bytes, flags: int, records: int) -> None:
    # The checksum holds, so a hostile producer gets as far as the columns: nothing but a refusal may come of it.
    header = BatchHeader(
        flags & ~2, 0, 0, 0, 0, records, 0, 0, len(body), 0, bytes(16), len(body), body_checksum(body)
    )
    batch = decode_batch(Batch(header, body).encode())
    try:
        total = sum(len(r.payload) for r in decode_records(batch))
    except RequestError as error:
        assert error.code is Code.BATCH_MALFORMED
    else:
        assert total <= len(body)


def test_a_small_frame_cannot_make_a_reader_allocate_more_than_it_says() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(PLAIN_BYTES_MAX * 16))
    assert len(bomb) < BATCH_BYTES_MAX
    header = BatchHeader(FLAG_ZSTD, 0, 0, 0, 0, 1, 0, 0, 64, 0, bytes(16), len(bomb), body_checksum(bomb))
    with pytest.raises(RequestError, match="not of the length"):
        list(decode_records(Batch(header, bomb)))


def test_limits_are_enforced_where_a_batch_is_made() -> None:
    with pytest.raises(RequestError) as refused:
        encode_batch([NewRecord(bytes(BATCH_BYTES_MAX))])
    assert refused.value.code is Code.BATCH_TOO_LARGE
    with pytest.raises(RequestError):
        encode_batch([])
    with pytest.raises(RequestError):
        encode_batch([NewRecord(b"", key=bytes(5000))])
    with pytest.raises(RequestError):
        encode_batch([NewRecord(b"", headers={"h" * 300: b""})])


def test_limits_are_enforced_on_headers_from_outside() -> None:
    header = BatchHeader(0, 0, 0, 0, 0, 1, 0, 0, 10, 0, bytes(16), BATCH_BYTES_MAX, 0)
    with pytest.raises(RequestError) as refused:
        decode_header(header.encode())
    assert refused.value.code is Code.BATCH_TOO_LARGE


def test_the_layout_is_the_documented_one() -> None:
    # docs/wire.md; a client in another language is written from these bytes.
    batch = encode_batch([NewRecord(b"hello", b"k", {"h": b"v"}), NewRecord(b"!")], shard=3, producer_id=5)
    raw = batch.encode()
    assert raw[:2] == b"FX"
    assert raw[2:8] == bytes([1, 0x04 | 0x08]) + struct.pack(">I", 3)
    assert raw[HEADER_BYTES:] == (
        struct.pack(">6I", 5, 6, 1, 1, 10, 10)
        + b"k"
        + struct.pack(">HH1sI1s", 1, 1, b"h", 1, b"v")
        + b"hello!"
    )


@pytest.mark.parametrize("compress", [1, 3, 19])
def test_nothing_stands_behind_a_compressed_frame(compress: int) -> None:
    batch = encode_batch([NewRecord(b"payload" * 500)], compress=compress)
    assert batch.header.flags & FLAG_ZSTD
    frame = bytes(batch.body)
    for behind in (b"\0", b"x" * 50_000, frame, zstandard.ZstdCompressor().compress(b"")):
        body = frame + behind
        header = replace(batch.header, body_length=len(body), body_checksum=body_checksum(body))
        found = decode_batch(Batch(header, body).encode())
        for decode in (decode_records, decode_payloads, decode_parts):
            with pytest.raises(RequestError, match=r"zstd|length"):
                list(decode(found))


@given(RECORDS)
def test_parts_are_the_records_as_they_stand(records: list[NewRecord]) -> None:
    batch = encode_batch(records)
    parts = decode_parts(batch)
    again = [(bytes(key), bytes(headers), bytes(payload)) for key, headers, payload in parts.rows()]
    assert again == [
        (record.key or b"", encode_headers(record.headers) if record.headers else b"", record.payload)
        for record in records
    ]
    assert parts.size_bytes == sum(map(len, itertools.chain(*again)))
    assert batch_of(encode_parts(records)).encode() == batch.encode()
    backwards = list(reversed(range(len(records))))
    assert [tuple(map(bytes, row)) for row in parts.chosen(backwards).rows()] == again[::-1]


@pytest.mark.parametrize("records", [1, STEP_PARTS, STEP_PARTS + 1, 3 * STEP_PARTS + 7])
@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("compress", [0, 1])
def test_a_batch_that_is_made_in_steps_is_the_same(records: int, keyed: bool, compress: int) -> None:
    payloads = [b"%d" % number for number in range(records)]
    parts = Parts(payloads, [b"k"] * records if keyed else None, [b"hh"] * records if keyed else None)
    steps = batch_steps(parts, shard=3, compress=compress)
    taken = 0
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            made = ended.value
            break
        taken += 1
    assert made == batch_of(parts, shard=3, compress=compress)
    assert taken >= (records // STEP_PARTS if records > STEP_PARTS else 0)


def test_a_batch_that_is_too_long_is_not_put_together_in_steps() -> None:
    records = STEP_PARTS + 1
    parts = Parts([b"x" * 200] * records, None, [b"y" * 400] * records)
    for make in (lambda: batch_of(parts), lambda: finished(batch_steps(parts))):
        with pytest.raises(RequestError) as refused:
            make()
        assert refused.value.code is Code.BATCH_TOO_LARGE
