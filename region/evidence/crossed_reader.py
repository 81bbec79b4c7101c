"""Records that crossed before a resend or arrived under an earlier incarnation, read from the ingress log: one read at a time,
shared by all callers that ask for the same.

A read goes over the whole log on another thread, and nothing ends it before its end. A bridge that opens a link again and again,
and waits for no answer, so costs one thread and not all of them; nor does it keep others from that thread: its own reads wait for
each other before they wait for those of others, and after each of them it pauses REST times as long as that took.
Callers: region.governance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from audit.crossed import Arrived, OffsetSet, arrived_below, crossed_before
from audit.position import ShardName
from audit.trail import Trail
from felix.bounded import BoundedMap
from felix.tasks import end_tasks
from policy.truncation import Live

Found = TypeVar("Found")

REST: Final = 3
"""One bridge has the thread for a quarter of the time at most."""
REST_S_MAX: Final = 60.0
"""A bridge with many shards reads the log for each of them after a resend; however long that takes, it goes on."""
BRIDGES_MAX: Final = 1_000
"""Whose pauses are remembered; more have no read under way at once."""


@dataclass(slots=True)
class _Turns:
    """One bridge's."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ready_s: float = 0.0


class CrossedReader:
    """Reads one ingress log. Cancelling a wait does not end the read."""

    def __init__(self, trail: Trail) -> None:
        self._trail = trail
        self._turn = asyncio.Lock()
        self._turns: BoundedMap[str, _Turns] = BoundedMap(BRIDGES_MAX)
        self._reading: dict[Hashable, asyncio.Task[Any]] = {}

    async def read(self, bridge: str, name: ShardName, lives: Sequence[Live]) -> OffsetSet:
        """What arrived of a shard before the newest of `lives` began. `bridge`: who asks."""
        return await self._shared(
            bridge, (name, tuple(lives)), lambda leaves: crossed_before(leaves, name, lives)
        )

    async def arrived_below(self, bridge: str, name: ShardName, incarnation: bytes) -> Arrived:
        """Below which source offset a shard arrived under this incarnation. `bridge`: who asks."""
        return await self._shared(
            bridge, (name, incarnation), lambda leaves: arrived_below(leaves, name, incarnation, bridge)
        )

    async def _shared(
        self, bridge: str, what: Hashable, find: Callable[[Iterable[memoryview]], Found]
    ) -> Found:
        key = bridge, what
        task: asyncio.Task[Found] | None = self._reading.get(key)
        if task is None:
            task = self._reading[key] = asyncio.ensure_future(self._read(self._turns_of(bridge), find))
            task.add_done_callback(lambda _: self._reading.pop(key, None))
        return await asyncio.shield(task)

    def _turns_of(self, bridge: str) -> _Turns:
        turns = self._turns.use(bridge)
        if turns is None:
            turns = _Turns()
            self._turns.put(bridge, turns)
        return turns

    async def _read(self, own: _Turns, find: Callable[[Iterable[memoryview]], Found]) -> Found:
        def run() -> Found:
            return find(data for _, data in self._trail.leaves())

        now = asyncio.get_running_loop().time
        async with own.lock:
            await asyncio.sleep(max(0.0, own.ready_s - now()))
            async with self._turn:
                begun = now()
                try:
                    return await asyncio.to_thread(run)
                finally:
                    own.ready_s = now() + min(REST_S_MAX, REST * (now() - begun))

    async def close(self) -> None:
        """Begin no more reads."""
        await end_tasks(*self._reading.values())
