"""A destination dies between a range's append and its leaf, the grant is revoked or stopped, and at the next start the stream cannot be
opened at once. Nobody is ill: the leaf of what stops it waits for those of the range, whatever the clocks were."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.test_destination_killed import Kill, numbered, shard_of, trail_of
from bridge_mesh import POLICIES, Mesh, two_regions, until
from rogue_agent import granted, rogue_agent

from audit.leaf import Kind
from felix.errors import UnavailableError
from felix.messages import PutDocument
from felix.names import StreamName
from felix.runtime import real
from felix.runtime.real import now_ms
from policy.grant import Standing, StandingAction, sign_standing
from policy.residency import parse_policy, sign_policy
from policy.signed import Purpose, SignedDocument, canonical, sign
from region.governance import leaves
from region.metadata.catalog import Catalog
from region.metadata.embedded import EmbeddedStore
from region.streams import follower as stream_follower
from region.streams.table import StreamTable

pytestmark = pytest.mark.timeout(300)

STREAM = "acme/ops/revoked"


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The stream cannot be opened until what this returns is called."""
    may_open, really_open = asyncio.Event(), StreamTable.open

    async def refusing(table: StreamTable, record: Any) -> Any:
        if record.name == STREAM and not may_open.is_set():
            raise UnavailableError("The key service does not answer.", retry_after_ms=100)
        return await really_open(table, record)

    monkeypatch.setattr(StreamTable, "open", refusing)
    monkeypatch.setattr(stream_follower, "RETRY_S", 0.05)
    return may_open.set


