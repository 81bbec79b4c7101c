"""F20: signed documents and refusals without end, from another region's hand; and what a hostile destination lists to an honest agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from audit_log import TIME_MS
from bridge_mesh import BRIDGE, POLICIES, Mesh
from region_peer import SESSION_DOCUMENTS, raw_peer
from signed_grants import approver, signed_grant, signing_key

import policy.approval
import policy.signed
from audit.leaf import Kind
from bridge.agent import Agent
from bridge.document_sync import KINDS, LISTED_BYTES_MAX, DocumentSync, list_documents
from bridge.reasons import Reasons
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.identity_file import load_identity
from felix.messages import DocumentPage, Done, ListDocuments, PutDocument
from felix.names import SpiffeId
from felix.runtime.real import REAL
from felix.tasks import end_tasks
from policy.approval import KIND_BYTES_MAX, parse_document, sign_approval
from policy.grant import Standing, StandingAction, sign_standing
from policy.residency import parse_policy, sign_policy
from policy.signed import (
    Purpose,
    SignatureError,
    SignedDocument,
    canonical,
    key_id,
    raw_public_key,
    sign,
    verify,
)
from policy.transform import build_spec
from region.governance import intake
from region.governance.denials import DENY_REGION_LEAVES_MAX
from region.governance.intake import SIGNED_AGAIN_MAX, DocumentIntake

Tally = Callable[[str, int], None]
ENGINES = ("qh3", "aioquic")
CACHES = (
    policy.signed._verdicts,
    policy.signed._bodies,
    policy.approval._claims,
    policy.approval._documents,
    policy.approval._verdicts,
)
"""What is remembered of documents, whoever put them."""


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh.make(tmp_path)
    await mesh.start("eu-west")
    try:
        policy = parse_policy(POLICIES["eu-west"], "eu-west")
        await mesh.put("eu-west", "policy", sign_policy(policy, mesh.key("eu-west")))
        yield mesh
    finally:
        await mesh.stop("eu-west")


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_half_that_is_signed_again_and_again_does_not_fill_the_log(
    mesh: Mesh, engine: str, tally: Tally, attack_scale: int
) -> None:
    """Only its newest stands in the store, so it counts once there; each one had a leaf of its own."""
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("eu-west", body, export, accepted)
    tried, taken = 40 * attack_scale, 0
    address = mesh.nodes["eu-west"].address
    identity = load_identity(mesh.us.identity(BRIDGE))
    for first in range(1, tried + 1, SESSION_DOCUMENTS):
        async with raw_peer(mesh.eu, address, identity=identity, region="eu-west", engine=engine) as peer:
            for number in range(first, min(first + SESSION_DOCUMENTS, tried + 1)):
                again = msgspec.structs.replace(body, signed_at=body.signed_at + number)
                document = sign(Purpose.EXPORT, "us-east", canonical(again), mesh.key("us-east"))
                try:
                    answer = await peer.ask(PutDocument("export", document.encode_file()), number)
                    assert isinstance(answer, Done)
                    taken += 1
                except UnavailableError as error:
                    assert error.code is Code.LIMIT_RATE
    assert taken == SIGNED_AGAIN_MAX
    # The one that is there may be brought any number of times, and a revocation is always taken.
    await mesh.stand("eu-west", body.grant, StandingAction.REVOKE)
    await mesh.stop("eu-west")
    assert len(mesh.headers(mesh.ingress_folder, Kind.GRANT)) == 1 + SIGNED_AGAIN_MAX
    assert len(mesh.headers(mesh.ingress_folder, Kind.REVOKE)) == 1
    tally("halves that were signed again", tried)


async def test_a_region_of_many_identities_does_not_fill_the_log(mesh: Mesh, tally: Tally) -> None:
    governance = mesh.nodes["eu-west"].services.governance
    tried = 0
    for number in range(200):
        actor = SpiffeId("us-east", "acme", "bridge", f"b{number}")
        for made_up in range(5):
            error = RequestError("no", code=Code.GRANT_MISSING)
            governance.denied(
                error, actor=actor, action="deliver", grant_id=f"g-{made_up}", from_region="us-east"
            )
            tried += 1
    own = SpiffeId("eu-west", "acme", "client", "web")
    governance.denied(RequestError("no", code=Code.FORBIDDEN), actor=own, action="read")
    await mesh.stop("eu-west")
    assert len(mesh.headers(mesh.ingress_folder, Kind.DENY)) == DENY_REGION_LEAVES_MAX + 1
    tally("refusals of one region's many identities", tried)


class Lists:
    """A region's broker, as an agent sees it: it answers lists of documents as it likes."""

    def __init__(self, answer: Callable[[], object]) -> None:
        self.answer, self.asked = answer, 0
        self.profile = SimpleNamespace(region="eu-west")

    async def request(self, request: object) -> object:
        self.asked += 1
        assert self.asked < 1_000, "it would be asked for ever"
        found = self.answer()
        if isinstance(found, FelixError):
            raise found
        return await found if asyncio.iscoroutine(found) else found


