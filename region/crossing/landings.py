"""Landings: what comes in over bridges and is between its append and its answer, by link shard.

Ingest streams begin and end their ranges here; whoever ends a grant, or stops it, waits here until nothing taken before is on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from typing import Final, NamedTuple, Protocol

from felix.errors import Code, FelixError, ProtocolError
from felix.names import SpiffeId, StreamName

ASKS_S: Final = 15.0
"""A bridge that stands by asks every 5 s, or sooner. After a longer time without a question it counts anew how long records have waited."""


class Replaceable(Protocol):
    """An ingest stream (region.crossing.ingest)."""

    def keeps_out(self, bridge: SpiffeId, incarnation: bytes, log_end: int) -> FelixError | None:
        """Why a bridge whose source states that the shard's log ends there is to stand by; None where it takes over."""

    def replaced(self) -> None:
        """A newer one feeds its link shard."""


class _Waits(NamedTuple):
    """Records that wait for the bridge that carries, by the statement that another one showed; of a loop's clock, in s."""

    carrier: SpiffeId
    since_s: float
    asked_s: float


class Landing:
    """One link shard at the destination: the stream that feeds it, and the ranges between their append and their answer.

    It outlives its stream until the last of these ranges has been answered, or cannot be any more.
    """

    __slots__ = ("_forget", "_passing", "_under_way", "grant_id", "settled", "stream")

    def __init__(self, forget: Callable[[], object]) -> None:
        self.stream: Replaceable | None = None
        self.grant_id = ""
        """under which its ranges were taken; another comes only once they are answered"""
        self.settled = asyncio.Event()
        self.settled.set()
        self._forget = forget
        self._under_way: set[int] = set()
        self._passing: dict[frozenset[int], list[asyncio.Event]] = {}
        """by the ranges that are still on their way, of those that were when somebody began to wait"""

    def begin(self, source_base: int) -> None:
        """A range begins its way. Raises ProtocolError(STATE) where it is on its way already."""
        if source_base in self._under_way:
            raise ProtocolError(
                f"The range at source offset {source_base} was sent again before it was answered.",
                code=Code.STATE,
            )
        self._under_way.add(source_base)
        self.settled.clear()

    def end(self, source_base: int) -> None:
        """It was answered, or will not be."""
        if source_base not in self._under_way:
            return
        self._under_way.discard(source_base)
        passing, self._passing = self._passing, {}
        for ranges, events in passing.items():
            if left := ranges - {source_base}:
                self._passing.setdefault(left, []).extend(events)
            else:
                for event in events:
                    event.set()
        if not self._under_way:
            self.settled.set()
            self._tidy()

    async def passed(self) -> None:
        """Wait until what is on its way now was answered, or cannot be any more; what begins meanwhile is not waited for."""
        if self._under_way:
            # All who wait for the same ranges share one event: there may be as many as there are documents.
            events = self._passing.setdefault(frozenset(self._under_way), [])
            if not events:
                events.append(asyncio.Event())
            await events[0].wait()

    def leave(self, stream: Replaceable) -> None:
        """The stream is over."""
        if self.stream is stream:
            self.stream = None
            self._tidy()

    def _tidy(self) -> None:
        if self.stream is None and not self._under_way:
            self._forget()


