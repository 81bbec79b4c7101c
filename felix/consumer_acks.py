"""The acknowledgements of one consumer, from the moment it asks for them until the broker has answered.

Those of one event loop iteration are sent together, in as few calls as hold them. On the event loop; used by felix.consumer alone.

Invariants:
- whoever waits for an acknowledgement hears of it, also where its call was refused;
- `holds` is true of a shard from `add` until what was added is answered: it must not be released before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from felix.consumer_messages import RANGES_MAX, Ack, Nack, ShardAck
from felix.errors import Code, FelixError, UnavailableError
from felix.exchange import Exchange
from felix.names import StreamName
from felix.ranges import RangeSet, pairs

_log = logging.getLogger("felix.consumer")


class _Flush:
    """Acknowledgements of one iteration of the event loop, and who waits for how they went."""

    __slots__ = ("ranges", "waiting")

    def __init__(self) -> None:
        self.ranges: dict[tuple[int, int], RangeSet] = {}
        self.waiting: list[tuple[int, asyncio.Future[bool]]] = []


class Acknowledgements:
    """See the module."""

    def __init__(
        self,
        exchange: Exchange,
        stream: StreamName,
        *,
        lost: Callable[[int], object],
        counted: Callable[[int, int, list[tuple[int, int]]], object],
        answered: Callable[[], object],
    ) -> None:
        """`lost` is told how many did not count, `counted` of which shard, by which generation, which offsets did; `answered` is called after each call's answer."""
        self._exchange = exchange
        self._stream = stream
        self._lost = lost
        self._counted = counted
        self._answered = answered
        self._loop = asyncio.get_running_loop()
        self._flush: _Flush | None = None
        self._acking: Counter[int] = Counter()
        self._working: set[asyncio.Task[None]] = set()

    def add(self, shard: int, generation: int, ranges: list[tuple[int, int]]) -> None:
        """Add these to the acknowledgements of this event loop iteration."""
        if self._flush is None:
            self._flush = _Flush()
            self._loop.call_soon(self._send)
        gathered = self._flush.ranges.setdefault((shard, generation), RangeSet())
        for first, following in ranges:
            gathered.add(first, following)

    def outcome(self, shard: int) -> asyncio.Future[bool]:
        """Whether what was added of a shard in this iteration counted. Awaited: raises FelixError where the broker refused it."""
        assert self._flush is not None, "added in the same iteration"
        told: asyncio.Future[bool] = self._loop.create_future()
        self._flush.waiting.append((shard, told))
        return told

    def holds(self, shard: int) -> bool:
        """Whether something of a shard is asked for and not answered."""
        return self._acking[shard] > 0 or (
            self._flush is not None and any(each == shard for each, _ in self._flush.ranges)
        )

    async def drain(self) -> None:
        """Until all of them are answered."""
        while self._flush is not None or self._working:
            self._send()
            # Not gathered: where time runs out their callers still have to hear of it.
            await asyncio.wait(self._working)

    async def ask(self, call: Ack | Nack) -> Any:
        """The reply to a call that says which assignment it means; asked again where the broker has no room for it now."""
        while True:
            try:
                return await self._exchange.call(call, again=False)
            except UnavailableError as error:
                if error.retry_after_ms is None or not self._exchange.is_open:
                    raise
                await asyncio.sleep(error.retry_after_ms / 1000)

    def _send(self) -> None:
        flush, self._flush = self._flush, None
        if flush is not None:
            self._acking.update(shard for shard, _ in flush.ranges)
            task = self._loop.create_task(self._acknowledge(flush), name=f"felix-ack-{self._stream}")
            self._working.add(task)
            task.add_done_callback(self._working.discard)

    async def _acknowledge(self, flush: _Flush) -> None:
        counted: dict[int, bool] = {}
        lost = 0
        try:
            for acks in _calls(flush.ranges):
                try:
                    reply = await self.ask(Ack(acks))
                except FelixError as error:
                    if not is_lost(error):
                        raise
                    fenced = [each.shard for each in acks]
                else:
                    fenced = reply.fenced
                for each in acks:
                    counted[each.shard] = each.shard not in fenced and counted.get(each.shard, True)
                    if each.shard not in fenced:
                        self._counted(each.shard, each.generation, pairs(each.ranges))
                lost += len(fenced)
        except FelixError as error:
            _log.warning("an acknowledgement of %s was refused: %s", self._stream, error)
            for _, told in flush.waiting:
                if not told.done():
                    told.set_exception(error)
                    # A program that does not wait for it sees it in the log, not in a warning about the future.
                    told.exception()
        else:
            if lost:
                self._lost(lost)
            for shard, told in flush.waiting:
                if not told.done():
                    told.set_result(counted.get(shard, False))
        finally:
            self._acking.subtract(shard for shard, _ in flush.ranges)
            self._answered()


def is_lost(error: FelixError) -> bool:
    """Whether a call came too late, or its outcome is unknown: its records are redelivered if it was not carried out."""
    return isinstance(error, UnavailableError) or error.code is Code.CONSUMER_FENCED


def _calls(ranges: dict[tuple[int, int], RangeSet]) -> Iterator[list[ShardAck]]:
    """As few calls as hold all of them; each names a shard once, and no more ranges than a message takes."""
    call: dict[int, ShardAck] = {}
    for (shard, generation), held in ranges.items():
        flat = held.flat()
        for at in range(0, len(flat), 2 * RANGES_MAX):
            if shard in call:
                yield list(call.values())
                call = {}
            call[shard] = ShardAck(shard, generation, flat[at : at + 2 * RANGES_MAX])
    if call:
        yield list(call.values())
