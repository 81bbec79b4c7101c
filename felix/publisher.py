"""Publisher: records into batches, batches onto a publish stream, acknowledgements back to who asked for them.

What it does with a record and a batch, `felix.publisher_core` decides. This is the shell around it: it opens the publish stream again on every link, sends
while the session's credit lasts, keeps the one timer and the futures.

Invariants beside the core's:

- no batch leaves beyond the session's publish credit;
- every record accepted is acknowledged, or its refusal is delivered: to its future, to `on_refused`, and to the next
  `send` or `flush`;
- a refusal that says "not now" is tried again, with everything behind it, until the batch's deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from types import TracebackType
from typing import Final, Protocol, Self

from felix.backoff import Backoff
from felix.batch import Headers, NewRecord
from felix.connection import RegionConnection
from felix.errors import Code, FelixError, RequestError, UnavailableError, protocol_breach
from felix.frames import AppendedBody
from felix.link import Link
from felix.messages import Answer, OpenPublisher, PublisherOpened
from felix.names import StreamName
from felix.payload import MessageId, Payload, RecordKey, key_bytes, paired, payload_bytes, with_message_id
from felix.publisher_core import (
    BATCH_BYTES_DEFAULT,
    BATCH_RECORDS_DEFAULT,
    BUFFER_BYTES_DEFAULT,
    DEADLINE_MS_DEFAULT,
    FLUSHED,
    FULL,
    ITERATION_ENDED,
    LINGERS,
    LINK_LOST,
    NOTHING,
    ROOM_WANTED,
    Acks,
    Added,
    Event,
    Failed,
    NeverFits,
    Opened,
    PendingBatch,
    PublisherCore,
    PublishProgress,
    Ready,
    Receipt,
    Refusal,
    Refused,
    StreamRefused,
    TimeCame,
)

_log = logging.getLogger("felix.publisher")

STOOD_STILL_S: Final = 1.0
"""A timer that comes so much later than it was set for: the process, or the whole machine, stood still."""


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

    def answered(self) -> None:
        self.left -= 1
        if not self.left and not self.future.done():
            self.future.set_result(self.offsets)


class _Place:
    """One of many records, which waits for its offset like a future."""

    __slots__ = ("_many", "_place")

    def __init__(self, many: _Many, place: int) -> None:
        self._many, self._place = many, place

    def done(self) -> bool:
        return False

    def set_result(self, offset: int) -> None:
        self._many.offsets[self._place] = offset
        self._many.answered()

    def set_exception(self, error: FelixError) -> None:
        if not self._many.future.done():
            self._many.future.set_exception(error)


class _Flight:
    """One sending of a batch, whose answer is awaited (connection.Pending)."""

    __slots__ = ("_batch", "_publisher", "correlation", "link")

    def __init__(self, publisher: Publisher, batch: PendingBatch, link: Link) -> None:
        self._publisher, self._batch, self.link = publisher, batch, link
        self.correlation = link.register(self)

    def answered(self, answer: Answer) -> None:
        raise FelixError("A batch was answered like a request.", code=Code.PROTOCOL)

    def acknowledged(self, appended: AppendedBody) -> None:
        if appended.offsets and len(appended.offsets) != self._batch.header.records:
            raise protocol_breach("An acknowledgement names another number of records than the batch has.")
        publisher = self._publisher
        ready = publisher._core.acknowledged(self._batch, self, appended)
        if ready is not NOTHING:
            publisher._carry_out(ready)
            publisher.pump()

    def refused(self, error: FelixError) -> None:
        self._publisher._step(Refused(self._batch, self, error))


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
        self._region = connection
        self._loop = asyncio.get_running_loop()
        self.stream = stream
        self.acks: Acks = acks
        self._core = PublisherCore(
            stream, connection.policy, connection.runtime.random, producer_id=producer_id, linger_ms=linger_ms,
            batch_bytes=batch_bytes, batch_records=batch_records, buffer_bytes=buffer_bytes, acks=acks, compress=compress,
            deadline_ms=deadline_ms,
        )  # fmt: skip
        self._lingers = linger_ms > 0
        self._on_refused = on_refused
        self._tracer = tracer
        self._made_as = made_as
        self._link: Link | None = None
        self._stream_id = -1
        self._watch = 0
        self._opening: asyncio.Task[None] | None = None
        self._backoff = Backoff(connection.policy, connection.runtime.random)
        """since a publish stream was had last, at whichever broker"""
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._open_refusal: UnavailableError | None = None
        self._started = False
        self._waiting_to_open = 0
        self._lost_its_stream = False
        """The broker takes nothing more on the publish stream that it had, and it has no other yet. What is given to it now is refused where the stream of that
        name turns out to be another one."""
        self._closed = False
        self._room: deque[asyncio.Future[None]] = deque()
        self._flushing: list[tuple[int, asyncio.Future[None]]] = []
        """who waits until so many records are dealt with"""
        self._iteration_end = False
        self._yield_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
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
        """Open the publish stream. Raises what the broker refuses it with, UnavailableError(TIMEOUT) without an answer. Where it raises, or
        is cancelled, the publisher is closed."""
        try:
            await self._stands()
        except BaseException:
            self.abort()
            raise

    async def _stands(self) -> None:
        """As `open`; but who waits and is cancelled leaves it to be opened all the same."""
        if not self._started:
            self._started = True
            self._region.attach(self, self.stream)
        self._waiting_to_open += 1
        try:
            async with asyncio.timeout(self._region.request_timeout_s):
                await asyncio.shield(self._opened)
        except TimeoutError:
            self.abort()
            if self._open_refusal is not None:
                # It was tried all the time: what the broker said last says more than that it took long.
                raise self._open_refusal from None
            raise UnavailableError(
                f"No publish stream into {self.stream} could be opened within {self._region.request_timeout_s:g} s. {self._region.why_unreached}".rstrip(),
                code=Code.TIMEOUT,
                hint="Is the region up?",
            ) from None
        finally:
            self._waiting_to_open -= 1

    async def close(self) -> None:
        """Flush, then end the publish stream. Raises what `flush` raises, unless that was told before; the publisher is closed in any
        case."""
        if self._closed:
            return
        core = self._core
        error = core.error if core.failed is not None else None
        try:
            # Where it is not open, and nobody waits for that, nothing was given.
            wanted = core.failed is None and bool(core.accumulators or self._waiting_to_open)
            while wanted:
                try:
                    await self.flush()
                except FelixError as caught:
                    error = error or caught
                # Other tasks may have gone on sending, whatever became of the records before theirs.
                wanted = core.failed is None and core.held_bytes > 0
            if error is not None:
                raise self._over(error)
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
        return len(self._core.accumulators)

    @property
    def is_over(self) -> bool:
        """True once it takes no more records: closed, or refused for good."""
        return self._core.failed is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of records accepted and not yet acknowledged; `buffer_bytes` bounds them."""
        return self._core.held_bytes

    @property
    def progress(self) -> PublishProgress:
        """How far it has come; also once it is closed."""
        return self._core.progress

    # -- records in -----------------------------------------------------------------------------------

    async def send(
        self,
        payload: Payload,
        key: RecordKey | None = None,
        headers: Headers | None = None,
        *,
        message_id: MessageId | None = None,
    ) -> None:
        """Put one record into its batch; returns at once while there is room, else waits for it.

        Raises RequestError where the record itself cannot be (too large, key or headers invalid), and the error of
        an earlier refused batch, once: this record is not taken then, nor where the call is cancelled. Bytes are taken as they are; a
        bytearray or memoryview is copied.
        """
        core = self._core
        if self._yield_due:
            await self._yield()
        if core.error is not None or core.failed is not None or not core.accumulators:
            await self._check()
        if core.held_bytes >= core.buffer_bytes:
            await self._wait_for_room()
        if message_id is not None:
            headers = with_message_id(headers, message_id)
        if self._tracer is not None:
            headers = self._tracer.inject(headers)
        added = core.add(payload, key, headers)
        if added is not None:
            self._added(added)

    async def _give(self, payload: Payload, key: RecordKey | None, headers: Headers | None) -> None:
        """As `send`; but the error of an earlier batch is left for the next `send` or `flush`."""
        core = self._core
        if core.failed is not None or not core.accumulators or core.held_bytes >= core.buffer_bytes:
            await self._ready_for_more()
        if self._tracer is not None:
            headers = self._tracer.inject(headers)
        added = core.add(payload, key, headers)
        if added is not None:
            self._added(added)
        if self._yield_due:
            await self._yield()

    async def publish(
        self,
        payload: Payload,
        key: RecordKey | None = None,
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
        core = self._core
        if core.failed is not None or not core.accumulators or core.held_bytes >= core.buffer_bytes:
            await self._ready_for_more()
        future: asyncio.Future[int] = self._loop.create_future()
        self._add(payload, key, headers, future, shard)
        return await future

    def _own_record(self, payload: Payload, key: RecordKey | None, headers: Headers | None) -> NewRecord:
        """One record, checked as the core checks those that it is given one by one."""
        own = key_bytes(key) if key else None
        if self._tracer is not None:
            headers = self._tracer.inject(headers)
        return NewRecord(payload_bytes(payload), own, headers)

    def publish_nowait(
        self,
        payload: Payload,
        key: RecordKey | None = None,
        headers: Headers | None = None,
        *,
        message_id: MessageId | None = None,
    ) -> asyncio.Future[int]:
        """Put one record into its batch; the future gives its offset.

        Raises UnavailableError(LIMIT_MEMORY) where `buffer_bytes` are in use, RequestError(STATE) before it is open.
        """
        self._require_acks()
        core = self._core
        if core.failed is not None:
            raise core.failed
        if not core.accumulators:
            raise RequestError(
                f"The publisher into {self.stream} is not open.", code=Code.STATE, hint="Use `async with`."
            )
        if core.held_bytes >= core.buffer_bytes:
            raise UnavailableError(
                f"{core.held_bytes} bytes wait for acknowledgement in {self.stream}; {core.buffer_bytes} are allowed.",
                code=Code.LIMIT_MEMORY,
                hint="Await an earlier record first, or use `send`, which waits.",
            )
        if message_id is not None:
            headers = with_message_id(headers, message_id)
        future: asyncio.Future[int] = self._loop.create_future()
        self._add(payload, key, headers, future)
        return future

    async def send_many(
        self, payloads: Iterable[Payload], keys: Iterable[RecordKey | None] | None = None
    ) -> None:
        """Put many records into their batches: the cheapest way per record. As `send` otherwise."""
        core, tracer = self._core, self._tracer
        if core.error is not None or core.failed is not None or not core.accumulators:
            await self._check()
        for payload, key in paired(payloads, keys):
            if core.held_bytes >= core.buffer_bytes:
                await self._wait_for_room()
            added = core.add(payload, key, tracer.inject(None) if tracer is not None else None)
            if added is not None:
                self._added(added)
                if self._yield_due:
                    await self._yield()

    async def publish_many(
        self, payloads: Sequence[Payload], keys: Sequence[RecordKey | None] | None = None
    ) -> list[int]:
        """Publish many records and return their offsets, in the order given, once all are in the log.

        Raises the first refusal; the others may be in the log.
        """
        self._require_acks()
        core = self._core
        await self._ready_for_more()
        many = _Many(self._loop.create_future())
        many.offsets = [-1] * len(payloads)
        # One more until all are given, so that it is not done before.
        many.left = 1
        try:
            for place, (payload, key) in enumerate(paired(payloads, keys)):
                while core.held_bytes >= core.buffer_bytes:
                    await self._wait_for_room()
                many.left += 1
                try:
                    self._add(payload, key, None, _Place(many, place))
                except BaseException:
                    many.left -= 1
                    raise
                if self._yield_due:
                    await self._yield()
        except BaseException:
            many.future.cancel()
            raise
        many.answered()
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
        self._require_acks()
        core = self._core
        if core.failed is not None or not core.accumulators or core.held_bytes >= core.buffer_bytes:
            await self._ready_for_more()
        future: asyncio.Future[Receipt] = self._loop.create_future()
        now = self._loop.time()
        try:
            core.add_batch(records, shard, future, now, expected_offset)
        finally:
            # Also where they make no batch: what was open in their shard was closed.
            self._pump(now)
        return await future

    async def flush(self) -> None:
        """Return once all that was given is acknowledged (with acks="none": has left).

        Raises the error of the first batch refused since the last `send` or `flush` that raised.
        """
        core = self._core
        if core.failed is not None:
            raise self._over(core.failed)
        self._step(FLUSHED)
        given = core.given
        if core.settled < given:
            future: asyncio.Future[None] = self._loop.create_future()
            waiting = given, future
            self._flushing.append(waiting)
            try:
                await future
            finally:
                if waiting in self._flushing:
                    self._flushing.remove(waiting)
        await self._check()

    def _require_acks(self) -> None:
        if self.acks == "none":
            raise RequestError(
                "A publisher with acks='none' learns no offsets.", code=Code.UNSUPPORTED, hint="Use `send`."
            )

    async def _check(self) -> None:
        """Raise what there is to raise; wait until the stream is open."""
        core = self._core
        if core.failed is not None:
            raise self._over(core.failed)
        if core.error is not None:
            error, core.error = core.error, None
            raise error
        if not core.accumulators:
            await self._stands()
            if core.failed is not None:
                # It was closed right after it was opened.
                raise self._over(core.failed)

    def _over(self, error: FelixError) -> FelixError:
        """What ended the publisher: whoever is told so is told of all that was given up with it."""
        self._core.error = None
        return error

    async def _ready_for_more(self) -> None:
        """As `_check` and `_wait_for_room`, for those who are told what becomes of their records themselves."""
        core = self._core
        if core.failed is not None or not core.accumulators:
            await self._check()
        while core.held_bytes >= core.buffer_bytes:
            await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        core = self._core
        while core.held_bytes >= core.buffer_bytes:
            # What is still open counts too: without this, one large linger could wait for itself.
            self._step(ROOM_WANTED)
            if core.held_bytes < core.buffer_bytes:
                break
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._room.append(waiter)
            try:
                await waiter
            finally:
                # A waiter that is woken but leaves must wake the next one.
                self._wake_for_room()
            if core.failed is not None:
                raise self._over(core.failed)

    def _wake_for_room(self) -> None:
        while self._room and self._core.held_bytes < self._core.buffer_bytes:
            waiter = self._room.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break

    # -- the core, carried out ------------------------------------------------------------------------

    def _add(
        self,
        payload: Payload,
        key: RecordKey | None,
        headers: Headers | None,
        caller: asyncio.Future[int] | _Place,
        shard: int | None = None,
    ) -> None:
        if self._tracer is not None:
            headers = self._tracer.inject(headers)
        added = self._core.add(payload, key, headers, caller, shard)
        if added is not None:
            self._added(added)

    def _added(self, added: Added) -> None:
        if self._lingers:
            self._core.step(LINGERS, self._loop.time())
        elif not self._iteration_end:
            self._iteration_end = True
            self._loop.call_soon(self._iteration_ended)
            if self._link is not None:
                self._link.will_send()
        if added is FULL:
            self._yield_due = True
            self.pump()
        elif self._core.wake_at < self._timer_at:
            self._arm()

    async def _yield(self) -> None:
        """So that a producer that never waits does not keep the loop from sending what it made."""
        self._yield_due = False
        await asyncio.sleep(0)
        if self._core.failed is not None:
            raise self._over(self._core.failed)

    def _iteration_ended(self) -> None:
        self._iteration_end = False
        self._yield_due = False
        self._step(ITERATION_ENDED)

    def _step(self, event: Event) -> None:
        now = self._loop.time()
        ready = self._core.step(event, now)
        if ready is not NOTHING:
            self._carry_out(ready)
        self._pump(now)

    def _carry_out(self, ready: Ready) -> None:
        for flight in ready.forget:
            flight.link.forget(flight.correlation)
        delivered = ready.delivered
        if delivered is not None:
            if delivered.callers is not None:
                for waiting, offset in zip(delivered.callers, delivered.offsets, strict=False):
                    if waiting is not None and not waiting.done():
                        waiting.set_result(offset)
            if delivered.caller is not None and not delivered.caller.done():
                delivered.caller.set_result(delivered.receipt)
        for callers, caller, refusal in ready.given_up:
            for waiting in (*callers, caller):
                if waiting is not None and not waiting.done():
                    waiting.set_exception(refusal.error)
            if self._on_refused is not None:
                self._tell_refused(refusal)
        if ready.reopen:
            self._reopen()

    def _tell_refused(self, refusal: Refusal) -> None:
        """Call what the application gave; its mistakes are its own, and end neither the publisher nor the session."""
        assert self._on_refused is not None
        try:
            self._on_refused(refusal)
        except Exception:
            _log.exception("on_refused of a publisher into %s failed", self.stream)

    def pump(self) -> None:
        """Send what may be sent now, as far as credit and backlog allow."""
        self._pump(self._loop.time())

    def _pump(self, now: float) -> None:
        """Send; then wake whoever waits for that, and see to the timer."""
        core, link = self._core, self._link
        if link is not None and self._stream_id >= 0:
            while (batch := core.next_batch(now)) is not None:
                size = batch.frame_bytes
                if size > link.window_bytes:
                    self._carry_out(core.step(NeverFits(batch, link.window_bytes), now))
                elif link.may_send(size):
                    self._send(link, batch)
                else:
                    link.wait_to_send(self)
                    break
        if self._room:
            self._wake_for_room()
        if self._flushing:
            self._wake_flushing()
        if core.wake_at < self._timer_at:
            self._arm()

    def _send(self, link: Link, batch: PendingBatch) -> None:
        if batch.sent_ever:
            self.batches_resent += 1
        self.batches_sent += 1
        if self.acks == "none":
            frame = batch.frame(self._watch)
            self._core.sent(batch, None)
        else:
            flight = _Flight(self, batch, link)
            frame = batch.frame(flight.correlation)
            self._core.sent(batch, flight)
        link.send_batch(self._stream_id, frame)

    def _wake_flushing(self) -> None:
        core = self._core
        settled = inf if core.failed is not None else core.settled
        for given, waiter in self._flushing:
            if given <= settled and not waiter.done():
                waiter.set_result(None)

    def _arm(self) -> None:
        """Set the timer for an earlier time. One that fires before the core asks for it finds nothing due, and is set again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._core.wake_at
        self._timer = self._loop.call_at(self._timer_at, self._time_came)

    def _time_came(self) -> None:
        # A loop may call a timer a little before its time.
        now = max(self._loop.time(), self._timer_at)
        late_s = now - self._timer_at
        self._timer, self._timer_at = None, inf
        throttled = self._link.throttled if self._link is not None else None
        came = TimeCame(throttled, self._session(now), stood_still=late_s >= STOOD_STILL_S)
        self._carry_out(self._core.step(came, now))
        self._pump(now)

    def _session(self, now: float) -> str:
        """How it stands with the broker, for whoever is told that a batch was given up."""
        link = self._link
        if link is None or link.is_over:
            why = self._region.why_unreached.rstrip(".")
            return f"no session with the broker stands{why and f' ({why[0].lower()}{why[1:]})'}"
        return f"the session stands, and the broker was last heard {max(0.0, now - link.connection.heard_at):.1f} s ago"

    # -- links (connection.Attachment) ----------------------------------------------------------------

    def link_up(self, link: Link) -> None:
        self._opening = self._loop.create_task(self._open_on(link), name=f"felix-open-{self.stream}")

    def link_down(self, error: FelixError) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        # The link may live on, where the stream is led elsewhere now: what it has of this publisher would count there until its end.
        self._end_stream()
        self._step(LINK_LOST)

    def link_dead(self, error: FelixError) -> None:
        self.link_down(error)
        self._fail(error)

    async def _open_on(self, link: Link) -> None:
        while not link.is_over:
            try:
                await self._open_once(link)
                return
            except UnavailableError as error:
                if link.is_over:
                    return
                self._open_refusal = error
                if not self._opened.done() and error.retry_after_ms is None:
                    self._fail(error)
                    return
                await asyncio.sleep(self._backoff.after_ms(error) / 1000)
            except FelixError as error:
                if not link.is_over:
                    self._fail(error)
                return

    async def _open_once(self, link: Link) -> None:
        stream_id = link.connection.open_stream(bidirectional=False)
        try:
            answer = await link.ask(
                OpenPublisher(str(self.stream), self.acks, self._made_as), stream_id=stream_id
            )
            self._stand_on(link, stream_id, answer)
        except BaseException:
            # The broker keeps no publisher for a refused one, nor for one that nobody waits for any more; neither does the connection.
            if not link.is_over and not link.connection.is_closed:
                link.connection.reset_stream(stream_id, 0)
            raise

    def _stand_on(self, link: Link, stream_id: int, opened: PublisherOpened) -> None:
        if opened.shards < 1:
            raise RequestError(f"{self.stream} is said to have {opened.shards} shards.", code=Code.PROTOCOL)
        assert link.limits is not None
        self._link, self._stream_id = link, stream_id
        self._lost_its_stream = False
        self._watch = link.watch(self._stream_refused)
        self._backoff.reset()
        if not self._opened.done():
            self._opened.set_result(None)
        self._step(
            Opened(
                opened.incarnation,
                opened.shards,
                link.limits.batch_bytes_max,
                link.window_bytes,
                opened.in_flight,
            )
        )

    def _reopen(self) -> None:
        """The broker takes nothing more on this publish stream; ask for another, which says what still holds."""
        link = self._link
        if link is None or link.is_over:
            return
        self._lost_its_stream = True
        self._end_stream()
        self._step(LINK_LOST)
        self.link_up(link)

    def _end_stream(self) -> None:
        link, stream_id, watch = self._link, self._stream_id, self._watch
        self._link, self._stream_id, self._watch = None, -1, 0
        if link is not None and stream_id >= 0:
            link.unwatch(watch)
            if not link.is_over and not link.connection.is_closed:
                link.connection.send(stream_id, b"", end=True)

    def _stream_refused(self, error: FelixError) -> None:
        """A batch without acknowledgement was refused."""
        self._step(StreamRefused(error))

    def _fail(self, error: FelixError) -> None:
        """There is nothing more to be done with this publisher; tell whoever waits."""
        if self._core.failed is not None:
            return
        ready = self._core.step(Failed(error), self._loop.time())
        self._region.detach(self)
        if self._opening is not None and self._opening is not asyncio.current_task():
            self._opening.cancel()
        self._end_stream()
        if self._timer is not None:
            self._timer.cancel()
        if not self._opened.done():
            self._opened.set_exception(error)
            # It is raised by `open`, if anybody still waits there.
            self._opened.exception()
        self._carry_out(ready)
        waiting, self._room = self._room, deque()
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._wake_flushing()
