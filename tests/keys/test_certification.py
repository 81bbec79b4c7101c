"""A region's authority under an organisation's: which certificates are taken, and what those of other regions cannot do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from organisation import START, Organisation, builder, usage
from transport.recorder import Echo

from felix.errors import Code, RequestError
from felix.identity import Identity
from felix.names import SpiffeId
from felix.peer import TrustBundle, encode_chain, verify_chain
from felix.transport.port import ClientTls, ServerTls, engine_named
from keys.authority import RegionAuthority, create_authority
from keys.certification import certify, load_certification, request_certificate, save_certification

NOW = int(START.timestamp()) * 1000


@cache
def region(name: str) -> RegionAuthority:
    return create_authority(name, "acme", NOW)


@cache
def acme() -> Organisation:
    return Organisation.make()


@cache
def certified(name: str) -> list[x509.Certificate]:
    return certify(region(name), acme().sign(request_certificate(region(name))), NOW)


def broker(name: str) -> Identity:
    domain = f"{name}.acme"
    return region(name).issue_identity(SpiffeId(name, "acme", "broker", "b1"), NOW, dns_names=[domain])


def by_the_organisation(chain: Sequence[x509.Certificate], dns_name: str) -> None:
    """What a tool does that trusts the organisation's root alone."""
    verifier = PolicyBuilder().store(Store([acme().root])).time(START)
    verifier.build_server_verifier(x509.DNSName(dns_name)).verify(chain[0], list(chain[1:]))


def test_a_broker_verifies_under_the_organisations_root_and_under_the_regions_own() -> None:
    identity = broker("us-east")
    chain = x509.load_pem_x509_certificates(identity.chain_pem)
    by_the_organisation([*chain, *certified("us-east")], "us-east.acme")
    own = TrustBundle([region("us-east").anchor()])
    assert verify_chain(identity.chain_pem, own, NOW).spiffe_id == identity.spiffe_id
    with pytest.raises(VerificationError):
        by_the_organisation(
            chain, "us-east.acme"
        )  # without the organisation's certificate nothing leads there


def test_the_key_does_not_leave_the_region_and_signs_its_request() -> None:
    request = request_certificate(region("us-east"))
    assert b"PRIVATE" not in request
    asked = x509.load_pem_x509_csr(request)
    assert asked.public_key() == region("us-east").root.public_key() and asked.is_signature_valid
    with pytest.raises(RequestError) as caught:
        request_certificate(region("us-east").without_root_key())
    assert caught.value.code is Code.FORBIDDEN


def replaced(kind: type[Any], value: Any) -> Callable[[Any], Any]:
    return lambda found: value if isinstance(found, kind) else found


WRONG: dict[str, tuple[str, Callable[[], bytes]]] = {
    "of another region's key": (
        "not for the root key of us-east.acme",
        lambda: acme().sign(request_certificate(region("eu-west"))),
    ),
    "under another subject": (
        "us-east.acme root was asked for",
        lambda: acme().sign(request_certificate(region("us-east")), subject="Acme East"),
    ),
    "with another key id": (
        "key id is not the one of the request",
        lambda: asked(x509.SubjectKeyIdentifier, x509.SubjectKeyIdentifier(b"another key's id ...")),
    ),
    "for another region's name": (
        "names spiffe://eu-west.acme; it must name spiffe://us-east.acme",
        lambda: asked(x509.SubjectAlternativeName, names("spiffe://eu-west.acme")),
    ),
    "for two names": (
        "and nothing else",
        lambda: asked(x509.SubjectAlternativeName, names("spiffe://us-east.acme", "spiffe://eu-west.acme")),
    ),
    "that is no authority": (
        "not one of an authority",
        lambda: asked(x509.BasicConstraints, x509.BasicConstraints(False, None)),
    ),
    "with path length 0": (
        "not one of an authority that has another below it",
        lambda: asked(x509.BasicConstraints, x509.BasicConstraints(True, 0)),
    ),
    "that may not sign": ("lacks keyCertSign", lambda: asked(x509.KeyUsage, usage(sign=False))),
    "without name constraints": ("speak for all names", lambda: asked(x509.NameConstraints, None)),
    "with wider name constraints": (
        "speak for acme;",
        lambda: asked(x509.NameConstraints, x509.NameConstraints([x509.DNSName("acme")], None)),
    ),
    "without the region's own names": (
        "would not verify under CN=Acme Corporate Root",
        lambda: asked(x509.NameConstraints, x509.NameConstraints([x509.DNSName("localhost")], None)),
    ),
    "that has expired": (
        "would not verify under CN=Acme Corporate Root",
        lambda: acme().sign(request_certificate(region("us-east")), days=-0.01),
    ),
    "under authorities that allow none so deep": (
        "would not verify under CN=Acme Corporate Root",
        lambda: Organisation.make(path_length=1).sign(request_certificate(region("us-east"))),
    ),
    "without those above it": ("those above it are missing", lambda: first(acme().sign(request_certificate(region("us-east"))))),
    "without the root": (
        "is not issued by",
        lambda: encode_chain(certified("us-east")[:2]),
    ),
    "under a root that only has the name": (
        "is not issued by",
        lambda: encode_chain([*certified("us-east")[:2], Organisation.make().root]),
    ),
    "in a file of something else": ("cannot be read", lambda: b"-----BEGIN CERTIFICATE-----\nbm8=\n-----END CERTIFICATE-----\n"),
}  # fmt: skip