@pytest.mark.parametrize("names", [["a"], [""], ["b", "a"]])
async def test_pages_that_do_not_go_on_are_asked_for_once_more_and_no_further(names: list[str]) -> None:
    lists = Lists(lambda: DocumentPage(dict.fromkeys(names, b"{}"), more=True))
    with pytest.raises(RequestError, match="does not go on"):
        await list_documents(lists, ("deny",))  # type: ignore[arg-type]
    assert lists.asked <= 2


async def test_no_destination_keeps_an_agent_from_what_others_say(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr("bridge.document_feed.POLL_S", 0.001)
    page = DocumentPage({"d.1": b"{}"})
    brokers = {
        "ap-1": Lists(lambda: RequestError("no", code=Code.FORBIDDEN)),
        "ap-2": Lists(lambda: DocumentPage({"a": b"{}"}, more=True)),
        "ap-3": Lists(lambda: asyncio.sleep(3_600)),
        "ap-4": Lists(lambda: Done()),
        "eu-west": Lists(lambda: page),
    }
    agent = object.__new__(Agent)
    agent._endpoints = {
        region: SimpleNamespace(region=region, is_up=True, connection=lambda lists=lists: lists)
        for region, lists in brokers.items()
    }  # type: ignore[assignment]
    agent.context = SimpleNamespace(source=None)  # type: ignore[assignment]
    agent._reasons, agent._soon, agent._runtime = (
        Reasons(logging.getLogger("felix.bridge.agent")),
        asyncio.Event(),
        REAL,
    )
    agent._feeds = {region: agent._new_feed(region, each) for region, each in agent._endpoints.items()}
    following = [asyncio.ensure_future(feed.run()) for feed in agent._feeds.values()]
    async with asyncio.timeout(120):
        for _ in range(3):
            seen = {region: lists.asked for region, lists in brokers.items()}
            while any(brokers[region].asked <= seen[region] for region in brokers if region != "ap-3"):  # noqa: ASYNC110 - others ask
                await asyncio.sleep(0.001)
            while not agent._documents:  # noqa: ASYNC110 - the feed is another task
                await asyncio.sleep(0.001)
            assert agent._documents == {"eu-west": dict.fromkeys(KINDS, page.documents)}
    assert brokers["ap-3"].asked == 1
    await end_tasks(*following)
    tally("destinations that list what they like", len(brokers))


async def test_a_region_that_takes_no_more_grants_is_still_brought_the_revocation(mesh: Mesh) -> None:
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("eu-west", body, export, accepted)
    brought: list[str] = []

    class Full:
        profile = SimpleNamespace(region="eu-west")

        async def request(self, request: PutDocument) -> Done:
            brought.append(request.kind)
            if request.kind == "export":
                raise UnavailableError("full", code=Code.LIMIT_MEMORY)
            return Done()

    standing = Standing(
        grant=body.grant, action=StandingAction.REVOKE, region="us-east", sequence=1, at=1, by="alice"
    )
    revoked = sign_standing(standing, mesh.key("us-east"))
    held = {"export": {body.grant: export.encode_file()}, "standing": {"s.1": revoked.encode_file()}}
    taken: asyncio.Queue[int] = asyncio.Queue()
    document_sync = DocumentSync(lambda: 0, lambda file: True, taken.put_nowait)
    document_sync.send(held, {}, "us-east", Full(), {})  # type: ignore[arg-type]
    async with asyncio.timeout(120):
        assert await taken.get() == 1
    assert brought == ["export", "standing"]


def test_what_was_refused_is_not_kept(tally: Tally) -> None:
    """Whoever may put a document chooses what is refused: 255,000 bytes that are none, or that nobody signed, each another."""
    before = [cache.bytes_held for cache in CACHES]
    most = sum(cache._half * 2 for cache in CACHES)
    assert most <= 64 << 20
    key = signing_key("eu-west")
    for number in range(150):
        junk = b'{"purpose":"%d' % number + b"x" * 255_000
        with pytest.raises(SignatureError):
            parse_document(junk)
        entry = SignedDocument(
            Purpose.DENY,
            "eu-west",
            key_id(raw_public_key(key)),
            b'{"a":"%d%s"}' % (number, b"x" * 255_000),
            bytes(64),
        )
        document = parse_document(entry.encode_file())
        assert isinstance(document, SignedDocument)
        for _ in range(2):
            with pytest.raises(SignatureError, match="forged or changed"):
                verify(document, {"eu-west": [raw_public_key(key)]})
        tally("documents that were refused", 2)
    # The newest document of each generation may stand over its half.
    assert sum(cache.bytes_held for cache in CACHES) <= sum(before) + most + len(CACHES) * 520_000
    assert policy.signed._verdicts.bytes_held - before[0] < 150 * 1_000


@pytest.mark.parametrize("size", [15_000, 255_000])
async def test_an_agent_takes_no_more_of_a_list_than_it_has_room_for(size: int) -> None:
    """Neither documents of a size that a document may have, nor longer ones, which it does not hold at all."""
    listed = 0

    class Lists:
        async def request(self, request: ListDocuments) -> DocumentPage:
            nonlocal listed
            listed += 1
            data = bytes(size)
            return DocumentPage({f"{request.kind} {listed:09d} {at}": data for at in range(100)}, True)

    found, _ = await list_documents(Lists())
    held = sum(len(data) for documents in found.values() for data in documents.values())
    assert LISTED_BYTES_MAX <= listed * 100 * size <= LISTED_BYTES_MAX + len(KINDS) * 100 * size
    if size > max(KIND_BYTES_MAX[kind] for kind in KINDS):
        assert held == 0
    else:
        assert LISTED_BYTES_MAX <= held < LISTED_BYTES_MAX + size


async def test_what_is_too_long_for_its_kind_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    read: list[bytes] = []
    monkeypatch.setattr(intake, "parse_document", read.append)
    service: Any = None
    for kind in KINDS:
        with pytest.raises(SignatureError, match="are allowed"):
            await DocumentIntake.put(
                service,
                SpiffeId.parse("spiffe://us-east.acme/bridge/us-to-eu"),
                kind,
                bytes(KIND_BYTES_MAX[kind] + 1),
            )
        tally("documents that are too long", 1)
    assert read == []
    signed = signed_grant()
    longest = sign_approval(signed.terms.hash(), approver("eu-west"), TIME_MS, "\u00e9" * 256)
    for kind, document in (("export", signed.export), ("import", signed.accepted), ("approval", longest)):
        assert len(document.encode_file()) < KIND_BYTES_MAX[kind] / 4
    with pytest.raises(SignatureError, match="are allowed"):
        paths = [f'"{number:03d}' + "\u00e9" * 240 + '"' for number in range(256)]
        signed_grant.__wrapped__(transform=build_spec(drop=paths), purpose="\u00e9" * 256)
