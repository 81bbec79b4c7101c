"""Options of the data source: every refusal names the option."""

from __future__ import annotations

import pytest

from audit.spark.stream_options import read_options, write_options
from felix.errors import Code, RequestError

LEAST = {"region": "us-east", "stream": "acme/payments/orders"}


def test_the_least_reads_a_batch_from_the_beginning_and_a_stream_from_now_on() -> None:
    assert read_options(LEAST, streaming=False).starting == "earliest"
    assert read_options(LEAST, streaming=True).starting == "latest"
    assert read_options(LEAST, streaming=False).fail_on_loss


def test_names_of_options_are_taken_in_any_case() -> None:
    options = read_options(
        LEAST
        | {"STARTINGOFFSETS": '{"0": 4, "1": "latest"}', "minpartitions": "8", "failondataloss": "FALSE"},
        streaming=False,
    )
    assert options.starting == {0: 4, 1: "latest"}
    assert options.partitions_min == 8
    assert not options.fail_on_loss


@pytest.mark.parametrize(
    "text", ["2013-01-01T00:00:01Z", "2013-01-01T01:00:01+01:00", "1356998401000", "00001356998401000"]
)
def test_times_have_a_zone_or_are_milliseconds(text: str) -> None:
    assert read_options(LEAST | {"startingTimestamp": text}, streaming=True).starting_ms == 1_356_998_401_000


@pytest.mark.parametrize(
    ("given", "streaming", "problem"),
    [
        ({"region": ""}, False, "needs the option 'region'"),
        ({"stream": "orders"}, False, "'stream'.*three parts"),
        ({"region": "US East"}, False, "'region'.*DNS label"),
        ({"startingOffset": "latest"}, True, "no option 'startingOffset'.*Did you mean startingOffsets"),
        ({"path": "acme/payments/orders"}, False, r"'path'.*option\('stream'"),
        ({"startingOffsets": "7"}, False, "'startingOffsets' is '7'"),
        ({"startingOffsets": '{"0": -1}'}, False, "'startingOffsets'"),
        ({"startingOffsets": "latest"}, False, "'startingOffsets'.*empty"),
        ({"endingOffsets": "earliest"}, False, "'endingOffsets'.*empty"),
        ({"endingOffsets": "latest"}, True, "'endingOffsets'.*no use in a streaming query"),
        ({"maxRecordsPerTrigger": "5"}, False, "'maxRecordsPerTrigger'.*no use in a batch"),
        ({"maxBytesPerTrigger": "0"}, True, "'maxBytesPerTrigger' is '0'; expected a number"),
        ({"minPartitions": "many"}, False, "'minPartitions' is 'many'"),
        ({"startingTimestamp": "2013-01-01T00:00:00"}, False, "'startingTimestamp'.*zone"),
        ({"startingTimestamp": "0", "startingOffsets": "earliest"}, False, "not both"),
        ({"startingTimestamp": "253402300800000"}, False, "'startingTimestamp'.*up to the year 9999"),
        (
            {"startingTimestamp": "9999-12-31T23:59:59-10:00"},
            False,
            "'startingTimestamp'.*up to the year 9999",
        ),
        ({"startingTimestamp": "0001-01-01T00:00:00+10:00"}, False, "'startingTimestamp'.*ms since 1970"),
        ({"startingTimestamp": "9" * 5000}, False, "'startingTimestamp'.*up to the year 9999"),
        ({"minPartitions": "1" * 5000}, False, "'minPartitions'.*expected a number"),
        ({"startingOffsets": "[" * 100_000}, False, "'startingOffsets'.*JSON of every shard"),
        ({"failOnDataLoss": "no"}, False, "'failOnDataLoss' is 'no'; expected true or false"),
    ],
)
def test_a_bad_option_is_named(given: dict[str, str], streaming: bool, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        read_options(LEAST | given, streaming=streaming)


def test_a_private_key_is_refused_and_not_repeated() -> None:
    with pytest.raises(RequestError) as refused:
        read_options(LEAST | {"identity": "-----BEGIN PRIVATE KEY-----\nMC4CAQ"}, streaming=False)
    assert refused.value.code is Code.CONFIG_INVALID
    assert "'identity'" in str(refused.value) and "MC4CAQ" not in str(refused.value)


def test_writing_knows_what_spark_adds_and_nothing_else() -> None:
    options = write_options(LEAST | {"checkpointLocation": "/data/c", "queryName": "q", "compress": "true"})
    assert options.compress and options.write_id == ""
    with pytest.raises(RequestError, match="no option 'startingOffsets'"):
        write_options(LEAST | {"startingOffsets": "earliest"})
    with pytest.raises(RequestError, match="'writeId'"):
        write_options(LEAST | {"writeId": "x" * 101})
