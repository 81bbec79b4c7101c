"""What a region's own log forbade to leave it, as another region's log and clock have it. Pure.

The two logs have times of two clocks. What stands behind the word's own leaf in the other log, that log's verification judges by its
order, with no clock. For the rest the documents that stand in both logs say how far the clocks may be apart: a half is brought after its
leaf in the log of the region that signed it, so its two times bound the difference, from above for the source's halves, from below for the
other region's. One that was brought late is no bound that counts, beside one that was brought at once.

A bridge that brings all halves late widens the bounds by as much, and no further: what may have arrived against a word is told then.

Words are looked up by what a leaf names (`Words`), since a region may say thousands of which none is about what arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from audit.agreement import OUTLAWED, Stop
from audit.leaf import Header, Kind
from audit.origin import Origin
from felix.errors import RequestError
from felix.names import NamePattern, StreamName
from policy.pattern import PatternMap

DOCUMENTS_MAX: Final = 100_000
"""Documents of one log whose leaves are remembered: some 30 MB. A word beyond them is compared by time alone."""

AGENTS_BEHIND_MS: Final = 60_000
"""By how much the clock of an agent may be behind that of its region's brokers."""


class Seen(NamedTuple):
    """The first leaf of a document that holds; times in ms."""

    leaf: int
    time_ms: int
    kind: Kind
    source: str
    destination: str


class Clocks(NamedTuple):
    """By how much (ms) another region's clock may be ahead of the own one: at least, at most. 0 lies between the two: a clock may have been
    set right since."""

    least_ms: int
    most_ms: int


def remember(seen: dict[bytes, Seen], index: int, header: Header) -> None:
    """Take the leaf of a document that holds."""
    if len(seen) < DOCUMENTS_MAX:
        found = Seen(index, header.time_ms, header.kind, header.source_region, header.destination_region)
        seen.setdefault(header.document_sha256, found)


def clocks(own: Mapping[bytes, Seen], other: Mapping[bytes, Seen], source: str, destination: str) -> Clocks:
    """What both logs, of the regions `source` and `destination`, say about the difference of their clocks."""
    behind: dict[Kind, list[int]] = {Kind.GRANT: [], Kind.ACCEPT: []}
    for digest, here in own.items():
        there = other.get(digest)
        if (
            there is not None
            and here.kind in behind
            and (here.source, here.destination) == (source, destination)
        ):
            behind[here.kind].append(there.time_ms - here.time_ms)
    bounds = [0]
    if behind[Kind.GRANT]:
        bounds.append(min(behind[Kind.GRANT]))
    if behind[Kind.ACCEPT]:
        bounds.append(max(behind[Kind.ACCEPT]))
    return Clocks(min(bounds), max(bounds))


class Words:
    """The keys of what regions forbade, found by what an arrival names. A key is a grant, or a deny entry's pattern and region."""

    def __init__(self, stops: Mapping[str, tuple[Stop, ...]]) -> None:
        """`stops` by origin, of regions' own logs."""
        self._grants: dict[str, set[str]] = {}
        self._denied: dict[str, PatternMap[dict[str, str]]] = {}
        for origin, found in stops.items():
            source = Origin.parse(origin).region
            for stop in found:
                if stop.grant_id:
                    self._grants.setdefault(source, set()).add(key_of(stop))
                    continue
                denied, pattern = self._denied.setdefault(source, PatternMap()), NamePattern(stop.streams)
                peers = denied.get(pattern)
                if peers is None:
                    denied.put(pattern, peers := {})
                peers[stop.peer] = key_of(stop)

    def keys(
        self, source: str | None, destination: str | None, stream: str | None, grant: str | None
    ) -> list[str]:
        """Of all that `source` forbade what is about a crossing of this stream to this region, under this grant. A leaf may name none of
        them, or what is no name."""
        known = self._grants.get(source or "", ())
        found = [key for key in (grant, f"{grant} {stream}") if key in known] if grant else []
        denied = self._denied.get(source or "")
        if denied is not None and stream:
            try:
                name = StreamName.parse(stream)
            except RequestError:
                return found
            for peers in denied.matching(name):
                found += [key for peer, key in peers.items() if peer in ("", destination)]
        return found


def key_of(stop: Stop) -> str:
    """Whatever has one key is about the same crossings."""
    if stop.grant_id:
        return f"{stop.grant_id} {stop.streams}" if stop.streams else stop.grant_id
    return f"{stop.streams} {stop.peer}"


def rows(
    stops: Mapping[str, tuple[Stop, ...]], seen: Mapping[str, Mapping[bytes, Seen]]
) -> Iterator[tuple[Any, ...]]:
    """Of each stop a row for every other region's log; both by origin. A log that has no documents is in `seen` as well."""
    for origin, found in sorted(stops.items()):
        source = Origin.parse(origin).region
        for other, documents in sorted(seen.items()):
            if not found or other == origin:
                continue
            apart = clocks(seen[origin], documents, source, Origin.parse(other).region)
            for stop in found:
                # A policy is judged by no other region's verification, whoever writes it into that log.
                there = None if stop.word == OUTLAWED else documents.get(stop.document)
                known = there and there.leaf
                yield (
                    source,
                    key_of(stop),
                    stop.word,
                    stop.from_ms,
                    stop.until_ms,
                    other,
                    known,
                    *apart,
                    stop.may_wait,
                    stop.told_to_ms,
                    stop.sure_from_ms,
                    stop.sure_until_ms,
                )


Ranks = Mapping[str, tuple[tuple[tuple[int, int], int], ...]]
"""Of the policies that stand in a log by region: their ranks, and the times of their leaves (ms)."""


def as_of(stop: Stop, origin: str, ranks: Mapping[str, Ranks], newest_ms: Mapping[str, int]) -> Stop:
    """A policy of this region's own log that holds at its end, as all logs have it. The log may have been copied before others, and the policy have given way since: a later one
    that the region signed stands in its bridges' logs before what crossed by it. Where none does, it is in force as far as these logs go. `newest_ms`: the
    latest times of logs."""
    if stop.word != OUTLAWED or stop.until_ms is not None:
        return stop
    region = Origin.parse(origin).region
    newest = max((rank for rank, _ in ranks[origin].get(region, ())), default=(0, 0))
    # One that a bridge has of an earlier time was never in force: the region's own log goes on behind it without it.
    ended_ms = newest_ms.get(origin, 0) - AGENTS_BEHIND_MS
    later = [
        time_ms
        for other, said in ranks.items()
        if other != origin and Origin.parse(other).region == region
        for rank, time_ms in said.get(region, ())
        if rank > newest and time_ms >= ended_ms
    ]
    if later:
        return stop._replace(until_ms=min(later), sure_until_ms=min(later))
    ends = (time_ms for other, time_ms in newest_ms.items() if Origin.parse(other).region == region)
    return stop._replace(told_to_ms=max(ends, default=stop.from_ms))