async def test_a_revocation_has_its_leaf_behind_those_of_a_stream_that_opens_later(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant, sent = await granted(mesh, stream=STREAM), numbered(0, 3)
    async with rogue_agent(mesh, grant, stream=STREAM) as agent:
        await agent.open()
        await agent.cross([sent[0]])
        shard, kill = shard_of(mesh, STREAM), Kill(mesh)
        with kill.after(shard._files.disk, "sync"):
            agent.send([sent[1], sent[2]])
            await until(kill.taken.is_set, "the kill")
        body = Standing(
            grant=grant[0], action=StandingAction.REVOKE, region="eu-west", sequence=1, at=now_ms(), by="a"
        )
        document = sign_standing(body, mesh.key("eu-west")).encode_file()
        store = await EmbeddedStore.open(kill.copy / "data" / "metadata.db")
        await Catalog(store, "eu-west").put_document("revocations", "state", f"{grant[0]}.r", document)
        await store.close()

        let_open = refuse(monkeypatch)
        await kill.restart()
    trail = trail_of(mesh)

    def kinds() -> list[str]:
        trail.publish()
        return [
            leaf.header.kind.name
            for leaf in mesh.leaves(mesh.ingress_folder, Kind.ACK, Kind.REVOKE)
            if leaf.header.grant_id == grant[0]
        ]

    governance = mesh.nodes["eu-west"].services.governance
    await until(lambda: governance._judgement.leaves._writing, "the revocation's leaf is on its way")
    assert mesh.nodes["eu-west"].broker.streams.get(StreamName.parse(STREAM)) is None
    let_open()
    await until(lambda: "REVOKE" in kinds(), "the revocation's leaf")
    assert kinds() == ["ACK", "ACK", "REVOKE"]
    await mesh.stop("eu-west")
    report = mesh.verify_ingress()
    assert report.ok, [finding.sentence for finding in report.findings]


def stricter(mesh: Mesh) -> SignedDocument:
    """eu-west's policy with two approvals in place of none."""
    text = (
        POLICIES["eu-west"]
        .replace("revision: 1", "revision: 2")
        .replace("lifetime: 90d", "lifetime: 90d\n    approvals: 2")
    )
    return sign_policy(parse_policy(text, "eu"), mesh.key("eu-west"))


@pytest.mark.parametrize("word", ["pause", "deny", "half", "policy"])
async def test_what_stops_a_grant_has_its_leaf_behind_what_a_clock_that_was_ahead_dated_later(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """The clock is half a minute ahead when the destination dies, and right when it starts again."""
    ahead_ms = 30_000
    monkeypatch.setattr(real.SystemClock, "now_ms", lambda clock: time.time_ns() // 1_000_000 + ahead_ms)
    grant, sent = await granted(mesh, stream=STREAM), numbered(0, 3)
    async with rogue_agent(mesh, grant, stream=STREAM) as agent:
        await agent.open()
        await agent.cross([sent[0]])
        shard, kill = shard_of(mesh, STREAM), Kill(mesh)
        with kill.after(shard._files.disk, "sync"):
            agent.send([sent[1], sent[2]])
            await until(kill.taken.is_set, "the kill")
        ahead_ms = 0
        let_open = refuse(monkeypatch)
        await kill.restart()
    governance = mesh.nodes["eu-west"].services.governance
    written = governance._judgement.leaves._writing
    if word == "half":
        view = governance.book.get(grant[0], now_ms())
        assert view.accepted is not None
        half = msgspec.structs.replace(view.accepted, approvals=2, signed_at=view.accepted.signed_at + 1)
        document = sign(Purpose.IMPORT, "eu-west", canonical(half), mesh.key("eu-west"))
        saying = asyncio.ensure_future(mesh.put("eu-west", "import", document))
    elif word == "policy":
        saying = asyncio.ensure_future(mesh.put("eu-west", "policy", stricter(mesh)))
    elif word == "pause":
        saying = asyncio.ensure_future(mesh.stand("eu-west", grant[0], StandingAction.PAUSE))
    else:
        saying = asyncio.ensure_future(mesh.deny("eu-west", STREAM))
    await until(lambda: written, "the word's leaf is on its way")
    let_open()
    await saying
    kinds = (Kind.ACK, Kind.STANDING, Kind.DENY_ENTRY, Kind.ACCEPT, Kind.POLICY)
    trail = trail_of(mesh)

    def told() -> list[str]:
        trail.publish()
        return [leaf.header.kind.name for leaf in mesh.leaves(mesh.ingress_folder, *kinds)]

    await until(lambda: told().count("ACK") == 2, "the leaf of the range")
    await until(lambda: told()[-1] != "ACK", "the word's leaf, which is the last")
    await mesh.stop("eu-west")
    report = mesh.verify_ingress()
    assert report.ok, [finding.sentence for finding in report.findings]


async def test_a_stream_that_does_not_open_keeps_no_policy_from_being_in_force(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant, sent = await granted(mesh, stream=STREAM), numbered(0, 2)
    async with rogue_agent(mesh, grant, stream=STREAM) as agent:
        await agent.open()
        shard, kill = shard_of(mesh, STREAM), Kill(mesh)
        with kill.after(shard._files.disk, "sync"):
            agent.send([sent[0], sent[1]])
            await until(kill.taken.is_set, "the kill")
        refuse(monkeypatch)
        monkeypatch.setattr(leaves, "POLICY_WAIT_S", 0.2)
        await kill.restart()
    governance = mesh.nodes["eu-west"].services.governance
    await mesh.put("eu-west", "policy", stricter(mesh))
    await until(
        lambda: governance.policy is not None and governance.policy.revision == 2, "the policy is in force"
    )


async def test_whoever_puts_a_policy_is_told_that_it_waits(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await granted(mesh, stream=STREAM)
    governance, may_pass = mesh.nodes["eu-west"].services.governance, asyncio.Event()
    monkeypatch.setattr(governance._judgement.leaves, "_drain", lambda concerns, leads_to: may_pass.wait())
    monkeypatch.setattr(leaves, "DRAIN_MS", 50)
    async with mesh.operator("eu-west") as client:
        done = await client.request(PutDocument("policy", stricter(mesh).encode_file()))
    assert "is kept, and in force within a minute" in done.note
    assert governance.policy is not None and governance.policy.revision == 1
    may_pass.set()
    await until(
        lambda: governance.policy is not None and governance.policy.revision == 2, "the policy is in force"
    )
