"""Readers of the data source `felix`: what the driver plans, and what a task reads.

The driver asks the broker how far a stream reaches and plans ranges; each task opens one connection, subscribes to its
shard from the range's first offset, and gives whole batches to Spark as Arrow until it has passed the range's end. Nothing
is shared between the two but names, paths and numbers.

Invariants:

- a task gives each record of its range once, in the order of the offsets, and none outside of it;
- what a task holds is bounded: the subscription's credit, one Arrow batch in the making and one in Spark's hands;
- records that are gone are an error that names their offsets, unless `failOnDataLoss` is false; a stream that was made
  anew is told from the one that a query began with by its incarnation;
- positions live in Spark's checkpoint alone: nothing is committed at the broker.

Compaction leaves holes, and always a record behind a hole: a task reads on until it has one at or behind its range's end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from audit.spark.stream_access import Access, RegionThread
from audit.spark.stream_columns import Cut, arrow_of
from audit.spark.stream_offsets import (
    Offset,
    Positions,
    Range,
    earliest,
    latest,
    limited,
    offsets_for_bytes,
    ranges_between,
    resolve,
    split,
)
from audit.spark.stream_options import COUNT_MAX, ReadOptions
from felix.errors import Code, RequestError, UnavailableError
from felix.frames import GapReason
from felix.messages import StreamState
from felix.subscription import CREDIT_BYTES_MIN, Gap, ReceivedBatch, Subscription

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

ARROW_ROWS_MAX: Final = 16_384
"""Rows of one Arrow batch, about: small Felix batches are put together up to here, since each Arrow batch costs the JVM
some hundred microseconds."""
ARROW_BYTES_MAX: Final = 2 << 20
"""Bytes of one Arrow batch, about: with one in the making and one in Spark's hands a task stays small."""
CREDIT_BYTES: Final = 4 * CREDIT_BYTES_MIN
"""What a task's subscription may hold unread: four of the largest batches, so that the broker is never waited for."""
LINGER_S: Final = 0.02
"""How long records at hand wait for more of them before they go to Spark."""
QUIET_S: Final = 5.0
"""After so long without a record, a task asks the broker how far the shard reaches."""
STALLED_S: Final = 120.0
"""After so long without a record that must be there, a task fails; Spark tries it again elsewhere."""
SERVED_S: Final = 30.0
"""How long a plan waits for shards that do not serve: longer than an election, and than a broker takes to open its logs."""
SERVED_AGAIN_S: Final = 0.5
"""How long until the broker is asked again."""

log = logging.getLogger("felix.spark")


class DataLossError(RequestError):
    """Records that were to be read are gone."""

    default_code = Code.OFFSET_OUT_OF_RANGE


class StreamRecreatedError(RequestError):
    """The stream of this name is not the one that the query began with."""

    default_code = Code.CONFLICT


_LOSS_HINT: Final = (
    "Raise the stream's retention, or set the option failOnDataLoss to false to go on with what is there."
)


def _lost(stream: str, shard: int, first: int, end: int, why: str) -> DataLossError:
    return DataLossError(f"Offsets {first} to {end - 1} of shard {shard} of {stream} {why}.", hint=_LOSS_HINT)


def _recreated(stream: str, began_with: str, now: str) -> StreamRecreatedError:
    return StreamRecreatedError(
        f"{stream} is not the stream that was planned: it was incarnation {began_with}, and now it is {now or 'another'}.",
        hint="It was deleted and created anew (an ephemeral stream is at each start of its broker), and its offsets count "
        "other records. Start the query with a new checkpoint, or set failOnDataLoss to false to go on with the new "
        "stream from its beginning.",
    )


class StreamRange(InputPartition):
    """Offsets [first, end) of a shard of one incarnation (hex)."""

    def __init__(self, incarnation: str, range_: Range) -> None:
        super().__init__(tuple(range_))
        self.incarnation = incarnation
        self.shard, self.first, self.end = range_


# -- tasks ---------------------------------------------------------------------------------------------


