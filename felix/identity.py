"""Identities, and how a session proves and checks one.

Proof: client and broker each send a nonce in the messages that open the handshake; the client signs the context
`session-proof`: both messages as they crossed, and SHA-256 of the certificate that the server showed in TLS, with the key of
its own certificate (ECDSA P-256, SHA-256), and sends its chain. A proof is good for one session with the holder of one TLS
key, and for what was negotiated in it: it cannot be passed on, nor can version, region or features be changed on the way.

Checking, in this order, each refusal with its own sentence:

1. the chain is PEM, leaf first, of at most CHAIN_CERTIFICATES_MAX certificates and CHAIN_BYTES_MAX bytes;
2. the leaf carries exactly one URI name, and that is a SPIFFE id of a kind that is expected here;
3. the root is chosen by that id's trust domain, before anything is verified; without one: WRONG_REGION;
4. every certificate of the chain is within its time at `now`; if not: IDENTITY_EXPIRED;
5. the chain leads to that root, and no other (RFC 5280 paths under the web PKI profile of
   cryptography.x509.verification, client authentication), the leaf being no authority;
6. the signature is by the leaf's key.

Invariants: a `Peer` exists only after all six; an `Identity` holds a key that fits its certificate.
Pure, `load_identity` and `save_identity` aside, which read and write one file each.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from felix.context import bind, purpose_prefix
from felix.errors import Code, RequestError
from felix.names import SESSION_KINDS, SpiffeId, parse_region, trust_domain

NONCE_BYTES: Final = 32
CHAIN_BYTES_MAX: Final = 16_384
"""A leaf and an issuing certificate take about 2 KiB; the rest is room for long names."""
CHAIN_CERTIFICATES_MAX: Final = 3
"""Leaf, issuing certificate, and the root for those who send it; no deeper authorities exist here."""
SIGNATURE_BYTES_MAX: Final = 80
"""A DER-encoded P-256 signature has at most 72 bytes."""

RENEWAL_OID: Final = x509.ObjectIdentifier("2.25.286865336453683587528284009743863835777")
"""Of the extension in which an issuer says how an identity may renew itself. Under the arc of UUIDs (ITU-T X.667), which needs
no registration; not critical: verifiers that do not know it accept the certificate all the same.
"""
_RENEWAL: Final = re.compile(rb"([1-9][0-9]{0,11}) ([1-9][0-9]{0,9})")

_ECDSA: Final = ec.ECDSA(SHA256())
_ECDSA_SIGN: Final = ec.ECDSA(SHA256(), deterministic_signing=True)
_UNREADABLE: Final = (
    ValueError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""The errors that `cryptography` raises on an invalid certificate, often only when a field is read."""


def _refuse(sentence: str, code: Code = Code.IDENTITY_REFUSED, hint: str = "") -> RequestError:
    return RequestError(sentence, code=code, hint=hint)


def _ms(time: datetime) -> int:
    return int(time.timestamp() * 1000)


