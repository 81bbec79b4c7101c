"""What a publisher decides: which batch a record joins, what is sent next, which caller gets which result. Pure: no loop, clock or socket.

The shell (felix.publisher) puts records in with `add`, brings what happened to `step` (acknowledgements to `acknowledged`), which gives a `Ready`, and
takes batches from `next_batch` for as long as the session has credit. It carries out a `Ready` in the order of its fields, and comes back with `TimeCame` at `wake_at`.

A record joins the open batch of its shard. The batch closes when it is full (bytes or records), or when its linger
ends; linger 0 is the end of the event loop iteration, so a lone record never waits and a burst batches itself. While a shard has
FLYING_BATCHES_FILL batches on the way, its open batch goes on filling instead of closing small. A closed batch is
encoded once and stays these bytes; only its sequence can be renewed, in the header.

Invariants (asserted after each step in tests/client/test_publisher_core.py):

- records of one shard are in the log in the order in which they were given, each once, however often the link
  breaks: batches carry producer id, epoch and sequence, are sent again in order, and the broker knows a repeated one;
- of one shard, at most `in_flight_max` batches are in flight, fewer than the broker remembers;
- a record is put in while fewer than `buffer_bytes` are held, so what is held exceeds them by one record or batch at most;
- each batch is dealt with once, delivered or given up, and so each caller is answered once;
- the oldest batch of a shard that is not dealt with is known: it is the first of `unacknowledged`.

How order survives a refusal: the broker refuses what follows a refused batch, too (SEQUENCE_GAP). If the refused batch will be sent
again, what follows it is sent again behind it, in order. A batch that is refused with SEQUENCE_GAP at the head of its shard is certainly not in the log: the
shard takes the next producer epoch, numbers what is left from 0 and sends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from math import inf
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from felix.backoff import Backoff, BackoffPolicy
from felix.batch import (
    BATCH_BYTES_MAX,
    COMPRESS_LEVEL_MAX,
    HEADER_BYTES,
    KEY_BYTES_MAX,
    MESSAGE_ID_HEADER,
    RECORDS_MAX,
    Batch,
    BatchHeader,
    Headers,
    NewRecord,
    Record,
    decode_records,
    encode_batch,
    encode_headers,
)
from felix.errors import Code, FelixError, NotLeaderError, RequestError, UnavailableError
from felix.frames import FRAME_HEADER_BYTES, AppendedBody, FrameType, encode_condition, frame_header
from felix.messages import Throttled
from felix.names import StreamName, shard_for_key
from felix.payload import RECORD_OVERHEAD_BYTES, Payload, RecordKey, key_bytes, message_id_of, payload_bytes
from felix.provenance import check_own
from felix.runtime.port import Random

IN_FLIGHT_MAX: Final = 127
"""Batches of one shard that are sent and not acknowledged, where the broker allows as many (`PublisherOpened.in_flight`): fewer than it
remembers per producer, so that it recognises every repeated one; enough that it syncs some while others are under way."""
FLYING_BATCHES_FILL: Final = 7
"""With so many on the way, an open batch goes on filling instead of closing small: the path is busy, and larger
batches cost less per record."""
BATCH_BYTES_DEFAULT: Final = 128 * 1024
"""Where a batch closes: large enough that per-batch work vanishes, small enough to flow."""
BATCH_RECORDS_DEFAULT: Final = 8_192
BUFFER_BYTES_DEFAULT: Final = 32 * 1024 * 1024
"""Records accepted and not yet acknowledged, of one publisher."""
DEADLINE_MS_DEFAULT: Final = 120_000
"""How long a batch is tried again before its error is raised: longer than a broker's restart."""
OPEN_PART: Final = 1 / 16
"""For so much of that time a batch that nobody takes stays open: a record that joins it has as much less than the first one, and no session leaves few batches."""
GRACE_S: Final = 10.0
"""What a batch has beyond its deadline where the process stood still as that came: to read the answer that waits, or to connect again and send it once more."""
LINGER_MS_MAX: Final = 60_000
COMPRESS_GAIN: Final = 0.9
"""A body that zstd leaves larger than this part of it is not worth the time."""
COMPRESS_JUDGED_BYTES: Final = 1_024
"""A smaller batch says nothing about those that follow."""
COMPRESS_SKIP_MAX: Final = 64
"""Batches in a row that are not tried after some that gained nothing: 1, 2, 4 … of them, then one is tried again."""

_STREAM_ENDED: Final = (Code.NOT_FOUND_OR_FORBIDDEN, Code.NOT_FOUND, Code.FORBIDDEN)
"""Refusals of a batch that mean the whole publish stream: the right was taken away, or the stream is gone."""

