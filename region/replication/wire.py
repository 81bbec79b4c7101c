"""What brokers of a region say to each other, as bytes: version 1. Pure.

Each stream of a link begins with a preface and then carries frames, one after the other, big-endian::

    preface: magic "FXPR" 4, version u16, lane u8, zero u8
    frame:   length u32 (of the body), kind u8, zero 3, body

The body of everything about a shard begins alike, and all but Probe go on alike::

    head:  incarnation 16, shard u32, epoch u32, election 8 (zero with epoch 0)
    place: registration u64, ask u32

then, by kind::

    FOLLOW   folder 16, logs u8, each: log u32, start point, end point, complete u8, starts u16, each: epoch u32, election 8, point
    PLACED   logs u8, each: log u32, action u8, point, start point
    APPEND   log u32, prev point, prev epoch u32, commit point, start point, starts u16, each as above, then frames to the end:
             kind u8 (as in a segment), place u8, annotation u16, batch length u32, epoch u32, base offset u64, slot u64, annotation, batch
    COMMIT   log u32, commit point
    DURABLE  log u32, point, status u8
    ORIGIN_ASKED  log u32
    ORIGIN   log u32, payload (region.replication.origin)
    PIECE_ASKED  log u32, segment's base offset u64, generation u32, position u64
    PIECE    the same, then bytes of the segment's file from there to the end

A point is u64 offset and u32 note. HELLO and BEAT are about the link: MessagePack of the structs below. ASK and ANSWER are about the region
as a whole: number u64, then what region.copies.peer_requests says.

Invariants: a length is checked against its kind's limit before the body is kept; what is decoded is within the limits that its sender has;
the frames of an APPEND follow each other from its `prev`. Whether a batch's body holds is looked at where it is written.
Bytes that do not hold raise ProtocolError, and the link ends.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from felix.batch import OFFSET_MAX, Batch, Buffer, decode_header
from felix.errors import Code, ProtocolError, RequestError
from region.cluster.records import FOLDER_CHARS, ShardId
from region.log.epochs import EPOCHS_MAX
from region.log.frame import Frame as LogFrame
from region.log.frame import Place
from region.log.point import LogPoint
from region.log.producers import SNAPSHOT_BYTES_LEAST
from region.log.segment import Kind as EntryKind
from region.log.segment import beside_bytes_max
from region.replication.history import STARTS_MAX, EpochStart
from region.replication.leader import APPEND_BYTES_MAX
from region.replication.messages import (
    Action,
    Append,
    Commit,
    Durable,
    Follow,
    Frame,
    LogPlace,
    Message,
    Placed,
    Placement,
    Probe,
    Status,
)  # fmt: skip

VERSION: Final = 1
LOGS_MAX: Final = 32
"""Logs of one shard: its records, and a journal for each kind of state; there are fewer than ten kinds."""
ORIGIN_BYTES_MAX: Final = 4 << 20
"""Annotations of all slots, a table of producers and the epochs of a log."""
ORIGIN_PRODUCERS_BYTES_MAX: Final = 3 << 20
"""Of that: one batch of each producer that a log may know, and all that is remembered of the hundreds that were used last."""
assert SNAPSHOT_BYTES_LEAST < ORIGIN_PRODUCERS_BYTES_MAX < ORIGIN_BYTES_MAX
ASK_BYTES_MAX: Final = 12 << 20
"""One request, or its answer: leaves of a group (region.evidence.remote_audit) and, since a group has one range at least, those of the largest envelope."""
PIECE_BYTES_MAX: Final = 1 << 20
"""Of a segment's file at once: frames of other logs go between two of them."""
_HELLO_BYTES_MAX: Final = 4_096
FRAME_OVERHEAD_BYTES: Final = 28
"""What an entry costs beside annotation and batch; less than it takes in a segment, so that what was read within a size fits it."""

