"""Quotas at a broker: slowed down without loss, refused with a code and when to try again, changed while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import pytest
import uvloop
from prometheus_client import CollectorRegistry, generate_latest
from region_home import make_region, running
from region_peer import client, raw_peer, take, until

import felix
from felix import Code, RequestError, UnavailableError
from felix.messages import DescribeStream, ListQuotas, ListStreams, QuotaPage
from felix.quota import QuotaLimits
from felix.sync import connect as connect_sync
from policy.quantity import Rate
from region.config import IdentityQuota, QuotasConfig, TenantQuota
from region.folder import RegionFolder
from region.limits.quota import Meter, Throttle
from region.metrics import BrokerCollector
from region.node import Node
from region.session.client_session import ClientSession

CREW = "acme/ops/crew"
ORDERS = "spiffe://us-east.acme/client/orders-svc"


async def allow(operator: felix.RegionClient, *rights: str) -> None:
    await operator.put_rights(ORDERS, list(rights))


async def test_a_publisher_over_its_rate_is_slowed_down_and_loses_nothing(
    node: Node, operator: felix.RegionClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Faster than its rate in bytes from the first window on; everything arrives, once, in order, and it knows why."""
    await operator.create_stream(CREW)
    await operator.put_quota("tenant", "acme", QuotaLimits(publish_bytes=2 << 20))
    async with operator.stream(CREW).subscribe("earliest") as reader:
        reading = asyncio.ensure_future(take(reader, 1000))
        async with operator.stream(CREW).publisher(batch_bytes=64 << 10) as publisher:
            for number in range(1000):
                await publisher.send(b"%06d" % number + bytes(6000))
            await publisher.flush()
            # Idempotent retries: what was refused meanwhile is not in the log twice.
        records = await reading
    assert [bytes(record.payload[:6]) for record in records] == [b"%06d" % n for n in range(1000)]
    assert "publish_bytes slows this session down: tenant acme may 2097152 per second" in caplog.text
    (state,) = await operator.list_quotas("tenant", "acme")
    assert state.throttled_ms["publish_bytes"] > 0
    account = node.broker.quotas.find("tenant", "acme")
    assert account is not None
    assert account.totals["publish_records"] == account.totals["delivery_records"] == 1000


async def test_a_debt_that_is_too_long_is_refused_and_the_publisher_tries_again(
    node: Node, operator: felix.RegionClient
) -> None:
    await operator.create_stream(CREW)
    await operator.put_quota("tenant", "acme", QuotaLimits(publish_records=100))
    async with operator.stream(CREW).publisher(batch_records=50) as publisher:
        for number in range(800):
            await publisher.send(b"%d" % number)
        await publisher.flush()
        assert publisher.batches_resent
    assert node.broker.metrics.refusals["limit_rate"]
    async with operator.stream(CREW).subscribe("earliest") as reader:
        assert [int(bytes(r.payload)) for r in await take(reader, 800)] == list(range(800))