def _iso(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


# -- trust ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrustAnchor:
    """One region's root certificate.

    - the certificate says itself whose it is: its one URI name is `spiffe://<region>.<mesh>`.
    """

    region: str
    mesh: str
    root_pem: bytes
    _root: x509.Certificate = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises RequestError(INVALID) where the certificate is not the root of that region."""
        domain = trust_domain(self.region, self.mesh)
        try:
            (root,) = x509.load_pem_x509_certificates(self.root_pem)
            uris = _uri_names(root)
        except _UNREADABLE as error:
            raise _refuse(
                f"The root certificate of {domain} cannot be read: {error}.", Code.INVALID
            ) from error
        if uris != [f"spiffe://{domain}"]:
            raise _refuse(
                f"The root certificate given for {domain} names {', '.join(uris) or 'no trust domain'}.",
                Code.INVALID,
                hint="Take the bundle of that region again, from somebody who runs it.",
            )
        object.__setattr__(self, "_root", root)

    @property
    def trust_domain(self) -> str:
        """`<region>.<mesh>`."""
        return f"{self.region}.{self.mesh}"

    @property
    def root(self) -> x509.Certificate:
        """The parsed certificate."""
        return self._root


class TrustBundle:
    """Trusted root certificates, one per trust domain. An empty set trusts no one."""

    __slots__ = ("_anchors",)

    def __init__(self, anchors: Iterable[TrustAnchor] = ()) -> None:
        self._anchors: dict[str, TrustAnchor] = {}
        for anchor in anchors:
            if anchor.trust_domain in self._anchors:
                raise _refuse(f"Two roots are given for {anchor.trust_domain}.", Code.INVALID)
            self._anchors[anchor.trust_domain] = anchor

    def anchor(self, domain: str) -> TrustAnchor | None:
        """The root of a trust domain, or None where it is not trusted."""
        return self._anchors.get(domain)

    def anchors(self) -> list[TrustAnchor]:
        """All of them, by trust domain."""
        return [self._anchors[domain] for domain in sorted(self._anchors)]

    def trusting(self, anchor: TrustAnchor) -> TrustBundle:
        """This bundle with one more region."""
        return TrustBundle([*self._anchors.values(), anchor])


class RenewalTerms(NamedTuple):
    """The renewal terms that the issuer wrote into an identity's certificate: until when it may renew itself (ms since the Unix
    epoch), and how long each certificate of it holds.
    """

    until_ms: int
    lifetime_ms: int


def encode_renewal(terms: RenewalTerms) -> x509.UnrecognizedExtension:
    """The extension: a UTF8String (DER), both times in seconds."""
    text = b"%d %d" % (terms.until_ms // 1000, max(1, terms.lifetime_ms // 1000))
    return x509.UnrecognizedExtension(RENEWAL_OID, bytes((0x0C, len(text))) + text)


def _renewal(leaf: x509.Certificate) -> RenewalTerms | None:
    """None where it says nothing, as certificates of release 0.1, or nothing that can be read."""
    try:
        found = leaf.extensions.get_extension_for_oid(RENEWAL_OID).value
    except (x509.ExtensionNotFound, *_UNREADABLE):
        return None
    raw = found.value if isinstance(found, x509.UnrecognizedExtension) else b""
    match = _RENEWAL.fullmatch(raw[2:])
    if match is None or raw[:2] != bytes((0x0C, len(raw) - 2)):
        return None
    return RenewalTerms(int(match[1]) * 1000, int(match[2]) * 1000)


# -- one's own identity --------------------------------------------------------------------------------


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
        chain = _load_chain(self.chain_pem)
        if _leaf_id(chain[0]) != self.spiffe_id:
            raise _refuse(f"The certificate names {_leaf_id(chain[0])}, not {self.spiffe_id}.")
        if chain[0].public_key() != self.private_key.public_key():
            raise _refuse(
                f"The private key does not fit the certificate of {self.spiffe_id}.",
                hint="Certificate and key must come from the same issuing.",
            )
        object.__setattr__(self, "not_before_ms", max(_ms(c.not_valid_before_utc) for c in chain))
        object.__setattr__(self, "not_after_ms", min(_ms(c.not_valid_after_utc) for c in chain))
        object.__setattr__(self, "renewal", _renewal(chain[0]))

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
    chain = _load_chain(pem)
    try:
        private_key = serialization.load_pem_private_key(pem[max(0, _private_key_at(pem)) :], None)
    except (ValueError, TypeError) as error:
        raise _refuse(f"There is no readable private key beside the certificate: {error}.") from error
    if not isinstance(private_key, ec.EllipticCurvePrivateKey):
        raise _refuse("The private key is not an elliptic-curve key (P-256 is what Felix issues).")
    return Identity(_leaf_id(chain[0]), encode_chain(chain), private_key)


def _private_key_at(pem: bytes) -> int:
    end = pem.find(b"PRIVATE KEY-----")
    return pem.rfind(b"-----BEGIN", 0, end) if end >= 0 else len(pem)


def encode_chain(chain: Iterable[x509.Certificate]) -> bytes:
    """Certificates as PEM, in the order given."""
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in chain)


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


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody whose identity was proved; `not_after_ms` is when the proof ends, and the session with it."""

    spiffe_id: SpiffeId
    public_key: ec.EllipticCurvePublicKey = field(compare=False)
    not_after_ms: int
    not_before_ms: int = 0
    renewal: RenewalTerms | None = None

    def signed(self, purpose: str, message: bytes, signature: bytes) -> bool:
        """True where `signature` is what `Identity.sign` of this peer gives for `purpose` and `message`."""
        return _verifies(self.public_key, signature, purpose_prefix(purpose) + message)


