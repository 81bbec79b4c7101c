"""One shard of a queue at work: its state, its journal, its log, its clock, its dead letters. On the event loop.

The state machine (region.queue.state) decides; this module reads the log for it, writes its entries, and answers once they are
durable. A lease is durable before its jobs are handed out, an acknowledgement before it is confirmed. Where the journal refuses
an entry, nothing is served until it has been replayed.

Invariants:
- what is answered has been written: after a restart the same answers hold;
- records are read ahead up to READY_MAX and what the broker's queue budget gives; their payloads are not kept for that;
- the log is trimmed only below what is done and below what is still on its way to the dead letters.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Final, NamedTuple

from felix.batch import (
    FLAG_HEADERS,
    FLAG_KEYED,
    FLAG_ZSTD,
    Record,
    decode_batch,
    decode_header,
    decode_records,
)
from felix.errors import Code, CorruptionError, FelixError, RequestError, UnavailableError
from felix.names import StreamName
from felix.queue_messages import LEASE_BYTES_MAX, Job
from felix.settings import DURATION_MS_MAX, QueueSettings
from region.broker import Broker
from region.gather import Done, ignore
from region.log.companions import JournalKind
from region.log.epochs import EVERYTHING
from region.log.errors import OffsetOutOfRangeError
from region.log.ring import Entry
from region.log.shard import ShardLog
from region.metadata.records import SHARDS_MAX
from region.queue.state import (
    NO_DELAY,
    NOTHING,
    PRIORITIES,
    PRIORITY_DEFAULT,
    READY_MAX,
    RECORD_BYTES,
    Delay,
    Phase,
    QueueState,
    Run,
    Spent,
    Tracked,
    clipped,
    preface,
)
from region.streams.hosted import HostedStream
from region.views.actor import ViewActor
from region.views.dead_letter import (
    DEAD_SHARD,
    DEAD_STREAM,
    DELAY,
    DELIVER_AT,
    MOVE_RECORDS_MAX,
    DeadLetters,
    Move,
    each_record,
    entry_body,
)
from region.views.due import DueTimer
from region.views.history import shared_end, told
from region.views.wall_clock import WallClock

log = logging.getLogger("felix.region.queue")

PRIORITY: Final = "felix.priority"
"""0 to 9 as decimal text; of records that are ready together the highest goes first."""
READ_BYTES: Final = 512 << 10
"""Read ahead at a time."""
DECODED_BYTES_MAX: Final = 4 << 20
"""Of batches taken apart that a shard keeps for the next leases, as far as the queue budget gives it."""
TRACKED_FREE: Final = 1_000
"""Records that a shard may know one by one without asking the budget: every queue goes on, however full it is."""
RELOAD_S: Final = 5.0
"""How long after a replay that failed it is tried again."""
TOLD_MAX: Final = 512
"""Of so many jobs the journal is told in one iteration of the event loop that the clock was set: some ms. A shard may know 200,000 of them."""
TELL_AGAIN_S: Final = 0.1
"""How long after a journal that took nothing it is tried again."""
SETTLE_LOOK_S: Final = 0.005
TRIM_BYTES: Final = 8 << 20
"""The log is not trimmed for less."""
JOB_ROOM_BYTES: Final = 64
"""Overhead of a job in a frame, in addition to payload, key and headers."""
JOB_BYTES_MAX: Final = LEASE_BYTES_MAX + (8 << 10)
"""Payload, key and headers of a job: more (a batch may be 4 MiB before it is compressed) does not fit a frame."""
RATE_MS: Final = 10_000
"""Rates are over so long."""
_STATE: Final = b"\0"
_DEAD: Final = b"\1"


class Leased(NamedTuple):
    """A lease of a worker: the jobs, and its end."""

    jobs: list[Job]
    until_ms: int


class Rate:
    """How many in the last ten seconds."""

    __slots__ = ("_counted", "total")

    def __init__(self) -> None:
        self.total = 0
        self._counted: deque[tuple[int, int]] = deque()

    def add(self, number: int, now_ms: int) -> None:
        second = now_ms // 1000
        self.total += number
        if self._counted and self._counted[-1][0] == second:
            number += self._counted.pop()[1]
        self._counted.append((second, number))
        self._drop(second)

    def _drop(self, second: int) -> None:
        while self._counted and self._counted[0][0] <= second - RATE_MS // 1000:
            self._counted.popleft()

    def per_second(self, now_ms: int) -> float:
        self._drop(now_ms // 1000)
        return sum(number for _, number in self._counted) * 1000 / RATE_MS


class _Decoded(NamedTuple):
    """A batch taken apart."""

    base_offset: int
    records: list[Record]
    size: int


class QueueShard:
    """See the module. `open`, then `start`; `close` at the end."""

    def __init__(
        self,
        broker: Broker,
        stream: HostedStream,
        shard: ShardLog,
        companion: ShardLog | None,
        changed: Callable[[], None],
        reserved: dict[int, int],
    ) -> None:
        """`changed`: there may be something to lease that there was not. `reserved`: what transactions that are not decided yet acknowledge, offsets
        with the tokens of their leases; it outlives this object."""
        self._broker = broker
        self._stream = stream
        self.log = shard
        self.number = shard.identity.shard
        self._changed = changed
        self._reserved = reserved
        self.state = QueueState(self.settings)
        self.actor = ViewActor(f"Shard {self.number} of the queue {stream.name}", self, companion, RELOAD_S)
        self.dead = DeadLetters(
            broker, stream, shard, JournalKind.QUEUE, self._append_dead, self._landed, self._given_up
        )
        self._decoded: OrderedDict[int, _Decoded] = OrderedDict()
        self._decoded_bytes = 0
        self._charged = 0
        self._started = False
        self._closed = False
        self._wanted = False
        self._reading: asyncio.Task[None] | None = None
        self._moved: list[int] = []
        """what the journal is told of since the clock was set"""
        self._clock = WallClock(broker.streams_ms, broker.boot_ms, self._clock_set)
        self._timer = DueTimer(self._tick, broker.streams_ms)
        self._end_seen = shard.high_watermark
        self._coming_back: dict[int, asyncio.Future[bool]] = {}
        self._unfollow: Callable[[], None] | None = None
        self.put = Rate()
        self.acked = Rate()
        self.redelivered = 0

    @property
    def settings(self) -> QueueSettings:
        settings = self._stream.record.config.views.queue
        assert settings is not None
        return settings

    @property
    def now_ms(self) -> int:
        """The time by which all here goes. Where the clock was set since the last look, what lasts has the time that is left of it."""
        return self._clock.now_ms()

    def _clock_set(self, by_ms: int) -> None:
        # Of the newest records nobody knows by which clock they have their times: of either, none of them comes too early.
        end = self.log.log_end_offset if by_ms > 0 else self._end_seen
        self._moved = self.state.clock_set(by_ms, self._broker.streams_ms(), end)
        self._tell_times(self._moved)
        if self._serving:
            self._arm()

    def _tell_times(self, moved: list[int], begin: int = 0) -> None:
        """Whoever leads next goes by what the journal says: so many in one iteration of the event loop, each by what it is then."""
        if moved is not self._moved or begin >= len(moved) or self._closed:
            return
        loop, end = asyncio.get_running_loop(), begin
        if self.serves:
            end += TOLD_MAX
            for entry in self.state.times(moved[begin:end]):
                self._append(entry, ignore)
        if end >= len(moved):
            self._moved = []
        elif end > begin:
            loop.call_soon(self._tell_times, moved, end)
        else:
            loop.call_later(TELL_AGAIN_S, self._tell_times, moved, end)

    # -- life ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Replay the journal. Raises what reading it raises, CorruptionError."""
        await self.actor.open()

    # What its actor asks (region.views.actor.View).

    def begin(self) -> None:
        self._stop_reading()
        self._drop_decoded()
        self._moved = []
        self.state = QueueState(self.settings)
        self.dead.reset()
        for waiting in self._coming_back.values():
            if not waiting.done():
                waiting.set_exception(
                    UnavailableError("The queue read its journal again; what was on its way still arrives.")
                )
        self._coming_back.clear()
        self._opened_ms = self.now_ms

    def replay(self, entry: bytes) -> None:
        if entry[:1] == _STATE:
            self.state.apply(entry[1:], self._opened_ms, self._shared_end)
        elif entry[:1] == _DEAD:
            move, landed = self.dead.apply(entry[1:], self.state.known_end)
            if move is not None and landed:
                self.state.landed(move.held, self._opened_ms)
        else:
            raise CorruptionError(f"A queue's journal entry of {self._stream.name} is of no known kind.")

    def replayed(self) -> None:
        for move in self.dead.pending:
            self.state.bury(move.held, self._opened_ms)
        self.state.head = self.state.floor
        self._end_seen = self.state.own_from = self.log.high_watermark
        for offset, token in self._reserved.items():
            self.state.reserve([(offset, 1, token)])

    def _shared_end(self, epochs: list[int]) -> int:
        return shared_end(self.log, epochs)

    def preface(self) -> bytes:
        return _STATE + preface(told(self.log))

    def entries(self) -> Iterable[bytes]:
        yield from (_STATE + entry for entry in self.state.entries())
        yield from (_DEAD + entry for entry in self.dead.entries())

    def lost(self, error: FelixError) -> None:
        """Nothing is leased meanwhile; what workers hold stays theirs for its time."""

    def resumed(self) -> None:
        self.start()
        self._changed()

    # For users of the queue.

    def start(self) -> None:
        """Carry what is on its way, watch the clock, follow the log."""
        if not self._started:
            self._started = True
            self._unfollow = self.log.subscribe_tail(self._grown)
        self.dead.start()
        self._fill()
        self._arm()

    async def close(self) -> None:
        """Everything that was answered is durable. Repeating it does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._unfollow is not None:
            self._unfollow()
        self._timer.cancel()
        self._stop_reading()
        self.dead.stop()
        for waiting in self._coming_back.values():
            if not waiting.done():
                waiting.set_exception(
                    UnavailableError(
                        f"The queue {self._stream.name} is closing; what was on its way still arrives.",
                        code=Code.SHUTTING_DOWN,
                    )
                )
        self._drop_decoded()
        self._broker.budgets.queue.give(self._charged)
        self._charged = 0
        await self.actor.close()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    def check(self) -> None:
        """Raises UnavailableError where nothing can be decided now."""
        refusal = self.actor.refusal()
        if refusal is not None:
            raise refusal.with_traceback(None)

    @property
    def serves(self) -> bool:
        return self.actor.refusal() is None

    @property
    def is_held_back(self) -> bool:
        """Whether nothing can be decided only because the journal takes nothing for a while, such as on a full disk: nobody says when it does again."""
        return self.actor.is_serving and not self.serves

    @property
    def _serving(self) -> bool:
        return self.actor.is_serving

    def _append_dead(self, entry: bytes, done: Done) -> None:
        self.actor.append(_DEAD + entry, done)

    def _append(self, entry: bytes, done: Done) -> None:
        self.actor.append(_STATE + entry, done)

    # -- the log ---------------------------------------------------------------------------------------

    def _grown(self) -> None:
        # Where the clock was set, what had its time before is known from what has it since.
        self._clock.now_ms()
        end = self.log.high_watermark
        if end > self._end_seen:
            self.put.add(end - self._end_seen, self._broker.boot_ms())
            self._end_seen = end
        self._fill()
        self._changed()

    @property
    def is_reading(self) -> bool:
        """True while records are read from disk that may then be ready."""
        return self._reading is not None or self.actor.is_reloading

    def want(self, wanted: bool) -> None:
        """Whether anybody waits for jobs: without workers no batch is kept taken apart."""
        self._wanted = wanted
        if not wanted:
            self._drop_decoded()

    def take_up(self) -> None:
        """Take up what may be leased next, as far as it is in memory; what is not is read, and `changed` comes."""
        self._fill()

    def _fill(self) -> None:
        """Take up what may be leased next, from memory at once, from disk in a task."""
        if self._reading is not None or not self._serving or self._closed:
            return
        state = self.state
        while state.wants_more and state.head < self.log.high_watermark and self._charge():
            try:
                entries = self.log.read_hot(state.head, READ_BYTES)
            except OffsetOutOfRangeError:
                self._skip(self.log.log_start_offset)
                continue
            except FelixError as error:
                log.error("queue %s cannot read its log: %s", self._stream.name, error)
                return
            if entries is None:
                self._reading = asyncio.ensure_future(self._read_ahead(state.head))
                return
            self._take_up(entries)
        self._arm()

    async def _read_ahead(self, offset: int) -> None:
        try:
            entries = await self.log.read(offset, READ_BYTES)
        except OffsetOutOfRangeError:
            entries = []
        except FelixError as error:
            log.error("queue %s cannot read its log: %s", self._stream.name, error)
            await asyncio.sleep(RELOAD_S)
            entries = []
        finally:
            self._reading = None
        if self._serving and not self._closed:
            self._take_up(entries)
            self._fill()
            self._changed()

    def _skip(self, offset: int) -> None:
        """Retention was faster than the workers."""
        gone = offset - self.state.head
        self.state.skip(offset)
        log.warning(
            "queue %s, shard %d: %d records went by retention, unread",
            self._stream.name,
            self.number,
            gone,
        )

    def _take_up(self, entries: Iterable[Entry]) -> None:
        state, now_ms = self.state, self.now_ms
        ordered = self.settings.ordered_by_key
        for entry in entries:
            if entry.next_offset <= state.head:
                continue
            if not state.wants_more:
                return  # the next ones are read again when they are due
            body = entry_body(entry)
            header = decode_header(body)
            if entry.base_offset > state.head:
                state.skip(entry.base_offset)
            if not header.flags & FLAG_HEADERS and not (ordered and header.flags & FLAG_KEYED):
                # A batch may hold many thousands: not all of them in one iteration of the event loop.
                end = min(entry.next_offset, state.head + READY_MAX - state.ready)
                state.take_up_run(end, header.append_time_ms, now_ms)
                if end < entry.next_offset:
                    return
                continue
            decoded = self._take_apart(body, entry.base_offset, entry.next_offset)
            for record in decoded.records if decoded is not None else ():
                if record.offset < state.head:
                    continue
                priority, wanted = _asked(record)
                key = bytes(record.key) if ordered and record.key else None
                state.take_up(record.offset, record.timestamp_ms, priority, wanted, key, now_ms)
            state.head = max(state.head, entry.next_offset)

    def _take_apart(self, body: memoryview, base_offset: int, next_offset: int) -> _Decoded | None:
        """The records of a batch, kept for the next leases. One that its producer made wrong is skipped as a whole."""
        try:
            batch = decode_batch(body)
            records = list(decode_records(batch))
        except RequestError as error:
            log.warning(
                "queue %s, shard %d: records %d to %d are skipped: %s",
                self._stream.name,
                self.number,
                base_offset,
                next_offset - 1,
                error,
            )
            self._skip_malformed(base_offset, next_offset)
            return None
        size = batch.header.plain_length if batch.header.flags & FLAG_ZSTD else len(body)
        decoded = _Decoded(base_offset, records, size)
        budget = self._broker.budgets.queue
        while self._decoded and self._decoded_bytes + size > DECODED_BYTES_MAX:
            self._forget_oldest()
        if self._wanted and size <= DECODED_BYTES_MAX and budget.take(size):
            self._decoded[base_offset] = decoded
            self._decoded_bytes += size
        return decoded

    def _skip_malformed(self, base_offset: int, next_offset: int) -> None:
        state = self.state
        if state.head < next_offset:
            state.skip(next_offset)
        for offset in range(base_offset, next_offset):
            if offset in state.tracked:
                self._append(state.lose(offset, self.now_ms), ignore)

    def _forget_oldest(self) -> None:
        _, decoded = self._decoded.popitem(last=False)
        self._decoded_bytes -= decoded.size
        self._broker.budgets.queue.give(decoded.size)

    def _drop_decoded(self) -> None:
        while self._decoded:
            self._forget_oldest()

    def _charge(self) -> bool:
        """Settle what the budget is charged for tracked records; False where it gives no more."""
        budget = self._broker.budgets.queue
        owed = RECORD_BYTES * max(0, len(self.state.tracked) - TRACKED_FREE)
        if owed <= self._charged:
            budget.give(self._charged - owed)
            self._charged = owed
            return True
        if budget.take(owed - self._charged):
            self._charged = owed
            return True
        return False

    # -- leasing ---------------------------------------------------------------------------------------

    def take(
        self,
        worker: int,
        records_max: int,
        bytes_max: int,
        visibility_ms: int,
        deliver: Callable[[Leased | FelixError, int, int], None],
        *,
        at_least_one: bool,
        taking: Callable[[int, int], None],
    ) -> int:
        """Lease up to so many jobs: `taking` gets the numbers of records and bytes at once; `deliver` gets the jobs once the
        lease is durable (or the error), and the same numbers. Returns how many; 0 if none is ready, or if the next one is still
        being read (then `changed` is called).
        """
        state = self.state
        if not state.ready:
            self._fill()
        now_ms = self.now_ms
        until_ms = now_ms + visibility_ms
        taken: list[Tracked] = []
        jobs: list[Job] = []
        size = 0
        decoded: _Decoded | None = None
        number = self.number
        while len(jobs) < records_max:
            tracked = state.next_ready()
            if tracked is None:
                break
            offset = tracked.offset
            if decoded is None or not 0 <= offset - decoded.base_offset < len(decoded.records):
                decoded = self._find(offset)
                if decoded is None:
                    if state.tracked.get(offset) is tracked:
                        break  # it is being read
                    continue  # it could not be, and is gone
            record = decoded.records[offset - decoded.base_offset]
            payload, key, headers = record.payload, record.key, record.headers
            length = len(payload) + JOB_ROOM_BYTES
            if key:
                length += len(key)
            if headers:
                length += sum(len(name) + len(value) + 8 for name, value in headers.items())
            if length > JOB_BYTES_MAX:
                self._too_large(tracked)
                continue
            if size + length > bytes_max and (jobs or not at_least_one):
                break
            size += length
            state.lease(tracked, until_ms, worker, now_ms)
            attempts = tracked.token - tracked.refunds
            if attempts > 1:
                self.redelivered += 1
            taken.append(tracked)
            jobs.append(
                Job(
                    number,
                    offset,
                    tracked.token,
                    attempts,
                    record.timestamp_ms,
                    bytes(payload),
                    bytes(key) if key else None,
                    headers,  # type: ignore[arg-type]
                )
            )
        if jobs:
            taking(len(jobs), size)
            self._append(
                state.leased(taken, until_ms, worker),
                lambda error: deliver(
                    error if error is not None else Leased(jobs, until_ms), len(jobs), size
                ),
            )
            self._arm()
            if state.wants_more:
                self._fill()
        return len(jobs)

    def _find(self, offset: int) -> _Decoded | None:
        """The batch of a record, taken apart. None where it has to be read from disk, or is gone."""
        for decoded in reversed(self._decoded.values()):
            if 0 <= offset - decoded.base_offset < len(decoded.records):
                return decoded
        try:
            entries = self.log.read_hot(offset, 1)
        except OffsetOutOfRangeError:
            self._append(self.state.lose(offset, self.now_ms), ignore)
            return None
        except FelixError:
            return None
        if entries is None:
            if self._reading is None:
                self._reading = asyncio.ensure_future(self._read_again(offset))
            return None
        return self._found(entries[0], offset)

    def _found(self, entry: Entry, offset: int) -> _Decoded | None:
        if not entry.base_offset <= offset < entry.next_offset:
            self._append(self.state.lose(offset, self.now_ms), ignore)
            return None
        return self._take_apart(entry_body(entry), entry.base_offset, entry.next_offset)

    async def _read_again(self, offset: int) -> None:
        """Read a record's batch from disk, so that it is there when it is asked for next."""
        try:
            (entry, *_) = await self.log.read(offset, 1)
        except OffsetOutOfRangeError:
            if offset in self.state.tracked:
                self._append(self.state.lose(offset, self.now_ms), ignore)
            return
        except FelixError as error:
            log.error("queue %s cannot read its log: %s", self._stream.name, error)
            await asyncio.sleep(RELOAD_S)
            return
        finally:
            self._reading = None
            if not self._closed:
                asyncio.get_running_loop().call_soon(self._changed)
        if self._serving and offset in self.state.tracked:
            decoded = self._found(entry, offset)
            if decoded is not None and decoded.base_offset not in self._decoded:
                # The budget gave nothing for it: one batch at a time goes without.
                self._decoded[decoded.base_offset] = decoded._replace(size=0)

    def _too_large(self, tracked: Tracked) -> None:
        """Nobody can be given this record: it goes to the dead letters."""
        self.state.bury([tracked.offset], self.now_ms)
        self._send_dead([Spent(tracked.offset, tracked.attempts)], "too large to be handed out")

    # -- settling --------------------------------------------------------------------------------------

    def ack(self, runs: Sequence[Run], done: Done) -> list[int]:
        """Records are done; `done` comes once that is durable. Returns the offsets of which the lease is lost. Raises
        UnavailableError."""
        self.check()
        left = len(self.state.tracked)
        entry, lost = self.state.ack(runs, self.now_ms)
        self.acked.add(left - len(self.state.tracked), self._broker.boot_ms())
        self._write([entry] if entry is not None else [], done)
        return lost

    def settle(self, runs: Sequence[Run], done: Done, end: int = EVERYTHING) -> None:
        """As `ack`, regardless of who holds the records now. What is meant by offsets from `end` on is no more. Raises UnavailableError."""
        self.check()
        left = len(self.state.tracked)
        entry = self.state.settle(clipped(runs, end), self.now_ms)
        self.acked.add(left - len(self.state.tracked), self._broker.boot_ms())

        def settled(error: FelixError | None) -> None:
            # Where the journal refused it, it is asked again: nobody else gets the records meanwhile.
            if error is None:
                forget_reserved(self._reserved, runs)
            done(error)

        self._write([entry] if entry is not None else [], settled)

    def reserve(self, runs: Sequence[Run]) -> list[int]:
        """See QueueState.reserve; until `settle` or `unreserve`. Raises UnavailableError."""
        self.check()
        lost = self.state.reserve(runs)
        if not lost:
            for first, number, token in runs:
                self._reserved |= dict.fromkeys(range(first, first + number), token)
        return lost

    def unreserve(self, runs: Sequence[Run]) -> None:
        """See QueueState.unreserve."""
        forget_reserved(self._reserved, runs)
        self.state.unreserve(runs)
        self._arm()

    def nack(self, runs: Sequence[Run], delay_ms: int | None, reason: str, done: Done) -> list[int]:
        """Records are given back; see QueueState.nack. Raises UnavailableError."""
        self.check()
        entries, lost, spent = self.state.nack(runs, delay_ms, self.now_ms)
        if spent:
            self._send_dead(spent, reason or "given back")
        self._write(entries, done)
        self._arm()
        return lost

    def release(self, runs: Sequence[Run], done: Done) -> list[int]:
        """Records are given back unseen. Raises UnavailableError."""
        self.check()
        entry, lost = self.state.release(runs, self.now_ms)
        self._write([entry] if entry is not None else [], done)
        return lost

    def extend(self, runs: Sequence[Run], visibility_ms: int, done: Done) -> list[int]:
        """Leases go on. Raises UnavailableError."""
        self.check()
        entry, lost = self.state.extend(runs, self.now_ms + visibility_ms)
        self._write([entry] if entry is not None else [], done)
        self._arm()
        return lost

    def purge(self, done: Done) -> int:
        """Everything is done; how many records that are. Raises UnavailableError."""
        self.check()
        entry, count = self.state.purge(self.log.high_watermark, self.now_ms)
        self._write([entry], done)
        return count

    def _write(self, entries: Sequence[bytes], done: Done) -> None:
        """`done` once all are durable. Without entries it still comes after what was decided before."""
        # A repeated acknowledgement is confirmed only behind the first one's entry.
        self.actor.write([_STATE + entry for entry in entries or (NOTHING,)], done)
        self._changed()

    # -- time ------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        due_ms = self.state.next_due_ms
        if due_ms is not None and not self._closed:
            self._timer.arm_sooner(due_ms + 1)

    def _tick(self) -> None:
        if self._closed or not self._serving:
            return
        spent = self.state.tick(self.now_ms)
        if spent:
            self._send_dead(spent, "the lease ran out")
        self._arm()
        self._changed()

    def sweep(self) -> None:
        """Now and then: let go of what is no longer needed."""
        if self._serving and not self._closed:
            self._charge()
            self._fill()

    async def trim(self) -> None:
        """Let the log go below what is done, where that is worth it. Raises what trimming a log raises."""
        shard = self.log
        floor = min([self.state.floor, *(offset for move in self.dead.pending for offset in move.held)])
        span = shard.high_watermark - shard.log_start_offset
        if self.log.settings.retention.acked:
            return  # subscriptions decide what goes
        if self._serving and span and floor > shard.log_start_offset:
            share = (floor - shard.log_start_offset) / span
            if share * shard.disk_bytes >= TRIM_BYTES:
                await shard.trim(floor)

    # -- dead letters ----------------------------------------------------------------------------------

    def _send_dead(self, spent: Sequence[Spent], reason: str) -> None:
        self.dead.send([each.offset for each in spent], [each.attempts for each in spent], reason)

    def _landed(self, move: Move) -> None:
        # The move's own entry says that these are done, at replay.
        self.state.landed(move.held, self.now_ms)
        self._over(move, landed=True)
        self._changed()

    def _given_up(self, move: Move) -> None:
        self.state.unbury(move.held, self.now_ms)
        self._over(move, landed=False)
        self._changed()

    def _over(self, move: Move, *, landed: bool) -> None:
        waiting = self._coming_back.pop(move.offsets[0], None)
        if waiting is not None and not waiting.done():
            waiting.set_result(landed)

    async def settle_dead(self) -> None:
        """Return once what is on its way to the dead letters has landed."""
        while self.dead.pending and not self._closed:  # noqa: ASYNC110 - nobody else asks
            await asyncio.sleep(SETTLE_LOOK_S)

    async def give_back(self, origin: StreamName, limit: int) -> int:
        """Bring records that are dead letters of `origin` back, oldest first, up to `limit` of them (0: all there are now), but
        for those that somebody has leased. How many. Raises what reading a log raises, UnavailableError, RequestError(NOT_FOUND).
        """
        offset, end, moved = self.state.floor, self.log.high_watermark, 0
        while offset < end and (not limit or moved < limit):
            offset = max(offset, self.log.log_start_offset)
            entries = await self.log.read(offset, READ_BYTES)
            for entry in entries:
                records = list(decode_records(decode_batch(entry_body(entry))))
                moved += await self._give_back(origin, records, limit - moved if limit else len(records))
                offset = entry.next_offset
                if limit and moved >= limit:
                    break
        return moved

    async def _give_back(self, origin: StreamName, records: Sequence[Record], limit: int) -> int:
        moved = 0
        while records and moved < limit:
            self.check()
            chosen: list[int] = []
            number = -1
            for at, record in enumerate(records):
                shard = self._origin_shard(record, origin)
                if shard is None:
                    continue
                if len(chosen) == min(MOVE_RECORDS_MAX, limit - moved) or (chosen and shard != number):
                    records = records[at:]
                    break
                number = shard
                chosen.append(record.offset)
            else:
                records = ()
            if not chosen:
                break
            self.state.bury(chosen, self.now_ms)
            waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._coming_back[chosen[0]] = waiting
            self.dead.give_back(origin, number, chosen)
            if not await waiting:
                raise RequestError(
                    f"{origin}, where dead letters are to go back to, is gone.", code=Code.NOT_FOUND
                )
            moved += len(chosen)
        return moved

    def _origin_shard(self, record: Record, origin: StreamName) -> int | None:
        """The shard that a dead letter came from; None for one that stays here."""
        if record.offset in self.state.done or record.headers.get(DEAD_STREAM) != str(origin).encode():
            return None
        tracked = self.state.tracked.get(record.offset)
        if tracked is not None and tracked.phase in (Phase.LEASED, Phase.MOVING):
            return None
        return _number(record.headers.get(DEAD_SHARD), SHARDS_MAX) or 0

    # -- dead letters of a durable subscription, which are given back to it ---------------------------

    def is_done(self, offset: int) -> bool:
        return offset in self.state.done

    def is_free(self, offset: int) -> bool:
        """Whether nobody has this record: it is neither done, leased, nor on its way elsewhere."""
        tracked = self.state.tracked.get(offset)
        held = tracked is not None and tracked.phase in (Phase.LEASED, Phase.MOVING)
        return not held and offset not in self.state.done

    def keep(self, offsets: Iterable[int]) -> None:
        """Give these, which are free, to no worker before `leave` or `remove`, or the next replay."""
        self.state.bury(offsets, self.now_ms)

    def leave(self, offsets: Iterable[int]) -> None:
        """Workers may have them again."""
        self.state.unbury(offsets, self.now_ms)
        self._changed()

    def remove(self, offsets: Iterable[int], done: Done) -> None:
        """They are done, whoever has them; `done` once that is durable, also where they were before. Raises UnavailableError."""
        self.check()
        entry = self.state.remove(offsets, self.now_ms)
        self._write([entry] if entry is not None else [], done)

    # -- looking ---------------------------------------------------------------------------------------

    def records(self, offsets: Sequence[int]) -> AsyncIterator[tuple[int, Record | None]]:
        """Records by their offsets, which ascend; None for one that is gone. Raises what reading a log raises."""
        return each_record(self.log, offsets)


def forget_reserved(reserved: dict[int, int], runs: Iterable[Run]) -> None:
    """What was reserved by these tokens is not any more."""
    for first, number, token in runs:
        for offset in range(first, first + number):
            if reserved.get(offset) == token:
                del reserved[offset]


def _asked(record: Record) -> tuple[int, Delay]:
    """Priority, and not before when: what the record's headers ask. What cannot be read is not asked."""
    headers = record.headers
    if not headers:
        return PRIORITY_DEFAULT, NO_DELAY
    priority = _number(headers.get(PRIORITY), PRIORITIES - 1)
    at_ms = _number(headers.get(DELIVER_AT), record.timestamp_ms + DURATION_MS_MAX) or 0
    delay_ms = _number(headers.get(DELAY), DURATION_MS_MAX) or 0
    return PRIORITY_DEFAULT if priority is None else priority, Delay(at_ms, delay_ms)


def _number(text: bytes | None, most: int) -> int | None:
    if text is None or not text.isdigit() or len(text) > 18:
        return None
    return min(int(text), most)
