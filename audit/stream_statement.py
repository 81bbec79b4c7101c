"""Stream statements: the source region's signed word on what a shard of a stream is. Pure.

It names the stream's incarnation, how many shards it has, and for one shard which leader epoch begins at which offset. An
agent takes one when a link opens and shows it to the destination, which verifies it under the source region's receipt
keys: so an agent cannot invent incarnations, epochs or shards, and both ends see from it whether the source's log was cut
back below what has crossed (`cut_of`).

A signed body (audit.signed_body) of the purpose "stream-statement", with `StreamStatement`'s fields.
Invariants: `open_statement(sign_statement(s, …), …) == s`; epochs rise, their offsets never fall; a statement is used
only after `open_statement` returned. Callers: region.crossing.export (signs), bridge, region.crossing.ingest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Final, NamedTuple

import msgspec

from audit.leaf import Natural, Offset, Text
from audit.signed_body import ReceiptKeys, SignedForm
from felix.errors import TamperError
from keys.signing import SigningKey

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


_form: Final = SignedForm(StreamStatement, PURPOSE, "stream statement", STATEMENT_BYTES_MAX)


def sign_statement(statement: StreamStatement, key: SigningKey) -> bytes:
    """The signed statement's bytes."""
    return _form.sign(statement, key)


def open_statement(data: bytes, keys: ReceiptKeys) -> StreamStatement:
    """Verify and read. `keys`: those of the region that is to have signed it.

    Raises TamperError where the key is none of that region's, the signature does not hold, the body is no statement, or
    another region's.
    """
    statement = _form.open(data, keys)
    if statement.region != keys.region:
        raise TamperError(f"{keys.region} signed a stream statement about a stream of {statement.region}.")
    return statement
