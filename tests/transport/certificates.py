"""Certificates for the transport's tests: an authority, and servers' certificates under it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from felix.transport.port import ServerTls

Kind = Literal["ec", "ed25519"]
PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def _key(kind: Kind) -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1()) if kind == "ec" else ed25519.Ed25519PrivateKey.generate()


def _sign(builder: x509.CertificateBuilder, key: PrivateKey) -> x509.Certificate:
    return builder.sign(key, hashes.SHA256() if isinstance(key, ec.EllipticCurvePrivateKey) else None)


@dataclass(frozen=True)
class Authority:
    """A root that signs servers' certificates, by way of an issuing authority where asked."""

    certificate: x509.Certificate
    key: PrivateKey
    above: tuple[x509.Certificate, ...] = ()

    @classmethod
    def make(cls, name: str = "us-east.acme root", kind: Kind = "ec") -> Authority:
        key = _key(kind)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        return cls(_authority(subject, key, subject, key), key)

    def issuing(self, name: str = "us-east.acme issuing", kind: Kind = "ec") -> Authority:
        key = _key(kind)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = _authority(subject, key, self.certificate.subject, self.key)
        return Authority(made, key, (made,))

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def server(
        self,
        name: str = "b1.us-east.acme",
        *,
        starts: timedelta = timedelta(hours=-1),
        ends: timedelta = timedelta(hours=1),
        kind: Kind = "ec",
    ) -> ServerTls:
        """A certificate with one DNS name and one URI, valid from `starts` to `ends` around now."""
        key = _key(kind)
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a server")]))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + starts)
            .not_valid_after(now + ends)
            .add_extension(
                x509.SubjectAlternativeName(
                    [x509.DNSName(name), x509.UniformResourceIdentifier("spiffe://us-east.acme/broker/b1")]
                ),
                critical=False,
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
        )
        chain = (_sign(builder, self.key), *self.above)
        return ServerTls(
            b"".join(c.public_bytes(Encoding.PEM) for c in chain),
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )


def _authority(
    subject: x509.Name, key: PrivateKey, issuer: x509.Name, issuer_key: PrivateKey
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=False,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=True,
                crl_sign=True,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
        )
    )
    return _sign(builder, issuer_key)
