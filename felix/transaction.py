"""Transaction: records for several streams, and acknowledgements, that become visible together or not at all.

::

    async with region.transaction() as tx:
        await tx.publish("acme/payments/orders", b"...", key=b"7")
        await tx.publish("acme/payments/audit", b"...")

Leaving the block commits; leaving it with an exception aborts. Records are collected here, sent to the broker in batches and
held there, in no log, until the commit. So no reader ever sees a part of it, and no reader waits for it.

Invariants:
- a commit whose answer was lost is asked again under the same id, and is carried out once;
- what was not staged for certain is asked to be again under its number before anything else is, whoever was told of an error meanwhile: a transaction is
  never committed without a part of it;
- after `commit` returned everything can be read; after it raised TRANSACTION_ABORTED or TRANSACTION_FENCED nothing of it is in
  any stream; with TRANSACTION_UNKNOWN, TIMEOUT or DISCONNECTED the outcome is unknown, and another `commit` returns it if the
  broker still remembers it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgspec

from felix.batch import (
    COMPRESS_LEVEL_MAX,
    MESSAGE_ID_HEADER,
    RECORDS_MAX,
    Headers,
    NewRecord,
    encode_batch,
    encode_headers,
)
from felix.connection import RegionConnection
from felix.consumer import Consumer, ConsumerBatch, ConsumerRecord
from felix.consumer_messages import RANGES_MAX, ShardAck, SubscriptionAcks
from felix.errors import Code, FelixError, RequestError
from felix.exchange import Exchange
from felix.messages import OpenTransactions
from felix.names import StreamName, shard_for_key
from felix.payload import (
    RECORD_OVERHEAD_BYTES,
    MessageId,
    Payload,
    RecordKey,
    key_bytes,
    payload_bytes,
    with_message_id,
)
from felix.provenance import check_own
from felix.queue import Job
from felix.queue_messages import RUNS_MAX, Held
from felix.ranges import RangeSet
from felix.settings import TRANSACTION_TIMEOUT_S
from felix.transaction_messages import (
    ID_BYTES,
    TRANSACTIONS_STREAM,
    Abort,
    Begin,
    Begun,
    Commit,
    Committed,
    Fence,
    FencedAt,
    QueueAcks,
    Resolve,
    Resolved,
    Stage,
    StageAcknowledgement,
    decode_reply,
)

STAGE_BYTES: Final = 512 * 1024
"""A shard's records are sent to the broker once there are so many bytes of them: 16 batches are the largest transaction."""
_STAGED_RECORD_BYTES_MAX: Final = (1 << 20) - 8_192


class Transactions:
    """The exchange that a client's transactions share, and the epochs of its transactional ids."""

    def __init__(self, connection: RegionConnection) -> None:
        self._connection = connection
        self._exchange: Exchange | None = None
        self._opening: asyncio.Task[Any] | None = None
        self._epochs: dict[str, asyncio.Task[int]] = {}

    def new_id(self) -> bytes:
        return self._connection.runtime.random.randbytes(ID_BYTES)

    async def call(self, message: Any, timeout_s: float | None = None) -> Any:
        """One call; every one may be asked again."""
        exchange = await self._open()
        return await exchange.call(message, again=True, timeout_s=timeout_s)

    async def _open(self) -> Exchange:
        """The exchange, opened by the first who asks; where that failed, or it has ended since, by the next one."""
        opening, exchange = self._opening, self._exchange
        failed = (
            opening is not None
            and opening.done()
            and (opening.cancelled() or opening.exception() is not None)
        )
        if exchange is None or opening is None or failed or exchange.is_over:
            if exchange is not None:
                exchange.close()
            exchange = self._exchange = Exchange(
                self._connection, OpenTransactions, decode_reply, stream=TRANSACTIONS_STREAM
            )
            opening = self._opening = asyncio.ensure_future(exchange.open())
        await asyncio.shield(opening)
        return exchange

    async def epoch(self, transactional_id: str) -> int:
        """Of this client as an instance of the id, taken with the first transaction under it."""
        task = self._epochs.get(transactional_id)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._epochs[transactional_id] = asyncio.ensure_future(self._fence(transactional_id))
        return await asyncio.shield(task)

    async def _fence(self, transactional_id: str) -> int:
        answer = await self.call(Fence(transactional_id))
        assert isinstance(answer, FencedAt)
        return answer.epoch

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()


