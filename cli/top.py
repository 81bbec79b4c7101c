"""`felix top`: what goes through a region's brokers now, as a picture that keeps itself up to date.

`sample` asks a broker, `figures` makes rates of two samples of it, `together` one of those of several brokers, `picture` draws them; the last
three are pure.
"""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from operator import mul
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
import typer
from rich.cells import cell_len
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

import felix
from cli.output import format_cell, out, print_json
from cli.setting import IdentityOption, JsonOption, RegionOption, choose_region, connect, run, stop_signals
from felix.errors import FelixError, RequestError, UnavailableError
from felix.messages import CacheTraffic, LinkState, QuotaState, ReaderTraffic, RegionState, StreamTraffic
from felix.names import StreamName
from felix.visible import spelled_out, visible

ROWS: Final = 15
"""Of each table, where nothing else is asked for: what fits a screen."""
GAP: Final = 2
"""Blanks between two columns."""
INTERVAL_S_MIN: Final = 0.2
"""More often, the asking itself would be what is seen."""

SortBy = Literal["name", "in", "out", "lag", "stored"]


class Sample(msgspec.Struct, frozen=True):
    """The broker's answers at `at_s` (this machine's monotonic clock)."""

    at_s: float
    region: RegionState
    streams: list[StreamTraffic]
    readers: list[ReaderTraffic]
    quotas: list[QuotaState]
    links: list[LinkState]
    caches: list[CacheTraffic] = []


class StreamStats(msgspec.Struct, frozen=True, kw_only=True):
    """One stream now: per second, and what is held. `lag_records`: of the reader that is the furthest behind."""

    stream: str
    shards: int
    in_records: float
    in_bytes: float
    out_records: float
    out_bytes: float
    readers: int
    lag_records: int
    stored_bytes: int
    held_bytes: int
    pending_bytes: int
    stopped: int


class ReaderStats(msgspec.Struct, frozen=True, kw_only=True):
    """One reader now."""

    kind: str
    name: str
    stream: str
    identity: str
    records: float
    bytes: float
    lag_records: int
    waits: str


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """One cache now. `hit_ratio`: of the gets between the two looks, None where there were none; evictions and expiries per second."""

    cache: str
    keys: int
    size_bytes: int
    bytes_limit: int
    gets: float
    hit_ratio: float | None
    evicted: float
    expired: float
    watches: int


class BudgetStats(msgspec.Struct, frozen=True):
    """One memory budget: bytes in use, and allowed."""

    name: str
    used_bytes: int
    limit_bytes: int


class TopStats(msgspec.Struct, frozen=True, kw_only=True):
    """What `felix top --json` prints; rates over `interval_s`."""

    region: str
    broker: str
    interval_s: float
    sessions: int
    sessions_limit: int
    subscriptions: int
    in_records: float
    in_bytes: float
    out_records: float
    out_bytes: float
    stored_bytes: int
    budgets: list[BudgetStats]
    streams: list[StreamStats]
    readers: list[ReaderStats]
    caches: list[CacheStats]
    throttled: list[QuotaState]
    links: list[LinkState]


