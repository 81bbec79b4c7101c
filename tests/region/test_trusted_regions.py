"""Whom a broker believes by the pins of its folder, its region's audit log and what it kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from keys.authority import create_authority
from keys.bundle import RegionBundle, SignedBundle, sign_bundle
from keys.hybrid import HybridKeyPair
from keys.pin import UNCOMPARED, Pin, SignedPin, sign_pin
from keys.signing import SigningKey
from region.governance.trusted_regions import Believed, TrustedRegions

NOW = 1_764_000_000_000
OWN_KEY, ONE_KEY, OTHER_KEY = (SigningKey.from_seed(name * 32) for name in (b"p", b"o", b"n"))


def bundle(region: str, key: SigningKey, issued_ms: int = NOW) -> RegionBundle:
    return RegionBundle(
        region=region,
        mesh="acme",
        country="IE",
        jurisdiction="EU",
        issued_ms=issued_ms,
        root_pem=create_authority(region, "acme", NOW).anchor().root_pem.decode(),
        policy_keys=(key.verify_key.public,),
        receipt_keys=(key.verify_key.public,),
        audit_keys=(),
        import_key=HybridKeyPair.generate().public.encoded,
    )


OWN = bundle("us-east", OWN_KEY)
ONE = sign_bundle(bundle("eu-west", ONE_KEY), ONE_KEY)
FOLLOWS = sign_bundle(msgspec.structs.replace(ONE.bundle, issued_ms=NOW + 1), ONE_KEY)
OTHER = sign_bundle(
    msgspec.structs.replace(ONE.bundle, issued_ms=NOW + 2, policy_keys=(OTHER_KEY.verify_key.public,)),
    OTHER_KEY,
)


def pin(of: SignedBundle, number: int = UNCOMPARED) -> SignedPin:
    return sign_pin(Pin(by="us-east", mesh="acme", number=number, bundle=of), OWN_KEY)


def kept_of(found: TrustedRegions) -> Believed:
    """What the broker keeps of eu-west."""
    kept: list[bytes] = []
    found._memory = cast(Any, SimpleNamespace(keep_trusted=kept.append))
    found._kept = {}
    found.read()
    return msgspec.json.decode(kept[0], type=dict[str, Believed])["eu-west"]


def regions(
    logged: Sequence[SignedPin], kept: Believed | None, folder: Sequence[SignedPin] = ()
) -> TrustedRegions:
    store = SimpleNamespace(pins=dict, trusted=dict)
    keep = SimpleNamespace(keep_trusted=lambda kept: None)
    return TrustedRegions(
        OWN, cast(Any, store), dict, lambda logs: None, cast(Any, keep),
        b"" if kept is None else msgspec.json.encode({"eu-west": kept}), signed=folder, logged=logged,
    )  # fmt: skip


@pytest.mark.parametrize("kept", [None, Believed.by(pin(ONE)), Believed.by(pin(OTHER))])
def test_of_two_pins_of_one_number_the_first_of_the_log_holds_whatever_was_kept_or_lies_in_the_folder(
    kept: Believed | None,
) -> None:
    for first, second in permutations((pin(ONE), pin(OTHER))):
        for folder in ((), (first,), (second,)):
            found = regions((first, second), kept, folder)
            assert found.pin_of("eu-west") == first
            assert not found.remember((first, second))
    later = pin(OTHER, UNCOMPARED + 1)
    assert regions((pin(ONE), pin(OTHER), later), kept).pin_of("eu-west") == later


def test_a_pin_that_conflicts_behind_the_one_that_holds_takes_its_bundles_successor_not_back() -> None:
    kept = msgspec.structs.replace(Believed.by(pin(ONE)), bundle=FOLLOWS.bundle)
    for logged in ((pin(ONE), pin(OTHER)), (pin(FOLLOWS), pin(OTHER))):
        found = regions(logged, kept)
        assert found.pin_of("eu-west") == pin(ONE)
        assert not found.remember(logged)
        assert kept_of(found).bundle == FOLLOWS.bundle


def test_trust_that_was_taken_back_under_a_former_key_is_brought_back_by_nothing_that_nobody_compared() -> (
    None
):
    taken_back = sign_pin(
        Pin(format=2, by="us-east", mesh="acme", number=NOW, bundle=ONE, withdrawn=True), OTHER_KEY
    )
    found = regions((pin(ONE),), Believed.by(taken_back), (pin(ONE),))
    assert found.withdrawn == {"eu-west"} and found.pin_of("eu-west") is None
    assert not found.is_later(pin(ONE))
    compared = pin(ONE, UNCOMPARED + 1)
    assert regions((compared,), Believed.by(taken_back)).pin_of("eu-west") == compared
