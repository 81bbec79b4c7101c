"""A sample for `felix bridge plan`: which records are read, and which example stands for a field."""

from types import SimpleNamespace
from typing import cast

from departures import terms

from bridge.crossing import PATH_UNKNOWN
from bridge.sample import Sample, SampledRecord, judge, shares_of
from felix.batch import Record
from felix.messages import ShardState
from felix.provenance import PATH_HEADER
from policy.transform import Action, FieldOutcome, Transform


def record(offset: int, outcome: str, before: str, after: str | None) -> SampledRecord:
    field = FieldOutcome("rating", Action.KEEP, before, after)
    return SampledRecord(0, offset, outcome, "", (field,), None, None, {})


def shard(number: int, log_start: int, end: int) -> ShardState:
    return ShardState(number, log_start, end, end, 1)


def sample(*records: SampledRecord) -> Sample:
    return Sample("g", "acme/ops/x", "eu-west", "acme/ops/x", records, False)


def test_the_example_of_a_field_is_one_record_that_crosses() -> None:
    found = sample(
        record(0, "filtered", '"G"', None),
        record(1, "crosses", "null", "null"),
        record(2, "crosses", '"R"', '"R"'),
        record(3, "crosses", '"PG"', '"PG"'),
    ).fields()
    assert [(each.records, each.before, each.after) for each in found] == [(4, '"R"', '"R"')]


def test_a_value_that_no_record_lets_cross_becomes_nothing() -> None:
    found = sample(record(0, "withheld", '"R"', None), record(1, "withheld", "null", None)).fields()
    assert [(each.before, each.after) for each in found] == [('"R"', "")]


def test_what_a_short_shard_leaves_is_read_of_longer_ones() -> None:
    shards = [shard(0, 10, 30), shard(1, 0, 0), shard(2, 0, 4)]
    assert shares_of(shards, 12) == [(0, 22, 8), (2, 0, 4)]
    assert shares_of(shards, 24) == [(0, 10, 20), (2, 0, 4)]
    assert shares_of(shards, 10_000) == [(0, 10, 20), (2, 0, 4)]
    assert sum(share for _, _, share in shares_of(shards, 3)) == 3


def test_records_of_a_third_region_stay_and_terms_without_a_grant_are_not_named_by_an_empty_one() -> None:
    onward = SimpleNamespace(offset=7, key=None, headers={PATH_HEADER: b"ap-south,us-east"})
    (found,) = judge(0, [cast(Record, onward)], "", terms(), cast(Transform, None))
    assert found.outcome == "withheld"
    assert found.reason.endswith("came from ap-south, and this grant does not allow onward transfer.")


def test_a_record_whose_producer_names_regions_is_shown_as_withheld_for_that() -> None:
    onward = SimpleNamespace(offset=7, key=None, headers={PATH_HEADER: b"ap-south"})
    allowed = terms(onward=True)
    (found,) = judge(0, [cast(Record, onward)], "", allowed, cast(Transform, None), bridged={6, 8})
    assert (found.outcome, found.reason.partition(":")[0]) == ("withheld", PATH_UNKNOWN)
