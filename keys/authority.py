"""A region's certificate authority: a root, an issuing certificate below it, and short-lived identities.

::

    root      CN "<region>.<mesh> root"      URI spiffe://<region>.<mesh>   pathlen 1   10 years
     └ issuing   CN "<region>.<mesh> issuing"                               pathlen 0   1 year
        │        name constraints (critical): DNS names under <region>.<mesh>, localhost, and zones given at creation
        └ identity   CN "<kind>/<name>"      URI spiffe://<region>.<mesh>/<kind>/<name>, DNS names for brokers

All keys are ECDSA P-256 with SHA-256: what both QUIC engines' TLS takes, and what key services have. URI name
constraints are left out because common verifiers refuse or ignore them; felix.identity ties the trust domain to the
root by choosing the root by trust domain instead.

Folder: `root.pem` (certificate), `root.key` (0600; may be taken away and kept offline: only a new issuing certificate
needs it), `issuing.pem` (0600; certificate and key in one file, so that renewing it is one step).

Invariants: identities are issued for this region's trust domain alone, with exactly one URI name, never as an
authority, never to outlive the issuing certificate. `save_authority` never overwrites. Loading and saving block on
the disk; all else is pure, with `now_ms` handed in.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from felix.certificate import RENEWAL_OID, RenewalTerms, encode_renewal
from felix.errors import Code, RequestError
from felix.files import PRIVATE, PUBLIC, create_file, read_file, replace_file, sync_folder
from felix.identity import Identity
from felix.names import SpiffeId, trust_domain
from felix.peer import TrustAnchor, encode_chain

ROOT_LIFETIME: Final = timedelta(days=3650)
ISSUING_LIFETIME: Final = timedelta(days=365)
IDENTITY_LIFETIME: Final = {
    "broker": timedelta(days=7),
    "bridge": timedelta(days=7),
    "client": timedelta(days=30),
    "operator": timedelta(days=30),
    "approver": timedelta(days=30),
}
"""Short, because nothing is revoked: what must end sooner loses its rights. Brokers and bridges run where renewal is
automatic, clients, operators and approvers where somebody may be on holiday."""
CLOCK_SKEW: Final = timedelta(minutes=5)
"""Certificates begin this much earlier, for peers whose clock is behind; a quarter of a life that is shorter than an hour or so."""
BROKER_CLOCK_SKEW: Final = timedelta(days=1)
"""Those of brokers, which hold the issuing key anyway, begin so much earlier, and those that they stand under: a clock that shows another time zone
keeps no peer and no client away."""
DNS_NAMES_MAX: Final = 16

_ROOT_CERTIFICATE: Final = "root.pem"
_ROOT_KEY: Final = "root.key"
_ISSUING: Final = "issuing.pem"


def _time(now_ms: int) -> datetime:
    return datetime.fromtimestamp(now_ms // 1000, UTC)


def _builder(
    subject: str,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    start: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    # RFC 5280 bounds a common name at 64 characters; the URI name is what counts, this one is for people.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[-64:])])


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


@dataclass(frozen=True, slots=True)
class RegionAuthority:
    """The authority of one region. `root_key` is None where it is kept elsewhere."""

    region: str
    mesh: str
    root: x509.Certificate
    issuing: x509.Certificate
    issuing_key: ec.EllipticCurvePrivateKey = field(repr=False, compare=False)
    root_key: ec.EllipticCurvePrivateKey | None = field(repr=False, compare=False)

    @property
    def trust_domain(self) -> str:
        """`<region>.<mesh>`."""
        return f"{self.region}.{self.mesh}"

    def anchor(self) -> TrustAnchor:
        """What others need to verify this region's identities; public."""
        return TrustAnchor(self.region, self.mesh, encode_chain([self.root]))

    def issue(
        self,
        spiffe_id: SpiffeId,
        public_key: ec.EllipticCurvePublicKey,
        now_ms: int,
        *,
        dns_names: Sequence[str] = (),
        lifetime: timedelta | None = None,
        renewal: RenewalTerms | None = None,
    ) -> bytes:
        """A certificate chain, PEM, leaf first, for somebody who made their own key.

        `lifetime` is IDENTITY_LIFETIME of the kind unless given; `renewal` goes into the certificate as it is. Raises RequestError: WRONG_REGION for another trust
        domain, INVALID for names or lifetimes that cannot be, IDENTITY_EXPIRED where the issuing certificate ended, IDENTITY_REFUSED where what is issued would end before that begins.
        """
        if spiffe_id.trust_domain != self.trust_domain:
            raise RequestError(
                f"The authority of {self.trust_domain} does not issue {spiffe_id}.", code=Code.WRONG_REGION
            )
        if dns_names and spiffe_id.kind != "broker":
            raise RequestError(f"Only brokers have DNS names; {spiffe_id} is a {spiffe_id.kind}.")
        if len(dns_names) > DNS_NAMES_MAX:
            raise RequestError(f"{len(dns_names)} DNS names; {DNS_NAMES_MAX} are allowed.")
        if public_key.curve.name != "secp256r1":
            raise RequestError(f"Identities have keys on P-256, not on {public_key.curve.name}.")
        for name in dns_names:
            self._check_zone(name)
        life = IDENTITY_LIFETIME[spiffe_id.kind] if lifetime is None else lifetime
        if life <= timedelta(0):
            raise RequestError(f"A lifetime of {life} is none.")
        now = _time(now_ms)
        if now >= self.issuing.not_valid_after_utc:
            raise RequestError(
                f"The issuing certificate of {self.trust_domain} expired at "
                f"{self.issuing.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}.",
                code=Code.IDENTITY_EXPIRED,
                hint="Renew it with the root key.",
            )
        if now + life <= self.issuing.not_valid_before_utc:
            raise RequestError(
                f"It is {now:%Y-%m-%dT%H:%M:%SZ} by this machine's clock, and the issuing certificate of {self.trust_domain} holds from "
                f"{self.issuing.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ} on.",
                code=Code.IDENTITY_REFUSED,
                hint="Set the clock right.",
            )
        skew = BROKER_CLOCK_SKEW if spiffe_id.kind == "broker" else CLOCK_SKEW
        builder = (
            _builder(
                f"{spiffe_id.kind}/{spiffe_id.name}",
                self.issuing.subject,
                public_key,
                self.issuing_key.public_key(),
                max(now - min(skew, life / 4), self.issuing.not_valid_before_utc),
                min(now + life, self.issuing.not_valid_after_utc),
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.SubjectAlternativeName(
                    [x509.UniformResourceIdentifier(str(spiffe_id)), *(x509.DNSName(n) for n in dns_names)]
                ),
                critical=False,
            )
        )
        if renewal is not None:
            said = x509.UnrecognizedExtension(x509.ObjectIdentifier(RENEWAL_OID), encode_renewal(renewal))
            builder = builder.add_extension(said, critical=False)
        return encode_chain([builder.sign(self.issuing_key, SHA256()), self.issuing])

    def issue_identity(
        self,
        spiffe_id: SpiffeId,
        now_ms: int,
        *,
        dns_names: Sequence[str] = (),
        lifetime: timedelta | None = None,
        renewal: RenewalTerms | None = None,
    ) -> Identity:
        """A new key and its certificate in one. Raises as `issue` does."""
        key = ec.generate_private_key(ec.SECP256R1())
        chain = self.issue(
            spiffe_id, key.public_key(), now_ms, dns_names=dns_names, lifetime=lifetime, renewal=renewal
        )
        return Identity(spiffe_id, chain, key)

    def renew(self, identity: Identity, now_ms: int) -> Identity:
        """The same name and DNS names under a new key and a new time. Raises as `issue` does."""
        leaf = x509.load_pem_x509_certificates(identity.chain_pem)[0]
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return self.issue_identity(
            identity.spiffe_id, now_ms, dns_names=names.get_values_for_type(x509.DNSName)
        )

    def lives(self) -> dict[str, tuple[int, int]]:
        """Beginning and end of the region's own certificates, in ms since the Unix epoch."""
        return {
            name: (
                int(each.not_valid_before_utc.timestamp()) * 1000,
                int(each.not_valid_after_utc.timestamp()) * 1000,
            )
            for name, each in (("root", self.root), ("issuing", self.issuing))
        }

    def issuing_renewal_due(self, now_ms: int) -> bool:
        """True once the issuing certificate has fewer than a third of its time left."""
        start, end = self.issuing.not_valid_before_utc, self.issuing.not_valid_after_utc
        return _time(now_ms) >= end - (end - start) / 3

    def renew_issuing(self, now_ms: int) -> RegionAuthority:
        """A new issuing key and certificate under the same root; identities issued before stay valid.

        Raises RequestError(FORBIDDEN) where the root key is not here.
        """
        if self.root_key is None:
            raise RequestError(
                f"The root key of {self.trust_domain} is not here, and only it can make an issuing certificate.",
                code=Code.FORBIDDEN,
                hint=f"Put {_ROOT_KEY} back beside {_ROOT_CERTIFICATE} for as long as this takes.",
            )
        key = ec.generate_private_key(ec.SECP256R1())
        issuing = _issuing_certificate(
            self.trust_domain, self.root, self.root_key, key.public_key(), self._zones(), now_ms
        )
        return replace(self, issuing=issuing, issuing_key=key)

    def without_root_key(self) -> RegionAuthority:
        """The part that a broker needs to renew identities."""
        return replace(self, root_key=None)

    def _zones(self) -> list[str]:
        constraints = self.issuing.extensions.get_extension_for_class(x509.NameConstraints).value
        return [tree.value for tree in constraints.permitted_subtrees or [] if isinstance(tree, x509.DNSName)]

    def _check_zone(self, name: str) -> None:
        if not any(name == zone or name.endswith(f".{zone}") for zone in self._zones()):
            raise RequestError(
                f"The DNS name {name!r} is outside of what this authority may certify: {', '.join(self._zones())}.",
                hint="Zones are set when a region's authority is created.",
            )


