"""What is on its way into a stream is waited for before its shards are opened again."""

from __future__ import annotations

import asyncio

from felix.names import SpiffeId, StreamName
from region.landings import ASKS_S, Landings


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


def test_records_wait_for_a_bridge_from_the_first_question_since_it_brought_something() -> None:
    landings, name = Landings(), StreamName.parse("acme/ops/crew")
    one, other = (SpiffeId("us-east", "acme", "bridge", each) for each in ("one", "other"))
    place = (name, 0, 7)
    asked = [landings.waits_s(*place, one, now_s) for now_s in (100.0, 104.0, 109.0)]
    assert asked == [0.0, 4.0, 9.0]
    assert landings.waits_s(name, 1, 7, one, 109.0) == 0.0, "each link shard by itself"
    landings.brought(*place)
    assert landings.waits_s(*place, one, 110.0) == 0.0
    # The other one took over, and stands still now.
    assert landings.waits_s(*place, other, 112.0) == 0.0
    assert landings.waits_s(*place, other, 115.0) == 3.0
    assert landings.waits_s(*place, other, 115.0 + ASKS_S + 1) == 0.0, "nobody stood by meanwhile"


def test_of_what_nobody_asks_any_more_nothing_is_remembered() -> None:
    landings, name = Landings(), StreamName.parse("acme/ops/crew")
    bridge = SpiffeId("us-east", "acme", "bridge", "one")
    for shard in range(100):
        landings.waits_s(name, shard, 7, bridge, shard * (ASKS_S + 1))
    assert len(landings._waits) == 1
