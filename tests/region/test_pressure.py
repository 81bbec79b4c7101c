"""Memory under pressure: stalled subscribers, many sessions, budgets that run out; nobody else suffers, nobody hangs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from region_home import running
from region_peer import batch_frame, client, encode_request, raw_peer, take, until

import felix
from felix import Code, Durability, GapReason, ProtocolError, UnavailableError
from felix.batch import decode_batch
from felix.frames import CONTROL_BYTES_MAX, Credit, FrameType, decode_gap
from felix.messages import DescribeRegion, ListStreams, OpenPublisher, Start, Subscribe, Subscribed
from policy.quantity import Size
from region.config import LimitsConfig
from region.folder import RegionFolder
from region.limits.budget import Budget
from region.node import Node
from region.session.client_session import BACKLOG_BYTES_MAX, PUBLISH_WINDOW_BYTES, REQUESTS_MAX, STREAMS_MAX

CREW = "acme/ops/crew"
CREDIT_MIN = (1 << 20) + 12


def settled(node: Node) -> bool:
    """Nothing is held for anybody."""
    budgets = node.broker.budgets
    node.broker.settle_delivery()
    return not (budgets.delivery.used_bytes or budgets.catch_up.used_bytes or budgets.publish.used_bytes)


async def fill(region: felix.RegionClient, megabytes: int, record_bytes: int = 4096) -> int:
    """Publish so much, and return how many records that are."""
    count = megabytes * (1 << 20) // record_bytes
    async with region.stream(CREW).publisher() as publisher:
        for at in range(count):
            await publisher.send(b"%010d" % at + bytes(record_bytes - 10))
    return count


@pytest.mark.parametrize("kind", ["fsync", "ephemeral"])
async def test_a_stalled_subscriber_costs_nobody_else_anything(
    node: Node, operator: felix.RegionClient, kind: str
) -> None:
    await operator.create_stream(CREW, durability=Durability(kind), ring_bytes=4 << 20)
    async with client(node.folder) as other:
        stalled = other.stream(CREW).subscribe("earliest", credit_bytes=2 << 20)
        await stalled.open()
        awake = operator.stream(CREW).subscribe("earliest", on_gap="raise", credit_bytes=8 << 20)
        await awake.open()
        reading = asyncio.ensure_future(take(awake, 5120))
        count = await fill(operator, 20)
        # The one that reads is not kept waiting by the one that does not. On a ring, it may be overtaken: by a gap.
        if kind == "fsync":
            records = await reading
            assert [record.offset for record in records] == list(range(count))
        else:
            reading.cancel()
        held = node.broker.budgets
        assert held.delivery.used_bytes <= 4 << 20
        assert stalled._feed.held_bytes <= 2 << 20
        (shard,) = node.broker.streams.get(felix.StreamName.parse(CREW)).serving  # type: ignore[union-attr]
        assert shard.ring_bytes <= shard.settings.ring_bytes_max
        # It wakes up: everything where the log kept it, else an explicit gap, and then everything.
        seen = -1
        async with asyncio.timeout(120):
            while seen < count - 1:
                record = await anext(stalled)
                missing = record.offset - seen - 1
                if missing:
                    assert kind == "ephemeral"
                    gap = stalled.gaps[-1]
                    assert (gap.reason, gap.first_offset, gap.next_offset) == (
                        GapReason.RING,
                        seen + 1,
                        record.offset,
                    )
                seen = record.offset
        assert stalled.gap_count <= 1 if kind == "ephemeral" else not stalled.gap_count
        await stalled.close()
        await awake.close()


async def test_leftover_credit_brings_neither_repeated_reads_nor_repeated_gaps(
    node: Node, operator: felix.RegionClient
) -> None:
    """A subscriber whose credit ends inside a batch waits; it is not served from the disk again and again."""
    await operator.create_stream(CREW, durability=Durability("ephemeral"), ring_bytes=1 << 20)
    await operator.create_stream("acme/ops/kept")
    async with operator.stream("acme/ops/kept").publisher(batch_bytes=1 << 19) as publisher:
        for _ in range(60):
            await publisher.send(bytes(500_000))
    async with raw_peer(node.folder, node.address) as peer:
        kept = await peer.ask(Subscribe("acme/ops/kept", Start("earliest"), credit_bytes=1_200_000), 1)
        ring = await peer.ask(Subscribe(CREW, Start("earliest"), credit_bytes=1_200_000), 2)
        assert isinstance(kept, Subscribed)
        assert isinstance(ring, Subscribed)
        async with operator.stream(CREW).publisher(batch_bytes=1 << 19) as publisher:
            for _ in range(60):
                await publisher.send(bytes(400_000))
        await asyncio.sleep(0.2)
        (shard,) = node.broker.streams.get(felix.StreamName.parse("acme/ops/kept")).serving  # type: ignore[union-attr]
        before = shard.counters.disk_reads
        await asyncio.sleep(0.3)
        assert shard.counters.disk_reads == before, "nothing is read that credit does not reach for"
        gaps = [
            decode_gap(f.body) for frames in peer.frames.values() for f in frames if f.type is FrameType.GAP
        ]
        assert len(gaps) <= 1
        # With credit, both go on.
        for subscription in (kept.subscription, ring.subscription):
            peer.send(Credit(subscription, 1 << 30).encode())
        await until(lambda: sum(f.type is FrameType.BATCH for fs in peer.frames.values() for f in fs) >= 62)
    await operator.close()
    await until(lambda: settled(node))


async def test_shards_take_turns_where_credit_is_short(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(CREW, shards=6)
    async with operator.stream(CREW).publisher(batch_bytes=1 << 19) as publisher:
        for at in range(120):
            await publisher.send(bytes(200_000), key=b"%d" % at)
    async with raw_peer(node.folder, node.address) as peer:
        opened = await peer.ask(Subscribe(CREW, Start("earliest"), credit_bytes=CREDIT_MIN), 1)
        assert isinstance(opened, Subscribed)
        limit = CREDIT_MIN
        for _ in range(12):
            limit += 700_000
            peer.send(Credit(opened.subscription, limit).encode())
            await asyncio.sleep(0.03)
        shards = {
            decode_batch(frame.body).header.shard
            for frames in peer.frames.values()
            for frame in frames
            if frame.type is FrameType.BATCH
        }
        assert shards == set(range(6)), "no shard is passed over"


async def test_much_credit_does_not_end_in_a_standstill(node: Node, operator: felix.RegionClient) -> None:
    """Delivery stops above the transport's high-water mark, and goes on by itself."""
    await operator.create_stream(CREW)
    count = await fill(operator, 24)
    async with client(node.folder) as other:
        async with other.stream(CREW).subscribe("earliest", credit_bytes=256 << 20) as reader:
            records = await take(reader, count)
        assert [record.offset for record in records] == list(range(count))


