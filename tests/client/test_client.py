"""The client's session: connecting, requests, reconnecting, leaving."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from client.conftest import ORDERS, connected, until
from client.scripted_broker import BrokerSession, ScriptedBroker, ScriptedEngine, profile

import felix
from felix import Code, FelixError, ProtocolError, RequestError, UnavailableError, connection, routing
from felix.backoff import Backoff
from felix.connection import RegionConnection
from felix.errors import NotLeaderError
from felix.messages import DescribeStream, Done, Limits, Request, RotateKeys
from felix.transport.memory import MemoryConnection


async def test_a_session_says_who_answered_and_as_whom_we_came(region: felix.RegionClient) -> None:
    session = region.session
    assert (session.region, session.mesh, session.broker) == ("us-east", "acme", "b1")
    assert session.identity == "spiffe://us-east.acme/client/app"
    assert session.rights == ("publish */*/*",)
    assert str(session.address) == "broker:7443"
    assert region.is_connected


async def test_streams_are_created_described_and_listed_page_after_page(region: felix.RegionClient) -> None:
    for name in ("a", "b", "c", "d"):
        await region.create_stream(f"acme/ops/{name}", shards=2)
    assert [state.stream async for state in region.list_streams()] == [
        "acme/ops/a", "acme/ops/b", "acme/ops/c", "acme/ops/d", ORDERS,
    ]  # fmt: skip
    assert (await region.stream("acme/ops/a").describe()).shards == 2


async def test_a_refusal_comes_as_the_error_that_it_is(region: felix.RegionClient) -> None:
    with pytest.raises(RequestError) as caught:
        await region.describe_stream("acme/ops/nothing")
    assert caught.value.code is Code.NOT_FOUND_OR_FORBIDDEN
    assert caught.value.hint == "Create it."
    with pytest.raises(RequestError, match="exists"):
        await region.create_stream(ORDERS)


async def test_an_answer_of_the_wrong_kind_is_the_brokers_fault(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    def odd(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
        session.answer(correlation, Done())
        return True

    broker.on_request = odd
    with pytest.raises(ProtocolError, match="DescribeStream with a Done"):
        await region.describe_stream(ORDERS)


async def test_answers_come_in_any_order(region: felix.RegionClient, broker: ScriptedBroker) -> None:
    asked: list[tuple[BrokerSession, str, int]] = []

    def keep(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
        assert isinstance(request, RotateKeys)
        asked.append((session, request.stream, correlation))
        if len(asked) == 3:
            for each, stream, number in reversed(asked):
                each.answer(number, Done(stream))
        return True

    broker.on_request = keep
    notes = await asyncio.gather(*(region.rotate_keys("data", f"acme/ops/{n}") for n in "abc"))
    assert notes == ["acme/ops/a", "acme/ops/b", "acme/ops/c"]


async def test_an_answer_to_a_cancelled_request_is_ignored(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    asked = asyncio.Event()
    held: list[int] = []

    def hold(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
        held.append(correlation)
        asked.set()
        return len(held) == 1

    broker.on_request = hold
    task = asyncio.create_task(region.describe_stream(ORDERS))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    broker.session.answer(held[0], Done("too late"))
    assert (await region.describe_stream(ORDERS)).stream == ORDERS


async def test_no_more_requests_are_open_than_the_broker_allows(broker: ScriptedBroker) -> None:
    broker.limits = Limits(1 << 20, 8, 8, 2)
    open_now: list[tuple[BrokerSession, int]] = []
    most = 0

    def slow(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
        nonlocal most
        open_now.append((session, correlation))
        most = max(most, len(open_now))
        asyncio.get_running_loop().call_later(0.005, lambda: session.answer(open_now.pop()[1], Done()))
        return True

    async with connected(broker) as region:
        broker.on_request = slow
        await asyncio.gather(*(region.put_rights("x", []) for _ in range(9)))
    assert most == 2


async def test_a_safe_request_is_asked_again_after_a_lost_connection(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    def crash_once(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
        broker.on_request = None
        session.drop()
        return True

    broker.on_request = crash_once
    assert (await region.describe_stream(ORDERS)).stream == ORDERS
    assert [type(r) for r in broker.requests] == [DescribeStream, DescribeStream]
    assert region.reconnects == 1


async def test_an_attempt_that_fails_in_a_way_nobody_thought_of_is_not_the_last_one(
    region: felix.RegionClient, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whatever lives on the region waits for a link that nobody makes."""
    connect, failures = ScriptedEngine.connect, [RuntimeError("can't start new thread"), OSError("odd")]

    async def fail(self: ScriptedEngine, *args: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return await connect(self, *args, **more)

    async with region.stream(ORDERS).publisher(deadline_ms=5_000) as publisher:
        assert await publisher.publish(b"a") == 0
        monkeypatch.setattr(ScriptedEngine, "connect", fail)
        broker.session.drop()
        assert await publisher.publish(b"b") == 1
    assert not failures
    assert region.reconnects == 1


async def test_an_unsafe_request_is_not_asked_twice_and_says_that_nobody_knows(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    def crash(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
        session.drop()
        return True

    broker.on_request = crash
    with pytest.raises(UnavailableError) as caught:
        await region.create_stream("acme/ops/new")
    assert caught.value.code is Code.DISCONNECTED
    assert "not known" in caught.value.hint
    assert len(broker.requests) == 1


async def test_a_request_waits_while_the_broker_is_away(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.down = True
    broker.session.drop()
    task = asyncio.create_task(region.create_stream("acme/ops/new"))
    await asyncio.sleep(0.03)
    assert not task.done()
    broker.down = False
    assert (await task).stream == "acme/ops/new"


async def test_a_request_that_is_never_answered_times_out(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broker.on_request = lambda *_: True
    with pytest.raises(UnavailableError, match="was not answered") as caught:
        await region.request(DescribeStream(ORDERS), timeout_s=0.05)
    assert caught.value.code is Code.TIMEOUT


async def test_the_addresses_are_tried_in_turn(broker: ScriptedBroker) -> None:
    engine = ScriptedEngine(second=broker)
    async with felix.connect(profile=profile("first:1", "second:2"), engine=engine) as region:
        assert str(region.session.address) == "second:2"
    assert engine.attempts == ["first", "second"]


async def test_nobody_answering_says_what_to_do(broker: ScriptedBroker) -> None:
    broker.down = True
    with pytest.raises(UnavailableError, match="felix region up us-east") as caught:
        await connected(broker, connect_timeout_s=0.05).open()
    assert caught.value.sentence.startswith("No broker of region us-east answered at broker:7443")


DAY_MS = 24 * 3_600_000


@pytest.mark.parametrize("ahead_ms", [-DAY_MS, 1_000 * DAY_MS])
async def test_a_broker_whose_clock_is_wrong_keeps_nobody_from_the_others(ahead_ms: int) -> None:
    brokers = {name: ScriptedBroker() for name in ("first", "second", "third")}
    brokers["first"].clock_ahead_ms = ahead_ms
    engine = ScriptedEngine(**brokers)
    async with felix.connect(
        profile=profile("first:1", "second:2", "third:3"),
        engine=engine,
        backoff=felix.BackoffPolicy(first_ms=1, ceiling_ms=4),
    ) as region:
        assert str(region.session.address) == "second:2"
        brokers["third"].down = True
        brokers["second"].session.goodbye()
        await until(lambda: region.reconnects)
        assert str(region.session.address) == "second:2"
    assert engine.attempts == ["first", "second", "third", "first", "second"]


@pytest.mark.parametrize("right", [0, 1])
async def test_an_identity_that_most_brokers_call_expired_is_refused(right: int) -> None:
    brokers = {name: ScriptedBroker() for name in ("first", "second", "third")}
    for name in list(brokers)[: 3 - right]:
        brokers[name].clock_ahead_ms = 1_000 * DAY_MS
    engine = ScriptedEngine(**brokers)
    with pytest.raises(RequestError, match="expired") as caught:
        await felix.connect(profile=profile("first:1", "second:2", "third:3"), engine=engine).open()
    assert caught.value.code is Code.IDENTITY_EXPIRED
    assert engine.attempts == ["first", "second"]


async def test_one_broker_that_calls_an_identity_expired_is_heard_where_no_other_answers() -> None:
    broker = ScriptedBroker()
    broker.clock_ahead_ms = 1_000 * DAY_MS
    client = felix.connect(
        profile=profile("first:1", "second:2", "third:3"),
        engine=ScriptedEngine(first=broker),
        backoff=felix.BackoffPolicy(first_ms=1, ceiling_ms=4),
        connect_timeout_s=0.05,
    )
    with pytest.raises(RequestError, match="expired"):
        await client.open()


async def test_a_request_that_nobody_answers_says_why_the_broker_that_is_there_lets_nobody_in() -> None:
    """One of two is gone, and by the clock of the other one the identity does not hold: neither half of them says so, so it is asked again and again."""
    engine = ScriptedEngine(first=ScriptedBroker(), second=ScriptedBroker())
    client = felix.connect(
        profile=profile("first:1", "second:2"),
        engine=engine,
        backoff=felix.BackoffPolicy(first_ms=1, ceiling_ms=4),
        request_timeout_s=0.3,
    )
    async with client:
        engine.brokers["first"].create(ORDERS)
        publisher = client.stream(ORDERS).publisher(deadline_ms=300)
        await publisher.open()
        engine.brokers["second"].clock_ahead_ms = 1_000 * DAY_MS
        engine.brokers["first"].down = True
        engine.brokers["first"].session.drop()
        with pytest.raises(
            UnavailableError, match=r"Of the broker at second:2: The certificate .* expired"
        ) as caught:
            await client.describe_stream(ORDERS)
        assert caught.value.code is Code.TIMEOUT
        with pytest.raises(
            UnavailableError, match=r"no session .*of the broker at second:2: The certificate .* expired"
        ):
            await publisher.publish(b"x")
        # Once it lets clients in again, nothing is left of it.
        engine.brokers["second"].clock_ahead_ms = 0
        engine.brokers["second"].create(ORDERS)
        await client.describe_stream(ORDERS)
        assert not client.connection.why_unreached.startswith("Of the broker at second")


class SilentEngine(ScriptedEngine):
    """At addresses of no scripted broker there is somebody who never answers, as a machine that is off."""

    async def connect(self, host: str, port: int, *more: object, **how: object) -> MemoryConnection:
        if host not in self.brokers:
            self.attempts.append(host)
            await asyncio.Event().wait()
        return await super().connect(host, port, *more, **how)


async def test_silent_brokers_leave_time_for_the_one_that_answers(broker: ScriptedBroker) -> None:
    engine = SilentEngine(last=broker)
    first, second, last = "first:7443", "second:7443", "last:7443"
    client = felix.connect(profile=profile(first, second, last), engine=engine, connect_timeout_s=1.5)
    async with client:
        assert await client.stream(ORDERS).publish(b"a") == 0
    assert engine.attempts[-1] == "last" and set(engine.attempts) <= {"first", "second", "last"}


async def test_another_region_behind_the_address_gets_no_proof() -> None:
    elsewhere = ScriptedBroker(region="eu-west")
    with pytest.raises(RequestError) as caught:
        await connected(elsewhere).open()
    assert caught.value.code is Code.WRONG_REGION


async def test_another_mesh_behind_the_address_gets_no_proof() -> None:
    elsewhere = ScriptedBroker(mesh="globex")
    with pytest.raises(RequestError, match="globex") as caught:
        await connected(elsewhere).open()
    assert caught.value.code is Code.WRONG_REGION


async def test_a_proof_for_another_certificate_is_refused_by_the_broker(broker: ScriptedBroker) -> None:
    engine = ScriptedEngine(broker=broker)
    broker.leaf_sha256 = bytes(32)
    with pytest.raises(RequestError) as caught:
        await felix.connect(profile=profile(), engine=engine).open()
    assert caught.value.code is Code.IDENTITY_REFUSED


async def test_goodbye_moves_the_client_to_the_next_broker(broker: ScriptedBroker) -> None:
    second = ScriptedBroker()
    second.streams = broker.streams
    engine = ScriptedEngine(first=broker, second=second)
    async with felix.connect(
        profile=profile("first:1", "second:2"),
        engine=engine,
        backoff=felix.BackoffPolicy(first_ms=1, ceiling_ms=4),
    ) as region:
        broker.session.goodbye()
        await until(lambda: region.reconnects)
        assert (await region.describe_stream(ORDERS)).stream == ORDERS
        assert str(region.session.address) == "second:2"
    assert broker.session.closed_with is not None


async def test_an_answer_under_way_at_goodbye_still_arrives(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    def leave_first(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
        session.goodbye()
        asyncio.get_running_loop().call_later(0.02, lambda: session.answer(correlation, Done("still here")))
        return True

    broker.on_request = leave_first
    assert await region.rotate_keys("root") == "still here"


async def test_what_breaks_the_protocol_ends_the_session_and_another_is_made(
    region: felix.RegionClient, broker: ScriptedBroker
) -> None:
    broken = broker.session
    broken.connection.send(broken.control, b"\xff" * 12)
    await until(lambda: region.reconnects)
    assert broken.closed_with is not None
    assert broken.closed_with[0] == Code.FRAME_UNKNOWN
    assert (await region.describe_stream(ORDERS)).stream == ORDERS


async def test_a_closed_client_says_so(broker: ScriptedBroker) -> None:
    region = connected(broker)
    with pytest.raises(RequestError, match="not connected"):
        await region.describe_stream(ORDERS)
    await region.open()
    await region.close()
    await region.close()
    with pytest.raises(UnavailableError, match="closed"):
        await region.describe_stream(ORDERS)


def test_a_client_is_of_a_region_or_a_profile_not_both() -> None:
    with pytest.raises(RequestError):
        felix.connect()
    with pytest.raises(RequestError):
        felix.connect("us-east", profile=profile())


async def test_a_ping_is_answered(region: felix.RegionClient, broker: ScriptedBroker) -> None:
    broker.session.ping()
    assert (await region.describe_stream(ORDERS)).stream == ORDERS


async def test_a_leader_is_followed_to_an_address_that_the_profile_gives_without_its_port() -> None:
    held = RegionConnection(profile("broker", "10.0.0.1:7444"), profile_only=True)
    may_call = held._routes.may_call
    assert may_call("broker:7443") and may_call("10.0.0.1:7444")
    assert not may_call("broker:7444") and not may_call("other:7443")


# -- several brokers -----------------------------------------------------------------------------------------


async def test_a_request_that_nobody_was_asked_is_asked_again_whatever_it_is(
    region: felix.RegionClient, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ANSWER_S", 0.01)
    led = [NotLeaderError("b2 leads.", stream=ORDERS, leader="b2", address="nobody:7443", epoch=1)]

    def refused_once(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
        if not led:
            return False
        session.refuse(correlation, led.pop())
        return True

    broker.on_request = refused_once
    await region.create_stream("acme/payments/refunds")
    assert "acme/payments/refunds" in broker.streams


async def test_a_broker_that_leaves_for_long_keeps_nobody_from_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "GOODBYE_PAUSE_MS_MAX", 3_600_000)
    brokers = {name: ScriptedBroker() for name in ("one", "two")}
    async with felix.connect(
        profile=profile(*(f"{name}:7443" for name in brokers)), engine=ScriptedEngine(**brokers)
    ) as client:
        brokers["one"].session.goodbye(reconnect_after_ms=3_600_000)
        await until(lambda: client.session.address.host == "two")


@pytest.mark.parametrize("reads", [True, False])
async def test_waits_for_a_leader_grow_over_all_brokers_that_are_asked(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "ELSEWHERE_S", 0.005)
    failures: list[int] = []

    def noted(self: Backoff, error: FelixError | None, *, after_ms: Any = Backoff.after_ms) -> int:
        failures.append(self.failures)
        waited_ms: int = after_ms(self, error)
        return waited_ms

    monkeypatch.setattr(Backoff, "after_ms", noted)
    brokers = {name: ScriptedBroker() for name in ("one", "two")}
    asked: list[str] = []

    def nobody_leads(session: BrokerSession, request: Request[Any], correlation: int) -> bool:
        if max(failures, default=0) > 10:
            return False
        asked.extend(name for name, broker in brokers.items() if session in broker.sessions)
        session.refuse(correlation, NotLeaderError("Nobody leads.", stream=ORDERS, retry_after_ms=1))
        return True

    for broker in brokers.values():
        broker.create(ORDERS)
        broker.on_request = nobody_leads
    async with felix.connect(
        profile=profile(*(f"{name}:7443" for name in brokers)),
        engine=ScriptedEngine(**brokers),
        backoff=felix.BackoffPolicy(first_ms=1, ceiling_ms=4),
    ) as client:
        if reads:
            async with client.stream(ORDERS).subscribe("earliest"):
                pass
        else:
            async with client.stream(ORDERS).publisher():
                pass
    assert {*asked} == {*brokers}, "nobody who names no leader is asked for ever"
