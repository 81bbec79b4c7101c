"""A second bridge of the source, with a grant of its own into the same stream: what the first one brought has its leaf, and crosses once.

A link's place at the destination is that of its stream, whoever carries it. So is what the ingress log says of it.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from attacks.test_f08_truncation import accept, link
from bridge_mesh import BRIDGE, STREAM, Mesh, flight, now_ms, two_regions, until
from rogue_agent import Wild, granted, rogue_agent
from slow_runs import only_slow

from audit.leaf import GapKind, Kind
from audit.trust import Trust
from audit.verify import verify_log
from felix.errors import Code, CorruptionError, RequestError
from felix.messages import CutState, LinkState
from policy.grant import StandingAction
from region.bootstrap import issue_identity
from region.config import load_config

OTHER = "us-to-eu-2"


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        issue_identity(mesh.us, load_config(mesh.us.config), "bridge", OTHER, now_ms())
        yield mesh


async def two_grants(mesh: Mesh, stream: str) -> list[tuple[str, bytes]]:
    return [
        await granted(mesh, stream=stream, bridge=f"spiffe://us-east.acme/bridge/{name}")
        for name in (BRIDGE, OTHER)
    ]


async def test_a_second_bridge_gets_no_second_leaf_for_what_the_first_one_brought(mesh: Mesh) -> None:
    """It knows the records, which its grant lets it read, and sends the newest range again under its own grant."""
    stream = "acme/ops/two-leaves"
    one, two = await two_grants(mesh, stream)
    sent = [Wild(b'{"n":%d}' % at) for at in range(3)]
    async with rogue_agent(mesh, one, stream=stream) as agent:
        await agent.open()
        await agent.cross(sent)
        agent.send_nothing(3, 5)
        await agent.receipt()
    async with rogue_agent(mesh, two, bridge=OTHER, stream=stream) as agent:
        for base, again in ((0, sent), (3, [])):
            assert (await agent.open()).position == 6
            if again:
                agent.send(again, base=base)
            else:
                agent.send_nothing(base, 5)
            with pytest.raises(RequestError) as caught:
                await agent.receipt()
            assert caught.value.code is Code.POSITION_GAP
    await mesh.stop("eu-west")
    acks = [leaf.header for leaf in mesh.leaves(mesh.ingress_folder, Kind.ACK)]
    assert [(ack.grant_id, ack.records) for ack in acks] == [(one[0], 3), (one[0], 0)]
    assert mesh.verify_ingress().ok


async def test_a_second_bridge_does_not_bring_again_what_a_deleted_stream_had(mesh: Mesh) -> None:
    """The destination deletes its stream; the link stops for whoever carries it, until an operator decides."""
    stream = "acme/ops/deleted"
    one, two = await two_grants(mesh, stream)
    sent = [Wild(b'{"n":%d}' % at) for at in range(3)]
    async with rogue_agent(mesh, one, stream=stream) as agent:
        await agent.open()
        await agent.cross(sent)
    async with mesh.operator("eu-west") as client:
        await client.delete_stream(stream)
    async with rogue_agent(mesh, two, bridge=OTHER, stream=stream) as agent:
        opened = await agent.open()
        assert (opened.position, opened.logged) == (0, 3)
        agent.send(sent)
        with pytest.raises(CorruptionError) as caught:
            await agent.receipt()
        assert caught.value.code is Code.TRUNCATED
    await mesh.stop("eu-west")
    assert mesh.verify_ingress().ok


@pytest.mark.parametrize("last", [BRIDGE, OTHER])
async def test_a_source_that_states_an_older_incarnation_again_brings_nothing_twice(
    mesh: Mesh, last: str
) -> None:
    """A stream, one made anew under its name, and the first one again: put back from a copy, or stated by a source that lies."""
    stream = f"acme/ops/again-{last}"
    one, two = await two_grants(mesh, stream)
    older, newer = b"a" * 16, b"b" * 16
    sent = [Wild(b'{"n":%d}' % at) for at in range(3)]
    for incarnation in (older, newer):
        async with rogue_agent(mesh, one, stream=stream, incarnation=incarnation) as agent:
            opened = await agent.open(statement=mesh.statement(stream=stream, incarnation=incarnation))
            assert (opened.position, opened.logged) == (0, 0)
            await agent.cross(sent)
    grant = one if last == BRIDGE else two
    async with rogue_agent(mesh, grant, bridge=last, stream=stream, incarnation=older) as agent:
        opened = await agent.open(statement=mesh.statement(stream=stream, incarnation=older))
        assert (opened.position, opened.logged) == (0, 3)
        agent.send(sent)
        with pytest.raises(CorruptionError) as caught:
            await agent.receipt()
        assert caught.value.code is Code.TRUNCATED
    await mesh.stop("eu-west")
    report = mesh.verify_ingress()
    assert report.ok, report.findings


async def test_an_agent_that_never_carried_stops_where_the_destination_lost_what_another_brought(
    mesh: Mesh,
) -> None:
    """An honest agent takes over: it says where the link stands, so that an operator can decide."""
    await mesh.create()
    await mesh.publish([flight(number) for number in range(3)])
    stream = (await mesh.describe("us-east")).incarnation
    grant = await granted(mesh, bridge=f"spiffe://us-east.acme/bridge/{OTHER}")
    async with rogue_agent(mesh, grant, bridge=OTHER, incarnation=stream) as agent:
        await agent.open()
        await agent.cross([Wild(b'{"n":%d}' % at) for at in range(3)])
    async with mesh.operator("eu-west") as client:
        await client.delete_stream(STREAM)
    await mesh.grant()
    async with mesh.agent() as agent:

        def stopped() -> LinkState | None:
            return next((each for each in agent.links() if each.state == "truncated"), None)

        found = await until(stopped, "the stop")
        assert found.cut is not None and found.cut.offset == 0
    assert await mesh.arrived() == 0


async def test_two_honest_agents_account_for_what_the_other_one_brought(mesh: Mesh) -> None:
    """The first one's grant ends; the second begins where the destination is, and its log says whose records lie below."""
    await mesh.create()
    await mesh.publish([flight(number) for number in range(3)])
    first = await mesh.grant()
    async with mesh.agent():
        await mesh.crossed(3)
    for region in ("us-east", "eu-west"):
        await mesh.stand(region, first, StandingAction.REVOKE)
    other = f"spiffe://us-east.acme/bridge/{OTHER}"
    async with mesh.operator("us-east") as client:
        await client.put_rights(other, [f"bridge-read {STREAM}"])
    await mesh.grant(bridge=other)
    await mesh.publish([flight(number) for number in range(3, 5)])
    async with mesh.agent(name=OTHER):
        await mesh.crossed(5)
    await mesh.stop("eu-west")
    folder = mesh.us.root / "bridges" / OTHER / "egress"
    (gap,) = mesh.headers(folder, Kind.GAP)
    assert (gap.gap, gap.first_offset, gap.last_offset) == (GapKind.ELSEWHERE, 0, 2)
    known = Trust.of(mesh.bundle(region) for region in ("us-east", "eu-west"))
    for log in (folder, mesh.egress_folder, mesh.ingress_folder):
        report = verify_log(mesh.log_files(log), known, cosignatures_min=0)
        assert report.ok, report.findings
    crossed = [ack.records for ack in mesh.headers(mesh.ingress_folder, Kind.ACK)]
    assert sum(crossed) == 5


