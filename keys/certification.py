"""A region's authority certified by an organisation's: what it asks for, and what it takes.

::

    organisation's root                               the organisation's, wherever it keeps that
     └ ... its intermediate authorities
        └ root of <region>.<mesh>, certified          one key,
          root of <region>.<mesh>, signed by itself   two certificates
           └ issuing └ identity                       as ever (keys.authority)

The anchor that regions trust stays the certificate that the region signed itself. The organisation's root is never one: its
holder can make a second authority of the same name, and so would speak for the region (docs/decisions/0047). Tools that trust
the organisation verify a region's brokers by the other certificate, which brokers show besides.

A certificate is taken only where all of this holds:

1. the file is the region's certificate and those above it, in order, ending with a self-signed root;
2. it is for the region's own root key, under its subject and key id, which certificates below name as their issuer;
3. its one name is `spiffe://<region>.<mesh>`;
4. it is an authority that may have an issuing one below it (path length 1 or more), and may sign certificates;
5. its name constraints keep it to DNS names that the issuing certificate is kept to: no region can speak for another, also
   to those who trust the organisation's root alone;
6. a broker's identity verifies up to the organisation's root, by the path lengths, name constraints and times of each
   certificate on the way, as RFC 5280 has them.

`load_certification` and `save_certification` read and write one file; all else is pure, with `now_ms` handed in.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from felix.errors import Code, RequestError
from felix.files import PUBLIC, read_file, replace_file
from felix.names import SpiffeId
from felix.peer import UNREADABLE, encode_chain
from keys.authority import RegionAuthority

CHAIN_BYTES_MAX: Final = 65_536
"""Four levels of an organisation's authorities with RSA keys take about 8 KiB."""
_FILE: Final = "organisation.pem"


def request_certificate(authority: RegionAuthority) -> bytes:
    """The request (PKCS #10, PEM) for a certificate of the region's root key, with every extension that it is to have.

    Raises RequestError(FORBIDDEN) where the root key is kept elsewhere: it signs the request.
    """
    if authority.root_key is None:
        raise RequestError(
            f"The root key of {authority.trust_domain} is not here, and it signs the request.",
            code=Code.FORBIDDEN,
            hint="Put root.key back beside root.pem for as long as this takes.",
        )
    public_key = authority.root_key.public_key()
    constraints = authority.issuing.extensions.get_extension_for_class(x509.NameConstraints)
    usage = authority.issuing.extensions.get_extension_for_class(x509.KeyUsage)
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(authority.root.subject)
        .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
        .add_extension(usage.value, critical=True)
        .add_extension(constraints.value, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.UniformResourceIdentifier(f"spiffe://{authority.trust_domain}")]
            ),
            critical=False,
        )
        .sign(authority.root_key, SHA256())
        .public_bytes(Encoding.PEM)
    )


