"""F20: a grant of a pattern makes streams at the destination, of as many shards as the source says: they leave room for its people.

And what was made fits again after a start, in whatever order it is opened, whatever rings hold meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from felix.errors import UnavailableError
from felix.names import StreamName
from felix.settings import Durability
from region.limits.budget import Budget
from region.log.ring import Entry, Ring
from region.metadata.records import StreamConfig
from region.streams.settings import HOT_BYTES, SHARD_BYTES, least_bytes
from region.streams.table import StreamTable

Tally = Callable[[str, int], None]
NAME = StreamName.parse("acme/ops/departures")


def table() -> StreamTable:
    return StreamTable(None, Budget("ring", 1 << 30), None)  # type: ignore[arg-type]


def test_streams_for_another_region_leave_room_for_this_ones(tally: Tally) -> None:
    streams, made = table(), 0
    with pytest.raises(UnavailableError, match="another region"):
        for _ in range(1000):
            streams.check_foreign_room(NAME, StreamConfig(shards=256))
            streams._reserve(NAME, StreamConfig(shards=256))
            made += 1
    assert made * 256 * SHARD_BYTES == 3 << 28
    streams.check_room(NAME, StreamConfig(durability=Durability("ephemeral"), shards=200, ring_bytes=1 << 20))
    tally("streams of 256 shards for another region", made + 1)


def test_what_fitted_once_fits_in_any_order(tally: Tally) -> None:
    """A stream that was promised its memory gets it, though rings of others have taken all there is meanwhile."""
    configs = [
        StreamConfig(durability=Durability("ephemeral"), shards=100, ring_bytes=4 << 20),
        *[StreamConfig(shards=1)] * 500,
    ]
    for order in (configs, configs[::-1]):
        streams = table()
        for config in order:
            streams._reserve(NAME, config)
            for _ in range(3):
                ring = Ring(bytes_max=HOT_BYTES, pool=streams._rings)
                ring.append(Entry(0, 1, 0, bytes(8 << 20)))
        budget = streams._ring_budget
        assert budget.used_bytes <= budget.limit_bytes
        assert budget.used_bytes - streams._rings.held_bytes == sum(map(least_bytes, configs))
    tally("streams opened in another order", len(configs))