@only_slow
async def test_a_bridge_stops_where_the_destination_lost_what_another_one_brought_behind_its_own(
    mesh: Mesh, tmp_path: Path
) -> None:
    """The first one carries three records, the second three more, and the destination's streams are put back to where they had three: the first one
    takes over again. Its log has nothing to say of what it did not carry, and an operator decides as for any other."""
    await mesh.create()
    await mesh.publish([flight(number) for number in range(3)])
    grant = await mesh.grant()
    async with mesh.agent():
        await mesh.crossed(3)
        await until(lambda: mesh.headers(mesh.egress_folder, Kind.ACK), "the receipt")
    await mesh.stop("eu-west")
    streams = mesh.eu.root / "data" / "streams"
    shutil.copytree(streams, tmp_path / "older")
    await mesh.start("eu-west")
    for region in ("us-east", "eu-west"):
        await mesh.stand(region, grant, StandingAction.REVOKE)
    other = f"spiffe://us-east.acme/bridge/{OTHER}"
    async with mesh.operator("us-east") as client:
        await client.put_rights(other, [f"bridge-read {STREAM}"])
    grant = await mesh.grant(bridge=other)
    await mesh.publish([flight(number) for number in range(3, 6)])
    async with mesh.agent(name=OTHER):
        await mesh.crossed(6)
    for region in ("us-east", "eu-west"):
        await mesh.stand(region, grant, StandingAction.REVOKE)
    await mesh.stop("eu-west")
    shutil.rmtree(streams)
    shutil.copytree(tmp_path / "older", streams)
    await mesh.start("eu-west")
    await mesh.grant()
    async with mesh.agent() as agent:
        held = await until(
            lambda: next((each for each in agent.links() if each.reason.startswith("eu-west had")), None),
            "the stop",
        )
        assert (held.state, held.cut and held.cut.offset) == ("truncated", 3), held
        assert "cannot be written" not in held.reason
        await accept(mesh, held)
        await mesh.crossed(6)
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    assert mesh.headers(mesh.egress_folder, Kind.GAP) == []
    for report in (mesh.verify_egress(), mesh.verify_ingress()):
        assert report.ok, report.findings


