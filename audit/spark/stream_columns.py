"""Columns: records of a stream as Arrow, and rows of Arrow as records.

A Felix batch is columns already, so reading one does no work per record except for headers: offsets become Arrow's by one
conversion, keys and values stay the bytes that came. Only the columns that are asked for are made.

Invariant: what `arrow_of` returns keeps the batches that it was made of in memory until it is dropped.

Who may call: `audit.spark.stream_reader`, `audit.spark.stream_writer`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from felix.batch import Batch, Columns, decode_columns, decode_headers
from felix.errors import Code, RequestError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

READ_COLUMNS: Final = (
    ("shard", "int"),
    ("offset", "bigint"),
    ("timestamp", "timestamp"),
    ("key", "binary"),
    ("headers", "map<string,binary>"),
    ("value", "binary"),
)
"""By name, with Spark SQL types."""
ASKED_COLUMNS: Final = (("incarnation", "string"),)
"""What a schema may ask for besides: the same in every row, for joins with the audit log, which names records by it."""
WRITE_COLUMNS: Final = {
    "key": ("binary", "string"),
    "headers": ("map<string,binary>", "map<string,string>"),
    "value": ("binary", "string"),
}
"""What a row to publish may have; text is published as UTF-8."""

MapItems = list[tuple[str, bytes]]


def read_ddl() -> str:
    """All columns of a stream, as Spark SQL. A `timestamp` is one with its zone, whatever spark.sql.timestampType makes of the word."""
    return ", ".join(
        f"{name} {'timestamp_ltz' if kind == 'timestamp' else kind}" for name, kind in READ_COLUMNS
    )


def check_read_schema(schema: StructType) -> None:
    """Raises RequestError where a schema asks for no column, for one that there is not, or as another type."""
    if not schema.fields:
        # Arrow batches without a column have no rows either, and every record would be left out.
        raise RequestError(
            "The schema asks for no column of the stream.",
            code=Code.CONFIG_INVALID,
            hint="Read at least one: .schema('offset bigint').",
        )
    known = dict((*READ_COLUMNS, *ASKED_COLUMNS))
    for field in schema.fields:
        kind = field.dataType.simpleString()
        if field.name not in known:
            raise RequestError(
                f"A Felix stream has no column {field.name!r}; it has {', '.join(known)}.",
                code=Code.CONFIG_INVALID,
            )
        if kind != known[field.name]:
            raise RequestError(
                f"The column {field.name!r} is {known[field.name]}, not {kind}.",
                code=Code.CONFIG_INVALID,
                hint="Ask for it as timestamp_ltz, which is a time with its zone, and cast that."
                if kind == "timestamp_ntz"
                else "Read it as it is and cast it: df.value.cast('string').",
            )


def check_write_schema(schema: StructType) -> None:
    """Raises RequestError where rows of this schema make no records."""
    found = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name, kind in found.items():
        if name not in WRITE_COLUMNS:
            raise RequestError(
                f"A record has no place for the column {name!r}; it has key, headers and value.",
                code=Code.CONFIG_INVALID,
                hint="Select what is to be published: df.select('key', 'value').",
            )
        if kind not in WRITE_COLUMNS[name]:
            raise RequestError(
                f"The column {name!r} is {kind}; expected {' or '.join(WRITE_COLUMNS[name])}.",
                code=Code.CONFIG_INVALID,
            )
    if "value" not in found:
        raise RequestError("Rows to publish need a column 'value'.", code=Code.CONFIG_INVALID)


# -- reading -------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """Records `first` to before `end` of a batch, counted within it."""

    batch: Batch
    first: int
    end: int


class _Part(NamedTuple):
    cut: Cut
    columns: Columns
    incarnation: str

    @property
    def rows(self) -> int:
        return self.cut.end - self.cut.first


def arrow_of(cuts: Sequence[Cut], schema: pa.Schema, incarnation: str) -> pa.RecordBatch:
    """The records of several batches of one incarnation (hex) as one Arrow batch of `schema`.

    Raises RequestError(BATCH_MALFORMED) where a body is not what its header says.
    """
    parts = [_Part(cut, decode_columns(cut.batch), incarnation) for cut in cuts]
    made = [
        pa.RecordBatch.from_arrays([_MAKERS[field.name](part, field.type) for field in schema], schema=schema)
        for part in parts
    ]
    return made[0] if len(made) == 1 else pa.concat_batches(made)


def _shard(part: _Part, kind: pa.DataType) -> pa.Array:
    return _repeated(array("i", [part.cut.batch.header.shard]), part.rows, kind)


def _timestamp(part: _Part, kind: pa.DataType) -> pa.Array:
    return _repeated(array("q", [part.cut.batch.header.append_time_ms * 1000]), part.rows, kind)


def _repeated(value: array[int], rows: int, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(value * rows)])


def _offset(part: _Part, kind: pa.DataType) -> pa.Array:
    base = part.cut.batch.header.base_offset
    values = array("q", range(base + part.cut.first, base + part.cut.end))
    return pa.Array.from_buffers(kind, part.rows, [None, pa.py_buffer(values)])


def _incarnation(part: _Part, kind: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(part.incarnation, kind), part.rows)


def _value(part: _Part, kind: pa.DataType) -> pa.Array:
    return _binary(part, part.columns.payload_ends, part.columns.payloads, kind)


def _key(part: _Part, kind: pa.DataType) -> pa.Array:
    if part.columns.key_ends is None:
        return pa.nulls(part.rows, kind)
    keys = _binary(part, part.columns.key_ends, part.columns.keys, kind)
    # An empty key is no key.
    return pc.if_else(pc.equal(pc.binary_length(keys), 0), pa.scalar(None, kind), keys)


def _binary(part: _Part, ends: tuple[int, ...], blob: memoryview, kind: pa.DataType) -> pa.Array:
    """Entries that lie one behind the other, taken as they are: `ends` are Arrow's offsets but for the first."""
    first, end = part.cut.first, part.cut.end
    offsets = array("i", (ends[first - 1] if first else 0,))
    offsets.extend(ends[first:end])
    return pa.Array.from_buffers(kind, part.rows, [None, pa.py_buffer(offsets), pa.py_buffer(blob)])


