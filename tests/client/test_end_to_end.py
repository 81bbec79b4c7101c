"""The client against a real broker, over both engines: what an application does, and what it survives."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from client.conftest import until
from ports import claim_port
from region_home import forget_other_data

import felix
import felix.sync
from felix import Code, Durability, NewRecord, RequestError, UnavailableError
from felix.address import Address
from felix.names import shard_for_key
from felix.runtime.real import now_ms
from felix.transport.port import ENGINE_NAMES
from region.bootstrap import found_region, issue_identity, write_profile
from region.config import load_config
from region.folder import RegionFolder
from region.node import Node

ORDERS = "acme/payments/orders"
TOO_LONG = {"felix.message-id": b"x" * 300}
"""Only a broker refuses it: a client's `message_id` is checked before."""


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A region as `felix region init` makes it; its home."""
    home = tmp_path_factory.mktemp("home")
    folder = RegionFolder(home / "us-east")
    found_region(
        folder,
        region="us-east",
        mesh="acme",
        country="US",
        jurisdiction="US",
        entity="Acme Inc",
        listen=Address("127.0.0.1", 0),
        health=None,
        now_ms=now_ms(),
    )
    issue_identity(folder, load_config(folder.config), "client", "orders-svc", now_ms())
    return home


@asynccontextmanager
async def running(home: Path, data: str, engine: str, port: int = 0) -> AsyncIterator[Node]:
    """A broker of the region that serves, and a profile that leads to it."""
    folder = RegionFolder(home / "us-east")
    config = load_config(folder.config)
    config = msgspec.structs.replace(config, engine=engine, data=data, listen=Address("127.0.0.1", port))
    forget_other_data(folder, config)
    node = await Node.start(folder, config)
    try:
        write_profile(folder, "us-east", "acme", node.address)
        yield node
    finally:
        await node.stop()


@pytest.fixture(params=ENGINE_NAMES)
async def node(founded: Path, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Node]:
    async with running(founded, str(tmp_path / "data"), request.param) as made:
        yield made


@pytest.fixture
async def region(founded: Path, node: Node) -> AsyncIterator[felix.RegionClient]:
    profile = replace(felix.load_profile("us-east", home=founded), engine=node.config.engine)
    async with felix.connect(
        profile=profile, backoff=felix.BackoffPolicy(first_ms=5, ceiling_ms=100)
    ) as client:
        yield client


async def test_records_go_round(region: felix.RegionClient, node: Node) -> None:
    orders = region.stream(ORDERS)
    state = await orders.create(shards=3)
    assert (state.shards, len(state.incarnation)) == (3, 16)
    assert region.session.engine == node.config.engine
    payloads = [json.dumps({"id": i, "note": "x" * (i % 50)}).encode() for i in range(5_000)]
    keys = [b"%d" % (i % 97) for i in range(5_000)]
    async with orders.publisher(compress=True) as publisher:
        await publisher.send_many(payloads, keys)
    got: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    async with asyncio.timeout(120), orders.subscribe("earliest") as subscription:
        count = 0
        async for batch in subscription.batches():
            got[batch.shard] += map(bytes, batch.payloads())
            count += len(batch)
            if count == len(payloads):
                break
    for shard, found in got.items():
        assert found == [p for p, k in zip(payloads, keys, strict=True) if shard_for_key(k, 3) == shard]
    described = await orders.describe()
    assert sum(s.high_watermark for s in described.state) == len(payloads)
    assert [s.stream async for s in region.list_streams("acme/payments")] == [ORDERS]


async def test_one_record_with_key_and_headers(region: felix.RegionClient) -> None:
    orders = region.stream(ORDERS)
    await orders.create()
    assert await orders.publish(b'{"id": 7}', key=b"7", headers={"source": b"web"}) == 0
    receipt = await orders.publish_batch([NewRecord(b"a"), NewRecord(b"b")])
    assert (receipt.base_offset, receipt.records) == (1, 2)
    async with asyncio.timeout(120), orders.subscribe(0) as subscription:
        record = await anext(subscription)
        assert (record.offset, record.key, dict(record.headers), record.payload) == (
            0, b"7", {"source": b"web"}, b'{"id": 7}',
        )  # fmt: skip
    async with asyncio.timeout(120), orders.subscribe(2) as subscription:
        assert (await anext(subscription)).payload == b"b"


async def test_latest_and_ephemeral(region: felix.RegionClient) -> None:
    ticks = region.stream("acme/ops/ticks")
    await ticks.create(durability=Durability("ephemeral"), ring_bytes=1 << 20)
    await ticks.publish(b"before")
    async with (
        asyncio.timeout(120),
        ticks.subscribe() as subscription,
        ticks.publisher(acks="none") as publisher,
    ):
        await publisher.send_many([b"%d" % i for i in range(500)])
        await publisher.flush()
        found = [(await anext(subscription)).payload for _ in range(500)]
    assert found == [b"%d" % i for i in range(500)]


async def test_a_slow_reader_of_a_small_ring_is_told_what_it_missed(region: felix.RegionClient) -> None:
    ticks = region.stream("acme/ops/ticks")
    await ticks.create(durability=Durability("ephemeral"), ring_bytes=4 << 20)
    gaps: list[felix.Gap] = []
    async with (
        asyncio.timeout(120),
        ticks.subscribe(credit_bytes=2 << 20, on_gap=gaps.append) as subscription,
    ):
        async with ticks.publisher(batch_bytes=64 * 1024) as publisher:
            await publisher.send_many([b"x" * 10_000] * 2_000)
        seen = 0
        while subscription.positions[0] < 2_000:
            seen += len(await subscription.next_batch())
        gone = sum(gap.next_offset - gap.first_offset for gap in gaps)
        assert subscription.gap_count == len(gaps) >= 1
        assert seen + gone == 2_000
        assert subscription._feed.held_bytes_max <= 2 << 20


async def test_a_stream_deleted_under_its_readers_and_writers(region: felix.RegionClient) -> None:
    orders = region.stream(ORDERS)
    await orders.create()
    await orders.publish(b"old")
    async with asyncio.timeout(120), orders.subscribe("earliest") as subscription:
        assert (await anext(subscription)).payload == b"old"
        await orders.delete()
        with pytest.raises(RequestError):
            await anext(subscription)
        with pytest.raises(RequestError):
            await orders.publish(b"nowhere")
        await orders.create()
        assert await orders.publish(b"new") == 0


async def test_rights_are_asked_and_taken_away_live(
    region: felix.RegionClient, founded: Path, node: Node
) -> None:
    await region.create_stream(ORDERS)
    profile = replace(
        felix.load_profile("us-east", identity="orders-svc", home=founded), engine=node.config.engine
    )
    async with asyncio.timeout(120), felix.connect(profile=profile) as service:
        orders = service.stream(ORDERS)
        with pytest.raises(RequestError) as caught:
            await orders.publish(b"x")
        assert caught.value.code is Code.NOT_FOUND_OR_FORBIDDEN
        me = service.session.identity
        await region.put_rights(me, ["publish acme/payments/*", "subscribe acme/payments/*"])

        async def allowed() -> None:
            while True:
                try:
                    await orders.publish(b"x")
                    return
                except RequestError:
                    await asyncio.sleep(0.02)

        await allowed()
        async with orders.subscribe("earliest") as subscription:
            assert (await anext(subscription)).payload == b"x"
            await region.put_rights(me, [])
            with pytest.raises(RequestError):
                await anext(subscription)
        with pytest.raises(RequestError):
            await orders.publish(b"y")
        await region.put_rights(me, ["publish acme/payments/*"])
        await allowed()


@pytest.mark.parametrize("engine", ENGINE_NAMES)
async def test_a_broker_that_restarts_under_load_loses_nothing(
    founded: Path, tmp_path: Path, engine: str
) -> None:
    data = str(tmp_path / "data")
    payloads = [b"%d" % i for i in range(3_000)]
    found: list[bytes] = []
    async with asyncio.timeout(120):
        port = claim_port()
        async with running(founded, data, engine, port):
            profile = replace(felix.load_profile("us-east", home=founded), engine=engine)
            client = felix.connect(profile=profile, backoff=felix.BackoffPolicy(first_ms=5, ceiling_ms=100))
            await client.open()
            orders = client.stream(ORDERS)
            await orders.create()
            subscription = orders.subscribe("earliest")

            async def consume() -> None:
                async for record in subscription:
                    found.append(record.payload)
                    if len(found) == len(payloads):
                        return

            consumer = asyncio.create_task(consume())
            publisher = orders.publisher(batch_records=10)
            await publisher.open()

            async def produce() -> None:
                for at in range(0, len(payloads), 100):
                    await publisher.send_many(payloads[at : at + 100])
                    await asyncio.sleep(0.01)
                await publisher.close()

            producer = asyncio.create_task(produce())
            await until(lambda: len(found) > 300)
        async with running(founded, data, engine, port):
            await producer
            await consumer
            assert client.reconnects >= 1
            assert subscription.gap_count == 0
            await client.close()
    assert found == payloads


async def test_no_broker_there(founded: Path, tmp_path: Path) -> None:
    async with running(founded, str(tmp_path / "data"), "qh3"):
        pass
    with pytest.raises(UnavailableError, match="felix region up us-east"):
        await felix.connect(profile=felix.load_profile("us-east", home=founded), connect_timeout_s=0.3).open()


@pytest.mark.parametrize("linger_ms", [0, 1])
async def test_a_refused_batch_takes_nothing_along_that_the_synchronous_publisher_has_gathered_behind_it(
    founded: Path, node: Node, linger_ms: float
) -> None:
    def script() -> list[bytes]:
        profile = replace(felix.load_profile("us-east", home=founded), engine=node.config.engine)
        views = felix.Views(deduplication=felix.Deduplication())
        with felix.sync.connect(profile=profile) as region:
            name = region.create_stream("acme/ops/identified", views=views).stream
            refused: list[felix.Refusal] = []
            with region.stream(name).publisher(
                batch_records=4, linger_ms=linger_ms, on_refused=refused.append
            ) as publisher:

                def refuse() -> None:
                    """A record that the broker does not take leaves by itself, and its error waits for the next call."""
                    before = len(refused)
                    publisher._background.call(publisher._inner.send(b"bad", headers=TOO_LONG))
                    deadline = time.monotonic() + 60
                    while len(refused) == before and time.monotonic() < deadline:
                        time.sleep(0.01)

                refuse()
                for number in range(3):
                    publisher.send(b"%d" % number)
                with pytest.raises(RequestError, match="message id"):
                    publisher.flush()
                assert publisher.progress.acknowledged == 3, "what is gathered is given all the same"
                refuse()
                given = 3
                with pytest.raises(RequestError, match="message id"):
                    # Full batches raise it; the record that made one full is not given.
                    while given < 100:
                        publisher.send(b"%d" % given)
                        given += 1
                for number in range(given, 10):
                    publisher.send(b"%d" % number)
                publisher.flush()
                refuse()
                publisher.send(b"10")
                with pytest.raises(RequestError, match="message id"):
                    publisher.close()
            with region.stream(name).subscribe("earliest") as subscription:
                return [next(subscription).payload for _ in range(11)]

    found = await asyncio.to_thread(script)
    assert found == [b"%d" % number for number in range(11)]


async def test_positions_of_a_blocking_subscription_are_those_of_the_records_that_were_given_out(
    founded: Path, node: Node, region: felix.RegionClient
) -> None:
    await region.create_stream(ORDERS)
    await region.stream(ORDERS).publish_batch([felix.NewRecord(b"%d" % n) for n in range(10)])

    def script() -> None:
        profile = replace(felix.load_profile("us-east", home=founded), engine=node.config.engine)
        with felix.sync.connect(profile=profile) as blocking:
            orders = blocking.stream(ORDERS)
            with orders.subscribe("earliest") as subscription:
                assert [next(subscription).offset for _ in range(4)] == [0, 1, 2, 3]
                assert subscription.positions == {0: 4}
                assert [record.offset for record in subscription.take(2)] == [4, 5]
                kept, epochs = subscription.positions, subscription.epochs
                assert kept == {0: 6}
                incarnation = subscription.incarnation
            with orders.subscribe(offsets=kept, epochs=epochs, incarnation=incarnation) as following:
                assert next(following).offset == 6

    await asyncio.to_thread(script)


async def test_the_synchronous_face(founded: Path, node: Node) -> None:
    """In a thread, as a script would; the broker has this loop."""

    def script() -> list[bytes]:
        profile = replace(felix.load_profile("us-east", home=founded), engine=node.config.engine)
        with felix.sync.connect(profile=profile) as region:
            assert region.is_connected
            orders = region.stream(ORDERS)
            orders.create(shards=2)
            assert orders.publish(b"first", key=b"k") == 0
            assert len(orders.publish_many([b"%d" % i for i in range(100)])) == 100
            with orders.publisher(batch_records=16) as publisher:
                publisher.send_many([b"%d" % i for i in range(100, 200)])
                publisher.send(b"last")
                publisher.flush()
            lingering = region.create_stream("acme/ops/lingering")
            with region.stream(lingering.stream).publisher(linger_ms=5) as publisher:
                publisher.send(b"leaves by itself")
                with region.stream(lingering.stream).subscribe("earliest") as subscription:
                    assert next(subscription).payload == b"leaves by itself"
            region.delete_stream(lingering.stream)
            rates = region.create_cache("acme/ops/rates")
            version = rates.put("EUR", b"1.08")
            with rates.mirror() as mirror:
                mirror.reached("EUR", version)
                assert (
                    mirror["EUR"] == b"1.08"
                    and list(mirror) == [b"EUR"]
                    and "EUR" in mirror
                    and len(mirror) == 1
                )
                assert mirror.get("USD") is None and mirror.version("EUR") == version and mirror.is_current
            region.delete_stream("acme/ops/rates")
            found = []
            with orders.subscribe("earliest") as subscription:
                for record in subscription:
                    found.append(record.payload)
                    if len(found) == 202:
                        break
                with pytest.raises(TimeoutError):
                    subscription.next_batch(timeout_s=0.05)
                assert subscription.incarnation and subscription.gaps == []
                assert sum(subscription.positions.values()) == 202
            with pytest.raises(RequestError):
                region.describe_stream("acme/ops/nothing")
            assert [s.stream for s in region.list_streams()] == [ORDERS]
            assert region.describe().gauges["sessions"] == 1
        with pytest.raises(RequestError, match="closed"):
            orders.publish(b"late")
        return found

    found = await asyncio.to_thread(script)
    assert sorted(found) == sorted([b"first", b"last", *(b"%d" % i for i in range(200))])
    with pytest.raises(RequestError, match=r"felix\.connect"):
        felix.sync.connect(profile=felix.load_profile("us-east", home=founded))
