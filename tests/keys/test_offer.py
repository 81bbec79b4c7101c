"""A region's offer: what holds, and what anybody may have changed on the way."""

from __future__ import annotations

import json

import msgspec
import pytest

from felix.errors import FelixError, RequestError, TamperError
from keys.authority import create_authority
from keys.bundle import RegionBundle, sign_bundle
from keys.hybrid import HybridKeyPair
from keys.offer import OFFER_BYTES_MAX, RegionOffer, decode_offer, is_offer, sign_offer
from keys.signing import SigningKey

NOW = 1_764_000_000_000
POLICY = SigningKey.from_seed(b"p" * 32)
OTHER = SigningKey.from_seed(b"o" * 32).verify_key.public
_BUNDLE = RegionBundle(
    region="eu-west",
    mesh="acme",
    country="IE",
    jurisdiction="EU",
    issued_ms=NOW,
    root_pem=create_authority("eu-west", "acme", NOW).anchor().root_pem.decode(),
    policy_keys=(POLICY.verify_key.public,),
    receipt_keys=(OTHER,),
    audit_keys=(),
    import_key=HybridKeyPair.generate().public.encoded,
)


def bundle(**changes: object) -> RegionBundle:
    return msgspec.structs.replace(_BUNDLE, **changes)


OFFER = RegionOffer(
    issued_ms=NOW,
    addresses=("eu-west.example.org:7443", "[2001:db8::1]:7443"),
    entity="Globex Ltd.",
    contact="Data Office",
    bundle=sign_bundle(bundle(), POLICY),
)


def test_an_offer_survives_its_file_and_is_told_from_a_bundle() -> None:
    signed = sign_offer(OFFER, POLICY)
    assert decode_offer(signed.encode()) == signed
    assert is_offer(signed.encode()) and not is_offer(OFFER.bundle.encode()) and not is_offer(b"\xff[")
    assert [each.port for each in signed.offer.parsed_addresses()] == [7443, 7443]


@pytest.mark.parametrize(
    ("field", "value"),
    [("entity", "Initech"), ("contact", ""), ("addresses", ["evil.example:1"]), ("issued_ms", NOW + 1)],
)
def test_whatever_of_it_is_changed_it_is_refused(field: str, value: object) -> None:
    content = json.loads(sign_offer(OFFER, POLICY).encode())
    content["offer"][field] = value
    with pytest.raises(TamperError, match="it was changed"):
        decode_offer(json.dumps(content).encode())


def test_another_regions_bundle_or_key_in_it_is_refused() -> None:
    content = json.loads(sign_offer(OFFER, POLICY).encode())
    stranger = SigningKey.generate()
    with pytest.raises(TamperError):
        sign_offer(OFFER, stranger)
    theirs = bundle(policy_keys=(stranger.verify_key.public,))
    content["offer"]["bundle"] = json.loads(sign_bundle(theirs, stranger).encode())
    with pytest.raises(TamperError, match="The offer of eu-west"):
        decode_offer(json.dumps(content).encode())
    content["offer"]["bundle"]["bundle"]["country"] = "CN"
    with pytest.raises(TamperError, match="The bundle of eu-west"):
        decode_offer(json.dumps(content).encode())
    assert not sign_offer(OFFER, POLICY).is_by(theirs)
    assert sign_offer(OFFER, POLICY).is_by(bundle(policy_keys=(OTHER, POLICY.verify_key.public)))


@pytest.mark.parametrize("changes", [{"addresses": ()}, {"addresses": ("nowhere:0",)}, {"entity": "x" * 256}])
def test_an_offer_that_does_not_hold_is_not_even_signed(changes: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        sign_offer(msgspec.structs.replace(OFFER, **changes), POLICY)


def test_what_is_no_offer_or_too_large_is_refused_with_a_sentence() -> None:
    for data in (b"", b"{}", b"\xff", OFFER.bundle.encode(), bytes(OFFER_BYTES_MAX + 1)):
        with pytest.raises(FelixError):
            decode_offer(data)
