"""Two bridges of one source whose grants for one stream are in force at once: one carries, the other stands by and takes over, each record crosses once, and both logs say who brought what.

The destination says how far a bridge's own ranges go. With that an agent tells what another one brought from a log of its own that was put back.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from attacks.chance import Chance
from attacks.conftest import Tally
from attacks.test_f08_truncation import keep, link, numbered, put_back, restart
from bridge_mesh import BRIDGE, STREAM, Mesh, two_regions, until
from rogue_agent import Wild, granted, rogue_agent
from slow_runs import only_slow

from audit.leaf import GapKind, Header, Kind
from audit.verify import verify_log
from bridge.agent import Agent
from felix.errors import Code, FelixError, UnavailableError
from felix.messages import LOGGED_UNTOLD, LinkState
from felix.ranges import RangeSet
from felix.runtime.real import now_ms
from policy.grant import StandingAction
from region.bootstrap import issue_identity
from region.config import load_config
from region.crossing.ingest import IngestStream

OTHER = "us-to-eu-2"
BOTH = (BRIDGE, OTHER)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        issue_identity(mesh.us, load_config(mesh.us.config), "bridge", OTHER, now_ms())
        yield mesh


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bridge that stands still is relieved after 2 s."""
    monkeypatch.setattr("region.crossing.ingest.STANDBY_S", 2.0)


def identity(name: str) -> str:
    return f"spiffe://us-east.acme/bridge/{name}"


async def both_granted(mesh: Mesh, stream: str = STREAM) -> dict[str, str]:
    """By bridge, a grant of its own."""
    await mesh.create(stream)
    async with mesh.operator("us-east") as client:
        await client.put_rights(identity(OTHER), [f"bridge-read {stream}"])
    return {name: await mesh.grant(bridge=identity(name), stream=stream) for name in BOTH}


def egress(mesh: Mesh, name: str) -> Path:
    return mesh.us.root / "bridges" / name / "egress"


def elsewhere(mesh: Mesh, name: str) -> list[tuple[int, int]]:
    gaps = mesh.headers(egress(mesh, name), Kind.GAP)
    return [span(gap) for gap in gaps if gap.gap is GapKind.ELSEWHERE]


def span(header: Header) -> tuple[int, int]:
    assert header.first_offset is not None and header.last_offset is not None
    return header.first_offset, header.last_offset


async def taken_over(mesh: Mesh, dies_at: str) -> None:
    """One bridge dies at this step of a range, the other one brings that and more, and the first one goes on: 39 records."""
    await both_granted(mesh)
    await mesh.publish(numbered(0, 3))
    async with mesh.agent() as agent:
        await link(agent, "active", 3)
    await mesh.publish(numbered(3, 3))
    child = await mesh.child(dies_at)
    await asyncio.wait_for(child.wait(), 60)
    for number in range(6, 36):
        # More ranges than the destination remembers of what it can answer again.
        await mesh.publish(numbered(number, 1))
    async with mesh.agent(name=OTHER) as agent:
        await link(agent, "active", 36)
    async with mesh.agent() as agent:
        await link(agent, "active", 36)
        await mesh.publish(numbered(36, 3))
        await link(agent, "active", 39)


async def check(mesh: Mesh, expected: list[int]) -> None:
    """Each record is at the destination once, in order; every log verifies; and what a log says that others brought, the other bridge's arrivals cover."""
    assert await mesh.arrived() == len(expected)
    assert mesh.numbers(await mesh.read("eu-west", len(expected))) == expected
    for region in ("us-east", "eu-west"):
        await mesh.stop(region)
    logs = [folder for name in BOTH if (folder := egress(mesh, name)).exists()]
    for folder in (*logs, mesh.ingress_folder):
        report = verify_log(mesh.log_files(folder), mesh.trust, cosignatures_min=0)
        assert report.ok, report.findings
    arrivals = mesh.headers(mesh.ingress_folder, Kind.ACK)
    assert sum(header.records for header in arrivals) == len(expected)
    brought = {name: RangeSet() for name in BOTH}
    for header in arrivals:
        first, last = span(header)
        brought[header.bridge.rpartition("/")[2]].add(first, last + 1)
    for name, other in (BOTH, BOTH[::-1]):
        if not egress(mesh, name).exists():
            continue
        for first, last in elsewhere(mesh, name):
            assert not list(brought[other].missing(first, last + 1)), (name, first, last)


