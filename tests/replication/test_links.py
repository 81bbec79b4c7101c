"""Links between brokers: who is let in, what is bounded, and what happens when a peer goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from replication.replicated_region import (
    MESH,
    REGION,
    START_MS,
    SimulatedRegion,
    authority,
    bundle,
    identity,
    play,
)
from replication.sealed import entry

from felix.identity import Identity
from felix.names import SpiffeId
from felix.peer import TrustBundle
from felix.runtime.simulated import simulated
from felix.transport.memory import MemoryEngine, MemoryListener
from felix.transport.port import ServerTls
from keys.authority import create_authority
from region.cluster.records import ShardId
from region.log.point import LogPoint
from region.replication import links as links_module
from region.replication.links import LINK_LIMITS, PEER_ALPN, LocalBroker, PeerLinks
from region.replication.messages import Append, Probe
from region.replication.wire import Said, frames_from

SHARD = ShardId("ab" * 16, 0)
ELECTION = "00000000000000a1"
NAMES = ("x", "y")
"""The brokers of the region."""


class End:
    """One broker's links, and what it is told."""

    def __init__(
        self,
        region: SimulatedRegion,
        name: str,
        who: Identity | None = None,
        trusts: Callable[[], TrustBundle] = bundle,
    ) -> None:
        self.name = name
        self.heard: list[tuple[str, Said]] = []
        self.linked: list[tuple[str, bool]] = []
        self.members = {"x", "y"}
        self.host = f"h-{name}"
        self._engine = MemoryEngine(region.network, self.host)
        self.listener: MemoryListener
        runtime = simulated(region.loop, START_MS)
        self.clock = runtime.clock
        self.ahead_ms = 0
        """how far its wall clock is ahead"""
        self.links = PeerLinks(
            self._engine,
            LocalBroker(name, REGION, MESH, 1, "f" * 32),
            lambda: who or identity(name),
            trusts,
            authority().anchor().root_pem,
            lambda peer, said: self.heard.append((peer, said)),
            lambda peer, up: self.linked.append((peer, up)),
            is_member=lambda broker, registration, folder: broker in self.members,
            mirror_revision=lambda: 7,
            runtime=msgspec.structs.replace(runtime, clock=self),
        )

    def now_ms(self) -> int:
        return self.clock.now_ms() + self.ahead_ms

    def __getattr__(self, name: str) -> Any:
        return getattr(self.clock, name)

    async def listen(self) -> None:
        own = identity(self.name)
        self.listener = await self._engine.listen(
            self.host,
            7443,
            ServerTls(own.chain_pem, own.key_pem()),
            self.links.accept,
            LINK_LIMITS,
            PEER_ALPN,
        )


async def joined(region: SimulatedRegion, *ends: End) -> None:
    for end in ends:
        await end.listen()
    for end in ends:
        end.links.know({other.name: f"{other.host}:7443" for other in ends}, NAMES)


def alone(scene: Callable[[SimulatedRegion], object]) -> None:
    async def run(region: SimulatedRegion) -> None:
        await scene(region)  # type: ignore[misc]

    play(run, 1)


def test_two_brokers_have_one_link_on_which_both_speak() -> None:
    async def scene(region: SimulatedRegion) -> None:
        a, b = End(region, "x"), End(region, "y")
        await joined(region, a, b)
        await region.until(lambda: a.links.peers == ["y"] and b.links.peers == ["x"])
        a.links.send("y", SHARD, Probe(1, ELECTION))
        b.links.send("x", SHARD, Probe(2, ELECTION))
        await region.until(lambda: a.heard and b.heard)
        assert b.heard == [("x", Said(SHARD, Probe(1, ELECTION)))]
        assert a.heard == [("y", Said(SHARD, Probe(2, ELECTION)))]
        await a.links.close()
        await region.until(lambda: not b.links.peers)
        assert b.linked == [("x", True), ("x", False)]
        await b.links.close()

    alone(scene)


