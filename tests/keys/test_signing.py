"""Ed25519 signatures bound to a purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from felix.errors import Code, RequestError, TamperError
from keys.key_file import load_signing_key, save_signing_key
from keys.signing import SigningKey, VerifyKey

# RFC 8032, section 7.1, TEST 2: the signature there is over the bare message 0x72, as a note would be signed.
SEED = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
PUBLIC = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def test_the_key_of_a_seed_is_that_of_rfc_8032() -> None:
    key = SigningKey.from_seed(SEED)
    assert key.verify_key.public == PUBLIC
    assert VerifyKey(PUBLIC).note_holds("\x72", SIGNATURE)


def test_a_signature_holds_for_its_purpose_message_and_key_alone() -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    signature = key.sign("receipt", b"taken")
    assert key.verify_key.holds("receipt", b"taken", signature)
    key.verify_key.verify("receipt", b"taken", signature)
    assert not key.verify_key.holds("policy", b"taken", signature)
    assert not key.verify_key.holds("receipt", b"given", signature)
    assert not other.verify_key.holds("receipt", b"taken", signature)
    assert not key.verify_key.holds("receipt", b"taken", signature[:-1])
    with pytest.raises(TamperError, match="receipt signature"):
        other.verify_key.verify("receipt", b"taken", signature)


def test_a_note_cannot_pass_for_a_purpose_nor_the_other_way_round() -> None:
    key = SigningKey.generate()
    note = "us-east.acme/egress\n7\nAAAA\n"
    assert key.verify_key.note_holds(note, key.sign_note(note))
    signature = key.sign("policy", b"text\n")
    assert not key.verify_key.note_holds("felix/policy/1\0text\n", signature)
    with pytest.raises(AssertionError):
        key.sign_note("felix/policy/1\0text\n")


def test_a_key_survives_its_private_file_which_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "policy.key"
    key = SigningKey.generate()
    save_signing_key(key, path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_signing_key(path).verify_key == key.verify_key
    with pytest.raises(RequestError) as caught:
        save_signing_key(SigningKey.generate(), path)
    assert caught.value.code is Code.ALREADY_EXISTS
    assert load_signing_key(path).key_id == key.key_id
    assert [entry.name for entry in tmp_path.iterdir()] == ["policy.key"]


def test_files_that_are_open_or_hold_no_key_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.key"
    save_signing_key(SigningKey.generate(), path)
    path.chmod(0o644)
    with pytest.raises(RequestError, match="chmod 600"):
        load_signing_key(path)
    path.write_bytes(b"nothing")
    path.chmod(0o600)
    with pytest.raises(RequestError, match="no readable signing key"):
        load_signing_key(path)


def test_ids_tell_keys_apart_and_nothing_private_is_shown() -> None:
    key = SigningKey.from_seed(SEED)
    assert len(key.key_id) == 16
    assert key.key_id != SigningKey.generate().key_id
    assert "PrivateKey" not in repr(key)
    with pytest.raises(RequestError):
        VerifyKey(b"short")