def verify_peer(
    proof: Proof,
    binding: Binding,
    bundle: TrustBundle,
    now_ms: int,
    expected_kinds: Collection[str] = SESSION_KINDS,
) -> Peer:
    """The identity that sent this proof on the session that `binding` describes: our own messages, our own certificate.

    Raises RequestError: IDENTITY_REFUSED, IDENTITY_EXPIRED, WRONG_REGION.
    """
    peer = verify_chain(proof.chain_pem, bundle, now_ms, expected_kinds)
    if not _verifies(peer.public_key, proof.signature, binding.message()):
        raise _refuse(
            f"The signature of {peer.spiffe_id} is not over this session's messages and this broker's certificate.",
            hint="Connect to the broker itself: a proof that was made for another one, or passed on, is of no use.",
        )
    return peer


def verify_proof(
    proof: Proof,
    binding: Binding,
    bundle: TrustBundle,
    now_ms: int,
    expected_kinds: Collection[str] = SESSION_KINDS,
) -> SpiffeId:
    """`verify_peer`, for those who only need the name."""
    return verify_peer(proof, binding, bundle, now_ms, expected_kinds).spiffe_id


def verify_chain(
    chain_pem: bytes,
    bundle: TrustBundle,
    now_ms: int,
    expected_kinds: Collection[str] = SESSION_KINDS,
) -> Peer:
    """Steps 1 to 5: whose certificate this is, if its region is trusted. The holder of the key is not proved by it.

    Raises RequestError: IDENTITY_REFUSED, IDENTITY_EXPIRED, WRONG_REGION.
    """
    try:
        return _verify_chain(chain_pem, bundle, now_ms, expected_kinds)
    except _UNREADABLE as error:
        raise _refuse(f"The certificate chain cannot be read: {error}.") from error


def _verify_chain(
    chain_pem: bytes, bundle: TrustBundle, now_ms: int, expected_kinds: Collection[str]
) -> Peer:
    chain = _load_chain(chain_pem)
    leaf = chain[0]
    spiffe_id = _leaf_id(leaf)
    if spiffe_id.kind not in expected_kinds:
        raise _refuse(
            f"{spiffe_id} is of kind {spiffe_id.kind}; here only {_either(expected_kinds)} may come."
        )
    anchor = bundle.anchor(spiffe_id.trust_domain)
    if anchor is None:
        known = ", ".join(a.trust_domain for a in bundle.anchors()) or "none"
        raise _refuse(
            f"{spiffe_id} belongs to {spiffe_id.trust_domain}, which is not trusted here (trusted: {known}).",
            Code.WRONG_REGION,
            hint="Use an identity of this region, or have its operator trust the other region's bundle.",
        )
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    for certificate in (*chain, anchor.root):
        _check_time(certificate, now, spiffe_id)
    _check_leaf(leaf, spiffe_id)
    verifier = (
        PolicyBuilder().store(Store([anchor.root])).time(now).max_chain_depth(1).build_client_verifier()
    )
    try:
        verifier.verify(leaf, [c for c in chain[1:] if c != anchor.root])
    except VerificationError as error:
        raise _refuse(
            f"The certificate of {spiffe_id} was not issued under the root of {anchor.trust_domain}: {error}.",
            hint="If that region made a new authority, take its bundle again and have the identity issued anew.",
        ) from error
    public_key = leaf.public_key()
    assert isinstance(public_key, ec.EllipticCurvePublicKey)  # _check_leaf saw to it
    return Peer(
        spiffe_id,
        public_key,
        min(_ms(c.not_valid_after_utc) for c in chain),
        _ms(leaf.not_valid_before_utc),
        _renewal(leaf),
    )