def figures(before: Sample, after: Sample, *, sort: SortBy = "in", tenant: str = "") -> TopStats:
    """Rates between two samples. A counter that is new, or that was reset, counts from 0."""
    passed = max(1e-3, after.at_s - before.at_s)
    earlier = {each.stream: each for each in before.streams}
    seen = {(each.kind, each.name, each.stream): each for each in before.readers}
    readers = [_reader(each, seen.get((each.kind, each.name, each.stream)), passed) for each in after.readers]
    streams = [_stream(each, earlier.get(each.stream), readers, passed) for each in after.streams]
    if tenant:
        readers = [each for each in readers if each.stream.startswith(f"{tenant}/")]
        streams = [each for each in streams if each.stream.startswith(f"{tenant}/")]
    streams.sort(key=_ORDERS[sort])
    readers.sort(key=_most_behind)
    held = {each.stream: each for each in before.caches}
    caches = [
        _cache(each, held.get(each.stream), passed)
        for each in after.caches
        if not tenant or each.stream.startswith(f"{tenant}/")
    ]
    caches.sort(key=lambda each: (-each.gets, -each.size_bytes, each.cache))
    gauges = after.region.gauges
    slow = {(each.scope, each.name): sum(each.throttled_ms.values()) for each in before.quotas}
    refused = {(each.scope, each.name): sum(each.refused.values()) for each in before.quotas}
    return TopStats(
        region=after.region.region,
        broker=after.region.broker,
        interval_s=passed,
        sessions=int(gauges.get("sessions", 0)),
        sessions_limit=int(gauges.get("sessions_limit", 0)),
        subscriptions=int(gauges.get("subscriptions", 0)),
        in_records=sum(each.in_records for each in streams),
        in_bytes=sum(each.in_bytes for each in streams),
        out_records=sum(each.out_records for each in streams),
        out_bytes=sum(each.out_bytes for each in streams),
        stored_bytes=sum(each.stored_bytes for each in streams),
        budgets=[
            BudgetStats(
                name.removesuffix("_bytes_limit"), int(gauges[name.removesuffix("_limit")]), int(limit)
            )
            for name, limit in gauges.items()
            if name.endswith("_bytes_limit")
        ],
        streams=streams,
        readers=readers,
        caches=caches,
        # Tenants and identities that a quota has throttled since the previous sample.
        throttled=[
            each
            for each in after.quotas
            if sum(each.throttled_ms.values()) > slow.get((each.scope, each.name), 0)
            or sum(each.refused.values()) > refused.get((each.scope, each.name), 0)
        ],
        links=after.links,
    )


def together(found: Sequence[TopStats], sort: SortBy = "in") -> TopStats:
    """The figures of a region's brokers as one: what is counted at several is added up, of links and certificates each broker knows the same."""
    first = found[0]
    if len(found) == 1:
        return first
    streams: dict[str, StreamStats] = {}
    for each in (stream for broker in found for stream in broker.streams):
        held = streams.get(each.stream)
        streams[each.stream] = each if held is None else _added(held, each)
    caches: dict[str, CacheStats] = {}
    for cache in (cache for broker in found for cache in broker.caches):
        # Its leader alone has its keys.
        if (other := caches.get(cache.cache)) is None or (cache.keys, cache.gets) > (other.keys, other.gets):
            caches[cache.cache] = cache
    budgets: dict[str, BudgetStats] = {}
    for budget in (budget for broker in found for budget in broker.budgets):
        known = budgets.get(budget.name, BudgetStats(budget.name, 0, 0))
        budgets[budget.name] = BudgetStats(
            budget.name, known.used_bytes + budget.used_bytes, known.limit_bytes + budget.limit_bytes
        )
    readers = [
        # Subscriptions are numbered at each broker; the others have names, and are at their stream's leader.
        msgspec.structs.replace(each, name=f"{each.name} at {broker.broker}")
        if each.kind == "subscription"
        else each
        for broker in found
        for each in broker.readers
    ]
    return msgspec.structs.replace(
        first,
        broker=", ".join(each.broker for each in found),
        sessions=sum(each.sessions for each in found),
        sessions_limit=sum(each.sessions_limit for each in found),
        subscriptions=sum(each.subscriptions for each in found),
        in_records=sum(each.in_records for each in found),
        in_bytes=sum(each.in_bytes for each in found),
        out_records=sum(each.out_records for each in found),
        out_bytes=sum(each.out_bytes for each in found),
        stored_bytes=sum(each.stored_bytes for each in found),
        budgets=list(budgets.values()),
        streams=sorted(streams.values(), key=_ORDERS[sort]),
        readers=sorted(readers, key=_most_behind),
        caches=sorted(caches.values(), key=lambda each: (-each.gets, -each.size_bytes, each.cache)),
        throttled=[each for broker in found for each in broker.throttled],
    )


