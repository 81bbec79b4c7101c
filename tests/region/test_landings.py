"""What is on its way into a stream is waited for before its shards are opened again."""

from __future__ import annotations

import asyncio

from felix.names import StreamName
from region.landings import Landings


class Feeding:
    def replaced(self) -> None:
        """Nobody else feeds it."""


async def test_a_stream_is_settled_once_nothing_is_on_its_way_into_it() -> None:
    landings, feeding = Landings(), Feeding()
    name, other = StreamName.parse("acme/ops/crew"), StreamName.parse("acme/ops/jobs")
    first, second = (landings.claim(name, shard, 7, feeding) for shard in range(2))
    first.begin(10)
    first.begin(20)
    second.begin(5)
    await landings.settled(other)
    settled = asyncio.ensure_future(landings.settled(name))
    for landing, base in ((first, 10), (second, 5), (first, 20)):
        await asyncio.sleep(0)
        assert not settled.done()
        landing.end(base)
    await settled