Acks = Literal["all", "none"]

Caller = Any
"""Who waits for a record or a batch. The core carries it and never calls it."""
Ticket = Any
"""By which the shell knows one sending of a batch. The core compares it, and gives it back."""


class Receipt(NamedTuple):
    """Where a batch stands in the log: offsets base_offset .. base_offset + records, the broker's time in ms.

    `offsets`, one per record, where some were there already (message ids), so that they do not follow each other.
    """

    shard: int
    base_offset: int
    records: int
    append_time_ms: int
    offsets: tuple[int, ...] = ()


class Refusal(NamedTuple):
    """A batch that is not in the log as far as anybody knows, why, and its records."""

    error: FelixError
    shard: int
    batch: Batch

    def records(self) -> Iterator[Record]:
        """The records in the order in which they were given; their offsets count from 0 and mean nothing."""
        return decode_records(self.batch)


class PublishProgress(NamedTuple):
    """How far a publisher has come, in records; they count from the first one that it was given.

    - `acknowledged` ≤ `given`; with acks="none" those that have left count as acknowledged;
    - the first `contiguous` records are all acknowledged, and the next one is not, if there is one;
    - `offsets` has the last acknowledged offset of every shard that has one.
    """

    given: int
    acknowledged: int
    contiguous: int
    offsets: dict[int, int]


class PendingBatch:
    """A closed batch that is not dealt with yet. `ticket`: of its last sending, while an answer to that is awaited."""

    __slots__ = (
        "accumulator", "appended", "backoff", "body", "caller", "callers", "condition", "deadline", "done", "first", "frame_bytes", "graced", "header",
        "held_bytes", "renumbered", "sent", "sent_ever", "ticket",
    )  # fmt: skip

    def __init__(
        self, accumulator: Accumulator, batch: Batch, held_bytes: int, first: int, condition: bytes
    ) -> None:
        self.accumulator = accumulator
        self.header: BatchHeader = batch.header
        self.body = batch.body
        self.condition = condition
        self.frame_bytes = FRAME_HEADER_BYTES + len(condition) + HEADER_BYTES + len(batch.body)
        """of its frame on the wire, which credit is asked for"""
        self.held_bytes = held_bytes
        self.first = first
        self.deadline = inf
        self.callers: list[Caller | None] | None = None
        self.caller: Caller | None = None
        self.ticket: Ticket | None = None
        self.appended: AppendedBody | None = None
        self.sent = False
        self.sent_ever = False
        self.done = False
        self.renumbered = False
        self.graced = False
        self.backoff: Backoff | None = None

    def frame(self, correlation: int) -> bytes:
        """Its frame on the wire."""
        kind = FrameType.CONDITIONAL if self.condition else FrameType.BATCH
        head = frame_header(kind, self.frame_bytes - FRAME_HEADER_BYTES, correlation)
        return b"".join((head, self.condition, self.header.encode(), self.body))

    @property
    def offsets(self) -> Sequence[int]:
        """Of its records, once it is appended."""
        assert self.appended is not None
        base = self.appended.base_offset
        return self.appended.offsets or range(base, base + self.header.records)

    @property
    def receipt(self) -> Receipt:
        """Where it stands, once it is appended."""
        header, appended = self.header, self.appended
        assert appended is not None
        return Receipt(
            header.shard, appended.base_offset, header.records, appended.append_time_ms, appended.offsets
        )

    @property
    def every_record_has_a_caller(self) -> bool:
        """Whether no record was given without someone who waits for its offset."""
        if self.caller is not None:
            return True
        callers = self.callers
        return callers is not None and len(callers) == self.header.records and None not in callers


