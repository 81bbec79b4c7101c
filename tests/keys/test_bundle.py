"""A region's public bundle."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.errors import Code, FelixError, RequestError, TamperError
from felix.names import SpiffeId
from felix.peer import TrustBundle, verify_chain
from keys.authority import RegionAuthority, create_authority
from keys.bundle import (
    BUNDLE_BYTES_MAX,
    AuditKey,
    FormerKeys,
    KeyEnd,
    RegionBundle,
    changes_beyond_fingerprint,
    changes_of,
    check_update,
    decode_bundle,
    sign_bundle,
)
from keys.hybrid import HybridKeyPair
from keys.post_quantum import MlDsaKey
from keys.signing import SigningKey

NOW = 1_764_000_000_000
POLICY = SigningKey.from_seed(b"p" * 32)
PAIR = HybridKeyPair.generate()


@cache
def authority(region: str = "eu-west") -> RegionAuthority:
    return create_authority(region, "acme", NOW)


def bundle(**changes: object) -> RegionBundle:
    fields: dict[str, object] = {
        "region": "eu-west",
        "mesh": "acme",
        "country": "IE",
        "jurisdiction": "EU",
        "issued_ms": NOW,
        "root_pem": authority().anchor().root_pem.decode(),
        "policy_keys": (POLICY.verify_key.public,),
        "receipt_keys": (SigningKey.from_seed(b"r" * 32).verify_key.public,),
        "audit_keys": (
            AuditKey("eu-west.acme/ingress", "log", SigningKey.from_seed(b"a" * 32).verify_key.public),
        ),
        "import_key": PAIR.public.encoded,
    }
    return RegionBundle(**(fields | changes))  # type: ignore[arg-type]


def test_a_bundle_survives_its_file_and_its_parts_work() -> None:
    signed = decode_bundle(sign_bundle(bundle(), POLICY).encode())
    assert signed.bundle == bundle()
    identity = authority().issue_identity(SpiffeId.parse("spiffe://eu-west.acme/broker/b1"), NOW)
    assert verify_chain(identity.chain_pem, TrustBundle([signed.bundle.anchor()]), NOW)
    sealed = signed.bundle.hybrid_import_key().seal(b"secret", b"")
    assert PAIR.open(sealed, b"", "it") == b"secret"


def test_a_log_may_have_an_ml_dsa_key_besides_and_bundles_without_keep_their_bytes() -> None:
    plain = bundle().audit_keys[0]
    assert b"algorithm" not in bundle().signed_bytes(), "a bundle of before is signed over the same bytes"
    quantum = AuditKey(plain.name, "log", MlDsaKey.from_seed(b"q" * 32).public, "ml-dsa-44")
    signed = decode_bundle(sign_bundle(bundle(audit_keys=(plain, quantum)), POLICY).encode())
    assert signed.bundle.audit_keys == (plain, quantum)
    for wrong in (
        AuditKey(plain.name, "log", plain.public, "ml-dsa-44"),
        AuditKey(plain.name, "log", quantum.public),
    ):
        with pytest.raises(RequestError):
            sign_bundle(bundle(audit_keys=(wrong,)), POLICY)
    most = tuple(
        AuditKey(f"{plain.name}{at}", "log", MlDsaKey.from_seed(bytes([at]) * 32).public, "ml-dsa-44")
        for at in range(16)
    )
    assert len(sign_bundle(bundle(audit_keys=most), POLICY).encode()) < BUNDLE_BYTES_MAX * 3 // 4


def test_another_layout_of_the_file_is_the_same_bundle() -> None:
    signed = sign_bundle(bundle(), POLICY)
    shuffled = json.dumps(json.loads(signed.encode()), sort_keys=True, indent=7)
    assert decode_bundle(shuffled.encode()) == signed


def test_the_fingerprint_is_for_people_and_stays_while_bridges_come() -> None:
    fingerprint = bundle().fingerprint()
    assert len(fingerprint.split()) == 16
    assert fingerprint == sign_bundle(bundle(), POLICY).bundle.fingerprint()
    bridge = AuditKey("eu-west.acme/bridge/eu-to-us", "log", OTHER)
    later = bundle(issued_ms=NOW + 1, audit_keys=(LOG, bridge))
    assert later.fingerprint() == fingerprint
    assert later.whole_fingerprint() != bundle().whole_fingerprint()
    assert changes_beyond_fingerprint(bundle(), later) == []
    for after in ((LOG,), (LOG, AuditKey(bridge.name, "log", LOG.public)), (LOG, bridge, QUANTUM_BRIDGE)):
        assert bundle(audit_keys=after).fingerprint() == fingerprint
        assert changes_beyond_fingerprint(later, bundle(audit_keys=after))


def test_any_changed_byte_of_the_file_is_refused_or_means_the_same() -> None:
    signed = sign_bundle(bundle(), POLICY)
    data = signed.encode()
    for at in range(0, len(data), 3):
        changed = data[:at] + bytes([data[at] ^ (1 << at % 7)]) + data[at + 1 :]
        try:
            assert decode_bundle(changed) == signed
        except FelixError:
            continue


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"country": "IE\n"}, "not a region's bundle"),
        ({"country": "Ireland"}, "not a region's bundle"),
        ({"jurisdiction": ""}, "not a region's bundle"),
        ({"region": "EU West"}, "region or mesh name"),
        ({"region": "us-east"}, "given for us-east"),
        ({"audit_keys": (AuditKey("us-east.acme/audit", "log", bytes(32)),)}, "which is not its own"),
        ({"audit_keys": (AuditKey("eu-west.other/witness", "cosigner", bytes(32)),)}, "which is not its own"),
        ({"audit_keys": (AuditKey("eu-west.acme", "log", bytes(32)),)}, "which is not its own"),
        ({"root_pem": "nothing"}, "cannot be read"),
        ({"policy_keys": ()}, "policy keys|not a region's bundle"),
        ({"receipt_keys": (b"short",)}, "not a region's bundle"),
        ({"import_key": bytes(1217)}, "hybrid public key"),
        ({"import_key": b"short"}, "not a region's bundle"),
    ],
)
def test_a_bundle_that_does_not_hold_is_not_even_signed(changes: dict[str, object], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        sign_bundle(bundle(**changes), POLICY)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_bundle_are_refused(data: bytes) -> None:
    with pytest.raises(RequestError):
        decode_bundle(data)


def test_files_that_are_too_large_or_have_a_field_too_many_are_refused() -> None:
    with pytest.raises(RequestError, match="are allowed"):
        decode_bundle(bytes(BUNDLE_BYTES_MAX + 1))
    content = json.loads(sign_bundle(bundle(), POLICY).encode())
    content["bundle"]["note"] = "hello"
    with pytest.raises(RequestError, match="note"):
        decode_bundle(json.dumps(content).encode())
    content = json.loads(sign_bundle(bundle(), POLICY).encode())
    for number, why in ((2, "of format 2"), (3, "not a region's bundle")):
        content["bundle"]["format"] = number
        with pytest.raises(RequestError, match=why):
            decode_bundle(json.dumps(content).encode())


def ending(**changes: object) -> RegionBundle:
    """A bundle whose policy key `ended` ended in one log."""
    ended = SigningKey.from_seed(b"e" * 32).verify_key.public
    end = KeyEnd("us-east.acme/bridge/us-to-eu", 5, b"x" * 32)
    fields: dict[str, Any] = {"policy_keys": (ended,), "ends": (end,)}
    return bundle().with_former((FormerKeys(**(fields | changes)),))


def test_former_keys_are_read_and_bundles_without_keep_their_bytes() -> None:
    plain = sign_bundle(bundle(), POLICY).encode()
    assert b"former" not in plain and b'"format": 1' in plain
    signed = decode_bundle(sign_bundle(ending(), POLICY).encode())
    assert signed.bundle == ending() and signed.bundle.format == 2
    assert signed.bundle.with_former(()) == bundle()
    assert ending().fingerprint() != bundle().fingerprint(), "people compare what ended, and where"
    assert (
        len({ending(ends=ends).fingerprint() for ends in ((), (KeyEnd("us-east.acme/audit", 5, b"x" * 32),))})
        == 2
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"policy_keys": ()},
        {"policy_keys": (SigningKey.from_seed(b"e" * 32).verify_key.public,) * 2},
        {"policy_keys": (POLICY.verify_key.public,)},
        {"policy_keys": (bytes(32),)},
        {"ends": (KeyEnd("us-east.acme/audit", 5, b"x" * 32), KeyEnd("us-east.acme/audit", 6, b"y" * 32))},
        {"ends": (KeyEnd("us-east.other/audit", 5, b"x" * 32),)},
        {"ends": (KeyEnd("us-east.acme/audit", 0, b"x" * 32),)},
        {"ends": (KeyEnd("us-east.acme/audit", 5, b"x"),)},
    ],
    ids=["no key", "twice", "of now", "anybody's", "two ends", "another mesh", "size 0", "no root"],
)
def test_former_keys_that_say_nothing_or_two_things_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        sign_bundle(ending(**changes), POLICY)


def test_a_bundle_signed_by_a_key_that_it_does_not_name_is_refused() -> None:
    with pytest.raises(RequestError, match="that it names"):
        sign_bundle(bundle(), SigningKey.generate())
    forged = msgspec.structs.replace(
        sign_bundle(bundle(), POLICY),
        signature=SigningKey.generate().sign("region-bundle", bundle().signed_bytes()),
    )
    with pytest.raises(TamperError):
        decode_bundle(forged.encode())


LOG = AuditKey("eu-west.acme/ingress", "log", SigningKey.from_seed(b"a" * 32).verify_key.public)
OTHER = SigningKey.from_seed(b"o" * 32).verify_key.public
QUANTUM_BRIDGE = AuditKey(
    "eu-west.acme/bridge/eu-to-us", "log", MlDsaKey.from_seed(b"q" * 32).public, "ml-dsa-44"
)


def test_an_update_signed_by_a_trusted_key_may_name_logs_of_new_bridges() -> None:
    first = bundle(
        issued_ms=NOW + 1, audit_keys=(LOG, AuditKey("eu-west.acme/bridge/eu-to-us", "log", OTHER))
    )
    check_update(bundle(), sign_bundle(first, POLICY))
    assert changes_of(bundle(), first) == []


def test_two_keys_for_the_same_checkpoints_are_refused_in_any_bundle() -> None:
    both = bundle(issued_ms=NOW + 1, audit_keys=(LOG, AuditKey(LOG.name, "log", OTHER)))
    with pytest.raises(RequestError, match=r"two keys of eu-west\.acme/ingress for the same checkpoints"):
        check_update(bundle(), sign_bundle(both, POLICY))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"policy_keys": (POLICY.verify_key.public, OTHER)}, "other policy keys"),
        ({"receipt_keys": (OTHER,)}, "other receipt keys"),
        ({"receipt_keys": (SigningKey.from_seed(b"r" * 32).verify_key.public, OTHER)}, "other receipt keys"),
        ({"import_key": HybridKeyPair.generate().public.encoded}, "another import key"),
        ({"country": "CN"}, "another country"),
        ({"jurisdiction": "CN"}, "another jurisdiction"),
        ({"audit_keys": ()}, "no key eu-west.acme/ingress any more"),
        ({"audit_keys": (AuditKey(LOG.name, "log", OTHER),)}, "no key eu-west.acme/ingress any more"),
        (
            {
                "audit_keys": (
                    msgspec.structs.replace(LOG, to_size=10),
                    AuditKey(LOG.name, "log", OTHER, from_size=10),
                )
            },
            "one more key eu-west.acme/ingress",
        ),
        ({"audit_keys": (LOG, AuditKey("eu-west.acme/witness", "cosigner", OTHER))}, "the new witness"),
    ],
)
def test_an_update_that_changes_who_may_speak_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(TamperError, match=says) as caught:
        check_update(bundle(), sign_bundle(bundle(issued_ms=NOW + 1, **changes), POLICY))
    assert "--fingerprint" in caught.value.hint
    assert bundle(**changes).fingerprint() != bundle().fingerprint(), (
        "whatever is refused shows in the fingerprint"
    )


def test_an_update_that_is_old_foreign_or_by_a_stranger_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        check_update(bundle(), sign_bundle(bundle(), POLICY))
    assert caught.value.code is Code.CONFLICT
    foreign = bundle(
        region="us-east", issued_ms=NOW + 1, root_pem=authority("us-east").anchor().root_pem.decode()
    )
    with pytest.raises(RequestError) as caught:
        check_update(bundle(), sign_bundle(foreign, POLICY))
    assert caught.value.code is Code.WRONG_REGION
    stranger = SigningKey.generate()
    with pytest.raises(TamperError):
        check_update(
            bundle(),
            sign_bundle(bundle(issued_ms=NOW + 1, policy_keys=(stranger.verify_key.public,)), stranger),
        )
    other_root = create_authority("eu-west", "acme", NOW).anchor().root_pem.decode()
    with pytest.raises(TamperError, match="another root"):
        check_update(bundle(), sign_bundle(bundle(issued_ms=NOW + 1, root_pem=other_root), POLICY))
