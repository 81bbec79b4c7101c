"""Requests for a certificate: the key counts, and whatever else stands there is refused or passed over."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from felix.errors import Code, RequestError
from keys.identity_request import requested_key

_KEY = ec.derive_private_key(7, ec.SECP256R1())
_REQUEST = (
    x509.CertificateSigningRequestBuilder()
    .subject_name(x509.Name([]))
    .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    .sign(_KEY, hashes.SHA256())
    .public_bytes(Encoding.DER)
)
_VERSION = b"\x02\x01\x00"


def test_a_request_of_another_version_is_refused() -> None:
    """RFC 2986 has version 0 alone."""
    assert requested_key(_REQUEST) == _KEY.public_key()
    with pytest.raises(RequestError, match="cannot be read") as caught:
        requested_key(_REQUEST.replace(_VERSION, b"\x02\x01\x02", 1))
    assert caught.value.code is Code.IDENTITY_REFUSED


@given(at=st.integers(0, len(_REQUEST) - 1), by=st.binary(max_size=3), cut=st.integers(0, 3))
def test_a_request_that_was_changed_is_refused_or_names_the_same_key(at: int, by: bytes, cut: int) -> None:
    try:
        assert requested_key(_REQUEST[:at] + by + _REQUEST[at + cut :]) == _KEY.public_key()
    except RequestError as error:
        assert error.code is Code.IDENTITY_REFUSED