class Accumulator:
    """One shard of a publisher: its open batch, and its closed ones in the order of their sequence."""

    __slots__ = (
        "callers", "epoch", "first", "linger_over", "linger_until", "next_sequence", "open_bytes", "ready_since", "records", "shard",
        "stalled_until", "unacknowledged", "unsent",
    )  # fmt: skip

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.records: list[NewRecord] = []
        # Of the records from the first on, as far as one has a caller.
        self.callers: list[Caller | None] | None = None
        # Which of the publisher's records is the first of the open batch.
        self.first = 0
        self.open_bytes = 0
        self.linger_until = inf
        self.linger_over = False
        # Since when the open batch may go and nobody takes it, as while no session stands.
        self.ready_since = inf
        self.unacknowledged: deque[PendingBatch] = deque()
        # The newest of those, in the same order.
        self.unsent: deque[PendingBatch] = deque()
        self.epoch = 0
        self.next_sequence = 0
        # A batch was refused for now: nothing is sent before this time.
        self.stalled_until: float | None = None

    @property
    def flying(self) -> int:
        """Batches from the oldest that is not acknowledged to the newest that was sent."""
        return len(self.unacknowledged) - len(self.unsent)

    def rewind(self) -> list[Ticket]:
        """Everything that is not acknowledged is to be sent, from the first one on. Gives the sendings that no longer count."""
        forget = []
        for pending in self.unacknowledged:
            if pending.ticket is not None:
                forget.append(pending.ticket)
            pending.ticket, pending.sent = None, False
        self.unsent = deque(pending for pending in self.unacknowledged if not pending.done)
        return forget

    def renumber(self) -> None:
        """The next producer epoch: what is left counts from sequence 0."""
        self.epoch += 1
        self.next_sequence = 0
        for pending in self.unacknowledged:
            if not pending.done:
                pending.header = replace(
                    pending.header, producer_epoch=self.epoch, base_sequence=self.next_sequence
                )
                self.next_sequence += pending.header.records


class Added(Enum):
    """What `PublisherCore.add` asks for."""

    OPENED = "opened"
    """A batch was begun: tell `LINGERS`, or `ITERATION_ENDED` at the end of this event loop iteration without a linger."""
    FULL = "full"
    """A batch is full: take it with `next_batch`. Another may have been begun: do as for OPENED, too."""


OPENED: Final = Added.OPENED
FULL: Final = Added.FULL

