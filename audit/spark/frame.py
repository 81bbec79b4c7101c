"""Rows of the driver as a frame for the queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def frame_of(spark: SparkSession, rows: Sequence[tuple[Any, ...]], columns: str) -> DataFrame:
    """These rows, in one partition, under `columns`, as SQL names and types them; a struct among the values is a dictionary.

    Brought by Arrow, the rows are part of the plan: where there are none, Spark leaves out what would be joined with them."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    kind = StructType.fromDDL(columns)
    assert isinstance(kind, StructType)
    fields = to_arrow_schema(kind, timezone="UTC")
    arrays = [pa.array([row[at] for row in rows], type=field.type) for at, field in enumerate(fields)]
    return spark.createDataFrame(pa.Table.from_arrays(arrays, schema=fields), kind).coalesce(1)
