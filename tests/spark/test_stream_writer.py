"""What a task publishes, and what becomes of it when the task is repeated, against a real broker and without a JVM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
import pyarrow as pa
from spark_region import SparkRegion

from audit.spark.stream_columns import Row
from audit.spark.stream_options import write_options
from audit.spark.stream_writer import identified, publish_rows
from felix.batch import MESSAGE_ID_BYTES_MAX, MESSAGE_ID_HEADER
from felix.errors import RequestError
from felix.settings import Deduplication, Views


def rows(*, keyed: bool, count: int = 500, step: int = 60) -> Iterator[Any]:
    """The numbers from 0, in several Arrow batches."""
    for first in range(0, count, step):
        values = [b"%d" % number for number in range(first, min(count, first + step))]
        keys = values if keyed else [None] * len(values)
        yield pa.RecordBatch.from_arrays(
            [pa.array(values, pa.binary()), pa.array(keys, pa.binary())], ["value", "key"]
        )


def held(region: SparkRegion, stream: str) -> Counter[int]:
    """How often each number is in the stream."""
    left, found = (
        sum(each.high_watermark for each in region.client.describe_stream(stream).state),
        Counter[int](),
    )
    with region.client.stream(stream).subscribe("earliest") as subscription:
        while left:
            payloads = subscription.next_batch().payloads()
            left -= len(payloads)
            found.update(int(bytes(payload)) for payload in payloads)
    return found


@pytest.mark.parametrize("keyed", [True, False])
def test_a_repeated_task_adds_nothing_where_the_stream_deduplicates(region: SparkRegion, keyed: bool) -> None:
    name = region.stream(shards=3, views=Views(deduplication=Deduplication()))
    options = write_options(region.options(name, "operator"))
    # A first attempt that did not come to its end, then whole ones.
    for count in (130, 500, 500):
        publish_rows(options, "job/0/0", rows(keyed=keyed, count=count))
    assert held(region, name) == Counter(range(500))
    # Another partition, and another job, are not repetitions.
    publish_rows(options, "job/0/1", rows(keyed=keyed))
    assert set(held(region, name).values()) == {2}


def test_elsewhere_a_repeated_task_publishes_again(region: SparkRegion) -> None:
    name = region.stream()
    options = write_options(region.options(name, "operator"))
    for _ in range(2):
        assert publish_rows(options, "job/0/0", rows(keyed=True)).records == 500
    assert set(held(region, name).values()) == {2}


def ids(rows: list[Row], prefix: str = "job/0/0", first: int = 7) -> list[bytes]:
    return [(row.headers or {})[MESSAGE_ID_HEADER] for row in identified(rows, prefix, first)]


def test_an_id_that_a_row_brings_is_left_as_it_is_and_so_is_the_row() -> None:
    own, other = Row(b"a", None, {MESSAGE_ID_HEADER: b"mine"}), Row(b"b", b"k", {"other": b"x"})
    first, second = identified([own, other], "job/0/0", 7)
    assert first == own
    assert (second.value, second.key) == (b"b", b"k")
    assert second.headers is not None and second.headers["other"] == b"x"


def test_an_id_says_which_task_which_place_and_what() -> None:
    row = Row(b"b", b"k", {"other": b"x"})
    assert ids([row]) == ids([row])
    different = [
        ids([row], prefix="job/0/1"),
        ids([row], prefix="job/1/0"),
        ids([row], first=8),
        ids([row._replace(value=b"c")]),
        ids([row._replace(key=None)]),
        ids([row._replace(key=b"", value=b"kb")]),
        ids([row._replace(headers=None)]),
    ]
    assert len({found[0] for found in [ids([row]), *different]}) == 8
    assert all(len(found[0]) <= MESSAGE_ID_BYTES_MAX for found in different)


def test_a_repeated_task_with_other_rows_loses_none_of_them(region: SparkRegion) -> None:
    # As where compaction took some of what the first attempt read, or a shuffle gave another order.
    name = region.stream(views=Views(deduplication=Deduplication()))
    options = write_options(region.options(name, "operator"))
    publish_rows(options, "job/0/0", rows(keyed=True, count=300))
    publish_rows(options, "job/0/0", (batch.slice(1) for batch in rows(keyed=True, count=500)))
    assert set(held(region, name)) >= set(range(300)) | {n for n in range(500) if n % 60}


def test_what_was_published_before_a_bad_row_stays(region: SparkRegion) -> None:
    def with_a_null() -> Iterator[Any]:
        yield from rows(keyed=True, count=60)
        yield pa.RecordBatch.from_arrays([pa.array([None], pa.binary())], ["value"])

    name = region.stream()
    with pytest.raises(RequestError, match="'value' is null"):
        publish_rows(write_options(region.options(name, "operator")), "job/0/0", with_a_null())
    assert set(held(region, name)) <= set(range(60))
