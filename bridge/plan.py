"""Which links must run: from signed documents and from what streams there are. Pure.

The agent judges by itself, with the book that the brokers have (policy.grant) and the keys of both regions, but without their
policies; the brokers judge again, with them, on every read and every envelope. So the plan may be late by a second, and nothing crosses for it.

Invariants: a link runs only where the book allows it: both halves hold, name this bridge and the same terms, both sides have
approved it, and nobody denies, pauses or revokes; every grant of this bridge whose export is there has at least one row, with the reason
where it does not run;
of more links than an agent runs, no stream that is made later takes the place of one that was there: grants for a stream by its name come first, then streams by their age;
each grant is planned by itself, so that what one region signs about one of them keeps no other from being planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from felix.errors import Code
from felix.messages import StreamState
from felix.names import NamePattern, SpiffeId, StreamName
from policy.grant import (
    Attempt,
    ExportGrant,
    GrantBook,
    GrantState,
    GrantView,
    ImportGrant,
    Refusal,
    RefusalKind,
    carrying_rank,
)
from policy.quantity import Instant
from policy.truncation import Accepted

LINKS_MAX: Final = 60
"""Links of one agent: each takes one subscription and one ingest stream of its sessions, which have 64 and 96."""
UNFOUNDED_MAX: Final = 100
"""Rows of acceptances of an export that is not there, by the region that accepted: it may sign as many as it likes, of grants that nobody made."""
ERROR_CHARS_MAX: Final = 200
"""Of an error that nobody foresaw, in a row's reason."""


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
    accepted: Mapping[str, tuple[Accepted, ...]] = MappingProxyType({})
    """truncations that were accepted, and resends, by the incarnation (hex) that each ends"""


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
    unfounded: Counter[str] = Counter()
    for grant in book.grants():
        half = book.half(grant)
        if isinstance(half, ImportGrant) and half.bridge == str(bridge):
            unfounded[half.to_region] += 1
            if unfounded[half.to_region] <= UNFOUNDED_MAX:
                rows.append(_export_missing(half))
        elif isinstance(half, ExportGrant) and half.terms.bridge == str(bridge):
            try:
                rows += _rows(book.get(grant, now_ms), half, book, bridge, streams, known, now_ms)
            except Exception as error:
                # A mistake of ours, which a region may have found: it is to end this grant's links and no others.
                rows.append(_not_judged(half, error))
    rows.sort(key=lambda row: row[:3])
    return _within(rows, streams, links_max)


def _not_judged(export: ExportGrant, error: Exception) -> PlannedLink:
    terms = export.terms
    return PlannedLink(
        export.grant,
        terms.stream,
        -1,
        0,
        terms.to_region,
        terms.destination_stream,
        Verdict.STOP,
        f"The grant {export.grant} could not be judged: {type(error).__name__}: {str(error)[:ERROR_CHARS_MAX]}",
        Code.INTERNAL,
    )


def _export_missing(accepted: ImportGrant) -> PlannedLink:
    return PlannedLink(
        accepted.grant,
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
    book: GrantBook,
    bridge: SpiffeId,
    streams: Mapping[str, StreamState],
    destinations: frozenset[str],
    now_ms: int,
) -> list[PlannedLink]:
    terms = export.terms
    pattern = NamePattern(terms.stream)
    named = [name for name in sorted(streams) if pattern.matches(StreamName.parse(name))]
    if not named:
        verdict, reason, code = _verdict(
            view, export, book.check_grant(view.grant, bridge, now_ms), destinations
        )
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
        attempt = Attempt(stream, terms.from_region, terms.to_region, bridge)
        found = book.check(attempt, None, now_ms, grant=view.grant)
        own = _verdict(view, export, found if isinstance(found, Refusal) else None, destinations)
        shards = streams[name].shards
        arrives = str(terms.destination_of(stream))
        rows += [
            PlannedLink(
                view.grant,
                name,
                shard,
                shards,
                terms.to_region,
                arrives,
                *own,
                export,
                book.accepted_truncations(view.grant, name, shard),
            )
            for shard in range(shards)
        ]
    return rows


_VERDICTS: Final = {
    RefusalKind.DENIED: Verdict.DENY,
    RefusalKind.PAUSED: Verdict.PAUSE,
    RefusalKind.REVOKED: Verdict.STOP,
    RefusalKind.EXPIRED: Verdict.STOP,
}
"""What a link does where the book refuses; where it is not in the table, it waits for what is missing."""


def _verdict(
    view: GrantView, export: ExportGrant, refusal: Refusal | None, destinations: frozenset[str]
) -> tuple[Verdict, str, int]:
    terms = export.terms
    # What ended for good says so, whatever else refuses it for now.
    if view.state is GrantState.REVOKED:
        return Verdict.STOP, f"The grant {view.grant} was revoked.", Code.GRANT_REVOKED
    if view.state is GrantState.EXPIRED:
        reason = f"The grant {view.grant} expired at {Instant(terms.expires)}."
        return Verdict.STOP, reason, Code.GRANT_EXPIRED
    if refusal is not None:
        return _VERDICTS.get(refusal.kind, Verdict.WAIT), refusal.sentence, refusal.code
    if terms.to_region not in destinations:
        reason = f"This agent's configuration has no destination {terms.to_region}."
        return Verdict.WAIT, reason, Code.CONFIG_INVALID
    return Verdict.RUN, "", 0


def _within(
    rows: list[PlannedLink], streams: Mapping[str, StreamState], links_max: int
) -> tuple[PlannedLink, ...]:
    """Beyond the limit nothing runs, and says so. Two grants for one shard and one destination stream: the one signed first runs."""
    first: dict[tuple[str, int, str, str], tuple[int, str]] = {}
    for row in rows:
        if row.verdict is Verdict.RUN and row.export is not None:
            rank = carrying_rank(row.export)
            first[_where(row)] = min(first.get(_where(row), rank), rank)
    kept, wanted = list[PlannedLink](), list[int]()
    for row in rows:
        if row.verdict is Verdict.RUN:
            _, carrier = first[_where(row)]
            if carrier != row.grant:
                reason = f"{carrier} already lets this stream cross to {row.destination_stream} of {row.destination_region}."
                row = row._replace(verdict=Verdict.WAIT, reason=reason, code=Code.CONFLICT)
            else:
                wanted.append(len(kept))
        kept.append(row)

    def turn(at: int) -> tuple[bool, int]:
        """Who makes streams that fit a pattern chooses their names, and how many shards they have, and not when others were made."""
        row = kept[at]
        return row.export is not None and row.export.terms.wildcard, streams[row.stream].created_ms

    reason = f"This agent runs {links_max} links, the most that are allowed; start another bridge."
    for at in sorted(wanted, key=turn)[links_max:]:
        kept[at] = kept[at]._replace(verdict=Verdict.WAIT, reason=reason, code=Code.UNAVAILABLE)
    return tuple(kept)


def _where(row: PlannedLink) -> tuple[str, int, str, str]:
    return row.stream, row.shard, row.destination_region, row.destination_stream
