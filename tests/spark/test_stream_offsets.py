"""Offsets as Spark keeps, splits and limits them."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.spark.stream_offsets import (
    Offset,
    Range,
    bound_of,
    limited,
    offsets_for_bytes,
    ranges_between,
    resolve,
    split,
)
from felix.errors import Code, RequestError
from felix.messages import ShardState, StreamState
from felix.settings import Durability, Retention

NOW = "ab" * 16
SHARDS = st.dictionaries(st.integers(0, 9), st.integers(0, 10_000), min_size=1)


def state(*shards: tuple[int, int], size_bytes: int = 0) -> StreamState:
    """A stream whose shards begin and end there."""
    held = [ShardState(number, start, end, end, 1, size_bytes) for number, (start, end) in enumerate(shards)]
    return StreamState(
        "acme/payments/orders", bytes.fromhex(NOW), len(held), Durability(), Retention(), 0, 0, held
    )


@given(SHARDS)
def test_an_offset_comes_back_from_the_checkpoint_as_it_was(shards: dict[int, int]) -> None:
    offset = Offset(NOW, shards)
    assert Offset.of_json(json.loads(json.dumps(offset.json()))) == offset


def test_equal_offsets_are_equal_as_text_since_that_is_how_spark_compares_them() -> None:
    one, other = Offset(NOW, {0: 1, 10: 3, 2: 2}), Offset(NOW, {10: 3, 2: 2, 0: 1})
    assert json.dumps(one.json()) == json.dumps(other.json())


@pytest.mark.parametrize(
    "held",
    [{"incarnation": NOW, "shards": {}}, {"logOffset": 4}, {"incarnation": "zz", "shards": {"0": 1}}, 7]
    + [{"incarnation": NOW, "shards": {"0": wrong}} for wrong in (-1, "5", True, 1.5)],
)
def test_what_another_source_left_in_a_checkpoint_is_no_offset(held: object) -> None:
    with pytest.raises(RequestError, match="no offset of a Felix stream"):
        Offset.of_json(held)


def test_bounds_are_resolved_against_the_stream() -> None:
    stream = state((5, 20), (0, 7))
    assert resolve("earliest", stream, "startingOffsets") == {0: 5, 1: 0}
    assert resolve("latest", stream, "endingOffsets") == {0: 20, 1: 7}
    assert resolve(bound_of({"0": 12, "1": "latest"}), stream, "startingOffsets") == {0: 12, 1: 7}


@pytest.mark.parametrize(
    ("bound", "problem", "code"),
    [
        ({"0": 1}, "says nothing of shard 1", Code.CONFIG_INVALID),
        ({"0": 1, "1": 1, "2": 1}, "names shard 2", Code.CONFIG_INVALID),
        ({"0": 21, "1": 1}, "offset 21 of shard 0.*written up to 20", Code.OFFSET_OUT_OF_RANGE),
    ],
)
def test_a_bound_that_the_stream_does_not_have_is_refused(
    bound: dict[str, int], problem: str, code: Code
) -> None:
    with pytest.raises(RequestError, match=rf"'startingOffsets'.*{problem}") as refused:
        resolve(bound_of(bound), state((5, 20), (0, 7)), "startingOffsets")
    assert refused.value.code is code


RANGES = st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 3_000)), max_size=6).map(
    lambda found: [Range(shard, first, first + size) for shard, (first, size) in enumerate(found)]
)


@given(RANGES, st.integers(0, 50))
def test_pieces_cover_what_was_split_once_and_are_as_many_as_asked_for(
    ranges: list[Range], wanted: int
) -> None:
    pieces = split(ranges, wanted)
    covered = [(shard, offset) for shard, first, end in pieces for offset in range(first, end)]
    assert covered == [(shard, offset) for shard, first, end in ranges for offset in range(first, end)]
    assert all(first < end for _, first, end in pieces)
    assert len(pieces) >= min(wanted, len(covered))
    assert split(ranges, wanted) == pieces


@given(SHARDS, st.data(), st.integers(1, 5_000))
def test_a_limit_is_kept_and_something_always_moves(
    start: dict[int, int], data: st.DataObject, most: int
) -> None:
    end = {shard: first + data.draw(st.integers(0, 2_000)) for shard, first in start.items()}
    waiting = sum(end.values()) - sum(start.values())
    reached = limited(start, end, most)
    assert sum(reached.values()) - sum(start.values()) == min(waiting, most)
    assert all(start[shard] <= reached[shard] <= end[shard] for shard in start)


def test_a_small_limit_reaches_every_shard_in_the_end() -> None:
    start, end, steps = {0: 0, 1: 0, 2: 0}, {0: 1000, 1: 1, 2: 1}, 0
    while start[1] == 0 or start[2] == 0:
        start = limited(start, end, 2)
        steps += 1
    assert steps <= 500


@pytest.mark.parametrize("most", [1, 2, 3, 5, 7, 100])
@pytest.mark.parametrize("busy", [(0,), (0, 1, 2), (6, 0, 3, 4, 5)])
def test_shards_that_are_never_read_up_pass_no_other_one_over(most: int, busy: tuple[int, ...]) -> None:
    start, end = dict.fromkeys(range(7), 0), dict.fromkeys(range(7), 1)
    for step in range(7):
        for shard in busy:
            end[shard] = start[shard] + 1000 * (1 + shard) + step
        start = limited(start, end, most)
    assert all(start.values())


def test_a_shard_that_lost_its_end_is_read_from_where_it_ends_now() -> None:
    assert limited({0: 120, 1: 5}, {0: 100, 1: 50}, 10) == {0: 100, 1: 15}
    assert ranges_between({0: 120, 1: 5}, {0: 100, 1: 15}) == [Range(1, 5, 15)]


def test_bytes_are_counted_by_the_mean_record() -> None:
    stream = state((0, 1000), size_bytes=100_000)
    assert offsets_for_bytes(stream, {0: 0}, {0: 1000}, 5_000) == 50
    assert offsets_for_bytes(stream, {0: 0}, {0: 10}, 5_000) == 10
    assert offsets_for_bytes(stream, {0: 0}, {0: 1000}, 1) == 1
    # Most of the log is in a store.
    shards = [
        msgspec.structs.replace(shard, size_bytes=1_000, store_only_bytes=99_000) for shard in stream.state
    ]
    offloaded = msgspec.structs.replace(stream, state=shards)
    assert offsets_for_bytes(offloaded, {0: 0}, {0: 1000}, 5_000) == 50
