"""The byte layouts of docs/keys.md, read by hand: another implementation could be written from that page."""

from __future__ import annotations

import hashlib
import hmac
import struct

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESGCMSIV
from msgspec.structs import replace

from felix.batch import NewRecord, encode_batch
from felix.names import SpiffeId, StreamName
from felix.peer import TrustBundle, verify_chain
from keys.authority import create_authority
from keys.envelope import BatchSealer, DataKey
from keys.key_id import KeyKind, new_key_id
from keys.transfer import TransferKey, TransferScope, seal_envelope
from keys.wrapping import wrap

SECRET = bytes(range(32))
LIFE = b"i" * 16


def lp(part: bytes | str | int) -> bytes:
    raw = (
        part.to_bytes(8, "big") if isinstance(part, int) else part.encode() if isinstance(part, str) else part
    )
    return struct.pack(">I", len(raw)) + raw


def context(purpose: str, *parts: bytes | str | int) -> bytes:
    return b"felix/" + purpose.encode() + b"/1\x00" + b"".join(map(lp, parts))


def expand(secret: bytes, info: bytes) -> bytes:
    """HKDF-Expand (RFC 5869, section 2.3) for one block of output."""
    return hmac.digest(secret, info + b"\x01", "sha256")


def test_a_sealed_batch_reads_as_documented() -> None:
    key_id = new_key_id("us-east", KeyKind.DATA, b"r" * 11)
    key = DataKey(key_id, "us-east", StreamName.parse("a/b/c"), LIFE, 2, 5, SECRET)
    batch = encode_batch([NewRecord(b"payload")], shard=2, producer_id=3, producer_epoch=4, base_sequence=6)
    batch = batch.with_header(replace(batch.header, base_offset=7, append_time_ms=8, leader_epoch=5))
    sealer = BatchSealer(key)
    sealer.seal(batch)
    body = bytes(sealer.seal(batch).body)
    place = ("us-east", "a/b/c", LIFE, 2, 5, key_id)
    header = batch.header
    immutable = struct.pack(">BBIQqIIQIIQ", 1, header.flags | 2, 2, 7, 8, 5, 1, 3, 4, header.plain_length, 6)
    bound = context("batch", "us-east", "a/b/c", LIFE, key_id) + immutable
    assert body[:8] == (1).to_bytes(8, "big")
    opened = AESGCM(expand(SECRET, context("data-key-seal", *place))).decrypt(
        bytes(4) + body[:8], body[8:], bound
    )
    assert opened == batch.body
    assert key.commitment() == expand(SECRET, context("data-key-commitment", *place))


def test_an_envelope_reads_as_documented() -> None:
    region = create_authority("us-east", "acme", 1_764_000_000_000)
    bridge = SpiffeId.parse("spiffe://us-east.acme/bridge/b")
    agent = region.issue_identity(bridge, 1_764_000_000_000)
    scope = TransferScope(
        "us-east", "eu-west", StreamName.parse("a/b/c"), LIFE, StreamName.parse("a/b/d"), 2, 5, "g", b"t" * 32, bridge
    )  # fmt: skip
    key_id = new_key_id("us-east", KeyKind.TRANSFER, b"r" * 11)
    batch = encode_batch([NewRecord(b"one"), NewRecord(b"two")])
    sealed = seal_envelope(
        TransferKey(key_id, scope, SECRET), agent, base_offset=70, last_offset=75, batch=batch, source_offsets=[71, 74]
    )  # fmt: skip
    raw = sealed.encode()
    documented = context(
        "transfer-scope", "us-east", "eu-west", "a/b/c", LIFE, "a/b/d", 2, 5, "g", b"t" * 32, str(bridge)
    )
    assert scope.encode() == documented
    length, signature_length = struct.unpack_from(">II", raw, 80)
    assert raw[:80] == (
        b"FE\x01\x00"
        + struct.pack(">IIIQQ", 2, 5, 2, 70, 75)
        + LIFE
        + key_id
        + hashlib.sha256(documented).digest()[:16]
    )
    ciphertext, signature = raw[88 : 88 + length], raw[88 + length :]
    assert len(signature) == signature_length
    cipher = AESGCMSIV(expand(SECRET, context("transfer-seal", key_id, documented)))
    plain = cipher.decrypt(
        bytes(4) + (70).to_bytes(8, "big"), ciphertext, b"felix/transfer-envelope/1\x00" + raw[:80]
    )
    assert plain == struct.pack(">III", 2, 1, 4) + batch.encode()
    digest = hashlib.sha256(raw[:80] + ciphertext).digest()
    assert sealed.hash == digest
    peer = verify_chain(agent.chain_pem, TrustBundle([region.anchor()]), 1_764_000_000_000)
    message = context("transfer-envelope-message", documented, digest)
    assert peer.signed("transfer-envelope", message, signature)


def test_a_wrapped_key_reads_as_documented() -> None:
    nonce = b"n" * 12
    wrapped = wrap(SECRET, b"k" * 16, b"inner", b"what for", nonce)
    assert wrapped[:12] == nonce
    cipher = AESGCMSIV(expand(SECRET, context("wrap", b"k" * 16)))
    assert cipher.decrypt(nonce, wrapped[12:], b"what for") == b"inner"
