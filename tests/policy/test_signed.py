from __future__ import annotations

import json

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from felix.errors import Code
from policy.signed import (
    FILE_BYTES_MAX,
    Purpose,
    SignatureError,
    SignedDocument,
    canonical,
    decode_body,
    key_id,
    raw_public_key,
    sign,
    verify,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
TRUSTED = {"us-east": [raw_public_key(OTHER), raw_public_key(KEY)]}


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    b: int
    a: str


def document() -> SignedDocument:
    return sign(Purpose.STANDING, "us-east", canonical(Note(b=1, a="é")), KEY)


def test_a_document_goes_round_as_file_and_as_token() -> None:
    signed = document()
    assert SignedDocument.parse(signed.encode_file()) == signed
    assert SignedDocument.parse(signed.encode_file().decode()) == signed
    assert SignedDocument.parse(signed.encode_token()) == signed
    assert SignedDocument.parse(f"  {signed.encode_token()}\n") == signed
    verify(signed, TRUSTED)
    assert decode_body(signed, Note, Purpose.STANDING) == Note(b=1, a="é")


def test_the_signature_is_the_documented_one() -> None:
    signed = document()
    assert signed.body == '{"a":"é","b":1}'.encode()
    Ed25519PublicKey.from_public_bytes(raw_public_key(KEY)).verify(
        signed.signature, b"felix/grant-standing/1\0" + signed.body
    )
    assert signed.key == key_id(raw_public_key(KEY))
    assert len(signed.key) == 32


def test_a_text_body_is_signed_as_it_stands() -> None:
    signed = sign(Purpose.POLICY, "us-east", b"# comment\nversion: 1\n", KEY)
    again = SignedDocument.parse(signed.encode_file())
    assert again.body == b"# comment\nversion: 1\n"
    verify(again, TRUSTED)


def is_refused(data: bytes | str) -> bool:
    try:
        verify(SignedDocument.parse(data), TRUSTED)
    except SignatureError as error:
        assert error.code is Code.GRANT_INVALID
        return True
    return False


def test_no_byte_of_a_file_can_be_changed() -> None:
    data = document().encode_file()
    assert not is_refused(data)
    for index in range(len(data)):
        for flip in (0x01, 0x20, 0x80):
            edited = bytearray(data)
            edited[index] ^= flip
            assert is_refused(bytes(edited)), (index, flip)


def test_no_character_of_a_token_can_be_changed() -> None:
    token = document().encode_token()
    for index in range(len(token)):
        for other in "Ab0_-":
            if token[index] != other:
                assert is_refused(token[:index] + other + token[index + 1 :]), index


def test_nothing_can_be_cut_off_or_added() -> None:
    data = document().encode_file()
    for length in range(len(data) - 1):
        assert is_refused(data[:length])
    assert is_refused(data + b"\n")
    assert is_refused(data + b" ")
    assert is_refused(data.replace(b'"b": 1', b'"b": 1, "b": 1'))


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        ({"region": "eu-west"}, "signed by eu-west, whose policy key is not known here"),
        ({"key": "00" * 16}, "which is none of us-east's policy keys"),
        ({"key": key_id(raw_public_key(OTHER))}, "The signature of us-east does not hold"),
        ({"purpose": "bridge-deny"}, "The signature of us-east does not hold"),
        ({"body": {"a": "é", "b": 2}}, "The signature of us-east does not hold"),
        ({"signature": "AAAA"}, "The signature of us-east does not hold"),
        ({"signature": ""}, "The signature of us-east does not hold"),
        ({"purpose": "residency-policy"}, "its body is not of the kind that its purpose asks for"),
        ({"body": "text"}, "its body is not of the kind that its purpose asks for"),
        ({"purpose": "other"}, "cannot be read: Invalid enum value 'other'"),
        ({"region": "US East"}, "is not a region or mesh name"),
        ({"more": 1}, "Object contains unknown field `more`"),
    ],
)
def test_each_forgery_is_told_apart(edit: dict[str, object], sentence: str) -> None:
    fields = json.loads(document().encode_file())
    with pytest.raises(SignatureError) as caught:
        verify(SignedDocument.parse(canonical({**fields, **edit})), TRUSTED)
    assert sentence in str(caught.value)


def test_a_document_must_be_for_what_it_is_used_for() -> None:
    with pytest.raises(SignatureError, match="it is a grant-standing, where a grant-export is needed"):
        decode_body(document(), Note, Purpose.EXPORT)
    loose = sign(Purpose.STANDING, "us-east", b'{"b":1,"a":"x"}', KEY)
    with pytest.raises(SignatureError, match="not in canonical form"):
        decode_body(loose, Note, Purpose.STANDING)
    odd = sign(Purpose.STANDING, "us-east", b'{"a":"x","b":1,"c":2}', KEY)
    with pytest.raises(SignatureError, match="unknown field"):
        decode_body(odd, Note, Purpose.STANDING)


def test_size_and_depth_are_bounded() -> None:
    assert is_refused(b"{" + b" " * FILE_BYTES_MAX)
    assert is_refused(b'{"body":' + b"[" * 100_000)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=100))
def test_any_bytes_are_refused_with_a_typed_error(data: bytes | str) -> None:
    assert is_refused(data)
    if isinstance(data, bytes):
        assert is_refused(b"{" + data)


def test_a_forged_document_is_verified_once_as_a_genuine_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0

    def counted(purpose: Purpose, body: bytes) -> bytes:
        nonlocal tried
        tried += 1
        return b"felix/" + purpose.encode() + b"/1\0" + body

    monkeypatch.setattr("policy.signed._message", counted)
    signed = document()
    forged = SignedDocument(signed.purpose, signed.region, signed.key, signed.body, bytes(63) + b"\x09")
    for _ in range(3):
        for listed in (signed, SignedDocument.parse(forged.encode_file())):
            try:
                verify(listed, {"us-east": [raw_public_key(KEY)]})
            except SignatureError as error:
                assert "forged or changed" in error.sentence and error.hint
    assert tried == 1 + 1 + 1, "signed once, and each verified once"
