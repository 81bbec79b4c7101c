"""The queues that this broker has open, and who gets which jobs: each queue shares what is ready out among those who ask.

A queue is opened when it is first asked for, and closed with its stream. Takers (a worker's grant, a lease that waits) queue up;
in each round the first takes a fair share of the ready records and goes to the end of the queue.

Also the port for transactions: `check_acks` before one commits, `abandon_acks` where it does not, `apply_acks` once it is committed, as often as it takes.
What is kept for one stays so whatever is opened, closed or replayed meanwhile, as long as the broker runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final, Protocol

from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.messages import ReaderTraffic
from felix.names import SpiffeId, StreamName
from felix.periodic import every
from felix.queue_messages import Held, QueueState, Worker
from felix.settings import Views
from policy.access import Verb
from region.broker import Broker
from region.gather import Done, Gather, awaited
from region.log.companions import JournalKind
from region.queue.shard import Leased, QueueShard, forget_reserved
from region.queue.state import Phase, Run
from region.streams.hosted import ELSEWHERE_RETRY_MS, HostedStream
from region.views.actor import JOURNAL_LOOK_MS
from region.views.dead_letter import dead_letter_name
from region.views.history import known_end, told

log = logging.getLogger("felix.region.queue")

SHARE_RECORDS_MAX: Final = 256
"""What one taker gets per round: a frame of small jobs, and not all ready records."""
TURN_RECORDS_MAX: Final = 1_024
"""Distributed before the broker's other work runs: a few ms."""
SWEEP_S: Final = 2.0
JOBS_MAX: Final = 65_536
"""Named in one call that settles them: some ten ms of work."""
WORKERS_SHOWN_MAX: Final = 200
REDRIVE_WAIT_S: Final = 5.0
"""How long a redrive waits for what is on its way to the dead letters: a full disk must not hold it up for ever."""


class Working(Protocol):
    """A client that has the queue open."""

    worker: int
    identity: SpiffeId
    name: str


class Taker(Protocol):
    """Somebody who wants jobs: `number` stands in line, for `worker`. `granted`: pushed to, so within bytes, too."""

    number: int
    worker: int
    granted: bool

    @property
    def visibility_ms(self) -> int:
        """How long it has what it takes."""

    def room(self) -> tuple[int, int]:
        """How many records and bytes it takes now; no records: it leaves the line."""

    def taken(self, records: int, size: int) -> None:
        """So many, of so many bytes, are being leased for it."""

    def deliver(self, shard: QueueShard, leased: Leased | FelixError, records: int, size: int) -> None:
        """They are leased, durably, or why they are not."""


