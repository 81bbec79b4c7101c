"""Many copies at once: what one of them waits for holds up no other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from felix.bounded import BoundedMap
from felix.names import StreamName
from region.cluster.records import ShardId
from region.copies.replicas import Replicas
from region.streams.follower import StreamFollower

STREAMS = [StreamName.parse(f"acme/ops/s{number}") for number in range(3)]
SHARDS = 2
PATIENCE_S = 30


class Meeting:
    """Whoever comes waits until all others have."""

    def __init__(self, wanted: int) -> None:
        self.came: list[object] = []
        self._wanted = wanted
        self._complete = asyncio.Event()

    async def come(self, who: object) -> None:
        self.came.append(who)
        if len(self.came) == self._wanted:
            self._complete.set()
        await self._complete.wait()


async def test_copies_of_one_stream_and_of_several_are_opened_side_by_side() -> None:
    meeting = Meeting(len(STREAMS) * SHARDS)
    shards = {
        ShardId(str(stream), number): SimpleNamespace(replicas=("b1",), target=(), epoch=1, election="")
        for stream in STREAMS
        for number in range(SHARDS)
    }
    replicas: Any = Replicas.__new__(Replicas)
    replicas._member = SimpleNamespace(
        broker="b1", mirror=SimpleNamespace(view=SimpleNamespace(shards=shards))
    )
    replicas.host = SimpleNamespace(replica=lambda shard: None, add=meeting.come)
    replicas._changing, replicas._names, replicas._found = {}, {}, set(shards)
    replicas._forgotten = BoundedMap(1)
    replicas._want_min = lambda stream, shard: None

    async def plan(stream: object, shard: ShardId, *of: object) -> ShardId:
        return shard

    replicas._plan = plan
    replicas._wanted = {str(stream) for stream in STREAMS}
    replicas._streams = {}
    replicas._system = {
        stream: SimpleNamespace(
            record=SimpleNamespace(
                name=str(stream), incarnation=str(stream), config=SimpleNamespace(shards=SHARDS)
            ),
            logs=(0,),
        )
        for stream in STREAMS
    }
    async with asyncio.timeout(PATIENCE_S):
        await replicas._open_wanted()
    assert set(meeting.came) == set(shards) and not replicas._found


async def nothing_left() -> None:
    pass


async def test_what_is_led_here_now_is_served_side_by_side() -> None:
    meeting = Meeting(len(STREAMS))
    mirror: Any = SimpleNamespace(on_change=lambda listener: None, streams={}, deleted_streams={})
    streams: Any = SimpleNamespace(
        reassign=meeting.come, get=lambda name: None, on_change=lambda watcher: None, remove_left=nothing_left
    )
    follower = StreamFollower(streams, mirror, lambda name: None)
    for stream in STREAMS:
        follower.assigned(str(stream))
    async with asyncio.timeout(PATIENCE_S):
        await follower._follow_once()
    assert sorted(meeting.came, key=str) == STREAMS