class TransactionRecord:
    """A record of a transaction. `offset` once it is committed; -1 where it is there and the broker does not know where."""

    __slots__ = ("_offset", "shard", "stream")

    def __init__(self, stream: StreamName, shard: int) -> None:
        self.stream = stream
        self.shard = shard
        self._offset: int | None = None

    @property
    def offset(self) -> int:
        """Raises RequestError(STATE) before the commit."""
        if self._offset is None:
            raise RequestError(
                "The transaction is not committed: its records have no offsets.", code=Code.STATE
            )
        return self._offset


class _Accumulator:
    """The records collected for one shard."""

    __slots__ = ("bytes", "handles", "records")

    def __init__(self) -> None:
        self.records: list[NewRecord] = []
        self.handles: list[TransactionRecord] = []
        self.bytes = 0


class _Waiting(NamedTuple):
    """What the broker is to stage, by the number that comes next."""

    message: Callable[[int], Stage | StageAcknowledgement]
    handles: list[TransactionRecord] | None
    """of its records; None of acknowledgements"""


class _Target(NamedTuple):
    """A stream as the transaction knows it."""

    shards: int
    incarnation: bytes


class Transaction:
    """One transaction. Made by `RegionClient.transaction`; used as `async with`, or `begin`, then `commit` or `abort`."""

    def __init__(
        self,
        transactions: Transactions,
        *,
        timeout_s: float = TRANSACTION_TIMEOUT_S,
        transactional_id: str = "",
        compress: int = 0,
    ) -> None:
        if not 0.001 <= timeout_s <= 86_400:
            raise RequestError(
                f"A timeout of {timeout_s} s; 0.001 to 86400 are possible.", code=Code.CONFIG_INVALID
            )
        if not 0 <= compress <= COMPRESS_LEVEL_MAX:
            raise RequestError(
                f"compress is {compress}; 0 to {COMPRESS_LEVEL_MAX}.", code=Code.CONFIG_INVALID
            )
        self.id = transactions.new_id()
        self._transactions = transactions
        self._timeout_s = timeout_s
        self._transactional_id = transactional_id
        self._compress = compress
        self._begun_ms: int | None = None
        self._targets: dict[StreamName, _Target] = {}
        self._accumulators: dict[tuple[StreamName, int], _Accumulator] = {}
        self._unkeyed: dict[StreamName, int] = {}
        self._waiting: deque[_Waiting] = deque()
        self._staged = 0
        self._batches: list[list[TransactionRecord]] = []
        self._records: list[TransactionRecord] = []
        self._jobs: dict[StreamName, list[Job]] = {}
        self._left: list[Job] = []
        self._consumed: dict[tuple[str, str], dict[tuple[int, int], RangeSet]] = {}
        self._sending = asyncio.Lock()
        self._over = False
        self._asked = False

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._over:
            return
        if kind is None:
            await self.commit()
        else:
            # Why the block was left is what counts; the broker drops what it does not hear of.
            with suppress(FelixError):
                await self.abort()

    async def begin(self) -> None:
        """Raises RequestError where the broker refuses it, TRANSACTION_FENCED where a newer instance has taken over."""
        epoch = 0
        if self._transactional_id:
            epoch = await self._transactions.epoch(self._transactional_id)
        timeout_ms = max(1, round(self._timeout_s * 1000))
        begun = await self._transactions.call(Begin(self.id, timeout_ms, self._transactional_id, epoch))
        assert isinstance(begun, Begun)
        self._begun_ms = begun.begun_ms

    async def publish(
        self,
        stream: str | StreamName,
        payload: Payload,
        *,
        key: RecordKey | None = None,
        headers: Headers | None = None,
        shard: int | None = None,
        message_id: MessageId | None = None,
    ) -> TransactionRecord:
        """Add a record; it has an offset after the commit. As `Stream.publish` otherwise."""
        self._require_open()
        if self._waiting:
            await self._stage_waiting()
            self._require_open()
        name = StreamName.parse(str(stream))
        if message_id is not None:
            headers = with_message_id(headers, message_id)
        own = key_bytes(key) if key else None
        if headers:
            check_own(headers)
        record = NewRecord(payload_bytes(payload), own, headers)
        size = len(record.payload) + len(own or b"") + RECORD_OVERHEAD_BYTES
        size += len(encode_headers(headers)) if headers else 0
        if size > _STAGED_RECORD_BYTES_MAX:
            raise RequestError(
                f"A record of {size} bytes; {_STAGED_RECORD_BYTES_MAX} are allowed in a transaction.",
                code=Code.BATCH_TOO_LARGE,
            )
        target = self._targets.get(name)
        if target is None:
            answer = await self._transactions.call(Resolve(str(name)))
            assert isinstance(answer, Resolved)
            target = self._targets[name] = _Target(answer.shards, answer.incarnation)
            self._require_open()
        number = self._route(name, target, record, shard)
        accumulator = self._accumulators.setdefault((name, number), _Accumulator())
        # Asked again each time: other tasks may have filled the next one meanwhile.
        while accumulator.records and (
            accumulator.bytes + size > STAGE_BYTES or len(accumulator.records) >= RECORDS_MAX
        ):
            await self._stage(name, number, target)
            self._require_open()
            accumulator = self._accumulators.setdefault((name, number), _Accumulator())
        handle = TransactionRecord(name, number)
        accumulator.records.append(record)
        accumulator.handles.append(handle)
        accumulator.bytes += size
        self._records.append(handle)
        return handle

    def _route(self, name: StreamName, target: _Target, record: NewRecord, shard: int | None) -> int:
        if shard is not None:
            if not 0 <= shard < target.shards:
                raise RequestError(f"There is no shard {shard}; {name} has {target.shards}, from 0.")
            return shard
        route = record.key or (record.headers or {}).get(MESSAGE_ID_HEADER)
        if route:
            return shard_for_key(route, target.shards)
        # Together: one batch of a transaction is cheaper than one in each shard.
        return self._unkeyed.setdefault(name, self.id[0] % target.shards)

    async def _stage(self, name: StreamName, shard: int, target: _Target) -> None:
        accumulator = self._accumulators[name, shard]
        data = encode_batch(accumulator.records, shard=shard, compress=self._compress).encode()
        # Only now: what cannot be encoded keeps the transaction from being committed without it.
        del self._accumulators[name, shard]
        self._waiting.append(
            _Waiting(
                lambda index: Stage(self.id, index, str(name), target.incarnation, data), accumulator.handles
            )
        )
        await self._stage_waiting()

    async def _stage_waiting(self) -> None:
        """In order. What raises stays the first."""
        async with self._sending:
            while self._waiting:
                self._require_open()
                waiting = self._waiting[0]
                await self._transactions.call(waiting.message(self._staged))
                # Another task may have aborted it meanwhile: nothing waits any more.
                self._require_open()
                self._waiting.popleft()
                self._staged += 1
                if waiting.handles is not None:
                    self._batches.append(waiting.handles)

    async def acknowledge(
        self, *work: Job | ConsumerRecord | ConsumerBatch, consumer: Consumer | None = None
    ) -> None:
        """Acknowledge with the commit: jobs of queues, and records or batches of a durable subscription's `consumer`.

        They are done if the transaction is committed, and not otherwise: aborted, jobs are given back, and records are redelivered.
        """
        self._require_open()
        for each in work:
            if isinstance(each, Job):
                each.left_to_transaction()
                self._jobs.setdefault(each.queue_name, []).append(each)
                continue
            if consumer is None:
                raise RequestError(
                    "Which consumer are these records of?", hint="Use `acknowledge(record, consumer=…)`."
                )
            ranges = each.ranges if isinstance(each, ConsumerBatch) else [(each.offset, each.offset + 1)]
            held = self._consumed.setdefault((str(consumer.stream), consumer.name), {})
            done = held.setdefault((each.shard, each.generation), RangeSet())
            for part in ranges:
                done.add(*part)

    async def _stage_acknowledgements(self) -> None:
        """Once, at the commit: what belongs together goes together."""
        for (stream, name), shards in self._consumed.items():
            acks: list[ShardAck] = []
            for (shard, generation), done in shards.items():
                flat = [edge for each in done for edge in each]
                # A shard's records of two assignments, or too many holes: in messages of their own.
                acks += [
                    ShardAck(shard, generation, flat[at : at + 2 * RANGES_MAX])
                    for at in range(0, len(flat), 2 * RANGES_MAX)
                ]
            for each in acks:
                body = msgspec.msgpack.encode(SubscriptionAcks(stream, name, [each]))
                self._acknowledgement("subscription", body)
        self._consumed = {}
        for queue, jobs in self._jobs.items():
            held = [Held(job.shard, job.offset, 1, job.token) for job in jobs]
            for at in range(0, len(held), RUNS_MAX):
                body = msgspec.msgpack.encode(QueueAcks(str(queue), held[at : at + RUNS_MAX]))
                self._acknowledgement("queue", body)
            self._left += jobs
        self._jobs = {}
        await self._stage_waiting()

    def _acknowledgement(self, view: str, body: bytes) -> None:
        self._waiting.append(_Waiting(lambda index: StageAcknowledgement(self.id, index, view, body), None))

    def _give_back(self) -> None:
        """The jobs of a transaction that is not committed: to be done again."""
        jobs = [job for some in self._jobs.values() for job in some] + self._left
        self._jobs, self._left = {}, []
        for job in jobs:
            # Where it cannot be said, the lease runs out by itself.
            job.nack(reason="The transaction was aborted.").add_done_callback(_unheard)

    async def commit(self) -> list[int]:
        """Commit, and return the offsets of the records in the order in which they were published, once all can be read.

        May be called again where it raised UnavailableError. Raises what the module says.
        """
        if self._over and not self._asked:
            raise RequestError("This transaction was aborted.", code=Code.STATE)
        assert self._begun_ms is not None, "a transaction is begun first"
        while self._accumulators or self._consumed or self._jobs or self._waiting:
            # Also what other tasks have published or acknowledged while this was staged.
            for name, shard in list(self._accumulators):
                if (name, shard) in self._accumulators:
                    await self._stage(name, shard, self._targets[name])
            await self._stage_acknowledgements()
        self._over = self._asked = True
        try:
            answer = await self._transactions.call(Commit(self.id, self._staged, self._begun_ms))
        except RequestError as error:
            if error.code is not Code.TRANSACTION_UNKNOWN:
                self._give_back()
            raise
        assert isinstance(answer, Committed)
        self._left = []
        for handles, offsets in zip(self._batches, answer.offsets, strict=True):
            for place, handle in enumerate(handles):
                if len(offsets) == len(handles):
                    handle._offset = offsets[place]
                else:
                    handle._offset = offsets[0] + place if offsets[0] >= 0 else -1
        return [handle.offset for handle in self._records]

    async def abort(self) -> None:
        """Drop it: nothing of it will be in any stream. Raises RequestError(CONFLICT) where it is committed."""
        self._over = True
        self._accumulators.clear()
        self._waiting.clear()
        self._give_back()
        if self._begun_ms is not None:
            await self._transactions.call(Abort(self.id))

    def _require_open(self) -> None:
        if self._begun_ms is None or self._over:
            raise RequestError(
                "This transaction is not open.",
                code=Code.STATE,
                hint="Use `async with region.transaction()`.",
            )


def _unheard(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