class Queue:
    """One queue of this broker."""

    def __init__(self, broker: Broker, stream: HostedStream, reserved: dict[int, dict[int, int]]) -> None:
        """`reserved`: by shard, see QueueShard."""
        self._broker = broker
        self.stream = stream
        self._reserved = reserved
        self.shards: list[QueueShard] = []
        self._opening = asyncio.Lock()
        self._line: dict[int, Taker] = {}
        self._takers: dict[int, Taker] = {}
        self.workers: dict[int, Working] = {}
        self._due = False
        self._looks = False
        self._first_shard = 0
        self.is_closed = False

    # -- life ------------------------------------------------------------------------------------------

    async def open(self, *, start: bool = True) -> None:
        """Open every shard that is not open. Raises what opening a journal raises; asked again, it goes on where it was."""
        async with self._opening:
            if self.is_closed:
                raise UnavailableError(
                    f"The queue {self.stream.name} was closed while it was opened.",
                    retry_after_ms=ELSEWHERE_RETRY_MS,
                )
            for number in range(self.stream.shard_count):
                # A queue is one over all its shards: none is opened where one cannot be had.
                self.stream.shard(number)
            while len(self.shards) < self.stream.shard_count:
                number = len(self.shards)
                log_ = self.stream.shard(number)
                companion = await self._broker.streams.open_companion(
                    self.stream, JournalKind.QUEUE.number(number)
                )
                reserved = self._reserved.setdefault(number, {})
                shard = QueueShard(self._broker, self.stream, log_, companion, self.changed, reserved)
                self.shards.append(shard)
                try:
                    await shard.open()
                except FelixError as error:
                    # The next caller of this shard retries it (QueueShard.check).
                    log.error("queue %s, shard %d does not serve: %s", self.stream.name, number, error)
        if start:
            for shard in self.shards:
                # Also one whose journal takes nothing for a while: no word comes when it does again. One that is read again starts then.
                if shard.actor.is_serving:
                    shard.start()

    async def close(self) -> None:
        """With its stream, or where another broker leads it."""
        self.is_closed = True
        async with self._opening:
            for shard in self.shards:
                # What was being leased for workers that are gone is given back while the journal takes it.
                await shard.actor.journal.settled()
                await shard.close()

    def prepare(self, views: Views) -> None:
        """region.streams.hosted.Altering: whatever a queue's settings may be counts from one decision to the next."""

    def altered(self) -> None:
        """New settings count for what is leased and given back from now on."""
        for shard in self.shards:
            shard.state.settings = shard.settings

    # -- sharing out -----------------------------------------------------------------------------------

    def join(self, taker: Taker) -> None:
        """Stand in line, at its end, where it does not stand there already."""
        if not self._takers:
            self._want(True)
        self._takers[taker.number] = taker
        self._line.setdefault(taker.number, taker)
        self.changed()

    def leave(self, taker: Taker) -> None:
        """Wants nothing more."""
        self._line.pop(taker.number, None)
        if self._takers.pop(taker.number, None) is not None and not self._takers:
            self._want(False)

    def _want(self, wanted: bool) -> None:
        for shard in self.shards:
            shard.want(wanted)

    def changed(self) -> None:
        """There may be more to share out."""
        if not self._due and self._line and not self.is_closed:
            self._due = True
            asyncio.get_running_loop().call_soon(self.share)

    def share(self) -> None:
        """Give those in line what is ready."""
        self._due = False
        without = given = 0
        while self._line and without < len(self._line) and not self.is_closed:
            if given >= TURN_RECORDS_MAX:
                self.changed()
                return
            ready = self._ready()
            if not ready:
                # `changed` comes with more: nobody is asked what they would take of nothing.
                break
            number, taker = next(iter(self._line.items()))
            del self._line[number]
            records, size = taker.room()
            if not records:
                continue
            self._line[number] = taker
            fair = max(1, min(records, SHARE_RECORDS_MAX, ready // len(self._line)))
            got = self._take(taker, fair, size)
            given += got
            without = 0 if got else without + 1
        if self._line and not self._looks and any(shard.is_held_back for shard in self.shards):
            self._looks = True
            asyncio.get_running_loop().call_later(JOURNAL_LOOK_MS / 1000, self._look)

    def _look(self) -> None:
        self._looks = False
        self.changed()

    def _ready(self) -> int:
        """Records that can be leased at once; what is in memory is taken up first where there are none."""
        ready = sum(shard.state.ready for shard in self.shards)
        if ready:
            return ready
        for shard in self.shards:
            if shard.serves:
                shard.take_up()
        return sum(shard.state.ready for shard in self.shards)

    def _take(self, taker: Taker, records: int, size: int) -> int:
        shards = len(self.shards)
        for at in range(shards):
            shard = self.shards[(self._first_shard + at) % shards]
            if not shard.serves:
                continue
            taken = shard.take(
                taker.worker,
                records,
                size,
                taker.visibility_ms,
                partial(taker.deliver, shard),
                at_least_one=not taker.granted,
                taking=taker.taken,
            )
            if taken:
                self._first_shard = (self._first_shard + at + 1) % shards
                return taken
        return 0

    @property
    def is_reading(self) -> bool:
        """True while a shard reads what may be ready."""
        return any(shard.is_reading for shard in self.shards)

    # -- looking ---------------------------------------------------------------------------------------

    def leased_by(self, worker: int) -> int:
        """Jobs that a worker holds."""
        return sum(shard.state.leased_by.get(worker, 0) for shard in self.shards)

    @property
    def left(self) -> int:
        """Records that are not done."""
        return sum(shard.state.left(shard.log.high_watermark) for shard in self.shards)

    def describe(self, dead: int) -> QueueState:
        """As workers see it; `dead`: how many wait among the dead letters."""
        now_ms, boot_ms = self._broker.streams_ms(), self._broker.boot_ms()
        counts = [sum(shard.state.counts[phase] for shard in self.shards) for phase in Phase]
        oldest = [shard.state.oldest_ms for shard in self.shards if shard.state.oldest_ms]
        granted = {taker.worker for taker in self._takers.values() if taker.granted}
        settings = self.shards[0].settings
        return QueueState(
            str(self.stream.name),
            self.left - sum(counts) + counts[Phase.READY],
            counts[Phase.LEASED],
            counts[Phase.DELAYED],
            counts[Phase.WAITING],
            dead + counts[Phase.MOVING],
            max(0, now_ms - min(oldest)) if oldest else 0,
            round(sum(shard.put.per_second(boot_ms) for shard in self.shards), 1),
            round(sum(shard.acked.per_second(boot_ms) for shard in self.shards), 1),
            sum(shard.acked.total for shard in self.shards),
            sum(shard.redelivered for shard in self.shards),
            sum(shard.dead.moved for shard in self.shards),
            str(dead_letter_name(self.stream.name, settings.retries)),
            [
                Worker(str(each.identity), leased, number in granted, each.name)
                for number, each in list(self.workers.items())[:WORKERS_SHOWN_MAX]
                if (leased := self.leased_by(number)) or number in granted
            ],
        )


class QueueService:
    """All queues of one broker."""

    def __init__(self, broker: Broker) -> None:
        self.broker = self._broker = broker
        self._queues: dict[StreamName, Queue] = {}
        self._reserved: dict[bytes, dict[int, dict[int, int]]] = {}
        """by incarnation and shard, see QueueShard"""
        self._sweeper: asyncio.Task[None] | None = None
        self._numbers = count(1)

    def next_number(self) -> int:
        """Of a taker."""
        return next(self._numbers)

    async def queue(self, stream: HostedStream, *, start: bool = True) -> Queue:
        """The queue of a stream, open. Raises RequestError(UNSUPPORTED) where the stream is none, NotLeaderError where another broker
        leads it, and what opening it raises."""
        if stream.record.config.views.queue is None:
            raise RequestError(
                f"{stream.name} is no queue.",
                code=Code.UNSUPPORTED,
                hint="Make one with: felix queue create, or RegionClient.create_queue.",
            )
        self._broker.require_led(stream)
        held = self._queues.get(stream.name)
        if held is None or held.stream is not stream:
            held = Queue(self._broker, stream, self._reserved.setdefault(stream.incarnation, {}))
            self._queues[stream.name] = held
            stream.closing.append(lambda: self._close(held))
            stream.views.append(held)
        if self._sweeper is None:
            self._sweeper = asyncio.ensure_future(
                every(SWEEP_S, self._sweep, "queues could not be looked at", log)
            )
        await held.open(start=start)
        return held

    def opened(self, stream: HostedStream) -> Queue | None:
        """The queue of a stream, where it is open."""
        held = self._queues.get(stream.name)
        return held if held is not None and held.stream is stream else None

    async def _close(self, queue: Queue) -> None:
        if self._queues.get(queue.stream.name) is queue:
            del self._queues[queue.stream.name]
        await queue.close()
        self._drop_reserved(queue.stream.name, queue.stream.incarnation)

    def _drop_reserved(self, name: StreamName, incarnation: bytes) -> None:
        """Where nothing is reserved, and no open queue has a part in it."""
        held = self._queues.get(name)
        is_open = held is not None and held.stream.incarnation == incarnation
        if not is_open and not any(self._reserved.get(incarnation, {}).values()):
            self._reserved.pop(incarnation, None)

    async def close(self) -> None:
        """Before the streams are closed, which close their queues."""
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _sweep(self) -> None:
        for queue in list(self._queues.values()):
            for shard in list(queue.shards):
                shard.sweep()
                try:
                    await shard.trim()
                except FelixError as error:
                    log.warning("queue %s is not trimmed: %s", queue.stream.name, error)
                except Exception:
                    log.exception("queue %s could not be trimmed", queue.stream.name)

    # -- dead letters ----------------------------------------------------------------------------------

    def _dead_stream(self, queue: Queue) -> HostedStream | None:
        settings = queue.stream.record.config.views.queue
        assert settings is not None
        held = self._broker.streams.get(dead_letter_name(queue.stream.name, settings.retries))
        return held if held is not None and held.record.config.views.queue is not None else None

    async def dead(self, queue: Queue) -> int:
        """How many records wait in the queue's dead-letter stream; 0 where that is another broker's, to which none go. Raises what
        opening it raises."""
        stream = self._dead_stream(queue)
        return (await self.queue(stream)).left if stream is not None and stream.elsewhere is None else 0

    async def redrive(self, queue: Queue, limit: int) -> int:
        """Bring dead letters of the queue back, up to `limit` (0: all), those that are just on their way there included. Raises
        what QueueShard.give_back raises."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REDRIVE_WAIT_S):
                for shard in queue.shards:
                    await shard.settle_dead()
        stream = self._dead_stream(queue)
        if stream is None:
            return 0
        self._broker.check_dead_letters(queue.stream.name, stream.name)
        dead = await self.queue(stream)
        moved = 0
        for shard in dead.shards:
            if not limit or moved < limit:
                moved += await shard.give_back(queue.stream.name, limit - moved if limit else 0)
        return moved

    # -- transactions ----------------------------------------------------------------------------------

    async def check_acks(
        self, identity: SpiffeId, name: StreamName, held: Sequence[Held]
    ) -> tuple[bytes, dict[int, list[int]]]:
        """Keep these leases for a transaction that is about to commit: until `apply_acks`, or `abandon_acks`, nobody else gets the jobs.
        Returns the incarnation that both ask for, and by shard the epochs that `apply_acks` asks for. Raises RequestError: LEASE_LOST, NOT_FOUND_OR_FORBIDDEN, UNSUPPORTED;
        UnavailableError."""
        self._broker.require(identity, Verb.SUBSCRIBE, name, "queue")
        stream = self._broker.stream(name)
        queue = await self.queue(stream)
        by_shard = runs_by_shard(held, len(queue.shards))
        for number in by_shard:
            queue.shards[number].check()
        kept: list[int] = []
        for number, runs in by_shard.items():
            lost = queue.shards[number].reserve(runs)
            if lost:
                for each in kept:
                    queue.shards[each].unreserve(by_shard[each])
                raise lease_lost(name, number, lost[0])
            kept.append(number)
        return stream.incarnation, {number: told(queue.shards[number].log) for number in by_shard}

    def abandon_acks(self, name: StreamName, incarnation: bytes, held: Sequence[Held]) -> None:
        """The transaction was not committed: these leases are what they were."""
        queue = self._queues.get(name)
        shards = [] if queue is None or queue.stream.incarnation != incarnation else queue.shards
        for each in held:
            runs = [(each.first, each.records, each.token)]
            if each.shard < len(shards):
                shards[each.shard].unreserve(runs)
            else:
                forget_reserved(self._reserved.get(incarnation, {}).get(each.shard, {}), runs)
        self._drop_reserved(name, incarnation)

    async def apply_acks(
        self, name: StreamName, incarnation: bytes, held: Sequence[Held], epochs: Mapping[int, list[int]]
    ) -> None:
        """The transaction is committed: these jobs are done, durably, when this returns. Asked again it changes nothing; for a
        queue that is gone, and of jobs that were lost since, there is nothing to do. Raises UnavailableError."""
        stream = self._broker.streams.get(name)
        if stream is None or stream.incarnation != incarnation:
            self.abandon_acks(name, incarnation, held)
            return
        # Before its clock runs: a lease that has run out meanwhile must not be handed out again first.
        queue = await self.queue(stream, start=False)

        def settle(done: Done) -> None:
            gather = Gather(done)
            for number, runs in runs_by_shard(held, len(queue.shards)).items():
                shard = queue.shards[number]
                shard.settle(runs, gather.part(), known_end(shard.log, epochs.get(number)))
            gather.asked()

        await awaited(settle)
        await queue.open()

    # -- stats -----------------------------------------------------------------------------------------

    def traffic(self) -> list[ReaderTraffic]:
        """Every open queue as one reader: what is acknowledged goes out, what is not done yet lags."""
        return [
            ReaderTraffic(
                "queue",
                "jobs",
                str(queue.stream.name),
                f"{len(queue.workers)} workers",
                delivered_records=sum(shard.acked.total for shard in queue.shards),
                lag_records=queue.left,
                waits="" if queue.workers or not queue.left else "consumer",
            )
            for queue in self._queues.values()
        ]

    def gauges(self, stream: HostedStream, number: int) -> dict[str, float]:
        """A shard's gauges, by name; none where the stream is no queue. Of one that is not open nothing more is known: what is done stands in its journal, which
        is not read for figures. Of one that takes dead letters not even that is said: that nobody leases them is as it is meant to be."""
        if stream.record.config.views.queue is None:
            return {}
        queue = self._queues.get(stream.name)
        if queue is None or number >= len(queue.shards):
            return {} if stream.takes_dead_letters else {"queue_open": 0}
        shard = queue.shards[number]
        state, now_ms = shard.state, self._broker.streams_ms()
        counts = state.counts
        left = state.left(shard.log.high_watermark)
        return {
            "queue_open": 1,
            "queue_ready": left - sum(counts) + counts[Phase.READY],
            "queue_leased": counts[Phase.LEASED],
            "queue_delayed": counts[Phase.DELAYED],
            "queue_waiting": counts[Phase.WAITING],
            "queue_oldest_ms": max(0, now_ms - state.oldest_ms) if state.oldest_ms else 0,
            "queue_acked": shard.acked.total,
            "queue_redelivered": shard.redelivered,
            "queue_dead_lettered": shard.dead.moved,
        }


def runs_by_shard(held: Sequence[Held], shards: int) -> dict[int, list[Run]]:
    """Raises RequestError(INVALID) for a shard that the queue does not have, or for too many jobs at once."""
    found: dict[int, list[Run]] = {}
    total = 0
    for shard, first, records, token in ((h.shard, h.first, h.records, h.token) for h in held):
        if shard >= shards:
            raise RequestError(f"The queue has no shard {shard}: it has {shards}, from 0 on.")
        total += records
        if total > JOBS_MAX:
            raise RequestError(f"More than {JOBS_MAX} jobs in one call.", hint="Settle fewer at a time.")
        found.setdefault(shard, []).append((first, records, token))
    return found


def lease_lost(name: StreamName, shard: int, offset: int) -> RequestError:
    """The refusal for a job that is no longer leased to the caller."""
    return RequestError(
        f"The lease of record {offset} of {name}, shard {shard}, is lost: it ran out and another worker got the job, the "
        "record is done, or a transaction that acknowledges it is being committed.",
        code=Code.LEASE_LOST,
        hint="Do not count the work as done; extend leases in time, or ask for a longer visibility.",
    )
