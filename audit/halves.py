"""One region's half of a grant: the newest, and those whose place another took lately. Pure.

A region may sign its half again and ask for more than before. As with a word that stops (audit.words), what was on its way when the
new half came may still be written down behind its leaf: there the one before lets it cross as well.

Invariant: what is held is bounded, by number alone: what a crash left without its leaf may get it behind any number of minutes. A broker
takes a half of another region eight times and then once an hour, an agent lists a region's documents once a second: both sign again
less often than REPLACED_MAX within a minute. Callers: audit.agreement.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from policy.approval import Document
from policy.grant import ExportGrant, ImportGrant, half_rank

REPLACED_MAX: Final = 64
"""Halves of one grant and region whose place another took. Of more, those first replaced are forgotten."""

H = TypeVar("H", bound=ExportGrant | ImportGrant)


class Paper(NamedTuple):
    """A document that is held: its leaf, and what it is. `era`: of the key that signed it (audit.keys_in_log)."""

    leaf: int
    document: Document
    era: int = 0


class Half(NamedTuple, Generic[H]):
    """A half, and what it was read from."""

    body: H
    paper: Paper


class Halves(Generic[H]):
    """Of one region and grant, all with the same terms."""

    __slots__ = ("_replaced", "first_ms", "newest")

    def __init__(self, first: Half[H], time_ms: int = 0) -> None:
        """`time_ms`: of the first one's leaf."""
        self.newest: Half[H] = first
        self.first_ms = time_ms
        self._replaced: list[tuple[int, Half[H]]] = []
        """with the time (ms) of the leaf that took its place, the last one at the end"""

    def is_newer(self, body: H, era: int = 0) -> bool:
        """Whether it takes the newest one's place, whatever order they came in. One under a later key does: when a region gives a key up, nothing that was signed with
        that one says more."""
        return (self.newest.paper.era, half_rank(self.newest.body)) < (era, half_rank(body))

    def take(self, half: Half[H], time_ms: int) -> None:
        """Take a half that is newer, and whose leaf has this time (ms)."""
        self._replaced = [*self._replaced, (time_ms, self.newest)][-REPLACED_MAX:]
        self.newest = half

    def counting(self, until_ms: int) -> Iterator[Half[H]]:
        """The newest, and then those whose place was taken later than this (ms), the last one first."""
        yield self.newest
        yield from (half for time_ms, half in reversed(self._replaced) if time_ms > until_ms)
