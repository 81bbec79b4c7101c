"""Queues, as an application sees them: put records in, lease them one by one, acknowledge each when its work is done.

::

    jobs = region.queue("acme/payments/jobs")
    await jobs.put(b'{"invoice": 7}', key=b"7", delay=60)
    async with jobs.consume(prefetch=100) as consumer:
        async for job in consumer:
            async with job:              # acknowledged at the end, given back with the reason if this raises
                await bill(job.payload)

A job is leased: if it is neither acknowledged nor extended within its visibility time, another worker gets it, and what this one
says of it later is refused with LEASE_LOST. So a job may be seen more than once, and is recorded as done once.

`ack`, `nack` and `extend` send at the end of this event loop iteration, many together, and give a future: await it to know that it is
durable at the broker; or do not, and let the consumer's end (or `Queue.flush`) wait for all. They are safe to repeat, so they are
asked again when the connection breaks. All on the event loop; `felix.sync` is for threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from math import inf
from types import TracebackType
from typing import Any, Final, Protocol, Self

from felix.batch import Headers
from felix.connection import RegionConnection
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.exchange import Exchange
from felix.frames import Frame
from felix.messages import NAME_CHARS_MAX, Answer, OpenQueue, QueueOpened, StreamState
from felix.names import StreamName
from felix.payload import Payload, RecordKey
from felix.queue_messages import (
    LEASE_BYTES_MAX,
    LEASE_RECORDS_MAX,
    REASON_CHARS_MAX,
    RUNS_MAX,
    Ack,
    Counted,
    Describe,
    Extend,
    Grant,
    Held,
    Jobs,
    Lease,
    Nack,
    Peek,
    Peeked,
    PeekedJob,
    Purge,
    QueueState,
    Redrive,
    Release,
    Settled,
    decode_reply,
)
from felix.queue_messages import Job as LeasedJob
from felix.settings import (
    VISIBILITY_MS_MAX,
    VISIBILITY_MS_MIN,
    QueueChange,
    QueueSettings,
    Retries,
    RetriesChange,
    Views,
    milliseconds,
)

PREFETCH_DEFAULT: Final = 64
PREFETCH_MAX: Final = 100_000
PREFETCH_BYTES_DEFAULT: Final = 16 << 20
PREFETCH_BYTES_MIN: Final = 2 << 20
"""A job of the largest size always fits."""
SETTLE_JOBS: Final = 512
"""So many acknowledgements leave before the event loop iteration is over: the broker works on them meanwhile."""
YIELD_JOBS: Final = 64
"""After so many jobs that had already arrived, yield to the event loop, so that acknowledgements leave and new jobs come."""
WAIT_S_MAX: Final = 20.0
"""A lease that waits longer asks again: well below the time that a request may take."""
HEARTBEAT: Final = 3
"""Leases are extended three times per visibility."""
JOB_OVERHEAD_BYTES: Final = 64
"""Bytes that the broker counts for a job in addition to payload, key and headers."""

PRIORITY_HEADER: Final = "felix.priority"
DELAY_HEADER: Final = "felix.delay"
DELIVER_AT_HEADER: Final = "felix.deliver-at"

_log = logging.getLogger("felix.queue")


class Job:
    """One record that this client has leased."""

    __slots__ = ("_begun", "_body", "_consumer", "_lost", "_queue", "_settled", "_settler", "_size", "until")

    def __init__(self, queue: Queue, settler: _Settler, body: LeasedJob, until: float) -> None:
        self._queue = queue
        self._settler = settler
        self._body = body
        self._settled = False
        self._lost = False
        self._begun: float | None = None
        """When a consumer handed it out, by the loop's clock."""
        self._consumer: QueueConsumer | None = None
        self._size = 0
        self.until = until
        """When the lease runs out: seconds of the loop's clock (asyncio's `time()`), extensions not counted."""

    @property
    def payload(self) -> bytes:
        return self._body.payload

    @property
    def key(self) -> bytes | None:
        return self._body.key

    @property
    def headers(self) -> dict[str, bytes]:
        return self._body.headers

    @property
    def attempts(self) -> int:
        """How often the job was handed out, this time counted."""
        return self._body.attempts

    @property
    def shard(self) -> int:
        return self._body.shard

    @property
    def offset(self) -> int:
        """With the shard, what names the job."""
        return self._body.offset

    @property
    def token(self) -> int:
        """Of the lease, as transactions and the wire name it."""
        return self._body.token

    @property
    def timestamp_ms(self) -> int:
        """When it was published, by the broker's clock."""
        return self._body.timestamp_ms

    @property
    def settled(self) -> bool:
        """True once it was acknowledged or given back here."""
        return self._settled

    @property
    def lost(self) -> bool:
        """True once the broker said that the lease is lost: another worker may have the job, and what is done here does not count.
        Of a job that is extended, by a consumer or by `extend`, it is noticed within a third of the visibility."""
        return self._lost

    def __repr__(self) -> str:
        return f"Job({str(self._queue.name)!r}, shard={self.shard}, offset={self.offset}, attempts={self.attempts})"

    def ack(self) -> asyncio.Future[None]:
        """The job is done. Awaited: durably so. Raises RequestError(LEASE_LOST) where it is another's by now, UnavailableError."""
        return self._settle("ack")

    def nack(self, *, delay: float | None = None, reason: str = "") -> asyncio.Future[None]:
        """Give the job back, for after `delay` seconds (None: as the queue's retries say). With its last attempt it goes to the dead
        letters, with the reason. Raises as `ack`."""
        delay_ms = -1 if delay is None else max(0, _ms(delay))
        return self._settle("nack", delay_ms, reason[:REASON_CHARS_MAX])

    def extend(self, visibility: float | None = None) -> asyncio.Future[None]:
        """Keep the job for `visibility` seconds from now (None: as the queue says). Raises as `ack`."""
        visibility_ms = _ms(visibility)
        return self._settler.settle("extend", self, visibility_ms)

    def release(self) -> asyncio.Future[None]:
        """Give the job back unseen: at once, and it does not count as an attempt."""
        return self._settle("release")

    @property
    def queue_name(self) -> StreamName:
        """Of the queue that it was leased from."""
        return self._queue.name

    def left_to_transaction(self) -> None:
        """A transaction settles the job (felix.transaction); here it counts as settled from now on."""
        self._settled = True
        if self._consumer is not None:
            self._consumer._settled(self)

    def _settle(self, verb: str, number: int = 0, reason: str = "") -> asyncio.Future[None]:
        self._settled = True
        if self._consumer is not None:
            self._consumer._settled(self)
        return self._settler.settle(verb, self, number, reason)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._settled:
            return
        if error is None:
            self.ack()
        elif isinstance(error, asyncio.CancelledError | GeneratorExit | KeyboardInterrupt):
            self.release()
        else:
            self.nack(reason=f"{type(error).__name__}: {error}")


