"""No ML-DSA-44 public key is read under which anybody's signatures hold: in bundles, policies, and files of witnesses."""

from __future__ import annotations

from base64 import b64encode
from hashlib import shake_256
from random import Random

import msgspec
import pytest
from audit_log import POLICY_SEEDS, key, region_bundle

from audit.note import Algorithm, NoteSigner, VerifierKey
from audit.trust import RegionTrust
from audit.witness_policy import WitnessPolicy
from felix.errors import RequestError
from keys.bundle import AuditKey, SignedBundle, check_bundle, check_update, decode_bundle, sign_bundle
from keys.note_key import ML_DSA_44_TYPE, note_key_id
from keys.post_quantum import ML_DSA_PUBLIC_BYTES, MlDsaKey, check_ml_dsa_public, ml_dsa_holds

RHO = b"r" * 32
EU = region_bundle("eu-west")


def packed(*coefficients: int) -> bytes:
    """A public key; the coefficients of t1 are these, again and again."""
    bits = sum(each << (10 * at) for at, each in enumerate(coefficients * (1_024 // len(coefficients))))
    return RHO + bits.to_bytes(1_280, "little")


def anybody(public: bytes, w1: int, message: bytes) -> bytes:
    """A signature without a private key (FIPS 204, algorithms 3 and 8): z = 0 and no hints, for a w1 that is the same everywhere."""
    mu = shake_256(shake_256(public).digest(64) + b"\0\0" + message).digest(64)
    high = sum(w1 << (6 * at) for at in range(1_024)).to_bytes(768, "little")
    zero = sum(1 << 17 << (18 * at) for at in range(1_024)).to_bytes(2_304, "little")
    return shake_256(mu + high).digest(32) + zero + bytes(84)


NONE_OF_THEM = {
    "0 everywhere": (packed(0), 0, 50),
    "1 at one place of each polynomial": (packed(1, *[0] * 255), 0, 50),
    "1023 everywhere": (packed(1_023), 0, 50),
    "1 at every eighth place": (packed(1, *[0] * 7), 0, 50),
    "half the modulus everywhere": (packed(512), 22, 45),
    "half the modulus, or a little less": (packed(511, 512), 22, 45),
    # Not for every message: whoever signs tries some times.
    "small at random": (packed(*Random(1).choices((0, 0, 0, 1, 1_022), k=1_024)), 0, 1),
}


@pytest.mark.parametrize("named", NONE_OF_THEM)
def test_a_key_under_which_anybody_signs_is_refused_wherever_one_is_read(named: str) -> None:
    public, w1, at_least = NONE_OF_THEM[named]
    assert len(public) == ML_DSA_PUBLIC_BYTES
    messages = [b"message %d" % number for number in range(50)]
    held = sum(ml_dsa_holds(public, message, anybody(public, w1, message)) for message in messages)
    assert held >= at_least
    with pytest.raises(RequestError, match="anybody's signatures hold"):
        check_ml_dsa_public(public)
    # As a witness's file or a policy names it.
    signer = NoteSigner.from_ml_dsa("w.example/x", MlDsaKey.generate())
    vkey = str(signer.key)
    assert VerifierKey.parse(vkey) == signer.key
    with pytest.raises(RequestError):
        VerifierKey("w.example/x", Algorithm.ML_DSA_44, public)
    with pytest.raises(RequestError):
        VerifierKey.parse(as_vkey("w.example/x", public))
    with pytest.raises(RequestError):
        WitnessPolicy.parse(f"witness x {as_vkey('w.example/x', public)}\nquorum x\n".encode())


@pytest.mark.parametrize("kind", ["log", "cosigner"])
def test_no_bundle_is_trusted_newly_with_a_post_quantum_key_by_which_anybody_signs(kind: str) -> None:
    """Nor is one of before that names it taken for more than its other keys."""
    public, _, _ = NONE_OF_THEM["0 everywhere"]
    name = "eu-west.acme/bridge/n" if kind == "log" else "eu-west.acme/witness"
    named = AuditKey(name, kind, public, "ml-dsa-44")  # type: ignore[arg-type]
    bundle = msgspec.structs.replace(EU, issued_ms=EU.issued_ms + 1, audit_keys=(*EU.audit_keys, named))
    policy = key(POLICY_SEEDS["eu-west"])
    with pytest.raises(RequestError, match="anybody's signatures hold"):
        sign_bundle(bundle, policy)
    before = SignedBundle(bundle, policy.sign("region-bundle", bundle.signed_bytes()))
    with pytest.raises(RequestError, match="anybody's signatures hold"):
        check_bundle(before)
    trusted = RegionTrust(decode_bundle(before.encode()).bundle)
    assert (trusted.logs, trusted.witnesses) == (RegionTrust(EU).logs, RegionTrust(EU).witnesses)


def test_keys_that_were_made_by_the_standard_are_taken() -> None:
    for number in range(50):
        made = MlDsaKey.from_seed(bytes([number]) * 32)
        check_ml_dsa_public(made.public)
        assert not ml_dsa_holds(made.public, b"m", anybody(made.public, 0, b"m"))
    assert VerifierKey("x", Algorithm.ML_DSA_44, made.public).public == made.public
    bundle = msgspec.structs.replace(
        EU, issued_ms=EU.issued_ms + 1,
        audit_keys=(*EU.audit_keys, AuditKey("eu-west.acme/bridge/n", "log", made.public, "ml-dsa-44")),
    )  # fmt: skip
    check_update(EU, sign_bundle(bundle, key(POLICY_SEEDS["eu-west"])))


def as_vkey(name: str, public: bytes) -> str:
    key_id = note_key_id(name, ML_DSA_44_TYPE, public)
    return f"{name}+{key_id.hex()}+{b64encode(bytes([ML_DSA_44_TYPE]) + public).decode()}"