def asked(kind: type[Any], value: Any) -> bytes:
    return acme().sign(request_certificate(region("us-east")), replaced(kind, value))


def names(*uris: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])


def first(chain: bytes) -> bytes:
    return encode_chain(x509.load_pem_x509_certificates(chain)[:1])


@pytest.mark.parametrize("kind", WRONG)
def test_a_certificate_is_refused(kind: str) -> None:
    sentence, chain = WRONG[kind]
    with pytest.raises(RequestError) as caught:
        certify(region("us-east"), chain(), NOW)
    assert caught.value.code is Code.INVALID
    assert sentence in caught.value.sentence, caught.value.sentence


# -- one organisation, two regions, one of which attacks ---------------------------------------------------


def forged(dns_name: str, spiffe_id: str) -> tuple[list[x509.Certificate], Identity]:
    """A broker of us-east as eu-west's authority issues it, with its constraints left aside."""
    attacker = region("eu-west")
    key = ec.generate_private_key(ec.SECP256R1())
    honest = x509.load_pem_x509_certificates(
        attacker.issue(SpiffeId.parse("spiffe://eu-west.acme/broker/b1"), key.public_key(), NOW, dns_names=["eu-west.acme"])
    )[0]  # fmt: skip
    made = builder(
        honest.subject, attacker.issuing.subject, key.public_key(), attacker.issuing_key.public_key(), timedelta(days=1)
    )  # fmt: skip
    for extension in honest.extensions:
        if isinstance(extension.value, x509.AuthorityKeyIdentifier):
            continue
        value = extension.value
        if isinstance(value, x509.SubjectAlternativeName):
            value = x509.SubjectAlternativeName(
                [x509.UniformResourceIdentifier(spiffe_id), x509.DNSName(dns_name)]
            )
        made = made.add_extension(value, extension.critical)
    leaf = made.sign(attacker.issuing_key, SHA256())
    identity = Identity(SpiffeId.parse(spiffe_id), encode_chain([leaf, attacker.issuing]), key)
    return [leaf, attacker.issuing], identity


def test_another_regions_authority_issues_nothing_for_this_one() -> None:
    chain, identity = forged("us-east.acme", "spiffe://us-east.acme/broker/b1")
    both = TrustBundle([region("us-east").anchor(), region("eu-west").anchor()])
    for shown in (identity.chain_pem, encode_chain([*chain, certified("eu-west")[0]])):
        with pytest.raises(RequestError, match="not issued under the root of us-east"):
            verify_chain(shown, both, NOW)
    with pytest.raises(
        VerificationError
    ):  # and the organisation's name constraints say the same to its tools
        by_the_organisation([*chain, *certified("eu-west")], "us-east.acme")
    honest = x509.load_pem_x509_certificates(broker("eu-west").chain_pem)
    by_the_organisation([*honest, *certified("eu-west")], "eu-west.acme")


def test_a_second_authority_that_the_organisation_makes_speaks_for_no_region() -> None:
    second = create_authority("us-east", "acme", NOW)  # the same names, a key that the region never had
    certify(second, acme().sign(request_certificate(second)), NOW)
    identity = second.issue_identity(SpiffeId.parse("spiffe://us-east.acme/operator/operator"), NOW)
    trusted = TrustBundle([region("us-east").anchor()])
    with pytest.raises(RequestError, match="not issued under the root of us-east"):
        verify_chain(identity.chain_pem, trusted, NOW, ("operator",))


@pytest.mark.parametrize("engine", ["qh3", "aioquic"])
async def test_a_broker_shows_both_and_each_client_verifies_by_its_own_root(
    engine: str, tmp_path: Path
) -> None:
    if engine == "aioquic":
        pytest.importorskip("aioquic")
    save_certification(certified("us-east"), tmp_path)
    identity = broker("us-east")
    tls = ServerTls(identity.chain_pem + load_certification(tmp_path), identity.key_pem())
    transport = engine_named(engine)
    listener = await transport.listen("127.0.0.1", 0, tls, Echo)
    try:
        for root in (region("us-east").root, acme().root):
            client = ClientTls(encode_chain([root]), "us-east.acme")
            connection = await transport.connect(*listener.address, client, Echo())
            connection.close(0, "")
        with pytest.raises(RequestError) as caught:
            client = ClientTls(encode_chain([region("eu-west").root]), "us-east.acme")
            await transport.connect(*listener.address, client, Echo())
        assert caught.value.code is Code.IDENTITY_REFUSED
    finally:
        await listener.close("the test is over")


def test_a_region_that_nobody_certified_shows_nothing_more(tmp_path: Path) -> None:
    assert load_certification(tmp_path) == b""
    save_certification(certified("us-east"), tmp_path)
    assert load_certification(tmp_path) == encode_chain(
        certified("us-east")[:2]
    )  # the root is the reader's own
    (tmp_path / "organisation.pem").write_bytes(b"nothing")
    with pytest.raises(RequestError, match="cannot be read"):
        load_certification(tmp_path)
