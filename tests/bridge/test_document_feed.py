"""An agent lists a region's documents once and follows them; a broker that cannot say when there is something new is polled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.document_feed import LIST_BURST, DocumentFeed
from bridge.document_sync import KINDS
from felix.errors import Code, FelixError, UnavailableError
from felix.messages import DocumentPage, ListDocuments
from felix.runtime.real import REAL

LISTED = len(KINDS)


def shown(documents: dict[str, bytes]) -> dict[str, dict[str, bytes]]:
    """The same of each kind."""
    return dict.fromkeys(KINDS, documents)


class Broker:
    """A region's broker, as an agent sees it. `say` changes what it shows."""

    def __init__(self, *, gives_revisions: bool = True) -> None:
        self.gives_revisions = gives_revisions
        self.revision = 1
        self.asked: list[ListDocuments] = []
        self.lost = 0
        self._said = asyncio.Event()

    def say(self) -> None:
        self.revision += 1
        self._said.set()
        self._said = asyncio.Event()

    def lose(self) -> None:
        """What is being waited for is never answered."""
        self.lost += 1
        self._said.set()
        self._said = asyncio.Event()

    @property
    def lists(self) -> int:
        return sum(not request.wait_ms for request in self.asked) // LISTED

    async def request(self, request: ListDocuments) -> DocumentPage:
        self.asked.append(request)
        if not self.gives_revisions:
            return DocumentPage({"d.1": b"%d" % self.revision})
        lost = self.lost
        while request.wait_ms and request.known == b"%d" % self.revision and lost == self.lost:
            await self._said.wait()
        if lost != self.lost:
            raise UnavailableError("lost", code=Code.DISCONNECTED)
        return DocumentPage({"d.1": b"%d" % self.revision}, revision=b"%d" % self.revision)


@asynccontextmanager
async def following(broker: Broker, failed: list[FelixError]) -> AsyncIterator[tuple[DocumentFeed, Any]]:
    """A feed, and what waits until something holds."""
    endpoint: Any = SimpleNamespace(region="eu-west", is_up=True, connection=lambda: broker)
    changes: list[int] = []
    feed = DocumentFeed(endpoint, KINDS, REAL, lambda: changes.append(broker.revision), failed.append)

    async def until(holds: Callable[[], bool]) -> list[int]:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110 - the feed is another task
                await asyncio.sleep(0.001)
        return changes

    task = asyncio.ensure_future(feed.run())
    try:
        yield feed, until
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_documents_are_listed_once_and_again_when_they_change() -> None:
    broker = Broker()
    async with following(broker, []) as (feed, until):
        await until(lambda: len(broker.asked) == LISTED + 1)
        assert feed.held == shown({"d.1": b"1"})
        feed.look()
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(broker.asked) == LISTED + 1, "nothing is asked for while nothing changes"
        broker.say()
        assert await until(lambda: len(broker.asked) == 2 * LISTED + 2) == [1, 2]
        assert feed.held == shown({"d.1": b"2"})


async def test_what_changes_while_it_is_listed_is_listed_again() -> None:
    broker = Broker()
    answer = broker.request

    async def request(request: ListDocuments) -> DocumentPage:
        page = await answer(request)
        if len(broker.asked) == 1:
            broker.say()
        return page

    broker.request = request  # type: ignore[method-assign]
    async with following(broker, []) as (feed, until):
        assert await until(lambda: feed.held == shown({"d.1": b"2"})) == [2, 2], "told of both lists"


async def test_after_a_lost_session_it_is_listed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.document_feed.POLL_S", 0.001)
    broker, failed = Broker(), list[FelixError]()
    async with following(broker, failed) as (_, until):
        await until(lambda: len(broker.asked) == LISTED + 1)
        broker.lose()
        changes = await until(lambda: broker.lists == 2)
        assert [error.code for error in failed] == [Code.DISCONNECTED]
        assert changes == [1], "what is the same is no change"


async def test_a_broker_of_the_version_before_is_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(gives_revisions=False)
    async with following(broker, []) as (feed, until):
        await until(lambda: feed.held == shown({"d.1": b"1"}))
        assert not any(request.wait_ms for request in broker.asked)
        broker.say()
        feed.look()
        await until(lambda: feed.held == shown({"d.1": b"2"}))
        monkeypatch.setattr("bridge.document_feed.POLL_S", 0.001)
        feed.look()
        assert await until(lambda: broker.lists >= 5) == [1, 2]


async def test_a_region_that_always_has_something_new_is_listed_at_a_steady_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bridge.document_feed.LIST_PER_S", 1 / 3_600)
    broker = Broker()
    answer = broker.request

    async def request(request: ListDocuments) -> DocumentPage:
        broker.revision += 1
        return await answer(request)

    broker.request = request  # type: ignore[method-assign]
    async with following(broker, []) as (_, until):
        await until(lambda: broker.lists > LIST_BURST)
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert broker.lists == LIST_BURST + 1


@pytest.mark.parametrize("gives_revisions", [True, False])
async def test_the_more_of_a_list_is_new_the_longer_the_next_one_waits(
    monkeypatch: pytest.MonkeyPatch, gives_revisions: bool
) -> None:
    """Also where the region gives no revision, and is polled."""
    monkeypatch.setattr("bridge.document_feed.LIST_PER_S", 1 / 3_600)
    monkeypatch.setattr("bridge.document_feed.POLL_S", 0.001)
    monkeypatch.setattr("bridge.document_feed.NEW_DOCUMENTS", 1)
    broker = Broker(gives_revisions=gives_revisions)
    answer = broker.request

    async def request(request: ListDocuments) -> DocumentPage:
        broker.revision += 1
        return await answer(request)

    broker.request = request  # type: ignore[method-assign]
    async with following(broker, []) as (_, until):
        most = LIST_BURST // LISTED + 1
        await until(lambda: broker.lists >= most - 1)
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert broker.lists <= most
