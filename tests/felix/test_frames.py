"""Frames: however the bytes are cut, the same frames come out; malformed ones are refused before they are kept."""

import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_runs import count

from felix.errors import Code, ProtocolError
from felix.frames import (
    FRAME_HEADER_BYTES,
    NOBODY_LISTENS,
    AppendedBody,
    Credit,
    FrameDecoder,
    FrameType,
    GapBody,
    GapReason,
    decode_appended,
    decode_credit,
    decode_datagrams,
    decode_gap,
    encode_frame,
    trains,
)

BODY = st.binary(max_size=2000)
FRAMES = st.lists(
    st.tuples(
        st.sampled_from([FrameType.BATCH, FrameType.REQUEST, FrameType.TRANSFER]),
        BODY,
        st.integers(0, 2**32 - 1),
    ),
    max_size=12,
)


@settings(max_examples=300)
@given(FRAMES, st.lists(st.integers(1, 700), max_size=60))
def test_frames_come_out_however_the_bytes_are_cut(
    frames: list[tuple[FrameType, bytes, int]], cuts: list[int]
) -> None:
    raw = b"".join(encode_frame(*frame) for frame in frames)
    decoder, got, at = FrameDecoder(), [], 0
    for cut in [*cuts, len(raw)]:
        got += [(f.type, bytes(f.body), f.correlation) for f in decoder.feed(raw[at : at + cut])]
        at += cut
    assert got == frames
    assert decoder.held_bytes == 0
    decoder.finish()


@settings(max_examples=count(1_000, 3_000))
@given(st.lists(st.binary(max_size=64), max_size=8))
def test_any_bytes_decode_or_are_refused_and_nothing_grows(pieces: list[bytes]) -> None:
    decoder = FrameDecoder()
    fed = 0
    try:
        for piece in pieces:
            decoder.feed(piece)
            fed += len(piece)
            assert decoder.held_bytes <= fed
        decoder.finish()
    except ProtocolError as error:
        assert error.code in (Code.FRAME_UNKNOWN, Code.FRAME_TOO_LARGE, Code.FRAME_MALFORMED)


@pytest.mark.parametrize("type_", list(FrameType))
def test_an_oversize_frame_is_refused_from_its_header_alone(type_: FrameType) -> None:
    with pytest.raises(ProtocolError) as refused:
        FrameDecoder().feed(struct.pack(">IBBHI", 1 << 30, type_, 0, 0, 0))
    assert refused.value.code is Code.FRAME_TOO_LARGE


@pytest.mark.parametrize(("flags", "reserved"), [(1, 0), (0, 1), (0x80, 0)])
def test_unknown_flags_are_refused(flags: int, reserved: int) -> None:
    with pytest.raises(ProtocolError) as refused:
        FrameDecoder().feed(struct.pack(">IBBHI", 0, FrameType.PING, flags, reserved, 0))
    assert refused.value.code is Code.FRAME_MALFORMED


def test_a_type_that_does_not_belong_on_the_stream_is_refused() -> None:
    decoder = FrameDecoder(frozenset({FrameType.BATCH}))
    with pytest.raises(ProtocolError) as refused:
        decoder.feed(encode_frame(FrameType.REQUEST, b""))
    assert refused.value.code is Code.FRAME_UNKNOWN


def test_a_stream_that_ends_inside_a_frame_is_refused() -> None:
    decoder = FrameDecoder()
    decoder.feed(encode_frame(FrameType.BATCH, b"abc")[:-1])
    with pytest.raises(ProtocolError, match="inside a frame"):
        decoder.finish()


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_credit_goes_round(subscription: int, limit: int) -> None:
    (frame,) = FrameDecoder().feed(Credit(subscription, limit).encode())
    assert decode_credit(frame.body) == Credit(subscription, limit)


@given(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1))
def test_acknowledgements_go_round(offset: int, time_ms: int, credit: int) -> None:
    (frame,) = FrameDecoder().feed(AppendedBody(offset, time_ms, credit).encode(9))
    assert frame.correlation == 9
    assert decode_appended(frame.body) == AppendedBody(offset, time_ms, credit)


def test_gaps_go_round_and_impossible_ones_are_refused() -> None:
    (frame,) = FrameDecoder().feed(GapBody(1, GapReason.RETENTION, 5, 9).encode())
    assert decode_gap(frame.body) == GapBody(1, GapReason.RETENTION, 5, 9)
    for body in (struct.pack(">IIQQ", 1, 1, 9, 9), struct.pack(">IIQQ", 1, 99, 5, 9), b"short"):
        with pytest.raises(ProtocolError):
            decode_gap(memoryview(body))
    assert FRAME_HEADER_BYTES == 12


@given(st.lists(st.sampled_from([1, 40, 1200, 1200, 1252, 1452, 16_384, 65_507]), max_size=40))
def test_datagrams_come_out_of_trains_as_they_went_in(sizes: list[int]) -> None:
    datagrams = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    decoder, out = FrameDecoder(), []
    for train in trains(datagrams):
        (frame,) = decoder.feed(train.encode())
        assert frame.type is FrameType.DATAGRAMS
        out += decode_datagrams(frame.body).split()
    assert out == datagrams
    runs = sum(size != before for size, before in pairwise(sizes)) + bool(sizes)
    whole = sum(sizes) // ((1 << 16) - max(sizes, default=0))
    assert len(list(trains(datagrams))) <= runs + whole, (
        "no more of them than lengths and the size of a frame make"
    )


@pytest.mark.parametrize("body", [b"", b"\x04", b"\x00\x00x", b"\x04\xb0"])
def test_a_train_that_does_not_say_what_it_carries_is_malformed(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="DATAGRAMS frame"):
        decode_datagrams(memoryview(body))


def test_that_nobody_listens_is_a_train_of_none() -> None:
    (frame,) = FrameDecoder().feed(NOBODY_LISTENS.encode())
    assert decode_datagrams(frame.body).split() == []
