"""Hybrid sealing to a public key."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from hypothesis import given, settings
from hypothesis import strategies as st

from felix.context import purpose_prefix
from felix.errors import Code, RequestError, TamperError
from keys.hybrid import OVERHEAD_BYTES, HybridKeyPair, HybridPublicKey
from keys.key_file import load_key_pair, save_key_pair

PAIR = HybridKeyPair.generate()
VECTOR_BYTES = {"info", "skRm", "pkRm", "enc", "shared_secret", "key", "base_nonce", "aad", "pt", "ct"}


@settings(max_examples=30)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_what_is_sealed_to_a_key_opens_with_it(plaintext: bytes, info: bytes) -> None:
    sealed = HybridPublicKey(PAIR.public.encoded).seal(plaintext, info)
    assert len(sealed) == len(plaintext) + OVERHEAD_BYTES
    assert PAIR.open(sealed, info, "it") == plaintext


def test_another_key_or_another_context_opens_nothing() -> None:
    sealed = PAIR.public.seal(b"secret", b"for this")
    with pytest.raises(TamperError, match="The parcel was sealed to another key"):
        HybridKeyPair.generate().open(sealed, b"for this", "the parcel")
    with pytest.raises(TamperError):
        PAIR.open(sealed, b"for that", "the parcel")


def test_any_changed_or_missing_byte_is_refused() -> None:
    sealed = PAIR.public.seal(b"secret", b"for this")
    for at in range(len(sealed)):
        changed = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
        with pytest.raises(TamperError):
            PAIR.open(changed, b"for this", "it")
    for length in range(len(sealed)):
        with pytest.raises(TamperError):
            PAIR.open(sealed[:length], b"for this", "it")
    with pytest.raises(TamperError, match="is not sealed as it must be"):
        PAIR.open(sealed + bytes(4096), b"for this", "it")


def key_and_nonce(
    lattice: MLKEM768PrivateKey, curve: X25519PrivateKey, enc: bytes, info: bytes, aead_id: int
) -> tuple[bytes, bytes, bytes]:
    """Shared secret, key and base nonce as the specifications say, step by step, without the library's HPKE.

    RFC 9180, section 5.1 (base mode, HKDF-SHA256), over the KEM MLKEM768-X25519 (draft-ietf-hpke-pq).
    """
    from_lattice = lattice.decapsulate(enc[:1088])
    from_curve = curve.exchange(X25519PublicKey.from_public_bytes(enc[1088:]))
    combined = from_lattice + from_curve + enc[1088:] + curve.public_key().public_bytes_raw() + b"\\.//^\\"
    shared_secret = hashlib.sha3_256(combined).digest()
    suite = b"HPKE" + b"".join(number.to_bytes(2, "big") for number in (0x647A, 1, aead_id))

    def extract(label: bytes, ikm: bytes, salt: bytes = bytes(32)) -> bytes:
        return hmac.digest(salt, b"HPKE-v1" + suite + label + ikm, "sha256")

    def expand(prk: bytes, label: bytes, context: bytes, length: int) -> bytes:
        labeled = length.to_bytes(2, "big") + b"HPKE-v1" + suite + label + context
        return hmac.digest(prk, labeled + b"\x01", "sha256")[:length]

    context = b"\x00" + extract(b"psk_id_hash", b"") + extract(b"info_hash", info)
    secret = extract(b"secret", b"", shared_secret)
    return shared_secret, expand(secret, b"key", context, 32), expand(secret, b"base_nonce", context, 12)


def test_the_working_groups_vector_gives_our_public_key_and_its_secret_key_and_plaintext() -> None:
    vector = json.loads((Path(__file__).parent.parent / "vectors" / "hpke_mlkem768_x25519.json").read_text())
    value = {name: bytes.fromhex(text) for name, text in vector.items() if name in VECTOR_BYTES}
    expanded = hashlib.shake_256(value["skRm"]).digest(96)
    pair = HybridKeyPair.decode_private(purpose_prefix("hybrid-private-key") + b"\x01" + expanded)
    assert pair.public.encoded == b"\x01" + value["pkRm"]
    lattice = MLKEM768PrivateKey.from_seed_bytes(expanded[:64])
    curve = X25519PrivateKey.from_private_bytes(expanded[64:])
    shared_secret, key, nonce = key_and_nonce(lattice, curve, value["enc"], value["info"], vector["aead_id"])
    assert (shared_secret, key, nonce) == (value["shared_secret"], value["key"], value["base_nonce"])
    assert ChaCha20Poly1305(key).decrypt(nonce, value["ct"], value["aad"]) == value["pt"]


def test_the_same_steps_open_what_was_sealed_here() -> None:
    private = PAIR.encode_private().removeprefix(purpose_prefix("hybrid-private-key") + b"\x01")
    lattice = MLKEM768PrivateKey.from_seed_bytes(private[:64])
    curve = X25519PrivateKey.from_private_bytes(private[64:])
    sealed = PAIR.public.seal(b"thirty-two bytes of key material", b"the info")[1:]
    _, key, nonce = key_and_nonce(lattice, curve, sealed[:1120], b"the info", aead_id=2)
    assert AESGCM(key).decrypt(nonce, sealed[1120:], b"") == b"thirty-two bytes of key material"


def test_a_pair_survives_its_private_file(tmp_path: Path) -> None:
    path = tmp_path / "import.key"
    save_key_pair(PAIR, path)
    assert path.stat().st_mode & 0o777 == 0o600
    loaded = load_key_pair(path)
    assert loaded.public == PAIR.public
    assert loaded.open(PAIR.public.seal(b"secret", b""), b"", "it") == b"secret"
    with pytest.raises(RequestError) as caught:
        save_key_pair(PAIR, path)
    assert caught.value.code is Code.ALREADY_EXISTS


def test_files_that_are_open_or_broken_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "import.key"
    save_key_pair(PAIR, path)
    path.chmod(0o640)
    with pytest.raises(RequestError, match="chmod 600"):
        load_key_pair(path)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RequestError, match=r"import\.key: Not a hybrid private key"):
        load_key_pair(path)


@pytest.mark.parametrize(
    "encoded",
    [b"", bytes(1217), PAIR.public.encoded[:-1], PAIR.public.encoded + b"\0", b"\x01" + b"\xff" * 1216],
    ids=["empty", "other suite", "short", "long", "not reduced"],
)
def test_bytes_that_are_no_public_key_are_refused(encoded: bytes) -> None:
    with pytest.raises(RequestError, match="Not a hybrid public key"):
        HybridPublicKey(encoded)


def test_a_curve_point_of_low_order_and_too_much_plaintext_are_refused() -> None:
    weak = HybridPublicKey(PAIR.public.encoded[:-32] + bytes(32))
    with pytest.raises(RequestError, match="cannot be sealed to"):
        weak.seal(b"secret", b"")
    with pytest.raises(RequestError, match="too many"):
        PAIR.public.seal(bytes(5000), b"")


def test_nothing_private_is_shown() -> None:
    assert PAIR.encode_private()[-32:].hex() not in repr(PAIR)
    assert repr(PAIR.encode_private()[-8:])[2:-1] not in repr(PAIR)
