"""F8: what the source lost after it had crossed is neither forgotten nor papered over.

Tried as found: five records cross, five more cross, the source loses its last five (the streams' folder of the stopped
broker is put back to an earlier copy, or a power cut takes what an interval stream had not synced), and new ones get
their offsets.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from bridge_mesh import BRIDGE, STREAM, Mesh, flight, two_regions, until
from rogue_agent import Wild, granted, rogue_agent
from slow_runs import only_slow

from audit.checkpoint import note_size
from audit.leaf import GapKind, Kind
from audit.stream_statement import Epoch
from bridge.agent import Agent
from felix.errors import Code, CorruptionError
from felix.messages import LinkState, RotateKeys
from felix.names import StreamName
from felix.runtime.real import now_ms
from felix.settings import Durability
from felix.transport.port import ENGINE_NAMES
from policy.grant import Standing, StandingAction, sign_standing
from policy.truncation import Truncation
from region.log.shard import ShardLog

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


def is_cosigned(mesh: Mesh) -> bool:
    """Whether us-east has cosigned eu-west's log as far as it goes, and the bridge knows."""
    # All leaves, and not the checkpoint alone, which may be of before the last crossing.
    size = mesh.nodes["eu-west"].services.governance.trail.status().durable
    kept = (mesh.egress_folder.parent / "regions").glob("*.checkpoint")
    return any(
        note.startswith(b"eu-west.") and note_size(note) == size
        for note in (path.read_bytes() for path in kept)
    )


async def source_put_back(mesh: Mesh, aside: Path) -> None:
    """Ten records cross; then the source is an older copy of itself, that had five, and goes on from there with eight others."""
    await mesh.create()
    await mesh.grant()
    await mesh.publish(numbered(0, 5))
    async with mesh.agent():
        await mesh.crossed(5)
    await mesh.stop("us-east")
    keep(streams_folder(mesh, "us-east"), aside)
    await mesh.start("us-east")
    await mesh.publish(numbered(100, 5))
    async with mesh.agent() as agent:
        await link(agent, "active", 10)
    await mesh.stop("us-east")
    put_back(aside, streams_folder(mesh, "us-east"))
    await mesh.start("us-east")
    await mesh.publish(numbered(900, 8))


async def test_a_source_put_back_to_an_older_copy_stops_its_link_until_an_operator_decides(
    mesh: Mesh, tmp_path: Path, tally: Tally
) -> None:
    await source_put_back(mesh, tmp_path / "older")

    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        assert held.reason.count("cut back to offset 5") == 1
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
        goes_on = await link(agent, "active", 13)
        assert "cut back" not in goes_on.reason
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
    for folder in (mesh.egress_folder, mesh.us.root / "data" / "audit", mesh.ingress_folder):
        accepted = [
            each for each in mesh.headers(folder, Kind.STANDING) if each.action == "accept-truncation"
        ]
        assert len(accepted) == 1, folder
    incarnations = {header.incarnation for header in mesh.headers(mesh.ingress_folder, Kind.ACK)}
    assert len(incarnations) == 2
    tally("records that crossed and were lost at the source", 5)


async def test_a_power_cut_on_an_interval_stream_takes_nothing_that_crossed(mesh: Mesh, tally: Tally) -> None:
    """Nothing is synced for a minute; what is not must not cross, or it would be gone at the source and stay abroad."""
    await mesh.create(durability=Durability("interval", 60_000))
    await mesh.grant()
    async with mesh.agent() as agent:
        await mesh.publish(numbered(0, 5))
        shard = source_shard(mesh)
        assert shard._files is not None
        shard._files.sync_soon()
        await link(agent, "active", 5)
        await mesh.publish(numbered(100, 5))
        assert (shard.high_watermark, shard.synced_offset) == (10, 5)
        found = [record.offset for record in await mesh.read("us-east", 10)]
        assert found == list(range(10)), "within the region they are read at once"
        for _ in range(20):
            await asyncio.sleep(0.02)
            assert await mesh.arrived() == 5
        cut_power(shard)
    await mesh.stop("us-east")
    await mesh.start("us-east")
    assert source_shard(mesh).high_watermark == 5
    await mesh.publish(numbered(900, 8))
    async with mesh.agent() as agent:
        source_shard(mesh)._files.sync_soon()  # type: ignore[union-attr]
        await link(agent, "active", 13)
        assert agent.links()[0].cut is None
    assert mesh.numbers(await mesh.read("eu-west", 13)) == [*range(5), *range(900, 908)]
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    assert checked(mesh) == 13
    assert mesh.headers(mesh.egress_folder, Kind.GAP) == []
    tally("records that a power cut took before they crossed", 5)