# -- events --------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """A publish stream stands. `window_bytes`: what the session lets be on its way, so that no frame may be longer. `in_flight`: how
    many batches of one shard the broker allows to be in flight."""

    incarnation: bytes
    shards: int
    batch_bytes_max: int
    window_bytes: int
    in_flight: int


class LinkLost(NamedTuple):
    """The publish stream is gone; another may come."""


class Refused(NamedTuple):
    """The broker refused a batch."""

    batch: PendingBatch
    ticket: Ticket
    error: FelixError


class StreamRefused(NamedTuple):
    """The broker refused some batch of those that it does not acknowledge."""

    error: FelixError


class NeverFits(NamedTuple):
    """The frame of a batch from `next_batch` is longer than all credit of the session."""

    batch: PendingBatch
    window_bytes: int


class IterationEnded(NamedTuple):
    """The event loop iteration is over in which `add` gave OPENED."""


class Lingers(NamedTuple):
    """`add` gave OPENED, and the batch has until `linger_ms` from now."""


class TimeCame(NamedTuple):
    """`wake_at` is here. `throttled`: what slows the session down, as the broker last said. `session`: how it stands with the broker, in words.
    `stood_still`: the time came much later than it was asked for, since the process stood still; nobody could be heard meanwhile."""

    throttled: Throttled | None
    session: str = ""
    stood_still: bool = False


class RoomWanted(NamedTuple):
    """Somebody waits for room: what is open leaves, since it could be what fills the buffer."""


class Flushed(NamedTuple):
    """What is open closes now."""


class Failed(NamedTuple):
    """Nothing more can be done with this publisher."""

    error: FelixError


Event = (
    Opened
    | LinkLost
    | Refused
    | StreamRefused
    | NeverFits
    | IterationEnded
    | Lingers
    | TimeCame
    | RoomWanted
    | Flushed
    | Failed
)

LINK_LOST: Final = LinkLost()
ITERATION_ENDED: Final = IterationEnded()
LINGERS: Final = Lingers()
ROOM_WANTED: Final = RoomWanted()
FLUSHED: Final = Flushed()


# -- what is to be done --------------------------------------------------------------------------------


class GivenUp(NamedTuple):
    """A batch is refused for good; `callers` and `caller` are to be told."""

    callers: Sequence[Caller | None]
    caller: Caller | None
    refusal: Refusal


class Ready(msgspec.Struct, frozen=True):
    """What is to be done, in this order; then what `next_batch` gives is to be sent."""

    forget: Sequence[Ticket] = ()
    """sendings whose answers do not count any more"""
    delivered: PendingBatch | None = None
    """is in the log: its `callers` are to be told their `offsets`, its `caller` the `receipt`"""
    given_up: Sequence[GivenUp] = ()
    reopen: bool = False
    """the broker takes nothing more on this publish stream: end it and ask for another, which says what still holds"""


NOTHING: Final = Ready()


class PublisherCore:
    """See the module. `now`: seconds of a clock that does not go back.

    Raises RequestError(CONFIG_INVALID) where a setting is out of its range.
    """

    __slots__ = (
        "_began", "_compress", "_deadline_s", "_incarnation", "_linger_s", "_lost_first", "_next_accumulator", "_offsets", "_open_s",
        "_policy", "_producer_id", "_random", "_undated", "_unkeyed", "accumulators", "acknowledged_records", "acks",
        "batch_bytes", "batch_records", "buffer_bytes", "error", "failed", "given", "held_bytes",
        "in_flight_max", "plain_left", "plain_next",
        "record_bytes_max", "stream", "wake_at",
    )  # fmt: skip

    def __init__(
        self,
        stream: StreamName,
        policy: BackoffPolicy,
        random: Random,
        *,
        producer_id: int,
        linger_ms: float = 0,
        batch_bytes: int = BATCH_BYTES_DEFAULT,
        batch_records: int = BATCH_RECORDS_DEFAULT,
        buffer_bytes: int = BUFFER_BYTES_DEFAULT,
        acks: Acks = "all",
        compress: int = 0,
        deadline_ms: int = DEADLINE_MS_DEFAULT,
    ) -> None:
        for name, value, low, high in (
            ("linger_ms", linger_ms, 0, LINGER_MS_MAX),
            ("batch_bytes", batch_bytes, 1024, BATCH_BYTES_MAX),
            ("batch_records", batch_records, 1, RECORDS_MAX),
            ("buffer_bytes", buffer_bytes, BATCH_BYTES_MAX, 1 << 40),
            ("deadline_ms", deadline_ms, 1, 1 << 31),
            ("compress", compress, 0, COMPRESS_LEVEL_MAX),
        ):
            if not low <= value <= high:
                raise RequestError(
                    f"{name} is {value}; it must be from {low} to {high}.", code=Code.CONFIG_INVALID
                )
        if acks not in ("all", "none"):
            raise RequestError(f"acks is {acks!r}; it is 'all' or 'none'.", code=Code.CONFIG_INVALID)
        self.stream = stream
        self.acks: Acks = acks
        self.batch_bytes = batch_bytes
        self.batch_records = batch_records
        self.buffer_bytes = buffer_bytes
        self.record_bytes_max = BATCH_BYTES_MAX - HEADER_BYTES
        self.accumulators: list[Accumulator] = []
        self.in_flight_max = IN_FLIGHT_MAX
        self.held_bytes = 0
        """of records accepted and not yet dealt with"""
        self.given = self.acknowledged_records = 0
        self.error: FelixError | None = None
        """of the first batch that was given up and about which some record's giver was not told"""
        self.failed: FelixError | None = None
        self.wake_at = inf
        """`TimeCame` is wanted then, at the latest; it never harms"""
        # Batches that are not even tried to compress, after some that did not get smaller.
        self.plain_left = self.plain_next = 0
        self._policy = policy
        self._random = random
        self._producer_id = producer_id if acks == "all" else 0
        self._linger_s = linger_ms / 1000
        self._deadline_s = deadline_ms / 1000
        self._open_s = self._deadline_s * OPEN_PART
        self._compress = compress
        self._incarnation = b""
        self._unkeyed = 0
        self._next_accumulator = 0
        self._lost_first: int | None = None
        self._offsets: dict[int, int] = {}
        # `add` is not told the time, which costs as much as a tenth of it: the linger and the deadline of what it made begin with the next call that is.
        self._began: list[Accumulator] = []
        self._undated: list[PendingBatch] = []

    @property
    def progress(self) -> PublishProgress:
        """How far it has come."""
        firsts = [self.given] if self._lost_first is None else [self._lost_first]
        for accumulator in self.accumulators:
            if accumulator.unacknowledged:
                firsts.append(accumulator.unacknowledged[0].first)
            elif accumulator.records:
                firsts.append(accumulator.first)
        return PublishProgress(self.given, self.acknowledged_records, min(firsts), dict(self._offsets))

    @property
    def settled(self) -> int:
        """How many records, from the first on, are dealt with or in no closed batch yet."""
        settled = self.given
        for accumulator in self.accumulators:
            if accumulator.unacknowledged and accumulator.unacknowledged[0].first < settled:
                settled = accumulator.unacknowledged[0].first
        return settled

    # -- records in -----------------------------------------------------------------------------------

    def add(
        self,
        payload: Payload,
        key: RecordKey | None,
        headers: Headers | None,
        caller: Caller | None = None,
        shard: int | None = None,
    ) -> Added | None:
        """Put one record into its batch; only once it is open. Raises RequestError where the record cannot be."""
        if type(payload) is not bytes:
            payload = payload_bytes(payload)
        size = len(payload) + RECORD_OVERHEAD_BYTES
        unkeyed = False
        own: bytes | None = None
        if key:
            own = key if type(key) is bytes and len(key) <= KEY_BYTES_MAX else key_bytes(key)
            accumulator = self.accumulators[shard_for_key(own, len(self.accumulators))]
            size += len(own)
        elif headers and (route := headers.get(MESSAGE_ID_HEADER)):
            # A repetition must reach the shard that remembers the first one.
            accumulator = self.accumulators[shard_for_key(route, len(self.accumulators))]
        else:
            accumulator = self.accumulators[self._unkeyed]
            unkeyed = True
        if shard is not None:
            accumulator, unkeyed = self.accumulators[self._checked_shard(shard)], False
        if headers:
            check_own(headers)
            size += len(encode_headers(headers))
        if size > self.record_bytes_max:
            raise RequestError(
                f"A record of {size} bytes; {self.record_bytes_max} are allowed in this session.",
                code=Code.BATCH_TOO_LARGE,
                hint="Split it, or keep it elsewhere and publish where it is.",
            )
        records = accumulator.records
        added: Added | None = None
        while records and accumulator.open_bytes + size > self.batch_bytes:
            self._close(accumulator)
            added = FULL
            if unkeyed:
                accumulator = self.accumulators[self._unkeyed]
            records = accumulator.records
        if caller is not None:
            callers = accumulator.callers
            if callers is None:
                callers = accumulator.callers = []
            if len(callers) < len(records):
                callers += [None] * (len(records) - len(callers))
            callers.append(caller)
        if not records:
            accumulator.first = self.given
        self.given += 1
        records.append(NewRecord(payload, own, headers))
        accumulator.open_bytes += size
        self.held_bytes += size
        if accumulator.open_bytes >= self.batch_bytes or len(records) >= self.batch_records:
            self._close(accumulator)
            return FULL
        if len(records) == 1:
            self._began.append(accumulator)
            return added or OPENED
        return added

    def add_batch(
        self,
        records: Sequence[NewRecord],
        shard: int | None,
        caller: Caller,
        now: float,
        expected_offset: int | None = None,
    ) -> None:
        """Put these records in as one batch of one shard; only once it is open. Take it with `next_batch`.

        Raises RequestError(BATCH_TOO_LARGE, INVALID) where they do not make one batch, or name a reserved header.
        """
        if expected_offset is not None and not 0 <= expected_offset < 1 << 63:
            raise RequestError(f"There is no offset {expected_offset}; offsets begin at 0.")
        for record in records:
            if record.headers:
                check_own(record.headers)
        accumulator = self.accumulators[self._shard_of(records, shard)]
        self._close(accumulator)
        condition = b"" if expected_offset is None else encode_condition(expected_offset)
        pending = self._encode(accumulator, list(records), 0, self.given, condition)
        pending.caller = caller
        self.given += len(records)
        self.held_bytes += pending.held_bytes
        self._date(now)

    def _shard_of(self, records: Sequence[NewRecord], shard: int | None) -> int:
        shards = len(self.accumulators)
        if not records:
            raise RequestError("A batch without records.")
        if shard is None:
            routes = (record.key or message_id_of(record.headers) for record in records)
            keyed = {shard_for_key(route, shards) for route in routes if route}
            if len(keyed) > 1:
                raise RequestError(
                    f"These records belong into {len(keyed)} shards by their keys, and a batch into one.",
                    hint="Publish one batch per key, or use `publish_many`.",
                )
            if keyed:
                return keyed.pop()
            shard = self._unkeyed
            self._unkeyed = (shard + 1) % shards
        return self._checked_shard(shard)

    def _checked_shard(self, shard: int) -> int:
        shards = len(self.accumulators)
        if not 0 <= shard < shards:
            raise RequestError(f"There is no shard {shard}; {self.stream} has {shards}, from 0.")
        return shard

    # -- batching -------------------------------------------------------------------------------------

    def _close(self, accumulator: Accumulator) -> None:
        """Close the open batch of a shard, if it has one."""
        if not accumulator.records:
            return
        records, accumulator.records = accumulator.records, []
        callers, accumulator.callers = accumulator.callers, None
        held, accumulator.open_bytes = accumulator.open_bytes, 0
        accumulator.linger_over = False
        accumulator.linger_until = accumulator.ready_since = inf
        if accumulator.shard == self._unkeyed:
            self._unkeyed = (self._unkeyed + 1) % len(self.accumulators)
        pending = self._encode(accumulator, records, held, accumulator.first)
        pending.callers = callers

    def _encode(
        self,
        accumulator: Accumulator,
        records: list[NewRecord],
        held_bytes: int,
        first: int,
        condition: bytes = b"",
    ) -> PendingBatch:
        """`held_bytes`: what the records were counted as when they came in one by one; 0: what they are together."""
        compress = self._compress
        if compress and self.plain_left:
            self.plain_left -= 1
            compress = 0
        batch = encode_batch(
            records,
            shard=accumulator.shard,
            producer_id=self._producer_id,
            producer_epoch=accumulator.epoch if self._producer_id else 0,
            base_sequence=accumulator.next_sequence if self._producer_id else 0,
            compress=compress,
        )
        if compress:
            self._judge_gain(batch.header)
        accumulator.next_sequence += len(records)
        held_bytes = held_bytes or batch.header.plain_length
        pending = PendingBatch(accumulator, batch, held_bytes, first, condition)
        accumulator.unacknowledged.append(pending)
        accumulator.unsent.append(pending)
        self._undated.append(pending)
        return pending

    def _judge_gain(self, header: BatchHeader) -> None:
        """What does not get smaller (pictures, what is encrypted or compressed already) is soon tried only now and then."""
        if header.body_length <= header.plain_length * COMPRESS_GAIN:
            self.plain_next = 0
        elif header.plain_length >= COMPRESS_JUDGED_BYTES:
            self.plain_next = min(2 * self.plain_next or 1, COMPRESS_SKIP_MAX)
            self.plain_left = self.plain_next

    def _date(self, now: float) -> None:
        """What was closed since the last time has its deadline from now on."""
        deadline = now + self._deadline_s
        for pending in self._undated:
            pending.deadline = deadline
        self._undated.clear()
        self.wake_at = min(self.wake_at, deadline)

    # -- batches out ----------------------------------------------------------------------------------

    def next_batch(self, now: float) -> PendingBatch | None:
        """What may be sent next, in a session that has credit for it: shard after shard in turn, each in order. None: nothing.

        It stays the next one until `sent` is told so.
        """
        accumulators = self.accumulators
        count = len(accumulators)
        at = self._next_accumulator
        for _ in range(count):
            accumulator = accumulators[at]
            if accumulator.stalled_until is None:
                unsent = accumulator.unsent
                flying = len(accumulator.unacknowledged) - len(unsent)
                if not unsent and accumulator.linger_over and flying < FLYING_BATCHES_FILL:
                    self._close(accumulator)
                if unsent and flying < self.in_flight_max:
                    if self._undated:
                        self._date(now)
                    self._next_accumulator = at
                    return unsent[0]
            at += 1
            if at == count:
                at = 0
        return None

    def sent(self, pending: PendingBatch, ticket: Ticket | None) -> None:
        """What `next_batch` gave is on its way. With acks="none" it has no ticket, and is dealt with."""
        pending.accumulator.unsent.popleft()
        pending.ticket = ticket
        pending.sent = pending.sent_ever = True
        at = self._next_accumulator + 1
        self._next_accumulator = at if at < len(self.accumulators) else 0
        if ticket is None:
            self.acknowledged_records += pending.header.records
            self._settle(pending)

    # -- what happened --------------------------------------------------------------------------------

    def acknowledged(self, pending: PendingBatch, ticket: Ticket, appended: AppendedBody) -> Ready:
        """The broker appended a batch. Not an event, since that would cost a batch of one record a thirtieth of all."""
        if pending.ticket is not ticket:
            return NOTHING
        pending.ticket, pending.appended = None, appended
        accumulator = pending.accumulator
        self.acknowledged_records += pending.header.records
        # Where a record was there already (message ids), offsets do not grow.
        last = (
            max(appended.offsets) if appended.offsets else appended.base_offset + pending.header.records - 1
        )
        shard = accumulator.shard
        if last > self._offsets.get(shard, -1):
            self._offsets[shard] = last
        self._settle(pending)
        return Ready(self._after_hole(accumulator), pending)

    def step(self, event: Event, now: float) -> Ready:
        """Take in what else happened."""
        if self._undated:
            self._date(now)
        # That of every batch, by its exact type and before all others: a match costs more.
        if type(event) is IterationEnded:
            until = now + self._open_s
            for accumulator in self._began:
                accumulator.linger_over = bool(accumulator.records)
                accumulator.ready_since = now
            if self._began and until < self.wake_at:
                self.wake_at = until
            self._began.clear()
            return NOTHING
        match event:
            case Lingers():
                self._linger(now)
            case RoomWanted():
                for accumulator in self.accumulators:
                    accumulator.linger_over = bool(accumulator.records)
            case Flushed():
                for accumulator in self.accumulators:
                    self._close(accumulator)
            case Refused():
                return self._refused(event, now)
            case TimeCame():
                return self._time_came(event, now)
            case Opened():
                return self._opened(event)
            case LinkLost():
                return Ready(forget=self._rewind_all())
            case NeverFits(pending, window_bytes):
                return self._never_fits(pending, window_bytes)
            case StreamRefused(error):
                if self.error is None:
                    self.error = error
                if _ends_stream(error):
                    return Ready(reopen=True)
            case Failed(error):
                return self._fail(error)
        return NOTHING

    def _linger(self, now: float) -> None:
        if not self._began:
            return
        until = now + self._linger_s
        for accumulator in self._began:
            if accumulator.records and accumulator.linger_until == inf:
                accumulator.linger_until = until
                accumulator.ready_since = until
        self._began.clear()
        self.wake_at = min(self.wake_at, until)

    def _rewind_all(self) -> list[Ticket]:
        return [ticket for accumulator in self.accumulators for ticket in accumulator.rewind()]

    def _refused(self, event: Refused, now: float) -> Ready:
        pending, ticket, error = event
        if pending.ticket is not ticket:
            return NOTHING
        pending.ticket = None
        accumulator = pending.accumulator
        if error.code is Code.SEQUENCE_GAP:
            if pending is not accumulator.unacknowledged[0]:
                # Something before it is missing and will be dealt with first; then this is sent again.
                return NOTHING
            if not pending.renumbered:
                return Ready(self._renumber(accumulator))
        elif isinstance(error, UnavailableError):
            if pending.backoff is None:
                pending.backoff = Backoff(self._policy, self._random)
            until = now + pending.backoff.after_ms(error) / 1000
            if until < pending.deadline:
                # The rest of the shard was or will be refused with a gap; it is all sent again, in order.
                accumulator.stalled_until = until
                self.wake_at = min(self.wake_at, until)
                return Ready(reopen=True) if _ends_stream(error) else NOTHING
        given_up = self._give_up(pending, error)
        return Ready(self._after_hole(accumulator), given_up=(given_up,), reopen=_ends_stream(error))

    def _renumber(self, accumulator: Accumulator) -> list[Ticket]:
        accumulator.unacknowledged[0].renumbered = True
        accumulator.renumber()
        return accumulator.rewind()

    def _after_hole(self, accumulator: Accumulator) -> Sequence[Ticket]:
        """A batch left the shard's order without being in the log. If what follows was already refused for that, no
        further answer will come for it: number it anew and send it."""
        if not accumulator.unacknowledged or accumulator.stalled_until is not None:
            return ()
        head = accumulator.unacknowledged[0]
        return self._renumber(accumulator) if head.sent and head.ticket is None else ()

    def _settle(self, pending: PendingBatch) -> None:
        """The batch is dealt with, one way or the other."""
        pending.done = True
        unacknowledged = pending.accumulator.unacknowledged
        while unacknowledged and unacknowledged[0].done:
            unacknowledged.popleft()
        self.held_bytes -= pending.held_bytes

    def _give_up(self, pending: PendingBatch, error: FelixError) -> GivenUp:
        """The batch's records are refused for good. Its sending, if an answer to that is awaited, is for the caller to forget."""
        if self._lost_first is None or pending.first < self._lost_first:
            self._lost_first = pending.first
        if self.error is None and not pending.every_record_has_a_caller:
            self.error = error
        pending.ticket = None
        self._settle(pending)
        batch = Batch(pending.header, pending.body)
        return GivenUp(
            pending.callers or (), pending.caller, Refusal(error, pending.accumulator.shard, batch)
        )

    def _give_all_up(self, error: FelixError) -> Ready:
        forget = self._rewind_all()
        given_up = []
        for accumulator in self.accumulators:
            self._close(accumulator)
            accumulator.unsent.clear()
            given_up += [
                self._give_up(pending, error)
                for pending in list(accumulator.unacknowledged)
                if not pending.done
            ]
        return Ready(forget, given_up=given_up)

    def _never_fits(self, pending: PendingBatch, window_bytes: int) -> Ready:
        accumulator = pending.accumulator
        accumulator.unsent.popleft()
        given_up = self._give_up(
            pending,
            RequestError(
                f"A batch of {pending.frame_bytes} bytes can never be sent: the broker lets {window_bytes} bytes be on the "
                "way in one session.",
                code=Code.BATCH_TOO_LARGE,
                hint="Set a smaller batch_bytes, or publish smaller records.",
            ),
        )
        return Ready(self._after_hole(accumulator), given_up=(given_up,))

    def _time_came(self, event: TimeCame, now: float) -> Ready:
        """End lingers and stalls, and give up what was tried for as long as it may be."""
        forget: list[Ticket] = []
        given_up: list[GivenUp] = []
        self.wake_at = inf
        for accumulator in self.accumulators:
            if accumulator.linger_until <= now:
                accumulator.linger_until = inf
                accumulator.linger_over = True
            unacknowledged = accumulator.unacknowledged
            if (
                accumulator.records
                and accumulator.linger_over
                and (since := accumulator.ready_since) + self._open_s <= now
            ):
                # No later record joins it, which would be given up with the first one.
                self._close(accumulator)
                self._undated.remove(late := unacknowledged[-1])
                late.deadline = since + self._deadline_s
            expired = False
            if event.stood_still:
                for pending in unacknowledged:
                    if pending.deadline <= now and not pending.graced:
                        # Once: a process that always stands still gives up, too.
                        pending.graced, pending.deadline = True, now + GRACE_S
            while unacknowledged and unacknowledged[0].deadline <= now:
                pending = unacknowledged[0]
                if not pending.sent:
                    accumulator.unsent.popleft()
                if pending.ticket is not None:
                    forget.append(pending.ticket)
                given_up.append(self._give_up(pending, self._too_late(pending, event)))
                expired = True
            if accumulator.stalled_until is not None and accumulator.stalled_until <= now:
                accumulator.stalled_until = None
                forget += accumulator.rewind()
            if expired:
                forget += self._after_hole(accumulator)
            self.wake_at = min(
                self.wake_at,
                accumulator.linger_until,
                inf if accumulator.stalled_until is None else accumulator.stalled_until,
                accumulator.ready_since + self._open_s if accumulator.records else inf,
                unacknowledged[0].deadline if unacknowledged else inf,
            )
        return Ready(forget, given_up=given_up)

    def _too_late(self, pending: PendingBatch, event: TimeCame) -> UnavailableError:
        why = "it was sent and not answered" if pending.sent_ever else "it could not be sent"
        if (throttled := event.throttled) is not None:
            why += (
                f", while {throttled.scope} {throttled.name} is at its {throttled.limit} of "
                f"{throttled.per_second} per second"
            )
        if event.session:
            why += f"; {event.session}"
        return UnavailableError(
            f"A batch for shard {pending.accumulator.shard} of {self.stream} is not acknowledged after {self._deadline_s:g} s: "
            f"{why}.",
            code=Code.TIMEOUT,
            hint="Whether it is in the log is not known." if pending.sent_ever else "It is not in the log.",
        )

    def _opened(self, event: Opened) -> Ready:
        self.record_bytes_max = min(BATCH_BYTES_MAX, event.batch_bytes_max) - HEADER_BYTES
        self.batch_bytes = max(1, min(self.batch_bytes, self.record_bytes_max, event.window_bytes // 2))
        self.in_flight_max = max(1, min(IN_FLIGHT_MAX, event.in_flight))
        ready = NOTHING
        known = (self._incarnation, len(self.accumulators))
        if self.accumulators and known != (event.incarnation, event.shards):
            ready = self._recreated()
        self._incarnation = event.incarnation
        if len(self.accumulators) != event.shards:
            self.accumulators = [Accumulator(shard) for shard in range(event.shards)]
            self._unkeyed = self._next_accumulator = 0
            self._began.clear()
        for accumulator in self.accumulators:
            self._end_first_stall(accumulator)
        return ready

    def _end_first_stall(self, accumulator: Accumulator) -> None:
        """Whoever takes the publish stream now is not asked to be waited for: who was may have led before. Only once, or two brokers that each
        name the other would be asked as fast as they answer."""
        if accumulator.stalled_until is None or not accumulator.unacknowledged:
            return
        backoff = accumulator.unacknowledged[0].backoff
        if backoff is not None and backoff.failures == 1:
            accumulator.stalled_until = None

    def _recreated(self) -> Ready:
        """The stream of this name is another one now: what was meant for the old one is not put into it."""
        ready = self._give_all_up(
            RequestError(
                f"{self.stream} was deleted and created anew while these records were on their way.",
                code=Code.CONFLICT,
                hint="Publish them again if they belong into the new stream.",
            )
        )
        self._offsets.clear()
        for accumulator in self.accumulators:
            accumulator.epoch += 1
            accumulator.next_sequence = 0
        return ready

    def _fail(self, error: FelixError) -> Ready:
        if self.failed is not None:
            return NOTHING
        self.failed = error
        ready = self._give_all_up(error)
        self._undated.clear()
        self.wake_at = inf
        return ready


def _ends_stream(error: FelixError) -> bool:
    """Whether the broker takes nothing more on this publish stream; whoever leads the stream next says what of it still holds."""
    return error.code in _STREAM_ENDED or (isinstance(error, NotLeaderError) and error.stream != "")
