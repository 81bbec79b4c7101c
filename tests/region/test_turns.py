"""What no event tells is looked at in turns: all streams where they are few, each of many within some turns. Sums are right once those that
changed were measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from felix.names import StreamName
from felix.settings import Compaction, Offload, Retention, Views
from region.limits.budget import Budget
from region.log.shard import ShardLog
from region.metadata.records import Stream, StreamConfig
from region.streams import disks as stream_disks
from region.streams import maintenance as stream_maintenance
from region.streams.hosted import HostedStream
from region.streams.table import StreamTable


class Shard(ShardLog):
    """A shard of so many bytes on the disk, that counts how often it is swept."""

    failure = None

    def __init__(self, held: int) -> None:
        self.held = held
        self.swept = 0
        self._disk = SimpleNamespace()  # type: ignore[assignment]

    @property
    def disk_bytes(self) -> int:
        return self.held

    async def sweep(self, now_ms: int) -> int:
        self.swept += 1
        return 0


def table_of(names: list[str], retention: dict[str, Retention]) -> tuple[StreamTable, dict[str, Shard]]:
    ignored: Any = None
    table = StreamTable(ignored, Budget("ring", 1 << 30), ignored)
    shards = {name: Shard(10) for name in names}
    for name, shard in shards.items():
        config = StreamConfig(retention=retention.get(name, Retention()))
        record = Stream(name=name, incarnation="00" * 16, created_ms=1, config=config)
        table._add(HostedStream(StreamName.parse(name), record, {0: shard}, 0, b""))
    return table, shards


def found(table: StreamTable, name: str) -> HostedStream:
    stream = table.get(StreamName.parse(name))
    assert stream is not None
    return stream


async def test_idle_streams_have_turns_and_those_with_a_retention_are_looked_at_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_disks, "MEASURED_AT_ONCE", 3)
    monkeypatch.setattr(stream_maintenance, "TENDED_AT_ONCE", 3)
    names = [f"{tenant}/ops/s{at}" for tenant in ("acme", "globex") for at in range(4)]
    kept = {"acme/ops/s2": Retention(age_ms=1000), "globex/ops/s0": Retention(acked=True)}
    table, shards = table_of(names, kept)
    assert table.disks.stored_bytes() == {"acme": 40, "globex": 40}
    for shard in shards.values():
        shard.held = 11
        shard.disk_bytes_changed()
    # Three at once, until all that changed were measured.
    assert [table.disks.stored_bytes() for _ in range(3)] == [
        {"acme": 43, "globex": 40},
        {"acme": 44, "globex": 42},
        {"acme": 44, "globex": 44},
    ]

    for _ in range(3):
        await table.maintenance.sweep(1)
    assert {name: shards[name].swept for name in names} == {name: 3 if name in kept else 1 for name in names}
    assert [str(stream.name) for stream in table.maintenance.retaining()] == ["globex/ops/s0"]

    for name in names[:4]:
        table._drop(found(table, name))
    assert table.disks.stored_bytes() == {"globex": 44}
    assert (table.index.count("acme"), table.index.count("globex", "ops")) == (0, 4)


async def test_a_pass_visits_the_streams_whose_settings_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_maintenance, "TENDED_AT_ONCE", 1)
    names = [f"acme/ops/s{at}" for at in range(3)]
    table, _ = table_of(names, {})
    first, second, third = (found(table, name) for name in names)
    visited: list[HostedStream] = []

    def none_to_visit(stream: HostedStream) -> list[ShardLog]:
        visited.append(stream)
        return []

    monkeypatch.setattr(HostedStream, "serving", property(none_to_visit))

    async def altered(stream: HostedStream, config: StreamConfig) -> None:
        await table.open(
            msgspec.structs.replace(stream.record, config=config, revision=stream.record.revision + 1)
        )

    async def passes() -> list[list[HostedStream]]:
        found = []
        for work in (
            table.maintenance.sweep(1),
            table.maintenance.compact(1),
            table.maintenance.offload(1, ()),
        ):
            visited.clear()
            await work
            found.append(visited.copy())
        return found

    assert await passes() == [[first], [], [first]], "those whose turn it is"
    await altered(
        first, StreamConfig(retention=Retention(size_bytes=1), views=Views(compaction=Compaction()))
    )
    await altered(third, StreamConfig(views=Views(offload=Offload("file:///store"))))
    assert await passes() == [[first, second], [first], [third, second]]
    await altered(first, StreamConfig())
    assert await passes() == [[third], [], [third]]
    table._drop(third)
    assert await passes() == [[], [], []]
