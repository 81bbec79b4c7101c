"""What crossed before a resend or arrived under an earlier incarnation, read from the ingress log: one read at a time, and one for
all who ask the same.

A read goes over the whole log on another thread, and nothing ends it before its end. A bridge that opens a link again and again,
and waits for no answer, so costs one thread and not all of them. Callers: region.governance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from audit.crossed import OffsetSet, arrived_below, crossed_before
from audit.position import ShardName
from audit.trail import Trail
from felix.tasks import end_tasks
from policy.truncation import Live

Found = TypeVar("Found")


class CrossedReader:
    """Reads one ingress log. Cancelling a wait does not end the read."""

    def __init__(self, trail: Trail) -> None:
        self._trail = trail
        self._turn = asyncio.Lock()
        self._reading: dict[Hashable, asyncio.Task[Any]] = {}

    async def read(self, name: ShardName, lives: Sequence[Live]) -> OffsetSet:
        """What arrived of a shard before the newest of `lives` began."""
        return await self._shared((name, tuple(lives)), lambda leaves: crossed_before(leaves, name, lives))

    async def arrived_below(self, name: ShardName, incarnation: bytes) -> int:
        """Below which source offset a shard arrived under this incarnation."""
        return await self._shared(
            (name, incarnation), lambda leaves: arrived_below(leaves, name, incarnation)
        )

    async def _shared(self, key: Hashable, find: Callable[[Iterable[memoryview]], Found]) -> Found:
        task: asyncio.Task[Found] | None = self._reading.get(key)
        if task is None:
            task = self._reading[key] = asyncio.ensure_future(self._read(find))
            task.add_done_callback(lambda _: self._reading.pop(key, None))
        return await asyncio.shield(task)

    async def _read(self, find: Callable[[Iterable[memoryview]], Found]) -> Found:
        def run() -> Found:
            return find(data for _, data in self._trail.leaves())

        async with self._turn:
            return await asyncio.to_thread(run)

    async def close(self) -> None:
        """Begin no more reads."""
        await end_tasks(*self._reading.values())
