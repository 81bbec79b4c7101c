"""A resend: what stayed crosses under the terms that hold now, what crossed does not come again, and both logs verify."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bridge_mesh import BRIDGE, STREAM, Mesh, flight, two_regions, until
from rogue_agent import INCARNATION, Wild, granted, rogue_agent, wild_batch, wild_envelope

from audit.leaf import Kind
from bridge.agent import Agent
from felix.errors import RequestError
from felix.messages import LinkState
from felix.names import SpiffeId
from felix.runtime.real import now_ms
from policy.grant import Standing, StandingAction, sign_standing
from policy.transform import build_spec
from policy.truncation import Accepted, Truncation


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def resend(
    mesh: Mesh, grant: str, incarnation: bytes, offset: int = 0, at: str = "us-east"
) -> Accepted:
    """What `felix bridge resend GRANT --from OFFSET` signs, given to one region."""
    back = Truncation(stream=STREAM, shard=0, incarnation=incarnation.hex(), epoch=1, offset=offset)
    standing = Standing(
        grant=grant, action=StandingAction.RESEND, region="us-east", sequence=9, at=now_ms(), by="alice", truncation=back
    )  # fmt: skip
    await mesh.put(at, "standing", sign_standing(standing, mesh.key("us-east")))
    return Accepted(back, "us-east", standing.at, is_resend=True)


async def link(agent: Agent, grant: str, position: int) -> LinkState:
    def found() -> LinkState | None:
        for each in agent.links():
            if (each.grant, each.state, each.position) == (grant, "active", position):
                return each
        return None

    return await until(found, f"a link under {grant} at {position}; now {agent.links()}")


def flights(first: int, count: int) -> list[bytes]:
    """Every third of another carrier, as the filter below has it."""
    return [flight(number, carrier="DL" if number % 3 else "UA") for number in range(first, first + count)]


async def test_what_a_filter_and_a_wrong_field_kept_crosses_once_under_new_terms(mesh: Mesh) -> None:
    await mesh.create()
    wrong = build_spec(pseudonymize=["tailnumber"], filter_='carrier == "UA"')
    half = build_spec(pseudonymize=["tailnum"], filter_='carrier == "UA"')
    whole = build_spec(pseudonymize=["tailnum"])
    await mesh.publish(flights(0, 6), batch=6)
    async with mesh.agent() as agent:
        first = await mesh.grant(transform=wrong)
        held = await link(agent, first, 6)
        assert (held.crossed, held.withheld, held.filtered) == (0, 2, 4)
        assert "No record has crossed under this grant: the last 6 stayed" in held.reason
        assert await mesh.arrived() == 0, "no record has that field, or the filter keeps it"
        await mesh.stand("us-east", first, StandingAction.REVOKE)
        second = await mesh.grant(transform=half)
        await mesh.publish(flights(6, 6), batch=6)
        await link(agent, second, 12)
        await mesh.stand("us-east", second, StandingAction.REVOKE)
        third = await mesh.grant(transform=whole)
        await link(agent, third, 12)
        assert mesh.numbers(await mesh.read("eu-west", 2)) == [6, 9]
        own = (await mesh.describe("us-east")).incarnation
        await resend(mesh, third, own, 1)
        await mesh.crossed(11)
        await mesh.publish(flights(12, 3), batch=3)
        await link(agent, third, 15)
    async with mesh.agent() as agent:
        held = await link(agent, third, 15)
        assert (held.crossed, held.withheld, held.filtered, held.lag_ms) == (14, 2, 8, 0), (
            "as before the restart"
        )
        await mesh.publish(flights(15, 1))
        await link(agent, third, 16)
    arrived = mesh.numbers(await mesh.read("eu-west", 15))
    assert arrived[:2] == [6, 9] and sorted(arrived) == list(range(1, 16)), (
        "each once; what lay before --from stays"
    )
    live = mesh.nodes["us-east"].services.governance.book.live_incarnation(third, STREAM, 0, own)
    assert live.accepted is not None and live.accepted.is_resend

    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    assert mesh.reconcile() == 15
    egress, ingress = mesh.verify_egress(), mesh.verify_ingress()
    assert egress.ok, egress.findings
    assert ingress.ok, ingress.findings
    for folder in (mesh.egress_folder, mesh.ingress_folder, mesh.us.root / "data" / "audit"):
        assert [each.action for each in mesh.headers(folder, Kind.STANDING)].count("resend") == 1
    stayed = mesh.headers(mesh.egress_folder, Kind.WITHHELD)
    assert sum(each.records for each in stayed if each.reason == "crossed-before") == 2


async def test_the_destination_lets_no_agent_send_again_what_crossed(mesh: Mesh) -> None:
    grant = await granted(mesh)
    records = [Wild(b'{"n":0}'), Wild(b'{"n":1}'), Wild(b'{"n":2}')]
    async with rogue_agent(mesh, grant) as agent:
        await agent.open()
        # Of offsets 0 to 2, the one in the middle crosses.
        batch = wild_batch(records[1:2])
        agent.send_envelope(wild_envelope(agent.key, agent.peer.identity, 0, 2, batch, 1, (1,)))
        await agent.receipt()
    live = (await resend(mesh, grant[0], INCARNATION, at="eu-west")).incarnation
    statement = mesh.statement(incarnation=INCARNATION)
    async with rogue_agent(mesh, grant, incarnation=live) as agent:
        opened = await agent.open(statement=statement)
        assert (opened.position, opened.crossed_from, opened.crossed) == (0, 0, b"\x02")
        refusal = await agent.refused(records)
        assert isinstance(refusal, RequestError) and "source offset 1 crossed before" in str(refusal)
        await agent.open(statement=statement)
        batch = wild_batch([records[0], records[2]])
        agent.send_envelope(wild_envelope(agent.key, agent.peer.identity, 0, 2, batch, 2, (0, 2)))
        assert (await agent.receipt()).records == 2
        await agent.cross([Wild(b"{}")])
    async with rogue_agent(mesh, grant, incarnation=live) as agent:
        opened = await agent.open(statement=statement)
        assert (opened.position, opened.logged) == (4, 4)
    assert await mesh.arrived() == 4
    await mesh.stop("eu-west")
    report = mesh.verify_ingress()
    assert report.ok, report.findings


async def test_a_resend_is_the_source_region_s_word(mesh: Mesh) -> None:
    grant, _ = await granted(mesh)
    back = Truncation(stream=STREAM, shard=0, incarnation=INCARNATION.hex(), epoch=1, offset=0)
    standing = Standing(
        grant=grant, action=StandingAction.RESEND, region="eu-west", sequence=9, at=now_ms(), by="alice", truncation=back
    )  # fmt: skip
    document = sign_standing(standing, mesh.key("eu-west"))
    with pytest.raises(RequestError, match="is for us-east to say, its source"):
        await mesh.put("eu-west", "standing", document)
    bridge = SpiffeId("us-east", "acme", "bridge", BRIDGE)
    await mesh.nodes["eu-west"].services.governance.put(bridge, "standing", document.encode_file())
    book = mesh.nodes["eu-west"].services.governance.book
    assert book.live_incarnation(grant, STREAM, 0, INCARNATION).incarnation == INCARNATION
