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


def test_an_id_that_a_row_brings_is_left_as_it_is() -> None:
    own, other = Row(b"a", None, {MESSAGE_ID_HEADER: b"mine"}), Row(b"b", None, {"other": b"x"})
    assert [row.headers for row in identified([own, other], "job/0/0", 7)] == [
        {MESSAGE_ID_HEADER: b"mine"},
        {"other": b"x", MESSAGE_ID_HEADER: b"job/0/0/8"},
    ]


def test_the_longest_id_is_one() -> None:
    (row,) = identified([Row(b"", None, None)], f"{'f' * 32}/{10**9}/{10**6}", 10**10)
    assert row.headers is not None
    assert len(row.headers[MESSAGE_ID_HEADER]) <= MESSAGE_ID_BYTES_MAX


def test_what_was_published_before_a_bad_row_stays(region: SparkRegion) -> None:
    def with_a_null() -> Iterator[Any]:
        yield from rows(keyed=True, count=60)
        yield pa.RecordBatch.from_arrays([pa.array([None], pa.binary())], ["value"])

    name = region.stream()
    with pytest.raises(RequestError, match="'value' is null"):
        publish_rows(write_options(region.options(name, "operator")), "job/0/0", with_a_null())
    assert set(held(region, name)) <= set(range(60))
