"""Dead letters: records of one shard on their way into another stream, each exactly once; and the way back (redrive).

A view says which records (`send`, `give_back`). What is to be moved is journaled as a *move* before the first record goes, each
record is then appended as a batch of its own under a producer id that is derived from where it comes from and a sequence that
stands in the move: a repeat after a crash is a duplicate to the target's log. Once all of a move is durable there, `landed` is
journaled, and the view counts its records as done. Moves of a shard go one after the other, so their records keep their order.

How a view uses it: it keeps a journal, and gives `append` (its Journal.append, with whatever it puts around an entry). It hands
entries that it finds in its journal to `apply`, in order, puts `entries` into its snapshots, calls `start` after a replay and
`reset` before one. `landed` and what `apply` returns are the same news, live and replayed.

Invariants:
- nothing is appended to the target before the move is durable in the journal;
- a move has at most MOVE_RECORDS_MAX records, fewer than a log remembers batches of a producer;
- if the target no longer knows the producer (silent for a week, or the target was re-created), the move first begins another
  epoch, durably;
- a named stream is written to only while the identity that named it may publish there, and, of several brokers, while this one has
  its records, checked for each move: else the records go to the default stream, `<stream>.dead`, durably redirected first.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from felix.batch import (
    HEADERS_MAX,
    PRODUCER_ID_MAX,
    Batch,
    NewRecord,
    Record,
    decode_batch,
    decode_records,
    encode_batch,
)
from felix.errors import Code, CorruptionError, FelixError, RequestError
from felix.frames import FRAME_HEADER_BYTES
from felix.names import SpiffeId, StreamName
from felix.settings import DEAD_SUFFIX, QueueSettings, Retries, Views
from keys.envelope import SEALABLE_BYTES_MAX
from policy.access import Verb
from region.broker import Broker
from region.gather import Done, Gather, awaited
from region.log.companions import JournalKind
from region.log.epochs import EVERYTHING
from region.log.errors import OffsetOutOfRangeError
from region.log.producers import BATCHES_REMEMBERED
from region.log.ring import Entry
from region.log.shard import Appended, ShardLog
from region.metadata.records import StreamConfig
from region.streams.hosted import HostedStream

log = logging.getLogger("felix.region.dead_letter")

MOVE_RECORDS_MAX: Final = 24
"""One batch each, fewer than a log remembers of a producer: every record of a repeated move is recognised."""
assert MOVE_RECORDS_MAX < BATCHES_REMEMBERED
REASON_CHARS_MAX: Final = 1_000
RETRY_S_MIN: Final = 0.05
RETRY_S_MAX: Final = 10.0
"""How long a move waits that its target refused: a full disk, a broker that is short of memory."""
_READ_BYTES: Final = 1 << 20

DELIVER_AT: Final = "felix.deliver-at"
"""Not before this time: ms since the Unix epoch, as decimal text."""
DELAY: Final = "felix.delay"
"""Not before so many ms after the broker's time of the append, as decimal text."""
DEAD_REASON: Final = "felix.dead.reason"
DEAD_STREAM: Final = "felix.dead.stream"
DEAD_SHARD: Final = "felix.dead.shard"
DEAD_OFFSET: Final = "felix.dead.offset"
DEAD_ATTEMPTS: Final = "felix.dead.attempts"
DEAD_SUBSCRIPTION: Final = "felix.dead.subscription"
"""Only where a durable subscription gave the record up: its name."""
DEAD_GONE: Final = "felix.dead.gone"
"""The record itself was gone, or does not fit with these headers: its payload is empty here."""
_OWN: Final = frozenset(
    (
        DELIVER_AT,
        DELAY,
        DEAD_REASON,
        DEAD_STREAM,
        DEAD_SHARD,
        DEAD_OFFSET,
        DEAD_ATTEMPTS,
        DEAD_SUBSCRIPTION,
        DEAD_GONE,
    )
)

_MOVE: Final = 0
_RENUMBERED: Final = 1
_LANDED: Final = 2
_GIVEN_UP: Final = 3


def dead_letter_name(name: StreamName, retries: Retries) -> StreamName:
    """Where dead letters of a stream go. Raises RequestError(NAME_INVALID)."""
    if retries.dead_letter:
        return StreamName.parse(retries.dead_letter)
    return StreamName(name.tenant, name.namespace, name.name + DEAD_SUFFIX)


