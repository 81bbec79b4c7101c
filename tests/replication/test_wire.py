"""What brokers say to each other survives the way there, and bytes that say something else end the link."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_runs import count
from msgspec.structs import replace
from replication.sealed import batch, entry, position

from felix.batch import Batch
from felix.errors import Code, ProtocolError
from region.cluster.records import ShardId
from region.log.frame import Frame as LogFrame
from region.log.point import LogPoint
from region.replication.history import EpochStart
from region.replication.messages import (
    Action,
    Append,
    Commit,
    Durable,
    Follow,
    LogPlace,
    Placed,
    Placement,
    Probe,
    Status,
)  # fmt: skip
from region.replication.wire import (
    FRAME_HEADER_BYTES,
    PREFACE_BYTES,
    Beat,
    Hello,
    Lane,
    OriginAsked,
    OriginTold,
    PeerDecoder,
    PieceAsked,
    PieceTold,
    Said,
    Told,
    encode,
    encode_beat,
    encode_hello,
    encode_preface,
    frames_from,
    lane_of,
)  # fmt: skip

SHARD = ShardId("0123456789abcdef" * 2, 7)
ELECTION = "00000000000000a1"

points = st.builds(LogPoint, st.integers(0, 1 << 62), st.integers(0, (1 << 32) - 1))
logs = st.integers(0, (1 << 32) - 1)
epochs = st.integers(1, (1 << 32) - 1)
elections = st.binary(min_size=8, max_size=8).map(bytes.hex)
asks = st.integers(0, (1 << 32) - 1)
registrations = st.integers(0, (1 << 53) - 1)
offsets = st.integers(0, (1 << 64) - 1)
folders = st.binary(min_size=16, max_size=16).map(bytes.hex)


@st.composite
def starts(draw: st.DrawFn) -> tuple[EpochStart, ...]:
    numbers = sorted(draw(st.sets(epochs, max_size=16)))
    at = sorted(draw(points) for _ in numbers)
    return tuple(
        EpochStart(number, draw(elections), point) for number, point in zip(numbers, at, strict=True)
    )


@st.composite
def appends(draw: st.DrawFn) -> Append:
    prev = LogPoint(draw(st.integers(0, 1 << 40)), draw(st.integers(0, 1_000)))
    entries: list[LogFrame] = []
    offset = prev.offset
    for number in draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)):
        annotation, slot = draw(st.binary(max_size=40)), draw(st.integers(0, (1 << 64) - 1))
        made = entry(offset, 3, number, annotation, slot) if number else position(offset, 3, annotation, slot)
        entries.append(made)
        offset += number
    begun = (EpochStart(3, draw(elections), prev),) if draw(st.booleans()) else ()
    return Append(
        draw(st.integers(3, 9)), draw(elections), draw(registrations), draw(asks), draw(logs), prev, draw(st.integers(0, 3)),
        draw(points), draw(points), begun, frames_from(prev, entries),
    )  # fmt: skip


places = st.builds(LogPlace, logs, points, points, starts(), st.just(True))
placements = st.builds(Placement, logs, st.sampled_from(Action), points, points)
origins_asked = st.builds(OriginAsked, epochs, elections, registrations, asks, logs)
pieces_asked = st.builds(PieceAsked, epochs, elections, registrations, asks, logs, offsets, asks, offsets)
messages = st.one_of(
    appends(),
    st.builds(Probe, epochs, elections),
    st.builds(Commit, epochs, elections, registrations, asks, logs, points),
    st.builds(Durable, epochs, elections, registrations, asks, logs, points, st.sampled_from(Status)),
    st.builds(Follow, epochs, elections, registrations, folders, asks, st.lists(places, min_size=1, max_size=4).map(tuple)),
    st.builds(Placed, epochs, elections, registrations, asks, st.lists(placements, min_size=1, max_size=4).map(tuple)),
    origins_asked,
    st.builds(OriginTold, origins_asked, st.binary(max_size=200)),
    pieces_asked,
    st.builds(PieceTold, pieces_asked, st.binary(max_size=200)),
)  # fmt: skip


def told(data: bytes, lane: Lane, sizes: list[int] | None = None) -> list[Said | Hello | Beat]:
    """What a stream says that brings its bytes in pieces of these sizes, and then the rest."""
    decoder = PeerDecoder()
    data = encode_preface(lane) + data
    found = []
    for size in sizes or []:
        found += decoder.feed(data[:size])
        data = data[size:]
    found += decoder.feed(data)
    assert not decoder.held_bytes
    return found


def plain(message: Told) -> Told:
    """Bodies as bytes, so that messages can be compared."""
    if not isinstance(message, Append):
        return message
    frames = []
    for frame in message.frames:
        body = frame.body
        assert isinstance(body, LogFrame)
        whole = body.batch and Batch(body.batch.header, bytes(body.batch.body))
        frames.append(frame._replace(body=replace(body, batch=whole)))
    return message._replace(frames=tuple(frames))


@given(st.lists(messages, min_size=1, max_size=4), st.lists(st.integers(1, 200), max_size=20))
def test_what_is_said_is_what_arrives_however_it_is_cut_up(said: list[Told], sizes: list[int]) -> None:
    for lane in Lane:
        frames = [encode(SHARD, each) for each in said]
        sent = [plain(each) for each, frame in zip(said, frames, strict=True) if lane_of(frame) is lane]
        data = b"".join(frame for frame in frames if lane_of(frame) is lane)
        arrived = told(data, lane, sizes)
        assert [each.shard for each in arrived if isinstance(each, Said)] == [SHARD] * len(sent)
        assert [plain(each.message) for each in arrived if isinstance(each, Said)] == sent


def test_frames_of_logs_wait_for_each_other_and_nothing_short_waits_for_them() -> None:
    append = Append(
        3,
        ELECTION,
        1,
        1,
        0,
        LogPoint(5),
        3,
        LogPoint(5),
        LogPoint(0),
        (),
        frames_from(LogPoint(5), [entry(5, 3, 1)]),
    )
    assert lane_of(encode(SHARD, append)) is Lane.BULK
    assert lane_of(encode(SHARD, Durable(3, ELECTION, 1, 1, 0, LogPoint(5)))) is Lane.CONTROL


def test_who_is_there_is_said_first_and_that_it_still_is() -> None:
    hello, beat = Hello("b1", 7, "f" * 32, ("x",)), Beat(1_000, 50)
    assert told(encode_hello(hello) + encode_beat(beat), Lane.CONTROL) == [hello, beat]


def test_a_stale_answer_of_one_who_knows_no_epoch_arrives() -> None:
    message = Durable(0, "", 3, 0, 0, LogPoint(0), Status.STALE)
    assert told(encode(SHARD, message), Lane.CONTROL) == [Said(SHARD, message)]


@pytest.mark.parametrize("seed", range(count(300, 20_000)))
def test_bytes_that_were_changed_raise_what_ends_the_link_or_say_something_whole(seed: int) -> None:
    random = Random(seed)
    place = LogPlace(0, LogPoint(0), LogPoint(9, 1), (EpochStart(1, ELECTION, LogPoint(0)),), True)
    message: Told = random.choice(
        [
            Append(3, ELECTION, 1, 1, 0, LogPoint(5), 2, LogPoint(5), LogPoint(0), (EpochStart(3, ELECTION, LogPoint(5)),),
                   frames_from(LogPoint(5), [entry(5, 3, 2, b"note", 4), position(7, 3, b"at", 9)])),
            Follow(3, ELECTION, 1, "f" * 32, 4, (place, place)),
            Placed(3, ELECTION, 1, 4, (Placement(0, Action.COPY, LogPoint(4), LogPoint(0)),)),
            Durable(3, ELECTION, 1, 4, 0, LogPoint(4)),
        ]
    )  # fmt: skip
    encoded = encode(SHARD, message)
    data = bytearray(encode_preface(lane_of(encoded)) + encoded)
    for _ in range(random.randrange(1, 4)):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    if random.random() < 0.3:
        del data[random.randrange(len(data)) :]
    decoder = PeerDecoder()
    try:
        found = decoder.feed(bytes(data))
    except ProtocolError:
        return
    # What is left is whole: it can be said again.
    for each in found:
        assert isinstance(each, Said)
        assert told(encode(each.shard, each.message), lane_of(encoded))


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"\xff\xff\xff\xff\x15\0\0\0", Code.FRAME_TOO_LARGE),
        (b"\0\0\0\x01\x7f\0\0\0", Code.FRAME_UNKNOWN),
        (b"\0\0\0\x01\x13\0\0\0", Code.FRAME_UNKNOWN),
        (b"\0\0\0\x00\x15\0\0\0", Code.FRAME_MALFORMED),
    ],
    ids=["too long", "unknown", "on another lane", "empty"],
)
def test_a_length_is_refused_before_anything_of_it_is_kept(head: bytes, code: Code) -> None:
    with pytest.raises(ProtocolError) as refused:
        told(head, Lane.CONTROL)
    assert refused.value.code is code
    assert len(head) == FRAME_HEADER_BYTES


def test_another_version_is_told_so() -> None:
    preface = bytearray(encode_preface(Lane.CONTROL))
    assert len(preface) == PREFACE_BYTES
    preface[5] = 9
    with pytest.raises(ProtocolError) as refused:
        PeerDecoder().feed(bytes(preface))
    assert refused.value.code is Code.VERSION_UNSUPPORTED and "neighbouring releases" in refused.value.hint


@pytest.mark.parametrize(
    "entries",
    [
        [entry(6, 3, 1)],
        [entry(5, 3, 1), entry(7, 3, 1)],
        [entry(5, 4, 1)],
        [entry(5, 3, 1), entry(6, 2, 1)],
    ],
    ids=["not at its place", "a hole", "newer than its leader", "an older epoch behind a newer one"],
)
def test_frames_that_cannot_stand_in_a_log_so_are_refused(entries: list[LogFrame]) -> None:
    append = Append(
        3, ELECTION, 1, 1, 0, LogPoint(5), 2, LogPoint(5), LogPoint(0), (), frames_from(LogPoint(5), entries)
    )
    with pytest.raises(ProtocolError):
        told(encode(SHARD, append), Lane.BULK)


def test_a_log_that_is_read_within_the_limit_is_sent_whole() -> None:
    """What a reader of a segment counts of an entry is more than what it takes here."""
    batches = [batch(5 + at, 3, 1) for at in range(3)]
    frames = frames_from(LogPoint(5), [LogFrame(each, each.header.base_offset, 3) for each in batches])
    assert [frame.size - 28 for frame in frames] == [each.header.total_length for each in batches]