async def test_a_raised_quota_lets_what_waits_go_on(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(CREW)
    await operator.put_quota("tenant", "acme", QuotaLimits(publish_bytes=100_000))
    publisher = operator.stream(CREW).publisher(batch_bytes=64 << 10)
    await publisher.open()
    filling = asyncio.ensure_future(publisher.send_many([bytes(60_000)] * 100))
    await until(lambda: operator.throttled)
    await operator.delete_quota("tenant", "acme")
    await filling
    await publisher.close()
    budget = node.broker.budgets.publish
    await until(lambda: not budget.used_bytes)


async def test_the_window_goes_back_once_what_is_withheld_is_released(
    node: Node, operator: felix.RegionClient
) -> None:
    await operator.create_stream(CREW)
    await operator.put_quota("tenant", "acme", QuotaLimits(publish_bytes=20_000))
    async with operator.stream(CREW).publisher() as publisher:
        await publisher.publish(bytes(40_000))
    budget = node.broker.budgets.publish
    assert budget.used_bytes, "credit is withheld"
    await until(lambda: not budget.used_bytes)


async def test_delivery_is_paced_for_one_tenant_and_not_for_another(
    node: Node, operator: felix.RegionClient
) -> None:
    for name in (CREW, "globex/ops/crew"):
        await operator.create_stream(name)
        async with operator.stream(name).publisher(batch_records=2) as publisher:
            await publisher.publish_many([bytes(10_000)] * 60)
    await operator.put_quota("tenant", "acme", QuotaLimits(delivery_bytes=300_000))
    async with operator.stream(CREW).subscribe("earliest") as slow:
        reading = asyncio.ensure_future(take(slow, 60))
        async with operator.stream("globex/ops/crew").subscribe("earliest") as fast:
            assert len(await take(fast, 60)) == 60
        assert [record.offset for record in await reading] == list(range(60))
    account = node.broker.quotas.find("tenant", "acme")
    assert account is not None
    assert node.broker.quotas.throttled_ms(account)["delivery_bytes"] > 0
    other = node.broker.quotas.find("tenant", "globex")
    assert other is not None
    assert not node.broker.quotas.throttled_ms(other)


async def test_what_cannot_be_slowed_down_is_refused_with_its_code(
    node: Node, operator: felix.RegionClient
) -> None:
    await operator.create_stream(CREW)
    await allow(operator, "publish acme/*/*", "subscribe acme/*/*", "admin acme/*/*")
    limits = QuotaLimits(sessions=1, subscriptions=1, streams=2)
    await operator.put_quota("tenant", "acme", limits)
    waits = {"request_timeout_s": 0.3}
    async with (
        client(node.folder, "orders-svc", **waits) as one,
        client(node.folder, "orders-svc", **waits) as two,
    ):
        async with one.stream(CREW).subscribe("latest"):
            with pytest.raises(UnavailableError) as caught:
                await one.stream(CREW).subscribe("latest").open()
            assert caught.value.code is Code.LIMIT_SUBSCRIPTIONS
            for opening in (
                two.stream(CREW).subscribe("latest").open(),
                two.stream(CREW).publisher().open(),
            ):
                with pytest.raises(UnavailableError) as caught:
                    await opening
                assert caught.value.code is Code.LIMIT_SESSIONS
                assert caught.value.retry_after_ms
        one.connection.request_timeout_s = 60.0  # what follows waits for the disk, and for nobody's leave
        await one.create_stream("acme/ops/second")
        with pytest.raises(UnavailableError) as caught:
            await one.create_stream("acme/ops/third")
        assert caught.value.code is Code.LIMIT_STREAMS
        # Its place is free again once it is gone.
        await one.delete_stream("acme/ops/second")
        await one.create_stream("acme/ops/third")
        # What one session has had open, it may have open again.
        async with one.stream(CREW).subscribe("latest"):
            pass
    refused = node.broker.quotas.find("tenant", "acme").refused  # type: ignore[union-attr]
    assert set(refused) == {"limit_sessions", "limit_subscriptions", "limit_streams"}


async def test_sessions_and_requests_of_an_identity(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(CREW)
    await allow(operator, "subscribe acme/*/*")
    await operator.put_quota("identity", ORDERS, QuotaLimits(sessions=1, requests=5))
    identity = felix.load_identity(node.folder.identity("orders-svc"))
    async with raw_peer(node.folder, node.address, identity=identity) as one:
        with pytest.raises(UnavailableError) as caught:
            async with raw_peer(node.folder, node.address, identity=identity):
                pass
        assert (caught.value.code, caught.value.retry_after_ms) == (Code.LIMIT_SESSIONS, 1000)
        mine = ListQuotas("identity", ORDERS)
        answer = await one.ask(mine, 1)
        assert isinstance(answer, QuotaPage)
        (state,) = answer.quotas
        assert (state.limits, state.used["sessions"]) == (QuotaLimits(sessions=1, requests=5), 1)
        with pytest.raises(RequestError) as refused:
            await one.ask(ListQuotas(), 2)
        assert refused.value.code is Code.FORBIDDEN
        with pytest.raises(UnavailableError) as caught:
            for number in range(3, 100):
                await one.ask(mine, number)
        assert caught.value.code is Code.LIMIT_RATE
        assert caught.value.retry_after_ms
    # The SDK waits as long as it is told to, and asks again.
    await until(lambda: len(node.broker.sessions) == 1)
    async with client(node.folder, "orders-svc") as again:
        for _ in range(7):
            await again.describe_stream(CREW)
    assert node.broker.metrics.refusals["limit_sessions"] >= 1


async def test_stored_bytes_are_refused_where_batches_enter_and_go_on_once_there_is_room(
    node: Node, operator: felix.RegionClient
) -> None:
    await operator.create_stream(CREW)
    await operator.put_quota("tenant", "acme", QuotaLimits(stored_bytes=200_000))
    async with raw_peer(node.folder, node.address):
        publisher = operator.stream(CREW).publisher(batch_bytes=50_000)
        await publisher.open()
        sending = asyncio.ensure_future(publisher.send_many([bytes(40_000)] * 8))
        await until(lambda: node.broker.metrics.refusals["limit_stored"])
        await sending
        (state,) = await operator.list_quotas("tenant", "acme")
        assert state.used["stored_bytes"] <= 200_000
        # Reading goes on, and so does publishing elsewhere.
        async with operator.stream(CREW).subscribe("earliest") as reader:
            assert len(await take(reader, 4)) == 4
        await operator.create_stream("globex/ops/crew")
        assert await operator.stream("globex/ops/crew").publish(b"x") == 0
        await operator.put_quota("tenant", "acme", QuotaLimits(), ["stored_bytes"])
        await publisher.close()
    assert (await operator.describe_stream(CREW)).state[0].log_end == 8


async def test_defaults_come_from_the_configuration_and_spare_the_operator(
    folder: RegionFolder, tmp_path: Path
) -> None:
    quotas = QuotasConfig(
        tenant=TenantQuota(publish_bytes=Rate(5 << 20), streams=1), identity=IdentityQuota(requests=3)
    )
    async with running(folder, data=str(tmp_path / "data"), quotas=quotas) as node, client(folder) as region:
        await region.create_stream(CREW)
        with pytest.raises(UnavailableError):
            await region.create_stream("acme/ops/second")
        await region.put_quota("tenant", "acme", QuotaLimits(streams=0))
        await region.create_stream("acme/ops/second")
        for _ in range(10):
            await region.describe_stream(CREW)
        (state,) = await region.list_quotas("tenant", "acme")
        assert (state.in_force.publish_bytes, state.in_force.streams) == (5 << 20, 0)
        assert state.used["streams"] == 2
        await region.put_rights(ORDERS, ["subscribe acme/*/*"])
        async with raw_peer(
            folder, node.address, identity=felix.load_identity(folder.identity("orders-svc"))
        ) as peer:
            for number in range(1, 4):
                await peer.ask(ListStreams(), number)
            with pytest.raises(UnavailableError) as caught:
                for number in range(4, 8):
                    await peer.ask(DescribeStream(CREW), number)
            assert caught.value.code is Code.LIMIT_RATE


async def test_quotas_survive_a_restart(folder: RegionFolder, tmp_path: Path) -> None:
    async with running(folder, data=str(tmp_path / "data")), client(folder) as region:
        await region.put_quota("tenant", "acme", QuotaLimits(streams=0, sessions=7))
        await region.put_quota("identity", ORDERS, QuotaLimits(requests=9))
    async with running(folder, data=str(tmp_path / "data")), client(folder) as region:
        found = {(state.scope, state.name): state.limits for state in await region.list_quotas()}
        assert found["tenant", "acme"] == QuotaLimits(streams=0, sessions=7)
        assert found["identity", ORDERS] == QuotaLimits(requests=9)
        assert await region.delete_quota("tenant", "acme") == ""
        assert "no quota" in await region.delete_quota("tenant", "acme")


async def test_nothing_that_is_not_a_quota_is_written(node: Node, operator: felix.RegionClient) -> None:
    for scope, name, limits in (
        ("tenant", "no/tenant", QuotaLimits(streams=1)),
        ("identity", ORDERS, QuotaLimits(streams=1)),
        ("identity", "orders-svc", QuotaLimits(sessions=1)),
        ("identity", "spiffe://eu-west.acme/client/x", QuotaLimits(sessions=1)),
        ("planet", "acme", QuotaLimits(sessions=1)),
        ("tenant", "acme", QuotaLimits(sessions=-1)),
    ):
        with pytest.raises(RequestError):
            await operator.put_quota(scope, name, limits)
    await allow(operator, "admin acme/*/*")
    async with client(node.folder, "orders-svc") as other:
        for asked in (
            other.put_quota("tenant", "acme", QuotaLimits(streams=9)),
            other.delete_quota("tenant", "acme"),
        ):
            with pytest.raises(RequestError) as caught:
                await asked
            assert caught.value.code is Code.FORBIDDEN


async def test_metrics_name_tenants_up_to_a_number(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(CREW)
    await operator.put_quota("tenant", "acme", QuotaLimits(publish_records=5))
    await operator.stream(CREW).publish_many([b"x"] * 20)
    meter = node.broker.quotas.enter(ORDERS)
    for number in range(150):
        node.broker.quotas.use(meter, f"tenant-{number:03}").published(10, 1)
    registry = CollectorRegistry()
    registry.register(BrokerCollector(node.broker.metrics, dict, list, node.broker.quotas, list, dict))
    text = generate_latest(registry).decode()
    assert 'felix_tenant_used_total{limit="publish_records",tenant="acme"} 20.0' in text
    assert 'felix_tenant_throttled_seconds_total{limit="publish_records",tenant="acme"}' in text
    assert 'felix_tenant_used_total{limit="publish_records",tenant="other tenants"} 51.0' in text
    assert text.count("felix_tenant_used_total{") == 5 * 101


async def test_the_blocking_client_knows_what_slows_it_down(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(CREW)
    await operator.put_quota("tenant", "acme", QuotaLimits(publish_records=20))

    def publish() -> str:
        profile = felix.load_profile("us-east", home=node.folder.root.parent)
        with connect_sync(profile=profile) as region:
            region.stream(CREW).publish_many([b"x"] * 60)
            found = region.throttled
            assert found is not None
            return found.limit

    assert await asyncio.to_thread(publish) == "publish_records"


async def test_writes_into_a_cache_count_as_publishing_and_a_watch_as_a_subscription(
    node: Node, operator: felix.RegionClient
) -> None:
    cache = await operator.create_cache("acme/web/sessions")
    await operator.put_quota("tenant", "acme", QuotaLimits(stored_bytes=1_000, subscriptions=1))
    account = node.broker.quotas.find("tenant", "acme")
    assert account is not None
    async with cache.watch():
        assert account.held["subscriptions"] == 1
    await until(lambda: not account.held["subscriptions"])
    with pytest.raises(UnavailableError) as caught:
        await cache.put("a", bytes(2_000))
    assert caught.value.code is Code.LIMIT_STORED
    await operator.put_quota("tenant", "acme", QuotaLimits(), ["stored_bytes"])
    await cache.put("a", bytes(2_000))
    assert await cache.put_many({"b": b"1", "c": b"2"})
    assert await cache.delete_many(["b", "nothing"]) == 1
    assert account.totals["publish_records"] == 1 + 2 + 2
    assert account.totals["delivery_bytes"] > 0, "the watch was told that it is up to date"


async def test_transactions_of_an_identity_are_bounded(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(CREW)
    await allow(operator, "publish acme/*/*")
    await operator.put_quota("identity", ORDERS, QuotaLimits(transactions=1))
    async with client(node.folder, "orders-svc", request_timeout_s=2.0) as one:
        async with one.transaction() as first:
            await first.publish(CREW, b"x")
            (state,) = await one.list_quotas("identity", ORDERS)
            assert state.used["transactions"] == 1
            with pytest.raises(UnavailableError):
                async with one.transaction() as second:
                    await second.publish(CREW, b"y")
            assert node.broker.metrics.refusals["limit_open"]
        async with one.transaction() as third:
            await third.publish(CREW, b"z")
    (shard,) = (await operator.describe_stream(CREW)).state
    assert shard.log_end == 2


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_delivery_that_waits_for_less_than_a_timer_of_the_loop_may_be_told_to_wait_again(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """uvloop's handle of a time less than half a millisecond away knows no time."""

    async def waits() -> None:
        async with running(make_region(tmp_path, "us-east")) as node, client(node.folder) as operator:
            await operator.create_stream(CREW)
            async with operator.stream(CREW).subscribe("earliest") as reader:
                sessions = (each for each in node.broker.sessions if isinstance(each, ClientSession))
                (delivery,) = (each for session in sessions for each in session.subscriptions.values())
                account = node.broker.quotas.find("tenant", "acme")
                assert account is not None
                for _ in range(3):
                    delivery._wait(Throttle(1e-5, account, "delivery_bytes"))
                await operator.stream(CREW).publish(b"1")
                assert [record.payload for record in await take(reader, 1)] == [b"1"]

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(waits())


@pytest.mark.parametrize("opens", ["queue", "consumer"])
async def test_a_stream_that_comes_while_it_is_opened_is_charged_to_its_tenant(
    node: Node, operator: felix.RegionClient, monkeypatch: pytest.MonkeyPatch, opens: str
) -> None:
    """As one that another broker made a moment ago: where an exchange begins, it is not here yet."""
    await operator.create_queue("acme/ops/jobs")
    await operator.create_stream("acme/ops/orders")
    meter_for, begun = ClientSession.meter_for, list[str]()

    def not_yet(session: ClientSession, stream: str) -> Meter:
        begun.append(stream)
        standing = session._standing
        assert standing is not None
        return meter_for(session, stream) if begun.count(stream) > 1 else standing

    monkeypatch.setattr(ClientSession, "meter_for", not_yet)
    if opens == "queue":
        assert await operator.queue("acme/ops/jobs").lease(1, wait=0.01) == []
        opened: AbstractAsyncContextManager[object] = nullcontext()
    else:
        opened = operator.stream("acme/ops/orders").consumer("crew", start="earliest")
    async with opened:
        account = node.broker.quotas.find("tenant", "acme")
        assert account is not None and account.held["sessions"] == 1