def _added(one: StreamStats, other: StreamStats) -> StreamStats:
    return StreamStats(
        stream=one.stream,
        shards=max(one.shards, other.shards),
        in_records=one.in_records + other.in_records,
        in_bytes=one.in_bytes + other.in_bytes,
        out_records=one.out_records + other.out_records,
        out_bytes=one.out_bytes + other.out_bytes,
        readers=one.readers + other.readers,
        lag_records=max(one.lag_records, other.lag_records),
        stored_bytes=one.stored_bytes + other.stored_bytes,
        held_bytes=one.held_bytes + other.held_bytes,
        pending_bytes=one.pending_bytes + other.pending_bytes,
        stopped=one.stopped + other.stopped,
    )


def _most_behind(reader: ReaderStats) -> tuple[float, float, str, str]:
    return -reader.lag_records, -reader.bytes, reader.stream, reader.name


def _per_second(after: int, before: int, passed: float) -> float:
    return (after - before if after >= before else after) / passed


def _stream(
    after: StreamTraffic, before: StreamTraffic | None, readers: Sequence[ReaderStats], passed: float
) -> StreamStats:
    old = before or StreamTraffic(after.stream, after.shards)
    here = [each for each in readers if each.stream == after.stream]
    return StreamStats(
        stream=after.stream,
        shards=after.shards,
        in_records=_per_second(after.published_records, old.published_records, passed),
        in_bytes=_per_second(after.published_bytes, old.published_bytes, passed),
        out_records=_per_second(after.delivered_records, old.delivered_records, passed),
        out_bytes=_per_second(after.delivered_bytes, old.delivered_bytes, passed),
        readers=len(here),
        lag_records=max((each.lag_records for each in here), default=0),
        stored_bytes=after.stored_bytes,
        held_bytes=after.held_bytes,
        pending_bytes=after.pending_bytes,
        stopped=after.stopped,
    )


def _reader(after: ReaderTraffic, before: ReaderTraffic | None, passed: float) -> ReaderStats:
    return ReaderStats(
        kind=after.kind,
        name=after.name,
        stream=after.stream,
        identity=after.identity.rsplit("/", 1)[-1],
        records=_per_second(after.delivered_records, before.delivered_records if before else 0, passed),
        bytes=_per_second(after.delivered_bytes, before.delivered_bytes if before else 0, passed),
        lag_records=after.lag_records,
        waits=after.waits,
    )


def _cache(after: CacheTraffic, before: CacheTraffic | None, passed: float) -> CacheStats:
    if before is None or after.hits < before.hits or after.misses < before.misses:
        before = CacheTraffic(after.stream, 0, 0, 0)
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return CacheStats(
        cache=after.stream,
        keys=after.keys,
        size_bytes=after.size_bytes,
        bytes_limit=after.bytes_limit,
        gets=(hits + misses) / passed,
        hit_ratio=hits / (hits + misses) if hits + misses else None,
        evicted=_per_second(after.evicted, before.evicted, passed),
        expired=_per_second(after.expired, before.expired, passed),
        watches=after.watches,
    )


_ORDERS: Final[dict[SortBy, Callable[[StreamStats], tuple[float, str]]]] = {
    "name": lambda each: (0, each.stream),
    "in": lambda each: (-each.in_bytes, each.stream),
    "out": lambda each: (-each.out_bytes, each.stream),
    "lag": lambda each: (-each.lag_records, each.stream),
    "stored": lambda each: (-each.stored_bytes, each.stream),
}


# -- drawing ---------------------------------------------------------------------------------------------


