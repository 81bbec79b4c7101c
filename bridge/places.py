"""Few places for what takes much memory and time, and many links that want one: shared out among grants, and among the streams of a grant.

A grant is signed by people, and so no publisher has several; a stream may have a link for each of 256 shards, and who makes streams that a pattern fits makes many. Invariants: at most
so many places are given at once; of one stream they are given in the order in which they were asked for; while a grant that has none waits, no other one is given two, and while a stream waits that is its
grant's next, no other one of that grant is given any. On the event loop. Caller: bridge.link_session.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Place:
    """One that was asked for. `given`: set once it may be used."""

    grant: str
    stream: str
    given: asyncio.Event = field(default_factory=asyncio.Event)


class Places:
    """`ask` for one, wait until it is given, and `leave` it, whatever happened."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._held: Counter[str] = Counter()
        """places given, by grant"""
        self._waiting: dict[str, dict[str, deque[Place]]] = {}
        """by grant and stream, each where its next turn is"""

    def ask(self, grant: str, stream: str) -> Place:
        place = Place(grant, stream)
        self._waiting.setdefault(grant, {}).setdefault(stream, deque()).append(place)
        self._give()
        return place

    def leave(self, place: Place) -> None:
        """It is used no more, or not waited for any more."""
        if place.given.is_set():
            self._free += 1
            self._held -= Counter((place.grant,))
        else:
            self._take_out(place)
        self._give()

    def _give(self) -> None:
        while self._free and self._waiting:
            # Of those that have as few, the one whose turn it is.
            grant = min(self._waiting, key=self._held.__getitem__)
            place = next(iter(self._waiting[grant].values()))[0]
            self._take_out(place)
            if (streams := self._waiting.pop(grant, None)) is not None:
                if (line := streams.pop(place.stream, None)) is not None:
                    streams[place.stream] = line
                self._waiting[grant] = streams
            self._free -= 1
            self._held[grant] += 1
            place.given.set()

    def _take_out(self, place: Place) -> None:
        streams = self._waiting[place.grant]
        streams[place.stream].remove(place)
        if not streams[place.stream]:
            del streams[place.stream]
        if not streams:
            del self._waiting[place.grant]
