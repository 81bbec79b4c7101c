"""Frames: every QUIC stream of Felix carries them, one after the other.

Frame, big-endian::

    0  length       4   bytes of the body
    4  type         1   FrameType
    5  flags        1   zero; an unknown flag is a protocol error
    6  reserved     2   zero
    8  correlation  4   chosen by the side that asks; an answer carries it back; 0 where nothing is asked
    12 body

Invariants: a length is checked against the limit of its type before a byte of the body is kept; the decoder
never holds more than one incomplete frame; a decoder that has raised is finished. Pure: bytes in, frames out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from felix.batch import BATCH_BYTES_MAX, RECORDS_MAX
from felix.errors import Code, ProtocolError

FRAME_HEADER_BYTES: Final = 12
CONTROL_BYTES_MAX: Final = 1 << 18
"""A control message: 256 KiB holds a page of any listing, a signed policy, a certificate chain."""
HANDSHAKE_BYTES_MAX: Final = 1 << 16
"""Everything a peer may send before its identity is proved, in all: 64 KiB holds any certificate chain."""
CONDITION_BYTES: Final = 8
"""The bytes before the batch of a CONDITIONAL frame: the offset that its shard's log must end at."""
OFFSETS_BYTES_MAX: Final = 16 + 8 * RECORDS_MAX
"""An acknowledgement that names the offset of every record."""
ENVELOPE_BYTES_MAX: Final = BATCH_BYTES_MAX + (1 << 19)
"""A transfer envelope: a batch, and its record map."""
CALL_BYTES_MAX: Final = BATCH_BYTES_MAX + (1 << 16)
"""A call to a view, or its reply: a record of the largest size, and what is said of it."""

SEGMENT_BYTES: Final = 2
"""The bytes before the datagrams of a DATAGRAMS frame: the length of each."""
DATAGRAMS_BYTES_MAX: Final = SEGMENT_BYTES + (1 << 16)
"""One read of a UDP socket: the largest datagram, or the largest train of datagrams of one length that a kernel hands over."""

_HEADER: Final = struct.Struct(">IBBHI")
assert _HEADER.size == FRAME_HEADER_BYTES


class FrameType(IntEnum):
    """Types of frames. Control types carry MessagePack, hot types fixed binary (docs/wire.md)."""

    HANDSHAKE = 0x01
    ERROR = 0x02
    GOODBYE = 0x03
    PING = 0x04
    PONG = 0x05

    REQUEST = 0x10
    ANSWER = 0x11
    CREDIT = 0x12

    BATCH = 0x20
    APPENDED = 0x21
    GAP = 0x22
    CONDITIONAL = 0x23
    OFFSETS = 0x24

    TRANSFER = 0x30
    RECEIPT = 0x31

    CALL = 0x40
    REPLY = 0x41
    DATAGRAMS = 0x42


