"""Which links must run: from signed documents and from what streams there are. Pure.

The agent judges by itself, with the book that the brokers have (policy.grant) and the keys of both regions, but without their
policies; the brokers judge again, with them, on every read and every envelope. So the plan may be late by a second, and nothing crosses for it.

Streams are judged and given links by the stream, never shard by shard, and of a plan as it was before nothing is made anew but what changed (`Planner`): it is made each second, and
who may make streams that a pattern fits makes many, of 256 shards each.

Invariants: a link runs only where the book allows it: both halves hold, name this bridge and the same terms, both sides have
approved it, and nobody denies, pauses or revokes; every grant of this bridge whose export is there has at least one row, with the reason
where it does not run;
of the streams that fit a wildcard grant those are looked at that were made first, as many as STREAMS_MAX and SHARDS_MAX allow, and a row of the grant says which are not: they are counted by grant, so that
those of one keep none of another's out;
of more links than an agent runs, each grant has its share, whatever streams others have; of the rest, grants for a stream by its name come first, then streams by their age. So within a grant no stream that is made later takes the place of one that was there;
each grant is planned by itself, so that what one region signs about one of them keeps no other from being planned.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from felix.errors import Code
from felix.messages import StreamState
from felix.names import NamePattern, SpiffeId, StreamName
from felix.steps import Steps, finished
from policy.grant import (
    Attempt,
    ExportGrant,
    GrantBook,
    GrantState,
    ImportGrant,
    Refusal,
    RefusalKind,
    carrying_rank,
)
from policy.quantity import Instant
from policy.truncation import Accepted

LINKS_MAX: Final = 60
"""Links of one agent: each takes one subscription and one ingest stream of its sessions, which have 64 and 96."""
STREAMS_MAX: Final = 1_000
"""Streams that are looked at for one wildcard grant."""
SHARDS_MAX: Final = 4_096
"""Shards of these together: each has a row, which is told, reported and shown. An agent runs 60 of them."""
LISTED_MAX: Final = 10_000
"""Streams of one beginning that are listed for one plan, by their names, to find those that were made first: where there are more, plan after plan until all were."""
NAMES_SAID: Final = 3
"""Of streams that are not looked at, in a row's reason."""
UNFOUNDED_MAX: Final = 100
"""Rows of acceptances of an export that is not there, by the region that accepted: it may sign as many as it likes, of grants that nobody made."""
ERROR_CHARS_MAX: Final = 200
"""Of an error that nobody foresaw, in a row's reason."""
STEP_ROWS: Final = 512
"""Rows that are made, and streams that are judged, in one step: a few milliseconds."""


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
    share: str = ""
    """the pattern by which its stream has a share of what the agent's links share, the same for all its links"""


class Fitting:
    """The streams that fit one wildcard grant, as they are listed. Kept are those that were made first, up to STREAMS_MAX and SHARDS_MAX; of the others, how many there are, and a few names.

    Invariant: which are kept does not depend on the order in which they are taken.
    """

    __slots__ = ("_kept", "_left_from", "_shards", "is_cut", "left", "left_names", "left_shards")

    def __init__(self) -> None:
        self._kept: list[tuple[int, str, int]] = []
        """creation, name and shards, in that order"""
        self._shards = 0
        self._left_from: tuple[int, str, int] | None = None
        """the first that has no room: it, and all that were made later, are left out"""
        self.left = 0
        self.left_shards = 0
        self.left_names: list[tuple[int, str, int]] = []
        self.is_cut = False
        """whether there are more streams, and they were never listed to the end"""

    def take(self, state: StreamState) -> None:
        """One more, of another name than those before."""
        entry = (state.created_ms, state.stream, state.shards)
        if self._left_from is not None and entry > self._left_from:
            self._leave(entry)
            return
        insort(self._kept, entry)
        self._shards += state.shards
        while len(self._kept) > STREAMS_MAX or self._shards > SHARDS_MAX:
            last = self._left_from = self._kept.pop()
            self._shards -= last[2]
            self._leave(last)

    def _leave(self, entry: tuple[int, str, int]) -> None:
        self.left += 1
        self.left_shards += entry[2]
        insort(self.left_names, entry)
        del self.left_names[NAMES_SAID:]

    def names(self) -> tuple[str, ...]:
        """Of those that are looked at, sorted."""
        return tuple(sorted(name for _, name, _ in self._kept))

    def said(self, pattern: str) -> str:
        """Which streams are not looked at, why, and what to do; empty where all are."""
        if not self.left and not self.is_cut:
            return ""
        parts = []
        if self.left:
            named = ", ".join(name for _, name, _ in self.left_names)
            more = f" and {self.left - len(self.left_names)} more" if self.left > len(self.left_names) else ""
            parts.append(
                f"Of the streams that fit {pattern}, {self.left} with {self.left_shards} shards do not cross, those made last: {named}{more}. An agent looks at "
                f"{STREAMS_MAX} streams and {SHARDS_MAX} shards of one wildcard grant."
            )
        if self.is_cut:
            parts.append(
                f"More than {LISTED_MAX} streams have names that begin as {pattern} does, and not all of them were listed yet; those that come later by their names are looked at then."
            )
        return f"{' '.join(parts)} Delete streams that nobody needs, have fewer made (felix quota set), narrow the pattern, or grant those that are to cross by their names."


