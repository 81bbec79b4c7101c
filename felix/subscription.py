"""Subscription: a cursor over a stream, as an async iterator of records or of whole batches.

A `Feed` is the part that lives on the connection: it asks for the event stream, keeps the batches that came and were
not taken yet, renews credit as they are consumed, and after a lost connection asks again from where the consumer
stands. A `Subscription` is the consumer's handle on it.

Invariants:

- what is held and not consumed never passes `credit_bytes`; a consumer that stops consuming stops the broker;
- records of one shard come in the order of their offsets, each once, whatever happens to the connection;
- it is subscribed once at a time: of a broker that it moved away from it takes nothing, whether that link stands or not;
- offsets that will not come are named in a `Gap`: by the broker, or found here where offsets jump;
- after a resume in another incarnation of the stream there is a gap of kind RECREATED, and its records from the first.

What a gap does is the caller's choice, `on_gap`: "log" (the default) logs it and counts it in `Subscription.gaps`;
"raise" raises `GapError` at the gap, and iterating again continues after it; a function is called with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self

import msgspec

from felix.backoff import Backoff
from felix.batch import (
    BATCH_BYTES_MAX,
    Batch,
    BatchHeader,
    Record,
    decode_batch,
    decode_payloads,
    decode_records,
)
from felix.connection import RegionConnection
from felix.errors import Code, FelixError, ProtocolError, RequestError, UnavailableError, protocol_breach
from felix.frames import FRAME_HEADER_BYTES, Frame, FrameType, GapBody, GapReason, decode_gap
from felix.link import Link
from felix.messages import DescribeStream, Start, StreamState, Subscribe, Subscribed, decode_error
from felix.names import StreamName
from felix.session import CreditWindow

BATCH_FRAME_BYTES_MAX: Final = FRAME_HEADER_BYTES + BATCH_BYTES_MAX
CREDIT_BYTES_MIN: Final = BATCH_FRAME_BYTES_MAX
"""With less, the largest batch could never be delivered."""
CREDIT_BYTES_MAX: Final = 1 << 32
CREDIT_BYTES_DEFAULT: Final = 4 * 1024 * 1024
"""Bytes that one subscription may hold here: several of the largest batches, so that it need not wait for the broker."""
GAPS_KEPT: Final = 64
"""The newest gaps that a subscription remembers; their number is counted without bound."""

StartAt = Literal["earliest", "latest"] | int | datetime
EPOCHS_READ_MAX: Final = 32
"""How many leader epochs a reader remembers of a shard: one for each start of a broker, or each election, that it has met there since the last gap."""

EpochsRead = Mapping[int, Sequence[tuple[int, int]]]
"""Per shard: leader epochs, each with the offset from which on batches of it were read; oldest first."""
OnGap = Literal["log", "raise"] | Callable[["Gap"], None]

_log = logging.getLogger("felix.subscription")


class Gap(NamedTuple):
    """Records [first_offset, next_offset) of a shard will not be delivered.

    With RECREATED, `first_offset` is where the consumer stood in the old incarnation, `next_offset` where the new one
    begins; the two count different records. With TRUNCATED and a `next_offset` below `first_offset`, the log lost its end
    in a crash, or was put back to an earlier copy: offsets from `next_offset` on are given to other records, which follow.
    """

    stream: StreamName
    shard: int
    reason: GapReason
    first_offset: int
    next_offset: int

    @property
    def goes_back(self) -> bool:
        """Whether offsets from `next_offset` on are given to other records than those that were read, or would have been."""
        return self.reason is GapReason.RECREATED or self.next_offset < self.first_offset

    def __str__(self) -> str:
        if self.reason is GapReason.RECREATED:
            return (
                f"{self.stream} was deleted and created anew: what followed offset {self.first_offset} of shard "
                f"{self.shard} is gone, and the new stream is read from offset {self.next_offset}"
            )
        if self.next_offset < self.first_offset:
            return (
                f"Shard {self.shard} of {self.stream} lost its end in a crash, or was put back to an earlier copy: it was read to offset {self.first_offset}, and "
                f"goes on from offset {self.next_offset} with other records"
            )
        return (
            f"Offsets {self.first_offset} to {self.next_offset - 1} of shard {self.shard} of {self.stream} are gone "
            f"({self.reason.name.lower()})"
        )


class GapError(RequestError):
    """Raised in place of records that are gone, where `on_gap="raise"`; iterating again goes on behind them."""

    default_code = Code.OFFSET_OUT_OF_RANGE

    def __init__(self, gap: Gap) -> None:
        super().__init__(
            f"{gap}.", hint="Go on iterating to read what follows, or raise the stream's retention."
        )
        self.gap = gap


class ReceivedBatch:
    """One batch as it was delivered; its records from `first_offset` on are the consumer's."""

    __slots__ = ("_batch", "first_offset")

    def __init__(self, batch: Batch, first_offset: int) -> None:
        self._batch = batch
        self.first_offset = first_offset
        """The first offset that is the consumer's; above the header's base offset where the start lay inside."""

    @property
    def header(self) -> BatchHeader:
        """The header, of the whole batch."""
        return self._batch.header

    @property
    def batch(self) -> Batch:
        """The whole batch as it travelled; sealed where a grant was asked under."""
        return self._batch

    @property
    def shard(self) -> int:
        return self._batch.header.shard

    @property
    def next_offset(self) -> int:
        """The offset after the last record."""
        return self._batch.header.next_offset

    @property
    def timestamp_ms(self) -> int:
        """The broker's time of all its records, in ms since the epoch."""
        return self._batch.header.append_time_ms

    def __len__(self) -> int:
        return self.next_offset - self.first_offset

    def _repr_html_(self) -> str:
        """For notebooks."""
        from felix.notebook import rows_html  # here: only a notebook asks

        return rows_html(list(self.records()))

    def records(self) -> Iterator[Record]:
        """The records; payloads and keys are views, which keep the whole batch in memory while they live.

        Raises ProtocolError where the body is not what its header says.
        """
        skip = self.first_offset - self._batch.header.base_offset
        try:
            records = decode_records(self._batch)
        except RequestError as error:
            raise _malformed(error) from error
        for _ in range(skip):
            next(records)
        return records

    def payloads(self) -> list[memoryview]:
        """Only the payloads, as views like those of `records`. Raises as that does."""
        try:
            payloads = decode_payloads(self._batch)
        except RequestError as error:
            raise _malformed(error) from error
        return payloads[self.first_offset - self._batch.header.base_offset :]


