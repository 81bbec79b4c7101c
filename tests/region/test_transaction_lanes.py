"""Both ends of a lane: the coordinator with leaders of the test's, and a leader with requests of the test's, over real logs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from region_peer import until
from transaction_home import OWNER, Home

from felix.batch import NewRecord, encode_batch
from felix.errors import Code, NotLeaderError, RequestError, UnavailableError
from felix.names import SpiffeId, StreamName
from felix.transaction_messages import TRANSACTIONS_STREAM
from region.cluster.assignments import Leader
from region.clustered import Clustered
from region.copies.peer_requests import PeerRequest, PeerRequests
from region.metadata.records import StreamConfig
from region.streams.hosted import HostedStream
from region.transactions import lanes as lanes_module
from region.transactions.coordinator import Coordinator
from region.transactions.lane_messages import (
    AbandonAcknowledgements,
    Acknowledged,
    ApplyLane,
    AskDecision,
    CheckLane,
    Decision,
    LaneApplied,
    LaneChecked,
    Placed,
    PrepareAcknowledgements,
    Prepared,
    ShowLane,
)
from region.transactions.lanes import Lanes
from region.transactions.placing import Step
from region.transactions.state import Part
from region.transactions.stream_leaders import ASK_BYTES, Offsets, StreamLeaders

A, B = "acme/payments/a", "acme/payments/b"


class Jobs:
    """A view whose acknowledgements name their stream and what is acknowledged."""

    def __init__(self) -> None:
        self.prepared: list[bytes] = []
        self.applied: list[bytes] = []

    def stream_of(self, body: bytes) -> StreamName:
        return StreamName.parse(body.decode().partition(":")[0])

    def stage(self, identity: SpiffeId, body: bytes) -> None: ...

    async def prepare(self, identity: SpiffeId, body: bytes) -> bytes:
        self.prepared.append(body)
        return body

    def abandon(self, body: bytes) -> None:
        self.prepared.remove(body)

    async def apply(self, body: bytes) -> None:
        self.applied.append(body)


class Leaders:
    """They note what they are asked, and answer as the test says."""

    def __init__(self) -> None:
        self.newest = self.lost = 0
        self.epoch = 1
        self.refusal: Exception | None = None
        self.mistake: Exception | None = None
        self.may_apply = asyncio.Event()
        self.may_apply.set()
        self.applied: list[tuple[str, int, list[int]]] = []
        self.abandoned: list[bytes] = []
        self.shown: list[tuple[str, int]] = []

    async def check(self, stream: str, incarnation: bytes, shards: Sequence[int]) -> int:
        if self.refusal is not None:
            raise self.refusal
        return self.newest

    async def prepare(
        self, stream: str, view: str, owner: SpiffeId, body: bytes, transaction: bytes
    ) -> Prepared:
        return Prepared(body, self.epoch)

    async def abandon(self, stream: str, view: str, body: bytes) -> None:
        self.abandoned.append(body)

    async def apply(
        self, stream: str, term: int, parts: Sequence[Part], acknowledged: Sequence[Acknowledged], number: int
    ) -> Offsets:
        await self.may_apply.wait()
        self.applied.append((stream, number, [part.number for part in parts]))
        return {(part.number, part.index): (7,) for part in parts}

    async def show(self, stream: str, number: int) -> None:
        if self.mistake is not None:
            raise self.mistake
        if self.lost:
            self.lost -= 1
            raise UnavailableError("The link was lost.", retry_after_ms=1)
        self.shown.append((stream, number))


class Coordinating:
    """A broker's coordinator among several, whose leaders are the test's."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.leaders = Leaders()

    async def begin(self) -> None:
        """A term."""
        self.stream = await self.home.broker.ensure_stream(TRANSACTIONS_STREAM, StreamConfig())
        self.home.coordinator = Coordinator(self.home.broker, {"jobs": Jobs()}, leaders=self.leaders)
        await self.home.coordinator.lead(self.stream)

    async def end(self) -> None:
        await self.home.broker.streams._close_views(self.stream)
        for number in list(self.stream.companions):
            await self.home.streams.close_companion(self.stream, number)

    async def commit(self, *names: str, acknowledged: Sequence[bytes] = ()) -> tuple[tuple[int, ...], ...]:
        transaction = self.home.begin()
        for index, name in enumerate(names):
            self.home.stage(transaction, index, name, b"x")
        for index, body in enumerate(acknowledged, len(names)):
            self.home.coordinator.open.acknowledge(OWNER, transaction, index, "jobs", body)
        staged = len(names) + len(acknowledged)
        return (await self.home.coordinator.commit(OWNER, transaction, staged, self.home.clock)).offsets


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Home]:
    home = Home(tmp_path)
    await home.open()
    await home.create(A, shards=2)
    await home.create(B)
    yield home
    await home.close()


