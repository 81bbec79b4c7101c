"""The Spark data source `felix`: streams of one region, read and written by Spark as a client like any other.

    import felix.spark

    felix.spark.register(spark)
    orders = (
        spark.read.format("felix")  # or spark.readStream
        .option("region", "us-east").option("identity", "analyst").option("stream", "acme/payments/orders")
        .load()
    )

What lives here: the data source that Spark calls by name, and its registration. Options are read in
`audit.spark.stream_options`, ranges planned and read in `audit.spark.stream_reader`, rows published in
`audit.spark.stream_writer`. docs/spark.md is the page for users.

Executors import this module by name: Felix is installed there, or `audit.spark.session` ships it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from audit.spark.stream_columns import check_read_schema, check_write_schema, read_ddl
from audit.spark.stream_options import FORMAT, read_options, write_options
from audit.spark.stream_reader import FilteringBatchReader, StreamBatchReader, StreamingReader
from audit.spark.stream_writer import BatchWriter, StreamingWriter
from felix.errors import Code, RequestError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


def register(spark: SparkSession) -> None:
    """Make `format("felix")` known to a session. An entry point: `felix.spark` calls it."""
    spark.dataSource.register(StreamSource)


class StreamSource(DataSource):
    """`format("felix")`; options in docs/spark.md."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> str:
        """All columns, as Spark SQL; `.schema(…)` asks for fewer."""
        return read_ddl()

    def reader(self, schema: StructType) -> StreamBatchReader:
        """For `spark.read`. Raises RequestError naming an option or a column."""
        check_read_schema(schema)
        options = read_options(self.options, streaming=False)
        return (FilteringBatchReader if options.push_filters else StreamBatchReader)(options, schema)

    def streamReader(self, schema: StructType) -> StreamingReader:
        """For `spark.readStream`. Raises RequestError naming an option or a column."""
        check_read_schema(schema)
        return StreamingReader(read_options(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """For `df.write`. Raises RequestError naming an option or a column."""
        if overwrite:
            raise RequestError(
                "A log is appended to, never overwritten.",
                code=Code.UNSUPPORTED,
                hint="Write with .mode('append'), or delete the stream first.",
            )
        check_write_schema(schema)
        return BatchWriter.of(write_options(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        """For `df.writeStream`. Raises RequestError naming an option or a column."""
        check_write_schema(schema)
        return StreamingWriter(write_options(self.options))
