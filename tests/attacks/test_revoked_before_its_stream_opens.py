"""A destination dies between a range's append and its leaf, the grant is revoked, and at the next start the stream cannot be opened
at once. Nobody is ill: the revocation's leaf waits for those of the range."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from attacks.test_destination_killed import Kill, numbered, shard_of, trail_of
from bridge_mesh import Mesh, two_regions, until
from rogue_agent import granted, rogue_agent

from audit.leaf import Kind
from felix.errors import UnavailableError
from felix.names import StreamName
from felix.runtime.real import now_ms
from policy.grant import Standing, StandingAction, sign_standing
from region import stream_follower
from region.metadata.catalog import Catalog
from region.metadata.embedded import EmbeddedStore
from region.streams import StreamTable

pytestmark = pytest.mark.timeout(300)

STREAM = "acme/ops/revoked"


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def test_a_revocation_has_its_leaf_behind_those_of_a_stream_that_opens_later(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant, sent = await granted(mesh, stream=STREAM), numbered(0, 3)
    may_open = False
    really_open = StreamTable.open
    async with rogue_agent(mesh, grant, stream=STREAM) as agent:
        await agent.open()
        await agent.cross([sent[0]])
        shard, kill = shard_of(mesh, STREAM), Kill(mesh)
        with kill.after(shard._disk, "sync"):
            agent.send([sent[1], sent[2]])
            await until(kill.taken.is_set, "the kill")
        body = Standing(
            grant=grant[0], action=StandingAction.REVOKE, region="eu-west", sequence=1, at=now_ms(), by="a"
        )
        document = sign_standing(body, mesh.key("eu-west")).encode_file()
        store = await EmbeddedStore.open(kill.copy / "data" / "metadata.db")
        await Catalog(store, "eu-west").put_document("revocations", "state", f"{grant[0]}.r", document)
        await store.close()

        async def refusing(table: StreamTable, record: Any) -> Any:
            if record.name == STREAM and not may_open:
                raise UnavailableError("The key service does not answer.", retry_after_ms=100)
            return await really_open(table, record)

        monkeypatch.setattr(StreamTable, "open", refusing)
        monkeypatch.setattr(stream_follower, "RETRY_S", 0.05)
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
    may_open = True
    await until(lambda: "REVOKE" in kinds(), "the revocation's leaf")
    assert kinds() == ["ACK", "ACK", "REVOKE"]
    await mesh.stop("eu-west")
    report = mesh.verify_ingress()
    assert report.ok, [finding.sentence for finding in report.findings]