_PREFACE: Final = struct.Struct(">4sHBB")
PREFACE_BYTES: Final = _PREFACE.size
_MAGIC: Final = b"FXPR"
_FRAME: Final = struct.Struct(">IB3s")
FRAME_HEADER_BYTES: Final = _FRAME.size
_HEAD: Final = struct.Struct(">16sII8s")
_PLACE: Final = struct.Struct(">QI")
_POINT: Final = struct.Struct(">QI")
_START: Final = struct.Struct(">I8sQI")
_LOG_PLACE: Final = struct.Struct(">IQIQIBH")
_PLACEMENT: Final = struct.Struct(">IBQIQI")
_APPEND: Final = struct.Struct(">IQIIQIQIH")
_COMMIT: Final = struct.Struct(">IQI")
_DURABLE: Final = struct.Struct(">IQIB")
_PIECE: Final = struct.Struct(">IQIQ")
_ENTRY: Final = struct.Struct(">BBHIIQQ")
assert _ENTRY.size == FRAME_OVERHEAD_BYTES


PLACES: Final = "places"
"""Whoever has this feature takes an APPEND whose entries say where in a segment they stand."""
FEATURES: Final = (PLACES,)
"""Of this version, as a broker says them in HELLO."""


class Lane(IntEnum):
    """Streams of a link. Frames of logs wait for each other; what is short, and what is asked of a broker, wait for none of them."""

    CONTROL = 0
    BULK = 1
    REQUESTS = 2


class Kind(IntEnum):
    """Kinds of frames. A number is never used again."""

    HELLO = 0x01
    BEAT = 0x02
    PROBE = 0x10
    FOLLOW = 0x11
    PLACED = 0x12
    APPEND = 0x13
    COMMIT = 0x14
    DURABLE = 0x15
    ORIGIN_ASKED = 0x16
    ORIGIN = 0x17
    PIECE_ASKED = 0x18
    PIECE = 0x19
    ASK = 0x20
    ANSWER = 0x21


_STARTS_BYTES: Final = EPOCHS_MAX * _START.size
_BYTES_MAX: Final[dict[int, int]] = {
    Kind.HELLO: _HELLO_BYTES_MAX,
    Kind.BEAT: _HELLO_BYTES_MAX,
    Kind.PROBE: _HEAD.size,
    Kind.FOLLOW: _HEAD.size + _PLACE.size + 17 + LOGS_MAX * (_LOG_PLACE.size + STARTS_MAX * _START.size),
    Kind.PLACED: _HEAD.size + _PLACE.size + 1 + LOGS_MAX * _PLACEMENT.size,
    Kind.APPEND: _HEAD.size + _PLACE.size + _APPEND.size + _STARTS_BYTES + APPEND_BYTES_MAX,
    Kind.COMMIT: _HEAD.size + _PLACE.size + _COMMIT.size,
    Kind.DURABLE: _HEAD.size + _PLACE.size + _DURABLE.size,
    Kind.ORIGIN_ASKED: _HEAD.size + _PLACE.size + 4,
    Kind.ORIGIN: _HEAD.size + _PLACE.size + 4 + ORIGIN_BYTES_MAX,
    Kind.PIECE_ASKED: _HEAD.size + _PLACE.size + _PIECE.size,
    Kind.PIECE: _HEAD.size + _PLACE.size + _PIECE.size + PIECE_BYTES_MAX,
    Kind.ASK: 8 + ASK_BYTES_MAX,
    Kind.ANSWER: 8 + ASK_BYTES_MAX,
}
assert set(_BYTES_MAX) == set(Kind)
_LANES: Final = dict.fromkeys(map(int, Kind), Lane.CONTROL) | {
    Kind.APPEND: Lane.BULK,
    Kind.ORIGIN: Lane.BULK,
    Kind.PIECE: Lane.BULK,
    Kind.ASK: Lane.REQUESTS,
    Kind.ANSWER: Lane.REQUESTS,
}

