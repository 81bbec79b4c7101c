"""Identities: what their holder keeps, and how a session's proof is made.

Proof: client and broker each send a nonce in the messages that open the handshake; the client signs the context
`session-proof`: both messages as they crossed, and SHA-256 of the certificate that the server showed in TLS, with the key of
its own certificate (ECDSA P-256, SHA-256), and sends its chain. A proof is good for one session with the holder of one TLS
key, and for what was negotiated in it: it cannot be passed on, nor can version, region or features be changed on the way.
How it is checked stands in felix.peer, which clients do not need.

Invariant: an `Identity` holds a key that fits its certificate. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from felix.certificate import Certificate, RenewalTerms, certificates_pem, read_certificates
from felix.context import bind, purpose_prefix
from felix.errors import Code, RequestError
from felix.names import SpiffeId, trust_domain

NONCE_BYTES: Final = 32
CHAIN_BYTES_MAX: Final = 16_384
"""A leaf and an issuing certificate take about 2 KiB; the rest is room for long names."""
CHAIN_CERTIFICATES_MAX: Final = 3
"""Leaf, issuing certificate, and the root for those who send it; no deeper authorities exist here."""

_ECDSA_SIGN: Final = ec.ECDSA(SHA256(), deterministic_signing=True)


def refusal(sentence: str, code: Code = Code.IDENTITY_REFUSED, hint: str = "") -> RequestError:
    """The error that says why an identity, or a proof of one, is not taken."""
    return RequestError(sentence, code=code, hint=hint)


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody's certificate chain and the private key to it.

    - `chain_pem` is leaf first and includes the issuing certificate; the root is not needed in it;
    - the key is the one that the leaf certifies, and the leaf names `spiffe_id`.
    """

    spiffe_id: SpiffeId
    chain_pem: bytes
    private_key: ec.EllipticCurvePrivateKey = field(repr=False, compare=False)
    not_before_ms: int = field(init=False)
    not_after_ms: int = field(init=False)
    renewal: RenewalTerms | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Raises RequestError(IDENTITY_REFUSED) where chain, key and name do not belong together."""
        chain = _read_chain(self.chain_pem)
        leaf_id = sole_id(chain[0].uris)
        if leaf_id != self.spiffe_id:
            raise refusal(f"The certificate names {leaf_id}, not {self.spiffe_id}.")
        if chain[0].public_key != _public_key_der(self.private_key):
            raise refusal(
                f"The private key does not fit the certificate of {self.spiffe_id}.",
                hint="Certificate and key must come from the same issuing.",
            )
        object.__setattr__(self, "not_before_ms", max(each.not_before_ms for each in chain))
        object.__setattr__(self, "not_after_ms", min(each.not_after_ms for each in chain))
        object.__setattr__(self, "renewal", chain[0].renewal)

    def key_pem(self) -> bytes:
        """The private key, PKCS#8 PEM, not encrypted. For TLS engines and private files only."""
        return self.private_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    @property
    def renewal_due_ms(self) -> int:
        """When two thirds of its time are over: early enough for several tries before it ends."""
        return self.not_before_ms + (self.not_after_ms - self.not_before_ms) * 2 // 3

    def renewal_due(self, now_ms: int) -> bool:
        """True from `renewal_due_ms` on."""
        return now_ms >= self.renewal_due_ms

    def sign(self, purpose: str, message: bytes) -> bytes:
        """ECDSA P-256 with SHA-256, DER, over the prefix of `purpose` and `message`; the same each time (RFC 6979)."""
        return self.private_key.sign(purpose_prefix(purpose) + message, _ECDSA_SIGN)


def parse_identity(pem: bytes) -> Identity:
    """An identity from PEM that holds its chain (leaf first) and its private key.

    Raises RequestError(IDENTITY_REFUSED) with what is missing or does not fit.
    """
    chain = _read_chain(pem)
    try:
        private_key = serialization.load_pem_private_key(pem[max(0, _private_key_at(pem)) :], None)
    except (ValueError, TypeError) as error:
        raise refusal(f"There is no readable private key beside the certificate: {error}.") from error
    if not isinstance(private_key, ec.EllipticCurvePrivateKey):
        raise refusal("The private key is not an elliptic-curve key (P-256 is what Felix issues).")
    return Identity(sole_id(chain[0].uris), certificates_pem(each.der for each in chain), private_key)


