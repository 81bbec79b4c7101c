"""F10: revocations without bound. Another region signs as many as it likes, all different, and brings each of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
from bridge_mesh import BRIDGE, POLICIES, STREAM, Mesh, until
from region_peer import SESSION_DOCUMENTS, raw_peer

from audit.leaf import Kind
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.identity_file import load_identity
from felix.messages import Done, ListStreams, PutDocument, StreamPage
from felix.names import StreamName
from felix.runtime.real import now_ms
from policy.grant import DenyEntry, GrantBook, Standing, StandingAction, sign_deny, sign_standing
from policy.residency import parse_policy, sign_policy
from region.governance.held_documents import PEER_DOCUMENTS_MAX

Tally = Callable[[str, int], None]
ENGINES = ("qh3", "aioquic")


pytestmark = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture
async def mesh(tmp_path: Path, engine: str) -> AsyncIterator[Mesh]:
    """eu-west serves; us-east is the region that signs."""
    mesh = Mesh.make(tmp_path)
    await mesh.start("eu-west", engine=engine)
    try:
        policy = parse_policy(POLICIES["eu-west"], "eu-west")
        await mesh.put("eu-west", "policy", sign_policy(policy, mesh.key("eu-west")))
        yield mesh
    finally:
        await mesh.stop("eu-west")


def revocation(mesh: Mesh, grant: str, number: int) -> bytes:
    standing = Standing(
        grant=grant, action=StandingAction.REVOKE, region="us-east", sequence=number, at=now_ms() + number,
        by="mallory", reason=f"reason {number}",
    )  # fmt: skip
    return sign_standing(standing, mesh.key("us-east")).encode_file()


async def test_of_all_revocations_of_one_region_the_first_is_kept_and_no_other(
    mesh: Mesh, engine: str, tally: Tally, attack_scale: int
) -> None:
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("eu-west", body, export, accepted)
    tried, node = 60 * attack_scale, mesh.nodes["eu-west"]
    identity = load_identity(mesh.us.identity(BRIDGE))
    for first in range(1, tried + 1, SESSION_DOCUMENTS):
        async with raw_peer(
            mesh.eu, node.address, identity=identity, region="eu-west", engine=engine
        ) as peer:
            for number in range(first, min(first + SESSION_DOCUMENTS, tried + 1)):
                answer = await peer.ask(PutDocument("standing", revocation(mesh, body.grant, number)), number)
                assert isinstance(answer, Done)
                assert answer.note.endswith("already.") == (number > 1)
    assert len(await node.broker.catalog.list_documents("revocations", "state")) == 1
    await mesh.stop("eu-west")
    assert len(mesh.headers(mesh.ingress_folder, Kind.REVOKE)) == 1
    kept = mesh.eu.root / "data" / "governance"
    assert len(list(kept.glob("*.document"))) == 1
    tally("revocations of one grant by one region", tried)


async def test_too_many_documents_in_the_store_stop_no_broker(
    mesh: Mesh, engine: str, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's administrator puts genuine ones there by hand; what forbids still forbids, and the rest is left out."""
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("eu-west", body, export, accepted)
    catalog = mesh.nodes["eu-west"].broker.catalog
    for number in range(1, 41):
        entry = DenyEntry(
            streams=f"acme/ops/s{number}", peer="*", region="us-east", sequence=1, at=now_ms(), by="m"
        )
        document = sign_deny(entry, mesh.key("us-east"))
        await catalog.put_document("denies", "state", f"d.{number}", document.encode_file(), revision=0)
    await mesh.stop("eu-west")
    monkeypatch.setattr("region.governance.book.GrantBook", partial(GrantBook, documents_max=20))
    await mesh.start("eu-west", engine=engine)
    governance = mesh.nodes["eu-west"].services.governance
    # Denials alone are too many: nothing is granted, and the broker serves its own people.
    await until(lambda: governance.book.left_out, "what is left out")
    with pytest.raises(FelixError):
        governance.check_import(mesh.bridge_id, body.grant, "us-east", StreamName.parse(STREAM))
    async with mesh.operator("eu-west") as operator:
        assert isinstance(await operator.request(ListStreams()), StreamPage)
    tally("documents over the limit", 25)


@pytest.mark.parametrize(
    ("limit", "most", "at_most"), [("PEER_DOCUMENTS_MAX", 6, 6), ("PEER_BYTES_MAX", 9_000, 18)]
)
async def test_other_documents_of_one_region_have_a_limit(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, at_most: int
) -> None:
    monkeypatch.setattr(f"region.governance.held_documents.{limit}", most)
    assert PEER_DOCUMENTS_MAX <= 5_000
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("eu-west", body, export, accepted)
    taken = 0
    with pytest.raises(UnavailableError) as refused:
        for number in range(1, 20):
            entry = DenyEntry(
                streams=f"acme/ops/s{number}", peer="*", region="us-east", sequence=1, at=now_ms(), by="m"
            )
            await mesh.put("eu-west", "deny", sign_deny(entry, mesh.key("us-east")))
            taken += 1
    assert refused.value.code is Code.LIMIT_MEMORY
    assert taken < at_most
    # What is there stays: nothing newer pushes it out. Another half goes in the place of the one before it.
    governance = mesh.nodes["eu-west"].services.governance
    assert governance.book.half(body.grant) is not None and len(governance.book.denies()) == taken
    assert governance._judgement.held.has_room(accepted) and governance._judgement.held.has_room(export)
    # A revocation is always taken.
    await mesh.stand("eu-west", body.grant, StandingAction.REVOKE)
    with pytest.raises(RequestError, match="revoked"):
        mesh.nodes["eu-west"].services.governance.check_import(
            mesh.bridge_id, body.grant, "us-east", StreamName.parse(STREAM)
        )


async def test_a_change_among_many_documents_holds_the_loop_briefly(
    mesh: Mesh, engine: str, tally: Tally
) -> None:
    """Not a matter of time here: each document is parsed once, and not again at each change."""
    catalog, governance = mesh.nodes["eu-west"].broker.catalog, mesh.nodes["eu-west"].services.governance
    for number in range(50):
        entry = DenyEntry(streams=f"acme/ops/s{number}", peer="*", region="us-east", sequence=1, at=1, by="m")
        document = sign_deny(entry, mesh.key("us-east"))
        await catalog.put_document("denies", "state", f"d.{number}", document.encode_file(), revision=0)
    await until(lambda: len(governance.book.denies()) == 50, "the deny entries")
    before = {id(held.document) for held in governance._judgement.held._parsed.values()}
    begun = time.perf_counter()
    governance._judgement.reload()
    spent_ms = (time.perf_counter() - begun) * 1000
    assert {id(held.document) for held in governance._judgement.held._parsed.values()} == before
    tally("microseconds of the loop for a change among 50", int(spent_ms * 1000) or 1)
