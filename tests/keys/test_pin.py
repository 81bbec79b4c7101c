"""A region's pin of another one: what holds, and what anybody may have changed on the way."""

from __future__ import annotations

import json

import msgspec
import pytest

from felix.errors import FelixError, RequestError, TamperError
from keys.authority import create_authority
from keys.bundle import ISSUED_AHEAD_MS_MAX, RegionBundle, check_not_ahead, sign_bundle
from keys.hybrid import HybridKeyPair
from keys.pin import (
    NUMBER_MAX,
    PIN_BYTES_MAX,
    Pin,
    SignedPin,
    decode_logged,
    decode_pin,
    decode_pins,
    sign_pin,
)
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


def test_no_pin_is_signed_that_nobody_could_read() -> None:
    sign_pin(msgspec.structs.replace(PIN, number=NUMBER_MAX), OWN_KEY)
    for number in (0, NUMBER_MAX + 1):
        with pytest.raises(RequestError, match="not a region's pin"):
            sign_pin(msgspec.structs.replace(PIN, number=number), OWN_KEY)


def test_of_what_a_broker_lists_or_a_log_has_those_count_that_hold() -> None:
    holds, forged = sign_pin(PIN, OWN_KEY), sign_pin(PIN, OTHER_KEY)
    listed = {"eu-west": holds.encode(), "ap-south": holds.encode(), "x": b"{}", "y": forged.encode()}
    assert decode_pins(listed, OWN) == {"eu-west": holds}
    assert decode_logged([forged.encode(), b"", holds.encode()], OWN) == [holds]
    later = sign_pin(msgspec.structs.replace(PIN, number=NOW + 1), OWN_KEY)
    assert later.is_at_least(holds) and holds.is_at_least(holds) and not holds.is_at_least(later)


def test_pins_of_one_number_conflict_where_neither_bundle_follows_the_other() -> None:
    def pinned(of: RegionBundle, key: SigningKey, number: int = 1) -> SignedPin:
        return sign_pin(Pin(by="us-east", mesh="acme", number=number, bundle=sign_bundle(of, key)), OWN_KEY)

    held = PIN.bundle.bundle
    one = pinned(held, OTHER_KEY)
    renewed = pinned(msgspec.structs.replace(held, issued_ms=NOW + 1), OTHER_KEY)
    changed_key = SigningKey.from_seed(b"n" * 32)
    changed = msgspec.structs.replace(held, issued_ms=NOW + 2, policy_keys=(changed_key.verify_key.public,))
    other, later = pinned(changed, changed_key), pinned(changed, changed_key, 2)
    assert not one.conflicts_with(one)
    assert not one.conflicts_with(renewed) and not renewed.conflicts_with(one)
    assert one.conflicts_with(other) and other.conflicts_with(one)
    assert not one.conflicts_with(later) and not later.conflicts_with(one)


def test_a_successor_may_be_ahead_by_minutes() -> None:
    held = PIN.bundle.bundle
    check_not_ahead(held, held.issued_ms - ISSUED_AHEAD_MS_MAX)
    with pytest.raises(RequestError, match="10 minutes ahead of the clock"):
        check_not_ahead(held, held.issued_ms - ISSUED_AHEAD_MS_MAX - 1)