async def test_a_destination_put_back_to_an_older_copy_stops_the_link_and_gets_its_records_again(
    mesh: Mesh, tmp_path: Path, tally: Tally
) -> None:
    await mesh.create()
    await mesh.grant()
    await mesh.publish(numbered(0, 5))
    async with mesh.agent() as agent:
        await link(agent, "active", 5)
    await mesh.stop("eu-west")
    keep(streams_folder(mesh, "eu-west"), tmp_path / "older")
    for attempt in range(2):
        await mesh.start("eu-west")
        await mesh.publish(numbered(100 * (attempt + 1), 5))
        async with mesh.agent() as agent:
            await link(agent, "active", 10 + 5 * attempt)
        await mesh.stop("eu-west")
        put_back(tmp_path / "older", streams_folder(mesh, "eu-west"))
        await mesh.start("eu-west")
        async with mesh.agent() as agent:
            held = await link(agent, "truncated")
            assert held.reason.count("eu-west had") == 1 and "restored from an older copy" in held.reason
            assert held.cut is not None and held.cut.offset == 5
            assert await mesh.arrived() == 5
            await accept(mesh, held)
            goes_on = await link(agent, "active", 10 + 5 * attempt)
            assert "restored" not in goes_on.reason, "what was accepted is no reason of a link that goes on"
        if not attempt:
            await mesh.stop("eu-west")
    expected = [*range(5), *range(100, 105), *range(200, 205)]
    assert mesh.numbers(await mesh.read("eu-west", 15)) == expected
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    assert checked(mesh) == 5 + 5 + 10 + 10, "the logs have what was received, and what was received again"
    gaps = mesh.headers(mesh.egress_folder, Kind.GAP)
    assert [(gap.gap, gap.first_offset, gap.last_offset) for gap in gaps] == [
        (GapKind.TRUNCATION, 5, 9),
        (GapKind.TRUNCATION, 5, 14),
    ]
    tally("destinations put back to an older copy", 2)


@pytest.mark.parametrize(
    "whose", ["the agent's state", "the source's audit log", "the destination's audit log"]
)
async def test_an_audit_log_put_back_to_an_older_copy_lets_nothing_cross(
    mesh: Mesh, tmp_path: Path, whose: str, tally: Tally
) -> None:
    """And the newest copy put back lets it go on."""
    folders = {
        "the agent's state": (mesh.us.root / "bridges" / BRIDGE, "egress log"),
        "the source's audit log": (mesh.us.root / "data" / "audit", "audit log of us-east"),
        "the destination's audit log": (mesh.ingress_folder, "audit log of eu-west"),
    }
    folder, named = folders[whose]
    await mesh.create()
    await mesh.grant()
    await mesh.publish(numbered(0, 5))
    async with mesh.agent() as agent:
        await link(agent, "active", 5)
    await restart(mesh, lambda: keep(folder, tmp_path / "older"))
    await mesh.publish(numbered(100, 5))
    async with mesh.agent() as agent:
        await link(agent, "active", 10)
        for region in ("us-east", "eu-west"):
            async with mesh.operator(region) as client:
                await client.request(RotateKeys("root"))
        await cosigned(mesh, agent)

    def swap() -> None:
        keep(folder, tmp_path / "newest")
        put_back(tmp_path / "older", folder)

    await restart(mesh, swap)
    await mesh.publish(numbered(900, 5))
    async with mesh.agent() as agent:
        held = await link(agent, "denied")
        assert "rolled back" in held.reason and named in held.reason
        assert await mesh.arrived() == 10
    # A region's log goes on from the older copy, past what was cosigned of it.
    for region in ("us-east", "eu-west"):
        async with mesh.operator(region) as client:
            for _ in range(4):
                await client.request(RotateKeys("root"))
    async with mesh.agent() as agent:
        held = await link(agent, "denied")
        assert "rolled back" in held.reason and named in held.reason
        assert await mesh.arrived() == 10
    await restart(mesh, lambda: put_back(tmp_path / "newest", folder))
    async with mesh.agent() as agent:
        await link(agent, "active", 15)
    tally("audit logs put back to an older copy", 1)