_Settlement = tuple[str, int, str]
"""One operation on jobs: the verb, its milliseconds, its reason."""


def _jobs(count: int) -> str:
    return f"{count:,} job{'' if count == 1 else 's'}"


class _Settler:
    """Gathers what is said of jobs in an event loop iteration, and says it to the broker in few calls."""

    def __init__(self, call: Callable[[Any], Any], name: StreamName) -> None:
        self._call = call
        self._name = name
        self._gathered: dict[_Settlement, list[tuple[Job, asyncio.Future[None]]]] = {}
        self._count = 0
        self._due = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost = 0
        """Jobs of which the lease was lost before they were settled."""

    def settle(self, verb: str, job: Job, number: int = 0, reason: str = "") -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        settlement = (verb, number, reason)
        held = self._gathered.get(settlement)
        if held is None:
            held = self._gathered[settlement] = []
        held.append((job, future))
        self._count += 1
        if self._count >= SETTLE_JOBS:
            self.send()
        elif not self._due:
            self._due = True
            loop.call_soon(self.send)
        return future

    def send(self) -> None:
        """Say what was gathered."""
        self._due = False
        gathered, self._gathered, self._count = self._gathered, {}, 0
        for settlement, some in gathered.items():
            task = asyncio.ensure_future(self._say(settlement, some))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def flush(self) -> None:
        """Return once everything said so far is answered."""
        self.send()
        if self._tasks:
            # Not gathered: where whoever waits is cancelled, what was said is said all the same, and its callers hear of it.
            await asyncio.wait(tuple(self._tasks))

    async def drain(self) -> None:
        """As `flush`, also for what is said meanwhile."""
        while self._gathered or self._tasks:
            await self.flush()

    def tell(self, tell: Callable[[Any], None]) -> None:
        """As `send`, without waiting for an answer: whoever does is told that none will come."""
        unanswered = UnavailableError(
            "The consumer was closed before this was answered.",
            code=Code.DISCONNECTED,
            hint="Whether it was carried out is not known; where it was not, the job comes again.",
        )
        gathered, self._gathered, self._count = self._gathered, {}, 0
        for settlement, some in gathered.items():
            runs = held_runs(job._body for job, _ in some)
            told: FelixError = unanswered
            try:
                for at in range(0, len(runs), RUNS_MAX):
                    tell(_message(settlement, runs[at : at + RUNS_MAX]))
            except RequestError as error:
                told = error
            for _, future in some:
                if not future.done():
                    future.set_exception(told)
                    future.exception()

    async def _say(self, settlement: _Settlement, some: list[tuple[Job, asyncio.Future[None]]]) -> None:
        runs = held_runs(job._body for job, _ in some)
        lost: set[tuple[int, int]] = set()
        failed: FelixError | None = None
        for at in range(0, len(runs), RUNS_MAX):
            try:
                settled = await self._call(_message(settlement, runs[at : at + RUNS_MAX]))
                lost |= {(shard, offset) for shard, offset in settled.lost}
            except FelixError as error:
                failed = error
            except asyncio.CancelledError:
                # The loop ends.
                for _, future in some:
                    future.cancel()
                raise
        if failed is None and not lost:
            for _, future in some:
                if not future.done():
                    future.set_result(None)
            return
        for job, future in some:
            refusal = failed
            if failed is None and (job.shard, job.offset) in lost:
                refusal = _lost(self._name, job)
                if settlement[0] != "release" and not job._lost:
                    self.lost += 1
                job._lost = True
            if future.done():
                continue
            if refusal is None:
                future.set_result(None)
                continue
            future.set_exception(refusal)
            # A program that does not await it sees the loss in the log and in `lost`, not in a warning about the future.
            future.exception()
        if failed is not None:
            _log.warning("%s of %s could not be settled: %s", _jobs(len(some)), self._name, failed)
        elif settlement[0] != "release":
            _log.warning("leases were lost before they were settled: %s of %s", _jobs(len(lost)), self._name)