def test_a_broker_knows_how_far_its_clock_is_ahead_of_anothers() -> None:
    async def scene(region: SimulatedRegion) -> None:
        a, b = End(region, "x"), End(region, "y")
        a.ahead_ms += 30_000
        assert b.links.ahead_of("x") is None
        await joined(region, a, b)
        await region.until(lambda: a.links.ahead_of("y") is not None and b.links.ahead_of("x") is not None)
        near = 1_000
        assert 30_000 <= (a.links.ahead_of("y") or 0) < 30_000 + near
        assert -30_000 <= (b.links.ahead_of("x") or 0) < -30_000 + near
        # A step of the own clock shows at once; the other sees it with the next beats.
        a.ahead_ms -= 30_000
        assert abs(a.links.ahead_of("y") or 0) < near
        await region.until(lambda: abs(b.links.ahead_of("x") or 0) < near)
        await a.links.close()
        await region.until(lambda: not b.links.peers)
        assert b.links.ahead_of("x") is None
        await b.links.close()

    alone(scene)


def stranger(kind: str, region: str = REGION, name: str = "x") -> Identity:
    owner = authority() if region == REGION else create_authority(region, MESH, authority_ms())
    return owner.issue_identity(SpiffeId(region, MESH, kind, name), authority_ms())


def authority_ms() -> int:
    return identity("a").not_before_ms + 60_000


@pytest.mark.parametrize("kind", ["client", "operator", "bridge"])
def test_nobody_but_a_broker_is_let_in(kind: str) -> None:
    async def scene(region: SimulatedRegion) -> None:
        a, b = End(region, "x", stranger(kind)), End(region, "y")
        await joined(region, a, b)
        await asyncio.sleep(5)
        assert not a.links.peers and not b.links.peers and not b.linked
        await a.links.close()
        await b.links.close()

    alone(scene)


@pytest.mark.parametrize("caller", [True, False])
def test_a_broker_that_the_records_do_not_know_is_let_in_nowhere_until_they_do(caller: bool) -> None:
    async def scene(region: SimulatedRegion) -> None:
        a, b = End(region, "x"), End(region, "y")
        one, name = (b, "x") if caller else (a, "y")
        one.members.discard(name)
        await joined(region, a, b)
        await asyncio.sleep(5)
        assert not one.links.peers and not one.linked and not one.heard
        one.members.add(name)
        await region.until(lambda: a.links.peers == ["y"] and b.links.peers == ["x"])
        await a.links.close()
        await b.links.close()

    alone(scene)


def test_a_broker_of_another_region_is_refused_though_that_region_is_trusted() -> None:
    other = create_authority("eu-west", MESH, authority_ms())
    who = other.issue_identity(SpiffeId("eu-west", MESH, "broker", "x"), authority_ms())

    async def scene(region: SimulatedRegion) -> None:
        a, b = End(region, "x", who), End(region, "y", trusts=lambda: bundle().trusting(other.anchor()))
        await joined(region, a, b)
        await asyncio.sleep(5)
        assert not a.links.peers and not b.linked
        await a.links.close()
        await b.links.close()

    alone(scene)


def test_a_broker_that_says_it_is_another_one_is_refused() -> None:
    async def scene(region: SimulatedRegion) -> None:
        a, b = End(region, "x", stranger("broker", name="w")), End(region, "y")
        await joined(region, a, b)
        await asyncio.sleep(5)
        assert not b.linked
        await a.links.close()
        await b.links.close()

    alone(scene)


def test_a_link_on_which_nothing_is_heard_is_over_on_both_sides_and_comes_back() -> None:
    async def scene(region: SimulatedRegion) -> None:
        a, b = End(region, "x"), End(region, "y")
        await joined(region, a, b)
        await region.until(lambda: a.links.peers and b.links.peers)
        region.network.part(a.host, b.host)
        await region.until(lambda: not a.links.peers and not b.links.peers)
        region.network.heal()
        await region.until(lambda: a.links.peers and b.links.peers)
        assert a.linked == [("y", True), ("y", False), ("y", True)]
        await a.links.close()
        await b.links.close()

    alone(scene)


