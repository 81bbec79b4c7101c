"""A region of several brokers: a stream is served by the one that leads it, and reached through every one."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from pathlib import Path

import msgspec
import pytest
from cluster.clustered_region import ClusteredRegion, serving
from erased import key_leaves, scan
from etcd_process import EtcdProcess, etcd_of_each_test
from region_peer import until

import felix
from felix.batch import decode_batch, decode_payloads
from felix.errors import RequestError, UnavailableError
from felix.messages import DescribeMesh, DescribeStream
from felix.settings import Durability, NamespaceSettings
from keys.shared import SharedKeyring
from region.cluster.audit_home import AuditHome
from region.cluster.member import ClusterMember
from region.config import MetadataConfig
from region.metadata.transaction import Absent, Put
from region.node import Node
from region.streams import follower as stream_follower
from region.streams.sealing import KeyringSeal

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd


async def test_a_stream_is_published_and_read_through_either_broker(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with (
        serving(tmp_path, etcd, 2) as region,
        region.client("b1") as first,
        region.client("b2") as second,
    ):
        names = [f"acme/ops/s{number}" for number in range(4)]
        for name in names:
            await first.create_stream(name, shards=2)
        leaders = {name: region.leader("b1", name) for name in names}
        assert set(leaders.values()) == {"b1", "b2"}
        for name in names:
            assert await first.stream(name).publish(b"a", shard=0) == 0
            assert await second.stream(name).publish(b"b", shard=0) == 1
            for reader in (first, second):
                async with reader.stream(name).subscribe(start="earliest", shards=[0]) as records:
                    read = [bytes((await anext(records)).payload) for _ in range(2)]
                assert read == [b"a", b"b"]
        for name in names:
            for node in region.nodes.values():
                hosted = node.broker.streams.get(felix.StreamName.parse(name))
                assert hosted is not None
                is_led = node.config.broker == leaders[name]
                assert len(hosted.serving) == (2 if is_led else 0)
            state = await second.describe_stream(name)
            assert [shard.high_watermark for shard in state.state] == [2, 0]
            assert {shard.leader_epoch for shard in state.state} == {1}
            assert {shard.leader for shard in state.state} == {leaders[name]}
        listed = {state.stream: state.state async for state in first.list_streams()}
        assert {name: {shard.leader for shard in listed[name]} for name in names} == {
            name: {leader} for name, leader in leaders.items()
        }
        assert all(shards[0].high_watermark == 2 for shards in listed.values())


async def test_what_a_leader_says_of_a_stream_to_which_nothing_was_written_is_told(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with (
        serving(tmp_path, etcd, 2) as region,
        region.client("b1") as first,
        region.client("b2") as second,
    ):
        settings = {"one": {}, "ring": {"durability": Durability("ephemeral")}, "two": {"replicas": 2}}
        for name, given in settings.items():
            await first.create_stream(f"acme/ops/{name}", shards=2, **given)
            for client in (first, second):
                state = await client.describe_stream(f"acme/ops/{name}")
                assert all(
                    shard.is_told and shard.leader and not shard.high_watermark for shard in state.state
                )
        for name in settings:
            led = region.leader("b1", f"acme/ops/{name}")
            for broker, node in region.nodes.items():
                hosted = node.broker.streams.get(felix.StreamName.parse(f"acme/ops/{name}"))
                assert hosted is not None
                assert {shard.is_told for shard in hosted.describe(detail=True).state} == {broker == led}


def epoch_of(region: ClusteredRegion, broker: str, stream: str) -> int:
    """Of the stream's first shard, where a broker serves it; 0 where not."""
    hosted = region.nodes[broker].broker.streams.get(felix.StreamName.parse(stream))
    shards = [] if hosted is None else hosted.serving
    return shards[0].epochs.current if shards else 0


async def led_by(
    region: ClusteredRegion, operator: felix.RegionClient, broker: str, durability: Durability | None = None
) -> str:
    """A new stream that this broker leads."""
    for number in range(16):
        name = f"acme/ops/of-{broker}-{number}"
        await operator.create_stream(name, durability=durability)
        if region.leader(next(iter(region.nodes)), name) == broker:
            return name
    raise AssertionError(f"of 16 streams none was placed on {broker}")


