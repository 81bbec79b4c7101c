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

Of several brokers the one that leads the system stream coordinates, for a *term*: from the replay of its journal until another one leads it.
Then it asks the leaders of the streams concerned before it decides, and has them apply what is decided (region.transactions.lane_applier). What
was open ends with the term; what was committed is carried on by the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from felix.errors import Code, FelixError, NotLeaderError, RequestError, UnavailableError
from felix.names import SpiffeId
from felix.tasks import TaskSet, end_tasks
from felix.transaction_messages import TRANSACTIONS_STREAM
from region.broker import Broker
from region.gather import ignore
from region.log.companions import JournalKind
from region.log.errors import StorageFailedError
from region.metadata.records import StreamConfig
from region.streams.hosted import HostedStream
from region.streams.table import StreamTable
from region.transactions.applier import (
    START_PATIENCE_S,
    Applier,
    Outcome,
    Participant,
    find_participant,
    ignored,
)
from region.transactions.lane_applier import LaneApplier
from region.transactions.open_transactions import (
    OpenTransaction,
    OpenTransactions,
    Phase,
    closing,
    fenced,
    moved,
)
from region.transactions.placing import Step, no_step, still_owed
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
from region.transactions.stream_leaders import Leaders
from region.views.journal import Journal

log = logging.getLogger("felix.region.transactions")

COPIES: Final = 3
"""Brokers that have copies of the journal, where the region has so many: any one may be lost."""


READ_AGAIN_S: Final = 5.0
"""Between two tries to read a journal that was closed because its disk had failed, while nobody asks for it."""
NEWEST_AHEAD_MAX: Final = 1 << 32
"""So far a stream may be ahead of the journal, which lost its end: more than were ever lost, and too little to use the numbers up."""


class _Reserved:
    """Transactions whose acknowledgements of one stream are prepared and not applied, all by a leader of the same epoch."""

    __slots__ = ("epoch", "ids")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.ids: set[bytes] = set()


