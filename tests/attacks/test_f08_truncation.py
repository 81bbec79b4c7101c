"""F8: what the source lost after it had crossed is neither forgotten nor papered over.

Tried as found: five records cross, five more cross, the source loses its last five (the streams' folder of the stopped
broker is put back to an earlier copy, or a power cut takes what an interval stream had not synced), and new ones get
their offsets.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from bridge_mesh import Mesh, flight, two_regions, until

from audit.leaf import GapKind, Kind
from bridge.agent import Agent
from felix.messages import LinkState
from policy.grant import Standing, StandingAction, sign_standing
from policy.truncation import Truncation
from region.node import now_ms

Tally = Callable[[str, int], None]


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def link(agent: Agent, state: str, position: int | None = None) -> LinkState:
    def found() -> LinkState | None:
        for each in agent.links():
            if each.state == state and position in (None, each.position):
                return each
        return None

    return await until(found, f"a link that is {state} at {position}; now {agent.links()}")


async def accept(mesh: Mesh, held: LinkState, region: str = "us-east") -> None:
    """What `felix bridge resume GRANT --accept-truncation` signs."""
    assert held.cut is not None
    cut = Truncation(
        stream=held.stream,
        shard=held.shard,
        incarnation=held.cut.incarnation.hex(),
        epoch=held.cut.epoch,
        offset=held.cut.offset,
    )
    standing = Standing(
        grant=held.grant,
        action=StandingAction.ACCEPT_TRUNCATION,
        region=region,
        sequence=1,
        at=now_ms(),
        by="alice",
        reason="restored after a disk failed",
        truncation=cut,
    )
    await mesh.put(region, "standing", sign_standing(standing, mesh.key(region)))


def numbered(first: int, count: int) -> list[bytes]:
    return [flight(number) for number in range(first, first + count)]


def streams_folder(mesh: Mesh, region: str) -> Path:
    return mesh.folder(region).root / "data" / "streams"


def keep(folder: Path, aside: Path) -> None:
    shutil.copytree(folder, aside)


def put_back(aside: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(aside, folder)


def checked(mesh: Mesh) -> int:
    """Both logs verify and agree entry by entry; returns the records."""
    records = mesh.reconcile()
    egress, ingress = mesh.verify_egress(), mesh.verify_ingress()
    assert egress.ok, egress.findings
    assert ingress.ok, ingress.findings
    return records


async def test_a_source_put_back_to_an_older_copy_stops_its_link_until_an_operator_decides(
    mesh: Mesh, tmp_path: Path, tally: Tally
) -> None:
    await mesh.create()
    await mesh.grant()
    await mesh.publish(numbered(0, 5))
    async with mesh.agent():
        await mesh.crossed(5)
    await mesh.stop("us-east")
    keep(streams_folder(mesh, "us-east"), tmp_path / "older")
    await mesh.start("us-east")
    await mesh.publish(numbered(100, 5))
    async with mesh.agent() as agent:
        await link(agent, "active", 10)
    await mesh.stop("us-east")
    put_back(tmp_path / "older", streams_folder(mesh, "us-east"))
    await mesh.start("us-east")
    await mesh.publish(numbered(900, 8))

    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        assert "cut back to offset 5" in held.reason
        assert held.cut is not None and held.cut.offset == 5
        assert "cut back" in agent.not_ready()
        async with mesh.operator("us-east") as client:

            async def shown() -> bool:
                return [each.cut for each in await client.list_links()] == [held.cut]

            await until(shown, "the cut, as an operator sees it")
        assert await mesh.arrived() == 10
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
        await mesh.start(region)
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        assert await mesh.arrived() == 10, "it stays stopped over restarts"
        await accept(mesh, held)
        await link(agent, "active", 13)
        assert agent.not_ready() == ""
    async with mesh.agent() as agent:
        await link(agent, "active", 13)
        await mesh.publish(numbered(950, 2))
        await link(agent, "active", 15)
    found = mesh.numbers(await mesh.read("eu-west", 20))
    assert found == [*range(5), *range(100, 105), *range(900, 908), 950, 951]
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    assert checked(mesh) == 20
    (gap,) = mesh.headers(mesh.egress_folder, Kind.GAP)
    assert (gap.gap, gap.first_offset, gap.last_offset) == (GapKind.TRUNCATION, 5, 9)
    assert "epoch" in gap.sentence
    incarnations = {header.incarnation for header in mesh.headers(mesh.ingress_folder, Kind.ACK)}
    assert len(incarnations) == 2
    tally("records that crossed and were lost at the source", 5)