_ACTIONS: Final = (Action.APPEND, Action.COPY, Action.OLDER)
_PLACES: Final = {int(place): place for place in Place}
_STATUSES: Final = (Status.OK, Status.STALE, Status.FAILED)
_ACTION_NUMBERS: Final = {action: number for number, action in enumerate(_ACTIONS)}
_STATUS_NUMBERS: Final = {status: number for number, status in enumerate(_STATUSES)}


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who is at this end of a link, once its identity is proved. `registration`: of this start; `folder`: of its data."""

    broker: str
    registration: int
    folder: str
    features: tuple[str, ...] = ()


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """Sent while a link stands. `clock_ms`: the sender's wall clock; `mirror_revision`: how far it has read the metadata store."""

    clock_ms: int
    mirror_revision: int


class OriginAsked(NamedTuple):
    """A follower's question where the leader's log begins, and with what (COPY)."""

    epoch: int
    election: str
    registration: int
    ask: int
    log: int


class OriginTold(NamedTuple):
    """The leader's answer, with the question; empty where the log cannot be begun so."""

    asked: OriginAsked
    payload: bytes


class Asked(NamedTuple):
    """A request about no shard. `number`: of the asker's, on this link."""

    number: int
    body: bytes


class Answered(NamedTuple):
    """Its answer."""

    number: int
    body: bytes


class PieceAsked(NamedTuple):
    """A follower's question for bytes of a closed segment, from a position in its file on."""

    epoch: int
    election: str
    registration: int
    ask: int
    log: int
    base_offset: int
    generation: int
    position: int


class PieceTold(NamedTuple):
    """The leader's answer, with the question: PIECE_BYTES_MAX at most, empty where the segment is not there any more."""

    asked: PieceAsked
    data: bytes


Told = Message | OriginAsked | OriginTold | PieceAsked | PieceTold
"""All that is said about a shard."""


class Said(NamedTuple):
    """Something about a shard."""

    shard: ShardId
    message: Told


class Preface(NamedTuple):
    """What a stream carries."""

    lane: Lane


def _malformed(what: str) -> ProtocolError:
    return ProtocolError(f"A peer's message does not hold: {what}.", code=Code.FRAME_MALFORMED)


# -- encoding ------------------------------------------------------------------------------------------


def encode_preface(lane: Lane) -> bytes:
    """What a stream begins with."""
    return _PREFACE.pack(_MAGIC, VERSION, lane, 0)


def lane_of(encoded: bytes) -> Lane:
    """The stream that an encoded frame belongs on."""
    return _LANES[encoded[4]]


def _frame(kind: Kind, pieces: Sequence[Buffer]) -> bytes:
    length = sum(map(len, pieces))
    assert length <= _BYTES_MAX[kind], (kind, length)
    return b"".join((_FRAME.pack(length, kind, b"\0\0\0"), *pieces))


def encode_hello(hello: Hello) -> bytes:
    """The first frame of a link, in each direction."""
    return _frame(Kind.HELLO, (msgspec.msgpack.encode(hello),))


def encode_beat(beat: Beat) -> bytes:
    """That the sender is there."""
    return _frame(Kind.BEAT, (msgspec.msgpack.encode(beat),))


def encode_asked(asked: Asked) -> bytes:
    """A request. Its body is within ASK_BYTES_MAX."""
    return _frame(Kind.ASK, (asked.number.to_bytes(8, "big"), asked.body))


def encode_answered(answered: Answered) -> bytes:
    """An answer. Its body is within ASK_BYTES_MAX."""
    return _frame(Kind.ANSWER, (answered.number.to_bytes(8, "big"), answered.body))


def _head(shard: ShardId, epoch: int, election: str) -> bytes:
    return _HEAD.pack(bytes.fromhex(shard.incarnation), shard.number, epoch, _election(epoch, election))


def _election(epoch: int, election: str) -> bytes:
    assert bool(epoch) == bool(election), (epoch, election)
    return bytes.fromhex(election) if epoch else bytes(8)


