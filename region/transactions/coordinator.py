"""The coordinator of a broker's transactions: staged in memory, committed in its journal, applied to the shards.

1. *Staged*: batches and acknowledgements wait here, within the broker's `transactions` budget, for their transaction's time at most.
2. *Committed*: all of it is written into the journal of the system stream `felix/system/transactions`, behind it the decision. From
   there on it will be applied, whatever happens to this process.
3. *Applied*: visibility of every shard concerned is held, the batches are appended, each with an annotation that says how far the
   transactions have come in this shard, and when all are durable the shards are released in one iteration of the event loop.
4. *Done*: the journal records it, and the payloads are released.

Invariants:
- nothing of a transaction is in a shard before its commit is durable;
- transactions are applied in the order of their commits; what is applied together (a group) is seen together;
- a batch is appended once: its annotation is written with it, so after a crash the shard itself says what it has;
- a committed part that cannot be appended now is tried again, with the shards still held; where its shard has stopped for good it
  waits for the next start, and is applied before that stream is served;
- an outcome is remembered for a bounded time; beyond it the answer is that nobody knows.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol

import msgspec
import xxhash

from felix.batch import BATCH_BYTES_MAX, FLAG_SEALED, Batch, decode_batch
from felix.bounded import BoundedMap
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.names import SpiffeId, StreamName
from felix.tasks import end_tasks
from keys.envelope import SEAL_BYTES
from policy.access import Verb
from region.broker import Broker
from region.gather import ignore
from region.log.message_ids import message_ids
from region.log.segment import ANNOTATION_SLOTS_MAX
from region.log.shard import Appended, ShardLog, State
from region.metadata.records import StreamConfig
from region.streams import HostedStream, StreamTable
from region.transactions.state import (
    OFFSETS_MAX,
    UNKNOWN_OFFSET,
    Acknowledgement,
    Applied,
    Committed,
    Entry,
    Fenced,
    Part,
    Transaction,
    TransactionState,
    decode,
    encode,
)
from region.views.journal import ENTRY_BYTES_MAX, Journal, JournalKind

log = logging.getLogger("felix.region.transactions")

SYSTEM_STREAM: Final = StreamName("felix", "system", "transactions")
"""Its companion log is the journal. It has no records, and nobody but the broker may open it."""
OPEN_MAX: Final = 1_024
"""Open transactions of one broker: each has a timer and a place in every sweep."""
OPEN_PER_IDENTITY_MAX: Final = 64
"""One client's mistake (transactions begun and left) must not keep the others from theirs."""
PARTS_PER_SHARD_MAX: Final = 30
"""Batches of one transaction in one shard, and of one group: an annotation names them all, in 480 of its 512 bytes."""
PARTS_MAX: Final = 512
"""Batches and acknowledgements of one transaction."""
GROUP_TRANSACTIONS_MAX: Final = 256
"""Applied together: bounds how long the first of a group waits for the last."""
STAGED_BYTES_MAX: Final = ENTRY_BYTES_MAX - 1_024
"""One staged batch or acknowledgement, so that it fits an entry of the journal with its names."""
RETRY_S: Final = 0.1
"""Between two tries of what a shard did not take now (disk full, too much pending)."""
START_PATIENCE_S: Final = 5.0
"""At the start: a shard that does not take what is owed to it by then (disk full) is not served until the next one."""
ENDED_MAX: Final = 10_000
"""Ended without a commit: a late call gets the reason."""
SLOT: Final = int(xxhash.xxh3_64_intdigest(b"felix/transactions"))
"""The annotation slot of every shard that says how far transactions have come in it."""

_POSITION: Final = struct.Struct(">Qq")

Step = Callable[[str], None]


class Outcome(NamedTuple):
    """Per batch in the order of staging, see `state.Applied.offsets`."""

    offsets: tuple[tuple[int, ...], ...]


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


class _Phase(Enum):
    OPEN = "open"
    COMMITTING = "committing"


@dataclass(slots=True)
class _Open:
    """A transaction that is not committed yet."""

    id: bytes
    owner: SpiffeId
    transactional_id: str
    epoch: int
    begun_ms: int
    timeout_ms: int
    parts: list[Part] = field(default_factory=list)
    acknowledgements: list[Acknowledgement] = field(default_factory=list)
    staged: int = 0
    taken_bytes: int = 0
    phase: _Phase = _Phase.OPEN
    timer: asyncio.TimerHandle | None = None
    on_end: Callable[[], None] | None = None


