"""Consumer: one of the consumers that share a durable subscription; an async iterator of records to acknowledge.

::

    async with orders.consumer("billing", start="earliest") as consumer:
        async for record in consumer:
            await bill(record.payload)
            await consumer.ack(record)

The broker gives each consumer some of the stream's shards, and moves them as consumers come and go. What is acknowledged is not
redelivered; what is not acknowledged is, here or at another consumer: after `ack_timeout`, after `nack`, when the shard changes hands, when
a connection or a process is lost. After a lost connection the consumer goes on by itself.

Invariants:
- what is held and not handed out never passes `credit_bytes`;
- records of one shard come in the order of their offsets, apart from those that are redelivered (`attempt` above 1, or after the shard
  changed hands) and dead letters that are given back;
- `ack` returns True once the acknowledgement is durable, False where it did not count, or where the connection was lost before the
  answer: then the record is redelivered, unless the broker had carried it out;
- once it leaves, nothing of its shards is sent any more;
- a record of a shard that was taken away is not handed out any more;
- nor is one whose acknowledgement counted, also where the broker had sent it once more before it heard of that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar

import msgspec

from felix.batch import Record, decode_batch, decode_header, decode_records
from felix.connection import RegionConnection
from felix.consumer_acks import Acknowledgements, is_lost
from felix.consumer_messages import (
    Ack,
    Acknowledged,
    Altered,
    Assigned,
    Leave,
    Nack,
    Redelivery,
    Release,
    Renew,
    Revoked,
    Skip,
    decode_reply,
)
from felix.errors import Code, FelixError, ProtocolError, RequestError, protocol_breach
from felix.exchange import Exchange
from felix.frames import FRAME_HEADER_BYTES, Frame, FrameType, GapReason, decode_gap
from felix.messages import NAME_CHARS_MAX, Answer, ConsumerOpened, OpenConsumer
from felix.names import StreamName, parse_subscription
from felix.ranges import RangeSet, pairs
from felix.session import CreditWindow
from felix.settings import Retries, SubscriptionSettings, milliseconds
from felix.subscription import (
    CREDIT_BYTES_DEFAULT,
    CREDIT_BYTES_MAX,
    CREDIT_BYTES_MIN,
    GAPS_KEPT,
    Gap,
)

RENEWALS: Final = 4
"""While records are handed out, the ack timeout of waiting ones is renewed after 1/RENEWALS of it."""
LEAVE_S: Final = 5.0
"""How long `close` waits until what was acknowledged is durable."""

AckMode = Literal["explicit", "auto"]
Start = Literal["earliest", "latest"]

_log = logging.getLogger("felix.consumer")


class ConsumerRecord(NamedTuple):
    """A record, and what is needed to acknowledge it. `attempt` counts its deliveries, from 1 on."""

    offset: int
    timestamp_ms: int
    key: bytes | memoryview | None
    headers: Mapping[str, bytes]
    payload: bytes | memoryview
    shard: int
    attempt: int
    generation: int


class ConsumerBatch:
    """Records of one shard that came together: all of one delivered batch that are meant for this consumer."""

    __slots__ = ("_body", "_ranges", "attempt", "generation", "shard")

    def __init__(
        self, body: memoryview, ranges: list[tuple[int, int]], shard: int, generation: int, attempt: int
    ) -> None:
        self._body = body
        self._ranges = ranges
        self.shard = shard
        self.generation = generation
        self.attempt = attempt

    def __len__(self) -> int:
        return sum(following - first for first, following in self._ranges)

    @property
    def first_offset(self) -> int:
        return self._ranges[0][0]

    @property
    def next_offset(self) -> int:
        """The offset after the last record."""
        return self._ranges[-1][1]

    def _without(self, ranges: list[tuple[int, int]]) -> ConsumerBatch | None:
        """What is left of it without these offsets; None where that is nothing."""
        left = RangeSet(self._ranges)
        for each in ranges:
            left.remove(*each)
        return (
            ConsumerBatch(self._body, list(left), self.shard, self.generation, self.attempt) if left else None
        )

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Offsets of the records: [first, next) each."""
        return list(self._ranges)

    def records(self) -> Iterator[ConsumerRecord]:
        """The records; payloads and keys are views, which keep the whole batch in memory while they live.

        Raises ProtocolError where the batch is not what its header says.
        """
        try:
            records: Iterator[Record] = decode_records(decode_batch(self._body))
        except RequestError as error:
            raise _malformed(error) from error
        parts = iter(self._ranges)
        first, following = next(parts)
        for record in records:
            if record.offset >= following:
                part = next(parts, None)
                if part is None:
                    return
                first, following = part
            if record.offset >= first:
                yield ConsumerRecord(
                    record.offset, record.timestamp_ms, record.key, record.headers, record.payload,
                    self.shard, self.attempt, self.generation,
                )  # fmt: skip


