"""Options of the data source `felix`: read once, checked, and refused with a sentence that names the option.

Pure. Spark hands options over as text, with names in any case. Docs: docs/spark.md.

Invariant: no value here is a secret. A private key that somebody puts into an option would stand in plans and logs, so
it is refused, without being repeated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Final, NamedTuple

from audit.spark.stream_access import Access
from audit.spark.stream_offsets import EARLIEST, LATEST, Bound, bound_of
from felix.errors import Code, FelixError, RequestError
from felix.names import StreamName, parse_region

FORMAT: Final = "felix"
ACCESS_OPTIONS: Final = ("region", "stream", "identity", "home")
READ_OPTIONS: Final = (
    *ACCESS_OPTIONS, "startingOffsets", "startingTimestamp", "endingOffsets", "minPartitions", "maxRecordsPerTrigger",
    "maxBytesPerTrigger", "failOnDataLoss", "pushFilters",
)  # fmt: skip
WRITE_OPTIONS: Final = (*ACCESS_OPTIONS, "compress", "writeId")
SPARK_OPTIONS: Final = ("checkpointlocation", "queryname", "path")
"""What Spark itself adds to a sink's options, in its own spelling."""

PARTITIONS_MAX: Final = 100_000
"""A partition costs a connection; more than this is a mistake, not a plan."""
COUNT_MAX: Final = (1 << 63) - 1
DIGITS_MAX: Final = len(str(COUNT_MAX))
"""Of a number in an option: Python reads no number of any length."""
TIME_MS_MAX: Final = 253_402_300_799_999
"""The last millisecond of the year 9999: Python has no time behind it."""
WRITE_ID_CHARS_MAX: Final = 100
"""A name, not a document."""


class ReadOptions(NamedTuple):
    """What to read. `starting` counts unless there is `starting_ms`; limits of a trigger are 0 where there are none."""

    access: Access
    starting: Bound
    starting_ms: int | None
    ending: Bound
    partitions_min: int
    records_max: int
    bytes_max: int
    fail_on_loss: bool
    push_filters: bool


class WriteOptions(NamedTuple):
    """How to publish. `write_id` is empty where the job did not name one."""

    access: Access
    compress: bool
    write_id: str


def _refused(name: str, value: str, expected: str) -> RequestError:
    return RequestError(
        f"The option {name!r} is {value[:120]!r}; expected {expected}.", code=Code.CONFIG_INVALID
    )


def _given(options: Mapping[str, str], known: tuple[str, ...], spare: tuple[str, ...] = ()) -> dict[str, str]:
    """The options by their names as documented. Raises RequestError for one that does not exist, or holds a key."""
    names = {name.lower(): name for name in known}
    found = {}
    for name, value in options.items():
        if name.lower() in spare:
            continue
        if name.lower() not in names:
            near = get_close_matches(name.lower(), names, 1)
            hint = f"Did you mean {names[near[0]]}?" if near else f"It has {', '.join(known)}."
            if name.lower() == "path":
                hint = "Name the stream with .option('stream', 'tenant/namespace/name')."
            raise RequestError(
                f"The data source {FORMAT!r} has no option {name!r} here.",
                code=Code.CONFIG_INVALID,
                hint=hint,
            )
        if "-----BEGIN" in value:
            raise RequestError(
                f"The option {name!r} holds a key or a certificate.",
                code=Code.CONFIG_INVALID,
                hint="Options stand in plans and logs: give the path of a file that the machines have, and take this key "
                "out of use.",
            )
        found[names[name.lower()]] = value
    return found


def _access(given: Mapping[str, str]) -> Access:
    for name, expected in (("region", "its name, as in us-east"), ("stream", "tenant/namespace/name")):
        if not given.get(name):
            raise RequestError(
                f"The data source {FORMAT!r} needs the option {name!r}: {expected}.", code=Code.CONFIG_INVALID
            )
    for name, parse in (("region", parse_region), ("stream", StreamName.parse)):
        try:
            parse(given[name])
        except FelixError as error:
            raise RequestError(f"The option {name!r}: {error}", code=error.code) from error
    return Access(given["region"], given["stream"], given.get("identity", ""), given.get("home", ""))


