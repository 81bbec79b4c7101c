"""Proving an identity, and the ways in which a proof is refused."""

from __future__ import annotations

import base64
import contextlib
import ssl
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from felix.errors import Code, RequestError
from felix.identity import CHAIN_BYTES_MAX, Binding, Identity, Proof, parse_identity, prove
from felix.identity_file import load_identity, save_identity
from felix.names import SpiffeId
from felix.peer import (
    TrustAnchor,
    TrustBundle,
    anchor_for,
    encode_chain,
    verify_chain,
    verify_peer,
    verify_proof,
)
from keys.authority import RegionAuthority, create_authority

NOW = 1_764_000_000_000
DAY = 86_400_000
ORDERS = SpiffeId.parse("spiffe://us-east.acme/client/orders-svc")


@cache
def authority(region: str) -> RegionAuthority:
    return create_authority(region, "acme", NOW)


@cache
def orders() -> Identity:
    return authority("us-east").issue_identity(ORDERS, NOW)


def trusting(*regions: str) -> TrustBundle:
    return TrustBundle([authority(region).anchor() for region in regions])


def certificate(
    names: Sequence[x509.GeneralName],
    *,
    ca: bool = False,
    usages: Sequence[x509.ObjectIdentifier] = (ExtendedKeyUsageOID.CLIENT_AUTH,),
    public_key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | None = None,
    issuer: RegionAuthority | None = None,
) -> bytes:
    """A chain as no honest authority would issue it, signed by a real one."""
    by = issuer or authority("us-east")
    start = datetime.fromtimestamp(NOW // 1000, UTC)
    key = public_key or orders().private_key.public_key()
    leaf = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")]))
        .issuer_name(by.issuing.subject)
        .public_key(key)
        .serial_number(7)
        .not_valid_before(start - timedelta(hours=1))
        .not_valid_after(start + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca, None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(by.issuing_key.public_key()), critical=False
        )
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(by.issuing_key, SHA256())
    )
    return encode_chain([leaf, by.issuing])


def uri(text: str) -> x509.UniformResourceIdentifier:
    return x509.UniformResourceIdentifier(text)


def refused(code: Code, match: str) -> object:
    class Check:
        def __enter__(self) -> None:
            self._raises = pytest.raises(RequestError, match=match)
            self._caught = self._raises.__enter__()

        def __exit__(self, *exc: object) -> bool:
            handled = self._raises.__exit__(*exc)  # type: ignore[arg-type]
            assert self._caught.value.code is code
            return handled

    return Check()


BINDING = Binding(b"hello", b"challenge", bytes(range(32)))


def test_a_proof_shows_who_sent_it_and_until_when() -> None:
    proof = prove(orders(), BINDING)
    peer = verify_peer(proof, BINDING, trusting("us-east"), NOW)
    assert peer.spiffe_id == ORDERS
    assert peer.not_after_ms == orders().not_after_ms == NOW + 30 * DAY
    assert verify_proof(proof, BINDING, trusting("us-east"), NOW) == ORDERS


def test_a_bridge_of_another_trusted_region_is_known_by_its_own_root() -> None:
    bridge = SpiffeId.parse("spiffe://us-east.acme/bridge/us-to-eu")
    identity = authority("us-east").issue_identity(bridge, NOW)
    both = trusting("us-east", "eu-west")
    assert verify_proof(prove(identity, BINDING), BINDING, both, NOW, {"bridge"}) == bridge


@pytest.mark.parametrize(
    "other",
    [
        BINDING._replace(hello=b"hell"),
        BINDING._replace(challenge=b"another"),
        BINDING._replace(leaf_sha256=bytes(32)),
        Binding(b"hell", b"ochallenge", BINDING.leaf_sha256),
    ],
)
def test_a_proof_for_another_session_or_server_is_refused(other: Binding) -> None:
    proof = prove(orders(), BINDING)
    with refused(Code.IDENTITY_REFUSED, "is not over this session's messages"):
        verify_proof(proof, other, trusting("us-east"), NOW)


