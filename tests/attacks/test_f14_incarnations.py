"""F14: a link takes one place in the destination's log, and only incarnations that its source states.

Tried as found: incarnations that never were, one after the other, until the shard has no place left for anybody; and a
stream that is made anew so often, honestly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from bridge_mesh import STREAM, Mesh, flight, two_regions, until
from long_runs import count
from rogue_agent import RogueAgent, Wild, granted, rogue_agent

from audit.stream_statement import Epoch
from felix.batch import NewRecord, encode_batch
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.names import StreamName
from felix.runtime.real import now_ms
from region.crossing.link_slot import REGION_LINKS_MAX, LinkRecord, Position, link_slot, old_slot
from region.log.shard import Appended, ShardLog
from region.transactions.positions import SLOT

Tally = Callable[[str, int], None]
ENGINES = ("qh3", "aioquic")


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


def destination(mesh: Mesh, stream: str = STREAM) -> ShardLog:
    hosted = mesh.nodes["eu-west"].broker.streams.get(StreamName.parse(stream))
    assert hosted is not None
    return hosted.shard(0)


@pytest.mark.parametrize("engine", ENGINES)
async def test_incarnations_epochs_and_shards_that_the_source_does_not_state_are_refused(
    mesh: Mesh, engine: str, tally: Tally, attack_scale: int
) -> None:
    await mesh.stop("eu-west")
    await mesh.start("eu-west", engine=engine)
    grant = await granted(mesh)
    async with rogue_agent(mesh, grant, engine=engine) as agent:
        own = agent.key.scope.incarnation
        await agent.open()
        agent.send([Wild(b"{}")] * 3)
        await agent.receipt()
    stated = mesh.statement(incarnation=own)
    before = dict(destination(mesh).annotations)
    tried = 0
    for first in range(0, (300 if engine == "qh3" else 60) * attack_scale, 60):
        async with rogue_agent(mesh, grant, engine=engine) as session:
            for number in range(first, first + 60):
                agent = RogueAgent(mesh, session.peer, *grant, incarnation=number.to_bytes(16, "big"))
                with pytest.raises(RequestError, match="does not state that"):
                    await agent.open(statement=stated)
                tried += 1
    wrong = {
        "another region's signature": mesh.statement(region="eu-west", incarnation=own),
        "claimed for the source, signed by the destination": _signed_by(mesh, "eu-west", incarnation=own),
        "another stream": mesh.statement(stream="acme/ops/crew", incarnation=own),
        "another shard": mesh.statement(shard=1, shards=2, incarnation=own),
        "another number of shards": mesh.statement(shards=2, incarnation=own),
        "another epoch": mesh.statement(epochs=(Epoch(2, 0),), incarnation=own),
        "no epochs": mesh.statement(epochs=(), incarnation=own),
        "changed": _changed(mesh.statement(incarnation=own)),
        "nothing": b"",
        "too long": bytes(30_000),
        "older than the newest one shown": mesh.statement(incarnation=own, time_ms=now_ms() - 600_000),
        "an older incarnation": mesh.statement(incarnation=b"o" * 16, time_ms=now_ms() - 600_000),
    }
    for what, statement in wrong.items():
        incarnation = b"o" * 16 if what == "an older incarnation" else own
        async with rogue_agent(mesh, grant, engine=engine, incarnation=incarnation) as agent:
            with pytest.raises(FelixError):
                await agent.open(statement=statement)
                pytest.fail(what)
            tried += 1
    assert destination(mesh).annotations == before
    async with rogue_agent(mesh, grant, engine=engine) as agent:
        assert (await agent.open()).position == 3, "the link itself goes on"
    tally("statements and incarnations that are not the source's", tried)


def _signed_by(mesh: Mesh, region: str, **changes: object) -> bytes:
    """A statement about the source's stream under the receipt key of another region."""
    mesh_of = {"us-east": mesh.us, "eu-west": mesh.eu}
    held = mesh_of["us-east"].receipt_key
    kept = held.read_bytes()
    try:
        held.write_bytes(mesh_of[region].receipt_key.read_bytes())
        return mesh.statement("us-east", **changes)
    finally:
        held.write_bytes(kept)


def _changed(statement: bytes) -> bytes:
    return statement.replace(b"acme/ops/departures", b"acme/ops/departurez")


