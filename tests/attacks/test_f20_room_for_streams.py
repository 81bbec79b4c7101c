"""F20: a grant of a pattern makes streams at the destination, of as many shards as the source says: they leave room for its people.

And what was made fits again after a start, in whatever order it is opened.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from felix.errors import UnavailableError
from felix.names import StreamName
from region.budget import Budget
from region.metadata.records import StreamConfig
from region.streams import HOT_BYTES, StreamTable, least_bytes

Tally = Callable[[str, int], None]
NAME = StreamName.parse("acme/ops/departures")


def table() -> StreamTable:
    return StreamTable(None, Budget("ring", 1 << 30), None, lambda: None)  # type: ignore[arg-type]


def test_streams_for_another_region_leave_room_for_this_ones(tally: Tally) -> None:
    streams, made = table(), 0
    with pytest.raises(UnavailableError, match="another region"):
        for _ in range(100):
            streams.check_foreign_room(NAME, StreamConfig(shards=256))
            streams._reserve(NAME, StreamConfig(shards=256))
            made += 1
    assert made == 3
    streams.check_room(NAME, StreamConfig(shards=200))
    tally("streams of 256 shards for another region", made + 1)


def test_what_fitted_once_fits_in_any_order(tally: Tally) -> None:
    """First two of many shards, so that the small ones behind them get little; a start opens the small ones first."""
    before = table()
    configs = [StreamConfig(shards=256), StreamConfig(shards=256), *[StreamConfig(shards=1)] * 500]
    for config in configs:
        before._reserve(NAME, config)
    after = table()
    after.expected_bytes = sum(map(least_bytes, configs))
    taken = []
    for config in reversed(configs):
        after.expected_bytes -= least_bytes(config)
        taken.append(after._reserve(NAME, config)[0])
    assert taken[0] == HOT_BYTES  # still generous where there is room for all
    assert after._ring_budget.used_bytes <= after._ring_budget.limit_bytes
    tally("streams opened in another order", len(configs))
