"""`felix top`: what goes through a region's broker now, as a picture that keeps itself up to date.

`sample` asks the broker, `figures` makes rates of two samples, `picture` draws them; the last two are pure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

import felix
from cli.output import format_cell, out, print_json
from cli.setting import IdentityOption, JsonOption, RegionOption, connect, run, stop_signals
from felix.errors import FelixError, RequestError
from felix.messages import CacheTraffic, LinkState, QuotaState, ReaderTraffic, RegionState, StreamTraffic
from felix.names import StreamName
from felix.visible import visible

ROWS: Final = 15
"""Of each table, where nothing else is asked for: what fits a screen."""
INTERVAL_S_MIN: Final = 0.2
"""More often, the asking itself would be what is seen."""

SortBy = Literal["name", "in", "out", "lag", "stored"]


class Sample(msgspec.Struct, frozen=True):
    """What the broker said at `at_s` (this machine's monotonic clock)."""

    at_s: float
    region: RegionState
    streams: list[StreamTraffic]
    readers: list[ReaderTraffic]
    quotas: list[QuotaState]
    links: list[LinkState]
    caches: list[CacheTraffic] = []


class StreamFigures(msgspec.Struct, frozen=True, kw_only=True):
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


class ReaderFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One reader now."""

    kind: str
    name: str
    stream: str
    identity: str
    records: float
    bytes: float
    lag_records: int
    waits: str


class CacheFigures(msgspec.Struct, frozen=True, kw_only=True):
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


class BudgetFigures(msgspec.Struct, frozen=True):
    """One memory budget: bytes in use, and allowed."""

    name: str
    used_bytes: int
    limit_bytes: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
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
    budgets: list[BudgetFigures]
    streams: list[StreamFigures]
    readers: list[ReaderFigures]
    caches: list[CacheFigures]
    throttled: list[QuotaState]
    links: list[LinkState]


def figures(before: Sample, after: Sample, *, sort: SortBy = "in", tenant: str = "") -> Figures:
    """Rates between two samples. What was not there before counts from 0, and so does what began anew."""
    passed = max(1e-3, after.at_s - before.at_s)
    earlier = {each.stream: each for each in before.streams}
    seen = {(each.kind, each.name, each.stream): each for each in before.readers}
    readers = [_reader(each, seen.get((each.kind, each.name, each.stream)), passed) for each in after.readers]
    streams = [_stream(each, earlier.get(each.stream), readers, passed) for each in after.streams]
    if tenant:
        readers = [each for each in readers if each.stream.startswith(f"{tenant}/")]
        streams = [each for each in streams if each.stream.startswith(f"{tenant}/")]
    streams.sort(key=_ORDERS[sort])
    readers.sort(key=lambda each: (-each.lag_records, -each.bytes, each.stream, each.name))
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
    return Figures(
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
            BudgetFigures(
                name.removesuffix("_bytes_limit"), int(gauges[name.removesuffix("_limit")]), int(limit)
            )
            for name, limit in gauges.items()
            if name.endswith("_bytes_limit")
        ],
        streams=streams,
        readers=readers,
        caches=caches,
        # Whoever a quota has held back since the sample before.
        throttled=[
            each
            for each in after.quotas
            if sum(each.throttled_ms.values()) > slow.get((each.scope, each.name), 0)
            or sum(each.refused.values()) > refused.get((each.scope, each.name), 0)
        ],
        links=after.links,
    )


def _per_second(after: int, before: int, passed: float) -> float:
    return (after - before if after >= before else after) / passed


def _stream(
    after: StreamTraffic, before: StreamTraffic | None, readers: Sequence[ReaderFigures], passed: float
) -> StreamFigures:
    old = before or StreamTraffic(after.stream, after.shards)
    here = [each for each in readers if each.stream == after.stream]
    return StreamFigures(
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


def _reader(after: ReaderTraffic, before: ReaderTraffic | None, passed: float) -> ReaderFigures:
    return ReaderFigures(
        kind=after.kind,
        name=after.name,
        stream=after.stream,
        identity=after.identity.rsplit("/", 1)[-1],
        records=_per_second(after.delivered_records, before.delivered_records if before else 0, passed),
        bytes=_per_second(after.delivered_bytes, before.delivered_bytes if before else 0, passed),
        lag_records=after.lag_records,
        waits=after.waits,
    )


def _cache(after: CacheTraffic, before: CacheTraffic | None, passed: float) -> CacheFigures:
    if before is None or after.hits < before.hits or after.misses < before.misses:
        before = CacheTraffic(after.stream, 0, 0, 0)
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return CacheFigures(
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


_ORDERS: Final[dict[SortBy, Callable[[StreamFigures], tuple[float, str]]]] = {
    "name": lambda each: (0, each.stream),
    "in": lambda each: (-each.in_bytes, each.stream),
    "out": lambda each: (-each.out_bytes, each.stream),
    "lag": lambda each: (-each.lag_records, each.stream),
    "stored": lambda each: (-each.stored_bytes, each.stream),
}


# -- drawing ---------------------------------------------------------------------------------------------


def picture(found: Figures, rows: int = ROWS) -> Group:
    """The figures as tables, at most `rows` of each."""
    head = Text.assemble(
        (f"{found.region} {found.broker}", "bold"),
        f"   sessions {found.sessions:,} of {found.sessions_limit:,}   subscriptions {found.subscriptions:,}   "
        f"in {size(found.in_bytes)}/s, {found.in_records:,.0f} records/s   "
        f"out {size(found.out_bytes)}/s, {found.out_records:,.0f} records/s   on disk {size(found.stored_bytes)}",
    )
    parts: list[Text | Table] = [head, _budgets(found.budgets)]
    parts.append(
        _table(
            "Streams",
            ("stream", "shards#", "in/s#", "records/s#", "out/s#", "records/s#", "readers#", "lag#", "on disk#", "stopped#"),
            [
                (
                    each.stream, each.shards, f"{size(each.in_bytes)}", round(each.in_records), f"{size(each.out_bytes)}",
                    round(each.out_records), each.readers, each.lag_records, size(each.stored_bytes), each.stopped or "",
                )
                for each in found.streams
            ],
            rows,
        )
    )  # fmt: skip
    if found.readers:
        parts.append(
            _table(
                "Readers, the furthest behind first",
                ("kind", "name", "stream", "identity", "out/s#", "records/s#", "lag#", "waits for"),
                [
                    (
                        each.kind, each.name, each.stream, each.identity, size(each.bytes), round(each.records),
                        each.lag_records, each.waits,
                    )
                    for each in found.readers
                ],
                rows,
            )
        )  # fmt: skip
    if found.caches:
        parts.append(
            _table(
                "Caches, the most asked first",
                ("cache", "keys#", "in memory#", "of#", "gets/s#", "hits#", "evicted/s#", "expired/s#", "watches#"),
                [
                    (
                        each.cache, each.keys, size(each.size_bytes), size(each.bytes_limit), round(each.gets),
                        "" if each.hit_ratio is None else f"{each.hit_ratio:.1%}", round(each.evicted),
                        round(each.expired), each.watches,
                    )
                    for each in found.caches
                ],
                rows,
            )
        )  # fmt: skip
    if found.throttled:
        parts.append(
            _table(
                "Held back by a quota",
                ("of", "name", "limit", "slowed s in all#", "refused in all#"),
                [
                    (
                        each.scope, each.name, ", ".join(each.throttled_ms) or ", ".join(each.refused),
                        max(each.throttled_ms.values(), default=0) / 1000, sum(each.refused.values()),
                    )
                    for each in found.throttled
                ],
                rows,
            )
        )  # fmt: skip
    if found.links:
        parts.append(
            _table(
                "Links",
                ("grant", "stream", "shard#", "to", "state", "lag records#", "lag ms#", "reason"),
                [
                    (
                        each.grant, each.stream, each.shard, each.to_region, each.state,
                        each.lag_records if each.lag_records >= 0 else "?", each.lag_ms if each.lag_ms >= 0 else "?", each.reason,
                    )
                    for each in found.links
                ],
                rows,
            )
        )  # fmt: skip
    return Group(*parts)


def _budgets(budgets: Sequence[BudgetFigures]) -> Text:
    line = Text("memory  ")
    for each in budgets:
        share = each.used_bytes / each.limit_bytes if each.limit_bytes else 0.0
        style = "bold red" if share >= 0.9 else "yellow" if share >= 0.5 else ""
        line.append(f"{each.name} {size(each.used_bytes)} of {size(each.limit_bytes)}", style=style)
        line.append("   ")
    return line


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], most: int) -> Table:
    more = f" ({most} of {len(rows)})" if len(rows) > most else ""
    made = Table(title=title + more, title_justify="left", header_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column.rstrip("#"), justify="right" if column.endswith("#") else "left", no_wrap=True)
    for row in rows[:most]:
        made.add_row(*(visible(format_cell(cell)) for cell in row))
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
    """Show what goes through a region's broker now: rates, lag, memory, quotas and links. Ctrl-C ends it."""
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
    async with connect(region, identity) as client:
        before = await sample(client, prefix)
        if once:
            await asyncio.sleep(interval_s)
            found = figures(before, await sample(client, prefix), sort=sort, tenant=tenant)
            if json:
                print_json(found)
            else:
                out.print(picture(found, rows))
            return
        stop = stop_signals()
        with Live(Text("looking …"), console=out, screen=out.is_terminal, auto_refresh=False) as live:
            while True:
                try:
                    async with asyncio.timeout(interval_s):
                        await stop.wait()
                    return
                except TimeoutError:
                    pass
                try:
                    after = await sample(client, prefix)
                except FelixError as error:
                    live.update(Text(f"{error}  Looking again …", style="red"), refresh=True)
                    continue
                found = figures(before, after, sort=sort, tenant=tenant)
                live.update(picture(found, rows), refresh=True)
                before = after