class _Waiting(NamedTuple):
    transaction: Transaction
    future: asyncio.Future[Outcome]


class _StoppingError(Exception):
    """The broker stops while a committed part waits for its shard."""


def _no_step(_: str) -> None: ...


def decode_positions(annotation: bytes) -> list[tuple[int, int]]:
    """Number and first offset of each batch of the newest group in a shard."""
    return [(number, offset) for number, offset in _POSITION.iter_unpack(annotation)]


class Coordinator:
    """One broker's transactions. `start` before anything is served; then `begin`, `stage`, `commit` and the rest."""

    def __init__(
        self, broker: Broker, participants: Mapping[str, Participant], *, step: Step = _no_step
    ) -> None:
        """`participants`: the views that transactions may reach into, by kind. `step` is called at each step of a commit: tests crash there."""
        self._broker = broker
        self._step = step
        self._participants = participants
        self.state = TransactionState()
        self._journal: Journal | None = None
        self._opening = asyncio.Lock()
        self._open: dict[bytes, _Open] = {}
        self._ended: BoundedMap[bytes, FelixError] = BoundedMap(ENDED_MAX)
        self._commits: dict[bytes, asyncio.Future[Outcome]] = {}
        self._waiting: deque[_Waiting] = deque()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._applier: asyncio.Task[None] | None = None
        self._closed = False
        self._settled: dict[tuple[int, int], tuple[int, ...]] = {}
        self._deciding: set[asyncio.Task[None]] = set()
        self.committed = self.aborted = self.timed_out = self.groups = 0

    # -- life ------------------------------------------------------------------------------------------

    async def start(self, streams: StreamTable) -> None:
        """Apply what was committed and not done, stream by stream as they are opened. Call it before other streams are open."""
        streams.before_serving.append(self._settle_stream)
        stream = streams.get(SYSTEM_STREAM)
        if stream is not None:
            await self._open_journal(stream)

    async def started(self) -> None:
        """Every stream that can be opened is. What is owed to streams that are gone, and to views, is settled."""
        for transaction in self.state.owed:
            await self._finish_owed(transaction)

    async def close(self) -> None:
        """Let what is committed be applied; what is open is dropped."""
        self._closed = True
        for transaction in list(self._open.values()):
            if transaction.phase is _Phase.OPEN:
                self._drop(transaction, _closing())
        with suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await self._idle.wait()
        for task in self._deciding:
            task.cancel()
        await asyncio.gather(*self._deciding, return_exceptions=True)
        if self._applier is not None:
            await end_tasks(self._applier)
        for future in self._commits.values():
            if not future.done():
                future.set_exception(_closing())
        if self._journal is not None:
            await self._journal.close()

    async def _open_journal(self, stream: HostedStream) -> Journal:
        number = JournalKind.TRANSACTIONS.number(0)
        companion = await self._broker.streams.open_companion(stream, number)
        journal = Journal(companion, lambda: self.state.snapshot())
        try:
            await self._replay(journal)
        except BaseException:
            # Nothing is decided before all that was decided is known.
            await self._broker.streams.close_companion(stream, number)
            raise
        self._journal = journal
        self._applier = asyncio.ensure_future(self._apply_forever())
        return journal

    async def _replay(self, journal: Journal) -> None:
        state = TransactionState()
        async for entry in journal.replay():
            state.apply(decode(entry))
        self.state = state

    async def _ready(self) -> Journal:
        """The journal, made with the first transaction, and replayed where an append to it was refused. Raises why not."""
        async with self._opening:
            journal = self._journal
            if journal is None:
                stream = await self._broker.ensure_stream(SYSTEM_STREAM, StreamConfig())
                return await self._open_journal(stream)
            if journal.lost is not None:
                # Decisions whose entries were refused do not exist: only the journal is authoritative.
                await self._idle.wait()
                await self._replay(journal)
                for transaction in self.state.owed:
                    self._enqueue(transaction)
            refused = journal.refusal()
            if refused is not None:
                raise refused.with_traceback(None)
            return journal

    async def _certain(self) -> None:
        """If the journal refused an append, the state is ahead of the journal: reload it first. Raises the error that prevents
        this.
        """
        if self._journal is not None and self._journal.lost is not None:
            await self._ready()

    # -- what a client does ----------------------------------------------------------------------------

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def owed_count(self) -> int:
        """Committed, and not applied everywhere yet."""
        return len(self.state.owed)

    async def fence(self, owner: SpiffeId, transactional_id: str) -> int:
        """A new instance of this owner's transactional id: its epoch. What an older one has open is aborted."""
        journal = await self._ready()
        for transaction in list(self._open.values()):
            if (transaction.owner, transaction.transactional_id) == (owner, transactional_id):
                if transaction.phase is _Phase.COMMITTING:
                    # It is being decided; the new instance waits to see what became of it.
                    with suppress(FelixError):
                        await asyncio.shield(self._commits[transaction.id])
                else:
                    self._drop(transaction, _fenced(transactional_id))
        epoch = self.state.epoch(str(owner), transactional_id) + 1
        entry = Fenced(str(owner), transactional_id, epoch)
        self.state.apply(entry)
        await journal.written(encode(entry))
        return epoch

    def begin(
        self,
        owner: SpiffeId,
        transaction_id: bytes,
        timeout_ms: int,
        transactional_id: str,
        epoch: int,
        hold: Callable[[], Callable[[], None]] | None = None,
    ) -> _Open:
        """Begin, or find what this owner has begun under the id. Raises RequestError, UnavailableError.

        `hold` is called with a new one, may refuse it, and gives what is to be called when it ends.
        """
        if self._closed:
            raise _closing()
        held = self._open.get(transaction_id)
        if held is not None:
            if held.owner != owner:
                raise RequestError("This transaction id is in use.", code=Code.CONFLICT)
            return held
        if len(transaction_id) != 16:
            raise RequestError(f"A transaction id has 16 bytes, not {len(transaction_id)}.")
        if transaction_id in self._ended or self.state.find(transaction_id) is not None:
            raise RequestError("This transaction has ended; begin another.", code=Code.CONFLICT)
        limit_ms = int(self._broker.config.limits.transaction_timeout)
        if not 1 <= timeout_ms <= limit_ms:
            raise RequestError(
                f"A transaction timeout of {timeout_ms} ms; 1 to {limit_ms} ms are allowed here.",
                hint="Ask for less, or have limits.transaction_timeout raised.",
            )
        self._check_fence(owner, transactional_id, epoch)
        mine = sum(each.owner == owner for each in self._open.values())
        if len(self._open) >= OPEN_MAX or mine >= OPEN_PER_IDENTITY_MAX:
            raise UnavailableError(
                f"{mine} transactions of this identity are open, {len(self._open)} in all; {OPEN_PER_IDENTITY_MAX} and "
                f"{OPEN_MAX} are allowed.",
                code=Code.LIMIT_RATE,
                hint="Commit or abort what is open.",
                retry_after_ms=100,
            )
        made = _Open(transaction_id, owner, transactional_id, epoch, self._broker.clock_ms(), timeout_ms)
        made.on_end = hold() if hold is not None else None
        self._open[transaction_id] = made
        made.timer = asyncio.get_running_loop().call_later(timeout_ms / 1000, self._timed_out, made)
        return made

    def stage(
        self, owner: SpiffeId, transaction_id: bytes, index: int, stream: str, incarnation: bytes, data: bytes
    ) -> None:
        """Stage one batch. The `index` counts what is staged; one that was staged already is answered alike."""
        transaction = self._staging(owner, transaction_id, index)
        if transaction is None:
            return
        name = StreamName.parse(stream)
        hosted = self._publishable(owner, name, incarnation)
        batch = decode_batch(data)
        header = batch.header
        if header.flags & FLAG_SEALED or header.producer_id:
            raise RequestError(
                "A staged batch is neither sealed nor numbered; the transaction is.",
                code=Code.BATCH_MALFORMED,
            )
        if header.total_length > min(STAGED_BYTES_MAX, BATCH_BYTES_MAX - SEAL_BYTES):
            raise RequestError(
                f"A staged batch of {header.total_length} bytes; {STAGED_BYTES_MAX} are allowed.",
                code=Code.BATCH_TOO_LARGE,
            )
        shard = hosted.shard(header.shard)
        if shard.settings.deduplication is not None:
            message_ids(batch)  # raises now what would be raised at the append
        there = sum((part.stream, part.shard) == (str(name), header.shard) for part in transaction.parts)
        if there >= PARTS_PER_SHARD_MAX:
            raise RequestError(
                f"{there} batches of this transaction are for shard {header.shard} of {name}, the most that are allowed.",
                code=Code.BATCH_TOO_LARGE,
                hint="Put more records into a batch, or fewer into a transaction.",
            )
        self._take(transaction, header.total_length)
        transaction.parts.append(Part(0, index, str(name), hosted.incarnation, header.shard, batch.encode()))
        transaction.staged += 1

    def acknowledge(self, owner: SpiffeId, transaction_id: bytes, index: int, view: str, body: bytes) -> None:
        """Stage acknowledgements of a consumer or a queue."""
        transaction = self._staging(owner, transaction_id, index)
        if transaction is None:
            return
        self._participant(view).stage(owner, body)
        if len(body) > STAGED_BYTES_MAX:
            raise RequestError(f"Acknowledgements of {len(body)} bytes; {STAGED_BYTES_MAX} are allowed.")
        self._take(transaction, len(body))
        transaction.acknowledgements.append(Acknowledgement(0, index, view, body))
        transaction.staged += 1

    def _staging(self, owner: SpiffeId, transaction_id: bytes, index: int) -> _Open | None:
        """The transaction; None where this index was staged already."""
        transaction = self._mine(owner, transaction_id)
        if transaction.phase is not _Phase.OPEN:
            raise RequestError("This transaction is being committed.", code=Code.STATE)
        if index < transaction.staged:
            return None
        if index > transaction.staged:
            raise RequestError(
                f"Index {index} is staged next to {transaction.staged}.", code=Code.SEQUENCE_GAP
            )
        if index >= PARTS_MAX:
            raise RequestError(
                f"A transaction of more than {PARTS_MAX} batches and acknowledgements.",
                code=Code.BATCH_TOO_LARGE,
                hint="Put more records into a batch, or fewer into a transaction.",
            )
        return transaction

    def _take(self, transaction: _Open, size: int) -> None:
        limit = int(self._broker.config.limits.transaction_bytes)
        if transaction.taken_bytes + size > limit:
            raise RequestError(
                f"This transaction would hold {transaction.taken_bytes + size} bytes; {limit} are allowed.",
                code=Code.BATCH_TOO_LARGE,
                hint="Make smaller transactions, or have limits.transaction_bytes raised.",
            )
        budget = self._broker.budgets.transactions
        if not budget.take(size):
            raise UnavailableError(
                f"Open transactions hold the {budget.limit_bytes} bytes that this broker gives them.",
                code=Code.LIMIT_MEMORY,
                hint="Try again, or have limits.transactions_budget raised.",
                retry_after_ms=100,
            )
        transaction.taken_bytes += size

    def _mine(self, owner: SpiffeId, transaction_id: bytes) -> _Open:
        transaction = self._open.get(transaction_id)
        if transaction is None or transaction.owner != owner:
            # A kept error is raised without the traces of the times before: they would hold all that was in sight then.
            raise (self._ended.look(transaction_id) or _not_open()).with_traceback(None)
        self._check_fence(owner, transaction.transactional_id, transaction.epoch)
        return transaction

    def _check_fence(self, owner: SpiffeId, transactional_id: str, epoch: int) -> None:
        if transactional_id and epoch != self.state.epoch(str(owner), transactional_id):
            raise _fenced(transactional_id)

    def _publishable(self, owner: SpiffeId, name: StreamName, incarnation: bytes) -> HostedStream:
        self._broker.require(owner, Verb.PUBLISH, name)
        hosted = self._broker.use_stream(name, Verb.PUBLISH)
        if incarnation and hosted.incarnation != incarnation:
            raise RequestError(
                f"{name} was deleted and created anew since it was looked up.", code=Code.CONFLICT
            )
        return hosted

    def _participant(self, view: str) -> Participant:
        found = self._participants.get(view)
        if found is None:
            raise RequestError(
                f"A transaction cannot carry acknowledgements of {view!r}.", code=Code.UNSUPPORTED
            )
        return found

    def resolve(self, owner: SpiffeId, stream: str) -> HostedStream:
        """A stream that this owner may publish into. Raises as `Broker.require`."""
        return self._publishable(owner, StreamName.parse(stream), b"")

    async def abort(self, owner: SpiffeId, transaction_id: bytes) -> None:
        """Drop it. One that has ended without a commit is aborted already. Raises RequestError(CONFLICT) where it is committed."""
        await self._certain()
        if self.state.find(transaction_id) is not None or transaction_id in self._commits:
            raise RequestError("This transaction is committed.", code=Code.CONFLICT)
        transaction = self._open.get(transaction_id)
        if transaction is not None and transaction.owner == owner:
            self.aborted += 1
            self._drop(
                transaction,
                RequestError("This transaction was aborted by its client.", code=Code.TRANSACTION_ABORTED),
            )

    async def commit(self, owner: SpiffeId, transaction_id: bytes, staged: int, begun_ms: int) -> Outcome:
        """Commit, and return once everything can be read. Asked again, it answers alike.

        Raises RequestError: TRANSACTION_ABORTED where it is certain that nothing of it is there, TRANSACTION_UNKNOWN where
        nobody knows, TRANSACTION_FENCED, and what publishing would raise now; UnavailableError where it should be asked again.
        """
        await self._certain()
        known = self._decided(owner, transaction_id)
        if known is not None:
            return await known
        transaction = self._open.get(transaction_id)
        if transaction is None or transaction.owner != owner:
            raise self._why_not_open(transaction_id, begun_ms).with_traceback(None)
        self._check_commit(transaction, staged)
        if not staged:
            self._drop(transaction, RequestError("This transaction was empty.", code=Code.CONFLICT))
            return Outcome(())
        transaction.phase = _Phase.COMMITTING
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_heard)
        future.add_done_callback(lambda _: self._commits.pop(transaction_id, None))
        self._commits[transaction_id] = future
        # By itself: a client that is gone while it is being decided must not leave it undecided.
        task = asyncio.ensure_future(self._decide(transaction, staged, future))
        self._deciding.add(task)
        task.add_done_callback(self._deciding.discard)
        return await asyncio.shield(future)

    async def _decide(self, transaction: _Open, staged: int, future: asyncio.Future[Outcome]) -> None:
        try:
            journal = await self._ready()
            # A replay may have shown that an earlier try is there after all.
            found = self.state.find(transaction.id)
            if found is None:
                prepared = await self._prepare(transaction)
                try:
                    self._check_commit(transaction, staged)
                    refused = journal.refusal()
                    if refused is not None:
                        raise refused
                except FelixError:
                    self._abandon(prepared)
                    raise
                self._write(journal, transaction, prepared, future)
            else:
                self._decided_now(transaction, future)
                self._follow(found, future)
        except FelixError as error:
            self._not_committed(transaction, future, error)
        except BaseException as error:
            self._not_committed(transaction, future, FelixError(f"The broker failed: {error!r:.200}."))
            raise

    def _decided(self, owner: SpiffeId, transaction_id: bytes) -> Awaitable[Outcome] | None:
        under_way = self._commits.get(transaction_id)
        if under_way is not None:
            return asyncio.shield(under_way)
        found = self.state.find(transaction_id)
        if found is None or found.committed.owner != str(owner):
            return None
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._follow(found, future)
        return future

    def _follow(self, found: Transaction, future: asyncio.Future[Outcome]) -> None:
        """Answer with what became of a committed transaction, once it is applied, or that its shard has stopped."""
        if found.offsets is not None:
            future.set_result(Outcome(found.offsets))
            return
        for waiting in self._waiting:
            if waiting.transaction is found:
                waiting.future.add_done_callback(lambda done: _copy(done, future))
                return
        future.set_exception(_owed())

    def _why_not_open(self, transaction_id: bytes, begun_ms: int) -> FelixError:
        ended = self._ended.look(transaction_id)
        if ended is not None:
            return ended
        if begun_ms > self.state.forgotten_ms:
            # Had it been committed, its outcome would be known: nothing of its time has been forgotten.
            return RequestError(
                "This transaction is not open and was not committed: it timed out, or the broker was started anew.",
                code=Code.TRANSACTION_ABORTED,
                hint="Nothing of it is in any stream. Begin another.",
            )
        return RequestError(
            "This transaction ended too long ago: whether it was committed is not remembered.",
            code=Code.TRANSACTION_UNKNOWN,
            hint="Read the streams to tell.",
        )

    def _check_commit(self, transaction: _Open, staged: int) -> None:
        """All that may change between staging and commit."""
        if staged != transaction.staged:
            raise RequestError(
                f"{staged} batches and acknowledgements were to be staged, and {transaction.staged} are.",
                code=Code.CONFLICT,
            )
        self._check_fence(transaction.owner, transaction.transactional_id, transaction.epoch)
        for part in transaction.parts:
            hosted = self._publishable(transaction.owner, StreamName.parse(part.stream), part.incarnation)
            shard = hosted.shard(part.shard)
            if shard.failure is not None:
                raise shard.failure.with_traceback(None)
            if SLOT not in shard.annotations and len(shard.annotations) >= ANNOTATION_SLOTS_MAX:
                raise RequestError(f"{part.stream} takes no more sources.", code=Code.UNSUPPORTED)

    async def _prepare(self, transaction: _Open) -> list[Acknowledgement]:
        """All of it, or an error and nothing."""
        prepared: list[Acknowledgement] = []
        try:
            for each in transaction.acknowledgements:
                body = await self._participant(each.view).prepare(transaction.owner, each.body)
                prepared.append(msgspec.structs.replace(each, body=body))
        except BaseException:
            self._abandon(prepared)
            raise
        return prepared

    def _abandon(self, prepared: Iterable[Acknowledgement]) -> None:
        for each in prepared:
            self._participant(each.view).abandon(each.body)

    def _write(
        self,
        journal: Journal,
        transaction: _Open,
        prepared: Sequence[Acknowledgement],
        future: asyncio.Future[Outcome],
    ) -> None:
        """Decide: everything goes to the journal in one event loop iteration, the decision last."""
        number = self.state.next_number
        entries: list[Entry] = [_numbered(part, number) for part in transaction.parts]
        entries += [_numbered(each, number) for each in prepared]
        entries.append(
            Committed(
                number,
                transaction.id,
                str(transaction.owner),
                self._broker.clock_ms(),
                len(transaction.parts),
                len(transaction.acknowledgements),
            )
        )

        def durable(error: FelixError | None) -> None:
            if error is not None:
                self._abandon(prepared)
                self._not_committed(transaction, future, error)
                return
            self._step("committed")
            self.committed += 1
            self._decided_now(transaction, future)
            found = self.state.find(transaction.id)
            assert found is not None
            self._enqueue(found, future)

        for entry in entries:
            self.state.apply(entry)
            journal.append(encode(entry), durable if isinstance(entry, Committed) else ignore)

    def _decided_now(self, transaction: _Open, future: asyncio.Future[Outcome]) -> None:
        """It is open no longer. Its bytes are held until it is applied."""
        self._ended_now(transaction)
        future.add_done_callback(lambda _: self._release(transaction))

    def _not_committed(self, transaction: _Open, future: asyncio.Future[Outcome], error: FelixError) -> None:
        """The journal did not take it, or it may not be any more. It stays open where it may be asked again."""
        transaction.phase = _Phase.OPEN
        if isinstance(error, RequestError):
            self._drop(transaction, error)
        elif transaction.timer is not None and transaction.timer.when() <= asyncio.get_running_loop().time():
            self._timed_out(transaction)
        if not future.done():
            future.set_exception(error)

    def _timed_out(self, transaction: _Open) -> None:
        if transaction.phase is _Phase.OPEN and self._open.get(transaction.id) is transaction:
            self.timed_out += 1
            self._drop(
                transaction,
                RequestError(
                    f"This transaction was open for more than {transaction.timeout_ms} ms and was aborted.",
                    code=Code.TRANSACTION_ABORTED,
                    hint="Nothing of it is in any stream. Begin another, with a longer timeout if need be.",
                ),
            )

    def _drop(self, transaction: _Open, why: FelixError) -> None:
        self._ended_now(transaction)
        self._release(transaction)
        self._ended.put(transaction.id, why)

    def _ended_now(self, transaction: _Open) -> None:
        self._open.pop(transaction.id, None)
        if transaction.timer is not None:
            transaction.timer.cancel()
        on_end, transaction.on_end = transaction.on_end, None
        if on_end is not None:
            on_end()

    def _release(self, transaction: _Open) -> None:
        self._broker.budgets.transactions.give(transaction.taken_bytes)
        transaction.taken_bytes = 0

    # -- applying --------------------------------------------------------------------------------------

    def _enqueue(self, transaction: Transaction, future: asyncio.Future[Outcome] | None = None) -> None:
        if future is None:
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(_heard)
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
                future.set_exception(_owed())
            return
        self._applied(transaction, tuple(offsets[number, part.index] for part in transaction.parts))
        assert transaction.offsets is not None
        if not future.done():
            future.set_result(Outcome(transaction.offsets))

    def _applied(self, transaction: Transaction, offsets: Iterable[tuple[int, ...]]) -> None:
        left = OFFSETS_MAX
        kept: list[tuple[int, ...]] = []
        for each in offsets:
            left -= len(each)
            kept.append(each if left >= 0 else (UNKNOWN_OFFSET,))
        entry = Applied(transaction.committed.number, tuple(kept))
        self.state.apply(entry)
        transaction.offsets = entry.offsets
        if self._journal is not None:
            # If it is refused, the next start, or the next replay, finds the parts in their shards and writes it again.
            self._journal.append(encode(entry), ignore)

    def _shard_of(self, part: Part) -> ShardLog | FelixError | None:
        """None where the stream is gone, or is another incarnation; the error of a shard that could not be opened, or is not served here."""
        hosted = self._broker.streams.get(StreamName.parse(part.stream))
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
                waiting.future.set_exception(_owed())

    # -- what an earlier process left ------------------------------------------------------------------

    async def _settle_stream(self, stream: HostedStream) -> None:
        """Before a stream is served: append what is owed to its shards."""
        for number, shard in stream.replicas.items():
            parts = [
                part
                for transaction in self.state.owed
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
                stream.replicas[number] = shard.failure or _owed()
                return
            self._settled |= placed

    async def _finish_owed(self, transaction: Transaction) -> None:
        offsets: list[tuple[int, ...]] = []
        for part in transaction.parts:
            found = self._settled.get((part.number, part.index))
            if found is None:
                name = StreamName.parse(part.stream)
                hosted = self._broker.streams.get(name)
                if hosted is not None and hosted.incarnation == part.incarnation:
                    return  # its shard does not serve; it is owed still
                found = (UNKNOWN_OFFSET,)
            offsets.append(found)
        if await self._apply_acknowledgements(transaction, patience_s=START_PATIENCE_S):
            self._applied(transaction, offsets)


def _numbered(entry: Part | Acknowledgement, number: int) -> Part | Acknowledgement:
    return msgspec.structs.replace(entry, number=number)


def _release_all(shards: Iterable[ShardLog]) -> None:
    """In one iteration of the event loop: nobody sees one of them without the others."""
    for shard in shards:
        shard.release_visibility()


def _heard(future: asyncio.Future[Outcome]) -> None:
    """Its client may be gone: an error that nobody waits for is no event of the loop."""
    if not future.cancelled():
        future.exception()


def _copy(done: asyncio.Future[Outcome], future: asyncio.Future[Outcome]) -> None:
    if future.done() or done.cancelled():
        return
    error = done.exception()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


def _once(future: asyncio.Future[Appended | FelixError]) -> Callable[[Appended | FelixError], None]:
    def done(result: Appended | FelixError) -> None:
        if not future.done():
            future.set_result(result)

    return done


def _closing() -> UnavailableError:
    return UnavailableError("The broker is stopping.", code=Code.SHUTTING_DOWN, retry_after_ms=500)


def _not_open() -> RequestError:
    return RequestError(
        "There is no such transaction open.",
        code=Code.TRANSACTION_ABORTED,
        hint="It timed out, or the broker was started anew: nothing of it is in any stream. Begin another.",
    )


def _fenced(transactional_id: str) -> RequestError:
    return RequestError(
        f"A newer instance of {transactional_id!r} has taken over.",
        code=Code.TRANSACTION_FENCED,
        hint="Stop this one; nothing of its open transactions is in any stream.",
    )


def _owed() -> UnavailableError:
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
