"""Paging: a listing page after page, each beginning behind the last entry of the one before; and a list sent part by part.

The next page begins at a name and never at a number of entries, so that changes meanwhile neither hide an entry nor repeat one.
A broker of the previous release gives no such name for some listings (`next` is empty): then the request has a number, as that
broker expects.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Final, Protocol, TypeVar

import msgspec

from felix.errors import RequestError
from felix.frames import CONTROL_BYTES_MAX
from felix.messages import AnswerT, DocumentPage, ListDocuments, Request

E = TypeVar("E")

PART_BYTES_MAX: Final = CONTROL_BYTES_MAX - 4096
"""Of the entries of one request: what its frame holds, less what stands around them."""

PAGES_MAX: Final = 8_192
"""Of one listing: 2 GiB as they come, several times what the documents and streams of a large region are. A broker that goes on behind that has no honest list."""
ENTRIES_MAX: Final = 1_000_000
"""Of one listing, too: small ones take a hundred times their bytes once they are decoded."""


class Asked(Protocol):
    """Sends requests and returns their answers: a connection, or a client."""

    async def request(self, request: Request[AnswerT]) -> AnswerT: ...


def said_next(page: Any) -> str:
    """Where the next page begins, as the broker says."""
    return str(page.next)


async def pages(
    asked: Asked, request: Request[AnswerT], what: str, after: Callable[[AnswerT], str] = said_next
) -> AsyncIterator[AnswerT]:
    """Every page of a listing. `what` is the page's field of entries, `after` where the one behind it begins. Raises what asking
    raises, RequestError where the pages do not go on, or do not end: a region's broker says what stands in them."""
    seen = 0
    for number in itertools.count(1):
        page: Any = await asked.request(request)
        entries = getattr(page, what)
        seen += len(entries)
        if seen > ENTRIES_MAX or (number == PAGES_MAX and page.more and entries):
            raise RequestError(
                f"{type(request).__name__} was answered with {number:,} pages of {seen:,} {what}, and no end: a list has at most {PAGES_MAX:,} pages and {ENTRIES_MAX:,} entries.",
                hint="No honest broker has so long a list: ask the region's operator.",
            )
        yield page
        if not page.more or not entries:
            return
        following = after(page)
        by_number = "skip" in request.__struct_fields__
        if not (by_number and not following) and following <= request.after:  # type: ignore[attr-defined]
            raise RequestError(
                f"{type(request).__name__} was answered with a page that does not go on behind what was listed."
            )
        request = msgspec.structs.replace(request, after=following, **({"skip": seen} if by_number else {}))


def document_pages(asked: Asked, kind: str) -> AsyncIterator[DocumentPage]:
    """Every page of a region's documents of one kind. Raises as `pages` does."""
    return pages(asked, ListDocuments(kind), "documents", lambda page: max(page.documents))


async def list_documents(asked: Asked, kind: str) -> dict[str, bytes]:
    """A region's documents of one kind, by name. Raises as `pages` does."""
    found: dict[str, bytes] = {}
    async for page in document_pages(asked, kind):
        found |= page.documents
    return found


def in_frames(entries: Iterable[E]) -> Iterator[list[E]]:
    """All entries in order, as many at a time as the frame of one request holds; of an entry that is larger by itself, none."""
    part: list[E] = []
    left = PART_BYTES_MAX
    for entry in entries:
        size = len(msgspec.msgpack.encode(entry))
        if size > PART_BYTES_MAX:
            continue
        if size > left:
            yield part
            part, left = [], PART_BYTES_MAX
        part.append(entry)
        left -= size
    if part:
        yield part