def dead_letter_config(source: StreamConfig) -> StreamConfig:
    """Settings of a dead-letter stream: a queue without an attempt limit, as durable as the source and with as many copies."""
    return StreamConfig(
        durability=source.durability,
        ring_bytes=source.ring_bytes,
        replicas=source.replicas,
        min_in_sync=source.min_in_sync,
        views=Views(queue=QueueSettings(retries=Retries(attempts_max=0))),
    )


class Origin(NamedTuple):
    """The durable subscription that gives records up: its name, the id that tells it from an earlier one, its retries."""

    subscription: str
    id: bytes
    retries: Retries


GONE: Final = -1
"""In place of the offset of a record that was lost while it was to be moved: it is moved without its contents, and nothing is done about it here."""


class Move(msgspec.Struct, frozen=True, array_like=True):
    """Records that go to `shard` of `stream` (modulo its shards) under `sequence`.. of `epoch`; `back`: a redrive."""

    stream: str
    shard: int
    epoch: int
    sequence: int
    offsets: list[int]
    attempts: list[int]
    reason: str
    back: bool = False

    @property
    def held(self) -> list[int]:
        """The offsets of those that the log may hold still."""
        return [offset for offset in self.offsets if offset != GONE]


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """In the journal: what happened, and with _MOVE and _RENUMBERED to which move."""

    kind: int
    move: Move | None = None


class _Partition(msgspec.Struct, frozen=True, array_like=True):
    """In a snapshot: how far the sequence to one target has come."""

    stream: str
    shard: int
    epoch: int
    sequence: int


_decoder: Final = msgspec.msgpack.Decoder(_Entry | None)
_partition_decoder: Final = msgspec.msgpack.Decoder(_Partition)
_PARTITION_MARK: Final = b"\xc1"
"""Never the first byte of a MessagePack value."""


class Outbox:
    """The pure part: which moves are under way, and how far each target's sequence has come."""

    __slots__ = ("_partitions", "pending")

    def __init__(self) -> None:
        self.pending: deque[Move] = deque()
        self._partitions: dict[tuple[str, int], tuple[int, int]] = {}

    def plan(
        self,
        stream: str,
        shard: int,
        offsets: Sequence[int],
        attempts: Sequence[int],
        reason: str,
        *,
        back: bool,
    ) -> Move:
        """The next move to a target. Changes nothing; `apply` takes it in."""
        assert 0 < len(offsets) == len(attempts) <= MOVE_RECORDS_MAX
        epoch, sequence = self._partitions.get((stream, shard), (0, 0))
        return Move(
            stream,
            shard,
            epoch,
            sequence,
            list(offsets),
            list(attempts),
            reason[:REASON_CHARS_MAX],
            back,
        )

    def renumbered(self) -> list[Move]:
        """The pending moves to the first one's target, under its next epoch: the target does not know this one."""
        first = self.pending[0]
        sequence = 0
        found = []
        for move in self.pending:
            if (move.stream, move.shard) == (first.stream, first.shard):
                found.append(msgspec.structs.replace(move, epoch=first.epoch + 1, sequence=sequence))
                sequence += len(move.offsets)
        return found

    def apply(self, kind: int, move: Move | None) -> Move | None:
        """Take in what happened; the first move, where it is over. Raises CorruptionError where that cannot have happened."""
        if kind in (_LANDED, _GIVEN_UP):
            if not self.pending:
                raise CorruptionError("A journal says that a record arrived which was never sent.")
            return self.pending.popleft()
        # A move that was renumbered or redirected stands in the place of the one with the same records.
        if move is None or not 0 < len(move.offsets) == len(move.attempts):
            raise CorruptionError("A journal names a move without records.")
        if kind == _RENUMBERED:
            for at, held in enumerate(self.pending):
                if held.offsets == move.offsets:
                    self.pending[at] = move
                    break
        else:
            self.pending.append(move)
        self._partitions[move.stream, move.shard] = (move.epoch, move.sequence + len(move.offsets))
        return None

    def entries(self) -> list[bytes]:
        """Everything, for a snapshot."""
        found = [
            _PARTITION_MARK + msgspec.msgpack.encode(_Partition(*partition, *state))
            for partition, state in self._partitions.items()
        ]
        found += (msgspec.msgpack.encode(_Entry(_MOVE, move)) for move in self.pending)
        return found

    def take(self, entry: bytes, end: int = EVERYTHING) -> tuple[int, Move | None]:
        """Take in an entry as it stands in the journal: what happened, and the move that is over thereby. Records from `end` on are no more: they go on
        as such, so that what follows them keeps its sequence."""
        try:
            if entry[:1] == _PARTITION_MARK:
                partition = _partition_decoder.decode(entry[1:])
                self._partitions[partition.stream, partition.shard] = (partition.epoch, partition.sequence)
                return _MOVE, None
            found = _decoder.decode(entry)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptionError(f"A dead letter's journal entry cannot be read: {error}.") from error
        if found is None:
            raise CorruptionError("A dead letter's journal entry is empty.")
        move = found.move
        if move is not None and any(offset >= end for offset in move.offsets):
            offsets = [offset if offset < end else GONE for offset in move.offsets]
            move = msgspec.structs.replace(move, offsets=offsets)
        return found.kind, self.apply(found.kind, move)