class Known(NamedTuple):
    """What the source said of its streams."""

    streams: Mapping[str, StreamState]
    """that may be seen, by name"""
    fitting: Mapping[str, Fitting] = MappingProxyType({})
    """by wildcard grant; where one is missing, those of `streams` that fit"""


Place = tuple[str, str]
"""grant, and stream or, where none is known, the grant's own name of it"""
Plan = Mapping[Place, tuple[PlannedLink, ...]]
"""The table, by grant, stream and shard. What did not change since the plan before is the very same tuple."""


def plan_links(
    book: GrantBook,
    bridge: SpiffeId,
    streams: Mapping[str, StreamState],
    destinations: Iterable[str],
    now_ms: int,
    *,
    links_max: int = LINKS_MAX,
) -> tuple[PlannedLink, ...]:
    """The table, by grant, stream and shard, all at once. `streams`: those of the source that may be seen, by name."""
    planner = Planner(bridge, destinations, links_max)
    plan = finished(planner.plan(book, Known(streams), now_ms))
    return tuple(row for rows in plan.values() for row in rows)


class _Judged(NamedTuple):
    """What is said of a stream under a grant, without regard to the number of links."""

    verdict: Verdict
    reason: str
    code: int


class _Stream(NamedTuple):
    """What the book says of a stream of so many shards under a grant."""

    shards: int
    judged: _Judged
    accepted: tuple[Mapping[str, tuple[Accepted, ...]], ...]
    """by shard; empty where none has any"""


@dataclass(slots=True)
class _Grant:
    """What is remembered of a grant, for as long as the book is the same, and what it says of the grant as a whole."""

    level: tuple[GrantState, Refusal | None]
    streams: dict[str, _Stream] = field(default_factory=dict)

    def forget(self, names: Iterable[str]) -> None:
        """Streams come and go: where there are many more, all but these."""
        if len(self.streams) > 2 * STREAMS_MAX:
            self.streams = {name: self.streams[name] for name in names}


class _Block(NamedTuple):
    """All shards of one stream under one grant, as in `_Stream`. `running`: how many of them run, the first ones."""

    export: ExportGrant
    stream: str
    arrives: str
    shards: int
    judged: _Judged
    accepted: tuple[Mapping[str, tuple[Accepted, ...]], ...]
    running: int
    beyond: str
    """why the others do not, where the stream may run"""
    share: str


