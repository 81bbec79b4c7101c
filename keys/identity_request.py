"""Requests for a certificate (PKCS #10, RFC 2986) by somebody who made their own key: the key, once it is proved. Pure.

Nothing else in a request counts: the name, and how long the certificate holds, are what the region says.
"""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec

from felix.errors import Code, RequestError

_PEM_BEGINS = b"-----BEGIN"


def requested_key(csr: bytes) -> ec.EllipticCurvePublicKey:
    """The key of a request, PEM or DER, whose holder signed it. Raises RequestError(IDENTITY_REFUSED)."""
    try:
        pem = csr.lstrip().startswith(_PEM_BEGINS)
        request = x509.load_pem_x509_csr(csr) if pem else x509.load_der_x509_csr(csr)
        key = request.public_key()
        proved = request.is_signature_valid
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm, InvalidSignature) as error:
        raise RequestError(
            f"The certificate request cannot be read: {error}.", code=Code.IDENTITY_REFUSED
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise RequestError(
            "Identities have keys on P-256, and this one is another.",
            code=Code.IDENTITY_REFUSED,
            hint="Make it with: openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out NAME.key",
        )
    if not proved:
        raise RequestError(
            "The certificate request is not signed with the key that it names.", code=Code.IDENTITY_REFUSED
        )
    return key
