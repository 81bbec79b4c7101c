"""Tables: what a report says, as rows, and their bytes in Parquet, CSV and JSON.

What lives here: a named, typed table that has left Spark, and its encodings. Pure but for the files it is told
to write. Who may call: `audit.spark.report`, `audit.spark.page`, tests.

Invariants:

- same rows, same bytes: no time, no random name, no host in a file, columns and rows in the order given;
- a time is whole milliseconds since the Unix epoch inside a row, ISO 8601 in UTC in CSV and JSON, and
  `timestamp[ms, UTC]` in Parquet;
- text in CSV that a spreadsheet would take for a formula is preceded by an apostrophe, and its control and format
  characters stand as escapes, as does a semicolon in an item of a list (CSV alone; Parquet and, once decoded, JSON hold what the log holds).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from audit.leaf import TIME_MS_MAX
from felix.visible import visible
from policy.quantity import AFTER_CALENDAR

_ITEM_ESCAPE: Final = re.compile(r"\\(?=x3b|x5c)")
"""The backslash of a text that reads as what stands for a semicolon, or for such a backslash."""
_FORMULA: Final = re.compile(r"(?:^|(?<=;))(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")
"""Where a spreadsheet may take what follows for a formula: at the beginning of a cell, and behind a semicolon, which begins one where it is the list
separator; also behind blanks, which some strip, and where the sign is a full-width one. Tabs and line feeds stand as escapes before this is asked."""
COUNT_MAX: Final = (1 << 63) - 1
"""The most that a COUNT column holds."""
LIST_SEPARATOR: Final = "; "
"""Between the items of a list in CSV, which has no lists."""

Value = str | int | bool | list[str] | None


class Type(StrEnum):
    """What a column holds."""

    TEXT = "text"
    COUNT = "count"
    TIME = "time"
    FLAG = "flag"
    LIST = "list"


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name in files, its type, its heading for people and one sentence on what it says."""

    name: str
    type: Type
    heading: str
    says: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns. Every row has a value for each column, in the columns' order."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]

    def records(self) -> list[dict[str, Any]]:
        """The rows as dictionaries, times as milliseconds."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def total(self, column: str) -> int:
        """The sum of a COUNT column, empty cells as nothing; at most what such a column holds."""
        index = [each.name for each in self.columns].index(column)
        return min(COUNT_MAX, sum(value for row in self.rows if isinstance(value := row[index], int)))


def iso(time_ms: int | None) -> str | None:
    """ISO 8601 in UTC with milliseconds: 2013-01-01T00:00:00.000Z. A time that no calendar has is told in words: signed documents
    and cosignatures may state any."""
    if time_ms is None:
        return None
    if time_ms > TIME_MS_MAX:
        return AFTER_CALENDAR
    moment = datetime.fromtimestamp(time_ms // 1000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{time_ms % 1000:03d}Z"


def pattern_to_regex(column: str) -> str:
    """SQL: the names that a column's pattern of streams fits. A part may be or end in *; everything else stands for itself, whatever
    somebody wrote there. So no star has another one to share characters with, and no text takes long."""
    literal = rf"replace({column}, '\\E', '\\E\\\\E\\Q')"
    return rf"concat('^\\Q', regexp_replace({literal}, '[*](?=/|\\z)', '\\\\E[^/]*\\\\Q'), '\\E\\z')"


def total(column: str, where: str) -> str:
    """SQL: the sum of a column over rows for which `where` is true. More than a column holds is shown as the most that it does: a leaf may
    say any number."""
    return (
        f"coalesce(try_sum({column}) FILTER (WHERE {where}), CASE WHEN count({column}) FILTER (WHERE {where}) > 0 "
        f"THEN {COUNT_MAX} END, 0)"
    )


def one_row_each(cases: Sequence[str]) -> str:
    """SQL for a list of columns: of a row, one row for each of `cases` (structs of the same fields) that is not null, and the fields as
    columns. One query so finds what a UNION of one for each case would: that takes Spark seconds to plan, and reads all as often."""
    return f"inline(filter(array({', '.join(cases)}), each -> each IS NOT NULL))"


def from_rows(
    name: str, title: str, columns: tuple[Column, ...], rows: Sequence[Mapping[str, Any] | Any]
) -> Table:
    """A table of Spark rows (or dictionaries), each read by column name."""
    picked = tuple(tuple(_plain(row[column.name]) for column in columns) for row in rows)
    return Table(name, title, columns, picked)


def _plain(value: Any) -> Value:
    return list(value) if isinstance(value, (list, tuple)) else value


def json_rows(table: Table) -> list[dict[str, Any]]:
    """The rows as they stand in report.json."""
    times = {column.name for column in table.columns if column.type is Type.TIME}
    return [
        {name: iso(value) if name in times else value for name, value in row.items()}
        for row in table.records()
    ]


def encode_csv(table: Table) -> str:
    """RFC 4180: a heading line of column names, lines ended by CRLF (so that a lone CR in a text is quoted too)."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([column.name for column in table.columns])
    for row in table.rows:
        writer.writerow(
            [_csv_cell(value, column.type) for value, column in zip(row, table.columns, strict=True)]
        )
    return out.getvalue()


def _csv_cell(value: Value, kind: Type) -> str:
    if value is None:
        return ""
    if kind is Type.TIME and isinstance(value, int):
        return iso(value) or ""
    if kind is Type.FLAG:
        return "true" if value else "false"
    if isinstance(value, list):
        # A semicolon in an item would make two items of it. What stands for one is told from the same text.
        text = LIST_SEPARATOR.join(
            visible(_ITEM_ESCAPE.sub(r"\\x5c", item)).replace(";", "\\x3b") for item in value
        )
    else:
        text = visible(str(value))
    return _FORMULA.sub("'", text) if kind in (Type.TEXT, Type.LIST) else text


def write_parquet(table: Table, path: Path) -> None:
    """One Parquet file, zstd, with the columns' own types. Needs pyarrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        Type.TEXT: pa.string(),
        Type.COUNT: pa.int64(),
        Type.TIME: pa.timestamp("ms", tz="UTC"),
        Type.FLAG: pa.bool_(),
        Type.LIST: pa.list_(pa.string()),
    }
    schema = pa.schema([(column.name, types[column.type]) for column in table.columns])
    arrays = [
        pa.array([row[index] for row in table.rows], type=field.type) for index, field in enumerate(schema)
    ]
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), path, compression="zstd")
