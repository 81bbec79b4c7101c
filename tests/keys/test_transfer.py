"""Transfer keys and envelopes: what crosses, and what does not open."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from felix.batch import FLAG_SEALED, NewRecord, encode_batch
from felix.errors import Code, FelixError, TamperError
from felix.identity import Identity
from felix.names import SpiffeId, StreamName
from felix.peer import Peer, TrustBundle, verify_chain
from keys.authority import create_authority
from keys.errors import KeyScopeError
from keys.hybrid import HybridKeyPair
from keys.key_id import KeyKind, new_key_id
from keys.transfer import (
    _AAD_PREFIX,
    ENVELOPE_HEADER_BYTES,
    EnvelopeError,
    TransferEnvelope,
    TransferKey,
    TransferScope,
    _message,
    _nonce,
    decode_envelope,
    open_envelope,
    open_transfer_key,
    seal_envelope,
    seal_transfer_key,
)

NOW = 1_764_000_000_000
IMPORT = HybridKeyPair.generate()
BRIDGE = SpiffeId.parse("spiffe://us-east.acme/bridge/us-to-eu")
SCOPE = TransferScope(
    "us-east", "eu-west", StreamName.parse("acme/ops/departures"), b"i" * 16,
    StreamName.parse("acme/us/departures"), 2, 5, "g-1", b"t" * 32, BRIDGE,
)  # fmt: skip
KEY = TransferKey(new_key_id("us-east", KeyKind.TRANSFER, b"r" * 11), SCOPE, bytes(range(32)))
OTHER_SCOPES = [
    {"destination_region": "ap-south"},
    {"stream": StreamName.parse("acme/ops/crew")},
    {"incarnation": b"j" * 16},
    {"destination": StreamName.parse("acme/us/other")},
    {"shard": 3},
    {"epoch": 6},
    {"grant_id": "g-2"},
    {"terms_hash": b"u" * 32},
]


@cache
def identities() -> tuple[Identity, Peer, Identity, Peer]:
    """The bridge at home, as the destination knows it, and another bridge of the same region."""
    region = create_authority("us-east", "acme", NOW)
    bundle = TrustBundle([region.anchor()])
    found: list[Identity | Peer] = []
    for spiffe_id in (BRIDGE, SpiffeId.parse("spiffe://us-east.acme/bridge/other")):
        identity = region.issue_identity(spiffe_id, NOW)
        found += [identity, verify_chain(identity.chain_pem, bundle, NOW)]
    return tuple(found)  # type: ignore[return-value]


def agent() -> Identity:
    return identities()[0]


def peer() -> Peer:
    return identities()[1]


def envelope(payloads: list[bytes] | None = None, base: int = 100) -> TransferEnvelope:
    records = [b"one", b"two", b"three"] if payloads is None else payloads
    return seal_envelope(
        KEY,
        agent(),
        base_offset=base,
        last_offset=base + len(records) - 1,
        batch=encode_batch([NewRecord(p) for p in records]),
        source_offsets=range(base, base + len(records)),
    )


# -- transfer keys -------------------------------------------------------------------------------------


def test_the_destination_gets_the_key_that_the_agent_sealed() -> None:
    sealed = seal_transfer_key(KEY, IMPORT.public, agent())
    assert sealed.key_id == KEY.key_id
    assert KEY.secret not in sealed.sealed
    assert open_transfer_key(sealed.sealed, sealed.signature, SCOPE, IMPORT, peer()) == KEY


@pytest.mark.parametrize("changes", OTHER_SCOPES, ids=lambda changes: next(iter(changes)))
def test_a_transfer_key_for_one_link_opens_for_no_other(changes: dict[str, object]) -> None:
    sealed = seal_transfer_key(KEY, IMPORT.public, agent())
    other: TransferScope = replace(SCOPE, **changes)  # type: ignore[arg-type]
    with pytest.raises(TamperError, match="not signed"):
        open_transfer_key(sealed.sealed, sealed.signature, other, IMPORT, peer())
    # Not even where the agent itself signed it for the other link.
    signature = seal_transfer_key(replace(KEY, scope=other), IMPORT.public, agent())
    with pytest.raises(TamperError):
        open_transfer_key(sealed.sealed, signature.signature, other, IMPORT, peer())


def test_a_transfer_key_by_another_sender_or_for_another_region_is_refused() -> None:
    _, _, other, other_peer = identities()
    sealed = seal_transfer_key(KEY, IMPORT.public, agent())
    with pytest.raises(KeyScopeError, match="the grant names"):
        open_transfer_key(sealed.sealed, sealed.signature, SCOPE, IMPORT, other_peer)
    with pytest.raises(KeyScopeError, match="cannot send"):
        seal_transfer_key(KEY, IMPORT.public, other)
    with pytest.raises(TamperError):
        open_transfer_key(sealed.sealed, sealed.signature, SCOPE, HybridKeyPair.generate(), peer())
    foreign = new_key_id("eu-west", KeyKind.TRANSFER, b"r" * 11) + sealed.sealed[16:]
    with pytest.raises(KeyScopeError, match="does not belong to region us-east"):
        open_transfer_key(foreign, sealed.signature, SCOPE, IMPORT, peer())


def test_any_changed_byte_of_a_transfer_key_is_refused() -> None:
    sealed, signature = seal_transfer_key(KEY, IMPORT.public, agent())
    for at in range(0, len(sealed), 5):
        changed = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
        with pytest.raises(FelixError):
            open_transfer_key(changed, signature, SCOPE, IMPORT, peer())
    for at in range(len(signature)):
        changed = signature[:at] + bytes([signature[at] ^ 1]) + signature[at + 1 :]
        with pytest.raises(TamperError):
            open_transfer_key(sealed, changed, SCOPE, IMPORT, peer())
    with pytest.raises(EnvelopeError):
        open_transfer_key(sealed + b"\0", signature, SCOPE, IMPORT, peer())


def test_a_scope_that_crosses_no_border_or_names_no_bridge_of_the_source_is_refused() -> None:
    with pytest.raises(KeyScopeError, match="crosses no border"):
        replace(SCOPE, destination_region="us-east")
    for name in ("spiffe://eu-west.acme/bridge/b", "spiffe://us-east.acme/broker/b"):
        with pytest.raises(KeyScopeError, match="not a bridge of us-east"):
            replace(SCOPE, bridge=SpiffeId.parse(name))
    with pytest.raises(KeyScopeError):
        replace(SCOPE, terms_hash=b"short")


# -- envelopes -----------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    base=st.integers(0, 2**62),
    kept=st.lists(st.booleans(), min_size=1, max_size=40),
    payload=st.binary(max_size=50),
)
def test_what_crossed_comes_out_as_it_went_in(base: int, kept: list[bool], payload: bytes) -> None:
    offsets = [base + index for index, keep in enumerate(kept) if keep]
    batch = encode_batch([NewRecord(payload, b"k")] * len(offsets)) if offsets else None
    sealed = seal_envelope(
        KEY, agent(), base_offset=base, last_offset=base + len(kept) - 1, batch=batch, source_offsets=offsets
    )
    travelled = decode_envelope(sealed.encode())
    crossing = open_envelope(KEY, travelled, peer())
    assert list(crossing.source_offsets) == offsets
    assert (crossing.batch and crossing.batch.encode()) == (batch and batch.encode())
    assert travelled.header.next_offset == base + len(kept)
    assert travelled.header.records == len(offsets)
    assert travelled.hash == sealed.hash


def test_a_retry_sends_the_same_bytes() -> None:
    assert envelope().encode() == envelope().encode()
    assert envelope(base=101).ciphertext != envelope().ciphertext


def test_no_plaintext_stands_in_an_envelope() -> None:
    assert b"canary" not in envelope([b"a canary in a coal mine"]).encode()


def test_any_changed_byte_of_an_envelope_is_refused() -> None:
    encoded = envelope().encode()
    for at in range(len(encoded)):
        changed = encoded[:at] + bytes([encoded[at] ^ (1 << at % 8)]) + encoded[at + 1 :]
        with pytest.raises(FelixError) as caught:
            open_envelope(KEY, decode_envelope(changed), peer())
        assert caught.value.code in (Code.TAMPERED, Code.ENVELOPE_INVALID)


def test_any_changed_byte_is_refused_even_where_the_agent_signs_it_anew() -> None:
    """So the seal holds by itself, not only because of the signature."""
    sealed = envelope()
    raw = sealed.header.encode() + bytes(sealed.ciphertext)
    for at in range(len(raw)):
        changed = raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :]
        try:
            parsed = decode_envelope(changed + bytes(len(sealed.signature)))
        except EnvelopeError:
            continue
        signed = replace(parsed, signature=agent().sign("transfer-envelope", _message(SCOPE, parsed.hash)))
        with pytest.raises(FelixError) as caught:
            open_envelope(KEY, signed, peer())
        assert caught.value.code in (Code.TAMPERED, Code.ENVELOPE_INVALID)


def test_truncated_and_prolonged_envelopes_are_refused() -> None:
    encoded = envelope().encode()
    for length in range(len(encoded)):
        with pytest.raises(EnvelopeError):
            decode_envelope(encoded[:length])
    with pytest.raises(EnvelopeError):
        decode_envelope(encoded + b"\0")


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_bytes_that_are_no_envelope_are_refused(data: bytes) -> None:
    for candidate in (data, b"FE\x01\x00" + data):
        try:
            parsed = decode_envelope(candidate)
        except EnvelopeError:
            continue
        with pytest.raises(FelixError):
            open_envelope(KEY, parsed, peer())


def test_lengths_are_bounded_before_anything_is_copied() -> None:
    header = envelope().header
    for field in ("ciphertext_length", "signature_length"):
        huge = header._replace(**{field: 0xFFFFFFFF}).encode()
        with pytest.raises(EnvelopeError, match="are allowed"):
            decode_envelope(huge)
    assert len(header.encode()) == ENVELOPE_HEADER_BYTES


@pytest.mark.parametrize("changes", OTHER_SCOPES, ids=lambda changes: next(iter(changes)))
def test_an_envelope_of_one_link_opens_on_no_other(changes: dict[str, object]) -> None:
    other = replace(KEY, scope=replace(SCOPE, **changes))  # type: ignore[arg-type]
    with pytest.raises(EnvelopeError, match="belongs to another link"):
        open_envelope(other, envelope(), peer())


def test_an_envelope_under_another_key_is_refused() -> None:
    with pytest.raises(EnvelopeError, match="or key"):
        open_envelope(
            replace(KEY, key_id=new_key_id("us-east", KeyKind.TRANSFER, b"q" * 11)), envelope(), peer()
        )
    with pytest.raises(TamperError, match="does not open"):
        open_envelope(replace(KEY, secret=b"z" * 32), envelope(), peer())


def test_an_envelope_moved_to_another_position_is_refused() -> None:
    sealed = envelope()
    moved = replace(sealed, header=sealed.header._replace(base_offset=101, last_offset=103))
    with pytest.raises(TamperError, match="source offsets 101 to 103"):
        open_envelope(KEY, moved, peer())


def test_an_envelope_signed_by_anybody_else_is_refused() -> None:
    _, _, other, other_peer = identities()
    with pytest.raises(TamperError, match="not signed"):
        open_envelope(KEY, envelope(), other_peer)
    with pytest.raises(TamperError, match="not signed"):
        open_envelope(KEY, envelope(), replace(other_peer, spiffe_id=BRIDGE))
    with pytest.raises(KeyScopeError):
        seal_envelope(KEY, other, base_offset=0, last_offset=0, batch=None, source_offsets=[])


@pytest.mark.parametrize(
    ("last", "offsets"),
    [
        (102, [100]),
        (102, [100, 100]),
        (102, [101, 100]),
        (102, [99, 100]),
        (102, [102, 103]),
        (101, [100, 102]),
        (100, [100, 101]),
        (99, [100, 101]),
        (100 + (1 << 32), [100, 101]),
    ],
)
def test_ranges_and_offsets_that_do_not_fit_are_not_sealed(last: int, offsets: list[int]) -> None:
    batch = encode_batch([NewRecord(b"1"), NewRecord(b"2")])
    with pytest.raises(EnvelopeError):
        seal_envelope(KEY, agent(), base_offset=100, last_offset=last, batch=batch, source_offsets=offsets)


def test_a_batch_that_is_still_sealed_for_its_source_does_not_cross() -> None:
    batch = encode_batch([NewRecord(b"1")])
    batch = batch.with_header(msgspec.structs.replace(batch.header, flags=FLAG_SEALED))
    with pytest.raises(EnvelopeError, match="still sealed"):
        seal_envelope(KEY, agent(), base_offset=0, last_offset=0, batch=batch, source_offsets=[0])


@pytest.mark.parametrize(
    "plaintext",
    [
        struct.pack(">I", 2) + struct.pack(">II", 1, 0),
        struct.pack(">I", 2) + struct.pack(">II", 0, 9),
        struct.pack(">I", 2) + struct.pack(">II", 0, 1) + b"no batch",
        struct.pack(">I", 2) + struct.pack(">II", 0, 1) + encode_batch([NewRecord(b"1")]).encode(),
        struct.pack(">I", 2) + b"\0\0\0",
        struct.pack(">I", 1) + struct.pack(">I", 0),
        struct.pack(">I", 0xFFFFFFFF),
    ],
)
def test_a_signed_envelope_with_contents_that_do_not_hold_is_refused(plaintext: bytes) -> None:
    """A broken or malicious agent has the keys; what it sends is still checked."""
    header = envelope().header._replace(records=2, ciphertext_length=len(plaintext) + 16)
    sealed = KEY._cipher.encrypt(_nonce(100), plaintext, _AAD_PREFIX + header.encode()[:80])
    forged = TransferEnvelope(header, sealed, b"")
    forged = replace(forged, signature=agent().sign("transfer-envelope", _message(SCOPE, forged.hash)))
    with pytest.raises(EnvelopeError) as caught:
        open_envelope(KEY, forged, peer())
    assert caught.value.code is Code.ENVELOPE_INVALID
