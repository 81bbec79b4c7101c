"""Publisher: records into batches, batches onto a publish stream, acknowledgements back to who asked for them.

A record joins the open batch of its shard. The batch closes when it is full (bytes or records), or when its linger
ends; linger 0 is the end of this event loop iteration, so a lone record never waits and a burst batches itself. While a shard has
FLYING_BATCHES_FILL batches on the way, its open batch goes on filling instead of closing small. A closed batch is
encoded once and stays these bytes; only its sequence can be renewed, in the header.

Invariants:

- records of one shard are in the log in the order in which they were given, each once, however often the connection
  breaks: batches carry producer id, epoch and sequence, are sent again in order, and the broker knows a repeated one;
- no batch leaves beyond the session's publish credit; accepted and unacknowledged records stay within `buffer_bytes`;
- every record accepted is acknowledged, or its refusal is delivered: to its future, to `on_refused`, and to the next
  `send` or `flush`;
- a refusal that says "not now" is tried again, with everything behind it, until the batch's deadline.

How order survives a refusal: what follows a refused batch is refused too (SEQUENCE_GAP). Behind one that will be sent
again, it is sent again in order. At the head of its shard, it is certainly not in the log, so the shard takes the next
producer epoch, numbers what is left from 0 and sends it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Final, Literal, NamedTuple, Protocol, Self

from felix.backoff import Backoff
from felix.batch import (
    BATCH_BYTES_MAX,
    COMPRESS_LEVEL_MAX,
    HEADER_BYTES,
    KEY_BYTES_MAX,
    MESSAGE_ID_BYTES_MAX,
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
from felix.connection import Link, RegionConnection, protocol_breach
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.frames import FRAME_HEADER_BYTES, AppendedBody, FrameType, encode_condition, frame_header
from felix.messages import Answer, OpenPublisher, PublisherOpened
from felix.names import StreamName, shard_for_key

FLYING_BATCHES_MAX: Final = 31
"""Batches of one shard that are sent and not acknowledged: fewer than a broker remembers per producer (32), so that
every repeated one is recognised; enough that a broker syncs some while others are under way."""
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
LINGER_MS_MAX: Final = 60_000
COMPRESS_GAIN: Final = 0.9
"""A body that zstd leaves larger than this part of it is not worth the time."""
COMPRESS_JUDGED_BYTES: Final = 1_024
"""A smaller batch says nothing about those that follow."""
COMPRESS_SKIP_MAX: Final = 64
"""Batches in a row that are not tried after some that gained nothing: 1, 2, 4 … of them, then one is tried again."""
RECORD_OVERHEAD_BYTES: Final = 12
"""What a record takes in a batch beside its own bytes: one entry in each of the three columns."""

_STREAM_ENDED: Final = (Code.NOT_FOUND_OR_FORBIDDEN, Code.NOT_FOUND, Code.FORBIDDEN)
"""Refusals of a batch that mean the whole publish stream: the right was taken away, or the stream is gone."""

Payload = bytes | bytearray | memoryview
Acks = Literal["all", "none"]
MessageId = bytes | str


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


class Tracer(Protocol):
    """What the publisher asks of felix.tracing, where tracing is on."""

    def inject(self, headers: Headers | None) -> Headers | None: ...


class _Many:
    """The offsets of several records, in the order given; done when the last one is known."""

    __slots__ = ("future", "left", "offsets")

    def __init__(self, future: asyncio.Future[list[int]]) -> None:
        self.future = future
        self.offsets: list[int] = []
        self.left = 0


class _Sink(NamedTuple):
    """Who asked for the offset of the record `at` this place of its batch: a future, or a place in a collection."""

    at: int
    future: asyncio.Future[int] | None
    many: _Many | None = None
    place: int = 0


class _PendingBatch:
    """A closed batch on its way."""

    __slots__ = (
        "accumulator", "backoff", "body", "condition", "correlation", "deadline", "done", "first", "header", "held_bytes", "link",
        "receipt", "renumbered", "sent", "sent_ever", "sinks",
    )  # fmt: skip

    def __init__(self, accumulator: _Accumulator, batch: Batch, held_bytes: int, deadline: float) -> None:
        self.accumulator = accumulator
        self.header: BatchHeader = batch.header
        self.body = batch.body
        self.condition = b""
        self.held_bytes = held_bytes
        self.first = accumulator.first
        self.deadline = deadline
        self.sinks: list[_Sink] | None = None
        self.receipt: asyncio.Future[Receipt] | None = None
        self.correlation = 0
        self.link: Link | None = None
        self.sent = False
        self.sent_ever = False
        self.done = False
        self.renumbered = False
        self.backoff: Backoff | None = None

    @property
    def frame_bytes(self) -> int:
        return FRAME_HEADER_BYTES + len(self.condition) + HEADER_BYTES + len(self.body)

    # What the link calls (connection.Pending):

    def answered(self, answer: Answer) -> None:
        raise FelixError("A batch was answered like a request.", code=Code.PROTOCOL)

    def acknowledged(self, appended: AppendedBody) -> None:
        self.correlation = 0
        self.accumulator.publisher._acknowledged(self, appended)

    def refused(self, error: FelixError) -> None:
        self.correlation = 0
        self.accumulator.publisher._refused(self, error)


class _Accumulator:
    """One shard of a publisher: its open batch, and its closed ones in the order of their sequence."""

    __slots__ = (
        "epoch", "first", "linger", "linger_over", "next_sequence", "open_bytes", "publisher", "records", "shard", "sinks",
        "stalled", "unacknowledged", "unsent",
    )  # fmt: skip

    def __init__(self, publisher: Publisher, shard: int) -> None:
        self.publisher = publisher
        self.shard = shard
        self.records: list[NewRecord] = []
        # Which of the publisher's records is the first of the open batch.
        self.first = 0
        self.open_bytes = 0
        self.sinks: list[_Sink] | None = None
        self.linger: asyncio.TimerHandle | None = None
        self.linger_over = False
        self.unacknowledged: deque[_PendingBatch] = deque()
        self.unsent: deque[_PendingBatch] = deque()
        self.epoch = 0
        self.next_sequence = 0
        self.stalled: asyncio.TimerHandle | None = None

    @property
    def flying(self) -> int:
        """Batches from the oldest that is not acknowledged to the newest that was sent."""
        return len(self.unacknowledged) - len(self.unsent)

    def rewind(self) -> None:
        """Everything that is not acknowledged is to be sent, from the first one on."""
        for pending in self.unacknowledged:
            if pending.correlation and pending.link is not None:
                pending.link.forget(pending.correlation)
            pending.correlation, pending.link, pending.sent = 0, None, False
        self.unsent = deque(pending for pending in self.unacknowledged if not pending.done)

    def renumber(self) -> None:
        """The next producer epoch: what is left counts from sequence 0."""
        self.epoch += 1
        self.next_sequence = 0
        for pending in self.unacknowledged:
            if not pending.done:
                pending.header = pending.header._replace(
                    producer_epoch=self.epoch, base_sequence=self.next_sequence
                )
                self.next_sequence += pending.header.records


class Publisher:
    """Publishes into one stream. Made by `Stream.publisher`; used as `async with`, or `open` and `close`.

    Not for use from another thread. `acks="all"`: acknowledged as the stream's durability says, sent again until then.
    `acks="none"`: at most once, nothing is acknowledged or sent again, and no offsets are known.
    """

    def __init__(
        self,
        connection: RegionConnection,
        stream: StreamName,
        *,
        producer_id: int,
        linger_ms: float = 0,
        batch_bytes: int = BATCH_BYTES_DEFAULT,
        batch_records: int = BATCH_RECORDS_DEFAULT,
        buffer_bytes: int = BUFFER_BYTES_DEFAULT,
        acks: Acks = "all",
        compress: int = 0,
        deadline_ms: int = DEADLINE_MS_DEFAULT,
        on_refused: Callable[[Refusal], None] | None = None,
        tracer: Tracer | None = None,
        made_as: str = "",
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
        self._region = connection
        self._loop = asyncio.get_running_loop()
        self.stream = stream
        self.acks: Acks = acks
        self._producer_id = producer_id if acks == "all" else 0
        self._linger_s = linger_ms / 1000
        self._batch_bytes = batch_bytes
        self._batch_records = batch_records
        self._record_bytes_max = BATCH_BYTES_MAX - HEADER_BYTES
        self._buffer_bytes = buffer_bytes
        self._compress = compress
        # Batches that are not even tried, after some that did not get smaller.
        self._plain_left = self._plain_next = 0
        self._deadline_s = deadline_ms / 1000
        self._on_refused = on_refused
        self._tracer = tracer
        self._made_as = made_as
        self._accumulators: list[_Accumulator] = []
        self._unkeyed = 0
        self._incarnation = b""
        self._link: Link | None = None
        self._stream_id = -1
        self._watch = 0
        self._opening: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._open_refusal: UnavailableError | None = None
        self._started = False
        self._closed = False
        self._failed: FelixError | None = None
        self._error: FelixError | None = None
        self._held_bytes = 0
        self._given = self._acknowledged_records = 0
        self._lost_first: int | None = None
        self._offsets: dict[int, int] = {}
        self._room: deque[asyncio.Future[None]] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._turn_end = False
        self._yield_due = False
        self._next_accumulator = 0
        self._expiry: asyncio.TimerHandle | None = None
        self.batches_sent = 0
        self.batches_resent = 0

    # -- life -----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        else:
            self.abort()

    async def open(self) -> None:
        """Open the publish stream. Raises what the broker refuses it with, UnavailableError(TIMEOUT) without an answer."""
        if not self._started:
            self._started = True
            self._region.attach(self)
        try:
            async with asyncio.timeout(self._region.request_timeout_s):
                await asyncio.shield(self._opened)
        except TimeoutError:
            self.abort()
            if self._open_refusal is not None:
                # It was tried all the time: what the broker said last says more than that it took long.
                raise self._open_refusal from None
            raise UnavailableError(
                f"No publish stream into {self.stream} could be opened within {self._region.request_timeout_s:g} s.",
                code=Code.TIMEOUT,
                hint="Is the region up?",
            ) from None

    async def close(self) -> None:
        """Flush, then end the publish stream. Raises what `flush` raises; the publisher is closed in any case."""
        if self._closed:
            return
        try:
            if self._failed is None:
                await self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """End at once. What is not acknowledged is given up, and whoever waits for it is told so."""
        if not self._closed:
            self._closed = True
            self._fail(
                UnavailableError(
                    f"The publisher into {self.stream} was closed before this was acknowledged.",
                    code=Code.DISCONNECTED,
                    hint="Whether it is in the log is not known.",
                )
            )

    @property
    def shards(self) -> int:
        """Shards of the stream; 0 before it is open."""
        return len(self._accumulators)

    @property
    def is_over(self) -> bool:
        """True once it takes no more records: closed, or refused for good."""
        return self._failed is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of records accepted and not yet acknowledged; `buffer_bytes` bounds them."""
        return self._held_bytes

    @property
    def progress(self) -> PublishProgress:
        """How far it has come; also once it is closed."""
        firsts = [self._given] if self._lost_first is None else [self._lost_first]
        for accumulator in self._accumulators:
            if accumulator.unacknowledged:
                firsts.append(accumulator.unacknowledged[0].first)
            elif accumulator.records:
                firsts.append(accumulator.first)
        return PublishProgress(self._given, self._acknowledged_records, min(firsts), dict(self._offsets))

    # -- records in -----------------------------------------------------------------------------------

    async def send(
        self,
        payload: Payload,
        key: bytes | None = None,
        headers: Headers | None = None,
        *,
        message_id: MessageId | None = None,
    ) -> None:
        """Put one record into its batch; returns at once while there is room, else waits for it.

        Raises RequestError where the record itself cannot be (too large, key or headers invalid), and the error of
        an earlier refused batch, once. Bytes are taken as they are; a bytearray or memoryview is copied.
        """
        if self._error is not None or self._failed is not None or not self._accumulators:
            await self._check()
        if self._held_bytes >= self._buffer_bytes:
            await self._wait_for_room()
        if message_id is not None:
            headers = with_message_id(headers, message_id)
        self._add(payload, key, headers, None)
        if self._yield_due:
            # So that a producer that never waits does not keep the loop from sending what it made.
            self._yield_due = False
            await asyncio.sleep(0)

    async def publish(
        self,
        payload: Payload,
        key: bytes | None = None,
        headers: Headers | None = None,
        *,
        shard: int | None = None,
        expected_offset: int | None = None,
        message_id: MessageId | None = None,
    ) -> int:
        """Publish one record and return its offset once it is in the log as the stream promises.

        `shard` overrides what the key says. `message_id`: where the stream deduplicates, a record whose id it remembers is
        not appended again; the offset is then that of the first one. With `expected_offset` it is a batch of its own, appended only where the
        log of its shard ends there: OffsetMismatchError, which says where it ends, otherwise.
        Raises RequestError, or UnavailableError once it was tried for `deadline_ms`.
        """
        if message_id is not None:
            headers = with_message_id(headers, message_id)
        if expected_offset is not None:
            record = self._own_record(payload, key, headers)
            return (await self.publish_batch([record], shard, expected_offset=expected_offset)).base_offset
        self._require_acks()
        if self._failed is not None or not self._accumulators:
            await self._check()
        while self._held_bytes >= self._buffer_bytes:
            await self._wait_for_room()
        future: asyncio.Future[int] = self._loop.create_future()
        self._add(payload, key, headers, _Sink(0, future), shard)
        return await future

    def _own_record(self, payload: Payload, key: bytes | None, headers: Headers | None) -> NewRecord:
        """One record, checked as `_add` checks it."""
        if key and (type(key) is not bytes or len(key) > KEY_BYTES_MAX):
            raise _key_refused(key)
        if self._tracer is not None:
            headers = self._tracer.inject(headers)
        return NewRecord(payload_bytes(payload), key, headers)

    def publish_nowait(
        self,
        payload: Payload,
        key: bytes | None = None,
        headers: Headers | None = None,
        *,
        message_id: MessageId | None = None,
    ) -> asyncio.Future[int]:
        """Put one record into its batch; the future gives its offset.

        Raises UnavailableError(LIMIT_MEMORY) where `buffer_bytes` are in use, RequestError(STATE) before it is open.
        """
        self._require_acks()
        if self._failed is not None:
            raise self._failed
        if not self._accumulators:
            raise RequestError(
                f"The publisher into {self.stream} is not open.", code=Code.STATE, hint="Use `async with`."
            )
        if self._held_bytes >= self._buffer_bytes:
            raise UnavailableError(
                f"{self._held_bytes} bytes wait for acknowledgement in {self.stream}; {self._buffer_bytes} are allowed.",
                code=Code.LIMIT_MEMORY,
                hint="Await an earlier record first, or use `send`, which waits.",
            )
        if message_id is not None:
            headers = with_message_id(headers, message_id)
        future: asyncio.Future[int] = self._loop.create_future()
        self._add(payload, key, headers, _Sink(0, future))
        return future

    async def send_many(
        self, payloads: Iterable[Payload], keys: Iterable[bytes | None] | None = None
    ) -> None:
        """Put many records into their batches: the cheapest way per record. As `send` otherwise."""
        if self._error is not None or self._failed is not None or not self._accumulators:
            await self._check()
        add = self._add
        for payload, key in paired(payloads, keys):
            if self._held_bytes >= self._buffer_bytes:
                await self._wait_for_room()
            add(payload, key, None, None)
            if self._yield_due:
                self._yield_due = False
                await asyncio.sleep(0)

    async def publish_many(
        self, payloads: Sequence[Payload], keys: Sequence[bytes | None] | None = None
    ) -> list[int]:
        """Publish many records and return their offsets, in the order given, once all are in the log.

        Raises the first refusal; the others may be in the log.
        """
        self._require_acks()
        if self._failed is not None or not self._accumulators:
            await self._check()
        many = _Many(self._loop.create_future())
        many.offsets = [-1] * len(payloads)
        # One more until all are given, so that it is not done before.
        many.left = 1
        try:
            for place, (payload, key) in enumerate(paired(payloads, keys)):
                while self._held_bytes >= self._buffer_bytes:
                    await self._wait_for_room()
                many.left += 1
                try:
                    self._add(payload, key, None, _Sink(0, None, many, place))
                except BaseException:
                    many.left -= 1
                    raise
                if self._yield_due:
                    self._yield_due = False
                    await asyncio.sleep(0)
        except BaseException:
            many.future.cancel()
            raise
        many.left -= 1
        if not many.left and not many.future.done():
            many.future.set_result(many.offsets)
        return await many.future

    async def publish_batch(
        self, records: Sequence[NewRecord], shard: int | None = None, *, expected_offset: int | None = None
    ) -> Receipt:
        """Publish these records as one batch, in one shard, wholly or not at all.

        Without `shard`, the keys say it and must agree; without keys, the next shard in turn has it. With
        `expected_offset`, only where the log of the shard ends there; a batch that was appended and is sent again after a
        lost answer gets its first offset all the same.
        Raises RequestError(BATCH_TOO_LARGE, INVALID) where they do not make one batch, OffsetMismatchError.
        """
        if expected_offset is not None and not 0 <= expected_offset < 1 << 63:
            raise RequestError(f"There is no offset {expected_offset}; offsets begin at 0.")
        self._require_acks()
        if self._failed is not None or not self._accumulators:
            await self._check()
        while self._held_bytes >= self._buffer_bytes:
            await self._wait_for_room()
        accumulator = self._accumulators[self._shard_of(records, shard)]
        self._close_batch(accumulator)
        accumulator.first = self._given
        pending = self._encode(accumulator, list(records))
        if expected_offset is not None:
            pending.condition = encode_condition(expected_offset)
        pending.receipt = self._loop.create_future()
        self._given += len(records)
        self._held_bytes += pending.held_bytes
        self.pump()
        return await pending.receipt

    async def flush(self) -> None:
        """Return once all that was given is acknowledged (with acks="none": has left).

        Raises the error of the first batch refused since the last `send` or `flush` that raised.
        """
        if self._failed is not None:
            raise self._failed
        for accumulator in self._accumulators:
            self._close_batch(accumulator)
        self.pump()
        while self._held_bytes and self._failed is None:
            future: asyncio.Future[None] = self._loop.create_future()
            self._idle.append(future)
            await future
        await self._check()

    def _require_acks(self) -> None:
        if self.acks == "none":
            raise RequestError(
                "A publisher with acks='none' learns no offsets.", code=Code.UNSUPPORTED, hint="Use `send`."
            )

    async def _check(self) -> None:
        """Raise what there is to raise; wait until the stream is open."""
        if self._failed is not None:
            raise self._failed
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if not self._accumulators:
            await self.open()

    def _shard_of(self, records: Sequence[NewRecord], shard: int | None) -> int:
        shards = len(self._accumulators)
        if not records:
            raise RequestError("A batch without records.")
        if shard is None:
            routes = (record.key or _message_id(record.headers) for record in records)
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
        shards = len(self._accumulators)
        if not 0 <= shard < shards:
            raise RequestError(f"There is no shard {shard}; {self.stream} has {shards}, from 0.")
        return shard

    # -- batching -------------------------------------------------------------------------------------

    def _add(
        self,
        payload: Payload,
        key: bytes | None,
        headers: Headers | None,
        sink: _Sink | None,
        shard: int | None = None,
    ) -> None:
        if type(payload) is not bytes:
            payload = payload_bytes(payload)
        size = len(payload) + RECORD_OVERHEAD_BYTES
        unkeyed = False
        if key:
            if type(key) is not bytes or len(key) > KEY_BYTES_MAX:
                raise _key_refused(key)
            accumulator = self._accumulators[shard_for_key(key, len(self._accumulators))]
            size += len(key)
        elif headers and (route := headers.get(MESSAGE_ID_HEADER)):
            # A repetition must reach the shard that remembers the first one.
            accumulator = self._accumulators[shard_for_key(route, len(self._accumulators))]
        else:
            accumulator = self._accumulators[self._unkeyed]
            unkeyed = True
        if shard is not None:
            accumulator, unkeyed = self._accumulators[self._checked_shard(shard)], False
        if self._tracer is not None:
            headers = self._tracer.inject(headers)
        if headers:
            size += len(encode_headers(headers))
        if size > self._record_bytes_max:
            raise RequestError(
                f"A record of {size} bytes; {self._record_bytes_max} are allowed in this session.",
                code=Code.BATCH_TOO_LARGE,
                hint="Split it, or keep it elsewhere and publish where it is.",
            )
        records = accumulator.records
        if records and accumulator.open_bytes + size > self._batch_bytes:
            self._close_full(accumulator)
            if unkeyed:
                accumulator = self._accumulators[self._unkeyed]
            records = accumulator.records
        if sink is not None:
            if accumulator.sinks is None:
                accumulator.sinks = []
            accumulator.sinks.append(sink._replace(at=len(records)))
        if not records:
            accumulator.first = self._given
        self._given += 1
        records.append(NewRecord(payload, key, headers))
        accumulator.open_bytes += size
        self._held_bytes += size
        if len(records) == 1:
            self._begin_linger(accumulator)
        elif accumulator.open_bytes >= self._batch_bytes or len(records) >= self._batch_records:
            self._close_full(accumulator)

    def _close_full(self, accumulator: _Accumulator) -> None:
        self._close_batch(accumulator)
        self.pump()
        self._yield_due = True

    def _begin_linger(self, accumulator: _Accumulator) -> None:
        if accumulator.open_bytes >= self._batch_bytes or self._batch_records == 1:
            self._close_full(accumulator)
        elif self._linger_s:
            accumulator.linger = self._loop.call_later(self._linger_s, self._linger_ended, accumulator)
        elif not self._turn_end:
            self._turn_end = True
            self._loop.call_soon(self._turn_ended)

    def _linger_ended(self, accumulator: _Accumulator) -> None:
        accumulator.linger = None
        accumulator.linger_over = True
        self.pump()

    def _turn_ended(self) -> None:
        self._turn_end = False
        self._yield_due = False
        for accumulator in self._accumulators:
            if accumulator.records and accumulator.linger is None:
                accumulator.linger_over = True
        self.pump()

    def _close_batch(self, accumulator: _Accumulator) -> None:
        """Close the open batch of a shard, if it has one."""
        if not accumulator.records:
            return
        records, accumulator.records = accumulator.records, []
        sinks, accumulator.sinks = accumulator.sinks, None
        held, accumulator.open_bytes = accumulator.open_bytes, 0
        accumulator.linger_over = False
        if accumulator.linger is not None:
            accumulator.linger.cancel()
            accumulator.linger = None
        if accumulator.shard == self._unkeyed:
            self._unkeyed = (self._unkeyed + 1) % len(self._accumulators)
        pending = self._encode(accumulator, records, held)
        pending.sinks = sinks

    def _encode(
        self, accumulator: _Accumulator, records: list[NewRecord], held_bytes: int = 0
    ) -> _PendingBatch:
        """`held_bytes`: what the records were counted as when they came in one by one; 0: what they are together."""
        compress = self._compress
        if compress and self._plain_left:
            self._plain_left -= 1
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
            self._look_at_gain(batch.header)
        accumulator.next_sequence += len(records)
        held_bytes = held_bytes or batch.header.plain_length
        pending = _PendingBatch(accumulator, batch, held_bytes, self._loop.time() + self._deadline_s)
        accumulator.unacknowledged.append(pending)
        accumulator.unsent.append(pending)
        if self._expiry is None:
            self._expiry = self._loop.call_at(pending.deadline, self._expire)
        return pending

    def _look_at_gain(self, header: BatchHeader) -> None:
        """What does not get smaller (pictures, what is encrypted or compressed already) is soon tried only now and then."""
        if header.body_length <= header.plain_length * COMPRESS_GAIN:
            self._plain_next = 0
        elif header.plain_length >= COMPRESS_JUDGED_BYTES:
            self._plain_next = min(2 * self._plain_next or 1, COMPRESS_SKIP_MAX)
            self._plain_left = self._plain_next

    # -- batches out ----------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what may be sent now: shard after shard in turn, each in order, as far as credit and backlog allow."""
        link = self._link
        if link is None or self._stream_id < 0:
            return
        accumulators = self._accumulators
        count = len(accumulators)
        idle = 0
        while idle < count:
            accumulator = accumulators[self._next_accumulator]
            pending = self._sendable(accumulator)
            if pending is None:
                idle += 1
            elif pending.frame_bytes > link.window_bytes:
                accumulator.unsent.popleft()
                self._give_up(pending, self._never_fits(pending, link))
            elif link.may_send(pending.frame_bytes):
                idle = 0
                accumulator.unsent.popleft()
                self._send(link, accumulator, pending)
            else:
                link.wait_to_send(self)
                return
            self._next_accumulator = (self._next_accumulator + 1) % count

    def _sendable(self, accumulator: _Accumulator) -> _PendingBatch | None:
        if accumulator.stalled is not None or accumulator.flying >= FLYING_BATCHES_MAX:
            return None
        if not accumulator.unsent and accumulator.linger_over and accumulator.flying < FLYING_BATCHES_FILL:
            self._close_batch(accumulator)
        return accumulator.unsent[0] if accumulator.unsent else None

    def _never_fits(self, pending: _PendingBatch, link: Link) -> RequestError:
        return RequestError(
            f"A batch of {pending.frame_bytes} bytes can never be sent: the broker lets {link.window_bytes} bytes be on the "
            "way in one session.",
            code=Code.BATCH_TOO_LARGE,
            hint="Set a smaller batch_bytes, or publish smaller records.",
        )

    def _send(self, link: Link, accumulator: _Accumulator, pending: _PendingBatch) -> None:
        if pending.sent_ever:
            self.batches_resent += 1
        self.batches_sent += 1
        if self.acks == "none":
            correlation = self._watch
        else:
            correlation = pending.correlation = link.register(pending)
            pending.link = link
        pending.sent = pending.sent_ever = True
        kind = FrameType.CONDITIONAL if pending.condition else FrameType.BATCH
        head = frame_header(kind, pending.frame_bytes - FRAME_HEADER_BYTES, correlation)
        link.send_batch(
            self._stream_id, b"".join((head, pending.condition, pending.header.encode(), pending.body))
        )
        if self.acks == "none":
            self._acknowledged_records += pending.header.records
            self._settle(pending)

    # -- answers --------------------------------------------------------------------------------------

    def _acknowledged(self, pending: _PendingBatch, appended: AppendedBody) -> None:
        if pending.done:
            return
        base = appended.base_offset
        offsets: Sequence[int] = appended.offsets or range(base, base + pending.header.records)
        if len(offsets) != pending.header.records:
            raise protocol_breach("An acknowledgement names another number of records than the batch has.")
        self._acknowledged_records += len(offsets)
        # Where a record was there already (message ids), offsets do not grow.
        last = max(appended.offsets) if appended.offsets else base + pending.header.records - 1
        self._offsets[pending.accumulator.shard] = max(last, self._offsets.get(pending.accumulator.shard, -1))
        if pending.sinks is not None:
            for at, future, many, place in pending.sinks:
                if future is not None:
                    if not future.done():
                        future.set_result(offsets[at])
                elif many is not None:
                    many.offsets[place] = offsets[at]
                    many.left -= 1
                    if not many.left and not many.future.done():
                        many.future.set_result(many.offsets)
        if pending.receipt is not None and not pending.receipt.done():
            pending.receipt.set_result(
                Receipt(
                    pending.accumulator.shard,
                    base,
                    pending.header.records,
                    appended.append_time_ms,
                    appended.offsets,
                )
            )
        self._settle(pending)
        self._after_hole(pending.accumulator)
        self.pump()

    def _refused(self, pending: _PendingBatch, error: FelixError) -> None:
        if pending.done:
            return
        accumulator = pending.accumulator
        head = next(each for each in accumulator.unacknowledged if not each.done)
        if error.code is Code.SEQUENCE_GAP:
            if pending is not head:
                # Something before it is missing and will be dealt with first; then this is sent again.
                pending.link = None
                return
            if not pending.renumbered:
                pending.renumbered = True
                accumulator.renumber()
                accumulator.rewind()
                self.pump()
                return
        elif isinstance(error, UnavailableError):
            if pending.backoff is None:
                pending.backoff = Backoff(self._region.policy, self._region.runtime.random)
            wait_s = pending.backoff.next_ms(error.retry_after_ms) / 1000
            if self._loop.time() + wait_s < pending.deadline:
                # The rest of the shard was or will be refused with a gap; it is all sent again, in order.
                if accumulator.stalled is not None:
                    accumulator.stalled.cancel()
                accumulator.stalled = self._loop.call_later(wait_s, self._stall_ended, accumulator)
                return
        self._give_up(pending, error)
        self._after_hole(accumulator)
        if error.code in _STREAM_ENDED:
            self._reopen()
        self.pump()

    def _reopen(self) -> None:
        """The broker takes nothing more on this publish stream; ask for another, which says what still holds."""
        link = self._link
        if link is None or link.is_over:
            return
        self._end_stream()
        for accumulator in self._accumulators:
            accumulator.rewind()
        self.link_up(link)

    def _end_stream(self) -> None:
        link, stream_id = self._link, self._stream_id
        self._link, self._stream_id = None, -1
        if link is not None and stream_id >= 0:
            link.unwatch(self._watch)
            if not link.is_over and not link.connection.is_closed:
                link.connection.send(stream_id, b"", end=True)

    def _after_hole(self, accumulator: _Accumulator) -> None:
        """A batch left the shard's order without being in the log. If what follows was already refused for that, no
        further answer will come for it: number it anew and send it."""
        head = next((each for each in accumulator.unacknowledged if not each.done), None)
        if head is not None and head.sent and not head.correlation and not accumulator.stalled:
            head.renumbered = True
            accumulator.renumber()
            accumulator.rewind()

    def _stall_ended(self, accumulator: _Accumulator) -> None:
        accumulator.stalled = None
        accumulator.rewind()
        self.pump()

    def _settle(self, pending: _PendingBatch) -> None:
        """The pending is dealt with, one way or the other."""
        pending.done = True
        accumulator = pending.accumulator
        while accumulator.unacknowledged and accumulator.unacknowledged[0].done:
            accumulator.unacknowledged.popleft()
        self._held_bytes -= pending.held_bytes
        while self._room and self._held_bytes < self._buffer_bytes:
            waiter = self._room.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break
        if not self._held_bytes:
            idle, self._idle = self._idle, []
            for waiter in idle:
                if not waiter.done():
                    waiter.set_result(None)

    def _give_up(self, pending: _PendingBatch, error: FelixError) -> None:
        """The pending's records are refused for good; tell whoever is to know."""
        if pending.correlation and pending.link is not None:
            pending.link.forget(pending.correlation)
            pending.correlation = 0
        if pending.sinks is not None:
            for _, future, many, _ in pending.sinks:
                waiting = future if future is not None else many.future if many is not None else None
                if waiting is not None and not waiting.done():
                    waiting.set_exception(error)
        if self._lost_first is None or pending.first < self._lost_first:
            self._lost_first = pending.first
        told = pending.sinks is not None and len(pending.sinks) == pending.header.records
        if pending.receipt is not None:
            told = True
            if not pending.receipt.done():
                pending.receipt.set_exception(error)
        if not told and self._error is None:
            self._error = error
        self._settle(pending)
        if self._on_refused is not None:
            self._on_refused(Refusal(error, pending.accumulator.shard, Batch(pending.header, pending.body)))

    def _expire(self) -> None:
        """Give up what was tried for as long as it may be."""
        self._expiry = None
        now = self._loop.time()
        first: float | None = None
        for accumulator in self._accumulators:
            while accumulator.unacknowledged and accumulator.unacknowledged[0].deadline <= now:
                pending = accumulator.unacknowledged[0]
                if not pending.sent:
                    accumulator.unsent.popleft()
                why = "it was sent and not answered" if pending.sent_ever else "it could not be sent"
                throttle = self._link.throttled if self._link is not None else None
                if throttle is not None:
                    why += (
                        f", while {throttle.scope} {throttle.name} is at its {throttle.limit} of "
                        f"{throttle.per_second} per second"
                    )
                self._give_up(
                    pending,
                    UnavailableError(
                        f"A batch for shard {accumulator.shard} of {self.stream} is not acknowledged after {self._deadline_s:g} s: "
                        f"{why}.",
                        code=Code.TIMEOUT,
                        hint="Whether it is in the log is not known."
                        if pending.sent
                        else "It is not in the log.",
                    ),
                )
                if accumulator.stalled is not None:
                    accumulator.stalled.cancel()
                    self._stall_ended(accumulator)
                self._after_hole(accumulator)
            if accumulator.unacknowledged and (
                first is None or accumulator.unacknowledged[0].deadline < first
            ):
                first = accumulator.unacknowledged[0].deadline
        if first is not None:
            self._expiry = self._loop.call_at(first, self._expire)
        self.pump()

    async def _wait_for_room(self) -> None:
        while self._held_bytes >= self._buffer_bytes:
            # What is still open counts too: without this, one large linger could wait for itself.
            for accumulator in self._accumulators:
                accumulator.linger_over = accumulator.linger_over or bool(accumulator.records)
            self.pump()
            if self._held_bytes < self._buffer_bytes:
                break
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._room.append(waiter)
            try:
                await waiter
            finally:
                # Whoever was woken and does not stay passes the turn on.
                if self._room and self._held_bytes < self._buffer_bytes:
                    following = self._room.popleft()
                    if not following.done():
                        following.set_result(None)
            if self._failed is not None:
                raise self._failed

    # -- links (connection.Attachment) ----------------------------------------------------------------

    def link_up(self, link: Link) -> None:
        self._opening = self._loop.create_task(self._open_on(link), name=f"felix-open-{self.stream}")

    def link_down(self, error: FelixError) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        self._link = None
        self._stream_id = -1
        self._watch = 0
        for accumulator in self._accumulators:
            accumulator.rewind()

    def link_dead(self, error: FelixError) -> None:
        self.link_down(error)
        self._fail(error)

    async def _open_on(self, link: Link) -> None:
        backoff = Backoff(self._region.policy, self._region.runtime.random)
        while not link.is_over:
            stream_id = -1
            try:
                stream_id = link.connection.open_stream(bidirectional=False)
                answer = await link.ask(
                    OpenPublisher(str(self.stream), self.acks, self._made_as), stream_id=stream_id
                )
                self._stand_on(link, stream_id, answer)
                return
            except UnavailableError as error:
                if link.is_over:
                    return
                self._open_refusal = error
                if stream_id >= 0:
                    link.connection.reset_stream(stream_id, 0)
                if not self._opened.done() and error.retry_after_ms is None:
                    self._fail(error)
                    return
                await asyncio.sleep(backoff.next_ms(error.retry_after_ms) / 1000)
            except FelixError as error:
                if not link.is_over:
                    # The broker keeps no publisher for a refused one; neither does the connection.
                    if stream_id >= 0:
                        link.connection.reset_stream(stream_id, 0)
                    self._fail(error)
                return

    def _stand_on(self, link: Link, stream_id: int, opened: PublisherOpened) -> None:
        if opened.shards < 1:
            raise RequestError(f"{self.stream} is said to have {opened.shards} shards.", code=Code.PROTOCOL)
        assert link.limits is not None
        self._record_bytes_max = min(BATCH_BYTES_MAX, link.limits.batch_bytes_max) - HEADER_BYTES
        self._batch_bytes = max(1, min(self._batch_bytes, self._record_bytes_max, link.window_bytes // 2))
        if self._accumulators and (self._incarnation, len(self._accumulators)) != (
            opened.incarnation,
            opened.shards,
        ):
            self._recreated()
        self._incarnation = opened.incarnation
        if len(self._accumulators) != opened.shards:
            self._accumulators = [_Accumulator(self, shard) for shard in range(opened.shards)]
            self._unkeyed = self._next_accumulator = 0
        self._link, self._stream_id = link, stream_id
        self._watch = link.watch(self._stream_refused)
        if not self._opened.done():
            self._opened.set_result(None)
        self.pump()

    def _recreated(self) -> None:
        """The stream of this name is another one now: what was meant for the old one is not put into it."""
        error = RequestError(
            f"{self.stream} was deleted and created anew while these records were on their way.",
            code=Code.CONFLICT,
            hint="Publish them again if they belong into the new stream.",
        )
        self._offsets.clear()
        for accumulator in self._accumulators:
            self._close_batch(accumulator)
            accumulator.unsent.clear()
            for pending in list(accumulator.unacknowledged):
                if not pending.done:
                    self._give_up(pending, error)
            accumulator.epoch += 1
            accumulator.next_sequence = 0

    def _stream_refused(self, error: FelixError) -> None:
        """A batch without acknowledgement was refused."""
        if self._error is None:
            self._error = error
        if error.code in _STREAM_ENDED:
            self._reopen()

    def _fail(self, error: FelixError) -> None:
        """There is nothing more to be done with this publisher; tell whoever waits."""
        if self._failed is not None:
            return
        self._failed = error
        self._region.detach(self)
        if self._opening is not None and self._opening is not asyncio.current_task():
            self._opening.cancel()
        self._end_stream()
        if self._expiry is not None:
            self._expiry.cancel()
        if not self._opened.done():
            self._opened.set_exception(error)
            # It is raised by `open`, if anybody still waits there.
            self._opened.exception()
        for accumulator in self._accumulators:
            if accumulator.stalled is not None:
                accumulator.stalled.cancel()
                accumulator.stalled = None
            self._close_batch(accumulator)
            accumulator.unsent.clear()
            for pending in list(accumulator.unacknowledged):
                if not pending.done:
                    self._give_up(pending, error)
        for waiter in (*self._room, *self._idle):
            if not waiter.done():
                waiter.set_result(None)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


def with_message_id(headers: Headers | None, message_id: MessageId) -> Headers:
    """The headers with the message id among them. Raises RequestError where it is empty or too long."""
    raw = message_id.encode() if isinstance(message_id, str) else message_id
    if not isinstance(raw, bytes) or not 0 < len(raw) <= MESSAGE_ID_BYTES_MAX:
        raise RequestError(
            f"A message id is text or bytes, 1 to {MESSAGE_ID_BYTES_MAX} bytes long, not {message_id!r:.80}."
        )
    return {**(headers or {}), MESSAGE_ID_HEADER: raw}


def _message_id(headers: Headers | None) -> bytes | None:
    return headers.get(MESSAGE_ID_HEADER) if headers else None


def paired(
    payloads: Iterable[Payload], keys: Iterable[bytes | None] | None
) -> Iterator[tuple[Payload, bytes | None]]:
    """Payloads with their keys. Raises RequestError where there are not as many of both."""
    if keys is None:
        for payload in payloads:
            yield payload, None
        return
    try:
        yield from zip(payloads, keys, strict=True)
    except ValueError as error:
        raise RequestError("There are not as many keys as payloads.") from error


def payload_bytes(payload: object) -> bytes:
    """Bytes that nobody else changes. Raises RequestError where the payload is something else."""
    if type(payload) is bytes:
        return payload
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise RequestError(
        f"A payload is bytes, not {type(payload).__name__}.",
        hint="Encode it first, as in text.encode() or json.dumps(value).encode().",
    )


def _key_refused(key: object) -> RequestError:
    if not isinstance(key, bytes):
        return RequestError(f"A key is bytes, not {type(key).__name__}.", hint="Encode it first.")
    return RequestError(
        f"A key has {len(key)} bytes; {KEY_BYTES_MAX} are allowed.", code=Code.BATCH_TOO_LARGE
    )
