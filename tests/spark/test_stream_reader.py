"""Planning and reading, as Spark's driver and tasks call them, against a real broker and without a JVM."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from e2e.command_mesh import until

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import BinaryType, LongType, StructType
from region_home import make_region, running
from spark_region import SparkRegion

import felix
from audit.spark import stream_reader
from audit.spark.stream_access import RegionThread
from audit.spark.stream_offsets import Range
from audit.spark.stream_options import read_options
from audit.spark.stream_reader import (
    DataLossError,
    FilteringBatchReader,
    StreamBatchReader,
    StreamingReader,
    StreamRange,
    StreamRecreatedError,
    narrowed,
)
from felix.errors import Code, RequestError, UnavailableError
from felix.messages import PutRights
from felix.runtime.real import now_ms
from felix.settings import Compaction, Durability, Views
from region.log.segment_limits import SegmentLimits
from region.streams import settings as stream_settings

SCHEMA = StructType().add("offset", LongType()).add("value", BinaryType())
ALL = ReadAllAvailable()


@pytest.fixture
def batch(region: SparkRegion) -> Callable[..., StreamBatchReader]:
    def make(stream: str, *, identity: str = "analyst", **options: str) -> StreamBatchReader:
        return StreamBatchReader(
            read_options(region.options(stream, identity) | options, streaming=False), SCHEMA
        )

    return make


@pytest.fixture
def streaming(region: SparkRegion) -> Iterator[Callable[..., StreamingReader]]:
    made: list[StreamingReader] = []

    def make(stream: str, **options: str) -> StreamingReader:
        held = read_options(region.options(stream) | options, streaming=True)
        made.append(StreamingReader(held, SCHEMA))
        return made[-1]

    yield make
    for reader in made:
        reader.stop()


def numbers(reader: Any, partitions: Any) -> list[int]:
    """What tasks read: each partition as it arrives there."""
    found: list[int] = []
    for partition in partitions:
        sent = pickle.loads(pickle.dumps(partition))
        for made in pickle.loads(pickle.dumps(reader)).read(sent):
            found += (int(value) for value in made.column("value").to_pylist())
    return sorted(found)


def read(reader: StreamBatchReader) -> list[int]:
    return numbers(reader, reader.partitions())


# -- batches -------------------------------------------------------------------------------------------


def test_a_shard_is_a_task_unless_more_are_wished(batch: Any, thousand: str) -> None:
    assert len(batch(thousand).partitions()) == 2
    cut = batch(thousand, minPartitions="7")
    assert len(cut.partitions()) >= 7
    assert read(cut) == list(range(1000))


def test_a_batch_begins_and_ends_where_it_is_told(batch: Any, thousand: str) -> None:
    reader = batch(
        thousand, startingOffsets='{"0": 100, "1": "latest"}', endingOffsets='{"0": 107, "1": "latest"}'
    )
    (partition,) = reader.partitions()
    assert (partition.shard, partition.first, partition.end) == (0, 100, 107)
    (made,) = reader.read(partition)
    assert made.column("offset").to_pylist() == list(range(100, 107))


def test_a_batch_begins_at_a_time(batch: Any, region: SparkRegion) -> None:
    name = region.stream()
    region.publish(name, 0, 100)
    between = region.newest_ms(name) + 1
    region.publish(name, 100, 200)
    assert read(batch(name, startingTimestamp=str(between))) == list(range(100, 200))
    assert read(batch(name, startingTimestamp="0")) == list(range(200))
    assert read(batch(name, startingTimestamp="2100-01-01T00:00:00Z")) == []


def test_what_is_published_after_the_plan_is_not_in_it(batch: Any, region: SparkRegion) -> None:
    name = region.stream()
    region.publish(name, 0, 100)
    reader = batch(name)
    planned = reader.partitions()
    region.publish(name, 100, 300)
    assert numbers(reader, planned) == list(range(100))


def test_an_empty_stream_is_planned_as_one_task_without_records(batch: Any, region: SparkRegion) -> None:
    reader = batch(region.stream())
    assert len(reader.partitions()) == 1
    assert read(reader) == []


def test_conditions_that_a_plan_can_honour_are_taken(region: SparkRegion, thousand: str) -> None:
    reader = FilteringBatchReader(read_options(region.options(thousand), streaming=False), SCHEMA)
    ours: list[Filter] = [
        EqualTo(("shard",), 1),
        GreaterThanOrEqual(("offset",), 10),
        LessThan(("offset",), 20),
    ]
    others: list[Filter] = [EqualTo(("value",), b"7"), In(("offset",), (1, 2))]
    assert list(reader.pushFilters([*ours, *others])) == others
    (partition,) = reader.partitions()
    assert (partition.shard, partition.first, partition.end) == (1, 10, 20)


@pytest.mark.parametrize(
    ("condition", "left"),
    [
        (EqualTo(("offset",), 5), [Range(0, 5, 6), Range(1, 5, 6)]),
        (GreaterThan(("offset",), 9), [Range(1, 10, 20)]),
        (GreaterThanOrEqual(("offset",), 9), [Range(0, 9, 10), Range(1, 9, 20)]),
        (LessThan(("offset",), 1), [Range(0, 0, 1)]),
        (LessThanOrEqual(("offset",), 4), [Range(0, 0, 5), Range(1, 4, 5)]),
        (LessThan(("offset",), -3), []),
        (GreaterThan(("shard",), 0), [Range(1, 4, 20)]),
        (In(("shard",), (1, 7)), [Range(1, 4, 20)]),
    ],
)
def test_ranges_are_narrowed_exactly(condition: Filter, left: list[Range]) -> None:
    assert narrowed([Range(0, 0, 10), Range(1, 4, 20)], [condition]) == left


# -- rights --------------------------------------------------------------------------------------------


def test_a_right_that_is_taken_away_ends_what_reads(batch: Any, region: SparkRegion, thousand: str) -> None:
    identity = region.identity("leaver", ["subscribe acme/payments/*"])
    reader = batch(thousand, identity="leaver")
    planned = reader.partitions()
    region.client.request(PutRights(identity, []))
    with pytest.raises(RequestError, match="may use with subscribe") as refused:
        numbers(reader, planned)
    assert refused.value.code is Code.NOT_FOUND_OR_FORBIDDEN


def test_a_reader_reaches_no_other_region_than_it_names(
    region: SparkRegion, thousand: str, tmp_path: Path
) -> None:
    # A profile that says eu-west and leads to us-east, with the authority and an identity of us-east.
    (tmp_path / "eu-west").mkdir()
    profile = json.loads(region.folder.profile.read_text())
    profile |= {"region": "eu-west", "authority": str(region.folder.bundle), "identity": "-"}
    (tmp_path / "eu-west" / "profile.json").write_text(json.dumps(profile))
    options = region.options(thousand, str(region.key_path("analyst")))
    options |= {"region": "eu-west", "home": str(tmp_path)}
    with pytest.raises(RequestError, match="eu-west"):
        StreamBatchReader(read_options(options, streaming=False), SCHEMA).partitions()


# -- losses --------------------------------------------------------------------------------------------


@pytest.fixture
def ring(region: SparkRegion) -> str:
    """An ephemeral stream that has held more than its ring does."""
    name = region.stream(shards=1, durability=Durability("ephemeral"), ring_bytes=1 << 20)
    overfill(region, name)
    return name


def overfill(region: SparkRegion, name: str) -> None:
    with region.client.stream(name).publisher(batch_records=100) as publisher:
        for number in range(3000):
            publisher.send(b"%-1000d" % number)


def begins(region: SparkRegion, name: str) -> int:
    found: int = region.client.describe_stream(name).state[0].log_start
    return found


def test_records_that_are_gone_are_an_error_that_names_them(
    batch: Any, region: SparkRegion, ring: str
) -> None:
    with pytest.raises(DataLossError) as lost:
        batch(ring, startingOffsets='{"0": 0}').partitions()
    assert f"Offsets 0 to {begins(region, ring) - 1} of shard 0 of {ring} are gone" in str(lost.value)
    assert "failOnDataLoss" in lost.value.hint


def test_records_that_go_between_plan_and_task_are_an_error_too(
    batch: Any, region: SparkRegion, ring: str
) -> None:
    reader = batch(ring)
    planned = reader.partitions()
    first = planned[0].first
    overfill(region, ring)
    with pytest.raises(DataLossError, match=rf"Offsets {first} to 2999 of shard 0 .* are gone \(ring\)"):
        numbers(reader, planned)


def test_going_on_without_them_is_asked_for(batch: Any, region: SparkRegion, ring: str) -> None:
    tolerant = batch(ring, startingOffsets='{"0": 0}', failOnDataLoss="false")
    assert read(tolerant) == list(range(begins(region, ring), 3000))
    planned = tolerant.partitions()
    with region.client.stream(ring).publisher(batch_records=100) as publisher:
        for number in range(3000, 3400):
            publisher.send(b"%-1000d" % number)
    assert numbers(tolerant, planned) == list(range(begins(region, ring), 3000))


def test_a_range_that_the_log_lost_is_an_error_and_not_a_wait(
    batch: Any, region: SparkRegion, thousand: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a plan holds after the log lost its end in a crash: offsets that are not there (again).
    monkeypatch.setattr(stream_reader, "QUIET_S", 0.1)
    end = begins_and_ends(region, thousand)[1]
    incarnation = region.client.describe_stream(thousand).incarnation.hex()
    reader = batch(thousand)
    for first in (end - 3, end + 1):
        with pytest.raises(DataLossError, match=f"to {end + 4} of shard 0 .* lost its end in a crash"):
            list(reader.read(StreamRange(incarnation, Range(0, first, end + 5))))


def untold(region: SparkRegion, stream: str, monkeypatch: pytest.MonkeyPatch, **said: str) -> list[int]:
    """The first three answers say of shard 0 what a broker says that does not serve it. How often it was asked."""
    real, asked = felix.RegionClient.describe_stream, list[int]()

    async def describe(client: felix.RegionClient, name: Any) -> Any:
        asked.append(len(asked))
        state = await real(client, name)
        assert all(shard.leader_epoch for shard in state.state)
        if len(asked) <= 3:
            zeros = {"log_start": 0, "high_watermark": 0, "log_end": 0, "leader_epoch": 0}
            shards = [
                msgspec.structs.replace(shard, **zeros, **said) if shard.shard == 0 else shard
                for shard in state.state
            ]
            state = msgspec.structs.replace(state, state=shards)
        return state

    monkeypatch.setattr(felix.RegionClient, "describe_stream", describe)
    return asked


UNTOLD = [{"stopped": "Shard 0 is about to be served."}, {"leader": "b2"}]


@pytest.mark.parametrize("said", UNTOLD)
@pytest.mark.parametrize("tolerant", ["true", "false"])
def test_a_shard_that_nobody_serves_for_a_moment_lost_nothing(
    batch: Any, region: SparkRegion, monkeypatch: pytest.MonkeyPatch, said: dict[str, str], tolerant: str
) -> None:
    monkeypatch.setattr(stream_reader, "QUIET_S", 0.1)
    name = region.stream(shards=1)
    region.publish(name, 0, 10)
    incarnation = region.client.describe_stream(name).incarnation.hex()
    reader = batch(name, failOnDataLoss=tolerant)
    asked = untold(region, name, monkeypatch, **said)
    with ThreadPoolExecutor(1) as pool:
        # Planned when the log reached further than the broker hands out for now.
        task = pool.submit(numbers, reader, [StreamRange(incarnation, Range(0, 0, 20))])
        until(lambda: len(asked) >= 2 or task.done(), "the task asks how far the shard reaches")
        region.publish(name, 10, 20)
        assert task.result() == list(range(20))


@pytest.mark.parametrize("said", UNTOLD)
def test_a_plan_waits_for_all_shards_and_leaves_none_out(
    batch: Any, streaming: Any, region: SparkRegion, monkeypatch: pytest.MonkeyPatch, said: dict[str, str]
) -> None:
    monkeypatch.setattr(stream_reader, "SERVED_AGAIN_S", 0.01)
    name = region.stream(shards=2)
    region.publish(name, 0, 100)
    query = streaming(name, startingOffsets="earliest", failOnDataLoss="false")
    end = query.latestOffset(query.initialOffset(), ALL)
    for plan in (
        lambda: read(batch(name)),
        lambda: numbers(query, query.partitions(query.initialOffset(), end)),
    ):
        with monkeypatch.context() as patch:
            untold(region, name, patch, **said)
            assert plan() == list(range(100))
    with monkeypatch.context() as patch:
        untold(region, name, patch, **said)
        assert query.latestOffset(end, ALL) == end
    untold(region, name, monkeypatch, **said)
    monkeypatch.setattr(stream_reader, "SERVED_S", 0.0)
    with pytest.raises(UnavailableError, match=rf"Shard 0 of {name} does not serve: .*(about|b2)") as refused:
        batch(name).partitions()
    assert refused.value.code is Code.SHARD_STOPPED


def begins_and_ends(region: SparkRegion, name: str) -> tuple[int, int]:
    shard = region.client.describe_stream(name).state[0]
    return shard.log_start, shard.high_watermark


async def test_holes_of_compaction_are_no_loss_wherever_a_range_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_settings, "COMPACTED_SEGMENTS", SegmentLimits(segment_bytes_max=4_000))
    # A pass of the broker's own that is under way would take the place of the test's.
    monkeypatch.setattr("region.node.COMPACT_CHECK_S", 3600)
    folder, name = make_region(tmp_path, "us-east"), "acme/ops/seats"
    options = {"region": "us-east", "home": str(tmp_path), "stream": name}
    async with running(folder) as node, felix.connect(profile=folder_profile(tmp_path)) as client:
        await client.create_stream(name, views=Views(compaction=Compaction()))
        async with client.stream(name).publisher(batch_records=7) as publisher:
            for number in range(600):
                await publisher.send(b"%d" % number, key=b"seat %d" % (number * 7 % 25))
                if number % 60 == 59:
                    await publisher.flush()  # a segment ends with what is written at once
        await node.broker.streams.maintenance.compact(now_ms())
    # Started anew, so that nothing that was compacted away is sent from memory.
    async with running(folder):
        whole = StreamBatchReader(read_options(options, streaming=False), SCHEMA)
        kept = await asyncio.to_thread(read, whole)
        assert 25 <= len(kept) < 300
        assert {number * 7 % 25 for number in kept} == set(range(25))
        hole = next(number for number in range(600) if number not in kept)
        pieces = StreamBatchReader(read_options(options | {"minPartitions": "40"}, streaming=False), SCHEMA)
        assert await asyncio.to_thread(read, pieces) == kept
        ends_in_a_hole = options | {"endingOffsets": json.dumps({"0": hole + 1})}
        reader = StreamBatchReader(read_options(ends_in_a_hole, streaming=False), SCHEMA)
        assert await asyncio.to_thread(read, reader) == [number for number in kept if number < hole]


def folder_profile(home: Path) -> felix.Profile:
    return felix.load_profile("us-east", home=home)


# -- micro-batches -------------------------------------------------------------------------------------


def test_a_query_begins_now_or_where_it_is_told(streaming: Any, thousand: str, region: SparkRegion) -> None:
    ends = {str(each.shard): each.high_watermark for each in region.client.describe_stream(thousand).state}
    assert streaming(thousand).initialOffset()["shards"] == ends
    assert streaming(thousand, startingOffsets="earliest").initialOffset()["shards"] == {"0": 0, "1": 0}
    chosen = streaming(thousand, startingOffsets='{"0": 3, "1": "latest"}').initialOffset()
    assert chosen["shards"] == ends | {"0": 3}


def test_micro_batches_follow_each_other_without_gap_or_overlap(streaming: Any, region: SparkRegion) -> None:
    name = region.stream()
    reader = streaming(name, startingOffsets="earliest", minPartitions="3")
    stands, found = reader.initialOffset(), []
    for first in range(0, 300, 100):
        region.publish(name, first, first + 100)
        end = reader.latestOffset(stands, ALL)
        planned = reader.partitions(stands, end)
        assert [each.value for each in planned] == [each.value for each in reader.partitions(stands, end)]
        found += numbers(reader, planned)
        stands = end
    assert sorted(found) == list(range(300))
    assert reader.latestOffset(stands, ALL) == stands
    assert reader.partitions(stands, stands) == []
    assert reader.reportLatestOffset() == stands


def test_limits_are_kept(streaming: Any, thousand: str, region: SparkRegion) -> None:
    by_records = streaming(thousand, startingOffsets="earliest", maxRecordsPerTrigger="300")
    assert by_records.getDefaultReadLimit() == ReadMaxRows(300)
    assert steps(by_records) == [300, 300, 300, 100]
    size = sum(shard.size_bytes for shard in region.client.describe_stream(thousand).state)
    by_bytes = streaming(thousand, startingOffsets="earliest", maxBytesPerTrigger=str(size // 4))
    assert by_bytes.getDefaultReadLimit() == ReadMaxBytes(size // 4)
    assert 4 <= len(steps(by_bytes)) <= 6
    both = streaming(
        thousand, startingOffsets="earliest", maxRecordsPerTrigger="900", maxBytesPerTrigger=str(size // 2)
    )
    assert steps(both)[0] < 600
    assert streaming(thousand).getDefaultReadLimit() == ALL


def steps(reader: StreamingReader) -> list[int]:
    """How many offsets each micro-batch has, up to the end."""
    found, stands = [], reader.initialOffset()
    while (end := reader.latestOffset(stands, reader.getDefaultReadLimit())) != stands:
        found.append(sum(each.end - each.first for each in reader.partitions(stands, end)))
        stands = end
    return found


def test_available_now_leaves_what_comes_later_for_the_next_run(streaming: Any, region: SparkRegion) -> None:
    name = region.stream()
    region.publish(name, 0, 100)
    reader = streaming(name, startingOffsets="earliest")
    reader.prepareForTriggerAvailableNow()
    region.publish(name, 100, 150)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    assert numbers(reader, reader.partitions(start, end)) == list(range(100))
    assert reader.latestOffset(end, ALL) == end


def test_a_stream_that_was_made_anew_is_told_from_the_old_one(streaming: Any, region: SparkRegion) -> None:
    name = region.stream()
    region.publish(name, 0, 100)
    strict, tolerant = streaming(name), streaming(name, failOnDataLoss="false")
    stands = strict.latestOffset(strict.initialOffset(), ALL)
    begun = streaming(name, startingOffsets="earliest").initialOffset()
    planned = strict.partitions(begun, stands)
    region.client.delete_stream(name)
    region.client.create_stream(name, shards=2)
    region.publish(name, 100, 250)

    with pytest.raises(StreamRecreatedError, match=f"it was incarnation {stands['incarnation']}") as refused:
        strict.latestOffset(stands, ALL)
    assert "new checkpoint" in refused.value.hint and refused.value.code is Code.CONFLICT
    # Also where the micro-batch was planned before, or is repeated after a restart.
    with pytest.raises(StreamRecreatedError):
        numbers(strict, planned)

    assert numbers(tolerant, planned) == []
    end = tolerant.latestOffset(stands, ALL)
    assert numbers(tolerant, tolerant.partitions(stands, end)) == list(range(100, 250))
    assert tolerant.latestOffset(end, ALL) == end


def test_what_retention_took_while_a_query_stood_still_is_an_error(
    streaming: Any, region: SparkRegion, ring: str
) -> None:
    reader = streaming(ring)
    stands = reader.initialOffset() | {"shards": {"0": 5}}
    with pytest.raises(DataLossError, match=f"Offsets 5 to {begins(region, ring) - 1} of shard 0"):
        reader.latestOffset(stands, ALL)
    tolerant = streaming(ring, failOnDataLoss="false")
    end = tolerant.latestOffset(stands, ALL)
    assert numbers(tolerant, tolerant.partitions(stands, end)) == list(range(begins(region, ring), 3000))


def test_a_connection_is_closed_with_its_thread(region: SparkRegion, thousand: str) -> None:
    def sessions(wanted: int) -> None:
        until(lambda: region.client.describe().gauges["sessions"] == wanted, f"{wanted} sessions")

    options = read_options(region.options(thousand), streaming=True)
    sessions(1)  # of the test's own client, once those of readers before it have ended
    with RegionThread(options.access):
        sessions(2)
    sessions(1)
