"""Sealing batches at rest."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.batch import (
    FLAG_SEALED,
    HEADER_BYTES,
    Batch,
    NewRecord,
    body_checksum,
    decode_batch,
    decode_header,
    encode_batch,
)
from felix.errors import Code, FelixError, RequestError, TamperError
from felix.names import StreamName
from keys import envelope
from keys.envelope import SEAL_BYTES, SEALABLE_BYTES_MAX, BatchSealer, DataKey, open_batch
from keys.errors import KeyExhaustedError, KeyScopeError
from keys.key_id import KeyKind, new_key_id

ORDERS = StreamName.parse("acme/payments/orders")


def data_key(**changes: object) -> DataKey:
    fields: dict[str, object] = {
        "key_id": new_key_id("us-east", KeyKind.DATA, b"r" * 11),
        "region": "us-east",
        "stream": ORDERS,
        "incarnation": b"i" * 16,
        "shard": 3,
        "epoch": 7,
        "secret": bytes(range(32)),
    }
    return DataKey(**(fields | changes))  # type: ignore[arg-type]


def plain_batch(payloads: list[bytes], shard: int = 3, epoch: int = 7, base_offset: int = 40) -> Batch:
    batch = encode_batch([NewRecord(p, b"k") for p in payloads], shard=shard, producer_id=5, base_sequence=9)
    return batch.with_header(
        msgspec.structs.replace(
            batch.header, base_offset=base_offset, append_time_ms=1_700_000_000_000, leader_epoch=epoch
        )
    )


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=20))
def test_opening_gives_back_what_was_sealed_even_after_the_bytes_travelled(payloads: list[bytes]) -> None:
    batch = plain_batch(payloads)
    sealed = BatchSealer(data_key()).seal(batch)
    assert sealed.header.flags & FLAG_SEALED
    assert sealed.header.key_id == data_key().key_id
    assert len(sealed.body) == len(batch.body) + SEAL_BYTES
    travelled = decode_batch(sealed.encode())
    assert open_batch(data_key(), travelled).encode() == batch.encode()


def test_no_plaintext_stands_in_a_sealed_batch() -> None:
    sealed = BatchSealer(data_key()).seal(plain_batch([b"a canary in a coal mine"]))
    assert b"canary" not in sealed.encode()


def test_each_batch_has_its_own_counter_so_equal_batches_seal_differently() -> None:
    sealer = BatchSealer(data_key())
    batch = plain_batch([b"same"])
    bodies = [bytes(sealer.seal(batch).body) for _ in range(3)]
    assert [body[:8] for body in bodies] == [n.to_bytes(8, "big") for n in range(3)]
    assert len({body[8:] for body in bodies}) == 3


def test_any_changed_byte_of_the_body_is_refused_even_with_a_new_checksum() -> None:
    sealed = BatchSealer(data_key()).seal(plain_batch([b"payload", b"another"]))
    body = bytes(sealed.body)
    for at in range(len(body)):
        changed = body[:at] + bytes([body[at] ^ 0x01]) + body[at + 1 :]
        header = msgspec.structs.replace(sealed.header, body_checksum=body_checksum(changed))
        with pytest.raises(TamperError, match=r"shard 3, offsets 40 to 41, epoch 7") as caught:
            open_batch(data_key(), Batch(header, changed))
        assert caught.value.code is Code.TAMPERED


def test_any_changed_byte_as_it_stands_on_disk_is_refused() -> None:
    encoded = BatchSealer(data_key()).seal(plain_batch([b"payload"])).encode()
    for at in range(len(encoded)):
        changed = encoded[:at] + bytes([encoded[at] ^ 0x80]) + encoded[at + 1 :]
        with pytest.raises(FelixError):
            open_batch(data_key(), decode_batch(changed))


@pytest.mark.parametrize(
    "field",
    [
        "shard", "base_offset", "append_time_ms", "leader_epoch", "records", "producer_id", "producer_epoch",
        "plain_length", "base_sequence",
    ],
)  # fmt: skip
def test_any_changed_field_of_the_header_is_refused_even_with_a_new_checksum(field: str) -> None:
    sealed = BatchSealer(data_key()).seal(plain_batch([b"payload", b"another"]))
    header = msgspec.structs.replace(sealed.header, **{field: getattr(sealed.header, field) + 1})
    reread = decode_header(header.encode())
    with pytest.raises(TamperError):
        open_batch(data_key(), Batch(reread, sealed.body))


@pytest.mark.parametrize(
    "changes",
    [
        {"secret": b"z" * 32},
        {"stream": StreamName.parse("acme/payments/cards")},
        {"incarnation": b"j" * 16},
        {"shard": 4},
        {"epoch": 8},
        {"region": "eu-west", "key_id": new_key_id("eu-west", KeyKind.DATA, b"r" * 11)},
        {"key_id": new_key_id("us-east", KeyKind.DATA, b"q" * 11)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_key_of_anything_else_does_not_open_it(changes: dict[str, object]) -> None:
    sealed = BatchSealer(data_key()).seal(plain_batch([b"payload"]))
    other = data_key(**changes)
    with pytest.raises(TamperError):
        open_batch(other, sealed)
    # Not even where somebody rewrote the header to fit that key.
    header = msgspec.structs.replace(
        sealed.header, key_id=other.key_id, shard=other.shard, leader_epoch=other.epoch
    )
    with pytest.raises(TamperError):
        open_batch(other, Batch(header, sealed.body))


@pytest.mark.parametrize(
    "changes",
    [{"stream": StreamName.parse("acme/payments/cards")}, {"shard": 4}, {"epoch": 8}, {"secret": b"z" * 32}],
    ids=lambda changes: next(iter(changes)),
)
def test_the_commitment_tells_keys_and_scopes_apart(changes: dict[str, object]) -> None:
    assert data_key().commitment() == data_key().commitment()
    assert data_key(**changes).commitment() != data_key().commitment()


@pytest.mark.parametrize(("shard", "epoch"), [(2, 7), (3, 6)])
def test_a_sealer_refuses_a_batch_of_another_shard_or_epoch(shard: int, epoch: int) -> None:
    with pytest.raises(KeyScopeError):
        BatchSealer(data_key()).seal(plain_batch([b"x"], shard=shard, epoch=epoch))


def test_sealing_twice_and_opening_what_is_not_sealed_are_refused() -> None:
    sealer = BatchSealer(data_key())
    batch = plain_batch([b"x"])
    with pytest.raises(KeyScopeError):
        sealer.seal(sealer.seal(batch))
    with pytest.raises(KeyScopeError):
        open_batch(data_key(), batch)


def test_one_data_key_has_one_sealer() -> None:
    key = data_key()
    BatchSealer(key)
    with pytest.raises(KeyScopeError, match="has a sealer already"):
        BatchSealer(key)


def test_a_forked_process_seals_nothing_with_its_parents_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    sealer = BatchSealer(data_key())
    sealer.seal(plain_batch([b"x"]))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(KeyScopeError, match="forked"):
        sealer.seal(plain_batch([b"x"]))


def test_threads_that_share_a_sealer_never_share_a_counter() -> None:
    sealer = BatchSealer(data_key())
    batch = plain_batch([b"x"])
    counters: list[bytes] = []

    def work() -> None:
        counters.extend(bytes(sealer.seal(batch).body[:8]) for _ in range(500))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(counters)) == 2000


def test_a_key_ends_with_its_age_and_with_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "DATA_KEY_BATCHES_MAX", 2)
    sealer = BatchSealer(data_key(), started_ms=1_000)
    assert not sealer.due(1_000)
    assert sealer.due(1_000 + envelope.DATA_KEY_AGE_MS_MAX)
    sealer.seal(plain_batch([b"1"]))
    sealer.seal(plain_batch([b"2"]))
    assert sealer.due(1_000)
    with pytest.raises(KeyExhaustedError):
        sealer.seal(plain_batch([b"3"]))


def test_a_body_that_would_not_fit_once_sealed_is_refused_with_the_limit() -> None:
    fits = plain_batch([bytes(SEALABLE_BYTES_MAX - 9)])
    assert len(fits.body) == SEALABLE_BYTES_MAX
    sealed = BatchSealer(data_key()).seal(fits)
    assert open_batch(data_key(), decode_batch(sealed.encode())) == fits
    with pytest.raises(RequestError) as caught:
        BatchSealer(data_key()).seal(plain_batch([bytes(SEALABLE_BYTES_MAX - 8)]))
    assert caught.value.code is Code.BATCH_TOO_LARGE


def test_a_data_key_shows_no_secret_and_takes_only_its_own_kind_of_id() -> None:
    assert bytes(range(32)).hex() not in repr(data_key())
    assert str(bytes(range(32))) not in repr(data_key())
    with pytest.raises(KeyScopeError, match="does not belong to region eu-west"):
        data_key(region="eu-west")
    with pytest.raises(KeyScopeError):
        data_key(key_id=new_key_id("us-east", KeyKind.STREAM, b"r" * 11))
    with pytest.raises(KeyScopeError):
        replace(data_key(), secret=b"short")


def test_a_truncated_sealed_body_is_refused() -> None:
    sealed = BatchSealer(data_key()).seal(plain_batch([b"payload"]))
    for length in range(len(sealed.body)):
        body = bytes(sealed.body[:length])
        header = msgspec.structs.replace(sealed.header, body_length=length, body_checksum=body_checksum(body))
        with pytest.raises(TamperError):
            open_batch(data_key(), Batch(header, body))
    assert HEADER_BYTES == 96