@pytest.fixture
async def coordinating(home: Home) -> Coordinating:
    made = Coordinating(home)
    await made.begin()
    return made


async def test_a_commit_is_applied_and_shown_by_every_leader(coordinating: Coordinating) -> None:
    assert await coordinating.commit(A, B, acknowledged=[b"acme/payments/c:1"]) == ((7,), (7,))
    leaders = coordinating.leaders
    assert sorted(leaders.applied) == [(A, 1, [1]), (B, 1, [1]), ("acme/payments/c", 1, [])]
    assert sorted(leaders.shown) == [(A, 1), (B, 1), ("acme/payments/c", 1)]


async def test_a_leader_that_was_not_reached_is_told_again_to_show(coordinating: Coordinating) -> None:
    coordinating.leaders.lost = 2
    await coordinating.commit(A, B)
    assert sorted(coordinating.leaders.shown) == [(A, 1), (B, 1)]


async def test_a_mistake_while_one_is_shown_keeps_no_later_one_waiting(coordinating: Coordinating) -> None:
    coordinating.leaders.mistake = ValueError("ours")
    assert await coordinating.commit(A, B) == ((7,), (7,))
    coordinating.leaders.mistake = None
    assert await coordinating.commit(A, B) == ((7,), (7,))
    assert sorted(coordinating.leaders.shown) == [(A, 2), (B, 2)]


async def test_a_number_is_above_all_that_shards_know(coordinating: Coordinating) -> None:
    await coordinating.commit(A)
    coordinating.leaders.newest = 40
    await coordinating.commit(A)
    await coordinating.commit(A)
    assert [number for _, number, _ in coordinating.leaders.applied] == [1, 41, 42]


async def test_what_a_leader_refuses_is_not_decided(coordinating: Coordinating) -> None:
    coordinating.leaders.refusal = UnavailableError("No room.")
    with pytest.raises(UnavailableError, match="No room"):
        await coordinating.commit(A, acknowledged=[b"acme/payments/c:1"])
    assert len(coordinating.home.coordinator.state) == 0 and coordinating.leaders.applied == []


async def test_a_new_leader_prepares_only_once_the_last_ones_acknowledgements_are_applied(
    coordinating: Coordinating,
) -> None:
    leaders = coordinating.leaders
    leaders.may_apply.clear()
    first = asyncio.ensure_future(coordinating.commit(acknowledged=[b"acme/payments/c:1"]))
    await until(lambda: coordinating.home.coordinator.owed_count)
    leaders.epoch = 2
    with pytest.raises(UnavailableError, match="not applied there yet"):
        await coordinating.commit(acknowledged=[b"acme/payments/c:2"])
    await until(lambda: leaders.abandoned == [b"acme/payments/c:2"])
    leaders.may_apply.set()
    await first
    await coordinating.commit(acknowledged=[b"acme/payments/c:2"])


