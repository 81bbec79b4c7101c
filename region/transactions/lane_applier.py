"""Applies committed transactions to streams that several brokers lead: carries out what region.transactions.rounds decides.

One per term of the coordinator. Whatever a leader does not answer is asked of it, or of the next one, until it is: what is committed is never
given up. On the event loop; no more than one request of a stream is under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from felix.backoff import Backoff, BackoffPolicy
from felix.errors import FelixError
from felix.runtime.port import Runtime
from felix.tasks import TaskSet
from region.transactions.applier import Outcome, ignored
from region.transactions.lane_messages import Acknowledged
from region.transactions.placing import Step
from region.transactions.rounds import Apply, Conclude, Effect, Rounds, Show, Wait
from region.transactions.state import UNKNOWN_OFFSET, Acknowledgement, Transaction
from region.transactions.stream_leaders import Leaders, Offsets

log = logging.getLogger("felix.region.transactions")

TOGETHER_S: Final = 3.0
"""A stream whose leader has not applied its part by then is shown later than the others of its round: they wait for an election no longer.
Below lanes.HIDDEN_S, or leaders would show theirs by themselves."""
AGAIN: Final = BackoffPolicy(first_ms=50, ceiling_ms=1_000)
"""How soon a leader is asked again."""


class LaneApplier:
    """See the module. What `applier.Applier` is to one broker."""

    def __init__(
        self,
        leaders: Leaders,
        term: int,
        stream_of: Callable[[Acknowledgement], str],
        record: Callable[[Transaction, Iterable[tuple[int, ...]]], None],
        runtime: Runtime,
        step: Step,
    ) -> None:
        """`term`: the epoch of the coordinator's journal. `stream_of`: whose leader applies an acknowledgement. `record`, `step`: as
        `applier.Applier` has them."""
        self._leaders = leaders
        self._term = term
        self._stream_of = stream_of
        self._record = record
        self._runtime = runtime
        self._step = step
        self._rounds = Rounds()
        self._held: dict[int, tuple[Transaction, asyncio.Future[Outcome]]] = {}
        self._offsets: dict[int, dict[int, tuple[int, ...]]] = {}
        self._tasks = TaskSet()
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def behind(self) -> frozenset[str]:
        """The streams whose leaders do not answer."""
        return self._rounds.behind

    def outcome_of(self, transaction: Transaction) -> asyncio.Future[Outcome] | None:
        """The future of one that is being applied, else None."""
        held = self._held.get(transaction.committed.number)
        return None if held is None else held[1]

    def enqueue(self, transaction: Transaction, future: asyncio.Future[Outcome] | None = None) -> None:
        """It is committed: apply it behind those before it, once. `future` gets its outcome."""
        number = transaction.committed.number
        if number in self._held:
            return
        if future is None:
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(ignored)
        self._held[number] = transaction, future
        self._offsets[number] = {}
        lanes: dict[str, Counter[int]] = {}
        for part in transaction.parts:
            lanes.setdefault(part.stream, Counter())[part.shard] += 1
        for each in transaction.acknowledgements:
            lanes.setdefault(self._stream_of(each), Counter())
        self._idle.clear()
        self._carry_out(self._rounds.commit(number, lanes))

    async def idle(self) -> None:
        """Returns once nothing is waiting to be applied."""
        await self._idle.wait()

    async def close(self, why: FelixError) -> None:
        """Apply nothing more: the next coordinator does. Whoever waits gets `why`."""
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.end()
        for _, future in self._held.values():
            if not future.done():
                future.set_exception(why)

    # -- effects ---------------------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Apply(lane, numbers):
                    self._tasks.begin(self._apply(lane, numbers))
                case Show(lane, number):
                    self._tasks.begin(self._show(lane, number))
                case Wait(round_):
                    if self._timer is not None:
                        self._timer.cancel()
                    self._timer = asyncio.get_running_loop().call_later(TOGETHER_S, self._waited, round_)
                case Conclude(number):
                    self._conclude(number)

    def _waited(self, round_: int) -> None:
        before = self._rounds.behind
        effects = self._rounds.waited(round_)
        for lane in sorted(self._rounds.behind - before):
            log.warning("%s does not take what is committed; other streams are shown without it", lane)
        self._carry_out(effects)

    async def _apply(self, lane: str, numbers: Sequence[int]) -> None:
        transactions = [self._held[number][0] for number in numbers]
        parts = [part for each in transactions for part in each.parts if part.stream == lane]
        acknowledged = [
            Acknowledged(each.view, each.body)
            for transaction in transactions
            for each in transaction.acknowledgements
            if self._stream_of(each) == lane
        ]
        backoff = Backoff(AGAIN, self._runtime.random)
        while True:
            try:
                placed: Offsets = await self._leaders.apply(
                    lane, self._term, parts, acknowledged, numbers[-1]
                )
                break
            except FelixError as error:
                log.info("transaction %d waits for %s: %s", numbers[-1], lane, error.sentence)
                await asyncio.sleep(backoff.next_ms(error.retry_after_ms) / 1000)
            except Exception:
                # A mistake of ours must not leave what is committed undone.
                log.exception("transaction %d could not be applied to %s", numbers[-1], lane)
                await asyncio.sleep(backoff.next_ms() / 1000)
        for (number, index), offsets in placed.items():
            self._offsets[number][index] = offsets
        self._step("applied")
        self._carry_out(self._rounds.applied(lane))

    async def _show(self, lane: str, number: int) -> None:
        """For TOGETHER_S at most: who led it is gone by then, or shows it by itself."""
        loop = asyncio.get_running_loop()
        backoff, deadline = Backoff(AGAIN, self._runtime.random), loop.time() + TOGETHER_S
        while True:
            try:
                await self._leaders.show(lane, number)
                break
            except FelixError as error:
                wait_s = backoff.next_ms(error.retry_after_ms) / 1000
                if loop.time() + wait_s > deadline:
                    log.info("%s was not told to show transaction %d: %s", lane, number, error.sentence)
                    break
                await asyncio.sleep(wait_s)
            except Exception:
                # Nor must one keep what is committed later waiting for ever.
                log.exception("%s could not be told to show transaction %d", lane, number)
                break
        self._carry_out(self._rounds.shown(lane))

    def _conclude(self, number: int) -> None:
        transaction, future = self._held.pop(number)
        found = self._offsets.pop(number)
        self._record(transaction, [found.get(part.index, (UNKNOWN_OFFSET,)) for part in transaction.parts])
        assert transaction.offsets is not None
        if not future.done():
            future.set_result(Outcome(transaction.offsets))
        if not self._held:
            self._idle.set()