def own_record(record: Record) -> Record:
    """The record with payload and key as bytes of its own, so that it does not keep its batch in memory."""
    offset, timestamp_ms, key, headers, payload = record
    return Record(offset, timestamp_ms, None if key is None else bytes(key), headers, bytes(payload))


def _malformed(error: RequestError) -> ProtocolError:
    return ProtocolError(
        f"The broker delivered what is no batch: {error.sentence}", code=Code.BATCH_MALFORMED
    )


class _Item(msgspec.Struct, frozen=True):
    """An item that waits for the consumer: a batch with its frame's bytes, or a gap."""

    frame_bytes: int
    body: memoryview | None
    gap: Gap | None
    generation: int


class Feed:
    """The part of a subscription that lives on the connection."""

    def __init__(
        self,
        connection: RegionConnection,
        stream: StreamName,
        *,
        start: Start,
        shards: Collection[int],
        credit_bytes: int,
        grant: str,
        incarnation: bytes,
        epochs: EpochsRead,
    ) -> None:
        self._region = connection
        self._loop = asyncio.get_running_loop()
        self.stream = stream
        self._start = start
        self._shards = sorted(set(shards))
        self._credit_bytes = credit_bytes
        self._grant = grant
        self._link: Link | None = None
        self._subscription = 0
        self._generation = 0
        self._window = CreditWindow(credit_bytes)
        self._window_generation = 0
        self._queue: deque[_Item] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._backoff = Backoff(connection.policy, connection.runtime.random)
        """since it was subscribed last, at whichever broker"""
        self._ended: FelixError | None = None
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.refusal: UnavailableError | None = None
        """The broker's last temporary refusal of this subscription."""
        # Where the consumer stands, per shard; with the incarnation that these offsets count in.
        self.positions: dict[int, int] = dict(start.offsets)
        self.incarnation = incarnation
        self.read_incarnation = incarnation
        """That `positions` count in: the former one until the consumer was told that the stream is another one."""
        self.epochs = {shard: list(met) for shard, met in epochs.items()}
        """Per shard, of the batches that the consumer had right before its position: by them the broker sees whether its log is the one that was read."""
        self.closed = False
        self._left = False
        self._untold: list[Gap] = []
        """Gaps that were found here, which no broker tells again: the consumer takes them first once it is subscribed."""
        self.held_bytes_max = 0
        self.resumes = -1

    # -- the consumer's side --------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Frame bytes that came and are not consumed yet; `credit_bytes` bounds them."""
        return self._window.held_bytes

    async def take(self) -> _Item:
        """The next item, in order. Raises what ended the subscription once nothing is left before it."""
        while not self._queue:
            if self._ended is not None:
                raise self._ended
            self._renew(waiting=True)
            if self._waiter is not None:
                raise RequestError(
                    f"Two tasks wait for records of one subscription of {self.stream}.",
                    code=Code.STATE,
                    hint="Give each task a subscription of its own, with its own shards.",
                )
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._queue.popleft()

    def consumed(self, item: _Item) -> None:
        """The consumer is done with the item: its bytes are returned as credit."""
        if item.generation == self._window_generation and item.frame_bytes:
            self._window.finish(item.frame_bytes)
            self._renew(waiting=False)

    def _renew(self, *, waiting: bool) -> None:
        window, link = self._window, self._link
        if link is None or not self._subscription:
            return
        grantable = window.done_bytes + window.window_bytes > window.announced_bytes
        tight = window.announced_bytes - window.received_bytes < BATCH_FRAME_BYTES_MAX
        # A consumer that waits while the broker might not have room for one batch would wait for ever.
        if window.announcement_due or (waiting and grantable and tight):
            link.extend_credit(self._subscription, window.announce())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self, error: FelixError) -> None:
        """The subscription is over; what came before is still the consumer's."""
        if self._ended is not None:
            return
        self._ended = error
        self._region.detach(self)
        if self._opening is not None and self._opening is not asyncio.current_task():
            self._opening.cancel()
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()
        self._wake()

    def close(self) -> None:
        """The consumer wants nothing more: tell the broker, and drop what is held."""
        self.closed = True
        self.give_up(
            UnavailableError(f"The subscription of {self.stream} was closed here.", code=Code.DISCONNECTED)
        )

    def told_of_incarnation(self) -> None:
        """The consumer goes on in the present incarnation, unless a gap that says so waits to be taken; those found here come before all batches."""
        for item in self._queue:
            if item.gap is None:
                break
            if item.gap.reason is GapReason.RECREATED:
                return
        self.read_incarnation = self.incarnation

    def give_up(self, error: FelixError) -> None:
        """As `close`; but whoever still asks is told why it is over."""
        self._let_go()
        self.end(error)
        self._queue.clear()

    # -- the event stream (connection.EventSink) ------------------------------------------------------

    def event(self, frame: Frame) -> None:
        if not self._subscription:
            return
        match frame.type:
            case FrameType.BATCH:
                frame_bytes = FRAME_HEADER_BYTES + len(frame.body)
                self._window.receive(frame_bytes)
                self.held_bytes_max = max(self.held_bytes_max, self._window.held_bytes)
                self._queue.append(_Item(frame_bytes, frame.body, None, self._generation))
            case FrameType.GAP:
                gap = decode_gap(frame.body)
                self._queue.append(_Item(0, None, self._gap(gap), self._generation))
            case FrameType.ERROR:
                self.event_end(decode_error(frame.body))
            case _:
                raise protocol_breach("An event stream says twice whose it is.")
        self._wake()

    def _gap(self, gap: GapBody) -> Gap:
        return Gap(self.stream, gap.shard, GapReason(gap.reason), gap.first_offset, gap.next_offset)

    def event_end(self, error: FelixError | None) -> None:
        link, subscription = self._link, self._subscription
        self._subscription = 0
        if link is not None and subscription:
            link.forget_subscription(subscription, unsubscribe=False)
        if error is None:
            error = UnavailableError(f"The broker ended the event stream of {self.stream}.")
        if not isinstance(error, UnavailableError):
            self.end(error)
        elif link is not None and not link.is_over:
            _log.info("%s: %s; subscribing again", self.stream, error.sentence)
            self._restart(link, error)

    # -- links (connection.Attachment) ----------------------------------------------------------------

    def link_up(self, link: Link) -> None:
        self._restart(link, None)

    def link_down(self, error: FelixError) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        self._let_go()

    def _let_go(self) -> None:
        """Nothing more comes from where it is. That link may stand, where the feed moves to another one: what its broker sent on would come
        between the batches of the next."""
        link, subscription = self._link, self._subscription
        self._link, self._subscription = None, 0
        if link is not None and subscription:
            link.forget_subscription(subscription, unsubscribe=True)

    def link_dead(self, error: FelixError) -> None:
        self.link_down(error)
        self.end(error)

    def _restart(self, link: Link, after: FelixError | None) -> None:
        self._link = link
        self._opening = self._loop.create_task(
            self._open_on(link, after), name=f"felix-subscribe-{self.stream}"
        )

    async def _open_on(self, link: Link, after: FelixError | None) -> None:
        stepped_back = False
        while True:
            if after is not None:
                await asyncio.sleep(self._backoff.after_ms(after) / 1000)
            try:
                await self._subscribe(link)
                self._backoff.reset()
                return
            except UnavailableError as error:
                if link.is_over:
                    return
                after = self.refusal = error
                if not self.opened.done() and error.retry_after_ms is None:
                    self.end(error)
                    return
            except FelixError as error:
                if link.is_over:
                    return
                if self.opened.done() and error.code is Code.OFFSET_OUT_OF_RANGE and not stepped_back:
                    stepped_back = True
                    try:
                        stepped_back = await self._step_back(link)
                    except FelixError as failed:
                        _log.info("%s: %s", self.stream, failed.sentence)
                    after = error
                    continue
                if self.incarnation and error.code in (Code.CONFLICT, Code.NOT_FOUND):
                    # The stream that was read is gone. If there is another of its name, it is read from its beginning.
                    self._leave_incarnation()
                    after = error
                    continue
                self.end(error)
                return

    def _leave_incarnation(self) -> None:
        self._left = True
        self.incarnation = b""
        self.epochs.clear()
        self._start = Start("earliest")

    async def _subscribe(self, link: Link) -> None:
        if self._left:
            await self._subscribe_anew(link)
            return
        if self.positions and not self.incarnation:
            # Offsets mean nothing without the incarnation that they count in; the caller meant the present one.
            self.incarnation = (await self._describe(link)).incarnation
        # The consumer has not seen the waiting items, so they are requested again instead of being held twice.
        self._drop_held()
        stands = self._goes_on_at()
        answer = await self._ask(link, stands)
        if self.incarnation and answer.incarnation != self.incarnation:
            link.forget_subscription(answer.subscription, unsubscribe=True)
            self._leave_incarnation()
            await self._subscribe_anew(link)
            return
        for shard, start in sorted(answer.starts.items()):
            if start < stands.get(shard, 0):
                # Other records have stood from there on since the log was shorter.
                self._goes_back(shard, stands[shard], start)
            # An offset that was asked for is where the consumer stands, also where the log begins behind it.
            self.positions.setdefault(shard, self._start.value if self._start.kind == "offset" else start)
        self._stand_on(link, answer)

    async def _subscribe_anew(self, link: Link) -> None:
        """The stream that was read is gone; read the one that now has its name from its beginning."""
        answer = await self._ask(link, {})
        # What was held of the old one goes with what followed it: the gap says from which offset on.
        self._drop_held()
        self._untold = [gap for gap in self._untold if gap.reason is not GapReason.RECREATED]
        for shard, start in sorted(answer.starts.items()):
            self._untold.append(
                Gap(self.stream, shard, GapReason.RECREATED, self.positions.get(shard, 0), start)
            )
        self.positions = {shard: self.positions.get(shard, 0) for shard in answer.starts}
        self._stand_on(link, answer)

    def _drop_held(self) -> None:
        """Nothing that waits is held any more, except the gaps that were found here."""
        found = [item.gap for item in self._queue if item.gap is not None and item.gap.goes_back]
        self._queue.clear()
        self._untold = found + self._untold

    def _goes_on_at(self) -> dict[int, int]:
        """Where the consumer stands once it has taken the gaps that it was not told yet."""
        return self.positions | {gap.shard: gap.next_offset for gap in self._untold}

    async def _describe(self, link: Link) -> StreamState:
        return await link.ask(DescribeStream(str(self.stream)))

    async def _step_back(self, link: Link) -> bool:
        """The log ends before the consumer's position: it lost its end in a crash. Continue from its present end; an ephemeral
        log starts again, and is read from its beginning. Whether the broker said of each shard where it ends: one that does not serve one does not.
        """
        state = await self._describe(link)
        goes_on_at = self._goes_on_at()
        asked = [shard for shard in state.state if shard.shard in goes_on_at]
        for shard in asked:
            stands = goes_on_at[shard.shard]
            if shard.is_told and stands > shard.high_watermark:
                ephemeral = state.durability.kind == "ephemeral"
                self._goes_back(shard.shard, stands, shard.log_start if ephemeral else shard.high_watermark)
        return all(shard.is_told for shard in asked)

    def _goes_back(self, shard: int, stands: int, following: int) -> None:
        self._untold.append(Gap(self.stream, shard, GapReason.TRUNCATED, stands, following))
        self.positions[shard] = following
        self.epochs.pop(shard, None)

    def _epochs_at(self, offsets: Mapping[int, int]) -> dict[int, list[tuple[int, int]]]:
        """Of the shards in which the consumer stands behind a batch. A bridge asks for statements, which say more."""
        if self._grant:
            return {}
        moved = {gap.shard for gap in self._untold}
        return {shard: self.epochs[shard] for shard in offsets if shard in self.epochs and shard not in moved}

    async def _ask(self, link: Link, offsets: dict[int, int]) -> Subscribed:
        request = Subscribe(
            str(self.stream),
            Start(self._start.kind, self._start.value, offsets, self._epochs_at(offsets)),
            self._shards,
            self._credit_bytes,
            self.incarnation,
            self._grant,
        )
        self._generation += 1
        return await link.ask(request)

    def _stand_on(self, link: Link, answer: Subscribed) -> None:
        self._left = False
        untold, self._untold = self._untold, []
        self._queue.extend(_Item(0, None, gap, self._generation) for gap in untold)
        self.incarnation = answer.incarnation
        self.told_of_incarnation()
        self._window = CreditWindow(self._credit_bytes)
        self._window_generation = self._generation
        self._subscription = answer.subscription
        self.resumes += 1
        if not self.opened.done():
            self.opened.set_result(None)
        link.claim(answer.subscription, self)
        self._wake()


