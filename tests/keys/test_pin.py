"""A region's pin of another one: what holds, and what anybody may have changed on the way."""

from __future__ import annotations

import json

import msgspec
import pytest

from felix.errors import FelixError, RequestError, TamperError
from keys.authority import create_authority
from keys.bundle import RegionBundle, sign_bundle
from keys.hybrid import HybridKeyPair
from keys.pin import PIN_BYTES_MAX, Pin, decode_pin, sign_pin
from keys.signing import SigningKey

NOW = 1_764_000_000_000
OWN_KEY, OTHER_KEY = SigningKey.from_seed(b"p" * 32), SigningKey.from_seed(b"o" * 32)


def bundle(region: str, key: SigningKey, mesh: str = "acme") -> RegionBundle:
    return RegionBundle(
        region=region,
        mesh=mesh,
        country="IE",
        jurisdiction="EU",
        issued_ms=NOW,
        root_pem=create_authority(region, mesh, NOW).anchor().root_pem.decode(),
        policy_keys=(key.verify_key.public,),
        receipt_keys=(key.verify_key.public,),
        audit_keys=(),
        import_key=HybridKeyPair.generate().public.encoded,
    )


OWN = bundle("us-east", OWN_KEY)
PIN = Pin(by="us-east", mesh="acme", number=NOW, bundle=sign_bundle(bundle("eu-west", OTHER_KEY), OTHER_KEY))


def test_a_pin_survives_its_file() -> None:
    signed = sign_pin(PIN, OWN_KEY)
    assert decode_pin(signed.encode(), OWN) == signed and signed.bundle.region == "eu-west"


@pytest.mark.parametrize("key", [OTHER_KEY, SigningKey.from_seed(b"x" * 32)])
def test_only_the_regions_own_policy_key_signs_it(key: SigningKey) -> None:
    with pytest.raises(TamperError, match="not signed by a policy key of us-east"):
        decode_pin(sign_pin(PIN, key).encode(), OWN)


def test_whatever_of_it_is_changed_it_is_refused() -> None:
    for field, value in (("number", NOW + 1), ("by", "eu-west"), ("mesh", "other"), ("format", 2)):
        content = json.loads(sign_pin(PIN, OWN_KEY).encode())
        content["pin"][field] = value
        with pytest.raises(FelixError):
            decode_pin(json.dumps(content).encode(), OWN)
    content = json.loads(sign_pin(PIN, OWN_KEY).encode())
    content["pin"]["bundle"]["bundle"]["country"] = "CN"
    with pytest.raises(TamperError):
        decode_pin(json.dumps(content).encode(), OWN)


def test_a_pin_is_of_another_region_of_the_mesh_and_its_bundle_holds() -> None:
    for other in (bundle("us-east", OTHER_KEY), bundle("eu-west", OTHER_KEY, mesh="other")):
        pin = msgspec.structs.replace(PIN, bundle=sign_bundle(other, OTHER_KEY))
        with pytest.raises(RequestError, match="pins other regions of mesh acme"):
            decode_pin(sign_pin(pin, OWN_KEY).encode(), OWN)
    changed = msgspec.structs.replace(PIN.bundle, signature=bytes(64))
    with pytest.raises(TamperError, match="The bundle of eu-west"):
        decode_pin(sign_pin(msgspec.structs.replace(PIN, bundle=changed), OWN_KEY).encode(), OWN)


def test_what_is_no_pin_or_too_large_is_refused_with_a_sentence() -> None:
    for data in (b"", b"{}", b"\xff", PIN.bundle.encode(), bytes(PIN_BYTES_MAX + 1)):
        with pytest.raises(FelixError):
            decode_pin(data, OWN)