def _flag(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = given.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise _refused(name, text, "true or false")
    return text == "true"


def _count(given: Mapping[str, str], name: str, most: int) -> int:
    text = given.get(name)
    if text is None:
        return 0
    number = _number(text)
    if number is None or not 0 < number <= most:
        raise _refused(name, text, f"a number from 1 to {most}")
    return number


def _number(text: str) -> int | None:
    """A number in decimal digits; None for another text, or one with more digits than any option has room for."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX else None


def _bound(given: Mapping[str, str], name: str, default: Bound) -> Bound:
    text = given.get(name)
    if text is None:
        return default
    expected = 'earliest, latest, or JSON of every shard, as in {"0": 120, "1": "earliest"}'
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    try:
        return bound_of(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise _refused(name, text, expected) from error


def _time_ms(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    expected = "a time with its zone, as in 2026-11-20T08:00:00Z, or ms since 1970, up to the year 9999"
    found = _number(text)
    if found is None:
        try:
            time = datetime.fromisoformat(text)
        except ValueError as error:
            raise _refused(name, text, expected) from error
        if time.tzinfo is None:
            raise _refused(name, text, expected)
        found = int(time.timestamp() * 1000)
    if not 0 <= found <= TIME_MS_MAX:
        raise _refused(name, text, expected)
    return found


def read_options(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    """Options of `spark.read` or `spark.readStream`. Raises RequestError naming the option and what was expected."""
    given = _given(options, READ_OPTIONS)
    only_batch, only_streaming = (
        ("endingOffsets", "pushFilters"),
        ("maxRecordsPerTrigger", "maxBytesPerTrigger"),
    )
    for name in only_batch if streaming else only_streaming:
        if name in given:
            here, there = (
                ("a streaming query", "spark.read") if streaming else ("a batch", "spark.readStream")
            )
            raise RequestError(
                f"The option {name!r} is of no use in {here}; it belongs to {there}.",
                code=Code.CONFIG_INVALID,
            )
    if "startingOffsets" in given and "startingTimestamp" in given:
        raise RequestError(
            "Give 'startingOffsets' or 'startingTimestamp', not both.", code=Code.CONFIG_INVALID
        )
    starting = _bound(given, "startingOffsets", LATEST if streaming else EARLIEST)
    ending = _bound(given, "endingOffsets", LATEST)
    if not streaming and starting == LATEST:
        raise _refused("startingOffsets", LATEST, "an earlier place: a batch from the latest offset is empty")
    if ending == EARLIEST:
        raise _refused("endingOffsets", EARLIEST, "a later place: a batch up to the earliest offset is empty")
    return ReadOptions(
        _access(given),
        starting,
        _time_ms(given, "startingTimestamp"),
        ending,
        _count(given, "minPartitions", PARTITIONS_MAX),
        _count(given, "maxRecordsPerTrigger", COUNT_MAX),
        _count(given, "maxBytesPerTrigger", COUNT_MAX),
        _flag(given, "failOnDataLoss", True),
        _flag(given, "pushFilters", False),
    )


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Options of `df.write` or `df.writeStream`. Raises RequestError naming the option and what was expected."""
    given = _given(options, WRITE_OPTIONS, SPARK_OPTIONS)
    write_id = given.get("writeId", "")
    if len(write_id) > WRITE_ID_CHARS_MAX or not (write_id.isascii() and write_id.isprintable()):
        raise _refused("writeId", write_id, f"at most {WRITE_ID_CHARS_MAX} printable ASCII characters")
    return WriteOptions(_access(given), _flag(given, "compress", False), write_id)