async def restart(mesh: Mesh, between: Callable[[], None]) -> None:
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    between()
    for region in ("us-east", "eu-west"):
        await mesh.start(region)


async def cosigned(mesh: Mesh, agent: Agent) -> None:
    """Each region has cosigned what the other's log, and the agent's, hold now."""
    logs = {name: mesh.nodes[name].services.governance.audit_state() for name in ("us-east", "eu-west")}
    other = {"us-east": "eu-west", "eu-west": "us-east"}

    async def done() -> bool:
        found = []
        for name, (origin, size) in logs.items():
            witness = mesh.nodes[other[name]].services.governance.witnessing
            found.append((await witness.witnessed_size(origin)).size >= size)
        return all(found)

    await until(done, "cosignatures")


def source_shard(mesh: Mesh) -> ShardLog:
    hosted = mesh.nodes["us-east"].broker.streams.get(StreamName.parse(STREAM))
    assert hosted is not None
    return hosted.shard(0)


def cut_power(shard: ShardLog) -> None:
    """What was written and not synced is gone; the broker is stopped after this, and must not sync it."""
    assert shard._files is not None
    disk = shard._files.disk
    segment, synced = disk.segments[-1], disk._written.synced_to
    disk.sync = disk.sync_mark = lambda: None  # type: ignore[method-assign]
    disk.save_producers = lambda snapshot: None  # type: ignore[method-assign]
    os.truncate(segment.path, synced)


@pytest.mark.parametrize("agents_too", [pytest.param(False, marks=only_slow), True])
async def test_a_log_that_is_put_back_with_what_others_remember_of_it_lets_nothing_cross(
    mesh: Mesh, tmp_path: Path, agents_too: bool, tally: Tally
) -> None:
    """eu-west's audit log, and all that us-east's broker has beside its streams and log: the store, and what its witness cosigned. The bridge remembers it. Where what that remembers
    is put back as well, there are the receipts."""
    await mesh.create()
    await mesh.grant()
    await mesh.publish(numbered(0, 5))
    async with mesh.agent() as agent:
        await link(agent, "active", 5)
        await until(lambda: is_cosigned(mesh), "us-east cosigned eu-west's log as it is put back")
    data, older = mesh.us.root / "data", tmp_path / "older"
    others = ("streams", "audit")
    await mesh.stop("us-east")
    await mesh.stop("eu-west")
    shutil.copytree(data, older, ignore=shutil.ignore_patterns(*others))
    keep(mesh.ingress_folder, tmp_path / "log")
    kept = mesh.egress_folder.parent / "regions"
    keep(kept, tmp_path / "kept")
    await mesh.start("us-east")
    await mesh.start("eu-west")
    await mesh.publish(numbered(100, 5))
    async with mesh.agent() as agent:
        await link(agent, "active", 10)
        await until(lambda: is_cosigned(mesh), "us-east cosigned all of eu-west's log")
    await mesh.stop("us-east")
    await mesh.stop("eu-west")
    for path in data.iterdir():
        if path.name not in others:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(older, data, dirs_exist_ok=True)
    put_back(tmp_path / "log", mesh.ingress_folder)
    if agents_too:
        put_back(tmp_path / "kept", kept)
    await mesh.start("us-east")
    await mesh.start("eu-west")
    await mesh.publish(numbered(900, 5))
    async with mesh.agent() as agent:
        held = await link(agent, "denied")
        said = "eu-west gave receipts for" if agents_too else "of the audit log of eu-west"
        assert said in held.reason and "rolled back" in held.reason
        assert await mesh.arrived() == 10
    tally("logs put back with what the other region remembers of them", 1)