def _message(settlement: _Settlement, runs: list[Held]) -> Ack | Nack | Release | Extend:
    verb, number, reason = settlement
    match verb:
        case "ack":
            return Ack(runs)
        case "nack":
            # What an error says may be no text: names of files need not be.
            return Nack(runs, number, reason.encode(errors="backslashreplace").decode()[:REASON_CHARS_MAX])
        case "release":
            return Release(runs)
        case _:
            return Extend(runs, number)


def _lost(name: StreamName, job: Job) -> RequestError:
    return RequestError(
        f"The lease of record {job.offset} of {name}, shard {job.shard}, is lost: it ran out and another worker got the job, or "
        "the record is done.",
        code=Code.LEASE_LOST,
        hint="Do not count the work as done; extend leases in time, or ask for a longer visibility.",
    )


def held_runs(jobs: Iterable[LeasedJob]) -> list[Held]:
    """Jobs as runs, as calls name them."""
    runs: list[Held] = []
    shard = first = token = -1
    end = -1
    for job in jobs:
        if job.shard == shard and job.offset == end and job.token == token:
            end += 1
            continue
        if end > first:
            runs.append(Held(shard, first, end - first, token))
        shard, first, token = job.shard, job.offset, job.token
        end = first + 1
    if end > first:
        runs.append(Held(shard, first, end - first, token))
    return runs


