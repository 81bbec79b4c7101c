"""The base of the synchronous client: one thread with one event loop per client, and calls into it.

`felix.sync` is generated from the asynchronous classes (sdk/sync_face.py); what cannot be derived from them stands here: how a
client begins and ends, iterators, and the publisher that gathers records in the caller's thread. Applications import
`felix.sync`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar

from felix import cache, client, consumer, queue, subscription, transaction
from felix.batch import Headers, NewRecord, Record
from felix.errors import Code, FelixError, RequestError
from felix.notebook import Rows
from felix.payload import MessageId, Payload, RecordKey, key_bytes, paired, payload_bytes, with_message_id
from felix.publisher import Publisher
from felix.publisher_core import PublishProgress, Receipt
from felix.tasks import AGAIN_S, end_tasks

LEAVE_S: Final = 1.0
"""How long who is interrupted waits until what had come for him is kept: an event loop iteration."""
STOP_TIMEOUT_S: Final = 5.0
"""How long `close` waits for the background thread."""

T = TypeVar("T")
P = ParamSpec("P")


class Background:
    """A thread that runs an event loop, and calls into it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_over = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="felix-sync", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(_end_all())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self._is_over = True
            self.loop.close()

    @property
    def is_alive(self) -> bool:
        """Not asked of the thread: Python takes one for ended whose `is_alive` is interrupted. A child of `os.fork` has no such thread."""
        return not self._is_over and self._process == os.getpid()

    def call(self, work: Coroutine[Any, Any, T], *, unheard: Callable[[T], object] | None = None) -> T:
        """Run it on the loop and wait. Raises what it raises. `unheard` is called, on the loop, with a result that comes as the caller is interrupted."""
        try:
            if threading.current_thread() is self._thread or _loop_would_wait():
                raise RequestError(
                    "felix.sync would block the event loop that runs in this thread.",
                    code=Code.STATE,
                    hint="Use `felix.connect` there, with await.",
                )
            if not self.is_alive:
                raise RequestError("This client is closed.", code=Code.STATE)
        except RequestError:
            work.close()
            raise
        come: list[T] = []
        has_left = False
        task: asyncio.Task[T] | None = None
        told = threading.Event()

        async def carry_out() -> T:
            nonlocal task
            if has_left:
                work.close()
                raise asyncio.CancelledError
            task = asyncio.current_task()
            result = await work
            if has_left and unheard is not None:
                unheard(result)
            come.append(result)
            return result

        def leave() -> None:
            nonlocal has_left
            has_left = True
            if task is not None:
                task.cancel()
            if unheard is not None:
                for result in come:
                    unheard(result)
            told.set()

        try:
            # Interrupted in here, too, it may be on its way already.
            return asyncio.run_coroutine_threadsafe(carry_out(), self.loop).result()
        except BaseException:
            if task is not None and task.done() and not come:
                raise  # what it raised itself
            with suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(leave)
                told.wait(LEAVE_S)
            raise

    def run(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call a plain function on the loop. Raises what it raises."""

        async def run() -> T:
            return function(*arguments, **options)

        return self.call(run())

    def wait(self, function: Callable[P, Awaitable[T]], *arguments: P.args, **options: P.kwargs) -> T:
        """Call a function on the loop that gives a future, and wait for that. Raises what it raises."""

        async def wait() -> T:
            return await function(*arguments, **options)

        return self.call(wait())

    def collect(
        self, function: Callable[P, AsyncIterator[T]], *arguments: P.args, **options: P.kwargs
    ) -> Rows[T]:
        """All that an asynchronous iterator gives, in memory."""

        async def collect() -> Rows[T]:
            return Rows([each async for each in function(*arguments, **options)])

        return self.call(collect())

    def opened(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """The function's result, opened. Raises what its `open` raises."""

        async def make() -> T:
            made: Any = function(*arguments, **options)
            await made.open()
            return made  # type: ignore[no-any-return]

        def close(made: Any) -> None:
            self.loop.create_task(_closed(made))

        return self.call(make(), unheard=close)

    def stop(self) -> None:
        if self.is_alive:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(STOP_TIMEOUT_S)


async def _end_all() -> None:
    """What was given up, as by Ctrl-C while it connected, is cancelled already and has still to end; all else is cancelled."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        if not task.cancelling():
            task.cancel()
    if left:
        await asyncio.wait(left, timeout=AGAIN_S)
    await end_tasks(*left)


def _loop_would_wait() -> bool:
    """Whether a loop runs in this thread that is not one of ipykernel's own, on which a notebook's cells run."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return False
    application = sys.modules.get("ipykernel.kernelapp")
    if application is None or not application.IPKernelApp.initialized():
        return True
    # A kernel's main shell has its loop; a subshell is a thread of ipykernel's with a loop of its own.
    shells = (application.IPKernelApp.instance().kernel, threading.current_thread())
    return not any(
        getattr(getattr(shell, "io_loop", None), "asyncio_loop", None) is running for shell in shells
    )


class Blocking(Generic[T]):
    """An object of the asynchronous client, called from any thread."""

    __slots__ = ("_background", "_inner")

    def __init__(self, background: Background, inner: T) -> None:
        self._background = background
        self._inner = inner


def inner_of(argument: Any) -> Any:
    """The asynchronous object behind an argument; any other argument as it is."""
    return argument._inner if isinstance(argument, Blocking) else argument


class _Closing(Blocking[T]):
    """Used as `with`: closed at its end."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it. Idempotent."""
        if self._background.is_alive:
            inner: Any = self._inner
            self._background.call(_closed(inner))


async def _closed(inner: Any) -> None:
    closing = inner.close()
    if closing is not None:
        await closing


class BlockingRegion(_Closing[client.RegionClient]):
    """How a client of a region ends."""

    __slots__ = ()

    def close(self) -> None:
        """End the session and the background thread. Idempotent."""
        if self._background.is_alive:
            try:
                self._background.call(self._inner.close())
            finally:
                self._background.stop()


class BlockingTransaction(Blocking[transaction.Transaction]):
    """A transaction as `with`: begun, and committed or aborted at its end."""

    __slots__ = ()

    def __enter__(self) -> Self:
        self._background.call(self._inner.begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._background.call(self._inner.__aexit__(kind, error, trace))


GatheredRecord = tuple[bytes, bytes | None, Headers | None]


class GatheringPublisher(Blocking[Publisher]):
    """Gathers records in the caller's thread, and hands them over by the batch; one thread at a time.

    A record leaves when its batch is full, once `linger_ms` have passed since the first one of the batch, or with
    `flush` or `close`. Without `linger_ms` no time makes it leave.
    """

    __slots__ = (
        "_batch_bytes",
        "_batch_records",
        "_failed",
        "_gathered_bytes",
        "_giving",
        "_linger_s",
        "_lock",
        "_records",
        "_timer",
    )

    def __init__(
        self,
        background: Background,
        inner: Publisher,
        *,
        linger_ms: float,
        batch_bytes: int,
        batch_records: int,
    ) -> None:
        super().__init__(background, inner)
        self._linger_s = linger_ms / 1000
        self._batch_bytes = batch_bytes
        self._batch_records = batch_records
        # The linger's timer takes what is gathered from the loop's thread.
        self._lock = threading.Lock()
        self._records: list[GatheredRecord] = []
        self._gathered_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._failed: BaseException | None = None
        self._giving = asyncio.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._take()
            self._background.loop.call_soon_threadsafe(self._inner.abort)

    @property
    def progress(self) -> PublishProgress:
        """How far it has come; what is still gathered here does not count as given."""
        return self._background.run(lambda: self._inner.progress)

    def send(
        self,
        payload: Payload,
        key: RecordKey | None = None,
        headers: Headers | None = None,
        *,
        message_id: MessageId | None = None,
    ) -> None:
        """Gather one record; hands over, and waits for room, when a batch is full. Raises as `Publisher.send`, then: this record is not given, and what was
        gathered before stays so."""
        if message_id is not None:
            headers = with_message_id(headers, message_id)
        record = (payload_bytes(payload), key_bytes(key) if key else None, headers)
        with self._lock:
            first, size = not self._records, self._gathered_bytes + len(record[0])
            full = size >= self._batch_bytes or len(self._records) + 1 >= self._batch_records
            if not full:
                self._records.append(record)
                self._gathered_bytes = size
        if full:
            self._background.call(self._send_full(record))
        elif first and self._linger_s:
            self._background.loop.call_soon_threadsafe(self._begin_linger)

    def send_many(self, payloads: Iterable[Payload], keys: Iterable[RecordKey | None] | None = None) -> None:
        """Gather many records."""
        for payload, key in paired(payloads, keys):
            self.send(payload, key)

    def publish(
        self,
        payload: Payload,
        key: RecordKey | None = None,
        headers: Headers | None = None,
        *,
        shard: int | None = None,
        expected_offset: int | None = None,
        message_id: MessageId | None = None,
    ) -> int:
        """As `felix.publisher.Publisher.publish`, behind what is gathered."""
        return self._background.call(
            self._behind(
                lambda: self._inner.publish(
                    payload, key, headers, shard=shard, expected_offset=expected_offset, message_id=message_id
                )
            )
        )

    def publish_many(
        self, payloads: Sequence[Payload], keys: Sequence[RecordKey | None] | None = None
    ) -> list[int]:
        """As `felix.publisher.Publisher.publish_many`, behind what is gathered."""
        return self._background.call(self._behind(lambda: self._inner.publish_many(payloads, keys)))

    def publish_batch(
        self, records: Sequence[NewRecord], shard: int | None = None, *, expected_offset: int | None = None
    ) -> Receipt:
        """As `felix.publisher.Publisher.publish_batch`, behind what is gathered."""
        return self._background.call(
            self._behind(lambda: self._inner.publish_batch(records, shard, expected_offset=expected_offset))
        )

    async def _behind(self, work: Callable[[], Awaitable[T]]) -> T:
        await self._give_all()
        return await work()

    async def _give_all(self) -> None:
        """The next call raises the error of a record that cannot be: those behind it go on."""
        while self._records or self._giving.locked():
            try:
                await self._give()
            except Exception as error:
                self._failed = self._failed or error

    def flush(self) -> None:
        """Return once all is acknowledged. Raises as `Publisher.flush`; what is gathered is given all the same."""
        self._background.call(self._ended_by(self._inner.flush))

    def close(self) -> None:
        """Flush and end the publish stream."""
        self._background.call(self._ended_by(self._inner.close))

    async def _ended_by(self, end: Callable[[], Awaitable[None]]) -> None:
        await self._give_all()
        try:
            await end()
        except FelixError as error:
            failed, self._failed = self._failed, None
            if failed is None:
                raise
            raise failed from error
        # Taken only now: where the caller was interrupted while it waited, the next call raises it.
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _take(self) -> list[GatheredRecord]:
        with self._lock:
            records, self._records, self._gathered_bytes = self._records, [], 0
        return records

    def _put_back(self, records: list[GatheredRecord]) -> None:
        with self._lock:
            self._records[:0] = records
            self._gathered_bytes += sum(len(payload) for payload, _, _ in records)
        if records and self._linger_s:
            self._begin_linger()

    async def _send_full(self, last: GatheredRecord) -> None:
        """What is gathered, and the record that makes a batch of it full. Raises the error of an earlier batch before anything is given."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        await self._inner._check()
        await self._give()
        await self._inner._give(*last)

    async def _give(self) -> None:
        """What is gathered. Raises where a record cannot be: it is left out, and those behind it stay gathered. Where nothing more can be given, nothing stays.

        It goes on where the caller was interrupted: what was taken to be given is nowhere else."""
        giving = self._background.loop.create_task(self._give_gathered())
        try:
            await asyncio.shield(giving)
        except asyncio.CancelledError:
            giving.add_done_callback(self._given)
            raise

    async def _give_gathered(self) -> None:
        # In order: the linger may have ended while a full buffer is waited for.
        async with self._giving:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            records = self._take()
            for at, record in enumerate(records):
                try:
                    await self._inner._give(*record)
                except Exception:
                    if not self._inner.is_over:
                        self._put_back(records[at + 1 :])
                    raise

    def _begin_linger(self) -> None:
        if self._timer is None:
            self._timer = self._background.loop.call_later(self._linger_s, self._linger_ended)

    def _linger_ended(self) -> None:
        self._timer = None
        self._background.loop.create_task(self._give_gathered()).add_done_callback(self._given)

    def _given(self, task: asyncio.Task[None]) -> None:
        """The next call raises the error of a record that could not be given."""
        if not task.cancelled() and task.exception() is not None:
            self._failed = self._failed or task.exception()


class RecordIterator(_Closing[subscription.Subscription]):
    """An iterator of records; one batch is fetched from the background loop at a time. One thread at a time.

    What comes as the caller is interrupted (Ctrl-C) is what the next call gives.
    """

    __slots__ = ("_unheard",)

    def __init__(self, background: Background, inner: subscription.Subscription) -> None:
        super().__init__(background, inner)
        self._unheard: subscription.ReceivedBatch | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        while (record := self._inner._next_in_hand()) is None:
            self._hold_next(None)
        return record

    def _hold_next(self, timeout_s: float | None) -> None:
        async def hold() -> None:
            if self._inner._records is not None:
                return  # it came as an earlier call was interrupted
            async with asyncio.timeout(timeout_s):
                self._inner._hold(await self._inner.next_batch())

        self._background.call(hold())

    def batches(self) -> Iterator[subscription.ReceivedBatch]:
        """Whole batches: the cheapest way per record."""

        async def take() -> subscription.ReceivedBatch | None:
            kept = self._kept()
            if kept is not None:
                return kept
            try:
                return await self._inner._next_or_stop()
            except StopAsyncIteration:
                return None

        while (batch := self._background.call(take(), unheard=self._keep)) is not None:
            yield batch

    def _keep(self, batch: subscription.ReceivedBatch | None) -> None:
        """On the loop: this one was given to nobody."""
        if batch is not None:
            self._unheard = batch
            self._inner._hold(batch)  # so that `positions` do not count it

    def _kept(self) -> subscription.ReceivedBatch | None:
        """What was kept, where none of its records was given out since."""
        batch, self._unheard = self._unheard, None
        if batch is None or self._inner._records is None or self._inner._given is not None:
            return None
        self._inner._records = None
        return batch

    def next_batch(self, timeout_s: float | None = None) -> subscription.ReceivedBatch:
        """The next batch. Raises TimeoutError where none came within `timeout_s` seconds (None: waits)."""

        async def fetch() -> subscription.ReceivedBatch:
            kept = self._kept()
            if kept is not None:
                return kept
            async with asyncio.timeout(timeout_s):
                return await self._inner.next_batch()

        return self._background.call(fetch(), unheard=self._keep)

    def take(self, records: int, timeout_s: float | None = None) -> Rows[Record]:
        """The next `records` records; fewer where the next batch did not come within `timeout_s` seconds (None: waits)."""
        found: Rows[Record] = Rows()
        while len(found) < records:
            if (record := self._inner._next_in_hand()) is not None:
                found.append(record)
                continue
            try:
                self._hold_next(timeout_s)
            except TimeoutError:
                break
        return found

    @property
    def gaps(self) -> list[subscription.Gap]:
        """The newest gaps."""
        return list(self._inner.gaps)


class ChangeIterator(_Closing[cache.Watch]):
    """An iterator of changes; one message is fetched from the background loop at a time. One thread at a time."""

    __slots__ = ()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> cache.Change:
        async def hold() -> None:
            if not self._inner._in_hand:  # else it came as an earlier call was interrupted
                await self._inner._hold_next()

        while (change := self._inner._next_in_hand()) is None:
            self._background.call(hold())
        return change

    def changes(self, timeout_s: float | None = None) -> list[cache.Change]:
        """The changes of the next message. Raises TimeoutError where none came within `timeout_s` seconds (None: waits)."""

        before: cache.Position | None = None

        async def fetch() -> list[cache.Change]:
            nonlocal before
            before = self._inner.position
            async with asyncio.timeout(timeout_s):
                return await self._inner.changes()

        return self._background.call(fetch(), unheard=lambda found: self._inner._hold(found, before))


class BlockingMirror(_Closing[cache.Mirror]):
    """Keys and values of a cache in this process, as `felix.cache.Mirror`: reads cost nothing and never wait."""

    __slots__ = ()

    def __getitem__(self, key: cache.Key) -> bytes:
        return self._inner[key]

    def __contains__(self, key: object) -> bool:
        return key in self._inner

    def __iter__(self) -> Iterator[bytes]:
        return self._background.run(lambda: iter(list(self._inner)))

    def __len__(self) -> int:
        return self._background.run(lambda: len(self._inner))

    def get(self, key: cache.Key, default: T | None = None) -> bytes | T | None:
        """The value of a key; `default` where there is none."""
        return self._inner.get(key, default)  # type: ignore[arg-type]


class JobIterator(_Closing[queue.QueueConsumer]):
    """An iterator of jobs. One thread at a time; a job may be settled from any."""

    __slots__ = ()

    def _next(self, timeout_s: float | None) -> queue.Job | None:
        """The next job; None after `close`. Raises TimeoutError."""

        async def fetch() -> queue.Job | None:
            async with asyncio.timeout(timeout_s):
                return await anext(self._inner, None)

        # What nobody has seen is given back at once.
        return self._background.call(fetch(), unheard=lambda job: job and job.release())


class BlockingJob(Blocking[queue.Job]):
    """One leased job as `with`: acknowledged at its end, given back where it raised."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._background.call(self._inner.__aexit__(kind, error, trace))


class BlockingConsumer(_Closing[consumer.Consumer]):
    """A consumer of a durable subscription. One thread at a time iterates. What comes as the caller is interrupted is what the next call gives."""

    __slots__ = ("_unheard",)

    def __init__(self, background: Background, inner: consumer.Consumer) -> None:
        super().__init__(background, inner)
        self._unheard: consumer.ConsumerRecord | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._background.is_alive:
            self._background.call(self._inner.__aexit__(kind, error, trace))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> consumer.ConsumerRecord:
        record = self.next()
        if record is None:
            raise StopIteration
        return record

    def next(self, timeout_s: float | None = None) -> consumer.ConsumerRecord | None:
        """The next record; None once the consumer is closed. Raises TimeoutError where none came within `timeout_s` seconds."""

        async def take() -> consumer.ConsumerRecord | None:
            kept, self._unheard = self._unheard, None
            if kept is not None and self._inner._is_current(kept.shard, kept.generation):
                self._inner._cursor.record = kept
                return kept
            async with asyncio.timeout(timeout_s):
                return await anext(self._inner, None)

        return self._background.call(take(), unheard=self._keep)

    def _keep(self, record: consumer.ConsumerRecord | None) -> None:
        """On the loop: this one was given to nobody, and does not count as handed out."""
        self._unheard, self._inner._cursor.record = record, None

    def batches(self) -> Iterator[consumer.ConsumerBatch]:
        """Whole batches: the cheapest way per record. With `ack="auto"` the one before counts as done."""
        found = self._inner.batches()

        async def take() -> consumer.ConsumerBatch | None:
            return await anext(found, None)

        def keep(batch: consumer.ConsumerBatch | None) -> None:
            self._inner._cursor.batch = None
            if batch is not None:
                self._inner._parts.appendleft(batch)

        while (batch := self._background.call(take(), unheard=keep)) is not None:
            yield batch

    @property
    def gaps(self) -> list[subscription.Gap]:
        """The newest gaps: records that were gone before they could be delivered."""
        return list(self._inner.gaps)
