"""The small reader of certificates says what `cryptography` says of the same bytes, or that it cannot read them."""

import random

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from organisation import Organisation

from felix.certificate import Certificate, RenewalTerms, certificates_pem, read_certificates
from felix.errors import RequestError
from felix.identity import Identity
from felix.names import SpiffeId
from keys.authority import create_authority

NOW_MS = 1_790_000_000_000
DAY_MS = 86_400_000
TERMS = RenewalTerms(NOW_MS + 90 * DAY_MS, 7 * DAY_MS)


def chain() -> list[x509.Certificate]:
    """Leaf, issuing certificate and root of a region; an organisation's authorities, with other keys and extensions."""
    authority = create_authority("us-east", "acme", NOW_MS)
    identity = authority.issue_identity(
        SpiffeId("us-east", "acme", "client", "billing"), NOW_MS, renewal=TERMS
    )
    organisation = Organisation.make()
    return [
        *x509.load_pem_x509_certificates(identity.chain_pem),
        authority.root,
        organisation.intermediate,
        organisation.root,
    ]


CHAIN = chain()


def as_cryptography_reads(certificate: x509.Certificate) -> tuple[int, int, bytes, list[str]]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    return (
        int(certificate.not_valid_before_utc.timestamp() * 1000),
        int(certificate.not_valid_after_utc.timestamp() * 1000),
        certificate.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
        uris,
    )


def as_read(found: Certificate) -> tuple[int, int, bytes, list[str]]:
    return found.not_before_ms, found.not_after_ms, found.public_key, found.uris


def test_every_field_is_the_one_that_cryptography_reads() -> None:
    pem = b"".join(each.public_bytes(serialization.Encoding.PEM) for each in CHAIN)
    key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    found = read_certificates(key + b"some words\n" + pem)
    assert [as_read(each) for each in found] == [as_cryptography_reads(each) for each in CHAIN]
    assert [each.renewal for each in found] == [TERMS, None, None, None, None]
    assert certificates_pem(each.der for each in found) == pem
    assert read_certificates(key) == []


def test_a_changed_certificate_is_read_alike_or_not_at_all() -> None:
    """Not at all: what this reader refuses may be more, since it takes only what DER allows. The key is read as it is written;
    `cryptography` writes the same key anew, in the form that RFC 5480 (section 2.2) asks for.
    """
    chance = random.Random(7)
    der = CHAIN[0].public_bytes(serialization.Encoding.DER)
    key = as_cryptography_reads(CHAIN[0])[2]
    place = slice(der.index(key), der.index(key) + len(key))
    both = 0
    for _ in range(1_500):
        changed = bytearray(der)
        changed[chance.randrange(len(der))] ^= 1 << chance.randrange(8)
        try:
            (found,) = read_certificates(certificates_pem([bytes(changed)]))
            expected = as_cryptography_reads(x509.load_der_x509_certificate(bytes(changed)))
        except Exception:
            continue
        assert found.public_key == bytes(changed[place])
        assert as_read(found._replace(public_key=written_anew(found.public_key))) == expected
        both += 1
    assert both > 300, "most changes are in the signature and the key's serial number"


def written_anew(public_key: bytes) -> bytes:
    return serialization.load_der_public_key(public_key).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def test_a_key_in_a_form_that_must_be_rejected_fits_no_private_key() -> None:
    """`cryptography` reads the hybrid form of a point, which RFC 5480 (section 2.2) has rejected, as if it were the usual one."""
    name = SpiffeId("us-east", "acme", "client", "billing")
    identity = create_authority("us-east", "acme", NOW_MS).issue_identity(name, NOW_MS)
    leaf, *others = read_certificates(identity.chain_pem)
    point = identity.private_key.public_key().public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    )
    hybrid = bytes((6 + point[-1] % 2,)) + point[1:]
    changed = leaf.der.replace(point, hybrid)
    (found,) = read_certificates(certificates_pem([changed]))
    assert found.public_key == leaf.public_key.replace(point, hybrid) != leaf.public_key
    assert as_cryptography_reads(x509.load_der_x509_certificate(changed))[2] == leaf.public_key
    with pytest.raises(RequestError, match="private key does not fit"):
        Identity(name, certificates_pem([changed, *(each.der for each in others)]), identity.private_key)


def test_what_is_cut_or_lengthened_is_a_value_error() -> None:
    der = CHAIN[0].public_bytes(serialization.Encoding.DER)
    pem = certificates_pem([der])
    for damaged in (*(der[:size] for size in range(0, len(der), 7)), der + b"\0"):
        with pytest.raises(ValueError, match=r"a certificate|a field"):
            read_certificates(certificates_pem([damaged]))
    with pytest.raises(ValueError, match="no end"):
        read_certificates(pem[:-30])
    chance = random.Random(8)
    for _ in range(1_500):
        changed = bytearray(der)
        for _ in range(3):
            changed[chance.randrange(len(der))] = chance.randrange(256)
        try:
            read_certificates(certificates_pem([bytes(changed)]))
        except ValueError:
            continue
