"""Fair scheduling: tenants run in turn, so that a tenant with much work delays another by one turn at most.

`FairScheduler` shares the event loop: work with more to send than fits into one turn asks for another turn, and gets it after
every other waiting tenant has had one. `Gate` is a semaphore for reads from disk that serves its waiters in the same order.

Invariants: within a tenant, first come, first served; no work waits for two turns at the same time; a place that was handed out
is returned once, even if its waiter was cancelled.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

TURN_BYTES: Final = 256 << 10
"""Sent in one turn: well under a millisecond of work, and enough that a turn is worth its call."""
TURNS_AT_ONCE: Final = 4
"""Turns before the loop looks at its sockets again."""
LOOK_S: Final = 0.005
"""How long a place that others may have freed is not noticed."""

T = TypeVar("T")


class Rotation(Generic[T]):
    """A queue per tenant, served in turn."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def put(self, tenant: str, item: T) -> None:
        """At the end of its tenant's queue; a tenant that had none comes last."""
        self._queues.setdefault(tenant, deque()).append(item)

    def take(self) -> T:
        """The first of the tenant whose turn it is; that tenant is last now."""
        tenant, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[tenant] = queue
        return item


class FairScheduler:
    """Turns on the event loop, tenant by tenant. `later` calls a function in the loop's next round."""

    def __init__(self, later: Callable[[Callable[[], None]], object]) -> None:
        self._later = later
        self._waiting: Rotation[Callable[[], None]] = Rotation()
        self._scheduled = False

    def ask(self, tenant: str, go_on: Callable[[], None]) -> None:
        """Call `go_on` when it is this tenant's turn."""
        self._waiting.put(tenant, go_on)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._later(self._give)

    def _give(self) -> None:
        self._scheduled = False
        try:
            for _ in range(min(TURNS_AT_ONCE, len(self._waiting))):
                self._waiting.take()()
        finally:
            # A failure must not prevent the turns of others.
            if self._waiting:
                self._schedule()


class Gate:
    """Places that are few. `take` says whether one may be had now, besides the number; `give` returns it."""

    def __init__(self, places: int, take: Callable[[], bool], give: Callable[[], None]) -> None:
        self._left = places
        self._take = take
        self._give = give
        self._waiting: Rotation[asyncio.Future[None]] = Rotation()
        self._look: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place, once it is this tenant's turn."""
        if self._waiting or not self._try():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.put(tenant, future)
            self._serve()
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self._leave()
                raise
        try:
            yield
        finally:
            self._leave()

    def _try(self) -> bool:
        if self._left and self._take():
            self._left -= 1
            return True
        return False

    def _leave(self) -> None:
        self._left += 1
        self._give()
        self._serve()

    def _serve(self) -> None:
        """Let in who can be, tenant by tenant."""
        while self._waiting and self._try():
            future = self._waiting.take()
            if future.done():
                # The waiter was cancelled.
                self._left += 1
                self._give()
            else:
                future.set_result(None)
        if self._waiting and self._look is None:
            # The budget that `take` needs may be freed elsewhere, without a notification.
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._looked)

    def _looked(self) -> None:
        self._look = None
        self._serve()
