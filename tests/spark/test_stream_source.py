"""The data source `felix` in Spark, against a real broker: batches, streaming queries, refusals, and publishing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shared_spark import run_to_end
from slow_runs import only_slow
from spark_region import WRITES, SparkRegion

from felix.settings import Deduplication, Views

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def session(spark: Any) -> Any:
    import felix.spark

    felix.spark.register(spark)
    return spark


@pytest.fixture
def read(session: Any, region: SparkRegion) -> Callable[..., Any]:
    """A DataFrame of a stream."""
    return lambda stream, identity="analyst", **options: (
        session.read.format("felix").options(**region.options(stream, identity), **options).load()
    )


def publish(region: SparkRegion, frame: Any, stream: str, identity: str, mode: str = "append") -> None:
    frame.write.format("felix").options(**region.options(stream, identity)).mode(mode).save()


def numbers(frame: Any) -> list[int]:
    return sorted(int(bytes(row["value"])) for row in frame.select("value").collect())


def said(error: pytest.ExceptionInfo[BaseException]) -> str:
    """Spark's error, on one line."""
    return re.sub(r"\s+", " ", str(error.value))


def test_a_batch_has_every_record_with_all_it_carries(read: Any, thousand: str, region: SparkRegion) -> None:
    rows = read(thousand, minPartitions="4").orderBy("shard", "offset").collect()
    ends = {each.shard: each.high_watermark for each in region.client.describe_stream(thousand).state}
    assert [(row["shard"], row["offset"]) for row in rows] == [
        (shard, offset) for shard in sorted(ends) for offset in range(ends[shard])
    ]
    assert sorted(int(bytes(row["value"])) for row in rows) == list(range(1000))
    for row in rows:
        number = int(bytes(row["value"]))
        assert bytes(row["key"]) == b"%d" % number
        assert {name: bytes(value) for name, value in row["headers"].items()} == (
            {"tens": b"%d" % number} if number % 10 == 0 else {}
        )
        assert row["timestamp"] is not None


def test_only_the_columns_of_a_schema_are_read(session: Any, region: SparkRegion, thousand: str) -> None:
    def schema(text: str) -> Any:
        return session.read.format("felix").options(**region.options(thousand)).schema(text).load()

    frame = schema("value binary, shard int")
    assert frame.columns == ["value", "shard"]
    assert frame.where("shard in (0, 1)").count() == 1000
    with pytest.raises(Exception, match="no column 'payload'"):
        schema("payload binary").count()
    with pytest.raises(Exception, match=r"'value' is binary, not string.*cast"):
        schema("value string").count()


def test_times_are_read_whatever_a_session_means_by_the_word_timestamp(
    session: Any, read: Any, thousand: str, region: SparkRegion
) -> None:
    session.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        frame = read(thousand, endingOffsets='{"0": 1, "1": 1}')
        assert dict(frame.dtypes)["timestamp"] == "timestamp"
        newest = max(row[0] for row in frame.selectExpr("unix_millis(timestamp)").collect())
        assert 0 < newest <= region.newest_ms(thousand)
        with pytest.raises(Exception, match="is timestamp, not timestamp_ntz") as refused:
            session.read.format("felix").options(**region.options(thousand)).schema(
                "timestamp timestamp"
            ).load().count()
        assert "timestamp_ltz" in said(refused)
    finally:
        session.conf.unset("spark.sql.timestampType")


def test_a_schema_without_a_column_is_refused_instead_of_having_no_rows(
    session: Any, region: SparkRegion, thousand: str
) -> None:
    from pyspark.sql.types import StructType

    with pytest.raises(Exception, match="asks for no column"):
        session.read.format("felix").options(**region.options(thousand)).schema(StructType()).load().count()


def test_conditions_on_shard_and_offset_are_honoured_where_it_is_read(
    session: Any, read: Any, thousand: str
) -> None:
    session.conf.set(PUSHDOWN, "true")
    try:
        frame = read(thousand, pushFilters="true")
        frame = frame.where("shard = 1 and offset >= 10 and offset < 20 and offset <> 15")
        assert frame.count() == 9
        plan = frame._jdf.queryExecution().executedPlan().toString()
        assert ">=" not in plan and "15" in plan
    finally:
        session.conf.unset(PUSHDOWN)