def test_a_signature_by_another_key_is_refused() -> None:
    thief = authority("us-east").issue_identity(SpiffeId.parse("spiffe://us-east.acme/client/thief"), NOW)
    stolen = Proof(orders().chain_pem, prove(thief, BINDING).signature)
    with refused(Code.IDENTITY_REFUSED, "signature of spiffe://us-east.acme/client/orders-svc"):
        verify_proof(stolen, BINDING, trusting("us-east"), NOW)


@pytest.mark.parametrize("signature", [b"", b"x", bytes(72), bytes(100_000)])
def test_bytes_that_are_no_signature_are_refused(signature: bytes) -> None:
    with refused(Code.IDENTITY_REFUSED, "signature"):
        verify_proof(Proof(orders().chain_pem, signature), BINDING, trusting("us-east"), NOW)


def test_an_identity_of_a_region_that_is_not_trusted_is_refused_as_such() -> None:
    with refused(Code.WRONG_REGION, r"us-east\.acme, which is not trusted here \(trusted: eu-west\.acme\)"):
        verify_proof(prove(orders(), BINDING), BINDING, trusting("eu-west"), NOW)


def test_an_empty_bundle_trusts_nobody() -> None:
    with refused(Code.WRONG_REGION, "trusted: none"):
        verify_chain(orders().chain_pem, TrustBundle(), NOW)


def test_one_regions_authority_cannot_issue_a_name_of_another() -> None:
    forged = certificate([uri("spiffe://eu-west.acme/operator/root")])
    with refused(Code.IDENTITY_REFUSED, r"not issued under the root of eu-west\.acme"):
        verify_chain(forged, trusting("us-east", "eu-west"), NOW)


def test_another_authority_of_the_same_name_is_refused() -> None:
    impostor = create_authority("us-east", "acme", NOW).issue_identity(ORDERS, NOW)
    with refused(Code.IDENTITY_REFUSED, "not issued under the root"):
        verify_chain(impostor.chain_pem, trusting("us-east"), NOW)


def test_sending_the_root_along_does_not_make_it_trusted() -> None:
    other = create_authority("us-east", "acme", NOW)
    identity = other.issue_identity(ORDERS, NOW)
    with refused(Code.IDENTITY_REFUSED, "not issued under the root"):
        verify_chain(identity.chain_pem + other.anchor().root_pem, trusting("us-east"), NOW)


def test_the_right_root_may_be_sent_along() -> None:
    chain = orders().chain_pem + authority("us-east").anchor().root_pem
    assert verify_chain(chain, trusting("us-east"), NOW).spiffe_id == ORDERS


def test_an_identity_that_ended_or_has_not_begun_is_refused_with_the_time() -> None:
    with refused(Code.IDENTITY_EXPIRED, r"client/orders-svc .*expired at 2025-12-24T"):
        verify_chain(orders().chain_pem, trusting("us-east"), NOW + 31 * DAY)
    with refused(Code.IDENTITY_EXPIRED, "valid only from"):
        verify_chain(orders().chain_pem, trusting("us-east"), NOW - DAY)


def test_an_expired_issuing_certificate_is_refused_too() -> None:
    late = NOW + 365 * DAY - 10 * DAY
    identity = authority("us-east").issue_identity(ORDERS, late)
    assert identity.not_after_ms == NOW + 365 * DAY
    with refused(Code.IDENTITY_EXPIRED, "expired"):
        verify_chain(identity.chain_pem, trusting("us-east"), NOW + 366 * DAY)


def test_a_kind_that_is_not_expected_here_is_refused() -> None:
    with refused(Code.IDENTITY_REFUSED, "is of kind client; here only bridge may come"):
        verify_chain(orders().chain_pem, trusting("us-east"), NOW, {"bridge"})


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ([uri("spiffe://us-east.acme/client/a"), uri("spiffe://us-east.acme/operator/b")], "2 URI names"),
        ([x509.DNSName("b1.us-east.acme")], "0 URI names"),
        ([uri("https://us-east.acme/client/a")], "is not a identity"),
        ([uri("spiffe://us-east.acme/admin/a")], "identity"),
        ([uri("spiffe://US-EAST.acme/client/a")], "region"),
        ([uri("spiffe://us-east.acme/client/a/b")], "identity"),
        ([uri("spiffe://us-east.acme/client/a?x=1")], "identity"),
    ],
    ids=["two", "none", "scheme", "kind", "capitals", "path", "query"],
)
def test_a_certificate_without_exactly_one_spiffe_id_is_refused(
    names: list[x509.GeneralName], match: str
) -> None:
    with refused(Code.IDENTITY_REFUSED, match):
        verify_chain(certificate(names), trusting("us-east"), NOW)