class QueueConsumer:
    """Jobs that the broker pushes, as an async iterator. Use it as `async with`, so that what is left is given back at once.

    Made by `Queue.consume`. One task iterates; jobs may be settled from any. Of the jobs that are here and not settled there are
    never more than the prefetch, in records and in bytes.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        visibility_ms: int,
        prefetch: int,
        prefetch_bytes: int,
        auto_extend: bool,
        extend_for: float | None,
        worker: str,
    ) -> None:
        self._queue = queue
        self._extend_for = extend_for
        self._asked_visibility_ms = visibility_ms
        self._visibility_ms = visibility_ms
        self._prefetch = prefetch
        self._prefetch_bytes = prefetch_bytes
        self._auto_extend = auto_extend
        self._exchange = queue._exchange(_Listener(self), worker)
        self._settler = _Settler(self._call, queue.name)
        self._ready: deque[Job] = deque()
        self._held: set[Job] = set()
        self._held_bytes = 0
        self._overdue: set[Job] = set()
        self._received_records = self._received_bytes = 0
        self._granted_records = self._granted_bytes = 0
        self._grant_due = False
        self._came = asyncio.Event()
        self._error: FelixError | None = None
        self._closing = False
        self._is_open = False
        self._given = 0
        self._heartbeat: asyncio.Task[None] | None = None

    async def _call(self, message: Any) -> Any:
        return await self._exchange.call(message, again=True)

    # -- life ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Begin to receive. Raises what the broker refuses it with; iterating opens by itself. Where it raises, or is cancelled, the
        consumer is closed: else it would lease jobs that nobody takes."""
        if self._error is not None:
            raise self._error
        try:
            await self._stands()
        except BaseException as error:
            if isinstance(error, FelixError):
                self._error = self._error or error
            else:
                self._closing = True
            self._end()
            raise

    async def _stands(self) -> None:
        """As `open`; but where who waits is cancelled, jobs come all the same."""
        if self._is_open:
            return
        self._is_open = True
        await self._exchange.open()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give back what was not looked at, wait until all that was said of jobs is answered, and end. A job that is still being
        worked on keeps its lease until that runs out; settle it before. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        try:
            if self._exchange.is_open:
                with suppress(FelixError):
                    await self._exchange.call(Grant(0, 0), again=False)
            self._release_ready()
            await self._settler.drain()
        finally:
            # Where whoever closes is cancelled, they are said to be given back all the same.
            self._release_ready()
            self._settler.tell(self._exchange.tell)
            self._end()

    def _release_ready(self) -> None:
        ready, self._ready = self._ready, deque()
        if not self._exchange.is_over:
            for job in ready:
                job.release()

    def _end(self) -> None:
        """Nothing is received any more."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._exchange.close()
        self._wake()

    async def flush(self) -> None:
        """Return once everything said of jobs so far is answered."""
        await self._settler.flush()

    @property
    def lost(self) -> int:
        """Jobs of this consumer of which the lease was lost before they were settled."""
        return self._settler.lost

    @property
    def buffered(self) -> int:
        """Jobs that are here and were not looked at."""
        return len(self._ready)

    # -- iterating -------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Job:
        """The next job. Raises what ended the exchange for good; StopAsyncIteration after `close`."""
        self._given += 1
        if not self._given % YIELD_JOBS:
            await asyncio.sleep(0)
        while not self._ready:
            if self._closing:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            if not self._is_open:
                await self._stands()
                continue
            self._came.clear()
            await self._came.wait()
        job = self._ready.popleft()
        job._begun = asyncio.get_running_loop().time()
        return job

    def _wake(self) -> None:
        self._came.set()

    async def _beat(self) -> None:
        """Keep the leases of what is here; a lease that is lost is noticed when its job is settled."""
        while True:
            await asyncio.sleep((self._visibility_ms or 1_000) / 1000 / HEARTBEAT)
            self._extend_held()

    def _extend_held(self) -> None:
        limit = self._extend_for
        now = asyncio.get_running_loop().time()
        for job in self._held:
            if job._lost:
                continue
            if limit is not None and job._begun is not None and now - job._begun >= limit:
                if job not in self._overdue:
                    self._overdue.add(job)
                    _log.warning(
                        "%r has been worked on for %.0f s: its lease is not extended any more",
                        job,
                        now - job._begun,
                    )
                continue
            job.extend(self._visibility_ms / 1000)

    def _take_visibility(self, visibility_ms: int) -> None:
        """The queue's own may be altered at any time: what is held goes by the new one from here on."""
        if self._asked_visibility_ms or visibility_ms == self._visibility_ms:
            return
        known, self._visibility_ms = self._visibility_ms, visibility_ms
        if known and self._heartbeat is not None and not self._closing:
            self._extend_held()
            self._heartbeat.cancel()
            self._heartbeat = asyncio.ensure_future(self._beat())

    # -- receiving -------------------------------------------------------------------------------------

    def _opened(self, answer: Answer) -> None:
        if isinstance(answer, QueueOpened):
            self._take_visibility(answer.visibility_ms)
        if self._auto_extend and self._heartbeat is None:
            self._heartbeat = asyncio.ensure_future(self._beat())
        # A new exchange starts its count at zero; jobs held here keep their leases and count against the limit.
        self._received_records = self._received_bytes = 0
        self._granted_records = self._granted_bytes = 0
        self._grant()

    def _ended(self, error: FelixError) -> None:
        if not self._closing:
            self._error = error
        self._wake()

    def _receive(self, jobs: Jobs) -> None:
        until = asyncio.get_running_loop().time() + jobs.visibility_ms / 1000
        queue, settler, held, ready = self._queue, self._settler, self._held, self._ready
        received = 0
        for body in jobs.jobs:
            job = Job(queue, settler, body, until)
            job._consumer = self
            size = len(body.payload) + JOB_OVERHEAD_BYTES
            if body.key:
                size += len(body.key)
            if body.headers:
                size += sum(len(name) + len(value) + 8 for name, value in body.headers.items())
            job._size = size
            received += size
            held.add(job)
            ready.append(job)
        self._take_visibility(jobs.visibility_ms)
        self._held_bytes += received
        self._received_bytes += received
        self._received_records += len(jobs.jobs)
        self._wake()

    def _settled(self, job: Job) -> None:
        """A job is off our hands: there is room for another."""
        if job in self._held:
            self._held.discard(job)
            self._overdue.discard(job)
            self._held_bytes -= job._size
            if not self._grant_due and not self._closing:
                self._grant_due = True
                asyncio.get_running_loop().call_soon(self._grant_more)

    def _grant_more(self) -> None:
        self._grant_due = False
        unused = self._granted_records - self._received_records
        room = self._prefetch - len(self._held) - unused
        unused_bytes = self._granted_bytes - self._received_bytes
        room_bytes = self._prefetch_bytes - self._held_bytes - unused_bytes
        if 4 * room >= self._prefetch or 4 * room_bytes >= self._prefetch_bytes or not self._ready:
            self._grant()

    def _grant(self) -> None:
        """Tell the broker how far it may go: a sum, so that a repeated one does no harm."""
        records = self._received_records + max(0, self._prefetch - len(self._held))
        size = self._received_bytes + max(0, self._prefetch_bytes - self._held_bytes)
        if self._closing or (records, size) == (self._granted_records, self._granted_bytes):
            return
        self._granted_records = max(records, self._granted_records)
        self._granted_bytes = max(size, self._granted_bytes)
        self._exchange.tell(Grant(self._granted_records, self._granted_bytes, self._asked_visibility_ms))


