"""What regions say later about grants and streams, again and again, and which word holds at a time. Pure.

A pause and a deny entry stop; a resumption and a lifting let go on. Of one region's words about one thing the one of the highest rank
holds, whatever order they came in. A word that stops counts from the time of its leaf on, since what was on its way when it came may
still be written down; one that lets go on counts at once. Before the rank goes the era of the key that signed the word (audit.keys_in_log): a region that gave a key up
need not find a higher number than whoever has it.

Invariant: what is held is bounded, what is counted is not: a region that speaks without end makes no leaf of its log wrong, and loses
at most the older of its own words.

Callers: audit.agreement.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from felix.names import NamePattern, StreamName
from policy.grant import EVERYWHERE, Attempt, DenyEntry, Rank, Refusal, denial, deny_rank
from policy.pattern import PatternMap

STOPS_MAX: Final = 64
"""Words that stop, one after the other, with none between them that lets go on. Of more the newest takes the last one's place."""
DENIED_MAX: Final = 16_384
"""Keys of deny entries of one region: more than a broker keeps of another region's documents (PEER_DOCUMENTS_MAX). Of more, what was
lifted is forgotten first, then what was said first."""

T = TypeVar("T")


Ranked = tuple[int, Rank]
"""The era of the key, and the rank."""


class _Stop(NamedTuple, Generic[T]):
    rank: Ranked
    time_ms: int
    body: T


class Words(Generic[T]):
    """What one region said about one thing."""

    __slots__ = ("_goes_on", "_stops")

    def __init__(self) -> None:
        self._goes_on: Ranked | None = None
        self._stops: list[_Stop[T]] = []
        """Those that outrank what lets go on, by rank; each is younger than the ones below it, which would else say nothing."""

    def take(self, rank: Ranked, time_ms: int, body: T, *, stops: bool) -> None:
        """Take a word whose leaf has this time (ms)."""
        if self._goes_on is not None and rank <= self._goes_on:
            return
        # The same word again, in another leaf, does not count from later on.
        above = [stop for stop in self._stops if stop.rank >= rank]
        if not stops:
            self._goes_on, self._stops = rank, above
            return
        if above and above[0].time_ms <= time_ms:
            return
        below = [stop for stop in self._stops if stop.rank < rank and stop.time_ms < time_ms]
        self._stops = [*below, _Stop(rank, time_ms, body), *above]
        if len(self._stops) > STOPS_MAX:
            del self._stops[-2]

    def stop(self, until_ms: int) -> T | None:
        """The word that stops, of those whose leaves are not younger than this (ms); None where nothing does."""
        return next((stop.body for stop in reversed(self._stops) if stop.time_ms <= until_ms), None)

    @property
    def is_lifted(self) -> bool:
        """True where nothing stops, at any time."""
        return not self._stops


class Denied:
    """The deny entries and liftings of a log: the same for all of its grants."""

    def __init__(self) -> None:
        self._patterns = PatternMap[dict[tuple[str, str], Words[DenyEntry]]]()
        """by region and peer"""
        self._stand: dict[str, dict[tuple[str, str], None]] = {}
        """keys (pattern and peer) by region, in the order in which they were first said, or said again after they were lifted"""
        self._lifted: dict[str, dict[tuple[str, str], None]] = {}

    def take(self, entry: DenyEntry, time_ms: int, era: int = 0) -> None:
        """Take an entry or a lifting whose leaf has this time (ms), under a key of this era."""
        pattern, key = NamePattern(entry.streams), (entry.streams, entry.peer)
        by_ends = self._patterns.get(pattern)
        if by_ends is None:
            self._patterns.put(pattern, by_ends := {})
        words = by_ends.setdefault((entry.region, entry.peer), Words())
        words.take((era, deny_rank(entry)), time_ms, entry, stops=not entry.lifted)
        stand, lifted = self._stand.setdefault(entry.region, {}), self._lifted.setdefault(entry.region, {})
        if words.is_lifted:
            stand.pop(key, None)
            lifted[key] = None
        else:
            lifted.pop(key, None)
            stand[key] = None
        if len(stand) + len(lifted) > DENIED_MAX:
            self._forget(entry.region, lifted or stand)

    def _forget(self, region: str, keys: dict[tuple[str, str], None]) -> None:
        streams, peer = next(iter(keys))
        del keys[streams, peer]
        pattern = NamePattern(streams)
        by_ends = self._patterns.get(pattern)
        assert by_ends is not None
        del by_ends[region, peer]
        if not by_ends:
            self._patterns.remove(pattern)

    def refusal(self, attempt: Attempt, arriving: StreamName, until_ms: int) -> Refusal | None:
        """Why the attempt is denied, by what was said until then (ms): either end denies a stream by the name that it has at the
        source, the destination by that which it has there, too."""
        source, destination = attempt.from_region, attempt.to_region
        for name, ends in (
            (attempt.stream, ((source, destination), (destination, source))),
            (arriving, ((destination, source),)),
        ):
            for entry in self._about(name, ends, until_ms):
                return denial(entry, attempt, name)
        return None

    def _about(
        self, name: StreamName, ends: tuple[tuple[str, str], ...], until_ms: int
    ) -> Iterator[DenyEntry]:
        for by_ends in self._patterns.matching(name):
            for region, peer in ends:
                for towards in (peer, EVERYWHERE):
                    words = by_ends.get((region, towards))
                    entry = None if words is None else words.stop(until_ms)
                    if entry is not None:
                        yield entry
