"""The agent between two real brokers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import msgspec
import pytest
from bridge_mesh import STREAM, WAIT_S, Mesh, flight, two_regions, until
from ports import claim_port
from runtimes import with_wall

from audit.leaf import GapKind, Kind
from bridge import egress_log
from bridge.agent import Agent
from bridge.crossing import PATH_UNKNOWN
from bridge.sample import sample_as_bridge, sample_as_reader
from felix import publisher_core
from felix.address import Address
from felix.errors import Code
from felix.messages import LinkState
from felix.names import StreamName
from felix.provenance import PATH_HEADER
from felix.runtime.real import now_ms
from felix.settings import Compaction, Retention, Views
from policy.grant import StandingAction
from policy.transform import build_spec
from region.crossing import ingest
from region.log.point import LogPoint


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


def link(agent: Agent) -> LinkState | None:
    links = agent.links()
    return links[0] if links else None


async def state(agent: Agent, name: str) -> LinkState:
    def found() -> LinkState | None:
        held = link(agent)
        return held if held is not None and held.state == name else None

    return await until(found, f"a link that is {name}; now {link(agent)}")


async def position(agent: Agent, offset: int) -> None:
    await until(lambda: (held := link(agent)) is not None and held.position == offset, f"position {offset}")


async def settle(mesh: Mesh) -> None:
    """Both brokers down, so that their logs' last checkpoints are on the disk."""
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)


def check_logs(mesh: Mesh, records: int) -> None:
    """Both logs verify, every crossed record has one INTENT and one ingress ACK, entry by entry, and none is open."""
    assert mesh.reconcile() == records
    egress, ingress = mesh.verify_egress(), mesh.verify_ingress()
    assert egress.ok, egress.findings
    assert ingress.ok, ingress.findings
    assert egress.unanswered == 0


async def test_granted_records_cross_transformed_and_both_logs_agree(mesh: Mesh) -> None:
    await mesh.create()
    payloads = [flight(number) for number in range(300)]
    await mesh.publish(payloads)
    grant = await mesh.grant()
    async with mesh.agent() as agent:
        await mesh.crossed(300)
        records = await mesh.read("eu-west", 300)
        await position(agent, 300)
        found = agent.links()[0]
        assert (found.grant, found.state, found.crossed, found.lag_records) == (grant, "active", 300, 0)
        async with mesh.operator("us-east") as client:
            reported = await until(client.list_links, "a report")
        assert reported[0].grant == grant
    for before, record in zip(payloads, records, strict=True):
        source, arrived = json.loads(before), json.loads(bytes(record.payload))
        assert arrived["flight"] == source["flight"]
        assert arrived["tailnum"] != source["tailnum"]
        assert "hour" not in arrived
        assert record.headers[PATH_HEADER] == b"us-east"
    await settle(mesh)
    check_logs(mesh, 300)
    assert mesh.verify_egress(cosignatures_min=1).ok
    assert mesh.verify_ingress().cosigned_size > 0