class Turns:
    """Two bridges that take turns, each under a grant of its own, and a source that is put back."""

    def __init__(self, mesh: Mesh, aside: Path) -> None:
        self.mesh, self._aside = mesh, aside
        self._streams = mesh.us.root / "data" / "streams"
        self._grant = ""

    async def begin(self) -> None:
        await self.mesh.create()
        async with self.mesh.operator("us-east") as client:
            await client.put_rights(f"spiffe://us-east.acme/bridge/{OTHER}", [f"bridge-read {STREAM}"])

    async def turn(self, bridge: str) -> None:
        """The other one's grant ends, and this one gets one."""
        if self._grant:
            for region in ("us-east", "eu-west"):
                await self.mesh.stand(region, self._grant, StandingAction.REVOKE)
        self._grant = await self.mesh.grant(bridge=f"spiffe://us-east.acme/bridge/{bridge}")

    async def publish(self, first: int, count: int) -> None:
        await self.mesh.publish([flight(number) for number in range(first, first + count)])

    async def keep(self) -> None:
        await self.mesh.stop("us-east")
        shutil.copytree(self._streams, self._aside)
        await self.mesh.start("us-east")

    async def put_back(self) -> None:
        await self.mesh.stop("us-east")
        shutil.rmtree(self._streams)
        shutil.copytree(self._aside, self._streams)
        await self.mesh.start("us-east")

    async def check(self, crossed: list[int]) -> None:
        """What the destination has, in order, and that every log verifies."""
        mesh = self.mesh
        assert await mesh.arrived() == len(crossed)
        assert mesh.numbers(await mesh.read("eu-west", len(crossed))) == crossed
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)
        for folder in (mesh.egress_folder, mesh.us.root / "bridges" / OTHER / "egress", mesh.ingress_folder):
            report = verify_log(mesh.log_files(folder), mesh.trust, cosignatures_min=0)
            assert report.ok, report.findings


