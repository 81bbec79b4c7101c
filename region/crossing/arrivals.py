"""Arrivals: every range that was taken over a border gets its leaf in the ingress log, whatever becomes of agent and broker.

A range is appended to its stream, then its ACK leaves to the ingress log. Before the append the leaves are a note beside the
stream's log (region.log.ahead), and until they are durable nobody reads the records. Of a stream with copies the note stands in the log, before
the range: a copy that has the range has its note. So:

- a broker that dies between append and leaf finds the note when it opens the stream again, sees by the link's record whether
  the range landed, and writes the leaves itself before anybody sees the stream (`settle`);
- a leader that is elected does the same: of the newest ranges of each link those whose leaf the ingress log lacks get it from the notes in
  its copy of the log;
- a log that does not take the leaves at once, or that accepted them and then did not write them, is asked until it does (`LeafQueue`); the agent has no part in it.

Invariants: leaves of one queue are in the log in the order in which they came; a range gets its leaves once; what was not
appended gets none. Callers: region.crossing.ingest.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from audit.leaf import EncodedLeaf, read_header
from audit.position import ShardName
from felix.errors import Code, CorruptionError, UnavailableError
from felix.names import SpiffeId
from region.crossing.link_slot import Landed, LinkRecord
from region.evidence.audit_port import ArrivalLog, AuditPort
from region.log.segment import ShardIdentity
from region.log.shard import ShardLog

log = logging.getLogger("felix.region.arrivals")

RETRY_S: Final = 0.25
"""How soon the ingress log is asked again that did not take leaves."""

WAITING_BYTES_MAX: Final = 64 << 20
"""Leaves that wait for a log that does not take them: an envelope of 200 kB may have 4.4 MB of them, and windows count envelopes."""

Logged = Callable[[int, Exception | None], None]
"""Called with the index of the first leaf, or with why it is not in the log yet: then once more later."""


class Arrival(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The note of a range: where it is to be appended, its leaves, and the index below which they cannot be in the log."""

    slot: int
    landed: Landed
    log_size: int
    leaves: list[bytes]

    def encoded(self) -> list[EncodedLeaf]:
        """The leaves. Raises CorruptionError."""
        headers = [read_header(data) for data in self.leaves]
        if not headers or None in headers:
            raise CorruptionError("The note of a range that arrived holds a leaf that cannot be read.")
        return [
            EncodedLeaf(header, data) for header, data in zip(headers, self.leaves, strict=True) if header
        ]

    def has_landed(self, shard: ShardLog) -> bool:
        """Whether the link's record, which is written with the records, names this append."""
        data = shard.annotations.get(self.slot)
        record = None if data is None else LinkRecord.decode(data)
        return (
            record is not None
            # After an accepted truncation, or a resend, offsets repeat.
            and record.live == self.encoded()[0].header.incarnation
            and record.position.find(self.landed.source_base) == self.landed
        )


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Arrival)


def encode_arrival(slot: int, landed: Landed, audit: AuditPort, leaves: Sequence[EncodedLeaf]) -> bytes:
    """The note of a range that is about to be appended."""
    # A leaf that is accepted but not durable may be lost in a crash, and its index assigned again.
    return _encoder.encode(Arrival(slot, landed, audit.status().durable, [leaf.data for leaf in leaves]))


