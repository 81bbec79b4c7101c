"""Transactions of a region of several brokers: one coordinates, the leaders of streams apply, and readers see all of one or nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cluster.clustered_region import ClusteredRegion, serving
from etcd_process import EtcdProcess, etcd_of_each_test
from long_runs import count
from region_peer import client as client_of
from region_peer import until

import felix
from felix.errors import Code, NotLeaderError, RequestError, UnavailableError
from felix.names import SpiffeId
from region.bootstrap import write_profile
from region.broker import Broker
from region.metadata.records import StreamConfig
from region.streams.hosted import HostedStream
from region.transactions import lane_applier
from region.transactions.coordinator import Coordinator
from region.transactions.stream_leaders import StreamLeaders

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd
NAMES = ("b1", "b2", "b3")
LEASE_MS = 2_000
SYSTEM = "felix/system/transactions"
STEPS = ("before check", "before apply", "after apply", "before show")
"""Where a coordinator is lost; only the first two in the short run."""


def connected(region: ClusteredRegion) -> felix.RegionClient:
    """A client whose profile names every broker."""
    assert region.config.cluster is not None
    addresses = (broker.listen for broker in region.config.cluster.brokers)
    write_profile(region.folder, region.config.region, region.config.mesh, *addresses)
    return client_of(region.folder)


def leader(region: ClusteredRegion, stream: str) -> str:
    """Who leads a stream, as some broker knows that runs."""
    return region.leader(next(iter(region.nodes)), stream)


async def led_by_each(region: ClusteredRegion, operator: felix.RegionClient, **config: int) -> dict[str, str]:
    """A new stream that each of the brokers leads, by broker."""
    found: dict[str, str] = {}
    for number in range(16):
        name = f"acme/ops/stream-{number}"
        await operator.create_stream(name, **config)
        found.setdefault(leader(region, name), name)
        if len(found) == len(NAMES):
            return found
    raise AssertionError(f"of 16 streams all were placed on {sorted(found)}")


async def payloads(operator: felix.RegionClient, name: str, count: int) -> list[bytes]:
    """What a reader of a stream gets, until it has so many records."""
    found: list[bytes] = []
    async with asyncio.timeout(60):
        async with operator.stream(name).subscribe(start="earliest") as records:
            while len(found) < count:
                found.append(bytes((await anext(records)).payload))
    return found


async def test_a_transaction_over_streams_of_all_brokers_from_any_of_them(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinators: list[Coordinator] = []
    lead = Coordinator.lead

    async def noted(coordinator: Coordinator, stream: HostedStream) -> None:
        coordinators.append(coordinator)
        await lead(coordinator, stream)

    monkeypatch.setattr(Coordinator, "lead", noted)
    async with serving(tmp_path, etcd) as region:
        async with region.client("b1") as operator:
            streams = await led_by_each(region, operator)
        for broker in NAMES:
            async with region.client(broker) as client:
                async with client.transaction() as tx:
                    handles = [await tx.publish(name, broker.encode()) for name in streams.values()]
                assert [handle.offset for handle in handles] == [NAMES.index(broker)] * 3
                with pytest.raises(ValueError, match="on purpose"):
                    async with client.transaction() as tx:
                        await tx.publish(streams["b2"], b"never")
                        raise ValueError("on purpose")
                for name in streams.values():
                    count = NAMES.index(broker) + 1
                    assert await payloads(client, name, count) == [each.encode() for each in NAMES[:count]]
        # Without a lease another broker may coordinate, and have committed what this one does not know.
        coordinator = next(each for each in coordinators if each.lanes is not None)
        with monkeypatch.context() as patch, pytest.raises(NotLeaderError, match="The lease is over"):
            patch.setattr(Broker, "fence", lambda broker: UnavailableError("The lease is over."))
            await coordinator.abort(SpiffeId.parse("spiffe://us-east.acme/client/orders"), b"unknown")


async def test_acknowledgements_and_instances_go_through_whichever_broker(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd) as region, region.client("b1") as first, region.client("b3") as third:
        streams = await led_by_each(region, first)
        source, target = streams["b2"], streams["b3"]
        await first.create_queue("acme/ops/jobs", visibility=600)
        await first.queue("acme/ops/jobs").put_many([b"0", b"1"])
        await first.stream(source).create_subscription("crew")
        await first.stream(source).publish_many([b"0", b"1"])
        done, back = await first.queue("acme/ops/jobs").lease(2)
        async with third.stream(source).consumer("crew") as consumer:
            record = await anext(consumer)
            async with third.transaction(transactional_id="crew") as tx:
                await tx.publish(target, b"made")
                await tx.acknowledge(record, consumer=consumer)
                await tx.acknowledge(done)
            with pytest.raises(ValueError, match="on purpose"):
                async with third.transaction() as tx:
                    await tx.acknowledge(back)
                    raise ValueError("on purpose")
            older = third.transaction(transactional_id="crew")
            await older.begin()
            await older.publish(target, b"never")
            async with first.transaction(transactional_id="crew") as tx:
                await tx.publish(target, b"newer")
            with pytest.raises(RequestError) as fenced:
                await older.commit()
            assert fenced.value.code is Code.TRANSACTION_FENCED
        assert await payloads(first, target, 2) == [b"made", b"newer"]
        (again,) = await first.queue("acme/ops/jobs").lease(1, wait=30)
        assert again.payload == back.payload
        # What was acknowledged with the transaction is not redelivered.
        async with first.stream(source).consumer("crew") as consumer:
            assert (await anext(consumer)).payload == b"1"


class Stuck:
    """Where a coordinator gets no further, from `at` on, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = ""
        self.reached = asyncio.Event()
        for name in ("check", "apply", "show"):
            self._wrap(monkeypatch, name)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(StreamLeaders, name)

        async def wrapped(leaders: StreamLeaders, *arguments: object) -> object:
            if self.at == f"before {name}":
                self.reached.set()
                await asyncio.Event().wait()
            answer = await real(leaders, *arguments)
            if self.at == f"after {name}":
                self.reached.set()
                await asyncio.Event().wait()
            return answer

        monkeypatch.setattr(StreamLeaders, name, wrapped)