class Planner:
    """Makes plan after plan for one agent."""

    def __init__(self, bridge: SpiffeId, destinations: Iterable[str], links_max: int = LINKS_MAX) -> None:
        self._bridge, self._links_max = bridge, links_max
        self._destinations = frozenset(destinations)
        self._book: GrantBook | None = None
        self._grants: dict[str, _Grant] = {}
        self._made: dict[Place, tuple[_Block | None, tuple[PlannedLink, ...]]] = {}

    def plan(self, book: GrantBook, known: Known, now_ms: int) -> Steps[Plan]:
        """The table of now."""
        if book is not self._book:
            self._book = book
            self._grants.clear()
        rows: dict[Place, tuple[PlannedLink, ...]] = {}
        blocks: dict[Place, _Block] = {}
        unfounded: Counter[str] = Counter()
        for grant in book.grants():
            half = book.half(grant)
            if isinstance(half, ImportGrant) and half.bridge == str(self._bridge):
                unfounded[half.to_region] += 1
                if unfounded[half.to_region] <= UNFOUNDED_MAX:
                    rows[grant, half.stream] = (_export_missing(half),)
            elif isinstance(half, ExportGrant) and half.terms.bridge == str(self._bridge):
                own: dict[Place, _Block] = {}
                try:
                    alone = yield from self._judge(book, half, known, now_ms, own)
                except Exception as error:
                    # A mistake of ours, which a region may have found: it is to end this grant's links and no others.
                    own, alone = {}, _not_judged(half, error)
                blocks |= own
                if alone is not None:
                    rows[grant, alone.stream] = (alone,)
        yield
        yield from _share_out(blocks, known.streams, self._links_max)
        return (yield from self._rows(blocks, rows))

    def _level(self, book: GrantBook, export: ExportGrant, now_ms: int) -> _Grant:
        """Of the grant as a whole: time alone changes no more than this."""
        view = book.get(export.grant, now_ms)
        level = view.state, book.check_grant(export.grant, self._bridge, now_ms)
        held = self._grants.get(export.grant)
        if held is None or held.level != level:
            held = self._grants[export.grant] = _Grant(level)
        return held

    def _stream(
        self, book: GrantBook, export: ExportGrant, held: _Grant, name: str, shards: int, now_ms: int
    ) -> _Stream:
        found = held.streams.get(name)
        if found is None or found.shards != shards:
            grant, terms = export.grant, export.terms
            attempt = Attempt(StreamName.parse(name), terms.from_region, terms.to_region, self._bridge)
            answer = book.check(attempt, None, now_ms, grant=grant)
            refusal = answer if isinstance(answer, Refusal) else None
            judged = _verdict(export, held.level[0], refusal, self._destinations)
            accepted = tuple(book.accepted_truncations(grant, name, shard) for shard in range(shards))
            found = held.streams[name] = _Stream(shards, judged, accepted if any(accepted) else ())
        return found

    def _judge(
        self,
        book: GrantBook,
        export: ExportGrant,
        known: Known,
        now_ms: int,
        blocks: dict[Place, _Block],
    ) -> Steps[PlannedLink | None]:
        """What of a grant's streams is to be done, into `blocks`; and the row of the grant itself, where there is none or not all are looked at."""
        terms, grant = export.terms, export.grant
        held = self._level(book, export, now_ms)
        names, left = _fitting(export, known)
        new = 0
        for at, name in enumerate(names, 1):
            shards, before = known.streams[name].shards, held.streams.get(name)
            said = self._stream(book, export, held, name, shards, now_ms)
            arrives = str(terms.destination_of(StreamName.parse(name)))
            blocks[grant, name] = _Block(export, name, arrives, *said, 0, "", terms.stream)
            new += 0 if said is before else shards
            if at % STEP_ROWS == 0 or new >= STEP_ROWS:
                new = 0
                yield
        held.forget(names)
        whole = _verdict(export, *held.level, self._destinations)
        if names and (not left or whole.verdict is not Verdict.RUN):
            return None
        if whole.verdict is Verdict.RUN:
            reason = left or f"There is no stream {terms.stream} yet."
            whole = _Judged(Verdict.WAIT, reason, Code.LIMIT_STREAMS if left else Code.NOT_FOUND)
        return PlannedLink(
            grant, terms.stream, -1, 0, terms.to_region, terms.destination_stream, *whole, export
        )

    def _rows(
        self, blocks: Mapping[Place, _Block], alone: dict[Place, tuple[PlannedLink, ...]]
    ) -> Steps[Plan]:
        made: dict[Place, tuple[_Block | None, tuple[PlannedLink, ...]]] = {}
        plan: dict[Place, tuple[PlannedLink, ...]] = {}
        new = 0
        for place in sorted((*blocks, *alone)):
            block, held = blocks.get(place), self._made.get(place)
            if block is None:
                if held is None or held[1] != alone[place]:
                    held = None, alone[place]
            elif held is None or held[0] != block:
                held = block, _rows_of(block)
                new += block.shards
            made[place], plan[place] = held, held[1]
            if new >= STEP_ROWS:
                new = 0
                yield
        self._made = made
        return plan


def _fitting(export: ExportGrant, known: Known) -> tuple[tuple[str, ...], str]:
    """The names of the grant's streams, sorted, and what is to be said of those that are not among them."""
    name, fitting = export.terms.stream, known.fitting.get(export.grant)
    pattern = NamePattern(name)
    if pattern.is_exact:
        return ((name,) if name in known.streams else ()), ""
    if fitting is None:
        fitting = Fitting()
        for state in known.streams.values():
            if pattern.matches(StreamName.parse(state.stream)):
                fitting.take(state)
    return fitting.names(), fitting.said(name)


def hold_back(
    book: GrantBook, bridge: SpiffeId, destinations: Iterable[str], row: PlannedLink, now_ms: int
) -> PlannedLink | None:
    """A row that ran, as the book has it now, where that does not let it run any more; None where it does, or the grant is not there. Other links count for nothing here."""
    export = book.half(row.grant)
    if not isinstance(export, ExportGrant) or export.terms.bridge != str(bridge):
        return None
    try:
        terms = export.terms
        attempt = Attempt(StreamName.parse(row.stream), terms.from_region, terms.to_region, bridge)
        answer = book.check(attempt, None, now_ms, grant=row.grant)
        refusal = answer if isinstance(answer, Refusal) else None
        found = _verdict(export, book.get(row.grant, now_ms).state, refusal, frozenset(destinations))
    except Exception as error:
        alone = _not_judged(export, error)
        found = _Judged(alone.verdict, alone.reason, alone.code)
    return None if found.verdict is Verdict.RUN else row._replace(**found._asdict())


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