class Landings:
    """Of one broker."""

    def __init__(self) -> None:
        self._landings: dict[tuple[StreamName, int, int], Landing] = {}
        self._streams_open = asyncio.Event()
        self._unopened: dict[StreamName, asyncio.Event] = {}
        self._waits: dict[tuple[StreamName, int, int], _Waits] = {}
        self._in_doubt: dict[tuple[StreamName, int], asyncio.Event] = {}

    def streams_opened(self) -> None:
        """Every stream that the broker found at its start is open, or `unopened`."""
        self._streams_open.set()

    def unopened(self, name: StreamName) -> None:
        """A stream cannot be opened at a start: what a crash left in it has no leaves yet."""
        self._unopened.setdefault(name, asyncio.Event())

    def in_doubt(self, name: StreamName, shard: int) -> None:
        """A shard is not open, as its disk has failed or it could not be opened: what was being written when it was open last may stand there, and has no leaves yet."""
        self._in_doubt.setdefault((name, shard), asyncio.Event())

    def opened(self, name: StreamName, shards: Container[int] | None = None) -> None:
        """What landed in the stream has its leaves by now, or is deleted. `shards`: those that are open; what is in doubt in another one still is."""
        waiting = self._unopened.pop(name, None)
        if waiting is not None:
            waiting.set()
        for key in [key for key in self._in_doubt if key[0] == name]:
            if shards is None or key[1] in shards:
                self._in_doubt.pop(key).set()

    def carrier(self, name: StreamName, shard: int, slot: int) -> Replaceable | None:
        """The ingest stream that a link shard has; None where it has none."""
        landing = self._landings.get((name, shard, slot))
        return None if landing is None else landing.stream

    def is_settled(self, name: StreamName, shard: int, slot: int) -> bool:
        """Whether nothing is on its way by a link shard."""
        landing = self._landings.get((name, shard, slot))
        return landing is None or landing.settled.is_set()

    def waits_s(self, name: StreamName, shard: int, slot: int, carrier: SpiffeId, now_s: float) -> float:
        """Another bridge asks for a link shard, and has records for it. Returns for how long bridges have asked so since the one that carries brought something new: also
        where it opened the link anew meanwhile, since one that always dies at the same batch would never be relieved."""
        key = (name, shard, slot)
        waits = self._waits.get(key)
        if waits is None:
            late = [each for each, found in self._waits.items() if now_s - found.asked_s > ASKS_S]
            for each in late:
                del self._waits[each]
        since_s = now_s
        if waits is not None and waits.carrier == carrier and now_s - waits.asked_s <= ASKS_S:
            since_s = waits.since_s
        self._waits[key] = _Waits(carrier, since_s, now_s)
        return now_s - since_s

    def brought(self, name: StreamName, shard: int, slot: int) -> None:
        """Something new has come in by a link shard."""
        self._waits.pop((name, shard, slot), None)

    def claim(self, name: StreamName, shard: int, slot: int, stream: Replaceable) -> Landing:
        """One ingest stream per link shard: a newer one ends an older one, whose agent may be gone.

        What the older one has appended may still be on its way: wait for `Landing.settled` before reading a position.
        """
        key = (name, shard, slot)
        landing = self._landings.get(key)
        if landing is None:
            landing = self._landings[key] = Landing(lambda: self._landings.pop(key))
        before, landing.stream = landing.stream, stream
        if before is not None and before is not stream:
            before.replaced()
        return landing

    async def settled(self, name: StreamName) -> None:
        """Wait until nothing is on its way into a stream whose shards are closed: neither to the disk nor to the log."""
        for (stream, _, _), landing in list(self._landings.items()):
            if stream == name:
                await landing.passed()

    async def drained(self, concerns: Callable[[str], bool], leads_to: Callable[[StreamName], bool]) -> None:
        """Wait until nothing that was taken before is on its way to the disk or the log any more.

        Each range ends: answered, or lost with its stream; at a start, what a crash left of it in the streams has its leaves first, and so has what is in doubt
        where a disk has failed. `concerns`: whether what was taken under a grant is waited for. `leads_to`: whether such records arrive in a stream; one that
        could not be opened yet is waited for.
        """
        await self._streams_open.wait()
        for name, opened in list(self._unopened.items()):
            if leads_to(name):
                await opened.wait()
        for landing in list(self._landings.values()):
            if concerns(landing.grant_id):
                await landing.passed()
        # Behind the ranges: one of them may be in doubt only now.
        for (name, _), opened in list(self._in_doubt.items()):
            if leads_to(name):
                await opened.wait()
