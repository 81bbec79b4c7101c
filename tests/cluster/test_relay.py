"""A client that reaches one broker's address alone: everything goes through that broker, and nothing goes elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from cluster.clustered_region import ClusteredRegion, publishing, serving
from cluster.test_views import of_kind
from etcd_process import EtcdProcess, etcd_of_each_test
from ports import claim_port
from region_peer import client as client_of
from region_peer import take, until

import felix
from felix import connection
from felix.address import Address
from felix.connection import RegionConnection
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.relay import RelayPath
from felix.runtime.real import now_ms
from felix.transport.port import ClientTls, Connection, Engine, Handler, NobodyListensError, engine_named
from region.bootstrap import issue_identity, write_profile
from region.relay import RelayService

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd


class OneDoor:
    """An engine behind a firewall: sockets reach one port, and the rest is refused, or silent."""

    def __init__(self, port: int, *, is_silent: bool = False, leads_to: int = 0) -> None:
        """`leads_to`: the port behind that one, where it is another."""
        self._inner = engine_named()
        self.port, self.is_silent, self.leads_to = port, is_silent, leads_to or port
        self.name = self._inner.name
        self.turned_away: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def connect(
        self, host: str, port: int, tls: ClientTls, handler: Handler, *more: Any, **how: Any
    ) -> Connection:
        if how.get("path") is None and port != self.port:
            self.turned_away.append(port)
            if self.is_silent:
                await asyncio.sleep(how["timeout"])
                raise UnavailableError("Silence.", code=Code.TIMEOUT)
            raise NobodyListensError("Refused.", retry_after_ms=1)
        to = port if how.get("path") is not None else self.leads_to
        return await self._inner.connect(host, to, tls, handler, *more, **how)


def door(region: ClusteredRegion, name: str) -> OneDoor:
    place = region.config.of_broker(name).own_place
    assert place is not None
    return OneDoor(place.client_address.port)


def behind(
    region: ClusteredRegion, at: str | Address, engine: OneDoor | None = None, **options: Any
) -> felix.RegionClient:
    """An operator's client that reaches one broker, or one address, alone."""
    engine = engine or door(region, str(at))
    place = Address("127.0.0.1", engine.port) if isinstance(at, str) else at
    write_profile(region.folder, region.config.region, region.config.mesh, place)
    profile = felix.load_profile(region.folder.root.name, home=region.folder.root.parent)
    return felix.connect(
        profile=profile,
        engine=cast("Engine", engine),
        backoff=felix.BackoffPolicy(first_ms=5, ceiling_ms=100),
        **options,
    )


def relays(region: ClusteredRegion, name: str) -> RelayService:
    return region.nodes[name].services.relays


def carried(region: ClusteredRegion, name: str) -> float:
    return relays(region, name).gauges()["relayed_bytes"]


def leaders(client: felix.RegionClient) -> dict[str, str]:
    """The brokers that a client has connections to as leaders, and through which broker."""
    found = {}
    for reach in client.connection._routes.leaders():
        assert isinstance(reach, RegionConnection)
        if reach.link is not None:
            found[reach.session.broker] = reach.session.relayed_by
    return found


async def test_every_verb_reaches_its_leader_through_the_one_broker_that_the_client_reaches(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd) as region:
        async with behind(region, "b1") as client:
            stream = await of_kind(region, client, "stream", "b2", shards=1)
            queue = await of_kind(region, client, "queue", "b3")
            cache = await of_kind(region, client, "cache", "b2")
            await client.stream(stream).publish_many([b"%d" % number for number in range(100)])
            async with client.stream(stream).subscribe(start="earliest") as records:
                found = [bytes(record.payload) for record in await take(records, 100)]
            assert found == [b"%d" % number for number in range(100)]
            async with client.stream(stream).consumer("crew", start="earliest") as consumer:
                assert await consumer.ack(await anext(consumer))
            async with client.transaction() as transaction:
                await transaction.publish(stream, b"t")
                await transaction.publish(queue, b"0")
            await client.queue(queue).put_many([b"1", b"2"])
            for _ in range(3):
                (job,) = await client.queue(queue).lease(1, wait=30)
                await job.ack()
            async with client.cache(cache).mirror() as mirror:
                version = await client.cache(cache).put("k", b"v")
                await mirror.reached("k", version)
            entry = await client.cache(cache).get("k")
            assert entry is not None and entry.value == b"v"
            # What is asked and not attached: it hops.
            state = await client.describe_stream(stream)
            assert [shard.high_watermark for shard in state.state] == [101]
            assert (await client.queue(queue).describe()).ready == 0
            assert (await client.stream(stream).describe_subscription("crew")).shards[0].lag_records == 100
            assert len((await client.describe()).brokers) == 3
            assert leaders(client) == {"b2": "b1", "b3": "b1"}
            assert carried(region, "b1") and not carried(region, "b2") and not carried(region, "b3")
            assert relays(region, "b1").gauges()["relays"] == 2
        await until(lambda: relays(region, "b1").gauges()["relays"] == 0)
        assert region.nodes["b1"].broker.budgets.exchange.used_bytes == 0


