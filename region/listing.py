"""One page of a listing: which entries, and where the next page begins. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

import msgspec

from felix.frames import CONTROL_BYTES_MAX

E = TypeVar("E")
T = TypeVar("T")

PAGE_BYTES_MAX: Final = CONTROL_BYTES_MAX - 4096
"""Of one page's entries: what an answer's frame holds, less what stands around them."""


class Listing(Generic[E]):
    """The entries of one page, at most `limit`, in order of their names. `after`: the name behind which the page begins; where it is
    empty, `skip` entries were seen before (clients of the release before ask so)."""

    def __init__(
        self, entries: Iterable[E], name: Callable[[E], str], *, after: str, limit: int, skip: int = 0
    ) -> None:
        named = sorted(_told_apart((name(each), each) for each in entries), key=lambda each: each[0])
        left = [each for each in named if each[0] > after] if after else named[skip:]
        self._names = [each for each, _ in left[:limit]]
        self._left = len(left)
        self.entries = [each for _, each in left[:limit]]

    def page(self, made: Iterable[T]) -> tuple[list[T], bool, str]:
        """As many of what the entries are shown as, in their order, as an answer holds; whether there are more, and where those
        begin."""
        page = fitting(made)
        more = len(page) < self._left
        return page, more, self._names[len(page) - 1] if more and page else ""


def _told_apart(named: Iterable[tuple[str, E]]) -> Iterable[tuple[str, E]]:
    """Entries of one name get a number behind it, in the order in which they came."""
    seen: Counter[str] = Counter()
    for name, entry in named:
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name}\0{seen[name]:09}"), entry


def fitting(entries: Iterable[T]) -> list[T]:
    """As many entries, from the first on, as one answer's frame holds; at least one."""
    page: list[T] = []
    left = PAGE_BYTES_MAX
    for entry in entries:
        left -= len(msgspec.msgpack.encode(entry))
        if left < 0 and page:
            break
        page.append(entry)
    return page