def _malformed(error: RequestError) -> ProtocolError:
    return ProtocolError(
        f"The broker delivered what is no batch: {error.sentence}", code=Code.BATCH_MALFORMED
    )


class _Item(msgspec.Struct, frozen=True, gc=False):
    """A received batch that waits to be handed out."""

    frame_bytes: int
    body: memoryview
    shard: int
    generation: int
    opening: int


class _Share:
    """A shard that this consumer has."""

    __slots__ = ("again", "generation", "handed", "position", "renewed", "revoked", "skip")

    def __init__(self, generation: int, position: int, skip: RangeSet) -> None:
        self.generation = generation
        self.position = position
        """Where the next batch for the first time begins."""
        self.skip = skip
        self.again: list[tuple[int, RangeSet]] = []
        """Attempts, and what of it is still to come."""
        self.handed = RangeSet()
        """Handed out, and neither acknowledged nor given back yet."""
        self.renewed = 0.0
        self.revoked = False


class _Cursor:
    """Where the caller is: the batch and the record that it was handed last."""

    __slots__ = ("_current", "_records", "_seen", "_settled", "batch", "record")

    def __init__(self) -> None:
        self._current: ConsumerBatch | None = None
        self._records: Iterator[ConsumerRecord] | None = None
        self._seen = -1
        self._settled: RangeSet | None = None
        """Of a batch that came once more: what was acknowledged since it began."""
        self.record: ConsumerRecord | None = None
        """Neither acknowledged nor given back as failed."""
        self.batch: ConsumerBatch | None = None
        """The same, where whole batches are handed out."""

    def begin(self, batch: ConsumerBatch) -> None:
        """Its records are handed out one by one from now on."""
        self._current, self._records = batch, batch.records()
        self._settled = None

    def settle(self, shard: int, generation: int, ranges: list[tuple[int, int]]) -> None:
        """These were acknowledged: what of the batch in hand is among them, and comes once more, is not handed out."""
        batch = self._current
        if self._records is None or batch is None or batch.attempt == 1:
            return
        if (batch.shard, batch.generation) == (shard, generation):
            settled = self._settled = self._settled or RangeSet()
            for each in ranges:
                settled.add(*each)

    def next(self, is_current: Callable[[int, int], bool]) -> ConsumerRecord | None:
        """The next record whose shard the consumer still has; None where a new batch has to begin."""
        if self._records is not None:
            settled = self._settled
            for record in self._records:
                if settled is not None and record.offset in settled:
                    continue
                if is_current(record.shard, record.generation):
                    self._seen = record.offset
                    return record
            self._records = None
        return None

    def unseen(self, shard: int) -> tuple[int, int] | None:
        """Of a shard's batch in hand, the offsets of what the caller has not seen."""
        if self._records is None or self._current is None or self._current.shard != shard:
            return None
        return max(self._seen + 1, self._current.first_offset), self._current.next_offset

    def failed(self, record: ConsumerRecord | ConsumerBatch) -> None:
        """The caller gave it back."""
        if (
            self.record is not None
            and isinstance(record, ConsumerRecord)
            and record.offset == self.record.offset
        ):
            self.record = None
        if record is self.batch:
            self.batch = None

    def end(self) -> None:
        """The consumer is closed: nothing more is handed out."""
        self._records = self.batch = None


