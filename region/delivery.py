"""Delivery: a subscription is a cursor over the log, never a queue of its own.

The same encoded frames go to every subscriber, as far as its credit and its connection allow. A slow subscriber costs no memory:
it falls behind and catches up from the log, through the broker's catch-up budget. If retention or the ring has overtaken it, it
gets a GAP frame that names the offsets.

`pump` is synchronous and is called whenever something may have changed: the log's tail moved, credit came, the
connection drained. What is not in memory is fetched by one task per subscription.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

from felix.errors import Code, FelixError, RequestError
from felix.frames import FRAME_HEADER_BYTES, GapBody, GapReason
from felix.messages import ReaderTraffic, Subscribe, encode_error
from felix.names import SpiffeId
from felix.ranges import RangeSet
from felix.session import CreditLine
from policy.access import Verb, not_found_or_forbidden
from region.broker import READ_BYTES_MAX, Broker
from region.crossing.export import SealedReader
from region.limits.quota import Meter, Throttle
from region.log.ring import Entry
from region.log.shard import ShardLog
from region.ports import DeliverySink
from region.scheduler import TURN_BYTES
from region.streams.hosted import HostedStream

log = logging.getLogger("felix.region.delivery")


REDELIVERY_BYTES_MAX: Final = 64 << 10
"""Read at a time for records that are delivered again, and may stand far from each other."""


class DeliveryFilter(Protocol):
    """Limits a delivery further than the log's end does, and is notified of its progress: a durable subscription."""

    def may_deliver(self, shard: int) -> bool:
        """False while no more may be sent of the shard for the first time; `pump` once it may again."""

    def wanted_from(self, shard: int, offset: int) -> int:
        """The first offset at or above this one that is to be sent: what stands before it is settled."""

    def delivered(self, shard: int, base_offset: int, next_offset: int) -> None:
        """A batch was sent for the first time."""

    def redelivered_batch(self, shard: int, base_offset: int, next_offset: int) -> None:
        """The redeliveries have come to the end of this batch: those in it are sent, those before it were, or are no longer in the
        log."""

    def gone(self, shard: int, next_offset: int) -> None:
        """The log begins at `next_offset` by now; what is before cannot be sent."""


async def resolve_starts(stream: HostedStream, request: Subscribe) -> dict[int, int]:
    """First offset to deliver, per shard asked for: below one that is asked for, where the log lost its end since then. Raises
    RequestError(OFFSET_OUT_OF_RANGE, INVALID)."""
    start = request.start
    shards = request.shards or list(range(stream.shard_count))
    if len(set(shards)) != len(shards):
        raise RequestError("A shard is named twice.")
    resuming = bool(start.offsets) and request.incarnation == stream.incarnation
    starts: dict[int, int] = {}
    for number in shards:
        shard = stream.shard(number)
        if resuming and number in start.offsets:
            starts[number] = start.offsets[number]
            if starts[number] < 0:
                raise RequestError(f"There is no offset {starts[number]}; offsets begin at 0.")
            if (read := start.epochs.get(number)) and not stream.ephemeral:
                starts[number] = shard.epochs.shared_end(read, starts[number])
        elif start.kind == "earliest" or start.offsets:
            # Offsets of another incarnation mean nothing here: begin where this one begins.
            starts[number] = shard.log_start_offset
        elif start.kind == "latest":
            starts[number] = shard.high_watermark
        elif start.kind == "offset":
            starts[number] = start.value
        elif start.kind == "time":
            starts[number] = await shard.offset_for_time(start.value)
        else:
            raise RequestError(
                f"A subscription cannot start at {start.kind!r}.",
                hint="Use earliest, latest, offset or time.",
            )
        if starts[number] > shard.high_watermark:
            raise RequestError(
                f"Offset {starts[number]} of {stream.name} shard {number} is not written yet; the next one is "
                f"{shard.high_watermark}.",
                code=Code.OFFSET_OUT_OF_RANGE,
                hint="Start at latest to wait for new records.",
            )
    return starts


def subscription_refusal(
    broker: Broker, identity: SpiffeId, stream: HostedStream, reader: SealedReader | None
) -> FelixError | None:
    """Why a subscription may not begin or go on, if it may not."""
    if stream.deleted:
        return RequestError(f"The stream {stream.name} was deleted.", code=Code.NOT_FOUND)
    if reader is not None:
        return reader.refusal() or stream.elsewhere
    if not broker.allows(identity, Verb.SUBSCRIBE, stream.name):
        return not_found_or_forbidden(Verb.SUBSCRIBE, stream.name)
    return stream.elsewhere


