"""Settings of a stream that serves are changed, and count at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from region_home import running
from region_peer import client, until

import felix
from felix.errors import Code, RequestError
from felix.settings import Compaction, Deduplication, Offload, Views
from policy.quantity import Duration
from region.config import StorageConfig
from region.folder import RegionFolder

GATES = "acme/ops/gates"


async def test_retention_is_changed_while_the_stream_serves(folder: RegionFolder, tmp_path: Path) -> None:
    quick = StorageConfig(sweep_every=Duration(10))
    async with running(folder, data=str(tmp_path / "data"), storage=quick) as node, client(folder) as region:
        await region.create_stream(GATES)
        gates = region.stream(GATES)
        for at in range(5):
            await gates.publish(b"%d" % at)
        (shard,) = node.broker.stream(felix.StreamName.parse(GATES)).serving
        assert shard.log_start_offset == 0
        state = await region.alter_stream(GATES, retention=felix.Retention(age_ms=20))
        assert state.retention.age_ms == 20
        await until(lambda: shard.log_start_offset == 5)
        await region.alter_stream(GATES, retention=felix.Retention())
        await gates.publish(b"stays")
    async with running(folder, data=str(tmp_path / "data"), storage=quick), client(folder) as region:
        state = await region.describe_stream(GATES)
        assert (state.retention.age_ms, state.state[0].high_watermark - state.state[0].log_start) == (0, 1)


async def test_what_is_not_named_stays_and_what_is_removed_goes(folder: RegionFolder, tmp_path: Path) -> None:
    async with running(folder, data=str(tmp_path / "data")) as node, client(folder) as region:
        before = await region.create_stream(GATES, retention=felix.Retention(age_ms=10_000))
        compaction, deduplication = Compaction(lag_ms=7), Deduplication(window_ms=5_000)
        await region.alter_stream(GATES, compaction=compaction)
        state = await region.alter_stream(GATES, deduplication=deduplication)
        assert state.views == Views(compaction=compaction, deduplication=deduplication)
        assert state.retention == before.retention and state.incarnation == before.incarnation
        (shard,) = node.broker.stream(felix.StreamName.parse(GATES)).serving
        gates = region.stream(GATES)
        first = await gates.publish(b"once", message_id="m1")
        assert await gates.publish(b"once", message_id="m1") == first
        assert shard.settings.compaction is not None
        assert shard.settings.compaction.lag_ms == 5_000, "ids are read from records, so these stay as long"
        state = await region.alter_stream(GATES, remove=["compaction", "deduplication"])
        assert state.views == Views() and shard.settings.compaction is None
        assert await gates.publish(b"once", message_id="m1") != first


async def test_what_cannot_be_changed_is_refused_and_nothing_is(folder: RegionFolder, tmp_path: Path) -> None:
    async with (
        running(folder, data=str(tmp_path / "data")),
        client(folder) as region,
    ):
        before = await region.create_stream(GATES, views=Views(compaction=Compaction()))
        for changes, code in (
            ({"offload": Offload("file:///x")}, Code.FORBIDDEN),
            ({"retention": felix.Retention(acked=True)}, Code.CONFIG_INVALID),
            ({"retention": felix.Retention(age_ms=1)}, Code.CONFIG_INVALID),
            ({"remove": ["queue"]}, Code.INVALID),
            ({"compaction": Compaction(), "remove": ["compaction"]}, Code.INVALID),
            ({"retention": felix.Retention(age_ms=5_000), "incarnation": b"i" * 16}, Code.CONFLICT),
        ):
            with pytest.raises(RequestError) as refused:
                await region.alter_stream(GATES, **changes)  # type: ignore[arg-type]
            assert refused.value.code is code, changes
        state = await region.describe_stream(GATES)
        assert (state.views, state.retention) == (before.views, before.retention)
        with pytest.raises(RequestError) as refused:
            await region.alter_stream("acme/ops/nowhere", retention=felix.Retention(age_ms=5_000))
        assert refused.value.code is Code.NOT_FOUND_OR_FORBIDDEN
