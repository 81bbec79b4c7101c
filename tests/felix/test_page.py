"""A listing is read to its end, from a broker of this release and of the one before, and from none without end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from felix.errors import RequestError
from felix.messages import KeyPage, KeyState, ListKeys, ListRights, RightsPage
from felix.page import pages


class Asked:
    """A broker."""

    def __init__(self, ask: Callable[[Any], Awaitable[Any]]) -> None:
        self.request: Any = ask


KEYS = [KeyState(bytes([number]), "data", "active", number) for number in range(7)]


async def test_a_broker_that_says_where_the_next_page_begins_is_asked_by_that() -> None:
    asked: list[ListKeys] = []

    async def ask(request: ListKeys) -> KeyPage:
        asked.append(request)
        at = int(request.after or 0)
        return KeyPage(KEYS[at : at + 3], at + 3 < 7, str(at + 3) if at + 3 < 7 else "")

    found = [key async for page in pages(Asked(ask), ListKeys(limit=3), "keys") for key in page.keys]
    assert found == KEYS
    assert [(request.after, request.skip) for request in asked] == [("", 0), ("3", 3), ("6", 6)]


async def test_a_broker_of_the_release_before_is_asked_by_number() -> None:
    async def ask(request: ListKeys) -> KeyPage:
        return KeyPage(KEYS[request.skip : request.skip + 3], request.skip + 3 < 7)

    assert [key async for page in pages(Asked(ask), ListKeys(), "keys") for key in page.keys] == KEYS


async def test_names_of_the_entries_say_where_to_go_on() -> None:
    async def ask(request: ListRights) -> RightsPage:
        left = [name for name in "abcde" if name > request.after]
        return RightsPage({name: ["publish"] for name in left[:2]}, len(left) > 2)

    found = [
        name
        async for page in pages(Asked(ask), ListRights(), "rights", lambda page: max(page.rights))
        for name in page.rights
    ]
    assert found == list("abcde")


@pytest.mark.parametrize("names", [["a"], [""], ["b", "a"]])
async def test_pages_that_do_not_go_on_are_refused(names: list[str]) -> None:
    async def ask(request: ListRights) -> RightsPage:
        return RightsPage({name: ["publish"] for name in names}, more=True)

    with pytest.raises(RequestError, match="does not go on"):
        async for _ in pages(Asked(ask), ListRights(), "rights", lambda page: max(page.rights)):
            pass


async def test_a_page_without_entries_is_the_last() -> None:
    async def ask(request: ListRights) -> RightsPage:
        return RightsPage({}, more=True)

    assert (
        len([page async for page in pages(Asked(ask), ListRights(), "rights", lambda page: max(page.rights))])
        == 1
    )


@pytest.mark.parametrize("size", [1, 7])
async def test_a_list_without_end_is_refused(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page goes on behind the one before, and there is always another."""
    monkeypatch.setattr("felix.page.PAGES_MAX", 50)
    monkeypatch.setattr("felix.page.ENTRIES_MAX", 100)
    asked = 0

    async def ask(request: ListRights) -> RightsPage:
        nonlocal asked
        asked += 1
        return RightsPage({f"{asked:09}-{number}": ["publish"] for number in range(size)}, True)

    found = 0
    with pytest.raises(RequestError, match="and no end"):
        async for page in pages(Asked(ask), ListRights(), "rights", lambda page: max(page.rights)):
            found += len(page.rights)
    assert found <= 100 and asked <= 50


async def test_a_list_of_as_many_pages_as_there_may_be_is_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("felix.page.PAGES_MAX", 3)

    async def ask(request: ListRights) -> RightsPage:
        left = [name for name in "abcde" if name > request.after]
        return RightsPage({name: ["publish"] for name in left[:2]}, len(left) > 2)

    found = [page async for page in pages(Asked(ask), ListRights(), "rights", lambda page: max(page.rights))]
    assert len(found) == 3
