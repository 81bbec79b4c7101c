"""Ed25519 signatures bound to a purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit.note import Algorithm, VerifierKey
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


P = 2**255 - 19
D = -121665 * pow(121666, P - 2, P) % P
L = 2**252 + 27742317777372353535851937790883648493
Point = tuple[int, int]


def add(one: Point, other: Point) -> Point:
    """RFC 8032, section 5.1.4, in affine coordinates."""
    (x1, y1), (x2, y2) = one, other
    product = D * x1 * x2 * y1 * y2 % P
    return (
        (x1 * y2 + x2 * y1) * pow(1 + product, -1, P) % P,
        (y1 * y2 + x1 * x2) * pow(1 - product, -1, P) % P,
    )


def times(number: int, point: Point) -> Point:
    found = (0, 1)
    while number:
        if number & 1:
            found = add(found, point)
        point, number = add(point, point), number >> 1
    return found


def point_of(y: int) -> Point | None:
    """One of the two points with this y, if there is any (section 5.1.3)."""
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    if x * x % P != square:
        x = x * pow(2, (P - 1) // 4, P) % P
    return (x, y) if x * x % P == square else None


def small_order_points() -> set[Point]:
    """What is left of any points, taken L times: all whose order divides 8."""
    points = filter(None, map(point_of, range(2, 60)))
    return {times(L, point) for point in points}


def encodings(point: Point) -> set[bytes]:
    """The point's own, and those that a reader takes for it that reduces y, or does not mind the sign of x = 0."""
    x, y = point
    signs = {x & 1} if x else {0, 1}
    numbers = {number for number in (y, y + P) if number < 2**255}
    return {(number | sign << 255).to_bytes(32, "little") for number in numbers for sign in signs}


def test_no_point_of_small_order_is_read_as_a_public_key_in_any_encoding() -> None:
    points = small_order_points()
    assert len(points) == 8 and all(times(8, point) == (0, 1) for point in points)
    found = set[bytes]().union(*map(encodings, points))
    assert len(found) == 14
    for public in found:
        with pytest.raises(RequestError, match="small order"):
            VerifyKey(public)
        for algorithm in (Algorithm.ED25519, Algorithm.COSIGNATURE):
            with pytest.raises(RequestError, match="small order"):
                VerifierKey("eu-west.acme/witness", algorithm, public)


def test_no_public_key_is_read_in_another_encoding_than_its_own() -> None:
    for y in range(P, 2**255):
        for sign in (0, 1):
            with pytest.raises(RequestError, match=r"small order|another encoding"):
                VerifyKey((y | sign << 255).to_bytes(32, "little"))


def test_honest_keys_are_all_read() -> None:
    for number in range(300):
        public = SigningKey.from_seed(number.to_bytes(32, "big")).verify_key.public
        assert VerifyKey(public) == SigningKey.from_seed(number.to_bytes(32, "big")).verify_key
        assert VerifierKey("w", Algorithm.COSIGNATURE, public).public == public
