"""Packets before a connection: the invariant header, Retry and its tokens, version negotiation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.transport.packet import (
    TOKEN_LIFETIME_MS,
    LongHeader,
    RetryClaim,
    TokenSeal,
    encode_retry,
    encode_version_negotiation,
    read_long_header,
    read_varint,
)

cids = st.binary(max_size=20)
ADDRESS = ("192.0.2.1", 4433)


def test_the_retry_packet_of_rfc_9001_appendix_a_4() -> None:
    header = LongHeader(1, bytes.fromhex("8394c8f03e515708"), b"", True, b"")
    packet = encode_retry(header, bytes.fromhex("f067a5502a4262b5"), b"token", 0x0F)
    assert packet.hex() == ("ff000000010008f067a5502a4262b5746f6b656e04a265ba2eff4d829058fb3f0f2496ba")


@pytest.mark.parametrize(
    ("encoded", "value"),
    [
        ("c2197c5eff14e88c", 151_288_809_941_952_652),
        ("9d7f3e7d", 494_878_333),
        ("7bbd", 15_293),
        ("25", 37),
        ("4025", 37),
    ],
)
def test_the_integers_of_rfc_9000_appendix_a_1(encoded: str, value: int) -> None:
    data = bytes.fromhex(encoded)
    assert read_varint(data, 0) == (value, len(data))
    with pytest.raises(ValueError, match="cut off"):
        read_varint(data[:-1], 0)


@given(cids, cids, st.binary(max_size=60), st.binary(max_size=40))
def test_an_initial_packet_is_read_as_it_was_written(
    destination: bytes, source: bytes, token: bytes, rest: bytes
) -> None:
    data = b"".join(
        (
            b"\xc3\0\0\0\1",
            bytes((len(destination),)),
            destination,
            bytes((len(source),)),
            source,
            bytes((len(token),)),
            token,
            rest,
        )
    )
    assert read_long_header(data) == LongHeader(1, destination, source, True, token)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_header_or_none(data: bytes) -> None:
    header = read_long_header(data)
    assert header is None or len(header.destination_cid) < len(data)


@given(cids, cids, st.integers(2, 2**32 - 1), st.integers(0, 255))
def test_version_negotiation_swaps_the_ids(
    destination: bytes, source: bytes, version: int, random: int
) -> None:
    answer = encode_version_negotiation(LongHeader(version, destination, source, False, b""), random)
    read = read_long_header(answer)
    assert read is not None
    assert (read.version, read.destination_cid, read.source_cid) == (0, source, destination)
    assert answer.endswith(b"\0\0\0\1")


def test_a_token_is_good_for_its_address_and_its_time() -> None:
    seal = TokenSeal(bytes(16))
    claim = RetryClaim(b"original", b"retry-id")
    token = seal.seal(claim, ADDRESS, 1000, b"n" * 12)
    assert seal.open(token, ADDRESS, 1001) == claim
    assert seal.open(token, ADDRESS, 1000 + TOKEN_LIFETIME_MS) is None
    assert seal.open(token, ("192.0.2.2", 4433), 1001) is None
    assert seal.open(token, ("192.0.2.1", 4434), 1001) is None
    assert TokenSeal(b"k" * 16).open(token, ADDRESS, 1001) is None


@given(st.binary(max_size=100))
def test_a_forged_token_is_worth_nothing(token: bytes) -> None:
    assert TokenSeal(bytes(16)).open(token, ADDRESS, 0) is None
