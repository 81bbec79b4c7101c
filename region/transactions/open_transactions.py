"""The transactions that are open: begun, and staged in memory until they are committed, aborted, or their time is over.

Invariants:
- what is staged is within the broker's `transactions` budget, and given back when the transaction is dropped, or applied;
- each transaction is open for its timeout at most, unless it is being committed;
- of one that ended without a commit the reason is remembered, for a bounded number of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from felix.batch import BATCH_BYTES_MAX, FLAG_SEALED, decode_batch
from felix.bounded import BoundedMap
from felix.errors import Code, FelixError, NotLeaderError, RequestError, UnavailableError
from felix.names import SpiffeId, StreamName
from keys.envelope import SEAL_BYTES
from policy.access import Verb
from region.broker import Broker
from region.log.message_ids import message_ids
from region.log.shard import ShardLog
from region.streams.hosted import HostedStream
from region.transactions.applier import Participant
from region.transactions.placing import check_takes
from region.transactions.positions import PARTS_PER_SHARD_MAX
from region.transactions.state import Acknowledgement, Part, TransactionState
from region.views.journal import ENTRY_BYTES_MAX

OPEN_MAX: Final = 1_024
"""Open transactions of one broker: each has a timer and a place in every sweep."""
OPEN_PER_IDENTITY_MAX: Final = 64
"""One client's mistake (transactions begun and left) must not keep the others from theirs."""
PARTS_MAX: Final = 512
"""Batches and acknowledgements of one transaction."""
STAGED_BYTES_MAX: Final = ENTRY_BYTES_MAX - 1_024
"""One staged batch or acknowledgement, so that it fits an entry of the journal with its names."""
ENDED_MAX: Final = 10_000
"""Ended without a commit: a late call gets the reason."""


class Phase(Enum):
    OPEN = "open"
    COMMITTING = "committing"


@dataclass(slots=True)
class OpenTransaction:
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
    phase: Phase = Phase.OPEN
    timer: asyncio.TimerHandle | None = None
    on_end: Callable[[], None] | None = None