async def test_the_next_term_carries_on_what_was_decided_and_drops_what_was_open(
    coordinating: Coordinating,
) -> None:
    leaders, coordinator = coordinating.leaders, coordinating.home.coordinator
    leaders.may_apply.clear()
    opened = coordinating.home.begin()
    coordinating.home.stage(opened, 0, A, b"open")
    committing = asyncio.ensure_future(coordinating.commit(A, B))
    await until(lambda: coordinator.owed_count)
    await coordinating.end()
    with pytest.raises(UnavailableError) as moved:
        await committing
    assert moved.value.code is Code.NOT_LEADER and coordinator.elsewhere is not None
    leaders.may_apply.set()
    await coordinator.lead(coordinating.stream)
    (owed,) = coordinator.state.owed
    found = await coordinator.commit(OWNER, owed.committed.id, 2, coordinating.home.clock)
    assert found.offsets == ((7,), (7,))
    with pytest.raises(RequestError) as aborted:
        await coordinator.commit(OWNER, opened, 1, coordinating.home.clock)
    assert aborted.value.code is Code.TRANSACTION_ABORTED


async def test_a_journal_that_is_read_anew_while_its_term_ends_says_nothing_to_the_next_one(
    coordinating: Coordinating, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = coordinating.home.coordinator
    await coordinating.commit(A)
    journal = coordinator._journal
    assert journal is not None
    replay, is_read, may_end = journal.replay, asyncio.Event(), asyncio.Event()

    async def late() -> AsyncIterator[bytes]:
        async for entry in replay():
            yield entry
        is_read.set()
        await may_end.wait()

    monkeypatch.setattr(journal, "replay", late)
    journal._lost = UnavailableError("refused")
    asking = asyncio.ensure_future(coordinator.abort(OWNER, b"x" * 16))
    await is_read.wait()
    await coordinating.end()
    await coordinator.lead(coordinating.stream)
    state = coordinator.state
    may_end.set()
    with pytest.raises(NotLeaderError):
        await asking
    assert coordinator.state is state
    await coordinating.commit(B)


# -- the leader's end


class Links:
    """What is served here, and what the coordinator would answer."""

    def __init__(self) -> None:
        self.handlers: dict[type[PeerRequest], Callable[[str, Any], Awaitable[msgspec.Struct]]] = {}
        self.asked: list[PeerRequest] = []
        self.may_be = True
        self.coordinator = Leader("b2", "", 1)

    def serve(self, request: type[PeerRequest], handler: Callable[[str, Any], Awaitable[Any]]) -> None:
        self.handlers[request] = handler

    async def ask(self, peer: str, request: PeerRequest, answer: type, **_: object) -> Decision:
        self.asked.append(request)
        return Decision(self.may_be)

    def leader_of(self, record: object, shard: int) -> str:
        return "b2"

    def leader(self, record: object, shard: int) -> Leader:
        return self.coordinator

    async def do(self, request: PeerRequest, peer: str = "b2") -> Any:
        """As a coordinator asks, over the wire's encoding."""
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request))
        return await self.handlers[type(request)](peer, decoded)


class Leading:
    def __init__(self, home: Home, step: Step = lambda _: None) -> None:
        self.home, self.links, self.jobs = home, Links(), Jobs()
        self.lanes = Lanes(
            home.broker,
            cast(Clustered, self.links),
            cast(PeerRequests, self.links),
            {"jobs": self.jobs},
            lambda _: True,
            step,
        )

    def hosted(self, name: str = A) -> HostedStream:
        found = self.home.streams.get(StreamName.parse(name))
        assert found is not None
        return found

    async def apply(self, number: int, *payloads: bytes, term: int = 1, acknowledged: bytes = b"") -> Any:
        incarnation = self.hosted().record.incarnation
        parts = [
            Placed(
                Part(
                    number,
                    index,
                    A,
                    bytes.fromhex(incarnation),
                    0,
                    encode_batch([NewRecord(payload)], shard=0).encode(),
                ),
                index,
            )
            for index, payload in enumerate(payloads)
        ]
        some = [Acknowledged("jobs", acknowledged)] if acknowledged else []
        return await self.links.do(ApplyLane(A, incarnation, term, number, parts, some))

    async def show(self, number: int) -> None:
        await self.links.do(ShowLane(A, self.hosted().record.incarnation, number))