class _Listener:
    """A consumer's listener for the events of its exchange (felix.exchange.Listener)."""

    def __init__(self, consumer: QueueConsumer) -> None:
        self._consumer = consumer

    def opened(self, answer: Answer) -> None:
        self._consumer._opened(answer)

    def lost(self, error: FelixError) -> None:
        """It is opened again; leases outlast it."""

    def ended(self, error: FelixError) -> None:
        self._consumer._ended(error)

    def event(self, event: Any) -> None:
        if isinstance(event, Jobs):
            self._consumer._receive(event)

    def frame(self, frame: Frame) -> None:
        """A queue delivers in replies."""


class Publishing(Protocol):
    """The part of a stream that a queue uses: `felix.client.Stream`."""

    async def publish(
        self, payload: Payload, *, key: RecordKey | None = None, headers: Headers | None = None
    ) -> int: ...

    async def publish_many(
        self, payloads: Sequence[Payload], keys: Sequence[RecordKey | None] | None = None
    ) -> list[int]: ...

    async def _join(
        self, payload: Payload, *, key: RecordKey | None = None, headers: Headers | None = None
    ) -> asyncio.Future[int]: ...


class Region(Protocol):
    """The part of its client that a queue uses: `felix.client.RegionClient`."""

    @property
    def connection(self) -> RegionConnection: ...

    def stream(self, name: StreamName) -> Publishing: ...

    async def alter_stream(self, name: StreamName, *, queue: QueueChange) -> StreamState: ...

    async def delete_stream(self, name: StreamName) -> str: ...