class OpenTransactions:
    """Those of one broker. `find` and what follows it are the coordinator's."""

    def __init__(
        self, broker: Broker, participant: Callable[[str], Participant], state: Callable[[], TransactionState]
    ) -> None:
        """`participant`: a view by its kind. `state`: what is committed, as it is now."""
        self._broker = broker
        self._participant = participant
        self._state = state
        self._open: dict[bytes, OpenTransaction] = {}
        self._ended: BoundedMap[bytes, FelixError] = BoundedMap(ENDED_MAX)
        self.closed = False
        """The broker stops: nothing is begun any more."""
        self.timed_out = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenTransaction]:
        return iter(list(self._open.values()))

    def find(self, owner: SpiffeId, transaction_id: bytes) -> OpenTransaction | None:
        """The owner's transaction of this id, where it is open."""
        found = self._open.get(transaction_id)
        return found if found is not None and found.owner == owner else None

    def begin(
        self,
        owner: SpiffeId,
        transaction_id: bytes,
        timeout_ms: int,
        transactional_id: str,
        epoch: int,
        hold: Callable[[], Callable[[], None]] | None = None,
    ) -> OpenTransaction:
        """Begin, or find what this owner has begun under the id. Raises RequestError, UnavailableError.

        `hold` is called with a new one, may refuse it, and gives what is to be called when it ends.
        """
        if self.closed:
            raise closing()
        held = self._open.get(transaction_id)
        if held is not None:
            if held.owner != owner:
                raise RequestError("This transaction id is in use.", code=Code.CONFLICT)
            return held
        if len(transaction_id) != 16:
            raise RequestError(f"A transaction id has 16 bytes, not {len(transaction_id)}.")
        if transaction_id in self._ended or self._state().find(transaction_id) is not None:
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
        made = OpenTransaction(
            transaction_id, owner, transactional_id, epoch, self._broker.streams_ms(), timeout_ms
        )
        made.on_end = hold() if hold is not None else None
        self._open[transaction_id] = made
        made.timer = asyncio.get_running_loop().call_later(timeout_ms / 1000, self.expire, made)
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
        if header.flags & FLAG_SEALED or header.producer_id or header.is_bridged:
            raise RequestError(
                "A staged batch is neither sealed nor numbered nor brought by a bridge.",
                code=Code.BATCH_MALFORMED,
            )
        if header.total_length > min(STAGED_BYTES_MAX, BATCH_BYTES_MAX - SEAL_BYTES):
            raise RequestError(
                f"A staged batch of {header.total_length} bytes; {STAGED_BYTES_MAX} are allowed.",
                code=Code.BATCH_TOO_LARGE,
            )
        self._shard(hosted, header.shard)
        if hosted.record.config.views.deduplication is not None:
            message_ids(batch)  # raises now what would be raised at the append
        there = sum((part.stream, part.shard) == (str(name), header.shard) for part in transaction.parts)
        if there >= PARTS_PER_SHARD_MAX:
            raise RequestError(
                f"{there} batches of this transaction are for shard {header.shard} of {name}, the most that are allowed.",
                code=Code.BATCH_TOO_LARGE,
                hint="Put more records into a batch, or fewer into a transaction.",
            )
        self._take(transaction, header.total_length)
        transaction.parts.append(Part(0, index, str(name), self._kept(hosted), header.shard, batch.encode()))
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

    def _staging(self, owner: SpiffeId, transaction_id: bytes, index: int) -> OpenTransaction | None:
        """The transaction; None where this index was staged already."""
        transaction = self._mine(owner, transaction_id)
        if transaction.phase is not Phase.OPEN:
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

    def _take(self, transaction: OpenTransaction, size: int) -> None:
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

    def _mine(self, owner: SpiffeId, transaction_id: bytes) -> OpenTransaction:
        transaction = self.find(owner, transaction_id)
        if transaction is None:
            # A kept error is raised without the traces of the times before: they would hold all that was in sight then.
            raise (self._ended.look(transaction_id) or _not_open()).with_traceback(None)
        self._check_fence(owner, transaction.transactional_id, transaction.epoch)
        return transaction

    def _check_fence(self, owner: SpiffeId, transactional_id: str, epoch: int) -> None:
        if transactional_id and epoch != self._state().epoch(str(owner), transactional_id):
            raise fenced(transactional_id)

    def _publishable(self, owner: SpiffeId, name: StreamName, incarnation: bytes) -> HostedStream:
        self._broker.require(owner, Verb.PUBLISH, name)
        hosted = self._broker.use_stream(name, Verb.PUBLISH)
        if incarnation and incarnation not in (hosted.incarnation, self._kept(hosted)):
            raise RequestError(
                f"{name} was deleted and created anew since it was looked up.", code=Code.CONFLICT
            )
        return hosted

    def _shard(self, hosted: HostedStream, number: int) -> ShardLog | None:
        """None where another broker serves it, or nobody for now. Raises as `HostedStream.shard`."""
        found = hosted.find(number)
        if isinstance(found, ShardLog):
            return found
        if isinstance(found, NotLeaderError):
            return None
        raise found

    def _kept(self, hosted: HostedStream) -> bytes:
        """What parts know their stream by. Of several brokers the catalog's: that of an ephemeral stream is another one at each broker."""
        return (
            hosted.incarnation if self._broker.clustered is None else bytes.fromhex(hosted.record.incarnation)
        )

    def resolve(self, owner: SpiffeId, stream: str) -> HostedStream:
        """A stream that this owner may publish into. Raises as `Broker.require`."""
        return self._publishable(owner, StreamName.parse(stream), b"")

    def why_not_open(self, transaction_id: bytes, begun_ms: int) -> FelixError:
        """What a commit of a transaction is answered that is neither open nor committed; `begun_ms` is what its client says."""
        ended = self._ended.look(transaction_id)
        if ended is not None:
            return ended
        if begun_ms > self._state().forgotten_ms:
            # Had it been committed, its outcome would be known: nothing of its time has been forgotten.
            return RequestError(
                "This transaction was aborted: it timed out, or its broker was started anew or coordinates transactions no more.",
                code=Code.TRANSACTION_ABORTED,
                hint="Nothing of it is in any stream. Begin another.",
            )
        return RequestError(
            "This transaction ended too long ago: whether it was committed is not remembered.",
            code=Code.TRANSACTION_UNKNOWN,
            hint="Read the streams to tell.",
        )

    def check_commit(self, transaction: OpenTransaction, staged: int) -> None:
        """All that may change between staging and commit."""
        if staged != transaction.staged:
            raise RequestError(
                f"{staged} batches and acknowledgements were to be staged, and {transaction.staged} are.",
                code=Code.CONFLICT,
            )
        self._check_fence(transaction.owner, transaction.transactional_id, transaction.epoch)
        for part in transaction.parts:
            hosted = self._publishable(transaction.owner, StreamName.parse(part.stream), part.incarnation)
            shard = self._shard(hosted, part.shard)
            if shard is not None:  # else its leader was asked
                check_takes(shard)

    def expire(self, transaction: OpenTransaction) -> None:
        """Its time is over: it is dropped, unless it is being committed."""
        if transaction.phase is Phase.OPEN and self._open.get(transaction.id) is transaction:
            self.timed_out += 1
            self.drop(
                transaction,
                RequestError(
                    f"This transaction was open for more than {transaction.timeout_ms} ms and was aborted.",
                    code=Code.TRANSACTION_ABORTED,
                    hint="Nothing of it is in any stream. Begin another, with a longer timeout if need be.",
                ),
            )

    def drop(self, transaction: OpenTransaction, why: FelixError) -> None:
        """It ends without a commit; `why` is what a late call is told."""
        self.end(transaction)
        self.release(transaction)
        self._ended.put(transaction.id, why)

    def end(self, transaction: OpenTransaction) -> None:
        """It is open no longer. Its bytes are held until `release`."""
        self._open.pop(transaction.id, None)
        if transaction.timer is not None:
            transaction.timer.cancel()
        on_end, transaction.on_end = transaction.on_end, None
        if on_end is not None:
            on_end()

    def release(self, transaction: OpenTransaction) -> None:
        """Give back what is staged in it."""
        self._broker.budgets.transactions.give(transaction.taken_bytes)
        transaction.taken_bytes = 0


def closing() -> UnavailableError:
    """What is answered while the broker stops."""
    return UnavailableError("The broker is stopping.", code=Code.SHUTTING_DOWN, retry_after_ms=500)


def moved() -> RequestError:
    """What was open at a broker that coordinates transactions no more."""
    return RequestError(
        "This transaction was aborted: it was open at a broker that coordinates transactions no more, as after a drain or a restart.",
        code=Code.TRANSACTION_ABORTED,
        hint="Nothing of it is in any stream. Begin another.",
    )


def _not_open() -> RequestError:
    return RequestError(
        "This transaction was aborted: it is open no more.",
        code=Code.TRANSACTION_ABORTED,
        hint="It timed out, or its broker was started anew or coordinates transactions no more. Nothing of it is in any stream. Begin another.",
    )


def fenced(transactional_id: str) -> RequestError:
    """What an older instance of a transactional id is told."""
    return RequestError(
        f"A newer instance of {transactional_id!r} has taken over.",
        code=Code.TRANSACTION_FENCED,
        hint="Stop this one; nothing of its open transactions is in any stream.",
    )