def _start(start: EpochStart) -> bytes:
    return _START.pack(start.epoch, _election(start.epoch, start.election), *start.start)


def encode(shard: ShardId, message: Told, features: Container[str] = FEATURES) -> bytes:
    """One frame, for a peer that has these features. The message is within its limits: that is our own mistake otherwise."""
    if isinstance(message, Probe):
        return _frame(Kind.PROBE, (_head(shard, message.epoch, message.election),))
    said = message.asked if isinstance(message, OriginTold | PieceTold) else message
    head = _head(shard, said.epoch, said.election) + _PLACE.pack(said.registration, said.ask)
    if isinstance(message, Append):
        return _frame(Kind.APPEND, _append_pieces(head, message, PLACES in features))
    if isinstance(message, Durable):
        status = _STATUS_NUMBERS[message.status]
        return _frame(Kind.DURABLE, (head, _DURABLE.pack(message.log, *message.point, status)))
    if isinstance(message, Commit):
        return _frame(Kind.COMMIT, (head, _COMMIT.pack(message.log, *message.commit)))
    if isinstance(message, Follow):
        pieces = [head, bytes.fromhex(message.folder), bytes((len(message.logs),))]
        for place in message.logs:
            pieces.append(
                _LOG_PLACE.pack(place.log, *place.start, *place.end, place.complete, len(place.starts))
            )
            pieces += map(_start, place.starts)
        return _frame(Kind.FOLLOW, pieces)
    if isinstance(message, Placed):
        pieces = [head, bytes((len(message.logs),))]
        for placement in message.logs:
            action = _ACTION_NUMBERS[placement.action]
            pieces.append(_PLACEMENT.pack(placement.log, action, *placement.point, *placement.start))
        return _frame(Kind.PLACED, pieces)
    if isinstance(message, OriginAsked):
        return _frame(Kind.ORIGIN_ASKED, (head, _origin(message)))
    if isinstance(message, OriginTold):
        return _frame(Kind.ORIGIN, (head, _origin(message.asked), message.payload))
    if isinstance(message, PieceAsked):
        return _frame(Kind.PIECE_ASKED, (head, _piece(message)))
    return _frame(Kind.PIECE, (head, _piece(message.asked), message.data))


def _origin(asked: OriginAsked) -> bytes:
    return asked.log.to_bytes(4, "big")


def _piece(asked: PieceAsked) -> bytes:
    return _PIECE.pack(asked.log, asked.base_offset, asked.generation, asked.position)


def _append_pieces(head: bytes, message: Append, tells_places: bool) -> list[Buffer]:
    pieces: list[Buffer] = [
        head,
        _APPEND.pack(
            message.log,
            *message.prev,
            message.prev_epoch,
            *message.commit,
            *message.start,
            len(message.starts),
        ),
        *map(_start, message.starts),
    ]
    for frame in message.frames:
        assert isinstance(frame.body, LogFrame)
        _entry_pieces(pieces, frame.body, frame.body.place if tells_places else Place.UNKNOWN)
    return pieces


def _entry_pieces(pieces: list[Buffer], entry: LogFrame, place: Place = Place.UNKNOWN) -> None:
    batch = entry.batch
    length = batch.header.total_length if batch else 0
    pieces.append(
        _ENTRY.pack(
            entry.kind,
            place,
            len(entry.annotation),
            length,
            entry.leader_epoch,
            entry.base_offset,
            entry.slot,
        )
    )
    if entry.annotation:
        pieces.append(entry.annotation)
    if batch:
        pieces += (batch.header.encode(), batch.body)


def encode_entries(entries: Sequence[LogFrame]) -> bytes:
    """Entries of a log as they stand in an APPEND, for what is asked and answered about no leader (region.copies.copied_frames)."""
    pieces: list[Buffer] = []
    for entry in entries:
        _entry_pieces(pieces, entry)
    return b"".join(pieces)


