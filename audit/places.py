"""Places: which link shards of a log are told apart. The first so many are, whatever comes after them; what comes later is told as one.

A log's owner may name any number of link shards, and nothing of those must take what is remembered of one that is counted. Places are never
given back. Pure. Callers: audit.accounting, audit.continuity.
"""

from __future__ import annotations

from collections.abc import Hashable


class Places:
    """A number for each of `most` things."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers: dict[Hashable, int] = {}
        self.beyond: int | None = None
        """the first leaf about something that found no place"""

    def number(self, what: Hashable, index: int) -> int | None:
        """The place of what leaf `index` is about, its own from now on; None: there is none left."""
        number = self._numbers.get(what)
        if number is None and len(self._numbers) < self._most:
            number = self._numbers[what] = len(self._numbers)
        if number is None and self.beyond is None:
            self.beyond = index
        return number