class _Section(NamedTuple):
    """One table of the picture. `spare`: columns that go first where the screen is narrow, by place."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[object]]
    spare: Sequence[int]


def picture(found: TopStats, rows: int = ROWS, width: int | None = None, height: int | None = None) -> Group:
    """The figures as tables, at most `rows` of each; on a screen, no wider and no higher than that is.

    On a narrow screen whole columns are left out, and the title says so; no figure is cut. On a low one each table gets its
    share of the rows.
    """
    head = _flowed(
        [
            (f"{found.region} {found.broker}", "bold"),
            (f"sessions {found.sessions:,} of {found.sessions_limit:,}", ""),
            (f"subscriptions {found.subscriptions:,}", ""),
            (f"in {size(found.in_bytes)}/s, {found.in_records:,.0f} records/s", ""),
            (f"out {size(found.out_bytes)}/s, {found.out_records:,.0f} records/s", ""),
            (f"on disk {size(found.stored_bytes)}", ""),
        ],
        width,
    )
    budgets = _flowed([("memory", ""), *map(_budget, found.budgets)], width)
    sections = _sections(found)
    shares = [rows] * len(sections)
    if height is not None:
        # A table has its title and its columns' names above its rows.
        room = height - len(head.split("\n")) - len(budgets.split("\n")) - 2 * len(sections)
        lines = [_columns(each, min(rows, len(each.rows)), width).lines for each in sections]
        shares = _shares([min(rows, len(each.rows)) for each in sections], lines, room)
    return Group(
        head,
        budgets,
        *(_table(section, most, width) for section, most in zip(sections, shares, strict=True) if most),
    )


def _sections(found: TopStats) -> list[_Section]:
    """The tables to show; streams always, the others if they have rows."""
    sections = [
        _Section(
            "Streams",
            ("stream", "in/s#", "out/s#", "lag#", "records/s in#", "records/s out#", "on disk#", "readers#", "shards#", "stopped#"),
            [
                (
                    each.stream, size(each.in_bytes), size(each.out_bytes), each.lag_records, round(each.in_records),
                    round(each.out_records), size(each.stored_bytes), each.readers, each.shards, each.stopped or "",
                )
                for each in found.streams
            ],
            (9, 8, 7, 6, 5, 4, 2),
        ),
        _Section(
            "Readers, the furthest behind first",
            ("name", "stream", "lag#", "out/s#", "waits for", "records/s#", "kind", "identity"),
            [
                (
                    each.name, each.stream, each.lag_records, size(each.bytes), each.waits, round(each.records), each.kind,
                    each.identity,
                )
                for each in found.readers
            ],
            (7, 6, 5, 3),
        ),
        _Section(
            "Caches, the most asked first",
            ("cache", "gets/s#", "hits#", "keys#", "in memory#", "of#", "evicted/s#", "expired/s#", "watches#"),
            [
                (
                    each.cache, round(each.gets), "" if each.hit_ratio is None else f"{each.hit_ratio:.1%}", each.keys,
                    size(each.size_bytes), size(each.bytes_limit), round(each.evicted), round(each.expired), each.watches,
                )
                for each in found.caches
            ],
            (8, 7, 6, 5, 4),
        ),
        _Section(
            "Held back by a quota",
            ("name", "of", "slowed s in all#", "refused in all#", "limit"),
            [
                (
                    each.name, each.scope, max(each.throttled_ms.values(), default=0) / 1000, sum(each.refused.values()),
                    ", ".join(each.throttled_ms) or ", ".join(each.refused),
                )
                for each in found.throttled
            ],
            (3, 1),
        ),
        _Section(
            "Links",
            ("grant", "stream", "state", "lag records#", "to", "lag ms#", "shard#", "reason"),
            [
                (
                    each.grant, each.stream, each.state, each.lag_records if each.lag_records >= 0 else "?", each.to_region,
                    each.lag_ms if each.lag_ms >= 0 else "?", each.shard, spelled_out(each.reason),
                )
                for each in found.links
            ],
            (6, 5, 7, 4, 1),
        ),
    ]  # fmt: skip
    return [section for section in sections if section.rows or section.title == "Streams"]


def _shares(wanted: Sequence[int], lines: Sequence[int], room: int) -> list[int]:
    """Rows for each table, a row of it being so many lines, one after the other until the screen is full; one at least, so
    that no table is forgotten."""
    given = [min(1, each) for each in wanted]
    room -= sum(map(mul, given, lines))
    while True:
        more = [at for at, each in enumerate(wanted) if given[at] < each and lines[at] <= room]
        if not more:
            return given
        for at in more:
            if lines[at] <= room:
                given[at] += 1
                room -= lines[at]


def _budget(each: BudgetStats) -> tuple[str, str]:
    share = each.used_bytes / each.limit_bytes if each.limit_bytes else 0.0
    style = "bold red" if share >= 0.9 else "yellow" if share >= 0.5 else ""
    return f"{each.name} {size(each.used_bytes)} of {size(each.limit_bytes)}", style


def _flowed(parts: Sequence[tuple[str, str]], width: int | None) -> Text:
    """Parts beside each other, in as many lines as it takes; no part is broken."""
    made, used = Text(), 0
    for text, style in parts:
        gap = "" if not used else "   "
        if used and width is not None and used + len(gap) + len(text) > width:
            gap, used = "\n", 0
        made.append(gap)
        made.append(visible(text), style)
        used += len(gap.strip("\n")) + len(text)
    return made


class _Columns(NamedTuple):
    """The shown part of a table: its columns, its rows as text, and how many lines a row may take."""

    kept: list[int]
    rows: list[list[str]]
    lines: int


def _columns(section: _Section, most: int, width: int | None) -> _Columns:
    shown = [[visible(format_cell(cell)) for cell in row] for row in section.rows[:most]]
    kept = list(range(len(section.columns)))

    def needed() -> int:
        columns = [[section.columns[at].rstrip("#"), *(row[at] for row in shown)] for at in kept]
        return sum(max(map(cell_len, cells)) + GAP for cells in columns) - GAP

    for place in section.spare:
        if width is None or needed() <= width:
            break
        kept.remove(place)
    return _Columns(kept, shown, 1 if width is None else -(-needed() // width))


def _table(section: _Section, most: int, width: int | None) -> Table:
    kept, shown, _ = _columns(section, most, width)
    notes = [f"{most} of {len(section.rows)}"] if len(section.rows) > most else []
    notes += ["more columns where it is wider"] if len(kept) < len(section.columns) else []
    title = section.title + (f" ({'; '.join(notes)})" if notes else "")
    made = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=None,
        padding=(0, GAP, 0, 0),
        pad_edge=False,
    )
    for at in kept:
        column = section.columns[at]
        is_figure = column.endswith("#")
        # Only names and sentences give way, on to the next line; figures never do.
        made.add_column(
            column.rstrip("#"), justify="right" if is_figure else "left", no_wrap=is_figure, overflow="fold"
        )
    for row in shown:
        made.add_row(*(row[at] for at in kept))
    return made


def size(value: float) -> str:
    """Bytes as a person reads them: three digits and a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:,.0f} {unit}" if unit == "B" or value >= 100 else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


