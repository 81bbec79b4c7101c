"""A queue's exchange: one client's calls, and the jobs that are pushed to it.

Rights are asked with every call: subscribe to lease, settle and look, publish to put, admin to purge and redrive. A right that was
used and is taken away ends the exchange at once; leases that the client holds run out by themselves.

Invariants: no job is sent beyond the grant, in records and in bytes; what was leased for a client that is gone before it was sent is
given back at once, and does not count as an attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from felix.batch import NewRecord, encode_batch
from felix.errors import FelixError, RequestError, UnavailableError
from felix.messages import OpenQueue, QueueOpened, Request
from felix.names import SpiffeId, StreamName, shard_for_key
from felix.queue_messages import (
    LEASE_BYTES_MAX,
    Ack,
    Counted,
    Describe,
    Extend,
    Grant,
    Held,
    Job,
    Jobs,
    Lease,
    Nack,
    Peek,
    Peeked,
    PeekedJob,
    Purge,
    Put,
    Redrive,
    Release,
    Settled,
    Stored,
    decode_call,
)
from felix.settings import VISIBILITY_MS_MAX, VISIBILITY_MS_MIN, QueueSettings, Views
from policy.access import Verb, not_found_or_forbidden
from region.exchange import Exchange
from region.gather import Done, Gather, ignore
from region.limits.quota import Meter
from region.log.shard import Appended
from region.ports import Exchanging
from region.queue.service import SHARE_RECORDS_MAX, Queue, QueueService, runs_by_shard
from region.queue.shard import JOB_ROOM_BYTES, Leased, QueueShard
from region.queue.state import Phase, Run, Tracked, runs_of, triples
from region.streams.hosted import ELSEWHERE_RETRY_MS

HELD_LOOK_S: Final = 0.5
"""How soon a worker that holds as many leases as its quota says is looked at again."""
READING_WAIT_S: Final = 1.0
"""A lease that does not wait still gives what is being read from disk the time to come."""
PEEK_BYTES_MAX: Final = 512 << 10
_VERBS: Final = (Verb.SUBSCRIBE, Verb.PUBLISH, Verb.ADMIN)
_SEES_WORKERS: Final = (Verb.SUBSCRIBE, Verb.ADMIN)


class _Waiting:
    """A lease that waits for its first job: a taker for one round."""

    granted = False

    def __init__(self, owner: QueueWorker, correlation: int, call: Lease, visibility_ms: int) -> None:
        self._owner = owner
        self.correlation = correlation
        self.number = owner.service.next_number()
        self.worker = owner.worker
        self.visibility_ms = visibility_ms
        self._records = call.records
        self._bytes = min(call.bytes, LEASE_BYTES_MAX)
        self.timer: asyncio.TimerHandle | None = None

    @property
    def wants(self) -> bool:
        """True until something is being leased for it."""
        return self._records > 0

    def room(self) -> tuple[int, int]:
        records = self._owner.leases_allowed(self, self._records)
        return records, self._bytes

    def taken(self, records: int, size: int) -> None:
        self._records = 0
        self._owner.count_leases()

    def deliver(self, shard: QueueShard, leased: Leased | FelixError, records: int, size: int) -> None:
        self._owner.answer_lease(self, shard, leased, size)


class QueueWorker:
    """See the module: the handler of one exchange, and the taker of its grant."""

    granted = True

    def __init__(self, service: QueueService, exchange: Exchange) -> None:
        self.service = service
        self._exchange = exchange
        self._broker = exchange.broker
        self.number = self.worker = service.next_number()
        self.identity: SpiffeId = exchange.identity
        self.name = ""
        self._asked_visibility_ms = 0
        self._queue: Queue
        self._name: StreamName
        self._used: set[Verb] = set()
        self._granted_records = self._granted_bytes = 0
        self._sent_records = self._sent_bytes = 0
        self._leases: dict[int, _Waiting] = {}
        self._metered = 0
        self._is_open = False
        self._stopped = False
        self._next_shard = 0
        self._looking = asyncio.Lock()

    # -- exchange.Handler ------------------------------------------------------------------------------

    def open(self, correlation: int, request: Request[Any]) -> None:
        assert isinstance(request, OpenQueue)
        self.name = request.worker
        self._exchange.spawn(correlation, self._open(correlation, request))

    async def _open(self, correlation: int, request: OpenQueue) -> None:
        try:
            name = StreamName.parse(request.stream)
            if not any(self._broker.allows(self.identity, verb, name) for verb in _VERBS):
                raise not_found_or_forbidden(Verb.SUBSCRIBE, name, "queue")
            stream = self._broker.use_stream(name, views=Views(queue=QueueSettings()))
            self._queue = await self.service.queue(stream)
            if stream.deleted:
                raise not_found_or_forbidden(Verb.SUBSCRIBE, name, "queue")
            if self._queue.is_closed:
                raise stream.elsewhere or UnavailableError(
                    f"The queue {name} is opened anew.", retry_after_ms=ELSEWHERE_RETRY_MS
                )
            self._exchange.charge()
        except FelixError as error:
            self._exchange.fail(error, correlation)
            return
        self._name = name
        self._is_open = True
        self._queue.workers[self.worker] = self
        settings = self._settings
        self._exchange.opened(
            correlation,
            QueueOpened(
                stream.shard_count, stream.incarnation, settings.visibility_ms, settings.ordered_by_key
            ),
        )

    @property
    def visibility_ms(self) -> int:
        """Of what is pushed from now on."""
        return self._asked_visibility_ms or int(self._settings.visibility_ms)

    @property
    def _settings(self) -> Any:
        settings = self._queue.stream.record.config.views.queue
        assert settings is not None
        return settings

    def call(self, correlation: int, call: Any) -> None:
        _CALLS[type(call)](self, correlation, call)

    def credit(self, limit_bytes: int) -> None:
        """Grants say what there is to say."""

    def pump(self) -> None:
        if self._is_open and self.room()[0]:
            self._queue.join(self)

    def rights_changed(self) -> None:
        if not self._is_open:
            return
        if (elsewhere := self._queue.stream.elsewhere) is not None:
            self._exchange.fail(elsewhere)
            return
        allowed = [verb for verb in _VERBS if self._broker.allows(self.identity, verb, self._name)]
        lost = [verb for verb in self._used if verb not in allowed]
        if self._queue.stream.deleted or not allowed or lost:
            self._exchange.fail(
                not_found_or_forbidden(lost[0] if lost else Verb.SUBSCRIBE, self._name, "queue")
            )

    def closed(self) -> None:
        if not self._is_open:
            return
        self._meter.release("leases", self._metered)
        self._metered = 0
        self._queue.workers.pop(self.worker, None)
        self._queue.leave(self)
        for waiting in list(self._leases.values()):
            self._end(waiting)

    # -- quotas ----------------------------------------------------------------------------------------

    @property
    def _meter(self) -> Meter:
        meter = self._exchange.meter
        assert meter is not None
        return meter

    def leases_allowed(self, taker: _Waiting | QueueWorker, records: int) -> int:
        """How many of these may be leased now, as far as quotas go; with none, the taker stands in line again by itself."""
        if not records or self._exchange.over:
            return 0
        throttle = self._meter.delivery_throttle()
        if throttle is not None:
            self._exchange.session.throttled(throttle)
            self._later(taker, throttle.wait_s)
            return 0
        self.count_leases()
        for some in (records, min(records, SHARE_RECORDS_MAX), 1):
            try:
                self._meter.hold("leases", some)
            except UnavailableError:
                continue
            self._meter.release("leases", some)
            return some
        self._later(taker, HELD_LOOK_S)
        return 0

    def _later(self, taker: _Waiting | QueueWorker, wait_s: float) -> None:
        def join() -> None:
            if not self._exchange.over and (taker is self or taker in self._leases.values()):
                self._queue.join(taker)

        asyncio.get_running_loop().call_later(wait_s, join)

    def count_leases(self) -> None:
        """Hold as many leases of the quota as this worker has."""
        if self._exchange.over:
            return
        now = self._queue.leased_by(self.worker)
        if now > self._metered:
            # Asked for before: it is more only where a limit was lowered meanwhile.
            with suppress(UnavailableError):
                self._meter.hold("leases", now - self._metered)
                self._metered = now
        elif now < self._metered:
            self._meter.release("leases", self._metered - now)
            self._metered = now

    def _require(self, verb: Verb) -> None:
        self._broker.require(self.identity, verb, self._name, "queue")
        self._used.add(verb)

    def _visibility(self, asked_ms: int) -> int:
        if not asked_ms:
            return int(self._settings.visibility_ms)
        if not VISIBILITY_MS_MIN <= asked_ms <= VISIBILITY_MS_MAX:
            raise RequestError(
                f"A visibility of {asked_ms} ms; {VISIBILITY_MS_MIN} to {VISIBILITY_MS_MAX} are allowed."
            )
        return asked_ms

    # -- jobs ------------------------------------------------------------------------------------------

    def _lease(self, correlation: int, call: Lease) -> None:
        self._require(Verb.SUBSCRIBE)
        for shard in self._queue.shards:
            shard.check()
        waiting = _Waiting(self, correlation, call, self._visibility(call.visibility_ms))
        self._leases[correlation] = waiting
        self._queue.join(waiting)
        self._queue.share()
        if correlation not in self._leases or not waiting.wants:
            return
        wait_s = call.wait_ms / 1000
        if self._queue.is_reading:
            wait_s = max(wait_s, READING_WAIT_S)
        if wait_s:
            loop = asyncio.get_running_loop()
            waiting.timer = loop.call_later(wait_s, self._nothing, waiting)
        else:
            self._nothing(waiting)

    def _nothing(self, waiting: _Waiting) -> None:
        """It has waited long enough; what is being leased for it still comes."""
        if waiting.wants and waiting.correlation in self._leases:
            self._end(waiting)
            self._exchange.reply(waiting.correlation, Jobs([]))

    def _end(self, waiting: _Waiting) -> None:
        self._queue.leave(waiting)
        self._leases.pop(waiting.correlation, None)
        if waiting.timer is not None:
            waiting.timer.cancel()

    def answer_lease(
        self, waiting: _Waiting, shard: QueueShard, leased: Leased | FelixError, size: int
    ) -> None:
        """What a lease waited for is there."""
        self._end(waiting)
        if isinstance(leased, FelixError):
            self._exchange.refuse(waiting.correlation, leased)
        elif self._exchange.over:
            _give_back(shard, leased.jobs)
        else:
            self._meter.delivered(size, len(leased.jobs))
            self._exchange.reply(
                waiting.correlation, Jobs(leased.jobs, waiting.visibility_ms, leased.until_ms)
            )

    def _grant(self, correlation: int, call: Grant) -> None:
        self._require(Verb.SUBSCRIBE)
        self._visibility(call.visibility_ms)  # raises where it is not allowed
        self._asked_visibility_ms = call.visibility_ms
        if not call.records:
            # Jobs that are being leased at this moment are released: no job follows this reply.
            self._granted_records, self._granted_bytes = self._sent_records, self._sent_bytes
            self._stopped = True
            self._exchange.reply(correlation, Settled())
            self._queue.leave(self)
            return
        self._stopped = False
        self._granted_records = max(self._granted_records, call.records)
        self._granted_bytes = max(self._granted_bytes, call.bytes)
        self._exchange.reply(correlation, Settled())
        self._queue.join(self)

    def room(self) -> tuple[int, int]:
        records = self._granted_records - self._sent_records
        size = min(self._granted_bytes - self._sent_bytes, LEASE_BYTES_MAX)
        if records <= 0 or size <= 0 or not self._exchange.may_send():
            return 0, 0
        return self.leases_allowed(self, records), size

    def taken(self, records: int, size: int) -> None:
        self._sent_records += records
        self._sent_bytes += size
        self.count_leases()

    def deliver(self, shard: QueueShard, leased: Leased | FelixError, records: int, size: int) -> None:
        if isinstance(leased, FelixError):
            self._not_sent(records, size)
        elif self._exchange.over or self._stopped:
            _give_back(shard, leased.jobs)
        elif self._broker.fence() is not None:
            self._not_sent(records, size)
            _give_back(shard, leased.jobs)
        else:
            self._meter.delivered(size, records)
            self._exchange.event(Jobs(leased.jobs, self.visibility_ms, leased.until_ms))

    def _not_sent(self, records: int, size: int) -> None:
        self._sent_records -= records
        self._sent_bytes -= size
        # Without room it left the line, and its client grants no more while it has got nothing.
        if not self._stopped:
            self._later(self, HELD_LOOK_S)

    # -- settling --------------------------------------------------------------------------------------

    def _ack(self, correlation: int, call: Ack) -> None:
        self._settle(correlation, call.jobs, lambda shard, runs, done: shard.ack(runs, done))

    def _nack(self, correlation: int, call: Nack) -> None:
        delay_ms = None if call.delay_ms < 0 else call.delay_ms
        self._settle(
            correlation, call.jobs, lambda shard, runs, done: shard.nack(runs, delay_ms, call.reason, done)
        )

    def _release(self, correlation: int, call: Release) -> None:
        self._settle(correlation, call.jobs, lambda shard, runs, done: shard.release(runs, done))

    def _extend(self, correlation: int, call: Extend) -> None:
        visibility_ms = self._visibility(call.visibility_ms)
        self._settle(
            correlation, call.jobs, lambda shard, runs, done: shard.extend(runs, visibility_ms, done)
        )

    def _settle(
        self,
        correlation: int,
        held: Sequence[Held],
        decide: Callable[[QueueShard, Sequence[Run], Done], list[int]],
    ) -> None:
        """Decide shard by shard; answer once everything is durable."""
        self._require(Verb.SUBSCRIBE)
        by_shard = runs_by_shard(held, len(self._queue.shards))
        for number in by_shard:
            self._queue.shards[number].check()
        lost: list[tuple[int, int]] = []

        def answer(failed: FelixError | None) -> None:
            self.count_leases()
            if failed is not None:
                self._exchange.refuse(correlation, failed)
            else:
                self._exchange.reply(correlation, Settled(lost))

        gather = Gather(answer)
        for number, runs in by_shard.items():
            lost += ((number, offset) for offset in decide(self._queue.shards[number], runs, gather.part()))
        gather.asked()

    # -- putting ---------------------------------------------------------------------------------------

    def _put(self, correlation: int, call: Put) -> None:
        self._require(Verb.PUBLISH)
        stream = self._queue.stream
        number = self._shard_of(call, stream.shard_count)
        batch = encode_batch(
            [NewRecord(job.payload, job.key, job.headers or None) for job in call.records],
            shard=number,
            producer_id=call.producer,
            producer_epoch=call.epoch if call.producer else 0,
            base_sequence=call.sequence,
        )

        size, records = batch.header.total_length, len(call.records)
        refusal = self._meter.refusal(size)
        if refusal is not None:
            raise refusal
        throttle = self._meter.published(size, records)
        if throttle is not None:
            self._exchange.session.throttled(throttle)

        def done(result: Appended | FelixError) -> None:
            if isinstance(result, FelixError):
                self._meter.not_published(size, records)
                self._exchange.refuse(correlation, self._broker.refusal_of_append(result))
            else:
                self._exchange.reply(correlation, Stored(number, result.base_offset))

        stream.shard(number).append_nowait(batch, done)

    def _shard_of(self, call: Put, shards: int) -> int:
        if call.shard >= 0:
            return call.shard
        wanted = {shard_for_key(job.key, shards) for job in call.records if job.key}
        if len(wanted) > 1:
            raise RequestError(
                "The keys of these records belong to several shards.",
                hint="Put the records of each shard by themselves: XXH3-64 of the key, modulo the shards.",
            )
        if wanted:
            return wanted.pop()
        if call.producer:
            return call.producer % shards  # a repeat must go where the first one went
        self._next_shard = (self._next_shard + 1) % shards
        return self._next_shard

    # -- looking and managing --------------------------------------------------------------------------

    def _describe(self, correlation: int, call: Describe) -> None:
        if not any(self._broker.allows(self.identity, verb, self._name) for verb in _VERBS):
            raise not_found_or_forbidden(Verb.SUBSCRIBE, self._name, "queue")

        async def describe() -> None:
            state = self._queue.describe(await self.service.dead(self._queue))
            if not any(self._broker.allows(self.identity, verb, self._name) for verb in _SEES_WORKERS):
                # Identities that may only publish do not see the workers or another stream's records.
                state = msgspec.structs.replace(state, workers=[], dead=0)
            self._exchange.reply(correlation, state)

        self._exchange.spawn(correlation, describe())

    def _peek(self, correlation: int, call: Peek) -> None:
        self._require(Verb.SUBSCRIBE)
        self._exchange.spawn(correlation, self._look(correlation, call.records))

    async def _look(self, correlation: int, records: int) -> None:
        # One after the other: each holds what it has read until it is answered.
        async with self._looking:
            found = await self._found(records)
        self._exchange.reply(correlation, Peeked(found))

    async def _found(self, records: int) -> list[PeekedJob]:
        found: list[PeekedJob] = []
        size = 0
        for shard in self._queue.shards:
            state = shard.state
            offset, end = state.floor, shard.log.high_watermark
            wanted: list[int] = []
            while offset < end and len(wanted) < records - len(found):
                offset = state.done.end_of(offset)
                if offset < end:
                    wanted.append(offset)
                    offset += 1
            async for at, record in shard.records(wanted):
                if record is None or at in state.done:
                    continue
                tracked = state.tracked.get(at)
                key = bytes(record.key) if record.key else None
                payload = bytes(record.payload)
                size += len(payload) + len(key or b"") + JOB_ROOM_BYTES
                size += sum(len(name) + len(value) + 8 for name, value in record.headers.items())
                if size > PEEK_BYTES_MAX and found:
                    return found
                job = Job(
                    shard.number,
                    at,
                    tracked.token if tracked is not None else 0,
                    tracked.attempts if tracked is not None else 0,
                    record.timestamp_ms,
                    payload,
                    key,
                    dict(record.headers),
                )
                found.append(self._peeked(job, tracked))
        return found

    def _peeked(self, job: Job, tracked: Tracked | None) -> PeekedJob:
        if tracked is None:
            return PeekedJob(job, "ready", 0)
        phase = tracked.phase.name.lower()
        if tracked.phase is not Phase.LEASED:
            return PeekedJob(job, phase, tracked.due_ms)
        holder = self._queue.workers.get(tracked.worker)
        identity, name = (str(holder.identity), holder.name) if holder is not None else ("", "")
        return PeekedJob(job, phase, tracked.due_ms, tracked.leased_ms, identity, name)

    def _redrive(self, correlation: int, call: Redrive) -> None:
        self._require(Verb.ADMIN)

        async def redrive() -> None:
            moved = await self.service.redrive(self._queue, call.records)
            self._exchange.reply(correlation, Counted(moved))

        self._exchange.spawn(correlation, redrive())

    def _purge(self, correlation: int, call: Purge) -> None:
        self._require(Verb.ADMIN)
        for shard in self._queue.shards:
            shard.check()
        purged = 0

        def answer(failed: FelixError | None) -> None:
            if failed is not None:
                self._exchange.refuse(correlation, failed)
            else:
                self._exchange.reply(correlation, Counted(purged))

        gather = Gather(answer)
        for shard in self._queue.shards:
            purged += shard.purge(gather.part())
        gather.asked()


_CALLS: Final[dict[type, Callable[[QueueWorker, int, Any], None]]] = {
    Put: QueueWorker._put,
    Lease: QueueWorker._lease,
    Grant: QueueWorker._grant,
    Ack: QueueWorker._ack,
    Nack: QueueWorker._nack,
    Release: QueueWorker._release,
    Extend: QueueWorker._extend,
    Describe: QueueWorker._describe,
    Peek: QueueWorker._peek,
    Redrive: QueueWorker._redrive,
    Purge: QueueWorker._purge,
}


def _give_back(shard: QueueShard, jobs: Sequence[Job]) -> None:
    """Jobs that nobody will get: another worker may have them at once."""
    try:
        shard.release(list(triples(runs_of((job.offset, job.token) for job in jobs))), ignore)
    except UnavailableError:
        return  # the journal is read again: their leases run out


def queue_opener(service: QueueService) -> Callable[[Exchanging, int], Exchange]:
    """What makes the role of an exchange that begins with OpenQueue."""

    def opened(session: Exchanging, stream_id: int) -> Exchange:
        return Exchange(
            service.broker, session, stream_id, lambda exchange: QueueWorker(service, exchange), decode_call
        )

    return opened