@pytest.mark.parametrize("grows", [pytest.param(False, marks=only_slow), True])
async def test_a_link_on_which_nothing_crossed_since_stops_with_the_others_and_the_newest_log_can_be_put_back(
    mesh: Mesh, tmp_path: Path, tally: Tally, grows: bool
) -> None:
    """`grows`: past the leaf of the newest receipt, before anybody asks for it. eu-west's audit log, what us-east remembers of it and what the bridge does are of before; by one link nothing crossed since. If that went on, us-east would cosign another history of the log,
    and refuse the newest copy of it for good."""
    idle = await two_links(mesh)
    data, kept = mesh.us.root / "data", mesh.egress_folder.parent / "regions"
    others = ("streams", "audit")

    def keep_all() -> None:
        shutil.copytree(data, tmp_path / "memory", ignore=shutil.ignore_patterns(*others))
        keep(mesh.ingress_folder, tmp_path / "log")
        keep(kept, tmp_path / "kept")

    def forget() -> None:
        keep(mesh.ingress_folder, tmp_path / "newest")
        for path in data.iterdir():
            if path.name not in others:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(tmp_path / "memory", data, dirs_exist_ok=True)
        put_back(tmp_path / "log", mesh.ingress_folder)
        put_back(tmp_path / "kept", kept)

    await restart(mesh, keep_all)
    async with mesh.agent() as agent:
        await mesh.publish(numbered(100, 5))
        await mesh.crossed(10)
        await until(lambda: is_cosigned(mesh), "us-east cosigned all of eu-west's log")
    await restart(mesh, forget)
    await mesh.publish(numbered(900, 1), idle)
    for _ in range(20 if grows else 0):
        async with mesh.operator("eu-west") as client:
            await client.request(RotateKeys("root"))
    async with mesh.agent() as agent:

        def denied() -> bool:
            return [each.state for each in agent.links()] == ["denied", "denied"]

        await until(denied, "both links stop")
        said = next(each.reason for each in agent.links() if each.stream == idle)
        assert "gave a receipt for leaf" in said and "it was rolled back" in said
        assert ("and went on from there" in said) is grows
        assert await mesh.arrived(idle) == 5
    await restart(mesh, lambda: put_back(tmp_path / "newest", mesh.ingress_folder))
    async with mesh.agent() as agent:
        await mesh.crossed(6, idle)
        await mesh.publish(numbered(200, 1))
        await mesh.crossed(11)
        await until(lambda: is_cosigned(mesh), "us-east cosigns the log as it goes on")
    tally("logs put back beside a link on which nothing crossed", 1)


async def two_links(mesh: Mesh) -> str:
    """Five records have crossed by each of two links, and every log is cosigned; the stream by which nothing is to cross from there on."""
    idle = "acme/ops/idle"
    for stream in (STREAM, idle):
        await mesh.create(stream)
    async with mesh.operator("us-east") as client:
        await client.put_rights(str(mesh.bridge_id), [f"bridge-read {each}" for each in (STREAM, idle)])
    for stream in (STREAM, idle):
        await mesh.grant(stream=stream)
        await mesh.publish(numbered(0, 5), stream)
    async with mesh.agent():
        await mesh.crossed(5)
        await mesh.crossed(5, idle)
        await until(lambda: is_cosigned(mesh), "every log is cosigned to its end")
    return idle