_BYTES_MAX: Final[dict[int, int]] = {
    FrameType.HANDSHAKE: HANDSHAKE_BYTES_MAX,
    FrameType.ERROR: 1 << 14,
    FrameType.GOODBYE: 1 << 14,
    FrameType.PING: 8,
    FrameType.PONG: 8,
    FrameType.REQUEST: CONTROL_BYTES_MAX,
    FrameType.ANSWER: CONTROL_BYTES_MAX,
    FrameType.CREDIT: 12,
    FrameType.BATCH: BATCH_BYTES_MAX,
    FrameType.APPENDED: 24,
    FrameType.GAP: 24,
    FrameType.CONDITIONAL: BATCH_BYTES_MAX + CONDITION_BYTES,
    FrameType.OFFSETS: OFFSETS_BYTES_MAX,
    FrameType.TRANSFER: ENVELOPE_BYTES_MAX,
    FrameType.RECEIPT: 1 << 14,
    FrameType.CALL: CALL_BYTES_MAX,
    FrameType.REPLY: CALL_BYTES_MAX,
    FrameType.DATAGRAMS: DATAGRAMS_BYTES_MAX,
}
assert set(_BYTES_MAX) == set(FrameType)
_KINDS: Final = {int(kind): kind for kind in FrameType}
"""Looked up per frame: calling the enumeration costs five times as much."""


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One whole frame. `body` is a view into what was received; copy what is to be kept."""

    type: FrameType
    correlation: int
    body: memoryview


def encode_frame(type_: FrameType, body: bytes | memoryview, correlation: int = 0) -> bytes:
    """One frame's bytes. The body must be within its type's limit: that is our own mistake otherwise."""
    assert len(body) <= _BYTES_MAX[type_], (type_, len(body))
    return b"".join((_HEADER.pack(len(body), type_, 0, 0, correlation), body))


def frame_header(type_: FrameType, body_length: int, correlation: int = 0) -> bytes:
    """The 12 bytes in front of a body that is sent as it is."""
    return _HEADER.pack(body_length, type_, 0, 0, correlation)


class FrameDecoder:
    """Takes a stream's bytes as they come and gives back whole frames.

    Raises ProtocolError: FRAME_UNKNOWN, FRAME_TOO_LARGE, FRAME_MALFORMED (flags, reserved bits, cut-off end).
    """

    __slots__ = ("_chunks", "_held", "_need", "_types")

    def __init__(self, types: frozenset[FrameType] = frozenset(FrameType)) -> None:
        """`types` is what this stream may carry; anything else is a protocol error."""
        self._types = types
        self._chunks: list[bytes | memoryview] = []
        self._held = 0
        self._need = FRAME_HEADER_BYTES

    @property
    def held_bytes(self) -> int:
        """Bytes of the one incomplete frame."""
        return self._held

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """Whole frames in `data` and what was held before it."""
        if self._chunks:
            self._chunks.append(data)
            self._held += len(data)
            if self._held < self._need:
                return []
            data = b"".join(self._chunks)
            self._chunks.clear()
        view = memoryview(data)
        frames: list[Frame] = []
        at, end = 0, len(view)
        while True:
            if end - at < FRAME_HEADER_BYTES:
                self._need = FRAME_HEADER_BYTES
                break
            length, type_, flags, reserved, correlation = _HEADER.unpack_from(view, at)
            limit = _BYTES_MAX.get(type_)
            if limit is None or type_ not in self._types:
                raise ProtocolError(
                    f"A frame of type {type_:#04x} cannot stand on this stream.", code=Code.FRAME_UNKNOWN
                )
            if flags or reserved:
                raise ProtocolError(
                    f"A frame with flags {flags:#04x} and reserved bits {reserved:#06x}; none are known.",
                    code=Code.FRAME_MALFORMED,
                )
            if length > limit:
                raise ProtocolError(
                    f"A {FrameType(type_).name} frame of {length} bytes; {limit} are allowed.",
                    code=Code.FRAME_TOO_LARGE,
                )
            total = FRAME_HEADER_BYTES + length
            if end - at < total:
                self._need = total
                break
            body = view[at + FRAME_HEADER_BYTES : at + total]
            frames.append(Frame(_KINDS[type_], correlation, body))
            at += total
        self._held = end - at
        if self._held:
            # Copied, so that a small rest does not keep a large datagram train alive.
            self._chunks.append(bytes(view[at:]))
        return frames

    def finish(self) -> None:
        """The stream has ended. Raises ProtocolError where it ended inside a frame."""
        if self._held:
            raise ProtocolError(
                f"The stream ended inside a frame, {self._held} of {self._need} bytes in.",
                code=Code.FRAME_MALFORMED,
            )


_CONDITION: Final = struct.Struct(">Q")
assert _CONDITION.size == CONDITION_BYTES
_CREDIT: Final = struct.Struct(">IQ")
_APPENDED: Final = struct.Struct(">QqQ")
_OFFSETS: Final = struct.Struct(">qQ")
_GAP: Final = struct.Struct(">IIQQ")


class Credit(NamedTuple):
    """How far a sender may go: a sum of bytes since the beginning, so that a repeated one does no harm.

    `subscription` is 0 for publish credit (broker to client).
    """

    subscription: int
    limit_bytes: int

    def encode(self) -> bytes:
        return encode_frame(FrameType.CREDIT, _CREDIT.pack(*self))


class AppendedBody(msgspec.Struct, frozen=True, gc=False):
    """Acknowledgement of one batch: offset of its first record, the broker's time, credit returned so far.

    `offsets`, one per record, where they do not follow each other (deduplication); the frame is then OFFSETS.
    """

    base_offset: int
    append_time_ms: int
    credit_limit_bytes: int
    offsets: tuple[int, ...] = ()

    def encode(self, correlation: int) -> bytes:
        if self.offsets:
            head = _OFFSETS.pack(self.append_time_ms, self.credit_limit_bytes)
            column = struct.pack(f">{len(self.offsets)}Q", *self.offsets)
            return encode_frame(FrameType.OFFSETS, head + column, correlation)
        return encode_frame(
            FrameType.APPENDED,
            _APPENDED.pack(self.base_offset, self.append_time_ms, self.credit_limit_bytes),
            correlation,
        )


def encode_condition(expected_offset: int) -> bytes:
    """The bytes before the batch of a CONDITIONAL frame."""
    return _CONDITION.pack(expected_offset)


def decode_condition(body: memoryview) -> tuple[int, memoryview]:
    """The expected offset of a CONDITIONAL frame, and its batch. Raises ProtocolError(FRAME_MALFORMED)."""
    if len(body) < CONDITION_BYTES:
        raise ProtocolError(
            f"A CONDITIONAL frame of {len(body)} bytes; its condition alone has {CONDITION_BYTES}.",
            code=Code.FRAME_MALFORMED,
        )
    return int(_CONDITION.unpack_from(body)[0]), body[CONDITION_BYTES:]


class Train(NamedTuple):
    """Datagrams of one sender, back to back, each of `segment_bytes`, the last one maybe shorter. Without any: the peer's machine said that
    nobody listens there."""

    segment_bytes: int
    data: bytes | memoryview

    def encode(self) -> bytes:
        """A DATAGRAMS frame."""
        size = SEGMENT_BYTES + len(self.data)
        assert size <= DATAGRAMS_BYTES_MAX
        segment = self.segment_bytes.to_bytes(SEGMENT_BYTES)
        return b"".join((frame_header(FrameType.DATAGRAMS, size), segment, self.data))

    def split(self) -> list[bytes]:
        """Each by itself."""
        data, size = bytes(self.data), self.segment_bytes
        return [data[at : at + size] for at in range(0, len(data), max(1, size))]


NOBODY_LISTENS: Final = Train(0, b"")


def trains(datagrams: Sequence[bytes]) -> Iterator[Train]:
    """The same datagrams in the same order, in as few trains as their lengths let them. None is empty, or longer than a train may be."""
    at, count = 0, len(datagrams)
    while at < count:
        size = len(datagrams[at])
        end, stop = at + 1, min(count, at + (DATAGRAMS_BYTES_MAX - SEGMENT_BYTES) // size)
        while end < stop and len(datagrams[end]) == size:
            end += 1
        if end < stop and len(datagrams[end]) < size:
            end += 1
        yield Train(size, datagrams[at] if end == at + 1 else b"".join(datagrams[at:end]))
        at = end


def decode_datagrams(body: memoryview) -> Train:
    """Of a DATAGRAMS frame; the data stay a view. Raises ProtocolError(FRAME_MALFORMED)."""
    size = int.from_bytes(body[:SEGMENT_BYTES])
    data = body[SEGMENT_BYTES:]
    if len(body) < SEGMENT_BYTES or bool(size) != bool(data):
        raise ProtocolError(
            f"A DATAGRAMS frame of {len(body)} bytes, with datagrams of {size}.", code=Code.FRAME_MALFORMED
        )
    return Train(size, data)


class GapBody(NamedTuple):
    """Records [first, next) of a shard are gone (retention, ring, truncation) and will not be delivered.

    `reason` is a GapReason.
    """

    shard: int
    reason: int
    first_offset: int
    next_offset: int

    def encode(self) -> bytes:
        return encode_frame(FrameType.GAP, _GAP.pack(*self))


class GapReason(IntEnum):
    """Why records are missing."""

    RETENTION = 1
    RING = 2
    TRUNCATED = 3
    RECREATED = 4
    COMPACTED = 5
    """Nothing is missing: what stood there was superseded by later records of the same keys."""


def _unpack(layout: struct.Struct, body: memoryview, what: str) -> tuple[int, ...]:
    if len(body) != layout.size:
        raise ProtocolError(
            f"A {what} frame of {len(body)} bytes; it has {layout.size}.", code=Code.FRAME_MALFORMED
        )
    return layout.unpack(body)


def decode_credit(body: memoryview) -> Credit:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    return Credit(*_unpack(_CREDIT, body, "CREDIT"))


def decode_appended(body: memoryview) -> AppendedBody:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    base_offset, append_time_ms, credit_limit_bytes = _unpack(_APPENDED, body, "APPENDED")
    return AppendedBody(base_offset, append_time_ms, credit_limit_bytes)


def decode_offsets(body: memoryview) -> AppendedBody:
    """Of an OFFSETS frame. Raises ProtocolError(FRAME_MALFORMED)."""
    count, rest = divmod(len(body) - _OFFSETS.size, 8)
    if count < 1 or rest:
        raise ProtocolError(f"An OFFSETS frame of {len(body)} bytes.", code=Code.FRAME_MALFORMED)
    append_time_ms, credit_limit_bytes = _OFFSETS.unpack_from(body)
    offsets = struct.unpack_from(f">{count}Q", body, _OFFSETS.size)
    return AppendedBody(offsets[0], append_time_ms, credit_limit_bytes, offsets)


def decode_gap(body: memoryview) -> GapBody:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    gap = GapBody(*_unpack(_GAP, body, "GAP"))
    if gap.reason not in list(map(int, GapReason)) or gap.next_offset <= gap.first_offset:
        raise ProtocolError(f"An impossible gap: {gap}.", code=Code.FRAME_MALFORMED)
    return gap