async def test_a_short_delivery_budget_is_shared_and_nobody_hangs(
    folder: RegionFolder, tmp_path: Path
) -> None:
    limits = LimitsConfig(delivery_budget=Size(4 << 20), catch_up_budget=Size(1 << 20))
    async with running(folder, data=str(tmp_path / "data"), limits=limits) as node, client(folder) as region:
        await region.create_stream(CREW)
        count = await fill(region, 8)
        async with client(folder) as one, client(folder) as other:
            readers = [
                each.stream(CREW).subscribe("earliest", credit_bytes=64 << 20)
                for each in (one, other)
                for _ in range(4)
            ]
            for found in await asyncio.gather(*(take(reader, count) for reader in readers)):
                assert [record.offset for record in found] == list(range(count))
            for budget in node.broker.budgets.all():
                assert 0 <= budget.used_bytes <= budget.limit_bytes
            # What was delivered and left is not charged for ever.
            await until(lambda: node.broker.settle_delivery() or not node.broker.budgets.delivery.used_bytes)
            for reader in readers:
                await reader.close()


async def test_sessions_that_only_read_take_no_publish_budget(folder: RegionFolder, tmp_path: Path) -> None:
    limits = LimitsConfig(publish_budget=Size(4 << 20))
    async with running(folder, data=str(tmp_path / "data"), limits=limits) as node, client(folder) as region:
        await region.create_stream(CREW)
        readers = [client(folder) for _ in range(6)]
        for reader in readers:
            await reader.open()
        assert node.broker.budgets.publish.used_bytes == 0
        assert await region.stream(CREW).publish(b"x") == 0
        with pytest.raises(UnavailableError) as caught:
            async with raw_peer(folder, node.address) as peer:
                await peer.ask(OpenPublisher(CREW), 3, peer.open_stream())
        assert caught.value.code is Code.LIMIT_MEMORY
        assert caught.value.retry_after_ms
        assert "publish_budget" in caught.value.hint
        for reader in readers:
            await reader.close()
    assert node.broker.budgets.publish.used_bytes == 0