class Subscription:
    """A cursor per shard, and the event stream it feeds."""

    __slots__ = (
        "_awaits_turn", "_broker", "_catching_up", "_credit", "_cursors", "_ended", "_filter", "_meter", "_order", "_paced", "_paced_at",
        "_reader", "_redeliveries", "_session", "_stream", "_stream_id", "_unlisten", "_waits", "_wanted_bytes",
        "delivered_bytes", "delivered_records", "number", "stalled",
    )  # fmt: skip

    def __init__(
        self,
        broker: Broker,
        session: DeliverySink,
        number: int,
        stream_id: int,
        stream: HostedStream,
        starts: dict[int, int],
        credit_bytes: int,
        reader: SealedReader | None,
        meter: Meter,
        delivery_filter: DeliveryFilter | None = None,
    ) -> None:
        """`meter` holds one subscription for this one, which gives it back when it closes."""
        self.number = number
        self.stalled = False
        self.delivered_bytes = 0
        self.delivered_records = 0
        self._meter = meter
        self._awaits_turn = False
        self._waits = ""
        self._paced: asyncio.Handle | None = None
        # Kept beside the handle: uvloop's says nothing of a time that is less than half a millisecond away.
        self._paced_at = 0.0
        self._broker = broker
        self._session = session
        self._stream_id = stream_id
        self._stream = stream
        self._cursors = dict(starts)
        # The order of service: a shard that was served goes to the end, so that none starves.
        self._order = deque(starts)
        # The frame that credit did not reach for: nothing is looked at, or read, before more credit has come.
        self._wanted_bytes = 0
        self._credit = CreditLine(credit_bytes)
        self._reader = reader
        self._filter = delivery_filter
        self._redeliveries: dict[int, RangeSet] = {}
        self._catching_up: asyncio.Task[None] | None = None
        self._ended = False
        self._unlisten = {number: stream.shard(number).subscribe_tail(self.pump) for number in starts}

    @property
    def meter(self) -> Meter:
        """What is delivered is charged to it."""
        return self._meter

    @property
    def stream(self) -> HostedStream:
        return self._stream

    def start(self) -> None:
        """The hello is on its way; send what is there."""
        self.pump()

    def credit(self, limit_bytes: int) -> None:
        """The subscriber takes more."""
        self._credit.extend(limit_bytes)
        if self._wanted_bytes <= self._credit.left_bytes:
            self._wanted_bytes = 0
        self.pump()

    # -- what is delivered, where a delivery filter changes it ---------------------------------------------------

    def take_up(self, number: int, offset: int) -> None:
        """Deliver this shard, too, from an offset on; `pump` follows."""
        assert number not in self._cursors
        self._cursors[number] = offset
        self._order.append(number)
        self._unlisten[number] = self._stream.shard(number).subscribe_tail(self.pump)

    def delivers(self, number: int) -> bool:
        """True between `take_up` and `let_go`."""
        return number in self._cursors

    def let_go(self, number: int) -> None:
        """Deliver nothing more of this shard, and nothing again."""
        del self._cursors[number]
        self._order.remove(number)
        self._unlisten.pop(number)()
        self._redeliveries.pop(number, None)

    def redelivery(self, number: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Send the batches that hold these records once more, before the shard goes on; `pump` follows."""
        redelivery = self._redeliveries.setdefault(number, RangeSet())
        for first, following in ranges:
            redelivery.add(first, following)

    # -- sending ---------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what can be sent now, from memory; fetch the rest in a task."""
        if self._ended or self._catching_up is not None or self._awaits_turn:
            return
        before = self.delivered_bytes
        try:
            while self._round():
                if self.delivered_bytes - before >= TURN_BYTES:
                    self._awaits_turn = True
                    self._broker.turns.ask(self._stream.name.tenant, self._take_turn)
                    break
        except FelixError as error:
            self._drop(error)
            return
        self._session.settle_delivery()

    def _take_turn(self) -> None:
        self._awaits_turn = False
        self.pump()

    def _round(self) -> bool:
        """One round over all shards; True if something was sent and more may follow."""
        sent = False
        for _ in range(len(self._order)):
            number = self._order[0]
            shard = self._stream.shard(number)
            cursor = self._next_of(number)
            redelivery = self._redeliveries.get(number)
            if not redelivery and (
                cursor >= self._readable_to(shard)
                or (self._filter is not None and not self._filter.may_deliver(number))
            ):
                self._order.rotate(-1)
                continue
            room = self._room()
            if room == 0:
                return False
            if cursor < shard.log_start_offset:
                self._gap(number, shard.log_start_offset)
                sent = True
                continue
            self._order.rotate(-1)
            if redelivery:
                cursor, room = (
                    self._redelivery_start(number, shard.log_start_offset),
                    min(room, REDELIVERY_BYTES_MAX),
                )
            entries = None if self._reader is not None else shard.read_hot(cursor, min(room, TURN_BYTES))
            if entries is None:
                self._catching_up = asyncio.ensure_future(self._catch_up(number))
                return False
            if not self._send(number, entries):
                self._order.rotate(1)
                return False
            sent = True
        return sent

    def _next_of(self, number: int) -> int:
        """Where the shard goes on: batches of which nothing is wanted are not read."""
        cursor = self._cursors[number]
        return cursor if self._filter is None else self._filter.wanted_from(number, cursor)

    def _readable_to(self, shard: ShardLog) -> int:
        """A bridge reads what is synced; everybody else what is durable by the stream's own terms."""
        return shard.high_watermark if self._reader is None else shard.synced_offset

    def _room(self) -> int:
        """Bytes that may be sent now; 0 where credit or the connection is at its end."""
        left = min(self._credit.left_bytes, READ_BYTES_MAX)
        self.stalled = left <= FRAME_HEADER_BYTES or self._wanted_bytes > 0
        if self.stalled or not self._session.may_send():
            self._waits = "credit" if self.stalled else "connection"
            return 0
        throttle = self._meter.delivery_throttle()
        if throttle is not None:
            self._wait(throttle)
            return 0
        self._waits = ""
        return left

    def _wait(self, throttle: Throttle) -> None:
        """A rate is used up: go on once time has paid for what was sent."""
        self._waits = "quota"
        self._session.throttled(throttle)
        loop = asyncio.get_running_loop()
        due = loop.time() + throttle.wait_s
        if self._paced is not None:
            if self._paced_at <= due:
                return
            # The rate is higher than it was.
            self._paced.cancel()
        self._paced, self._paced_at = loop.call_at(due, self._go_on), due

    def _go_on(self) -> None:
        self._paced = None
        self.pump()

    def _redelivery_start(self, number: int, log_start: int) -> int:
        """Where the next redelivery of the shard begins, or the shard goes on. What retention has taken is left out."""
        redelivery = self._redeliveries[number]
        if redelivery.first < log_start:
            redelivery.remove(0, log_start)
            if self._filter is not None:
                self._filter.gone(number, log_start)
        if not redelivery:
            del self._redeliveries[number]
            return self._next_of(number)
        return redelivery.first

    def _passed(self, number: int, entry: Entry) -> bool:
        """Take a batch off the shard's redeliveries, which are sent in the order of the log; True where it is part of one."""
        redelivery = self._redeliveries[number]
        meant = bool(redelivery.within(entry.base_offset, entry.next_offset))
        # Records before it that are not in the log were removed by compaction.
        redelivery.remove(0, entry.next_offset)
        if not redelivery:
            del self._redeliveries[number]
        if self._filter is not None:
            self._filter.redelivered_batch(number, entry.base_offset, entry.next_offset)
        return meant

    def _send(self, number: int, entries: list[Entry]) -> bool:
        """False where the credit did not reach for all of them."""
        session = self._session
        redelivering = number in self._redeliveries
        for entry in entries:
            if redelivering and (
                number not in self._redeliveries or entry.next_offset <= self._redeliveries[number].first
            ):
                continue
            if not redelivering and self._filter is not None:
                if not self._filter.may_deliver(number):
                    return True
                if entry.next_offset <= self._next_of(number):
                    continue  # nothing of it is wanted
            size = len(entry.data)
            if size > self._credit.left_bytes:
                self.stalled = True
                self._waits = "credit"
                self._wanted_bytes = size
                return False
            if redelivering and not self._passed(number, entry):
                continue  # compaction took what was meant
            self._credit.use(size)
            data = entry.data
            if not redelivering and entry.base_offset > self._next_of(number):
                # Only compaction leaves offsets out of a log; the frame tells the subscriber that nothing is missing.
                hole = GapBody(number, GapReason.COMPACTED, self._cursors[number], entry.base_offset)
                session.send(self._stream_id, hole.encode())
            session.send(self._stream_id, data if isinstance(data, bytes) else bytes(data))
            if not redelivering:
                self._cursors[number] = entry.next_offset
                if self._filter is not None:
                    self._filter.delivered(number, entry.base_offset, entry.next_offset)
            self.delivered_bytes += size
            records = entry.next_offset - entry.base_offset
            self.delivered_records += records
            self._stream.delivered_bytes += size
            self._stream.delivered_records += records
            self._meter.delivered(size, records)
            self._broker.metrics.delivered(records, size)
        return True

    def _gap(self, number: int, next_offset: int) -> None:
        reason = GapReason.RING if self._stream.ephemeral else GapReason.RETENTION
        gap = GapBody(number, reason, self._cursors[number], next_offset)
        self._session.send(self._stream_id, gap.encode())
        self._cursors[number] = next_offset
        self._broker.metrics.gap(reason)
        if self._filter is not None:
            self._filter.gone(number, next_offset)

    async def _catch_up(self, number: int) -> None:
        """Fetch what is not in memory for one shard, send it, and pump again."""
        broker = self._broker
        shard = self._stream.shard(number)
        self._waits = "memory"
        try:
            async with broker.reads.place(self._stream.name.tenant):
                room = self._room()
                if not room:
                    return  # whatever it waits for pumps
                cursor = self._next_of(number) if number in self._cursors else shard.high_watermark
                if number in self._redeliveries:
                    cursor = self._redelivery_start(number, shard.log_start_offset)
                    room = min(room, REDELIVERY_BYTES_MAX)
                if self._reader is not None:
                    entries = await self._reader.read(shard, cursor, room)
                else:
                    entries = await shard.read(cursor, room)
                if self._ended:
                    return
                if entries and self._stands_at(number, cursor):
                    self._send(number, entries)
        except RequestError as error:
            if error.code is not Code.OFFSET_OUT_OF_RANGE or self._ended:
                self._drop(error)
                return
            # Retention passed the cursor during the read: the next round reports a gap.
        except FelixError as error:
            self._drop(error)
            return
        except Exception:
            log.exception("catching up on %s shard %d failed", self._stream.name, number)
            self._drop(FelixError("The broker could not read its log.", code=Code.INTERNAL))
            return
        finally:
            self._catching_up = None
        asyncio.get_running_loop().call_soon(self.pump)

    @property
    def lag_records(self) -> int:
        """Records that can be read and have not been sent."""
        return sum(
            max(0, shard.high_watermark - cursor)
            for number, cursor in self._cursors.items()
            if isinstance(shard := self._stream.replicas.get(number), ShardLog)
        )

    def traffic(self, name: str, identity: str) -> ReaderTraffic:
        """The delivered counts, and what the delivery waits for; empty if it has caught up or continues by itself."""
        lag = self.lag_records
        return ReaderTraffic(
            "bridge" if self._reader is not None else "subscription",
            name,
            str(self._stream.name),
            identity,
            self.delivered_records,
            self.delivered_bytes,
            lag,
            self._waits if lag else "",
        )

    def _stands_at(self, number: int, offset: int) -> bool:
        """False where the filter has changed what is to be read of the shard meanwhile."""
        redelivery = self._redeliveries.get(number)
        if redelivery:
            return offset == redelivery.first
        return number in self._cursors and offset == self._next_of(number)

    # -- endings ---------------------------------------------------------------------------------------

    def refusal(self) -> FelixError | None:
        """Why this subscription may not go on, if it may not."""
        assert self._session.identity is not None
        return subscription_refusal(self._broker, self._session.identity, self._stream, self._reader)

    def fail(self, error: FelixError) -> None:
        """End with an error frame on the event stream."""
        if not self._ended:
            self._session.send(self._stream_id, encode_error(error), end=True)
        self.close()

    def _drop(self, error: FelixError) -> None:
        self._session.drop_subscription(self.number)
        self.fail(error)

    def finish(self) -> None:
        """The subscriber left: end the event stream in order."""
        if not self._ended:
            self._session.send(self._stream_id, b"", end=True)
        self.close()

    def close(self) -> None:
        """Release everything; idempotent."""
        if not self._ended:
            self._meter.release("subscriptions")
        self._ended = True
        if self._paced is not None:
            self._paced.cancel()
        for unlisten in self._unlisten.values():
            unlisten()
        self._unlisten.clear()
        if self._catching_up is not None:
            self._catching_up.cancel()
            self._catching_up = None
