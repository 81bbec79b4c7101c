"""Publish and subscribe against a real broker: durability kinds, order, places to start, restarts, refusals."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import pytest
from region_home import running
from region_peer import client, encode_request, raw_peer, take, until

import felix
from felix import Code, Durability, RequestError, UnavailableError
from felix.frames import FrameType
from felix.messages import (
    CreateStream,
    DeleteStream,
    DescribeStream,
    ListStreams,
    OpenPublisher,
    Request,
    Start,
    StreamPage,
    Subscribe,
)
from felix.names import shard_for_key
from region.folder import RegionFolder
from region.node import Node
from region.streams.settings import SHARD_BYTES

CREW = "acme/ops/crew"
KINDS = [Durability("fsync"), Durability("interval", 20), Durability("ephemeral")]


@pytest.mark.parametrize("durability", KINDS, ids=lambda d: d.kind)
async def test_every_subscriber_sees_each_shard_in_the_same_order(
    folder: RegionFolder, tmp_path: Path, engine: str, durability: Durability
) -> None:
    async with (
        running(folder, data=str(tmp_path / "data"), engine=engine),
        client(folder, engine=engine) as one,
        client(folder, engine=engine) as other,
    ):
        await one.create_stream(CREW, shards=3, durability=durability)
        readers = [one.stream(CREW).subscribe("earliest"), other.stream(CREW).subscribe("earliest")]
        for reader in readers:
            await reader.open()
        count = 1500

        async def publish(region: felix.RegionClient, who: bytes) -> None:
            async with region.stream(CREW).publisher(batch_records=50) as publisher:
                for at in range(count):
                    await publisher.send(b"%s %d" % (who, at), key=b"%d" % (at % 40))

        await asyncio.gather(publish(one, b"one"), publish(other, b"other"))
        seen = [await by_shard(reader, 2 * count) for reader in readers]
        assert seen[0] == seen[1]
        for shard, records in seen[0].items():
            assert [offset for offset, _, _ in records] == list(range(len(records))), "no hole, no repeat"
            last: dict[tuple[bytes, bytes], int] = {}
            for _, key, payload in records:
                assert shard_for_key(key, 3) == shard
                who, at = payload.split()
                assert int(at) > last.get((who, key), -1), "a producer's records of one key stay in order"
                last[who, key] = int(at)
        for reader in readers:
            await reader.close()


async def by_shard(reader: felix.Subscription, count: int) -> dict[int, list[tuple[int, bytes, bytes]]]:
    found: dict[int, list[tuple[int, bytes, bytes]]] = defaultdict(list)
    async with asyncio.timeout(120):
        async for batch in reader.batches():
            for record in batch.records():
                assert record.key is not None
                found[batch.shard].append((record.offset, bytes(record.key), bytes(record.payload)))
                count -= 1
            if not count:
                return dict(found)
    raise AssertionError("the subscription ended")


async def test_a_restart_brings_everything_back(folder: RegionFolder, tmp_path: Path, engine: str) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data, engine=engine), client(folder, engine=engine) as region:
        state = await region.create_stream(CREW, shards=2, durability=Durability("interval", 1000))
        await region.create_stream("acme/ops/fleet")
        await region.put_rights("spiffe://us-east.acme/client/orders-svc", ["publish acme/ops/crew"])
        written = await region.stream(CREW).publish_many(
            [b"%d" % i for i in range(500)], [b"%d" % i for i in range(500)]
        )
    async with running(folder, data=data, engine=engine), client(folder, engine=engine) as region:
        again = await region.describe_stream(CREW)
        assert again.incarnation == state.incarnation
        assert sum(shard.high_watermark for shard in again.state) == 500
        assert [stream.stream async for stream in region.list_streams()] == [CREW, "acme/ops/fleet"]
        assert await region.list_rights() == {
            "spiffe://us-east.acme/client/orders-svc": ["publish acme/ops/crew"]
        }
        async with region.stream(CREW).subscribe("earliest") as reader:
            records = await take(reader, 500)
        assert {bytes(record.payload): record.offset for record in records} == {
            b"%d" % i: offset for i, offset in enumerate(written)
        }
        assert (
            await region.stream(CREW).publish(b"more", key=b"0")
            == again.state[shard_for_key(b"0", 2)].high_watermark
        )


async def test_places_to_start(operator: felix.RegionClient) -> None:
    stream = operator.stream(CREW)
    await stream.create()
    await stream.publish_many([b"early %d" % i for i in range(10)])
    await asyncio.sleep(0.05)
    between = datetime.now(UTC)
    await asyncio.sleep(0.05)
    await stream.publish_many([b"late %d" % i for i in range(10)])

    async def first(start: felix.subscription.StartAt) -> felix.Record:
        async with stream.subscribe(start) as reader:
            return (await take(reader, 1))[0]

    assert (await first("earliest")).offset == 0
    assert (await first(7)).offset == 7
    assert bytes((await first(between)).payload) == b"late 0"
    assert (await first(datetime(2001, 1, 1, tzinfo=UTC))).offset == 0
    for start in ("latest", 21, datetime(2200, 1, 1, tzinfo=UTC)):
        async with stream.subscribe(start) as reader:
            await reader.open()
            offset = await stream.publish(b"new")
            assert (await take(reader, 1))[0].offset == offset


@pytest.mark.parametrize(
    "start", [Start("offset", 21), Start("offset", 0, {0: 21}), Start("offset", (1 << 63) - 1)]
)
async def test_a_start_that_is_not_written_yet_is_refused(
    node: Node, operator: felix.RegionClient, start: Start
) -> None:
    state = await operator.create_stream(CREW)
    await operator.stream(CREW).publish_many([b"%d" % i for i in range(20)])
    async with raw_peer(node.folder, node.address) as peer:
        wanted = Subscribe(CREW, start, credit_bytes=1 << 21, incarnation=state.incarnation)
        with pytest.raises(RequestError, match="not written yet; the next one is 20") as caught:
            await peer.ask(wanted, 7)
        assert caught.value.code is Code.OFFSET_OUT_OF_RANGE
        assert caught.value.hint


@pytest.mark.parametrize(
    "wanted",
    [
        Subscribe(CREW, Start("sometime"), credit_bytes=1 << 21),
        Subscribe(CREW, Start("earliest", offsets={0: -1}), credit_bytes=1 << 21),
        Subscribe(CREW, Start("earliest", offsets={0: (1 << 64) - 1}), credit_bytes=1 << 21),
        Subscribe(CREW, Start("earliest"), shards=[0, 0], credit_bytes=1 << 21),
        Subscribe(CREW, Start("earliest"), shards=[7], credit_bytes=1 << 21),
        Subscribe(CREW, Start("earliest"), shards=[-1], credit_bytes=1 << 21),
        Subscribe(CREW, Start("earliest"), credit_bytes=1000),
        Subscribe("Acme/Ops", Start("earliest"), credit_bytes=1 << 21),
    ],
)
async def test_impossible_subscriptions_are_refused_and_leave_nothing(
    node: Node, operator: felix.RegionClient, wanted: Subscribe
) -> None:
    state = await operator.create_stream(CREW)
    async with raw_peer(node.folder, node.address) as peer:
        if wanted.start.offsets:
            wanted = Subscribe(CREW, wanted.start, credit_bytes=1 << 21, incarnation=state.incarnation)
        with pytest.raises((RequestError, felix.ProtocolError)) as caught:
            await peer.ask(wanted, 1)
        assert caught.value.code is not Code.INTERNAL
        assert node.broker.gauges()["subscriptions"] == 0
        assert peer.closed_with is None
        assert not peer.of(FrameType.ANSWER)


async def test_an_unknown_stream_and_one_without_the_right_are_answered_alike(
    node: Node, operator: felix.RegionClient, folder: RegionFolder
) -> None:
    await operator.create_stream(CREW)
    identity = felix.load_identity(folder.identity("orders-svc"))

    def questions(name: str) -> list[Request]:
        return [
            Subscribe(name, credit_bytes=1 << 21),
            Subscribe(name, credit_bytes=1 << 21, grant="g-aaaaaaaaaaaaaaaa"),
            DescribeStream(name),
            DeleteStream(name),
            CreateStream(name),
        ]

    async with raw_peer(node.folder, node.address, identity=identity) as peer:
        bodies: dict[str, list[bytes]] = {}
        for name in (CREW, "acme/ops/crow"):
            correlation = 100
            for request in questions(name):
                correlation += 1
                peer.frames.clear()
                peer.send(encode_request(request, correlation))
                await until(lambda: peer.errors())
                (frame,) = peer.of(FrameType.ERROR)
                bodies.setdefault(name, []).append(bytes(frame.body).replace(name.encode(), b"NAME"))
            peer.frames.clear()
            peer.send(encode_request(OpenPublisher(name), 200), peer.open_stream())
            await until(lambda: peer.errors())
            (frame,) = peer.of(FrameType.ERROR)
            assert peer.errors()[0].code is Code.NOT_FOUND_OR_FORBIDDEN
            bodies[name].append(bytes(frame.body).replace(name.encode(), b"NAME"))
        known, unknown = (bodies[name] for name in (CREW, "acme/ops/crow"))
        assert known == unknown


async def test_a_stream_that_does_not_fit_is_refused_before_anything_is_written(
    folder: RegionFolder, tmp_path: Path
) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data), client(folder) as region:
        with pytest.raises(UnavailableError, match="bytes of memory") as caught:
            await region.create_stream(CREW, durability=Durability("ephemeral"), ring_bytes=4 << 30)
        assert caught.value.code is Code.LIMIT_MEMORY
        assert "ring_budget" in caught.value.hint
        assert [stream async for stream in region.list_streams()] == []
    async with running(folder, data=data), client(folder) as region:
        await region.create_stream(CREW)


async def test_a_shard_takes_memory_for_its_newest_records_when_there_are_some(
    node: Node, operator: felix.RegionClient
) -> None:
    budget = node.broker.budgets.ring
    empty = budget.used_bytes
    await operator.create_stream(CREW, shards=40)
    reserved = budget.used_bytes - empty
    assert reserved == 40 * SHARD_BYTES
    assert await operator.stream(CREW).publish(bytes(5000), key=b"k") == 0
    held = budget.used_bytes - empty - reserved
    assert 5000 < held < 6000
    await operator.delete_stream(CREW)
    await until(lambda: budget.used_bytes == empty)


async def test_a_listing_of_many_shards_comes_in_pages_that_fit(operator: felix.RegionClient) -> None:
    for at in range(12):
        await operator.create_stream(
            f"acme/ops/wide-{at}", shards=40, durability=Durability("ephemeral"), ring_bytes=1 << 20
        )
    found = [state async for state in operator.list_streams()]
    assert len(found) == 12
    assert all(len(state.state) == 40 for state in found)


async def test_create_and_delete_in_a_hurry_never_brings_back_the_dead(operator: felix.RegionClient) -> None:
    seen = set()
    for _ in range(15):
        state = await operator.create_stream(CREW, durability=Durability("ephemeral"), ring_bytes=1 << 20)
        assert state.incarnation not in seen
        seen.add(state.incarnation)
        async with operator.stream(CREW).subscribe("earliest") as reader:
            async with operator.stream(CREW).publisher() as publisher:
                await publisher.publish(b"x")
            assert bytes((await take(reader, 1))[0].payload) == b"x"
        assert (await operator.describe_stream(CREW)).incarnation == state.incarnation
        await operator.delete_stream(CREW)
        with pytest.raises(RequestError):
            await operator.describe_stream(CREW)


async def test_durability_must_be_known(node: Node) -> None:
    async with raw_peer(node.folder, node.address) as peer:
        with pytest.raises(RequestError, match="it is fsync, interval or ephemeral"):
            await peer.ask(CreateStream(CREW, durability=Durability("sometimes")), 1)
        with pytest.raises(RequestError, match="shards"):
            await peer.ask(CreateStream(CREW, shards=-1), 2)


async def test_a_listing_goes_on_where_it_ended_whatever_names_are_like(operator: felix.RegionClient) -> None:
    """In order of the text, in which `a-b/` stands before `a/`."""
    names = ["a-b/ops/x", "a/ops-two/x", "a/ops/x", "a/ops/y", "b/ops/x"]
    for name in names:
        await operator.create_stream(name)
    found: list[str] = []
    while True:
        page = await operator.request(ListStreams("", found[-1] if found else "", limit=2))
        assert isinstance(page, StreamPage)
        found += [state.stream for state in page.streams]
        if not page.more:
            break
    assert found == names
    assert [state.stream async for state in operator.list_streams("a/")] == names[1:4]
