"""Applies committed transactions: to the shards that they wrote to and the views whose acknowledgements they carry.

One task takes what is committed, a group after the other. Of a group the visibility of every shard concerned is held, the batches are appended,
each with an annotation that says how far transactions have come in this shard, and when all are durable the shards are released in
one iteration of the event loop. The coordinator says what is committed, and records what is applied.

Invariants:
- transactions are applied in the order of their commits; what is applied together (a group) is seen together;
- a batch is appended once: its annotation is written with it, so after a crash the shard itself says what it has;
- a committed part that cannot be appended now is tried again, with the shards still held; where its shard has stopped it
  waits until that is opened again, or for the next start, and is applied before that stream is served.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol

from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.names import SpiffeId, StreamName
from felix.tasks import end_tasks
from region.log.shard import ShardLog
from region.streams.hosted import HostedStream
from region.streams.table import StreamTable
from region.transactions.placing import (
    RETRY_S,
    Step,
    StoppingError,
    cannot_apply,
    place,
    release_all,
    still_owed,
)
from region.transactions.positions import SLOT, group_length, newest, placings
from region.transactions.state import UNKNOWN_OFFSET, Acknowledgement, Part, Transaction

log = logging.getLogger("felix.region.transactions")

START_PATIENCE_S: Final = 5.0
"""At the start: a shard that does not take what is owed to it by then (disk full) is not served until the next one."""


class Participant(Protocol):
    """A view whose acknowledgements a transaction can carry."""

    def stream_of(self, body: bytes) -> StreamName:
        """Whose leader applies it. Raises RequestError where the body is none."""

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


def find_participant(participants: Mapping[str, Participant], view: str) -> Participant:
    """The view of this kind. Raises RequestError(UNSUPPORTED)."""
    found = participants.get(view)
    if found is None:
        raise RequestError(f"A transaction cannot carry acknowledgements of {view!r}.", code=Code.UNSUPPORTED)
    return found


class Outcome(NamedTuple):
    """Per batch in the order of staging, see `state.Applied.offsets`."""

    offsets: tuple[tuple[int, ...], ...]


class _Waiting(NamedTuple):
    transaction: Transaction
    future: asyncio.Future[Outcome]


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
        """Apply what is committed from now on. Repeating it does nothing."""
        if self.task is None:
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
            except StoppingError:
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
        length = group_length(
            Counter((part.stream, part.shard) for part in waiting.transaction.parts)
            for waiting in self._waiting
        )
        return list(islice(self._waiting, length))

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
            found = await asyncio.gather(*(self._place(shard, parts) for shard, parts in partitions.items()))
            settled = [await self._apply_acknowledgements(each) for each in transactions]
        except StoppingError:
            raise  # the shards stay held: they are closed next
        except BaseException:
            release_all(partitions)
            raise
        release_all(partitions)
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
        if transaction.offsets is not None:
            # It waited twice.
            if not future.done():
                future.set_result(Outcome(transaction.offsets))
            return
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

    async def _place(
        self, shard: ShardLog, parts: Sequence[Part], *, patience_s: float = float("inf")
    ) -> dict[tuple[int, int], tuple[int, ...]]:
        return await place(
            shard, placings(parts), closed=lambda: self._closed, step=self._step, patience_s=patience_s
        )

    async def _apply_acknowledgements(
        self, transaction: Transaction, *, patience_s: float = float("inf")
    ) -> bool:
        """False where a view does not take them, and the transaction is owed to it until its stream is served again, or the next start."""
        deadline = asyncio.get_running_loop().time() + patience_s
        for each in transaction.acknowledgements:
            while True:
                try:
                    await self._participant(each.view).apply(each.body)
                    break
                except FelixError as error:
                    if self._is_away(each):
                        return False
                    passes = isinstance(error, UnavailableError) and error.code is not Code.SHARD_STOPPED
                    if not passes or asyncio.get_running_loop().time() > deadline:
                        log.error("a committed acknowledgement waits for the next start: %s", error)
                        return False
                    if self._closed:
                        raise StoppingError from error
                    await asyncio.sleep((error.retry_after_ms or 1000 * RETRY_S) / 1000)
        return True

    def _is_away(self, acknowledgement: Acknowledgement) -> bool:
        """Whether its stream is not served now, and will be: whoever serves it again has this applied."""
        hosted = self._streams.get(self._participant(acknowledgement.view).stream_of(acknowledgement.body))
        return hosted is not None and (
            hosted.elsewhere is not None or hosted.is_settling or bool(hosted.failed)
        )

    def _stop_shards(self, group: Sequence[_Waiting], error: Exception) -> None:
        for waiting in group:
            for part in waiting.transaction.parts:
                shard = self._shard_of(part)
                if isinstance(shard, ShardLog) and shard.failure is None:
                    shard.stop(cannot_apply(part, error))
            if not waiting.future.done():
                waiting.future.set_exception(still_owed())

    # -- what an earlier process left ------------------------------------------------------------------

    async def passed(self, stream: StreamName, patience_s: float) -> None:
        """Wait until nothing that is on its way is for this stream, whose shards are not found by it. Raises UnavailableError where that takes longer."""

        def concerns(transaction: Transaction) -> bool:
            return any(part.stream == str(stream) for part in transaction.parts)

        deadline = asyncio.get_running_loop().time() + patience_s
        while any(concerns(waiting.transaction) for waiting in self._waiting):
            if asyncio.get_running_loop().time() > deadline:
                raise UnavailableError(
                    f"Committed transactions of {stream} wait for shards of other streams."
                )
            await asyncio.sleep(RETRY_S)

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
        last = newest(shard.annotations.get(SLOT, b""))
        for transaction_number in sorted({part.number for part in parts}):
            mine = [part for part in parts if part.number == transaction_number]
            if transaction_number >= last:
                log.warning("%s shard %d: applying transaction %d", stream.name, number, transaction_number)
            placed = await self._place(shard, mine, patience_s=START_PATIENCE_S)
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


def ignored(future: asyncio.Future[Outcome]) -> None:
    """Its client may be gone: an error that nobody waits for is no event of the loop."""
    if not future.cancelled():
        future.exception()
