"""What crossed before a resend, read from the ingress log: one read at a time, and one for all who ask the same.

A read goes over the whole log on another thread, and nothing ends it before its end. A bridge that opens a link again and again,
and waits for no answer, so costs one thread and not all of them. Callers: region.governance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from audit.crossed import OffsetSet, ShardName, crossed_before
from audit.tile import read_entries
from audit.trail import Trail
from policy.truncation import Live
from region.witnessing import note_size


class CrossedReader:
    """Reads one ingress log."""

    def __init__(self, trail: Trail) -> None:
        self._trail = trail
        self._turn = asyncio.Lock()
        self._reading: dict[tuple[ShardName, tuple[Live, ...]], asyncio.Task[OffsetSet]] = {}

    async def read(self, name: ShardName, lives: Sequence[Live]) -> OffsetSet:
        """What arrived of a shard before the newest of `lives` began. Cancelling the wait does not end the read."""
        key = (name, tuple(lives))
        task = self._reading.get(key)
        if task is None:
            task = self._reading[key] = asyncio.ensure_future(self._read(*key))
            task.add_done_callback(lambda _: self._reading.pop(key, None))
        return await asyncio.shield(task)

    async def _read(self, name: ShardName, lives: tuple[Live, ...]) -> OffsetSet:
        def find() -> OffsetSet:
            size = note_size(self._trail.publish())
            found = read_entries(self._trail.files, 0, size, size)
            return crossed_before((data for _, data in found), name, lives)

        async with self._turn:
            return await asyncio.to_thread(find)

    async def close(self) -> None:
        """Begin no more reads."""
        tasks = list(self._reading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