class Subscription:
    """Reads one stream. Made by `Stream.subscribe`; `async for record in subscription`.

    Use `async with` to end it on time; one that is merely dropped is ended when it is collected. One task at a time.
    """

    def __init__(
        self,
        connection: RegionConnection,
        stream: StreamName,
        *,
        start: StartAt = "latest",
        offsets: dict[int, int] | None = None,
        incarnation: bytes = b"",
        shards: Collection[int] | None = None,
        credit_bytes: int = CREDIT_BYTES_DEFAULT,
        on_gap: OnGap = "log",
        grant: str = "",
        epochs: EpochsRead | None = None,
    ) -> None:
        if not CREDIT_BYTES_MIN <= credit_bytes <= CREDIT_BYTES_MAX:
            raise RequestError(
                f"credit_bytes is {credit_bytes}; it must be from {CREDIT_BYTES_MIN} (the largest batch) to "
                f"{CREDIT_BYTES_MAX}.",
                code=Code.CONFIG_INVALID,
            )
        if not callable(on_gap) and on_gap not in ("log", "raise"):
            raise RequestError(
                f"on_gap is {on_gap!r}; it is 'log', 'raise' or a function.", code=Code.CONFIG_INVALID
            )
        self.stream = stream
        self._region = connection
        self._on_gap = on_gap
        self._started = False
        self._in_hand: _Item | None = None
        self._records: Iterator[Record] | None = None
        self._records_shard = self._records_first = 0
        self._given: Record | None = None
        """Of `_records`: their shard, the first one's offset, and the last one that was given out."""
        self._feed = Feed(
            connection,
            stream,
            start=start_message(start, offsets),
            shards=shards or (),
            credit_bytes=credit_bytes,
            grant=grant,
            incarnation=incarnation,
            epochs=epochs or {},
        )
        self.gap_count = 0
        self.gaps: deque[Gap] = deque(maxlen=GAPS_KEPT)
        """The newest gaps; `gap_count` says how many there were in all."""

    # -- life -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Subscribe, if that has not been done. Raises what the broker refuses it with, UnavailableError(TIMEOUT). Where it raises, or is
        cancelled, the subscription is closed."""
        try:
            await self._stands()
        except FelixError:
            raise
        except BaseException:
            self._feed.close()
            raise

    async def _stands(self) -> None:
        """As `open`; but where who waits is cancelled, it is subscribed all the same."""
        if not self._started:
            self._started = True
            self._region.attach(self._feed, self._feed.stream)
        if self._feed.opened.done():
            await self._feed.opened
            return
        try:
            async with asyncio.timeout(self._region.request_timeout_s):
                await asyncio.shield(self._feed.opened)
        except TimeoutError:
            # Where it was tried all the time, what the broker said last says more than that it took long.
            why = self._feed.refusal or UnavailableError(
                f"No subscription of {self.stream} could be had within {self._region.request_timeout_s:g} s.",
                code=Code.TIMEOUT,
                hint="Is the region up?",
            )
            self._feed.give_up(why)
            raise why from None

    async def close(self) -> None:
        """Unsubscribe and drop what is held. Idempotent."""
        self._feed.positions = self.positions
        self._in_hand = self._records = None
        self._feed.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        feed = getattr(self, "_feed", None)
        if feed is not None and feed._ended is None and self._started:
            # The collector may run in any thread, and after the loop has ended.
            with suppress(RuntimeError):
                feed._loop.call_soon_threadsafe(feed.close)

    # -- what is known --------------------------------------------------------------------------------

    @property
    def positions(self) -> dict[int, int]:
        """Per shard, the offset after the last record or batch given out: where a resume goes on. `offsets=` takes it."""
        if self._records is None:
            return dict(self._feed.positions)
        # Of the batch in hand, the records from there on are still to be given out; but what the log has lost since is read again.
        positions = dict(self._feed.positions)
        following = self._records_first if self._given is None else self._given.offset + 1
        positions[self._records_shard] = min(following, positions.get(self._records_shard, following))
        return positions

    @property
    def epochs(self) -> dict[int, list[tuple[int, int]]]:
        """Per shard, the newest leader epochs of the batches right before `positions`, each with the offset from which on they were read. `epochs=` takes it,
        beside `offsets=`: so a log that was put back to an earlier copy, and has grown since, is not taken for the one that was read."""
        return {shard: list(met) for shard, met in self._feed.epochs.items()}

    @property
    def incarnation(self) -> bytes:
        """The 16 bytes that tell this stream from another of the same name; empty before it is open. The stream that `positions` are of: another one
        counts once its gap is told."""
        return self._feed.read_incarnation

    @property
    def held_bytes(self) -> int:
        """Bytes that came and are not consumed yet; `credit_bytes` bounds them."""
        return self._feed.held_bytes

    @property
    def resumes(self) -> int:
        """How often the broker was asked again after the first time."""
        return max(0, self._feed.resumes)

    # -- records --------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record:
        """The next record; payload and key are bytes of its own."""
        while True:
            if self._records is not None:
                # As `_next_in_hand`, of which the call is a fifth of what a record costs.
                for record in self._records:
                    self._given = own = own_record(record)
                    return own
                self._records = None
            self._hold(await self._next_or_stop())

    def _next_in_hand(self) -> Record | None:
        """The next record of the batch that is given out record by record; None where it has no more. For `felix.sync`."""
        if self._records is not None:
            for record in self._records:
                self._given = own = own_record(record)
                return own
            self._records = None
        return None

    def _hold(self, batch: ReceivedBatch) -> None:
        """Give this batch out record by record. For `felix.sync`."""
        self._records = batch.records()
        self._records_shard, self._records_first, self._given = batch.shard, batch.first_offset, None

    async def _next_or_stop(self) -> ReceivedBatch:
        try:
            return await self.next_batch()
        except UnavailableError:
            if self._feed.closed:
                raise StopAsyncIteration from None
            raise

    async def batches(self) -> AsyncIterator[ReceivedBatch]:
        """Whole batches: the cheapest way per record. A batch counts as consumed when the next one is asked for."""
        while True:
            try:
                batch = await self.next_batch()
            except UnavailableError:
                if self._feed.closed:
                    return
                raise
            yield batch

    async def next_batch(self) -> ReceivedBatch:
        """The next batch. Raises what ended the subscription, and GapError where it was asked for."""
        if not self._started or not self._feed.opened.done():
            await self._stands()
        feed = self._feed
        while True:
            if self._in_hand is not None:
                done, self._in_hand = self._in_hand, None
                feed.consumed(done)
            item = await feed.take()
            if item.gap is not None:
                self._skip(item.gap)
                continue
            assert item.body is not None
            self._in_hand = item
            try:
                batch = decode_batch(item.body)
            except RequestError as error:
                raise _malformed(error) from error
            header = batch.header
            stands = feed.positions.get(header.shard, header.base_offset)
            if header.next_offset <= stands:
                continue
            if header.base_offset > stands:
                # Put back behind the gap that it shows, so that the gap can be raised in its place.
                self._in_hand = None
                feed._queue.appendleft(item)
                self._skip(Gap(self.stream, header.shard, GapReason.TRUNCATED, stands, header.base_offset))
                continue
            feed.positions[header.shard] = header.next_offset
            met = feed.epochs.setdefault(header.shard, [])
            if not met or met[-1][0] != header.leader_epoch:
                met.append((header.leader_epoch, max(stands, header.base_offset)))
                del met[:-EPOCHS_READ_MAX]
            return ReceivedBatch(batch, max(stands, header.base_offset))

    def _skip(self, gap: Gap) -> None:
        positions = self._feed.positions
        if gap.goes_back:
            positions[gap.shard] = gap.next_offset
            self._feed.told_of_incarnation()
        else:
            stands = positions.get(gap.shard, gap.first_offset)
            if gap.next_offset <= stands:
                return
            gap = gap._replace(first_offset=max(stands, gap.first_offset))
            positions[gap.shard] = gap.next_offset
        # Of no batch is it known that it stands before that.
        self._feed.epochs.pop(gap.shard, None)
        if gap.reason is GapReason.COMPACTED:
            # Not a loss: later records of the same keys took the place of what stood there.
            return
        self.gap_count += 1
        self.gaps.append(gap)
        if callable(self._on_gap):
            self._on_gap(gap)
        elif self._on_gap == "raise":
            raise GapError(gap)
        else:
            _log.warning("%s", gap)


def start_message(start: StartAt, offsets: dict[int, int] | None) -> Start:
    """A start as it stands on the wire. Raises RequestError(INVALID)."""
    resume = dict(offsets or {})
    if any(shard < 0 or offset < 0 for shard, offset in resume.items()):
        raise RequestError("Shards and offsets count from 0.")
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise RequestError(
                f"A start of {start.isoformat()} does not say in which time zone.",
                hint="Give it one, as in datetime(2013, 1, 1, tzinfo=UTC).",
            )
        return Start("time", max(0, int(start.timestamp() * 1000)), resume)
    if isinstance(start, bool) or not isinstance(start, int | str):
        raise RequestError(
            f"A subscription cannot start at {start!r}: expected earliest, latest, an offset or a time."
        )
    if isinstance(start, int):
        if not 0 <= start < 1 << 63:
            raise RequestError(f"A subscription cannot start at {start}; offsets count from 0.")
        return Start("offset", start, resume)
    if start not in ("earliest", "latest"):
        raise RequestError(
            f"A subscription cannot start at {start!r}: expected earliest, latest, an offset or a time."
        )
    return Start(start, 0, resume)
