"""Records as Arrow and back: what a consumer would see record by record, in columns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from felix.batch import NewRecord, decode_records, encode_batch
from felix.errors import RequestError

pytest.importorskip("pyarrow")
import pyarrow as pa

from audit.spark.stream_columns import READ_COLUMNS, Cut, arrow_of, rows_of

ARROW = {
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "binary": pa.binary(),
    "map<string,binary>": pa.map_(pa.string(), pa.binary()),
}
SCHEMA = pa.schema([(name, ARROW[kind]) for name, kind in READ_COLUMNS])
NOW = "ab" * 16
RECORDS = st.lists(
    st.builds(
        NewRecord,
        st.binary(max_size=20),
        st.none() | st.binary(max_size=8),
        st.none()
        | st.dictionaries(st.text("abc", min_size=1, max_size=3), st.binary(max_size=5), max_size=3),
    ),
    min_size=1,
    max_size=20,
)


def cut(records: list[NewRecord], base: int, first: int, end: int, *, compress: bool = False) -> Cut:
    batch = encode_batch(records, shard=3, compress=compress)
    header = replace(batch.header, base_offset=base, append_time_ms=1_356_998_401_000)
    return Cut(batch.with_header(header), first, end)


def seen(each: Cut) -> list[dict[str, Any]]:
    """The records as the SDK hands them out."""
    return [
        {
            "shard": 3,
            "offset": record.offset,
            "time": record.timestamp_ms,
            "key": None if record.key is None else bytes(record.key),
            "headers": dict(record.headers),
            "value": bytes(record.payload),
        }
        for record in list(decode_records(each.batch))[each.first : each.end]
    ]


@settings(deadline=None)  # the first Arrow array takes longer than all others
@given(st.lists(RECORDS, min_size=1, max_size=3), st.data(), st.booleans())
def test_arrow_holds_what_the_sdk_hands_out(
    batches: list[list[NewRecord]], data: st.DataObject, compress: bool
) -> None:
    cuts = []
    for base, records in enumerate(batches):
        first = data.draw(st.integers(0, len(records) - 1))
        end = data.draw(st.integers(first + 1, len(records)))
        cuts.append(cut(records, base * 100, first, end, compress=compress))
    made = arrow_of(cuts, SCHEMA, NOW)
    made.validate(full=True)
    found = [
        row | {"headers": dict(row["headers"]), "time": int(row.pop("timestamp").timestamp() * 1000)}
        for row in made.to_pylist()
    ]
    assert found == [row for each in cuts for row in seen(each)]


def test_only_the_columns_that_are_asked_for_are_made() -> None:
    wanted = pa.schema([("value", pa.binary()), ("incarnation", pa.string()), ("offset", pa.int64())])
    made = arrow_of([cut([NewRecord(b"a"), NewRecord(b"b")], 7, 1, 2)], wanted, NOW)
    assert made.to_pylist() == [{"value": b"b", "incarnation": NOW, "offset": 8}]


@settings(deadline=None)
@given(RECORDS)
def test_rows_become_the_records_that_they_were_read_from(records: list[NewRecord]) -> None:
    table = arrow_of([cut(records, 0, 0, len(records))], SCHEMA, NOW).select(["key", "headers", "value"])
    rows = list(rows_of(table))
    assert [(row.value, row.key or b"", row.headers or {}) for row in rows] == [
        (record.payload, record.key or b"", dict(record.headers or {})) for record in records
    ]


def test_text_is_published_as_utf8() -> None:
    headers = pa.array([[("id", "7")], None], pa.map_(pa.string(), pa.string()))
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["é", "x"]), pa.array([None, "k"]), headers], ["value", "key", "headers"]
    )
    assert list(rows_of(batch)) == [("é".encode(), None, {"id": b"7"}), (b"x", b"k", None)]


def test_a_row_without_a_value_is_refused() -> None:
    with pytest.raises(RequestError, match="'value' is null"):
        list(rows_of(pa.RecordBatch.from_arrays([pa.array([b"a", None])], ["value"])))
    named = pa.array([[("id", None)]], pa.map_(pa.string(), pa.binary()))
    with pytest.raises(RequestError, match="header 'id' of a row is null"):
        list(rows_of(pa.RecordBatch.from_arrays([pa.array([b"a"]), named], ["value", "headers"])))