def test_an_authoritys_own_certificate_is_no_identity() -> None:
    with refused(Code.IDENTITY_REFUSED, "authority's"):
        verify_chain(certificate([uri(str(ORDERS))], ca=True), trusting("us-east"), NOW)
    with refused(Code.IDENTITY_REFUSED, "URI names"):
        verify_chain(encode_chain([authority("us-east").issuing]), trusting("us-east"), NOW)


def test_a_certificate_for_servers_only_is_refused() -> None:
    chain = certificate([uri(str(ORDERS))], usages=[ExtendedKeyUsageOID.SERVER_AUTH])
    with refused(Code.IDENTITY_REFUSED, "client authentication"):
        verify_chain(chain, trusting("us-east"), NOW)


def test_a_key_that_felix_does_not_issue_is_refused() -> None:
    chain = certificate([uri(str(ORDERS))], public_key=ec.generate_private_key(ec.SECP384R1()).public_key())
    with refused(Code.IDENTITY_REFUSED, "P-256"):
        verify_chain(chain, trusting("us-east"), NOW)


def test_a_dns_name_outside_of_the_regions_zone_breaks_the_chain() -> None:
    chain = certificate([uri("spiffe://us-east.acme/broker/b1"), x509.DNSName("bank.example")])
    with refused(Code.IDENTITY_REFUSED, "not issued under"):
        verify_chain(chain, trusting("us-east"), NOW)


def test_a_chain_without_its_issuing_certificate_is_refused() -> None:
    leaf = x509.load_pem_x509_certificates(orders().chain_pem)[0]
    with refused(Code.IDENTITY_REFUSED, "not issued under"):
        verify_chain(encode_chain([leaf]), trusting("us-east"), NOW)


