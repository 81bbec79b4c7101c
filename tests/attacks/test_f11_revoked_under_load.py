"""F11: an honest revocation under load must not make the evidence fail, and a breach after it must be found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from bridge_mesh import STREAM, Mesh, two_regions, until
from rogue_agent import RogueAgent, Wild, granted, rogue_agent

from audit.leaf import Header, Kind
from audit.verify import TAKEN_LATE
from felix.errors import Code, FelixError
from felix.frames import FrameType
from felix.names import StreamName
from felix.transport.port import ENGINE_NAMES
from policy.grant import StandingAction
from region.crossing.ingest import IngestStream
from region.governance.leaves import DRAIN_MS
from region.log.shard import ShardLog

Tally = Callable[[str, int], None]
RUNS = 3
ENVELOPES = 20


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


def slow(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sync of the destination's stream takes 30 ms."""
    hosted = mesh.nodes["eu-west"].broker.streams.get(StreamName.parse(STREAM))
    assert hosted is not None
    shard = hosted.shard(0)
    assert isinstance(shard, ShardLog)
    assert shard._files is not None
    disk = shard._files.disk
    sync = disk.sync

    def late() -> None:
        time.sleep(0.03)
        sync()

    monkeypatch.setattr(disk, "sync", late)


def stop_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers let everything in from now on, and date it with the moment at which they did."""
    monkeypatch.setattr(IngestStream, "rights_changed", lambda self: None)
    monkeypatch.setattr(IngestStream, "_check_grant", lambda self: self._service.broker.clock_ms())


async def flood(rogue: RogueAgent) -> FelixError | None:
    """Envelopes one behind the other until one is refused; never more on the way than is allowed."""
    sent = 0
    at = rogue.position
    try:
        while True:
            while sent < ENVELOPES:
                at = rogue.send([Wild(b'{"flight":1}')], base=at)
                sent += 1
            await rogue.receipt()
            sent -= 1
    except FelixError as error:
        return error


def order(mesh: Mesh, grant: str) -> tuple[list[Header], list[Header], Header]:
    """ACKs before the REVOKE leaf, ACKs behind it, and the leaf."""
    headers = [h for h in mesh.headers(mesh.ingress_folder, Kind.ACK, Kind.REVOKE) if h.grant_id == grant]
    at = next(index for index, header in enumerate(headers) if header.kind is Kind.REVOKE)
    return headers[:at], headers[at + 1 :], headers[at]


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_what_is_on_its_way_ends_before_the_leaf_of_the_revocation(
    mesh: Mesh, engine: str, monkeypatch: pytest.MonkeyPatch, tally: Tally, attack_scale: int
) -> None:
    await mesh.stop("eu-west")
    await mesh.start("eu-west", engine=engine)
    grants: list[str] = []
    for run in range(RUNS * attack_scale):
        grant = await granted(mesh, purpose=f"run {run}")
        grants.append(grant[0])
        async with rogue_agent(mesh, grant, engine=engine) as rogue:
            await rogue.open()
            if not run:
                slow(mesh, monkeypatch)
            flooding = asyncio.ensure_future(flood(rogue))
            wanted = rogue._read + 3
            await until(lambda r=rogue, w=wanted, f=flooding: r._read >= w or f.done(), "receipts")
            await mesh.stand("eu-west", grant[0], StandingAction.REVOKE)
            error = await flooding
            assert error is not None and error.code is Code.GRANT_REVOKED
            assert rogue.peer.of(FrameType.RECEIPT, rogue.stream)
    await mesh.stop("eu-west")
    drained = 0
    for name in grants:
        before, behind, revoke = order(mesh, name)
        assert not behind
        assert revoke.drain_until_ms == revoke.time_ms + DRAIN_MS
        drained += len(before)
    report = mesh.verify_ingress()
    assert report.ok, report.findings
    tally("revocations under load", len(grants))
    tally("ranges that ended before them", drained)


async def test_a_destination_that_goes_on_behind_its_revocation_is_found(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its brokers stop asking for the grant: what they take is behind the leaf, and the log shows it."""
    grant = await granted(mesh)
    async with rogue_agent(mesh, grant) as rogue:
        await rogue.open()
        await rogue.cross([Wild(b'{"flight":1}')])
        stop_asking(monkeypatch)
        await mesh.stand("eu-west", grant[0], StandingAction.REVOKE)
        await rogue.cross([Wild(b'{"flight":2}')])
    await mesh.stop("eu-west")
    _, behind, _ = order(mesh, grant[0])
    assert len(behind) == 1
    report = mesh.verify_ingress()
    assert not report.ok
    assert any("revoked before" in finding.sentence for finding in report.findings)


async def test_a_destination_that_puts_its_revocation_off_and_dates_it_rightly_is_told(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes records for as long as it likes, and writes the leaf then: they were taken after the drain's end. It may date the leaf as it
    likes, and a clock that was set back looks the same: so it is told, and no finding."""
    grant = await granted(mesh)
    governance = mesh.nodes["eu-west"].services.governance
    broker = mesh.nodes["eu-west"].broker
    clock, ahead = broker.clock_ms, 0
    async with rogue_agent(mesh, grant) as rogue:
        await rogue.open()
        await rogue.cross([Wild(b'{"flight":1}')])
        stop_asking(monkeypatch)
        held = asyncio.Event()

        async def waiting(*_: object) -> None:
            await held.wait()

        governance._judgement.leaves._drain = waiting  # type: ignore[assignment]
        revoking = asyncio.ensure_future(mesh.stand("eu-west", grant[0], StandingAction.REVOKE))
        await until(lambda: governance._judgement.leaves._writing, "the revocation")
        await asyncio.sleep(0)
        ahead = DRAIN_MS + 1_000
        monkeypatch.setattr(broker, "clock_ms", lambda: clock() + ahead)
        await rogue.cross([Wild(b'{"flight":2}')])
        held.set()
        await revoking
    await mesh.stop("eu-west")
    report = mesh.verify_ingress()
    assert report.ok and [notice.name for notice in report.notices] == [TAKEN_LATE]
