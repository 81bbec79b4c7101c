"""The data of the console's page, as one value: the map, and rows of streams, queues, caches and audit logs. Pure.

Every text in it was written by somebody else. `encode_view` shows control and format characters as escapes, as every command does; the page
puts texts into text nodes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from cli.mesh_map import MeshMap, Survey, draw_map
from cli.output import plain
from cli.top import CacheStats, StreamStats, figures
from felix.messages import AuditLog
from felix.visible import visible

ROWS_MAX: Final = 200
"""Of each table: the busiest. The page says how many there are; felix top and felix stream list have them all."""


class StreamRow(msgspec.Struct, frozen=True):
    region: str
    figures: StreamStats


class QueueRow(msgspec.Struct, frozen=True):
    """`ready`: jobs not done; `workers`: how many work on it, as the broker says it."""

    region: str
    queue: str
    ready: int
    workers: str
    waits: str
    done_per_s: float


class CacheRow(msgspec.Struct, frozen=True):
    region: str
    figures: CacheStats


class LogRow(msgspec.Struct, frozen=True):
    """A log as one region tells of it: its own, or one that it cosigns."""

    region: str
    log: AuditLog


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One look. `totals`: how many rows there are of each table, where not all of them are here."""

    time_ms: int
    map: MeshMap
    streams: list[StreamRow]
    queues: list[QueueRow]
    caches: list[CacheRow]
    logs: list[LogRow]
    totals: Mapping[str, int]


def view_of(before: Iterable[Survey], now: Sequence[Survey], time_ms: int) -> View:
    """Two looks at each region make rates; one that has but one look has rates of 0."""
    earlier = {each.region: each.sample for each in before}
    streams: list[StreamRow] = []
    queues: list[QueueRow] = []
    caches: list[CacheRow] = []
    logs: list[LogRow] = []
    for each in now:
        if each.sample is None:
            continue
        found = figures(earlier.get(each.region) or each.sample, each.sample)
        special = {cache.cache for cache in found.caches}
        for reader in found.readers:
            if reader.kind == "queue":
                special.add(reader.stream)
                queues.append(QueueRow(each.region, reader.stream, reader.lag_records, reader.identity, reader.waits, reader.records))  # fmt: skip
        streams += [
            StreamRow(each.region, stream) for stream in found.streams if stream.stream not in special
        ]
        caches += [CacheRow(each.region, cache) for cache in found.caches]
        logs += [LogRow(each.region, audit_log) for audit_log in each.mesh.logs]
    streams.sort(key=lambda row: (-row.figures.in_bytes, row.figures.stream, row.region))
    queues.sort(key=lambda row: (-row.ready, row.queue, row.region))
    caches.sort(key=lambda row: (-row.figures.gets, row.figures.cache, row.region))
    logs.sort(key=lambda row: (not row.log.own, row.log.origin, row.region))
    drawn = draw_map(now)
    # The logs stand in their own table.
    regions = [msgspec.structs.replace(region, logs=[]) for region in drawn.regions]
    drawn = msgspec.structs.replace(
        drawn,
        regions=regions[:ROWS_MAX],
        crossings=drawn.crossings[:ROWS_MAX],
        denials=drawn.denials[:ROWS_MAX],
    )
    everything = {"streams": streams, "queues": queues, "caches": caches, "logs": logs}
    return View(
        time_ms=time_ms,
        map=drawn,
        streams=streams[:ROWS_MAX],
        queues=queues[:ROWS_MAX],
        caches=caches[:ROWS_MAX],
        logs=logs[:ROWS_MAX],
        totals={name: len(rows) for name, rows in everything.items()},  # type: ignore[arg-type]
    )


def encode_view(view: View) -> bytes:
    """One line of JSON; no text in it has a character that a reader cannot see."""
    return msgspec.json.encode(_seen(plain(view)))


def _seen(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {name: _seen(each) for name, each in value.items()}
    return [_seen(each) for each in value] if isinstance(value, list) else value