def test_a_reader_has_its_own_rights_and_no_others(read: Any, region: SparkRegion, thousand: str) -> None:
    region.identity("stranger", ["subscribe other/payments/*"])
    with pytest.raises(Exception) as refused:
        read(thousand, "stranger").count()
    assert f"There is no stream {thousand} that this identity may use" in said(refused)
    assert "ask the region's operator for the right" in said(refused)
    # May know of it, and not read it: the task is refused.
    region.identity("publisher", WRITES)
    with pytest.raises(Exception, match=f"no stream {thousand} that this identity may use with subscribe"):
        read(thousand, "publisher").count()
    with pytest.raises(Exception, match="There is no identity 'nobody'"):
        read(thousand, "nobody").count()


@only_slow
def test_a_query_goes_on_where_its_checkpoint_says_and_no_key_is_in_plan_or_checkpoint(
    session: Any, region: SparkRegion, tmp_path: Path
) -> None:
    name = region.stream()

    def run() -> Any:
        frame = session.readStream.format("felix").options(
            **region.options(name, str(region.key_path("analyst"))),
            startingOffsets="earliest",
            maxRecordsPerTrigger="400",
        )
        writer = frame.load().writeStream.option("checkpointLocation", str(tmp_path / "state"))
        writer = writer.trigger(availableNow=True)
        return run_to_end(lambda: writer.start(str(tmp_path / "out"), format="parquet"))

    region.publish(name, 0, 1000)
    rows = [progress["numInputRows"] for progress in run().recentProgress]
    # One that was started again has only what was left.
    assert rows == [400, 400, 200][-len(rows) :] and rows
    assert numbers(session.read.parquet(str(tmp_path / "out"))) == list(range(1000))
    region.publish(name, 1000, 1300)
    assert run().lastProgress["numInputRows"] == 300
    assert numbers(session.read.parquet(str(tmp_path / "out"))) == list(range(1300))

    secret = region.secret("analyst")
    frame = (
        session.read.format("felix").options(**region.options(name, str(region.key_path("analyst")))).load()
    )
    plan = frame._jdf.queryExecution().toString()
    assert "felix" in plan and secret not in plan and "PRIVATE KEY" not in plan
    held = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert held and not any(secret.encode() in path.read_bytes() for path in held)


def test_rows_are_published_with_key_and_headers(read: Any, region: SparkRegion, thousand: str) -> None:
    name = region.stream()
    region.identity("writer", WRITES)
    publish(region, read(thousand).select("key", "headers", "value"), name, "writer")
    # The key chooses the shard, as for any producer.
    columns = ["shard", "cast(key as string)", "map_entries(headers)", "cast(value as string)"]
    old, new = (sorted(read(stream).selectExpr(*columns).collect()) for stream in (thousand, name))
    assert old == new


def test_rows_that_may_not_be_published_are_refused(read: Any, region: SparkRegion, thousand: str) -> None:
    for columns, problem in (
        (["key"], "need a column 'value'"),
        (["value", "offset"], "no place for the column 'offset'"),
        (["offset as value"], "'value' is bigint; expected binary or string"),
        (["cast(null as binary) as value"], "'value' is null"),
    ):
        with pytest.raises(Exception, match=problem):
            publish(region, read(thousand).selectExpr(*columns), thousand, "operator")
    rows = read(thousand).select("value")
    with pytest.raises(Exception, match="never overwritten"):
        publish(region, rows, thousand, "operator", mode="overwrite")
    with pytest.raises(Exception, match="may use with publish"):
        publish(region, rows, thousand, "analyst")
    assert read(thousand).count() == 1000


@only_slow
def test_a_micro_batch_that_is_repeated_is_published_once_where_the_stream_deduplicates(
    session: Any, read: Any, region: SparkRegion, thousand: str, tmp_path: Path
) -> None:
    name = region.stream(views=Views(deduplication=Deduplication()))
    rows = session.readStream.format("felix").options(**region.options(thousand), startingOffsets="earliest")

    def run() -> int:
        writer = rows.load().select("key", "value").writeStream.format("felix")
        writer = writer.options(**region.options(name, "operator"), checkpointLocation=str(tmp_path))
        query = run_to_end(writer.trigger(availableNow=True).start)
        return sum(progress["numInputRows"] for progress in query.recentProgress)

    assert run() == 1000
    # As a kill leaves it behind everything that was published, and before Spark has written that down.
    (commit,) = (path for path in (tmp_path / "commits").iterdir() if path.name.isdigit())
    commit.unlink()
    (tmp_path / "commits" / f".{commit.name}.crc").unlink(missing_ok=True)
    assert run() == 1000
    assert numbers(read(name)) == list(range(1000))
