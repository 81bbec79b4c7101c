"""Which links must run: from signed documents and from what streams there are. Pure.

The agent judges by itself, with the policy keys of both regions; the brokers judge again, with their policies, on every
read and every envelope. So the plan may be late by a second, and nothing crosses for it.

Invariants: a link runs only where both halves of its grant hold, name this bridge and the same terms, and nobody denies,
pauses or revokes; every grant of this bridge has at least one row, with the reason where it does not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from felix.errors import Code
from felix.messages import StreamState
from felix.names import NamePattern, SpiffeId, StreamName
from policy.grant import EVERYWHERE, DenyEntry, ExportGrant, GrantBook, GrantState, GrantView
from policy.quantity import Instant

LINKS_MAX: Final = 60
"""Links of one agent: each takes one subscription and one ingest stream of its sessions, which have 64 and 96."""


class Verdict(StrEnum):
    """What a link is to do."""

    RUN = "run"
    WAIT = "wait"
    PAUSE = "pause"
    DENY = "deny"
    """a region's deny entry stands"""
    STOP = "stop"


class PlannedLink(NamedTuple):
    """One row. `shard` is -1 and `shards` 0 where the stream is not known; `export` None where that half is missing."""

    grant: str
    stream: str
    shard: int
    shards: int
    destination_region: str
    destination_stream: str
    verdict: Verdict
    reason: str
    code: int = 0
    export: ExportGrant | None = None


def plan_links(
    book: GrantBook,
    bridge: SpiffeId,
    streams: Mapping[str, StreamState],
    destinations: Iterable[str],
    now_ms: int,
    *,
    links_max: int = LINKS_MAX,
) -> tuple[PlannedLink, ...]:
    """The table, by grant, stream and shard. `streams`: those of the source that may be seen, by name."""
    rows: list[PlannedLink] = []
    known = frozenset(destinations)
    for view in book.list(now_ms):
        export = view.export
        if export is None:
            if view.accepted is not None and view.accepted.bridge == str(bridge):
                rows.append(_export_missing(view))
            continue
        if export.terms.bridge != str(bridge):
            continue
        rows += _rows(view, export, book.denies(), streams, known, now_ms)
    rows.sort(key=lambda row: row[:3])
    return _within(rows, links_max)


def _export_missing(view: GrantView) -> PlannedLink:
    accepted = view.accepted
    assert accepted is not None
    return PlannedLink(
        view.grant,
        accepted.stream,
        -1,
        0,
        accepted.to_region,
        accepted.destination_stream,
        Verdict.WAIT,
        f"{accepted.to_region} accepted the grant, but there is no export grant by {accepted.from_region}.",
        Code.GRANT_MISSING,
    )


def _rows(
    view: GrantView,
    export: ExportGrant,
    denies: Sequence[DenyEntry],
    streams: Mapping[str, StreamState],
    destinations: frozenset[str],
    now_ms: int,
) -> list[PlannedLink]:
    terms = export.terms
    verdict, reason, code = _standing(view, export, destinations, now_ms)
    pattern = NamePattern(terms.stream)
    named = [name for name in sorted(streams) if pattern.matches(StreamName.parse(name))]
    if not named:
        if verdict is Verdict.RUN:
            verdict, reason, code = Verdict.WAIT, f"There is no stream {terms.stream} yet.", Code.NOT_FOUND
        return [
            PlannedLink(
                view.grant, terms.stream, -1, 0, terms.to_region, terms.destination_stream, verdict, reason,
                code, export,
            )
        ]  # fmt: skip
    rows = []
    for name in named:
        stream = StreamName.parse(name)
        own = (verdict, reason, code)
        denied = _denied(denies, stream, export)
        if denied and verdict is not Verdict.STOP:
            own = (Verdict.DENY, denied, Code.RESIDENCY_DENIED)
        shards = streams[name].shards
        arrives = str(terms.destination_of(stream))
        rows += [
            PlannedLink(view.grant, name, shard, shards, terms.to_region, arrives, *own, export)
            for shard in range(shards)
        ]
    return rows


def _standing(
    view: GrantView, export: ExportGrant, destinations: frozenset[str], now_ms: int
) -> tuple[Verdict, str, int]:
    terms = export.terms
    match view.state:
        case GrantState.REVOKED:
            return Verdict.STOP, f"The grant {view.grant} was revoked.", Code.GRANT_REVOKED
        case GrantState.EXPIRED:
            return (
                Verdict.STOP,
                f"The grant {view.grant} expired at {Instant(terms.expires)}.",
                Code.GRANT_EXPIRED,
            )
        case GrantState.OFFERED:
            reason = f"{terms.to_region} has not accepted the grant {view.grant}, or accepted other terms."
            return Verdict.WAIT, reason, Code.GRANT_MISSING
        case GrantState.PAUSED:
            by = " and ".join(view.paused_by)
            return Verdict.PAUSE, f"{by} paused the grant {view.grant}.", Code.PAUSED
    if now_ms < terms.not_before:
        return (
            Verdict.WAIT,
            f"The grant {view.grant} holds from {Instant(terms.not_before)}.",
            Code.GRANT_NOT_YET,
        )
    if terms.to_region not in destinations:
        reason = f"This agent's configuration has no destination {terms.to_region}."
        return Verdict.WAIT, reason, Code.CONFIG_INVALID
    return Verdict.RUN, "", 0


def _denied(denies: Sequence[DenyEntry], stream: StreamName, export: ExportGrant) -> str:
    terms = export.terms
    for entry in denies:
        if entry.region not in (terms.from_region, terms.to_region):
            continue
        peer = terms.to_region if entry.region == terms.from_region else terms.from_region
        if entry.peer in (EVERYWHERE, peer) and NamePattern(entry.streams).matches(stream):
            because = f": {entry.reason.removesuffix('.')}" if entry.reason else ""
            return f"{entry.region} denies that {stream} crosses{because}."
    return ""


def _within(rows: list[PlannedLink], links_max: int) -> tuple[PlannedLink, ...]:
    """Beyond the limit nothing runs, and says so. Two grants for one shard: the first of them runs."""
    running = 0
    taken: set[tuple[str, int, str]] = set()
    kept = []
    for row in rows:
        where = (row.stream, row.shard, row.destination_region)
        if row.verdict is Verdict.RUN:
            if where in taken:
                reason = "Another grant already lets this stream cross to this region."
                row = row._replace(verdict=Verdict.WAIT, reason=reason, code=Code.CONFLICT)
            elif running >= links_max:
                reason = (
                    f"This agent runs {links_max} links, the most that are allowed; start another bridge."
                )
                row = row._replace(verdict=Verdict.WAIT, reason=reason, code=Code.UNAVAILABLE)
            else:
                running += 1
                taken.add(where)
        kept.append(row)
    return tuple(kept)
