"""What the source says of its streams, as far as grants of this bridge name them: listed page by page, and described one by one.

Who may make streams that a pattern fits makes as many as its quota allows. They are listed without the state of their shards, each prefix once, so many for each plan, and of each grant those are kept
that bridge.plan looks at. On the event loop. Callers: bridge.agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from bridge.plan import LISTED_MAX, Fitting, Known
from felix.connection import RegionConnection
from felix.errors import FelixError, RequestError, UnavailableError
from felix.messages import DescribeStream, ListStreams, StreamState
from felix.names import NamePattern, SpiffeId, StreamName
from felix.page import pages
from policy.grant import ExportGrant, GrantBook

DESCRIBE_S: Final = 2.0
"""How long a plan waits for one stream's leader."""
PAGE: Final = 500
"""Streams of one page, without their shards."""
AT_ONCE: Final = 8
"""Streams that are described at once for their links' lag: a session may have 64 requests on the way."""


class SourceStreams:
    """Made once for an agent; ask it for each plan. Of a beginning of names that LISTED_MAX streams have at most, a plan sees them as they are. Where there are more, each plan lists the
    next so many of them, and what it looks at is what was found in the last round through all of them: so nobody hides a stream by making others before it, by name."""

    def __init__(self) -> None:
        self._rounds: dict[str, _Round] = {}

    async def list_known(
        self,
        connection: RegionConnection,
        book: GrantBook,
        bridge: SpiffeId,
        before: Mapping[str, StreamState],
    ) -> Known:
        """The streams that grants of this bridge name. `before`: those of the last time, which count for a stream that nobody leads, so that it keeps no other link waiting. Raises what asking raises."""
        described: dict[str, StreamState] = {}
        wild: dict[str, dict[str, NamePattern]] = {}
        for grant in book.grants():
            half = book.half(grant)
            if not isinstance(half, ExportGrant) or half.terms.bridge != str(bridge):
                continue
            name = half.terms.stream
            if not NamePattern(name).is_exact:
                wild.setdefault(name[: name.index("*")], {})[grant] = NamePattern(name)
            elif name not in described:
                with suppress(RequestError):
                    described[name] = await _described(connection, name, before)
        self._rounds = {prefix: self._rounds.get(prefix) or _Round() for prefix in wild}
        looked_at: dict[str, StreamState] = {}
        fitting: dict[str, Fitting] = {}
        for prefix, patterns in wild.items():
            found = await self._rounds[prefix].go_on(connection, prefix, patterns)
            looked_at |= found.streams
            fitting |= found.fitting
        return Known({**looked_at, **described}, fitting)


class _Round:
    """Through all streams whose names begin alike."""

    def __init__(self) -> None:
        self._patterns: Mapping[str, NamePattern] = {}
        self._after = ""
        """where this round goes on"""
        self._now = Known({})
        """what this round found so far"""
        self._last: Known | None = None
        """what the last whole one did, for these grants"""

    async def go_on(
        self, connection: RegionConnection, prefix: str, patterns: Mapping[str, NamePattern]
    ) -> Known:
        """List the next LISTED_MAX, and what is to be looked at."""
        if patterns != self._patterns:
            # What was found for a grant that is there still counts until its next round is over.
            self._patterns, self._after = dict(patterns), ""
        if not self._after:
            self._now = Known({}, {grant: Fitting() for grant in patterns})
        # What fails, or is cancelled, has taken some of these streams already: then the round begins anew.
        after, self._after = self._after, ""
        listed, found = 0, dict(self._now.streams)
        async for streams in _listed(connection, prefix, after):
            self._take(streams, found)
            listed += len(streams)
            if listed >= LISTED_MAX:
                self._after = streams[-1].stream
                break
        self._now = self._now._replace(
            streams={name: found[name] for each in self._now.fitting.values() for name in each.names()}
        )
        if self._after:
            return self._seen()
        self._last = self._now
        for each in self._now.fitting.values():
            each.is_cut = False
        return self._now

    def _take(self, streams: Iterable[StreamState], found: dict[str, StreamState]) -> None:
        for state in streams:
            stream, fits = StreamName.parse(state.stream), False
            for grant, pattern in self._patterns.items():
                if pattern.matches(stream):
                    fits = True
                    self._now.fitting[grant].take(state)
            if fits:
                # A broker of before tells of shards that it does not lead, too, and knows nothing of them.
                found[state.stream] = msgspec.structs.replace(state, state=[]) if state.state else state

    def _seen(self) -> Known:
        """Before a round is over: of each grant what the last one found, or, of one that had none yet, what this one did so far."""
        last = self._last or Known({})
        fitting = {grant: last.fitting.get(grant) or self._now.fitting[grant] for grant in self._patterns}
        for grant, each in fitting.items():
            each.is_cut = grant not in last.fitting
        found = {**self._now.streams, **last.streams}
        return Known({name: found[name] for each in fitting.values() for name in each.names()}, fitting)


async def _listed(connection: RegionConnection, prefix: str, after: str) -> AsyncIterator[list[StreamState]]:
    request = ListStreams(prefix, after, PAGE, brief=True)
    async for page in pages(connection, request, "streams", lambda page: page.streams[-1].stream):
        if page.streams:
            yield page.streams


async def _described(
    connection: RegionConnection, name: str, before: Mapping[str, StreamState]
) -> StreamState:
    try:
        return await connection.request(DescribeStream(name), timeout_s=DESCRIBE_S)
    except UnavailableError:
        if name not in before:
            raise
        return before[name]


async def describe_each(
    connection: RegionConnection, names: Iterable[str], hear: Callable[[StreamState], None]
) -> None:
    """What leaders say of these streams' shards, as it comes. Of one that does not answer nothing is heard."""
    at_once = asyncio.Semaphore(AT_ONCE)

    async def describe(name: str) -> None:
        async with at_once:
            with suppress(FelixError):
                hear(await connection.request(DescribeStream(name), timeout_s=DESCRIBE_S))

    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(describe(name))