async def test_what_a_lost_coordinator_decided_is_carried_on_and_the_rest_is_aborted(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(monkeypatch)
    async with serving(tmp_path, etcd, lease_ms=LEASE_MS) as region, connected(region) as client:
        streams = [f"acme/ops/copied-{number}" for number in range(3)]
        for name in streams:
            await client.create_stream(name, replicas=3, shards=2)
        await client.create_queue("acme/ops/jobs", replicas=3, visibility=600)
        await client.queue("acme/ops/jobs").put(b"job")
        (job,) = await client.queue("acme/ops/jobs").lease(1, wait=30)
        whole: list[bytes] = []
        for at in STEPS[: count(2, len(STEPS))]:
            tx = client.transaction(timeout_s=60)
            await tx.begin()
            for name in streams:
                for shard in range(2):
                    await tx.publish(name, at.encode(), shard=shard)
            if at == "before apply":
                await tx.acknowledge(job)
            stuck.at = at
            stuck.reached.clear()
            commit = asyncio.ensure_future(tx.commit())
            async with asyncio.timeout(30):
                await stuck.reached.wait()
            coordinator = leader(region, SYSTEM)
            stuck.at = ""
            # The client is connected to whoever stays, or goes to another one.
            await region.stop(coordinator)
            if at == "before check":
                with pytest.raises(RequestError) as aborted:
                    await commit
                assert aborted.value.code is Code.TRANSACTION_ABORTED
            else:
                await commit
                whole.append(at.encode())
            await region.start(coordinator)
            for name in streams:
                await region.in_sync(coordinator, name)
            await region.in_sync(coordinator, SYSTEM)
        for name in streams:
            assert sorted(await payloads(client, name, 2 * len(whole))) == sorted(2 * whole)
        assert await client.queue("acme/ops/jobs").lease(1) == []


async def test_a_stream_whose_leader_is_lost_gets_its_part_from_the_next_one_and_holds_up_no_other(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(monkeypatch)
    monkeypatch.setattr(lane_applier, "TOGETHER_S", 0.2)
    async with serving(tmp_path, etcd, lease_ms=LEASE_MS) as region, connected(region) as client:
        await client.create_stream("acme/ops/first")
        async with client.transaction() as tx:
            await tx.publish("acme/ops/first", b"0")
        coordinator = leader(region, SYSTEM)
        streams = await led_by_each(region, client)
        lost = next(broker for broker in streams if broker != coordinator)
        (other,) = streams.keys() - {lost, coordinator}
        stuck.at = "before apply"
        tx = client.transaction()
        await tx.begin()
        for broker in (lost, other):
            await tx.publish(streams[broker], b"1")
        commit = asyncio.ensure_future(tx.commit())
        async with asyncio.timeout(30):
            await stuck.reached.wait()
        stuck.at = ""
        # It is decided: the other stream is shown as soon as somebody decides again.
        await region.stop(lost, coordinator)
        await region.start(coordinator)
        assert await payloads(client, streams[other], 1) == [b"1"]
        # What would have to wait for the lost one is not decided.
        late = await not_decided(client, streams[lost], b"2")
        assert not commit.done()
        await region.start(lost)
        await asyncio.gather(commit, late.commit())
        assert await payloads(client, streams[lost], 2) == [b"1", b"2"]


async def not_decided(client: felix.RegionClient, stream: str, payload: bytes) -> felix.Transaction:
    """A transaction whose commit waits, begun anew where the coordinator ceased meanwhile: another broker may lead until all are back."""
    while True:
        transaction = client.transaction(timeout_s=60)
        try:
            await transaction.begin()
            await transaction.publish(stream, payload)
            async with asyncio.timeout(2):
                await transaction.commit()
        except TimeoutError:
            return transaction
        except RequestError as error:
            if error.code is not Code.TRANSACTION_ABORTED:
                raise
        else:
            raise AssertionError("It was decided while the leader of its stream was lost.")


async def committed(client: felix.RegionClient, stream: str, payload: bytes) -> None:
    """Publish in a transaction, in another one where the coordinator ceased meanwhile: then nothing of the first is there."""
    while True:
        try:
            async with client.transaction() as tx:
                await tx.publish(stream, payload)
        except RequestError as error:
            if error.code is not Code.TRANSACTION_ABORTED:
                raise
        else:
            return


async def test_a_journal_of_one_copy_gets_more_where_the_region_has_brokers_for_them(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """As of a region that one broker alone had served before."""
    async with serving(tmp_path, etcd, lease_ms=LEASE_MS) as region, connected(region) as client:
        system = felix.StreamName.parse(SYSTEM)
        await region.nodes["b1"].broker.ensure_stream(system, StreamConfig(replicas=1))
        await client.create_stream("acme/ops/orders", replicas=3)
        await committed(client, "acme/ops/orders", b"0")
        for broker in NAMES:
            hosted = await region.nodes[broker].broker.find_stream(system)
            await until(lambda hosted=hosted: hosted.record.config.replicas == len(NAMES))  # type: ignore[misc]
        await region.in_sync("b1", SYSTEM)
        await region.stop(leader(region, SYSTEM))
        await committed(client, "acme/ops/orders", b"1")
        assert await payloads(client, "acme/ops/orders", 2) == [b"0", b"1"]