def decode_arrival(data: bytes) -> Arrival:
    """Raises CorruptionError."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptionError(f"The note of a range that arrived does not decode: {error}.") from error


class _Waiting(NamedTuple):
    leaves: list[EncodedLeaf]
    logged: Logged


class LeafQueue:
    """Leaves on their way to the ingress log, in order."""

    def __init__(self, audit: AuditPort) -> None:
        self._audit = audit
        self._waiting: deque[_Waiting] = deque()
        self._refused: list[_Waiting] = []
        """accepted, and then not written: they come before all that waits, once what was accepted behind them is answered"""
        self._under_way = 0
        """accepted, and not answered"""
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_bytes = 0
        self._is_closed = False

    def check_room(self) -> None:
        """Before a range is appended. Raises UnavailableError where too many leaves wait already."""
        if self._waiting_bytes >= WAITING_BYTES_MAX:
            raise UnavailableError(
                f"{self._waiting_bytes} bytes of leaves wait for the audit log; {WAITING_BYTES_MAX} may.",
                code=Code.LIMIT_MEMORY,
                retry_after_ms=1000,
            )

    def put(self, leaves: list[EncodedLeaf], logged: Logged) -> None:
        """Have these appended, now or as soon as the log takes them; `logged` is called on the loop."""
        self._waiting.append(_Waiting(leaves, logged))
        self._waiting_bytes += _size(leaves)
        if self._timer is None and not self._refused:
            self._drain()

    def _drain(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        while self._waiting and not self._refused:
            waiting = self._waiting[0]
            try:
                self._audit.append_nowait(waiting.leaves, partial(self._answered, waiting), loop)
            except Exception as error:
                self._timer = loop.call_later(RETRY_S, self._drain)
                waiting.logged(-1, error)
                return
            self._waiting.popleft()
            self._under_way += 1
            self._waiting_bytes -= _size(waiting.leaves)

    def _answered(self, waiting: _Waiting, index: int, error: Exception | None) -> None:
        self._under_way -= 1
        if error is not None and not self._is_closed:
            self._refused.append(waiting)
            self._waiting_bytes += _size(waiting.leaves)
        if self._refused and not self._under_way:
            self._waiting.extendleft(reversed(self._refused))
            self._refused.clear()
            self._timer = self._timer or asyncio.get_running_loop().call_later(RETRY_S, self._drain)
        waiting.logged(index, error)

    def close(self) -> None:
        """The broker stops; what waits is left to the next start."""
        self._is_closed = True
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()


def _size(leaves: Sequence[EncodedLeaf]) -> int:
    return sum(len(leaf.data) for leaf in leaves)


async def _late(
    annotations: Mapping[int, bytes], own: ShardIdentity, arrived: ArrivalLog, asker: SpiffeId
) -> list[tuple[int, Landed]]:
    """Of a log with copies, by its annotations: the ranges that landed and whose leaf may not stand, each with its link's slot, in the order of each link.
    A link has its newest ranges at most on the way, and its leaves come in their order. Raises what asking the ingress log raises."""
    found: list[tuple[int, Landed]] = []
    for slot, data in annotations.items():
        record = LinkRecord.decode(data)
        if record is None or not record.position.newest:
            continue
        name = ShardName(record.region, own.region, record.stream, own.shard, own.stream)
        below = (await arrived.arrived_below(asker, name, record.live)).below
        found += [(slot, landed) for landed in record.position.newest if landed.source_base >= below]
    return found


async def notes_from(
    annotations: Mapping[int, bytes], own: ShardIdentity, arrived: ArrivalLog, asker: SpiffeId
) -> int | None:
    """Of a log with copies: the offset of the first range whose leaf may not stand; whoever is elected needs the notes that stand there and
    behind. None where all leaves stand. Raises as `settle`."""
    late = await _late(annotations, own, arrived, asker)
    return min((landed.base_offset for _, landed in late), default=None)


async def _note_of(shard: ShardLog, slot: int, landed: Landed) -> Arrival:
    def is_of_it(data: bytes) -> bool:
        note = decode_arrival(data)
        return (note.slot, note.landed) == (slot, landed)

    notes = await shard.read_notes(landed.base_offset, is_of_it)
    if not notes:
        raise CorruptionError(
            f"{shard.identity.stream} shard {shard.identity.shard} has the range of source offset {landed.source_base} at offset "
            f"{landed.base_offset}, and neither its leaf nor the note of it is there.",
            hint="Restore the ingress log, or the stream, from where both are.",
        )
    return decode_arrival(notes[-1])


async def settle(
    shard: ShardLog,
    arrived: ArrivalLog,
    meter: Callable[[str], Awaitable[object]],
    asker: SpiffeId,
) -> int:
    """Write the leaves that a crash kept from the log, for ranges that landed in this shard; how many ranges.

    Runs before the shard is served. `meter` counts anew what a grant uses, by the log; `asker`: this broker. Raises CorruptionError, UnavailableError:
    then the shard must not be served.
    """
    notes = shard.take_notes_found()
    # A range that was refused and sent again has two notes for one place: the newer one is what landed.
    found = {(each.slot, each.landed): each for each in (decode_arrival(note.data) for note in notes)}
    landed = [each for each in found.values() if each.has_landed(shard)]
    if shard.has_copies:
        late = await _late(dict(shard.annotations), shard.identity, arrived, asker)
        landed += [await _note_of(shard, *each) for each in late]
    elif not notes:
        return 0
    missing: list[int] = []
    if landed:
        groups = [each.encoded() for each in landed]
        missing = await arrived.append_missing(min(each.log_size for each in landed), groups)
        for number in missing:
            leaves = groups[number]
            log.warning(
                "%s shard %d: a crash kept the leaf of source offsets %d to %d from the ingress log; it is there now",
                shard.identity.stream, shard.identity.shard, leaves[0].header.first_offset, leaves[-1].header.last_offset,
            )  # fmt: skip
        for grant in sorted({groups[number][0].header.grant_id for number in missing}):
            await meter(grant)
    if notes:
        await shard.clear_notes()
    return len(missing)
