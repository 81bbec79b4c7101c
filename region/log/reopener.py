"""Opens again what an error of the disk has stopped: each by itself, after pauses of its own (felix.reopening).

Invariants: of one key there is one try at a time; none begins before its pause is over. On the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from enum import Enum
from typing import Final, Generic, TypeVar

from felix.reopening import Reopening
from felix.runtime.port import Runtime
from felix.tasks import TaskSet, end_tasks

NOT_YET_S: Final = 0.1
"""How soon is looked again whether what is due may be tried."""

KeyT = TypeVar("KeyT", bound=Hashable)


class Tried(Enum):
    """What came of a try."""

    OPENED = "opened"
    FAILED = "failed"
    """it is tried again after the next pause"""
    NOT_YET = "not yet"
    """somebody uses what has failed: nothing was done"""
    OVER = "over"
    """it is not tried any more: it is gone, or has lost what was acknowledged"""


class Reopener(Generic[KeyT]):
    """See the module."""

    def __init__(self, runtime: Runtime, attempt: Callable[[KeyT], Awaitable[Tried]]) -> None:
        """`attempt`: one try, which raises nothing; while it runs, `pause_s` tells after how long the next one would come."""
        self.opened = 0
        """So many were opened again."""
        self._clock = runtime.clock
        self._attempt = attempt
        self._known: dict[KeyT, Reopening] = {}
        """of what has failed since this start"""
        self._trying: dict[KeyT, asyncio.Task[None]] = {}
        self._tasks = TaskSet()

    def failed(self, key: KeyT) -> None:
        """It has failed. Where that is known already, nothing changes."""
        if key in self._trying:
            return
        reopening = self._known.setdefault(key, Reopening())
        reopening.failed(self._clock.boot_ms())
        self._trying[key] = self._tasks.begin(self._try_again(key, reopening), name="opening again")

    def is_waiting(self, key: KeyT) -> bool:
        """Whether it has failed, and is to be opened again."""
        return key in self._trying

    def next_pause_s(self, key: KeyT) -> int:
        """How long is waited after a try that fails now."""
        after = Reopening(pause_ms=self._known[key].pause_ms)
        after.failed(0)
        return after.pause_ms // 1_000

    async def forget(self, key: KeyT) -> None:
        """It is gone. Returns once no try is under way."""
        if (task := self._trying.get(key)) is not None:
            await end_tasks(task)
        self._known.pop(key, None)

    def drop(self, key: KeyT) -> None:
        """It is not to be opened again in this process. A try that is under way is ended, and not waited for."""
        self._known.pop(key, None)
        if (task := self._trying.get(key)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Try nothing any more."""
        await self._tasks.end()

    async def _try_again(self, key: KeyT, reopening: Reopening) -> None:
        try:
            while True:
                now = self._clock.boot_ms()
                if not reopening.is_due(now):
                    await asyncio.sleep((reopening.due_ms - now) / 1_000)
                    continue
                tried = await self._attempt(key)
                if tried is Tried.NOT_YET:
                    await asyncio.sleep(NOT_YET_S)
                elif tried is Tried.FAILED:
                    reopening.failed(self._clock.boot_ms())
                else:
                    break
        finally:
            del self._trying[key]
        if tried is Tried.OPENED:
            self.opened += 1
            reopening.opened(self._clock.boot_ms())
        else:
            self._known.pop(key, None)