@pytest.mark.parametrize(
    "pem", [b"", b"\xff" * 100, b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_bytes_that_are_no_chain_are_refused(pem: bytes) -> None:
    with refused(Code.IDENTITY_REFUSED, "cannot be read"):
        verify_chain(pem, trusting("us-east"), NOW)


def test_chains_are_bounded_before_they_are_parsed() -> None:
    with refused(Code.IDENTITY_REFUSED, f"{CHAIN_BYTES_MAX} are allowed"):
        verify_chain(bytes(CHAIN_BYTES_MAX + 1), trusting("us-east"), NOW)
    with refused(Code.IDENTITY_REFUSED, "4 certificates"):
        verify_chain(orders().chain_pem * 2, trusting("us-east"), NOW)


def test_any_changed_byte_of_a_chain_is_refused() -> None:
    leaf = x509.load_pem_x509_certificates(orders().chain_pem)[0]
    raw = leaf.public_bytes(Encoding.DER)
    issuing = encode_chain([authority("us-east").issuing])
    for at in range(len(raw)):
        changed = raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :]
        pem = b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(changed) + b"-----END CERTIFICATE-----\n"
        with pytest.raises(RequestError):
            verify_chain(pem + issuing, trusting("us-east"), NOW)


def test_signatures_for_one_purpose_do_not_serve_another() -> None:
    peer = verify_chain(orders().chain_pem, trusting("us-east"), NOW)
    signature = orders().sign("transfer", b"message")
    assert peer.signed("transfer", b"message", signature)
    assert not peer.signed("receipt", b"message", signature)
    assert not peer.signed("transfer", b"another", signature)


# -- files ---------------------------------------------------------------------------------------------


def test_an_identity_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "orders-svc.pem"
    save_identity(orders(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    loaded = load_identity(path)
    assert loaded.spiffe_id == ORDERS
    assert loaded.chain_pem == orders().chain_pem
    assert loaded.not_after_ms == orders().not_after_ms
    assert verify_proof(prove(loaded, BINDING), BINDING, trusting("us-east"), NOW) == ORDERS


def test_an_identity_may_stand_in_two_files(tmp_path: Path) -> None:
    chain, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    chain.write_bytes(orders().chain_pem)
    key.write_bytes(orders().key_pem())
    key.chmod(0o600)
    assert load_identity(chain, key).spiffe_id == ORDERS


def test_a_key_that_others_may_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "orders-svc.pem"
    save_identity(orders(), path)
    for mode in (0o640, 0o604, 0o620, 0o644):
        path.chmod(mode)
        with refused(Code.FORBIDDEN, f"mode 0{mode:o}.*chmod 600"):
            load_identity(path)


def test_missing_and_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    with refused(Code.NOT_FOUND, r"nobody\.pem.*does not exist"):
        load_identity(tmp_path / "nobody.pem")
    path = tmp_path / "broken.pem"
    path.write_bytes(orders().chain_pem)
    path.chmod(0o600)
    with refused(Code.IDENTITY_REFUSED, r"broken\.pem has no private key, and there is none beside it"):
        load_identity(path)
    path.write_bytes(orders().key_pem())
    with refused(Code.IDENTITY_REFUSED, r"broken\.pem: .*chain"):
        load_identity(path)


def test_a_key_that_does_not_fit_its_certificate_is_refused() -> None:
    other = authority("us-east").issue_identity(ORDERS, NOW)
    with refused(Code.IDENTITY_REFUSED, "does not fit"):
        parse_identity(orders().chain_pem + other.key_pem())


def test_an_identity_shows_no_private_key_and_says_when_to_renew() -> None:
    assert "PrivateKey" not in repr(orders())
    assert not orders().renewal_due(NOW + 19 * DAY)
    assert orders().renewal_due(NOW + 20 * DAY)


# -- anchors -------------------------------------------------------------------------------------------


def test_an_anchor_must_be_the_root_of_the_region_it_is_given_for() -> None:
    root = authority("us-east").anchor().root_pem
    with refused(Code.INVALID, r"given for eu-west\.acme names spiffe://us-east\.acme"):
        TrustAnchor("eu-west", "acme", root)
    with refused(Code.INVALID, "cannot be read"):
        TrustAnchor("us-east", "acme", b"nothing")
    # What is remembered of a root is no word about whose it is.
    assert TrustAnchor("us-east", "acme", root).root is TrustAnchor("us-east", "acme", root).root
    with refused(Code.INVALID, r"given for eu-west\.acme names spiffe://us-east\.acme"):
        TrustAnchor("eu-west", "acme", root)
    with refused(Code.INVALID, "Two roots"):
        trusting("us-east").trusting(authority("us-east").anchor())


def test_looking_up_a_region_that_is_not_trusted_says_what_to_do() -> None:
    bundle = trusting("us-east")
    assert anchor_for(bundle, "us-east", "acme").region == "us-east"
    with refused(Code.WRONG_REGION, r"bundle\.json"):
        anchor_for(bundle, "eu-west", "acme")


# -- the same certificates in TLS ----------------------------------------------------------------------


def test_a_broker_certificate_serves_tls_under_the_regions_root(tmp_path: Path) -> None:
    now_ms = int(time.time() * 1000)  # TLS goes by the machine's clock
    region = create_authority("us-east", "acme", now_ms)
    broker = region.issue_identity(
        SpiffeId.parse("spiffe://us-east.acme/broker/b1"), now_ms, dns_names=["b1.us-east.acme"]
    )
    save_identity(broker, tmp_path / "b1.pem")
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(tmp_path / "b1.pem")
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    client_context.load_verify_locations(cadata=region.anchor().root_pem.decode())

    def handshake(name: str) -> str | None:
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
        server = server_context.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(6):
            for end in (client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        return client.version()

    assert handshake("b1.us-east.acme") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake("b2.us-east.acme")