class DeadLetters:
    """Carries one shard's moves. One per view and shard; on the event loop."""

    def __init__(
        self,
        broker: Broker,
        source: HostedStream,
        shard: ShardLog,
        kind: JournalKind,
        append: Callable[[bytes, Done], None],
        landed: Callable[[Move], None],
        given_up: Callable[[Move], None],
        origin: Origin | None = None,
        named_by: Callable[[], str] | None = None,
    ) -> None:
        """`landed`: a move is in its target, durably, and journaled as such. `given_up`: a redrive whose target is gone; its
        records are the view's again. `named_by`: who named the stream for dead letters (else: who did for the queue)."""
        self._broker = broker
        self._source = source
        self._shard = shard
        self._kind = kind
        self._append = append
        self._landed = landed
        self._given_up = given_up
        self._origin = origin
        self._named_by = named_by or (lambda: source.record.config.dead_letter_by)
        self._outbox = Outbox()
        self._task: asyncio.Task[None] | None = None
        self._unsettled = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._generation = 0
        self.moved = 0
        """Dead letters that have landed since this broker opened the view."""

    # -- what is under way -----------------------------------------------------------------------------

    @property
    def pending(self) -> Iterable[Move]:
        """Moves that have not landed, oldest first."""
        return self._outbox.pending

    def send(self, offsets: Sequence[int], attempts: Sequence[int], reason: str) -> None:
        """Move these records to the stream's dead letters, in this order. `landed` comes once per move."""
        name = self._goes_to()
        number = self._shard.identity.shard
        for at in range(0, len(offsets), MOVE_RECORDS_MAX):
            some = slice(at, at + MOVE_RECORDS_MAX)
            self._begin(self._outbox.plan(name, number, offsets[some], attempts[some], reason, back=False))

    def alter(self, retries: Retries) -> None:
        """For a durable subscription: later dead letters go where these settings say. A queue's settings are read each time."""
        if self._origin is not None:
            self._origin = self._origin._replace(retries=retries)

    def give_back(self, stream: StreamName, shard: int, offsets: Sequence[int]) -> None:
        """Move dead letters back to `shard` of the stream that they came from, in this order; attempts start at zero."""
        for at in range(0, len(offsets), MOVE_RECORDS_MAX):
            some = offsets[at : at + MOVE_RECORDS_MAX]
            self._begin(self._outbox.plan(str(stream), shard, some, [0] * len(some), "", back=True))

    def _goes_to(self) -> str:
        """The stream that dead letters go to now: the named one, while the identity that named it may publish there."""
        retries = self._retries()
        if retries.dead_letter and (why := self._why_not_there()):
            log.warning(
                "dead letters of %s no longer go to %s: %s", self._source.name, retries.dead_letter, why
            )
            retries = Retries()
        return str(dead_letter_name(self._source.name, retries))

    def _why_not_there(self) -> str:
        """Why they may not go to the stream that is named for them; empty where they may."""
        named_by, name = self._named_by(), StreamName.parse(self._retries().dead_letter)
        if not named_by or not self._broker.allows(SpiffeId.parse(named_by), Verb.PUBLISH, name):
            return f"{named_by or 'nobody known named it, who'} may not publish there"
        return self._broker.why_apart(self._source.name, name)

    def _redirect(self, move: Move) -> bool:
        """Send a dead letter elsewhere that may not go where it was to: a right was taken away after it was planned, say."""
        own = str(dead_letter_name(self._source.name, Retries()))
        if move.back or move.stream == own or move.stream == (target := self._goes_to()):
            return False
        self._record(
            _RENUMBERED,
            self._outbox.plan(target, move.shard, move.offsets, move.attempts, move.reason, back=False),
        )
        return True

    def _retries(self) -> Retries:
        if self._origin is not None:
            return self._origin.retries
        queue = self._source.record.config.views.queue
        return queue.retries if queue is not None else Retries()

    def _begin(self, move: Move) -> None:
        self._record(_MOVE, move)
        self.start()

    def _record(self, kind: int, move: Move | None) -> Move | None:
        over = self._outbox.apply(kind, move)
        self._unsettled += 1
        self._settled.clear()
        generation = self._generation

        def done(error: FelixError | None) -> None:
            # A refusal makes the view replay: `reset` follows, and nothing of this counts any more.
            if error is None and generation == self._generation:
                self._unsettled -= 1
                if not self._unsettled:
                    self._settled.set()

        self._append(msgspec.msgpack.encode(_Entry(kind, move)), done)
        return over

    # -- the journal -----------------------------------------------------------------------------------

    def apply(self, entry: bytes, end: int = EVERYTHING) -> tuple[Move | None, bool]:
        """An entry of the journal, at replay: the move that is over by it, if one is, and whether it landed. What it says of offsets from `end` on is of
        records that are no more. Raises CorruptionError."""
        kind, over = self._outbox.take(entry, end)
        return over, kind == _LANDED

    def entries(self) -> list[bytes]:
        """The state, for a snapshot."""
        return self._outbox.entries()

    def reset(self) -> None:
        """Forget everything: the journal is about to be replayed."""
        self.stop()
        self._outbox = Outbox()
        self._generation += 1
        self._unsettled = 0
        self._settled.set()

    def start(self) -> None:
        """Carry what is pending."""
        # One that has just come to its end may not have been put away yet.
        if (self._task is None or self._task.done()) and self._outbox.pending:
            self._task = asyncio.ensure_future(self._carry())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task = None
        if not task.cancelled() and task.exception() is not None:
            log.error("dead letters of %s stay where they are", self._source.name, exc_info=task.exception())

    def stop(self) -> None:
        """Carry nothing more; what is pending is carried after the next replay."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    # -- carrying --------------------------------------------------------------------------------------

    async def _carry(self) -> None:
        wait_s = RETRY_S_MIN
        while self._outbox.pending:
            move = self._outbox.pending[0]
            try:
                if self._redirect(move):
                    continue
                await self._settled.wait()
                await self._land(move)
            except FelixError as error:
                if move.back and isinstance(error, RequestError) and error.code is Code.NOT_FOUND:
                    over = self._record(_GIVEN_UP, None)
                    assert over is move
                    self._given_up(move)
                    continue
                if error.code is Code.SEQUENCE_GAP:
                    for renumbered in self._outbox.renumbered():
                        self._record(_RENUMBERED, renumbered)
                    continue
                log.warning("%d records of %s wait to be moved to %s: %s", len(move.offsets), self._source.name,
                            move.stream, error)  # fmt: skip
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_S_MAX)
                continue
            wait_s = RETRY_S_MIN
            self._record(_LANDED, None)
            if not move.back:
                self.moved += len(move.offsets)
            self._landed(move)

    async def _land(self, move: Move) -> None:
        """Append every record of the move, or find that it stands there. Raises what the target refuses it with."""
        target = await self._target(move)
        shard = target.shard(move.shard % target.shard_count)
        records = await read_records(self._shard, move.offsets)
        producer_id = self._producer_id(move)

        def append(done: Done) -> None:
            # If a record has no room now, the records after it leave a gap and are refused, too; the first refusal gives the
            # reason.
            gather = Gather(done)

            def appended(result: Appended | FelixError) -> None:
                gather.done(result if isinstance(result, FelixError) else None)

            for at, (offset, attempts, record) in enumerate(
                zip(move.offsets, move.attempts, records, strict=True)
            ):
                gather.part()
                batch = self._batch(move, offset, attempts, record, producer_id, move.sequence + at)
                shard.append_nowait(batch, appended)
            gather.asked()

        await awaited(append)

    async def _target(self, move: Move) -> HostedStream:
        name = StreamName.parse(move.stream)
        if not move.back:
            target = await self._broker.ensure_stream(name, dead_letter_config(self._source.record.config))
            target.takes_dead_letters = True
            return target
        held = self._broker.streams.get(name)
        if held is None:
            raise RequestError(f"{name}, where dead letters are to go back to, is gone.", code=Code.NOT_FOUND)
        return held

    def _producer_id(self, move: Move) -> int:
        """Of all moves from here to there; another for another incarnation, shard or kind of view. No client may use it."""
        return producer_of(
            self._source.incarnation,
            self._kind,
            self._shard.identity.shard,
            move.stream,
            move.shard,
            b"" if self._origin is None else self._origin.id,
        )

    def _batch(
        self, move: Move, offset: int, attempts: int, record: Record | None, producer_id: int, sequence: int
    ) -> Batch:
        """One record as it stands at the target: whole, else compressed, else without its payload."""
        own: dict[str, bytes] = {}
        if not move.back:
            own = {
                DEAD_REASON: move.reason.encode(),
                DEAD_STREAM: str(self._source.name).encode(),
                DEAD_SHARD: b"%d" % self._shard.identity.shard,
                DEAD_OFFSET: b"%d" % offset,
                DEAD_ATTEMPTS: b"%d" % attempts,
            }
            if self._origin is not None:
                own[DEAD_SUBSCRIPTION] = self._origin.subscription.encode()
        key = bytes(record.key) if record is not None and record.key else None
        stub = NewRecord(b"", key, {**own, DEAD_GONE: b"1"})
        forms = [(stub, False)]
        if record is not None:
            given = [(name, value) for name, value in record.headers.items() if name not in _OWN]
            whole = NewRecord(bytes(record.payload), key, {**dict(given[: HEADERS_MAX - len(own)]), **own})
            forms = [(whole, False), (whole, True), (stub, False)]
        for form, compress in forms:
            try:
                batch = encode_batch(
                    [form],
                    producer_id=producer_id,
                    producer_epoch=move.epoch,
                    base_sequence=sequence,
                    compress=compress,
                )
            except RequestError:
                continue  # too large so
            if batch.header.body_length <= SEALABLE_BYTES_MAX:
                return batch
        raise AssertionError("a record without payload fits")


def producer_of(
    incarnation: bytes, kind: JournalKind, shard: int, target: str, target_shard: int, subscription: bytes
) -> int:
    """The producer id of what goes from a shard of this incarnation to `target_shard` of another stream, from a durable subscription (its id) or a queue
    (empty). Since no client may use it, a record that has it was brought by that view of that incarnation."""
    digest = hashlib.sha256(
        b"felix/move/1\0"
        + incarnation
        + bytes([kind])
        + shard.to_bytes(4)
        + target_shard.to_bytes(4)
        + target.encode()
        + (b"\0" + subscription if subscription else b"")
    ).digest()
    return int.from_bytes(digest[:8]) | (PRODUCER_ID_MAX + 1)


def as_given(record: Record) -> dict[str, bytes]:
    """The headers that a record had before it became a dead letter, as far as they fit."""
    return {name: value for name, value in record.headers.items() if name not in _OWN}


async def read_records(shard: ShardLog, offsets: Sequence[int]) -> list[Record | None]:
    """The records at these offsets, with payloads and keys as views; None for one that the log no longer holds. Raises what
    reading a log raises."""
    wanted = set(offsets)
    found: dict[int, Record] = {}
    for offset in sorted(wanted):
        if offset in found or not shard.log_start_offset <= offset < shard.high_watermark:
            continue
        try:
            entries = await shard.read(offset, _READ_BYTES)
        except OffsetOutOfRangeError:
            continue  # retention was faster
        for entry in entries:
            if any(each in wanted for each in range(entry.base_offset, entry.next_offset)):
                found.update(
                    (record.offset, record)
                    for record in decode_records(decode_batch(entry_body(entry)))
                    if record.offset in wanted
                )
    return [found.get(offset) for offset in offsets]


async def each_record(shard: ShardLog, offsets: Sequence[int]) -> AsyncIterator[tuple[int, Record | None]]:
    """As `read_records`, offsets ascending, one after the other: nothing is kept, and what is not asked for is not read."""
    at = 0
    while at < len(offsets):
        entries: Sequence[Entry] = ()
        if shard.log_start_offset <= offsets[at] < shard.high_watermark:
            with suppress(OffsetOutOfRangeError):  # retention was faster
                entries = await shard.read(offsets[at], _READ_BYTES)
        before = at
        for entry in entries:
            while at < len(offsets) and offsets[at] < entry.base_offset:
                yield offsets[at], None
                at += 1
            if at == len(offsets) or offsets[at] >= entry.next_offset:
                continue
            records = {each.offset: each for each in decode_records(decode_batch(entry_body(entry)))}
            while at < len(offsets) and offsets[at] < entry.next_offset:
                yield offsets[at], records.get(offsets[at])
                at += 1
        if at == before:
            yield offsets[at], None
            at += 1


def entry_body(entry: Entry) -> memoryview:
    """The batch of an entry of a stream's own log, without the frame that stands before it (region.streams.table)."""
    return memoryview(entry.data)[FRAME_HEADER_BYTES:]