class Queue:
    """One queue of a region. Cheap to make; made by `RegionClient.queue`, which gives the same one for the same name."""

    def __init__(self, client: Region, name: StreamName) -> None:
        self._client = client
        self.name = name
        self._calls: Exchange | None = None
        self._settler = _Settler(self._call, name)

    def __repr__(self) -> str:
        return f"Queue({str(self.name)!r})"

    def _exchange(self, listener: _Listener | None = None, worker: str = "") -> Exchange:
        named = worker or self._client.connection.runtime.process()
        return Exchange(
            self._client.connection,
            lambda: OpenQueue(str(self.name), named),
            decode_reply,
            listener,
            stream=self.name,
        )

    async def _call(
        self,
        message: Any,
        *,
        again: bool = True,
        timeout_s: float | None = None,
        undo: Callable[[Any], object] | None = None,
    ) -> Any:
        held = self._calls
        if held is None or held.is_over:
            held = self._calls = self._exchange()
            # It stays where whoever opens it is cancelled: other calls wait for it, too.
            await held.open()
        return await held.call(message, again=again, timeout_s=timeout_s, undo=undo)

    # -- putting ---------------------------------------------------------------------------------------

    async def put(
        self,
        payload: Payload,
        *,
        key: RecordKey | None = None,
        delay: float = 0,
        deliver_at: datetime | None = None,
        priority: int | None = None,
        headers: Headers | None = None,
    ) -> int:
        """Put one record in and return its offset, once it is as durable as the queue.

        `delay`: seconds from its arrival until a worker may have it; `deliver_at`: not before this time (with a time zone).
        `priority`: 0 to 9, 4 where nothing is said; of the records that are ready together the highest goes first. It is published
        like any record (`Stream.publish`), so it is there once, however often the connection breaks. Raises as that does.
        """
        asked = job_headers(headers, delay=delay, deliver_at=deliver_at, priority=priority)
        return await self._client.stream(self.name).publish(payload, key=key, headers=asked)

    async def put_many(
        self,
        payloads: Sequence[Payload],
        keys: Sequence[RecordKey | None] | None = None,
        *,
        delay: float = 0,
        deliver_at: datetime | None = None,
        priority: int | None = None,
        headers: Headers | None = None,
    ) -> list[int]:
        """Put many records in, and return their offsets in the order given once all are durable. The rest counts for each."""
        asked = job_headers(headers, delay=delay, deliver_at=deliver_at, priority=priority)
        stream = self._client.stream(self.name)
        if asked is None:
            return await stream.publish_many(payloads, keys)
        each = keys if keys is not None else [None] * len(payloads)
        waiting = [
            await stream._join(payload, key=key, headers=asked)
            for payload, key in zip(payloads, each, strict=True)
        ]
        return list(await asyncio.gather(*waiting))

    # -- working ---------------------------------------------------------------------------------------

    def consume(
        self,
        *,
        visibility: float | None = None,
        prefetch: int = PREFETCH_DEFAULT,
        prefetch_bytes: int = PREFETCH_BYTES_DEFAULT,
        auto_extend: bool = True,
        extend_for: float | None = None,
        worker: str = "",
    ) -> QueueConsumer:
        """Jobs as they become ready: an async iterator that never ends by itself.

        `visibility`: seconds that a lease lasts (None: as the queue says). `prefetch`: jobs that may be here unsettled, looked at
        or not. With `auto_extend` the leases of all of them are extended for as long as this consumer lives; without, a job that
        takes longer than its visibility goes to another worker. `extend_for`: a job that is not settled so many seconds after it was
        handed out is not extended any more, so that one that hangs goes to another worker, too. `worker`: a name for people, as
        `describe` and `peek` show it; host and process id where nothing is said. Raises RequestError(CONFIG_INVALID).
        """
        if len(worker) > NAME_CHARS_MAX:
            raise RequestError(
                f"A worker's name of {len(worker)} characters; {NAME_CHARS_MAX} are allowed.",
                code=Code.CONFIG_INVALID,
            )
        visibility_ms = _ms(visibility)
        if visibility_ms and not VISIBILITY_MS_MIN <= visibility_ms <= VISIBILITY_MS_MAX:
            raise RequestError(
                f"A visibility of {visibility} s; {VISIBILITY_MS_MIN / 1000:g} to {VISIBILITY_MS_MAX // 1000} s are allowed.",
                code=Code.CONFIG_INVALID,
            )
        if extend_for is not None and not extend_for > 0:
            raise RequestError(f"Leases extended for {extend_for} s; more than 0.", code=Code.CONFIG_INVALID)
        if not 1 <= prefetch <= PREFETCH_MAX or prefetch_bytes < PREFETCH_BYTES_MIN:
            raise RequestError(
                f"A prefetch of {prefetch} jobs and {prefetch_bytes} bytes; 1 to {PREFETCH_MAX} jobs and at least "
                f"{PREFETCH_BYTES_MIN} bytes are allowed.",
                code=Code.CONFIG_INVALID,
            )
        return QueueConsumer(
            self,
            visibility_ms=visibility_ms,
            prefetch=prefetch,
            prefetch_bytes=prefetch_bytes,
            auto_extend=auto_extend,
            extend_for=extend_for,
            worker=worker,
        )

    async def lease(
        self,
        records: int = 1,
        *,
        wait: float = 0,
        visibility: float | None = None,
        max_bytes: int = LEASE_BYTES_MAX,
    ) -> list[Job]:
        """Up to `records` jobs, of together `max_bytes`; waits up to `wait` seconds for the first. An empty list where none came.

        A lease whose answer is lost with the connection runs out by itself; jobs that come after the call was cancelled are given back
        unseen. Raises RequestError, UnavailableError.
        """
        loop = asyncio.get_running_loop()
        limit = loop.time() + wait
        records = min(max(1, records), LEASE_RECORDS_MAX)
        while True:
            left_s = max(0.0, limit - loop.time())
            wait_s = min(left_s, WAIT_S_MAX)
            try:
                found = await self._call(
                    Lease(records, max_bytes, round(wait_s * 1000), _ms(visibility)),
                    again=False,
                    timeout_s=wait_s + self._client.connection.request_timeout_s,
                    undo=self._give_back,
                )
            except UnavailableError:
                if loop.time() >= limit:
                    raise
                await asyncio.sleep(min(0.1, left_s))
                continue
            until = loop.time() + found.visibility_ms / 1000
            jobs = [Job(self, self._settler, body, until) for body in found.jobs]
            if jobs or loop.time() >= limit:
                return jobs

    def _give_back(self, found: Jobs) -> None:
        """Jobs that nobody waits for any more."""
        for body in found.jobs:
            Job(self, self._settler, body, 0.0).release()

    async def settle(
        self, verb: str, jobs: Sequence[Held], *, delay: float | None = None, reason: str = ""
    ) -> list[tuple[int, int]]:
        """`ack`, `nack`, `release` or `extend` jobs by shard, offset and token, as another process leased them. Returns shard and
        offset of those whose leases are lost. `delay`, in seconds: of a nack; of an extension, for how long."""
        number = _ms(delay) if verb == "extend" else -1 if delay is None else _ms(delay)
        settled: Settled = await self._call(_message((verb, number, reason), list(jobs)))
        return settled.lost

    async def flush(self) -> None:
        """Return once everything said of jobs that `lease` gave is answered."""
        await self._settler.flush()

    # -- looking and managing --------------------------------------------------------------------------

    async def describe(self) -> QueueState:
        """How many records are ready, leased, delayed, dead; how old the oldest is; rates; who works."""
        found: QueueState = await self._call(Describe())
        return found

    async def peek(self, records: int = 10) -> list[PeekedJob]:
        """The first records that are not done, and what they are, without leasing them. Of a leased one: since when, who has it, and
        the token, with which `settle` can end the lease of a worker that hangs."""
        found: Peeked = await self._call(Peek(records))
        return found.jobs

    async def redrive(self, records: int = 0) -> int:
        """Bring dead letters back into the queue, oldest first, up to `records` (0: all there are); attempts start at zero.
        Returns how many.
        """
        found: Counted = await self._call(Redrive(records), again=False)
        return found.records

    async def purge(self) -> int:
        """Everything in the queue is done, also what workers hold. How many records that were."""
        found: Counted = await self._call(Purge(), again=False)
        return found.records

    async def alter(
        self,
        *,
        visibility: float | None = None,
        attempts: int | None = None,
        retry: float | None = None,
        retry_max: float | None = None,
        dead_letter: str | None = None,
        ordered_by_key: bool | None = None,
    ) -> StreamState:
        """Change the queue's settings while workers go on; what is None stays. As `RegionClient.create_queue` has them.

        Leases and waits that began keep the time that they were given; attempts so far count against the new bound, and dead
        letters that have landed stay where they are. `dead_letter` empty: NAME.dead again. `ordered_by_key` cannot be
        another than it is. Raises RequestError: FORBIDDEN, CONFIG_INVALID, UNSUPPORTED.
        """
        retries = RetriesChange(attempts, _change_ms(retry), _change_ms(retry_max), dead_letter)
        change = QueueChange(
            _change_ms(visibility), retries if retries != RetriesChange() else None, ordered_by_key
        )
        return await self._client.alter_stream(self.name, queue=change)

    async def delete(self) -> None:
        """Delete the queue and its records; its dead letters stay."""
        await self._client.delete_stream(self.name)

    def close(self) -> None:
        """End the exchange that calls go over; the next call opens another. Idempotent."""
        if self._calls is not None:
            self._calls.close()
            self._calls = None