async def test_addresses_that_are_silent_are_asked_for_through_the_first_broker_and_not_tried_again_soon(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RELAY_AFTER_S", 0.2)
    async with serving(tmp_path, etcd, 2) as region:
        engine = door(region, "b1")
        engine.is_silent = True
        async with behind(region, "b1", engine) as client:
            stream = await of_kind(region, client, "stream", "b2", shards=1)
            await client.stream(stream).publish(b"0")
            assert leaders(client) == {"b2": "b1"} and len(engine.turned_away) == 1
            # The connection to the leader is lost: the next one goes by the same way at once.
            (reach,) = client.connection._routes.leaders()
            assert isinstance(reach, RegionConnection) and reach.link is not None
            reach.link.close()
            await client.stream(stream).publish(b"1")
            assert leaders(client) == {"b2": "b1"} and len(engine.turned_away) == 1


async def test_a_client_says_whether_its_connections_may_be_relayed(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    with pytest.raises(RequestError, match="one of auto, always, never"):
        felix.connect("us-east", relay=cast("Any", "perhaps"))
    async with serving(tmp_path, etcd, 2) as region:
        engine = door(region, "b1")
        async with behind(region, "b1", engine, relay="always") as client:
            stream = await of_kind(region, client, "stream", "b2", shards=1)
            await client.stream(stream).publish(b"0")
            assert leaders(client) == {"b2": "b1"} and engine.turned_away == []
        async with behind(region, "b1", engine, relay="never", request_timeout_s=1.0) as client:
            with pytest.raises(UnavailableError):
                await client.stream(stream).publish(b"1")
            assert leaders(client) == {} and engine.turned_away
        # Who reaches the leader needs nobody in between.
        async with region.client("b1") as client:
            await client.stream(stream).publish(b"2")
            assert leaders(client) == {"b2": ""}


async def test_a_leader_that_goes_is_followed_through_the_same_broker(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd) as region, behind(region, "b1") as client:
        for number in range(16):
            stream = f"acme/ops/copied-{number}"
            await client.create_stream(stream, replicas=3)
            await until(lambda stream=stream: region.leader("b1", stream))  # type: ignore[misc]
            if (leader := region.leader("b1", stream)) != "b1":
                break
        await region.in_sync("b1", stream)
        async with publishing(client, stream) as published:
            await until(lambda: len(published) > 20)
            await region.stop(leader)
            gone = len(published)
            await until(lambda: len(published) > gone + 20)
        async with client.stream(stream).subscribe(start="earliest") as records:
            found = [bytes(record.payload) for record in await take(records, len(published))]
        assert found == published
        assert all(by == "b1" for by in leaders(client).values())


async def test_the_broker_in_between_goes_and_a_load_balancer_leads_to_another_one(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd) as region:
        balancer = OneDoor(claim_port(), leads_to=door(region, "b1").port)
        async with behind(region, Address("127.0.0.1", balancer.port), balancer) as client:
            stream = await of_kind(region, client, "stream", "b2", shards=1)
            async with publishing(client, stream) as published:
                await until(lambda: len(published) > 20)
                assert leaders(client) == {"b2": "b1"}
                # That is the leader itself, which is known by another address.
                balancer.leads_to = door(region, "b2").port
                await region.stop("b1")
                gone = len(published)
                await until(lambda: len(published) > gone + 20)
                assert leaders(client) == {} and client.session.broker == "b2"
                balancer.leads_to = door(region, "b3").port
                client.connection.begin_anew("a test")
                gone = len(published)
                await until(lambda: len(published) > gone + 20)
                assert leaders(client) == {"b2": "b3"}
            async with client.stream(stream).subscribe(start="earliest") as records:
                found = [bytes(record.payload) for record in await take(records, len(published))]
            assert found == published


async def test_who_does_not_read_holds_nothing_in_the_broker_in_between(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    credit = 2 << 20
    async with serving(tmp_path, etcd, 2) as region, behind(region, "b1") as client:
        stream = await of_kind(region, client, "stream", "b2", shards=1)
        async with region.client("b1") as direct:
            await direct.stream(stream).publish_many([bytes(64 << 10)] * 128)
        async with client.stream(stream).subscribe(start="earliest", credit_bytes=credit) as records:
            before = carried(region, "b1")
            await until(lambda: carried(region, "b1") > before + credit * 3 // 4)
            # As many bytes as it may have on its way, and what QUIC says around them; nothing of the 8 MiB waits in between.
            for _ in range(20):
                await client.describe_stream(stream)
            assert carried(region, "b1") < before + 2 * credit
            broker = region.nodes["b1"].broker
            assert broker.gauges()["delivery_bytes"] + broker.gauges()["exchange_bytes"] < 1 << 20
            assert relays(region, "b1").dropped_bytes == 0
            found = await take(records, 128)
        assert sum(len(record.payload) for record in found) == 128 * (64 << 10)


class Canary(asyncio.DatagramProtocol):
    """Outside of the region: it counts what comes."""

    def __init__(self) -> None:
        self.count = 0

    def datagram_received(self, data: bytes, addr: object) -> None:
        self.count += 1


async def asked(client: felix.RegionClient, address: str) -> str:
    """What the broker says of a relay to an address; empty where it opens one."""
    link = client.connection.link
    assert link is not None
    path = RelayPath(link)
    try:
        await path.open(address)
    except FelixError as error:
        return error.sentence
    path.close()
    return ""


async def test_nothing_is_carried_but_to_brokers_of_the_region_and_for_its_own_clients(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    loop = asyncio.get_running_loop()
    outside, canary = await loop.create_datagram_endpoint(Canary, local_addr=("127.0.0.1", 0))
    port = outside.get_extra_info("sockname")[1]
    async with serving(tmp_path, etcd, 3, 2) as region, region.client("b1") as client:
        own = f"127.0.0.1:{door(region, 'b2').port}"

        async def is_reached() -> bool:
            return await asked(client, own) == ""

        await until(is_reached)
        # Neither another address, nor the broker's by another name, nor one that is named and was never registered.
        for address in (
            f"127.0.0.1:{port}",
            etcd.endpoint.removeprefix("http://"),
            own.replace("127.0.0.1", "localhost"),
            f"127.0.0.1:{door(region, 'b3').port}",
            "",
        ):
            assert "is alive at" in await asked(client, address)
        # Bridges are told that there are none, and refused; so is who has no right here.
        for kind, said in (("bridge", "may not ask for open_relay"), ("client", "has no right")):
            issue_identity(region.folder, region.config, kind, f"{kind}-1", now_ms())
            async with client_of(region.folder, f"{kind}-1") as other:
                assert said in await asked(other, own)
                assert (other.session.limits.relays_max > 0) == (kind == "client")
        assert relays(region, "b1").gauges()["relayed_bytes"] == 0
        # A broker that is down, or that this one does not reach, is none.
        await region.stop("b2")
        assert await asked(client, own) != ""
    assert canary.count == 0
    outside.close()


async def test_one_identity_does_not_take_all_relays_and_loses_them_with_its_rights(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, 2) as region, region.client("b1") as operator:
        service = relays(region, "b1")
        service.most = 8
        issue_identity(region.folder, region.config, "client", "orders", now_ms())
        own = f"127.0.0.1:{door(region, 'b2').port}"
        await operator.put_rights("spiffe://us-east.acme/client/orders", ["publish acme/ops/*"])
        async with client_of(region.folder, "orders") as client:
            assert client.connection.link is not None
            paths = [RelayPath(client.connection.link) for _ in range(3)]
            assert [await path.open(own) for path in paths[:2]] == ["b2", "b2"]
            with pytest.raises(UnavailableError, match="carries 2 of spiffe"):
                await paths[2].open(own)
            assert await asked(operator, own) == "", "there is room for others"
            await operator.put_rights("spiffe://us-east.acme/client/orders", [])
            await until(lambda: service.gauges()["relays"] == 0)
            await until(lambda: all(path.is_over for path in paths))