def test_a_broker_that_is_alive_and_has_no_link_is_told_with_since_when_and_why_by_whoever_calls() -> None:
    async def scene(region: SimulatedRegion) -> None:
        a, b = End(region, "x"), End(region, "y")
        await joined(region, a, b)
        await region.until(lambda: a.links.peers and b.links.peers)
        assert not a.links.apart() and not b.links.apart()
        # By its clock the caller's certificate does not hold yet.
        b.ahead_ms -= 400 * 86_400_000
        region.network.part(a.host, b.host)
        await region.until(lambda: not a.links.peers and not b.links.peers)
        region.network.heal()
        await asyncio.sleep(20)
        ((peer, (ms, why)),) = a.links.apart().items()
        assert peer == "y" and "is valid only from" in why
        assert 15_000 < ms < 30_000 and 15_000 < b.links.apart()["x"][0] < 30_000
        b.ahead_ms = 0
        await region.until(lambda: a.links.peers and b.links.peers)
        assert not a.links.apart() and not b.links.apart()
        # Who is not alive is nobody to have a link with.
        a.links.know({}, NAMES)
        await b.links.close()
        await region.until(lambda: not a.links.peers)
        assert not a.links.apart()
        await a.links.close()

    alone(scene)


def test_frames_that_wait_are_bounded_and_what_is_short_passes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "BULK_WAITING_BYTES_MAX", 1 << 20)

    async def scene(region: SimulatedRegion) -> None:
        a, b = End(region, "x"), End(region, "y")
        await joined(region, a, b)
        await region.until(lambda: a.links.peers and b.links.peers)
        frames = frames_from(LogPoint(0), [entry(0, 1, payload=b"." * 200_000)])
        message = Append(1, ELECTION, 1, 1, 0, LogPoint(0), 0, LogPoint(0), LogPoint(0), (), frames)
        for _ in range(40):
            a.links.send("y", SHARD, message)
        a.links.send("y", SHARD, Probe(1, ELECTION))
        assert a.links.dropped
        link = a.links._up["y"]
        assert link._waiting_bytes <= 1 << 20 and not link.has_room()
        await a.links.room("y")
        await region.until(lambda: any(isinstance(said.message, Probe) for _, said in b.heard))
        await region.until(lambda: not link._waiting)
        appends = [said for _, said in b.heard if isinstance(said.message, Append)]
        assert len(appends) + a.links.dropped == 40
        await a.links.close()
        await b.links.close()

    alone(scene)


def test_the_clock_of_a_broker_that_is_away_counts_and_of_one_that_is_gone_for_good_does_not() -> None:
    async def scene(region: SimulatedRegion) -> None:
        a, b = End(region, "x"), End(region, "y")
        await joined(region, a, b)
        await region.until(lambda: a.links.clock_offsets)
        a.links.know({}, NAMES)
        await b.links.close()
        await region.until(lambda: not a.links.peers)
        assert len(a.links.clock_offsets) == 1
        a.links.know({}, ["x"])
        assert not a.links.clock_offsets
        await a.links.close()

    alone(scene)


def test_a_broker_that_comes_back_quickly_takes_the_place_of_its_older_link() -> None:
    async def scene(region: SimulatedRegion) -> None:
        a, b = End(region, "x"), End(region, "y")
        await joined(region, a, b)
        await region.until(lambda: a.links.peers and b.links.peers)
        again = End(region, "x")
        again.links.know({"y": f"{b.host}:7443"}, NAMES)
        await region.until(lambda: again.links.peers)
        assert b.linked == [("x", True), ("x", False), ("x", True)]
        for end in (a, again, b):
            end.links.know({}, NAMES)
            await end.links.close()

    alone(scene)