class Coordinator:
    """One broker's transactions. `start` before anything is served; then what is `open` is begun and staged there, and committed here."""

    def __init__(
        self,
        broker: Broker,
        participants: Mapping[str, Participant],
        *,
        leaders: Leaders | None = None,
        step: Step = no_step,
    ) -> None:
        """`participants`: the views that transactions may reach into, by kind. `leaders`: how those of streams are reached, where there are
        several brokers. `step` is called at each step of a commit: tests crash there."""
        self._broker = broker
        self._step = step
        self._participant = partial(find_participant, participants)
        self.open = OpenTransactions(broker, self._participant, lambda: self.state)
        self.applier = Applier(broker.streams, self._participant, self._record, step)
        """where one broker is alone"""
        self._leaders = leaders
        self.lanes: LaneApplier | None = None
        """of several brokers, while this one coordinates"""
        self._growing: asyncio.Task[None] | None = None
        self._reserved: dict[str, _Reserved] = {}
        self._is_started = False
        self._newest = 0
        """the last transaction that a shard was seen to know"""
        self.state = TransactionState()
        self._journal: Journal | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_uncertain = False
        """Whether the journal was closed since its state was read: that may be ahead of it. Of one broker alone."""
        self._in_doubt: list[tuple[OpenTransaction, Sequence[Acknowledgement]]] = []
        """Decisions whose write failed: the journal tells once it is open again whether they stand there. What they acknowledge stays kept for them."""
        self._opening = asyncio.Lock()
        self._commits: dict[bytes, asyncio.Future[Outcome]] = {}
        self._deciding = TaskSet()
        self._abandoning: dict[bytes, set[asyncio.Task[None]]] = {}
        """what leaders are being told to give back, by transaction"""
        self.committed = self.aborted = 0

    # -- life ------------------------------------------------------------------------------------------

    async def start(self, streams: StreamTable) -> None:
        """Apply what was committed and not done, stream by stream as they are opened. Call it before other streams are open."""

        streams.before_serving.append(self._settle)
        streams.on_change(self._stream_changed)
        stream = streams.get(TRANSACTIONS_STREAM)
        if stream is not None:
            await self._open_journal(stream)

    async def started(self) -> None:
        """Every stream that can be opened is. What is owed to streams that are gone, and to views, is settled."""
        for transaction in self.state.owed:
            await self.applier.finish_owed(transaction)
        self._is_started = True

    # -- of one broker, whose disk may have failed -----------------------------------------------------

    async def _settle(self, stream: HostedStream) -> None:
        """For `StreamTable.before_serving`: what is committed stands in the stream's shards before anybody finds them. Raises UnavailableError where that
        cannot be known or done now."""
        if not any(self._writes_to(transaction, stream) for transaction in self.state.owed):
            return
        if self._is_started:
            journal = self._journal
            if journal is not None:
                # Nothing more is decided for shards that are not found.
                await journal.settled()
            if journal is None or journal.lost is not None:
                self._read_again()
                raise UnavailableError("What transactions have decided is about to be read again.")
            await self.applier.passed(stream.name, START_PATIENCE_S)
        await self.applier.settle_stream(stream, self.state.owed)

    def _writes_to(self, transaction: Transaction, stream: HostedStream) -> bool:
        return any(
            (part.stream, part.incarnation) == (stream.text, stream.incarnation) for part in transaction.parts
        )

    def _acknowledges(self, transaction: Transaction, stream: HostedStream) -> bool:
        return any(self._stream_of(each) == stream.text for each in transaction.acknowledgements)

    def _stream_changed(self, stream: HostedStream) -> None:
        """Once a stream is served again whose disk had failed, what is owed to it is applied."""
        if not self._is_started or stream.deleted or stream.elsewhere is not None:
            return
        if stream.name == TRANSACTIONS_STREAM and self._is_uncertain:
            self._read_again()
        elif self._journal is not None and self._journal.lost is None:
            for each in self.state.owed:
                is_concerned = self._writes_to(each, stream) or self._acknowledges(each, stream)
                is_committed = (
                    each.committed.id not in self._commits or self.applier.outcome_of(each) is not None
                )
                if is_concerned and is_committed:
                    # Also one that is being applied: that may have missed the stream.
                    self.applier.enqueue(each)

    def _read_again(self) -> None:
        """Know again what is decided, though nobody asks for it: others wait for what is owed to them."""
        if self._reading is None:
            self._reading = self._deciding.begin(self._read_until_known())

    async def _read_until_known(self) -> None:
        try:
            while self._is_uncertain or (self._journal is not None and self._journal.lost is not None):
                try:
                    await self._ready()
                except FelixError as error:
                    log.warning("transactions: the journal cannot be read yet: %s", error)
                    await asyncio.sleep(READ_AGAIN_S)
        finally:
            self._reading = None

    async def _let_go(self) -> None:
        """The journal's stream is closed, and served again: what was decided is read anew then."""
        journal, self._journal = self._journal, None
        self._is_uncertain = True
        if journal is not None:
            await journal.close()

    async def _open_again(self) -> Journal:
        """What is known of decisions is what the journal says; all that is committed is on its way before anything else is decided."""
        await self.applier.idle()
        journal = await self._open_journal(await self._make_stream())
        self._is_uncertain = False
        in_doubt, self._in_doubt = self._in_doubt, []
        for transaction, prepared in in_doubt:
            if self.state.find(transaction.id) is None:
                self._abandon(transaction, prepared)
        for each in self.state.owed:
            self.applier.enqueue(each)
        await self.applier.idle()
        if self._journal is not journal:
            raise UnavailableError(
                "What transactions have decided is about to be read again.", retry_after_ms=100
            )
        return journal

    # -- of several brokers ----------------------------------------------------------------------------

    async def lead(self, stream: HostedStream) -> None:
        """For `StreamTable.before_serving`: this broker coordinates from now on, where the stream is the system's."""
        if stream.name != TRANSACTIONS_STREAM:
            return
        assert self._leaders is not None
        await self._cease()
        self.lanes = LaneApplier(
            self._leaders,
            max(stream.epochs.values(), default=0),
            self._stream_of,
            self._record,
            self._broker.runtime,
            self._step,
        )
        try:
            await self._open_journal(stream)
        except BaseException:
            self.lanes = None
            raise
        stream.closing.append(self._cease)
        for transaction in self.state.owed:
            for each in transaction.acknowledgements:
                # By whom they were prepared is not known any more.
                self._reserve(self._stream_of(each), 0, transaction.committed.id)
            self.lanes.enqueue(transaction)
        if stream.record.config.replicas < self._copies and self._growing is None:
            self._growing = asyncio.ensure_future(self._grow(stream))

    async def _grow(self, stream: HostedStream) -> None:
        """A journal of fewer copies than the region has brokers for: of one that had fewer, or that one broker alone had served."""
        copies = self._copies
        try:
            self._broker.check_more_copies(stream, copies)
            await self._broker.catalog.alter_stream(
                stream.name,
                stream.record.incarnation,
                lambda config: msgspec.structs.replace(config, replicas=max(copies, config.replicas)),
            )
            log.info("the journal of transactions gets %d copies", copies)
        except FelixError as error:
            log.warning("the journal of transactions has fewer copies than it could have: %s", error)
        finally:
            self._growing = None

    async def _cease(self) -> None:
        """Another broker coordinates, or this one stops: what is committed is carried on there, and what is open is not."""
        lanes, self.lanes = self.lanes, None
        journal, self._journal = self._journal, None
        if lanes is None:
            return
        why = closing() if self.open.closed else self._not_here()
        for future in list(self._commits.values()):
            if not future.done():
                future.set_exception(why)
        await self._deciding.end()
        await lanes.close(why)
        for transaction in self.open:
            self.open.drop(transaction, moved())
        self._reserved.clear()
        self.state = TransactionState()
        if journal is not None:
            await journal.close()

    @property
    def elsewhere(self) -> FelixError | None:
        """What is answered where another broker coordinates, or nobody yet; None where this one does."""
        return None if self._leaders is None or self._journal is not None else self._not_here()

    def _not_here(self) -> FelixError:
        stream = self._broker.streams.get(TRANSACTIONS_STREAM)
        return (stream and stream.elsewhere) or NotLeaderError(
            "Transactions are about to be served here.", retry_after_ms=100, stream=str(TRANSACTIONS_STREAM)
        )

    async def find(self) -> None:
        """See to it that the system stream is there. Raises what making it raises, NotLeaderError where another broker coordinates."""
        if self._leaders is None:
            return
        with suppress(RequestError):
            await self._broker.find_stream(TRANSACTIONS_STREAM)
        await self._make_stream()
        if (elsewhere := self.elsewhere) is not None:
            raise elsewhere

    async def _make_stream(self) -> HostedStream:
        return await self._broker.ensure_stream(TRANSACTIONS_STREAM, StreamConfig(replicas=self._copies))

    @property
    def _copies(self) -> int:
        cluster = self._broker.config.cluster
        return 1 if cluster is None else min(COPIES, len(cluster.brokers))

    def may_be_decided(self, transaction_id: bytes) -> bool:
        """Whether a transaction is being committed, or is committed and is not applied everywhere. Raises NotLeaderError where another broker may know better."""
        self._require_led()
        found = self.state.find(transaction_id)
        return transaction_id in self._commits or (found is not None and found.offsets is None)

    def _require_led(self) -> None:
        """What is not known here is known nowhere, as long as this returns."""
        if (elsewhere := self.elsewhere) is not None:
            raise elsewhere
        stream = self._broker.streams.get(TRANSACTIONS_STREAM)
        if self._leaders is not None and stream is not None:
            self._broker.require_led(stream)

    def _stream_of(self, acknowledgement: Acknowledgement) -> str:
        return str(self._participant(acknowledgement.view).stream_of(acknowledgement.body))

    @property
    def _applies(self) -> Applier | LaneApplier:
        return self.applier if self._leaders is None or self.lanes is None else self.lanes

    # -- its end ---------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Let what is committed be applied; what is open is dropped."""
        self.open.closed = True
        if self._leaders is not None:
            if self._growing is not None:
                await end_tasks(self._growing)
            await self._cease()
            return
        self.applier.stop()
        for transaction in self.open:
            if transaction.phase is Phase.OPEN:
                self.open.drop(transaction, closing())
        with suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await self.applier.idle()
        await self._deciding.end()
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
            self.state = await _replayed(journal)
        except BaseException:
            # Nothing is decided before all that was decided is known.
            await self._broker.streams.close_companion(stream, number)
            raise
        self._journal = journal
        if self._leaders is None:
            stream.closing.append(self._let_go)
            self.applier.start()
        return journal

    async def _ready(self) -> Journal:
        """The journal, made with the first transaction, and replayed where an append to it was refused. Raises why not."""
        async with self._opening:
            journal = self._journal
            if journal is None:
                if (elsewhere := self.elsewhere) is not None:
                    raise elsewhere
                if self._is_uncertain:
                    return await self._open_again()
                return await self._open_journal(await self._make_stream())
            if journal.lost is not None:
                # Decisions whose entries were refused do not exist: only the journal is authoritative.
                if self._leaders is None:
                    await self.applier.idle()
                state = await _replayed(journal)
                if self._journal is not journal:
                    raise self._not_here()  # the term has ended meanwhile, and perhaps another one has begun
                self.state = state
                for transaction in self.state.owed:
                    self._applies.enqueue(transaction)
            refused = journal.refusal()
            if refused is not None:
                raise refused.with_traceback(None)
            return journal

    async def _certain(self) -> None:
        """If the journal refused an append, the state is ahead of the journal: reload it first. Raises the error that prevents
        this.
        """
        if (elsewhere := self.elsewhere) is not None:
            raise elsewhere
        if self._is_uncertain or (self._journal is not None and self._journal.lost is not None):
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

    async def abort(self, owner: SpiffeId, transaction_id: bytes) -> None:
        """Drop it. One that has ended without a commit is aborted already. Raises RequestError(CONFLICT) where it is committed,
        NotLeaderError where another broker may have committed it."""
        await self._certain()
        if self.state.find(transaction_id) is not None or transaction_id in self._commits:
            raise RequestError("This transaction is committed.", code=Code.CONFLICT)
        self._require_led()
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
            self._require_led()
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
        self._deciding.begin(self._decide(transaction, staged, future))
        return await asyncio.shield(future)

    async def _decide(
        self, transaction: OpenTransaction, staged: int, future: asyncio.Future[Outcome]
    ) -> None:
        try:
            journal = await self._ready()
            # A replay may have shown that an earlier try is there after all.
            found = self.state.find(transaction.id)
            if found is None:
                await self._check(transaction)
                prepared = await self._prepare(transaction)
                try:
                    self.open.check_commit(transaction, staged)
                    refused = journal.refusal()
                    if refused is not None:
                        raise refused
                except BaseException:
                    self._abandon(transaction, prepared)
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
        waited_for = self._applies.outcome_of(found)
        if waited_for is not None:
            waited_for.add_done_callback(lambda done: _copy(done, future))
            return
        future.set_exception(still_owed())

    async def _check(self, transaction: OpenTransaction) -> None:
        """Of several brokers: ask those whose shards are to take it whether they will. Raises why not."""
        if self._leaders is None:
            return
        shards: dict[tuple[str, bytes], set[int]] = {}
        for part in transaction.parts:
            shards.setdefault((part.stream, part.incarnation), set()).add(part.shard)
        known = await asyncio.gather(
            *(self._leaders.check(*stream, sorted(numbers)) for stream, numbers in shards.items())
        )
        # A journal that lacks its end, given up by an operator, must not give a number twice.
        newest = max(self._newest, *known, 0)
        if newest > max(self.state.next_number, self._newest) + NEWEST_AHEAD_MAX:
            raise UnavailableError(
                f"A stream of this transaction says that it has transaction {newest}, and the newest one is "
                f"{self.state.next_number - 1}.",
                hint="The log of that stream was damaged, or its broker is ill: look at its alarms.",
            )
        self._newest = newest

    async def _prepare(self, transaction: OpenTransaction) -> list[Acknowledgement]:
        """All of it, or an error and nothing."""
        prepared: list[Acknowledgement] = []
        # What an earlier try had prepared goes before: it would be taken for what this one prepares.
        if before := self._abandoning.get(transaction.id):
            await asyncio.wait(before)
        try:
            for each in transaction.acknowledgements:
                if self._leaders is None:
                    body = await self._participant(each.view).prepare(transaction.owner, each.body)
                else:
                    body = await self._prepare_at_leader(self._leaders, transaction, each)
                prepared.append(msgspec.structs.replace(each, body=body))
        except BaseException:
            self._abandon(transaction, prepared)
            raise
        return prepared

    async def _prepare_at_leader(
        self, leaders: Leaders, transaction: OpenTransaction, each: Acknowledgement
    ) -> bytes:
        """A new leader knows nothing of what the last one had prepared: it may be asked for more once that is applied."""
        stream = self._stream_of(each)
        made = await leaders.prepare(stream, each.view, transaction.owner, each.body, transaction.id)
        held = self._reserved.get(stream)
        if held is not None and held.epoch != made.epoch:
            self._abandon_at_leader(leaders, transaction.id, stream, each.view, made.body)
            raise UnavailableError(
                f"Another broker leads {stream} since just now, and what was acknowledged before is not applied there yet.",
                retry_after_ms=100,
            )
        self._reserve(stream, made.epoch, transaction.id)
        return made.body

    def _reserve(self, stream: str, epoch: int, transaction_id: bytes) -> None:
        self._reserved.setdefault(stream, _Reserved(epoch)).ids.add(transaction_id)

    def _unreserve(self, transaction_id: bytes) -> None:
        for stream, held in list(self._reserved.items()):
            held.ids.discard(transaction_id)
            if not held.ids:
                del self._reserved[stream]

    def _abandon(self, transaction: OpenTransaction, prepared: Iterable[Acknowledgement]) -> None:
        if self._leaders is None:
            for each in prepared:
                self._participant(each.view).abandon(each.body)
            return
        self._unreserve(transaction.id)
        for each in prepared:
            stream = self._stream_of(each)
            self._abandon_at_leader(self._leaders, transaction.id, stream, each.view, each.body)

    def _abandon_at_leader(
        self, leaders: Leaders, transaction_id: bytes, stream: str, view: str, body: bytes
    ) -> None:
        async def abandon() -> None:
            # A leader that does not hear of it asks.
            with suppress(FelixError):
                await leaders.abandon(stream, view, body)

        task = self._deciding.begin(abandon())
        tasks = self._abandoning.setdefault(transaction_id, set())
        tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not tasks and self._abandoning.get(transaction_id) is tasks:
                del self._abandoning[transaction_id]

        task.add_done_callback(done)

    def _write(
        self,
        journal: Journal,
        transaction: OpenTransaction,
        prepared: Sequence[Acknowledgement],
        future: asyncio.Future[Outcome],
    ) -> None:
        """Decide: everything goes to the journal in one event loop iteration, the decision last."""
        number = max(self.state.next_number, self._newest + 1)
        entries: list[Entry] = [_numbered(part, number) for part in transaction.parts]
        entries += [_numbered(each, number) for each in prepared]
        entries.append(
            Committed(
                number,
                transaction.id,
                str(transaction.owner),
                self._broker.streams_ms(),
                len(transaction.parts),
                len(transaction.acknowledgements),
            )
        )

        term = self.lanes

        def durable(error: FelixError | None) -> None:
            if self.lanes is not term:
                return  # whoever asks again asks the next coordinator, whose journal tells
            if error is not None:
                if self._leaders is None and isinstance(error, StorageFailedError):
                    self._in_doubt.append((transaction, prepared))
                else:
                    self._abandon(transaction, prepared)
                self._not_committed(transaction, future, error)
                return
            self._step("committed")
            self.committed += 1
            self._decided_now(transaction, future)
            found = self.state.find(transaction.id)
            assert found is not None
            self._applies.enqueue(found, future)

        # Encoded before the first one counts: what cannot be encoded was never decided.
        for entry, encoded in [(entry, encode(entry)) for entry in entries]:
            self.state.apply(entry)
            journal.append(encoded, durable if isinstance(entry, Committed) else ignore)

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
        self._unreserve(transaction.committed.id)
        if self._journal is not None:
            # If it is refused, the next start, or the next replay, finds the parts in their shards and writes it again.
            self._journal.append(encode(entry), ignore)


async def _replayed(journal: Journal) -> TransactionState:
    state = TransactionState()
    async for entry in journal.replay():
        state.apply(decode(entry))
    return state


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
