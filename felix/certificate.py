"""The fields of a certificate that the holder of an identity needs, read from its DER (RFC 5280, section 4.1): names, times, key, renewal terms.

Who checks somebody else's certificate uses `cryptography` for it, whole (felix.peer). To read one's own takes these few fields, and
a command that only connects does not wait until all of X.509 is imported, which takes longer than its handshake.

Invariants: every field is read within the bytes of the one that holds it; what is not read is not looked into; anything else than
what was expected is a ValueError. Pure.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

RENEWAL_OID: Final = "2.25.286865336453683587528284009743863835777"
"""Of the extension in which an issuer says how an identity may renew itself. Under the arc of UUIDs (ITU-T X.667), which needs
no registration; not critical: verifiers that do not know it accept the certificate all the same.
"""

_BEGIN: Final = b"-----BEGIN CERTIFICATE-----"
_END: Final = b"-----END CERTIFICATE-----"
_LINE_BYTES: Final = 48
"""Of DER in a line of PEM: 64 characters (RFC 7468, section 2)."""
_LENGTH_BYTES_MAX: Final = 2
"""Of a length in DER: up to 65,535 bytes, four times the longest chain."""

_INTEGER: Final = 0x02
_OCTETS: Final = 0x04
_OID: Final = 0x06
_UTF8: Final = 0x0C
_UTC_TIME: Final = 0x17
_TIME: Final = 0x18
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_EXTENSIONS: Final = 0xA3
_URI: Final = 0x86


class RenewalTerms(NamedTuple):
    """The renewal terms that the issuer wrote into an identity's certificate: until when it may renew itself (ms since the Unix
    epoch), and how long each certificate of it holds.
    """

    until_ms: int
    lifetime_ms: int


class Certificate(NamedTuple):
    """One certificate. Times are ms since the Unix epoch; `public_key` is its SubjectPublicKeyInfo, DER."""

    der: bytes
    not_before_ms: int
    not_after_ms: int
    public_key: bytes
    uris: list[str]
    renewal: RenewalTerms | None
    """None where the issuer says nothing, as in certificates of release 0.1, or nothing that can be read."""


class _Element(NamedTuple):
    tag: int
    content: bytes
    whole: bytes


def read_certificates(pem: bytes) -> list[Certificate]:
    """All certificates of a PEM text, in its order; other blocks are skipped. Raises ValueError."""
    found = []
    at = pem.find(_BEGIN)
    while at >= 0:
        end = pem.find(_END, at)
        if end < 0:
            raise ValueError("a certificate has no end")
        found.append(_read(a2b_base64(pem[at + len(_BEGIN) : end])))
        at = pem.find(_BEGIN, end)
    return found


def certificates_pem(certificates: Iterable[bytes]) -> bytes:
    """Certificates (DER) as PEM, in the order given."""
    return b"".join(
        b"%s\n%s%s\n"
        % (
            _BEGIN,
            b"".join(b2a_base64(der[at : at + _LINE_BYTES]) for at in range(0, len(der), _LINE_BYTES)),
            _END,
        )
        for der in certificates
    )


def encode_renewal(terms: RenewalTerms) -> bytes:
    """The value of the extension RENEWAL_OID: a UTF8String (DER), both times in seconds."""
    text = b"%d %d" % (terms.until_ms // 1000, max(1, terms.lifetime_ms // 1000))
    return bytes((_UTF8, len(text))) + text


def _read(der: bytes) -> Certificate:
    whole = _only(der, _SEQUENCE)
    fields = _elements(_next(_elements(whole), _SEQUENCE).content)
    first = next(fields, None)
    if first is not None and first.tag == _VERSION:
        first = next(fields, None)
    if first is None or first.tag != _INTEGER:
        raise ValueError("a certificate has no serial number")
    _next(fields, _SEQUENCE)  # how it is signed
    _next(fields, _SEQUENCE)  # the issuer
    not_before, not_after = (_time_ms(each) for each in _elements(_next(fields, _SEQUENCE).content))
    _next(fields, _SEQUENCE)  # the subject
    public_key = _next(fields, _SEQUENCE).whole
    extensions = {}
    for field in fields:
        if field.tag == _EXTENSIONS:
            for each in _elements(_only(field.content, _SEQUENCE)):
                name, *_, value = _elements(each.content)
                if name.tag != _OID or value.tag != _OCTETS or name.content in extensions:
                    raise ValueError("a certificate has an extension that cannot be read")
                extensions[name.content] = value.content
    return Certificate(
        der,
        not_before,
        not_after,
        public_key,
        _uris(extensions.get(_ALTERNATIVE_NAMES)),
        parse_renewal(extensions.get(_RENEWAL)),
    )


def _elements(data: bytes) -> Iterator[_Element]:
    """The elements that follow each other in `data`."""
    at = 0
    while at < len(data):
        start, size = at + 2, data[at + 1] if at + 1 < len(data) else 0
        if size & 0x80:
            count = size & 0x7F
            start += count
            if not 0 < count <= _LENGTH_BYTES_MAX:
                raise ValueError("a field of a certificate has a length that is not allowed")
            size = int.from_bytes(data[at + 2 : start], "big")
        if start + size > len(data):
            raise ValueError("a field of a certificate ends beyond what holds it")
        yield _Element(data[at], data[start : start + size], data[at : start + size])
        at = start + size


def _next(elements: Iterator[_Element], tag: int) -> _Element:
    found = next(elements, None)
    if found is None or found.tag != tag:
        raise ValueError("a certificate lacks a field")
    return found


def _only(data: bytes, tag: int) -> bytes:
    """The content of the one element that `data` is."""
    elements = _elements(data)
    found = _next(elements, tag)
    if next(elements, None) is not None:
        raise ValueError("a certificate has a field too many")
    return found.content


def _time_ms(element: _Element) -> int:
    """A UTCTime is of 1950 to 2049 (RFC 5280, section 4.1.2.5.1)."""
    text = element.content.decode("ascii")
    if element.tag == _UTC_TIME:
        text = ("20" if text[:2] < "50" else "19") + text
    if element.tag not in (_UTC_TIME, _TIME) or len(text) != 15 or text[14] != "Z" or not text[:14].isdigit():
        raise ValueError("a certificate has a time that cannot be read")
    parts = (text[:4], text[4:6], text[6:8], text[8:10], text[10:12], text[12:14])
    year, month, day, hour, minute, second = map(int, parts)
    return int(datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()) * 1000


def _uris(value: bytes | None) -> list[str]:
    if value is None:
        return []
    return [each.content.decode("ascii") for each in _elements(_only(value, _SEQUENCE)) if each.tag == _URI]


def parse_renewal(value: bytes | None) -> RenewalTerms | None:
    """The terms in a value of the extension RENEWAL_OID; None where there is none, or none that can be read."""
    if value is None or value[:2] != bytes((_UTF8, len(value) - 2)):
        return None
    until, _, lifetime = value[2:].partition(b" ")
    if not _is_natural(until, 12) or not _is_natural(lifetime, 10):
        return None
    return RenewalTerms(int(until) * 1000, int(lifetime) * 1000)


def _is_natural(digits: bytes, most: int) -> bool:
    return digits.isdigit() and not digits.startswith(b"0") and len(digits) <= most


def _oid(text: str) -> bytes:
    """The content of an object identifier (X.690, section 8.19)."""
    first, second, *others = map(int, text.split("."))
    made = bytearray()
    for number in (first * 40 + second, *others):
        low_first = [number & 0x7F]
        while number := number >> 7:
            low_first.append(number & 0x7F | 0x80)
        made += bytes(reversed(low_first))
    return bytes(made)


_ALTERNATIVE_NAMES: Final = _oid("2.5.29.17")
_RENEWAL: Final = _oid(RENEWAL_OID)
