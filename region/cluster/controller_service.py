"""A broker's part in being the controller, on a real store: feeds a `ControllerCore` with what happens, and does what it says.

Every broker has one. Which of them is the controller is decided in the store, by a key under the broker's lease that only one can make, and
each transaction of the core compares it; so two that both believe to have it do no harm, and none is missed for longer than a lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any

from felix.errors import FelixError
from felix.runtime.port import Random, Runtime
from felix.tasks import TaskSet
from region.cluster.controller import (
    PLAN_LOOKS,
    TICK_MS,
    Action,
    Alarm,
    Answered,
    AskEnds,
    Changed,
    ControllerCore,
    EndTold,
    Event,
    Find,
    Found,
    Leased,
    LeaseLost,
    Loaded,
    StreamWish,
    Tick,
    Transact,
    Wanted,
)
from region.cluster.election import LogEnd
from region.cluster.mirror import ClusterMirror
from region.cluster.records import ELECTION_CHARS, ShardId
from region.cluster.registry import Registry
from region.metadata.following import RETRY
from region.metadata.lease import Lease
from region.metadata.port import MetadataStore
from region.metadata.transaction import Change, Snapshot, TransactResult

log = logging.getLogger("felix.region.cluster")


class ControllerService:
    """Made before the mirror is started, so that nothing is missed; `run` beside it; `close` at the end, before the registry.

    `ask_ends`: asks brokers how far their copies of a shard go; they tell `end_told`.
    """

    def __init__(
        self,
        store: MetadataStore,
        mirror: ClusterMirror,
        registry: Registry,
        ask_ends: Callable[[AskEnds], None],
        *,
        lease_ms: int,
        runtime: Runtime,
    ) -> None:
        self.alarms: dict[str, str] = {}
        """by subject: what needs a person"""
        self._store = store
        self._mirror = mirror
        self._ask_ends = ask_ends
        self._clock = runtime.clock
        self._core = ControllerCore(
            mirror.view.keys, registry.broker, lease_ms, _election_ids(runtime.random)
        )
        self._requests = TaskSet()
        self._is_closed = False
        mirror.on_change(self._mirrored)
        registry.on_lease(self._leased)

    @property
    def term(self) -> int:
        """The term in which this broker is the controller, as far as it knows; 0 where it is not."""
        return self._core.term

    def silent_ms(self, broker: str) -> int:
        """For how long a broker surely has had no lease."""
        return self._core.silent_ms(broker, self._clock.boot_ms())

    def want(self, streams: Iterable[StreamWish], deleted: Mapping[str, int]) -> None:
        """The streams of the catalog, and of deleted ones the revision of their marks, by incarnation."""
        self._step(Wanted(tuple(streams), dict(deleted)))

    async def planned(self) -> dict[ShardId, tuple[str, ...]]:
        """Where a rebalancing would have each shard, the leader first; whether this broker is the controller or not."""
        planning = self._core.planning()
        while True:
            places = planning.advance(PLAN_LOOKS)
            if places is not None:
                return places
            await asyncio.sleep(0)

    def end_told(self, shard: ShardId, broker: str, end: LogEnd) -> None:
        """How far a broker's copy of a shard goes, as was asked."""
        self._step(EndTold(shard, broker, end))

    async def run(self) -> None:
        """What waits for a time. Until it is cancelled."""
        while True:
            await asyncio.sleep(0 if self._core.wants_step else TICK_MS / 1_000)
            self._step(Tick())

    async def close(self) -> None:
        """Decide nothing more. What was sent may still happen; it was right when it was sent, or it will not."""
        self._is_closed = True
        await self._requests.end()

    def _mirrored(self, known: Snapshot | Change) -> None:
        self._step(Loaded(known) if isinstance(known, Snapshot) else Changed(known))

    def _leased(self, lease: Lease | None) -> None:
        self._step(LeaseLost() if lease is None else Leased(lease.id))

    def _step(self, event: Event) -> None:
        if self._is_closed:
            return
        try:
            actions = self._core.step(event, self._clock.boot_ms())
        except Exception:
            # The next event may be one that it can go on from; nobody else elects meanwhile.
            log.exception("the controller failed at %s", type(event).__name__)
            return
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Transact():
                self._begin(self._transact(action))
            case Find():
                self._begin(self._find(action))
            case AskEnds():
                self._ask_ends(action)
            case Alarm(subject, sentence):
                if sentence:
                    self.alarms[subject] = sentence
                    log.error("%s: %s", subject, sentence)
                else:
                    self.alarms.pop(subject, None)

    def _begin(self, request: Coroutine[Any, Any, None]) -> None:
        self._requests.begin(request, name="controller's request")

    async def _transact(self, asked: Transact) -> None:
        result: TransactResult | None = None
        try:
            result = await self._store.transact(asked.transaction.compares, asked.transaction.writes)
        except FelixError as error:
            log.warning("a transaction of the controller has no answer: %s", error)
        self._step(Answered(asked.id, result))

    async def _find(self, asked: Find) -> None:
        try:
            entries, revision = await self._mirror.find(asked.keys)
        except FelixError as error:
            log.warning("the controller cannot read the metadata store: %s", error)
            # It decides anew at once, and would ask a store that refuses as fast as it can.
            await asyncio.sleep(RETRY.first_ms / 1_000)
            self._step(Found(asked.id, None))
            return
        self._step(Found(asked.id, entries, revision))


def _election_ids(random: Random) -> Iterator[str]:
    while True:
        yield random.randbytes(ELECTION_CHARS // 2).hex()