class Consumer:
    """See the module. Made by `Stream.consumer`; use it as `async with`. One task at a time iterates; any may acknowledge."""

    def __init__(
        self,
        connection: RegionConnection,
        stream: StreamName,
        name: str,
        *,
        settings: SubscriptionSettings | None,
        consumer: str = "",
        credit_bytes: int = CREDIT_BYTES_DEFAULT,
        ack: AckMode = "explicit",
        on_assigned: Callable[[int], None] | None = None,
        on_revoked: Callable[[int], None] | None = None,
        on_gap: Callable[[Gap], None] | None = None,
    ) -> None:
        if not CREDIT_BYTES_MIN <= credit_bytes <= CREDIT_BYTES_MAX:
            raise RequestError(
                f"credit_bytes is {credit_bytes}; it must be from {CREDIT_BYTES_MIN} (the largest batch) to "
                f"{CREDIT_BYTES_MAX}.",
                code=Code.CONFIG_INVALID,
            )
        if ack not in ("explicit", "auto"):
            raise RequestError(f"ack is {ack!r}; it is 'explicit' or 'auto'.", code=Code.CONFIG_INVALID)
        if len(consumer) > NAME_CHARS_MAX:
            raise RequestError(
                f"A consumer's name of {len(consumer)} characters; {NAME_CHARS_MAX} are allowed.",
                code=Code.CONFIG_INVALID,
            )
        if settings is not None:
            settings.check()
        self.stream = stream
        self.name = parse_subscription(name)
        self._auto = ack == "auto"
        self._settings = settings
        self._credit_bytes = credit_bytes
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._on_gap = on_gap
        self._consumer = consumer or connection.runtime.process()
        self._exchange = Exchange(connection, self._request, decode_reply, self, stream=stream)
        self._loop = asyncio.get_running_loop()
        self._started = False
        self._closed = False
        self._ended: FelixError | None = None
        self._incarnation = b""
        self._ack_timeout_s = 30.0
        self._opening = 0
        self._window = CreditWindow(credit_bytes)
        self._queue: deque[_Item] = deque()
        self._shares: dict[int, _Share] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._in_hand: _Item | None = None
        self._parts: deque[ConsumerBatch] = deque()
        self._cursor = _Cursor()
        self._taken = False
        self._acks = Acknowledgements(
            self._exchange, stream, lost=self._lost_ack, counted=self._settle, answered=self._give_back
        )
        self.gaps: deque[Gap] = deque(maxlen=GAPS_KEPT)
        """The newest gaps: records that were gone before they could be delivered."""
        self.gap_count = 0
        self.lost_acks = 0
        """Acknowledgements that did not count: their records are redelivered."""
        self.resumes = -1

    # -- life -----------------------------------------------------------------------------------------

    def _request(self) -> OpenConsumer:
        return OpenConsumer(
            str(self.stream), self.name, self._credit_bytes, self._settings, self._consumer, self._incarnation
        )

    async def open(self) -> None:
        """Join the subscription's consumers, if that has not been done. Raises what the broker refuses it with: CONFLICT where
        the subscription has other settings, NOT_FOUND where there is none and no settings are given; UnavailableError(TIMEOUT). Where it
        raises, or is cancelled, the consumer is closed: else it would be given shards that nobody reads."""
        if self._ended is not None:
            raise self._ended
        try:
            await self._stands()
        except FelixError as error:
            self._ended = self._ended or error
            self._exchange.close()
            self._wake()
            raise
        except BaseException:
            self._end()
            raise

    async def _stands(self) -> None:
        """As `open`; but where who waits is cancelled, it joins all the same."""
        if not self._started:
            self._started = True
            await self._exchange.open()

    async def close(self) -> None:
        """Acknowledge what was asked for, give the shards back, and end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.clear()
        self._parts.clear()
        self._cursor.end()
        self._in_hand = None
        try:
            if self._started and self._exchange.is_open:
                async with asyncio.timeout(LEAVE_S):
                    await self._acks.drain()
                    self._lose_shares()
                    await self._exchange.call(Leave(), again=False)
        except (FelixError, TimeoutError) as error:
            _log.info("%s of %s left without a word: %s", self.name, self.stream, error)
        finally:
            self._end()

    def _end(self) -> None:
        """Nothing is received any more; the broker hears of it."""
        self._closed = True
        self._exchange.close()
        self._lose_shares()
        self._wake()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._auto:
            self._ack_last()
        await self.close()

    # -- what is known --------------------------------------------------------------------------------

    @property
    def shards(self) -> list[int]:
        """The shards that this consumer has now; none while it stands by."""
        return sorted(self._shares)

    @property
    def is_open(self) -> bool:
        """True while the broker knows this consumer."""
        return self._exchange.is_open

    @property
    def held_bytes(self) -> int:
        """Bytes that came and were not handed out yet; `credit_bytes` bounds them."""
        return self._window.held_bytes

    # -- records --------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ConsumerRecord:
        """The next record; payload and key are bytes of its own. With `ack="auto"` the one before counts as done."""
        if self._auto:
            self._ack_last()
        while True:
            record = self._cursor.next(self._is_current)
            if record is not None:
                self._renew(record.shard, record.offset)
                self._cursor.record = own = _own(record)
                return own
            batch = await self._next_or_none()
            if batch is None:
                raise StopAsyncIteration
            self._cursor.begin(batch)

    def _ack_last(self) -> None:
        last, self._cursor.record = self._cursor.record, None
        if last is not None:
            self._gather(last.shard, last.generation, [(last.offset, last.offset + 1)])

    async def batches(self) -> AsyncIterator[ConsumerBatch]:
        """Whole batches: the cheapest way per record. With `ack="auto"` the one before counts as done."""
        while True:
            batch, self._cursor.batch = self._cursor.batch, None
            if self._auto and batch is not None:
                self._gather(batch.shard, batch.generation, batch.ranges)
            batch = await self._next_or_none()
            if batch is None:
                return
            self._cursor.batch = batch
            yield batch

    async def _next_or_none(self) -> ConsumerBatch | None:
        """None once the consumer is closed here. Raises what ended it."""
        await self._stands()
        while True:
            while self._parts:
                batch = self._parts.popleft()
                if self._is_current(batch.shard, batch.generation):
                    share = self._shares[batch.shard]
                    for first, following in batch.ranges:
                        share.handed.add(first, following)
                    self._renew(batch.shard, batch.first_offset)
                    return batch
            if self._in_hand is not None:
                done, self._in_hand = self._in_hand, None
                self._consumed(done)
            while not self._queue:
                self._give_back()
                if self._closed:
                    return None
                if self._ended is not None:
                    raise self._ended
                await self._wait()
            item = self._queue.popleft()
            self._in_hand = item
            self._parts.extend(self._meant(item))

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RequestError(
                f"Two tasks wait for records of one consumer of {self.stream}.",
                code=Code.STATE,
                hint="Give each task a consumer of its own; they share the shards.",
            )
        self._extend(waiting=True)
        self._show_life()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _is_current(self, shard: int, generation: int) -> bool:
        share = self._shares.get(shard)
        return share is not None and share.generation == generation and not share.revoked

    def _meant(self, item: _Item) -> list[ConsumerBatch]:
        """The records of a batch that this consumer is to process, grouped by attempts."""
        if item.opening != self._opening or not self._is_current(item.shard, item.generation):
            return []
        share = self._shares[item.shard]
        try:
            header = decode_header(item.body)
        except RequestError as error:
            raise _malformed(error) from error
        base, following = header.base_offset, header.next_offset
        found: list[ConsumerBatch] = []
        if following <= share.position:
            for attempt, ranges in share.again:
                parts = ranges.within(base, following)
                if parts:
                    ranges.remove(base, following)
                    found.append(ConsumerBatch(item.body, parts, item.shard, item.generation, attempt))
            share.again = [(attempt, ranges) for attempt, ranges in share.again if ranges]
            return found
        first, share.position = max(share.position, base), following
        parts = share.skip.missing(first, following)
        share.skip.remove(0, following)
        return [ConsumerBatch(item.body, parts, item.shard, item.generation, 1)] if parts else []

    def _renew(self, shard: int, offset: int) -> None:
        """Records that wait here have their ack timeout from when they are handed out, not from when they came."""
        now = self._loop.time()
        if now - self._shares[shard].renewed <= self._ack_timeout_s / RENEWALS:
            return
        for number, share in self._shares.items():
            if now - share.renewed > self._ack_timeout_s / RENEWALS:
                share.renewed = now
                # Of other shards, what the caller has in hand keeps its clock.
                waiting = offset if number == shard else share.position
                self._exchange.tell(Renew(number, share.generation, waiting))

    # -- acknowledging --------------------------------------------------------------------------------

    async def ack(self, record: ConsumerRecord | ConsumerBatch) -> bool:
        """Acknowledge the record, or all of the batch. True once that is durable. False if it does not count (the shard was
        reassigned, or the consumer was closed): then the records are redelivered. Also False if the connection was lost before
        the answer: then they are redelivered unless the broker had carried it out. Acknowledgements of one event loop iteration
        are sent together. Raises RequestError if the broker refuses it for another reason.
        """
        return await self._acked(record.shard, record.generation, _ranges_of(record))

    def ack_nowait(self, record: ConsumerRecord | ConsumerBatch) -> asyncio.Future[bool]:
        """As `ack`, and asked for at once; the future tells."""
        if self._gather(record.shard, record.generation, _ranges_of(record)):
            return self._acks.outcome(record.shard)
        told: asyncio.Future[bool] = self._loop.create_future()
        told.set_result(False)
        return told

    async def ack_through(self, record: ConsumerRecord | ConsumerBatch) -> bool:
        """All of the record's shard that was handed out, up to and including the record, is done. Returns as `ack`."""
        share = self._share(record.shard, record.generation)
        if share is None:
            return self._lost_ack(1)
        last = _ranges_of(record)[-1][1]
        return await self._acked(record.shard, record.generation, share.handed.within(0, last))

    async def nack(
        self, record: ConsumerRecord | ConsumerBatch, *, delay: float | None = None, reason: str = ""
    ) -> bool:
        """The record failed: it is redelivered after `delay` seconds (None: as the subscription's retries say), or goes to the
        dead-letter stream with `reason` once it had all its attempts. Returns as `ack`."""
        share = self._share(record.shard, record.generation)
        if share is None:
            return self._lost_ack(1)
        delay_ms = -1 if delay is None else max(0, milliseconds(delay))
        ranges = _ranges_of(record)
        for each in ranges:
            share.handed.remove(*each)
        self._cursor.failed(record)
        call = Nack(
            record.shard,
            record.generation,
            [edge for each in ranges for edge in each],
            delay_ms,
            # What an error says may be no text: names of files need not be.
            reason[:4096].encode(errors="backslashreplace").decode()[:4096],
        )
        try:
            await self._acks.ask(call)
        except FelixError as error:
            if not is_lost(error):
                raise
            return self._lost_ack(len(ranges))
        finally:
            self._give_back()
        return True

    def _gather(self, shard: int, generation: int, ranges: list[tuple[int, int]]) -> bool:
        """Acknowledge these with others of this event loop iteration; False if they no longer count."""
        share = self._share(shard, generation)
        if share is None or not self._exchange.is_open:
            return self._lost_ack(len(ranges))
        self._acks.add(shard, generation, ranges)
        for first, following in ranges:
            share.handed.remove(first, following)
        return True

    async def _acked(self, shard: int, generation: int, ranges: list[tuple[int, int]]) -> bool:
        return self._gather(shard, generation, ranges) and await self._acks.outcome(shard)

    def _settle(self, shard: int, generation: int, ranges: list[tuple[int, int]]) -> None:
        """These count as done. Where they took longer than the ack timeout, the broker may have sent them once more before it heard of it."""
        share = self._share(shard, generation)
        if share is None:
            return
        for first, following in ranges:
            share.handed.remove(first, following)
            for _, again in share.again:
                again.remove(first, following)
        self._cursor.settle(shard, generation, ranges)
        if self._parts:
            left = (
                part._without(ranges) if (part.shard, part.generation) == (shard, generation) else part
                for part in self._parts
            )
            self._parts = deque(part for part in left if part is not None)

    def _lost_ack(self, count: int) -> bool:
        self.lost_acks += count
        self._show_life()
        return False

    def _show_life(self) -> None:
        """A shard was taken from here, perhaps because nothing was acknowledged for long: say that work goes on."""
        if self._taken and self._exchange.is_open:
            self._taken = False
            self._exchange.tell(Ack([]))

    # -- shards that are to be given back -------------------------------------------------------------

    def _give_back(self) -> None:
        """Release shards that were revoked, once nothing of them is in hand any more."""
        for shard, share in list(self._shares.items()):
            if share.revoked and not share.handed and not self._acks.holds(shard):
                self._drop(shard)
                self._exchange.tell(Release(shard, share.generation))

    def _drop(self, shard: int) -> None:
        self._shares.pop(shard)
        _tell(self._on_revoked, shard)

    def _lose_shares(self) -> None:
        for shard in list(self._shares):
            self._drop(shard)

    # -- credit ---------------------------------------------------------------------------------------

    def _consumed(self, item: _Item) -> None:
        if item.opening == self._opening and item.frame_bytes:
            self._window.finish(item.frame_bytes)
            self._extend(waiting=False)

    def _extend(self, *, waiting: bool) -> None:
        window = self._window
        grantable = window.done_bytes + window.window_bytes > window.announced_bytes
        tight = window.announced_bytes - window.received_bytes < CREDIT_BYTES_MIN
        # A consumer that waits while the broker might not have room for one batch would wait for ever.
        if self._exchange.is_open and (window.announcement_due or (waiting and grantable and tight)):
            self._exchange.extend_credit(window.announce())

    # -- felix.exchange.Listener ----------------------------------------------------------------------

    def opened(self, answer: Answer) -> None:
        if not isinstance(answer, ConsumerOpened):
            raise protocol_breach(f"The broker answered an OpenConsumer with {type(answer).__name__}.")
        self._opening += 1
        self.resumes += 1
        self._window = CreditWindow(self._credit_bytes)
        self._queue.clear()
        self._ack_timeout_s = answer.settings.ack_timeout_ms / 1000
        recreated = bool(self._incarnation) and answer.incarnation != self._incarnation
        self._incarnation = answer.incarnation
        if recreated:
            for shard in range(answer.shards):
                self._tell_gap(Gap(self.stream, shard, GapReason.RECREATED, 0, 0))

    def lost(self, error: FelixError) -> None:
        self._queue.clear()
        self._lose_shares()

    def ended(self, error: FelixError) -> None:
        self._ended = error
        self._lose_shares()
        self._wake()

    def event(self, event: Any) -> None:
        match event:
            case Assigned():
                if self._closed:
                    return
                self._shares[event.shard] = _Share(
                    event.generation, event.position, RangeSet(pairs(event.skip))
                )
                _tell(self._on_assigned, event.shard)
            case Skip():
                share = self._share(event.shard, event.generation)
                if share is not None:
                    for each in pairs(event.ranges):
                        share.skip.add(*each)
            case Redelivery():
                share = self._share(event.shard, event.generation)
                if share is not None:
                    ranges = RangeSet(pairs(event.ranges))
                    for first, following in ranges:
                        share.handed.remove(first, following)
                    share.again.append((event.attempt, ranges))
            case Altered():
                self._ack_timeout_s = event.ack_timeout_ms / 1000
            case Revoked():
                share = self._share(event.shard, event.generation)
                if share is None:
                    return
                if not event.drain_ms:
                    self._taken = True
                    self._drop(event.shard)
                    return
                share.revoked = True
                self._only_in_hand(event.shard, share)
                self._give_back()
                self._wake()
            case Acknowledged():
                raise protocol_breach("The broker acknowledged what nobody asked for.")

    def _only_in_hand(self, shard: int, share: _Share) -> None:
        """Records of a batch in hand that the caller has not seen will not be handed out."""
        unseen = self._cursor.unseen(shard)
        if unseen is not None:
            share.handed.remove(*unseen)

    def _share(self, shard: int, generation: int) -> _Share | None:
        share = self._shares.get(shard)
        return share if share is not None and share.generation == generation else None

    def frame(self, frame: Frame) -> None:
        if frame.type is FrameType.GAP:
            gap = decode_gap(frame.body)
            if gap.reason != GapReason.COMPACTED:
                self._tell_gap(
                    Gap(self.stream, gap.shard, GapReason(gap.reason), gap.first_offset, gap.next_offset)
                )
            return
        frame_bytes = FRAME_HEADER_BYTES + len(frame.body)
        self._window.receive(frame_bytes)
        shard = _shard_of(frame.body)
        share = self._shares.get(shard)
        generation = 0
        if share is not None:
            generation = share.generation
            share.renewed = share.renewed or self._loop.time()
        self._queue.append(_Item(frame_bytes, frame.body, shard, generation, self._opening))
        self._wake()

    def _tell_gap(self, gap: Gap) -> None:
        self.gap_count += 1
        self.gaps.append(gap)
        if self._on_gap is None:
            _log.warning("%s", gap)
        _tell(self._on_gap, gap)