async def test_a_stream_made_anew_hundreds_of_times_keeps_one_place_and_others_keep_theirs(
    mesh: Mesh, tally: Tally
) -> None:
    """Incarnations that the source states, each with records; another link and a transaction beside."""
    grant = await granted(mesh)
    async with rogue_agent(mesh, grant, incarnation=b"\0" * 16) as agent:
        await agent.open()
    shard = destination(mesh)
    other = LinkRecord("ap-south", "acme/ops/crew", b"c" * 16, b"c" * 16, 1, 1, 5, Position(5))
    await shard.append(None, annotation=other.encode(), slot=link_slot("ap-south", "acme/ops/crew", 0))
    await shard.append(None, annotation=b"transactions", slot=SLOT)
    made = count(120, 300)
    for first in range(1, made + 1, 60):
        async with rogue_agent(mesh, grant) as session:
            for number in range(first, first + 60):
                agent = RogueAgent(mesh, session.peer, *grant, incarnation=number.to_bytes(16, "big"))
                assert (await agent.open()).position == 0, "each begins anew"
                agent.send([Wild(b"{}")])
                await agent.receipt()
                session.peer.send(b"", agent.stream, end=True)
    assert len(shard.annotations) == 3
    assert shard.high_watermark == made
    await mesh.stop("eu-west")
    await mesh.start("eu-west")
    shard = destination(mesh)
    assert set(shard.annotations) == {
        link_slot("us-east", STREAM, 0), link_slot("ap-south", "acme/ops/crew", 0), SLOT
    }  # fmt: skip
    report = mesh.verify_ingress()
    assert report.ok, report.findings
    tally("incarnations of one stream, in one place", made)


async def test_a_stream_that_its_source_makes_anew_crosses_each_time(mesh: Mesh) -> None:
    """The honest agent, between real brokers."""
    await mesh.create()
    await mesh.grant()
    async with mesh.agent():
        for number in range(3):
            await mesh.publish([flight(number)])
            await mesh.crossed(number + 1)
            async with mesh.operator("us-east") as client:
                await client.delete_stream(STREAM)
                await client.create_stream(STREAM)
    assert len(destination(mesh).annotations) == 1
    assert mesh.numbers(await mesh.read("eu-west", 3)) == [0, 1, 2]


async def test_a_link_of_version_0_1_goes_on_where_it_stood_and_its_old_place_is_freed(
    mesh: Mesh, tally: Tally
) -> None:
    grant = await granted(mesh)
    async with rogue_agent(mesh, grant) as agent:
        await agent.open()
        own = agent.key.scope.incarnation
    shard = destination(mesh)
    slot = old_slot("us-east", STREAM, own, 0)
    batch = encode_batch([NewRecord(b"{}")] * 7, shard=0)
    # What version 0.1 left behind: the position of this link, and 255 of incarnations that never were.
    await shard.append(batch, annotation=Position(7).encode(), slot=slot)
    for number in range(255):
        junk = old_slot("us-east", STREAM, number.to_bytes(16, "big"), 0)
        await shard.append(None, annotation=Position(0).encode(), slot=junk)
    await mesh.stop("eu-west")
    await mesh.start("eu-west")
    async with rogue_agent(mesh, grant) as agent:
        assert (await agent.open()).position == 7
        assert slot in destination(mesh).annotations, "nothing has landed yet"
        agent.send([Wild(b"{}")] * 2)
        await agent.receipt()
    await until(lambda: slot not in destination(mesh).annotations, "the old place to be freed")
    await mesh.stop("eu-west")
    await mesh.start("eu-west")
    shard = destination(mesh)
    assert slot not in shard.annotations
    assert link_slot("us-east", STREAM, 0) in shard.annotations
    async with rogue_agent(mesh, grant) as agent:
        assert (await agent.open()).position == 9
    await shard.append(None, annotation=b"transactions", slot=SLOT)
    tally("places that version 0.1 left behind", 256)


async def test_names_whose_hashes_meet_are_refused_and_a_region_can_take_so_many_places(
    mesh: Mesh, tally: Tally
) -> None:
    grant = await granted(mesh)
    async with rogue_agent(mesh, grant) as agent:
        await agent.open()
    shard, slot = destination(mesh), link_slot("us-east", STREAM, 0)
    met = LinkRecord("us-east", "acme/ops/crew", b"c" * 16, b"c" * 16, 1, 1, 5, Position(5))
    for held in (met.encode(), b"no link's"):
        await shard.append(None, annotation=held, slot=slot)
        async with rogue_agent(mesh, grant) as agent:
            with pytest.raises(RequestError) as refused:
                await agent.open()
            assert refused.value.code is Code.CONFLICT
    freed: list[Appended | FelixError] = []
    shard.free_slot_nowait(slot, freed.append)
    await until(lambda: freed, "the place to be freed")
    for number in range(REGION_LINKS_MAX):
        name = f"acme/ops/s{number}"
        await shard.append(
            None, annotation=met._replace(stream=name).encode(), slot=link_slot("us-east", name, 0)
        )
    async with rogue_agent(mesh, grant) as agent:
        with pytest.raises(UnavailableError) as full:
            await agent.open()
        assert full.value.code is Code.LIMIT_MEMORY
    await shard.append(None, annotation=b"transactions", slot=SLOT)
    tally("places of one region in one shard", REGION_LINKS_MAX)