@pytest.fixture
async def leading(home: Home) -> AsyncIterator[Leading]:
    made = Leading(home)
    await home.broker.ensure_stream(TRANSACTIONS_STREAM, StreamConfig())
    yield made
    await made.lanes.close()


async def test_what_is_applied_is_hidden_until_it_is_to_be_shown_and_stands_once(leading: Leading) -> None:
    home = leading.home
    assert await leading.apply(1, b"0", b"1") == LaneApplied([(0,), (1,)])
    # Asked again, as by a coordinator that did not hear the answer, or its successor.
    assert await leading.apply(1, b"0", b"1") == LaneApplied([(0,), (1,)])
    leading.links.coordinator = Leader("b2", "", 2)
    assert await leading.apply(1, b"0", b"1", term=2) == LaneApplied([(0,), (1,)])
    await home.publish(A, b"between")
    assert await home.records(A) == []
    await leading.show(1)
    assert await home.records(A) == [b"0", b"1", b"between"]
    # One that came late hides nothing.
    await leading.apply(1, b"0", b"1", term=2)
    assert len(await home.records(A)) == 3
    for term in (1, 3):
        with pytest.raises(UnavailableError, match=f"in epoch {term}"):
            await leading.apply(2, b"late", term=term)
    incarnation = leading.hosted().record.incarnation
    assert await leading.links.do(CheckLane(A, incarnation, [0, 1])) == LaneChecked(1)


async def test_who_does_not_coordinate_has_nothing_done(leading: Leading) -> None:
    incarnation, links = leading.hosted().record.incarnation, leading.links
    await links.do(PrepareAcknowledgements(A, "jobs", str(OWNER), b"0", b"t" * 16))
    await leading.apply(1, b"hidden")
    batch = encode_batch([NewRecord(b"forged")], shard=0).encode()
    part = Part(2, 0, A, bytes.fromhex(incarnation), 0, batch)
    for peer in ("b3", "", "b1"):
        for request in (
            CheckLane(A, incarnation, [0]),
            ApplyLane(A, incarnation, 1, 2, [Placed(part, 0)], [Acknowledged("jobs", b"0")]),
            ApplyLane(A, incarnation, 1 << 62, 0, [], []),
            ShowLane(A, incarnation, 1),
            PrepareAcknowledgements(A, "jobs", str(OWNER), b"1", b"u" * 16),
            AbandonAcknowledgements("jobs", b"0"),
        ):
            with pytest.raises(UnavailableError, match="coordinates transactions"):
                await links.do(request, peer)
    assert leading.jobs.prepared == [b"0"] and not leading.jobs.applied
    assert await leading.home.records(A) == []
    await leading.show(1)
    assert await leading.home.records(A) == [b"hidden"]


async def test_a_stream_that_says_that_it_is_far_ahead_is_believed_for_no_other(
    coordinating: Coordinating,
) -> None:
    coordinating.leaders.newest = (1 << 64) - 1
    with pytest.raises(UnavailableError, match="says that it has transaction"):
        await coordinating.commit(A)
    coordinating.leaders.newest = 1 << 31
    assert await coordinating.commit(B)
    number = (1 << 31) + 1
    assert coordinating.leaders.applied == [(B, number, [number])]


