"""One region lists documents without end, others at each time: what an agent verifies of them does not stop its links to other regions."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from attacks.conftest import Tally
from audit_log import TIME_MS, trust
from egress_documents import egress_documents
from signed_grants import deny_entry, signed_grant, standing

from audit.leaf import Leaf
from bridge import document_sync as sync_module
from bridge import documents as documents_module
from bridge.document_sync import Documents, DocumentSync
from policy.grant import GrantBook, StandingAction

DENIES = 200
SIGNED = signed_grant()


def lists() -> dict[str, Documents]:
    denies = [deny_entry(f"acme/ops/s{number}", "eu-west") for number in range(DENIES)]
    return {
        "us-east": {
            "export": {"x": SIGNED.export.encode_file()},
            "approval": {str(number): each.encode_file() for number, each in enumerate(SIGNED.approvals)},
        },
        "eu-west": {
            "import": {"i": SIGNED.accepted.encode_file()},
            "deny": {str(number): each.encode_file() for number, each in enumerate(denies)},
        },
    }


async def test_what_regions_list_is_verified_while_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """The book is only made once the loop has gone on: on the loop itself, that would never be."""
    went_on = threading.Event()

    def made(*args: Any) -> GrantBook:
        assert went_on.wait(60), "the loop stands still"
        return GrantBook(*args)

    documents = egress_documents()
    monkeypatch.setattr(documents_module, "GrantBook", made)
    reading = asyncio.ensure_future(documents.read(lists(), trust().policy_keys, trust().anchors))
    await asyncio.sleep(0)
    went_on.set()
    book = await reading
    assert len(book.denies()) == DENIES and documents.is_waiting
    tally("documents read beside the loop", DENIES)


async def test_a_word_that_gets_its_leaf_while_the_book_is_made_counts_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A region lists a pause no more, and a link that begins writes the leaf of it at that moment."""
    documents, pause = egress_documents(), standing(SIGNED.grant, StandingAction.PAUSE, "eu-west")
    begun, logged = threading.Event(), threading.Event()

    counting = documents.counting

    def counted(listed: GrantBook) -> GrantBook:
        found = counting(listed)
        begun.set()
        assert logged.wait(60)
        return found

    monkeypatch.setattr(documents, "counting", counted)
    reading = asyncio.ensure_future(documents.read(lists(), trust().policy_keys, trust().anchors))
    await asyncio.to_thread(begun.wait, 60)
    documents.said.take(pause)
    logged.set()
    book = await reading
    assert book.get(SIGNED.grant, TIME_MS).paused_by == ("eu-west",)


async def test_a_revocation_that_is_listed_no_more_while_it_waits_for_its_leaf_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents, leaves = egress_documents(), list[Leaf]()
    revocation = standing(SIGNED.grant, StandingAction.REVOKE, "eu-west")
    held = lists()
    held["eu-west"]["standing"] = {"r": revocation.encode_file()}
    keys, anchors = trust().policy_keys, trust().anchors
    await documents.read(held, keys, anchors)
    (paper,) = (paper for paper in documents._papers if paper.revokes)

    async def append(more: list[Leaf]) -> None:
        leaves.extend(more)

    context: Any = documents._context
    context.source.region = "us-east"
    context.open_trail = lambda: SimpleNamespace(files=None, append=append)
    context.failpoints = SimpleNamespace(at=lambda where: None)
    monkeypatch.setattr(documents_module, "keep_document", lambda files, file: None)
    async with documents._logging:
        appending = asyncio.ensure_future(documents._append(paper))
        await asyncio.sleep(0)
        await documents.read(lists(), keys, anchors)
    assert await appending
    assert [leaf.header.document_sha256 for leaf in leaves] == [paper.digest]


async def test_what_is_missing_is_found_while_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    went_on, looked = threading.Event(), sync_module.missing

    def missing(*args: Any) -> list[tuple[str, str]]:
        assert went_on.wait(60), "the loop stands still"
        return looked(*args)

    monkeypatch.setattr(sync_module, "missing", missing)
    brought: asyncio.Queue[int] = asyncio.Queue()
    put: list[str] = []

    async def request(request: Any) -> None:
        put.append(request.kind)

    to: Any = SimpleNamespace(profile=SimpleNamespace(region="us-east"), request=request)
    sync = DocumentSync(lambda: 0, lambda digest: True, brought.put_nowait)
    held = lists()
    sync.send(held["eu-west"], held["us-east"], "eu-west", to, {})
    assert sync.is_between("eu-west", "us-east"), "what is looked for may be on its way"
    await asyncio.sleep(0)
    went_on.set()
    assert await asyncio.wait_for(brought.get(), 60) == len(put) > 0