def _ms(seconds: float | None) -> int:
    return 0 if seconds is None else milliseconds(seconds)


def _change_ms(seconds: float | None) -> int | None:
    return None if seconds is None else _ms(seconds)


def job_headers(
    headers: Headers | None,
    *,
    delay: float = 0,
    deliver_at: datetime | None = None,
    priority: int | None = None,
) -> dict[str, bytes] | None:
    """The record's headers with those that set delay and priority; None if there are none. Raises RequestError(INVALID)."""
    asked = dict(headers) if headers else {}
    if not 0 <= delay < inf or (priority is not None and not 0 <= priority <= 9):
        raise RequestError(
            f"A delay of {delay} s and a priority of {priority}; 0 or more, and 0 to 9, are allowed."
        )
    if delay:
        asked[DELAY_HEADER] = b"%d" % max(1, round(delay * 1000))
    if deliver_at is not None:
        if deliver_at.tzinfo is None:
            raise RequestError("deliver_at has no time zone.", hint="Use datetime.now(UTC) + timedelta(…).")
        asked[DELIVER_AT_HEADER] = b"%d" % max(0, round(deliver_at.timestamp() * 1000))
    if priority is not None:
        asked[PRIORITY_HEADER] = b"%d" % priority
    return asked or None


def queue_views(
    *,
    visibility: float = 30,
    attempts: int = 5,
    retry: float = 1,
    retry_max: float = 300,
    dead_letter: str = "",
    ordered_by_key: bool = False,
) -> Views:
    """The settings that make a stream a queue; see `RegionClient.create_queue`."""
    retries = Retries(attempts, milliseconds(retry), milliseconds(retry_max), dead_letter)
    return Views(queue=QueueSettings(milliseconds(visibility), retries, ordered_by_key))