T = TypeVar("T")


def _tell(callback: Callable[[T], None] | None, what: T) -> None:
    """Call what the application gave; its mistakes are its own and do not end the connection."""
    if callback is None:
        return
    try:
        callback(what)
    except Exception:
        _log.exception("a callback of a consumer failed")


def _own(record: ConsumerRecord) -> ConsumerRecord:
    """With payload and key as bytes of its own, so that it does not keep its batch in memory."""
    key = record.key
    return ConsumerRecord(
        record.offset, record.timestamp_ms, None if key is None else bytes(key), record.headers, bytes(record.payload),
        record.shard, record.attempt, record.generation,
    )  # fmt: skip


def _ranges_of(record: ConsumerRecord | ConsumerBatch) -> list[tuple[int, int]]:
    if isinstance(record, ConsumerBatch):
        return record.ranges
    return [(record.offset, record.offset + 1)]


def _shard_of(body: memoryview) -> int:
    """Bytes 4 to 8 of a batch (docs/wire.md); whether it is one is looked at when it is handed out."""
    return int.from_bytes(body[4:8]) if len(body) >= 8 else -1


def subscription_settings(
    start: str | None = None,
    ack_timeout: float | None = None,
    retries: Retries | None = None,
    unacked_max: int | None = None,
    inactive_ttl: float | None = None,
    exclusive: bool | None = None,
) -> SubscriptionSettings | None:
    """Settings of a durable subscription from those that are given, durations in seconds; None where none is."""
    given: dict[str, Any] = {
        "start": start,
        "ack_timeout_ms": None if ack_timeout is None else milliseconds(ack_timeout),
        "retries": retries,
        "unacked_max": unacked_max,
        "inactive_ttl_ms": None if inactive_ttl is None else milliseconds(inactive_ttl),
        "exclusive": exclusive,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return SubscriptionSettings(**given) if given else None
