"""The coordinator of a broker's transactions: staged in memory, committed in its journal, applied to the shards.

1. *Staged*: batches and acknowledgements wait in memory (region.transactions.open_transactions).
2. *Committed*: all of it is written into the journal of the system stream `felix/system/transactions`, behind it the decision. From
   there on it will be applied, whatever happens to this process.
3. *Applied*: appended to the shards, and visible in all of them at once (region.transactions.applier).
4. *Done*: the journal records it, and the payloads are released.

Invariants:
- nothing of a transaction is in a shard before its commit is durable;
- transactions are applied in the order of their commits;
- an outcome is remembered for a bounded time; beyond it the answer is that nobody knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from felix.errors import Code, FelixError, RequestError
from felix.names import SpiffeId, StreamName
from region.broker import Broker
from region.gather import ignore
from region.log.companions import JournalKind
from region.metadata.records import StreamConfig
from region.streams import HostedStream, StreamTable
from region.transactions.applier import Applier, Outcome, Participant, Step, ignored, still_owed
from region.transactions.open_transactions import OpenTransaction, OpenTransactions, Phase, closing, fenced
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
from region.views.journal import Journal

SYSTEM_STREAM: Final = StreamName("felix", "system", "transactions")
"""Its companion log is the journal. It has no records, and nobody but the broker may open it."""


def _no_step(_: str) -> None: ...


class Coordinator:
    """One broker's transactions. `start` before anything is served; then what is `open` is begun and staged there, and committed here."""

    def __init__(
        self, broker: Broker, participants: Mapping[str, Participant], *, step: Step = _no_step
    ) -> None:
        """`participants`: the views that transactions may reach into, by kind. `step` is called at each step of a commit: tests crash there."""
        self._broker = broker
        self._step = step
        self._participants = participants
        self.open = OpenTransactions(broker, self._participant, lambda: self.state)
        self.applier = Applier(broker.streams, self._participant, self._record, step)
        self.state = TransactionState()
        self._journal: Journal | None = None
        self._opening = asyncio.Lock()
        self._commits: dict[bytes, asyncio.Future[Outcome]] = {}
        self._deciding: set[asyncio.Task[None]] = set()
        self.committed = self.aborted = 0

    # -- life ------------------------------------------------------------------------------------------

    async def start(self, streams: StreamTable) -> None:
        """Apply what was committed and not done, stream by stream as they are opened. Call it before other streams are open."""

        async def settle(opened: HostedStream) -> None:
            await self.applier.settle_stream(opened, self.state.owed)

        streams.before_serving.append(settle)
        stream = streams.get(SYSTEM_STREAM)
        if stream is not None:
            await self._open_journal(stream)

    async def started(self) -> None:
        """Every stream that can be opened is. What is owed to streams that are gone, and to views, is settled."""
        for transaction in self.state.owed:
            await self.applier.finish_owed(transaction)

    async def close(self) -> None:
        """Let what is committed be applied; what is open is dropped."""
        self.open.closed = True
        self.applier.stop()
        for transaction in self.open:
            if transaction.phase is Phase.OPEN:
                self.open.drop(transaction, closing())
        with suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await self.applier.idle()
        for task in self._deciding:
            task.cancel()
        await asyncio.gather(*self._deciding, return_exceptions=True)
        await self.applier.close()
        for future in self._commits.values():
            if not future.done():
                future.set_exception(closing())
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
        self.applier.start()
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
                await self.applier.idle()
                await self._replay(journal)
                for transaction in self.state.owed:
                    self.applier.enqueue(transaction)
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
    def owed_count(self) -> int:
        """Committed, and not applied everywhere yet."""
        return len(self.state.owed)

    async def fence(self, owner: SpiffeId, transactional_id: str) -> int:
        """A new instance of this owner's transactional id: its epoch. What an older one has open is aborted."""
        journal = await self._ready()
        for transaction in self.open:
            if (transaction.owner, transaction.transactional_id) == (owner, transactional_id):
                if transaction.phase is Phase.COMMITTING:
                    # It is being decided; the new instance waits to see what became of it.
                    with suppress(FelixError):
                        await asyncio.shield(self._commits[transaction.id])
                else:
                    self.open.drop(transaction, fenced(transactional_id))
        epoch = self.state.epoch(str(owner), transactional_id) + 1
        entry = Fenced(str(owner), transactional_id, epoch)
        self.state.apply(entry)
        await journal.written(encode(entry))
        return epoch

    def _participant(self, view: str) -> Participant:
        found = self._participants.get(view)
        if found is None:
            raise RequestError(
                f"A transaction cannot carry acknowledgements of {view!r}.", code=Code.UNSUPPORTED
            )
        return found

    async def abort(self, owner: SpiffeId, transaction_id: bytes) -> None:
        """Drop it. One that has ended without a commit is aborted already. Raises RequestError(CONFLICT) where it is committed."""
        await self._certain()
        if self.state.find(transaction_id) is not None or transaction_id in self._commits:
            raise RequestError("This transaction is committed.", code=Code.CONFLICT)
        transaction = self.open.find(owner, transaction_id)
        if transaction is not None:
            self.aborted += 1
            self.open.drop(
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
        transaction = self.open.find(owner, transaction_id)
        if transaction is None:
            raise self.open.why_not_open(transaction_id, begun_ms).with_traceback(None)
        self.open.check_commit(transaction, staged)
        if not staged:
            self.open.drop(transaction, RequestError("This transaction was empty.", code=Code.CONFLICT))
            return Outcome(())
        transaction.phase = Phase.COMMITTING
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        future.add_done_callback(ignored)
        future.add_done_callback(lambda _: self._commits.pop(transaction_id, None))
        self._commits[transaction_id] = future
        # By itself: a client that is gone while it is being decided must not leave it undecided.
        task = asyncio.ensure_future(self._decide(transaction, staged, future))
        self._deciding.add(task)
        task.add_done_callback(self._deciding.discard)
        return await asyncio.shield(future)

    async def _decide(
        self, transaction: OpenTransaction, staged: int, future: asyncio.Future[Outcome]
    ) -> None:
        try:
            journal = await self._ready()
            # A replay may have shown that an earlier try is there after all.
            found = self.state.find(transaction.id)
            if found is None:
                prepared = await self._prepare(transaction)
                try:
                    self.open.check_commit(transaction, staged)
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
        waited_for = self.applier.outcome_of(found)
        if waited_for is not None:
            waited_for.add_done_callback(lambda done: _copy(done, future))
            return
        future.set_exception(still_owed())

    async def _prepare(self, transaction: OpenTransaction) -> list[Acknowledgement]:
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
        transaction: OpenTransaction,
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
            self.applier.enqueue(found, future)

        for entry in entries:
            self.state.apply(entry)
            journal.append(encode(entry), durable if isinstance(entry, Committed) else ignore)

    def _decided_now(self, transaction: OpenTransaction, future: asyncio.Future[Outcome]) -> None:
        """It is open no longer. Its bytes are held until it is applied."""
        self.open.end(transaction)
        future.add_done_callback(lambda _: self.open.release(transaction))

    def _not_committed(
        self, transaction: OpenTransaction, future: asyncio.Future[Outcome], error: FelixError
    ) -> None:
        """The journal did not take it, or it may not be any more. It stays open where it may be asked again."""
        transaction.phase = Phase.OPEN
        if isinstance(error, RequestError):
            self.open.drop(transaction, error)
        elif transaction.timer is not None and transaction.timer.when() <= asyncio.get_running_loop().time():
            self.open.expire(transaction)
        if not future.done():
            future.set_exception(error)

    # -- applied ---------------------------------------------------------------------------------------

    def _record(self, transaction: Transaction, offsets: Iterable[tuple[int, ...]]) -> None:
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


def _numbered(entry: Part | Acknowledgement, number: int) -> Part | Acknowledgement:
    return msgspec.structs.replace(entry, number=number)


def _copy(done: asyncio.Future[Outcome], future: asyncio.Future[Outcome]) -> None:
    if future.done() or done.cancelled():
        return
    error = done.exception()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())
