"""A stream table of one of several brokers: what it leads it serves, in the epoch of its election, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from region_home import running

import felix
from felix import UnavailableError
from felix.batch import NewRecord, encode_batch
from felix.errors import Code, NotLeaderError
from region.folder import RegionFolder
from region.log.shard import ShardLog
from region.metadata.records import Stream, StreamConfig
from region.node import Node
from region.streams import SHARD_BYTES, HostedStream, StreamTable

CREW = felix.StreamName.parse("acme/ops/crew")
RECORD = Stream(name=str(CREW), incarnation="ab" * 16, created_ms=1, config=StreamConfig(shards=2))


class Elections:
    """A Leading of one stream: the epochs in which this broker leads its shards."""

    def __init__(self) -> None:
        self.epoch = 0

    def epochs(self, record: Stream) -> dict[int, int]:
        return dict.fromkeys(range(record.config.shards), self.epoch) if self.epoch else {}

    def leader_of(self, record: Stream, shard: int) -> str:
        return "b1" if self.epoch else "b2"

    def not_leader(self, record: Stream, shard: int) -> NotLeaderError:
        return NotLeaderError(
            f"Shard {shard} is at b2.", stream=record.name, leader="b2", address="127.0.0.1:1"
        )


class Table:
    """A real table on a node's folder and keys, that asks `elections` what it leads."""

    def __init__(self, node: Node) -> None:
        self.elections = Elections()
        self.streams: StreamTable = node.broker.streams
        self.budget = node.broker.budgets.ring
        self.streams._leading = self.elections

    async def elect(self, epoch: int) -> HostedStream:
        """The broker leads in this epoch; 0: no longer."""
        self.elections.epoch = epoch
        await self.streams.reassign(CREW)
        found = self.streams.get(CREW)
        assert found is not None
        return found


@pytest.fixture
async def table(folder: RegionFolder, tmp_path: Path) -> AsyncIterator[Table]:
    async with running(folder, data=str(tmp_path / "data")) as node:
        yield Table(node)


async def append(shard: ShardLog, payload: bytes) -> int:
    batch = encode_batch([NewRecord(payload)], shard=0, producer_id=0, producer_epoch=0, base_sequence=0)
    return (await shard.append(batch)).base_offset


async def test_a_stream_that_another_broker_leads_is_known_and_takes_no_memory(table: Table) -> None:
    before = table.budget.used_bytes
    stream = await table.streams.open(RECORD)
    assert stream.serving == [] and stream.shard_count == 2 and table.budget.used_bytes == before
    with pytest.raises(NotLeaderError) as told:
        stream.shard(1)
    assert (told.value.code, told.value.leader) == (Code.NOT_LEADER, "b2")
    assert [(each.leader, each.stopped) for each in stream.describe(detail=True).state] == [("b2", "")] * 2


async def test_records_stay_over_elections_and_each_is_of_the_epoch_that_it_was_taken_in(
    table: Table,
) -> None:
    await table.streams.open(RECORD)
    for epoch, offset in ((3, 0), (4, 1), (9, 2)):
        stream = await table.elect(epoch)
        assert await append(stream.shard(0), b"%d" % epoch) == offset
        assert table.budget.used_bytes >= 2 * SHARD_BYTES
        stream = await table.elect(0)
        assert stream.elsewhere is not None and table.budget.used_bytes == 0
    shard = (await table.elect(10)).shard(0)
    starts = [(each.epoch, each.start_offset) for each in shard.epochs.starts]
    assert starts[:3] == [(3, 0), (4, 1), (9, 2)] and shard.epochs.current == 10


async def test_who_leads_no_more_refuses_at_once_and_answers_what_was_under_way(table: Table) -> None:
    await table.streams.open(RECORD)
    shard = (await table.elect(1)).shard(0)
    seen: list[list[int]] = []
    table.streams.on_change(lambda stream: seen.append(sorted(stream.replicas)))
    assert await append(shard, b"kept") == 0
    await table.elect(0)
    assert seen[0] == [], "whoever has the stream open is told before its logs close"
    with pytest.raises(UnavailableError):
        await append(shard, b"late")
    assert await append((await table.elect(2)).shard(0), b"next") == 1


async def test_an_epoch_below_that_of_the_log_is_not_served(table: Table) -> None:
    await table.streams.open(RECORD)
    await append((await table.elect(7)).shard(0), b"x")
    await table.elect(0)
    stream = await table.elect(5)
    assert stream.serving == []
    with pytest.raises(UnavailableError, match="Epoch 5 cannot begin"):
        stream.shard(0)


async def test_what_does_not_fit_is_tried_again_and_leaves_nothing_open(table: Table) -> None:
    await table.streams.open(RECORD)
    limit = table.budget.limit_bytes
    table.budget.limit_bytes = table.budget.used_bytes + SHARD_BYTES
    with pytest.raises(UnavailableError) as full:
        await table.elect(1)
    assert full.value.code is Code.LIMIT_MEMORY
    stream = table.streams.get(CREW)
    assert stream is not None and stream.serving == []
    table.budget.limit_bytes = limit
    assert len((await table.elect(1)).serving) == 2
