"""Dead letters of one durable subscription and one shard that are given back: each record is delivered again once its dead letter is out of its queue.

`Returning` is journaled first: the records are settled no more, and delivered to nobody yet. Then their dead letters are taken out of the queue, durably,
and `Returned` is journaled: they are delivered. What is found in the journal without `Returned` goes on there, and dead letters that are out
already are passed over. So a record is delivered once for each time that it is given back, whichever broker is killed on the way, and its dead
letter is gone exactly where the record is delivered again.

How a store uses it: it hands entries that it finds in its journal to `take` and `take_returned`, in order, puts what is `pending` into its snapshots, calls
`start` after a replay and `stop` before one.

Invariant: no dead letter is taken out of its queue before its `Returning` is durable. On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from felix.errors import CorruptionError, FelixError, UnavailableError
from region.gather import Done, ignore
from region.subscriptions.entries import Entry, Returned, Returning

log = logging.getLogger("felix.region.subscriptions")

RETRY_S_MIN: Final = 0.05
RETRY_S_MAX: Final = 10.0
"""How long what is returning waits whose queue refuses: a full disk, or another broker that leads it."""


@dataclass(slots=True)
class _Pending:
    """One entry that is under way. `durable`: it stands in the journal."""

    returning: Returning
    done: Done
    durable: asyncio.Event = field(default_factory=asyncio.Event)


class Returns:
    """See the module."""

    def __init__(
        self,
        subscription: bytes,
        place: str,
        append: Callable[[Entry, Done], None],
        remove: Callable[[Returning], Awaitable[None]],
        leave: Callable[[Returning], None],
        returned: Callable[[Returning], None],
    ) -> None:
        """`place`: of which shard, for the log. `append`: into the journal. `remove`: take the dead letters out of their queue, durably, as far as they
        are in it. `leave`: they are not taken out now. `returned`: they are, and what they stand for is delivered."""
        self._subscription = subscription
        self._place = place
        self._append = append
        self._remove = remove
        self._leave = leave
        self._returned = returned
        self._pending: deque[_Pending] = deque()
        self._task: asyncio.Task[None] | None = None

    @property
    def pending(self) -> Iterator[Returning]:
        """What is under way, oldest first."""
        return (each.returning for each in list(self._pending))

    def begin(self, returning: Returning, done: Done) -> None:
        """Give these back. `done` once their dead letters are gone, or why that is not known."""
        pending = _Pending(returning, done)
        self._pending.append(pending)

        def written(error: FelixError | None) -> None:
            # A refusal makes the view replay: `stop` follows, and answers.
            if error is None:
                pending.durable.set()

        self._append(returning, written)
        self.start()

    # -- the journal -----------------------------------------------------------------------------------

    def take(self, returning: Returning, end: int) -> Returning:
        """An entry of the journal, at replay: what of it stands. Records from `end` on are no more, so that their dead letters stay."""
        kept = [pair for pair in zip(returning.letters, returning.offsets, strict=True) if pair[1] < end]
        returning = msgspec.structs.replace(
            returning, letters=[letter for letter, _ in kept], offsets=[offset for _, offset in kept]
        )
        pending = _Pending(returning, ignore)
        pending.durable.set()
        self._pending.append(pending)
        return returning

    def take_returned(self) -> Returning:
        """The same of the oldest being over. Raises CorruptionError."""
        if not self._pending:
            raise CorruptionError(
                "A journal says that dead letters were given back of which it says nothing."
            )
        return self._pending.popleft().returning

    # -- carrying --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on with what is under way."""
        if (self._task is None or self._task.done()) and self._pending:
            self._task = asyncio.ensure_future(self._carry())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("dead letters of %s are not given back", self._place, exc_info=task.exception())

    def stop(self) -> None:
        """Do nothing more; what is in the journal goes on after the next replay."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        pending, self._pending = self._pending, deque()
        for each in pending:
            self._leave(each.returning)
            each.done(
                UnavailableError(
                    f"Whether dead letters of {self._place} are given back is not known yet: it stopped serving here.",
                    hint="Try again: what was begun is finished first, and nothing is given back twice.",
                    retry_after_ms=500,
                )
            )

    async def _carry(self) -> None:
        wait_s = RETRY_S_MIN
        while self._pending:
            first = self._pending[0]
            await first.durable.wait()
            try:
                await self._remove(first.returning)
            except FelixError as error:
                log.warning("%d records of %s wait to be given back: their dead letters in %s cannot be taken out: %s",
                            len(first.returning.offsets), self._place, first.returning.queue, error)  # fmt: skip
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_S_MAX)
                continue
            wait_s = RETRY_S_MIN
            self._pending.popleft()
            self._append(Returned(self._subscription), ignore)
            self._returned(first.returning)
            first.done(None)
