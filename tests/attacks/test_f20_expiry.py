"""F20, expiry: no leaf of a crossing carries a time outside its grant's window, whatever the agent or the broker waited for before it.

Tried as found: the grant expires, is revoked or paused while the agent waits for a data key that it asked for in time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from bridge_mesh import Mesh, flight, two_regions, until
from runtimes import with_wall

from audit.leaf import Kind
from bridge.link import LinkPhase
from bridge.link_session import LinkSession
from bridge.link_worker import LinkWorker
from bridge.plan import Verdict
from keys.envelope import DataKey
from region.crossing.ingest import IngestStream

Tally = Callable[[str, int], None]


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def test_a_grant_that_expires_while_a_key_is_waited_for_lets_nothing_cross(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    await mesh.create()
    await mesh.grant()
    await mesh.publish([flight(number) for number in range(20)])
    took, waits = LinkSession._take_data_key, 0

    async def slow(self: LinkSession, key_id: bytes) -> DataKey:
        nonlocal waits
        key = await took(self, key_id)
        export, clock = self._link.row.export, self._context.runtime.clock.now_ms
        assert export is not None and clock() < export.terms.expires
        ends = export.terms.expires
        self._context.runtime = with_wall(lambda: max(clock(), ends))
        waits += 1
        return key

    monkeypatch.setattr(LinkSession, "_take_data_key", slow)
    async with mesh.agent() as agent:
        links = agent._links
        await until(
            lambda: waits and all(worker.phase is LinkPhase.STOPPED for worker in links.workers),
            "the link's end",
        )
        assert await mesh.arrived() == 0
    assert not mesh.headers(mesh.egress_folder, Kind.INTENT)
    assert mesh.verify_egress(cosignatures_min=0).ok
    tally("grants that expired during a wait", waits)


async def test_what_a_destination_takes_in_time_has_that_time(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """The broker's thread is taken away between the question and the leaf, and the grant ends there."""
    await mesh.create()
    body, export, accepted = mesh.sign_grant()
    for region in ("us-east", "eu-west"):
        await mesh.agree(region, body, export, accepted)
    await mesh.publish([flight(number) for number in range(5)])
    broker, check_budget = mesh.nodes["eu-west"].broker, IngestStream._check_budget
    clock, ends, asked = broker.clock_ms, body.terms.expires, 0

    def taken_away(self: IngestStream, size: int) -> None:
        nonlocal asked
        check_budget(self, size)
        asked += 1
        monkeypatch.setattr(broker, "clock_ms", lambda: max(clock(), ends))

    monkeypatch.setattr(IngestStream, "_check_budget", taken_away)
    async with mesh.agent():
        await until(lambda: mesh.headers(mesh.ingress_folder, Kind.ACK), "the leaf of what arrived")
    acks = mesh.headers(mesh.ingress_folder, Kind.ACK)
    assert asked == 1 and acks and all(ack.time_ms < ends for ack in acks)
    tally("grants that expired between question and leaf", asked)


async def test_a_plan_that_ends_the_link_while_a_key_is_waited_for_lets_nothing_cross(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    await mesh.create()
    await mesh.grant()
    await mesh.publish([flight(number) for number in range(20)])
    took, waits = LinkSession._take_data_key, 0

    async def slow(self: LinkSession, key_id: bytes) -> DataKey:
        nonlocal waits
        key = await took(self, key_id)
        if not waits:
            assert isinstance(self._link, LinkWorker)
            self._link.take_plan(self._link.row._replace(verdict=Verdict.PAUSE, reason="paused meanwhile"))
            assert not mesh.headers(mesh.egress_folder, Kind.INTENT)
        waits += 1
        return key

    monkeypatch.setattr(LinkSession, "_take_data_key", slow)
    cross = LinkSession._cross
    announced_before: list[int] = []

    async def counting(self: LinkSession, *more: object) -> bool:
        before = self._memory.stats.envelopes
        went = await cross(self, *more)  # type: ignore[arg-type]
        if waits == 1 and not announced_before:
            announced_before.append(self._memory.stats.envelopes - before)
        return went

    monkeypatch.setattr(LinkSession, "_cross", counting)
    async with mesh.agent():
        # The next plan says that the link runs; the first batch crosses then, and not before.
        await mesh.crossed(20)
    assert announced_before == [0]
    assert mesh.numbers(await mesh.read("eu-west", 20)) == list(range(20))
    tally("plans that changed during a wait", 1)