# -- the command -----------------------------------------------------------------------------------------


def top(
    tenant: Annotated[str, typer.Option(help="Streams and readers of this tenant alone.")] = "",
    stream: Annotated[str, typer.Option(help="This stream alone.")] = "",
    sort: Annotated[SortBy, typer.Option(help="Order of the streams: name, in, out, lag or stored.")] = "in",
    rows: Annotated[int, typer.Option(help="Rows of each table.", min=1, max=500)] = ROWS,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=INTERVAL_S_MIN, max=60.0)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look for one interval, print and end.")] = False,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Show what goes through a region's brokers now: rates, lag, memory, quotas and links. `q` or Ctrl-C ends it."""
    prefix = str(StreamName.parse(stream)) if stream else f"{tenant}/" if tenant else ""
    if tenant and stream and not stream.startswith(f"{tenant}/"):
        raise RequestError(f"{stream} is no stream of the tenant {tenant}.")
    run(_watch(region, identity, prefix, tenant, sort, rows, interval, once=once or json, json=json))


async def sample(client: felix.RegionClient, prefix: str) -> Sample:
    """Ask the broker for everything, one request after the other."""
    state = await client.describe()
    at_s = time.monotonic()
    _, streams = await client.stream_traffic(prefix)
    return Sample(
        at_s,
        state,
        streams,
        await client.reader_traffic(prefix),
        await client.list_quotas(),
        await client.list_links(),
        await client.cache_traffic(prefix),
    )


