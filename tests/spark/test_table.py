"""Tables: the same rows in three encodings, and nothing that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.spark.table import Column, Table, Type, encode_csv, from_rows, iso, json_rows, write_parquet

COLUMNS = (
    Column("name", Type.TEXT, "Name"),
    Column("count", Type.COUNT, "Count"),
    Column("at", Type.TIME, "At"),
    Column("sure", Type.FLAG, "Sure"),
    Column("tags", Type.LIST, "Tags"),
)
ROWS = [
    {"name": 'a, "b"\nc', "count": 3, "at": 1_357_000_000_123, "sure": True, "tags": ["x", "y"]},
    {"name": None, "count": None, "at": None, "sure": None, "tags": []},
]


def test_times_are_iso_8601_in_utc() -> None:
    assert iso(1_357_000_000_123) == "2013-01-01T00:26:40.123Z"
    assert iso(None) is None


def test_csv_reads_back_as_written_and_line_feeds_are_seen() -> None:
    table = from_rows("t", "T", COLUMNS, ROWS)
    lines = list(csv.reader(io.StringIO(encode_csv(table))))
    assert lines == [
        ["name", "count", "at", "sure", "tags"],
        ['a, "b"\\nc', "3", "2013-01-01T00:26:40.123Z", "true", "x; y"],
        ["", "", "", "", ""],
    ]


def test_no_two_lists_are_one_csv_cell() -> None:
    """Items are of texts that somebody chose: one that holds the separator is not two."""
    lists = (
        ["contact; health"],
        ["contact", "health"],
        ["contact;", "health"],
        ["contact", ";health"],
        [r"contact\x3b health"],
        [r"contact\x5cx3b health"],
    )
    cells = {encode_csv(Table("t", "T", (COLUMNS[4],), ((each,),))) for each in lists}
    assert len(cells) == len(lists)
    for each, cell in zip(
        lists, (encode_csv(Table("t", "T", (COLUMNS[4],), ((one,),))) for one in lists), strict=True
    ):
        (_, (read,)) = csv.reader(io.StringIO(cell, newline=""))
        assert len(read.split("; ")) == len(each)


def test_json_names_every_column() -> None:
    rows = json_rows(from_rows("t", "T", COLUMNS, ROWS))
    assert rows[0]["at"] == "2013-01-01T00:26:40.123Z" and rows[0]["tags"] == ["x", "y"]
    assert rows[1] == {"name": None, "count": None, "at": None, "sure": None, "tags": []}


@given(
    st.sampled_from("=+-@\t\r") | st.just(""),
    st.text(max_size=20) | st.text("; =+-@\uff1d\uff0b\uff0d\uff20a", max_size=20),
)
def test_no_csv_cell_begins_a_formula(start: str, text: str) -> None:
    """Nor where a semicolon separates cells."""
    table = Table("t", "T", (COLUMNS[0], COLUMNS[4]), ((start + text, ["a", start + text]),))
    _, row = csv.reader(io.StringIO(encode_csv(table), newline=""))
    for cell in (cell for whole in row for cell in whole.split(";")):
        assert not cell.lstrip().startswith(
            ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
        )


def test_parquet_keeps_types_and_is_the_same_twice(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    table = from_rows("t", "T", COLUMNS, ROWS)
    write_parquet(table, tmp_path / "a.parquet")
    write_parquet(table, tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    read = pq.read_table(tmp_path / "a.parquet")
    assert str(read.schema.field("at").type) == "timestamp[ms, tz=UTC]"
    assert read.column("tags").to_pylist() == [["x", "y"], []]
    assert read.column("count").to_pylist() == [3, None]


def test_a_table_without_rows_still_has_its_columns(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    write_parquet(Table("t", "T", COLUMNS, ()), tmp_path / "e.parquet")
    assert pq.read_table(tmp_path / "e.parquet").column_names == [column.name for column in COLUMNS]