def _headers(part: _Part, kind: pa.DataType) -> pa.Array:
    ends, blob = part.columns.headers_ends, part.columns.headers
    if ends is None:
        return _no_headers(part.rows, kind)
    found: list[MapItems] = []
    for begin, end in pairwise(
        (ends[part.cut.first - 1] if part.cut.first else 0, *ends[part.cut.first : part.cut.end])
    ):
        found.append(list(decode_headers(blob[begin:end]).items()) if end > begin else [])
    return pa.array(found, kind)


def _no_headers(rows: int, kind: pa.DataType) -> pa.Array:
    offsets = pa.py_buffer(array("i", bytes(4 * (rows + 1))))
    entries = pa.array([], pa.struct([kind.key_field, kind.item_field]))
    return pa.Array.from_buffers(kind, rows, [None, offsets], children=[entries])


_MAKERS: Final[Mapping[str, Callable[[_Part, pa.DataType], pa.Array]]] = {
    "shard": _shard,
    "offset": _offset,
    "timestamp": _timestamp,
    "key": _key,
    "headers": _headers,
    "value": _value,
    "incarnation": _incarnation,
}


# -- writing -------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row to publish."""

    value: bytes
    key: bytes | None
    headers: dict[str, bytes] | None


def rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    """The rows of an Arrow batch, in order. Raises RequestError where a value is null, or a header is."""
    names = batch.schema.names
    values = _bytes(batch, "value")
    keys: Sequence[bytes | None] = _bytes(batch, "key") if "key" in names else [None] * batch.num_rows
    headers: Sequence[Any] = (
        batch.column("headers").to_pylist() if "headers" in names else [None] * batch.num_rows
    )
    for value, key, pairs in zip(values, keys, headers, strict=True):
        if value is None:
            raise RequestError(
                "A row's 'value' is null, and a record has one.",
                hint="Leave such rows out, df.where('value is not null'), or publish an empty value.",
            )
        yield Row(value, key, _header_bytes(pairs) if pairs else None)


def _bytes(batch: pa.RecordBatch, name: str) -> list[bytes | None]:
    column = batch.column(name)
    if not pa.types.is_binary(column.type):
        column = pc.cast(column, pa.binary())
    found: list[bytes | None] = column.to_pylist()
    return found


def _header_bytes(pairs: Sequence[tuple[str, Any]]) -> dict[str, bytes]:
    headers = {}
    for name, value in pairs:
        if value is None:
            raise RequestError(f"The header {name[:80]!r} of a row is null, and a header has a value.")
        headers[name] = value.encode() if isinstance(value, str) else value
    return headers