def _private_key_at(pem: bytes) -> int:
    end = pem.find(b"PRIVATE KEY-----")
    return pem.rfind(b"-----BEGIN", 0, end) if end >= 0 else len(pem)


def _public_key_der(private_key: ec.EllipticCurvePrivateKey) -> bytes:
    return private_key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _read_chain(pem: bytes) -> list[Certificate]:
    check_chain_bytes(pem)
    try:
        chain = read_certificates(pem)
    except ValueError as error:
        raise refusal(f"The certificate chain cannot be read: {error}.") from error
    check_chain_length(len(chain))
    return chain


def check_chain_bytes(pem: bytes) -> None:
    """Before it is read. Raises RequestError(IDENTITY_REFUSED)."""
    if len(pem) > CHAIN_BYTES_MAX:
        raise refusal(f"A certificate chain of {len(pem)} bytes; {CHAIN_BYTES_MAX} are allowed.")


def check_chain_length(certificates: int) -> None:
    """Raises RequestError(IDENTITY_REFUSED)."""
    if not 0 < certificates <= CHAIN_CERTIFICATES_MAX:
        raise refusal(f"A chain of {certificates} certificates; 1 to {CHAIN_CERTIFICATES_MAX} are allowed.")


def sole_id(uris: list[str]) -> SpiffeId:
    """Whose certificate it is that carries these URI names. Raises RequestError(IDENTITY_REFUSED)."""
    if len(uris) != 1:
        raise refusal(
            f"The certificate carries {len(uris)} URI names; an identity has exactly one, its SPIFFE id."
        )
    try:
        return SpiffeId.parse(uris[0])
    except RequestError as error:
        raise refusal(error.sentence) from error


def check_root_names(region: str, mesh: str, uris: list[str]) -> None:
    """A root says itself whose it is: its one URI name is `spiffe://<region>.<mesh>`. Raises RequestError(INVALID)."""
    domain = trust_domain(region, mesh)
    if uris != [f"spiffe://{domain}"]:
        raise refusal(
            f"The root certificate given for {domain} names {', '.join(uris) or 'no trust domain'}.",
            Code.INVALID,
            hint="Take the bundle of that region again, from somebody who runs it.",
        )


def unreadable_root(region: str, mesh: str, error: Exception) -> RequestError:
    """The error for a root certificate that cannot be read."""
    return refusal(
        f"The root certificate of {trust_domain(region, mesh)} cannot be read: {error}.", Code.INVALID
    )


def check_root(region: str, mesh: str, root_pem: bytes) -> None:
    """Raises RequestError(INVALID) where it is not one certificate, and that region's."""
    try:
        (root,) = read_certificates(root_pem)
    except ValueError as error:
        raise unreadable_root(region, mesh, error) from error
    check_root_names(region, mesh, root.uris)


# -- proof ---------------------------------------------------------------------------------------------


class Proof(msgspec.Struct, frozen=True):
    """The answer: certificate chain (PEM, leaf first) and signature (ECDSA P-256, DER)."""

    chain_pem: bytes
    signature: bytes


class Binding(NamedTuple):
    """The values that one session's proof is bound to.

    `hello` and `challenge`: the bodies of both messages as they crossed, the client's and the broker's, each with 32 random
    bytes of its sender. `leaf_sha256`: of the certificate (DER) that the server showed in the TLS handshake beneath.
    """

    hello: bytes
    challenge: bytes
    leaf_sha256: bytes

    def message(self) -> bytes:
        """The signed bytes."""
        assert len(self.leaf_sha256) == 32  # both engines give it; without it a proof could be passed on
        return bind("session-proof", self.hello, self.challenge, self.leaf_sha256)


def prove(identity: Identity, binding: Binding) -> Proof:
    """The answer to a challenge."""
    return Proof(identity.chain_pem, identity.private_key.sign(binding.message(), _ECDSA_SIGN))