def stands_by(agent: Agent) -> LinkState | None:
    return next((each for each in agent.links() if "stands by" in each.reason), None)


async def test_one_carries_and_the_other_stands_by_until_it_stops(mesh: Mesh, tally: Tally) -> None:
    await both_granted(mesh)
    await mesh.publish(numbered(0, 3))
    async with mesh.agent(name=OTHER) as other:
        async with mesh.agent() as one:
            await mesh.crossed(3)
            # Whichever was first carries on, however often the other one asks.
            standing = await until(
                lambda: (stands_by(one) and one) or (stands_by(other) and other), "that one stands by"
            )
            carrying = other if standing is one else one
            await mesh.publish(numbered(3, 3))
            await mesh.crossed(6)
            await asyncio.sleep(1.5)
            # Between two questions it is about to ask.
            held = await until(lambda: stands_by(standing), "that it stands by still")
            assert held.state == "waiting"
            assert standing.stats(held.grant, STREAM, 0).stands_by
            assert (held.lag_records, held.lag_ms) == (-1, -1), (
                "what the other one carries is none of its lag"
            )
            assert not standing.not_ready()
            (carried,) = carrying.links()
            assert (carried.state, carried.position) == ("active", 6)
            stats = carrying.stats(carried.grant, STREAM, 0)
            assert stats.sessions == 1 and not stats.stands_by, "and nobody disturbs it"
        # The one ends, and the other carries all that comes.
        await mesh.publish(numbered(6, 3))
        await mesh.crossed(9)
        carries = await link(other, "active", 9)
        assert not other.stats(carries.grant, STREAM, 0).stands_by
        assert not elsewhere(mesh, BRIDGE) or not elsewhere(mesh, OTHER)
    await check(mesh, list(range(9)))
    tally("takeovers of two bridges", 1)


async def test_each_goes_on_behind_what_the_other_one_brought_under_the_grant_that_it_has(
    mesh: Mesh, tally: Tally
) -> None:
    """The one behind stood still, with "the egress log was rolled back", until it got another grant."""
    await both_granted(mesh)
    sent = 0
    for turn in range(4):
        await mesh.publish(numbered(sent, 2))
        sent += 2
        async with mesh.agent(name=BOTH[turn % 2]) as agent:
            await link(agent, "active", sent)
    await mesh.stop("us-east")
    await mesh.stop("eu-west")
    assert (elsewhere(mesh, BRIDGE), elsewhere(mesh, OTHER)) == ([(2, 3)], [(0, 1), (4, 5)])
    assert not mesh.headers(mesh.egress_folder, Kind.DENY)
    for region in ("us-east", "eu-west"):
        await mesh.start(region)
    await check(mesh, list(range(8)))
    tally("takeovers of two bridges", 3)


@pytest.mark.parametrize(
    "dies_at",
    [
        pytest.param("intent-appended", marks=only_slow),
        "intent-durable",
        pytest.param("sent", marks=only_slow),
        "receipt",
    ],
)
async def test_what_one_announced_before_it_died_and_the_other_one_brought_counts_once(
    mesh: Mesh, dies_at: str, tally: Tally
) -> None:
    """It may have arrived before, without the receipt; or the other one brought it, and then nobody answers it any more."""
    await taken_over(mesh, dies_at)
    # Once more, by the snapshots of what its log says.
    async with mesh.agent() as agent:
        await mesh.publish(numbered(39, 1))
        await link(agent, "active", 40)
    await check(mesh, list(range(40)))
    ((first, last),) = elsewhere(mesh, BRIDGE)
    arrived = {
        span(ack) for ack in mesh.headers(mesh.ingress_folder, Kind.ACK) if ack.bridge == identity(BRIDGE)
    }
    landed = (3, 5) in arrived
    assert (first, last) == (6 if landed else 3, 35)
    report = verify_log(mesh.log_files(egress(mesh, BRIDGE)), mesh.trust, cosignatures_min=0)
    # What landed and lost its receipt nobody asks for any more; what did not counts no more.
    intents = [each for each in mesh.headers(egress(mesh, BRIDGE), Kind.INTENT) if span(each) == (3, 5)]
    assert len(intents) == (dies_at != "intent-appended")
    followed, again = len(report.followed), len(report.announced_again)
    # It may die a moment too late.
    answered = (3, 5) in {span(ack) for ack in mesh.headers(egress(mesh, BRIDGE), Kind.ACK)}
    lost = landed and not answered
    assert (followed, again) == (lost, 0 if landed else len(intents))
    denied = mesh.headers(egress(mesh, BRIDGE), Kind.DENY)
    assert [each.code for each in denied] == [Code.POSITION_GAP] * lost, "it is asked for once"
    tally("agents killed beside another bridge", 1)


