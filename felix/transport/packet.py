"""What the driver must know of QUIC packets before a connection exists: the version-independent header,
version negotiation, Retry, and address tokens.

Pure: bytes in, bytes out. Everything else about packets belongs to the engines. Sources: RFC 8999 (the
invariants), RFC 9000 sections 8.1 and 17.2, RFC 9001 section 5.8.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

VERSION_1: Final = 0x00000001
CID_BYTES: Final = 8
"""Length of the connection ids that we give out; a short header does not say it (RFC 8999, section 5.2)."""

CID_BYTES_MAX: Final = 20
"""Longest connection id of version 1 (RFC 9000, section 17.2)."""

INITIAL_CID_BYTES_MIN: Final = 8
"""A client's first destination id is at least this long (RFC 9000, section 7.2)."""

INITIAL_DATAGRAM_BYTES_MIN: Final = 1200
"""A client pads its first datagrams to this; shorter ones are not answered (RFC 9000, section 14.1)."""

PACKET_BYTES_MIN: Final = 21
"""No packet of version 1 that a client sends is shorter (RFC 9000, section 10.3)."""

TOKEN_LIFETIME_MS: Final = 10_000
"""How long a Retry token is good: a round trip and the client's retransmissions, no longer."""

_LONG: Final = 0x80
_TYPE_MASK: Final = 0x30
_TYPE_INITIAL: Final = 0x00
_RETRY_KEY: Final = bytes.fromhex("be0c690b9f66575a1d766b54e368c84e")
_RETRY_NONCE: Final = bytes.fromhex("461599d35d632bf2239825bb")
_TOKEN_PURPOSE: Final = b"felix/retry-token/1"


class LongHeader(NamedTuple):
    """The first packet of a datagram, as far as every QUIC version agrees, plus what version 1 adds."""

    version: int
    destination_cid: bytes
    source_cid: bytes
    is_initial: bool
    token: bytes


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The variable-length integer at `at` and the position after it (RFC 9000, section 16). ValueError if cut."""
    if at >= len(data):
        raise ValueError("integer is cut off")
    size = 1 << (data[at] >> 6)
    if at + size > len(data):
        raise ValueError("integer is cut off")
    value = int.from_bytes(data[at : at + size], "big") & ((1 << (8 * size - 2)) - 1)
    return value, at + size


def read_long_header(data: bytes) -> LongHeader | None:
    """The long header at the start of a datagram, or None where the bytes hold none."""
    if len(data) < 7 or not data[0] & _LONG:
        return None
    version = int.from_bytes(data[1:5], "big")
    at = 5
    ids = []
    for _ in range(2):
        if at >= len(data):
            return None
        size = data[at]
        cid = data[at + 1 : at + 1 + size]
        if len(cid) != size:
            return None
        ids.append(cid)
        at += 1 + size
    if version != VERSION_1:
        return LongHeader(version, ids[0], ids[1], False, b"")
    if len(ids[0]) > CID_BYTES_MAX or len(ids[1]) > CID_BYTES_MAX:
        return None
    if data[0] & _TYPE_MASK != _TYPE_INITIAL:
        return LongHeader(version, ids[0], ids[1], False, b"")
    try:
        size, at = read_varint(data, at)
    except ValueError:
        return None
    token = data[at : at + size]
    if len(token) != size:
        return None
    return LongHeader(version, ids[0], ids[1], True, token)


def encode_version_negotiation(header: LongHeader, unpredictable: int) -> bytes:
    """The answer to a version that we do not speak: ids swapped, then the versions that we do."""
    return b"".join(
        (
            bytes((_LONG | (unpredictable & 0x7F),)),
            b"\0\0\0\0",
            bytes((len(header.source_cid),)),
            header.source_cid,
            bytes((len(header.destination_cid),)),
            header.destination_cid,
            struct.pack(">I", VERSION_1),
        )
    )


def encode_retry(header: LongHeader, source_cid: bytes, token: bytes, unpredictable: int = 0) -> bytes:
    """A Retry packet that answers `header`: the client comes back with `token`, to `source_cid`."""
    packet = b"".join(
        (
            bytes((0xF0 | (unpredictable & 0x0F),)),
            struct.pack(">I", VERSION_1),
            bytes((len(header.source_cid),)),
            header.source_cid,
            bytes((len(source_cid),)),
            source_cid,
            token,
        )
    )
    pseudo = bytes((len(header.destination_cid),)) + header.destination_cid + packet
    return packet + AESGCM(_RETRY_KEY).encrypt(_RETRY_NONCE, b"", pseudo)


class RetryClaim(NamedTuple):
    """What a Retry token vouches for."""

    original_destination_cid: bytes
    retry_source_cid: bytes


class TokenSeal(msgspec.Struct, frozen=True):
    """Makes and checks Retry tokens under a key of 16 random bytes that lives as long as the listener.

    A token is sealed, bound to the client's address, and ends by itself.
    """

    key: bytes

    def seal(self, claim: RetryClaim, address: tuple[str, int], now_ms: int, nonce: bytes) -> bytes:
        plain = b"".join(
            (
                struct.pack(">QB", now_ms + TOKEN_LIFETIME_MS, len(claim.original_destination_cid)),
                claim.original_destination_cid,
                claim.retry_source_cid,
            )
        )
        return nonce + AESGCM(self.key).encrypt(nonce, plain, _bound(address))

    def open(self, token: bytes, address: tuple[str, int], now_ms: int) -> RetryClaim | None:
        """What the token vouches for; None where it is not ours, another address's, or over."""
        if len(token) < 12 + 16 + 9:
            return None
        try:
            plain = AESGCM(self.key).decrypt(token[:12], token[12:], _bound(address))
        except InvalidTag:
            return None
        ends_ms, size = struct.unpack_from(">QB", plain)
        if now_ms >= ends_ms:
            return None
        return RetryClaim(plain[9 : 9 + size], plain[9 + size :])


def _bound(address: tuple[str, int]) -> bytes:
    return b"%s %s %d" % (_TOKEN_PURPOSE, address[0].encode(), address[1])