@pytest.mark.parametrize("path", [b"cn-north,ap-south", b"eu-west", b"never-was"])
async def test_regions_that_a_client_of_the_source_names_stand_in_neither_log(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    monkeypatch.setattr(publisher_core, "check_own", lambda headers: None)
    await mesh.create()
    await mesh.grant(onward=True)
    async with mesh.operator("us-east") as client:
        await client.stream(STREAM).publish(flight(0))
        await client.stream(STREAM).publish(flight(1), headers={PATH_HEADER: path})
    async with mesh.agent() as agent:
        await mesh.crossed(1)
        await position(agent, 2)
    await settle(mesh)
    check_logs(mesh, 1)
    (held,) = mesh.headers(mesh.egress_folder, Kind.WITHHELD)
    assert (held.first_offset, held.records, held.reason) == (1, 1, PATH_UNKNOWN)
    for folder in (mesh.egress_folder, mesh.ingress_folder):
        named = {leaf.path for leaf in mesh.headers(folder, Kind.INTENT, Kind.ACK) if leaf.records}
        assert named == {("us-east",)}


@pytest.mark.parametrize("entries_sha256", [b"", b"o" * 32], ids=["of-before", "other-records"])
async def test_a_receipt_that_is_not_for_the_records_sent_is_not_taken(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, entries_sha256: bytes
) -> None:
    sign = ingest.sign_receipt
    await mesh.create()
    await mesh.publish([flight(1)])
    await mesh.grant()
    with monkeypatch.context() as patch:
        patch.setattr(
            ingest,
            "sign_receipt",
            lambda receipt, key: sign(msgspec.structs.replace(receipt, entries_sha256=entries_sha256), key),
        )
        async with mesh.agent() as agent:
            await until(
                lambda: (held := link(agent)) is not None and "entries_sha256 differ" in held.reason,
                "the refusal",
            )
    async with mesh.agent() as agent:
        # The range is answered again, with what it should have been answered.
        await until(lambda: (held := link(agent)) is not None and held.crossed == 1, "the receipt")
    await settle(mesh)
    check_logs(mesh, 1)
    assert len(mesh.headers(mesh.egress_folder, Kind.ACK)) == 1


async def test_filtered_and_unreadable_records_stay_and_their_leaves_say_so(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.grant(transform=build_spec(pseudonymize=["tailnum"], filter_="flight < 100"))
    payloads = [flight(number) for number in range(50)] + [b"not json"] * 10
    payloads += [flight(number) for number in range(500, 550)]
    await mesh.publish(payloads)
    async with mesh.agent() as agent:
        await position(agent, 110)
        figures = agent.links()[0]
        assert (figures.crossed, figures.withheld, figures.filtered) == (50, 10, 50)
    assert mesh.numbers(await mesh.read("eu-west", 50)) == list(range(50))
    await settle(mesh)
    check_logs(mesh, 50)
    reasons: dict[str, int] = {}
    for header in mesh.headers(mesh.egress_folder, Kind.WITHHELD):
        reasons[header.reason] = reasons.get(header.reason, 0) + header.records
    assert reasons == {"transform-failed": 10, "filtered": 50}


async def test_a_revoked_grant_stops_mid_stream_and_the_log_says_so(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.publish([flight(number) for number in range(100)])
    grant = await mesh.grant()
    async with mesh.agent() as agent:
        await mesh.crossed(100)
        await mesh.stand("eu-west", grant, StandingAction.REVOKE)
        stopped = await state(agent, "stopped")
        assert "revoked" in stopped.reason
        await mesh.publish([flight(number) for number in range(100, 200)])
        await until(lambda: agent.context.ledger.grant(grant).revoked, "a REVOKE leaf")
        assert await mesh.arrived() == 100
        ended = await state(agent, "stopped")
        assert (ended.lag_records, ended.lag_bytes, ended.lag_ms) == (-1, -1, -1), "nothing is still to cross"
    await settle(mesh)
    assert mesh.verify_egress().ok
    revoked = mesh.headers(mesh.egress_folder, Kind.REVOKE)
    assert [(header.grant_id, header.actor) for header in revoked] == [(grant, str(mesh.bridge_id))]


async def test_what_crossed_before_a_revocation_goes_on_under_a_new_grant(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.publish([flight(number) for number in range(100)])
    grant = await mesh.grant()
    async with mesh.agent() as agent:
        await position_of(agent, grant, 100)
        await mesh.stand("us-east", grant, StandingAction.REVOKE)
        await until(lambda: agent.context.ledger.grant(grant).revoked, "a REVOKE leaf")
        await mesh.publish([flight(number) for number in range(100, 160)])
        again = await mesh.grant(purpose="planning")
        await position_of(agent, again, 160)
    assert mesh.numbers(await mesh.read("eu-west", 160)) == list(range(160))
    await settle(mesh)
    check_logs(mesh, 160)


async def position_of(agent: Agent, grant: str, offset: int) -> None:
    def found() -> bool:
        return any(held.grant == grant and held.position == offset for held in agent.links())

    await until(found, f"position {offset} under {grant}; {agent.links()}")


async def test_a_paused_grant_pauses_and_goes_on(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.publish([flight(number) for number in range(50)])
    grant = await mesh.grant()
    async with mesh.agent() as agent:
        await position(agent, 50)
        await mesh.stand("us-east", grant, StandingAction.PAUSE)
        await state(agent, "paused")
        await mesh.publish([flight(number) for number in range(50, 100)])
        assert await mesh.arrived() == 50
        await mesh.stand("us-east", grant, StandingAction.RESUME, sequence=2)
        await position(agent, 100)
    await settle(mesh)
    check_logs(mesh, 100)


async def test_nothing_crosses_under_half_a_grant(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.publish([flight(number) for number in range(50)])
    body, export, accepted = mesh.sign_grant()
    await mesh.put("us-east", "export", export)
    async with mesh.agent() as agent:
        await state(agent, "waiting")
        await until(
            lambda: (h := link(agent)) and "has not accepted" in h.reason,
            "a link that says what it waits for",
        )
        assert await mesh.arrived() == 0
        await mesh.put("eu-west", "import", accepted)
        await until(lambda: mesh.documents("eu-west", "export"), "the terms that its approver is asked about")
        for done, region in enumerate(("us-east", "eu-west")):
            lacking = f"{region}: 0 of 1"
            await until(lambda: lacking in link(agent).reason, f"a link that names {lacking}")  # noqa: B023
            assert await mesh.arrived() == 0, done
            await mesh.put(region, "approval", mesh.sign_approval(region, body.terms_hash))
        await position(agent, 50)


async def test_an_expired_grant_stops_mid_stream(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.publish([flight(number) for number in range(50)])
    life_ms, passed_ms = 3_600_000, 0
    await mesh.grant(expires=now_ms() + life_ms)
    async with mesh.agent(with_wall(lambda: now_ms() + passed_ms)) as agent:
        await mesh.crossed(50)
        passed_ms = life_ms
        stopped = await state(agent, "stopped")
        assert "expired" in stopped.reason
        await mesh.publish([flight(number) for number in range(50, 100)])
    await settle(mesh)
    check_logs(mesh, 50)


async def test_a_denied_stream_stops_until_the_denial_is_lifted(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.publish([flight(number) for number in range(50)])
    await mesh.grant()
    async with mesh.agent() as agent:
        await position(agent, 50)
        await mesh.deny("eu-west", "acme/ops/*")
        await mesh.publish([flight(number) for number in range(50, 100)])
        await until(lambda: "denies" in (link(agent) or agent.links()[0]).reason, "the denial as the reason")
        assert await mesh.arrived() == 50
        await mesh.deny("eu-west", "acme/ops/*", sequence=2, lifted=True)
        await position(agent, 100)
    await settle(mesh)
    check_logs(mesh, 100)


async def test_an_agent_that_starts_while_a_stream_is_denied_is_not_ready_until_the_denial_is_lifted(
    mesh: Mesh,
) -> None:
    """As one that ran before: whoever starts it again is to see that nothing crosses."""
    await mesh.create()
    await mesh.grant()
    await mesh.deny("us-east", "acme/ops/*")
    async with mesh.agent() as agent:
        reason = await until(agent.not_ready, "why it is not ready")
        await until(lambda: "denies" in agent.not_ready(), f"the denial as the reason, and not {reason}")
        await mesh.deny("us-east", "acme/ops/*", sequence=2, lifted=True)
        await until(lambda: not agent.not_ready(), "an agent that is ready")


async def test_a_used_up_budget_stops_the_link_before_it_is_exceeded(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.publish([flight(number) for number in range(200)], batch=10)
    grant = await mesh.grant(budget_bytes=20_000)
    async with mesh.agent() as agent:
        stopped = await state(agent, "stopped")
        assert "budget" in stopped.reason
        assert 0 < agent.context.ledger.grant(grant).charged_bytes <= 20_000
    await settle(mesh)
    assert mesh.verify_egress().ok
    denied = mesh.headers(mesh.egress_folder, Kind.DENY)
    assert [header.code for header in denied] == [Code.BUDGET_EXHAUSTED]


async def test_several_shards_and_keys_keep_their_order(mesh: Mesh) -> None:
    await mesh.create(shards=3)
    await mesh.grant()
    async with mesh.operator("us-east") as client:
        for number in range(120):
            await client.stream(STREAM).publish(flight(number), key=b"%d" % (number % 7))
    async with mesh.agent():
        await mesh.crossed(120)
    records = await mesh.read("eu-west", 120)
    by_key: dict[bytes, list[int]] = {}
    for record in records:
        assert record.key is not None
        by_key.setdefault(bytes(record.key), []).append(json.loads(bytes(record.payload))["flight"])
    assert len(by_key) == 7
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    await settle(mesh)
    check_logs(mesh, 120)


async def test_brokers_may_restart_while_records_cross(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.grant()
    async with mesh.agent() as agent:
        sent = 0
        for region in ("eu-west", "us-east", "eu-west"):
            await mesh.publish([flight(number) for number in range(sent, sent + 100)], batch=10)
            sent += 100
            await mesh.stop(region)
            await mesh.start(region)
        await position(agent, sent)
        assert mesh.numbers(await mesh.read("eu-west", sent)) == list(range(sent))
        assert await mesh.arrived() == sent
    await settle(mesh)
    check_logs(mesh, sent)


async def test_a_second_agent_waits_for_the_egress_log_and_takes_over(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.grant()
    await mesh.publish([flight(number) for number in range(50)])
    async with mesh.agent() as first:
        await position(first, 50)
        async with mesh.agent() as second:
            await until(lambda: "another process" in second.not_ready(), "the second agent waits")
            await mesh.publish([flight(number) for number in range(50, 100)])
            await position(first, 100)
            await first.stop()
            await mesh.publish([flight(number) for number in range(100, 150)])
            await position(second, 150)
    assert mesh.numbers(await mesh.read("eu-west", 150)) == list(range(150))
    await settle(mesh)
    check_logs(mesh, 150)


async def test_an_agent_that_stops_while_it_opens_its_log_leaves_that_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = unreachable(tmp_path)
    is_open, may_go_on, opened = threading.Event(), threading.Event(), egress_log.open_egress

    def open_slowly(*words: Any, **more: Any) -> Any:
        found = opened(*words, **more)
        is_open.set()
        may_go_on.wait(WAIT_S)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(egress_log, "open_egress", open_slowly)
        agent = await Agent.start(mesh.bridge_config(), mesh.us.root)
        assert await asyncio.to_thread(is_open.wait, WAIT_S)
        stopping = asyncio.ensure_future(agent.stop())
        await asyncio.wait(agent._tasks)
        may_go_on.set()
        await stopping
    async with mesh.agent() as later:
        await until(lambda: later.context.trail, "its log")


async def test_a_log_that_cannot_be_read_once_it_is_open_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = unreachable(tmp_path)
    read, failures = egress_log.read_words, [OSError("no such device")]

    def fail_once(*words: Any) -> Any:
        if failures:
            raise failures.pop()
        return read(*words)

    monkeypatch.setattr(egress_log, "read_words", fail_once)
    monkeypatch.setattr(egress_log, "TRAIL_AGAIN_S", 0.01)
    async with mesh.agent() as agent:
        await until(lambda: agent.context.trail, "its log")


async def test_an_agent_whose_log_fails_to_open_by_a_mistake_of_ours_says_so_and_ends_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = unreachable(tmp_path)

    def mistaken(*words: Any, **more: Any) -> Any:
        raise ValueError("a mistake")

    monkeypatch.setattr(egress_log, "open_egress", mistaken)
    agent = await Agent.start(mesh.bridge_config(), mesh.us.root)
    await until(lambda: "cannot be opened: a mistake" in agent.not_ready(), "what is wrong")
    assert agent._egress.is_failed()
    await agent.stop()


def unreachable(home: Path) -> Mesh:
    """Of which no broker runs."""
    mesh = Mesh.make(home)
    mesh.ports.update({region: claim_port() for region in ("us-east", "eu-west")})
    return mesh


async def test_a_gap_at_the_source_is_logged_alarmed_and_passed(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.grant()
    await mesh.publish([flight(number) for number in range(10)])
    async with mesh.agent() as agent:
        await position(agent, 10)
    await mesh.publish([flight(number) for number in range(10, 60)])
    async with mesh.operator("us-east") as operator:
        await operator.alter_stream(STREAM, retention=Retention(age_ms=1_000))
    # Only segments that are not written to any more are deleted; the next one is begun here, not in an hour.
    shard = mesh.nodes["us-east"].broker.stream(StreamName.parse(STREAM)).shard(0)
    assert shard._files is not None
    await shard._files.writer.change(shard._files.disk.roll, now_ms())

    async def expired() -> bool:
        return (await mesh.describe("us-east")).state[0].log_start == 60

    await until(expired, "retention")
    async with mesh.agent() as agent:
        await position(agent, 60)
        assert "10 to 59 are gone" in agent.links()[0].reason
        await mesh.publish([flight(number) for number in range(60, 100)], batch=40)
        await position(agent, 100)
        arrived = await mesh.arrived()
    await settle(mesh)
    gaps = mesh.headers(mesh.egress_folder, Kind.GAP)
    assert (gaps[0].first_offset, gaps[0].last_offset, gaps[0].gap) == (10, 59, GapKind.RETENTION)
    check_logs(mesh, arrived)


async def test_a_stream_that_is_made_anew_crosses_from_its_beginning(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.grant()
    await mesh.publish([flight(number) for number in range(20)])
    async with mesh.agent() as agent:
        await position(agent, 20)
        async with mesh.operator("us-east") as client:
            await client.delete_stream(STREAM)
        await mesh.create()
        await mesh.publish([flight(number) for number in range(100, 130)])
        await mesh.crossed(50)
        await position(agent, 30)
    assert mesh.numbers(await mesh.read("eu-west", 50)) == [*range(20), *range(100, 130)]
    await settle(mesh)
    check_logs(mesh, 50)


async def test_a_source_that_has_less_than_what_crossed_stops_the_link_with_an_alarm(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.grant()
    await mesh.publish([flight(number) for number in range(50)], batch=10)
    async with mesh.agent() as agent:
        await position(agent, 50)
    hosted = mesh.nodes["us-east"].broker.streams.get(StreamName.parse(STREAM))
    assert hosted is not None
    await hosted.shard(0).truncate(LogPoint(20))
    async with mesh.agent() as agent:
        stopped = await state(agent, "truncated")
        assert "cut back to offset 20" in stopped.reason
        assert agent.not_ready()
        assert await mesh.arrived() == 50
    await settle(mesh)
    assert mesh.verify_egress().ok
    (gap,) = mesh.headers(mesh.egress_folder, Kind.GAP)
    assert (gap.gap, gap.first_offset, gap.last_offset) == (GapKind.TRUNCATION, 20, 49)
    assert mesh.headers(mesh.egress_folder, Kind.DENY) == []


async def test_what_was_announced_under_a_revoked_grant_crosses_under_the_next(mesh: Mesh) -> None:
    await mesh.create()
    grant = await mesh.grant()
    await mesh.publish([flight(number) for number in range(60)], batch=20)
    child = await mesh.child("intent-durable:1")
    async with asyncio.timeout(WAIT_S):
        assert await child.wait() == -9
    await mesh.stand("us-east", grant, StandingAction.REVOKE)
    again = await mesh.grant(purpose="planning")
    async with mesh.agent() as agent:
        await position_of(agent, again, 60)
    assert mesh.numbers(await mesh.read("eu-west", 60)) == list(range(60))
    await settle(mesh)
    egress = mesh.verify_egress()
    assert egress.ok, egress.findings
    intents = mesh.headers(mesh.egress_folder, Kind.INTENT)
    answered = {header.envelope_sha256 for header in mesh.headers(mesh.egress_folder, Kind.ACK)}
    before = [header for header in intents if header.grant_id == grant]
    assert before and not answered & {header.envelope_sha256 for header in before}
    assert egress.unanswered == 0, "what the next grant announced again waits for no answer"
    assert sum(header.records for header in intents if header.grant_id == again) == 60


async def test_a_rate_holds_the_link_back_and_says_so(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.grant(rate_bytes=20_000)
    await mesh.publish([flight(number) for number in range(200)], batch=10)
    async with mesh.agent() as agent:
        await until(
            lambda: (held := link(agent)) and "rate of 20000" in held.reason, "the rate as the reason"
        )
        assert await mesh.arrived() < 200


async def test_a_sample_shows_what_would_cross_and_moves_nothing(mesh: Mesh) -> None:
    await mesh.create(shards=2)
    payloads = [flight(number) for number in range(30)] + [b"not json"] * 2
    await mesh.publish(payloads)
    grant = await mesh.grant()
    async with mesh.agent():
        await mesh.crossed(30)
    before = len(mesh.headers(mesh.egress_folder))
    sample = await sample_as_bridge(mesh.bridge_config(), mesh.us.root, grant, 32)
    assert (sample.count("crosses"), sample.count("withheld"), sample.is_exact) == (30, 2, True)
    arrived = {
        record["tailnum"] for record in (json.loads(bytes(r.payload)) for r in await mesh.read("eu-west", 30))
    }
    shown = {
        json.loads(field.after)
        for record in sample.records
        for field in record.fields
        if field.path == "tailnum" and field.after
    }
    assert shown == arrived
    async with mesh.operator("us-east") as client:
        read = await sample_as_reader(client, grant, mesh.terms(), 32)
    assert (read.count("crosses"), read.count("withheld"), read.is_exact) == (30, 2, False)
    assert len(mesh.headers(mesh.egress_folder)) == before


async def test_the_health_page_has_the_link_and_the_reason(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.grant()
    await mesh.publish([flight(number) for number in range(10)])
    async with mesh.agent(health=Address("127.0.0.1", 0)) as agent:
        await position(agent, 10)
        assert agent.health is not None
        base = f"http://127.0.0.1:{agent.health.address[1]}"
        metrics = await asyncio.to_thread(lambda: urlopen(f"{base}/metrics").read().decode())
        assert 'felix_bridge_crossed_records_total{destination="eu-west"' in metrics
        ready = await asyncio.to_thread(lambda: json.loads(urlopen(f"{base}/readyz").read()))
        assert ready == {"ok": True, "reason": ""}
        await mesh.stop("eu-west")

        def not_ready() -> str:
            try:
                urlopen(f"{base}/readyz")
            except HTTPError as error:
                return str(json.loads(error.read())["reason"])
            return ""

        reason = await until(lambda: asyncio.to_thread(not_ready), "not ready")
        assert "eu-west" in reason


async def test_a_compacted_stream_does_not_cross_and_the_link_says_why(mesh: Mesh) -> None:
    await mesh.create(views=Views(compaction=Compaction()))
    await mesh.publish([flight(number) for number in range(20)])
    await mesh.grant()
    async with mesh.agent() as agent:
        assert "is compacted" in (await state(agent, "denied")).reason
        assert await mesh.arrived() == 0


async def test_streams_that_have_no_room_under_a_wildcard_grant_do_not_cross_and_status_says_so(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those made last, whatever their names; and of those that cross the lag is what their leaders say."""
    monkeypatch.setattr("bridge.plan.SHARDS_MAX", 3)
    for name in ("acme/ops/second", "acme/ops/first"):
        await mesh.create(name, shards=2)
        await mesh.publish([flight(number) for number in range(6)], name)
        await asyncio.sleep(0.01)
    async with mesh.operator("us-east") as client:
        await client.put_rights(str(mesh.bridge_id), ["bridge-read acme/ops/*"])
        grant = await mesh.grant(stream="acme/ops/*", destination_stream="acme/ops/*", wildcard=True)
        async with mesh.agent() as agent:
            await until(lambda: agent.counts() == (2, 3), "two links, and the grant's own")

            async def reported() -> list[LinkState] | None:
                links = await client.list_links()
                return links if sum(each.crossed for each in links) == 6 else None

            links = await until(reported, "a report of all that crossed")
            assert await mesh.arrived("acme/ops/second") == 6
            assert await mesh.arrived("acme/ops/first") == 0
    assert {each.stream for each in links} == {"acme/ops/second", "acme/ops/*"}
    own = next(each for each in links if each.stream == "acme/ops/*")
    assert (own.grant, own.state) == (grant, "waiting")
    assert "1 with 2 shards do not cross, those made last: acme/ops/first." in own.reason


async def test_the_lag_under_a_pattern_is_what_the_streams_leader_says(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.publish([flight(number) for number in range(6)])
    await mesh.grant(stream="acme/ops/*", destination_stream="acme/ops/*", wildcard=True)
    async with mesh.agent() as agent:
        await until(
            lambda: (held := link(agent)) is not None and (held.high_watermark, held.lag_records) == (6, 0),
            "all crossed, and the link knows of it",
        )


async def test_what_a_stream_under_a_pattern_gets_during_a_pause_is_its_lag(mesh: Mesh) -> None:
    await mesh.create()
    await mesh.publish([flight(number) for number in range(6)])
    grant = await mesh.grant(stream="acme/ops/*", destination_stream="acme/ops/*", wildcard=True)
    async with mesh.agent() as agent:
        await position(agent, 6)
        await mesh.stand("us-east", grant, StandingAction.PAUSE)
        await state(agent, "paused")
        await mesh.publish([flight(number) for number in range(6, 10)])
        await until(
            lambda: (held := link(agent)) is not None and (held.high_watermark, held.lag_records) == (10, 4),
            "a lag of four",
        )