async def test_a_bridge_that_carried_what_the_source_lost_goes_on_where_it_was_accepted_for_another_one(
    mesh: Mesh, tmp_path: Path
) -> None:
    """Its log has no epoch of what the other one carried below, so it cannot say where the histories part. It asked for all of the stream to cross again."""
    turns = Turns(mesh, tmp_path / "older")
    await turns.begin()
    await turns.publish(0, 2)
    await turns.turn(BRIDGE)
    async with mesh.agent() as agent:
        await link(agent, "active", 2)
    await turns.keep()
    await turns.publish(100, 2)
    async with mesh.agent() as agent:
        await link(agent, "active", 4)
    await turns.turn(OTHER)
    await turns.publish(102, 2)
    async with mesh.agent(name=OTHER) as agent:
        await link(agent, "active", 6)
    await turns.put_back()
    await turns.publish(200, 3)
    await turns.turn(BRIDGE)
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        assert held.cut is not None and held.cut.offset == 2
        await accept(mesh, held)
        await link(agent, "active", 5)
    await turns.turn(OTHER)
    await turns.publish(300, 1)
    async with mesh.agent(name=OTHER) as agent:
        await link(agent, "active", 6)
    await turns.check([0, 1, 100, 101, 102, 103, 200, 201, 202, 300])


@only_slow
async def test_where_the_destination_alone_knows_of_a_cut_what_this_bridge_carried_does_not_cross_again(
    mesh: Mesh, tmp_path: Path
) -> None:
    """The other one carried what the source lost. This one's log says that the source has all that it read, so the operator is shown the end of that, and not the stream's beginning."""
    turns = Turns(mesh, tmp_path / "older")
    await turns.begin()
    await turns.publish(0, 3)
    await turns.turn(BRIDGE)
    async with mesh.agent() as agent:
        await link(agent, "active", 3)
    await turns.keep()
    await turns.turn(OTHER)
    await turns.publish(100, 2)
    async with mesh.agent(name=OTHER) as agent:
        await link(agent, "active", 5)
    await turns.put_back()
    await turns.publish(200, 4)
    await turns.turn(BRIDGE)
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        assert "back to offset 3 or further" in held.reason
        assert held.cut is not None and held.cut.offset == 3
        await accept(mesh, held)
        await link(agent, "active", 7)
    await turns.check([0, 1, 2, 100, 101, 200, 201, 202, 203])


@only_slow
async def test_a_bridge_that_took_over_knows_where_histories_part_below_what_it_read(
    mesh: Mesh, tmp_path: Path
) -> None:
    """The source is put back to where the other one carried. It stopped at the stream's beginning, and all of it crossed again."""
    turns = Turns(mesh, tmp_path / "older")
    await turns.begin()
    await turns.publish(0, 2)
    await turns.turn(BRIDGE)
    async with mesh.agent() as agent:
        await link(agent, "active", 2)
    await turns.keep()
    await turns.publish(100, 2)
    async with mesh.agent() as agent:
        await link(agent, "active", 4)
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
        await mesh.start(region)
    await turns.turn(OTHER)
    await turns.publish(102, 2)
    async with mesh.agent(name=OTHER) as agent:
        await link(agent, "active", 6)
    await turns.put_back()
    await turns.publish(200, 3)
    async with mesh.agent(name=OTHER) as agent:
        held = await link(agent, "truncated")
        assert held.cut is not None and held.cut.offset == 2
        await accept(mesh, held)
        await link(agent, "active", 5)
    await turns.check([0, 1, 100, 101, 102, 103, 200, 201, 202])
    gaps = mesh.headers(mesh.us.root / "bridges" / OTHER / "egress", Kind.GAP)
    ranges = [(gap.gap, gap.first_offset, gap.last_offset) for gap in gaps]
    assert ranges == [(GapKind.ELSEWHERE, 0, 1), (GapKind.ELSEWHERE, 2, 3), (GapKind.TRUNCATION, 2, 5)]
    assert len({gap.source_epoch for gap in gaps[:2]}) == 2