def decode_entries(data: bytes) -> list[LogFrame]:
    """The same back. Whether they follow each other, and whether bodies hold, is looked at by who takes them. Raises ProtocolError."""
    reader, entries = _Reader(memoryview(data)), list[LogFrame]()
    while reader.at < len(reader.data):
        entries.append(_decode_entry(reader))
    return entries


# -- frames of a log -----------------------------------------------------------------------------------


def frames_from(point: LogPoint, entries: Sequence[LogFrame]) -> tuple[Frame, ...]:
    """Entries of a log that stand behind `point`, as replication counts them. `size`: bytes on the wire."""
    found = []
    for entry in entries:
        batch = entry.batch
        if batch is None:
            point = LogPoint(point.offset, point.note + 1)
            size = FRAME_OVERHEAD_BYTES + len(entry.annotation)
        else:
            point = LogPoint(batch.header.next_offset)
            size = FRAME_OVERHEAD_BYTES + len(entry.annotation) + batch.header.total_length
        found.append(Frame(entry.leader_epoch, point, size, entry))
    return tuple(found)


# -- decoding ------------------------------------------------------------------------------------------

_hellos: Final = msgspec.msgpack.Decoder(Hello)
_beats: Final = msgspec.msgpack.Decoder(Beat)


class _Reader:
    """Takes fields off a body, which must end where the last one does."""

    __slots__ = ("at", "data")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, fields: struct.Struct) -> tuple[Any, ...]:
        if len(self.data) - self.at < fields.size:
            raise _malformed("it is cut off")
        found = fields.unpack_from(self.data, self.at)
        self.at += fields.size
        return found

    def bytes(self, length: int) -> memoryview:
        if len(self.data) - self.at < length:
            raise _malformed("it is cut off")
        found = self.data[self.at : self.at + length]
        self.at += length
        return found

    def rest(self) -> memoryview:
        return self.bytes(len(self.data) - self.at)

    def byte(self) -> int:
        return self.bytes(1)[0]

    def starts(self, number: int, most: int) -> tuple[EpochStart, ...]:
        if number > most:
            raise _malformed(f"{number} epochs")
        found: list[EpochStart] = []
        for _ in range(number):
            epoch, election, offset, note = self.take(_START)
            start = EpochStart(epoch, _election_of(epoch, election), _point(offset, note))
            if not epoch or (found and (epoch <= found[-1].epoch or start.start < found[-1].start)):
                raise _malformed("its epochs are not in order")
            found.append(start)
        return tuple(found)

    def end(self) -> None:
        if self.at != len(self.data):
            raise _malformed(f"{len(self.data) - self.at} bytes follow its end")


def _point(offset: int, note: int) -> LogPoint:
    if offset > OFFSET_MAX + 1:
        raise _malformed(f"offset {offset}")
    return LogPoint(offset, note)


def _election_of(epoch: int, election: bytes) -> str:
    if not epoch and any(election):
        raise _malformed("epoch 0 has no election")
    return election.hex() if epoch else ""


_T = TypeVar("_T")


def _nth(values: tuple[_T, ...], number: int) -> _T:
    if number >= len(values):
        raise _malformed(f"{number} is none of {len(values)} values")
    return values[number]


def _flag(number: int) -> bool:
    if number > 1:
        raise _malformed(f"a flag is {number}")
    return bool(number)


Frames = Said | Hello | Beat | Asked | Answered
"""All that a link carries."""


