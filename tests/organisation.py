"""An organisation's certificate authority for tests: an RSA root, as organisations have, and one intermediate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

from felix.peer import encode_chain

START = datetime.now(UTC).replace(microsecond=0)


@dataclass(frozen=True)
class Organisation:
    """An authority with an RSA root, as organisations have, and one intermediate. It signs what is asked for, or otherwise."""

    root_key: rsa.RSAPrivateKey
    root: x509.Certificate
    key: rsa.RSAPrivateKey
    intermediate: x509.Certificate

    @classmethod
    def make(cls, path_length: int = 3) -> Organisation:
        root_key, key = (rsa.generate_private_key(65537, 2048) for _ in range(2))
        root = cls.authority("Acme Corporate Root", root_key, "Acme Corporate Root", root_key, path_length)
        below = cls.authority("Acme Regions", key, "Acme Corporate Root", root_key, path_length - 1)
        return cls(root_key, root, key, below)

    @staticmethod
    def authority(
        name: str, key: rsa.RSAPrivateKey, by: str, by_key: rsa.RSAPrivateKey, length: int
    ) -> x509.Certificate:
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, by)]
        return (
            builder(names[0], names[1], key.public_key(), by_key.public_key(), timedelta(days=3650))
            .add_extension(x509.BasicConstraints(True, length), critical=True)
            .add_extension(usage(), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(by_key, SHA256())
        )

    def sign(
        self,
        request: bytes,
        change: Callable[[Any], Any] = lambda value: value,
        *,
        subject: str = "",
        days: float = 1825,
    ) -> bytes:
        """The chain for a request. `change` alters each extension on the way; None leaves it out."""
        asked = x509.load_pem_x509_csr(request)
        assert asked.is_signature_valid
        named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]) if subject else asked.subject
        made = builder(
            named, self.intermediate.subject, asked.public_key(), self.key.public_key(), timedelta(days=days)
        )
        for extension in asked.extensions:
            value = change(extension.value)
            if value is not None:
                made = made.add_extension(value, extension.critical)
        return encode_chain([made.sign(self.key, SHA256()), self.intermediate, self.root])


def builder(
    subject: x509.Name, issuer: x509.Name, key: Any, issuer_key: Any, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(START - timedelta(hours=1))
        .not_valid_after(START + life)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def usage(sign: bool = True) -> x509.KeyUsage:
    return x509.KeyUsage(False, False, False, False, False, sign, True, False, False)
