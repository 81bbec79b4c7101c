"""Few places for what takes much memory and time, and many links that want one: shared out among the patterns that grants name, and among the streams of a pattern.

Patterns are signed by people. Grants are, too; but one stream may be granted to many regions, and its publisher would have a share for each; so it would where several patterns name its stream, of which the narrowest counts (bridge.plan). A stream may have a link for each of 256 shards,
and who makes streams that a pattern fits makes many. Invariants: at most so many places are given at once; of one stream they are given in the order in which they were asked for; while a pattern that has none
waits, no other one is given two, and while a stream waits that is its pattern's next, no other one of that pattern is given any. On the event loop. Caller: bridge.link_session.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Place:
    """One that was asked for. `given`: set once it may be used."""

    pattern: str
    stream: str
    given: asyncio.Event = field(default_factory=asyncio.Event)


class Places:
    """`ask` for one, wait until it is given, and `leave` it, whatever happened."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._held: Counter[str] = Counter()
        """places given, by pattern"""
        self._waiting: dict[str, dict[str, deque[Place]]] = {}
        """by pattern and stream, each where its next turn is"""

    def ask(self, pattern: str, stream: str) -> Place:
        place = Place(pattern, stream)
        self._waiting.setdefault(pattern, {}).setdefault(stream, deque()).append(place)
        self._give()
        return place

    def leave(self, place: Place) -> None:
        """It is used no more, or not waited for any more."""
        if place.given.is_set():
            self._free += 1
            self._held[place.pattern] -= 1
            if not self._held[place.pattern]:
                del self._held[place.pattern]
        else:
            self._take_out(place)
        self._give()

    def _give(self) -> None:
        while self._free and self._waiting:
            # Of those that have as few, the one whose turn it is.
            pattern = min(self._waiting, key=self._held.__getitem__)
            place = next(iter(self._waiting[pattern].values()))[0]
            self._take_out(place)
            if (streams := self._waiting.pop(pattern, None)) is not None:
                if (line := streams.pop(place.stream, None)) is not None:
                    streams[place.stream] = line
                self._waiting[pattern] = streams
            self._free -= 1
            self._held[pattern] += 1
            place.given.set()

    def _take_out(self, place: Place) -> None:
        streams = self._waiting[place.pattern]
        streams[place.stream].remove(place)
        if not streams[place.stream]:
            del streams[place.stream]
        if not streams:
            del self._waiting[place.pattern]


class Turns:
    """Who works on the event loop, one at a time and in the order of `Places`. Invariant: between two iterations of the loop, all together work `most_s` and one step at most,
    however many they are; so nobody else on the loop waits for longer."""

    def __init__(self, most_s: float) -> None:
        self._places = Places(1)
        self._most_s = most_s
        self._worked_s = 0.0
        """since the loop's last iteration"""
        self._left: Place | None = None
        """that is given on with the next one"""
        self._is_counting = False

    def ask(self, pattern: str, stream: str) -> Place:
        return self._places.ask(pattern, stream)

    def leave(self, place: Place, worked_s: float) -> None:
        """It is over after so much work in this iteration, or not waited for any more."""
        if not place.given.is_set():
            self._places.leave(place)
            return
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._count_anew)
        self._worked_s += worked_s
        if self._worked_s < self._most_s:
            self._places.leave(place)
        else:
            self._left = place

    def _count_anew(self) -> None:
        left, self._left = self._left, None
        self._worked_s, self._is_counting = 0.0, False
        if left is not None:
            self._places.leave(left)
