"""A trusted region's bridge, which needs no more than one grant: it lists a broker's documents one at a time, without end. A page costs what
stands in it, however many documents there are, and one region has so many pages a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attacks.conftest import Tally
from bridge_mesh import Mesh, two_regions, until
from signed_grants import signing_key

from felix.errors import Code, UnavailableError
from felix.messages import DocumentPage, ListDocuments
from felix.names import SpiffeId
from felix.pace import Pace
from felix.runtime.real import now_ms
from policy.grant import DenyEntry, sign_deny
from policy.signed import SignedDocument
from region.governance import service
from region.trust.held_document import HeldDocument, document_id

pytestmark = pytest.mark.timeout(300)

ENTRIES = 300
STRANGER = SpiffeId("us-east", "acme", "bridge", "without-grants")


async def denied(mesh: Mesh) -> Any:
    """eu-west's governance, with that many deny entries towards us-east, all with their leaves."""
    governance = mesh.nodes["eu-west"].services.governance
    for number in range(ENTRIES):
        entry = DenyEntry(
            streams=f"acme/x/s{number}", peer="us-east", region="eu-west", sequence=1, at=now_ms(), by="x"
        )
        document = sign_deny(entry, mesh.key("eu-west"))
        await governance._intake._catalog.put_document(
            "denies", "state", document_id(document), document.encode_file()
        )
    bridge = mesh.bridge_id
    await until(lambda: len(governance.documents(bridge, "deny")) == ENTRIES, "every entry is shown", 120)
    return governance


async def test_a_page_costs_what_stands_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.grant()
        governance, bridge = await denied(mesh), mesh.bridge_id
        governance._lists = Pace(1e9, 10 * ENTRIES, 1, governance.broker.runtime.clock.monotonic)
        asked = parsed = 0
        honest, parse = governance.documents, SignedDocument.parse

        def counted(identity: SpiffeId, kind: str) -> dict[str, bytes]:
            nonlocal asked
            asked += 1
            found: dict[str, bytes] = honest(identity, kind)
            return found

        def counted_parse(data: bytes) -> SignedDocument:
            nonlocal parsed
            parsed += 1
            return parse(data)

        monkeypatch.setattr(governance, "documents", counted)
        monkeypatch.setattr(SignedDocument, "parse", counted_parse)
        governance.watch.changed()
        listed: dict[str, bytes] = {}
        page = DocumentPage({}, True)
        while page.more:
            page = await governance.list_documents(bridge, ListDocuments("deny", max(listed, default=""), 1))
            assert len(page.documents) == 1
            listed |= page.documents
        assert listed == honest(bridge, "deny") and len(listed) == ENTRIES
        kinds = len(service.SYNCED_KINDS)
        assert asked == kinds, "each kind once for all pages, and once more after a change"
        assert parsed == 0, "what is held is parsed when it comes"
        governance.watch.changed()
        assert (await governance.list_documents(bridge, ListDocuments("deny", "", 1))).revision
        assert asked == 2 * kinds
        assert (await governance.list_documents(STRANGER, ListDocuments("deny"))).documents == {}
    tally("pages of one document", ENTRIES)


async def test_a_region_lists_at_its_pace_and_hears_when_to_go_on(tmp_path: Path, tally: Tally) -> None:
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.grant()
        governance, bridge = mesh.nodes["eu-west"].services.governance, mesh.bridge_id
        now = governance.broker.runtime.clock.monotonic()
        governance._lists._clock_s = lambda: now
        refused = 0
        for number in range(service.LISTS_BURST + 50):
            # Of another identity each time: the region is what counts.
            asker = bridge if number % 2 else STRANGER
            try:
                await governance.list_documents(asker, ListDocuments("export"))
            except UnavailableError as error:
                assert error.code is Code.LIMIT_RATE and error.retry_after_ms == 10
                refused += 1
        assert refused == 50
        own = SpiffeId("eu-west", "acme", "bridge", "eu-to-us")
        await governance.list_documents(own, ListDocuments("export"))
        now += 1
        await governance.list_documents(bridge, ListDocuments("export"))
    tally("pages beyond the pace", refused)


def test_the_ends_of_a_deny_entry_are_read_once() -> None:
    entry = DenyEntry(streams="acme/x/s", peer="*", region="eu-west", sequence=1, at=1, by="x")
    held = HeldDocument.of(sign_deny(entry, signing_key("eu-west")).encode_file())
    assert held.denies == ("eu-west", "*")
    assert held.denies_between(("eu-west", "us-east")) and not held.denies_between(("us-east",))