async def test_what_is_asked_at_a_time_is_bounded_and_acknowledgements_come_last(home: Home) -> None:
    hosted = home.streams.get(StreamName.parse(A))
    assert hosted is not None
    parts = [Part(1, number, A, hosted.incarnation, number % 2, bytes(1 << 20)) for number in range(5)]
    acknowledged = [Acknowledged("jobs", b"%d" % number + bytes(1 << 20)) for number in range(5)]

    class Answering(Links):
        async def ask(self, peer: str, request: PeerRequest, answer: type, **_: object) -> Any:
            assert isinstance(request, ApplyLane)
            self.asked.append(request)
            return LaneApplied([(each.part.index,) for each in request.parts])

    links = Answering()
    leaders = StreamLeaders(home.broker, cast(Clustered, links), cast(PeerRequests, links))
    offsets = await leaders.apply(A, 1, parts, acknowledged, 1)
    assert offsets == {(1, number): (number,) for number in range(5)}
    asked = [request for request in links.asked if isinstance(request, ApplyLane)]
    for request in asked:
        assert len(msgspec.msgpack.encode(request)) < ASK_BYTES + 1_000
    assert [each.part.index for request in asked for each in request.parts] == [0, 2, 4, 1, 3]
    assert [each for request in asked for each in request.acknowledged] == acknowledged
    assert [bool(request.parts) for request in asked] == [True, True, False]
    assert await leaders.apply(A, 1, [], [], 2) == {} and links.asked[-1] == ApplyLane(
        A, hosted.record.incarnation, 1, 2, [], []
    )


async def test_what_nobody_shows_is_shown_after_a_while(
    leading: Leading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "HIDDEN_S", 0.01)
    await leading.apply(1, b"0")
    await until(lambda: leading.home.shard(A).high_watermark == 1)


async def test_what_a_transaction_needs_is_refused_before_it_is_decided(leading: Leading) -> None:
    incarnation = leading.hosted().record.incarnation
    with pytest.raises(UnavailableError, match="does not know this incarnation"):
        await leading.links.do(CheckLane(A, "00" * 16, [0]))
    leading.home.shard(A).stop(UnavailableError("broken"))
    with pytest.raises(UnavailableError, match="broken"):
        await leading.links.do(CheckLane(A, incarnation, [0]))


async def test_what_was_prepared_is_kept_until_its_coordinator_says_that_it_was_never_decided(
    leading: Leading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_module, "PREPARED_LOOK_S", 0.005)
    bodies = [f"{A}:{number}".encode() for number in range(3)]
    for body in bodies:
        await leading.links.do(PrepareAcknowledgements(A, "jobs", str(OWNER), body, b"t" * 16))
    # One whose answer was lost, and that is asked again, has reserved nothing against itself.
    await leading.links.do(PrepareAcknowledgements(A, "jobs", str(OWNER), bodies[2], b"t" * 16))
    assert leading.jobs.prepared == bodies
    await leading.apply(1, acknowledged=bodies[0])
    await leading.links.do(AbandonAcknowledgements("jobs", bodies[1]))
    assert leading.jobs.applied == [bodies[0]] and leading.jobs.prepared == [bodies[0], bodies[2]]
    await until(lambda: len(leading.links.asked) > 1)
    assert set(leading.links.asked) == {AskDecision(b"t" * 16)} and bodies[2] in leading.jobs.prepared
    leading.links.may_be = False
    await until(lambda: leading.jobs.prepared == [bodies[0]])


async def test_what_a_coordinator_of_the_same_broker_had_under_way_when_it_ended_stands_once(
    home: Home,
) -> None:
    """Its term ends while an append waits for the disk, as a full one; the next coordinator asks for the same."""
    asking: list[asyncio.Task[Any]] = []
    leading = Leading(home, lambda step: asking[0].cancel() if step == "appended" and asking else None)
    await home.broker.ensure_stream(TRANSACTIONS_STREAM, StreamConfig())
    requests = PeerRequests("b2")
    requests.serve(ApplyLane, leading.links.handlers[ApplyLane])

    async def ask(request: PeerRequest, peer: str = "b2") -> LaneApplied:
        return await requests.ask(peer, request, LaneApplied)

    first = leading.hosted().shard(0)
    leading.links.do = ask  # type: ignore[method-assign]
    asking.append(asyncio.ensure_future(leading.apply(1, b"0")))
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    assert first.log_end_offset == 1 and first.high_watermark == 0
    asking.clear()
    assert await leading.apply(1, b"0") == LaneApplied([(0,)])
    assert first.log_end_offset == 1
    await requests.close()
    await leading.lanes.close()