def decode_body(kind: Kind, body: memoryview) -> Frames:
    """What a frame says. `body` stays referenced by the frames of an Append. Raises ProtocolError."""
    if kind in (Kind.HELLO, Kind.BEAT):
        try:
            return _hellos.decode(body) if kind is Kind.HELLO else _beats.decode(body)
        except msgspec.DecodeError as error:
            raise _malformed(f"{kind.name}: {error}") from error
    reader = _Reader(body)
    if kind in (Kind.ASK, Kind.ANSWER):
        asked_number = int.from_bytes(reader.bytes(8), "big")
        return (Asked if kind is Kind.ASK else Answered)(asked_number, bytes(reader.rest()))
    incarnation, number, epoch, election_bytes = reader.take(_HEAD)
    shard = ShardId(incarnation.hex(), number)
    election = _election_of(epoch, election_bytes)
    message: Told
    if kind is Kind.PROBE:
        message = Probe(epoch, election)
    else:
        registration, ask = reader.take(_PLACE)
        message = _decode_placed(kind, reader, epoch, election, registration, ask)
    reader.end()
    if not epoch and not isinstance(message, Follow | Durable):
        raise _malformed("a leader's epoch is above 0")
    return Said(shard, message)


def _decode_placed(
    kind: Kind, reader: _Reader, epoch: int, election: str, registration: int, ask: int
) -> Told:
    if kind is Kind.APPEND:
        return _decode_append(reader, epoch, election, registration, ask)
    if kind is Kind.DURABLE:
        log, offset, note, status = reader.take(_DURABLE)
        return Durable(epoch, election, registration, ask, log, _point(offset, note), _nth(_STATUSES, status))
    if kind is Kind.COMMIT:
        log, offset, note = reader.take(_COMMIT)
        return Commit(epoch, election, registration, ask, log, _point(offset, note))
    if kind is Kind.FOLLOW:
        folder = reader.bytes(FOLDER_CHARS // 2).hex()
        places = tuple(_decode_place(reader) for _ in range(_logs(reader)))
        return Follow(epoch, election, registration, folder, ask, places)
    if kind is Kind.PLACED:
        found = []
        for _ in range(_logs(reader)):
            log, action, offset, note, start, start_note = reader.take(_PLACEMENT)
            placement = Placement(
                log, _nth(_ACTIONS, action), _point(offset, note), _point(start, start_note)
            )
            found.append(placement)
        return Placed(epoch, election, registration, ask, tuple(found))
    if kind in (Kind.PIECE_ASKED, Kind.PIECE):
        piece = PieceAsked(epoch, election, registration, ask, *reader.take(_PIECE))
        return piece if kind is Kind.PIECE_ASKED else PieceTold(piece, bytes(reader.rest()))
    origin = OriginAsked(epoch, election, registration, ask, int.from_bytes(reader.bytes(4), "big"))
    return origin if kind is Kind.ORIGIN_ASKED else OriginTold(origin, bytes(reader.rest()))


def _logs(reader: _Reader) -> int:
    number = reader.byte()
    if not 0 < number <= LOGS_MAX:
        raise _malformed(f"{number} logs")
    return number


def _decode_place(reader: _Reader) -> LogPlace:
    log, start, start_note, end, end_note, complete, number = reader.take(_LOG_PLACE)
    starts = reader.starts(number, STARTS_MAX)
    if not starts and not complete:
        raise _malformed("a follower tells no epoch, and has some")
    return LogPlace(log, _point(start, start_note), _point(end, end_note), starts, _flag(complete))


def _decode_append(reader: _Reader, epoch: int, election: str, registration: int, ask: int) -> Append:
    log, prev, prev_note, prev_epoch, commit, commit_note, start, start_note, number = reader.take(_APPEND)
    starts = reader.starts(number, EPOCHS_MAX)
    at = _point(prev, prev_note)
    entries: list[LogFrame] = []
    offset, newest = at.offset, prev_epoch
    while reader.at < len(reader.data):
        entry = _decode_entry(reader)
        if entry.base_offset != offset or not newest <= entry.leader_epoch <= epoch:
            raise _malformed(
                f"a frame of epoch {entry.leader_epoch} at offset {entry.base_offset} follows {offset}"
            )
        newest = entry.leader_epoch
        if entry.batch:
            offset = entry.batch.header.next_offset
        entries.append(entry)
    if not entries:
        raise _malformed("an APPEND brings frames")
    frames = frames_from(at, entries)
    if starts and not at <= starts[0].start <= starts[-1].start < frames[-1].end:
        raise _malformed("an epoch begins outside of its frames")
    return Append(
        epoch, election, registration, ask, log, at, prev_epoch, _point(commit, commit_note), _point(start, start_note), starts, frames,
    )  # fmt: skip


def _decode_entry(reader: _Reader) -> LogFrame:
    kind, place, annotation_length, length, epoch, base_offset, slot = reader.take(_ENTRY)
    if place not in _PLACES or kind not in (
        (EntryKind.BATCH,) if length else (EntryKind.POSITION, EntryKind.NOTE)
    ):
        raise _malformed(f"a frame of kind {kind}")
    if annotation_length > beside_bytes_max(kind):
        raise _malformed(f"an annotation of {annotation_length} bytes")
    annotation = bytes(reader.bytes(annotation_length))
    if not length:
        return LogFrame(None, base_offset, epoch, slot, annotation, kind == EntryKind.NOTE, _PLACES[place])
    data = reader.bytes(length)
    try:
        header = decode_header(data)
    except RequestError as error:
        raise _malformed(error.sentence.removesuffix(".")) from error
    if header.total_length != length or (header.base_offset, header.leader_epoch) != (base_offset, epoch):
        raise _malformed("a batch's header is of another place")
    return LogFrame(
        Batch(header, data[-header.body_length :] if header.body_length else b""),
        base_offset,
        epoch,
        slot,
        annotation,
        place=_PLACES[place],
    )


class PeerDecoder:
    """Takes the bytes of one stream as they come, gives what they say. Holds one incomplete frame at most; finished once it has raised."""

    __slots__ = ("_chunks", "_held", "_need", "lane")

    def __init__(self) -> None:
        self.lane: Lane | None = None
        self._chunks: list[bytes] = []
        self._held = 0
        self._need = PREFACE_BYTES

    @property
    def held_bytes(self) -> int:
        """Of what is not whole yet."""
        return self._held

    def feed(self, data: bytes) -> list[Frames]:
        """What became whole. Raises ProtocolError."""
        self._chunks.append(data)
        self._held += len(data)
        found: list[Frames] = []
        if self._held < self._need:
            return found
        whole = memoryview(b"".join(self._chunks) if len(self._chunks) > 1 else data)
        at = 0
        while len(whole) - at >= self._need:
            if self.lane is None:
                self._begin(whole[:PREFACE_BYTES])
                at += PREFACE_BYTES
                self._need = FRAME_HEADER_BYTES
                continue
            length, kind, zero = _FRAME.unpack_from(whole, at)
            most = _BYTES_MAX.get(kind)
            if most is None or zero != b"\0\0\0" or _LANES[kind] is not self.lane:
                raise ProtocolError(
                    f"A peer's frame of kind {kind:#x} is not known here.", code=Code.FRAME_UNKNOWN
                )
            if length > most:
                raise ProtocolError(
                    f"A peer's frame of {length} bytes; {most} are allowed.", code=Code.FRAME_TOO_LARGE
                )
            end = at + FRAME_HEADER_BYTES + length
            if end > len(whole):
                self._need = FRAME_HEADER_BYTES + length
                break
            found.append(decode_body(Kind(kind), whole[at + FRAME_HEADER_BYTES : end]))
            at, self._need = end, FRAME_HEADER_BYTES
        rest = bytes(whole[at:])
        self._chunks, self._held = [rest] if rest else [], len(rest)
        return found

    def _begin(self, preface: memoryview) -> None:
        magic, version, lane, zero = _PREFACE.unpack(preface)
        if magic != _MAGIC or version != VERSION:
            raise ProtocolError(
                f"A peer's stream is of version {version}, and this broker speaks {VERSION}.",
                code=Code.VERSION_UNSUPPORTED,
                hint="Use neighbouring releases on all brokers of a region.",
            )
        if zero or lane not in set(Lane):
            raise _malformed(f"lane {lane}")
        self.lane = Lane(lane)
