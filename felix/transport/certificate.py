"""Why a server's certificate was refused, in one sentence.

The engines verify, and fail closed; this module is asked afterwards and only explains. Pure: `now` comes in.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from cryptography import x509

from felix.errors import Code, RequestError

CHAIN_LENGTH_MAX: Final = 8
"""Certificates looked at from the leaf upwards; ours are two or three."""

_RENEW: Final = "Renew the server's certificate, and check the clocks of both machines."


def explain_refusal(
    chain_der: list[bytes],
    authorities_pem: bytes,
    server_name: str,
    peer: str,
    now: datetime,
    engine_reason: str,
) -> RequestError:
    """The error for a refused certificate: wrong authority, not valid now, wrong name, or else the engine's words.

    `chain_der`: leaf first, as the server sent it. `now`: aware, UTC."""
    try:
        chain = [x509.load_der_x509_certificate(der) for der in chain_der]
        authorities = x509.load_pem_x509_certificates(authorities_pem)
        if not chain:
            return _refused(
                f"The server at {peer} showed no certificate that could be read: {engine_reason}."
            )
        leaf = chain[0]
        if not _reaches(chain, authorities):
            expected = ", ".join(sorted({a.subject.rfc4514_string() for a in authorities}))
            return _refused(
                f"The server at {peer} showed a certificate issued by {leaf.issuer.rfc4514_string()!r}, which no "
                f"trusted authority vouches for; expected one from {expected!r} for {server_name!r}.",
                "Check the address, or import the region's current authority bundle.",
            )
        for certificate in (*chain, *authorities):
            what = "certificate" if certificate is leaf else "authority's certificate"
            if now > certificate.not_valid_after_utc:
                return RequestError(
                    f"The {what} of the server at {peer} expired at {certificate.not_valid_after_utc.isoformat()}; "
                    f"expected one for {server_name!r} that is valid now, {now.isoformat(timespec='seconds')}.",
                    code=Code.IDENTITY_EXPIRED,
                    hint=_RENEW,
                )
            if now < certificate.not_valid_before_utc:
                return RequestError(
                    f"The {what} of the server at {peer} is valid only from "
                    f"{certificate.not_valid_before_utc.isoformat()}; expected one for {server_name!r} that is valid "
                    f"now, {now.isoformat(timespec='seconds')}.",
                    code=Code.IDENTITY_EXPIRED,
                    hint=_RENEW,
                )
        names = _dns_names(leaf)
        if server_name not in names:
            shown = ", ".join(repr(name) for name in names) or "no DNS name"
            return _refused(
                f"The server at {peer} proved to be {shown}; expected {server_name!r}.",
                "Check the address and the region's name.",
            )
    except ValueError as error:
        return _refused(f"The server at {peer} showed a certificate that cannot be read: {error}.")
    return _refused(
        f"The certificate of the server at {peer} was refused: {engine_reason}; expected one for {server_name!r}."
    )


def _refused(sentence: str, hint: str = "") -> RequestError:
    return RequestError(sentence, code=Code.IDENTITY_REFUSED, hint=hint)


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.DNSName)


def _reaches(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    """Whether signatures lead from the leaf to one of the authorities."""
    current = chain[0]
    for _ in range(CHAIN_LENGTH_MAX):
        if current in authorities or any(_issued(current, authority) for authority in authorities):
            return True
        issuer = next((c for c in chain[1:] if c != current and _issued(current, c)), None)
        if issuer is None:
            return False
        current = issuer
    return False


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except Exception:
        # Wrong name, wrong key type, wrong signature: each means "not this one".
        return False
    return True
