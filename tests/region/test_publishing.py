"""Publishing with a condition or a message id, through the SDK against a real broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from region_home import running
from region_peer import batch_frame, client, raw_peer, take, until

import felix
import felix.sync
from felix.batch import BRIDGED_EPOCH, NewRecord, encode_batch
from felix.errors import Code, NotLeaderError, OffsetMismatchError, RequestError, UnavailableError
from felix.frames import FrameType, encode_frame
from felix.messages import OpenPublisher, encode_request
from felix.names import StreamName
from felix.provenance import PATH_HEADER
from region.cluster.records import ShardId
from region.folder import RegionFolder
from region.node import Node
from region.replication.hosted import not_leader
from region.session.publishing import named

ORDERS = "acme/payments/orders"

pytestmark = pytest.mark.timeout(60)


async def test_compare_and_set_over_the_wire(operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS, shards=2)
    orders = operator.stream(ORDERS)
    assert await orders.publish(b"first", shard=1, expected_offset=0) == 0
    with pytest.raises(OffsetMismatchError, match="ends at offset 1, not at 0") as mismatch:
        await orders.publish(b"late", shard=1, expected_offset=0)
    assert mismatch.value.log_end == 1
    assert await orders.publish(b"second", shard=1, expected_offset=mismatch.value.log_end) == 1
    receipt = await orders.publish_batch(
        [felix.NewRecord(b"c"), felix.NewRecord(b"d")], shard=1, expected_offset=2
    )
    assert receipt.base_offset == 2
    assert await orders.publish(b"other shard", shard=0, expected_offset=0) == 0
    found = await take(orders.subscribe("earliest", shards=[1]), 4)
    assert [bytes(record.payload) for record in found] == [b"first", b"second", b"c", b"d"]


async def test_what_follows_a_refused_condition_goes_on_in_order(operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS)
    async with operator.stream(ORDERS).publisher() as publisher:
        sent = [publisher.publish_nowait(b"%d" % n) for n in range(3)]
        refused = asyncio.ensure_future(publisher.publish(b"no", expected_offset=99))
        await asyncio.sleep(0)
        sent += [publisher.publish_nowait(b"%d" % n) for n in range(3, 6)]
        with pytest.raises(OffsetMismatchError):
            await refused
        assert await asyncio.gather(*sent) == list(range(6))
    found = await take(operator.stream(ORDERS).subscribe("earliest"), 6)
    assert [bytes(record.payload) for record in found] == [b"%d" % n for n in range(6)]


async def test_no_producer_says_that_a_bridge_brought_its_batch(
    node: Node, operator: felix.RegionClient
) -> None:
    await operator.create_stream(ORDERS)
    claimed = encode_batch([NewRecord(b"x", None, {PATH_HEADER: b"ap-south"})], producer_epoch=BRIDGED_EPOCH)
    async with raw_peer(node.folder, node.address) as peer:
        stream = peer.open_stream()
        peer.send(encode_request(OpenPublisher(ORDERS), 1), stream)
        await until(lambda: peer.answers(1))
        peer.send(encode_frame(FrameType.BATCH, claimed.encode(), 2), stream)
        await until(lambda: peer.errors(2) or peer.of(FrameType.APPENDED))
        assert [error.code for error in peer.errors(2)] == [Code.BATCH_MALFORMED]
    assert await operator.stream(ORDERS).publish(b"first") == 0


async def test_writers_that_race_lose_no_update(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS)

    async def count(region: felix.RegionClient) -> int:
        tries = 0
        for n in range(10):
            expected = 0
            while True:
                tries += 1
                try:
                    await region.stream(ORDERS).publish(b"%d" % n, expected_offset=expected)
                    break
                except OffsetMismatchError as error:
                    expected = error.log_end
        return tries

    async with client(node.folder) as one, client(node.folder) as two:
        await asyncio.gather(count(one), count(two))
    state = await operator.describe_stream(ORDERS)
    assert state.state[0].high_watermark == 20


async def test_an_impossible_condition_is_refused_here(operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS)
    with pytest.raises(RequestError, match="no offset -1"):
        await operator.stream(ORDERS).publish(b"x", expected_offset=-1)
    with pytest.raises(RequestError, match="no shard 1"):
        await operator.stream(ORDERS).publish(b"x", shard=1)
    async with operator.stream(ORDERS).publisher(acks="none") as publisher:
        with pytest.raises(RequestError, match="acks='none'"):
            await publisher.publish(b"x", expected_offset=0)


async def test_a_condition_that_is_cut_off_ends_the_session(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS)
    async with raw_peer(node.folder, node.address) as peer:
        stream_id = peer.open_stream()
        await peer.ask(OpenPublisher(ORDERS), 1, stream_id)
        whole = batch_frame([b"x"])[12:]
        peer.send(encode_frame(FrameType.CONDITIONAL, bytes(7) + b"\x01" + whole, 2), stream_id)
        await until(lambda: peer.errors(2))
        assert peer.errors(2)[0].code is Code.OFFSET_MISMATCH
        peer.send(encode_frame(FrameType.CONDITIONAL, bytes(7), 3), stream_id)
        assert (await peer.ending()).code is Code.FRAME_MALFORMED


async def test_the_synchronous_face_has_conditions(folder: RegionFolder, node: Node) -> None:
    def work() -> None:
        profile = felix.load_profile("us-east", home=folder.root.parent)
        with felix.sync.connect(profile=profile) as region:
            region.create_stream(ORDERS)
            assert region.stream(ORDERS).publish(b"a", expected_offset=0) == 0
            with pytest.raises(OffsetMismatchError):
                region.stream(ORDERS).publish(b"b", expected_offset=0)

    await asyncio.to_thread(work)


DEDUPLICATING = felix.Views(deduplication=felix.Deduplication(window_ms=600_000))


async def test_message_ids_over_the_wire_and_over_a_restart(folder: RegionFolder, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    async with running(folder, data=data) as node, client(folder) as region:
        state = await region.create_stream(ORDERS, shards=4, views=DEDUPLICATING)
        assert state.views == DEDUPLICATING
        orders = region.stream(ORDERS)
        first = {n: await orders.publish(b"%d" % n, message_id=f"order-{n}") for n in range(20)}
        ((_, _, gauges), *_) = node.gauges.shards()
        assert gauges["message_ids"] > 0
    async with running(folder, data=data) as node, client(folder) as region:
        orders = region.stream(ORDERS)
        again = await asyncio.gather(
            *(orders.publish(b"again", message_id=f"order-{n}".encode()) for n in range(20))
        )
        assert dict(enumerate(again)) == first
        async with orders.publisher() as publisher:
            mixed = [publisher.publish_nowait(b"m", message_id=f"order-{n}") for n in range(30)]
            mixed += [publisher.publish_nowait(b"plain") for _ in range(3)]
            assert (await asyncio.gather(*mixed))[:20] == [first[n] for n in range(20)]
        state = await region.describe_stream(ORDERS)
        assert sum(shard.high_watermark for shard in state.state) == 33


async def test_a_receipt_names_each_offset_where_some_were_there(operator: felix.RegionClient) -> None:
    await operator.create_stream(ORDERS, views=DEDUPLICATING)
    orders = operator.stream(ORDERS)
    await orders.publish(b"a", key=b"k", message_id="1")
    records = [
        felix.NewRecord(b"b", b"k", {"felix.message-id": b"2"}),
        felix.NewRecord(b"a", b"k", {"felix.message-id": b"1"}),
        felix.NewRecord(b"c", b"k"),
    ]
    receipt = await orders.publish_batch(records)
    assert receipt.offsets == (1, 0, 2)
    with pytest.raises(RequestError, match="1 to 64 bytes"):
        await orders.publish(b"x", message_id="")


async def test_lost_answers_and_ids_leave_each_record_once(node: Node, operator: felix.RegionClient) -> None:
    """The connection breaks under batches that mix new ids, repeated ones and records without any."""
    await operator.create_stream(ORDERS, views=DEDUPLICATING)
    async with client(node.folder) as region, region.stream(ORDERS).publisher(batch_records=7) as publisher:
        sent = []
        for n in range(600):
            found = None if n % 5 == 0 else f"id-{n % 200}"
            sent.append(publisher.publish_nowait(b"%d" % n, message_id=found))
            if n % 60 == 0:
                await asyncio.sleep(0.005)
                link = region.connection.link
                if link is not None:
                    link.connection.close()
                await until(lambda: region.is_connected)
        offsets = await asyncio.gather(*sent)
        assert region.reconnects >= 5
    distinct = {("id", n % 200) if n % 5 else ("plain", n): offsets[n] for n in range(600)}
    for n in range(600):
        assert offsets[n] == distinct[("id", n % 200) if n % 5 else ("plain", n)]
    state = await operator.describe_stream(ORDERS)
    assert state.state[0].high_watermark == len(distinct) == len(set(distinct.values()))


def test_a_batch_that_was_under_way_when_its_leader_was_deposed_is_refused_by_the_streams_name() -> None:
    name = StreamName.parse("acme/ops/orders")
    told = named(name, not_leader(ShardId("00" * 16, 3)))
    assert isinstance(told, NotLeaderError) and told.stream == str(name)
    assert told.sentence == "This broker does not lead shard 3. It was not written."
    for other in (told, UnavailableError("Busy.", code=Code.LIMIT_RATE), RequestError("No.")):
        assert named(name, other) is other
