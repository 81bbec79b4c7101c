"""What a broker does for transactions that another broker's coordinator decides: of the streams that this one leads.

Asked over the brokers' links (region.transactions.lane_messages); the coordinator asks itself the same.

Invariants:
- what is refused is refused before the decision (`CheckLane`, `PrepareAcknowledgements`); what is committed is appended once, in the order
  of the numbers, however often it is asked;
- what was appended is hidden until its coordinator has it shown, or HIDDEN_S have passed: a coordinator that is gone hides nothing for ever;
- only the broker that leads the transactions' stream, as the cluster's records say, has anything appended, shown, prepared or given back here, and only in
  its own term: another broker of the region has none of that done by one that leads a stream;
- what was prepared is kept until it is applied, abandoned, or its coordinator says that it never was decided.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from felix.bounded import BoundedMap
from felix.errors import Code, FelixError, UnavailableError
from felix.names import SpiffeId, StreamName
from felix.tasks import end_tasks
from felix.transaction_messages import TRANSACTIONS_STREAM
from region.broker import Broker
from region.cluster.assignments import Leader
from region.clustered import Clustered
from region.copies.peer_requests import PeerRequests
from region.log.shard import ShardLog
from region.streams.hosted import HostedStream
from region.transactions.applier import Participant, find_participant
from region.transactions.lane_messages import (
    AbandonAcknowledgements,
    Abandoned,
    ApplyLane,
    AskDecision,
    CheckLane,
    Decision,
    LaneApplied,
    LaneChecked,
    LaneShown,
    PrepareAcknowledgements,
    Prepared,
    ShowLane,
)
from region.transactions.placing import Step, StoppingError, check_takes, no_step, place, release_all
from region.transactions.positions import SLOT, Placing, newest

log = logging.getLogger("felix.region.transactions")

HIDDEN_S: Final = 10.0
"""How long a coordinator may keep what it had appended from readers: longer than another one needs to be elected."""
PATIENCE_S: Final = 10.0
"""A shard that does not take what is committed (its disk is full) is tried for so long, then asked for again."""
PREPARED_LOOK_S: Final = 5.0
"""What was prepared so long ago, and neither applied nor abandoned, is asked about."""
PREPARED_MAX: Final = 10_000
"""Acknowledgements that are prepared at a time: more than a broker's open transactions have (open_transactions.OPEN_MAX) in all but the
largest of them."""
LANES_MAX: Final = 4_096
"""Streams of which the last transaction shown is remembered; of another one what is shown already may be hidden again, for HIDDEN_S."""


class _Hidden:
    """What of a stream that is led here is hidden: its shards are held until a transaction is shown."""

    __slots__ = ("number", "shards", "timer")

    def __init__(self) -> None:
        self.number = 0
        self.shards: list[ShardLog] = []
        self.timer: asyncio.TimerHandle | None = None

    def settle(self) -> list[ShardLog]:
        """Nothing is hidden any more; what was."""
        shards, self.shards = self.shards, []
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        return shards


class _Kept(NamedTuple):
    """Acknowledgements that are prepared: for which transaction, what it asked for, and since when."""

    transaction: bytes
    asked: bytes
    since: float


class Lanes:
    """One per broker of several. On the event loop; `close` before the streams are closed."""

    def __init__(
        self,
        broker: Broker,
        clustered: Clustered,
        requests: PeerRequests,
        participants: Mapping[str, Participant],
        may_be_decided: Callable[[bytes], bool],
        step: Step = no_step,
    ) -> None:
        """`participants`: the views that transactions may reach into, by kind. `may_be_decided`: what this broker's own coordinator answers of
        a transaction; it raises where another broker coordinates."""
        self._broker = broker
        self._clustered = clustered
        self._requests = requests
        self._participant = partial(find_participant, participants)
        self._step = step
        self._closed = False
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._hidden: dict[str, _Hidden] = {}
        """by incarnation"""
        self._shown: BoundedMap[str, int] = BoundedMap(LANES_MAX)
        self._preparing: WeakValueDictionary[tuple[bytes, str, bytes], asyncio.Lock] = WeakValueDictionary()
        self._prepared: dict[tuple[str, bytes], _Kept] = {}
        """by view and what is to be applied"""
        self._answered: dict[tuple[bytes, str, bytes], Prepared] = {}
        """what each of these was told, by transaction, view and what it asked for: one whose answer was lost is told the same again"""
        self._looking: asyncio.Task[None] | None = None
        requests.serve(CheckLane, self._check)
        requests.serve(ApplyLane, self._apply)
        requests.serve(ShowLane, self._show)
        requests.serve(PrepareAcknowledgements, self._prepare)
        requests.serve(AbandonAcknowledgements, self._abandon)

        async def decision(peer: str, asked: AskDecision) -> Decision:
            return Decision(may_be_decided(asked.transaction))

        requests.serve(AskDecision, decision)

    async def close(self) -> None:
        """Append nothing more."""
        self._closed = True
        for hidden in self._hidden.values():
            hidden.settle()
        if self._looking is not None:
            await end_tasks(self._looking)

    # -- batches ---------------------------------------------------------------------------------------

    def _led(self, stream: str, incarnation: str) -> HostedStream:
        """Raises UnavailableError where it is not served here; RequestError(NOT_FOUND) where that is all there is to wait for."""
        if self._closed:
            raise UnavailableError("The broker is stopping.", code=Code.SHUTTING_DOWN, retry_after_ms=500)
        hosted = self._broker.streams.get(StreamName.parse(stream))
        if hosted is None or hosted.deleted or hosted.record.incarnation != incarnation:
            raise UnavailableError(
                f"Broker {self._broker.broker_id} does not know this incarnation of {stream} (yet).",
                retry_after_ms=200,
            )
        self._broker.require_led(hosted)
        return hosted

    def _require_coordinator(self, peer: str) -> Leader:
        """Raises UnavailableError where this broker does not know, or not yet, that `peer` coordinates."""
        leader = coordinator_of(self._broker, self._clustered)
        if leader is None or leader.broker != peer:
            raise UnavailableError(
                f"Broker {self._broker.broker_id} does not know that {peer} coordinates transactions.",
                retry_after_ms=100,
            )
        return leader

    async def _check(self, peer: str, asked: CheckLane) -> LaneChecked:
        self._require_coordinator(peer)
        hosted = self._led(asked.stream, asked.incarnation)
        known = 0
        for number in asked.shards:
            shard = hosted.shard(number)
            check_takes(shard)
            for refused in (shard.held_back(), shard.no_room()):
                if refused is not None:
                    raise refused.with_traceback(None)
            known = max(known, newest(shard.annotations.get(SLOT, b"")))
        return LaneChecked(known)

    async def _apply(self, peer: str, asked: ApplyLane) -> LaneApplied:
        lock = self._busy.setdefault(asked.incarnation, asyncio.Lock())
        async with lock:
            # Within the lock: what came before is committed, or this broker leads the stream no more.
            hosted = self._led(asked.stream, asked.incarnation)
            if self._require_coordinator(peer).epoch != asked.term:
                raise UnavailableError(
                    f"Broker {self._broker.broker_id} does not know that {peer} coordinates transactions in epoch {asked.term}.",
                    retry_after_ms=100,
                )
            wanted: dict[int, list[Placing]] = {}
            for part, before in ((each.part, each.before) for each in asked.parts):
                wanted.setdefault(part.shard, []).append(Placing(part, before))
            shards = {number: hosted.shard(number) for number in wanted}
            if asked.number > (self._shown.look(asked.incarnation) or 0):
                self._hide(hosted, asked.number, [*shards.values()])
            found: dict[tuple[int, int], tuple[int, ...]] = {}
            for placed in await asyncio.gather(
                *(self._place(shards[number], parts) for number, parts in wanted.items())
            ):
                found |= placed
            self._step("placed")
            for each in asked.acknowledged:
                await self._participant(each.view).apply(each.body)
                self._let_go(each.view, each.body)
        parts = [each.part for each in asked.parts]
        if any((part.number, part.index) not in found for part in parts):
            raise UnavailableError(
                f"{asked.stream} does not take all of transaction {asked.number} for now.",
                retry_after_ms=200,
            )
        return LaneApplied([found[part.number, part.index] for part in parts])

    async def _place(self, shard: ShardLog, wanted: list[Placing]) -> dict[tuple[int, int], tuple[int, ...]]:
        try:
            return await place(
                shard, wanted, closed=lambda: self._closed, step=self._step, patience_s=PATIENCE_S
            )
        except StoppingError:
            return {}

    def _hide(self, hosted: HostedStream, number: int, shards: list[ShardLog]) -> None:
        key = hosted.record.incarnation
        hidden = self._hidden.get(key)
        if hidden is None:
            hidden = self._hidden[key] = _Hidden()

            async def forget() -> None:
                # They are closed next, as they are.
                self._hidden.pop(key).settle()

            hosted.closing.append(forget)
        hidden.number = max(hidden.number, number)
        for shard in shards:
            if shard not in hidden.shards:
                shard.hold_visibility()
                hidden.shards.append(shard)
        if hidden.timer is not None:
            hidden.timer.cancel()
        hidden.timer = asyncio.get_running_loop().call_later(HIDDEN_S, self._show_late, hosted.text, hidden)

    def _show_late(self, stream: str, hidden: _Hidden) -> None:
        log.warning(
            "%s shows transaction %d, which nobody had shown for %.0f s: other streams may not have it yet",
            stream,
            hidden.number,
            HIDDEN_S,
        )
        release_all(hidden.settle())

    async def _show(self, peer: str, asked: ShowLane) -> LaneShown:
        self._require_coordinator(peer)
        self._shown.put(asked.incarnation, max(asked.number, self._shown.look(asked.incarnation) or 0))
        hidden = self._hidden.get(asked.incarnation)
        if hidden is not None and hidden.number <= asked.number:
            release_all(hidden.settle())
        return LaneShown()

    # -- acknowledgements ------------------------------------------------------------------------------

    async def _prepare(self, peer: str, asked: PrepareAcknowledgements) -> Prepared:
        self._require_coordinator(peer)
        # One at a time: one that is asked again while it is being prepared gets the same answer.
        lock = self._preparing.setdefault((asked.transaction, asked.view, asked.body), asyncio.Lock())
        async with lock:
            return await self._prepare_once(asked)

    async def _prepare_once(self, asked: PrepareAcknowledgements) -> Prepared:
        hosted = self._broker.use_stream(StreamName.parse(asked.stream))
        self._broker.require_led(hosted)
        epoch = max(hosted.epochs.values(), default=0)
        kept = _Kept(asked.transaction, asked.body, asyncio.get_running_loop().time())
        again = self._answered.get((asked.transaction, asked.view, asked.body))
        if again is not None and again.epoch == epoch:
            self._prepared[asked.view, again.body] = kept
            return again
        if len(self._prepared) >= PREPARED_MAX:
            raise UnavailableError(
                f"{PREPARED_MAX} acknowledgements of transactions are being committed.",
                code=Code.LIMIT_RATE,
                retry_after_ms=100,
            )
        body = await self._participant(asked.view).prepare(SpiffeId.parse(asked.owner), asked.body)
        # What two transactions may acknowledge, as nothing at all, is remembered for the newer one.
        self._let_go(asked.view, body)
        self._prepared[asked.view, body] = kept
        answer = self._answered[asked.transaction, asked.view, asked.body] = Prepared(body, epoch)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look(), name="prepared")
        return answer

    def _let_go(self, view: str, body: bytes) -> bool:
        kept = self._prepared.pop((view, body), None)
        if kept is not None:
            self._answered.pop((kept.transaction, view, kept.asked), None)
        return kept is not None

    async def _abandon(self, peer: str, asked: AbandonAcknowledgements) -> Abandoned:
        self._require_coordinator(peer)
        if self._let_go(asked.view, asked.body):
            self._participant(asked.view).abandon(asked.body)
        return Abandoned()

    async def _look(self) -> None:
        """Ask about what was prepared and not heard of since, as long as there is any."""
        while self._prepared:
            await asyncio.sleep(PREPARED_LOOK_S)
            before = asyncio.get_running_loop().time() - PREPARED_LOOK_S
            for (view, body), kept in list(self._prepared.items()):
                if kept.since > before or await self._may_be_decided(kept.transaction):
                    continue
                # Not what was prepared anew meanwhile.
                if self._prepared.get((view, body)) is kept:
                    log.warning(
                        "acknowledgements of a transaction that was never decided, or is over, are given back"
                    )
                    self._let_go(view, body)
                    self._participant(view).abandon(body)

    async def _may_be_decided(self, transaction: bytes) -> bool:
        coordinator = coordinator_of(self._broker, self._clustered)
        if coordinator is None:
            return True
        try:
            answer = await self._requests.ask(coordinator.broker, AskDecision(transaction), Decision)
        except FelixError:
            return True
        return answer.may_be


def coordinator_of(broker: Broker, clustered: Clustered) -> Leader | None:
    """Who decides transactions; None where nobody does for now."""
    stream = broker.streams.get(TRANSACTIONS_STREAM)
    return None if stream is None else clustered.leader(stream.record, 0)