async def test_a_bridge_takes_over_where_another_one_was_stopped_and_a_truncation_was_accepted(
    mesh: Mesh, tmp_path: Path
) -> None:
    """The first one carries five records, the second five more. The source loses the last two, and an operator accepts that for the second one. Then the first one takes over:
    it has read nothing that is gone, and nothing crosses twice."""
    other = f"spiffe://us-east.acme/bridge/{OTHER}"
    streams = mesh.us.root / "data" / "streams"

    async def end(grant: str) -> None:
        for region in ("us-east", "eu-west"):
            await mesh.stand(region, grant, StandingAction.REVOKE)

    await mesh.create()
    async with mesh.operator("us-east") as client:
        await client.put_rights(other, [f"bridge-read {STREAM}"])
    await mesh.publish([flight(number) for number in range(5)])
    grant = await mesh.grant()
    async with mesh.agent() as agent:
        await link(agent, "active", 5)
    await end(grant)
    grant = await mesh.grant(bridge=other)
    await mesh.publish([flight(number) for number in range(5, 8)])
    async with mesh.agent(name=OTHER) as agent:
        await link(agent, "active", 8)
    await mesh.stop("us-east")
    shutil.copytree(streams, tmp_path / "older")
    await mesh.start("us-east")
    await mesh.publish([flight(number) for number in range(100, 102)])
    async with mesh.agent(name=OTHER) as agent:
        await link(agent, "active", 10)
    await mesh.stop("us-east")
    shutil.rmtree(streams)
    shutil.copytree(tmp_path / "older", streams)
    await mesh.start("us-east")
    await mesh.publish([flight(number) for number in range(200, 204)])
    async with mesh.agent(name=OTHER) as agent:
        await accept(mesh, await link(agent, "truncated"))
        await link(agent, "active", 12)
    await end(grant)
    await mesh.grant()
    async with mesh.agent() as agent:
        await link(agent, "active", 12)
    await mesh.publish([flight(number) for number in range(300, 302)])
    async with mesh.agent() as agent:
        await link(agent, "active", 14)
    crossed = [*range(8), 100, 101, *range(200, 204), 300, 301]
    assert mesh.numbers(await mesh.read("eu-west", len(crossed))) == crossed
    assert await mesh.arrived() == len(crossed)
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    gaps = mesh.headers(mesh.egress_folder, Kind.GAP)
    assert {(gap.gap, gap.first_offset, gap.last_offset) for gap in gaps} == {
        (GapKind.ELSEWHERE, 5, 7), (GapKind.ELSEWHERE, 8, 11),
    }  # fmt: skip
    assert len(gaps) == len({gap.incarnation for gap in gaps}) == 2
    for folder in (mesh.egress_folder, mesh.us.root / "bridges" / OTHER / "egress", mesh.ingress_folder):
        report = verify_log(mesh.log_files(folder), mesh.trust, cosignatures_min=0)
        assert report.ok, report.findings


async def test_where_it_was_accepted_to_go_on_behind_what_any_bridge_carried_nothing_is_passed_over(
    mesh: Mesh,
) -> None:
    """A truncation is accepted at offset 8, and the destination has what lies below 5: it refuses, and the operator is shown where to accept it."""
    await mesh.create()
    grant = await mesh.grant()
    await mesh.publish([flight(number) for number in range(5)])
    async with mesh.agent() as agent:
        stands = await link(agent, "active", 5)
    await mesh.publish([flight(number) for number in range(5, 10)])
    stream = await mesh.describe("us-east")
    cut = CutState(stream.incarnation, stream.state[0].leader_epoch, 8)
    await accept(mesh, msgspec.structs.replace(stands, grant=grant, cut=cut))
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        assert held.cut is not None and held.cut.offset == 5, held
        assert await mesh.arrived() == 5
        await accept(mesh, held)
        await link(agent, "active", 10)
    assert mesh.numbers(await mesh.read("eu-west", 10)) == list(range(10))
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    assert mesh.headers(mesh.egress_folder, Kind.GAP) == []
    assert mesh.verify_egress().ok and mesh.verify_ingress().ok
