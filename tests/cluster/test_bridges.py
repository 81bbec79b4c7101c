"""A bridge between two regions of several brokers each: what leads the streams is another broker than the one with the audit log."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from bridge_mesh import BRIDGE, STREAM, flight, until
from cluster.clustered_mesh import two_clusters
from slow_runs import only_slow

from audit.leaf import GapKind, Kind
from audit.verify import verify_log
from bridge.config import DestinationConfig
from felix.runtime.real import now_ms
from policy.grant import StandingAction
from region.bootstrap import issue_identity
from region.config import load_config
from region.replication.links import PeerLinks

pytestmark = pytest.mark.etcd

RECORDS = 300


async def test_what_is_led_by_brokers_without_the_audit_log_crosses_and_reconciles(tmp_path: Path) -> None:
    async with two_clusters(tmp_path) as mesh:
        for cluster in mesh.clusters.values():
            await cluster.drain("b1")
        # Operators, and the agent at home, know no other broker; the audit log is on the one that they do not know.
        mesh.through = {"us-east": "b2", "eu-west": "b2"}
        await mesh.create()
        assert mesh.leader("us-east") == "b2"
        await mesh.publish([flight(number) for number in range(RECORDS)])
        await mesh.grant()
        async with mesh.agent():
            await mesh.crossed(RECORDS)
            assert mesh.leader("eu-west") == "b2"
            async with mesh.operator("us-east") as client:

                async def reported() -> bool:
                    links = await client.list_links()
                    return [(link.state, link.position, link.crossed) for link in links] == [
                        ("active", RECORDS, RECORDS)
                    ]

                await until(reported, "the agent's report")
                state = await client.describe()
                assert state.bridges == ["us-to-eu"], "whichever broker is asked"
            assert sorted(mesh.numbers(await mesh.read("eu-west", RECORDS))) == list(range(RECORDS))
            await until(lambda: mesh.headers(mesh.ingress_folder, Kind.ACK), "a checkpoint")
    assert mesh.reconcile() == RECORDS
    assert mesh.verify_egress().ok and mesh.verify_ingress().ok


@only_slow
async def test_the_lag_under_a_pattern_is_what_the_broker_says_that_leads_the_stream(tmp_path: Path) -> None:
    async with two_clusters(tmp_path) as mesh:
        await mesh.clusters["us-east"].drain("b1")
        await mesh.create()
        await mesh.publish([flight(number) for number in range(RECORDS)])
        await mesh.grant(stream="acme/ops/*", destination_stream="acme/ops/*", wildcard=True)
        assert mesh.leader("us-east") != "b1"
        async with mesh.agent() as agent:
            await mesh.crossed(RECORDS)
            await until(
                lambda: [(link.high_watermark, link.lag_records) for link in agent.links()] == [(RECORDS, 0)],
                "how far the stream goes",
            )


async def test_behind_a_revocation_stands_nothing_of_before_whoever_leads(tmp_path: Path) -> None:
    async with two_clusters(tmp_path) as mesh:
        for cluster in mesh.clusters.values():
            await cluster.drain("b1")
        await mesh.create()
        grant = await mesh.grant()
        is_over = asyncio.Event()

        async def publish() -> None:
            number = 0
            while not is_over.is_set():
                await mesh.publish([flight(number + at) for at in range(50)], batch=10)
                number += 50

        async with mesh.agent() as agent:
            publishing = asyncio.ensure_future(publish())
            try:
                await mesh.crossed(RECORDS)
                await mesh.stand("eu-west", grant, StandingAction.REVOKE)
                await until(lambda: [link.state for link in agent.links()] == ["stopped"], "the link's end")
            finally:
                is_over.set()
                await publishing
        arrived = await mesh.arrived()
        await until(lambda: mesh.headers(mesh.ingress_folder, Kind.REVOKE), "a checkpoint")
    headers = mesh.headers(mesh.ingress_folder, Kind.ACK, Kind.REVOKE)
    kinds = [header.kind for header in headers]
    assert kinds.count(Kind.REVOKE) == 1 and kinds[-1] is Kind.REVOKE
    assert sum(header.records for header in headers if header.kind is Kind.ACK) == arrived >= RECORDS
    assert mesh.verify_egress().ok and mesh.verify_ingress().ok


@only_slow
async def test_nothing_arrives_at_a_leader_whose_clock_is_far_ahead_of_the_logs_until_it_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_clusters(tmp_path) as mesh:
        for cluster in mesh.clusters.values():
            await cluster.drain("b1")
        await mesh.create()
        await mesh.publish([flight(number) for number in range(RECORDS)])
        await mesh.grant()
        with monkeypatch.context() as patch:
            patch.setattr(
                PeerLinks, "ahead_of", lambda self, peer: 30_000 if self.me.region == "eu-west" else 0
            )
            async with mesh.agent() as agent:
                await until(
                    lambda: any("30.0 s ahead of that of broker b1" in link.reason for link in agent.links()),
                    "the clock that is wrong",
                )
                assert [link.position for link in agent.links()] == [-1], "none was known"
                patch.undo()
                await mesh.crossed(RECORDS)
    assert mesh.verify_egress().ok and mesh.verify_ingress().ok


async def test_an_address_that_the_agent_was_not_given_is_not_called(tmp_path: Path) -> None:
    async with two_clusters(tmp_path) as mesh:
        await mesh.clusters["eu-west"].drain("b1")
        await mesh.create()
        await mesh.grant()
        first = mesh.addresses("eu-west")[:1]
        destination = DestinationConfig(region="eu-west", addresses=first)
        async with mesh.agent(destinations=(destination,)) as agent:

            def told() -> bool:
                return any("none of the addresses given for it" in link.reason for link in agent.links())

            await until(told, "the address that is missing")
            assert [link.state for link in agent.links()] == ["waiting"]


@pytest.mark.parametrize("copies", [pytest.param(1, marks=only_slow), 2])
async def test_a_link_that_has_read_all_goes_on_at_the_next_leader_of_its_source(
    tmp_path: Path, copies: int
) -> None:
    """The leader is drained: it lives on, and the link's session with it."""
    async with two_clusters(tmp_path, 1, source=3) as mesh:
        await mesh.create(replicas=copies)
        await mesh.publish([flight(number) for number in range(50)])
        await mesh.grant()
        async with mesh.agent():
            await mesh.crossed(50)
            leader = mesh.leader("us-east")
            await mesh.clusters["us-east"].drain(leader)
            await until(lambda: mesh.leader("us-east") not in ("", leader), "another leader")
            await mesh.publish([flight(number) for number in range(50, 100)])
            await mesh.crossed(100)
            assert mesh.numbers(await mesh.read("eu-west", 100)) == list(range(100))


