"""Applies committed transactions: to the shards that they wrote to and the views whose acknowledgements they carry.

One task takes what is committed, a group after the other. Of a group the visibility of every shard concerned is held, the batches are appended,
each with an annotation that says how far transactions have come in this shard, and when all are durable the shards are released in
one iteration of the event loop. The coordinator says what is committed, and records what is applied.

Invariants:
- transactions are applied in the order of their commits; what is applied together (a group) is seen together;
- a batch is appended once: its annotation is written with it, so after a crash the shard itself says what it has;
- a committed part that cannot be appended now is tried again, with the shards still held; where its shard has stopped for good it
  waits for the next start, and is applied before that stream is served.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import xxhash

from felix.batch import Batch, decode_batch
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.names import SpiffeId, StreamName
from felix.tasks import end_tasks
from region.log.message_ids import message_ids
from region.log.shard import Appended, ShardLog, State
from region.streams import HostedStream, StreamTable
from region.transactions.state import (
    UNKNOWN_OFFSET,
    Part,
    Transaction,
)

log = logging.getLogger("felix.region.transactions")

PARTS_PER_SHARD_MAX: Final = 30
"""Batches of one transaction in one shard, and of one group: an annotation names them all, in 480 of its 512 bytes."""
GROUP_TRANSACTIONS_MAX: Final = 256
"""Applied together: bounds how long the first of a group waits for the last."""
RETRY_S: Final = 0.1
"""Between two tries of what a shard did not take now (disk full, too much pending)."""
START_PATIENCE_S: Final = 5.0
"""At the start: a shard that does not take what is owed to it by then (disk full) is not served until the next one."""
SLOT: Final = int(xxhash.xxh3_64_intdigest(b"felix/transactions"))
"""The annotation slot of every shard that says how far transactions have come in it."""

_POSITION: Final = struct.Struct(">Qq")

Step = Callable[[str], None]


class Participant(Protocol):
    """A view whose acknowledgements a transaction can carry."""

    def stage(self, identity: SpiffeId, body: bytes) -> None:
        """Raises RequestError where the body is none, or this identity may not."""

    async def prepare(self, identity: SpiffeId, body: bytes) -> bytes:
        """About to be decided: see to it that it can be applied. Returns what `apply` is to be given. Raises RequestError,
        UnavailableError; else `apply` or `abandon` follows."""

    def abandon(self, body: bytes) -> None:
        """It was not decided after all."""

    async def apply(self, body: bytes) -> None:
        """It is committed: durably so when this returns. Called again after a crash: then it changes nothing. Raises
        UnavailableError where it should be tried again; of what is gone there is nothing to do."""


class Outcome(NamedTuple):
    """Per batch in the order of staging, see `state.Applied.offsets`."""

    offsets: tuple[tuple[int, ...], ...]


class _Waiting(NamedTuple):
    transaction: Transaction
    future: asyncio.Future[Outcome]


class _StoppingError(Exception):
    """The broker stops while a committed part waits for its shard."""


def decode_positions(annotation: bytes) -> list[tuple[int, int]]:
    """Number and first offset of each batch of the newest group in a shard."""
    return [(number, offset) for number, offset in _POSITION.iter_unpack(annotation)]


class Applier:
    """See the module. Made by the coordinator, the only caller."""

    def __init__(
        self,
        streams: StreamTable,
        participant: Callable[[str], Participant],
        record: Callable[[Transaction, Iterable[tuple[int, ...]]], None],
        step: Step,
    ) -> None:
        """`participant`: a view by its kind. `record` is called with a transaction that is applied everywhere and the offsets of its
        parts, and sets its `offsets`. `step` is called at each step: tests crash there."""
        self._streams = streams
        self._participant = participant
        self._record = record
        self._step = step
        self._waiting: deque[_Waiting] = deque()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._settled: dict[tuple[int, int], tuple[int, ...]] = {}
        """Offsets of what was owed to streams when they were opened, by number and index."""
        self.task: asyncio.Task[None] | None = None
        """What applies; None before the first transaction."""
        self.groups = 0

    def start(self) -> None:
        """Apply what is committed from now on."""
        self.task = asyncio.ensure_future(self._apply_forever())

    def stop(self) -> None:
        """The broker stops: a part that a shard does not take now is left to the next start."""
        self._closed = True

    async def idle(self) -> None:
        """Returns once nothing is waiting to be applied."""
        await self._idle.wait()

    async def close(self) -> None:
        """Apply nothing more."""
        if self.task is not None:
            await end_tasks(self.task)

    def outcome_of(self, transaction: Transaction) -> asyncio.Future[Outcome] | None:
        """The future of one that waits to be applied, else None."""
        return next((each.future for each in self._waiting if each.transaction is transaction), None)

    def enqueue(self, transaction: Transaction, future: asyncio.Future[Outcome] | None = None) -> None:
        """It is committed: apply it behind those before it. `future` gets its outcome, or why its part waits."""
        if future is None:
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(ignored)
        self._waiting.append(_Waiting(transaction, future))
        self._idle.clear()
        self._work.set()

    async def _apply_forever(self) -> None:
        while True:
            await self._work.wait()
            group = self._next_group()
            try:
                await self._apply_group(group)
            except _StoppingError:
                return
            except Exception as error:
                # A mistake of ours must not leave the shards held, nor be taken for a success.
                log.exception("committed transactions could not be applied")
                self._stop_shards(group, error)
            for waiting in group:
                self._waiting.remove(waiting)
            if not self._waiting:
                self._work.clear()
                self._idle.set()

    def _next_group(self) -> list[_Waiting]:
        """As many, in order, as the annotation of each shard can name."""
        group: list[_Waiting] = []
        counts: dict[tuple[str, int], int] = {}
        for waiting in self._waiting:
            wanted = dict(counts)
            for part in waiting.transaction.parts:
                key = (part.stream, part.shard)
                wanted[key] = wanted.get(key, 0) + 1
            if group and (
                len(group) >= GROUP_TRANSACTIONS_MAX or max(wanted.values(), default=0) > PARTS_PER_SHARD_MAX
            ):
                break
            counts = wanted
            group.append(waiting)
        return group

    async def _apply_group(self, group: Sequence[_Waiting]) -> None:
        self.groups += 1
        transactions = [waiting.transaction for waiting in group]
        partitions: dict[ShardLog, list[Part]] = {}
        gone: list[Part] = []
        for part in (part for each in transactions for part in each.parts):
            shard = self._shard_of(part)
            if shard is None:
                gone.append(part)
            elif isinstance(shard, ShardLog):
                partitions.setdefault(shard, []).append(part)
        offsets: dict[tuple[int, int], tuple[int, ...]] = {
            (part.number, part.index): (UNKNOWN_OFFSET,) for part in gone
        }
        for shard in partitions:
            shard.hold_visibility()
        try:
            found = await asyncio.gather(
                *(self._apply_partition(shard, parts) for shard, parts in partitions.items())
            )
            settled = [await self._apply_acknowledgements(each) for each in transactions]
        except _StoppingError:
            raise  # the shards stay held: they are closed next
        except BaseException:
            _release_all(partitions)
            raise
        _release_all(partitions)
        for placed in found:
            offsets |= placed
        self._step("applied")
        for waiting, whole in zip(group, settled, strict=True):
            self._conclude(waiting, offsets, whole)

    def _conclude(
        self, waiting: _Waiting, offsets: dict[tuple[int, int], tuple[int, ...]], settled: bool
    ) -> None:
        transaction, future = waiting
        number = transaction.committed.number
        for part in transaction.parts:
            if (number, part.index) not in offsets and self._shard_of(part) is None:
                offsets[number, part.index] = (UNKNOWN_OFFSET,)  # deleted in the meantime
        if not settled or any((number, part.index) not in offsets for part in transaction.parts):
            if not future.done():
                future.set_exception(still_owed())
            return
        self._record(transaction, tuple(offsets[number, part.index] for part in transaction.parts))
        assert transaction.offsets is not None
        if not future.done():
            future.set_result(Outcome(transaction.offsets))

    def _shard_of(self, part: Part) -> ShardLog | FelixError | None:
        """None where the stream is gone, or is another incarnation; the error of a shard that could not be opened, or is not served here."""
        hosted = self._streams.get(StreamName.parse(part.stream))
        if hosted is None or hosted.deleted or hosted.incarnation != part.incarnation:
            return None
        return hosted.find(part.shard)

    async def _apply_partition(
        self, shard: ShardLog, parts: Sequence[Part], *, patience_s: float = float("inf")
    ) -> dict[tuple[int, int], tuple[int, ...]]:
        """Append what a shard does not have yet, in order, until it has it all or has stopped. Offsets per (number, index)."""
        placed: dict[tuple[int, int], tuple[int, ...]] = {}
        held = decode_positions(shard.annotations.get(SLOT, b""))
        newest = held[-1][0] if held else 0
        there: dict[int, list[int]] = {}
        for number, offset in held:
            there.setdefault(number, []).append(offset)
        left: list[Part] = []
        for part in parts:
            known = there.get(part.number, [])
            if known:
                placed[part.number, part.index] = (known.pop(0),)
            elif part.number < newest:
                placed[part.number, part.index] = (UNKNOWN_OFFSET,)
            else:
                left.append(part)
        positions = [entry for entry in held if any(entry[0] == part.number for part in parts)]
        deadline = asyncio.get_running_loop().time() + patience_s
        while left:
            answers = await self._append(shard, left, positions)
            for part, answer in answers:
                if isinstance(answer, FelixError):
                    if shard.failure is not None or isinstance(answer, RequestError):
                        if shard.failure is None:
                            shard.stop(_cannot_apply(part, answer))
                        log.error(
                            "%s shard %d: committed transactions wait for its next start: %s",
                            part.stream,
                            part.shard,
                            answer,
                        )
                        return placed
                    break
                placed[part.number, part.index] = answer.offsets or (answer.base_offset,)
                positions.append((part.number, UNKNOWN_OFFSET if answer.offsets else answer.base_offset))
                left = left[1:]
            if left:
                if self._closed:
                    # Nothing that was committed later may be appended before it: the next start goes on here.
                    raise _StoppingError
                if shard.state is State.STOPPED or asyncio.get_running_loop().time() > deadline:
                    return placed
                await asyncio.sleep(RETRY_S)
        return placed

    async def _append(
        self, shard: ShardLog, parts: Sequence[Part], before: Sequence[tuple[int, int]]
    ) -> list[tuple[Part, Appended | FelixError]]:
        """Append in one event loop iteration, as many as the shard accepts. If one is refused, so are all after it."""
        loop = asyncio.get_running_loop()
        under_way: list[tuple[Part, asyncio.Future[Appended | FelixError]]] = []
        positions = list(before)
        for part in parts:
            batch = decode_batch(part.batch)
            identified = shard.settings.deduplication is not None and message_ids(batch) is not None
            positions.append((part.number, UNKNOWN_OFFSET if identified else shard.log_end_offset))
            future: asyncio.Future[Appended | FelixError] = loop.create_future()
            annotation = b"".join(_POSITION.pack(*entry) for entry in positions[-PARTS_PER_SHARD_MAX:])
            shard.append_nowait(
                Batch(batch.header, bytes(batch.body)), _once(future), annotation=annotation, slot=SLOT
            )
            under_way.append((part, future))
            if future.done() and isinstance(future.result(), FelixError):
                break
            self._step("appended")
        return [(part, await future) for part, future in under_way]

    async def _apply_acknowledgements(
        self, transaction: Transaction, *, patience_s: float = float("inf")
    ) -> bool:
        """False where a view does not take them, and the transaction is owed to it until the next start."""
        deadline = asyncio.get_running_loop().time() + patience_s
        for each in transaction.acknowledgements:
            while True:
                try:
                    await self._participant(each.view).apply(each.body)
                    break
                except FelixError as error:
                    passes = isinstance(error, UnavailableError) and error.code is not Code.SHARD_STOPPED
                    if not passes or asyncio.get_running_loop().time() > deadline:
                        log.error("a committed acknowledgement waits for the next start: %s", error)
                        return False
                    if self._closed:
                        raise _StoppingError from error
                    await asyncio.sleep((error.retry_after_ms or 1000 * RETRY_S) / 1000)
        return True

    def _stop_shards(self, group: Sequence[_Waiting], error: Exception) -> None:
        for waiting in group:
            for part in waiting.transaction.parts:
                shard = self._shard_of(part)
                if isinstance(shard, ShardLog) and shard.failure is None:
                    shard.stop(_cannot_apply(part, error))
            if not waiting.future.done():
                waiting.future.set_exception(still_owed())

    # -- what an earlier process left ------------------------------------------------------------------

    async def settle_stream(self, stream: HostedStream, owed: Sequence[Transaction]) -> None:
        """Before a stream is served: append what is owed to its shards."""
        for number, shard in stream.replicas.items():
            parts = [
                part
                for transaction in owed
                for part in transaction.parts
                if (part.stream, part.incarnation, part.shard)
                == (str(stream.name), stream.incarnation, number)
            ]
            if parts and isinstance(shard, ShardLog):
                await self._settle_shard(stream, number, shard, parts)

    async def _settle_shard(
        self, stream: HostedStream, number: int, shard: ShardLog, parts: Sequence[Part]
    ) -> None:
        held = decode_positions(shard.annotations.get(SLOT, b""))
        newest = held[-1][0] if held else 0
        for transaction_number in sorted({part.number for part in parts}):
            mine = [part for part in parts if part.number == transaction_number]
            if transaction_number >= newest:
                log.warning("%s shard %d: applying transaction %d", stream.name, number, transaction_number)
            placed = await self._apply_partition(shard, mine, patience_s=START_PATIENCE_S)
            if len(placed) < len(mine):
                stream.replicas[number] = shard.failure or still_owed()
                return
            self._settled |= placed

    async def finish_owed(self, transaction: Transaction) -> None:
        """Every stream that can be opened is: settle what is owed to streams that are gone, and to views."""
        offsets: list[tuple[int, ...]] = []
        for part in transaction.parts:
            found = self._settled.get((part.number, part.index))
            if found is None:
                name = StreamName.parse(part.stream)
                hosted = self._streams.get(name)
                if hosted is not None and hosted.incarnation == part.incarnation:
                    return  # its shard does not serve; it is owed still
                found = (UNKNOWN_OFFSET,)
            offsets.append(found)
        if await self._apply_acknowledgements(transaction, patience_s=START_PATIENCE_S):
            self._record(transaction, offsets)


def _release_all(shards: Iterable[ShardLog]) -> None:
    """In one iteration of the event loop: nobody sees one of them without the others."""
    for shard in shards:
        shard.release_visibility()


def ignored(future: asyncio.Future[Outcome]) -> None:
    """Its client may be gone: an error that nobody waits for is no event of the loop."""
    if not future.cancelled():
        future.exception()


def _once(future: asyncio.Future[Appended | FelixError]) -> Callable[[Appended | FelixError], None]:
    def done(result: Appended | FelixError) -> None:
        if not future.done():
            future.set_result(result)

    return done


def still_owed() -> UnavailableError:
    """What is answered of a transaction that is committed, while a shard of it does not serve."""
    return UnavailableError(
        "The transaction is committed, and a shard that it wrote to has stopped: its part is put there before the shard "
        "serves again.",
        code=Code.SHARD_STOPPED,
        hint="Do not publish it again. Ask again once the shard serves.",
    )


def _cannot_apply(part: Part, error: Exception) -> FelixError:
    failure = UnavailableError(
        f"Transaction {part.number} is committed and cannot be appended to {part.stream} shard {part.shard}: {error}",
        code=Code.SHARD_STOPPED,
        hint="Look at the broker's log, and start it again once the cause is gone: it is applied before the stream is served.",
    )
    failure.__cause__ = error
    return failure