class RangeFeed:
    """One range as it comes: lives on the loop of a RegionThread."""

    def __init__(self, thread: RegionThread, access: Access, range_: StreamRange, fail_on_loss: bool) -> None:
        self._thread = thread
        self._stream = access.stream
        self._range = range_
        self._fail_on_loss = fail_on_loss
        self._subscription: Subscription | None = None
        self._position = range_.first
        self._replaced = False
        self._quiet_s = 0.0

    async def open(self) -> None:
        """Subscribe. Raises what the broker refuses it with: a missing right, a stream that does not exist."""
        wanted = self._range
        self._subscription = self._thread.client.stream(self._stream).subscribe(
            "earliest",
            offsets={wanted.shard: wanted.first},
            incarnation=bytes.fromhex(wanted.incarnation),
            shards=[wanted.shard],
            credit_bytes=CREDIT_BYTES,
            on_gap=self._gap,
        )
        try:
            await self._subscription.open()
        except RequestError as error:
            if error.code is not Code.OFFSET_OUT_OF_RANGE:
                raise
            # The log ends before the range begins: it lost its end in a crash.
            self._lose(wanted.first, wanted.end, "are gone: the log lost its end in a crash")
            self._position = wanted.end

    async def next_cuts(self) -> list[Cut]:
        """Some records of the range, in order; none at its end. Raises DataLossError, StreamRecreatedError, what ended
        the subscription, and UnavailableError(TIMEOUT) where records that must be there do not come."""
        assert self._subscription is not None
        cuts: list[Cut] = []
        rows = size = 0
        while not self._replaced and self._position < self._range.end:
            try:
                async with asyncio.timeout(LINGER_S if cuts else QUIET_S):
                    received = await self._subscription.next_batch()
            except TimeoutError:
                if cuts:
                    break
                await self._quiet()
                continue
            self._quiet_s = 0.0
            cut = self._cut(received)
            if cut is None:
                continue
            cuts.append(cut)
            rows += cut.end - cut.first
            size += received.header.plain_length
            if rows >= ARROW_ROWS_MAX or size >= ARROW_BYTES_MAX:
                break
        return cuts

    def _cut(self, received: ReceivedBatch) -> Cut | None:
        if self._replaced:
            return None
        base = received.header.base_offset
        first = max(received.first_offset, self._range.first)
        end = min(received.next_offset, self._range.end)
        self._position = max(self._position, received.next_offset)
        return Cut(received.batch, first - base, end - base) if first < end else None

    def _gap(self, gap: Gap) -> None:
        """Offsets that will not come. Raises where they are a loss."""
        wanted = self._range
        if gap.reason is GapReason.RECREATED:
            if self._fail_on_loss:
                now = self._subscription.incarnation.hex() if self._subscription is not None else ""
                raise _recreated(self._stream, wanted.incarnation, now)
            log.warning("%s was made anew; what is left of its old records is not read", self._stream)
            self._replaced = True
            return
        if gap.next_offset < gap.first_offset:
            # The log lost its end, and gives these offsets to other records.
            self._lose(gap.next_offset, wanted.end, "are gone: the log lost its end in a crash")
            self._position = wanted.end
            return
        first, end = max(gap.first_offset, wanted.first), min(gap.next_offset, wanted.end)
        if first < end and gap.reason is not GapReason.COMPACTED:
            self._lose(first, end, f"are gone ({gap.reason.name.lower()})")
        self._position = max(self._position, gap.next_offset)

    def _lose(self, first: int, end: int, why: str) -> None:
        error = _lost(self._stream, self._range.shard, first, end, why)
        if self._fail_on_loss:
            raise error
        log.warning("%s", error.sentence)

    async def _quiet(self) -> None:
        """Nothing came for QUIET_S: is there anything to wait for?"""
        self._quiet_s += QUIET_S
        wanted = self._range
        if self._position >= wanted.end:
            return
        state = await self._thread.client.describe_stream(self._stream)
        held = next((each for each in state.state if each.shard == wanted.shard and each.is_told), None)
        if (
            held is not None
            and state.incarnation.hex() == wanted.incarnation
            and held.high_watermark < wanted.end
        ):
            lost = max(held.high_watermark, self._position)
            self._lose(lost, wanted.end, "are gone: the log lost its end in a crash")
            self._position = wanted.end
        if self._position < wanted.end and self._quiet_s >= STALLED_S:
            raise UnavailableError(
                f"Shard {wanted.shard} of {self._stream} gave nothing for {self._quiet_s:g} s; offsets {self._position} "
                f"to {wanted.end - 1} are to come.",
                code=Code.TIMEOUT,
                hint="Look at the broker's state: felix stream describe.",
            )