_VERDICTS: Final = {
    RefusalKind.DENIED: Verdict.DENY,
    RefusalKind.PAUSED: Verdict.PAUSE,
    RefusalKind.REVOKED: Verdict.STOP,
    RefusalKind.EXPIRED: Verdict.STOP,
}
"""What a link does where the book refuses; where it is not in the table, it waits for what is missing."""


def _verdict(
    export: ExportGrant, state: GrantState, refusal: Refusal | None, destinations: frozenset[str]
) -> _Judged:
    terms, grant = export.terms, export.grant
    # What ended for good says so, whatever else refuses it for now.
    if state is GrantState.REVOKED:
        return _Judged(Verdict.STOP, f"The grant {grant} was revoked.", Code.GRANT_REVOKED)
    if state is GrantState.EXPIRED:
        reason = f"The grant {grant} expired at {Instant(terms.expires)}."
        return _Judged(Verdict.STOP, reason, Code.GRANT_EXPIRED)
    if refusal is not None:
        return _Judged(_VERDICTS.get(refusal.kind, Verdict.WAIT), refusal.sentence, refusal.code)
    if terms.to_region not in destinations:
        reason = f"This agent's configuration has no destination {terms.to_region}."
        return _Judged(Verdict.WAIT, reason, Code.CONFIG_INVALID)
    return _Judged(Verdict.RUN, "", 0)


def _share_out(
    blocks: dict[Place, _Block], streams: Mapping[str, StreamState], links_max: int
) -> Steps[None]:
    """Beyond the limit nothing runs, and says so. Two grants for one shard and one destination stream: the one signed first runs."""
    first: dict[tuple[str, str, str], tuple[int, str]] = {}
    named: dict[str, tuple[bool, int, str]] = {}
    for block in blocks.values():
        if block.judged.verdict is Verdict.RUN:
            rank, where = carrying_rank(block.export), _where(block)
            first[where] = min(first.get(where, rank), rank)
            # Of patterns that name one stream, the narrowest: its publisher has one share, however many do.
            pattern = block.export.terms.stream
            narrow = (block.export.terms.wildcard, -len(pattern), pattern)
            named[block.stream] = min(named.get(block.stream, narrow), narrow)
    yield
    wanted: dict[str, list[Place]] = {}
    for at, (place, block) in enumerate(blocks.items(), 1):
        if at % STEP_ROWS == 0:
            yield
        if block.judged.verdict is not Verdict.RUN:
            continue
        _, carrier = first[_where(block)]
        if carrier == block.export.grant:
            wanted.setdefault(carrier, []).append(place)
            continue
        reason = (
            f"{carrier} already lets this stream cross to {block.arrives} of {block.export.terms.to_region}."
        )
        blocks[place] = block._replace(judged=_Judged(Verdict.WAIT, reason, Code.CONFLICT))
    yield

    def age(place: Place) -> tuple[int, str]:
        """Who makes streams that fit a pattern chooses their names, and how many shards they have, and not when others were made."""
        return streams[place[1]].created_ms, place[1]

    def turn(place: Place) -> tuple[bool, int, str, str]:
        return blocks[place].export.terms.wildcard, *age(place), place[0]

    given: Counter[Place] = Counter()
    left = links_max
    for places in wanted.values():
        # People sign grants, so whoever makes streams has no more shares by it.
        room = links_max // len(wanted)
        for place in sorted(places, key=age):
            given[place] = min(blocks[place].shards, room)
            room -= given[place]
            left -= given[place]
    for place in sorted((place for places in wanted.values() for place in places), key=turn):
        more = min(blocks[place].shards - given[place], left)
        given[place] += more
        left -= more
    yield
    reason = f"This agent runs {links_max} links, the most that are allowed; start another bridge."
    for place, running in given.items():
        block = blocks[place]
        blocks[place] = block._replace(
            running=running, beyond=reason if running < block.shards else "", share=named[block.stream][-1]
        )


def _where(block: _Block) -> tuple[str, str, str]:
    return block.stream, block.export.terms.to_region, block.arrives


def _rows_of(block: _Block) -> tuple[PlannedLink, ...]:
    export, judged, none = block.export, block.judged, MappingProxyType[str, tuple[Accepted, ...]]({})
    beyond = _Judged(Verdict.WAIT, block.beyond, Code.UNAVAILABLE)
    return tuple(
        PlannedLink(
            export.grant,
            block.stream,
            shard,
            block.shards,
            export.terms.to_region,
            block.arrives,
            *(judged if judged.verdict is not Verdict.RUN or shard < block.running else beyond),
            export,
            block.accepted[shard] if block.accepted else none,
            block.share,
        )
        for shard in range(block.shards)
    )
