"""A region's authority: what it issues, what it refuses, and its folder."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from felix.errors import Code, RequestError
from felix.names import IDENTITY_KINDS, SpiffeId
from felix.peer import TrustBundle, verify_chain
from keys.authority import (
    IDENTITY_LIFETIME,
    RegionAuthority,
    create_authority,
    load_authority,
    save_authority,
    save_issuing,
)

NOW = 1_764_000_000_000
DAY = 86_400_000
BROKER = SpiffeId.parse("spiffe://us-east.acme/broker/b1")


@cache
def us_east() -> RegionAuthority:
    return create_authority("us-east", "acme", NOW, dns_zones=["felix.svc.cluster.local"])


def names_of(chain_pem: bytes) -> x509.SubjectAlternativeName:
    leaf = x509.load_pem_x509_certificates(chain_pem)[0]
    return leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


@pytest.mark.parametrize("kind", sorted(IDENTITY_LIFETIME))
def test_each_kind_has_one_uri_name_and_its_own_lifetime(kind: str) -> None:
    spiffe_id = SpiffeId("us-east", "acme", kind, "someone")
    identity = us_east().issue_identity(spiffe_id, NOW)
    assert names_of(identity.chain_pem).get_values_for_type(x509.UniformResourceIdentifier) == [
        str(spiffe_id)
    ]
    assert identity.not_after_ms == NOW + IDENTITY_LIFETIME[kind] / timedelta(milliseconds=1)
    trusted = TrustBundle([us_east().anchor()])
    assert verify_chain(identity.chain_pem, trusted, NOW, IDENTITY_KINDS).spiffe_id == spiffe_id


def test_whoever_made_their_own_key_gets_a_chain_and_gives_no_key_away() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    chain = us_east().issue(SpiffeId.parse("spiffe://us-east.acme/client/c"), key.public_key(), NOW)
    assert b"PRIVATE" not in chain
    assert x509.load_pem_x509_certificates(chain)[0].public_key() == key.public_key()


def test_brokers_have_dns_names_within_the_zones_and_nobody_else_has_any() -> None:
    names = ["b1.us-east.acme", "localhost", "b1.felix.svc.cluster.local"]
    identity = us_east().issue_identity(BROKER, NOW, dns_names=names)
    assert names_of(identity.chain_pem).get_values_for_type(x509.DNSName) == names
    verify_chain(identity.chain_pem, TrustBundle([us_east().anchor()]), NOW)
    with pytest.raises(RequestError, match="outside of what this authority may certify"):
        us_east().issue_identity(BROKER, NOW, dns_names=["b1.eu-west.acme"])
    with pytest.raises(RequestError, match="outside"):
        us_east().issue_identity(BROKER, NOW, dns_names=["evilus-east.acme"])
    with pytest.raises(RequestError, match="Only brokers"):
        us_east().issue_identity(SpiffeId("us-east", "acme", "client", "c"), NOW, dns_names=["localhost"])


def test_it_issues_nothing_for_another_region_or_mesh() -> None:
    for foreign in ("spiffe://eu-west.acme/broker/b1", "spiffe://us-east.other/broker/b1"):
        with pytest.raises(RequestError) as caught:
            us_east().issue_identity(SpiffeId.parse(foreign), NOW)
        assert caught.value.code is Code.WRONG_REGION


def test_keys_on_other_curves_and_empty_lifetimes_are_refused() -> None:
    with pytest.raises(RequestError, match="P-256"):
        us_east().issue(BROKER, ec.generate_private_key(ec.SECP384R1()).public_key(), NOW)
    with pytest.raises(RequestError, match="lifetime"):
        us_east().issue_identity(BROKER, NOW, lifetime=timedelta(0))


def test_no_identity_outlives_the_issuing_certificate() -> None:
    identity = us_east().issue_identity(BROKER, NOW, lifetime=timedelta(days=9999))
    assert identity.not_after_ms == NOW + 365 * DAY
    with pytest.raises(RequestError) as caught:
        us_east().issue_identity(BROKER, NOW + 365 * DAY)
    assert caught.value.code is Code.IDENTITY_EXPIRED


def test_a_clock_of_long_before_the_authority_is_told() -> None:
    with pytest.raises(RequestError, match="1970-01-01T00:00:00Z by this machine's clock") as caught:
        us_east().issue_identity(BROKER, 0)
    assert caught.value.code is Code.IDENTITY_REFUSED


def test_renewing_keeps_the_names_and_changes_the_key() -> None:
    old = us_east().issue_identity(BROKER, NOW, dns_names=["localhost"])
    new = us_east().renew(old, NOW + 5 * DAY)
    assert new.spiffe_id == old.spiffe_id
    assert names_of(new.chain_pem).get_values_for_type(x509.DNSName) == ["localhost"]
    assert new.not_after_ms == old.not_after_ms + 5 * DAY
    assert new.key_pem() != old.key_pem()


def test_a_renewed_issuing_certificate_needs_the_root_key_and_leaves_identities_valid() -> None:
    bundle = TrustBundle([us_east().anchor()])
    before = us_east().issue_identity(BROKER, NOW)
    assert not us_east().issuing_renewal_due(NOW + 200 * DAY)
    assert us_east().issuing_renewal_due(NOW + 250 * DAY)
    renewed = us_east().renew_issuing(NOW + 250 * DAY)
    after = renewed.issue_identity(BROKER, NOW + 400 * DAY, dns_names=["b.felix.svc.cluster.local"])
    assert verify_chain(before.chain_pem, bundle, NOW + DAY).spiffe_id == BROKER
    assert verify_chain(after.chain_pem, bundle, NOW + 401 * DAY).spiffe_id == BROKER
    with pytest.raises(RequestError, match=r"root key of us-east\.acme is not here"):
        us_east().without_root_key().renew_issuing(NOW)


def test_the_folder_keeps_it_all_and_private_parts_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "us-east" / "authority"
    save_authority(us_east(), folder)
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "root.pem": 0o644,
        "root.key": 0o600,
        "issuing.pem": 0o600,
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    loaded = load_authority(folder, "us-east", "acme")
    identity = loaded.issue_identity(BROKER, NOW)
    verify_chain(identity.chain_pem, TrustBundle([us_east().anchor()]), NOW)
    save_issuing(loaded.renew_issuing(NOW), folder)
    assert load_authority(folder, "us-east", "acme").issuing != us_east().issuing
    assert [path.name for path in folder.parent.iterdir()] == ["authority"]


def test_it_is_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "authority"
    save_authority(us_east(), folder)
    with pytest.raises(RequestError) as caught:
        save_authority(create_authority("us-east", "acme", NOW), folder)
    assert caught.value.code is Code.ALREADY_EXISTS
    assert load_authority(folder, "us-east", "acme").root == us_east().root
    assert [path.name for path in tmp_path.iterdir()] == ["authority"]


def test_it_works_without_its_root_key(tmp_path: Path) -> None:
    folder = tmp_path / "authority"
    save_authority(us_east(), folder)
    (folder / "root.key").unlink()
    loaded = load_authority(folder, "us-east", "acme")
    assert loaded.root_key is None
    assert loaded.issue_identity(BROKER, NOW).spiffe_id == BROKER


def test_a_folder_that_is_missing_open_foreign_or_broken_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "authority"
    with pytest.raises(RequestError) as caught:
        load_authority(folder, "us-east", "acme")
    assert caught.value.code is Code.NOT_FOUND
    save_authority(us_east(), folder)
    with pytest.raises(RequestError, match=r"names spiffe://us-east\.acme"):
        load_authority(folder, "eu-west", "acme")
    (folder / "root.key").chmod(0o644)
    with pytest.raises(RequestError, match="chmod 600"):
        load_authority(folder, "us-east", "acme")
    (folder / "root.key").chmod(0o600)
    (folder / "root.key").write_bytes(b"nothing")
    with pytest.raises(RequestError, match="cannot be used"):
        load_authority(folder, "us-east", "acme")
    (folder / "root.key").unlink()
    save_issuing(create_authority("us-east", "acme", NOW), folder)
    with pytest.raises(RequestError, match="cannot be used"):
        load_authority(folder, "us-east", "acme")


def test_nothing_private_is_shown() -> None:
    assert "PrivateKey" not in repr(us_east())