def read_range(
    access: Access, range_: StreamRange, fail_on_loss: bool, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The records of a range as Arrow batches, one connection for all of it. The next is fetched while Spark has one."""
    if range_.first >= range_.end:
        return
    with RegionThread(access) as thread:
        feed = RangeFeed(thread, access, range_, fail_on_loss)
        thread.run(feed.open())
        following: Future[list[Cut]] = thread.start(feed.next_cuts())
        while True:
            cuts = thread.result(following)
            if not cuts:
                return
            following = thread.start(feed.next_cuts())
            yield arrow_of(cuts, schema, range_.incarnation)


def _arrow_schema(schema: StructType) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


# -- the driver ----------------------------------------------------------------------------------------


def _untold(state: StreamState) -> UnavailableError | None:
    """What keeps a plan from being made: a shard of which nobody said how far it reaches. Planning without it would leave records out."""
    for shard in state.state:
        if not shard.is_told:
            return UnavailableError(
                f"Shard {shard.shard} of {state.stream} does not serve: "
                + (
                    shard.stopped
                    or f"broker {shard.leader} leads it, and another one the stream's other shards."
                ),
                code=Code.SHARD_STOPPED,
                hint="Look at the stream's shards: felix stream describe.",
            )
    return None


def describe(thread: RegionThread, stream: str) -> StreamState:
    """The stream as it is now, once all of its shards serve: a restart or an election is waited for. Raises what the broker refuses,
    UnavailableError(SHARD_STOPPED)."""

    async def ask() -> StreamState:
        loop = asyncio.get_running_loop()
        limit = loop.time() + SERVED_S
        while True:
            state = await thread.client.describe_stream(stream)
            error = _untold(state)
            if error is None:
                return state
            if loop.time() >= limit:
                raise error
            await asyncio.sleep(SERVED_AGAIN_S)

    return thread.run(ask())


def positions_at(thread: RegionThread, stream: str, time_ms: int, state: StreamState) -> dict[int, int]:
    """The first offset appended at or after a time, by shard; where there is none, where the shard ends.

    The broker finds them when a subscription begins there; nothing of it is read.
    """

    async def ask() -> dict[int, int]:
        subscription = thread.client.stream(stream).subscribe(
            datetime.fromtimestamp(time_ms / 1000, UTC), credit_bytes=CREDIT_BYTES_MIN
        )
        async with subscription:
            if subscription.incarnation != state.incarnation:
                raise _recreated(stream, state.incarnation.hex(), subscription.incarnation.hex())
            return subscription.positions

    # A shard's end may have moved on since the state was asked for, and with it what a late time means.
    found, ends = thread.run(ask()), latest(state)
    return {shard: min(found.get(shard, end), end) for shard, end in ends.items()}


def _starting(thread: RegionThread, options: ReadOptions, state: StreamState) -> dict[int, int]:
    if options.starting_ms is not None:
        return positions_at(thread, options.access.stream, options.starting_ms, state)
    return resolve(options.starting, state, "startingOffsets")


def _check_retained(
    options: ReadOptions, start: Positions, end: Positions, state: StreamState
) -> dict[int, int]:
    """The start, moved to where each log begins. Raises DataLossError where that leaves records out."""
    first, found = earliest(state), dict(start)
    for shard, stands in start.items():
        begins = min(first.get(shard, stands), end.get(shard, stands))
        if stands < begins:
            error = _lost(options.access.stream, shard, stands, begins, "are gone (retention)")
            if options.fail_on_loss:
                raise error
            log.warning("%s", error.sentence)
            found[shard] = begins
    return found


class StreamBatchReader(DataSourceReader):
    """Plans what a batch reads when it is planned, and reads it."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._filters: list[Filter] = []

    def partitions(self) -> Sequence[StreamRange]:
        """Ranges of the stream as it is now; at least one, since Spark wants one. Raises what the broker refuses,
        DataLossError, and RequestError naming an option."""
        options = self._options
        with RegionThread(options.access) as thread:
            state = describe(thread, options.access.stream)
            start = _starting(thread, options, state)
        end = resolve(options.ending, state, "endingOffsets")
        start = _check_retained(options, start, end, state)
        ranges = narrowed(ranges_between(start, end), self._filters)
        return [
            StreamRange(state.incarnation.hex(), each)
            for each in split(ranges, options.partitions_min) or [Range(0, 0, 0)]
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one range."""
        assert isinstance(partition, StreamRange)
        return read_range(
            self._options.access, partition, self._options.fail_on_loss, _arrow_schema(self._schema)
        )


class FilteringBatchReader(StreamBatchReader):
    """Takes conditions on `shard` and `offset` off Spark's hands: what they exclude is not read.

    A class of its own, since Spark refuses readers that take filters unless spark.sql.python.filterPushdown.enabled is set.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Keeps those that a plan can honour exactly; gives back the others."""
        for each in filters:
            if _is_of_place(each):
                self._filters.append(each)
            else:
                yield each


_COMPARED: Final = (EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)


def _is_of_place(each: Filter) -> bool:
    if isinstance(each, In):
        return each.attribute == ("shard",) and all(type(value) is int for value in each.value)
    return (
        isinstance(each, _COMPARED)
        and each.attribute in (("shard",), ("offset",))
        and type(each.value) is int
    )


def narrowed(ranges: Iterable[Range], filters: Iterable[Filter]) -> list[Range]:
    """What is left of ranges under conditions on `shard` and `offset`."""
    found = list(ranges)
    for each in filters:
        found = [kept for range_ in found if (kept := _narrow(range_, each)) is not None]
    return found


def _narrow(range_: Range, each: Any) -> Range | None:
    if isinstance(each, In):
        return range_ if range_.shard in each.value else None
    low, high = _admitted(each)
    if each.attribute == ("shard",):
        return range_ if low <= range_.shard < high else None
    first, end = max(range_.first, low), min(range_.end, high)
    return Range(range_.shard, first, end) if first < end else None


def _admitted(each: Any) -> tuple[int, int]:
    """The numbers [low, high) that a comparison admits."""
    value = each.value
    match each:
        case EqualTo():
            return value, value + 1
        case GreaterThan():
            return value + 1, COUNT_MAX
        case GreaterThanOrEqual():
            return value, COUNT_MAX
        case LessThan():
            return 0, value
        case _:
            return 0, value + 1


class StreamingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the micro-batches of a streaming query and reads them.

    In the driver's Python process it keeps one connection for as long as the query runs; a copy of it that was sent to a
    task has none.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._thread: RegionThread | None = None
        self._target: Offset | None = None
        self._seen: Offset | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_thread": None}

    def _region(self) -> RegionThread:
        if self._thread is None:
            thread = RegionThread(self._options.access)
            thread.open()
            self._thread = thread
        return self._thread

    def _describe(self) -> StreamState:
        return describe(self._region(), self._options.access.stream)

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins."""
        state = self._describe()
        start = _starting(self._region(), self._options, state)
        return Offset(state.incarnation.hex(), start).json()

    def prepareForTriggerAvailableNow(self) -> None:
        """Whatever is published from now on is for the next run."""
        state = self._describe()
        self._target = Offset(state.incarnation.hex(), latest(state))

    def getDefaultReadLimit(self) -> ReadLimit:
        """What the options say; where both limits are given, `latestOffset` keeps the other one too."""
        if self._options.records_max:
            return ReadMaxRows(self._options.records_max)
        return ReadMaxBytes(self._options.bytes_max) if self._options.bytes_max else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next micro-batch ends. Raises StreamRecreatedError, DataLossError, what the broker refuses."""
        options = self._options
        state = self._describe()
        ends = latest(state)
        self._seen = Offset(state.incarnation.hex(), ends)
        stands = self._stands(Offset.of_json(start), state)
        target = self._target
        if target is not None and target.incarnation == stands.incarnation:
            ends = {shard: min(end, target.shards.get(shard, end)) for shard, end in ends.items()}
        begin = _check_retained(options, stands.shards, ends, state)
        if not isinstance(limit, ReadAllAvailable):
            ends = limited(begin, ends, self._offsets_max(limit, begin, ends, state))
        return Offset(stands.incarnation, ends).json()

    def _offsets_max(self, limit: ReadLimit, start: Positions, end: Positions, state: StreamState) -> int:
        most = sum(max(0, end[shard] - start.get(shard, 0)) for shard in end) or 1
        records_max = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.records_max
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.bytes_max
        if records_max:
            most = min(most, records_max)
        return min(most, offsets_for_bytes(state, start, end, bytes_max)) if bytes_max else most

    def _stands(self, start: Offset, state: StreamState) -> Offset:
        """Where the query stands in the stream as it is now."""
        options, now = self._options, state.incarnation.hex()
        if start.incarnation != now:
            if options.fail_on_loss:
                raise _recreated(options.access.stream, start.incarnation, now)
            log.warning(
                "%s was made anew; the query goes on from the new stream's beginning", options.access.stream
            )
            return Offset(now, earliest(state))
        ends = latest(state)
        for shard, stands in start.shards.items():
            if stands > ends.get(shard, stands):
                error = _lost(
                    options.access.stream,
                    shard,
                    ends[shard],
                    stands,
                    "are gone: the log lost its end in a crash",
                )
                if options.fail_on_loss:
                    raise error
                log.warning("%s", error.sentence)
        return start

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """How far the stream reached when that was last asked, for the query's progress."""
        return self._seen.json() if self._seen is not None else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[StreamRange]:
        """The ranges of a micro-batch: the same ones however often it is planned."""
        began, ends = Offset.of_json(start), Offset.of_json(end)
        # Only with failOnDataLoss=false: the stream was made anew, and the new one is read from its beginning.
        first: Positions = (
            began.shards if began.incarnation == ends.incarnation else dict.fromkeys(ends.shards, 0)
        )
        ranges = split(ranges_between(first, ends.shards), self._options.partitions_min)
        return [StreamRange(ends.incarnation, each) for each in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one range."""
        assert isinstance(partition, StreamRange)
        return read_range(
            self._options.access, partition, self._options.fail_on_loss, _arrow_schema(self._schema)
        )

    def commit(self, end: dict[str, Any]) -> None:
        """Spark's checkpoint holds it; the broker keeps nothing for a query."""

    def stop(self) -> None:
        """End the driver's connection."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
