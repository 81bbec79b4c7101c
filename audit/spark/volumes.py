"""Volumes: records and bytes by link, stream, purpose, basis and day; and the time line for the page.

Days are UTC. Legal fields come from the signed terms (`audit.spark.agreements`), as everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from audit.spark.begun_again import BEGUN_AGAIN
from audit.spark.reconciliation import PASSED_BY
from audit.spark.table import Column, Type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
HOURLY_SPAN_MS_MAX: Final = 4 * DAY_MS
"""Up to four days the time line shows hours (96 bars fit a page's width); longer spans show days."""
BARS_MAX: Final = 1_000
"""Beyond so many days a bar is of several: a leaf may say any time."""
PICTURED_MAX: Final = 24
"""Streams, and regions, that pictures tell apart: those of the most records. Nobody tells more apart, and a log may name as many as it has leaves."""
OTHER_STREAMS: Final = "other streams"

COLUMNS: Final = (
    Column("day", Type.TEXT, "Day", "UTC"),
    Column("source_region", Type.TEXT, "From region"),
    Column("destination_region", Type.TEXT, "To region"),
    Column("stream", Type.TEXT, "Stream"),
    Column("purpose", Type.TEXT, "Purpose"),
    Column("basis", Type.TEXT, "Legal basis"),
    Column("records", Type.COUNT, "Records crossed"),
    Column("record_bytes", Type.COUNT, "Bytes crossed: keys, headers and payloads"),
    Column("withheld", Type.COUNT, "Records withheld"),
    Column("denied", Type.COUNT, "Attempts denied"),
)

WORTH: Final = ("purpose IS NULL", "day", "source_region", "destination_region", "stream", "purpose", "basis")
"""The order of what a report lists of volumes that are too many: those under signed terms first."""


def by_day(leaves: DataFrame, terms: DataFrame) -> DataFrame:
    """One row per UTC day, link, stream, purpose and basis. `leaves` are those of the window."""
    return leaves.sparkSession.sql(
        f"""
        SELECT CAST(date_from_unix_date(CAST(leaves.time_ms DIV {DAY_MS} AS INT)) AS STRING) AS day,
               leaves.source_region, leaves.destination_region, leaves.stream, terms.purpose, terms.basis,
               coalesce(sum(leaves.records) FILTER (WHERE leaves.kind = 'INTENT'), 0) AS records,
               coalesce(sum(leaves.record_bytes) FILTER (WHERE leaves.kind = 'INTENT'), 0) AS record_bytes,
               coalesce(sum(leaves.records) FILTER (WHERE leaves.kind = 'WITHHELD'), 0) AS withheld,
               count(*) FILTER (WHERE leaves.kind = 'DENY') AS denied
        FROM {{leaves}} AS leaves LEFT JOIN {{terms}} AS terms ON leaves.terms_hash = terms.terms_hash AND (terms.signed OR
            (leaves.source_region = terms.source_region AND leaves.destination_region = terms.destination_region))
        WHERE (leaves.kind IN ('INTENT', 'WITHHELD') AND leaves.side = 'egress' AND NOT ({PASSED_BY}) AND NOT {BEGUN_AGAIN})
              OR leaves.kind = 'DENY'
        GROUP BY ALL
        ORDER BY day, source_region, destination_region, stream, purpose, basis
        """,  # noqa: S608
        leaves=leaves,
        terms=terms,
    )


def bucket_ms(first_ms: int, last_ms: int) -> int:
    """How wide one bar of the time line is: an hour, or whole days."""
    span_ms = last_ms - first_ms
    return HOUR_MS if span_ms <= HOURLY_SPAN_MS_MAX else DAY_MS * -(-span_ms // (DAY_MS * BARS_MAX))


def pictured(transfers: Iterable[Mapping[str, Any] | Any], name: str = "stream") -> list[str]:
    """Of what the register's rows name so, what pictures tell apart."""
    sums = Counter[str]()
    for row in transfers:
        if row[name] and (moved := row["records"] + row["withheld"]):
            sums[row[name]] += moved
    return sorted(sorted(sums, key=lambda each: (-sums[each], each))[:PICTURED_MAX])


def time_line(leaves: DataFrame, width_ms: int, streams: Sequence[str]) -> DataFrame:
    """Records crossed and withheld per bucket of `width_ms` and stream, from egress leaves of the window; those that are not among `streams` as one."""
    from pyspark.sql.functions import lit, when

    told_apart = when(leaves["stream"].isin(list(streams)), leaves["stream"]).otherwise(lit(OTHER_STREAMS))
    return leaves.sparkSession.sql(
        f"""
        SELECT time_ms - time_ms % {int(width_ms)} AS start_ms, stream,
               coalesce(sum(records) FILTER (WHERE kind = 'INTENT'), 0) AS records,
               coalesce(sum(record_bytes) FILTER (WHERE kind = 'INTENT'), 0) AS record_bytes,
               coalesce(sum(records) FILTER (WHERE kind = 'WITHHELD'), 0) AS withheld
        FROM {{leaves}} WHERE kind IN ('INTENT', 'WITHHELD') AND side = 'egress' AND records > 0 AND NOT ({PASSED_BY}) AND NOT {BEGUN_AGAIN}
        GROUP BY ALL ORDER BY start_ms, stream
        """,  # noqa: S608  # an int
        leaves=leaves.withColumn("stream", told_apart),
    )