async def test_a_link_that_has_nothing_to_send_leaves_nothing_at_a_leader_of_before_of_its_destination(
    tmp_path: Path,
) -> None:
    async with two_clusters(tmp_path, 3, source=1) as mesh:
        await mesh.create()
        async with mesh.operator("eu-west") as client:
            await client.create_stream(STREAM, replicas=2)
        await mesh.publish([flight(number) for number in range(50)])
        await mesh.grant()
        async with mesh.agent():
            await mesh.crossed(50)
            leader, cluster = mesh.leader("eu-west"), mesh.clusters["eu-west"]
            windows = cluster.nodes[leader].broker.budgets.ingest
            assert windows.used_bytes
            await cluster.drain(leader)
            await until(lambda: not windows.used_bytes, "the window of before")
            await mesh.publish([flight(number) for number in range(50, 100)])
            await mesh.crossed(100)
            assert mesh.leader("eu-west") != leader
            assert mesh.numbers(await mesh.read("eu-west", 100)) == list(range(100))
    assert mesh.verify_egress().ok and mesh.verify_ingress().ok


async def test_two_bridges_take_turns_and_stand_by_at_whichever_broker_leads(tmp_path: Path) -> None:
    """The leader asks the broker with the audit log which bridge brought what; a new leader knows of no session of before."""
    other = "us-to-eu-2"
    async with two_clusters(tmp_path, 4, source=1) as mesh:
        issue_identity(mesh.us, load_config(mesh.us.config), "bridge", other, now_ms())
        await mesh.create()
        async with mesh.operator("eu-west") as client:
            await client.create_stream(STREAM, replicas=2)
        async with mesh.operator("us-east") as client:
            await client.put_rights(f"spiffe://us-east.acme/bridge/{other}", [f"bridge-read {STREAM}"])
        for name in (BRIDGE, other):
            await mesh.grant(bridge=f"spiffe://us-east.acme/bridge/{name}")
        first = mesh.leader("eu-west")
        if first == "b1":
            # Which began the audit log.
            await mesh.clusters["eu-west"].drain(first)
            await until(lambda: mesh.leader("eu-west") not in ("", first), "another leader")
        for turn in range(3):
            await mesh.publish([flight(turn)])
            async with mesh.agent(name=(BRIDGE, other)[turn % 2]):
                await mesh.crossed(turn + 1)
        leader = mesh.leader("eu-west")
        assert leader not in ("", "b1")
        async with mesh.agent() as one, mesh.agent(name=other) as two:

            def standing() -> bool:
                return any("stands by" in each.reason for agent in (one, two) for each in agent.links())

            await until(standing, "that one stands by")
            await mesh.clusters["eu-west"].drain(leader)
            await until(lambda: mesh.leader("eu-west") not in ("", leader), "another leader")
            await mesh.publish([flight(3)])
            await mesh.crossed(4)
            await until(standing, "that one stands by there")
        assert mesh.numbers(await mesh.read("eu-west", 4)) == list(range(4))
        assert await mesh.arrived() == 4
    egress = mesh.us.root / "bridges" / other / "egress"
    for folder in (mesh.egress_folder, egress, mesh.ingress_folder):
        report = verify_log(mesh.log_files(folder), mesh.trust, cosignatures_min=0)
        assert report.ok, report.findings
    gaps = {
        header.gap for folder in (mesh.egress_folder, egress) for header in mesh.headers(folder, Kind.GAP)
    }
    assert gaps == {GapKind.ELSEWHERE}