def create_authority(
    region: str, mesh: str, now_ms: int, *, dns_zones: Sequence[str] = ()
) -> RegionAuthority:
    """A new authority for `<region>.<mesh>`; `dns_zones` are where its brokers' DNS names may lie besides.

    Raises RequestError(NAME_INVALID).
    """
    domain = trust_domain(region, mesh)
    now = _time(now_ms)
    root_key = ec.generate_private_key(ec.SECP256R1())
    subject = f"{domain} root"
    root = (
        _builder(
            subject,
            _name(subject),
            root_key.public_key(),
            root_key.public_key(),
            now - BROKER_CLOCK_SKEW,
            now + ROOT_LIFETIME,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://{domain}")]),
            critical=False,
        )
        .sign(root_key, SHA256())
    )
    key = ec.generate_private_key(ec.SECP256R1())
    zones = list(dict.fromkeys([domain, "localhost", *dns_zones]))
    issuing = _issuing_certificate(domain, root, root_key, key.public_key(), zones, now_ms)
    return RegionAuthority(region, mesh, root, issuing, key, root_key)


def _issuing_certificate(
    domain: str,
    root: x509.Certificate,
    root_key: ec.EllipticCurvePrivateKey,
    public_key: ec.EllipticCurvePublicKey,
    zones: Sequence[str],
    now_ms: int,
) -> x509.Certificate:
    now = _time(now_ms)
    return (
        _builder(
            f"{domain} issuing",
            root.subject,
            public_key,
            root_key.public_key(),
            max(now - BROKER_CLOCK_SKEW, root.not_valid_before_utc),
            min(now + ISSUING_LIFETIME, root.not_valid_after_utc),
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(
            x509.NameConstraints(permitted_subtrees=[x509.DNSName(z) for z in zones], excluded_subtrees=None),
            critical=True,
        )
        .sign(root_key, SHA256())
    )


# -- on disk -------------------------------------------------------------------------------------------


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def save_authority(authority: RegionAuthority, folder: Path) -> None:
    """Write a new authority; the folder appears whole or not at all. Blocks on the disk.

    Raises RequestError(ALREADY_EXISTS) where there is one: losing a root means issuing every identity again.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    beside.mkdir(mode=0o700, parents=True)
    try:
        create_file(beside / _ROOT_CERTIFICATE, encode_chain([authority.root]), PUBLIC)
        create_file(beside / _ISSUING, _issuing_pem(authority), PRIVATE)
        if authority.root_key is not None:
            create_file(beside / _ROOT_KEY, _key_pem(authority.root_key), PRIVATE)
        try:
            # Renaming a folder succeeds only where the target is absent or an empty folder.
            beside.rename(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise RequestError(
                f"{folder} holds an authority already; it is not overwritten.",
                code=Code.ALREADY_EXISTS,
                hint="A region keeps its authority for life. Move the folder away only if nothing uses it.",
            ) from None
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def save_issuing(authority: RegionAuthority, folder: Path) -> None:
    """Put a renewed issuing certificate and key in place of the old, in one step. Blocks on the disk."""
    replace_file(folder / _ISSUING, _issuing_pem(authority), PRIVATE)


def _issuing_pem(authority: RegionAuthority) -> bytes:
    return encode_chain([authority.issuing]) + _key_pem(authority.issuing_key)


def load_authority(folder: Path, region: str, mesh: str) -> RegionAuthority:
    """The authority in `folder`, checked to be that of `<region>.<mesh>`. Blocks on the disk.

    Raises RequestError: NOT_FOUND, FORBIDDEN for private files that others may read, INVALID where the parts do not
    belong together.
    """
    domain = trust_domain(region, mesh)
    what = f"the authority of {domain}"
    anchor = TrustAnchor(
        region, mesh, read_file(folder / _ROOT_CERTIFICATE, f"the root certificate of {domain}")
    )
    pem = read_file(folder / _ISSUING, what, private=True)
    root_path = folder / _ROOT_KEY
    root_key = None
    try:
        (issuing,) = x509.load_pem_x509_certificates(pem)
        issuing_key = serialization.load_pem_private_key(pem[pem.rindex(b"-----BEGIN") :], None)
        issuing.verify_directly_issued_by(anchor.root)
        if root_path.exists():
            root_key = serialization.load_pem_private_key(
                read_file(root_path, f"the root key of {domain}", private=True), None
            )
    except (ValueError, TypeError, InvalidSignature) as error:
        raise _broken(folder, domain, str(error) or type(error).__name__) from error
    if not isinstance(issuing_key, ec.EllipticCurvePrivateKey) or (
        issuing_key.public_key() != issuing.public_key()
    ):
        raise _broken(folder, domain, "the issuing key does not fit its certificate")
    if root_key is not None and (
        not isinstance(root_key, ec.EllipticCurvePrivateKey)
        or root_key.public_key() != anchor.root.public_key()
    ):
        raise _broken(folder, domain, "the root key does not fit the root certificate")
    return RegionAuthority(region, mesh, anchor.root, issuing, issuing_key, root_key)


def _broken(folder: Path, domain: str, why: str) -> RequestError:
    return RequestError(
        f"The authority of {domain} in {folder} cannot be used: {why}.",
        code=Code.INVALID,
        hint="Restore the folder from its backup.",
    )