async def test_two_hundred_sessions_at_their_publish_window(folder: RegionFolder, tmp_path: Path) -> None:
    """Each sends half of a batch as large as its window lets it; what the broker holds stays within the budget."""
    async with running(folder, data=str(tmp_path / "data")) as node, client(folder) as region:
        await region.create_stream(CREW)
        budget = node.broker.budgets.publish
        opened, refused = 0, []
        async with asyncio.timeout(120):
            peers = [raw_peer(folder, node.address) for _ in range(200)]
            entered = [await peer.__aenter__() for peer in peers]
            try:
                for peer in entered:
                    stream = peer.open_stream()
                    try:
                        await peer.ask(OpenPublisher(CREW), 3, stream)
                    except UnavailableError as error:
                        refused.append(error)
                        continue
                    opened += 1
                    frame = batch_frame([bytes(1_000_000)], 4)
                    peer.send(frame[: len(frame) // 2], stream)
                    assert budget.used_bytes <= budget.limit_bytes
                assert opened >= 64
                assert opened + len(refused) == 200
                for error in refused:
                    assert (error.code, bool(error.hint), error.retry_after_ms) == (
                        Code.LIMIT_MEMORY,
                        True,
                        1000,
                    )
                # Those that were let in still publish, and reading needs no budget.
                state = await region.describe()
                assert state.gauges["publish_bytes"] <= state.gauges["publish_bytes_limit"]
                assert state.gauges["sessions"] == 201
            finally:
                for each in peers:
                    await each.__aexit__(None, None, None)
        await until(lambda: len(node.broker.sessions) == 1)
        assert budget.used_bytes == 0, "sessions that died in the middle leave nothing behind"


async def test_a_window_goes_back_with_the_last_publisher(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(CREW)
    budget: Budget = node.broker.budgets.publish
    one = operator.stream(CREW).publisher()
    other = operator.stream(CREW).publisher()
    await one.open()
    await other.open()
    assert budget.used_bytes == PUBLISH_WINDOW_BYTES
    await one.publish(b"x")
    await one.close()
    await asyncio.sleep(0.05)
    assert budget.used_bytes == PUBLISH_WINDOW_BYTES
    await other.close()
    await until(lambda: budget.used_bytes == 0)
    async with operator.stream(CREW).publisher() as again:
        assert await again.publish(b"y") == 1
        assert budget.used_bytes == PUBLISH_WINDOW_BYTES


async def test_acks_none_gives_credit_back(node: Node, operator: felix.RegionClient) -> None:
    """Nothing is acknowledged, and yet far more than the window goes through."""
    await operator.create_stream(CREW, durability=Durability("ephemeral"))
    async with operator.stream(CREW).publisher(acks="none") as publisher:
        for _ in range(5000):
            await publisher.send(bytes(8_000))
    (shard,) = node.broker.streams.get(felix.StreamName.parse(CREW)).serving  # type: ignore[union-attr]
    await until(lambda: shard.high_watermark == 5000)
    for session in node.broker.sessions:
        assert session.publish_window.held_bytes == 0


async def test_credit_that_is_passed_ends_the_session(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(CREW, durability=Durability("interval", 1000))
    async with raw_peer(node.folder, node.address) as peer:
        streams = [peer.open_stream() for _ in range(30)]
        for at, stream in enumerate(streams):
            await peer.ask(OpenPublisher(CREW), 10 + at, stream)
        frame = batch_frame([bytes(1_000_000)], 4)
        # No batch is ever whole, so none is counted when it is whole.
        for stream in streams:
            peer.send(frame[:-1], stream)
        error = await peer.ending()
        assert isinstance(error, ProtocolError)
        assert error.code is Code.CREDIT_EXCEEDED
    assert await operator.stream(CREW).publish(b"unaffected") == 0


async def test_too_many_publishers_are_refused_one_by_one(node: Node, operator: felix.RegionClient) -> None:
    await operator.create_stream(CREW)
    async with raw_peer(node.folder, node.address) as peer:
        for at in range(STREAMS_MAX):
            await peer.ask(OpenPublisher(CREW), 10 + at, peer.open_stream())
        extra = peer.open_stream()
        with pytest.raises(UnavailableError, match="streams open") as caught:
            await peer.ask(OpenPublisher(CREW), 5, extra)
        assert caught.value.hint
        assert peer.closed_with is None
        assert await peer.ask(DescribeRegion(), 6)


async def test_a_client_that_asks_and_does_not_hear_is_sent_away(
    node: Node, operator: felix.RegionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are bounded too: here the peer takes no datagram up, so that hardly one of them leaves."""
    limit = 4 << 20  # below the limit in force, since a peer that hears nothing soon stops sending
    assert limit < BACKLOG_BYTES_MAX
    monkeypatch.setattr("region.session.client_session.BACKLOG_BYTES_MAX", limit)
    for at in range(20):
        await operator.create_stream(
            f"acme/ops/wide-{at}", shards=45, durability=Durability("ephemeral"), ring_bytes=1 << 20
        )
    before = set(node.broker.sessions)
    most = 0
    async with raw_peer(node.folder, node.address) as peer:
        (session,) = node.broker.sessions - before
        peer.go_deaf()
        async with asyncio.timeout(120):
            while not session.ended:
                assert session.connection is not None
                most = max(most, session.connection.backlog_bytes())
                peer.send(b"".join(encode_request(ListStreams(limit=500), n) for n in range(1, 60)))
                await asyncio.sleep(0.01)
        # What requests that were under way may still be answered with comes on top.
        assert most < limit + REQUESTS_MAX * CONTROL_BYTES_MAX
        await until(lambda: session not in node.broker.sessions)
    assert node.broker.metrics.refusals["limit_memory"] == 1


def test_a_budget_that_serves_nobody_is_refused() -> None:
    with pytest.raises(felix.RequestError, match="catch_up_budget is 1kB"):
        LimitsConfig(catch_up_budget=Size(1000))
    assert msgspec.structs.replace(LimitsConfig(), sessions=3).sessions == 3
