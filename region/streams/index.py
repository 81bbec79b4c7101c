"""Which streams a broker hosts: by name, in order of their names, and how many of each tenant and namespace.

Nothing here that one stream's coming or going asks for looks at all the others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from felix.names import StreamName
from region.streams.hosted import HostedStream


class StreamIndex:
    """Invariant: a stream is in the map, in the order and in the counts from `add` to `drop`."""

    def __init__(self) -> None:
        self._by_name: dict[StreamName, HostedStream] = {}
        self._ordered: list[HostedStream] = []
        self._counts: Counter[tuple[str, ...]] = Counter()

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[HostedStream]:
        """In order of their names as text; of those that are there now."""
        return iter(list(self._ordered))

    def get(self, name: StreamName) -> HostedStream | None:
        return self._by_name.get(name)

    def count(self, *place: str) -> int:
        """How many streams a tenant, or a tenant's namespace, has."""
        return self._counts[place]

    def listed(self, prefix: str, after: str) -> Iterator[HostedStream]:
        """The streams whose name begins with `prefix` and comes behind `after`, in order of their names as text."""
        ordered = self._ordered
        at = max(bisect_left(ordered, prefix, key=_text), bisect_right(ordered, after, key=_text))
        for stream in islice(ordered, at, None):
            if not stream.text.startswith(prefix):
                return
            yield stream

    def turn(self, last: list[HostedStream], count: int) -> list[HostedStream]:
        """The next streams in round-robin order, at most `count`; `last` are those of the turn before."""
        ordered = self._ordered
        at = bisect_right(ordered, last[-1].text, key=_text) if len(last) == count else 0
        return ordered[at : at + count]

    def add(self, stream: HostedStream) -> None:
        self._by_name[stream.name] = stream
        insort(self._ordered, stream, key=_text)
        for place in _places(stream.name):
            self._counts[place] += 1

    def drop(self, stream: HostedStream) -> None:
        del self._by_name[stream.name]
        del self._ordered[bisect_left(self._ordered, stream.text, key=_text)]
        for place in _places(stream.name):
            self._counts[place] -= 1
            if not self._counts[place]:
                del self._counts[place]


def _text(stream: HostedStream) -> str:
    return stream.text


def _places(name: StreamName) -> tuple[tuple[str, ...], ...]:
    """What streams are counted by."""
    return (name.tenant,), (name.tenant, name.namespace)
