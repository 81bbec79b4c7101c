"""Stream statements: the source region's signed word on what a shard of a stream is. Pure.

It names the stream's incarnation, how many shards it has, and for one shard which leader epoch begins at which offset. An
agent takes one when a link opens and shows it to the destination, which verifies it under the source region's receipt
keys: so an agent cannot invent incarnations, epochs or shards, and both ends see from it whether the source's log was cut
back below what has crossed (`cut_of`).

Ed25519 over ``b"felix/stream-statement/1\\0"`` and the body's bytes; the body is a MessagePack map of `StreamStatement`'s
fields, the whole a MessagePack map of key_id, body and signature, as receipts are (audit.receipt).
Invariants: `open_statement(sign_statement(s, …), …) == s`; epochs rise, their offsets never fall; a statement is used
only after `open_statement` returned. Callers: region.export (signs), bridge, region.ingest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Final, NamedTuple

import msgspec

from audit.leaf import Id16, Natural, Offset, Text
from audit.receipt import ReceiptKeys
from felix.errors import TamperError
from keys.signing import SigningKey, VerifyKey

PURPOSE: Final = "stream-statement"
EPOCHS_MAX: Final = 1_024
"""As many as a shard's history holds (region.log.epochs)."""
STATEMENT_BYTES_MAX: Final = 24_576
"""1,024 epochs of at most 15 bytes, the names, key id and signature."""

Incarnation = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Epoch32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Epoch(NamedTuple):
    """`epoch` begins with the record at `first_offset`."""

    epoch: Epoch32
    first_offset: Natural


class StreamStatement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One shard. Offsets from `log_start` on are held; those below `log_end` are on the disk. Time in ms since the epoch."""

    region: Text
    stream: Text
    incarnation: Incarnation
    shards: Natural
    shard: Natural
    log_start: Offset
    log_end: Natural
    epochs: Annotated[tuple[Epoch, ...], msgspec.Meta(max_length=EPOCHS_MAX)]
    time_ms: Natural

    def __post_init__(self) -> None:
        if self.shard >= self.shards or self.log_start > self.log_end:
            raise ValueError("it names a shard or an offset that the stream does not have")
        for before, after in pairwise(self.epochs):
            if before.epoch >= after.epoch or before.first_offset > after.first_offset:
                raise ValueError("its epochs do not rise")

    def has_epoch(self, epoch: int) -> bool:
        """Whether the shard has this epoch."""
        return any(each.epoch == epoch for each in self.epochs)

    def epoch_at(self, offset: int) -> int:
        """The epoch of the record at `offset`, written or to be written; 0 where the history does not reach back to it."""
        at = bisect_right(self.epochs, offset, key=lambda each: each.first_offset)
        return self.epochs[at - 1].epoch if at else 0


class Cut(NamedTuple):
    """Where a history parts from what was read of it: what stands from `offset` on was not read, and begins with `epoch`."""

    epoch: int
    offset: int


class Span(NamedTuple):
    """What was read of one epoch: everything from where it began up to offset `read_to` (not included)."""

    epoch: int
    read_to: int


def cut_of(statement: StreamStatement, read: Sequence[Span]) -> Cut | None:
    """None where the shard holds, or held, all that was read of it. `read`: the newest epochs read from, oldest first, at
    least one.

    Epoch numbers are never given twice (region.log.epochs): an epoch that stands in two histories began once, on one log,
    so both have the same records below it, and of it as far as both reach. So histories part where the newest epoch that
    they share ends in one of them. Where they share none of those remembered, the cut is below all that is held: then everything
    crosses again, and nothing is lost.
    """
    epochs = statement.epochs
    newest = read[-1]
    for span in reversed(read):
        at = bisect_left(epochs, span.epoch, key=lambda each: each.epoch)
        if at == len(epochs) or epochs[at].epoch != span.epoch:
            continue
        end = epochs[at + 1].first_offset if at + 1 < len(epochs) else statement.log_end
        if span is newest and end >= span.read_to:
            return None
        return Cut(epochs[min(at + 1, len(epochs) - 1)].epoch, min(end, span.read_to))
    return Cut(epochs[0].epoch if epochs else 0, min(statement.log_start, newest.read_to))


def parts_below(statement: StreamStatement, read: Span) -> int:
    """The most that the shard can share with what was read, where only the newest epoch read from is known."""
    epochs = statement.epochs
    following = bisect_right(epochs, read.epoch, key=lambda each: each.epoch)
    end = epochs[following].first_offset if following < len(epochs) else statement.log_end
    return min(end, read.read_to)


class _Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key_id: Id16
    body: bytes
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


_encoder: Final = msgspec.msgpack.Encoder()
_signed: Final = msgspec.msgpack.Decoder(_Signed)
_body: Final = msgspec.msgpack.Decoder(StreamStatement)


def sign_statement(statement: StreamStatement, key: SigningKey) -> bytes:
    """The signed statement's bytes."""
    body = _encoder.encode(statement)
    data = _encoder.encode(_Signed(key.key_id, body, key.sign(PURPOSE, body)))
    assert len(data) <= STATEMENT_BYTES_MAX
    return data


def open_statement(data: bytes, keys: ReceiptKeys) -> StreamStatement:
    """Verify and read. `keys`: those of the region that is to have signed it.

    Raises TamperError where the key is none of that region's, the signature does not hold, the body is no statement, or
    another region's.
    """
    if len(data) > STATEMENT_BYTES_MAX:
        raise TamperError(f"{len(data)} bytes are not a stream statement.")
    try:
        signed = _signed.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TamperError(f"A stream statement does not decode: {error}.") from error
    public = keys.by_id.get(signed.key_id)
    if public is None:
        raise TamperError(
            f"A stream statement is signed by the key {signed.key_id.hex()}, which is none of {keys.region}'s "
            "receipt keys."
        )
    if not VerifyKey(public).holds(PURPOSE, signed.body, signed.signature):
        raise TamperError("A stream statement's signature does not hold.")
    try:
        statement = _body.decode(signed.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise TamperError(f"A stream statement's body does not decode: {error}.") from error
    if statement.region != keys.region:
        raise TamperError(f"{keys.region} signed a stream statement about a stream of {statement.region}.")
    return statement