@pytest.mark.usefixtures("soon")
async def test_a_bridge_that_hangs_is_relieved_while_records_wait_and_not_before(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await both_granted(mesh)
    await mesh.publish(numbered(0, 1))
    async with mesh.agent() as one:
        await link(one, "active", 1)
        async with mesh.agent(name=OTHER) as other:
            await until(lambda: stands_by(other), "that the other one stands by")
            await asyncio.sleep(2.5)
            (carried,) = one.links()
            assert carried.state == "active", "nothing waits, so nobody is relieved"
            assert one.stats(carried.grant, STREAM, 0).sessions == 1
            await until(lambda: stands_by(other), "that it stands by still")
            # As one whose quorum of witnesses is gone, or whose disk hangs.
            monkeypatch.setattr(one.context, "held", lambda: "It hangs.")
            await mesh.publish(numbered(1, 3))
            await link(other, "active", 4)
            await until(lambda: stands_by(one), "that the one stands by")
            monkeypatch.setattr(one.context, "held", lambda: "")
            await mesh.publish(numbered(4, 1))
            await link(other, "active", 5)
    await check(mesh, list(range(5)))


@only_slow
async def test_an_agents_log_that_was_put_back_stops_all_links_to_a_region_whatever_others_brought_and_under_another_grant(
    mesh: Mesh, tmp_path: Path, tally: Tally
) -> None:
    """Also the destination has forgotten what it cosigned. A leaf for what another bridge brought would hide what the log lost."""
    idle = "acme/ops/idle"
    grants = await both_granted(mesh)
    await mesh.create(idle)
    async with mesh.operator("us-east") as client:
        await client.put_rights(identity(BRIDGE), [f"bridge-read {STREAM}", f"bridge-read {idle}"])
    await mesh.grant(stream=idle)
    await mesh.publish(numbered(0, 3))
    await mesh.publish(numbered(0, 3), idle)
    async with mesh.agent():
        await mesh.crossed(3)
        await mesh.crossed(3, idle)
    folder, data = mesh.us.root / "bridges" / BRIDGE, mesh.eu.root / "data"

    def keep_all() -> None:
        keep(folder, tmp_path / "agent")
        shutil.copytree(data, tmp_path / "memory", ignore=shutil.ignore_patterns("streams", "audit"))

    def put_all_back() -> None:
        keep(folder, tmp_path / "newest")
        put_back(tmp_path / "agent", folder)
        for path in data.iterdir():
            if path.name not in ("streams", "audit"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(tmp_path / "memory", data, dirs_exist_ok=True)

    await restart(mesh, keep_all)
    await mesh.publish(numbered(3, 3))
    async with mesh.agent() as agent:
        await until(lambda: any(each.position == 6 for each in agent.links()), "six records")
    await mesh.publish(numbered(6, 3))
    async with mesh.agent(name=OTHER) as agent:
        await link(agent, "active", 9)
    await restart(mesh, put_all_back)

    async def stopped() -> None:
        async with mesh.agent() as agent:

            def denied() -> bool:
                states = {each.stream: each for each in agent.links() if each.state != "stopped"}
                return len(states) == 2 and all(each.state == "denied" for each in states.values())

            await until(denied, f"that both links stop; now {agent.links()}")
            for each in agent.links():
                if each.state == "denied":
                    assert "up to 5" in each.reason and "below 3: it was rolled back" in each.reason, each

    await mesh.publish(numbered(9, 3))
    await stopped()
    for region in ("us-east", "eu-west"):
        await mesh.stand(region, grants[BRIDGE], StandingAction.REVOKE)
    await mesh.grant()
    await stopped()
    assert not mesh.headers(egress(mesh, BRIDGE), Kind.GAP)
    await restart(mesh, lambda: put_back(tmp_path / "newest", folder))
    await mesh.publish(numbered(3, 1), idle)
    async with mesh.agent() as agent:
        await mesh.crossed(12)
        await mesh.crossed(4, idle)
    arrived = mesh.numbers(await mesh.read("eu-west", 12))
    assert arrived == list(range(12))
    tally("agents' logs put back beside another bridge", 1)


async def test_a_destination_of_before_does_not_tell_and_the_link_stops_as_it_did(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = IngestStream._told
    monkeypatch.setattr(
        IngestStream,
        "_told",
        lambda stream, opened: msgspec.structs.replace(told(stream, opened), brought=LOGGED_UNTOLD),
    )
    await both_granted(mesh)
    for at, name in enumerate((BRIDGE, OTHER)):
        await mesh.publish(numbered(at, 1))
        async with mesh.agent(name=name) as agent:
            await link(agent, "active", at + 1)
    async with mesh.agent() as agent:
        held = await link(agent, "denied")
        assert "does not say" in held.reason and "new one for this bridge" in held.reason
    assert not elsewhere(mesh, BRIDGE)


# -- a destination that lies ---------------------------------------------------------------------------


def lying(monkeypatch: pytest.MonkeyPatch, **said: int) -> None:
    told = IngestStream._told
    monkeypatch.setattr(
        IngestStream, "_told", lambda stream, opened: msgspec.structs.replace(told(stream, opened), **said)
    )


LIES: tuple[tuple[dict[str, int], str, str], ...] = (
    ({"position": 7, "logged": 7, "brought": 7}, "denied", "it was rolled back"),
    ({"position": 5, "logged": 5, "brought": 9}, "denied", "it was rolled back"),
    ({"position": 9, "logged": 9, "brought": 5}, "waiting", "the log of us-east ended at 7"),
    ({"position": 1 << 62, "logged": 1 << 62, "brought": 5}, "waiting", "the log of us-east ended at 7"),
    ({"position": 5, "logged": 5, "brought": 2}, "denied", "gave receipts for"),
    ({"position": 7, "logged": 7, "brought": 0}, "denied", "gave receipts for"),
)


@pytest.mark.parametrize(
    "said, state, reason", [*LIES[::2], *(pytest.param(*lie, marks=only_slow) for lie in LIES[1::2])]
)
async def test_a_destination_that_says_what_its_receipts_or_the_source_belie_is_refused(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, tally: Tally, said: dict[str, int], state: str, reason: str
) -> None:
    """Five records crossed by this bridge, and have receipts; two more wait."""
    await both_granted(mesh)
    await mesh.publish(numbered(0, 5))
    async with mesh.agent() as agent:
        await link(agent, "active", 5)
    await mesh.publish(numbered(5, 2))
    with monkeypatch.context() as lies:
        lying(lies, **said)
        async with mesh.agent() as agent:

            def found() -> Any:
                return next((each for each in agent.links() if reason in each.reason), None)

            held = await until(found, f"{reason}; now {agent.links()}")
            assert held.state == state
    assert not mesh.headers(egress(mesh, BRIDGE), Kind.GAP)
    async with mesh.agent() as agent:
        await link(agent, "active", 7)
    await check(mesh, list(range(7)))
    tally("answers of a destination that lies about who brought what", 1)


async def test_what_a_destination_says_falsely_that_another_bridge_brought_stands_as_its_word(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """Within what the source has it can claim records, as with another grant: the egress log says whose word it is, the ingress log lacks them, and no record crosses twice once it takes
    its word back."""
    await both_granted(mesh)
    await mesh.publish(numbered(0, 5))
    async with mesh.agent() as agent:
        await link(agent, "active", 5)
    await mesh.publish(numbered(5, 2))
    with monkeypatch.context() as lies:
        lying(lies, position=7, logged=7, brought=5)
        async with mesh.agent() as agent:
            await link(agent, "active", 7)
    assert elsewhere(mesh, BRIDGE) == [(5, 6)]
    await mesh.publish(numbered(7, 2))
    async with mesh.agent() as agent:
        held = await link(agent, "denied")
        assert held.reason
    assert mesh.numbers(await mesh.read("eu-west", 5)) == list(range(5))
    assert await mesh.arrived() == 5
    await mesh.stop("eu-west")
    report = verify_log(mesh.log_files(egress(mesh, BRIDGE)), mesh.trust, cosignatures_min=0)
    assert report.ok, report.findings
    assert max(header.last_offset or 0 for header in mesh.headers(mesh.ingress_folder, Kind.ACK)) == 4
    tally("answers of a destination that lies about who brought what", 1)


# -- a bridge that lies --------------------------------------------------------------------------------


@pytest.mark.usefixtures("soon")
async def test_a_bridge_that_only_sends_again_what_landed_keeps_no_other_one_out(mesh: Mesh) -> None:
    """Nor does one whose grant has ended: it never ends its stream by itself."""
    stream = "acme/ops/kept-out"
    one, two = [await granted(mesh, stream=stream, bridge=identity(name)) for name in BOTH]
    sent = [Wild(b'{"n":1}')]
    async with (
        rogue_agent(mesh, one, stream=stream) as holds,
        rogue_agent(mesh, two, bridge=OTHER, stream=stream) as other,
    ):
        await holds.open()
        await holds.cross(sent)
        with pytest.raises(UnavailableError) as caught:
            await other.open()
        assert caught.value.code is Code.STANDBY
        for _ in range(6):
            holds.send(sent, base=0)
            await holds.receipt()
            await asyncio.sleep(0.5)
        # The source has more, by its statement.
        assert (await other.open()).position == 1
        await other.cross(sent)
        with pytest.raises(UnavailableError):
            await holds.open()
        await mesh.stand("eu-west", two[0], StandingAction.REVOKE)
        assert (await holds.open()).position == 2
    await mesh.stop("eu-west")
    assert mesh.verify_ingress().ok


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("closes", [pytest.param(False, marks=only_slow), True])
async def test_a_bridge_that_opens_its_link_again_and_again_keeps_no_other_one_out(
    mesh: Mesh, tally: Tally, closes: bool
) -> None:
    """As an agent that is started anew each time that it dies at the same batch: each of its links counted as one that had just begun."""
    stream = "acme/ops/again"
    one, two = [await granted(mesh, stream=stream, bridge=identity(name)) for name in BOTH]
    loop, refused, opened = asyncio.get_running_loop(), 0, 0
    async with (
        rogue_agent(mesh, one, stream=stream) as holds,
        rogue_agent(mesh, two, bridge=OTHER, stream=stream) as other,
    ):
        await holds.open()
        begun = loop.time()
        while True:
            try:
                assert (await other.open()).position == 0
                break
            except UnavailableError as error:
                assert error.code is Code.STANDBY
                refused += 1
            assert loop.time() - begun < 8, "it is never relieved"
            await asyncio.sleep(0.3)
            if closes:
                holds.peer.send(b"", holds.stream, end=True)
            await holds.open()
            opened += 1
        assert loop.time() - begun >= 2 and opened > 2
        await other.cross([Wild(b'{"n":1}')])
        with pytest.raises(UnavailableError):
            await holds.open()
    tally("links that a bridge opened anew to keep another one out", opened)


@pytest.mark.usefixtures("soon")
async def test_a_bridge_that_had_nothing_to_bring_for_long_is_not_relieved_at_once(mesh: Mesh) -> None:
    """A record of now, which it is about to bring, waits no longer than any other: whoever asked in between threw it out."""
    stream = "acme/ops/seldom"
    one, two = [await granted(mesh, stream=stream, bridge=identity(name)) for name in BOTH]

    async def stands_by(rogue: Any, log_end: int) -> None:
        with pytest.raises(UnavailableError) as caught:
            await rogue.open(statement=mesh.statement(stream=stream, log_end=log_end))
        assert caught.value.code is Code.STANDBY

    async with (
        rogue_agent(mesh, one, stream=stream) as carries,
        rogue_agent(mesh, two, bridge=OTHER, stream=stream) as other,
    ):
        await carries.open()
        for sent in range(1, 3):
            await carries.cross([Wild(b'{"n":1}')])
            await stands_by(other, sent)
            await asyncio.sleep(2.5)
            await stands_by(other, sent)
            await stands_by(other, sent + 1)


@pytest.mark.usefixtures("soon")
async def test_a_bridge_that_is_refused_ends_no_link_of_another_one(mesh: Mesh) -> None:
    """It shows a statement of yesterday, or of another stream of this name, while the one that carries has nothing to bring."""
    stream = "acme/ops/refused"
    one, two = [await granted(mesh, stream=stream, bridge=identity(name)) for name in BOTH]
    async with (
        rogue_agent(mesh, one, stream=stream) as carries,
        rogue_agent(mesh, two, bridge=OTHER, stream=stream) as other,
        rogue_agent(mesh, two, bridge=OTHER, stream=stream, incarnation=b"o" * 16) as another,
    ):
        await carries.open()
        await carries.cross([Wild(b'{"n":1}')])
        old = mesh.now_ms() - 3_600_000
        for code in (Code.STANDBY, Code.CONFLICT):
            for rogue in (other, another):
                incarnation = rogue.key.scope.incarnation
                said = mesh.statement(stream=stream, incarnation=incarnation, time_ms=old)
                with pytest.raises(FelixError) as caught:
                    await rogue.open(statement=said)
                assert caught.value.code is code
            await asyncio.sleep(2.5)
        await carries.cross([Wild(b'{"n":2}')])
        assert carries.position == 2


# -- at random -----------------------------------------------------------------------------------------

MOVES = 10


class Play:
    """Both agents, which start, stop and die, under records that come all the time."""

    def __init__(self, mesh: Mesh, random: Random) -> None:
        self.mesh, self.random = mesh, random
        self.stacks: dict[str, AsyncExitStack] = {}
        self.sent = 0
        self.takeovers = 0

    async def move(self) -> None:
        random, mesh = self.random, self.mesh
        name = random.choice(BOTH)
        match random.choice(
            ("start", "start", "stop", "die", "publish", "publish", "restart", "restart-source")
        ):
            case "start" if name not in self.stacks:
                stack = self.stacks[name] = AsyncExitStack()
                await stack.enter_async_context(mesh.agent(name=name))
            case "stop" if name in self.stacks:
                await self.stacks.pop(name).aclose()
            case "die" if name not in self.stacks:
                step = random.choice(("intent-appended", "intent-durable", "sent", "receipt", "ack-appended"))
                child = await mesh.child(f"{step}:{random.randint(1, 3)}", name)
                await self.publish(random.randint(1, 6))
                try:
                    await asyncio.wait_for(child.wait(), random.uniform(2, 6))
                except TimeoutError:
                    child.kill()
                    await child.wait()
            case "restart":
                await mesh.stop("eu-west")
                await mesh.start("eu-west")
            case "restart-source":
                await mesh.stop("us-east")
                await mesh.start("us-east")
            case _:
                await self.publish(random.randint(1, 8))
        await asyncio.sleep(random.uniform(0, 1.5))

    async def publish(self, count: int) -> None:
        await self.mesh.publish(numbered(self.sent, count), batch=self.random.randint(1, 3))
        self.sent += count

    async def close(self) -> None:
        for stack in self.stacks.values():
            await stack.aclose()
        self.stacks.clear()


@only_slow
@pytest.mark.usefixtures("soon")
async def test_two_bridges_that_run_stop_and_die_at_random_bring_each_record_once(
    mesh: Mesh, chance: Chance, attack_scale: int, tally: Tally
) -> None:
    play = Play(mesh, chance(210))
    await both_granted(mesh)
    try:
        for _ in range(MOVES * attack_scale):
            await play.move()
        await play.publish(2)
    finally:
        await play.close()
    for name in BOTH:
        # Each by itself in the end: none stands still, whatever was announced and who brought it.
        await play.publish(2)
        async with mesh.agent(name=name) as agent:
            await link(agent, "active", play.sent)
    await check(mesh, list(range(play.sent)))
    tally("moves of two bridges at once", MOVES * attack_scale)


# -- what a report says --------------------------------------------------------------------------------


@only_slow
@pytest.mark.spark
async def test_a_report_over_takeovers_reconciles_and_names_what_nobody_answered(
    mesh: Mesh, spark: Any, tmp_path: Path
) -> None:
    """One bridge dies with records announced, another one brings those and more, and the first one goes on under the grant that it has."""
    from audit.spark.report import run_report

    await taken_over(mesh, "intent-durable")
    await check(mesh, list(range(39)))
    logs = [egress(mesh, BRIDGE), egress(mesh, OTHER), mesh.ingress_folder, mesh.us.root / "data" / "audit"]
    result = await asyncio.to_thread(
        run_report, logs, tmp_path / "out", trust=mesh.trust, session=spark, cosignatures_min=0
    )
    report = result.report
    (named,) = report.findings.records()
    assert (named["finding"], named["status"]) == ("announced-not-answered", "open")
    assert (named["bridge"], named["first_offset"], named["last_offset"]) == (identity(BRIDGE), 3, 5)
    rows = {row["bridge"]: row for row in report.reconciliation.records()}
    one, other = rows[identity(BRIDGE)], rows[identity(OTHER)]
    assert (one["status"], one["crossed"], one["gap"], one["unanswered"], one["unaccounted"]) == (
        "open",
        6,
        33,
        3,
        0,
    )
    assert (other["status"], other["crossed"], other["gap"], other["unaccounted"]) == ("reconciled", 33, 3, 0)
    assert [row for row in report.exceptions.records() if row["severity"] == "breach"] == []
    assert result.exit_code == 0
