"""Who waits for another document is told of each change that it is shown, and of no other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from felix.errors import Code, RequestError
from felix.names import SpiffeId
from region.governance.document_watch import WAIT_MS_MAX, DocumentWatch

OURS = SpiffeId("us-east", "acme", "bridge", "us-to-eu")
OTHER = SpiffeId("us-east", "acme", "bridge", "us-to-ap")


class Shown:
    """What each identity may list."""

    def __init__(self) -> None:
        self.documents: dict[SpiffeId, dict[str, dict[str, bytes]]] = {OURS: {"export": {}}, OTHER: {}}
        self.asked = 0
        self.refused = False

    def __call__(self, identity: SpiffeId) -> dict[str, dict[str, bytes]]:
        self.asked += 1
        if self.refused:
            raise RequestError("no right any more", code=Code.FORBIDDEN)
        return self.documents[identity]


async def at_once(wait: Awaitable[None]) -> None:
    """It ends for what happened, and not for its time, which is over after WAIT_MS_MAX."""
    waiting = asyncio.ensure_future(wait)
    for _ in range(10):
        await asyncio.sleep(0)
    assert waiting.done()
    await waiting


async def test_a_wait_ends_with_a_change_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("region.governance.document_watch.COLLECT_S", 0)
    shown = Shown()
    watch = DocumentWatch(shown)
    known = watch.revision(OURS)
    waiting = asyncio.ensure_future(watch.wait(OURS, known, WAIT_MS_MAX))
    await asyncio.sleep(0)
    shown.documents[OTHER] = {"export": {"g-2": b"theirs"}}
    watch.changed()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done(), "another bridge's document"
    shown.documents[OURS] = {"export": {"g-1": b"ours"}}
    watch.changed()
    await at_once(waiting)
    assert watch.revision(OURS) != known


async def test_a_change_before_the_wait_is_not_missed() -> None:
    shown = Shown()
    watch = DocumentWatch(shown)
    known = watch.revision(OURS)
    shown.documents[OURS] = {"deny": {"d.1": b"no"}}
    watch.changed()
    await at_once(watch.wait(OURS, known, WAIT_MS_MAX))
    # Nor is one that another broker told of, or this one before it was started again.
    await at_once(DocumentWatch(shown).wait(OURS, known, WAIT_MS_MAX))


async def test_a_wait_without_a_change_ends_with_its_time() -> None:
    watch = DocumentWatch(Shown())
    known = watch.revision(OURS)
    await watch.wait(OURS, known, 1)
    assert watch.revision(OURS) == known


async def test_who_may_list_no_more_is_refused_at_the_next_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("region.governance.document_watch.COLLECT_S", 0)
    shown = Shown()
    watch = DocumentWatch(shown)
    waiting = asyncio.ensure_future(watch.wait(OURS, watch.revision(OURS), WAIT_MS_MAX))
    await asyncio.sleep(0)
    shown.refused = True
    watch.changed()
    with pytest.raises(RequestError, match="no right"):
        async with asyncio.timeout(60):
            await waiting


async def test_a_broker_that_stops_answers_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("region.governance.document_watch.COLLECT_S", 0)
    watch = DocumentWatch(Shown())
    waiting = asyncio.ensure_future(watch.wait(OURS, watch.revision(OURS), WAIT_MS_MAX))
    await asyncio.sleep(0)
    watch.close()
    await at_once(waiting)
    await at_once(watch.wait(OURS, watch.revision(OURS), WAIT_MS_MAX))


async def test_many_waits_of_one_identity_cost_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("region.governance.document_watch.COLLECT_S", 0)
    shown = Shown()
    watch = DocumentWatch(shown)
    known = watch.revision(OURS)
    waiting = [asyncio.ensure_future(watch.wait(OURS, known, WAIT_MS_MAX)) for _ in range(50)]
    await asyncio.sleep(0)
    shown.documents[OURS] = {"deny": {"d.1": b"no"}}
    watch.changed()
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting)
    assert shown.asked == 2


def test_a_revision_tells_kinds_names_and_bytes_apart() -> None:
    found = set()
    for documents in (
        {"export": {"a": b"b"}},
        {"import": {"a": b"b"}},
        {"export": {"ab": b""}},
        {"export": {"": b"ab"}},
        {"export": {"a": b"c"}},
        {"export": {"a": b"b", "b": b"b"}},
        {},
    ):
        found.add(DocumentWatch(lambda _, shown=documents: shown).revision(OURS))  # type: ignore[misc]
    assert len(found) == 7
