"""Checking of identities: of the proof that opens a session, and of the chain of certificates that somebody shows.

In this order, each refusal with its own sentence:

1. the chain is PEM, leaf first, of at most CHAIN_CERTIFICATES_MAX certificates and CHAIN_BYTES_MAX bytes;
2. the leaf carries exactly one URI name, and that is a SPIFFE id of a kind that is expected here;
3. the root is chosen by that id's trust domain, before anything is verified; without one: WRONG_REGION;
4. every certificate of the chain is within its time at `now`; if not: IDENTITY_EXPIRED;
5. the chain leads to that root, and no other (RFC 5280 paths under the web PKI profile of
   cryptography.x509.verification, client authentication), the leaf being no authority;
6. the signature is by the leaf's key.

Invariant: a `Peer` exists only after all six, or after the first five where no session is proved (`verify_chain`). Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from felix.certificate import RENEWAL_OID, RenewalTerms, parse_renewal
from felix.context import purpose_prefix
from felix.errors import Code
from felix.identity import (
    Binding,
    Proof,
    check_chain_bytes,
    check_chain_length,
    check_root_names,
    refusal,
    sole_id,
    unreadable_root,
)
from felix.names import SESSION_KINDS, SpiffeId, parse_region, trust_domain
from felix.remembered import Remembered, digest_of

SIGNATURE_BYTES_MAX: Final = 80
"""A DER-encoded P-256 signature has at most 72 bytes."""
ROOTS_BYTES_MAX: Final = 1024 * 1024
"""Of root certificates that are held as they were read: of a region and those that it trusts, which every reading of their bundles asks for anew."""

_RENEWAL: Final = x509.ObjectIdentifier(RENEWAL_OID)
_ECDSA: Final = ec.ECDSA(SHA256())
UNREADABLE: Final = (
    ValueError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""The errors that `cryptography` raises on an invalid certificate, often only when a field is read."""


def _ms(time: datetime) -> int:
    return int(time.timestamp() * 1000)


def _iso(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _read_root(pem: bytes) -> tuple[x509.Certificate, list[str]]:
    """The one certificate, and its URI names. Raises one of UNREADABLE."""
    (root,) = x509.load_pem_x509_certificates(pem)
    return root, _uri_names(root)


_roots: Final[Remembered[tuple[x509.Certificate, list[str]]]] = Remembered(ROOTS_BYTES_MAX)


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
        try:
            root, uris = _roots.ask(
                digest_of(self.root_pem), lambda: _read_root(self.root_pem), lambda _: len(self.root_pem)
            )
        except UNREADABLE as error:
            raise unreadable_root(self.region, self.mesh, error) from error
        check_root_names(self.region, self.mesh, uris)
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
                raise refusal(f"Two roots are given for {anchor.trust_domain}.", Code.INVALID)
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


def encode_chain(chain: Iterable[x509.Certificate]) -> bytes:
    """Certificates as PEM, in the order given."""
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in chain)


# -- peers ---------------------------------------------------------------------------------------------


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
        raise refusal(
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
    *,
    exact: bool = False,
) -> Peer:
    """Steps 1 to 5: whose certificate this is, if its region is trusted. The holder of the key is not proved by it. `exact`: the chain is the path to the root, without that,
    in its order, and has no certificate beside it: of a chain that is kept, nobody signed which certificates stand in it.

    Raises RequestError: IDENTITY_REFUSED, IDENTITY_EXPIRED, WRONG_REGION.
    """
    try:
        return _verify_chain(chain_pem, bundle, now_ms, expected_kinds, exact)
    except UNREADABLE as error:
        raise refusal(f"The certificate chain cannot be read: {error}.") from error


def _verify_chain(
    chain_pem: bytes, bundle: TrustBundle, now_ms: int, expected_kinds: Collection[str], exact: bool
) -> Peer:
    chain = _load_chain(chain_pem)
    leaf = chain[0]
    spiffe_id = _leaf_id(leaf)
    if spiffe_id.kind not in expected_kinds:
        raise refusal(
            f"{spiffe_id} is of kind {spiffe_id.kind}; here only {_either(expected_kinds)} may come."
        )
    anchor = bundle.anchor(spiffe_id.trust_domain)
    if anchor is None:
        known = ", ".join(a.trust_domain for a in bundle.anchors()) or "none"
        raise refusal(
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
        path = verifier.verify(leaf, [c for c in chain[1:] if c != anchor.root]).chain
    except VerificationError as error:
        raise refusal(
            f"The certificate of {spiffe_id} was not issued under the root of {anchor.trust_domain}: {error}.",
            hint="If that region made a new authority, take its bundle again and have the identity issued anew.",
        ) from error
    if exact and chain != path[:-1]:
        raise refusal(
            f"The chain of {spiffe_id} is not the path to the root of {anchor.trust_domain} and nothing besides: nobody signed what else stands in it.",
            hint="Take it from the file that the approver wrote.",
        )
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
    check_chain_bytes(pem)
    try:
        chain = x509.load_pem_x509_certificates(pem)
    except UNREADABLE as error:
        raise refusal(f"The certificate chain cannot be read: {error}.") from error
    check_chain_length(len(chain))
    return chain


def _uri_names(certificate: x509.Certificate) -> list[str]:
    """The URI names of a certificate. Raises one of UNREADABLE where its extensions cannot be read."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _leaf_id(leaf: x509.Certificate) -> SpiffeId:
    try:
        uris = _uri_names(leaf)
    except UNREADABLE as error:
        raise refusal(f"The certificate's names cannot be read: {error}.") from error
    return sole_id(uris)


def _renewal(leaf: x509.Certificate) -> RenewalTerms | None:
    """None where it says nothing, as certificates of release 0.1, or nothing that can be read."""
    try:
        found = leaf.extensions.get_extension_for_oid(_RENEWAL).value
    except (x509.ExtensionNotFound, *UNREADABLE):
        return None
    return parse_renewal(found.value) if isinstance(found, x509.UnrecognizedExtension) else None


def _check_time(certificate: x509.Certificate, now: datetime, spiffe_id: SpiffeId) -> None:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    whose = certificate.subject.rfc4514_string()
    if now < start:
        raise refusal(
            f"The certificate {whose} in the chain of {spiffe_id} is valid only from {_iso(start)} on; it is {_iso(now)}.",
            Code.IDENTITY_EXPIRED,
            hint="Compare the clocks of both machines.",
        )
    if now > end:
        raise refusal(
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
        raise refusal(f"The certificate of {spiffe_id} is not one for an identity: {error}.") from error
    if constraints.ca:
        raise refusal(f"The certificate of {spiffe_id} is an authority's; an identity must not be one.")
    if ExtendedKeyUsageOID.CLIENT_AUTH not in usages:
        raise refusal(f"The certificate of {spiffe_id} is not for client authentication.")
    public_key = leaf.public_key()
    if not isinstance(public_key, ec.EllipticCurvePublicKey) or public_key.curve.name != "secp256r1":
        raise refusal(f"The key of {spiffe_id} is not on P-256, which is what Felix issues.")


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
        raise refusal(
            f"Region {region!r} of mesh {mesh!r} is not trusted here.",
            Code.WRONG_REGION,
            hint="Add its bundle.json to the trusted regions, after comparing its fingerprint.",
        )
    return anchor