class _Brokers:
    """A client for each broker of the region that is there, and what each said last. The first is whichever answers."""

    def __init__(self, region: str, identity: str, first: felix.RegionClient, stack: AsyncExitStack) -> None:
        self._region, self._identity = region, identity
        self._first = first
        self._stack = stack
        self._others: dict[str, tuple[str, felix.RegionClient]] = {}
        """by broker, its address and client"""
        self._before: dict[str, Sample] = {}

    async def look(self, prefix: str, tenant: str, sort: SortBy) -> TopStats | None:
        """The figures since the look before; None at the first. Raises what the first broker's client raises: of others one that does not answer is left
        out."""
        own = await sample(self._first, prefix)
        samples = {own.region.broker: own}
        there = {each.broker: each.address for each in own.region.brokers if each.address}
        for broker, address in sorted(there.items()):
            if broker not in samples:
                with suppress(FelixError):
                    samples[broker] = await sample(await self._client(broker, address), prefix)
        before, self._before = self._before, samples
        found = [
            figures(before[broker], after, sort=sort, tenant=tenant)
            for broker, after in samples.items()
            if broker in before
        ]
        return together(found, sort) if found else None

    async def _client(self, broker: str, address: str) -> felix.RegionClient:
        held = self._others.get(broker)
        if held is not None and held[0] == address:
            return held[1]
        profile = await asyncio.to_thread(
            felix.load_profile, choose_region(self._region), identity=self._identity
        )
        client = await self._stack.enter_async_context(
            felix.connect(profile=replace(profile, addresses=(address,)), wait_for_broker=False)
        )
        self._others[broker] = address, client
        return client


async def _watch(
    region: str,
    identity: str,
    prefix: str,
    tenant: str,
    sort: SortBy,
    rows: int,
    interval_s: float,
    *,
    once: bool,
    json: bool,
) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect(region, identity))
        brokers = _Brokers(region, identity, client, stack)
        await brokers.look(prefix, tenant, sort)
        if once:
            await asyncio.sleep(interval_s)
            found = await brokers.look(prefix, tenant, sort)
            if found is None:
                raise UnavailableError(
                    "Another broker of the region answered than before: there are no figures of one of them over the interval.",
                    hint="Run it again.",
                )
            if json:
                print_json(found)
            else:
                out.print(picture(found, rows, out.console.width))
            return
        stop = stop_signals()
        with (
            _keys(stop),
            Live(
                Text("looking …"), console=out.console, screen=out.console.is_terminal, auto_refresh=False
            ) as live,
        ):
            while True:
                try:
                    async with asyncio.timeout(interval_s):
                        await stop.wait()
                    return
                except TimeoutError:
                    pass
                try:
                    found = await brokers.look(prefix, tenant, sort)
                except FelixError as error:
                    live.update(Text(f"{error}  Looking again …", style="red"), refresh=True)
                    continue
                if found is None:
                    continue
                screen = (
                    (out.console.width, out.console.height)
                    if out.console.is_terminal
                    else (out.console.width, None)
                )
                live.update(picture(found, rows, *screen), refresh=True)


@contextmanager
def _keys(stop: asyncio.Event) -> Iterator[None]:
    """Where somebody sits at a keyboard, `q` sets `stop`; the terminal is as before at the end."""
    if not sys.stdin.isatty():
        yield
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    loop = asyncio.get_running_loop()

    def look() -> None:
        if b"q" in os.read(number, 64).lower():
            stop.set()

    tty.setcbreak(number)
    loop.add_reader(number, look)
    try:
        yield
    finally:
        loop.remove_reader(number)
        with suppress(termios.error):  # it may have gone
            termios.tcsetattr(number, termios.TCSADRAIN, before)
