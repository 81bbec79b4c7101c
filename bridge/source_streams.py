"""What the source says of its streams, as far as grants of this bridge name them: listed page by page, and described one by one.

Who may make streams that a pattern fits makes as many as its quota allows. They are listed without the state of their shards, each prefix once, and of each grant those are kept
that bridge.plan looks at. Callers: bridge.agent.
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


async def list_known(
    connection: RegionConnection, book: GrantBook, bridge: SpiffeId, before: Mapping[str, StreamState]
) -> Known:
    """The streams that grants of this bridge name. `before`: those of the last time, which count for a stream that nobody leads, so that it keeps no other link waiting. Raises what asking raises."""
    described: dict[str, StreamState] = {}
    wild: dict[str, list[tuple[NamePattern, Fitting]]] = {}
    fitting: dict[str, Fitting] = {}
    for grant in book.grants():
        half = book.half(grant)
        if not isinstance(half, ExportGrant) or half.terms.bridge != str(bridge):
            continue
        name = half.terms.stream
        if not NamePattern(name).is_exact:
            fitting[grant] = Fitting()
            wild.setdefault(name[: name.index("*")], []).append((NamePattern(name), fitting[grant]))
        elif name not in described:
            with suppress(RequestError):
                described[name] = await _described(connection, name, before)
    found: dict[str, StreamState] = {}
    for prefix, patterns in wild.items():
        listed = 0
        async for streams in _listed(connection, prefix):
            for state in streams[: LISTED_MAX - listed]:
                stream, fits = StreamName.parse(state.stream), False
                for pattern, kept in patterns:
                    if pattern.matches(stream):
                        fits = True
                        kept.take(state)
                if fits:
                    # A broker of before tells of shards that it does not lead, too, and knows nothing of them.
                    found[state.stream] = msgspec.structs.replace(state, state=[]) if state.state else state
            listed += len(streams)
            if listed > LISTED_MAX:
                for _, kept in patterns:
                    kept.is_cut = True
                break
    looked_at = {name: found[name] for kept in fitting.values() for name in kept.names()}
    return Known({**looked_at, **described}, fitting)


async def _listed(connection: RegionConnection, prefix: str) -> AsyncIterator[list[StreamState]]:
    request = ListStreams(prefix, "", PAGE, brief=True)
    async for page in pages(connection, request, "streams", lambda page: page.streams[-1].stream):
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
