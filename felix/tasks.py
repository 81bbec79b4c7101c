"""Ending tasks: cancelled until they have ended, whatever they do with the first cancellation.

`task.cancel()` and `with suppress(CancelledError): await task` has two faults. A task that is itself ending another in this way
when it is cancelled takes its own cancellation for the other's, and goes on for ever; and who waits so, and is cancelled, takes
that for the task's. Both are a process that does not stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

log = logging.getLogger("felix.tasks")

AGAIN_S: Final = 2.0
"""A task that has not ended by then is cancelled again: its first cancellation was lost, or what it does at its end takes long."""


async def end_tasks(*tasks: asyncio.Task[Any], again_s: float = AGAIN_S) -> None:
    """Cancel these and wait until all have ended. What they raise is logged. Raises CancelledError where the caller is cancelled."""
    while waiting := [task for task in tasks if not task.done()]:
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=again_s)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended with an error", task.get_name(), exc_info=error)


class TaskSet:
    """The tasks of one owner, each held until it has ended: the loop does not hold them. Event loop only."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, Any], *, name: str | None = None) -> asyncio.Task[Any]:
        """Run `work` beside its owner."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    def cancel(self) -> None:
        """Have all end soon, and wait for none."""
        for task in tuple(self._tasks):
            task.cancel()

    async def end(self) -> None:
        """`end_tasks` for all, with those that begin meanwhile."""
        while tasks := tuple(self._tasks):
            await end_tasks(*tasks)
            self._tasks.difference_update(tasks)