def certify(authority: RegionAuthority, chain_pem: bytes, now_ms: int) -> list[x509.Certificate]:
    """The certificates of `chain_pem`, the region's first, where all six steps hold. Raises RequestError(INVALID) with what does not."""
    domain = authority.trust_domain
    try:
        certificate, *above = _load(chain_pem)
        _check_order([certificate, *above])
        _check_certificate(certificate, authority)
    except (x509.ExtensionNotFound, *UNREADABLE) as error:
        raise _refused(f"The certificate for {domain} cannot be read: {error}.") from error
    # 6. what tools will verify
    broker = authority.issue_identity(
        SpiffeId(authority.region, authority.mesh, "broker", "probe"), now_ms, dns_names=[domain]
    )
    leaf, issuing = x509.load_pem_x509_certificates(broker.chain_pem)
    now = datetime.fromtimestamp(now_ms // 1000, UTC)
    verifier = PolicyBuilder().store(Store([above[-1]])).time(now).build_server_verifier(x509.DNSName(domain))
    try:
        verifier.verify(leaf, [issuing, certificate, *above[:-1]])
    except VerificationError as error:
        raise _refused(
            f"A broker of {domain} would not verify under {_subject(above[-1])}: {error}.",
            hint="Each authority above must allow for those below it, and for the region's DNS names.",
        ) from error
    return [certificate, *above]


def _load(chain_pem: bytes) -> list[x509.Certificate]:
    # 1. what the file holds
    if len(chain_pem) > CHAIN_BYTES_MAX:
        raise _refused(f"A file of {len(chain_pem)} bytes; {CHAIN_BYTES_MAX} are allowed.")
    chain = x509.load_pem_x509_certificates(chain_pem)
    if len(chain) < 2:
        raise _refused(
            "The file holds one certificate: those above it are missing.",
            hint="Put the organisation's certificates behind it, its root last.",
        )
    return chain


def _check_order(chain: list[x509.Certificate]) -> None:
    """Each is issued by the next, and the last by itself."""
    for certificate, issuer in zip(chain, [*chain[1:], chain[-1]], strict=True):
        try:
            certificate.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
            raise _refused(
                f"{_subject(certificate)} is not issued by {_subject(issuer)}, which follows it in the file.",
                hint="First the region's certificate, then each one's issuer, at last the organisation's self-signed root.",
            ) from error


def _check_certificate(certificate: x509.Certificate, authority: RegionAuthority) -> None:
    domain = authority.trust_domain
    # 2. whose key
    public_key = certificate.public_key()
    if not isinstance(public_key, ec.EllipticCurvePublicKey) or public_key != authority.root.public_key():
        raise _refused(
            f"The certificate is not for the root key of {domain}.",
            hint="Have the request of `felix region csr` signed; the first certificate in the file is the region's.",
        )
    if certificate.subject != authority.root.subject:
        raise _refused(
            f"The certificate's subject is {_subject(certificate)}; {_subject(authority.root)} was asked for, and "
            "certificates below name that as their issuer."
        )
    extensions = certificate.extensions
    key_id = extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    if key_id != x509.SubjectKeyIdentifier.from_public_key(public_key):
        raise _refused(
            "The certificate's key id is not the one of the request, which certificates below name."
        )
    # 3. whose name
    names = list(extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    if names != [x509.UniformResourceIdentifier(f"spiffe://{domain}")]:
        shown = ", ".join(str(name.value) for name in names) or "nothing"
        raise _refused(f"The certificate names {shown}; it must name spiffe://{domain} and nothing else.")
    # 4. what it may do
    constraints = extensions.get_extension_for_class(x509.BasicConstraints).value
    if not constraints.ca or constraints.path_length == 0:
        raise _refused(
            "The certificate is not one of an authority that has another below it.",
            hint="It needs CA:TRUE and a path length of 1: the request asks for both.",
        )
    if not extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign:
        raise _refused("The certificate may not sign certificates: its key usage lacks keyCertSign.")
    # 5. for which names
    permitted = _permitted(certificate)
    if not permitted or not permitted <= _permitted(authority.issuing):
        shown = ", ".join(sorted(permitted)) or "all names"
        raise _refused(
            f"The certificate lets {domain} speak for {shown}; "
            f"{', '.join(sorted(_permitted(authority.issuing)))} is what it may.",
            hint="Have it signed with the name constraints of the request.",
        )


def _permitted(certificate: x509.Certificate) -> set[str]:
    """The DNS names that an authority is kept to; empty where it is kept to none."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.NameConstraints).value
    except x509.ExtensionNotFound:
        return set()
    return {tree.value for tree in found.permitted_subtrees or () if isinstance(tree, x509.DNSName)}


# -- on disk -------------------------------------------------------------------------------------------


def save_certification(chain: list[x509.Certificate], folder: Path) -> None:
    """Keep the organisation's certificates in the authority's folder, in place of older ones. Blocks on the disk."""
    replace_file(folder / _FILE, encode_chain(chain), PUBLIC)


def load_certification(folder: Path) -> bytes:
    """What brokers show behind their own chain (PEM): the region's certificate and those above it, the root left out.

    Empty where no organisation certified the region. Blocks on the disk. Raises RequestError(INVALID) for a damaged file.
    """
    path = folder / _FILE
    if not path.exists():
        return b""
    try:
        *shown, _ = x509.load_pem_x509_certificates(read_file(path, "the organisation's certificates"))
    except ValueError as error:
        raise _refused(
            f"{path} cannot be read: {error}.", "Take it anew: felix region certify FILE."
        ) from error
    return encode_chain(shown)


def _subject(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string()[:200]


def _refused(sentence: str, hint: str = "") -> RequestError:
    return RequestError(sentence, code=Code.INVALID, hint=hint)