async def test_what_one_broker_wrote_each_opens_with_the_keys_that_they_share(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, 2) as region, region.client("b1") as client:
        for leader, other in (("b1", "b2"), ("b2", "b1")):
            name = felix.StreamName.parse(await led_by(region, client, leader))
            await client.stream(name).publish(b"shared")
            await region.heard()
            hosted = region.nodes[leader].broker.streams.get(name)
            assert hosted is not None
            (stored,) = await hosted.shard(0).read_sealed(0, 1 << 20)
            keyring = region.nodes[other].services.governance.keys._keyring
            opened = KeyringSeal(keyring, name, hosted.incarnation, 0).open_batch(decode_batch(stored.data))
            assert [bytes(payload) for payload in decode_payloads(opened)] == [b"shared"]
        data = region.folder.root / region.config.data
        assert not list(data.glob("*/keys/keys.log")) and len(list(data.glob("*/keys/shared/keys.log"))) == 2


async def test_keys_are_rotated_through_a_broker_that_has_no_audit_log_and_everything_is_read_afterwards(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with (
        serving(tmp_path, etcd, 2) as region,
        region.client("b1") as operator,
        region.client("b2") as client,
    ):
        names = [await led_by(region, operator, broker) for broker in ("b1", "b2")]
        for number, level in enumerate(("data", "root", "data")):
            for name in names:
                assert await client.stream(name).publish(b"%d" % number) == number
            said = await client.rotate_keys(level)
            assert said.startswith("Every broker takes" if level == "data" else "A new root key wraps ")
        states = {key.state for key in await client.list_keys() if key.level == "root"}
        assert states == {"active", "decrypt-only"}
        await region.stop()
        await region.start("b2", "b1")
        for name in names:
            async with client.stream(name).subscribe(start="earliest") as records:
                assert [bytes((await anext(records)).payload) for _ in range(3)] == [b"0", b"1", b"2"]
        roots = list((region.folder.keys / "roots").glob("*.key"))
        assert len(roots) == 2


async def test_a_deleted_streams_key_and_a_retired_root_are_in_no_byte_of_two_brokers_and_the_log_says_so_once(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, 2) as region:

        def homes() -> set[str]:
            return {name for name in region.nodes if region.clustered(name).has_audit_log}

        await until(lambda: bool(homes()))
        (home,) = homes()
        async with region.client(home) as operator:
            gone, kept = [await led_by(region, operator, broker) for broker in ("b1", "b2")]
            (other,) = set(region.nodes) - {home}
        async with region.client(other) as client:
            for name in (gone, kept):
                await client.stream(name).publish(b"of a patient")
            hosted = region.nodes[other].broker.streams.get(felix.StreamName.parse(gone))
            assert hosted is not None
            keyring = region.nodes[other].services.governance.keys._keyring
            assert isinstance(keyring, SharedKeyring)
            record = keyring.find(hosted.incarnation)
            assert record is not None
            assert scan(region.folder.root, record.encode())[1]
            said = await client.delete_stream(gone)
            assert f"Its key {record.key} is destroyed, and leaf " in said
            scanned, found = scan(
                region.folder.root,
                record.encode(),
                b64encode(record.wrapped),
                record.wrapped,
                b"of a patient",
            )
            assert found == [] and scanned > 10_000
            await client.rotate_keys("root")
            old = record.root
            assert f"Retired root key {old} is destroyed, and leaf " in await client.destroy_retired_roots()
            assert not (region.folder.keys / "roots" / f"{old}.key").exists()
            # The broker that wrote the leaf has answered; this one hears of it from the store.
            states: dict[str, str] = {}
            async with asyncio.timeout(30):
                while not states.get(record.key) == states.get(old) == "destroyed":
                    states = {key.id.hex(): key.state for key in await client.list_keys()}
        await region.stop()
        await region.start("b2", "b1")
        async with (
            region.client("b1") as client,
            client.stream(kept).subscribe(start="earliest") as records,
        ):
            assert bytes((await anext(records)).payload) == b"of a patient"
        told = {
            path: [(leaf.key_id.hex(), leaf.stream) for leaf in key_leaves(path.parent)]
            for path in region.folder.root.rglob("audit/checkpoint")
        }
        assert told and all(leaves == [(record.key, gone), (old, "")] for leaves in told.values())


async def test_a_stream_whose_key_cannot_be_had_is_served_as_soon_as_it_can(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_follower, "RETRY_S", 0.05)
    async with serving(tmp_path, etcd, 1) as region, region.client("b1") as client:
        tried = 0

        async def away(*_: object) -> None:
            nonlocal tried
            tried += 1
            raise UnavailableError("The metadata store does not answer.")

        streams = region.nodes["b1"].broker.streams
        streams.before_opening.insert(0, away)
        await client.create_stream("acme/ops/later")
        publishing = asyncio.create_task(client.stream("acme/ops/later").publish(b"x"))
        await until(lambda: tried >= 3)
        assert not publishing.done()
        streams.before_opening.remove(away)
        assert await publishing == 0


async def test_a_broker_that_starts_again_leads_in_the_next_epoch_and_a_publisher_goes_on(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, 2) as region, region.client("b1") as client:
        name = await led_by(region, client, "b2")
        async with client.stream(name).publisher() as publisher:
            offsets = [await publisher.publish(b"%d" % number) for number in range(3)]
            assert epoch_of(region, "b2", name) == 1
            subscription = client.stream(name).subscribe(start="earliest")
            async with subscription as records:
                read = [bytes((await anext(records)).payload) for _ in range(3)]
                await region.stop("b2")
                waiting = [publisher.publish_nowait(b"%d" % number) for number in range(3, 6)]
                await region.start("b2")
                offsets += [await future for future in waiting]
                read += [bytes((await anext(records)).payload) for _ in range(3)]
        assert offsets == list(range(6)) and read == [b"%d" % number for number in range(6)]
        assert epoch_of(region, "b2", name) > 1 and epoch_of(region, "b1", name) == 0


async def test_a_broker_without_its_lease_acknowledges_nothing_and_goes_on_once_the_store_is_back(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    region = ClusteredRegion(tmp_path, etcd, 2, lease_ms=2_000)
    try:
        await region.start("b1", "b2")
        async with region.client("b1") as client:
            names = [await led_by(region, client, broker) for broker in ("b1", "b2")]
            for name in names:
                assert await client.stream(name).publish(b"0") == 0
            etcd.freeze()
            try:
                await until(lambda: all(region.clustered(broker).member.refusal() for broker in region.nodes))
                waiting = [await client.stream(name).publish_nowait(b"1") for name in names]
                with pytest.raises(UnavailableError, match="does not answer for its shards"):
                    await client.request(DescribeStream(names[0]), timeout_s=3)
                assert not any(future.done() for future in waiting)
            finally:
                etcd.thaw()
            assert [await future for future in waiting] == [1, 1]
    finally:
        await region.stop()


async def test_requests_that_write_into_the_audit_log_reach_its_one_writer_from_every_broker(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, 2) as region, region.client("b2") as client:
        assert await client.describe_mesh()
        trails = {name: node.services.governance.trail for name, node in region.nodes.items()}
        (home,) = [name for name in region.nodes if region.clustered(name).has_audit_log]
        (other,) = [name for name in region.nodes if name != home]
        assert trails[home].failure is None and trails[other].failure is not None
        assert f"written by broker {home}" in str(trails[other].failure)
        data = region.folder.root / region.config.data
        assert sorted(path.parent.name for path in data.glob("*/audit")) == ["b1", "b2"]


async def test_a_region_of_before_brokers_copied_the_log_keeps_it_on_the_disk_of_the_broker_that_has_it(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def before(self: ClusterMember, copies: int) -> AuditHome:
        key = self.mirror.view.keys.audit_home
        await self._store.transact([Absent(key)], [Put(key, b'{"broker":"b1"}')])
        return await claim(self, copies)

    claim = ClusterMember._claim_audit
    monkeypatch.setattr(ClusterMember, "_claim_audit", before)
    async with serving(tmp_path, etcd, 2) as region, region.client("b2") as client:
        await region.heard()
        assert [region.clustered(name).has_audit_log for name in region.nodes] == [True, False]
        assert await client.describe_mesh()
        trails = {name: node.services.governance.trail for name, node in region.nodes.items()}
        assert trails["b1"].failure is None and not trails["b1"].copied
        assert "written by broker b1" in str(trails["b2"].failure)
        data = region.folder.root / region.config.data
        assert [path.parent.name for path in data.glob("*/audit")] == ["b1"]
        await region.stop("b1")
        with pytest.raises(UnavailableError, match=r"describe_mesh|DescribeMesh"):
            await client.request(DescribeMesh("logs"), timeout_s=1)


async def test_a_region_is_served_by_one_broker_or_by_several_and_never_by_both(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    region = ClusteredRegion(tmp_path, etcd, 2)
    alone = msgspec.structs.replace(region.config, cluster=None)
    await region.start("b1")
    await region.stop()
    for metadata in (alone.metadata, MetadataConfig()):
        with pytest.raises(RequestError, match="served by several brokers"):
            await Node.start(region.folder, msgspec.structs.replace(alone, metadata=metadata))


async def test_a_region_that_one_broker_served_is_not_begun_anew_by_several(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    region = ClusteredRegion(tmp_path, etcd, 2)
    node = await Node.start(region.folder, msgspec.structs.replace(region.config, cluster=None))
    await node.stop()
    with pytest.raises(RequestError, match="was served by one broker"):
        await region.start("b1")


async def test_a_stream_is_deleted_through_any_broker_and_made_again_elsewhere(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, 2) as region, region.client("b1") as client:
        name = felix.StreamName.parse(await led_by(region, client, "b2"))
        await client.stream(name).publish(b"gone")
        await client.delete_stream(name)
        await until(lambda: region.nodes["b2"].broker.streams.get(name) is None)
        await until(lambda: not region.nodes["b2"]._parts.directory.shards)
        await client.create_stream(name)
        async with client.stream(name).publisher() as publisher:
            assert await publisher.publish(b"new") == 0


async def test_an_ephemeral_stream_begins_anew_with_each_election_and_its_reader_is_told(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    async with serving(tmp_path, etcd, 2) as region, region.client("b1") as client:
        name = await led_by(region, client, "b2", Durability("ephemeral"))
        gaps: list[felix.Gap] = []
        stream = client.stream(name)
        subscription = stream.subscribe(start="earliest", on_gap=gaps.append)
        async with subscription as records, stream.publisher(linger_ms=60_000) as publisher:
            assert await stream.publish(b"before") == 0
            assert bytes((await anext(records)).payload) == b"before"
            incarnation = (await client.describe_stream(name)).incarnation
            # Another broker leads the stream by the time that this one has stopped, or a while later.
            waiting = publisher.publish_nowait(b"meant for what is gone")
            await region.stop("b2")
            await region.start("b2")
            with pytest.raises(RequestError, match="created anew"):
                await waiting
            async with asyncio.timeout(60):
                while True:
                    try:
                        assert await stream.publish(b"after") == 0
                        break
                    except RequestError as error:
                        # On a busy machine it may be elected for once more meanwhile.
                        assert "created anew" in error.sentence
            assert bytes((await anext(records)).payload) == b"after"
            assert {gap.reason.name for gap in gaps} == {"RECREATED"}
            assert (await client.describe_stream(name)).incarnation != incarnation


async def test_a_full_namespace_is_looked_up_before_it_refuses(tmp_path: Path, etcd: EtcdProcess) -> None:
    """Another broker may have made the stream a moment ago, and have led its client here."""
    async with serving(tmp_path, etcd, 2) as region, region.client("b1") as client:
        await client.put_namespace("acme/web", NamespaceSettings(auto_create=True, streams_max=1))
        await client.stream("acme/web/one").publish(b"x")
        broker = region.nodes["b2"].broker
        await until(lambda: broker.streams.get(felix.StreamName.parse("acme/web/one")))

        def use() -> str:
            with pytest.raises(UnavailableError) as refused:
                broker.use_stream(felix.StreamName.parse("acme/web/two"))
            return refused.value.sentence

        assert "looked up" in use()
        await until(lambda: "no more than 1" in use())