async def test_a_destination_that_is_put_back_with_its_log_says_so_to_who_accepts_it(
    mesh: Mesh, tmp_path: Path, tally: Tally
) -> None:
    """eu-west's audit log, and all that was remembered of it elsewhere: the receipts are left, and stop the link. Then its streams of the same instant as well: who accepts that is told that
    leaves are gone, and so is who reads the egress log later."""
    await mesh.create()
    await mesh.grant()
    await mesh.publish(numbered(0, 5))
    async with mesh.agent() as agent:
        await link(agent, "active", 5)
    data, others, kept = mesh.eu.root / "data", mesh.us.root / "data", mesh.egress_folder.parent / "regions"
    forgets = ("streams", "audit")

    def forget() -> None:
        put_back(tmp_path / "data" / "audit", data / "audit")
        shutil.rmtree(kept, ignore_errors=True)
        for path in others.iterdir():
            if path.name not in forgets:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(tmp_path / "memory", others, dirs_exist_ok=True)

    def keep_all() -> None:
        keep(data, tmp_path / "data")
        shutil.copytree(others, tmp_path / "memory", ignore=shutil.ignore_patterns(*forgets))

    await restart(mesh, keep_all)
    await mesh.publish(numbered(100, 5))
    async with mesh.agent() as agent:
        await link(agent, "active", 10)
    await restart(mesh, forget)
    async with mesh.agent() as agent:
        assert "eu-west gave receipts for" in (await link(agent, "denied")).reason
    await restart(mesh, lambda: put_back(tmp_path / "data" / "streams", data / "streams"))
    async with mesh.agent() as agent:
        held = await link(agent, "truncated")
        assert "Its audit log was rolled back with them: it has what lies below 5" in held.reason
        await accept(mesh, held)
        await link(agent, "active", 10)
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    (gap,) = mesh.headers(mesh.egress_folder, Kind.GAP)
    assert "Its audit log was rolled back with them" in gap.sentence
    assert mesh.verify_egress().ok
    # What was received before, and is in no leaf of the destination any more, stays a difference between the logs.
    egress, ingress = (
        mesh.entries(folder, kind)
        for folder, kind in ((mesh.egress_folder, Kind.INTENT), (mesh.ingress_folder, Kind.ACK))
    )
    assert sum(map(len, egress.values())) - sum(map(len, ingress.values())) == 5
    tally("destinations put back with their logs", 1)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_a_history_that_was_cut_is_refused_by_the_destination_alone(
    mesh: Mesh, engine: str, tally: Tally
) -> None:
    """An agent that does not look, or hides what it saw."""
    await mesh.stop("eu-west")
    await mesh.start("eu-west", engine=engine)
    grant = await granted(mesh)
    tried = 0
    async with rogue_agent(mesh, grant, engine=engine, epoch=7) as agent:
        await agent.open(statement=mesh.statement(epochs=(Epoch(7, 0),)))
        agent.send([Wild(b"{}")] * 10)
        await agent.receipt()
    histories = {
        "cut within the epoch": (Epoch(7, 0), Epoch(9, 5)),
        "cut, and cut again": (Epoch(7, 0), Epoch(8, 9), Epoch(9, 9)),
        "another history altogether": (Epoch(3, 0), Epoch(9, 2)),
        "a history that forgot": (Epoch(9, 10),),
    }
    for epochs in histories.values():
        async with rogue_agent(mesh, grant, engine=engine, epoch=9) as agent:
            with pytest.raises(CorruptionError) as refused:
                await agent.open(statement=mesh.statement(epochs=epochs))
            assert refused.value.code is Code.TRUNCATED
            tried += 1
    async with rogue_agent(mesh, grant, engine=engine, epoch=7) as agent:
        with pytest.raises(CorruptionError) as refused:
            await agent.open(statement=mesh.statement(epochs=(Epoch(7, 0),), log_end=9))
        assert refused.value.code is Code.TRUNCATED
        tried += 1
    async with rogue_agent(mesh, grant, engine=engine, epoch=9) as agent:
        opened = await agent.open(statement=mesh.statement(epochs=(Epoch(7, 0), Epoch(9, 10))))
        assert opened.position == 10
    tally("histories that were cut", tried)
