"""A shard that another broker serves: who asks for it here hears so, and the stream's other shards are served."""

from __future__ import annotations

from pathlib import Path

import pytest
from region_home import running
from region_peer import client

import felix
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.messages import Start, Subscribe
from felix.settings import CacheSettings
from region.cache.service import Cache
from region.delivery import resolve_starts
from region.folder import RegionFolder
from region.queue.service import Queue

CREW = "acme/ops/crew"


async def test_a_shard_that_is_not_served_is_answered_so_and_the_others_are_served(
    folder: RegionFolder, tmp_path: Path
) -> None:
    async with running(folder, data=str(tmp_path / "data")) as node, client(folder) as region:
        await region.create_stream(CREW, shards=3)
        stream = node.broker.stream(felix.StreamName.parse(CREW))
        moved = stream.replicas.pop(1)
        stream.replicas[2] = FelixError("its disk is broken")
        assert stream.shard_count == 3
        for number, code in ((1, Code.UNAVAILABLE), (2, Code.SHARD_STOPPED)):
            with pytest.raises(UnavailableError) as refused:
                stream.shard(number)
            assert refused.value.code is code
        for number in (-1, 3):
            with pytest.raises(RequestError, match="has no shard"):
                stream.shard(number)

        assert await resolve_starts(stream, Subscribe(CREW, Start("earliest"), [0])) == {0: 0}
        with pytest.raises(UnavailableError) as refused:
            await resolve_starts(stream, Subscribe(CREW, Start("earliest"), [0, 1]))
        assert refused.value.code is Code.UNAVAILABLE

        state = await region.stream(CREW).describe()
        assert [each.stopped for each in state.state] == [
            "",
            "acme/ops/crew is about to be served again.",
            "Shard 2 of acme/ops/crew does not serve: its disk is broken",
        ]
        assert (stream.traffic().shards, stream.traffic().stopped) == (3, 1)

        cache = Cache(stream, CacheSettings(), node.broker)
        assert [shard.number for shard in cache.serving] == [0]
        found = {}
        for key in (b"%d" % at for at in range(64)):
            try:
                found[cache.of(key).number] = None
            except UnavailableError as error:
                found[error.code] = None
        assert set(found) == {0, Code.UNAVAILABLE, Code.SHARD_STOPPED}

        with pytest.raises(UnavailableError) as refused:
            await Queue(node.broker, stream, {}).open()
        assert refused.value.code is Code.UNAVAILABLE, "a queue wants all shards of its stream at one broker"
        stream.replicas[1] = moved