def _either(kinds: Collection[str]) -> str:
    return " or ".join(sorted(kinds)) or "nobody"


def _load_chain(pem: bytes) -> list[x509.Certificate]:
    if len(pem) > CHAIN_BYTES_MAX:
        raise _refuse(f"A certificate chain of {len(pem)} bytes; {CHAIN_BYTES_MAX} are allowed.")
    try:
        chain = x509.load_pem_x509_certificates(pem)
    except _UNREADABLE as error:
        raise _refuse(f"The certificate chain cannot be read: {error}.") from error
    if not 0 < len(chain) <= CHAIN_CERTIFICATES_MAX:
        raise _refuse(f"A chain of {len(chain)} certificates; 1 to {CHAIN_CERTIFICATES_MAX} are allowed.")
    return chain


def _uri_names(certificate: x509.Certificate) -> list[str]:
    """The URI names of a certificate. Raises one of _UNREADABLE where its extensions cannot be read."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _leaf_id(leaf: x509.Certificate) -> SpiffeId:
    try:
        uris = _uri_names(leaf)
    except _UNREADABLE as error:
        raise _refuse(f"The certificate's names cannot be read: {error}.") from error
    if len(uris) != 1:
        raise _refuse(
            f"The certificate carries {len(uris)} URI names; an identity has exactly one, its SPIFFE id."
        )
    try:
        return SpiffeId.parse(uris[0])
    except RequestError as error:
        raise _refuse(error.sentence) from error


def _check_time(certificate: x509.Certificate, now: datetime, spiffe_id: SpiffeId) -> None:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    whose = certificate.subject.rfc4514_string()
    if now < start:
        raise _refuse(
            f"The certificate {whose} in the chain of {spiffe_id} is valid only from {_iso(start)} on; it is {_iso(now)}.",
            Code.IDENTITY_EXPIRED,
            hint="Compare the clocks of both machines.",
        )
    if now > end:
        raise _refuse(
            f"The certificate {whose} in the chain of {spiffe_id} expired at {_iso(end)}.",
            Code.IDENTITY_EXPIRED,
            hint=f"Have it issued anew: felix identity issue {spiffe_id.name} --kind {spiffe_id.kind} "
            f"--region {spiffe_id.region}.",
        )


def _check_leaf(leaf: x509.Certificate, spiffe_id: SpiffeId) -> None:
    """Checks that the web PKI profile leaves open and Felix requires."""
    try:
        extensions = leaf.extensions
        constraints = extensions.get_extension_for_class(x509.BasicConstraints).value
        usages = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound as error:
        raise _refuse(f"The certificate of {spiffe_id} is not one for an identity: {error}.") from error
    if constraints.ca:
        raise _refuse(f"The certificate of {spiffe_id} is an authority's; an identity must not be one.")
    if ExtendedKeyUsageOID.CLIENT_AUTH not in usages:
        raise _refuse(f"The certificate of {spiffe_id} is not for client authentication.")
    public_key = leaf.public_key()
    if not isinstance(public_key, ec.EllipticCurvePublicKey) or public_key.curve.name != "secp256r1":
        raise _refuse(f"The key of {spiffe_id} is not on P-256, which is what Felix issues.")


def _verifies(public_key: ec.EllipticCurvePublicKey, signature: bytes, message: bytes) -> bool:
    if len(signature) > SIGNATURE_BYTES_MAX:
        return False
    try:
        public_key.verify(signature, message, _ECDSA)
    except InvalidSignature:
        return False
    return True


def anchor_for(bundle: TrustBundle, region: str, mesh: str) -> TrustAnchor:
    """The anchor of a region that must be trusted. Raises RequestError(WRONG_REGION)."""
    anchor = bundle.anchor(trust_domain(parse_region(region), parse_region(mesh)))
    if anchor is None:
        raise _refuse(
            f"Region {region!r} of mesh {mesh!r} is not trusted here.",
            Code.WRONG_REGION,
            hint="Add its bundle.json to the trusted regions, after comparing its fingerprint.",
        )
    return anchor
